"""Who waits for a compiler is told: one line after a while, a bar on a terminal, nothing before."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from ferrule import _env
from ferrule.tools import toolchain, waiting
from ferrule.tools.toolchain import Compiler


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits two seconds in a test."""
    monkeypatch.setattr(waiting, "PATIENCE", 0.0)
    monkeypatch.setattr(waiting, "_told", set())


def compiler(folder: Path, kind: str) -> Compiler:
    """A compiler that takes some rounds of waiting, and makes a library of one word."""
    path = folder / kind
    path.write_text("#!/bin/sh\nsleep 0.3\necho made > kernel.so\n")
    path.chmod(0o755)
    return Compiler(kind, (str(path),), "1.0", str(path), "identity")


def test_zig_is_explained_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zig = compiler(tmp_path, "zig")
    for _ in range(2):  # a process is told once
        assert zig.compile("") == b"made\n"
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("ferrule: zig builds its C++ library") and "60 s" in line


def test_other_compilers_are_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compiler(tmp_path, "gcc").compile("")
    assert capsys.readouterr().err == ""


def test_what_is_quick_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(waiting, "PATIENCE", 1e9)
    compiler(tmp_path, "zig").compile("")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("fails", [False, True])
def test_a_terminal_has_a_bar_that_goes(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    zig = compiler(tmp_path, "zig")
    if fails:
        Path(zig.path).write_text("#!/bin/sh\nsleep 0.3\nexit 1\n")
        with pytest.raises(toolchain.CompilerFailed):
            zig.compile("")
    else:
        zig.compile("")
    drawn = shown.getvalue().split("\r")
    assert "\n" not in shown.getvalue()
    assert any("[" in one and "] 0 s" in one for one in drawn)
    assert drawn[-1] == "" and drawn[-2].isspace()


def test_the_bar_grows_and_is_never_full(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, clock = Terminal(), [0.0]
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(waiting.time, "monotonic", lambda: clock[0])
    one = waiting.Waiting("building", 10)
    counts = []
    for clock[0] in (0.0, 1.0, 3.0, 10.0, 60.0, 3600.0):
        one.tick()
        counts.append(shown.getvalue().rsplit("\r")[-1].count("#"))
    assert counts == sorted(counts) and 0 < counts[-1] < waiting._WIDTH


@pytest.mark.parametrize("broken", [None, "closed"])
def test_nobody_listens(
    broken: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a program without a console."""
    stream = io.StringIO() if broken else None
    if stream is not None:
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    assert compiler(tmp_path, "zig").compile("") == b"made\n"


def test_nodes_of_mlx_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlx.core")
    from ferrule.hosts.mlx import build as mlx_build

    monkeypatch.setenv(_env.CACHE_DIR, str(tmp_path / "cache"))
    monkeypatch.setattr(mlx_build, "_compiler", lambda: compiler(tmp_path, "gcc"))
    assert mlx_build._built() == b"made\n"
    (line,) = capsys.readouterr().err.splitlines()
    assert f"compiling ferrule's nodes for MLX {mlx_build.VERSION}, once" in line
