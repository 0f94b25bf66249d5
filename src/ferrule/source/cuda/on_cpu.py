"""CUDA texts for the CPU, where a launch is checked: each thread of a block is a fiber.

They have the entry of `source.fibers`: what runs and watches those texts does the same with these.
The author's text stands in the namespace where CUDA has it, as it was written, but for shared
memory (`cpu_shared`) and includes: include/cuda_on_cpu.h has CUDA's names, and what it does not
know is found first (`cpu_scan`). For a text, and for what chooses between implementations, the CPU
is a GPU of `CAPABILITY`: what it has in branches for newer ones is not compiled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ...dtypes import FLOAT8, Dtype
from ...errors import DialectError
from ...spec import Spec
from ...unit import TENSOR_MAP, UnitSpec
from .. import ENTRY, described
from ..lexer import Token, join, solid, tokens
from . import cpu_ptx, unit
from .body import library_switches, locals_of, named
from .cpu_scan import ARCH, Unsupported, include_name
from .cpu_scan import unsupported as scan
from .cpu_shared import SharedMemory
from .launch import kernel_parameters

CAPABILITY = ARCH // 10

_SPACE = "mlx::core::cu"
_ENTRY = "FR_EXPORT void {name}(const ::fr::launch* fr_l, uint64_t fr_begin, uint64_t fr_end, "
_ENTRY += "::fr::worker* fr_w) {{\n{run}}}\n"
_TAIL = (
    "FR_EXPORT const char fr_units[] = \"threadgroups\";\nFR_EXPORT const char fr_alone = '0';\n"
)


def unsupported(spec: Spec | UnitSpec) -> list[Unsupported]:
    """What of a kernel or a unit is not known on the CPU, by text and line.

    Raises:
        DialectError: a comment is never closed, or a directive is written in an odd way.
    """
    found: list[Unsupported] = []
    if isinstance(spec, Spec):
        for where, text in (("header", spec.kernel.header), ("source", spec.kernel.source)):
            found += scan(tokens(text, kernel=spec.kernel.name, where=where), where)
        dtypes = {i.dtype for i in spec.inputs} | {*spec.outputs, *(v for _, v in spec.template)}
        return found + _small_floats(dtypes)
    own = [name for name, _ in spec.headers]
    for where, text in (("source", spec.source), *spec.headers):
        found += scan(tokens(text, kernel=spec.name, where=where), where, own)
    if spec.specific:
        found.append(Unsupported(1, "instructions of sm_90a"))
    kinds = {kind for call in spec.calls for _, kind in call.arguments}
    if TENSOR_MAP in kinds and not any("tensor maps" in one.what for one in found):
        found.append(Unsupported(1, "tensor maps"))
    return found + _small_floats({value for _, value in spec.template})


def _small_floats(dtypes: Iterable[object]) -> list[Unsupported]:
    there = [d.name for d in FLOAT8 if d.name == "float8_e8m0fnu" and d in {*dtypes}]
    return [Unsupported(1, f"floats of 8 bits and less ({name})") for name in there]


def refuse(spec: Spec | UnitSpec) -> None:
    """Raise a DialectError of the first thing that is not known on the CPU, if there is one."""
    found = unsupported(spec)
    if found:
        line, what, where = found[0]
        name = spec.kernel.name if isinstance(spec, Spec) else spec.name
        problem = f"{what}: this runs on NVIDIA GPUs alone, and is not checked on the CPU."
        raise DialectError.at(name, where, line, what, problem)


def text(spec: Spec, *, checked: bool = False) -> str:
    """The text of a kernel whose body is CUDA.

    Args:
        spec: the kernel; `unsupported` has found nothing in it.
        checked: shared memory is registered with what watches the launch.
    """
    kernel = spec.kernel
    shared = SharedMemory(checked)
    header = _rewritten(kernel.header, kernel.name, "header", shared)
    source = _rewritten(kernel.source, kernel.name, "source", shared)
    parameters, arguments = _parameters(spec)
    lines = [*_head(kernel.name, named(spec), checked), '#include "cuda_kernel.h"']
    lines += [f'#line 1 "{kernel.name}.header"', header, '#line 1 "ferrule"']
    lines += ["namespace mlx { namespace core { namespace cu {"]
    apart = "__attribute__((noinline, flatten)) " if checked else ""  # as in source.fibers
    lines += [f"static {apart}void fr_kernel(", ",\n".join(f"    {p}" for p in parameters) + ") {"]
    lines += [*locals_of(spec), shared.at_start(tokens(source, kernel=kernel.name, where="source"))]
    lines += [f'#line 1 "{kernel.name}.source"', source, '#line 1 "ferrule"', "}"]
    lines += ["} } }  // namespace mlx::core::cu"]
    given = ", ".join(arguments)
    run = (
        "  ::fr::fiber_groups(fr_l, fr_begin, fr_end, fr_w, [&](const ::fr::group& fr_g, unsigned "
        "fr_i) FR_QUIET {\n    ::fr::on_cpu::begin(fr_l, fr_g, fr_i);\n"
        f"    {_SPACE}::fr_kernel({given});\n  }});\n"
    )
    return "\n".join(lines) + "\n" + _ENTRY.format(name=ENTRY, run=run) + _TAIL


def unit_text(spec: UnitSpec, *, checked: bool = False) -> str:
    """The text of a unit, with an entry for each of its functions: `entry_of`.

    Args:
        spec: the unit; `unsupported` has found nothing in it.
        checked: as for `text`.
    """
    shared = SharedMemory(checked)
    headers = dict(spec.headers)
    source = _rewritten(spec.source, spec.name, "source", shared, headers)
    code = "\n".join([spec.source, *headers.values()])
    types = {value for _, value in spec.template if isinstance(value, Dtype)}
    lines = [*_head(spec.name, library_switches(code, types), checked)]
    lines += ['#include "cuda_cpu_unit.h"']
    lines += [unit.constant(name, value) for name, value in spec.template]
    lines += [f'#line 1 "{spec.name}.source"', source]
    for call in spec.calls:
        for check in unit.checks(call):
            lines += [f'#line 1 "{spec.name}.{unit.step_label(call)}"', check]
    lines.append('#line 1 "ferrule"')
    entries = ""
    for function in spec.functions:
        run = f"  ::fr::on_cpu::run_unit(&({function}), fr_l, fr_begin, fr_end, fr_w);\n"
        entries += _ENTRY.format(name=entry_of(spec, function), run=run)
    return "\n".join(lines) + "\n" + entries + _TAIL


def entry_of(spec: UnitSpec, function: str) -> str:
    """The name of the entry of a unit's function."""
    return f"{ENTRY}_{spec.functions.index(function)}"


def _head(name: str, switches: list[str], checked: bool) -> list[str]:
    defines = [*switches, *(["FR_CHECKED"] if checked else [])]
    return [f"// {name}", *(f"#define {define} 1" for define in defines),
            '#include "cuda_on_cpu.h"']  # fmt: skip


def _parameters(spec: Spec) -> tuple[list[str], list[str]]:
    """The parameters of a kernel's function, and what it is given for them."""
    parameters: list[str] = []
    arguments: list[str] = []
    count = len(spec.inputs)
    names = [name for name, _, _ in described(spec)]
    for kind, i in kernel_parameters(spec):
        if kind == "output":
            ctype, place = spec.outputs[i].cuda, count + i
            parameters.append(f"{ctype}* {spec.kernel.output_names[i]}")
            arguments.append(f"static_cast<{ctype}*>(fr_l->buffers[{place}])")
        elif kind in ("input", "value"):
            ctype, name = spec.inputs[i].dtype.cuda, names[i]
            pointer = f"static_cast<const {ctype}*>(fr_l->buffers[{i}])"
            by_name = kind == "input" or name in spec.kernel.values
            parameters.append(f"const {ctype}{'*' * (kind == 'input')} "
                              f"{name if by_name else f'fr_a_{name}'}")  # fmt: skip
            arguments.append(pointer if kind == "input" else f"*{pointer}")
        else:
            of = f"{_SPACE}::{kind.capitalize()}"
            parameters.append(f"const {of} {names[i]}_{kind}")
            table = {"shape": "shapes", "strides": "strides"}[kind]
            arguments.append(f"::fr::on_cpu::per_axis<{of}>(fr_l->{table}[{i}], fr_l->ndims[{i}])")
    return parameters, arguments


def _rewritten(
    text: str, name: str, where: str, shared: SharedMemory, headers: Mapping[str, str] | None = None
) -> str:
    """A text of the author's, under its own line numbers."""
    code = tokens(text, kernel=name, where=where)
    _rewrite_assembly(code)
    for token in code:  # first, for they may declare shared memory
        included = include_name(token)
        if included is not None:
            token.text = ""
            if headers and included in headers:
                token.text = _included(name, where, token.line, included, shared, headers)
    shared.rewrite(code, body=where == "source" and headers is None)
    return join(code)


def _included(
    name: str, where: str, line: int, header: str, shared: SharedMemory, headers: Mapping[str, str]
) -> str:
    """A unit's own header in place of the line that includes it; once, as with `#pragma once`."""
    rest = {key: value for key, value in headers.items() if key != header}
    text = _rewritten(headers[header], name, header, shared, rest)
    guard = "FR_HAS_" + re.sub(r"\W", "_", header)
    text = re.sub(r"^[ \t]*#[ \t]*pragma[ \t]+once\b", "", text, flags=re.MULTILINE)
    return (
        f'\n#ifndef {guard}\n#define {guard}\n#line 1 "{name}.{header}"\n{text}\n#endif\n'
        f'#line {line + 1} "{name}.{where}"'
    )


def _rewrite_assembly(code: list[Token]) -> None:
    """Rewrite inline PTX as calls; what is not known is in branches that are not compiled."""
    parts = solid(code)
    for i, token in enumerate(parts):
        if token.kind != "word" or token.text not in cpu_ptx.ASM or token.macro:
            continue
        assembly = cpu_ptx.read(parts, i)
        if assembly is None:
            continue
        try:
            text = cpu_ptx.translated(assembly)
        except cpu_ptx.Unknown:
            text = "((void)0)"
        for one in parts[i : assembly.end + 1]:
            one.text = ""
        token.text = text
