"""Loads a shared library from bytes that were verified, never from a path that others can reach."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import os
import re

from ..errors import DeviceError

# fcntl.h and linux/memfd.h; Python has these names only where it was built with newer headers.
_MFD_CLOEXEC, _MFD_ALLOW_SEALING, _MFD_EXEC = 0x1, 0x2, 0x10
_F_ADD_SEALS, _ALL_SEALS = 1033, 0xF  # seal, shrink, grow, write

_serial = itertools.count(1)


def load_library(payload: bytes, name: str) -> ctypes.CDLL:
    """Loads the shared library `payload`, which stays loaded until the process ends.

    Each call gives a library of its own, also for equal bytes.

    Args:
        payload: the bytes of an ELF shared object or a Mach-O dylib.
        name: what debuggers and profilers show.

    Raises:
        DeviceError: the system refuses to load it; says why, and what to do.
    """
    label = re.sub(r"[^A-Za-z0-9_.+-]", "_", name)[:100] or "library"
    faults: list[OSError] = []
    # Memory has no path that could be exchanged and no mount that could be noexec. Where the
    # kernel or a security policy refuses that, a private file does.
    for way in (_from_memory, _from_file):
        try:
            return way(payload, label)
        except OSError as fault:
            faults.append(fault)
    raise DeviceError(_explain(name, faults[-1]))


def load_for_debugger(payload: bytes, name: str) -> ctypes.CDLL:
    """The same from a private file, which a debugger can open while the process lives.

    Raises:
        DeviceError: as `load_library`.
    """
    label = re.sub(r"[^A-Za-z0-9_.+-]", "_", name)[:100] or "library"
    try:
        return _from_file(payload, label, keep=True)
    except OSError as fault:
        raise DeviceError(_explain(name, fault)) from None


def _from_memory(payload: bytes, label: str) -> ctypes.CDLL:
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memfd_create")
    flags = _MFD_CLOEXEC | _MFD_ALLOW_SEALING
    try:
        file = os.memfd_create(label, flags | _MFD_EXEC)
    except OSError:  # MFD_EXEC is newer than memfd_create
        file = os.memfd_create(label, flags)
    try:
        _write(file, payload)
        with contextlib.suppress(OSError):
            import fcntl

            fcntl.fcntl(file, _F_ADD_SEALS, _ALL_SEALS)
        return _open(_unique_path(file))
    finally:
        os.close(file)


def _unique_path(file: int) -> str:
    """A spelling of /proc/self/fd/N that no other load has used.

    Descriptors are numbered anew after a close, and the loader takes a path that it has seen for
    the library that it has loaded. So a serial number is spelled in the path, in binary: ``/.``
    is a one and ``/`` a zero, neither of which changes where the path leads.
    """
    bits = format(next(_serial), "b")
    return f"/proc/self/fd{''.join('/.' if bit == '1' else '/' for bit in bits)}/{file}"


def _from_file(payload: bytes, label: str, keep: bool = False) -> ctypes.CDLL:
    import tempfile

    folder = tempfile.mkdtemp(prefix="ferrule-")  # mode 0700
    path = os.path.join(folder, f"{label}-{next(_serial)}.so")
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o700)
        try:
            _write(file, payload)
        finally:
            os.close(file)
        return _open(path)
    finally:
        if keep:
            atexit.register(_remove, folder, path)
        else:  # the mapping outlives the name
            _remove(folder, path)


def _remove(folder: str, path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def _write(file: int, payload: bytes) -> None:
    view = memoryview(payload)
    while view:
        view = view[os.write(file, view) :]


def _open(path: str) -> ctypes.CDLL:
    # All symbols now: a missing one is an error here, not a crash in a launch.
    return ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)


def _explain(name: str, fault: OSError) -> str:
    import tempfile

    message = f"the compiled library {name!r} could not be loaded: {fault}"
    try:
        folder = tempfile.gettempdir()
        noexec = os.statvfs(folder).f_flag & os.ST_NOEXEC
    except OSError:
        return f"{message}. Set TMPDIR to a folder that can be written."
    if noexec:
        return (
            f"{message}. Programs cannot be run from {folder}: it is mounted noexec. "
            "Set TMPDIR to a folder on a file system that is not."
        )
    return message
