"""Which calls on parts make up a call: against calls on parts, and what must never be split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule import KernelError, KernelTypeError, Op
from ferrule.operators.sharding import splits


def op(rule: str, **more: Any) -> Op:
    return ferrule.op("f", rule, run=print, **more)


# Rules with what they compute, and what is declared of them.
COMPUTED: dict[str, tuple[Any, dict[str, str]]] = {
    "x[*S,D]:T, w[D]:T -> y[*S,D]:T": (lambda x, w: x * w, {}),
    "x[*S,D]:T, w[D]:T -> y[*S,D]:T, s[D]:T": (
        lambda x, w: (x * w, (x * w).reshape(-1, len(w)).sum(0)),
        {"partial_sums": "*S"},
    ),
    "a[*S,M,K]:T, b[K,N]:T -> c[*S,M,N]:T": (
        lambda a, b: a @ b,
        {"batch": "M N", "partial_sums": "K"},
    ),
    "a[M,*S,K]:T, b[*S,N,K]:T -> c[*S,N,M]:T": (
        lambda a, b: b @ np.moveaxis(a, 0, -1),
        {"batch": "N,M", "partial_sums": "K"},
    ),
    "x[B,D]:T -> total[B]:T, most[B]:T": (
        lambda x: (x.sum(1), x.max(1, initial=0)),
        {"batch": "B"},
    ),
    "x[N]:T -> y[N]:T": (np.cumsum, {}),
}


@given(
    st.sampled_from(sorted(COMPUTED)), st.lists(st.integers(1, 4), max_size=3),
    st.lists(st.integers(1, 5), min_size=4, max_size=4), st.data(),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_parts_make_up_the_whole(rule: str, star: list[int], sizes: list[int], data: Any) -> None:
    compute, declared = COMPUTED[rule]
    one = op(rule, **declared)
    dims = dict(zip(one.rule.dim_names, sizes, strict=False))
    arrays = []
    for argument in one.rule.inputs:
        shape: list[int] = []
        for dim in argument.dims or ():
            shape += star if str(dim).startswith("*") else [dims[str(dim)]]
        arrays.append(data.draw(st.integers(0, 9)) + np.arange(np.prod(shape)).reshape(shape))
    whole = compute(*arrays)
    whole = whole if isinstance(whole, tuple) else (whole,)
    found = splits(one, [array.ndim for array in arrays])
    starred = "*S" in rule
    assert len(found) == starred * len(star) + len(one.batch) + ("K" in one.partial_sums)
    for split in found:
        axes = [(array, axis) for array, axis in zip(arrays, split.inputs, strict=True)]
        size = next(array.shape[axis] for array, axis in axes if axis is not None)
        at = data.draw(st.integers(0, size))
        parts = []
        for chosen in (slice(at), slice(at, None)):
            given = [
                array if axis is None else array[(slice(None),) * axis + (chosen,)]
                for array, axis in axes
            ]
            result = compute(*given)
            parts.append(result if isinstance(result, tuple) else (result,))
        for expected, a, b, axis in zip(whole, *parts, split.outputs, strict=True):
            joined = a + b if axis is None else np.concatenate([a, b], axis)
            np.testing.assert_array_equal(joined, expected)


@pytest.mark.parametrize(
    ("rule", "declared", "dims"),
    [
        ("x[N,D]:T -> y[N,D]:T", {}, []),  # like softmax: nothing is declared
        ("x[*S,D]:T -> y[*S,D]:T", {}, ["*S", "*S"]),
        ("x[*S,D]:T -> y[D]:T", {}, []),  # summed, but not said so
        ("x[*S,D]:T -> y[D]:T", {"partial_sums": "*S"}, ["*S", "*S"]),
        ("x[*S,D]:T -> y[*S,D]:T, z[D]:T", {}, []),
        ("x[B,D]:T, n:int32, w[D]:T? -> y[B,D]:T", {"batch": "B D"}, ["B", "D"]),
        ("x[B,D]:T -> y[B*2,D]:T", {"batch": "B D"}, ["D"]),
        ("x[B,D]:T -> y[B,D]:T, z[B*D]:T", {"batch": "B D"}, []),
        ("x[B,B]:T -> y[B]:T", {"batch": "B"}, []),
        ("x[B,D]:T, w[2*B]:T -> y[B,D]:T", {"batch": "B D"}, ["D"]),
        ("x[B,D]:T -> y[B,D]:T where B % 4 == 0", {"batch": "B D"}, ["B", "D"]),
        ("x[B,D]:T -> y[B,D]:T where B % D == 0", {"batch": "B D"}, []),
        ("x[B,D]:T -> y[B,D]:T where B % 4 == 1", {"batch": "B D"}, ["D"]),
        ("x[B,D]:T, w[B//4]:T -> y[B,D]:T", {"batch": "B D"}, ["D"]),  # may leave a rest
        ("x[B,D]:T, w[B//4]:T -> y[B,D]:T where B % 2 == 0", {"batch": "B D"}, ["D"]),
        ("x[B,D]:T, w[(B+3)//4]:T -> y[B,D]:T where B % 4 == 0", {"batch": "B D"}, ["D"]),
        ("x[B,D]:T -> y[B//4,D]:T where B % 4 == 0", {"batch": "B D"}, ["D"]),
        ("x[B,D]:T, w[D]:T -> y[B,D]:T where x.size % 4 == 0", {"batch": "B D"}, []),
        ("x[B,D]:T, w[D]:T -> y[B,D]:T, z[w.size + 1]:T", {"batch": "B D"}, []),
        ("c[B,L,D]:T!, x[B,D]:T ->", {"batch": "B L D"}, ["B", "L", "D"]),
        ("c[B,L]:T!, x[B,D]:T -> y[B,D]:T", {"batch": "B D"}, ["B"]),
    ],
)
def test_what_is_split(rule: str, declared: dict[str, str], dims: list[str]) -> None:
    one = op(rule, **declared)
    ranks = [None if a.dims is None or a.optional else 3 if "*S" in str(a) else len(a.dims)
             for a in one.rule.inputs]  # fmt: skip
    assert [split.dim for split in splits(one, ranks)] == dims


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_dims_that_some_have_divided(b: int, n: int, left: int, right: int) -> None:
    """As of matrices whose elements are packed, and whose groups have scales."""
    rule = "x[B,K]:T, w[N,K//2]:U, s[N,K//6]:T -> y[B,N]:T where K % 6 == 0, K % 4 == 0"
    one = op(rule, batch="B N", partial_sums="K")
    found = {split.dim: split for split in splits(one, [2, 2, 2])}
    assert found["K"] == ("K", (1, 1, 1), (None,), 12, 0)
    assert found["N"] == ("N", (None, 0, 0), (1,), 1, 1)

    def compute(x: Any, w: Any, s: Any) -> Any:
        return x @ (w.repeat(2, 1) * s.repeat(6, 1)).T

    k, at = 12 * (left + right), 12 * left
    x, w, s = (np.arange(h * v).reshape(h, v) % 5 for h, v in ((b, k), (n, k // 2), (n, k // 6)))
    parts = compute(x[:, :at], w[:, : at // 2], s[:, : at // 6])
    parts = parts + compute(x[:, at:], w[:, at // 2 :], s[:, at // 6 :])
    np.testing.assert_array_equal(parts, compute(x, w, s))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("Q", "there is no dim 'Q', but M, K, N, \\*S"),
        ("S", "there is no dim 'S'"),
        ("M", "every output has 'M'"),
        ("*S", "every output has '\\*S'"),
        ("N", "'N' is in `batch`, too"),
        (3, "got 3, expected dims"),
        (["K", 3], "expected dims"),
    ],
)
def test_wrong_partial_sums(given: Any, message: str) -> None:
    rule = "a[*S,M,K]:T, b[K,N]:T -> c[*S,M,N]:T"
    with pytest.raises((KernelError, KernelTypeError), match=message):
        op(rule, batch="N", partial_sums=given)


def test_what_is_written_in_place_has_no_partial_sums() -> None:
    with pytest.raises(KernelError, match="in place cannot be added up"):
        op("c[M]:T!, a[M,K]:T ->", partial_sums="K")


@pytest.mark.filterwarnings("ignore::ferrule.FerruleWarning")
@pytest.mark.parametrize(
    ("rule", "batch", "compute"),
    [
        ("x[*S]:T -> y[*S,x.ndim]:T", "", lambda x: x[..., None].expand(*x.shape, x.ndim)),
        ("x[B,D]:T -> y[B,x.size]:T", "B", lambda x: x[:, :1].expand(len(x), x.numel())),
    ],
)
def test_vmap_does_not_batch_dims_that_other_sizes_depend_on(
    rule: str, batch: str, compute: Any
) -> None:
    torch = pytest.importorskip("torch")
    one = ferrule.op("f", rule, run=compute, batch=batch, version=rule)
    x = torch.arange(24.0).reshape(4, 3, 2)
    torch.testing.assert_close(torch.vmap(one)(x), torch.stack([compute(part) for part in x]))


def test_partial_sums_are_a_part_of_the_op() -> None:
    kernel = "y[0] = x[0];"
    ops = [
        ferrule.op("f", "x[N,D]:T -> y[D]:T", metal=kernel, grid=1, threadgroup=1, **more)
        for more in ({}, {"batch": "D"}, {"partial_sums": "N"}, {"partial_sums": ["N"]})
    ]
    assert len({one.digest for one in ops}) == 3
    again = Op.from_json(ops[2].to_json())
    assert again.partial_sums == ("N",) and again.digest == ops[2].digest
    assert ops[2].using("metal").partial_sums == ("N",)
