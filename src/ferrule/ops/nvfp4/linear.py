"""`nvfp4_linear` and `mxfp4_linear`: products with matrices as checkpoints have them."""

from __future__ import annotations

from typing import Any

import ferrule

from .. import formats
from .. import quantized_cuda as on_cuda
from ..arrays import cast, dtype_name, filled, library
from ..formats import Format
from ..quantized import Rule, quantized_matmul
from ..quantized_tiles import PERSISTENT
from ..quantizing import dequantize
from ..rows import on_cpu
from . import arguments, humming

FORMATS = {"nvfp4": Format("nvfp4", 16, 4), "mxfp4": Format("mxfp4", 32, 4)}
SCALES = {"nvfp4": "(float8_e4m3fn, uint8)", "mxfp4": "(float8_e8m0fnu, uint8)"}
BACKENDS = {
    "nvfp4": ("packed", "dequantize", "humming", "reference"),
    "mxfp4": ("packed", "dequantize", "reference"),
}


def nvfp4_linear(
    x: Any, w_packed: Any, w_scale: Any, w_scale_2: Any, bias: Any = None, *, backend: Any = None
) -> Any:
    """``x @ w.T + bias``, of a matrix w in NVFP4 as ModelOpt's checkpoints have it (W4A16).

    Args:
        x: ``[*S, K]`` of bfloat16, float16 or float32; K is a multiple of 16.
        w_packed: ``[N, K // 2]`` of uint8, or of torch's ``float4_e2m1fn_x2``: two codes of E2M1 a
            byte, that of the even k in the lower bits.
        w_scale: ``[N, K // 16]`` of float8_e4m3fn, or its bytes as uint8: the scales of 16
            elements.
        w_scale_2: float32, ``[]`` or ``[1]``, or ``[N]``: one for each row, as of matrices that
            were put together.
        bias: ``[N]`` of x's dtype, or None.
        backend: None chooses by device and sizes. "packed" reads the packed weights, which an
            NVIDIA GPU's tensor cores multiply, up to 64 rows of x, and of compute capability 9.0
            any number; "dequantize", on a GPU, makes w in x's dtype, which cuBLAS multiplies;
            "reference", anywhere, makes it in float32, and has the array library multiply.
            "humming" is the package ``humming-kernels`` (``pip install 'ferrule[humming]'``): for
            torch's tensors of bfloat16 and float16 on GPUs of compute capability 9.0, one second
            scale, and N a multiple of 8. It has a copy of w in an order of its own, and compiles a
            kernel at the first call of each power of two of rows. Up to 128 rows, where it adds up
            parts of sums in x's dtype, results differ from call to call, unless
            ``torch.use_deterministic_algorithms(True)`` has it take slower kernels; the bias is
            added in x's dtype.

    Returns:
        ``[*S, N]`` of x's dtype: ``round(sum * w_scale_2 + bias)``, where products of elements and
        block scales are exact, and sums, factor and bias in float32. Elements or scales that are
        NaN make the rows NaN that have them.

    Raises:
        KernelError: shapes or dtypes do not fit; a derivative with respect to scales is asked for:
            there is one with respect to x and bias.
        KernelTypeError: an argument is no array.

    Sources: NVIDIA's ModelOpt 0.47 (``weight``, ``weight_scale``, ``weight_scale_2``); OCP
    Microscaling Formats Specification 1.0 (E2M1).

    Example:
        >>> import numpy as np, ferrule.ops
        >>> w, scale = np.full((2, 8), 0x22, np.uint8), np.full((2, 1), 0x38, np.uint8)  # ones
        >>> ferrule.ops.nvfp4_linear(np.ones(16, np.float32), w, scale, np.float32(0.5))
        array([8., 8.], dtype=float32)
    """
    return _linear("nvfp4", x, w_packed, w_scale, w_scale_2, bias, backend)


def mxfp4_linear(
    x: Any, w_packed: Any, w_scale: Any, bias: Any = None, *, backend: Any = None
) -> Any:
    """``x @ w.T + bias``, of a matrix w in MXFP4: as `nvfp4_linear`, but for scales.

    Args:
        x, w_packed, bias, backend: as of `nvfp4_linear`; K is a multiple of 32, and there is no
            "humming".
        w_scale: ``[N, K // 32]`` of float8_e8m0fnu, or its bytes as uint8: powers of two, the
            scales of 32 elements.

    Returns, Raises: as `nvfp4_linear` says.

    Source: OCP Microscaling Formats Specification 1.0.
    """
    return _linear("mxfp4", x, w_packed, w_scale, None, bias, backend)


def _linear(
    mode: str, x: Any, w_packed: Any, w_scale: Any, scale_2: Any, bias: Any, backend: Any
) -> Any:
    """The product; what is refused is told in the words of its function."""
    function = f"{mode}_linear"
    try:
        return _product(function, mode, x, w_packed, w_scale, scale_2, bias, backend)
    except Exception as error:
        given = {"x": x, "w_packed": w_packed, "w_scale": w_scale, "w_scale_2": scale_2}
        arguments.explain(error, function, given | {"bias": bias})
        raise


def _product(
    function: str,
    mode: str,
    x: Any,
    w_packed: Any,
    w_scale: Any,
    scale_2: Any,
    bias: Any,
    backend: Any,
) -> Any:
    if bias is not None and hasattr(x, "placements"):  # parts of a DTensor would each add the bias
        y = _product(function, mode, x, w_packed, w_scale, scale_2, None, backend)
        # Others would be broadcast, or promote.
        if bias.shape != y.shape[-1:] or bias.dtype != y.dtype:
            raise ferrule.KernelError(
                f"[{function}] bias is {dtype_name(bias)} of shape {tuple(bias.shape)}; expected "
                f"{dtype_name(y)} of shape {tuple(y.shape[-1:])}. Give a vector of x's dtype, or "
                "None."
            )
        return y + bias
    checked_backend(function, backend, BACKENDS[mode])
    w_packed = as_bytes(w_packed)
    if backend == "dequantize" and on_cpu(x):
        raise ferrule.KernelError(
            f"[{function}] backend='dequantize', whose product is cuBLAS's, but x is on a "
            "processor; expected arrays on an NVIDIA GPU. Leave backend out."
        )
    by_row = False
    if mode == "nvfp4":
        scale_2 = as_factor(scale_2, x)
        by_row = scale_2.ndim > 0 and scale_2.shape[0] != 1
    arrays = [array for array in (x, w_packed, w_scale, scale_2) if array is not None]
    invariant = False
    if backend == "humming":
        humming.check(function, "x", x, w_packed)
        if by_row:
            humming.refuse_factors(function)
        invariant = humming.deterministic()
    if backend == "reference":
        op = linear_op(mode, by_row, bias is not None).using(backend)
    else:
        op = linear_op(mode, by_row, bias is not None, backend or "", invariant)
    return op(*arrays, *[bias] * (bias is not None))


def checked_backend(function: str, backend: Any, backends: tuple[str, ...]) -> None:
    """That there is such a backend.

    Raises:
        KernelError: there is none: says which there are.
    """
    if backend is not None and backend not in backends:
        raise ferrule.KernelError(
            f"[{function}] backend={backend!r}; expected None or one of "
            f"{', '.join(map(repr, backends))}."
        )


def as_bytes(array: Any) -> Any:
    """Codes of E2M1 as bytes, where they are given in torch's dtype for two of them."""
    if dtype_name(array) == "float4_e2m1fn_x2":
        return array.view(library(array).uint8)
    return array


def as_factor(scale: Any, like: Any) -> Any:
    """A second scale as an array where the array ``like`` is."""
    if arguments.is_number(scale):
        return filled(float(scale), like)
    return scale


class _LinearRule(Rule):
    """The rule and bodies of a product with a matrix as checkpoints have it."""

    def __init__(self, mode: str, by_row: bool, biased: bool) -> None:
        super().__init__(FORMATS[mode], True, "", False)
        self.by_row, self.biased, self.has_factor = by_row, biased, mode == "nvfp4"
        factor = f" * w_scale_2[{'column' if by_row else '0'}]" * self.has_factor
        added = " + float(bias[column])" * biased
        self.finish = f"#define FINISH(sum, column) ((sum){factor}{added})\n"

    @property
    def text(self) -> str:
        """The rule."""
        group, mode = self.form.group, self.form.mode
        factor = f", w_scale_2[{'N' if self.by_row else '*C'}]:float32" * self.has_factor
        one = ", C_size == 1" * (self.has_factor and not self.by_row)
        return (
            f"x[*S,K]:T, w_packed[N,K//2]:uint8, w_scale[N,K//{group}]:Q{factor}"
            f"{', bias[N]:T' * self.biased} -> y[*S,N]:T "
            f"where K % {group} == 0{one}, {formats.T_IN_FLOATS}, Q in {SCALES[mode]}"
        )

    @property
    def words(self) -> dict[str, str]:
        scales = "w_scale + at / GROUP"
        return super().words | {
            "scales": "w_scale",
            "SCALES": f"{scales}, {scales}",
            "PACKED": "((const device uint*)w_packed)",
        }

    @property
    def names(self) -> on_cuda.Names:
        return on_cuda.Names(
            w="w_packed",
            scales="w_scale",
            factor="w_scale_2" * self.has_factor,
            by_row=True,
            added="bias" * self.biased,
        )

    def units(self, backend: str = "") -> list[Any]:
        """What NVIDIA's GPUs run, where it is not a Metal body: all, or those of a backend."""
        mode, group, bits = self.form
        packed = on_cuda.packed(mode, bits, group, self.names)
        many = on_cuda.many(mode, bits, group, True, self.names)
        if backend == "packed":
            # The threads that put x in order are counted in 32 bits, and have 8 elements each.
            most = "x.size + 128 * (x.size // max(K, 1)) < 34359738368"
            any_rows = PERSISTENT._replace(when=most)
            return [*packed, on_cuda.persistent(mode, bits, group, self.names, any_rows)]
        return many if backend == "dequantize" else [*packed, *many]


@ferrule.family
def linear_op(
    mode: str, by_row: bool, biased: bool, backend: str = "", invariant: bool = False
) -> ferrule.Op:
    """``x, w_packed, w_scale, w_scale_2?, bias? -> y``; ``w_scale_2`` has a scale for each row, or
    one for all. A backend has its own implementations alone; of "humming" some are invariant."""
    rule = _LinearRule(mode, by_row, biased)
    parts = () if biased else "K"
    if backend == "humming":
        op = humming.linear("nvfp4_linear_humming", rule.text, parts, invariant)
    else:
        op = ferrule.op(
            f"{mode}_linear",
            rule.text,
            cuda=rule.units(backend),
            metal=rule.bodies() if backend != "dequantize" else None,
            reference=_reference(mode) if not backend else None,
            batch="N",
            partial_sums=parts,
            version=1,
        )

    def vjp(primals: Any, cotangents: Any, outputs: Any, wanted: Any) -> Any:
        gradients: list[Any] = [None] * len(primals)
        (c,) = cotangents
        if mode == "nvfp4" and wanted[3]:
            raise no_derivative(op.name)
        if wanted[0]:
            gradients[0] = turned(mode, by_row, c, *primals[1 : 3 + rule.has_factor])
        if biased and wanted[-1]:
            gradients[-1] = c.reshape(-1, c.shape[-1]).sum(0)
        return gradients

    def jvp(primals: Any, tangents: Any, outputs: Any) -> Any:
        if mode == "nvfp4" and tangents[3] is not None:
            raise no_derivative(op.name)
        if tangents[0] is None:
            tangent = library(outputs[0]).zeros_like(outputs[0])
        else:
            matrix = primals[1 : 3 + rule.has_factor]
            tangent = linear_op(mode, by_row, False)(tangents[0], *matrix)
        return (tangent + tangents[-1] if biased and tangents[-1] is not None else tangent,)

    op.def_vjp(vjp, version=1)
    op.def_jvp(jvp, version=1)
    op.explain = arguments.explained(f"{mode}_linear", [p.name for p in op.rule.inputs])
    return op


def no_derivative(op: str) -> ferrule.KernelError:
    return ferrule.KernelError(
        f"[op] op {op!r} has no derivative with respect to 'w_scale_2'. Differentiate with respect "
        "to x and bias, and give w_scale_2 as a buffer, not a parameter."
    )


def turned(
    mode: str, by_row: bool, c: Any, w_packed: Any, w_scale: Any, scale_2: Any = None
) -> Any:
    """``c @ w``, of c's dtype."""
    if by_row:  # by the largest, too: of c times what is small float16 has few bits or none
        of = library(scale_2)
        most = of.abs(scale_2).max() if scale_2.shape[0] else filled(1.0, c)
        most = of.where(most == 0, most * 0 + 1, most)
        c = cast(cast(c, "float32") * (scale_2 / most), c.dtype)
        scale_2 = most
    whole = None if scale_2 is None else scale_2 * formats.NVFP4_RANGE
    return quantized_matmul(c, w_packed, w_scale, transpose=False, mode=mode, global_scale=whole)


def _reference(mode: str) -> Any:
    """The product in ordinary array code, by elements in float32."""

    def product(x: Any, w_packed: Any, w_scale: Any, *last: Any) -> Any:
        w = dequantize(w_packed, w_scale, mode=mode, dtype="float32")
        y = cast(x, "float32") @ w.swapaxes(-1, -2)
        if mode == "nvfp4":
            y, last = y * last[0], last[1:]
        return cast(y + cast(last[0], "float32") if last else y, x.dtype)

    return product
