"""A rule as a list of int64 words, which ``runtime/rule.h`` interprets on every call.

The words are data: they hold no addresses, and say the same in every process. ``runtime/rule.h``
says how they are arranged, and has the same numbers as the enums here; a test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

from .. import dtypes
from ..errors import RuleError
from .argument import Argument, Broadcast, Star, name_of
from .expression import DEVICE_NUMBERS, DEVICES, Expression
from .rule import Rule

FORMAT = 2  # FR_PROGRAM_FORMAT, like all that follows a constant of rule.h
MAX_ARGUMENTS = 32
MAX_NDIM = 16
MAX_SYMBOLS = 64
MAX_STACK = 128
MAX_DTYPES = 63
NO_DTYPE = -1
NO_DEFAULT = MAX_DTYPES
OPTIONAL, NUMBER = 1, 2  # flags of an input
OF_DEVICE = (":device", *DEVICE_NUMBERS)  # symbols, whose values the device of a call says
SIZE, NDIM, DTYPE, VALUE, STAR_SIZE = 0, 1, 2, 3, 4  # kinds of an attribute
DIM_SYMBOL, DIM_CODE, DIM_STAR, DIM_BROADCAST = 0, 1, 2, 3  # kinds of an output's dim

_HEADER_WORDS = 9
_INT64 = range(-(2**63), 2**63)
_ATTRIBUTES = {"size": SIZE, "ndim": NDIM}


class Opcode(IntEnum):
    """Instructions. ``INT``, ``SYMBOL`` and those that jump have an operand in the next word; a
    jump's says how many words are left out. ``BUCKET`` has the number of its sizes, and these."""

    END = 0
    INT = 1
    SYMBOL = 2
    JUMP = 3
    JUMP_IF_FALSE = 4
    AND = 5
    OR = 6
    NOT = 7
    NEG = 8
    ADD = 9
    SUB = 10
    MUL = 11
    FLOORDIV = 12
    MOD = 13
    CEILDIV = 14
    MIN = 15
    MAX = 16
    EQ = 17
    NE = 18
    LT = 19
    LE = 20
    GT = 21
    GE = 22
    NEXT_POW2 = 23
    BUCKET = 24


_OF_TWO = {
    "+": Opcode.ADD, "-": Opcode.SUB, "*": Opcode.MUL, "//": Opcode.FLOORDIV, "%": Opcode.MOD,
    "ceildiv": Opcode.CEILDIV, "min": Opcode.MIN, "max": Opcode.MAX, "==": Opcode.EQ,
    "!=": Opcode.NE, "<": Opcode.LT, "<=": Opcode.LE, ">": Opcode.GT, ">=": Opcode.GE,
}  # fmt: skip
_OF_ONE = {"not": Opcode.NOT, "neg": Opcode.NEG, "next_pow2": Opcode.NEXT_POW2}


class RuleProgram(NamedTuple):
    """A rule, ready for ``fr_rule_bind``.

    Attributes:
        words: the program, each an int64.
        symbols: what ``fr_rule_result.symbols`` are: dims, then ``"x.size"`` and ``"x.ndim"``, then
            ``"S_size"`` of ``*S`` and numbers by their names, then ``":T"``, the dtype of a
            variable; last, what extra expressions name of `OF_DEVICE`, which ``fr_rule_bind``
            leaves as it is.
        variables: the dtype variables that ``fr_rule_result.dtypes`` are of. A dtype is its place
            in `ferrule.dtypes.ALL`.
    """

    words: tuple[int, ...]
    symbols: tuple[str, ...]
    variables: tuple[str, ...]


def compile_expression(expression: Expression, symbols: Mapping[str, int]) -> list[int]:
    """An expression as instructions.

    Args:
        expression: the expression.
        symbols: the number of each name, and of each ``"x.size"``, ``"x.ndim"`` and ``":T"``.

    Raises:
        RuleError: it names no symbol, or is nested too deeply, or has an integer that does not fit
            in 64 bits.
    """
    stack = _Stack(expression, symbols)
    stack.push(expression.node)
    return [*stack.words, Opcode.END]


class _Stack:
    """Writes the instructions of an expression, and counts how many values they keep at a time."""

    def __init__(self, expression: Expression, symbols: Mapping[str, int]) -> None:
        self.expression, self.symbols = expression, symbols
        self.words: list[int] = []
        self.height = 0

    def push(self, node: tuple[object, ...]) -> None:
        """Instructions that leave a node's value on the stack."""
        kind, *parts = node
        if kind in ("int", "name", *_ATTRIBUTES):
            self.leaf(str(kind), parts[0])
            return
        if kind == "dtype":
            name = str(parts[0])
            known = name in dtypes.BY_NAME
            self.leaf(*(("int", _number_of(name)) if known else ("name", f":{name}")))
            return
        if kind == "is":
            self.leaf("name", f":{parts[0]}")
            self.leaf("int", _number_of(str(parts[1])))
            self.words.append(Opcode.EQ)
            self.height -= 1
            return
        first, *operands = (part for part in parts if isinstance(part, tuple))
        self.push(first)
        if kind in _OF_ONE:
            self.words.append(_OF_ONE[str(kind)])
        elif kind in _OF_TWO:
            self.push(operands[0])
            self.words.append(_OF_TWO[str(kind)])
            self.height -= 1
        elif kind == "bucket":
            sizes = [size for _, size in operands]
            self.words += [Opcode.BUCKET, len(sizes), *sizes]
        elif kind == "if":
            otherwise = self.jump(Opcode.JUMP_IF_FALSE)
            self.push(operands[0])
            end = self.jump(Opcode.JUMP)
            self.land(otherwise)
            self.push(operands[1])
            self.land(end)
        else:
            end = self.jump(Opcode.AND if kind == "and" else Opcode.OR)
            self.push(operands[0])
            self.land(end)

    def leaf(self, kind: str, value: object) -> None:
        if kind == "int":
            if not isinstance(value, int) or value not in _INT64:
                raise RuleError(f"{value} in {self.expression} does not fit in 64 bits")
            self.words += [Opcode.INT, value]
        else:
            name = f"{value}.{kind}" if kind in _ATTRIBUTES else str(value)
            if name not in self.symbols:
                raise RuleError(f"{self.expression} names {name}, which the inputs do not say")
            self.words += [Opcode.SYMBOL, self.symbols[name]]
        self.height += 1
        if self.height > MAX_STACK:
            raise RuleError(f"{self.expression} is nested too deeply")

    def jump(self, op: Opcode) -> int:
        """A jump, for `land` to say where to. On one of the two ways the top is popped or left
        out, so what follows begins one lower."""
        self.words += [op, 0]
        self.height -= 1
        return len(self.words)

    def land(self, start: int) -> None:
        """The jump whose operand ends at ``start`` leads here."""
        self.words[start - 1] = len(self.words) - start


def compile_rule(rule: Rule, extra: Sequence[Expression] = ()) -> RuleProgram | None:
    """A rule as a program.

    Args:
        rule: the rule.
        extra: more expressions of its dims, and of sizes and ranks of inputs and outputs;
            ``fr_rule_value`` knows them by their places here.

    Returns:
        The program; None of a rule that has more arguments, dims or names than the runtime keeps
        room for, which `Rule.bind` must serve.

    Raises:
        RuleError: an extra expression names something else.
    """
    symbols = _symbols(rule, extra)
    arguments = (*rule.inputs, *rule.outputs)
    if (
        len(arguments) > MAX_ARGUMENTS
        or len(symbols) > MAX_SYMBOLS
        or any(_ndim(argument) > MAX_NDIM for argument in arguments)
        or len(dtypes.ALL) > MAX_DTYPES
    ):
        return None
    return _RuleWriter(rule, extra, symbols).program()


def _symbols(rule: Rule, extra: Sequence[Expression]) -> dict[str, int]:
    """The number of each symbol: dims as inputs first name them, then attributes in the same order,
    those alone that an expression names, then such numbers, dtype variables and `OF_DEVICE`."""
    inputs = [dim for argument in rule.inputs for dim in argument.dims or ()]
    dims = [dim for dim in inputs if isinstance(dim, Expression)]
    bound = [str(dim) for dim in dims if name_of(dim) not in (None, *rule.numbers)]
    outputs = [dim for argument in rule.outputs for dim in argument.dims or ()]
    expressions = [dim for dim in outputs if isinstance(dim, Expression)]
    expressions += [*dims, *rule.conditions, *extra]
    used = frozenset[str]().union(*(expression.attributes for expression in expressions))
    always = [
        argument.name
        for argument in rule.inputs
        if argument.dims is not None and not argument.optional
    ]
    always += [argument.name for argument in rule.outputs]
    attributes = [f"{name}.{kind}" for name in always for kind in _ATTRIBUTES]
    names = [*dict.fromkeys(bound), *(name for name in attributes if name in used)]
    named = frozenset[str]().union(*(expression.names for expression in expressions))
    names += [name for name in (*rule.star_sizes, *rule.numbers) if name in named]
    compared = frozenset[str]().union(*(expression.variables for expression in expressions))
    variables = dict.fromkeys(argument.dtype for argument in rule.inputs)
    names += [f":{name}" for name in variables if name in compared]
    asked = {*named, *[":device" for expression in extra if expression.asks_kind]}
    names += [name for name in OF_DEVICE if name in asked and name not in names]
    return {name: number for number, name in enumerate(names)}


def _ndim(argument: Argument) -> int:
    """The dims of an argument but ``*S``."""
    return sum(isinstance(dim, Expression) for dim in argument.dims or ())


class _RuleWriter:
    """The words of one rule."""

    def __init__(self, rule: Rule, extra: Sequence[Expression], symbols: Mapping[str, int]) -> None:
        self.rule, self.extra, self.symbols = rule, extra, symbols
        self.variables: list[str] = []
        self.stars: list[str] = []
        # What stands before all records: the header and the expressions.
        self.words = [0] * (_HEADER_WORDS + len(extra))
        self.starts: dict[Expression, int] = {}

    def program(self) -> RuleProgram:
        for i, expression in enumerate(self.extra):
            self.words[_HEADER_WORDS + i] = self.code(expression)
        checks: list[int] = []
        inputs = [
            word
            for i, argument in enumerate(self.rule.inputs)
            for word in self.input(i, argument, checks)
        ]
        attributes = self.attributes()
        conditions = [self.code(condition) for condition in self.rule.conditions]
        outputs = [word for argument in self.rule.outputs for word in self.output(argument)]
        choices = [word for name in self.variables for word in self.variable(name)]
        self.words[:_HEADER_WORDS] = [
            FORMAT,
            len(self.rule.inputs),
            len(self.rule.outputs),
            len(self.variables),
            len(attributes) // 3,
            len(checks) // 3,
            len(conditions),
            len(self.extra),
            len(self.words),
        ]
        words = [*self.words, *choices, *inputs, *attributes, *checks, *conditions, *outputs]
        return RuleProgram(tuple(map(int, words)), tuple(self.symbols), tuple(self.variables))

    def code(self, expression: Expression) -> int:
        """The word at which an expression begins."""
        if expression not in self.starts:
            self.starts[expression] = len(self.words)
            self.words += compile_expression(expression, self.symbols)
        return self.starts[expression]

    def input(self, number: int, argument: Argument, checks: list[int]) -> list[int]:
        """The record of an input; what its dims must be goes to ``checks``."""
        star = star_at = -1
        bindings: list[int] = []
        for at, dim in enumerate(argument.dims or ()):
            if isinstance(dim, Star):
                star, star_at = _number(dim.name, self.stars), at
            if not isinstance(dim, Expression):
                continue
            place = at if star < 0 else at - len(argument.dims or ())  # from the end, behind a star
            if (name := name_of(dim)) is not None and name not in self.rule.numbers:
                bindings += [place, self.symbols[name]]
            else:
                checks += [number, place, self.code(dim)]
        flags = OPTIONAL * argument.optional | NUMBER * (argument.dims is None)
        record = [flags, self.dtype(argument), _ndim(argument), star, star_at, len(bindings) // 2]
        return record + bindings

    def attributes(self) -> list[int]:
        arguments = (*self.rule.inputs, *self.rule.outputs)
        places = {argument.name: i for i, argument in enumerate(arguments)}
        words: list[int] = []
        for symbol, number in self.symbols.items():
            name, _, kind = symbol.partition(".")
            if kind in _ATTRIBUTES:
                words += [_ATTRIBUTES[kind], places[name], number]
            elif symbol.startswith(":") and symbol != ":device":
                words += [DTYPE, _number(symbol[1:], self.variables), number]
            elif symbol in self.rule.star_sizes:
                star = self.stars.index(self.rule.star_sizes[symbol])
                words += [STAR_SIZE, star, number]
            elif symbol in self.rule.numbers:
                words += [VALUE, places[symbol], number]
        return words

    def output(self, argument: Argument) -> list[int]:
        dims = argument.dims or ()
        words: list[int] = []
        for dim in dims:
            if isinstance(dim, Star):
                words += [DIM_STAR, _number(dim.name, self.stars)]
            elif isinstance(dim, Broadcast):
                first, *others = (_number(name, self.stars) for name in dim.names)
                words += [DIM_STAR, first]
                for star in others:
                    words += [DIM_BROADCAST, star]
            elif dim.node[0] == "name":
                words += [DIM_SYMBOL, self.symbols[dim.node[1]]]
            else:
                words += [DIM_CODE, self.code(dim)]
        return [self.dtype(argument), len(words) // 2, *words]

    def dtype(self, argument: Argument) -> int:
        dtype = dtypes.BY_NAME.get(argument.dtype)
        if dtype is None:
            return -1 - _number(argument.dtype, self.variables)
        return dtypes.ALL.index(dtype)

    def variable(self, name: str) -> tuple[int, int]:
        """The dtypes that a variable may be, a bit each, and what it is by default."""
        names = self.rule.choices.get(name, tuple(dtypes.BY_NAME))
        choices = sum(1 << dtypes.ALL.index(dtypes.BY_NAME[each]) for each in set(names))
        default = self.rule.defaults.get(name)
        if default is None:
            return choices, NO_DEFAULT
        known = dtypes.BY_NAME.get(default)
        if known is None:
            return choices, -1 - _number(default, self.variables)
        return choices, dtypes.ALL.index(known)


def _number_of(name: str) -> int:
    """The number of a dtype, or of a kind of device: CPU and CUDA of op_calls.h."""
    if name in DEVICES:
        return 1 << DEVICES.index(name)
    return dtypes.ALL.index(dtypes.BY_NAME[name])


def _number(name: str, names: list[str]) -> int:
    """The number of a name, which is a new one if it has none."""
    if name not in names:
        names.append(name)
    return names.index(name)
