"""Calls of `metal_kernel` with MLX's arrays: what is remembered of them, and sizes that follow."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
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


@pytest.mark.parametrize("ranks", [(17,), (16, 16), (17, 1), (33, 17), (1, 17)])
def test_outputs_of_many_dims(ranks: tuple[int, ...]) -> None:
    kernel = ferrule.metal_kernel(
        f"deep_{'_'.join(map(str, ranks))}",
        ["x"],
        [f"y{i}" for i in range(len(ranks))],
        "uint i = thread_position_in_grid.x;"
        + "".join(f" y{i}[i] = x[i] + {i};" for i in range(len(ranks))),
    )
    shapes = [(1,) * (rank - 1) + (2,) for rank in ranks]
    for _ in range(3):
        outputs = kernel(
            inputs=[mx.array([3.0, 4.0])],
            output_shapes=shapes,
            output_dtypes=[mx.float32, mx.float16][: len(ranks)],
            grid=(2, 1, 1),
            threadgroup=(2, 1, 1),
        )
        for i, (output, shape) in enumerate(zip(outputs, shapes, strict=True)):
            assert output.shape == shape
            assert output.reshape(2).tolist() == [3.0 + i, 4.0 + i]


@pytest.mark.parametrize(("inputs", "outputs"), [(32, 32), (33, 1), (60, 2), (1, 33)])
@pytest.mark.filterwarnings("ignore:.*more than 31 buffers:ferrule.PortabilityWarning")
def test_kernels_of_more_arrays_than_nodes_have_room_for(inputs: int, outputs: int) -> None:
    """They run at once, as where there are no nodes."""
    xs, ys = [f"x{i}" for i in range(inputs)], [f"y{i}" for i in range(outputs)]
    made = ferrule.metal_kernel(
        name="many", input_names=xs, output_names=ys,
        source=I + "".join(f"{y}[i] = {' + '.join(f'{x}[i]' for x in xs)};" for y in ys),
    )  # fmt: skip
    for n in (3, 4, 3):
        results = made(
            inputs=[mx.full((n,), i) for i in range(inputs)], grid=(n, 1, 1), threadgroup=(4, 1, 1),
            output_shapes=[(n,)] * outputs, output_dtypes=[mx.float32] * outputs,
        )  # fmt: skip
        assert [y.tolist() for y in results] == [[sum(range(inputs))] * n] * outputs


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
    assert "Generated source code for `k`" in capfd.readouterr().out


# -- sizes as expressions -----------------------------------------------------------------------

ROWS = "uint j = thread_position_in_grid.y; y[j * D + i] = x[j * D + i] * scale;"
rows = kernel(ROWS, ("x", "scale"))
SIZES: dict[str, Any] = {
    "grid": ("x.shape[-1]", "x.size // x.shape[-1]", 1),
    "threadgroup": ("min(x.shape[1], 8)", 2, 1),
    "output_shapes": [("x.shape[0]", "x.shape[-1]")],
    "template": [("D", "x.shape[1]")],
}


@pytest.mark.parametrize("library", ["numpy", "torch", "mlx"])
@given(st.tuples(st.integers(1, 40), st.integers(1, 40)))
@settings(max_examples=20, deadline=None)
def test_expressions_with_every_library(library: str, shape: tuple[int, int]) -> None:
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    make: Any = {"numpy": np.asarray, "torch": torch.from_numpy, "mlx": mx.array}[library]
    x = make(values)
    (y,) = rows(inputs=[x, 2.0], output_dtypes=[x.dtype], **SIZES)
    assert type(y) is type(x)
    np.testing.assert_array_equal(y if library == "numpy" else np.array(y.tolist()), 2 * values)


def test_expressions_follow_in_shapeless_functions() -> None:
    traces = []

    @functools.partial(mx.compile, shapeless=True)
    def f(x: mx.array) -> mx.array:
        traces.append(x.shape)
        (y,) = rows(inputs=[mx.exp(x), 2.0], output_dtypes=[mx.float32], **SIZES)
        return y + 1

    shapes = [(2, 3), (5, 7), (1, 1), (3, 100), (2, 3)]
    arrays = [mx.random.uniform(shape=shape) for shape in shapes]
    results = [f(x) for x in arrays]  # all of them before one is evaluated
    for x, y in zip(arrays, results, strict=True):
        assert y.shape == x.shape
        assert mx.allclose(y, 2 * mx.exp(x) + 1, rtol=1e-5)
    assert traces == [(2, 3)]


def test_numbers_do_not_follow_and_say_so() -> None:
    made = kernel("y[i] = x[i];")
    f = mx.compile(lambda x: call(made, x * 1), shapeless=True)
    assert f(mx.ones((2, 3))).shape == (2, 3)
    with pytest.raises(ValueError, match=r"inp.size.*ferrule\.op"):
        mx.eval(f(mx.ones((4, 3))))


def test_a_shape_of_any_rank_and_the_outputs_size() -> None:
    made = kernel("y[i] = x[i];")
    given: dict[str, Any] = {
        "grid": ("y.size", 1, 1), "threadgroup": ("y.ndim + 1", 1, 1), "output_shapes": ["x.shape"],
        "output_dtypes": [mx.float32],
    }  # fmt: skip
    for shape in ((3,), (2, 2), (3,), (1, 2, 3), (5,), (4, 4)):
        x = mx.random.uniform(shape=shape)
        assert mx.array_equal(made(inputs=[x], **given)[0], x)
    f = mx.compile(lambda x: made(inputs=[x], **given)[0], shapeless=True)
    for shape in ((3,), (9,), (2, 2), (3, 5)):
        assert f(mx.ones(shape)).shape == shape


def test_fills_and_templates_beside_expressions() -> None:
    made = kernel("if (i < 2) y[i] = x[i] + N + sizeof(T) + B;")
    for b in (True, False):
        (y,) = made(
            inputs=[mx.ones((4,))], grid=("x.size", 1, 1), threadgroup=(4, 1, 1),
            output_shapes=[("x.size + 1",)], output_dtypes=[mx.float32], init_value=-1,
            template=[("N", "x.size * 10"), ("T", mx.float16), ("B", b)],
        )  # fmt: skip
        assert y.tolist() == [43 + b, 43 + b, -1, -1, -1]


@pytest.mark.parametrize("make", [np.float32, mx.array], ids=["numpy", "mlx"])
@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        ("grid", ("N", 1, 1), r"`grid` of kernel 'k'.*names 'N'.*\.shape\[i\] of one of x, y"),
        ("grid", ("z.size", 1, 1), "names 'z'"),
        ("grid", ("x.shape[2]", 1, 1), "names dim 2 of 'x', which has 1 dims"),
        ("grid", ("x.shape[-2]", 1, 1), "names dim -2 of 'x'"),
        ("grid", ("x.shape[x]", 1, 1), "expected an integer"),
        ("grid", ("x.size - 9", 1, 1), "got .-5, 1, 1., expected three integers from 0"),
        ("grid", ("x.size", 1), "three sizes"),
        ("grid", ("x.size / 2", 1, 1), "//"),
        ("grid", ("x.size == 2", 1, 1), "got the condition"),
        ("grid", ("x.size // (x.size - 4)", 1, 1), "divides by zero"),
        ("grid", ("x.size - x.size", 1, 1), "runs no thread"),
        ("threadgroup", ("x.size * 1000", 1, 1), "4000 threads; at most 1024"),
        ("threadgroup", ("x.size - 4", 1, 1), "from 1"),
        ("output_shapes", [("x.size - 9",)], "non-negative"),
        ("output_shapes", ["z.shape"], 'or "x.shape"'),
        ("output_shapes", ["x.size"], 'or "x.shape"'),
        ("output_shapes", [("y.size",)], "names 'y'"),
        ("template", [("D", "x.size * 2 ** 3")], "operator"),
        ("template", [("D", "x.size * 2147483647")], "expected an int from"),
        ("grid", ("import os", 1, 1), "no expression"),
    ],
)
def test_wrong_expressions(make: Any, argument: str, value: Any, words: str) -> None:
    made = kernel("y[i] = x[i];")
    x = make([1.0, 2.0, 3.0, 4.0])
    sizes: dict[str, Any] = {
        "grid": ("x.size", 1, 1), "threadgroup": (4, 1, 1), "output_shapes": ["x.shape"],
    }  # fmt: skip
    for _ in range(2):
        with pytest.raises((KernelError, KernelTypeError), match=words):
            made(inputs=[x], output_dtypes=[x.dtype], **{**sizes, argument: value})


def test_wrong_sizes_in_a_shapeless_function_are_said() -> None:
    made = kernel("y[i] = x[i];")

    def f(x: mx.array) -> Any:
        return made(
            inputs=[x], grid=("x.size", 1, 1), threadgroup=("x.size", 1, 1),
            output_shapes=[("x.size - 2",)], output_dtypes=[mx.float32],
        )[0]  # fmt: skip

    f = mx.compile(f, shapeless=True)
    assert f(mx.ones(4)).shape == (2,)
    with pytest.raises(ValueError, match="2000 threads; at most 1024"):
        mx.eval(f(mx.ones(2000)))
    with pytest.raises(ValueError, match="non-negative"):
        mx.eval(f(mx.ones(1)))
    assert f(mx.ones(8)).shape == (6,)


def test_texts_of_expressions() -> None:
    described: dict[str, Any] = {
        "inputs": ["float32[4,6]", 2.0],
        "output_dtypes": [ferrule.float32],
    }
    assert rows.text(**described, **SIZES) == rows.text(**described, template=[("D", 6)])
    assert rows.compile(**described, **SIZES).mode


def test_in_dictionaries_and_rules() -> None:
    made = ferrule.metal_kernel("k", source=I + "y[i] = x[i];")
    x = np.arange(3.0, dtype=np.float32)
    outputs = made(
        inputs={"x": x}, grid=("x.size", 1, 1), threadgroup=(3, 1, 1),
        output_shapes={"y": "x.shape"}, output_dtypes={"y": np.float32},
    )  # fmt: skip
    np.testing.assert_array_equal(outputs["y"], x)
    with pytest.raises(ferrule.RuleError, match=r"x\.shape\[0\]"):
        ferrule.op("k", "x[N]:float32 -> y[N]:float32", metal="y[0] = 0;", grid="x.shape[0]",
                   threadgroup=1)  # fmt: skip
    with pytest.raises(ferrule.RuleError, match=r"x\.shape\[0\]"):
        ferrule.op("k", "x[N]:float32 -> y[x.shape[0]]:float32", metal="y[0] = 0;", grid="N",
                   threadgroup=1)  # fmt: skip


@pytest.mark.parametrize("shape", [(2**31,), (2**32 + 6,), (0, 2**32)])
@pytest.mark.parametrize("grid", [(6, 1, 1), ("x.size", 1, 1)])
def test_sizes_that_mlx_has_not(shape: tuple[int, ...], grid: Any) -> None:
    kernel = ferrule.metal_kernel(
        name="long", input_names=["x"], output_names=["y"], source="y[0] = 0;"
    )
    with pytest.raises(KernelError, match=r"kernel 'long'.*214748364"):
        kernel(
            inputs=[mx.ones((6,))], grid=grid, threadgroup=(1, 1, 1), output_shapes=[shape],
            output_dtypes=[mx.uint8],
        )  # fmt: skip


def test_a_cuda_kernel_without_cuda_says_so_inside_transformations_too() -> None:
    if mx.is_available(mx.gpu):
        pytest.skip("there is a GPU")
    kernel = ferrule.cuda_kernel(
        name="only_cuda", input_names=["x"], output_names=["y"], source="y[0] = x[0];"
    )

    def call(x: mx.array) -> mx.array:
        return kernel(
            inputs=[x], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)],
            output_dtypes=[mx.float32],
        )[0]  # fmt: skip

    for function in (call, mx.compile(call), mx.compile(call, shapeless=True), mx.vmap(call)):
        with pytest.raises(ferrule.DeviceError, match=r"'only_cuda'.*mlx\[cuda13\]"):
            function(mx.ones((3, 1)))
