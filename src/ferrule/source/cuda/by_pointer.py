"""A kernel's CUDA text whose arguments by value come by an address, for launchers that pass arrays
alone, such as MLX's `mx.fast.precompiled_cuda_kernel`."""

from __future__ import annotations

import re

from ...spec import Spec
from .launch import kernel_symbol

_COMMA = re.compile(r",(?![^<]*>)")  # none inside of a template's brackets


def rewritten(text: str, spec: Spec) -> str:
    """The text of `source.cuda.text` or `source.cuda.body` with another signature: pointers to the
    inputs, a pointer to all that is passed by value, as members of a struct, and pointers to the
    outputs."""
    symbol = kernel_symbol(spec)
    head = re.search(rf'extern "C" __global__ void {symbol}\((.*?)\) \{{\n', text, re.DOTALL)
    if head is None:
        raise AssertionError(f"{symbol} is not in its text")
    pointers, fields, names = [], [], []
    for declaration in map(str.strip, _COMMA.split(head[1])):
        if "*" in declaration:
            pointers.append(declaration)
            continue
        kind, name = re.sub(r"^(const )?(__grid_constant__ )?", "", declaration).rsplit(" ", 1)
        fields.append(f"  {kind} {name};\n")
        names.append(f"  const auto& {name} = fr_by_value->{name};\n")
    by_value = "const fr_by_value_t* __restrict__ fr_by_value"
    pointers.insert(len(pointers) - len(spec.outputs), by_value)
    arguments = ", ".join(pointers)
    return (
        f"{text[: head.start()]}struct fr_by_value_t {{\n{''.join(fields)}}};\n"
        f'extern "C" __global__ void {symbol}({arguments}) {{\n{"".join(names)}{text[head.end() :]}'
    )
