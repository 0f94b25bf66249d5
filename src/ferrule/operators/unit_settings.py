"""Checks of the settings of a CUDA unit that are not its steps: headers, options, scratch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .. import dtypes
from ..errors import KernelError, KernelTypeError
from ..kernel import check_text
from ..rules.expression import Expression
from ..rules.rule import Rule
from .expressions import dtype_variables, expression_of

# NVRTC's options that say nothing of files, which no digest would cover, nor of the GPU.
_OPTIONS = (
    "-D", "--define-macro=", "-U", "--undefine-macro=", "--std=", "-std=", "--use_fast_math",
    "-use_fast_math", "--fmad=", "-fmad=", "--ftz=", "-ftz=", "--prec-div=", "-prec-div=",
    "--prec-sqrt=", "-prec-sqrt=", "--maxrregcount=", "-maxrregcount=", "--restrict", "-restrict",
    "--extra-device-vectorization", "-extra-device-vectorization",
)  # fmt: skip
_HEADER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+-]{0,200}")
_LABEL = re.compile(r"source|header|step\d+")  # how diagnostics call what is no header
_SCRATCH = re.compile(r"\s*([A-Za-z_]\w*)\s*\[(.*)\]\s*", re.DOTALL)


class Scratch(NamedTuple):
    """An array that the steps share.

    Attributes:
        name: its name.
        dtype: a dtype's full name, or a variable of the rule.
        dims: its dims.
    """

    name: str
    dtype: str
    dims: tuple[Expression, ...]


def headers_of(op: str, headers: object) -> tuple[tuple[str, str], ...]:
    """The texts that a unit can include, by name."""
    if headers is None:
        return ()
    if not isinstance(headers, Mapping):
        raise KernelTypeError(
            f"[op] `headers` of op {op!r}: got {headers!r}, expected a dictionary such as "
            '{"tile.cuh": text}.'
        )
    for name in headers:
        if not isinstance(name, str) or not _HEADER.fullmatch(name) or _LABEL.fullmatch(name):
            raise KernelError(
                f"[op] `headers` of op {op!r}: got the name {name!r}, expected one such as "
                '"tile.cuh".'
            )
    return tuple((name, check_text(name, text, op, "cuda")) for name, text in headers.items())


def options_of(op: str, options: object) -> tuple[str, ...]:
    """NVRTC's options for a unit."""
    if isinstance(options, str) or not isinstance(options, Sequence):
        raise KernelTypeError(
            f"[op] `options` of op {op!r}: got {options!r}, expected a list such as "
            '["--use_fast_math"].'
        )
    for option in options:
        if not isinstance(option, str) or not option.startswith(_OPTIONS) or option in ("-D", "-U"):
            listed = ", ".join(o for o in _OPTIONS if o.startswith("--") or o in ("-D", "-U"))
            raise KernelError(
                f"[op] `options` of op {op!r}: got {option!r}, expected options of NVRTC that "
                f"begin with one of {listed}, each one str. Texts to include go to `headers`."
            )
    return tuple(options)


def scratch_of(op: str, rule: Rule, scratch: object) -> tuple[Scratch, ...]:
    """The arrays that a unit's steps share."""
    label = f"[op] `scratch` of op {op!r}"
    if scratch is None:
        return ()
    if isinstance(scratch, list) and all(isinstance(a, Scratch) for a in scratch):  # `from_json`
        pairs: list[tuple[object, object]] = [(array.name, array) for array in scratch]
    elif isinstance(scratch, Mapping):
        pairs = list(scratch.items())
    else:
        raise KernelTypeError(
            f'{label}: got {scratch!r}, expected a dictionary such as {{"partial": "float32[N]"}}.'
        )
    arrays = []
    for name, text in pairs:
        if isinstance(text, Scratch):
            dtype, parts = text.dtype, list[object](text.dims)
        else:
            match = _SCRATCH.fullmatch(text) if isinstance(text, str) else None
            if match is None:
                raise KernelError(
                    f'{label}: got {text!r} for {name!r}, expected "dtype[dims]", such as '
                    '"float32[M,N]".'
                )
            dtype, parts = match[1], list[object](_between_commas(match[2]))
        if dtype not in dtypes.BY_NAME and dtype not in dtype_variables(rule):
            raise KernelError(
                f"{label}: {name!r} has the dtype {dtype!r}, which is neither a dtype's full name "
                "nor a variable of the rule."
            )
        setting = f"scratch[{name!r}]"
        dims = tuple(expression_of(op, rule, setting, part) for part in parts)
        for dim in dims:
            if dim.condition:
                raise KernelError(f"{label}: {name!r}: got the condition {dim}, expected a size.")
        arrays.append(Scratch(str(name), dtype, dims))
    return tuple(arrays)


def _between_commas(text: str) -> list[str]:
    """The parts of a text between commas that stand outside of parentheses."""
    parts, depth = [""], 0
    for c in text:
        depth += (c == "(") - (c == ")")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return parts if len(parts) > 1 or parts[0].strip() else []
