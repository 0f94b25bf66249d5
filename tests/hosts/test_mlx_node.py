"""Kernels and ops as nodes of MLX's graphs, on whatever device is MLX's default."""

from __future__ import annotations

import dataclasses
import gc
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx.utils import tree_map

import ferrule as fe
from ferrule import KernelError, KernelTypeError
from ferrule.hosts.mlx import build as mlx_build
from ferrule.hosts.mlx import gpu as mlx_gpu
from ferrule.hosts.mlx import kernel_nodes
from ferrule.tools import toolchain

pytestmark = pytest.mark.skipif(mlx_build.library() is None, reason="no nodes here")

I = "uint i = thread_position_in_grid.x;"  # noqa: E741

scaled = fe.op(
    "scaled", "x[*S]:T, a:float32 -> y[*S]:T", grid="x.size", threadgroup=64,
    metal=f"{I} y[i] = T(float(x[i]) * a);",
)  # fmt: skip
square_vjp = fe.op(
    "square_vjp", "x[*S]:T, cotangent[*S]:T -> x_grad[*S]:T", grid="x.size", threadgroup=64,
    metal=f"{I} x_grad[i] = T(2) * x[i] * cotangent[i];",
)  # fmt: skip
square_vjp.def_vjp(
    fe.op(
        "square_vjp_vjp",
        "x[*S]:T, cotangent[*S]:T, x_grad_cotangent[*S]:T -> x_grad[*S]:T, cotangent_grad[*S]:T",
        grid="x.size",
        threadgroup=64,
        metal=f"""{I}
        x_grad[i] = T(2) * cotangent[i] * x_grad_cotangent[i];
        cotangent_grad[i] = T(2) * x[i] * x_grad_cotangent[i];""",
    )
)
square = fe.op(
    "square", "x[*S]:T -> y[*S]:T", grid="x.size", threadgroup=64, metal=f"{I} y[i] = x[i] * x[i];"
)
square.def_vjp(square_vjp)
square.def_jvp(lambda primals, tangents, outputs: (2 * primals[0] * tangents[0],))
rows = fe.op(  # dims that the body reads, two outputs of other shapes and dtypes
    "rows", "x[*S,K]:T -> total[*S]:T, n[*S,1]:int32", grid="x.size // K if K > 0 else total.size",
    threadgroup=32,
    metal=f"""{I}
    T sum = T(0);
    for (int k = 0; k < K; k++) sum += x[i * K + k];
    total[i] = sum;
    n[i] = K;""",
)  # fmt: skip
plain = fe.metal_kernel("plain", ["x"], ["y"], f"{I} y[i] = x[i] * x[i];")
outer = fe.op(  # nothing is declared independent
    "outer", "a[N]:float32, b[M]:float32 -> c[N,M]:float32", grid=("M", "N", 1),
    threadgroup=(8, 8, 1),
    metal="""uint2 p = thread_position_in_grid.xy; c[p.y * M + p.x] = a[p.y] * b[p.x];""",
)  # fmt: skip
maybe = fe.op(
    "maybe", "x[N]:float32, bias[N]:float32? -> y[N]:float32", grid="N", threadgroup=32,
    metal=f"{I} y[i] = x[i]; if (has_bias) y[i] += bias[i];",
)  # fmt: skip


def level0(x: mx.array, **more: Any) -> mx.array:
    (y,) = plain(
        inputs=[x], grid=(x.size, 1, 1), threadgroup=(64, 1, 1), output_shapes=[x.shape],
        output_dtypes=[x.dtype], **more,
    )  # fmt: skip
    return y


def numbers(*shape: int, dtype: Any = mx.float32) -> mx.array:
    values = np.random.default_rng(abs(hash(shape)) % 2**32).integers(-8, 9, shape)
    return mx.array(values.astype(np.float32)).astype(dtype)


def same(a: mx.array, b: mx.array) -> None:
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert mx.array_equal(a, b).item()


# -- eager, lazy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (0,), (2, 0, 3), (1 << 20,)])
@pytest.mark.parametrize("function", [square, level0])
def test_shapes(function: Any, shape: tuple[int, ...]) -> None:
    if function is level0 and 0 in shape:
        return  # a grid of no thread for no output: see below
    x = numbers(*shape)
    same(function(x) if shape or function is square else level0_scalar(x), x * x)


def level0_scalar(x: mx.array) -> mx.array:
    kernel = fe.metal_kernel("one", ["x"], ["y"], "y[0] = x * x;")
    return kernel(
        inputs=[x], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[()],
        output_dtypes=[x.dtype],
    )[0]  # fmt: skip


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "int32", "uint8", "int64"])
def test_dtypes(name: str) -> None:
    x = numbers(33, dtype=getattr(mx, name))
    same(square(x), x * x)
    same(level0(x), x * x)


def test_a_node_is_lazy_and_its_inputs_may_be_too() -> None:
    x = mx.ones((4,)) + 1
    y = square(square(x) + 1)
    assert y.tolist() == [25] * 4


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_inputs_that_are_not_contiguous(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    x = numbers(*shape)
    for _ in range(data.draw(st.integers(1, 3))):
        way = data.draw(st.sampled_from(["transpose", "slice", "broadcast", "step"]))
        axis = data.draw(st.integers(0, x.ndim - 1))
        if way == "transpose":
            x = mx.swapaxes(x, axis, x.ndim - 1)
        elif way == "slice":
            at = data.draw(st.integers(0, x.shape[axis] - 1))
            x = mx.moveaxis(mx.moveaxis(x, axis, 0)[at:], 0, axis)
        elif way == "step":
            x = mx.moveaxis(mx.moveaxis(x, axis, 0)[::2], 0, axis)
        elif x.ndim < 5:
            x = mx.broadcast_to(mx.expand_dims(x, axis), (*x.shape[:axis], 3, *x.shape[axis:]))
    same(square(x), x * x)
    same(level0(x), x * x)
    total, n = rows(x)
    same(total, x.sum(-1))
    same(n, mx.full((*x.shape[:-1], 1), x.shape[-1], mx.int32))


def test_strides_that_the_body_reads() -> None:
    strided = fe.metal_kernel(
        "strided", ["x"], ["y"],
        f"{I} y[i] = x[elem_to_loc(i, x_shape, x_strides, x_ndim)] + x_shape[0];",
        ensure_row_contiguous=False,
    )  # fmt: skip
    x = numbers(4, 6)[:, ::2].T
    (y,) = strided(
        inputs=[x], grid=(x.size, 1, 1), threadgroup=(64, 1, 1), output_shapes=[x.shape],
        output_dtypes=[x.dtype],
    )  # fmt: skip
    same(y, x + 3)
    assert mx.compile(lambda x: square(x.T) + 1)(x).tolist() == (x.T * x.T + 1).tolist()


def test_outputs_of_which_one_is_not_asked_for() -> None:
    total, n = rows(numbers(3, 4))
    del total
    assert n.tolist() == [[4]] * 3


def test_numbers_and_absent_inputs() -> None:
    x = numbers(9)
    same(scaled(x, 2.0), x * 2)
    same(scaled(x, 3), x * 3)
    same(maybe(x, None), x)
    same(maybe(x, x), x + x)
    same(mx.compile(lambda x: maybe(x, None) + scaled(x, 0.5))(x), x + x * 0.5)


@pytest.mark.parametrize("value", [0, 3, -1.5])
def test_init_value_and_atomics(value: float) -> None:
    count = fe.metal_kernel(
        "count", ["x"], ["n"],
        "atomic_fetch_add_explicit(&n[0], x[thread_position_in_grid.x], memory_order_relaxed);",
        atomic_outputs=True,
    )  # fmt: skip
    x = mx.ones((1000,))
    (n,) = count(
        inputs=[x], grid=(1000, 1, 1), threadgroup=(64, 1, 1), output_shapes=[(3,)],
        output_dtypes=[mx.float32], init_value=value,
    )  # fmt: skip
    assert n.tolist() == [1000 + value, value, value]


def test_a_long_chain_mixed_with_other_nodes() -> None:
    x = mx.array([0.5, -0.25, 1.0])
    half = mx.array(0.5)
    y, z = x, x
    for _ in range(500):
        y = mx.maximum(scaled(y * 1.5, 0.5), rows(y[None])[0][0] * 0 + y * half)
        z = mx.maximum(z * 1.5 * half, z.sum() * 0 + z * half)
    same(y, z)


def test_many_sizes() -> None:
    outs = [(x := mx.arange(n).astype(mx.float32), square(x)) for n in range(1, 300)]
    mx.eval([y for _, y in outs])
    for x, y in outs:
        same(y, x * x)


def test_functions_in_python() -> None:
    """Their arrays are values also where the call is part of a graph."""
    seen = []

    def numpy_sort(x: mx.array) -> mx.array:
        seen.append(np.array(x).shape)
        return mx.array(np.sort(np.array(x)))

    ordered = fe.adopt("ordered", "x[*S]:float32 -> y[*S]:float32", run=numpy_sort)
    ordered.def_vjp(lambda primals, cotangents, outputs: (cotangents[0] * 3,))
    x = numbers(4, 5)
    same(ordered(x * 2) + 1, mx.sort(x * 2) + 1)
    f = mx.compile(lambda x: ordered(x * 2) + 1, shapeless=True)
    for n in (3, 5):
        same(f(numbers(n, n)), mx.sort(numbers(n, n) * 2) + 1)
    same(mx.grad(lambda x: ordered(x).sum())(x), mx.full(x.shape, 3.0))
    same(mx.vmap(ordered, in_axes=1, out_axes=1)(x), mx.sort(x, axis=0))
    assert seen

    def bad(x: mx.array) -> mx.array:
        raise ZeroDivisionError("of the function's own")

    with pytest.raises(ValueError, match="of the function's own"):
        mx.eval(fe.adopt("bad", "x[N]:float32 -> y[N]:float32", run=bad)(x[0]))


def test_what_c_has_no_room_for() -> None:
    filled = fe.op(
        "filled", "x[N]:float32, a:float16 -> y[N]:float32", grid="N", threadgroup=32, init_value=7,
        metal=f"{I} if (x[i] > 0) y[i] = float(a);",
    )  # fmt: skip
    f = mx.compile(lambda x: filled(x, 0.5) * 2)
    assert f(mx.array([1.0, -1.0, 0.0])).tolist() == [1, 14, 14]


# -- compile ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [square, level0])
def test_compiled(function: Any) -> None:
    f = mx.compile(lambda x: function(x + 1) * 2)
    for shape in ((4,), (3, 5), (4,), (2, 2, 2)):
        x = numbers(*shape)
        same(f(x), (x + 1) * (x + 1) * 2)


def test_shapeless_with_changing_sizes() -> None:
    traces = 0

    def f(x: mx.array) -> tuple[mx.array, ...]:
        nonlocal traces
        traces += 1
        total, n = rows(square(x) + 1)
        return total * 2, n

    g = mx.compile(f, shapeless=True)
    shapes = [(4, 6), (9, 3), (1, 1), (300, 17), (2, 1000), (4, 6)]
    if mx.default_device().type == mx.cpu:  # on CUDA MLX's own fused nodes divide by 0 then
        shapes.append((0, 3))
    for shape in shapes:
        x = numbers(*shape)
        total, n = g(x)
        same(total, (x * x + 1).sum(-1) * 2)
        assert n.tolist() == [[shape[1]]] * shape[0]
    assert traces == 1


def test_shapeless_graphs_that_wait_share_no_sizes() -> None:
    f = mx.compile(lambda x: rows(square(x))[0], shapeless=True)
    xs = [numbers(n, n + 2) for n in range(1, 9)]
    outs = [f(x) for x in xs]
    mx.eval(outs)
    for x, y in zip(xs, outs, strict=True):
        same(y, (x * x).sum(-1))


def test_a_template_that_follows_sizes_in_a_shapeless_graph() -> None:
    templated = fe.op(
        "templated", "x[N]:float32 -> y[N]:float32", grid="N", threadgroup=32,
        template={"D": "N if N <= 8 else 8"}, metal=f"{I} y[i] = x[i] + D;",
    )  # fmt: skip
    f = mx.compile(templated, shapeless=True)
    for n in (3, 8, 20, 5):
        assert f(mx.zeros((n,))).tolist() == [min(n, 8)] * n


def test_level_0_in_a_shapeless_trace() -> None:
    """A decode step whose state is fixed while the cache grows."""
    f = mx.compile(lambda state, cache: (level0(state), cache + 1), shapeless=True)
    state = numbers(4, 3)
    for n in (1, 5, 2):
        y, cache = f(state, mx.zeros((n, 2)))
        same(y, state * state)
        assert cache.shape == (n, 2)
    with pytest.raises(
        ValueError,
        match=r"kernel 'plain': input 'x' has the shape \(5, 3\).* for \(4, 3\).*ferrule\.op",
    ):
        mx.eval(f(numbers(5, 3), mx.zeros((1, 2))))


# -- derivatives and batches -----------------------------------------------------------------------


def test_gradients() -> None:
    x = numbers(3, 4)
    loss = lambda x: (square(x) * 3).sum()  # noqa: E731
    for transform in (lambda f: f, mx.compile, lambda f: mx.compile(f, shapeless=True)):
        same(transform(mx.grad(loss))(x), 6 * x)
        value, grad = transform(mx.value_and_grad(loss))(x)
        same(value, (x * x * 3).sum())
        same(grad, 6 * x)
    (y,), (grad,) = mx.vjp(square, [x], [mx.ones_like(x)])
    same(grad, 2 * x)
    (y,), (tangent,) = mx.jvp(square, [x], [x])
    same(y, x * x)
    same(tangent, 2 * x * x)
    same(mx.grad(mx.checkpoint(loss))(x), 6 * x)


def test_second_derivatives() -> None:
    x = numbers(5)
    first = mx.grad(lambda x: (square(x) * x).sum())  # x^3
    same(first(x), 3 * x * x)
    second = mx.grad(lambda x: first(x).sum())
    same(second(x), 6 * x)
    same(mx.compile(second, shapeless=True)(x), 6 * x)


def test_no_rule_is_said() -> None:
    x = numbers(3)
    with pytest.raises(ValueError, match=r"op 'maybe' has no derivative; declare one with def_vjp"):
        mx.grad(lambda x: maybe(x, None).sum())(x)
    with pytest.raises(ValueError, match=r"op 'rows' has no forward-mode"):
        mx.jvp(lambda x: rows(x)[0], [numbers(2, 2)], [numbers(2, 2)])
    with pytest.raises(ValueError, match=r"kernel 'plain' has no derivative.*def_vjp"):
        mx.grad(lambda x: level0(x).sum())(x)
    with pytest.raises(ValueError, match=r"kernel 'plain' has no batching rule"):
        mx.eval(mx.vmap(level0)(numbers(3, 3)))


@pytest.mark.parametrize("transform", [lambda f: f, mx.compile], ids=["eager", "compiled"])
def test_batches(transform: Any) -> None:
    x = numbers(3, 4, 5)
    for axis in range(3):
        for out in range(3):
            found = transform(mx.vmap(square, in_axes=axis, out_axes=out))(x)
            same(found, mx.moveaxis(x * x, axis, out))
    same(transform(mx.vmap(mx.grad(lambda x: square(x).sum())))(x), 2 * x)
    same(transform(mx.grad(lambda x: mx.vmap(square)(x).sum()))(x), 2 * x)
    total, n = transform(mx.vmap(rows))(x)
    same(total, x.sum(-1))
    assert n.shape == (3, 4, 1)


def test_a_batch_of_what_is_not_independent_is_a_loop_that_says_so() -> None:
    a, b = numbers(3, 4), numbers(5)
    with pytest.warns(fe.FerruleWarning, match="op 'outer' is called 3 times by vmap"):
        c = mx.vmap(outer, in_axes=(0, None))(a, b)
    same(c, a[:, :, None] * b)
    assert outer.counts["vmap loop"] >= 1


def test_a_training_step_of_a_module() -> None:
    class Layer(nn.Module):
        def __init__(self, function: Any) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.function = function

        def __call__(self, x: mx.array) -> mx.array:
            return self.function(self.linear(x))

    losses: list[list[float]] = []
    for function in (square, lambda x: x * x):
        mx.random.seed(0)
        model = nn.Sequential(Layer(function), Layer(function))
        step = nn.value_and_grad(model, lambda m, x: (m(x) ** 2).mean())
        found = []
        for _ in range(3):
            loss, grads = step(model, numbers(6, 4) * 0.1)
            model.update(tree_map(lambda p, g: p - 0.1 * g, model.parameters(), grads))
            found.append(loss.item())
        losses.append(found)
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_custom_functions_around_kernels() -> None:
    @mx.custom_function
    def f(x: mx.array) -> mx.array:
        return level0(x)

    @f.vjp
    def f_vjp(primals: Any, cotangent: mx.array, output: mx.array) -> mx.array:
        x = primals[0] if isinstance(primals, (list, tuple)) else primals
        return 2 * x * cotangent

    x = numbers(3, 4)
    same(mx.grad(lambda x: f(x).sum())(x), 2 * x)
    same(mx.compile(mx.grad(lambda x: f(x).sum()))(x), 2 * x)
    same(mx.checkpoint(f)(x), x * x)


# -- streams, threads, memory ----------------------------------------------------------------------


def test_streams() -> None:
    x = numbers(1000)
    other = mx.new_stream(mx.default_device())
    y = x
    for i in range(50):
        with mx.stream(other if i % 2 else mx.default_stream(mx.default_device())):
            y = scaled(y, -1.0)
    same(y, x)
    with mx.stream(mx.cpu):
        same(square(x), x * x)
    same(level0(x, stream=mx.cpu), x * x)
    same(level0(x, stream=other), x * x)
    same(level0(x, stream=mx.gpu), x * x)


def test_async_eval() -> None:
    y = x = numbers(100)
    for i in range(200):
        y = scaled(y, -1.0)
        if i % 7 == 0:
            mx.async_eval(y)
    same(y, x)


# MLX's CUDA build (0.32.4) marks a fused kernel as ready before it knows how many threads it has,
# and a thread that asks at this moment divides by that: the process ends. So one uses it first.
THREADS = """
import sys, threading
import mlx.core as mx, ferrule
op = ferrule.op("asked", "x[N]:float32 -> y[N]:float32", grid="N", threadgroup=32,
                metal="uint i = thread_position_in_grid.x; y[i] = x[i] + D;", template={"D": "N"})
compiled = lambda: mx.compile(lambda x: op(x) + 1, shapeless=True)
mx.eval(compiled()(mx.zeros((64,))))
wrong = []
def work(first):
    f = compiled()
    for n in range(first, first + 3):
        if f(mx.zeros((n,))).tolist() != [n + 1] * n: wrong.append(n)
threads = [threading.Thread(target=work, args=(2 + 3 * i,)) for i in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not wrong, wrong
"""


WITH_NUMBER = "x[*S]:T, e:float32 -> y[*S]:T"
WITH_ARRAY = WITH_NUMBER.replace("e:", "e[]:")
GIVEN_ARRAYS: dict[str, Any] = {
    "eager": lambda op, x, e: op(x, e[0]),
    "compiled": lambda op, x, e: mx.compile(op)(x, e[0]),
    "shapeless": lambda op, x, e: mx.compile(op, shapeless=True)(x, e[0]),
    "batched": lambda op, x, e: mx.vmap(op, in_axes=(None, 0))(x, e)[0],
    "differentiated": lambda op, x, e: mx.grad(lambda e: op(x, e).sum())(e[0]),
    "exported": lambda op, x, e: mx.export_function(lambda event: None, op, x, e[0]) or 2 * x,
}


@pytest.mark.filterwarnings("ignore:.*called 2 times:ferrule.FerruleWarning")
@pytest.mark.parametrize("how", GIVEN_ARRAYS)
def test_an_array_for_a_number(how: str) -> None:
    """The error says how it is declared as an array; then it can be one, with the same body."""
    if how == "exported" and not mlx_build.at_least(0, 32):
        pytest.skip("this MLX exports no kernels here")
    x, e = mx.ones(3), mx.array([2.0, 3.0])
    made = [
        fe.op("by", rule, metal=f"{I} y[i] = x[i] * e;", grid="x.size", threadgroup=8)
        for rule in (WITH_NUMBER, WITH_ARRAY)
    ]
    with pytest.raises(
        (KernelTypeError, ValueError),
        match=r"input 'e' of op 'by': got a mlx\.array of shape \(\), expected a Python number: "
        r"e:float32\. .* declare e\[\]:float32\.",
    ):
        GIVEN_ARRAYS[how](made[0], x, e)
    if how != "differentiated":
        assert GIVEN_ARRAYS[how](made[1], x, e).tolist() == [2, 2, 2]


def test_a_drawn_graph_says_what_a_kernel_is(tmp_path: Path) -> None:
    """MLX asks for one name, for pictures and for the error of an export."""
    y = square(numbers(3)) + 1
    path = tmp_path / "graph.dot"
    mx.export_to_dot(str(path), y)
    labels = re.findall(r'label ="([^"]*)"', path.read_text("utf-8"))
    (label,) = [one for one in labels if "square" in one]
    if mlx_build.at_least(0, 32):
        assert label.replace("\u00a0", " ") == "op 'square' (evaluate it before mx.export_function)"
        with pytest.raises(
            ValueError, match=r"serialize primitive op.'square'.\(evaluate.it.before"
        ):
            mx.export_function(str(tmp_path / "f.mlxfn"), lambda x: x + y, mx.ones(3))


def test_threads_of_many_processes() -> None:
    count = 8 if mx.is_available(mx.gpu) else 1
    for _ in range(count):
        done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True)
        assert done.returncode == 0, (done.returncode, done.stderr)


def test_threads_that_ask_in_every_way() -> None:
    """New templates are compiled while others wait for results, with and without the GIL."""
    kernel = fe.op(
        "asked", "x[N]:float32 -> y[N]:float32", grid="N", threadgroup=32, template={"D": "N"},
        metal=f"{I} y[i] = x[i] + D;",
    )  # fmt: skip
    faults: list[BaseException] = []
    mx.eval(mx.compile(lambda x: kernel(x) + 1, shapeless=True)(mx.zeros((64,))))  # as above

    def work(first: int) -> None:
        try:
            f = mx.compile(lambda x: kernel(x) + 1, shapeless=True)
            for n in range(first, first + 3):
                y = f(mx.zeros((n,)))
                way = n % 4
                if way == 0:
                    assert y[0].item() == n + 1
                elif way == 1:
                    assert np.array(y).tolist() == [n + 1] * n
                elif way == 2:
                    assert str(y).startswith(f"array([{n + 1}")
                else:
                    assert y.tolist() == [n + 1] * n
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(2 + 2 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not faults


def test_nodes_go_when_nobody_wants_them() -> None:
    def used() -> int:
        gc.collect()
        mx.synchronize()
        return int(mx.get_active_memory())

    x = numbers(1 << 16)
    mx.eval(square(x), rows(x[None])[0])
    before = used()
    for _ in range(50):
        y = square(x.reshape(256, 256).T)
        mx.eval(y, rows(y)[1])
        square(y)  # never evaluated
    del y
    assert used() <= before


@pytest.fixture
def no_stock_kernels() -> Iterator[None]:
    """Kernels that others made are not used, nor are those that a test makes used by others."""
    mlx_gpu._stock_kernel.cache_clear()
    yield
    mlx_gpu._stock_kernel.cache_clear()


@pytest.mark.usefixtures("no_stock_kernels")
def test_what_mlx_is_asked_for_on_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call of MLX's own function, which another carries out here: it was never run on a Mac."""
    asked = []

    def stand_in(*names: Any, **options: Any) -> Any:
        asked.append(names[0])
        return fe.metal_kernel(*names, **options)

    monkeypatch.setattr(mx.fast, "metal_kernel", stand_in)
    x = numbers(3, 4)
    calls: Any = [
        (square, x), (square, numbers(1)[0]), (scaled, x, 2.5), (rows, x), (maybe, x[0], None),
        (maybe, x[0], x[1]), (outer, x[0], x[:, 0]),
    ]  # fmt: skip
    for op, *values in calls:
        expected = op(*values)
        found = mlx_gpu.by_stock_node(op, tuple(values))
        for a, b in zip(
            found, expected if isinstance(expected, tuple) else [expected], strict=True
        ):
            same(a.reshape(b.shape), b)
    assert len(asked) == 5  # one per op


@pytest.mark.usefixtures("no_stock_kernels")
def test_what_mlx_is_asked_for_by_kernels_on_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def stand_in(*names: Any, **options: Any) -> Any:
        def call(**given: Any) -> list[mx.array]:
            asked.append((names[:4], options, given))
            return [x * x for x in given["inputs"]]

        return call

    kernel = fe.metal_kernel("on_metal", ["x"], ["y"], f"{I} y[i] = x[i] * T(N);")
    monkeypatch.setattr(mx.fast, "metal_kernel", stand_in)
    monkeypatch.setattr(mlx_gpu, "on_metal", lambda stream: True)
    x = numbers(6)
    call: Any = {
        "inputs": [x], "grid": (6, 1, 1), "threadgroup": (64, 1, 1), "output_shapes": [(6,)],
        "output_dtypes": [mx.float32], "template": [("T", mx.float32), ("N", 2)], "init_value": 3,
    }  # fmt: skip
    for _ in range(2):
        (y,) = kernel(**call)
        same(y, x * x)
    (names, options, given) = asked[0]
    assert names == ("on_metal", ["x"], ["y"], kernel.kernel.source) and len(asked) == 2
    assert options == {"header": "", "ensure_row_contiguous": True, "atomic_outputs": False}
    assert given["template"] == call["template"] and given["init_value"] == 3
    assert given["grid"] == (6, 1, 1) and given["threadgroup"] == (64, 1, 1)
    assert given["output_shapes"] == [(6,)] and given["output_dtypes"] == [mx.float32]


# -- what is wrong ---------------------------------------------------------------------------------


def one(name: str, grid: str, text: str) -> fe.Op:
    return fe.op(name, "x[N]:float32 -> y[N]:float32", grid=grid, threadgroup=1, metal=text)


def test_a_cuda_body_on_the_cpu_where_mlx_has_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    native = kernel_nodes.library()

    class WithCuda:
        def __getattr__(self, name: str) -> Any:
            return (lambda: True) if name == "fr_mlx_has_cuda" else getattr(native, name)

    monkeypatch.setattr(kernel_nodes, "library", WithCuda)
    kernel = fe.cuda_kernel("lean", ["x"], ["y"], "y[0] = x[0];")
    with pytest.raises(fe.DeviceError, match=r"'lean' is written in CUDA.*'cpu'. Call it with str"):
        kernel(
            inputs=[mx.ones(3)], grid=(3, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(3,)],
            output_dtypes=[mx.float32], stream=mx.cpu,
        )  # fmt: skip


def test_wrong_calls() -> None:
    x = numbers(3)
    with pytest.raises(KernelError, match=r"input 'b' of op 'outer'.*\(3, 1\)"):
        outer(x, x[:, None])
    with pytest.raises(KernelTypeError, match="takes 1 inputs"):
        square(x, x)
    with pytest.raises(KernelTypeError, match=r"input 'a' of op 'scaled'.*'two'"):
        scaled(x, "two")
    with pytest.raises(KernelError, match="does not fit"):
        scaled(x, 1e300)
    times = fe.metal_kernel("times", ["x", "w"], ["y"], f"{I} y[i] = x[i] * w[i];")
    for change in (lambda f: f, mx.compile):  # values of a trace cannot be run, which is not why
        with pytest.raises(KernelError, match="arrays of one library"):
            change(lambda x: outer(x, np.ones(3, np.float32)))(x)
        with pytest.raises(KernelError, match="two libraries: input 'x' is MLX, input 'w' is Nu"):
            change(lambda x: times(
                inputs=[x, np.ones(3)], grid=(3, 1, 1), threadgroup=(3, 1, 1), output_shapes=[(3,)],
                output_dtypes=[mx.float32],
            ))(x)  # fmt: skip
    with pytest.raises(fe.CompileError, match="nonsense"):
        one("bad", "N", "nonsense(x);")(x)
    with pytest.raises(KernelError, match="runs no thread"):
        one("none", "0*N", "y[0] = 0;")(x)
    with pytest.raises(KernelError, match=r"op 'square': input 1 of 1 has 17 dims.*mx.reshape"):
        square(mx.ones([1] * 17))
    huge = fe.op(
        "huge", "x[N]:T -> y[N*1000000000]:T", metal="y[0] = x[0];", grid="N", threadgroup=1
    )
    with pytest.raises(
        KernelError, match=r"op 'huge': output 1 of 1 has the size 3000000000 along"
    ):
        huge(x)
    assert square(x).tolist() == (x * x).tolist()


def test_memory_that_is_not_there_is_an_error_where_it_is_evaluated() -> None:
    if mx.default_device().type != mx.cpu:
        pytest.skip("a GPU's memory is MLX's to give")
    wide = fe.op(
        "wide", "x[N,M]:T -> z[N]:T, y[N,M,M]:T", grid="1", threadgroup=1, metal="z[0] = x[0];"
    )
    first = fe.op("first", "x[N,M]:T -> y[1]:T", grid="1", threadgroup=1, metal="y[0] = x[0];")
    one = mx.array(1.0)
    for f in (lambda x: wide(x)[0], mx.compile(lambda x: wide(x)[1] + 1, shapeless=True)):
        says = (
            rf"^op 'wide': output 2 of 2 has the shape \(4, {2**29}, {2**29}\), which is {2**62} b"
        )
        with pytest.raises(RuntimeError, match=says):
            mx.eval(f(mx.broadcast_to(one, (4, 2**29))))
        with pytest.raises(RuntimeError, match=r"which is more than 9223372036854775807 bytes"):
            mx.eval(f(mx.broadcast_to(one, (4, 2**30))))
        assert f(mx.ones((1, 1))).size == 1  # and what follows is as ever
        mx.eval(f(mx.ones((1, 1))), square(one))
    with pytest.raises(RuntimeError, match=r"op 'first': a row-contiguous copy of input 1 of 1 ha"):
        mx.eval(first(mx.broadcast_to(one, (2**30, 2**29))))
    with pytest.raises(RuntimeError, match=r"^kernel 'plain': output 1 of 1 has the shape"):
        mx.eval(plain(
            inputs=[one[None]], output_shapes=[(2**30, 2**30)], output_dtypes=[mx.float32],
            grid=(1, 1, 1), threadgroup=(1, 1, 1),
        ))  # fmt: skip


def test_a_kernel_that_faults_is_an_error_where_it_is_evaluated() -> None:
    if mx.default_device().type != mx.cpu:
        pytest.skip("a GPU is unusable after it")
    wild = fe.op(
        "wild", "x[N]:float32 -> y[N]:float32", grid="N", threadgroup=1,
        metal=f"{I} y[i + (1l << 44)] = x[i];",
    )  # fmt: skip
    words = r"op 'wild' \(grid .*accessed memory outside"
    x = numbers(4)
    if mlx_build.at_least(0, 32, 2):
        with pytest.raises(RuntimeError, match=words):
            mx.eval(wild(x))
        try:  # np.array may ask twice, and MLX tells it once: what it gets must look like no result
            assert np.isnan(np.array(wild(x))).all()
        except RuntimeError as error:
            assert "op 'wild'" in str(error)
    else:  # such an error would end the process
        mx.eval(wild(x))
        with pytest.raises(Exception, match="an earlier " + words):
            square(x)
    same(square(x), x * x)


@pytest.mark.skipif(sys.platform == "darwin", reason="MLX has the C++ library of zig there")
@pytest.mark.parametrize("which", ["zig", "like it"])
def test_a_compiler_with_another_library_than_mlx_is_refused_by_name(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = toolchain.find_compiler()
    if which == "zig":  # asked for nothing: it takes half a minute to build its library
        command = f"{sys.executable} -m ziglang c++"
        argv = tuple(command.split())
        compiler = dataclasses.replace(compiler, kind="zig", argv=argv, identity="zig")
    else:  # as g++ sees a compiler that has libc++
        command = " ".join([*compiler.argv, "-D_LIBCPP_VERSION=1"])
        compiler = toolchain.find_compiler(command)
    monkeypatch.setattr(toolchain, "find_compiler", lambda: compiler)
    with pytest.warns(
        fe.FerruleWarning,
        match="run at once, and not inside mx.compile.*: "
        + re.escape(command)
        + r" \(\w+ [\d.]+\) "
        r"compiles kernels.*libc\+\+.*MLX is built with .*libstdc\+\+.*g\+\+.*FERRULE_CXX",
    ):
        assert mlx_build.library.__wrapped__() is None
    assert "ziglang" in toolchain.remedy() and "ziglang" not in toolchain.remedy(zig=False)


def test_another_compiler_builds_the_nodes() -> None:
    """What one of g++ and clang++ lets pass the other may not."""
    used = toolchain.find_compiler()
    others = [argv for _, argv in toolchain.candidates() if argv is not None]
    other = next((a for a in others if ("clang" in a[0]) != (used.kind == "clang")), None)
    if other is None:
        pytest.skip("there is one compiler here")
    code = "from ferrule.hosts.mlx import build as mlx_build; mlx_build.loaded()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280,
        env={**os.environ, "FERRULE_CXX": " ".join(other)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
