"""The schema of an op in torch: which arguments its operator takes, and what it gives."""

from __future__ import annotations

from ... import dtypes
from ...errors import KernelError
from ...operators.op import Op

_MOST_ARGUMENTS = 64  # of a schema in torch


def schema(op: Op) -> str:
    """``(Tensor x, Tensor? bias, float eps) -> Tensor``: what torch knows of an op."""
    for side, declared in (("inputs", op.rule.inputs), ("outputs", op.rule.outputs)):
        if len(declared) > _MOST_ARGUMENTS:
            raise KernelError(
                f"[op] op {op.name!r} has {len(declared)} {side}; torch's ops have "
                f"{_MOST_ARGUMENTS} at most."
            )
    parts = []
    for i, parameter in enumerate(op.rule.inputs):
        if parameter.dims is None:
            kind = dtypes.BY_NAME[parameter.dtype].kind
            if kind == "c":
                raise KernelError(
                    f"[op] input {parameter.name!r} of op {op.name!r}: torch's ops take no complex "
                    f"numbers; declare an array, {parameter.name}[]:{parameter.dtype}."
                )
            schema_type = {"b": "bool", "f": "float"}.get(kind, "SymInt")
        else:
            schema_type = f"Tensor(a{i}!)" if parameter.mutable else "Tensor"
            schema_type += "?" * parameter.optional
        parts.append(f"{schema_type} {parameter.name}")
    outputs = ["Tensor"] * len(op.rule.outputs)
    result = outputs[0] if len(outputs) == 1 else f"({', '.join(outputs)})"
    return f"({', '.join(parts)}) -> {result}"
