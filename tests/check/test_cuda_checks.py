"""CUDA bodies are checked on the CPU: planted bugs are found at their lines, nothing else is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cuda_on_cpu
import cuda_ops
import ferrule
from cuda_catalogue import BUGS, Bug
from ferrule import ops
from ferrule.check.reports.findings import Finding
from ferrule.errors import DeviceError

sys.path.append(str(Path(__file__).parents[1] / "source"))
from cuda_bodies import BODIES, Body

# What is found in bodies that are tested for what a GPU does, whatever that is good for.
TRUE = {"products of words": ["arithmetic"]}


def called(bug: Bug, library: str = "numpy") -> tuple[Any, dict[str, Any]]:
    """A kernel, and a call of it."""
    names = ["a", "b"][: len(bug.inputs)]
    kernel = ferrule.cuda_kernel(
        "k", names, ["out"], bug.source, header=bug.header, shared_memory=bug.shared
    )
    inputs: list[Any] = [x.copy() for x in bug.inputs]
    dtype: Any = bug.dtype
    if library == "torch":
        torch = pytest.importorskip("torch")
        inputs, dtype = [torch.from_numpy(x) for x in inputs], torch.float32
    elif library == "mlx":
        mx = pytest.importorskip("mlx.core")
        inputs, dtype = [mx.array(x) for x in inputs], mx.float32
    return kernel, {
        "inputs": inputs, "output_shapes": [(bug.size,)], "output_dtypes": [dtype],
        "grid": bug.grid, "threadgroup": bug.threadgroup, "init_value": bug.init,
    }  # fmt: skip


def shown(findings: list[Finding]) -> str:
    return "\n".join(f"{f.kind} {f.where}:{f.line} ({f.other_line}): {f.message}" for f in findings)


def assert_found(bug: Bug, findings: list[Finding]) -> None:
    places = {(f.where, f.line) for f in findings if f.kind == bug.kind}
    if bug.anywhere:
        assert places, shown(findings)
    else:
        assert places and places <= bug.lines(), shown(findings)
    assert {f.kind for f in findings} <= {bug.kind, *bug.also}, shown(findings)
    for finding in findings:
        said = f"{finding.message} {finding.hint}"
        assert "threadgroup" not in said and "simdgroup" not in said, said


@pytest.mark.parametrize("name", BUGS)
def test_bug_is_found_at_its_line(name: str) -> None:
    kernel, call = called(BUGS[name])
    with ferrule.checking() as findings:
        kernel(**call)
    assert_found(BUGS[name], findings)


@pytest.mark.parametrize("name", BUGS)
def test_nothing_is_found_in_what_is_mended(name: str) -> None:
    kernel, call = called(BUGS[name].mended())
    with ferrule.checking() as findings:
        (out,) = kernel(**call)
    assert not findings, shown(findings)
    (expected,) = cuda_on_cpu.launch(kernel, **call)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("library", ["torch", "mlx"])
@pytest.mark.parametrize("name", ["a missing __syncthreads", "a missing __syncwarp"])
def test_arrays_of_others(name: str, library: str) -> None:
    for bug in (BUGS[name], BUGS[name].mended()):
        kernel, call = called(bug, library)
        with ferrule.checking() as findings:
            (out,) = kernel(**call)
        if bug is BUGS[name]:
            assert_found(bug, findings)
        else:
            assert not findings, shown(findings)
            given = out.numpy() if library == "torch" else np.array(out)
            np.testing.assert_array_equal(given, kernel_output(bug))
        with pytest.raises(DeviceError, match="runs on NVIDIA GPUs alone"):
            kernel(**call)


def kernel_output(bug: Bug) -> np.ndarray[Any, Any]:
    kernel, call = called(bug)
    return cuda_on_cpu.launch(kernel, **call)[0]


@pytest.mark.parametrize("name", BODIES)
def test_bodies_that_are_right(name: str) -> None:
    body: Body = BODIES[name]
    count = 2 if "more" in body.source else 1
    names = ["a", "b", "c"][: len(body.inputs)]
    kernel = ferrule.cuda_kernel(
        "k", names, ["out", "more"][:count], body.source, header=body.header,
        shared_memory=body.shared,
    )  # fmt: skip
    size = int(np.prod(body.grid))
    call: dict[str, Any] = {
        "inputs": body.inputs, "output_shapes": [(size,)] * count, "grid": body.grid,
        "output_dtypes": [np.float32] * count, "threadgroup": body.threadgroup,
        "template": body.template, "init_value": body.init,
    }  # fmt: skip
    with ferrule.checking(ignore=["unwritten"]) as findings:  # some have outputs to spare
        outputs = kernel(**call)
    assert [f.kind for f in findings] == TRUE.get(name, []), shown(findings)
    want = body.want(*body.inputs)
    for out, one in zip(outputs, want if isinstance(want, list) else [want], strict=True):
        expected = np.asarray(one, np.float32)
        if body.exact:
            np.testing.assert_array_equal(out[: expected.size], expected)
        else:
            np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-3)


def test_what_is_not_known_is_noted_and_refused() -> None:
    source = "int i = threadIdx.x;\nout[i] = tex1D<float>(cudaTextureObject_t(), i);"
    kernel = ferrule.cuda_kernel("textured", ["a"], ["out"], source)
    call = called(BUGS["all threads write"])[1]
    with ferrule.checking() as findings, pytest.raises(DeviceError, match="NVIDIA GPUs alone"):
        kernel(**call)
    assert findings.notes == [
        "not checked: kernel 'textured', line 2: textures (cudaTextureObject_t)."
    ] and not findings  # fmt: skip
    with ferrule.checking(kernels=["other*"]), pytest.raises(DeviceError, match="GPUs alone"):
        kernel(**call)


# -- ops whose implementations are in CUDA ---------------------------------------------------------

UNIT = """#include "tile.cuh"
template <class V> __global__ void turn(const V* x, V* y, int n) {
  int i = threadIdx.x;
  put(i, x[i]);
  __syncthreads();
  y[i] = tile[n - 1 - i];
}"""
TILE = "extern __shared__ float tile[];\n"
TILE += "__device__ inline void put(int i, float v) {\n  tile[i] = v;\n}\n"


@pytest.mark.parametrize(
    ("good", "bad", "found"),
    [
        ("", "", []),
        ("  __syncthreads();\n", "\n", [("race", 6, 4)]),
        ("n - 1 - i", "n - i", [("bounds", 6, None)]),
        ("y[i] =", "if (i) y[i] =", [("unwritten", None, None)]),
        ("  put", "  if (i) put", [("uninitialised", 6, None)]),
        ("x[i])", "x[i + 1])", [("bounds", 4, None)]),
        ("y[i] = ", "((V*)x)[i] = y[i] = ", [("alias", 6, None)]),
    ],
)
def test_units(good: str, bad: str, found: list[Any]) -> None:
    arguments = ["x", "y", "N"]
    step = ferrule.cuda_step("turn<T>", arguments, blocks=1, block="N", shared_memory="4*N")
    text = UNIT.replace(good, bad, 1)
    unit = ferrule.cuda_unit(text, steps=[step], headers={"tile.cuh": TILE})
    op = ferrule.op("turned", "x[N]:T -> y[N]:T", cuda=unit)
    x = np.arange(1, 65, dtype=np.float32)
    with ferrule.checking(cuda=True) as findings:
        y = op(x)
    assert [(f.kind, f.line, f.other_line) for f in findings] == found, shown(findings)
    assert {f.kernel for f in findings} <= {"turned"} and findings.launches == 1
    if not found:
        np.testing.assert_array_equal(y, x[::-1])
    with pytest.raises(DeviceError, match="has nothing that runs on 'cpu'"):
        op(x)


def test_products_of_units() -> None:
    step = ferrule.cuda_matmul("y", "a", "b")
    rule = "a[M,K]:float32, b[K,N]:float32 -> y[M,N]:float32"
    op = ferrule.op("product", rule, cuda=ferrule.cuda_unit("", steps=[step]))
    a, b = np.random.default_rng(0).standard_normal((2, 8, 8)).astype(np.float32)
    with ferrule.checking(cuda=True) as findings:
        y = op(a, b)
    np.testing.assert_allclose(y, a @ b, rtol=1e-5)
    assert not findings


@pytest.mark.parametrize("make", [cuda_ops.reduction, cuda_ops.reversal, cuda_ops.halves])
def test_units_that_are_right(make: Any) -> None:
    op = make()
    x = np.random.default_rng(0).standard_normal((70, 100)).astype(np.float32)
    values = [x.ravel(), 0.5, 2] if make is cuda_ops.halves else [x]
    with ferrule.checking(cuda=True) as findings:
        op(*values)
    assert not findings, shown(findings)
    assert findings.launches


def rows(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def ready(name: str) -> tuple[Any, list[Any]]:
    """A ready op that has a unit, and its inputs."""
    x, residual, weight, bias = rows(3, 1000), rows(3, 1000), rows(1000), rows(1000)
    given: dict[str, Any] = {
        "x": x, "residual": residual, "weight": weight, "bias": bias, "eps": 1e-5
    }  # fmt: skip
    if name == "softmax":
        op = ops.softmaxes._softmax(0, False)
    elif name == "layer_norm":
        op = ops.norms._layer_norm(0, True, True, False)
    elif name == "rms_norm":
        op = ops.norms._rms_norm(0, True, True, False)
    elif name == "weights_of_norms":
        op = ops.norm_weights._gradients(True, False, False)
        given |= {"x": x[None], "cotangent": residual[None]}
    elif name == "grid_sample":
        op = ops.sampling.sampler("bilinear", "zeros", False, "NHWC", False)
        given = {"x": rows(2, 9, 9, 16), "grid": np.clip(rows(2, 5, 5, 2), -1.1, 1.1)}
    elif name == "gathered":
        op = ops.gathered._gathered("lr", True)
        rhs = np.sort(np.random.default_rng(0).integers(0, 4, 40)).astype(np.int64)
        lhs = np.arange(40, dtype=np.int32)
        given = {"x": rows(40, 1, 512), "w": rows(4, 64, 512), "lhs": lhs, "rhs": rhs}
    else:
        op = ops.quantized._product("affine", 64, 4, True, "", False)
        words = np.random.default_rng(0).integers(0, 2**32, (64, 64), np.uint64).astype(np.uint32)
        given = {"x": rows(16, 512), "w": words, "scales": rows(64, 8), "biases": rows(64, 8)}
    return op, [given.get(argument.name, given.get("x")) for argument in op.rule.inputs]


# Lanes behind the end of a row add what shared memory has there to sums that nobody stores.
HARMLESS = {"weights_of_norms": {"uninitialised"}}
READY = [
    "softmax",
    "layer_norm",
    "rms_norm",
    "weights_of_norms",
    "grid_sample",
    "gathered",
    "quantized",
]


@pytest.mark.parametrize("name", READY)
def test_ready_ops_that_are_right(name: str) -> None:
    op, values = ready(name)
    expected = op(*values)
    with ferrule.checking(cuda=True) as findings:
        given = op(*values)
    assert {f.kind for f in findings} == HARMLESS.get(name, set()), shown(findings)
    for one, other in zip(*map(several, (given, expected)), strict=True):
        limit = 2e-2 if name in ("gathered", "quantized") else 1e-4
        assert np.abs(one - other).max() <= limit * np.abs(other).max()


def several(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)
