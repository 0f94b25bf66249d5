"""Kernel functions of Metal files as the bodies of ops: what they read, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import ferrule
from ferrule.dtypes import BY_NAME
from ferrule.operators import metal_file
from ferrule.operators import text as op_text
from ferrule.operators.bodies import KernelBody
from ferrule.rules.rule import parse_rule
from ferrule.tools import nvrtc

F32 = np.float32

FILE = """\
// Two kernels and what they share.
#include <metal_stdlib>
using namespace metal;
#define TWICE(v) (2 * (v))

struct Pair { float D; }; inline float scaled(float v, float w) { return v * w; } // helper

[[host_name("other")]] [[kernel]] void other(device const float* a [[buffer(0)]],
                  device float* b [[buffer(1)]],
                  uint3 i [[thread_position_in_grid]]) {
  b[i.x] = a[i.x]; { /* nested */ }
}

template <typename U>
kernel void generic(device const U* a [[buffer(0)]], device U* b [[buffer(1)]],
                    uint i [[thread_position_in_grid]]) {
  U v = a[i];
  b[i] = v + v;
}
template [[host_name("generic_f")]] kernel decltype(generic<float>) generic<float>;

kernel void scale(
    device const float* x [[buffer(0)]],
    constant float* w [[buffer(1)]],
    constant float& e [[buffer(2)]],
    constant uint& D [[buffer(3)]],
    device float* y [[buffer(4)]],
    uint2 at [[thread_position_in_grid]],
    ushort thread_index_in_threadgroup [[thread_index_in_threadgroup]])
{
  uint i = at.y * D + at.x;
  if (D - 1000000u < 7) return;  // unsigned: never so
  y[i] = TWICE(scaled(x[i], w[at.x])) + e
       + 0 * thread_index_in_threadgroup;
}
"""
RULE = "x[N,D]:float32, w[D]:float32, e:float32 -> y[N,D]:float32"
LAUNCH: dict[str, Any] = {"grid": ("D", "N"), "threadgroup": 32}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "k.metal"
    found.write_text(FILE, "utf-8")
    return found


def scale_of(path: Path, **more: Any) -> ferrule.Op:
    return ferrule.op("scale", RULE, metal=path, function="scale", **{**LAUNCH, **more})


def test_a_function_of_a_file(path: Path) -> None:
    x = np.arange(12, dtype=F32).reshape(3, 4)
    w = np.array([1, 2, 3, 4], F32)
    np.testing.assert_array_equal(scale_of(path)(x, w, 0.5), 2 * x * w + F32(0.5))


@pytest.mark.parametrize("device", ["cpu", "sm_90"])
def test_it_is_a_body_on_every_device(path: Path, device: str, library: nvrtc.Nvrtc) -> None:
    op = scale_of(path)
    (body,) = op.implementations
    assert isinstance(body, KernelBody)
    f32 = BY_NAME["float32"]
    kernel, call = op_text.described(op, body, {"x": ((3, 4), f32), "w": ((4,), f32), "e": 1.0})
    assert kernel.compile(device, **call).payload
    text = kernel.text("metal", **call)
    assert "other" not in text and "generic" not in text and "float scaled(" in text


def test_a_template_of_a_file(path: Path) -> None:
    for dtype in (np.float16, np.int32):
        op = ferrule.op(
            "g", "a[*S]:U -> b[*S]:U", metal=path, function="generic", grid="a.size",
            threadgroup=32,
        )  # fmt: skip
        a = np.arange(7, dtype=dtype)
        np.testing.assert_array_equal(op(a), a + a)


def test_errors_have_the_lines_of_the_file(path: Path) -> None:
    line = FILE.splitlines().index("  uint i = at.y * D + at.x;") + 1
    path.write_text(FILE.replace("at.y * D + at.x", "at.y * D + nothing"), "utf-8")
    with pytest.raises(ferrule.CompileError) as caught:
        scale_of(path)(np.ones((3, 4), F32), np.ones(4, F32), 0.5)
    assert f"source line {line}: 'nothing'" in str(caught.value)
    path.write_text(FILE.replace("return v * w;", "return v * ww;"), "utf-8")
    with pytest.raises(ferrule.CompileError, match="header line 6: 'ww'"):
        scale_of(path)(np.ones((3, 4), F32), np.ones(4, F32), 0.5)


def test_the_only_function_needs_no_name(tmp_path: Path) -> None:
    path = tmp_path / "one.metal"
    path.write_text(
        "kernel void f(const device float *x, device atomic_float *y [[buffer(7)]],\n"
        "  uint i [[thread_position_in_grid]]) {\n"
        "  atomic_fetch_add_explicit(&y[0], x[i], memory_order_relaxed); }\n", "utf-8",
    )  # fmt: skip
    op = ferrule.op(
        "f", "x[N]:float32 -> y[1]:float32", metal=path, grid="N", threadgroup=32, init_value=0
    )
    assert op(np.ones(100, F32)) == [100]


REFUSED = {
    "no file": ({"metal": Path("none.metal")}, r"none\.metal cannot be read"),
    "no such function": ({"function": "scal"}, r"'generic', 'scale'; there is no .* 'scal'"),
    "which": ({"function": None}, r"'other', 'generic', 'scale'; say which with `function`"),
    "no str": ({"function": 3}, "expected a str"),
    "header": ({"header": "int a;"}, "its `metal` is a file"),
    "a file's name": ({"metal": "k.metal", "function": None}, r"give pathlib\.Path\('k\.metal'\)"),
    "no path": ({"metal": "y[0] = 1;"}, "`metal` is no path"),
    "template": ({"function": "generic"}, r"line 14: nothing gives its template parameter 'U'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, path: Path) -> None:
    more, said = REFUSED[name]
    with pytest.raises((ferrule.KernelError, ferrule.KernelTypeError), match=said):
        ferrule.op("scale", RULE, **{"metal": path, "function": "scale", **LAUNCH, **more})


WRONG = [
    ("* w [[buffer(1)]]", "* wt [[buffer(1)]]", r"line 24: the rule has no 'wt'; did you mean 'w'"),
    ("& D [[", "& wide [[", r"line 26: the rule has no 'wide', but x, w, e, y, N, D"),
    ("const float* x", "const half* x", r"line 23: 'x' has elements 'half', but the rule says x"),
    ("constant float& e", "constant float* e", r"line 25: 'e' is a value without dims .*'&'"),
    ("constant float* w", "constant float& w", r"line 24: 'w' is an array .*'\*'"),
    ("    constant float& e [[buffer(2)]],\n", "", "has no buffer 'e', which the rule has"),
    ("[[thread_position_in_grid]],\n    us", "[[thread_positon_in_grid]],\n    us",
     r"line 28: .*\[\[thread_positon_in_grid\]\]; did you mean 'thread_position_in_grid'"),
    ("constant uint& D", "constant ulong& D", r"line 26: 'D' is a dim .*'constant uint& D'"),
    ("constant uint& D", "constant uint* D", r"line 26: 'D' is a dim .*'constant int& D'"),
    ("device float* y [[", "device const float* y [[", r"line 27: 'y' is written.* without const"),
    ("constant float* w", "constant float* x", r"line 24: there is another parameter 'x'"),
    ("  uint i = at.y", "  uint D = 3; uint i = at.y", r"line 31: 'D' is a parameter, and"),
    ("  if (D - 1000000u", "  { if (D - 1000000u", r"line 30: its brace is never closed"),
    ("uint2 at [[", "float2 at [[", r"line 28: 'at' is a float2; .* is a uint3"),
    ("uint2 at [[", "threadgroup float* s [[threadgroup(0)]], uint2 at [[", "no buffer; declare"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "instead", "said"), WRONG)
def test_a_signature_that_is_not_the_rules(path: Path, text: str, instead: str, said: str) -> None:
    assert FILE.count(text) == 1
    path.write_text(FILE.replace(text, instead), "utf-8")
    with pytest.raises(ferrule.KernelError, match=said):
        scale_of(path)


FORMS = [
    ("const float* x [[buffer(0)]]", "const float x[] [[buffer(0)]]"),
    ("constant float* w", "constant const float w[4]"),
    ("device float* y [[buffer(4)]]", "[[buffer(4)]] device float* const y"),
    ("uint2 at [[thread_position_in_grid]]", "[[thread_position_in_grid]] uint2 at"),
    ("constant uint& D", "constant unsigned int& D"),
    ("constant uint& D", "constant unsigned& D"),
    ("  uint i = at.y", "  Pair q; q.D = 1; uint i = at.y"),
]


@pytest.mark.parametrize(("text", "instead"), FORMS)
def test_other_forms_of_a_signature(path: Path, text: str, instead: str) -> None:
    assert FILE.count(text) == 1
    path.write_text(FILE.replace(text, instead), "utf-8")
    x, w = np.arange(12, dtype=F32).reshape(3, 4), np.array([1, 2, 3, 4], F32)
    np.testing.assert_array_equal(scale_of(path)(x, w, 0.5), 2 * x * w + F32(0.5))


def test_files_without_one_kernel(tmp_path: Path) -> None:
    one = "kernel void f(device float* y, uint i [[thread_position_in_grid]]) { y[i] = 1; }\n"
    for text, said in (
        ("", r"has no kernel function outside of namespaces and macros"),
        ("kernel void f(device float* y { y[0] = 1; }", r"has no kernel function outside"),
        ("kernel void f(device float* y [[buffer(0)) { y[0] = 1; }", r"has no kernel function"),
        (f"#if 0\n{one}#else\n{one}#endif\n", r"'f' more than once, at the lines 2 and 4"),
    ):
        path = tmp_path / "k.metal"
        path.write_text(text)
        for function in (None, "f"):
            with pytest.raises(ferrule.KernelError, match=said):
                ferrule.op("f", "-> y[3]:float32", metal=path, function=function, **LAUNCH)


KINDS = {"float32": "float", "float16": "half", "int32": "int", "uint8": "uchar", "uint32": "uint"}
GRID = {"uint": "{}", "uint2": "{}.x", "uint3": "{}.x", "ushort": "{}", "ushort2": "{}.x"}


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_signatures_in_many_forms(data: st.DataObject, tmp_path_factory: Any) -> None:
    """However a signature is spelt, the function computes what its text says."""
    draw = data.draw
    kind = draw(st.sampled_from(list(KINDS)))
    at = draw(st.sampled_from(list(GRID)))
    name = draw(st.sampled_from(["i", "thread_position_in_grid"]))
    space = draw(st.sampled_from(["device const", "const device", "constant", "device"]))
    gap = draw(st.sampled_from([" ", "\n  ", " /* , ( { */ "]))
    head = draw(st.sampled_from(["kernel void", "[[kernel]] void", "kernel\nvoid"]))
    marks = draw(st.booleans())
    dim = draw(st.sampled_from(["uint", "int"]))
    parameters = [
        f"{space} {KINDS[kind]}*{gap}x" + " [[buffer(0)]]" * marks,
        f"device {KINDS[kind]} *y" + " [[buffer(1)]]" * marks,
        f"constant {dim}& N" + " [[buffer(2)]]" * marks,
        f"{at} {name} [[thread_position_in_grid]]",
    ]
    order = draw(st.permutations(parameters))
    i = GRID[at].format(name)
    text = f"{head} f({gap}{f',{gap}'.join(order)}) {{ y[N - 1 - {i}] = x[{i}]; }}\nvoid g() {{}}\n"
    path = tmp_path_factory.mktemp("metal") / "f.metal"
    path.write_text(text, "utf-8")
    op = ferrule.op("f", f"x[N]:{kind} -> y[N]:{kind}", metal=path, grid="N", threadgroup=32)
    x: NDArray[Any] = np.arange(9).astype(kind)
    np.testing.assert_array_equal(op(x), x[::-1])


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet="kernel void f(){};[]\n*x,/\"'#", max_size=60))
def test_any_text_is_read_or_refused(text: str, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("metal") / "f.metal"
    path.write_text(text, "utf-8")
    rule = parse_rule("x[N]:float32 -> y[N]:float32")
    with pytest.raises(ferrule.KernelError):
        metal_file.read("f", rule, path, None, ())
