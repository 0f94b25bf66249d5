"""test/inductor/test_aot_inductor_custom_ops.py: packages that call custom ops, here ops.

The tests compile models to packages by torch's own means, and run them in the same process. Of the
ops that torch builds in C++ for them, those that an op can be are ops. Packages that run without
ferrule, and in C++, are tested in tests/hosts/test_torch_package.py.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import ferrule

FILE = "test/inductor/test_aot_inductor_custom_ops.py"
ARGUMENTS = "ops of ferrule take no lists, strings, devices, dtypes or defaults"
LEFT_OUT = {
    "*.test_custom_op_all_inputs": ARGUMENTS,
    "*.test_custom_op_missing_arg_with_default_value": ARGUMENTS,
    "*.test_custom_op_with_multiple_outputs": ARGUMENTS,
    "*.test_incorrect_custom_op_schema": "a fake function that contradicts the schema: a rule "
    "gives both",
}
RUN = (
    "test_custom_op_add", "test_custom_op_add_output_path",
    "test_custom_op_out_variant_without_return", "test_custom_op_with_concat_inputs",
    "test_custom_op_with_reinterpret_view_inputs",
)  # fmt: skip
LEAST = 5

I = "const int i = thread_position_in_grid.x; "  # noqa: E741
OPS = {
    "custom_add": ferrule.op(
        "custom_add", "x[*S]:T, y[*S]:T -> out[*S]:T", metal=I + "out[i] = x[i] + y[i];",
        grid="x.size", threadgroup=64,
    ),
    "fn_out_variant_without_return": ferrule.op(
        "fn_out_variant_without_return", "x[*S]:T, y[*S]:T! ->", metal=I + "y[i] += 2 * x[i];",
        grid="x.size", threadgroup=64,
    ),
    "fn_with_default_input": ferrule.op(
        "fn_with_default_input", "x[*S]:T, i:int64 -> out[*S]:T",
        metal="const int at = thread_position_in_grid.x; out[at] = x[at] + i;",
        grid="x.size", threadgroup=64,
    ),
}  # fmt: skip


def load(path: Path) -> tuple[dict[str, Any], list[str]]:
    # The file takes two helpers of a file of 20,000 lines, to make what `cases` is here.
    helpers: Any = ModuleType("test_torchinductor")
    helpers.copy_tests = lambda *_, **__: None
    helpers.TestFailure = lambda *_, **__: None
    sys.modules[helpers.__name__] = helpers
    module = importlib.import_module(path.stem)

    def set_up(self: Any) -> None:  # without the library of torch's own ops
        super(module.AOTICustomOpTestCase, self).setUp()

    template = module.AOTInductorTestsTemplate
    cases: Any = type(
        "FerruleOps", (module.AOTInductorTestABICompatibleCpu, template), {"setUp": set_up}
    )
    names = unittest.defaultTestLoader.getTestCaseNames(cases)
    tests = {f"FerruleOps.{name}": cases(name) for name in names if name in RUN}
    return tests, [f"FerruleOps.{name}" for name in names]


@contextlib.contextmanager
def context() -> Iterator[None]:
    for name, op in OPS.items():
        setattr(torch.ops.aoti_custom_ops, name, op)
    yield
