"""Programs through ferrule: each launch in each mode, compared with the reference."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np

import ferrule
from ferrule.devices.cpu import program as cpu
from ferrule.source import NotSplittable

from . import program as p
from .operations import Invalid
from .reference import Reference

Array = np.ndarray[Any, Any]


@dataclass
class Outcome:
    """What became of one program.

    Attributes:
        kind: ``ok``, ``invalid`` (no defined result), ``mismatch``, ``error``, or ``compiler``: it
            crashed.
        modes: how the launches ran in mode ``auto``: ``flat``, ``split by …``, ``fibers (why)``.
        where: for a mismatch or error the mode and launch, and what differs.
        bad: the mode of the first failure.
    """

    kind: str
    modes: list[str] = field(default_factory=list)
    launches: int = 0
    where: str = ""
    bad: str = ""


def build(program: p.Program) -> ferrule.MetalKernel:
    """The program as a kernel."""
    return ferrule.metal_kernel(
        name=f"fuzz_{program.seed}",
        input_names=[v.name for v, _, _ in program.inputs],
        output_names=[v.name for v, _ in program.outputs],
        source=program.body_text(),
        header=program.header_text(),
        ensure_row_contiguous=program.contiguous,
    )


def launch(
    kernel: ferrule.MetalKernel, program: p.Program, how: p.Launch, mode: str
) -> tuple[list[Array], str]:
    """The flat outputs of one launch, and how it ran."""
    threads = how.grid[0] * how.grid[1] * how.grid[2]
    arguments: dict[str, Any] = {
        "inputs": program.arrays(how.data),
        "grid": how.grid,
        "threadgroup": how.threadgroup,
        "output_shapes": [(per * threads or 16,) for _, per in program.outputs],
        "output_dtypes": [np.dtype(v.type.dtype) for v, _ in program.outputs],
        "init_value": program.init,
    }
    if program.template:
        arguments["template"] = [
            (v.name, np.dtype(x.dtype) if isinstance(x, p.Type) else x) for v, x in program.template
        ]
    with cpu.running(mode), warnings.catch_warnings(), _small_blocks(program.seed), _noted():
        warnings.simplefilter("ignore", ferrule.PortabilityWarning)
        outputs = kernel(**arguments)
    return outputs, _ways.get((kernel.kernel.name, mode), "?")


_ways: dict[tuple[str, str], str] = {}  # how a kernel ran last in a mode


@contextlib.contextmanager
def _noted() -> Iterator[None]:
    """Note how the kernels that are compiled will run."""
    right = cpu.CpuDevice.binary

    def noted(self: Any, spec: Any, *form: Any) -> Any:
        payload, way = right(self, spec, *form)
        _ways[spec.kernel.name, cpu._mode.get()] = way
        return payload, way

    with mock.patch.object(cpu.CpuDevice, "binary", noted):
        yield


@contextlib.contextmanager
def _small_blocks(seed: int) -> Iterator[None]:
    """Flat kernels cut rows into blocks, of far more threads than the programs have."""
    kept = cpu.BLOCK
    cpu.BLOCK = (kept, 64, 37)[seed % 3]
    try:
        yield
    finally:
        cpu.BLOCK = kept


def expected(program: p.Program) -> list[list[Array]]:
    """The outputs of each launch.

    Raises:
        Invalid: some launch has no defined result.
    """
    return [Reference(program, how).run() for how in program.launches]


def check(program: p.Program, modes: tuple[str, ...] = ()) -> Outcome:
    """Run a program in each mode (by default in all that it may run in); compare every output."""
    modes = modes or ("auto", "fibers", *["split"] * (program.kind == "flat"))
    try:
        wanted = expected(program)
    except Invalid as why:
        return Outcome("invalid", where=str(why))
    kernel = build(program)
    outcome = Outcome("ok")
    for mode in modes:
        for n, (how, want) in enumerate(zip(program.launches, wanted, strict=True)):
            try:
                got, way = launch(kernel, program, how, mode)
            except NotSplittable:
                break  # in mode split; others find another way
            except ferrule.FerruleError as error:
                # g++ 12 stops at `true ? TABLE[FLAG ? 1 : 2] : 1.0f`, FLAG being a template's.
                fault = "internal compiler error" in str(error)
                outcome.kind, outcome.bad = "compiler" if fault else "error", mode
                outcome.where = f"mode {mode}, launch {n}: {type(error).__name__}: {error}"
                return outcome
            if "does not compile" in way:
                outcome.kind, outcome.bad, outcome.where = "error", mode, f"mode {mode}: {way}"
                return outcome
            outcome.launches += 1
            if mode == "auto":
                outcome.modes.append(way)
            for (var, _), a, b in zip(program.outputs, want, got, strict=True):
                different = np.flatnonzero(a != b.reshape(-1))
                if len(different):
                    i = int(different[0])
                    outcome.kind, outcome.bad = "mismatch", mode
                    outcome.where = (
                        f"mode {mode} ({way}), launch {n} (grid {how.grid}, threadgroup "
                        f"{how.threadgroup}): {var.name}[{i}] is {b.reshape(-1)[i]}, expected "
                        f"{a[i]}; {len(different)} of {len(a)} differ"
                    )
                    return outcome
    return outcome


def signature(outcome: Outcome) -> str:
    """What failures of one cause have in common, more or less."""
    if outcome.kind == "mismatch":
        return f"mismatch {outcome.bad}"
    text = re.sub(r"^mode \w+, launch \d+: ", "", outcome.where)
    lines = [ln for ln in text.splitlines() if not ln.lstrip().startswith("|")]
    first = " ".join(lines[:2] if "no error lies" not in text else lines[:3])
    first = re.sub(r"kernel 'fuzz_\d+'|header line \d+|source line \d+|\(grid.*?\)\)", "", first)
    return f"{outcome.bad} " + re.sub(r"'[^']*'", "'…'", re.sub(r"\d+", "#", first))[:160]


def report(program: p.Program, outcome: Outcome) -> str:
    """A reproducer: the texts, the launches, the inputs, and what went wrong."""
    lines = [f"# seed {program.seed}: {outcome.kind}", "", outcome.where, "", "## header", ""]
    lines += ["    " + ln for ln in program.header_text().splitlines()]
    lines += ["", "## body", ""]
    lines += ["    " + ln for ln in program.body_text().splitlines()]
    lines += ["", "## launches", ""]
    template = [(v.name, x.name if isinstance(x, p.Type) else x) for v, x in program.template]
    outputs = [(v.name, v.type.name, per or "16 in all") for v, per in program.outputs]
    lines += [f"template {template}; outputs (elements per thread) {outputs}; init {program.init}; "
              f"ensure_row_contiguous {program.contiguous}"]  # fmt: skip
    for how in program.launches:
        lines.append(f"grid {how.grid}, threadgroup {how.threadgroup}")
        for (var, _, layout), values in zip(program.inputs, program.arrays(how.data), strict=True):
            lines.append(f"    {var.name} ({layout}, {values.dtype}): {values.tolist()}")
    return "\n".join(lines) + "\n"


def optimise(level: int) -> None:
    """Compile with another level of optimisation: compilers take most of the time.

    Short rows are then taken for rows too.
    """
    flags = tuple(f"-O{level}" if f.startswith("-O") else f for f in cpu._FLAGS)
    cpu._FLAGS = (*flags, "-DFR_ROW_MIN=2")
