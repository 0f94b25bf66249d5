"""Vectors: constructors, conversions, operators, swizzles read and written, as_type, packed."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from metal_harness import FLOATS, INTS, KINDS, Array, Slots, bfloat16, run

f32 = np.float32
V4 = np.array([1.5, -2, 3, 40.25], f32)


def put(count: int, value: str = "t") -> str:
    """Statements that store a vector's elements as one number in base 1000: see `told`."""
    letters = "xyzw"[:count]
    return (
        "OUT = "
        + " + ".join(f"{1000**k}L * long({value}.{c})" for k, c in enumerate(letters))
        + ";"
    )


def told(values: Any) -> int:
    """What `put` makes of these elements (integers of fewer than four digits)."""
    return sum(int(v) * 1000**k for k, v in enumerate(np.atleast_1d(values)))


def test_constructors() -> None:
    s = Slots(
        prologue="float a = 1, b = 2; float2 u = float2(3, 4); float3 t3 = float3(5, 6, 7);"
        " float4 q = float4(8, 9, 10, 11); int2 n = int2(12, 13); uchar4 c = uchar4(250, 1, 2, 3);"
    )
    for text, want in [
        ("float2(a, b)", [1, 2]), ("float2(5)", [5, 5]), ("float2(u)", [3, 4]),
        ("float3(a, b, 3)", [1, 2, 3]), ("float3(u, a)", [3, 4, 1]), ("float3(a, u)", [1, 3, 4]),
        ("float3(7)", [7, 7, 7]), ("float3(t3)", [5, 6, 7]),
        ("float4(a, b, a, b)", [1, 2, 1, 2]), ("float4(u, u)", [3, 4, 3, 4]),
        ("float4(u, a, b)", [3, 4, 1, 2]), ("float4(a, u, b)", [1, 3, 4, 2]),
        ("float4(a, b, u)", [1, 2, 3, 4]), ("float4(t3, a)", [5, 6, 7, 1]),
        ("float4(a, t3)", [1, 5, 6, 7]), ("float4(q)", [8, 9, 10, 11]), ("float4(0)", [0] * 4),
        ("float4(c)", [250, 1, 2, 3]), ("float2(n)", [12, 13]), ("int2(u)", [3, 4]),
        ("half4(q)", [8, 9, 10, 11]), ("bfloat4(q)", [8, 9, 10, 11]), ("uint4(c)", [250, 1, 2, 3]),
        ("int4(char4(c))", [-6, 1, 2, 3]), ("long2(n)", [12, 13]), ("ushort3(t3)", [5, 6, 7]),
        ("vec<float, 4>(q)", [8, 9, 10, 11]), ("vec<int, 2>(1, 2)", [1, 2]),
        ("metal::vec<half, 3>(1, 2, 3)", [1, 2, 3]), ("bool4(1, 0, 1, 1)", [1, 0, 1, 1]),
        ("bool2(u)", [1, 1]), ("(float4)2.0f", [2] * 4), ("(float2)(n)", [12, 13]),
        ("static_cast<float4>(c)", [250, 1, 2, 3]), ("float4(1, 2.5h, 3u, true)", [1, 2, 3, 1]),
        ("float4(n, u)", [12, 13, 3, 4]), ("metal::float4(q)", [8, 9, 10, 11]),
        ("float4{1, 2, 3, 4}", [1, 2, 3, 4]), ("int3{a > 0, 2, 3}", [1, 2, 3]),
        ("uint3(1, 2, 3)", [1, 2, 3]), ("float4(q.xy, n.y, t3.z)", [8, 9, 13, 7]),
    ]:  # fmt: skip
        s.stmt("long", f"auto t = {text}; {put(len(want))}", told(want))
    for statement, want in [
        ("float4 t = {1, 2, 3, 4};", [1, 2, 3, 4]), ("float4 t = 5;", [5] * 4),
        ("float2 t = {a, b};", [1, 2]), ("int3 t = 7;", [7] * 3),
        ("half2 t = 1.5h; t *= 2;", [3, 3]),
        ("float3 t{1, 2, 3};", [1, 2, 3]), ("float4 t(u, u);", [3, 4, 3, 4]),
        ("float4 t; t.x = 1; t.y = 2; t.z = 3; t.w = 4;", [1, 2, 3, 4]),
        ("float4 t; t = 3;", [3] * 4), ("float4 t; t = q; t[2] = 1;", [8, 9, 1, 11]),
        ("float2 t = float2(1, 2), k = {3, 4}; t = k;", [3, 4]),
        ("const float3 t = float3(1, 2, 3);", [1, 2, 3]),
        ("constexpr float2 t = float2(1, 2);", [1, 2]),
        ("thread float3& t = t3;", [5, 6, 7]),
        ("float4 m[3] = {}; float4 t = m[1] + 1;", [1] * 4),
        ("float4 m[2] = {{1, 2, 3, 4}, {5, 6, 7, 8}}; float4 t = m[1];", [5, 6, 7, 8]),
        ("struct S { float2 p; int n; }; S z = {float2(1, 2), 3}; float2 t = z.p;", [1, 2]),
        ("struct S { float3 p = float3(4, 5, 6); }; S z; float3 t = z.p;", [4, 5, 6]),
        ("float4 t = true ? q : float4(0);", [8, 9, 10, 11]),
        ("auto f = [](float2 v) { return v.yx; }; float2 t = f(u);", [4, 3]),
    ]:  # fmt: skip
        s.stmt("long", f"{statement} {put(len(want))}", told(want))
    s.check()


def vectors(kind: str, count: int, seed: int, n: int = 40) -> Array:
    rng = np.random.default_rng(seed)
    if kind in FLOATS:
        return (rng.normal(size=(n, count)) * 8).astype(f32).astype(KINDS[kind])
    info = np.iinfo(KINDS[kind])
    return rng.integers(info.min, info.max, (n, count), KINDS[kind], endpoint=True)


def store(kind: str, count: int, text: str, row: int) -> str:
    """Statements that store a vector into elements `row` .. of output ``y``."""
    lines = [f"{{ {kind}{count} t = {text};"]
    lines += [f" y[(i * R + {row}) * {count} + {k}] = t[{k}];" for k in range(count)]
    return "".join(lines) + " }"


OPERATORS = {
    "+": np.add, "-": np.subtract, "*": np.multiply, "&": np.bitwise_and, "|": np.bitwise_or,
    "^": np.bitwise_xor,
}  # fmt: skip


# Each width with types of every size, each type with one width at least.
WIDTHS = [
    ("char", 4), ("uchar", 2), ("short", 3), ("ushort", 4), ("int", 4), ("int", 2), ("uint", 3),
    ("long", 2), ("ulong", 4), ("half", 4), ("half", 2), ("bfloat", 3), ("bfloat", 4),
    ("float", 2), ("float", 3), ("float", 4),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "count"), WIDTHS)
def test_arithmetic_is_that_of_the_elements(kind: str, count: int) -> None:
    dtype = KINDS[kind]
    a, b = vectors(kind, count, 4), vectors(kind, count, 5)
    scalar = np.array(3, dtype)
    cases: list[tuple[str, Any]] = []
    whole = kind not in FLOATS
    for operator, function in OPERATORS.items():
        if operator in "+-*" or whole:
            cases += [
                (f"a {operator} b", function(a, b)),
                (f"a {operator} s", function(a, scalar)),
                (f"s {operator} a", function(scalar, a)),
                (f"t3(a) {operator} 3", function(a, scalar)),
                (f"a {operator}= b", function(a, b)),
                (f"a {operator}= s", function(a, scalar)),
            ]
    if whole:
        bits = dtype.itemsize * 8
        amount = (np.abs(b.astype(np.int64)) % bits).astype(dtype)
        quotient = np.where(b == 0, 1, b).astype(dtype)
        quotient = np.where((quotient == -1) if dtype.kind == "i" else False, 1, quotient).astype(
            dtype
        )

        def divide(x: Array, y: Array) -> tuple[Array, Array]:
            q = [[int(abs(int(m)) // abs(int(n))) * (1 if (m < 0) == (n < 0) else -1)
                  for m, n in zip(r, t, strict=True)] for r, t in zip(x, y,
                  strict=True)]  # fmt: skip
            r = [[int(m) - k * int(n) for m, k, n in zip(z, w, t, strict=True)]
                 for z, w, t in zip(x, q, y, strict=True)]  # fmt: skip
            return np.array(q, object).astype(dtype), np.array(r, object).astype(dtype)

        div, mod = divide(a, quotient)
        cases += [
            ("a / d", div), ("a % d", mod), ("~a", ~a), ("-a", np.negative(a)), ("+a", a),
            ("a << m", a << amount), ("a >> m", a >> amount),
            ("a << 3", a << np.array(3, dtype)), ("a >>= 2", a >> np.array(2, dtype)),
            ("a++ + 0", a), ("++a", a + np.array(1, dtype)), ("a /= d", div),
        ]  # fmt: skip
    else:
        amount = quotient = b
        one = np.array(1, dtype)
        cases += [
            ("a / b", a / b), ("a / s", a / scalar), ("1 / a", one / a), ("-a", -a),
            ("a /= b", a / b), ("(a + b) / (b - 3)", (a + b) / (b - scalar)), ("++a", a + one),
            ("a--", a), ("+a", a),
        ]  # fmt: skip
    body = [
        f"constexpr int R = {len(cases)};",
        "uint i = thread_position_in_grid.x;",
        f"typedef {kind}{count} t3;",
        f"{kind} s = 3;",
    ]
    for row, (text, _) in enumerate(cases):
        body.append("{" + "".join(
            f"{kind}{count} {name}; for (int k = 0; k < {count}; ++k) {name}[k] = v{name}[i *"
            f" {count} + k];"
            for name in "abmd"
        ) + store(kind, count, f"({text})", row) + "}")  # fmt: skip
    out = run(
        "\n".join(body),
        {"va": a, "vb": b, "vm": amount, "vd": quotient},
        {"y": (kind, (len(a), len(cases), count))},
        len(a),
        40,
    )["y"]
    failed = []
    for row, (text, want) in enumerate(cases):
        got = np.ascontiguousarray(out[:, row])
        same = got.view(f"u{dtype.itemsize}") == np.ascontiguousarray(want, dtype).view(
            f"u{dtype.itemsize}"
        )
        if not same.all():
            failed.append((text, got[~same][:3], np.asarray(want, dtype)[~same][:3]))
    assert not failed


def test_comparisons_give_bool_vectors() -> None:
    a = vectors("float", 4, 6)
    b = a.copy()
    b[::2] = vectors("float", 4, 7)[::2]
    b[3, 1] = np.nan
    n = len(a)
    s = Slots(
        n=n,
        inputs={"va": a.ravel(), "vb": b.ravel()},
        prologue="float4 a = float4(va[4*i], va[4*i+1], va[4*i+2], va[4*i+3]);"
        " float4 b = float4(vb[4*i], vb[4*i+1], vb[4*i+2], vb[4*i+3]); half4 h = half4(a);"
        " int4 m = int4(a), k = int4(b.x, b.y, b.z, b.w == b.w ? b.w : 0);",
    )

    def bits(mask: Array) -> Array:
        return np.asarray((mask * [1, 2, 4, 8]).sum(1), np.uint32)

    code = "uint(t.x) + uint(t.y) * 2 + uint(t.z) * 4 + uint(t.w) * 8"
    for operator, function in [
        ("<", np.less), ("<=", np.less_equal), (">", np.greater), (">=", np.greater_equal),
        ("==", np.equal), ("!=", np.not_equal),
    ]:  # fmt: skip
        s.stmt("uint", f"bool4 t = a {operator} b; OUT = {code};", bits(function(a, b)))
        s.stmt("uint", f"bool4 t = a {operator} 0.5f; OUT = {code};", bits(function(a, f32(0.5))))
        s.stmt("uint", f"bool4 t = 1 {operator} a; OUT = {code};", bits(function(1, a)))
        h = a.astype(np.float16)
        s.stmt(
            "uint", f"auto t = h {operator} 0.5h; OUT = {code};", bits(function(h, np.float16(0.5)))
        )
        m = np.trunc(a).astype(int)
        s.stmt("uint", f"auto t = m {operator} 2; OUT = {code};", bits(function(m, 2)))
    positive, big = a > 0, np.abs(a) > 4
    pro = "bool4 p = a > 0.0f, g = abs(a) > 4.0f; "
    for text, want in [
        ("!p", ~positive), ("p && g", positive & big), ("p || g", positive | big),
        ("p & g", positive & big), ("p | g", positive | big), ("p ^ g", positive ^ big),
        ("p == g", positive == big), ("p != g", positive != big), ("!(p && g)", ~(positive & big)),
        ("p && true", positive), ("isnan(b)", np.isnan(b)), ("a != a", np.zeros_like(a, bool)),
    ]:  # fmt: skip
        s.stmt("uint", f"{pro} bool4 t = {text}; OUT = {code};", bits(want))
    s.stmt("bool", f"{pro} OUT = any(p);", positive.any(1))
    s.stmt("bool", f"{pro} OUT = all(p);", positive.all(1))
    s.stmt("bool", f"{pro} OUT = any(a == b);", (a == b).any(1))
    s.stmt("bool", f"{pro} OUT = metal::all(a.xy == b.xy);", (a == b)[:, :2].all(1))
    s.stmt("float", f"{pro} OUT = float4(p).x + float4(p).w;", positive[:, [0, 3]].sum(1))
    s.stmt("int", f"{pro} int4 t = int4(p); OUT = t.x + t.y + t.z + t.w;", positive.sum(1))
    s.stmt("float", f"{pro} float4 t = select(a, b, p); OUT = t.z;", np.where(positive, b, a)[:, 2])
    s.stmt(
        "float", f"{pro} OUT = select(a, float4(1.0f), g).y;", np.where(big, 1, a)[:, 1].astype(f32)
    )
    s.check()


def test_vector_and_scalar_of_another_type() -> None:
    """The scalar becomes the type of the vector's elements before the operation."""
    s = Slots(
        prologue="uchar4 c = uchar4(200, 100, 5, 255); half4 h = half4(3); int4 n = int4(7, -7,"
        " 8, 9);"
        " float4 f = float4(0.1f, 1, 2, 3); half g = 0.1h;"
    )
    s.stmt("uchar", "uchar4 t = c + 100; OUT = t.x;", 44)
    s.stmt("uchar", "auto t = c + uchar(100); OUT = t.y;", 200)
    s.stmt("uchar", "auto t = c + c; OUT = t.x;", 144)
    s.expr("ulong", "sizeof(c + 1)", 4)
    s.expr("ulong", "sizeof(h * 2.0f)", 8)
    s.expr("ulong", "sizeof(f + 1)", 16)
    k = np.float16(1.00048923)
    s.stmt("half", "half4 t = h * 1.00048923f; OUT = t.w;", np.float16(3) * k)
    s.stmt("half", "auto t = h * 0.1; OUT = t.x;", np.float16(3) * np.float16(0.1))
    s.stmt("half", "half4 t = h; t *= 0.1f; OUT = t.x;", np.float16(3) * np.float16(0.1))
    s.stmt("float", "auto t = f * g; OUT = t.x;", f32(0.1) * f32(np.float16(0.1)))
    s.stmt("float", "auto t = f * 2; OUT = t.y;", 2)
    s.stmt("float", "auto t = 2u * f; OUT = t.w;", 6)
    s.stmt("int", "auto t = n / 2; OUT = t.y;", -3)
    s.stmt("int", "int4 t = n; t %= 4; OUT = t.y;", -3)
    s.stmt("uint", "uint4 t = uint4(1, 2, 3, 4); t = t - 2; OUT = t.x;", 2**32 - 1)
    s.stmt("uint", "uint4 t = 1u << uint4(0, 1, 2, 31); OUT = t.w;", 2**31)
    s.stmt("bfloat", "bfloat4 t = bfloat4(3.0f); t = t * 0.1f; OUT = t.x;",
           np.array(3, bfloat16) * np.array(0.1, bfloat16))  # fmt: skip
    s.check()


LETTERS = {"xyzw": (0, 1, 2, 3), "rgba": (0, 1, 2, 3)}


def test_swizzles_are_read() -> None:
    s = Slots(
        prologue="int4 v = int4(1, 20, 300, 999); int3 w = int3(4, 50, 600); int2 u = int2(7, 80);"
    )
    v, w, u = [1, 20, 300, 999], [4, 50, 600], [7, 80]
    for count in (2, 3, 4):
        everything = list(itertools.product(range(4), repeat=count))
        picked = everything if count == 2 else everything[:: {3: 5, 4: 17}[count]]
        for places in picked:
            for alphabet in ("xyzw", "rgba"):
                text = "".join(alphabet[p] for p in places)
                s.stmt("long", f"auto t = v.{text}; {put(count)}", told([v[p] for p in places]))
    for places in itertools.product(range(3), repeat=3):
        text = "".join("xyz"[p] for p in places)
        s.stmt("long", f"int3 t = w.{text}; {put(3)}", told([w[p] for p in places]))
    for places in itertools.product(range(2), repeat=4):
        text = "".join("xy"[p] for p in places)
        s.stmt("long", f"int4 t = u.{text}; {put(4)}", told([u[p] for p in places]))
    for text, want in [
        ("v.lo", v[:2]), ("v.hi", v[2:]), ("v.even", v[::2]), ("v.odd", v[1::2]),
        ("v.wzyx.xy", [999, 300]), ("v.xyz.zy", [300, 20]), ("(v + 0).yx", [20, 1]),
        ("int4(u, u).yz", [80, 7]), ("v.lo.yx", [20, 1]), ("v.hi.yy", [999, 999]),
        ("u.xy + v.zw", [307, 1079]), ("min(v, 50).zw", [50, 50]), ("(u * 2).yx", [160, 14]),
        ("-w.zy", [-600, -50]), ("v.xy * u.yx", [80, 140]),
        ("select(v, w.xyzz, v > 50).zw", [600, 600]),
    ]:  # fmt: skip
        s.stmt("long", f"auto t = {text}; {put(len(want))}", told(want))
    s.expr("int", "v.r", 1)
    s.expr("int", "v.a", 999)
    s.expr("int", "w.b", 600)
    s.expr("int", "u.lo", 7)
    s.expr("int", "u.hi", 80)
    s.expr("int", "u.even + u.odd", 87)
    s.expr("int", "v.xy[1]", 20)
    s.expr("int", "v.zyx.x", 300)
    s.check()


def test_swizzles_are_written() -> None:
    s = Slots(
        header="struct Body { float3 at; int4 n[2]; };\n"
        "#define SWAP(v) v.xy = v.yx\n"
        "inline void turn(thread int4& v) { v.wzyx = v; }\n"
        "inline void shift(thread int4* v) { v->xyz = v->yzw; }\n"
        "template <typename T> void spread(thread T& v) { v.xz += 1; }",
        each="int4 t = int4(1, 20, 300, 999); int3 w = int3(4, 50, 600); int2 u = int2(7, 80);",
    )
    for text, want in [
        ("t.xy = u;", [7, 80, 300, 999]), ("t.yx = u;", [80, 7, 300, 999]),
        ("t.zx = u;", [80, 20, 7, 999]), ("t.xyz = w;", [4, 50, 600, 999]),
        ("t.wxy = w;", [50, 600, 300, 4]), ("t.wzyx = t;", [999, 300, 20, 1]),
        ("t.xy = t.yx;", [20, 1, 300, 999]), ("t.xyz = t.zxy;", [300, 1, 20, 999]),
        ("t.xy = 5;", [5, 5, 300, 999]), ("t.xw = int2(5, 6);", [5, 20, 300, 6]),
        ("t.yz += u;", [1, 27, 380, 999]), ("t.zy += u;", [1, 100, 307, 999]),
        ("t.xy *= 3;", [3, 60, 300, 999]), ("t.xz -= 1;", [0, 20, 299, 999]),
        ("t.yw /= 2;", [1, 10, 300, 499]), ("t.xy %= 3;", [1, 2, 300, 999]),
        ("t.xy <<= 1;", [2, 40, 300, 999]), ("t.zw >>= 2;", [1, 20, 75, 249]),
        ("t.xy |= 8;", [9, 28, 300, 999]), ("t.xy &= 4;", [0, 4, 300, 999]),
        ("t.xy ^= 1;", [0, 21, 300, 999]), ("t.lo = u;", [7, 80, 300, 999]),
        ("t.hi = u;", [1, 20, 7, 80]), ("t.even = u;", [7, 20, 80, 999]),
        ("t.odd = u;", [1, 7, 300, 80]), ("t.hi += 1;", [1, 20, 301, 1000]),
        ("t.rg = u;", [7, 80, 300, 999]), ("t.bgr = w;", [600, 50, 4, 999]),
        ("t.ab = u.yx;", [1, 20, 7, 80]), ("t.x = t.w;", [999, 20, 300, 999]),
        ("t.g = 3;", [1, 3, 300, 999]), ("t.xy = u, t.zw = u;", [7, 80, 7, 80]),
        ("if (t.x == 1) t.xy = u; else t.zw = u;", [7, 80, 300, 999]),
        ("for (int k = 0; k < 3; ++k) t.xy += 1;", [4, 23, 300, 999]),
        ("for (int k = 0; k < 2; t.xy = t.yx, ++k) t.x += 1;", [2, 21, 300, 999]),
        ("turn(t);", [999, 300, 20, 1]), ("shift(&t);", [20, 300, 999, 999]),
        ("SWAP(t);", [20, 1, 300, 999]), ("spread(t);", [2, 20, 301, 999]),
        ("int4 m[2] = {t, t}; m[1].xy = u; t = m[1] + m[0] * 0;", [7, 80, 300, 999]),
        ("int4 m[2] = {t, t}; int k = 0; m[k++].xy = u; t = m[0]; t.z = k;", [7, 80, 1, 999]),
        ("Body o; o.n[1] = t; o.n[1].zy = u; t = o.n[1];", [1, 80, 7, 999]),
        ("Body o; thread Body* p = &o; p->n[0] = t; p->n[0].xw = u; t = p->n[0];",
         [7, 20, 300, 80]),
        ("thread int4& r = t; r.xy = u;", [7, 80, 300, 999]),
        ("thread int4* p = &t; p->xy = u; (*p).zw = u;", [7, 80, 7, 80]),
        ("auto f = [&]() { t.xy = u; }; f();", [7, 80, 300, 999]),
        ("t.xyzw = int4(1, 2, 3, 4);", [1, 2, 3, 4]),
        ("t.xy = int2(t.x + t.y, t.x - t.y);", [21, -19, 300, 999]),
        ("t.xy = (t.yx + u) * 2;", [54, 162, 300, 999]),
        ("int2 k = (t.xy = u); t.zw = k;", [7, 80, 7, 80]),
        ("t.xyz = t.x > 0 ? w : t.xyz;", [4, 50, 600, 999]),
        ("t.xyz = abs(-w);", [4, 50, 600, 999]),
    ]:  # fmt: skip
        s.stmt("long", f"{text} {put(4)}", told(want))
    s.stmt(
        "float",
        "Body o; o.at = 1; o.at.xy = float2(2, 3); OUT = o.at.x * 100 + o.at.y * 10 + o.at.z;",
        231,
    )
    s.stmt(
        "float",
        "float4 v = 0; v.xyz += float3(1, 2, 3); v.xyz *= 2; OUT = dot(v, float4(1, 10, 100,"
        " 1000));",
        642,
    )
    s.stmt("half", "half4 v = 1; v.yz = half2(2, 3); OUT = v.x + v.y * 10 + v.z * 100;", 321)
    s.check()


def test_swizzles_of_device_and_threadgroup_memory() -> None:
    x = np.arange(64, dtype=f32)
    body = """
    threadgroup float4 tile[16];
    uint l = thread_position_in_threadgroup.x;
    const device float4* in4 = (const device float4*)x;
    device float4* out4 = (device float4*)y;
    tile[l] = in4[l];
    tile[l].xy = in4[l].wz;
    tile[l].zw *= 2.0f;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out4[l] = 0;
    out4[l].yxw = tile[15 - l].xyz;
    out4[l].z += tile[l].w;
    out4[l].lo = out4[l].lo.yx;
    """
    y = run(body, {"x": x}, {"y": ("float", (16, 4))}, 16, 16)["y"]
    v = x.reshape(16, 4)
    tile = np.stack([v[:, 3], v[:, 2], v[:, 2] * 2, v[:, 3] * 2], 1)
    back = tile[::-1]
    want = np.stack([back[:, 0], back[:, 1], tile[:, 3], back[:, 2]], 1)
    assert (y == want).all()


def test_names_like_swizzles_are_left_alone() -> None:
    s = Slots(
        header="struct Color { int rg; int xy; int lo; float2 zw; int hi() const { return 9; }\n"
        "  int xyz(int k) { return rg + k; } };\nstruct Outer { Color xx; };",
        each="Color c; c.rg = 1; c.xy = 2; c.lo = 3; c.zw = float2(4, 5); int xy = 7, xyzw = 8;"
        " Outer o; o.xx = c;",
    )
    s.stmt("int", "OUT = c.rg + c.xy * 10 + c.lo * 100;", 321)
    s.stmt("int", "c.xy = 5; c.rg += 2; OUT = c.xy + c.rg;", 8)
    s.stmt("int", "OUT = c.hi() + c.xyz(3);", 9 + 4)
    s.stmt("float", "c.zw.yx = c.zw; OUT = c.zw.x * 10 + c.zw.y;", 54)
    s.stmt("int", "OUT = xy + xyzw + o.xx.xy + o.xx.lo;", 20)
    s.check()


def test_indexing_with_a_run_time_index() -> None:
    x = np.arange(4, dtype=np.int32)
    s = Slots(
        n=4,
        inputs={"x": x},
        each="int k = x[i]; float4 v = float4(10, 20, 30, 40); half3 h = half3(1, 2, 3);",
    )
    s.expr("float", "v[k]", (x + 1) * 10)
    s.stmt("float", "v[k] = 5; OUT = v.x + v.y + v.z + v.w;", 100 - (x + 1) * 10 + 5)
    s.stmt("float", "v[3 - k] += 1; OUT = v[3 - k];", (4 - x) * 10 + 1)
    s.stmt("float", "float sum = 0; for (int j = 0; j < 4; ++j) sum += v[j]; OUT = sum;", 100)
    s.stmt("half", "OUT = h[k % 3];", x % 3 + 1)
    s.stmt("float", "const float4 c = v; OUT = c[k];", (x + 1) * 10)
    s.stmt("uint", "OUT = thread_position_in_grid[0];", x)
    s.stmt("uchar", "uchar4 c = as_type<uchar4>(0x04030201u); OUT = c[k];", x + 1)
    s.check()


def test_as_type() -> None:
    rng = np.random.default_rng(8)
    x = rng.integers(0, 2**32, 64, dtype=np.uint32) & 0x7F7F7F7F & ~np.uint32(0x00008000)
    x = x & np.uint32(0x7BFF7BFF)  # finite as float, half and bfloat
    u16 = x.view(np.uint16).reshape(-1, 2)
    u8 = x.view(np.uint8).reshape(-1, 4)
    s = Slots(n=64, inputs={"x": x}, prologue="uint u = x[i];")
    e = s.expr
    e("float", "as_type<float>(u)", x.view(f32))
    e("int", "as_type<int>(u)", x.view(np.int32))
    e("uint", "as_type<uint>(as_type<float>(u))", x)
    e("half", "as_type<half2>(u).x", u16[:, 0].view(np.float16))
    e("half", "as_type<half2>(u).y", u16[:, 1].view(np.float16))
    e("half", "as_type<half2>(as_type<float>(u)).y", u16[:, 1].view(np.float16))
    e("bfloat", "as_type<bfloat2>(u).y", u16[:, 1].view(bfloat16))
    e("uchar", "as_type<uchar4>(u).z", u8[:, 2])
    e("char", "as_type<char4>(as_type<float>(u)).w", u8[:, 3].view(np.int8))
    e("ushort", "as_type<ushort2>(u).y", u16[:, 1])
    e("short", "as_type<short>(as_type<half2>(u).x)", u16[:, 0].view(np.int16))
    e("half", "as_type<half>(ushort(u))", u16[:, 0].view(np.float16))
    e("half", "as_type<half>(ushort(u >> 16))", u16[:, 1].view(np.float16))
    e("uint", "as_type<uint>(ushort2(ushort(u), ushort(u >> 16)))", x)
    e("uint", "as_type<uint>(uchar4(u, u >> 8, u >> 16, u >> 24))", x)
    e("uint", "as_type<uint>(half2(1.0h, 2.0h))", 0x40003C00)
    e("float", "as_type<float>(bfloat2(bfloat(0.0f), bfloat(1.0f)))", 1)
    pair = x.astype(np.uint64) | (x[::-1].astype(np.uint64) << 32)
    s.prologue += " uint v = x[63 - i]; ulong w = ulong(u) | ulong(v) << 32;"
    e("ulong", "as_type<ulong>(uint2(u, v))", pair)
    e("uint", "as_type<uint2>(w).y", x[::-1])
    e("long", "as_type<long>(float2(as_type<float>(u), as_type<float>(v)))", pair.view(np.int64))
    e("float", "as_type<float4>(uint4(u, v, u, v)).w", x[::-1].view(f32))
    e("float", "as_type<float3>(uint3(u, v, u)).y", x[::-1].view(f32))
    e("uint", "as_type<uint4>(float4(as_type<float>(u), 0, 0, 1.0f)).w", 0x3F800000)
    e("half", "as_type<half4>(uint2(u, v)).z", u16[::-1, 0].view(np.float16))
    e("ushort", "as_type<ushort4>(w).x", u16[:, 0])
    e("uint", "as_type<uint>(-1)", 2**32 - 1)
    e("ulong", "as_type<ulong>(half4(1.0h))", 0x3C003C003C003C00)
    s.check()


def test_packed_vectors() -> None:
    x = np.arange(24, dtype=f32)
    s = Slots(
        n=4,
        inputs={"x": x, "c": np.arange(24, dtype=np.uint8)},
        header="struct Vertex { packed_float3 at; float w; };",
        prologue="const device packed_float3* p = (const device packed_float3*)x;"
        " const device packed_uchar3* q = (const device packed_uchar3*)c;"
        " const device Vertex* v = (const device Vertex*)x;",
    )
    j = np.arange(4)
    s.expr("float", "p[i].x", x[j * 3])
    s.expr("float", "p[i][2]", x[j * 3 + 2])
    s.stmt("float", "float3 t = p[i]; OUT = t.y;", x[j * 3 + 1])
    s.expr("float", "float3(p[i]).z", x[j * 3 + 2])
    s.expr(
        "float",
        "dot(float3(p[i]), float3(1, 10, 100))",
        x[j * 3] + 10 * x[j * 3 + 1] + 100 * x[j * 3 + 2],
    )
    s.stmt("uchar", "uchar3 t = q[i]; OUT = t.z;", j * 3 + 2)
    s.expr("float", "v[i].at.z + v[i].w", x[j * 4 + 2] + x[j * 4 + 3])
    s.stmt("float", "packed_float3 t = float3(1, 2, 3); t.y = 5; float3 k = t; OUT = k.x + k.y;", 6)
    s.stmt("float", "packed_float2 t = packed_float2(1, 2); OUT = t[0] + t[1];", 3)
    s.stmt("float", "packed_half4 t = packed_half4(half4(1, 2, 3, 4)); OUT = half4(t).w;", 4)
    s.stmt("float", "packed_float3 t(1, 2, 3); float3 k = float3(t) * 2.0f; OUT = k.z;", 6)
    s.stmt(
        "float", "packed_float3 a = float3(1), b = float3(2, 3, 4); float3 k = a + b; OUT = k.z;", 5
    )
    s.stmt("float", "packed_float3 a = float3(1); a = float3(4, 5, 6); OUT = a.z;", 6)
    s.check()


def test_loads_and_stores_through_casts_need_no_alignment_of_the_host() -> None:
    buffer = np.arange(70, dtype=f32)
    x = buffer[1:65]
    body = """
    uint i = thread_position_in_grid.x;
    const device float4* a = (const device float4*)x;
    const device half4* h = (const device half4*)x;
    const device uint4* u = reinterpret_cast<const device uint4*>(x);
    ((device float4*)y)[i] = a[i] * 2.0f;
    *((device uint4*)(z + 4 * i)) = u[i];
    k[i] = as_type<uint>(h[2 * i].xy);
    """
    outs: dict[str, Any] = {"y": ("float", (64,)), "z": ("uint", (64,)), "k": ("uint", (16,))}
    out = run(body, {"x": x}, outs, 16, 16, ensure_row_contiguous=False)
    assert (out["y"] == x * 2).all()
    assert (out["z"] == x.view(np.uint32)).all()
    assert (out["k"] == x.view(np.uint32)[::4]).all()


def test_all_widths_of_all_types_are_there() -> None:
    s = Slots()
    for kind in KINDS:
        for count in (2, 3, 4):
            want = told([1] * count if kind == "bool" else range(1, count + 1))
            items = ", ".join(str(k) for k in range(1, count + 1))
            s.stmt("long", f"{kind}{count} t = {kind}{count}({items}); {put(count)}", want)
    assert set(INTS) < set(KINDS)
    s.check()


@pytest.mark.parametrize("count", [8, 16])
@pytest.mark.parametrize("kind", ["float", "half", "bfloat", "uint"])
def test_wide_vectors(kind: str, count: int) -> None:
    """Published kernels load and store through them, though Metal's specification ends at four."""
    rng = np.random.default_rng(count)
    dtype = {"float": f32, "half": np.float16, "bfloat": bfloat16, "uint": np.uint32}[kind]
    x, w = (rng.integers(0, 9, 4 * count).astype(dtype) for _ in "xw")
    body = f"""
    typedef vec<{kind}, {count}> wide;
    typedef vec<float, {count}> many;
    uint i = thread_position_in_grid.x;
    const wide a = *(const device wide*)(x + {count} * i);
    const wide b = i == 0 ? wide(0) : *(const device wide*)(w + {count} * i);
    many sum = many(a) * 2.0f + many(b);
    sum += many(vec<float, 4>(1, 2, 3, 4), {"vec<float, 8>(0), " * (count // 16)}vec<float, 4>(5));
    sum[3] -= 1;
    threadgroup wide shared[4];
    shared[i] = wide(sum);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    *(device wide*)(y + {count} * i) = shared[3 - i];
    size[i] = sizeof(wide) / sizeof({kind});
    """
    outs: dict[str, Any] = {"y": (kind, x.shape), "size": ("uint", (4,))}
    out = run(body, {"x": x, "w": w}, outs, 4, 4)
    expected = (2 * x.astype(f32) + w.astype(f32) * (np.arange(4 * count) >= count)).reshape(4, -1)
    expected[:, :4] += [1, 2, 3, 3]
    expected[:, -4:] += 5
    assert (out["y"].astype(f32).reshape(4, -1) == expected[::-1]).all()
    assert (out["size"] == count).all()
