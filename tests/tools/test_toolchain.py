"""Compilers are found in order, known again without being run, and told apart by their identity.

Those that hang, crash or misbehave are in `tests/faults`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule import _env
from ferrule.errors import CacheWarning, CompilerFailed, ToolchainError
from ferrule.tools import loader, toolchain
from ferrule.tools.toolchain import Compiler, find_compiler

GNU = "g++ (Debian 12.2.0-14) 12.2.0\nCopyright (C) 2022 Free Software Foundation, Inc."
LLVM = "Debian clang version 14.0.6\nTarget: x86_64-pc-linux-gnu"
APPLE = "Apple clang version 15.0.0 (clang-1500.3.9.4)\nTarget: arm64-apple-darwin23.6.0"


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache of the test's own, and no compiler but those that it asks for."""
    monkeypatch.setenv(_env.CACHE_DIR, str(tmp_path / "cache"))
    monkeypatch.delenv(_env.CXX, raising=False)
    monkeypatch.setattr(toolchain, "_versions", {})
    yield
    toolchain.set_compiler(None)


class Fake:
    """Writes programs that print a version and note their calls; nothing else is found."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folders = [root / "bin"]  # the search path

    def __call__(self, name: str, version: str = GNU, into: Path | None = None) -> Path:
        path = (into or self.folders[0]) / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\necho x >> {self.root}/calls\ncat <<'END'\n{version}\nEND\n")
        path.chmod(0o755)
        return path


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = Fake(tmp_path)
    monkeypatch.setattr(_env, "search_path", lambda: os.pathsep.join(map(str, fake.folders)))
    monkeypatch.setattr(toolchain, "_zig_package", lambda: None)
    return fake


def calls(tmp_path: Path) -> int:
    log = tmp_path / "calls"
    return len(log.read_text().splitlines()) if log.exists() else 0


def _real_compilers() -> list[str]:
    found = {}
    for name in ("g++", "clang++", *(f"clang++-{n}" for n in range(22, 9, -1))):
        for path in toolchain._which(name):
            found.setdefault(os.path.realpath(path), path)
    return list(found.values())


@pytest.fixture(params=_real_compilers() or [None])
def compiler(request: pytest.FixtureRequest) -> Compiler:
    if request.param is None:
        pytest.skip("this machine has no C++ compiler")
    return find_compiler(request.param)


# Compiling


def test_a_library_comes_out(compiler: Compiler) -> None:
    text = """
        #include <bit>
        #include <concepts>
        template <std::integral T> T twice(T x) { return 2 * x; }
        extern "C" unsigned f(float x) { return twice(std::bit_cast<unsigned>(x)); }
    """
    library = compiler.compile(text, flags=["-O2", *toolchain.native_flags(compiler)])
    function = loader.load_library(library, "k").f
    function.argtypes, function.restype = [ctypes.c_float], ctypes.c_uint
    assert function(1.0) == 2 * 0x3F800000 % 2**32


def test_equal_texts_give_equal_bytes(compiler: Compiler) -> None:
    text = 'extern "C" const char* f() { return __FILE__; }'
    assert compiler.compile(text) == compiler.compile(text)


def test_a_refused_text_comes_with_the_log(compiler: Compiler) -> None:
    with pytest.raises(CompilerFailed) as raised:
        compiler.compile('#line 7 "source"\nint f() { return nowhere; }')
    assert "source:7:" in raised.value.log and "nowhere" in raised.value.log
    assert "\x1b[" not in raised.value.log


def test_the_callers_standard_is_kept(compiler: Compiler) -> None:
    text = 'static_assert(__cplusplus %s, "");'
    compiler.compile(text % "== 201703L", flags=["-std=c++17"])
    compiler.compile(text % "> 201703L")


@settings(deadline=None, max_examples=15)
@given(text=st.text(max_size=60))
def test_any_text_compiles_or_is_refused(text: str) -> None:
    # As a comment, a string or code: never a Python error of another kind.
    if not (found := _real_compilers()):
        pytest.skip("this machine has no C++ compiler")
    try:
        assert find_compiler(found[0]).compile(text, flags=["-fsyntax-only"])
    except CompilerFailed:
        pass
    except ToolchainError as fault:
        assert "left no library" in str(fault)


def test_a_text_that_is_no_unicode_does_not_break_it(compiler: Compiler) -> None:
    library = compiler.compile('// \udcff \ud800 \nextern "C" int f() { return 3; }')
    assert loader.load_library(library, "k").f() == 3


def test_nothing_is_left_behind(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    monkeypatch.setenv("DEPENDENCIES_OUTPUT", str(scratch / "deps"))  # gcc would write it
    compiler.compile("int f() { return 1; }")
    with pytest.raises(CompilerFailed):
        compiler.compile("#error no")
    if compiler.kind == "clang":
        with pytest.raises(ToolchainError, match="crashed"):  # and writes a report somewhere
            compiler.compile("#pragma clang __debug crash\n")
    assert os.listdir(scratch) == []


def test_what_killed_processes_left_is_removed_after_a_day(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    days = {"ferrule-compile-old": 2.0, "ferrule-compile-new": 0.5, "ferrule-data": 9.0}
    for name, age in days.items():
        (scratch / name).mkdir()
        (scratch / name / "kernel.cpp").write_text("int x;")
        os.utime(scratch / name, (time.time() - age * 86400,) * 2)
    (scratch / "ferrule-compile-link").symlink_to(scratch / "ferrule-data")
    compiler.compile("int f() { return 1; }")
    left = {"ferrule-compile-new", "ferrule-data", "ferrule-compile-link"}
    assert set(os.listdir(scratch)) == left
    assert (scratch / "ferrule-data" / "kernel.cpp").exists()


@pytest.mark.parametrize("program", ["ls", "make", "true"])
def test_other_gnu_programs_are_no_compilers(program: str) -> None:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"there is no {program}")
    with pytest.raises(ToolchainError, match=r"is not g\+\+, clang or zig"):
        find_compiler(path)


def test_gcc_of_another_name(tmp_path: Path) -> None:
    path = shutil.which("g++")
    if path is None:
        pytest.skip("there is no g++")
    (tmp_path / "my compiler").symlink_to(path)
    found = find_compiler(str(tmp_path / "my compiler"))
    assert (found.kind, found.version) == ("gcc", find_compiler(path).version)


def test_kernels_are_told_apart_by_the_machine(compiler: Compiler) -> None:
    first = toolchain.isa_identity()
    assert first == toolchain.isa_identity() and len(first) == 64
    assert toolchain._processor_lines() or sys.platform == "darwin"
    flags = toolchain.native_flags(compiler)
    assert all(flag.endswith("=native") for flag in flags[:1])
    wide = any("avx512_vbmi2" in line.split() for line in toolchain._processor_lines())
    assert ("-mprefer-vector-width=512" in flags) == (wide and compiler.kind != "zig")
    # Loads one by one in place of AMD's gathers, of those compilers that vectorise them.
    one_by_one = toolchain._is_amd() and compiler.kind == "gcc" and compiler.version >= "12"
    assert ("-mtune-ctrl=^use_gather" in flags) == one_by_one
    assert compiler.compile("int f() { return 1; }", flags=flags)


def test_the_processor_is_read_once_and_its_clock_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not os.path.exists("/proc/cpuinfo"):
        pytest.skip("needs Linux's /proc")
    lines = toolchain._processor_lines()
    names = [line.partition("=")[0] for line in lines]
    assert len(names) == len(set(names)) > 0
    assert not any("MHz" in name or "processor" in name for name in names)


# Which one


def test_the_order(fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ToolchainError):
        find_compiler()
    expected = []
    for name, version in [
        ("zig", LLVM),
        ("clang++-14", LLVM),
        ("clang++-18", LLVM.replace("14.0.6", "18.1.3")),
        ("g++-13", GNU.replace("12.2.0", "13.1.0")),
        ("clang++", LLVM),
        ("c++", GNU),
        ("g++", GNU),
    ]:
        expected.append(str(fake(name, version)))
        assert find_compiler().path == expected[-1]
    monkeypatch.setenv(_env.CXX, "clang++-14")
    assert find_compiler().path == expected[1]
    toolchain.set_compiler(expected[2])
    assert find_compiler().path == expected[2]
    assert find_compiler("c++").path == expected[5]
    toolchain.set_compiler(None)
    assert find_compiler().path == expected[1]


@pytest.mark.parametrize(
    ("text", "kind", "version"),
    [
        (GNU, "gcc", "12.2.0"),
        (LLVM, "clang", "14.0.6"),
        (APPLE, "clang", "15.0.0"),
        ("g++ (GCC) 15.1.1 20250425\nCopyright (C) 2025 Free Software", "gcc", "15.1.1"),
        ("g++-13 (Ubuntu 13.2.0-23ubuntu4) 13.2.0\nCopyright (C) 2023 Free", "gcc", "13.2.0"),
        ("Ubuntu clang version 18.1.3 (1ubuntu1)\nTarget: aarch64", "clang", "18.1.3"),
        ("clang version 20.1.2 (https://github.com/a/b 7ef)\nThread", "clang", "20.1.2"),
    ],
)
def test_versions_are_understood(fake: Fake, text: str, kind: str, version: str) -> None:
    fake("c++", text)
    found = find_compiler()
    assert (found.kind, found.version) == (kind, version)


def test_zig_is_called_as_a_compiler(fake: Fake) -> None:
    path = str(fake("zig", "clang version 20.1.2 (https://github.com/ziglang/b 7ef)"))
    for found in (find_compiler(), find_compiler("zig"), find_compiler("zig c++")):
        assert (found.kind, found.argv) == ("zig", (path, "c++"))
    python = str(fake("python4", LLVM))
    found = find_compiler("python4 -m ziglang c++")
    assert (found.kind, found.argv) == ("zig", (python, "-m", "ziglang", "c++"))
    assert toolchain.native_flags(found) == ["-mcpu=native"]


def test_zigs_package_is_found(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fake("zig", LLVM, into=tmp_path / "ziglang")
    (tmp_path / "ziglang" / "__init__.py").touch()
    monkeypatch.undo()  # its hiding
    monkeypatch.delitem(sys.modules, "ziglang", raising=False)  # another test's
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(_env, "search_path", lambda: "")
    monkeypatch.setenv(_env.CACHE_DIR, str(tmp_path / "cache"))
    assert find_compiler().argv == (str(path), "c++")


def test_a_command_may_have_arguments_and_a_path_spaces(fake: Fake, tmp_path: Path) -> None:
    wrapper, gcc = fake("ccache", GNU), fake("g++", GNU)
    found = find_compiler("ccache g++ --param=x")
    assert found.argv == (str(wrapper), "g++", "--param=x")
    spaced = tmp_path / "bin" / "my g++"
    gcc.rename(spaced)
    assert find_compiler(str(spaced)).argv == (str(spaced),)


def test_old_compilers_are_passed_over_but_may_be_named(fake: Fake) -> None:
    fake("g++", GNU.replace("12.2.0", "9.4.0"))
    newer = fake("g++-10", GNU.replace("12.2.0", "10.2.1"))
    assert find_compiler().path == str(newer)
    assert find_compiler("g++").version == "9.4.0"
    newer.unlink()
    with pytest.raises(ToolchainError, match=r"g\+\+ 9\.4\.0 is too old for C\+\+20"):
        find_compiler()


def test_without_a_compiler_all_that_was_tried_is_named(fake: Fake) -> None:
    bad = fake("g++", "some other program")
    with pytest.raises(ToolchainError) as raised:
        find_compiler()
    message = str(raised.value)
    assert message.splitlines()[0] == "no C++ compiler works here. Tried:"
    assert f"{bad} is not g++, clang or zig: --version prints 'some other program'" in message
    assert "not found: c++, clang++, g++-16" in message and "zig" in message
    assert message.splitlines()[-1].startswith("Run: ")
    assert "-m pip install ziglang" in message.splitlines()[-1]


@pytest.mark.parametrize(
    ("manager", "command"), [("apt-get", "apt-get install -y g++"), ("dnf", "gcc-c++"), (None, "")]
)
def test_the_remedy_is_that_of_the_system(
    fake: Fake, manager: str | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if manager:
        fake(manager)
    monkeypatch.setattr(sys, "platform", "linux")
    assert command in toolchain.remedy() and "ziglang" in toolchain.remedy()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "xcode-select --install" in toolchain.remedy()


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("/no/such/g++", "'/no/such/g++' is no executable file"),
        ("nothing-of-that-name", "'nothing-of-that-name' is no executable file"),
        ("", "it is empty"),
        ("g++ 'unclosed", "it is not a command: No closing quotation"),
        ("a\0b", "'a\\x00b' is no executable file"),
        ("/", "'/' is no executable file"),
    ],
)
def test_a_named_compiler_that_is_none_is_an_error(
    fake: Fake, command: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake("g++")  # would be found, but is not what was asked for
    expected = [
        f"the C++ compiler {command!r} cannot be used: {reason}",
        "Name another, or none to have one searched for.",
    ]
    with pytest.raises(ToolchainError) as raised:
        find_compiler(command)
    assert str(raised.value).splitlines() == expected
    with pytest.raises(ToolchainError):
        toolchain.set_compiler(command)
    assert find_compiler().version == "12.2.0"  # a refused choice changes nothing
    if command and "\0" not in command:
        monkeypatch.setenv(_env.CXX, command)
        with pytest.raises(ToolchainError, match=r"\(named by FERRULE_CXX\) cannot be used"):
            find_compiler()


def test_relative_folders_are_not_searched(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake("g++", into=tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(_env, "search_path", lambda: f".{os.pathsep}{os.pathsep}here")
    with pytest.raises(ToolchainError):
        find_compiler()


# Known again


def test_a_known_compiler_is_not_run(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake("g++")
    first = find_compiler()
    assert calls(tmp_path) == 1
    monkeypatch.setattr(toolchain, "_versions", {})  # as in a new process
    assert find_compiler() == first
    assert calls(tmp_path) == 1


def test_a_warm_start_spawns_nothing(tmp_path: Path) -> None:
    if not _real_compilers():
        pytest.skip("this machine has no C++ compiler")
    script = """
import sys
spawned = []
EVENTS = ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec", "os.system")
sys.addaudithook(lambda event, args: spawned.append(event) if event in EVENTS else None)
from ferrule.tools import toolchain
print(toolchain.find_compiler().identity, len(toolchain.isa_identity()), len(spawned))
"""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        _env.CACHE_DIR: str(tmp_path / "c"),
    }
    cold, warm = (
        subprocess.run(
            [sys.executable, "-c", script], env=environment, check=True, capture_output=True
        ).stdout.split()
        for _ in range(2)
    )
    assert int(cold[2]) > 0, "the hook sees nothing"
    assert int(warm[2]) == 0
    assert cold[:2] == warm[:2]


def test_without_a_cache_it_is_run_once_per_process(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("not a folder")
    fake("g++")
    with pytest.warns(CacheWarning, match="it is not a folder"):
        first = find_compiler()
    assert find_compiler() == first
    assert calls(tmp_path) == 1


# Identity


@pytest.mark.parametrize("how", ["bytes", "time", "other file", "variable", "behind a wrapper"])
def test_the_identity_changes_with_the_compiler(
    fake: Fake, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fake("g++")
    # A wrapper such as ccache, called g++, calls the next g++ on the search path.
    fake.folders.append(tmp_path / "second")
    wrapped = fake("g++", GNU, into=fake.folders[1])
    before = find_compiler()
    assert find_compiler().identity == before.identity
    if how == "bytes":
        path.write_text(path.read_text() + "# patched\n")
    elif how == "time":
        status = path.stat()
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1000))
    elif how == "other file":  # the name is a link, as Debian's alternatives are
        other = fake("g++-13")
        path.unlink()
        path.symlink_to(other)
    elif how == "variable":
        monkeypatch.setenv("CPLUS_INCLUDE_PATH", "/opt/other")
    else:
        wrapped.write_text("#!/bin/sh\necho newer")
    after = find_compiler()
    assert after.identity != before.identity
    assert after.version == before.version


def test_the_working_folder_and_other_variables_do_not_matter(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake("g++")
    before = find_compiler()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOMETHING_ELSE", "1")
    assert find_compiler() == before
