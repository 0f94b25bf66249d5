"""Matrices in NVFP4 and MXFP4 for tests, and what they are worth, by tables of the formats."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)
CODES = np.concatenate([E2M1, -E2M1])
SCALES = {
    "nvfp4": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64),
    "mxfp4": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64),
}
GROUPS = {"nvfp4": 16, "mxfp4": 32}
SCALE_DTYPES = {"nvfp4": torch.float8_e4m3fn, "mxfp4": torch.float8_e8m0fnu}


class Packed(NamedTuple):
    """A matrix, or a batch of them.

    Attributes:
        packed, scale: as ops take them.
        values: float64, without a second scale.
    """

    packed: torch.Tensor
    scale: torch.Tensor
    values: np.ndarray


def values(mode: str, packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """What bytes are worth."""
    codes = np.stack([packed & 15, packed >> 4], -1)
    codes = codes.reshape(*packed.shape[:-1], 2 * packed.shape[-1])
    return CODES[codes] * np.repeat(SCALES[mode][scale], GROUPS[mode], -1)


def matrix(random: np.random.Generator, *shape: int, mode: str = "nvfp4") -> Packed:
    """Random codes, and finite scales of about one."""
    *rows, k = shape
    packed = random.integers(0, 256, (*rows, k // 2)).astype(np.uint8)
    low, high = (0x28, 0x40) if mode == "nvfp4" else (122, 128)
    scale = random.integers(low, high, (*rows, k // GROUPS[mode])).astype(np.uint8)
    if mode == "nvfp4":
        scale |= (random.random(scale.shape) < 0.1).astype(np.uint8) << 7  # negative ones, too
    return Packed(
        torch.tensor(packed),  # of nothing, too, whose strides NumPy has otherwise
        torch.tensor(scale).view(SCALE_DTYPES[mode]),
        values(mode, packed, scale),
    )


def any_bytes(random: np.random.Generator, layer: torch.nn.Module) -> None:
    """Gives a layer all codes and scales there are, NaN and negative ones too."""
    for name, buffer in layer.named_buffers():
        if name.endswith(("_packed", "_scale")):
            made = random.integers(0, 256, tuple(buffer.shape), dtype=np.uint8)
            buffer.view(torch.uint8).copy_(torch.tensor(made))


def normal(random: np.random.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.from_numpy(random.standard_normal(shape).astype(np.float32)).to(dtype)


def exact(x: torch.Tensor) -> np.ndarray:
    return x.detach().to(torch.float64).numpy()


ROUNDING = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def assert_within(
    y: Any, expected: np.ndarray, terms: np.ndarray, depth: int, dtype: torch.dtype
) -> None:
    """One rounding to the dtype, and of sums in float32 of ``depth`` products each one, of the sum
    of magnitudes ``terms``; what float16 has no normal number for, by its steps."""
    least = 2.0**-24 if dtype == torch.float16 else 0.0
    bound = ROUNDING[dtype] * np.abs(expected) + (depth + 4) * 2.0**-24 * terms + least
    error = np.abs(exact(y) - expected)
    assert (error <= bound).all(), (error - bound).max()


class Experts(NamedTuple):
    """The matrices of a mixture, with both halves of w13 together.

    Attributes:
        w13, w2: their bytes and values.
        second13, second2: second scales, ``[E, 2]`` and ``[E]``; None of MXFP4.
    """

    w13: Packed
    w2: Packed
    second13: torch.Tensor | None
    second2: torch.Tensor | None

    @property
    def given(self) -> list[torch.Tensor]:
        """As ops take them."""
        parts = [self.w13.packed, self.w13.scale, self.second13]
        parts += [self.w2.packed, self.w2.scale, self.second2]
        return [part for part in parts if part is not None]


def experts_of(random: np.random.Generator, mode: str, e: int, h: int, i: int) -> Experts:
    scaled = mode == "nvfp4"
    second = normal(random, torch.float32, e, 3) * 0.1
    both = [matrix(random, *sizes, mode=mode) for sizes in ((e, 2 * i, h), (e, h, i))]
    if not scaled:  # float16 holds what comes of smaller ones
        both = [
            Packed(w.packed, (w.scale.view(torch.uint8) - 4).view(w.scale.dtype), w.values / 16)
            for w in both
        ]
    return Experts(
        *both,
        second[:, :2].contiguous() if scaled else None,
        second[:, 2].contiguous() if scaled else None,
    )


def activated(name: str, v: np.ndarray) -> np.ndarray:
    if name == "silu":
        return v / (1 + np.exp(-v))
    return 0.5 * v * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3)))


def layer_of(
    of: Experts, x: Any, weights: Any, ids: Any, places: Any, activation: str, on_input: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The layer in float64, and the bound of its error: one rounding of what the second product is
    of, one of the result, and float32 elsewhere. (Gates are within an exponential's steepness.)"""
    xs, by, depth = exact(x), exact(weights), of.w13.values.shape[2] + of.w2.values.shape[2]
    y, bound = np.zeros(xs.shape), np.zeros(xs.shape)
    half = of.w13.values.shape[1] // 2
    rounding = ROUNDING[x.dtype]
    for token, slot in np.ndindex(*ids.shape):
        expert = int(ids[token, slot])
        if places is not None:
            expert = int(places[expert]) if 0 <= expert < len(places) else -1
        if not 0 <= expert < len(of.w13.values):
            continue
        weight = by[token, slot]
        w13, w2 = of.w13.values[expert], of.w2.values[expert]
        if of.second13 is not None and of.second2 is not None:
            w13 = w13 * np.repeat(exact(of.second13)[expert], half)[:, None]
            w2 = w2 * exact(of.second2)[expert]
        both, terms = w13 @ xs[token], np.abs(w13) @ np.abs(xs[token])
        if on_input:
            both, terms, weight = both * weight, terms * abs(weight), 1.0
        gate, up = both[:half], both[half:]
        hidden = activated(activation, gate) * up
        slack = depth * 2.0**-24 * terms
        of_hidden = rounding * np.abs(hidden) + 2.0**-20 * np.abs(hidden)
        of_hidden += 1.2 * slack[:half] * np.abs(up) + np.abs(gate) * slack[half:]
        of_hidden += 2.0**-24 if x.dtype == torch.float16 else 0
        y[token] += weight * (w2 @ hidden)
        bound[token] += abs(weight) * (np.abs(w2) @ (of_hidden + depth * 2.0**-24 * np.abs(hidden)))
    least = 2.0**-24 if x.dtype == torch.float16 else 0
    return y, bound + rounding * (np.abs(y) + bound) + 2.0**-20 * np.abs(y) + least
