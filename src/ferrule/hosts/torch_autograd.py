"""The derivative of an op in torch: a kernel on the Autograd key that works at one level.

The dispatcher has peeled off all levels of torch.func but one when that kernel runs, so that a
Function of a single level is right there, and Dynamo does not look inside. An autograd.Function
around the op gives zeros without a word under ``torch.compile(torch.func.grad(f))``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from .. import derivatives
from ..op_declaration import Op

_after_autograd = torch._C._after_autograd_keyset
_transformed = torch._C._are_functorch_transforms_active


def autograd_kernel(op: Op, overload: Any) -> Callable[..., Any]:
    """What the Autograd key calls: the op with its derivative, or with one that raises."""
    function = _function(op, overload)
    below = torch._C._AutoDispatchBelowAutograd
    differentiable = len(op.rule.outputs) > 0 and not any(one.mutable for one in op.rule.inputs)

    def kernel(keyset: Any, *values: Any) -> Any:
        wants = torch.is_grad_enabled() and torch._C._any_requires_grad(*values)
        # Inside a backward pass what is recorded may never be asked for; then its own backward
        # says so. So does that of a graph that is exported, with parameters that could be trained.
        refused = not torch.compiler.is_exporting() and (
            not differentiable
            or ("vjp" not in op.rules and torch._C._current_graph_task_id() == -1)
        )
        if wants and refused:
            raise derivatives.missing(op, "vjp")
        if not differentiable:
            with below():
                return overload.redispatch(keyset & _after_autograd, *values)
        if _transformed():
            with enable_single_level_autograd_function():
                return function.apply(keyset, *values)
        return function.apply(keyset, *values)

    return kernel


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
        ctx.plain = [None if isinstance(v, torch.Tensor) else v for v in values]
        ctx.is_tensor = [isinstance(v, torch.Tensor) for v in values]
        ctx.real = [v.is_floating_point() or v.is_complex() for v in found]
        # A derivative op names what it reads; nothing else is kept alive.
        saved = [v for i, v in enumerate(values) if ctx.is_tensor[i] and i in kept_inputs]
        saved += [v for i, v in enumerate(found) if i in kept_outputs]
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)
        return result

    def restored(ctx: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        saved = iter(ctx.saved_tensors)
        values = [
            next(saved) if is_tensor and i in kept_inputs else plain
            for i, (is_tensor, plain) in enumerate(zip(ctx.is_tensor, ctx.plain, strict=True))
        ]
        results = [next(saved) if i in kept_outputs else None for i in range(len(outputs))]
        return tuple(values), tuple(results)

    def backward(ctx: Any, *cotangents: Any) -> Any:
        values, results = restored(ctx)
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
        if _transformed():
            # As above. Then tangents of this level must not count twice.
            with forward_ad._set_fwd_grad_enabled(True):
                values, results = (tuple(map(_primal, some)) for some in (values, results))
                found = derivatives.jvp(op, values, tangents, results, torch.zeros_like)
        else:
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
    if not isinstance(value, torch.Tensor):
        return value
    pair: Any = cast(Any, torch)._VF._unpack_dual(value, level=0)
    return pair[0]


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
