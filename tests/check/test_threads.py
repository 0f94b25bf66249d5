"""Large launches are checked on several threads: what is told is what one thread tells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import ferrule
from ferrule.check.launches import watched
from ferrule.check.reports.findings import Finding

THREADS, GROUP = 8192, 256
I = "uint i = thread_position_in_grid.x, t = thread_position_in_threadgroup.x;\n"  # noqa: E741

# Bodies, and whether one run of them, on several threads, is enough.
BODIES = {
    "each its own": (I + "y[i] = exp(x[i]);", True),
    "neighbours are read": (I + "y[i] = x[i] + x[(i + 1) % 8192];", True),
    "shared memory": (
        I + "threadgroup float s[256];\ns[t] = x[i];\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);\ny[i] = s[255 - t];",
        True,
    ),
    "sums": (I + "float s = simd_sum(x[i]);\ny[i] = s;", True),
    "one outside": (I + "y[i == 8000 ? 9000 : i] = x[i];", False),
    "one is not written": (I + "if (i != 8191) y[i] = x[i];", False),
    "some write to one": (I + "y[i] = x[i];\nif (i % 4096 == 7) y[7] = i;", False),
    "one reads another's": (I + "y[i] = x[i];\nif (i == 5000) y[i] = y[3];", False),
    "one divides zero": (I + "y[i] = (x[i] - x[i]) / (i == 7000 ? 0.0f : 1.0f);", False),
    "all divide zero": (I + "y[i] = (x[i] - x[i]) / float(i / 8192);", False),
    "a race inside": (
        I + "threadgroup float s[256];\ns[t] = x[i];\nif (i > 6000) y[i] = s[255 - t];\n"
        "else y[i] = s[t];",
        False,
    ),
    "an integer by zero": (I + "y[i] = x[i] + float(7 / (int(i) - 6000));", False),
    "one waits alone": (
        I + "y[i] = x[i];\nif (i == 5000) threadgroup_barrier(mem_flags::mem_threadgroup);",
        False,
    ),
}


@pytest.fixture(autouse=True)
def four_threads() -> Iterator[None]:
    before = ferrule.get_threads()
    ferrule.set_threads(4)
    yield
    ferrule.set_threads(before)


def run(made: Any, kinds: Sequence[str] | None = None) -> tuple[Sequence[Finding], np.ndarray]:
    x = np.random.default_rng(0).normal(size=THREADS).astype(np.float32)
    with ferrule.checking(kinds=kinds) as findings:
        (y,) = made(
            inputs=[x], output_shapes=[(THREADS,)], output_dtypes=["float32"],
            grid=(THREADS, 1, 1), threadgroup=(GROUP, 1, 1),
        )  # fmt: skip
    return findings, y


@pytest.mark.parametrize("name", BODIES)
def test_threads_tell_what_one_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body, enough = BODIES[name]
    made = ferrule.metal_kernel("k", ["x"], ["y"], body)
    runs: list[int] = []
    result = watched._Run.result

    def counted(self: Any, opened: Any) -> Any:
        runs.append(len(self._libraries))
        return result(self, opened)

    monkeypatch.setattr(watched._Run, "result", counted)
    findings, y = run(made)
    assert runs == ([4] if enough else [4, 1])
    monkeypatch.setattr(watched, "_MANY_THREADS", 1 << 30)
    expected, z = run(made)
    assert list(map(str, findings)) == list(map(str, expected))
    assert bool(findings) != enough
    if enough:  # else elements that nothing wrote hold anything
        np.testing.assert_array_equal(y, z)


@pytest.mark.parametrize("kinds", [["bounds"], ["nan", "unwritten"], ["uninitialised"]])
def test_threadgroups_that_depend_on_each_other(kinds: list[str]) -> None:
    """Who does not look for races does not see that, and so has them one after the other."""
    body = (
        I + "uint g = threadgroup_position_in_grid.x;\ny[i] = 1;\nif (i == 7 * 256) y[0] = 1e6;\n"
        "if (g == 8) y[i] = x[uint(y[0])];"
    )
    made = ferrule.metal_kernel("k", ["x"], ["y"], body)
    for _ in range(8):
        findings, y = run(made, kinds)
        assert ("bounds" in {f.kind for f in findings}) == ("bounds" in kinds)
        assert y[2048] == 0


def test_what_orders_threadgroups_runs_on_one_thread() -> None:
    body = "atomic_fetch_add_explicit(&y[0], 1, memory_order_relaxed);"
    assert watched._is_ordered(ferrule.metal_kernel("k", ["x"], ["y"], body).kernel)
    assert not watched._is_ordered(ferrule.metal_kernel("k", ["x"], ["y"], "y[0] = 1;").kernel)
