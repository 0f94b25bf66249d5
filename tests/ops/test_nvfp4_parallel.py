"""Layers in NVFP4 in several processes."""

from __future__ import annotations

import json
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
    """All of `nvfp4_parallel_cases` in one pair of processes: starting them takes the longest."""
    run_cases(tmp_path, 2)


@needs_gloo
@pytest.mark.slow
def test_four_processes(tmp_path: Path) -> None:
    run_cases(tmp_path, 4, "models")


@pytest.mark.gpu
def test_all_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2 or not torch.distributed.is_nccl_available():
        pytest.skip("wants two GPUs, and torch's NCCL")
    run_cases(tmp_path, torch.cuda.device_count(), "cuda")


def run_cases(folder: Path, world: int, *more: str) -> None:
    script = Path(__file__).parents[1] / "nvfp4_parallel_cases.py"
    commands = [
        [sys.executable, str(script), str(rank), str(world), str(folder / "store"), *more]
        for rank in range(world)
    ]
    files = [folder / f"{rank}" for rank in range(world)]
    processes = []
    try:
        for command, file in zip(commands, files, strict=True):
            with file.open("w") as out:
                processes.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT))
        for process in processes:
            process.wait(timeout=500)
    finally:
        for process in processes:
            process.kill()
    texts = [file.read_text() for file in files]
    found = [json.loads(text.splitlines()[-1]) for text in texts if '"ran"' in text]
    assert len(found) == world, "\n".join(texts)
    failed = [
        f"process {i}: {text}" for i, one in enumerate(found) for text in one["failed"].values()
    ]
    assert not failed, "\n".join(failed)
    assert len(found[0]["ran"]) >= 24


def test_layers_import_no_distributed_torch() -> None:
    code = """
import sys, torch
from ferrule.ops import nvfp4
layer = nvfp4.NVFP4Linear(32, 8)
layer(torch.zeros(2, 32)), nvfp4.load, dir(nvfp4)
assert "torch.distributed.tensor" not in sys.modules
assert "ferrule.ops.nvfp4.exchange" not in sys.modules
assert nvfp4.nvfp4_moe_all_gather.__name__ == "nvfp4_moe_all_gather"
"""
    subprocess.run([sys.executable, "-c", code], check=True)
