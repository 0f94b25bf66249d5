"""torch.vmap of ops: by ``*S``, by ``batch=``, by a declared rule, or call by call."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap

import ferrule
from ferrule import FerruleWarning, KernelError
from ferrule.operators.op import Op
from torch_ops import CASES, EACH, Case, I, cloned, equal, is_float, rand

LOOPS = "ignore:op '.*' is called . times by vmap"
EAGER_AND_COMPILED = pytest.mark.parametrize("backend", [None, "aot_eager"])


def compiled(function: Any, backend: str | None) -> Any:
    if backend is None:
        return function
    torch.compiler.reset()
    return torch.compile(function, backend=backend, fullgraph=True)


def batch(value: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """A batch whose parts differ."""
    return torch.stack([value * (1 - 0.1 * i) for i in range(size)], axis)


def choices(case: Case) -> list[tuple[int | None, ...]]:
    """Axes: all inputs batched in front; each alone batched; all at the back."""
    inputs = case.samples()[0]
    tensors = [i for i, one in enumerate(inputs) if is_float(one)]
    written = [i for i, one in enumerate(case.op.rule.inputs) if one.mutable]
    sets = [tensors, *([i] for i in tensors)] if not written else [tensors, written]
    found = [tuple(0 if i in some else None for i in range(len(inputs))) for some in sets]
    found.append(tuple(-1 if i in tensors else None for i in range(len(inputs))))
    return found


def check(case: Case, axes: tuple[int | None, ...], backend: str | None) -> None:
    inputs = [
        one if axis is None else batch(one, axis, 3)
        for one, axis in zip(case.samples()[0], axes, strict=True)
    ]
    found, expected = cloned(inputs), cloned(inputs)
    parts = [
        case.reference(
            *(v if a is None else v.select(a, i) for v, a in zip(expected, axes, strict=True))
        )
        for i in range(3)
    ]
    several = isinstance(parts[0], tuple)
    whole = tuple(map(torch.stack, zip(*parts, strict=True))) if several else torch.stack(parts)
    equal(compiled(vmap(case.op, axes), backend)(*found), whole)
    equal(found, expected)


CELLS = pytest.mark.parametrize(
    ("case", "axes"),
    [
        pytest.param(case, axes, id=f"{case.name}-{axes}")
        for case in CASES
        for axes in choices(case)
    ],
)


@CELLS
@EAGER_AND_COMPILED
@pytest.mark.filterwarnings(LOOPS)
def test_a_batch_is_what_its_parts_are(
    case: Case, axes: tuple[int | None, ...], backend: str | None
) -> None:
    check(case, axes, backend)


@pytest.mark.parametrize("case", [EACH["attention"], EACH["gate"]], ids=lambda case: case.name)
@EAGER_AND_COMPILED
@pytest.mark.filterwarnings(LOOPS)
def test_nested(case: Case, backend: str | None) -> None:
    inputs = case.samples()[0]
    given = [batch(batch(one, 0, 2), 1, 3) if is_float(one) else one for one in inputs]
    inner = tuple(0 if is_float(one) else None for one in inputs)

    def twice(function: Any) -> Any:
        return vmap(vmap(function, inner), (0, *[None] * (len(inner) - 1)), 2)

    given[1:] = [one[0] if is_float(one) else one for one in given[1:]]  # batched once
    equal(compiled(twice(case.op), backend)(*given), twice(case.reference)(*given))


@given(
    st.lists(st.integers(0, 3), min_size=0, max_size=2),
    st.sampled_from(list(itertools.product((0, 1, None), repeat=2))),
    st.integers(1, 3),
)
@settings(max_examples=40, deadline=None)
@pytest.mark.filterwarnings(LOOPS)
def test_any_axes(lead: list[int], axes: tuple[int | None, int | None], size: int) -> None:
    if axes == (None, None):
        axes = (0, None)
    x, w = rand(*lead, 2), rand(2)
    given_ = [v if a is None else batch(v, a, size) for v, a in zip((x, w), axes, strict=True)]
    equal(vmap(EACH["plain"].op, axes)(*given_), vmap(EACH["plain"].reference, axes)(*given_))


# -- how many calls that takes ---------------------------------------------------------------------


def counted(rule: str, **more: Any) -> tuple[Op, list[Any]]:
    """An op ``y = x * w``, and the shapes of the inputs of each of its calls."""
    calls: list[Any] = []

    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        calls.append((tuple(x.shape), tuple(w.shape)))
        return x * w

    return ferrule.op("counted", rule, run=run, version=f"{rule}{more}{id(calls)}", **more), calls


@pytest.mark.parametrize(
    ("rule", "more", "axes", "shapes"),
    [
        # *S, with the other input shared by all
        ("x[*S,D]:T, w[D]:T -> y[*S,D]:T", {}, (0, None), [((3, 2, 4), (4,))]),
        ("x[*S,D]:T, w[*S,D]:T -> y[*S,D]:T", {}, (1, None), [((3, 2, 4), (3, 2, 4))]),
        # a dim that is declared independent
        ("x[N,D]:T, w[D]:T -> y[N,D]:T", {"batch": "N"}, (0, None), [((6, 4), (4,))]),
        ("x[N,D]:T, w[N,D]:T -> y[N,D]:T", {"batch": "N"}, (0, None), [((6, 4), (6, 4))]),
        ("x[N,D]:T, w[D]:T -> y[N,D]:T", {"batch": "D N"}, (2, None), [((2, 12), (12,))]),
        # nothing is: a cumulative sum looks just the same
        ("x[N,D]:T, w[D]:T -> y[N,D]:T", {}, (0, None), [((2, 4), (4,))] * 3),
        # what is batched has no dim that is declared independent
        ("x[N,D]:T, w[D]:T -> y[N,D]:T", {"batch": "N"}, (None, 0), [((2, 4), (4,))] * 3),
        ("x[*S,D]:T, w[D]:T -> y[*S,D]:T", {}, (0, 0), [((2, 4), (4,))] * 3),
        # it does not stand alone wherever it is named
        (
            "x[N,D]:T, w[D]:T -> y[N,D]:T where N <= 2", {"batch": "N"}, (0, None),
            [((2, 4), (4,))] * 3,
        ),
    ],
)  # fmt: skip
def test_calls(rule: str, more: Any, axes: Any, shapes: Any) -> None:
    op, calls = counted(rule, **more)
    x = rand(2, 4) if axes[0] is None else batch(rand(2, 4), axes[0], 3)
    w = rand(2, 4) if "w[*S" in rule or "w[N" in rule else rand(4)
    w = w if axes[1] is None else batch(w, axes[1], 3)
    if len(shapes) > 1:
        names = ", ".join(n for n, axis in zip("xw", axes, strict=True) if axis is not None)
        said = rf"'counted' is called 3 times by vmap.* inputs \({names}\) .*but time\. .*def_vmap"
        with pytest.warns(FerruleWarning, match=said):
            found = vmap(op, axes)(x, w)
        vmap(op, axes)(x, w)  # said once
        assert op.counts["vmap loop"] == 2
        del calls[3:]
    else:
        found = vmap(op, axes)(x, w)
        assert op.counts["vmap loop"] == 0
    equal(found, vmap(lambda x, w: x * w, axes)(x, w))
    assert calls == shapes


def test_a_rule_that_is_an_op() -> None:
    op, calls = counted("x[N]:T, w[N]:T -> y[N]:T")
    more = ferrule.op(
        "batched", "x[B,N]:T, w[B,N]:T -> y[B,N]:T", metal=I + "y[i] = x[i] * w[i];",
        grid="x.size", threadgroup=32,
    )  # fmt: skip
    op.def_vmap(more)
    x, w = rand(4, 3), rand(3)
    equal(vmap(op, (1, None))(x.T, w), x * w)
    equal(vmap(op, (0, None))(x, w), x * w)
    assert calls == [] and not op.counts
    for names in ("x[B,N]:T, v[B,N]:T -> y[B,N]:T", "x[B,N]:T, w[B,N]:T -> z[B,N]:T"):
        with pytest.raises(KernelError, match=r"expected x, w|expected y"):
            op.def_vmap(ferrule.op("wrong", names, run=lambda *a: a[0]))


def test_a_rule_that_is_a_function() -> None:
    op, calls = counted("x[N]:T, w[N]:T -> y[N]:T")
    asked = []

    def rule(size: int, axes: Any, primals: Any) -> Any:
        asked.append((size, axes))
        x, w = primals
        return x.movedim(axes[0], 1) * w[:, None], 1

    op.def_vmap(rule, version=1)
    x, w = rand(4, 3), rand(3)
    equal(vmap(op, (0, None))(x, w), x * w)
    assert asked == [(4, (0, None))] and calls == []
    op.def_vmap(lambda size, axes, primals: primals[0], version=2)
    with pytest.raises(KernelError, match="expected outputs and their axes"):
        vmap(op, (0, None))(x, w)


def test_what_is_written_in_place_must_be_a_batch() -> None:
    put = EACH["put"].op
    cache, row, at = EACH["put"].samples()[0]
    with pytest.raises(KernelError, match="input 'cache' is written in place by every call"):
        vmap(put, (None, 0, None))(cache, batch(row, 0, 2), at)


def test_outputs_of_every_number() -> None:
    add = ferrule.op(
        "add", "c[*S,L]:T!, v[L]:T ->", metal=I + "c[i] += v[i % L];", grid="c.size", threadgroup=8
    )
    c, v = torch.ones(2, 3), torch.arange(3.0)

    def both(c: torch.Tensor) -> torch.Tensor:
        assert add(c, v) is None
        return c * 2

    equal(vmap(both)(c), 2 * (1 + v).expand(2, 3))
    equal(c, (1 + v).expand(2, 3).contiguous())


def test_batches_without_calls() -> None:
    x, w = EACH["plain"].samples()[0]
    equal(vmap(EACH["plain"].op, (0, None))(x[:0], w), x[:0] * w)
    with pytest.raises(KernelError, match="over a batch of size 0"):
        vmap(EACH["plain"].op)(x[:0], w[None][:0])


def test_chunks_and_randomness() -> None:
    x, w = batch(rand(2, 4), 0, 5), rand(4)
    f = EACH["gate"].op
    equal(vmap(f, (0, None), chunk_size=2)(x, w), EACH["gate"].reference(x, w))
    torch.manual_seed(0)
    found = vmap(lambda x: f(x + torch.rand(4), w), randomness="different")(x)
    assert not torch.equal(found[0], found[1])


def test_an_empty_batch_along_a_declared_dim() -> None:
    fold = ferrule.op(
        "fold", "x[B,N]:float32 -> y[B,N]:float32", batch="B", grid="B*N", threadgroup=32,
        metal="uint i = thread_position_in_grid.x; y[i] = 2 * x[i];",
    )  # fmt: skip
    assert torch.func.vmap(fold)(torch.ones(0, 2, 3)).shape == (0, 2, 3)
    assert torch.func.vmap(fold, in_dims=2, out_dims=1)(torch.ones(2, 3, 0)).shape == (2, 0, 3)
    assert torch.func.vmap(fold)(torch.ones(4, 0, 3)).shape == (4, 0, 3)
