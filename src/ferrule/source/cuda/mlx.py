"""The CUDA text that MLX compiles for `mx.fast.cuda_kernel`, for files that MLX reads.

ferrule itself compiles `source.cuda.body`, which needs no header of MLX. The text here is MLX's
0.32, but for what MLX's text leaves a body without: in an op, numbers and dims are values, and have
a parameter of another name; a 0-d input has its shape, which MLX's launch does not pass.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ... import dtypes
from ...dtypes import Dtype
from ...kernel import Kernel, make_kernel
from ...spec import Input, Spec, TemplateValue
from .. import LOWEST, described, named_parts
from .unit import constant

_PROLOGUE = '\n#include "mlx/backend/cuda/device/utils.cuh"\n\n#include <cooperative_groups.h>\n\n'
_SPACE = "namespace mlx::core::cu {\n\nnamespace cg = cooperative_groups;\n\n__global__ void "
_PREFIX = "custom_kernel_"
_END = "\n}\n\n} // namespace mlx::core::cu\n"
_BY_CUDA = {dtype.cuda: dtype for dtype in dtypes.ALL if dtype not in dtypes.FLOAT8}
_PARAMETER = re.compile(r"    (const )?[\w:]+\* (\w+)(,\n|\) \{\n)")
_DESCRIBED = re.compile(r"    const __grid_constant__ (?:Shape|Strides|int) \w+,\n")
_CONSTANT = re.compile(
    r"  (?:constexpr (int|bool) (\w+) = (-?\d+|true|false)|using (\w+) = ([\w:]+));\n"
)
_OF_0D = re.compile(
    r"  constexpr (?:Shape|Strides|int) (\w+)_(?:shape|strides|ndim)(?:\{\}| = 0);\n"
)


def kernel_name(spec: Spec) -> str:
    """The name of the function in the text of ``spec``, without its namespace."""
    return _PREFIX + spec.kernel.name + _suffix(spec)


def _suffix(spec: Spec) -> str:
    suffix = ""
    for _, value in spec.template:
        if isinstance(value, bool):
            suffix += "_t" if value else "_f"
        else:  # a minus sign cannot be in a name
            shown = value.metal if isinstance(value, Dtype) else str(value)
            suffix += "_" + shown.replace("-", "_")
    return suffix


def wants(kernel: Kernel, inputs: Sequence[Input]) -> tuple[tuple[bool, bool, bool], ...]:
    """Per input, whether MLX is to pass its shape, strides and rank."""
    nothing = (False, False, False)
    return tuple(
        kernel.wants(name) if input_.ndim else nothing
        for name, input_ in zip(kernel.input_names, inputs, strict=True)
    )


def text(spec: Spec, function: str = "") -> str:
    """The CUDA source for ``spec``.

    ``function`` is what the function is called, `kernel_name` where it is empty.
    """
    kernel = spec.kernel
    parameters: list[str] = []
    lines: list[str] = []
    for name, input_, _ in described(spec):
        value = name in kernel.values and not input_.ndim
        parameters.append(f"const {input_.dtype.cuda}* {'fr_a_' * value}{name}")
        if value:
            lines.append(f"  const {input_.dtype.cuda} {name} = *fr_a_{name};\n")
        for part in named_parts(kernel, name):
            kind = {"ndim": "int"}.get(part, part.capitalize())
            if input_.ndim:
                parameters.append(f"const __grid_constant__ {kind} {name}_{part}")
            else:
                nothing = " = 0" if part == "ndim" else "{}"
                lines.append(f"  constexpr {kind} {name}_{part}{nothing};\n")
    for name, dtype in zip(kernel.output_names, spec.outputs, strict=True):
        parameters.append(f"{dtype.cuda}* {name}")
    signature = ",\n".join(f"    {parameter}" for parameter in parameters)
    constants = "".join(
        f"  {constant(name, value, lambda d: d.cuda)}\n" for name, value in spec.template
    ).replace(LOWEST, str(-(1 << 31)))
    return (
        f"{_PROLOGUE}{kernel.header}{_SPACE}{function or kernel_name(spec)}(\n{signature}) {{\n"
        + (f"{constants}\n" if constants else "")
        + f"{''.join(lines)}{kernel.source}{_END}"
    )


def read(
    text_: str,
    function: str,
    inputs: Sequence[Input],
    outputs: Sequence[Dtype],
    contiguous: bool,
    shared_memory: int,
) -> Spec:
    """The kernel of such a text, and what was compiled of it: as `source.metal.read.read`.

    Args:
        text_, function, inputs, outputs, contiguous: as there.
        shared_memory: bytes of dynamic shared memory, which the text does not have.

    Raises:
        ValueError: as there.
    """
    space = text_.find(f"{_SPACE}{function}(\n")
    if not text_.startswith(_PROLOGUE) or space < 0 or not text_.endswith(_END):
        raise ValueError(f"it is not what MLX writes around a CUDA function {function!r}")
    position = space + len(f"{_SPACE}{function}(\n")
    names: list[str] = []
    while len(names) < len(inputs) + len(outputs):
        parameter = _PARAMETER.match(text_, position)
        if parameter is None:
            described = _DESCRIBED.match(text_, position)
            if described is None:
                raise ValueError(f"its signature has no parameter {len(names) + 1}")
            position = described.end()
            continue
        names.append(parameter[2])
        position = parameter.end()
    template: list[tuple[str, TemplateValue]] = []
    body = position
    while constant := _CONSTANT.match(text_, position):
        template.append(_value(constant))
        position = constant.end()
    if template and text_[position : position + 1] == "\n":
        body = position + 1
    else:
        template = []
    without_dims = [name for name, input_ in zip(names, inputs, strict=False) if not input_.ndim]
    while (line := _OF_0D.match(text_, body)) and line[1] in without_dims:
        body = line.end()
    kernel = make_kernel(
        "kernel",
        names[: len(inputs)],
        names[len(inputs) :],
        text_[body : -len(_END)],
        text_[len(_PROLOGUE) : space],
        contiguous,
        language="cuda",
        shared_memory=shared_memory,
    )
    spec = Spec(kernel, tuple(inputs), tuple(outputs), tuple(template))
    if text(spec, function) != text_:
        raise ValueError("its signature is not that of its inputs and outputs")
    name = function.removeprefix(_PREFIX).removesuffix(_suffix(spec)) or function
    return replace(spec, kernel=replace(kernel, name=name))


def _value(constant: re.Match[str]) -> tuple[str, TemplateValue]:
    kind, name, value, alias, dtype = constant.groups()
    if alias is not None:
        if dtype not in _BY_CUDA:
            raise ValueError(f"it has the type {dtype!r}")
        return alias, _BY_CUDA[dtype]
    return name, value == "true" if kind == "bool" else int(value)
