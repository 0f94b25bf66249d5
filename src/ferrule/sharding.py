"""Which calls on parts of the inputs make up one call: what an op's declaration says of it.

A dim is split where the declaration says that its parts are independent (``*S``, ``batch=``), or
that their outputs add up (``partial_sums=``), and never because the shapes would allow it:
``cumsum``'s ``x[N] -> y[N]`` looks just like that of ``exp``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .errors import KernelError, KernelTypeError
from .expression import Expression
from .rule import Argument, Dim, Rule, Star

if TYPE_CHECKING:
    from .op_declaration import Op


class Split(NamedTuple):
    """One way to make a call on parts.

    Attributes:
        dim: what is split: ``"B"``, or ``"*S"``.
        inputs: of each input the axis that is split; None where every part gets all of it.
        outputs: of each output the axis along which the parts' outputs are put together; None where
            they are added up.
    """

    dim: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]


def splits(op: Op, ranks: Sequence[int | None]) -> list[Split]:
    """The ways to make a call on parts, one per axis that can be split.

    Args:
        op: the op.
        ranks: of each input; None of those that are absent or Python numbers.
    """
    rule = op.rule
    stars = [f"*{name}" for name in _stars(rule)]
    found = []
    for dim in dict.fromkeys((*stars, *op.batch, *op.partial_sums)):
        if not _splits(op, dim):
            continue
        name = dim.lstrip("*")
        for i in range(_star_rank(rule, name, ranks) if dim in stars else 1):
            inputs = [
                None if rank is None else _axis(one, name, rank, i)
                for one, rank in zip(rule.inputs, ranks, strict=True)
            ]
            outputs = [_axis(one, name, _rank(rule, one, ranks), i) for one in rule.outputs]
            found.append(Split(dim, tuple(inputs), tuple(outputs)))
    return found


def independent(name: str, rule: Rule, given: object) -> tuple[str, ...]:
    """The dims that are declared independent, as `ferrule.op` takes them, checked."""
    names = given.replace(",", " ").split() if isinstance(given, str) else given
    if not isinstance(names, Sequence) or not all(isinstance(one, str) for one in names):
        raise KernelTypeError(
            f'[op] `batch` of op {name!r}: got {given!r}, expected dims such as "B N".'
        )
    for one in names:
        if one not in rule.dim_names:
            known = ", ".join(rule.dim_names) or "none"
            raise KernelError(f"[op] `batch` of op {name!r}: there is no dim {one!r}, but {known}.")
    return tuple(names)


def partial_sums(name: str, rule: Rule, batch: Sequence[str], given: object) -> tuple[str, ...]:
    """The dims of an op's ``partial_sums``, checked.

    Raises:
        KernelError: there is no such dim, every output has it, it is in ``batch``, too, or the op
            writes to an input in place.
        KernelTypeError: these are no names.
    """
    label = f"[op] `partial_sums` of op {name!r}"
    names = given.replace(",", " ").split() if isinstance(given, str) else given
    if not isinstance(names, Sequence) or not all(isinstance(one, str) for one in names):
        raise KernelTypeError(f'{label}: got {given!r}, expected dims such as "K" or "*S".')
    if names and any(one.mutable for one in rule.inputs):
        raise KernelError(f"{label}: what an op writes in place cannot be added up.")
    known = [*rule.dim_names, *(f"*{one}" for one in _stars(rule))]
    for one in names:
        if one not in known:
            raise KernelError(
                f"{label}: there is no dim {one!r}, but {', '.join(known) or 'none'}."
            )
        if one in batch:
            raise KernelError(f"{label}: {one!r} is in `batch`, too; expected one of both.")
        if all(place(output, one.lstrip("*")) is not None for output in rule.outputs):
            raise KernelError(
                f"{label}: every output has {one!r}, so that nothing is added up along it. Where "
                "its parts are independent, give it as `batch`."
            )
    return tuple(names)


def place(one: Argument, name: str) -> int | None:
    """Where an array has the dim ``name`` as itself, or ``*name``, among its declared dims."""
    for i, dim in enumerate(one.dims or ()):
        if _is(dim, name):
            return i
    return None


def stated(rule: Rule) -> Iterator[Expression]:
    """All expressions that a rule makes a statement by, dims that are just a name among them."""
    for one in (*rule.inputs, *rule.outputs):
        yield from (dim for dim in one.dims or () if isinstance(dim, Expression))
    yield from rule.conditions


def stands_alone(rule: Rule, name: str) -> bool:
    """Whether all that a rule says of a dim, or of ``*name``, is which arrays have it as one of
    their dims, once. Then what holds for the whole holds for parts of it, too."""
    having = set()
    for one in (*rule.inputs, *rule.outputs):
        count = sum(_is(dim, name) for dim in one.dims or ())
        if count > 1:
            return False
        if count:
            having.add(one.name)
    for expression in stated(rule):
        if name in expression.names and expression.node != ("name", name):
            return False
        if any(f"{array}.size" in expression.attributes for array in having):
            return False
    return True


def _is(dim: Dim, name: str) -> bool:
    return dim.name == name if isinstance(dim, Star) else dim.node == ("name", name)


def _stars(rule: Rule) -> tuple[str, ...]:
    """The names of ``*S`` that inputs bind."""
    found = (d.name for one in rule.inputs for d in one.dims or () if isinstance(d, Star))
    return tuple(dict.fromkeys(found))


def _splits(op: Op, dim: str) -> bool:
    """Whether calls on parts of a dim make up the whole call."""
    rule, name = op.rule, dim.lstrip("*")
    written = [one for one in rule.inputs if one.mutable]
    if dim not in op.partial_sums:
        written += rule.outputs
    return stands_alone(rule, name) and all(place(one, name) is not None for one in written)


def _star_rank(rule: Rule, name: str, ranks: Sequence[int | None]) -> int:
    """How many dims ``*name`` stands for in a call."""
    for one, rank in zip(rule.inputs, ranks, strict=True):
        if rank is not None and Star(name) in (one.dims or ()):
            return rank - len(one.dims or ()) + 1
    return 0


def _rank(rule: Rule, one: Argument, ranks: Sequence[int | None]) -> int:
    """The rank of an output."""
    dims = one.dims or ()
    stars = [dim.name for dim in dims if isinstance(dim, Star)]
    return len(dims) + sum(_star_rank(rule, name, ranks) - 1 for name in stars)


def _axis(one: Argument, name: str, rank: int, i: int) -> int | None:
    """The axis of an array of this rank that is a dim, or the ``i``-th of ``*name``."""
    at = place(one, name)
    if at is None:
        return None
    dims = one.dims or ()
    if isinstance(dims[at], Star):
        return at + i
    after_star = any(isinstance(dim, Star) for dim in dims[:at])
    return rank - len(dims) + at if after_star else at
