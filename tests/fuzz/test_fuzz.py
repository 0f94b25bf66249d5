"""A fixed slice of the fuzzer, and that the fuzzer can find what is wrong."""

from __future__ import annotations

import numpy as np
import pytest

import ferrule

from . import harness
from . import program as p
from .generate import Generator
from .operations import Invalid
from .reference import Reference
from .shrink import shrink

SEEDS = range(7_000, 7_090)  # about a minute on one core
QUICK = 4  # of them are no slow tests
LAUNCH = p.Launch((8, 1, 1), (8, 1, 1), 0)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness.cpu, "_FLAGS", harness.cpu._FLAGS)
    harness.optimise(1)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize(
    "seed",
    [*SEEDS[:QUICK], *(pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS[QUICK:])],
)
def test_program(seed: int) -> None:
    program = Generator(seed).program()
    outcome = harness.check(program)
    assert outcome.kind in ("ok", "invalid", "compiler"), harness.report(program, outcome)


def test_most_programs_are_defined() -> None:
    defined = 0
    for seed in range(40):
        try:
            harness.expected(Generator(seed).program())
            defined += 1
        except Invalid:
            pass
    assert defined >= 32


def test_equal_seeds_give_equal_programs() -> None:
    for seed in range(20):
        one, two = Generator(seed).program(), Generator(seed).program()
        assert one.header_text() == two.header_text()
        assert one.body_text() == two.body_text()
        assert one.launches == two.launches


def test_programs_are_varied() -> None:
    text = "".join(
        Generator(seed).program().header_text() + Generator(seed).program().body_text()
        for seed in range(100)
    )
    for word in (
        "simd_sum(", "simd_shuffle_xor(", "quad_", "simd_any(", "threadgroup_barrier(", "return;",
        "break;", "continue;", "#define", "[&]", "thread int &", "atomic_fetch_add", "half",
        "while (", "do {", "switch (", "constexpr", "elem_to_loc", "y += ", "simdgroup_barrier",
        "template <", ".xy", "? ", "auto ", "static_cast<", "ushort", "simd_vote",
    ):  # fmt: skip
        assert word in text, word


def _simple(value: p.Expr) -> p.Program:
    """``y[i] = value``."""
    y, i = p.Var("y", p.INT, "output"), p.Var("i", p.UINT)
    body: list[p.Stmt] = [
        p.Decl(i, p.Attr("thread_position_in_grid", "x")),
        p.Decl(p.Var("spare", p.INT), p.Lit(3, p.INT)),
        p.Assign(p.Index(y, p.Name(i)), "=", value),
    ]
    return p.Program(1, [], body, [], [(y, 1)], [], [LAUNCH])


def test_a_wrong_result_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = p.Cast(p.Attr("thread_index_in_simdgroup"), p.INT)
    program = _simple(p.Bin("+", p.Sync("simd_sum", [lane], p.INT), p.Lit(1, p.INT), p.INT))
    assert harness.check(program).kind == "ok"
    right = harness.build

    def wrong(given: p.Program) -> ferrule.MetalKernel:
        kernel = right(given)
        source = kernel.kernel.source.replace("simd_sum", "simd_max")
        return ferrule.metal_kernel(kernel.kernel.name, [], ["y"], source)

    monkeypatch.setattr(harness, "build", wrong)
    outcome = harness.check(program)
    assert outcome.kind == "mismatch"
    assert "y[0] is 8, expected 29" in outcome.where
    shrink(program, lambda smaller: harness.check(smaller, ("fibers",)).kind == "mismatch")
    assert "spare" not in program.body_text()
    assert "simd_sum" in program.body_text()


def test_what_does_not_compile_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    program = _simple(p.Lit(1, p.INT))
    monkeypatch.setattr(
        harness, "build", lambda given: ferrule.metal_kernel("bad", [], ["y"], "y[0] = nothing;")
    )
    outcome = harness.check(program)
    assert outcome.kind == "error"
    assert "nothing" in harness.report(program, outcome)


# -- the reference alone ---------------------------------------------------------------------------


def _run(value: p.Expr) -> list[int]:
    return [int(v) for v in Reference(_simple(value), LAUNCH).run()[0]]


def test_reference_arithmetic() -> None:
    def number(v: int) -> p.Lit:
        return p.Lit(v, p.INT)

    assert _run(p.Bin("/", number(-7), number(2), p.INT))[0] == -3
    assert _run(p.Bin("%", number(-7), number(2), p.INT))[0] == -1
    wrapped = p.Bin("-", p.Lit(3, p.UINT), p.Lit(5, p.UINT), p.UINT)
    assert _run(p.Cast(p.Bin(">>", wrapped, number(31), p.UINT), p.INT))[0] == 1
    with pytest.raises(Invalid, match="overflows"):
        _run(p.Bin("*", number(1 << 20), number(1 << 20), p.INT))
    with pytest.raises(Invalid, match="division by zero"):
        _run(p.Bin("/", number(1), number(0), p.INT))


def test_reference_operations_see_active_lanes() -> None:
    lane = p.Attr("thread_index_in_simdgroup")
    low = p.Bin("<", lane, p.Lit(3, p.UINT), p.BOOL)
    one = p.Lit(1, p.INT)
    counted = p.Cond(low, p.Sync("simd_sum", [one], p.INT), p.Sync("simd_sum", [one], p.INT))
    assert _run(counted) == [3] * 3 + [5] * 5
    far = p.Sync("simd_shuffle_down", [p.Cast(lane, p.INT), p.Lit(6, p.UINT)], p.INT)
    assert _run(far) == [6, 7, 2, 3, 4, 5, 6, 7]
    prefix = p.Sync("simd_prefix_exclusive_sum", [p.Cast(lane, p.INT)], p.INT)
    assert _run(prefix) == list(np.cumsum([0, *range(7)]))
    filled = p.Sync(
        "simd_shuffle_and_fill_up",
        [p.Cast(lane, p.INT), p.Lit(50, p.INT), p.Lit(2, p.UINT), p.Lit(4, p.INT)], p.INT,
    )  # fmt: skip
    assert _run(filled) == [50, 50, 0, 1, 50, 50, 4, 5]


def test_reference_refuses_races_and_partial_barriers() -> None:
    t = p.Var("t", p.INT, "shared", 8, "threadgroup")
    lane = p.Attr("thread_index_in_threadgroup")
    other = p.Bin("^", lane, p.Lit(1, p.UINT), p.UINT)
    program = _simple(p.Index(t, other))
    write = [p.Decl(t), p.Assign(p.Index(t, lane), "=", p.Cast(lane, p.INT))]
    program.body[:0] = write
    with pytest.raises(Invalid, match="race"):
        Reference(program, LAUNCH).run()
    program.body.insert(2, p.Barrier())
    assert list(Reference(program, LAUNCH).run()[0]) == [1, 0, 3, 2, 5, 4, 7, 6]
    few = p.Bin("<", lane, p.Lit(3, p.UINT), p.BOOL)
    program.body[2] = p.If(few, [p.Barrier()], [])
    with pytest.raises(Invalid, match="do not reach"):
        Reference(program, LAUNCH).run()
    program.body[2] = p.If(few, [p.Return()], [])
    program.body.insert(3, p.Barrier())
    assert list(Reference(program, LAUNCH).run()[0]) == [0, 0, 0, 2, 5, 4, 7, 6]
