"""quantize and dequantize, bit by bit: against MLX's, and against what defines the formats."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule import KernelError, KernelTypeError, ops
from mlx_products import FLOATING, MODES
from quantized_arrays import (
    BF16,
    DTYPES,
    HOSTS,
    assert_all_same,
    assert_same,
    codes_of,
    mlx_quantize,
    packed_of,
    to_mlx,
    to_numpy,
    to_torch,
)

# Torch's own: its compiler uses what it deprecates.
pytestmark = [
    pytest.mark.together,
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]

# Each way that elements lie in words, and each kind of scale: a kernel each.
SOME = [("affine", 32, 3), ("affine", 64, 4), ("affine", 64, 5), *FLOATING]
FEW, MANY = (settings(deadline=None, max_examples=count) for count in (30, 100))

# The elements of fp4 and fp8 and the scales, by their codes
E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
E8M0 = np.append(2.0 ** np.arange(-127, 128), math.nan)


# -- numbers ---------------------------------------------------------------------------------------

KINDS = ["normal", "large", "huge", "small", "subnormal", "tie", "constant", "zero", "one"]


@st.composite
def weights(draw: Any, dtype: Any, group: int, kinds: Any = KINDS, empty: bool = True) -> Any:
    """Matrices, or batches of them, each group of which has numbers of one kind."""
    size = st.integers(0 if empty else 1, 3)
    batch = draw(st.lists(size, max_size=2))
    shape = (*batch, draw(size), draw(size), group)
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    info, normal = ml_dtypes.finfo(dtype), rng.normal(size=shape)
    low, high = (int(math.log2(float(edge))) for edge in (info.tiny, info.max))
    exponents = rng.integers(low, high, (*shape[:-1], 1))
    made = {
        "normal": normal,
        "large": normal * 2.0 ** (high - 4),
        "huge": np.sign(normal) * float(info.max),
        "small": normal * 2.0 ** (low + 3),
        "subnormal": normal * float(info.smallest_subnormal) * 4,
        "tie": rng.integers(-24, 25, shape) / 4 * 2.0 ** (exponents // 4),
        "constant": np.broadcast_to(normal[..., :1], shape),
        "zero": np.where(normal < 0, -0.0, 0.0),
        "one": np.where(np.arange(group) == 3, normal * 2.0 ** (exponents // 2), 0),
    }
    drawn = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=4))
    which = rng.integers(0, len(drawn), (*shape[:-1], 1))
    chosen = np.select([which == i for i in range(len(drawn))], [made[kind] for kind in drawn])
    with np.errstate(over="ignore"):
        found = np.clip(chosen, float(info.min), float(info.max)).astype(dtype)
    return np.where(np.isfinite(found), found, dtype.type(1)).reshape(
        *shape[:-2], shape[-2] * group
    )


# -- the definition --------------------------------------------------------------------------------


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The code of the nearest of a table's values, the even one of two; the last if all are less.

    Args:
        values: none below 0.
        table: the values that are not below 0, in ascending order: their places are their codes.
    """
    middles = (table[:-1] + table[1:]) / 2
    low, high = (np.searchsorted(middles, values, side) for side in ("left", "right"))
    return np.where(low == high, low, low + low % 2)


def scale_of(amax: np.ndarray, mode: str) -> np.ndarray:
    """The byte of a group's scale, of its largest magnitude in float32."""
    quotient = amax / np.float32(448 if mode == "mxfp8" else 6)
    if mode == "nvfp4":
        return nearest(quotient, E4M3[:127])
    at_least = np.searchsorted(E8M0[:-1], quotient.astype(np.float64), "left")
    return np.where(quotient == 0, 127, at_least)


def table_of(mode: str) -> tuple[np.ndarray, np.ndarray]:
    """Values of elements and of scales."""
    return E4M3 if mode == "mxfp8" else E2M1, E4M3 if mode == "nvfp4" else E8M0


def even_codes(w: np.ndarray, scales: np.ndarray, mode: str) -> np.ndarray:
    """The codes of a group's elements in float32, [..., group], and its scale as a number."""
    half, last = (128, 127) if mode == "mxfp8" else (8, 8)
    with np.errstate(all="ignore"):
        quotient = np.where(scales == 0, 0, w / scales.astype(np.float32))
    return np.where(np.signbit(w), half, 0) + nearest(np.abs(quotient), table_of(mode)[0][:last])


def assert_even(found: Any, w: np.ndarray, mode: str, bits: int, group: int) -> None:
    packed, scales = map(to_numpy, found)
    assert (packed.dtype, scales.dtype) == (np.uint32, np.uint8)
    assert packed.shape == (*w.shape[:-1], w.shape[-1] * bits // 32)
    assert scales.shape == (*w.shape[:-1], w.shape[-1] // group)
    wide = w.astype(np.float32).reshape(*scales.shape, group)
    amax = np.abs(wide).max(-1)
    assert_same(scales, scale_of(amax, mode).astype(np.uint8))
    found_codes = codes_of(packed, bits).reshape(wide.shape)
    numbers = table_of(mode)[1][scales][..., None]
    expected = even_codes(wide, numbers, mode)
    # Where the scale is 0, or all is, the signs of zeros mean nothing.
    unsigned = (numbers == 0) | (amax == 0)[..., None]
    found_codes, expected = (
        np.where(unsigned, codes % (1 << bits - 1), codes) for codes in (found_codes, expected)
    )
    wrong = found_codes != expected
    assert not wrong.any(), (np.argwhere(wrong)[:3], found_codes[wrong][:3], expected[wrong][:3])


def assert_mlx(found: Any, w: np.ndarray, form: Any, unit: float = 1.0, **more: Any) -> None:
    """The bits that MLX makes, but of groups too small or large for it.

    MLX's exponents below -127 start again at 255; and where numbers are so many times as large as
    nvfp4's largest scale that all differences from its elements are rounded to one, it takes 0.
    """
    mode, group, bits = form
    expected = mlx_quantize(w, group, bits, mode, **more)
    if mode != "affine":
        amax = np.abs(w.reshape(*expected[1].shape, group).astype(float)).max(-1) / unit
        high = 448 * 2.0**25 if mode == "nvfp4" else math.inf
        there = (amax == 0) | (amax > 448 * 2.0**-126) & (amax < high)
        words = np.repeat(there, group * bits // 32, -1)
        found, expected = (
            (np.where(words, to_numpy(packed), 0), np.where(there, to_numpy(scales), 0))
            for packed, scales in (found, expected)
        )
    assert_all_same(found, expected)


# -- quantize --------------------------------------------------------------------------------------


@pytest.mark.parametrize("i", range(len(MODES)), ids=lambda i: "-".join(map(str, MODES[i])))
def test_each_format_is_mlx(i: int) -> None:
    mode, group, bits = MODES[i]
    dtype = DTYPES[(i + i // 6) % 3]
    w = np.random.default_rng(i).normal(size=(2, 3, 256)).astype(dtype)
    expected = mlx_quantize(w, group, bits, mode)
    assert_all_same(ops.quantize(w, group, bits, mode, rounding="mlx_cpu"), expected)
    if mode == "affine":
        assert_all_same(ops.quantize(w, group, bits, mode), expected)
    else:
        assert_even(ops.quantize(w, group, bits, mode), w, mode, bits, group)
    assert_same(
        ops.dequantize(*expected, group_size=group, bits=bits, mode=mode),
        mx.dequantize(*map(to_mlx, expected), group_size=group, bits=bits, mode=mode),
    )


@MANY
@given(st.data(), st.sampled_from(SOME), st.sampled_from(DTYPES), st.booleans())
def test_quantize_is_mlx(data: Any, form: Any, dtype: Any, even: bool) -> None:
    mode, group, bits = form
    w = data.draw(weights(dtype, group))
    rounding = "even" if even and mode == "affine" else "mlx_cpu"
    assert_mlx(ops.quantize(w, group, bits, mode, rounding=rounding), w, form)


@MANY
@given(st.data(), st.sampled_from(FLOATING), st.sampled_from(DTYPES))
def test_rounding_to_even(data: Any, form: Any, dtype: Any) -> None:
    mode, group, bits = form
    w = data.draw(weights(dtype, group))
    assert_even(ops.quantize(w, mode=mode), w, mode, bits, group)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("form", FLOATING, ids=str)
def test_each_number_as_the_largest_of_a_group(form: Any, dtype: Any) -> None:
    mode, group, bits = form
    infinity = int(np.array(np.inf, dtype).view(np.uint16))
    numbers = np.arange(infinity, dtype=np.uint16).view(dtype).reshape(-1, 2, 1)
    parts = np.linspace(-1, 1, group).astype(np.float32)
    w = (numbers.astype(np.float32) * parts).astype(dtype).reshape(len(numbers), -1)
    assert_even(ops.quantize(w, mode=mode), w, mode, bits, group)
    assert_mlx(ops.quantize(w, mode=mode, rounding="mlx_cpu"), w, form)


def test_ties_and_the_sign_of_zero() -> None:
    w = np.zeros((1, 32), np.float32)
    w[0, :10] = [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.1, -0.0]
    for mode, byte in (("mxfp4", 127), ("nvfp4", 56)):
        even, scales = ops.quantize(w, mode=mode)
        assert scales[0, 0] == byte
        assert codes_of(even, 4)[0, :10].tolist() == [7, 0, 2, 2, 4, 4, 6, 6, 8, 8]
        lowest, _ = ops.quantize(w, mode=mode, rounding="mlx_cpu")
        assert codes_of(lowest, 4)[0, :10].tolist() == [7, 0, 1, 2, 3, 4, 5, 6, 0, 0]


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8"])
def test_nothing_saturates(mode: str) -> None:
    most = 448 if mode == "mxfp8" else 6
    largest = [most, np.nextafter(np.float32(most), np.float32(999)), most * 1.99, most * 2, 1e-40]
    w = np.array(largest, np.float32)[:, None] * np.ones(32, np.float32)
    packed, scales = ops.quantize(w, mode=mode)
    assert scales[:, 0].tolist() == [127, 128, 128, 128, 0]
    values = ops.dequantize(packed, scales, mode=mode, dtype=np.float32)
    assert (np.abs(values - w)[:4] <= w[:4] / 8).all()


@MANY
@given(
    st.data(), st.sampled_from(DTYPES), st.booleans(),
    st.sampled_from([None, 0.01, 1.0, 300.0, 2688.0, 7e4]),
)  # fmt: skip
def test_global_scale(data: Any, dtype: Any, each: bool, fixed: float | None) -> None:
    """Codes and scales are of float32: where that is about a tie, both are right."""
    w = data.draw(weights(dtype, 16, ["normal", "one", "constant", "zero"], empty=False))
    wide = w.astype(np.float32)
    own = np.abs(wide).max((-1, -2) if each else None).astype(np.float32)
    given = np.maximum(own, np.float32(1e-3)) if fixed is None else np.full_like(own, fixed)
    packed, scales = ops.quantize(w, mode="nvfp4", global_scale=given)
    unit = given.astype(np.float64)[..., None, None] / 2688
    groups = wide.reshape(*scales.shape, 16).astype(np.float64)

    def assert_near(codes: np.ndarray, exact: np.ndarray, table: np.ndarray) -> None:
        low, high = (nearest(np.abs(exact) * (1 + e), table) for e in (-4e-7, 4e-7))
        assert ((codes == low) | (codes == high)).all()

    assert_near(scales, np.abs(groups).max(-1) / 6 / unit, E4M3[:127])
    with np.errstate(all="ignore"):
        exact = groups / (E4M3[scales] * unit)[..., None]
    exact = np.where(scales[..., None] == 0, 0, exact)
    assert_near(codes_of(packed, 4).reshape(groups.shape) % 8, exact, E2M1[:8])


@FEW
@given(st.data(), st.sampled_from(DTYPES), st.sampled_from([0.01, 1.0, 300.0, 7e4]))
def test_global_scale_is_mlx(data: Any, dtype: Any, amount: float) -> None:
    w = data.draw(weights(dtype, 16))
    found = ops.quantize(w, mode="nvfp4", global_scale=amount, rounding="mlx_cpu")
    form = ("nvfp4", 16, 4)
    assert_mlx(found, w, form, min(amount / 2688, 1), global_scale=mx.array(amount))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("form", SOME, ids=str)
def test_groups_of_what_is_no_number(form: Any, bad: float) -> None:
    mode, group, bits = form
    for dtype in DTYPES:
        w = np.linspace(-1, 2, 8 * group).astype(dtype).reshape(2, -1)
        expected = ops.quantize(w, group, bits, mode)
        w[1, group + 3] = bad
        for rounding in ("even", "mlx_cpu")[: 1 if mode == "affine" else 2]:
            packed, *scales = ops.quantize(w, group, bits, mode, rounding=rounding)
            assert not codes_of(packed, bits).reshape(2, 4, group)[1, 1].any()
            for one in scales:
                if mode == "affine":
                    assert np.isnan(one[1, 1])
                else:
                    assert one[1, 1] == (0x7F if mode == "nvfp4" else 0xFF)
            values = ops.dequantize(packed, *scales, group_size=group, bits=bits, mode=mode)
            wrong = np.isnan(values.astype(np.float32)).reshape(2, 4, group)
            assert wrong[1, 1].all() and wrong.sum() == group
            if rounding == "even":  # other groups are what they were
                assert_same(packed[0], expected[0][0])


# -- dequantize ------------------------------------------------------------------------------------


@st.composite
def quantized(draw: Any, form: Any, dtype: Any) -> list[np.ndarray]:
    """Any codes, and any scales that are finite."""
    mode, group, bits = form
    batch = draw(st.lists(st.integers(1, 3), max_size=2))
    n, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3)) * (32 // min(group, 32))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    shape = (*batch, n, groups)
    codes = rng.integers(0, 1 << bits, (*batch, n, groups * group))
    if mode != "affine":
        high = {"nvfp4": 127, "mxfp4": 252, "mxfp8": 246}[mode]
        return [packed_of(codes, bits), rng.integers(0, high, shape).astype(np.uint8)]
    spread = 2.0 ** rng.integers(-20, 8, shape)
    both = [(rng.normal(size=shape) * spread).astype(dtype) for _ in range(2)]
    return [packed_of(codes, bits), *both]


@MANY
@given(
    st.data(), st.sampled_from(SOME), st.sampled_from(DTYPES),
    st.sampled_from([None, *DTYPES]),
    st.sampled_from([np.uint32, np.int32, np.uint8]),
)  # fmt: skip
def test_dequantize_is_mlx(data: Any, form: Any, dtype: Any, to: Any, view: Any) -> None:
    mode, group, bits = form
    packed, *scales = data.draw(quantized(form, dtype))
    if mode != "affine" and to == np.float16:  # MLX rounds scales first: those are exact
        scales[0] = np.clip(scales[0], *((4, 126) if mode == "nvfp4" else (115, 130)))
    format_ = {"group_size": group, "bits": bits, "mode": mode}
    expected = mx.dequantize(
        *map(to_mlx, (packed, *scales)), **format_, dtype=to and getattr(mx, to.name)
    )
    found = ops.dequantize(packed.view(view), *scales, **format_, dtype=to)
    assert_same(found, expected)


@pytest.mark.parametrize("form", FLOATING, ids=str)
def test_every_scale_and_every_code(form: Any) -> None:
    """The exact product, rounded once: of 16 bits, too."""
    mode, group, bits = form
    count = max(1 << bits, group)
    codes = np.broadcast_to(np.arange(count) % (1 << bits), (256, count))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], count // group, 1)
    elements, numbers = table_of(mode)
    exact = elements[codes] * np.repeat(numbers[scales], group, 1)
    for dtype in (None, *DTYPES):
        found = ops.dequantize(packed_of(codes, bits), scales, mode=mode, dtype=dtype)
        with np.errstate(over="ignore"):
            assert_same(found, exact.astype(np.float32).astype(dtype or BF16))


@FEW
@given(st.data(), st.sampled_from(DTYPES), st.sampled_from([0.01, 1.0, 300.0, 7e4]))
def test_dequantize_with_a_global_scale(data: Any, dtype: Any, amount: float) -> None:
    packed, scales = data.draw(quantized(("nvfp4", 16, 4), dtype))
    expected = to_numpy(
        mx.dequantize(to_mlx(packed), to_mlx(scales), mode="nvfp4", global_scale=mx.array(amount))
    )  # in float32, whatever is asked for
    for scale in (amount, np.array(amount, np.float32), np.full(packed.shape[:-2], amount, "f4")):
        found = ops.dequantize(packed, scales, mode="nvfp4", global_scale=scale, dtype=dtype)
        with np.errstate(over="ignore"):
            assert_same(found, expected.astype(dtype))


@MANY
@given(st.data(), st.sampled_from(SOME))
def test_round_trip(data: Any, form: Any) -> None:
    """What is quantized already is quantized to the same."""
    mode, group, bits = form
    packed, scales, *biases = data.draw(quantized(form, np.float32))
    codes, top = codes_of(packed, bits), (1 << bits) - 1
    groups = codes.reshape(*scales.shape, group)
    if mode == "affine":  # both ends are there, and the zero, farther from one of them
        groups[..., 0], groups[..., -1] = 0, top
        zero = (3 * (top + 1)) // 4
        scales = (2.0 ** np.round(np.log2(np.abs(scales) + 1e-3))).astype(np.float32)
        scales = np.where(biases[0] < 0, -scales, scales)
        biases = [-zero * scales]
    else:  # the largest element is there
        groups[..., 0] = 0x7E if mode == "mxfp8" else 7
        groups[groups & 0x7F == 0x7F] = 0 if mode == "mxfp8" else 7  # NaN
        scales = np.maximum(scales, 1)
    given = (packed_of(groups.reshape(codes.shape), bits), scales, *biases)
    format_ = {"group_size": group, "bits": bits, "mode": mode}
    w = ops.dequantize(*given, **format_, dtype=np.dtype(np.float32))
    assert_all_same(ops.quantize(w, **format_), given)


# -- the hosts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", [SOME[0], SOME[3], SOME[5]], ids=str)
def test_hosts_and_layouts(form: Any, dtype: Any) -> None:
    mode, group, bits = form
    format_ = {"group_size": group, "bits": bits, "mode": mode}
    w = np.random.default_rng(0).normal(size=(2, 3, 128)).astype(dtype)
    expected = ops.quantize(w, **format_)
    values = ops.dequantize(*expected, **format_)
    for to in HOSTS.values():
        found = ops.quantize(to(w), **format_)
        assert all(type(one) is type(to(w)) for one in found)
        assert_all_same(found, expected)
        assert_same(ops.dequantize(*found, **format_), values)
    w_turned, *turned = (to_torch(a).mT.contiguous().mT for a in (w, *expected))
    assert not w_turned.is_contiguous()
    assert_all_same(ops.quantize(w_turned, **format_), expected)
    assert_same(ops.dequantize(*turned, **format_), values)


@pytest.mark.parametrize("form", [("affine", 32, 3), ("affine", 64, 8)], ids=str)
def test_derivatives_of_dequantize(form: Any) -> None:
    """It is linear in scales and biases, whatever floats these are."""
    mode, group, bits = form
    for dtype in DTYPES:
        w = np.random.default_rng(0).normal(size=(2, 3, 2 * group)).astype(dtype)
        packed, *parts = map(to_torch, mlx_quantize(w, group, bits, mode))
        scales, biases = (part.requires_grad_() for part in parts)
        codes = to_torch(codes_of(to_numpy(packed), bits).astype(np.float32))
        y = ops.dequantize(packed, scales, biases, group, bits, dtype="float32")
        cotangent = torch.randn_like(y)
        found = torch.autograd.grad(y, (scales, biases), cotangent)
        groups = [(cotangent * codes), cotangent]
        for one, sums in zip(found, groups, strict=True):
            expected = sums.reshape(*scales.shape, group).sum(-1).to(one.dtype)
            torch.testing.assert_close(one, expected, rtol=1e-2, atol=1e-2)
        tangents = (torch.ones_like(scales), torch.ones_like(biases))
        _, along = torch.func.jvp(
            lambda *parts: ops.dequantize(packed, *parts, group, bits, dtype="float32"),  # noqa: B023
            (scales.detach(), biases.detach()), tangents,
        )  # fmt: skip
        torch.testing.assert_close(along, codes + 1)


def test_scales_of_float8() -> None:
    w = torch.randn(2, 3, 64)
    for mode, kind in (("nvfp4", torch.float8_e4m3fn), ("mxfp4", torch.float8_e8m0fnu)):
        packed, scales = ops.quantize(w, mode=mode)
        expected = ops.dequantize(packed, scales, mode=mode)
        assert expected.dtype == torch.bfloat16
        assert_same(ops.dequantize(packed, scales.view(kind), mode=mode), expected)
        bytes_ = packed.view(torch.uint8)
        assert bytes_.shape == (2, 3, 32)
        assert_same(ops.dequantize(bytes_, scales.view(kind), mode=mode), expected)


def test_graphs_and_batches() -> None:
    def there_and_back(w: Any) -> Any:
        return ops.dequantize(*ops.quantize(w, 32, 4), group_size=32, bits=4)

    def and_of_fp4(w: Any) -> Any:
        return ops.dequantize(*ops.quantize(w, mode="nvfp4"), mode="nvfp4")

    for function in (there_and_back, and_of_fp4):
        compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
        shapeless = mx.compile(function, shapeless=True)
        for rows, columns in ((3, 64), (5, 128), (2, 96)):
            w = torch.randn(2, rows, columns)
            assert_same(compiled(w), function(w))
            assert_same(shapeless(mx.array(w.numpy())), function(w))
        w = torch.randn(3, 2, 64)
        assert_same(torch.func.vmap(function)(w), function(w))
        assert_same(mx.vmap(function)(mx.array(w.numpy())), function(w))


# -- what is refused -------------------------------------------------------------------------------

W = np.ones((4, 96), np.float32)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"mode": "mxfp6"}, ["mxfp6", "affine", "mxfp4", "mxfp8", "nvfp4"]),
        ({"group_size": 48}, ["48", "32", "64", "128"]),
        ({"group_size": 16}, ["16", "32", "64", "128"]),
        ({"bits": 7, "group_size": 32}, ["7", "2", "3", "4", "5", "6", "8"]),
        ({"bits": 1, "group_size": 32}, ["1", "2", "3", "4", "5", "6", "8"]),
        ({"bits": 8, "mode": "mxfp4"}, ["8", "4", "mxfp4"]),
        ({"bits": 4, "mode": "mxfp8"}, ["4", "8", "mxfp8"]),
        ({"group_size": 32, "mode": "nvfp4"}, ["32", "16", "nvfp4"]),
        ({"group_size": 16, "mode": "mxfp8"}, ["16", "32", "mxfp8"]),
        ({}, ["96", "64"]),
        ({"group_size": 128}, ["96", "128"]),
        ({"mode": "mxfp4", "global_scale": 1.0}, ["global_scale", "mxfp4", "nvfp4"]),
        ({"group_size": 32, "global_scale": 1.0}, ["global_scale", "affine", "nvfp4"]),
        ({"mode": "mxfp4", "rounding": "up"}, ["up", "even", "mlx_cpu"]),
    ],
)  # fmt: skip
def test_what_quantize_refuses(arguments: Any, names: list[str]) -> None:
    with pytest.raises(KernelError) as error:
        ops.quantize(W, **arguments)
    assert all(name in str(error.value) for name in names), str(error.value)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"biases": None}, ["biases", "affine"]),
        ({"bits": 7}, ["7", "2", "3", "4", "5", "6", "8"]),
        ({"group_size": 48}, ["48", "32", "64", "128"]),
        ({"mode": "int4"}, ["int4", "affine", "mxfp4", "mxfp8", "nvfp4"]),
        ({"global_scale": 1.0}, ["global_scale", "affine", "nvfp4"]),
        ({"bits": 8}, ["12"]),  # what is packed so has half as many elements
        ({"w": W}, ["float32"]),
        ({"scales": np.ones((4, 2), np.float32)}, ["(4, 2)"]),
        ({"scales": np.ones((4, 3), np.int32)}, ["int32"]),
        ({"dtype": np.dtype(np.int32)}, ["int32", "float32", "float16", "bfloat16"]),
    ],
)
def test_what_dequantize_refuses(arguments: Any, names: list[str]) -> None:
    w, scales, biases = mlx_quantize(W, 32, 4, "affine")
    given = {"w": w, "scales": scales, "biases": biases, "group_size": 32} | arguments
    with pytest.raises((KernelError, KernelTypeError)) as error:
        ops.dequantize(**given)
    assert all(name in str(error.value) for name in names), str(error.value)


def test_the_picture_is_what_is_packed() -> None:
    script = Path(__file__).parents[2] / "docs/pictures/packed_bits.py"
    picture: str = runpy.run_path(str(script))["picture"]()
    assert script.with_suffix(".svg").read_text("utf-8") == picture
