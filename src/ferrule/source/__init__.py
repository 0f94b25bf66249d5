"""Text: the Metal signature, and one C++ text that g++, clang and NVRTC read."""

from __future__ import annotations

from typing import NamedTuple

from ..dtypes import Dtype
from ..spec import Input, Spec, TemplateValue

ENTRY = "fr_entry"  # the exported function of a CPU kernel
LOWEST = "(-2147483647 - 1)"  # C++ has no literal of that number


class NotSplittable(Exception):
    """The control flow does not allow the split; says why."""


class Note(NamedTuple):
    """Something that runs here but that Apple's compiler or GPU refuses.

    Attributes:
        where: ``"source"`` or ``"header"``.
        line: 1-based line in that text.
        what: what was found.
    """

    where: str
    line: int
    what: str


def described(spec: Spec) -> list[tuple[str, Input, list[str]]]:
    """The inputs: name, properties, and which of ``"shape"``, ``"strides"`` and ``"ndim"`` the body
    names; none of an input without dims."""
    inputs: list[tuple[str, Input, list[str]]] = []
    for name, input_ in zip(spec.kernel.input_names, spec.inputs, strict=True):
        wanted = zip(("shape", "strides", "ndim"), spec.kernel.wants(name), strict=True)
        inputs.append((name, input_, [part for part, w in wanted if w and input_.ndim]))
    return inputs


def template_value(value: TemplateValue) -> str:
    """A template argument as C++."""
    if isinstance(value, Dtype):
        return value.metal
    if isinstance(value, bool):
        return "true" if value else "false"
    return LOWEST if value == -(1 << 31) else str(value)
