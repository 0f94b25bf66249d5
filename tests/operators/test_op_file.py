"""Ops in files that an earlier ferrule wrote, for which some bodies computed something else."""

from __future__ import annotations

import json

import numpy as np
import pytest

import ferrule
from ferrule import KernelError, Op
from ferrule.operators import file as op_file
from ferrule.operators import identity

SUM = "uint i = thread_position_in_grid.x; y[i] = x[i] * x[i] + 1;"
RULE = "x[*S]:T -> y[*S]:T"


def squares(name: str) -> Op:
    return ferrule.op(name, RULE, metal=SUM, grid="x.size", threadgroup=32)


def earlier_file(op: Op) -> tuple[str, str]:
    """The op's file as a ferrule with the first semantics wrote it, and what that called it."""
    content = json.loads(op_file.write([op]))
    ((_, data),) = content["ops"].items()
    (digest,) = identity.earlier(data)
    content["ops"] = {f"{op.name}_{digest}": data}
    return json.dumps(content), f"{op.name}_{digest}"


def test_bodies_in_metal_have_a_number_of_their_own() -> None:
    metal = json.loads(op_file.write([squares("numbered")]))["ops"]
    (data,) = metal.values()
    assert identity.of_op(data) == identity.digest(data, 2) != identity.digest(data)
    adopted = ferrule.adopt("unnumbered", RULE, run=lambda x: x + 1)
    (data,) = json.loads(op_file.write([adopted]))["ops"].values()
    assert identity.of_op(data) == identity.digest(data)
    assert identity.earlier(data) == []


@pytest.mark.parametrize("defined", [True, False])
def test_a_file_of_an_earlier_ferrule_is_read_under_its_own_names(defined: bool) -> None:
    op = squares(f"earlier_{defined}")
    text, name = earlier_file(op)
    if not defined:
        del op
    found = op_file.read(text)[name]
    assert op_file.full_name(found) == name
    x = np.arange(5, dtype=np.float32)
    assert (found(x) == x * x + 1).all()
    assert list(json.loads(op_file.write([found]))["ops"]) == [name]


def test_what_was_altered_since_is_refused() -> None:
    text, _ = earlier_file(squares("altered_since"))
    with pytest.raises(KernelError, match="was altered"):
        op_file.read(text.replace("+ 1;", "+ 2;"))
