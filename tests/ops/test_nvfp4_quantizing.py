"""The quantiser of NVFP4 is ModelOpt's to the byte, its bytes are what other tools read, and MLX's
arrays go there and back."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
import nvfp4_oracles as oracles
from ferrule.ops import dequantize_nvfp4, nvfp4, quantize_nvfp4

CASES = json.loads(oracles.EXPECTED.read_text("utf-8"))
NAMES = "w_packed", "w_scale", "w_scale_2"
VALUES = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def same_bits(a: Any, b: Any) -> None:
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert oracles.hexadecimal(a) == oracles.hexadecimal(b)


@pytest.mark.parametrize("case", CASES)
def test_as_modelopt(case: str) -> None:
    """Without ModelOpt: with what it gave when the file was written."""
    expected = CASES[case]
    w = oracles.from_hexadecimal(
        expected["w"], getattr(torch, expected["dtype"]), expected["shape"]
    )
    tensors = quantize_nvfp4(w)
    for name, tensor in zip(NAMES, tensors, strict=True):
        assert oracles.hexadecimal(tensor) == expected[name], name
    # Code 8 is -0; ModelOpt reads it as 0.
    assert oracles.hexadecimal(dequantize_nvfp4(*tensors) + 0.0) == expected["modelopt"]
    # compressed-tensors rounds a product more: to bfloat16 of elements and scales.
    theirs = oracles.from_hexadecimal(
        expected["compressed_tensors"], torch.bfloat16, expected["shape"]
    )
    torch.testing.assert_close(dequantize_nvfp4(*tensors), theirs, rtol=2**-7, atol=0)


@st.composite
def matrices(draw: Any) -> Any:
    shape = draw(st.sampled_from([1, 2, 3, 7])), 16 * draw(st.sampled_from([1, 2, 5]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    w = torch.randn(shape, generator=generator)
    if draw(st.booleans()):  # groups far apart
        w = w * 10 ** torch.randint(-9, 3, (*shape[:1], 1), generator=generator).float()
    if draw(st.booleans()):  # halves
        w = (w * 8).round() / 4
    if draw(st.booleans()):
        w[draw(st.integers(0, shape[0] - 1)), :16] = 0
    w = w * draw(st.sampled_from([1.0, 0.02, 1e-4, 1e3, 2.0**-100, 1e35]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    return w.clamp(-60000, 60000).to(dtype) if dtype == torch.float16 else w.to(dtype)


@pytest.mark.skipif(find_spec("modelopt") is None, reason="needs nvidia-modelopt, which is large")
@settings(max_examples=200, deadline=None)
@given(matrices())
def test_is_modelopt(w: Any) -> None:
    if w.abs().max().float() / 2688 == 0:
        return  # ModelOpt divides by 0
    for ours, theirs in zip(quantize_nvfp4(w), oracles.modelopt_quantize(w), strict=True):
        same_bits(ours, theirs)
    dequantized = oracles.modelopt_dequantize(*quantize_nvfp4(w), torch.float32)
    same_bits(dequantize_nvfp4(*quantize_nvfp4(w), torch.float32) + 0.0, dequantized)


@settings(max_examples=60, deadline=None)
@given(matrices())
def test_errors_are_as_small_as_elements_allow(w: Any) -> None:
    """Of a group a sixth of its largest, as 5 is of 6, and what its scale was rounded by."""
    packed, scale, whole = quantize_nvfp4(w)
    error = (dequantize_nvfp4(packed, scale, whole, torch.float32) - w.float()).abs()
    largest = w.float().abs().unflatten(-1, (-1, 16)).amax(-1)
    allowed = (largest * (1 / 6 + 1 / 14)).maximum(whole * 2**-9 * 7)
    assert (error.unflatten(-1, (-1, 16)) <= allowed[..., None]).all()


def test_every_byte_and_scale() -> None:
    """All pairs of elements by all scales, as the product of floats that the format is."""
    packed = torch.arange(256, dtype=torch.uint8).repeat(127, 4)
    scales = torch.arange(127, dtype=torch.uint8)[:, None].repeat(1, 128)
    found = dequantize_nvfp4(packed, scales.view(torch.float8_e4m3fn), dtype=torch.float32)
    low, high = VALUES[(packed & 15).long()], VALUES[(packed >> 4).long()]
    values = torch.stack((low, high), -1).flatten(-2)
    e4m3 = [(s & 7) * 2.0**-9 if s < 8 else (8 + s % 8) * 2.0 ** (s // 8 - 10) for s in range(127)]
    same_bits(found + 0.0, values * torch.tensor(e4m3)[:, None] + 0.0)
    assert (
        dequantize_nvfp4(packed[:1], torch.full_like(scales[:1], 127).view(torch.float8_e4m3fn))
        .isnan()
        .all()
    )


def test_each_matrix_and_each_row_has_its_scale() -> None:
    w = torch.randn(3, 4, 32) * torch.tensor([1.0, 10, 100])[:, None, None]
    stacked = quantize_nvfp4(w)
    for i in range(3):
        for part, alone in zip(stacked, quantize_nvfp4(w[i]), strict=True):
            same_bits(part[i].clone(), alone)
    packed, scale, whole = quantize_nvfp4(w[0])
    rows = whole * torch.arange(1.0, 5)
    by_rows = dequantize_nvfp4(packed, scale, rows, torch.float32)
    for i in range(4):
        same_bits(by_rows[i], dequantize_nvfp4(packed, scale, rows[i], torch.float32)[i])


def test_scale_of_all_may_be_given() -> None:
    """So that layers that are fused share it, as ModelOpt has them do."""
    w = torch.randn(2, 16)
    same_bits(quantize_nvfp4(w, torch.tensor(0.5))[2], torch.tensor(0.5))
    as_found = quantize_nvfp4(w, quantize_nvfp4(w)[2])
    for a, b in zip(as_found, quantize_nvfp4(w), strict=True):
        same_bits(a, b)


@pytest.mark.parametrize("w", [torch.zeros(2, 32), torch.full((1, 16), 2.0**-149)])
def test_of_nothing_come_zeros(w: Any) -> None:
    packed, scale, whole = quantize_nvfp4(w)
    assert whole == 1
    assert not dequantize_nvfp4(packed, scale, whole).any()


@pytest.mark.parametrize(
    ("w", "words"),
    [
        (torch.tensor([[math.nan] * 16]), "NaN or infinite"),
        (torch.tensor([[math.inf] * 16]), "torch.isfinite(w)"),
        (torch.zeros(2, 17), "(2, 17); expected rows whose length is a multiple of 16. Pad"),
        (torch.zeros(16), "(16,); expected two axes or more"),
        (torch.zeros(2, 16, dtype=torch.int8), "torch.int8; expected float32, float16 or bfloat16"),
    ],
)
def test_what_it_refuses(w: Any, words: str) -> None:
    with pytest.raises(ferrule.KernelError) as error:
        quantize_nvfp4(w)
    assert str(error.value).startswith("[quantize_nvfp4] w ")
    assert words in str(error.value)
    with pytest.raises(ferrule.KernelTypeError, match="a list; expected a tensor of torch"):
        quantize_nvfp4([1.0])


def test_activations() -> None:
    """A group's scale is its largest by 6 and by input_scale, in E4M3; -0 and what is too large."""
    x = torch.zeros(1, 48)
    x[0, :3] = torch.tensor([6.0, -3.0, 0.3])
    x[0, 16] = 1e6  # the scale stops at 448
    x[0, 32] = 1e-9  # the scale rounds to 0
    packed, scale = nvfp4.quantize_activations_nvfp4(x, torch.tensor(0.5))
    assert scale.float().tolist() == [[2.0, 448.0, 0.0]]
    left = dequantize_nvfp4(packed, scale, 0.5, torch.float32)
    assert left[0, :3].tolist() == [6.0, -3.0, 0.5]
    assert left[0, 16] == 6 * 448 * 0.5
    assert not left[0, 32:].any()
    x[0, 0] = math.nan
    packed, scale = nvfp4.quantize_activations_nvfp4(x, 0.5)
    assert scale.float().isnan().tolist() == [[True, False, False]]


@pytest.mark.skipif(
    find_spec("compressed_tensors") is None, reason="needs compressed-tensors, which is large"
)
@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.integers(-14, 0))
def test_activations_are_compressed_tensors(seed: int, exponent: int) -> None:
    """With powers of two, of which one over it is exact; but for scales that are 0 here, and there
    0.125."""
    generator = torch.Generator().manual_seed(seed)
    spread = 10 ** torch.randint(-2, 2, (4, 1), generator=generator).float()
    x = torch.randn((4, 64), generator=generator) * spread
    theirs, scale = oracles.compressed_tensors_activations(x, torch.tensor([2.0**-exponent]))
    packed, ours = nvfp4.quantize_activations_nvfp4(x, 2.0**exponent)
    left = dequantize_nvfp4(packed, ours, 2.0**exponent, torch.float32)
    known = ours.float() != 0
    assert torch.equal(ours.float()[known], scale.float()[known])
    same = known.repeat_interleave(16, -1)
    assert torch.equal(left[same] + 0.0, theirs[same] + 0.0)


def test_w4a4_is_what_its_words_say() -> None:
    """Element by element, in float64, of what the parts are."""
    x, w = torch.randn(3, 32), torch.randn(5, 32)
    bias, scale_in = torch.randn(5), torch.tensor(4 / 2688)
    tensors = quantize_nvfp4(w)
    found = nvfp4.linear_w4a4(x, scale_in, *tensors, bias)
    groups = x.unflatten(-1, (2, 16))
    scale = (groups.abs().amax(-1) / 6 / scale_in).clamp(max=448).to(torch.float8_e4m3fn).double()
    ratio = groups.double() / (scale * scale_in)[..., None]
    nearest = VALUES[(ratio[..., None] - VALUES).abs().argmin(-1)].double()
    left = (nearest * scale[..., None]).flatten(-2) * scale_in.double()
    expected = left @ dequantize_nvfp4(*tensors, torch.float64).T + bias
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert nvfp4.linear_w4a4(x.bfloat16(), scale_in, *tensors).dtype == torch.bfloat16


@pytest.mark.parametrize("scaled", [False, True])
def test_mlx_there_and_back(scaled: bool) -> None:
    mx = pytest.importorskip("mlx.core")
    w = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float16).astype(np.float32)
    whole = mx.array(np.abs(w).max()) if scaled else None
    theirs = mx.quantize(mx.array(w), mode="nvfp4", **({"global_scale": whole} if scaled else {}))
    tensors = nvfp4.from_mlx(*theirs, whole)
    back = nvfp4.to_mlx(*tensors)
    for a, b in zip(back, (*theirs, whole), strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.dtype == b.dtype and bool((a == b).all()))
    options = {"mode": "nvfp4", "dtype": mx.float32} | ({"global_scale": whole} if scaled else {})
    values = torch.from_numpy(np.array(mx.dequantize(*theirs, **options)))
    torch.testing.assert_close(dequantize_nvfp4(*tensors, torch.float32), values, rtol=3e-7, atol=0)


@settings(max_examples=60, deadline=None)
@given(matrices())
def test_mlx_keeps_what_is_quantized_here(w: Any) -> None:
    pytest.importorskip("mlx.core")
    tensors = quantize_nvfp4(w)
    if tensors[2].isfinite() and tensors[2] > 2.0**-100:  # MLX has the largest, in float32
        for a, b in zip(nvfp4.from_mlx(*nvfp4.to_mlx(*tensors)), tensors, strict=True):
            same_bits(a, b)


def test_mlx_refuses() -> None:
    pytest.importorskip("mlx.core")
    packed, scale, whole = quantize_nvfp4(torch.randn(4, 32))
    with pytest.raises(ferrule.KernelError, match=r"w_scale_2 has the shape \(4,\).*each alone"):
        nvfp4.to_mlx(packed, scale, whole.expand(4))
    with pytest.raises(ferrule.KernelError, match=r"uint8 and .*expected uint32"):
        nvfp4.from_mlx(packed.numpy(), scale.view(torch.uint8).numpy())


@pytest.mark.parametrize("name", ["ModelOpt", "compressed-tensors"])
def test_what_is_quantized_here_is_read_by(name: str) -> None:
    """By the tools' own code, where they are installed."""
    pytest.importorskip("modelopt" if name == "ModelOpt" else "compressed_tensors")
    w = torch.randn(6, 64)
    tensors = quantize_nvfp4(w)
    ours = dequantize_nvfp4(*tensors)
    state_dict = {f"a.{part}": tensor for part, tensor in zip(NAMES, tensors, strict=True)}
    if name == "ModelOpt":
        written = nvfp4.to_modelopt(state_dict)
        parts = [written[f"a.{part}"] for part in ("weight", "weight_scale", "weight_scale_2")]
        same_bits(oracles.modelopt_dequantize(*parts, torch.bfloat16), ours + 0.0)
    else:
        written = nvfp4.to_compressed_tensors(state_dict)
        parts = {key.removeprefix("a."): tensor for key, tensor in written.items()}
        theirs = oracles.compressed_tensors_dequantize(parts)
        torch.testing.assert_close(theirs, ours, rtol=2**-7, atol=0)


def test_names_are_public_and_dear_libraries_are_not_imported() -> None:
    assert set(nvfp4.__all__) <= set(dir(nvfp4))
    for name in nvfp4.__all__:
        assert getattr(nvfp4, name).__doc__
    assert set(ferrule.ops.__all__) <= set(dir(ferrule.ops))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        nvfp4.nothing  # noqa: B018
    code = (
        "import sys, ferrule.ops, ferrule.ops.nvfp4\n"
        "print(sorted({'torch', 'mlx', 'safetensors', 'rich', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_of_a_parameter_come_buffers() -> None:
    """What is quantised has no derivative, and ops would ask for one."""
    w = torch.nn.Parameter(torch.randn(4, 16))
    for scale_2 in (None, torch.tensor(0.01, requires_grad=True)):
        assert not any(part.requires_grad for part in quantize_nvfp4(w, scale_2))


@pytest.mark.parametrize(
    ("w", "scale_2", "words"),
    [
        (torch.ones(2, 16), torch.ones(3), r"w_scale_2 has the shape \(3,\)"),
        (torch.ones(2, 16), 0.0, "w_scale_2 is 0.0; expected a positive number"),
        (torch.ones(2, 16), -1.0, "w_scale_2 is -1.0"),
        (torch.ones(2, 16), float("nan"), "w_scale_2 is nan"),
        (torch.full((2, 16), torch.nan), 1.0, "NaN or infinite"),
    ],
)
def test_given_scales_of_all_are_checked(w: Any, scale_2: Any, words: str) -> None:
    with pytest.raises(ferrule.KernelError, match=words):
        quantize_nvfp4(w, scale_2)


def test_one_given_scale_is_that_of_each_matrix() -> None:
    w = torch.randn(3, 2, 16)
    assert quantize_nvfp4(w, 0.01)[2].tolist() == [torch.tensor(0.01)] * 3


def test_scales_as_bytes() -> None:
    """Ops take them so, too."""
    w_packed, w_scale, w_scale_2 = quantize_nvfp4(torch.randn(4, 32))
    as_bytes, x = w_scale.view(torch.uint8), torch.randn(3, 32)
    expected = dequantize_nvfp4(w_packed, w_scale, w_scale_2)
    assert torch.equal(dequantize_nvfp4(w_packed, as_bytes, w_scale_2), expected)
    expected = nvfp4.linear_w4a4(x, 0.01, w_packed, w_scale, w_scale_2)
    assert torch.equal(nvfp4.linear_w4a4(x, 0.01, w_packed, as_bytes, w_scale_2), expected)
    meta = [part.to("meta") for part in (x, w_packed, w_scale, w_scale_2)]
    assert nvfp4.linear_w4a4(meta[0], 0.01, *meta[1:]).shape == (3, 4)
    with torch.autocast("cpu", torch.bfloat16):  # a reference is float32
        assert torch.equal(nvfp4.linear_w4a4(x, 0.01, w_packed, w_scale, w_scale_2), expected)


@pytest.mark.parametrize(
    ("packed", "scale", "words"),
    [
        (torch.zeros(4, 8, dtype=torch.uint8), torch.ones(3, 1), r"w_scale is of torch.float32"),
        (torch.zeros(4, 8), torch.ones(4, 1), "w_packed is of torch.float32"),
        (torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(3, 1, dtype=torch.uint8), r"\(3, 1\)"),
        (torch.zeros(4, 16, dtype=torch.uint8), torch.zeros(4, 1, dtype=torch.uint8), "K / 16"),
    ],
)
def test_what_is_not_dequantized(packed: Any, scale: Any, words: str) -> None:
    with pytest.raises(ferrule.KernelError, match=words):
        dequantize_nvfp4(packed, scale)
