"""Scalar types: sizes, literals, conversions, promotions, and arithmetic of half and bfloat."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from metal_harness import FLOATS, INTS, KINDS, Slots, bfloat16

pytestmark = pytest.mark.optimised

f32 = np.float32
f16 = np.float16

SIZES = {
    "bool": 1, "char": 1, "uchar": 1, "short": 2, "ushort": 2, "int": 4, "uint": 4, "long": 8,
    "ulong": 8, "half": 2, "bfloat": 2, "float": 4,
}  # fmt: skip
STANDARD_NAMES = {
    "int8_t": 1, "uint8_t": 1, "int16_t": 2, "uint16_t": 2, "int32_t": 4, "uint32_t": 4,
    "int64_t": 8, "uint64_t": 8, "size_t": 8, "ptrdiff_t": 8, "float16_t": 2, "bfloat16_t": 2,
    "complex64_t": 8, "unsigned char": 1, "signed char": 1, "unsigned short": 2, "unsigned": 4,
    "unsigned int": 4, "unsigned long": 8, "atomic_int": 4, "atomic_uint": 4,
    "atomic<float>": 4,
}  # fmt: skip


def test_sizes_and_alignments() -> None:
    s = Slots()
    for name, size in [*SIZES.items(), *STANDARD_NAMES.items()]:
        s.expr("ulong", f"sizeof({name})", size)
    for name, size in SIZES.items():
        for count in (2, 3, 4):
            whole = size * (4 if count == 3 else count)
            s.expr("ulong", f"sizeof({name}{count})", whole)
            s.expr("ulong", f"sizeof(vec<{name}, {count}>)", whole)
            if name != "bool":
                s.expr("ulong", f"sizeof(packed_{name}{count})", size * count)
                s.expr("ulong", f"alignof(packed_{name}{count})", size)
    s.stmt("ulong", "struct B { float a; packed_float3 b; float c; }; OUT = sizeof(B);", 20)
    s.stmt("ulong", "struct C { half a; float b; uchar c; }; OUT = sizeof(C);", 12)
    s.check()


def test_vectors_have_the_alignment_of_their_size_in_structs() -> None:
    s = Slots()
    for name in ("uchar", "half", "bfloat", "int", "float", "ulong"):
        for count in (2, 3, 4):
            whole = SIZES[name] * (4 if count == 3 else count)
            text = f"struct S {{ char a; {name}{count} b; char c; }}; OUT = sizeof(S);"
            s.stmt("ulong", text, 3 * whole)
    s.stmt("ulong", "struct S { float a; float3 b; float c; }; OUT = sizeof(S);", 48)
    s.stmt("ulong", "struct S { half a, b; half2 c; uint4 d; }; OUT = sizeof(S);", 32)
    s.check()


def test_a_struct_read_from_bytes_has_the_layout_of_metal() -> None:
    raw = np.zeros(2, np.dtype({"names": ["a", "b", "c"], "formats": ["<f4", ("<f4", 3), "<i4"],
                                "offsets": [0, 16, 32], "itemsize": 48}))  # fmt: skip
    raw["a"], raw["b"], raw["c"] = [1, 2], [[3, 4, 5], [6, 7, 8]], [-9, -10]
    s = Slots(
        n=2,
        inputs={"bytes": np.frombuffer(raw.tobytes(), np.uint8)},
        header="struct P { float a; float3 b; int c; };",
        prologue="const device P* p = (const device P*)bytes;",
    )
    s.expr("float", "p[i].a", raw["a"])
    s.expr("float", "p[i].b.x", raw["b"][:, 0])
    s.expr("float", "p[i].b.z", raw["b"][:, 2])
    s.expr("int", "p[i].c", raw["c"])
    s.check()


def test_literals() -> None:
    x = np.linspace(0.1, 7, 64, dtype=f32)
    s = Slots(
        n=64,
        inputs={"x": x},
        header="#define TENTH 0.1\n#define HALF_TENTH 0.1h\nconstant float TABLE[3] = {0.1, .2,"
        " 3.};",
        prologue="float v = x[i];",
    )
    for text, size in [
        ("1.0", 4), ("1.", 4), (".5", 4), ("1e3", 4), ("1.5e-3", 4), ("1.0f", 4), ("1.0F", 4),
        ("1.0h", 2), ("1.0H", 2), ("1.0bf", 2), ("1.0BF", 2), ("0x1p-3", 4), ("1", 4), ("1u", 4),
        ("1L", 8), ("1ul", 8), ("1UL", 8), ("1l", 8), ("'a'", 1), ("true", 1), ("TENTH", 4),
        ("HALF_TENTH", 2), ("1.0 + 1.0", 4), ("1 / 2.0", 4), ("1.0f * 2.0", 4), ("1.0h * 2", 2),
    ]:  # fmt: skip
        s.expr("ulong", f"sizeof({text})", size)
    # A literal without a suffix is a float: never does the arithmetic happen in double.
    s.expr("float", "v * 0.1", x * f32(0.1))
    s.expr("float", "0.1 * v", x * f32(0.1))
    s.expr("float", "v / 0.3", x / f32(0.3))
    s.expr("float", "v + TENTH", x + f32(0.1))
    s.expr("float", "1.0 / 3.0", f32(1) / f32(3))
    s.expr("float", "v - 1.0e-1", x - f32(0.1))
    s.expr("float", "v * .7", x * f32(0.7))
    s.stmt(
        "float", "constexpr auto k = 0.1; OUT = k * v; static_assert(sizeof(k) == 4);", x * f32(0.1)
    )
    s.stmt("float", "const float k[] = {0.1, 0.2}; OUT = k[1] * v;", x * f32(0.2))
    s.expr("float", "TABLE[0] + TABLE[1]", f32(0.1) + f32(0.2))
    s.expr("float", "TABLE[2]", 3)
    s.expr("bool", "0.1 == 0.1f", True)
    s.expr("bool", "v > 0.1", x > f32(0.1))
    s.stmt("float", "float t = v; t *= 0.1; OUT = t;", x * f32(0.1))
    # Overloads see a float, too.
    s.expr("float", "max(v, 0.3)", np.maximum(x, f32(0.3)))
    s.expr("float", "metal::min(0.3, v)", np.minimum(x, f32(0.3)))
    s.expr("float", "clamp(v, 0.5, 1.5)", np.clip(x, f32(0.5), f32(1.5)))
    s.expr("float", "sqrt(4.0)", 2)
    s.expr("float", "fma(v, 2.0, 1.0)", (x.astype(np.float64) * 2 + 1).astype(f32))
    s.expr("float", "select(0.0, 1.0, v > 2)", (x > 2).astype(f32))
    s.expr("half", "0.1h", f16(0.1))
    s.expr("half", "1e-7h", f16(1e-7))
    s.expr("half", "65504.0h", f16(65504))
    s.expr("half", "half(0.1)", f16(0.1))
    s.expr("half", "HALF_TENTH + 1.5H", f16(0.1) + f16(1.5))
    s.expr("half", "-.5h", f16(-0.5))
    s.expr("half", "true?1.5h:2h", f16(1.5))
    s.expr("float", "float(false?1.5bf:2bf)", 2)
    s.expr("bfloat", "0.1bf", 0.1)
    s.expr("bfloat", "3.0BF", 3)
    s.expr("bfloat", "bfloat(0.1f)", 0.1)
    s.expr("bfloat", "-1e30bf", -1e30)
    s.expr("int", "1'000'000", 1000000)
    s.expr("int", "0b1011", 11)
    s.expr("int", "077", 63)
    s.expr("int", "'A'", 65)
    s.expr("uint", "0xFFu", 255)
    s.expr("uint", "4294967295u", 4294967295)
    s.expr("uint", "0xdeadbeef", 0xDEADBEEF)
    s.expr("ulong", "18446744073709551615ul", 2**64 - 1)
    s.expr("long", "-9223372036854775807L - 1", -(2**63))
    s.expr("float", "1e10f", 1e10)
    s.expr("float", "0x1.8p1f", 3)
    s.expr("float", "0x1p-2", 0.25)
    s.check()


def test_constants_of_the_library() -> None:
    s = Slots()
    finite: dict[str, dict[str, Any]] = {
        "float": {
            "INFINITY": np.inf, "-INFINITY": -np.inf, "NAN": np.nan, "HUGE_VALF": np.inf,
            "MAXFLOAT": np.finfo(f32).max, "FLT_MAX": np.finfo(f32).max,
            "FLT_MIN": np.finfo(f32).tiny, "FLT_EPSILON": np.finfo(f32).eps,
            "M_PI_F": np.pi, "M_E_F": np.e, "M_PI_2_F": np.pi / 2, "M_PI_4_F": np.pi / 4,
            "M_1_PI_F": 1 / np.pi, "M_2_PI_F": 2 / np.pi, "M_2_SQRTPI_F": 2 / np.sqrt(np.pi),
            "M_SQRT2_F": np.sqrt(2), "M_SQRT1_2_F": np.sqrt(0.5), "M_LN2_F": np.log(2),
            "M_LN10_F": np.log(10), "M_LOG2E_F": np.log2(np.e), "M_LOG10E_F": np.log10(np.e),
        },
        "half": {
            "HALF_MAX": 65504, "HALF_MIN": 2.0**-14, "HALF_EPSILON": 2.0**-10, "M_PI_H": np.pi,
            "M_E_H": np.e, "M_SQRT2_H": np.sqrt(2), "M_LN2_H": np.log(2), "HUGE_VALH": np.inf,
        },
        "int": {
            "INT_MAX": 2**31 - 1, "INT_MIN": -(2**31), "CHAR_BIT": 8, "SCHAR_MAX": 127,
            "SCHAR_MIN": -128, "CHAR_MAX": 127, "CHAR_MIN": -128, "UCHAR_MAX": 255,
            "SHRT_MAX": 32767, "SHRT_MIN": -32768, "USHRT_MAX": 65535, "FLT_DIG": 6,
            "FLT_MANT_DIG": 24, "FLT_MAX_EXP": 128, "FLT_MIN_EXP": -125, "FLT_RADIX": 2,
            "HALF_MANT_DIG": 11,
        },
        "uint": {"UINT_MAX": 2**32 - 1},
        "long": {"LONG_MAX": 2**63 - 1, "LONG_MIN": -(2**63)},
        "ulong": {"ULONG_MAX": 2**64 - 1},
    }  # fmt: skip
    for kind, table in finite.items():
        for name, value in table.items():
            s.expr(kind, name, np.array(value, KINDS[kind]))
    for kind in INTS:
        info = np.iinfo(KINDS[kind])
        s.expr(kind, f"numeric_limits<{kind}>::max()", np.array(info.max, KINDS[kind]))
        s.expr(kind, f"metal::numeric_limits<{kind}>::min()", np.array(info.min, KINDS[kind]))
        s.expr(kind, f"numeric_limits<{kind}>::lowest()", np.array(info.min, KINDS[kind]))
        s.expr("int", f"numeric_limits<{kind}>::digits", info.bits - (info.min < 0))
        s.expr("bool", f"numeric_limits<{kind}>::is_signed", info.min < 0)
        s.expr("bool", f"numeric_limits<{kind}>::is_integer", True)
    limits = {
        "float": (np.finfo(f32).max, np.finfo(f32).tiny, np.finfo(f32).eps, 24),
        "half": (65504, 2.0**-14, 2.0**-10, 11),
        "bfloat": ((2 - 2.0**-7) * 2.0**127, 2.0**-126, 2.0**-7, 8),
    }
    for kind, (most, least, eps, digits) in limits.items():
        s.expr(kind, f"numeric_limits<{kind}>::max()", most)
        s.expr(kind, f"numeric_limits<{kind}>::lowest()", -most)
        s.expr(kind, f"numeric_limits<{kind}>::min()", least)
        s.expr(kind, f"numeric_limits<{kind}>::epsilon()", eps)
        s.expr(kind, f"numeric_limits<{kind}>::infinity()", np.inf)
        s.expr(kind, f"-metal::numeric_limits<{kind}>::infinity()", -np.inf)
        s.expr(kind, f"numeric_limits<{kind}>::quiet_NaN()", np.nan)
        s.expr("int", f"numeric_limits<{kind}>::digits", digits)
    s.check()


def small_values(kind: str) -> Any:
    """0..63, which every type but bool holds exactly; negative numbers have their own test."""
    values = np.arange(64)
    return (values % 2).astype(bool) if kind == "bool" else values.astype(KINDS[kind])


def test_every_type_converts_to_every_other() -> None:
    inputs = {f"v_{kind}": small_values(kind) for kind in KINDS}
    s = Slots(n=64, inputs=inputs)
    for source in KINDS:
        for target in KINDS:
            want = inputs[f"v_{source}"].astype(f32)
            want = (want != 0) if target == "bool" else want.astype(KINDS[target])
            s.expr(target, f"{target}(v_{source}[i])", want)
            s.expr(target, f"({target})v_{source}[i]", want)
            s.expr(target, f"static_cast<{target}>(v_{source}[i])", want)
    s.check()


def test_implicit_conversions() -> None:
    inputs = {f"v_{kind}": small_values(kind) for kind in KINDS}
    s = Slots(
        n=64,
        inputs=inputs,
        header="float widen(float v) { return v; }\nint whole(int v) { return v; }\n"
        "template <typename T> T same(T v) { return v; }",
    )
    for source in KINDS:
        want = inputs[f"v_{source}"].astype(f32)
        s.stmt("float", f"float t = v_{source}[i]; OUT = t;", want)
        s.expr("float", f"v_{source}[i]", want)
        s.expr("float", f"widen(v_{source}[i])", want)
        s.expr("float", f"same<float>(v_{source}[i])", want)
        s.stmt("float", f"float t = 0; t += v_{source}[i]; OUT = t;", want)
        s.stmt("float", f"float t[2] = {{1.0f, float(v_{source}[i])}}; OUT = t[1];", want)
        if source not in ("bfloat",):
            s.expr("int", f"whole(v_{source}[i])", want.astype(np.int32))
            s.stmt("int", f"int t; t = v_{source}[i]; OUT = t;", want.astype(np.int32))
            s.stmt("half", f"half t = v_{source}[i]; OUT = t;", want.astype(f16))
        s.stmt("bool", f"OUT = v_{source}[i] ? true : false;", want != 0)
        s.stmt("bool", f"OUT = !v_{source}[i];", want == 0)
        s.stmt("bool", f"if (v_{source}[i]) OUT = true; else OUT = false;", want != 0)
        s.stmt("bool", f"OUT = v_{source}[i] && true;", want != 0)
        s.stmt("bool", f"OUT = false || v_{source}[i];", want != 0)
    s.check()


def test_narrowing_of_integers_wraps_and_signs_extend() -> None:
    wide = np.array(
        [0, 1, -1, 127, 128, 200, 255, 256, -129, 32767, 32768, 65535, 65536, 2**31 - 1, 2**31,
         2**32 - 1, 2**32, -(2**31) - 1, 2**63 - 1, -(2**63), 0x123456789ABCDEF0 - 2**63],
        np.int64,
    )  # fmt: skip
    s = Slots(n=wide.size, inputs={"v": wide})
    for kind in INTS:
        want = wide.astype(KINDS[kind])
        s.expr(kind, f"{kind}(v[i])", want)
        s.stmt(kind, f"{kind} t = v[i]; OUT = t;", want)
        s.expr("long", f"long({kind}(v[i]))", want.astype(np.int64))
        s.expr("ulong", f"ulong({kind}(v[i]))", want.astype(np.uint64))
        s.expr("int", f"int({kind}(v[i]))", want.astype(np.int32))
        s.expr("bool", f"bool({kind}(v[i]))", want != 0)
    s.check()


def test_floats_to_integers_round_towards_zero() -> None:
    values = np.array([0.0, 0.5, 0.99, 1.0, 1.5, 2.5, 99.9, 126.999, -0.5, -0.99, -1.5, -99.9], f32)
    s = Slots(n=values.size, inputs={"v": values})
    for kind in INTS:
        usable = values if kind[0] != "u" else np.abs(values)
        text = "v[i]" if kind[0] != "u" else "fabs(v[i])"
        s.expr(kind, f"{kind}({text})", np.trunc(usable).astype(KINDS[kind]))
        s.expr(kind, f"{kind}(half({text}))", np.trunc(usable.astype(f16)).astype(KINDS[kind]))
        brain = usable.astype(bfloat16).astype(f32)
        s.expr(kind, f"{kind}(bfloat({text}))", np.trunc(brain).astype(KINDS[kind]))
    large = {"long": 2.0**62, "ulong": 2.0**63, "int": -(2.0**31), "uint": 4294967040.0}
    for kind, value in large.items():
        s.expr(kind, f"{kind}({value}f + 0.0f * v[0])", np.array(int(value), KINDS[kind]))
    s.check()


def test_integers_to_floats_round_to_nearest_even() -> None:
    wide = np.array(
        [0, 1, -1, 2048, 2049, 2050, 2051, 4098, 65503, 65519, 16777216, 16777217, 16777219,
         -16777217, 2**31 - 1, 2**40 + 1, 2**53 + 1, 2**62 + 2**38, 2**62 + 2**38 + 1,
         2**63 - 1, -(2**63), -2049, 33554435],
        np.int64,
    )  # fmt: skip
    s = Slots(n=wide.size, inputs={"v": wide})
    small = (wide < 65520) & (wide > -65520)
    s.expr("float", "float(v[i])", wide.astype(f32))
    s.expr("float", "float(int(v[i]))", wide.astype(np.int32).astype(f32))
    s.expr("float", "float(uint(v[i]))", wide.astype(np.uint32).astype(f32))
    s.expr("float", "float(ulong(v[i]))", wide.astype(np.uint64).astype(f32))
    kept = np.where(small, wide, 0)
    s.prologue = "long t = v[i] < 65520 && v[i] > -65520 ? v[i] : 0;"
    for kind in ("long", "int"):
        s.expr("half", f"half({kind}(t))", kept.astype(f32).astype(f16))
        s.expr("bfloat", f"bfloat({kind}(t))", kept.astype(f32))
    s.expr("half", "half(int(100000 + i))", np.inf)
    s.check()


def edge_floats() -> Any:
    """Ties, overflow, subnormal results, infinities and NaN of float to half and bfloat."""
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**32, 3000, dtype=np.uint32)
    halves = np.arange(0, 0x7C00, 37, dtype=np.uint16).view(f16).astype(np.float64)
    following = np.arange(1, 0x7C01, 37, dtype=np.uint16).view(f16).astype(np.float64)
    ties = ((halves + following) / 2)[np.isfinite(following)].astype(f32)
    near = np.concatenate([np.nextafter(ties, f32(np.inf)), np.nextafter(ties, f32(0))])
    brains = (np.arange(0, 0x7F80, 61, dtype=np.uint32) << 16) + 0x8000
    others = np.array([np.inf, -np.inf, np.nan, 65519.996, 65520, -65520, 3.4e38, 0.0, -0.0], f32)
    around = [brains, brains + 1, brains - 1, brains | 0x80000000]
    return np.concatenate(
        [
            bits.view(f32),
            ties,
            -ties,
            near,
            *[b.astype(np.uint32).view(f32) for b in around],
            others,
        ]
    )


def test_float_to_half_and_bfloat_round_to_nearest_even() -> None:
    x = edge_floats()
    x = np.where(np.abs(x) < np.finfo(f32).tiny, f32(0), x)  # subnormal floats may be flushed
    s = Slots(n=x.size, inputs={"x": x})
    with np.errstate(over="ignore", invalid="ignore"):
        s.expr("half", "half(x[i])", x.astype(f16))
        s.stmt("half", "half h = x[i]; OUT = h;", x.astype(f16))
        s.expr("half", "static_cast<half>(x[i])", x.astype(f16))
        s.expr("half", "half2(x[i], 0).x", x.astype(f16))
        s.expr("half", "half4(float4(x[i])).w", x.astype(f16))
        s.expr("bfloat", "bfloat(x[i])", x.astype(bfloat16))
        s.expr("bfloat", "static_cast<bfloat16_t>(x[i])", x.astype(bfloat16))
        s.expr("bfloat", "bfloat4(float4(x[i])).z", x.astype(bfloat16))
    s.expr("bool", "bool(x[i])", x != 0)
    s.check()


@pytest.mark.parametrize("kind", ["half", "bfloat"])
def test_all_16_bit_floats_widen_exactly(kind: str) -> None:
    v = np.arange(65536, dtype=np.uint16).view(KINDS[kind])
    subnormal = (np.abs(v.astype(np.float64)) < 2.0**-126) & (v != 0)
    v = np.where(subnormal, np.zeros((), v.dtype), v)  # where a float may flush
    wide = v.astype(f32)
    s = Slots(n=v.size, inputs={"v": v})
    s.expr("float", "float(v[i])", wide)
    s.expr("float", "v[i]", wide)
    s.expr("float", "v[i] * 1.0f", wide)
    s.expr(kind, f"{kind}(float(v[i]))", v)
    s.expr("ushort", "as_type<ushort>(v[i])", v.view(np.uint16))
    s.expr(kind, f"as_type<{kind}>(as_type<ushort>(v[i]))", v)
    s.expr(kind, "-v[i]", -v)
    s.expr("bool", "v[i] == v[i]", wide == wide)
    s.expr("bool", "isnan(v[i])", np.isnan(wide))
    s.expr("bool", "isinf(v[i])", np.isinf(wide))
    s.expr("bool", "isfinite(v[i])", np.isfinite(wide))
    s.expr("bool", "signbit(v[i])", np.signbit(wide))
    s.check()


def test_promotions_of_integers() -> None:
    s = Slots(
        prologue="uchar a = 200, b = 100; char c = 200; short d = 30000, e = -2;"
        " ushort f = 65535; uint u = 0; int m = -7; long w = -1;"
    )
    s.expr("int", "a + b", 300)
    s.expr("int", "b - a", -100)
    s.expr("int", "a * b", 20000)
    s.expr("int", "d * 2", 60000)
    s.expr("int", "d + d", 60000)
    s.expr("int", "~a", -201)
    s.expr("uchar", "~a", 55)
    s.expr("uchar", "a + b", 44)
    s.expr("int", "c", -56)
    s.expr("int", "c + 1", -55)
    s.expr("int", "a << 4", 3200)
    s.expr("int", "-8 >> 1", -4)
    s.expr("int", "e >> 1", -1)
    s.expr("uint", "uint(-8) >> 28", 15)
    s.expr("uint", "u - 1", 2**32 - 1)
    s.expr("uint", "u - 1u > 0 ? 1 : 0", 1)
    s.expr("bool", "-1 < 1u", False)
    s.expr("bool", "w < 1u", True)
    s.expr("int", "m / 2", -3)
    s.expr("int", "m % 3", -1)
    s.expr("int", "7 % -3", 1)
    s.expr("ulong", "1ul << 40", 2**40)
    s.expr("int", "f * 2", 131070)
    s.expr("uint", "u + m", 2**32 - 7)
    s.expr("ulong", "ulong(u) - 1", 2**64 - 1)
    s.expr("ulong", "ulong(m)", 2**64 - 7)
    s.expr("ulong", "sizeof(a + b)", 4)
    s.expr("ulong", "sizeof(a + w)", 8)
    s.stmt("uchar", "uchar t = 250; t += 10; OUT = t;", 4)
    s.stmt("uchar", "uchar t = 255; t++; OUT = t;", 0)
    s.stmt("char", "char t = 127; ++t; OUT = t;", -128)
    s.stmt("ushort", "ushort t = 0; --t; OUT = t;", 65535)
    s.stmt("uchar", "uchar t = 1; t <<= 9; OUT = t;", 0)
    s.stmt("short", "short t = -1; t >>= 3; OUT = t;", -1)
    s.stmt("uint", "uint t = 3000000000u; t *= 2; OUT = t;", 6000000000 - 2**32)
    s.stmt("uint", "uint t = 0x80000000u; t /= 3; OUT = t;", 0x80000000 // 3)
    s.stmt("int", "int t = -17; t %= 5; OUT = t;", -2)
    s.stmt("int", "bool t = 5; OUT = t + 1;", 2)
    s.stmt("int", "int t = true + true; OUT = t;", 2)
    s.check()


def test_the_types_of_mixed_expressions() -> None:
    s = Slots(
        header="template <typename T, typename U> bool is(U) { return metal::is_same_v<T, U>; }",
        prologue="half h = 1; bfloat b = bfloat(1.0f); float f = 1; int n = 1; uchar c = 1;"
        " bool t = true;",
    )
    for text, kind in [
        ("h + h", "half"), ("h * 2", "half"), ("2 - h", "half"), ("h / c", "half"),
        ("h + f", "float"), ("f * h", "float"), ("h + 1.0", "float"), ("h + 1.0f", "float"),
        ("h + 1.0h", "half"), ("-h", "half"), ("h + t", "half"), ("n + h", "half"),
        ("t ? h : 1.0f", "float"), ("t ? 1.0f : h", "float"), ("t ? h : h", "half"),
        ("t ? h : 0.0h", "half"), ("b + b", "bfloat"), ("b * 2", "bfloat"), ("n - b", "bfloat"),
        ("b + f", "float"), ("f / b", "float"), ("b + 1.0", "float"), ("-b", "bfloat"),
        ("t ? b : 1.0f", "float"), ("t ? b : b", "bfloat"), ("f + n", "float"),
        ("f + 1.0", "float"), ("n + 1u", "uint"), ("c + c", "int"), ("n + 1L", "long"),
        ("h < f", "bool"), ("b == b", "bool"), ("!h", "bool"), ("1ul + n", "ulong"),
        ("b + 1.0bf", "bfloat"), ("half(1) * half(2)", "half"), ("sizeof(h)", "ulong"),
        ("exp(h)", "half"), ("exp(f)", "float"), ("max(h, h)", "half"), ("abs(h)", "half"),
        ("sqrt(b)", "bfloat"), ("half2(1) * 2.0h", "half2"), ("float4(1) + 1", "float4"),
        ("float4(1) < 2.0f", "bool4"), ("uchar4(1) + uchar4(1)", "uchar4"),
        ("int2(1) == int2(1)", "bool2"), ("float3(1).xy", "float2"), ("half4(1).x", "half"),
    ]:  # fmt: skip
        s.expr("bool", f"is<{kind}>({text})", True)
    s.check()


@pytest.mark.parametrize("kind", ["half", "bfloat"])
def test_16_bit_arithmetic_rounds_at_every_step(kind: str) -> None:
    rng = np.random.default_rng(2)
    dtype = KINDS[kind]
    n = 4000
    a = (rng.normal(size=n) * 10.0 ** rng.integers(-2, 3, n)).astype(f32).astype(dtype)
    b = (rng.normal(size=n) * 10.0 ** rng.integers(-2, 3, n)).astype(f32).astype(dtype)
    c = rng.normal(size=n).astype(f32).astype(dtype)
    k = rng.integers(-2000, 2000, n).astype(np.int32)
    f = rng.normal(size=n).astype(f32)
    aw, bw = a.astype(f32), b.astype(f32)
    kd = k.astype(dtype)
    suffix = "h" if kind == "half" else "bf"
    one = np.ones((), dtype)
    s = Slots(
        n=n,
        inputs={"va": a, "vb": b, "vc": c, "vk": k, "vf": f},
        prologue=f"{kind} a = va[i], b = vb[i], c = vc[i]; int k = vk[i]; float f = vf[i];",
        header="template <typename T> T plus(T x, T y) { return x + y; }",
    )
    e = s.expr
    e(kind, "a + b", a + b)
    e(kind, "a - b", a - b)
    e(kind, "a * b", a * b)
    e(kind, "a / b", a / b)
    e(kind, "va[i] + vb[i]", a + b)
    e(kind, "(a + b) + c", (a + b) + c)
    e(kind, "(a + b) - b", (a + b) - b)
    e(kind, "(a - b) * c", (a - b) * c)
    e(kind, "a / b / c", a / b / c)
    e(kind, "a / b + c", a / b + c)
    e(kind, "a * b * c", a * b * c)
    e(kind, "(a + b) / (a - c)", (a + b) / (a - c))
    e(kind, "-a - b", -a - b)
    e(kind, "+a", a)
    e(kind, "plus(a, b)", a + b)
    # Integers become the 16-bit type before the operation, and the result has it.
    e(kind, "a + k", a + kd)
    e(kind, "k - a", kd - a)
    e(kind, "a * 3", a * np.array(3, dtype))
    e(kind, "a / 3", a / np.array(3, dtype))
    e(kind, "1 / a", one / a)
    e(kind, f"a + 1.0{suffix}", a + one)
    e(kind, f"a * 0.1{suffix}", a * np.array(0.1, f32).astype(dtype))
    # With a float the operation is one of floats.
    e("float", "a + f", aw + f)
    e("float", "f - a", f - aw)
    e("float", "a * 0.1f", aw * f32(0.1))
    e("float", "a * 0.1", aw * f32(0.1))
    e("float", "a / 3.0f", aw / f32(3))
    e("float", "float(a) * b", aw * bw)
    e("float", "f / b", f / bw)
    st = s.stmt
    st(kind, f"{kind} t = a; t += b; OUT = t;", a + b)
    st(kind, f"{kind} t = a; t -= b; OUT = t;", a - b)
    st(kind, f"{kind} t = a; t *= b; OUT = t;", a * b)
    st(kind, f"{kind} t = a; t /= b; OUT = t;", a / b)
    st(kind, f"{kind} t = a; t *= 3; OUT = t;", a * np.array(3, dtype))
    st(kind, f"{kind} t = a; t++; OUT = t;", a + one)
    st(kind, f"{kind} t = a; OUT = t++;", a)
    st(kind, f"{kind} t = a; OUT = --t;", a - one)
    st("float", "float t = f; t += a; OUT = t;", f + aw)
    if kind == "half":
        st(kind, "half t = a; t += f; OUT = t;", (aw + f).astype(dtype))
        st(kind, "half t = a; t *= 0.1f; OUT = t;", (aw * f32(0.1)).astype(dtype))
        st(kind, "half t = a + f; OUT = t;", (aw + f).astype(dtype))
    st(kind, f"{kind} t = {kind}(a + f); OUT = t;", (aw + f).astype(dtype))
    st(kind, f"{kind} t[3] = {{a, b, c}}; OUT = t[0] + t[2];", a + c)
    st(kind, f"{kind} t = 0; for (int j = 0; j < 5; ++j) t += a; OUT = t;", (a + a) + a + a + a)
    st(kind, f"thread {kind}& r = a; {kind} keep = r; OUT = keep + c;", a + c)
    st(kind, f"{kind}2 t = {kind}2(a, b) + {kind}2(c); OUT = t.y;", b + c)
    st(kind, f"{kind}2 t = {kind}2(a, b) * {kind}2(b, c) * {kind}2(c); OUT = t.x;", a * b * c)
    st(kind, f"{kind}4 t = {kind}4(a) / b; OUT = t.w;", a / b)
    for operator, function in [
        ("<", np.less), ("<=", np.less_equal), (">", np.greater), (">=", np.greater_equal),
        ("==", np.equal), ("!=", np.not_equal),
    ]:  # fmt: skip
        e("bool", f"a {operator} b", function(aw, bw))
        e("bool", f"a {operator} f", function(aw, f))
        e("bool", f"f {operator} a", function(f, aw))
        e("bool", f"a {operator} k", function(aw, kd.astype(f32)))
        e("bool", f"a {operator} 0.1f", function(aw, f32(0.1)))
        e("bool", f"a {operator} 0", function(aw, f32(0)))
    s.check()


@pytest.mark.parametrize("kind", ["half", "bfloat"])
def test_16_bit_infinities_and_nans(kind: str) -> None:
    dtype = KINDS[kind]
    big = 60000.0 if kind == "half" else 3e38
    v = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, big, -big, 1.0], f32).astype(dtype)
    a, b = (m.ravel() for m in np.meshgrid(v, v))
    aw, bw = a.astype(f32), b.astype(f32)
    s = Slots(n=64, inputs={"va": a, "vb": b}, prologue=f"{kind} a = va[i], b = vb[i];")
    with np.errstate(all="ignore"):
        s.expr(kind, "a + b", a + b)
        s.expr(kind, "a - b", a - b)
        s.expr(kind, "a * b", a * b)
        s.expr(kind, "a / b", a / b)
        s.expr("bool", "a < b", aw < bw)
        s.expr("bool", "a == b", aw == bw)
        s.expr("bool", "a != b", aw != bw)
        s.expr("bool", "bool(a)", aw != 0)
        s.expr(kind, "max(a, b)", np.fmax(aw, bw) + 0)
        s.expr("float", "fmin(float(a), float(b)) + 0.0f", np.fmin(aw, bw) + 0)
        s.expr(kind, "a == a ? a : b", np.where(aw == aw, aw, bw))
    s.slots[8].text = f"max(a, b) + {kind}(0)"  # which of two zeros is not said
    s.check()


@pytest.mark.parametrize("kind", ["half", "bfloat"])
def test_ternaries_of_16_bit_floats(kind: str) -> None:
    dtype = KINDS[kind]
    a = np.array([0.1, 1.5, -2.25, 2049, 7, 0, -0.1, 3.3], f32).astype(dtype)
    b = a[::-1].copy()
    aw, bw = a.astype(f32), b.astype(f32)
    c = np.arange(8) % 3 == 0
    zero = "0.0h" if kind == "half" else "0.0bf"
    s = Slots(
        n=8,
        inputs={"va": a, "vb": b},
        prologue=f"{kind} a = va[i], b = vb[i]; bool c = i % 3 == 0; float f = 0.1f;",
        header=f"#define PICK(c, x, y) ((c) ? (x) : (y))\n"
        f"inline {kind} pick(bool c, {kind} x) {{ return c ? x : {kind}(0); }}\n"
        "template <typename T> T relu(T x) { return x > T(0) ? x : T(0); }",
    )
    e = s.expr
    e(kind, "c ? a : b", np.where(c, a, b))
    e(kind, f"c ? a : {zero}", np.where(c, aw, 0))
    e("float", "c ? a : 0.1f", np.where(c, aw, f32(0.1)))
    e("float", "c ? 0.1f : a", np.where(c, f32(0.1), aw))
    e("float", "c ? a : 0.1", np.where(c, aw, f32(0.1)))
    e("float", "c ? f : a", np.where(c, f32(0.1), aw))
    e("float", "c ? va[i] : f", np.where(c, aw, f32(0.1)))
    e("float", "c ? a + b : f + 1", np.where(c, (a + b).astype(f32), f32(0.1) + f32(1)))
    e(kind, "c ? a : 1", np.where(c, aw, 1))
    e(kind, "c ? 0 : b", np.where(c, 0, bw))
    e("float", "c ? a : (i > 4 ? f : b)", np.where(c, aw, np.where(np.arange(8) > 4, f32(0.1), bw)))
    e(kind, f"i > 5 ? a : c ? b : {zero}", np.where(np.arange(8) > 5, aw, np.where(c, bw, 0)))
    e("float", "PICK(c, a, f)", np.where(c, aw, f32(0.1)))
    e("float", "1.0f + (c ? a : 0.5f)", f32(1) + np.where(c, aw, f32(0.5)))
    e("float", "max(c ? a : f, 0.0f)", np.maximum(np.where(c, aw, f32(0.1)), 0))
    e(kind, "pick(c, a)", np.where(c, aw, 0))
    e(kind, "relu(a)", np.maximum(aw, 0))
    e("float", "float(c ? a : b)", np.where(c, aw, bw))
    e("float", "c ? float(a) : float(b)", np.where(c, aw, bw))
    e("float", "i < 4 ? va[i] : -1e30f", np.where(np.arange(8) < 4, aw, f32(-1e30)))
    e("float", "i < 4 ? -1e30 : va[i]", np.where(np.arange(8) < 4, f32(-1e30), aw))
    e("float", "c ? a : INFINITY", np.where(c, aw, f32(np.inf)))
    e("int", "int(c ? a : b)", np.trunc(np.where(c, aw, bw)).astype(np.int32))
    e("int", "c ? 1 : 2", np.where(c, 1, 2))
    s.stmt(kind, f"{kind} x = a, y = b; (c ? x : y) += {kind}(1); OUT = x + y;",
           np.where(c, (a + np.ones((), dtype)) + b, a + (b + np.ones((), dtype))))  # fmt: skip
    s.stmt(kind, f"{kind} x; if (c) x = a; else x = b; OUT = x;", np.where(c, a, b))
    s.stmt("float", "float t = 1; t += c ? a : 0.25f; OUT = t;", 1 + np.where(c, aw, f32(0.25)))
    s.stmt(
        "float",
        "auto g = [&](bool q) { return q ? a : f; }; OUT = g(c);",
        np.where(c, aw, f32(0.1)),
    )
    s.check()


def test_float_arithmetic_is_that_of_ieee() -> None:
    rng = np.random.default_rng(3)
    v = np.concatenate(
        [
            rng.normal(size=200).astype(f32) * f32(10) ** rng.integers(-20, 20, 200),
            np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3e38, -3e38, 1, 1e-37], f32),
        ]
    ).astype(f32)
    a, b = (m.ravel() for m in np.meshgrid(v, v[::7]))
    with np.errstate(all="ignore"):
        results = {"+": a + b, "-": a - b, "*": a * b, "/": a / b}
    tiny = np.finfo(f32).tiny
    keep = np.all([(np.abs(r) >= tiny) | (r == 0) | ~np.isfinite(r) for r in results.values()], 0)
    # A result that underflows is left out: a device may flush it.
    keep &= ~((results["*"] == 0) & (a != 0) & (b != 0))
    keep &= ~((results["/"] == 0) & (a != 0) & np.isfinite(b))
    a, b = a[keep], b[keep]
    s = Slots(n=a.size, inputs={"a": a, "b": b})
    for operator, result in results.items():
        s.expr("float", f"a[i] {operator} b[i]", result[keep])
    for operator, function in [
        ("<", np.less), ("<=", np.less_equal), (">", np.greater), (">=", np.greater_equal),
        ("==", np.equal), ("!=", np.not_equal),
    ]:  # fmt: skip
        s.expr("bool", f"a[i] {operator} b[i]", function(a, b))
    s.expr("float", "-a[i]", -a)
    s.expr("float", "a[i] - a[i]", np.where(np.isfinite(a), f32(0), f32(np.nan)))
    s.expr("bool", "a[i] != a[i]", np.isnan(a))
    s.expr("bool", "!(a[i] < b[i])", ~(a < b))
    s.check()


def test_kinds_are_complete() -> None:
    assert set(FLOATS) | set(INTS) | {"bool"} == set(KINDS)
