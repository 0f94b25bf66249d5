"""``ferrule bench ops``: the ready ops of `ferrule.ops` against every peer that is installed.

What is done, and in which sizes, is a table (`works`); who else does it is a table of each host
(`on_numpy`, `on_torch`, `on_mlx`). On the CPU, NumPy and MLX use one thread. On a GPU rows are of
cold caches, and of CUDA graphs but for derivatives; MLX's are by wall time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import ferrule
import ferrule.ops
from ferrule import FerruleError

from .. import clocks
from ..timing import Bench, Call, Peer, said
from .works import WORKS, Other, Work

HALF = 2e-2  # how far results in 16 bits may be apart


def measure(name: str, device: str, bench: Bench) -> None:
    """The rows of one op, on each host that is there."""
    op = getattr(ferrule.ops, name, None)
    if op is None:
        bench.leave_out(f"ferrule.ops has no {name}: its rows are left out")
        return
    for work in (work for work in WORKS if work.op == name):
        with hosts(bench, device) as found:
            for host in found:
                sizes = work.sizes["quick" if bench.quick else device]
                for size in sizes if host.peers(work) else ():
                    for dtype in work.dtypes[device]:
                        if dtype in host.dtypes:
                            _guarded(bench, host, work, op, size, dtype)


@contextlib.contextmanager
def hosts(bench: Bench, device: str) -> Iterator[list[Any]]:
    """Those that have arrays on the device; MLX's default device is the one, meanwhile."""
    found: list[Any] = []
    if device == "cpu":
        from .on_numpy import NumPy

        found.append(NumPy())
    if bench.installed("torch"):
        from .on_torch import Torch

        found.append(Torch(device))
    if not bench.installed("mlx"):
        yield found
        return
    import mlx.core as mx

    from .on_mlx import Mlx

    before = mx.default_device()
    if device == "cpu":
        mx.set_default_device(mx.cpu)
    elif before != mx.Device(mx.gpu):
        bench.leave_out("MLX has no CUDA here: its rows are left out")
        yield found
        return
    try:
        yield [*found, Mlx()]
    finally:
        mx.set_default_device(before)


def _guarded(
    bench: Bench, host: Any, work: Work, op: Any, size: tuple[int, ...], dtype: str
) -> None:
    """One row per peer; the others go on where ferrule's side fails."""
    named = f"{work.named(size, dtype)}, {host.name}"
    try:
        _rows(bench, host, work, op, size, dtype)
    except FerruleError as error:
        bench.fail(f"{named}: {error}")
    except Exception as error:  # of what is measured beside
        bench.fail(f"{named}: {said(error)}")


def _rows(bench: Bench, host: Any, work: Work, op: Any, size: tuple[int, ...], dtype: str) -> None:
    arrays = [host.array(a, dtype, seed) for seed, a in enumerate(work.arrays(*size))]
    one = host.call(partial(work.ours, op), arrays, work)
    moved = sum(array.nbytes for array in [*arrays, *_results(one())])
    count = clocks.copies(moved) if bench.device == "cuda" and host.name == "torch" else 1
    count = min(count, 2) if bench.quick else count  # of small arrays many thousands
    sets = [arrays, *([a.clone() for a in arrays] for _ in range(count - 1))]

    def turns(function: Callable[..., Any], sets: Sequence[Sequence[Any]]) -> Call:
        calls = [host.call(function, given, work) for given in sets]
        return clocks.Turns(calls) if bench.device == "cuda" and host.name == "torch" else calls[0]

    def peer(other: Other) -> Peer:
        """A peer, and its own arrays, which are let go after its row."""
        function = host.compiled(other.function, bench) if other.compiled else other.function
        given = sets if other.given is None else [other.given(*arrays) for arrays in sets]
        wanted = ("backward" if work.backward else "forward") in work.wanted
        target = other.target if wanted and other.on in ("", bench.device) else None
        compared = other.compared and not (other.coarse and work.backward and dtype != "float32")
        return Peer(other.name, turns(function, given), target, compared)

    title = f"{work.named(size, dtype)}, {host.name}"
    compare = partial(
        bench.compare, title, turns(partial(work.ours, op), sets),
        tolerance=1e-3 if dtype == "float32" else HALF, moved=moved if work.bound else 0,
    )  # fmt: skip
    with bench.timed(*host.timers(bench, work)):
        for other in host.peers(work):
            if other.fits is not None and not other.fits(arrays):
                continue
            if other.compiled and not compiled_too(bench, host, other):
                continue
            try:
                made = peer(other)
            except Exception as error:
                bench.leave_out(f"{title}: {other.name} failed and is left out: {said(error)}")
                continue
            compare([made])
        if work.bound and host.name == "torch":
            from . import on_torch

            copied = clocks.Turns([on_torch.copy(a, moved) for a in sets])
            target = on_torch.AS_COPY if bench.device == "cuda" else None
            compare([Peer("copy_ of as many bytes", copied, target, compared=False)])


def compiled_too(bench: Bench, host: Any, other: Other) -> bool:
    """Whether there are time and means for a peer that is compiled; where not, that is said."""
    if bench.quick:
        bench.leave_out(f"quick: no row waits for {other.name}")
        return False
    return bench.device == "cpu" or host.name != "torch" or bench.installed("triton")


def _results(result: Any) -> Sequence[Any]:
    return result if isinstance(result, (list, tuple)) else [result]


def groups(device: str) -> dict[str, Callable[[Bench], None]]:
    """A group per op: ``"ops rms_norm"``."""
    return {f"ops {w.op}": partial(measure, w.op, device) for w in WORKS}
