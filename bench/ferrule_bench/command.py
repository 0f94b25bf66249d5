"""``ferrule bench``: how fast kernels are here, each against a named peer in the same run."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import click

from ferrule import DeviceError, FerruleError
from ferrule.cli.faults import Fault
from ferrule.tools import binding, driver

from . import clocks, cpu, cuda, nvfp4, quantized, ready, report, robust, timing

Work = list[tuple[str, str, Callable[[timing.Bench], None]]]  # device, group, what it measures

_ON_GPU = {
    **cuda.GROUPS,
    **ready.groups("cuda"),
    **quantized.groups("cuda"),
    **nvfp4.groups("cuda"),
    **robust.GROUPS,
}
_GROUPS = {
    "cpu": {
        **cpu.GROUPS,
        **ready.groups("cpu"),
        **quantized.groups("cpu"),
        **nvfp4.groups("cpu"),
    },
    "cuda": {**_ON_GPU, **cuda.WITHOUT_GPU},
}
_NAMES = ", ".join(dict.fromkeys(name for groups in _GROUPS.values() for name in groups))


@click.command("bench")
@click.argument("groups", metavar="[GROUP]...", nargs=-1)
@click.option(
    "--device", type=click.Choice(list(_GROUPS)), help="Only this device; all there are otherwise."
)
@click.option(
    "--threads", type=click.IntRange(min=1), help="Threads on the CPU, for ferrule and torch."
)
@click.option("--quick", is_flag=True, help="Small sizes and single calls: no measurement.")
@click.option("--only", metavar="NAME", help=f"Only groups with NAME in their names: {_NAMES}.")
@click.option(
    "--mode", "modes", type=click.Choice(list(clocks.MODES)), multiple=True,
    help="Time rows of the GPU so, and not as each says: cold empties the L2 cache before each "
    "call, graph replays captured calls. Several give a row each.",
)  # fmt: skip
@click.option(
    "--autotune", is_flag=True, help="torch.compile tries out kernels for the ready ops: minutes."
)
@click.option(
    "--json", "json_path", metavar="FILE", help='Write everything as JSON too; "-" prints it.'
)
@click.option("--plot", "plot_path", metavar="FILE.png", help="Draw the ratios too.")
def command(
    groups: tuple[str, ...],
    device: str | None,
    threads: int | None,
    quick: bool,
    only: str | None,
    modes: tuple[str, ...],
    autotune: bool,
    json_path: str | None,
    plot_path: str | None,
) -> None:
    """Measure kernels against NumPy, torch, CUDA by hand and others that do the same work.

    GROUP is the first word of groups' names, as in: ferrule bench ops. All there are otherwise.

    Each row is a ratio of times within this run: how many times longer the peer takes. Peers that
    are not installed are left out, and that is said. On a GPU each row also says what the project
    wants, and whether that is reached.

    Exit code 1 says that a kernel failed, or that its results differ from a peer's.
    """
    for path in (json_path, plot_path):
        if path is not None and path != "-" and not os.path.isdir(os.path.dirname(path) or "."):
            raise Fault(f"{path}: there is no folder {os.path.dirname(path)}.")
    if plot_path is not None:
        if quick:
            raise Fault("--plot draws ratios, and --quick measures none; leave out one of them.")
        try:
            import matplotlib  # noqa: F401  before the work, not after it
        except ImportError:
            raise Fault("--plot needs matplotlib. Run: pip install 'ferrule[demo]'") from None
    # What is for programs has the standard output for itself.
    say: Callable[[str], None] = partial(click.echo, err=json_path == "-")
    bench = timing.Bench(lambda row: say(report.line(row)), say)
    bench.quick, bench.rounds = quick, 3 if quick else 15
    bench.modes, bench.autotune = tuple(dict.fromkeys(modes)), autotune
    work = _chosen(bench, device, groups, only)
    if threads is not None:
        binding.set_threads(threads)
    if find_spec("torch") is not None:
        import torch

        torch.set_num_threads(binding.get_threads())
    found = report.machine()
    say(report.about(found))
    if quick:
        say("quick: a check of every part with small sizes; the times say nothing")
    if any(_on_gpu(at, group) for at, group, _ in work):
        say(
            "on the GPU: CUDA's events around blocks of queued calls; cold: not in the L2 cache; "
            "graph: captured once, and replayed"
        )
    say(f"\n{report.heading()}")
    for at, group, measure in work:
        _measure(bench, at, group, measure)
        if json_path not in (None, "-"):  # what there is so far, should the run be stopped
            _write(str(json_path), bench, found)
    rows = bench.rows
    if wanted := report.summary(rows):
        say(f"\n{wanted}")
    if json_path == "-":
        click.echo(_json(bench, found))
    if plot_path is not None and rows:
        named = [found[part] for part in ("gpu", "cpu") if found[part]]
        with _writing(plot_path):
            report.draw(plot_path, rows, f"ferrule bench: {', '.join(named)}")
        say(f"Wrote {plot_path}")
    if bench.failed or not all(row.right for row in rows):
        raise SystemExit(1)


def _chosen(
    bench: timing.Bench, device: str | None, groups: Sequence[str], only: str | None
) -> Work:
    """The groups to measure, those of a GPU where there is one.

    Raises:
        Fault: there is none.
    """
    devices = [device] if device is not None else list(_GROUPS)
    missing = _no_gpu() if "cuda" in devices else None
    if missing is not None:
        bench.leave_out(f"{missing}: of NVIDIA's GPUs, only what needs none is measured")
    here = [
        (at, name, measure)
        for at in devices
        for name, measure in _GROUPS[at].items()
        if at == "cpu" or missing is None or name in cuda.WITHOUT_GPU
    ]
    names = ", ".join(dict.fromkeys(name for _, name, _ in here))
    for group in groups:
        if group not in {name.partition(" ")[0] for _, name, _ in here}:
            raise Fault(
                f"{group!r} is not the first word of a group of {' and '.join(devices)}: {names}"
                f"{f' ({missing}: others need one)' if missing else ''}."
            )
    work = [
        (at, name, measure)
        for at, name, measure in here
        if not groups or name.partition(" ")[0] in groups
        if only is None or only.lower() in name.lower()
    ]
    if not work:
        within = f" of {' '.join(groups)}" if groups else ""
        raise Fault(
            f"--only {only!r}: no group of {' and '.join(devices)}{within} is called so: {names}"
            f"{f' ({missing}: others need one)' if missing else ''}."
        )
    return work


def _no_gpu() -> str | None:
    """Why nothing can be measured on a GPU; None where it can."""
    try:
        if not driver.driver().count:
            return "this process sees no GPU"
    except DeviceError as error:
        return str(error).partition(". ")[0]
    if find_spec("torch") is None:
        return "the GPU's rows need torch, which is not installed (https://pytorch.org/get-started)"
    import torch

    if not torch.cuda.is_available():
        return "this torch has no CUDA (https://pytorch.org/get-started has one that does)"
    return None


def _on_gpu(device: str, group: str) -> bool:
    return device == "cuda" and group in _ON_GPU


def _measure(
    bench: timing.Bench, device: str, group: str, measure: Callable[[timing.Bench], None]
) -> None:
    bench.device, bench.group = device, group
    timers = clocks.timers(bench, "warm") if _on_gpu(device, group) else (bench.by_wall,)
    try:
        with bench.timed(*timers):
            measure(bench)
    except FerruleError as error:
        bench.fail(f"{group} on {device}: {error}")
    except Exception as error:  # of what is measured beside: the other groups go on
        bench.fail(f"{group} on {device}: {timing.said(error)}")
    if _on_gpu(device, group):
        import torch

        with contextlib.suppress(RuntimeError):  # which a kernel that failed leaves behind
            torch.cuda.empty_cache()  # the next group's arrays may need it all


def _json(bench: timing.Bench, machine: dict[str, Any]) -> str:
    return json.dumps(
        {
            "command": ["ferrule", *sys.argv[1:]],
            "quick": bench.quick,
            "machine": machine,
            "rows": [report.as_json(row) for row in bench.rows],
            "left out": bench.left_out,
            "failed": bench.failed,
            "targets": report.summary(bench.rows),
        },
        indent=2,
    )


def _write(path: str, bench: timing.Bench, machine: dict[str, Any]) -> None:
    with _writing(path), open(path, "w", encoding="utf-8") as file:
        file.write(_json(bench, machine) + "\n")


@contextlib.contextmanager
def _writing(path: str) -> Any:
    try:
        yield
    except OSError as error:
        raise Fault(f"{path}: cannot be written: {error.strerror or error}") from error
