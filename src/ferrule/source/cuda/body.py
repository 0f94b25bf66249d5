"""The CUDA text of a kernel whose body is CUDA: `ferrule.cuda_kernel`.

The body stands in a ``__global__`` function in namespace ``mlx::core::cu``, where MLX puts it, and
the header before it in the global one. Nothing of either is rewritten. `include/cuda_kernel.h` has
the names that MLX documents.
"""

from __future__ import annotations

import re
from collections.abc import Set

from ...dtypes import FLOAT8, complex64
from ...spec import Spec
from .. import described, named_parts, printing
from .launch import kernel_parameters, kernel_symbol
from .unit import constant

_SPACE = "mlx::core::cu"

# The parts of libcu++ that include/cuda_kernel.h knows, and the names of cuda::std that they have.
# A name that is not listed may be in any of them.
_PARTS = {
    "ARRAY": r"array|get|tuple_(size|element)(_v|_t)?",
    "LIMITS": r"numeric_limits",
    "TUPLE": r"tuple|make_tuple|tie|apply|get|tuple_(size|element)(_v|_t)?",
    "COMPLEX": r"complex",
    "TYPE_TRAITS": r"type_traits|(is|remove|add|make|has)_\w+|conditional(_t)?|enable_if(_t)?|"
    r"decay(_t)?|common_type(_t)?|integral_constant|(bool_constant|true_type|false_type)|"
    r"underlying_type(_t)?|void_t|invoke_result(_t)?|type_identity(_t)?",
}
_ALWAYS = (
    r"c(stdint|stddef|limits|float)|u?int(_fast|_least)?(8|16|32|64|max|ptr)_t|(size|ptrdiff)_t"
)
_STD = re.compile(r"\bcuda\s*(?:::|/)\s*std\b(?:\s*(?:::|/)\s*(\w+))?")
_GROUPS = re.compile(r"\b(cg|cooperative_groups)\b")
_LIBRARY = re.compile(r"\bcuda\s*::\s*(?!std\b)\w|\bcuda\s*::\s*std\s*::\s*atomic")
_FP8 = re.compile(r"fp8|e8m0", re.IGNORECASE)
_COMPLEX = re.compile(r"\b(complex(64_|128_|_)t|is_complex(_v)?)\b")


def text(spec: Spec) -> str:
    """The whole text."""
    kernel = spec.kernel
    lines = [f"// {kernel.name}", *(f"#define {name} 1" for name in named(spec))]
    if printing.prints(f"{kernel.header}\n{kernel.source}", printing.CUDA):
        lines.append("#define FR_CUDA_PRINTF 1")
    lines += ['#include "cuda_kernel.h"', f'#line 1 "{kernel.name}.header"', kernel.header]
    lines += ['#line 1 "ferrule"', "namespace mlx { namespace core { namespace cu {"]
    lines.append(f'extern "C" __global__ void {kernel_symbol(spec)}(')
    lines.append(",\n".join(f"    {parameter}" for parameter in _parameters(spec)) + ") {")
    lines += locals_of(spec)
    lines += [f'#line 1 "{kernel.name}.source"', kernel.source, '#line 1 "ferrule"']
    return "\n".join([*lines, "}", "} } }  // namespace mlx::core::cu", ""])


def named(spec: Spec) -> list[str]:
    """The macros that ask include/cuda_kernel.h for the libraries that the text seems to name."""
    types = {i.dtype for i in spec.inputs} | {*spec.outputs, *(v for _, v in spec.template)}
    return library_switches(f"{spec.kernel.header}\n{spec.kernel.source}", types)


def library_switches(code: str, types: Set[object]) -> list[str]:
    """As `named`, for a text and the types of its arrays."""
    names = {match[1] or "" for match in _STD.finditer(code)}
    headers = {
        header for header, own in _PARTS.items() for n in names if re.fullmatch(own, n, re.ASCII)
    }
    listed = f"{_ALWAYS}|{'|'.join(_PARTS.values())}"
    if not all(re.fullmatch(listed, name, re.ASCII) for name in names):
        headers |= set(_PARTS)
    if _COMPLEX.search(code) or complex64 in types:
        headers.add("COMPLEX")
    switches = [f"FR_STD_{header}" for header in _PARTS if header in headers]
    if _FP8.search(code) or types & {*FLOAT8}:
        switches.append("FR_FP8")
    if _LIBRARY.search(code):
        return [*switches, "FR_COOPERATIVE_GROUPS", "FR_CUDA_LIBRARY"]
    return [*switches, "FR_COOPERATIVE_GROUPS"] if _GROUPS.search(code) else switches


def _parameters(spec: Spec) -> list[str]:
    kernel = spec.kernel
    # That loads can be moved before stores: nothing else shares memory with what is written, as
    # hosts see to where arguments are written in place (operators/call.py, `sharing`). With `pdl`,
    # NVRTC would move those of inputs to where the kernel ahead may not have written them yet.
    alone = "" if kernel.pdl else " __restrict__"
    declarations: list[str] = []
    for kind, i in kernel_parameters(spec):
        if kind == "output":
            declarations.append(f"{spec.outputs[i].cuda}*{alone} {kernel.output_names[i]}")
            continue
        name, ctype = kernel.input_names[i], spec.inputs[i].dtype.cuda
        if kind == "input":
            declarations.append(f"const {ctype}* {name}")
        elif kind == "value":
            parameter = name if name in kernel.values else f"fr_a_{name}"
            declarations.append(f"const __grid_constant__ {ctype} {parameter}")
        else:
            struct = kind.capitalize()
            declarations.append(f"const __grid_constant__ {_SPACE}::{struct} {name}_{kind}")
    return declarations


def locals_of(spec: Spec) -> list[str]:
    """The declarations of what the body uses without a parameter of its own."""
    lines: list[str] = []
    for name, input_, _ in described(spec):
        if input_.value and name not in spec.kernel.values:
            lines.append(f"  const {input_.dtype.cuda}* const {name} = &fr_a_{name};")
        for part in named_parts(spec.kernel, name):
            if part == "ndim":
                lines.append(f"  constexpr int {name}_ndim = {input_.ndim};")
            elif not input_.ndim:
                lines.append(f"  constexpr {_SPACE}::{part.capitalize()} {name}_{part}{{}};")
    constants = (constant(name, value, lambda d: d.cuda) for name, value in spec.template)
    return lines + [f"  {declaration}" for declaration in constants]
