"""``ferrule bench``, which is in ferrule's repository and not in what is installed."""

from __future__ import annotations

import sys
from pathlib import Path

import click

import ferrule

from .faults import Fault

_FOLDER = Path(ferrule.__file__).resolve().parents[2] / "bench"


@click.command("bench", context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1)
def _absent(arguments: tuple[str, ...]) -> None:
    """Measure kernels against NumPy, torch, CUDA by hand and others (in a checkout of ferrule)."""
    raise Fault(
        "the benchmarks are in ferrule's repository, and not in what is installed here. In a "
        "checkout of it run: pip install -e . && ferrule bench"
    )


command: click.Command = _absent
if (_FOLDER / "ferrule_bench").is_dir():
    if str(_FOLDER) not in sys.path:
        sys.path.append(str(_FOLDER))
    from ferrule_bench.command import command as command
