"""What was measured, for readers, for programs and as a picture."""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any

from ferrule.errors import DeviceError
from ferrule.tools import binding, nvrtc
from ferrule.tools.driver import driver

from .clocks import MODES
from .timing import Row

_PACKAGES = ("ferrule", "numpy", "torch", "triton", "cupy", "mlx", "mlx-lm")
_WIDTHS = (64, 36)  # of the columns for the work and the peer
_GOOD, _BAD, _OPEN = "#2e9e5b", "#d1495b", "#4c78a8"


def machine() -> dict[str, Any]:
    """The machine, and the versions of what is measured."""
    found: dict[str, Any] = {
        "cpu": _cpu(),
        "processors": os.cpu_count(),
        "threads": binding.get_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "gpu": None,
        "driver": None,
        "cuda": None,
    }
    library = nvrtc.find_nvrtc()
    found["nvrtc"] = None if library is None else ".".join(map(str, library.version))
    try:
        gpus = driver()
        if gpus.count:
            found["gpu"] = gpus.name(0)
            found["driver"] = _driver()
            found["cuda"] = ".".join(map(str, gpus.version))
    except DeviceError:
        pass
    return found


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(x.split(":", 1)[1].strip() for x in file if x.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _driver() -> str | None:
    """The version of NVIDIA's kernel module, as in 580.65.06."""
    try:
        with open("/proc/driver/nvidia/version") as file:
            number = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", file.read())
    except OSError:
        return None
    return number[0] if number else None


def _version(package: str) -> str | None:
    names = (package, "cupy-cuda13x", "cupy-cuda12x") if package == "cupy" else (package,)
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def about(machine: dict[str, Any]) -> str:
    """The machine in a few lines."""
    versions = {**machine["versions"], "NVRTC": machine["nvrtc"]}
    threads = machine["threads"]
    lines = [f"{machine['cpu']}, {threads} thread{'s' if threads > 1 else ''}, {machine['system']}"]
    if machine["gpu"] is not None:
        named = f"driver {machine['driver']}, " if machine["driver"] else ""
        lines.append(f"{machine['gpu']}, {named}CUDA {machine['cuda']}")
    lines.append(
        f"Python {machine['python']}, "
        + ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    )
    return "\n".join(lines)


# -- the table -------------------------------------------------------------------------------------


def heading() -> str:
    """The names of the columns."""
    work, peer = _WIDTHS
    return f"{'work':{work}s} {'peer':{peer}s} {'ferrule':>9s} {'peer':>9s} {'peer/ferrule':>12s}"


def line(row: Row) -> str:
    """A row as text."""
    work, peer = _WIDTHS
    ratio = f"{row.ratio:.{3 if row.ratio < 2 else 2}f}"  # 0.949 misses 0.95
    text = (
        f"{row.work:{work}s} {row.peer:{peer}s} {amount(row.ours, row.unit):>9s} "
        f"{amount(row.theirs, row.unit):>9s} {ratio:>12s}"
    )
    if row.mode in MODES and row.mode != "warm":
        text += f"  {row.mode}"
    if row.target is not None:
        text += f"  wanted >= {row.target:.3g}: {'reached' if row.reached else 'MISSED'}"
    if row.moved:
        text += f"  ({row.moved / row.ours / 1e9:.0f} GB/s)"
    return text if row.right else f"{text}  WRONG: {wrong(row)}"


def wrong(row: Row) -> str:
    """How far apart the results are."""
    return f"the results differ by {row.error:.1e}; at most {row.tolerance:.0e} is right"


def amount(value: float, unit: str) -> str:
    """Seconds or a count for a reader: ``"1.23 ms"``, ``"27"``."""
    if unit != "s":
        return f"{value:.0f}"
    factor, name = (1.0, "s") if value >= 1 else (1e3, "ms") if value >= 1e-3 else (1e6, "µs")
    return f"{short(value * factor)} {name}"


def short(value: float) -> str:
    """Three digits or more: ``"0.97"``, ``"12.3"``, ``"1530"``."""
    return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"


def summary(rows: Sequence[Row]) -> str:
    """How many targets are reached, in a line; empty where there are none."""
    wanted = [row for row in rows if row.target is not None]
    if not wanted:
        return ""
    return f"{sum(bool(row.reached) for row in wanted)} of {len(wanted)} targets reached"


def as_json(row: Row) -> dict[str, Any]:
    """A row, made of JSON's types."""
    return {**asdict(row), "reached": row.reached, "right": row.right}


# -- the picture -----------------------------------------------------------------------------------


def draw(path: str, rows: Sequence[Row], title: str) -> None:
    """Write a PNG with a bar per row, from 1 to the ratio, on a logarithmic axis.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter
    from matplotlib.transforms import blended_transform_factory

    # Top to bottom: a line for each work, then its peers, and a gap.
    places: list[float] = []
    works: list[tuple[float, str]] = []
    at, last = 0.0, ""
    for row in rows:
        work = f"{row.work}   ({row.device})"
        if work != last:
            at += 0.5 if works else 0.0
            works.append((at, work))
            at, last = at + 1, work
        places.append(at)
        at += 1
    high = 0.26 * (at + 1) + 1.5
    figure = Figure(figsize=(11, high), dpi=110, facecolor="white")
    axes = figure.add_axes((0.3, 0.75 / high, 0.64, 1 - 1.5 / high))
    ratios = [row.ratio for row in rows] + [row.target for row in rows if row.target is not None]
    low, most = min([0.5, *ratios]), max([2.0, *ratios])
    axes.set_xscale("log")
    axes.set_xlim(low / 1.5, most * 2)
    axes.set_ylim(at + 0.1, -0.8)
    for place, row in zip(places, rows, strict=True):
        colour = _OPEN if row.reached is None else _GOOD if row.reached else _BAD
        axes.barh(place, row.ratio - 1, left=1, height=0.72, color=colour, zorder=2)
        axes.plot(row.ratio, place, "o", color=colour, markersize=5.5, zorder=4)  # seen near 1 too
        right = max(row.ratio, row.target or 1, 1)
        axes.text(
            right * (1 + 0.02 * math.log(most / low)), place, f"{short(row.ratio)} ×",
            va="center", fontsize=8.5, color=colour, fontweight="bold", zorder=4,
        )  # fmt: skip
        if row.target is not None:
            axes.plot(
                [row.target] * 2, [place - 0.46, place + 0.46], color="black", linewidth=1.6,
                zorder=3,
            )  # fmt: skip
    # Names of works begin at the figure's left, and go on into the axes if they must.
    across = blended_transform_factory(figure.transFigure, axes.transData)
    for place, work in works:
        axes.text(
            0.015, place, work, transform=across, ha="left", va="center", fontsize=9,
            fontweight="bold", color="#222222", zorder=4,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )  # fmt: skip
    axes.set_yticks(places, [row.peer for row in rows], fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.axvline(1, color="#222222", linewidth=1, zorder=3)
    axes.grid(axis="x", color="#dddddd", linewidth=0.8, zorder=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("peer / ferrule: right of 1, ferrule is faster")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    note = "green and red: reaches or misses what the project wants (black mark); blue: no target"
    figure.text(0.015, 1 - 0.3 / high, title, fontsize=11, fontweight="bold", va="center")
    figure.text(0.015, 1 - 0.55 / high, note, fontsize=8.5, color="#555555", va="center")
    figure.savefig(path, format="png")
