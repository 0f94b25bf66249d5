"""Driver: processes that share a cache, and die. Run as ``crowd.py FUNCTION FOLDER …``."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

from faulty import FaultyOs, killer
from ferrule import cache
from ferrule.cache import Cache
from ferrule.tools import loader

PROCESSES = 16
_FORK = multiprocessing.get_context("fork")


def kill_at_every_step(folder: Path) -> None:
    """Whatever the step, the next process finds the old entry, the new one, or none, and goes
    on; an hour later nothing is left of the dead."""
    old, new = b"old" * 300, b"new" * 2000

    def put(store: Cache) -> None:
        store.put("k", new)

    def make(store: Cache) -> None:
        store.get_or_make("k", lambda: new)

    def put_and_evict(store: Cache) -> None:
        store.max_bytes = 7000
        store.put("k", new)

    def clear(store: Cache) -> None:
        store.clear()

    deaths = 0
    for action, before, torn in itertools.product(
        (put, make, put_and_evict, clear), (None, old), (False, True)
    ):
        for step in itertools.count(1):
            place = folder / f"{action.__name__}-{before is None}-{torn}-{step}"
            if before is not None:
                Cache(place).put("k", before)
                Cache(place).put("bystander", b"b" * 900)
            child = os.fork()
            if child == 0:
                cache.os = FaultyOs(killer(step, torn))  # type: ignore[attr-defined]
                action(Cache(place))
                os._exit(0)
            _, status = os.waitpid(child, 0)
            ended = os.WIFEXITED(status)
            assert ended or os.WTERMSIG(status) == signal.SIGKILL
            store = Cache(place)
            found = store.get("k")
            assert found in (before, new, None), (action, step, found)
            if before is not None and action in (put, make):
                assert found is not None, "the old entry was lost"
                assert store.get("bystander") == b"b" * 900
            if ended and action is not clear:
                assert found == (before if before and action is make else new)
            assert store.get_or_make("k", lambda: b"after") in (before, new, b"after")
            store.put("k", b"later")
            assert store.get("k") == b"later"
            _reap(place)
            names = os.listdir(place)
            assert all(name.endswith(".entry") for name in names), names
            if ended:
                break
            deaths += 1
    assert deaths > 60, deaths


def _reap(place: Path) -> None:
    """Lets an hour pass, and writes something, in a process that has not yet looked."""
    for name in os.listdir(place):
        if not name.endswith(".entry"):
            os.utime(place / name, (0, 0))
    Cache(place).put("later", b"x")


def same_key(folder: Path) -> None:
    """16 processes, one key, 200 rounds: a read gives what one of them wrote, or nothing."""
    rounds = 200
    Cache(folder / "same").put("k", bytes([1]) * 1400)
    barrier = _FORK.Barrier(PROCESSES)

    def work(me: int) -> None:
        store = Cache(folder / "same", max_bytes=40_000)
        mine = bytes([me]) * (1000 + 400 * me)
        dice = random.Random(me)
        for _ in range(rounds):
            barrier.wait(60)
            what = dice.randrange(8)
            if what == 0:
                store.clear()
            elif what == 1:
                _damage(store, dice)
            elif what == 2:
                store.put(f"other {me}", mine)  # evicts
            elif what <= 4:
                store.put("k", mine)
            elif what <= 5:
                _check(store.get_or_make("k", lambda: mine, timeout=0.01))
            for _ in range(3):
                found = store.get("k")
                if found is not None:
                    _check(found)

    _together(work, barrier.abort)
    left = [name for name in os.listdir(folder / "same") if name.endswith(".temp")]
    assert left == []
    store = Cache(folder / "same")
    store.put("k", b"\1" * 1400)
    assert store.get("k") == b"\1" * 1400


def _damage(store: Cache, dice: random.Random) -> None:
    names = [name for name in os.listdir(store.path) if name.endswith(".entry")]
    for name in names[:1]:
        try:
            with open(store.path / name, "r+b") as file:
                file.seek(dice.randrange(1000))
                file.write(b"\xff\x00")
                file.truncate(dice.randrange(8000))
        except OSError:
            continue


def _check(payload: bytes) -> None:
    assert payload == payload[:1] * (1000 + 400 * payload[0]), "a mixture was read"


def made_once(folder: Path) -> None:
    """16 processes that want one key make it once, as long as the lock works."""
    barrier = _FORK.Barrier(PROCESSES)
    log = folder / "log"

    def work(me: int) -> None:
        store = Cache(folder / "once")

        def make() -> bytes:
            with open(log, "a") as file:
                file.write("made\n")
            barrier_free.wait(0.05)
            return b"result"

        barrier_free = threading.Event()
        for key in ("a", "b", "c"):
            barrier.wait(60)
            assert store.get_or_make(key, make) == b"result"

    _together(work, barrier.abort)
    assert log.read_text().splitlines() == ["made"] * 3


def dead_holder(folder: Path) -> None:
    """A lock whose holder was killed is free; one whose holder lives is not."""
    store = Cache(folder / "held")
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        with Cache(folder / "held").lock("k") as held:
            os.write(told, b"y" if held else b"n")
            signal.pause()
    assert os.read(ready, 1) == b"y"
    with store.lock("k", timeout=0.1) as held:
        assert not held
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with store.lock("k", timeout=30) as held:
        assert held


def fork_among_threads(folder: Path) -> None:
    """A child forked while threads use the cache and hold locks can use it too."""
    store = Cache(folder / "forked", max_bytes=50_000)
    stop = threading.Event()

    def busy(me: int) -> None:
        for n in itertools.count():
            if stop.is_set():
                return
            store.get_or_make(f"{me} {n % 20}", lambda: bytes([me]) * 2000)
            with store.lock("shared", timeout=1):
                store.put(f"{me} own", bytes([me]) * 3000)

    threads = [threading.Thread(target=busy, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    try:
        for n in range(30):
            child = os.fork()
            if child == 0:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    assert store.get_or_make(f"child {n}", lambda: b"made") == b"made"
                    with store.lock(f"child {n}", timeout=0) as held:
                        assert held
                    store.put("0 1", b"\0" * 2000)
                    assert store.get("0 1") in (b"\0" * 2000, None)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            assert status == 0, f"child {n} ended with {status}"
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def evict_while_loading(folder: Path, library: str) -> None:
    """What was read stays whole, and what was loaded goes on running, while entries go."""
    payload = Path(library).read_bytes()
    place = folder / "evicted"
    barrier = _FORK.Barrier(PROCESSES)

    def work(me: int) -> None:
        store = Cache(place, max_bytes=3 * len(payload))
        loaded = []
        barrier.wait(60)
        for n in range(30):
            if me % 4 == 0:
                store.put(f"{me} {n}", b"x" * len(payload))
                if n % 5 == 0:
                    store.clear()
                continue
            found = store.get_or_make("k", lambda: payload)
            assert found == payload
            if n % 10 == me % 10:
                loaded.append(loader.load_library(found, "k"))
            assert all(one.f() == 42 for one in loaded)
        assert loaded or me % 4 == 0

    _together(work, barrier.abort)


def _together(work: Callable[[int], None], abort: Callable[[], None]) -> None:
    def guarded(me: int) -> None:
        try:
            work(me)
        except BaseException:
            abort()
            raise

    processes = [_FORK.Process(target=guarded, args=(me,)) for me in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * PROCESSES


if __name__ == "__main__":
    signal.alarm(110)  # a deadlock ends here
    globals()[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
