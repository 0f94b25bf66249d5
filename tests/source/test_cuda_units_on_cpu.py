"""CUDA units and the bodies of ops, ready ones too, run on the CPU as they are for checking."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuda_on_cpu
import cuda_ops
import ferrule as fe
from ferrule import ops
from ferrule.source.cuda import on_cpu
from test_readme import blocks

RANDOM = np.random.default_rng(1)
Array = np.ndarray[Any, Any]
Run = Callable[..., list[Array]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs an op with the inputs of its rule."""

    def called(op: fe.Op, *values: Any, **more: Any) -> list[Array]:
        names = [argument.name for argument in op.rule.inputs]
        inputs = dict(zip(names, values, strict=True))
        return cuda_on_cpu.run_op(op, inputs, monkeypatch, **more)[0]

    return called


def random(*shape: int, dtype: Any = np.float32) -> Array:
    return RANDOM.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("shape", [(1,), (3, 5), (1025,), (70, 1000), (0,)], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_reduction_in_two_steps(run: Run, shape: tuple[int, ...], dtype: Any) -> None:
    x = random(*shape, dtype=dtype)
    (y,) = run(cuda_ops.reduction(), x)
    np.testing.assert_allclose(y, x.astype(np.float64).sum(), rtol=1e-4, atol=1e-3)


def test_shared_memory_of_the_launch(run: Run) -> None:
    for n in (10, 1000, 12 * 1024 + 1):
        x = random(3, n)
        np.testing.assert_array_equal(run(cuda_ops.reversal(), x)[0], x[:, ::-1])


def test_the_implementation_is_chosen_by_the_sizes(run: Run) -> None:
    op = cuda_ops.chosen()
    for n, one in ((1, 1), (16, 1), (17, 2), (1000, 2), (1001, 3)):
        x = random(n)
        np.testing.assert_allclose(run(op, x, 0.5)[0], x * 0.5 + one, rtol=1e-6)


def test_fills_and_copies(run: Run) -> None:
    x, before = RANDOM.integers(0, 7, 3000).astype(np.int32), np.arange(7, dtype=np.int32)
    bins, largest = run(cuda_ops.counts(), x, before)
    np.testing.assert_array_equal(bins, before + np.bincount(x, minlength=7))
    assert (largest == -np.inf).all()


def test_arrays_in_place_and_numbers_of_16_bits(run: Run) -> None:
    c, x = random(5, 7), random(5, 7)
    before = c.copy()
    (y,) = run(cuda_ops.added(), c, x)
    np.testing.assert_array_equal(y, before)
    np.testing.assert_array_equal(c, before + x)
    x = random(100)
    np.testing.assert_allclose(run(cuda_ops.halves(), x, 0.5, 2)[0], x + 3.5, rtol=1e-6)


def test_all_that_steps_can_say(run: Run) -> None:
    x, c = random(4, 9), random(4)
    was = c[0]
    y, z, w, seen = run(
        cuda_ops.pieces(), x, None, c, 1.5, 0.25, 0.5, 2**40, True
    )  # fmt: skip
    np.testing.assert_array_equal(z, x)
    assert (w == -1).all() and y[0] == np.float32(x[0, 0] + np.float32(0.5) + 1) + 2 - 9
    assert c[0] == was + 1 and (y[1:] == -np.inf).all()
    assert seen.tolist() == [1.5, 0.25, 0.5, 2**40, 1, 9, 1, 4 * 9 * 7, 5 + 10 * (9 % 7 + 1)]


def test_clusters_are_refused(run: Run) -> None:
    with pytest.raises(fe.DialectError, match=r"source line 6: clusters \(this_cluster\)"):
        run(cuda_ops.rotation(), random(5, 2, 64))
    step = fe.cuda_step("f", ["y"], blocks=4, block=32, cluster=2)
    unit = fe.cuda_unit("__global__ void f(float* y) { y[blockIdx.x] = 1; }", steps=[step])
    op = fe.op("plain", "x[N]:float32 -> y[4]:float32", cuda=unit)
    with pytest.raises(fe.DeviceError, match=r"'plain': f is launched in clusters of \(2, 1, 1\)"):
        run(op, random(3))


def test_products_of_matrices_are_somebody_elses(run: Run) -> None:
    step = fe.cuda_matmul("y", "a", "b")
    rule = "a[M,K]:float32, b[K,N]:float32 -> y[M,N]:float32"
    op = fe.op("product", rule, cuda=fe.cuda_unit("", steps=[step]))
    with pytest.raises(fe.DeviceError, match=r"'product': y = a @ b is cuBLAS's"):
        run(op, random(3, 4), random(4, 5))


HEADERS = {
    "tile.cuh": "#pragma once\n#include <stdint.h>\n#include \"more.cuh\"\n"
    "extern __shared__ float tile[];\n"
    "__device__ inline void put(int i, float v) { tile[i] = v * FACTOR; }\n",
    "more.cuh": "#ifndef MORE\n#define MORE\nconstexpr float FACTOR = 2;\n#endif\n",
}  # fmt: skip


def test_headers_of_a_unit(run: Run) -> None:
    text = """#include "more.cuh"
#include "tile.cuh"
#include "tile.cuh"
namespace n { template <class T> __global__ void f(const T* x, T* y) {
  put(threadIdx.x, x[threadIdx.x]);
  __syncthreads();
  y[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x] + __LINE__;
} }"""
    step = fe.cuda_step("n::f<T>", ["x", "y"], blocks=1, block="N", shared_memory="4*N")
    unit = fe.cuda_unit(text, steps=[step], headers=HEADERS)
    op = fe.op("turned", "x[N]:T -> y[N]:T", cuda=unit)
    x = random(40)
    np.testing.assert_array_equal(run(op, x)[0], x[::-1] * 2 + 7)


def test_an_error_of_a_unit_is_at_its_line(run: Run) -> None:
    step = fe.cuda_step("f", ["x", "y"], blocks=1, block=1)
    for text, message in (
        (
            "\n__global__ void f(const T* x, T* y) {\n  y[0] = nowhere; }",
            "source line 3: 'nowhere'",
        ),
        ("__global__ void f(const T* x) {}", "step1: .*the step gives 2 arguments"),
    ):
        op = fe.op("wrong", "x[N]:T -> y[N]:T", cuda=fe.cuda_unit(text, steps=[step]))
        with pytest.raises(fe.CompileError, match=message):
            run(op, random(3))


def test_unsupported_parts_of_a_unit_are_listed_with_where_they_are() -> None:
    step = fe.cuda_step("f", ["x", "y"], blocks=1, block=1)
    unit = fe.cuda_unit(
        "#include \"a.cuh\"\n#include <cuda/barrier>\n__global__ void f(const T* x, T* y) {}",
        steps=[step], headers={"a.cuh": "\n\nstruct A { CUtensorMap map; };"},
    )  # fmt: skip
    op: Any = fe.op("u", "x[N]:T -> y[N]:T", cuda=unit)
    spec = op.implementations[0].spec((("T", fe.float32),))
    assert [tuple(one) for one in on_cpu.unsupported(spec)] == [
        (2, "#include <cuda/barrier>", "source"), (3, "tensor maps (CUtensorMap)", "a.cuh"),
    ]  # fmt: skip


def test_the_programs_of_the_page(run: Run) -> None:
    found: dict[str, Any] = {}
    page = Path(__file__).resolve().parents[2] / "docs" / "cuda_kernel.md"
    texts = [b.text for b in blocks(page.read_text(encoding="utf-8")) if b.language == "python"]
    for text in texts:
        if "matmul = fe.op" in text or "rms = fe.op" in text:
            exec(compile(text, "cuda_kernel.md", "exec"), found)  # noqa: S102
    for m in (1, 17):
        x, w = random(m, 130), random(77, 130)
        np.testing.assert_allclose(run(found["matmul"], x, w)[0], x @ w.T, rtol=1e-4, atol=1e-4)
    for n in (1, 4097):
        x = random(n)
        want = x / np.sqrt((x.astype(np.float64) ** 2).mean() + 1e-3)
        np.testing.assert_allclose(run(found["rms"], x, 1e-3)[0], want, rtol=1e-4, atol=1e-4)


# -- ready ops: what the GPU's implementation gives is what the CPU's gives ------------------------


def close(found: list[Array], expected: Any, limit: float) -> None:
    expected = expected if isinstance(expected, tuple) else (expected,)
    for a, b in zip(found, expected, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.isfinite(b).all() and np.abs(a - b).max() <= limit * np.abs(b).max()


LIMITS = {np.float32: 1e-5, np.float16: 2e-3, ml_dtypes.bfloat16: 1.6e-2}


def both(op: fe.Op, values: list[Any], limit: float, **more: Any) -> None:
    """Compare an op's CUDA with what the op gives on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        names = [argument.name for argument in op.rule.inputs]
        inputs = dict(zip(names, values, strict=True))
        found, body = cuda_on_cpu.run_op(op, inputs, patch, **more)
    assert body.kind == "cuda"
    close(found, op(*values), limit)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("n", [64, 1000, 16384])
def test_rows(n: int, dtype: Any) -> None:
    x, residual, weight, bias = (random(*s, dtype=dtype) for s in ((3, n), (3, n), (n,), (n,)))
    layer = ops.norms._layer_norm(0, True, True, False)
    given = {"x": x, "residual": residual, "weight": weight, "bias": bias, "eps": 1e-5}
    for op in (layer, ops.norms._rms_norm(0, True, True, False)):
        both(op, [given[a.name] for a in op.rule.inputs], LIMITS[dtype])
    both(ops.softmaxes._softmax(0, False), [x], LIMITS[dtype])
    op = ops.norm_weights._gradients(True, False, False)
    given |= {"x": x[None], "cotangent": residual[None]}
    both(op, [given[a.name] for a in op.rule.inputs], LIMITS[dtype])


@pytest.mark.parametrize("dtype", LIMITS)
def test_grid_sample(dtype: Any) -> None:
    op = ops.sampling.sampler("bilinear", "zeros", False, "NHWC", False)
    grid = RANDOM.uniform(-1.1, 1.1, (2, 5, 5, 2)).astype(np.float32)
    both(op, [random(2, 9, 9, 16, dtype=dtype), grid], LIMITS[dtype])


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("transpose", [False, True])
def test_gathered_products(transpose: bool, dtype: Any) -> None:
    high, wide = (64, 512) if transpose else (512, 64)
    given = {
        "x": random(40, 1, 512, dtype=dtype), "w": random(4, high, wide, dtype=dtype),
        "lhs": np.arange(40, dtype=np.int32),
        "rhs": np.sort(RANDOM.integers(0, 4, 40)).astype(np.int64),
    }  # fmt: skip
    op = ops.gathered._gathered("lr", transpose)
    both(op, [given[a.name] for a in op.rule.inputs], LIMITS[dtype])


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize(("mode", "group", "bits"), [("nvfp4", 16, 4), ("affine", 64, 4),
                                                     ("mxfp8", 32, 8)])  # fmt: skip
def test_quantized_products(mode: str, group: int, bits: int, rows: int) -> None:
    dtype = ml_dtypes.bfloat16
    words = RANDOM.integers(0, 2**32, (64, 512 * bits // 32), np.uint64).astype(np.uint32)
    scales = RANDOM.integers(40, 60, (64, 512 // group)).astype(np.uint8)
    if mode == "affine":
        scales = random(64, 512 // group, dtype=dtype)
    given = {
        "x": random(rows, 512, dtype=dtype), "w": words & 0xBFBFBFBF if bits == 8 else words,
        "scales": scales, "biases": scales,
    }  # fmt: skip
    op = ops.quantized._product(mode, group, bits, True, "", False)
    both(op, [given[a.name] for a in op.rule.inputs], 1.6e-2)
