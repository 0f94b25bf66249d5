"""`matmul`: products of matrices, by the 8x8 matrices of simdgroups."""

from __future__ import annotations

from typing import Any

import ferrule

from .arrays import cast, widened


def matmul(a: Any, b: Any) -> Any:
    """``a @ b``, of matrices or of batches of them.

    Args:
        a: ``[*S, M, K]``, of float32, float16 or bfloat16.
        b: ``[K, N]``, or of the same batch ``[*S, K, N]``; of a's dtype.

    Returns:
        ``[*S, M, N]``, of that dtype. Elements are added up in float32, over ascending ``K``, and
        rounded once.

    Raises:
        KernelError: shapes or dtypes do not fit: says which.
        KernelTypeError: an argument is no array.

    Example:
        >>> import numpy as np, ferrule.ops
        >>> a = np.arange(6, dtype=np.float32).reshape(2, 3)
        >>> ferrule.ops.matmul(a, a.T)
        array([[ 5., 14.],
               [14., 50.]], dtype=float32)
    """
    return _product("nn", getattr(b, "ndim", 0) == 2)(a, b)


# The axes of both matrices: `t` marks the one that is stored with its rows as columns.
_STORED = {"nn": ("M,K", "K,N"), "nt": ("M,K", "N,K"), "tn": ("K,M", "K,N")}

_HEADER = """
#include <metal_simdgroup_matrix>
using namespace metal;

// The 8x8 part at `row` and `column` of a matrix, zeros where that has no elements. The matrix is
// stored row by row, or turned: column by column.
template <typename T>
void load_part(thread simdgroup_matrix<T, 8, 8>& part, const device T* matrix, bool turned,
               uint rows, uint columns, uint row, uint column, threadgroup T* edge, uint lane) {
  const size_t down = turned ? 1 : columns, across = turned ? rows : 1;
  const device T* first = matrix + row * down + column * across;
  if (row + 8 <= rows && column + 8 <= columns) {
    simdgroup_load(part, first, turned ? across : down, ulong2(0, 0), turned);
  } else {
    for (uint i = lane; i < 64; i += 32) {
      const bool inside = row + i / 8 < rows && column + i % 8 < columns;
      edge[i] = inside ? first[i / 8 * down + i % 8 * across] : T(0);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_load(part, edge, 8);
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// Writes what such a part of a matrix has inside of it, rounded.
template <typename T>
void store_part(thread simdgroup_matrix<float, 8, 8>& part, device T* matrix, uint rows,
                uint columns, uint row, uint column, threadgroup float* edge, uint lane) {
  device T* first = matrix + size_t(row) * columns + column;
  if (is_same_v<T, float> && row + 8 <= rows && column + 8 <= columns) {
    simdgroup_store(part, (device float*)first, columns);
  } else {
    simdgroup_store(part, edge, 8);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = lane; i < 64; i += 32)
      if (row + i / 8 < rows && column + i % 8 < columns)
        first[i / 8 * size_t(columns) + i % 8] = T(edge[i]);
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
}
"""

# Each simdgroup makes 32x32 elements, as 4x4 parts: each part that it loads serves four products.
_BODY = """
    threadgroup T edge[64];
    threadgroup float sums[64];
    const uint lane = thread_index_in_simdgroup;
    const uint height = M, width = N, depth = K;
    const uint down = (height + 31) / 32, across = (width + 31) / 32;
    const uint tile = threadgroup_position_in_grid.x;
    const uint matrix = tile / (down * across);
    const uint row = tile / across % down * 32, column = tile % across * 32;
    const device T* left = a + size_t(matrix) * height * depth;
    const device T* right = b + (SHARED ? 0 : size_t(matrix) * depth * width);
    device T* to = y + size_t(matrix) * height * width;
    const uint m = (min(height - row, 32u) + 7) / 8, n = (min(width - column, 32u) + 7) / 8;

    simdgroup_matrix<float, 8, 8> sum[4][4];
    for (uint i = 0; i < 4; i++)
        for (uint j = 0; j < 4; j++) sum[i][j] = simdgroup_matrix<float, 8, 8>(0);

    for (uint k = 0; k < depth; k += 8) {
        simdgroup_matrix<T, 8, 8> x[4], z[4];
        for (uint i = 0; i < 4; i++)
            if (i < m)
                load_part(x[i], left, TURNED_A, height, depth, row + 8 * i, k, edge, lane);
        for (uint j = 0; j < 4; j++)
            if (j < n)
                load_part(z[j], right, TURNED_B, depth, width, k, column + 8 * j, edge, lane);
        for (uint i = 0; i < 4; i++)
            for (uint j = 0; j < 4; j++)
                if (i < m && j < n) simdgroup_multiply_accumulate(sum[i][j], x[i], z[j], sum[i][j]);
    }

    for (uint i = 0; i < 4; i++)
        for (uint j = 0; j < 4; j++)
            if (i < m && j < n)
                store_part(sum[i][j], to, height, width, row + 8 * i, column + 8 * j, sums, lane);
"""


@ferrule.family
def _product(stored: str, shared: bool) -> ferrule.Op:
    """The product of matrices that are stored so.

    Args:
        stored: of `_STORED`.
        shared: the matrix b is the same for all of the batch.
    """
    of_a, of_b = _STORED[stored]

    def reference(a: Any, b: Any) -> Any:
        left = widened(a).swapaxes(-1, -2) if stored == "tn" else widened(a)
        right = widened(b).swapaxes(-1, -2) if stored == "nt" else widened(b)
        return cast(left @ right, a.dtype)

    op = ferrule.op(
        f"matmul_{stored}",
        f"a[*S,{of_a}]:T, b[{'' if shared else '*S,'}{of_b}]:T -> y[*S,M,N]:T"
        " where T in (float32, float16, bfloat16)",
        metal=_BODY,
        reference=reference,
        version=1,
        header=_HEADER,
        grid="32 * ceildiv(M, 32) * ceildiv(N, 32) * (y.size // max(M * N, 1))",
        threadgroup=32,
        template={"TURNED_A": stored == "tn", "TURNED_B": stored == "nt", "SHARED": shared},
        batch="M N",
        partial_sums="K",
        autocast="cast",
    )

    @op.def_vjp
    def _(primals: Any, cotangents: Any, outputs: Any) -> Any:
        (a, b), (c,) = primals, cotangents
        if stored == "tn":
            return _product("nt", False)(b, c), _product("nn", False)(a, c)
        of_a = _product("nn" if stored == "nt" else "nt", shared)(c, b)
        of_b = _product("tn", False)(*((c, a) if stored == "nt" else (a, c)))
        if shared and a.ndim > 2:
            of_b = of_b.sum(axis=tuple(range(a.ndim - 2)))
        return of_a, of_b

    @op.def_jvp
    def _(primals: Any, tangents: Any, outputs: Any) -> Any:
        (a, b), (da, db) = primals, tangents
        return (0 if da is None else op(da, b)) + (0 if db is None else op(a, db))

    return op
