"""Elements of outputs that nothing writes, on a GPU: they keep what they are filled with before."""

from __future__ import annotations

import ctypes
import threading
from contextlib import suppress
from functools import lru_cache
from typing import Any

from ..devices import protocol as devices
from ..dtypes import Dtype
from ..errors import DeviceError, ToolchainError
from ..source.cuda.launch import kernel_parameters
from ..spec import Launch, Spec
from ..tools import nvrtc
from ..tools.driver import Driver, LoadedFunction

# A NaN of float32, float16 and bfloat16 that no arithmetic makes.
_HALF = 0x7FB3
_WORD = _HALF << 16 | _HALF
_PATTERN = _WORD.to_bytes(4, "little")
_THREADS = 256
ARRAYS = 64  # of include/cuda_counted.h: arrays of which is told what is left
_LOOK = f"""
extern "C" __global__ void fr_look(const void* at, unsigned long long n, unsigned item,
                                   unsigned long long* left) {{
  const unsigned long long first = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x, word = {_WORD:#x}u;
  for (unsigned long long i = first; i < n; i += step) {{
    const bool same = item == 2   ? ((const unsigned short*)at)[i] == {_HALF:#x}
                      : item == 4 ? ((const unsigned*)at)[i] == word
                                  : ((const unsigned long long*)at)[i] == (word << 32 | word);
    if (!same) continue;
    atomicAdd(left, 1ull);
    atomicMax(left + 1, ~i);
  }}
}}
"""
_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3
)


class _Outputs:
    """Which outputs of a kernel are filled, and where its launches name them.

    Attributes:
        left: where what is left of each array is told.
        never: they must not be filled: they have values, or are the caller's.
        ordinal: of the GPU.
    """

    def __init__(self, function: LoadedFunction, spec: Spec, left: int) -> None:
        self.left, self.never, self.ordinal = left, False, function.ordinal
        self._kinds = kernel_parameters(spec)
        self._dtypes = spec.outputs
        self._inputs = len(spec.inputs)

    def of(self, arguments: int) -> list[tuple[int, int, int, int]]:
        """Address, elements, bytes of an element and where what is left is told, of each.

        Args:
            arguments: the address of a launch's table of arguments.
        """
        table = (ctypes.c_void_p * len(self._kinds)).from_address(arguments)
        at: dict[tuple[str, int], int] = {
            key: table[i] or 0 for i, key in enumerate(self._kinds) if key[0] != "value"
        }
        given = {
            ctypes.c_uint64.from_address(place).value
            for (kind, _), place in at.items()
            if kind == "input"
        }
        found = []
        for i, dtype in enumerate(self._dtypes):
            address = ctypes.c_uint64.from_address(at["output", i]).value
            number = self._inputs + i
            elements = ctypes.c_uint64.from_address(at["extent", number] + 8).value
            own = address and address % 4 == 0 and address not in given
            if own and elements and number < ARRAYS and _is_rare(dtype):
                left = self.left + 16 * number
                found.append((address, elements, dtype.itemsize, left))
        return found


def _is_rare(dtype: Dtype) -> bool:
    """Whether what outputs are filled with is no value that kernels write."""
    return dtype.itemsize in (4, 8) or (dtype.itemsize == 2 and dtype.kind == "f")


class Fills:
    """Fills outputs before the launches of kernels, and looks at them afterwards, until `close`."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.kernels: dict[int, _Outputs] = {}
        _between(driver).change(self, True)

    def close(self) -> None:
        """Launches are no longer looked at."""
        _between(self._driver).change(self, False)

    def know(self, function: LoadedFunction, spec: Spec, launch: Launch, left: int) -> None:
        """Fill the outputs of a kernel from now on, unless they have values or are the caller's.

        Args:
            left: the address of the first array's `left` of include/cuda_counted.h.

        Raises:
            ToolchainError: there is no NVRTC.
        """
        look_on(self._driver, function.ordinal)  # not while a graph is recorded
        outputs = self.kernels.setdefault(function.handle, _Outputs(function, spec, left))
        outputs.never |= launch.fill is not None or launch.in_place > 0


class _Between:
    """What stands between all that launches kernels and libcuda, while somebody wants to know."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._active: list[Fills] = []
        self._before = driver.state.launch
        self._cuda = _LAUNCH(self._before)
        self._ours = _LAUNCH(self._launch)  # C may still call it when nobody wants to know

    def change(self, fills: Fills, begins: bool) -> None:
        """Note that somebody wants to know, or no longer does."""
        with self._lock:
            active = [other for other in self._active if other is not fills]
            self._active = [*active, fills] if begins else active
            ours = ctypes.cast(self._ours, ctypes.c_void_p).value
            self._driver.state.launch = ours if self._active else self._before
            self._driver.launcher = self._launch if self._active else None

    def _launch(self, function: int, *rest: Any) -> int:
        """cuLaunchKernel."""
        known = (fills.kernels.get(function) for fills in reversed(self._active))
        outputs = next(filter(None, known), None)
        *_, stream, arguments, _ = rest
        places: list[tuple[int, int, int, int]] = []
        if outputs is not None and not outputs.never:
            with suppress(DeviceError):  # then the launch itself says what is wrong
                for address, elements, item, left in outputs.of(arguments):
                    words = elements * item // 4
                    self._driver.fill(outputs.ordinal, address, words, _PATTERN, stream or 0)
                    places.append((address, elements, item, left))
        status = int(self._cuda(function, *rest))
        if outputs is not None and not status:
            for place in places:
                self._look(look_on(self._driver, outputs.ordinal), place, stream)
        return status

    def _look(
        self, look: LoadedFunction, place: tuple[int, int, int, int], stream: int | None
    ) -> None:
        address, elements, item, left = place
        values = (
            ctypes.c_uint64(address), ctypes.c_uint64(elements), ctypes.c_uint(item),
            ctypes.c_uint64(left),
        )  # fmt: skip
        table = (ctypes.c_void_p * 4)(*map(ctypes.addressof, values))
        blocks = min(-(-elements // _THREADS), 1 << 16)
        self._cuda(look.handle, blocks, 1, 1, _THREADS, 1, 1, 0, stream, table, None)


_between = lru_cache(maxsize=4)(_Between)


@lru_cache(maxsize=16)
def look_on(driver: Driver, ordinal: int) -> LoadedFunction:
    """What looks for elements that were not written, on a GPU.

    Raises:
        ToolchainError: there is no NVRTC.
    """
    compiler = nvrtc.find_nvrtc()
    if compiler is None:
        raise ToolchainError(
            "checks on a GPU need NVRTC; `pip install nvidia-cuda-nvrtc` installs it."
        )
    architecture = devices.get(f"cuda:{ordinal}").architecture  # type: ignore[attr-defined]
    image, _ = compiler.compile(_LOOK, "fr_look", [f"--gpu-architecture={architecture}"])
    return driver.load(ordinal, image, "fr_look", 0, 0)
