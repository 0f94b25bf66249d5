"""Hosts: what a kernel is told of arrays, when they are copied, and what comes back."""

from __future__ import annotations

import copy
import ctypes
import gc
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, cast

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fake_device
import ferrule as fe
from fake_device import FakeDevice
from ferrule import dtypes
from ferrule.dtypes import Dtype
from ferrule.hosts import numpy as numpy_host
from ferrule.hosts import protocol as hosts
from ferrule.hosts.mlx import arrays as mlx_host
from ferrule.hosts.torch import arrays as torch_host
from ferrule.spec import Facts, is_row_contiguous
from mlx_versions import needs_mlx
from strategies import IN_MLX, LEVEL0, level0_dtypes

SHARED = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
KINDS = ["numpy", "torch", "mlx"]


def copy_all(inputs: list[Any], outputs: list[Any]) -> None:
    for given_, out in zip(inputs, outputs, strict=True):
        out[...] = given_


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return fake_device.install(monkeypatch, copy_all)


def kernel(contiguous: bool = True, inputs: int = 1) -> fe.MetalKernel:
    return fe.metal_kernel(
        "copy",
        [f"a{i}" for i in range(inputs)],
        [f"out{i}" for i in range(inputs)],
        "out0[0] = a0[0];",
        ensure_row_contiguous=contiguous,
    )


def run(k: fe.MetalKernel, *arrays: Any, **call: Any) -> list[Any]:
    """Copies of ``arrays``, made by the device."""
    call["output_shapes"] = call.get("output_shapes") or [tuple(a.shape) for a in arrays]
    call["output_dtypes"] = call.get("output_dtypes") or [a.dtype for a in arrays]
    empty = all(0 in s for s in call["output_shapes"])
    return k(inputs=list(arrays), grid=(0 if empty else 8, 1, 1), threadgroup=(8, 1, 1), **call)


def numbers(shape: tuple[int, ...], dtype: Dtype) -> Any:
    """A NumPy array of values that differ and that ``dtype`` holds."""
    size = int(np.prod(shape))
    return (np.arange(size) % 100).reshape(shape).astype(dtype.numpy)


def of_bytes(kind: str, values: Any, dtype: Dtype) -> Any:
    """An array of NumPy or torch whose elements are these bytes."""
    if kind == "torch":
        tensor = torch.empty(len(values) // dtype.itemsize, dtype=getattr(torch, dtype.name))
        ctypes.memmove(tensor.data_ptr(), values.ctypes.data, values.nbytes)
        return tensor
    return values.view(dtype.numpy)


def bytes_of(array: Any) -> bytes:
    """The bytes of an array of NumPy or torch, row by row."""
    if isinstance(array, torch.Tensor):
        array = array.contiguous()
        return ctypes.string_at(array.data_ptr(), array.nbytes)
    return cast(bytes, array.tobytes())


def as_numpy(array: Any) -> Any:
    """The values of an array of any host, read without ferrule."""
    if isinstance(array, torch.Tensor):
        if array.dtype == torch.bfloat16:
            bits = array.contiguous().view(torch.int16).numpy()
            return bits.view(ml_dtypes.bfloat16).reshape(tuple(array.shape))
        return array.resolve_conj().resolve_neg().numpy()
    if isinstance(array, mx.array):
        if array.dtype == mx.bfloat16:
            return np.array(array.astype(mx.float32)).astype(ml_dtypes.bfloat16)
        return np.array(array)
    return np.asarray(array)


def of_kind(kind: str, values: Any) -> Any:
    """A NumPy array as an array of another host."""
    bfloat16 = values.dtype == ml_dtypes.bfloat16
    if kind == "torch":
        values = np.ascontiguousarray(values).reshape(values.shape)
        if bfloat16:
            return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(values.copy())
    if kind == "mlx":
        return (
            mx.array(values.astype(np.float32)).astype(mx.bfloat16)
            if bfloat16
            else mx.array(values)
        )
    return values


# -- layouts -----------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Dtype, tuple[int, ...], Callable[[Any], Any]]:
    """A dtype, the shape of a row-contiguous array, and what makes a view of it."""
    dtype = draw(level0_dtypes())
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    order = draw(st.permutations(range(len(shape))))
    starts = draw(st.lists(st.integers(0, 2), min_size=4, max_size=4))
    steps = draw(st.lists(st.integers(1, 3), min_size=4, max_size=4))

    def make(array: Any) -> Any:
        for axis in range(len(shape)):
            array = array[(slice(None),) * axis + (slice(starts[axis], None, steps[axis]),)]
        if isinstance(array, torch.Tensor):
            return array.permute(tuple(order))
        return array.transpose(tuple(order)) if order else array

    return dtype, shape, make


@SHARED
@given(layouts(), st.sampled_from(KINDS), st.booleans())
def test_a_kernel_sees_every_element_where_it_belongs(
    fake: FakeDevice,
    layout: tuple[Dtype, tuple[int, ...], Callable[[Any], Any]],
    kind: str,
    contiguous: bool,
) -> None:
    dtype, shape, make = layout
    array = make(of_kind(kind, numbers(shape, dtype)))
    fake.launches.clear()
    (out,) = run(kernel(contiguous), array)
    assert type(out) is type(array)
    assert out.dtype == array.dtype
    assert tuple(out.shape) == tuple(array.shape)
    np.testing.assert_array_equal(as_numpy(out), make(numbers(shape, dtype)))
    if 0 in array.shape:
        assert not fake.launches
        return
    ((given_,), (result,), launch) = fake.launches[0]
    before = hosts.load(kind).facts(array)
    assert before is not None
    assert given_.dtype is dtype
    assert result.row_contiguous
    if contiguous:
        assert given_.row_contiguous
        assert launch.copies == (() if before.row_contiguous else (0,))
    if before.row_contiguous or not contiguous:
        assert given_ == before, "copied without need"


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@settings(deadline=None)
@given(st.sampled_from(dtypes.ALL), st.binary(max_size=64), st.data())
def test_bytes_of_every_dtype_survive(kind: str, dtype: Dtype, given_: bytes, data: Any) -> None:
    """Hosts tell where they lie, and copies, fresh arrays and dtypes are those of the library."""
    size = dtype.itemsize
    if dtype is dtypes.bool_:  # torch copies others as they are, NumPy makes them 1
        given_ = bytes(byte & 1 for byte in given_)
    values = np.frombuffer(given_[: len(given_) // size * size], np.uint8)
    host, array = hosts.load(kind), of_bytes(kind, values, dtype)
    assert dtypes.find(array.dtype) is dtypes.of(dtype.numpy.type) is dtype
    facts = host.facts(array)
    assert facts is not None
    assert facts[:3] == (dtype, (len(values) // size,), (1,)) and facts.device == "cpu"
    assert ctypes.string_at(facts.pointer, len(values)) == values.tobytes()
    step = data.draw(st.integers(1, 3))
    copied = host.contiguous(array[::step])
    whole = values.reshape(-1, size)[::step]
    assert copied.dtype == array.dtype and bytes_of(copied) == whole.tobytes()
    fresh = host.empty((2, 3), dtype, "cpu")
    assert fresh.dtype == array.dtype and tuple(fresh.shape) == (2, 3)
    zeros = host.full((2, 3), 0, dtype, "cpu")
    assert zeros.dtype == array.dtype and bytes_of(zeros) == bytes(6 * size)


def test_mlx_has_no_8_bit_floats() -> None:
    assert not {d.name for d in dtypes.FLOAT8} & mlx_host.DTYPES.keys()
    assert set(mlx_host.KNOWN.values()) == set(IN_MLX)


def test_a_torch_that_lacks_a_dtype() -> None:
    """e8m0fnu came with torch 2.7."""
    code = (
        "import torch; del torch.float8_e8m0fnu\n"
        "from ferrule import dtypes; from ferrule.hosts import protocol as hosts\n"
        "host = hosts.load('torch')\n"
        "print(host.facts(torch.ones(2, dtype=torch.float8_e5m2)).dtype)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert done.stdout.strip() == "ferrule.float8_e5m2"


@SHARED
@given(
    level0_dtypes(),
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from([-2, -1, 1, 2])), min_size=1, max_size=3),
    st.booleans(),
)
def test_numpy_views_with_negative_strides(
    fake: FakeDevice, dtype: Dtype, axes: list[tuple[int, int]], contiguous: bool
) -> None:
    base = numbers(tuple(2 * n for n, _ in axes), dtype)
    array = base[tuple(slice(None, None, step) for _, step in axes)]
    fake.launches.clear()
    (out,) = run(kernel(contiguous), array)
    np.testing.assert_array_equal(out, array)
    if not contiguous:
        assert fake.launches[0][0][0].pointer == array.ctypes.data


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_broadcast_inputs(fake: FakeDevice, kind: str, contiguous: bool) -> None:
    values = of_kind(kind, np.array([1, 2, 3], np.float32))
    widen: dict[str, Callable[[], Any]] = {
        "numpy": lambda: np.broadcast_to(values, (4, 3)),
        "torch": lambda: values.expand(4, 3),
        "mlx": lambda: mx.broadcast_to(values, (4, 3)),
    }
    wide = widen[kind]()
    (out,) = run(kernel(contiguous), wide)
    np.testing.assert_array_equal(as_numpy(out), np.broadcast_to([1, 2, 3], (4, 3)))
    ((facts,), _, launch) = fake.launches[0]
    assert facts.strides == ((3, 1) if contiguous else (0, 1))
    assert launch.copies == ((0,) if contiguous else ())


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("dtype", [d for d in LEVEL0 if d.itemsize > 1], ids=repr)
def test_numpy_arrays_that_cannot_be_addressed_in_place_are_copied(
    fake: FakeDevice, dtype: Dtype, contiguous: bool
) -> None:
    values = numbers((3, 4), dtype)
    size = dtype.itemsize
    raw = np.zeros(12 * size + 1, np.uint8)
    misaligned = raw[1:].view(dtype.numpy).reshape(3, 4)
    misaligned[...] = values
    record = np.zeros((3, 4), np.dtype([("pad", "i1"), ("x", dtype.numpy)]))
    record["x"] = values
    arrays = [misaligned, record["x"]]
    if dtype.name != "bfloat16":
        arrays.append(values.astype(dtype.numpy.newbyteorder()))
    for array in arrays:
        (out,) = run(kernel(contiguous), array, output_dtypes=[dtype])
        np.testing.assert_array_equal(out, values)
        assert fake.launches[-1][2].copies == (0,)
        assert fake.launches[-1][0][0].pointer % size == 0


def test_read_only_numpy_arrays_are_not_copied(fake: FakeDevice) -> None:
    array = np.arange(6, dtype=np.float32)
    array.flags.writeable = False
    (out,) = run(kernel(), array)
    np.testing.assert_array_equal(out, array)
    assert fake.launches[0][0][0].pointer == array.ctypes.data


def test_overlapping_windows(fake: FakeDevice) -> None:
    windows = np.lib.stride_tricks.sliding_window_view(np.arange(8, dtype=np.int32), 3)
    for contiguous in (True, False):
        (out,) = run(kernel(contiguous), windows)
        np.testing.assert_array_equal(out, windows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", LEVEL0, ids=repr)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3)])
def test_outputs_belong_to_the_host_of_the_inputs(
    fake: FakeDevice, kind: str, dtype: Dtype, shape: tuple[int, ...]
) -> None:
    array = of_kind(kind, numbers(shape, dtype))
    (out,) = run(kernel(), array)
    assert type(out) is type(array)
    np.testing.assert_array_equal(as_numpy(out), numbers(shape, dtype))
    for wanted in (dtype, dtype.numpy, dtype.numpy.type, array.dtype):
        (again,) = run(kernel(), array, output_dtypes=[wanted])
        assert again.dtype == array.dtype


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", LEVEL0, ids=repr)
def test_init_value_fills_outputs_of_every_dtype(
    monkeypatch: pytest.MonkeyPatch, kind: str, dtype: Dtype
) -> None:
    seen: list[Any] = []
    fake_device.install(monkeypatch, lambda _, outs: seen.append(outs[0].copy()))
    array = of_kind(kind, numbers((2, 3), dtype))
    for value in (0, 1, 7, 2.5, True):
        seen.clear()
        (out,) = run(kernel(), array, init_value=value)
        expected = np.full((2, 3), value).astype(dtype.numpy)
        np.testing.assert_array_equal(seen[0], expected)
        np.testing.assert_array_equal(as_numpy(out), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_hosts_fill_with_the_ends_of_integers(kind: str) -> None:
    host = hosts.load(kind)
    for dtype in LEVEL0:
        if dtype.kind in "iu":
            for end in (np.iinfo(dtype.numpy).min, np.iinfo(dtype.numpy).max):
                filled = host.full((3,), int(end), dtype, "cpu")
                np.testing.assert_array_equal(as_numpy(filled), np.full(3, end, dtype.numpy))


# -- scalars -----------------------------------------------------------------------------------

SCALARS: list[tuple[Any, Dtype]] = [
    (True, dtypes.bool_),
    (3, dtypes.int32),
    (-(2**31), dtypes.int32),
    (2**31 - 1, dtypes.int32),
    (2**31, dtypes.int64),
    (-(2**31) - 1, dtypes.int64),
    (-(2**63), dtypes.int64),
    (2**63 - 1, dtypes.int64),
    (1.5, dtypes.float32),
    (float("inf"), dtypes.float32),
    (1 - 2j, dtypes.complex64),
    (np.float64(1.5), dtypes.float32),
    (np.complex128(1j), dtypes.complex64),
    *((d.numpy.type(1), d) for d in LEVEL0),
]


@pytest.mark.parametrize(("value", "dtype"), SCALARS, ids=repr)
@pytest.mark.parametrize("kind", KINDS)
def test_scalars_go_with_any_host(fake: FakeDevice, kind: str, value: Any, dtype: Dtype) -> None:
    array = of_kind(kind, np.ones(4, np.float32))
    outs = run(
        kernel(inputs=2), value, array, output_shapes=[(), (4,)], output_dtypes=[dtype, array.dtype]
    )
    assert type(outs[0]) is type(array)
    assert as_numpy(outs[0]).item() == value
    facts = fake.launches[0][0][0]
    assert facts.value
    assert facts[:3] == (dtype, (), ())
    assert not fake.launches[0][0][1].value


@needs_mlx(0, 32)  # to export kernels
@pytest.mark.parametrize(
    ("value", "dtype"),
    [s for s in SCALARS if type(s[0]).__module__ != "ml_dtypes"],  # MLX takes it for complex
    ids=repr,
)
def test_scalars_get_the_dtypes_that_mlx_gives_them(value: Any, dtype: Dtype) -> None:
    k: Any = mx.fast.metal_kernel("k", ["a"], ["out"], "")
    constants: list[Any] = []

    def note(event: dict[str, Any]) -> None:
        if event["type"] == "constants":
            constants.extend(array for _, array in event["constants"])

    def call() -> Any:
        return k(
            inputs=[value], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)],
            output_dtypes=[mx.float32],
        )  # fmt: skip

    mx.export_function(note, call)
    assert [dtypes.of(array.dtype) for array in constants] == [dtype]


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**30])
def test_an_int_beyond_64_bits_is_refused(value: int) -> None:
    with pytest.raises(fe.KernelError, match=r"'a0' of kernel 'copy' is the int -?\d+, which"):
        run(kernel(), value, output_shapes=[()], output_dtypes=[np.int64])


@pytest.mark.parametrize("value", [np.longdouble(1), np.datetime64("2020"), np.str_("x")])
def test_numpy_scalars_of_other_dtypes_are_refused(value: Any) -> None:
    with pytest.raises(fe.KernelTypeError, match="input 'a0' of kernel 'copy' has dtype"):
        run(kernel(), value, output_shapes=[()], output_dtypes=[np.float32])


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (np.float32, np.ndarray),
        (np.dtype("int8"), np.ndarray),
        (ml_dtypes.bfloat16, np.ndarray),
        (fe.bfloat16, np.ndarray),
        (torch.bfloat16, torch.Tensor),
        (mx.bfloat16, mx.array),
    ],
    ids=repr,
)
def test_without_arrays_the_dtypes_decide(fake: FakeDevice, dtype: Any, expected: type) -> None:
    (out,) = run(kernel(), 3, output_shapes=[(2,)], output_dtypes=[dtype])
    assert type(out) is expected
    assert as_numpy(out).tolist() == [3, 3]


def test_without_arrays_dtypes_of_two_libraries_are_refused(fake: FakeDevice) -> None:
    with pytest.raises(
        fe.KernelError, match=r"'out0' has a dtype of NumPy, output 'out1' one of torch"
    ):
        run(
            kernel(inputs=2), 1, 2,
            output_shapes=[(1,), (1,)], output_dtypes=[np.float32, torch.float32],
        )  # fmt: skip
    assert not fake.launches


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(("one", "two"), [(a, b) for a in KINDS for b in KINDS if a != b])
def test_arrays_of_two_libraries_are_refused(fake: FakeDevice, one: str, two: str) -> None:
    ones = np.ones(3, np.float32)
    arrays = of_kind(one, ones), of_kind(two, ones)
    names = {"numpy": "NumPy", "torch": "torch", "mlx": "MLX"}
    message = (
        f"kernel 'copy' got arrays of two libraries: input 'a0' is {names[one]}, input 'a1' is "
        f"{names[two]}"
    )
    with pytest.raises(fe.KernelError, match=message):
        run(kernel(inputs=2), *arrays)
    assert not fake.launches


def test_arrays_on_two_devices_are_refused(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch_host.facts

    def facts(tensor: torch.Tensor) -> Facts | None:
        found = real(tensor)
        assert found is not None
        return found._replace(device="cuda:1") if tensor.numel() == 3 else found

    monkeypatch.setattr(torch_host, "facts", facts)
    with pytest.raises(
        fe.KernelError, match="two devices: input 'a0' is on cpu, input 'a1' is on cuda:1"
    ):
        run(kernel(inputs=2), torch.ones(2), torch.ones(3))
    assert not fake.launches


@pytest.mark.parametrize(
    ("array", "error", "message"),
    [
        (np.zeros(2), fe.KernelError, "float64 is not supported"),
        (np.zeros(2, ">f8"), fe.KernelError, "float64 is not supported"),
        (torch.zeros(2, dtype=torch.float64), fe.KernelError, "float64 is not supported"),
        (np.zeros(2, object), fe.KernelTypeError, "has dtype object, expected one of bool, uint8"),
        (np.zeros(2, complex), fe.KernelTypeError, "has dtype complex128"),
        (np.zeros(2, [("x", "f4")]), fe.KernelTypeError, "has dtype"),
        (np.zeros(2, "M8[s]"), fe.KernelTypeError, "has dtype datetime64"),
        (np.array(["a"]), fe.KernelTypeError, "has dtype <U1"),
        (np.zeros(2, ml_dtypes.float8_e5m2fnuz), fe.KernelTypeError, "has dtype float8_e5m2fnuz"),
        (torch.zeros(2, dtype=torch.float8_e5m2fnuz), fe.KernelTypeError, "has dtype torch.float8"),
        (np.zeros(2, ml_dtypes.int4), fe.KernelTypeError, "has dtype int4"),
        (
            np.ma.masked_array(np.zeros(2, "f4"), np.array([0, 1], bool)),
            fe.KernelTypeError,
            r"masked.*x\.filled",
        ),
    ],
    ids=lambda v: str(v)[:40],
)
def test_arrays_of_other_element_types_are_refused(
    fake: FakeDevice, array: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"input 'a0' of kernel 'copy'.*{message}"):
        run(kernel(), array, output_dtypes=[np.float32])
    assert not fake.launches


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", dtypes.FLOAT8, ids=repr)
def test_8_bit_floats_are_refused_by_name_and_taken_as_bytes(
    fake: FakeDevice, kind: str, dtype: Dtype
) -> None:
    array = of_bytes(kind, np.arange(6, dtype=np.uint8), dtype)
    uint8 = np.uint8 if kind == "numpy" else torch.uint8
    with pytest.raises(fe.KernelError) as caught:
        run(kernel(), array, output_dtypes=[uint8])
    assert str(caught.value) == (
        f"[metal_kernel] input 'a0' of kernel 'copy': {dtype.name} is a type that neither Metal "
        "nor MLX has, so no metal_kernel takes it; give its bytes, such as x.view(torch.uint8) or "
        "x.view(np.uint8)."
    )
    (out,) = run(kernel(), array.view(uint8))
    assert bytes_of(out.view(array.dtype)) == bytes(range(6))


def test_numpy_subclasses_are_arrays(fake: FakeDevice, tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(3,))
    mapped[...] = 2

    class Named(np.ndarray[Any, Any]):
        pass

    for array in (mapped, np.ones((2, 3), np.float32).view(Named)):
        (out,) = run(kernel(), array)
        assert type(out) is np.ndarray
        np.testing.assert_array_equal(out, np.asarray(array))


# -- torch -------------------------------------------------------------------------------------


def test_torch_tensors_that_require_grad_are_refused(fake: FakeDevice) -> None:
    leaf = torch.ones(3, requires_grad=True)
    for tensor in (leaf, leaf * 2, torch.nn.Parameter(torch.ones(3))):
        with pytest.raises(fe.KernelError) as caught:
            run(kernel(), tensor)
        for word in ("'a0'", "'copy'", "ferrule.op", "no_grad()", ".detach()", "autograd.Function"):
            assert word in str(caught.value)
    assert not fake.launches
    with torch.no_grad():
        (out,) = run(kernel(), leaf * 2)
    assert out.tolist() == [2, 2, 2]
    assert not out.requires_grad
    assert run(kernel(), leaf.detach())[0].tolist() == [1, 1, 1]
    with torch.inference_mode():
        assert run(kernel(), torch.ones(2))[0].tolist() == [1, 1]


def test_a_kernel_inside_an_autograd_function(fake: FakeDevice) -> None:
    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = run(kernel(), x)[0]
            return out

        @staticmethod
        def backward(ctx: Any, *cotangents: torch.Tensor) -> torch.Tensor:
            return 5 * cotangents[0]

    x = torch.ones(3, requires_grad=True)
    function: Any = Copy
    function.apply(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [5, 5, 5]


def test_lazy_conjugates_and_negatives_are_resolved(fake: FakeDevice) -> None:
    x = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    lazy = x.conj()
    negative = lazy.imag
    assert lazy.is_conj()
    assert negative.is_neg()
    for contiguous in (True, False):
        for tensor in (lazy, negative):
            (out,) = run(kernel(contiguous), tensor)
            assert out.tolist() == tensor.tolist()
            assert fake.launches[-1][2].copies == (0,)


def _fake_tensor() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


def _quantised() -> torch.Tensor:
    with warnings.catch_warnings():  # until torch 2.13 it is deprecated
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)


def _nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_fake_tensor, r"is a torch\..*FakeTensor.*outside of export"),
        (lambda: torch.ones(3, device="meta"), "is a meta tensor, which has no values"),
        (lambda: torch.ones(3).to_sparse(), r"of layout torch\.sparse_coo.*to_dense"),
        (lambda: torch.ones(3).to_mkldnn(), r"of layout torch\._mkldnn"),
        (_quantised, r"quantised \(torch\.quint8\)"),
        (lambda: _nested(torch.strided), "is nested"),
        (lambda: _nested(torch.jagged), "NestedTensor"),
    ],
    ids=["fake", "meta", "sparse", "mkldnn", "quantised", "nested", "jagged"],
)
def test_torch_tensors_without_plain_memory_are_refused(
    fake: FakeDevice, make: Callable[[], torch.Tensor], message: str
) -> None:
    with pytest.raises(fe.KernelError, match=f"input 'a0' of kernel 'copy' .*{message}"):
        run(kernel(), make(), output_shapes=[(3,)], output_dtypes=[torch.float32])
    assert not fake.launches


@pytest.mark.filterwarnings("ignore")
def test_torch_transforms_and_tracers_are_refused(fake: FakeDevice) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def f(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = run(kernel(), x)[0]
        return out * 2

    x, jit = torch.ones(3), cast(Any, torch.jit)
    transforms: dict[str, Callable[[], Any]] = {
        "grad": lambda: torch.func.grad(lambda x: f(x).sum())(x),
        "vmap": lambda: torch.func.vmap(f)(torch.ones(2, 3)),
        "jvp": lambda: torch.func.jvp(f, (x,), (x,)),
        "functionalize": lambda: torch.func.functionalize(f)(x),
        "make_fx": lambda: make_fx(f)(x),
        "make_fx, fake": lambda: make_fx(f, tracing_mode="fake")(x),
        "jit.trace": lambda: jit.trace(f, x),
        "export": lambda: torch.export.export(_Module(f), (x,), strict=False),
    }
    for name, transform in transforms.items():
        with pytest.raises(fe.KernelError, match="input 'a0' of kernel 'copy' "):
            transform()
            pytest.fail(f"{name} was not refused")
    assert not fake.launches


class _Module(torch.nn.Module):
    def __init__(self, f: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.f(x)


def test_forward_mode_tangents_are_refused(fake: FakeDevice) -> None:
    fw: Any = torch.autograd.forward_ad
    with fw.dual_level():
        dual = fw.make_dual(torch.ones(3), torch.ones(3))
        with pytest.raises(fe.KernelError, match="forward-mode tangent"):
            run(kernel(), dual)
        assert run(kernel(), fw.unpack_dual(dual).primal)[0].tolist() == [1, 1, 1]
        assert run(kernel(), torch.ones(2))[0].tolist() == [1, 1]


def test_outputs_under_a_fake_mode_are_refused(fake: FakeDevice) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with (
        FakeTensorMode(),
        pytest.raises(fe.KernelError, match=r"output 'out0' of kernel 'copy' is a .*FakeTensor"),
    ):
        run(kernel(), 3, output_shapes=[(1,)], output_dtypes=[torch.float32])
    assert not fake.launches


def test_torch_compile_breaks_the_graph_around_a_call(fake: FakeDevice) -> None:
    k = kernel()

    def f(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = run(k, x + 1)[0]
        return out * 2

    torch._dynamo.reset()
    compiled = torch.compile(f, backend="eager")
    assert compiled(torch.ones(3)).tolist() == [4, 4, 4]
    assert compiled(torch.ones(5)).tolist() == [4] * 5
    assert len(fake.launches) == 2
    torch._dynamo.reset()
    with pytest.raises(Exception, match="no shape rule, so it runs eagerly"):
        torch.compile(f, backend="eager", fullgraph=True)(torch.ones(3))


def test_torch_takes_no_stream_on_the_cpu(fake: FakeDevice) -> None:
    with pytest.raises(fe.KernelTypeError, match="`stream` of kernel 'copy' is 3 of type int"):
        run(kernel(), torch.ones(2), stream=3)
    run(kernel(), torch.ones(2), stream=None)
    assert fake.streams == [0]


def test_torch_subclasses_without_dispatch_are_tensors(fake: FakeDevice) -> None:
    class Named(torch.Tensor):
        pass

    (out,) = run(kernel(), torch.ones(3).as_subclass(Named))
    assert type(out) is torch.Tensor
    assert out.tolist() == [1, 1, 1]


# -- MLX ---------------------------------------------------------------------------------------


def test_mlx_inputs_are_evaluated_and_not_copied(fake: FakeDevice) -> None:
    x = mx.arange(6, dtype=mx.int32) + 1  # not evaluated yet
    (out,) = run(kernel(), x)
    assert out.tolist() == [1, 2, 3, 4, 5, 6]
    before = mlx_host.facts(x)
    assert before is not None
    assert fake.launches[0][0][0] == before


def test_mlx_outputs_are_ordinary_arrays(fake: FakeDevice) -> None:
    x = mx.array([1.0, 2.0])
    one, two = run(kernel(inputs=2), x, x)
    total = one + 2 * two
    assert total.tolist() == [3, 6]
    assert mx.compile(lambda a: a * 2)(one).tolist() == [2, 4]
    assert mx.grad(lambda a: (a * a).sum())(one).tolist() == [2, 4]
    results = fake.launches[0][1]
    assert results[0].pointer != results[1].pointer


def test_mlx_outputs_do_not_keep_the_inputs_alive(fake: FakeDevice) -> None:
    mx.clear_cache()
    x = mx.ones((1 << 20,))
    mx.eval(x)
    used = mx.get_active_memory()
    (out,) = run(kernel(), x)
    del x
    gc.collect()
    assert out.shape == (1 << 20,)
    assert mx.get_active_memory() <= used + 4096


def test_mlx_gradients_through_a_kernel_are_refused_and_never_zero(fake: FakeDevice) -> None:
    k = kernel()

    def f(x: mx.array) -> mx.array:
        out: mx.array = run(k, x)[0]
        return (out * x).sum()

    x = mx.array([1.0, 2.0])
    message = "kernel 'copy' has no derivative.*mx.stop_gradient.*mx.custom_function"
    with pytest.raises(fe.KernelError, match=message):
        mx.grad(f)(x)
    with pytest.raises(fe.KernelError, match=message):
        mx.jvp(f, [x], [x])
    stopped = mx.grad(lambda x: (run(k, mx.stop_gradient(x))[0] * x).sum())(x)
    assert stopped.tolist() == [1, 2]
    assert mx.grad(lambda y: (run(k, x)[0] * y).sum())(x).tolist() == [1, 2]


def test_an_op_without_nodes_says_why_it_has_no_derivative(fake: FakeDevice) -> None:
    op = fe.op(
        "twice", "x[N]:T -> y[N]:T", metal="y[thread_position_in_grid.x] = 1;", grid="N",
        threadgroup=1,
    )  # fmt: skip
    op.def_vjp(lambda primals, cotangents, outputs: cotangents)
    with pytest.raises(
        fe.KernelError, match=r"^op 'twice' has no derivative.*nodes cannot be built"
    ):
        mx.grad(lambda x: op(x).sum())(mx.ones((3,)))


def test_a_kernel_inside_an_mlx_custom_function(fake: FakeDevice) -> None:
    def forward(x: mx.array) -> mx.array:
        out: mx.array = run(kernel(), x)[0]
        return out

    f: Any = mx.custom_function(forward)

    f.vjp(lambda primals, cotangent, output: 5 * cotangent)
    assert mx.grad(lambda x: f(x).sum())(mx.ones((3,))).tolist() == [5, 5, 5]


def test_mlx_transforms_are_refused(fake: FakeDevice) -> None:
    def f(x: mx.array) -> mx.array:
        out: mx.array = run(kernel(), x)[0]
        return out

    x = mx.ones((2, 3))
    for transform in (
        lambda: mx.vmap(f)(x),
        lambda: mx.compile(f)(x),
        lambda: mx.compile(f, shapeless=True)(x),
        lambda: mx.export_function(lambda event: None, f, x),
    ):
        with pytest.raises(
            fe.KernelError, match=r"'a0' of kernel 'copy' stands for a value inside mx\.compile"
        ):
            transform()
    assert not fake.launches


def test_mlx_constants_inside_transforms_are_allowed(fake: FakeDevice) -> None:
    x = mx.array([1.0, 2.0])
    assert mx.compile(lambda y: y + run(kernel(), x)[0])(x).tolist() == [2, 4]


@pytest.mark.parametrize(
    "stream", [None, mx.cpu, mx.gpu, mx.default_stream(mx.cpu), mx.Device(mx.cpu)], ids=str
)
def test_mlx_streams_and_devices_are_accepted(fake: FakeDevice, stream: Any) -> None:
    assert run(kernel(), mx.ones((2,)), stream=stream)[0].tolist() == [1, 1]
    assert fake.streams == [0]


@pytest.mark.parametrize("kind", ["mlx", "numpy"])
def test_other_streams_are_refused(fake: FakeDevice, kind: str) -> None:
    array = of_kind(kind, np.ones(2, np.float32))
    with pytest.raises(fe.KernelTypeError, match=r"`stream` of kernel 'copy' is 'cpu'.* None"):
        run(kernel(), array, stream="cpu")
    assert not fake.launches


# -- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_an_output_that_cannot_be_allocated_is_an_error_with_its_size(
    fake: FakeDevice, kind: str
) -> None:
    array = of_kind(kind, np.ones(2, np.float32))
    shape = (2**30, 2**30)
    with pytest.raises(fe.KernelError) as caught:
        run(kernel(), array, output_shapes=[shape])
    for word in ("'copy'", "'out0'", str(shape), str(2**62), "float32", hosts.load(kind).name):
        assert word in str(caught.value)
    assert not fake.launches


def test_sizes_beyond_int32_are_refused_where_the_body_reads_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = fake_device.install(monkeypatch)
    wide = np.broadcast_to(np.float32(1), (2**31,))
    k = fe.metal_kernel(
        "reads", ["a"], ["out"], "out[0] = a_shape[0];", ensure_row_contiguous=False
    )
    with pytest.raises(fe.KernelError, match=r"\(2147483648,\).*a_shape.*at most 2147483647"):
        run(k, wide, output_shapes=[(1,)])
    run(kernel(contiguous=False), wide, output_shapes=[(1,)])
    assert fake.launches[0][0][0].shape == (2**31,)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_scalars_live_until_the_launch_and_no_longer(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    host = hosts.load(kind)
    alive: list[weakref.ref[Any]] = []
    during: list[bool] = []
    real = host.contiguous

    def contiguous(array: Any) -> Any:
        copied = real(array)
        alive.append(weakref.ref(copied))
        return copied

    monkeypatch.setattr(host, "contiguous", contiguous)

    def body(inputs: list[Any], outputs: list[Any]) -> None:
        gc.collect()
        during.append(alive[0]() is not None)
        copy_all(inputs, outputs)

    fake_device.install(monkeypatch, body)
    array = of_kind(kind, numbers((3, 4), dtypes.float32))
    turned = array.permute(1, 0) if kind == "torch" else array.transpose(1, 0)
    (out,) = run(kernel(), turned)
    np.testing.assert_array_equal(as_numpy(out), numbers((3, 4), dtypes.float32).T)
    gc.collect()
    assert during == [True]
    assert alive[0]() is None


@pytest.mark.parametrize("kind", KINDS)
def test_calls_from_several_threads(fake: FakeDevice, kind: str) -> None:
    k = kernel()
    faults: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(20):
                values = numbers((seed + 1, i + 1), dtypes.float32) + seed
                (out,) = run(k, of_kind(kind, values))
                np.testing.assert_array_equal(as_numpy(out), values)
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


# -- the seam ----------------------------------------------------------------------------------


def test_hosts_are_found_by_type() -> None:
    assert hosts.find(np.ndarray) is numpy_host
    assert hosts.find(np.memmap) is numpy_host
    assert hosts.find(torch.nn.Parameter) is torch_host
    assert hosts.find(mx.array) is mlx_host
    for kind in (int, list, np.float32, type(None), memoryview):
        assert hosts.find(kind) is None


def test_facts_of_a_contiguous_copy_are_never_unknown() -> None:
    for dtype in LEVEL0:
        array = numbers((2, 3), dtype)[:, ::-1].astype(dtype.numpy.newbyteorder())
        facts = numpy_host.facts(numpy_host.contiguous(array))
        assert facts is not None
        assert is_row_contiguous(facts.shape, facts.strides)


def test_a_missing_device_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch_host.facts

    def facts(tensor: torch.Tensor) -> Facts | None:
        found = real(tensor)
        return None if found is None else found._replace(device="xpu:0")

    monkeypatch.setattr(torch_host, "facts", facts)
    monkeypatch.setattr(torch_host, "empty", lambda s, d, device: torch.empty(s))
    with pytest.raises(fe.DeviceError, match="'xpu:0'"):
        run(kernel(), torch.ones(2))


def test_kernels_can_be_copied_with_the_modules_that_hold_them(fake: FakeDevice) -> None:
    k = kernel()
    run(k, np.ones(2, np.float32))
    twin = copy.deepcopy(k)
    assert twin.kernel == k.kernel
    assert run(twin, np.ones(2, np.float32))[0].tolist() == [1, 1]


_LOADED = """
import sys
{first}
import ferrule
kernel = ferrule.metal_kernel("k", ["a"], ["out"], "out[0] = a[0];")
kernel.text("metal", inputs=["float32[4]"], output_dtypes=[ferrule.float32])
weighty = {{"torch", "mlx", "cuda", "jax", "ml_dtypes"}}
print(sorted({{m.partition(".")[0] for m in sys.modules}} & weighty))
"""


@pytest.mark.parametrize(("first", "expected"), [("", "[]"), ("import mlx.core", "['mlx']")])
def test_importing_ferrule_imports_no_framework(first: str, expected: str) -> None:
    """The second case shows that the test sees a framework that was imported."""
    done = subprocess.run(
        [sys.executable, "-c", _LOADED.format(first=first)],
        capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert done.stdout.strip() == expected
