"""PyTorch's own tests of custom ops, as far as they come with torch, over the shared test ops.

What is used is what ``torch.testing`` installs; `tests/conformance/test_pytorch_own.py` runs the
tests of PyTorch's repository, where they are at hand.
"""

from __future__ import annotations

import io
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._higher_order_ops.auto_functionalize import can_auto_functionalize
from torch.testing._internal import composite_compliance, optests
from torch.testing._internal.optests.generate_tests import FailuresDict
from torch.testing._internal.two_tensor import TwoTensor

import torch_ops
from torch_ops import CASES, DIFFERENTIABLE, EACH, Case, cloned, equal, is_float, rand

pytestmark = [  # torch's own
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:op '.*' is called . times by vmap"),
    pytest.mark.filterwarnings("ignore:.*float64:ferrule.PortabilityWarning"),
]
UTILITIES = [
    "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
]  # fmt: skip
ALL = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
SMOOTH = pytest.mark.parametrize("case", DIFFERENTIABLE, ids=lambda case: case.name)


def close(found: Any, expected: Any, equal_nan: bool = False) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=equal_nan)


def leaves(inputs: Any) -> Any:
    return tuple(one.requires_grad_() if is_float(one) else one for one in cloned(inputs))


# -- generated tests: ordinary code that calls ops, every call of which is checked -----------------


def calls(case: Case) -> dict[str, Callable[..., None]]:
    """Tests as users write them."""

    def test_values(self: Any) -> None:
        for inputs in case.samples():
            close(case.op(*cloned(inputs)), case.reference(*cloned(inputs)))

    def test_gradients(self: Any) -> None:
        inputs = leaves(case.samples()[0])
        found = case.op(*inputs)
        sum(one.sum() for one in (found if isinstance(found, tuple) else (found,))).backward()

    def test_layouts(self: Any) -> None:
        for layout in (torch_ops.strided, torch_ops.transposed):
            inputs = layout(case.samples()[0])
            close(case.op(*inputs), case.reference(*cloned(inputs)))

    found = {"test_values": test_values, "test_layouts": test_layouts}
    return {**found, "test_gradients": test_gradients} if case.orders else found


@ALL
def test_generated_opcheck_tests(case: Case, tmp_path: Path) -> None:
    kind = type("Calls", (unittest.TestCase,), calls(case))
    count = len(calls(case))
    failures = tmp_path / "failures_dict.json"
    FailuresDict(str(failures), {}).save()  # none are expected
    optests.generate_opcheck_tests(kind, ["ferrule"], str(failures), None, UTILITIES)
    tests = unittest.defaultTestLoader.loadTestsFromTestCase(kind)
    assert tests.countTestCases() >= count * (1 + len(UTILITIES))
    result = unittest.TextTestRunner(io.StringIO()).run(tests)
    assert not result.failures and not result.errors, [*result.failures, *result.errors]
    assert not result.skipped


# -- single checks ---------------------------------------------------------------------------------


def tensors(case: Case, inputs: Any) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """A function of tensors alone."""
    places = [i for i, one in enumerate(inputs) if isinstance(one, torch.Tensor)]

    def of(*given: torch.Tensor) -> Any:
        values = list(inputs)
        for i, one in zip(places, given, strict=True):
            values[i] = one
        return case.op(*values)

    return of, [inputs[i] for i in places]


@SMOOTH
@pytest.mark.parametrize("dynamic", [False, True])
def test_tracing(case: Case, dynamic: bool) -> None:
    for inputs in case.samples():
        f, given = tensors(case, inputs)
        modes = ["symbolic"] if dynamic else ["real", "fake"]
        for mode in modes:
            optests.make_fx_check(f, tuple(given), {}, tracing_mode=mode)
        recorded = tuple(one.clone().requires_grad_() for one in given)
        for arguments in (tuple(given), recorded):
            optests.aot_autograd_check(f, arguments, {}, dynamic=dynamic, check_gradients="auto")


@ALL
def test_fake_tensors_are_alike_at_every_step(case: Case) -> None:
    for inputs in case.samples():
        optests.fake_check(case.op.torch_op, cloned(inputs), {})


@SMOOTH
def test_subclasses_in_every_place(case: Case) -> None:
    inputs = case.samples()[0]
    composite_compliance.check_with_mode(case.op, inputs, {}, close)
    composite_compliance.check_all_permutations(case.op, inputs, {}, close)
    composite_compliance.check_backward_formula(case.op, leaves(inputs), {}, assert_equal_fn=close)
    if case.forward:
        composite_compliance.check_forward_ad_formula(
            case.op, leaves(inputs), {}, assert_equal_fn=close
        )


@SMOOTH
@pytest.mark.parametrize("grad", [False, True])
def test_a_subclass_of_two_tensors_compiled(case: Case, grad: bool) -> None:
    torch.compiler.reset()
    inputs = case.samples()[0]

    def two() -> list[Any]:
        return [
            TwoTensor(one.clone(), one * 0.5).requires_grad_(grad) if is_float(one) else one
            for one in inputs
        ]

    def run(f: Any) -> Any:
        given = two()
        found = f(*given)
        found = found if isinstance(found, tuple) else (found,)
        if grad:
            sum(one.sum() for one in found).backward()
            found = tuple(one.grad for one in given if is_float(one))
        return [part.detach() for one in found for part in (one.a, one.b)]

    expected = run(case.reference)
    equal(run(case.op), expected)
    equal(run(torch.compile(case.op, backend="aot_eager", fullgraph=True)), expected)


# -- OpInfo: the description of ops by which torch tests its own -----------------------------------


@pytest.fixture(scope="module")
def op_infos() -> Any:
    pytest.importorskip("expecttest")  # torch's test utilities import it
    import op_infos

    return op_infos


@ALL
def test_op_info(op_infos: Any, case: Case) -> None:
    info = op_infos.of_case(case)
    for dtype in info.dtypes:
        for sample in info.sample_inputs("cpu", dtype):
            inputs = (sample.input, *sample.args)
            expected = case.reference(*cloned(inputs))
            if not case.mutates:  # a copy is made of what is written to
                apart = sample.noncontiguous()
                close(info(apart.input, *apart.args), expected)
            close(info(*cloned(inputs)), expected)
            assert not torch.is_grad_enabled() or not any(
                one.requires_grad for one in inputs if isinstance(one, torch.Tensor)
            )


@pytest.mark.parametrize(
    "case",
    [case for case in DIFFERENTIABLE if case.name != "grid_sample"],  # it has edges
    ids=lambda case: case.name,
)
@pytest.mark.filterwarnings("ignore:Input #. requires gradient and is not a double")
def test_op_info_gradients(op_infos: Any, case: Case) -> None:
    info = op_infos.of_case(case)
    exact = torch.float64 in info.dtypes
    dtype = torch.float64 if exact else torch.float32
    # in float32 differences are rough
    how = {} if exact else {"eps": 1e-2, "atol": 2e-2, "rtol": 5e-2, "nondet_tol": 1e-4}
    for sample in list(info.sample_inputs("cpu", dtype, requires_grad=True))[: 9 if exact else 1]:
        inputs = (sample.input, *sample.args)
        assert torch.autograd.gradcheck(
            info.op, inputs, check_forward_ad=info.supports_forward_ad,
            check_batched_grad=True, check_undefined_grad=True,
            check_batched_forward_grad=info.supports_forward_ad, **how,
        )  # fmt: skip
        if info.supports_gradgrad and exact:
            assert torch.autograd.gradgradcheck(
                info.op, inputs, check_batched_grad=True,
                check_fwd_over_rev=info.supports_fwgrad_bwgrad,
                check_rev_over_rev=True,
            )  # fmt: skip


# -- what a custom op is asked for in torch's test_custom_ops --------------------------------------


def test_registrations() -> None:
    for case in CASES:
        name = case.op.torch_op.name()
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        for key in ("CPU", "CUDA", "Autograd", "Meta"):
            assert has(name, key), (name, key)
        assert has(name, "ADInplaceOrView") == case.mutates
        assert torch.Tag.pt2_compliant_tag in case.op.torch_op.tags
        assert torch._library.utils.is_functional_schema(case.op.torch_op._schema) != case.mutates
        assert not case.mutates or can_auto_functionalize(case.op.torch_op)


def test_symbols_of_the_dispatcher() -> None:
    op = EACH["gate"].op
    x, w = rand(2, 4), rand(4)
    packet = getattr(torch.ops.ferrule, f"gate_{op.digest}")
    equal(packet(x, w), op(x, w))
    equal(packet.default(x=x, w=w), op(x, w))
    assert op.torch_op is packet.default
    assert "gate" in repr(op.torch_op)
    with pytest.raises(RuntimeError, match="missing value for argument 'w'"):
        packet(x)


def test_grads_that_are_undefined() -> None:
    case = EACH["moments"]
    (x,) = leaves(case.samples()[0])
    mean, variance = case.op(x)
    (grad,) = torch.autograd.grad(mean, x, torch.ones_like(mean))  # variance has none
    assert variance.requires_grad
    equal(grad, torch.full_like(x, 1 / x.shape[-1]).detach())


def test_gradients_by_view_and_by_set_materialize() -> None:
    case = EACH["attention"]
    q, k, v, scale = leaves(case.samples()[0])
    y = case.op(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), scale)
    a, b, c, _ = leaves(case.samples()[0])
    z = case.reference(a.transpose(0, 1), b.transpose(0, 1), c.transpose(0, 1), scale)
    y.select(-1, 0).sum().backward()  # an expanded cotangent
    z.select(-1, 0).sum().backward()
    equal([q.grad, k.grad, v.grad], [a.grad, b.grad, c.grad])
