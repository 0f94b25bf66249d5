"""Driver: real file systems that are full, read-only or noexec, in a mount namespace of its own.

Run as ``mounted.py FUNCTION FOLDER``; exits with 77 where this user cannot mount.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ferrule.cache import Cache
from ferrule.errors import CacheWarning, DeviceError, ToolchainError
from ferrule.tools import loader, toolchain

_NEW_USERS, _NEW_MOUNTS = 0x10000000, 0x00020000
_READ_ONLY, _NOEXEC, _REMOUNT, _RECURSIVE, _PRIVATE = 0x1, 0x8, 0x20, 0x4000, 0x40000
_SKIPPED = 77


def _call(function: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, function)(*arguments) != 0:
        fault = os.strerror(ctypes.get_errno())
        print(f"this user cannot mount a file system: {function}: {fault}")
        sys.exit(_SKIPPED)


def _isolate() -> None:
    uid, gid = os.geteuid(), os.getegid()
    if not sys.platform.startswith("linux"):
        print("needs Linux's mount namespaces")
        sys.exit(_SKIPPED)
    _call("unshare", _NEW_MOUNTS if uid == 0 else _NEW_MOUNTS | _NEW_USERS)
    if uid != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _call("mount", None, b"/", None, _RECURSIVE | _PRIVATE, None)


def _mount(folder: Path, options: str, flags: int = 0) -> None:
    data = f"mode=0700,{options}".encode()
    _call("mount", b"none", os.fsencode(folder), b"tmpfs", flags, data)


@contextmanager
def _warned(*words: str) -> Iterator[None]:
    """Expects exactly one warning, with these words."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield
    assert len(said) == 1, [str(one.message) for one in said]
    assert said[0].category is CacheWarning
    for word in words:
        assert word in str(said[0].message), (word, str(said[0].message))


def full(folder: Path) -> None:
    for options in ("size=64k", "size=1m,nr_inodes=9"):
        _mount(folder, options)
        store = Cache(folder / "cache")
        kept = []
        with _warned("No space left on device", "Free space there", str(store.path)):
            for n in range(40):
                store.put(str(n), bytes([n]) * 7000)
                if store.get(str(n)) is not None:
                    kept.append(n)
        assert 4 <= len(kept) < 16, kept
        for n in kept:
            assert store.get(str(n)) == bytes([n]) * 7000
        assert store.get_or_make("more", lambda: b"made" * 3000) == b"made" * 3000
        assert all(name.endswith(".entry") for name in os.listdir(store.path))
        assert "No space left" in (store.reason_disabled or "")
        store.clear()
        store.put("again", b"x")
        assert store.get("again") == b"x" and store.reason_disabled is None


def read_only(folder: Path) -> None:
    _mount(folder, "size=1m")
    store = Cache(folder / "cache")
    store.put("k", b"payload")
    for name in os.listdir(store.path):
        os.utime(store.path / name, (0, 0))
    _call("mount", None, os.fsencode(folder), None, _REMOUNT | _READ_ONLY, None)
    for again in (store, Cache(folder / "cache")):
        with _warned("Read-only file system"):
            for _ in range(3):
                assert again.get("k") == b"payload"
                again.put("new", b"x")
                assert again.get_or_make("new", lambda: b"made") == b"made"
        with again.lock("k", timeout=60) as held:
            assert not held
        assert again.clear() == 0 and len(again.entries()) == 1
    with _warned("cannot be created: Read-only file system"):
        Cache(folder / "other").put("k", b"x")


def noexec(folder: Path) -> None:
    _mount(folder, "size=8m", _NOEXEC)
    compiler = toolchain.find_compiler()
    tempfile.tempdir = str(folder)
    library = compiler.compile('extern "C" int f() { return 42; }')
    store = Cache(folder / "cache")  # nothing is executed from here
    store.put("k", library)
    found = store.get("k")
    assert found is not None
    assert loader.load_library(found, "k").f() == 42
    del os.memfd_create
    try:
        loader.load_library(found, "my kernel")
    except DeviceError as fault:
        for word in ("'my kernel'", str(folder), "mounted noexec", "Set TMPDIR to a folder"):
            assert word in str(fault), fault
    else:
        raise AssertionError("it was loaded")
    assert not [name for name in os.listdir(folder) if name.startswith("ferrule-")]


def full_scratch(folder: Path) -> None:
    compiler = toolchain.find_compiler()
    for options in ("size=4k", "size=8k", "size=16k", "size=64k,nr_inodes=2"):
        _mount(folder, options)
        tempfile.tempdir = str(folder)
        text = 'extern "C" int f() { return 42; }\n' + "// filler\n" * 100
        try:
            compiler.compile(text, flags=["-g"])
        except ToolchainError as fault:
            message = str(fault)
            assert "TMPDIR" in message, message
            assert "full" in message or "No space left" in message, message
        else:
            raise AssertionError(f"it was compiled within {options}")
        assert os.listdir(folder) == []


def unprivileged(folder: Path) -> None:
    """A folder of one's own that one may not write: no mount, but root must become another."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # the given one may be root's alone
    try:
        if os.geteuid() == 0:
            os.chown(folder, 65534, 65534)
            child = os.fork()
            if child:
                _, status = os.waitpid(child, 0)
                assert status == 0
                return
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
        _unwritable(folder)
        if os.geteuid() == 65534:
            os._exit(0)
    finally:
        if os.getpid() == _PARENT:
            import shutil

            shutil.rmtree(folder, ignore_errors=True)


def _unwritable(folder: Path) -> None:
    store = Cache(folder / "cache")
    store.put("k", b"payload")
    os.chmod(store.path, 0o500)
    again = Cache(store.path)
    with _warned("entries cannot be written", "Permission denied"):
        for _ in range(3):
            again.put("new", b"x")
            assert again.get("k") == b"payload"
            with again.lock("k", timeout=60) as held:
                assert not held
    os.chmod(store.path, 0o000)
    with _warned("cannot be opened: Permission denied"):
        closed = Cache(store.path)
        assert closed.get("k") is None
        closed.put("k", b"x")
    with _warned("cannot be created: Permission denied"):
        outside = Cache("/ferrule-test/cache")
        outside.put("k", b"x")
        assert outside.get("k") is None


_PARENT = os.getpid()

if __name__ == "__main__":
    if sys.argv[1] != "unprivileged":
        _isolate()
    globals()[sys.argv[1]](Path(sys.argv[2]))
