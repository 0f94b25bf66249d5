"""A driver for tests: native/fake_cuda.c in place of libcuda. A launch is a call of the test's."""

from __future__ import annotations

import contextlib
import ctypes
import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ferrule.devices.cuda import device as cuda
from ferrule.tools import driver, libcuda

_SOURCE = Path(__file__).parent / "native" / "fake_cuda.c"
_LAUNCHED = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_size_t, ctypes.POINTER(ctypes.c_uint), ctypes.c_size_t, ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_void_p),
)  # fmt: skip
_COPIED = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_size_t] * 5)
_FILLED = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_size_t] * 4)
_PARAMETER = re.compile(r"((?:[^,<(]|<[^>]*>)+?) (\w+)(?:,\s*|\))")


class Launched(NamedTuple):
    """One call of cuLaunchKernel.

    Attributes:
        symbol: the kernel's name.
        blocks, threads, shared: the configuration.
        stream, context: as integers.
        arguments: by the parameter's name: addresses, lists of integers, and bytes of scalars.
        cluster: blocks of a cluster; None where none were asked for.
        pdl: whether it may begin before the kernel ahead has ended.
    """

    symbol: str
    blocks: tuple[int, ...]
    threads: tuple[int, ...]
    shared: int
    stream: int
    context: int
    arguments: dict[str, Any]
    cluster: tuple[int, ...] | None = None
    pdl: bool = False


class Filled(NamedTuple):
    """One call of cuMemsetD8Async.

    Attributes:
        address, size: the memory, which is the host's.
        stream, context: as integers.
        before: how many kernels had been launched.
    """

    address: int
    size: int
    stream: int
    context: int
    before: int


class Copied(NamedTuple):
    """One call of cuMemcpyDtoDAsync.

    Attributes:
        to, source, size: the memory, which is the host's.
        stream, context: as integers.
    """

    to: int
    source: int
    size: int
    stream: int
    context: int


class Mapped(NamedTuple):
    """What a tensor map was made of; the innermost dim is the first.

    Attributes:
        address: where the array begins.
        strides: in bytes, of the dims but the first.
        dims, box: in elements.
        numbers: dtype, interleave, swizzle, promotion and fill, as CUDA numbers them.
    """

    address: int
    strides: tuple[int, ...]
    dims: tuple[int, ...]
    box: tuple[int, ...]
    numbers: tuple[int, ...]

    @staticmethod
    def of(data: bytes) -> Mapped:
        words = struct.unpack("=5Q16I", data[:104])
        kind, rank, *numbers = words[15:]
        return Mapped(
            words[0], words[1:rank], words[5 : 5 + rank], words[10 : 10 + rank], (kind, *numbers)
        )


def build(folder: Path, source: Path = _SOURCE, name: str = "libcuda-fake.so") -> Path:
    """A library in C, compiled into ``folder``; skips where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    path = folder / name
    command = [compiler, "-std=c11", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o"]
    subprocess.run([*command, str(path), str(source)], check=True, timeout=60)
    return path


class FakeCuda:
    """The library, in place of libcuda while `installed`.

    Attributes:
        launches: what was launched.
        fills: what was filled.
        events: all of that, and what was copied, in order.
        dynamic: the bytes of dynamic shared memory that the last launch of a kernel was allowed.
        status: what the next launches and fills return.
        texts: the CUDA text of each kernel that is launched, by its name; says what arguments are.
        on_launch: called with each launch.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.library = ctypes.CDLL(str(path))
        self.library.fake_symbol.restype = ctypes.c_char_p
        self.library.fake_symbol.argtypes = (ctypes.c_size_t,)
        self.library.fake_dynamic.argtypes = (ctypes.c_size_t,)
        self.launches: list[Launched] = []
        self.fills: list[Filled] = []
        self.dynamic: dict[str, int] = {}
        self.events: list[Launched | Filled | Copied] = []
        self.status = 0
        self.texts: dict[str, str] = {}
        self.on_launch: Callable[[Launched], None] = lambda launched: None
        self._callback = _LAUNCHED(self._launched)
        self.library.fake_on_launch(self._callback)
        self._fill_callback = _FILLED(self._filled)
        self.library.fake_on_fill(self._fill_callback)
        self._copy_callback = _COPIED(self._copied)
        self.library.fake_on_copy(self._copy_callback)
        self.library.fake_capability(9)
        self.library.fake_static(0)
        self.set()

    def set(
        self, version: int = 13000, count: int = 2, init: int = 0, image: int = 0, most: int = 1024
    ) -> None:
        """How the driver behaves: version, GPUs, statuses of cuInit and of loading, threads."""
        self.library.fake_set(version, count, init, image, most)

    @contextlib.contextmanager
    def installed(self) -> Iterator[FakeCuda]:
        """In place of libcuda inside a ``with`` block."""
        names = libcuda._NAMES
        libcuda._NAMES = (str(self.path),)
        self._forget()
        try:
            yield self
        finally:
            libcuda._NAMES = names
            self._forget()

    @staticmethod
    def _forget() -> None:
        driver.driver.cache_clear()
        cuda.gpu.cache_clear()

    def _launched(self, kernel: int, sizes: Any, stream: int, context: int, given: Any) -> int:
        symbol = self.library.fake_symbol(kernel).decode()
        arguments: dict[str, Any] = {}
        text = self.texts.get(symbol, "")
        _, _, rest = text.partition(f"{symbol}(")
        for n, (kind, name) in enumerate(_PARAMETER.findall(rest.partition("{")[0])):
            arguments[name.removeprefix("fr_a_")] = _value(kind, given[n])
        launched = Launched(
            symbol, tuple(sizes[:3]), tuple(sizes[3:6]), sizes[6], stream, context, arguments,
            tuple(sizes[7:10]) if sizes[7] else None, bool(sizes[10]),
        )  # fmt: skip
        self.dynamic[symbol] = self.library.fake_dynamic(kernel)
        self.launches.append(launched)
        self.events.append(launched)
        if not self.status:
            self.on_launch(launched)
        return self.status

    def _filled(self, address: int, size: int, stream: int, context: int) -> int:
        self.fills.append(Filled(address, size, stream, context, len(self.launches)))
        self.events.append(self.fills[-1])
        return self.status

    def _copied(self, to: int, source: int, size: int, stream: int, context: int) -> int:
        self.events.append(Copied(to, source, size, stream, context))
        return self.status


def _value(kind: str, address: int) -> Any:
    if "*" in kind:
        return ctypes.c_uint64.from_address(address).value
    if kind.endswith("CUtensorMap"):
        return Mapped.of(ctypes.string_at(address, 128))
    if kind.endswith("launch"):
        return list((ctypes.c_uint32 * 9).from_address(address))
    if kind.endswith(("::Shape", "::Strides")):
        kind = f"list<{'int' if kind.endswith('Shape') else 'long'}, 10>"
    numbers = re.search(r"list<(.*), (\d+)>", kind)
    if numbers is None:
        return ctypes.string_at(address, 8)
    item = ctypes.c_int32 if numbers[1] == "int" else ctypes.c_int64
    return list((item * int(numbers[2])).from_address(address))
