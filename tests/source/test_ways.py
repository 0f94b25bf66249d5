"""Flat, split and fibers: a kernel gives the same bits whichever way its threads are run."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

import ferrule
from ferrule.devices.cpu import program as cpu
from fuzz import harness
from split_cases import CASES, INPUTS, SOLID, WIDE, Case, Shape, threads

Array = np.ndarray[Any, np.dtype[Any]]
I32 = np.dtype(np.int32)

pytestmark = pytest.mark.together("ways")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_FLAGS", cpu._FLAGS)
    harness.optimise(1)
    # Flat kernels cut rows into blocks, of far more threads than these grids have.
    monkeypatch.setattr(cpu, "BLOCK", 37)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> dict[cpu.Form, str]:
    """How the kernels of a test run in mode auto, by the form of their launches."""
    found: dict[cpu.Form, str] = {}
    right = cpu.CpuDevice.binary

    def noted(self: cpu.CpuDevice, spec: Any, form: cpu.Form) -> tuple[bytes, str]:
        payload, way = right(self, spec, form)
        if cpu._mode.get() == "auto" and spec.kernel.name != "ways_garbage":
            found[form] = way
        return payload, way

    monkeypatch.setattr(cpu.CpuDevice, "binary", noted)
    return found


def kernel_of(case: Case) -> ferrule.MetalKernel:
    words = set(re.findall(r"\w+", case.header + case.body))
    return ferrule.metal_kernel(
        f"ways_{case.name}", [n for n in INPUTS if n in words], ["y"], case.body, case.header
    )


def leave_garbage() -> None:
    """Fill the stacks of the threads that run kernels: what is read unwritten shall be wrong."""
    kernel = ferrule.metal_kernel(
        "ways_garbage", [], ["y"],
        """
        uint i = thread_position_in_grid.x;
        int a[64];
        for (int k = 0; k < 64; ++k) a[k] = 0x50505050;
        int q = simd_sum(a[i & 63]);
        y[i] = q + a[(i + 1) & 63];
        """,
    )  # fmt: skip
    kernel(
        inputs=[], output_shapes=[(2048,)], output_dtypes=[I32], grid=(2048, 1, 1),
        threadgroup=(64, 1, 1),
    )  # fmt: skip


def run(kernel: ferrule.MetalKernel, case: Case, shape: Shape, mode: str) -> Array:
    """y of one launch."""
    leave_garbage()
    with cpu.running(mode):
        (y,) = kernel(
            inputs=[INPUTS[n] for n in kernel.kernel.input_names],
            output_shapes=[(math.prod(shape.grid),)],
            output_dtypes=[I32],
            grid=shape.grid,
            threadgroup=shape.threadgroup,
            template=list(case.template) or None,
            init_value=0,
        )
    return np.asarray(y)


def expected_way(case: Case, form: cpu.Form) -> str:
    """What `ferrule.devices.cpu.program` says of a case's launches of one form."""
    if case.way == "threadgroups" and form.small:
        return "split by simdgroups"
    return f"split by {case.way}" if case.way in ("simdgroups", "threadgroups") else case.way


def assert_equal(got: Array, want: Array, case: Case, shape: Shape, what: str) -> None:
    """Fail with the first threads that differ."""
    wrong = np.flatnonzero(got != want)
    if len(wrong):
        first = ", ".join(f"y[{i}] is {got[i]}, not {want[i]}" for i in wrong[:4])
        pytest.fail(
            f"{case.name}, grid {shape.grid}, threadgroup {shape.threadgroup}: {what} differ in "
            f"{len(wrong)} of {len(got)} threads: {first}",
            pytrace=False,
        )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case, ways: dict[cpu.Form, str]) -> None:
    harness.optimise(case.optimise)
    kernel = kernel_of(case)
    modes = ["fibers", "auto", *(["split"] if case.way == "flat" and case.splits else [])]
    results = [
        (shape, {mode: run(kernel, case, shape, mode) for mode in modes}) for shape in case.shapes
    ]
    for shape, got in results:
        for mode in modes[1:]:
            assert_equal(got[mode], got["fibers"], case, shape, f"mode {mode} and fibers")
        if case.want is not None:
            want = np.broadcast_to(case.want(threads(shape)), got["fibers"].shape)
            assert_equal(got["fibers"], want.astype(np.int32), case, shape, "all and what is right")
    assert ways
    for form, way in ways.items():
        assert way == expected_way(case, form), f"{case.name}, launches of the form {form}"


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("shape", WIDE, ids=str)
def test_threads(shape: Shape) -> None:
    """What the expected results are made of is what the attributes of a launch say."""
    t = threads(shape)
    facts = {
        "thread_position_in_grid.x": t.grid[0],
        "thread_position_in_grid.y": t.grid[1],
        "thread_position_in_grid.z": t.grid[2],
        "thread_position_in_threadgroup.x": t.threadgroup[0],
        "thread_position_in_threadgroup.y": t.threadgroup[1],
        "thread_position_in_threadgroup.z": t.threadgroup[2],
        "threadgroup_position_in_grid.x": t.group[0],
        "threadgroup_position_in_grid.y": t.group[1],
        "threadgroup_position_in_grid.z": t.group[2],
        "threads_per_threadgroup.x": t.width,
        "thread_index_in_threadgroup": t.l,
        "thread_index_in_simdgroup": t.lane,
        "simdgroup_index_in_threadgroup": t.simdgroup,
        "quadgroup_index_in_threadgroup": t.l // 4,
    }
    stores = "".join(f"y[{len(facts)} * i + {k}] = {fact};\n" for k, fact in enumerate(facts))
    kernel = ferrule.metal_kernel("ways_threads", [], ["y"], SOLID + stores)
    for mode in ("auto", "split", "fibers"):
        with cpu.running(mode):
            (y,) = kernel(
                inputs=[], output_shapes=[(len(t.i), len(facts))], output_dtypes=[I32],
                grid=shape.grid, threadgroup=shape.threadgroup,
            )  # fmt: skip
        for k, (fact, want) in enumerate(facts.items()):
            np.testing.assert_array_equal(y[:, k], want, f"{fact}, mode {mode}")
