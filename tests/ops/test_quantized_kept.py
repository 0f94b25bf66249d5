"""`quantized_matmul(…, keep_bf16=True)`: many rows have a dequantized matrix, which is kept."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule import KernelError, Op, ops
from ferrule.hosts.torch import arrays as torch_host
from ferrule.ops import quantized, quantized_kept
from quantized_arrays import BF16, DTYPES, HOSTS, assert_same, to_numpy, to_torch
from test_quantized_products import BITS6, HOST, NVFP4, SOME, Form, assert_product, normal, sizes

pytestmark = [
    pytest.mark.together,
    # torch's own: its forward mode and its compiler use what they deprecate
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch._prims_common.check:FutureWarning"),
]

F32, F16, _ = DTYPES
AFFINE = Form("affine", 64, 4, BF16)
KEPT = [AFFINE, NVFP4, Form("mxfp8", 32, 8, BF16), BITS6]
KEPT += [form._replace(transpose=False) for form in KEPT]


@pytest.fixture(scope="module", autouse=True)
def dense_products() -> Iterator[None]:
    """On each processor as on those that multiply bfloat16."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized_kept, "_multiplies_bf16", lambda torch: True)
        yield


def op_of(form: Form, scaled: bool = False) -> Op:
    """The op that keeps a matrix, without what it counted."""
    op = quantized._product(
        form.mode, form.group, form.bits, form.transpose, "", scaled, str(form.dtype)
    )
    _ = op.torch_op
    op.counts.clear()
    return op


def case(form: Form, rows: int = 20) -> tuple[Any, list[Any]]:
    """x, and the parts of a matrix."""
    matrices = form.matrices((), 128, 64)
    return to_torch(normal((rows, 128), form.dtype)), [to_torch(array) for array in matrices]


# -- what it gives ---------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(st.data(), st.sampled_from([*SOME, *KEPT]), HOST, st.booleans())
def test_products(data: Any, form: Form, host: str, of_half: bool) -> None:
    """As without keeping, within the same bound of the exact product."""
    form = form._replace(dtype=F16 if of_half else BF16)
    rows, k, n = data.draw(sizes(form))
    front = data.draw(st.sampled_from([(), (1,), (2,), (2, 3)]))
    x, matrices = normal((*front, rows, k), form.dtype), form.matrices((), k, n)
    given = [HOSTS[host](array) for array in (x, *matrices)]
    found = form.call(given[0], given[1:], keep_bf16=True)
    assert_product(found, x, form.dense(matrices))
    plain = form.call(given[0], given[1:])
    assert type(found) is type(plain) and to_numpy(found).dtype == x.dtype
    if host != "torch":
        assert_same(found, plain)


@pytest.mark.parametrize("form", KEPT, ids=str)
def test_rows_of_one(form: Form) -> None:
    matrices = form.matrices((), 128, 128)
    op, given = op_of(form), [to_torch(array) for array in matrices]
    eye = to_torch(np.eye(128).astype(BF16))
    assert_same(form.call(eye, given, keep_bf16=True), form.dense(matrices).astype(BF16))
    assert op.counts == {"prepare": 1}


def test_a_global_scale() -> None:
    """On a processor with the packed weights, whose sums can be had before they are rounded."""
    x, given = case(NVFP4)
    op = op_of(NVFP4, True)
    found = NVFP4.call(x, given, global_scale=3.0, keep_bf16=True)
    assert torch.equal(found, NVFP4.call(x, given, global_scale=3.0))
    assert op.counts["prepare"] == 0


def test_batches_of_matrices_are_not_kept() -> None:
    matrices = AFFINE.matrices((3,), 128, 64)
    x, given = to_torch(normal((3, 20, 128), BF16)), [to_torch(array) for array in matrices]
    assert torch.equal(AFFINE.call(x, given, keep_bf16=True), AFFINE.call(x, given))


@pytest.mark.parametrize("host", sorted(HOSTS))
@pytest.mark.parametrize("kinds", [(F32, F32), (BF16, F32), (F16, BF16)], ids=str)
def test_float32_is_refused(host: str, kinds: Any) -> None:
    matrices = AFFINE._replace(dtype=kinds[1]).matrices((), 128, 64)
    x, *given = (HOSTS[host](array) for array in (normal((20, 128), kinds[0]), *matrices))
    with pytest.raises(KernelError, match="keep_bf16=True, but x or the scales are of float32"):
        AFFINE.call(x, given, keep_bf16=True)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64])
def test_other_dtypes_are_refused_as_without(dtype: Any) -> None:
    x, given = case(NVFP4)
    for keep in (False, True):
        with pytest.raises(ferrule.FerruleError, match=str(dtype).removeprefix("torch.")):
            NVFP4.call(x.to(dtype), given, keep_bf16=keep)


def test_processors_that_do_not_multiply_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_kept, "_multiplies_bf16", lambda torch: False)
    (x, given), op = case(AFFINE), op_of(AFFINE)
    assert torch.equal(AFFINE.call(x, given, keep_bf16=True), AFFINE.call(x, given))
    assert op.counts["prepare"] == 1


# -- what is kept, and how long --------------------------------------------------------------------


@pytest.mark.parametrize("form", KEPT, ids=str)
def test_one_matrix_for_all_products(form: Form) -> None:
    """Of few rows none; of many, and of derivatives, one; and another one after a write."""
    x, given = case(form)
    leaf, op = x.clone().requires_grad_(), op_of(form)
    turned = op_of(form._replace(transpose=not form.transpose))
    form.call(x[:1], given, keep_bf16=True)
    assert op.counts["prepare"] == 0
    for count in (1, 2):
        for rows in (leaf, leaf[2:]):
            y = form.call(rows, given, keep_bf16=True)
            found = torch.autograd.grad(y, leaf, torch.ones_like(y))[0]
            expected = form.call(rows, given)
            right = torch.autograd.grad(expected, leaf, torch.ones_like(y))[0]
            torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-1)
            torch.testing.assert_close(found, right, rtol=2e-2, atol=2e-1)
        assert op.counts["prepare"] + turned.counts["prepare"] == count
        given[0].copy_(given[0].flip(0))


def test_writes_that_no_tensor_tells_of() -> None:
    (x, given), op = case(AFFINE), op_of(AFFINE)
    AFFINE.call(x, given, keep_bf16=True)
    given[1].data.neg_()
    torch.autograd.graph.increment_version(given[1])
    found = AFFINE.call(x, given, keep_bf16=True)
    torch.testing.assert_close(found, AFFINE.call(x, given), rtol=2e-2, atol=2e-1)
    assert op.counts["prepare"] == 2


@pytest.mark.parametrize("dropped", [0, 1, 2])
def test_it_goes_with_the_weights(dropped: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = [], ops.quantizing.dequantize

    def dequantize(*args: Any, **named: Any) -> Any:
        made.append(weakref.ref((result := make(*args, **named)).untyped_storage()))
        return result

    monkeypatch.setattr(quantized_kept.quantizing, "dequantize", dequantize)
    x, given = case(AFFINE)
    x.requires_grad_()
    for _ in range(2):
        AFFINE.call(x, given, keep_bf16=True).sum().backward()
    gc.collect()
    assert [each() is not None for each in made] == [True]
    given[dropped] = None
    gc.collect()
    assert made[0]() is None


# -- transformations -------------------------------------------------------------------------------


@pytest.mark.parametrize("form", KEPT, ids=str)
def test_batches_and_forward_derivatives(form: Form) -> None:
    (x, given), op = case(form), op_of(form)
    pair = torch.stack([x, x.flip(0)])

    def call(x: Any) -> Any:
        return form.call(x, given, keep_bf16=True)

    close = torch.testing.assert_close
    expected = form.call(pair, given)
    close(torch.func.vmap(call)(pair), expected, rtol=2e-2, atol=2e-1)
    close(torch.func.vmap(call, 1)(pair.transpose(0, 1)), expected, rtol=2e-2, atol=2e-1)
    y, tangent = torch.func.jvp(call, (pair[0],), (pair[1],))
    close(torch.stack([y, tangent]), expected, rtol=2e-2, atol=2e-1)
    assert op.counts["prepare"] == 1
    matrices = [torch.stack([part, part]) for part in given]
    found = torch.func.vmap(lambda x, *parts: form.call(x, parts, keep_bf16=True))(pair, *matrices)
    close(found, expected, rtol=2e-2, atol=2e-1)


def test_derivatives_of_scales_and_biases() -> None:
    x, (w, *parts) = case(AFFINE)
    parts = [part.requires_grad_() for part in parts]
    tangents = tuple(torch.randn_like(part) for part in parts)
    results = []
    for keep in (True, False):
        y = AFFINE.call(x, [w, *parts], keep_bf16=keep)
        results += [torch.autograd.grad(y, parts, torch.ones_like(y))]
        values = tuple(part.detach() for part in parts)
        results[-1] += torch.func.jvp(
            lambda *parts, keep=keep: AFFINE.call(x, [w, *parts], keep_bf16=keep), values, tangents
        )
    for found, right in zip(*results, strict=True):
        torch.testing.assert_close(found, right, rtol=2e-2, atol=2e-1)


class Layer(torch.nn.Module):
    """A matrix as checkpoints have it: its bytes, and torch's 8-bit floats."""

    def __init__(self, keep: bool = True) -> None:
        super().__init__()
        _, (packed, scales) = case(NVFP4)
        self.keep = keep
        self.register_buffer("packed", packed.view(torch.uint8))
        self.register_buffer("scales", scales.view(torch.float8_e4m3fn))

    def forward(self, x: Any) -> Any:
        return NVFP4.call(x, [self.packed, self.scales], keep_bf16=self.keep) * 2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph(backend: str) -> None:
    """Whose views of the bytes have the bytes' versions."""
    torch.compiler.reset()
    op, layer, plain = op_of(NVFP4), Layer(), Layer(keep=False)
    turned = op_of(NVFP4._replace(transpose=False))
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for step, rows in enumerate((20, 33, 12)):
        x = case(NVFP4, rows)[0].requires_grad_()
        y, expected = compiled(x), plain(x)
        torch.testing.assert_close(y, expected, rtol=2e-2, atol=4e-1)
        found, right = (torch.autograd.grad(one.sum(), x)[0] for one in (y, expected))
        torch.testing.assert_close(found, right, rtol=2e-2, atol=4e-1)
        assert op.counts["prepare"] + turned.counts["prepare"] == 1 + step
        for each in (layer, plain):
            each.packed.copy_(each.packed.flip(0))


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_have_the_packed_product_alone(strict: bool) -> None:
    layer, (x, _) = Layer(), case(NVFP4)
    rows = {0: torch.export.Dim("rows", min=2, max=64)}
    program = torch.export.export(layer, (x,), dynamic_shapes=(rows,), strict=strict)
    file = io.BytesIO()
    ferrule.save(program, file)
    file.seek(0)
    again = ferrule.load(file).module()
    op = op_of(NVFP4)
    for count in (20, 7):
        x, _ = case(NVFP4, count)
        assert torch.equal(again(x), Layer(keep=False)(x))
    assert op.counts["prepare"] == 0
    assert op.torch_op not in {node.target for node in program.graph.nodes}


# -- CUDA graphs -----------------------------------------------------------------------------------


def test_not_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    (x, given), _ = case(AFFINE), op_of(AFFINE)
    with monkeypatch.context() as patch:
        patch.setattr(torch_host, "capturing", lambda device: True)
        with pytest.raises(KernelError, match="Call the op once with them before the capture"):
            AFFINE.call(x, given, keep_bf16=True)
    expected = AFFINE.call(x, given, keep_bf16=True)
    with monkeypatch.context() as patch:
        patch.setattr(torch_host, "capturing", lambda device: True)
        assert torch.equal(AFFINE.call(x, given, keep_bf16=True), expected)
