"""Ops as nodes of MLX's graphs: lazy, compiled, differentiated, batched.

The nodes are runtime/mlx_node.cpp, which is compiled against the headers inside the user's own MLX,
once per version of it, and kept in the disk cache. Where there is no compiler, or MLX's arrays are
not as that file knows them, kernels run when they are called, as `hosts.mlx.arrays` does it. Nodes
of `metal_kernel` calls are in `hosts.mlx.kernel_nodes`.
"""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ...errors import FerruleError, KernelError
from ...kernels import entries
from ...operators import batching, derivatives
from ...operators import call as op_call
from ...operators import entries as op_entries
from ...operators.launch import number
from ...operators.runners import Runner
from . import batches as mlx_batches
from . import gpu as mlx_gpu
from .build import library, loaded, number_of

if TYPE_CHECKING:
    from ...operators.op import Op

Rules = Mapping[str, Callable[..., Iterable[Any]]]

_CAPTURED = 4  # of runtime/mlx_node.cpp
_PACKAGE = str(Path(__file__).resolve().parents[2])


def answering(rules: Rules, owner: str) -> Any:
    """The function that a node calls: errors reach the node as text, and MLX raises its own.

    Args:
        rules: by a node's queries, what answers them: gives arrays, or what else is asked for.
        owner: what it answers for, such as ``"op 'square'"``.
    """

    def answer(query: str, *args: Any) -> Any:
        try:
            return tuple(rules[query](*args))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            loaded().fr_mlx_raised(_error_text(error, query, owner).encode())
            return None

    return answer


def _error_text(error: BaseException, query: str, owner: str) -> str:
    """An error's text; for one that is not ferrule's, its owner, type and line, too."""
    if isinstance(error, FerruleError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if not frame.filename.startswith(_PACKAGE)]
    where = f" ({user_frames[-1].filename}, line {user_frames[-1].lineno})" if user_frames else ""
    query_name = "`run`" if query == "run" else query
    return f"the {query_name} of {owner} raised {type(error).__name__}{where}: {error}"


def as_tuple(outputs: Any) -> tuple[mx.array, ...]:
    """The outputs of an op's call, also where there is one."""
    return outputs if isinstance(outputs, tuple) else (outputs,)


def rules(op: Op) -> dict[str, Callable[..., Iterable[Any]]]:
    """What an op's nodes ask for derivatives, batches and launches."""

    def vjp(primals: Any, cotangents: Any, outputs: Any, places: Any) -> Iterable[Any]:
        cotangents = tuple(
            mlx_batches.zeros_like(cotangent) if output.constant else cotangent
            for output, cotangent in zip(op.rule.outputs, cotangents, strict=True)
        )
        wanted = tuple(
            i in places and isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.inexact)
            for i, value in enumerate(primals)
        )
        grads = derivatives.vjp(op, primals, cotangents, outputs, wanted)
        return mlx_batches.gradients(op, primals, grads)

    def jvp(values: Any, tangents: Any) -> Iterable[Any]:
        results = as_tuple(op(*values))
        output_tangents = derivatives.jvp(op, values, tangents, results, mlx_batches.zeros_like)
        return mlx_batches.tangents(op, results, output_tangents)

    def vmap(values: Any, axes: Any) -> Iterable[Any]:
        size = next(v.shape[a] for v, a in zip(values, axes, strict=True) if a is not None)
        arrays = mlx_batches.arrays(op, values, axes)
        results, result_axes = batching.batched(op, size, axes, values, op, arrays)
        return mlx_batches.batch(
            op, size, results, result_axes, lambda value: arrays.repeat(value, 0, size)
        )

    def run(values: Any) -> Iterable[Any]:
        results = as_tuple(op_call.eager(op, values))
        mx.eval(results)
        return results

    return {
        "vjp": vjp,
        "jvp": jvp,
        "vmap": vmap,
        "run": run,
        "metal": partial(mlx_gpu.by_stock_node, op),
        "by_mlx": mlx_gpu.by_mlx,
        "captured": partial(mlx_gpu.captured, op, loaded().fr_mlx_scratch),
    }


# -- ops ----------------------------------------------------------------------------------------


def callable_for(op: Op) -> Any:
    """A function in C that calls an op with MLX's arrays; None where C cannot.

    It gives NotImplemented for what Python must look at; `why` says what is wrong, if anything.
    """
    native = library()
    if native is None or any(argument.mutable for argument in op.rule.inputs):
        return None
    devices = (op_entries.serves(op, ("metal",)) and entries.CPU) | (
        op_entries.serves(op, ("cuda", "metal")) and entries.CUDA
    )
    anywhere = any(body.kind != "cuda" for body in op.implementations)
    text = any(not isinstance(body, Runner) for body in op.implementations)
    elsewhere = entries.CUDA | anywhere * entries.CPU | text * _CAPTURED
    bound = op_entries.bind(op) if devices else None
    if bound is None:
        devices, bound = 0, op_entries.bind(op, launches=False)
    if bound is None:
        return None
    label = f"op {op.name!r}"
    return native.fr_mlx_op(
        ctypes.addressof(bound.structure),
        number_of(bound),
        devices,
        elsewhere,
        label.encode(),
        (answering(rules(op), label), bound),  # the function and its nodes hold it, and so the op
    )


def call(op: Op, values: Sequence[Any]) -> Any:
    """The outputs of an op for MLX's arrays, as nodes; NotImplemented where nodes cannot do it.

    Raises:
        KernelError, KernelTypeError, CompileError, DialectError, ToolchainError, DeviceError: as
            `Op.__call__` says.
    """
    for argument, value in zip(op.rule.inputs, values, strict=False):
        if argument.dims is None and isinstance(value, mx.array):
            number(op.name, argument, value)  # which refuses it, before anything is evaluated
    cached: Any = op.mlx
    if cached is None or cached[0] != op.digest:  # a rule may have been declared since
        cached = op.mlx = (op.digest, callable_for(op))
    function = cached[1]
    if function is None:
        return NotImplemented
    op.callers[mx.array] = function
    error = why()  # of a call by `Op.__call__`, just now
    result = NotImplemented if error else function(*values)
    if result is NotImplemented:
        error = error or why()
        if error is not None:
            raise error
    return result


def exporting() -> bool:
    """Whether this thread traces a function for a file, on a machine without Metal."""
    native = library()
    return native is not None and bool(native.fr_mlx_exporting())


def why() -> BaseException | None:
    """The error for which a call in C was given back, once; None where there was none."""
    native = loaded()
    text = native.fr_mlx_why().decode()
    native.fr_mlx_raised(b"")
    return (entries.raised(KernelError(text)) or KernelError(text)) if text else None


def answered(result: Any) -> Any:
    """What nodes gave.

    Raises:
        KernelError: they refused; says why.
    """
    if result is NotImplemented:
        raise why() or KernelError("MLX made no node of it.")
    return result


# -- MLX's own primitives -----------------------------------------------------------------------


def ruled(stock: mx.array, inputs_of: mx.array, rules: Any) -> mx.array:
    """A node with the value of ``inputs_of``, run as ``stock``, with rules made by `answering`.

    Both are results of one of MLX's functions quantized_matmul, gather_qmm, gather_mm, and
    broadcast_arrays in a shapeless trace. "vjp" is called with a tuple of primals, the cotangent
    and the numbers of the primals whose gradients are wanted; "jvp" with primals, tangents and
    whose they are; "vmap" with inputs and their axes (-1 for none). Each gives arrays; the batch of
    an output is its first axis. They must never go.
    """
    node: mx.array = answered(loaded().fr_mlx_ruled(stock, inputs_of, rules))
    return node


def scatter_add(into: mx.array, indices: mx.array, values: mx.array) -> mx.array:
    """``into`` with values added along axis 0 at indices of as many dims, which broadcast."""
    node: mx.array = answered(loaded().fr_mlx_scatter_add(into, indices, values))
    return node
