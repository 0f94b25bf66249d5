"""test/distributed/tensor/experimental/test_register_sharding.py: sharding rules by hand, of ops.

A rule that is given to torch's `register_sharding` takes the place of the one that ferrule derives
from the declaration; both are for ordinary overloads. The four ranks are threads of one process.
"""

from __future__ import annotations

import contextlib
import importlib
import unittest
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.testing._internal import common_device_type
from torch.testing._internal.distributed._tensor import common_dtensor

import ferrule

FILE = "test/distributed/tensor/experimental/test_register_sharding.py"
LEFT_OUT = {
    "*.test_register_sharding_for_tensor_kwargs": "ops of ferrule have no out= arguments",
    "*.test_register_sharding_non_tensor_first_arg": "ops of ferrule take no strings",
}
RUN = ("test_argmax", "test_softmax_fwd")
LEAST = 2

softmax = ferrule.op(
    "softmax", "x[*S]:T, dim:int64, half_to_float:bool -> out[*S]:T",
    run=lambda x, dim, half_to_float: torch.softmax(x, dim),
)  # fmt: skip
argmax = ferrule.op(
    "argmax", "x[A,B]:T, dim:int64, keepdim:bool -> out[A,1]:int64 where B > 0",
    run=lambda x, dim, keepdim: torch.ops.aten.argmax.default(x, dim, keepdim),
)  # fmt: skip


def load(path: Path) -> tuple[dict[str, Any], list[str]]:
    with (
        mock.patch.object(common_dtensor, "DTensorTestBase", common_dtensor.DTensorOpTestBase),
        # It would make no tests for a CPU.
        mock.patch.object(common_device_type, "instantiate_device_type_tests", lambda *_, **__: 0),
    ):
        module = importlib.import_module(path.stem)
    module.aten = SimpleNamespace(
        _softmax=SimpleNamespace(default=softmax.torch_op),
        argmax=SimpleNamespace(default=argmax.torch_op),
    )
    cases = module.TestRegisterSharding
    names = unittest.defaultTestLoader.getTestCaseNames(cases)
    tests = {f"{cases.__name__}.{name}": cases(name) for name in names if name in RUN}
    return tests, [f"{cases.__name__}.{name}" for name in names]


@contextlib.contextmanager
def context() -> Iterator[None]:
    rand = torch.rand
    with (
        mock.patch.object(
            torch.nn.functional, "softmax", lambda x, dim, dtype: softmax(x, dim, False)
        ),
        mock.patch.object(torch, "argmax", lambda x, dim, keepdim: argmax(x, dim, keepdim)),
        # The same on each rank, as in processes: threads share a generator.
        mock.patch.object(
            torch,
            "rand",
            lambda *shape, device: rand(shape, generator=torch.Generator().manual_seed(0)),
        ),
    ):
        yield
