"""Finds and runs the host's C++ compiler.

`compiler_process` runs it. Its kind and version are looked up once and kept in the disk cache
under the state of its files, so finding a known compiler starts no process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from .. import _env, cache
from ..errors import CompilerFailed, ToolchainError
from .compiler_process import first_line, quoted, run, scratch_folder, write
from .waiting import Waiting

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


_Made = TypeVar("_Made")


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
        self,
        source: str,
        *,
        flags: Sequence[str] = (),
        timeout: float = 120.0,
        waiting: Waiting | None = None,
    ) -> bytes:
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
        text = _encoded(source)
        if waiting is None and self.kind == "zig":
            waiting = Waiting("zig builds its C++ library before it first compiles", 60)
        return self._in_standard(
            ["-shared", *flags], lambda options: self._compile(text, options, timeout, waiting)
        )

    def object(
        self, source: str, *, flags: Sequence[str] = (), timeout: float = 120.0
    ) -> tuple[bytes, str]:
        """Compiles a C++20 translation unit to an object file, which `link` takes.

        Args:
            source: the text, called ``kernel.cpp`` in diagnostics.
            flags: more flags, one string each.
            timeout: as `compile` has it.

        Returns:
            The object's bytes, and what the compiler printed; raises as `compile` does.
        """
        files = {"kernel.cpp": _encoded(source)}
        return self._in_standard(
            ["-c", *flags],
            lambda options: self._made(files, [*options, "kernel.cpp"], "kernel.o", timeout, None),
        )

    def link(self, objects: Sequence[bytes], *, timeout: float = 120.0) -> bytes:
        """Links object files to a shared library; raises as `compile` does."""
        names = {f"part{i}.o": payload for i, payload in enumerate(objects)}
        flags = ["-shared", "-fPIC", *names]
        return self._made(names, flags, "kernel.so", timeout, None)[0]

    def _in_standard(self, flags: list[str], make: Callable[[list[str]], _Made]) -> _Made:
        """What is made with the flag for C++20, however the compiler calls that."""
        common = ["-fPIC", "-fdiagnostics-color=never", *flags]
        if self.kind == "gcc":
            # Otherwise libraries of one process share the static variables of their templates.
            common.insert(0, "-fno-gnu-unique")
        if any(flag.startswith("-std=") for flag in flags):
            return make(common)
        for standard in _STANDARDS:
            try:
                return make([standard, *common])
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
        argv = [*flags, "kernel.cpp"]
        return self._made({"kernel.cpp": text}, argv, "kernel.so", timeout, waiting)[0]

    def _made(
        self,
        files: dict[str, bytes],
        flags: list[str],
        output: str,
        timeout: float,
        waiting: Waiting | None,
    ) -> tuple[bytes, str]:
        """What the compiler makes of some files, and what it prints."""
        with scratch_folder() as folder:
            for name, text in files.items():
                write(folder, name, text)
            # Names without a folder make equal texts give equal bytes.
            argv = [*self.argv, *flags, "-o", output]
            log = run(argv, folder, timeout * _PATIENCE[self.kind], waiting)
            made = b""
            with contextlib.suppress(OSError), open(os.path.join(folder, output), "rb") as file:
                made = file.read()
        if not made:
            raise ToolchainError(f"{self.path} reported success but left no library.{quoted(log)}")
        return made, log


def _encoded(source: str) -> bytes:
    return source.encode("utf-8", "backslashreplace")


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
            (``"ccache g++"``, ``"zig c++"``, ``"python -m ziglang c++"``).

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

    spec = find_spec("ziglang")
    folders = spec.submodule_search_locations if spec else None
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
        output = cache.default().get(key)
        if output is None:
            output = _ask_version(argv).encode()
            cache.default().put(key, output)
        _versions[key] = output.decode()
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
        with scratch_folder() as folder:
            log = run([*argv, "--version"], folder, _VERSION_TIMEOUT)
    except CompilerFailed as failed:
        raise ToolchainError(
            f"{argv[0]} fails with --version: {first_line(failed.log)}"
        ) from failed
    if "ziglang" in argv or any(_is_zig(word) for word in argv):  # python -m ziglang c++
        kind = "zig"
    elif "clang" in log:
        kind = "clang"
    elif re.match(r"\S*(g\+\+|gcc|c\+\+)", log) or _is_gcc(argv, log):
        kind = "gcc"
    else:
        raise ToolchainError(
            f"{argv[0]} is not g++, clang or zig: --version prints {first_line(log)!r}"
        )
    # "g++ (Debian 12.2.0-14) 12.2.0", "Debian clang version 14.0.6": brackets may hold another.
    plain = re.sub(r"\([^)]*\)", "", log)
    version = re.search(r"\d+\.\d+[^\s,]*", plain) or re.search(r"\d+[^\s,]*", plain)
    if version is None:
        raise ToolchainError(f"{argv[0]} prints no version: {first_line(log)!r}")
    return f"{kind}\n{version.group()}"


def _is_gcc(argv: tuple[str, ...], log: str) -> bool:
    """Whether a GNU program, of any name, is the compiler."""
    if "Free Software Foundation" not in log:
        return False
    try:
        with scratch_folder() as folder:
            return "__GNUC__" in run(
                [*argv, "-E", "-dM", "-x", "c++", "/dev/null"], folder, _VERSION_TIMEOUT
            )
    except CompilerFailed:
        return False


# The machine


def native_flags(compiler: Compiler) -> list[str]:
    """The flags that let a compiler use all that this machine's processor has."""
    machine = os.uname().machine
    if compiler.kind == "zig":
        return ["-mcpu=native"]
    if machine in ("x86_64", "amd64", "i386", "i686"):
        return ["-march=native", *_wide_vectors(), *_loads(compiler)]
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


def _loads(compiler: Compiler) -> list[str]:
    """AMD's gathers take longer than loads one by one, which g++ 12 and newer write instead.

    Of some of these processors they know that, but not of Zen 3.
    """
    gcc = compiler.kind == "gcc" and int(compiler.version.partition(".")[0]) >= 12
    return ["-mtune-ctrl=^use_gather"] if gcc and _is_amd() else []


@functools.cache
def _is_amd() -> bool:
    return "vendor_id=AuthenticAMD" in _processor_lines()


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
        with open("/proc/cpuinfo", "rb", buffering=0) as file:
            # The first processor is enough, and the kernel writes only what is read.
            while b"\n\n" not in data and (more := file.read(4096)):
                data += more
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
