"""Random bodies: derived tangents are the central differences of the body itself, in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import ferrule

pytestmark = pytest.mark.filterwarnings("ignore:.*Apple's compiler")

VARIABLES = ("a", "b", "c")
BEGIN = """
uint i = thread_position_in_grid.x, lane = thread_index_in_simdgroup;
threadgroup T shared[32];
T a = x[i], b = w[i], c = 1;
T own[3] = {a, b, a * b};
auto twisted = [&](T v) { if (v > T(0.3)) return sin(v); return v * v; };
"""
END = "y[i] = a + b * c + own[0] * own[1] - own[2];\n"
HEADER = """
template <typename U> U mixed(U p, U q) { U r = p; for (int k = 0; k < 2; ++k) r = r * q + p; return r; }
"""  # noqa: E501

names = st.sampled_from(VARIABLES)
places = st.one_of(names, st.sampled_from(["own[0]", "own[1]", "own[2]"]))
numbers = st.sampled_from(["T(0.5)", "T(-1.25)", "T(2)", "T(0.1)"])


def expressions(depth: int) -> st.SearchStrategy[str]:
    """Smooth expressions that stay small, nearly everywhere."""
    if not depth:
        return st.one_of(places, numbers)
    inner = expressions(depth - 1)
    return st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from("+-*"), inner),
        st.builds("{} / ({} * {} + T(1.5))".format, inner, places, places).map(
            lambda text: text if text.split(" * ")[0].endswith(text.split(" * ")[1].split(" ")[0])
            else f"tanh({text.split(' / ')[0]})"
        ),
        st.builds("{}({})".format, st.sampled_from(["sin", "tanh", "atan", "twisted"]), inner),
        st.builds("exp(-{0} * {0})".format, places),
        st.builds("{}({}, {})".format, st.sampled_from(["max", "min", "mixed"]), places, inner),
        st.builds("({} < {} ? {} : {})".format, places, places, inner, inner),
    )  # fmt: skip


def statements(depth: int) -> st.SearchStrategy[str]:
    """Statements that all lanes run."""
    assigned = st.builds(
        "{} {} tanh({});\n".format, places, st.sampled_from(["=", "+=", "*=", "-="]), expressions(2)
    )
    meeting = st.sampled_from([
        "a = tanh(simd_sum(b) * T(0.1));\n",
        "c = simd_shuffle_xor(a * b, 1);\n",
        "b = simd_broadcast(tanh(c), 5);\n",
        "shared[lane] = tanh(a); threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "c += shared[31 - lane] * b; threadgroup_barrier(mem_flags::mem_threadgroup);\n",
        "b = simd_max(a);\n",
        "c = tanh(simd_prefix_exclusive_sum(a));\n",
    ])  # fmt: skip
    if not depth:
        return st.one_of(assigned, meeting)
    inner = st.lists(statements(depth - 1), min_size=1, max_size=3).map("".join)
    own = st.lists(assigned, min_size=1, max_size=3).map("".join)
    return st.one_of(
        assigned,
        meeting,
        st.builds("for (int k = 0; k < 3; ++k) {{ {} }}\n".format, inner),
        st.builds("if ({} < {}) {{ {} }} else {{ {} }}\n".format, places, places, own, own),
        st.builds("{{ int k = 0; while (k < 2) {{ {} ++k; }} }}\n".format, inner),
    )


@settings(max_examples=25, deadline=None)
@given(st.lists(statements(2), min_size=1, max_size=5).map("".join))
def test_tangents_are_differences(middle: str) -> None:
    op = ferrule.op(
        "drawn", "x[N]:T, w[N]:T -> y[N]:T", metal=BEGIN + middle + END, header=HEADER,
        grid="N", threadgroup=32,
    )  # fmt: skip
    derived = op.derive_jvp()
    rng = np.random.default_rng(len(middle))
    x, w, tx, tw = (rng.normal(size=64) for _ in range(4))
    given_ = derived(x, w, tx, tw)
    estimates = []
    for step in (1e-5, 3e-6):
        ahead, behind = op(x + step * tx, w + step * tw), op(x - step * tx, w - step * tw)
        estimates.append((ahead - behind) / (2 * step))
    # Where both steps agree, no branch lies between.
    scale = np.maximum(np.abs(given_), 1)
    smooth = np.abs(estimates[0] - estimates[1]) < 1e-4 * scale
    assume(np.mean(smooth) > 0.5)
    error = np.abs(given_ - estimates[1]) / scale
    assert np.all(error[smooth] < 1e-3), (middle, float(error[smooth].max()))
