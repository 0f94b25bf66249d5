"""Finds NVRTC, the compiler of CUDA C++ that is a library, and CUDA's headers; compiles with it.
Needs no GPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .. import _env, cache
from ..errors import CompilerFailed, DeviceError, ToolchainError

_BUILTINS = r"libnvrtc-builtins\.(?:so\.[\d.]+|[\d.]+\.dylib)"
_SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2", "libnvrtc.so")
_HEADERS = (
    "cooperative_groups.h",
    "cuda_fp16.h",
    "nv/target",
    "cuda/std/cstdint",
    "cuda/std/tuple",
)
CUDA_HOME = "/usr/local/cuda"
_COMPILATION = 6  # NVRTC_ERROR_COMPILATION


class Nvrtc:
    """One NVRTC library, loaded.

    Attributes:
        path: its file, or its bare name where the system's loader found it.
        version: such as ``(13, 0)``.
        identity: changes whenever the library does.
    """

    def __init__(self, path: str) -> None:
        """Loads the library.

        Raises:
            ToolchainError: it cannot be loaded, or is no NVRTC.
        """
        self.path = path
        try:
            self._library = ctypes.CDLL(path)
            _load_builtins(path)
            major, minor = ctypes.c_int(), ctypes.c_int()
            self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        except (OSError, AttributeError) as fault:
            raise ToolchainError(f"NVRTC at {path} cannot be loaded: {fault}") from fault
        self.version = (major.value, minor.value)
        self.identity = _identity(path) or cache.digest(
            "nvrtc", path, f"{major.value}.{minor.value}"
        )

    def compile(self, source: str, name: str, options: Sequence[str] = ()) -> tuple[bytes, str]:
        """Compiles one translation unit.

        Args:
            source: CUDA C++.
            name: what diagnostics call it.
            options: NVRTC's, one string each. With ``--gpu-architecture=sm_…`` the result is a
                cubin, else PTX.

        Returns:
            The cubin or PTX, and the log with its warnings.

        Raises:
            CompilerFailed: NVRTC refused the text.
            ToolchainError: NVRTC failed in another way, or does not know an option.
        """
        code, log, _ = self.compile_unit(source, name, options, {}, ())
        return code, log

    def compile_unit(
        self,
        source: str,
        name: str,
        options: Sequence[str],
        headers: Mapping[str, str],
        functions: Sequence[str],
    ) -> tuple[bytes, str, list[str]]:
        """Compiles one translation unit, and says what it calls its functions.

        Args:
            source, name, options: as for `compile`.
            headers: texts that the unit can include, by the names under which it does.
            functions: names of ``__global__`` functions, or expressions such as ``"f<3, float>"``,
                which are then made.

        Returns:
            As `compile` does; and the name of each function in the cubin or PTX.

        Raises:
            CompilerFailed: NVRTC refused the text, or there is no such function.
            ToolchainError: NVRTC failed in another way, or does not know an option.
        """
        text = _encoded(source)
        if b"\0" in text:
            raise CompilerFailed(f"{name}: error: the text has a NUL character")
        program = ctypes.c_void_p()
        label = name.encode("utf-8", "replace").replace(b"\0", b"?")
        if self.version >= (13, 0):
            # Its own disk cache, which it has where there is a driver, forgets the log.
            options = [*options, "--no-cache"]
        count = len(headers)
        bodies = (ctypes.c_char_p * count)(*(_encoded(body) for body in headers.values()))
        names = (ctypes.c_char_p * count)(*(_encoded(header) for header in headers))
        self._call("nvrtcCreateProgram", ctypes.byref(program), text, label, count, bodies, names)
        try:
            for function in functions:
                self._call("nvrtcAddNameExpression", program, _encoded(function))
            arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            status = self._library.nvrtcCompileProgram(program, len(options), arguments)
            log = self._fetch("ProgramLog", program).rstrip(b"\0").decode("utf-8", "replace")
            if status == _COMPILATION:
                raise CompilerFailed(log)
            if status:
                raise ToolchainError(f"{self._explain('nvrtcCompileProgram', status)}\n{log}")
            code = self._fetch("CUBIN" if _is_real(options) else "PTX", program)
            return code, log, [self._lowered(program, function) for function in functions]
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def architectures(self) -> list[int]:
        """The compute capabilities that it compiles for, such as ``[75, 80, 90]``."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        capabilities = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", capabilities)
        return list(capabilities)

    def check_architecture(self, subject: str, architecture: str) -> None:
        """Refuse an architecture that it does not compile for.

        Args:
            subject: what was to be compiled, in words.
            architecture: such as ``"sm_90"`` or ``"compute_90"``.

        Raises:
            DeviceError: that is so; lists those that it knows.
        """
        capabilities = self.architectures()
        number = re.fullmatch(r"(?:sm|compute)_([0-9]+)([af]?)", architecture)
        first = {"": 0, "a": 90, "f": 100}  # capabilities that have such architectures
        if (
            number is None
            or int(number[1]) not in capabilities
            or int(number[1]) < first[number[2]]
        ):
            listed = ", ".join(f"sm_{n}" for n in capabilities)
            raise DeviceError(
                f"{subject}: NVRTC {'.'.join(map(str, self.version))} does not compile for "
                f"{architecture!r}; it knows {listed} (and compute_… for PTX)."
            )

    def _lowered(self, program: ctypes.c_void_p, function: str) -> str:
        name = ctypes.c_char_p()  # NVRTC's, as long as the program
        self._call("nvrtcGetLoweredName", program, _encoded(function), ctypes.byref(name))
        return (name.value or b"").decode()

    def _fetch(self, product: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{product}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{product}", program, buffer)
        return buffer.raw

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            raise ToolchainError(self._explain(function, status))

    def _explain(self, function: str, status: int) -> str:
        words = self._library.nvrtcGetErrorString
        words.restype = ctypes.c_char_p
        return f"{function} of {self.path} failed: {words(status).decode()}"


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def _load_builtins(path: str) -> None:
    """Loads what NVRTC asks the system's loader for when it compiles. NVRTC 13.0 of NVIDIA's wheels
    does not say that it lies beside it."""
    for other in _listed(os.path.dirname(path)) if os.path.isabs(path) else []:
        if re.fullmatch(_BUILTINS, os.path.basename(other)):
            with contextlib.suppress(OSError):
                ctypes.CDLL(other)


def _is_real(options: Sequence[str]) -> bool:
    return any(re.match(r"(-arch|--gpu-architecture)=sm_", option) for option in options)


@functools.cache
def find_nvrtc() -> Nvrtc | None:
    """The first NVRTC that loads, or None: that of NVIDIA's wheels, of CUDA_HOME or CUDA_PATH, of
    /usr/local/cuda, or one that the system's loader knows. Looked for once per process."""
    for path in candidates("libnvrtc", _SONAMES):
        try:
            return Nvrtc(path)
        except ToolchainError:
            continue
    return None


@functools.cache
def likely() -> tuple[str, str] | None:
    """The path and identity of what `find_nvrtc` finds first, without loading it, which takes
    10 ms; None where only the system's loader could know it."""
    path = next(candidates("libnvrtc", _SONAMES))
    identity = _identity(path)
    return None if identity is None else (path, identity)


def _identity(path: str) -> str | None:
    """A digest that changes whenever the file does; None for a bare name."""
    try:
        status = os.stat(os.path.realpath(path))
    except OSError:
        return None
    return cache.digest("nvrtc", path, f"{status.st_size} {status.st_mtime_ns}")


class Headers(NamedTuple):
    """CUDA's headers.

    Attributes:
        folders: where ``#include`` looks.
        identity: changes whenever they do.
    """

    folders: tuple[str, ...]
    identity: str


def find_headers(compiler: Nvrtc) -> Headers:
    """The headers for kernels that are written in CUDA C++: those beside NVRTC, else of NVIDIA's
    wheels, of CUDA_HOME or CUDA_PATH, or of /usr/local/cuda.

    Raises:
        ToolchainError: some are missing; names the command that installs them.
    """
    headers = _headers(compiler.path)
    if isinstance(headers, Headers):
        return headers
    suffix = "" if compiler.version >= (13, 0) else "-cu12"
    raise ToolchainError(
        f"<{headers}> of CUDA's headers was not found, which kernels in CUDA C++ include. "
        f"Run: pip install nvidia-cuda-runtime{suffix} nvidia-cuda-cccl{suffix}"
    )


def headers_identity(path: str) -> str:
    """The identity of the headers for the NVRTC at a path; empty where some are missing."""
    headers = _headers(path)
    return headers.identity if isinstance(headers, Headers) else ""


def _headers(compiler: str) -> Headers | str:
    """The headers for the NVRTC at a path, or the first that is missing."""
    beside = os.path.join(os.path.dirname(os.path.dirname(compiler)), "include")
    homes = (*_env.cuda_homes(), CUDA_HOME)
    roots = [beside, *wheel_folders("include"), *(os.path.join(home, "include") for home in homes)]
    roots += [os.path.join(root, "cccl") for root in roots]
    folders: list[str] = []
    state: list[str] = []
    for name in _HEADERS:
        path = next((p for r in roots if os.path.isfile(p := os.path.join(r, name))), None)
        if path is None:
            return name
        status = os.stat(os.path.realpath(path))
        state.append(f"{path} {status.st_size} {status.st_mtime_ns}")
        folder = path[: -len(name) - 1]
        if folder not in folders:
            folders.append(folder)
    return Headers(tuple(folders), cache.digest("headers", *state))


def candidates(stem: str, sonames: Sequence[str]) -> Iterator[str]:
    """Where a library of CUDA may lie, the newest of a folder first, and then its bare names."""
    homes = (*_env.cuda_homes(), CUDA_HOME)
    for folders in (wheel_folders("lib"), *([os.path.join(home, "lib64")] for home in homes)):
        paths = [path for folder in folders for path in _listed(folder)]
        versions = {path: v for path in paths if (v := _version(path, stem)) is not None}
        yield from sorted(versions, key=versions.__getitem__, reverse=True)
    yield from sonames


def wheel_folders(name: str) -> list[str]:
    """The folders of this name in NVIDIA's wheels, which differ in layout: nvidia/cuda_nvrtc/lib,
    and nvidia/cu13/lib since CUDA 13."""
    return [os.path.join(room, name) for root in _wheels() for room in _listed(root)]


def _wheels() -> list[str]:
    from importlib.util import find_spec

    try:
        spec = find_spec("nvidia")
    except (ImportError, ValueError):  # an odd module of that name
        return []
    return list(spec.submodule_search_locations or ()) if spec else []


def _listed(folder: str) -> list[str]:
    try:
        return [os.path.join(folder, name) for name in sorted(os.listdir(folder))]
    except OSError:
        return []


def _version(path: str, stem: str) -> list[int] | None:
    """The version in the name of a library; None where it is another one (-builtins, .alt).

    A regular expression takes longer to compile than a kernel from the cache should wait.
    """
    name = os.path.basename(path)
    before, so, version = name.partition(".so")
    first, *numbers = version.split(".")
    named = (before, so, first) == (stem, ".so", "") or name == f"{stem}.dylib"
    return [int(n) for n in numbers] if named and all(n.isdecimal() for n in numbers) else None
