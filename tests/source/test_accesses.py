"""The accesses of a body: which there are, where, under what conditions, between which barriers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrule import dtypes
from ferrule.kernel import make_kernel
from ferrule.source.accesses import terms
from ferrule.source.accesses.evaluation import NoValue, evaluate
from ferrule.source.accesses.kinds import INT, UINT, type_of
from ferrule.source.accesses.model import Access, Accesses
from ferrule.source.accesses.read import accesses
from ferrule.source.cpp import prepare
from ferrule.spec import Input, Spec

I = "uint i = thread_position_in_grid.x;\n"  # noqa: E741


def found(source: str, header: str = "", **template: Any) -> Accesses:
    """The accesses of a body that has x[.,.], at[.] of int32, N and y."""
    kernel = make_kernel("k", ["x", "at", "N"], ["y"], source, header)
    inputs = (Input(dtypes.float32, 2), Input(dtypes.int32, 1), Input(dtypes.int32, 0))
    return accesses(prepare(Spec(kernel, inputs, (dtypes.float32,), tuple(template.items()))))


def only(source: str, name: str = "y", **more: Any) -> Access:
    """The one access of an array."""
    whole = found(source, **more)
    assert not whole.unsupported
    (access,) = (a for a in whole.accesses if a.array.name == name)
    return access


def index(expression: str, **values: int) -> int:
    """The index that an expression of i, j (ints) and N is."""
    source = f"{I}int j = int(thread_position_in_grid.y);\ny[{expression}] = 0;"
    given_ = {
        f"thread_position_in_grid.{a}": values.get(n, 0) for a, n in zip("xy", "ij", strict=True)
    }
    return evaluate(only(source).element, {**given_, "N": values.get("N", 7)})


def test_access() -> None:
    access = only(I + "if (i < N)\n  y[i * 2] = x[i];")
    assert (access.line, access.mode, access.width, access.where) == (3, "write", 1, "source")
    assert access.exact
    assert len(access.path) == 1
    read = only(I + "if (i < N)\n  y[i * 2] = x[i];", "x")
    assert (read.line, read.mode, read.array.space) == (3, "read", "device")


@pytest.mark.parametrize(
    ("expression", "values", "expected"),
    [
        ("i - 1", {"i": 0}, 2**32 - 1),
        ("j - 1", {"j": 0}, -1),
        ("uint(j - 1)", {"j": 0}, 2**32 - 1),
        ("i * 65536", {"i": 65536}, 0),
        ("size_t(i) * 65536", {"i": 65536}, 2**32),
        ("ushort(i)", {"i": 65537}, 1),
        ("char(i)", {"i": 200}, -56),
        ("(j - 5) / 2", {"j": 0}, -2),
        ("(j - 5) % 3", {"j": 0}, -2),
        ("(j - 5) >> 1", {"j": 0}, -3),
        ("i & 12u", {"i": 0b11010}, 0b1000),
        ("i | 5u", {"i": 0b1001}, 0b1101),
        ("i ^ 5u", {"i": 0b1001}, 0b1100),
        ("~i", {"i": 0}, 2**32 - 1),
        ("i << 3", {"i": 5}, 40),
        ("i < 3 ? i : 3", {"i": 9}, 3),
        ("min(i, 4u) + max(j, -2)", {"i": 9, "j": 1}, 5),
        ("metal::clamp(j, 2, N - 1)", {"j": 100, "N": 9}, 8),
        ("i < 3 && j > 0", {"i": 1, "j": 1}, 1),
        ("!(i < 3 || j > 0)", {"i": 5, "j": 0}, 1),
        ("abs(j - 9)", {"j": 2}, 7),
        ("-j + 3", {"j": 1}, 2),
        ("uint2(i, 3).y + uint3(i).z", {"i": 4}, 7),
        ("0x10 + 010 + 1'000u + 2l", {}, 16 + 8 + 1000 + 2),
        ("sizeof(float) * i", {"i": 2}, 8),
        ("int(uint2(j, i).x)", {"j": 6}, 6),
        ("as_type<int>(i - 1)", {"i": 0}, -1),
        ("i++ + i", {"i": 1}, 3),
    ],
)
def test_arithmetic_of_cpp(expression: str, values: dict[str, int], expected: int) -> None:
    assert index(expression, **values) == expected


def test_overflow_is_an_obligation() -> None:
    whole = found(I + "int k = int(i) * N;\ny[k] = 0;")
    (obligation,) = (o for o in whole.obligations if o.what == "overflow")
    assert (obligation.line, obligation.kind) == (2, INT)
    assert not any(o.what == "overflow" for o in found(I + "y[i * N] = 0;").obligations)
    assert found(I + "y[i / N] = 0;").obligations[0].what == "division"


def test_loops() -> None:
    access = only("for (int k = 2; k < N; k += 3)\n  y[k] = 0;")
    (loop,) = access.loops
    values = {"N": 9, loop.counter: 2}
    assert evaluate(access.element, values) == 8
    assert evaluate(loop.holds, values)
    assert not evaluate(loop.holds, {**values, loop.counter: 3})
    assert access.exact


def test_what_a_loop_leaves_behind() -> None:
    access = only("int k = 1;\nwhile (k < N) { k += 2; }\ny[k] = 0;")
    assert [evaluate(access.element, {"N": n}) for n in (0, 1, 2, 5, 6)] == [1, 1, 3, 5, 7]


def test_loops_of_few_rounds_are_unrolled() -> None:
    whole = found("for (uint s = 8; s > 0; s >>= 1) y[s] = 0;")
    assert [a.element.value for a in whole.accesses] == [8, 4, 2, 1]


def test_what_a_loop_carries_is_unknown() -> None:
    access = only("int k = 0;\nfor (int n = 0; n < N; n++) k += at[n];\ny[k] = 0;")
    assert not access.exact


def test_breaks_make_rounds_uncertain() -> None:
    assert not only("for (int k = 0; k < N; k++) { if (at[k] > 0) break; y[k] = 0; }").exact
    assert only("for (int k = 0; k < N; k++) { if (at[k] > 0) continue; y[k] = 0; }").exact


def test_conditions() -> None:
    body = I + "if (i >= N) return;\nif (i == 3) { y[0] = 0; } else y[1] = 0;\ny[2] = 0;"
    first, other, last = found(body).accesses
    for i, n, runs in ((3, 9, "YNY"), (4, 9, "NYY"), (9, 9, "NNN")):
        values = {"thread_position_in_grid.x": i, "N": n}
        for access, expected in zip((first, other, last), runs, strict=True):
            holds = all(evaluate(c, values) for c in access.path)
            assert holds == (expected == "Y")


def test_variables_that_branches_change() -> None:
    body = I + "int k = 1;\nif (i > 4) k = 2; else if (i > 2) { k = 5; }\ny[k] = 0;"
    access = only(body)
    values = [evaluate(access.element, {"thread_position_in_grid.x": i}) for i in (0, 3, 9)]
    assert values == [1, 5, 2]


def test_functions_are_inlined() -> None:
    header = """
constant int SCALE = 3;
template <typename A, int M> inline A times(A v) { if (v > 10) return 0; return v * M; }
inline void add(thread int& to, int by) { to += by * SCALE; }
"""
    body = I + "int k = times<int, 2>(int(i));\nadd(k, 2);\ny[k] = 0;"
    access = only(body, header=header)
    assert evaluate(access.element, {"thread_position_in_grid.x": 4}) == 14
    assert evaluate(access.element, {"thread_position_in_grid.x": 11}) == 6


def test_accesses_in_functions_have_the_lines_of_the_header() -> None:
    header = "\ninline void put(device float* p, uint i) {\n  p[i + 1] = 0;\n}\n"
    access = only(I + "put(y + 2, i);", header=header)
    assert (access.line, access.where) == (3, "header")
    assert evaluate(access.element, {"thread_position_in_grid.x": 4}) == 7


def test_macros_are_expanded() -> None:
    access = only("#define AT(k) ((k) * N + 1)\n" + I + "y[AT(i)] = 0;")
    assert access.line == 3
    assert evaluate(access.element, {"thread_position_in_grid.x": 2, "N": 5}) == 11


def test_lambdas() -> None:
    by_reference = "int k = 1;\nauto next = [&]() { k += 2; return k; };\nnext();\ny[next()] = 0;"
    assert evaluate(only(by_reference).element, {}) == 5
    by_value = "int k = 1;\nauto get = [=]() { return k; };\nk = 9;\ny[get()] = 0;"
    assert evaluate(only(by_value).element, {}) == 1


def test_pointers() -> None:
    body = (
        I
        + "device float* p = y + 3;\np += i;\n"
        + "device float4* q = (device float4*)(p + 1);\nq[2] = 0;"
    )
    access = only(body)
    assert (evaluate(access.element, {"thread_position_in_grid.x": 2}), access.width) == (14, 4)
    narrow = only("device uchar* p = (device uchar*)y;\np[9] = 0;")
    assert evaluate(narrow.element, {}) == 2


def test_own_arrays() -> None:
    whole = found(I + "float a[2][3];\na[1][i] = 0;\nthreadgroup float t[N * 2];\nt[i] = a[0][2];")
    a, t = (next(x for x in whole.accesses if x.array.name == n) for n in "at")
    assert (a.array.space, t.array.space) == ("private", "threadgroup")
    assert evaluate(a.element, {"thread_position_in_grid.x": 2}) == 5
    assert a.array.length is not None
    assert evaluate(a.array.length, {}) == 6
    assert t.array.length is not None
    assert evaluate(t.array.length, {"N": 4}) == 8


def test_barriers() -> None:
    body = (
        "threadgroup float t[8];\nuint l = thread_position_in_threadgroup.x;\nt[l] = 0;\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);\nt[l] += 1;\n"
        "threadgroup_barrier(mem_flags::mem_none);\nt[l] = 2;\n"
        "for (int k = 0; k < N; k++) {\n  threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "  t[l] = 3;\n}\nt[l] = 4;"
    )
    whole = found(body)
    assert not whole.unsupported
    times = {a.line: a.times.group for a in whole.accesses}
    (loop,) = next(a for a in whole.accesses if a.line == 10).loops
    values = {"N": 5, loop.counter: 3}
    assert [evaluate(times[n], values) for n in (3, 5, 7, 10, 12)] == [0, 1, 1, 5, 6]


def test_barriers_under_what_threads_do_not_share() -> None:
    body = I + "if (i < 4) threadgroup_barrier(mem_flags::mem_threadgroup);\ny[i] = 0;"
    (unsupported,) = found(body).unsupported
    assert unsupported.line == 2
    assert "may not reach" in unsupported.why
    shared = "if (N < 4) threadgroup_barrier(mem_flags::mem_threadgroup);\ny[0] = 0;"
    assert not found(shared).unsupported


def test_atomics() -> None:
    access = only(
        I + "atomic_fetch_add_explicit((device atomic_uint*)&y[i], 1u, memory_order_relaxed);"
    )
    assert access.mode == "atomic"


def test_matrices() -> None:
    whole = found("simdgroup_float8x8 a;\nsimdgroup_load(a, x, 10);\nsimdgroup_store(a, y, 8);")
    assert not whole.unsupported
    for name, stride in (("x", 10), ("y", 8)):
        touched = {
            evaluate(a.element, {"thread_index_in_simdgroup": lane})
            for a in whole.accesses if a.array.name == name for lane in range(32)
        }  # fmt: skip
        assert touched == {r * stride + c for r in range(8) for c in range(8)}


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("int k = 0;\nswitch (N) { case 1: k = 2; }\ny[k] = 0;", 2),
        ("\ngoto end;\nend: y[0] = 0;", 2),
        ("struct S { const device float* p; };\nS s;\ns.p = x;\ny[0] = s.p[0];", 3),
        ("const device float* p[2] = {x, x};\ny[0] = p[1][0];", 1),
        ("\ny[0] = unheard_of(x);", 2),
        ("\nauto f = [N](int k) { return k; };\ny[f(1)] = 0;", 2),
    ],
)
def test_what_is_not_understood(body: str, line: int) -> None:
    assert min(u.line for u in found(body).unsupported) == line


def test_what_is_given_of_templates() -> None:
    kernel = make_kernel("k", ["x"], ["y"], "y[W * 2] = 0;")
    spec = Spec(kernel, (Input(dtypes.float32, 1),), (dtypes.float32,), (("W", 4),))
    assert evaluate(accesses(prepare(spec)).accesses[0].element, {}) == 8
    width = terms.symbol("width", 0, 100)
    (access,) = accesses(prepare(spec), symbolic={"W": width}).accesses
    assert evaluate(access.element, {"width": 7}) == 14


@pytest.mark.parametrize(
    ("text", "bits", "signed", "lanes", "size"),
    [
        ("const uint", 32, False, 1, 4), ("unsigned long", 64, False, 1, 8),
        ("long int", 64, True, 1, 8), ("device const uchar4", 8, False, 4, 4),
        ("metal::uint3", 32, False, 3, 16), ("packed_short3", 16, True, 3, 6),
        ("vec<int, 2>", 32, True, 2, 8), ("atomic_uint", 32, False, 1, 4),
        ("signed char", 8, True, 1, 1), ("bool", 1, False, 1, 1), ("size_t", 64, False, 1, 8),
    ],
)  # fmt: skip
def test_types(text: str, bits: int, signed: bool, lanes: int, size: int) -> None:
    found_type = type_of(text, {})
    assert found_type.kind is not None
    assert found_type.kind[1:] == (bits, signed)
    assert (found_type.lanes, found_type.size) == (lanes, size)


NUMBERS = st.integers(-9, 9)
LEAVES = st.sampled_from([terms.symbol("a", 0, 9), terms.symbol("b", -9, 9), terms.symbol("c")])


def _made(of: st.SearchStrategy[terms.Term]) -> st.SearchStrategy[terms.Term]:
    two = [terms.add, terms.sub, terms.mul, terms.fdiv, terms.fmod, terms.quot, terms.rem,
           terms.least, terms.largest]  # fmt: skip
    pairs = st.tuples(st.sampled_from(two), of, of).map(lambda t: t[0](t[1], t[2]))
    wraps = of.map(lambda t: terms.wrap(t, UINT))
    choices = st.tuples(of, of, of, of).map(lambda t: terms.ite(terms.lt(t[0], t[1]), t[2], t[3]))
    return pairs | wraps | choices


@given(
    st.recursive(NUMBERS.map(terms.const) | LEAVES, _made, max_leaves=8),
    st.integers(0, 9), NUMBERS, NUMBERS,
)  # fmt: skip
def test_terms_are_within_their_bounds(term: terms.Term, a: int, b: int, c: int) -> None:
    """What is simplified in general has the value that it has for numbers."""
    values = {"a": a, "b": b, "c": c}
    fixed = {leaf: terms.const(values[str(leaf.value)]) for leaf in term.leaves}
    try:
        value = evaluate(term, values)
    except NoValue:
        return
    assert term.low is None or term.low <= value
    assert term.high is None or value <= term.high
    small = terms.replaced(term, fixed)
    assert small.op != "const" or small.value == value


# -- sizes -----------------------------------------------------------------------------------------

PRODUCT = "uint p = 1;\nfor (int d = 1; d < x_ndim; ++d) p *= x_shape[d];\ny[p] = 0;"
PLACE = """
uint i = thread_position_in_grid.x, place = 0, step = 1;
for (int d = x_ndim - 1; d >= 0; --d) {
  place += i % uint(x_shape[d]) * step;
  i /= uint(x_shape[d]);
  step *= uint(x_shape[d]);
}
y[place] = 0;
"""


def of_any_rank(source: str) -> Accesses:
    """The accesses of a body whose x has any number of dims."""
    kernel = make_kernel("k", ["x"], ["y"], source, "")
    spec = Spec(kernel, (Input(dtypes.float32, 2),), (dtypes.float32,), ())
    return accesses(prepare(spec), symbolic={"x_ndim": terms.symbol("x_ndim", 1, 64)})


def written(source: str) -> terms.Term:
    whole = of_any_rank(source)
    assert not whole.unsupported
    (access,) = (a for a in whole.accesses if a.array.name == "y")
    return access.element


def test_sizes_that_variables_choose_are_reads() -> None:
    whole = found("y[x_shape[at[0]]] = 0;")
    (access,) = (a for a in whole.accesses if a.array.name == "x_shape")
    assert (access.mode, access.array.space) == ("read", "sizes")
    assert access.array.length is terms.const(2)


def test_products_of_sizes() -> None:
    """`p` is the product of all sizes but the first, as 32 bits hold it."""
    index = written(PRODUCT)
    assert (index.op, index.value) == ("wrap", UINT)
    (product,) = (leaf for leaf in index.leaves if leaf.op == "data")
    assert product.value == "x_shape.product"
    first, count = product.args
    assert evaluate(first, {}) == 1
    assert [evaluate(count, {"x_ndim": n}) for n in (1, 2, 5)] == [0, 1, 4]


def test_places_among_sizes() -> None:
    """A place is less than the product of the sizes where that fits into its type."""
    index = written(PLACE)
    (product,) = (leaf for leaf in index.leaves if leaf.op == "data")
    first, count = (evaluate(a, {"x_ndim": 3}) for a in product.args)
    assert (first, count) == (0, 3)
    (place,) = (leaf for leaf in index.leaves if "among sizes" in str(leaf.value))
    assert evaluate(index, {product: 12, place: 40}) == 40 % 12


@pytest.mark.parametrize(
    ("source", "old", "new"),
    [
        (PRODUCT, "p *= x_shape[d]", "{ if (d == 3) break; p *= x_shape[d]; }"),
        (PRODUCT, "p *= x_shape[d]", "{ if (d == 3) continue; p *= x_shape[d]; }"),
        (PRODUCT, "p *= x_shape[d]", "{ p *= x_shape[d]; p += 1; }"),
        (PRODUCT, "p *= x_shape[d]", "p *= x_shape[d * d]"),
        (PRODUCT, "p *= x_shape[d]", "{ const int e = p; p *= x_shape[e]; }"),
        (PRODUCT, "++d", "d += 2"),
        (PLACE, "place = 0", "place = 1"),
        (PLACE, "step = 1", "step = 2"),
        (PLACE, "place += i %", "place = i %"),
        (PLACE, "i % uint(x_shape[d])", "i % uint(x_shape[0])"),
        (PLACE, "i % uint(x_shape[d])", "i / uint(x_shape[d])"),
        (PLACE, "i % uint(x_shape[d])", "min(i, uint(x_shape[d]))"),
        (PLACE, "  step *= uint(x_shape[d]);", "  step *= 2;"),
        (PLACE, "  step *= uint(x_shape[d]);", "  step *= uint(x_shape[d]);\n  place += 1;"),
    ],
)
def test_other_loops_over_sizes(source: str, old: str, new: str) -> None:
    """What a variable holds behind them is anything."""
    assert old in source
    leaves = written(source.replace(old, new)).leaves
    assert any("a loop has carried along" in str(leaf.value) for leaf in leaves)
