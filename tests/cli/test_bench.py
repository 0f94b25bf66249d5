"""``ferrule bench``: its rows, its table, JSON and plot, and the kernels by hand. No times."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image

import ferrule
import on_cuda
from fake_cuda import FakeCuda, build
from ferrule.cli import main
from ferrule.tools import driver, nvdisasm, nvrtc
from ferrule_bench import cpu, cuda, report, sass, startup, timing, twins
from ferrule_bench.ready import by_hand
from ferrule_bench.timing import Bench, Peer, Row


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, arguments)], catch_exceptions=False)


def row(**given: Any) -> Row:
    start = {"group": "exp", "device": "cuda", "work": "exp", "peer": "torch", "ours": 2e-3}
    return Row(**{**start, "theirs": 3e-3, "ratio": 1.5, **given})


def silent() -> Bench:
    bench = Bench(lambda row: None, lambda text: None)
    bench.quick, bench.rounds = True, 1
    return bench


# -- the command -----------------------------------------------------------------------------------


def test_rows_as_json() -> None:
    done = run("--quick", "--device", "cpu", "--only", "exp", "--json", "-")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["quick"] and not found["left out"] and not found["failed"]
    assert found["machine"]["versions"]["torch"] and found["machine"]["cpu"]
    rows = found["rows"]
    assert [(r["group"], r["device"], r["work"], r["peer"]) for r in rows] == [
        ("exp", "cpu", "exp, 4096 float32", "NumPy"), ("exp", "cpu", "exp, 4096 float32", "torch"),
    ]  # fmt: skip
    for r in rows:
        assert r["ours"] > 0 and r["theirs"] > 0 and r["ratio"] > 0 and r["rounds"] == 3
        assert r["unit"] == "s" and r["target"] is None and r["reached"] is None
        assert r["right"] and r["error"] <= r["tolerance"]
    # The table is for readers, and went elsewhere.
    assert "peer/ferrule" in done.stderr and "exp, 4096 float32" in done.stderr


def test_plot_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    png, text = tmp_path / "b.png", tmp_path / "b.json"
    done = run("--quick", "--device", "cpu", "--only", "copy", "--json", text)
    assert done.exit_code == 0, done.output
    assert "copy, 4096 float32" in done.stdout
    assert len(json.loads(text.read_text())["rows"]) == 2
    done = run("--quick", "--device", "cpu", "--only", "copy", "--plot", png)
    assert done.exit_code == 2 and "--quick measures none" in done.output and not png.exists()
    rows = [row(work="copy", ratio=1.5), row(work="exp", ratio=0.7)]
    monkeypatch.setattr("ferrule_bench.command._measure", lambda bench, *_: bench.rows.extend(rows))
    done = run("--device", "cpu", "--only", "copy", "--plot", png)
    assert done.exit_code == 0 and f"Wrote {png}" in done.stdout, done.output
    with Image.open(png) as image:
        assert image.format == "PNG" and image.width > 1000


def test_a_missing_peer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    done = run("grid_sample", "--quick", "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert done.output.count("torch not installed: its rows are left out") == 1
    assert done.output.count("NumPy, op by op") == 2 and "F.grid_sample" not in done.output


def test_wrong_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, said in (
        (["--only", "expp"], "no group of cpu is called so: copy, exp, tanh"),
        (["--json", tmp_path / "no" / "b.json"], "there is no folder"),
        (["--device", "metal"], "'metal' is not one of 'cpu', 'cuda'"),
        (["--threads", "0"], "0 is not in the range"),
    ):
        done = run("--device", "cpu", *arguments)
        assert done.exit_code == 2 and said in done.output, done.output
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = run("--plot", "b.png")
    assert done.exit_code == 2 and "pip install 'ferrule[demo]'" in done.output


def test_without_a_gpu(library: nvrtc.Nvrtc, monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs none is measured."""
    if nvdisasm.find_nvdisasm() is None:
        pytest.skip("nvdisasm is not installed")

    def missing() -> None:
        raise ferrule.DeviceError("NVIDIA's driver was not found (libcuda.so). Install it.")

    monkeypatch.setattr(driver, "driver", missing)
    monkeypatch.setattr(report, "driver", missing)
    done = run("--device", "cuda", "--json", "-")
    assert done.exit_code == 0, done.output
    assert "NVIDIA's driver was not found (libcuda.so): of NVIDIA's GPUs, only" in done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [r["work"].split(",")[0] for r in rows] == list(sass.TWINS)
    assert all(r["reached"] and r["unit"] == "instructions" for r in rows)


def test_wrong_results_end_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cpu.ELEMENTWISE, "copy", "inp[i] + 1.0f")
    done = run("--quick", "--device", "cpu", "--only", "copy")
    assert done.exit_code == 1
    assert done.output.count("WRONG: the results differ by") == 2


def test_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cpu.ELEMENTWISE, "exp", "nothing[i]")
    done = run("--quick", "--device", "cpu", "--only", "exp")
    assert done.exit_code == 1 and "FAILED: exp on cpu: kernel 'bench_exp' does not" in done.output


# -- measuring -------------------------------------------------------------------------------------


def test_a_peer_that_fails_is_left_out() -> None:
    bench = silent()

    def fails() -> object:
        raise ValueError("no compiler\nat all")

    same = np.ones(3)
    bench.compare("work", lambda: same, [Peer("a", fails), Peer("b", lambda: same, 0.5)])
    assert bench.left_out == ["work: a failed and is left out: ValueError: no compiler"]
    assert [(r.peer, r.target, r.error) for r in bench.rows] == [("b", None, 0.0)]
    bench.quick = False
    bench.compare("work", lambda: same, [Peer("b", lambda: same, 1e9)])
    assert bench.rows[-1].target == 1e9 and bench.rows[-1].reached is False
    with pytest.raises(ValueError, match="no compiler"):
        bench.compare("work", fails, [Peer("b", lambda: same)])


def test_differences() -> None:
    a = np.array([1.0, 2.0, 3.0])
    assert timing.difference(a, [a.copy()]) == 0
    assert timing.difference([a, a], (a, a + np.array([0, 0, 0.6]))) == pytest.approx(0.6 / 6.6)
    assert np.isnan(timing.difference([a * np.nan, a], [a, a]))
    assert timing.difference(torch.tensor(a), a) == timing.difference(torch.tensor(a), [a]) == 0
    bf16 = torch.tensor(a).bfloat16()
    assert timing.difference(bf16, torch.tensor(a).requires_grad_()) == 0
    assert not row(error=float("nan"), tolerance=1.0).right


def test_lines() -> None:
    plain = report.line(row())
    assert re.fullmatch(r"exp +torch +2\.00 ms +3\.00 ms +1\.500", plain)
    assert report.line(row(target=1.5)).endswith("1.500  wanted >= 1.5: reached")
    assert report.line(row(target=0.95, ratio=0.94)).endswith("0.940  wanted >= 0.95: MISSED")
    assert report.line(row(moved=4 << 20)).endswith("1.500  (2 GB/s)")
    assert report.line(row(error=0.5, tolerance=1e-3)).endswith(
        "WRONG: the results differ by 5.0e-01; at most 1e-03 is right"
    )
    assert len(report.heading()) == len(plain)
    given = ((3.7e-6, "3.70 µs"), (0.0123, "12.3 ms"), (0.35, "350 ms"), (12, "12.0 s"))
    assert [report.amount(value, "s") for value, _ in given] == [said for _, said in given]
    assert report.amount(34.0, "instructions") == "34"
    rows = [row(), row(target=1.0), row(target=2.0)]
    assert report.summary(rows) == "1 of 2 targets reached" and report.summary(rows[:1]) == ""


def test_startup_of_a_process(tmp_path: Path) -> None:
    """What the new processes run."""
    kept = startup.loader.load_library
    try:
        found = startup.child("cpu", str(tmp_path), ["exp"])
    finally:
        startup.loader.load_library = kept
        startup.cache.set_default(None)
    assert list(found) == ["exp"] and all(seconds > 0 for seconds in found["exp"])


# -- the kernels by hand ---------------------------------------------------------------------------

KERNELS_BY_HAND = {**twins.ALL, "words": by_hand.FORWARD, "words' VJP": by_hand.BACKWARD}


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", KERNELS_BY_HAND)
def test_kernels_by_hand_compile(library: nvrtc.Nvrtc, name: str, half: bool) -> None:
    image = twins.compiled(KERNELS_BY_HAND[name], "sm_90", half=half)
    assert image.startswith(b"\x7fELF")


_AS_METAL = """
#define blockIdx threadgroup_position_in_grid
#define blockDim threads_per_threadgroup
#define threadIdx thread_position_in_threadgroup
#define load(p) float(*(p))
#define narrow(v) T(v)
#define floorf metal::floor
#define __expf metal::exp
#define expf metal::exp
#define warp_sum simd_sum
#define __shfl_xor_sync(mask, v, d) simd_shuffle_xor(v, d)
#define add(p, v) atomic_fetch_add_explicit((device atomic<T>*)(p), T(v), memory_order_relaxed)
"""


def on_cpu(text: str, *, half: bool = False) -> Callable[..., None]:
    """A kernel by hand as a Metal body on the CPU, in place of the GPU."""
    given, _, body = text.partition(") {")
    names = [part.split()[-1] for part in given.split(",")]
    body = body.rstrip().removesuffix("}")
    # A Metal body's parameters cannot be moved, so they are copied.
    outputs = [
        name for name, part in zip(names, given.split(","), strict=True)
        if "*" in part and "const" not in part
    ]  # fmt: skip
    copies = ""
    for name, part in zip(names, given.split(","), strict=True):
        kind = "T" if "T*" in part else "float" if "float*" in part else "uchar"
        const = "" if name in outputs else "const "
        if "*" in part:
            copies += f"{const}device {kind}* {name} = in_{name};\n"
        else:
            copies += f"const {'uint' if 'unsigned' in part else 'int'} {name} = in_{name};\n"
    kernel = ferrule.metal_kernel(
        "by_hand", [f"in_{n}" for n in names if n not in outputs], [f"in_{n}" for n in outputs],
        copies + body, header=f"using T = {'half' if half else 'float'};\n{_AS_METAL}",
    )  # fmt: skip

    def launch(arguments: Any, blocks: Any, block: Any) -> None:
        named = dict(zip(names, arguments, strict=True))
        outs = [named[name] for name in outputs]
        made = kernel(
            inputs=[a for n, a in named.items() if n not in outputs],
            grid=[a * b for a, b in zip(blocks, block, strict=True)], threadgroup=block,
            output_shapes=[o.shape for o in outs], output_dtypes=[o.dtype for o in outs],
            init_value=0,
        )  # fmt: skip
        for o, m in zip(outs, made, strict=True):
            o.copy_(m)

    return launch


@pytest.fixture
def gpu_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """The GPU's groups on the CPU: all but CUDA itself."""
    bench = silent()
    monkeypatch.setattr(cuda, "DEVICE", "cpu")
    monkeypatch.setattr(cuda, "by_hand", on_cpu)
    monkeypatch.setattr(cuda, "wait", lambda: None)
    monkeypatch.setattr(cuda, "Graph", lambda calls: calls[0])
    # Triton is for GPUs; torch.compile would take its time.
    monkeypatch.setattr(Bench, "installed", lambda bench, name: name not in ("triton", "cupy"))
    return bench


def sampled(bench: Bench, dtype: Any) -> Any:
    torch.manual_seed(0)
    x, grid = torch.randn(2, 8, 9, 40), torch.rand(2, 3, 5, 2) * 2.4 - 1.2
    return x.to(dtype), grid.to(dtype), torch.randn(2, 3, 5, 40).to(dtype)


@pytest.mark.filterwarnings("ignore::ferrule.PortabilityWarning")  # atomics on half
@pytest.mark.parametrize(
    ("group", "peers"),
    [
        ("copy", 8), ("exp", 8), ("grid_sample", 6), ("grid_sample VJP", 6), ("mlx-lm", 8),
        ("host", 1), ("operators", 4),
    ],
)  # fmt: skip
def test_groups_of_the_gpu(
    gpu_on_cpu: Bench, monkeypatch: pytest.MonkeyPatch, group: str, peers: int
) -> None:
    """Every side gives the same results; kernels by hand are right where they run as Metal."""
    monkeypatch.setattr(cuda, "_sampled", sampled)
    cuda.GROUPS[group](gpu_on_cpu)
    rows = gpu_on_cpu.rows
    assert not gpu_on_cpu.left_out and len(rows) == peers
    assert all(r.right for r in rows), [report.line(r) for r in rows if not r.right]
    by_hand = [r for r in rows if r.peer == cuda.BY_HAND]
    assert all(r.error is not None for r in by_hand) or group == "operators"
    expected = {"mlx-lm": 4, "grid_sample": 2, "grid_sample VJP": 2, "operators": 1}
    assert len(by_hand) == expected.get(group, 0)


def test_four_elements_a_thread_are_one_load(library: nvrtc.Nvrtc) -> None:
    if nvdisasm.find_nvdisasm() is None:
        pytest.skip("nvdisasm is not installed")
    for name, (_, body) in cuda.BODIES.items():
        for dtype, bits in ((ferrule.float32, 128), (ferrule.bfloat16, 64)):
            kernel = ferrule.metal_kernel(f"fours_{name}", ["inp"], ["out"], body)
            binary = kernel.compile(
                "sm_90", inputs=[f"{dtype.name}[4096]"], template=[("T", dtype)],
                output_dtypes=[dtype], grid=(1024, 1, 1), threadgroup=(256, 1, 1),
            )  # fmt: skip
            found = re.findall(r"\b(LDG|STG)\.E\.(\d+)", nvdisasm.disassemble(binary.payload))
            assert found == [("LDG", str(bits)), ("STG", str(bits))]


def test_launches_by_hand(
    library: nvrtc.Nvrtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What reaches the driver."""
    fake = FakeCuda(build(tmp_path))
    fake.texts["twin"] = "twin(const float* fr_a_x, float* fr_a_y, int fr_a_n) {"
    stream = SimpleNamespace(cuda_stream=77)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    x, y = torch.ones(8), torch.ones(8)
    with fake.installed():
        by_hand = twins.Twin(twins.FORWARD, "sm_90")
        by_hand([x, y, 300], (2, 1, 1), (256, 1, 1))
        fake.status = 700
        with pytest.raises(ferrule.DeviceError, match="the kernel by hand"):
            by_hand([x, y, 300], (2, 1, 1), (256, 1, 1))
    sent = fake.launches[0]
    assert (sent.symbol, sent.blocks, sent.threads) == ("twin", (2, 1, 1), (256, 1, 1))
    assert (sent.shared, sent.stream) == (0, 77)
    assert sent.arguments["x"] == x.data_ptr() and sent.arguments["y"] == y.data_ptr()
    assert int.from_bytes(sent.arguments["n"][:4], "little") == 300


@pytest.mark.gpu
@pytest.mark.skipif(not on_cuda.available(), reason="there is no GPU")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch.compile's own
@pytest.mark.filterwarnings("ignore::ferrule.PortabilityWarning")  # grid_sample's atomics on half
@pytest.mark.parametrize("group", ["copy", "exp", "grid_sample", "mlx-lm", "host"])
def test_on_a_gpu(group: str) -> None:
    done = run(group, "--quick", "--device", "cuda", "--json", "-")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["rows"] or "left out" in done.stderr
