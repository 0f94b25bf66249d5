"""Integer arithmetic and the integer functions, for every width, against Python's own integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from metal_harness import INTS, KINDS, Array, Slots, run

pytestmark = pytest.mark.optimised


class Width:
    """The integers of one type, with Python's integers for the arithmetic."""

    def __init__(self, kind: str) -> None:
        self.kind, self.dtype = kind, KINDS[kind]
        self.bits = self.dtype.itemsize * 8
        self.signed = self.dtype.kind == "i"
        self.least = -(1 << self.bits - 1) if self.signed else 0
        self.most = (1 << self.bits - self.signed) - 1

    def wrap(self, v: int) -> int:
        v &= (1 << self.bits) - 1
        return v - (1 << self.bits) if v > self.most else v

    def raw(self, v: int) -> int:
        return v & ((1 << self.bits) - 1)

    def clip(self, v: int) -> int:
        return max(self.least, min(self.most, v))

    def array(self, values: Any) -> Array:
        return np.array([self.wrap(int(v)) for v in values], self.dtype)

    def edges(self) -> list[int]:
        near = [0, 1, 2, 3, 5, 7, 100, self.most, self.most - 1, self.least, self.least + 1]
        near += [self.most // 2, self.most // 3, self.wrap(-1), self.wrap(-2), self.wrap(-100)]
        return sorted({self.wrap(v) for v in near})

    def pairs(self, count: int = 200) -> tuple[list[int], list[int]]:
        rng = np.random.default_rng(11)
        edges = self.edges()
        a = [x for x in edges for _ in edges]
        b = [y for _ in edges for y in edges]
        more = rng.integers(self.least, self.most, (2, count), self.dtype, endpoint=True)
        return a + [int(v) for v in more[0]], b + [int(v) for v in more[1]]


def truncated(a: int, b: int) -> int:
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


def median(*v: int) -> int:
    return sorted(v)[1]


@pytest.mark.parametrize("kind", INTS)
def test_operators_and_functions(kind: str) -> None:
    w = Width(kind)
    a, b = w.pairs()
    c = [b[-1 - j] for j in range(len(b))]
    n = len(a)
    shift = [v % w.bits for v in b]
    # Never zero, nor -1 with the least number: both have no value that Metal names.
    safe = [1 if y == 0 or (y == -1 and x == w.least) else y for x, y in zip(a, b, strict=True)]
    low = [min(x, y) for x, y in zip(b, c, strict=True)]
    high = [max(x, y) for x, y in zip(b, c, strict=True)]
    inputs = {"va": a, "vb": b, "vc": c, "vs": shift, "vd": safe, "vl": low, "vh": high}
    s = Slots(
        n=n,
        inputs={name: w.array(v) for name, v in inputs.items()},
        prologue=f"{kind} a = va[i], b = vb[i], c = vc[i], s = vs[i], d = vd[i], l = vl[i], h ="
        f" vh[i];",
    )

    def check(
        text: str, function: Callable[..., int], *columns: list[int], as_kind: str = kind
    ) -> None:
        want = [function(*row) for row in zip(*columns, strict=True)]
        s.expr(as_kind, text, Width(as_kind).array(want))

    # In a variable of its own type, the sum of two shorts is a short.
    check(f"{kind}(a + b)", lambda x, y: x + y, a, b)
    check(f"{kind}(a - b)", lambda x, y: x - y, a, b)
    check(f"{kind}(a * b)", lambda x, y: x * y, a, b)
    check(f"{kind}(a / d)", truncated, a, safe)
    check(f"{kind}(a % d)", lambda x, y: x - truncated(x, y) * y, a, safe)
    check(f"{kind}(a << s)", lambda x, y: x << y, a, shift)
    check(f"{kind}(a >> s)", lambda x, y: x >> y, a, shift)
    check(f"{kind}(a & b)", lambda x, y: x & y, a, b)
    check(f"{kind}(a | b)", lambda x, y: x | y, a, b)
    check(f"{kind}(a ^ b)", lambda x, y: x ^ y, a, b)
    check(f"{kind}(~a)", lambda x: ~x, a)
    check(f"{kind}(-a)", lambda x: -x, a)
    for operator, function in [
        ("<", lambda x, y: x < y), ("<=", lambda x, y: x <= y), (">", lambda x, y: x > y),
        (">=", lambda x, y: x >= y), ("==", lambda x, y: x == y), ("!=", lambda x, y: x != y),
    ]:  # fmt: skip
        s.expr(
            "bool", f"a {operator} b", np.array([function(x, y) for x, y in zip(a, b, strict=True)])
        )
    check("min(a, b)", min, a, b)
    check("metal::max(a, b)", max, a, b)
    check("min3(a, b, c)", min, a, b, c)
    check("max3(a, b, c)", max, a, b, c)
    check("median3(a, b, c)", median, a, b, c)
    check("clamp(a, l, h)", lambda x, y, z: min(max(x, y), z), a, low, high)
    check("abs(a)", abs, a)
    check("select(a, b, a < c)", lambda x, y, z: y if x < z else x, a, b, c)
    check("clz(a)", lambda x: w.bits - w.raw(x).bit_length(), a)
    check("ctz(a)", lambda x: (w.raw(x) & -w.raw(x)).bit_length() - 1 if x else w.bits, a)
    check("popcount(a)", lambda x: w.raw(x).bit_count(), a)
    check("reverse_bits(a)", lambda x: int(format(w.raw(x), f"0{w.bits}b")[::-1], 2), a)

    def rotated(x: int, k: int) -> int:
        return w.raw(x) << k | w.raw(x) >> (w.bits - k)

    check("rotate(a, s)", rotated, a, shift)
    check("addsat(a, b)", lambda x, y: w.clip(x + y), a, b)
    check("subsat(a, b)", lambda x, y: w.clip(x - y), a, b)
    check("hadd(a, b)", lambda x, y: (x + y) >> 1, a, b)
    check("rhadd(a, b)", lambda x, y: (x + y + 1) >> 1, a, b)
    unsigned = kind if kind[0] == "u" else f"u{kind}"
    check("absdiff(a, b)", lambda x, y: abs(x - y), a, b, as_kind=unsigned)
    check("mulhi(a, b)", lambda x, y: x * y >> w.bits, a, b)
    check("madhi(a, b, c)", lambda x, y, z: (x * y >> w.bits) + z, a, b, c)
    if w.bits < 64:
        check("madsat(a, b, c)", lambda x, y, z: w.clip(x * y + z), a, b, c)
    for offset, count in [
        (0, 0),
        (0, 1),
        (1, 3),
        (3, 5),
        (0, w.bits),
        (w.bits - 2, 2),
        (w.bits // 2, 4),
    ]:
        mask = (1 << count) - 1

        def extracted(x: int, offset: int = offset, count: int = count, mask: int = mask) -> int:
            field = w.raw(x) >> offset & mask
            return field - (1 << count) if w.signed and count and field >> (count - 1) else field

        check(f"extract_bits(a, {offset}u, {count}u)", extracted, a)

        def inserted(x: int, y: int, offset: int = offset, mask: int = mask) -> int:
            return w.raw(x) & ~(mask << offset) | (w.raw(y) & mask) << offset

        check(f"insert_bits(a, b, {offset}u, {count}u)", inserted, a, b)
    s.check()


def test_functions_of_24_bits() -> None:
    rng = np.random.default_rng(12)
    a = rng.integers(-(2**23), 2**23, 300).astype(np.int32)
    b = rng.integers(-(2**23), 2**23, 300).astype(np.int32)
    c = rng.integers(-(2**31), 2**31, 300).astype(np.int32)
    ua, ub = (v.astype(np.uint32) & 0xFFFFFF for v in (a, b))
    s = Slots(n=300, inputs={"a": a, "b": b, "c": c, "ua": ua, "ub": ub})
    s.expr("int", "mul24(a[i], b[i])", a * b)
    s.expr("uint", "mul24(ua[i], ub[i])", ua * ub)
    s.expr("int", "mad24(a[i], b[i], c[i])", a * b + c)
    s.expr("uint", "metal::mad24(ua[i], ub[i], uint(c[i]))", ua * ub + c.astype(np.uint32))
    s.check()


def test_functions_of_vectors() -> None:
    rng = np.random.default_rng(13)
    a = rng.integers(0, 2**32, (64, 4), dtype=np.uint32)
    b = rng.integers(0, 2**32, (64, 4), dtype=np.uint32)
    body = """
    uint i = thread_position_in_grid.x;
    uint4 p = ((const device uint4*)a)[i], q = ((const device uint4*)b)[i];
    int4 m = as_type<int4>(p);
    device uint4* o = (device uint4*)y + i * 12;
    o[0] = popcount(p);
    o[1] = clz(p >> 20);
    o[2] = ctz(p << 4);
    o[3] = min(p, q);
    o[4] = max(p, 5u);
    o[5] = clamp(p, 100u, 1u << 31);
    o[6] = uint4(abs(m));
    o[7] = mulhi(p, q);
    o[8] = rotate(p, uint4(1, 8, 16, 31));
    o[9] = addsat(p, q);
    o[10] = extract_bits(p, 4, 8);
    o[11] = reverse_bits(reverse_bits(p)) + select(uint4(0), uint4(1), p > q);
    """
    y = run(body, {"a": a, "b": b}, {"y": ("uint", (64, 12, 4))}, 64, 32)["y"]
    wide, k = a.astype(object), np.array([1, 8, 16, 31], np.uint32)
    length = np.vectorize(lambda v: int(v).bit_length())
    want = [
        np.vectorize(lambda v: int(v).bit_count())(a),
        32 - length(a >> 20),
        np.vectorize(lambda v: (int(v) & -int(v)).bit_length() - 1)(a << np.uint32(4)),
        np.minimum(a, b), np.maximum(a, 5), np.clip(a, 100, 2**31), np.abs(a.view(np.int32)),
        (wide * b.astype(object)) >> 32, a << k | a >> (32 - k),
        np.minimum(a.astype(np.uint64) + b, 2**32 - 1), a >> 4 & 255, a + (a > b),
    ]  # fmt: skip
    for row, expected in enumerate(want):
        assert (y[:, row] == np.asarray(expected).astype(np.uint32)).all(), row


def test_division_by_zero_stops_nothing(everywhere: str) -> None:
    """The quotient is unspecified, but there is no exception, and other threads are as ever."""
    if everywhere == "emulated":
        pytest.skip("what stands in for the GPU divides as the CPU does, which faults")
    d = np.array([0, 1, 2, 0, 3, 0, 4, 5], np.int32)
    body = """
    uint i = thread_position_in_grid.x;
    int q = 840 / d[i], r = 841 % d[i];
    uint u = 840u / uint(d[i]);
    y[i * 3] = q; y[i * 3 + 1] = r; y[i * 3 + 2] = int(u);
    """
    y = run(body, {"d": d}, {"y": ("int", (8, 3))}, 8, 8)["y"]
    good = d != 0
    assert (y[good, 0] == 840 // d[good]).all()
    assert (y[good, 1] == 841 % d[good]).all()
    assert (y[good, 2] == 840 // d[good]).all()


def test_division_in_loops_and_by_parameters() -> None:
    """Divisors that are the same for every thread, of every sign and size."""
    divisors = [1, 2, 3, 5, 7, 10, 64, 641, 65537, 2**31 - 1, -1, -3, -64, -(2**31)]
    rng = np.random.default_rng(14)
    x = np.concatenate(
        [rng.integers(-(2**31), 2**31, 90), [0, 1, -1, 2**31 - 1, 5, 6, 7, -7, 8, -8]]
    )
    x = np.where(x == -(2**31), 17, x).astype(np.int32)
    body = """
    uint i = thread_position_in_grid.x;
    for (int k = 0; k < d_shape[0]; ++k) {
        int a = x[i], b = d[k];
        q[i * d_shape[0] + k] = a / b;
        r[i * d_shape[0] + k] = a % b;
        uq[i * d_shape[0] + k] = uint(a) / uint(b);
        ur[i * d_shape[0] + k] = uint(a) % uint(b);
        lq[i * d_shape[0] + k] = (long(a) << 20) / b;
    }
    """
    d = np.array(divisors, np.int32)
    shape = (x.size, d.size)
    outs: dict[str, Any] = {k: (t, shape) for k, t in
                            {"q": "int", "r": "int", "uq": "uint", "ur": "uint",
                             "lq": "long"}.items()}  # fmt: skip
    out = run(body, {"x": x, "d": d}, outs, x.size, 50)
    wide, by = x.astype(np.int64)[:, None], d.astype(np.int64)[None]
    q = np.sign(wide) * np.sign(by) * (np.abs(wide) // np.abs(by))
    assert (out["q"] == q).all()
    assert (out["r"] == wide - q * by).all()
    ux, ud = x.astype(np.uint32)[:, None], d.astype(np.uint32)[None]
    assert (out["uq"] == ux // ud).all()
    assert (out["ur"] == ux % ud).all()
    big = wide << 20
    assert (out["lq"] == np.sign(big) * np.sign(by) * (np.abs(big) // np.abs(by))).all()


def test_indices_of_every_type_reach_their_element() -> None:
    x = np.arange(300, dtype=np.int32)
    s = Slots(
        n=120, inputs={"x": x}, prologue="uchar c = i; short h = i; ulong w = i; char m = -1;"
    )
    j = np.arange(120)
    s.expr("int", "x[c]", j)
    s.expr("int", "x[h]", j)
    s.expr("int", "x[w + 100]", j + 100)
    s.expr("int", "*(x + c)", j)
    s.expr("int", "(x + 50)[m]", 49)
    s.expr("int", "x[size_t(i) * 2]", j * 2)
    s.expr("int", "x[(c + 200) % 256]", (j + 200) % 256)
    s.expr("int", "x[uchar(c + 200)]", (j + 200) % 256)
    s.expr("long", "&x[i] - x", j)
    s.expr("int", "i[x]", j)
    s.expr("uint", "i - 5u", (j - 5).astype(np.int64).astype(np.uint32))
    s.expr("int", "x[i > 5 ? i - 5 : 0]", np.maximum(j - 5, 0))
    s.expr("int", "int(i) - 5 < 0 ? -1 : x[int(i) - 5]", np.where(j < 5, -1, j - 5))
    s.check()
