"""Ops and DTensor: which placements of inputs and outputs go together.

Imported where `torch.distributed.tensor` is, and an op meets torch or a tensor subclass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._op_schema import OpStrategy
from torch.distributed.tensor.experimental import register_sharding

from ...errors import KernelError
from ...operators import derivatives
from ...operators.op import Op
from ...operators.sharding import splits


def register(op: Op, overload: Any) -> None:
    """Tell DTensor how calls of an op are run on shards: along each dim of a device mesh as one of
    `_ways` says; DTensor takes what moves the least."""

    def placements(*args_schema: Any) -> list[tuple[list[Any], list[Any]]]:
        mesh = next(spec.mesh for spec in args_schema if hasattr(spec, "shape"))
        return [(list(way.outputs), list(way.inputs)) for way in _ways(op, args_schema, mesh)]

    register_sharding(overload)(placements)
    if any(parameter.mutable for parameter in op.rule.inputs):
        _keep_in_place(op, overload)


class _Way(NamedTuple):
    """The placements that go together along one dim of a mesh.

    Attributes:
        inputs, outputs: of a call; None of an input that is absent or a number.
        whole: of what every process has all, the gradient's: that, or a part of the sum.
    """

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    whole: Any

    @property
    def cotangents(self) -> tuple[Any, ...]:
        """Of the outputs' cotangents: all parts have that of a sum."""
        return tuple(p if isinstance(p, Shard) else Replicate() for p in self.outputs)

    def gradients(self, placements: Sequence[Any]) -> tuple[Any, ...]:
        """Of the gradients of what has these placements."""
        return tuple(p if isinstance(p, Shard) else self.whole for p in placements)

    def moved(self, values: Sequence[Any], dim: int) -> int:
        """How many inputs are sent for it along a dim of a mesh."""
        now = [v.placements[dim] if isinstance(v, DTensor) else None for v in values]
        pairs = zip(now, self.inputs, strict=True)
        return sum(at not in (None, Replicate(), wanted) for at, wanted in pairs)


def _ways(op: Op, values: Sequence[Any], mesh: Any) -> Iterator[_Way]:
    """How a call is run on shards: all inputs are whole (shards are gathered, partial sums added
    up), or all are split as one of `splits` says."""
    ranks = [len(value.shape) if hasattr(value, "shape") else None for value in values]
    whole = [None if rank is None else Replicate() for rank in ranks]
    yield _Way(tuple(whole), tuple(Replicate() for _ in op.rule.outputs), Replicate())
    for split in splits(op, ranks):
        size = values[split.whole].shape[split.inputs[split.whole]]
        if split.multiple > 1 and size % (split.multiple * mesh.size()):
            continue  # parts would begin within what belongs together
        outputs = tuple(Partial() if axis is None else Shard(axis) for axis in split.outputs)
        inputs = tuple(
            unsplit if axis is None else Shard(axis)
            for unsplit, axis in zip(whole, split.inputs, strict=True)
        )
        yield _Way(inputs, outputs, Partial())


def vjp(
    op: Op,
    primals: tuple[Any, ...],
    cotangents: tuple[Any, ...],
    outputs: tuple[Any, ...],
    wanted: tuple[bool, ...],
) -> tuple[Any, ...]:
    """`derivatives.vjp` of DTensors, by a rule that is array code: that of the call which each
    process ran, on what it has.

    So what the call left where it was stays there for the derivative: no weights are gathered, as
    where DTensor follows array code. The gradient of what every part read whole is a partial sum.
    """
    mesh = outputs[0].device_mesh
    possible, ways = list(_ways(op, primals, mesh)), []
    for dim in range(mesh.ndim):
        now = tuple(output.placements[dim] for output in outputs)
        fitting = [way for way in possible if way.outputs == now]
        if not fitting:  # no call gave these
            return derivatives.vjp(op, primals, cotangents, outputs, wanted)
        ways.append(min(fitting, key=lambda way: way.moved(primals, dim)))

    def along(placements: Callable[[_Way], tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Those of each array, along all dims of the mesh."""
        return list(zip(*map(placements, ways), strict=True))

    gradients = along(lambda way: way.gradients(way.inputs))
    parts = [
        _part(value, *where) if isinstance(value, DTensor) else value
        for value, *where in zip(primals, along(lambda way: way.inputs), gradients, strict=True)
    ]
    of_cotangents = along(lambda way: way.gradients(way.cotangents))
    grads = derivatives.vjp(
        op,
        tuple(parts),
        tuple(map(_part, cotangents, along(lambda way: way.cotangents), of_cotangents)),
        tuple(output.to_local() for output in outputs),
        wanted,
    )
    return tuple(
        _placed(grad, mesh, where, primal) if isinstance(grad, torch.Tensor) else grad
        for grad, where, primal in zip(grads, gradients, primals, strict=True)
    )


def _part(value: Any, placements: Sequence[Any], of_gradient: Sequence[Any]) -> Any:
    """What this process has of a DTensor that is placed so, with a gradient that is placed so."""
    return value.redistribute(placements=placements).to_local(grad_placements=of_gradient)


def _placed(part: Any, mesh: Any, placements: Sequence[Any], like: Any) -> Any:
    """The DTensor of which each process has a part, in the shape of another."""
    shape = tuple(like.shape)
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensor.from_local(
        part.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride
    )


def _keep_in_place(op: Op, overload: Any) -> None:
    """Rule out strategies that redistribute an input that is written in place: the kernel would
    write to a copy."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    strategies = propagator.op_strategy_funcs[overload]

    def in_place(schema: Any) -> Any:
        tensors = [
            (parameter, spec)
            for parameter, spec in zip(op.rule.inputs, schema.args_schema, strict=True)
            if isinstance(spec, OpStrategy)
        ]
        placed = [spec.strategies[0].output_spec.placements for _, spec in tensors]
        kept = [
            strategy
            for strategy in strategies(schema).strategies
            if all(
                not p.mutable or spec.placements == now
                for (p, _), spec, now in zip(tensors, strategy.input_specs, placed, strict=True)
            )
        ]
        if not kept:
            written = [
                f"{parameter.name!r} ({parameter}) with {now}"
                for (parameter, _), now in zip(tensors, placed, strict=True)
                if parameter.mutable
            ]
            raise KernelError(
                f"[op] op {op.name!r} writes in place to {', '.join(written)}, and cannot be "
                "carried out on such parts: only dims that are declared independent (*S, batch=) "
                "are sharded, alike in all inputs that are written in place. Redistribute these "
                "first."
            )
        return OpStrategy(kept)

    propagator.register_op_strategy(overload, in_place, propagator.op_to_schema_info[overload])
