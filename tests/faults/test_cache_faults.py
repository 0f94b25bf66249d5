"""The disk cache under faults: damage, dying and crowding processes, bad disks and bad folders.

Whatever happens, a read gives the bytes that were put or nothing, and nothing is raised.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faulty import FaultyOs
from ferrule import cache
from ferrule.cache import Cache
from ferrule.errors import CacheWarning
from ferrule.tools import toolchain

Drive = Callable[..., None]
PAYLOAD = b"sixteen bytes..."
YEAR = 365 * 86400.0


def entry_file(store: Cache, key: str) -> Path:
    """The file that holds `key`."""
    return store.path / cache._file_name(key)


def damaged_then_sound(store: Cache, damaged: bytes) -> None:
    """With these bytes in its file, the entry is a miss, is removed, and can be put again."""
    file = entry_file(store, "key")
    file.write_bytes(damaged)
    assert store.get("key") is None
    assert not file.exists()
    store.put("key", PAYLOAD)
    assert store.get("key") == PAYLOAD


@pytest.fixture
def store(tmp_path: Path) -> Cache:
    store = Cache(tmp_path / "cache")
    store.put("key", PAYLOAD)
    return store


# 2, 3, 4: damage


def test_truncated_at_any_of_64_offsets(fast_folder: Path) -> None:
    store = Cache(fast_folder / "c")
    payload = os.urandom(5000)
    store.put("key", payload)
    whole = entry_file(store, "key").read_bytes()
    offsets = {round(i * (len(whole) - 1) / 63) for i in range(64)}
    assert len(offsets) == 64
    for offset in offsets:
        entry_file(store, "key").write_bytes(whole[:offset])
        assert store.get("key") is None
        store.put("key", payload)
        assert store.get("key") == payload
    damaged_then_sound(store, whole + b"\0")
    damaged_then_sound(store, bytes(len(whole)))


def test_any_byte_flipped(fast_folder: Path) -> None:
    store = Cache(fast_folder / "c")
    store.put("key", PAYLOAD)
    whole = entry_file(store, "key").read_bytes()
    assert len(whole) < 100
    for at in range(len(whole)):
        for flip in (0x01, 0x80, 0xFF):
            flipped = bytearray(whole)
            flipped[at] ^= flip
            damaged_then_sound(store, bytes(flipped))


@settings(deadline=None, max_examples=100)
@given(data=st.binary(max_size=300))
def test_a_file_of_anything(memory: Path, data: bytes) -> None:
    store = Cache(memory / "anything")
    store.put("key", PAYLOAD)
    damaged_then_sound(store, data)
    damaged_then_sound(store, b"ferrule\n" + data)
    entry_file(store, "other").write_bytes(b"ferrule\n\0\0\0\1" + data)
    assert store.get("other") is None
    assert {entry.key for entry in store.entries()} >= {"key"}


def test_swapped_entries(store: Cache) -> None:
    store.put("other", b"other payload")
    one, two = entry_file(store, "key"), entry_file(store, "other")
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    assert store.get("key") is None and store.get("other") is None
    one.write_bytes(first)
    assert store.get("key") == PAYLOAD


@pytest.mark.parametrize("what", ["folder", "fifo", "link", "dangling link", "writable by others"])
def test_something_else_in_the_place_of_an_entry(store: Cache, what: str) -> None:
    file = entry_file(store, "key")
    sound = store.path / "sound"
    os.replace(file, sound)
    if what == "folder":
        file.mkdir()
    elif what == "fifo":
        os.mkfifo(file)
    elif what == "link":
        file.symlink_to(sound)
    elif what == "dangling link":
        file.symlink_to(store.path / "nowhere")
    else:
        os.replace(sound, file)
        file.chmod(0o666)
    assert store.get("key") is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)  # a folder cannot be replaced
        store.put("key", b"new")
    assert store.get("key") == (None if what == "folder" else b"new")
    if what == "link":
        assert len(sound.read_bytes()) > len(PAYLOAD), "the write went through the link"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_an_entry_of_another_user(store: Cache) -> None:
    os.chown(entry_file(store, "key"), 12345, -1)
    assert store.get("key") is None


# 1, 5, 14, 15: processes


def test_killed_at_every_step(drive: Drive, fast_folder: Path) -> None:
    drive("crowd.py", "kill_at_every_step", fast_folder)


def test_sixteen_processes_and_one_key(drive: Drive, fast_folder: Path) -> None:
    drive("crowd.py", "same_key", fast_folder)


def test_sixteen_processes_make_it_once(drive: Drive, fast_folder: Path) -> None:
    drive("crowd.py", "made_once", fast_folder)


def test_a_lock_whose_holder_was_killed(drive: Drive, fast_folder: Path) -> None:
    drive("crowd.py", "dead_holder", fast_folder)


def test_a_lock_file_removed_while_it_is_taken(
    store: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last holder removes the file after we opened it, and another locks a new one: what we
    hold then is a lock that nobody else will look at, and must not count."""
    other = contextlib.ExitStack()

    class Racing:
        done = False

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def open(self, path: str, *args: Any, **kwargs: Any) -> int:
            file = os.open(path, *args, **kwargs)
            if path.endswith(".lock") and not self.done:
                self.done = True
                os.unlink(store.path / path)
                assert other.enter_context(store.lock("key", timeout=0))
            return file

    monkeypatch.setattr(cache, "os", Racing())
    with other, Cache(store.path).lock("key", timeout=0.05) as held:
        assert not held
    with store.lock("key", timeout=0) as held:
        assert held


def test_a_fork_among_threads(drive: Drive, fast_folder: Path) -> None:
    drive("crowd.py", "fork_among_threads", fast_folder)


def test_eviction_while_loading(drive: Drive, fast_folder: Path) -> None:
    library = toolchain.find_compiler().compile('extern "C" int f() { return 42; }')
    file = fast_folder / "library"
    file.write_bytes(library)
    drive("crowd.py", "evict_while_loading", fast_folder, file)


def test_an_entry_that_goes_while_it_is_read(store: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    file = entry_file(store, "key")
    whole = file.read_bytes()
    probe = FaultyOs(lambda number, name, args: None)
    monkeypatch.setattr(cache, "os", probe)
    store.get("key")
    for step in range(1, len(probe.calls) + 2):
        file.write_bytes(whole)

        def remove(number: int, name: str, args: tuple[Any, ...], step: int = step) -> None:
            if number == step:
                os.unlink(file)

        monkeypatch.setattr(cache, "os", FaultyOs(remove))
        assert store.get("key") in (PAYLOAD, None)


# 6: threads


def test_eight_threads(fast_folder: Path) -> None:
    store = Cache(fast_folder / "c", max_bytes=30_000)
    start = threading.Barrier(8)
    wrong: list[object] = []

    def work(me: int) -> None:
        try:
            start.wait()
            for n in range(120):
                key = str((me * n) % 7)
                payload = key.encode() * 1500
                if n % 3 == 0:
                    store.put(key, payload)
                elif n % 31 == 1:
                    store.clear()
                elif n % 5 == 0:
                    assert store.get_or_make(key, lambda payload=payload: payload) == payload
                found = store.get(key)
                assert found in (None, payload)
                assert store.size() <= 30_000 + 8 * 2000
                store.entries()
        except BaseException as fault:
            wrong.append(fault)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert all(name.endswith(".entry") for name in os.listdir(store.path))


# 7, 8, 10, 18: disks


def test_a_full_disk(drive: Drive, tmp_path: Path) -> None:
    drive("mounted.py", "full", tmp_path)


def test_a_read_only_disk(drive: Drive, tmp_path: Path) -> None:
    drive("mounted.py", "read_only", tmp_path)


def test_a_folder_that_may_not_be_written(drive: Drive, tmp_path: Path) -> None:
    drive("mounted.py", "unprivileged", tmp_path)


def test_a_noexec_disk(drive: Drive, tmp_path: Path) -> None:
    drive("mounted.py", "noexec", tmp_path)


FAULTS = (
    # what disks and networks say
    *(errno.ESTALE, errno.ENOENT, errno.EBUSY, errno.EIO, errno.ENOSPC, errno.EDQUOT),
    *(errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE),
    *(errno.ETIMEDOUT, errno.ENOLCK, errno.ENOTDIR, errno.ELOOP, errno.ENOMEM),
)
OPERATIONS = st.tuples(
    st.sampled_from(["get", "put", "make", "lock", "entries", "size", "clear", "reason"]),
    st.sampled_from("ab"),
)


@settings(deadline=None, max_examples=150)
@given(
    operations=st.lists(OPERATIONS, min_size=1, max_size=12),
    faults=st.dictionaries(st.integers(1, 80), st.sampled_from(FAULTS), max_size=8),
    bound=st.sampled_from([1 << 30, 400]),
)
def test_any_call_may_fail_at_any_time(
    memory: Path, operations: list[tuple[str, str]], faults: dict[int, int], bound: int
) -> None:
    def fault(number: int, name: str, args: tuple[Any, ...]) -> None:
        if number in faults:
            raise OSError(faults[number], os.strerror(faults[number]))

    folder = memory / "faulty"
    Cache(folder).clear()
    store = Cache(folder, max_bytes=bound)
    put: dict[str, set[bytes | None]] = {"a": {None}, "b": {None}}
    descriptors = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        patch.setattr(cache, "os", FaultyOs(fault))
        for n, (operation, key) in enumerate(operations):
            payload = key.encode() * (100 + n)
            if operation == "get":
                assert store.get(key) in put[key]
            elif operation == "put":
                store.put(key, payload)
                put[key].add(payload)
            elif operation == "make":
                made = store.get_or_make(key, lambda payload=payload: payload)
                put[key].add(payload)
                assert made in put[key] and made is not None
            elif operation == "lock":
                with store.lock(key, timeout=0):
                    pass
            elif operation == "entries":
                assert {entry.key for entry in store.entries()} <= {"a", "b"}
            elif operation == "size":
                assert store.size() >= 0
            elif operation == "clear":
                assert store.clear() <= 2
            else:
                assert store.reason_disabled is None or isinstance(store.reason_disabled, str)
    assert len(said) <= 1
    if descriptors:
        assert len(os.listdir("/proc/self/fd")) == descriptors
    sound = Cache(folder)
    for key, possible in put.items():
        assert sound.get(key) in possible
        sound.put(key, b"sound")
        assert sound.get(key) == b"sound"


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EBUSY, errno.ENOENT, errno.EIO])
@pytest.mark.parametrize("name", ["open", "fstat", "read", "close"])
def test_a_network_disk_that_stumbles_is_a_miss_and_no_more(
    store: Cache, name: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumble(_: int, called: str, args: tuple[Any, ...]) -> None:
        if called == name:
            raise OSError(number, os.strerror(number))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with monkeypatch.context() as patch:
            patch.setattr(cache, "os", FaultyOs(stumble))
            assert store.get("key") in (None, PAYLOAD)
        assert store.get("key") == PAYLOAD, "a fault of the network removed the entry"
        assert store.reason_disabled is None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("name", ["write", "fsync", "close", "replace"])
def test_a_failed_write_keeps_the_old_entry_and_leaves_nothing(
    store: Cache, name: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumble(_: int, called: str, args: tuple[Any, ...]) -> None:
        if called == name:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(cache, "os", FaultyOs(stumble))
    with pytest.warns(CacheWarning, match="entries cannot be written") as said:
        for _ in range(3):
            store.put("key", b"new")
    assert len(said) == 1
    monkeypatch.undo()
    assert store.get("key") == PAYLOAD
    assert os.listdir(store.path) == [entry_file(store, "key").name]


def test_short_reads_and_writes(store: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        def __getattr__(self, name: str) -> Any:
            if name == "read":
                return lambda file, size: os.read(file, min(size, 7))
            if name == "write":
                return lambda file, data: os.write(file, data[:5])
            return getattr(os, name)

    monkeypatch.setattr(cache, "os", Slow())
    store.put("slow", b"one by one" * 20)
    assert store.get("slow") == b"one by one" * 20
    assert {entry.key for entry in store.entries()} == {"key", "slow"}


# 9: folders that others can write


@pytest.mark.parametrize(
    ("what", "reason", "cure"),
    [
        ("mode 0777", "other users can write to it (mode 0777)", "Run: chmod 700 {path}."),
        ("mode 0770", "other users can write to it (mode 0770)", "Run: chmod 700 {path}."),
        ("mode 0702", "other users can write to it (mode 0702)", "Run: chmod 700 {path}."),
        ("another's", "it belongs to user 12345, not to user", "to a folder of your own."),
        ("a link", "it is a symbolic link", "Set FERRULE_CACHE_DIR to {target}."),
        ("a dangling link", "it is a symbolic link", "Set FERRULE_CACHE_DIR to {target}."),
        ("a file", "it is not a folder", "to a folder of your own."),
        ("in a file", "it is not a folder", "to a folder of your own."),
        ("too long", "File name too long", "to a folder of your own."),
    ],
)
def test_a_folder_that_is_not_ours_alone(tmp_path: Path, what: str, reason: str, cure: str) -> None:
    path, target = tmp_path / "cache", tmp_path / "target"
    planted = Cache(target if what == "a link" else path)
    if what not in ("a file", "in a file", "a dangling link"):
        planted.put("key", b"planted")
    if what.startswith("mode"):
        path.chmod(int(what[-4:], 8))
    elif what == "another's":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(path, 12345, -1)
    elif what.endswith("link"):
        path.symlink_to(target)
    elif what == "too long":
        path = tmp_path / ("x" * 300)
    else:
        path.write_text("a file")
        path = path / "cache" if what == "in a file" else path
    before = _tree(tmp_path)
    store = Cache(f"{path}/" if what == "a link" else path)  # a slash would follow the link
    with pytest.warns(CacheWarning) as said:
        for _ in range(3):
            assert store.get("key") is None
            store.put("key", PAYLOAD)
            assert store.get_or_make("key", lambda: b"made") == b"made"
            with store.lock("key") as held:
                assert not held
        assert store.entries() == [] and store.clear() == 0
    assert len(said) == 1
    message = str(said[0].message)
    assert message.startswith(
        f"kernels are compiled anew in each process, because the folder {path}"
    )
    assert reason in message
    assert message.endswith(cure.format(path=path, target=target))
    assert reason in (store.reason_disabled or "")
    assert _tree(tmp_path) == before


def test_a_folder_that_is_opened_to_others_later(store: Cache) -> None:
    assert store.get("key") == PAYLOAD
    store.path.chmod(0o777)
    with pytest.warns(CacheWarning, match="other users can write"):
        assert store.get("key") is None


def test_a_folder_that_is_removed_and_comes_back(store: Cache) -> None:
    import shutil

    shutil.rmtree(store.path)
    assert store.get("key") is None
    store.put("key", b"again")
    assert store.get("key") == b"again"
    assert store.path.stat().st_mode & 0o777 == 0o700


def _tree(folder: Path) -> set[str]:
    return {os.path.join(root, name) for root, dirs, files in os.walk(folder) for name in files}


# 13: a clock that was set back


def test_stamps_from_the_future(tmp_path: Path) -> None:
    store = Cache(tmp_path / "c", max_bytes=4000)
    for key in "abc":
        store.put(key, key.encode() * 900)
    for name in os.listdir(store.path):  # written before the clock was set back by a year
        _stamp(store.path / name, YEAR)
    dead = store.path / f"{'0' * 64}.{'0' * 16}.temp"
    dead.write_bytes(b"x" * 100)
    _stamp(dead, YEAR)
    assert store.get("b") == b"b" * 900  # a use stamps it afresh
    Cache(store.path, max_bytes=4000).put("d", b"d" * 900)
    Cache(store.path, max_bytes=4000).put("e", b"e" * 900)
    assert {entry.key for entry in store.entries()} == {"b", "d", "e"}
    assert not dead.exists()


@pytest.mark.parametrize(
    ("age", "stays"), [(-YEAR, False), (-7200, False), (-60, True), (0, True), (7200, False)]
)
def test_files_of_writers_that_died(tmp_path: Path, age: float, stays: bool) -> None:
    path = tmp_path / "c"
    Cache(path).put("k", b"x")
    leftovers = [path / f"{'0' * 64}.{'0' * 16}.temp", path / f"{'0' * 64}.lock"]
    for file in leftovers:
        file.write_bytes(b"x")
        _stamp(file, age)
    Cache(path).put("k", b"x")
    assert [file.exists() for file in leftovers] == [stays, stays]


def _stamp(file: Path, shift: float) -> None:
    import time

    os.utime(file, (time.time() + shift,) * 2)


# 17: interrupts


def test_an_interrupt_at_every_step_of_a_write(
    fast_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = 0
    while True:
        step += 1
        store = Cache(fast_folder / str(step))
        store.put("key", PAYLOAD)

        def interrupt(number: int, name: str, args: tuple[Any, ...], step: int = step) -> None:
            if number == step:
                raise KeyboardInterrupt

        disk = FaultyOs(interrupt)
        with monkeypatch.context() as patch:
            patch.setattr(cache, "os", disk)
            try:
                store.put("key", b"new")
            except KeyboardInterrupt:
                pass
            else:
                break
        assert store.get("key") in (PAYLOAD, b"new")
        assert os.listdir(store.path) == [entry_file(store, "key").name]
    assert step > 8


def test_an_interrupt_while_making_frees_the_lock(store: Cache) -> None:
    def make() -> bytes:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.get_or_make("new", make)
    with store.lock("new", timeout=0) as held:
        assert held
