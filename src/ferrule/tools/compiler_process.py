"""Runs a compiler: without a shell, in its own process group and its own scratch folder.

Its time, memory and output are limited; whatever happens, the folder and the processes are gone
afterwards.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .. import _env
from ..errors import CompilerFailed, ToolchainError
from .waiting import Waiting

if TYPE_CHECKING:  # as long to import as a cached kernel takes to load
    import subprocess
    from types import FrameType

_MAX_LOG = 1 << 20  # bytes of a compiler's output that are kept
_MAX_OUTPUT = 64 << 20  # bytes of output after which it is stopped
_MAX_MEMORY = 16 << 30  # bytes of address space
_SIDE_EFFECTS = ("DEPENDENCIES_OUTPUT", "SUNPRO_DEPENDENCIES")  # gcc writes files they name

# A driver that lives reports, in words, a compiler proper that died.
_CRASH = (
    r"internal compiler error|signal terminated program|frontend command failed"
    r"|unable to execute command|PLEASE submit a bug report|LLVM ERROR"
)


_SCRATCH = "ferrule-compile-"  # how folders to compile in begin
_ABANDONED = 24 * 3600.0  # seconds


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Holds Ctrl-C back until the block ends: what the block makes has an owner by then."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield  # nothing is raised in this thread
        return
    arrived: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: arrived.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if arrived:
        handler(*arrived[0])


@contextlib.contextmanager
def scratch_folder() -> Iterator[str]:
    """A private folder, removed however the block ends."""
    import shutil
    import tempfile

    folder = None
    try:
        with _interrupts_wait():
            try:
                folder = tempfile.mkdtemp(prefix=_SCRATCH)  # mode 0700
            except OSError as fault:
                raise ToolchainError(
                    f"no temporary folder to compile in: {fault}. "
                    "Set TMPDIR to one that can be written."
                ) from fault
        yield folder
    finally:
        if folder is not None:
            with _interrupts_wait():
                shutil.rmtree(folder, ignore_errors=True)
                _remove_abandoned(os.path.dirname(folder))


def _remove_abandoned(temporary: str) -> None:
    """Removes what processes that were killed have left there a day ago or longer."""
    import shutil

    with contextlib.suppress(OSError), os.scandir(temporary) as entries:
        for entry in entries:
            if entry.name.startswith(_SCRATCH) and entry.is_dir(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == os.getuid() and time.time() - status.st_mtime > _ABANDONED:
                    shutil.rmtree(entry.path, ignore_errors=True)


def write(folder: str, name: str, text: bytes) -> None:
    try:
        with open(os.path.join(folder, name), "xb") as file:
            file.write(text)
    except OSError as fault:
        raise ToolchainError(
            f"the kernel's text cannot be written to {folder}: {fault.strerror}. "
            "Free space there, or set TMPDIR to another folder."
        ) from fault


def run(argv: Sequence[str], folder: str, timeout: float, waiting: Waiting | None = None) -> str:
    """Runs a compiler in `folder`; returns what it printed.

    Raises:
        CompilerFailed: it exited with an error of its own.
        ToolchainError: it could not be run, crashed, took too long or printed without end.
    """
    import subprocess

    environment = _env.child_environment()
    for name in _SIDE_EFFECTS:
        environment.pop(name, None)
    environment["TMPDIR"] = folder  # its temporary files go when the folder goes
    process = None
    done = False
    try:
        with _interrupts_wait():
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environment,
                start_new_session=True,  # one group: the compiler proper can be killed too
            )
        _limit(process.pid)
        output, trouble = _collect(process, time.monotonic() + timeout, waiting)
        done = trouble is None
    except (OSError, ValueError) as fault:
        raise ToolchainError(f"{argv[0]} cannot be run: {fault}") from fault
    finally:
        if waiting is not None:
            waiting.end()
        if process is not None:
            if not done:
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    log = output.decode("utf-8", "replace")
    if trouble == "time":
        raise ToolchainError(
            f"{argv[0]} took longer than {timeout:g} s and was stopped.{quoted(log)}"
        )
    if trouble == "output":
        raise ToolchainError(
            f"{argv[0]} printed more than {_MAX_OUTPUT >> 20} MiB and was stopped. "
            f"It began: {first_line(log)}"
        )
    _judge(argv[0], process.returncode, log)
    return log


def _limit(pid: int) -> None:
    """Bounds the memory of a process and its children to come; no core file on a crash."""
    # From here and not between fork and exec, where Python is not safe among threads.
    with contextlib.suppress(ImportError, AttributeError, OSError, ValueError):
        import resource

        resource.prlimit(pid, resource.RLIMIT_AS, (_MAX_MEMORY, _MAX_MEMORY))
        resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))


def _collect(
    process: subprocess.Popen[bytes], deadline: float, waiting: Waiting | None
) -> tuple[bytes, str | None]:
    """Waits for the process; returns its first MB of output, and what went wrong.

    The end of the output is not awaited for ever: a daemon that the compiler started (a compile
    server, say) may keep the pipe open.
    """
    import select

    pipe = process.stdout.fileno() if process.stdout is not None else -1
    events = select.poll()  # unlike select.select, at home with more than 1024 descriptors
    events.register(pipe, select.POLLIN)
    output = bytearray()
    total = 0
    open_ = True
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        if waiting is not None:
            waiting.tick()
        if not open_:
            if ended:
                return bytes(output), None
            time.sleep(0.001)
        elif events.poll(0 if ended else 50):  # milliseconds
            data = os.read(pipe, 1 << 16)
            open_ = bool(data)
            total += len(data)
            output += data[: _MAX_LOG - len(output)]
            if total > _MAX_OUTPUT:
                return bytes(output), "output"
        elif ended:
            return bytes(output), None
    return bytes(output), "time"


def _judge(program: str, code: int, log: str) -> None:
    if code == 0:
        return
    # A shell that wraps a compiler reports the signal that killed it as 128 + its number.
    number = -code if code < 0 else code - 128
    with contextlib.suppress(ValueError):
        name = signal.Signals(number).name
        raise ToolchainError(f"{program} was killed by {name}.{quoted(log)}")
    if "No space left on device" in log:
        raise ToolchainError(f"{program} found the disk full. Set TMPDIR elsewhere.{quoted(log)}")
    if re.search(_CRASH, log, re.IGNORECASE):
        raise ToolchainError(f"{program} crashed.{quoted(log)}")
    raise CompilerFailed(log)


def quoted(log: str) -> str:
    """A log's end, for a message."""
    return f" Its output:\n{log[-4000:]}" if log.strip() else " It printed nothing."


def first_line(log: str) -> str:
    return next((line.strip()[:200] for line in log.splitlines() if line.strip()), "nothing")
