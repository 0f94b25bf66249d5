"""Integer expressions over a call's sizes: read once (`grammar`), never run by Python's ``eval``.

An expression is a tree of plain tuples. It is evaluated on ints or on symbolic ints, compiled to
instructions (`bytecode`), and saved as JSON. The grammar is a part of Python's: integers, names,
``x.size`` and ``x.ndim`` (in calls of kernels, where dims have no names, also ``x.shape[0]``, which
counts as a name), ``+ - * // %``, comparisons (chained, too), ``and or not``,
``a if condition else b``, and the functions ``min``, ``max``, ``ceildiv``, ``next_pow2(n)`` (the
least power of 2 that is no less than n) and ``bucket(n, 1, 8, 64)`` (the first of these integers
that is no less, the last where there is none). Division rounds down, as in Python. What a dtype
variable is, a condition says: ``T == float16``, ``T in (float16, bfloat16)``, and with ``!=`` and
``not in``; in the same way it says where a call runs: ``device == cuda``. Of the device
``sm_count``, ``capability`` and ``memory_bus`` are numbers. An
expression may be a dtype itself, ``float64 if T == float64 else float32``; its value is then the
dtype's place in `ferrule.dtypes.ALL`.
"""

from __future__ import annotations

import ast
import bisect
import keyword
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import dtypes
from ..errors import RuleError

DEVICES = ("cpu", "cuda", "metal")  # the kinds of devices
# Of a device: its streaming multiprocessors, or on the CPU the threads that kernels run on; ten
# times its compute capability, and the bits of its memory bus, 0 of what is not NVIDIA's.
DEVICE_NUMBERS = ("sm_count", "capability", "memory_bus")

MOST = 2**63 - 1  # of a literal: C's int64_t
DEEPEST = 100  # levels of a tree, so that no recursion over it ends the stack
ATTRIBUTES = ("size", "ndim")


# What Python's parser makes of a sign between two operands, and what computes it.
_ARITHMETIC: dict[str, tuple[type[ast.AST], Callable[[Any, Any], Any]]] = {
    "+": (ast.Add, operator.add),
    "-": (ast.Sub, operator.sub),
    "*": (ast.Mult, operator.mul),
    "//": (ast.FloorDiv, operator.floordiv),
    "%": (ast.Mod, operator.mod),
}
_COMPARISONS: dict[str, tuple[type[ast.AST], Callable[[Any, Any], Any]]] = {
    "==": (ast.Eq, operator.eq),
    "!=": (ast.NotEq, operator.ne),
    "<": (ast.Lt, operator.lt),
    "<=": (ast.LtE, operator.le),
    ">": (ast.Gt, operator.gt),
    ">=": (ast.GtE, operator.ge),
}
BETWEEN_TWO = {**_ARITHMETIC, **_COMPARISONS}
# Of two arguments, but for next_pow2, which takes one, and bucket; min and max take more.
FUNCTIONS = ("min", "max", "ceildiv", "next_pow2", "bucket")

# How often each kind of node has operands, for trees that come from a file.
_OPERANDS = {
    **dict.fromkeys((*BETWEEN_TWO, "min", "max", "ceildiv", "and", "or"), 2),
    "next_pow2": 1,
    "neg": 1,
    "not": 1,
    "if": 3,
}
CONDITIONS = frozenset({*_COMPARISONS, "and", "or", "not", "is"})

Node = tuple[Any, ...]


class Ints:
    """How ints are compared and chosen from. Symbolic ints have a class of their own, so that a
    comparison need not become a guard."""

    minimum: Callable[[Any, Any], Any] = staticmethod(min)
    maximum: Callable[[Any, Any], Any] = staticmethod(max)

    @staticmethod
    def holds(condition: Any) -> bool:
        """Whether a condition of a rule holds."""
        return bool(condition)

    @staticmethod
    def broadcast(a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """The shape that two broadcast to; None where they do not."""
        short, long = sorted((a, b), key=len)
        short = (1,) * (len(long) - len(short)) + short
        if any(m != n and 1 not in (m, n) for m, n in zip(short, long, strict=True)):
            return None
        return tuple(n if m == 1 else m for m, n in zip(short, long, strict=True))

    @staticmethod
    def choose(condition: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """``then()`` where the condition holds, else ``otherwise()``."""
        return then() if condition else otherwise()

    @staticmethod
    def bucket(n: Any, sizes: Sequence[int]) -> Any:
        """The first of ascending sizes that is no less than n, the last where there is none."""
        at = bisect.bisect_left(sizes, n, hi=len(sizes) - 1)
        return sizes[at]

    @staticmethod
    def next_pow2(n: Any) -> Any:
        """The least power of 2 that is no less than n."""
        return 1 << max(n - 1, 0).bit_length()

    @staticmethod
    def both(a: Any, b: Callable[[], Any]) -> Any:
        """``a and b()``."""
        return bool(a) and bool(b())

    @staticmethod
    def either(a: Any, b: Callable[[], Any]) -> Any:
        """``a or b()``."""
        return bool(a) or bool(b())

    @staticmethod
    def negated(a: Any) -> Any:
        """``not a``."""
        return not a


class Expression:
    """One expression.

    Attributes:
        node: the tree: ``("int", 2)``, ``("name", "B")``, ``("size", "x")``, ``("ndim", "x")``,
            ``("+", a, b)`` …, ``("is", "T", "float16")``, ``("dtype", "T")``
        condition: whether it is true or false, instead of a number.
    """

    __slots__ = ("_arrays", "_of_device", "_variables", "condition", "node")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.condition = node[0] in CONDITIONS
        self._arrays: frozenset[str] | None = None
        self._variables: frozenset[str] | None = None
        self._of_device: bool | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expression) and self.node == other.node

    def __hash__(self) -> int:
        return hash(self.node)

    def __repr__(self) -> str:
        return f"Expression({str(self)!r})"

    def __str__(self) -> str:
        return _text(self.node)

    @property
    def names(self) -> frozenset[str]:
        """The dims that it names."""
        return frozenset(node[1] for node in _nodes(self.node) if node[0] == "name")

    @property
    def arrays(self) -> frozenset[str]:
        """The arrays whose size or rank it names."""
        if self._arrays is None:  # each call asks
            names = (node[1] for node in _nodes(self.node) if node[0] in ATTRIBUTES)
            self._arrays = frozenset(names)
        return self._arrays

    @property
    def attributes(self) -> frozenset[str]:
        """The ``"x.size"`` and ``"x.ndim"`` that it names."""
        nodes = (node for node in _nodes(self.node) if node[0] in ATTRIBUTES)
        return frozenset(f"{node[1]}.{node[0]}" for node in nodes)

    @property
    def variables(self) -> frozenset[str]:
        """The dtype variables that it names."""
        if self._variables is None:  # each call asks
            nodes = _nodes(self.node)
            named = {node[1] for node in nodes if node[0] == "is" and node[2] not in DEVICES}
            named |= {node[1] for node in nodes if node[0] == "dtype"}
            self._variables = frozenset(named.difference(dtypes.BY_NAME))
        return self._variables

    @property
    def of_dtype(self) -> bool:
        """Whether its value is a dtype."""
        return is_dtype(self.node)

    @property
    def constant(self) -> bool:
        """Whether it is the same for all calls."""
        return not (self.names or self.arrays or self.variables or self.asks_kind)

    @property
    def asks_kind(self) -> bool:
        """Whether it asks what kind of device a call runs on."""
        return any(node[0] == "is" and node[2] in DEVICES for node in _nodes(self.node))

    @property
    def of_device(self) -> bool:
        """Whether it may name something of the device that a call runs on."""
        if self._of_device is None:  # each call asks
            self._of_device = self.asks_kind or not self.names.isdisjoint(DEVICE_NUMBERS)
        return self._of_device

    def evaluate(self, values: Mapping[str, Any], on: type[Ints] = Ints) -> Any:
        """The expression's value.

        Args:
            values: of the names, of ``"x.size"`` and ``"x.ndim"``, of ``":T"`` the full name of
                the dtype, and of ``":device"`` the device's kind.
            on: what compares and chooses.

        Raises:
            ZeroDivisionError: it divides by zero.
        """
        return _value(self.node, values, on)

    def to_json(self) -> Any:
        """Nested lists."""
        return _listed(self.node)

    @staticmethod
    def from_json(data: object) -> Expression:
        """The reverse of `to_json`.

        Raises:
            RuleError: these are no lists of `to_json`.
        """
        return Expression(_read(data))


def is_dtype(node: Node) -> bool:
    """Whether a node's value is a dtype."""
    return node[0] == "dtype" or (node[0] == "if" and is_dtype(node[2]))


def _nodes(node: Node) -> list[Node]:
    nodes = [node]
    for part in node[1:]:
        if isinstance(part, tuple):
            nodes += _nodes(part)
    return nodes


def _value(node: Node, values: Mapping[str, Any], on: type[Ints]) -> Any:
    kind = node[0]
    if kind == "int":
        return node[1]
    if kind == "name":
        return values[node[1]]
    if kind in ATTRIBUTES:
        return values[f"{node[1]}.{kind}"]
    if kind == "is":
        return values[f":{node[1]}"] == node[2]
    if kind == "dtype":
        name = node[1] if node[1] in dtypes.BY_NAME else values[f":{node[1]}"]
        return dtypes.ALL.index(dtypes.BY_NAME[name])

    def part(i: int) -> Any:
        return _value(node[i], values, on)

    match kind:
        case "if":
            return on.choose(part(1), lambda: part(2), lambda: part(3))
        case "and":
            return on.both(part(1), lambda: part(2))
        case "or":
            return on.either(part(1), lambda: part(2))
        case "not":
            return on.negated(part(1))
        case "neg":
            return -part(1)
        case "next_pow2":
            return on.next_pow2(part(1))
        case "bucket":
            return on.bucket(part(1), [size for _, size in node[2:]])
    a, b = part(1), part(2)
    match kind:
        case "ceildiv":
            return -(-a // b)
        case "min":
            return on.minimum(a, b)
        case "max":
            return on.maximum(a, b)
    return BETWEEN_TWO[kind][1](a, b)


# How tightly the signs of the grammar bind, loosest first.
_LEVELS = (
    ("if",),
    ("or",),
    ("and",),
    ("not",),
    ("==", "!=", "<", "<=", ">", ">=", "is"),
    ("+", "-"),
    ("*", "//", "%"),
    ("neg",),
)
_LEVEL = {kind: n for n, kinds in enumerate(_LEVELS) for kind in kinds}
_ATOM = len(_LEVELS)


def _text(node: Node) -> str:
    """An expression as it is written, with no more parentheses than it needs."""
    kind = node[0]
    if kind in ("int", "name", "dtype"):
        return str(node[1])
    if kind in ATTRIBUTES:
        return f"{node[1]}.{kind}"
    if kind == "is":
        return f"{node[1]} == {node[2]}"

    def part(i: int, least: int) -> str:
        text = _text(node[i])
        return text if _LEVEL.get(node[i][0], _ATOM) >= least else f"({text})"

    level = _LEVEL.get(kind, _ATOM)
    match kind:
        case "if":
            return f"{part(2, 1)} if {part(1, 1)} else {part(3, 0)}"
        case "not":
            return f"not {part(1, level)}"
        case "neg":
            return f"-{part(1, level)}"
        case _ if kind in FUNCTIONS:
            return f"{kind}({', '.join(_text(operand) for operand in node[1:])})"
    # A comparison of comparisons would be a chain.
    return f"{part(1, level)} {kind} {part(2, level + 1)}"


def is_bucket(sizes: Sequence[Node]) -> bool:
    """Whether these may be the sizes of a bucket: integers that ascend."""
    numbers = [node[1] for node in sizes if node[0] == "int"]
    return bool(sizes) and len(numbers) == len(sizes) and numbers == sorted(set(numbers))


def _listed(node: Node) -> list[Any]:
    return [_listed(part) if isinstance(part, tuple) else part for part in node]


def _comparable(variable: str, name: str) -> bool:
    """Whether a variable may be compared with this name of a dtype or device."""
    if name in DEVICES:
        return variable == "device"
    return name in dtypes.BY_NAME and variable not in (*dtypes.BY_NAME, *DEVICES)


def _read(data: object, depth: int = 0) -> Node:
    if depth >= DEEPEST or not isinstance(data, list) or not data or not isinstance(data[0], str):
        raise RuleError("a saved expression is damaged")
    kind, *parts = data
    if kind == "int" and len(parts) == 1 and type(parts[0]) is int and 0 <= parts[0] <= MOST:
        return ("int", parts[0])
    is_name = kind in ("name", "dtype") or kind in ATTRIBUTES
    if is_name and len(parts) == 1 and isinstance(parts[0], str):
        name = parts[0]
        if not (name.isascii() and name.isidentifier()) or keyword.iskeyword(name):
            raise RuleError("a saved expression is damaged")
        return (kind, name)
    if kind == "is" and len(parts) == 2 and isinstance(parts[1], str):
        variable = _read(["name", parts[0]])[1]
        if not _comparable(variable, parts[1]):
            raise RuleError("a saved expression is damaged")
        return (kind, variable, parts[1])
    nodes = [_read(part, depth + 1) for part in parts]
    if not (is_bucket(nodes[1:]) if kind == "bucket" else _OPERANDS.get(kind) == len(parts)):
        raise RuleError("a saved expression is damaged")
    for i, node in enumerate(nodes):
        wanted = kind in ("and", "or", "not") or (kind == "if" and i == 0)
        if (node[0] in CONDITIONS) != wanted:
            raise RuleError("a saved expression is damaged")
    if any(map(is_dtype, nodes)) and (kind != "if" or not all(map(is_dtype, nodes[1:]))):
        raise RuleError("a saved expression is damaged")
    return (kind, *nodes)
