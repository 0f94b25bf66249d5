"""`gather_mm`: products of matrices that indices choose."""

from __future__ import annotations

from typing import Any

import ferrule

from . import gathers
from . import quantized_texts as texts
from .arrays import cast, dtype_name, library, promoted
from .gathers import Kind
from .gathers_grads import outer, sum_of_left


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
    a, b = promoted(a, b)
    if lhs is None and rhs is None and (dtype_name(a) == "float32" or hasattr(a, "new_full")):
        return a @ b  # for which every library has the best kernels
    row, column = a.ndim == 1, b.ndim == 1
    a = a[None] if row else a
    b = b[:, None] if column else b
    kind = ("x" if lhs is None else "l") + ("w" if rhs is None else "r")
    chosen = [index for index in (lhs, rhs) if index is not None]
    y = _gathered(kind, False)(a, b, *chosen)
    y = y[0] if single and gathers.no_axes(a, b, lhs_indices, rhs_indices) else y
    y = y[..., 0] if column else y
    return (y[..., 0] if column else y[..., 0, :]) if row else y


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


@ferrule.family
def _gathered(letters: str, transpose: bool) -> ferrule.Op:
    """``x, w, lhs?, rhs? -> y``, by matrices w or by their transposes."""
    kind = Kind(letters)
    read = "for (int i = 0; i < COUNT; i++) ws[i] = float(w[at + i]);"
    words = {
        "READ(size)": read.replace("COUNT", "size"),
        "READ(columns)": read.replace("COUNT", "columns"),
        "AT": "ulong(column) * DEPTH + k" if transpose else "ulong(k) * WIDTH + column",
        "CHOOSE": kind.find(),
        "ROW_COUNT": f"M * count_of({kind.shapes()})",
        "LEFT": "uint(M)",
        "DEPTH": "uint(K)",
        "WIDTH": "uint(N)",
        "WHOLE": "1",
    }

    def body(text: str) -> str:
        for name, value in words.items():
            text = text.replace(name, value)
        return text

    where = ", ".join([*kind.where, "T in (float32, float16, bfloat16)"])
    op = ferrule.op(
        "gather_mm",
        f"x[*X,M,K]:T, w[*W,{'N,K' if transpose else 'K,N'}]:T{kind.inputs} "
        f"-> y[{kind.batch},M,N]:T where {where}",
        metal=[
            ferrule.metal_body(
                body(texts.PROCESSOR_TRANSPOSED if transpose else texts.PROCESSOR_STRAIGHT),
                header=gathers.HEADER + texts.PROCESSOR + "#define PLACE(i) (i)\n",
                grid=(
                    f"ceildiv(N, {64 if transpose else 256})",
                    "ceildiv(y.size // max(N, 1), 16)",
                ),
                threadgroup=1,
                when="device == cpu",
            ),
            ferrule.metal_body(
                body(_ONE),
                header=gathers.HEADER,
                grid=("N", "M", "y.size // max(M * N, 1)"),
                threadgroup=(64, 1, 1),
            ),
        ],
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

    def jvp(primals: Any, tangents: Any, outputs: Any) -> Any:
        x, w, *rest = primals
        terms = [op(tangents[0], w, *rest)] if tangents[0] is not None else []
        terms += [op(x, tangents[1], *rest)] if tangents[1] is not None else []
        return (sum(terms[1:], terms[0]) if terms else op(x * 0, w, *rest),)

    def batched(letters: str) -> ferrule.Op:
        return _gathered(letters, transpose)

    op.def_vjp(vjp, version=1)
    op.def_jvp(jvp, version=1)
    op.def_vmap(gathers.vmap_of(op, letters, batched), version=1)
    return op
