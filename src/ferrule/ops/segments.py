"""segment_sum: sums of the rows that have the same number."""

from __future__ import annotations

from typing import Any

import ferrule

from .arrays import cast, library, sums_at, widened
from .sampling_cuda import ADD


def segment_sum(x: Any, ids: Any, n: int) -> Any:
    """Sums of the rows of ``x`` that belong to the same of ``n`` segments.

    Args:
        x: an array (M, *D) of float32, float16, bfloat16 or int32.
        ids: the segment of each row, (M,), of int32 or int64, in any order. Rows whose number is
            not from 0 to n - 1 belong to none.
        n: how many segments there are.

    Returns:
        An array (n, *D) like ``x``, 0 for segments without rows. Floats are added up in float32: on
        the CPU in the order of the rows, on a GPU in an order that changes from call to call.

    Raises:
        KernelError: ``n`` is below 0, shapes do not match, or a dtype is another.
        KernelTypeError: ``x`` or ``ids`` is no array, or ``n`` no int.
    """
    if getattr(x, "itemsize", 0) == 2 and str(x.dtype).endswith("float16"):
        return _rounded(_segment_sum("float32")(x, ids, n), x)
    return _segment_sum("T")(x, ids, n)


_COLUMNS = """
    uint columns = 1;
    for (int d = 1; d < x_ndim; ++d) columns *= x_shape[d];
"""

# A thread takes one element, and adds it to what other threads add to as well.
_BY_ELEMENTS = (
    _COLUMNS
    + """
    const uint column = thread_position_in_grid.x, row = thread_position_in_grid.y;
    const I segment = ids[row];
    if (segment >= 0 && segment < n)
        atomic_fetch_add_explicit(
            &sums[ulong(segment) * columns + column],
            A(x[ulong(row) * columns + column]), memory_order_relaxed);
"""
)

# On NVIDIA GPUs a thread adds four at once.
_BY_FOURS = (
    _COLUMNS.replace("uint", "uint32_t")
    + """
    const size_t i = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) * 4, row = i / columns;
    if (row >= M) return;
    const I segment = ids[row];
    if (segment < 0 || segment >= n) return;
    const auto values = load_vector<4>(x + i, 0);
    float terms[4];
    for (int v = 0; v < 4; ++v) terms[v] = float(values[v]);
    add<4>(sums + size_t(segment) * columns + i % columns, terms, sums + size_t(n) * columns);
"""
)

# A thread takes 64 columns of all rows, and owns what it adds to.
_BY_COLUMNS = (
    _COLUMNS
    + """
    const uint first = thread_position_in_grid.x * 64, last = metal::min(first + 64, columns);
    for (int row = 0; row < M; ++row) {
        const I segment = ids[row];
        if (segment < 0 || segment >= n) continue;
        device A* to = sums + ulong(segment) * columns;
        const device T* from = x + ulong(row) * columns;
        for (uint c = first; c < last; ++c) to[c] += A(from[c]);
    }
"""
)


def _reference(x: Any, ids: Any, n: int) -> Any:
    """The same in ordinary array code: rows that belong nowhere go to one segment more."""
    places = library(x).where((ids >= 0) & (ids < n), ids, n)
    return sums_at(widened(x), places, n + 1)[:n]


@ferrule.family
def _segment_sum(sums: str) -> ferrule.Op:
    kinds = "(float32, int32)" if sums == "T" else "(float16, bfloat16)"
    header = f"#define A {'T' if sums == 'T' else 'float'}\n"
    op = ferrule.op(
        "segment_sum",
        f"x[M,*D]:T, ids[M]:I, n:int32 -> sums[n,*D]:{sums} "
        f"where T in {kinds}, I in (int32, int64)",
        metal=[
            ferrule.metal_body(
                _BY_COLUMNS,
                header=header,
                when="device == cpu",
                grid="ceildiv(x.size // max(M, 1), 64)",
                threadgroup=1,
                init_value=0,
            ),
            ferrule.metal_body(
                _BY_ELEMENTS,
                header=header,
                grid=("x.size // max(M, 1)", "M"),
                threadgroup=(32, 8),
                init_value=0,
                atomic_outputs=True,
            ),
        ],
        cuda=[
            ferrule.cuda_body(
                _BY_FOURS,
                header=ADD,
                when="T != int32 and x.size // max(M, 1) % 4 == 0",
                grid="x.size // 4",
                threadgroup=256,
                init_value=0,
            )
        ],
        reference=_reference,
        version=1,
    )

    @op.def_vjp
    def _(primals: Any, cotangents: Any, outputs: Any) -> Any:
        x, ids, _ = primals
        return _rows_of(cotangents[0], ids, x), None, None

    @op.def_jvp
    def _(primals: Any, tangents: Any, outputs: Any) -> Any:
        return (op(tangents[0], *primals[1:]),)

    return op


# The derivative: each row gets its segment's. What is behind `like` is its dtype and shape alone.
_rows_of = ferrule.op(
    "rows_of",
    "sums[n,*D]:A, ids[M]:I, like[M,*D]:T -> rows[M,*D]:T where I in (int32, int64)",
    metal="""
        const ulong columns = threads_per_grid.x;
        const uint column = thread_position_in_grid.x, row = thread_position_in_grid.y;
        const I segment = ids[row];
        const bool there = segment >= 0 && segment < n;
        rows[row * columns + column] = there ? T(sums[ulong(segment) * columns + column]) : T(0);
    """,
    grid=("like.size // max(M, 1)", "M"),
    threadgroup=(32, 8),
)


@_rows_of.def_vjp
def _(primals: Any, cotangents: Any, outputs: Any) -> Any:
    sums, ids, _ = primals
    wide = str(sums.dtype).endswith("float32") and str(cotangents[0].dtype).endswith("float16")
    return _segment_sum("float32" if wide else "T")(cotangents[0], ids, sums.shape[0]), None, None


@_rows_of.def_jvp
def _(primals: Any, tangents: Any, outputs: Any) -> Any:
    sums = primals[0] * 0 if tangents[0] is None else tangents[0]
    return (_rows_of(sums, *primals[1:]),)


_rounded = ferrule.op(
    "rounded",
    "x[n,*D]:float32, like[M,*D]:T -> y[n,*D]:T",
    metal="y[thread_position_in_grid.x] = T(x[thread_position_in_grid.x]);",
    reference=lambda x, like: cast(x, like.dtype),
    version=1,
    grid="x.size",
    threadgroup=256,
)


@_rounded.def_vjp
def _(primals: Any, cotangents: Any, outputs: Any) -> Any:
    return _widened(cotangents[0]), None


@_rounded.def_jvp
def _(primals: Any, tangents: Any, outputs: Any) -> Any:
    x = primals[0] * 0 if tangents[0] is None else tangents[0]
    return (_rounded(x, primals[1]),)


_widened = ferrule.op(
    "widened",
    "x[n,*D]:T -> y[n,*D]:float32",
    metal="y[thread_position_in_grid.x] = float(x[thread_position_in_grid.x]);",
    grid="x.size",
    threadgroup=256,
)


@_widened.def_vjp
def _(primals: Any, cotangents: Any, outputs: Any) -> Any:
    return (_rounded(cotangents[0], primals[0]),)


@_widened.def_jvp
def _(primals: Any, tangents: Any, outputs: Any) -> Any:
    return (_widened(tangents[0]),)
