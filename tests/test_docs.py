"""The pages of docs are true: a page's programs run one after the other, then its commands, and
print what it says."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from test_readme import blocks, same

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = ["mlx_packages.md", "mlx.md", "pytorch.md"]
_MARK = "\x00"  # between what the blocks of a page print


@pytest.mark.parametrize("page", PAGES)
def test_programs(page: str, tmp_path: Path) -> None:
    everything = blocks((DOCS / page).read_text("utf-8"))
    programs = [b for b in everything if b.language == "python"]
    source = f"\nprint({_MARK!r})\n".join(b.text for b in programs)
    path = tmp_path / "page.py"
    path.write_text(source, "utf-8")
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=280, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.split(f"{_MARK}\n")
    for block, found in zip(programs, printed, strict=True):
        digests = re.sub(r"(\w+)_[0-9a-f]{16}\b", r"\1_#", found)
        assert same(digests, block.output or ""), f"line {block.line}: {found}"
    for block in everything:
        if block.language == "bash" and not block.text.startswith("python3 -m venv .venv && "):
            command = shlex.split(block.text)
            assert command[0] == "ferrule"
            done = subprocess.run(
                [sys.executable, "-m", *command],
                capture_output=True, text=True, timeout=120, cwd=tmp_path,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            assert same(done.stdout, block.output or ""), done.stdout
