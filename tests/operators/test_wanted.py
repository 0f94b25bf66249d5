"""Derivatives that are told which gradients are wanted."""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
import pytest
import torch

import ferrule
from ferrule import KernelError, Op
from ferrule.operators import file as op_file

seen: list[tuple[bool, ...]] = []


def product() -> Op:
    op = ferrule.op(
        "product_of_wanted",
        "x[N]:float32, k:int32, w[N]:float32?, v[N]:float32 -> y[N]:float32",
        metal="uint i = thread_position_in_grid.x; y[i] = x[i] * v[i] * k * (has_w ? w[i] : 1);",
        grid="N",
        threadgroup=64,
    )

    @op.def_vjp
    def _(primals: Any, cotangents: Any, outputs: Any, wanted: Any) -> Any:
        seen.append(wanted)
        (x, k, w, v), (c,) = primals, cotangents
        c = c * k
        scaled = v if w is None else v * w
        return (
            c * scaled if wanted[0] else None,
            None,
            c * x * v if wanted[2] else None,
            (c * x if w is None else c * x * w) if wanted[3] else None,
        )

    return op


PRODUCT = product()
CASES = [(True, True, True), (True, False, True), (False, False, True), (False, True, False)]


@pytest.mark.parametrize("wanted", CASES)
@pytest.mark.parametrize("compiled", [False, True])
def test_torch_says_what_needs_a_gradient(wanted: tuple[bool, ...], compiled: bool) -> None:
    x, w, v = (torch.arange(1.0, 5) * (i + 1) for i in range(3))
    for tensor, needs in zip((x, w, v), wanted, strict=True):
        tensor.requires_grad_(needs)
    function: Any = lambda x, w, v: PRODUCT(torch.sin(x) if wanted[0] else x, 2, w, v)  # noqa: E731
    if compiled:
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    seen.clear()
    function(x, w, v).sum().backward()
    assert set(seen) == {(wanted[0], False, *wanted[1:])}
    got = x.grad, w.grad, v.grad
    for tensor in (x, w, v):
        tensor.grad = None
    ((torch.sin(x) if wanted[0] else x) * 2 * w * v).sum().backward()
    torch.testing.assert_close(got, (x.grad, w.grad, v.grad))


def test_functions_of_gradients_say_it_too() -> None:
    x = torch.arange(1.0, 5)
    seen.clear()
    grad = torch.func.grad(lambda v: PRODUCT(x, 2, None, v).sum())(x)
    torch.testing.assert_close(grad, 2 * x)
    assert seen == [(False, False, False, True)]
    assert ferrule.check_grad(PRODUCT, x, 2, x, x).ok


@pytest.mark.parametrize("places", [(0,), (0, 2), (1,), (2, 1)])
def test_mlx_says_the_numbers_of_its_arguments(places: tuple[int, ...]) -> None:
    arrays = [mx.arange(1.0, 5) * (i + 1) for i in range(3)]
    for present in (True, False):
        if not present and 1 in places:
            continue

        def call(x: Any, w: Any, v: Any) -> Any:
            return PRODUCT(x, 2, w if present else None, v).sum()  # noqa: B023

        def expected(x: Any, w: Any, v: Any) -> Any:
            return (x * 2 * (w if present else 1) * v).sum()  # noqa: B023

        seen.clear()
        for function in (mx.grad(call, places), mx.compile(mx.grad(call, places))):
            pairs = zip(function(*arrays), mx.grad(expected, places)(*arrays), strict=True)
            assert all(mx.allclose(a, b) for a, b in pairs)
        assert set(seen) == {(0 in places, False, present and 1 in places, 2 in places)}


def test_an_op_asks_for_it_by_names() -> None:
    op = ferrule.op(
        "scaled",
        "x[N]:float32, w[N]:float32 -> y[N]:float32",
        metal="uint i = thread_position_in_grid.x; y[i] = x[i] * w[i];",
        grid="N",
        threadgroup=64,
    )
    rule = ferrule.op(
        "scaled_vjp",
        "x[N]:float32, w[N]:float32, cotangent[N]:float32, w_wanted:bool"
        " -> x_grad[N]:float32, w_grad[N]:float32 if w_wanted",
        metal="uint i = thread_position_in_grid.x; x_grad[i] = cotangent[i] * w[i];"
        "if (has_w_grad) w_grad[i] = cotangent[i] * x[i];",
        grid="N",
        threadgroup=64,
    )
    op.def_vjp(rule)
    x, w = torch.ones(3, requires_grad=True), torch.full((3,), 2.0)
    op(x, w).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2] * 3
    op(x, w.requires_grad_()).sum().backward()
    assert w.grad is not None and w.grad.tolist() == [1] * 3
    assert ferrule.check_grad(op, x, w).ok
    one = rule.variant(x, w, x, False)
    assert [a.name for a in one.rule.outputs] == ["x_grad"]


def test_a_rule_that_is_no_longer_there_is_told_when_it_is_back() -> None:
    text = op_file.write([PRODUCT])
    absent = Op.from_json(PRODUCT.to_json())
    assert op_file.read(text)
    x = torch.ones(3, requires_grad=True)
    seen.clear()
    absent(x, 2, None, x.detach()).sum().backward()
    assert seen == [(True, False, False, False)]


@pytest.mark.parametrize("biased", [False, True])
def test_norms_leave_out_the_gradients_of_weights(
    biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ferrule.ops import norm_weights

    sums: list[Any] = []
    gradients = norm_weights._gradients
    monkeypatch.setattr(norm_weights, "_gradients", lambda *a: sums.append(a) or gradients(*a))
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8)
    bias = torch.randn(8) if biased else None
    for needs in (False, True):
        weight.requires_grad_(needs)
        sums.clear()
        for y in (
            ferrule.ops.rms_norm(x, weight),
            ferrule.ops.layer_norm(x, weight, bias),
            ferrule.ops.rms_norm(x, weight, residual=x.detach())[0],
        ):
            (grad,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
            assert grad.shape == x.shape
            if needs:
                y.sum().backward()
        assert len(sums) == 6 * needs  # `autograd.grad` of x alone does not say so
    torch.testing.assert_close(
        torch.autograd.grad(ferrule.ops.layer_norm(x, weight, bias).square().sum(), weight),
        torch.autograd.grad(
            torch.nn.functional.layer_norm(x, (8,), weight, bias).square().sum(), weight
        ),
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip


@pytest.mark.parametrize("absent", [False, True])
def test_a_gradient_that_is_wanted_is_not_left_out(absent: bool) -> None:
    op = ferrule.op(
        "forgetful",
        "x[N]:T, k:int32, ids[N]:I, w[N]:T? -> y[N]:T",
        metal="uint i = thread_position_in_grid.x; y[i] = x[i] * k + ids[i] * (has_w ? w[i] : 1);",
        grid="N",
        threadgroup=64,
    )
    op.def_vjp(lambda primals, cotangents, outputs, wanted: (cotangents[0], None, None, None))
    x, ids, w = torch.ones(3), torch.arange(3), torch.ones(3)
    op(x.requires_grad_(), 2, ids, None if absent else w).sum().backward()
    mx_ids, ones = mx.arange(3), mx.ones(3)
    maybe = None if absent else ones
    assert mx.grad(lambda x: op(x, 2, mx_ids, maybe).sum())(ones).tolist() == [1] * 3
    # What integers are does not follow from x by a derivative.
    mx.grad(lambda x: op(x, 2, (x * 2).astype(mx.int32), maybe).sum())(ones)
    if not absent:
        words = r"vjp of op 'forgetful' gave None for input 'w', whose gradient is wanted .* zeros"
        with pytest.raises(KernelError, match=words):
            op(x, 2, ids, w.requires_grad_()).sum().backward()
        with pytest.raises((KernelError, ValueError), match=words):
            mx.eval(mx.grad(lambda w: op(ones, 2, mx_ids, w).sum())(ones))
    op.def_vjp(lambda primals, cotangents, outputs: (cotangents[0], None, None, None))
    op(x, 2, ids, None if absent else w).sum().backward()


@pytest.mark.parametrize(
    ("kind", "rule", "given", "expected"),
    [
        ("vjp", lambda p, c, o, needs: c, "(p, c, o, needs)", "(primals, cotangents, outputs)"),
        ("vjp", lambda p, c: c, "(p, c)", "(primals, cotangents, outputs), and perhaps `wanted`"),
        ("vjp", lambda p, c, wanted: c, "(p, c, wanted)", "(primals, cotangents, outputs)"),
        ("jvp", lambda p, t, o, wanted: t, "(p, t, o, wanted)", "(primals, tangents, outputs)"),
        ("jvp", lambda: 0, "()", "(primals, tangents, outputs)"),
        ("vmap", lambda size, axes: 0, "(size, axes)", "(size, axes, primals)"),
    ],
)
def test_functions_of_other_parameters_are_refused(
    kind: str, rule: Any, given: str, expected: str
) -> None:
    op = product()
    words = f"`def_{kind}` of op 'product_of_wanted': the function has the parameters {given}; "
    with pytest.raises(KernelError, match=re.escape(f"{words}expected {expected}")):
        getattr(op, f"def_{kind}")(rule)
    getattr(op, f"def_{kind}")(lambda *arguments: arguments[1])
    op.def_vjp(lambda p, c, o, *, wanted=(), other=1: (c[0], None, None, c[0]))


@pytest.mark.parametrize("declared", ["w_wanted:int32", "w_wanted[N]:bool", "w_wanted:float32"])
def test_what_is_wanted_is_a_bool(declared: str) -> None:
    op = ferrule.op("twice", "w[N]:T -> y[N]:T", run=lambda w: w * 2)
    rule = ferrule.op(
        "twice_vjp",
        f"w[N]:T, cotangent[N]:T, {declared} -> w_grad[N]:T",
        run=lambda w, c, wanted: c * 2,
    )
    with pytest.raises(KernelError, match=r"`def_vjp` of op 'twice': `w_wanted` must be bool; "):
        op.def_vjp(rule)


def test_a_rule_that_was_absent_may_give_none_as_before() -> None:
    op = ferrule.op(
        "left_out",
        "x[N]:float32, w[N]:float32 -> y[N]:float32",
        metal="y[thread_position_in_grid.x] = x[thread_position_in_grid.x] * w[0];",
        grid="N",
        threadgroup=64,
    )
    op.def_vjp(lambda primals, cotangents, outputs: (cotangents[0], None))
    absent = Op.from_json(op.to_json())
    x, w = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    absent(x, w).sum().backward()
    assert w.grad is None
