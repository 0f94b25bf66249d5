"""``ferrule fuzz``: the smallest call of an op that fails, as a test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from ..check.fuzzing.fuzz import FuzzResult, fuzz
from ..check.fuzzing.written_test import Origins
from ..check.reports.findings import KINDS
from ..check.reports.report import show
from ..check.reports.results import Results, numbered, write_file
from .faults import Fault
from .subject import find_op, find_reference

_Command = TypeVar("_Command", bound=Callable[..., Any])


def drawing(command: _Command) -> _Command:
    """The options that say what calls are like, shared with ``ferrule gate``."""
    for decorate in reversed(
        (
            click.option(
                "--input", "inputs", multiple=True, metavar="NAME=LOW..HIGH",
                help='What an input is like, as "index=0..V-1"; once per input.',
            ),
            click.option(
                "--dtype", "kinds", multiple=True, metavar="T=DTYPE,…",
                help="What a dtype variable is; else what the rule says, or float32, float16 and "
                "bfloat16.",
            ),
            click.option("--seed", type=int, help="Draw the same calls each time."),
            click.option("--rtol", type=click.FloatRange(0), help="Relative tolerance."),
            click.option("--atol", type=click.FloatRange(0), help="Absolute tolerance."),
            click.option(
                "--threadgroup", "threadgroups", type=click.IntRange(1, 1024), multiple=True,
                metavar="N", help="Also launch with N threads per threadgroup; may be repeated.",
            ),
            click.option("--nonfinite", is_flag=True, help="Also draw infinities and NaN."),
            click.option(
                "--ignore", multiple=True, default=("nan",), show_default=True,
                type=click.Choice(KINDS), metavar="KIND", help="A kind of finding that is none.",
            ),
        )
    ):  # fmt: skip
        command = decorate(command)
    return command


@click.command("fuzz")
@click.argument("target", metavar="FILE:OP")
@click.option(
    "--reference",
    metavar="FILE:NAME",
    help="A function of NumPy's arrays that gives the outputs; without it, the op's "
    "implementations, forms and orders of threads are compared with each other.",
)
@click.option("--examples", type=click.IntRange(1), default=100, show_default=True)
@click.option("--seconds", type=click.FloatRange(0, min_open=True), help="Draw no more after that.")
@click.option("--write", "file", type=click.Path(dir_okay=False), help="Write the test to a file.")
@drawing
def command(
    target: str,
    reference: str | None,
    examples: int,
    seconds: float | None,
    file: str | None,
    inputs: Sequence[str],
    kinds: Sequence[str],
    threadgroups: Sequence[int],
    **options: Any,
) -> None:
    """Look for a call of an op that its rule allows and that fails.

    The smallest such call is printed as a test of pytest's; what is wrong with it goes to stderr.

    Exit codes: 0, none was found; 1, one was; 2, the command line, the op or the reference is
    wrong.
    """
    subject = find_op(target)
    other = None if reference is None else find_reference(reference, subject.name)
    result = fuzz(
        subject.value,
        reference=None if other is None else other.value,
        examples=examples,
        seconds=seconds,
        inputs=ranges(inputs),
        dtypes=chosen_dtypes(kinds),
        threadgroups=tuple(threadgroups) or None,
        origins=Origins(subject.origin, None if other is None else other.origin),
        **options,
    )
    _tell(subject.name, result)
    if result.failure is None:
        return
    if file is None:
        click.echo(result.test, nl=False)
    else:
        write_file(file, result.test, "the test")
    sys.exit(1)


def ranges(texts: Sequence[str]) -> dict[str, str]:
    """The values of ``--input``, by name.

    Raises:
        Fault: one is not written so.
    """
    return dict(_split("--input", text, "index=0..V-1") for text in texts)


def chosen_dtypes(texts: Sequence[str]) -> dict[str, list[str]]:
    """The values of ``--dtype``, by name.

    Raises:
        Fault: one is not written so.
    """
    pairs = (_split("--dtype", text, "T=float32,float16") for text in texts)
    return {name: value.split(",") for name, value in pairs}


def _split(option: str, text: str, example: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not value:
        raise Fault(f'{option} {text!r}: expected a name, "=" and a value, as in "{example}".')
    return name.strip(), value.strip()


def _tell(name: str, result: FuzzResult) -> None:
    """Say what came of it, on stderr."""
    failure = result.failure
    if failure is not None:
        if failure.findings:
            show(Results(failure.findings, 1), sys.stderr)
        click.echo(f"{name} fails: {failure.message}", err=True)
        for line in failure.call.lines():
            click.echo(f"  {line}", err=True)
        if failure.call.threadgroup is not None:
            click.echo(f"  with threadgroup {failure.call.threadgroup}", err=True)
        return
    refused = f", {result.refused} were refused" if result.refused else ""
    calls = numbered(result.examples, "call")
    click.echo(f"{name}: {calls} passed{refused}, {result.seconds:.1f} s", err=True)
