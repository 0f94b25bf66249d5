"""ferrule's part of MLX's graphs, built and loaded: runtime/mlx_node.cpp, compiled against the
headers inside the user's own MLX, once per version of it, and kept in the disk cache. A wheel may
have brought it compiled."""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import re
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx

from ... import cache, dtypes
from ...dtypes import Dtype
from ...errors import CompilerFailed, DeviceError, FerruleWarning, ToolchainError, warn
from ...kernels import entries
from ...kernels.entries import RESOLVE, Bound, Request
from ...spec import Shape
from ...tools import binding, fastcall, loader, toolchain
from ...tools.waiting import Waiting
from . import arrays as mlx
from . import probe as mlx_probe
from . import sources as mlx_sources

VERSION: str = mx.__version__  # type: ignore[attr-defined]
OLDEST = (0, 30, 6)  # before it, MLX loses outputs of nodes that have several, in shapeless traces

_pointer, _object, _string = ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p
_int, _int64 = ctypes.c_int, ctypes.c_int64


class _NodesSetup(ctypes.Structure):
    _fields_ = (
        ("prototype", ctypes.py_object),
        ("ellipsis", ctypes.py_object),
        ("stream", ctypes.py_object),
        ("dtypes", ctypes.py_object),
        ("resolve", RESOLVE),
        ("threads_now", _pointer),
        ("few", ctypes.c_int32),
    )


def at_least(*version: int) -> bool:
    """Whether this MLX is this version, such as 0, 32, 3, or a newer one."""
    numbers = re.findall(r"\d+", VERSION)[: len(version)]
    return tuple(map(int, numbers)) >= version


_failed: list[str] = []  # why the nodes cannot be had


@functools.lru_cache(maxsize=1)
def library() -> ctypes.PyDLL | None:
    """The compiled nodes, ready; None, once with a warning, where they cannot be had."""
    try:
        _check_version()
        native = _brought() or _load(_built())
        _check_layout(native)
    except (ToolchainError, DeviceError) as error:
        _failed.append(str(error))
        warn(
            f"kernels with MLX's arrays run at once, and not inside mx.compile, mx.vmap and "
            f"mx.export_function: {error}",
            FerruleWarning,
        )
        return None
    setup = _NodesSetup(
        mx.array(0.0),
        ...,
        mx.default_stream(mx.cpu),
        tuple(mlx.DTYPES.get(kind.name) for kind in dtypes.ALL),
        entries.resolver(_resolve),
        ctypes.cast(binding.runtime().fr_threads, _pointer),
        binding.FEW,
    )
    entries.kept.append(setup)
    native.fr_mlx_init(ctypes.byref(setup))
    fastcall.tell_when_bypassed(native.fr_mlx_bypass)
    gc.callbacks.append(lambda phase, _: native.fr_mlx_collect() if phase == "start" else None)
    if native.fr_mlx_has_cuda():
        native.fr_mlx_probe_by(functools.partial(mlx_probe.choose, native, number_of))
    return native


def shapeless() -> bool:
    """Whether this thread traces for `mx.compile` or an export with shapeless=True: then sizes must
    not be kept."""
    native = library()
    return native is not None and bool(native.fr_mlx_shapeless())


def loaded() -> ctypes.PyDLL:
    """The compiled nodes.

    Raises:
        DeviceError: they cannot be had.
    """
    native = library()
    if native is None:
        raise DeviceError(f"ferrule's part of MLX's graphs cannot be had here: {_failed[-1]}")
    return native


def state() -> tuple[str | None, str | None]:
    """Where the nodes are from, or None; and why they cannot be had, or None. Nothing is built, so
    that both are None where they would be built when they are first needed."""
    try:
        _check_version()
        native, origin = _brought(), "brought by ferrule's wheel"
        if native is None:
            compiler = _compiler()
            payload = cache.default().get(_key(compiler))
            if payload is None:
                _check_library(compiler)
                return None, None
            native, origin = _load(payload), "built on this machine, kept in the cache"
        _check_layout(native)
    except (ToolchainError, DeviceError) as error:
        return None, str(error)
    return origin, None


def _check_version() -> None:
    """Refuse an MLX that is too old.

    Raises:
        DeviceError: that is so.
    """
    if not at_least(*OLDEST):
        raise DeviceError(
            f"MLX is {VERSION}, and ferrule's nodes need {'.'.join(map(str, OLDEST))} or newer."
        )


def _brought() -> ctypes.PyDLL | None:
    """The nodes that a wheel has brought for this MLX, if it has and they can be loaded."""
    path = mlx_sources.prebuilt(VERSION)
    if not path.is_file():
        return None
    try:
        return _load(path.read_bytes())
    except (OSError, DeviceError, AttributeError):  # of another system
        return None


def _built() -> bytes:
    """The machine code for this MLX, from the cache where it is there.

    Raises:
        ToolchainError: there is no compiler, MLX's headers are missing, or it refuses them, or it
            is one whose C++ library is not MLX's.
    """
    home, compiler = _home(), _compiler()

    def make() -> bytes:
        _check_zig(compiler)
        try:
            return compiler.compile(
                mlx_sources.text(home),
                flags=mlx_sources.flags(home),
                timeout=600.0,
                waiting=Waiting(f"compiling ferrule's nodes for MLX {VERSION}", 10),
            )
        except CompilerFailed as failed:
            raise _compiler_error(compiler, failed.log) from failed

    return cache.default().get_or_make(_key(compiler), make)


def _home() -> Path:
    return Path(mx.__file__).resolve().parent


def _compiler() -> toolchain.Compiler:
    """The compiler that builds the nodes.

    Raises:
        ToolchainError: there is no compiler, or MLX's headers are missing.
    """
    home = _home()
    if not mlx_sources.has_headers(home):
        raise ToolchainError(
            f"MLX's headers are not in {home / 'include'}, where its wheels have them."
        )
    return toolchain.find_compiler()


def _key(compiler: toolchain.Compiler) -> str:
    return cache.digest(
        "mlx_node",
        mlx_sources.digest(),
        VERSION,
        compiler.identity,
        *mlx_sources.FLAGS,
        *mlx_sources.LINK,
    )


def _check_library(compiler: toolchain.Compiler) -> None:
    """Refuse a compiler whose C++ library is not MLX's.

    Raises:
        ToolchainError: that is so.
    """
    _check_zig(compiler)
    try:
        compiler.compile(mlx_sources.guarded(""), flags=["-std=c++20"])
    except CompilerFailed as failed:
        raise _compiler_error(compiler, failed.log) from failed


def _check_zig(compiler: toolchain.Compiler) -> None:
    """Refuse zig, which takes half a minute to build its C++ library before it says anything.

    Raises:
        ToolchainError: it is zig, where MLX's library is another.
    """
    if compiler.kind == "zig" and sys.platform != "darwin":
        raise _compiler_error(compiler, mlx_sources.OTHER_LIBRARY)


def _compiler_error(compiler: toolchain.Compiler, log: str) -> ToolchainError:
    """The error for a compiler's log."""
    description = f"{' '.join(compiler.argv)} ({compiler.kind} {compiler.version})"
    if mlx_sources.OTHER_LIBRARY in log:
        return ToolchainError(
            f"{description} compiles kernels, but not ferrule's nodes of MLX's graphs: it uses "
            "LLVM's C++ library (libc++), and MLX is built with GNU's (libstdc++), whose "
            "classes are others. g++, and clang++ with libstdc++, do both: name one in "
            "FERRULE_CXX, or install one where there is none. " + toolchain.remedy(zig=False)
        )
    return ToolchainError(f"{description} cannot build ferrule's nodes for MLX {VERSION}:\n{log}")


# What functions of runtime/mlx_node.cpp return and take; all others return an int and take nothing,
# or what ctypes converts by itself.
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "fr_mlx_init": (_int, _pointer),
    "fr_mlx_look": (None, _object, ctypes.POINTER(_int64)),
    "fr_mlx_op": (_object, _pointer, _int, _int, _int, _string, _object),
    "fr_mlx_plan": (
        _pointer, _pointer, _int, _int, _string, _object, _object, _object, _int64, _string,
    ),
    "fr_mlx_calls": (_pointer, _int),
    "fr_mlx_again": (_object, _pointer),
    "fr_mlx_remember": (None, _pointer, _object, _pointer),
    "fr_mlx_collect": (None,),
    "fr_mlx_forget": (None, _pointer),
    "fr_mlx_run": (_object, _pointer, _object, _object),
    "fr_mlx_scratch": (_pointer, _int64),
    "fr_mlx_ruled": (_object, _object, _object, _object),
    "fr_mlx_scatter_add": (_object, _object, _object, _object),
    "fr_mlx_probe_by": (None, _object),
    "fr_mlx_look_gpu": (_string, _object),
    "fr_mlx_refused": (_object, _object, _string),
    "fr_mlx_raised": (None, _string),
    "fr_mlx_why": (_string,),
    "fr_mlx_layout": (_string,),
    "fr_mlx_misfit": (_string, _object),
    "fr_mlx_mended": (_object, _object, _object),
    "fr_mlx_record_call": (_object, _string, _object, _object, _object, _object),
    "fr_mlx_traced": (_int64,),
    "fr_mlx_last": (_string,),
}  # fmt: skip


def _load(payload: bytes) -> ctypes.PyDLL:
    handle = loader.load_library(payload, "ferrule-mlx")
    native = ctypes.PyDLL(None, handle=handle._handle)  # the GIL is kept: MLX's arrays are touched
    for name, (result, *parameters) in _SIGNATURES.items():
        function = getattr(native, name)
        function.restype, function.argtypes = result, parameters
    return native


def _check_layout(native: ctypes.PyDLL) -> None:
    """Refuse an MLX whose Python arrays do not lie in memory as the nodes read them.

    Raises:
        DeviceError: that is so.
    """
    probes: Any = (((3, 5, 7), mx.float32, 4), ((2,), mx.float16, 2), ((), mx.int64, 8))
    for shape, dtype, size in probes:
        array = mx.zeros(shape, dtype)
        words = (_int64 * 3)()
        if array.__class__ is mx.array and object.__basicsize__ == 16:
            native.fr_mlx_look(array, words)
        if list(words) != [len(shape), array.size, size]:
            raise DeviceError(
                f"the arrays of MLX {VERSION} do not lie in memory as ferrule knows them; a "
                "newer ferrule may."
            )


def outputs_of(results: Iterable[tuple[Shape, Dtype]]) -> tuple[tuple[Shape, int], ...]:
    """Shapes and dtypes of outputs, as the nodes take them."""
    return tuple([(shape, dtypes.ALL.index(kind)) for shape, kind in results])


# By the numbers that nodes know them by. Who gives a number to C holds what it is for as long.
bound: weakref.WeakValueDictionary[int, Bound] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def number_of(target: Bound) -> int:
    """A new number for what nodes run, by which they ask for its kernels."""
    number = next(_numbers)
    bound[number] = target
    return number


def _resolve(request: Request) -> int:
    address: int = bound[request.op].entry(request)
    return address
