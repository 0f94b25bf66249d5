"""Text: the Metal signature, and one C++ text that g++, clang and NVRTC read."""

from __future__ import annotations

from typing import NamedTuple

from ..dtypes import Dtype
from ..kernel import Kernel
from ..spec import Input, Spec, TemplateValue

ENTRY = "fr_entry"  # the exported function of a CPU kernel
LOWEST = "(-2147483647 - 1)"  # C++ has no literal of that number


def words(text: str) -> frozenset[str]:
    """The words of a table."""
    return frozenset(text.split())


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


# What describes an input, and its type.
PARTS = {"shape": "int*", "strides": "int64_t*", "ndim": "int&"}


def named_parts(kernel: Kernel, name: str) -> list[str]:
    """Those of `PARTS` of an input that the body names."""
    return [part for part, wanted in zip(PARTS, kernel.wants(name), strict=True) if wanted]


def described(spec: Spec) -> list[tuple[str, Input, list[str]]]:
    """The inputs, each with its name, and with the parts that the body names if it has dims."""
    inputs = zip(spec.kernel.input_names, spec.inputs, strict=True)
    return [(n, i, named_parts(spec.kernel, n) if i.ndim else []) for n, i in inputs]


def template_value(value: TemplateValue) -> str:
    """A template argument as C++."""
    if isinstance(value, Dtype):
        return value.metal
    if isinstance(value, bool):
        return "true" if value else "false"
    return LOWEST if value == -(1 << 31) else str(value)
