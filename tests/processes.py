"""Python in processes of their own, for tests that need nobody's state in theirs.

`run` starts a new interpreter. `forked` saves the seconds that importing torch takes: a server that
has imported it, and nothing of ferrule, forks for each script, which then runs as ``__main__`` and
ends as any interpreter does. The server's children share its hash seed.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

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
    """The process that forks, while this one lives."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        code = "import processes; exec(processes.next_script())"
        path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code, *modules], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        atexit.register(self.process.kill)

    def ask(self, request: _Request) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        pickle.dump(tuple(request), self.process.stdin)
        self.process.stdin.flush()
        return int(pickle.load(self.process.stdout))  # noqa: S301


@functools.cache
def _server(modules: tuple[str, ...]) -> _Server:
    return _Server(modules)


def next_script() -> Any:
    """In the server: fork for each request, and return its script in the child."""
    for name in sys.argv[1:]:
        importlib.import_module(name)
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    while True:
        try:
            request = _Request(*pickle.load(requests))  # noqa: S301
        except EOFError:
            os._exit(0)
        child = os.fork()
        if child == 0:
            answers.close()
            return _become(request)
        pickle.dump(_status(child, request.timeout), answers)
        answers.flush()


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
