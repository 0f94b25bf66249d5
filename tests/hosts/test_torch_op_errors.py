"""What bad input to ops gets in torch: eagerly, without values, and compiled."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import ferrule
from ferrule import KernelError, KernelTypeError, Op
from torch_ops import EACH, I, rand

ERRORS = (KernelError, KernelTypeError, RuntimeError)
GATE, AFFINE = (EACH[name].op for name in ("gate", "affine"))
ATTENTION = EACH["attention"].op


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield


def fake(op: Op, *inputs: Any) -> Any:
    with FakeTensorMode() as mode:
        return op(*[mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for v in inputs])


def meta(op: Op, *inputs: Any) -> Any:
    return op(*[v.to("meta") if isinstance(v, torch.Tensor) else v for v in inputs])


def overload(op: Op, *inputs: Any) -> Any:
    return op.torch_op(*inputs)


def compiled(op: Op, *inputs: Any) -> Any:
    return torch.compile(op, backend="aot_eager", fullgraph=True)(*inputs)


def dynamic(op: Op, *inputs: Any) -> Any:
    return torch.compile(op, backend="eager", fullgraph=True, dynamic=True)(*inputs)


def traced(op: Op, *inputs: Any) -> Any:
    return make_fx(lambda *given: op(*given), tracing_mode="symbolic")(*inputs)


def recorded(op: Op, *inputs: Any) -> Any:
    with torch.enable_grad():
        given = [
            v.clone().requires_grad_()
            if isinstance(v, torch.Tensor) and v.is_floating_point()
            else v
            for v in inputs
        ]
        return op(*given)


WAYS: dict[str, Callable[..., Any]] = {
    "eager": lambda op, *inputs: op(*inputs), "overload": overload, "fake": fake, "meta": meta,
    "compiled": compiled, "dynamic": dynamic, "traced": traced, "recorded": recorded,
}  # fmt: skip
f32, f16, i32 = torch.float32, torch.float16, torch.int32
WRONG: dict[str, tuple[Op, tuple[Any, ...], str]] = {
    "rank": (
        ATTENTION, (rand(3), rand(3), rand(3), 1.0), r"input 'q' of op 'attention'.*\(3,\).*dims",
    ),
    "another rank": (GATE, (rand(2, 3), rand(1, 3)), r"input 'w'.*\(1, 3\).*w\[D\]:T"),
    "dim": (
        GATE, (rand(2, 3), rand(4)),
        r"input 'w' of op 'gate'.*\(4,\).*dim 0 is 4, but D is 3 by input 'x' of shape.*\(2, 3\)",
    ),
    "star": (
        ATTENTION, (rand(2, 3, 4), rand(5, 3, 4), rand(2, 3, 4), 1.0),
        r"input 'k' of op 'attention'.*\(5, 3, 4\).*input 'q'.*\(2, 3, 4\)",
    ),
    "literal": (
        EACH["grid_sample"].op, (rand(1, 2, 2, 1), rand(1, 2, 2, 3)), r"'grid'.*dim 3 is 3, but.*2",
    ),
    "dtype": (GATE, (rand(2, 3), rand(3).to(f16)), "input 'w'.*got float16, but T is float32 by"),
    "declared dtype": (
        ferrule.op("f32", "x[N]:float32 -> y[N]:float32", run=lambda x: x), (rand(3).double(),),
        "input 'x' of op 'f32': got float64, expected x",
    ),
    "unknown dtype": (
        ferrule.op("any", "x[N]:T -> y[N]:T", run=lambda x: x),
        (torch.zeros(3, dtype=torch.complex128),), "input 'x' of op 'any' has dtype torch.comp",
    ),
    "choices": (
        ferrule.op("some", "x[N]:T -> y[N]:T where T in (float16, bfloat16)", run=lambda x: x),
        (rand(3),), "got float32, expected x.* where T is one of float16, bfloat16",
    ),
    "condition": (
        ferrule.op("even", "x[N]:T -> y[N]:T where N % 2 == 0", run=lambda x: x), (rand(3),),
        "op 'even' wants N % 2 == 0, and the inputs say N = 3",
    ),
    "size below zero": (
        ferrule.op("cut", "x[N]:T -> y[N-3]:T", run=lambda x: x[3:] * 1), (rand(2),),
        r"output 'y' of op 'cut': N - 3 is -1 for x \(2,\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", WRONG)
def test_arrays_that_contradict_the_rule(what: str, way: str) -> None:
    op, inputs, message = WRONG[what]
    if way == "recorded" and "vjp" not in op.rules:
        message += "|no derivative"
    with pytest.raises(ERRORS, match=f"(?s){message}"):
        WAYS[way](op, *inputs)


@pytest.mark.parametrize("way", ["eager", "recorded", "compiled", "fake"])
@pytest.mark.parametrize(
    ("op", "inputs", "message"),
    [
        (GATE, (rand(2, 3), None), "'w'"),
        (GATE, (rand(2, 3), [1.0, 2.0, 3.0]), "'w'"),
        (GATE, (rand(2, 3), 1.0), "'w'"),
        (AFFINE, (rand(2, 3), None, "1", 0, False), "'s'"),
        (AFFINE, (rand(2, 3), None, 1.0, 1.5, False), "'n'"),
        (AFFINE, (rand(2, 3), None, 1.0, True, False), "'n'"),
        (AFFINE, (rand(2, 3), None, True, 1, False), "'s'"),
        (AFFINE, (rand(2, 3), None, 1.0, 0, 1), "'flip'"),
        (AFFINE, (rand(2, 3), None, 1.0, 2**31, False), "'n'"),
        (AFFINE, (rand(2, 3), None, rand(1)[0], 0, False), "'s'"),
        (AFFINE, (rand(2, 3), None, None, 0, False), "'s'"),
        (AFFINE, (rand(2, 3), None, 1j, 0, False), "'s'"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_what_is_no_array_or_no_number(op: Op, inputs: Any, message: str, way: str) -> None:
    with pytest.raises(ERRORS, match=f"(?s)input {message} of op '{op.name}'.*{message[1:-1]}"):
        WAYS[way](op, *inputs)


@pytest.mark.parametrize("way", ["eager", "overload", "recorded", "compiled"])
def test_devices(way: str) -> None:
    x, w = rand(2, 3), rand(3).to("meta")
    message = r"input 'w' of op 'gate' is on meta, but input 'x' is on cpu"
    with pytest.raises(ERRORS, match=f"(?s){message}"):
        WAYS[way](GATE, x, w)
    with pytest.raises(ERRORS, match=r"(?s)input 'w' of op 'gate' is on cpu, .*'x' is on meta"):
        WAYS[way](GATE, x.to("meta"), rand(3))


def test_tensors_that_are_not_dense() -> None:
    op = ferrule.op("dense", "x[N,M]:T -> y[N,M]:T", run=lambda x: x + 1)
    for one in (torch.eye(3).to_sparse(), torch.eye(3).to_mkldnn()):
        with pytest.raises((*ERRORS, NotImplementedError)):
            op(one)


# -- runners ---------------------------------------------------------------------------------------

RETURNED: dict[str, tuple[Callable[..., Any], str]] = {
    "shape": (lambda x: x[1:], r"float32 of shape \(2,\) on cpu"),
    "rank": (lambda x: x[None], r"float32 of shape \(1, 3\) on cpu"),
    "dtype": (lambda x: x.double(), r"float64 of shape \(3,\) on cpu"),
    "device": (lambda x: x.to("meta"), r"float32 of shape \(3,\) on meta"),
    "None": (lambda x: None, "a NoneType"),
    "an array": (lambda x: x.numpy(), "a ndarray"),
    "too many": (lambda x: (x, x), "a tuple"),
}


@pytest.mark.parametrize("way", ["eager", "overload", "compiled", "traced"])
@pytest.mark.parametrize("what", RETURNED)
def test_what_a_runner_returns(what: str, way: str) -> None:
    run, message = RETURNED[what]
    op = ferrule.op("returns", "x[N]:T -> y[N]:T", run=run)
    expected = f"returned {message} for output 'y'; expected float32 of shape .3,. on cpu, by y"
    with pytest.raises(ERRORS, match=f"(?s)of op 'returns' {expected}"):
        WAYS[way](op, rand(3)) if way != "traced" else op(rand(3))


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_a_runner_of_two_outputs_returns_one(way: str) -> None:
    for count, run in (("a Tensor", lambda x: x), ("3 values", lambda x: (x, x, x))):
        op = ferrule.op("two", "x[N]:T -> y[N]:T, z[N]:T", run=run)
        with pytest.raises(ERRORS, match=rf"`run` .* of op 'two' returned {count}; expected 2"):
            WAYS[way](op, rand(3))


class Own(Exception):
    """A runner's."""


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager", "inductor"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_runners_own_error_is_kept(backend: str | None) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise Own("blew up")

    op = ferrule.op("broken", "x[N]:T -> y[N]:T", run=broken)
    f = op if backend is None else torch.compile(lambda x: op(x) + 1, backend=backend)
    with pytest.raises(Own, match="blew up") as caught:
        f(rand(3))
    names = [one.name for one in traceback.extract_tb(caught.tb)]
    assert names[-1] == "broken"
    with pytest.raises(Own):
        torch.vmap(lambda x: op(x))(rand(2, 3)) if backend is None else f(rand(3))


test_a_runners_own_error_is_kept = pytest.mark.filterwarnings(
    "ignore:op 'broken' is called . times by vmap"
)(test_a_runners_own_error_is_kept)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_an_error_in_a_derivative_is_kept(backend: str | None) -> None:
    op = ferrule.op("broken_back", "x[N]:T -> y[N]:T", run=lambda x: x + 1)

    @op.def_vjp
    def broken(primals: Any, cotangents: Any, outputs: Any) -> Any:
        raise Own("blew up")

    with pytest.raises((Own, RuntimeError), match="blew up"):
        f = op if backend is None else torch.compile(op, backend=backend)
        f(rand(3).requires_grad_()).sum().backward()


def test_after_an_error_all_is_well() -> None:
    for _ in range(3):
        with pytest.raises(KernelError):
            GATE(rand(2, 3), rand(4))
        torch.testing.assert_close(
            GATE(rand(2, 3), rand(3)), EACH["gate"].reference(rand(2, 3), rand(3))
        )


# -- declarations ----------------------------------------------------------------------------------


def test_what_torch_cannot_hold() -> None:
    op = ferrule.op("make", "n:int32 -> y[4]:int32", metal=I + "y[i] = n;", grid=4, threadgroup=4)
    with pytest.raises(KernelError, match="no array among its inputs that is always there"):
        op.torch_op  # noqa: B018
    op = ferrule.op("complex", "x[N]:T, z:complex64 -> y[N]:T", run=lambda x, z: x)
    with pytest.raises(KernelError, match=r"declare an array, z\[\]:complex64"):
        op.torch_op  # noqa: B018
    many = ", ".join(f"x{i}[N]:T" for i in range(65))
    op = ferrule.op("many", f"{many} -> y[N]:T", run=lambda *x: x[0])
    with pytest.raises(KernelError, match="op 'many' has 65 inputs; torch's ops have 64 at most"):
        op(*[rand(2)] * 65)
    op = ferrule.op("more", f"x[N]:T -> {many.replace('x', 'y')}", run=lambda x: [x] * 65)
    with pytest.raises(KernelError, match="op 'more' has 65 outputs; torch's ops have 64 at most"):
        op(rand(2))


def test_more_arrays_written_in_place_than_letters() -> None:
    caches = ", ".join(f"x{i}[N]:T!" for i in range(40))
    body = I + "".join(f"x{i}[i] = {i};" for i in range(40))
    op = ferrule.op("fill", f"{caches} ->", metal=body, grid="N", threadgroup=8)
    found = [torch.ones(3) for _ in range(40)]
    with pytest.warns(ferrule.PortabilityWarning, match="more than 31 buffers"):
        op(*found)
    torch.testing.assert_close(torch.stack(found), torch.arange(40.0)[:, None].expand(40, 3))
    torch.library.opcheck(op.torch_op, found)


def test_numbers_of_numpy_while_torch_compiles() -> None:
    """Dynamo makes tensors of them, which are no numbers."""
    op = ferrule.op("s", "x[N]:T, s:float32 -> y[N]:T", run=lambda x, s: x * s)
    s = np.float64(0.5)
    torch.testing.assert_close(op(rand(3), s), rand(3) * 0.5)
    compiled = torch.compile(lambda x: op(x, s), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"float\(x\).*outside of what is comp"):
        compiled(rand(3))


def test_names_and_counts_of_inputs() -> None:
    x, w = rand(2, 3), rand(3)
    for backend in (None, "eager"):
        call = (lambda f: f) if backend is None else torch.compile(backend="eager", fullgraph=True)
        torch.testing.assert_close(call(lambda: GATE(w=w, x=x))(), GATE(x, w))
    for given, message in (
        ({"x": x}, "got no input 'w'"), ({"x": x, "w": w, "v": w}, "has no input 'v', but x, w"),
    ):  # fmt: skip
        with pytest.raises(KernelTypeError, match=message):
            GATE(**given)
    with pytest.raises(KernelTypeError, match="takes 2 inputs"):
        GATE(x, w, w)
    torch.testing.assert_close(
        AFFINE(x=x, s=1.0, n=0, flip=False), AFFINE(x, None, 1.0, 0, False)
    )  # what may be None may be left out


@pytest.mark.parametrize(("name", "library"), [("NumPy", "numpy"), ("MLX", "mlx.core")])
def test_arrays_of_two_libraries_are_named(name: str, library: str) -> None:
    other, x = pytest.importorskip(library).ones(3), torch.ones(3)
    op = ferrule.op(
        "mix", "a[N]:T, s:float32, b[N]:T? -> y[N]:T", metal="y[0] = has_b;", grid="N",
        threadgroup=8,
    )  # fmt: skip
    for _ in range(2):  # the first call, and those that C carries out
        for values, its, first in (((x, 1.0, other), "b", "a"), ((other, 1.0, x), "a", "b")):
            says = f"input '{its}' of op 'mix' is an array of {name}, but input '{first}' one of"
            with pytest.raises(KernelError, match=f"{says} torch; expected arrays of one library"):
                op(*values)
        op(x, 1.0, None)
