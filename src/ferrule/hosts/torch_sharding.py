"""Ops and DTensor: which placements of inputs and outputs go together.

Imported where `torch.distributed.tensor` is, and an op meets torch or a tensor subclass.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._op_schema import OpStrategy
from torch.distributed.tensor.experimental import register_sharding

from ..errors import KernelError
from ..op_declaration import Op
from ..sharding import splits


def register(op: Op, overload: Any) -> None:
    """Tell DTensor how calls of an op are carried out on parts.

    Along each dim of a device mesh all inputs are whole (shards are gathered, partial sums added
    up), or all are split as one of `splits` says; DTensor takes what moves the least.
    """

    def placements(*given: Any) -> list[tuple[list[Any], list[Any]]]:
        ranks = [len(one.shape) if hasattr(one, "shape") else None for one in given]
        whole = [None if rank is None else Replicate() for rank in ranks]
        found = [([Replicate() for _ in op.rule.outputs], whole)]
        for split in splits(op, ranks):
            outputs = [Partial() if axis is None else Shard(axis) for axis in split.outputs]
            inputs = [
                unsplit if axis is None else Shard(axis)
                for unsplit, axis in zip(whole, split.inputs, strict=True)
            ]
            found.append((outputs, inputs))
        return found

    register_sharding(overload)(placements)
    if any(one.mutable for one in op.rule.inputs):
        _keep_in_place(op, overload)


def _keep_in_place(op: Op, overload: Any) -> None:
    """Rule out what would move an input that is written in place: the kernel would write to a
    copy."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    every = propagator.op_strategy_funcs[overload]

    def kept(schema: Any) -> Any:
        tensors = [
            (one, given)
            for one, given in zip(op.rule.inputs, schema.args_schema, strict=True)
            if isinstance(given, OpStrategy)
        ]
        placed = [given.strategies[0].output_spec.placements for _, given in tensors]
        found = [
            strategy
            for strategy in every(schema).strategies
            if all(
                not one.mutable or spec.placements == now
                for (one, _), spec, now in zip(tensors, strategy.input_specs, placed, strict=True)
            )
        ]
        if not found:
            written = [
                f"{one.name!r} ({one}) with {now}"
                for (one, _), now in zip(tensors, placed, strict=True)
                if one.mutable
            ]
            raise KernelError(
                f"[op] op {op.name!r} writes in place to {', '.join(written)}, and cannot be "
                "carried out on such parts: only dims that are declared independent (*S, batch=) "
                "are sharded, alike in all inputs that are written in place. Redistribute these "
                "first."
            )
        return OpStrategy(found)

    propagator.register_op_strategy(overload, kept, propagator.op_to_schema_info[overload])
