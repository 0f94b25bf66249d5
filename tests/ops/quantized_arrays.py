"""What tests of quantized matrices share: arrays of the three hosts, their bits, MLX's codes."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import torch

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float32), np.dtype(np.float16), BF16]


def to_mlx(array: np.ndarray) -> mx.array:
    if array.dtype == BF16:
        return mx.array(array.view(np.uint16)).view(mx.bfloat16)
    return mx.array(array)


def to_torch(array: np.ndarray) -> torch.Tensor:
    if array.dtype == BF16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.asarray(array))


def to_numpy(array: Any) -> np.ndarray:
    if isinstance(array, torch.Tensor):
        bf16 = array.dtype == torch.bfloat16
        return array.view(torch.int16).numpy().view(BF16) if bf16 else array.numpy()
    if isinstance(array, mx.array):
        bf16 = array.dtype == mx.bfloat16
        return np.array(array.view(mx.uint16)).view(BF16) if bf16 else np.array(array)
    assert isinstance(array, np.ndarray)
    return array


HOSTS = {"numpy": lambda array: array, "torch": to_torch, "mlx": to_mlx}


def as_bits(array: np.ndarray) -> np.ndarray:
    """The bits of an array, of one NaN for all."""
    if array.dtype.kind in "ui":
        return array
    bits = array.view(f"u{array.itemsize}").copy()
    bits[np.isnan(array)] = np.iinfo(bits.dtype).max
    return bits


def assert_same(found: Any, expected: Any) -> None:
    """The same bits."""
    found, expected = to_numpy(found), to_numpy(expected)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    wrong = as_bits(found) != as_bits(expected)
    assert not wrong.any(), (np.argwhere(wrong)[:3], found[wrong][:3], expected[wrong][:3])


def assert_all_same(found: Any, expected: Any) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


def codes_of(packed: np.ndarray, bits: int) -> np.ndarray:
    """The numbers that words have: the first in the lowest bits."""
    stream = np.unpackbits(np.ascontiguousarray(packed).view(np.uint8), axis=-1, bitorder="little")
    count = stream.shape[-1] // bits
    return stream.reshape(*stream.shape[:-1], count, bits) @ (1 << np.arange(bits))


def packed_of(codes: np.ndarray, bits: int) -> np.ndarray:
    stream = (codes[..., None] >> np.arange(bits)) & 1
    stream = stream.reshape(*codes.shape[:-1], -1).astype(np.uint8)
    return np.packbits(stream, axis=-1, bitorder="little").view(np.uint32)


def mlx_quantize(w: np.ndarray, group: int, bits: int, mode: str, **more: Any) -> list[np.ndarray]:
    """MLX's, which takes no empty matrices, and of nvfp4 an even number of groups alone."""
    rows = math.prod(w.shape[:-1])
    padded = np.zeros((rows + rows % 2 + 2 * (rows == 0), max(w.shape[-1], group)), w.dtype)
    padded[:rows, : w.shape[-1]] = w.reshape(rows, w.shape[-1])
    found = mx.quantize(to_mlx(padded), group, bits, mode, **more)
    lengths = [w.shape[-1] * bits // 32, *[w.shape[-1] // group] * 2]
    return [
        to_numpy(array)[:rows, :length].reshape(*w.shape[:-1], length)
        for array, length in zip(found, lengths, strict=False)
    ]
