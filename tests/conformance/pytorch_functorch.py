"""test/functorch/test_ops.py: compositions of grad, vjp, jvp and vmap, over OpInfos of ops."""

from __future__ import annotations

import contextlib
import importlib
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal import autograd_function_db

import ferrule
import op_infos

FILE = "test/functorch/test_ops.py"
TORCHS = "tests one operator of torch"
LEFT_OUT = {
    "*.test_extremal_numerics_*": TORCHS,
    "*.test_vmapvmapjvp_linalg_solve*": TORCHS,
    "*.test_view_then_inplace*": "for operators that return views, which ops never do",
    "*.test_data_write_errors_under_transform*": "tests torch's tensors alone",
    "*.test_tensor_with_scalar_list*": TORCHS,
    "*.test_ordered_*": "for operators of torch that refuse dtypes",
}
LEAST = 325
# What the tests ask of all operators alike, without a look at what an OpInfo supports: ops that do
# not have it have to say so, never give zeros.
REFUSALS = "has no forward-mode derivative|has no derivative"
INCOMPLETE = [
    info.name for info in op_infos.shared("ferrule.")
    if not (info.supports_forward_ad and info.supports_gradgrad)
]  # fmt: skip


def load(path: Path) -> tuple[dict[str, Any], list[str]]:
    torch.set_num_threads(1)  # small tensors
    infos = [
        info for info in (*op_infos.shared("ferrule."), *op_infos.further("ferrule."))
        if info.name != "ferrule.put"  # writes in place: it has no derivative and no variant
    ]  # fmt: skip
    autograd_function_db.autograd_function_db += infos  # every test there is for these
    cases = importlib.import_module(path.stem).TestOperatorsCPU
    found = unittest.defaultTestLoader.getTestCaseNames(cases)
    ours = [name for name in found if "_ferrule_" in name]
    for name in ours:
        if any(one.replace(".", "_") in name for one in INCOMPLETE):
            setattr(cases, name, refusing(getattr(cases, name)))
    tests = {f"{cases.__name__}.{name}": cases(name) for name in ours}
    bases = tuple({name.split("_ferrule_")[0] + "_" for name in ours})
    # The same for torch's own operators is no matter of ours.
    names = [name for name in found if name in ours or not name.startswith(bases)]
    return tests, [f"{cases.__name__}.{name}" for name in names]


def refusing(test: Callable[..., None]) -> Callable[..., None]:
    """A test that passes, or meets an error that names the rule that is missing."""

    def run(self: Any) -> None:
        try:
            test(self)
        except ferrule.KernelError as error:
            self.assertRegex(str(error), REFUSALS)

    return run


context = contextlib.nullcontext
