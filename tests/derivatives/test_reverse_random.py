"""Random bodies: derived gradients and tangents are transposed, in float64."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from test_forward_random import BEGIN, END, HEADER, statements

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore:.*Apple's compiler")


@settings(max_examples=25, deadline=None)
@given(st.lists(statements(2), min_size=1, max_size=5).map("".join))
def test_gradients_are_tangents_transposed(middle: str) -> None:
    op = ferrule.op(
        "drawn", "x[N]:T, w[N]:T -> y[N]:T", metal=BEGIN + middle + END, header=HEADER,
        grid="N", threadgroup=32,
    )  # fmt: skip
    tangent = op.derive_jvp()
    op.derive_vjp()
    generator = torch.Generator().manual_seed(len(middle))

    def draw() -> Any:
        return torch.randn(64, generator=generator, dtype=torch.float64)

    x, w = draw().requires_grad_(), draw().requires_grad_()
    c, tx, tw = draw(), draw(), draw()
    gx, gw = torch.autograd.grad(op(x, w), [x, w], c)
    forward = (c * tangent(x.detach(), w.detach(), tx, tw)).sum()
    terms = gx * tx + gw * tw
    scale = terms.abs().sum() + forward.abs() + 1e-9
    assert abs(float((terms.sum() - forward) / scale)) < 1e-9, middle
