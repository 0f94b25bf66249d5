"""docs/adopt.md is true: its blocks print what it says; those for a GPU are at least Python."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import pytest

import ferrule
from processes import forked
from test_readme import REPOSITORY, Block, blocks, same

TEXT = (REPOSITORY / "docs" / "adopt.md").read_text(encoding="utf-8")
BLOCKS = [block for block in blocks(TEXT) if block.language == "python"]
ON_A_GPU = [block for block in BLOCKS if block.text.startswith("# On a GPU")]
PROGRAMS = [block for block in BLOCKS if block not in ON_A_GPU]


@pytest.mark.parametrize("block", PROGRAMS, ids=lambda block: f"line{block.line}")
def test_programs(block: Block, tmp_path: Path) -> None:
    needs = re.match(r"# needs (\w+)", block.text)
    if needs and importlib.util.find_spec(needs[1]) is None:
        pytest.skip(f"{needs[1]} is not installed")
    path = tmp_path / "program.py"
    path.write_text(block.text, encoding="utf-8")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = forked(path, timeout=120, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert block.output is not None
    # Warp begins by saying what it found.
    printed = "".join(done.stdout.splitlines(True)[-block.output.count("\n") :])
    assert same(printed, block.output), done.stdout


@pytest.mark.parametrize("block", ON_A_GPU, ids=lambda block: f"line{block.line}")
def test_blocks_for_a_gpu_are_python(block: Block) -> None:
    code = compile(block.text, "adopt.md", "exec")
    assert "ferrule" in code.co_names
    rule = re.search(r'adopt\(\s*"\w+",\s*"([^"]+)"', block.text)
    assert rule is not None
    ferrule.adopt("f", rule[1], run=print)  # the rule can be read


def test_all_libraries_are_shown() -> None:
    titles = set(re.findall(r"^### (.*)", TEXT, re.MULTILINE))
    assert titles == {
        "A C function, by ctypes", "A torch extension", "Numba", "Warp", "Triton", "CuPy",
        "CuTeDSL",
    }  # fmt: skip
    assert len(ON_A_GPU) == 3 and len(PROGRAMS) == 13


def test_links() -> None:
    prose = re.sub(r"^```.*?^```", "", TEXT, flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)#]+)", prose)
    assert targets
    assert [target for target in targets if not (REPOSITORY / "docs" / target).exists()] == []
