"""Proofs about arrays of any number of dims, indices of several integer types, and vectors of
elements of any type."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ferrule
from ferrule.check.proofs.prove import Proof, prove
from ferrule.check.proofs.ranks import broadcast_facts
from ferrule.source.accesses import terms
from ferrule.source.accesses.evaluation import evaluate

pytest.importorskip("z3")

I = "uint i = thread_position_in_grid.x;\n"  # noqa: E741


def proof(rule: str, body: str, grid: Any, threadgroup: Any = 64, **more: Any) -> Proof:
    return prove(ferrule.op("k", rule, metal=body, grid=grid, threadgroup=threadgroup, **more))


ROWS = "x[M,*D]:T -> y[M,*D]:T"
COLUMNS = "uint columns = 1;\nfor (int d = 1; d < x_ndim; ++d) columns *= x_shape[d];\n"
COPY = I + COLUMNS + (
    "for (uint c = 0; c < columns; ++c) y[ulong(i) * columns + c] = x[ulong(i) * columns + c];"
)  # fmt: skip
DOWN = COPY.replace("int d = 1; d < x_ndim; ++d", "int d = x_ndim - 1; d >= 1; --d")
LOCATED = I + "y[i] = x[elem_to_loc(i, x_shape, x_strides, x_ndim)];"
SPREAD = "x[*S,K]:T, w[*S]:T -> y[*S,K]:T"
LAST = I + "const uint n = x_shape[x_ndim - 1];\ny[i] = x[i / n * x_strides[x_ndim - 2] + i % n];"
PLACED = (
    I
    + """
ulong place = 0, step = 1, at = i;
for (int back = 1; back <= w_ndim; back++) {
  const ulong size = ulong(w_shape[w_ndim - back]);
  place += at % size * step;
  at /= size;
  step *= size;
}
y[i] = w[place];
"""
)
CHOSEN = "x[N]:T, ids[M]:I -> y[M]:T where I in (int32, int64, uint8)"
CHOOSE = I + "const I id = ids[i];\ny[i] = id >= 0 && id < N ? x[id] : T(0);"
POINTED = (
    I
    + """
for (int r = 0; r < R; ++r) {
  const device T* from = x + ulong(r) * N;
  device T* to = y + ulong(r) * N;
  for (int k = 0; k < 2; ++k) to[i] += from[i];
}
"""
)
FOURS = I + "*(device vec<T, 4>*)(y + 4 * i) = *(const device vec<T, 4>*)(x + 4 * i);"
RIGHT = {
    "a product of sizes": (ROWS, COPY, "M"),
    "a product from the last": (ROWS, DOWN, "M"),
    "elem_to_loc": ("x[*S]:T -> y[*S]:T", LOCATED, "x.size"),
    "elem_to_loc of two dims": ("x[A,B]:T -> y[B,A]:T", LOCATED, "x.size"),
    "elem_to_loc of a part": (
        SPREAD, I + "y[i] = w[elem_to_loc(ulong(i) / K, w_shape, w_strides, w_ndim)];", "x.size",
    ),
    "the last size": (
        SPREAD, LAST.replace("x_strides[x_ndim - 2]", "n"), "x.size",
    ),
    "a place of digits": (SPREAD, PLACED, "x.size"),
    "the first size": (
        ROWS, I + "if (i < uint(x_shape[0])) for (uint c = 0; c < D_size; ++c)\n"
        "  y[i * D_size + c] = x[i * D_size + c];", "M + 3",
    ),
    "integers of several types": (CHOSEN, CHOOSE, "M"),
    "pointers of a round": ("x[R,N]:T, y[R,N]:T! ->", POINTED, "N"),
    "vectors": ("x[N,4]:T -> y[N,4]:T", FOURS, "N"),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_right(name: str) -> None:
    found = proof(*RIGHT[name])
    assert found.proved, str(found)


# Bodies that go wrong, or of which nothing says that they do not: which property is not proved.
WRONG = {
    "all sizes": ("bounds", ROWS, COPY.replace("d = 1;", "d = 0;"), "M"),
    "a size too many": ("bounds", ROWS, COPY.replace("d < x_ndim", "d <= x_ndim"), "M"),
    "a size too few": ("coverage", ROWS, COPY.replace("d = 1;", "d = 2;"), "M"),
    "without the last": ("coverage", ROWS, COPY.replace("d < x_ndim", "d < x_ndim - 1"), "M"),
    "every other size": ("coverage", ROWS, COPY.replace("++d", "d += 2"), "M"),
    "a product that begins at 2": (
        "bounds", ROWS, COPY.replace("columns = 1", "columns = 2"), "M",
    ),
    "some sizes": (
        "coverage", ROWS,
        COPY.replace("columns *= x_shape[d]", "if (x_shape[d] > 2) columns *= x_shape[d]"), "M",
    ),
    "sizes twice": (
        "bounds", ROWS, COPY.replace("columns *= x_shape[d];", "columns *= x_shape[d] * 2;"), "M",
    ),
    "squares": (
        "bounds", ROWS,
        COPY.replace("columns *= x_shape[d];", "{ columns *= x_shape[d]; columns *= x_shape[d]; }"),
        "M",
    ),
    "until a size is 1": (
        "coverage", ROWS,
        COPY.replace("columns *= x_shape[d];",
                     "{ if (x_shape[d] == 1) break; columns *= x_shape[d]; }"), "M",
    ),
    "a product that may overflow": (
        "bounds", "x[M,*D]:T, n[*D]:T -> y[M,*D]:T", COPY.replace("uint columns", "int columns"),
        "M + 1",
    ),
    "the shape of another": (
        "bounds", SPREAD, LOCATED.replace("x[", "w["), "x.size",
    ),
    "fewer dims": (
        "bounds", SPREAD, I + "y[i] = w[elem_to_loc(i / K, x_shape, x_strides, x_ndim - 1)];",
        "x.size",
    ),
    "the next element": (
        "races", "x[*S]:T -> y[*S]:T",
        I + "y[elem_to_loc(i / 2, y_shape, x_strides, x_ndim)] = x[i];", "x.size",
    ),
    "strides of another": (
        "bounds", "x[*S]:T, w[*S,K]:T -> y[*S]:T", LOCATED.replace("x_strides", "w_strides"),
        "x.size",
    ),
    "no such size": ("bounds", SPREAD, LAST.replace("x_ndim - 1", "x_ndim"), "x.size"),
    "a size of none": ("bounds", ROWS, I + "if (x_shape[1] > 0) y[i] = x[i];", "x.size"),
    "another stride": ("bounds", SPREAD, LAST, "x.size"),
    "a digit too large": (
        "bounds", SPREAD, PLACED.replace("at % size", "at % (size + 1)"), "x.size",
    ),
    "a step too large": ("bounds", SPREAD, PLACED.replace("step = 1", "step = 2"), "x.size"),
    "a place too far": ("bounds", SPREAD, PLACED.replace("place = 0", "place = 1"), "x.size"),
    "a step of another size": (
        "bounds", SPREAD,
        PLACED.replace("step *= size", "step *= ulong(w_shape[w_ndim - 1 - (back & 0)]) + 1"),
        "x.size",
    ),
    "a step that comes first": (
        "bounds", SPREAD,
        PLACED.replace("  step *= size;\n", "").replace("  place", "  step *= size;\n  place"),
        "x.size",
    ),
    "sizes of another": (
        "bounds", "x[*S,K]:T, w[*S]:T, v[*R]:T -> y[*S,K]:T",
        PLACED.replace("w_shape", "v_shape").replace("w_ndim", "v_ndim"), "x.size",
    ),
    "an id too large": ("bounds", CHOSEN, CHOOSE.replace("id < N", "id <= N"), "M"),
    "ids below 0": ("bounds", CHOSEN, CHOOSE.replace("id >= 0 && ", ""), "M"),
    "ids that overflow": (
        "bounds", "x[N]:T, ids[M]:I -> y[M]:T where I in (int32, int64)",
        CHOOSE.replace("ids[i];", "ids[i] + 1;"), "M",
    ),
    "pointers to the next row": (
        "bounds", RIGHT["pointers of a round"][0],
        POINTED.replace("x + ulong(r)", "x + ulong(r + 1)"), "N",
    ),
    "a pointer that is moved": (
        "bounds", RIGHT["pointers of a round"][0],
        POINTED.replace("to[i] += from[i];", "{ to[i] += from[i]; to += N; }"), "N",
    ),
    "vectors that overlap": (
        "races", RIGHT["vectors"][0], FOURS.replace("y + 4 *", "y + 3 *"), "N",
    ),
    "a vector too far": ("bounds", RIGHT["vectors"][0], FOURS.replace("x + 4 *", "x + 5 *"), "N"),
    "vectors of another size": (
        "coverage", RIGHT["vectors"][0], FOURS.replace("vec<T, 4>", "vec<T, 2>"), "N",
    ),
    "vectors of three": ("bounds", "x[N,3]:T -> y[N,3]:T",
                         FOURS.replace("4 *", "3 *").replace("vec<T, 4>", "vec<T, 3>"), "N"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name: str) -> None:
    which, *call = WRONG[name]
    found = proof(*call)
    assert getattr(found, which).status != "proved", str(found)
    assert not found.proved


EXACT = ("all sizes", "a product that begins at 2", "sizes twice", "an id too large",
         "ids that overflow", "vectors that overlap", "a vector too far")  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_refuted(name: str) -> None:
    which, *call = WRONG[name]
    found = proof(*call)
    verdict = getattr(found, which)
    if name != "sizes twice":
        assert verdict.status == "counterexample", str(found)
        assert verdict.call.startswith("k(")


# -- random loops over sizes -----------------------------------------------------------------------

RULES = {
    "x[*D]:T, w[*D]:T -> y[1]:T": (0, 0), "x[M,*D]:T, w[*D]:T -> y[1]:T": (1, 0),
    "x[*D,N]:T, w[*D]:T -> y[1]:T": (0, 1), "x[M,*D,N]:T, w[*D]:T -> y[1]:T": (1, 1),
    "x[M,*D,N]:T, w[*D,N]:T -> y[1]:T": (1, 1),
}  # fmt: skip


def shapes(rule: str) -> Iterator[tuple[list[int], int]]:
    """Shapes of x as the body is told, and how many elements w has."""
    front, back = RULES[rule]
    for many in range(4):
        for sizes in itertools.product(range(1, 4), repeat=front + many + back):
            inner = sizes[front : front + many] + (
                sizes[front + many :] if "w[*D,N]" in rule else ()
            )
            length = 1
            for size in inner:
                length *= size
            yield list(sizes) or [1], length


def goes_wrong(rule: str, first: int, past: int, up: bool, start: int) -> bool:
    """Whether a loop over some sizes reads outside of arrays, for some shape."""
    for sizes, length in shapes(rule):
        product, places = start, range(first, len(sizes) + past)
        for d in places if up else reversed(places):
            if not 0 <= d < len(sizes):
                return True
            product *= sizes[d]
        if product < 1 or product > length:
            return True
    return False


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(list(RULES)), st.integers(0, 2), st.integers(-2, 1), st.booleans(),
       st.sampled_from([1, 1, 2]))  # fmt: skip
def test_random_loops(rule: str, first: int, past: int, up: bool, start: int) -> None:
    """What is proved holds of all small shapes."""
    loop = f"int d = {first}; d < x_ndim + ({past}); ++d"
    if not up:
        loop = f"int d = x_ndim + ({past}) - 1; d >= {first}; --d"
    body = (
        f"ulong product = {start};\nfor ({loop}) product *= x_shape[d];\n"
        "y[0] = w[product - 1];"
    )  # fmt: skip
    found = proof(rule, body, "min(x.size, 1)", 1)
    if goes_wrong(rule, first, past, up, start):
        assert found.bounds.status != "proved", (rule, body, str(found))
    if found.bounds.status == "counterexample":
        assert goes_wrong(rule, first, past, up, start), (rule, body, str(found))


def test_most_loops_that_are_right_are_proved() -> None:
    for (rule, (front, back)), up in itertools.product(RULES.items(), (True, False)):
        past = 0 if "w[*D,N]" in rule else -back
        assert not goes_wrong(rule, front, past, up, 1)
        loop = f"int d = {front}; d < x_ndim - {-past}; ++d"
        if not up:
            loop = f"int d = x_ndim - {1 - past}; d >= {front}; --d"
        body = f"ulong product = 1;\nfor ({loop}) product *= x_shape[d];\ny[0] = w[product - 1];"
        found = proof(rule, body, "min(x.size, 1)", 1)
        assert found.bounds.status == "proved", (rule, body, str(found))


# -- dims that broadcast ---------------------------------------------------------------------------

BOTH = "x[*S]:T, w[*R]:T -> y[*broadcast(S,R)]:T"
ROWS_OF_BOTH = (
    "x[*S,N]:T, w[*R,N]:T -> y[*broadcast(S,R),N]:T",
    "uint2 p = thread_position_in_grid.xy;\n"
    "y[p.y * N + p.x] = x[p.y % uint(S_size) * N + p.x] * w[p.y % uint(R_size) * N + p.x];",
    ("N", "y.size // max(N, 1)"),
)


def test_broadcast() -> None:
    found = proof(BOTH, I + "y[i] = x[i % uint(S_size)] + w[i % uint(R_size)];", "y.size")
    assert found.proved, str(found)
    found = proof(*ROWS_OF_BOTH)
    assert found.proved, str(found)


# What holds where each of both has one dim, and what does not.
BROADCAST = {
    "either is 1, or both are as long": ("bounds", "y[i] = x[S_size == 1 ? 0 : i];", "y.size"),
    "as long as the longer one": ("coverage", "y[i] = 0;", "max(x.size, w.size)"),
    "the product": ("bounds", "y[i] = 0;", "x.size * w.size"),
    "the first": ("bounds", "y[i] = x[0];", "y.size + 1"),
    "the longer one": ("bounds", "y[i] = x[i];", "y.size"),
    "what both have": ("coverage", "if (i < S_size && i < R_size) y[i] = x[i];", "y.size"),
}


@pytest.mark.parametrize("name", BROADCAST)
def test_broadcast_that_is_wrong(name: str) -> None:
    which, body, grid = BROADCAST[name]
    found = proof(BOTH, I + body, grid)
    assert getattr(found, which).status != "proved", str(found)


def test_facts_of_broadcast() -> None:
    """They hold of all small shapes."""
    stars = [terms.symbol(f"{n}_size", 0, 99) for n in "SR"]
    size = terms.symbol("size", 0, 99)
    facts = broadcast_facts(size, dict(zip(("S.ndim", "R.ndim"), stars, strict=True)))
    some = [s for many in range(3) for s in itertools.product((0, 1, 2, 3), repeat=many)]
    for one, other in itertools.product(some, repeat=2):
        try:
            both = np.broadcast_shapes(one, other)
        except ValueError:
            continue
        values = {"S.ndim": len(one), "R.ndim": len(other), "size": math.prod(both),
                  "S_size": math.prod(one), "R_size": math.prod(other)}  # fmt: skip
        assert all(evaluate(fact, values) for fact in facts), (one, other)


def test_elem_to_loc_is_a_remainder() -> None:
    """As the header computes it, of rows without gaps."""
    for shape in itertools.product((1, 2, 3), repeat=3):
        strides = [math.prod(shape[d + 1 :]) for d in range(3)]
        for element in range(60):
            left, place = element, 0
            for size, stride in zip(reversed(shape), reversed(strides), strict=True):
                if left > 0:
                    place += left % size * stride
                    left //= size
            assert place == element % math.prod(shape)
