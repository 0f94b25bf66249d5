"""How a call can be split into calls on parts of its inputs, by what the op declares.

A dim is split where the declaration says that its parts are independent (``*S``, ``batch=``), or
that their outputs add up (``partial_sums=``), and never because the shapes would allow it:
``cumsum``'s ``x[N] -> y[N]`` looks just like that of ``exp``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..errors import KernelError, KernelTypeError
from ..rules.argument import Argument, Broadcast, Dim, Star
from ..rules.expression import Expression
from ..rules.rule import Rule

if TYPE_CHECKING:
    from .declared import Declared


class Split(NamedTuple):
    """One way to split a call into calls on parts.

    Attributes:
        dim: what is split: ``"B"``, or ``"*S"``.
        inputs: of each input the axis that is split; None where every part gets all of it.
        outputs: of each output the axis along which the parts' outputs are concatenated; None where
            they are added up.
        multiple: parts of the dim must be multiples of that, for some inputs have it divided.
        whole: which input has the dim as it is.
    """

    dim: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    multiple: int = 1
    whole: int = 0


def splits(op: Declared, ranks: Sequence[int | None]) -> list[Split]:
    """The ways to split a call, one per axis that can be split.

    Args:
        op: the op.
        ranks: of each input; None of those that are absent or Python numbers.
    """
    rule = op.rule
    stars = [f"*{name}" for name in _stars(rule)]
    ways = []
    for dim in dict.fromkeys((*stars, *op.batch, *op.partial_sums)):
        if not _can_split(op, dim):
            continue
        name = dim.lstrip("*")
        for i in range(star_rank(rule, name, ranks) if dim in stars else 1):
            if dim in stars and not _leads(rule, name, ranks, i):
                continue
            inputs = [
                None if rank is None else _axis(argument, name, rank, i)
                for argument, rank in zip(rule.inputs, ranks, strict=True)
            ]
            if all(axis is None for axis in inputs):  # those that have it are absent
                continue
            outputs = [_axis(a, name, _rank(rule, a, ranks), i) for a in rule.outputs]
            multiple = 1 if dim in stars else _multiple(rule, name)
            whole = next(
                i
                for i, (argument, axis) in enumerate(zip(rule.inputs, inputs, strict=True))
                if axis is not None and place(argument, name) is not None
            )
            ways.append(Split(dim, tuple(inputs), tuple(outputs), multiple, whole))
    return ways


def checked_splits(
    name: str, rule: Rule, batch: object, partial_sums: object
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The dims of an op's ``batch``, and those of its ``partial_sums``, as `ferrule.op` takes them.

    Raises:
        KernelError: there is no such dim; or one of ``partial_sums`` is in ``batch``, too, or every
            output has it, or the op writes to an input in place.
        KernelTypeError: these are no names.
    """
    independent = _checked_dims(f"[op] `batch` of op {name!r}", batch, rule.dim_names, '"B N"')
    label = f"[op] `partial_sums` of op {name!r}"
    allowed = (*rule.dim_names, *(f"*{star}" for star in _stars(rule)))
    sums = _checked_dims(label, partial_sums, allowed, '"K" or "*S"')
    if sums and any(a.mutable for a in rule.inputs):
        raise KernelError(f"{label}: what an op writes in place cannot be added up.")
    for dim in sums:
        if dim in independent:
            raise KernelError(f"{label}: {dim!r} is in `batch`, too; expected one of both.")
        if all(place(output, dim.lstrip("*")) is not None for output in rule.outputs):
            raise KernelError(
                f"{label}: every output has {dim!r}, so that nothing is added up along it. Where "
                "its parts are independent, give it as `batch`."
            )
    return independent, sums


def _checked_dims(
    label: str, dims: object, allowed: Sequence[str], such_as: str
) -> tuple[str, ...]:
    """Names of dims, in a text or a sequence, checked."""
    names = dims.replace(",", " ").split() if isinstance(dims, str) else dims
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise KernelTypeError(f"{label}: got {dims!r}, expected dims such as {such_as}.")
    for name in names:
        if name not in allowed:
            there = ", ".join(allowed) or "none"
            raise KernelError(f"{label}: there is no dim {name!r}, but {there}.")
    return tuple(names)


def place(argument: Argument, name: str) -> int | None:
    """Where an array has the dim ``name`` as itself, or ``*name``, also broadcast, among its
    declared dims."""
    for i, dim in enumerate(argument.dims or ()):
        if _is_named(dim, name):
            return i
    return None


def stated(rule: Rule) -> Iterator[Expression]:
    """All expressions in the dims and conditions of a rule, plain names of dims included."""
    for argument in (*rule.inputs, *rule.outputs):
        yield from (dim for dim in argument.dims or () if isinstance(dim, Expression))
    yield from rule.conditions


def stands_alone(rule: Rule, name: str, broadcast: bool = False, divided: bool = False) -> bool:
    """Whether a rule uses a dim, or ``*name``, only as a dim of arrays, at most once in each. Then
    what holds for the whole holds for parts of it, too.

    What is broadcast is alone only where ``broadcast`` says that this was thought of: parts of what
    has the size 1 may belong to all parts of the others. So it is with ``divided``, dims such as
    ``name // 16`` where a condition is that 16 divides it: parts must be multiples of that.
    """
    having = set()
    multiple = _multiple(rule, name) if divided else 1
    size = next((size for size, star in rule.star_sizes.items() if star == name), None)
    for argument in (*rule.inputs, *rule.outputs):
        if not broadcast and any(_is_broadcast(dim, name) for dim in argument.dims or ()):
            return False
        count = sum(_is_named(dim, name) for dim in argument.dims or ())
        if count > 1:
            return False
        if count:
            having.add(argument.name)
    for expression in stated(rule):
        by = _divisor(expression, name) or _divides(expression, name)
        if name in expression.names and not (by and multiple % by == 0):
            return False
        if size in expression.names:
            return False
        if any(f"{array}.size" in expression.attributes for array in having):
            return False
    return True


def _divisor(dim: Dim, name: str) -> int:
    """By what a dim is divided that is ``name // c``, or ``name`` itself; 0 of others."""
    if not isinstance(dim, Expression):
        return 0
    kind, *operands = dim.node
    if dim.node == ("name", name):
        return 1
    if kind == "//" and operands[0] == ("name", name) and operands[1][0] == "int":
        return int(operands[1][1])
    return 0


def _divides(condition: Expression, name: str) -> int:
    """What divides a dim where a condition ``name % c == 0`` holds; 0 of others."""
    kind, *operands = condition.node
    if kind == "==" and operands[1] == ("int", 0) and operands[0][:2] == ("%", ("name", name)):
        by = operands[0][2]
        return int(by[1]) if by[0] == "int" else 0
    return 0


def _multiple(rule: Rule, name: str) -> int:
    """The least number that all conditions ``name % c == 0`` have as a divisor of the dim."""
    found = (_divides(condition, name) for condition in rule.conditions)
    return math.lcm(*(by for by in found if by))


def _is_broadcast(dim: Dim, name: str) -> bool:
    return isinstance(dim, Broadcast) and name in dim.names


def _is_named(dim: Dim, name: str) -> bool:
    if isinstance(dim, Expression):
        return bool(dim.node == ("name", name))
    return name in dim.names if isinstance(dim, Broadcast) else dim.name == name


def _stars(rule: Rule) -> tuple[str, ...]:
    """The names of ``*S`` that inputs bind."""
    names = (d.name for a in rule.inputs for d in a.dims or () if isinstance(d, Star))
    return tuple(dict.fromkeys(names))


def _can_split(op: Declared, dim: str) -> bool:
    """Whether calls on parts of a dim make up the whole call."""
    rule, name = op.rule, dim.lstrip("*")
    written = [a for a in rule.inputs if a.mutable]
    if dim not in op.partial_sums:
        written += rule.outputs
    alone = stands_alone(rule, name, True, divided=True)
    return alone and all(place(a, name) is not None for a in written)


def _leads(rule: Rule, name: str, ranks: Sequence[int | None], i: int) -> bool:
    """Whether the ``i``-th dim of ``*name`` stands before all dims of those that it is broadcast
    with, so that no sizes decide whether it is repeated."""
    others = {
        other
        for output in rule.outputs
        for dim in output.dims or ()
        if isinstance(dim, Broadcast) and name in dim.names
        for other in dim.names
    } - {name}
    left = star_rank(rule, name, ranks) - i
    return all(star_rank(rule, other, ranks) < left for other in others)


def star_rank(rule: Rule, name: str, ranks: Sequence[int | None]) -> int:
    """How many dims ``*name`` stands for in a call."""
    for argument, rank in zip(rule.inputs, ranks, strict=True):
        if rank is not None and Star(name) in (argument.dims or ()):
            return rank - len(argument.dims or ()) + 1
    return 0


def _rank(rule: Rule, argument: Argument, ranks: Sequence[int | None]) -> int:
    """The rank of an output."""
    dims = argument.dims or ()
    stars = [(dim.name,) if isinstance(dim, Star) else dim.names
             for dim in dims if not isinstance(dim, Expression)]  # fmt: skip
    return len(dims) + sum(max(star_rank(rule, n, ranks) for n in names) - 1 for names in stars)


def _axis(argument: Argument, name: str, rank: int, i: int) -> int | None:
    """The axis of an array of this rank that is a dim, or the ``i``-th of ``*name``."""
    dims = argument.dims or ()
    at = place(argument, name)
    if at is None:  # it may have the dim divided
        at = next((i for i, dim in enumerate(dims) if _divisor(dim, name)), None)
    if at is None:
        return None
    if not isinstance(dims[at], Expression):
        return at + i
    after_star = any(not isinstance(dim, Expression) for dim in dims[:at])
    return rank - len(dims) + at if after_star else at
