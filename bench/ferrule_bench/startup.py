"""How long a kernel takes to its first result: compiled cold, and from the disk cache.

Each figure is of a new process: ``python -m ferrule_bench.startup DEVICE FOLDER KERNEL…`` calls
each kernel twice, with its cache in the folder, and prints the seconds that both took, and those
that it took to load the library.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import ferrule
from ferrule import _env, cache
from ferrule.cli import grid_sample as gs
from ferrule.tools import loader

from .timing import Bench

KERNELS = ("exp", "grid_sample", "grid_sample VJP")
COLD, WARM = 0.350, 0.010  # seconds that the project allows on a GPU

Times = tuple[float, float, float]  # first call, second call, loading


def on_cpu(bench: Bench) -> None:
    """The first call from the cache against a compilation, and against a repeated call."""
    # What every process pays once, whatever its kernels: the runtime and the compiler's identity.
    cold, warm = _runs(bench, [["plain", *KERNELS]])
    for name in KERNELS:
        work = f"{name}, first call, cached"
        pairs = [(w[0], c[0]) for c, w in zip(cold[name], warm[name], strict=True)]
        bench.measured(work, "the first call, compiled", pairs)
        pairs = [(first, second + load) for first, second, load in warm[name]]
        bench.measured(work, "loading and the second call", pairs)


def on_cuda(bench: Bench) -> None:
    """The first call of a process, where torch has initialised CUDA, against what is allowed."""
    cold, warm = _runs(bench, [[name] for name in KERNELS])
    for name in KERNELS:
        for what, times, limit in (("compiled", cold, COLD), ("cached", warm, WARM)):
            pairs = [(first, limit) for first, _, _ in times[name]]
            peer = f"the limit of {limit * 1e3:.0f} ms"
            bench.measured(f"{name}, first call, {what}", peer, pairs, 1.0)


def _runs(
    bench: Bench, processes: list[list[str]]
) -> tuple[dict[str, list[Times]], dict[str, list[Times]]]:
    """The times by kernel, with an empty cache and with a full one."""
    cold: dict[str, list[Times]] = {}
    warm: dict[str, list[Times]] = {}
    for _ in range(1 if bench.quick else 3 if bench.device == "cuda" else 5):
        with tempfile.TemporaryDirectory(prefix="ferrule-bench-") as folder:
            for times in (cold, warm):
                for names in processes:
                    for name, found in _process(bench.device, folder, names).items():
                        times.setdefault(name, []).append(found)
    return cold, warm


def _process(device: str, folder: str, names: list[str]) -> dict[str, Times]:
    command = [sys.executable, "-m", "ferrule_bench.startup", device, folder, *names]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300,
        env=_env.with_bytecode(), cwd=Path(__file__).parents[1],
    )  # fmt: skip
    if done.returncode:
        raise ferrule.DeviceError(f"a process that calls {names} failed:\n{done.stderr.strip()}")
    return {name: tuple(times) for name, times in json.loads(done.stdout).items()}


# -- in the new process ----------------------------------------------------------------------------


def child(device: str, folder: str, names: list[str]) -> dict[str, Times]:
    """Call each kernel twice: the seconds of both calls, and of loading it.

    The seconds of loading are those of the CPU's libraries.
    """
    cache.set_default(folder)
    spent = 0.0
    load = loader.load_library

    def timed(payload: bytes, name: str) -> ctypes.CDLL:
        nonlocal spent
        start = time.perf_counter()
        library = load(payload, name)
        spent = time.perf_counter() - start
        return library

    loader.load_library = timed
    calls, wait = _calls(device)
    out: dict[str, Times] = {}
    for name in names:
        seconds = []
        gc.collect()  # what the libraries left is not the kernel's
        for _ in range(2):
            start = time.perf_counter()
            calls[name]()
            wait()
            seconds.append(time.perf_counter() - start)
        out[name] = (seconds[0], seconds[1], spent)
    return out


def _calls(device: str) -> tuple[dict[str, Callable[[], object]], Callable[[], object]]:
    """The kernels' calls on small arrays, and what waits for them."""
    images = np.random.default_rng(0).normal(size=(1, 16, 16, 32)).astype(np.float32)
    x: Any = images
    grid: Any = np.zeros((1, 8, 8, 2), np.float32)
    cot: Any = np.ones((1, 8, 8, 32), np.float32)

    def wait() -> None:
        """Nothing is under way on the CPU."""

    if device == "cuda":
        import torch

        x, grid, cot = (torch.from_numpy(a).cuda() for a in (x, grid, cot))
        wait = torch.cuda.synchronize
        wait()  # CUDA is initialised

    def elementwise(name: str, value: str) -> Callable[[], object]:
        body = f"uint i = thread_position_in_grid.x; out[i] = {value};"
        kernel = ferrule.metal_kernel(name, ["inp"], ["out"], body)
        return lambda: kernel(
            inputs=[x], grid=(images.size, 1, 1), threadgroup=(256, 1, 1),
            output_shapes=[x.shape], output_dtypes=[x.dtype],
        )  # fmt: skip

    calls: dict[str, Callable[[], object]] = {
        "plain": elementwise("plain", "inp[i]"),
        "exp": elementwise("myexp", "metal::exp(inp[i])"),
        "grid_sample": lambda: gs.sample(x, grid),
        "grid_sample VJP": lambda: gs.sample_vjp(x, grid, cot),
    }
    return calls, wait


if __name__ == "__main__":
    print(json.dumps(child(sys.argv[1], sys.argv[2], sys.argv[3:])))
