"""The custom Metal kernel tests of MLX's python/tests/test_fast.py, written afresh.

``pytest tests/conformance --mlx-tests PATH`` also runs MLX's own file.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import ferrule as fe
from drivers import run_driver

MANY = settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)


def normal(shape: tuple[int, ...], dtype: Any = mx.float32, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape, np.float32)).astype(dtype)


def elementwise(kernel: Any, inp: mx.array, **call: Any) -> mx.array:
    """One thread per element of ``inp``; one output like it."""
    given = {
        "grid": (inp.size, 1, 1),
        "threadgroup": (inp.size, 1, 1),
        "output_shapes": [inp.shape],
        "output_dtypes": [inp.dtype],
        "stream": mx.gpu,
    }
    (out,) = kernel(inputs=[inp], **{**given, **call})
    assert isinstance(out, mx.array)
    return out


copy = fe.metal_kernel(
    name="copy",
    input_names=["from"],
    output_names=["to"],
    source="const uint i = thread_position_in_grid.x; to[i] = from[i];",
)


@MANY
@given(SHAPES, st.integers(1, 64))
@example((2, 2), 2)
def test_basic(shape: tuple[int, ...], threadgroup: int) -> None:
    a = normal(shape)
    out = elementwise(copy, a, threadgroup=(threadgroup, 1, 1))
    assert out.dtype == a.dtype
    assert mx.array_equal(out, a)


def test_args() -> None:
    """Small arrays, a Python scalar, bfloat16, templates of each kind, outputs of two dtypes."""
    kernel = fe.metal_kernel(
        name="sums",
        input_names=["wide", "ints", "brains", "number"],
        output_names=["floats", "whole"],
        source="""
            const uint i = thread_position_in_grid.x;
            T narrow = wide[i];
            floats[i] = add ? narrow + ints[2] + brains[1] + number + more : 0;
            whole[i] = ints[i % 3] - number;
        """,
    )
    wide, brains = normal((3, 6)), normal((2, 2), mx.bfloat16, seed=1)
    ints = mx.array([3, -4, 5])
    outs = {}
    for add in (True, False):
        outs[add] = kernel(
            inputs=[wide, ints, brains, 7.3],
            template=[("add", add), ("more", 3), ("T", mx.float16)],
            grid=(6, 1, 1),
            threadgroup=(2, 1, 1),
            output_shapes=[(3, 2), (6,)],
            output_dtypes=[mx.float32, mx.int32],
            stream=mx.gpu,
        )
    floats, whole = outs[True]
    assert (floats.shape, floats.dtype) == ((3, 2), mx.float32)
    assert (whole.shape, whole.dtype) == ((6,), mx.int32)
    narrow = wide.reshape(-1)[:6].astype(mx.float16).astype(mx.float32)
    # half + int is a half, and half + bfloat16 a float.
    expected = (narrow + 5).astype(mx.float16).astype(mx.float32)
    expected = expected + brains.reshape(-1)[1].astype(mx.float32) + 7.3 + 3
    assert mx.allclose(floats.reshape(-1), expected, rtol=1e-6)
    assert whole.tolist() == [-4, -11, -2, -4, -11, -2]  # truncated, as C does
    assert mx.array_equal(outs[False][0], mx.zeros((3, 2)))
    assert mx.array_equal(outs[False][1], whole)


BY_INDEX = "T value = inp[i]; out[i] = metal::precise::exp(value) * threads_per_simdgroup;"
exp_rows = fe.metal_kernel(
    name="exp_rows",
    input_names=["inp"],
    output_names=["out"],
    source="const uint i = thread_position_in_grid.x; " + BY_INDEX,
)
exp_strides = fe.metal_kernel(
    name="exp_strides",
    input_names=["inp"],
    output_names=["out"],
    source="const uint i = thread_position_in_grid.x;"
    "const auto at = elem_to_loc(int64_t(i), inp_shape, inp_strides, inp_ndim);"
    + BY_INDEX.replace("inp[i]", "inp[at]"),
    ensure_row_contiguous=False,
)


@MANY
@given(
    shape=st.lists(st.integers(1, 6), min_size=2, max_size=4).map(tuple),
    axes=st.data(),
    every=st.integers(1, 3),
)
def test_strides(shape: tuple[int, ...], axes: st.DataObject, every: int) -> None:
    """Strided inputs, copied or walked; the grid is often shorter than the threadgroup."""
    order = axes.draw(st.permutations(range(len(shape))))
    a = mx.tile(normal(shape)[::every].transpose(order), [2] + [1] * (len(shape) - 1))
    a = a[:, ::-1][axes.draw(st.integers(0, 1)) :]
    for kernel in (exp_rows, exp_strides):
        out = elementwise(kernel, a, template=[("T", mx.float32)], threadgroup=(256, 1, 1))
        assert mx.allclose(out, mx.exp(a) * 32, rtol=1e-6)


def test_helper() -> None:
    kernel = fe.metal_kernel(
        name="with_a_helper",
        input_names=["inp"],
        output_names=["out"],
        header="""
            template <typename U>
            U square_exp(U value) {
                return metal::precise::exp(value * value);
            }
        """,
        source="const uint i = thread_position_in_grid.x; out[i] = square_exp(inp[i]);",
    )
    a = normal((2, 2))
    assert mx.allclose(elementwise(kernel, a, threadgroup=(2, 1, 1)), mx.exp(a * a), rtol=1e-6)


@MANY
@given(grid=st.integers(1, 100), threadgroup=st.integers(1, 70))
@example(2, 2)
def test_attributes(grid: int, threadgroup: int) -> None:
    kernel = fe.metal_kernel(
        name="attributes",
        input_names=["inp"],
        output_names=["out"],
        source="""
            const uint i = thread_position_in_grid.x;
            out[4 * i] = threads_per_threadgroup.x;
            out[4 * i + 1] = thread_index_in_threadgroup;
            out[4 * i + 2] = threadgroup_position_in_grid.x;
            out[4 * i + 3] = threads_per_grid.x;
        """,
    )
    (out,) = kernel(
        inputs=[mx.zeros((1, 1))],
        grid=(grid, 1, 1),
        threadgroup=(threadgroup, 1, 1),
        output_shapes=[(grid, 4)],
        output_dtypes=[mx.uint32],
        stream=mx.gpu,
    )
    threadgroup = min(threadgroup, grid)
    groups = math.ceil(grid / threadgroup)
    sizes = [threadgroup] * (groups - 1) + [grid - threadgroup * (groups - 1)]
    assert out.tolist() == [
        [size, t, group, grid] for group, size in enumerate(sizes) for t in range(size)
    ]


def named(name: str, body: str, **flags: Any) -> Any:
    source = f"const uint i = thread_position_in_grid.x; {body}"
    return fe.metal_kernel(
        name=name, input_names=["inp"], output_names=["out"], source=source, **flags
    )


def test_caching() -> None:
    """A kernel of the same name with another body is another kernel."""
    a = normal((32,))
    assert mx.array_equal(elementwise(named("again", "out[i] = 0.0;"), a), mx.zeros_like(a))
    assert mx.array_equal(elementwise(named("again", "out[i] = 1.0;"), a), mx.ones_like(a))


def test_same_name_in_one_evaluation() -> None:
    a = normal((32,))
    twice = elementwise(named("one_name", "out[i] = 2.0f * inp[i];"), a)
    more = elementwise(named("one_name", "out[i] = inp[i] + 100.0f;"), a)
    mx.eval(twice, more)
    assert mx.array_equal(twice, 2 * a)
    assert mx.array_equal(more, a + 100)


def test_math_mode() -> None:
    for options in ({"math_mode": "precise"}, {"mode": "fast"}):
        with pytest.raises(ValueError, match="mode"):
            named("math_mode", "out[i] = inp[i];", compile_options=options)
    body = """
        #if defined(__FAST_MATH__) && __FAST_MATH__
        out[i] = 1;
        #else
        out[i] = 0;
        #endif
    """
    a = mx.full((4,), 7.0)
    for mode, fast in (("safe", 0), ("relaxed", 0), ("fast", 1)):
        kernel = named("math_mode", body, compile_options={"math_mode": mode})
        assert elementwise(kernel, a).tolist() == [fast] * 4
    assert elementwise(named("math_mode", body), a).tolist() == [0] * 4


def test_mixed_dtypes() -> None:
    kernel = named("mixed", "out[i] = inp[i] + inp[i];")
    half, single = mx.full((32,), 1.5, dtype=mx.float16), mx.full((32,), 2.5)
    narrow, wide = elementwise(kernel, half), elementwise(kernel, single)
    assert (narrow.dtype, wide.dtype) == (mx.float16, mx.float32)
    assert mx.array_equal(narrow.astype(mx.float32) + wide, mx.full((32,), 8.0))


def test_mlx_own_file(request: pytest.FixtureRequest) -> None:
    folder = request.config.getoption("--mlx-tests", default=None)
    if folder is None:
        pytest.skip("runs with --mlx-tests PATH, the folder python/tests of a checkout of MLX")
    run_driver("run_mlx_tests.py", folder, timeout=300)
