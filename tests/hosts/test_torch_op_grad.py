"""Derivatives of ops in torch: every way to ask for them, eager and compiled, against the same
function in torch's operators.

The ways are those that give zeros without a word where a derivative is attached to an op in one of
the usual manners.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import ferrule
from ferrule import KernelError
from torch_ops import DIFFERENTIABLE, EACH, Case, I, equal, moved, rand

pytestmark = [
    # torch's own: its forward mode and its compiler use what they deprecate
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch._prims_common.check:FutureWarning"),
    pytest.mark.filterwarnings("ignore:op '.*' is called . times by vmap"),
]

ERRORS = (KernelError, RuntimeError)  # Dynamo and inductor raise their own, with the same text
Function = Callable[..., Any]
Tensors = Sequence[torch.Tensor]


def loss(case: Case, function: Function, device: str = "cpu") -> tuple[Function, Tensors]:
    """A scalar function of the float inputs of the usual call, and these; not linear in what the
    op gives, and different in each element."""
    inputs, floats = moved(case.samples()[0], device), case.floats()

    def of(*given: torch.Tensor) -> torch.Tensor:
        values = list(inputs)
        for i, value in zip(floats, given, strict=True):
            values[i] = value
        found = function(*values)
        found = found if isinstance(found, tuple) else (found,)
        total: Any = 0
        for i, one in enumerate(found):
            order = torch.arange(one.numel(), dtype=one.dtype, device=one.device)
            weights = order.view(one.shape) / one.numel()
            total = total + (torch.sin(one * (i + 1)) * (weights + 0.5)).sum()
        return total

    return of, [inputs[i] for i in floats]


def leaves(given: Tensors) -> list[torch.Tensor]:
    return [one.detach().clone().requires_grad_() for one in given]


def directions(given: Tensors) -> tuple[torch.Tensor, ...]:
    return tuple(torch.cos(3 * one + 1) for one in given)


def places(given: Tensors) -> tuple[int, ...]:
    return tuple(range(len(given)))


# -- ways to ask for a derivative: each of (function, inputs) --------------------------------------


def backward(f: Function, given: Tensors) -> Any:
    inputs = leaves(given)
    f(*inputs).backward()
    return [one.grad for one in inputs]


def backward_of_some(f: Function, given: Tensors) -> Any:
    inputs = [leaves([given[0]])[0], *given[1:]]
    f(*inputs).backward()
    return inputs[0].grad


def func_grad(f: Function, given: Tensors) -> Any:
    return grad(f, places(given))(*given)


def func_vjp(f: Function, given: Tensors) -> Any:
    y, back = vjp(f, *given)
    return y, back(torch.tensor(2.0, device=given[0].device))


def func_jacrev(f: Function, given: Tensors) -> Any:
    return jacrev(f, places(given))(*given)


def batches(given: Tensors) -> list[torch.Tensor]:
    return [torch.stack([one, one * 0.9, one * 0.8]) for one in given]


def func_vmap(f: Function, given: Tensors) -> Any:
    return vmap(f)(*batches(given))


def vmap_of_grad(f: Function, given: Tensors) -> Any:
    return vmap(grad(f, places(given)))(*batches(given))


def vmap_of_grad_shared(f: Function, given: Tensors) -> Any:
    axes = (0, *[None] * (len(given) - 1))
    return vmap(grad(f, places(given)), axes)(batches(given)[0], *given[1:])


def grad_of_vmap(f: Function, given: Tensors) -> Any:
    return grad(lambda *inputs: vmap(f)(*inputs).sum(), places(given))(*batches(given))


def checkpointed(reentrant: bool, f: Function, given: Tensors) -> Any:
    inputs = leaves(given)
    checkpoint(f, *inputs, use_reentrant=reentrant).backward()
    return [one.grad for one in inputs]


def func_jvp(f: Function, given: Tensors) -> Any:
    return jvp(f, tuple(given), directions(given))


def jvp_of_some(f: Function, given: Tensors) -> Any:
    return jvp(lambda x: f(x, *given[1:]), (given[0],), (directions(given)[0],))


def func_jacfwd(f: Function, given: Tensors) -> Any:
    return jacfwd(f, places(given))(*given)


def dual_numbers(f: Function, given: Tensors) -> Any:
    with forward_ad.dual_level():
        y = f(*map(forward_ad.make_dual, given, directions(given)))
        return tuple(forward_ad.unpack_dual(y))


def vmap_of_jvp(f: Function, given: Tensors) -> Any:
    return vmap(lambda *inputs: jvp(f, inputs, directions(given))[1])(*batches(given))


def double_backward(f: Function, given: Tensors) -> Any:
    inputs = leaves(given)
    first = torch.autograd.grad(f(*inputs), inputs, create_graph=True)
    total = sum((one * way).sum() for one, way in zip(first, directions(given), strict=True))
    return torch.autograd.grad(total, inputs)


def grad_of_grad(f: Function, given: Tensors) -> Any:
    def total(*inputs: torch.Tensor) -> Any:
        first = grad(f, places(given))(*inputs)
        return sum((one * way).sum() for one, way in zip(first, directions(given), strict=True))

    return grad(total, places(given))(*given)


def func_hessian(f: Function, given: Tensors) -> Any:
    return hessian(f, places(given))(*given)


def jvp_of_grad(f: Function, given: Tensors) -> Any:
    return jvp(grad(f, places(given)), tuple(given), directions(given))


def grad_of_jvp(f: Function, given: Tensors) -> Any:
    return grad(lambda *inputs: jvp(f, inputs, directions(given))[1], places(given))(*given)


def jvp_of_jvp(f: Function, given: Tensors) -> Any:
    ways = directions(given)
    return jvp(lambda *inputs: jvp(f, inputs, ways)[1], tuple(given), ways)


def reverse_over_reverse(f: Function, given: Tensors) -> Any:
    return jacrev(jacrev(f, places(given)), places(given))(*given)


REVERSE = [
    backward, backward_of_some, func_grad, func_vjp, func_jacrev, func_vmap, vmap_of_grad,
    vmap_of_grad_shared, grad_of_vmap,
]  # fmt: skip
CHECKPOINTS = [functools.partial(checkpointed, reentrant) for reentrant in (True, False)]
CHECKPOINTS[0].__name__, CHECKPOINTS[1].__name__ = "reentrant", "checkpoint"  # type: ignore[attr-defined]
FORWARD = [func_jvp, jvp_of_some, func_jacfwd, dual_numbers, vmap_of_jvp]
SECOND = [double_backward, grad_of_grad, reverse_over_reverse]
MIXED = [func_hessian, jvp_of_grad, grad_of_jvp, jvp_of_jvp]


def ways(case: Case) -> list[Function]:
    """What can be asked of an op."""
    found = [*REVERSE, *CHECKPOINTS]
    if case.forward:
        found += FORWARD
    if case.orders > 1:
        found += SECOND
    if case.orders > 1 and case.forward:
        found += MIXED
    return found


CELLS = pytest.mark.parametrize(
    ("case", "way"),
    [
        pytest.param(case, way, id=f"{case.name}-{way.__name__}")
        for case in DIFFERENTIABLE
        for way in ways(case)
    ],
)


def check(case: Case, way: Function, compiled: Function) -> None:
    """Fail unless a way gives the same for an op and its reference, and other than zeros."""
    f, given = loss(case, case.op)
    reference, _ = loss(case, case.reference)
    expected = way(reference, given)
    found = compiled(functools.partial(way, f))(given)
    equal(found, tuple(expected) if isinstance(found, tuple) else expected)
    some = torch.utils._pytree.tree_leaves(found)
    assert all(one.abs().max() > 1e-6 for one in some if isinstance(one, torch.Tensor))


@CELLS
def test_eager(case: Case, way: Function) -> None:
    check(case, way, lambda f: f)


# What torch.compile cannot take whole: there the function alone is compiled.
AROUND = {"backward", "backward_of_some", "checkpoint", "reentrant"}
# What it cannot do for torch's own operators either: AOTAutograd has no second derivative, and
# Dynamo's fake tensors no tangents of tangents.
NOT_COMPILED = {"double_backward", "jvp_of_jvp"}
BACKENDS = {
    "aot_eager": lambda case, way: True,
    "eager": lambda case, way: case.name in ("moments", "attention"),
    "inductor": lambda case, way: (
        case.name == "moments" and way in (backward, vmap_of_grad, func_jvp, func_hessian)
    ),
}


@pytest.mark.parametrize(
    ("case", "way", "backend"),
    [
        pytest.param(case, way, backend, id=f"{case.name}-{way.__name__}-{backend}")
        for case in DIFFERENTIABLE
        for way in ways(case)
        for backend, of in BACKENDS.items()
        if way.__name__ not in NOT_COMPILED and of(case, way)
    ],
)
def test_compiled(case: Case, way: Function, backend: str) -> None:
    torch.compiler.reset()
    if way.__name__ in AROUND:
        f, given = loss(case, case.op)
        reference, _ = loss(case, case.reference)
        equal(way(torch.compile(f, fullgraph=True, backend=backend), given), way(reference, given))
    else:
        check(case, way, functools.partial(torch.compile, fullgraph=True, backend=backend))


# -- derivatives that were not declared ------------------------------------------------------------

PLAIN = EACH["plain"]
FORWARDS = {
    "jvp": lambda f, x: jvp(f, (x,), (x,)),
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "dual": lambda f, x: dual_numbers(f, [x]),
    "compiled": lambda f, x: torch.compile(jvp, backend="eager")(f, (x,), (x,)),
}


@pytest.mark.parametrize("ask", FORWARDS)
@pytest.mark.parametrize("name", ["plain", "grid_sample"])
def test_forward_mode_without_a_jvp_raises(name: str, ask: str) -> None:
    case = EACH[name]
    x, *others = case.samples()[0]
    with pytest.raises(ERRORS, match="no forward-mode derivative; declare one with def_jvp"):
        FORWARDS[ask](lambda x: case.op(x, *others), x)


@pytest.mark.parametrize("ask", [*FORWARDS, "aot_eager"])
@pytest.mark.parametrize("where", ["what is written", "what is read", "what it was made from"])
def test_forward_mode_through_what_is_written_in_place_raises(where: str, ask: str) -> None:
    """The tangent would be that of the old values."""
    put = EACH["put"].op
    cache, row, at = EACH["put"].samples()[0]

    def f(x: torch.Tensor) -> torch.Tensor:
        if where == "what is read":
            mine = cache.clone()
            put(mine, x, at)
            return mine
        mine = x * 2 if where == "what it was made from" else x
        put(mine, row, at)
        return mine * mine

    forwards = {
        **FORWARDS,
        "aot_eager": lambda f, x: torch.compile(jvp, backend="aot_eager")(f, (x,), (x,)),
    }
    x = row.clone() if where == "what is read" else cache.clone()
    with pytest.raises(ERRORS, match="'put' writes in place, and so has no forward-mode derivat"):
        forwards[ask](f, x)
    equal(f(x.clone()), f(x.clone()))


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
@pytest.mark.parametrize("used", [0, 1])
def test_an_output_of_a_subclass_that_nobody_uses(used: int, backend: str | None) -> None:
    """Its cotangent is made of the subclass: torch makes plain zeros."""
    op = EACH["moments"].op
    x, *others = EACH["moments"].samples()[0]
    f = lambda x: op(x, *others)[used]  # noqa: E731
    plain = x.clone().requires_grad_()
    f(plain).sum().backward()
    given = TwoTensor(x.clone(), x.clone()).requires_grad_()
    (f if backend is None else torch.compile(f, backend=backend))(given).sum().backward()
    assert type(given.grad) is TwoTensor
    equal(given.grad.a, plain.grad)
    equal(given.grad.b, plain.grad)


REVERSES = {
    "backward": lambda f, x: f(x.requires_grad_()).sum().backward(),
    "autograd.grad": lambda f, x: torch.autograd.grad(f(x.requires_grad_()).sum(), x),
    "grad": lambda f, x: grad(lambda x: f(x).sum())(x),
    "jacrev": lambda f, x: jacrev(f)(x),
    "vmap": lambda f, x: vmap(grad(lambda x: f(x).sum()))(x),
    "compiled": lambda f, x: torch.compile(f, backend="eager")(x.requires_grad_()),
    "compiled aot_eager": lambda f, x: torch.compile(f, backend="aot_eager")(x.requires_grad_()),
    "compiled grad": lambda f, x: torch.compile(grad(lambda x: f(x).sum()), backend="eager")(x),
    "inductor": lambda f, x: torch.compile(f)(x.requires_grad_()),
}


@pytest.mark.parametrize("ask", REVERSES)
def test_a_derivative_without_a_vjp_raises(ask: str) -> None:
    x, w = PLAIN.samples()[0]
    with pytest.raises(ERRORS, match="'plain' has no derivative; declare one with def_vjp"):
        REVERSES[ask](lambda x: PLAIN.op(x, w), x)


def test_calls_that_are_not_recorded_need_no_vjp() -> None:
    """Nor do those that are, until a backward pass comes to them."""
    x, w = PLAIN.samples()[0]
    x.requires_grad_()
    recorded = PLAIN.op(x, w)
    equal(recorded, x.detach() * w)
    assert recorded.requires_grad
    (recorded.detach() * x).sum().backward()
    equal(x.grad, recorded)
    with pytest.raises(KernelError, match="'plain' has no derivative; declare one with def_vjp"):
        (recorded * 2 + x).sum().backward()
    expected = x.detach() * w
    with torch.no_grad():
        equal(PLAIN.op(x, w), expected)
    with torch.inference_mode():
        equal(PLAIN.op(x, w), expected)
    equal(PLAIN.op(x.detach(), w), expected)
    assert not PLAIN.op(x.detach(), w).requires_grad

    def stopped(x: torch.Tensor) -> torch.Tensor:
        return (PLAIN.op(x.detach(), w) * x).sum()

    equal(grad(stopped)(x.detach()), expected)
    equal(torch.compile(grad(stopped), backend="eager")(x.detach()), expected)


def test_a_second_derivative_that_was_not_declared_raises() -> None:
    f, given = loss(EACH["grid_sample"], EACH["grid_sample"].op)
    for way in (double_backward, grad_of_grad, reverse_over_reverse):
        with pytest.raises(ERRORS, match="'grid_sample_vjp' has no derivative"):
            way(f, given)
    with pytest.raises(ERRORS, match="'grid_sample' has no forward-mode derivative"):
        jvp_of_grad(f, given)
    f, given = loss(EACH["moments"], EACH["moments"].op)
    with pytest.raises(ERRORS, match="'moments_vjp_vjp' has no derivative"):
        jacrev(jacrev(jacrev(f)))(*given)


def test_what_is_written_in_place_has_no_derivative() -> None:
    put = EACH["put"].op
    cache, row, at = EACH["put"].samples()[0]
    with pytest.raises(KernelError, match="'put' writes in place, and so has no derivative"):
        put(cache, row.requires_grad_(), at)
    with pytest.raises(ERRORS):
        put(cache.requires_grad_(), row.detach(), at)
    with torch.no_grad():
        put(cache, row, at)
    # autograd sees the write
    x = torch.ones(2, 4, 3, requires_grad=True)
    saved = x.detach().clone()
    y = (x * saved).sum()
    put(saved, row.detach(), at)
    with pytest.raises(ERRORS, match="modified by an inplace operation"):
        y.backward()


# -- rules -----------------------------------------------------------------------------------------


def test_gradients_of_a_runner_in_float64() -> None:
    op = EACH["gate"].op
    x, w = (one.double().requires_grad_() for one in EACH["gate"].samples()[0])
    assert torch.autograd.gradcheck(op, (x, w), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(op, (x, w), check_fwd_over_rev=True)


@pytest.mark.filterwarnings("ignore:.*float64:ferrule.PortabilityWarning")
def test_gradients_by_ops_of_every_order() -> None:
    first = "y[N]:T, cotangent[N]:T"
    second = f"{first}, x_grad_cotangent[N]:T"
    how: Any = {"grid": "N", "threadgroup": 32}
    exp = ferrule.op("exp", "x[N]:T -> y[N]:T", metal=I + "y[i] = metal::exp(x[i]);", **how)
    slope = ferrule.op(
        "exp_vjp", f"{first} -> x_grad[N]:T", metal=I + "x_grad[i] = y[i] * cotangent[i];", **how
    )
    curve = ferrule.op(
        "exp_vjp_vjp", f"{second} -> y_grad[N]:T, cotangent_grad[N]:T",
        metal=I + "y_grad[i] = cotangent[i] * x_grad_cotangent[i];"
        "cotangent_grad[i] = y[i] * x_grad_cotangent[i];", **how,
    )  # fmt: skip
    slope.def_vjp(curve)
    exp.def_vjp(slope)
    x = rand(5).double().requires_grad_()
    assert torch.autograd.gradcheck(exp, (x,))
    assert torch.autograd.gradgradcheck(exp, (x,))


def test_outputs_that_are_not_used_and_inputs_that_need_nothing() -> None:
    op, reference = EACH["moments"].op, EACH["moments"].reference
    (x,) = EACH["moments"].samples()[0]
    for which in (0, 1):
        found, expected = leaves([x]), leaves([x])
        op(*found)[which].sum().backward()
        reference(*expected)[which].sum().backward()
        equal(found[0].grad, expected[0].grad)
    q, k, v, scale = EACH["attention"].samples()[0]
    for some in range(1, 8):
        found = [one.clone().requires_grad_(some >> i & 1 == 1) for i, one in enumerate((q, k, v))]
        expected = [one.detach().clone().requires_grad_(one.requires_grad) for one in found]
        EACH["attention"].op(*found, scale).square().sum().backward()
        EACH["attention"].reference(*expected, scale).square().sum().backward()
        equal([one.grad for one in found], [one.grad for one in expected])


def test_an_input_given_twice_gets_both_gradients() -> None:
    for f in (EACH["attention"].op, EACH["attention"].reference):
        x = EACH["attention"].samples()[0][0].clone().requires_grad_()
        f(x, x, x, 1.0).square().sum().backward()
        first = x.grad if f is EACH["attention"].op else first  # noqa: F821
    equal(first, x.grad)


masked = ferrule.op(
    "masked", "x[N]:T, mask[N]:T, b[N]:T? -> y[N]:T",
    metal=I + "T v = metal::precise::exp(x[i] + mask[i]); if (has_b) v *= b[i]; y[i] = v;",
    grid="N", threadgroup=32,
)  # fmt: skip
masked.def_jvp(
    ferrule.op(
        "masked_jvp",
        "y[N]:T, x_tangent[N]:T, mask_tangent[N]:T, b[N]:T?, b_tangent[N]:T? -> y_tangent[N]:T",
        metal=I + """
        T v = y[i] * (x_tangent[i] + mask_tangent[i]);
        if (has_b_tangent) v += y[i] / b[i] * b_tangent[i];
        y_tangent[i] = v;
        """,
        grid="N", threadgroup=32,
    )
)  # fmt: skip


@pytest.mark.parametrize("absent", [False, True])
def test_a_jvp_op_gets_zeros_for_what_has_no_tangent(absent: bool) -> None:
    """Also for what is infinite, of which no multiple is zero; and nothing for what is absent."""
    x, tangent = rand(3), rand(3) + 1
    mask = torch.tensor([0.0, -torch.inf, torch.inf])
    b = None if absent else rand(3) + 2

    def f(x: torch.Tensor, function: Function) -> Any:
        return function(x, mask, b)[:2]

    def reference(x: torch.Tensor, mask: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        return torch.exp(x + mask) * (1 if b is None else b)

    equal(
        jvp(lambda x: f(x, masked), (x,), (tangent,)),
        jvp(lambda x: f(x, reference), (x,), (tangent,)),
    )
    with forward_ad.dual_level():
        found = f(forward_ad.make_dual(x, tangent), masked)
        expected = f(forward_ad.make_dual(x, tangent), reference)
        equal(forward_ad.unpack_dual(found), forward_ad.unpack_dual(expected))
    mask[2] = 0.5
    assert ferrule.check_grad(masked, x, mask, b, inputs=["x"]).ok


def test_wrong_rules() -> None:
    def op(rule: Any) -> Any:
        one = ferrule.op("f", "x[N]:T, w[N]:T -> y[N]:T", run=lambda x, w: x * w)
        one.def_vjp(rule)
        one.def_jvp(lambda primals, tangents, outputs: (1, 2))
        return one

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(KernelError, match="returned 1 gradients; expected 2, one per input"):
        op(lambda primals, cotangents, outputs: cotangents[0])(x, x).sum().backward()
    with pytest.raises(KernelError, match="returned 2 tangents; expected 1"):
        jvp(op(lambda *_: None), (x, x), (x, x))
    with pytest.raises(ERRORS, match="shape"):
        op(lambda p, c, o: (c[0][:2], None))(x, x).sum().backward()
    with pytest.raises(KernelError, match=r"gave 2\.0 of type float as the gradient of input 'w'"):
        op(lambda p, c, o: (None, 2.0))(x, x).sum().backward()
    for given in (None, 0):
        one = op(lambda *_: None)
        one.def_jvp(lambda primals, tangents, outputs, given=given: given)
        with pytest.raises(KernelError, match=f"gave {given} of type .* tangent of output 'y'"):
            jvp(one, (x, x), (x, x))


def test_the_gradient_of_a_number_is_of_no_consequence() -> None:
    op = ferrule.op("f", "x[N]:T, s:float32 -> y[N]:T", run=lambda x, s: x * s)
    op.def_vjp(lambda primals, cotangents, outputs: (cotangents[0] * primals[1], 0.0))
    x = torch.ones(3, requires_grad=True)
    op(x, 2.0).sum().backward()
    equal(x.grad, torch.full((3,), 2.0))


def test_saved_tensors_hooks_and_what_is_kept_alive() -> None:
    op = EACH["moments"].op
    (x,) = EACH["moments"].samples()[0]
    packed: list[torch.Tensor] = []

    def pack(one: torch.Tensor) -> torch.Tensor:
        packed.append(one)
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        mean, variance = op(x.requires_grad_())
        (mean.sum() + variance.sum()).backward()
    # the vjp op reads x and mean
    assert sorted(one.shape for one in packed) == sorted([x.shape, mean.shape])


def test_selective_checkpoints_know_the_op() -> None:
    op = EACH["gate"].op
    calls: list[str] = []

    def policy(ctx: Any, called: Any, *args: Any, **named: Any) -> CheckpointPolicy:
        calls.append(called.name())
        kept = called == op.torch_op
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    x, w = leaves(EACH["gate"].samples()[0])
    y = checkpoint(
        lambda x, w: op(x.sin(), w).cos().sum(), x, w, use_reentrant=False,
        context_fn=functools.partial(create_selective_checkpoint_contexts, policy),
    )  # fmt: skip
    y.backward()
    assert op.torch_op.name() in calls
    a, b = leaves(EACH["gate"].samples()[0])
    EACH["gate"].reference(a.sin(), b).cos().sum().backward()
    equal([x.grad, w.grad], [a.grad, b.grad])


best = ferrule.op(
    "best", "x[*S,D]:float32 -> value[*S]:float32, at[*S]:int64",
    run=lambda x: tuple(torch.max(x, -1)),
)  # fmt: skip


@best.def_vjp
def best_vjp(primals: Any, cotangents: Any, outputs: Any) -> Any:
    grad = torch.zeros_like(primals[0])
    return (grad.scatter(-1, outputs[1][..., None], cotangents[0][..., None]),)


@best.def_jvp
def best_jvp(primals: Any, tangents: Any, outputs: Any) -> Any:
    return tangents[0].gather(-1, outputs[1][..., None])[..., 0], None


@pytest.mark.parametrize(
    "way", [backward, func_grad, func_jacrev, vmap_of_grad, func_jvp, dual_numbers, grad_of_grad],
    ids=lambda way: way.__name__,
)  # fmt: skip
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_an_output_of_integers_has_no_derivative(way: Function, backend: str | None) -> None:
    torch.compiler.reset()

    def loss_of(function: Function) -> Function:
        def f(x: torch.Tensor) -> torch.Tensor:
            value, at = function(x)
            assert not at.requires_grad
            return (value.square() * (at + 1)).sum()

        return f

    found = loss_of(best)
    if backend is not None and way is backward:
        found = torch.compile(found, fullgraph=True, backend=backend)
    elif backend is not None:
        way = torch.compile(way, fullgraph=True, backend=backend)
    equal(way(found, [rand(2, 3)]), way(loss_of(lambda x: torch.max(x, -1)), [rand(2, 3)]))


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=lambda case: case.name)
def test_checkpoints_inside_of_compiled_code(case: Case) -> None:
    torch.compiler.reset()
    f, given = loss(case, case.op)
    reference, _ = loss(case, case.reference)
    whole = torch.compile(
        lambda *inputs: checkpoint(f, *inputs, use_reentrant=False), fullgraph=True,
        backend="aot_eager",
    )  # fmt: skip
    equal(backward(whole, given), backward(reference, given))


NON_LEAF = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@NON_LEAF
@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=lambda case: case.name)
def test_compiled_autograd(case: Case) -> None:
    torch.compiler.reset()
    f, given = loss(case, case.op)
    reference, _ = loss(case, case.reference)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        found = backward(f, given)
    equal(found, backward(reference, given))


@NON_LEAF
def test_compiled_autograd_knows_the_numbers_of_a_call() -> None:
    torch.compiler.reset()
    case = EACH["affine"]
    for s, flip in ((0.5, False), (2.0, True), (0.5, False)):
        x = rand(3, 4).requires_grad_()
        y = case.op(x, None, s, 1, flip).sum()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            y.backward()
        equal(x.grad, (-1 if flip else 1) * 2 * s * x.detach())


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
def test_linearize() -> None:
    for case in (EACH["gate"], EACH["moments"]):
        f, given = loss(case, case.op)
        reference, _ = loss(case, case.reference)
        y, linear = torch.func.linearize(f, *given)
        z, expected = torch.func.linearize(reference, *given)
        equal((y, linear(*directions(given))), (z, expected(*directions(given))))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_graphs_of_torch_jit_hold_the_op_with_its_derivative() -> None:
    case = EACH["gate"]
    x, w = case.samples()[0]
    traced = torch.jit.trace(lambda x, w: case.op(x, w) * 2, (x, w))
    assert f"{case.op.torch_op.name()}(" in str(traced.graph)
    equal(torch.jit.trace(case.op, (x, w))(x + 1, w), case.reference(x + 1, w))
    a, b = leaves([x, w])
    traced(a, b).sum().backward()
    c, d = leaves([x, w])
    (case.reference(c, d) * 2).sum().backward()
    equal([a.grad, b.grad], [c.grad, d.grad])
