"""Launches on a GPU that are checked: they run on the CPU, over copies of their arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

from ...spec import Facts, Launch, Spec, extent
from ...tools.driver import Driver
from .. import protocol


def watched(
    driver: Driver,
    ordinal: int,
    spec: Spec,
    inputs: Sequence[Facts],
    outputs: Sequence[Facts],
    launch: Launch,
    stream: int,
) -> bool:
    """Run a launch watched, if anybody watches, and wait for it; False where the GPU is to do it.

    Args:
        driver, ordinal: the GPU.
        spec: the kernel.
        inputs, outputs: its arrays on that GPU; numbers are on the host.
        launch: its sizes.
        stream: what was started there before is waited for.

    Raises:
        DeviceError: the GPU's memory cannot be copied.
    """
    watcher = protocol.watcher
    if watcher is None or not watcher.copies(spec.kernel):
        return False
    if spec.kernel.language != "cuda":  # numbers have addresses on the CPU
        spec = replace(spec, inputs=tuple(i._replace(value=False) for i in spec.inputs))
    with driver.current(driver.context(ordinal)):
        if driver.records(stream):  # into a CUDA graph, whose launches run later
            return False
        driver.wait(stream)
        copies = [_on_host(driver, fact, stream) for fact in (*inputs, *outputs)]
        facts = [fact for fact, _ in copies]
        count = len(inputs)
        if not watcher.launch(spec, facts[:count], facts[count:], launch):
            return False
        for fact, (_, data) in zip(outputs, copies[count:], strict=True):
            driver.give(_start(fact), data)
    return True


def _on_host(driver: Driver, fact: Facts, stream: int) -> tuple[Facts, ctypes.Array[ctypes.c_char]]:
    """An array with its memory copied to the host, and that copy."""
    first, count = extent(fact.shape, fact.strides)
    item = fact.dtype.itemsize
    if fact.value or not count:
        return fact._replace(device="cpu"), ctypes.create_string_buffer(0)
    data = (ctypes.c_char * (count * item)).from_buffer_copy(
        driver.take(_start(fact), count * item, stream)
    )
    return fact._replace(device="cpu", pointer=ctypes.addressof(data) - first * item), data


def _start(fact: Facts) -> int:
    """Where an array's memory begins."""
    return fact.pointer + extent(fact.shape, fact.strides)[0] * fact.dtype.itemsize
