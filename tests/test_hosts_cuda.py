"""Hosts whose arrays are on NVIDIA GPUs alone, with stand-ins for CuPy and others, and the driver.

What the libraries themselves do is seen where there is a GPU.
"""

from __future__ import annotations

import ctypes
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import ferrule
from fake_cuda import FakeCuda, Launched, build
from ferrule import hosts, nvrtc

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
    monkeypatch.delattr(hosts, "cupy", raising=False)
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
    return kernel(
        inputs=[x], output_shapes=[x.shape], output_dtypes=[F32], grid=(x.size, 1, 1),
        threadgroup=(4, 1, 1), **more,
    )[0]  # fmt: skip


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

    from ferrule.hosts import exchange
    from ferrule.hosts import torch as host

    facts = host.facts

    def on_gpu(tensor: torch.Tensor) -> Any:
        found = facts(tensor)
        return found and found._replace(device="cuda:0")

    monkeypatch.setattr(host, "facts", on_gpu)
    monkeypatch.setattr(
        exchange, "tensor", lambda a: a if isinstance(a, torch.Tensor) else torch.from_dlpack(a)
    )
    monkeypatch.setattr(exchange, "empty", lambda shape, dtype, device: torch.empty(shape))
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
    with pytest.raises(ferrule.KernelTypeError, match=r"Broken, which torch cannot read: "):
        call(kernel, Broken())
