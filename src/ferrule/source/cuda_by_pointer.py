"""A kernel's CUDA text whose arguments by value come by an address, for launchers that pass arrays
alone, such as MLX's `mx.fast.precompiled_cuda_kernel`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..spec import Spec
from .cuda_launch import kernel_symbol


def rewritten(text: str, spec: Spec) -> str:
    """The text of `source.cuda` or `source.cuda_body` with another signature: pointers to the
    inputs, a pointer to all that is passed by value, as members of a struct, and pointers to the
    outputs."""
    symbol = kernel_symbol(spec)
    head = re.search(rf'extern "C" __global__ void {symbol}\((.*?)\) \{{\n', text, re.DOTALL)
    if head is None:
        raise AssertionError(f"{symbol} is not in its text")
    pointers, fields, names = [], [], []
    for one in _parts(head[1]):
        if "*" in one:
            pointers.append(one)
            continue
        kind, name = one.removeprefix("const ").removeprefix("__grid_constant__ ").rsplit(" ", 1)
        fields.append(f"  {kind} {name};\n")
        names.append(f"  const auto& {name} = fr_by_value->{name};\n")
    pointers.insert(
        len(pointers) - len(spec.outputs), "const fr_by_value_t* __restrict__ fr_by_value"
    )
    arguments = ", ".join(pointers)
    return (
        f"{text[: head.start()]}struct fr_by_value_t {{\n{''.join(fields)}}};\n"
        f'extern "C" __global__ void {symbol}({arguments}) {{\n{"".join(names)}{text[head.end() :]}'
    )


def _parts(parameters: str) -> Sequence[str]:
    """A parameter list's parts; there are commas inside of templates' brackets, too."""
    found, depth, begin = [], 0, 0
    for at, letter in enumerate(parameters):
        depth += (letter == "<") - (letter == ">")
        if letter == "," and not depth:
            found.append(parameters[begin:at].strip())
            begin = at + 1
    return [*found, parameters[begin:].strip()]
