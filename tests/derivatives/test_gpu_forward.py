"""Derived tangents on a GPU."""

from __future__ import annotations

import pytest

import ferrule
from derived_bodies import BODIES, NUMBERS, assert_close, tangents

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU for torch"),
]


@pytest.mark.parametrize("name", BODIES)
def test_bodies(name: str) -> None:
    body = BODIES[name]
    op = ferrule.op(name.replace(" ", "_"), body.rule, metal=body.source, **body.more)
    derived, numbers = op.derive_jvp(), NUMBERS.get(name, ())
    generator = torch.Generator().manual_seed(1)
    primals, given = (
        tuple(torch.randn(*shape, generator=generator) for shape in body.shapes) for _ in range(2)
    )
    wanted = tangents(body.twin, primals, given)
    there = [[x.cuda() for x in xs] for xs in (primals, given)]
    assert_close(derived(*there[0], *numbers, *there[1]).cpu(), wanted)
