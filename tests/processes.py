"""Python in processes of their own, for tests that need nobody's state in theirs.

`run` starts a new interpreter. `forked` saves the seconds that importing torch takes: a server that
has imported it, and nothing of ferrule, forks for each script, which then runs as ``__main__`` and
ends as any interpreter does. The server's children share its hash seed. There is one for each list
of modules, for all workers; with inductor, it has compiled something before it forks.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import zlib
from collections.abc import Mapping
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any, NamedTuple

import filelock

TORCH = ("torch",)
COMPILING = (  # what Dynamo and inductor import when they first compile: 5 s
    "torch", "torch._dynamo", "torch._dynamo.utils", "torch._inductor.compile_fx", "torch.export",
    "torch._functorch.aot_autograd", "torch._dynamo.backends.inductor",
)  # fmt: skip


def run(
    script: str, *arguments: object, timeout: float = 240, **how: Any
) -> subprocess.CompletedProcess[str]:
    """A script in a new interpreter, whatever comes of it."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)], text=True,
        capture_output=True, timeout=timeout, **how,
    )  # fmt: skip


def forked(
    script: str | Path, *arguments: object, modules: tuple[str, ...] = TORCH,
    timeout: float = 240, env: Mapping[str, str] | None = None, cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """A script, or a file of one, in a process that has `modules` imported, whatever comes of it.

    Args:
        timeout: seconds after which it is killed.
        env, cwd: its environment and folder; by default those of this process.
    """
    path = str(script) if isinstance(script, Path) else None
    text = textwrap.dedent(script) if isinstance(script, str) else script.read_text("utf-8")
    with tempfile.TemporaryDirectory() as folder:
        request = _Request(
            text, path, [*map(str, arguments)], dict(env or os.environ), str(cwd or Path.cwd()),
            folder, timeout,
        )  # fmt: skip
        status = _server(modules).ask(request)
        out, error = ((Path(folder) / name).read_text() for name in ("out", "error"))
    return subprocess.CompletedProcess([path or "-c", *request.arguments], status, out, error)


def printed(script: str, *arguments: object, modules: tuple[str, ...] = TORCH, **how: Any) -> str:
    """What a script that ends well prints, in a process that has `modules` imported."""
    done = forked(script, *arguments, modules=modules, **how)
    assert done.returncode == 0, done.stderr
    return done.stdout


class _Request(NamedTuple):
    script: str
    path: str | None  # the file of the script
    arguments: list[str]
    environment: dict[str, str]
    cwd: str
    folder: str  # that gets what it prints
    timeout: float


class _Server:
    """A process that forks for all workers of a test run, and this one's connection to it."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
        number = zlib.crc32(" ".join((run, *modules)).encode())
        path = Path(tempfile.gettempdir(), f"ferrule-tests-{number:x}")
        with filelock.FileLock(f"{path}.lock"):
            try:
                self.connection = Client(str(path))
            except (FileNotFoundError, ConnectionRefusedError):
                path.unlink(missing_ok=True)
                self._start(path, modules)
                self.connection = Client(str(path))

    def _start(self, path: Path, modules: tuple[str, ...]) -> None:
        code = "import processes; exec(processes.next_script())"
        folders = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code, path, *modules], stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": folders, "TORCHINDUCTOR_COMPILE_THREADS": "1"},
        )  # fmt: skip
        atexit.register(self._end, path)
        assert self.process.stdout is not None
        assert self.process.stdout.readline()  # it listens

    def _end(self, path: Path) -> None:
        self.process.kill()  # not those who answer the other workers
        for name in (path, f"{path}.lock"):
            Path(name).unlink(missing_ok=True)

    def ask(self, request: _Request) -> int:
        self.connection.send(tuple(request))
        return int(self.connection.recv())


@functools.cache
def _server(modules: tuple[str, ...]) -> _Server:
    return _Server(modules)


def next_script() -> Any:
    """In the server: fork for each worker, and there for each request; return its script."""
    path, *modules = sys.argv[1:]
    for name in modules:
        importlib.import_module(name)
    if "torch._inductor.compile_fx" in modules:
        _compile_once()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = Listener(path)
    print("listening", flush=True)
    while True:
        connection = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            return _next_of(connection)
        connection.close()


def _compile_once() -> None:
    """What inductor imports and asks when it first compiles, it has then in all children."""
    import torch
    from torch._dynamo.utils import counters

    # Autograd of a build with CUDA starts threads, which a fork does not have.
    x = torch.ones(3, requires_grad=torch.version.cuda is None)
    y = torch.compile(lambda x: x.sin())(x)
    if y.requires_grad:
        y.sum().backward()
    torch._dynamo.reset()
    counters.clear()


def _next_of(connection: Any) -> Any:
    """For one worker: answer its requests, and return the script of each in a child."""
    while True:
        try:
            request = _Request(*connection.recv())
        except EOFError:
            os._exit(0)
        child = os.fork()
        if child == 0:
            connection.close()
            return _become(request)
        connection.send(_status(child, request.timeout))


def _become(request: _Request) -> Any:
    """In the child: have the streams, arguments, environment and folder of a request."""
    for number, name in ((0, os.devnull), (1, "out"), (2, "error")):
        flags = os.O_RDWR | os.O_CREAT
        file = os.open(os.path.join(request.folder, name), flags, 0o600)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.cwd)
    sys.argv = [request.path or "-c", *request.arguments]
    if request.path is not None:
        sys.modules["__main__"].__file__ = request.path
        sys.path[0] = os.path.dirname(request.path)
    return compile(request.script, request.path or "<string>", "exec")


def _status(child: int, timeout: float) -> int:
    """The exit status of a child, which is killed when its time is over."""
    end = time.monotonic() + timeout
    while not (waited := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.kill(child, 9)
            end = float("inf")
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(waited[1])
