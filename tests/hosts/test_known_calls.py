"""Repeated calls with torch's tensors: of Python functions, and such as autograd records.

The first call of a layout goes through torch's dispatcher and ferrule's Python, later ones are made
in C: each is to give and to say what the first does.
"""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import ferrule
from ferrule import KernelError
from ferrule.hosts.torch import known_calls
from ferrule.tools import fastcall
from frames import frames

RULE = "x[*S]:T -> y[*S]:T"
TIMES = 3  # so often a call is made: one is remembered, then repeated
pytestmark = [
    pytest.mark.skipif(fastcall.library() is None, reason="the C library was not built"),
    pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated"),
]


def double(x: Any) -> Any:
    return x * 2


def doubling(**more: Any) -> ferrule.Op:
    return ferrule.adopt("doubling", RULE, run=double, **more)


def known_layouts(op: ferrule.Op) -> int:
    return len(op._operator.known.entries)


def test_a_repeated_call_runs_no_python_but_the_function() -> None:
    assert known_calls.in_c()
    op, x = doubling(), torch.ones(3)
    for _ in range(2):
        op(x)
    assert frames(lambda: op(x)) == ["Op.__call__"]
    assert frames(lambda: op(torch.nn.Parameter(x, requires_grad=False))) == ["Op.__call__"]
    assert len(frames(lambda: op(torch.ones(4)))) > 5  # another layout


def test_a_torch_without_what_c_calls_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(known_calls._excluding()) == 5
    monkeypatch.setattr(known_calls, "_EXCLUDE", "no_such_function")
    assert known_calls._excluding() == []


@given(st.lists(
    st.tuples(
        st.sampled_from([(3,), (2, 3), (0,), (1, 3), ()]),
        st.sampled_from([torch.float32, torch.float64, torch.int32, torch.complex64]),
        st.sampled_from(["plain", "transposed", "parameter", "negative", "requires grad"]),
        st.one_of(st.none(), st.integers(-3, 3)),
        st.one_of(st.floats(-500, 500), st.sampled_from([-0.0, 0.0, 1, 2**20])),
        st.booleans(),
    ),
    max_size=12,
))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_calls_in_any_order(calls: list[Any]) -> None:
    def run(x: Any, b: Any, scale: Any, flag: Any) -> Any:
        assert type(x) is torch.Tensor and not x.requires_grad
        assert type(scale) is float and type(flag) is bool
        y = x * scale if b is None else x * scale + b.to(x.dtype)
        return (-y if flag else y).to(x.dtype).contiguous()

    rule = "x[*S]:T, b[]:T?, scale:float32, flag:bool -> y[*S]:T"
    op = ferrule.adopt("in_any_order", rule, run=run, version=1)
    for shape, dtype, kind, b, scale, flag in calls:
        x = torch.arange(1, 1 + int(np.prod(shape))).reshape(shape).to(dtype)
        x = x.T if kind == "transposed" and x.ndim == 2 else x
        if kind == "negative" and not dtype.is_floating_point:
            x = torch._neg_view(x)
        if kind in ("parameter", "requires grad") and dtype.is_floating_point:
            x = torch.nn.Parameter(x) if kind == "parameter" else x.clone().requires_grad_()
        added = None if b is None else torch.tensor(b).to(x.dtype)
        with torch.no_grad():
            expected = run(x.detach(), added, float(scale), flag)
            y = op(x, added, scale, flag)
        assert y.is_contiguous() and type(y) is torch.Tensor
        torch.testing.assert_close(y, expected)
        assert torch.equal(torch.signbit(y.real), torch.signbit(expected.real))


def test_what_a_function_gets() -> None:
    """A plain tensor below autograd and autocast, which nothing takes the place of."""
    seen: list[Any] = []

    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *given: Any) -> Any:
            raise AssertionError

    louds = {"one": torch.ones(3).as_subclass(Loud)}.get

    def run(x: Any) -> Any:
        seen.append((type(x), x.requires_grad, x.view(3)._is_view(), (x[None] @ x[:, None]).dtype))
        return x + torch.Tensor.add(louds("one"), 1)

    op = ferrule.adopt("gets", RULE, run=run, version=1)
    parameter = torch.nn.Parameter(torch.ones(3))
    for _ in range(TIMES):
        with torch.no_grad(), torch.autocast("cpu"):
            torch.testing.assert_close(op(parameter), torch.full((3,), 3.0))
        op(parameter.detach())
    assert set(seen) == {(torch.Tensor, False, False, torch.float32)}
    assert known_layouts(op) == 1
    assert parameter.view(3)._is_view()  # all is as before


def test_what_is_excluded_ends_with_an_exception() -> None:
    fails = [False]

    def run(x: Any) -> Any:
        if fails[0]:
            raise error
        return x + 1

    op, x = ferrule.adopt("may_fail", RULE, run=run, version=1), torch.ones(2)
    op(x), op(x)
    before = torch._C._dispatch_tls_local_exclude_set()
    fails[0] = True
    for error in (ValueError("mine"), RuntimeError("mine"), KeyboardInterrupt("mine")):
        with pytest.raises(type(error), match="mine") as caught:
            op(x)
        assert caught.value is error
        assert torch._C._dispatch_tls_local_exclude_set() == before
    assert torch.ones(2, requires_grad=True).exp().requires_grad


KEPT = torch.ones(6)
ROWS = (torch.ones(3), torch.ones(3))
NUMPY = np.ones(3, np.float32)
STORAGE = torch.ones(3).untyped_storage()
NOT_NEW: dict[str, Callable[[Any], Any]] = {
    "the input": lambda x: x,
    "a view of it": lambda x: x.view(3),
    "its detached self": lambda x: x.detach(),
    "what is kept": lambda x: KEPT[:3],
    "what was kept itself": lambda x: ROWS[0],
    "what is kept as storage": lambda x: torch.empty(0).set_(STORAGE, 0, (3,)),
    "NumPy's": lambda x: torch.from_numpy(NUMPY),
    "strided": lambda x: torch.ones(6)[::2],
    "negative": lambda x: torch._neg_view(torch.full((3,), -1.0)),
    "a Parameter": lambda x: torch.nn.Parameter(torch.ones(3)),
}


@pytest.mark.parametrize("what", NOT_NEW)
@pytest.mark.parametrize("late", [False, True])
def test_outputs_are_new(what: str, late: bool) -> None:
    gives = NOT_NEW[what]
    calls = [0]

    def run(x: Any) -> Any:
        calls[0] += 1
        return torch.ones(3) if late and calls[0] < TIMES else gives(x)

    op, x = ferrule.adopt("not_new", RULE, run=run, version=f"{what} {late}"), torch.ones(3)
    for _ in range(2 * TIMES):
        y = op(x)
        assert type(y) is torch.Tensor and y.is_contiguous() and not y.requires_grad
        y.zero_()
    assert x.sum() == 3 and KEPT.sum() == 6 and ROWS[0].sum() == 3 and NUMPY.sum() == 3
    assert torch.empty(0).set_(STORAGE, 0, (3,)).sum() == 3
    copies = 0 if what == "a Parameter" else 2 * TIMES - late * (TIMES - 1)
    assert op.counts["output copy"] == copies


def test_outputs_are_out_of_reach_of_weak_references() -> None:
    made: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()

    def run(x: Any) -> Any:
        y = made.get("y")
        if y is None:
            y = made["y"] = x * 2
        return y

    op, x = ferrule.adopt("weak", RULE, run=run, version=1), torch.ones(3)
    for _ in range(2 * TIMES):
        y = op(x)
        assert y.tolist() == [2, 2, 2]
        y.zero_()


def test_several_outputs_are_new() -> None:
    kept: list[Any] = []

    def run(x: Any) -> Any:
        a, b = x + 1, x + 2
        if len(kept) < 2:
            kept.append(None)
            return a, b
        kept.append((a, b))
        return kept[-1] if len(kept) % 2 else [a, b]

    op, x = ferrule.adopt("pairs", "x[N]:T -> a[N]:T, b[N]:T", run=run, version=1), torch.ones(2)
    for _ in range(6):
        a, b = op(x)
        assert a.tolist() == [2, 2] and b.tolist() == [3, 3]
        a.zero_(), b.zero_()
    assert all(pair is None or pair[0].sum() == 4 for pair in kept)
    assert op.counts["output copy"] == 8


WRONG: dict[str, tuple[Any, str]] = {
    "shape": (torch.ones(4), r"returned float32 of shape \(4,\) on cpu for output 'y'"),
    "dtype": (torch.ones(3, dtype=torch.float64), r"returned float64 of shape \(3,\)"),
    "device": (torch.ones(3, device="meta"), r"of shape \(3,\) on meta"),
    "layout": (torch.ones(3).to_sparse(), r"and layout torch\.sparse_coo"),
    "none": (None, "returned a NoneType for output 'y'"),
    "array": (np.ones(3, np.float32), "returned a ndarray for output 'y'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_outputs_are_refused_late(what: str) -> None:
    wrong, message = WRONG[what]
    calls = [0]

    def run(x: Any) -> Any:
        calls[0] += 1
        return x + 1 if calls[0] < TIMES else wrong

    op, x = ferrule.adopt("late", RULE, run=run, version=what), torch.ones(3)
    for _ in range(TIMES - 1):
        op(x)
    with pytest.raises(KernelError, match=message):
        op(x)


def test_functions_that_write() -> None:
    returns: list[Any] = [None]

    def run(x: Any, y: Any) -> Any:
        assert y.is_contiguous() and not y.requires_grad
        torch.mul(x, 2, out=y)
        return y if returns[0] == "its own" else returns[0]

    op, x = ferrule.adopt("writes", RULE, run=run, version=1), torch.ones(3)
    results = [op(x) for _ in range(TIMES)]
    returns[0] = "its own"
    results += [op(x) for _ in range(TIMES)]
    assert len({y.data_ptr() for y in results}) == len(results)
    assert all(y.tolist() == [2, 2, 2] for y in results) and not op.counts
    returns[0] = torch.ones(3)
    with pytest.raises(KernelError, match="yet returned an array that is none of them"):
        op(x)


def test_what_sees_torchs_operators_sees_repeated_calls() -> None:
    op, x = doubling(), torch.ones(3)
    for _ in range(2):
        op(x)
    name = f"doubling_{op.digest}"
    seen: list[str] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None):
            seen.append(function.name())
            return function(*args, **(kwargs or {}))

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Mode():
        op(x)
    assert seen.pop() == f"ferrule::{name}" and not seen
    with Functions():
        op(x)
    assert seen == [f"ferrule.{name}.default"]
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert type(op(x)) is not torch.Tensor
    with torch.profiler.profile() as profile:
        op(x)
    assert any(name in event.key for event in profile.key_averages())
    with torch.profiler.profile() as profile:
        op(torch.ones(3, requires_grad=True))
    assert any(name in event.key for event in profile.key_averages())
    assert torch.jit.trace(op, (x,))(torch.ones(3) * 3).tolist() == [6, 6, 6]
    for transform in (torch.vmap, torch.func.functionalize):
        torch.testing.assert_close(transform(op)(torch.ones(2, 3)), torch.full((2, 3), 2.0))
    with torch.inference_mode():
        assert op(x).is_inference() and frames(lambda: op(x)) == ["Op.__call__"]
    with fastcall.bypassed():
        assert len(frames(lambda: op(x))) > 5


def test_tensors_without_plain_memory_after_usual_ones() -> None:
    op, x = doubling(), torch.ones(3)
    for _ in range(2):
        op(x)
    assert op(torch._efficientzerotensor(3)).tolist() == [0, 0, 0]
    assert op(x.to("meta")).is_meta
    assert op(torch._neg_view(x)).tolist() == [-2, -2, -2]
    with pytest.raises(ferrule.KernelTypeError, match=r"layout torch\.sparse_coo"):
        op(x.to_sparse())
    z = torch.complex(x, x).conj()
    for _ in range(TIMES):
        torch.testing.assert_close(op(z), (z * 2).resolve_conj())


def test_more_than_inputs_in_repeated_calls() -> None:
    def run(x: Any, w: Any, y: Any, *, stream: int, packed: Any, seen: Any) -> None:
        assert stream == 0
        seen += 1
        torch.mul(x, packed, out=y).add_(seen)

    op = ferrule.adopt(
        "with_more", "x[N]:T, w[N]:T -> y[N]:T", run=run, state={"seen": "T[1]"},
        prepared={"packed": (lambda w: w * 10, "w")}, version=1,
    )  # fmt: skip
    x, w = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    with torch.no_grad():
        got = [op(x, w)[0].item() for _ in range(TIMES)]
        assert op.counts["prepare"] == 1
        w.mul_(2)
        got += [op(x, w)[0].item() for _ in range(TIMES)]
    assert got == [11, 12, 13, 24, 25, 26] and op.counts["prepare"] == 2
    assert known_layouts(op) == 1


def test_made_functions_and_conditions_by_layout() -> None:
    def make(*, device: str, T: str, small: bool) -> Any:
        return lambda x: x + (1 if small else 2) + (10 if T == "float64" else 0)

    op = ferrule.adopt("made_by", "x[N]:T -> y[N]:T", make=make, constants={"small": "N < 3"})
    for _ in range(TIMES):
        got = [
            op(torch.zeros(n, dtype=t))[0] for n in (2, 3) for t in (torch.float32, torch.float64)
        ]
        assert got == [1, 11, 2, 12]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_numbers_of_every_float_dtype(dtype: str) -> None:
    rule = f"x[N]:T, k:{dtype} -> y[N]:T"
    op = ferrule.adopt("by_number", rule, run=lambda x, k: x * k, version=dtype)
    x = torch.ones(2)
    for _ in range(TIMES):
        assert op(x, 1.5).tolist() == [1.5, 1.5]
        with pytest.raises(ferrule.KernelTypeError, match="got True of type bool"):
            op(x, True)
    assert frames(lambda: op(x, 2.5)) == ["Op.__call__"]


def test_layouts_are_forgotten_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_calls, "_MOST_KNOWN", 4)
    op = ferrule.adopt("many", RULE, run=double, version="many")
    for n in (*range(1, 10), *range(1, 10)):
        assert op(torch.ones(n)).sum() == 2 * n
        assert known_layouts(op) <= 4


# -- calls that autograd records -----------------------------------------------------------------


def recording() -> ferrule.Op:
    """y = x * w * k, whose derivative is a function; with an output that is a constant."""

    def run(x: Any, w: Any, k: Any) -> Any:
        return (x * k if w is None else x * w * k), x + 1

    op = ferrule.adopt(
        "recording", "x[N]:T, w[N]:T?, k:float32 -> y[N]:T, c[N]:T~", run=run, version=1
    )

    def vjp(primals: Any, cotangents: Any, outputs: Any) -> Any:
        x, w, k = primals
        g = cotangents[0] * k
        return g if w is None else g * w, None if w is None else g * x, None

    op.def_vjp(vjp, version=1)
    return op


def plain(x: Any, w: Any, k: float) -> Any:
    return (x * k if w is None else x * w * k), (x + 1).detach()


@pytest.mark.parametrize("weight", [None, False, True])
def test_repeated_gradients(weight: bool | None) -> None:
    op = recording()
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    w = None if weight is None else torch.tensor([5.0, 7.0], requires_grad=weight)
    wanted = [v for v in (x, w) if v is not None and v.requires_grad]
    for k in (1.5, -2.0, 3.0):
        found, constant = op(x, w, k)
        expected, expected_constant = plain(x, w, k)
        torch.testing.assert_close((found, constant), (expected, expected_constant))
        assert found.grad_fn is not None and not constant.requires_grad
        grads = torch.autograd.grad(found.sin().sum(), wanted, create_graph=True)
        others = torch.autograd.grad(expected.sin().sum(), wanted, create_graph=True)
        torch.testing.assert_close(grads, others)
        twice, twice_expected = (
            torch.autograd.grad(sum((g**2).sum() for g in gs), wanted) for gs in (grads, others)
        )
        torch.testing.assert_close(twice, twice_expected)
    with torch.no_grad():
        assert not op(x, w, 1.0)[0].requires_grad
    assert op(x, w, 2)[0].grad_fn is not None  # an int, which torch makes a float of


def kernel_op() -> ferrule.Op:
    op = ferrule.op(
        "repeated_exp", RULE, grid="x.size", threadgroup=256,
        metal="uint i = thread_position_in_grid.x; y[i] = metal::exp(x[i]);",
    )  # fmt: skip
    op.def_vjp(
        ferrule.op(
            "repeated_exp_vjp", "y[*S]:T, cotangent[*S]:T -> x_grad[*S]:T",
            metal="uint i = thread_position_in_grid.x; x_grad[i] = y[i] * cotangent[i];",
            grid="y.size", threadgroup=256,
        )
    )  # fmt: skip
    return op


def test_a_recorded_call_runs_no_python_of_its_own() -> None:
    op, x = kernel_op(), torch.ones(3, requires_grad=True)
    for _ in range(2):
        op(x)
    assert frames(lambda: op(x)) == ["Op.__call__"]
    y = op(x)
    assert type(y.grad_fn).__name__ == "Ferrule_repeated_expBackward"
    saved = y.grad_fn.saved_tensors  # type: ignore[union-attr]
    assert len(saved) == 1 and saved[0].data_ptr() == y.data_ptr()
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], x.exp())


def test_saved_tensors_are_seen_by_hooks_and_versions() -> None:
    op, x = kernel_op(), torch.ones(3, requires_grad=True)
    packed: list[Any] = []

    def unpack(i: int) -> Any:
        return packed[i]

    def pack(tensor: Any) -> int:
        packed.append(tensor.detach())
        return len(packed) - 1

    for _ in range(TIMES):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            y = op(x)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], x.exp())
    assert len(packed) == TIMES
    y = op(x)
    with torch.no_grad():
        y.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    z = torch.utils.checkpoint.checkpoint(op, x, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(z.sum(), x)[0], x.exp())


def test_what_is_not_recorded_after_calls_that_are() -> None:
    op, x = kernel_op(), torch.ones(3, requires_grad=True)
    for _ in range(2):
        op(x)
    with torch._C._AutoDispatchBelowAutograd():
        assert op(x).grad_fn is None
    with torch.inference_mode():
        assert op(x).is_inference()
    torch.testing.assert_close(torch.func.grad(lambda x: op(x).sum())(x.detach()), x.detach().exp())
    with pytest.raises(KernelError, match="no forward-mode derivative"):
        torch.func.jvp(op, (x.detach(),), (torch.ones(3),))


def test_a_missing_derivative_is_said_in_repeated_calls() -> None:
    op, x = doubling(), torch.ones(3, requires_grad=True)
    for _ in range(TIMES):
        y = op(x)
        with pytest.raises(KernelError, match="op 'doubling' has no derivative"):
            y.sum().backward()


def test_autocast_casts_what_is_recorded() -> None:
    op = ferrule.adopt("cast_recorded", RULE, run=double, autocast="cast")
    op.def_vjp(lambda primals, cotangents, outputs: (cotangents[0] * 2,))
    x = torch.ones(3, requires_grad=True)
    for _ in range(TIMES):
        assert op(x).dtype == torch.float32
        with torch.autocast("cpu"):
            y = op(x)
        assert y.dtype == torch.bfloat16
        assert torch.autograd.grad(y.sum(), x)[0].dtype == torch.float32


def test_many_inputs_are_recorded() -> None:
    names = [f"x{i}" for i in range(64)]
    rule = ", ".join(f"{name}[N]:T" for name in names) + " -> y[N]:T"
    op = ferrule.adopt("many_inputs", rule, run=lambda *xs: sum(xs), version=1)
    op.def_vjp(
        lambda primals, cotangents, outputs: tuple(cotangents[0] for _ in primals), version=1
    )
    xs = [torch.ones(2, requires_grad=i == 63) for i in range(64)]
    for _ in range(TIMES):
        y = op(*xs)
        assert y.tolist() == [64, 64]
        assert torch.autograd.grad(y.sum(), xs[63])[0].tolist() == [1, 1]


def test_first_calls_within_a_transform() -> None:
    """What is found out about torch at the first call is not what a transform makes of it."""
    script = """
import torch, ferrule
op = ferrule.op("f", "x[N]:float32 -> y[N]:float32", run=lambda x: x * 2, version=1)
op.def_vjp(lambda primals, cotangents, outputs: (cotangents[0] * 2,), version=1)
x = torch.ones(3)
print(torch.func.grad(lambda x: op(x).sum())(x), op(x))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "tensor([2., 2., 2.]) tensor([2., 2., 2.])\n"
