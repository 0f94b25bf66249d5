"""``ferrule check``: a program, or tests, with every kernel checked."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import click

import ferrule

from ..check import at_exit
from ..check.reports import baseline, formats
from ..check.reports.findings import Finding
from ..check.reports.report import show
from ..check.reports.results import Results, numbered, write_file
from ..check.reports.select import ALL, Selection, selection
from ..check.stops import breaks
from .check_pytest import Collected, run_pytest
from .faults import Program
from .limit import TimeLimit
from .program import AsPython, NotRun, run_program
from .run import install_in_mlx

_FILE = click.Path(dir_okay=False, allow_dash=True)


class _Found(Protocol):
    """A list of findings, with remarks and a number of launches."""

    notes: list[str]
    launches: int

    def __iter__(self) -> Any: ...


class _Reports(NamedTuple):
    """What is reported, and where to."""

    wanted: Selection
    json_file: str | None
    sarif_file: str | None
    github: bool
    baseline_file: str | None
    known: Any  # the counter of `baseline.read`
    new_baseline: str | None
    quiet: bool


class _Ending(NamedTuple):
    """How the program ended: its status, what to say of it, whether it was cut short."""

    status: int = 0
    note: str = ""
    cut: bool = False


class _Command(AsPython):
    last = ("-m", "--pytest")


@click.command("check", cls=_Command, context_settings={"allow_interspersed_args": False})
@click.option("-m", "module", is_flag=True, help="PROGRAM is a module, as with python -m.")
@click.option(
    "--pytest", "tests", is_flag=True, help="Run pytest; all that follows is given to it."
)
@click.option("--prove", is_flag=True, help="PROGRAM is an op, as FILE:OP: prove what holds of it.")
@click.option(
    "--kind", "kinds", multiple=True, metavar="KIND", help="Check this kind; may be repeated."
)
@click.option(
    "--ignore", multiple=True, metavar="KIND", help="Leave this kind out; may be repeated."
)
@click.option(
    "--kernel",
    "kernels",
    multiple=True,
    metavar="GLOB",
    help='Check kernels with such names, as "softmax*"; may be repeated.',
)
@click.option(
    "--sample",
    type=click.IntRange(1),
    metavar="N",
    help="Check N threadgroups of each launch that has more.",
)
@click.option(
    "--time-limit",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="End the program after that time, and report what was found.",
)
@click.option(
    "--break",
    "stop_at",
    multiple=True,
    metavar="[KERNEL:]LINE[:THREAD]",
    help="Show a thread at this line of a body, with its variables; may be repeated.",
)
@click.option(
    "--install-mlx",
    is_flag=True,
    help="Check kernels of mx.fast.metal_kernel, too: puts ferrule into MLX.",
)
@click.option(
    "--baseline",
    "baseline_file",
    type=click.Path(),
    metavar="FILE",
    help="Do not report the findings of this file.",
)
@click.option(
    "--write-baseline",
    "new_baseline",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Write the findings to this file, as known ones.",
)
@click.option("--json", "json_file", type=_FILE, metavar="FILE", help="Write JSON; - is stdout.")
@click.option("--sarif", "sarif_file", type=_FILE, metavar="FILE", help="Write SARIF 2.1.0.")
@click.option("--github", is_flag=True, help="Print annotations for GitHub's workflows.")
@click.option("--quiet", is_flag=True, help="Print the summary alone, and that if there is need.")
@click.argument("program", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    module: bool,
    tests: bool,
    prove: bool,
    program: str | None,
    arguments: tuple[str, ...],
    kinds: tuple[str, ...],
    ignore: tuple[str, ...],
    kernels: tuple[str, ...],
    sample: int | None,
    time_limit: float | None,
    stop_at: tuple[str, ...],
    install_mlx: bool,
    baseline_file: str | None,
    new_baseline: str | None,
    **outputs: Any,
) -> None:
    """Run a Python program as python does, with every kernel checked.

    PROGRAM is a script or, after -m, a module; all that follows is given to it. The report goes to
    stderr.

    Exit codes: 0, nothing was found; 1, there are findings; 2, the command line is wrong, the
    program failed, or its time was over. Of a proof: 0, all is proved; 1, a call refutes it; 2,
    something is not supported.
    """
    if program is None and not tests:
        raise click.UsageError("Missing argument 'PROGRAM', or --pytest.")
    if prove and program is not None:
        from .check_prove import run_proof

        run_proof(program)
        return
    if outputs["json_file"] == outputs["sarif_file"] == "-":
        raise click.UsageError("--json and --sarif cannot both write to stdout.")
    if stop_at and tests:
        raise click.UsageError("--break is for a program, not for --pytest.")
    for text in stop_at:
        breaks.parse(text)
    wanted = selection(kinds, ignore, kernels)
    known = baseline.read(baseline_file) if baseline_file is not None else None
    reports = _Reports(
        wanted, baseline_file=baseline_file, known=known, new_baseline=new_baseline, **outputs
    )
    given = (program, *arguments) if program is not None else ()

    def run() -> None:
        at_exit.stop()
        if install_mlx:
            install_in_mlx()
        if tests:
            _run_tests(given, reports, sample, time_limit)
        else:
            _run_checked(module, given, reports, sample, time_limit, stop_at)

    raise Program(run)


def _run_checked(
    module: bool,
    given: Sequence[str],
    reports: _Reports,
    sample: int | None,
    seconds: float | None,
    stop_at: Sequence[str],
) -> None:
    from ..check.checking import checking

    # Kinds and kernels are named where not all are wanted: what is not watched costs nothing.
    kinds = None if reports.wanted.kinds == ALL else reports.wanted.kinds
    kernels = reports.wanted.kernels or None
    with checking(kinds=kinds, kernels=kernels, sample=sample, stop_at=stop_at) as found:
        program, *arguments = given
        ending = _ended(
            lambda: run_program(module, program, tuple(arguments), "check"), seconds, found, reports
        )
    _leave(_report(found, ending, reports), ending)


def _run_tests(
    given: Sequence[str], reports: _Reports, sample: int | None, seconds: float | None
) -> None:
    found = Collected()

    def tests() -> None:
        status = run_pytest(given, reports.wanted, sample, reports.baseline_file, found)
        if status:
            raise SystemExit(status)

    ending = _ended(tests, seconds, found, reports)
    if ending.status and not ending.cut:
        note = f"pytest ended with status {ending.status}"
        ending = ending._replace(note=note, cut=ending.status > 1)
    _leave(_report(found, ending, reports), ending)


def _ended(
    run: Callable[[], object], seconds: float | None, found: _Found, reports: _Reports
) -> _Ending:
    """Run a program to its end, and say how it ended."""
    over = _Ending(1, f"the time limit of {seconds} s is over, and the program was ended", True)

    def give_up() -> None:
        # The program's own code is in the way of an orderly end.
        _report(found, over, reports)
        _flush()
        os._exit(2)

    limit = TimeLimit(seconds, give_up)
    ending = _Ending()
    try:
        run()
        _join_threads()
    except NotRun:
        raise
    except SystemExit as error:
        ending = _exited(error.code)
    except BaseException as error:
        ending = _Ending(1, "the program ended with an error", True)
        if not (limit.over and isinstance(error, KeyboardInterrupt)):
            sys.excepthook(type(error), error, error.__traceback__)
    limit.end()
    return over if limit.over else ending


def _exited(code: object) -> _Ending:
    if code is None or code == 0:
        return _Ending()
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    return _Ending(code, f"the program ended with status {code}")


def _join_threads() -> None:
    """Wait for the threads that Python waits for when a program ends: they may run kernels."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _leave(status: int, ending: _Ending) -> None:
    alive = (t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon)
    if ending.cut and any(alive):  # Python would wait for them
        _flush()
        os._exit(status)
    sys.exit(status)


# -- what is told ----------------------------------------------------------------------------------


def _report(found: _Found, ending: _Ending, reports: _Reports) -> int:
    """Report what was found; return the exit status."""
    results = _results(found, ending, reports)
    sys.stdout.flush()
    show(results, sys.stderr, quiet=reports.quiet)
    try:
        _write(results, reports)
        if reports.new_baseline is not None:
            return _write_baseline(found, ending, reports)
    except ferrule.KernelError as error:
        ending = _Ending(1, str(error).removesuffix("."), True)
    if ending.note:
        click.echo(f"Error: {ending.note}.", err=True)
    if ending.cut:
        return 2
    if results.findings:
        return 1
    return 2 if ending.status else 0


def _results(found: _Found, ending: _Ending, reports: _Reports) -> Results:
    chosen = reports.wanted.of(found)
    notes = list(found.notes)
    known: Sequence[Finding] = ()
    if not found.launches:
        notes.append("no kernel was launched, so nothing was checked")
    if reports.known is not None and reports.baseline_file is not None:
        stale = baseline.stale(chosen, reports.known, reports.wanted)
        if not ending.status:  # else some of them may only not have been reached
            notes += baseline.stale_notes(reports.baseline_file, stale)
        chosen, known = baseline.split(chosen, reports.known)
    return Results(chosen, found.launches, notes, len(known))


def _write(results: Results, reports: _Reports) -> None:
    texts = (
        (reports.json_file, formats.to_json),
        (reports.sarif_file, lambda results: formats.to_sarif(results, ferrule.__version__)),
    )
    for path, text in texts:
        if path == "-":
            click.echo(text(results), nl=False)
        elif path is not None:
            write_file(path, text(results), "the report")
    if reports.github:
        click.echo(formats.to_github(results), nl=False, err=True)


def _write_baseline(found: _Found, ending: _Ending, reports: _Reports) -> int:
    """Write what was found, if the program was seen to its end; return the exit status."""
    path = reports.new_baseline or ""
    if ending.status:
        click.echo(f"Error: {ending.note}, so {path!r} was not written.", err=True)
        return 2
    chosen = reports.wanted.of(found)
    baseline.write(path, chosen)
    if not reports.quiet:
        click.echo(f"{numbered(len(chosen), 'finding')} written to {path}", err=True)
    return 0
