"""The two adopted test ops in torch: opcheck, derivatives, transforms, graphs, export."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

import ferrule
from adopted_ops import (
    ADOPTED,
    MADE,
    hadamard,
    linear_weights,
    make_hadamard,
    quantised_linear,
    unpack,
)

UTILITIES = (
    "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)  # fmt: skip
NAMES = list(ADOPTED)
# torch's own calls, where jvp, inductor and export are first used.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]


def close(actual: Any, expected: Any, dtype: torch.dtype = torch.float32) -> None:
    limits = (
        {"rtol": 3e-2, "atol": 0.2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    )
    np.testing.assert_allclose(actual.detach().double().numpy(), expected, **limits)


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**31))
@settings(max_examples=5, deadline=None)
def test_they_agree_with_numpy(name: str, seed: int) -> None:
    adopted = ADOPTED[name]
    for dtype in adopted.dtypes:
        for values in adopted.samples(seed, dtype):
            y = adopted.op(*values)
            assert y.dtype == dtype
            close(y, adopted.reference(*values), dtype)


def test_scales_may_be_8_bit_floats() -> None:
    w, scale = linear_weights(6, 32, 0, torch.float8_e4m3fn)
    x = torch.randn(4, 32)
    close(quantised_linear(x, w, scale), ADOPTED["quantised_linear"].reference(x, w, scale))


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str, requires_grad: bool) -> None:
    adopted = ADOPTED[name]
    for dtype in (torch.float32, torch.bfloat16):
        for values in adopted.samples(0, dtype):
            given = tuple(
                value.detach().clone().requires_grad_()
                if requires_grad and i in adopted.differentiable
                else value
                for i, value in enumerate(values)
            )
            torch.library.opcheck(
                adopted.op.torch_op, given, test_utils=UTILITIES, rtol=3e-2, atol=3e-2
            )


@pytest.mark.parametrize("name", NAMES)
def test_derivatives(name: str) -> None:
    op = ADOPTED[name].op
    x, *rest = ADOPTED[name].samples(0, torch.float64)[1]

    def f(x: Any) -> Any:
        return op(x, *rest)

    x = x.clone().requires_grad_()
    assert torch.autograd.gradcheck(f, (x,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(f, (x,))


def plain(name: str, x: torch.Tensor, rest: list[Any]) -> Any:
    """The op in torch's own operators, which differentiate and batch themselves."""
    if name == "quantised_linear":
        matrix = unpack(*rest, x.dtype).T
    else:
        matrix = torch.from_numpy(ADOPTED[name].reference(torch.eye(x.shape[-1]))).to(x)
    return lambda x: x @ matrix


TRANSFORMS: dict[str, Any] = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sin().sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](f(x).cos())[0],
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x.sin(),))[1],
    "vmap": lambda f, x: torch.func.vmap(f, in_dims=1, out_dims=1)(torch.stack([x, x * 2], 1)),
    "vmap(grad)": lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x).sin().sum()))(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).sin().sum())(x),
    "jvp(grad)": lambda f, x: torch.func.jvp(
        torch.func.grad(lambda x: f(x).sin().sum()), (x,), (x.cos(),)
    )[1],
    "functionalize": lambda f, x: torch.func.functionalize(f)(x),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", NAMES)
def test_transforms(name: str, transform: str, compiled: bool) -> None:
    op = ADOPTED[name].op
    x, *rest = ADOPTED[name].samples(0, torch.float64)[0]
    expected = TRANSFORMS[transform](plain(name, x, rest), x)
    before = op.counts["vmap loop"]

    def f(x: Any) -> Any:
        return TRANSFORMS[transform](lambda x: op(x, *rest), x)

    if compiled and transform == "functionalize":
        pytest.skip("Dynamo breaks the graph there, for every function")
    torch._dynamo.reset()
    call = torch.compile(f, backend="aot_eager", fullgraph=True) if compiled else f
    actual = call(x)
    assert expected.abs().max() > 0
    torch.testing.assert_close(actual, expected)
    assert op.counts["vmap loop"] == before


def test_a_batch_of_weights_is_a_loop_and_said_so() -> None:
    weights = [linear_weights(3, 16, seed) for seed in range(2)]
    w, scale = (torch.stack(parts) for parts in zip(*weights, strict=True))
    x = torch.randn(2, 5, 16)
    with pytest.warns(ferrule.FerruleWarning, match="called 2 times by vmap"):
        y = torch.func.vmap(quantised_linear)(x, w, scale)
    assert quantised_linear.counts["vmap loop"] == 1
    for i in range(2):
        close(y[i], quantised_linear(x[i], w[i], scale[i]))


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("name", NAMES)
def test_modes(name: str, mode: str) -> None:
    x, *rest = ADOPTED[name].samples(0, torch.float32)[0]
    with getattr(torch, mode)():
        close(ADOPTED[name].op(x, *rest), ADOPTED[name].reference(x, *rest))
    with torch.autocast("cpu", torch.bfloat16):
        assert ADOPTED[name].op(x, *rest).dtype == torch.float32


@pytest.mark.parametrize("policy", [None, "cast", "float32"])
def test_autocast_policies(policy: Any) -> None:
    """They decide what the function gets; inside of it there is no autocast."""
    seen = []

    def run(x: Any, w: Any) -> Any:
        seen.append((x.dtype, w.dtype, (x.float() @ w.float()).dtype))
        return x @ w

    op = ferrule.adopt(
        "mm", "x[N,K]:T, w[K,M]:T -> y[N,M]:T", run=run, autocast=policy, version=f"cast {policy}"
    )
    op.def_vjp(lambda primals, cts, outputs: (cts[0] @ primals[1].T, primals[0].T @ cts[0]))
    x, w = torch.ones(2, 3, requires_grad=True), torch.ones(3, 4)
    expected = torch.bfloat16 if policy == "cast" else torch.float32
    for call in (op, torch.compile(op, backend="aot_eager", fullgraph=True)):
        with torch.autocast("cpu", torch.bfloat16):
            y = call(x, w.bfloat16() if policy == "float32" else w)
        assert y.dtype == expected and seen.pop() == (expected, expected, torch.float32)
        y.sum().backward()
        assert x.grad is not None and x.grad.dtype == torch.float32


def test_checkpoint() -> None:
    w, scale = linear_weights(16, 16)
    x = torch.randn(4, 16, requires_grad=True)

    def block(x: Any) -> Any:
        return hadamard(quantised_linear(x, w, scale).relu())

    for reentrant in (False, True):
        y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)
        x.grad = None
        y.square().sum().backward()
        (expected,) = torch.autograd.grad(block(x).square().sum(), x)
        torch.testing.assert_close(x.grad, expected)


# -- models ----------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    def __init__(self, n: int, k: int, seed: int) -> None:
        super().__init__()
        w, scale = linear_weights(n, k, seed)
        self.register_buffer("w", w)
        self.register_buffer("scale", scale)
        self.bias = torch.nn.Parameter(torch.full((n,), 0.1 * seed))

    def forward(self, x: Any) -> Any:
        return hadamard(quantised_linear(x, self.w, self.scale) + self.bias).tanh()


def model(order: Sequence[int] = range(6)) -> torch.nn.Module:
    """Six layers; ``order`` says in which order they are built, not where they stand."""
    built = {seed: Layer(16, 16, seed) for seed in order}
    return torch.nn.Sequential(*(built[seed] for seed in range(6)))


def test_six_layers_are_compiled_once() -> None:
    """With weights as arguments, one graph of a layer serves all."""
    counter = CompileCounterWithBackend("aot_eager")
    layers = model()
    torch._dynamo.reset()
    forward = torch.compile(Layer.forward, backend=counter, fullgraph=True)
    x = torch.randn(4, 16)
    y = x
    for layer in layers:
        y = forward(layer, y).detach()
    assert counter.frame_count == 1
    torch.testing.assert_close(y, layers(x))


def test_sizes_change_without_another_compilation() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    layers = model()
    compiled = torch.compile(layers, backend=counter, fullgraph=True)
    for n in (6, 7, 19, 2):
        x = torch.randn(n, 16)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), layers(x))
    assert counter.frame_count == 1


def test_training_by_inductor() -> None:
    torch._dynamo.reset()
    layers = model()
    x = torch.randn(5, 16)
    grads = []
    for call in (layers, torch.compile(layers, fullgraph=True)):
        layers.zero_grad()
        call(x).square().sum().backward()
        grads.append([p.grad.clone() for p in layers.parameters()])
    assert all(grad.abs().max() > 0 for grad in grads[0])
    # Six layers magnify rounding: other last bits of x alone change a gradient by up to 1e-4 of it.
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-3, atol=1e-3)


def test_one_graph_holds_the_whole_model() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    torch.compile(model(), backend=counter, fullgraph=True)(torch.randn(2, 16))
    assert counter.frame_count == 1


def test_state_dict_and_conversions() -> None:
    layers = model()
    assert {name.partition(".")[2] for name in layers.state_dict()} == {"w", "scale", "bias"}
    x = torch.randn(3, 16)
    other = model(range(5, -1, -1))
    other.load_state_dict(layers.state_dict())
    torch.testing.assert_close(other(x), layers(x))
    expected = layers(x)
    torch.testing.assert_close(copy.deepcopy(layers)(x), expected)
    layers.double()  # what the rule does not allow is refused, not read as something else
    with pytest.raises(ferrule.KernelError, match="got float64, expected scale"):
        layers(x.double())
    for layer in layers:
        layer.scale = layer.scale.half()
    close(layers(x.double()), expected.detach().double().numpy())


SERVE = """
import sys, torch
sys.path[:0] = {path!r}
import test_adopt_torch as t
t.quantised_linear.torch_op, t.hadamard.torch_op  # known to torch before the file is read
assert "T" not in str(t.MADE)
layers = t.model(range(5, -1, -1))  # in another order
program = torch.export.load({file!r})
x = torch.load({x!r})
torch.save(program.module()(x), {y!r})
print(t.MADE)
"""


def test_an_export_in_another_process(tmp_path: Path) -> None:
    layers = model().eval()
    x = torch.randn(5, 16)
    shapes = ({0: torch.export.Dim("batch", min=2, max=64)},)
    program = torch.export.export(layers, (x,), dynamic_shapes=shapes)
    assert {n for n in program.state_dict if n.startswith("3.")} == {"3.w", "3.scale", "3.bias"}
    calls = [str(n.target) for n in program.graph.nodes if "ferrule" in str(n.target)]
    assert len(calls) == 12
    torch.testing.assert_close(program.run_decompositions().module()(x), layers(x))
    file, given, result = (str(tmp_path / name) for name in ("m.pt2", "x.pt", "y.pt"))
    torch.export.save(program, file)
    x = torch.randn(9, 16)
    torch.save(x, given)
    code = SERVE.format(path=[p for p in sys.path if p], file=file, x=given, y=result)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[('cpu', 'float32', 16)]\n"  # its state was made again, there
    torch.testing.assert_close(torch.load(result), layers(x))


def test_state_is_made_once_for_a_model() -> None:
    MADE.clear()
    fresh = ferrule.adopt(
        "hadamard", "x[*S,D]:T -> y[*S,D]:T", make=make_hadamard, constants={"D": "D"},
        version="once",
    )  # fmt: skip
    compiled = torch.compile(lambda x: fresh(fresh(fresh(x))), backend="aot_eager", fullgraph=True)
    for n in (2, 3, 4):
        x = torch.randn(n, 8)
        torch.testing.assert_close(compiled(x), fresh(x))
    assert MADE == [("cpu", "float32", 8)]


def test_sizes_that_a_plan_refuses() -> None:
    with pytest.raises(ValueError, match="is a power of two, not 3"):
        hadamard(torch.ones(2, 3))
