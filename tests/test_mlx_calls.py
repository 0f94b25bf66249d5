"""Calls of `metal_kernel` with MLX's arrays: what is remembered of them, and sizes that follow."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule import KernelError, KernelTypeError

I = "uint i = thread_position_in_grid.x; "  # noqa: E741


def kernel(source: str, inputs: tuple[str, ...] = ("x",), **more: Any) -> ferrule.MetalKernel:
    return ferrule.metal_kernel(
        name="k", input_names=inputs, output_names=["y"], source=I + source, **more
    )


def call(made: Any, x: Any, **more: Any) -> Any:
    given = {
        "inputs": [x], "grid": (x.size, 1, 1), "threadgroup": (32, 1, 1),
        "output_shapes": [x.shape], "output_dtypes": [mx.float32],
    }  # fmt: skip
    (y,) = made(**{**given, **more})
    return y


# -- what is remembered -------------------------------------------------------------------------


@given(st.lists(st.sampled_from([(4,), (2, 2), (3, 3), (0,), (1, 8)]), min_size=1, max_size=12))
@settings(max_examples=20, deadline=None)
def test_calls_of_many_shapes_in_any_order(shapes: list[tuple[int, ...]]) -> None:
    made = kernel("y[i] = 3 * x[i];")
    for shape in shapes:
        x = mx.arange(int(np.prod(shape))).reshape(shape)
        y = call(made, x)
        assert y.shape == shape
        assert mx.array_equal(y, 3.0 * x)


def test_true_and_one_and_a_dtype_are_three_templates() -> None:
    made = kernel("y[i] = sizeof(decltype(V)) == 1 ? 10 : V;")
    x = mx.zeros(1)
    for _ in range(2):
        for value, expected in ((1, 1), (True, 10), (0, 0), (False, 10), (1, 1)):
            assert call(made, x, template=[("V", value)]).item() == expected


@pytest.mark.parametrize(
    ("argument", "good", "bad", "error"),
    [
        ("grid", (1, 1, 1), (1.0, 1, 1), KernelTypeError),
        ("grid", (1, 1, 1), (True, 1, 1), KernelTypeError),
        ("threadgroup", (1, 1, 1), (1, 1.0, 1), KernelTypeError),
        ("output_shapes", [(1,)], [(1.0,)], KernelTypeError),
        ("output_shapes", [(1,)], [(True,)], KernelTypeError),
        ("template", [("V", 1)], [("V", 1.0)], KernelError),
        ("init_value", 1, "1", KernelTypeError),
        ("output_dtypes", [mx.int32], [1], KernelTypeError),
        ("inputs", [mx.ones(1)], [None], KernelTypeError),
        ("inputs", [mx.ones(1)], [mx.ones(1)] * 2, KernelError),
        ("stream", None, "cpu", KernelTypeError),
        ("verbose", False, 0, KernelTypeError),
    ],
)
def test_what_is_equal_to_what_was_right_is_still_refused(
    argument: str, good: Any, bad: Any, error: type[Exception]
) -> None:
    made = kernel("y[i] = x[i];")
    x = mx.ones(1)
    for _ in range(2):
        assert call(made, x, **{argument: good}).item() == 1
        with pytest.raises(error):
            call(made, x, **{argument: bad})


@pytest.mark.parametrize("value", [2, 2**40, True, 2.5, np.float32(3), mx.array(4), -(2**31)])
def test_numbers_and_arrays_in_turn(value: Any) -> None:
    made = kernel("y[i] = x[i] + sizeof(n) * 100;", ("x", "n"))
    x = mx.ones(3)
    size = mx.array(value).itemsize if not isinstance(value, mx.array) else value.itemsize
    for n in (value, mx.array(1, mx.uint8), value, 1.0, value):
        wide = {True: 1, False: size}[isinstance(n, mx.array) and n.dtype == mx.uint8]
        wide = 4 if type(n) is float else wide
        y = call(made, x, inputs=[x, n])
        assert y.tolist() == [1 + 100 * wide] * 3


def test_dtypes_of_inputs_in_turn() -> None:
    made = kernel("y[i] = x[i];")
    for dtype in (mx.float32, mx.int8, mx.float16, mx.float32, mx.bool_, mx.bfloat16):
        assert call(made, mx.ones(2, dtype)).tolist() == [1, 1]
    with pytest.raises(KernelError, match="float64"):
        call(made, mx.ones(2, mx.float64, stream=mx.cpu))
    assert call(made, mx.ones(2)).tolist() == [1, 1]


def test_streams_in_turn() -> None:
    made = kernel("y[i] = x[i];")
    x = mx.ones(2)
    for stream in (None, mx.cpu, mx.new_stream(mx.cpu), mx.gpu, None, mx.default_stream(mx.cpu)):
        assert call(made, x, stream=stream).tolist() == [1, 1]


def test_more_calls_than_are_remembered() -> None:
    made = kernel("y[i] = x[i];")
    x = mx.ones(1)
    for n in [*range(1, 4200), 1, 4199]:
        y = call(made, x, output_shapes=[(n,)], init_value=7)
    assert y.shape == (4199,) and y.tolist()[:2] == [1, 7]


def test_no_inputs_are_a_node_too() -> None:
    made = ferrule.metal_kernel("k", [], ["y"], I + "y[i] = i;")

    @mx.compile
    def f(x: mx.array) -> mx.array:
        (y,) = made(
            inputs=[], grid=(3, 1, 1), threadgroup=(3, 1, 1), output_shapes=[(3,)],
            output_dtypes=[mx.float32],
        )  # fmt: skip
        return x + y

    for n in (1, 2):
        assert f(mx.full((3,), n)).tolist() == [n, n + 1, n + 2]


def test_verbose_prints_inside_compiled_functions(capfd: pytest.CaptureFixture[str]) -> None:
    made = kernel("y[i] = x[i];")
    f = mx.compile(lambda x: call(made, x, verbose=True))
    assert f(mx.ones(2)).tolist() == [1, 1]
    assert "y[i] = x[i]" in capfd.readouterr().out
