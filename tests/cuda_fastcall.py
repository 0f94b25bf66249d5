"""Repeated calls by runtime/fastcall.c on a GPU that is the host: run by test_driver.py.

torch's tensors lie on the CPU, but its DLPack table and ferrule's host say that they are on a GPU.
"""

from __future__ import annotations

import ctypes
import math
import sys
from pathlib import Path
from typing import Any

import torch

import ferrule
from fake_cuda import FakeCuda, Launched
from ferrule.tools import fastcall

SLOW_STREAM, FAST_STREAM = 0x77, 0x500
FAULTS: list[Exception] = []  # what an allocation raises
SHIFTS: list[int] = []  # by how many elements an output begins after aligned memory


def pretend(fake: FakeCuda) -> None:
    """Makes torch's tensors ones of cuda:0 in the eyes of ferrule."""
    api = ctypes.pythonapi
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
    api.PyCapsule_New.restype = ctypes.py_object
    api.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    table: Any = torch.Tensor
    name = b"dlpack_exchange_api"
    library = fake.library
    library.fake_exchange.argtypes = (ctypes.c_void_p,)
    library.fake_table.restype = ctypes.c_void_p
    library.fake_exchange(api.PyCapsule_GetPointer(table.__dlpack_c_exchange_api__, name))
    table.__dlpack_c_exchange_api__ = api.PyCapsule_New(library.fake_table(), name, None)

    from ferrule.hosts.torch import arrays as host

    facts = host.facts

    def on_gpu(tensor: Any) -> Any:
        found = facts(tensor)
        return found and found._replace(device="cuda:0")

    def on_cpu(make: Any) -> Any:
        def made(*given: Any, device: object, **more: Any) -> Any:
            if FAULTS:
                raise FAULTS[0]
            if SHIFTS:
                shape, *rest = (given,) if isinstance(given[0], int) else given
                return make((math.prod(shape) + SHIFTS[0],), *rest, **more)[SHIFTS[0] :].view(shape)
            return make(*given, **more)

        return made

    host.facts = on_gpu
    library_of: Any = torch
    library_of.empty, library_of.full = on_cpu(torch.empty), on_cpu(torch.full)
    host.stream = lambda given, device: SLOW_STREAM


def main(path: str) -> None:
    fake = FakeCuda(Path(path))
    with fake.installed():
        if fastcall.library() is None or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
            print("ok")  # there is no such way
            return
        pretend(fake)
        check(fake)
    print("ok")


def check(fake: FakeCuda) -> None:
    kernel = ferrule.metal_kernel(
        "fast", ["x", "s"], ["y"],
        "uint i = thread_position_in_grid.x;"
        "y[i] = x[elem_to_loc(i, x_shape, x_strides, x_ndim)] * s;",
        ensure_row_contiguous=False,
    )  # fmt: skip
    made = kernel.text("cuda", inputs=["float32[8,4]", 2.0], output_dtypes=[torch.float32])
    fake.texts["ferrule_fast"] = made

    def run(one: Launched) -> None:
        given = one.arguments
        scale = ctypes.c_float.from_buffer_copy(given["s"]).value
        shape, strides = given["x_shape"], given["x_strides"]
        x = (ctypes.c_float * 32).from_address(given["x"])
        y = (ctypes.c_float * 32).from_address(given["y"])
        for i in range(shape[0] * shape[1]):
            y[i] = x[i // shape[1] * strides[0] + i % shape[1] * strides[1]] * scale

    fake.on_launch = run

    def call(x: torch.Tensor, s: float, **more: Any) -> Any:
        return kernel(
            inputs=[x, s], output_shapes=[tuple(x.shape)], output_dtypes=[torch.float32],
            grid=(x.numel(), 1, 1), threadgroup=(32, 1, 1), **more,
        )[0]  # fmt: skip

    streams = []
    for n in range(6):
        x = torch.randn(8, 4)
        given = x.t() if n % 2 else x
        torch.testing.assert_close(call(given, 1.5 + n), given * (1.5 + n), rtol=0, atol=0)
        streams.append(fake.launches[-1].stream)
    # These dtypes go the long way twice, with whatever strides.
    assert streams == [SLOW_STREAM] * 2 + [FAST_STREAM] * 4, streams
    assert fake.launches[-1].arguments["fr_l"] == fake.launches[0].arguments["fr_l"]
    assert {one.context for one in fake.launches} == {0xC0}
    assert fake.library.fake_depth() == 0

    # What was compiled for arrays at multiples of 16 bytes is not launched for others.
    table: Any = kernel._repeated._programs.structure
    assert table.entries == 1
    given = torch.randn(9, 4).view(-1)[1:33].view(8, 4)
    assert given.data_ptr() % 16
    for _ in range(3):
        torch.testing.assert_close(call(given, 0.5), given * 0.5, rtol=0, atol=0)
        assert fake.launches[-1].stream == FAST_STREAM and table.entries == 2

    x = torch.randn(4, 8)
    for shift in (0, 0, 1, 1):
        SHIFTS[:] = [shift] * (shift > 0)
        y = call(x, 0.5)
        torch.testing.assert_close(y, x * 0.5, rtol=0, atol=0)
        assert y.data_ptr() % 16 == 4 * shift and fake.launches[-1].stream == FAST_STREAM
        assert table.entries == 2  # those of before, for the grid is the same
    SHIFTS.clear()

    # Another grid is another entry, without the long way.
    x = torch.randn(5, 4)
    torch.testing.assert_close(call(x, 0.5), x * 0.5, rtol=0, atol=0)
    assert fake.launches[-1].stream == FAST_STREAM and table.entries == 3

    x = torch.ones(8, 4)
    for _ in range(3):
        y = call(x, 3.0, init_value=5)
    assert fake.launches[-1].stream == FAST_STREAM and bool((y == 3).all())

    check_zeros(fake)

    for more in ({}, {"init_value": 0}):
        call(x, 3.0, **more)
        call(x, 3.0, **more)
        fake.status = 700
        try:
            call(x, 3.0, **more)
        except ferrule.DeviceError as error:
            said = str(error)
            assert said.startswith("kernel 'fast' (grid"), error
            assert "CUDA_ERROR_ILLEGAL_ADDRESS" in said and "'fast'. To see" in said, error
        else:
            raise AssertionError("no error")
        assert fake.launches[-1].stream == FAST_STREAM
        fake.status = 0
    assert fake.fills[-1].stream == FAST_STREAM and fake.fills[-1].before == len(fake.launches)
    assert fake.library.fake_depth() == 0

    # What torch raises where the GPU is full or broken has classes of its own.
    call(x, 3.0)
    full, broken = torch.OutOfMemoryError("full"), RuntimeError("broken")
    if hasattr(torch, "AcceleratorError"):
        broken = torch.AcceleratorError("broken")
    broken.error_code = 700  # type: ignore[attr-defined]
    for fault, kind in ((full, ferrule.KernelError), (broken, ferrule.DeviceError)):
        FAULTS[:] = [fault]
        try:
            call(x, 3.0)
        except kind as error:
            assert "'fast'" in str(error) and error.__cause__ is fault, error
        else:
            raise AssertionError("no error")
    FAULTS.clear()
    assert fake.launches[-1].stream == FAST_STREAM

    # Tensors of another GPU are no known call.
    fake.library.fake_gpu(1)
    call(x, 3.0)
    assert fake.launches[-1].stream == SLOW_STREAM


def check_zeros(fake: FakeCuda) -> None:
    """Outputs that are to be zero in all bits are filled by the driver, all others by torch."""
    kernel = ferrule.metal_kernel("zeros", ["x"], ["y", "none", "w"], "y[0] += x[0]; w[1] += 2;")
    kinds = [torch.float16, torch.float32, torch.int32]
    x = torch.ones(8)
    fake.texts["ferrule_zeros"] = kernel.text("cuda", inputs=[x], output_dtypes=kinds)

    def run(one: Launched) -> None:
        w = (ctypes.c_int32 * 6).from_address(one.arguments["w"])
        w[1] += 2

    before, fake.on_launch = fake.on_launch, run
    values: list[tuple[Any, int]] = [(0, 2), (0.0, 2), (False, 2), (-0.0, 1), (1, 0), (True, 0)]
    for value, expected in values:
        for n in range(4):
            fake.fills.clear()
            y, none, w = kernel(
                inputs=[x], output_shapes=[(3, 5), (4, 0), (6,)], output_dtypes=kinds,
                grid=(8, 1, 1), threadgroup=(8, 1, 1), init_value=value,
            )  # fmt: skip
            stream = fake.launches[-1].stream
            if n != 1:  # the second launch over a grid may still go the long way
                assert stream == (FAST_STREAM if n else SLOW_STREAM), (value, n)
            bits = torch.full((3, 5), value, dtype=kinds[0], device="cpu").view(torch.int16)
            assert torch.equal(y.view(torch.int16), bits) and none.shape == (4, 0), (value, n)
            assert w.tolist() == [int(value), int(value) + 2, *[int(value)] * 4], (value, n)
            # In float16, -0.0 has a bit that is not zero; in int32 it is 0.
            filled = [(y.data_ptr(), 30), (w.data_ptr(), 24)][2 - expected :]
            assert [(one.address, one.size) for one in fake.fills] == filled, (value, n)
            for one in fake.fills:
                assert (one.stream, one.context) == (stream, 0xC0), (value, n)
                assert one.before == len(fake.launches) - 1, (value, n)
    fake.on_launch = before
    assert fake.library.fake_depth() == 0


if __name__ == "__main__":
    main(sys.argv[1])
