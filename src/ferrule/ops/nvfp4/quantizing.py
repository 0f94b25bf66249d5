"""`quantize_nvfp4` and back, by ModelOpt's rule, and the codes that both are made of.

An element is E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, two to a byte, the first in the
low half. 16 neighbours of a row share a scale in E4M3, and a matrix has one in float32:
``w = element * w_scale * w_scale_2``.

Source: NVIDIA's TensorRT Model Optimizer (ModelOpt) 0.47, `NVFP4QTensor`, which the tests compare
with, byte for byte.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch

import ferrule

GROUP = 16
E2M1_MAX, E4M3_MAX = 6.0, 448.0
E4M3_MIN = 2.0**-9  # the least that is not 0

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# A magnitude's code is how many of these are less. Halves go to the even code: those that go up
# have the float32 before them.
_BOUNDS = (0.25, 0.75 - 2**-24, 1.25, 1.75 - 2**-23, 2.5, 3.5 - 2**-22, 5.0)


def quantize_nvfp4(w: Any, w_scale_2: Any = None) -> tuple[Any, Any, Any]:
    """Pack matrices into NVFP4 as ModelOpt does, to the byte.

    Args:
        w: ``[*W, N, K]`` of float32, float16 or bfloat16; K is a multiple of 16.
        w_scale_2: ``[*W]`` of float32, or one number, where it is not to be found: layers that are
            run as one (q, k and v; gate and up) want the same in some tools. None is the largest
            magnitude of each matrix, by 6 * 448.

    Returns:
        w_packed ``[*W, N, K / 2]`` of uint8, w_scale ``[*W, N, K / 16]`` of float8_e4m3fn,
        w_scale_2 ``[*W]`` of float32. A group of zeros has the scale 1, others from 2^-9 to 448. A
        matrix of zeros alone, or of which the largest by 2688 is 0 in float32, has the w_scale_2 1:
        ModelOpt divides by 0 there, and gives NaN.

    Raises:
        KernelError: w has another dtype or shape, or an element that is NaN or infinite; w_scale_2
            has another shape, or is not positive.
        KernelTypeError: w is no tensor of torch.

    Example:
        >>> w_packed, w_scale, w_scale_2 = quantize_nvfp4(torch.full((1, 16), 3.0))
        >>> hex(w_packed[0, 0]), float(w_scale[0, 0])  # 6 is 7 of E2M1
        ('0x77', 448.0)
    """
    _check_floats("quantize_nvfp4", "w", w)
    if w.ndim < 2:
        raise ferrule.KernelError(
            f"[quantize_nvfp4] w has the shape {tuple(w.shape)}; expected two axes or more."
        )
    w = w.detach()
    most = w.abs().amax((-2, -1)).float() if w.numel() else w.new_ones(w.shape[:-2]).float()
    if not torch.isfinite(most).all():
        raise ferrule.KernelError(
            "[quantize_nvfp4] w has elements that are NaN or infinite, which NVFP4 cannot "
            "hold. Look where they come from: torch.isfinite(w)."
        )
    if w_scale_2 is None:
        w_scale_2 = most / (E2M1_MAX * E4M3_MAX)
        w_scale_2 = torch.where(w_scale_2 == 0, 1.0, w_scale_2)
    else:
        w_scale_2 = _given_scale_2(w, w_scale_2)
    whole = w_scale_2[..., None, None]
    groups = w.unflatten(-1, (-1, GROUP)) if w.shape[-1] else w.reshape(*w.shape[:-1], 0, GROUP)
    scale = groups.abs().amax(-1).float() / (E2M1_MAX * whole)
    scale = torch.where(scale == 0, 1.0, scale).clamp(E4M3_MIN, E4M3_MAX)
    w_scale = scale.to(torch.float8_e4m3fn)
    codes = e2m1_codes(groups / (w_scale.float() * whole)[..., None])
    return pack(codes.flatten(-2)), w_scale, w_scale_2


def dequantize_nvfp4(w_packed: Any, w_scale: Any, w_scale_2: Any = 1.0, dtype: Any = None) -> Any:
    """The elements of NVFP4 matrices, as floats.

    Args:
        w_packed: ``[*W, N, K / 2]`` of uint8.
        w_scale: ``[*W, N, K / 16]`` of float8_e4m3fn, or its bytes as uint8.
        w_scale_2: a number; ``[*W]`` of float32, one of each matrix; or ``[*W, N]`` (of one matrix
            also ``[1]``), one of each row.
        dtype: of the result; None is bfloat16.

    Returns:
        ``[*W, N, K]``: the product of the scales, in float32, times the element, rounded to dtype.
        Code 8 is -0; ModelOpt reads it as 0.

    Raises:
        KernelError: w_packed or w_scale has another dtype, or they do not fit each other.
    """
    w_scale = _as_scales(w_packed, w_scale)
    if isinstance(w_scale_2, torch.Tensor):
        per_row = w_scale_2.ndim == w_packed.ndim - 1
        w_scale_2 = w_scale_2[..., None] if per_row else w_scale_2[..., None, None]
    scale = (w_scale.float() * w_scale_2)[..., None]
    values = e2m1_values(unpack(w_packed)).unflatten(-1, (w_scale.shape[-1], GROUP))
    return (values * scale).flatten(-2).to(dtype or torch.bfloat16)


def _as_scales(w_packed: Any, w_scale: Any) -> Any:
    """Scales in E4M3 that fit the elements, of what may be their bytes.

    Raises:
        KernelError: they do not fit, or something is of another dtype.
    """
    scales = (torch.float8_e4m3fn, torch.uint8)
    for name, array, dtypes in (("w_packed", w_packed, scales[1:]), ("w_scale", w_scale, scales)):
        if array.dtype not in dtypes:
            raise ferrule.KernelError(
                f"[dequantize_nvfp4] {name} is of {array.dtype}; expected "
                f"{' or '.join(map(str, dtypes))}."
            )
    groups = (*w_packed.shape[:-1], w_packed.shape[-1] * 2 // GROUP)
    if tuple(w_scale.shape) != groups or w_packed.shape[-1] * 2 % GROUP:
        raise ferrule.KernelError(
            f"[dequantize_nvfp4] w_packed has the shape {tuple(w_packed.shape)}, w_scale "
            f"{tuple(w_scale.shape)}; expected [*W, N, K / 2] and [*W, N, K / {GROUP}], without "
            "what kernels pad or swizzle."
        )
    return w_scale.view(torch.float8_e4m3fn)


def e2m1_codes(values: Any) -> Any:
    """The codes of E2M1, of uint8, that are nearest: halves go to the even one, what is larger than
    6 is 6. Of -0 it is 0."""
    bounds = torch.tensor(_BOUNDS, dtype=torch.float32, device=values.device)
    codes = torch.bucketize(values.abs(), bounds, out_int32=True).to(torch.uint8)
    return codes | (values < 0).to(torch.uint8) << 3


def e2m1_values(codes: Any) -> Any:
    """What codes of E2M1 are worth, in float32."""
    both = (*_VALUES, *(-value for value in _VALUES))
    return torch.tensor(both, dtype=torch.float32, device=codes.device)[codes.int()]


def pack(codes: Any) -> Any:
    """Two codes to a byte: the first in the low half."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(packed: Any) -> Any:
    """The codes of bytes."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def has_nan(scale: Any) -> bool:
    """Whether a scale in E4M3 is NaN, 0x7F or 0xFF: by the largest byte, which needs no memory."""
    largest = ((torch.int8, 127), (torch.uint8, 255))
    return any(scale.numel() and int(scale.view(t).amax()) == nan for t, nan in largest)


def check_scale_2(function: str, name: str, value: float) -> None:
    """That a scale in float32 is a number to multiply with.

    Raises:
        KernelError: it is NaN, infinite, or not positive.
    """
    if not (math.isfinite(value) and value > 0):
        raise ferrule.KernelError(f"[{function}] {name} is {value}; expected a positive number.")


def _given_scale_2(w: Any, w_scale_2: Any) -> Any:
    """Second scales of matrices, as users give them.

    Raises:
        KernelError: they have another shape, or are no numbers to divide by.
    """
    scale_2 = torch.as_tensor(w_scale_2, dtype=torch.float32, device=w.device).detach()
    if scale_2.ndim and scale_2.shape != w.shape[:-2]:
        raise ferrule.KernelError(
            f"[quantize_nvfp4] w_scale_2 has the shape {tuple(scale_2.shape)}, w "
            f"{tuple(w.shape)}; expected {tuple(w.shape[:-2])}, one for each matrix, or a number."
        )
    if scale_2.numel():
        for one in (scale_2.amin(), scale_2.amax()):
            check_scale_2("quantize_nvfp4", "w_scale_2", float(one))
    return scale_2.expand(w.shape[:-2]).clone()


def _check_floats(function: str, name: str, array: Any) -> None:
    """That this is a tensor of floats whose rows are whole groups."""
    if not isinstance(array, torch.Tensor):
        raise ferrule.KernelTypeError(
            f"[{function}] {name} is a {type(array).__name__}; expected a tensor of torch."
        )
    if array.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ferrule.KernelError(
            f"[{function}] {name} is of {array.dtype}; expected float32, float16 or bfloat16."
        )
    if not array.ndim or array.shape[-1] % GROUP:
        raise ferrule.KernelError(
            f"[{function}] {name} has the shape {tuple(array.shape)}; expected rows whose length "
            f"is a multiple of {GROUP}. Pad the rows with zeros."
        )


def quantize_activations_nvfp4(x: Any, input_scale: Any) -> tuple[Any, Any]:
    """Activations in NVFP4, as kernels of W4A4 for Blackwell have them.

    Args:
        x: ``[*S, K]`` of float32, float16 or bfloat16; K is a multiple of 16.
        input_scale: ``[]`` of float32, or a number: the checkpoint's, which is the largest
            magnitude that was seen in calibration, by 6 * 448.

    Returns:
        packed ``[*S, K / 2]`` of uint8, and scale ``[*S, K / 16]`` of float8_e4m3fn: a group's
        largest magnitude by 6 and by input_scale, at most 448. What is larger than scales can say
        becomes the largest element, and a group whose scale rounds to 0 becomes zeros.
        ``dequantize_nvfp4(packed, scale, input_scale)`` is what is left of x. A group with NaN
        has a scale that is NaN.

    Raises:
        KernelError: x has another dtype or shape.
        KernelTypeError: x is no tensor of torch.
    """
    _check_floats("quantize_activations_nvfp4", "x", x)
    groups = x.float().unflatten(-1, (x.shape[-1] // GROUP, GROUP))
    scale = (groups.abs().amax(-1) / E2M1_MAX / input_scale).clamp(max=E4M3_MAX)
    scale = scale.to(torch.float8_e4m3fn)
    by = (scale.float() * input_scale)[..., None]
    codes = e2m1_codes(torch.where(by == 0, 0.0, groups / by))
    return pack(codes.flatten(-2)), scale


def linear_w4a4(
    x: Any, input_scale: Any, w_packed: Any, w_scale: Any, w_scale_2: Any, bias: Any = None
) -> Any:
    """``x @ w.T + bias`` of activations and weights in NVFP4: the reference of W4A4 kernels.

    Args:
        x, input_scale: as `quantize_activations_nvfp4` takes them.
        w_packed, w_scale, w_scale_2, bias: of one matrix, as `nvfp4_linear` takes them.

    Returns:
        ``[*S, N]`` of x's dtype. Products of elements and group scales are summed in float32; the
        sum is multiplied by input_scale * w_scale_2, the bias added, and it is rounded once.
    """
    packed, scale = quantize_activations_nvfp4(x, input_scale)
    left = dequantize_nvfp4(packed, scale, dtype=torch.float32)
    w = dequantize_nvfp4(w_packed, w_scale, dtype=torch.float32)
    kind = x.device.type
    cast = kind != "meta" and torch.is_autocast_enabled(kind)
    with torch.autocast(kind, enabled=False) if cast else nullcontext():
        y = left @ w.T
    y = y * (input_scale * w_scale_2)
    return (y if bias is None else y + bias).to(x.dtype)
