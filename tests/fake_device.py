"""A device for tests of calls: it sees the memory that it is handed, and runs Python on it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from ferrule.devices import protocol as devices
from ferrule.devices.protocol import Binary
from ferrule.errors import DeviceError
from ferrule.hosts import protocol as hosts
from ferrule.kernels import repeated
from ferrule.spec import Facts, Launch, Spec

Body = Callable[[list[Any], list[Any]], None]


def view(facts: Facts) -> Any:
    """The memory that ``facts`` describe, as a NumPy array."""
    dtype, size = facts.dtype.numpy, facts.dtype.itemsize
    if 0 in facts.shape:
        return np.empty(facts.shape, dtype)
    ends = [(n - 1) * s * size for n, s in zip(facts.shape, facts.strides, strict=True)]
    low, high = sum(e for e in ends if e < 0), sum(e for e in ends if e > 0) + size
    memory: Any = (ctypes.c_char * (high - low)).from_address(facts.pointer + low)
    strides = [s * size for s in facts.strides]
    return np.ndarray(facts.shape, dtype, memory, -low, strides)


class FakeDevice:
    """Records every call, and runs ``body`` on the inputs and outputs of each launch.

    Attributes:
        specs: what was asked for, in order, by `program`, `compile` and `text`.
        launches: what was launched.
        streams: the queue of each launch.
    """

    name = "cpu"

    def __init__(self, body: Body | None = None) -> None:
        self.body = body
        self.specs: list[Spec] = []
        self.launches: list[tuple[list[Facts], list[Facts], Launch]] = []
        self.streams: list[int] = []

    def text(self, spec: Spec, launch: Launch | None = None) -> str:
        self.specs.append(spec)
        return f"text of {spec.kernel.name} for {launch and launch.threadgroup}"

    def compile(self, spec: Spec, launch: Launch | None = None) -> Binary:
        self.specs.append(spec)
        return Binary(b"bytes", "flat", self.text(spec, launch))

    def program(self, spec: Spec) -> FakeDevice:
        self.specs.append(spec)
        return self

    def launch(
        self, inputs: Sequence[Facts], outputs: Sequence[Facts], launch: Launch, stream: int = 0
    ) -> None:
        self.launches.append((list(inputs), list(outputs), launch))
        self.streams.append(stream)
        if self.body is not None:
            self.body([view(f) for f in inputs], [view(f) for f in outputs])

    def failure(self, status: int, *_: object) -> DeviceError:
        return DeviceError(str(status))


def install(monkeypatch: pytest.MonkeyPatch, body: Body | None = None) -> FakeDevice:
    """A `FakeDevice` in place of every device; MLX's arrays come to it when a kernel is called, as
    where no nodes can be had."""
    fake = FakeDevice(body)
    monkeypatch.setattr(devices, "get", lambda name: fake)
    monkeypatch.setattr(repeated, "repeated_calls", lambda kernel: None)  # every call is seen
    monkeypatch.setattr(hosts, "nodes", lambda *_: None)
    return fake
