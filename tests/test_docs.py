"""The pages of docs are true: a page's programs run one after the other, then its commands, and
print what it says."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from processes import COMPILING, forked
from test_readme import Block, blocks, same

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = ["mlx_packages.md", "mlx.md"]
PAGES += [pytest.param(name, marks=pytest.mark.slow) for name in ("pytorch.md", "nvfp4.md")]
ALONE = [
    pytest.param(block, id=f"{path.stem}-{block.line}")
    for path in sorted(DOCS.glob("*.md"))
    if path.stem != "adopt"  # whose blocks test_adopt_docs.py runs, each alone
    for block in blocks(path.read_text("utf-8"))
    if block.language == "python" and re.match(r"(import|from) ", block.text)
]
_MARK = "\x00"  # between what the blocks of a page print


@pytest.mark.parametrize("page", PAGES)
def test_programs(page: str, tmp_path: Path) -> None:
    if "mlx" in page:
        pytest.importorskip("mlx.core")
    everything = blocks((DOCS / page).read_text("utf-8"))
    programs = [b for b in everything if b.language == "python"]
    source = f"\nprint({_MARK!r})\n".join(b.text for b in programs)
    path = tmp_path / "page.py"
    path.write_text(source, "utf-8")
    done = forked(path, modules=COMPILING, timeout=280, cwd=tmp_path)
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


@pytest.mark.parametrize("block", ALONE)
def test_a_block_that_begins_with_imports_is_whole(block: Block, tmp_path: Path) -> None:
    """Such a block claims that nothing need stand before it: it is what a reader copies. Those that
    go on with what is above say so in a comment at their start."""
    path = tmp_path / "block.py"
    path.write_text(block.text, "utf-8")
    done = forked(path, modules=COMPILING, timeout=280, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_enough_blocks_are_whole() -> None:
    assert len(ALONE) >= 8


@pytest.mark.parametrize(
    "path", [*sorted(DOCS.glob("*.md")), DOCS.parent / "README.md"], ids=lambda path: path.stem
)
def test_lists_are_not_broken(path: Path) -> None:
    """A blank line between two items makes Markdown show two lists, or a loose one."""
    text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert not re.search(r"^[*-] (?:(?!\n\n).)*\n\n(?=[*-] )", text, re.MULTILINE | re.DOTALL)
