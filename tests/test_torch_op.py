"""Ops in torch: values, layouts, opcheck, torch's modes and kinds of tensors."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import ferrule
import torch_ops
from ferrule import KernelError
from torch_ops import CASES, DIFFERENTIABLE, Case, cloned, equal

ALL = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
LAYOUTS = {
    "contiguous": lambda inputs: inputs, "strided": torch_ops.strided,
    "transposed": torch_ops.transposed, "expanded": torch_ops.expanded,
}  # fmt: skip
UTILITIES = (
    "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic",
    "test_aot_dispatch_static",
)  # fmt: skip


def leaves(inputs: Any) -> Any:
    """Inputs that require grad where they may."""
    return tuple(
        one.detach().requires_grad_() if torch_ops.is_float(one) else one for one in inputs
    )


@ALL
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values(case: Case, layout: str) -> None:
    for inputs in case.samples():
        found, expected = LAYOUTS[layout](inputs), cloned(inputs)
        if layout == "expanded":
            expected = cloned(found)
            if case.mutates:
                found = torch_ops.strided(found)
        equal(case.op(*found), case.reference(*expected))
        equal(found, expected)  # written in place, or not at all


@ALL
@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck(case: Case, layout: str) -> None:
    if case.mutates and layout == "expanded":
        pytest.skip("what is written in place cannot be many elements in one place")
    for inputs in case.samples():
        torch.library.opcheck(case.op.torch_op, LAYOUTS[layout](inputs), test_utils=UTILITIES)


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=lambda case: case.name)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck_with_gradients(case: Case, layout: str) -> None:
    for inputs in case.samples():
        given = leaves(LAYOUTS[layout](inputs))
        torch.library.opcheck(case.op.torch_op, given, test_utils=UTILITIES)
