"""Elements of private arrays that are read before they are set, and ways to set them unseen."""

from __future__ import annotations

import numpy as np

import ferrule

from .planted import Case, Planted, planted, ramp


def private(name: str, source: str, *mends: tuple[str, str], **more: object) -> Planted:
    """A body of which each thread has an array of its own; it gives what it was given."""
    return planted(
        "uninitialised",
        f"private_{name}",
        f"uint i = thread_position_in_grid.x;\n{source}",
        *mends,
        inputs=lambda: {"x": ramp(64)},
        **{"want": lambda x: x, **more},
    )


UNSET_ELEMENTS: list[Planted] = [
    private(
        "element_by_number",
        "float w[4];\nw[0] = x[i];\nw[1] = 0;\ny[i] = w[0] + w[2]; // BUG\n",
        ("w[2]", "w[1]"),
    ),
    private(
        "loop_that_sets_too_few",
        """\
float w[4];
for (uint k = 0; k < 3; ++k) w[k] = x[i];
float s = -2 * x[i];
for (uint k = 0; k < 4; ++k) {
    s += w[k]; // BUG
}
y[i] = s;
""",
        ("k < 4", "k < 3"),
    ),
    private(
        "set_in_one_branch",
        """\
half w[2], v[3];
w[0] = 1.0h;
v[2] = 0.0h;
if (i >= 8) w[1] = 1.0h;
y[i] = x[i] * float(w[1]) + float(v[2]); // BUG
""",
        ("if (i >= 8) w[1]", "w[1]"),
    ),
    private(
        "added_to",
        """\
float w[2][3];
for (uint k = 0; k < 5; ++k) w[k / 3][k % 3] = 0;
w[1][1] += x[i];
w[1][2] += x[i]; // BUG
y[i] = w[1][1];
""",
        ("k < 5", "k < 6"),
    ),
    private(
        "vector",
        "float4 w[2];\nw[0] = float4(x[i]);\ny[i] = dot(w[0], w[1]); // BUG\n",
        ("w[0] = float4(x[i])", "w[0] = w[1] = float4(x[i]) / 2"),
        want=lambda x: x * x,
    ),
    private(
        "of_an_earlier_round",
        """\
float s = 0;
for (uint k = 0; k < 2; ++k) {
    float w[2];
    if (k == 0) w[0] = x[i];
    s += w[0]; // BUG
}
y[i] = s;
""",
        ("k < 2", "k < 1"),
    ),
    private(
        "index_of_another",
        """\
uint order[3];
float w[3] = {x[i], 0, 0};
order[0] = 2;
order[2] = 0;
y[i] = w[order[order[0] - 1] % 3]; // BUG
""",
        ("order[0] - 1", "order[0]"),
    ),
]


def right(name: str, source: str, header: str = "") -> Case:
    """As `private`, and right."""
    return Case(
        f"private_array_{name}",
        f"uint i = thread_position_in_grid.x;\n{source}",
        lambda: {"x": ramp(64)},
        header=header,
        want=lambda x: x,
    )


CLEAN_ELEMENTS = [
    right(
        "set_by_helpers",
        "float w[4];\nfill(w, x[i]);\nfloat v[2];\nput(v[1], w[3]);\ny[i] = v[1];\n",
        "inline void fill(thread float* p, float v) { for (int k = 0; k < 4; ++k) p[k] = v; }\n"
        "inline void put(thread float& to, float v) { to = v; }\n",
    ),
    right(
        "set_by_macros",
        "#define SET(a, v) a = v\n#define W(k) w##k\n#define V v[1]\n"
        "float w0[2], v[2], u[2];\nW(0)[1] = x[i];\nV = w0[1];\nSET(u[0], v[1]);\ny[i] = u[0];\n",
    ),
    right(
        "set_by_a_macro_of_the_header",
        "float w[2];\nPUT(1);\ny[i] = w[1];\n",
        "#define PUT(k) w[k] = x[i]\n",
    ),
    right(
        "set_through_names",
        """\
float w[4], v[2], u[2];
thread float& first = w[0];
first = x[i];
thread float* second = &w[1];
*second = w[0];
for (thread float& each : v) each = w[1];
auto set = [&](float a) { u[1] = a; };
set(v[1]);
y[i] = u[1];
""",
    ),
    right(
        "set_in_parts",
        """\
float4 w[2];
w[1].x = x[i];
w[1][1] = 1;
(i > 3 ? w[0].z : w[0].y) = 2;
y[i] = w[1].x * w[1].y * (i > 3 ? w[0].z : w[0].y) / 2;
""",
    ),
    right(
        "read_where_it_is_set",
        """\
float w[8];
for (uint k = 0; k < i % 8; ++k) w[k] = k;
float s = x[i];
for (uint k = 0; k < 8; ++k) s += k < i % 8 ? w[k] - k : 0;
float v[2][2];
v[0][1] = v[1][0] = s;
v[1][0]++;
y[i] = v[int(v[0][1]) < 0 ? 1 : 0][1];
""",
    ),
    right(
        "of_structs_that_set_themselves",
        "Part w[2];\nw[1].b = x[i];\ny[i] = w[0].a + w[1].b;\n",
        "struct Part {\n    float a = 0;\n    float b;\n};\n",
    ),
    right(
        "in_a_switch",
        """\
switch (i % 2) {
    float w[2];
    case 0: w[0] = x[i]; y[i] = w[0]; break;
    case 1: {
        float v[2];
        v[1] = x[i];
        y[i] = v[1];
    }
}
""",
    ),
    right(
        "of_another_name_within",
        """\
float w[2];
w[0] = x[i];
{
    float w[2] = {1, 2};
    w[0] = w[1];
}
float s = w[0];
y[i] = s;
""",
    ),
    Case(
        "private_array_of_a_template",
        """\
uint i = thread_position_in_grid.x;
constexpr int n = D / 2;
T w[n], v[2][n];
for (int k = 0; k < n; ++k) {
    w[k] = x[i];
    v[k % 2][k] = w[k];
}
y[i] = float(v[1][n - 1] + w[0] - w[n - 1]);
""",
        lambda: {"x": ramp(64, start=1)},
        want=lambda x: x,
        template=(("T", ferrule.float16), ("D", 8)),
    ),
    Case(
        "private_array_as_a_queue",
        """\
uint i = thread_position_in_grid.x;
float best[4];
uint count = 0;
for (uint k = 0; k < 8; ++k) {
    float v = x[8 * i + k];
    uint at = min(count, 3u);
    if (count == 4 && v <= best[3]) continue;
    while (at > 0 && best[at - 1] < v) {
        best[at] = best[at - 1];
        --at;
    }
    best[at] = v;
    count = min(count + 1, 4u);
}
y[i] = best[0] + best[1] + best[2] + best[3];
""",
        lambda: {"x": np.random.default_rng(3).permutation(64).astype(np.float32)},
        "y:float32[8]",
        lambda x: np.sort(x.reshape(8, 8))[:, 4:].sum(1),
        grid=8,
        threadgroup=8,
    ),
]
