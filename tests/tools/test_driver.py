"""Launching on GPUs, against a driver whose GPUs are the host: what is sent, what goes wrong."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

import ferrule
import on_cuda
from fake_cuda import FakeCuda, Filled, Launched
from ferrule import DeviceError
from ferrule.cli import doctor
from ferrule.devices import protocol as devices
from ferrule.dtypes import bfloat16, float32
from ferrule.hosts import numpy as numpy_host
from ferrule.spec import Facts
from ferrule.tools import driver, fastcall, libcuda, nvrtc

F32, I32 = np.dtype(np.float32), np.dtype(np.int32)


@pytest.fixture
def gpu(
    fake_path: Path, library: nvrtc.Nvrtc, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeCuda]:
    """NumPy's arrays are on the GPU ``gpu.device``, whose driver is a fake."""
    fake = FakeCuda(fake_path)
    real = numpy_host.facts
    fake.device = "cuda:0"  # type: ignore[attr-defined]

    def facts(array: Any) -> Facts | None:
        found = real(array)
        return found and found._replace(device=fake.device)  # type: ignore[attr-defined]

    monkeypatch.setattr(numpy_host, "facts", facts)
    with fastcall.bypassed(), fake.installed():
        yield fake


def call(kernel: Any, *inputs: Any, n: int = 64, **more: Any) -> Any:
    given: dict[str, Any] = {
        "inputs": list(inputs), "output_shapes": [(n,)], "output_dtypes": [F32],
        "grid": (n, 1, 1), "threadgroup": (32, 1, 1),
    }  # fmt: skip
    return kernel(**{**given, **more})[0]


def text(kernel: Any, inputs: list[Any], outputs: list[Any] | None = None, **more: Any) -> str:
    made: str = kernel.text("cuda", inputs=inputs, output_dtypes=outputs or [F32], **more)
    return made


def write(address: int, values: Any) -> None:
    ctypes.memmove(address, values.ctypes.data, values.nbytes)


def double(name: str = "double", **more: Any) -> Any:
    source = "uint i = thread_position_in_grid.x; y[i] = 2 * x[i];"
    return ferrule.metal_kernel(name, ["x"], ["y"], source, **more)


def test_registers_of_ptx_are_limited_by_the_driver_where_they_must_be(gpu: FakeCuda) -> None:
    found = driver.driver()
    for image, most, registers, expected, limit in (
        (b".version 8.0\0", 1024, 64, 1024, 0),
        (b".version 8.0\0", 640, 0, 640, 0),
        (b".version 8.0\0", 640, 64, 1024, 64),
        (b".version 8.0\0", 448, 128, 512, 128),
        (b"\x7fELF", 640, 64, 640, 0),  # a cubin has the registers that it was compiled for
    ):
        gpu.set(most=most)
        assert found.load(0, image, "k", 0, registers).most_threads == expected
        assert gpu.library.fake_limit() == limit


def test_a_call_from_end_to_end(gpu: FakeCuda) -> None:
    kernel, x = double(), np.arange(64, dtype=F32)
    gpu.texts["ferrule_double"] = text(kernel, [x])

    def run(one: Launched) -> None:
        values = (ctypes.c_float * 64).from_address(one.arguments["x"])
        write(one.arguments["y"], 2 * np.asarray(values, F32))

    gpu.on_launch = run
    for _ in range(3):
        np.testing.assert_array_equal(call(kernel, x), 2 * x)
    (one, _, _) = gpu.launches
    assert (one.symbol, one.blocks, one.threads) == ("ferrule_double", (1, 1, 1), (64, 1, 1))
    assert (one.shared, one.stream, one.context) == (0, 0, 0xC0)
    assert one.arguments["fr_l"] == [64, 1, 1, 64, 1, 1, 1, 1, 1]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    scalar=st.one_of(
        st.integers(-(2**40), 2**40), st.floats(width=32, allow_nan=False), st.booleans()
    ),
    wants=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)  # fmt: skip
def test_arguments(gpu: FakeCuda, shape: Any, order: Any, scalar: Any, wants: Any) -> None:
    """Addresses, shapes, strides and scalars arrive as they are, whichever of them are sent."""
    axes = list(range(len(shape)))
    order.shuffle(axes)
    a = np.zeros(shape, F32).transpose(axes)
    b = np.zeros((3, 2), I32)
    zero = np.array(7, np.uint8)
    words = [w for w, there in zip(("shape", "strides", "ndim"), wants, strict=True) if there]
    uses = "".join(f" use += a_{w}{'' if w == 'ndim' else '[0]'};" for w in words)
    kernel = ferrule.metal_kernel(
        "args", ["a", "s", "b", "z"], ["y", "w"],
        f"long use = b_shape[1] + long(s) + z;{uses} y[0] = use; w[0] = use;",
        ensure_row_contiguous=False,
    )  # fmt: skip
    gpu.texts["ferrule_args"] = text(kernel, [a, scalar, b, zero], [F32, I32])
    gpu.launches.clear()
    y, w = kernel(
        inputs=[a, scalar, b, zero], output_shapes=[(1,), (5,)], output_dtypes=[F32, I32],
        grid=(5, 2, 3), threadgroup=(2, 4, 1),
    )  # fmt: skip
    sent = gpu.launches[0].arguments
    assert (sent["a"], sent["b"], sent["z"]) == (a.ctypes.data, b.ctypes.data, zero.ctypes.data)
    assert (sent["y"], sent["w"]) == (y.ctypes.data, w.ctypes.data)
    assert sent["b_shape"] == [3, 2]
    assert sent.get("a_shape") == (list(a.shape) if "shape" in words else None)
    strides = [s // 4 for s in a.strides]
    assert sent.get("a_strides") == (strides if "strides" in words else None)
    small = -(2**31) <= scalar < 2**31
    kinds = {bool: np.dtype(bool), float: F32, int: I32 if small else np.dtype(np.int64)}
    kind = kinds[type(scalar)]
    assert np.frombuffer(sent["s"], kind, 1)[0] == kind.type(scalar)
    assert sent["fr_l"] == [5, 2, 3, 2, 2, 1, 3, 1, 3]


@pytest.mark.parametrize(
    ("grid", "threadgroup", "blocks", "threads"),
    [
        ((100, 1, 1), (32, 1, 1), (4, 1, 1), (32, 1, 1)),
        ((20, 20, 1), (16, 16, 1), (2, 2, 1), (256, 1, 1)),  # simd operations at a ragged edge
        ((32, 32, 2), (16, 16, 1), (2, 2, 2), (16, 16, 1)),
        ((2, 1, 70000), (2, 1, 1), (70000, 1, 1), (2, 1, 1)),  # beyond CUDA's z
        ((2**31 - 1, 3, 70000), (1024, 1, 1), None, (1024, 1, 1)),
    ],
)
def test_grids(gpu: FakeCuda, grid: Any, threadgroup: Any, blocks: Any, threads: Any) -> None:
    kernel = ferrule.metal_kernel("grids", ["x"], ["y"], "y[0] = simd_sum(x[0]);")
    call(kernel, np.ones(4, F32), grid=grid, threadgroup=threadgroup)
    (one,) = gpu.launches
    assert one.threads == threads
    if blocks is not None:
        assert one.blocks == blocks
    else:
        x, y, z = one.blocks
        assert z == 1 and x < 2**31 and y < 2**16 and x * y >= 2097152 * 3 * 70000
        assert x * y < 2097152 * 3 * 70000 + y


def test_an_empty_grid_launches_nothing(gpu: FakeCuda) -> None:
    assert call(double(), np.ones(0, F32), n=0).shape == (0,)
    assert gpu.launches == []


def test_more_threadgroups_than_cuda_counts(gpu: FakeCuda) -> None:
    with pytest.raises(DeviceError, match=r"'double': grid .* 36028797002186752 threadgroups"):
        call(double(), np.ones(4, F32), grid=(2**31 - 1, 2**31 - 1, 2), threadgroup=(1, 1, 1))


def test_large_threadgroups_get_fewer_registers(gpu: FakeCuda) -> None:
    source = "y[thread_position_in_grid.x] = x[thread_position_in_threadgroup.x];"
    kernel, other = (ferrule.metal_kernel(name, ["x"], ["y"], source) for name in "kl")
    x = np.ones(1024, F32)
    for threads in (256, 512, 1024, 768):
        call(kernel, x, n=1024, threadgroup=(threads, 1, 1))
    assert len({one.symbol for one in gpu.launches}) == 1
    program = next(iter(kernel._programs.values()))
    assert {key[-1] for key in program._functions} == {0, 64, 128}
    gpu.set(most=640)
    with pytest.raises(DeviceError, match=r"1000 threads needs more registers .*; 640 threads fit"):
        call(other, x, n=1000, threadgroup=(1000, 1, 1))


def test_each_gpu_has_a_program_and_the_current_one_stays(gpu: FakeCuda) -> None:
    kernel, x = double(), np.ones(64, F32)
    library = gpu.library
    library.cuCtxPushCurrent_v2(ctypes.c_void_p(0xC0))
    try:
        call(kernel, x)
        gpu.device = "cuda:1"  # type: ignore[attr-defined]
        call(kernel, x)
        current = ctypes.c_void_p()
        library.cuCtxGetCurrent(ctypes.byref(current))
        assert (current.value, library.fake_depth()) == (0xC0, 1)
    finally:
        library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    assert [one.context for one in gpu.launches] == [0xC0, 0xC1]
    assert len(kernel._programs) == 2
    assert library.fake_retained(0) >= 1


def test_threads(gpu: FakeCuda) -> None:
    kernel, x = double(), np.ones(64, F32)
    faults: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                call(kernel, x)
        except BaseException as error:
            faults.append(error)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not faults and len(gpu.launches) == 80


# -- what goes wrong -------------------------------------------------------------------------------


def test_an_earlier_kernel_broke_the_context(gpu: FakeCuda) -> None:
    x = np.ones(64, F32)
    for name in ("first", "second"):
        call(double(name), x)
    gpu.status = 700
    with pytest.raises(DeviceError) as caught:
        call(double("third"), x)
    said = str(caught.value)
    assert "kernel 'third' (grid (64, 1, 1), threadgroup (32, 1, 1), cuda:0) was not" in said
    assert "a kernel before it accessed memory outside its arrays" in said
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in said and "'first', 'second'." in said
    assert "CUDA_LAUNCH_BLOCKING=1" in said


class Accelerator(RuntimeError):
    """As torch.AcceleratorError is."""

    error_code = 700


def test_an_array_library_is_told_first(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocation, a fill or a copy may be what meets the error of an earlier kernel."""
    x = np.ones((8, 8), F32)
    call(double("first"), x)

    def broken(*_: Any) -> Any:
        raise Accelerator("CUDA error: an illegal memory access was encountered")

    said = r"'second' was not launched: a kernel before it accessed .* last: 'first'\."
    for part, array in (("empty", x), ("contiguous", x.T)):
        with monkeypatch.context() as patch:
            patch.setattr(numpy_host, part, broken)
            patch.setattr(numpy_host, "allocation_errors", (RuntimeError,))
            with pytest.raises(DeviceError, match=said) as caught:
                call(double("second"), array)
            assert isinstance(caught.value.__cause__, Accelerator)


def test_loading_is_told_first(gpu: FakeCuda) -> None:
    x = np.ones(64, F32)
    call(double("first"), x)
    gpu.set(image=700)
    with pytest.raises(DeviceError, match=r"cuLibraryLoadData .* failed: a kernel .*: 'first'\."):
        call(double("second"), x)


def test_the_first_call_may_be_recorded(gpu: FakeCuda) -> None:
    """While torch.cuda.graph records, a thread may load kernels only where it says so."""
    call(double(), np.ones(64, F32))
    assert gpu.library.fake_capture_mode() == 0 and gpu.library.fake_depth() == 0
    gpu.set(image=2)
    with pytest.raises(DeviceError):
        call(double("other"), np.ones(64, F32))
    assert gpu.library.fake_capture_mode() == 0 and gpu.library.fake_depth() == 0


@pytest.mark.parametrize(
    ("status", "said"),
    [(701, "Use a smaller threadgroup"), (2, "no memory left"), (1, "CUDA_ERROR_X: some error")],
)
def test_a_launch_fails(gpu: FakeCuda, status: int, said: str) -> None:
    gpu.status = status
    with pytest.raises(DeviceError, match=said):
        call(double(), np.ones(64, F32))


def test_drivers_that_cannot_be_used(gpu: FakeCuda) -> None:
    x = np.ones(64, F32)
    gpu.set(version=11080)
    with pytest.raises(DeviceError, match=r"runs CUDA 11\.8\. .*12\.0 or newer"):
        call(double(), x)
    gpu.set(init=999)
    with pytest.raises(DeviceError, match="cuInit of NVIDIA's driver failed: CUDA_ERROR_X"):
        call(double(), x)
    gpu.set(image=209)
    with pytest.raises(DeviceError, match=r"cuLibraryLoadData .* It was made for another GPU"):
        call(double(), x)
    gpu.set(image=2)
    with pytest.raises(DeviceError, match="Another program may have filled the GPU"):
        call(double(), x)


def test_there_is_no_such_gpu(gpu: FakeCuda) -> None:
    gpu.device = "cuda:7"  # type: ignore[attr-defined]
    with pytest.raises(DeviceError, match=r"there is no GPU cuda:7; .* sees cuda:0 to cuda:1"):
        call(double(), np.ones(64, F32))
    with pytest.raises(DeviceError, match="there is no device 'cuda:x'"):
        devices.get("cuda:x")


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libcuda, "_NAMES", ("libcuda-that-is-not-there.so",))
    driver.driver.cache_clear()
    with pytest.raises(DeviceError, match=r"NVIDIA's driver was not found .* `nvidia-smi`"):
        driver.driver()
    assert devices.get("cuda").name == "cuda"  # it still compiles


def test_an_architecture_runs_nothing() -> None:
    spec, _ = double()._builder.described(
        ["float32[8]"], [float32], None, None, None, None, None, "sm_90"
    )
    with pytest.raises(DeviceError, match="'sm_90' is an architecture"):
        devices.get("sm_90").program(spec)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_is_told(gpu: FakeCuda) -> None:
    kernel, x = double(), np.ones(64, F32)
    call(kernel, x)
    read, end = os.pipe()
    child = os.fork()
    if not child:
        try:
            call(kernel, x)
            said = "no error"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(end, said.encode())
        os._exit(0)
    os.close(end)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    assert said.startswith("DeviceError: this process was forked") and "spawn" in said
    call(kernel, x)  # the parent goes on


def test_a_forked_child_is_told_by_torch_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch had used CUDA, its stream cannot be asked for."""
    torch = pytest.importorskip("torch")
    from ferrule.hosts.torch import arrays as torch_host

    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(DeviceError, match=r"this process was forked .*spawn"):
        torch_host.stream(None, "cuda:0")


def test_shared_memory_is_asked_for(gpu: FakeCuda) -> None:
    loaded = driver.driver().load(1, b"image", "name", 100_000)
    assert gpu.library.fake_dynamic(loaded.handle) == 100_000
    assert (loaded.context, loaded.shared) == (0xC1, 100_000)


def test_memory_is_zeroed(gpu: FakeCuda) -> None:
    found, memory = driver.driver(), (ctypes.c_ubyte * 100)(*[7] * 100)
    at = ctypes.addressof(memory)
    gpu.library.cuCtxPushCurrent_v2(ctypes.c_void_p(0xC0))
    try:
        found.zero(1, at + 10, 80, 2**40)
        found.zero(1, 0, 0, 0)
        assert gpu.library.fake_depth() == 1
    finally:
        gpu.library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    assert gpu.fills == [Filled(at + 10, 80, 2**40, 0xC1, 0)]
    assert bytes(memory) == b"\7" * 10 + bytes(80) + b"\7" * 10
    call(double("first"), np.ones(64, F32))
    gpu.status = 700
    with pytest.raises(DeviceError, match=r"cuMemsetD8Async .* a kernel before it .*: 'first'\."):
        found.zero(0, at, 100, 0)
    assert memory[0] == 7 and gpu.library.fake_depth() == 0
    with pytest.raises(DeviceError, match="there is no GPU cuda:2"):
        found.zero(2, at, 100, 0)
    found._forked()
    with pytest.raises(DeviceError, match="this process was forked"):
        found.zero(0, at, 100, 0)


def test_what_the_driver_says_of_gpus(gpu: FakeCuda) -> None:
    found = driver.driver()
    assert (found.version, found.count) == ((13, 0), 2)
    assert (found.name(1), found.capability(0)) == ("Fake GPU 1", (9, 0))
    assert found.shared_memory(0) == 227 * 1024


def test_doctor_shows_gpus(fake_path: Path, library: nvrtc.Nvrtc, capsys: Any) -> None:
    with FakeCuda(fake_path).installed() as fake:
        report = doctor.examine()
        doctor.show(report, Console(width=200))
        fake.set(count=0)
        with fake.installed():
            none = doctor.examine()["devices"]
    assert [d["name"] for d in report["devices"]] == ["cpu", "cuda:0", "cuda:1"]
    assert report["devices"][1] == {"name": "cuda:0", "runs": True, "note": "Fake GPU 0, sm_90"}
    said = capsys.readouterr().out
    assert "13.0" in said and "Fake GPU 1, sm_90, 227.0 KiB of threadgroup memory" in said
    assert none[1] == {"name": "cuda", "runs": False, "note": "this process sees no GPU"}


def test_kernels_of_tests_run_on_the_gpu(fake_path: Path, library: nvrtc.Nvrtc) -> None:
    """`on_cuda`, which the GPU suite relies on, copies what is there, strided and scalar too."""
    kernel = ferrule.metal_kernel(
        "strided", ["x", "s"], ["y"], "y[0] = x[0] + s + x_shape[0];", ensure_row_contiguous=False
    )
    x = np.arange(24, dtype=F32).reshape(4, 6)[::-1, 1::2]
    fake = FakeCuda(fake_path)
    fake.texts["ferrule_strided"] = text(kernel, [x, np.array(1, F32)])

    def run(one: Launched) -> None:
        sent = one.arguments
        memory = ctypes.c_float * 1
        rows = [
            memory.from_address(sent["x"] + 4 * (i * -6 + j * 2))[0]
            for i in range(4)
            for j in range(3)
        ]
        np.testing.assert_array_equal(np.reshape(rows, (4, 3)), x)
        assert sent["x"] != x.ctypes.data
        given = memory.from_address(sent["s"])[0]
        write(sent["y"], np.array([given, sent["y"] % 4096], F32))

    fake.on_launch = run
    with fake.installed(), on_cuda.everything():
        (y,) = kernel(
            inputs=[x, np.float32(2.5)], output_shapes=[(3,)], output_dtypes=[F32], init_value=9,
            grid=(4, 1, 1), threadgroup=(4, 1, 1),
        )  # fmt: skip
    assert y[0] == 2.5 and y[2] == 9 and len(fake.launches) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize(("status", "said"), [(600, "hangs"), (700, "a kernel before it accessed")])
def test_a_kernel_of_a_test_hangs_or_faults(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch, capfd: Any, status: int, said: str
) -> None:
    """The process ends, so that the GPU suite goes on in another."""
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    monkeypatch.setattr(on_cuda, "SECONDS", -1)
    gpu.library.fake_queried(status)
    child = os.fork()
    if not child:
        on_cuda.finished(driver.driver())
        os._exit(0)
    _, ended = os.waitpid(child, 0)
    gpu.library.fake_queried(0)
    assert os.waitstatus_to_exitcode(ended) == 1
    assert said in capfd.readouterr().err
    on_cuda.finished(driver.driver())


def test_repeated_calls_by_c(fake_path: Path) -> None:
    """In a process of its own, where torch's tensors are said to be on a GPU."""
    script = Path(__file__).parents[1] / "cuda_fastcall.py"
    done = subprocess.run(
        [sys.executable, str(script), str(fake_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["ok"]


_FIRST_CALL = """
import sys
from pathlib import Path
import numpy as np
import ferrule
from fake_cuda import FakeCuda
from ferrule.hosts import numpy as host

facts = host.facts
host.facts = lambda array: facts(array)._replace(device=sys.argv[2])
kernel = ferrule.metal_kernel("first", ["x"], ["y"], "y[thread_position_in_grid.x] = x[0];")
x = np.ones(4, np.float32)
with FakeCuda(Path(sys.argv[1])).installed():
    kernel(inputs=[x], output_shapes=[(4,)], output_dtypes=[x.dtype], grid=(4, 1, 1),
           threadgroup=(4, 1, 1))
print(*sys.modules)
"""
_TO_BUILD = {
    "ferrule.devices.diagnostics", "ferrule.source.cpp", "ferrule.source.lexer",
    "ferrule.source.rewrite",
}  # fmt: skip


@pytest.mark.parametrize(
    ("device", "to_build", "beside"),
    [
        (
            "cpu",
            {"ferrule.devices.cpu.build", "ferrule.source.loops.flat"},
            {"ml_dtypes", "tree_sitter"},
        ),
        (
            "cuda:0",
            {"ferrule.devices.cuda.build", "ferrule.source.cuda.text"},
            {
                "ferrule.devices.cpu",
                "ferrule.tools.toolchain",
                "ferrule.tools.binding",
                "ml_dtypes",
            },
        ),
    ],
)
def test_a_first_call_from_the_cache_imports_nothing_to_build(
    fake_path: Path, library: nvrtc.Nvrtc, tmp_path: Path, device: str, to_build: set[str],
    beside: set[str],
) -> None:  # fmt: skip
    command = [sys.executable, "-c", _FIRST_CALL, str(fake_path), device]
    paths = [str(Path(__file__).parents[1]), *sys.path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "FERRULE_CACHE_DIR": str(tmp_path)}
    first, second = (
        set(subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=120, env=env
        ).stdout.split())
        for _ in range(2)
    )  # fmt: skip
    assert first >= _TO_BUILD | to_build
    assert not second & (_TO_BUILD | to_build | beside)


def test_a_body_in_cuda(gpu: FakeCuda) -> None:
    kernel = ferrule.cuda_kernel(
        "own", ["x", "s"], ["y"], "y[0] = x_shape[1] + x_strides[0] + s[0] + x_ndim;",
        ensure_row_contiguous=False, shared_memory=70_000,
    )  # fmt: skip
    x = np.ones((5, 3), F32).T
    gpu.texts["ferrule_own"] = kernel.text(inputs=[x, 2.5], output_dtypes=[F32])
    y = call(kernel, x, 2.5, grid=(40, 3, 2), threadgroup=(16, 2, 1))
    (one,) = gpu.launches
    assert (one.blocks, one.threads, one.shared) == ((3, 2, 2), (16, 2, 1), 70_000)
    sent = one.arguments
    assert sent["x_shape"] == [3, 5, *[0] * 8] and sent["x_strides"] == [1, 3, *[0] * 8]
    assert (sent["x"], sent["y"]) == (x.ctypes.data, y.ctypes.data)
    assert np.frombuffer(sent["s"], F32, 1)[0] == 2.5
    large = ferrule.cuda_kernel("large", ["x"], ["y"], "y[0] = x[0];", shared_memory=300_000)
    with pytest.raises(DeviceError, match=r"shared_memory=300000 bytes, .* has 232448 at most"):
        call(large, x)
    both = ferrule.cuda_kernel(
        "both", ["x"], ["y"], "__shared__ volatile float t[4096]; t[0] = x[0]; y[0] = t[0];",
        shared_memory=220_000,
    )  # fmt: skip
    with pytest.raises(DeviceError, match=r"220000 bytes and 16384 of the body's own, but a block"):
        call(both, x)


def test_a_cached_kernel_needs_no_compiler(
    gpu: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To load NVRTC takes as long as a kernel from the cache may need for its first launch."""
    monkeypatch.setenv("FERRULE_CACHE_DIR", str(tmp_path / "cache"))
    if nvrtc.likely() is None:
        pytest.skip("NVRTC is the system's")
    x = np.ones(64, F32)
    call(double(), x)
    gpu._forget()  # as in a new process
    monkeypatch.setattr(nvrtc, "find_nvrtc", lambda: pytest.fail("NVRTC was loaded"))
    call(double(), x)
    assert len(gpu.launches) == 2


def test_bfloat16_is_a_type_of_ours(gpu: FakeCuda) -> None:
    kernel = double("small")
    x = np.ones(64, bfloat16.numpy)
    call(kernel, x, output_dtypes=[x.dtype])
    assert len(gpu.launches) == 1
