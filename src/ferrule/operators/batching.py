"""Evaluate a batch of calls of an op (`vmap`) as one call, where that is possible.

By the rule that was declared with `Op.def_vmap`; else by dims that are declared independent, which
a batch makes longer; else call by call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import FerruleWarning, KernelError, warn
from ..rules.argument import Broadcast, Star
from ..rules.expression import Expression
from ..rules.rule import Rule
from . import derivatives
from .sharding import place, stands_alone, star_rank, stated

if TYPE_CHECKING:
    from .declared import Declared

Axes = Sequence[int | None]
_warned: set[str] = set()


def batched(
    op: Declared,
    size: int,
    axes: Axes,
    values: Sequence[Any],
    call: Callable[..., Any],
    arrays: Any,
) -> tuple[Any, Any]:
    """The outputs of a batch of calls, and the batch's axis in each.

    Args:
        op: the op.
        size: how many calls.
        axes: per input its axis that counts calls; None where all calls have the same.
        values: the inputs.
        call: calls the op.
        arrays: what is done to arrays of this library: ``move``, ``repeat``, ``merge``, ``part``,
            ``stack``, ``select``, ``is_array``, and ``expand``, which makes an axis of size 1.
    """
    rule = op.rules.get("vmap")
    if rule is not None and rule.op is None:
        result: Any = rule.function(size, tuple(axes), tuple(values))  # type: ignore[misc]
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise KernelError(
                f"[op] the vmap rule of op {op.name!r} returned a {type(result).__name__}; "
                "expected outputs and their axes, as a tuple of two."
            )
        return _of_call(op, *result)
    batch = _Batch(op, size, axes, values, call, arrays)
    if rule is not None and rule.op is not None:
        result = rule.op(*batch.placed([0] * len(values)))
        count = len(rule.op.rule.outputs)
        return _of_call(op, result, 0 if count == 1 else (0,) * count)
    axes = [
        axis if arrays.is_array(value) else None for axis, value in zip(axes, values, strict=True)
    ]
    for argument, axis in zip(op.rule.inputs, axes, strict=True):
        if argument.mutable and axis is None:
            raise KernelError(
                f"[op] vmap of op {op.name!r}: input {argument.name!r} is written in place by "
                "every call of the batch; give it an axis of the batch."
            )
    batch = batch._replace(axes=axes)
    star = _star(op, axes)
    if star is not None:
        return batch.in_star(star)
    names = _broadcast(op, axes)
    if names is not None:
        return batch.in_broadcast(names)
    for name in op.batch:
        if _foldable(op, name, axes):
            return batch.folded(name)
    return batch.looped()


def _of_call(op: Declared, results: Any, axes: Any) -> tuple[Any, Any]:
    """What a rule gave, without the outputs that calls of the op do not have."""
    there, declared = len(op.rule.outputs), len(op.rule.declared)
    lists = all(isinstance(part, (tuple, list)) for part in (results, axes))
    if there == declared or not lists or {len(results), len(axes)} != {declared}:
        return results, axes
    results, axes = (derivatives.gathered(op, part) for part in (results, axes))
    return (results, axes) if there > 1 else (results[0], axes[0])


def _star(op: Declared, axes: Axes) -> str | None:
    """The ``*S`` that can take in the batch axis: all that is written and all batched inputs
    have it."""
    rule = op.rule
    changed = [*rule.outputs, *op.in_place]
    names = [dim.name for a in changed for dim in a.dims or () if isinstance(dim, Star)]
    changed += [a for a, axis in zip(rule.inputs, axes, strict=True) if axis is not None]
    for name in dict.fromkeys(names):
        if (
            stands_alone(rule, name)
            and not _ranks_count(rule, name)
            and all(place(a, name) is not None for a in changed)
        ):
            return name
    return None


def _broadcast(op: Declared, axes: Axes) -> tuple[str, ...] | None:
    """The starred dims, all broadcast with each other in each output, of which those of all batched
    inputs can take in the batch axis."""
    rule = op.rule
    dims = [dim for a in rule.outputs for dim in a.dims or () if isinstance(dim, Broadcast)]
    if op.in_place or len(dims) != len(rule.outputs) or len({frozenset(d.names) for d in dims}) > 1:
        return None
    names = dims[0].names
    for name in names:
        if not stands_alone(rule, name, True) or _ranks_count(rule, name):
            return None
    changed = [a for a, axis in zip(rule.inputs, axes, strict=True) if axis is not None]
    return names if all(any(Star(n) in (a.dims or ()) for n in names) for a in changed) else None


def _ranks_count(rule: Rule, name: str) -> bool:
    """Whether a shape or condition names the rank of an array that has ``*name``."""
    arrays = {a.name for a in rule.inputs if place(a, name) is not None}
    return any(f"{array}.ndim" in e.attributes for e in stated(rule) for array in arrays)


def _foldable(op: Declared, name: str, axes: Axes) -> bool:
    """Whether the batch axis can be folded into a dim that is declared independent: it stands
    alone wherever it is named, once in each output and in each batched input."""
    rule = op.rule
    if not stands_alone(rule, name) or op.in_place:
        return False  # a fold may be a copy, to which a kernel would write in vain
    for argument in (*rule.inputs, *rule.outputs):
        at = place(argument, name)
        before = (argument.dims or ())[: at or 0]
        if not all(isinstance(dim, Expression) for dim in before):
            return False  # its place from the front depends on the call
    changed = [a for a, axis in zip(rule.inputs, axes, strict=True) if axis is not None]
    return all(place(a, name) is not None for a in (*changed, *rule.outputs))


class _Batch(NamedTuple):
    """A batch of calls, as `batched` is given it; each method evaluates it in one way."""

    op: Declared
    size: int
    axes: Axes
    values: Sequence[Any]
    call: Callable[..., Any]
    arrays: Any

    def placed(self, places: Sequence[int | None]) -> list[Any]:
        """The inputs, the batch axis of each where it is to be: along it those that have none are
        the same."""
        inputs = []
        for axis, value, at in zip(self.axes, self.values, places, strict=True):
            if axis is not None:
                value = self.arrays.move(value, axis, at)
            elif at is not None and self.arrays.is_array(value):
                value = self.arrays.repeat(value, at, self.size)
            inputs.append(value)
        return inputs

    def in_star(self, name: str) -> tuple[Any, Any]:
        """One call, with the batch axis as a part of ``*name``."""
        inputs = self.placed([place(a, name) for a in self.op.rule.inputs])
        output_axes = tuple(place(a, name) for a in self.op.rule.outputs)
        result = self.call(*inputs)
        return result, (output_axes[0] if len(output_axes) == 1 else output_axes or None)

    def in_broadcast(self, names: tuple[str, ...]) -> tuple[Any, Any]:
        """One call, with the batch axis before all that is broadcast with each other: it is the
        first of the starred dims that any batched input has, which are made as many as there are
        at most."""
        rule, arrays = self.op.rule, self.arrays
        ranks = [
            value.ndim - (axis is not None) if arrays.is_array(value) else None
            for axis, value in zip(self.axes, self.values, strict=True)
        ]
        star_ranks = {name: star_rank(rule, name, ranks) for name in names}
        batched = [
            name
            for name in names
            for argument, axis in zip(rule.inputs, self.axes, strict=True)
            if axis is not None and Star(name) in (argument.dims or ())
        ]
        places: list[int | None] = []
        missing = []
        for argument in rule.inputs:
            name = next((n for n in batched if Star(n) in (argument.dims or ())), None)
            places.append(None if name is None else place(argument, name))
            missing.append(0 if name is None else max(star_ranks.values()) - star_ranks[name])
        inputs = self.placed(places)
        for i, (at, count) in enumerate(zip(places, missing, strict=True)):
            for _ in range(count if arrays.is_array(inputs[i]) else 0):
                inputs[i] = arrays.expand(inputs[i], (at or 0) + 1)
        output_axes = tuple(place(a, names[0]) for a in rule.outputs)
        result = self.call(*inputs)
        return result, output_axes[0] if len(output_axes) == 1 else output_axes

    def folded(self, name: str) -> tuple[Any, Any]:
        """One call, with the batch axis folded into a dim."""
        places = [place(a, name) for a in self.op.rule.inputs]
        inputs, length = self.placed(places), 0
        for i, at in enumerate(places):
            if at is not None and self.arrays.is_array(inputs[i]):
                length = inputs[i].shape[at + 1]
                inputs[i] = self.arrays.merge(inputs[i], at)
        result = self.call(*inputs)
        output_axes = tuple(place(a, name) for a in self.op.rule.outputs)
        outputs = result if len(output_axes) > 1 else (result,)
        parts = tuple(
            self.arrays.part(y, at, (self.size, length))
            for y, at in zip(outputs, output_axes, strict=True)
        )
        return (parts[0], output_axes[0]) if len(output_axes) == 1 else (parts, output_axes)

    def looped(self) -> tuple[Any, Any]:
        """One call per element of the batch."""
        count = len(self.op.rule.outputs)
        if count and not self.size:
            raise KernelError(
                f"[op] vmap of op {self.op.name!r} over a batch of size 0: the op is called once "
                "per element of a batch, so that nothing is known of the outputs. Declare *S or "
                "batch=, or a rule with def_vmap."
            )
        calls = [
            [
                value if axis is None else self.arrays.select(value, axis, i)
                for axis, value in zip(self.axes, self.values, strict=True)
            ]
            for i in range(self.size)
        ]
        self.op.counts["vmap loop"] += 1
        if self.op.digest not in _warned:
            _warned.add(self.op.digest)
            inputs = zip(self.op.rule.inputs, self.axes, strict=True)
            names = ", ".join(argument.name for argument, axis in inputs if axis is not None)
            warn(
                f"op {self.op.name!r} is called {self.size} times by vmap, once per element of the "
                f"batch: no dim of the batched inputs ({names}) and of all outputs is declared "
                "independent. Nothing is lost but time. In an op of your own, declare *S or "
                "batch=, or a rule with def_vmap.",
                FerruleWarning,
            )
        results = [self.call(*inputs) for inputs in calls]
        if not count:
            return None, None
        if count == 1:
            return self.arrays.stack(results, 0), 0
        outputs = tuple(self.arrays.stack([y[i] for y in results], 0) for i in range(count))
        return outputs, (0,) * count
