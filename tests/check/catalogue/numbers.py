"""Numbers that are none, and arithmetic that leaves its type."""

from __future__ import annotations

import numpy as np

from .planted import BARRIER, Planted, planted, ramp

INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def with_one(value: float, dtype: str = "float32", start: int = 1) -> np.ndarray:
    """64 numbers from ``start`` on, one of which is ``value``."""
    x = ramp(64, dtype=dtype, start=start)
    x[37] = value
    return x


def unary(
    name: str, bad: str, good: str, value: float, want: object, dtype: str = "float32"
) -> Planted:
    """``y[i] = bad`` of ``v``, one of which is ``value``."""
    return planted(
        "nan",
        name,
        f"""\
uint i = thread_position_in_grid.x;
float v = x[i];
float w = {bad}; // BUG
y[i] = w + 1.0f;
""",
        (bad, good),
        inputs=lambda: {"x": with_one(value, dtype)},
        want=want,
    )


NAN: list[Planted] = [
    unary("zero_by_zero", "v / v", "v == 0.0f ? 1.0f : v / v", 0, lambda x: 1 + x**0),
    unary("one_by_zero", "1.0f / v", "1.0f / max(v, 1.0f)", 0, lambda x: 1 + 1 / np.maximum(x, 1)),
    unary("log_of_negative", "log(v)", "log(abs(v))", -3, lambda x: 1 + np.log(np.abs(x))),
    unary("log_of_zero", "metal::log(v)", "metal::log(v + 1.0f)", 0, lambda x: 1 + np.log1p(x)),
    unary(
        "root_of_negative",
        "sqrt(v)",
        "sqrt(max(v, 0.0f))",
        -1,
        lambda x: 1 + np.maximum(x, 0) ** 0.5,
    ),
    unary("rsqrt_of_zero", "rsqrt(v)", "rsqrt(v + 1.0f)", 0, lambda x: 1 + (x + 1) ** -0.5),
    unary(
        "exp_too_large", "exp(v)", "exp(min(v, 1.0f))", 100, lambda x: 1 + np.exp(np.minimum(x, 1))
    ),
    unary(
        "power_of_negative", "pow(v, 0.5f)", "pow(abs(v), 0.5f)", -4, lambda x: 1 + np.abs(x) ** 0.5
    ),
    unary(
        "remainder_by_zero",
        "fmod(7.0f, v)",
        "fmod(7.0f, v + 1.0f)",
        0,
        lambda x: 1 + np.fmod(7, x + 1),
    ),
    planted(
        "nan",
        "difference_of_infinities",
        """\
uint i = thread_position_in_grid.x;
float most = -INFINITY;
for (uint k = 0; k < 4; ++k) most = max(most, mask[4 * i + k] ? x[4 * i + k] : -INFINITY);
float s = 0;
for (uint k = 0; k < 4; ++k) {
    float v = mask[4 * i + k] ? x[4 * i + k] : -INFINITY;
    s += exp(v - most); // BUG
}
y[i] = s;
""",
        ("float s = 0;", "if (most == -INFINITY) most = 0.0f;\nfloat s = 0;"),
        inputs=lambda: {"x": ramp(64, 4) % 2, "mask": (ramp(64, 4) // 4) != 5},
        want=lambda x, mask: np.where(mask, np.exp(x - 1), 0).sum(1),
    ),
    planted(
        "nan",
        "sum_too_large",
        """\
uint i = thread_position_in_grid.x;
float s = x[2 * i] + x[2 * i + 1]; // BUG
y[i] = s * 0.5f;
""",
        ("x[2 * i] + x[2 * i + 1]", "x[2 * i] * 0.5f + x[2 * i + 1] * 0.5f"),
        ("s * 0.5f", "s"),
        inputs=lambda: {"x": np.where(ramp(128) // 2 == 9, np.float32(2e38), ramp(128))},
        want=lambda x: x[::2] / 2 + x[1::2] / 2,
    ),
    planted(
        "nan",
        "square_too_large",
        """\
uint i = thread_position_in_grid.x;
y[i] = norm(x[i], 3.0f);
""",
        (
            "sqrt(a * a + b * b)",
            "abs(a) > 1e10f ? abs(a) : sqrt(a * a + b * b)",
        ),
        header="""\
inline float norm(float a, float b) {
    return sqrt(a * a + b * b); // BUG
}
""",
        inputs=lambda: {"x": with_one(1e20)},
        want=lambda x: np.hypot(x, 3),
    ),
    planted(
        "nan",
        "variance_of_nothing",
        """\
uint r = thread_position_in_grid.x;
float s = 0, q = 0;
for (uint c = 0; c < 4; ++c) s += x[4 * r + c];
for (uint c = 0; c < 4; ++c) q += (x[4 * r + c] - s / 4) * (x[4 * r + c] - s / 4);
for (uint c = 0; c < 4; ++c) {
    y[4 * r + c] = (x[4 * r + c] - s / 4) / sqrt(q / 4); // BUG
}
""",
        ("sqrt(q / 4)", "sqrt(q / 4 + 1.0f)"),
        inputs=lambda: {"x": ramp(16, 4) * (ramp(16, 1) != 7)},
        outputs="y:float32[16,4]",
        grid=16,
        want=lambda x: (x - x.mean(1, keepdims=True)) / (x.var(1, keepdims=True) + 1) ** 0.5,
    ),
    planted(
        "nan",
        "mean_of_no_elements",
        f"""\
threadgroup float sums[64];
uint l = thread_position_in_threadgroup.x;
sums[l] = x[l] * float(count[l] % 3);
{BARRIER}y[l] = sums[l ^ 1] / float(count[l] % 3); // BUG
""",
        ("/ float(count[l] % 3)", "/ max(float(count[l] % 3), 1.0f)"),
        inputs=lambda: {"x": ramp(64), "count": ramp(64, dtype="uint32")},
        want=lambda x, count: (x * (x % 3)).reshape(32, 2)[:, ::-1].ravel() / np.maximum(x % 3, 1),
    ),
    planted(
        "nan",
        "infinity_times_zero",
        """\
uint i = thread_position_in_grid.x;
y[i] = x[i] * (i < 32 ? 1.0f : 0.0f); // BUG
""",
        ("x[i] * (i < 32 ? 1.0f : 0.0f)", "i < 32 ? x[i] : 0.0f"),
        inputs=lambda: {"x": with_one(np.inf)},
        want=lambda x: np.where(np.arange(64) < 32, x, 0),
    ),
]

BY_INTEGERS = [
    planted(
        "arithmetic",
        name,
        f"""\
uint i = thread_position_in_grid.x;
y[i] = {bad}; // BUG
""",
        (bad, good),
        inputs=lambda value=value: {"x": with_one(value, "int32")},
        outputs="y:int32[64]",
        want=want,
    )
    for name, bad, good, value, want in [
        ("sum", "x[i] + 10", "min(x[i], 1000) + 10", INT_MAX, lambda x: np.minimum(x, 1000) + 10),
        ("difference", "x[i] - 2", "max(x[i], 0) - 2", INT_MIN, lambda x: np.maximum(x, 0) - 2),
        ("product", "x[i] * x[i]", "x[i] * (x[i] & 255)", 70000, lambda x: x * (x & 255)),
        ("least_negated", "-x[i]", "-max(x[i], -5)", INT_MIN, lambda x: -np.maximum(x, -5)),
        (
            "divided_by_zero",
            "100 / x[i]",
            "100 / max(x[i], 1)",
            0,
            lambda x: 100 // np.maximum(x, 1),
        ),
        ("remainder_by_zero", "100 % x[i]", "100 % (x[i] | 1)", 0, lambda x: 100 % (x | 1)),
        (
            "least_by_minus_one",
            "x[i] / -1",
            "max(x[i], 0) / -1",
            INT_MIN,
            lambda x: -np.maximum(x, 0),
        ),
        ("shift_too_far", "1 << x[i] % 40", "1 << x[i] % 30", 39, lambda x: 1 << x % 30),
        (
            "shift_by_negative",
            "1000 >> x[i] % 20",
            "1000 >> abs(x[i]) % 20",
            -3,
            lambda x: 1000 >> abs(x) % 20,
        ),
        (
            "right_shift_too_far",
            "x[i] >> min(x[i], 32)",
            "x[i] >> min(x[i], 31)",
            50,
            lambda x: x >> np.minimum(x, 31),
        ),
    ]
]

ARITHMETIC: list[Planted] = [
    *BY_INTEGERS,
    planted(
        "arithmetic",
        "unsigned_by_zero",
        """\
uint i = thread_position_in_grid.x;
uint share = x[i] / (x[i] % 4); // BUG
y[i] = share;
""",
        ("(x[i] % 4)", "(x[i] % 4 + 1)"),
        inputs=lambda: {"x": ramp(64, dtype="uint32")},
        outputs="y:uint32[64]",
        want=lambda x: x // (x % 4 + 1),
    ),
    planted(
        "arithmetic",
        "sum_in_a_loop",
        """\
uint i = thread_position_in_grid.x;
int s = 0;
for (uint k = 0; k < 4; ++k) {
    s += x[4 * i + k]; // BUG
}
y[i] = s >> 2;
""",
        ("int s", "long s"),
        inputs=lambda: {"x": ramp(64, 4, dtype="int32") + 600_000_000},
        outputs="y:int32[64]",
        want=lambda x: x.sum(1, dtype=np.int64) >> 2,
    ),
    planted(
        "arithmetic",
        "product_of_longs",
        """\
uint i = thread_position_in_grid.x;
y[i] = x[i] * 10; // BUG
""",
        ("x[i] *", "min(x[i], long(1000)) *"),
        inputs=lambda: {"x": with_one(2**62, "int64")},
        outputs="y:int64[64]",
        want=lambda x: np.minimum(x, 1000) * 10,
    ),
    planted(
        "arithmetic",
        "half_of_a_float",
        """\
uint i = thread_position_in_grid.x;
y[i] = half(x[i] * 2.0f); // BUG
""",
        ("half(x[i] * 2.0f)", "half(min(x[i] * 2.0f, 65504.0f))"),
        inputs=lambda: {"x": with_one(40000)},
        outputs="y:float16[64]",
        also=["nan"],
        want=lambda x: np.minimum(2 * x, 65504),
    ),
    planted(
        "arithmetic",
        "half_stored_without_a_word",
        """\
uint i = thread_position_in_grid.x;
float v = x[i] * x[i];
y[i] = v; // BUG
""",
        ("x[i] * x[i]", "x[i] * 0.5f"),
        inputs=lambda: {"x": with_one(1000)},
        outputs="y:float16[64]",
        also=["nan"],
        want=lambda x: x / 2,
    ),
    planted(
        "arithmetic",
        "half_product",
        """\
uint i = thread_position_in_grid.x;
half v = x[i];
half square = v * v; // BUG
y[i] = float(square);
""",
        ("half square = v * v", "float square = float(v) * float(v)"),
        inputs=lambda: {"x": with_one(300, "float16")},
        also=["nan"],
        want=lambda x: x.astype(np.float32) ** 2,
    ),
    planted(
        "arithmetic",
        "half_sum",
        """\
uint i = thread_position_in_grid.x;
half s = 0.0h;
for (uint k = 0; k < 4; ++k) {
    s += x[4 * i + k]; // BUG
}
y[i] = float(s);
""",
        ("half s = 0.0h", "float s = 0.0f"),
        ("s += x[4 * i + k]", "s += float(x[4 * i + k])"),
        inputs=lambda: {"x": np.full((64, 4), 20000, np.float16)},
        also=["nan"],
        want=lambda x: x.sum(1, dtype=np.float32),
    ),
    planted(
        "arithmetic",
        "misaligned_vector_read",
        """\
uint i = thread_position_in_grid.x;
float4 v = *(const device float4*)(x + 3 * i); // BUG
y[i] = v.x + v.y + v.z + v.w;
""",
        ("float4 v = *(const device float4*)", "float4 v = *(const device packed_float4*)"),
        inputs=lambda: {"x": ramp(193)},
        want=lambda x: [x[3 * i : 3 * i + 4].sum() for i in range(64)],
    ),
    planted(
        "arithmetic",
        "misaligned_vector_write",
        """\
uint i = thread_position_in_grid.x;
device float* to = y + 6 * i;
*(device float4*)to = float4(x[i]); // BUG
to[4] = to[5] = 0.0f;
""",
        (
            "*(device float4*)to = float4(x[i])",
            "*(device float2*)to = *(device float2*)(to + 2) = float2(x[i])",
        ),
        inputs=lambda: {"x": ramp(16)},
        outputs="y:float32[16,6]",
        grid=16,
        want=lambda x: x[:, None] * (np.arange(6) < 4),
    ),
    planted(
        "arithmetic",
        "misaligned_word",
        """\
uint i = thread_position_in_grid.x;
uint word = *(const device uint*)(x + 5 * i); // BUG
y[i] = word;
""",
        ("5 * i", "4 * i"),
        inputs=lambda: {"x": ramp(64 * 5, dtype="uint8")},
        outputs="y:uint32[64]",
        want=lambda x: x[:256].view(np.uint32),
    ),
]

NUMBERS: list[Planted] = NAN + ARITHMETIC
