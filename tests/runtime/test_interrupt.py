"""A unit that never ends on the CPU is abandoned at the second Ctrl-C, and the error says so."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

# A unit waits until words[0] is not 0, and notes in words[1] that it has begun.
SCRIPT = """
    import ctypes, os, signal, sys, threading, time
    import numpy as np, ferrule
    ferrule.set_threads({threads})
    BODY = (
        "volatile device int* seen = *(volatile device int* const device*)p;"
        " seen[1] = 1; while (seen[0] == 0) {{}} y[thread_position_in_grid.x] = 1;"
    )
    kernel = ferrule.metal_kernel("endless", ["p"], ["y"], BODY)
    words = np.zeros(2, np.int32)
    UNITS = {units}
    def run_kernel(made=np.asarray, float32=np.float32):
        p = made(np.array([words.ctypes.data], np.int64))
        return kernel(inputs=[p], output_shapes=[(UNITS * 32,)], output_dtypes=[float32],
                      grid=(UNITS * 32, 1, 1), threadgroup=(1, 1, 1))[0]
    {setup}
    words[0] = 1
    for _ in range(3):
        run()  # which ends
    words[:] = 0
    def tell():
        while not words[1]:
            time.sleep(0.01)
        print("running", flush=True)
    threading.Thread(target=tell, daemon=True).start()
    try:
        {call}
    except BaseException as error:
        print(type(error).__name__, error, flush=True)
    words[0] = 1
    run()
    print("runs", flush=True)
"""

NUMPY = "run = run_kernel"
TORCH = "import torch; run = lambda: run_kernel(torch.from_numpy, torch.float32)"
OP = """
    import torch
    op = ferrule.op("endless", "p[1]:int64, like[N]:uint8 -> y[N]:float32", grid="N",
                    threadgroup=1, metal=BODY)
    like = {made}(np.zeros(UNITS * 32, np.uint8))
    run = lambda: op({made}(np.array([words.ctypes.data], np.int64)), like)
"""
LONG = """
    from ferrule.tools import fastcall
    def run():
        with fastcall.bypassed():
            return run_kernel()
"""
MLX = """
    import mlx.core as mx
    def run():
        y = run_kernel(mx.array, mx.float32); mx.eval(y)
"""
WAYS = {
    "numpy": NUMPY,
    "the long way": LONG,
    "torch": TORCH,
    "torch op": OP.format(made="torch.from_numpy"),
    "numpy op": OP.format(made="np.asarray"),
    "mlx": MLX,
}


def started(way: str, threads: int, call: str = "run()", units: int = 1) -> subprocess.Popen[str]:
    setup = textwrap.indent(textwrap.dedent(WAYS[way]).strip(), "    ").strip()
    text = SCRIPT.format(setup=setup, threads=threads, call=call, units=units)
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text)], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    if process.stdout.readline() != "running\n":
        pytest.fail(process.communicate()[1])
    return process


def finished(process: subprocess.Popen[str]) -> str:
    try:
        return "".join(process.communicate(timeout=120))
    finally:
        process.kill()


def interrupt(process: subprocess.Popen[str]) -> None:
    """Ctrl-C, seen by the process before another comes: signals of one kind do not queue."""
    process.send_signal(signal.SIGINT)
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None and int(
        status.read_text().partition("ShdPnd:")[2].split()[0], 16
    ) & 1 << (signal.SIGINT - 1):
        time.sleep(0.01)
    time.sleep(0.2)


SAID = "(kernel|op) 'endless'.* was abandoned at the second interrupt"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the test reads it")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_the_second_interrupt_abandons_units(way: str, threads: int) -> None:
    if way == "mlx":
        mx = pytest.importorskip("mlx.core")
        if mx.default_device().type != mx.cpu:
            pytest.skip("MLX runs kernels on the GPU here")
    process = started(way, threads, units=threads)
    interrupt(process)
    assert process.poll() is None
    interrupt(process)
    out = finished(process)
    if way == "mlx":  # whose thread raises it; then Python interrupts what handles that
        assert re.search(f"RuntimeError: {SAID}", out) and "KeyboardInterrupt" in out, out
        return
    assert re.match(f"KeyboardInterrupt {SAID}", out), out
    assert out.endswith("runs\n")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the test reads it")
def test_a_launch_of_another_thread_is_abandoned_too() -> None:
    call = (
        "found, done = [], threading.Event()\n"
        "        def other():\n"
        "            try: run()\n"
        "            except BaseException as error: found.append(error)\n"
        "            done.set()\n"
        "        threading.Thread(target=other).start()\n"
        "        while not done.is_set():\n"
        "            try: done.wait(60)\n"
        "            except KeyboardInterrupt: print('main', flush=True)\n"
        "        raise found[0]"
    )
    process = started("numpy", 1, call)
    interrupt(process)
    interrupt(process)
    out = finished(process)
    assert "DeviceError kernel 'endless'" in out and "was abandoned" in out and "runs\n" in out
