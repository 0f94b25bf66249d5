"""The fuzzer's command line: ``python -m tests.fuzz.run --minutes 60 --jobs 1 --seed 0``.

Each job is a process of its own, so that a crash or an endless loop is a finding like any other.
Failures are made smaller and written to ``--out``, one file for each kind of failure.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS_PER_WORKER = 150  # each compiled kernel stays loaded
PATIENCE = 240.0  # seconds for one program, its shrinking apart


def worker(options: argparse.Namespace) -> None:
    """Read seeds from the standard input; write a line of JSON for each."""
    sys.path.insert(0, str(ROOT / "tests"))
    with contextlib.ExitStack() as stack:
        if options.cuda:
            import on_cuda

            stack.enter_context(on_cuda.everything())
        elif options.emulate:
            import warps

            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ferrule-fuzz-"))
            stack.enter_context(warps.everything(Path(folder)))
        work(options)


def work(options: argparse.Namespace) -> None:
    """`worker`, on the device that was asked for."""
    from . import harness
    from .generate import Generator

    harness.optimise(options.optimise)
    seen: set[str] = set()
    for line in sys.stdin:
        seed = int(line)
        program = Generator(seed, frozenset(options.avoid)).program()
        modes: tuple[str, ...] = (
            () if program.kind != "flat" or seed % 3 == 0 else ("auto", "split")
        )
        if options.cuda or options.emulate:
            modes = ("auto",)
        outcome = harness.check(program, modes)
        said: dict[str, Any] = {"seed": seed, **vars(outcome), "report": "", "signature": ""}
        if outcome.kind in ("mismatch", "error"):
            mark = harness.signature(outcome)
            said["signature"] = mark
            said["report"] = harness.report(program, outcome)
            if mark not in seen and not options.as_found:
                seen.add(mark)
                _say({**said, "kind": "working"})
                said["report"] = minimised(program, outcome)
        _say(said)


def _say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def minimised(program: Any, outcome: Any) -> str:
    """The report on a smaller program that fails in the same way."""
    from . import harness
    from .shrink import shrink

    mark, mode = harness.signature(outcome), outcome.bad

    def fails(smaller: Any) -> bool:
        now = harness.check(smaller, (mode,))
        return now.kind == outcome.kind and harness.signature(now) == mark

    shrink(program, fails)
    return harness.report(program, harness.check(program, (mode, "fibers")))


class Job:
    """One worker process and what it is doing."""

    def __init__(self, options: argparse.Namespace, results: queue.Queue[Any]) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="ferrule-fuzz-")
        environment = {**os.environ, "FERRULE_CACHE_DIR": self.folder.name}
        command = [sys.executable, "-m", "tests.fuzz.run", "--worker"]
        command += ["--optimise", str(options.optimise), "--avoid", *options.avoid]
        command += ["--as-found"] * options.as_found + ["--cuda"] * options.cuda
        command += ["--emulate"] * options.emulate
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            cwd=ROOT,
        )  # fmt: skip
        self.seed = -1
        self.since = time.monotonic()
        self.done = 0
        self.working: dict[str, Any] | None = None
        self._reader = threading.Thread(target=self._read, args=(results,), daemon=True)
        self._reader.start()

    def _read(self, results: queue.Queue[Any]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            results.put((self, json.loads(line)))
        results.put((self, None))

    def give(self, seed: int) -> None:
        assert self.process.stdin is not None
        self.seed, self.since, self.working = seed, time.monotonic(), None
        self.process.stdin.write(f"{seed}\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()


class Run:
    """Hands out seeds until the time is over, and counts."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out = Path(options.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.counts: collections.Counter[str] = collections.Counter()
        self.ways: collections.Counter[str] = collections.Counter()
        self.failures: dict[str, list[int]] = {}
        self.launches = 0
        self.results: queue.Queue[Any] = queue.Queue()
        self.next = options.seed
        self.end = time.monotonic() + options.minutes * 60

    def start(self) -> Job:
        job = Job(self.options, self.results)
        self.feed(job)
        return job

    def feed(self, job: Job) -> None:
        job.give(self.next)
        self.next += 1

    def whole(self) -> int:
        """Run; the number of distinct failures."""
        jobs = [self.start() for _ in range(self.options.jobs)]
        shown = time.monotonic()
        while time.monotonic() < self.end:
            try:
                job, said = self.results.get(timeout=2)
            except queue.Empty:
                job = said = None
            if job is not None and job in jobs:
                jobs[jobs.index(job)] = self.take(job, said)
            for i, job in enumerate(jobs):
                allowed = PATIENCE * (10 if job.working else 1)
                if time.monotonic() - job.since > allowed:
                    jobs[i] = self.lost(job, "hang")
            if time.monotonic() - shown > 60:
                self.show()
                shown = time.monotonic()
        for job in jobs:
            job.stop()
        self.show()
        return len(self.failures)

    def take(self, job: Job, said: dict[str, Any] | None) -> Job:
        """Note a result; the job that goes on."""
        if said is None:
            return self.lost(job, "crash")
        if said["kind"] == "working":
            job.working = said
            self.write(said)
            return job
        self.counts[said["kind"]] += 1
        self.launches += said["launches"]
        for way in set(said["modes"]):
            self.ways[way] += 1
        if said["signature"]:
            self.failed(said)
        job.done += 1
        if job.done >= PROGRAMS_PER_WORKER:
            job.stop()
            return self.start()
        self.feed(job)
        return job

    def lost(self, job: Job, kind: str) -> Job:
        """A worker that crashed or does not end."""
        said = job.working
        if said is None:
            said = {"seed": job.seed, "signature": kind, "report": f"{kind} at seed {job.seed}\n"}
        self.counts[kind] += 1
        self.failed(said)
        job.stop()
        return self.start()

    def failed(self, said: dict[str, Any]) -> None:
        mark = said["signature"]
        first = mark not in self.failures
        self.failures.setdefault(mark, []).append(said["seed"])
        if first or mark.startswith("mismatch") or len(self.failures[mark]) <= 3:
            self.write(said)

    def write(self, said: dict[str, Any]) -> None:
        """Keep a reproducer; a smaller one replaces it."""
        name = re.sub(r"\W+", "-", said["signature"])[:60]
        path = self.out / f"{name}-{said['seed']}.md"
        path.write_text(said["report"])
        print(f"seed {said['seed']}: {said['signature']}: {path}", flush=True)

    def show(self) -> None:
        """Print the counts."""
        ways: collections.Counter[str] = collections.Counter()
        for way, n in self.ways.items():
            ways[way.split(" (")[0]] += n
        print(
            f"{sum(self.counts.values())} programs, {self.launches} launches; {dict(self.counts)}; "
            f"{dict(ways)}; {len(self.failures)} kinds of failure", flush=True,
        )  # fmt: skip


def main() -> int:
    """The command line; 1 where something failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--out", default="fuzz-failures", help="folder for reproducers")
    parser.add_argument("--optimise", type=int, default=1, help="the compiler's -O level")
    parser.add_argument(
        "--avoid", nargs="*", default=[], help="features that programs must not have"
    )
    parser.add_argument("--as-found", action="store_true", help="do not make failures smaller")
    parser.add_argument("--cuda", action="store_true", help="run the kernels on the first GPU")
    parser.add_argument(
        "--emulate", action="store_true", help="carry out the kernels' CUDA texts on the CPU"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return 0
    run = Run(options)
    found = run.whole()
    for way, n in run.ways.most_common():
        print(f"{n:6d} {way}")
    for mark, seeds in run.failures.items():
        print(f"{len(seeds):6d} {mark}: seeds {seeds[:8]}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
