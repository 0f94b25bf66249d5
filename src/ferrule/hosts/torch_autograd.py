"""The derivative of an op in torch: a kernel on the Autograd key that works at one level.

The dispatcher has peeled off all levels of torch.func but one when that kernel runs, so that a
Function of a single level is right there, and Dynamo does not look inside. An autograd.Function
around the op gives zeros without a word under ``torch.compile(torch.func.grad(f))``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from .. import derivatives
from ..binding import get_threads
from ..errors import FerruleWarning, KernelError, warn
from ..op_declaration import Op

_PLAIN = (torch.Tensor, FakeTensor, FunctionalTensor)  # beside them, plain zeros can stand
_here = threading.local()
_compile_context = torch._guards.CompileContext.try_get
_after_autograd = torch._C._after_autograd_keyset
_transformed = torch._C._are_functorch_transforms_active


def autograd_kernel(op: Op, overload: Any) -> Callable[..., Any]:
    """What the Autograd key calls: the op with its derivative, or with one that raises.

    Raises:
        KernelError: there is a gradient or a tangent, and the op writes in place; or a derivative
            is missing, in compiled code.
    """
    function = _function(op, overload)
    below = torch._C._AutoDispatchBelowAutograd
    differentiable = len(op.rule.outputs) > 0 and not any(one.mutable for one in op.rule.inputs)

    atomic = is_atomic(op)

    def kernel(keyset: Any, *values: Any) -> Any:
        if atomic:
            alert_not_deterministic(op, next(v.device for v in values if hasattr(v, "device")))
        if _compile_context() is not None:
            _check_traced(op, values)
        wants = torch.is_grad_enabled() and torch._C._any_requires_grad(*values)
        # What is recorded may never be asked for: without a derivative, that of the call says so.
        # A compiled graph must know it before; not one that a backward pass is traced for.
        compiled = _compile_context() is not None and torch._C._current_graph_task_id() == -1
        refused = not differentiable or ("vjp" not in op.rules and compiled)
        if wants and refused and not torch.compiler.is_exporting():
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
def in_graph(stand: bool = True) -> Iterator[None]:
    """Around the calls of operators, if they stand in a graph which AOTAutograd does not keep."""
    before = getattr(_here, "in_graph", False)
    _here.in_graph = before or stand
    try:
        yield
    finally:
        _here.in_graph = before


def is_atomic(op: Op) -> bool:
    """Whether a kernel of the op adds up, or such, in an order that threads decide."""
    kernels = [getattr(one, "kernel", None) for one in op.implementations]
    return any(
        one.atomic_outputs or (one.language == "cuda" and "atomic" in one.source + one.header)
        for one in kernels
        if one is not None
    )


def alert_not_deterministic(op: Op, device: torch.device) -> None:
    """Do what torch's operators do that are not deterministic, where it was told to use none.

    Raises:
        KernelError: ``torch.use_deterministic_algorithms(True)`` holds, without ``warn_only``, and
            the op has atomics; on a CPU with one thread their order is always the same.
    """
    if not torch.are_deterministic_algorithms_enabled() or not is_atomic(op):
        return
    if device.type == "cpu" and get_threads() == 1:
        return
    words = (
        f"op {op.name!r} does not have a deterministic implementation, for its kernel has atomics, "
        "but you set 'torch.use_deterministic_algorithms(True)'"
    )
    if torch.is_deterministic_algorithms_warn_only_enabled():
        warn(f"{words}, warn_only=True.", FerruleWarning)
        return
    raise KernelError(
        f"[op] {words}. Turn it off around this op, or set warn_only=True"
        + ("; on the CPU ferrule.set_threads(1) is deterministic." if device.type == "cpu" else ".")
    )


def _check_traced(op: Op, values: Sequence[Any]) -> None:
    """Refuse to compile a derivative that AOTAutograd would keep on disk by the operator's name.

    Raises:
        KernelError: the operator itself stands in the graph, and a rule in Python would be traced.
    """
    if getattr(_here, "in_graph", False) or torch.compiler.is_exporting():
        return
    wants = torch.is_grad_enabled() and torch._C._any_requires_grad(*values)
    if (wants or _transformed()) and op.traces_python():
        raise KernelError(
            f"[op] op {op.name!r} is called by its `torch_op` in compiled code that takes "
            "derivatives, and has rules that are Python functions: torch would keep what it traced "
            "of them on disk by the operator's name alone, whatever else they read. Call the op "
            "itself; or give the rules `version=`, a str or int that you change whenever they "
            "change."
        )


def _function(op: Op, overload: Any) -> Any:
    outputs = op.rule.outputs
    kept_inputs, kept_outputs = _kept(op)

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
        found = result if len(outputs) > 1 else (result,)
        ctx.in_graph = getattr(_here, "in_graph", False)
        ctx.plain = [None if isinstance(v, torch.Tensor) else v for v in values]
        ctx.is_tensor = [isinstance(v, torch.Tensor) for v in values]
        constant = [v for one, v in zip(outputs, found, strict=True) if one.constant]
        ctx.mark_non_differentiable(*constant)
        ctx.real = [
            not one.constant and (v.is_floating_point() or v.is_complex())
            for one, v in zip(outputs, found, strict=True)
        ]
        # Zeros for the cotangent of an output that nobody used are made below: torch makes plain
        # ones for a subclass, which nothing can be computed with.
        ctx.set_materialize_grads(False)
        ctx.like = [(v.shape, v.dtype, v.device) for v in found]
        ctx.own = {i for i, v in enumerate(found) if len(found) > 1 and type(v) not in _PLAIN}
        # A derivative op names what it reads; nothing else is kept alive.
        saved = [v for i, v in enumerate(values) if ctx.is_tensor[i] and i in kept_inputs]
        saved += [v for i, v in enumerate(found) if i in kept_outputs or i in ctx.own]
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)
        return result

    def restored(ctx: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        saved = iter(ctx.saved_tensors)
        values = [
            next(saved) if is_tensor and i in kept_inputs else plain
            for i, (is_tensor, plain) in enumerate(zip(ctx.is_tensor, ctx.plain, strict=True))
        ]
        places = range(len(outputs))
        results = [next(saved) if i in kept_outputs or i in ctx.own else None for i in places]
        return tuple(values), tuple(results)

    def backward(ctx: Any, *cotangents: Any) -> Any:
        values, results = restored(ctx)
        cotangents = tuple(
            given
            if given is not None
            else torch.zeros_like(results[i])
            if i in ctx.own
            else torch.zeros(like[0], dtype=like[1], device=like[2])
            for i, (given, like) in enumerate(zip(cotangents, ctx.like, strict=True))
        )
        # What a rule calls stands where the op does.
        with in_graph(ctx.in_graph):
            grads = derivatives.vjp(op, values, cotangents, results)
        for one, is_tensor, grad in zip(op.rule.inputs, ctx.is_tensor, grads, strict=True):
            if is_tensor and grad is not None and not isinstance(grad, torch.Tensor):
                raise derivatives.no_array(op, "vjp", grad, f"the gradient of input {one.name!r}")
        found = [
            grad if is_tensor else None
            for grad, is_tensor in zip(grads, ctx.is_tensor, strict=True)
        ]
        return (None, *found)

    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:
        values, results = restored(ctx)
        around = in_graph(ctx.in_graph)
        if _transformed():
            # As above. Then tangents of this level must not count twice.
            with forward_ad._set_fwd_grad_enabled(True), around:
                values, results = (tuple(map(_primal, some)) for some in (values, results))
                found = derivatives.jvp(op, values, tangents, results, torch.zeros_like)
        else:
            with around:
                found = derivatives.jvp(op, values, tangents, results, torch.zeros_like)
        for one, real, tangent in zip(outputs, ctx.real, found, strict=True):
            if (real or tangent is not None) and not isinstance(tangent, torch.Tensor):
                raise derivatives.no_array(
                    op, "jvp", tangent, f"the tangent of output {one.name!r}"
                )
        return found if len(outputs) > 1 else found[0]

    def key(ctx: Any) -> Any:
        return (ctx._autograd_function_id,)

    members = {
        "forward": staticmethod(forward), "backward": staticmethod(backward),
        "jvp": staticmethod(jvp), "_compiled_autograd_key": staticmethod(key),
    }  # fmt: skip
    return type(f"Ferrule_{op.name}", (_SingleLevelFunction,), members)


def _primal(value: Any) -> Any:
    """A tensor without its tangent of the current level."""
    return _unpacked(value)[0] if isinstance(value, torch.Tensor) else value


def _tangent(value: Any) -> Any:
    """A tensor's tangent of the current level; None where it has none, or is no tensor."""
    return _unpacked(value)[1] if isinstance(value, torch.Tensor) else None


def _unpacked(value: torch.Tensor) -> Any:
    return cast(Any, torch)._VF._unpack_dual(value, level=0)


def _kept(op: Op) -> tuple[set[int], set[int]]:
    """Which inputs and outputs the derivatives may read, by their places."""
    named: set[str] | None = set()
    for kind in ("vjp", "jvp"):
        rule = op.rules.get(kind)
        if rule is None or named is None:
            continue
        if rule.op is None:
            named = None
        else:
            named |= {one.name for one in rule.op.rule.inputs}
            if kind == "jvp":  # zeros are made like the inputs
                named |= {one.name for one in op.rule.inputs}

    def places(arguments: Sequence[Any]) -> set[int]:
        return {i for i, one in enumerate(arguments) if named is None or one.name in named}

    return places(op.rule.inputs), places(op.rule.outputs)
