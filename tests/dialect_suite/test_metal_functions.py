"""Common, relational and geometric functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from metal_harness import KINDS, Array, Slots

f32 = np.float32
f64 = np.float64
N = 256


def floats(seed: int, scale: float = 2.0, shape: Any = N) -> Array:
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(f32)


@pytest.mark.parametrize("kind", ["float", "half"])
def test_common_functions(kind: str) -> None:
    dtype = KINDS[kind]
    a, b, t = (floats(k).astype(dtype) for k in (1, 2, 3))
    a[:8] = np.array([0, 1, -1, 0.5, 2, -0.5, 1.5, 0.25], dtype)
    b[:4] = a[:4]
    x, y, w = (v.astype(f64) for v in (a, b, t))
    low, high = np.minimum(x, y), np.maximum(x, y)
    low[:4] -= 1
    s = Slots(
        n=N,
        inputs={"va": a, "vb": b, "vt": t, "vl": low.astype(dtype), "vh": high.astype(dtype)},
        prologue=f"{kind} a = va[i], b = vb[i], t = vt[i], l = vl[i], h = vh[i];",
    )
    low, high = low.astype(dtype).astype(f64), high.astype(dtype).astype(f64)
    one = f"{kind}(1)"
    near = 4.0 if kind == "float" else 2.0
    for space in ("", "metal::"):
        s.expr(kind, f"{space}clamp(t, l, h)", np.clip(w, low, high))
        s.expr(kind, f"{space}saturate(a)", np.clip(x, 0, 1))
        s.expr(kind, f"{space}sign(a)", np.sign(x))
        s.expr(kind, f"{space}step(a, b)", np.where(y < x, 0.0, 1.0))
        s.expr(
            kind,
            f"{space}mix(a, b, {kind}(0.25h))",
            x + (y - x) * 0.25,
            ulp=near,
            atol=2e-6 if kind == "float" else 4e-3,
        )
        s.expr(kind, f"{space}mix(a, b, {kind}(0))", x)
    r = np.clip((w - low) / (high - low), 0, 1)
    s.expr(kind, "smoothstep(l, h, t)", r * r * (3 - 2 * r), ulp=16 if kind == "float" else 6,
           atol=2e-6 if kind == "float" else 1e-2)  # fmt: skip
    s.expr(kind, "smoothstep(l, h, h)", 1)
    s.expr(kind, "smoothstep(l, h, l)", 0)
    s.expr(kind, f"clamp(a, -{one}, {one})", np.clip(x, -1, 1))
    s.expr(kind, "select(a, b, a < b)", np.where(x < y, y, x))
    s.expr(kind, "metal::select(a, b, false)", x)
    s.expr(kind, "select(a, b, true)", y)
    if kind == "float":
        for space in ("precise::", "fast::", "metal::precise::"):
            s.expr("float", f"{space}clamp(t, l, h)", np.clip(w, low, high))
            s.expr("float", f"{space}saturate(a)", np.clip(x, 0, 1))
        s.expr("float", "clamp(a, 0.0f, INFINITY)", np.maximum(x, 0))
        s.expr("float", "mix(a, b, 1.0f)", a + (b - a), ulp=4, atol=1e-6)
    # Vectors, with vectors or scalars as the bounds.
    v = f"{kind}3(a, b, t)"
    s.expr(kind, f"clamp({v}, {kind}3(l), {kind}3(h)).z", np.clip(w, low, high))
    s.expr(kind, f"clamp({v}, -{one}, {one}).y", np.clip(y, -1, 1))
    s.expr(kind, f"saturate({v}).x", np.clip(x, 0, 1))
    s.expr(kind, f"sign({v}).z", np.sign(w))
    s.expr(kind, f"step({kind}3(b), {v}).x", np.where(x < y, 0.0, 1.0))
    s.expr(kind, f"mix({v}, {kind}3(0), {kind}3({one})).x", 0)
    s.expr(kind, f"mix({v}, {v}, {kind}3(0)).y", y)
    s.expr(kind, f"select({v}, {kind}3(b), {v} < {kind}3(b)).z", np.maximum(w, y))
    s.expr(kind, f"select({v}, {kind}3(b), bool3(true, false, true)).y", y)
    s.expr(kind, f"min({v}, {kind}3(0)).x", np.minimum(x, 0))
    s.expr(kind, f"max({v}, {kind}3(0)).z", np.maximum(w, 0))
    s.expr(kind, f"fmax({v}, {kind}3(0)).y", np.maximum(y, 0))
    # A zero of either sign is a zero here.
    for slot in s.slots:
        slot.atol = slot.atol or 1e-30
    s.check()


def test_select_of_other_types() -> None:
    s = Slots(
        n=4,
        prologue="bool c = i % 2; int4 a = int4(1, 2, 3, 4), b = int4(10, 20, 30, 40); bool4 m ="
        " bool4(c, !c, true, false);",
    )
    odd = np.arange(4) % 2 == 1
    s.expr("int", "select(1, 2, c)", np.where(odd, 2, 1))
    s.expr("uint", "select(1u, 2u, c)", np.where(odd, 2, 1))
    s.expr("uchar", "select(uchar(1), uchar(2), c)", np.where(odd, 2, 1))
    s.expr("long", "select(1L, 2L, c)", np.where(odd, 2, 1))
    s.expr("bfloat", "select(bfloat(1), bfloat(2), c)", np.where(odd, 2, 1))
    s.expr("int", "select(a, b, m).x", np.where(odd, 10, 1))
    s.expr("int", "select(a, b, m).y", np.where(odd, 2, 20))
    s.expr("int", "select(a, b, m).z + select(a, b, m).w", 34)
    s.expr("int", "select(a, b, a > 2).w", 40)
    s.expr("int", "select(a.xy, b.zw, m.xy).x", np.where(odd, 30, 1))
    s.expr("bool", "all(bool2(c, true))", odd)
    s.expr("bool", "any(bool3(c, false, false))", odd)
    s.expr("bool", "any(!bool4(true))", False)
    s.expr("bool", "all(c)", odd)
    s.expr("bool", "any(c)", odd)
    s.expr("bool", "all(a == a)", True)
    s.expr("bool", "any(a == b)", False)
    s.check()


def rows(v: Array) -> Array:
    return np.asarray(v.astype(f64))


@pytest.mark.parametrize("kind", ["float", "half"])
def test_geometric_functions(kind: str) -> None:
    dtype = KINDS[kind]
    n = 64
    a, b, c = (floats(k, 1.0, (n, 4)).astype(dtype) for k in (4, 5, 6))
    x, y, z = rows(a), rows(b), rows(c)
    letters = ", ".join(f"v{{0}}[4 * i + {k}]" for k in range(4))
    prologue = "".join(f"{kind}4 {m} = {kind}4({letters.format(m)});" for m in "abc")
    s = Slots(n=n, inputs={"va": a.ravel(), "vb": b.ravel(), "vc": c.ravel()}, prologue=prologue)
    ulp, atol = (8, 1e-6) if kind == "float" else (4, 8e-3)

    def add(text: str, want: Any) -> None:
        s.expr(kind, text, want, ulp=ulp, atol=atol)

    for count, letters in ((2, "xy"), (3, "xyz"), (4, "xyzw")):
        p, q, r = x[:, :count], y[:, :count], z[:, :count]
        pa, pb, pc = (f"{m}.{letters}" for m in "abc")
        dot = (p * q).sum(1)
        size = np.sqrt((p * p).sum(1))
        gap = np.sqrt(((p - q) ** 2).sum(1))
        add(f"dot({pa}, {pb})", dot)
        add(f"length({pa})", size)
        add(f"length_squared({pa})", size**2)
        add(f"distance({pa}, {pb})", gap)
        add(f"distance_squared({pa}, {pb})", gap**2)
        add(f"normalize({pa}).y", p[:, 1] / size)
        unit = q / np.sqrt((q * q).sum(1))[:, None]
        reflected = p - 2 * (p * unit).sum(1)[:, None] * unit
        add(f"reflect({pa}, normalize({pb})).x", reflected[:, 0])
        flip = np.where((q * r).sum(1) < 0, 1, -1)
        add(f"faceforward({pa}, {pb}, {pc}).x", p[:, 0] * flip)
        if kind == "float":
            entering = p / size[:, None]
            k = 1 - 0.64 * (1 - (entering * unit).sum(1) ** 2)
            refracted = (
                0.8 * entering
                - (0.8 * (entering * unit).sum(1) + np.sqrt(np.maximum(k, 0)))[:, None] * unit
            )
            add(
                f"refract(normalize({pa}), normalize({pb}), 0.8f).y",
                np.where(k < 0, 0, refracted[:, 1]),
            )
            for space in ("precise::", "fast::"):
                add(f"{space}length({pa})", size)
                add(f"{space}distance({pa}, {pb})", gap)
                add(f"{space}normalize({pa}).x", p[:, 0] / size)
    cross = np.cross(x[:, :3], y[:, :3])
    for k, letter in enumerate("xyz"):
        add(f"cross(a.xyz, b.xyz).{letter}", cross[:, k])
        add(f"metal::cross(a.xyz, b.xyz)[{k}]", cross[:, k])
    add("metal::dot(a, a)", (x * x).sum(1))
    s.check()
