"""What is refused, warned of, or does not compile: the construct, the line, and the author's"
" text."""

from __future__ import annotations

import re
import warnings
from typing import Any

import numpy as np
import pytest

import ferrule
from metal_harness import run

f32 = np.float32
OUT: dict[str, Any] = {"y": ("float", (4,))}
X = np.arange(4, dtype=f32)


def call(source: str, header: str = "", mode: str = "auto", **flags: Any) -> Any:
    return run(
        source,
        {"x": X},
        flags.pop("outputs", OUT),
        4,
        4,
        header=header,
        mode=mode,
        name="refused",
        **flags,
    )


TWO_WAYS = "#if 1\n#define TG threadgroup\n#else\n#define TG thread\n#endif"


@pytest.mark.parametrize(
    ("source", "header", "said"),
    [
        ("y[0] = 1;\nif (x[0] > 0) {\n y[0] = 2;", "", "source line 2: this '{' is never closed"),
        ("y[0] = (x[0]));", "", "source line 1: nothing opened this '\\)'"),
        ("\ny[0] = x[(0];", "", "source line 2: this ']' does not close the '\\(' of line 2"),
        ("y[0] = 1;", "\n#import <thing>", "header line 2: this include"),
        ("y[0] = 1;", "# /* */ include <thing>", "header line 1: a directive"),
        ("y[0] = 1;", "%:include <thing>", "header line 1: a directive"),
        ("\nthreadgroup float t[2] = {1, 2}; y[0] = t[0];", "", "source line 2: threadgroup mem"),
        ("TG float t[2]; y[0] = t[0];", TWO_WAYS, "source line 1: threadgroup memory by a macro"),
        (
            "\nT(a); y[0] = a_[0];",
            "#define T(n) threadgroup float n##_[2 * 2]",
            "source line 2: threadgroup memory by a macro",
        ),
    ],
)
def test_texts_refused_with_their_line(source: str, header: str, said: str) -> None:
    with pytest.raises(ferrule.DialectError, match=said):
        call(source, header)


@pytest.mark.parametrize("name", ["group", "launch", "at", "position", "detail", "fr", "index"])
@pytest.mark.parametrize("mode", ["auto", "fibers"])
def test_macros_may_have_names_that_ferrule_uses(name: str, mode: str) -> None:
    body = f"uint i = thread_position_in_grid.x; y[i] = simd_sum(x[i]) + {name};"
    got = call(body, f"#define {name} 3", mode=mode)
    assert (got["y"] == 9).all()


def test_macros_with_two_meanings_may_name_pointers() -> None:
    body = "threadgroup float t; TG float* p = &t; *p = x[2]; y[0] = *P(p) + t;"
    header = f"{TWO_WAYS}\n#define P(n) (threadgroup flo##at*)(n)\n"
    assert call(body, header)["y"][0] == 4


def test_macros_may_open_brackets() -> None:
    got = call(
        "uint i = thread_position_in_grid.x; y[i] = AT_LEAST 2.0f);", "#define AT_LEAST max(x[i],"
    )
    np.testing.assert_array_equal(got["y"], [2, 2, 2, 3])


def test_global_names() -> None:
    got = call(
        "y[thread_position_in_grid.x] = ::twice(::metal::fabs(-3.0f));",
        "inline float twice(float v) { return v * 2; }",
    )
    assert (got["y"] == 6).all()


# Construct as the message should name it, and a statement that uses it.
STATEMENTS = [
    ("mpp", "mpp::tensor_ops::matmul2d<descriptor, execution_simdgroups<4>> op;"),
    ("mpp", "using namespace mpp;"),
    ("__metal_", "y[0] = __metal_simd_sum(x[0]);"),
    ("__metal_", "float e = __metal_exp(x[0], 0);"),
    ("texture2d", "texture2d<float, access::sample> t;"),
    ("texture", "metal::texture3d<half> t;"),
    ("sampler", "constexpr sampler s(address::clamp_to_zero);"),
    ("asm", '__asm__("");'),
    ("asm", 'asm volatile("nop");'),
]
GLOBALS = [
    (
        "MetalPerformancePrimitives",
        "#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>",
    ),
    ("steel", '#include "mlx/backend/metal/kernels/steel/gemm/mma.h"'),
    ("mlx/", '#include "mlx/backend/metal/kernels/utils.h"'),
    ("metal_tensor", "#include <metal_tensor>"),
    ("function_constant", "constant int N [[function_constant(0)]];"),
    ("texture2d", "inline float look(texture2d<float> t) { return 0; }"),
    ("__metal_", "inline float e(float v) { return __metal_exp(v, 0); }"),
    ("asm", 'inline void none() { __asm__ volatile(""); }'),
    ("mpp", "namespace ops = mpp::tensor_ops;"),
]


@pytest.mark.parametrize(("construct", "text"), STATEMENTS)
def test_constructs_refused_in_a_body(construct: str, text: str) -> None:
    source = f"uint i = thread_position_in_grid.x;\ny[i] = x[i];\n\n    {text}\ny[i] += 1;"
    with pytest.raises(ferrule.DialectError) as caught:
        call(source, header="// one\n// two\n")
    assert (caught.value.where, caught.value.line, caught.value.kernel) == ("source", 4, "refused")
    assert construct in caught.value.construct
    assert (
        construct in str(caught.value)
        and "refused" in str(caught.value)
        and re.search(r"\b4\b", str(caught.value))
    )


@pytest.mark.parametrize(("construct", "text"), GLOBALS)
def test_constructs_refused_in_a_header(construct: str, text: str) -> None:
    header = f"#include <metal_stdlib>\nusing namespace metal;\n{text}\ninline float k();\n"
    with pytest.raises(ferrule.DialectError) as caught:
        call("y[thread_position_in_grid.x] = 1;", header=header)
    assert (caught.value.where, caught.value.line, caught.value.kernel) == ("header", 3, "refused")
    assert construct in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        '// mpp::tensor_ops, texture2d<float>, asm(""), __metal_exp, [[function_constant(0)]]',
        '/* #include "mlx/backend/metal/kernels/steel/gemm/mma.h" */',
        "float texture_scale = 1, sampler_id = 2, asm_ = 3, mpp_ = 4; (void)texture_scale;"
        " (void)sampler_id; (void)asm_; (void)mpp_;",
        'constant const char* s = "mpp:: texture2d __metal_exp asm"; (void)s;',
        "struct { float texture, sampler, mpp; } t; t.texture = 1; t.sampler = t.mpp = 2; (void)t;",
    ],
)
def test_what_only_looks_like_it_is_not_refused(text: str) -> None:
    y = call(f"uint i = thread_position_in_grid.x;\n{text}\ny[i] = x[i];")["y"]
    assert (y == X).all()


def portability() -> list[Any]:
    return [
        pytest.param("double d = 2;\ny[thread_position_in_grid.x] = float(d * 3);", "", {},
         "double", ("source", 2), id="double"),
        pytest.param("y[thread_position_in_grid.x] = twice(3);",
         "\n\ninline float twice(double v) { return v * 2; }", {}, "double",
                     ("header", 3), id="double-header"),
        pytest.param("\nthreadgroup float t[9000];\nt[thread_position_in_grid.x] ="
                     " 6;\nthreadgroup_barrier(mem_flags::mem_threadgroup);\n"
                     "y[thread_position_in_grid.x] = t[thread_position_in_grid.x ^ 1];",
                     "", {}, "threadgroup", ("source", 3),
                     id="threadgroup"),
        pytest.param("\natomic_fetch_add_explicit((device atomic<half>*)h +"
                     " thread_position_in_grid.x, 6.0h, memory_order_relaxed);"
                     "\ny[thread_position_in_grid.x] = 6;",
                     "", {"outputs": {**OUT, "h": ("half", (4,))}, "init_value": 0}, "half",
                     ("source", 3), id="atomic-half"),
        pytest.param("\natomic_fetch_add_explicit(&y[thread_position_in_grid.x],"
                     " bfloat16_t(6.0f), memory_order_relaxed);",
                     "", {"outputs": {"y": ("bfloat", (4,))}, "atomic_outputs": True,
                      "init_value": 0}, "bfloat", None, id="atomic-bfloat"),
    ]  # fmt: skip


@pytest.mark.parametrize(("source", "header", "flags", "construct", "place"), portability())
def test_what_apple_refuses_is_warned_of(
    source: str, header: str, flags: Any, construct: str, place: Any
) -> None:
    source = "// a line\n" + source if place and place[0] == "source" else source
    with pytest.warns(ferrule.PortabilityWarning) as caught:
        out = call(source, header, **flags)
    assert (out["y"].astype(f32) == 6).all()
    text = " ".join(str(w.message) for w in caught)
    assert construct in text and "refused" in text
    if place:
        where, line = place
        assert re.search(rf"{where} line {line}\b", text), text
    with pytest.raises(ferrule.KernelError) as refused, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call(source, header, portable=True, **flags)
    assert construct in str(refused.value)
    if place:
        assert re.search(rf"{place[0]} line {place[1]}\b", str(refused.value)), str(refused.value)


def test_more_than_31_buffers() -> None:
    names = [f"a{k}" for k in range(31)]
    source = (
        "uint i = thread_position_in_grid.x;\ny[i] = " + " + ".join(f"{n}[i]" for n in names) + ";"
    )
    kernel: dict[str, Any] = {
        "name": "refused",
        "input_names": names,
        "output_names": ["y"],
        "source": source,
    }
    arguments: dict[str, Any] = {
        "inputs": [X] * 31,
        "grid": (4, 1, 1),
        "threadgroup": (4, 1, 1),
        "output_shapes": [(4,)],
        "output_dtypes": [f32],
    }
    with pytest.warns(ferrule.PortabilityWarning, match="31 buffers"):
        (y,) = ferrule.metal_kernel(**kernel)(**arguments)
    assert (y == X * 31).all()
    with pytest.raises(ferrule.KernelError, match="31 buffers"):
        ferrule.metal_kernel(**kernel, portable=True)(**arguments)
    fewer = {**kernel, "input_names": names[:30], "source": source.replace(" + a30[i]", "")}
    (y,) = ferrule.metal_kernel(**fewer, portable=True)(**{**arguments, "inputs": [X] * 30})
    assert (y == X * 30).all()


def test_portable_kernels_are_told_nothing() -> None:
    source = """// double, atomic<half>
    threadgroup float t[8000]; float double_it = 2; // 32,000 bytes
    uint i = thread_position_in_grid.x; t[i] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    atomic_fetch_add_explicit((device atomic<float>*)&y[i], t[3 - i] * double_it,
        memory_order_relaxed);
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (call(source, portable=True, init_value=0)["y"] == X[::-1] * 2).all()


INTERNAL = re.compile(
    r"\bfr(::|_)|\bcore::|\b_Z\w|/tmp/|\.h:\d|ferrule/include|::metal::metal|\bfr\b"
)

BROKEN = [
    ("y[i] = undeclared + 1;", ["undeclared"]),
    ("y[i] = unknown_function(x[i]);", ["unknown_function"]),
    ("float v = x[i]\n;;y[i] = v v;", ["v"]),
    ("float2 v = float2(1, 2); y[i] = v.z;", ["z"]),
    ("float2 v = float2(1, 2); y[i] = v.xyz.x;", []),
    ("x[i] = 3;", []),
    ("const float v = 1; v = 2;", ["v"]),
    ('half h = "text";', []),
    ("float4 v = float3(1, 2, 3); y[i] = v.x;", []),
    ("bfloat16_t b = 1.0f; half h = b; y[i] = h;", None),
    ("struct S { int a; } s; y[i] = s.b;", ["b"]),
    ("struct S { int a; } s; y[i] = simd_sum(s).a;", ["simd_sum"]),
    ("y[i] = simd_shuffle(x[i]);", ["simd_shuffle"]),
    ("threadgroup_barrier();", ["threadgroup_barrier"]),
    ("threadgroup_barrier(mem_flags::mem_nothing);", ["mem_nothing"]),
    (
        "atomic_fetch_add_explicit(&y[i], 1.0f, memory_order_relaxed);",
        ["atomic_fetch_add_explicit"],
    ),
    ("threadgroup float t[n]; t[0] = 1;", ["n"]),
    ("float v = as_type<float>(half(1)); y[i] = v;", ["as_type"]),
    ('static_assert(sizeof(float) == 8, "four bytes"); ', ["four bytes"]),
    ('#error "stop here"', ["stop here"]),
    ("Unknown<float> u;", ["Unknown"]),
    ('y[i] = max(x[i], "a");', ["max"]),
    ("int4 v = int4(1); y[i] = v[0](2);", []),
    ("for (int k = 0; k < 3; ++k { y[i] = 1; }", []),
    ("simdgroup_float8x8 m; simdgroup_load(m, 3);", ["simdgroup_load"]),
    ("half h = x[i] ? 1.0h : float4(1);", []),
    ("y[i] = elem_to_loc(i, x_shape);", ["elem_to_loc"]),
]


@pytest.mark.parametrize(
    ("text", "words"),
    [b for b in BROKEN if b[1] is not None],
    ids=[b[0][:30] for b in BROKEN if b[1] is not None],
)
def test_compile_errors_quote_the_line_of_the_body(text: str, words: list[str]) -> None:
    source = f"// a comment\nuint i = thread_position_in_grid.x;\n{text}\ny[i] = simd_sum(x[i]);"
    with pytest.raises((ferrule.CompileError, ferrule.DialectError)) as caught:
        call(source, header="// header\ninline float k() { return 1; }\n")
    message = str(caught.value)
    refused = isinstance(caught.value, ferrule.DialectError)  # named, but not quoted
    lines = text.split("\n")
    assert "refused" in message and caught.value.kernel == "refused"
    quoted = [
        n
        for n, line in enumerate(lines)
        if f"source line {3 + n}:" in message and (refused or line.strip() in message)
    ]
    after = f"source line {3 + len(lines)}:" in message  # an error may be seen behind its place
    assert quoted or after, message
    assert all(word in message for word in words), message
    assert not INTERNAL.search(message), message


HEADERS = [
    ("inline float k() { return undeclared; }", 3, ["undeclared"]),
    ("inline float k() { return 1 }", 3, []),
    ("template <typename T> T k(T v) { return v.nothing(); }", 3, ["nothing"]),
    ("#define BROKEN(v) (v + missing)", 3, ["missing"]),
    (
        "inline float k(float v) { return thread_position_in_grid.x + v; }",
        3,
        ["thread_position_in_grid"],
    ),
    ("struct S { float a float b; };", 3, []),
    ("constant float T[2] = {1, 2, 3};", 3, []),
    ("inline float k(int a, int a) { return 1; }", 3, []),
]


@pytest.mark.parametrize(("text", "line", "words"), HEADERS, ids=[h[0][:30] for h in HEADERS])
def test_compile_errors_quote_the_line_of_the_header(
    text: str, line: int, words: list[str]
) -> None:
    use = {"template": "y[0] = k(1.0f);", "#define": "y[0] = BROKEN(1);"}.get(
        text.split()[0], "y[0] = 1;"
    )
    with pytest.raises(ferrule.CompileError) as caught:
        call(
            f"\n\n\n{use}",
            header=f"#include <metal_stdlib>\nusing namespace metal;\n{text}\ninline float"
            f" after() {{ return 1; }}\n",
        )
    message = str(caught.value)
    # An error may be seen behind its place; that of a macro belongs to its use as well.
    places = {f"header line {line}:": text, "header line 4:": "after"}
    if "#define" in text:
        places["source line 4:"] = use
    assert any(place in message and quoted in message for place, quoted in places.items()), message
    assert all(word in message for word in words), message
    assert not INTERNAL.search(message), message


@pytest.mark.parametrize(
    "source",
    ["y[0] = 1; /* no end", "if (true) { y[0] = 1;", "y[0] = 1; }",
     "constant const char* s = \"no end;", "y[0] = (1;", "#if 1\ny[0] = 1;",
     "y[0] = x[0;", "y[0] = 1", "'", "#define", "R\"(", "@", "#else", "template <"],
)  # fmt: skip
def test_text_that_ends_in_the_middle(source: str) -> None:
    for header, body in [("", source), (source, "y[0] = 1;")]:
        with pytest.raises(ferrule.FerruleError) as caught:
            call(body, header=header)
        assert not INTERNAL.search(str(caught.value)), str(caught.value)
