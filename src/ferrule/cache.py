"""A content-addressed disk cache for compiled kernels: bytes in, bytes out.

Nothing is executed from here, and nothing about a kernel is known here. One entry is one file::

    magic 8 · schema 4 · key length 4 · payload length 8 · SHA-256 32 · key · payload

The checksum covers everything but itself, and the key is inside, so a truncated, flipped or
swapped entry is a miss. `Cache.get` returns the bytes that it verified; loading those, never
the file, is the caller's part.

Entries are trusted because nobody else can write them: the folder must belong to the user, be no
symbolic link, and be closed to the writes of others. It is opened and judged anew in every call,
and files are reached through that descriptor, so it cannot be exchanged in between. A folder
that fails the test is not used, and one warning says why. No fault of the disk is an exception:
a fault while reading is a miss, and what cannot be written is not cached.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from . import _env
from .cache_entry import HEADER, Entry, key_length, pack, unpack
from .cache_entry import digest as digest
from .errors import CacheWarning, KernelError, warn

if TYPE_CHECKING:  # pathlib takes longer to import than a kernel to load
    from pathlib import Path

# Compiled when first used, by housekeeping alone: that takes longer than to read an entry.
_ENTRY = r"[0-9a-f]{64}\.entry"
_SCRATCH = r"[0-9a-f]{64}\.(lock|[0-9a-f]{16}\.temp)"

_STALE = 3600.0  # seconds after which a temporary file has no living writer
_REFRESH = 60.0  # seconds between two notes of an entry's last use
_LOCK_PAUSES = (0.002, 0.05)  # seconds between two tries: the first, and the longest

# What other processes do to a folder, and a network to a file system: no reason to warn.
_PASSING = frozenset({errno.ENOENT, errno.ESTALE, errno.EBUSY})
# What makes a folder useless for as long as the process lives. The rest may pass.
_LASTING = frozenset(
    {errno.ELOOP, errno.EMLINK, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS}
    | {errno.ENAMETOOLONG}
)

_POSIX = hasattr(os, "geteuid")
_MOVE = "Set FERRULE_CACHE_DIR to a folder of your own"


class Cache:
    """A folder of checksummed entries, shared safely by threads and processes.

    Attributes:
        max_bytes: the size in bytes above which the least recently used entries are removed.
    """

    def __init__(
        self, path: Path | str | None = None, max_bytes: int = 1 << 30, *, quiet: bool = False
    ) -> None:
        """Names the folder; nothing is created or read before it is needed.

        Args:
            path: the folder; by default ``FERRULE_CACHE_DIR``, else ``ferrule`` in the user's
                folder for caches.
            max_bytes: the bound on the sum of the entries' sizes.
            quiet: whether the caller says what goes wrong; else a CacheWarning does.

        Raises:
            KernelError: `max_bytes` is negative, or `path` has a NUL.
        """
        if max_bytes < 0:
            raise KernelError(f"max_bytes must be 0 or more bytes, got {max_bytes}")
        if path is not None and "\0" in os.fspath(path):
            raise KernelError(f"the cache's path must have no NUL, got {os.fspath(path)!r}")
        self.max_bytes = max_bytes
        self._refused: str | None = None
        self._unwritable: str | None = None
        self._warned = threading.Lock()  # taken once, never released: unlike a flag, no race
        if quiet:
            self._warned.acquire()
        self._total: int | None = None  # bytes after the last sweep and this process's writes
        self._unswept = 0
        folder = os.fspath(path) if path is not None else _env.get(_env.CACHE_DIR)
        if folder is None:
            home = _env.user_cache_folder()
            folder = os.path.join(home or "~", "ferrule")
            if home is None:
                self._refused = "this user has no home folder"
        self._path = os.path.abspath(folder)  # a later change of the working folder moves nothing

    @property
    def path(self) -> Path:
        """The folder."""
        from pathlib import Path

        return Path(self._path)

    @property
    def reason_disabled(self) -> str | None:
        """Why entries cannot be read or written, or None. Creates the folder to find out."""
        with contextlib.suppress(OSError), self._folder(create=True):
            pass
        return self._refused or self._unwritable

    # Reading and writing

    def get(self, key: str) -> bytes | None:
        """The bytes that were put under `key`, verified, or None."""
        name = _file_name(key)
        try:
            with self._folder() as folder:
                return None if folder is None else self._read(folder, name, key)
        except OSError:
            return None

    def put(self, key: str, payload: bytes) -> bool:
        """Keeps `payload` under `key`, replacing what was there, where the disk allows.

        Another process sees the old entry or the new one, whole. An entry larger than
        `max_bytes` is not kept.

        Returns:
            Whether it is kept.
        """
        name = _file_name(key)
        data = pack(key, payload)
        if len(data) > self.max_bytes:
            return False
        try:
            with self._folder(create=True) as folder:
                if folder is None:
                    return False
                _write(folder, name, data)
                self._unwritable = None
                with contextlib.suppress(OSError):  # the entry itself is safe
                    self._note_written(folder, name, len(data))
                return True
        except OSError as fault:
            if fault.errno not in _PASSING:
                self._warn_unwritable(fault)
        return False

    def get_or_make(self, key: str, make: Callable[[], bytes], timeout: float = 60.0) -> bytes:
        """The bytes under `key`; where there are none, those of `make()`, which are then kept.

        Of several processes that ask at once, one makes the bytes and the others wait for it,
        `timeout` seconds at most.
        """
        payload = self.get(key)
        if payload is None:
            with self.lock(key, timeout):
                payload = self.get(key)
                if payload is None:
                    payload = make()
                    self.put(key, payload)
        return payload

    @contextlib.contextmanager
    def lock(self, key: str, timeout: float = 60.0) -> Iterator[bool]:
        """Holds `key` against other threads and processes, to save them work.

        Yields whether it is held. After `timeout` seconds, or where the file system has no
        locks, the caller goes on without; nothing depends on it but time. A holder that dies
        frees it.
        """
        name = _file_name(key, ".lock")
        held = self._acquire(name, timeout)
        try:
            yield held is not None
        finally:
            if held is not None:
                self._release(name, held)

    # Housekeeping

    def entries(self) -> list[Entry]:
        """Every entry, the most recently used first. Payloads are not verified."""
        entries = []
        with contextlib.suppress(OSError), self._folder() as folder:
            if folder is not None:
                for name, status in _files(folder):
                    if re.fullmatch(_ENTRY, name) and (key := _read_key(folder, name)) is not None:
                        entries.append(Entry(key, status.st_size, status.st_mtime))
        return sorted(entries, key=lambda entry: entry.last_use, reverse=True)

    def size(self) -> int:
        """The sum of the entries' sizes in bytes."""
        total = 0
        with contextlib.suppress(OSError), self._folder() as folder:
            if folder is not None:
                total = sum(s.st_size for name, s in _files(folder) if re.fullmatch(_ENTRY, name))
        return total

    def clear(self) -> int:
        """Removes every entry, and temporary files; returns the number of entries removed.

        Files that are not the cache's own stay.
        """
        removed = 0
        with contextlib.suppress(OSError), self._folder() as folder:
            if folder is not None:
                for name, _ in _files(folder):
                    if re.fullmatch(_ENTRY, name):
                        removed += _remove(folder, name)
                    elif re.fullmatch(_SCRATCH, name):
                        _remove(folder, name)
        self._total = None
        return removed

    # The folder, judged anew each time

    @contextlib.contextmanager
    def _folder(self, create: bool = False) -> Iterator[int | None]:
        """A descriptor of the folder; None where it is missing or must not be used."""
        folder = self._open_folder(create)
        try:
            yield folder
        finally:
            if folder is not None:
                with contextlib.suppress(OSError):
                    os.close(folder)

    def _open_folder(self, create: bool) -> int | None:
        if self._refused is not None or not _POSIX:
            self._refuse(self._refused or "this system has no POSIX file permissions")
            return None
        try:
            folder = self._open_or_create(create)
        except FileNotFoundError:
            return None
        except OSError as fault:
            if fault.errno not in _LASTING:
                raise
            self._refuse(*self._why_not_opened(fault))
            return None
        trusted = False
        try:
            status = os.fstat(folder)
            if status.st_uid != os.geteuid():
                self._refuse(f"it belongs to user {status.st_uid}, not to user {os.geteuid()}")
            elif status.st_mode & 0o022:
                self._refuse(
                    f"other users can write to it (mode {stat.S_IMODE(status.st_mode):04o})",
                    f"Run: chmod 700 {self._path}",
                )
            else:
                trusted = True
        finally:
            if not trusted:
                os.close(folder)
        return folder if trusted else None

    def _open_or_create(self, create: bool) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(self._path, flags)
        except FileNotFoundError:
            if not create:
                raise
        try:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._path, 0o700)
        except OSError as fault:
            if fault.errno in _LASTING or fault.errno == errno.ENOENT:  # in /proc, say
                self._refuse(f"it cannot be created: {fault.strerror}")
                raise FileNotFoundError(errno.ENOENT, "no folder", self._path) from fault
            raise
        return os.open(self._path, flags)

    def _why_not_opened(self, fault: OSError) -> tuple[str, str | None]:
        # A symbolic link is ELOOP, EMLINK or ENOTDIR, by system.
        if fault.errno in (errno.ELOOP, errno.ENOTDIR, errno.EMLINK):
            if os.path.islink(self._path):
                target = os.path.realpath(self._path)
                return "it is a symbolic link", f"Set FERRULE_CACHE_DIR to {target}"
            return "it is not a folder", None
        return f"it cannot be opened: {fault.strerror}", None

    # Telling the user, once

    def _refuse(self, reason: str, remedy: str | None = None) -> None:
        self._refused = reason
        self._warn(f"the folder {self._path} is not used: {reason}", remedy)

    def _warn_unwritable(self, fault: OSError) -> None:
        self._unwritable = f"entries cannot be written: {fault.strerror}"
        full = fault.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = f"Free space there, or {_MOVE[0].lower()}{_MOVE[1:]}" if full else None
        self._warn(f"entries cannot be written to {self._path}: {fault.strerror}", remedy)

    def _warn(self, fault: str, remedy: str | None) -> None:
        if self._warned.acquire(blocking=False):
            message = f"kernels are compiled anew in each process, because {fault}."
            warn(f"{message} {remedy or _MOVE}.", CacheWarning)

    # One entry

    def _read(self, folder: int, name: str, key: str) -> bytes | None:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        file = os.open(name, flags, dir_fd=folder)
        try:
            status = os.fstat(file)
            sound = (
                stat.S_ISREG(status.st_mode)
                and status.st_uid == os.geteuid()
                and not status.st_mode & 0o022
                and HEADER.size <= status.st_size <= self.max_bytes
            )
            payload = unpack(key, _read_all(file, status.st_size)) if sound else None
            if payload is None:
                _remove(folder, name)
                return None
            now = time.time()
            if abs(now - status.st_mtime) > _REFRESH:
                with contextlib.suppress(OSError):  # a read-only file system
                    os.utime(file, (now, now))
            return payload
        finally:
            os.close(file)

    def _note_written(self, folder: int, name: str, size: int) -> None:
        # Listing a large folder takes longer than writing an entry, so it is done now and then.
        # Other processes do it too. Threads may lose a count here: the next sweep finds it.
        self._unswept += size
        if self._total is not None:
            self._total += size
            if self._total <= self.max_bytes and self._unswept <= self.max_bytes // 16:
                return
        self._total = self._sweep(folder, name)
        self._unswept = 0

    def _sweep(self, folder: int, newest: str) -> int:
        """Removes stale temporary files, then the least recently used entries while the sum is
        too large; returns the sum. A stamp from the future says that the clock was set back: it
        proves no use, so such an entry goes first, until its next use stamps it afresh."""
        now = time.time()
        candidates = []
        total = 0
        for name, status in _files(folder):
            if re.fullmatch(_ENTRY, name):
                used = status.st_mtime if status.st_mtime <= now + _STALE else 0.0
                candidates.append((name == newest, used, name, status.st_size))
                total += status.st_size
            elif re.fullmatch(_SCRATCH, name) and abs(now - status.st_mtime) > _STALE:
                _remove(folder, name)
        if total > self.max_bytes:
            for is_newest, _, name, size in sorted(candidates):
                if is_newest or total <= self.max_bytes - self.max_bytes // 8:
                    break
                _remove(folder, name)
                total -= size
        return total

    # Locks

    def _acquire(self, name: str, timeout: float) -> int | None:
        deadline = time.monotonic() + timeout
        pause, longest = _LOCK_PAUSES
        while True:
            try:
                return self._try_lock(name)
            except BlockingIOError:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return None
            except (OSError, ImportError):
                return None
            time.sleep(min(pause, remaining))
            pause = min(pause * 2, longest)

    def _try_lock(self, name: str) -> int | None:
        """A locked descriptor, or None without a folder.

        Raises:
            BlockingIOError: it is held elsewhere.
            OSError, ImportError: there are no locks here.
        """
        import fcntl

        with self._folder(create=True) as folder:
            if folder is None:
                return None
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(name, flags, 0o600, dir_fd=folder)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The last holder may have removed the name between our open and our lock.
                try:
                    here = os.stat(name, dir_fd=folder, follow_symlinks=False)
                except FileNotFoundError:
                    here = None
                if here is None or not os.path.samestat(here, os.fstat(file)):
                    raise BlockingIOError(errno.EWOULDBLOCK, "the lock was removed", name)
            except BaseException:
                os.close(file)
                raise
            return file

    def _release(self, name: str, file: int) -> None:
        import fcntl

        with contextlib.suppress(OSError):
            with self._folder() as folder:
                if folder is not None:
                    _remove(folder, name)
            fcntl.flock(file, fcntl.LOCK_UN)  # a forked child may still hold the descriptor
        with contextlib.suppress(OSError):
            os.close(file)


_defaults: dict[str | None, Cache] = {}
_chosen: Cache | None = None


def default() -> Cache:
    """The cache of this process: `set_default`'s, ``FERRULE_CACHE_DIR``'s, or the user's."""
    if _chosen is not None:
        return _chosen
    folder = _env.get(_env.CACHE_DIR)
    # dict.setdefault is atomic: two threads get one object, and so at most one warning.
    return _defaults.get(folder) or _defaults.setdefault(folder, Cache(folder))


def set_default(path: Path | str | None) -> None:
    """Makes `path` the folder of this process's cache; None is the default folder again."""
    global _chosen
    _chosen = None if path is None else Cache(path)


def _file_name(key: str, suffix: str = ".entry") -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest() + suffix


def _read_all(file: int, size: int) -> bytes:
    """The file's first `size` bytes, or fewer where it was cut."""
    data = os.read(file, size)
    while len(data) < size and (more := os.read(file, size - len(data))):
        data += more
    return data


def _read_key(folder: int, name: str) -> str | None:
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        file = os.open(name, flags, dir_fd=folder)
        try:
            length = key_length(_read_all(file, HEADER.size))
            if length is None or length > os.fstat(file).st_size:
                return None
            return _read_all(file, length).decode("utf-8", "surrogatepass")
        finally:
            os.close(file)
    except (OSError, UnicodeDecodeError):
        return None


def _write(folder: int, name: str, data: bytes) -> None:
    temp = f"{name.removesuffix('.entry')}.{os.urandom(8).hex()}.temp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(temp, flags, 0o600, dir_fd=folder)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(file, view) :]
            now = time.time()
            with contextlib.suppress(OSError):
                os.utime(file, (now, now))  # our clock, not the file server's: sweeps compare them
            os.fsync(file)
        finally:
            os.close(file)  # a network file system reports a failed write here
        os.replace(temp, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        _remove(folder, temp)
        raise


def _remove(folder: int, name: str) -> bool:
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:
        return False
    return True


def _files(folder: int) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder) as items:
        for item in items:
            with contextlib.suppress(OSError):  # removed by another process
                yield item.name, item.stat(follow_symlinks=False)
