"""What references of ops need beside the words that NumPy, torch and MLX share.

A reference says what an op does, in ordinary array code, and serves every library: operators,
indexing, ``sum(axis=…, keepdims=True)``, and functions such as ``library(x).exp`` are the same in
all of them. Here is what differs. Nothing is imported: who has such an array has its library.
"""

from __future__ import annotations

import sys
from typing import Any

FLOATS = ("float32", "float16", "bfloat16")


def library(x: Any) -> Any:
    """The module with the functions of an array: ``numpy``, ``torch``, ``mlx.core`` or ``cupy``."""
    kinds = [kind.__module__.partition(".")[0] for kind in type(x).__mro__]  # of subclasses, too
    name = next(kind for kind in kinds if kind in ("numpy", "torch", "mlx", "cupy"))
    return sys.modules["mlx.core" if name == "mlx" else name]


def cast(x: Any, dtype: Any) -> Any:
    """An array in another dtype: the name of one, or what another array says."""
    dtype = getattr(library(x), dtype) if isinstance(dtype, str) else dtype
    return x.to(dtype) if hasattr(x, "to") else x.astype(dtype)


def widened(x: Any) -> Any:
    """An array as sums are made of it: 16-bit floats in float32, others as they are."""
    return cast(x, "float32") if x.itemsize == 2 and str(x.dtype).endswith("float16") else x


def copy(x: Any) -> Any:
    """A new array of the same elements."""
    return x.clone() if hasattr(x, "clone") else library(x).array(x)


def count(n: int, like: Any) -> Any:
    """0 to n - 1, in int64, where the array ``like`` is."""
    place = {"device": like.device} if hasattr(like, "to") else {}
    return cast(library(like).arange(n, **place), "int64")


def largest(x: Any, axis: int) -> Any:
    """The maximum along an axis, which stays, of size 1."""
    of = library(x)
    return (of.amax if hasattr(of, "amax") else of.max)(x, axis=axis, keepdims=True)


def sums_at(rows: Any, places: Any, n: int) -> Any:
    """Sums [n, *D] of the rows [M, *D] that have the same of n places [M]."""
    of, shape = library(rows), (n, *rows.shape[1:])
    if hasattr(rows, "index_add"):
        return rows.new_zeros(shape).index_add(0, places, rows)
    sums = of.zeros(shape, rows.dtype)
    if hasattr(sums, "at"):
        return sums.at[places].add(rows) if rows.size else sums  # of nothing MLX's ends the process
    of.add.at(sums, places, rows)
    return sums


def descending(x: Any) -> Any:
    """The places of elements along the last axis in int64: the largest first, of equal ones the one
    with the lowest place; NaN is larger than every number."""
    of = library(x)
    if hasattr(x, "to"):
        return of.argsort(x, dim=-1, descending=True, stable=True)
    stable = {"kind": "stable"} if hasattr(of, "ndarray") else {}  # MLX's always is
    backwards = of.argsort(x[..., ::-1], axis=-1, **stable)[..., ::-1]
    return x.shape[-1] - 1 - cast(backwards, "int64")


def taken(x: Any, places: Any) -> Any:
    """The elements at places along the last axis."""
    of = library(x)
    if hasattr(x, "to"):
        return of.take_along_dim(x, places, dim=-1)
    return of.take_along_axis(x, places, axis=-1)


def mapped_ids(ids: Any, expert_map: Any) -> Any:
    """What ids of experts are by a map, if there is one; -1 of those that it does not have."""
    if expert_map is None:
        return ids
    of = library(ids)
    if expert_map.shape[0] == 0:  # it has no place to look at
        return of.where(ids < 0, ids, -1)
    known = (ids >= 0) & (ids < expert_map.shape[0])
    place = cast(of.where(known, ids, 0), "int64")
    return of.where(known, expert_map[place], -1)


def filled(value: float, like: Any) -> Any:
    """One number in float32, as an array of one axis, where the array ``like`` is."""
    if hasattr(like, "new_full"):
        return like.new_full((1,), value, dtype=library(like).float32)
    return cast(library(like).ones(1) * value, "float32")


def is_mlx(x: Any) -> bool:
    """Whether an array is MLX's: in its graphs shapes are those of the trace alone."""
    return type(x).__module__.startswith("mlx")


def dtype_name(x: Any) -> str:
    """The name of an array's dtype, as NumPy has it: ``"float32"``."""
    return str(getattr(x, "dtype", "")).rpartition(".")[2]


def promoted(a: Any, b: Any) -> tuple[Any, Any]:
    """Two arrays of floats in the dtype that both promote to."""
    names = {dtype_name(a), dtype_name(b)}
    if len(names) == 1 or not names <= set(FLOATS):
        return a, b  # of others an op says what is wrong
    return cast(a, "float32"), cast(b, "float32")  # the two that are narrow have no other
