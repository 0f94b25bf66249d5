"""Calls of ops on the CPU whose implementations in CUDA are run there, while they are checked."""

from __future__ import annotations

from typing import Any

from ..spec import Facts
from .launch import BoundCall, bound


def in_cuda(call: BoundCall) -> BoundCall | None:
    """A call on the CPU as one of a GPU; None where nobody checks it so."""
    from ..devices import protocol as devices

    op, watcher = call.op, devices.watcher
    if watcher is None or call.device != "cpu" or op.in_place or not watcher.units(op.name):
        return None
    arguments = {
        name: value._replace(device=devices.ON_CPU) if isinstance(value, Facts) else value
        for name, value in call.arguments.items()
    }
    return bound(op, devices.ON_CPU, arguments)


class OnCpu:
    """A host whose arrays for such a call are on the CPU."""

    def __init__(self, host: Any) -> None:
        self._host = host

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    def empty(self, shape: Any, dtype: Any, device: str) -> Any:
        """`Host.empty`."""
        return self._host.empty(shape, dtype, "cpu")

    def full(self, shape: Any, value: Any, dtype: Any, device: str) -> Any:
        """`Host.full`."""
        return self._host.full(shape, value, dtype, "cpu")
