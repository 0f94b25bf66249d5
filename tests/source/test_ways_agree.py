"""Bodies whose loops over lanes once gave other numbers than threads do: all ways agree on them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import ferrule
from ferrule.devices.cpu import program as cpu

X = (np.arange(4000) * 7919 % 201 - 100).astype(np.int32)
NAMES = (
    "uint i = thread_position_in_grid.x, lane = thread_index_in_simdgroup, "
    "tid = thread_position_in_threadgroup.x, n = threads_per_threadgroup.x;\n"
)
PLAIN = "uint i = thread_position_in_grid.x;\n"
OFF = "constant int OFF = 100;"
ADDRESS = "thread int* addr(thread int& v) { return &v; }"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "a stride in a branch in a stride": (
        "int acc = 0; for (uint k = lane; k < 70; k += 32) { if (x[k] > 0) {"
        " for (uint j = lane; j < 50; j += 32) acc += x[j] * int(k); } }"
        " y[i] = acc + simd_sum(1);", {},
    ),
    "a stride in a lane's loop in a stride": (
        "int acc = 0; for (uint k = lane; k < 70; k += 32) for (uint m = 0, q = lane; m < 2; m++)"
        " for (uint j = lane; j < 50; j += 32) acc += x[j] * int(k) + int(q);"
        " y[i] = acc + simd_sum(1);", {},
    ),
    "a counter divided": (
        "int acc = 0; for (uint k = thread_index_in_threadgroup; k < 300; k += n) {"
        " uint g = k / 32; acc += int(g) * 1000; } y[i] = acc + simd_sum(1);", {"threads": 128},
    ),
    "a counter shifted": (
        "int acc = 0; for (uint k = thread_position_in_grid.x; k < 3000; k += 128) {"
        " acc += x[k >> 5]; } y[i] = acc + simd_sum(1);", {"threads": 128},
    ),
    "a wide counter of a start that wraps": (
        "int acc = 0; for (size_t k = lane - 5u; k < 200; k += 32) acc += x[k] + 1;"
        " y[i] = simd_sum(acc);", {},
    ),
    "a wide counter of a variable that wraps": (
        "int acc = 0; uint a = lane - 5u; for (size_t k = a; k < 200; k += 32) acc += x[k] + 1;"
        " y[i] = simd_sum(acc);", {},
    ),
    "an enumerator in a block": (
        "int v = 0; if (i > 2) { enum { OFF = 3 }; v = x[i + OFF]; } y[i] = v;",
        {"header": OFF, "before": PLAIN},
    ),
    "an enumerator of a struct in a block": (
        "int v = 0; if (i > 2) { struct OFF { enum { A = 3 }; }; v = x[i + OFF::A]; } y[i] = v;",
        {"header": "struct OFF { enum { A = 100 }; };", "before": PLAIN},
    ),
    "a type in a block": (
        "int v = 0; if (i > 2) { using T = uchar; v = x[i + T(s)]; } y[i] = v;",
        {"header": "using T = int;", "before": PLAIN, "s": 300},
    ),
    "a type of a lane": (
        "using T = decltype(i); y[i] = x[i + T(3)];", {"before": PLAIN, "ways": ("auto",)},
    ),
    "a quotient behind a colon": (
        "y[i] = i == 0 ? 0:i % n;", {"ways": ("auto",)},
    ),
    "a lane that there is not": (
        "threadgroup int t[1]; if (tid == 0) t[0] = 1; threadgroup_barrier(mem_flags::mem_none);"
        " if (tid == 4294967299) t[0] = 5; threadgroup_barrier(mem_flags::mem_none); y[i] = t[0];",
        {},
    ),
    "a load behind a guard": (
        "int v = 0; if (s < 4000) v = x[lane + x[long(s) * 10000000] + 100]; y[i] = simd_sum(v);",
        {"s": 2_000_000_000},
    ),
    "a load behind a return": (
        "int v = 1; if (int(lane) < s - 40) return;"
        " uint at = lane + uint(x[long(s) * 10000000] + 100); v = x[at]; y[i] = simd_sum(v);",
        {"s": 2_000_000_000},
    ),
    "a divisor loaded behind a guard": (
        "int v = 0; if (s < 4000) v = int(lane) / x[long(s) * 10000000]; y[i] = simd_sum(v);",
        {"s": 2_000_000_000},
    ),
    "a divisor divided behind a guard": (
        "long v = 0; if (x[lane] == 777) v = long(lane) / (100 / long(s));"
        " y[i] = simd_sum(int(v));",
        {"s": 0},
    ),
    "a tally copied by a lambda": (
        "auto add = [=](int k) { atomic_fetch_add_explicit(&y[k], 1, memory_order_relaxed); };"
        " add(int(lane));", {"atomic": True},
    ),
    "a loop that all lanes leave together": (
        "int v = 0; uint w = lane; while (simd_any(w > 3)) { if (w % 5 == 0) v += 1; w = w / 2;"
        " v += simd_sum(int(w)); } y[i] = v;", {},
    ),
    "rounds that some lanes cut short": (
        "int v = 0; uint w = lane; do { if (w & 1) { w /= 2; continue; } v += simd_sum(int(w));"
        " w /= 2; if (v > 300) break; } while (simd_any(w > 0)); y[i] = v;", {},
    ),
    "numbers that some lanes change": (
        "int a = int(lane); bool b = lane > 40; simdgroup_barrier(mem_flags::mem_none);"
        " if (x[i] > 0) { a += 5; b = !b; } if (x[i] > 50) a = -a;"
        " simdgroup_barrier(mem_flags::mem_none); y[i] = simd_sum(a) + int(b);", {},
    ),
    "a stride of full and other rounds": (
        "int acc = 0; for (uint k = lane; k < 150; k += 32) { if (x[k] > 0) acc += x[k]; }"
        " for (uint k = lane + 3; k < 130; k += 5) acc += x[k] * 3;"
        " y[i] = acc + simd_sum(acc);", {},
    ),
    "what a function points to": (
        "int a = x[i]; thread int* p = addr(a); simdgroup_barrier(mem_flags::mem_none);"
        " a += 3; *p *= 2; a += 1; simdgroup_barrier(mem_flags::mem_none); y[i] = simd_sum(1) + a;",
        {"header": ADDRESS},
    ),
    "what a lambda points to, in a loop": (
        "auto addr = [](thread int& q) { return &q; }; int a = x[i]; thread int* p = addr(a);"
        " for (int k = 0; k < 3; k++) { a += k; *p += 10; a ^= 1; y[i] = simd_sum(1); } y[i] += a;",
        {},
    ),
    "what a method points to": (
        "S s0; int a = x[i]; s0.set(a); simdgroup_barrier(mem_flags::mem_none); a += 3;"
        " *s0.p *= 2; a += 1; simdgroup_barrier(mem_flags::mem_none); y[i] = simd_sum(1) + a;",
        {"header": "struct S { thread int* p; void set(thread int& q) { p = &q; } };"},
    ),
    "what only a pointer reaches later": (
        "int a = x[i]; thread int* p = addr(a); simdgroup_barrier(mem_flags::mem_none);"
        " int q[9]; for (int k = 0; k < 9; k++) q[k] = x[i] + k;"
        " simdgroup_barrier(mem_flags::mem_none); y[i] = simd_sum(1) + *p + q[x[i] & 7];",
        {"header": ADDRESS},
    ),
    "an element that only a pointer reaches later": (
        "int arr[4] = {1, x[i], 3, 4}; thread int* p = addr(arr[1]);"
        " simdgroup_barrier(mem_flags::mem_none); int q[9]; for (int k = 0; k < 9; k++)"
        " q[k] = x[i] + k; simdgroup_barrier(mem_flags::mem_none);"
        " y[i] = simd_sum(1) + *p + q[x[i] & 7];",
        {"header": ADDRESS},
    ),
    "a loop that nobody is left for": (
        "int v = 0; for (int k = 0; k < 3; k++) { if (s == 0 || x[i] > 2000) continue;"
        " int q = 100; while (q > 0) q -= s; v += q + simd_sum(1); } y[i] = v;", {"s": 0},
    ),
    "a loop that nobody is left for, after a break": (
        "int v = 0; while (true) { if (x[i] < 5000) break; for (uint z = 1; z != 0; z += uint(s))"
        " v += 1; v += simd_sum(1); } y[i] = v;", {"s": 0},
    ),
    "division by 0": (
        "y[i] = x[i] / s + x[i] % s + simd_sum(1);", {"s": 0},
    ),
    "a member that is a reference": (
        "int v = x[i]; R r{v}; for (int k = 0; k < 3; k++) { R q = R{r.to}; q.to += simd_sum(v);"
        " auto again = R{q.to}; again.to -= k; } y[i] = v + simd_sum(r.to);",
        {"header": "struct R { thread int& to; };"},
    ),
    "a member that is a constant": (
        "int v = x[i]; C c(v, 2); C d = C(c.b, v); y[i] = simd_sum(v) + c.a + c.b * d.a + d.b;",
        {"header": "struct C { const int a; int b; C(int p, int q) : a(p), b(q) {} };"},
    ),
    "an assignment that is none of an initialiser": (
        "C c = x[i]; C d = C(x[i] + 1); D e = D(c); D f = e;"
        " y[i] = simd_sum(f.a) + c.a + d.a + e.a;",
        {"header": "struct C { int a; C(int q) : a(q) {}"
         " thread C& operator=(int o) thread { a = o + 100; return *this; } };"
         "struct D { int a; D(C q) : a(q.a) {} D(const thread D& o) : a(o.a + 1) {}"
         " thread D& operator=(const thread D& o) thread { a = o.a + 100; return *this; } };"},
    ),
    "an assignment to what a reference names": (
        "int v = x[i]; R r{v}; r.to += simd_sum(v); y[i] = v;",
        {"header": "struct R { thread int& to; R(thread int& a) : to(a) {}"
         " thread R& operator=(const thread R& o) thread { to = o.to; return *this; } };"},
    ),
    "commas in the head of a loop": (
        "int v = x[i], a; uint b; for (a = 0, b = i; a < 3; a++, b += 2) v += simd_sum(v) * a + b;"
        " int c, d; for (c = 0, d = 5; c < d; c++, d--) v += simd_max(v) & d; y[i] = v;", {},
    ),
    "a loop whose head synchronises": (
        "int v = x[i], m; for (m = simd_max(v) & 63; m > int(i & 31); m = simd_sum(m) / 40 - 1)"
        " v += simd_sum(v) + m; for (m = i & 3; m < 9; m += simd_max(m)) { if (m == 5) continue;"
        " v ^= m; if (m == 7) break; } y[i] = v;", {},
    ),
    "floats that integers do not hold": (
        "float f = as_type<float>(x[i] * 40503 << (i % 13)); if (i % 5 == 0) f = NAN;"
        " long v = int(f) * 3 + short(f) * 5 + ushort(f) * 7 + char(f) * 11 + uchar(f) * 13;"
        " v += long(f) * 17 + long(ulong(f)) * 19 + uint(int(f)) * 23l + uint(long(f)) * 29l;"
        " y[i] = int(v ^ (v >> 32)) + simd_sum(1);", {},
    ),
    "bits that one lane gives to all": (
        "uint k = uint(s); int v = as_type<int>(simd_shuffle(as_type<float>(0x7fa00000 ^ x[i]),"
        " ushort(k))); v += as_type<int>(simd_broadcast(lane == 3 ? -0.0f : 0.0f, ushort(k - 4)));"
        " y[i] = v ^ int(simd_shuffle(ushort(x[i]), ushort(k)));", {"s": 7},
    ),
    "bits of a lane that is none": (
        "y[i] = as_type<int>(simd_shuffle(as_type<float>(0x7fa00000 ^ x[i]), ushort(s)))"
        " ^ int(simd_shuffle(ushort(x[i]), ushort(s)));", {"s": 40},
    ),
    "atomic additions": (
        "atomic_fetch_add_explicit(&y[i], x[i], memory_order_relaxed);",
        {"atomic": True, "before": PLAIN, "ways": ("auto",)},
    ),
    "atomic additions of some": (
        "if (x[i] > 0) atomic_fetch_add_explicit(&y[i], x[i], memory_order_relaxed);",
        {"atomic": True, "before": PLAIN, "ways": ("auto",)},
    ),
    "atomic additions in a loop": (
        "for (int r = 0; r < 4; r++)"
        " atomic_fetch_add_explicit(&y[(tid + r) % 64], x[i] + simd_sum(1), memory_order_relaxed);",
        {"atomic": True, "ways": ("auto", "split")},
    ),
    "a histogram of a threadgroup": (
        "threadgroup atomic_int h[64]; if (tid < 64) atomic_store_explicit(&h[tid], 0,"
        " memory_order_relaxed); threadgroup_barrier(mem_flags::mem_threadgroup);"
        " atomic_fetch_add_explicit(&h[x[i] & 63], 1, memory_order_relaxed);"
        " threadgroup_barrier(mem_flags::mem_threadgroup); if (tid < 64)"
        " atomic_fetch_add_explicit(&y[tid], atomic_load_explicit(&h[tid], memory_order_relaxed),"
        " memory_order_relaxed);", {"atomic": True, "ways": ("auto", "split")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_all_ways_agree(case: str) -> None:
    body, more = CASES[case]
    threads = more.get("threads", 100)
    source, header = more.get("before", NAMES) + body, more.get("header", "")
    given = {"x": X, "s": np.array(more.get("s", 17), np.int32)}
    names = [name for name in given if re.search(rf"\b{name}\b", body)]
    kernel = ferrule.metal_kernel(
        "agree", names, ["y"], source, header, atomic_outputs=more.get("atomic", False)
    )
    found = {}
    for way in ("fibers", *more.get("ways", ("auto", "split"))):
        with cpu.running(way):
            (found[way],) = kernel(
                inputs=[given[name] for name in names], output_shapes=[(threads,)],
                output_dtypes=[np.int32], grid=(threads, 1, 1), threadgroup=(64, 1, 1),
                init_value=0,
            )  # fmt: skip
    for way, y in found.items():
        np.testing.assert_array_equal(y, found["fibers"], way)
