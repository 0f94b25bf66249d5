"""`quantize` and `dequantize`: matrices in MLX's formats, and back."""

from __future__ import annotations

from typing import Any

import ferrule

from . import formats
from .arrays import FLOATS, cast, dtype_name
from .formats import Format

ROUNDINGS = ("even", "mlx_cpu")


def quantize(
    w: Any,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    *,
    global_scale: Any = None,
    rounding: str = "even",
) -> tuple[Any, ...]:
    """Pack the elements of matrices into few bits each, in MLX's layouts, byte for byte.

    Args:
        w: ``[*W, N, K]`` of float32, float16 or bfloat16.
        group_size: neighbours of a row that share a scale; None is the mode's: 64, 32, 32, 16.
        bits: of an element; None is the mode's: 4, 4, 8, 4.
        mode: ``"affine"`` (groups of 32, 64 or 128; 2, 3, 4, 5, 6 or 8 bits), ``"mxfp4"``,
            ``"mxfp8"`` or ``"nvfp4"``.
        global_scale: of mode "nvfp4": the largest magnitude in w, in float32, of which each matrix
            has one or all have the same; scales then use all of E4M3.
        rounding: ``"even"``: in float32, halves to even and zeros with their signs, as converters
            in hardware do. Scales of mode "nvfp4" are rounded so too, and stop at 448; those of the
            "mx" modes are the next power of two, so that no element is cut off. ``"mlx_cpu"``: as
            MLX's CPU has it, to the byte: in w's dtype, and of E2M1 halves to the smaller magnitude
            and zeros without a sign. Mode "affine" is the same in both, and MLX's.

    Returns:
        packed ``[*W, N, K * bits / 32]`` of uint32, and scales ``[*W, N, K / group_size]`` of
        uint8; of mode "affine" of w's dtype, with biases of the same shape as a third. A group that
        has a NaN or an infinity has a scale that is NaN, and so is all that becomes of it.

    Raises:
        KernelError: the mode has no such group or bits, or no global scale; ``K`` is no multiple of
            the group; w has fewer than two axes, or another dtype.
        KernelTypeError: w is no array.

    Example:
        >>> import numpy as np, ferrule.ops
        >>> packed, scales = ferrule.ops.quantize(np.full((1, 16), 3, np.float32), mode="nvfp4")
        >>> hex(packed[0, 0]), scales  # 0.5 is 0x30 of E4M3, 6 is 7 of E2M1
        ('0x77777777', array([[48]], dtype=uint8))
    """
    form = formats.find("quantize", mode, group_size, bits)
    if rounding not in ROUNDINGS:
        raise ferrule.KernelError(
            f"[quantize] rounding={rounding!r}; expected one of {', '.join(map(repr, ROUNDINGS))}."
        )
    formats.check_groups("quantize", form, "w", w)
    scale = formats.whole_scale("quantize", form, global_scale, w)
    op = _quantize(*form, rounding == "even" or form.affine, scale is not None)
    return op(w) if scale is None else op(w, scale)  # type: ignore[no-any-return]


def dequantize(
    w: Any,
    scales: Any,
    biases: Any = None,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    global_scale: Any = None,
    dtype: Any = None,
) -> Any:
    """The elements of quantized matrices, as floats.

    Args:
        w: ``[*W, N, K * bits / 32]`` of uint32, as `quantize` packs it; or the same bytes as uint8
            or int32.
        scales: ``[*W, N, K / group_size]`` of uint8 (or of torch's 8-bit floats); of mode "affine"
            of float32, float16 or bfloat16.
        biases: of mode "affine": as scales are.
        group_size, bits, mode: as in `quantize`.
        global_scale: of mode "nvfp4": what `quantize` was given.
        dtype: of the result: float32, float16 or bfloat16, or a name of one. None is the scales'
            dtype, or bfloat16.

    Returns:
        ``[*W, N, K]``. Mode "affine" rounds twice in the scales' dtype, the product and then the
        sum, as MLX does; of the others the product is exact, and rounded once.

    Raises:
        KernelError: the mode has no such group or bits, or no global scale; biases are missing, or
            not of this mode; shapes do not fit each other, or a dtype is another.
        KernelTypeError: an argument is no array.
    """
    form = formats.find("dequantize", mode, group_size, bits)
    w, scales = formats.packed("dequantize", form, w, scales, biases)
    scale = formats.whole_scale("dequantize", form, global_scale, w)
    if dtype is None:
        to = dtype_name(scales) if form.affine else "bfloat16"
    else:
        to = dtype if isinstance(dtype, str) else formats.name_of_dtype(dtype)
    if to not in FLOATS:
        raise ferrule.KernelError(
            f"[dequantize] dtype={to!r}; expected one of {', '.join(FLOATS)}."
        )
    arrays = [array for array in (w, scales, biases, scale) if array is not None]
    return _dequantize(*form, to, scale is not None)(*arrays)


# Rounds to E2M1, E4M3 and E8M0.
_WRITE = """
// Halves go to the even code, and where EVEN is not set to the one that is nearer to 0.
inline uint to_e2m1(float v) {
  const float m = metal::abs(v);
  const uint code = uint(m > 0.25f) + uint(EVEN ? m >= 0.75f : m > 0.75f) + uint(m > 1.25f)
      + uint(EVEN ? m >= 1.75f : m > 1.75f) + uint(m > 2.5f)
      + uint(EVEN ? m >= 3.5f : m > 3.5f) + uint(m > 5.0f);
  const bool negative = as_type<uint>(v) >> 31 != 0 && (EVEN || code != 0);
  return code | uint(negative) << 3;
}

// Halves go to the even code; what is larger than 448 becomes that.
inline uint to_e4m3(float v) {
  const float m = metal::abs(v);
  const uint bits = as_type<uint>(m), sign = as_type<uint>(v) >> 31 << 7;
  const uint rounded = ((bits + 0x7FFFFu + (bits >> 20 & 1)) >> 20) - 960;
  const uint code = m < 0.015625f ? uint(metal::rint(m * 512.0f)) : metal::min(rounded, 126u);
  return code | sign;
}

// The next power of two that is not smaller.
inline uint to_e8m0(float v) {
  const uint bits = as_type<uint>(v), exponent = bits >> 23, digits = bits & 0x7FFFFFu;
  const bool up = exponent == 0 ? digits > 0x400000u : digits != 0;
  return metal::min(exponent + uint(up), 254u);
}
"""

# A thread packs one group.
_OF_GROUP = """
    const uint group = thread_position_in_grid.x;
    const device T* from = w + ulong(group) * GROUP;
    device uint* to = packed + ulong(group) * (GROUP * BITS / 32);
    float least = INFINITY, most = -INFINITY, nothing = 0;
    for (int i = 0; i < GROUP; i++) {
      const float v = float(from[i]);
      least = metal::min(least, v);
      most = metal::max(most, v);
      nothing += v * 0.0f;  // of NaN and infinities that is NaN
    }
    const bool finite = nothing == 0;
"""
_PACK = """
    ulong waiting = 0;
    int count = 0;
    for (int i = 0; i < GROUP; i++) {
      const uint code = finite ? CODE(float(from[i])) : 0u;
      waiting |= ulong(code) << count;
      count += BITS;
      if (count >= 32) {
        *to++ = uint(waiting);
        waiting >>= 32;
        count -= 32;
      }
    }
"""

# The scale is found again such that the extreme that is farther from 0 is hit exactly.
_AFFINE = (
    _OF_GROUP
    + """
    const float most_code = float((1 << BITS) - 1);
    const bool below = metal::abs(least) > metal::abs(most);
    float scale = metal::max((most - least) / most_code, 1e-7f), bias = 0;
    scale = below ? scale : -scale;
    const float edge = below ? least : most, steps = metal::rint(edge / scale);
    if (steps != 0) {
      scale = edge / steps;
      bias = edge;
    }
    scales[group] = T(finite ? scale : NAN);
    biases[group] = T(finite ? bias : NAN);
#define CODE(v) uint(metal::clamp(metal::rint((v - bias) / scale), 0.0f, most_code))
"""
    + _PACK
)

_FLOATING = (
    _OF_GROUP
    + """
    const float by = BY;  // brings w into the range that a global scale says
    const float magnitude = metal::max(metal::abs(least), metal::abs(most));
    float scale = float(ROUNDED(magnitude / (E4M3_ELEMENTS ? 448.0f : 6.0f)));
    uint byte;
    if (E4M3_SCALES) {
      byte = to_e4m3(scale * by);
      scale = e4m3(byte);
    } else {
      byte = scale == 0 ? 127 : to_e8m0(scale);
      scale = e8m0(byte);
    }
    const bool known = finite && by == by && metal::abs(by) <= MAXFLOAT;
    scales[group] = uchar(known ? byte : E4M3_SCALES ? 0x7Fu : 0xFFu);
    const bool some = known && scale != 0;
#define TO_CODE(v) (E4M3_ELEMENTS ? to_e4m3(v) : to_e2m1(v))
#define CODE(v) (some ? TO_CODE(float(ROUNDED(v / scale)) * by) : 0u)
"""
    + _PACK
)


@ferrule.family
def _quantize(mode: str, group: int, bits: int, even: bool, scaled: bool) -> ferrule.Op:
    form = Format(mode, group, bits)
    whole = ", global_scale[*G]:float32" if scaled else ""
    of_scales = f"scales[*W,N,K//{group}]:{form.scales}~"
    of_biases = f", biases[*W,N,K//{group}]:T~" if form.affine else ""
    text = _AFFINE if form.affine else _FLOATING
    by = "1"
    if scaled:
        each = f"global_scale[G_size == 1 ? 0 : group / (uint(N) * (uint(K) / {group}))]"
        by = f"{each} == 0 ? 0.0f : {formats.NVFP4_RANGE}f / {each}"
    words = {"EVEN": int(even), "ROUNDED": "float" if even else "T", "BY": by}
    return ferrule.op(
        f"quantize_{mode}",
        f"w[*W,N,K]:T{whole} -> packed[*W,N,{form.packs}]:uint32, {of_scales}{of_biases} "
        f"where K % {group} == 0, {formats.T_IN_FLOATS}" + f", {_ONE_OR_EACH}" * scaled,
        metal=text,
        header=form.header
        + "".join(f"#define {name} {value}\n" for name, value in words.items())
        + _WRITE,
        grid=f"w.size // {group}",
        threadgroup=256,
    )


_ONE_OR_EACH = "G_size == 1 or G_size == W_size"

# A thread takes a group.
_DEQUANTIZE = """
    const uint group = thread_position_in_grid.x;
    const device uchar* bytes = (const device uchar*)packed + ulong(group) * (GROUP * BITS / 8);
    device T* to = w + ulong(group) * GROUP;
    const float scale = scale_of(scales[group])TIMES, bias = BIAS;
    for (int i = 0; i < GROUP; i += 8) {
      uint q[8];
      read8(bytes + i / 8 * BITS, q);
      for (int j = 0; j < 8; j++) to[i + j] = T(value_of<S>(q[j], scale, bias));
    }
"""


@ferrule.family
def _dequantize(mode: str, group: int, bits: int, dtype: str, scaled: bool) -> ferrule.Op:
    form = Format(mode, group, bits)
    columns = f"P * 32 // {bits}"
    of_scales = f"scales[*W,N,{columns} // {group}]:{'S' if form.affine else 'uint8'}"
    of_biases = f", biases[*W,N,{columns} // {group}]:S" if form.affine else ""
    whole = ", global_scale[*G]:float32" if scaled else ""
    where = [f"{columns} % {group} == 0"]
    where += [f"S in {formats.FLOATS}"] * form.affine + [_ONE_OR_EACH] * scaled
    text = _DEQUANTIZE.replace("BIAS", "float(biases[group])" if form.affine else "0")
    by = "1"
    if scaled:
        each = f"group / (uint(N) * (uint(P) * 32 / {bits} / GROUP))"
        by = f"global_scale[G_size == 1 ? 0 : {each}] / {formats.NVFP4_RANGE}f"
    op = ferrule.op(
        f"dequantize_{mode}",
        f"packed[*W,N,P]:uint32, {of_scales}{of_biases}{whole} -> w[*W,N,{columns}]:{dtype} "
        f"where {', '.join(where)}",
        metal=text.replace("TIMES", f" * ({by})" if scaled else ""),
        header=form.header,
        grid=f"packed.size * 32 // {bits * group}",
        threadgroup=256,
        template={"T": getattr(ferrule, dtype)} | ({} if form.affine else {"S": ferrule.float32}),
    )
    if form.affine:
        op.def_vjp(_dequantize_vjp(form), version=1)
        op.def_jvp(_dequantize_jvp(op), version=1)
    return op


def _dequantize_vjp(form: Format) -> Any:
    def vjp(primals: Any, cotangents: Any, outputs: Any) -> Any:
        packed, scales, _ = primals
        return None, *group_sums(*form)(cast(cotangents[0], "float32"), packed, scales)

    return vjp


def _dequantize_jvp(op: ferrule.Op) -> Any:
    def jvp(primals: Any, tangents: Any, outputs: Any) -> Any:
        parts = [
            primal * 0 if tangent is None else tangent
            for primal, tangent in zip(primals[1:], tangents[1:], strict=True)
        ]
        return (op(primals[0], *parts),)

    return jvp


# Of CUDA: a thread has 8 elements, and lanes that are neighbours have a group.
_GROUP_SUMS = """
    const int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x, all = int64_t(W_size) * N * K;
    float products = 0, sum = 0;
    if (i * 8 < all) {
      uint64_t codes = 0;
#pragma unroll
      for (int b = 0; b < BITS; ++b)
        codes |= uint64_t(reinterpret_cast<const uint8_t*>(w)[i * BITS + b]) << (8 * b);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float v = of_w[i * 8 + j];
        products += v * float(int(codes >> (j * BITS)) & ((1 << BITS) - 1));
        sum += v;
      }
    }
#pragma unroll
    for (int back = GROUP / 16; back; back /= 2) {
      products += __shfl_down_sync(0xffffffff, products, back);
      sum += __shfl_down_sync(0xffffffff, sum, back);
    }
    if (i * 8 < all && i % (GROUP / 8) == 0) {
      of_scales[i / (GROUP / 8)] = T(products);
      of_biases[i / (GROUP / 8)] = T(sum);
    }
"""


@ferrule.family
def group_sums(mode: str, group: int, bits: int) -> ferrule.Op:
    """``of_w, w, scales -> of_scales, of_biases``: mode "affine" of `dequantize` backwards."""
    form = Format(mode, group, bits)
    of_groups = f"[*W,N,K // {group}]"
    op = ferrule.op(
        "group_sums",
        f"of_w[*W,N,K]:float32, w[*W,N,{form.packs}]:uint32, scales{of_groups}:T "
        f"-> of_scales{of_groups}:T, of_biases{of_groups}:T",
        cuda=ferrule.cuda_body(
            _GROUP_SUMS,
            grid="of_w.size // 8",
            threadgroup=256,
            template={"GROUP": group, "BITS": bits},
            when="device == cuda",
        ),
        metal="""
    const ulong at = thread_position_in_grid.x;
    float products = 0, sum = 0;
    for (int i = 0; i < GROUP; i += 8) {
      uint q[8];
      read8((const device uchar*)w + (at * GROUP + i) / 8 * BITS, q);
      for (int j = 0; j < 8; j++) {
        const float v = of_w[at * GROUP + i + j];
        products += v * float(int(q[j]));
        sum += v;
      }
    }
    of_scales[at] = T(products);
    of_biases[at] = T(sum);
""",
        header=form.header,
        grid="scales.size",
        threadgroup=64,
        version=1,
    )

    def vjp(primals: Any, cotangents: Any, outputs: Any) -> Any:
        parts = [cast(cotangent, "float32") for cotangent in cotangents]
        return _dequantize(*form, "float32", False)(primals[1], *parts), None, None

    def jvp(primals: Any, tangents: Any, outputs: Any) -> Any:
        of_w = primals[0] * 0 if tangents[0] is None else tangents[0]
        return op(of_w, *primals[1:])

    op.def_vjp(vjp, version=1)
    op.def_jvp(jvp, version=1)
    return op
