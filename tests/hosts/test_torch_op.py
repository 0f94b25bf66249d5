"""Ops in torch: values, layouts, opcheck, torch's modes and kinds of tensors."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import ferrule
import torch_ops
from ferrule import KernelError, KernelTypeError, Op
from torch_ops import CASES, DIFFERENTIABLE, EACH, Case, I, cloned, equal, is_float, rand

ERRORS = (KernelError, RuntimeError)  # Dynamo raises its own, with the same text
ALL = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
LAYOUTS = {
    "contiguous": lambda inputs: inputs, "strided": torch_ops.strided,
    "transposed": torch_ops.transposed, "expanded": torch_ops.expanded,
}  # fmt: skip
UTILITIES = (
    "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic",
    "test_aot_dispatch_static",
)  # fmt: skip


def leaves(inputs: Any) -> Any:
    """Inputs that require grad where they may."""
    return tuple(one.detach().requires_grad_() if is_float(one) else one for one in inputs)


@ALL
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values(case: Case, layout: str) -> None:
    for inputs in case.samples():
        found, expected = LAYOUTS[layout](inputs), cloned(inputs)
        if layout == "expanded":
            expected = cloned(found)
            if case.mutates:
                found = torch_ops.strided(found)
        equal(case.op(*found), case.reference(*expected))
        equal(found, expected)  # written in place, or not at all


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param(case, layout, id=f"{case.name}-{layout}")
        for case in CASES
        for layout in LAYOUTS
        if not (case.mutates and layout == "expanded")  # it cannot be written to
    ],
)
def test_opcheck(case: Case, layout: str) -> None:
    for inputs in case.samples():
        torch.library.opcheck(case.op.torch_op, LAYOUTS[layout](inputs), test_utils=UTILITIES)


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=lambda case: case.name)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck_with_gradients(case: Case, layout: str) -> None:
    for inputs in case.samples():
        given = leaves(LAYOUTS[layout](inputs))
        torch.library.opcheck(case.op.torch_op, given, test_utils=UTILITIES)


def test_the_name_says_what_it_is() -> None:
    op = EACH["plain"].op
    assert isinstance(op.torch_op, torch._ops.OpOverload)
    assert op.torch_op.name() == f"ferrule::plain_{op.digest}"
    assert str(op.torch_op._schema).endswith("(Tensor x, Tensor w) -> Tensor")
    assert str(EACH["put"].op.torch_op._schema).endswith(
        "(Tensor(a0!) cache, Tensor row, SymInt at) -> Tensor"
    )
    assert str(EACH["affine"].op.torch_op._schema).endswith(
        "(Tensor x, Tensor? b, float s, SymInt n, bool flip) -> Tensor"
    )


# -- modes -----------------------------------------------------------------------------------------


@ALL
def test_modes_that_record_nothing(case: Case) -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        inputs = cloned(case.samples()[0])
        expected = cloned(inputs)
        if not case.mutates:
            inputs = leaves(inputs)
        with mode():
            found = case.op(*inputs)
            equal(found, case.reference(*expected))
            equal(inputs, expected)
        assert not any(one.requires_grad for one in torch.utils._pytree.tree_leaves(found))
        with torch.inference_mode():
            inside = cloned(case.samples()[0])  # made in that mode
            again = case.op(*inside)
        equal(again, found)
        assert all(one.is_inference() for one in torch.utils._pytree.tree_leaves(again))


@ALL
def test_tensors_without_values(case: Case) -> None:
    for inputs in case.samples():
        expected = case.reference(*cloned(inputs))
        meta = [one.to("meta") if isinstance(one, torch.Tensor) else one for one in inputs]
        found = case.op(*meta)
        alike(found, expected, "meta")
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for v in inputs]
            alike(case.op(*fake), expected, "cpu")
        alike(case.op(*fake), expected, "cpu")  # outside of the mode, too


def alike(found: Any, expected: Any, device: str) -> None:
    """Fail unless tensors without values have the right shapes, dtypes and strides."""
    pairs = zip(*map(torch.utils._pytree.tree_leaves, (found, expected)), strict=True)
    for one, other in pairs:
        assert (one.shape, one.dtype, one.device.type) == (other.shape, other.dtype, device)
        assert one.is_contiguous()


@ALL
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(case: Case, mode: str) -> None:
    inputs = case.samples()[0]
    graph = make_fx(case.op, tracing_mode=mode)(*cloned(inputs))
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert case.op.torch_op in targets
    found, expected = cloned(inputs), cloned(inputs)
    equal(graph(*found), case.reference(*expected))
    equal(found, expected)


@ALL
def test_fx_symbolic_trace(case: Case) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return case.op(x, *case.samples()[0][1:])

    graph = torch.fx.symbolic_trace(Model())
    assert case.op.torch_op in [node.target for node in graph.graph.nodes]
    first = case.samples()[0][0]
    equal(graph(first.clone()), Model()(first.clone()))


@ALL
def test_functionalize(case: Case) -> None:
    if case.mutates:  # torch.func.functionalize takes no op of anyone that writes in place
        with pytest.raises(RuntimeError, match="alias annotations"):
            torch.func.functionalize(case.op)(*cloned(case.samples()[0]))
        return
    found, expected = cloned(case.samples()[0]), cloned(case.samples()[0])
    equal(torch.func.functionalize(case.op)(*found), case.reference(*expected))
    equal(found, expected)
    graph = make_fx(torch.func.functionalize(case.op))(*cloned(expected))
    expected = cloned(case.samples()[0])
    found = cloned(expected)
    equal(graph(*found), case.reference(*expected))
    equal(found, expected)


# -- kinds of tensors ------------------------------------------------------------------------------


class Functions(torch.Tensor):
    """A subclass that sees torch's functions."""

    seen: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        cls.seen.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


class Wrapped(torch.Tensor):
    """A subclass that has no memory, but holds a tensor."""

    inner: torch.Tensor
    seen: ClassVar[list[Any]] = []

    def __repr__(self) -> str:
        return "Wrapped()"

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device,
            requires_grad=inner.requires_grad,
        )  # fmt: skip
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        cls.seen.append(function)
        args, kwargs = torch.utils._pytree.tree_map_only(
            cls, lambda one: one.inner, (args, kwargs or {})
        )
        found = function(*args, **kwargs)
        return torch.utils._pytree.tree_map_only(torch.Tensor, cls, found)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Wrapped:
        return Wrapped(inner["inner"])


@ALL
def test_subclasses_of_tensors(case: Case) -> None:
    inputs = case.samples()[0]
    expected = case.reference(*cloned(inputs))
    for kind in (Functions, Wrapped):
        given = [
            one if not is_float(one) else kind(one.clone()) if kind is Wrapped
            else one.clone().as_subclass(kind) for one in inputs
        ]  # fmt: skip
        kind.seen.clear()
        found = case.op(*given)
        assert case.op.torch_op in kind.seen
        leaves_ = torch.utils._pytree.tree_leaves(found)
        assert all(type(one) is kind for one in leaves_)
        plain = torch.utils._pytree.tree_map(
            lambda one, kind=kind: one.inner if kind is Wrapped else one.as_subclass(torch.Tensor),
            found,
        )
        equal(plain, expected)


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=lambda case: case.name)
def test_gradients_of_subclasses(case: Case) -> None:
    inputs = leaves(case.samples()[0])
    expected = leaves(case.samples()[0])
    wrapped = [Wrapped(one).detach().requires_grad_() if is_float(one) else one for one in inputs]
    for function, given in ((case.op, wrapped), (case.reference, expected)):
        found = function(*given)
        found = found if isinstance(found, tuple) else (found,)
        sum(one.square().sum() for one in found).backward()
    for one, other in zip(wrapped, expected, strict=True):
        if is_float(other):
            equal(one.grad.inner, other.grad)


def test_compiled_with_subclasses() -> None:
    case = EACH["gate"]
    x, w = case.samples()[0]
    found = torch.compile(case.op, fullgraph=True, backend="aot_eager")(Wrapped(x), Wrapped(w))
    equal(found.inner, case.reference(x, w))


@pytest.mark.filterwarnings("ignore:op '.*' is called . times by vmap")
def test_parameters_and_modules() -> None:
    class Gate(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(rand(4))
            self.op = EACH["gate"].op

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.op(x, self.w)

    model = Gate()
    x = rand(2, 4)
    equal(model(x), EACH["gate"].reference(x, model.w))
    assert list(model.state_dict()) == ["w"]
    other = copy.deepcopy(model)
    assert other.op is model.op
    assert other.double()(x.double()).dtype == torch.float64
    equal(torch.func.functional_call(model, {"w": torch.ones(4)}, (x,)), x * torch.sigmoid(x))
    stacked = torch.func.stack_module_state([Gate(), Gate()])[0]
    found = torch.vmap(lambda w: torch.func.functional_call(model, {"w": w}, (x,)))(stacked["w"])
    equal(found[0], found[1])


def test_lazy_conjugates_and_negatives() -> None:
    op = ferrule.op(
        "parts", "x[N]:complex64, y[N]:float32 -> z[N]:complex64", run=lambda x, y: x * y
    )
    body = ferrule.op(
        "twice", "x[N]:T -> y[N]:T", metal=I + "y[i] = x[i] + x[i];", grid="N", threadgroup=32
    )
    z = torch.complex(rand(4), rand(4) + 1)
    negative = z.conj().imag  # a view that says so
    assert z.conj().is_conj() and negative.is_neg()
    equal(op(z.conj(), negative), z.conj() * negative)
    equal(body(z.conj()), 2 * z.conj())
    equal(body(negative), 2 * negative)
    torch.library.opcheck(body.torch_op, (negative,), test_utils=UTILITIES)
    equal(torch.compile(body, backend="aot_eager")(negative), 2 * negative)
    whole = z.clone()
    for c, v in ((whole.conj().imag, torch.ones(4)), (torch.ones(4), negative)):
        with pytest.raises(KernelError, match="'add_in_place' writes in place, and an input is"):
            add(c, v)
    c = torch.ones(4)
    add(c, negative.resolve_neg())
    equal(c, 1 + negative)


# -- memory ----------------------------------------------------------------------------------------


@ALL
def test_outputs_are_new_each_time(case: Case) -> None:
    inputs = cloned(case.samples()[0])
    first, second = (torch.utils._pytree.tree_leaves(case.op(*inputs)) for _ in range(2))
    memory = [one.untyped_storage().data_ptr() for one in (*first, *second)]
    memory += [one.untyped_storage().data_ptr() for one in inputs if isinstance(one, torch.Tensor)]
    assert len(set(memory)) == len(memory)


def test_a_runner_that_returns_an_input_or_what_it_keeps() -> None:
    kept = torch.zeros(3)
    for name, run in (
        ("itself", lambda x: x), ("part", lambda x: x.view(3)), ("detached", lambda x: x.detach()),
    ):  # fmt: skip
        op = ferrule.op(f"returns_{name}", "x[N]:T -> y[N]:T", run=run)
        x = rand(3)
        y = op(x)
        equal(y, x)
        y.zero_()
        assert x.abs().sum() > 0 and op.counts["output copy"] == 1
        torch.library.opcheck(op.torch_op, (x,), test_utils=UTILITIES)
    twice = ferrule.op("twice_the_same", "x[N]:T -> y[N]:T, z[N]:T", run=lambda x: (x + 1,) * 2)
    y, z = twice(kept)
    y.zero_()
    equal(z, kept + 1)


def test_the_same_tensor_twice() -> None:
    q = rand(2, 3, 4)
    equal(EACH["attention"].op(q, q, q, 1.0), EACH["attention"].reference(q, q, q, 1.0))
    whole = rand(8)
    equal(EACH["plain"].op(whole[:4], whole[2:6]), whole[:4] * whole[2:6])


add = ferrule.op(
    "add_in_place", "c[L]:T!, v[L]:T ->", metal=I + "c[i] += v[i];", grid="L", threadgroup=8
)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_what_is_written_in_place_and_shares_memory(backend: str | None) -> None:
    def call(c: torch.Tensor, v: torch.Tensor) -> None:
        add(c, v)

    f = call if backend is None else torch.compile(call, backend=backend)
    for c, v in ((slice(0, 4), slice(4, 8)), (slice(0, 8, 2), slice(1, 8, 2))):
        apart, expected = torch.arange(8.0), torch.arange(8.0)
        f(apart[c], apart[v])  # parts of one tensor, but not the same elements
        expected[c] += expected[v]
        equal(apart, expected)
    for c, v in (
        (slice(0, 8), slice(0, 8)), (slice(0, 4), slice(2, 6)), (slice(1, 5), slice(0, 4)),
        (slice(0, 8, 2), slice(0, 4)),
    ):  # fmt: skip
        whole = torch.arange(8.0)
        expected = whole.clone()
        expected[c] += expected.clone()[v]
        f(whole[c], whole[v])  # what is read is what was there before
        equal(whole, expected)
    with pytest.raises(ERRORS, match=r"single memory location|in one place"):
        f(torch.zeros(1).expand(3), torch.ones(3))


def test_what_is_written_in_place_twice_is_refused() -> None:
    both = ferrule.op(
        "both", "a[L]:T!, b[L]:T! ->", metal=I + "a[i] = 1; b[i] = 2;", grid="L", threadgroup=8
    )
    x = torch.zeros(8)
    both(x[:4], x[4:])
    assert x.tolist() == [1] * 4 + [2] * 4
    for backend in (None, "aot_eager"):
        f = both if backend is None else torch.compile(both, backend=backend)
        with pytest.raises(ERRORS, match="of op 'both' shares memory with input"):
            f(x[:4], x[2:6])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_autograd_sees_what_is_written_in_place(layout: str) -> None:
    if layout == "expanded":
        return
    (c, v) = LAYOUTS[layout]((torch.ones(3), torch.arange(3.0)))
    version = c._version
    add(c, v)
    assert c._version == version + 1
    equal(c, 1 + v)


# -- copies, threads -------------------------------------------------------------------------------


@ALL
def test_pickling(case: Case) -> None:
    again = pickle.loads(pickle.dumps(case.op))  # noqa: S301
    assert again is not case.op and again.digest == case.op.digest
    assert again.torch_op == case.op.torch_op
    found, expected = cloned(case.samples()[0]), cloned(case.samples()[0])
    equal(again(*found), case.op(*expected))
    model = torch.nn.Module()
    model.op = case.op
    model = pickle.loads(pickle.dumps(model))  # noqa: S301
    assert model.op.digest == case.op.digest
    assert copy.copy(case.op) is case.op and copy.deepcopy(case.op) is case.op


def test_pickles_in_a_new_process() -> None:
    data = pickle.dumps([case.op for case in CASES])
    script = (
        "import pickle, sys; ops = pickle.loads(sys.stdin.buffer.read()); "
        "print(*[op.torch_op.name() for op in ops])"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], input=data, capture_output=True, check=True,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert found.stdout.decode().split() == [case.op.torch_op.name() for case in CASES]


def importable(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_what_cannot_be_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    op = ferrule.op("lambda", "x[N]:T -> y[N]:T", run=lambda x: x)
    with pytest.raises(KernelError, match=r"'lambda' cannot be pickled: `run`.*top level"):
        pickle.dumps(op)
    op = ferrule.op("ruled", "x[N]:T -> y[N]:T", run=importable)
    op.def_vjp(lambda primals, cotangents, outputs: cotangents)
    with pytest.raises(KernelError, match="'ruled' cannot be pickled: `def_vjp`"):
        pickle.dumps(op)
    op = ferrule.op("changed", "x[N]:T -> y[N]:T", run=importable)
    data = pickle.dumps(op)
    monkeypatch.setattr(sys.modules[__name__], "importable", torch.sin)
    with pytest.raises(KernelError, match=r"`run` .* of op 'changed' is another"):
        pickle.loads(data)  # noqa: S301


def test_threads() -> None:
    fresh = ferrule.op(
        "threads", "x[*S,D]:T, w[D]:T -> y[*S,D]:T", grid="x.size", threadgroup=64,
        metal=I + "y[i] = x[i] * w[i % D] + 1;",
    )  # fmt: skip
    wrong: list[object] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            for n in range(1, 50):
                x, w = torch.rand(n, 3, generator=generator), torch.rand(3, generator=generator)
                if not torch.allclose(fresh(x, w), x * w + 1):
                    wrong.append((seed, n))
                x = x.requires_grad_()
                EACH["gate"].op(x, w).sum().backward()
                if x.grad is None:
                    wrong.append((seed, n, "grad"))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong


# -- autocast --------------------------------------------------------------------------------------


def policy(name: str | None) -> Op:
    op = ferrule.op(
        f"cast_{name}", "x[N]:T, w[N]:T, k[N]:int32 -> y[N]:T",
        metal=I + "y[i] = x[i] * w[i] + k[i];", grid="N", threadgroup=32, autocast=name,
    )  # fmt: skip

    @op.def_vjp
    def _(primals: Any, cotangents: Any, outputs: Any) -> Any:
        x, w, _ = primals
        return cotangents[0] * w, cotangents[0] * x, None

    return op


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        (None, torch.float32, torch.float32), (None, torch.bfloat16, torch.bfloat16),
        ("cast", torch.float32, torch.bfloat16), ("cast", torch.float16, torch.bfloat16),
        ("float32", torch.bfloat16, torch.float32), ("float32", torch.float32, torch.float32),
    ],
)  # fmt: skip
def test_autocast(
    name: str | None, given: torch.dtype, expected: torch.dtype, backend: str | None
) -> None:
    op = policy(name)
    torch.compiler.reset()  # all ops have one code object, whose graphs are limited in number
    f = op if backend is None else torch.compile(op, backend=backend, fullgraph=True)
    x, w = (rand(n)[:3].to(given).requires_grad_() for n in (3, 4))
    k = torch.arange(3, dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16):
        y = f(x, w, k)
        with torch.autocast("cpu", enabled=False):
            assert op(x, w, k).dtype == given
    assert y.dtype == expected
    torch.testing.assert_close(y, (x.to(expected) * w.to(expected) + k).to(expected))
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype == given
    assert op(x, w, k).dtype == given
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert op(x, w, k).dtype == expected  # nothing is recorded


def test_autocast_does_not_mix_what_it_leaves() -> None:
    x, w, k = rand(3), rand(3).bfloat16(), torch.arange(3, dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(KernelError, match="T is float32 by input 'x'"):
            policy(None)(x, w, k)
        assert policy("cast")(x, w, k).dtype == torch.bfloat16
        assert policy("float32")(x, w, k).dtype == torch.float32
        with pytest.raises(KernelError, match="T is float64 by input 'x'"):
            policy("cast")(x.double(), w, k)  # autocast leaves float64, in torch's own ops, too


def test_autocast_and_what_is_written_in_place() -> None:
    put = ferrule.op(
        "put_cast", "c[L]:T!, v[L]:T ->", metal=I + "c[i] = v[i];", grid="L", threadgroup=8,
        autocast="cast",
    )  # fmt: skip
    c, v = torch.zeros(3), torch.ones(3)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(KernelError, match=r"'v'.* T is float32 by input 'c'"),
    ):
        put(c, v)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch, of quantized and nested tensors
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: None, r"got None, expected a tensor: w\[D\]:T\."),
        (lambda: 3.0, r"got a float, expected a tensor: w\[D\]:T\."),
        (lambda: torch.ones(3).to_sparse(), r".*layout torch.sparse_coo, .*; give x.to_dense\(\)"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 1, 0, torch.qint8), "got a quantized"),
        (lambda: torch.nested.nested_tensor([torch.ones(3)]), "got a nested tensor"),
    ],
)  # fmt: skip
def test_what_is_no_dense_tensor_is_refused(wrong: Any, message: str) -> None:
    body = "uint i = thread_position_in_grid.x; y[i] = x[i] * w[i % D];"
    op = ferrule.op(
        "dense", "x[*S,D]:T, w[D]:T -> y[*S,D]:T", metal=body, grid="x.size", threadgroup=64
    )
    x, given = torch.ones(2, 3), wrong()
    for _ in range(2):  # the first call, and those that C carries out
        with pytest.raises(KernelTypeError, match=rf"^\[op\] input 'w' of op 'dense': {message}"):
            op(x, given)
        op(x, x[0])


# -- what torch was told ---------------------------------------------------------------------------


def test_inference_tensors_are_not_written_outside_of_inference_mode() -> None:
    """As torch's own operators have it."""
    put = EACH["put"].op
    cache, row, at = EACH["put"].samples()[0]
    expected = cache.clone()
    put(expected, row, at)
    with torch.inference_mode():
        theirs, read, kept = cache.clone(), row.clone(), row.clone()
        put(theirs, read, at)
        for call in (put, put.torch_op, torch.compile(put, backend="aot_eager", fullgraph=True)):
            for beside in (row, kept):  # made outside, and inside
                mine = cache.clone()
                call(mine, beside, at)
                equal(mine, expected)
            mine, version = cache.detach(), cache._version
            call(mine, row, at)
            assert cache._version > version
            equal(cache, expected)
    equal(theirs, expected)
    for call in (put, put.torch_op):
        for around in (torch.no_grad(), torch.enable_grad()):
            with around:
                with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
                    read.zero_()
                with pytest.raises(
                    KernelError, match=r"input 'cache' of op 'put' .* inference tens"
                ):
                    call(theirs, row, at)
                mine = cache.clone()
                call(mine, kept, at)  # what is read may be one
                equal(mine, expected)
    equal(theirs, expected)


def histogram() -> Op:
    return ferrule.op(
        "histogram", "x[N]:float32 -> y[4]:float32", grid="N", threadgroup=64, init_value=0,
        metal=I + "atomic_fetch_add_explicit(&y[uint(x[i])], 1.0f, memory_order_relaxed);",
        atomic_outputs=True,
    )  # fmt: skip


@pytest.fixture
def deterministic() -> Iterator[None]:
    threads = ferrule.get_threads()
    torch.compiler.reset()
    try:
        ferrule.set_threads(2)
        torch.use_deterministic_algorithms(True)
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        ferrule.set_threads(threads)


@pytest.mark.usefixtures("deterministic")
def test_atomics_are_not_deterministic() -> None:
    op, x = histogram(), torch.tensor([0.0, 1, 1, 3])
    plain = EACH["plain"]
    equal(plain.op(*plain.samples()[0]), plain.reference(*plain.samples()[0]))
    words = "op 'histogram' does not have a deterministic implementation.*use_deterministic_algor"
    calls = {
        "op": op, "operator": op.torch_op,
        "compiled": torch.compile(op, backend="aot_eager"),
    }  # fmt: skip
    for call in calls.values():
        with pytest.raises(Exception, match=words):
            call(x)
        torch.use_deterministic_algorithms(False)
        equal(call(x), torch.tensor([1.0, 2, 0, 1]))
        torch.use_deterministic_algorithms(True)
        with pytest.raises(Exception, match=words):
            call(x)
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.warns(ferrule.FerruleWarning, match=words):
        equal(op(x), torch.tensor([1.0, 2, 0, 1]))
    torch.use_deterministic_algorithms(True)
    ferrule.set_threads(1)
    for call in (op, op.torch_op):
        equal(call(x), torch.tensor([1.0, 2, 0, 1]))


def test_atomics_run_in_c_while_nobody_asks_for_determinism(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    op, x = histogram(), torch.tensor([0.0, 1, 1, 3])
    op(x)
    monkeypatch.setattr(op, "_register", None)  # what calls in Python begin with
    equal(op(x), torch.tensor([1.0, 2, 0, 1]))


ADD = "atomic_fetch_add_explicit({}, 1.0f, memory_order_relaxed);"


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    ("to", "header", "flag"),
    [
        ("&y[uint(x[i])]", "", True),
        ("(device atomic_float*)y + uint(x[i])", "", False),
        ("reinterpret_cast<volatile device metal::atomic<float>*>(y) + uint(x[i])", "", False),
        ("(atomic_float device*)(y + uint(x[i]))", "", False),
        ("at(y, x[i])", "device atomic_float* at(device float* y, float x)"
         " { return (device atomic_float*)y + uint(x); }", False),
    ],
)  # fmt: skip
def test_atomics_of_kernels_and_casts(to: str, header: str, flag: bool) -> None:
    """Calls of a kernel are told, those that are known from before, too."""
    body = I + ADD.format(to)
    op = ferrule.op(
        "sums", "x[N]:float32 -> y[4]:float32", grid="N", threadgroup=64, init_value=0, metal=body,
        header=header, atomic_outputs=flag,
    )  # fmt: skip
    kernel = ferrule.metal_kernel("sums", ["x"], ["y"], body, header, atomic_outputs=flag)

    def called(x: Any) -> Any:
        dtype = torch.float32 if isinstance(x, torch.Tensor) else np.float32
        return kernel(
            inputs=[x], grid=(4, 1, 1), threadgroup=(4, 1, 1), output_shapes=[(4,)],
            output_dtypes=[dtype], init_value=0,
        )[0]  # fmt: skip

    x, expected = torch.tensor([0.0, 1, 1, 3]), torch.tensor([1.0, 2, 0, 1])
    words = "'sums' does not have a deterministic implementation.*use_deterministic_algor"
    for call, tag in ((op, r"\[op\] op "), (called, r"\[metal_kernel\] kernel ")):
        for _ in range(2):
            with pytest.raises(ferrule.KernelError, match=f"^{tag}{words}"):
                call(x)
            torch.use_deterministic_algorithms(False)
            for _ in range(4):  # which are known then
                equal(call(x), expected)
            torch.use_deterministic_algorithms(True)
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pytest.warns(ferrule.FerruleWarning, match=words):
            equal(call(x), expected)
        torch.use_deterministic_algorithms(True)
        np.testing.assert_array_equal(call(x.numpy()), expected)  # torch has no part in it
    ferrule.set_threads(1)
    equal(called(x), expected)


@pytest.mark.usefixtures("deterministic")
def test_what_is_no_atomic_on_arrays() -> None:
    body = I + "// device atomic_float* p\nthreadgroup atomic_uint n; y[i] = 2 * x[i];"
    kernel = ferrule.metal_kernel("k", ["x"], ["y"], body)
    (found,) = kernel(
        inputs=[torch.ones(4)], grid=(4, 1, 1), threadgroup=(4, 1, 1), output_shapes=[(4,)],
        output_dtypes=[torch.float32],
    )  # fmt: skip
    equal(found, torch.full((4,), 2.0))
