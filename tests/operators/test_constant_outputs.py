"""Outputs that a rule marks with ``~``: kept for the backward pass, constant to derivatives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

import ferrule
from ferrule import KernelError, Op
from ferrule.errors import RuleError
from ferrule.operators import identity
from ferrule.rules.rule import Rule, parse_rule

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

RULE = "x[R,D]:float32, w[D]:float32 -> y[R,D]:float32, rstd[R]:float32~"
BODY = """
    uint row = thread_position_in_grid.x;
    float sum = 0;
    for (int k = 0; k < D; k++) sum += x[row * D + k] * x[row * D + k];
    float r = metal::rsqrt(sum / D);
    for (int k = 0; k < D; k++) y[row * D + k] = x[row * D + k] * r * w[k];
    rstd[row] = r;
"""


def plain(rule: str = RULE) -> Op:
    return ferrule.op("rms", rule, metal=BODY, grid="R", threadgroup=32)


def rms(rule: str = RULE) -> Op:
    op = plain(rule)

    @op.def_vjp
    def vjp(primals: Any, cotangents: Any, outputs: Any) -> Any:
        (x, w), (c, c_rstd), (_, rstd) = primals, cotangents, outputs
        n = x * rstd[:, None]
        g = c * w
        mean = (g * n).mean(-1)[:, None]
        # What came through rstd would be seen.
        return rstd[:, None] * (g - n * mean) + c_rstd[:, None], (c * n).sum(0)

    @op.def_jvp
    def jvp(primals: Any, tangents: Any, outputs: Any) -> Any:
        (x, w), (dx, dw), (_, rstd) = primals, tangents, outputs
        n = x * rstd[:, None]
        found = 0 * x
        if dx is not None:
            d = dx * rstd[:, None]
            found = found + (d - n * (n * d).mean(-1)[:, None]) * w
        if dw is not None:
            found = found + n * dw
        return found, rstd + 100  # which is dropped

    return op


def arrays(library: str) -> tuple[Any, Any]:
    rng = np.random.default_rng(2)
    x, w = (rng.normal(size=s).astype(np.float32) for s in ((3, 5), (5,)))
    if library == "torch":
        return torch.tensor(x), torch.tensor(w)
    if library == "mlx":
        mx = pytest.importorskip("mlx.core")
        return mx.array(x), mx.array(w)
    return x, w


def expected(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * (x * x).mean(-1, keepdim=True).rsqrt() * w


@pytest.mark.parametrize("library", ["numpy", "torch", "mlx"])
def test_check_grad_leaves_it_out(library: str) -> None:
    report = ferrule.check_grad(rms(), *arrays(library))
    assert report.ok and {one.rule for one in report.gradients} == {"vjp", "jvp"}


def test_without_the_mark_it_counts() -> None:
    unmarked = rms(RULE.replace("~", ""))
    assert not ferrule.check_grad(unmarked, *arrays("numpy"), raises=False).ok


@pytest.mark.parametrize("compiled", [False, True])
def test_torch_is_told(compiled: bool) -> None:
    op = rms()
    x, w = (one.requires_grad_() for one in arrays("torch"))
    call = torch.compile(lambda x, w: op(x, w), fullgraph=True) if compiled else op
    y, rstd = call(x, w)
    assert y.requires_grad and not rstd.requires_grad
    c = torch.linspace(-1, 1, y.numel()).reshape(y.shape)
    found = torch.autograd.grad((y * c).sum() + (rstd * 1000).sum(), (x, w))
    want = torch.autograd.grad((expected(x, w) * c).sum(), (x, w))
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="does not require grad"):
        rstd.sum().backward()


def test_transforms_of_torch() -> None:
    op = rms()
    x, w = arrays("torch")
    want = torch.func.grad(lambda x: expected(x, w).square().sum())(x)
    found = torch.func.grad(lambda x: op(x, w)[0].square().sum() + 7 * op(x, w)[1].sum())(x)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    dx = torch.ones_like(x)
    (_, _), (t, t_rstd) = torch.func.jvp(lambda x: op(x, w), (x,), (dx,))
    want = torch.func.jvp(lambda x: expected(x, w), (x,), (dx,))[1]
    torch.testing.assert_close(t, want, rtol=1e-4, atol=1e-4)
    assert not t_rstd.any()
    with forward_ad.dual_level():
        y, rstd = op(forward_ad.make_dual(x, dx), w)
        assert forward_ad.unpack_dual(rstd).tangent is None
        torch.testing.assert_close(forward_ad.unpack_dual(y).tangent, want, rtol=1e-4, atol=1e-4)


def test_mlx_takes_it_for_a_constant() -> None:
    mx = pytest.importorskip("mlx.core")
    op = rms()
    x, w = arrays("mlx")
    tx, tw = arrays("torch")
    found = mx.grad(lambda x: mx.sum(op(x, w)[0] ** 2) + 7 * mx.sum(op(x, w)[1]))(x)
    want = torch.func.grad(lambda x: expected(x, tw).square().sum())(tx)
    np.testing.assert_allclose(np.array(found), want.numpy(), rtol=1e-3, atol=1e-4)
    _, (_, t_rstd) = mx.jvp(lambda x: op(x, w), [x], [mx.ones_like(x)])
    assert not np.array(t_rstd).any()


def test_ops_as_rules_need_not_take_its_cotangent() -> None:
    back = ferrule.op(
        "rms_vjp", "w[D]:float32, y_cotangent[R,D]:float32, rstd[R]:float32 -> w_grad[D]:float32",
        metal="w_grad[thread_position_in_grid.x] = 0;", grid="D", threadgroup=32,
    )  # fmt: skip
    op = plain()
    op.def_vjp(back)
    with pytest.raises(KernelError, match="has no input 'rstd_cotangent'"):
        plain(RULE.replace("~", "")).def_vjp(back)
    forward = ferrule.op(
        "rms_jvp", "x_tangent[R,D]:float32, w_tangent[D]:float32 -> y_tangent[R,D]:float32",
        metal="y_tangent[thread_position_in_grid.x] = x_tangent[thread_position_in_grid.x];",
        grid="R*D", threadgroup=32,
    )  # fmt: skip
    op.def_jvp(forward)
    x, w = arrays("torch")
    (_, _), (t, t_rstd) = torch.func.jvp(lambda x: op(x, w), (x,), (x,))
    assert t.equal(x) and not t_rstd.any()


def test_rules_without_a_mark_keep_their_digests() -> None:
    op = ferrule.op(
        "scale", "x[*S,D]:T, w[D]:T -> y[*S,D]:T, r[*S]:float32", metal="y[0]=x[0];",
        grid="x.size", threadgroup=8,
    )  # fmt: skip
    assert identity.earlier(op.to_json()) == ["fca326f2fcecff9a"]
    marked = ferrule.op(
        "scale", "x[*S,D]:T, w[D]:T -> y[*S,D]:T, r[*S]:float32~", metal="y[0]=x[0];",
        grid="x.size", threadgroup=8,
    )  # fmt: skip
    assert marked.digest != op.digest


def test_the_mark_is_written_and_read() -> None:
    rule = parse_rule(RULE)
    assert str(rule) == RULE and [one.constant for one in rule.outputs] == [False, True]
    again = Rule.from_json(rule.to_json())
    assert again == rule and again.outputs[1].constant
    assert rule != parse_rule(RULE.replace("~", ""))
    with pytest.raises(RuleError, match="'~' is a mark of outputs"):
        parse_rule("x[N]:float32~ -> y[N]:float32")
    with pytest.raises(RuleError, match="a mark stands twice"):
        parse_rule("x[N]:float32 -> y[N]:float32~~")
    damaged = rule.to_json()
    damaged["outputs"][0].append(False)
    with pytest.raises(RuleError, match="damaged"):
        Rule.from_json(damaged)
