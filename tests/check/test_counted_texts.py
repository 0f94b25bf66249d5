"""What Metal bodies count on a GPU, where their CUDA text is carried out by the CPU (`warps`)."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuda_on_cpu
import ferrule
import warps
from ferrule.check.gpu import Counted
from ferrule.devices.cuda.build import CudaBuild
from ferrule.devices.cuda.device import CudaDevice
from ferrule.source.cuda.launch import COUNTED, ROBUST, UNGUARDED
from ferrule.tools.driver import LoadedFunction

Array = np.ndarray[Any, Any]


class Memory:
    """A driver whose GPU's memory is the host's."""

    @contextlib.contextmanager
    def current(self, context: int) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def uncaptured(self) -> Iterator[None]:
        yield

    def wait(self, stream: int | None) -> None:
        assert stream is None

    def take(self, address: int, size: int, stream: int) -> bytes:
        return ctypes.string_at(address, size)

    def clear(self, address: int, size: int, stream: int) -> None:
        ctypes.memset(address, 0, size)


def counted(
    source: str, x: Array, size: int, dtype: Any = np.float32, group: int = 32, **more: Any
) -> tuple[Array, list[Any]]:
    """The output of a body with x and y, and what it counted."""
    kernel = ferrule.metal_kernel("k", ["x"], ["y"], source, **more)
    call: dict[str, Any] = {
        "grid": (size, 1, 1), "threadgroup": (group, 1, 1), "output_shapes": [(size,)],
        "output_dtypes": [dtype],
    }  # fmt: skip
    spec, launch = kernel._builder.described(
        [x], [dtype], [(size,)], (size, 1, 1), (group, 1, 1), None, None, "cuda"
    )
    assert launch is not None
    text = CudaBuild(spec, launch, guards=COUNTED).text()
    at = ctypes.c_uint64()
    where = f"*(unsigned long long*){ctypes.addressof(at)}ull = (unsigned long long)&fr_counted;"
    begins = "fr::counted::begin();"
    assert begins in text
    run = text.replace(begins, f"{begins} {where}")
    warps.launch(kernel, [x], text=run, init_value=0, **call)  # to learn where the table is
    driver: Any = Memory()
    function = LoadedFunction(1, 0, 1, 0, 1024, counted=at.value)
    known: Any = [cuda_on_cpu.facts(x), cuda_on_cpu.facts(np.zeros(size, dtype))]
    table = Counted(driver, function, spec, known, launch)
    (y,), _, _ = warps.launch(kernel, [x], text=run, init_value=0, **call)
    return y, table.findings()[0]


@given(size=st.integers(1, 200), by=st.integers(-70, 70), group=st.sampled_from([32, 64]))
@settings(max_examples=8, deadline=None)
def test_each_access_outside_is_counted(size: int, by: int, group: int) -> None:
    x = np.arange(1, size + 1, dtype=np.float32)
    source = f"""int i = thread_position_in_grid.x;
float v = x[i + ({by})];
y[i] = v;"""
    y, findings = counted(source, x, size, group=min(group, size))
    places = np.arange(size) + by
    inside = (places >= 0) & (places < size)
    np.testing.assert_array_equal(y, np.where(inside, x[np.clip(places, 0, size - 1)], 0))
    outside = int((~inside).sum())
    assert [(f.kind, f.line, f.count) for f in findings] == [("bounds", 2, outside)] * bool(outside)
    for finding in findings:
        place = finding.threadgroup[0] * min(group, size) + finding.thread[0]
        assert not inside[place] and f"x[{place + by}]" in finding.message
        assert finding.text == f"float v = x[i + ({by})];"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("uint i = thread_position_in_grid.x;\ny[i] = x[i] / (x[i] - 3);", [("nan", 2, 1)]),
        ("uint i = thread_position_in_grid.x;\ny[i] += sqrt(3 - x[i]);", [("nan", 2, 60)]),
        # What the author writes, and what was loaded, the kernel did not make.
        ("uint i = thread_position_in_grid.x;\ny[i] = i ? x[i] : INFINITY;", []),
        ("uint i = thread_position_in_grid.x;\ny[i + 60] = x[i];\ny[i] = 1;", [("bounds", 2, 60)]),
        ("uint i = thread_position_in_grid.x;\nif (i < 3) { y[i] = 1; return; }\ny[i - 3] = x[i];",
         []),
        ("auto f = [&](int k) { return x[k] + x[k + 1]; };\n"
         "y[thread_position_in_grid.x] = f(thread_position_in_grid.x);", [("bounds", 1, 1)]),
    ],
)  # fmt: skip
def test_lines(source: str, expected: list[tuple[str, int, int]]) -> None:
    _, findings = counted(source, np.arange(64, dtype=np.float32), 64)
    assert [(f.kind, f.line, f.count) for f in findings] == expected


def test_infinities_that_are_given() -> None:
    x = np.array([1, np.inf, 2, 3], np.float32)
    _, findings = counted("uint i = thread_position_in_grid.x;\ny[i] = 2 * x[i];", x, 4, group=4)
    assert not findings


def test_accesses_by_other_pointers_say_nothing_of_values() -> None:
    """What they load may be no number."""
    source = "uint i = thread_position_in_grid.x;\nauto p = x + i;\ny[i] = sqrt(p[0] - 5);"
    _, findings = counted(source, np.arange(64, dtype=np.float32), 64)
    assert not findings


def test_atomics() -> None:
    source = (
        "uint i = thread_position_in_grid.x;\n"
        "atomic_fetch_add_explicit(&y[uint(x[i])], 1, memory_order_relaxed);"
    )
    x = np.arange(0, 128, 2, dtype=np.float32)
    y, findings = counted(source, x, 64, np.int32, atomic_outputs=True)
    np.testing.assert_array_equal(y, np.arange(64) % 2 == 0)
    assert [(f.kind, f.line, f.count) for f in findings] == [("bounds", 2, 32)]


def test_guards_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Robust mode is what is had where nothing is said."""
    kernel = ferrule.metal_kernel(
        "k", ["x"], ["y"], "uint i = thread_position_in_grid.x; y[i] = x[i];"
    )
    spec, launch = kernel._builder.described(
        [np.zeros(4, np.float32)], [np.float32], [(4,)], (4, 1, 1), (4, 1, 1), None, None, "cuda"
    )
    texts = {
        guards: CudaBuild(spec, launch, guards=guards).text()
        for guards in (UNGUARDED, ROBUST, COUNTED)
    }
    device = CudaDevice()
    monkeypatch.delenv("FERRULE_ROBUST", raising=False)
    ferrule.set_robust(None)  # asks again
    assert device.text(spec, launch) == texts[ROBUST]
    monkeypatch.setenv("FERRULE_ROBUST", "0")
    ferrule.set_robust(None)
    assert device.text(spec, launch) == texts[UNGUARDED]
    ferrule.set_robust(True)
    try:
        assert device.text(spec, launch) == texts[ROBUST]
    finally:
        monkeypatch.undo()
        ferrule.set_robust(None)
    assert len(set(texts.values())) == 3 and "fr_view" not in texts[UNGUARDED]
