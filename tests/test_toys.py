"""A host and a device that nothing else knows of: each registers itself in dictionaries.

What `docs/architecture.md` says of adding one, done: an array class of its own, and a CPU that
counts launches. They have calls of kernels and eager ops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import ferrule
from ferrule import KernelError
from ferrule.devices import protocol as devices
from ferrule.dtypes import Dtype, of_numpy
from ferrule.hosts import protocol as hosts
from ferrule.spec import Facts, Launch, Shape, Spec

# -- a host ----------------------------------------------------------------------------------------


class Toy:
    """An array of a library of its own: a shape and bytes, on a device."""

    def __init__(self, values: Any, device: str = "cpu") -> None:
        self.values, self.device = np.array(values, order="C"), device

    @property
    def shape(self) -> Shape:
        return self.values.shape

    @property
    def dtype(self) -> Any:
        return self.values.dtype

    def copy(self) -> Toy:
        return Toy(self.values, self.device)


class ToyHost:
    """What `hosts.protocol.Host` asks for."""

    name = "Toy"
    allocation_errors: tuple[type[Exception], ...] = (MemoryError, ValueError)

    def facts(self, array: Toy) -> Facts | None:
        dtype = of_numpy(array.dtype)
        if dtype is None:
            raise hosts.unknown_dtype(array.dtype)
        strides = tuple(step // dtype.itemsize for step in array.values.strides)
        return Facts(dtype, array.shape, strides, array.values.ctypes.data, array.device)

    def contiguous(self, array: Toy) -> Toy:
        return array.copy()

    def empty(self, shape: Shape, dtype: Dtype, device: str) -> Toy:
        return Toy(np.empty(shape, dtype.numpy), device)

    def full(self, shape: Shape, value: float, dtype: Dtype, device: str) -> Toy:
        return Toy(np.full(shape, value, dtype.numpy), device)

    def outside(self, array: Toy) -> int:
        return 0

    def to_numpy(self, array: Toy) -> np.ndarray[Any, Any]:
        return array.values

    def from_numpy(self, values: np.ndarray[Any, Any], dtype: Dtype, device: str) -> Toy:
        return Toy(values.astype(dtype.numpy), device)

    def maker(self, *_: object) -> None:
        return None

    def finish(self, what: str, inputs: Sequence[Any], outputs: list[Toy]) -> list[Toy]:
        return outputs

    def device(self) -> str:
        return "cpu"

    def stream(self, given: object, device: str) -> int:
        return 0


# -- a device --------------------------------------------------------------------------------------


class Counted:
    """A kernel of the CPU, whose launches are counted."""

    def __init__(self, program: devices.Program, counts: Counter[str], name: str) -> None:
        self.program, self.counts, self.name = program, counts, name

    def launch(
        self, inputs: Sequence[Facts], outputs: Sequence[Facts], launch: Launch, stream: int = 0
    ) -> None:
        self.counts[self.name] += 1
        self.program.launch(inputs, outputs, launch, stream)

    def native(self, *_: object) -> Any:
        raise NotImplementedError

    def failure(self, *_: object) -> Any:
        raise NotImplementedError


class Counting:
    """What `devices.protocol.Device` asks for."""

    name = "counting"

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def text(self, spec: Spec, launch: Launch | None = None) -> str:
        return devices.get("cpu").text(spec, launch)

    def compile(self, spec: Spec, launch: Launch | None = None) -> devices.Binary:
        return devices.get("cpu").compile(spec, launch)

    def program(self, spec: Spec) -> Counted:
        return Counted(devices.get("cpu").program(spec), self.counts, spec.kernel.name)

    def packaged(self, *_: object) -> Any:
        raise NotImplementedError


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counting]:
    """Both, registered."""
    device = Counting()
    monkeypatch.setitem(devices.offered, "counting", lambda name: device)
    host = ToyHost()
    monkeypatch.setitem(hosts.offered, "toy", lambda: host)
    monkeypatch.setitem(hosts.arrays, (Toy.__module__, Toy.__qualname__), "toy")
    yield device
    hosts.known.pop(Toy, None)


def double(x: Any) -> Any:
    kernel = ferrule.metal_kernel(
        name="double", input_names=["x", "factor"], output_names=["y"],
        source="uint i = thread_position_in_grid.x; y[i] = factor * x[i];",
    )  # fmt: skip
    (y,) = kernel(
        inputs=[x, 2.0], output_shapes=[x.shape], output_dtypes=[np.float32],
        grid=(x.shape[0], 1, 1), threadgroup=(2, 1, 1),
    )  # fmt: skip
    return y


@pytest.mark.parametrize("where", ["cpu", "counting"])
def test_kernels(counting: Counting, where: str) -> None:
    y = double(Toy(np.arange(5, dtype=np.float32), where))
    assert type(y) is Toy and y.device == where
    assert y.values.tolist() == [0, 2, 4, 6, 8]
    assert counting.counts["double"] == (where == "counting")


@pytest.mark.parametrize("where", ["cpu", "counting"])
def test_eager_ops(counting: Counting, where: str) -> None:
    op = ferrule.op(
        "scaled", "x[N]:T, by:float32, z[N]:T? -> y[N]:T, n[1]:int32", grid="N", threadgroup=4,
        metal="uint i = thread_position_in_grid.x; y[i] = by * x[i] + (has_z ? z[i] : T(0));"
        " if (i == 0) n[0] = N;",
    )  # fmt: skip
    y, n = op(Toy(np.arange(3, dtype=np.float32), where), 3.0, None)
    assert type(y) is Toy and y.values.tolist() == [0, 3, 6] and n.values.tolist() == [3]
    assert (y.device, n.device) == (where, where)
    assert counting.counts["scaled"] == (where == "counting")
    assert op(y, 1.0, y)[0].values.tolist() == [0, 6, 12]
    with pytest.raises(KernelError, match="N is 3 by input 'x'"):
        ferrule.op(
            "pairs", "x[N]:T, y[N]:T -> z[N]:T", grid="N", threadgroup=1,
            metal="z[thread_position_in_grid.x] = 0;",
        )(Toy(np.zeros(3)), Toy(np.zeros(4)))  # fmt: skip


def test_errors_name_them(counting: Counting) -> None:
    with pytest.raises(KernelError, match=r"one of Toy|array of Toy"):
        ferrule.op(
            "pairs", "x[N]:T, y[N]:T -> z[N]:T", grid="N", threadgroup=1,
            metal="z[thread_position_in_grid.x] = 0;",
        )(np.zeros(3, np.float32), Toy(np.zeros(3, np.float32)))  # fmt: skip
    with pytest.raises(ferrule.DeviceError, match="there is no device 'counted'"):
        double(Toy(np.arange(5, dtype=np.float32), "counted"))
