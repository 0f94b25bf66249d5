"""test/test_custom_ops.py: torch.library.custom_op, here adopted functions; opcheck over OpInfos.

`Definition` has the methods of what ``torch.library.custom_op`` returns, over `ferrule.adopt`: the
tests' own functions become implementations, derivatives and batching rules of ops. What it does not
have, ops of ferrule do not: what tests of that leave out says why.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.testing._internal import common_utils, custom_op_db

import ferrule
import op_infos

FILE = "test/test_custom_ops.py"
TORCHS = "tests torch's own registration, which ferrule goes through, but is not"
CHECKS = "tests opcheck itself, with ops that are wrong"
LISTS = "ops of ferrule take no lists of tensors, strings, devices or dtypes"
FAKE = "ops have no fake function of their own: the rule is it"
LEFT_OUT = {
    "TestCustomOp.*": "the older torch._custom_op, which is deprecated",
    "TestCustomOpTestingCPU.test_aot_autograd_check_*": CHECKS,
    "TestCustomOpTestingCPU.test_assert_raises_regex*": CHECKS,
    "TestCustomOpTestingCPU.test_autograd_regist*": CHECKS,
    "TestCustomOpTestingCPU.test_global_state_mutation*": CHECKS,
    "TestCustomOpTestingCPU.test_incorrect_*": CHECKS,
    "TestCustomOpTestingCPU.test_missing_*": CHECKS,
    "TestCustomOpTestingCPU.test_opcheck_cpu_stride_mismatch*": CHECKS,
    "TestCustomOpTestingCPU.test_opcheck_fails_basic*": CHECKS,
    "TestCustomOpTestingCPU.test_opcheck_unbacked_stride*": "sizes that depend on data",
    "TestCustomOpTestingCPU.test_single_element_tuple_output*": "one output is no tuple in ferrule",
    "MiniOpTest*": "the example for the tests of generate_opcheck_tests",
    "TestGenerateOpcheckTests.test_MiniOpTest*": CHECKS,
    "*.test_aot_autograd_copy*": CHECKS,
    "TestGenerateOpcheckTests.test_dont_generate_decorator": CHECKS,
    "TestGenerateOpcheckTests.test_failures_dict_validation": CHECKS,
    "TestGenerateOpcheckTests.test_generate_repro_*": CHECKS,
    "TestGenerateOpcheckTests.test_is_inside_opcheck_mode": CHECKS,
    "TestGenerateOpcheckTests.test_opcheck": CHECKS,
    "TestGenerateOpcheckTests.test_opcheck_bad_op": CHECKS,
    "TestGenerateOpcheckTests.test_opcheck_does_not_require_extra_deps": CHECKS,
    "*.test_opcheck_preserves_*": CHECKS,
    "*.test_safe_*": CHECKS,
    "TestLibrarySourceLocation.*": TORCHS,
    "TestOpProfiles.*": "fake functions made of profiles: " + FAKE,
    "TestTypeConversion.*": TORCHS,
    "TestCustomOpAPI.test_any_*": "tests functions of torch alone",
    "TestCustomOpAPI.test_compile": FAKE + ", and the test counts calls of it",
    "TestCustomOpAPI.test_custom_op_*": TORCHS,
    "TestCustomOpAPI.test_default_values": LISTS + "; numbers have no defaults",
    "TestCustomOpAPI.test_disallows_output_aliasing": "ferrule makes a copy of such an output, and "
    "counts it (tests/hosts/test_torch_op.py)",
    "TestCustomOpAPI.test_factory_function": LISTS + ": a device is known by an input",
    "TestCustomOpAPI.test_fake": FAKE,
    "TestCustomOpAPI.test_kwarg_only_tensors": TORCHS,
    "TestCustomOpAPI.test_layout_constraint_tags": TORCHS,
    "TestCustomOpAPI.test_library_get_kernel*": TORCHS,
    "TestCustomOpAPI.test_library_impl_*": TORCHS,
    "TestCustomOpAPI.test_library_register_autocast*": "ops declare autocast=, which cannot be "
    "added later (tests/hosts/test_torch_op_grad.py)",
    "TestCustomOpAPI.test_library_register_autograd_*": TORCHS,
    "TestCustomOpAPI.test_library_register_fake*": FAKE,
    "TestCustomOpAPI.test_library_register_kernel_low_level": TORCHS,
    "TestCustomOpAPI.test_library_register_torch_dispatch_low_level": TORCHS,
    "TestCustomOpAPI.test_library_register_torch_dispatch_rule_*": TORCHS,
    "TestCustomOpAPI.test_library_schema_infer": TORCHS,
    "TestCustomOpAPI.test_manual_schema_error": TORCHS,
    "TestCustomOpAPI.test_mutated": LISTS,
    "TestCustomOpAPI.test_mutated_*": LISTS,
    "TestCustomOpAPI.test_no_grad_skips_autograd": "vjp rules have no setup_context to be counted",
    "TestCustomOpAPI.test_overloading": "every op has its own name",
    "TestCustomOpAPI.test_pyobject_dispatch_*": TORCHS,
    "TestCustomOpAPI.test_register_*": TORCHS,
    "TestCustomOpAPI.test_set_kernel_enabled": "implementations are chosen by `using`",
    "TestCustomOpAPI.test_subclass_accessor_view*": "ops never return views",
    "TestCustomOpAPI.test_supports_tensorlist": LISTS,
}  # fmt: skip
RUN = {
    "TestCustomOpAPI": (
        "test_basic", "test_library_register_autograd", "test_library_register_kernel",
        "test_library_register_torch_dispatch", "test_library_register_vmap",
        "test_library_register_vmap_library_decorator", "test_library_register_vmap_op_decorator",
        "test_library_register_vmap_register_multiple_times",
        "test_library_register_vmap_register_multiple_times_2", "test_manual_schema",
        "test_multi_types", "test_replacement", "test_split_device",
    ),
    "TestGenerateOpcheckTests": ("test_opcheck_customopdef",),
}  # fmt: skip
LEAST = 29

# What the functions of the tests that run compute, by their names.
RULES = {
    "_torch_testing::add": "x[*S]:T, y:float64 -> out[*S]:T",
    "_torch_testing::f": "x[*S]:T -> out[*S]:T",
    "_torch_testing::sin_": "x[*S]:T! ->",
    "mylib::f": "x[*S]:T, y[*S]:T -> out[*S]:T",
    "mylib::numpy_sin": "x[*S]:T -> out[*S]:T",
}
_versions = itertools.count()
_defined: dict[str, Definition] = {}


class Definition:
    """What ``@torch.library.custom_op(name)`` makes of a function, as an op of ferrule."""

    def __init__(self, name: str, function: Callable[..., Any], devices: Any) -> None:
        self.name = name
        self.functions = dict.fromkeys(_names(devices), function)
        self.rules: dict[str, Callable[..., Any]] = {}
        self.op: ferrule.Op
        self._define()
        space, _, short = name.partition("::")
        setattr(getattr(torch.ops, space), short, self)
        _defined[name] = self

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.op(*args, **named)

    @property
    def default(self) -> Definition:
        """Where torch has the overload."""
        return self

    def register_kernel(self, devices: Any, function: Any = None) -> Any:
        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            self.functions.update(dict.fromkeys(_names(devices), function))
            self._define()
            return function

        return register if function is None else register(function)

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Any) -> None:
        def vjp(primals: Any, cotangents: Any, outputs: Any) -> Any:
            context = Context(primals)
            setup_context(context, primals, outputs[0] if len(outputs) == 1 else outputs)
            return backward(context, *cotangents)

        self.rules["vjp"] = vjp
        self._define()

    def register_vmap(self, function: Any = None) -> Any:
        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            def vmap(size: int, axes: Any, primals: Any) -> Any:
                info = SimpleNamespace(batch_size=size, randomness="error")
                return function(info, axes, *primals)

            self.rules["vmap"] = vmap
            self._define()
            return function

        return register if function is None else register(function)

    def _define(self) -> None:
        functions = dict(self.functions)

        def run(*inputs: Any) -> Any:
            device = next(one.device.type for one in inputs if isinstance(one, torch.Tensor))
            return functions.get(device, functions.get(None))(*inputs)

        # Versions, for the tests' functions count their calls, in what they close over.
        name = self.name.replace("::", "_")
        self.op = ferrule.adopt(name, RULES[self.name], run=run, version=next(_versions))
        for kind, rule in self.rules.items():
            getattr(self.op, f"def_{kind}")(rule, version=next(_versions))


class Context:
    """What a backward function finds of its forward call."""

    saved_tensors: tuple[Any, ...] = ()

    def __init__(self, inputs: Any) -> None:
        self.needs_input_grad = tuple(isinstance(one, torch.Tensor) for one in inputs)

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors


def _names(devices: Any) -> tuple[Any, ...]:
    return (devices,) if devices is None or isinstance(devices, str) else tuple(devices)


def custom_op(name: str, *, mutates_args: Any, device_types: Any = None, schema: Any = None) -> Any:
    """`torch.library.custom_op`; what is mutated and the schema are said by `RULES`."""
    return lambda function: Definition(name, function, device_types)


def _instead(method: str) -> Callable[..., Any]:
    """A function of `torch.library` for `Definition`, by itself or by its name; torch's own for
    what ferrule registers."""
    torchs = getattr(torch.library, method)

    def call(op: Any, *args: Any, **named: Any) -> Any:
        definition = _defined.get(op) if isinstance(op, str) else op
        if definition is None:
            return torchs(op, *args, **named)
        if method == "register_torch_dispatch":  # torch's own does it
            return torchs(definition.op.torch_op, *args, **named)
        return getattr(definition, method)(*args, **named)

    return call


METHODS = ("register_autograd", "register_kernel", "register_torch_dispatch", "register_vmap")
INSTEAD = {"custom_op": custom_op, **{method: _instead(method) for method in METHODS}}


def load(path: Path) -> tuple[dict[str, Any], list[str]]:
    infos = op_infos.shared("ferrule.") + op_infos.further("ferrule.")
    for one in infos:
        one.op = one.op.torch_op
    custom_op_db.custom_op_db += infos
    custom_op_db.numpy_cube = op_infos.exponential.torch_op  # that one is checked by its name
    # At times torch leaves out what fails in its own CI, for reasons of its own.
    with mock.patch.object(common_utils, "IS_LINUX", False):
        module = importlib.import_module(path.stem)
    tests, names = {}, []
    for name, cases in vars(module).items():
        if not (isinstance(cases, type) and issubclass(cases, unittest.TestCase)):
            continue
        for test in unittest.defaultTestLoader.getTestCaseNames(cases):
            ours = "test_opcheck_opinfo_" in test and "_ferrule_" in test
            if ours or test in RUN.get(name, ()):
                tests[f"{name}.{test}"] = cases(test)
            if ours or "test_opcheck_opinfo_" not in test:
                names.append(f"{name}.{test}")
    return tests, names


@contextlib.contextmanager
def context() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name, one in INSTEAD.items():
            stack.enter_context(mock.patch.object(torch.library, name, one))
        yield
