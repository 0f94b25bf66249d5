"""ferrule.mlx: MLX's gathering and quantized products, under every transformation."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule.mlx as fm
import mlx_products as make
import on_cuda
from ferrule.errors import KernelError
from ferrule.hosts.mlx import build as mlx_build
from ferrule.hosts.mlx import products as mlx_products
from ferrule.hosts.mlx import sizes as mlx_sizes
from mlx_products import MODES, Product
from mlx_versions import needs_mlx

DATA = st.data()
TOO_OLD = r"need MLX 0\.32\.3 or newer; this is "
# On CUDA MLX compiles kernels of its own for each format and shape, which takes seconds each.
FEW, SOME = (
    settings(deadline=None, max_examples=count)
    for count in ((3, 4) if on_cuda.mlx_has_cuda() else (15, 60))
)


def close(a: mx.array, b: mx.array, tolerance: float = 2e-4) -> None:
    assert a.shape == b.shape
    scale = max(1.0, mx.abs(b).max().item()) if b.size else 1.0
    if not on_cuda.mlx_has_cuda():
        assert mx.allclose(a, b, rtol=0, atol=tolerance * scale)
        return
    try:
        mx.eval(a)
    except RuntimeError as error:  # a scale for each row, broadcast: MLX takes no strides of 0
        assert "No implementation for problem shape" in str(error)
        return
    assert mx.allclose(a, b, rtol=0, atol=max(tolerance, 1e-2) * scale)  # MLX multiplies in TF32


def for_all_shapes(function: Callable[..., Any]) -> Callable[..., Any]:
    return mx.compile(function, shapeless=True)


class Traced:
    """A function in a shapeless compilation, which counts how often it was traced."""

    def __init__(self, function: Callable[..., mx.array]) -> None:
        self.traces = 0

        def counting(*arrays: mx.array) -> mx.array:
            self.traces += 1
            return function(*arrays)

        self.compiled = for_all_shapes(counting)

    def __call__(self, *arrays: mx.array) -> mx.array:
        made: mx.array = self.compiled(*arrays)
        assert self.traces == 1
        return made


def drawn(data: st.DataObject, floats: bool | None = None) -> tuple[Product, list[list[mx.array]]]:
    """A product, and arrays for several calls of it whose sizes differ."""
    product = data.draw(make.products(floats))
    ranks = data.draw(make.ranks(product))
    calls = [data.draw(make.arrays(product, ranks, seed)) for seed in (0, 10, 20)]
    kinds = [array.dtype for array in calls[0]]
    for call in calls:  # another dtype is another trace
        call[:] = [array.astype(kind) for array, kind in zip(call, kinds, strict=True)]
    return product, calls


def check_of_mlx(product: Product, arrays: list[mx.array], found: mx.array) -> None:
    """MLX's own gives the same, but for the order of sums: on CUDA where its kernels are right."""
    if not on_cuda.mlx_has_cuda():
        close(found, product.call(*arrays, of=mx), 1e-5)
        return
    batches = not product.gathers and arrays[1].ndim > 2
    if product.mode == "affine" and (arrays[0].shape[-1] == product.group or batches):
        return  # garbage, or other rows' numbers
    try:
        close(found, product.call(*arrays, of=mx))
    except RuntimeError as error:
        assert "No implementation for problem shape" in str(error)


@SOME
@given(DATA)
def test_forward_is_mlx(data: st.DataObject) -> None:
    product, calls = drawn(data)
    compiled, shapeless = mx.compile(product.call), Traced(product.call)
    for arrays in calls:
        found = product.call(*arrays)
        close(found, product.expected(*arrays))
        check_of_mlx(product, arrays, found)
        assert mx.array_equal(compiled(*arrays), found)
        assert mx.array_equal(shapeless(*arrays), found)


@pytest.mark.parametrize("kind", MODES, ids=str)
def test_all_modes(kind: tuple[str, int, int]) -> None:
    for transpose in (True, False):
        product = Product(*kind, transpose=transpose, omitted="lhs")
        shapeless = Traced(product.call)
        gradient = Traced(mx.grad(lambda *arrays: (product.call(*arrays) ** 2).sum()))  # noqa: B023
        for experts, count in ((2, 3), (5, 1), (1, 4)):
            x = make.normal((count, 1, 128), 1)
            arrays = [x, *product.matrices((experts,), 128, 128, 2), mx.arange(count) % experts]
            close(shapeless(*arrays), product.expected(*arrays))
            close(gradient(*arrays), mx.grad(squares(product.expected))(*arrays))


def squares(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
    return lambda *arrays: (function(*arrays) ** 2).sum()


@SOME
@given(DATA)
def test_gradient(data: st.DataObject) -> None:
    product, calls = drawn(data)
    gradient = mx.grad(squares(product.call))
    shapeless = Traced(gradient)
    for arrays in calls:
        expected = mx.grad(squares(product.expected))(*arrays)
        close(gradient(*arrays), expected)
        close(shapeless(*arrays), expected)


@SOME
@given(DATA)
def test_gradients_of_gather_mm(data: st.DataObject) -> None:
    product, calls = drawn(data, floats=True)
    both = mx.grad(squares(product.call), argnums=(0, 1))
    compiled, shapeless = mx.compile(both), for_all_shapes(both)
    for arrays in calls:
        expected = mx.grad(squares(product.expected), argnums=(0, 1))(*arrays)
        for function in (both, compiled, shapeless):
            for found, one in zip(function(*arrays), expected, strict=True):
                close(found, one)


@SOME
@given(DATA)
def test_vmap(data: st.DataObject) -> None:
    product, calls = drawn(data)
    axes = data.draw(make.batches(calls[0]))
    function = mx.vmap(product.call, tuple(axes))
    shapeless = Traced(function)
    for arrays in calls:
        arrays = make.batched(product, arrays, axes, data.draw(make.SMALL))
        expected = make.stacked(product.expected, axes)(*arrays)
        close(function(*arrays), expected)
        close(shapeless(*arrays), expected)


def pulled(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """The gradient with respect to x for a cotangent, which is given first."""

    def gradient(cotangent: mx.array, x: mx.array, *rest: mx.array) -> mx.array:
        return mx.vjp(lambda x: function(x, *rest), [x], [cotangent])[1][0]  # type: ignore[no-any-return]

    return gradient


@SOME
@given(DATA)
def test_vmap_of_gradient(data: st.DataObject) -> None:
    product, calls = drawn(data)
    axes = data.draw(make.batches([product.call(*calls[0]), *calls[0]]))
    if all(axis is None for axis in [axes[0], *axes[2:]]):
        axes[0] = 0  # what has no batch, such as this gradient by x, MLX repeats as in the trace
    function = mx.vmap(pulled(product.call), tuple(axes))
    shapeless = Traced(function)
    for arrays in calls:
        arrays = [make.normal(product.call(*arrays).shape, 5), *arrays]
        arrays = make.batched(product, arrays, axes, data.draw(make.SMALL))
        expected = make.stacked(pulled(product.expected), axes)(*arrays)
        close(function(*arrays), expected)
        close(shapeless(*arrays), expected)


def with_respect_to(
    places: Sequence[int], function: Callable[..., Any], count: int
) -> Callable[..., list[mx.array]]:
    """The gradients with respect to arrays at places, for ``count`` cotangents given first."""

    def gradients(*given: mx.array) -> list[mx.array]:
        cotangents, arrays = list(given[:count]), list(given[count:])

        def of(*varied: mx.array) -> Any:
            changed = dict(zip(places, varied, strict=True))
            return function(*[changed.get(i, array) for i, array in enumerate(arrays)])

        return mx.vjp(of, [arrays[i] for i in places], cotangents)[1]  # type: ignore[no-any-return]

    return gradients


@needs_mlx(0, 32)  # older ones gather matrices that are turned wrongly, in what is expected
@SOME
@given(DATA)
def test_all_gradients(data: st.DataObject) -> None:
    """With respect to matrices, or scales and biases, too; of these gradients; and batches."""
    product, calls = drawn(data)
    floats = [i for i, array in enumerate(calls[0]) if array.dtype == mx.float32]
    second, batch = data.draw(st.booleans()), data.draw(st.booleans())

    def gradients(function: Callable[..., mx.array]) -> Callable[..., list[mx.array]]:
        first = with_respect_to(floats, function, 1)
        if not second:
            return first
        # Of x alone it is linear, and MLX gives zeros without a batch.
        places = [0, *(i + 1 for i in floats)] if len(floats) > 1 else [0]
        return with_respect_to(places, first, len(floats))

    for call in calls:
        like = [*([call[i] for i in floats] if second else []), product.call(*call)]
        call[:0] = [make.normal(array.shape, 5 + i) for i, array in enumerate(like)]
    function, expected = gradients(product.call), gradients(product.expected)
    axes: list[int | None] = [None] * len(calls[0])
    if batch:  # MLX adds floats without one to those with one by the sizes of the trace
        axes = data.draw(make.batches(calls[0]))
        axes = [
            axis or 0 if array.dtype == mx.float32 else axis
            for axis, array in zip(axes, calls[0], strict=True)
        ]
        function = mx.vmap(function, tuple(axes))
    shapeless = for_all_shapes(function)
    for arrays in calls:
        if batch:
            arrays = make.batched(product, arrays, axes, data.draw(make.SMALL))
        for k, one in enumerate(function(*arrays)):
            right = lambda *given: expected(*given)[k]  # noqa: E731, B023
            right = make.stacked(right, axes) if batch else right
            close(one, right(*arrays))
            close(shapeless(*arrays)[k], right(*arrays))


@SOME
@given(DATA)
def test_gradient_of_vmap(data: st.DataObject) -> None:
    product, calls = drawn(data)
    axes = data.draw(make.batches(calls[0]))
    function = pulled(mx.vmap(product.call, tuple(axes)))
    shapeless = Traced(function)
    for arrays in calls:
        arrays = make.batched(product, arrays, axes, data.draw(make.SMALL))
        shape = make.stacked(product.expected, axes)(*arrays).shape
        arrays = [make.normal(shape, 5), *arrays]
        expected = pulled(make.stacked(product.expected, axes))(*arrays)
        close(function(*arrays), expected)
        close(shapeless(*arrays), expected)


@SOME
@given(DATA)
def test_vmap_of_vmap(data: st.DataObject) -> None:
    product, calls = drawn(data)
    inner = data.draw(make.batches(calls[0]))
    outer = data.draw(make.batches(make.batched(product, calls[0], inner, 2)))
    function = mx.vmap(mx.vmap(product.call, tuple(inner)), tuple(outer))
    shapeless = Traced(function)
    for arrays in calls:
        arrays = make.batched(product, arrays, inner, data.draw(make.SMALL))
        arrays = make.batched(product, arrays, outer, data.draw(make.SMALL))
        expected = make.stacked(make.stacked(product.expected, inner), outer)(*arrays)
        close(function(*arrays), expected)
        close(shapeless(*arrays), expected)


def pushed(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """The tangent that one of x makes, which is given first."""

    def tangent(one: mx.array, x: mx.array, *rest: mx.array) -> mx.array:
        return mx.jvp(lambda x: function(x, *rest), [x], [one])[1][0]  # type: ignore[no-any-return]

    return tangent


@SOME
@given(DATA)
def test_tangents(data: st.DataObject) -> None:
    product, calls = drawn(data)
    shapeless = Traced(pushed(product.call))
    for arrays in calls:
        arrays = [make.normal(arrays[0].shape, 5), *arrays]
        expected = product.expected(arrays[0], *arrays[2:])  # it is linear in x
        close(pushed(product.call)(*arrays), expected)
        close(shapeless(*arrays), expected)
        # Twice: the gradient of a gradient with respect to its cotangent is the product again.
        again = mx.grad(lambda c, *rest: pulled(product.call)(c, *rest).square().sum())
        assert again(product.call(*arrays[1:]), *arrays[1:]).shape == expected.shape


@FEW
@given(DATA)
def test_second_derivatives(data: st.DataObject) -> None:
    product, calls = drawn(data)

    def slope(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
        return mx.grad(lambda *arrays: mx.sin(function(*arrays) / 8).sum())  # type: ignore[no-any-return]

    def along(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
        """What the slope's slope is along cos(x): MLX's own gathers have reverse mode alone."""
        first = slope(function)
        return lambda x, *rest: mx.grad(  # type: ignore[no-any-return]
            lambda y: (first(y, *rest) * mx.cos(x)).sum()
        )(x)

    def forward(x: mx.array, *rest: mx.array) -> mx.array:
        first = slope(product.call)
        return mx.jvp(lambda x: first(x, *rest), [x], [mx.cos(x)])[1][0]  # type: ignore[no-any-return]

    for function in (along(product.call), forward):
        compiled, shapeless = mx.compile(function), Traced(function)
        for arrays in calls:
            expected = along(product.expected)(*arrays)
            close(function(*arrays), expected)
            close(compiled(*arrays), expected)
            close(shapeless(*arrays), expected)


def exported(
    path: Path, function: Callable[..., Any], arrays: Sequence[mx.array], shapeless: bool
) -> Callable[..., mx.array]:
    """A function as MLX reads it from a file."""
    mx.export_function(str(path), function, *arrays, shapeless=shapeless)
    read = mx.import_function(str(path))
    return lambda *arrays: read(*arrays)[0]


@needs_mlx(0, 32, 3)
@SOME
@given(DATA)
def test_export(data: st.DataObject) -> None:
    """MLX alone runs what is exported: products, their derivatives, and batches of them."""
    product, calls = drawn(data)
    what = data.draw(st.sampled_from(["product", "gradient", "tangent", "batch"]))
    function: Callable[..., mx.array] = product.call
    if what == "gradient":
        function = pulled(product.call)
        calls = [[make.normal(product.call(*call).shape, 5), *call] for call in calls]
    if what == "tangent":
        function = pushed(product.call)
        calls = [[make.normal(call[0].shape, 5), *call] for call in calls]
    if what == "batch":
        axes = data.draw(make.batches(calls[0]))
        function = mx.vmap(product.call, tuple(axes))
        calls = [make.batched(product, call, axes, data.draw(make.SMALL)) for call in calls]
    with tempfile.TemporaryDirectory() as folder:
        try:
            read = exported(Path(folder, "one.mlxfn"), function, calls[0], shapeless=False)
        except ValueError as error:
            assert on_cuda.mlx_has_cuda() and "Contiguous" in str(error)
            return
        close(read(*calls[0]), function(*calls[0]))
        read = exported(Path(folder, "all.mlxfn"), function, calls[0], shapeless=True)
        for arrays in calls:
            close(read(*arrays), function(*arrays))


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("which", ["x", "w", "scales"])
@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
def test_batches_with_gaps(mode: str, which: str, axis: int) -> None:
    """MLX's CUDA kernels read matrices one behind the other, whatever an array's strides are."""
    product = Product(mode, 32, 4, gathers=False)
    parts = dict(zip(["w", "scales", "biases"], product.matrices((), 64, 64, 2), strict=False))
    arrays = {"x": make.normal((3, 64), 1), **parts}
    given, axes = list(arrays.values()), [axis if name == which else None for name in arrays]
    given = make.batched(product, given, axes, 4)
    expected = make.stacked(product.expected, axes)(*given)
    close(mx.vmap(product.call, tuple(axes))(*given), expected)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("which", [0, 1])
def test_batches_of_floats_with_gaps(which: int, axis: int) -> None:
    given = [make.normal((3, 64), 1), make.normal((64, 32), 2), mx.array(0, mx.uint32)]
    axes = [axis if k == which else None for k in range(3)]
    product = Product("float", 1, 32, omitted="lhs")
    given = make.batched(product, given, axes, 4)
    close(mx.vmap(product.call, tuple(axes))(*given), make.stacked(product.expected, axes)(*given))


@pytest.mark.parametrize("axes", [0, 1, (0, 1), (0, 1, 2, 3)])
def test_gradients_of_sums(axes: int | tuple[int, ...]) -> None:
    """Their cotangents are broadcast: matrices that are one in memory."""
    product = Product("float", 1, 32)
    given = [make.normal((3, 3, 64), 1), make.normal((4, 64, 32), 2)]
    given += [mx.array([[0, 1], [2, 0]]), mx.array([[3, 1], [2, 2]])]

    def summed(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def weighted(*arrays: mx.array) -> mx.array:
            sums = function(*arrays).sum(axes)
            return (sums * make.normal(sums.shape, 3)).sum()

        return weighted

    for found, one in zip(
        mx.grad(summed(product.call), (0, 1))(*given),
        mx.grad(summed(product.expected), (0, 1))(*given),
        strict=True,
    ):
        close(found, one)


def test_rows_that_are_broadcast() -> None:
    product = Product("float", 1, 32, omitted="lhs")
    x = mx.broadcast_to(make.normal((1, 3, 64), 1), (4, 3, 64))
    given = [x, make.normal((4, 64, 32), 2), mx.array([3, 1, 0, 2])]
    close(product.call(*given), product.expected(*given))
    given = [x[0], mx.swapaxes(make.normal((32, 64), 2), 0, 1), mx.array(0)]
    close(product.call(*given), product.expected(*given))


@needs_mlx(0, 32, 3)
def test_export_to_mlx_alone(tmp_path: Path) -> None:
    """A process that never imports ferrule runs it, with other sizes."""
    product = Product("affine", omitted="lhs")
    arrays = [make.normal((3, 1, 64), 1), *product.matrices((4,), 64, 32, 2), mx.array([1, 3, 0])]
    other = [make.normal((2, 5, 64), 3), *arrays[1:-1], mx.array([2, 2])]
    loss = mx.grad(squares(product.call))
    mx.export_function(str(tmp_path / "f.mlxfn"), loss, *arrays, shapeless=True)
    mx.savez(str(tmp_path / "given.npz"), **{str(i): one for i, one in enumerate(other)})
    script = (
        "import sys, mlx.core as mx; given = mx.load('given.npz');"
        "out, = mx.import_function('f.mlxfn')(*[given[k] for k in sorted(given)]);"
        "mx.savez('out.npz', out=out); assert 'ferrule' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=120)
    close(mx.load(str(tmp_path / "out.npz"))["out"], mx.grad(squares(product.expected))(*other))


@SOME
@given(DATA)
def test_sorted_indices(data: st.DataObject) -> None:
    """The given index ascends. MLX's own gradients are wrong where that is the left one."""
    floats = data.draw(st.booleans())
    product, _ = drawn(data, floats)
    product = dataclasses.replace(
        product, gathers=True, omitted=data.draw(st.sampled_from(["lhs", "rhs"]))
    )

    def ascending(*arrays: mx.array) -> mx.array:
        return product.call(*arrays, sorted_indices=True)

    names = (0, 1) if floats else (0,)
    gradient = mx.grad(squares(ascending), argnums=names)
    shapeless, traced = Traced(ascending), for_all_shapes(gradient)
    for seed in (0, 10):
        batch, other, rows = data.draw(make.SMALL), data.draw(make.SMALL), data.draw(make.SMALL)
        unit = 3 if floats else max(product.group, 32)
        x = make.normal((batch if product.omitted == "lhs" else other, rows, unit), seed)
        w = product.matrices((other if product.omitted == "lhs" else batch,), unit, unit, seed + 1)
        index = sorted(data.draw(st.integers(0, other - 1)) for _ in range(batch))
        arrays = [x, *w, mx.array(index)]
        close(ascending(*arrays), product.expected(*arrays))
        close(shapeless(*arrays), product.expected(*arrays))
        expected = mx.grad(squares(product.expected), argnums=names)(*arrays)
        for function in (gradient, traced):
            for found, one in zip(function(*arrays), expected, strict=True):
                close(found, one)


@pytest.mark.parametrize("kind", [MODES[2], *MODES[-3:]], ids=str)
@pytest.mark.parametrize(
    ("x_shape", "w_batch"),
    [((64,), ()), ((64,), (3,)), ((2, 64), (3,)), ((2, 64), (4, 3)), ((3, 2, 64), (4, 1)),
     ((4, 3, 2, 64), (3,)), ((4, 3, 2, 64), ())],
)  # fmt: skip
def test_ranks(kind: tuple[str, int, int], x_shape: make.Shape, w_batch: make.Shape) -> None:
    """As `mx.matmul` broadcasts; MLX takes the first matrix where w has more dims."""
    product = Product(*kind, gathers=False)
    x, w = make.normal(x_shape, 0), product.matrices(w_batch, 64, 32, 1)
    close(product.call(x, *w), product.expected(x, *w))
    close(for_all_shapes(product.call)(x, *w), product.expected(x, *w))
    cotangent = product.call(x, *w)
    close(pulled(product.call)(cotangent, x, *w), pulled(product.expected)(cotangent, x, *w))
    if len(x_shape) > 1:
        both = mx.stack([x, 2 * x], axis=1)
        close(mx.vmap(product.call, (1, *[None] * len(w)))(both, *w)[1], 2 * cotangent)
    else:
        made = mx.vmap(product.call, (None, *[0] * len(w)))(x, *[mx.stack([one, one]) for one in w])
        close(made, mx.stack([cotangent, cotangent]))


@needs_mlx(0, 32, 3)
@pytest.mark.parametrize("x_shape", [(64,), (2, 64), (3, 2, 64), (4, 3, 2, 64)], ids=str)
@pytest.mark.parametrize("w_batch", [(), (3,)], ids=str)
def test_rows_of_one_group(
    x_shape: make.Shape, w_batch: make.Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In files they gather where MLX's kernel gives garbage, as on an H200: here everywhere."""
    monkeypatch.setattr(mlx_products, "one_group", lambda x, *_: x.shape[-1] <= 64)
    product = Product("affine", 64, 4, gathers=False)
    call = functools.partial(product.call, of=mlx_products)
    shapeless = Traced(call)
    for more in (0, 1):
        x, w = make.normal(x_shape, more), product.matrices(w_batch, 64, 32, 2)
        if len(x_shape) == 3 and not w_batch:
            x = make.normal((3 + more, 2 + more, 64), more)
        expected = product.expected(x, *w)
        close(call(x, *w), expected)
        close(shapeless(x, *w), expected)
        close(pulled(call)(expected, x, *w), pulled(product.expected)(expected, x, *w))
        several = mx.vmap(call, (0, *[None] * len(w)))(mx.stack([x, 2 * x]), *w)
        close(several[1], 2 * expected)


def test_neither_index() -> None:
    product = Product("affine", gathers=False)
    x, w = make.normal((3, 2, 64), 0), product.matrices((3,), 64, 32, 1)
    close(fm.gather_qmm(x, *w, group_size=32), product.expected(x, *w))
    a, b = make.normal((3, 2, 4), 0), make.normal((3, 4, 5), 1)
    assert mx.array_equal(fm.gather_mm(a, b), a @ b)


@pytest.mark.parametrize(
    ("a", "b"), [((4,), (3, 4, 2)), ((3, 2, 4), (4,)), ((4,), (4,)), ((2, 4), (3, 4, 2))], ids=str
)
def test_vectors(a: make.Shape, b: make.Shape) -> None:
    arrays = make.normal(a, 0), make.normal(b, 1), mx.array([0, 0])
    expected = mx.gather_mm(arrays[0], arrays[1], lhs_indices=arrays[2], rhs_indices=arrays[2])
    for function in (fm.gather_mm, for_all_shapes(fm.gather_mm)):
        close(function(arrays[0], arrays[1], arrays[2], arrays[2]), expected)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("mode", ["affine", "mxfp4", "mxfp8", "nvfp4"])
def test_dtypes(mode: str, dtype: mx.Dtype) -> None:
    """Results have MLX's dtypes, gradients that of x, and sums are those of float32, rounded."""
    w = mx.quantize(make.normal((3, 64, 64), 0), mode=mode)
    x, rhs = make.normal((3, 2, 64), 1).astype(dtype), mx.array([2, 0, 1])
    found = fm.gather_qmm(x, *w, rhs_indices=rhs, mode=mode)
    assert found.dtype == mx.gather_qmm(x, *w, rhs_indices=rhs, mode=mode).dtype
    # What scales and biases are rounded to is x's dtype, or float32, to which both promote.
    dense = in_float64(mx.dequantize(*w, mode=mode, dtype=found.dtype))[[2, 0, 1]]
    check_of_float64(found, in_float64(x), dense.swapaxes(-1, -2))
    cotangent = make.normal(found.shape, 2).astype(found.dtype)

    def call(x: mx.array) -> mx.array:
        return fm.gather_qmm(x, *w, rhs_indices=rhs, mode=mode)

    for wrap in (lambda f: f, for_all_shapes):
        (gradient,) = mx.vjp(wrap(call), [x], [cotangent])[1]
        assert gradient.dtype == dtype
        check_of_float64(gradient, in_float64(cotangent), dense)


def in_float64(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32), np.float64)


def check_of_float64(found: mx.array, x: np.ndarray, w: np.ndarray) -> None:
    """``x @ w``, added up in float32 and rounded to found's dtype."""
    half = {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}[found.dtype]
    bound = half * np.abs(x @ w) + x.shape[-1] * 2.0**-23 * (np.abs(x) @ np.abs(w))
    assert (np.abs(in_float64(found) - x @ w) <= bound).all()


@needs_mlx(0, 31)
def test_global_scale() -> None:
    """What MLX has on GPUs alone."""
    dense, maxima = make.normal((3, 32, 64), 0), mx.array([1.5, 4.0, 2.5])
    packed = [mx.quantize(dense[i], mode="nvfp4", global_scale=maxima[i]) for i in range(3)]
    w, scales = (mx.stack([one[k] for one in packed]) for k in (0, 1))
    values = mx.stack([
        mx.dequantize(*packed[i], mode="nvfp4", global_scale=maxima[i], dtype=mx.float32)
        for i in range(3)
    ])  # fmt: skip
    x, rhs = make.normal((4, 2, 64), 1), mx.array([2, 0, 1, 2])

    def call(x: mx.array, rhs: mx.array | None, lhs: mx.array | None = None) -> mx.array:
        return fm.gather_qmm(x, w, scales, None, lhs, rhs, mode="nvfp4", global_scale=maxima)

    expected = x @ mx.swapaxes(values[rhs], -1, -2)
    close(call(x, rhs), expected)
    shapeless = Traced(call)
    for count in (4, 1, 3):
        close(shapeless(x[:count], rhs[:count]), expected[:count])
    close(mx.vmap(call)(mx.stack([x, x]), mx.stack([rhs, rhs]))[1], expected)
    close(call(x[:3], None), x[:3] @ mx.swapaxes(values, -1, -2))
    close(call(x, None, rhs[:3]), x[rhs[:3]] @ mx.swapaxes(values, -1, -2))

    def sines(maxima: mx.array) -> mx.array:
        y = fm.gather_qmm(x, w, scales, None, None, rhs, mode="nvfp4", global_scale=maxima)
        return mx.sin(y).sum()

    def by_hand(maxima: mx.array) -> mx.array:
        y = fm.gather_qmm(x, w, scales, None, None, rhs, mode="nvfp4")
        return mx.sin(y * (maxima[rhs] if maxima.ndim else maxima)[..., None, None] / 2688).sum()

    for scale in (maxima, maxima[1]):
        expected = mx.grad(by_hand)(scale)
        close(mx.grad(sines)(scale), expected)
        close(for_all_shapes(mx.grad(sines))(scale), expected)
        close(mx.jvp(sines, [scale], [expected])[1][0], (expected * expected).sum())
    with pytest.raises(ValueError, match=r"mode 'mxfp4' does not have"):
        fm.gather_qmm(x, w, scales[..., ::2], mode="mxfp4", rhs_indices=rhs, global_scale=maxima)
    with pytest.raises(ValueError, match=r"G_size == 1 or G_size == W_size.*\(2,\)"):
        fm.gather_qmm(x, w, scales, mode="nvfp4", rhs_indices=rhs, global_scale=maxima[:2])


def test_scales_and_biases() -> None:
    """MLX's gradients, in a shapeless trace, too, where MLX keeps sizes."""
    # MLX's CUDA kernel for rows of one group has given garbage.
    w, scales, biases = mx.quantize(make.normal((3, 32, 128), 0))

    def loss(of: Any) -> Callable[..., Any]:
        def function(x: mx.array, scales: mx.array, biases: mx.array, rhs: mx.array) -> mx.array:
            return of.gather_qmm(x, w, scales, biases, rhs_indices=rhs).square().sum()  # type: ignore[no-any-return]

        return mx.grad(function, argnums=(0, 1, 2))

    compiled, shapeless = mx.compile(loss(fm)), for_all_shapes(loss(fm))
    for count in (4, 1, 3):
        x, rhs = make.normal((count, 2, 128), count), mx.array([2, 0, 1, 2])[:count]
        stock = loss(mx)(x, scales, biases, rhs)
        for function in (loss(fm), compiled, shapeless):
            for a, b in zip(function(x, scales, biases, rhs), stock, strict=True):
                close(a, b)

    def plain(of: Any) -> Callable[..., Any]:
        return lambda x, *parts: of.quantized_matmul(x, w[0], *parts)  # type: ignore[no-any-return]

    def second(of: Any) -> Callable[..., Any]:
        """The slope of a gradient, with respect to all."""
        everything = (0, 1, 2)
        first = mx.grad(lambda *given: mx.sin(plain(of)(*given) / 8).sum(), everything)
        return mx.grad(lambda *given: sum(mx.cos(one).sum() for one in first(*given)), everything)  # type: ignore[no-any-return]

    given = x, scales[0], biases[0]
    for a, b in zip(second(fm)(*given), second(mx)(*given), strict=True):
        close(a, b)
    tangents = [mx.cos(one) for one in given]
    along = sum(
        (plain(mx)(*given[:k], tangents[k], *given[k + 1 :]) for k in range(1)), mx.array(0.0)
    ) + plain(mx)(x, *tangents[1:])
    close(mx.jvp(plain(fm), given, tangents)[1][0], along)
    several = [mx.stack([one, 2 * one]) for one in given]
    each = mx.vmap(mx.grad(lambda *given: plain(fm)(*given).square().sum(), (0, 1, 2)))(*several)
    for k in range(2):
        alone = mx.grad(lambda *given: plain(mx)(*given).square().sum(), (0, 1, 2))(
            *[one[k] for one in several]
        )
        for a, b in zip(each, alone, strict=True):
            close(a[k], b)


def test_empty_arrays() -> None:
    """Of no rows, where MLX ends the process, and of no products."""
    w = mx.quantize(make.normal((3, 32, 64), 0))

    def call(x: mx.array, rhs: mx.array) -> mx.array:
        return fm.gather_qmm(x, *w, rhs_indices=rhs)

    gradient = mx.grad(squares(call))
    forward, backward = Traced(call), Traced(gradient)
    for count, rows in ((2, 1), (0, 1), (2, 0), (3, 2)):
        x, rhs = make.normal((count, rows, 64), 1), mx.zeros(count, mx.uint32)
        for function in (call, forward):
            assert function(x, rhs).shape == (count, rows, 32)
        # What MLX fuses for CUDA, here to square and to add, ends the process where it is empty.
        fused = not x.size and on_cuda.mlx_has_cuda()
        for function in (gradient,) if fused else (gradient, backward):
            close(function(x, rhs), gradient(x, rhs))
    assert mx.vmap(call)(mx.zeros((0, 2, 1, 64)), mx.zeros((0, 2), mx.uint32)).shape == (
        0,
        2,
        1,
        32,
    )
    # A first call without elements spoils no gradient, as it would MLX's own addition.
    plain = mx.grad(lambda x, rhs, c: (call(x, rhs) * c).sum())
    first = Traced(plain)
    for count in (0, 2):
        x, c = (make.normal((count, 1, size), size) for size in (64, 32))
        rhs = mx.zeros(count, mx.uint32)
        close(first(x, rhs, c), plain(x, rhs, c))


def test_errors() -> None:
    w, scales, biases = mx.quantize(make.normal((3, 32, 64), 0))
    x, rhs = make.normal((4, 2, 64), 1), mx.array([2, 0, 1, 2])
    with pytest.raises(
        ValueError, match=r"shape \(3, 32, 8\).* but K \* 8 // 32 is 16 by input 'x'"
    ):
        fm.gather_qmm(x, w, scales, biases, rhs_indices=rhs, bits=8)
    with pytest.raises(ValueError, match=r"mode 'affine' has 2, 3, 4, 5, 6, 8"):
        fm.gather_qmm(x, w, scales, biases, rhs_indices=rhs, bits=7)
    with pytest.raises(ValueError, match=r"rhs_indices is of .*float32; expected .* int32, uint32"):
        fm.gather_qmm(x, w, scales, biases, rhs_indices=x)
    with pytest.raises(ValueError, match=r"\*I is \(3,\) .*\*R is \(4,\) .*do not broadcast"):
        fm.gather_qmm(x, w, scales, biases, rhs[:3], rhs)


def test_integers_have_zeros_for_gradients() -> None:
    """As for all of ferrule's ops: packed elements, indices, and those that follow from floats."""
    w, scales, biases = mx.quantize(make.normal((3, 32, 64), 0))
    x, rhs = make.normal((4, 2, 64), 1), mx.array([2, 0, 1, 2])

    def routed(x: mx.array) -> mx.array:
        best = mx.argmax(x[:, 0, :3], axis=-1)
        return fm.gather_qmm(x, w, scales, biases, rhs_indices=best).square().sum()

    def fixed(x: mx.array) -> mx.array:
        best = mx.stop_gradient(mx.argmax(x[:, 0, :3], axis=-1))
        return fm.gather_qmm(x, w, scales, biases, rhs_indices=best).square().sum()

    assert mx.array_equal(mx.grad(routed)(x), mx.grad(fixed)(x))
    of_w = mx.grad(lambda w: fm.gather_qmm(x, w, scales, biases, rhs_indices=rhs).sum())(w)
    of_index = mx.grad(lambda i: fm.gather_mm(x, x.swapaxes(1, 2), i, rhs).sum())(rhs)
    for found, like in ((of_w, w), (of_index, rhs)):
        assert found.shape == like.shape and not found.any()


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX's own functions, outside of transformations; inside, where they are wrong, an error."""
    monkeypatch.setattr(mlx_build, "library", lambda: None)
    w = mx.quantize(make.normal((3, 32, 128), 0))  # of several groups: see above
    x, rhs = make.normal((4, 2, 128), 1), mx.array([2, 0, 1, 2])

    def call(x: mx.array, rhs: mx.array) -> mx.array:
        return fm.gather_qmm(x, *w, rhs_indices=rhs)

    assert mx.array_equal(call(x, rhs), mx.gather_qmm(x, *w, rhs_indices=rhs))
    assert mx.array_equal(
        fm.quantized_matmul(x, *[one[0] for one in w]),
        mx.quantized_matmul(x, *[one[0] for one in w]),
    )
    assert mx.grad(lambda x: call(x, rhs).sum())(x).shape == x.shape
    with pytest.raises(KernelError, match=r"an array of a product stands.* inside mx\.compile"):
        mx.compile(call, shapeless=True)(x, rhs)


def test_an_old_mlx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mlx_sizes, "COUNTS", False)
    a, b, index = make.normal((3, 2, 4), 0), make.normal((3, 4, 5), 1), mx.array([1, 0, 2])

    def omitted(a: mx.array, b: mx.array, index: mx.array) -> mx.array:
        return fm.gather_mm(a, b, index)

    def exported(function: Callable[..., mx.array], *arrays: mx.array) -> None:
        mx.export_function(str(tmp_path / "f.mlxfn"), function, *arrays, shapeless=True)

    # Ferrule's own ops need no sizes of MLX; its records in files do.
    close(mx.compile(omitted, shapeless=True)(a, b, index), a[index] @ b)
    if not mlx_build.at_least(0, 32):
        return  # whose files hold no such products
    with pytest.raises(KernelError, match=TOO_OLD):
        exported(omitted, a, b, index)
    monkeypatch.setattr(mlx_products, "GATHERS", False)
    close(for_all_shapes(fm.gather_mm)(a, b, index, index), (a @ b)[index])
    with pytest.raises(KernelError, match="products that gather inside functions.*" + TOO_OLD):
        exported(lambda *x: fm.gather_mm(*x), a, b, index, index)


def test_streams_and_threads() -> None:
    product = Product("affine", omitted="lhs")
    arrays = [make.normal((3, 1, 64), 1), *product.matrices((4,), 64, 32, 2), mx.array([1, 3, 0])]
    expected = product.expected(*arrays)
    mx.eval(expected, *arrays)
    stream = mx.new_stream(mx.cpu)
    close(product.call(*arrays, stream=stream), expected)
    close(product.call(*arrays, stream=mx.cpu), expected)
    shapeless = for_all_shapes(lambda *arrays: product.call(*arrays, stream=mx.cpu))
    close(shapeless(*arrays), expected)

    def work(_: int) -> list[float]:
        gradient = mx.vmap(pulled(product.call), (0, None, *[None] * 4))
        made = for_all_shapes(gradient)(mx.stack([expected] * 2), *arrays)
        return made.sum().tolist()  # type: ignore[no-any-return]

    # Once alone: MLX's CUDA backend (0.32.4) marks a fused kernel as ready before it knows its
    # block's size, and another thread divides by 0.
    first = work(0)
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(work, range(8))) == {first}


def test_nothing_is_kept() -> None:
    """Nodes go when their arrays do."""
    product = Product("affine", omitted="lhs")
    arrays = [
        make.normal((64, 8, 64), 1),
        *product.matrices((4,), 64, 64, 2),
        mx.zeros(64, mx.int32),
    ]
    gradient = mx.grad(squares(product.call))
    mx.eval(gradient(*arrays))
    mx.synchronize()
    before = mx.get_active_memory()
    for _ in range(20):
        mx.eval(gradient(*arrays))
    mx.synchronize()
    assert mx.get_active_memory() <= before


def test_import_is_lazy() -> None:
    script = (
        "import sys, ferrule; assert 'mlx' not in sys.modules;"
        "assert callable(ferrule.mlx.gather_qmm); assert 'mlx.core' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
