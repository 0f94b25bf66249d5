"""The C runtime that runs kernels on the CPU: found or built once, then called through ctypes.

Installing ferrule builds ``ferrule/_runtime*.so`` where there is a C compiler. Where there was
none, or where the sources have changed since (an editable installation), the first launch builds
it with the C++ compiler that kernels need anyway, and the disk cache keeps it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import operator
import threading
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, SupportsIndex

from .. import _env, cache
from ..errors import CompilerFailed, KernelError, KernelTypeError, ToolchainError
from . import loader, printing, toolchain
from .fastcall import RUNTIME_SOURCES as SOURCES

VERSION = 5  # FR_VERSION of runtime/runtime.h
MAX_THREADS = 1024  # FR_MAX_THREADS
MORE = -1  # FR_MORE
MAX_PARTS = 32  # FR_MAX_PARTS
FEW = 3  # threads: locked additions cost three times what plain ones do, or more
Progress = ctypes.c_uint64 * (1 + MAX_PARTS * 16)  # fr_progress
FOLDER = Path(__file__).resolve().parents[1]

_FLAGS = ("-O2", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-pthread")

_JOB = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int)
_PROTOTYPES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "fr_run": (ctypes.c_int, _JOB),
    "fr_run_some": (ctypes.c_int, (*_JOB, ctypes.c_int64, ctypes.c_void_p)),
    "fr_set_threads": (None, (ctypes.c_int,)),
    "fr_digest": (ctypes.c_char_p, ()),
    "fr_find_cublas": (ctypes.c_char_p, (ctypes.c_void_p,) * 2),
    "fr_start_product": (ctypes.c_int, (ctypes.c_void_p,) * 4),
    "fr_know_product": (ctypes.c_int, (ctypes.c_void_p,)),
    "fr_forget_product": (None, (ctypes.c_void_p,)),
    "fr_start_unit": (
        ctypes.c_int,
        (*(ctypes.c_void_p,) * 3, ctypes.c_int, *(ctypes.c_void_p,) * 3),
    ),
    "fr_fault_address": (ctypes.c_void_p, ()),
    "fr_set_printer": (None, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)),
    "fr_set_print_limit": (None, (ctypes.c_int64,)),
    "fr_show_waiting": (None, ()),
    "fr_format": (
        ctypes.c_int64,
        (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint64),
    ),
    **dict.fromkeys(
        ("fr_abandoned", "fr_threads", "fr_cpu_count", "fr_version"), (ctypes.c_int, ())
    ),
}

_runtime: ctypes.CDLL | None = None
_threads: int | None = None  # what set_threads was given
_lock = threading.Lock()


def runtime() -> ctypes.CDLL:
    """The C runtime, with the prototypes of ``runtime/runtime.h`` set.

    ``fr_run(entry, launch, units, threads)`` takes the addresses of a kernel's entry and of its
    launch data, releases the GIL while it runs, and returns 0 or a code of ``runtime.h``.
    ``fr_run_some(entry, launch, units, threads, nanoseconds, progress)`` comes back in between.

    Raises:
        ToolchainError: it was not built when ferrule was installed, and cannot be built now.
        DeviceError: the system refuses to load it.
        KernelError: ``FERRULE_THREADS`` is no number of threads.
    """
    return _runtime or _load()


def set_threads(n: SupportsIndex | None) -> None:
    """Sets how many threads run a kernel on the CPU, the calling thread among them.

    Args:
        n: 1 to 1024. None is the default again: ``FERRULE_THREADS``, else as many as the CPUs
            that this process may use (its affinity mask and its cgroup's quota).

    Raises:
        KernelTypeError: `n` is no integer.
        KernelError: `n` is out of range.
    """
    global _threads
    chosen = None if n is None else _check_count("set_threads: n", n)
    with _lock:
        _threads = chosen
        if _runtime is not None:
            _apply(_runtime)


def get_threads() -> int:
    """How many threads run a kernel on the CPU.

    Raises:
        ToolchainError, DeviceError, KernelError: as `runtime`.
    """
    return int(runtime().fr_threads())


def _check_count(label: str, n: SupportsIndex) -> int:
    if isinstance(n, bool) or not hasattr(n, "__index__"):
        raise KernelTypeError(f"{label}: got {n!r}, expected an int from 1 to {MAX_THREADS}.")
    if not 1 <= operator.index(n) <= MAX_THREADS:
        raise KernelError(f"{label}: got {n!r}, expected a number from 1 to {MAX_THREADS}.")
    return operator.index(n)


def _default_threads() -> int:
    """What FERRULE_THREADS says; 0 leaves it to the runtime."""
    text = _env.get(_env.THREADS)
    if text is None:
        return 0
    label = f"the environment variable {_env.THREADS}"
    try:
        n = int(text)
    except ValueError:
        raise KernelError(
            f"{label}: got {text!r}, expected a number from 1 to {MAX_THREADS}."
        ) from None
    return _check_count(label, n)


def _apply(library: ctypes.CDLL) -> None:
    library.fr_set_threads(_default_threads() if _threads is None else _threads)


def _load() -> ctypes.CDLL:
    global _runtime
    # Not under the lock, since a build takes a second: of two threads that load, one wins.
    library = _installed(FOLDER) or _build()
    with _lock:
        if _runtime is None:
            _apply(library)
            printing.attach(library)
            _runtime = library
        return _runtime


def _prototypes(library: ctypes.CDLL) -> ctypes.CDLL:
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@functools.lru_cache(maxsize=1)
def source_digest() -> str:
    """The SHA-256 of the runtime's sources; ``setup.py`` builds the same one in."""
    files = [FOLDER / "runtime" / name for name in SOURCES]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _installed(folder: Path) -> ctypes.CDLL | None:
    """The library that was built at installation, if it is there and of these sources."""
    for suffix in EXTENSION_SUFFIXES:
        path = folder / f"_runtime{suffix}"
        if not path.is_file():
            continue
        try:
            library = _prototypes(ctypes.CDLL(str(path)))
        except (OSError, AttributeError):  # built for another system, or something else
            continue
        same = library.fr_digest() == source_digest().encode()
        if same and library.fr_version() == VERSION:
            return library
    return None


def _build() -> ctypes.CDLL:
    """The library, built by the compiler of kernels or taken from the cache."""
    try:
        compiler = toolchain.find_compiler()
    except ToolchainError as fault:
        raise ToolchainError(
            "the C runtime that runs kernels on the CPU was not built when ferrule was installed, "
            f"and cannot be built now: {fault}"
        ) from fault

    def make() -> bytes:
        text = f'#define FR_DIGEST "{source_digest()}"\n#include "runtime.c"\n'
        try:
            return compiler.compile(text, flags=[*_FLAGS, f"-I{FOLDER / 'runtime'}"])
        except CompilerFailed as failed:
            raise ToolchainError(
                f"{compiler.path} ({compiler.kind} {compiler.version}) cannot build the C runtime "
                f"that runs kernels on the CPU:\n{failed.log}"
            ) from failed

    key = cache.digest("runtime", source_digest(), compiler.identity, *_FLAGS)
    payload = cache.default().get_or_make(key, make)
    return _prototypes(loader.load_library(payload, "ferrule-runtime"))
