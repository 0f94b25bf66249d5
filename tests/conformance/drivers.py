"""Runs a driver of an outside suite, which stands beside this, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ferrule


def run_driver(
    script: str, *arguments: str | Path, timeout: float, folder: Path | None = None
) -> None:
    """Run ``script`` with this ferrule, in ``folder`` or here; fail with what it prints if it does.

    Args:
        timeout: in seconds.
    """
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name(script), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(ferrule.__file__).parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout
