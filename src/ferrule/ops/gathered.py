"""`gather_mm`: products of matrices that indices choose."""

from __future__ import annotations

from typing import Any

import ferrule

from . import formats, gathered_cuda, gathers
from . import quantized_texts as texts
from .arrays import FLOATS, cast, dtype_name, library, promoted
from .gathers import Kind
from .gathers_grads import sum_of_left


def gather_mm(
    a: Any,
    b: Any,
    lhs_indices: Any = None,
    rhs_indices: Any = None,
    *,
    sorted_indices: bool = False,
) -> Any:
    """Products of matrices of a and matrices of b, chosen by indices, as MLX's `gather_mm`.

    Args:
        a: ``[*A, M, K]`` of float32, float16 or bfloat16; or a row ``[K]``.
        b: ``[*B, K, N]``; or a column ``[K]``.
        lhs_indices: ``[*I]`` of integers: which matrices of a, counted over all of A.
            None is each at its place: 0, 1, ... in the shape A.
        rhs_indices: ``[*R]``, the same for b. What chooses on both sides broadcasts.
        sorted_indices: that indices ascend. Results are the same without.

    Returns:
        ``[*broadcast(I, R), M, N]``, of the dtype that a and b promote to. Sums are in float32.
        An index that names no matrix gives NaN.

    Raises:
        KernelError: shapes or dtypes do not fit: says which.
        KernelTypeError: an argument is no array.
    """
    lhs, rhs, single = gathers.indices("gather_mm", lhs_indices, rhs_indices)
    formats.check_arrays("gather_mm", a=a, b=b)
    a, b = promoted(a, b)
    if lhs is None and rhs is None and _is_matmul(a, b):
        return a @ b  # for which every library has the best kernels
    row, column = a.ndim == 1, b.ndim == 1
    a = a[None] if row else a
    b = b[:, None] if column else b
    kind = ("x" if lhs is None else "l") + ("w" if rhs is None else "r")
    axes = [0] * (single and gathers.no_axes(a, b, lhs_indices, rhs_indices))
    kind, chosen = gathers.for_kernels("gather_mm", kind, a, b, lhs, rhs)
    y = _gathered(kind, False)(a, b, *chosen)
    return gathers.squeezed(y, axes + [-2] * row + [-1] * column)


def _is_matmul(a: Any, b: Any) -> bool:
    """Whether these are matrices for a library's own product, with sums in float32."""
    summed = FLOATS if hasattr(a, "new_full") else ("float32",)
    matrices = a.ndim > 1 and b.ndim > 1 and a.shape[-1] == b.shape[-2]
    return matrices and dtype_name(a) == dtype_name(b) and dtype_name(a) in summed


# A thread makes one element.
_ONE = """
    const uint column = thread_position_in_grid.x, m = thread_position_in_grid.y;
    const ulong batch = thread_position_in_grid.z;
    CHOOSE
    float sum = NAN;
    if (inside) {
      sum = 0;
      const device T* row = x + (ulong(from_left) * LEFT + m) * DEPTH;
      const device T* matrix = w + ulong(from_right) * DEPTH * WIDTH;
      for (uint k = 0; k < DEPTH; k++) sum += float(row[k]) * float(matrix[AT]);
    }
    y[(batch * LEFT + m) * WIDTH + column] = T(sum);
"""


def _bodies(kind: Kind, transpose: bool) -> list[Any]:
    """The Metal bodies, for processors and for GPUs."""
    read = "for (int i = 0; i < COUNT; i++) ws[i] = float(w[at + i]);"
    words = {
        "READ(size)": read.replace("COUNT", "size"),
        "READ(columns)": read.replace("COUNT", "columns"),
        "AT": "ulong(column) * DEPTH + k" if transpose else "ulong(k) * WIDTH + column",
        "CHOOSE": kind.find(),
        "ROW_COUNT": f"M * {kind.count}",
        "LEFT": "uint(M)",
        "DEPTH": "uint(K)",
        "WIDTH": "uint(N)",
        "WHOLE": "1",
    }
    return [
        ferrule.metal_body(
            gathers.put(
                texts.PROCESSOR_TRANSPOSED if transpose else texts.PROCESSOR_STRAIGHT, words
            ),
            header=gathers.HEADER + texts.FINISH + texts.PROCESSOR + "#define PLACE(i) (i)\n",
            grid=(
                f"ceildiv(N, {texts.COLUMNS if transpose else texts.PART})",
                "ceildiv(y.size // max(N, 1), 16)",
            ),
            threadgroup=1,
            when="device == cpu",
        ),
        ferrule.metal_body(
            gathers.put(_ONE, words),
            header=gathers.HEADER,
            grid=("N", "M", "y.size // max(M * N, 1)"),
            threadgroup=(64, 1, 1),
        ),
    ]


@ferrule.family
def _gathered(letters: str, transpose: bool) -> ferrule.Op:
    """``x, w, lhs?, rhs? -> y``, by matrices w or by their transposes."""
    kind = Kind(letters)
    where = ", ".join([*kind.where, formats.T_IN_FLOATS])
    op = ferrule.op(
        "gather_mm",
        f"x[{kind.left},M,K]:T, w[*W,{'N,K' if transpose else 'K,N'}]:T{kind.inputs} "
        f"-> y[{kind.batch},M,N]:T where {where}",
        cuda=gathered_cuda.floats(letters, transpose),
        metal=_bodies(kind, transpose),
        version=1,
    )

    def vjp(primals: Any, cotangents: Any, outputs: Any, wanted: Any) -> Any:
        arrays, lhs, rhs = kind.split(primals)
        (x, w), (c,) = arrays, cotangents
        gradients: list[Any] = [None] * len(primals)
        chosen = [rhs] if rhs is not None else []
        if wanted[0]:
            rows = _gathered(f"x{letters[1]}", not transpose)(c, w, *chosen)
            gradients[0] = sum_of_left(rows, lhs, x)
        if wanted[1]:
            indices = [index for index in (lhs, rhs) if index is not None]
            of_w = outer(letters)(x, c, *indices, w)
            gradients[1] = library(of_w).swapaxes(of_w, -1, -2) if transpose else of_w
            gradients[1] = cast(gradients[1], w.dtype)
        return gradients

    def batched(letters: str) -> ferrule.Op:
        return _gathered(letters, transpose)

    op.def_vjp(vjp, version=1)
    op.def_jvp(gathers.bilinear_jvp(op), version=1)
    op.def_vmap(gathers.vmap_of(op, letters, batched), version=1)
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
    the product (of tokens it is ``[*X,1,M,H]``), ``right[*C,M,V]`` are results (of tokens
    ``[*X,E,M,V]``), and ``like[*W,A,B]`` has the batch of the right side.
    """
    kind = Kind(letters)
    results, count = ("*X,E", kind.count) if kind.tokens else ("*C", "uint(C_size)")
    op = _outer_op(
        f"left[{kind.left},M,H]:T, right[{results},M,V]:T{kind.inputs}, like[*W,A,B]:U "
        "-> sums[*W,H,V]:float32",
        "W_size",
        kind.where,
        {"COUNT": count, "HEIGHT": "uint(M)", "CHOOSE": kind.find("left", "like")},
        cuda=gathered_cuda.outer(letters, "(sums.size // max(H * V, 1))", "M"),
    )

    def vjp(primals: Any, cotangents: Any, outputs: Any) -> Any:
        (left, right), lhs, rhs = kind.split(primals[:-1])
        of_sums = cast(cotangents[0], left.dtype)
        chosen = [rhs] if rhs is not None else []
        rows = _gathered(f"x{letters[1]}", True)(right, of_sums, *chosen)
        of_right = _gathered(letters, False)(left, of_sums, *primals[2:-1])
        return sum_of_left(rows, lhs, left), of_right, *[None] * (len(primals) - 2)

    def vmap(size: int, axes: Any, values: Any) -> Any:
        *arrays, like = gathers.all_first(axes, values)
        (left, right), lhs, rhs = kind.split(arrays)
        added = range(1, 1 + right.ndim - like.ndim) if rhs is None else ()
        if lhs is None:
            left = gathers.deepened(left, right.ndim)
        if rhs is None:
            like = gathers.deepened(like, right.ndim)
        indices = [
            gathers.deepened(gathers.shifted(index, matrices), right.ndim - 2)
            for index, matrices in ((lhs, left), (rhs, like))
            if index is not None
        ]
        return gathers.squeezed(op(left, right, *indices, like), added), 0

    op.def_vjp(vjp, version=1)
    op.def_jvp(gathers.bilinear_jvp(op), version=1)
    op.def_vmap(vmap, version=1)
    return op


@ferrule.family
def outer_of_rows(batched: bool) -> ferrule.Op:
    """``left[*S,H], right[*S,V] -> sums[H,V]``, in float32; of a batch, with B in front of each."""
    batch = "B," * batched
    rows = "(left.size // max(H, 1))"
    choose = "const long from_left = batch, from_right = batch; const bool inside = true;"
    op = _outer_op(
        f"left[{batch}*S,H]:T, right[{batch}*S,V]:T -> sums[{batch}H,V]:float32",
        "B" if batched else "1",
        [],
        {"COUNT": "uint(B)" if batched else "1", "HEIGHT": "uint(S_size)", "CHOOSE": choose},
        batch="B" if batched else (),
        cuda=gathered_cuda.outer(
            "", *(("B", f"({rows} // max(B, 1))") if batched else ("1", rows))
        ),
    )

    def vjp(primals: Any, cotangents: Any, outputs: Any, wanted: Any) -> Any:
        of_sums = cast(cotangents[0], primals[0].dtype)

        def product(rows: Any, transpose: bool) -> Any:
            single = rows.ndim == 1 + batched
            rows = rows[..., None, :] if single else rows
            matrices = gathers.deepened(of_sums, rows.ndim) if batched else of_sums
            made = _gathered("xw", transpose)(rows, matrices)
            return gathers.squeezed(made, [-2] * single)

        left, right = primals
        return product(right, True) if wanted[0] else None, (
            product(left, False) if wanted[1] else None
        )

    op.def_vjp(vjp, version=1)
    op.def_jvp(gathers.bilinear_jvp(op), version=1)
    if not batched:
        op.def_vmap(outer_of_rows(True))
    return op


def _outer_op(
    rule: str, matrices: str, where: list[str], words: dict[str, str], **more: Any
) -> ferrule.Op:
    """The op of a rule, whose words in capitals are put into its bodies."""
    on_cpu, on_gpu = (gathers.put(text, words) for text in (_OUTER_ON_CPU, _OUTER))
    conditions = ", ".join([*where, formats.T_IN_FLOATS])
    header = gathers.HEADER
    return ferrule.op(
        "outer_sums",
        f"{rule} where {conditions}",
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
        **more,
    )  # fmt: skip
