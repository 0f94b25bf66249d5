"""The same launch again, in other orders and other threadgroups, and with other values where none
is defined: its results should be the same."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..dtypes import Dtype
from ..kernel import Kernel
from ..spec import Facts, Launch

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
# What sums of floats in another order may differ by, of the largest number.
_TOLERANCE = {"float16": 1e-2, "bfloat16": 5e-2, "float32": 1e-4, "float64": 1e-8}


def bytes_of(facts: Sequence[Facts]) -> list[Bytes]:
    """Copies of row-contiguous arrays' memory."""
    return [
        np.frombuffer(ctypes.string_at(fact.pointer, fact.size * fact.dtype.itemsize), np.uint8)
        for fact in facts
    ]


def variants(launch: Launch) -> Iterator[tuple[str, Launch, bool]]:
    """Other ways to run a launch: what is different, the launch, and whether threads run in the
    opposite order."""
    yield "with its threads in the opposite order", launch, True
    x, y, z = launch.threadgroup
    step = 32 if x % 32 == 0 else 1  # whole simdgroups stay whole
    for width in (x // 2 // step * step, min(2 * x, 1024 // (y * z) // step * step)):
        other = min(max(width, step), launch.grid[0])
        if other != x:
            group = (other, y, z)
            yield f"with threadgroups of {group}", launch._replace(threadgroup=group), False


def differences(
    kernel: Kernel,
    outputs: Sequence[Facts],
    before: Sequence[Bytes],
    run: Callable[[Sequence[Facts], Launch, bool], object],
    launch: Launch,
) -> Iterator[str]:
    """How the results of other ways differ from those that the outputs have.

    Args:
        kernel: what is run.
        outputs: row-contiguous arrays, as the launch left them.
        before: what was in their memory before it.
        run: runs it with other outputs.
        launch: the launch.
    """
    expected = bytes_of(outputs)
    for what, other, reverse in variants(launch):
        copies = [values.copy() for values in before]
        run(_in(copies, outputs), other, reverse)
        names = kernel.output_names
        for name, fact, mine, theirs in zip(names, outputs, expected, copies, strict=True):
            if (told := _difference(fact.dtype, mine, theirs)) is not None:
                at, first, second = told
                yield f"output {name}[{at}] is {first}, and {what} it is {second}."


def changes(
    outputs: Sequence[Facts],
    before: Sequence[Bytes],
    run: Callable[[Sequence[Facts], int], bool],
    values: Sequence[int],
) -> bool:
    """Whether results change with a value that an operation gives.

    Args:
        outputs: row-contiguous arrays, as the launch left them.
        before: what was in their memory before it.
        run: runs it with other outputs and one of the values; False where it does not end.
        values: other values.
    """
    expected = bytes_of(outputs)
    for value in values:
        copies = [kept.copy() for kept in before]
        if not run(_in(copies, outputs), value) or not all(map(np.array_equal, copies, expected)):
            return True
    return False


def _in(copies: Sequence[Bytes], outputs: Sequence[Facts]) -> list[Facts]:
    """The outputs in other memory."""
    return [
        fact._replace(pointer=copy.ctypes.data) for fact, copy in zip(outputs, copies, strict=True)
    ]


def _difference(dtype: Dtype, mine: Bytes, theirs: Bytes) -> tuple[int, object, object] | None:
    """The first element that differs, and both values."""
    a, b = mine.view(dtype.numpy), theirs.view(dtype.numpy)
    if dtype.kind in "fc" and dtype.name in (*_TOLERANCE, "complex64"):
        wide = np.complex128 if dtype.kind == "c" else np.float64
        x, y = a.astype(wide), b.astype(wide)
        finite = np.abs(x[np.isfinite(x)])
        limit = _TOLERANCE.get(dtype.name, 1e-4) * max(float(finite.max(initial=0)), 1e-30)
        with np.errstate(invalid="ignore"):
            same = (np.abs(x - y) <= limit) | (x == y) | (np.isnan(x) & np.isnan(y))
    else:
        same = a == b
    if same.all():
        return None
    at = int(np.argmin(same))
    return at, a[at], b[at]
