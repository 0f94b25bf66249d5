"""`compare` and `check_grad`: what they find, on arrays of each library."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule import KernelError, Op
from ferrule.hosts import numpy as numpy_host
from ferrule.hosts import protocol as hosts

I = "uint i = thread_position_in_grid.x; "  # noqa: E741
RULE = "x[*S,D]:T, w[D]:T -> y[*S,D]:T"


def scale(off: float = 0.0, **more: Any) -> Op:
    return ferrule.op(
        "scale", RULE, metal=I + f"y[i] = x[i] * w[i % D] + (i == 4 ? {off}f : 0.0f);",
        grid="x.size", threadgroup=64, **more,
    )  # fmt: skip


def test_implementations_that_agree() -> None:
    op = scale(run=lambda x, w: w * x, reference=lambda x, w: x * w)
    report = ferrule.compare(op, np.ones((2, 3), np.float32), w=np.ones(3, np.float32))
    assert report.largest == 0 and report.baseline == "reference"
    assert [one.implementation for one in report.differences] == ["metal", "run"]


@pytest.mark.parametrize("kind", ["reference", "run"])
@pytest.mark.parametrize(
    ("library", "array"), [("numpy", "numpy.ndarray"), ("mlx", "mlx.core.array")]
)
def test_a_reference_for_arrays_of_another_library(library: str, array: str, kind: str) -> None:
    def clamped(x: Any, w: Any) -> Any:
        return x.clamp(min=0) * w

    with pytest.raises(KernelError) as caught:
        ferrule.compare(scale(**{kind: clamped}), *arrays(library))
    said = str(caught.value)
    assert f"`{kind}` (" in said and "clamped) of op 'scale' was called with" in said
    assert f"with {array}, and raised AttributeError: " in said and "give `compare` those" in said
    assert isinstance(caught.value.__cause__, AttributeError)


def test_errors_of_ferrule_in_references_stay_what_they_are() -> None:
    def refused(x: Any, w: Any) -> Any:
        raise ferrule.DeviceError("gone")

    with pytest.raises(ferrule.DeviceError, match=r"^gone$"):
        ferrule.compare(scale(reference=refused), *arrays("numpy"))


def test_where_implementations_differ() -> None:
    op = scale(0.5, reference=lambda x, w: x * w)
    report = ferrule.compare(op, torch.ones(2, 3, requires_grad=True), torch.full((3,), 2.0))
    (found,) = report.differences
    assert (found.at, found.largest, found.relative) == ((1, 1), 0.5, 0.25)
    assert found.values == (2.5, 2.0)
    assert "metal      y            0.5 (0.25 of the largest) at [1, 1]: 2.5, expected 2" in repr(
        report
    )


def test_what_is_not_a_number_and_what_is_written_in_place() -> None:
    def run(c: Any, x: Any, y: Any) -> None:
        np.add(c, x, out=c)
        y.fill(0)

    op = ferrule.op(
        "put", "c[N]:T!, x[N]:T -> y[N]:T", metal=I + "c[i] += x[i]; y[i] = 0.0f / (i * x[i]);",
        grid="N", threadgroup=8, run=run,
    )  # fmt: skip
    c = np.ones(3, np.float32)
    report = ferrule.compare(op, c, np.ones(3, np.float32))
    assert c.tolist() == [1, 1, 1]
    assert {one.output: one.largest for one in report.differences} == {"y": np.inf, "c": 0}


def test_what_is_written_in_place_in_arrays_of_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Array(np.ndarray):  # has no `clone`, as CuPy's have none
        pass

    host = SimpleNamespace(**{**vars(numpy_host), "name": "CuPy"})
    monkeypatch.setitem(hosts.known, Array, host)
    op = ferrule.op(
        "add", "c[N]:T!, x[N]:T ->", metal=I + "c[i] += x[i];", grid="N", threadgroup=64
    )
    c = np.zeros(3, np.float32).view(Array)
    assert ferrule.compare(op, c, np.ones(3, np.float32).view(Array)).ok
    assert not c.any()


def test_one_implementation_alone() -> None:
    report = ferrule.compare(scale(), np.ones((2, 3), np.float32), np.ones(3, np.float32))
    assert report.largest == 0 and "nothing to compare" in repr(report)


LEAVES = "if (keep[i]) y[i] = x[i];"


@pytest.mark.parametrize("library", ["numpy", "torch", "mlx"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "uint8", "bool"])
@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(0, 99))
@settings(deadline=None, max_examples=8)
def test_elements_that_are_never_written(
    library: str, dtype: str, keep: list[bool], seed: int
) -> None:
    """Even where fresh memory would hold the last right answer."""
    if library == "numpy":
        kind: Any = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
        made = lambda v, k: np.array(v).astype(k)  # noqa: E731
    elif library == "torch":
        kind, made = getattr(torch, dtype), lambda v, k: torch.tensor(v).to(k)
    else:
        mx = pytest.importorskip("mlx.core")
        kind, made = (
            getattr(mx, dtype + "_" * (dtype == "bool")),
            lambda v, k: mx.array(v).astype(k),
        )
    flag = {"numpy": "bool", "torch": torch.bool}.get(library) or mx.bool_
    op = ferrule.op(
        "leaves", "x[N]:T, keep[N]:bool -> y[N]:T", metal=I + LEAVES, grid="N", threadgroup=64,
        run=lambda x, keep: x,
    )  # fmt: skip
    x = made(np.random.default_rng(seed).integers(0, 5, len(keep)), kind)
    report = ferrule.compare(op, x, made(keep, flag))
    assert report.ok == all(keep)
    if all(keep):
        assert not report.unwritten and report.check() is report
        return
    (found,) = report.unwritten
    assert (found.implementation, found.output) == ("metal", "y")
    assert found.mask.tolist() == [not one for one in keep]
    assert (found.number, found.at) == (keep.count(False), (keep.index(False),))
    said = f"metal      y            never written: {found.number} of {len(keep)} elements"
    with pytest.raises(KernelError, match=said):
        report.check()


def test_outputs_that_are_filled_or_given_to_functions() -> None:
    op = ferrule.op(
        "half", "x[N]:T -> y[N]:T, z[N]:int32", metal=I + "if (i) { y[i] = x[i]; z[i] = i; }",
        grid="N", threadgroup=8, init_value=0,
    )  # fmt: skip
    assert ferrule.compare(op, np.ones(5, np.float32)).ok

    def run(x: Any, y: Any) -> None:
        y[2:] = x[2:]

    report = ferrule.compare(ferrule.adopt("some", "x[N]:T -> y[N]:T", run=run), torch.ones(5))
    assert [one.mask.tolist() for one in report.unwritten] == [[True, True, False, False, False]]


def test_what_differs_is_raised() -> None:
    right = scale(1e-5, reference=lambda x, w: x * w)
    x, w = np.ones((2, 3), np.float32), np.ones(3, np.float32)
    assert ferrule.compare(right, x, w).check().ok
    wrong = ferrule.compare(scale(0.1, reference=lambda x, w: x * w), x, w)
    assert not wrong.ok and not wrong.differences[0].ok
    with pytest.raises(KernelError, match=r"op 'scale', compared with `reference`:\n.*WRONG"):
        wrong.check()
    counted = ferrule.op(
        "count", "x[N]:int32 -> y[N]:int32", metal=I + "y[i] = x[i] + (i == 3);", grid="N",
        threadgroup=8, reference=lambda x: x + 0,
    )  # fmt: skip
    assert not ferrule.compare(counted, np.full(5, 10**9, np.int32)).ok


def with_vjp(op: Op, wrong: bool = False) -> Op:
    def vjp(primals: Any, cotangents: Any, outputs: Any) -> Any:
        (x, w), (c,) = primals, cotangents
        return c * w, (c * x).reshape(-1, x.shape[-1]).sum(0) * (1.2 if wrong else 1)

    op.def_vjp(vjp)
    return op


def with_jvp(op: Op, wrong: bool = False) -> Op:
    def jvp(primals: Any, tangents: Any, outputs: Any) -> Any:
        (x, w), (tx, tw) = primals, tangents
        return (0 if tx is None else tx * w) + (0 if tw is None else x * tw * (2 if wrong else 1))

    op.def_jvp(jvp)
    return op


def arrays(library: str, dtype: str = "float32") -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    x, w = rng.normal(size=(4, 3)), rng.normal(size=3)
    if library == "torch":
        kind = getattr(torch, dtype)
        return torch.tensor(x, dtype=kind), torch.tensor(w, dtype=kind)
    if library == "mlx":
        mx = pytest.importorskip("mlx.core")
        return mx.array(x.astype(np.float32)), mx.array(w.astype(np.float32))
    return x.astype(dtype), w.astype(dtype)


@pytest.mark.parametrize("library", ["numpy", "torch", "mlx"])
def test_derivatives_that_are_right(library: str) -> None:
    report = ferrule.check_grad(with_jvp(with_vjp(scale())), *arrays(library))
    assert report.ok and report.dtype == "float32" and len(report.gradients) == 12 + 3 + 2
    assert {one.rule for one in report.gradients} == {"vjp", "jvp"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_in_other_dtypes(dtype: str) -> None:
    op = ferrule.op("scale", RULE, run=lambda x, w: x * w) if dtype == "float64" else scale()
    assert ferrule.check_grad(with_vjp(op), *arrays("torch", dtype)).dtype == dtype


def test_functions_are_checked_in_float64() -> None:
    op = ferrule.op("scale", RULE, run=lambda x, w: x * w)
    assert ferrule.check_grad(with_vjp(op), *arrays("numpy")).dtype == "float64"


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_derivatives_that_are_wrong(library: str) -> None:
    with pytest.raises(KernelError, match=r"3 wrong\n  vjp w\[\d\] +declared .* measured .*WRONG"):
        ferrule.check_grad(with_vjp(scale(), wrong=True), *arrays(library))
    report = ferrule.check_grad(with_jvp(scale(), wrong=True), *arrays(library), raises=False)
    assert [(one.input, one.ok) for one in report.gradients] == [("x", True), ("w", False)]


def test_a_gradient_that_is_left_out_is_wrong_unless_it_is_not_asked_for() -> None:
    op = scale()
    op.def_vjp(lambda primals, cotangents, outputs: (cotangents[0] * primals[1], None))
    with pytest.raises(KernelError, match="declared 0 "):
        ferrule.check_grad(op, *arrays("numpy"))
    assert ferrule.check_grad(op, *arrays("numpy"), inputs=["x"]).ok


def test_a_vjp_op_and_gradients_of_wrong_shapes() -> None:
    op = scale()
    rule = "w[D]:T, cotangent[*S,D]:T -> x_grad[*S,D]:T"
    op.def_vjp(ferrule.op("g", rule, metal=I + "x_grad[i] = cotangent[i] * w[i % D];",
                          grid="cotangent.size", threadgroup=64))  # fmt: skip
    assert ferrule.check_grad(op, *arrays("numpy"), inputs=["x"]).ok
    op.def_vjp(lambda primals, cotangents, outputs: (cotangents[0][0], None))
    with pytest.raises(KernelError, match=r"gradient of shape \(3,\) for input 'x' of shape"):
        ferrule.check_grad(op, *arrays("numpy"))


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_integer_outputs_have_no_part_in_a_derivative(library: str) -> None:
    """Such as where the largest were found: it jumps where an input is moved."""

    def run(x: Any, y: Any, at: Any) -> None:
        y[...] = x * x
        at[...] = x * 1e9

    op = ferrule.adopt("squares", "x[*S]:T -> y[*S]:T, at[*S]:int64", run=run)
    seen = []

    def vjp(primals: Any, cotangents: Any, outputs: Any) -> Any:
        seen.append(np.asarray(cotangents[1]).any())
        return (2 * primals[0] * cotangents[0],)

    op.def_vjp(vjp)
    op.def_jvp(lambda primals, tangents, outputs: (2 * primals[0] * tangents[0], None))
    assert ferrule.check_grad(op, arrays(library)[0]).ok and seen == [False]


def test_tangents_of_wrong_shapes() -> None:
    op = scale()
    op.def_jvp(lambda primals, tangents, outputs: outputs[0].sum(0) * 0)
    with pytest.raises(KernelError, match=r"shape \(3,\) for output 'y' of shape \(4, 3\)"):
        ferrule.check_grad(op, *arrays("numpy"))


def test_without_elements_there_is_nothing_to_compare() -> None:
    x, w = arrays("numpy")
    op = with_vjp(scale())
    op.def_jvp(lambda primals, tangents, outputs: outputs[0] * 0)
    with np.errstate(all="raise"):
        report = ferrule.check_grad(op, x[:0], w, inputs=["x"])
    assert report.ok and not report.gradients


def test_inputs_that_the_op_does_not_take() -> None:
    meta = [torch.ones(2, 3, device="meta"), torch.ones(3, device="meta")]
    for check in (ferrule.check_grad, ferrule.compare):
        with pytest.raises(KernelError, match="input 'x' of op 'scale' is a meta tensor"):
            check(with_vjp(scale()), *meta)


def test_an_op_without_derivatives() -> None:
    with pytest.raises(KernelError, match="has no derivative; declare one with def_vjp"):
        ferrule.check_grad(scale(), *arrays("numpy"))


def test_what_is_infinite_cannot_be_compared() -> None:
    op = with_vjp(ferrule.op("far", RULE, run=lambda x, w: x * w / 0))
    x, w = arrays("numpy")
    with np.errstate(all="ignore"):
        report = ferrule.check_grad(op, x, w, raises=False)
    assert not report.ok and "cannot be compared: outputs are infinite or NaN" in repr(report)
