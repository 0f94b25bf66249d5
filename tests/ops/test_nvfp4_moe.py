"""`nvfp4_moe` and `mxfp4_moe`: against a loop over tokens in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule import KernelError, KernelTypeError, ops
from ferrule.ops.nvfp4.moe import moe_op
from nvfp4_arrays import exact, experts_of, layer_of, normal

pytestmark = [
    pytest.mark.together,
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def moe(mode: str, *given: Any, **more: Any) -> Any:
    return getattr(ops, f"{mode}_moe")(*given, **more)


@given(
    st.sampled_from(["nvfp4", "mxfp4"]), st.sampled_from(DTYPES), st.integers(0, 9),
    st.integers(1, 6), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4),
    st.sampled_from(["silu", "gelu_tanh"]), st.booleans(), st.booleans(),
    st.sampled_from([torch.int32, torch.int64]), st.integers(0, 2**32), st.data(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_any_routing(
    mode: str, dtype: torch.dtype, m: int, e: int, h: int, i: int, k: int, activation: str,
    on_input: bool, mapped: bool, ids_of: torch.dtype, seed: int, data: Any,
) -> None:  # fmt: skip
    """Of ids some name no expert, some one twice; experts may have no token, or all."""
    random = np.random.default_rng(seed)
    group = 16 if mode == "nvfp4" else 32
    of = experts_of(random, mode, e, h * group, i * group)
    high = data.draw(st.sampled_from([1, e, e + 2]))
    ids = torch.tensor(random.integers(-1, high, (m, k)), dtype=ids_of)
    places = torch.tensor(random.integers(-1, e, e + 1), dtype=torch.int32) if mapped else None
    x, weights = normal(random, dtype, m, h * group), normal(random, torch.float32, m, k)
    weights_of = data.draw(st.sampled_from(DTYPES))
    weights = weights.to(weights_of)
    y = moe(mode, x, weights, ids, *of.given, places, activation, on_input)
    assert y.shape == x.shape and y.dtype == dtype
    expected, bound = layer_of(of, x, weights, ids, places, activation, on_input)
    assert (np.abs(exact(y) - expected) <= bound).all()


def arrays(
    m: int = 7, k: int = 3, dtype: torch.dtype = torch.bfloat16, mode: str = "nvfp4"
) -> tuple[Any, list[Any]]:
    random = np.random.default_rng(m)
    of = experts_of(random, mode, 5, 64, 48 if mode == "nvfp4" else 32)
    ids = torch.tensor(random.integers(-1, 5, (m, k)))
    x, weights = normal(random, dtype, m, 64), torch.tensor(random.random((m, k))).float()
    return of, [x, weights, ids, *of.given]


@pytest.mark.parametrize("mode", ["nvfp4", "mxfp4"])
def test_tokens_in_another_order(mode: str) -> None:
    """Each is what it is alone, to the bit."""
    _, given = arrays(mode=mode)
    y = moe(mode, *given)
    order = torch.randperm(7)
    assert torch.equal(moe(mode, *[a[order] for a in given[:3]], *given[3:]), y[order])
    for t in range(7):
        assert torch.equal(moe(mode, *[a[t : t + 1] for a in given[:3]], *given[3:])[0], y[t])
    assert torch.equal(moe(mode, *given), y)


@pytest.mark.parametrize("value", [0.0, 2.0**-149, 1e-30, 1e30, float("inf"), float("nan"), -1.5])
@pytest.mark.parametrize("place", [5, 8])
def test_second_scales_of_all_kinds(value: float, place: int) -> None:
    """Multiplied in float32, of the gate and up alike, or of what an expert makes: zeros,
    subnormals, infinities and NaN come out as there."""
    _, given = arrays(m=4, k=1, dtype=torch.float32)
    x, ids = given[0], torch.tensor([[0], [4], [2], [2]])
    given[1], given[2], given[5], given[8] = torch.ones(4, 1), ids, torch.ones(5), torch.ones(5)
    given[place] = torch.full((5,), value)
    y = moe("nvfp4", *given)
    for t, e in enumerate(ids[:, 0].tolist()):
        both = ops.nvfp4_linear(x[t], given[3][e], given[4][e], float(given[5][e]))
        gate, up = both.chunk(2)
        hidden = torch.nn.functional.silu(gate) * up
        row = ops.nvfp4_linear(hidden, given[6][e], given[7][e], float(given[8][e]))
        torch.testing.assert_close(y[t], row, equal_nan=True, rtol=1e-3, atol=2.0**-149)


def test_halves_apart_and_one_second_scale() -> None:
    of, given = arrays()
    y = moe("nvfp4", *given)
    given[3], given[4] = (a.view(5, 2, 48, -1) for a in given[3:5])
    assert torch.equal(moe("nvfp4", *given), y)
    given[5] = of.second13[:, 0]
    one = moe("nvfp4", *given)
    given[5] = given[5][:, None].expand(5, 2)
    assert torch.equal(moe("nvfp4", *given), one)


def test_what_names_no_expert_adds_nothing() -> None:
    """Also where the experts that are there make no numbers."""
    _, given = arrays()
    given[2] = torch.full((7, 3), -1)
    assert torch.equal(moe("nvfp4", *given), torch.zeros(7, 64, dtype=torch.bfloat16))
    given[2][0, 1] = 2
    given[5] = torch.full((5, 2), float("nan"))
    y = moe("nvfp4", *given)
    assert torch.isnan(y[0]).all() and not y[1:].any()
    given[2] = torch.tensor([[5, 6, 2**31 - 1]] * 7)
    assert not moe("nvfp4", *given).any()


def test_experts_with_tokens_of_their_own() -> None:
    of, _ = arrays()
    x, counts = torch.randn(5, 4, 64), torch.tensor([0, 4, 2, 1, 3])
    y = ops.nvfp4_moe_batched(x, counts, *of.given)
    for e in range(5):
        n = int(counts[e])
        alone = moe("nvfp4", x[e, :n], torch.ones(n, 1), torch.full((n, 1), e), *of.given)
        torch.testing.assert_close(y[e, :n], alone)
        assert not y[e, n:].any()


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gradients(activation: str, on_input: bool) -> None:
    """With respect to hidden states and weights: against torch's of a loop."""
    of, given = arrays(dtype=torch.float32)
    ids, more = given[2], (None, activation, on_input)
    given[:2] = [a.clone().requires_grad_() for a in given[:2]]
    c = torch.randn(7, 64)
    found = torch.autograd.grad(moe("nvfp4", *given, *more), given[:2], c)
    x, weights = twins = [a.detach().double().requires_grad_() for a in given[:2]]
    w13 = torch.tensor(of.w13.values) * of.second13.repeat_interleave(48, 1)[..., None]
    w2 = torch.tensor(of.w2.values) * of.second2[:, None, None]
    rows = []
    for t in range(7):
        row = torch.zeros(64, dtype=torch.float64)
        for s in range(3):
            if (e := int(ids[t, s])) >= 0:
                both = w13[e] @ x[t] * (weights[t, s] if on_input else 1)
                gate = torch.nn.functional.silu(both[:48])
                if activation == "gelu_tanh":
                    gate = torch.nn.functional.gelu(both[:48], approximate="tanh")
                row = row + (1 if on_input else weights[t, s]) * (w2[e] @ (gate * both[48:]))
        rows.append(row)
    expected = torch.autograd.grad(torch.stack(rows), twins, c.double())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-3 * float(b.abs().max()))


@pytest.mark.parametrize("mode", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("mapped", [False, True])
def test_torch_checks_the_op(mode: str, mapped: bool) -> None:
    random = np.random.default_rng(6)
    of = experts_of(random, mode, 3, 32, 64)
    given = [normal(random, torch.float32, 4, 32).requires_grad_(), torch.rand(4, 2)]
    given += [torch.randint(0, 3, (4, 2)), *of.given]
    given[3], given[4] = (a.view(3, 2, 64, -1) for a in given[3:5])
    given += [torch.tensor([2, 0, -1])] * mapped
    op = moe_op(mode, "silu", False, mapped).torch_op
    rest = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op, tuple(given), test_utils=rest)
    given = [a.view(torch.uint8) if "float8" in str(a.dtype) else a for a in given]
    torch.library.opcheck(op, tuple(given), test_utils="test_schema")


def test_compiled_whole_with_any_number_of_tokens() -> None:
    _, given = arrays()
    matrices = given[3:]

    def layer(x: Any, weights: Any, ids: Any) -> Any:
        return torch.relu(ops.nvfp4_moe(x, torch.softmax(weights, -1), ids, *matrices))

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for m in (7, 11, 30):
            _, more = arrays(m)
            torch.testing.assert_close(compiled(*more[:3]), layer(*more[:3]))


@pytest.mark.parametrize("library", ["numpy", "mlx"])
def test_other_libraries(library: str) -> None:
    _, given = arrays(dtype=torch.float32)
    expected = moe("nvfp4", *given).numpy()
    of_numpy = [(a.view(torch.uint8) if "float8" in str(a.dtype) else a).numpy() for a in given]
    if library == "numpy":
        np.testing.assert_allclose(moe("nvfp4", *of_numpy), expected, rtol=1e-5, atol=1e-3)
        return
    mx = pytest.importorskip("mlx.core")
    y = moe("nvfp4", *[mx.array(a) for a in of_numpy])
    np.testing.assert_allclose(np.array(y), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, torch.zeros(7, 80), r"hidden_states.*where H = 64 by w13_packed"),
        (0, torch.zeros(7, 64, dtype=torch.float64), "float64"),
        (1, torch.zeros(7, 2), "topk_weights.*k = 3 by topk_ids"),
        (1, torch.zeros(7, 3, dtype=torch.int32), r"\[nvfp4_moe\] topk_weights is int32"),
        (2, torch.zeros(7, 3), "topk_ids is float32"),
        (2, [1], r"\[nvfp4_moe\] topk_ids is a list"),
        (3, torch.zeros(5, 97, 32, dtype=torch.uint8), r"w13_packed is .*\(5, 97, 32\)"),
        (3, torch.zeros(96, 32, dtype=torch.uint8), r"w13_packed.*of shape \[E, 2 \* I, H / 2\]"),
        (5, torch.zeros(5, 3), r"w13_scale_2 is .*\[E\] or \[E, 2\]"),
        (5, torch.zeros(4), "w13_scale_2"),
        (6, torch.zeros(5, 64, 20, dtype=torch.uint8), "w2_packed"),
        (8, torch.zeros(5, 1), "w2_scale_2"),
        (9, torch.zeros(3), "expert_map is float32"),
        (10, "relu", r"\[nvfp4_moe\] activation='relu'; expected one of 'silu', 'gelu_tanh'"),
    ],
    ids=range(14),
)  # fmt: skip
def test_what_does_not_fit(place: int, value: Any, message: str) -> None:
    _, given = arrays(dtype=torch.float32)
    given += [None, "silu"]
    given[place] = value
    with pytest.raises((KernelError, KernelTypeError), match=message):
        ops.nvfp4_moe(*given)


def test_no_experts_and_an_empty_map() -> None:
    """As processes have it that no expert is in."""
    _, given = arrays()
    none = [a[:0] for a in given[3:]]
    places = torch.full((5,), -1)
    for expert_map in (None, places):
        assert not moe("nvfp4", *given[:3], *none, expert_map).any()
    assert not moe("nvfp4", *given, places[:0]).any()


def test_weights_in_float64() -> None:
    _, given = arrays()
    expected = moe("nvfp4", *given)
    x, weights = given[0].requires_grad_(), given[1].double().requires_grad_()
    y = moe("nvfp4", x, weights, *given[2:])
    assert torch.equal(y, expected)
    assert torch.autograd.grad(y.sum(), weights)[0].dtype == torch.float64


@pytest.mark.parametrize(("rows", "counts"), [(5, 4), (4, 4), (6, 6)])
def test_experts_that_are_not_as_many(rows: int, counts: int) -> None:
    _, given = arrays()
    x, sizes = torch.zeros(rows, 2, 64), torch.ones(counts, dtype=torch.int32)
    with pytest.raises(KernelError, match=r"\[nvfp4_moe_batched\] .*where E = 5"):
        ops.nvfp4_moe_batched(x, sizes, *given[3:])


def test_only_hidden_states_and_weights_have_derivatives() -> None:
    _, given = arrays()
    given[5] = given[5].requires_grad_()
    with pytest.raises(KernelError, match="no derivative with respect to matrices"):
        moe("nvfp4", *given).sum().backward()
