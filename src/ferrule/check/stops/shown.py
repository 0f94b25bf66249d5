"""What a thread has where it stops: read from memory while it waits, and put into words."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ... import dtypes
from ..launches.watched import Watched

_MOST_SHOWN, _MOST_DIMS = 512, 4  # of stops.h
_MOST_VALUES = 8  # of an array in one line
_AROUND = 4  # elements on each side of one that is used


class Entry(ctypes.Structure):
    """`stop_shown` of stops.h."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_uint64),
        ("kind", ctypes.c_uint32),
        ("letter", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("lanes", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("dims", ctypes.c_uint32 * _MOST_DIMS),
        ("array", ctypes.c_int32),
        ("readable", ctypes.c_uint32),
    )


class Record(ctypes.Structure):
    """`stop_record` of stops.h."""

    _fields_ = (
        ("place", ctypes.c_int32),
        ("thread", ctypes.c_uint32),
        ("arrays", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("group", ctypes.c_uint64),
        ("shown", Entry * _MOST_SHOWN),
    )


class Array(NamedTuple):
    """An array while a thread waits.

    Attributes:
        what: what it is.
        zero, begin, end: where its first subscript and its ends lie.
        unwritten: whether some bytes from an address on have never been written.
    """

    what: Watched
    zero: int
    begin: int
    end: int
    unwritten: Callable[[int, int], object]

    def number(self, address: int, size: int) -> int:
        """The subscript of an address, where elements have this size."""
        return (address - self.zero) // size


class Shown(NamedTuple):
    """A variable, or an element.

    Attributes:
        name: the variable's, or the element as the author wrote it.
        kind: as in include/stops.h.
        type: in Metal's words.
        value: NumPy's scalar or array, as many dims as it has and one for lanes; None of a pointer,
            of what cannot be read and of what cannot be shown.
        place: where a pointer points, ``"x + 12"``; which element it is, ``"x[12]"``; or nothing.
        problem: why there is no value.
        address, array: where it lies, and in which array.
        scalar, size, lanes: what its elements are made of, as ``"f4"`` (nothing where that is not
            known), their bytes and lanes.
    """

    name: str
    kind: str
    type: str
    value: Any
    place: str
    problem: str
    address: int
    array: Array | None
    scalar: str
    size: int
    lanes: int


_METAL = {"i1": "char", "u1": "uchar", "i2": "short", "u2": "ushort", "i4": "int", "u4": "uint",
          "i8": "long", "u8": "ulong", "b1": "bool", "f2": "half", "g2": "bfloat", "f4": "float",
          "f8": "double", "c8": "complex64_t"}  # fmt: skip


def _scalar(entry: Entry) -> str:
    """The kind and the bytes of what an element is made of: ``"f4"``."""
    lanes = 4 if entry.lanes == 3 and entry.size % 3 else entry.lanes  # a vec<T, 3> has room for 4
    return f"{chr(entry.letter)}{entry.size // lanes}"


def _values(memory: bytes, scalar: str, size: int, lanes: int) -> np.ndarray[Any, Any]:
    """Elements, one after the other: each a row of its lanes."""
    dtype = dtypes.bfloat16.numpy if scalar[0] == "g" else np.dtype(scalar.replace("b1", "?"))
    rows = np.frombuffer(memory, np.uint8).reshape(-1, size)[:, : lanes * dtype.itemsize]
    if scalar == "b1":
        rows = rows != 0
    return np.ascontiguousarray(rows).view(dtype)


def _shaped(rows: np.ndarray[Any, Any], dims: Sequence[int], lanes: int) -> Any:
    values = rows.reshape((*dims, lanes) if lanes > 1 else tuple(dims))
    return values if values.shape else values[()]


def read(record: Record, arrays: Sequence[Array]) -> list[Shown]:
    """All that a thread shows."""
    found: dict[tuple[str, bool], Shown] = {}
    for entry in record.shown[: record.count]:
        one = _read(entry, arrays)
        found.setdefault((one.name, one.kind in "vp"), one)  # of conditions that both hold
    shown = list(found.values())
    return [one._replace(place=_private(one, shown)) if not one.place else one for one in shown]


def _read(entry: Entry, arrays: Sequence[Array]) -> Shown:
    kind, dims = chr(entry.kind), list(entry.dims[: entry.rank])
    array = arrays[entry.array] if 0 <= entry.array < len(arrays) else None
    scalar = _scalar(entry)
    known = _METAL.get(scalar)
    type_ = known or "struct"
    type_ += str(entry.lanes) if entry.lanes > 1 else ""
    type_ += "*" if kind == "p" else "".join(f"[{n}]" for n in dims)
    place = ""
    if array is not None and kind != "v":
        index = array.number(entry.address, entry.size)
        place = f"{array.what.name} + {index}" if kind == "p" else f"{array.what.name}[{index}]"
    value, problem = None, ""
    if kind == "p":
        pass
    elif known is None:
        problem = f"a type of {entry.size} bytes that is not shown"
    elif not entry.readable:
        problem = "outside"
        if array is not None:
            count = (array.end - array.begin) // entry.size
            problem += f" of {array.what.name}, which has {count:,} elements"
    elif kind != "v" and array is not None and array.unwritten(entry.address, entry.size):
        problem = "not written yet"
    else:
        memory = ctypes.string_at(entry.address, entry.size * math.prod(dims))
        rows = _values(memory, scalar, entry.size, entry.lanes)
        value = _shaped(rows, dims, entry.lanes)
    name = entry.name.decode()
    return Shown(
        name, kind, type_, value, place, problem, entry.address, array, scalar if known else "",
        entry.size, entry.lanes,
    )  # fmt: skip


def _private(one: Shown, others: Sequence[Shown]) -> str:
    """Where a pointer points that is to no array of the launch: ``"a + 3"``."""
    if one.kind != "p":
        return ""
    for other in others:
        within = one.address - other.address
        if other.kind == "v" and other.value is not None and 0 <= within <= other.value.nbytes:
            return f"{other.name} + {within // one.size}" if other.value.ndim else f"&{other.name}"
    return "private memory" if one.address else "nowhere"


def near(element: Shown) -> tuple[int, list[str]] | None:
    """What lies around an element in its array: the first one's subscript, and values; None of
    what lies outside."""
    array, size, scalar = element.array, element.size, element.scalar
    if array is None or not scalar or not array.begin <= element.address <= array.end - size:
        return None
    behind = min(_AROUND, (element.address - array.begin) // size)
    ahead = min(_AROUND, (array.end - element.address) // size - 1)
    first = element.address - behind * size
    values: list[str] = []
    for at in range(first, first + (behind + 1 + ahead) * size, size):
        if array.unwritten(at, size):
            values.append("?")
            continue
        row = _values(ctypes.string_at(at, size), scalar, size, element.lanes)[0]
        values.append(lanes(row) if element.lanes > 1 else _number(row[0]))
    return array.number(first, size), values


def words(value: Any, most: int = _MOST_VALUES) -> str:
    """A value: ``3.25``, ``(1, 2, 3)``, ``{0, 1, 2, …}``."""
    if np.ndim(value) == 0:
        return _number(value)
    shown = [words(part, most) for part in value[:most]]
    more = [f"… {len(value) - most:,} more"] if len(value) > most else []
    return "{" + ", ".join(shown + more) + "}"


def _number(value: Any) -> str:
    if isinstance(value, (bool, np.bool_)):
        return "true" if value else "false"
    text = str(value)
    return text.removesuffix(".0")


def told(shown: Shown) -> str:
    """A variable's or an element's value, or why there is none; lanes stand in round brackets."""
    if shown.value is None:
        return shown.problem
    return lanes(shown.value) if shown.lanes > 1 else words(shown.value)


def lanes(value: Any) -> str:
    """Vectors: ``(1, 2, 3, 4)``."""
    if np.ndim(value) == 1:
        return f"({', '.join(map(_number, value))})"
    shown = [lanes(part) for part in value[:_MOST_VALUES]]
    more = [f"… {len(value) - _MOST_VALUES:,} more"] if len(value) > _MOST_VALUES else []
    return "{" + ", ".join(shown + more) + "}"
