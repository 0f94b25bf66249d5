"""Calls of ops with NumPy's arrays: in C what they are in Python."""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule.operators import call as op_call
from ferrule.operators import entries
from ferrule.tools import fastcall

SIZES: Any = {"grid": "N", "threadgroup": 32}
DTYPES = (np.float16, np.float32, np.complex64, ml_dtypes.bfloat16, np.int8, np.uint32, np.int64)
INDEX = "uint i = thread_position_in_grid.x;"

weighted = ferrule.op(
    "weighted",
    "x[*S,D]:T, w[D]:T?, n:int32, flip:bool -> y[*S,D]:T, z[D,2]:T",
    metal=f"""{INDEX}
        uint at = 0, rest = i, size = 1;
        for (int d = x_ndim - 1; d >= 0; d--) {{
            at += (rest % x_shape[d]) * x_strides[d];
            rest /= x_shape[d];
            size *= x_shape[d];
        }}
        T v = i < size ? T(x[at] * T(n)) : T(0);
        if (i < size) y[i] = flip ? T(-v) : v;
        if (i < 2 * uint(D)) z[i] = has_w ? w[(i / 2) * w_strides[0]] : T(1);""",
    grid="max(y.size, 2*D)",
    threadgroup=64,
    init_value=0,
    ensure_row_contiguous=False,
)
rows = ferrule.op(
    "rows", "x[N,D]:T -> y[N,D]:T", metal=f"{INDEX} y[i] = x[i];", grid="x.size", threadgroup=32
)
accumulated = ferrule.op(
    "accumulated",
    "total[N]:float32!, x[N]:float32 -> ",
    metal=f"{INDEX} total[i] += x[i];",
    grid="N",
    threadgroup=32,
)


@pytest.fixture(autouse=True)
def in_c() -> None:
    if entries._numpy_in_c() is None:
        pytest.skip("calls are not in C here")


@st.composite
def layouts(draw: Any, dtype: Any, ndim: int) -> np.ndarray[Any, Any]:
    """An array that lies in memory in any way."""
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=ndim, max_size=ndim)))
    array = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 9, [3 * n for n in shape])
    array = array.astype(dtype)[tuple(slice(None, None, 3) for _ in shape)]
    way = draw(st.sampled_from(["gaps", "rows", "turned", "back", "one", "swapped", "odd"]))
    if way == "rows":
        return np.ascontiguousarray(array)
    if way == "turned":
        return np.ascontiguousarray(array.T).T
    if way == "back":
        return array[..., ::-1]
    if way == "one":
        return np.broadcast_to(array[..., :1], shape) if shape[-1] else array
    if way == "swapped":
        return array.astype(array.dtype.newbyteorder(">"))
    if way == "odd" and array.size:
        memory = np.zeros(array.nbytes + 1, np.uint8)
        odd = memory[1:].view(array.dtype).reshape(shape)
        odd[...] = array
        return odd
    return array


def outcome(function: Any, *values: Any) -> Any:
    """What a call gives, or raises."""
    try:
        outputs = function(*values)
    except ferrule.FerruleError as error:
        return type(error), str(error)
    return [
        (y.dtype, y.shape, y.tobytes())
        for y in (outputs if isinstance(outputs, tuple) else [outputs])
    ]


@given(st.data())
@settings(deadline=None)
def test_in_c_as_in_python(data: Any) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    other = data.draw(st.sampled_from([dtype] * 9 + [np.float32]))
    x = data.draw(layouts(dtype, data.draw(st.integers(1, 4))))
    w = data.draw(st.one_of(st.none(), layouts(other, 1)))
    if w is not None and data.draw(st.integers(0, 4)) and len(w):
        w = np.resize(w, x.shape[-1])
    number = data.draw(st.sampled_from([0, 3, -2, 2**31, 2**70, True, 1.5, np.int32(2), None]))
    flip = data.draw(st.sampled_from([True, False, 1, np.True_]))
    values = x, w, number, flip
    assert outcome(weighted, *values) == outcome(lambda *v: op_call.eager(weighted, v), *values)


@given(st.data())
@settings(deadline=None, max_examples=50)
def test_what_wants_rows(data: Any) -> None:
    x = data.draw(layouts(data.draw(st.sampled_from(DTYPES)), 2))
    assert outcome(rows, x) == outcome(lambda v: op_call.eager(rows, [v]), x)
    if x.dtype.isnative:
        np.testing.assert_array_equal(rows(x), x)


def test_what_is_plain_is_in_c() -> None:
    caller = entries.numpy_caller(weighted)
    x, w = np.ones((2, 3), np.float32)[:, ::-1], np.ones(3, np.float32)
    assert outcome(caller, x, w, 2, True) == outcome(weighted, x, w, 2, True)
    assert caller(x, None, 2, True)[1].shape == (3, 2)
    assert caller(x.astype(">f4"), w, 2, True) is NotImplemented
    assert caller(x, w, 2) is NotImplemented
    assert caller(x, w, 2, 1) is NotImplemented
    assert caller(x, [1, 1, 1], 2, True) is NotImplemented
    with fastcall.bypassed():
        assert caller(x, w, 2, True) is NotImplemented


def test_an_entry_that_may_go_is_in_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where calls began to be bypassed, perhaps by another thread, while C waited for it."""
    op = ferrule.op("passing", "x[N]:T -> y[N]:T", metal=f"{INDEX} y[i] = x[i];", **SIZES)
    caller: Any = entries.numpy_caller(op)
    bound = caller.__self__[1].__self__
    x = np.arange(3, dtype=np.float32)
    with monkeypatch.context() as patch:
        make = type(bound).entry

        def bypassed(*given: Any) -> int:
            with fastcall.bypassed():
                return int(make(*given))

        patch.setattr(type(bound), "entry", bypassed)
        assert caller(x).tolist() == [0, 1, 2]
    assert (bound.structure.entries, len(bound.entries), len(bound.recent)) == (0, 0, 1)
    assert caller(x).tolist() == [0, 1, 2]
    assert (bound.structure.entries, len(bound.entries), len(bound.recent)) == (1, 1, 1)


def test_what_is_written_in_place() -> None:
    caller = entries.numpy_caller(accumulated)
    memory = np.arange(12, dtype=np.float32)
    total, x = memory[:4], memory[4:8]
    assert caller(total, x) is None
    np.testing.assert_array_equal(memory, [4, 6, 8, 10, *range(4, 12)])
    assert caller(total, memory[2:6]) is NotImplemented  # x is copied first
    assert caller(total, memory[5:1:-1]) is NotImplemented
    assert caller(memory[8:4:-1], memory[:4]) is NotImplemented
    assert caller(memory[8:4:-1].copy(), memory[:4]) is None
    total.flags.writeable = False
    with pytest.raises(ferrule.KernelError, match="read-only"):
        accumulated(total, x)
    x[:] = 1
    before = memory.copy()
    accumulated(memory[1:5], memory[0:4])
    np.testing.assert_array_equal(memory[1:5], before[1:5] + before[0:4])


def test_an_op_and_what_it_remembers_can_go() -> None:
    op = ferrule.op("brief", "x[N]:T -> y[N]:T", metal=f"{INDEX} y[i] = x[i];", **SIZES)
    op = op.as_is()  # torch keeps ops, NumPy does not
    caller: Any = entries.numpy_caller(op)
    op.callers[np.ndarray] = caller
    caller(np.ones(3, np.float32))
    table, gone = weakref.ref(caller.__self__[1].__self__), weakref.ref(op)
    del op, caller
    gc.collect()
    assert gone() is None and table() is None


def test_a_kernel_that_does_not_compile_says_so_each_time() -> None:
    op = ferrule.op("broken", "x[N]:T -> y[N]:T", metal=f"{INDEX} y[i] = missing;", **SIZES)
    for _ in range(2):
        with pytest.raises(ferrule.CompileError, match="missing"):
            op(np.ones(3, np.float32))


@pytest.mark.skipif(sys.platform != "linux", reason="memory is asked for at an address")
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_fault_names_the_array_that_is_nearest(library: str) -> None:
    op = ferrule.op(
        "far",
        "like[N]:uint8 -> y[N]:float32",
        metal=f"{INDEX} y[long(i) - (1L << 32)] = 1;",
        ensure_row_contiguous=False,
        **SIZES,
    )
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    far = libc.mmap(1 << 40, 4096, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    element = np.ctypeslib.as_array((ctypes.c_uint8 * 1).from_address(far))
    like: Any = np.broadcast_to(element, (1 << 22,))
    if library == "torch":
        like = pytest.importorskip("torch").from_numpy(element).expand(1 << 22)
    with pytest.raises(ferrule.DeviceError, match="bytes before the start of 'y'"):
        op(like)


def test_many_threads() -> None:
    inputs = [np.full((n + 1, 5), n, np.float32) for n in range(8)]

    def call(n: int) -> None:
        for _ in range(300):
            y, _ = weighted(inputs[n], None, 3, False)
            assert y.shape == inputs[n].shape and (y == 3 * n).all()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(8)))


def test_all_sizes_are_read_before_one_is_checked() -> None:
    rule, body = "x[D]:float32 -> y[D]:float32", "y[0] = x[0];"
    for setting in ("grid", "threadgroup"):
        sizes = {"grid": 1, "threadgroup": 1, setting: ("D < 2", "Q")}
        with pytest.raises(
            ferrule.RuleError, match=rf"^\[op\] `{setting}` of op 'f': there is no dim 'Q'"
        ):
            ferrule.op("f", rule, metal=body, **sizes)
    op = ferrule.op("f", rule, metal=body, grid=("0-1", "D//(D-2)"), threadgroup=1)
    with pytest.raises(
        ferrule.KernelError, match=r"^\[op\] D // \(D - 2\) of op 'f' divides by zero"
    ):
        op(np.ones(2, np.float32))
    with pytest.raises(
        ferrule.KernelError, match=r"^\[op\] `grid` of op 'f': 0 - 1 is -1 for x \(3,\)"
    ):
        op(np.ones(3, np.float32))
