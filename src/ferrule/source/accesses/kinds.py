"""The integer types of the dialect, what C++ converts them to, and other types as far as accesses
depend on them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from ...dtypes import Dtype
from .. import words


class Kind(NamedTuple):
    """An integer type, or bool."""

    name: str
    bits: int
    signed: bool

    @property
    def least(self) -> int:
        return -(1 << (self.bits - 1)) if self.signed else 0

    @property
    def most(self) -> int:
        return (1 << (self.bits - self.signed)) - 1


BOOL = Kind("bool", 1, False)
INT, UINT = Kind("int", 32, True), Kind("uint", 32, False)
LONG, ULONG = Kind("long", 64, True), Kind("ulong", 64, False)
SHORT, USHORT = Kind("short", 16, True), Kind("ushort", 16, False)
CHAR, UCHAR = Kind("char", 8, True), Kind("uchar", 8, False)

_NAMES: dict[Kind, str] = {
    BOOL: "bool",
    INT: "int int32_t signed",
    UINT: "uint uint32_t unsigned",
    LONG: "long int64_t ptrdiff_t l0ng",
    ULONG: "ulong uint64_t size_t",
    SHORT: "short int16_t sh0rt",
    USHORT: "ushort uint16_t",
    CHAR: "char int8_t",
    UCHAR: "uchar uint8_t",
}
KINDS = {name: kind for kind, names in _NAMES.items() for name in names.split()}
_SIGNED = {"signed": True, "s1gned": True, "unsigned": False, "uns1gned": False}
_OF_DTYPE = {"b": (BOOL,), "i": (CHAR, SHORT, INT, LONG), "u": (UCHAR, USHORT, UINT, ULONG)}

# Other types, of which accesses need no more than their bytes.
_BYTES = {
    "float": 4, "half": 2, "float16_t": 2, "bfloat": 2, "bfloat16_t": 2, "double": 8,
    "complex64_t": 8,
}  # fmt: skip
QUALIFIERS = words(
    "const constexpr static volatile inline thread_local device threadgroup constant thread "
    "extern struct typename"
)
_VECTOR = re.compile(r"(packed_)?([a-z]+?)([234])")
_VEC = re.compile(r"vec<\s*(.+?)\s*,\s*([234])\s*>")
_ATOMIC = re.compile(r"atomic(?:_([a-z]+)|<\s*(.+?)\s*>)")


class Type(NamedTuple):
    """A type.

    Attributes:
        name: as it is written, without qualifiers.
        kind: of integers, and of a vector's components; None of what is no integer.
        lanes: a vector's components, else 1.
        size: bytes of a value; None where they are not known.
    """

    name: str
    kind: Kind | None = None
    lanes: int = 1
    size: int | None = None


def of_kind(kind: Kind) -> Type:
    """The type of an integer."""
    return Type(kind.name, kind, 1, max(kind.bits // 8, 1))


def of_dtype(dtype: Dtype) -> Type:
    """The type of an array's elements."""
    for kind in _OF_DTYPE.get(dtype.kind, ()):
        if max(kind.bits // 8, 1) == dtype.itemsize:
            return of_kind(kind)
    return Type(dtype.metal, None, 1, dtype.itemsize)


def type_of(text: str, named: Mapping[str, Type]) -> Type:
    """The type that a text names, whatever its qualifiers; one of no known size, where the text is
    not known.

    Args:
        named: what the author's own names of types mean.
    """
    text = re.sub(r"::fr::metal::|::fr::|metal::|std::", "", text)
    parts = [w for w in re.findall(r"[\w:]+(?:<[^>]*>)?", text) if w not in QUALIFIERS]
    name = " ".join(parts)
    if name in named:
        return named[name]
    if name in KINDS:
        return of_kind(KINDS[name])
    signs = [_SIGNED[w] for w in parts if w in _SIGNED]
    if signs:
        rest = [w for w in parts if w not in _SIGNED and w != "int"] or ["int"]
        kind = KINDS.get(rest[0])
        if kind is not None and len(rest) == 1:
            return of_kind(next(k for k in KINDS.values() if k[1:] == (kind.bits, signs[0])))
    if len(parts) == 2 and parts[1] == "int" and parts[0] in KINDS:  # ``long int``
        return of_kind(KINDS[parts[0]])
    if name in _BYTES:
        return Type(name, None, 1, _BYTES[name])
    if atomic := _ATOMIC.fullmatch(name):
        return type_of(atomic[1] or atomic[2], named)
    if match := _VEC.fullmatch(name):
        return _vector(name, type_of(match[1], named), int(match[2]), False)
    if (match := _VECTOR.fullmatch(name)) and (match[2] in KINDS or match[2] in _BYTES):
        return _vector(name, type_of(match[2], named), int(match[3]), match[1] is not None)
    return Type(name)


def _vector(name: str, element: Type, lanes: int, packed: bool) -> Type:
    places = 4 if lanes == 3 and not packed else lanes
    size = None if element.size is None else element.size * places
    return Type(name, element.kind, lanes, size)


def in_elements(type_: Type) -> tuple[str, int]:
    """What a vector is made of, by its name, and how many of that it has room for."""
    match = _VEC.fullmatch(type_.name)
    return (match[1], 4 if match[2] == "3" else int(match[2])) if match else (type_.name, 1)


def promoted(kind: Kind) -> Kind:
    """What arithmetic makes of an operand."""
    return kind if kind.bits >= 32 else INT


def common(a: Kind, b: Kind) -> Kind:
    """The type in which two operands meet."""
    a, b = promoted(a), promoted(b)
    if a.bits != b.bits:
        return a if a.bits > b.bits else b
    return a if not a.signed else b
