"""Implementations with a condition of their own, as they are written: `metal_body` and
`run_function`; those in CUDA are in `operators.unit_parts`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import KernelTypeError


@dataclass(frozen=True)
class MetalBody:
    """One Metal body with its launch: what `metal_body` returns."""

    source: Any
    grid: Any
    threadgroup: Any
    when: Any
    template: Any
    init_value: Any
    header: str
    ensure_row_contiguous: bool
    atomic_outputs: bool
    compile_options: Any
    portable: bool
    function: str | None


@dataclass(frozen=True)
class RunFunction:
    """A Python function and the condition under which it is chosen: what `run_function` returns."""

    function: Callable[..., Any]
    when: Any
    prepared: Any = None
    state: Any = None


def metal_body(
    source: str | os.PathLike[str],
    *,
    grid: Any,
    threadgroup: Any,
    when: str | None = None,
    template: Mapping[str, Any] | Sequence[tuple[str, Any]] | None = None,
    init_value: float | str | None = None,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: Mapping[str, str] | None = None,
    portable: bool = False,
    function: str | None = None,
) -> MetalBody:
    """One of an op's Metal bodies, with a launch of its own: for `ferrule.op`'s ``metal``.

    Of several, the first is taken whose ``when`` holds for a call.

    Args:
        source, grid, threadgroup, template, init_value, header, ensure_row_contiguous,
            atomic_outputs, compile_options, portable, function: as in `ferrule.op`: the text of a
            body, or the ``Path`` of a Metal file; threads along x, y and z; and so on.
        when: a condition such as ``"D <= 1024 and T == float16"``; None is always.

    Raises:
        KernelError, KernelTypeError, RuleError: from `ferrule.op`, where something cannot be
            understood.

    Example:
        >>> import ferrule as fe
        >>> sums = fe.op("sums", "x[N,D]:float32 -> y[N]:float32", metal=[
        ...     fe.metal_body("uint i = thread_position_in_grid.x; float sum = 0;"
        ...                   "for (int k = 0; k < D; k++) sum += x[i * D + k]; y[i] = sum;",
        ...                   grid="N", threadgroup=32, when="D < 32"),
        ...     fe.metal_body("uint3 p = thread_position_in_grid; float sum = 0;"
        ...                   "for (int k = p.x; k < D; k += 32) sum += x[p.y * D + k];"
        ...                   "sum = simd_sum(sum); if (p.x == 0) y[p.y] = sum;",
        ...                   grid=(32, "N"), threadgroup=32)])
    """
    return MetalBody(
        source,
        grid,
        threadgroup,
        when,
        template,
        init_value,
        header,
        ensure_row_contiguous,
        atomic_outputs,
        compile_options,
        portable,
        function,
    )


def run_function(
    function: Callable[..., Any],
    *,
    when: str | None = None,
    prepared: Mapping[str, tuple[Any, ...]] | None = None,
    state: Mapping[str, str] | None = None,
) -> RunFunction:
    """One of an op's Python functions, with a condition: for `ferrule.op`'s ``run``.

    Of several, the first is taken whose ``when`` holds for a call.

    Args:
        function: a function of the inputs, as ``run`` in `ferrule.op`.
        when: a condition such as ``"N >= 4096 and T == float32"``; None is always.
        prepared, state: what is made of weights once, and what a stream keeps, as in
            `ferrule.adopt`.

    Raises:
        KernelTypeError: ``function`` cannot be called.
        KernelError, KernelTypeError, RuleError: from `ferrule.op`, where something cannot be
            understood.

    Example:
        >>> import ferrule as fe, numpy as np
        >>> total = fe.op("total", "x[N]:float32 -> y[]:float32",
        ...     run=fe.run_function(lambda x: x.sum(), when="N >= 4096"),
        ...     metal="float sum = 0; for (int i = 0; i < N; i++) sum += x[i]; y[0] = sum;",
        ...     grid=1, threadgroup=1, prefer="run")
    """
    if not callable(function):
        raise KernelTypeError(
            f"[run_function] `function`: got {function!r} of type {type(function).__name__}, "
            "expected a function of the op's inputs."
        )
    return RunFunction(function, when, prepared, state)
