"""MLX's formats of quantized matrices: which there are, and the Metal functions that read them.

A row is a stream of bits: elements of ``BITS`` bits one behind the other, the first in the lowest
bits of the first byte. ``GROUP`` elements share a scale. What an element is worth:

* ``affine``: an integer ``q``; ``q * scale + bias``, product and sum each rounded to the dtype of
  scale and bias;
* ``mxfp4``, ``nvfp4``: a float of 1 bit for the sign, 2 for the exponent, 1 for the mantissa
  (E2M1), times the scale; ``mxfp8``: E4M3 (without infinities), times the scale. The scale is a
  byte: of ``nvfp4`` E4M3, of the others E8M0, a power of two. ``nvfp4`` may have a second scale
  for a whole matrix, given as the largest magnitude in it: times that, by 6 * 448.

Sources: MLX 0.32's documentation of `quantize`; OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ferrule

from . import arrays
from .arrays import cast, dtype_name, filled, library

FLOATS = f"({', '.join(arrays.FLOATS)})"  # in a rule
T_IN_FLOATS = f"T in {FLOATS}"

# The largest element of nvfp4 by the largest of its scales: what a global scale is over.
NVFP4_RANGE = 6.0 * 448.0

_GROUPS = {"affine": (64, 32, 128), "mxfp4": (32,), "mxfp8": (32,), "nvfp4": (16,)}
_BITS = {"affine": (4, 2, 3, 5, 6, 8), "mxfp4": (4,), "mxfp8": (8,), "nvfp4": (4,)}


class Format(NamedTuple):
    """How elements are packed: a mode, how many elements share a scale, and bits of an element."""

    mode: str
    group: int
    bits: int

    @property
    def affine(self) -> bool:
        return self.mode == "affine"

    @property
    def scales(self) -> str:
        """The dtype of scales in a rule."""
        return "T" if self.affine else "uint8"

    @property
    def packs(self) -> str:
        """How many words a row of K elements has, in a rule."""
        return f"K * {self.bits} // 32"

    @property
    def header(self) -> str:
        """The functions of Metal that read this format."""
        constants = {
            "BITS": self.bits,
            "GROUP": self.group,
            "AFFINE": int(self.affine),
            "E2M1_ELEMENTS": int(self.mode in ("mxfp4", "nvfp4")),
            "E4M3_ELEMENTS": int(self.mode == "mxfp8"),
            "E4M3_SCALES": int(self.mode == "nvfp4"),
        }
        return "".join(f"#define {name} {value}\n" for name, value in constants.items()) + _READ


def find(function: str, mode: Any, group: Any, bits: Any) -> Format:
    """The format of a mode; None is the mode's default.

    Raises:
        KernelError: there is none: says which there are.
    """
    if not isinstance(mode, str) or mode not in _GROUPS:
        raise ferrule.KernelError(
            f"[{function}] mode={mode!r}; expected one of {', '.join(map(repr, _GROUPS))}."
        )
    group = _GROUPS[mode][0] if group is None else group
    bits = _BITS[mode][0] if bits is None else bits
    for name, value, choices in (("group_size", group, _GROUPS), ("bits", bits, _BITS)):
        if value not in choices[mode]:
            allowed = ", ".join(map(str, sorted(choices[mode])))
            raise ferrule.KernelError(
                f"[{function}] {name}={value!r}; mode {mode!r} has {allowed}."
            )
    return Format(mode, int(group), int(bits))


def check_arrays(function: str, **arrays: Any) -> None:
    """That these are arrays.

    Raises:
        KernelTypeError: one is not: says which.
    """
    for name, array in arrays.items():
        if not (hasattr(array, "dtype") and hasattr(array, "shape")):
            raise ferrule.KernelTypeError(
                f"[{function}] {name} is a {type(array).__name__}; expected an array of NumPy, "
                "torch or MLX."
            )


def packed(function: str, form: Format, w: Any, scales: Any, biases: Any) -> tuple[Any, Any]:
    """The packed elements as words, and scales of one byte as such, whichever views were given.

    Raises:
        KernelError: the format has biases, and they are missing, or has none, and they are given.
    """
    if form.affine != (biases is not None):
        raise ferrule.KernelError(
            f"[{function}] biases={'None' if biases is None else 'an array'}; mode {form.mode!r} "
            + ("has biases: give what quantize returned." if form.affine else "has none.")
        )
    check_arrays(function, w=w, scales=scales, **({"biases": biases} if form.affine else {}))
    if dtype_name(w) in ("uint8", "int32", "float4_e2m1fn_x2"):
        w = w if dtype_name(w) != "float4_e2m1fn_x2" else _view(function, "w", w, "uint8")
        w = _view(function, "w", w, "uint32")
    if dtype_name(scales) == _FLOAT8.get(form.mode):
        scales = _view(function, "scales", scales, "uint8")
    return w, scales


def check_groups(function: str, form: Format, name: str, array: Any, axes: int = 2) -> None:
    """That the rows of an array are whole groups.

    Raises:
        KernelError: they are not, or the array has fewer axes.
        KernelTypeError: it is no array.
    """
    check_arrays(function, **{name: array})
    shape = array.shape
    if len(shape) < axes:
        raise ferrule.KernelError(
            f"[{function}] {name} has the shape {tuple(shape)}; expected {axes} axes or more."
        )
    if shape[-1] % form.group != 0:
        raise ferrule.KernelError(
            f"[{function}] {name} has the shape {tuple(shape)}, rows of {shape[-1]} elements, "
            f"no multiple of group_size={form.group}. Pad the rows, or take smaller groups."
        )


def name_of_dtype(dtype: Any) -> str:
    """The name of a dtype of any library."""
    name = getattr(dtype, "__name__", None) or str(dtype)
    return str(name).rpartition(".")[2]


# The dtype of torch that scales of a mode may have, where they are not bytes.
_FLOAT8 = {"nvfp4": "float8_e4m3fn", "mxfp4": "float8_e8m0fnu", "mxfp8": "float8_e8m0fnu"}


def _view(function: str, name: str, array: Any, dtype: str) -> Any:
    """The same bytes in another dtype.

    Raises:
        KernelError: the array lies in memory so that there is no such view.
    """
    try:
        return array.view(getattr(library(array), dtype))
    except (ValueError, RuntimeError) as error:
        if hasattr(array, "new_empty") and 0 in array.shape:  # it has other strides than torch's
            return _view(function, name, array.new_empty(array.shape), dtype)
        raise ferrule.KernelError(
            f"[{function}] {name} of {dtype_name(array)} cannot be read as {dtype} without a copy: "
            f"{error}. Its rows must lie without gaps, and begin at multiples of 4 bytes: give a "
            "contiguous copy."
        ) from None


def whole_scale(function: str, form: Format, scale: Any, like: Any) -> Any:
    """A global scale as an array with an axis; None without one.

    Raises:
        KernelError: the format has none.
        KernelTypeError: it is neither a number nor an array.
    """
    if scale is None:
        return None
    if form.mode != "nvfp4":
        raise ferrule.KernelError(
            f"[{function}] global_scale was given, which mode {form.mode!r} does not have; mode "
            "'nvfp4' has."
        )
    if isinstance(scale, (int, float)):
        return filled(scale, like)
    if getattr(scale, "ndim", None) == 0 and type(scale).__module__ == "numpy":
        return filled(float(scale), like)
    check_arrays(function, global_scale=scale)
    scale = cast(scale, "float32")
    return scale[None] if scale.ndim == 0 else scale


# Bytes are read, since 8 elements are as many of them as an element has bits.
_READ = """
#include <metal_stdlib>
using namespace metal;

// 8 elements, as integers.
template <typename P>
inline void read8(P bytes, thread uint* q) {
  #pragma clang loop unroll(full)
  for (int i = 0; i < 8; i++) {
    const int bit = i * BITS, byte = bit / 8, shift = bit % 8;
    uint v = uint(bytes[byte]) >> shift;
    if (shift + BITS > 8) v |= uint(bytes[byte + 1]) << (8 - shift);
    q[i] = v & ((1u << BITS) - 1);
  }
}

// Twice the value of E2M1, which is an integer: 0, 1, 2, 3, 4, 6, 8 or 12.
inline float twice_e2m1(uint code) {
  const float magnitude = float(int(0xC8643210u >> (code << 2 & 28) & 15));
  return as_type<float>(as_type<uint>(magnitude) | (code & 8) << 28);
}

// The value of E4M3, whose exponent 0 has no leading one, and whose largest code is NaN.
inline float e4m3(uint code) {
  const uint exponent = code >> 3 & 15, least = exponent + uint(exponent == 0);
  const float digits = float(int((code & 7) + (exponent == 0 ? 0u : 8u)));
  const float magnitude = digits * as_type<float>((least + 117) << 23);
  const uint bits = (code & 127) == 127 ? 0x7FC00000u : as_type<uint>(magnitude);
  return as_type<float>(bits | (code & 128) << 24);
}

// The value of E8M0: 2^-127 is a subnormal, 255 is NaN.
inline float e8m0(uint code) {
  return as_type<float>(code == 0 ? 0x00400000u : code == 255 ? 0x7FC00000u : code << 23);
}

// What an element is worth, by the value of its scale and bias.
template <typename T>
inline float value_of(uint q, float scale, float bias) {
  #pragma METAL fp contract(off)
  if (!AFFINE) return E4M3_ELEMENTS ? e4m3(q) * scale : twice_e2m1(q) * (scale * 0.5f);
  const float product = float(T(float(int(q)) * scale));
  return float(T(product + bias));
}
template <typename S>
inline float scale_of(S scale) { return float(scale); }
template <>
inline float scale_of<uchar>(uchar scale) { return E4M3_SCALES ? e4m3(scale) : e8m0(scale); }
"""
