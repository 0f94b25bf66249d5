"""`ferrule check` and compute-sanitizer on the same planted bugs: who finds what.

    python cross_check.py results.jsonl

It needs an NVIDIA GPU, torch and compute-sanitizer. Each bug has a process of its own for each
tool (`cross_case.py`), with each array in an allocation of its own; twins, of which nothing should
be said, share processes, and have their own where something is. What every process printed goes to
the file, a line of JSON each; what stands there already is not run again. `cross_tables.py` reads
it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from catalogue import BUGS
from cross_case import IMPOSSIBLE

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# The tool for bugs of a kind. What it misses gets a second chance: without optimisation, and with
# memory that is nobody's behind each array; and where it names no line of the author's, with the
# functions that were called.
OWN = {
    "bounds": "memcheck", "race": "racecheck", "uninitialised": "initcheck",
    "unwritten": "initcheck", "divergence": "synccheck",
}  # fmt: skip
AGAIN = {
    "debug": ("--show-backtrace", "device"),
    "padding": ("--show-backtrace", "device", "--padding", "1024"),
    "frames": ("--show-backtrace", "device"),
    "deadlock": ("--show-backtrace", "no", "--racecheck-deadlock-timeout", "5000"),
}
CASE = str(Path(__file__).with_name("cross_case.py"))
ALONE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
# How else torch may allocate; of a few bugs and twins.
ALLOCATORS = {
    "caching": {},
    "segments": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
}
OTHERWISE = (
    "bounds_read_past_end", "bounds_write_past_end", "bounds_ragged_last_threadgroup",
    "bounds_negative_index", "bounds_stencil", "bounds_gather", "bounds_scatter",
    "bounds_huge_index", "bounds_vector_read", "bounds_walking_pointer",
)  # fmt: skip
TWINS = 16  # that share a process
KIND = {planted.name: planted.kind for planted in BUGS}
_REPORT = re.compile(
    r"^========= (?:Invalid|(?:Error|Warning): Race|Uninitialized|Host API|Barrier error|Deadlock)",
    re.MULTILINE,
)
_LINE = re.compile(r"\.(?:source|header):\d")


@dataclass(frozen=True)
class Job:
    """A process.

    Attributes:
        tool: one of `TOOLS`; ``"plain"`` for none, ``"ferrule"`` for `ferrule.checking`.
        names: of planted bugs or twins.
        how: ``"alone"``, ``"guarded"``, or one of `ALLOCATORS` or `AGAIN`.
    """

    tool: str
    names: tuple[str, ...]
    how: str = "alone"

    @property
    def command(self) -> list[str]:
        options = [f"--{self.how}"] if self.how in ("guarded", "debug") else []
        options += ["--ferrule"] if self.tool == "ferrule" else []
        return [*sanitizer(self.tool, self.how), sys.executable, CASE, *options, *self.names]

    def environment(self, folder: Path) -> dict[str, str]:
        cache = folder / (self.how if self.how in ("guarded", "debug") else "plain")
        cache = folder / "ferrule" if self.tool == "ferrule" else cache
        return {**os.environ, "FERRULE_CACHE_DIR": str(cache), **ALLOCATORS.get(self.how, ALONE)}


def sanitizer(tool: str, how: str = "alone") -> list[str]:
    """The words before a command; none for what is no tool of compute-sanitizer."""
    if tool not in TOOLS:
        return []
    options = AGAIN.get(how, ("--show-backtrace", "no"))
    return ["compute-sanitizer", "--tool", tool, "--print-limit", "20", *options]


def jobs() -> Iterator[Job]:
    """All of them, those first that say most."""
    pairs = [(planted.name, planted.clean.name) for planted in BUGS]
    bugs, twins = zip(*(pair for pair in pairs if pair[0] not in IMPOSSIBLE), strict=True)
    for name in bugs:
        for tool in ("plain", *TOOLS):
            yield Job(tool, (name,))
    for tool in ("plain", *TOOLS):
        for part in parts(twins):
            yield Job(tool, part)
    for name in OTHERWISE:
        for how in ("guarded", *ALLOCATORS):
            yield Job("memcheck", (name,), how)
    for how in ALLOCATORS:
        yield Job("memcheck", tuple(f"{name}_mended" for name in OTHERWISE), how)
    for names in zip(*pairs, strict=True):
        for part in parts(names):
            yield Job("ferrule", part)


def parts(names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for i in range(0, len(names), TWINS):
        yield names[i : i + TWINS]


def ran(job: Job, folder: Path, limit: float) -> dict[str, Any]:
    """Run a process; one that takes too long is killed with all that it started."""
    start = time.monotonic()
    limit = 120.0 if job.tool == "ferrule" else limit * (1 + len(job.names) / 8)
    process = subprocess.Popen(
        job.command,
        env=job.environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        text, status = process.communicate(timeout=limit)[0], process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text, status = process.communicate()[0], None
    seconds = round(time.monotonic() - start, 2)
    return {**asdict(job), "status": status, "seconds": seconds, "text": text[:12_000]}


def spoke(record: dict[str, Any]) -> bool:
    """Whether anything was said of twins, or not all of them were right."""
    right = record["text"].count('"outcome": "right"')
    return record["status"] != 0 or reported(record["text"]) or right < len(record["names"])


def reported(text: str) -> bool:
    """Whether a tool says anything of a kernel or its arrays."""
    return _REPORT.search(text) is not None


def again(job: Job, record: dict[str, Any]) -> Iterable[Job]:
    """Each twin alone, where something was said of several; a bug's second chances."""
    if job.tool == "ferrule" or job.how != "alone":
        return ()
    if len(job.names) > 1:
        return [Job(job.tool, (name,)) for name in job.names] if spoke(record) else ()
    kind = KIND.get(job.names[0])
    if OWN.get(kind or "") != job.tool or kind == "unwritten":
        return ()
    if record["status"] is None:
        return [Job("racecheck", job.names, "deadlock")]
    if not reported(record["text"]):
        hows = ["debug", "padding"] if kind == "bounds" else ["debug"]
        return [Job(job.tool, job.names, how) for how in hows]
    return () if _LINE.search(record["text"]) else [Job(job.tool, job.names, "frames")]


@click.command()
@click.option("--workers", default=12, help="Processes at a time.")
@click.option("--limit", default=60.0, help="Seconds that a process of one kernel may take.")
@click.option("--seconds", default=500.0, help="After so many, no more processes are started.")
@click.option("--only", default="", help="Only jobs in whose names this stands.")
@click.argument("file", type=click.Path(path_type=Path))
def main(file: Path, workers: int, limit: float, seconds: float, only: str) -> None:
    """Run what does not stand in FILE yet."""
    end = time.monotonic() + seconds
    lines = file.read_text().splitlines() if file.exists() else []
    done = {(r["tool"], tuple(r["names"]), r["how"]): r for r in map(json.loads, lines)}
    folder = Path(f"{file}.cache")
    folder.mkdir(mode=0o700, exist_ok=True)

    def run(job: Job) -> int:
        record = done.get((job.tool, job.names, job.how))
        if record is None:
            if time.monotonic() > end:
                return 0
            record = ran(job, folder, limit)
            with file.open("a") as out:
                out.write(json.dumps(record) + "\n")
        return 1 + sum(map(run, again(job, record)))

    wanted = [job for job in jobs() if any(only in name for name in job.names)]
    with ThreadPoolExecutor(workers) as pool:
        ended = list(pool.map(run, wanted))
    left = ended.count(0)
    print(f"{sum(ended)} processes, {left} jobs left, {time.monotonic() - end + seconds:.0f} s")


if __name__ == "__main__":
    main()
