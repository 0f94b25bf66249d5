"""What compute-sanitizer costs, on the kernels of `ferrule bench checks`.

    python cross_times.py dump kernels.json          where MLX and mlx-lm are
    python cross_times.py all kernels.json times.jsonl    where a GPU is

Each kernel runs alone, by each tool, in a process of its own. The times are medians of launches
that are waited for, taken inside of the process: ``wall`` from the call to the end, ``gpu`` between
two events around it. With ``ferrule``, the same kernels run on the CPU, unchecked and checked.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np

import ferrule
from ferrule.kernels.call import MetalKernel

LAUNCHES, WARM = 30, 5


def dumped() -> list[dict[str, Any]]:
    """The kernels of the bench's group, and their launches."""
    from ferrule_bench import checks

    kernels: list[dict[str, Any]] = []
    made: Any = MetalKernel
    group: Any = checks
    call, compared = made.__call__, group.compared

    def note(kernel: Any, **given: Any) -> Any:
        kernels.append(described(kernel, given))
        return call(kernel, **given)

    def once(bench: Any, work: str, run: Callable[[], object]) -> None:
        run()
        kernels[-1]["work"] = work

    made.__call__, group.compared = note, once
    try:
        bench: Any = SimpleNamespace(quick=False, installed=lambda name: True)
        checks.slowdown(bench)
    finally:
        made.__call__, group.compared = call, compared
    return kernels


def described(kernel: Any, given: dict[str, Any]) -> dict[str, Any]:
    """A call in JSON's words; arrays by shape and dtype, numbers by value."""

    def said(value: Any) -> Any:
        if isinstance(value, (int, float)):
            return value
        return [list(value.shape), named(value.dtype)]

    def named(dtype: Any) -> str:
        return str(getattr(dtype, "name", dtype)).rpartition(".")[2]

    template = [[k, v if isinstance(v, int) else named(v)] for k, v in given.get("template") or []]
    text = kernel.kernel
    return {
        "name": text.name,
        "inputs": dict(zip(text.input_names, map(said, given["inputs"]), strict=True)),
        "outputs": list(text.output_names),
        "source": text.source,
        "header": text.header,
        "template": template,
        "grid": list(given["grid"]),
        "threadgroup": list(given["threadgroup"]),
        "output_shapes": [list(shape) for shape in given["output_shapes"]],
        "output_dtypes": [named(dtype) for dtype in given["output_dtypes"]],
    }


def callable_of(kernel: dict[str, Any], device: str) -> Callable[[], object]:
    """A launch on torch's tensors."""
    import torch

    made = ferrule.metal_kernel(
        kernel["name"],
        list(kernel["inputs"]),
        kernel["outputs"],
        kernel["source"],
        header=kernel["header"],
    )
    rng = np.random.default_rng(0)

    def array(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        shape, dtype = value
        return torch.from_numpy((0.1 * np.abs(rng.normal(size=shape))).astype(dtype)).to(device)

    inputs = [array(value) for value in kernel["inputs"].values()]
    template = [
        (name, getattr(torch, value) if isinstance(value, str) else value)
        for name, value in kernel["template"]
    ]
    dtypes = [getattr(torch, dtype) for dtype in kernel["output_dtypes"]]
    return lambda: made(
        inputs=inputs,
        template=template or None,
        grid=tuple(kernel["grid"]),
        threadgroup=tuple(kernel["threadgroup"]),
        output_shapes=kernel["output_shapes"],
        output_dtypes=dtypes,
    )


def on_gpu(kernel: dict[str, Any]) -> dict[str, float]:
    """Medians of a kernel on the GPU, in seconds."""
    import torch

    call = callable_of(kernel, "cuda")
    walls, spans = [], []
    for _ in range(WARM + LAUNCHES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start = time.perf_counter()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        walls.append(time.perf_counter() - start)
        spans.append(begin.elapsed_time(end) / 1e3)
    return {"wall": statistics.median(walls[WARM:]), "gpu": statistics.median(spans[WARM:])}


def on_cpu(kernel: dict[str, Any]) -> dict[str, float]:
    """Medians of a kernel on the CPU: as ever, checked for bounds, and checked for everything."""
    call = callable_of(kernel, "cpu")

    def checked(kinds: list[str] | None) -> object:
        with ferrule.checking(kinds=kinds):
            return call()

    ways = {
        "unchecked": call,
        "bounds": lambda: checked(["bounds"]),
        "everything": lambda: checked(None),
    }
    told = {}
    for name, way in ways.items():
        seconds = []
        for _ in range(3 + 7):
            start = time.perf_counter()
            way()
            seconds.append(time.perf_counter() - start)
        told[name] = statistics.median(seconds[3:])
    return told


@click.group()
def main() -> None:
    """Dump kernels, or time them."""


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
def dump(file: Path) -> None:
    """Write the bench's kernels to FILE."""
    file.write_text(json.dumps(dumped(), indent=1))


@main.command()
@click.option("--ferrule", "by_ferrule", is_flag=True, help="On the CPU, unchecked and checked.")
@click.option("--guarded", is_flag=True, help="With the guards that ferrule writes.")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("name")
def one(by_ferrule: bool, guarded: bool, file: Path, name: str) -> None:
    """Time one kernel of FILE."""
    from cross_case import unguarded

    kernel = next(k for k in json.loads(file.read_text()) if k["name"] == name)
    if not by_ferrule:
        unguarded(guarded)
    print("RESULT", json.dumps(on_cpu(kernel) if by_ferrule else on_gpu(kernel)), flush=True)


@main.command("all")
@click.option("--limit", default=90.0, help="Seconds that a process may take.")
@click.option("--seconds", default=500.0, help="After so many, no more processes are started.")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("results", type=click.Path(path_type=Path))
def everything(file: Path, results: Path, limit: float, seconds: float) -> None:
    """Time all kernels of FILE, one after the other."""
    from cross_check import TOOLS, Job, sanitizer

    end = time.monotonic() + seconds
    folder = Path(f"{results}.cache")
    folder.mkdir(mode=0o700, exist_ok=True)
    for kernel in json.loads(file.read_text()):
        for tool in ("guarded", "plain", *TOOLS, "ferrule"):
            if time.monotonic() > end:
                return
            options = [f"--{tool}"] if tool in ("guarded", "ferrule") else []
            job = Job(tool if tool in (*TOOLS, "ferrule") else "plain", (), tool)
            environment = job.environment(folder)
            environment.pop("PYTORCH_NO_CUDA_MEMORY_CACHING", None)
            command = [*sanitizer(tool), sys.executable, __file__, "one", *options, str(file)]
            text = output([*command, kernel["name"]], environment, limit)
            record = {"work": kernel["work"], "tool": tool, "text": text[:8000]}
            with results.open("a") as out:
                out.write(json.dumps(record) + "\n")


def output(command: list[str], environment: dict[str, str], limit: float) -> str:
    """What a process prints; of one that takes too long, that it did."""
    try:
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return f"took more than {limit:.0f} s"
    return ended.stdout + ended.stderr


if __name__ == "__main__":
    main()
