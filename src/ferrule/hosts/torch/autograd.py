"""The derivative of an op in torch: a kernel on the Autograd key that works at one level.

The dispatcher has peeled off all levels of torch.func but one when that kernel runs, so that a
Function of a single level is right there, and Dynamo does not look inside. An autograd.Function
around the op gives zeros without a word under ``torch.compile(torch.func.grad(f))``.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from ...errors import KernelError
from ...operators import derivatives
from ...operators.op import Op
from ...tools import fastcall
from . import arrays as host
from .known_calls import in_c

_PLAIN = (torch.Tensor, FakeTensor, FunctionalTensor)  # beside them, plain zeros can stand
_thread_local = threading.local()
_compile_context = torch._guards.CompileContext.try_get
_after_autograd = torch._C._after_autograd_keyset
_transformed = torch._C._are_functorch_transforms_active


def autograd_kernel(op: Op, overload: Any, function: Any) -> Callable[..., Any]:
    """The kernel on the Autograd key: the op with its derivative, by `autograd_function`, or with
    one that raises.

    Raises:
        KernelError: there is a gradient or a tangent, and the op writes in place; or a derivative
            is missing, in compiled code.
    """
    below = torch._C._AutoDispatchBelowAutograd
    differentiable = _differentiable(op)
    atomic = is_atomic(op)

    def kernel(keyset: Any, *values: Any) -> Any:
        if atomic:
            alert_not_deterministic(op, next(v.device for v in values if hasattr(v, "device")))
        if _compile_context() is not None:
            _check_traced(op, values)
        wants_grad = torch.is_grad_enabled() and torch._C._any_requires_grad(*values)
        # What is recorded may never be asked for: without a derivative, that of the call says so.
        # A compiled graph must know it before; not one that a backward pass is traced for.
        compiled = _compile_context() is not None and torch._C._current_graph_task_id() == -1
        refused = not differentiable or ("vjp" not in op.rules and compiled)
        if wants_grad and refused and not torch.compiler.is_exporting():
            raise derivatives.missing(op, "vjp")
        if not differentiable:
            # Asked only there: to ask leaves a view in what is traced.
            forward = _transformed() or forward_ad._current_level >= 0
            if forward and any(_tangent(v) is not None for v in values):
                raise derivatives.missing(op, "jvp")
            with below():
                return overload.redispatch(keyset & _after_autograd, *values)
        if _transformed():
            with enable_single_level_autograd_function():
                return function.apply(keyset, *values)
        return function.apply(keyset, *values)

    return kernel


@contextlib.contextmanager
def in_graph(active: bool = True) -> Iterator[None]:
    """Mark calls of operators as standing in a graph which AOTAutograd does not keep on disk."""
    before = getattr(_thread_local, "in_graph", False)
    _thread_local.in_graph = before or active
    try:
        yield
    finally:
        _thread_local.in_graph = before


def is_atomic(op: Op) -> bool:
    """Whether a kernel of the op has atomics, whose order threads decide."""
    kernels = [getattr(body, "kernel", None) for body in op.implementations]
    return any(kernel.atomic for kernel in kernels if kernel is not None)


def alert_not_deterministic(op: Op, device: torch.device) -> None:
    """Warn or raise, as torch's nondeterministic operators do, where torch was told to use none.

    Raises:
        KernelError: ``torch.use_deterministic_algorithms(True)`` holds, without ``warn_only``, and
            the op has atomics; on a CPU with one thread their order is always the same.
    """
    if torch.are_deterministic_algorithms_enabled() and is_atomic(op):
        host.alert_not_deterministic("[op]", f"op {op.name!r}", device.type)


def _check_traced(op: Op, values: Sequence[Any]) -> None:
    """Refuse to compile a derivative that AOTAutograd would keep on disk by the operator's name.

    Raises:
        KernelError: the operator itself stands in the graph, and a rule in Python would be traced.
    """
    if getattr(_thread_local, "in_graph", False) or torch.compiler.is_exporting():
        return
    wants_grad = torch.is_grad_enabled() and torch._C._any_requires_grad(*values)
    if (wants_grad or _transformed()) and op.traces_python():
        raise KernelError(
            f"[op] op {op.name!r} is called by its `torch_op` in compiled code that takes "
            "derivatives, and has rules that are Python functions: torch would keep what it traced "
            "of them on disk by the operator's name alone, whatever else they read. Call the op "
            "itself; or give the rules `version=`, a str or int that you change whenever they "
            "change."
        )


def _differentiable(op: Op) -> bool:
    return len(op.rule.outputs) > 0 and not op.in_place


def autograd_function(op: Op, overload: Any) -> Any:
    """The autograd.Function of an op, at one level of torch.func."""
    kept = _kept(op)

    def key(ctx: Any) -> Any:
        return (ctx._autograd_function_id,)

    members = {
        "forward": staticmethod(_forward(op, overload, kept)),
        "backward": staticmethod(_backward(op, kept, 1)),
        "jvp": staticmethod(_jvp(op, kept)),
        "_compiled_autograd_key": staticmethod(key),
    }
    return type(f"Ferrule_{op.name}", (_SingleLevelFunction,), {**members, "op": op, "kept": kept})


def recorder(function: Any, raw: Any, kinds: str, known: dict[bytes, Any] | None) -> Any:
    """`apply` of what records the calls of an op that nothing transforms, whose `forward` is C's;
    None where there is none.

    Args:
        function: its `autograd_function`.
        raw: the operator without an Autograd kernel.
        kinds, known: as of `tools.fastcall.operator`.
    """
    op, kept, library = function.op, function.kept, fastcall.library()
    if not _differentiable(op) or not in_c() or library is None:
        return None
    outputs = op.rule.outputs
    constants = tuple([i for i, output in enumerate(outputs) if output.constant])
    saved = tuple(sorted(kept.inputs)), tuple(sorted(kept.outputs))
    forward = library.recorded_forward(raw, kinds.encode(), known, *saved, constants)
    if forward is None:
        return None
    members = {"forward": forward, "backward": staticmethod(_backward(op, kept, 0))}
    recording: Any = type(function.__name__, (function,), members)
    # What `_forward` says of each call is here what calls have in common: torch's own tensors, for
    # which torch makes zeros of cotangents.
    context, count = recording._backward_cls, len(op.rule.inputs)
    context.in_graph, context.own, context.like = False, frozenset(), (None,) * len(outputs)
    context.plain, context.is_tensor = (None,) * count, (True,) * count
    return recording.apply


def _forward(op: Op, overload: Any, kept: _Kept) -> Callable[..., Any]:
    """A function that runs the op, and saves what its derivatives read."""
    outputs = op.rule.outputs

    def forward(ctx: Any, keyset: Any, *values: Any) -> Any:
        keyset = keyset & _after_autograd
        if _transformed():
            # Function.forward switched both modes off, but outer levels must still record.
            with (
                torch.enable_grad(),
                forward_ad._set_fwd_grad_enabled(True),
                torch._C._AutoDispatchBelowAutograd(),
            ):
                result = overload.redispatch(keyset, *values)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                result = overload.redispatch(keyset, *values)
        results = result if len(outputs) > 1 else (result,)
        ctx.in_graph = getattr(_thread_local, "in_graph", False)
        ctx.plain = [None if isinstance(v, torch.Tensor) else v for v in values]
        ctx.is_tensor = [isinstance(v, torch.Tensor) for v in values]
        constant = [v for output, v in zip(outputs, results, strict=True) if output.constant]
        ctx.mark_non_differentiable(*constant)
        ctx.real = [
            not output.constant and (v.is_floating_point() or v.is_complex())
            for output, v in zip(outputs, results, strict=True)
        ]
        # Zeros for the cotangent of an output that nobody used are made in `_backward`: torch makes
        # plain ones for a subclass, which nothing can be computed with.
        ctx.set_materialize_grads(False)
        ctx.like = [(v.shape, v.dtype, v.device) for v in results]
        ctx.own = {i for i, v in enumerate(results) if len(results) > 1 and type(v) not in _PLAIN}
        # A derivative op names what it reads; nothing else is kept alive.
        saved = [v for i, v in enumerate(values) if ctx.is_tensor[i] and i in kept.inputs]
        saved += [v for i, v in enumerate(results) if i in kept.outputs or i in ctx.own]
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)
        return result

    return forward


def _restored(op: Op, ctx: Any, kept: _Kept) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The inputs and outputs of a call that were saved; None for each other tensor."""
    saved = iter(ctx.saved_tensors)
    values = [
        next(saved) if is_tensor and i in kept.inputs else plain
        for i, (is_tensor, plain) in enumerate(zip(ctx.is_tensor, ctx.plain, strict=True))
    ]
    places = range(len(op.rule.outputs))
    results = [next(saved) if i in kept.outputs or i in ctx.own else None for i in places]
    return tuple(values), tuple(results)


def _backward(op: Op, kept: _Kept, first: int) -> Callable[..., Any]:
    """A function that computes gradients of the inputs by the op's `vjp`, given which of the
    Function's is the ``first``."""

    def backward(ctx: Any, *cotangents: Any) -> Any:
        values, results = _restored(op, ctx, kept)
        cotangents = tuple(
            cotangent
            if cotangent is not None
            else torch.zeros_like(results[i])
            if i in ctx.own
            else torch.zeros(like[0], dtype=like[1], device=like[2])
            for i, (cotangent, like) in enumerate(zip(cotangents, ctx.like, strict=True))
        )
        # What a rule calls stands where the op does.
        with in_graph(ctx.in_graph):
            vjp = _vjp_of_parts(op, values) or derivatives.vjp
            grads = vjp(op, values, cotangents, results, ctx.needs_input_grad[first:])
        for parameter, is_tensor, grad in zip(op.rule.inputs, ctx.is_tensor, grads, strict=True):
            if is_tensor and grad is not None and not isinstance(grad, torch.Tensor):
                name = f"the gradient of input {parameter.name!r}"
                raise derivatives.no_array(op, "vjp", grad, name)
        input_grads = [
            grad if is_tensor else None
            for grad, is_tensor in zip(grads, ctx.is_tensor, strict=True)
        ]
        return (*[None] * first, *input_grads)

    return backward


def _vjp_of_parts(op: Op, values: Sequence[Any]) -> Any:
    """What gives the gradients of DTensors by a rule that is array code; None for other calls."""
    rule = op.rules.get("vjp")
    if rule is None or rule.op is not None or "torch.distributed.tensor" not in sys.modules:
        return None
    from torch.distributed.tensor import DTensor

    from .sharding import vjp

    return vjp if any(isinstance(value, DTensor) for value in values) else None


def _jvp(op: Op, kept: _Kept) -> Callable[..., Any]:
    """A function that computes tangents of the outputs by the op's `jvp`."""
    outputs = op.rule.outputs

    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:
        values, results = _restored(op, ctx, kept)
        around = in_graph(ctx.in_graph)
        if _transformed():
            # As in `_forward`. Then tangents of this level must not count twice.
            with forward_ad._set_fwd_grad_enabled(True), around:
                values, results = (tuple(map(_primal, tensors)) for tensors in (values, results))
                output_tangents = derivatives.jvp(op, values, tangents, results, torch.zeros_like)
        else:
            with around:
                output_tangents = derivatives.jvp(op, values, tangents, results, torch.zeros_like)
        for output, real, tangent in zip(outputs, ctx.real, output_tangents, strict=True):
            if (real or tangent is not None) and not isinstance(tangent, torch.Tensor):
                name = f"the tangent of output {output.name!r}"
                raise derivatives.no_array(op, "jvp", tangent, name)
        return output_tangents if len(outputs) > 1 else output_tangents[0]

    return jvp


def _primal(value: Any) -> Any:
    """A tensor without its tangent of the current level."""
    return _unpacked(value)[0] if isinstance(value, torch.Tensor) else value


def _tangent(value: Any) -> Any:
    """A tensor's tangent of the current level; None where it has none, or is no tensor."""
    return _unpacked(value)[1] if isinstance(value, torch.Tensor) else None


def _unpacked(value: torch.Tensor) -> Any:
    return cast(Any, torch)._VF._unpack_dual(value, level=0)


class _Kept(NamedTuple):
    """Which inputs and outputs the derivatives may read, by their places."""

    inputs: set[int]
    outputs: set[int]


def _kept(op: Op) -> _Kept:
    named: set[str] | None = set()
    for transform in ("vjp", "jvp"):
        rule = op.rules.get(transform)
        if rule is None or named is None:
            continue
        if rule.op is None:
            named = None
        else:
            named |= {parameter.name for parameter in rule.op.rule.inputs}
            if transform == "jvp":  # zeros are made like the inputs
                named |= {parameter.name for parameter in op.rule.inputs}

    def places(arguments: Sequence[Any]) -> set[int]:
        return {i for i, a in enumerate(arguments) if named is None or a.name in named}

    return _Kept(places(op.rule.inputs), places(op.rule.outputs))
