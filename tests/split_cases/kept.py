"""Variables of every kind that a lane keeps from one loop over lanes to a later one."""

from __future__ import annotations

import numpy as np

from .model import HALVES, X, solid

CASES = [
    solid(
        "array_of_halves",
        """
        half m[2] = {halves[i], 0.5h};
        y[i] = simd_sum(int(m[i & 1]));
        y[i] += int(m[0]);
        """,
        want=lambda t: t.sum(np.where(t.i & 1, 0, HALVES[t.i])) + HALVES[t.i],
    ),
    solid(
        "pointer_into_an_array",
        """
        int a[3] = {1, int(i), 3};
        thread int* p = a + 1;
        int q = simd_sum(1);
        p[0] += q;
        p[1] += 2;
        y[i] = p[0] * 100 + p[1];
        """,
        want=lambda t: (t.i + t.sum(1)) * 100 + 5,
    ),
    solid(
        "pointer_to_one_of_two_variables",
        """
        int a = 1, b = int(i);
        thread int* p = (i & 1) ? &a : &b;
        int q = simd_sum(1);
        *p += q;
        y[i] = a * 100 + b;
        """,
        want=lambda t: 100 + t.i + t.sum(1) * np.where(t.i & 1, 100, 1),
    ),
    solid(
        "pointer_from_a_function",
        """
        int a[3] = {1, int(i), 3};
        auto p = next(a);
        int q = simd_sum(1);
        *p += q;
        y[i] = *p;
        """,
        header="inline thread int* next(thread int* p) { return p + 1; }",
        want=lambda t: t.i + t.sum(1),
    ),
    solid(
        "pointer_in_a_struct",
        """
        int a[3] = {1, int(i), 3};
        Holder h = {a};
        int q = simd_sum(1);
        h.p[1] += q;
        y[i] = h.p[1];
        """,
        header="struct Holder { thread int* p; };",
        want=lambda t: t.i + t.sum(1),
    ),
    solid(
        "reference_to_a_component",
        """
        float2 v = float2(1, i);
        thread float& r = v[1];
        int q = simd_sum(1);
        r += q;
        y[i] = int(r) + int(v.y) * 100;
        """,
        want=lambda t: (t.i + t.sum(1)) * 101,
    ),
    solid(
        "reference_to_a_temporary",
        """
        const thread int& r = int(i) + 3;
        int q = simd_sum(r);
        y[i] = q + r;
        """,
        want=lambda t: t.sum(t.i + 3) + t.i + 3,
    ),
    solid(
        "array_of_arrays",
        """
        int a[2][3] = {{1, 2, 3}, {int(i), 5, 6}};
        int q = simd_sum(1);
        a[1][0] += q;
        a[i & 1][2] += 1;
        q = simd_max(q);
        y[i] = a[1][0] * 100 + a[0][2] * 10 + a[1][2];
        """,
        want=lambda t: (t.i + t.sum(1)) * 100 + 36 + np.where(t.i & 1, 1, 10),
    ),
    solid(
        "array_of_vectors",
        """
        float4 a[2] = {float4(1), float4(i, 2, 3, 4)};
        int q = simd_sum(1);
        a[1].x += q;
        a[0].yz = a[1].zw;
        q = simd_max(q);
        y[i] = int(a[1].x * 100 + a[0].y * 10 + a[0].z);
        """,
        want=lambda t: (t.i + t.sum(1)) * 100 + 34,
    ),
    solid(
        "empty_initialisers",
        """
        int a[4] = {};
        float4 v = {};
        int b = {};
        a[i & 3] += 1;
        int q = simd_sum(a[0]);
        y[i] = q * 100 + a[1] * 10 + int(v.x) + b;
        """,
        want=lambda t: t.sum(t.i & 3 == 0) * 100 + (t.i & 3 == 1) * 10,
    ),
    solid(
        "struct",
        """
        P p = {int(i), 2.0f, {3, 4}};
        P r = p;
        int q = simd_sum(p.a);
        p.c[i & 1] += q;
        r.a++;
        q = simd_max(q);
        y[i] = p.c[0] * 100 + p.c[1] + r.a;
        """,
        header="struct P { int a; float b; int c[2]; };",
        want=lambda t: 305 + t.i + t.sum(t.i) * np.where(t.i & 1, 1, 100),
    ),
    solid(
        "const_struct",
        "const P p = {int(i), 2.0f}; int q = simd_sum(p.a); y[i] = q + p.a;",
        header="struct P { int a; float b; };",
        want=lambda t: t.sum(t.i) + t.i,
    ),
    *(
        solid(
            name,
            """
            P p(int(i) + 0);
            P r = p + P(3);
            int q = simd_sum(r.a);
            y[i] = q + p.a * 100 + r.a;
            """,
            header=f"""
            struct P {{
              int a;
              {default}
              P(int v) : a(v) {{}}
              P operator+(P o) const {{ return P(a + o.a); }}
            }};
            """,
            want=lambda t: t.sum(t.i + 3) + t.i * 101 + 3,
        )
        for name, default in (
            ("struct_with_constructors", "P() : a(-1) {}"),
            ("struct_without_a_default_constructor", ""),
        )
    ),
    solid(
        "struct_of_the_body",
        """
        struct Q { int a; int twice() const { return 2 * a; } };
        Q q = {int(i)};
        int sum = simd_sum(q.twice());
        y[i] = sum + q.twice();
        """,
        want=lambda t: t.sum(2 * t.i) + 2 * t.i,
    ),
    solid(
        "enum_and_types_of_the_body",
        """
        enum Kind { One = 1, Two };
        typedef int num;
        using other = float;
        Kind k = i & 1 ? One : Two;
        num a = simd_sum(int(k));
        other b = other(a);
        y[i] = int(b) + k;
        """,
        want=lambda t: t.sum(2 - (t.i & 1)) + 2 - (t.i & 1),
    ),
    solid(
        "volatile_variable",
        "volatile int a = 3; a += int(i); int q = simd_sum(int(a)); y[i] = q + a;",
        want=lambda t: t.sum(t.i + 3) + t.i + 3,
    ),
    solid(
        "auto_of_every_kind",
        """
        auto a = x[i];
        const auto b = x + i;
        auto c = simd_sum(1) + 0.5f;
        const auto& d = x[i];
        auto e = uchar(200) + uchar(100);
        int q = simd_max(e);
        y[i] = a + b[0] + int(c * 2) + d + e + q;
        """,
        want=lambda t: 3 * X[t.i] + 2 * t.sum(1) + 601,
    ),
    solid(
        "bits_of_a_float",
        """
        uint a = as_type<uint>(float(i));
        float b = as_type<float>(simd_max(a));
        y[i] = int(b);
        """,
        want=lambda t: t.max(t.i),
    ),
]
