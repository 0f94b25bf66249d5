"""CUDA implementations of ops, checked on the CPU: a function that a unit launches is a kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes
from ..devices.cpu.program import device as cpu
from ..devices.protocol import Program, UnitKernels
from ..dtypes import Dtype
from ..errors import DeviceError
from ..kernel import Kernel
from ..source.cuda import on_cpu
from ..spec import Facts, Input, Launch, Spec, row_contiguous_strides
from ..unit import Copy, Fill, Product, Run, Step, TensorMap, UnitSpec
from .launches.watched import Call

ArraysAt = Mapping[str, tuple[int, Dtype, int]]  # address, dtype and elements of each array


class UnitLaunch(NamedTuple):
    """A function's launch, as if it were a kernel's.

    Attributes:
        call: whose spec has names and dtypes of what it takes: inputs and numbers, then what it
            may write.
        keep: what owns the numbers.
    """

    call: Call
    keep: object


def launches(
    spec: UnitSpec, steps: Sequence[Step], places: ArraysAt, inputs: Collection[str],
    run: Callable[[UnitLaunch, str], None],
) -> None:  # fmt: skip
    """Carry out a unit's steps in the memory of this process.

    Args:
        spec, steps: the unit, and its steps with addresses.
        places: its arrays by name.
        inputs: those that a function may not write.
        run: is given each function's launch, and its name.

    Raises:
        DeviceError: a step is one that the CPU has not.
    """
    names = {address: name for name, (address, _, count) in places.items() if count}
    written: set[str] = set()
    for step in steps:
        if isinstance(step, Fill):
            ctypes.memmove(step.address, step.pattern * step.times, len(step.pattern) * step.times)
            written.add(names.get(step.address, ""))
        elif isinstance(step, Copy):
            ctypes.memmove(step.to, step.source, step.size)
            written.add(names.get(step.to, ""))
        elif isinstance(step, Product):
            _multiply(spec, step)
            written.add(names.get(step.addresses[2], ""))
        else:
            made = _launch(spec, step, places, names, inputs, written)
            run(made, step.function)
            written.update(made.call.spec.kernel.output_names)


def _launch(
    spec: UnitSpec, step: Run, places: ArraysAt, names: Mapping[int, str], inputs: Collection[str],
    written: Collection[str],
) -> UnitLaunch:  # fmt: skip
    call = next(call for call in spec.calls if call.function == step.function)
    maps = any(isinstance(value, TensorMap) for value in step.arguments)
    if step.cluster not in (None, (1, 1, 1)) or maps:
        raise DeviceError(f"unit {spec.name!r}: {step.function} is for NVIDIA GPUs alone.")
    taken: list[str] = []  # a name of each argument; numbers' have a space
    numbers: dict[str, Facts] = {}
    kept: list[Any] = []
    for value, (label, kind) in zip(step.arguments, call.arguments, strict=True):
        if isinstance(value, TensorMap):
            continue
        if kind == "pointer":
            taken.append(names.get(int.from_bytes(value, "little"), ""))
            continue
        kept.append(ctypes.create_string_buffer(value, 8))
        taken.append(f"{label} {len(taken)}")
        number = dtypes.BY_NAME[kind]
        numbers[taken[-1]] = Facts(number, (), (), ctypes.addressof(kept[-1]), "cpu")
    arrays = [name for name in dict.fromkeys(taken) if name and name not in numbers]
    reads = [*numbers, *(name for name in arrays if name in inputs)]
    writes = [name for name in arrays if name not in inputs]
    writes.sort(key=lambda name: name in written)
    facts = {**numbers, **{name: _facts(places[name]) for name in arrays}}
    all_names = [*reads, *writes]
    kernel = Kernel(
        spec.name, tuple(name.partition(" ")[0] for name in reads), tuple(writes), spec.source,
        language="cuda", shared_memory=step.shared,
    )  # fmt: skip
    given, results = [facts[name] for name in reads], [facts[name] for name in writes]
    described = tuple(Input(fact.dtype, len(fact.shape)) for fact in given)
    x, y, z = (b * t for b, t in zip(step.blocks, step.block, strict=True))
    launch = Launch(
        (x, y, z), step.block, tuple(fact.shape for fact in results), None, (),
        in_place=sum(name in written for name in writes),
    )  # fmt: skip
    order = [all_names.index(name) if name else -1 for name in taken]
    as_kernel = Spec(kernel, described, tuple(fact.dtype for fact in results), ())
    return UnitLaunch(Call(as_kernel, given, results, launch, order), kept)


def _facts(place: tuple[int, Dtype, int]) -> Facts:
    address, dtype, count = place
    return Facts(dtype, (count,), row_contiguous_strides((count,)), address, "cpu")


def _multiply(spec: UnitSpec, p: Product) -> None:
    """Do a matrix product, which is cuBLAS's on a GPU."""
    a, b, out, _, *factors = p.addresses
    if any(factors):
        raise DeviceError(f"unit {spec.name!r}: {p.label} has factors in memory; the CPU has not.")
    wide = np.float64 if p.dtype == "float64" else np.int32 if p.dtype == "int8" else np.float32

    def matrices(address: int, step: int, rows: int, columns: int, name: str) -> Any:
        kind = dtypes.BY_NAME[name]
        count = step * (p.batch - 1) + rows * columns
        memory = (ctypes.c_char * (count * kind.itemsize)).from_address(address)
        flat = np.frombuffer(memoryview(memory), kind.numpy)
        item = kind.itemsize
        strides = (step * item, columns * item, item)
        return np.lib.stride_tricks.as_strided(flat, (p.batch, rows, columns), strides)

    left = matrices(a, p.step_a, *((p.k, p.m) if p.transpose_a else (p.m, p.k)), p.dtype)
    right = matrices(b, p.step_b, *((p.n, p.k) if p.transpose_b else (p.k, p.n)), p.dtype)
    left = left.swapaxes(1, 2) if p.transpose_a else left
    right = right.swapaxes(1, 2) if p.transpose_b else right
    alpha, beta = p.factors
    result = matrices(out, p.m * p.n, p.m, p.n, p.out_dtype)
    product = alpha * np.matmul(left.astype(wide), right.astype(wide))
    if beta:
        product = product + beta * result.astype(wide)
    result[...] = product.astype(result.dtype)


class CudaOnCpu:
    """A GPU of `source.cuda.on_cpu.CAPABILITY` that is the CPU: for what is checked."""

    capability = on_cpu.CAPABILITY

    def __init__(self, name: str) -> None:
        self.name = name

    def program(self, spec: Spec) -> Program:
        """A kernel; one in CUDA is run by who watches."""
        return cpu().program(spec)

    def unit_program(self, spec: UnitSpec) -> _Unit:
        """A unit."""
        return _Unit(spec)

    def _none(self, *_: object) -> Any:
        raise DeviceError(f"{self.name} is for kernels that are checked.")

    text = compile = packaged = unit_binary = carry = _none


class _Unit:
    """A unit that is run by who watches."""

    def __init__(self, spec: UnitSpec) -> None:
        self._spec = spec

    def kernels(self, *_: object) -> UnitKernels | None:
        """Nothing: calls say what their arrays are."""
        return None

    def launch(self, steps: Sequence[Step], stream: int) -> None:
        """Refuse, for the arrays are not known."""
        raise DeviceError(f"unit {self._spec.name!r} is not checked in this call.")

    def launch_over(self, steps: Sequence[Step], places: ArraysAt, inputs: Collection[str]) -> None:
        """Run the steps, watched, with these arrays."""
        from ..devices import protocol

        if protocol.watcher is None:
            raise DeviceError(f"unit {self._spec.name!r}: nobody checks it any more.")
        protocol.watcher.unit(self._spec, steps, places, inputs)
