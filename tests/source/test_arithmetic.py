"""Products that are summed, and shifts: one meaning with every compiler, way and device."""

from __future__ import annotations

import ctypes
import random
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ferrule
from ferrule.devices.cpu import program as cpu

pytestmark = pytest.mark.optimised

N = 4096
NAMES = ("a", "b", "c", "d")

Array = np.ndarray[Any, Any]


def numbers(seed: int = 0) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(N).astype(np.float32) for _ in NAMES]


def run(
    texts: Sequence[str], inputs: Sequence[Array], header: str = "", kind: str = "float",
    dtype: Any = np.float32, **options: Any,
) -> Array:  # fmt: skip
    """What each text, a block of its own, leaves in ``out``: an array of a row per text."""
    blocks = [
        f"{{ {kind} out;\n{text}\ny[i * {len(texts)} + {k}] = out; }}"
        for k, text in enumerate(texts)
    ]
    kernel = ferrule.metal_kernel(
        name="sums", input_names=list(NAMES[: len(inputs)]), output_names=["y"],
        source="\n".join(["uint i = thread_position_in_grid.x;", *blocks]), header=header,
        **options,
    )  # fmt: skip
    (y,) = kernel(
        inputs=list(inputs), grid=(N, 1, 1), threadgroup=(64, 1, 1),
        output_shapes=[(N, len(texts))], output_dtypes=[dtype],
    )  # fmt: skip
    return np.asarray(y).T


def ways(place: str) -> tuple[str, ...]:
    return ("flat", "split", "fibers") if place == "cpu" else ("auto",)


def fused(a: Array, b: Array, c: Array) -> Array:
    """``a * b + c`` of float32, rounded once: the sum in float64 is rounded to odd first."""
    product, c = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + c
    part = total - product
    lost = (product - (total - part)) + (c - part)
    bits = total.view(np.int64)
    away = np.where((lost > 0) == (total > 0), 1, -1)
    return np.where((lost != 0) & (bits % 2 == 0), bits + away, bits).view(np.float64).astype("f")


A, B, C, D = numbers()
PLAIN, ONCE = A * B + C, fused(A, B, C)

CASES = {
    "one expression": ("out = a[i] * b[i] + c[i];", ONCE),
    "two statements": ("float p = a[i] * b[i]; out = p + c[i];", PLAIN),
    "a function's result": ("out = times(a[i], b[i]) + c[i];", PLAIN),
    "a macro": ("out = TIMES(a[i], b[i]) + c[i];", ONCE),
    "names in a macro's brackets": (
        "float p = a[i], q = b[i], r = c[i], s = d[i]; out = TIMES(p, q) + TIMES(r, s);",
        fused(A, B, C * D),
    ),
    "a macro that adds": ("out = ADD(a[i] * b[i], c[i]);", ONCE),
    "the left one of two": ("out = a[i] * b[i] - c[i] * d[i];", fused(A, B, -(C * D))),
    "taken away": ("out = c[i] - a[i] * b[i];", fused(-A, B, C)),
    "negated": ("out = -(a[i] * b[i]) - c[i];", fused(-A, B, -C)),
    "converted to what it is": (
        "out = float(a[i] * b[i]) + (float)(c[i] * d[i]);", fused(A, B, C * D),
    ),
    "added to itself": (
        "out = c[i]; out += a[i] * b[i]; out -= (a[i]) * (d[i]);", fused(-A, D, ONCE),
    ),
    "vectors": ("float4 v = float4(a[i]); out = (v * b[i] + c[i]).z;", ONCE),
    "parts of vectors": (
        "float3 v = float3(c[i]); v.xz += float2(a[i]) * b[i]; out = v.z;", ONCE,
    ),
    "half": (
        "out = float(half(a[i]) * half(b[i]) + half(c[i]));",
        (A.astype("e") * B.astype("e") + C.astype("e")).astype("f"),
    ),
    "half beside float": (
        "out = half(a[i]) * half(b[i]) + c[i];",
        (A.astype("e") * B.astype("e")).astype("f") + C,
    ),
    "constants": ("out = 0.1f * 0.7f + a[i];", np.float32(0.1) * np.float32(0.7) + A),
}  # fmt: skip
HEADER = """
#define TIMES(p, q) (p) * (q)
#define ADD(p, q) ((p) + (q))
inline float times(float p, float q) { return p * q; }
"""


def test_what_is_rounded_once(everywhere: str) -> None:
    for mode in ways(everywhere):
        with cpu.running(mode):
            rows = run([text for text, _ in CASES.values()], numbers(), HEADER)
        for row, (case, (_, expected)) in zip(rows, CASES.items(), strict=True):
            assert (row == expected).all(), f"{mode}, {case}: {(row != expected).sum()} of {N}"


# Name: what the header has for it, the text, and what it gives.
ONES = np.ones(N, np.float32)
INDEX = np.arange(N)
HELD = np.trunc(5 + np.minimum(A * A, np.float32(9)) * np.float32(0.5)).astype(int)
OWN = {
    "no space behind a colon": ("", "out = a[i]>0 ?b[i]:a[i]*b[i]+c[i];", np.where(A > 0, B, ONCE)),
    "a shift behind a colon": (
        "", "uint k = i>5 ?1:i<<(i&3); out = k;", np.where(INDEX > 5, 1, INDEX << (INDEX & 3)),
    ),
    "a matrix and a vector": (
        "", "float3x3 m(float3(1, 2, 3), float3(4, 5, 6), float3(7, 8, 9));"
        "float3 v(a[i], b[i], c[i]), r = m * v + float3(1.0f); out = r.x;",
        fused(7 * ONES, C, fused(4 * ONES, B, A)) + 1,
    ),
    "a product of structs": (
        "struct V3 { float x, y, z; };\n"
        "inline float operator*(V3 p, V3 q) { return p.x * q.x + p.y * q.y + p.z * q.z; }",
        "V3 p{a[i], b[i], c[i]}; out = p * p + 1.0f;", fused(C, C, fused(A, A, B * B)) + 1,
    ),
    "members that are not const": (
        "struct M1 { float v; M1 operator*(M1 o) { return {v * o.v}; }"
        " M1 operator+(M1 o) { return {v + o.v}; } };",
        "M1 p{a[i]}, q{b[i]}; out = (p * q + p).v;", A * B + A,
    ),
    "references that are not const": (
        "struct M2 { float v; };\n"
        "inline M2 operator*(thread M2& p, thread M2& q) { return {p.v * q.v}; }\n"
        "inline M2 operator+(M2 p, M2 q) { return {p.v + q.v}; }",
        "M2 p{a[i]}, q{b[i]}; out = (p * q + p).v;", A * B + A,
    ),
    "a stream": (
        "struct M3 { float v; thread M3& operator<<(uint n) { v += n; return *this; } };",
        "M3 q{a[i]}; uint n = 3; q << n << n; out = q.v;", A + 3 + 3,
    ),
    "a stream of lanes": (
        "struct M8 { uint v; thread M8& operator<<(uint n) { v = v * 31 + n; return *this; } };",
        "M8 q{1}; q << i << 3; (q) << i; out = q.v & 0xffff;",
        (((31 + INDEX) * 31 + 3) * 31 + INDEX) & 0xFFFF,
    ),
    "a conversion that is not const": (
        "struct M4 { float v; operator float() { return v; } };",
        "M4 p{a[i]}; out = p * b[i] + c[i];", A * B + C,
    ),
    "constants in lambdas": (
        "", "constexpr float k = 1.5f; constexpr int n = 3;"
        "auto f = [](float x, float z) { return k * x + (z + x * k); };"
        "auto g = [](uint x) { return x << n; }; out = f(a[i], b[i]) + g(i) * 0;",
        fused(A, 1.5 * ONES, fused(1.5 * ONES, A, B)),
    ),
    "constants in a local struct": (
        "", "constexpr float k = 1.5f; struct S { float f(float x, float z) { return k * x + z; }};"
        " S s; out = s.f(a[i], b[i]);", fused(1.5 * ONES, A, B),
    ),
    "bit-fields": (
        "", "struct { int k : 5; uint u : 7; } s{3, 5}; float w = metal::min(a[i] * a[i], 9.0f);"
        "s.u += w * 0.5f; out = s.k * b[i] + s.u * 2.0f; out += s.k << s.u;",
        fused(3 * ONES, B, (2 * HELD).astype("f")) + (3 << HELD).astype("f"),
    ),
    "an enumeration's": (
        "enum E1 { E1A = 3 };\ninline float operator*(E1 e, float f) { return f / int(e); }",
        "E1 p = E1A; out = p * b[i] + 1.0f;", B / np.float32(3) + 1,
    ),
    "an enumeration without": (
        "enum E2 { E2A = 3 };", "out = E2A * a[i] + b[i]; out = a[i] * E2A + out;",
        fused(A, 3 * ONES, fused(3 * ONES, A, B)),
    ),
    "an enumeration's own class": (
        "enum class E3 { A = 3 };\ninline float operator*(float f, E3 e) { return f / int(e); }",
        "out = a[i] * E3::A + 1.0f;", A / np.float32(3) + 1,
    ),
    "a sum's": (
        "struct M5 { float v; operator float() const { return v; } };\n"
        "inline float operator+(M5 s, float x) { return s.v + 2 * x; }",
        "M5 s{a[i]}; out = s + b[i] * c[i];", A + 2 * (B * C),
    ),
    "a sum's in place": (
        "struct M6 { float v; M6(float x) : v(x) {} operator float() const { return v; }"
        " thread M6& operator+=(float x) { v += 2 * x; return *this; } };",
        "M6 s{a[i]}; s += b[i] * c[i]; out = s.v;", A + 2 * (B * C),
    ),
    "a fixed point's": (
        "struct M7 { int v; operator float() const { return v; } };\n"
        "inline float operator*(M7 p, float f) { return p.v * f / 4; }",
        "M7 p{8}; out = p * a[i] + b[i];", 2 * A + B,
    ),
    "a constexpr lambda": (
        "", "constexpr auto f = [](float z) { return z * z + 1.0f; }; out = f(a[i]);",
        fused(A, A, ONES),
    ),
    "an alias": ("", "using F = float; out = F(a[i] * b[i]) + c[i];", ONCE),
    "a typedef": ("typedef float real1;", "out = (real1)(a[i] * b[i]) + c[i];", ONCE),
}  # fmt: skip


def test_what_authors_define_stays_theirs(everywhere: str) -> None:
    header = "\n".join(text for text, _, _ in OWN.values())
    for mode in ways(everywhere):
        with cpu.running(mode):
            rows = run([text for _, text, _ in OWN.values()], [A, B, C], header)
        for row, (case, (_, _, expected)) in zip(rows, OWN.items(), strict=True):
            wrong = np.flatnonzero(row != expected)
            assert not len(wrong), (mode, case, len(wrong), row[wrong[:3]], expected[wrong[:3]])


def test_a_macro_that_an_if_leaves_out(everywhere: str) -> None:
    header = """
#if 0
#define twice(p) (p) * 100
#endif
inline float twice(float p) { return p + p; }
"""
    (found,) = run(["out = twice(a[i]) + b[i];"], [A, B], header)
    assert (found == 2 * A + B).all()


@pytest.mark.parametrize("mode", ["relaxed", "fast"])
def test_sixteen_bits_round_at_each_step_in_every_mode(mode: str, everywhere: str) -> None:
    for kind, dtype in (("half", np.float16), ("bfloat16_t", ml_dtypes.bfloat16)):
        a, b, c = (v.astype(dtype) for v in (A, B, C))
        text = "out = a[i] * b[i] + c[i];"
        options = {"compile_options": {"math_mode": mode}}
        (found,) = run([text], [a, b, c], kind=kind, dtype=dtype, **options)
        assert (found.copy().view(np.uint16) == (a * b + c).view(np.uint16)).all(), kind


OFF, ON = "#pragma METAL fp contract(off)\n", "#pragma METAL fp contract(on)\n"
SUM = "out = a[i] * b[i] + c[i];\n"
PRAGMAS = {
    "off": (f"\n{OFF}{SUM}", PLAIN),
    "off, on": (f"\n{OFF}{ON}{SUM}", ONCE),
    "over": (f"{{ \n{OFF}}}{SUM}", ONCE),
    "inside": (f"{{\n#pragma clang fp contract(off)\n{SUM}}}", PLAIN),
    "by _Pragma": (f'\n_Pragma("METAL fp contract(off)")\n{SUM}', PLAIN),
    "standard": (f"\n#pragma STDC FP_CONTRACT OFF\n{SUM}", PLAIN),
    "fast": (f"\n#pragma METAL fp contract(fast)\n{SUM}", ONCE),
}


def test_pragmas_hold_to_the_end_of_their_block(everywhere: str) -> None:
    rows = run([text for text, _ in PRAGMAS.values()], numbers())
    for row, (case, (_, expected)) in zip(rows, PRAGMAS.items(), strict=True):
        assert (row == expected).all(), case


def test_a_pragma_in_the_header_holds_for_what_follows(everywhere: str) -> None:
    header = (
        "inline float first(float p, float q, float r) { return p * q + r; }\n"
        "#pragma METAL fp contract(off)\n"
        "inline float then(float p, float q, float r) { return p * q + r; }\n"
    )
    given = "(a[i], b[i], c[i]);"
    texts = [f"out = first{given}", f"out = then{given}", SUM]
    first, then, here = run(texts, numbers(), header)
    assert (first == ONCE).all() and (then == PLAIN).all() and (here == PLAIN).all()


# -- against clang ---------------------------------------------------------------------------------


class _Random:
    """Random expressions of floats that C and Metal write alike."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def expression(self, depth: int) -> str:
        rng = self.rng
        if depth == 0:
            return rng.choice((*NAMES, *NAMES, "0.3f", "k", "n", "e"))
        kind = rng.random()
        left, right = self.expression(depth - 1), self.expression(rng.randrange(depth))
        if kind < 0.35:
            return f"({left} * {right})"
        if kind < 0.65:
            return f"({left} {rng.choice('+-')} {right})"
        if kind < 0.75:
            return f"{rng.choice(('PRODUCT', 'SUM', 'LEFT'))}({left}, {right})"
        if kind < 0.83:
            return f"(-{left})"
        if kind < 0.90:
            return f"((float)({left}))"
        if kind < 0.95:
            return f"({left} < {right} ? {left} : {right})"
        return f"product({left}, {right})"

    def statements(self) -> str:
        out = []
        for target in "pqr":
            out.append(f"float {target} = {self.expression(3)};")
            op = self.rng.choice(("+=", "-=", "*="))
            out.append(f"{target} {op} {self.expression(2)};")
        if self.rng.random() < 0.5:
            state = self.rng.choice(("off", "on"))
            out.append(
                f"{{\n#pragma clang fp contract({state})\np -= {self.expression(2)} * q;\n}}"
            )
        out.append(f"float s = p * q + {self.expression(1)} * r;")
        return "\n".join(out)


MACROS = """
#define PRODUCT(x, y) (x) * (y)
#define SUM(x, y) ((x) + (y))
#define LEFT(x, y) x
"""
FUNCTION = "inline float product(float x, float y) { return x * y; }\n"
CONSTANTS = "const float k = 0.7f; const float e = 0.1f * k;"
PROGRAMS, TOGETHER = 96, 16  # so many programs, and so many in one kernel
VALUES = " ".join(f"float {v} = {v}_[i];" for v in NAMES)


def program(seed: int, target: str) -> str:
    return (
        f"{{ {VALUES} int n = (int)i;\n{CONSTANTS}\n{_Random(seed).statements()}\n{target} = s; }}"
    )


@pytest.fixture(scope="module")
def clang(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The random programs by clang, which fuses within expressions where it is told so."""
    pytest.importorskip("ziglang")
    folder = tmp_path_factory.mktemp("clang")
    parts = [MACROS, "static " + FUNCTION]
    for seed in range(PROGRAMS):
        given = ", ".join(f"const float* {v}_" for v in NAMES)
        loop = f"for (long i = 0; i < count; ++i) {program(seed, 'y[i]')}"
        parts.append(f"void run{seed}({given}, float* y, long count) {{ {loop} }}")
    text, library = folder / "programs.c", folder / "programs.so"
    text.write_text("\n".join(parts))
    command = [sys.executable, "-m", "ziglang", "cc", "-shared", "-fPIC", "-O1", "-march=native",
               "-ffp-contract=on", "-fno-sanitize=all", str(text), "-o", str(library)]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize("first", range(0, PROGRAMS, TOGETHER))
def test_the_same_bits_as_clang(first: int, clang: ctypes.CDLL) -> None:
    inputs, seeds = numbers(first), range(first, first + TOGETHER)
    texts = [program(seed, f"y[i * {TOGETHER} + {k}]") for k, seed in enumerate(seeds)]
    source = "\n".join(["uint i = thread_position_in_grid.x;", *texts])
    kernel = ferrule.metal_kernel(
        "against_clang", [f"{v}_" for v in NAMES], ["y"], source, MACROS + FUNCTION
    )
    mode = ("flat", "split", "fibers")[first // TOGETHER % 3]
    with cpu.running(mode):
        (found,) = kernel(
            inputs=inputs, grid=(N, 1, 1), threadgroup=(64, 1, 1), output_shapes=[(N, TOGETHER)],
            output_dtypes=[np.float32],
        )  # fmt: skip
    for k, seed in enumerate(seeds):
        expected, row = np.empty(N, np.float32), found[:, k]
        pointers = [v.ctypes.data_as(ctypes.c_void_p) for v in (*inputs, expected)]
        getattr(clang, f"run{seed}")(*pointers, ctypes.c_long(N))
        same = (row == expected) | (np.isnan(row) & np.isnan(expected))
        assert same.all(), f"{mode}: {(~same).sum()} of {N} elements\n{texts[k]}"


# -- what keeps its text ---------------------------------------------------------------------------


def test_integers_pointers_and_constants_keep_their_text() -> None:
    source = """
    uint i = thread_position_in_grid.x;
    constexpr float k = 2.0f * 3.0f + 1.0f;
    threadgroup int t[N * 4 + 1];
    const device int* p = a + i * 4 + 1;
    int s = n[0] * a_shape[0] - 3;
    s += p[i * M + 2] * int(i) + (i << 3) - min(s * 2 + 1, s);
    y[s * 2 + 1] = s + a[(i + M) * 2 + 1];
    t[0] = 2.5f * 3.5f + s * s;
    """
    kernel = ferrule.metal_kernel("whole", ["a", "n"], ["y"], source)
    text = kernel.text(
        inputs=[np.zeros(9, np.int32), np.zeros(1, np.int32)], output_dtypes=[np.int32],
        template=[("N", 3), ("M", 5)],
    )  # fmt: skip
    assert "fr_factor" not in text.split("namespace user")[1]
    assert "fr_bits" not in text.split("namespace user")[1]


def test_analyses_read_indices_of_unknown_type() -> None:
    """An index may be of any type where it is an index: there nothing is to be fused."""
    source = "auto i = thread_position_in_grid.x; auto k = i; y[k * 4 + 1] = x[i * n + k];"
    kernel = ferrule.metal_kernel("indices", ["x", "n"], ["y"], source)
    given = [np.zeros(9, np.float32), np.int32(3)]
    assert "x[i * n + k]" in kernel.text(inputs=given, output_dtypes=[np.float32])


# -- shifts ----------------------------------------------------------------------------------------

COUNTS = np.arange(-130, N - 130).astype(np.int32)
WIDTHS = {"char": 8, "uchar": 8, "short": 16, "ushort": 16, "int": 32, "uint": 32,
          "long": 64, "ulong": 64}  # fmt: skip


KINDS = {name: np.dtype(f"{'u' if name[0] == 'u' else 'i'}{w // 8}").type
         for name, w in WIDTHS.items()}  # fmt: skip


@pytest.mark.parametrize("name", WIDTHS)
def test_shift_counts_are_taken_modulo_the_width(name: str, everywhere: str) -> None:
    kind = KINDS[name]
    rng = np.random.default_rng(7)
    value = rng.integers(0, 1 << 62, N).astype(kind)
    wide = np.int32 if WIDTHS[name] < 32 else kind
    # A scalar is promoted first; a vector's elements are not.
    scalar = (COUNTS % (32 if WIDTHS[name] < 32 else WIDTHS[name])).astype(wide)
    element = (COUNTS % WIDTHS[name]).astype(kind)
    inner = kind if WIDTHS[name] >= 32 else wide
    expected = {
        "a[i] << n": (value.astype(wide) << scalar).astype(kind),
        "a[i] >> n": (value.astype(wide) >> scalar).astype(kind),
        "shifted(a[i], n)": (value.astype(wide) >> scalar).astype(kind),
        f"({name}2(a[i]) << {name}2({name}(n))).y": (
            value.astype(inner) << element.astype(inner)
        ).astype(kind),
        f"({name}3(a[i]) >> {name}3({name}(n))).z": (
            value.astype(inner) >> element.astype(inner)
        ).astype(kind),
        "a[i] << 33": (value.astype(wide) << wide(33 % (8 * np.dtype(wide).itemsize))).astype(kind),
    }
    header = f"inline {name} shifted({name} v, int n) {{ v >>= n; return v; }}\n"
    texts = [f"int n = b[i]; out = {name}({text});" for text in expected]
    for mode in ways(everywhere):
        with cpu.running(mode):
            rows = run(texts, [value, COUNTS], header, kind=name, dtype=kind)
        for row, (text, result) in zip(rows, expected.items(), strict=True):
            assert (row == result).all(), (mode, text, np.flatnonzero(row != result)[:5])


# -- what else C++ leaves undefined ----------------------------------------------------------------


def wrapped(value: Array, kind: type) -> Array:
    """Integers of any size as they fit into a type, and then into 64 bits."""
    bits = 8 * np.dtype(kind).itemsize
    low = np.array([int(v) & ((1 << bits) - 1) for v in value], np.uint64)
    return low.astype(f"u{bits // 8}").view(kind).astype(np.int64).view(np.uint64)


def test_integers_at_their_limits(everywhere: str) -> None:
    """Where C++ has no answer, and processors have one: sums and products that do not fit, the
    least integer without its sign, counts of what is zero, rotations by any count."""
    rng = np.random.default_rng(3)
    least = [0, 1, -1, 31, 32, 33, -32, 63, 64, 127, -128, 2**15, -(2**15), 2**31 - 1, -(2**31)]
    first = np.resize(np.array(least, np.int64), N)
    second = rng.permutation(np.where(rng.random(N) < 0.5, first, rng.integers(-(2**31), 2**31, N)))
    a, b = (v.astype(np.int32) for v in (first, second))
    texts, expected = [], []
    for name, bits in WIDTHS.items():
        kind = KINDS[name]
        p, q = (v.astype(kind).astype(object) for v in (a, b))
        unsigned = [int(v) & ((1 << bits) - 1) for v in p]
        counts = [int(v) % bits for v in q]
        results = {
            "p + q": p + q, "p - q": p - q, "p * q": p * q, "-p": -p, "metal::abs(p)": abs(p),
            "metal::clz(p)": [bits - v.bit_length() for v in unsigned],
            "metal::ctz(p)": [(v & -v).bit_length() - 1 if v else bits for v in unsigned],
            "metal::rotate(p, q)": [
                (v << n) | (v >> (bits - n)) for v, n in zip(unsigned, counts, strict=True)
            ],
            f"metal::rotate({name}2(p), {name}2(q)).y": [
                (v << n) | (v >> (bits - n)) for v, n in zip(unsigned, counts, strict=True)
            ],
            "metal::mulhi(p, q)": (p * q) >> bits,
        }  # fmt: skip
        for text, result in results.items():
            texts.append(f"{name} p = {name}(a[i]), q = {name}(b[i]); out = ({name})({text});")
            expected.append(wrapped(np.array(result, object), kind))
    for mode in ways(everywhere):
        with cpu.running(mode):
            rows = run(texts, [a, b], kind="ulong", dtype=np.uint64)
        for row, text, result in zip(rows, texts, expected, strict=True):
            wrong = np.flatnonzero(row != result)
            assert not len(wrong), (mode, text, a[wrong[:3]], b[wrong[:3]], row[wrong[:3]])


def test_floats_out_of_an_integers_range(everywhere: str) -> None:
    """Metal has no answer, and processors have several: here all ways have the same one."""
    rng = np.random.default_rng(4)
    edges = [0.5, -0.5, 127, 128, -129, 256, 65536, -32769, 2.0**31, -(2.0**31), 2.0**32, 2.0**63]
    given = np.array([*edges, -1, 2.0**64, -(2.0**63), -1e20, np.inf, -np.inf, np.nan], np.float32)
    more = (rng.standard_normal(N) * 10.0 ** rng.uniform(-3, 20, N)).astype(np.float32)
    more[: len(given)] = given
    texts = [
        text
        for name in WIDTHS
        for text in (
            f"out = ({name})a[i];", f"{name} v = a[i]; out = v;", f"out = {name}(half(a[i]));",
            f"out = {name}4(float4(a[i]))[i & 3];",
        )
    ]  # fmt: skip
    found = []
    for mode in ways(everywhere):
        with cpu.running(mode):
            found.append(run(texts, [more], kind="ulong", dtype=np.uint64))
    for text, *rows in zip(texts, *found, strict=True):
        assert all((row == rows[0]).all() for row in rows), text


def test_a_pragma_in_the_headers_last_function(everywhere: str) -> None:
    header = "inline float f(float x, float y) {\n#pragma METAL fp contract(off)\nreturn x * y; }"
    for end in ("", "\n", "\n\n"):
        (found,) = run([SUM], numbers(), header + end)
        assert (found == ONCE).all()
