"""What runs here and Apple's compiler refuses is told with its line; what it takes is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule.kernel import make_kernel
from ferrule.source import unportable
from ferrule.tools import nvrtc

F32 = np.dtype(np.float32)
NONE = "a pointer without an address space"
SIZE = "an array whose size is no constant ('s')"
REFERENCE = "a reference without an address space"
HELPER = "threadgroup memory in a function that is no kernel"


def told(source: str, header: str = "", types: tuple[str, ...] = ()) -> list[tuple[str, int, str]]:
    kernel = make_kernel("k", ["x"], ["y"], source, header)
    return [(n.where, n.line, n.what) for n in unportable.notes(kernel, types=types)]


TYPES = [
    "float",
    "half4",
    "uint",
    "uint8_t",
    "bfloat16_t",
    "S",
    "T",
    "unsigned char",
    "packed_float3",
]
SPACES = ["device", "threadgroup", "thread", "constant", "TG"]
FORMS = [
    "{} *p = y;", "{}* const p = y + 3;", "{}*p;", "{} *p[3];", "float v = *({}*)x;",
    "auto p = reinterpret_cast<{}*>(y);", "for ({}* p = y; p < y + 3; ++p) {{}}",
    "if (true) {{ const {}* p = x; }}",
]  # fmt: skip
HEADERS = ["float f({} *p) {{ return 1; }}", "void f(int a, const {}* p, uint b) {{}}",
           "struct B {{ {} *p; }};", "inline {}* f(uint a);"]  # fmt: skip
HEAD = "#define TG threadgroup\nstruct S { int a; }; template <typename T> struct V {};\n"


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pointers(data: st.DataObject) -> None:
    """With an address space, before or behind the type, nothing is said; without one, its line."""
    kind = data.draw(st.sampled_from(TYPES))
    form = data.draw(st.sampled_from([*FORMS, *HEADERS]))
    lines = data.draw(st.integers(0, 3))
    where, line = ("header", 3 + lines) if form in HEADERS else ("source", 1 + lines)

    def told_of(named: str) -> list[tuple[str, int, str]]:
        text = "\n" * lines + form.format(named)
        return told("", HEAD + text) if form in HEADERS else told(text, HEAD)

    assert told_of(kind) == [(where, line, NONE)]
    space = data.draw(st.sampled_from(SPACES))
    assert told_of(f"{space} {kind}") == []
    if space != "TG":
        assert told_of(f"{kind} {space}") == []


@pytest.mark.parametrize(
    "text",
    [
        "uint n = a * b; float m = f(a * b, c);", "y[i] = x[i] * w[i];", "auto p = y + 1;",
        "auto* p = y;", "float a = float(b) * c;", "uint a = uint(b)*c;", "x = sizeof(float) * n;",
        "a *= b; *p = 3; (*p) = 4; int c = -*p;", "float q = (a) * (b);", "device float* p = y;",
        "constexpr int N = uint(3) * 4;", "T v = T(a) * b, w = v * n;", "// float* p = y;",
        "f(simdgroup_index_in_threadgroup * n, 3);", "f(thread_index_in_simdgroup & n, 3);",
        "uint n = a & b; uint m = uint(a) & b;", "auto& r = y[0]; const auto& q = x[0];",
        "auto f = [&](const T& v, float& w) { return v; };", "float (&t)[4] = s;",
        "using P = device float; P* p = y;", "typedef threadgroup T D; D* p = s; D& q = s[0];",
        "#define REF(r) float& r\n", "f(vec<float&>(x));",
    ],
)  # fmt: skip
def test_what_is_no_pointer(text: str) -> None:
    assert told(text, "template <typename T> struct V {};") == []


@pytest.mark.parametrize(
    "text", ["{}& r = y[0];", "{} &r = y[0];", "for ({}& v : s) {{}}", "const {}& r = x[0], q = r;"]
)
@pytest.mark.parametrize("kind", ["float", "half4", "T", "S", "unsigned char"])
def test_references(text: str, kind: str) -> None:
    assert told("\n" + text.format(kind), HEAD) == [("source", 2, REFERENCE)]
    for space in ("thread", "device", "TG"):
        assert told(text.format(f"{space} {kind}"), HEAD) == []
    for form, line in (("void f({}& a) {{}}", 3), ("void f(int n,\n const {}& a) {{}}", 4)):
        assert told("", HEAD + form.format(kind)) == [("header", line, REFERENCE)]
        assert told("", HEAD + form.format(f"thread {kind}")) == []


@pytest.mark.parametrize("types", ["", "using F = float; ", "typedef const T F; "])
@pytest.mark.parametrize(
    ("text", "what"),
    [("{}* q = y;", NONE), ("float v = *({}*)x;", NONE), ("{}& r = y[0];", REFERENCE),
     ("device {}* q = y;", ""), ("f(N * q, 3);", "")],
)  # fmt: skip
def test_types_that_a_call_or_the_text_names(types: str, text: str, what: str) -> None:
    found = told(types + text.format("F" if types else "T"), types=("T",))
    assert found == ([("source", 1, what)] if what else [])


@pytest.mark.parametrize(
    "text",
    [
        "int N = x_shape[0];\nfloat s[N];", "\nfloat s[x_shape[0]];", "\nthread T s[4][x_ndim];",
        "const uint n = x[0], m = n;\nhalf4 s[n + 1] = {};", "int N = 4;\nfloat s[2 * N];",
        "uint i = thread_position_in_grid.x; const uint n = i;\nuchar s[n / 2];",
        "constexpr int N = 4; { int N = 3;\nfloat s[N]; }", "auto n = 3u;\nS s[2][n];",
        "{ const int N = 4; } const int N = x;\nfloat s[N];",
    ],
)  # fmt: skip
def test_arrays_whose_size_is_no_constant(text: str) -> None:
    assert told(text, HEAD, types=("T",)) == [("source", 2, SIZE)]


@pytest.mark.parametrize(
    "text",
    [
        "constexpr int N = 4; float s[N];", "const int N = 4, M = N; float s[N * 2][M];",
        "float s[N]; float t[S::x]; float u[sizeof(x) / 4];", "int n = x[0]; y[0] = y[n];",
        "{ int n = 3; } constexpr int n = 4; float s[n];", "uint i = 3; return y[i];",
        "const int n = sizeof(x_shape[0]); float s[n];", "threadgroup float s[x_shape[0]];",
        "for (int k = 0; k < 4; k++) { T v = s[k]; } const short k = 2; T u[k];",
    ],
)  # fmt: skip
def test_arrays_whose_size_is_a_constant(text: str) -> None:
    assert told(text, HEAD, types=("T",)) == []


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("ferrule::prefetch(x, 8);", [1]),
        ("#ifdef FERRULE\nferrule::prefetch(x, 8);\nfloat* p = y;\n#endif\nfloat* q = y;", [5]),
        ("#  ifdef FERRULE\n#if 1\nfloat* p = y;\n#else\nfloat* p = y;\n#endif\ndouble d;\n#else\n"
         "float* q = y;\n#endif\nfloat* r = y;", [9, 11]),
        ("#ifdef OTHER\nferrule::prefetch(x, 8);\n#elif FERRULE\n#endif", [2]),
        ("float ferrule = 0; y[0] = ferrule ? 1 : 2;", []),
    ],
)  # fmt: skip
def test_what_only_this_library_reads_is_not_told(text: str, lines: list[int]) -> None:
    for where in ("source", "header"):
        notes = told(text if where == "source" else "", text if where == "header" else "")
        assert [(place, line) for place, line, _ in notes] == [(where, line) for line in lines]


def test_what_mlx_compiles_with_apples_compiler_is_not_told() -> None:
    mlx = pytest.importorskip("mlx.core")
    folder = Path(mlx.__file__).parent / "include/mlx/backend/metal/kernels"
    found = [(one.name, *n) for one in folder.rglob("*.h") for n in told("", one.read_text())]
    assert [one for one in found if one[-1] != HELPER] == []  # which are in templates of kernels


@pytest.mark.parametrize(
    ("header", "line"),
    [
        ("float f(uint i) {\n  threadgroup float s[32];\n  return s[i]; }", 2),
        ("void f() { threadgroup int total; }", 1),
        ("template <int N>\nvoid f() {\n  if (N) {\n threadgroup atomic_uint bins[N]; } }", 4),
        ("void f(threadgroup float* s) { threadgroup float* p = s; }", 0),
        ("float f(threadgroup float (&s)[32]) { return s[0]; }", 0),
    ],
)  # fmt: skip
def test_threadgroup_memory_in_helpers(header: str, line: int) -> None:
    assert told("", header) == ([("header", line, HELPER)] if line else [])
    assert told("threadgroup float s[32]; threadgroup float* p = s;", "") == []


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("threadgroup atomic_long a;", "atomics on long"),
        ("(device atomic<long>*)y;", "atomics on long"),
        ("(device atomic<int64_t>*)y;", "atomics on int64_t"),
        ("(device atomic<half>*)y;", "atomics on half"),
        ("(device atomic<uchar>*)y;", "atomics on uchar"),
        ("(device atomic<uint>*)y; threadgroup atomic_int a; (device atomic<T>*)y;", ""),
        ("atomic_max_explicit((device atomic_ulong*)y, 1ul, memory_order_relaxed);", ""),
    ],
)  # fmt: skip
def test_types_of_atomics(text: str, what: str) -> None:
    assert told(f"\n{text}") == ([("source", 2, what)] if what else [])


ADD64 = "atomic_fetch_add_explicit({}, 1ul, memory_order_relaxed);"
GONE = "atomic_fetch_add_explicit of atomics on "


@pytest.mark.parametrize(
    ("text", "header", "said"),
    [
        (ADD64.format("&y[0]"), "", (1, GONE + "uint64 (output 'y')")),
        (ADD64.format("(&y[0])"), "", (1, GONE + "uint64 (output 'y')")),
        (ADD64.format("y + 3"), "", (1, GONE + "uint64 (output 'y')")),
        ("auto p = &y[2];\n" + ADD64.format("p"), "", (2, GONE + "uint64 (output 'y')")),
        ("device atomic_ulong* p = y;\n" + ADD64.format("p + 1"), "", (2, GONE + "ulong ('p')")),
        (ADD64.format("(device atomic<ulong>*)x"), "", (1, GONE + "ulong")),
        ("\nthreadgroup atomic_ulong s;", "", (2, "atomics on ulong in threadgroup memory")),
        ("threadgroup atomic<uint64_t> s[4];", "", (1, "atomics on ulong in threadgroup memory")),
        ("h(y);", "void h(device atomic<ulong>* p) {\n" + ADD64.format("p") + " }",
         (2, GONE + "ulong ('p')")),
        ("// " + ADD64.format("&y[0]"), "", None),
        ("/*\n" + ADD64.format("&y[0]") + "*/", "", None),
        ("atomic_max_explicit(&y[0], 1ul, memory_order_relaxed);", "", None),
        ("device atomic_uint* p = z; " + ADD64.format("p"), "", None),
        ("h(y);", "void h(device atomic<ulong>* p) { atomic_min_explicit(p, 1ul, order); }", None),
    ],
)  # fmt: skip
def test_atomics_of_64_bits(text: str, header: str, said: tuple[int, str] | None) -> None:
    kernel = make_kernel("k", ["x"], ["y"], text, header)
    found = [(n.line, n.what) for n in unportable.notes(kernel, ["y"]) if n.what != NONE]
    assert found == ([] if said is None else [said])


I = "uint i = thread_position_in_grid.x;\n"  # noqa: E741
ADD = "atomic_fetch_add_explicit(&y[0], 1, memory_order_relaxed);"
CASES: list[tuple[str, str, dict[str, Any], str, str]] = [
    (I + "device float* q = y;\nfloat* p = y; p[i] = q[i];", "float32", {}, "source line 3", NONE),
    (I + "y[i] = f(x[i], i);", "float32", {
        "header": "float f(float v, uint i) {\n threadgroup float s[32]; s[i] = v; return s[i]; }"
    }, "header line 2", HELPER),
    (I + "float& r = y[i];\nr = x[i];", "float32", {}, "source line 2", REFERENCE),
    (I + "int n = x_shape[0];\nfloat s[n]; s[i] = x[i]; y[i] = s[i];", "float32", {},
     "source line 3", SIZE),
    (I + ADD, "int64", {"atomic_outputs": True}, "source line 2", "atomics on int64 (output 'y')"),
    (I + ADD, "uint64", {"atomic_outputs": True}, "source line 2",
     "atomic_fetch_add_explicit of atomics on uint64 (output 'y')"),
    (I + "atomic_max_explicit(&y[0], ulong(i), memory_order_relaxed);", "uint64",
     {"atomic_outputs": True}, "", ""),
    (I + ADD, "uint32", {"atomic_outputs": True}, "", ""),
]  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "sm_90"])
@pytest.mark.parametrize(("source", "dtype", "flags", "place", "what"), CASES)
def test_every_device_warns(
    source: str, dtype: str, flags: dict[str, Any], place: str, what: str, device: str,
    library: nvrtc.Nvrtc, recwarn: pytest.WarningsRecorder,
) -> None:  # fmt: skip
    def compiled(portable: bool) -> None:
        kernel = ferrule.metal_kernel("k", ["x"], ["y"], source, portable=portable, **flags)
        kernel.compile(device, inputs=["float32[4]"], output_dtypes=[np.dtype(dtype)])

    if what in (HELPER, SIZE) and device != "cpu":  # CUDA refuses it as well
        with pytest.raises(ferrule.CompileError, match=r"header line 2|source line 3"):
            compiled(False)
        return
    compiled(False)
    said = [str(one.message) for one in recwarn if one.category is ferrule.PortabilityWarning]
    assert len(said) == bool(what) and all(f"{place}: {what} runs here" in one for one in said), (
        said
    )
    if what:
        with pytest.raises(ferrule.DialectError, match="portable=True"):
            compiled(True)
    else:
        compiled(True)


def test_a_method_for_threadgroup_memory_declares_none() -> None:
    header = "struct B {\n float v[4];\n float sum() const threadgroup { return v[0] + v[3]; }\n};"
    assert told("threadgroup B b; y[0] = b.sum();", header) == []
