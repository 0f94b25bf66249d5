"""The references of ready ops, which all other bodies are compared with, on every host; and the
references against torch's own operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule.ops import counting, norms, products, rotary, segments, selection, softmaxes
from ready_ops import close

pytestmark = pytest.mark.filterwarnings("ignore::ferrule.PortabilityWarning")  # float64

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
HOSTS = ["NumPy", "torch", "MLX"]
SIZES = st.sampled_from([0, 1, 2, 3, 5])
LENGTHS = st.sampled_from([0, 1, 2, 31, 33, 100])
flags = st.booleans()
Case = tuple[ferrule.Op, list[Any]]


def on(host: str, value: Any) -> Any:
    """A tensor as an array of a host; anything else as it is."""
    if not isinstance(value, torch.Tensor) or host == "torch":
        return value
    if value.dtype == torch.bfloat16:
        numbers = value.float().numpy()
        kind = ml_dtypes.bfloat16
        return numbers.astype(kind) if host == "NumPy" else mx.array(numbers).astype(mx.bfloat16)
    return value.numpy().copy() if host == "NumPy" else mx.array(value.numpy())


class Draw:
    """Draws the inputs of an op."""

    def __init__(self, draw: Any) -> None:
        self.draw, self.dtype = draw, torch.float32
        self.generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def mode(self, *others: Any) -> Any:
        """A dtype, and what goes with it, so that there are few kernels."""
        self.dtype, *constants = self.draw(st.sampled_from([*zip(FLOATS, *others, strict=True)]))
        return constants

    def floats(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def ints(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def rows(self, behind: int) -> tuple[int, ...]:
        front = self.draw(st.lists(SIZES, max_size=2))
        return (*front, self.draw(LENGTHS), *[self.draw(SIZES) for _ in range(behind)])


def of_softmax(d: Draw) -> Case:
    both = [softmaxes._softmax, softmaxes._log_softmax, softmaxes._softmax]
    behind, family = d.mode([0, 0, 1], both)
    return family(behind, False), [d.floats(*d.rows(behind))]


def of_rms_norm(d: Draw) -> Case:
    behind, weighted, added = d.mode([0, 1, 0], [True, True, False], [True, False, True])
    shape = d.rows(behind)
    arrays = [d.floats(*shape)] * added + [d.floats(shape[-1 - behind])] * weighted
    return norms._rms_norm(behind, weighted, added, False), [d.floats(*shape), *arrays, 1e-5]


def of_layer_norm(d: Draw) -> Case:
    behind, weighted, biased = d.mode([1, 0, 0], [True, False, True], [True, True, False])
    shape = d.rows(behind)
    arrays = [d.floats(shape[-1 - behind]) for _ in range(weighted + biased)]
    return norms._layer_norm(behind, weighted, biased, False), [d.floats(*shape), *arrays, 1e-5]


def of_rope(d: Draw) -> Case:
    traditional, by_freqs, offsets = d.mode([0, 1, 0], [0, 0, 1], ["number", "one", "each"])
    backwards = offsets == "one"
    shape = (d.draw(SIZES), d.draw(SIZES), d.draw(st.integers(0, 9)), 8 + d.draw(SIZES))
    of_array = {"one": (), "each": shape[:1]}
    offset = 7 if offsets == "number" else d.ints(0, 50, *of_array[offsets])
    freqs = [torch.rand(4, generator=d.generator) + 0.5] * by_freqs
    chosen = 8, bool(traditional), offsets, bool(by_freqs)
    return rotary._rope(*chosen, backwards), [d.floats(*shape), offset, *freqs, 100.0, 0.5]


def of_rope_in_place(d: Draw) -> Case:
    (traditional,) = d.mode([False, True, True])
    shape = (d.draw(SIZES), d.draw(SIZES), 8 + d.draw(SIZES))
    op = rotary._rope_in_place(8, traditional, "number", False)
    return op, [d.floats(*shape), d.draw(st.integers(0, 50)), 1e4, 1.0]


def of_histogram(d: Draw) -> Case:
    d.mode()
    x = d.floats(*d.draw(st.lists(SIZES, max_size=2)), d.draw(LENGTHS))
    special = torch.tensor([-1.1, 1.3, float("nan"), float("inf"), -float("inf")]).to(d.dtype)
    x = torch.cat([x.reshape(-1), special])
    return counting._histogram, [x, d.draw(st.integers(1, 9)), -1.1, 1.3]


def of_segment_sum(d: Draw) -> Case:
    d.mode()
    rows, n = d.draw(LENGTHS), d.draw(SIZES)
    x, ids = d.floats(rows, *d.draw(st.lists(SIZES, max_size=2))), d.ints(-2, n + 2, rows)
    if d.dtype == torch.float32 and d.draw(flags):
        x = (x * 4).int()
    ids = ids.int() if d.draw(flags) else ids
    return segments._segment_sum("T" if x.itemsize == 4 else "float32"), [x, ids, n]


def of_topk(d: Draw) -> Case:
    d.mode()
    x = (d.floats(d.draw(SIZES), d.draw(LENGTHS)) * 2).round() / 2  # many are equal
    x[..., ::7] = float("nan")
    x[..., 1::9] *= 0  # of both signs
    if d.dtype == torch.float32 and d.draw(flags):
        kinds = [torch.int32, torch.uint16, torch.bool]
        x = d.ints(0, 9, *x.shape).to(d.draw(st.sampled_from(kinds)))
    return selection._topk, [x, d.draw(st.integers(0, x.shape[-1]))]


def of_matmul(d: Draw) -> Case:
    stored, shared = d.mode(["nn", "nt", "tn"], [True, False, False])
    m, k, n = (d.draw(st.sampled_from([0, 1, 8, 9, 40])) for _ in range(3))
    front = d.draw(st.lists(SIZES, max_size=2))
    sizes = {"M": m, "K": k, "N": n}
    of_a, of_b = ([sizes[dim] for dim in dims.split(",")] for dims in products._STORED[stored])
    arrays = [d.floats(*front, *of_a), d.floats(*([] if shared else front), *of_b)]
    return products._product(stored, shared), arrays


CASES: list[Callable[[Draw], Case]] = [
    of_softmax, of_rms_norm, of_layer_norm, of_rope, of_rope_in_place, of_histogram,
    of_segment_sum, of_topk, of_matmul,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@settings(max_examples=25, deadline=None)
@given(data=st.data(), host=st.sampled_from(HOSTS))
def test_bodies_are_as_the_reference(case: Any, data: Any, host: str) -> None:
    if host == "MLX" and case is of_rope_in_place:
        host = "torch"  # MLX's arrays are not written to
    op, inputs = case(Draw(data.draw))
    found = ferrule.compare(op, *[on(host, value) for value in inputs]).check()
    ran = {difference.implementation for difference in found.differences}
    assert found.baseline == "reference" and len(ran) + 1 + len(found.skipped) == len(
        op.implementations
    )
    assert ran and all(name.startswith("metal") for name in ran)


x = torch.randn(3, 5, 8, dtype=torch.float64)
weight, bias = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)


@pytest.mark.parametrize(
    ("op", "inputs", "expected"),
    [
        (softmaxes._softmax(1, True), [x], x.softmax(1)),
        (softmaxes._log_softmax(0, True), [x], x.log_softmax(-1)),
        (
            norms._rms_norm(0, True, True, True), [x, x, weight, 1e-3],
            (F.rms_norm(2 * x, (8,), weight, 1e-3), 2 * x),
        ),
        (
            norms._layer_norm(0, True, True, True), [x, weight, bias, 1e-3],
            F.layer_norm(x, (8,), weight, bias, 1e-3),
        ),
        (
            norms._layer_norm(0, False, True, True), [x, bias, 0.1],
            F.layer_norm(x, (8,), None, bias, 0.1),
        ),
        (
            segments._segment_sum("T"), [x[:, 0].float(), torch.tensor([1, 0, 1]), 2],
            torch.stack([x[1, 0], x[0, 0] + x[2, 0]]).float(),
        ),
        (
            counting._histogram, [x.float(), 7, -1.5, 2.0],
            torch.histc(x.float(), 7, -1.5, 2.0).int(),
        ),
        (products._product("nt", True), [x.float(), x[0].float()], (x @ x[0].T).float()),
        (
            selection._topk, [x.float(), 3],
            (*x.float().topk(3), x.topk(3).indices.int()),
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)  # fmt: skip
def test_references_are_as_torch(op: Any, inputs: Any, expected: Any) -> None:
    for host in ("torch", "NumPy"):
        found = op.using("reference")(*[on(host, value) for value in inputs])
        found = found if isinstance(found, tuple) else (found,)
        expected = expected if isinstance(expected, tuple) else (expected,)
        for one, other in zip(found, expected, strict=True):
            one = torch.as_tensor(one)
            assert one.dtype == other.dtype
            close(one, other, torch.float64 if one.dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(
    ("family", "bodies"), [(softmaxes._softmax, 2), (softmaxes._log_softmax, 1)]
)
def test_rows_of_infinities_and_nan(family: Any, bodies: int, host: str) -> None:
    inf, nan = float("inf"), float("nan")
    rows = [[1e30, -1e30, 0], [-inf, 1, 2], [-inf] * 3, [inf, 1, 2], [nan, 1, 2], [3e38] * 3]
    with np.errstate(all="ignore"):
        found = ferrule.compare(family(0, False), on(host, torch.tensor(rows))).check()
    assert len(found.differences) == bodies


def test_a_wrong_body_is_found() -> None:
    said = softmaxes._softmax(0, False)
    wrong = ferrule.op(
        "wrong", "x[*S,N]:T -> y[*S,N]:T", grid="x.size", threadgroup=32,
        metal="y[thread_position_in_grid.x] = metal::exp(x[thread_position_in_grid.x]);",
        reference=said.using("reference").implementations[0].function,  # type: ignore[union-attr]
    )  # fmt: skip
    with pytest.raises(ferrule.KernelError, match=r"metal +y .*WRONG"):
        ferrule.compare(wrong, torch.randn(3, 4)).check()
