"""`quantized_matmul` and `gather_qmm`: products with matrices in MLX's formats."""

from __future__ import annotations

from typing import Any

import ferrule

from . import formats, gathered_cuda, gathers
from . import quantized_cuda as on_cuda
from . import quantized_kept as kept
from . import quantized_texts as texts
from .arrays import cast, dtype_name, library, promoted
from .formats import Format
from .gathered import outer, outer_of_rows
from .gathers import Kind
from .gathers_grads import sum_of_left
from .quantizing import group_sums


def quantized_matmul(
    x: Any,
    w: Any,
    scales: Any,
    biases: Any = None,
    transpose: bool = True,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    *,
    global_scale: Any = None,
    keep_bf16: bool = False,
) -> Any:
    """``x @ w.T``, or ``x @ w``, of a matrix w that is quantized, as MLX's `quantized_matmul`.

    Args:
        x: ``[*S, K]`` of float32, float16 or bfloat16; where w is a batch, ``[*X, M, K]`` or
            ``[K]``.
        w: ``[N, K * bits / 32]`` of uint32, as `quantize` packs it, or the same bytes as uint8 or
            int32. With axes before these it is a batch, which broadcasts with X.
        scales: ``[N, K / group_size]``, with w's batch: of uint8 (or torch's 8-bit floats), of mode
            "affine" of x's dtype or another float.
        biases: of mode "affine": as scales are.
        transpose: whether rows of w are multiplied with rows of x. If not, w is ``[K, N * bits /
            32]``, with groups along N.
        group_size, bits, mode: as in `quantize`.
        global_scale: of mode "nvfp4": what `quantize` was given; a number, or one per matrix.
        keep_bf16: products of many rows (on a GPU those for which w is dequantized otherwise each
            time) have the dequantized matrix, in x's dtype, made once and kept as long as w, scales
            and biases live and are not written to: N * K * 2 bytes besides w, and as many again
            while it is made anew after a write. Few rows have the packed weights. Of torch's
            tensors; of others, of a batch and in exported programs it changes nothing, but that
            float32 is refused there, too.

    Returns:
        ``[*S, N]``, or ``[*broadcast(X, W), M, N]``, of x's dtype; of mode "affine" of that which x
        and scales promote to. Sums are in float32, of elements as `dequantize` gives them in that
        dtype; a global scale is multiplied with the sum. So rows of the identity give exactly what
        `dequantize` does.

    Raises:
        KernelError: the mode has no such group or bits, or no global scale; biases are missing, or
            not of this mode; ``K`` is no multiple of the group; shapes do not fit, or a dtype is
            another, float32 with ``keep_bf16``. There is a derivative with respect to x, in mode
            "affine" to scales and biases, and to a global scale: scales that are bytes have none.
        KernelTypeError: an argument is no array.

    Example:
        >>> import numpy as np, ferrule.ops
        >>> w = ferrule.ops.quantize(np.eye(32, dtype=np.float32), mode="mxfp4")
        >>> ferrule.ops.quantized_matmul(np.ones(32, np.float32), *w, mode="mxfp4")[:3]
        array([1., 1., 1.], dtype=float32)
    """
    form = formats.find("quantized_matmul", mode, group_size, bits)
    x, parts = _operands("quantized_matmul", form, transpose, x, w, scales, biases, global_scale)
    batched = getattr(w, "ndim", 2) > 2
    single = batched and x.ndim == 1
    x = x[None] if single else x
    kind = "xw" if batched else ""
    kind, chosen = gathers.for_kernels("quantized_matmul", kind, x, parts[0], None, None)
    keep = kept.dtype_to_keep(x, w) if keep_bf16 else ""
    y = _product(*form, transpose, kind, global_scale is not None, keep)(x, *parts, *chosen)
    return gathers.squeezed(y, [-2] * single)


def gather_qmm(
    x: Any,
    w: Any,
    scales: Any,
    biases: Any = None,
    lhs_indices: Any = None,
    rhs_indices: Any = None,
    transpose: bool = True,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    global_scale: Any = None,
    *,
    sorted_indices: bool = False,
) -> Any:
    """Products of matrices of x with quantized ones, chosen by indices, as MLX's `gather_qmm`.

    Args:
        x: ``[*X, M, K]`` of float32, float16 or bfloat16.
        w, scales, biases: as in `quantized_matmul`, with a batch ``W`` (the experts).
        lhs_indices: ``[*I]`` of integers: which matrices of x, counted over all of X.
            None is each at its place: 0, 1, ... in the shape X.
        rhs_indices: ``[*R]``, the same for w. What chooses on both sides broadcasts.
        transpose, group_size, bits, mode: as in `quantized_matmul`.
        global_scale: of mode "nvfp4": one for all, or one per matrix, ``[*W]``.
        sorted_indices: that indices ascend. Results are the same without.

    Returns:
        ``[*broadcast(I, R), M, N]``, as `quantized_matmul` has it. An index that names no matrix
        gives NaN.

    Raises:
        KernelError, KernelTypeError: as `quantized_matmul` says; or an index is not of integers.
    """
    form = formats.find("gather_qmm", mode, group_size, bits)
    x, parts = _operands("gather_qmm", form, transpose, x, w, scales, biases, global_scale)
    lhs, rhs, single = gathers.indices("gather_qmm", lhs_indices, rhs_indices)
    kind = ("x" if lhs is None else "l") + ("w" if rhs is None else "r")
    fast = transpose and form.bits in (4, 8) and dtype_name(x) != "float32"
    kind, chosen = gathers.for_kernels("gather_qmm", kind, x, parts[0], lhs, rhs, mlx=fast)
    y = _product(*form, transpose, kind, global_scale is not None)(x, *parts, *chosen)
    alone = single and gathers.no_axes(x, w, lhs_indices, rhs_indices)
    return gathers.squeezed(y, [0] * alone)


def _operands(
    function: str,
    form: Format,
    transpose: bool,
    x: Any,
    w: Any,
    scales: Any,
    biases: Any,
    global_scale: Any,
) -> tuple[Any, list[Any]]:
    """x and the parts of w as the ops take them: of one dtype where the mode is affine."""
    w, scales = formats.packed(function, form, w, scales, biases)
    if transpose:
        formats.check_groups(function, form, "x", x, 1)
    else:
        formats.check_arrays(function, x=x)
    whole = formats.whole_scale(function, form, global_scale, x)
    if form.affine and dtype_name(x) != dtype_name(scales):
        x, scales = promoted(x, scales)
        biases = cast(biases, scales.dtype)
    return x, [part for part in (w, scales, biases, whole) if part is not None]


@ferrule.family
def _product(
    mode: str,
    group: int,
    bits: int,
    transpose: bool,
    letters: str,
    scaled: bool,
    keep: str = "",
) -> ferrule.Op:
    """``x, w, scales, biases?, global_scale?, lhs?, rhs? -> y``.

    ``keep`` is the dtype in which the dequantized matrix is kept for many rows of x; empty: none.
    """
    form = Format(mode, group, bits)
    rule = Rule(form, transpose, letters, scaled, keep)

    def packed(letters: str = letters, scaled: bool = scaled) -> ferrule.Op:
        return _product(mode, group, bits, transpose, letters, scaled)

    op = ferrule.op(
        f"quantized_matmul_{mode}" if not letters else f"gather_qmm_{mode}",
        rule.text,
        cuda=rule.units(),
        metal=rule.bodies(),
        run=kept.run(form, transpose, scaled, keep, packed) if keep else None,
        prefer="run" if keep else (),
        version=1,
    )
    kind = rule.kind

    def turned() -> ferrule.Op:
        of_rows = f"x{letters[1]}" if kind else ""
        return _product(mode, group, bits, not transpose, of_rows, scaled, keep)

    def vjp(primals: Any, cotangents: Any, outputs: Any, wanted: Any) -> Any:
        arrays, lhs, rhs = kind.split(primals) if kind else ([*primals], None, None)
        (x, *matrix), (c,) = arrays, cotangents
        gradients: list[Any] = [None] * len(primals)
        if wanted[0]:
            chosen = [rhs] if rhs is not None else []
            gradients[0] = turned()(c, *matrix, *chosen)
            if kind:
                gradients[0] = sum_of_left(gradients[0], lhs, x)
        if form.affine and (wanted[2] or wanted[3]):
            gradients[2:4] = _of_groups(form, transpose, letters, x, matrix, lhs, rhs, c)
        elif wanted[2]:
            raise _no_gradient(op.name, "scales", mode)
        if scaled and wanted[3]:
            plain = _product(mode, group, bits, transpose, letters, False, keep)
            products = plain(*primals[:3], *primals[4:])
            gradients[3] = _of_global_scale(letters, products, matrix, rhs, c)
        return gradients

    def jvp(primals: Any, tangents: Any, outputs: Any) -> Any:
        x, w = primals[:2]
        terms = [] if tangents[0] is None else [op(tangents[0], *primals[1:])]
        if form.affine and not (tangents[2] is None and tangents[3] is None):
            parts = [
                primal * 0 if tangent is None else tangent
                for primal, tangent in zip(primals[2:4], tangents[2:4], strict=True)
            ]
            terms.append(packed()(x, w, *parts, *primals[4:]))  # tangents are not kept
        elif tangents[2] is not None:
            raise _no_gradient(op.name, "scales", mode)
        if scaled and tangents[3] is not None:
            terms.append(op(*primals[:3], tangents[3], *primals[4:]))
        return (sum(terms[1:], terms[0]) if terms else op(x * 0, *primals[1:]),)

    op.def_vjp(vjp, version=1)
    op.def_jvp(jvp, version=1)
    op.def_vmap(gathers.vmap_of(op, letters, packed), version=1)
    return op


def _no_gradient(op: str, name: str, mode: str) -> ferrule.KernelError:
    return ferrule.KernelError(
        f"[op] op {op!r} has no derivative with respect to {name!r}, which are bytes in mode "
        f"{mode!r}. Differentiate with respect to x, or use mode 'affine'."
    )


def _of_groups(
    form: Format,
    transpose: bool,
    letters: str,
    x: Any,
    matrix: list[Any],
    lhs: Any,
    rhs: Any,
    c: Any,
) -> Any:
    """The gradients of scales and biases: of each group, the sums of what its elements have."""
    indices = [index for index in (lhs, rhs) if index is not None]
    if not letters:
        of_w = outer_of_rows(False)(*((c, x) if transpose else (x, c)))
    else:
        of_w = outer(letters)(x, c, *indices, matrix[0])
        of_w = library(of_w).swapaxes(of_w, -1, -2) if transpose else of_w
    return group_sums(*form)(of_w, *matrix[:2])


def _of_global_scale(letters: str, products: Any, matrix: list[Any], rhs: Any, c: Any) -> Any:
    """The gradient of a global scale, by the products without it."""
    w, _, whole = matrix
    chosen = [w] if rhs is None else [rhs, w]
    return _of_whole(letters[1:])(products, c, *(chosen if letters else []), whole)


@ferrule.family
def _of_whole(letter: str) -> ferrule.Op:
    """The gradient of a global scale, ``products, c, rhs?, w?, global_scale -> sums``: of what a
    matrix gave without it, times cotangents. ``letter`` is the right side's; empty of one matrix.
    """
    kind = Kind(f"x{letter}") if letter else None
    choose, count = (kind.find("c", "w"), "X_size") if kind else ("", "1")
    others = "G_size != 1 && (!inside || from_right != at)" if kind else "false"
    arrays = "products[*X,M,N]:T, c[*X,M,N]:T" if kind else "products[*S,N]:T, c[*S,N]:T"
    arrays += f"{kind.inputs}, w[*W,A,B]:uint32" if kind else ""
    where = ", ".join([*(kind.where if kind else []), formats.T_IN_FLOATS])
    op = ferrule.op(
        "global_scale_sums",
        f"{arrays}, global_scale[*G]:float32 -> sums[*G]:float32 where {where}",
        metal=f"""
    const long at = thread_position_in_grid.x;
    const ulong size = {"uint(M) * ulong(N)" if kind else "uint(S_size) * ulong(N)"};
    float sum = 0;
    for (ulong batch = 0; batch < uint({count}); batch++) {{
      {choose}
      if ({others}) continue;
      float part = 0;
      for (ulong i = batch * size; i < (batch + 1) * size; i++)
        part += float(products[i]) * float(c[i]);
      sum += part;
    }}
    sums[at] = sum / {formats.NVFP4_RANGE}f;
""",
        header=gathers.HEADER,
        grid="global_scale.size",
        threadgroup=64,
        version=1,
    )
    op.def_jvp(gathers.bilinear_jvp(op), version=1)
    return op


class Rule:
    """The rule and bodies of a product."""

    def __init__(
        self, form: Format, transpose: bool, letters: str, scaled: bool, dtype: str = ""
    ) -> None:
        self.form, self.transpose, self.scaled = form, transpose, scaled
        self.dtypes = f"T == {dtype}" if dtype else formats.T_IN_FLOATS
        self.kind = Kind(letters) if letters else None
        self.packs = f"K * {form.bits} // 32" if transpose else "P"
        self.width = "N" if transpose else f"P * 32 // {form.bits}"
        self.rows = "N" if transpose else "K"
        self.along = "K" if transpose else self.width  # the axis that is packed
        self.finish = texts.FINISH

    @property
    def matrix(self) -> str:
        """The inputs that are parts of w."""
        star = "*W," if self.kind else ""
        of_groups = f"[{star}{self.rows},({self.along}) // {self.form.group}]"
        biases = f", biases{of_groups}:T" if self.form.affine else ""
        whole = ", global_scale[*G]:float32" if self.scaled else ""
        return (
            f"w[{star}{self.rows},{self.packs}]:uint32, scales{of_groups}:{self.form.scales}"
            f"{biases}{whole}"
        )

    @property
    def where(self) -> list[str]:
        """What must hold."""
        conditions = [f"({self.along}) % {self.form.group} == 0"]
        if self.scaled:
            conditions.append("G_size == 1 or G_size == W_size" if self.kind else "G_size == 1")
        return [*conditions, *(self.kind.where if self.kind else [])]

    @property
    def text(self) -> str:
        """The rule."""
        where = ", ".join([*self.where, self.dtypes])
        if self.kind is None:
            return f"x[*S,K]:T, {self.matrix} -> y[*S,{self.width}]:T where {where}"
        return (
            f"x[{self.kind.left},M,K]:T, {self.matrix}{self.kind.inputs} "
            f"-> y[{self.kind.batch},M,{self.width}]:T where {where}"
        )

    def body(self, text: str) -> str:
        """A text of `quantized_texts`, with its words."""
        return gathers.put(text, self.words)

    @property
    def words(self) -> dict[str, str]:
        dense = "const long from_left = 0, from_right = 0; const bool inside = true;"
        each = "global_scale[G_size == 1 ? 0 : matrix]" if self.kind else "global_scale[0]"
        width = "uint(N)" if self.transpose else f"(uint(P) * 32 / {self.form.bits})"
        return {
            "READ(size)": texts.READ.replace("COUNT", "size"),
            "READ(columns)": texts.READ.replace("COUNT", "columns"),
            "CHOOSE": self.kind.find() if self.kind else dense,
            "ROW_COUNT": f"M * {self.kind.count}" if self.kind else "S_size",
            "LEFT": "uint(M)" if self.kind else "uint(S_size)",
            "DEPTH": "uint(K)",
            "WIDTH": width,
            "SCALES": "scales + at / GROUP, BIASES + at / GROUP",
            "BIASES": "biases" if self.form.affine else "scales",
            "BIAS": "float(biases[group])" if self.form.affine else "0",
            "WHOLE": f"{each} / {formats.NVFP4_RANGE}f" if self.scaled else "1",
            "PACKED": "w",
        }

    def units(self) -> list[Any]:
        """What NVIDIA's GPUs run, where it is not a Metal body."""
        mode, group, bits = self.form
        # Elements that lie across bytes no tensor core gets as they are stored.
        in_bytes = bits in (4, 8)
        if self.kind is None:
            names = on_cuda.named(self.scaled)
            many = on_cuda.many(mode, bits, group, self.transpose, names)
            if not (in_bytes and self.transpose):
                return many
            return [*on_cuda.packed(mode, bits, group, names), *many]
        letters = self.kind.letters
        fast = in_bytes and self.transpose
        return [
            *(on_cuda.gathered(mode, bits, group, letters, self.scaled) if fast else []),
            *gathered_cuda.packed(mode, bits, group, self.transpose, letters, self.scaled),
        ]

    def bodies(self) -> list[Any]:
        """The Metal bodies, for processors and for GPUs."""
        width = f"({self.width})"
        rows = f"(y.size // max({width}, 1))"
        header = self.form.header + self.finish + (gathers.HEADER if self.kind else "")
        across = f"ceildiv({width}, {texts.COLUMNS if self.transpose else texts.PART})"
        text = texts.PROCESSOR_TRANSPOSED if self.transpose else texts.PROCESSOR_STRAIGHT
        left = "M" if self.kind else "S_size"
        batches = f"(y.size // max({left} * {width}, 1))"
        if self.transpose:
            on_gpu = texts.SIMDGROUP
            grid: tuple[str, ...] = (f"32 * {width}", f"ceildiv({left}, 4) * {batches}")
            threadgroup: tuple[int, ...] = (128, 1)
        else:
            on_gpu = texts.EIGHT
            grid, threadgroup = (f"{width} // 8", left, batches), (64, 1, 1)
        return [
            ferrule.metal_body(
                self.body(text),
                header=header + texts.PROCESSOR + texts.UNITS,
                grid=(across, f"ceildiv({rows}, 16)"),
                threadgroup=1,
                when="device == cpu",
            ),
            ferrule.metal_body(
                self.body(on_gpu), header=header, grid=grid, threadgroup=threadgroup
            ),
        ]
