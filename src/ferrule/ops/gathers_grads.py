"""What derivatives of products that gather are made of: sums over what was chosen, and its spread.

Results of a product have a batch C; each was made of one matrix of a batch X on its left, which is
that at its place, or what ``lhs`` says, and of one on its right.
"""

from __future__ import annotations

from typing import Any

import ferrule

from . import gathers
from .arrays import cast, library
from .gathers import Kind

_FLOATS = "T in (float32, float16, bfloat16)"


def sum_of_left(rows: Any, lhs: Any, like: Any) -> Any:
    """For each matrix on the left, the sum of what its results have: ``[*C, M, K] -> [*X, M, K]``.

    Args:
        rows: ``[*C, M, K]``, what there is for each result.
        lhs: ``[*I]``, the indices, or None.
        like: the matrices on the left, ``[*X, M, K]``, of rows' dtype.
    """
    if lhs is not None:
        return cast(_sum_at()(rows, lhs, like), like.dtype)
    # In a graph of MLX shapes are those of the trace alone.
    if library(rows).__name__ != "mlx.core" and tuple(rows.shape) == tuple(like.shape):
        return rows
    return _sum_of_places()(rows, like)


# A thread adds up all that was made of one element.
_SUM_OF_PLACES = """
    const uint column = thread_position_in_grid.x;
    const ulong at = thread_position_in_grid.y, m = at % uint(M), matrix = at / uint(M);
    float sum = 0;
    for (ulong j = 0; j < uint(C_size); j++) {
      const Places found = places_of(j, like_shape, like_ndim - 2, rows_shape, rows_ndim - 2);
      if (found.left == matrix) sum += float(rows[(j * uint(M) + m) * uint(K) + column]);
    }
    sums[at * uint(K) + column] = T(sum);
"""


@ferrule.family
def _sum_of_places() -> ferrule.Op:
    op = ferrule.op(
        "sum_of_places",
        f"rows[*C,M,K]:T, like[*X,M,K]:T -> sums[*X,M,K]:T where {_FLOATS}",
        metal=_SUM_OF_PLACES,
        header=gathers.HEADER,
        grid=("K", "X_size * M"),
        threadgroup=(64, 1),
        version=1,
    )

    @op.def_vjp
    def _(primals: Any, cotangents: Any, outputs: Any) -> Any:
        return _spread()(cotangents[0], primals[0]), None

    @op.def_jvp
    def _(primals: Any, tangents: Any, outputs: Any) -> Any:
        rows = primals[0] * 0 if tangents[0] is None else tangents[0]
        return (_sum_of_places()(rows, primals[1]),)

    return op


@ferrule.family
def _spread() -> ferrule.Op:
    op = ferrule.op(
        "spread_to_places",
        f"values[*X,M,K]:T, like[*C,M,K]:T -> rows[*C,M,K]:T where {_FLOATS}",
        metal="""
    const uint column = thread_position_in_grid.x;
    const ulong at = thread_position_in_grid.y, m = at % uint(M);
    const Places found = places_of(
        at / uint(M), values_shape, values_ndim - 2, like_shape, like_ndim - 2);
    rows[at * uint(K) + column] = values[(found.left * uint(M) + m) * uint(K) + column];
""",
        header=gathers.HEADER,
        grid=("K", "C_size * M"),
        threadgroup=(64, 1),
        version=1,
    )

    @op.def_vjp
    def _(primals: Any, cotangents: Any, outputs: Any) -> Any:
        return _sum_of_places()(cotangents[0], primals[0]), None

    @op.def_jvp
    def _(primals: Any, tangents: Any, outputs: Any) -> Any:
        values = primals[0] * 0 if tangents[0] is None else tangents[0]
        return (_spread()(values, primals[1]),)

    return op


_CHOOSE_AT = """
      const Places found = places_of(batch, lhs_shape, lhs_ndim, rows_shape, rows_ndim - 2);
      const long to = long(lhs[found.left]);
      const bool inside = to >= 0 && to < long(X_size);
"""


@ferrule.family
def _sum_at() -> ferrule.Op:
    op = ferrule.op(
        "sum_at",
        "rows[*C,M,K]:T, lhs[*I]:L, like[*X,M,K]:T -> sums[*X,M,K]:float32 "
        f"where {_FLOATS}, L in {gathers.INDICES}",
        metal=[
            ferrule.metal_body(
                f"""
    const uint first = thread_position_in_grid.x * 64, last = metal::min(first + 64, uint(K));
    const uint m = thread_position_in_grid.y;
    for (ulong batch = 0; batch < uint(C_size); batch++) {{
      {_CHOOSE_AT}
      if (!inside) continue;
      for (uint c = first; c < last; c++)
        sums[(ulong(to) * uint(M) + m) * uint(K) + c]
            += float(rows[(batch * uint(M) + m) * uint(K) + c]);
    }}
""",
                header=gathers.HEADER,
                when="device == cpu",
                grid=("ceildiv(K, 64)", "M"),
                threadgroup=1,
                init_value=0,
            ),
            ferrule.metal_body(
                f"""
    const uint column = thread_position_in_grid.x;
    const ulong at = thread_position_in_grid.y, m = at % uint(M), batch = at / uint(M);
    {_CHOOSE_AT}
    if (inside)
      atomic_fetch_add_explicit(
          &sums[(ulong(to) * uint(M) + m) * uint(K) + column],
          float(rows[at * uint(K) + column]), memory_order_relaxed);
""",
                header=gathers.HEADER,
                grid=("K", "C_size * M"),
                threadgroup=(64, 1),
                init_value=0,
                atomic_outputs=True,
            ),
        ],
        version=1,
    )

    @op.def_vjp
    def _(primals: Any, cotangents: Any, outputs: Any) -> Any:
        return _spread_at()(cotangents[0], primals[1], primals[0]), None, None

    @op.def_jvp
    def _(primals: Any, tangents: Any, outputs: Any) -> Any:
        rows = primals[0] * 0 if tangents[0] is None else tangents[0]
        return (_sum_at()(rows, *primals[1:]),)

    return op


@ferrule.family
def _spread_at() -> ferrule.Op:
    op = ferrule.op(
        "spread_at",
        "values[*X,M,K]:float32, lhs[*I]:L, like[*C,M,K]:T -> rows[*C,M,K]:T "
        f"where {_FLOATS}, L in {gathers.INDICES}",
        metal="""
    const uint column = thread_position_in_grid.x;
    const ulong at = thread_position_in_grid.y, m = at % uint(M), batch = at / uint(M);
"""
        + _CHOOSE_AT.replace("rows_", "like_")
        + """
    const ulong place = (ulong(to) * uint(M) + m) * uint(K) + column;
    rows[at * uint(K) + column] = inside ? T(values[place]) : T(0);
""",
        header=gathers.HEADER,
        grid=("K", "C_size * M"),
        threadgroup=(64, 1),
        version=1,
    )

    @op.def_vjp
    def _(primals: Any, cotangents: Any, outputs: Any) -> Any:
        return _sum_at()(cotangents[0], primals[1], primals[0]), None, None

    return op


# A thread makes a part of some rows of a matrix.
_OUTER_ON_CPU = """
    const int first = int(thread_position_in_grid.x) * 256, columns = metal::min(V - first, 256);
    const int top = int(thread_position_in_grid.y) * 8, height = metal::min(H - top, 8);
    const long matrix = thread_position_in_grid.z;
    float parts[8][256];
    for (int h = 0; h < 8; h++)
      for (int c = 0; c < 256; c++) parts[h][c] = 0;
    for (ulong batch = 0; batch < COUNT; batch++) {
      CHOOSE
      if (!inside || from_right != matrix) continue;
      for (uint m = 0; m < HEIGHT; m++) {
        const device T* a = left + (ulong(from_left) * HEIGHT + m) * uint(H) + top;
        const device T* b = right + (batch * HEIGHT + m) * uint(V) + first;
        for (int h = 0; h < height; h++) {
          const float v = float(a[h]);
          for (int c = 0; c < columns; c++) parts[h][c] = metal::fma(v, float(b[c]), parts[h][c]);
        }
      }
    }
    for (int h = 0; h < height; h++)
      for (int c = 0; c < columns; c++)
        sums[(ulong(matrix) * uint(H) + top + h) * uint(V) + first + c] = parts[h][c];
"""
_OUTER = """
    const uint v = thread_position_in_grid.x, h = thread_position_in_grid.y;
    const long matrix = thread_position_in_grid.z;
    float sum = 0;
    for (ulong batch = 0; batch < COUNT; batch++) {
      CHOOSE
      if (!inside || from_right != matrix) continue;
      for (uint m = 0; m < HEIGHT; m++)
        sum += float(left[(ulong(from_left) * HEIGHT + m) * uint(H) + h])
            * float(right[(batch * HEIGHT + m) * uint(V) + v]);
    }
    sums[(ulong(matrix) * uint(H) + h) * uint(V) + v] = sum;
"""


@ferrule.family
def outer(letters: str) -> ferrule.Op:
    """For each matrix on the right, the sum of ``left.T @ right`` over the results made of it.

    ``left, right, lhs?, rhs?, like -> sums[*W,H,V]``, in float32: ``left[*X,M,H]`` is chosen as in
    the product, ``right[*C,M,V]`` are results, and ``like[*W,A,B]`` has the batch of the right
    side. Without a kind: ``left[*S,H], right[*S,V] -> sums[H,V]``.
    """
    kind = Kind(letters) if letters else None
    if kind is None:
        rule = f"left[*S,H]:T, right[*S,V]:T -> sums[H,V]:float32 where {_FLOATS}"
        choose = "const long from_left = 0, from_right = 0; const bool inside = true;"
        words = {"COUNT": "1", "HEIGHT": "uint(S_size)", "CHOOSE": choose}
        matrices = "1"
    else:
        where = ", ".join([*kind.where, _FLOATS])
        rule = (
            f"left[*X,M,H]:T, right[*C,M,V]:T{kind.inputs}, like[*W,A,B]:U "
            f"-> sums[*W,H,V]:float32 where {where}"
        )
        words = {"COUNT": "uint(C_size)", "HEIGHT": "uint(M)"}
        words["CHOOSE"] = kind.find("left", "like")
        matrices = "W_size"
    on_cpu, on_gpu = _OUTER_ON_CPU, _OUTER
    for name, value in words.items():
        on_cpu, on_gpu = on_cpu.replace(name, value), on_gpu.replace(name, value)
    header = gathers.HEADER
    return ferrule.op(
        "outer_sums",
        rule,
        metal=[
            ferrule.metal_body(
                on_cpu, header=header, when="device == cpu", threadgroup=1,
                grid=("ceildiv(V, 256)", "ceildiv(H, 8)", matrices),
            ),
            ferrule.metal_body(
                on_gpu, header=header, grid=("V", "H", matrices), threadgroup=(64, 1, 1)
            ),
        ],
        version=1,
    )  # fmt: skip
