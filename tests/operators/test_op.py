"""Ops: what calls bind, launch and refuse, with NumPy arrays; derivative rules as data."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule import KernelError, KernelTypeError, Op, RuleError
from ferrule.operators import derivatives
from ferrule.source.names import taken

I = "uint i = thread_position_in_grid.x; "  # noqa: E741
SCALE = I + "y[i] = x[i] * w[i % D];"


def scale(**more: Any) -> Op:
    return ferrule.op(
        "scale", "x[*S,D]:T, w[D]:T -> y[*S,D]:T", metal=SCALE, grid="x.size", threadgroup=256,
        **more,
    )  # fmt: skip


@given(st.lists(st.integers(0, 4), max_size=3), st.integers(1, 5))
@settings(max_examples=20, deadline=None)
def test_dims_are_read_by_the_body(lead: list[int], d: int) -> None:
    x = np.random.default_rng(0).random((*lead, d), dtype=np.float32)
    w = np.arange(d, dtype=np.float32)
    np.testing.assert_array_equal(scale()(x, w), x * w)


@pytest.mark.parametrize("dtype", [np.float16, np.int32, np.uint8])
def test_dtype_variables_are_template_parameters(dtype: Any) -> None:
    double = ferrule.op(
        "double", "x[N]:T -> y[N]:T", metal=I + "T t = x[i]; y[i] = t + t;", grid="N",
        threadgroup=64,
    )  # fmt: skip
    x = np.arange(9).astype(dtype)
    y = double(x)
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, x + x)


def test_what_a_body_declares_hides_a_dim() -> None:
    assert taken("out[i] = N;", "", ["N", "M"], kernel="k") == ("N",)
    assert taken("uint N = 3; out[i] = N;", "", ["N"], kernel="k") == ()
    assert taken("int a = f(b), N = 2; x = N;", "", ["N"], kernel="k") == ()
    assert taken("x = a * N; y[N] = 1; return N;", "", ["N"], kernel="k") == ("N",)
    assert taken("{ uint N = 3; } y[0] = N;", "", ["N"], kernel="k") == ("N",)
    assert taken("for (int N = 0; N < 3; N++) y[N] = 1;", "", ["N"], kernel="k") == ("N",)
    assert taken("y = N;", "constant constexpr int N = 4;", ["N"], kernel="k") == ()
    assert taken("y = N;", "int f(int N) { return N; }", ["N"], kernel="k") == ("N",)
    assert taken("y = f<N>(1);", "template <int N> int f(int a) { return N; }", ["N"], kernel="k")
    assert taken("y = N;", "#define N 4\n", ["N"], kernel="k") == ()
    assert taken("y = P(1);", "#define P(a) (a * N)\n", ["N"], kernel="k") == ("N",)
    assert taken("// N\nint M = 1;", "struct K { int a; };", ["N", "M", "K"], kernel="k") == ()


@pytest.mark.parametrize(
    "header",
    [
        "enum { N = 4 };",
        "enum E : int { A, N = 4 };",
        "[[maybe_unused]] constant int N = 4;",
        "alignas(16) constant int N = 4;",
        "constant decltype(1) N = 4;",
        "constant int A = 1 < 2, N = 4, B = 3 > 2;",
        "namespace k { constant int N = 4; } using namespace k;",
        "namespace k { constant int N = 4; } using k::N;",
        "inline namespace k { constant int N = 4; }",
        'extern "C++" { constant int N = 4; }',
        "struct A { int b; operator int() const { return b; } } constant N = {4};",
        "template <int N> constant int two = 2 * N; constant int N = 4;",
        "constant int N = [] { int N = 2; return N + 2; }();",
        "constant int (N) = 4;",
        "constant int ((N)) = 4;",
        "constant int A = 1, (N) = 4;",
        "constant int (N){4};",
        "struct S { int a; operator int() const { return a; } }; constant S (N) = {4};",
        "#define CONSTANT(name) constant int name = 4;\nCONSTANT(N)",
    ],
)
def test_a_headers_constant_hides_a_dim(header: str) -> None:
    op = ferrule.op("hidden", "x[N]:float32 -> y[1]:int32", metal="y[0] = N;", header=header,
                    grid=1, threadgroup=1)  # fmt: skip
    assert op(np.zeros(3, np.float32)).tolist() == [4]


@pytest.mark.parametrize(
    "header",
    [
        "namespace k { constant int N = 4; }",
        "struct k { static constexpr int N = 4; };",
        "enum class k { N = 4 };",
        "template <int N> int f() { return N; }",
        "int f(int a = 1, int N = 2) { return N; }",
        'constant char text[] = "int N;"; // int N = 4;',
        "int f(int (N)) { return N; }",
        "template <int N> struct s { int a[(N)]; };",
        "constant int a = max(1, (int(2)));",
    ],
)
def test_other_names_of_a_header_do_not(header: str) -> None:
    op = ferrule.op("seen", "x[N]:float32 -> y[1]:int32", metal="y[0] = N;", header=header, grid=1,
                    threadgroup=1)  # fmt: skip
    assert op(np.zeros(3, np.float32)).tolist() == [3]


def test_a_bodys_own_names_hide_a_dim() -> None:
    bodies = [
        "[[maybe_unused]] int N = 4; y[0] = N;",
        "alignas(8) int N = 4; y[0] = N;",
        "enum { A, N = 4 }; y[0] = N;",
        "using N = int; y[0] = N(4);",
        "struct S { int a; } N = {4}; y[0] = N.a;",
        "decltype(1) N = 4; y[0] = N;",
        "int (N) = 4; y[0] = N;",
        "const int A = 1, (N) = 4; y[0] = N;",
        "int A[1] = {4}; int (*N) = A; y[0] = *N;",
        "int A[1] = {4}; thread int (&N)[1] = A; y[0] = N[0];",
        "struct S { int a; }; const S (N) = {4}; y[0] = N.a;",
    ]
    for i, body in enumerate(bodies):
        op = ferrule.op(f"own{i}", "x[N]:float32 -> y[1]:int32", metal=body, grid=1, threadgroup=1)
        assert op(np.zeros(3, np.float32)).tolist() == [4], body


def test_a_body_that_calls_with_a_dim_reads_it() -> None:
    bodies = (
        "at(N) = 4;", "y[0] = (N);", "y[0] = int(N);", "float4 v(N); y[0] = v.x;",
        "const float4 v(N), w(N); y[0] = v.x;", "struct S v(N);", "return (N);",
    )  # fmt: skip
    for body in bodies:
        assert taken(body, "", ["N"], kernel="k") == ("N",), body


def test_a_number_that_a_float_cannot_hold_is_refused() -> None:
    op = ferrule.op("big", "x[N]:float32, s:float32 -> y[N]:float32", metal="y[0] = s;", grid=1,
                    threadgroup=1)  # fmt: skip
    x = np.zeros(1, np.float32)
    for value in (1e39, -1e300, 10**400):
        with pytest.raises(ferrule.KernelError, match="which does not fit: s:float32"):
            op(x, value)
    assert op(x, np.inf)[0] == np.inf and op(x, 10**30)[0] == np.float32(1e30)
    assert np.isnan(op(x, np.nan)[0])


def test_arrays_whose_star_stands_for_no_dims_are_indexed_all_the_same() -> None:
    op = ferrule.op(
        "add", "x[*S,D]:T, w[*S]:T, c[]:T -> y[*S]:T", metal=I + "y[i] = x[i * D] + w[i] + c;",
        grid="w.size", threadgroup=8,
    )  # fmt: skip
    for lead in ((), (2,), (2, 3)):
        x = np.random.default_rng(0).random((*lead, 4), dtype=np.float32)
        w, c = np.ones(lead, np.float32), np.float32(2)
        np.testing.assert_array_equal(op(x, w, np.array(c)), x[..., 0] + 1 + 2)


def test_a_body_that_declares_a_dims_name_runs() -> None:
    op = ferrule.op(
        "own", "x[N]:float32 -> y[N]:int32", metal="int N = 7; y[thread_position_in_grid.x] = N;",
        grid="N", threadgroup=8,
    )  # fmt: skip
    assert op(np.zeros(3, np.float32)).tolist() == [7, 7, 7]


def test_template_and_launch_expressions() -> None:
    op = ferrule.op(
        "blocks", "x[N,D]:float32 -> y[N,ceildiv(D,2)]:int32",
        metal="uint2 p = thread_position_in_grid.xy; "
        "y[p.y * threads_per_grid.x + p.x] = "
        "BLOCK + 100 * WIDE + 1000 * threads_per_threadgroup.x;",
        grid=("ceildiv(D,2)", "N"), threadgroup=("2 if D <= 4 else 4", 1),
        template={"BLOCK": "D if D <= 8 else 8", "WIDE": "D > 4"},
    )  # fmt: skip
    assert op(np.zeros((2, 8), np.float32)).tolist() == [[4108] * 4] * 2
    assert op(np.zeros((1, 3), np.float32)).tolist() == [[2003, 2003]]


def test_optional_inputs_and_numbers() -> None:
    op = ferrule.op(
        "affine", "x[N,K]:T, b[K]:T?, s:float32, n:int32, flip:bool -> y[N,K]:T",
        metal=I + "T v = x[i] * s + n; if (has_b) v += b[i % K]; y[i] = flip ? -v : v;",
        grid="x.size", threadgroup=32,
    )  # fmt: skip
    x, b = np.ones((2, 3), np.float32), np.arange(3, dtype=np.float32)
    np.testing.assert_array_equal(op(x, None, 2, 1, False), x * 2 + 1)
    np.testing.assert_array_equal(op(x, b, s=0.5, n=-1, flip=True), -(x * 0.5 - 1 + b))
    np.testing.assert_array_equal(op(x=x, s=1.0, n=np.int64(0), flip=np.bool_(False)), x)
    for wrong in ({"n": 1.5}, {"n": True}, {"s": "1"}, {"flip": 1}):
        with pytest.raises(KernelTypeError, match=f"input '{next(iter(wrong))}' of op 'affine'"):
            op(**{"x": x, "s": 1.0, "n": 0, "flip": False, **wrong})
    with pytest.raises(KernelError, match="from -2147483648 to 2147483647"):
        op(x, None, 1.0, 2**31, False)


def test_complex_numbers() -> None:
    op = ferrule.op(
        "turn", "x[N]:complex64, s:complex64 -> y[N]:complex64", metal=I + "y[i] = x[i] * s;",
        grid="N", threadgroup=32,
    )  # fmt: skip
    x = np.array([1, 2j, 3 - 1j], np.complex64)
    for s in (1j, 2.0, 3, np.complex64(1 - 2j)):
        np.testing.assert_array_equal(op(x, s), x * np.complex64(s))
    for wrong in (True, "1j"):
        with pytest.raises(KernelTypeError, match="input 's' of op 'turn'"):
            op(x, wrong)
    torch = pytest.importorskip("torch")  # which has no such ops; NumPy's arrays do not mind
    np.testing.assert_array_equal(op(x, 1j), x * np.complex64(1j))
    with pytest.raises(KernelError, match=r"no complex numbers; declare an array, s\[\]:complex64"):
        op(torch.tensor(x), 1j)


def test_an_optional_input_that_the_body_never_asks_for_is_refused() -> None:
    with pytest.raises(KernelError, match="never asks `has_b`"):
        ferrule.op("f", "x[N]:T, b[N]:T? -> y[N]:T", metal="y[0] = b[0];", grid=1, threadgroup=1)


@pytest.mark.parametrize("step", [1, 2])
def test_inputs_written_in_place(step: int) -> None:
    put = ferrule.op(
        "put", "cache[B,L,D]:T!, row[B,D]:T, at:int32 -> n[B]:int32",
        metal=I + "cache[(i / D * L + at) * D + i % D] = row[i]; "
        "if (i % D == 0) n[i / D] = at + 1;",
        grid="B*D", threadgroup=64,
    )  # fmt: skip
    whole = np.zeros((2, 4 * step, 3), np.float32)
    cache = whole[:, ::step]
    assert put(cache, np.ones((2, 3), np.float32), 2).tolist() == [3, 3]
    assert cache.sum() == 6 and cache[:, 2].sum() == 6 and whole.sum() == 6
    cache.flags.writeable = False
    with pytest.raises(KernelError, match="read-only"):
        put(cache, np.ones((2, 3), np.float32), 2)


def test_what_is_written_in_place_and_shares_memory() -> None:
    add = ferrule.op(
        "add", "c[L]:T!, v[L]:T ->", metal=I + "c[i] += v[i];", grid="L", threadgroup=8
    )
    for c, v in (
        (slice(0, 4), slice(4, 8)), (slice(0, 8), slice(0, 8)), (slice(0, 4), slice(2, 6)),
        (slice(1, 5), slice(0, 4)), (slice(0, 8, 2), slice(0, 4)), (slice(0, 4), slice(5, 1, -1)),
    ):  # fmt: skip
        whole = np.arange(8, dtype=np.float32)
        expected = whole.copy()
        expected[c] += whole[v].copy()
        add(whole[c], whole[v])  # what is read is what was there before
        np.testing.assert_array_equal(whole, expected)
    both = ferrule.op(
        "both", "a[L]:T!, b[L]:T! ->", metal=I + "a[i] = 1; b[i] = 2;", grid="L", threadgroup=8
    )
    both(whole[:4], whole[4:])
    assert whole.tolist() == [1] * 4 + [2] * 4
    with pytest.raises(KernelError, match="'b' of op 'both' shares memory with input 'a'"):
        both(whole[:4], whole[2:6])
    with pytest.raises(KernelError, match="'b' of op 'both' shares memory with input 'a'"):
        both(whole[::2], whole[::2])
    both(whole[:0], whole[:0])


def test_an_op_without_outputs() -> None:
    add = ferrule.op(
        "add", "c[L]:T!, v[L]:T ->", metal=I + "c[i] += v[i];", grid="L", threadgroup=8
    )
    c = np.ones(3, np.float32)
    assert add(c, c.copy()) is None
    assert c.tolist() == [2, 2, 2]


def test_init_value_atomics_and_several_outputs() -> None:
    op = ferrule.op(
        "sums", "x[N]:float32 -> total[1]:float32, count[1]:int32",
        metal=I + "atomic_fetch_add_explicit(&total[0], x[i], memory_order_relaxed); "
        "atomic_fetch_add_explicit(&count[0], 1, memory_order_relaxed);",
        grid="N", threadgroup=32, atomic_outputs=True, init_value=0,
    )  # fmt: skip
    total, count = op(np.ones(100, np.float32))
    assert total.tolist() == [100] and count.tolist() == [100]
    total, count = op(np.ones(0, np.float32))  # no thread, yet filled
    assert total.tolist() == [0] and count.tolist() == [0]


def test_an_init_value_that_is_too_large_is_infinite() -> None:
    op = ferrule.op("full", "x[N]:T -> y[N]:T", metal="", grid="N", threadgroup=1, init_value=-1e9)
    half, single = np.zeros(2, np.float16), np.zeros(2, np.float32)
    assert op(half).tolist() == [-np.inf] * 2 and op(single).tolist() == [-1e9] * 2
    torch = pytest.importorskip("torch")
    assert op(torch.tensor(half)).tolist() == [-np.inf] * 2


def test_a_grid_without_threads_leaves_nothing_unwritten() -> None:
    op = ferrule.op("e", "x[N]:float32 -> y[1]:float32", metal="y[0]=1;", grid="N", threadgroup=1)
    with pytest.raises(KernelError, match=r"`grid` of op 'e' is \(0, 1, 1\).*init_value"):
        op(np.ones(0, np.float32))


def test_an_op_from_a_kernel() -> None:
    kernel = ferrule.metal_kernel("double", ["x"], ["y"], I + "y[i] = 2 * x[i];")
    op = ferrule.op("double", "x[N]:T -> y[N]:T", metal=kernel, grid="N", threadgroup=32)
    assert op(np.ones(3, np.float32)).tolist() == [2, 2, 2]
    with pytest.raises(KernelError, match=r"has the inputs \['x'\]"):
        ferrule.op("double", "a[N]:T -> y[N]:T", metal=kernel, grid="N", threadgroup=32)


def test_functions_that_return_or_are_given_outputs() -> None:
    rule = "x[N]:T, k:int32 -> y[N]:T"
    returned = ferrule.op("f", rule, run=lambda x, k: x * k)
    written = ferrule.op("f", rule, run=lambda x, k, y: np.multiply(x, k, out=y))
    x = np.arange(4.0)
    assert returned(x, 2).tolist() == written(x, 2).tolist() == [0, 2, 4, 6]
    assert returned.digest != written.digest
    wrong = ferrule.op("f", rule, run=lambda x, k: x[1:])
    with pytest.raises(KernelError, match=r"shape \(3,\) .* for output 'y'; expected float64"):
        wrong(x, 2)
    none = ferrule.op("f", rule, run=lambda x, k: None)
    with pytest.raises(KernelError, match="output 'y'"):
        none(x, 2)


def test_a_runners_own_error_is_kept() -> None:
    def broken(x: Any) -> Any:
        raise ArithmeticError("blew up")

    with pytest.raises(ArithmeticError, match="blew up") as caught:
        ferrule.op("f", "x[N]:T -> y[N]:T", run=broken)(np.ones(2))
    assert caught.traceback[-1].name == "broken"


def test_the_best_implementation_is_chosen_and_can_be_forced() -> None:
    op = ferrule.op(
        "f", "x[N]:T -> y[N]:T", metal=I + "y[i] = 1;", run=lambda x: 0 * x + 2,
        reference=lambda x: 0 * x + 3, grid="N", threadgroup=32,
    )  # fmt: skip
    x = np.zeros(2, np.float32)
    found = [op(x)[0], *(op.using(kind)(x)[0] for kind in ("metal", "run", "reference"))]
    assert found == [1, 1, 2, 3]
    assert op.using("run", "metal")(x)[0] == 2
    with pytest.raises(KernelError, match=r"has no implementation 'cuda'; it has 'metal'"):
        op.using("cuda")
    with pytest.raises(KernelError, match="expected kinds, such as 'metal'"):
        op.using()
    assert len({op.digest, *(op.using(k).digest for k in ("metal", "run", "reference"))}) == 4


def test_saved_and_read_again() -> None:
    op = scale(template={"K": "D + 1", "B": True}, batch="D", init_value=1.5)
    data = json.loads(json.dumps(op.to_json()))
    again = Op.from_json(data)
    assert again.digest == op.digest
    x = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(again(x, x[0]), op(x, x[0]))
    data["implementations"][0]["source"] += " "
    assert Op.from_json(data).digest != op.digest
    damaged: list[Any] = [{}, {**data, "rule": 1}, {**data, "implementations": [{"kind": "metal"}]}]
    damaged += [{**data, "batch": ["Q"]}, {**data, "partial_sums": ["Q"]}]
    for damage in damaged:
        with pytest.raises(RuleError, match="damaged"):
            Op.from_json(damage)


def test_the_digest_changes_with_all_that_changes_behaviour() -> None:
    ops = [
        scale(), scale(init_value=0), scale(init_value=0.0), scale(header="// h"),
        scale(batch="D"), scale(autocast="cast"), scale(compile_options={"math_mode": "fast"}),
        scale(template={"A": 1}), scale(template={"A": True}), scale(template={"A": ferrule.int8}),
        scale(atomic_outputs=True), scale(ensure_row_contiguous=False), scale(reference=print),
    ]  # fmt: skip
    for n in (1, 2):
        other = scale()
        other.def_vjp(lambda primals, cotangents, outputs, n=n: (None, n))
        ops.append(other)
    assert len({op.digest for op in ops}) == len(ops)
    assert scale().digest == scale().digest


def test_ops_whose_rules_call_each_other_have_one_digest_each() -> None:
    def pair(slope: int, first: int) -> list[str]:
        ops = [ferrule.op(name, "x[N]:T -> y[N]:T", run=np.sin) for name in ("sin", "cos")]
        sin, cos = ops
        sin.def_vjp(lambda primals, cotangents, outputs: cotangents[0] * cos(primals[0]))
        cos.def_vjp(lambda primals, cotangents, outputs: -slope * cotangents[0] * sin(primals[0]))
        _ = ops[first].digest
        return [op.digest for op in ops]

    assert pair(1, 0) == pair(1, 1)
    assert len({*pair(1, 0), *pair(2, 0)}) == 4  # sin calls another cos


def test_functions_whose_content_is_unknown_are_refused() -> None:
    array = np.ones(3)
    with pytest.raises(KernelError, match="'array', which it closes over, is"):
        ferrule.op("f", "x[N]:T -> y[N]:T", run=lambda x: x + array)

    class Tuned:
        def __call__(self, x: Any) -> Any:
            return x

    with pytest.raises(KernelError, match="version="):
        ferrule.op("f", "x[N]:T -> y[N]:T", run=Tuned())
    one, two = (ferrule.op("f", "x[N]:T -> y[N]:T", run=Tuned(), version=v) for v in (1, 2))
    assert one.digest != two.digest


def test_a_derivative_op_is_matched_by_name() -> None:
    op = scale()
    rule = "x[*S,D]:T, w[D]:T, {} -> {}[*S,D]:T"
    with pytest.raises(KernelError, match=r"no input 'cotangent'"):
        op.def_vjp(ferrule.op("g", rule.format("y[*S,D]:T", "x_grad"), run=lambda x, w, y: y))
    with pytest.raises(KernelError, match=r"input 'z' .* none of what it can be given"):
        op.def_vjp(ferrule.op("g", rule.format("z[*S,D]:T", "x_grad"), run=lambda x, w, z: z))
    with pytest.raises(KernelError, match=r"no gradient of an input; expected x_grad, w_grad"):
        op.def_vjp(
            ferrule.op("g", rule.format("cotangent[*S,D]:T", "q_grad"), run=lambda x, w, y: y)
        )
    with pytest.raises(KernelTypeError, match="expected an op or a function"):
        op.def_vjp(3)  # type: ignore[arg-type]


def test_names_that_would_mean_two_things() -> None:
    first = ferrule.op("f", "y[N]:T, cotangent[N]:T -> x_grad[N]:T", run=lambda y, c: y * c)
    rule = "y[N]:T, cotangent[N]:T, {} -> cotangent_grad[N]:T"
    with pytest.raises(KernelError, match="no input 'x_grad_cotangent', so that"):
        first.def_vjp(ferrule.op("g", rule.format("x_grad[N]:T"), run=lambda y, c, g: g))
    first.def_vjp(ferrule.op("g", rule.format("x_grad_cotangent[N]:T"), run=lambda y, c, g: g))
    found = derivatives.vjp(first, (np.ones(1), np.full(1, 2.0)), (np.full(1, 3.0),), (None,))
    assert found[0] is None and found[1].tolist() == [3]
    rule = "y[N]:T, cotangent[N]:T, y_cotangent[N]:T -> {}[N]:T"
    last = ferrule.op("h", rule.format("y_grad"), run=lambda y, c, d: d)
    with pytest.raises(KernelError, match="no input 'y_grad_cotangent'"):
        last.def_vjp(ferrule.op("i", rule.format("y_grad"), run=lambda y, c, d: d))
    rule = "y[N]:T, cotangent[N]:T, z_cotangent[N]:T -> {}[N]:T"
    last = ferrule.op("h", rule.format("z"), run=lambda y, c, d: d)
    with pytest.raises(KernelError, match="'z_cotangent' would be an input of the op, and a cot"):
        last.def_vjp(ferrule.op("i", rule.format("y_grad"), run=lambda y, c, d: d))
    tangents = ferrule.op("j", "x[N]:T, x_tangent[N]:T -> y_tangent[N]:T", run=lambda x, t: t)
    rule = "x[N]:T, x_tangent[N]:T -> y_tangent_tangent[N]:T"
    with pytest.raises(KernelError, match="'x_tangent' would be an input of the op, and a tangent"):
        tangents.def_jvp(ferrule.op("k", rule, run=lambda x, t: t))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda op, x, w: op(x, w[:2]), "whose dim 0 is 2, but D is 3 by input 'x' of shape"),
        (lambda op, x, w: op(x, x), "with 1 dim"),
        (lambda op, x, w: op(x, w.astype(np.float16)), "T is float32 by input 'x'"),
        (lambda op, x, w: op(x), "got no input 'w'"),
        (lambda op, x, w: op(x, w, w), "takes 2 inputs"),
        (lambda op, x, w: op(x, w, x=x), "takes 2 inputs|twice"),
        (lambda op, x, w: op(x, w=w, v=w), "has no input 'v', but x, w"),
        (lambda op, x, w: op(x, [1.0, 2.0, 3.0]), "input 'w' of op 'scale': got"),
        (lambda op, x, w: op(x, None), "got None, expected an array: w"),
    ],
)
def test_wrong_inputs(call: Any, message: str) -> None:
    x, w = np.ones((2, 3), np.float32), np.ones(3, np.float32)
    with pytest.raises((KernelError, KernelTypeError), match=message):
        call(scale(), x, w)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"grid": None}, "no `grid`"),
        ({"grid": "Q"}, "there is no dim 'Q'"),
        ({"grid": "z.size"}, "there is no array 'z'"),
        ({"grid": ("x.size", 1, 1, 1)}, "one to three"),
        ({"grid": "D +"}, "no expression"),
        ({"threadgroup": 1.5}, "expected an int or an expression"),
        ({"template": "D"}, "expected a dictionary"),
        ({"template": {"x": 1}}, "two arguments called 'x'"),
        ({"batch": "Q"}, "there is no dim 'Q'"),
        ({"autocast": "up"}, "expected None, 'cast' or 'float32'"),
        ({"metal": None}, "nothing that carries it out"),
        ({"compile_options": {"speed": 1}}, "math_mode"),
    ],
)
def test_wrong_declarations(more: Any, message: str) -> None:
    given = {"metal": SCALE, "grid": "x.size", "threadgroup": 256, **more}
    with pytest.raises((KernelError, KernelTypeError), match=message):
        ferrule.op("scale", "x[*S,D]:T, w[D]:T -> y[*S,D]:T", **given)


def test_launch_sizes_are_checked() -> None:
    op = ferrule.op(
        "f", "x[N]:float32 -> y[N]:float32", metal="y[0] = 1;", grid="N - 5", threadgroup="N"
    )
    with pytest.raises(KernelError, match=r"`grid` of op 'f': N - 5 is -2 for x \(3,\)"):
        op(np.zeros(3, np.float32))
    with pytest.raises(KernelError, match=r"`threadgroup` of op 'f'.*1024 threads at most"):
        op(np.zeros(2000, np.float32))


def test_mlx_arrays() -> None:
    mx = pytest.importorskip("mlx.core")
    y = scale()(mx.ones((2, 3)), mx.arange(3, dtype=mx.float32))
    assert isinstance(y, mx.array) and y.tolist() == [[0, 1, 2]] * 2
    put = ferrule.op("p", "c[L]:T!, v[L]:T ->", metal=I + "c[i] = v[i];", grid="L", threadgroup=8)
    with pytest.raises(KernelError, match="arrays of MLX do not allow"):
        put(mx.ones(3), mx.ones(3))
    with pytest.raises(KernelError, match="expected arrays of one library"):
        scale()(mx.ones((2, 3)), np.ones(3, np.float32))


def test_what_is_not_constant_is_said_with_what_makes_it_so() -> None:
    body = "constexpr int n = D / 2;\nuint i = thread_position_in_grid.x; y[i] = x[i] * n;"
    declare = partial(
        ferrule.op, "constant", "x[D]:T -> y[D]:T", metal=body, grid="D", threadgroup=64
    )
    with pytest.raises(ferrule.CompileError, match=r"source line 1.*(?s:.)*given by `template`\.$"):
        declare()(np.ones(4, np.float32))
    np.testing.assert_array_equal(declare(template={"D": "D"})(np.ones(4, np.float32)), 2)


def test_float64_warns_that_apple_has_none() -> None:
    body = "uint i = thread_position_in_grid.x; y[i] = x[i];"
    declare = partial(ferrule.op, "wide", "x[N]:T -> y[N]:T", metal=body, grid="N", threadgroup=64)
    x = np.linspace(0, 1, 5)
    with pytest.warns(ferrule.PortabilityWarning, match=r"line 1: float64 \('x'\) runs here, but"):
        np.testing.assert_array_equal(declare()(x), x)
    with pytest.raises(ferrule.DialectError, match=r"float64 \('x'\).*portable=True"):
        declare(portable=True)(x)


def test_check_grad_wants_an_op() -> None:
    with pytest.raises(KernelTypeError, match=r"expected an op; torch.autograd.gradcheck"):
        ferrule.check_grad(cast(Any, abs), np.ones(3, np.float32))


def test_sizes_that_are_numbers_are_said_once() -> None:
    op = ferrule.op(
        "large", "x[*S,D]:T, w[D]:T -> y[*S,D]:T", metal=SCALE, grid=1, threadgroup=(32, 64)
    )
    with pytest.raises(KernelError, match=r"`threadgroup` .*: got \(32, 64, 1\); expected 1024"):
        op(np.ones((2, 3), np.float32), np.ones(3, np.float32))


def test_faults_of_a_rule_name_the_op() -> None:
    with pytest.raises(RuleError, match=r"the rule of op 'f': .*\n  x\[N -> y"):
        ferrule.op("f", "x[N -> y[N]:float32", run=lambda x: x)
    with pytest.raises(KernelError, match="op 'f': 'x' is both an array and a dim; rename one"):
        ferrule.op("f", "x[x]:T -> y[x]:T", run=lambda x: x)


def test_ops_that_never_meet_torch_are_collected() -> None:
    code = """
import gc, sys, weakref, numpy as np, ferrule
def make(n):
    op = ferrule.op("again", "x[N]:float32 -> y[N]:float32", grid="N", threadgroup=32,
                    metal="uint i = thread_position_in_grid.x; y[i] = 2 * x[i];")
    op.def_vjp(lambda primals, cotangents, outputs: (cotangents[0] * n,), version=n)
    return op
found = []
for n in range(50):
    op = make(n)
    assert op(np.ones(2, np.float32)).tolist() == [2, 2]
    found.append(weakref.ref(op))
del op
gc.collect()
print([one() for one in found if one() is not None], "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[] False\n", done.stderr


def test_signatures_are_those_of_the_rule() -> None:
    def shown(rule: str) -> str:
        metal = "".join(f"has_{name};" for name in ("bias", "a", "b", "c") if f" {name}[" in rule)
        return str(inspect.signature(ferrule.op("o", rule, metal=metal, grid=1, threadgroup=1)))

    assert shown("x[N]:T, w[N]:T, eps:float32 -> y[N]:T") == "(x, w, eps)"
    assert shown("x[N]:T, bias[N]:T? -> y[N]:T") == "(x, bias=None)"
    assert shown("x[N]:T, bias[N]:T?, eps:float32 -> y[N]:T") == "(x, bias, eps)"
    rule = "x[N]:T, a[N]:T?, w[N]:T, b[N]:T?, c[N]:T? -> y[N]:T"
    assert shown(rule) == "(x, a, w, b=None, c=None)"


def test_what_a_signature_takes_a_call_takes() -> None:
    op = ferrule.op(
        "o", "x[N]:T, bias[N]:T?, eps:float32 -> y[N]:T", grid="N", threadgroup=32,
        metal="uint i = thread_position_in_grid.x; y[i] = has_bias ? bias[i] : x[i] * eps;",
    )  # fmt: skip
    x = np.ones(3, np.float32)
    for args, named in (((x,), {}), ((x, x), {}), ((x,), {"bias": x})):
        with pytest.raises(TypeError, match="missing"):
            inspect.signature(op).bind(*args, **named)
        with pytest.raises(ferrule.KernelTypeError, match="got no input 'eps'"):
            op(*args, **named)
    for args, named in (((x, None, 2.0), {}), ((x,), {"bias": None, "eps": 2.0})):
        inspect.signature(op).bind(*args, **named)
        assert np.array_equal(op(*args, **named), 2 * x)
    assert np.array_equal(op(x, eps=2.0), 2 * x)  # which Python's signatures cannot say
