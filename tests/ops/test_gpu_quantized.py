"""Products with quantized matrices on a real GPU: every kernel, against float64 and dequantize."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import on_cuda
from ferrule import KernelError, ops

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (on_cuda.available() and torch.cuda.is_available()), reason="there is no GPU for torch"
    ),
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
]

FORMATS = [
    ("nvfp4", 16, 4), ("mxfp4", 32, 4), ("mxfp8", 32, 8), ("affine", 32, 4), ("affine", 64, 4),
    ("affine", 128, 8), ("affine", 64, 2), ("affine", 32, 3), ("affine", 64, 5), ("affine", 64, 6),
]  # fmt: skip
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Of the result's rounding, relative to it.
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-23}


def quantized(form: Any, dtype: Any, *shape: int) -> tuple[dict[str, Any], list[Any], Any]:
    """How a matrix is read, its parts, and what it is, all on the GPU."""
    mode, group, bits = form
    names = {"group_size": group, "bits": bits, "mode": mode}
    w = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)
    parts = [part.cuda() for part in ops.quantize(w, *form[1:], mode)]
    kept = {} if mode == "affine" else {"dtype": str(dtype).removeprefix("torch.")}
    dense = ops.dequantize(*[part.cpu() for part in parts], **names, **kept)
    assert torch.equal(ops.dequantize(*parts, **names, **kept).cpu(), dense)
    return names, parts, dense.cuda()


def close(found: Any, x: Any, dense: Any, scale: float = 1.0) -> None:
    """Within the bound of sums in float32, of any order, of elements that are rounded once."""
    expected = x.double() @ dense.double() * scale
    assert found.dtype == x.dtype and found.shape == expected.shape
    terms = x.double().abs() @ dense.double().abs() * scale
    bound = ROUNDING[x.dtype] * expected.abs() + x.shape[-1] * 2.0**-23 * terms
    assert ((found.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_products(form: Any, dtype: Any) -> None:
    for (n, k), transpose in itertools.product(((192, 384), (136, 1152)), (True, False)):
        n = n if transpose else 256
        names, parts, dense = quantized(form, dtype, *((n, k) if transpose else (k, n)))
        dense = dense.mT if transpose else dense
        for m in (1, 5, 8, 16, 17, 33, 64, 65, 130, 300, 600):
            x = torch.randn(m, k, device="cuda").to(dtype)
            y = ops.quantized_matmul(x, *parts, transpose=transpose, **names)
            close(y, x, dense)
            assert torch.equal(y, ops.quantized_matmul(x, *parts, transpose=transpose, **names))
        if n % form[1] == 0 or transpose:
            x = torch.randn(3, k, device="cuda", dtype=dtype, requires_grad=True)
            y = ops.quantized_matmul(x, *parts, transpose=transpose, **names)
            c = torch.randn_like(y)
            close(torch.autograd.grad(y, x, c)[0], c, dense.mT)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_rows_of_one(form: Any, dtype: Any) -> None:
    names, parts, dense = quantized(form, dtype, 130, 256)
    eye = torch.eye(256, device="cuda", dtype=dtype)
    for m in (1, 8, 16, 32, 64, 256):
        for at in range(0, 256, 64):
            found = ops.quantized_matmul(eye[at : at + m], *parts, **names)
            assert torch.equal(found, dense[:, at : at + m].mT)


def test_each_code_and_scale() -> None:
    """Of all bytes of scales, those that are NaN too."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(1, 1).view(torch.int32).view(torch.uint32)
    for form, count in itertools.product(FORMATS[:3], (1, 64, 300)):
        mode, group, bits = form
        width = 256 * 8 // bits  # elements of all codes
        scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, width // group)
        parts = [codes.repeat(256, 1).cuda(), scales.cuda()]
        for dtype in DTYPES[:2]:
            kept = {"mode": mode, "dtype": str(dtype).removeprefix("torch.")}
            dense = ops.dequantize(*[part.cpu() for part in parts], **kept).cuda()
            eye = torch.eye(width, device="cuda", dtype=dtype)[:count]
            found = ops.quantized_matmul(eye, *parts, mode=mode)
            rows = dense.isfinite().all(1)  # others are NaN, whatever x is, or 0 times infinity
            assert torch.equal(found[:, rows], dense[rows][:, :count].mT)
            assert found[:, dense.isnan().all(1)].isnan().all()


@pytest.mark.parametrize("count", [1, 8, 40, 200])
@pytest.mark.parametrize("form", FORMATS[:6], ids=str)
def test_experts(form: Any, count: int) -> None:
    names, parts, dense = quantized(form, torch.bfloat16, 16, 192, 384)
    x = torch.randn(count, 1, 1, 384, device="cuda").bfloat16()
    chosen = torch.stack([torch.randperm(16)[:3] for _ in range(count)]).cuda()
    close(ops.gather_qmm(x, *parts, rhs_indices=chosen, **names), x, dense[chosen].mT)
    rows, where = x[:, 0, :1], chosen[:, 0].sort().values
    close(ops.gather_qmm(rows, *parts, rhs_indices=where, **names), rows, dense[where].mT)
    lhs = torch.randint(0, count, (2, 5), device="cuda")
    rhs = torch.randint(0, 16, (5,), device="cuda", dtype=torch.int32)
    found = ops.gather_qmm(rows, *parts, lhs_indices=lhs, rhs_indices=rhs, **names)
    close(found, rows[lhs], dense[rhs].mT)
    close(ops.gather_qmm(rows, *parts, lhs_indices=lhs[:, :1], **names), rows[lhs[:, :1]], dense.mT)
    outside = chosen.clone()
    outside[0, 1], outside[-1, -1] = -1, 16
    found = ops.gather_qmm(x, *parts, rhs_indices=outside, **names)
    wrong = (outside < 0) | (outside > 15)
    assert found[wrong].isnan().all() and found[~wrong].isfinite().all()


@pytest.mark.parametrize("form", FORMATS[:6], ids=str)
def test_rows_that_are_not_aligned(form: Any) -> None:
    """Of a few groups, and x that begins anywhere."""
    for k, m in itertools.product((form[1], 3 * form[1], 1024 + form[1]), (1, 7, 40, 100)):
        names, parts, dense = quantized(form, torch.bfloat16, 33, k)
        memory = torch.randn(m * k + 1, device="cuda").bfloat16()
        for x in (memory[:-1].view(m, k), memory[1:].view(m, k)):
            close(ops.quantized_matmul(x, *parts, **names), x, dense.mT)


@pytest.mark.parametrize("shape", [(3, 1, 1, 64), (3, 2, 64)], ids=str)
def test_transformations_of_gathers(shape: Any) -> None:
    names, parts, dense = quantized(FORMATS[4], torch.bfloat16, 5, 128, 64)
    x = torch.randn(4, *shape, device="cuda").bfloat16()
    chosen = torch.randint(0, 5, (3, 2) if len(shape) == 4 else (3,), device="cuda")

    def call(x: Any, chosen: Any = chosen) -> Any:
        return ops.gather_qmm(x, *parts, rhs_indices=chosen, **names)

    close(torch.vmap(call)(x), x, dense[chosen].mT)
    batch = torch.stack([chosen, 4 - chosen])
    for y, one in zip(torch.vmap(call, (None, 0))(x[0], batch), batch, strict=True):
        close(y, x[0], dense[one].mT)
    y, tangent = torch.func.jvp(call, (x[0],), (x[1],))
    close(y, x[0], dense[chosen].mT)
    close(tangent, x[1], dense[chosen].mT)
    leaf = x[0].clone().requires_grad_()
    y = call(leaf)
    c = torch.randn_like(y)
    found = torch.autograd.grad(y, leaf, c)[0]
    expected = (c.double() @ dense[chosen].double()).sum(-3, keepdim=len(shape) == 4)
    expected = expected if len(shape) == 4 else c.double() @ dense[chosen].double()
    assert (found.double() - expected).abs().max() < 0.05 * expected.abs().max()


def test_a_global_scale() -> None:
    names, parts, dense = quantized(FORMATS[0], torch.bfloat16, 4, 192, 384)
    amax = torch.tensor([0.5, 3.0, 700.0, 2688.0], device="cuda")
    for m in (1, 64, 200):
        x = torch.randn(m, 384, device="cuda").bfloat16()
        given = [part[1] for part in parts]
        found = ops.quantized_matmul(x, *given, global_scale=3.0, **names)
        close(found, x, dense[1].mT, 3 / 2688)
        each = ops.gather_qmm(
            x[None], *parts, rhs_indices=torch.arange(4).cuda(), global_scale=amax, **names
        )
        for y, w, scale in zip(each, dense, amax.tolist(), strict=True):
            close(y, x, w.mT, scale / 2688)


def test_in_a_graph() -> None:
    """A CUDA graph, and torch.compile with sizes that change."""
    names, parts, dense = quantized(FORMATS[0], torch.bfloat16, 8, 192, 384)
    x = torch.randn(4, 1, 1, 384, device="cuda").bfloat16()
    chosen = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]], device="cuda")

    def call(x: Any, chosen: Any) -> Any:
        return ops.gather_qmm(x, *parts, rhs_indices=chosen, **names)

    call(x, chosen)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call(x, chosen)
    chosen.copy_(7 - chosen)
    graph.replay()
    close(y, x, dense[chosen].mT)
    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    for count in (3, 5, 70):
        x = torch.randn(count, 1, 1, 384, device="cuda").bfloat16()
        chosen = torch.randint(0, 8, (count, 2), device="cuda")
        close(compiled(x, chosen), x, dense[chosen].mT)


# -- what is kept ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_products_with_a_matrix_that_is_kept(form: Any, dtype: Any) -> None:
    names, parts, dense = quantized(form, dtype, 192, 384)
    for m in (1, 8, 16, 64, 65, 512, 513, 2000):
        x = torch.randn(m, 384, device="cuda", dtype=dtype, requires_grad=True)
        y = ops.quantized_matmul(x, *parts, **names, keep_bf16=True)
        close(y.detach(), x.detach(), dense.mT)
        c = torch.randn_like(y)
        close(torch.autograd.grad(y, x, c)[0], c, dense)
    eye = torch.eye(384, device="cuda", dtype=dtype).repeat(2, 1)
    y = ops.quantized_matmul(eye, *parts, **names, keep_bf16=True)
    assert torch.equal(y, dense.mT.repeat(2, 1))
    del x, y, c, eye
    before = torch.cuda.memory_allocated()
    parts.clear()
    assert before - torch.cuda.memory_allocated() >= dense.numel() * 2


@pytest.mark.parametrize("m", [8, 513, 2000])
def test_a_global_scale_and_a_matrix_that_is_kept(m: int) -> None:
    names, parts, dense = quantized(FORMATS[0], torch.bfloat16, 192, 384)
    for scale in (3.0, torch.tensor(700.0, device="cuda")):
        x = torch.randn(2, m, 384, device="cuda").bfloat16()
        y = ops.quantized_matmul(x, *parts, global_scale=scale, **names, keep_bf16=True)
        close(y, x, dense.mT, float(scale) / 2688)


@pytest.mark.parametrize("mode", ["graph", "reduce-overhead"])
def test_graphs_and_a_matrix_that_is_kept(mode: str) -> None:
    """It is no memory of a graph's: written anew, a graph reads it after the next eager call."""
    names, parts, dense = quantized(FORMATS[0], torch.bfloat16, 192, 384)
    module = torch.nn.Module()  # a graph copies tensors that are no module's
    for i, part in enumerate(parts):
        module.register_buffer(f"part_{i}", part)
    module.forward = lambda x: ops.quantized_matmul(
        x, module.part_0, module.part_1, **names, keep_bf16=True
    )
    x = torch.randn(600, 384, device="cuda").bfloat16()
    if mode == "graph":
        refused = pytest.raises(KernelError, match="Call the op once with them before the capture")
        with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
            module(x)
        torch.cuda.synchronize()
        module(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = module(x)

        def run() -> Any:
            graph.replay()
            return y
    else:
        compiled = torch.compile(module, mode="reduce-overhead", fullgraph=True)

        def run() -> Any:  # the first calls, one of which warms up, make the matrix
            torch.compiler.cudagraph_mark_step_begin()
            return compiled(x).clone()

    for _ in range(4):
        close(run(), x, dense.mT)
    parts[0].copy_(parts[0].view(torch.int32).flip(0).view(torch.uint32))
    parts[1].copy_(parts[1].flip(0))
    close(module(x), x, dense.flip(0).mT)
    close(run(), x, dense.flip(0).mT)
