"""Compilers that hang, crash, flood, lie, vanish or change, and users who press Ctrl-C.

The compilers are shell scripts that look like g++ and then misbehave. Whatever they do, the error
says which compiler did what, and no process and no file stays behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from faulty import HERE
from ferrule import _env, cache
from ferrule.errors import CompilerFailed, ToolchainError
from ferrule.tools import compiler_process, toolchain
from ferrule.tools.toolchain import find_compiler

Drive = Callable[..., None]

LIBRARY = "printf library > kernel.so"
HANG = "echo $$ > {root}/pids; sleep 1000 & echo $! >> {root}/pids; touch {root}/hangs; wait"


class Scripts:
    """Writes compilers that print a version, and run a line of shell when they should compile."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.scratch = root / "scratch"
        self.scratch.mkdir()

    def __call__(self, line: str, *, version: str = "echo 'g++ 12.2.0'", name: str = "g++") -> Path:
        path = self.root / name
        path.write_text(
            f'#!/bin/sh\nif [ "$1" = --version ]; then {version}\nelse\n'
            f"{line.format(root=self.root)}\nfi\n"
        )
        path.chmod(0o755)
        return path

    def pids(self) -> list[int]:
        """The processes that a hanging compiler started, once it has."""
        file = self.root / "pids"
        for _ in range(9000):
            if file.exists() and len(pids := file.read_text().split()) == 2:
                return [int(pid) for pid in pids]
            time.sleep(0.01)
        raise AssertionError("the compiler was not started")

    def assert_all_gone(self) -> None:
        for pid in self.pids():
            for _ in range(2000):
                if not _alive(pid):
                    break
                time.sleep(0.01)
            assert not _alive(pid), f"process {pid} outlived its compiler's end"
        assert os.listdir(self.scratch) == []


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:  # dead, but not yet collected by whoever inherited it
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return os.path.isdir("/proc/self") is False


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scripts:
    scripts = Scripts(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(scripts.scratch))
    monkeypatch.setattr(toolchain, "_versions", {})
    return scripts


class Clock:
    """Stands for the `time` module inside `tools.toolchain`: jumps a day once a compiler hangs.

    So nothing depends on how fast this machine is."""

    def __init__(self, hangs: Path) -> None:
        self.hangs = hangs
        self.seen = False
        self.jumped = 0.0

    def monotonic(self) -> float:
        if self.seen:
            self.hangs.unlink()
            self.jumped += 86400.0
        # Not at first sight: that may be when the deadline is set.
        self.seen = not self.seen and self.hangs.exists()
        return time.monotonic() + self.jumped

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@pytest.fixture
def clock(script: Scripts, monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(script.root / "hangs")
    monkeypatch.setattr(compiler_process, "time", clock)
    return clock


def fails(path: Path, *words: str) -> str:
    """Compiles, expects a ToolchainError with these words, and returns its message."""
    compiler = find_compiler(str(path))
    with pytest.raises(ToolchainError) as raised:
        compiler.compile("int f();", timeout=60.0)
    message = str(raised.value)
    assert str(path) in message
    for word in words:
        assert word in message, message
    return message


# 11: missing, hanging, crashing, flooding


def test_it_vanishes_between_finding_and_compiling(script: Scripts) -> None:
    path = script(LIBRARY)
    compiler = find_compiler(str(path))
    path.unlink()
    with pytest.raises(ToolchainError, match=r"cannot be run: .*No such file"):
        compiler.compile("int f();")
    path.write_text("no program at all")
    path.chmod(0o755)
    with pytest.raises(ToolchainError, match=r"cannot be run: .*Exec format error"):
        compiler.compile("int f();")
    assert os.listdir(script.scratch) == []


def test_it_hangs(script: Scripts, clock: Clock) -> None:
    fails(script(HANG), "took longer than 60 s and was stopped")
    script.assert_all_gone()


def test_it_hangs_having_closed_its_output(script: Scripts, clock: Clock) -> None:
    fails(script(f"exec >&- 2>&-; {HANG}"), "took longer than 60 s")
    script.assert_all_gone()


def test_it_prints_forever(script: Scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    fails(script("yes error"), "printed more than 64 MiB", "It began: error")
    assert os.listdir(script.scratch) == []


@pytest.mark.parametrize("megabytes", [30, 100])
def test_it_prints_100_megabytes(script: Scripts, megabytes: int) -> None:
    path = script(f"echo first; head -c {megabytes}000000 /dev/zero | tr '\\0' x >&2; exit 1")
    compiler = find_compiler(str(path))
    tracemalloc.start()
    try:
        with pytest.raises((CompilerFailed, ToolchainError)) as raised:
            compiler.compile("int f();")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10e6
    if megabytes == 30:
        assert isinstance(raised.value, CompilerFailed)
        assert raised.value.log.startswith("first\nxxx") and len(raised.value.log) == 1 << 20
    else:
        assert isinstance(raised.value, ToolchainError)
        assert len(str(raised.value)) < 1000


def test_a_success_may_print_much(script: Scripts) -> None:
    path = script(f"head -c 5000000 /dev/zero; {LIBRARY}")
    assert find_compiler(str(path)).compile("int f();") == b"library"


def test_output_of_any_bytes(script: Scripts) -> None:
    path = script("printf 'kernel.cpp:1: error: \\377\\000\\303\\n'; exit 1")
    with pytest.raises(CompilerFailed, match="error: \ufffd\0\ufffd"):
        find_compiler(str(path)).compile("int f();")


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGKILL", "SIGABRT", "SIGILL"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_it_is_killed_by_a_signal(script: Scripts, name: str, wrapped: bool) -> None:
    number = int(signal.Signals[name])
    kill = f"exit {128 + number}" if wrapped else f"echo words; kill -{number} $$"
    message = fails(script(kill), f"was killed by {name}")
    assert "It printed nothing" in message if wrapped else "words" in message


@pytest.mark.parametrize(
    "words",
    [
        "g++: internal compiler error: Killed (program cc1plus)",
        "g++: fatal error: Killed signal terminated program cc1plus",
        "clang: error: clang frontend command failed with exit code 139 (use -v to see it)",
        "kernel.cpp:1:2: internal compiler error: in f, at cp/x.cc:1",
    ],
)
def test_the_compiler_proper_crashes_and_its_driver_says_so(script: Scripts, words: str) -> None:
    fails(script(f"echo '{words}'; exit 1"), "crashed. Its output:", words)


def test_it_finds_the_disk_full(script: Scripts) -> None:
    words = "/usr/bin/ld: final link failed: No space left on device"
    fails(script(f"echo '{words}'; exit 1"), "found the disk full. Set TMPDIR elsewhere", words)


@pytest.mark.parametrize("line", ["exit 0", ": > kernel.so", "mkdir kernel.so"])
def test_it_reports_success_without_a_library(script: Scripts, line: str) -> None:
    fails(script(line), "reported success but left no library")


def test_a_daemon_that_keeps_the_pipe_open_is_not_waited_for(script: Scripts) -> None:
    path = script(f"(sleep 1000 & echo $$ $! > {{root}}/pids); {LIBRARY}")
    assert find_compiler(str(path)).compile("int f();", timeout=60) == b"library"
    os.kill(script.pids()[1], signal.SIGKILL)


def test_its_memory_is_bounded(script: Scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("only Linux can limit another process")
    monkeypatch.setattr(compiler_process, "_MAX_MEMORY", 500 << 20)
    program = script.root / "greedy.py"
    program.write_text(
        "import resource, time\n"
        "while resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:\n"
        "    time.sleep(0.001)\n"
        "bytearray(1 << 30)\n"
    )
    path = script(f"exec {sys.executable} {program}")
    with pytest.raises(CompilerFailed, match="MemoryError"):
        find_compiler(str(path)).compile("int f();")


def test_descriptors_beyond_1024(script: Scripts) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1500:
        pytest.skip("this user may not open so many files")
    compiler = find_compiler(str(script(LIBRARY)))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1500), hard))
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        assert compiler.compile("int f();") == b"library"
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_no_descriptor_and_no_folder_stays(script: Scripts) -> None:
    good, bad = script(LIBRARY, name="g++"), script("exit 1", name="c++")
    crash = script("kill -9 $$", name="clang++")
    compilers = [find_compiler(str(path)) for path in (good, bad, crash)]
    before = sorted(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else []
    for compiler in compilers * 3:
        try:
            compiler.compile("int f();")
        except (CompilerFailed, ToolchainError):
            continue
    assert os.listdir(script.scratch) == []
    if before:
        assert sorted(os.listdir("/proc/self/fd")) == before


# Trouble when it is asked for its version


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (HANG, "took longer than 20 s"),
        ("kill -11 $$", "was killed by SIGSEGV"),
        ("echo 'no developer tools' >&2; exit 72", "fails with --version: no developer tools"),
        ("echo hello", "is not g++, clang or zig: --version prints 'hello'"),
        ("echo g++ of no number", "prints no version"),
        ("exit 0", "is not g++, clang or zig: --version prints 'nothing'"),
        ("yes", "printed more than 64 MiB"),
    ],
)
def test_a_compiler_without_a_version_is_passed_over_or_an_error(
    script: Scripts, clock: Clock, version: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_env, "search_path", lambda: str(script.root))
    bad = script(LIBRARY, version=version.replace("{root}", str(script.root)))
    with pytest.raises(ToolchainError) as raised:
        find_compiler("g++")
    assert str(bad) in str(raised.value) and words in str(raised.value)
    good = script(LIBRARY, name="clang++", version="echo clang version 18.1.3")
    assert find_compiler().path == str(good)
    assert cache.default().get("anything") is None
    assert len(cache.default().entries()) == 1, "a failure was remembered"


# C++20, learnt when it is needed


@pytest.mark.parametrize(
    "words",
    [
        "g++: error: unrecognized command line option '-std=c++20'; did you mean '-std=c++2a'?",
        "error: invalid value 'c++20' in '-std=c++20'",
    ],
)
def test_a_compiler_that_knows_c20_by_its_draft_name(script: Scripts, words: str) -> None:
    escaped = words.replace("'", "'\\''")
    old = f"case \"$*\" in *-std=c++2a*) {LIBRARY};; *) echo '{escaped}'; exit 1;; esac"
    assert find_compiler(str(script(old))).compile("int f();") == b"library"
    older = f"echo '{escaped}' | sed \"s/-std=c++20/$1/\"; exit 1"
    message = fails(script(older), "does not know C++20", "g++ 10, clang 10 and newer do")
    assert "Run: " in message


# 12: upgraded


def test_upgraded_between_runs(script: Scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    before = find_compiler(str(script(LIBRARY)))
    upgraded = script("printf better > kernel.so", version="echo 'g++ 13.1.0'")
    after = find_compiler(str(upgraded))
    assert (before.version, after.version) == ("12.2.0", "13.1.0")
    assert before.identity != after.identity and before.path == after.path
    key = [cache.digest("int f();", found.identity) for found in (before, after)]
    store = cache.default()
    store.put(key[0], b"library")
    assert store.get_or_make(key[1], lambda: after.compile("int f();")) == b"better"


def test_a_damaged_note_of_the_version_is_taken_again(
    script: Scripts, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = script(LIBRARY)
    first = find_compiler(str(path))
    (entry,) = (file for file in cache.default().path.iterdir())
    data = bytearray(entry.read_bytes())
    data[-1] ^= 1
    entry.write_bytes(bytes(data))
    monkeypatch.setattr(toolchain, "_versions", {})
    assert find_compiler(str(path)) == first


# 6, 17: threads and interrupts


def test_eight_threads_compile(script: Scripts) -> None:
    compiler = find_compiler(str(script("cp kernel.cpp kernel.so")))
    results: dict[int, bytes] = {}

    def work(me: int) -> None:
        for n in range(3):
            results[me * 10 + n] = compiler.compile(f"text {me} {n}")

    threads = [threading.Thread(target=work, args=(me,)) for me in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {me * 10 + n: f"text {me} {n}".encode() for me in range(8) for n in range(3)}
    assert os.listdir(script.scratch) == []


@pytest.mark.parametrize("while_", ["compiling", "asking for the version"])
def test_an_interrupt_ends_the_compiler(script: Scripts, while_: str) -> None:
    hang = HANG.format(root=script.root)
    path = script(hang) if while_ == "compiling" else script("exit 1", version=hang)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, HERE / "interrupted.py", path, script.scratch],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        script.pids()
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    if while_ == "compiling":
        assert (output, process.returncode) == ("interrupted\n", 0), errors
    else:
        assert "KeyboardInterrupt" in errors
    script.assert_all_gone()


def test_an_interrupt_while_the_compiler_is_started(
    script: Scripts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler runs, but nobody has its number yet: that takes long on a busy machine."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("interrupts reach the main thread alone")
    compiler = find_compiler(str(script(HANG)))

    class Slow(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            script.pids()
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.01)  # where Python would raise it

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(subprocess, "Popen", Slow)
    with pytest.raises(KeyboardInterrupt):
        compiler.compile("int f();")
    assert signal.getsignal(signal.SIGINT) is before
    script.assert_all_gone()


# The scratch folder


def test_no_temporary_folder(script: Scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = find_compiler(str(script(LIBRARY)))
    monkeypatch.setattr("tempfile.tempdir", str(script.root / "missing"))
    with pytest.raises(ToolchainError, match=r"no temporary folder .* Set TMPDIR to one"):
        compiler.compile("int f();")


def test_the_scratch_folder_is_private_and_the_compilers_own(script: Scripts) -> None:
    path = script("ls -ld . | cut -c1-10 > kernel.so; echo $TMPDIR $PWD >> kernel.so")
    mode, folders = find_compiler(str(path)).compile("int f();").decode().splitlines()
    assert mode == "drwx------"
    temporary, working = folders.split()
    assert temporary == working and Path(working).parent == script.scratch


def test_a_full_scratch_disk(drive: Drive, tmp_path: Path) -> None:
    if not any(True for _ in toolchain._which("g++")):
        pytest.skip("needs g++")
    drive("mounted.py", "full_scratch", tmp_path)
