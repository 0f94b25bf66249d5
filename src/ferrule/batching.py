"""A batch of calls of an op as one call, or a few.

By the rule that was declared with `Op.def_vmap`; else by dims that are declared independent, which
a batch makes longer; else call by call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .errors import FerruleWarning, KernelError, warn
from .rule import Rule, Star
from .sharding import place, stands_alone, stated

if TYPE_CHECKING:
    from .op_declaration import Op

Axes = Sequence[int | None]
_warned: set[str] = set()


def batched(
    op: Op, size: int, axes: Axes, values: Sequence[Any], call: Callable[..., Any], arrays: Any
) -> tuple[Any, Any]:
    """The outputs of a batch of calls, and the batch's axis in each.

    Args:
        op: the op.
        size: how many calls.
        axes: per input its axis that counts calls; None where all calls have the same.
        values: the inputs.
        call: calls the op.
        arrays: what is done to arrays of this library: ``move``, ``repeat``, ``merge``, ``part``,
            ``stack``, ``select``, ``is_array``.
    """
    rule = op.rules.get("vmap")
    outputs = op.rule.outputs
    if rule is not None and rule.op is None:
        found: Any = rule.function(size, tuple(axes), tuple(values))  # type: ignore[misc]
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            raise KernelError(
                f"[op] the vmap rule of op {op.name!r} returned a {type(found).__name__}; expected "
                "outputs and their axes, as a tuple of two."
            )
        return found[0], found[1]
    if rule is not None:
        result = rule.op(*_in_front(size, axes, values, arrays))  # type: ignore[misc]
        return result, (0 if len(outputs) == 1 else (0,) * len(outputs))
    axes = [
        axis if arrays.is_array(value) else None for axis, value in zip(axes, values, strict=True)
    ]
    for one, axis in zip(op.rule.inputs, axes, strict=True):
        if one.mutable and axis is None:
            raise KernelError(
                f"[op] vmap of op {op.name!r}: input {one.name!r} is written in place by every "
                "call of the batch; give it an axis of the batch."
            )
    star = _star(op, axes)
    if star is not None:
        return _starred(op, star, size, axes, values, call, arrays)
    for name in op.batch:
        if _foldable(op, name, axes):
            return _folded(op, name, size, axes, values, call, arrays)
    return _looped(op, size, axes, values, call, arrays)


def _in_front(size: int, axes: Axes, values: Sequence[Any], arrays: Any) -> list[Any]:
    found = []
    for axis, value in zip(axes, values, strict=True):
        if axis is not None:
            value = arrays.move(value, axis, 0)
        elif arrays.is_array(value):
            value = arrays.repeat(value, 0, size)
        found.append(value)
    return found


def _star(op: Op, axes: Axes) -> str | None:
    """The ``*S`` that a batch can be a part of: all that is written and all batched inputs have
    it."""
    rule = op.rule
    changed = [*rule.outputs, *(one for one in rule.inputs if one.mutable)]
    names = [dim.name for one in changed for dim in one.dims or () if isinstance(dim, Star)]
    changed += [one for one, axis in zip(rule.inputs, axes, strict=True) if axis is not None]
    for name in dict.fromkeys(names):
        if (
            stands_alone(rule, name)
            and not _ranks_count(rule, name)
            and all(place(one, name) is not None for one in changed)
        ):
            return name
    return None


def _ranks_count(rule: Rule, name: str) -> bool:
    """Whether a shape or condition names the rank of an array that has ``*name``."""
    arrays = {one.name for one in rule.inputs if place(one, name) is not None}
    return any(f"{array}.ndim" in one.attributes for one in stated(rule) for array in arrays)


def _starred(
    op: Op, name: str, size: int, axes: Axes, values: Sequence[Any], call: Callable[..., Any],
    arrays: Any,
) -> tuple[Any, Any]:  # fmt: skip
    given = []
    for one, axis, value in zip(op.rule.inputs, axes, values, strict=True):
        at = place(one, name)
        if axis is not None:
            value = arrays.move(value, axis, at)
        elif at is not None and arrays.is_array(value):
            value = arrays.repeat(value, at, size)
        given.append(value)
    where = tuple(place(one, name) for one in op.rule.outputs)
    result = call(*given)
    return result, (where[0] if len(where) == 1 else where or None)


def _foldable(op: Op, name: str, axes: Axes) -> bool:
    """Whether a dim, declared independent, can be made longer by a batch: it stands alone wherever
    it is named, once in each output and in each batched input."""
    rule = op.rule
    if not stands_alone(rule, name) or any(one.mutable for one in rule.inputs):
        return False  # a fold may be a copy, to which a kernel would write in vain
    for one in (*rule.inputs, *rule.outputs):
        at = place(one, name)
        if at is not None and any(isinstance(dim, Star) for dim in (one.dims or ())[:at]):
            return False  # its place from the front depends on the call
    changed = [one for one, axis in zip(rule.inputs, axes, strict=True) if axis is not None]
    return all(place(one, name) is not None for one in (*changed, *rule.outputs))


def _folded(
    op: Op, name: str, size: int, axes: Axes, values: Sequence[Any], call: Callable[..., Any],
    arrays: Any,
) -> tuple[Any, Any]:  # fmt: skip
    given, length = [], 0
    for one, axis, value in zip(op.rule.inputs, axes, values, strict=True):
        at = place(one, name)
        if at is not None and arrays.is_array(value):
            apart = arrays.repeat(value, at, size) if axis is None else arrays.move(value, axis, at)
            length = apart.shape[at + 1]
            value = arrays.merge(apart, at)
        given.append(value)
    result = call(*given)
    where = tuple(place(one, name) for one in op.rule.outputs)
    found = result if len(where) > 1 else (result,)
    parts = tuple(arrays.part(y, at, (size, length)) for y, at in zip(found, where, strict=True))
    return (parts[0], where[0]) if len(where) == 1 else (parts, where)


def _looped(
    op: Op, size: int, axes: Axes, values: Sequence[Any], call: Callable[..., Any], arrays: Any
) -> tuple[Any, Any]:
    count = len(op.rule.outputs)
    if count and not size:
        raise KernelError(
            f"[op] vmap of op {op.name!r} over a batch of size 0: the op is called once per "
            "element of a batch, so that nothing is known of the outputs. Declare *S or batch=, or "
            "a rule with def_vmap."
        )
    calls = [
        [
            value if axis is None else arrays.select(value, axis, i)
            for axis, value in zip(axes, values, strict=True)
        ]
        for i in range(size)
    ]
    op.counts["vmap loop"] += 1
    if op.digest not in _warned:
        _warned.add(op.digest)
        warn(
            f"op {op.name!r} is called {size} times by vmap, once per element of the batch: no "
            "dim of the batched inputs and of all outputs is declared independent. Declare *S or "
            "batch=, or a rule with def_vmap.",
            FerruleWarning,
        )
    found = [call(*given) for given in calls]
    if not count:
        return None, None
    if count == 1:
        return arrays.stack(found, 0), 0
    return tuple(arrays.stack([one[i] for one in found], 0) for i in range(count)), (0,) * count
