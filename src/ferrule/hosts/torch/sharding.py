"""Ops and DTensor: which placements of inputs and outputs go together.

Imported where `torch.distributed.tensor` is, and an op meets torch or a tensor subclass.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._op_schema import OpStrategy
from torch.distributed.tensor.experimental import register_sharding

from ...errors import KernelError
from ...operators.op import Op
from ...operators.sharding import splits


def register(op: Op, overload: Any) -> None:
    """Tell DTensor how calls of an op are run on shards.

    Along each dim of a device mesh all inputs are whole (shards are gathered, partial sums added
    up), or all are split as one of `splits` says; DTensor takes what moves the least.
    """

    def placements(*args_schema: Any) -> list[tuple[list[Any], list[Any]]]:
        ranks = [len(spec.shape) if hasattr(spec, "shape") else None for spec in args_schema]
        whole = [None if rank is None else Replicate() for rank in ranks]
        strategies = [([Replicate() for _ in op.rule.outputs], whole)]
        for split in splits(op, ranks):
            one = args_schema[split.whole]
            size = one.shape[split.inputs[split.whole]]
            if split.multiple > 1 and size % (split.multiple * one.mesh.size()):
                continue  # parts would begin within what belongs together
            outputs = [Partial() if axis is None else Shard(axis) for axis in split.outputs]
            inputs = [
                unsplit if axis is None else Shard(axis)
                for unsplit, axis in zip(whole, split.inputs, strict=True)
            ]
            strategies.append((outputs, inputs))
        return strategies

    register_sharding(overload)(placements)
    if any(parameter.mutable for parameter in op.rule.inputs):
        _keep_in_place(op, overload)


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
