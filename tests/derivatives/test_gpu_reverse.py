"""Derived gradients on a GPU are those of torch for a twin in float64."""

from __future__ import annotations

from typing import Any

import pytest

from derived_bodies import BODIES, NUMBERS, Body, assert_close
from test_reverse import LANES, MORE, TRIPS, declared, drawn, gradients, lanes_op

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU for torch"),
]
ALL = {**BODIES, **MORE}


@pytest.mark.parametrize("name", ALL)
def test_bodies(name: str) -> None:
    body: Body = ALL[name]
    op = declared(f"{name} on a gpu", body)
    op.derive_vjp(trips=TRIPS.get(name))
    primals, cotangent = drawn(body)
    wanted = gradients(body.twin, primals, [cotangent])
    own = [x.cuda().requires_grad_() for x in primals]
    values = op(*own, *NUMBERS.get(name, ()))
    values = values[0] if isinstance(values, tuple) else values
    given = torch.autograd.grad(values, own, cotangent.cuda())
    for one, other in zip(given, wanted, strict=True):
        assert_close(one.cpu(), other, 1e-5)


@pytest.mark.parametrize("call", LANES)
def test_lanes(call: str) -> None:
    op = lanes_op(call)
    op.derive_vjp()

    def gradient(device: str) -> Any:
        x = torch.randn(32, generator=torch.Generator().manual_seed(3)).to(device).requires_grad_()
        c = torch.randn(32, generator=torch.Generator().manual_seed(4)).to(device)
        return torch.autograd.grad(op(x), x, c)[0].cpu()

    assert_close(gradient("cuda"), gradient("cpu").double())
