"""From a CUDA unit to its cubin or PTX, and to what the compiler calls its functions."""

from __future__ import annotations

import re

from ...errors import CompileError, CompilerFailed
from ...source.cuda import unit as cuda_unit
from ...tools.nvrtc import Headers, Nvrtc
from ...unit import UnitSpec
from ..diagnostics import refused
from ..digests import INCLUDE
from ..protocol import UnitBinary
from .build import FLAGS, architecture_flags, version

_NAME_MAP = re.compile(
    r"^__nv_name_map\(\d+\): error: (?P<message>.*)\n\s*#pragma nv_mangled_name (?P<name>.*)$",
    re.MULTILINE,
)
_ERROR = re.compile(r"^\S+\(\d+\): (catastrophic )?error:")
# What is said again of what was said before, in words of our own.
_ECHO = re.compile(r"fr_unit::(of|at|argument|given)<|error: Error in parsing name expression")
_ASSERTION = re.compile(r'static assertion failed with "(.*)"')


def build(
    spec: UnitSpec, text: str, compiler: Nvrtc, cuda_headers: Headers, target: str
) -> UnitBinary:
    """Compile a unit.

    Args:
        spec, text: what is compiled.
        compiler, cuda_headers: with what.
        target: an architecture, such as ``"sm_90"``.

    Raises:
        CompileError: NVRTC refused the text, or a step does not fit its function; quotes the
            author's lines.
        ToolchainError: NVRTC failed in another way.
    """
    options = {option.partition("=")[0].lstrip("-") for option in spec.options}
    flags = [flag for flag in FLAGS if flag.partition("=")[0].lstrip("-") not in options]
    flags += [*spec.options, *architecture_flags(target)]
    flags += [f"-I{folder}" for folder in cuda_headers.folders]
    files = ["cuda_pdl.h", "cuda_unit.h", *["cuda_print.h"] * cuda_unit.unit_prints(spec)]
    own = [(INCLUDE / name).read_text("utf-8") for name in files]
    headers = cuda_unit.headers(spec, "\n".join(own))
    try:
        code, log, names = compiler.compile_unit(text, spec.name, flags, headers, spec.functions)
    except CompilerFailed as failed:
        raise _refused(spec, compiler, failed.log) from None
    return UnitBinary(code, target, text, log, dict(zip(spec.functions, names, strict=True)))


def _refused(spec: UnitSpec, compiler: Nvrtc, log: str) -> CompileError:
    """The error, in which complaints about the map of names are of the step that names it."""
    steps = {call.function: cuda_unit.step_label(call) for call in reversed(spec.calls)}

    def moved(match: re.Match[str]) -> str:
        label = steps.get(match["name"].strip())
        return f"{spec.name}.{label}(1): error: {match['message']}" if label else match[0]

    lines = [line for line in _NAME_MAP.sub(moved, log).splitlines() if not _ECHO.search(line)]
    of_steps = re.compile(rf"{re.escape(spec.name)}\.step\d+\(")
    if any(_ERROR.search(line) and not of_steps.match(line) for line in lines):
        lines = [line for line in lines if not of_steps.match(line)]  # they follow from the others
    output = "\n".join(_ASSERTION.sub(r"\1", line) for line in lines)
    texts = cuda_unit.texts(spec)
    return refused("unit", spec.name, texts, output, version(compiler), log=log)
