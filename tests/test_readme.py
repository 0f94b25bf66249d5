"""The README and docs/features.md are true: programs print what they say; commands, links work."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner
from PIL import Image

import ferrule
from ferrule import _env, cache
from ferrule.cli import main

REPOSITORY = Path(__file__).resolve().parent.parent
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
FEATURES = (REPOSITORY / "docs" / "features.md").read_text(encoding="utf-8")

_NUMBER = re.compile(r"-?\d+\.\d*(?:e[-+]?\d+)?")


class Block(NamedTuple):
    """A fenced block: its language, its text, its first line, and the output that follows it."""

    language: str
    text: str
    line: int
    output: str | None


def blocks(text: str) -> list[Block]:
    """The fenced blocks; a ``text`` block right after another is what that prints."""
    fenced = list(re.finditer(r"^```(\w*)\n(.*?)^```\n?", text, re.MULTILINE | re.DOTALL))
    found = []
    for block, after in zip(fenced, [*fenced, None][1:], strict=True):
        output = None
        if after is not None and after.start() == block.end() and after[1] == "text":
            output = after[2]
        found.append(Block(block[1], block[2], text.count("\n", 0, block.start()) + 2, output))
    return found


BLOCKS = blocks(README)
EVERY = [*BLOCKS, *blocks(FEATURES)]
PROGRAMS = [block for block in EVERY if block.language == "python"]
COMMANDS = [
    (block.line, line)
    for block in EVERY
    if block.language == "bash"
    for line in block.text.splitlines()
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_env.CACHE_DIR, str(tmp_path / "cache"))
    monkeypatch.delenv(_env.CXX, raising=False)


def same(printed: str, promised: str) -> bool:
    """Equal, but for the last digits of numbers, and for the compiler and its words."""
    if "does not compile" in promised:
        # The line that is quoted is ours; what is wrong with it, each compiler says in its way.
        def ours(text: str) -> list[str]:
            return [re.sub(r"\(.*\):$|: .*", "", line) for line in text.splitlines()]

        return ours(printed) == ours(promised)
    if _NUMBER.sub("#", printed) != _NUMBER.sub("#", promised):
        return False
    pairs = zip(_NUMBER.findall(printed), _NUMBER.findall(promised), strict=True)
    return all(float(a) == pytest.approx(float(b), rel=1e-5) for a, b in pairs)


@pytest.mark.parametrize("block", PROGRAMS, ids=lambda block: f"line{block.line}")
def test_programs(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(block.text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    if block.output is not None:
        assert same(done.stdout, block.output), done.stdout


def test_programs_print_something() -> None:
    assert len(PROGRAMS) >= 2
    assert all(block.output for block in PROGRAMS)


FAILED = "kernel 'k' does not compile (gcc 1):\n  source line 4: oops\n    | x\n"


@pytest.mark.parametrize(
    ("printed", "promised", "equal"),
    [
        ("[1.0000001 2.]", "[1.0 2.]", True),
        ("[1.1 2.]", "[1.0 2.]", False),
        ("sum 1.5", "total 1.5", False),
        (FAILED, FAILED.replace("gcc 1", "clang 2").replace("oops", "what?"), True),
        (FAILED, FAILED.replace("line 4", "line 5"), False),
        (FAILED, FAILED.replace("| x", "| y"), False),
    ],
)  # fmt: skip
def test_the_comparison(printed: str, promised: str, equal: bool) -> None:
    assert same(printed, promised) == equal


def test_set_up_commands() -> None:
    """Two commands do all: one installs and runs the main job, one runs the tests."""
    set_up = [line for _, line in COMMANDS if "pip install" in line]
    assert [line.split(" && ")[-1] for line in set_up] == [
        ".venv/bin/ferrule demo",
        ".venv/bin/pytest",
    ]
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    for line in set_up:
        make, install, _ = line.split(" && ")
        assert make == "python3 -m venv .venv"
        extra = re.fullmatch(r"\.venv/bin/pip install -e '\.\[(\w+)\]'", install)
        assert extra is not None and re.search(rf"^{extra[1]} = \[", project, re.MULTILINE)


@pytest.mark.parametrize(
    "command", [line for _, line in COMMANDS if line.startswith("ferrule ")], ids=str
)
def test_commands(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    result = CliRunner().invoke(main, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    assert "fr_kernel" in result.stdout


def test_every_command_is_tried() -> None:
    known = ("ferrule ", "python3 -m venv ")
    assert all(line.startswith(known) for _, line in COMMANDS)
    assert sum(line.startswith("ferrule ") for _, line in COMMANDS) >= 2


def test_links() -> None:
    for text, folder in ((README, REPOSITORY), (FEATURES, REPOSITORY / "docs")):
        targets = re.findall(r"\]\(([^)#]+)", text)
        inside = [target for target in targets if "://" not in target]
        assert len(inside) >= 5
        assert [target for target in inside if not (folder / target).exists()] == []


def test_settings_are_all_there() -> None:
    named = set(re.findall(r"FERRULE_\w+", FEATURES))
    assert named == set(_env.NAMES)
    for function in re.findall(r"`ferrule\.(\w+)\(", README + FEATURES):
        assert callable(getattr(ferrule, function))
    assert "`from ferrule import cache; cache.set_default(path)`" in FEATURES
    assert callable(cache.set_default)


def test_the_problem_is_real() -> None:
    """MLX off Apple says what the README's first lines say that it does."""
    mlx = pytest.importorskip("mlx.core")
    if mlx.metal.is_available():
        pytest.skip("this MLX has a Metal back-end")
    code = (
        "import mlx.core as mx\n"
        "k = mx.fast.metal_kernel(name='k', input_names=['a'], output_names=['b'], source='')\n"
        "mx.eval(k(inputs=[mx.ones(4)], grid=(4, 1, 1), threadgroup=(4, 1, 1),\n"
        "          output_shapes=[(4,)], output_dtypes=[mx.float32]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=os.environ
    )
    assert done.stderr.splitlines()[-1] == BLOCKS[0].text.strip()


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 120
    first = README.splitlines()[2]
    assert first.startswith("**") and first.endswith("**")  # what it is, in one line


def test_the_picture_is_the_demos() -> None:
    (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    path = REPOSITORY / picture
    assert path.stat().st_size < 300_000
    with Image.open(path) as image:
        assert image.format == "JPEG" and image.width > 1200


def test_speeds_are_those_of_the_benchmarks() -> None:
    """Each row: what it says of the work, the peer and the three figures are one row there."""
    table = [line for line in README.splitlines() if line.startswith("| ") and " ms |" in line]
    table += [line for line in README.splitlines() if line.startswith("| ") and " µs |" in line]
    measured: list[list[str]] = []
    for line in (REPOSITORY / "docs" / "benchmarks.md").read_text("utf-8").splitlines():
        cells = [cell.strip(" *") for cell in line.split("|")[1:-1]]
        if len(cells) > 4:
            cells[0] = cells[0] or measured[-1][0]  # of the row above
            measured.append(cells)
        if len(cells) == 4:  # of ready ops: all peers in one cell, each with its time and the ratio
            for peer in cells[3].split("; "):
                if found := re.fullmatch(r"(.+) (\S+ \S+), (\S+)", peer):
                    work = f"`ops.{cells[0].replace(',', '`,', 1)}"
                    measured.append([work, found[1], cells[2], found[2], found[3]])
    assert len(table) == 3
    for line in table:
        work, _, peer, *figures = [cell.strip() for cell in line.split("|")[1:-1]]
        found = [row for row in measured if row[1] == peer and row[2:5] == figures]
        assert work in [row[0] for row in found], line
