"""Proofs about sizes that are divided, neighbours that are written one by one, and indices of
several digits; and how much is asked."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule.check.proofs.calls import symbolic_call
from ferrule.check.proofs.cases import Case, cases_of
from ferrule.check.proofs.effort import Effort
from ferrule.check.proofs.neighbours import joined
from ferrule.check.proofs.prove import Proof, prove
from ferrule.check.proofs.solver import Question
from ferrule.source.accesses import terms
from ferrule.source.accesses.evaluation import evaluate
from ferrule.source.accesses.model import Access, Array, Times

pytest.importorskip("z3")

I = "uint i = thread_position_in_grid.x;\n"  # noqa: E741


def proof(rule: str, body: str, grid: Any, threadgroup: Any = 256, **more: Any) -> Proof:
    return prove(ferrule.op("k", rule, metal=body, grid=grid, threadgroup=threadgroup, **more))


WHOLE = "x[R,N]:uint32 -> y[R,N*8]:float32 where N * 8 % 64 == 0"
OF_64 = I + "for (int k = 0; k < 64; k++) y[i * 64 + k] = x[(i * 64 + k) / 8];"
SUMS = "x[R,K]:float32, w[R,K * 4 // 32]:uint32, s[R,K // 64]:float32 -> y[R,K // 64]:float32"
OF_BYTES = I + (
    "const device uchar* bytes = (const device uchar*)w + i * 32;\nfloat sum = 0;\n"
    "for (int k = 0; k < 64; k += 2)\n"
    "  sum += float(bytes[k / 2]) * x[i * 64 + k] * x[i * 64 + k + 1];\n"
    "y[i] = sum * s[i];"
)
PAIRS = I + "y[2 * i] = x[2 * i + 1];\ny[2 * i + 1] = x[2 * i];"
THREES = (
    "uint2 p = thread_position_in_grid.xy;\n"
    "ulong at = (ulong(p.y) * B + p.x) * 3;\n"
    "y[at] = x[at]; y[at + 1] = x[at + 2]; y[at + 2] = x[at + 1];"
)
RIGHT = {
    "whole groups": (WHOLE, OF_64, "R * N * 8 // 64"),
    "what is left of rows": (SUMS, OF_BYTES, "s.size"),
    "threes": ("x[A,B,3]:T -> y[A,B,3]:T", THREES, ("B", "A")),
    "pairs": ("x[N,2]:T -> y[N,2]:T", PAIRS, "N"),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_right(name: str) -> None:
    found = proof(*RIGHT[name])
    assert found.proved, str(found)


# What is wrong, of which property, and a word for it.
WRONG = {
    "groups that are not whole": ("coverage", WHOLE.split(" where")[0], OF_64, "R * N * 8 // 64"),
    "a group too many": (
        "bounds", WHOLE.split(" where")[0], OF_64, "ceildiv(R * N * 8, 64)",
    ),
    "half of a group": (
        "bounds", WHOLE.replace("% 64", "% 32"), OF_64, "ceildiv(R * N * 8, 64)",
    ),
    "groups that overlap": ("races", WHOLE, OF_64.replace("k < 64", "k < 65"), "R * N * 8 // 64"),
    "one element more": ("bounds", SUMS, OF_BYTES.replace("k < 64", "k < 66"), "s.size"),
    "bytes of longer rows": ("bounds", SUMS, OF_BYTES.replace("i * 32", "i * 33"), "s.size"),
    "rows of fours": (
        "bounds", RIGHT["threes"][0], THREES.replace("* 3;", "* 4;"), ("B", "A"),
    ),
    "another size": (
        "bounds", RIGHT["threes"][0], THREES.replace("* B +", "* A +"), ("B", "A"),
    ),
    "a row less": ("coverage", RIGHT["threes"][0], THREES, ("max(B - 1, 0)", "A")),
    "pairs that overlap": (
        "races", RIGHT["pairs"][0],
        I + "y[2 * i] = x[2 * i];\nif (i + 1 < N) y[2 * i + 2] = x[2 * i];", "N",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name: str) -> None:
    which, *call = WRONG[name]
    found = proof(*call)
    assert getattr(found, which).status == "counterexample", str(found)


def test_which_neighbour_is_to_blame() -> None:
    """Neighbours are one question; what is said is of the one that is wrong."""
    body = I + "y[3 * i] = x[3 * i];\ny[3 * i + 1] = x[3 * i];\ny[3 * i + 3] = x[3 * i];"
    found = proof("x[N,3]:T -> y[N,3]:T", body, "N")
    assert (found.bounds.status, found.bounds.line) == ("counterexample", 4), str(found)


ARRAY = Array("x", "device", 4)
PARTS = st.tuples(st.integers(-9, 9), st.integers(1, 4), st.sampled_from(["read", "write"]))


@settings(max_examples=200, deadline=None)
@given(st.lists(PARTS, min_size=1, max_size=12), st.booleans())
def test_joined(parts: list[tuple[int, int, str]], modes: bool) -> None:
    """Neighbours are the same elements, and each lies in what it is made of."""
    base = terms.mul(terms.const(64), terms.symbol("thread.x", 0, 100))
    accesses = [
        Access(n + 1, ARRAY, mode, terms.add(base, terms.const(at)), width, (), (), Times())
        for n, (at, width, mode) in enumerate(parts)
    ]

    def elements(of: list[Access], mode: str) -> set[int]:
        found: set[int] = set()
        for a in of:
            if a.mode == mode or not modes:
                first = evaluate(a.element, {"thread.x": 0})
                found.update(range(first, first + a.width))
        return found

    together = joined(accesses, modes=modes)
    for mode in ("read", "write"):
        assert elements([a for a, _ in together], mode) == elements(accesses, mode)
    for whole, of in together:
        assert elements([whole], whole.mode) == elements(of, whole.mode)


def test_barriers_keep_neighbours_apart() -> None:
    one, other = terms.symbol("n", 0, 9), terms.add(terms.symbol("n", 0, 9), terms.const(1))
    accesses = [
        Access(1, ARRAY, "write", one, 1, (), (), Times()),
        Access(2, ARRAY, "write", other, 1, (), (), Times(group=terms.const(1))),
        Access(3, ARRAY, "write", other, 1, (terms.flag("c"),), (), Times()),
    ]
    assert len(joined(accesses)) == 3


def test_cases_are_all_sizes() -> None:
    """Each size is in a case, and in a narrower one of that."""
    rule = "x[A,B,C]:T -> y[A,B // 4,C * 3 // 2]:T where B * 2 % 6 == 0"
    op = ferrule.op("k", rule, metal=I + "y[i] = x[i];", grid="A", threadgroup=1)
    call = symbolic_call(op.rule, op.implementations[0], [], 2**31)

    def holds(case: Case, sizes: dict[str, int]) -> bool:
        """Whether the sizes are in a case: some values of its symbols give them."""
        for name, size in sizes.items():
            dim = next(d.term for d in call.domains if d.name == name)
            term = case.by.get(dim, dim)
            fits = any(
                evaluate(term, values) == size
                for n in range(13) for r in range(13)
                for values in [{leaf.value: r if "%" in leaf.value else n for leaf in term.leaves}]
                if all(leaf.low <= values[leaf.value] <= leaf.high for leaf in term.leaves)
            )  # fmt: skip
            if not fits:
                return False
        return True

    def check(case: Case, sizes: dict[str, int]) -> None:
        if case.is_wide:
            inner = [each for each in case.narrower() if holds(each, sizes)]
            assert inner, (sizes, case.by)
            for each in inner:
                check(each, sizes)

    for a in range(3):
        for b in (0, 3, 6, 9):
            for c in range(5):
                sizes = {"A": a, "B": b, "C": c}
                inside = [case for case in cases_of(call) if holds(case, sizes)]
                assert inside, sizes
                for case in inside:
                    check(case, sizes)


EQUAL = "x[A,K]:float32, w[B,K]:float32 -> y[A,K]:float32 where A == B or K == 0"
OF_EQUAL = "uint2 p = thread_position_in_grid.xy;\ny[p.y * K + p.x] = w[p.y * K + p.x];"


def test_dims_that_are_equal() -> None:
    assert proof(EQUAL, OF_EQUAL, ("K", "A")).proved
    assert proof(EQUAL, OF_EQUAL, ("K", "B")).proved
    for where in ("A == B or K == 1", "A == B + 1 or K == 0", "A <= B + 1"):
        found = proof(EQUAL.replace("A == B or K == 0", where), OF_EQUAL, ("K", "A"))
        assert found.bounds.status == "counterexample", (where, str(found))


def test_effort_is_counted_in_steps() -> None:
    """The same question costs the same, and none is asked for which nothing is left."""
    x, y, z = (terms.symbol(name, 0, 10**6) for name in "xyz")
    parts = [
        terms.lt(terms.mul(x, y), terms.mul(y, z)),
        terms.lt(z, x),
        terms.lt(terms.const(0), y),
    ]
    costs = []
    for _ in range(3):
        effort = Effort(5.0)
        assert Question().answer(parts, effort, 1.0) is False
        costs.append(5.0 - effort.left)
    assert max(costs) - min(costs) < 0.01 + 0.1 * max(costs)
    assert Question().answer(parts, Effort(0.0), 1.0) is None


def test_too_little_effort_is_no_proof() -> None:
    rule, body, grid = RIGHT["threes"]
    found = prove(ferrule.op("k", rule, metal=body, grid=grid, threadgroup=1), timeout=1e-6)
    assert not found.proved
    assert not re.search("counterexample", str(found))
