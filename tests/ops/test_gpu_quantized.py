"""Products with quantized matrices on a real GPU: every kernel, against float64 and dequantize."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from ferrule import KernelError, ops

torch = pytest.importorskip("torch")

from torch_cuda import ON_GPU, captured  # noqa: E402

pytestmark = [
    *ON_GPU,
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),
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
    """Of all bytes of scales, those that are NaN too; and in a matrix that is high, which has other
    tiles, and tables."""
    repeats = torch.cuda.get_device_properties(0).multi_processor_count * 48 // 256 + 1
    codes = torch.arange(256, dtype=torch.uint8).repeat(1, 1).view(torch.int32).view(torch.uint32)
    cases = itertools.product(FORMATS[:3], (1, 64, 300), (1,))
    high = itertools.product(FORMATS[:3], (1, 8, 16), (repeats,))
    for form, count, times in (*cases, *high):
        mode, group, bits = form
        width = 256 * 8 // bits  # elements of all codes
        scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(times, width // group)
        parts = [codes.repeat(256 * times, 1).cuda(), scales.cuda()]
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


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("form", FORMATS[:6], ids=str)
def test_many_rows_of_high_matrices(form: Any, dtype: Any) -> None:
    """Blocks make one tile after another; the last ones have fewer rows of x and of w."""
    half = torch.cuda.get_device_properties(0).multi_processor_count * 64
    for n, k, rows in ((2 * half - 120, 256, (129, 256, 250)), (4 * half - 3, 384, (512, 1000))):
        names, parts, dense = quantized(form, dtype, n, k)
        for m in rows:
            x = torch.randn(m, k, device="cuda").to(dtype)
            y = ops.quantized_matmul(x, *parts, **names)
            close(y, x, dense.mT)
            assert torch.equal(y, ops.quantized_matmul(x, *parts, **names))


@pytest.mark.parametrize("form", FORMATS[:6], ids=str)
def test_high_matrices(form: Any) -> None:
    """Rows of w for every multiprocessor: tiles of each height, of which the last is not full."""
    count = torch.cuda.get_device_properties(0).multi_processor_count
    # From 128 on but of 144 two blocks share one: of 64, 80, 96, 112, 128 rows.
    heights = (48, 64, 80, 96, 112, 128, 144, 160, 190, 200, 250)
    for height, dtype in itertools.product(heights, DTYPES[:2]):
        names, parts, dense = quantized(form, dtype, count * height - 5, 512 + form[1])
        for m in (1, 8, 11, 16, 24, 50):
            x = torch.randn(m, 512 + form[1], device="cuda").to(dtype)
            close(ops.quantized_matmul(x, *parts, **names), x, dense.mT)


# -- what is kept ----------------------------------------------------------------------------------


@pytest.fixture
def sums_of_float32() -> Any:
    """Torch's products add up in float32 all the way."""
    matmul = torch.backends.cuda.matmul
    names = [f"allow_{name}_reduced_precision_reduction" for name in ("bf16", "fp16")]
    before = [getattr(matmul, name) for name in names]
    for name in names:
        setattr(matmul, name, False)
    yield
    for name, value in zip(names, before, strict=True):
        setattr(matmul, name, value)


@pytest.mark.usefixtures("sums_of_float32")
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
        with pytest.raises(KernelError, match="Call the op once with them before the capture"):
            captured(lambda: module(x))
        torch.cuda.synchronize()
        module(x)
        graph, y = captured(lambda: module(x))

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


# -- of any format, either way round ---------------------------------------------------------------

KINDS = ["tokens", "each", "both", "broadcast", "left", "none", "outside"]


def indices(kind: str, experts: int, count: int) -> tuple[Any, Any, tuple[int, ...]]:
    """Both indices, of which some name nothing or are omitted, and the batch of x."""

    def some(n: int, *shape: int) -> Any:
        return torch.randint(0, n, shape, device="cuda")

    if kind == "tokens":
        return None, some(experts, count, 3).int(), (count, 1)
    if kind == "each":
        return None, some(experts, count), (count,)
    if kind == "both":
        return some(7, count), some(max(experts - 2, 1), count), (7,)  # some have no rows
    if kind == "broadcast":
        return some(7, 2, count), some(experts, count).int(), (7,)
    if kind == "left":
        return some(7, 2, experts), None, (7,)
    if kind == "none":
        return None, None, (experts,)
    lhs, rhs = some(7, count), some(experts, count)
    lhs[count // 2], rhs[0], rhs[-1] = 7, -1, experts
    return lhs, rhs, (7,)


def places(lhs: Any, rhs: Any, batch: tuple[int, ...], experts: int) -> tuple[Any, Any]:
    """The same as matrices of each result."""
    left = torch.arange(math.prod(batch), device="cuda").view(batch) if lhs is None else lhs.long()
    right = torch.arange(experts, device="cuda") if rhs is None else rhs.long()
    return torch.broadcast_tensors(left, right)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", [None, *FORMATS], ids=str)
def test_gathers(form: Any, dtype: Any, kind: str) -> None:
    """M rows and more, tails of all sizes; rows of the identity are exact, and no bit changes."""
    turns = (True, False) if form else (False,)
    for (count, m), transpose in itertools.product(((3, 1), (40, 1), (700, 1), (5, 130)), turns):
        group = form[1] if form else 1
        rows, columns = (136, 72) if count > 9 else (130, 70)
        call, dense = product_of(form, dtype, transpose, 5, rows, 3 * group if form else columns)
        lhs, rhs, batch = indices(kind, 5, count)
        left, right = places(lhs, rhs, batch, 5)
        k = dense.shape[-2]
        memory = torch.randn(math.prod(batch) * m * k + 1, device="cuda").to(dtype)
        eye = torch.eye(k, device="cuda", dtype=dtype)[torch.randint(0, k, (*batch, m))]
        aligned, moved = memory[:-1].view(*batch, m, k), memory[1:].view(*batch, m, k)
        inside = (left < math.prod(batch)) & (right >= 0) & (right < 5)
        for x in (aligned, moved, eye):
            found = call(x, lhs, rhs)
            assert torch.equal(found[inside], call(x, lhs, rhs)[inside])
            assert found[~inside].isnan().all()
            chosen, matrices = x.reshape(-1, m, k)[left[inside]], dense[right[inside]]
            if x is eye:
                assert torch.equal(found[inside].double(), chosen.double() @ matrices.double())
            else:
                close(found[inside], chosen, matrices)


def product_of(form: Any, dtype: Any, transpose: bool, *shape: int) -> tuple[Any, Any]:
    """``call(x, lhs, rhs, *parts)`` and its matrices, ``[E, K, N]``; the parts stand in it."""
    if form is None:
        w = torch.randn(shape, device="cuda").to(dtype)

        def plain(x: Any, lhs: Any, rhs: Any, *parts: Any) -> Any:
            return ops.gather_mm(x, *(parts or (w,)), lhs, rhs)

        plain.parts = [w]  # type: ignore[attr-defined]
        return plain, w
    names, stored, dense = quantized(form, dtype, *shape)

    def call(x: Any, lhs: Any, rhs: Any, *parts: Any) -> Any:
        chosen = {"lhs_indices": lhs, "rhs_indices": rhs}
        return ops.gather_qmm(x, *(parts or stored), transpose=transpose, **chosen, **names)

    call.parts = stored  # type: ignore[attr-defined]
    return call, dense.mT if transpose else dense


@pytest.mark.parametrize("kind", KINDS[:-1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", [None, FORMATS[0], FORMATS[4], FORMATS[7]], ids=str)
def test_gradients_of_gathers(form: Any, dtype: Any, kind: str) -> None:
    if form is None and kind == "none":
        return  # that is torch's product
    for (count, m), transpose in itertools.product(((40, 1), (5, 70)), (True, False)):
        call, dense = product_of(form, dtype, transpose, 5, 192, 128)
        lhs, rhs, batch = indices(kind, 5, count)
        x = torch.randn(*batch, m, dense.shape[-2], device="cuda").to(dtype).requires_grad_()
        parts = [part.requires_grad_(part.is_floating_point()) for part in call.parts]
        leaves = [x, *[part for part in parts if part.requires_grad]]
        y = call(x, lhs, rhs, *parts)
        c = torch.randn_like(y)
        found = torch.autograd.grad(y, leaves, c)
        with torch.no_grad():
            left, right = (at.reshape(-1) for at in places(lhs, rhs, batch, 5))
            rows, of_y = (v.reshape(-1, *v.shape[-2:]).double() for v in (x, c))
            of_x, of_w = torch.zeros_like(rows), torch.zeros_like(dense, dtype=torch.float64)
            for i, (at, e) in enumerate(zip(left.tolist(), right.tolist(), strict=True)):
                of_x[at] += of_y[i] @ dense[e].double().mT
                of_w[e] += rows[at].mT @ of_y[i]
            expected = [of_x]
            if form is None:
                expected.append(of_w)
            elif form[0] == "affine":
                numbers = (torch.ones_like(parts[1]).float(), torch.zeros_like(parts[1]).float())
                q = ops.dequantize(parts[0], *numbers, *form[1:]).double()
                of_w = of_w.mT if transpose else of_w
                for of_part in (of_w * q, of_w):
                    groups = of_part.reshape(*of_part.shape[:-1], -1, form[1])
                    expected.append(groups.sum(-1))
            for gradient, right_one in zip(found, expected, strict=True):
                error = (gradient.double().reshape(right_one.shape) - right_one).abs().max()
                # in float32 sums of a thousand products round more than their result
                of_sums = 1e-4 if dtype == torch.float32 else 2e-5
                assert error <= 4 * ROUNDING[dtype] * right_one.abs().max() + of_sums


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("form", [None, FORMATS[0], FORMATS[7]], ids=str)
def test_batches_of_gathers(form: Any, transpose: bool) -> None:
    call, dense = product_of(form, torch.bfloat16, transpose, 5, 96, 128)
    x = torch.randn(3, 6, 1, 1, dense.shape[-2], device="cuda").bfloat16()
    rhs = torch.randint(0, 5, (3, 6, 2), device="cuda")
    close(torch.vmap(lambda x: call(x, None, rhs[0]))(x), x, dense[rhs[0]])
    close(torch.vmap(lambda x, rhs: call(x, None, rhs))(x, rhs), x, dense[rhs])
    parts = [torch.stack([part, part.flip(0)]) for part in call.parts]
    found = torch.vmap(lambda *parts: call(x[0], None, rhs[0], *parts))(*parts)
    close(found, x[0], torch.stack([dense, dense.flip(0)])[:, rhs[0]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_batches_of_matrices(form: Any, dtype: Any) -> None:
    """Of w without indices, as many as of x, and fewer."""
    for transpose in (True, False):
        names, parts, dense = quantized(form, dtype, 3, 192, 256)
        dense = dense.mT if transpose else dense
        for batch, m in (((3,), 1), ((3,), 140), ((2, 3), 5), ((), 4)):
            x = torch.randn(*batch, m, dense.shape[-2], device="cuda").to(dtype)
            close(ops.quantized_matmul(x, *parts, transpose=transpose, **names), x, dense)
