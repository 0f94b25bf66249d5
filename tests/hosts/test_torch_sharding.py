"""Ops with DTensors, in two processes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

needs_gloo = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="torch has no gloo",
)


@needs_gloo
def test_two_processes(tmp_path: Path) -> None:
    """All of `dtensor_cases` in one pair of processes, for starting them takes the longest."""
    run_cases(tmp_path)


@pytest.mark.gpu
def test_two_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2 or not torch.distributed.is_nccl_available():
        pytest.skip("wants two GPUs, and torch's NCCL")
    run_cases(tmp_path, "cuda")


def run_cases(folder: Path, *more: str) -> None:
    script = Path(__file__).parents[1] / "dtensor_cases.py"
    command = [sys.executable, str(script)]
    store = str(folder / "store")
    both = [
        subprocess.Popen(
            [*command, str(rank), store, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for process in both:
            out, err = process.communicate(timeout=300)
            assert process.returncode == 0, err
            found = json.loads(out.splitlines()[-1])
            assert not found["failed"], "\n".join(found["failed"].values())
            assert len(found["ran"]) >= 12
    finally:
        for process in both:
            process.kill()


@needs_gloo
def test_the_page_about_it() -> None:
    """The blocks of the section run, in one process."""
    page = Path(__file__).parents[2].joinpath("docs", "pytorch.md").read_text(encoding="utf-8")
    section = page.split("## Sharding with DTensor\n")[1].split("\n## ")[0]
    blocks = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert blocks
    subprocess.run([sys.executable, "-c", "\n".join(blocks)], check=True)


def test_dtensor_is_not_imported_for_ops() -> None:
    code = """
import sys, torch, ferrule
op = ferrule.op("f", "x[*S]:T -> y[*S]:T", run=lambda x: x + 1)
class Sub(torch.Tensor):
    pass
op(torch.ones(2)), op.torch_op(torch.ones(2)), op(torch.ones(2).as_subclass(Sub))
assert "torch.distributed.tensor" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
