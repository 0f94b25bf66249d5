"""What is prepared of weights: once for each of their versions, and freed with them."""

from __future__ import annotations

import gc
import mmap
import pickle
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule import KernelError, KernelTypeError, Op
from ferrule.hosts.torch import arrays as torch_host
from ferrule.operators.prepared import Prepared

RULE = "x[*S,K]:T, w[N,K]:T, scale[N]:T? -> y[*S,N]:T"


def pack(w: Any, scale: Any) -> Any:
    """The weights as the kernel wants them."""
    return (w if scale is None else w * scale[:, None]).T


def product(x: Any, w: Any, scale: Any, packed: Any) -> Any:
    return x @ packed


def linear(**more: Any) -> Op:
    options = {"run": product, "prepared": {"packed": (pack, "w", "scale")}, **more}
    op = ferrule.adopt("prepared_linear", RULE, **options)
    _ = op.torch_op
    op.counts.clear()  # of an op that was declared before, which torch runs
    return op


def expected(x: Any, w: Any, scale: Any = None) -> Any:
    return x @ pack(w, scale)


def prepared_of(op: Op) -> Prepared:
    registered: Any = op if op._operator is None else op._operator.op
    body: Any = registered.implementations[0]
    found: Prepared = body.prepared[0]
    return found


class Linear(torch.nn.Module):
    """A module that calls an op with its weights."""

    def __init__(self, op: Op, n: int = 4, k: int = 3) -> None:
        super().__init__()
        self.op = op
        self.w, self.scale = (
            torch.nn.Parameter(torch.randn(n, k)),
            torch.nn.Parameter(torch.ones(n)),
        )

    def forward(self, x: torch.Tensor) -> Any:
        return self.op(x, self.w, self.scale)


# -- what is declared ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prepared", "error", "message"),
    [
        (3, KernelTypeError, "`prepared` of op 'f': got 3, expected a dictionary"),
        ({"packed": pack}, KernelTypeError, "a name, a function and the inputs"),
        ({"packed": (pack,)}, KernelTypeError, "a name, a function and the inputs"),
        ({"packed": ("w", pack)}, KernelTypeError, "a name, a function and the inputs"),
        ({"packed": (pack, "v")}, KernelError, "'packed' is made of 'v', .* arrays x, w, c"),
        ({"packed": (pack, "n")}, KernelError, "'packed' is made of 'n', .* arrays x, w, c"),
        ({"packed": (pack, "w", "c")}, KernelError, "made of 'c', which each call writes"),
        ({"w": (pack, "w")}, KernelError, "'w' is taken"),
        ({"y": (pack, "w")}, KernelError, "'y' is taken"),
        ({"stream": (pack, "w")}, KernelError, "'stream' is taken"),
        ({"a b": (pack, "w")}, KernelError, "'a b' is taken, or no name"),
        ({"other": (np.copy, "w")}, KernelError, r"\(x, w, c, n, other\), but .* 'packed'"),
        ({}, KernelError, "missing a required argument: 'packed'"),
        (
            {"packed": (pack, "x")},
            KernelError,
            r"'packed' is made of \(x\), but .*:pack\(.*'scale'",
        ),
        (
            {"packed": (pack, "x", "w", "x")},
            KernelError,
            r"\(x, w, x\), but .* too many positional",
        ),
        ({"packed": (np.ones(3).sum, "w")}, KernelError, "`prepared` .* cannot be told"),
    ],
)
def test_wrong_declarations(prepared: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        ferrule.adopt(
            "f", "x[N]:T, w[N]:T, c[N]:T!, n:int32 -> y[N]:T", run=lambda x, w, c, n, packed: x,
            prepared=prepared,
        )  # fmt: skip


def test_it_is_part_of_the_identity() -> None:
    plain = ferrule.adopt("f", RULE, run=lambda x, w, scale, packed=None: x @ w.T)
    ops = [
        plain,
        linear(),
        linear(prepared={"packed": (lambda w, scale: w.T, "w", "scale")}),
        linear(prepared={"packed": (lambda w, scale=None: w.T, "w")}),
    ]
    assert len({op.digest for op in ops}) == 4
    assert linear().digest == ops[1].digest == Op.from_json(ops[1].to_json()).digest
    assert "prepared" not in plain.to_json()["implementations"][0]


def test_other_code_of_the_same_version_is_told() -> None:
    def of(factor: Any) -> Op:
        prepared = {"p": (lambda w: w * factor(), "w")}
        return ferrule.adopt("told", "x[N]:T, w[N]:T -> y[N]:T", run=lambda x, w, p: x * p,
                             prepared=prepared, version=1)  # fmt: skip

    x, (first, second) = torch.ones(2), (of(lambda: 2), of(lambda: 3))
    assert first.digest == second.digest and first(x, x).tolist() == [2, 2]
    assert of(lambda: 2)(x, x).tolist() == [2, 2]
    with pytest.warns(ferrule.FerruleWarning, match="op 'told' .* other code in `prepared` 'p'"):
        assert second(x, x).tolist() == [2, 2]


def test_pickles() -> None:
    op = linear()
    again = pickle.loads(pickle.dumps(op))  # noqa: S301
    x, w = torch.randn(2, 3), torch.randn(4, 3)
    assert again.digest == op.digest and torch.equal(again(x, w, None), expected(x, w))
    local = linear(prepared={"packed": (lambda w, scale: w.T, "w", "scale")})
    with pytest.raises(KernelError, match=r"`prepared` 'packed' .* cannot be imported"):
        pickle.dumps(local)


# -- how long it is kept ---------------------------------------------------------------------------


def test_it_is_made_once_for_each_version() -> None:
    op, w, scale = linear(), torch.randn(4, 3), torch.randn(4)
    for step in range(1, 4):
        for rows in (1, 5):
            x = torch.randn(rows, 3)
            torch.testing.assert_close(op(x, w, scale), expected(x, w, scale))
        assert op.counts["prepare"] == step
        (w if step % 2 else scale).mul_(1.5)
    torch.testing.assert_close(op(x, w, None), expected(x, w))
    torch.testing.assert_close(op(x, w, scale), expected(x, w, scale))
    assert op.counts["prepare"] == 5
    op(x, w, None)
    assert op.counts["prepare"] == 5  # with and without a scale, each is kept


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["call", "write", "view", "assign", "resize"]), st.integers(0, 2)
        ),
        max_size=12,
    )
)
@settings(max_examples=40, deadline=None)
def test_whatever_happens_to_weights(steps: list[tuple[str, int]]) -> None:
    """Results are those of the weights as they are."""
    op, x = linear(), torch.randn(2, 3)
    weights = [torch.randn(4, 3), torch.randn(8, 3)[::2], torch.nn.Parameter(torch.randn(4, 3))]
    for what, i in steps:
        with torch.no_grad():
            match what:
                case "write":
                    weights[i].add_(1)
                case "view":
                    weights[i][1:].view(-1).neg_() if weights[i].is_contiguous() else None
                case "assign" if isinstance(weights[i], torch.nn.Parameter):
                    weights[i].data = torch.randn(4, 3)
                case "resize":
                    weights[i] = torch.randn(4, 3)
            torch.testing.assert_close(op(x, weights[i], None), expected(x, weights[i]))


def test_it_goes_with_the_weights() -> None:
    made: list[Any] = []

    def packed(w: Any, scale: Any) -> Any:
        made.append(weakref.ref(result := pack(w, scale).contiguous()))
        return result

    op = linear(prepared={"packed": (packed, "w", "scale")}, version=1)
    x, w, scale = torch.randn(2, 3), torch.randn(4, 3), torch.randn(4)
    op(x, w, scale)
    op(x, w, None)
    del scale
    gc.collect()
    assert [each() is None for each in made] == [True, False]
    del w
    gc.collect()
    assert made[1]() is None and not prepared_of(op)._kept


def test_what_lies_in_the_weights_own_memory_is_copied() -> None:
    op, x, w = linear(), torch.randn(2, 3), torch.randn(4, 3)  # without a scale `pack` gives a view
    memory = weakref.ref(w.untyped_storage())
    op(x, w, None)
    del w
    gc.collect()
    assert memory() is None


def test_what_is_made_anew_stays_where_it_was() -> None:
    """As graphs that were captured go on reading there."""
    seen = []

    def run(x: Any, w: Any, scale: Any, packed: Any) -> Any:
        seen.append((packed[0].data_ptr(), packed[1][0].data_ptr()))
        return x @ packed[0] + 0 * packed[1][0].sum()

    def parts(w: Any, scale: Any) -> Any:
        return [w.T.contiguous(), (w.sum(1), 3)]

    op = linear(run=run, prepared={"packed": (parts, "w", "scale")}, version=1)
    x, w = torch.randn(2, 3), torch.randn(4, 3)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(op(x, w, None), expected(x, w))
            w += 1
    assert len(set(seen)) == 1 and op.counts["prepare"] == 3


def test_writes_that_no_tensor_tells_of() -> None:
    op, x, w = linear(), torch.randn(2, 3), torch.nn.Parameter(torch.randn(4, 3))
    with torch.no_grad():
        op(x, w, None)
        w.data.neg_()
        again = linear()  # the same op
        again.refresh()
        torch.testing.assert_close(op(x, w, None), expected(x, w))
    assert op.counts["prepare"] == 1


def test_two_threads_prepare_once() -> None:
    begun = threading.Barrier(2)

    def slowly(w: Any, scale: Any) -> Any:
        threading.Event().wait(0.05)
        return pack(w, scale)

    op = linear(prepared={"packed": (slowly, "w", "scale")}, version=2)
    x, w = torch.randn(2, 3), torch.randn(4, 3)
    _ = op.torch_op

    def call() -> None:
        begun.wait()
        op(x, w, None)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert op.counts["prepare"] == 1


def test_ops_with_the_same_function_share_what_it_made() -> None:
    """As an op and its derivative do."""
    op, x, w = linear(), torch.randn(2, 3), torch.randn(4, 3)
    turned = ferrule.adopt(
        "prepared_turned", "c[*S,N]:T, v[N,K]:T, scale[N]:T? -> x[*S,K]:T",
        run=lambda c, v, scale, packed: c @ packed.T, prepared={"packed": (pack, "v", "scale")},
    )  # fmt: skip
    for count in (1, 2):
        torch.testing.assert_close(op(x, w, None), x @ w.T)
        torch.testing.assert_close(turned(x @ w.T, w, None), x @ w.T @ w)
        assert op.counts["prepare"] + turned.counts["prepare"] == count
        w.neg_()
    w.data.neg_()
    turned.refresh()
    torch.testing.assert_close(op(x, w, None), x @ w.T)


class Unhashable:
    """A function that others cannot share, for it is no key."""

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, w: Any, scale: Any) -> Any:
        return pack(w, scale)


def test_functions_that_are_no_keys() -> None:
    op, x = linear(prepared={"packed": (Unhashable(), "w", "scale")}, version=3), torch.randn(2, 3)
    w = torch.randn(4, 3)
    for _ in range(2):
        torch.testing.assert_close(op(x, w, None), x @ w.T)
    assert op.counts["prepare"] == 1


def test_copies_outside_of_the_pools_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made on another stream than the default one, by another thread."""

    class Stream:
        def synchronize(self) -> None:
            waited.append(threading.get_ident())

    waited: list[int] = []
    default, other, w = Stream(), Stream(), torch.randn(4, 3)
    value = (w, (w.T, 3))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: default)
    for stream in (default, other):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, stream=stream: stream)
        with monkeypatch.context() as patch:
            patch.delitem(sys.modules, "torch._inductor.cudagraph_trees", raising=False)
            assert torch_host.outside_pools(value, "cuda:0") is value
        monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", torch)
        found = torch_host.outside_pools(value, "cuda:0")
        if stream is default:
            assert found is value and not waited
    assert torch.equal(found[0], w) and torch.equal(found[1][0], w.T) and found[1][1] == 3
    assert found[0].data_ptr() != w.data_ptr() and len(waited) == 2


def test_inference_tensors_have_no_version() -> None:
    op, x = linear(), torch.randn(2, 3)
    with torch.inference_mode():
        w = torch.randn(4, 3)
        for count in (1, 2):
            torch.testing.assert_close(op(x, w, None), expected(x, w))
            w += 1
            assert op.counts["prepare"] == count


def test_not_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    op, x, w = linear(), torch.randn(2, 3), torch.randn(4, 3)
    with monkeypatch.context() as patch:
        patch.setattr(torch_host, "capturing", lambda device: True)
        with pytest.raises(KernelError, match="Call the op once with them before the capture"):
            op(x, w, None)
    op(x, w, None)
    with monkeypatch.context() as patch:
        patch.setattr(torch_host, "capturing", lambda device: True)
        torch.testing.assert_close(op(x, w, None), expected(x, w))


def test_a_function_that_fails_is_asked_again() -> None:
    def fails(w: Any, scale: Any) -> Any:
        if w[0, 0] < 0:
            raise ValueError("negative")
        return pack(w, scale)

    op, x, w = (
        linear(prepared={"packed": (fails, "w", "scale")}),
        torch.ones(2, 3),
        -torch.ones(4, 3),
    )
    for _ in range(2):
        with pytest.raises(ValueError, match="negative"):
            op(x, w, None)
    torch.testing.assert_close(op(x, w.neg_(), None), expected(x, w))


# -- NumPy and MLX ---------------------------------------------------------------------------------


def test_numpy_keeps_what_nobody_can_write(tmp_path: Path) -> None:
    op, x, w = linear(), np.ones((2, 3)), np.random.default_rng(0).normal(size=(4, 3))
    np.save(tmp_path / "w.npy", w)
    frozen, mapped = w.copy(), np.load(tmp_path / "w.npy", mmap_mode="r")
    frozen.flags.writeable = False
    view = w.view()
    view.flags.writeable = False  # w itself may change
    from_bytes = np.frombuffer(w.tobytes()).reshape(4, 3)
    from_array = np.frombuffer(bytearray(w.tobytes())).reshape(4, 3)
    from_array.flags.writeable = False
    of_map = np.frombuffer(mmap.mmap(-1, w.nbytes)).reshape(4, 3)
    cases = [
        (w, 3),
        (frozen, 1),
        (frozen[:], 0),
        (frozen[::2], 1),
        (mapped, 1),
        (view, 3),
        (from_bytes, 1),
    ]
    for array, count in [*cases, (from_array, 3), (of_map, 3)]:
        op.counts.clear()
        for _ in range(3):
            np.testing.assert_allclose(op(x, array, None), expected(x, array))
        assert op.counts["prepare"] == count
    del frozen, mapped, from_bytes, cases, array
    gc.collect()
    assert not prepared_of(op)._kept


@given(steps=st.lists(st.sampled_from(["lock", "unlock", "call", "call of a view", "refresh"])))
@settings(max_examples=60, deadline=None)
def test_numpy_arrays_that_are_unlocked_changed_and_locked(steps: list[str]) -> None:
    """Each change is followed by a call, of the array or of a view, while it can be written to."""
    op, x, w = linear(), np.ones((2, 3)), np.random.default_rng(0).normal(size=(4, 3))
    view = w[::2]
    view.flags.writeable = False
    for step in ["lock", "call", "call of a view", *steps, "unlock", "lock", "call"]:
        if step == "lock":
            w.flags.writeable = False
        elif step == "unlock":
            w.flags.writeable = True
            w += 1
            np.testing.assert_array_equal(op(x, w, None), expected(x, w))
        elif step == "refresh":
            op.refresh()
        else:
            array = view if step == "call of a view" else w
            np.testing.assert_array_equal(op(x, array, None), expected(x, array))


def test_mlx() -> None:
    mx = pytest.importorskip("mlx.core")
    op, x, w = linear(), mx.ones((2, 3)), mx.arange(12.0).reshape(4, 3)
    for run in (op, mx.compile(op, shapeless=True)):
        assert mx.array_equal(run(x, w, None), expected(x, w))
        assert mx.array_equal(run(x, w + 1, None), expected(x, w + 1))


# -- torch's graphs and derivatives ----------------------------------------------------------------


def differentiable() -> Op:
    op = linear()

    @op.def_vjp
    def _(primals: Any, cotangents: Any, outputs: Any) -> Any:
        (x, w, scale), (c,) = primals, cotangents
        by_weight = c.flatten(0, -2).T @ x.flatten(0, -2)
        return c @ (w * scale[:, None]), by_weight * scale[:, None], (by_weight * w).sum(1)

    return op


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("backend", [None, "inductor"])
def test_training(backend: str | None) -> None:
    op = differentiable()
    model, twin = Linear(op), Linear(op)
    twin.load_state_dict(model.state_dict())
    assert list(model.state_dict()) == ["w", "scale"]
    run = model if backend is None else torch.compile(model, fullgraph=True, backend=backend)
    optimizers = [
        torch.optim.SGD(each.parameters(), lr=0.1, fused=each is model) for each in (model, twin)
    ]  # a fused one leaves the versions of what it writes to
    for step in range(1, 4):
        x = torch.randn(5, 3)
        results = run(x), expected(x, twin.w, twin.scale)
        torch.testing.assert_close(*results)
        run(x)
        assert op.counts["prepare"] == step
        for result, optimizer in zip(results, optimizers, strict=True):
            optimizer.zero_grad()
            result.square().sum().backward()
            optimizer.step()
    model.load_state_dict(Linear(op).state_dict())
    torch.testing.assert_close(run(x), expected(x, model.w, model.scale))


def test_exported_and_checked() -> None:
    op = differentiable()
    model, x = Linear(op), torch.randn(2, 3)
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    assert op.counts["prepare"] == 0 and sorted(program.state_dict) == ["scale", "w"]
    loaded = program.module()
    for rows in (2, 7):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(loaded(x), expected(x, model.w, model.scale))
    assert op.counts["prepare"] == 1
    torch.library.opcheck(op.torch_op, (x, model.w, model.scale))


def test_batches() -> None:
    op, x, w = linear(), torch.randn(5, 2, 3), torch.randn(5, 4, 3)
    with pytest.warns(ferrule.FerruleWarning, match="once per element"):
        found = torch.vmap(op, in_dims=(0, 0, None))(x, w, None)
    torch.testing.assert_close(found, torch.vmap(expected)(x, w))
    found = torch.vmap(op, in_dims=(0, None, None))(x, w[0], None)
    torch.testing.assert_close(found, expected(x, w[0]))


def test_of_an_op_with_kernels_and_conditions() -> None:
    op = ferrule.op(
        "prepared_scale",
        "x[N]:float32, w[N]:float32 -> y[N]:float32",
        metal="uint i = thread_position_in_grid.x; y[i] = x[i] * w[i];",
        grid="N",
        threadgroup=32,
        run=ferrule.run_function(
            lambda x, w, double: x * double / 2,
            when="N > 4",
            prepared={"double": (lambda w: 2 * w, "w")},
        ),
        prefer="run",
    )
    for n, count in ((3, 0), (5, 1), (5, 1)):
        x, w = torch.randn(n), torch.randn(n)
        for _ in range(2):
            torch.testing.assert_close(op(x, w), x * w)
        assert op.counts["prepare"] == count
        op.counts.clear()
