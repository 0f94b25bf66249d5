"""CUDA implementations of an op beyond one body, as they are written: `cuda_body` and `cuda_unit`.

A body has a launch of its own, so that an op can have several. A unit is a whole CUDA translation
unit, whose functions are launched in steps, with memory of their own between them. What is written
here is checked when `ferrule.op` binds it to a rule (`operators.bodies`, `operators.unit_steps`);
steps are data before and after, and what a call launches is `ferrule.unit.Step`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from ..errors import KernelTypeError
from ..rules.expression import Expression
from .expressions import expression_from_json, to_json
from .unit_maps import MapArgument, map_from_json, map_to_json

Value = Any  # an int, a text or an `Expression`


@dataclass(frozen=True)
class CudaBody:
    """One CUDA body with its launch: what `cuda_body` returns."""

    source: str
    grid: Any
    threadgroup: Any
    when: Value | None
    template: Any
    init_value: Any
    shared_memory: Value
    header: str
    ensure_row_contiguous: bool
    pdl: bool = False


class StepArgument(NamedTuple):
    """An argument of a function, bound to a rule.

    Attributes:
        kind: ``"array"``, ``"number"``, ``"tensor_map"``, or the full name of an expression's
            dtype.
        value: the name, the map, or the expression.
    """

    kind: str
    value: str | Expression | MapArgument


@dataclass(frozen=True)
class RunStep:
    """A launch of a function: what `cuda_step` returns, and the same bound to a rule: then its
    sizes and condition are expressions, its arguments each a `StepArgument`."""

    function: str
    arguments: tuple[Any, ...]
    blocks: Any
    block: Any
    shared_memory: Value
    cluster: Any
    when: Value | None
    pdl: bool = False


@dataclass(frozen=True)
class FillStep:
    """A fill of an array: what `cuda_fill` returns, also where it is bound to a rule."""

    array: str
    value: float
    when: Value | None


@dataclass(frozen=True)
class CopyStep:
    """A copy of an array: what `cuda_copy` returns, also where it is bound to a rule."""

    to: str
    source: str
    when: Value | None


@dataclass(frozen=True)
class MatmulStep:
    """A matrix product: what `cuda_matmul` returns, also where it is bound to a rule."""

    out: str
    a: str
    b: str
    transpose_a: bool
    transpose_b: bool
    alpha: float | str
    beta: float | str
    tf32: bool
    when: Value | None
    factors: str | None = None


UnitStep = RunStep | FillStep | CopyStep | MatmulStep
_SIZES = ("blocks", "block", "shared_memory", "cluster")


def touched(step: UnitStep) -> set[str]:
    """The arrays that a step may write, once it is bound to a rule."""
    if isinstance(step, RunStep):
        values = [argument.value for argument in step.arguments if argument.kind != "number"]
        maps = {value.array for value in values if isinstance(value, MapArgument)}
        return {value for value in values if isinstance(value, str)} | maps
    if isinstance(step, MatmulStep):
        return {step.out}
    return {step.array if isinstance(step, FillStep) else step.to}


def step_to_json(step: UnitStep) -> Any:
    """All that decides what a step does, once it is bound to a rule."""
    when = to_json(step.when)
    if isinstance(step, FillStep):
        # By its text, for JSON has no infinities.
        return {"fill": step.array, "value": repr(step.value), "when": when}
    if isinstance(step, CopyStep):
        return {"copy": step.source, "to": step.to, "when": when}
    if isinstance(step, MatmulStep):
        declared = asdict(replace(step, when=None))
        if step.factors is None:
            del declared["factors"]  # digests are older
        return {"matmul": declared, "when": when}
    arguments = [
        [kind, map_to_json(value) if isinstance(value, MapArgument) else to_json(value)]
        for kind, value in step.arguments
    ]
    sizes = {name: to_json(getattr(step, name)) for name in _SIZES}
    data = {"run": step.function, "arguments": arguments, **sizes, "when": when}
    return data | ({"pdl": True} if step.pdl else {})


def step_from_json(data: Any) -> UnitStep:
    """The reverse of `step_to_json`: as it might be written, and as yet unchecked."""
    when = expression_from_json(data["when"])
    if "fill" in data:
        text = data["value"]
        value = int(text) if re.fullmatch(r"-?\d+", text) else float(text)
        return FillStep(data["fill"], value, when)
    if "copy" in data:
        return CopyStep(data["to"], data["copy"], when)
    if "matmul" in data:
        return MatmulStep(**{**data["matmul"], "when": when})
    arguments = tuple(
        value
        if isinstance(value, str)
        else map_from_json(value)
        if isinstance(value, dict)
        else f"{kind} {expression_from_json(value)}"
        for kind, value in data["arguments"]
    )
    sizes = {name: expression_from_json(data[name]) for name in _SIZES}
    return RunStep(data["run"], arguments, when=when, pdl=data.get("pdl", False), **sizes)


@dataclass(frozen=True)
class UnitText:
    """A CUDA translation unit and its steps: what `cuda_unit` returns."""

    source: str
    steps: tuple[UnitStep, ...]
    scratch: Any
    when: Value | None
    template: Any
    headers: Any
    options: Any
    specific: Any = False
    state: Any = None


def _check_bool(label: str, value: object) -> None:
    if not isinstance(value, bool):
        raise KernelTypeError(f"{label}: got {value!r}, expected a bool.")


def cuda_body(
    source: str,
    *,
    grid: Any,
    threadgroup: Any,
    when: str | None = None,
    template: Mapping[str, Any] | Sequence[tuple[str, Any]] | None = None,
    init_value: float | str | None = None,
    shared_memory: int | str = 0,
    header: str = "",
    ensure_row_contiguous: bool = True,
    pdl: bool = False,
) -> CudaBody:
    """One of an op's CUDA bodies, with a launch of its own: for `ferrule.op`'s ``cuda``.

    Of several, the first is taken whose ``when`` holds for the sizes of a call.

    Args:
        source: the body of a CUDA ``__global__`` function: docs/cuda_kernel.md. Arrays are
            pointers; numbers, and the dims that it names, are values.
        grid: **threads** along x, y and z, as Metal counts them: one to three ints or expressions.
            Blocks are whole: the body must stop threads beyond the grid.
        threadgroup: threads of a block along x, y and z, likewise; 1024 at most, 64 along z.
        when: a condition such as ``"M <= 16 and T == float16"``; None is always.
        template: further constants of the body: ints, expressions, bools, dtypes.
        init_value: what outputs are filled with before the launch: a number or expression.
        shared_memory: bytes of dynamic shared memory per block: an int or expression.
        header: text placed before the function.
        ensure_row_contiguous: copy inputs that are not row-contiguous first.
        pdl: as for `cuda_step`.

    Raises:
        KernelTypeError: ``pdl`` is no bool.
        KernelError, KernelTypeError, RuleError: from `ferrule.op`, where something cannot be
            understood.

    Example:
        >>> import ferrule as fe
        >>> double = fe.op("double", "x[N]:T -> y[N]:T", cuda=[
        ...     fe.cuda_body("int i = threadIdx.x; y[i] = x[i] + x[i];",
        ...                  grid="N", threadgroup="N", when="0 < N <= 1024"),
        ...     fe.cuda_body("int i = blockIdx.x * 256 + threadIdx.x;"
        ...                  "if (i < N) y[i] = x[i] + x[i];", grid="N", threadgroup=256)])
    """
    _check_bool("[cuda_body] `pdl`", pdl)
    return CudaBody(
        source,
        grid,
        threadgroup,
        when,
        template,
        init_value,
        shared_memory,
        header,
        ensure_row_contiguous,
        pdl,
    )


def cuda_step(
    function: str,
    arguments: Sequence[str | int | MapArgument],
    *,
    blocks: Any,
    block: Any,
    shared_memory: int | str = 0,
    cluster: Any = None,
    when: str | None = None,
    pdl: bool = False,
) -> RunStep:
    """A step of a `cuda_unit` that launches one of its functions.

    Args:
        function: the name of a ``__global__`` function, or an expression that names one, such as
            ``"gemm<BLOCK, T>"``, of the unit's template parameters and constants.
        arguments: what it takes, in order, by name: an input, output or scratch array (a pointer;
            null where an optional input is absent), a number of the rule (its declared type), or an
            int or expression of dims, ``x.size`` and ``x.ndim``, which is passed as int32, or as
            what stands before it: ``"int64 M*N"``; also uint32, uint64; a condition is a bool; or
            a `cuda_tensor_map`.
        blocks: **blocks** of the grid along x, y and z, as CUDA counts them (not threads): one to
            three ints or expressions. A step without blocks is left out.
        block: threads of a block along x, y and z, likewise; 1024 at most, 64 along z.
        shared_memory: bytes of dynamic shared memory per block: an int or expression. What is
            beyond 48 KB is asked for.
        cluster: blocks of a cluster along x, y and z (compute capability 9.0 and newer), 8 at most,
            which divide ``blocks``; None for none, or for what ``__cluster_dims__`` says.
        when: a condition, without which the step is left out.
        pdl: programmatic dependent launch: the function may begin before the kernel ahead of it on
            the stream has ended. All its threads wait for that, by cudaGridDependencySynchronize(),
            before they read or write what another kernel does. GPUs before compute capability 9.0,
            and hosts that cannot, launch it without, to the same results.

    Raises:
        KernelTypeError: ``arguments`` is no sequence, or ``pdl`` no bool.
        KernelError, KernelTypeError, RuleError: from `ferrule.op`, where something cannot be
            understood.
    """
    if isinstance(arguments, str) or not isinstance(arguments, Sequence):
        raise KernelTypeError(
            f"[step] `arguments` of step {function!r}: got {arguments!r}, expected a sequence such "
            'as ["x", "y", "N"].'
        )
    _check_bool(f"[step] `pdl` of step {function!r}", pdl)
    return RunStep(function, tuple(arguments), blocks, block, shared_memory, cluster, when, pdl)


def cuda_fill(array: str, value: float = 0, *, when: str | None = None) -> FillStep:
    """A step of a `cuda_unit` that fills an array, by the driver's memset.

    Args:
        array: an output, a scratch array, or an input that is written in place.
        value: a number that the array's dtype can hold; for elements of 8 bytes one whose halves
            are the same, such as 0.
        when: a condition, without which the step is left out.

    Raises:
        KernelError, KernelTypeError, RuleError: from `ferrule.op` or a call, where that is not so.
    """
    return FillStep(array, value, when)


def cuda_copy(to: str, source: str, *, when: str | None = None) -> CopyStep:
    """A step of a `cuda_unit` that copies an array to another of the same dtype and size.

    Args:
        to: an output, a scratch array, or an input that is written in place.
        source: any array that is always there.
        when: a condition, without which the step is left out.

    Raises:
        KernelError, KernelTypeError, RuleError: from `ferrule.op` or a call, where that is not so.
    """
    return CopyStep(to, source, when)


def cuda_matmul(
    out: str,
    a: str,
    b: str,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    alpha: float | str = 1.0,
    beta: float | str = 0.0,
    factors: str | None = None,
    tf32: bool = False,
    when: str | None = None,
) -> MatmulStep:
    """A step of a `cuda_unit` that multiplies matrices, by cuBLAS: ``out = alpha * a @ b + beta *
    out``, summed in float32.

    Their last two dims are the matrices, ``a[…,m,k]``, ``b[…,k,n]`` and ``out[…,m,n]``; the dims
    before are counted together, and must be as many in all three, or one matrix is for all. Where
    ``b`` is one, the dims before the last of ``a[…,k]`` and ``out[…,n]`` are rows of one matrix. An
    array of one dim has one row.

    Args:
        out: an output, a scratch array, or an input that is written in place: of the dtype of a
            and b, or float32.
        a, b: arrays that are always there, of float32, float16 or bfloat16, both the same.
        transpose_a, transpose_b: it lies the other way round: ``a[…,k,m]``, ``b[…,n,k]``.
        alpha, beta: factors: floats, or the names of float32 numbers of the rule. With a ``beta``
            that is not 0, ``out`` must have been written before.
        factors: in their place an array of two float32 that is always there: alpha and beta, which
            the GPU reads when it multiplies.
        tf32: multiply float32 by tensor cores, rounded to 10 bits of mantissa; without effect on
            other dtypes.
        when: a condition, without which the step is left out.

    Raises:
        KernelError, KernelTypeError, RuleError: from `ferrule.op` or a call, where that is not so;
            before anything is started.
        ToolchainError: from a call: there is no cuBLAS; says what installs it.
    """
    return MatmulStep(out, a, b, transpose_a, transpose_b, alpha, beta, tf32, when, factors)


def cuda_unit(
    source: str,
    *,
    steps: Sequence[UnitStep],
    scratch: Mapping[str, str] | None = None,
    when: str | None = None,
    template: Mapping[str, Any] | Sequence[tuple[str, Any]] | None = None,
    headers: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    specific: bool = False,
    state: Mapping[str, str] | None = None,
) -> UnitText:
    """A whole CUDA translation unit as one of an op's implementations: for `ferrule.op`'s ``cuda``.

    The text is compiled as it is: it has its own includes, ``__global__`` functions and templates.
    Steps run one after the other on the current stream, inside a CUDA graph, too. Arrays are
    row-contiguous: inputs that are not are copied first.

    Args:
        source: CUDA C++. Before it begins it has the rule's dtype variables as types (``T`` is
            ``__half`` for float16), ``has_<input>`` where an input may be None, and ``template``.
        steps: `cuda_step`, `cuda_fill`, `cuda_copy` and `cuda_matmul`, in order. Each output is
            written by one at least.
        scratch: memory that the steps share, allocated for each call by the array library and
            given back after it: names and ``"dtype[dims]"``, such as ``"float32[ceildiv(N,1024)]"``
            or ``"T[M,K]"``. It begins at multiples of 256 bytes; its values are anything.
        when: a condition such as ``"M > 16"``, without which the next implementation is taken.
        template: constants: ints, expressions, bools, dtypes. Each value compiles anew.
        headers: texts that the unit can ``#include``, by name. CUDA's own headers are there, and
            C's names for what NVRTC has (``<stdint.h>``, ``<math.h>``).
        options: of NVRTC: ``-D…``, ``--std=…``, ``--use_fast_math``, ``--maxrregcount=…`` and
            others that name no file and no GPU.
        specific: compile for what one architecture alone has, and none after it: ``sm_90a``, with
            wgmma, in place of ``sm_90``. Without effect before compute capability 9.0.
        state: memory such as locks and counters, declared as ``scratch`` is, that is zeros at
            first, and then as the last call on the same stream left it. Leave it so that a call
            with other sizes may come next: its arrays have the memory of the largest. In a CUDA
            graph, an export and a package it is zeroed for each call.

    Raises:
        KernelTypeError: ``steps`` is no sequence of steps.
        KernelError, KernelTypeError, RuleError: from `ferrule.op`, where something cannot be
            understood.

    Example:
        >>> import ferrule as fe
        >>> total = fe.op("total", "x[N]:float32 -> y[]:float32", cuda=fe.cuda_unit(
        ...     '''
        ...     template <int THREADS> __global__ void sums(const float* x, float* out, int64_t n) {
        ...       __shared__ float part[THREADS];
        ...       float sum = 0;
        ...       int64_t first = blockIdx.x * THREADS + threadIdx.x, all = gridDim.x * THREADS;
        ...       for (int64_t i = first; i < n; i += all) sum += x[i];
        ...       part[threadIdx.x] = sum;
        ...       for (int half = THREADS / 2; half; half /= 2) {
        ...         __syncthreads();
        ...         if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
        ...       }
        ...       if (threadIdx.x == 0) out[blockIdx.x] = part[0];
        ...     }
        ...     ''',
        ...     scratch={"partial": "float32[256]"},
        ...     steps=[
        ...         fe.cuda_step("sums<256>", ["x", "partial", "int64 N"], blocks=256, block=256),
        ...         fe.cuda_step("sums<256>", ["partial", "y", "int64 256"], blocks=1, block=256)]))
    """
    if not isinstance(steps, (list, tuple)):
        raise KernelTypeError(f"[cuda_unit] `steps`: got {steps!r}, expected a list of steps.")
    for step in steps:
        if not isinstance(step, (RunStep, FillStep, CopyStep, MatmulStep)):
            raise KernelTypeError(
                f"[cuda_unit] `steps`: got {step!r} of type {type(step).__name__}, expected "
                "ferrule.cuda_step(…), cuda_fill(…), cuda_copy(…) or cuda_matmul(…)."
            )
    return UnitText(
        source, tuple(steps), scratch, when, template, headers, options, specific, state
    )
