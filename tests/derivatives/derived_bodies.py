"""Bodies whose derivatives are tested, the same in torch, and torch's tangents in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

I = "uint i = thread_position_in_grid.x;\n"  # noqa: E741
SIMD = "uint i = thread_position_in_grid.x, lane = thread_index_in_simdgroup;\n"


def tangents(function: Callable[..., Any], primals: Any, tangents_: Any) -> Any:
    """torch's, in float64."""
    wide = [tuple(x.double() for x in xs) for xs in (primals, tangents_)]
    return torch.func.jvp(function, *wide)[1]


def assert_close(given: Any, wanted: Any, tolerance: float = 2e-6) -> None:
    error = (given.double() - wanted).abs().max()
    assert error <= tolerance * wanted.abs().max().clamp(min=1e-3), (given, wanted)


class Body(NamedTuple):
    """A body, its rule and launch, and the same in torch."""

    rule: str
    source: str
    twin: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    more: dict[str, Any]


def running(x: Any) -> Any:
    h, out = torch.zeros_like(x[0]), []
    for row in x:
        h = torch.tanh(0.5 * h + row)
        out.append(h)
    return torch.stack(out)


def in_lanes(x: Any) -> Any:
    n, d = x[:, :3].norm(dim=1), x[:, 0] * x[:, 2] + x[:, 1] * x[:, 3] + x.norm(dim=1)
    w = d * x[:, 3]
    return torch.stack([x[:, 0] / n, x[:, 2] / n * d, w, torch.maximum(x[:, 0], w)], 1)


BODIES: dict[str, Body] = {
    "rows": Body(
        "x[R,D]:T, w[D]:T, eps:float32 -> y[R,D]:T",
        """
        threadgroup float part[32];
        uint row = threadgroup_position_in_grid.x, t = thread_position_in_threadgroup.x;
        float sum = 0;
        for (uint i = t; i < D; i += 64) { float v = x[row * D + i]; sum += v * v; }
        sum = simd_sum(sum);
        if (thread_index_in_simdgroup == 0) part[simdgroup_index_in_threadgroup] = sum;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float inv = metal::precise::rsqrt((part[0] + part[1]) / D + eps);
        for (uint i = t; i < D; i += 64) y[row * D + i] = T(x[row * D + i] * inv) * w[i];
        """,
        lambda x, w: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * w,
        ((3, 100), (100,)),
        {"grid": "R*64", "threadgroup": 64},
    ),
    "state over time": Body(
        "x[L,N]:float32 -> y[L,N]:float32",
        I + "float h = 0;\nfor (int t = 0; t < L; ++t) { h = tanh(0.5f * h + x[t * N + i]); "
        "y[t * N + i] = h; }",
        running,
        ((7, 33),),
        {"grid": "N", "threadgroup": 64},
    ),
    "pointers": Body(
        "x[L,N]:float32 -> y[L,N]:float32",
        I + "auto p = x + i; device float* q = y + i;\nfloat h = 0;\n"
        "for (int t = 0; t < L; ++t) { h = tanh(0.5f * h + *p); q[0] = h; p += N; q += N; }",
        running,
        ((5, 16),),
        {"grid": "N", "threadgroup": 64},
    ),
    "functions": Body(
        "x[N]:T, w[N]:T -> y[N]:T",
        I + "y[i] = scaled<T>(squared(x[i]), w[i]) + power(x[i], 3) + chosen(w[i]);",
        lambda x, w: 2 * x * x * w + x**3 + torch.where(w > 0, w * w, -w),
        ((50,), (50,)),
        {
            "grid": "N", "threadgroup": 64,
            "header": """
            template <typename U> U scaled(U a, U b) { const U two = 2; return two * a * b; }
            inline float squared(float a) { return a * a; }
            float power(float a, int n) {
              float r = 1;
              for (int k = 0; k < n; ++k) r *= a;
              return r;
            }
            float chosen(float a) { if (a > 0) return a * a; return -a; }
            """,
        },
    ),
    "vectors": Body(
        "x[N,4]:float32 -> y[N,4]:float32",
        I + "float4 v = float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);\n"
        "float3 n = normalize(v.xyz);\nfloat d = dot(v.xy, v.zw) + length(v);\n"
        "v.w = d * v.w;\ny[4 * i] = n.x; y[4 * i + 1] = n.z * d; y[4 * i + 2] = v.w;\n"
        "y[4 * i + 3] = max(v, v.wzyx).x;",
        in_lanes,
        ((20, 4),),
        {"grid": "N", "threadgroup": 64},
    ),
    "own arrays": Body(
        "x[N,4]:float32 -> y[N]:float32",
        I + "float s[4];\nfor (int k = 0; k < 4; ++k) s[k] = x[4 * i + k];\n"
        "for (int k = 1; k < 4; ++k) s[k] *= s[k - 1];\ny[i] = s[0] + s[3];",
        lambda x: x[:, 0] + x.prod(1),
        ((20, 4),),
        {"grid": "N", "threadgroup": 64},
    ),
    "lambdas and ties": Body(
        "x[N]:float32 -> y[N]:float32",
        SIMD + "auto f = [&](float a) { return a * a; };\nfloat m = simd_max(f(round(x[i]) + "
        "0.5f * x[i] - 0.5f * x[i]) * x[i]);\ny[i] = m;",
        lambda x: (x.round() ** 2 * x).reshape(-1, 32).amax(1).repeat_interleave(32),
        ((64,),),
        {"grid": "N", "threadgroup": 32},
    ),
    "lanes": Body(
        "x[N]:float32 -> y[N]:float32",
        SIMD + "float v = x[i] * x[i];\ny[i] = simd_prefix_inclusive_sum(v) + 2 * "
        "simd_shuffle_xor(v, 1) + simd_broadcast(v, 3) * simd_shuffle(v, 31 - lane);",
        lambda x: (
            (x * x).reshape(-1, 32).cumsum(1)
            + 2 * (x * x).reshape(-1, 32)[:, [k ^ 1 for k in range(32)]]
            + (x * x).reshape(-1, 32)[:, 3:4] * (x * x).reshape(-1, 32).flip(1)
        ).reshape(-1),
        ((64,),),
        {"grid": "N", "threadgroup": 32},
    ),
    "returns and breaks": Body(
        "x[N]:float32 -> y[N]:float32",
        I + "if (i >= 10) { y[i] = x[i]; return; }\nfloat a = x[i];\nint k = 0;\n"
        "while (true) { a *= x[i]; k++; if (k > 2) break; }\ny[i] = a;",
        lambda x: torch.where(torch.arange(len(x)) >= 10, x, x**4),
        ((20,),),
        {"grid": "N", "threadgroup": 64},
    ),
    "added atomically": Body(
        "x[N]:float32 -> y[4]:float32",
        I + "atomic_fetch_add_explicit(&y[i % 4], x[i] * x[i], memory_order_relaxed);",
        lambda x: (x * x).reshape(-1, 4).sum(0),
        ((40,),),
        {"grid": "N", "threadgroup": 64, "atomic_outputs": True, "init_value": 0},
    ),
    "constants": Body(
        "x[N]:float32, k:int32 -> y[N]:float32",
        I + "constexpr float c[2] = {0.5f, 2.0f};\ny[i] = x[i] * c[k % 2] * FACTOR + M_PI_F;",
        lambda x: x * 2.0 * 3,
        ((20,),),
        {"grid": "N", "threadgroup": 64, "header": "constant float FACTOR = 3;"},
    ),
}  # fmt: skip
NUMBERS = {"rows": (1e-5,), "constants": (1,)}
