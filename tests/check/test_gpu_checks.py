"""Launches on a GPU are checked over copies, with a driver whose GPU is the host's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cuda_on_cpu
import ferrule
from cuda_catalogue import BUGS
from fake_cuda import FakeCuda
from ferrule.check.filled import Fills
from ferrule.devices import protocol as devices
from ferrule.spec import Launch, Spec
from ferrule.tools import nvrtc
from ferrule.tools.driver import driver

METAL = """\
uint i = thread_position_in_grid.x;
threadgroup float tile[64];
tile[i] = x[i] * k;
// no barrier
y[i] = tile[63 - i];
"""
MENDED = METAL.replace("// no barrier", "threadgroup_barrier(mem_flags::mem_threadgroup);")
X = np.arange(64, dtype=np.float32)


def described(kernel: Any, inputs: list[Any]) -> tuple[Spec, Launch]:
    spec, launch = kernel._builder.described(
        inputs, [np.float32], [(64,)], (64, 1, 1), (64, 1, 1), None, None, "cuda"
    )
    return spec, launch


def started(spec: Spec, launch: Launch, inputs: list[Any]) -> np.ndarray[Any, Any]:
    """Launch on the GPU, with arrays of the host."""
    out = np.full(64, -1, np.float32)
    arrays = [
        cuda_on_cpu.facts(array, given.value)._replace(device="cuda:0")
        for array, given in zip(inputs, spec.inputs, strict=True)
    ]
    outputs = [cuda_on_cpu.facts(out)._replace(device="cuda:0")]
    devices.get("cuda:0").program(spec).launch(arrays, outputs, launch, 0x77)
    return out


@pytest.mark.parametrize(("source", "found"), [(METAL, [("race", 5, 3)]), (MENDED, [])])
def test_metal_bodies(source: str, found: list[Any], fake_path: Path) -> None:
    kernel = ferrule.metal_kernel("k", ["x", "k"], ["y"], source)
    spec, launch = described(kernel, [X, 2.0])
    with FakeCuda(fake_path).installed() as fake, ferrule.checking() as findings:
        y = started(spec, launch, [X, np.array(2, np.float32)])
    assert [(f.kind, f.line, f.other_line) for f in findings] == found
    assert not fake.launches and findings.launches == 1 and not findings.notes
    if not found:
        np.testing.assert_array_equal(y, 2 * X[::-1])


@pytest.mark.parametrize("name", ["a missing __syncthreads", "an output that is read"])
def test_cuda_bodies(name: str, fake_path: Path) -> None:
    for bug, lines in ((BUGS[name], BUGS[name].lines()), (BUGS[name].mended(), set())):
        kernel = ferrule.cuda_kernel("k", ["a"], ["out"], bug.source)
        spec, launch = described(kernel, [X])
        with FakeCuda(fake_path).installed() as fake, ferrule.checking() as findings:
            out = started(spec, launch, [X])
        assert not findings.notes
        assert {(f.kind, f.line) for f in findings} == {(bug.kind, n) for _, n in lines}
        assert not fake.launches
    (expected,) = cuda_on_cpu.launch(
        kernel, [X], grid=(64, 1, 1), threadgroup=(64, 1, 1), output_shapes=[(64,)],
        output_dtypes=[np.float32],
    )  # fmt: skip
    np.testing.assert_array_equal(out, expected)


def test_what_is_recorded_does_not_run_here(
    fake_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ferrule.devices.cuda.watched import watched

    kernel = ferrule.metal_kernel("k", ["x", "k"], ["y"], METAL)
    spec, launch = described(kernel, [X, 2.0])
    with FakeCuda(fake_path).installed(), ferrule.checking():
        monkeypatch.setattr(driver(), "records", lambda stream: True)
        assert not watched(driver(), 0, spec, [], [], launch, 0x77)
    with FakeCuda(fake_path).installed(), ferrule.checking(gpu=True):
        assert not watched(driver(), 0, spec, [], [], launch, 0x77)


def test_outputs_are_filled_around_a_launch(fake_path: Path) -> None:
    """With what no kernel writes, and then looked at, while some check asks for it."""
    if nvrtc.find_nvrtc() is None:
        pytest.skip("there is no NVRTC")
    kernel = ferrule.metal_kernel(
        "k", ["x", "k"], ["y"], "uint i = thread_position_in_grid.x; y[i] = x[i] * k;"
    )
    spec, launch = described(kernel, [X, 2.0])
    y, left, seen = np.zeros(64, np.float32), np.zeros(6, np.uint64), list[Any]()
    given = [X, np.array(2, np.float32)]
    arrays = [
        cuda_on_cpu.facts(array, one.value)._replace(device="cuda:0")
        for array, one in zip(given, spec.inputs, strict=True)
    ]
    outputs = [cuda_on_cpu.facts(y)._replace(device="cuda:0")]

    def run(launched: Any) -> None:
        seen.append((launched.symbol, y.view(np.uint32).copy()))
        if launched.symbol == "ferrule_k":
            y[:40] = 2 * X[:40]

    with FakeCuda(fake_path).installed() as fake:
        fake.on_launch = run
        program: Any = devices.get("cuda:0").program(spec)
        loaded, fake_driver = program._plan(arrays, outputs, launch).function, driver()
        own = fake_driver.state.launch
        first, second = Fills(fake_driver), Fills(fake_driver)
        first.know(loaded, spec, launch, left.ctypes.data)
        second.close()  # in any order
        program.launch(arrays, outputs, launch, 0x77)
        (before, filled), (after, looked) = seen
        assert (before, after) == ("ferrule_k", "fr_look")
        assert np.isnan(filled.view(np.float32)).all() and len(set(filled)) == 1
        assert (looked[40:] == filled[0]).all() and (looked[:40] != filled[0]).all()
        assert {launched.stream for launched in fake.launches} == {0x77}
        assert fake_driver.state.launch != own
        # Not where the outputs have values, or are the caller's own.
        for other in (launch._replace(fill=0), launch._replace(in_place=1)):
            fills = Fills(fake_driver)
            fills.know(loaded, spec, other, left.ctypes.data)
            del seen[:]
            program.launch(arrays, outputs, launch, 0x77)
            assert [symbol for symbol, _ in seen] == ["ferrule_k"]
            fills.close()
        first.close()
        assert fake_driver.state.launch == own and fake_driver.launcher is None
        del seen[:], fake.fills[:]
        program.launch(arrays, outputs, launch, 0x77)
        assert [symbol for symbol, _ in seen] == ["ferrule_k"] and not fake.fills
