"""The types that a text names, and what the dialect's functions give."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from .. import words
from .nodes import BOOL, FLOAT, LONG, RANKS, UINT, Type, common, of
from .partials import PARTIALS

_QUALIFIERS = words(
    "const constexpr static volatile inline thread_local device threadgroup constant thread"
)
_SYNONYMS = {
    "int8_t": "char", "uint8_t": "uchar", "int16_t": "short", "uint16_t": "ushort",
    "int32_t": "int", "uint32_t": "uint", "int64_t": "long", "uint64_t": "ulong",
    "size_t": "ulong", "ptrdiff_t": "long", "unsigned": "uint", "unsigned int": "uint",
    "float16_t": "half", "float32_t": "float", "bfloat16_t": "bfloat", "signed": "int",
    "long int": "long", "unsigned long": "ulong", "unsigned char": "uchar",
    "unsigned short": "ushort", "l0ng": "long", "sh0rt": "short", "uns1gned": "uint",
}  # fmt: skip
_VECTOR = re.compile(r"(packed_)?([a-z]+)([234])")
_VEC = re.compile(r"vec<(.+),\s*([234])\s*>")

_BOOLEAN = words("isnan isinf isfinite isnormal signbit all any simd_all simd_any simd_is_first")
# Of integers, too, these give floats.
_FLOATING = PARTIALS.keys() - words("+ - * / max min abs clamp mad")
_SCALAR = words("dot length length_squared distance distance_squared")


def type_named(text: str, types: Mapping[str, Type]) -> Type | None:
    """The type that a text names, whatever its qualifiers; None of one that is not known.

    Args:
        types: what template parameters and the author's own names mean.
    """
    text = re.sub(r"::fr::metal::|::fr::|metal::", "", text)
    parts = [w for w in re.findall(r"\w+(?:\s*<[^<>]*>)?", text) if w not in _QUALIFIERS]
    name = " ".join(parts)
    if name in types:
        return types[name]
    name = _SYNONYMS.get(name, name)
    if name in RANKS:
        return of(name)
    if match := _VEC.fullmatch(name):
        element = type_named(match[1], types)
        return element and element._replace(lanes=int(match[2]))
    if (match := _VECTOR.fullmatch(name)) and match[2] in RANKS and not match[1]:
        return of(match[2], int(match[3]))
    return None


def is_pointer(text: str) -> bool:
    """Whether a text names a pointer."""
    return "*" in text


def result_of(name: str, arguments: Sequence[Type]) -> Type:
    """What a function of the dialect gives."""
    name = name.rsplit("::", 1)[-1]
    if not arguments:
        return UINT
    lanes = max(t.lanes for t in arguments)
    if name in _BOOLEAN:
        scalar = name.startswith("simd_") or name in ("all", "any")
        return BOOL if scalar else BOOL._replace(lanes=lanes)
    if name == "select":
        return arguments[0]
    if name.startswith("elem_to_loc"):
        return LONG
    if name in ("simd_ballot", "popcount", "clz", "ctz"):
        return arguments[0] if not arguments[0].floating else UINT
    if name.startswith(("simd_", "quad_", "atomic_")):
        return arguments[0]
    most = arguments[0]
    for other in arguments[1:]:
        most = common(most, other)
    if name in _SCALAR:
        return most.scalar
    if not most.floating and name in _FLOATING:
        return FLOAT._replace(lanes=lanes)
    return most
