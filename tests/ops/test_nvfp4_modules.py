"""NVFP4's modules are modules of torch: they move, are copied, saved and loaded, and keep the
dtypes of what they hold."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ferrule
from ferrule.ops import NVFP4Experts, NVFP4Linear, dequantize_nvfp4, nvfp4, quantize_nvfp4

DTYPES = {"w_packed": torch.uint8, "w_scale": torch.float8_e4m3fn, "w_scale_2": torch.float32}


def as_bytes(tensor: Any) -> Any:
    """Something to compare, of which torch compares no float8."""
    return tensor.view(torch.uint8) if tensor.ndim else tensor


def linear(k: int = 32, n: int = 8, **options: Any) -> NVFP4Linear:
    return NVFP4Linear.from_linear(nn.Linear(k, n, **options))


def from_tensors(**changed: Any) -> NVFP4Linear:
    return NVFP4Linear.from_tensors(**{**dict(linear().named_buffers()), **changed})


def experts(e: int = 4, h: int = 32, i: int = 16) -> NVFP4Experts:
    w13, w2 = torch.randn(e, 2 * i, h), torch.randn(e, h, i)
    names = "packed", "scale", "scale_2"
    tensors = {f"w13_{n}": t for n, t in zip(names, quantize_nvfp4(w13), strict=True)}
    tensors |= {f"w2_{n}": t for n, t in zip(names, quantize_nvfp4(w2), strict=True)}
    return NVFP4Experts.from_tensors(**tensors)


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from([16, 48, 128]),
    st.sampled_from([1, 5, 16]),
    st.booleans(),
    st.sampled_from([(), (3,), (2, 0), (2, 3)]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_is_the_linear_layer_of_its_weight(
    k: int, n: int, bias: bool, front: tuple[int, ...], dtype: Any
) -> None:
    layer = linear(k, n, bias=bias).to(dtype)
    x = torch.randn(*front, k).to(dtype)
    w = dequantize_nvfp4(layer.w_packed, layer.w_scale, layer.w_scale_2, torch.float32)
    expected = nn.functional.linear(x.float(), w, None if not bias else layer.bias.float())
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    found = layer(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.to(torch.bfloat16),
        lambda m: m.half(),
        lambda m: m.double(),
        lambda m: m.to("cpu", torch.float16, non_blocking=True),
        lambda m: nn.Sequential(m).half()[0],
        lambda m: m.share_memory(),
        copy.deepcopy,
    ],
)
@pytest.mark.parametrize("make", [linear, experts])
def test_casts_leave_what_is_packed(move: Any, make: Any) -> None:
    module = make()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    moved = move(module)
    for name, buffer in moved.named_buffers():
        kind = name.replace("w13", "w").replace("w2", "w")
        assert buffer.dtype == before[name].dtype == DTYPES[kind]
        assert torch.equal(as_bytes(buffer), as_bytes(before[name]))


def test_buffers_that_users_add_are_cast_as_ever() -> None:
    layer = linear()
    layer.register_buffer("smooth", torch.ones(32))
    assert layer.half().smooth.dtype == torch.float16
    layer.load_state_dict({**layer.state_dict(), "smooth": torch.zeros(32)})
    assert not layer.smooth.any()


def test_type_which_casts_all_is_refused() -> None:
    layer = linear()
    with pytest.raises(ferrule.KernelError, match=r"w_packed of torch.uint8 cannot be cast"):
        layer.type(torch.float16)
    assert {n: b.dtype for n, b in layer.named_buffers()} == DTYPES


@pytest.mark.parametrize("make", [linear, experts])
def test_meta_and_back(make: Any) -> None:
    module = make()
    with torch.device("meta"):
        empty = type(module)(4, 32, 16) if make is experts else NVFP4Linear(32, 8)
    assert {buffer.device.type for buffer in empty.buffers()} == {"meta"}
    empty = empty.to_empty(device="cpu")
    empty.load_state_dict({**module.state_dict()}, strict=True)
    with torch.device("meta"):
        assigned = type(module)(4, 32, 16) if make is experts else NVFP4Linear(32, 8)
    assigned.load_state_dict(module.state_dict(), assign=True)
    arguments = (torch.randn(3, 32),)
    if make is experts:
        arguments += torch.tensor([[0, 1], [2, 3], [1, 0]]), torch.rand(3, 2)
    for other in (empty, assigned):
        assert torch.equal(other(*arguments), module(*arguments))
        assert not any(buffer.is_meta for buffer in other.buffers())


def test_state_dict_is_saved_by_torch_and_safetensors(tmp_path: Any) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    layer, stream = linear(), io.BytesIO()
    torch.save(layer.state_dict(), stream)
    stream.seek(0)
    safetensors.save_file(layer.state_dict(), tmp_path / "a.safetensors")
    for loaded in (torch.load(stream), safetensors.load_file(tmp_path / "a.safetensors")):
        other = NVFP4Linear(32, 8)
        other.load_state_dict(loaded)
        x = torch.randn(2, 32)
        assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (8,)])
def test_scale_of_all_or_of_each_row(shape: tuple[int, ...], assign: bool) -> None:
    """One scale of all, or of each row as of fused layers: the buffer takes what it is given."""
    layer, state = NVFP4Linear(32, 8), linear().state_dict()
    state["w_scale_2"] = torch.rand(shape) + 0.5
    for _ in range(2):
        layer.load_state_dict(state, assign=assign)
        assert torch.equal(layer.w_scale_2, state["w_scale_2"])
    state["w_scale"] = state["w_scale"].view(torch.uint8)
    layer.load_state_dict(state, assign=assign)
    assert layer.w_scale.dtype == torch.float8_e4m3fn
    layer.load_state_dict(linear().state_dict())
    assert layer.w_scale_2.shape == ()


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("w_packed", torch.zeros(8, 32).byte(), "(8, 32); expected torch.uint8 and (8, 16)"),
        ("w_packed", torch.zeros(8, 16), "torch.float32 and has the shape (8, 16); expected"),
        ("w_scale", torch.zeros(8, 2), "expected torch.float8_e4m3fn and (8, 2)"),
        ("w_scale_2", torch.ones(3), "(3,); expected torch.float32 and () or (1,) or (8,)"),
        ("w_scale_2", torch.ones((), dtype=torch.bfloat16), "torch.bfloat16"),
    ],
)  # fmt: skip
def test_load_state_dict_names_what_does_not_fit(name: str, tensor: Any, words: str) -> None:
    model = nn.Sequential(NVFP4Linear(32, 8))
    state = {f"0.{part}": value for part, value in linear().state_dict().items()}
    with pytest.raises(RuntimeError) as error:
        model.load_state_dict({**state, f"0.{name}": tensor})
    assert words in str(error.value)
    assert f"[NVFP4Linear] 0.{name} is of" in str(error.value)
    assert "in_features=32, out_features=8" in str(error.value)
    assert "Missing" not in str(error.value)


def test_what_is_counted_and_trained() -> None:
    layer = linear()
    assert [name for name, _ in layer.named_parameters()] == ["bias"]
    x = torch.randn(3, 32, requires_grad=True)
    layer(x).sum().backward()
    w = dequantize_nvfp4(layer.w_packed, layer.w_scale, layer.w_scale_2, torch.float32)
    torch.testing.assert_close(x.grad, w.sum(0).expand(3, 32), rtol=1e-4, atol=1e-4)
    assert torch.equal(layer.bias.grad, torch.full((8,), 3.0))


def test_repr() -> None:
    assert repr(linear(bias=False)) == "NVFP4Linear(in_features=32, out_features=8, bias=False)"
    assert "activations='nvfp4'" in repr(NVFP4Linear(32, 8, activations="nvfp4"))
    assert repr(experts()) == (
        "NVFP4Experts(num_experts=4, hidden_size=32, intermediate_size=16, activation='silu')"
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: NVFP4Linear(20, 8), "[NVFP4Linear] in_features=20; expected a positive multiple"),
        (lambda: NVFP4Linear(0, 8), "in_features=0"),
        (lambda: NVFP4Linear(16, 8, activations="fp8"), "activations='fp8'; expected None (W4A16)"),
        (lambda: NVFP4Experts(2, 16, 24), "[NVFP4Experts] intermediate_size=24"),
        (lambda: NVFP4Experts(2, 16, 16, "relu"), "[NVFP4Experts] activation='relu'; expected one"),
        (lambda: from_tensors(w_scale_2=1.0), "w_scale_2 is a float; expected a tensor of torch"),
        (lambda: from_tensors(bias=torch.zeros(3)), "bias is a Tensor of shape (3,); expected"),
        (lambda: from_tensors(w_packed=torch.zeros(4)), "w_packed has the shape (4,); expected"),
    ],
)  # fmt: skip
def test_sizes_are_checked(make: Any, words: str) -> None:
    with pytest.raises(ferrule.KernelError) as error:
        make()
    assert words in str(error.value)


@pytest.mark.parametrize("two", [False, True])
def test_experts_are_the_experts(two: bool) -> None:
    """Each token's experts one by one, of dequantized weights; gate and up with own scales."""
    module, h, i = experts(), 32, 16
    if two:
        module.w13_scale_2 = torch.stack((module.w13_scale_2, module.w13_scale_2 * 3), 1)
    x, ids = torch.randn(5, h), torch.tensor([[0, 1], [2, 3], [1, 0], [3, 3], [2, 0]])
    weights = torch.rand(5, 2)
    scales = module.w13_scale_2 if two else module.w13_scale_2[:, None].expand(-1, 2)
    rows = scales.repeat_interleave(i, 1)
    w13 = dequantize_nvfp4(module.w13_packed, module.w13_scale, rows, torch.float32)
    w2 = dequantize_nvfp4(module.w2_packed, module.w2_scale, module.w2_scale_2, torch.float32)
    expected = torch.zeros(5, h)
    for token in range(5):
        for place in range(2):
            e = ids[token, place]
            gate, up = (w13[e] @ x[token]).chunk(2)
            expected[token] += weights[token, place] * (w2[e] @ (nn.functional.silu(gate) * up))
    found = module(x, ids, weights)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(found, module(hidden_states=x, top_k_index=ids, top_k_weights=weights))


def test_w4a4() -> None:
    """Modules with activations="nvfp4" are the reference of each layer."""
    layer = linear()
    given_scale = torch.tensor(4 / 2688)
    tensors = layer.w_packed, layer.w_scale, layer.w_scale_2
    with_inputs = NVFP4Linear.from_tensors(*tensors, layer.bias, given_scale)
    x = torch.randn(3, 32)
    assert torch.equal(with_inputs(x), nvfp4.linear_w4a4(x, given_scale, *tensors, layer.bias))
    assert not torch.equal(with_inputs(x), layer(x))
    module = experts()
    buffers = dict(module.named_buffers())
    largest = {"w13_input_scale": 4, "w2_input_scale": 200}
    scales = {name: torch.full((4,), value / 2688) for name, value in largest.items()}
    quantised = NVFP4Experts.from_tensors(**buffers, **scales)
    ids, weights = torch.tensor([[0, 1], [2, 3], [1, 0]]), torch.rand(3, 2)
    found, near = quantised(x, ids, weights), module(x, ids, weights)
    assert not torch.equal(found, near)
    assert (found - near).norm() < 0.3 * near.norm()


def test_autocast() -> None:
    """Layers do what those of torch do that they are in the place of."""
    layer, x = linear(), torch.randn(3, 32, requires_grad=True)
    expected = copy.deepcopy(layer).bfloat16()(x.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        for given_x in (x, x.bfloat16()):
            assert torch.equal(layer(given_x), expected)
        assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), expected)
    expected.sum().backward()
    assert x.grad.dtype == layer.bias.dtype == torch.float32
    module, ids, weights = experts(), torch.tensor([[0, 1], [2, 3], [1, 0]]), torch.rand(3, 2)
    with torch.autocast("cpu", torch.bfloat16):
        found = module(x, ids, weights)
    assert torch.equal(found, module(x.bfloat16(), ids, weights).float())
