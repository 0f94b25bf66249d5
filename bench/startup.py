"""How long a kernel takes to its first result: compiled cold, and from the disk cache.

    python bench/startup.py

Each run is a new process with a cache folder of its own. "first" and "second" are calls of the
kernel; "load" is what the second process needs to read, verify and load the compiled kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

from timing import machine

_CHILD = """
import json, sys, time
import numpy as np
import ferrule
from ferrule import cache, loader, toolchain, binding
from ferrule.cli import grid_sample as gs
x = np.random.default_rng(0).normal(size=(1, 16, 16, 32)).astype(np.float32)
grid = np.zeros((1, 8, 8, 2), np.float32)
cot = np.ones((1, 8, 8, 32), np.float32)
kernels = {
    "exp": lambda: myexp(inputs=[x], grid=(x.size, 1, 1), threadgroup=(256, 1, 1),
                         output_shapes=[x.shape], output_dtypes=[x.dtype]),
    "grid_sample": lambda: gs.sample(x, grid),
    "grid_sample VJP": lambda: gs.sample_vjp(x, grid, cot),
}
myexp = ferrule.metal_kernel("myexp", ["inp"], ["out"],
                             "uint i = thread_position_in_grid.x; out[i] = metal::exp(inp[i]);")
plain = ferrule.metal_kernel("plain", ["inp"], ["out"], "out[0] = inp[0];")
# What every process pays once, whatever its kernels: the runtime and the compiler's identity.
plain(inputs=[x], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)],
      output_dtypes=[x.dtype])
out = {}
spent = 0.0
load = loader.load_library
def timed(payload, name):
    global spent
    start = time.perf_counter()
    library = load(payload, name)
    spent = time.perf_counter() - start
    return library
loader.load_library = timed
for name, call in kernels.items():
    start = time.perf_counter(); call(); first = time.perf_counter() - start
    start = time.perf_counter(); call(); second = time.perf_counter() - start
    out[name] = (first, second, spent)
print(json.dumps(out))
"""


def child(folder: str) -> dict[str, tuple[float, float, float]]:
    """One process: for each kernel its first call, its second, and the loading."""
    run = subprocess.run(
        [sys.executable, "-c", _CHILD],
        env={**os.environ, "FERRULE_CACHE_DIR": folder},
        capture_output=True,
        text=True,
        check=True,
    )
    return {k: tuple(v) for k, v in json.loads(run.stdout).items()}


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two rounds in place of five")
    rounds = 2 if parser.parse_args().quick else 5
    cold: dict[str, list[float]] = {}
    warm: dict[str, list[tuple[float, float, float]]] = {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            for name, (first, _, _) in child(folder).items():
                cold.setdefault(name, []).append(first)
            for name, times in child(folder).items():
                warm.setdefault(name, []).append(times)
    print(machine())
    title = ("kernel", "cold", "cached", "second", "load", "cached-second-load", "cold/cached")
    print("{:20s} {:>10s} {:>10s} {:>10s} {:>10s} {:>20s} {:>12s}".format(*title))
    for name in cold:
        first, second, load = (statistics.median(t[i] for t in warm[name]) for i in range(3))
        extra = statistics.median(a - b - c for a, b, c in warm[name])
        print(
            f"{name:20s} {statistics.median(cold[name]) * 1e3:7.0f} ms {first * 1e3:7.2f} ms "
            f"{second * 1e3:7.2f} ms {load * 1e3:7.2f} ms {extra * 1e3:17.2f} ms "
            f"{statistics.median(cold[name]) / first:11.0f}x"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
