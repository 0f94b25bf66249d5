"""A kernel that writes beside its outputs on the CPU is an error that names it; no heap breaks."""

from __future__ import annotations

import copy
import gc
import re
import subprocess
import sys
import textwrap
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule import DeviceError
from ferrule.hosts.torch import arrays as torch_host
from ferrule.tools import fastcall

pytestmark = pytest.mark.skipif(fastcall.library() is None, reason="built without Python's headers")

CANARY = 64  # FR_CANARY of runtime/canary.h
needs_slack = pytest.mark.skipif(
    not torch_host.slack_is_known(), reason="torch's memory is not of glibc's malloc"
)

# Thread 0 writes one byte more, `at` bytes from the start of the last output.
BODY = "uint i = thread_position_in_grid.x; y[i] = x[i]; if (i == 0) y[at] = 1;"
POKE = ferrule.metal_kernel("poke", ["x", "at"], ["y"], BODY)
POKE_OP = ferrule.op(
    "poke", "x[N]:uint8, at:int32 -> y[N]:uint8", metal=BODY, grid="N", threadgroup=32
)


def poke(x: Any, at: int, *, init_value: float | None = None) -> Any:
    return POKE(
        inputs=[x, at], output_shapes=[x.shape], output_dtypes=[x.dtype], grid=(x.shape[0], 1, 1),
        threadgroup=(32, 1, 1), init_value=init_value,
    )[0]  # fmt: skip


def bytes_of(library: str, n: int) -> Any:
    values = np.arange(n) % 251
    if library == "torch":
        return torch.tensor(values, dtype=torch.uint8)
    return values.astype(np.uint8)


def said(name: str, n: int, count: int) -> str:
    side = "past the end" if count > 0 else "before the start"
    bytes_ = f"{abs(count)} byte" + "s" * (abs(count) != 1)
    return rf"{name}.* wrote outside output 'y' of shape \({n},\), {bytes_} {side}"


def slack(n: int) -> int:
    """Bytes behind n bytes of glibc's that belong to them at least."""
    return -(n + 8) % 16


@pytest.mark.parametrize("fill", [None, 0, 7])
@given(st.integers(1, 3000), st.integers(1, CANARY), st.booleans())
@settings(deadline=None, max_examples=40)
def test_each_byte_beside_an_output_of_numpy(
    fill: float | None, n: int, count: int, before: bool
) -> None:
    x = bytes_of("numpy", n)
    at = -count if before else n + count - 1
    for _ in range(3):  # the long way twice, then C
        assert poke(x, 0, init_value=fill)[1:].tolist() == x[1:].tolist()
        with pytest.raises(
            DeviceError, match=said("kernel 'poke'", n, -count if before else count)
        ):
            poke(x, at, init_value=fill)
    with fastcall.bypassed(), pytest.raises(DeviceError, match="wrote outside output 'y'"):
        poke(x, at, init_value=fill)


@given(st.integers(1, 3000), st.integers(1, CANARY), st.booleans())
@settings(deadline=None, max_examples=40)
def test_each_byte_beside_an_output_of_an_op(n: int, count: int, before: bool) -> None:
    x = bytes_of("numpy", n)
    assert POKE_OP(x, 0)[1:].tolist() == x[1:].tolist()
    with pytest.raises(DeviceError, match=said("kernel 'poke'", n, -count if before else count)):
        POKE_OP(x, -count if before else n + count - 1)


@needs_slack
@pytest.mark.parametrize("way", ["kernel", "op", "op in Python"])
@given(st.integers(1, 3000).filter(slack), st.data())
@settings(deadline=None, max_examples=40)
def test_each_byte_that_torch_has_behind_an_output(way: str, n: int, data: st.DataObject) -> None:
    x = bytes_of("torch", n)
    count = data.draw(st.integers(1, slack(n)))

    def call(at: int) -> Any:
        if way == "kernel":
            return poke(x, at)
        if way == "op":
            return POKE_OP(x, at)
        return POKE_OP._operator.run(x, at)

    kept = []
    while True:
        kept.append(call(0))
        assert kept[-1][1:].tolist() == x[1:].tolist()
        try:
            call(n + count - 1)
        except DeviceError as error:
            assert re.search(said("kernel 'poke'", n, count), str(error))
            break
        # Nothing is known of memory that begins with a page: the next begins elsewhere.
        kept.append(torch.empty(n + 16 * len(kept), dtype=torch.uint8))
        assert len(kept) < 40


BEHIND = """
    import mlx.core as mx, sys
    sys.path[:0] = {path!r}
    from test_canary import POKE_OP, poke
    for call, n, count in ((poke, 4, 1), (POKE_OP, 1000, 64), (POKE_OP, 4, 16)):
        x = mx.arange(n).astype(mx.uint8)
        assert call(x, 0)[1:].tolist() == x[1:].tolist()
        try:
            mx.eval(call(x, n + count - 1))
        except RuntimeError as error:
            print(n, count, error)
"""


def test_bytes_behind_an_output_of_mlx() -> None:
    """In a process of its own: MLX waits for ever after about a hundred errors."""
    mx = pytest.importorskip("mlx.core")
    from ferrule.hosts.mlx import build as mlx_build

    if mx.default_device().type != mx.cpu or not mlx_build.at_least(0, 32, 2):
        pytest.skip("on a GPU nothing is looked at; in older versions an error ends the process")
    code = textwrap.dedent(BEHIND.format(path=[*filter(None, sys.path)]))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    first, second, third = done.stdout.splitlines()
    assert re.search("4 1 " + said("kernel 'poke'", 4, 1), first)
    assert re.search("1000 64 " + said("op 'poke'", 1000, 64), second)
    assert re.search("4 16 " + said("op 'poke'", 4, 16), third)


SHIFT = """
    import numpy as np, ferrule
    kernel = ferrule.metal_kernel(
        "shift", ["x"], ["y"], "uint i = thread_position_in_grid.x; y[i + 4] = x[i];"
    )
    x = {array}
    for _ in range(200):
        try:
            kernel(inputs=[x], output_shapes=[x.shape], output_dtypes=[x.dtype],
                   grid=(4, 1, 1), threadgroup=(4, 1, 1))
        except ferrule.DeviceError as error:
            found = str(error)
    print(found)
"""


def test_the_heap_of_numpy_survives() -> None:
    code = textwrap.dedent(SHIFT.format(array="np.ones(4, np.float32)"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "kernel 'shift' (grid (4, 1, 1), threadgroup (4, 1, 1)) wrote outside" in done.stdout
    assert "output 'y' of shape (4,), 16 bytes past the end" in done.stdout


def test_which_of_several_outputs() -> None:
    kernel = ferrule.metal_kernel(
        "two", ["x"], ["a", "b"],
        "uint i = thread_position_in_grid.x; a[i] = x[i]; b[i] = x[i]; if (i == 0) b[-2] = 1;",
    )  # fmt: skip
    x = np.ones(5, np.float32)
    for _ in range(3):
        with pytest.raises(DeviceError, match=r"output 'b' of shape \(5,\), 8 bytes before"):
            kernel(
                inputs=[x], output_shapes=[(5,), (5,)], output_dtypes=[np.float32] * 2,
                grid=(5, 1, 1), threadgroup=(5, 1, 1),
            )  # fmt: skip


def test_functions_that_write_to_outputs_are_looked_at() -> None:
    def run(x: Any, y: Any) -> None:
        wide = np.lib.stride_tricks.as_strided(y, (y.size + 2,))
        wide[...] = 1

    op = ferrule.adopt("wide", "x[N]:T -> y[N]:T", run=run)
    with pytest.raises(
        DeviceError, match=r"run.* of op 'wide' wrote outside output 'y' .* 8 bytes past"
    ):
        op(np.ones(4, np.float32))


COPY = ferrule.metal_kernel(
    "copy_it", ["x"], ["y"], "uint i = thread_position_in_grid.x; y[i] = x[i];"
)


def copied(x: Any, init_value: float | None = None) -> Any:
    for _ in range(3):
        (y,) = COPY(
            inputs=[x.reshape(-1)], output_shapes=[x.shape], output_dtypes=[x.dtype],
            grid=(max(int(np.prod(x.shape)), 1), 1, 1), threadgroup=(32, 1, 1),
            init_value=init_value,
        )  # fmt: skip
    return y


@pytest.mark.parametrize("init_value", [None, 0])
@pytest.mark.parametrize("kind", [np.int8, np.float16, ml_dtypes.bfloat16, np.float32, np.int64])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 1, 4)])
def test_outputs_of_numpy_are_arrays_like_any_other(
    kind: Any, shape: tuple[int, ...], init_value: float | None
) -> None:
    x = (np.arange(np.prod(shape, dtype=int)) % 100).reshape(shape).astype(kind)
    y = copied(x, init_value)
    assert type(y) is np.ndarray and y.dtype == x.dtype and y.shape == shape
    flags = y.flags
    assert flags.owndata and flags.c_contiguous and flags.writeable and flags.aligned
    assert y.base is None and y.nbytes == x.nbytes and y.ctypes.data % 16 == 0
    assert y.tobytes() == x.tobytes() == copy.deepcopy(y).tobytes()
    size = x.size
    y.resize((size + 100,), refcheck=False)  # which moves it
    assert y.reshape(-1)[:size].tobytes() == x.tobytes() and not y[size:].any()
    y.resize((1,), refcheck=False)
    assert y.tobytes()[: x.itemsize] == x.tobytes()[: x.itemsize]


def test_memory_of_outputs_is_given_back() -> None:
    def size() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1])

    x = np.ones(1 << 18, np.float32)
    copied(x)
    gc.collect()
    before = size()
    for _ in range(100):
        copied(x, 0)
    assert size() - before < 50 << 8  # pages; 300 outputs of 256 pages each were made


@pytest.mark.parametrize("shape", [(1 << 60,), (1 << 30, 1 << 29)])
def test_outputs_that_are_too_large_are_refused_in_numpys_words(shape: tuple[int, ...]) -> None:
    with pytest.raises(ferrule.KernelError, match=r"NumPy cannot allocate them: .*(allocate|dim)"):
        COPY(
            inputs=[np.ones(1, np.float32)], output_shapes=[shape], output_dtypes=[np.float32],
            grid=(1, 1, 1), threadgroup=(1, 1, 1),
        )  # fmt: skip


@needs_slack
def test_outputs_of_torch_have_no_more_storage_than_they_need() -> None:
    y = copied(torch.ones(3, 5))
    assert y.untyped_storage().nbytes() == y.nbytes and y.untyped_storage().resizable()
    assert y.resize_(100).shape == (100,)
