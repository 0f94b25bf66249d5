"""The CUDA bodies of ferrule.ops compile, and hardly spill: no GPU is needed to know it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule import ops
from ferrule.operators import text
from ferrule.operators.unit_steps import CudaUnit
from ferrule.ops import quantized_cuda
from ferrule.ops.nvfp4.linear import linear_op
from ferrule.ops.nvfp4.moe import moe_op
from ferrule.tools import nvrtc


def norm(n: int) -> dict[str, Any]:
    """The inputs of norms of rows of so many elements."""
    return {"x": (3, n), "residual": (3, n), "weight": (n,), "bias": (n,), "eps": 1e-5}


def rows(n: int) -> dict[str, Any]:
    """The inputs of their gradients."""
    return {"x": (1, 3, n), "weight": (n,), "eps": 1e-5, "cotangent": (1, 3, n)}


GRID = {"x": (2, 9, 9, 16), "grid": (2, 5, 5, 2)}


@pytest.mark.parametrize(
    ("op", "inputs"),
    [
        (ops.norms._layer_norm(0, True, True, False), norm(4096)),
        (ops.norms._layer_norm(0, True, True, False), norm(40000)),
        (ops.norms._rms_norm(0, True, True, False), norm(16384)),
        (ops.norm_weights._gradients(True, False, False), rows(1024)),
        (ops.norm_weights._gradients(True, False, False), rows(16384)),
        (ops.softmaxes._softmax(0, False), {"x": (3, 16384)}),
        (ops.sampling.sampler("bilinear", "zeros", False, "NHWC", False), GRID),
    ],
    ids=lambda value: value.name if isinstance(value, ferrule.Op) else "",
)
@pytest.mark.parametrize("dtype", [ferrule.float32, ferrule.float16, ferrule.bfloat16], ids=str)
def test_compiles_and_hardly_spills(
    library: nvrtc.Nvrtc, dtype: Any, op: ferrule.Op, inputs: Mapping[str, Any]
) -> None:
    names = [argument.name for argument in op.rule.inputs]
    given = {
        name: (value, dtype if name != "grid" else ferrule.float32)
        if isinstance(value, tuple)
        else value
        for name, value in inputs.items()
        if name in names
    }
    bodies = [body for body in op.implementations if body.kind == "cuda"]
    calls = [call for body in bodies if (call := text.described(op, body, given, "cuda"))]
    kernel, call = calls[0]
    spilled = re.findall(r"(\d+) bytes spill", kernel.compile("sm_90", **call).log)
    # 1024 threads leave each 64 registers, of which these need a few more.
    many = op.name == "layer_norm_gradients" and inputs == rows(16384) and dtype == ferrule.float32
    assert spilled and max(map(int, spilled)) <= (48 if many else 0)


def chosen_log(op: ferrule.Op, inputs: Mapping[str, Any]) -> str | None:
    """What the compiler says of the unit that a GPU takes for such inputs; None where none is."""
    for body in op.implementations:
        if isinstance(body, CudaUnit) and (unit := text.described_unit(op, body, inputs)):
            return unit.compile("sm_90").log
    return None


@pytest.mark.parametrize(
    ("form", "transpose", "dtype", "rows"),
    [
        (("nvfp4", 16, 4), False, ferrule.bfloat16, 8),
        (("affine", 64, 4), False, ferrule.bfloat16, 400),
        (("affine", 32, 3), True, ferrule.float16, 100),
        (("affine", 32, 5), True, ferrule.float32, 400),
        (None, True, ferrule.bfloat16, 100),
        (None, False, ferrule.float32, 8),
    ],
    ids=str,
)  # fmt: skip
def test_units_of_gathers_do_not_spill(
    library: nvrtc.Nvrtc, form: Any, transpose: bool, dtype: Any, rows: int
) -> None:
    height, width = (64, 512) if transpose else (512, 64)
    given: dict[str, Any] = {
        "x": ((rows, 1, 512), dtype), "w": ((4, height, width), dtype),
        "lhs": ((rows,), ferrule.int32), "rhs": ((rows,), ferrule.int64),
    }  # fmt: skip
    if form is None:
        op = ops.gathered._gathered("lr", transpose)
    else:
        mode, group, bits = form
        op = ops.quantized._product(mode, group, bits, transpose, "lr", False)
        scales = (4, height, width // group), dtype if mode == "affine" else ferrule.uint8
        words = (4, height, width * bits // 32), ferrule.uint32
        given |= {"w": words, "scales": scales, "biases": scales}
    names = [argument.name for argument in op.rule.inputs]
    log = chosen_log(op, {name: given[name] for name in names})
    assert log and set(re.findall(r"(\d+) bytes spill", log)) == {"0"}
    sums = {"left": given["x"], "right": ((rows, 1, 64), dtype), "like": ((4, 1, 1), dtype)}
    log = chosen_log(ops.gathered.outer("lr"), {**sums, "lhs": given["lhs"], "rhs": given["rhs"]})
    assert log and set(re.findall(r"(\d+) bytes spill", log)) == {"0"}


@pytest.mark.parametrize(
    ("form", "letters", "rows", "high"),
    [
        (("nvfp4", 16, 4), "", 1, 64), (("affine", 64, 4), "", 16, 64),
        (("mxfp8", 32, 8), "", 32, 64), (("mxfp4", 32, 4), "", 64, 64),
        (("affine", 32, 3), "", 70, 64), (("nvfp4", 16, 4), "", 70, 64),
        (("nvfp4", 16, 4), "tr", 2, 64), (("affine", 128, 8), "lr", 100, 64),
        (("nvfp4", 16, 4), "", 8, 64 * 132), (("affine", 32, 4), "", 16, 80 * 132),
        (("mxfp4", 32, 4), "", 2, 112 * 132), (("affine", 64, 8), "", 9, 144 * 132),
        (("nvfp4", 16, 4), "", 128, 256 * 132), (("affine", 32, 8), "", 100, 256 * 132),
    ],
    ids=str,
)  # fmt: skip
def test_units_of_quantized_matrices_do_not_spill(
    library: nvrtc.Nvrtc, form: tuple[str, int, int], letters: str, rows: int, high: int
) -> None:
    (mode, group, bits), dtype = form, ferrule.bfloat16
    op = ops.quantized._product(mode, group, bits, True, letters, False)
    batch = (4,) if letters else ()
    scales = (*batch, high, 512 // group), dtype if mode == "affine" else ferrule.uint8
    given: dict[str, Any] = {
        "x": ({"": (rows, 512), "tr": (rows, 1, 1, 512), "lr": (rows, 1, 512)}[letters], dtype),
        "w": ((*batch, high, 512 * bits // 32), ferrule.uint32),
        "scales": scales,
        "biases": scales,
        "lhs": ((rows, 2), ferrule.int32),
        "rhs": ((rows, 2), ferrule.int64),
    }
    names = [argument.name for argument in op.rule.inputs]
    inputs = {name: given[name] for name in names}
    units = [
        unit
        for body in op.implementations
        if body.kind == "cuda" and (unit := text.described_unit(op, body, inputs))
    ]
    log = units[0].compile("sm_90").log
    assert set(re.findall(r"(\d+) bytes spill", log)) == {"0"}


FORMATS = [
    ("nvfp4", 16, 4), ("mxfp4", 32, 4), ("mxfp8", 32, 8), ("affine", 32, 4), ("affine", 64, 4),
    ("affine", 32, 8), ("affine", 128, 8), ("affine", 32, 3),
]  # fmt: skip
# Capability, multiprocessors, and KB of shared memory that a block may have.
GPUS = [
    (80, 108, 163), (86, 84, 99), (87, 16, 163), (89, 128, 99), (90, 132, 227), (90, 78, 227),
    (100, 148, 227), (120, 170, 99), (121, 48, 99),
]  # fmt: skip


@pytest.mark.parametrize("form", FORMATS, ids=str)
@given(
    gpu=st.sampled_from(GPUS),
    letters=st.sampled_from(["", "tr", "lr"]),
    transpose=st.booleans(),
    dtype=st.sampled_from([ferrule.bfloat16, ferrule.float16, ferrule.float32]),
    high=st.sampled_from([1, 8, 32, 64, 70, 80, 96, 110, 144, 250]),
    off=st.integers(-8, 8),
    k=st.sampled_from([1, 3, 16, 64, 200]),
    rows=st.integers(1, 70) | st.sampled_from([128, 500, 1000, 2000]),
)
@settings(max_examples=60, deadline=None)
def test_units_of_quantized_matrices_fit_every_gpu(
    form: tuple[str, int, int], gpu: tuple[int, int, int], letters: str, transpose: bool,
    dtype: Any, high: int, off: int, k: int, rows: int,
) -> None:  # fmt: skip
    """What is chosen has no more shared memory than there is, and each GPU has something."""
    (mode, group, bits), (capability, count, room) = form, gpu
    op = ops.quantized._product(mode, group, bits, transpose, letters, False)
    n, width = max(high * count + off, 1) if high > 1 else 32 * group, group * k
    n = n if transpose else -(-n // group) * group
    shape = (n, width) if transpose else (width, n)
    batch = (5,) if letters else ()
    scales = (*batch, shape[0], shape[1] // group), dtype if mode == "affine" else ferrule.uint8
    array: dict[str, Any] = {
        "x": ((rows, *{"": (), "tr": (1, 1), "lr": (1,)}[letters], width), dtype),
        "w": ((*batch, shape[0], shape[1] * bits // 32), ferrule.uint32),
        "scales": scales,
        "biases": scales,
        "lhs": ((rows, 2), ferrule.int32),
        "rhs": ((rows, 2), ferrule.int64),
    }
    binding = text._bind(op, {a.name: array[a.name] for a in op.rule.inputs}).binding
    binding.device = lambda: {":device": "cuda", "sm_count": count, "capability": capability}
    chosen = next(body for body in op.implementations if body.holds(binding))
    if isinstance(chosen, CudaUnit):
        for _, step in chosen.launch_for(binding).steps:
            assert getattr(step, "shared", 0) <= (room - 1) * 1024
    else:  # rows so few that a Metal body is as fast
        assert rows <= quantized_cuda.FEWEST and not letters


# Of an H100: where one matrix or many have products by blocks that stay, and what is there else.
@pytest.mark.parametrize(
    ("rows", "n", "function"),
    [
        (16, 28672, "dense"), (64, 28672, "wide"), (65, 4096, "wide"), (128, 28672, "persistent"),
        (512, 4096, "wide"), (513, 1024, "weights"), (1024, 28672, "persistent"),
        (1025, 28672, "persistent"), (1537, 28672, "weights"),
    ],
)  # fmt: skip
def test_products_of_one_matrix(rows: int, n: int, function: str) -> None:
    given = {
        "x": ((rows, 4096), ferrule.bfloat16),
        "w_packed": ((n, 2048), ferrule.uint8),
        "w_scale": ((n, 256), ferrule.uint8),
        "w_scale_2": ((), ferrule.float32),
    }
    for backend in ("", "packed"):
        op = linear_op("nvfp4", False, False, backend)
        binding = text._bind(op, given).binding.on(text._hopper)
        chosen = next(body for body in op.implementations if body.holds(binding))
        steps = [step for step, _ in chosen.launch_for(binding).steps]
        assert function in [step.function for step in steps if hasattr(step, "function")]
        function = "persistent" if function == "weights" else function


def mixture(tokens: int, experts: int, wide: int) -> tuple[ferrule.Op, dict[str, Any]]:
    """An op, and inputs for it: 8 experts of each token, matrices of 2048 by so many."""
    op, e = moe_op("nvfp4", "silu", False, True), experts
    given: dict[str, Any] = {
        "x": ((tokens, 2048), ferrule.float16),
        "weights": ((tokens, 8), ferrule.bfloat16),
        "ids": ((tokens, 8), ferrule.int32),
        "w13_packed": ((e, 2, wide, 1024), ferrule.uint8),
        "w13_scale": ((e, 2, wide, 128), ferrule.uint8),
        "w13_scale_2": ((e, 2), ferrule.float32),
        "w2_packed": ((e, 2048, wide // 2), ferrule.uint8),
        "w2_scale": ((e, 2048, wide // 16), ferrule.uint8),
        "w2_scale_2": ((e,), ferrule.float32),
        "expert_map": ((2 * e,), ferrule.int64),
    }
    return op, given


@pytest.mark.parametrize("tokens", [400, 4000])
def test_mixtures_of_many_tokens_compile_for_all(library: nvrtc.Nvrtc, tokens: int) -> None:
    """Packages have them for other GPUs, too, which never start them."""
    op, given = mixture(tokens, 128, 768)
    units = [text.described_unit(op, body, given) for body in op.implementations[:-1]]
    unit = next(unit for unit in units if unit)
    for architecture in ("sm_80", "sm_90", "sm_120"):
        log = unit.compile(architecture).log
        spilled = [int(count) for count in re.findall(r"(\d+) bytes spill", log)]
        assert spilled and max(spilled) <= 40
        # Warp groups that multiply get registers of the one that copies, if all begin with these.
        assert architecture != "sm_90" or log.count("Used 168 registers") == 2


@given(
    gpu=st.sampled_from(GPUS),
    tokens=st.integers(1, 9) | st.sampled_from([32, 100, 193, 641, 5000, 100_000]),
    experts=st.sampled_from([1, 3, 8, 128, 1100, 11_999]),
    wide=st.sampled_from([16, 112, 768, 14336]),
)
@settings(deadline=None)
def test_mixtures_fit_every_gpu(
    gpu: tuple[int, int, int], tokens: int, experts: int, wide: int
) -> None:
    """As products do; and there is room for all tiles, however slots are spread."""
    op, given = mixture(tokens, experts, wide)
    capability, count, room = gpu
    binding = text._bind(op, given).binding
    binding.device = lambda: {":device": "cuda", "sm_count": count, "capability": capability}
    chosen = next(body for body in op.implementations if body.holds(binding))
    assert isinstance(chosen, CudaUnit)
    launch, slots = chosen.launch_for(binding), 8 * tokens
    for _, step in launch.steps:
        assert getattr(step, "shared", 0) <= (room - 1) * 1024
    arranged = [step for of, step in launch.steps if of.function == "arranged"]
    if arranged:
        most = slots // (8 * arranged[0].blocks[1])  # of full tiles
        fullest = most + min(experts, slots - most)
        assert min(fullest, slots) <= arranged[0].blocks[0]
        assert 3 * min(fullest, slots) < launch.scratch["tiles"][2]


DTYPES = {
    torch.bfloat16: ferrule.bfloat16, torch.float32: ferrule.float32, torch.uint32: ferrule.uint32,
    torch.int32: ferrule.int32, torch.int64: ferrule.int64,
}  # fmt: skip


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[bool]]:
    """Arrays go the ways of a GPU; of products and their gradients, whether each call has a CUDA
    unit."""
    monkeypatch.setattr(ops.gathers, "on_cpu", lambda x: False)
    found: dict[str, list[bool]] = {}
    call = ferrule.Op.__call__

    def spied(op: ferrule.Op, *arrays: Any) -> Any:
        if op.name.startswith(("gather_", "outer_")):
            names = [argument.name for argument in op.rule.inputs]
            given = {
                name: (tuple(array.shape), DTYPES[array.dtype])
                for name, array in zip(names, arrays, strict=True)
            }
            units = [body for body in op.implementations if isinstance(body, CudaUnit)]
            has = any(text.described_unit(op, unit, given) for unit in units)
            if op.rule.outputs[0].name != "lhs_of_each":  # where matrices are, by a Metal body
                found.setdefault(op.name, []).append(has)
        return call(op, *arrays)

    monkeypatch.setattr(ferrule.Op, "__call__", spied)
    return found


@pytest.mark.parametrize("form", [(64, 4), (32, 3), None], ids=str)
def test_products_of_gathers_have_units(form: Any, products: dict[str, list[bool]]) -> None:
    """Those that derivatives and batches are made of, too; the results are right."""
    torch.manual_seed(0)
    w = torch.randn(4, 64, 128)
    packed, *rest = ops.quantize(w, *form) if form else (w.mT.contiguous(),)
    names = {"group_size": form[0], "bits": form[1]} if form else {}

    def call(x: Any, lhs: Any, rhs: Any, *parts: Any) -> Any:
        if form:
            parts = (packed, *parts) if len(parts) == 2 else parts
            chosen = {"lhs_indices": lhs, "rhs_indices": rhs}
            return ops.gather_qmm(x, *parts, **chosen, **names)
        return ops.gather_mm(x, *parts, lhs, rhs)

    leaves = [part.requires_grad_() for part in rest or (packed,)]
    dense = ops.dequantize(packed, *rest, **names).mT if form else packed
    some = torch.randint(0, 4, (2, 5))
    for x, lhs, rhs in (
        (torch.randn(5, 1, 1, 128), None, some.mT),
        (torch.randn(5, 1, 128), None, some[0]),
        (torch.randn(5, 2, 128), some, some[0]),
        (torch.randn(4, 2, 128), some[:, :4], None),
    ):
        given = [x.requires_grad_(), *leaves]
        left = x.view(-1, *x.shape[-2:])[lhs] if lhs is not None else x
        right = dense if rhs is None else dense[rhs]
        y, expected = call(x, lhs, rhs, *leaves), left @ right
        torch.testing.assert_close(y, expected)
        c = torch.randn_like(y)
        found = torch.autograd.grad(y, given, c)
        torch.testing.assert_close(found[0], torch.autograd.grad(expected, x, c)[0])
        if not form:
            torch.testing.assert_close(
                found[1], torch.autograd.grad(left.detach() @ right, packed, c)[0]
            )
        batches = torch.randn(3, *x.shape)
        made = torch.vmap(lambda x, lhs=lhs, rhs=rhs: call(x, lhs, rhs, *leaves))(batches)
        for one, batch in zip(made, batches, strict=True):
            torch.testing.assert_close(one, call(batch, lhs, rhs, *leaves))
    many = [torch.stack([part.detach()] * 3) for part in (packed, *rest)]
    made = torch.vmap(lambda *parts: call(x.detach(), lhs, rhs, *parts))(*many)
    torch.testing.assert_close(made[1], call(x, lhs, rhs, *leaves))
    assert set(products) == {"gather_qmm_affine" if form else "gather_mm", "outer_sums"}
    assert all(all(of_op) for of_op in products.values())
