"""Arrays that an implementation finds again as its last call on the same stream left them: locks,
counters, workspaces."""

from __future__ import annotations

import math
import threading
from typing import Any

from ..dtypes import Dtype
from ..errors import KernelError
from ..spec import Shape


class StreamState(threading.local):
    """The arrays of one implementation, by device, stream and thread: kernels of two threads may
    come in any order, also where they are on one stream. They go with the thread."""

    def __init__(self, op: str) -> None:
        self.op = op
        self.kept: dict[tuple[object, ...], Any] = {}

    def array(
        self, name: str, shape: Shape, dtype: Dtype, host: Any, device: str, queue: int
    ) -> Any:
        """An array of zeros at first, and then as it was left.

        Of several shapes all have the memory of the largest. Where nothing is kept, it is new.

        Args:
            name, shape, dtype: its name in the implementation, and what it is.
            host: makes it.
            device, queue: where the call is.

        Raises:
            KernelError: the library cannot allocate it.
        """
        count = math.prod(shape)
        if not keeps(host, device):
            return self._zeros(name, shape, dtype, host, device)
        key = name, dtype.name, device, queue
        memory = self.kept.get(key)
        if memory is None or memory.shape[0] < count:
            memory = self.kept[key] = self._zeros(name, (count,), dtype, host, device)
        return memory[:count].reshape(shape)

    def _zeros(self, name: str, shape: Shape, dtype: Dtype, host: Any, device: str) -> Any:
        try:
            return host.full(shape, 0, dtype, device)
        except host.allocation_errors as error:
            raise KernelError(
                f"[op] `state` of op {self.op!r}: {name!r} is {shape}, which is "
                f"{dtype.itemsize * math.prod(shape)} bytes of {dtype.name}; {host.name} cannot "
                f"allocate them: {error}"
            ) from error


def keeps(host: Any, device: str) -> bool:
    """Whether state is kept: not of a library whose arrays do not change, nor in a CUDA graph that
    is captured, which may be replayed on any stream and so has zeros of its own in each replay."""
    capturing = getattr(host, "capturing", None)
    return hasattr(host, "identity") and (capturing is None or not capturing(device))
