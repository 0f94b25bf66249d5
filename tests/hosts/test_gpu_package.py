"""Packages for NVIDIA GPUs: in ferrule, in Python without it, and in C++ without Python.

What their libraries send for CUDA units is tested without a GPU in `test_package_cuda`.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cuda_ops
import ferrule

torch = pytest.importorskip("torch")
from package_library import Library  # noqa: E402
from torch_cpp import run_built, start_build  # noqa: E402
from torch_cuda import ON_GPU  # noqa: E402

pytestmark = [
    *ON_GPU,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # what torch warns of is its own
]

SIZES = (1, 2, 7, 300)

LOADED = """
    import ctypes, sys, tempfile, zipfile
    import torch
    with zipfile.ZipFile(sys.argv[1]) as archive, tempfile.TemporaryDirectory() as folder:
        for name in archive.namelist():
            if "/data/ferrule/" in name:
                ctypes.CDLL(archive.extract(name, folder), mode=ctypes.RTLD_GLOBAL)
    model = torch._inductor.aoti_load_package(sys.argv[1])
    for n in (1, 2, 7, 300):
        x = torch.sin(torch.arange(n * 32, dtype=torch.float32)).reshape(n, 32).cuda()
"""  # and called with `x`
PYTHON = (
    LOADED
    + """\
        print(*map("{:.9g}".format, model(x).flatten().tolist()), end=" ")
    assert "ferrule" not in sys.modules
"""
)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A package of a model, and what the model gives."""
    from test_torch_model import Model, batch

    model = Model().cuda()
    with torch.no_grad():
        expected = torch.cat([model(batch(n).cuda()).flatten() for n in SIZES])
        shapes = ({0: torch.export.Dim("B", min=1, max=4096)},)
        program = torch.export.export(model, (batch(3).cuda(),), dynamic_shapes=shapes)
    path = tmp_path_factory.mktemp("package") / "model.pt2"
    ferrule.package(program, path)
    return path, expected.cpu()


def close(printed: str, expected: Any) -> None:
    found = torch.tensor([*map(float, printed.split())])
    # The model's own linear layers run a Python function; the package has the kernel.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_in_ferrule(package: Any) -> None:
    from test_torch_model import batch

    path, expected = package
    model = ferrule.load_package(path)
    found = torch.cat([model(batch(n).cuda()).flatten() for n in SIZES])
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        again = model(batch(7).cuda()).flatten()
    stream.synchronize()
    torch.testing.assert_close(again.cpu(), model(batch(7).cuda()).flatten().cpu())


def test_in_python_without_ferrule(package: Any) -> None:
    path, expected = package
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PYTHON), str(path)],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    close(done.stdout, expected)


def test_in_cpp(package: Any, tmp_path: Path) -> None:
    path, expected = package
    cuda = ("-ltorch_cuda", "-lc10_cuda")
    libraries = ("-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", *cuda)
    building = start_build(tmp_path, libraries)
    if building is None:
        pytest.skip("there is no g++")
    from test_torch_model import batch

    inputs = [batch(n) for n in SIZES]
    found = run_built(building, tmp_path, path, inputs, device="cuda", timeout=280)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_made_for_a_gpu_by_export_for(tmp_path: Path) -> None:
    from test_torch_model import Model, batch

    model = Model()
    shapes = ({0: torch.export.Dim("B", min=1, max=4096)},)
    program = ferrule.export_for("cuda", model, (batch(3),), dynamic_shapes=shapes)
    saved = tmp_path / "saved.pt2"
    ferrule.save(program, saved)
    loaded = ferrule.load(saved).module(check_guards=False).cuda()
    with torch.no_grad():
        expected = Model().cuda()(batch(5).cuda())
        torch.testing.assert_close(loaded(batch(5).cuda()), expected, rtol=1e-4, atol=1e-5)


# -- CUDA units, and what is written in place ------------------------------------------------------

PIECES, ADDED, HALVES = cuda_ops.pieces(), cuda_ops.added(), cuda_ops.halves()
REDUCTION, ROTATION, REVERSAL = cuda_ops.reduction(), cuda_ops.rotation(), cuda_ops.reversal()
CHOSEN, COUNTS = cuda_ops.chosen(), cuda_ops.counts()


def fresh(number: int) -> ferrule.Op:
    """An op that nothing has loaded before: ``2 * (x.flip(0) + number)``, in two steps."""
    source = """
    __global__ void first(const float* x, float* t, int n) {
      extern __shared__ float tile[];
      for (int i = threadIdx.x; i < n; i += blockDim.x) tile[i] = x[i];
      __syncthreads();
      for (int i = threadIdx.x; i < n; i += blockDim.x) t[i] = tile[n - 1 - i] + NUMBER;
    }
    __global__ void second(const float* t, float* y, int n) {
      const int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i < n) y[i] += 2 * t[i];
    }"""
    first = ferrule.cuda_step("first", ["x", "t", "N"], blocks=1, block=256, shared_memory="4*N")
    second = ferrule.cuda_step("second", ["t", "y", "N"], blocks="ceildiv(N,256)", block=256)
    unit = ferrule.cuda_unit(
        source, template={"NUMBER": number}, scratch={"t": "float32[N]"},
        steps=[ferrule.cuda_fill("y"), first, second],
    )  # fmt: skip
    return ferrule.op("fresh", "x[N]:float32 -> y[N]:float32", cuda=unit)


FRESH = [fresh(number) for number in (3, 4)]


@pytest.fixture(scope="module")
def units() -> Library:
    """The library of a package with all of them, without AOTInductor."""
    ints = torch.ones(3, dtype=torch.int32)
    given: dict[ferrule.Op, tuple[Any, ...]] = {
        PIECES: (torch.ones(4, 3), None, torch.ones(4), 1.0, 1.0, 1.0, 1, True),
        ADDED: (torch.ones(3, 4), torch.ones(3, 4)), HALVES: (torch.ones(4), 1.0, 1.0),
        REDUCTION: (torch.ones(4, 5),), REVERSAL: (torch.ones(3, 4),),
        CHOSEN: (torch.ones(5), 1.0), COUNTS: (ints, ints.clone()),
        **{one: (torch.ones(5),) for one in FRESH},
    }  # fmt: skip
    if has_clusters():
        given[ROTATION] = (torch.ones(3, 4, 5),)
    return Library(given)


def random(*shape: int) -> Any:
    return torch.randn(*shape, device="cuda")


def has_clusters() -> bool:
    return bool(torch.cuda.get_device_capability() >= (9, 0))


def same(units: Library, op: ferrule.Op, *values: Any) -> None:
    """Fails unless an op and its twin in the library return and write the same."""
    twins = copy.deepcopy(values)  # strides and all
    expected, found = op(*values), units(op, *twins)
    for one in (expected, found), (values, twins):
        torch.testing.assert_close(one[1], one[0], rtol=0, atol=0)


def test_units_do_what_they_do_eagerly(units: Library) -> None:
    for shape in ((1, 1), (3, 5), (700, 1000), (0, 7)):
        same(units, REDUCTION, random(*shape))
        same(units, REDUCTION, random(*shape).t())
        same(units, ADDED, random(*shape), random(*shape))
        same(units, ADDED, random(shape[0], 2 * shape[1])[:, ::2], random(*shape[::-1]).t())
    for n in (1, 16, 17, 1000, 1001, 5):
        same(units, CHOSEN, random(n), 0.5)
        same(units, HALVES, random(n), 0.1, -3.3)
        same(units, REVERSAL, random(3, n))
    x = torch.randint(0, 7, (100_000,), device="cuda", dtype=torch.int32)
    before = torch.arange(7, device="cuda", dtype=torch.int32)
    same(units, COUNTS, x, before)
    same(units, COUNTS, x[:0], before)


def test_all_that_steps_can_say(units: Library) -> None:
    if not has_clusters():
        with pytest.raises(RuntimeError, match="has no clusters"):
            units(PIECES, random(4, 4), None, random(4), 0.5, 2.0, -1.5, -7, True)
        pytest.skip("the GPU has no clusters")
    for size in (1, 2, 4, 8):
        same(units, ROTATION, random(5, size, 256))
    for n, d in ((4, 4), (3, 8), (5, 1), (2, 9), (0, 3), (3, 0)):
        numbers = 0.1, 2049.0, -3.14159, -(2**40), bool(n % 2)
        same(units, PIECES, random(n, d), None, random(n), *numbers)
    *_, seen = units(PIECES, random(4, 4), None, random(4), 0.5, 2.0, -1.5, -7, True)
    assert seen.tolist() == [0.5, 2, -1.5, -7, 1, 4, 1, 112, 54]


def test_shared_memory_up_to_the_limit(units: Library) -> None:
    most = torch.cuda.get_device_properties(0).shared_memory_per_block_optin // 4
    for n in (10, 12 * 1024, 12 * 1024 + 1, most - 1, most, 100):
        x = random(3, n)
        assert torch.equal(units(REVERSAL, x), x.flip(1))
    with pytest.raises(RuntimeError, match=f"has {4 * most} at most"):
        units(REVERSAL, random(1, most + 1))


def test_what_is_read_was_there_before(units: Library) -> None:
    c = random(3, 5)
    expected = 2 * c
    units(ADDED, c, c)
    torch.testing.assert_close(c, expected, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="many elements in one place"):
        units(ADDED, random(3, 1).expand(3, 5), random(3, 5))


@pytest.mark.parametrize("calls_before", [0, 1])
def test_cuda_graphs(units: Library, calls_before: int) -> None:
    """Loads what it launches while the graph is recorded, where nothing was called before."""
    op, number, x = FRESH[calls_before], 3 + calls_before, random(20_000)
    for _ in range(calls_before):
        units(op, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = units(op, x)
        z = units(op, x * 2)
    for _ in range(3):
        x.normal_()
        y.fill_(float("nan"))
        torch.full((1 << 20,), float("nan"), device="cuda")  # where scratch may have been
        graph.replay()
        torch.testing.assert_close(y, 2 * (x.flip(0) + number))
        torch.testing.assert_close(z, 2 * (2 * x.flip(0) + number))


def test_scratch_goes_back_and_streams_are_the_callers(units: Library) -> None:
    x = torch.ones(1 << 20, device="cuda")
    units(REDUCTION, x.view(1024, -1))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(100):
        units(REDUCTION, x.view(1024, -1))
    assert torch.cuda.memory_allocated() == before
    streams = [torch.cuda.Stream() for _ in range(3)]
    found = []
    torch.cuda.synchronize()
    for n in range(30):
        with torch.cuda.stream(streams[n % 3]):
            torch.cuda._sleep(1_000_000)
            value = torch.full((50, 100 + n), float(n), device="cuda")
            found.append((n, units(REDUCTION, value)))
    torch.cuda.synchronize()
    for n, y in found:
        assert float(y) == n * 50 * (100 + n)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_two_gpus(units: Library) -> None:
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        assert float(units(REDUCTION, torch.ones(4, 1000, device=device))) == 4000
        x = torch.randn(2, 20_000, device=device)
        assert torch.equal(units(REVERSAL, x), x.flip(1)) and torch.cuda.current_device() == 0


class Units(torch.nn.Module):
    """Units, numbers of 16 bits, and a buffer that is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 8))

    def forward(self, x: Any, row: Any) -> Any:
        before = ADDED(self.cache, row)
        rows = REVERSAL(x)
        flat = rows.reshape(-1)
        return (
            before,
            self.cache * 2,
            rows + REDUCTION(rows * 2),
            CHOSEN(flat, 0.5) + HALVES(flat, 0.1, 3.0),
        )


def calls(model: Callable[..., Any]) -> Any:
    """What a model gives for a few sizes, one after the other."""
    found = []
    for n in (1, 2, 7, 300):
        x = torch.sin(torch.arange(n * 32, dtype=torch.float32)).reshape(n, 32).cuda()
        row = torch.cos(torch.arange(32, dtype=torch.float32) + n).reshape(4, 8).cuda()
        found += [one.flatten() for one in model(x, row)]
    return torch.cat(found).cpu()


WITHOUT = (
    LOADED
    + """\
        row = torch.cos(torch.arange(32, dtype=torch.float32) + n).reshape(4, 8).cuda()
        for one in model(x, row):
            print(*map("{:.9g}".format, one.flatten().tolist()), end=" ")
    assert "ferrule" not in sys.modules
"""
)


@pytest.mark.parametrize("decomposed", [False, True])
def test_a_package_of_units(tmp_path: Path, decomposed: bool) -> None:
    path, model = tmp_path / "units.pt2", Units().cuda()
    with torch.no_grad():
        expected = calls(copy.deepcopy(model))
        inputs = random(3, 32), random(4, 8)
        shapes = ({0: torch.export.Dim("B", min=1, max=4096)}, None)
        program = torch.export.export(model, inputs, dynamic_shapes=shapes)
        if decomposed:
            program = program.run_decompositions()
    first = torch.ops.higher_order.auto_functionalized
    if any(node.target is first for node in program.graph.nodes):
        pytest.skip("this torch leaves what is refused")
    ferrule.package(program, path)
    torch.testing.assert_close(calls(ferrule.load_package(path)), expected, rtol=1e-4, atol=1e-3)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WITHOUT), str(path)],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = torch.tensor([*map(float, done.stdout.split())])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
