"""Bodies that divide their x by the length of a row: units of work that lie in one row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import ferrule
from ferrule.devices.cpu import program as cpu

pytestmark = [
    pytest.mark.optimised, pytest.mark.together, pytest.mark.usefixtures("everywhere"),
]  # fmt: skip

Array = NDArray[Any]
ROWS = st.tuples(st.integers(1, 9), st.integers(1, 150))
THREADGROUPS = st.sampled_from([(32, 1, 1), (256, 1, 1), (48, 1, 1), (7, 1, 1)])
HEAD = """
    uint e = thread_position_in_grid.x;
    const int C = x_shape[1];
    const uint row = e / C;
    const int col = e % C;
"""


def both(source: str, *inputs: Array, n: int, **call: Any) -> Array:
    """The output y of a launch over n threads; asserts that fibers give the same bits."""
    found = []
    kernel = ferrule.metal_kernel(
        "rows", ["x", "w", "s"][: len(inputs)], ["y"], source, call.pop("header", ""),
        atomic_outputs=call.pop("atomic_outputs", False),
    )  # fmt: skip
    exact = call.pop("exact", True)
    call = {
        "output_shapes": [(n,)], "output_dtypes": [np.dtype(np.float32)], "init_value": 0,
        "grid": (n, 1, 1), "threadgroup": (64, 1, 1), **call,
    }  # fmt: skip
    for way in ("auto", "fibers"):
        with cpu.running(way):
            (y,) = kernel(inputs=list(inputs), **call)
        found.append(y)
    if exact:
        np.testing.assert_array_equal(*found)
    return found[0]


def text(source: str, *inputs: str, **call: Any) -> str:
    """The C++ text of a kernel."""
    kernel = ferrule.metal_kernel(
        "rows", ["x", "w", "s"][: len(inputs)], ["y"], source,
        atomic_outputs=call.pop("atomic_outputs", False),
    )  # fmt: skip
    f = np.dtype(np.float32)
    return kernel.text(
        "cpu", inputs=list(inputs), output_shapes=[(4096,)], output_dtypes=[f],
        grid=(4096, 1, 1), threadgroup=(64, 1, 1), **call,
    )  # fmt: skip


def values(rows: tuple[int, int], seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(-99, 99, rows).astype(np.float32)


SHIFT = f"""{HEAD}
    const int from = col - shift;
    if (from >= 0 && from < C) y[e] = x[row * C + from]; else y[e] = -1;
"""


@settings(deadline=None, max_examples=40)
@given(ROWS, st.integers(-40, 40), THREADGROUPS)
def test_guarded_neighbours(
    rows: tuple[int, int], shift: int, threadgroup: tuple[int, int, int]
) -> None:
    x = values(rows)
    source = SHIFT.replace("shift", "int(w)")
    y = both(source, x, np.int32(shift), n=x.size, threadgroup=threadgroup)
    expected = np.full(rows, -1, np.float32)
    for c in range(rows[1]):
        if 0 <= c - shift < rows[1]:
            expected[:, c] = x[:, c - shift]
    np.testing.assert_array_equal(y.reshape(rows), expected)


@settings(deadline=None, max_examples=40)
@given(ROWS, st.integers(0, 70), THREADGROUPS)
def test_an_unsigned_index_that_starts_below_zero(
    rows: tuple[int, int], by: int, threadgroup: tuple[int, int, int]
) -> None:
    x = values(rows)
    source = HEAD + (
        "uint k = e - uint(w); const uint n = x_shape[0] * C;"
        "if (k < n) { y[e] = x[k] + row; } else { y[e] = -7; }"
        "if (row > 0) { if (k < n) { y[e] += x[k]; } }"
    )
    y = both(source, x, np.uint32(by), n=x.size, threadgroup=threadgroup)
    flat, row = x.ravel(), np.arange(x.size) // rows[1]
    expected = np.full(x.size, -7, np.float32)
    if by < x.size:
        expected[by:] = flat[: x.size - by] * np.where(row[by:] > 0, 2, 1) + row[by:]
    np.testing.assert_array_equal(y, expected)


CORNERS = f"""{HEAD}
    float sum = 0;
    for (int corner = 0; corner < 4; ++corner) {{
        const int i = int(row) + corner / 2 - 1, j = col + corner % 2;
        if (i >= 0 && i < x_shape[0]) {{
            const float weight = corner % 2 ? 0.25f : 0.5f;
            if (j < C) sum += weight * x[i * C + j];
        }} else {{
            sum += 1;
        }}
    }}
    y[e] = sum;
"""


@settings(deadline=None, max_examples=40)
@given(ROWS, THREADGROUPS)
def test_a_loop_with_branches_by_row(
    rows: tuple[int, int], threadgroup: tuple[int, int, int]
) -> None:
    x = values(rows)
    y = both(CORNERS, x, n=x.size, threadgroup=threadgroup)
    padded = np.pad(x, ((1, 0), (0, 1)))
    expected = np.zeros(rows, np.float32)
    for corner in range(4):
        up, right = corner // 2, corner % 2
        part = padded[up : up + rows[0], right : right + rows[1]] * (0.25 if right else 0.5)
        expected += part + (up == 0) * (np.arange(rows[0]) == 0)[:, None]
    np.testing.assert_array_equal(y.reshape(rows), expected)


@pytest.mark.parametrize("where", ["by row", "by lane", "mixed"])
@pytest.mark.parametrize("columns", [5, 16, 33, 64, 200])
def test_returns_breaks_and_continues(where: str, columns: int) -> None:
    x = values((7, columns))
    leave = {"by row": "row == 3", "by lane": "col % 5 == 3", "mixed": "row + col > 20"}[where]
    skip = {"by row": "row == 2", "by lane": "col % 3 == 1", "mixed": "(row ^ col) & 1"}[where]
    source = f"""{HEAD}
    if (int(e) >= x_shape[0] * C) return;
    float sum = 0;
    for (int k = 0; k < 6; ++k) {{
        if (row == 5) {{ sum += k; }}
        if (k > 1 && ({skip})) continue;
        sum += x[e] * k;
        if (k == 4 && ({leave})) break;
        sum += 1;
    }}
    if ({leave}) {{ y[e] = sum; return; }}
    if (row == 1) {{ y[e] = -sum; return; }}
    y[e] = 2 * sum;
    """
    n = x.size + 50
    y = both(source, x, n=n)
    assert not y[x.size :].any()
    expected = np.zeros_like(x)
    for row, col in np.ndindex(x.shape):
        total, gone, over = 0.0, False, bool(eval_condition(leave, row, col))
        for k in range(6):
            total += k if row == 5 else 0
            if k > 1 and eval_condition(skip, row, col):
                continue
            total += x[row, col] * k
            if k == 4 and over:
                gone = True
                break
            total += 1
        assert gone or not over or eval_condition(skip, row, col)
        expected[row, col] = total if over else -total if row == 1 else 2 * total
    np.testing.assert_array_equal(y[: x.size].reshape(x.shape), expected)


def eval_condition(condition: str, row: int, col: int) -> bool:
    return {
        "row == 3": row == 3, "col % 5 == 3": col % 5 == 3, "row + col > 20": row + col > 20,
        "row == 2": row == 2, "col % 3 == 1": col % 3 == 1,
        "(row ^ col) & 1": bool((row ^ col) & 1),
    }[condition]  # fmt: skip


@pytest.mark.filterwarnings("ignore::ferrule.PortabilityWarning")  # half atomics
@settings(deadline=None, max_examples=30)
@given(ROWS, st.sampled_from([1, 3]), st.sampled_from(["float32", "int32", "float16"]))
def test_rows_added_atomically(rows: tuple[int, int], threads: int, dtype: str) -> None:
    x = np.random.default_rng(1).integers(-3, 4, rows).astype(dtype)
    source = f"""{HEAD}
    if (row % 3 != 1) {{
        atomic_fetch_add_explicit(&y[col], x[e], memory_order_relaxed);
        if (col > 2) {{
            atomic_fetch_add_explicit(&y[col - 1], 2 * x[e], memory_order_relaxed);
        }}
    }}
    """
    kept = ferrule.get_threads()
    ferrule.set_threads(threads)
    try:
        y = both(
            source, x, n=x.size, atomic_outputs=True, output_shapes=[(rows[1],)],
            output_dtypes=[x.dtype], threadgroup=(32, 1, 1),
        )  # fmt: skip
    finally:
        ferrule.set_threads(kept)
    part = x[np.arange(rows[0]) % 3 != 1].astype(np.float64)
    expected = part.sum(axis=0)
    expected[2:-1] += 2 * part.sum(axis=0)[3:]
    np.testing.assert_array_equal(y.astype(np.float64), expected)


@pytest.mark.parametrize("columns", [1, 3, 31, 32, 40, 100])
def test_padded_rows_with_sums(columns: int) -> None:
    x = values((11, columns))
    source = """
    const uint e = thread_position_in_grid.x;
    const int C = x_shape[1];
    const int P = ceildiv(C, threads_per_simdgroup) * threads_per_simdgroup;
    const int col = e % P;
    float v = 0;
    if (col < C) {
        const uint row = e / P;
        if (row != 4) {
            v = x[row * C + col];
            v += 1;
        }
    }
    const float sum = simd_sum(v);
    if (thread_index_in_simdgroup == 0) {
        atomic_fetch_add_explicit(&y[e / P], sum, memory_order_relaxed);
    }
    """
    padded = -(-columns // 32) * 32
    y = both(
        source, x, n=11 * padded, atomic_outputs=True, output_shapes=[(11,)],
        threadgroup=(256, 1, 1),
    )  # fmt: skip
    expected = np.where(np.arange(11) == 4, 0, (x + 1).sum(axis=1))
    np.testing.assert_allclose(y, expected)


COLUMNS = """
    const uint e = thread_position_in_grid.x;
    const int R = x_shape[1];
    {place}
    float sum = 0;
    for (int k = 0; k < R; k++) sum += x[begin + k * C + column];
    {between}
    {guard} for (uint k = R / 3; k < uint(R); k += 2) {{
        const size_t at = begin + k * C + column;
        const float v = x[at];
        if (v > 0) y[at] += sum - v;
        else y[begin + (R - 1 - k) * C + column] = y[begin + column] + 2;
    }}
"""
BY_ROW = "const size_t C = x_shape[2], begin = e / C * R * C; const uint column = e % C;"
OF_GRID = "const int C = x_shape[2], begin = thread_position_in_grid.y * R * C; uint column = e;"


@settings(deadline=None, max_examples=25)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 150)), st.booleans(),
    st.sampled_from(
        ["", "sum += simd_max(0.0f);", "threadgroup_barrier(mem_flags::mem_threadgroup);"]
    ),
    st.booleans(),
)  # fmt: skip
def test_columns(shape: tuple[int, int, int], of_grid: bool, between: str, guarded: bool) -> None:
    x = values(shape)  # type: ignore[arg-type]
    guard = "if (column % 3 != 1)" if guarded else ""
    source = COLUMNS.format(place=OF_GRID if of_grid else BY_ROW, between=between, guard=guard)
    batches, rows, columns = shape
    grid = (columns, batches, 1) if of_grid else (columns * batches, 1, 1)
    y = both(source, x, n=1, grid=grid, output_shapes=[shape])
    expected, sums = np.zeros_like(x), x.sum(axis=1)
    for k in range(rows // 3, rows, 2):
        larger, mirrored = x[:, k] > 0, expected[:, rows - 1 - k]
        first = expected[:, 0] + 2
        expected[:, k] += np.where(larger, sums - x[:, k], 0)
        mirrored[...] = np.where(larger, mirrored, first)
    if guarded:
        expected[..., 1::3] = 0
    np.testing.assert_array_equal(y, expected)


def test_lanes_go_down_columns_side_by_side() -> None:
    for place in (OF_GRID, BY_ROW):
        written = text(COLUMNS.format(place=place, between="", guard=""), "float32[2,9,64]")
        inside = written[written.index("static void fr_in_row") :]
        inside = inside[: inside.index("static void fr_kernel")]
        assert inside.index("k < R;") < inside.index("sum +=") < inside.index("k < uint(R)")
        assert inside.count("for (unsigned fr_i = 0;") >= 3
    for between in ("sum += simd_max(0.0f);", "threadgroup_barrier(mem_flags::mem_none);"):
        inside = text(COLUMNS.format(place=OF_GRID, between=between, guard=""), "float32[2,9,64]")
        inside = inside[inside.index("static void fr_kernel") :]
        assert inside.index("k < R;") < inside.index("fr_i < fr_n", inside.index("k < R;"))
        assert inside.index("fr_i < fr_n", inside.index("k < R;")) < inside.index("sum +=")
    only = COLUMNS[: COLUMNS.index("float sum")] + COLUMNS[COLUMNS.index("{guard}") :]
    for guard in ("", "if (e % 3 == 0)", "if (e > 5) y[e] = 0; else"):
        guarded = only.format(place=OF_GRID, guard=guard).replace("sum - v", "v")
        assert "fr_in_row" in text(guarded, "float32[2,9,64]"), guard
    counted = "float v = 0; for (int k = 0; k < 3; k++) v += x[k * 64 + e]; y[e] = v;"
    head = "const uint e = thread_position_in_grid.x;"
    assert "fr_in_row" not in text(head + counted, "float32[3,64]")


@pytest.mark.parametrize(
    "source",
    [
        HEAD + "int D = C; { int C = 3; D += e / C; } y[e] = D + row;",
        "uint e = thread_position_in_grid.x; int C = x_shape[1]; C += e % 3; y[e] = e / C;",
        "uint e = thread_position_in_grid.x; const int C = x_shape[1]; e += 40; y[e - 40] = e / C;",
        HEAD + "for (int C = 17; C < 20; ++C) y[e] += e / C;",
        HEAD + "auto f = [&](int C) { return e / C; }; y[e] = f(18) + row;",
        HEAD + "if (e / (C) > 2) y[e] = e / ( C ) + x[(e % C)]; else y[e] = x[col] - (e / C);",
        HEAD + "const int z = x[row * C + C - 1 - col]; y[e] = z;",
        HEAD + "thread const int& r = col; y[e] = x[r] + row;",
        HEAD + "int at = col; at += row; y[e] = x[at];",
        HEAD + "const int at = col / 2 + col; y[e] = x[at % C] + row;",
        HEAD + "const short at = col; const ushort b = e; y[e] = x[at] + b;",
        HEAD + "float at = col + 0.5f; int k = at; y[e] = x[k] + (row > 2 ? k : 1);",
        HEAD + "const int at = int(float(col) * 0.5f); if (row > 1) y[e] = x[at];",
    ],
)
def test_what_only_looks_like_a_row(source: str) -> None:
    x = values((9, 37))
    both(source, x, n=x.size, threadgroup=(96, 1, 1))


def test_the_text_is_written_for_rows() -> None:
    written = text(CORNERS, "float32[9,64]")
    assert "fr_in_row" in written
    inside = written[written.index("static void fr_in_row") :]
    assert "if (i >= 0 && i < x_shape[0])" in inside  # outside the loops over lanes
    inside = inside[: inside.index("static void fr_kernel")]
    assert "x[i * C + j]" not in inside  # but by a pointer to neighbours
    assert "fr_in_row" not in text(
        "uint e = thread_position_in_grid.x; y[e] = x[e];", "float32[4096]"
    )
    atomic = f"{HEAD} atomic_fetch_add_explicit(&y[col], x[e], memory_order_relaxed);"
    assert "::fr::split::atomic_add(" in text(atomic, "float32[64,64]", atomic_outputs=True)
