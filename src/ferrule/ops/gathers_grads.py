"""What derivatives of products that gather are made of: sums over what was chosen, and its spread.

Results of a product have a batch C; each was made of one matrix of a batch X on its left, which is
that at its place, or what ``lhs`` says, and of one on its right.
"""

from __future__ import annotations

from typing import Any

import ferrule

from . import formats, gathers
from .arrays import cast, is_mlx

# In a shapeless graph MLX (0.32.4) broadcasts 1 and 0 to 1, so that of no rows one may come back.
_AS_MANY = "R == M or M == 0"


def sum_of_left(rows: Any, lhs: Any, like: Any) -> Any:
    """For each matrix on the left, the sum of what its results have: ``[*C, M, K] -> [*X, M, K]``.

    Args:
        rows: ``[*C, M, K]``, what there is for each result.
        lhs: ``[*I]``, the indices, or None.
        like: the matrices on the left, ``[*X, M, K]``, of rows' dtype.
    """
    if lhs is not None:
        return cast(_sum_at()(rows, lhs, like), like.dtype)
    if not is_mlx(rows) and tuple(rows.shape) == tuple(like.shape):
        return rows
    return _sum_of_places()(rows, like)


# The place in the shape C of number `n` of those that broadcasting makes of the place `at` of X.
_PLACE_MADE = """
template <typename X, typename C>
inline ulong place_made(ulong at, ulong n, X x, int x_dims, C c, int c_dims) {
  ulong place = 0, step = 1;
  for (int back = 1; back <= c_dims; back++) {
    const ulong size = ulong(c[c_dims - back]);
    const bool repeated = back > x_dims || x[x_dims - back] == 1;
    place += (repeated ? n : at) % size * step;
    if (repeated) n /= size;
    else at /= size;
    step *= size;
  }
  return place;
}
"""

# A thread adds up all that was made of one element.
_SUM_OF_PLACES = """
    const uint column = thread_position_in_grid.x;
    const ulong at = thread_position_in_grid.y, m = at % uint(M), matrix = at / uint(M);
    const ulong count = uint(C_size) / uint(X_size);
    float sum = 0;
    for (ulong n = 0; n < count; n++) {
      const ulong place = place_made(
          matrix, n, like_shape, like_ndim - 2, rows_shape, rows_ndim - 2);
      sum += float(rows[(place * uint(M) + m) * uint(K) + column]);
    }
    sums[at * uint(K) + column] = T(sum);
"""


@ferrule.family
def _sum_of_places() -> ferrule.Op:
    op = ferrule.op(
        "sum_of_places",
        f"rows[*C,R,K]:T, like[*X,M,K]:T -> sums[*X,M,K]:T where {_AS_MANY}, {formats.T_IN_FLOATS}",
        metal=_SUM_OF_PLACES,
        header=_PLACE_MADE,
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

    @op.def_vmap
    def _(size: int, axes: Any, values: Any) -> Any:
        rows, like = gathers.all_first(axes, values)
        added = rows.ndim - like.ndim
        sums = _sum_of_places()(rows, gathers.deepened(like, rows.ndim))
        return gathers.squeezed(sums, range(1, 1 + added)), 0

    return op


@ferrule.family
def _spread() -> ferrule.Op:
    op = ferrule.op(
        "spread_to_places",
        f"values[*X,M,K]:T, like[*C,M,K]:T -> rows[*C,M,K]:T where {formats.T_IN_FLOATS}",
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

    @op.def_vmap
    def _(size: int, axes: Any, arrays: Any) -> Any:
        values, like = gathers.all_first(axes, arrays)
        return _spread()(gathers.deepened(values, like.ndim), like), 0

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
        "rows[*C,R,K]:T, lhs[*I]:L, like[*X,M,K]:T -> sums[*X,M,K]:float32 "
        f"where {_AS_MANY}, {formats.T_IN_FLOATS}, L in {gathers.INDICES}",
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

    @op.def_vmap
    def _(size: int, axes: Any, values: Any) -> Any:
        rows, lhs, like = gathers.all_first(axes, values)
        return _sum_at()(rows, gathers.deepened(gathers.shifted(lhs, like), rows.ndim - 2), like), 0

    return op


@ferrule.family
def _spread_at() -> ferrule.Op:
    op = ferrule.op(
        "spread_at",
        "values[*X,M,K]:float32, lhs[*I]:L, like[*C,M,K]:T -> rows[*C,M,K]:T "
        f"where {formats.T_IN_FLOATS}, L in {gathers.INDICES}",
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

    @op.def_jvp
    def _(primals: Any, tangents: Any, outputs: Any) -> Any:
        values = primals[0] * 0 if tangents[0] is None else tangents[0]
        return (_spread_at()(values, *primals[1:]),)

    @op.def_vmap
    def _(size: int, axes: Any, arrays: Any) -> Any:
        values, lhs, like = gathers.all_first(axes, arrays)
        lhs = gathers.deepened(gathers.shifted(lhs, values), like.ndim - 2)
        return _spread_at()(values, lhs, like), 0

    return op
