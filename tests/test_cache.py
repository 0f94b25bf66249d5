"""The disk cache: what goes in comes out, the bound holds, and the folder is the user's own.

What it must survive is in `tests/faults`.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule import _env, cache
from ferrule.cache import Cache, digest
from ferrule.errors import CacheWarning, KernelError

KEYS = st.text(max_size=40) | st.sampled_from(
    ["", "../../etc/passwd", "a/b", "\0", "x" * 10_000, "\ud800", ".lock", "é\n"]
)
MINUTE = 60.0


class Clock:
    """Stands for the `time` module inside `ferrule.cache`, set by hand."""

    def __init__(self, now: float = 1e9) -> None:
        self.now = now

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(cache, "time", clock)
    return clock


class CountingOs:
    """Stands for the `os` module inside `ferrule.cache`, and counts what is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if not callable(real):
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return real(*args, **kwargs)

        return call


# In and out


@settings(deadline=None, max_examples=25)
@given(contents=st.dictionaries(KEYS, st.binary(max_size=3000), max_size=6))
def test_what_goes_in_comes_out(
    tmp_path_factory: pytest.TempPathFactory, contents: dict[str, bytes]
) -> None:
    store = Cache(tmp_path_factory.mktemp("cache") / "deep" / "er")
    for key in contents:
        assert store.get(key) is None
    for key, payload in contents.items():
        store.put(key, payload)
    again = Cache(store.path)
    assert {key: again.get(key) for key in contents} == contents
    assert {entry.key for entry in again.entries()} == set(contents)
    assert sum(entry.size for entry in again.entries()) == again.size()
    assert again.clear() == len(contents)
    assert again.entries() == [] and again.size() == 0
    assert all(again.get(key) is None for key in contents)


def test_a_second_put_replaces_the_first(tmp_path: Path) -> None:
    store = Cache(tmp_path / "c")
    store.put("k", b"old")
    store.put("k", b"new and longer")
    assert store.get("k") == b"new and longer"
    assert len(store.entries()) == 1


def test_a_large_payload_survives(tmp_path: Path) -> None:
    payload = os.urandom(5 << 20)
    store = Cache(tmp_path / "c")
    store.put("k", payload)
    assert store.get("k") == payload


def test_a_read_creates_nothing(tmp_path: Path) -> None:
    store = Cache(tmp_path / "c")
    assert store.get("k") is None
    assert store.entries() == [] and store.size() == 0 and store.clear() == 0
    assert not store.path.exists()


def test_folder_and_files_are_private(tmp_path: Path) -> None:
    before = os.umask(0)  # the most open one
    try:
        store = Cache(tmp_path / "c")
        store.put("k", b"payload")
        with store.lock("k"):
            modes = {stat.S_IMODE(os.stat(store.path / name).st_mode) for name in _names(store)}
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(store.path).st_mode) == 0o700
    assert modes == {0o600}


def test_only_its_own_files_are_removed(tmp_path: Path) -> None:
    store = Cache(tmp_path / "c", max_bytes=500)
    store.put("k", b"x")
    mine = ["thesis.tex", "a.entry", "a.lock", ".hidden", "f" * 64]
    for name in mine:
        (store.path / name).write_bytes(b"mine" * 1000)
        os.utime(store.path / name, (0, 0))
    for i in range(20):
        store.put(str(i), b"x" * 100)
    store.clear()
    assert _names(store) == sorted(mine)


def test_a_hit_costs_few_system_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Cache(tmp_path / "c")
    store.put("k", b"x" * 50_000)
    counting = CountingOs()
    monkeypatch.setattr(cache, "os", counting)
    assert store.get("k") is not None
    system = [name for name in counting.calls if name not in ("geteuid", "fspath")]
    assert sorted(system) == ["close", "close", "fstat", "fstat", "open", "open", "read"]


def test_get_or_make_makes_once(tmp_path: Path) -> None:
    made = []

    def make() -> bytes:
        made.append(1)
        return b"made"

    store = Cache(tmp_path / "c")
    assert store.get_or_make("k", make) == b"made"
    assert store.get_or_make("k", make) == b"made"
    assert Cache(store.path).get_or_make("k", make) == b"made"
    assert len(made) == 1


def test_a_failing_make_leaves_nothing(tmp_path: Path) -> None:
    store = Cache(tmp_path / "c")

    def make() -> bytes:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        store.get_or_make("k", make)
    assert _names(store) == []
    assert store.get_or_make("k", lambda: b"yes") == b"yes"


# Size and age


@settings(deadline=None, max_examples=30)
@given(
    bound=st.integers(0, 4000),
    puts=st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 1500)), max_size=25),
)
def test_the_bound_holds_after_every_put(
    tmp_path_factory: pytest.TempPathFactory, bound: int, puts: list[tuple[str, int]]
) -> None:
    store = Cache(tmp_path_factory.mktemp("cache"), max_bytes=bound)
    for key, size in puts:
        store.put(key, b"x" * size)
        assert store.size() <= bound
        if store.size() and size + 100 < bound:
            assert store.get(key) == b"x" * size  # the newest is never the victim


def test_the_least_recently_used_goes_first(tmp_path: Path, clock: Clock) -> None:
    store = Cache(tmp_path / "c", max_bytes=4000)
    for key in "abcd":
        clock.now += MINUTE
        store.put(key, b"x" * 900)
    clock.now += 2 * MINUTE
    assert store.get("a") is not None  # noted as used
    clock.now += 2 * MINUTE
    store.put("e", b"x" * 900)
    left = [entry.key for entry in store.entries()]
    assert left == ["e", "a", "d"]  # newest use first; b and c made room


def test_uses_are_noted_once_a_minute(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Cache(tmp_path / "c")
    store.put("k", b"x")
    counting = CountingOs()
    monkeypatch.setattr(cache, "os", counting)
    for _ in range(100):
        clock.now += MINUTE / 20
        store.get("k")
    assert 4 <= counting.calls.count("utime") <= 5


def test_large_folders_are_not_listed_at_every_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Cache(tmp_path / "c")
    counting = CountingOs()
    monkeypatch.setattr(cache, "os", counting)
    for i in range(50):
        store.put(str(i), b"x")
    assert counting.calls.count("scandir") == 1


def test_a_negative_bound_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match="max_bytes must be 0 or more bytes, got -1"):
        Cache(tmp_path, max_bytes=-1)


# Locks


def test_a_lock_excludes_and_is_freed(tmp_path: Path) -> None:
    store = Cache(tmp_path / "c")
    with store.lock("k") as held:
        assert held
        with Cache(store.path).lock("k", timeout=0.05) as second:
            assert not second  # after its timeout it goes on without
        with store.lock("other", timeout=0) as other:
            assert other
    with store.lock("k", timeout=0) as again:
        assert again
    assert _names(store) == []


def test_a_waiting_thread_gets_the_lock(tmp_path: Path) -> None:
    store = Cache(tmp_path / "c")
    inside = 0
    most = 0
    held = []

    def work() -> None:
        nonlocal inside, most
        for _ in range(10):
            with store.lock("k") as got:
                held.append(got)
                inside += 1
                most = max(most, inside)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(held) and len(held) == 40 and most == 1


def test_a_lock_survives_an_exception(tmp_path: Path) -> None:
    store = Cache(tmp_path / "c")
    with pytest.raises(RuntimeError), store.lock("k"):
        raise RuntimeError
    with store.lock("k", timeout=0) as held:
        assert held


# Digests


@given(
    a=st.lists(st.text() | st.binary(), max_size=5), b=st.lists(st.text() | st.binary(), max_size=5)
)
def test_different_parts_have_different_digests(a: list[str | bytes], b: list[str | bytes]) -> None:
    same = [(type(x), x) for x in a] == [(type(x), x) for x in b]
    assert (digest(*a) == digest(*b)) == same


@given(text=st.text(max_size=20), at=st.integers(0, 20))
def test_where_parts_are_cut_matters(text: str, at: int) -> None:
    cut = min(at, len(text))
    assert digest(text) != digest(text[:cut], text[cut:])
    assert len(digest(text)) == 64


# Which folder


def test_the_environment_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_env.CACHE_DIR, str(tmp_path / "one"))
    assert cache.default().path == Cache().path == tmp_path / "one"
    assert cache.default() is cache.default()
    monkeypatch.setenv(_env.CACHE_DIR, str(tmp_path / "two"))
    assert cache.default().path == tmp_path / "two"
    cache.set_default(tmp_path / "three")
    try:
        assert cache.default().path == tmp_path / "three"
    finally:
        cache.set_default(None)
    assert cache.default().path == tmp_path / "two"


def test_a_relative_folder_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = Cache("here")
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path / "away")
    store.put("k", b"x")
    assert (tmp_path / "here").is_dir() and store.path == tmp_path / "here"


@pytest.mark.parametrize(
    ("platform", "chosen", "expected"),
    [
        ("linux", None, "/home/someone/.cache/ferrule"),
        ("linux", "", "/home/someone/.cache/ferrule"),
        ("linux", "relative", "/home/someone/.cache/ferrule"),  # as the XDG standard has it
        ("linux", "/somewhere/else", "/somewhere/else/ferrule"),
        ("darwin", "/somewhere/else", "/home/someone/Library/Caches/ferrule"),
    ],
)
def test_the_users_folder_is_that_of_the_system(
    platform: str, chosen: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(_env.CACHE_DIR, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setattr(sys, "platform", platform)
    if chosen is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", chosen)
    assert Cache().path == Path(expected)


def test_a_path_with_a_nul_is_refused() -> None:
    with pytest.raises(KernelError, match="no NUL"):
        Cache("a\0b")


def test_without_a_home_it_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import pwd

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME", _env.CACHE_DIR):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert _env.user_cache_folder() is None
    store = Cache()
    with pytest.warns(CacheWarning) as said:
        for _ in range(3):
            store.put("k", b"x")
            assert store.get("k") is None
    assert len(said) == 1
    assert "no home folder" in str(said[0].message)
    assert "Set FERRULE_CACHE_DIR to a folder of your own." in str(said[0].message)
    assert store.reason_disabled == "this user has no home folder"
    assert not Path("~").exists()


def test_import_starts_no_process_and_reads_no_folder(tmp_path: Path) -> None:
    script = """
import sys
seen = []
sys.addaudithook(lambda event, args: seen.append(event) if event in EVENTS else None)
EVENTS = {"subprocess.Popen", "os.listdir", "os.scandir", "os.mkdir", "os.fork"}
import ferrule.cache
ferrule.cache.default()
bad = [e for e in seen if e not in ("os.listdir",)]  # the import system lists folders
assert not bad, bad
assert "platformdirs" not in sys.modules and "filelock" not in sys.modules
"""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        _env.CACHE_DIR: str(tmp_path / "c"),
    }
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
    assert not (tmp_path / "c").exists()


def _names(store: Cache) -> list[str]:
    return sorted(os.listdir(store.path))
