"""Hosts whose arrays are on NVIDIA GPUs alone, with stand-ins for CuPy and others, and the driver.

What the libraries themselves do is seen where there is a GPU.
"""

from __future__ import annotations

import ctypes
import math
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import ferrule
from fake_cuda import FakeCuda, Filled, Launched, build
from ferrule import dtypes
from ferrule.hosts import protocol as hosts
from ferrule.tools import fastcall, nvrtc

F32 = np.dtype(np.float32)
DOUBLE = "uint i = thread_position_in_grid.x; y[i] = 2 * x[i];"


class Device:
    """`cupy.cuda.Device`; ``entered`` notes which were made current."""

    entered: ClassVar[list[int]] = []

    def __init__(self, id: int = 0) -> None:
        self.id = id

    def __enter__(self) -> Device:
        self.entered.append(self.id)
        return self

    def __exit__(self, *_: object) -> None:
        pass


class CupyArray(np.ndarray[Any, Any]):
    """A NumPy array with the attributes of CuPy's."""

    @property
    def data(self) -> Any:
        return types.SimpleNamespace(ptr=self.ctypes.data)

    @property
    def device(self) -> Any:
        return Device(1)


CupyArray.__module__, CupyArray.__qualname__ = "cupy", "ndarray"


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module in place of CuPy."""
    module: Any = types.ModuleType("cupy")
    stream = types.SimpleNamespace(ptr=0x900)

    def of(make: Any) -> Any:
        return lambda *given, **options: make(*given, **options).view(CupyArray)

    module.ndarray = CupyArray
    module.empty, module.full, module.array = of(np.empty), of(np.full), of(np.array)
    module.cuda = types.SimpleNamespace(Device=Device, get_current_stream=lambda: stream)
    module.stream = stream
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.delitem(sys.modules, "ferrule.hosts.cupy", raising=False)
    monkeypatch.delattr(ferrule.hosts, "cupy", raising=False)
    monkeypatch.setattr(hosts, "known", dict(hosts.known))
    monkeypatch.setattr(Device, "entered", [])
    return module


@pytest.fixture
def fake(library: nvrtc.Nvrtc, tmp_path: Path) -> Iterator[FakeCuda]:
    with FakeCuda(build(tmp_path)).installed() as fake:
        yield fake


def double(fake: FakeCuda, name: str) -> Any:
    kernel = ferrule.metal_kernel(name, ["x"], ["y"], DOUBLE)
    text = kernel.text("cuda", inputs=["float32[8]"], output_dtypes=[F32])
    fake.texts[f"ferrule_{name}"] = text

    def run(one: Launched) -> None:
        n = one.arguments["fr_l"][0]
        x = np.asarray((ctypes.c_float * n).from_address(one.arguments["x"]))
        y = np.asarray((ctypes.c_float * n).from_address(one.arguments["y"]))
        y[:] = 2 * x

    fake.on_launch = run
    return kernel


def call(kernel: Any, x: Any, **more: Any) -> Any:
    given: dict[str, Any] = {
        "inputs": [x], "output_shapes": [x.shape], "output_dtypes": [F32],
        "grid": (math.prod(x.shape), 1, 1), "threadgroup": (4, 1, 1),
    }  # fmt: skip
    return kernel(**{**given, **more})[0]


def test_cupy(cupy: Any, fake: FakeCuda) -> None:
    kernel = double(fake, "cupy_double")
    x = np.arange(12, dtype=F32).view(CupyArray)
    for _ in range(3):
        y = call(kernel, x)
        assert type(y) is CupyArray
        np.testing.assert_array_equal(np.asarray(y), 2 * np.asarray(x))
    assert {(one.stream, one.context) for one in fake.launches} == {(0x900, 0xC1)}
    assert set(Device.entered) == {1}
    strided = np.arange(24, dtype=F32).reshape(4, 6).view(CupyArray)[:, ::2]
    np.testing.assert_array_equal(
        np.asarray(call(kernel, strided, init_value=3)), 2 * np.asarray(strided)
    )
    np.testing.assert_array_equal(
        np.asarray(call(kernel, x, stream=cupy.stream)), 2 * np.arange(12)
    )
    with pytest.raises(ferrule.KernelTypeError, match=r"`stream` .* inside `with stream:`"):
        call(kernel, x, stream=3)
    with pytest.raises(ferrule.KernelTypeError, match="has dtype complex128"):
        call(kernel, x.astype(complex))
    with pytest.raises(ferrule.KernelError, match="two libraries"):
        two = ferrule.metal_kernel("two", ["x", "z"], ["y"], "y[0] = x[0] + z[0];")
        two(
            inputs=[x, torch.ones(3)], output_shapes=[(1,)], output_dtypes=[F32], grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
        )  # fmt: skip


def test_cupy_is_told_first(cupy: Any, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """What CuPy raises where an earlier kernel broke CUDA says so."""

    class CUDARuntimeError(RuntimeError):
        status = 700

    def broken(*_: Any) -> Any:
        raise CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access")

    x = np.arange(12, dtype=F32).view(CupyArray)
    call(double(fake, "earlier"), x)
    cupy.full = broken
    with pytest.raises(ferrule.DeviceError, match=r"'later' was not launched: .*: 'earlier'\."):
        call(double(fake, "later"), x, init_value=0)


@pytest.fixture
def torch_gpu(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """torch's tensors are on the fake's first GPU; holds the values that torch fills with."""
    from ferrule.hosts.torch import arrays as host

    facts, empty, full = host.facts, torch.empty, torch.full
    filled: list[object] = []

    def on_gpu(tensor: torch.Tensor) -> Any:
        found = facts(tensor)
        return found and found._replace(device="cuda:0")

    def made(*shape: Any, device: object, **more: Any) -> torch.Tensor:
        if device != "cuda:0" and device != "cuda:1":
            return empty(*shape, device=device, **more)
        return empty(*shape, **more).fill_(1)  # what was there before

    def made_full(shape: Any, value: float, *, device: object, **more: Any) -> torch.Tensor:
        filled.append(value)
        return full(shape, value, **more)

    monkeypatch.setattr(host, "facts", on_gpu)
    monkeypatch.setattr(host, "stream", lambda given, device: 0x70 + int(device[-1]))
    monkeypatch.setattr(torch, "empty", made)
    monkeypatch.setattr(torch, "full", made_full)
    return filled


# The values that are zero in all bits are filled by the driver.
@pytest.mark.parametrize(
    ("value", "dtype", "by_driver"),
    [
        (0, torch.float32, True), (0.0, torch.bfloat16, True), (False, torch.int64, True),
        (False, torch.bool, True), (0, torch.complex64, True), (-0.0, torch.int8, True),
        (-0.0, torch.float32, False), (-0.0, torch.float16, False), (1, torch.uint8, False),
        (1e-30, torch.float16, True),
    ],
)  # fmt: skip
def test_outputs_that_are_zero(
    fake: FakeCuda, torch_gpu: list[object], value: float, dtype: torch.dtype, by_driver: bool
) -> None:
    x = torch.ones(5)
    with fastcall.bypassed():
        kernel = ferrule.metal_kernel("nothing", ["x"], ["y"], "y[0] = x[0];")
        for shape in ((3, 5), (0, 3)):
            (y,) = kernel(
                inputs=[x], output_shapes=[shape], output_dtypes=[dtype], grid=(5, 1, 1),
                threadgroup=(5, 1, 1), init_value=value,
            )  # fmt: skip
            assert (y.shape, y.dtype) == (shape, dtype)
            expected = torch.as_tensor(np.full(shape, value)).to(dtype)
            assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (y, expected)))
            if y.numel() and by_driver:
                size = 15 * dtype.itemsize
                assert fake.fills == [Filled(y.data_ptr(), size, 0x70, 0xC0, 0)]
    assert len(fake.fills) == by_driver and len(torch_gpu) == (0 if by_driver else 2)
    assert len(fake.launches) == 2


def test_outputs_on_the_second_gpu(fake: FakeCuda, torch_gpu: list[object]) -> None:
    from ferrule.hosts.torch import arrays as host

    current = ctypes.c_void_p(0xC0)
    fake.library.cuCtxPushCurrent_v2(current)
    try:
        y = host.full((2, 3), 0, dtypes.float32, "cuda:1")
        assert fake.library.fake_depth() == 1
    finally:
        fake.library.cuCtxPopCurrent_v2(ctypes.byref(current))
    assert current.value == 0xC0 and not y.any() and not torch_gpu
    assert fake.fills == [Filled(y.data_ptr(), 24, 0x71, 0xC1, 0)]


def test_an_earlier_kernel_broke_the_fill(fake: FakeCuda, torch_gpu: list[object]) -> None:
    x = torch.ones(8)
    with fastcall.bypassed():
        call(double(fake, "first"), x, output_dtypes=[x.dtype])
        fake.status = 700
        with pytest.raises(ferrule.DeviceError) as caught:
            call(double(fake, "second"), x, output_dtypes=[x.dtype], init_value=0)
    said = str(caught.value)
    assert said.startswith(
        "[metal_kernel] output 'y' of kernel 'second' cannot be filled: cuMemset"
    )
    assert "a kernel before it accessed memory outside its arrays" in said and "'first'. To" in said
    assert len(fake.launches) == 1 and fake.library.fake_depth() == 0


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch.func.jvp's own
def test_modes_whose_tensors_have_no_memory(fake: FakeCuda, torch_gpu: list[object]) -> None:
    """There torch fills them."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from ferrule.hosts.torch import arrays as host

    def add(x: torch.Tensor) -> torch.Tensor:
        return x + host.full((3,), 0, dtypes.float32, "cuda:0")

    x = torch.ones(3)
    assert torch.func.functionalize(add)(x).tolist() == [1, 1, 1]
    assert torch.func.jvp(add, (x,), (x,))[0].tolist() == [1, 1, 1]
    with FakeTensorMode():
        assert host.full((3,), 0, dtypes.float32, "cuda:0").shape == (3,)
    assert torch_gpu == [0, 0, 0] and not fake.fills


class Foreign:
    """An array of a library that ferrule does not know."""

    def __init__(self, array: torch.Tensor) -> None:
        self.array, self.shape, self.size = array, tuple(array.shape), array.numel()

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def test_arrays_with_dlpack(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, x = double(fake, "dlpack_double"), Foreign(torch.arange(8.0))
    with pytest.raises(
        ferrule.KernelTypeError, match=r"input 'x' .* is a .*Foreign on cpu; .* numpy.asarray"
    ):
        call(kernel, x)

    from ferrule.hosts.torch import arrays as host
    from ferrule.hosts.torch import dlpack

    facts = host.facts

    def on_gpu(tensor: torch.Tensor) -> Any:
        found = facts(tensor)
        return found and found._replace(device="cuda:0")

    monkeypatch.setattr(host, "facts", on_gpu)
    monkeypatch.setattr(
        dlpack, "tensor", lambda a: a if isinstance(a, torch.Tensor) else torch.from_dlpack(a)
    )
    monkeypatch.setattr(dlpack, "empty", lambda shape, dtype, device: torch.empty(shape))
    monkeypatch.setattr(host, "stream", lambda given, device: 0x77)
    y = call(kernel, x)
    assert isinstance(y, torch.Tensor) and y.tolist() == [2.0 * n for n in range(8)]
    assert fake.launches[-1].stream == 0x77
    # A library that takes DLPack gets its own arrays back.
    monkeypatch.setattr(
        sys.modules[__name__.partition(".")[0]], "from_dlpack", Foreign, raising=False
    )
    assert isinstance(call(kernel, x), Foreign)


def test_what_torch_cannot_read() -> None:
    class Broken:
        __cuda_array_interface__ = property(lambda self: {"version": 3})
        shape, size = (8,), 8

    kernel = ferrule.metal_kernel("broken", ["x"], ["y"], DOUBLE)
    built = torch.backends.cuda.is_built()
    why = "torch cannot read: " if built else "is read through torch, and this torch has no CUDA"
    with pytest.raises(ferrule.KernelTypeError, match=rf"Broken, which {why}"):
        call(kernel, Broken())
