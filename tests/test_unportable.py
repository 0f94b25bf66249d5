"""What runs here and Apple's compiler refuses is told with its line; what it takes is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule import nvrtc
from ferrule.kernel import make_kernel
from ferrule.source import unportable

F32 = np.dtype(np.float32)
NONE = "a pointer without an address space"
HELPER = "threadgroup memory in a function that is no kernel"


def told(source: str, header: str = "") -> list[tuple[str, int, str]]:
    return [
        (n.where, n.line, n.what)
        for n in unportable.notes(make_kernel("k", ["x"], ["y"], source, header))
    ]


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
    ],
)  # fmt: skip
def test_what_is_no_pointer(text: str) -> None:
    assert told(text, "template <typename T> struct V {};") == []


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

    if what == HELPER and device != "cpu":  # CUDA refuses it as well
        with pytest.raises(ferrule.CompileError, match="header line 2"):
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
