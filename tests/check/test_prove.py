"""Proofs about ops: what is proved holds of every small call, and what is refuted goes wrong."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ferrule
from ferrule import KernelTypeError
from ferrule.check.proofs import solver as prove_solver
from ferrule.check.proofs.prove import Proof, prove

pytest.importorskip("z3")

I = "uint i = thread_position_in_grid.x;\n"  # noqa: E741
P = "uint2 p = thread_position_in_grid.xy;\n"


def proof(rule: str, body: str, grid: Any, threadgroup: Any = 256, **more: Any) -> Proof:
    op = ferrule.op("k", rule, metal=body, grid=grid, threadgroup=threadgroup, **more)
    return prove(op, timeout=20)


PROVED = {
    "elementwise": ("x[*S]:T -> y[*S]:T", I + "y[i] = x[i];", "x.size", 256),
    "row of weights": (
        "x[*S,D]:T, w[D]:T -> y[*S,D]:T", I + "y[i] = x[i] * w[i % D];", "x.size", 64,
    ),
    "guard": ("x[N]:T -> y[N]:T", I + "if (i < N) y[i] = x[i];", "ceildiv(N, 256) * 256", 256),
    "early return": ("x[N]:T -> y[N]:T", I + "if (i >= N) return;\ny[i] = x[i];", "N + 7", 256),
    "transpose": (
        "x[N,M]:T -> y[M,N]:T", P + "y[p.x * N + p.y] = x[p.y * M + p.x];", ("M", "N"), (16, 16),
    ),
    "three axes": (
        "x[A,B,C]:T -> y[C,A,B]:T",
        "uint3 p = thread_position_in_grid;\n"
        "y[(p.z * A + p.y) * B + p.x] = x[(p.y * B + p.x) * C + p.z];",
        ("B", "A", "C"), (8, 8, 1),
    ),
    "one index": (
        "x[A,B,C]:T -> y[A,C,B]:T",
        I + "uint c = i % C, b = i / C % B, a = i / C / B;\ny[(a * C + c) * B + b] = x[i];",
        "x.size", 64,
    ),
    "grid stride": (
        "x[N]:T -> y[N]:T",
        "for (uint i = thread_position_in_grid.x; i < N; i += threads_per_grid.x) y[i] = x[i];",
        "min(max(N, 1), 4096)", 256,
    ),
    "a row for each thread": (
        "x[R,N]:float32 -> y[R]:float32",
        I + "float s = 0;\nfor (int k = 0; k < N; ++k) s += x[i * N + k];\ny[i] = s;", "R", 64,
    ),
    "while": (
        "x[R,N]:float32 -> y[R,N]:float32",
        I + "uint k = 0;\nwhile (k < N) {\n  y[i * N + k] = x[i * N + k];\n  k++;\n}", "R", 64,
    ),
    "a row for each threadgroup": (
        "x[R,N]:float32 -> y[R,N]:float32",
        "uint l = thread_position_in_threadgroup.x, r = threadgroup_position_in_grid.y;\n"
        "float s = 0;\n"
        "for (uint k = l; k < N; k += threads_per_threadgroup.x) s += x[r * N + k];\n"
        "s = simd_sum(s);\n"
        "for (uint k = l; k < N; k += threads_per_threadgroup.x) y[r * N + k] = x[r * N + k] / s;",
        (32, "R"), (32, 1),
    ),
    "clamped": ("x[N]:T -> y[N]:T", I + "y[i] = x[min(i + 1u, uint(N - 1))];", "N", 64),
    "ternary": ("x[N]:T -> y[N]:T", I + "y[i] = i > 0 ? x[i - 1] : T(0);", "N", 64),
    "gather of what is checked": (
        "x[N]:T, at[M]:int32 -> y[M]:T",
        I + "int j = at[i];\ny[i] = j >= 0 && j < N ? x[j] : T(0);", "M", 64,
    ),
    "template": (
        "x[N]:T -> y[N]:T where N % 4 == 0",
        I + "for (int k = 0; k < W; ++k) y[i * W + k] = x[i * W + k];", "N // 4", 64,
    ),
    "vectors of four": (
        "x[N]:float32 -> y[N]:float32 where N % 4 == 0",
        I + "((device float4*)y)[i] = ((const device float4*)x)[i];", "N // 4", 64,
    ),
    "pointers": (
        "x[R,N]:T -> y[R,N]:T",
        P + "const device T* row = x + p.y * N;\ndevice T* to = &y[p.y * N];\nto[p.x] = row[p.x];",
        ("N", "R"), (32, 1),
    ),
    "bits": ("x[N]:T -> y[N]:T where N % 32 == 0",
             I + "y[(i & ~31u) | (31u - (i & 31u))] = x[(i >> 5 << 5) + i % 32];", "N", 256),
    "shape": (
        "x[R,N]:T -> y[R,N]:T",
        P + "y[p.y * x_shape[1] + p.x] = x[p.y * x_strides[0] + p.x];", ("N", "R"), (32, 1),
    ),
    "filled": ("x[N]:T -> y[N]:T", I + "if (i % 2 == 0) y[i] = x[i];", "N", 64),
}  # fmt: skip
MORE = {"template": {"template": {"W": 4}}, "filled": {"init_value": 0}}


@pytest.mark.parametrize("name", PROVED)
def test_proved(name: str) -> None:
    found = proof(*PROVED[name], **MORE.get(name, {}))
    assert found.proved, str(found)


TILE = """
threadgroup float tile[16][17];
uint2 l = thread_position_in_threadgroup.xy, g = threadgroup_position_in_grid.xy * 16;
if (g.y + l.y < N && g.x + l.x < M) tile[l.y][l.x] = x[(g.y + l.y) * M + g.x + l.x];
threadgroup_barrier(mem_flags::mem_threadgroup);
if (g.x + l.y < M && g.y + l.x < N) y[(g.x + l.y) * N + g.y + l.x] = tile[l.x][l.y];
"""
TILE_CALL = ("x[N,M]:float32 -> y[M,N]:float32", TILE,
             ("ceildiv(M, 16) * 16", "ceildiv(N, 16) * 16"), (16, 16))  # fmt: skip
TREE = """
threadgroup float t[64];
uint l = thread_position_in_threadgroup.x, r = threadgroup_position_in_grid.y;
float s = 0;
for (uint k = l; k < N; k += 64) s += x[r * N + k];
t[l] = s;
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint d = 32; d > 0; d >>= 1) {
  if (l < d) t[l] += t[l + d];
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
if (l == 0) y[r] = t[0];
"""
TREE_CALL = ("x[R,N]:float32 -> y[R]:float32", TREE, (64, "R"), (64, 1))


def test_tiles_are_proved() -> None:
    found = proof(*TILE_CALL)
    assert found.proved, str(found)


def test_trees_are_proved() -> None:
    found = proof(*TREE_CALL)
    assert (found.bounds.status, found.races.status) == ("proved", "proved"), str(found)
    assert found.coverage.status == "proved", str(found)


@pytest.mark.parametrize("flags", ["mem_none", "mem_device"])
def test_barriers_that_order_something_else(flags: str) -> None:
    rule, body, grid, group = TREE_CALL
    found = proof(rule, body.replace("mem_threadgroup);\nfor", f"{flags});\nfor"), grid, group)
    assert found.races.status == "counterexample", str(found)
    assert found.races.line == 9


def test_barriers_that_are_missing() -> None:
    rule, body, grid, group = TILE_CALL
    found = proof(rule, re.sub(r"threadgroup_barrier\(.*\);", "", body), grid, group)
    assert found.races.status == "counterexample", str(found)
    assert found.bounds.status == "proved"


def test_barriers_that_some_do_not_reach() -> None:
    rule, body, grid, group = TREE_CALL
    text = body.replace("if (l < d) t[l] += t[l + d];\n  thread", "if (l < d) thread")
    found = proof(rule, text, grid, group)
    assert found.races.status == "not supported"
    assert found.races.line == 9
    assert "may not reach" in found.races.message


REFUTED = {
    "one too far": (
        "bounds", 2, "x[N]:T -> y[N]:T", I + "y[i] = x[i + 1];", "N", 64, "element 1 of x",
    ),
    "one too early": (
        "bounds", 2, "x[N]:T -> y[N]:T", I + "y[i] = x[i - 1];", "N", 64, "element 4294967295 of x",
    ),
    "negative": (
        "bounds", 2, "x[N]:T -> y[N]:T", I + "y[i] = x[int(i) - 1];", "N", 64, "element -1 of x",
    ),
    "no guard": (
        "bounds", 2, "x[N]:T -> y[N]:T", I + "y[i] = x[i];", "ceildiv(N, 64) * 64", 64, "which has",
    ),
    "wrong guard": (
        "bounds", 2, "x[N]:T -> y[N]:T", I + "if (i <= N) y[i] = x[i];", "N + 64", 64, "of x",
    ),
    "transposed": (
        "bounds", 2, "x[N,M]:T -> y[M,N]:T", P + "y[p.x * N + p.y] = x[p.y * N + p.x];",
        ("M", "N"), (8, 8), "of x",
    ),
    "data": (
        "bounds", 2, "x[N]:T, at[M]:int32 -> y[M]:T", I + "y[i] = x[at[i]];", "M", 64, "of x",
    ),
    "zero": ("bounds", 2, "x[N]:T, n:int32 -> y[N]:T", I + "y[i] = x[int(i) / n % N];", "N", 64,
             "division by zero"),
    "private": (
        "bounds", 3, "x[N]:T -> y[N]:T",
        I + "T a[4];\nfor (int k = 0; k <= 4; k++) a[k] = x[i];\ny[i] = a[0];", "N", 64,
        "element 4 of a",
    ),
    "shared": (
        "bounds", 3, "x[N]:T -> y[N]:T",
        I + "threadgroup T a[32];\na[thread_index_in_threadgroup] = x[i];\ny[i] = x[i];", "N", 64,
        "of a",
    ),
    "the same element": (
        "races", 2, "x[N]:T -> y[N]:T", I + "y[i / 2] = x[i];", "N", 64, "element 0 of y",
    ),
    "a neighbour": (
        "races", 2, "x[N]:T! ->", I + "x[i] = i > 0 ? x[i - 1] : T(0);", "N", 64, "of x",
    ),
    "every other one": (
        "coverage", 2, "x[N]:T -> y[N]:T", I + "if (i % 2 == 0) y[i] = x[i];", "N", 64, "first 1",
    ),
    "the last one": (
        "coverage", 2, "x[N]:T -> y[N]:T", I + "y[i] = x[i];", "max(N - 1, 0)", 64, "never written",
    ),
    "a rest": (
        "coverage", 2, "x[N]:T -> y[N]:T", I + "for (int k = 0; k < 4; k++) y[4 * i + k] = 0;",
        "N // 4", 64, "never written",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUTED)
def test_refuted(name: str) -> None:
    which, line, rule, body, grid, group, words = REFUTED[name]
    found = proof(rule, body, grid, group)
    verdict = getattr(found, which)
    assert verdict.status == "counterexample", str(found)
    assert verdict.line == line, str(found)
    assert words in verdict.message, str(found)
    assert verdict.call.startswith("k(")
    assert not found.proved


def test_overflow_of_large_sizes() -> None:
    """An int holds ``p.y * M`` of what fits into no array of the rule."""
    rule = "x[N]:uint8, w[M]:uint8 -> y[N]:uint8"
    body = P + "int j = int(p.y) * M;\nif (j >= 0 && j + int(p.x) < N) y[p.x] = x[j + int(p.x)];"
    found = proof(rule, body, ("N", "N"), (64, 1))
    assert found.bounds.status == "counterexample", str(found)
    assert found.bounds.line in (2, 3)
    assert "overflow of int" in found.bounds.message
    sizes = [int(n) for n in re.findall(r"\((\d+),\)", found.bounds.call)]
    assert (sizes[0] - 1) * sizes[1] > 2**31 - 1


def test_overflow_is_ruled_out_by_the_array() -> None:
    body = I + "int j = int(i) / N * N + int(i) % N;\ny[j] = x[j];"
    found = proof("x[R,N]:uint8 -> y[R,N]:uint8", body, "R*N", 64)
    assert found.proved, str(found)


def test_numbers_that_are_only_values() -> None:
    """A sum that overflows for some number of a call, and that no index rests on."""
    rule = "x[N]:float32, n:int32 -> y[N]:float32"
    assert proof(rule, I + "y[i] = x[i] * float(n + 1);", "N").proved
    found = proof(rule, I + "y[i] = n + 1 > 0 ? x[min(i, uint(N - 1))] : 0.0f;", "N")
    assert found.bounds.status == "counterexample", str(found)
    assert "overflow of int" in found.bounds.message


def test_arrays_may_be_larger() -> None:
    """32 bits count the elements of arrays below 2**31, and not of all."""
    rule, body, grid = "x[R,N]:uint8 -> y[R,N]:uint8", P + "y[p.y * N + p.x] = 0;", ("N", "R")
    op = ferrule.op("k", rule, metal=body, grid=grid, threadgroup=64)
    assert prove(op).bounds.status == "proved"
    larger = prove(op, most=2**40)
    assert larger.races.status == "counterexample", str(larger)
    assert "2**40" in str(larger)


UNSUPPORTED = {
    "switch": (2, "x[N]:T -> y[N]:T", I + "switch (i) { case 0: y[i] = x[i]; }", "switch"),
    "goto": (2, "x[N]:T -> y[N]:T", I + "again: y[i] = x[i];", "not followed"),
    "of a loop": (
        4, "x[N]:T, at[N]:int32 -> y[N]:T",
        I + "int j = 0;\nfor (int k = 0; k < N; k++) j = j ^ at[k];\ny[i] = x[j];", "carried along",
    ),
    "fewer dims": (
        2, "x[*S]:T -> y[*S]:T", I + "y[i] = x[elem_to_loc(i, x_shape, x_strides, x_ndim - 1)];",
        "given a pointer",
    ),
    "pointers of pointers": (
        2, "x[N]:T -> y[N]:T", I + "const device T* a[2] = {x, x};\ny[i] = a[i % 2][i];",
        "not followed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported(name: str) -> None:
    line, rule, body, words = UNSUPPORTED[name]
    found = proof(rule, body, "x.size")
    assert found.bounds.status == "not supported", str(found)
    assert found.bounds.line == line, str(found)
    assert words in found.bounds.message, str(found)


def test_functions_of_the_header() -> None:
    header = """
inline uint at(uint r, uint k, uint n) { return r * n + k; }
template <typename A>
inline void put(device A* to, uint i, A v) { if (i > 0) { to[i] = v; return; } to[0] = v; }
"""
    body = P + "put(y, at(p.y, p.x, N), x[at(p.y, p.x, uint(N))]);"
    rule, grid = "x[R,N]:T -> y[R,N]:T", ("N", "R")
    found = proof(rule, body, grid, (32, 1), header=header)
    assert found.proved, str(found)
    wrong = proof(rule, body, grid, (32, 1), header=header.replace("to[i]", "to[i + 1]"))
    assert wrong.bounds.status == "counterexample"
    assert (wrong.bounds.line, wrong.bounds.where) == (4, "header")
    assert "of the header" in str(wrong)


def test_macros_and_lambdas() -> None:
    body = """
#define AT(k) (i * N + (k))
const uint i = thread_position_in_grid.x;
auto put = [&](uint k) { y[AT(k)] = x[AT(k)]; };
for (uint k = 0; k < N; k++) put(k);
"""
    found = proof("x[R,N]:T -> y[R,N]:T", body, "R")
    assert found.proved, str(found)


def test_absent_inputs() -> None:
    rule = "x[N]:T, b[N]:T? -> y[N]:T"
    asks = I + "y[i] = has_b ? x[i] + b[i] : x[i];"
    assert proof(rule, asks, "N").proved
    found = proof(rule, I + "y[i] = x[i] + b[has_b ? i : 0];", "N")
    assert found.bounds.status == "counterexample"
    assert found.bounds.call == "k(np.zeros((1,), np.float32), None)"


def test_several_bodies() -> None:
    good, bad = I + "y[i] = x[i];", I + "y[i] = x[i + 1];"
    bodies = [
        ferrule.metal_body(good, grid="N", threadgroup=64, when="N < 5"),
        ferrule.metal_body(bad, grid="N", threadgroup=64),
    ]
    found = prove(ferrule.op("k", "x[N]:T -> y[N]:T", metal=bodies))
    assert found.bounds.status == "counterexample"
    assert "Metal body number 2" in found.bounds.message
    assert found.bounds.call == "k(np.zeros((5,), np.float32))"


def test_ops_without_a_metal_body() -> None:
    found = prove(ferrule.op("k", "x[N]:T -> y[N]:T", reference=lambda x: x))
    assert found.bounds.status == "not supported"
    assert "no Metal body" in str(found)


def test_what_is_no_op() -> None:
    with pytest.raises(KernelTypeError, match="expected an op"):
        prove(max)  # type: ignore[arg-type]


def test_without_the_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "z3", None)
    with pytest.raises(prove_solver.NoSolver, match=r"ferrule\[prove\]"):
        proof("x[N]:T -> y[N]:T", I + "y[i] = x[i];", "N")


def test_no_time() -> None:
    op = ferrule.op("k", "x[A,B,C]:T -> y[A,C,B]:T", metal=PROVED["one index"][1], grid="x.size",
                    threadgroup=64)  # fmt: skip
    found = prove(op, timeout=0.001)
    assert found.bounds.status == "not supported"
    assert "no answer in 0.001 s" in found.bounds.message


# -- random kernels --------------------------------------------------------------------------------

Tree = Any  # a name, a number, or (operator, left, right)
WORD = 2**32


def text_of(tree: Tree) -> str:
    if isinstance(tree, tuple):
        op, a, b = tree
        if op in ("min", "max"):
            return f"metal::{op}({text_of(a)}, {text_of(b)})"
        return f"({text_of(a)} {op} {text_of(b)})"
    return f"{tree}u" if isinstance(tree, int) else str(tree)


def value_of(tree: Tree, names: dict[str, int]) -> int:
    """The value that 32 bits hold."""
    if isinstance(tree, int):
        return tree
    if isinstance(tree, str):
        return names[tree]
    op, left, right = tree
    a, b = value_of(left, names), value_of(right, names)
    if op in ("/", "%"):
        return a // b if op == "/" else a % b
    results = {"+": a + b, "-": a - b, "*": a * b, "min": min(a, b), "max": max(a, b)}
    return results[op] % WORD


NAMES = st.sampled_from(["i", "j", "A", "B", "k"])
TREES = st.recursive(
    NAMES | st.integers(0, 4),
    lambda inner: st.tuples(st.sampled_from(["+", "-", "*", "/", "%", "min", "max"]), inner, inner),
    max_leaves=5,
)
# Indices that are often right.
LIKELY = st.sampled_from([
    "i", ("+", ("*", "j", "A"), "i"), ("+", ("*", "i", "B"), "k"), ("+", ("*", "i", "B"), "j"),
    ("-", ("-", "A", "i"), 1), ("%", "i", "A"), ("/", "i", 2), ("+", ("*", 2, "i"), "j"),
    ("+", ("*", ("/", "i", "B"), "B"), ("%", "i", "B")), ("-", "i", 1), ("+", "i", "k"),
])  # fmt: skip
INDICES = LIKELY | TREES
GUARDS = st.none() | st.sampled_from(["<", "<=", "!="])
GRIDS = st.sampled_from([
    ("A", "1"), ("A*B", "1"), ("A", "B"), ("B", "A"), ("A*B+3", "1"), ("A//2", "2"), ("4", "B"),
])  # fmt: skip


@st.composite
def kernels(draw: Any) -> dict[str, Any]:
    return {
        "grid": draw(GRIDS), "read": draw(INDICES), "write": draw(INDICES), "guard": draw(GUARDS),
        "left": draw(INDICES), "right": draw(INDICES),
        "rounds": draw(st.sampled_from([None, "A", "B", 3])),
        "step": draw(st.sampled_from([1, 2])),
    }  # fmt: skip


def body_of(kernel: dict[str, Any]) -> str:
    lines = [
        "uint i = thread_position_in_grid.x, j = thread_position_in_grid.y;",
        "uint A = uint(N0), B = uint(N1);",
    ]
    access = f"y[{text_of(kernel['write'])}] = x[{text_of(kernel['read'])}];"
    if kernel["guard"]:
        left, right = text_of(kernel["left"]), text_of(kernel["right"])
        access = f"if ({left} {kernel['guard']} {right}) {access}"
    if kernel["rounds"] is None:
        return "\n".join([*lines, "const uint k = 0;", access])
    head = f"for (uint k = 0; k < {text_of(kernel['rounds'])}; k += {kernel['step']})"
    return "\n".join([*lines, f"{head} {access}"])


def steps(kernel: dict[str, Any], a: int, b: int) -> Iterator[tuple[int, int | None, int | None]]:
    """Each thread's accesses: who, what it reads, and what it writes; None of a fault."""
    values = {"A": a, "B": b}
    grid = [max(eval(g, {}, dict(values)), 0) for g in kernel["grid"]]
    compare = {"<": lambda x, y: x < y, "<=": lambda x, y: x <= y, "!=": lambda x, y: x != y}
    for thread, (j, i) in enumerate(itertools.product(range(grid[1]), range(grid[0]))):
        names = {**values, "i": i, "j": j}
        last = 1 if kernel["rounds"] is None else value_of(kernel["rounds"], names)
        for k in range(0, last, kernel["step"]):
            inner = {**names, "k": k}
            try:
                if kernel["guard"] and not compare[kernel["guard"]](
                    value_of(kernel["left"], inner), value_of(kernel["right"], inner)
                ):
                    continue
                read, write = value_of(kernel["read"], inner), value_of(kernel["write"], inner)
            except ZeroDivisionError:
                yield thread, None, None
                return
            yield thread, read, write


def faults(kernel: dict[str, Any], a: int, b: int) -> set[str]:
    """What goes wrong in a call with these sizes, by running all threads."""
    found, writers, size = set(), {}, a * b
    for thread, read, write in steps(kernel, a, b):
        if read is None or write is None:
            return {"bounds", "unknown"}
        if read >= size or write >= size:
            found.add("bounds")
        if writers.setdefault(write, thread) != thread:
            found.add("races")
    if set(range(size)) - set(writers):
        found.add("coverage")
    return found


def check_against_runs(kernel: dict[str, Any]) -> Proof:
    names = {"A": "N0", "B": "N1"}
    grid = [re.sub("[AB]", lambda m: names[m[0]], g) for g in kernel["grid"]]
    op = ferrule.op("k", "x[N0,N1]:float32 -> y[N0,N1]:float32", metal=body_of(kernel), grid=grid,
                    threadgroup=(64, 1))  # fmt: skip
    found = prove(op, timeout=1.5)
    assert "not followed" not in str(found), (body_of(kernel), str(found))
    for a, b in itertools.product(range(6), repeat=2):
        wrong = faults(kernel, a, b)
        for name in ("bounds", "races", "coverage"):
            if name in wrong or ("unknown" in wrong and name == "bounds"):
                assert getattr(found, name).status != "proved", (body_of(kernel), a, b, str(found))
    for name in ("bounds", "races", "coverage"):
        verdict = getattr(found, name)
        if verdict.status == "counterexample":
            a, b = map(int, re.search(r"\((\d+), (\d+)\)", verdict.call).groups())
            if a * b <= 4096:
                wrong = faults(kernel, a, b)
                assert {name, "unknown"} & wrong, (body_of(kernel), a, b, str(found))
    return found


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(kernels())
def test_random_kernels(kernel: dict[str, Any]) -> None:
    check_against_runs(kernel)
