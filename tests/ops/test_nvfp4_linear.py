"""`nvfp4_linear` and `mxfp4_linear`: against tables of the formats, in float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule import KernelError, KernelTypeError, ops
from ferrule.ops.nvfp4.linear import linear_op
from nvfp4_arrays import CODES, SCALES, Packed, assert_within, exact, matrix, normal, values

pytestmark = [
    pytest.mark.together,
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def linear(mode: str, x: Any, w: Packed, scale_2: Any, bias: Any = None, **more: Any) -> Any:
    """The op of a mode; MXFP4 has no second scale."""
    if mode == "mxfp4":
        return ops.mxfp4_linear(x, w.packed, w.scale, bias, **more)
    return ops.nvfp4_linear(x, w.packed, w.scale, scale_2, bias, **more)


def every_pair(mode: str) -> Packed:
    """All 256 bytes with all 256 scales, in rows of one group."""
    wide = 8 if mode == "nvfp4" else 16
    packed = np.tile(np.arange(256, dtype=np.uint8).reshape(-1, wide), (256, 1))
    scale = np.repeat(np.arange(256, dtype=np.uint8), 256 // wide)[:, None]
    of = torch.from_numpy(packed), torch.from_numpy(scale)
    return Packed(*of, values(mode, packed, scale))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("backend", [None, "reference"])
def test_rows_of_the_identity_give_the_elements(
    dtype: torch.dtype, mode: str, backend: Any
) -> None:
    """Of all bytes and all scales: exactly, as far as the dtype has such numbers."""
    w = every_pair(mode)
    y = linear(
        mode, torch.eye(w.values.shape[1], dtype=dtype), w, torch.tensor(1.0), backend=backend
    )
    kind = {torch.float32: np.float32, torch.float16: np.float16}.get(dtype, ml_dtypes.bfloat16)
    with np.errstate(over="ignore"):
        elements = w.values.astype(np.float32)
        expected = elements.astype(kind).astype(np.float64)
    rows = ~np.isinf(elements).any(1)  # of others some are infinity times zero
    np.testing.assert_array_equal(exact(y).T[rows], expected[rows])
    assert rows.mean() > 0.98


@given(
    st.sampled_from(["nvfp4", "mxfp4"]), st.sampled_from(DTYPES), st.integers(0, 70),
    st.integers(0, 40), st.integers(1, 12), st.sampled_from(["", "one", "row"]), st.booleans(),
    st.sampled_from([None, "packed", "reference"]), st.integers(0, 2**32),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_any_size(
    mode: str, dtype: torch.dtype, m: int, n: int, groups: int, factor: str, biased: bool,
    backend: Any, seed: int,
) -> None:  # fmt: skip
    random = np.random.default_rng(seed)
    k = groups * (16 if mode == "nvfp4" else 32)
    x, w = normal(random, dtype, m, 2 * k)[:, ::2], matrix(random, n, k, mode=mode)
    scale_2 = torch.tensor(0.37)
    if factor:
        scale_2 = normal(random, torch.float32, n if factor == "row" else 1)
    bias = normal(random, dtype, n) if biased else None
    y = linear(mode, x, w, scale_2, bias, backend=backend)
    assert y.shape == (m, n) and y.dtype == dtype
    by = exact(scale_2) if mode == "nvfp4" else 1.0
    expected = exact(x) @ w.values.T * by + (exact(bias) if biased else 0)
    terms = np.abs(exact(x)) @ np.abs(w.values).T * np.abs(by)
    assert_within(y, expected, terms + np.abs(expected), k, dtype)


def test_more_dims_and_one_row() -> None:
    random = np.random.default_rng(0)
    x, w = normal(random, torch.float32, 2, 3, 32), matrix(random, 5, 32)
    y = ops.nvfp4_linear(x, w.packed, w.scale, torch.tensor(2.0))
    assert y.shape == (2, 3, 5)
    torch.testing.assert_close(ops.nvfp4_linear(x[1, 2], w.packed, w.scale, 2.0), y[1, 2])


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30, float("inf"), float("nan"), -1.5, 2.0**-149])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_second_scales_of_all_kinds(value: float, dtype: torch.dtype) -> None:
    """Multiplied in float32, whose infinities, zeros and NaN come out."""
    random = np.random.default_rng(1)
    x, w = normal(random, dtype, 4, 64), matrix(random, 6, 64)
    for scale_2 in (torch.tensor(value), torch.full((6,), value)):
        y = ops.nvfp4_linear(x, w.packed, w.scale, scale_2)
        sums = (x.to(torch.float64) @ torch.from_numpy(w.values).T).to(torch.float32)
        with np.errstate(all="ignore"):
            expected = (sums * scale_2).to(dtype)
        torch.testing.assert_close(y, expected, equal_nan=True, rtol=2e-2, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_in_x_comes_out(dtype: torch.dtype, value: float) -> None:
    random = np.random.default_rng(2)
    x, w = normal(random, dtype, 3, 32), matrix(random, 6, 32)
    x[1, 5] = value
    y = ops.nvfp4_linear(x, w.packed, w.scale, 1.0)
    with np.errstate(all="ignore"):
        expected = exact(x) @ w.values.T
    np.testing.assert_array_equal(np.isnan(exact(y)), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(exact(y)), np.isinf(expected))
    assert np.isfinite(exact(y)[[0, 2]]).all()


def test_scales_that_are_nan_make_their_rows_nan() -> None:
    random = np.random.default_rng(3)
    x, w = normal(random, torch.float32, 3, 32), matrix(random, 6, 32)
    scale = w.scale.view(torch.uint8).clone()
    scale[2, 1], scale[4, 0] = 0x7F, 0xFF
    y = ops.nvfp4_linear(x, w.packed, scale, 1.0)
    assert torch.isnan(y[:, [2, 4]]).all() and torch.isfinite(y[:, [0, 1, 3, 5]]).all()


def test_other_views_of_the_bytes() -> None:
    random = np.random.default_rng(4)
    x, w = normal(random, torch.float32, 3, 48), matrix(random, 6, 48)
    y = ops.nvfp4_linear(x, w.packed, w.scale, 1.0)
    other = w.packed.view(torch.float4_e2m1fn_x2), w.scale.view(torch.uint8)
    assert torch.equal(ops.nvfp4_linear(x, *other, 1.0), y)
    memory = torch.zeros(w.packed.numel() + 3, dtype=torch.uint8)
    memory[3:] = w.packed.flatten()  # begins at no word
    assert torch.equal(ops.nvfp4_linear(x, memory[3:].view(6, 24), w.scale, 1.0), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("by_row", [False, True])
def test_gradients(dtype: torch.dtype, by_row: bool) -> None:
    random = np.random.default_rng(5)
    x, w = normal(random, dtype, 2, 5, 64), matrix(random, 7, 64)
    scale_2 = normal(random, torch.float32, 7) if by_row else torch.tensor(0.3)
    bias, c = normal(random, dtype, 7), normal(random, dtype, 2, 5, 7)
    given = [x.clone().requires_grad_(), bias.clone().requires_grad_()]
    y = ops.nvfp4_linear(given[0], w.packed, w.scale, scale_2, given[1])
    found = torch.autograd.grad(y, given, c)
    dense = torch.from_numpy(w.values) * (scale_2[:, None] if by_row else scale_2).double()
    twins = [v.double().requires_grad_() for v in (x, bias)]
    expected = torch.autograd.grad(twins[0] @ dense.T + twins[1], twins, c.double())
    for a, b in zip(found, expected, strict=True):
        near = 2e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(a.double(), b, rtol=near, atol=near * float(b.abs().max()))
    with pytest.raises(KernelError, match="no derivative with respect to 'w_scale_2'"):
        y = ops.nvfp4_linear(x, w.packed, w.scale, scale_2.requires_grad_(), bias)
        torch.autograd.grad(y, scale_2, c)


@pytest.mark.parametrize(("mode", "by_row"), [("nvfp4", False), ("nvfp4", True), ("mxfp4", False)])
@pytest.mark.parametrize("biased", [False, True])
def test_torch_checks_the_op(mode: str, by_row: bool, biased: bool) -> None:
    random = np.random.default_rng(6)
    op = linear_op(mode, by_row, biased)
    w = matrix(random, 6, 64, mode=mode)
    given = [normal(random, torch.bfloat16, 3, 64).requires_grad_(), w.packed, w.scale]
    given += [torch.rand(6) if by_row else torch.tensor(0.5)] * (mode == "nvfp4")
    given += [normal(random, torch.bfloat16, 6)] * biased
    rest = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op.torch_op, tuple(given), test_utils=rest)
    given[2] = w.scale.view(torch.uint8)  # opcheck multiplies inputs, which 8-bit floats are not
    torch.library.opcheck(op.torch_op, tuple(given), test_utils="test_schema")


def test_compiled_whole_with_any_number_of_rows() -> None:
    random = np.random.default_rng(7)
    w, bias = matrix(random, 6, 64), normal(random, torch.bfloat16, 6)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(ops.nvfp4_linear(x, w.packed, w.scale, torch.tensor(0.5), bias)) + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for m in (2, 5, 64, 100):
            x = normal(random, torch.bfloat16, m, 64)
            torch.testing.assert_close(compiled(x), layer(x))


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        w = matrix(np.random.default_rng(8), 6, 64)
        self.register_buffer("w", w.packed)
        self.register_buffer("scale", w.scale)
        self.register_buffer("scale_2", torch.rand(6))

    def forward(self, x: torch.Tensor) -> Any:
        return ops.nvfp4_linear(x, self.w, self.scale, self.scale_2)


def test_exported(tmp_path: Any) -> None:
    layer, x = Layer(), torch.randn(4, 64)
    rows = torch.export.Dim("rows", min=2, max=100)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: rows},))
    torch.export.save(program, tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    more = torch.randn(9, 64)
    torch.testing.assert_close(loaded(more), layer(more))


@pytest.mark.parametrize("library", ["numpy", "mlx"])
def test_other_libraries(library: str) -> None:
    random = np.random.default_rng(9)
    x, w = normal(random, torch.float32, 3, 64), matrix(random, 6, 64)
    expected = ops.nvfp4_linear(x, w.packed, w.scale, torch.rand(6) + 1, None) * 0
    scale_2, bias = torch.rand(6), torch.randn(6)
    expected = ops.nvfp4_linear(x, w.packed, w.scale, scale_2, bias).numpy()
    given = [a.numpy() for a in (x, w.packed, w.scale.view(torch.uint8), scale_2, bias)]
    if library == "numpy":
        given[2] = given[2].view(ml_dtypes.float8_e4m3fn)
        np.testing.assert_array_equal(ops.nvfp4_linear(*given), expected)
        return
    mx = pytest.importorskip("mlx.core")
    arrays = [mx.array(a) for a in given]
    np.testing.assert_array_equal(np.array(ops.nvfp4_linear(*arrays)), expected)
    shapeless = mx.compile(lambda x: ops.nvfp4_linear(x, *arrays[1:]), shapeless=True)
    for m in (3, 2):
        np.testing.assert_array_equal(np.array(shapeless(arrays[0][:m])), expected[:m])


def wrong(**more: Any) -> dict[str, Any]:
    w = matrix(np.random.default_rng(10), 6, 64)
    given = {"x": torch.randn(3, 64), "w_packed": w.packed, "w_scale": w.scale, "w_scale_2": 1.0}
    return given | more


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"x": torch.randn(3, 72)}, r"\[nvfp4_linear\] x is .*\(3, 72\).*K = 64 by w_packed"),
        ({"x": torch.randn(3, 128)}, "K = 64 by w_packed"),
        ({"x": torch.zeros(3, 64, dtype=torch.float64)}, "float64"),
        ({"x": [1.0]}, r"\[nvfp4_linear\] x is a list"),
        ({"w_packed": torch.zeros(6, 32, dtype=torch.int16)}, "int16"),
        ({"w_scale": torch.zeros(6, 2, dtype=torch.uint8)}, "w_scale"),
        ({"w_scale": torch.zeros(6, 4)}, "float32"),
        ({"w_scale_2": torch.ones(5)}, "w_scale_2"),
        ({"w_scale_2": torch.ones(6, dtype=torch.bfloat16)}, "bfloat16"),
        ({"w_scale_2": "1"}, r"\[nvfp4_linear\] w_scale_2 is a str"),
        ({"bias": torch.ones(5)}, "bias"),
        ({"bias": torch.ones(6, dtype=torch.bfloat16)}, "bias.*bfloat16"),
        ({"backend": "cuda"}, r"\[nvfp4_linear\] backend='cuda'; expected None or one of 'packed'"),
        ({"backend": "dequantize"}, "cuBLAS's, but x is on a processor"),
    ],
    ids=range(14),
)  # fmt: skip
def test_what_does_not_fit(more: dict[str, Any], message: str) -> None:
    with pytest.raises((KernelError, KernelTypeError), match=message):
        ops.nvfp4_linear(**wrong(**more))


def test_tables_are_those_of_the_formats() -> None:
    """What the tests compare with."""
    assert CODES[7] == 6 and CODES[9] == -0.5 and SCALES["nvfp4"][0x7E] == 448
    assert SCALES["mxfp4"][127] == 1 and np.isnan(SCALES["nvfp4"][0xFF])
    assert isinstance(linear_op("nvfp4", False, False), ferrule.Op)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_rows_with_small_scales(dtype: torch.dtype) -> None:
    """A cotangent by a row's second scale may be less than float16 has."""
    w = torch.randn(24, 64)
    packed, scale, scale_2 = ops.quantize_nvfp4(w * 1e-2)
    x = torch.zeros(3, 64, dtype=dtype, requires_grad=True)
    c = (torch.randn(3, 24) * 1e-3).to(dtype)
    of_rows = scale_2 * torch.linspace(0.5, 1, 24)
    (found,) = torch.autograd.grad(ops.nvfp4_linear(x, packed, scale, of_rows), x, c)
    exact_w = ops.dequantize_nvfp4(packed, scale, of_rows, torch.float32)
    expected = c.float() @ exact_w
    error = (found.float() - expected).norm() / expected.norm()
    assert error <= (2**-7 if dtype == torch.bfloat16 else 2**-8)


def test_gradients_of_rows_whose_scales_are_zero() -> None:
    packed, scale, _ = ops.quantize_nvfp4(torch.randn(4, 16))
    x = torch.randn(2, 16, requires_grad=True)
    (found,) = torch.autograd.grad(ops.nvfp4_linear(x, packed, scale, torch.zeros(4)).sum(), x)
    assert not found.any()
