"""Repeated calls of CUDA units with torch's tensors, which C makes: on a driver and a cuBLAS whose
GPUs are the host. Each is to start and to give what the first call does."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ferrule as fe
from fake_cublas import FakeCublas
from fake_cuda import FakeCuda, Launched
from ferrule import DeviceError, KernelError, Op
from ferrule.hosts.torch import known_calls
from ferrule.tools import driver, fastcall
from frames import frames
from test_cuda_op import (  # noqa: F401
    AGAIN,
    CALLS,
    STREAM,
    address,
    again_op,
    array,
    check_calls,
    gpu,
    number,
)

pytestmark = pytest.mark.skipif(fastcall.library() is None, reason="the C library was not built")
PROPERTIES = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
ALONE = ["Op.__call__"]  # the Python functions of a call that C makes


@pytest.fixture
def in_c(gpu: FakeCuda) -> Iterator[FakeCuda]:  # noqa: F811
    """Calls are not bypassed, and take what is the CPU's for what is the GPU's."""
    assert known_calls.in_c()
    fastcall._change(-1)
    yield gpu
    fastcall._change(1)


@pytest.fixture
def blas(in_c: FakeCuda, fake_cublas_path: Path) -> Iterator[FakeCublas]:
    with FakeCublas(fake_cublas_path, in_c.events).installed() as found:
        yield found
        assert found.leaked == 0


def known(op: Op) -> int:
    """How many layouts C knows."""
    operator: Any = op._operator
    return len(operator.known.entries)


# -- kernels ---------------------------------------------------------------------------------------


@PROPERTIES
@given(CALLS)
def test_each_call_gives_its_own_arrays_and_numbers(in_c: FakeCuda, calls: Any) -> None:
    check_calls(in_c, torch.asarray, calls, {STREAM, 0})  # for C the arrays are the CPU's


TWICE = """extern "C" __global__ void twice(const float* x, float* y, float by, long long n) {}"""


def twice_op(fake: FakeCuda, name: str = "twice_in_c") -> Op:
    """``y = x * by``, with a derivative that is the same op."""
    op = fe.op(
        name, "x[*S]:float32, by:float32 -> y[*S]:float32", cuda=fe.cuda_unit(
            TWICE,
            steps=[fe.cuda_step("twice", ["x", "y", "by", "int64 x.size"], blocks=1, block=32)],
        ),
    )  # fmt: skip

    def run(one: Launched) -> None:
        n = number(one.arguments["n"], np.int64)
        by = number(one.arguments["by"][:4], np.float32)
        array(one.arguments["y"], n)[:] = by * array(one.arguments["x"], n)

    fake.texts["twice"] = TWICE
    fake.on_launch = run
    op.def_vjp(lambda values, c, y: [op(c[0], values[1]), None], version=1)
    return op


def test_a_repeated_call_runs_no_python(in_c: FakeCuda) -> None:
    op, x = twice_op(in_c), torch.arange(6.0)
    for _ in range(3):
        op(x, 2.0)
    before = dict(op.counts)
    for value in (x, torch.nn.Parameter(x.clone(), requires_grad=False), x.reshape(6)):
        assert frames(lambda value=value: op(value, 3.0)) == ALONE  # type: ignore[misc]
    assert op.counts == before  # no call by Python
    with torch.inference_mode():
        assert frames(lambda: op(x, 3.0)) == ALONE
        assert op(x, 3.0).is_inference()
    assert not op(x, 3.0).is_inference()
    with fastcall.bypassed():
        assert len(frames(lambda: op(x, 3.0))) > 5
    torch.testing.assert_close(op(x, 0.5), x * 0.5)


@PROPERTIES
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), max_size=3),
            st.sampled_from(["row", "turned", "part", "grad"]),
            st.sampled_from([0.0, -0.0, 1.5, 400.0, 401.0, 1e30]), st.booleans(),
        ),
        min_size=1, max_size=12,
    )
)  # fmt: skip
def test_calls_of_any_layout(in_c: FakeCuda, calls: Any) -> None:
    """What C does not know, or leaves to Python, gives the same."""
    op = twice_op(in_c)
    for shape, lies, by, graded in (call for c in calls for call in [c] * 3):
        x = torch.randn(shape)
        if lies == "turned":
            x = x.mT if x.ndim > 1 else x
        elif lies == "part":
            x = torch.randn([*shape, 2])[..., 0]
        x = x.detach().requires_grad_(lies == "grad")
        with torch.set_grad_enabled(graded):
            y = op(x, by)
        torch.testing.assert_close(y.detach(), x.detach() * np.float32(by))
        assert y.is_contiguous() and y.requires_grad == (graded and x.requires_grad)
        if y.requires_grad:
            (gradient,) = torch.autograd.grad(y.sum(), x)
            torch.testing.assert_close(gradient, torch.full(shape, float(np.float32(by))))


def test_numbers_that_do_not_fit_are_refused_in_each_call(in_c: FakeCuda) -> None:
    op, x = twice_op(in_c), torch.ones(4)
    for _ in range(4):
        op(x, 1.5)
    for _ in range(2):
        with pytest.raises(KernelError, match="1e\\+300, which does not fit"):
            op(x, 1e300)


def test_outputs_and_scratch_go_back(in_c: FakeCuda) -> None:
    op = again_op(in_c)
    in_c.texts.update(one=AGAIN, two=AGAIN)
    x = torch.ones(2)
    for _ in range(4):
        y = op(x, None, 1.0, 2, True)
    assert known(op) > 0
    gone = weakref.ref(y)
    del y
    assert gone() is None
    gc.collect()
    before = sum(isinstance(each, torch.Tensor) for each in gc.get_objects())
    for _ in range(50):
        op(x, None, 1.0, 2, True)
    assert sum(isinstance(each, torch.Tensor) for each in gc.get_objects()) == before


def test_a_child_that_was_forked_is_refused(in_c: FakeCuda) -> None:
    op, x = twice_op(in_c, "twice_forked"), torch.ones(5)
    for _ in range(4):
        op(x, 1.5)
    of = driver.driver()
    of.state.forked = 1
    try:
        in_c.launches.clear()
        with pytest.raises(DeviceError, match="forked"):
            op(x, 1.5)
        assert not in_c.launches
    finally:
        of.state.forked = 0
    torch.testing.assert_close(op(x, 1.5), x * 1.5)


def test_layouts_are_forgotten_when_there_are_many(
    in_c: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_calls, "_MOST_KNOWN", 4)
    op = twice_op(in_c, "twice_of_many")
    for n in (*range(1, 10), *range(1, 10), *range(1, 10)):
        torch.testing.assert_close(op(torch.ones(n), 2.0), torch.full((n,), 2.0))
    assert 0 < known(op) <= 4


def test_other_numbers_are_not_made_in_c(in_c: FakeCuda) -> None:
    text = """extern "C" __global__ void f(const float* x, float* y, double a, __half b) {}"""
    op = fe.op(
        "doubles", "x[N]:float32, a:float64, b:float16 -> y[N]:float32", cuda=fe.cuda_unit(
            "#include <cuda_fp16.h>\n" + text,
            steps=[fe.cuda_step("f", ["x", "y", "a", "b"], blocks=1, block=32)],
        ),
    )  # fmt: skip
    in_c.texts["f"] = text
    for a in (0.1, 0.2, 0.3, 0.4):
        op(torch.ones(2), a, a)
        passed = in_c.launches[-1].arguments
        assert number(passed["a"], np.float64) == a
        assert number(passed["b"][:2], np.float16) == np.float16(a)
    assert known(op) == 0


def test_scratch_of_no_bytes(in_c: FakeCuda) -> None:
    text = """extern "C" __global__ void f(const float* x, float* none, float* y, int n) {}"""
    op = fe.op(
        "no_scratch", "x[N]:float32 -> y[N]:float32", cuda=fe.cuda_unit(
            text, scratch={"none": "float32[N - N]"},
            steps=[fe.cuda_step("f", ["x", "none", "y", "N"], blocks=1, block=32)],
        ),
    )  # fmt: skip
    in_c.texts["f"] = text
    for _ in range(4):
        y = op(torch.ones(2))
        passed = in_c.launches[-1].arguments
        assert (passed["none"], passed["y"]) == (0, address(y))
        assert number(passed["n"][:4], np.int32) == 2
    assert known(op) == 1


# -- products --------------------------------------------------------------------------------------


LAYER = fe.op(
    "layer_in_c", "x[*S,K]:T, w[H,K]:T, v[H,N]:T -> y[*S,N]:float32, h[x.size // max(K,1),H]:T",
    cuda=fe.cuda_unit(
        "", scratch={"g": "T[x.size // max(K, 1), H]"},
        steps=[
            fe.cuda_matmul("g", "x", "w", transpose_b=True, tf32=True),
            fe.cuda_matmul("h", "x", "w", transpose_b=True, alpha=0.5),
            fe.cuda_matmul("y", "g", "v", alpha=2),
        ],
    ),
)  # fmt: skip


@PROPERTIES
@given(
    st.lists(
        st.tuples(
            st.tuples(*[st.integers(1, 4)] * 4), st.sampled_from([torch.float32, torch.bfloat16]),
            st.sampled_from([0, 1, 64]),
        ),
        min_size=1, max_size=6,
    )
)  # fmt: skip
def test_products(blas: FakeCublas, calls: Any) -> None:
    """Wherever matrices begin, and whatever came before."""
    for (m, k, h, n), dtype, offset in (call for c in calls for call in [c] * 4):
        x, w, v = (
            torch.randn(offset + rows * columns).to(dtype)[offset:].view(rows, columns)
            for rows, columns in ((m, k), (h, k), (h, n))
        )
        blas.products.clear()
        y, hidden = LAYER(x, w, v)
        rough = 1e-5 if dtype == torch.float32 else 4e-2
        expected = x.float() @ w.float().T
        torch.testing.assert_close(hidden.float(), 0.5 * expected, rtol=rough, atol=rough)
        torch.testing.assert_close(
            y, 2 * (expected.to(dtype).float() @ v.float()), rtol=1e-4, atol=rough
        )
        assert [one.compute for one in blas.products] == [77, 68, 68]
        assert all(one.workspace % 256 == 0 < one.workspace for one in blas.products)


def test_factors_that_the_gpu_reads(blas: FakeCublas) -> None:
    op = fe.op(
        "factors_in_c",
        "a[M,K]:float32, b[K,N]:float32, f[two]:float32 -> y[M,N]:float32 where two == 2",
        cuda=fe.cuda_unit("", steps=[fe.cuda_matmul("y", "a", "b", factors="f")]),
    )
    a, b = torch.ones(2, 3), torch.ones(3, 4)
    for alpha in (2.0, -1.5, 3.0, 0.5):
        y = op(a, b, torch.tensor([alpha, 0.0]))
        torch.testing.assert_close(y, torch.full((2, 4), 3 * alpha))
        assert blas.products[-1].on_gpu and blas.products[-1].alpha == alpha
    assert known(op) == 1


def test_a_product_that_is_refused(blas: FakeCublas) -> None:
    x, w, v = torch.ones(4, 3), torch.ones(5, 3), torch.ones(5, 6)
    for _ in range(3):
        LAYER(x, w, v)
    blas.status = 15
    for _ in range(2):
        with pytest.raises(
            DeviceError, match=r"g = x @ w transposed of .*4x3 @ 3x5.*NOT_SUPPORTED"
        ):
            LAYER(x, w, v)
    blas.status = 0
    torch.testing.assert_close(LAYER(x, w, v)[1], torch.full((4, 5), 1.5))


def test_one_that_cublas_never_knew(blas: FakeCublas) -> None:
    x, w, v = torch.ones(7, 2), torch.ones(3, 2), torch.ones(3, 2)
    blas.library.fake_found(0)
    for _ in range(3):
        with pytest.raises(DeviceError, match="NOT_SUPPORTED"):
            LAYER(x, w, v)
    blas.library.fake_found(1)
    for _ in range(4):
        torch.testing.assert_close(LAYER(x, w, v)[1], torch.ones(7, 3))
