"""ferrule's part of MLX's graphs, built and loaded: runtime/mlx_node.cpp, compiled against the
headers inside the user's own MLX, once per version of it, and kept in the disk cache."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import binding, cache, dtypes, fastcall, loader, op_entries, toolchain
from ..errors import CompilerFailed, DeviceError, FerruleWarning, ToolchainError, warn
from ..op_entries import FEW, RESOLVE, Bound, Request

FOLDER = Path(__file__).resolve().parent.parent / "runtime"
VERSION: str = mx.__version__  # type: ignore[attr-defined]
SOURCES = (
    "mlx_node.cpp", "mlx_cpu.h", "mlx_cuda.h", "mlx_export.h", "mlx_plan.h", "mlx_python.h",
    "mlx_matmul.cpp", *op_entries.SOURCES,
)  # fmt: skip
_FLAGS = ("-std=c++20", "-O2", "-fvisibility=hidden", "-Wno-address")
# The library is named before the text that needs it, which a linker may take for no need.
_LINK = ("-lmlx",) if sys.platform == "darwin" else ("-Wl,--no-as-needed", "-lmlx", "-ldl")

# MLX's own numbers of its dtypes, mlx::core::Dtype::Val.
_NUMBERS = {
    "bool": 0, "uint8": 1, "uint16": 2, "uint32": 3, "uint64": 4, "int8": 5, "int16": 6, "int32": 7,
    "int64": 8, "float16": 9, "float32": 10, "float64": 11, "bfloat16": 12, "complex64": 13,
}  # fmt: skip
_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64


class _Setup(ctypes.Structure):
    _fields_ = (
        ("prototype", ctypes.py_object), ("ellipsis", ctypes.py_object),
        ("dtype", ctypes.py_object), ("stream", ctypes.py_object),
        ("dtypes", ctypes.c_int32), ("mlx_dtype", ctypes.POINTER(ctypes.c_int32)),
        ("item_bytes", ctypes.POINTER(ctypes.c_uint8)), ("resolve", RESOLVE),
        ("threads_now", _pointer), ("few", ctypes.c_int32),
    )  # fmt: skip


_failed: list[str] = []  # why they cannot be had


@functools.lru_cache(maxsize=1)
def library() -> ctypes.PyDLL | None:
    """The compiled nodes, ready; None, once with a warning, where they cannot be had."""
    try:
        found = _loaded(_built())
        _check_layout(found)
    except (ToolchainError, DeviceError) as error:
        _failed.append(str(error))
        warn(
            f"kernels with MLX's arrays run at once, and not inside mx.compile, mx.vmap and "
            f"mx.export_function: {error}",
            FerruleWarning,
        )
        return None
    numbers = [_NUMBERS.get(kind.name, -1) for kind in dtypes.ALL]
    setup = _Setup(
        mx.array(0.0), ..., mx.float32, mx.default_stream(mx.cpu), len(numbers),
        (ctypes.c_int32 * len(numbers))(*numbers),
        (ctypes.c_uint8 * len(numbers))(*[kind.itemsize for kind in dtypes.ALL]),
        op_entries.resolver(_resolve), ctypes.cast(binding.runtime().fr_threads, _pointer), FEW,
    )  # fmt: skip
    op_entries.kept.append(setup)
    found.fr_mlx_init(ctypes.byref(setup))
    fastcall.tell_when_bypassed(found.fr_mlx_bypass)
    return found


def loaded() -> ctypes.PyDLL:
    """The compiled nodes.

    Raises:
        DeviceError: they cannot be had.
    """
    found = library()
    if found is None:
        raise DeviceError(f"ferrule's part of MLX's graphs cannot be had here: {_failed[-1]}")
    return found


def _built() -> bytes:
    """The machine code for this MLX, from the cache where it is there.

    Raises:
        ToolchainError: there is no compiler, MLX's headers are missing, or it refuses them.
    """
    home = Path(mx.__file__).resolve().parent
    if not (home / "include" / "mlx" / "array.h").is_file():
        raise ToolchainError(
            f"MLX's headers are not in {home / 'include'}, where its wheels have them."
        )
    compiler = toolchain.find_compiler()
    texts = b"".join((FOLDER / name).read_bytes() for name in SOURCES)
    digest = hashlib.sha256(texts).hexdigest()
    flags = [
        *_FLAGS, f"-I{FOLDER}", f"-I{home / 'include'}", f"-L{home / 'lib'}", *_LINK,
    ]  # fmt: skip

    def make() -> bytes:
        text = (
            f'#define FR_DIGEST "{digest}"\n{_primitives(home)}\n#include "mlx_node.cpp"\n'
            '#include "mlx_matmul.cpp"\n'
        )
        try:
            return compiler.compile(text, flags=flags, timeout=600.0)
        except CompilerFailed as failed:
            raise ToolchainError(
                f"{compiler.path} ({compiler.kind} {compiler.version}) cannot build ferrule's "
                f"nodes for MLX {VERSION}:\n{failed.log}"
            ) from failed

    key = cache.digest("mlx_node", digest, VERSION, compiler.identity, *_FLAGS, *_LINK)
    return cache.default().get_or_make(key, make)


def _primitives(home: Path) -> str:
    """The classes of MLX's headers, for runtime/mlx_export.h."""
    found = []
    for header, space in (("primitives.h", "core"), ("fast_primitives.h", "core::fast")):
        text = (home / "include" / "mlx" / header).read_text(encoding="utf-8")
        names = re.findall(r"^class (?:MLX_API )?(\w+)(?: final)? : public ", text, re.MULTILINE)
        found += [f"X(mlx::{space}, {name})" for name in names]
    return f"#define FR_PRIMITIVES(X) {' '.join(found)}"


def _loaded(payload: bytes) -> ctypes.PyDLL:
    handle = loader.load_library(payload, "ferrule-mlx")
    found = ctypes.PyDLL(None, handle=handle._handle)  # the GIL is kept: MLX's arrays are touched
    found.fr_mlx_init.argtypes = (_pointer,)
    found.fr_mlx_look.argtypes = (ctypes.py_object, ctypes.POINTER(_int64))
    found.fr_mlx_look.restype = None
    found.fr_mlx_plan.argtypes = (
        _pointer, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.py_object,
    )  # fmt: skip
    found.fr_mlx_plan.restype = _pointer
    found.fr_mlx_fixed.argtypes = (
        _pointer, ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.py_object,
        ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(_int64), ctypes.POINTER(ctypes.c_uint32),
        ctypes.c_int, ctypes.POINTER(_int64), ctypes.c_char_p,
    )  # fmt: skip
    found.fr_mlx_fixed.restype = _pointer
    found.fr_mlx_following.argtypes = (
        _pointer, ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.py_object,
        ctypes.POINTER(ctypes.c_int32), ctypes.c_char_p,
    )  # fmt: skip
    found.fr_mlx_following.restype = _pointer
    found.fr_mlx_calls.argtypes = (ctypes.c_int,)
    found.fr_mlx_calls.restype = _pointer
    found.fr_mlx_again.argtypes = (_pointer,)
    found.fr_mlx_again.restype = ctypes.py_object
    found.fr_mlx_remember.argtypes = (_pointer, ctypes.py_object, _pointer)
    found.fr_mlx_remember.restype = None
    found.fr_mlx_forget.argtypes = (_pointer,)
    found.fr_mlx_forget.restype = None
    found.fr_mlx_callable.argtypes = (_pointer,)
    found.fr_mlx_callable.restype = ctypes.py_object
    found.fr_mlx_run.argtypes = (_pointer, ctypes.py_object, ctypes.py_object)
    found.fr_mlx_run.restype = ctypes.py_object
    found.fr_mlx_scratch.argtypes = (_int64,)
    found.fr_mlx_scratch.restype = _pointer
    found.fr_mlx_ruled.argtypes = (ctypes.py_object,) * 3
    found.fr_mlx_ruled.restype = ctypes.py_object
    found.fr_mlx_scatter_add.argtypes = (ctypes.py_object,) * 3
    found.fr_mlx_scatter_add.restype = ctypes.py_object
    found.fr_mlx_raised.argtypes = (ctypes.c_char_p,)
    found.fr_mlx_raised.restype = None
    found.fr_mlx_why.restype = ctypes.c_char_p
    found.fr_mlx_layout.restype = ctypes.c_char_p
    found.fr_mlx_misfit.argtypes = (ctypes.py_object,)
    found.fr_mlx_misfit.restype = ctypes.c_char_p
    found.fr_mlx_record_call.argtypes = (
        ctypes.c_char_p, ctypes.py_object, ctypes.py_object, _pointer,
    )  # fmt: skip
    found.fr_mlx_record_call.restype = ctypes.py_object
    found.fr_mlx_traced.restype = _int64
    found.fr_mlx_last.restype = ctypes.c_char_p
    return found


def _check_layout(found: ctypes.PyDLL) -> None:
    """Refuse an MLX whose Python arrays do not lie in memory as the nodes read them.

    Raises:
        DeviceError: that is so.
    """
    probes: Any = (((3, 5, 7), mx.float32, 4), ((2,), mx.float16, 2), ((), mx.int64, 8))
    for shape, dtype, size in probes:
        array = mx.zeros(shape, dtype)
        seen = (_int64 * 3)()
        if array.__class__ is mx.array and object.__basicsize__ == 16:
            found.fr_mlx_look(array, seen)
        if list(seen) != [len(shape), array.size, size]:
            raise DeviceError(
                f"the arrays of MLX {VERSION} do not lie in memory as ferrule knows them; a "
                "newer ferrule may."
            )


bound: list[Bound] = []  # by the numbers that nodes know them by


def _resolve(request: Request) -> int:
    address: int = bound[request.op].entry(request)
    return address
