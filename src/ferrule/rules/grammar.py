"""The grammar of expressions: text to `Expression`, by Python's own parser."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterable, Sequence

from .. import dtypes
from ..errors import RuleError
from .expression import (
    ATTRIBUTES,
    BETWEEN_TWO,
    CONDITIONS,
    DEEPEST,
    DEVICES,
    FUNCTIONS,
    MOST,
    Expression,
    Node,
    is_bucket,
    is_dtype,
)

_LONGEST = 2000  # characters
_MOST_NODES = 1000
_REFUSED = "\n\r\f\0\\#"  # Python reads more than one line, or none

_NUMBER = re.compile(r"(?<![\w.])\d\w*", re.ASCII)
_ASSIGNED = re.compile(r"(?<![=!<>])=(?!=)")
_INTEGER = re.compile(r"[0-9_]+|0[xX][0-9a-fA-F_]+|0[bB][01_]+|0[oO][0-7_]+")
_SIGNS = {syntax: sign for sign, (syntax, _) in BETWEEN_TWO.items()}


def parse(
    text: str,
    *,
    whole: str | None = None,
    at: int = 0,
    truths: bool = False,
    kinds: Iterable[str] = (),
) -> Expression:
    """Parse an expression.

    Args:
        text: the expression.
        whole, at: the text that it is a part of, and where it begins there, for error messages.
        truths: it is a condition, in which a name alone stands for ``name != 0``.
        kinds: the dtypes and dtype variables that its value may be.

    Raises:
        RuleError: it is none; points at the character.
    """
    whole = text if whole is None else whole
    before = len(text) - len(text.lstrip())
    stripped = text.strip()

    def fail(message: str, column: int) -> RuleError:
        return RuleError.at(message, whole, at + before + column)

    if not stripped:
        raise fail("an expression is missing here", 0)
    if not stripped.isascii():
        bad = next(i for i, c in enumerate(stripped) if not c.isascii())
        raise fail(f"unexpected character {stripped[bad]!r}", bad)
    if len(stripped) > _LONGEST:
        raise fail(f"an expression of {len(stripped)} characters; at most {_LONGEST} are read", 0)
    if any(c in stripped for c in _REFUSED):
        bad = min(i for c in _REFUSED if (i := stripped.find(c)) >= 0)
        raise fail(f"unexpected character {stripped[bad]!r}", bad)
    for number in _NUMBER.finditer(stripped):
        if not _INTEGER.fullmatch(number[0]):  # Python warns of 128if, and reads it
            raise fail(f"{number[0]} is no integer", number.start())
    try:
        tree = ast.parse(stripped, mode="eval").body
        tree = _truth(tree) if truths else _typed(tree, frozenset(kinds))
        node = _node(tree, fail)
        deep, many = _extent(node, {})
    except SyntaxError as error:
        column = error.offset - 1 if error.offset else len(stripped)  # none where it ends early
        if (alone := _ASSIGNED.search(stripped)) is not None:
            raise fail("this is no expression: sizes are compared by '=='", alone.start()) from None
        raise fail("this is no expression", column) from None
    except (RecursionError, MemoryError):
        raise fail("an expression that is nested too deeply", 0) from None
    if deep > DEEPEST:
        raise fail(f"an expression that is nested too deeply: {deep} levels of {DEEPEST}", 0)
    if (
        many > _MOST_NODES or len(str(Expression(node))) > _LONGEST
    ):  # so that its text can be read again
        raise fail("an expression that is too long with its chained comparisons written out", 0)
    return Expression(node)


def _truth(tree: ast.expr) -> ast.expr:
    """A condition in which names that stand alone are compared with 0."""
    match tree:
        case ast.Name():
            compared = ast.Compare(tree, [ast.NotEq()], [ast.Constant(0)])
            return ast.fix_missing_locations(ast.copy_location(compared, tree))
        case ast.BoolOp():
            tree.values = list(map(_truth, tree.values))
        case ast.UnaryOp(op=ast.Not()):
            tree.operand = _truth(tree.operand)
    return tree


class _Kind(str):
    """A dtype, or a dtype variable, that is a value."""


def _typed(tree: ast.expr, kinds: frozenset[str]) -> ast.expr:
    """An expression in which dtypes are marked, where its value may be one of them."""
    match tree:
        case ast.Name(id=name) if name in kinds:
            return ast.copy_location(ast.Constant(_Kind(name)), tree)
        case ast.IfExp():
            tree.body, tree.orelse = _typed(tree.body, kinds), _typed(tree.orelse, kinds)
    return tree


def _node(tree: ast.expr, fail: Callable[[str, int], RuleError]) -> Node:
    column = tree.col_offset
    match tree:
        case ast.Constant(value=int(value)) if type(value) is int:
            if value > MOST:
                raise fail(f"{value} is more than {MOST}, the largest size", column)
            return ("int", value)
        case ast.Constant(value=_Kind() as kind):
            return ("dtype", str(kind))
        case ast.Constant(value=bool()):
            raise fail("True and False are the numbers 1 and 0 here, as in causal == 1", column)
        case ast.Name(id=name):
            return ("name", name)
        case ast.Attribute(value=ast.Name(id=name), attr=attribute):
            if attribute not in ATTRIBUTES:
                expected = f"{name}.size or {name}.ndim"
                raise fail(f"{name}.{attribute}: expected {expected}", column)
            return (attribute, name)
        case ast.Subscript(value=ast.Attribute(value=ast.Name(id=name), attr="shape"), slice=index):
            return ("name", f"{name}.shape[{_index(index, fail)}]")
        case ast.BinOp(left=left, op=op, right=right):
            sign = _SIGNS.get(type(op))
            if sign is None:
                hint = "; write // for whole numbers" if isinstance(op, ast.Div) else ""
                raise fail(f"this operator is not known: expected one of + - * // %{hint}", column)
            return (sign, _number(left, fail), _number(right, fail))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return ("neg", _number(operand, fail))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return ("not", _condition(operand, fail))
        case ast.BoolOp(op=op, values=operands):
            sign = "and" if isinstance(op, ast.And) else "or"
            return _folded(sign, [_condition(operand, fail) for operand in operands])
        case ast.Compare():
            return (_of_dtype if any(map(_is_dtype, _compared(tree))) else _comparison)(tree, fail)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            then, otherwise = _number(body, fail), _number(orelse, fail)
            if is_dtype(then) != is_dtype(otherwise):
                number = orelse if is_dtype(then) else body
                what = (
                    f"{number.id!r} is neither a dtype nor a dtype variable, and "
                    if (isinstance(number, ast.Name))
                    else ""
                )
                raise fail(f"{what}a dtype and a number cannot take turns", number.col_offset)
            return ("if", _condition(test, fail), then, otherwise)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            return _call(name, args, fail, column)
        case ast.Call(func=ast.Name(id=name)):
            expected = ", ".join(FUNCTIONS)
            raise fail(f"there is no function {name!r} here; expected one of {expected}", column)
    raise fail("this is not allowed in a rule: expected integers, dims and + - * // %", column)


def _call(
    name: str, args: Sequence[ast.expr], fail: Callable[[str, int], RuleError], column: int
) -> Node:
    exact = {"ceildiv": 2, "next_pow2": 1}.get(name)
    if (len(args) < 2) if exact is None else (len(args) != exact):
        many = "2 or more arguments" if exact is None else f"{exact} argument{'s' * (exact > 1)}"
        raise fail(f"{name} got {len(args)} arguments, expected {many}", column)
    nodes = [_number(operand, fail) for operand in args]
    if name not in ("next_pow2", "bucket"):
        return _folded(name, nodes)
    if name == "bucket" and not is_bucket(nodes[1:]):
        raise fail("bucket(n, 1, 8, 64) takes a number, then integers that ascend", column)
    return (name, *nodes)


def _index(tree: ast.expr, fail: Callable[[str, int], RuleError]) -> int:
    match tree:
        case ast.Constant(value=int(value)) if type(value) is int:
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(value))):
            return -value
    raise fail("expected an integer, as in x.shape[0]", tree.col_offset)


def _comparison(tree: ast.Compare, fail: Callable[[str, int], RuleError]) -> Node:
    parts: list[Node] = []
    left = tree.left
    a = _number(left, fail)
    for op, right in zip(tree.ops, tree.comparators, strict=True):
        sign = _SIGNS.get(type(op))
        if sign is None:
            signs = "== != < <= > >=, or T in (float16, bfloat16) of a dtype variable"
            raise fail(f"expected a comparison: {signs}", left.col_offset)
        b = _number(right, fail)
        parts.append((sign, a, b))
        left, a = right, b
    return _folded("and", parts)


def _compared(tree: ast.Compare) -> list[ast.expr]:
    """What a comparison names, between brackets, too."""
    parts = (tree.left, *tree.comparators)
    return [e for part in parts for e in (part.elts if isinstance(part, ast.Tuple) else [part])]


def _is_dtype(tree: ast.expr) -> bool:
    return isinstance(tree, ast.Name) and tree.id in (*dtypes.BY_NAME, *DEVICES)


def _of_dtype(tree: ast.Compare, fail: Callable[[str, int], RuleError]) -> Node:
    """What a dtype variable is compared with: one dtype, or several."""
    left = tree.left
    match left, tree.ops, tree.comparators:
        case ast.Name(id=variable), [ast.In() | ast.NotIn()], [ast.Tuple(elts=names)]:
            pass
        case ast.Name(id=variable), [ast.Eq() | ast.NotEq() | ast.In() | ast.NotIn()], [right]:
            names = [right]
        case _:
            raise fail(
                "a dtype variable is compared as in T == float16, T in (float16, bfloat16), "
                "T != float16 and T not in (float16, bfloat16)",
                left.col_offset,
            )
    if _is_dtype(left):
        raise fail(f"{variable!r} is a dtype; the variable stands first", left.col_offset)
    kinds = [name.id for name in names if isinstance(name, ast.Name)]
    of_device = any(kind in DEVICES for kind in kinds)
    if of_device and variable != "device":
        raise fail(f"what is one of {', '.join(DEVICES)} is called `device`", left.col_offset)
    for name in names:
        if not _is_dtype(name) or (name.id in DEVICES) != of_device:  # type: ignore[attr-defined]
            what = repr(name.id) if isinstance(name, ast.Name) else "this"
            expected = f"device: {', '.join(DEVICES)}" if of_device else "dtype, as float16 is"
            raise fail(f"{what} is no {expected}", name.col_offset)
    known: list[Node] = [("is", variable, name.id) for name in names if isinstance(name, ast.Name)]
    node = _folded("or", known)
    return ("not", node) if isinstance(tree.ops[0], (ast.NotEq, ast.NotIn)) else node


def _folded(kind: str, nodes: Sequence[Node]) -> Node:
    """Several operands as nodes of two."""
    return functools.reduce(lambda first, second: (kind, first, second), nodes)


def _number(tree: ast.expr, fail: Callable[[str, int], RuleError]) -> Node:
    node = _node(tree, fail)
    if node[0] in CONDITIONS:
        raise fail("a condition stands where a number is expected", tree.col_offset)
    return node


def _condition(tree: ast.expr, fail: Callable[[str, int], RuleError]) -> Node:
    node = _node(tree, fail)
    if node[0] not in CONDITIONS:
        how = f", as in {tree.id} != 0" if isinstance(tree, ast.Name) else ""
        why = f"a number stands where a condition is expected; compare it{how}"
        raise fail(why, tree.col_offset)
    return node


def _extent(node: Node, extents: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """How deep a tree is and how many nodes it has; looks once at parts that are one object."""
    extent = extents.get(id(node))
    if extent is None:
        parts = [_extent(part, extents) for part in node[1:] if isinstance(part, tuple)]
        deep = 1 + max((deep for deep, _ in parts), default=0)
        extent = extents[id(node)] = deep, 1 + sum(many for _, many in parts)
    return extent
