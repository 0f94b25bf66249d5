"""``ferrule bench ops``: the table of works, and every peer's results. No times."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import ferrule.ops
import on_cuda
from ferrule_bench import command, ready, report
from ferrule_bench.clocks import Turns
from ferrule_bench.ready import on_torch, works
from ferrule_bench.ready.on_numpy import rope_tables
from ferrule_bench.timing import Bench
from test_bench import run, silent
from test_bench_clocks import Gpu

NAMES = list(dict.fromkeys(work.op for work in works.WORKS))


def rope(x: torch.Tensor, dims: int) -> torch.Tensor:
    """In complex numbers: the halves of a vector are its real and its imaginary parts."""
    cos, sin = (torch.from_numpy(t) for t in rope_tables(x))
    turned = torch.complex(*x.float().chunk(2, -1)) * torch.complex(cos, sin)
    return torch.cat([turned.real, turned.imag], -1).to(x.dtype)


def rms_norm(x: torch.Tensor, w: torch.Tensor, eps: float, residual: Any = None) -> Any:
    if residual is None:
        return x * w / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return rms_norm(x + residual, w, eps), x + residual


def segment_sum(x: torch.Tensor, ids: torch.Tensor, n: int) -> torch.Tensor:
    return F.one_hot(ids.long(), n).T.to(x.dtype) @ x


def grid_sample(
    x: torch.Tensor, grid: torch.Tensor, mode: str = "bilinear", layout: str = "NHWC"
) -> torch.Tensor:
    if layout == "NCHW":
        return F.grid_sample(x, grid, mode, align_corners=False)
    return grid_sample(x.movedim(-1, 1), grid, mode, "NCHW").movedim(1, -1)


IN_TORCH: dict[str, Callable[..., Any]] = {
    "rms_norm": rms_norm,
    "layer_norm": lambda x, w, b, eps: F.layer_norm(x, x.shape[-1:], w, b, eps),
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "rope": rope,
    "topk": lambda x, k: tuple(y[:, :k] for y in x.sort(-1, descending=True)),
    "histogram": lambda x, bins, low, high: torch.histogram(x, bins, range=(low, high))[0],
    "segment_sum": segment_sum,
    "matmul": lambda a, b: torch.einsum("mk,kn->mn", a, b),
    "grid_sample": grid_sample,
}


def stand_in(name: str) -> Callable[..., Any]:
    """An op of all hosts, made of torch's functions, for a table whose ops are others' work."""
    function = IN_TORCH[name]

    def call(*given: Any, **more: Any) -> Any:
        if any(isinstance(a, torch.Tensor) for a in given):
            return function(*given, **more)
        names = [name for name in more if name == "residual"]
        numbers = [a for a in given if isinstance(a, (int, float))]
        arrays = [*given[: len(given) - len(numbers)], *(more.pop(name) for name in names)]

        def of_arrays(*arrays: torch.Tensor) -> Any:
            count = len(arrays) - len(names)
            named = dict(zip(names, arrays[count:], strict=True))
            return function(*arrays[:count], *numbers, **named, **more)

        if isinstance(arrays[0], mx.array):
            return in_mlx(of_arrays)(*arrays)
        out = of_arrays(*map(torch.from_numpy, arrays))
        return [o.numpy() for o in out] if isinstance(out, tuple) else out.numpy()

    return call


def in_mlx(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch's as one of MLX's, with its derivative."""

    def seen(a: mx.array) -> torch.Tensor:
        return torch.from_numpy(np.array(a))

    @mx.custom_function
    def call(*arrays: mx.array) -> Any:
        out = function(*map(seen, arrays))
        out = (
            [mx.array(o.numpy()) for o in out] if isinstance(out, tuple) else mx.array(out.numpy())
        )
        return out

    @call.vjp
    def call_vjp(primals: Any, cotangent: mx.array, _: Any) -> Any:
        primals = primals if isinstance(primals, tuple) else (primals,)
        leaves = [seen(p).requires_grad_() for p in primals]
        grads = torch.autograd.grad(function(*leaves), leaves, seen(cotangent))
        return tuple(mx.array(g.numpy()) for g in grads)

    return call


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in IN_TORCH:
        monkeypatch.setattr(ferrule.ops, name, stand_in(name), raising=False)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", NAMES)
def test_every_peer_gives_the_same_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that are compiled, uncompiled."""
    monkeypatch.setattr("ferrule_bench.ready.on_torch.Torch.compiled", lambda host, f, bench: f)
    monkeypatch.setattr("ferrule_bench.ready.on_mlx.Mlx.compiled", lambda host, f, bench: f)
    monkeypatch.setattr(Bench, "leave_out", lambda bench, why: pytest.fail(why))
    monkeypatch.setattr(ready, "compiled_too", lambda *_: True)
    bench = silent()
    ready.measure(name, "cpu", bench)
    assert not bench.failed, bench.failed
    assert not (wrong := [report.line(r) for r in bench.rows if not r.right]), wrong
    found = {(row.work, row.peer) for row in bench.rows}
    assert len(found) == len(bench.rows)
    for work in works.WORKS:
        if work.op == name:
            title = work.named(work.sizes["quick"][0], "float32")
            with ready.hosts(bench, "cpu") as hosts:
                for host in hosts:
                    for peer in host.peers(work):
                        for_gpus = peer.fits is not None
                        assert ((f"{title}, {host.name}", peer.name) in found) is not for_gpus
    bounds = [row for row in bench.rows if row.peer == "copy_ of as many bytes"]
    assert all(row.moved and row.work.endswith("torch") for row in bounds)
    assert len(bounds) == sum(work.op == name and work.bound for work in works.WORKS)


def test_every_work_has_peers() -> None:
    """On each host, but for derivatives in NumPy, and for samples that torch alone takes."""
    with ready.hosts(silent(), "cpu") as hosts:
        assert [host.name for host in hosts] == ["NumPy", "torch", "MLX"]
        for work in works.WORKS:
            of_torch = work.peers.partition(" ")[2] in ("bicubic", "nearest", "of volumes")
            first = 1 if work.backward or "NCHW" in work.title or of_torch else 0
            for host in hosts[first : 2 if of_torch else 3]:
                assert host.peers(work), (work.title, host.name)
    assert set(NAMES) == set(IN_TORCH)


@pytest.mark.parametrize(("quick", "copies"), [(False, 7), (True, 2)])  # 7 have 43,008 bytes
def test_copies_of_a_cold_row(
    stand_ins: None, monkeypatch: pytest.MonkeyPatch, quick: bool, copies: int
) -> None:
    """On a GPU small arrays have as many copies as outgrow the cache, for ours and for the peer;
    two where nothing is measured."""
    bench = silent()
    bench.device, bench.quick = "cuda", quick
    monkeypatch.setattr(ready, "compiled_too", lambda *_: False)
    monkeypatch.setattr("ferrule_bench.clocks.l2_size", lambda: 10000)
    monkeypatch.setattr(bench, "timed", lambda *_: silent().timed())
    monkeypatch.setattr("ferrule_bench.ready.on_torch.Torch.timers", lambda *_: ())
    seen: dict[str, list[Any]] = {}

    def compare(work: str, ours: Any, peers: Any, tolerance: float, moved: int) -> None:
        seen[peers[0].name] = [ours, peers[0].call, peers[0].target, moved]

    monkeypatch.setattr(bench, "compare", compare)
    work = next(work for work in works.WORKS if work.op == "softmax")
    host: Any = on_torch.Torch("cpu")
    ready._rows(bench, host, work, ferrule.ops.softmax, (8, 96), "float32")
    assert list(seen) == ["F.softmax", "copy_ of as many bytes"]
    for ours, theirs, _, moved in seen.values():
        assert moved == 2 * 8 * 96 * 4
        assert isinstance(ours, Turns) and isinstance(theirs, Turns)
        assert len(ours.calls) == len(theirs.calls) == copies
        places = {call.args[-1].data_ptr() for call in ours.calls}
        assert len(places) == copies
    target = seen["copy_ of as many bytes"][2]
    assert target == pytest.approx(1 / 1.05) and seen["F.softmax"][2] is None


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", ["rms_norm", "segment_sum", "grid_sample"])
def test_rows_of_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each of its dtypes, with a GPU that only counts: derivatives are not captured."""
    gpu = Gpu()
    gpu.tick = 1e-6  # torch's functions on the CPU launch nothing
    gpu.install(monkeypatch)
    monkeypatch.setattr("ferrule_bench.clocks.l2_size", lambda: 10000)
    monkeypatch.setattr(ready, "compiled_too", lambda *_: False)
    host = on_torch.Torch("cpu")
    monkeypatch.setattr(ready, "hosts", lambda *_: contextlib.nullcontext([host]))
    bench = silent()
    bench.device = "cuda"
    ready.measure(name, "cuda", bench)
    assert not bench.failed and not bench.left_out, (bench.failed, bench.left_out)
    assert all(row.right for row in bench.rows), [report.line(row) for row in bench.rows]
    back = [row for row in bench.rows if "backward" in row.work]
    assert {row.mode for row in back} <= {"cold"} and (back or name == "segment_sum")
    assert {row.mode for row in bench.rows if row not in back} == {"cold-graph"}
    for work in works.WORKS:
        if work.op == name:
            for dtype in work.dtypes["cuda"]:
                title = f"{work.named(work.sizes['quick'][0], dtype)}, torch"
                rows = [row for row in bench.rows if row.work == title]
                assert rows and all((row.moved > 0) == work.bound for row in rows)
                coarse = [r for r in rows if r.error is None and r.peer.startswith("F.")]
                assert bool(coarse) == (
                    work.backward and dtype != "float32" and name == "grid_sample"
                )
    assert len(gpu.captured) == 2 * (len(bench.rows) - len(back))


# -- the command -----------------------------------------------------------------------------------


def test_ops_that_are_not_there_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delattr(ferrule.ops, name, raising=False)
    done = run("ops", "--quick", "--device", "cpu", "--json", "-")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["left out"] == [
        f"ferrule.ops has no {name}: its rows are left out" for name in NAMES
    ]
    assert found["rows"] == [] and done.stderr.count("its rows are left out") == len(NAMES)


@pytest.mark.usefixtures("stand_ins")
def test_ops_that_are_there() -> None:
    done = run("ops", "--only", "SOFTMAX", "--quick", "--device", "cpu", "--json", "-")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert {row["group"] for row in rows} == {"ops softmax", "ops log_softmax"}
    assert [row["work"] for row in rows[:2]] == [
        "softmax, (8, 96) float32, NumPy", "softmax, (8, 96) float32, torch",
    ]  # fmt: skip
    assert all(row["mode"] == "wall" and row["right"] for row in rows)
    assert "quick: no row waits for torch.compile" in done.stderr


def test_an_op_that_fails_or_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(x: Any) -> Any:
        raise ferrule.DeviceError("no such device.")

    monkeypatch.setattr(ferrule.ops, "softmax", fails, raising=False)
    monkeypatch.setattr(ferrule.ops, "log_softmax", lambda x: x, raising=False)
    done = run("ops", "--only", "softmax", "--quick", "--device", "cpu")
    assert done.exit_code == 1
    assert "FAILED: softmax, (8, 96) float32, NumPy: no such device." in done.output
    assert "FAILED: softmax backward, (8, 96) float32, MLX: no such device." in done.output
    assert "log_softmax, (8, 96) float32, torch" in done.output
    assert "WRONG: the results differ by" in done.output


def test_groups_by_their_first_word() -> None:
    done = run("opsy", "--device", "cpu")
    assert done.exit_code == 2 and "'opsy' is not the first word of a group of cpu" in done.output
    done = run("ops", "--only", "copy", "--device", "cpu")
    assert done.exit_code == 2 and "no group of cpu of ops is called so" in done.output
    chosen = command._chosen(silent(), "cpu", ["ops", "copy"], "op")
    assert {name for _, name, _ in chosen} == {"copy"} | {f"ops {name}" for name in NAMES}


@pytest.mark.gpu
@pytest.mark.skipif(not on_cuda.available(), reason="there is no GPU")
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu(name: str) -> None:
    done = run("ops", "--only", f"ops {name}", "--quick", "--device", "cuda", "--json", "-")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert any(row["mode"] == "cold-graph" for row in rows)
