"""Checks on a GPU itself: Metal bodies that count, under torch's ops, graphs and kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ferrule

torch = pytest.importorskip("torch")
from torch_cuda import ON_GPU  # noqa: E402

pytestmark = ON_GPU

SHIFTED = """uint i = thread_position_in_grid.x;
float v = x[i + 1];
y[i] = v * 2;"""
RULE = "x[N]:float32 -> y[N]:float32"


def op(name: str, source: str, grid: str = "N", rule: str = RULE, **more: Any) -> Any:
    return ferrule.op(name, rule, metal=source, grid=grid, threadgroup=64, **more)


def x(size: int = 1000) -> Any:
    return torch.arange(size, dtype=torch.float32, device="cuda")


def told(findings: Any) -> list[tuple[str, int | None]]:
    return [(finding.kind, finding.line) for finding in findings]


def test_ops_count_what_is_outside() -> None:
    shifted = op("counts_outside", SHIFTED)
    given = x()
    expected = torch.cat([given[1:], torch.zeros(1, device="cuda")]) * 2
    torch.testing.assert_close(shifted(given), expected)
    with ferrule.checking() as findings:
        for _ in range(3):
            torch.testing.assert_close(shifted(given), expected)
    (finding,) = findings
    assert (finding.kind, finding.line, finding.count) == ("bounds", 2, 3)
    assert finding.text == "float v = x[i + 1];" and finding.thread == (39, 0, 0)
    assert finding.threadgroup == (15, 0, 0) and "reads x[1000]" in finding.message
    assert findings.launches == 3
    (note,) = findings.notes
    assert "was checked there" in note
    with ferrule.checking(kernels="other*") as findings:
        shifted(given)
    assert not findings and not findings.launches


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "int64"])
def test_what_is_not_written(dtype: str) -> None:
    half = op(
        f"counts_half_{dtype}", "uint i = thread_position_in_grid.x; if (i < N / 2) y[i] = x[i];",
        rule=f"x[N]:{dtype} -> y[N]:{dtype}", template={"N": "N"},
    )  # fmt: skip
    given = x(64).to(getattr(torch, dtype))
    with ferrule.checking() as findings:
        y = half(given)
        half(given)
    assert torch.equal(y[:32], given[:32])
    (finding,) = findings
    assert (finding.kind, finding.line, finding.count) == ("unwritten", None, 64)
    assert "the first at 32" in finding.message


def test_values_that_are_given_are_kept() -> None:
    zeroed = op("counts_zeroed", "y[thread_position_in_grid.x] = x[0];", grid="1", init_value=0)
    kernel = ferrule.metal_kernel(
        "counts_sevens", ["x"], ["y"], "y[thread_position_in_grid.x] = x[0];"
    )
    given = x(64) + 1
    with ferrule.checking(gpu=True) as findings:
        ours = zeroed(given)
        (sevens,) = kernel(
            inputs=[given], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(64,)],
            output_dtypes=[torch.float32], init_value=7,
        )  # fmt: skip
    assert ours.tolist() == [1.0] + [0.0] * 63 and sevens.tolist() == [1.0] + [7.0] * 63
    assert not findings


def test_nans() -> None:
    roots = op("counts_roots", "uint i = thread_position_in_grid.x;\ny[i] = sqrt(x[i] - 5);")
    with ferrule.checking() as findings:
        roots(x(64))
    assert told(findings) == [("nan", 2)] and findings[0].count == 5
    with ferrule.checking() as findings:
        roots(x(64) + 10)
        roots(torch.full((64,), float("nan"), device="cuda"))
    assert not findings


def test_kernels_and_atomics() -> None:
    counts = ferrule.metal_kernel(
        "counts_bins", ["x"], ["y"],
        "uint i = thread_position_in_grid.x;\n"
        "atomic_fetch_add_explicit(&y[uint(x[i])], 1, memory_order_relaxed);",
        atomic_outputs=True,
    )  # fmt: skip
    call = {
        "inputs": [x(64)], "grid": (64, 1, 1), "threadgroup": (64, 1, 1), "output_shapes": [(60,)],
        "output_dtypes": [torch.int32], "init_value": 0,
    }  # fmt: skip
    with ferrule.checking(gpu=True) as findings:
        (y,) = counts(**call)
    assert y.tolist() == [1] * 60
    assert told(findings) == [("bounds", 2)] and findings[0].count == 4
    with ferrule.checking() as findings:  # over copies on the CPU
        counts(**call)
    assert told(findings) == [("bounds", 2)]


def test_graphs_and_compiled_functions() -> None:
    shifted = op("counts_graphs", SHIFTED)
    given = x()
    with ferrule.checking() as findings:
        shifted(given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = shifted(given)
        for _ in range(4):
            graph.replay()
        torch.cuda.synchronize()
    assert y[:-1].equal(given[1:] * 2)
    (finding,) = findings
    assert (finding.kind, finding.line, finding.count) == ("bounds", 2, 5)
    compiled = torch.compile(lambda a: shifted(a) + 1)
    compiled(given)
    with ferrule.checking() as findings:
        compiled(given)
    assert told(findings) == [("bounds", 2)]


def test_clean_bodies() -> None:
    rows = op(
        "counts_rows",
        """threadgroup float part[2];
uint r = threadgroup_position_in_grid.x, i = thread_position_in_threadgroup.x;
float s = 0;
for (uint k = i; k < N; k += 64) s += x[r * N + k];
s = simd_sum(s);
if (thread_index_in_simdgroup == 0) part[simdgroup_index_in_threadgroup] = s;
threadgroup_barrier(mem_flags::mem_threadgroup);
if (i == 0) y[r] = part[0] + part[1];""",
        rule="x[M, N]:T -> y[M]:float32", grid="M * 64", template={"N": "N"},
    )  # fmt: skip
    given = torch.randn(33, 500, device="cuda")
    with ferrule.checking() as findings:
        y = rows(given)
    torch.testing.assert_close(y, given.sum(1), rtol=1e-4, atol=1e-4)
    assert not findings and findings.launches == 1


def test_the_switch() -> None:
    """Without guards the text has no comparison, and what is inside is the same."""
    kernel = ferrule.metal_kernel("unguarded", ["x"], ["y"], SHIFTED)
    given = torch.zeros(2048, device="cuda")
    given[:1001] = x(1001)
    ferrule.set_robust(False)
    try:
        (y,) = kernel(
            inputs=[given[:1000]], grid=(1000, 1, 1), threadgroup=(64, 1, 1),
            output_shapes=[(1000,)], output_dtypes=[torch.float32],
        )  # fmt: skip
    finally:
        ferrule.set_robust(None)
    assert np.array_equal(y.cpu().numpy(), 2 * np.arange(1, 1001, dtype=np.float32))
