"""The CUDA text of a unit: what its template says, the author's text as it is, and checks that each
step gives its function what that takes. Nothing of the author's is rewritten.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ...dtypes import BY_NAME, FLOAT8, Dtype, bfloat16, complex64, float16
from ...spec import TemplateValue
from ...unit import POINTER, TENSOR_MAP, Call, UnitSpec
from .. import printing, template_value

CHECKS = "ferrule_unit.h"  # how the text calls include/cuda_unit.h, and what goes with it

# C's headers, which NVRTC does not have: their names are libcu++'s, or NVRTC's own.
_STD = {"stdint": "cstdint", "stddef": "cstddef", "limits": "climits", "float": "cfloat"}
_DEFINED = re.compile(r"-D\s*(\w+)|--define-macro[= ](\w+)")
_NVRTC_HAS = ("assert", "stdio", "stdlib", "string")
_MATH = """\
#ifndef INFINITY
#define INFINITY __builtin_bit_cast(float, 0x7f800000)
#endif
#ifndef NAN
#define NAN __builtin_bit_cast(float, 0x7fc00000)
#endif
"""
STANDARD = {
    **{
        name: f"#include <cuda/std/{new}>\n"
        for old, new in _STD.items()
        for name in (f"{old}.h", f"c{old}")
    },
    **{name: "" for old in _NVRTC_HAS for name in (f"{old}.h", f"c{old}")},
    "math.h": _MATH,
    "cmath": _MATH,
    "cuda_runtime.h": "",
    "device_launch_parameters.h": "",
}


def _defined(spec: UnitSpec) -> list[str]:
    """The macros that a unit's options define."""
    return [a or b for a, b in _DEFINED.findall(" ".join(spec.options))]


def unit_prints(spec: UnitSpec) -> bool:
    """Whether a unit's text, or one of its headers, prints."""
    defined = "".join(f"#define {name}\n" for name in _defined(spec))
    texts = (defined, *(body for _, body in spec.headers), spec.source)
    return printing.prints("\n".join(texts), printing.CUDA)


def text(spec: UnitSpec) -> str:
    """The whole text."""
    lines = [f"// {spec.name}", *["#define FR_CUDA_PRINTF 1"] * unit_prints(spec)]
    lines += [f'#include "{CHECKS}"', *_includes(spec)]
    lines += [constant(name, value) for name, value in spec.template]
    lines += [f'#line 1 "{spec.name}.source"', spec.source]
    for call in spec.calls:
        for check in checks(call):
            lines += [f'#line 1 "{spec.name}.{step_label(call)}"', check]
    return "\n".join([*lines, ""])


def step_label(call: Call) -> str:
    """The name of a step in diagnostics."""
    return f"step{call.number}"


def headers(spec: UnitSpec, checks: str) -> dict[str, str]:
    """The headers that the text can include beside CUDA's.

    Args:
        spec: the unit.
        checks: the texts of include/cuda_pdl.h and include/cuda_unit.h, and of include/cuda_print.h
            for a unit that prints.
    """
    authored = {name: f'#line 1 "{spec.name}.{name}"\n{body}' for name, body in spec.headers}
    return {**STANDARD, **authored, CHECKS: checks}


def texts(spec: UnitSpec) -> dict[str, str]:
    """The texts that diagnostics quote, by what they call them."""
    steps = {step_label(call): str(call) for call in spec.calls}
    return {"source": spec.source, **dict(spec.headers), **steps}


def cuda_name(dtype: Dtype) -> str:
    """CUDA's own name of a dtype, without MLX's."""
    return "cuda::std::complex<float>" if dtype == complex64 else dtype.cuda


def _includes(spec: UnitSpec) -> list[str]:
    """The includes that the names of dtypes need."""
    dtypes = {value for _, value in spec.template if isinstance(value, Dtype)}
    dtypes |= {BY_NAME[k] for call in spec.calls for _, k in call.arguments if k in BY_NAME}
    includes = [
        f"#include <{name}>"
        for dtype, name in (
            (float16, "cuda_fp16.h"),
            (bfloat16, "cuda_bf16.h"),
            (complex64, "cuda/std/complex"),
        )
        if dtype in dtypes
    ]
    return includes + ["#include <cuda_fp8.h>"] * bool(dtypes.intersection(FLOAT8))


def constant(name: str, value: TemplateValue, type_name: Callable[[Dtype], str] = cuda_name) -> str:
    """The declaration of a template's parameter that has a value."""
    if isinstance(value, Dtype):
        return f"using {name} = {type_name(value)};"
    kind = "bool" if isinstance(value, bool) else "int"
    return f"constexpr {kind} {name} = {template_value(value)};"


def checks(call: Call) -> list[str]:
    """Assertions about what a function takes."""
    function = f"decltype(&({call.function}))"
    count = len(call.arguments)
    checks = [
        f"static_assert(fr_unit::of<{function}>::count == {count}, "
        f'"the step gives {count} arguments, and the function takes another number of them");'
    ]
    for i, (label, kind) in enumerate(call.arguments):
        if kind in (POINTER, TENSOR_MAP):
            condition = f"argument<{function}, {i}>::is_{kind.replace(' ', '_')}"
            passed = "a pointer" if kind == POINTER else "a CUtensorMap by value"
        else:
            dtype = BY_NAME[kind]
            holds = "is_integer" if dtype.kind in "iu" else "is_same"
            condition, passed = f"given<{function}, {i}, {cuda_name(dtype)}>::{holds}", kind
        checks.append(
            f'static_assert(fr_unit::{condition}, "argument {i + 1}, {label}, is {passed}, and the '
            'function has something else there");'
        )
    return checks
