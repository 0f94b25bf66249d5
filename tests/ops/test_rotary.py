"""rope and rope_, against mx.fast.rope."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule import KernelError, KernelTypeError, ops
from ready_ops import close, ways_in_mlx, ways_in_torch, with_gradients

pytestmark = [
    # torch's own: its forward mode and its compiler use what they deprecate
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch._prims_common.check:FutureWarning"),
    pytest.mark.filterwarnings("ignore::ferrule.PortabilityWarning"),  # float64
]


def theirs(
    x: Any, dims: int, traditional: bool = False, base: float = 10000.0, scale: float = 1.0,
    offset: Any = 0, freqs: Any = None,
) -> Any:  # fmt: skip
    """What mx.fast.rope's page says, of tensors, in their dtype."""
    length = x.shape[-2]
    start = torch.as_tensor(offset)[(..., *[None] * (x.ndim - 1))]
    position = (start + torch.arange(length)[:, None]).double() * scale
    by = base ** (torch.arange(0, dims, 2).double() / dims) if freqs is None else freqs.double()
    # Angles are float32: of large ones the last digits are of their size.
    angle = position / by
    c, s = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    turned, rest = x[..., :dims], x[..., dims:]
    u, v = (turned[..., ::2], turned[..., 1::2]) if traditional else turned.chunk(2, -1)
    pair = u * c - v * s, u * s + v * c
    mixed = torch.stack(pair, -1).flatten(-2) if traditional else torch.cat(pair, -1)
    return torch.cat([mixed, rest], -1)


@st.composite
def calls(draw: Any) -> tuple[tuple[int, ...], dict[str, Any]]:
    """A shape, and how it is turned."""
    size = st.sampled_from([0, 1, 1, 2, 3, 5])
    front = draw(st.lists(size, min_size=1, max_size=3))
    dims = draw(st.sampled_from([8, 20]))
    shape = (*front, draw(st.integers(0, 40)), dims + draw(st.sampled_from([0, 1, 6])))
    offset = draw(st.sampled_from([0, 7, "one", "each"]))
    if offset == "one":
        offset = torch.tensor(draw(st.integers(0, 100)), dtype=torch.int32)
    elif offset == "each":
        offset = torch.tensor([*range(3, 3 + front[0])], dtype=torch.int32)
    how = {"scale": draw(st.sampled_from([1.0, 0.5])), "base": draw(st.sampled_from([1e4, 100.0]))}
    traditional = dims == 8  # so that there are few kernels
    return shape, {"dims": dims, "traditional": traditional, "offset": offset, **how}


DTYPES = {0: torch.float32, 7: torch.float16}


@settings(max_examples=40, deadline=None)
@given(calls())
def test_any_shape(call: tuple[tuple[int, ...], dict[str, Any]]) -> None:
    shape, how = call
    number = isinstance(how["offset"], int)
    dtype = DTYPES[how["offset"]] if number else torch.float32
    x = torch.randn(shape).to(dtype)
    found = with_gradients(lambda x: ops.rope(x, **how), [x])
    expected = with_gradients(lambda x: theirs(x, **how), [x.double()])
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        close(one, other, dtype)
    if dtype == torch.float32:
        given = {k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in how.items()}
        written = x.numpy().copy()
        assert ops.rope_(written, **given) is written
        assert np.array_equal(written, found[0].detach().numpy())


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("offset", [3, "one", "each"])
def test_mlx(traditional: bool, offset: Any) -> None:
    x = mx.random.normal((2, 3, 70, 24))
    if offset != 3:
        offset = mx.array(5) if offset == "one" else mx.array([4, 1])
    how = {"traditional": traditional, "base": 500.0, "scale": 0.25, "offset": offset}
    found, expected = ops.rope(x, 20, **how), mx.fast.rope(x, 20, **how)
    assert np.allclose(found, expected, atol=1e-5)
    freqs = mx.arange(1, 11).astype(mx.float32)
    found = ops.rope(x, 20, **{**how, "freqs": freqs})
    expected = mx.fast.rope(x, 20, **{**how, "base": None, "freqs": freqs})
    assert np.allclose(found, expected, atol=1e-5)


def test_far_positions() -> None:
    x = mx.random.normal((1, 2, 4, 64))
    for offset in (1000, 100_000, 10_000_000):
        found = ops.rope(x, 64, offset=offset)
        expected = mx.fast.rope(x, 64, traditional=False, base=10000.0, scale=1.0, offset=offset)
        # One unit in the last place of the angle, at both sides.
        assert np.allclose(found, expected, atol=1e-5 + 4e-7 * offset)
        length = (found * found).sum(axis=-1)
        assert np.allclose(length, (x * x).sum(axis=-1), rtol=1e-5)


def test_in_place_in_torch() -> None:
    for values in (torch.randn(2, 3, 5, 24), torch.randn(2, 5, 3, 24).transpose(1, 2)):
        x = values.clone()
        expected = ops.rope(x, 20, offset=2)
        torch.testing.assert_close(ops.rope_(x, 20, offset=2), expected, rtol=0, atol=0)
        torch.testing.assert_close(x, expected, rtol=0, atol=0)

    def turned(x: Any) -> Any:
        y = x * 2
        ops.rope_(y, 20, offset=2)
        return y + 1

    compiled = torch.compile(turned, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (5, 6):
        x = torch.randn(2, 3, length, 24)
        torch.testing.assert_close(compiled(x), turned(x))


@pytest.mark.parametrize("host", [np.array, torch.from_numpy, mx.array])
def test_positions_of_64_bits(host: Any) -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 2)).astype(np.float32)
    freqs, offsets = np.array([2.0**30], np.float32), np.array([2**33 + 2**29, 5 - 2**34])
    angles = ((offsets[:, None] + np.arange(3)) / 2**30).astype(np.float32)
    (u, v), c, s = (x[..., 0], x[..., 1]), np.cos(angles), np.sin(angles)
    expected = np.stack([u * c - v * s, u * s + v * c], axis=-1)
    for i in range(2):
        for one in (int(offsets[i]), offsets[i], host(offsets[i : i + 1])[0]):
            found = ops.rope(host(x[i]), np.int64(2), offset=one, freqs=host(freqs))
            assert np.allclose(found.tolist(), expected[i], atol=1e-6)
    found = ops.rope(host(x), 2, offset=host(offsets), freqs=host(freqs))
    assert np.allclose(found.tolist(), expected, atol=1e-6)


def test_derivatives() -> None:
    x = torch.randn(2, 2, 3, 6, dtype=torch.float64, requires_grad=True)

    def of(x: Any) -> Any:
        return ops.rope(x, 4, base=100.0, offset=2)

    assert torch.autograd.gradcheck(of, (x,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(of, (x,))


def test_ways_in_torch() -> None:
    x, offset = torch.randn(1, 3, 5, 24), torch.tensor(4, dtype=torch.int32)
    dynamic = {0: torch.export.Dim("batch"), 2: torch.export.Dim("length")}
    ways_in_torch(lambda x, offset: ops.rope(x, 20, offset=offset), [x, offset], dynamic)


def test_ways_in_mlx() -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 5, 24)).astype(np.float32)
    ways_in_mlx(lambda x, offset: ops.rope(x, 20, offset=offset), [x, np.array(4, np.int32)])


def test_in_place_in_exported_programs_and_batches() -> None:
    class Turned(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ops.rope_(x.clone(), 20, offset=3)

    x = torch.randn(2, 3, 5, 24)
    dynamic = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(Turned(), (x,), dynamic_shapes=dynamic)
    longer = torch.randn(7, 3, 5, 24)
    torch.testing.assert_close(program.module()(longer), ops.rope(longer, 20, offset=3))
    found = torch.func.vmap(lambda x: ops.rope_(x.clone(), 20, offset=3))(longer)
    torch.testing.assert_close(found, ops.rope(longer, 20, offset=3))


def test_opcheck() -> None:
    x = torch.randn(2, 3, 5, 24, requires_grad=True)
    op = ops.rotary._rope(20, False, "one", False, False)
    torch.library.opcheck(op.torch_op, (x, torch.tensor(4, dtype=torch.int32), 1e4, 1.0))
    in_place = ops.rotary._rope_in_place(20, False, "number", False)
    torch.library.opcheck(in_place.torch_op, (x.detach().clone(), 4, 1e4, 1.0))


def test_wrong_inputs() -> None:
    x = np.ones((2, 3, 8), np.float32)
    for function in (ops.rope, ops.rope_):
        name = function.__name__
        with pytest.raises(KernelError, match=rf"{name}: got dims 3; expected an even number"):
            function(x, 3)
        with pytest.raises(KernelTypeError, match=rf"{name}: got dims 4.0; expected an int"):
            function(x, 4.0)
        with pytest.raises(KernelTypeError, match=rf"{name}: got x of type list"):
            function([1.0], 4)
        with pytest.raises(KernelError, match=r"offset of shape \(2, 1\); expected an int, an arr"):
            function(x, 4, offset=np.zeros((2, 1), np.int32))
        with pytest.raises(KernelError, match=r"wants D >= 10, and the inputs say D = 8"):
            function(x, 10)
        with pytest.raises(KernelError, match=r"'freqs' .*got the shape \(3,\).* is 3, but"):
            function(x, 4, freqs=np.ones(3, np.float32))
        with pytest.raises(KernelError, match=r"'offset' .*got the shape \(3,\).* B is 2 by input"):
            function(x, 4, offset=np.zeros(3, np.int32))
    with pytest.raises(KernelError, match="in place"):
        ops.rope_(mx.ones((2, 3, 8)), 4)
