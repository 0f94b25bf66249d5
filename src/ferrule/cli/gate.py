"""``ferrule gate``: one verdict on a file of ops, as JSON.

The file is run in another process: whatever it does there, there is a verdict.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from .. import MetalKernel, Op
from ..check.fuzzing.gate import ABSENT, ERROR, FAIL, PASS, Report, gate, whole
from ..check.fuzzing.written_test import Origin, Origins
from ..check.reports.results import write_file
from .faults import Fault
from .fuzz import chosen_dtypes, drawing, ranges
from .subject import Subject, find_reference
from .target import load_module

_CODES = {PASS: 0, FAIL: 1, ERROR: 2}
_ENDED = 3  # of a worker that has written its verdict


@click.command("gate")
@click.argument("candidate", metavar="CANDIDATE")
@click.option(
    "--reference", required=True, metavar="FILE",
    help="Has a function of NumPy's arrays, or an op, for each op, of the same name.",
)  # fmt: skip
@click.option("--op", "names", multiple=True, metavar="NAME", help="Judge this op; else all.")
@click.option("--examples", type=click.IntRange(1), default=100, show_default=True)
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), default=30.0, show_default=True,
    help="Draw no more calls of an op after that.",
)  # fmt: skip
@click.option(
    "--time-limit", type=click.FloatRange(0, min_open=True), default=300.0, show_default=True,
    help="Seconds after which a candidate that has not ended fails.",
)  # fmt: skip
@click.option("--worker", hidden=True, help="Where the process that runs the candidate writes.")
@drawing
def command(
    candidate: str,
    reference: str,
    names: tuple[str, ...],
    time_limit: float,
    worker: str | None,
    inputs: Sequence[str],
    kinds: Sequence[str],
    threadgroups: Sequence[int],
    **options: Any,
) -> None:
    """Judge the ops of a file: compile, check, compare, prove and measure them.

    CANDIDATE and the reference are Python files, or modules. One verdict, as JSON, is written to
    stdout; what the candidate prints goes to stderr.

    Exit codes: 0, pass; 1, fail; 2, error: the command line or the reference is wrong.
    """
    drawn = {"inputs": ranges(inputs), "dtypes": chosen_dtypes(kinds)}
    options |= {**drawn, "threadgroups": tuple(threadgroups) or None}
    if worker is not None:
        write_file(
            worker, json.dumps(_judged(candidate, reference, names, worker, options)), worker
        )
        _leave()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "verdict.json"
        verdict = _supervised(path, time_limit)
    click.echo(json.dumps(verdict, indent=1))
    sys.exit(_CODES[verdict["verdict"]])


def _leave() -> None:
    """End the process at once: a candidate may have left threads that do not end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_ENDED)


# -- the process that waits ------------------------------------------------------------------------


def _supervised(path: Path, limit: float) -> Report:
    """Run this command line in another process, and read its verdict, or write it for it."""
    arguments = [*sys.argv[1:], "--worker", str(path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "ferrule", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),
        start_new_session=True,
    )
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    known: Report | None = None
    if path.exists():
        known = json.loads(path.read_text())
    if (
        known is not None
        and status == _ENDED
        and not any("stage" in report for report in known["ops"])
    ):
        return known
    how = f"did not end in {limit:g} s" if status is None else _how(status)
    return _cut_short(known, how, status is None)


def _how(status: int) -> str:
    if status < 0:
        return f"ended its process by {signal.Signals(-status).name}"
    return f"ended its process with status {status}"


def _cut_short(known: Report | None, how: str, timed_out: bool) -> Report:
    """The verdict on a candidate that did not let the worker come to its end."""
    if known is None:
        return whole([], FAIL, f"the candidate {how}, while it was loaded")
    report = known["ops"][-1]
    stage = report.pop("stage")
    if stage == "prove" and timed_out:  # which is no fault of the op's
        report[stage] = {"status": ABSENT, "message": how}
        return whole(known["ops"])
    message = f"op {report['name']!r} {how}, in the stage {stage!r}"
    report |= {"verdict": FAIL, "message": message}
    report[stage]["status"] = FAIL
    return whole(known["ops"])


# -- the process that runs the candidate -----------------------------------------------------------


def _judged(
    candidate: str, reference: str, names: Sequence[str], path: str, options: dict[str, Any]
) -> Report:
    try:
        ops = _ops(candidate, names)
    except Fault as fault:
        there = not candidate.endswith(".py") or os.path.isfile(candidate)
        return whole([], FAIL if there else ERROR, fault.message)
    reports: list[Report] = []
    for op in ops:

        def tell(report: Report) -> None:
            write_file(path, json.dumps(whole([*reports, report])), path)

        try:
            other = find_reference(reference, op.name)
            origins = Origins(op.origin, other.origin)
        except Fault as fault:
            return whole(reports, ERROR, fault.message)
        settings = {**options, "name": op.name, "origins": origins, "tell": tell}
        reports.append(gate(op.value, other.value, **settings))
    return whole(reports)


def _ops(candidate: str, names: Sequence[str]) -> list[Subject]:
    """The ops of a file.

    Raises:
        Fault: it cannot be loaded, or has none.
    """
    module = load_module(candidate)
    found = {name: value for name, value in vars(module).items() if isinstance(value, Op)}
    for name in names:
        if name not in found:
            raise Fault(f"there is no op {name!r} in {candidate!r}; ops: {_listed(found)}.")
    if not found:
        kernels = [name for name, v in vars(module).items() if isinstance(v, MetalKernel)]
        without = f" ({_listed(kernels)}: kernels without a rule)" if kernels else ""
        raise Fault(f"{candidate!r} has no op{without}; expected one made by ferrule.op.")
    stem = os.path.basename(candidate).removesuffix(".py")
    chosen = names or [name for name in found if not name.startswith("_")] or list(found)
    return [
        Subject(name, found[name], Origin(f"from {stem} import {name}", name)) for name in chosen
    ]


def _listed(names: Any) -> str:
    return ", ".join(names) or "none"
