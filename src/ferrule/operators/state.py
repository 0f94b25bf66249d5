"""Arrays that an implementation finds again as its last call on the same stream left them: locks,
counters, workspaces."""

from __future__ import annotations

import math
import threading
from typing import Any

from ..dtypes import Dtype
from ..spec import Shape


class StreamState(threading.local):
    """The arrays of one implementation, by device, stream and thread: kernels of two threads may
    come in any order, also where they are on one stream. They go with the thread."""

    def __init__(self) -> None:
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
        """
        count = math.prod(shape)
        if not keeps(host, device):
            return host.full(shape, 0, dtype, device)
        key = name, dtype.name, device, queue
        memory = self.kept.get(key)
        if memory is None or memory.shape[0] < count:
            memory = self.kept[key] = host.full((count,), 0, dtype, device)
        return memory[:count].reshape(shape)


def keeps(host: Any, device: str) -> bool:
    """Whether state is kept: not of a library whose arrays do not change, nor in a CUDA graph that
    is captured, which may be replayed on any stream and so has zeros of its own in each replay."""
    capturing = getattr(host, "capturing", None)
    return hasattr(host, "identity") and (capturing is None or not capturing(device))
