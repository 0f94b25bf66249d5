"""How threads share the rows of an array: what the bodies of norms and softmaxes begin with.

A row is what lies along one axis. Where that is the last one, a row's elements are neighbours, and
a threadgroup takes one row: its threads walk over the row side by side, and then add up what each
has. Where other axes are behind it, neighbours belong to different rows, and each thread takes a
row: threads are side by side again, and nothing is copied.

A body that is written with these words serves both:

* ``for (uint k = first; k < N; k += step)``: the elements of the row that are this thread's;
* ``AT(k)``: where element ``k`` of the row lies in the array;
* ``ROW``: which row it is, in the order of the array without that axis;
* ``SUM(v)``, ``MAX(v)``: of the values that all threads of the row have, for each of them.

``A`` is the type in which sums are made.
"""

from __future__ import annotations

import sys
from numbers import Integral
from typing import Any, NamedTuple

import ferrule

from .arrays import is_mlx

FLOATS = "(float32, float16, bfloat16, float64)"

# Each simdgroup reduces its own lanes, and then every simdgroup the results of all. The first
# barrier is for rows that are reduced twice: what was read before must have been read by all.
_REDUCTION = """
template <typename A>
inline A WHAT_of_row(A value, threadgroup A* shared, uint lane, uint simdgroup, uint threads) {
    value = metal::simd_WHAT(value);
    if (threads > 32) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (lane == 0) shared[simdgroup] = value;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        value = metal::simd_WHAT(lane < threads / 32 ? shared[lane] : A(NONE));
    }
    return value;
}
"""
_SIDE_BY_SIDE = (
    _REDUCTION.replace("WHAT", "sum").replace("NONE", "0")
    + _REDUCTION.replace("WHAT", "max").replace("NONE", "-INFINITY")
    + """
#define AT(k) (begin + (k))
#define ROW threadgroup_position_in_grid.y
#define SUM(value) sum_of_row<A>(value, shared, lane, simdgroup, step)
#define MAX(value) max_of_row<A>(value, shared, lane, simdgroup, step)
"""
)
SIDE_BY_SIDE = """
    threadgroup A shared[32];
    const uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
    const uint first = thread_position_in_threadgroup.x, step = threads_per_threadgroup.x;
"""

_ONE_EACH = """
#define AT(k) (begin + (k) * behind + column)
#define ROW thread_position_in_grid.x
#define SUM(value) (value)
#define MAX(value) (value)
"""
_ONE_EACH_BEGIN = """
    const size_t behind = {behind};
    const size_t begin = ROW / behind * N * behind;
    const uint column = ROW % behind;
    const uint first = 0, step = 1;
"""


class Rows(NamedTuple):
    """What an op over rows declares besides its own words.

    Attributes:
        dims: of an array: ``"*S,N"``, ``"*S,N,D1"`` …
        others: of what has one element for each row: ``"*S"``, ``"*S,D1"`` …
        begin: the first statements of its body.
        launch: grid, threadgroup, header and template, for `ferrule.op`.
        sum_dtype: the name of ``A``.
    """

    dims: str
    others: str
    begin: str
    launch: dict[str, Any]
    sum_dtype: str


def rows(of: str, behind: int, wide: bool, many: str = "") -> Rows:
    """Rows of an array, along an axis that has ``behind`` axes behind it.

    Args:
        of: the array's name.
        behind: how many axes are behind it.
        wide: sums are made in float64, not in float32.
        many: how many rows there are, where those that are empty count, too.
    """
    dims = [f"D{i}" for i in range(1, behind + 1)]
    many = many or f"{of}.size // max(N, 1)"
    sum_dtype = "float64" if wide else "float32"
    launch: dict[str, Any] = {"template": {"A": getattr(ferrule, sum_dtype)}}
    if behind:
        begin = _ONE_EACH_BEGIN.format(behind=" * ".join(f"size_t({dim})" for dim in dims))
        launch |= {"header": _ONE_EACH, "grid": many, "threadgroup": 256}
    else:
        begin = SIDE_BY_SIDE + "    const size_t begin = size_t(ROW) * N;\n"
        launch |= side_by_side(many)
    return Rows(",".join(["*S", "N", *dims]), ",".join(["*S", *dims]), begin, launch, sum_dtype)


def side_by_side(groups: str) -> dict[str, Any]:
    """Grid, threadgroup and header for so many threadgroups, whose threads share a row's elements.

    A body begins with `SIDE_BY_SIDE`.
    """
    # 32 elements each, until that would be too many threads. A processor keeps sums of more than
    # one simdgroup in memory; of long rows, too: sums of very many elements are coarse.
    few = "device == cpu and N <= 8192"
    threads = f"32 if {few} else max(min(ceildiv(N, 1024) * 32, 1024), 32)"
    return {"header": _SIDE_BY_SIDE, "grid": (threads, groups), "threadgroup": (threads, 1)}


def axes_behind(op: str, x: Any, axis: int) -> int:
    """How many axes are behind an axis of an array.

    Args:
        op: the function that is called, for errors.
        x: the array.
        axis: counted from the front, or, negative, from the back.

    Raises:
        KernelTypeError: ``x`` is no array, or ``axis`` no int.
        KernelError: the array has no such axis.
    """
    try:
        ndim: int = x.ndim
    except AttributeError:
        raise ferrule.KernelTypeError(
            f"[ops] {op}: got x of type {type(x).__name__}; expected an array of NumPy, torch or "
            "MLX."
        ) from None
    axis = as_int(op, "axis", axis)
    if not -ndim <= axis < ndim:
        allowed = f"expected {-ndim} to {ndim - 1}" if ndim else "it has no axis"
        raise ferrule.KernelError(
            f"[ops] {op}: axis {axis} of x of shape {tuple(x.shape)}; {allowed}."
        )
    return -axis - 1 if axis < 0 else ndim - 1 - axis


def as_int(op: str, name: str, value: Any) -> int:
    """An int of Python, or of NumPy, that a function was given.

    Raises:
        KernelTypeError: it is none.
    """
    if type(value) is int:
        return value
    if not isinstance(value, bool) and isinstance(value, Integral):
        return int(value)
    raise ferrule.KernelTypeError(f"[ops] {op}: got {name} {value!r}; expected an int.")


def is_wide(x: Any) -> bool:
    """Whether an array is of float64, of whatever library: elements of 8 bytes that are no floats
    are refused by the rule."""
    wide: bool = x.itemsize == 8
    return wide


def on_cpu(x: Any) -> bool:
    """Whether an array is on the CPU, for which there are other bodies."""
    if is_mlx(x):
        mlx = sys.modules["mlx.core"]
        return bool(mlx.default_device().type == mlx.DeviceType.cpu)
    device = getattr(x, "device", "cpu")
    return str(getattr(device, "type", device)) == "cpu"


def along(x: Any, behind: int) -> Any:
    """An array that has one element for each row, with an axis of size 1 in place of the row."""
    index = (..., None, *[slice(None)] * behind)
    return x[index]
