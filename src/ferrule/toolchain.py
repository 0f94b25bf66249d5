"""Finds and runs the host's C++ compiler.

A compiler is run without a shell, in its own process group and its own scratch folder, with a
limit on its time, memory and output; whatever happens, the folder and the processes are gone
afterwards. What a compiler is, is looked up once and kept in the disk cache under the state of
its files, so finding a known compiler starts no process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from . import _env, cache
from .errors import CompilerFailed, ToolchainError
from .waiting import Waiting

if TYPE_CHECKING:  # as long to import as a cached kernel takes to load
    import subprocess
    from types import FrameType

# In this order. The names with a version help where the plain ones are missing or too old.
_NAMES = (
    "g++",
    "c++",
    "clang++",
    *(f"g++-{n}" for n in range(16, 9, -1)),
    *(f"clang++-{n}" for n in range(22, 9, -1)),
)
_OLDEST = {"gcc": 10, "clang": 10, "zig": 0}  # major versions; older ones lack C++20
_STANDARDS = ("-std=c++20", "-std=c++2a")

_MAX_LOG = 1 << 20  # bytes of a compiler's output that are kept
_MAX_OUTPUT = 64 << 20  # bytes of output after which it is stopped
_MAX_MEMORY = 16 << 30  # bytes of address space
_VERSION_TIMEOUT = 20.0  # seconds
# zig compiles its C++ library before the first kernel: a minute, once per machine.
_PATIENCE = {"gcc": 1.0, "clang": 1.0, "zig": 5.0}

# Variables that change what a compiler makes of the same text, and so belong to its identity.
_STEERING = (
    "CPATH",
    "CPLUS_INCLUDE_PATH",
    "LIBRARY_PATH",
    "COMPILER_PATH",
    "GCC_EXEC_PREFIX",
    "CCC_OVERRIDE_OPTIONS",
    "SDKROOT",
    "MACOSX_DEPLOYMENT_TARGET",
    "NIX_CFLAGS_COMPILE",
    "NIX_LDFLAGS",
)
_SIDE_EFFECTS = ("DEPENDENCIES_OUTPUT", "SUNPRO_DEPENDENCIES")  # gcc writes files they name

# A driver that lives reports, in words, a compiler proper that died.
_CRASH = (
    r"internal compiler error|signal terminated program|frontend command failed"
    r"|unable to execute command|PLEASE submit a bug report|LLVM ERROR"
)


_SCRATCH = "ferrule-compile-"  # how folders to compile in begin
_ABANDONED = 24 * 3600.0  # seconds


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler.

    Attributes:
        kind: ``"gcc"``, ``"clang"`` or ``"zig"``.
        argv: how it is called, before any flag.
        version: as it prints it, such as ``"12.2.0"``.
        path: the file that is run.
        identity: changes whenever the compiler, or a variable that steers it, does.
    """

    kind: str
    argv: tuple[str, ...]
    version: str
    path: str
    identity: str = field(repr=False)

    def compile(
        self, source: str, *, flags: Sequence[str] = (), timeout: float = 120.0,
        waiting: Waiting | None = None,
    ) -> bytes:  # fmt: skip
        """Compiles a C++20 translation unit to a shared library.

        The text is called ``kernel.cpp`` in diagnostics. `flags` are added to ``-shared -fPIC``
        and to the flag for C++20, unless they name a standard themselves.

        Args:
            source: the text.
            flags: more flags, one string each.
            timeout: seconds after which the compiler is stopped; five times that for zig.
            waiting: tells whoever waits; by default only of zig's first use.

        Returns:
            The library's bytes.

        Raises:
            CompilerFailed: the compiler refused the text.
            ToolchainError: it could not be run, crashed, took too long or printed without end.
        """
        text = source.encode("utf-8", "backslashreplace")
        if waiting is None and self.kind == "zig":
            waiting = Waiting("zig builds its C++ library before it first compiles", 60)
        common = ["-shared", "-fPIC", "-fdiagnostics-color=never", *flags]
        if self.kind == "gcc":
            # Otherwise libraries of one process share the static variables of their templates.
            common.insert(0, "-fno-gnu-unique")
        if any(flag.startswith("-std=") for flag in flags):
            return self._compile(text, common, timeout, waiting)
        for standard in _STANDARDS:
            try:
                return self._compile(text, [standard, *common], timeout, waiting)
            except CompilerFailed as failed:
                if not _refuses_standard(failed.log, standard):
                    raise
        raise ToolchainError(
            f"{self.path} ({self.kind} {self.version}) does not know C++20, which kernels need. "
            f"g++ 10, clang 10 and newer do. {remedy()}"
        )

    def _compile(
        self, text: bytes, flags: list[str], timeout: float, waiting: Waiting | None
    ) -> bytes:
        with _scratch() as folder:
            _write(folder, "kernel.cpp", text)
            # Names without a folder make equal texts give equal bytes.
            argv = [*self.argv, *flags, "kernel.cpp", "-o", "kernel.so"]
            log = _run(argv, folder, timeout * _PATIENCE[self.kind], waiting)
            library = b""
            with (
                contextlib.suppress(OSError),
                open(os.path.join(folder, "kernel.so"), "rb") as file,
            ):
                library = file.read()
        if not library:
            raise ToolchainError(f"{self.path} reported success but left no library.{_quote(log)}")
        return library


def _refuses_standard(log: str, flag: str) -> bool:
    return any(
        flag in line and re.search(r"unrecogni[sz]ed|invalid value|unknown", line)
        for line in log.splitlines()
    )


# Finding one

_chosen: str | None = None


def set_compiler(path: str | None) -> None:
    """Makes `path` the C++ compiler of this process; None goes back to searching.

    Args:
        path: a file, a name on the search path, or a command with arguments
            (``"ccache g++"``, ``"zig c++"``).

    Raises:
        ToolchainError: it is no C++ compiler, or cannot be run.
    """
    global _chosen
    if path is not None:
        find_compiler(path)
    _chosen = path


def find_compiler(explicit: str | None = None) -> Compiler:
    """The C++ compiler: `explicit`, else `set_compiler`'s, ``FERRULE_CXX``, or the first found.

    The search tries ``g++``, ``c++``, ``clang++``, the names with a version, ``zig``, and the zig
    of the ``ziglang`` package. A compiler that is named is used or an error; one that is found
    but fails is passed over.

    Raises:
        ToolchainError: there is none; names all that was tried, and the command that helps.
    """
    sources = (
        (explicit, ""),
        (_chosen, " (set by ferrule.set_compiler)"),
        (_env.get(_env.CXX), f" (named by {_env.CXX})"),
    )
    for command, origin in sources:
        if command is not None:
            try:
                return _identify(_split(command))
            except ToolchainError as fault:
                raise ToolchainError(
                    f"the C++ compiler {command!r}{origin} cannot be used: {fault}\n"
                    "Name another, or none to have one searched for."
                ) from fault
    tried = []
    missing = []
    for label, argv in candidates():
        if argv is None:
            missing.append(label)
            continue
        try:
            compiler = _identify(argv)
        except ToolchainError as fault:
            tried.append(f"  {fault}")
            continue
        major = re.match(r"\d+", compiler.version)
        if major and int(major.group()) < _OLDEST[compiler.kind]:
            tried.append(f"  {argv[0]} {compiler.version} is too old for C++20")
            continue
        return compiler
    tried.append(f"  not found: {', '.join(missing)}")
    raise ToolchainError("\n".join(["no C++ compiler works here. Tried:", *tried, remedy()]))


def remedy(zig: bool = True) -> str:
    """The command that installs a C++ compiler on this system, as a sentence.

    Args:
        zig: whether zig will do. Where it will not, the sentence may be empty.
    """
    pip = f"{sys.executable or 'python'} -m pip install ziglang"
    if sys.platform == "darwin":
        return "Run: xcode-select --install" + f" (or: {pip})" * zig
    sudo = "" if os.name == "posix" and os.geteuid() == 0 else "sudo "
    for manager, command in (
        ("apt-get", "apt-get install -y g++"),
        ("dnf", "dnf install -y gcc-c++"),
        ("zypper", "zypper install -y gcc-c++"),
        ("pacman", "pacman -S --noconfirm gcc"),
        ("apk", "apk add g++"),
    ):
        if next(_which(manager), None):
            return f"Run: {sudo}{command}" + f" (or, without root: {pip})" * zig
    return f"Run: {pip}" * zig


def _split(command: str) -> tuple[str, ...]:
    if next(_which(command), None):  # also a path with spaces
        argv: tuple[str, ...] = (command,)
    else:
        import shlex

        try:
            argv = tuple(shlex.split(command))
        except ValueError as fault:
            raise ToolchainError(f"it is not a command: {fault}") from fault
    if not argv:
        raise ToolchainError("it is empty")
    if len(argv) == 1 and _is_zig(argv[0]):
        argv = (*argv, "c++")
    path = next(_which(argv[0]), None)
    if path is None:
        raise ToolchainError(f"{argv[0]!r} is no executable file")
    return (path, *argv[1:])


def candidates() -> Iterator[tuple[str, tuple[str, ...] | None]]:
    """Each name that the search tries, with its command, or None where it is not found."""
    for name in _NAMES:
        path = next(_which(name), None)
        yield name, (path,) if path else None
    path = next(_which("zig"), None) or _zig_package()
    yield "zig", (path, "c++") if path else None


def _zig_package() -> str | None:
    """The program that ``python -m ziglang`` starts."""
    from importlib.util import find_spec

    found = find_spec("ziglang")
    folders = found.submodule_search_locations if found else None
    return next((p for f in folders or () for p in _which(os.path.join(f, "zig"))), None)


def _is_zig(program: str) -> bool:
    return os.path.basename(program) in ("zig", "zig.exe")


def _which(name: str) -> Iterator[str]:
    """Every executable of that name on the search path, or the one at that path."""
    # shutil.which takes milliseconds to import, and gives only the first.
    if os.path.dirname(name):
        folders = [""]
    else:
        folders = [f for f in _env.search_path().split(os.pathsep) if os.path.isabs(f)]
    for folder in folders:
        path = os.path.abspath(os.path.join(folder, name))
        with contextlib.suppress(ValueError):  # a NUL
            if os.path.isfile(path) and os.access(path, os.X_OK):
                yield path


# What it is

_versions: dict[str, str] = {}  # also serves a process that has no disk cache


def _identify(argv: tuple[str, ...]) -> Compiler:
    """The compiler behind a command. Its version comes from the cache where that is known."""
    state = _state(argv)
    key = cache.digest("compiler", "1", *argv, *state)
    if key not in _versions:
        known = cache.default().get(key)
        if known is None:
            known = _ask_version(argv).encode()
            cache.default().put(key, known)
        _versions[key] = known.decode()
    kind, version = _versions[key].split("\n")
    environment = _env.child_environment()
    steering = (f"{name}={environment.get(name, '')}" for name in _STEERING)
    identity = cache.digest(kind, version, *argv, *state, *steering)
    return Compiler(kind, argv, version, argv[0], identity)


def _state(argv: Iterable[str]) -> list[str]:
    """The state of each program that the command names.

    Of all programs of that name on the search path, since a wrapper such as ccache calls the
    next one, and stays the same when that one is upgraded.
    """
    state = []
    for word in argv:
        if word.startswith("-"):
            continue
        for path in dict.fromkeys((*_which(word), *_which(os.path.basename(word) or word))):
            with contextlib.suppress(OSError):
                real = os.path.realpath(path)
                status = os.stat(real)
                state.append(f"{real} {status.st_size} {status.st_mtime_ns}")
    return state


def _ask_version(argv: tuple[str, ...]) -> str:
    """``kind`` and ``version`` on two lines, from the compiler itself."""
    try:
        with _scratch() as folder:
            log = _run([*argv, "--version"], folder, _VERSION_TIMEOUT)
    except CompilerFailed as failed:
        raise ToolchainError(
            f"{argv[0]} fails with --version: {_first_line(failed.log)}"
        ) from failed
    if any(_is_zig(word) for word in argv):
        kind = "zig"
    elif "clang" in log:
        kind = "clang"
    elif re.match(r"\S*(g\+\+|gcc|c\+\+)", log) or _is_gcc(argv, log):
        kind = "gcc"
    else:
        raise ToolchainError(
            f"{argv[0]} is not g++, clang or zig: --version prints {_first_line(log)!r}"
        )
    # "g++ (Debian 12.2.0-14) 12.2.0", "Debian clang version 14.0.6": brackets may hold another.
    plain = re.sub(r"\([^)]*\)", "", log)
    version = re.search(r"\d+\.\d+[^\s,]*", plain) or re.search(r"\d+[^\s,]*", plain)
    if version is None:
        raise ToolchainError(f"{argv[0]} prints no version: {_first_line(log)!r}")
    return f"{kind}\n{version.group()}"


def _is_gcc(argv: tuple[str, ...], log: str) -> bool:
    """Whether a GNU program, of any name, is the compiler."""
    if "Free Software Foundation" not in log:
        return False
    try:
        with _scratch() as folder:
            return "__GNUC__" in _run(
                [*argv, "-E", "-dM", "-x", "c++", "/dev/null"], folder, _VERSION_TIMEOUT
            )
    except CompilerFailed:
        return False


def _first_line(log: str) -> str:
    return next((line.strip()[:200] for line in log.splitlines() if line.strip()), "nothing")


# Running it


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
def _scratch() -> Iterator[str]:
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


def _write(folder: str, name: str, text: bytes) -> None:
    try:
        with open(os.path.join(folder, name), "xb") as file:
            file.write(text)
    except OSError as fault:
        raise ToolchainError(
            f"the kernel's text cannot be written to {folder}: {fault.strerror}. "
            "Free space there, or set TMPDIR to another folder."
        ) from fault


def _run(argv: Sequence[str], folder: str, timeout: float, waiting: Waiting | None = None) -> str:
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
            f"{argv[0]} took longer than {timeout:g} s and was stopped.{_quote(log)}"
        )
    if trouble == "output":
        raise ToolchainError(
            f"{argv[0]} printed more than {_MAX_OUTPUT >> 20} MiB and was stopped. "
            f"It began: {_first_line(log)}"
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
        raise ToolchainError(f"{program} was killed by {name}.{_quote(log)}")
    if "No space left on device" in log:
        raise ToolchainError(f"{program} found the disk full. Set TMPDIR elsewhere.{_quote(log)}")
    if re.search(_CRASH, log, re.IGNORECASE):
        raise ToolchainError(f"{program} crashed.{_quote(log)}")
    raise CompilerFailed(log)


def _quote(log: str) -> str:
    """A log's end, for a message."""
    return f" Its output:\n{log[-4000:]}" if log.strip() else " It printed nothing."


# The machine


def native_flags(compiler: Compiler) -> list[str]:
    """The flags that let a compiler use all that this machine's processor has."""
    machine = os.uname().machine
    if compiler.kind == "zig":
        return ["-mcpu=native"]
    if machine in ("x86_64", "amd64", "i386", "i686"):
        return ["-march=native", *_wide_vectors()]
    if machine in ("aarch64", "arm64", "ppc64le"):
        return ["-mcpu=native"]
    return []


@functools.cache
def _wide_vectors() -> list[str]:
    """Compilers keep to half of AVX-512's width, for processors that slowed down in the other.

    Those that have VBMI2 (Intel since Ice Lake, AMD since Zen 4) do not.
    """
    wide = any("avx512_vbmi2" in line.split() for line in _processor_lines())
    return ["-mprefer-vector-width=512"] if wide else []


@functools.cache
def isa_identity() -> str:
    """Tells this machine's instruction set and C library from others', running no compiler."""
    machine = os.uname().machine
    libc = ""  # two machines may share a home folder, and the compiler in it
    with contextlib.suppress(ValueError, OSError):
        libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    if sys.platform == "darwin":
        names = ("brand_string", "features", "leaf7_features")
        return cache.digest(machine, libc, *(_sysctl(f"machdep.cpu.{name}") for name in names))
    return cache.digest(machine, libc, *_processor_lines())


# Lines of /proc/cpuinfo that decide which code a compiler makes "native", on x86, Arm, RISC-V,
# POWER and S/390. Others change while the machine runs, such as the clock's rate.
_PROCESSOR = frozenset(
    {"vendor_id", "cpu family", "model", "model name", "stepping", "flags"}
    | {"Features", "CPU implementer", "CPU architecture", "CPU variant", "CPU part"}
    | {"isa", "mmu", "uarch", "cpu", "machine", "features"}
)


def _processor_lines() -> list[str]:
    data = b""
    try:
        file = os.open("/proc/cpuinfo", os.O_RDONLY | os.O_CLOEXEC)
        try:
            # The first processor is enough, and the kernel writes only what is read.
            while b"\n\n" not in data and (more := os.read(file, 4096)):
                data += more
        finally:
            os.close(file)
    except OSError:
        return []
    lines = data.split(b"\n\n")[0].decode("utf-8", "replace").splitlines()
    pairs = (line.partition(":") for line in lines)
    return [f"{k.strip()}={v.strip()}" for k, _, v in pairs if k.strip() in _PROCESSOR]


def _sysctl(name: str) -> str:
    """One string of macOS's sysctl; empty where there is none of that name."""
    import ctypes

    buffer = ctypes.create_string_buffer(4096)
    size = ctypes.c_size_t(len(buffer))
    call = ctypes.CDLL(None).sysctlbyname
    if call(name.encode(), buffer, ctypes.byref(size), None, 0) != 0:
        return ""
    return buffer.value.decode("utf-8", "replace")
