"""Batches and derivatives of ops in functions that MLX compiles, or exports, with shapeless=True:
one trace, and the same as uncompiled for every size of batch and of all else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule import KernelError, dtypes
from ferrule.hosts.mlx import batches as mlx_batches
from ferrule.operators import text as op_text
from ferrule.tools import nvrtc
from mlx_files import FEW, I, again, elsewhere, exported
from mlx_versions import needs_mlx, older_than

FILES = st.just(False) if older_than(0, 32) else st.booleans()

# Two outputs; a batch becomes a part of *S.
STAR = ferrule.op(
    "star", "x[*S,D]:T, w[*S]:T -> y[*S,D]:T, z[*S]:T", grid="x.size", threadgroup=32,
    metal=I + "y[i] = x[i] * w[i / D]; if (i % D == 0) z[i / D] = x[i] * w[i / D];",
)  # fmt: skip
STAR.def_vjp(
    ferrule.op(
        "star_vjp", "x[*S,D]:T, w[*S]:T, y_cotangent[*S,D]:T, z_cotangent[*S]:T"
        " -> x_grad[*S,D]:T, w_grad[*S]:T", grid="w.size", threadgroup=32,
        metal=I + """
            T sum = x[i * D] * z_cotangent[i];
            for (int j = 0; j < D; j++) {
                uint k = i * D + j;
                x_grad[k] = w[i] * (y_cotangent[k] + (j ? T(0) : z_cotangent[i]));
                sum += x[k] * y_cotangent[k];
            }
            w_grad[i] = sum;
        """,
    )
)  # fmt: skip
STAR.def_jvp(
    ferrule.op(
        "star_jvp", "x[*S,D]:T, w[*S]:T, x_tangent[*S,D]:T, w_tangent[*S]:T"
        " -> y_tangent[*S,D]:T, z_tangent[*S]:T", grid="x.size", threadgroup=32,
        metal=I + """
            y_tangent[i] = x[i] * w_tangent[i / D] + x_tangent[i] * w[i / D];
            if (i % D == 0) z_tangent[i / D] = y_tangent[i];
        """,
    )
)  # fmt: skip
# A batch makes N longer; `w` has no gradient.
FOLD = ferrule.op(
    "fold", "x[M,N,D]:T, w[D]:T -> y[N,M,D]:T", batch="N", grid="x.size", threadgroup=32,
    metal=I + "uint d = i % D, n = i / D % N, m = i / D / N; y[(n * M + m) * D + d] = x[i] * w[d];",
)  # fmt: skip
FOLD.def_vjp(
    ferrule.op(
        "fold_vjp", "x[M,N,D]:T, w[D]:T, cotangent[N,M,D]:T -> x_grad[M,N,D]:T", batch="N",
        metal=I + "uint d = i % D, n = i / D % N, m = i / D / N;"
        "x_grad[i] = cotangent[(n * M + m) * D + d] * w[d];", grid="x.size", threadgroup=32,
    )
)  # fmt: skip
# A batch is another op, to which all inputs go with it.
RULE = ferrule.op(
    "rule", "x[N,D]:T, w[D]:T -> y[N,D]:T", grid="x.size", threadgroup=32,
    metal=I + "y[i] = x[i] + w[i % D] * w[0];",
)  # fmt: skip
RULE.def_vmap(
    ferrule.op(
        "rules", "x[B,N,D]:T, w[B,D]:T -> y[B,N,D]:T", grid="x.size", threadgroup=32,
        metal=I + "uint b = i / D / N; y[i] = x[i] + w[b * D + i % D] * w[b * D];",
    )
)  # fmt: skip


def plain_star(x: mx.array, w: mx.array) -> tuple[mx.array, mx.array]:
    return x * w[..., None], x[..., 0] * w


def plain_fold(x: mx.array, w: mx.array) -> mx.array:
    return mx.swapaxes(x * w, 0, 1)


def plain_rule(x: mx.array, w: mx.array) -> mx.array:
    return x + w * w[:1]


OPS: dict[str, tuple[ferrule.Op, Callable[..., Any], tuple[str, ...], tuple[str, ...]]] = {
    "star": (STAR, plain_star, ("nd", "n"), ("nd", "n")),
    "fold": (FOLD, plain_fold, ("mnd", "d"), ("nmd",)),
    "rule": (RULE, plain_rule, ("nd", "d"), ("nd",)),
}
AXES = {"star": [0, 1, None], "fold": [None], "rule": [0, 1, None]}  # of w
SIZES = st.fixed_dictionaries({letter: st.integers(1, 6) for letter in "abnmd"})


def values(dims: str, sizes: dict[str, int], seed: int) -> mx.array:
    found = np.random.default_rng(seed).normal(size=[sizes[one] for one in dims])
    return mx.array(found.astype(np.float32))


def listed(found: Any) -> list[mx.array]:
    return list(found) if isinstance(found, (tuple, list)) else [found]


def same(found: Any, wanted: Any) -> None:
    for a, b in zip(listed(found), listed(wanted), strict=True):
        assert a.shape == b.shape
        assert mx.allclose(a, b, rtol=1e-4, atol=1e-5)


def batched(f: Callable[..., Any], axes: tuple[int | None, ...]) -> Callable[..., Any]:
    return mx.vmap(f, in_axes=axes)  # type: ignore[no-any-return]


def with_batch(dims: str, axis: int | None, letter: str) -> str:
    return dims if axis is None else dims[:axis] + letter + dims[axis:]


@st.composite
def calls(draw: Any) -> Any:
    name = draw(st.sampled_from(sorted(OPS)))
    x = draw(st.sampled_from([0, 1, 2, None]))
    w = draw(st.sampled_from(AXES[name]))
    if (name == "fold" and x is None) or x == w is None:
        x = 0
    return name, (x, w), draw(st.lists(SIZES, min_size=2, max_size=4))


@settings(FEW, max_examples=40)
@given(calls(), st.booleans(), FILES)
def test_batches(call: Any, twice: bool, file: bool) -> None:
    name, axes, many = call
    op, plain, dims, _ = OPS[name]
    shapes = [with_batch(one, axis, "b") for one, axis in zip(dims, axes, strict=True)]
    f, g = batched(op, axes), batched(plain, axes)
    if twice and name != "rule":  # in another batch
        f, g = batched(f, (0, None)), batched(g, (0, None))
        shapes[0] = "a" + shapes[0]

    def arrays(sizes: dict[str, int]) -> list[mx.array]:
        return [values(one, sizes, i) for i, one in enumerate(shapes)]

    if file:
        compiled = again(lambda *a: f(*a), *arrays(many[0]), shapeless=True)
    else:
        compiled = mx.compile(f, shapeless=True)
    results = [(arrays(sizes), compiled(*arrays(sizes))) for sizes in many]
    for inputs, found in results:
        same(found, g(*inputs))


@settings(FEW, max_examples=40)
@given(calls(), st.booleans(), FILES)
def test_gradients(call: Any, inside: bool, file: bool) -> None:
    """Of a batch, and a batch of gradients; the cotangents are arguments."""
    name, axes, many = call
    if name == "rule":
        return  # has none
    op, plain, dims, results = OPS[name]
    wanted = 2 if name == "star" else 1
    shapes = [with_batch(one, axis, "b") for one, axis in zip(dims, axes, strict=True)]
    shapes += ["b" + one for one in results]

    def gradients(f: Any) -> Callable[..., Any]:
        def of(*given: mx.array) -> Any:
            return mx.vjp(f, list(given[:2]), list(given[2:]))[1][:wanted]

        return of

    def made(f: Any) -> Callable[..., Any]:
        if inside:
            return batched(gradients(f), (*axes, *[0] * len(results)))
        return gradients(batched(f, axes))

    def arrays(sizes: dict[str, int]) -> list[mx.array]:
        return [values(one, sizes, i) for i, one in enumerate(shapes)]

    if file:
        compiled = again(lambda *a: made(op)(*a), *arrays(many[0]), shapeless=True)
    else:
        compiled = mx.compile(made(op), shapeless=True)
    for sizes in many:
        same(compiled(*arrays(sizes)), made(plain)(*arrays(sizes)))


@settings(FEW, max_examples=15)
@given(st.lists(SIZES, min_size=2, max_size=4), st.sampled_from([(0, None), (None, 0), (0, 1)]))
def test_forward_derivatives(many: list[dict[str, int]], axes: Any) -> None:
    """Of `x` alone, so that `w` gets zeros."""

    def made(f: Any) -> Callable[..., Any]:
        def of(x: mx.array, w: mx.array) -> Any:
            return mx.jvp(lambda x: f(x, w), [x], [mx.sin(x)])[1]

        return batched(of, axes)

    compiled = mx.compile(made(STAR), shapeless=True)
    shapes = [with_batch(one, axis, "b") for one, axis in zip(("nd", "n"), axes, strict=True)]
    for sizes in many:
        given = [values(one, sizes, i) for i, one in enumerate(shapes)]
        same(compiled(*given), made(plain_star)(*given))


def test_gradients_of_sums_and_of_gradients() -> None:
    def energy(f: Any) -> Any:
        return lambda x, w: sum((y * y).sum() for y in f(x, w))

    def made(f: Any) -> Callable[..., Any]:
        return mx.grad(energy(batched(f, (0, None))), argnums=(0, 1))  # type: ignore[no-any-return]

    compiled = mx.compile(made(STAR), shapeless=True)
    for b, n, d in ((2, 3, 4), (5, 6, 7), (3, 1, 2)):
        sizes = {"b": b, "n": n, "d": d}
        given = values("bnd", sizes, 0), values("n", sizes, 1)
        same(compiled(*given), made(plain_star)(*given))


def test_one_trace_serves_all_sizes() -> None:
    traces = []

    def f(x: mx.array, w: mx.array) -> Any:
        traces.append(x.shape)
        return mx.vmap(FOLD, in_axes=(1, None))(x, w)

    compiled = mx.compile(f, shapeless=True)
    for b in (1, 4, 2):
        sizes = {"b": b, "m": 2 * b, "n": 3, "d": 5 - b}
        x, w = values("mbnd", sizes, 0), values("d", sizes, 1)
        same(compiled(x, w), mx.vmap(plain_fold, in_axes=(1, None))(x, w))
    assert len(traces) == 1


@needs_mlx(0, 32)
def test_another_process_runs_batches_and_derives_them() -> None:
    def f(x: mx.array, w: mx.array) -> Any:
        y = mx.vmap(FOLD, in_axes=(0, None))(x, w)
        return y, mx.vmap(STAR, in_axes=(None, 0))(w, mx.sum(y, axis=(1, 2, 3)))[0]

    file = exported(f, mx.ones((2, 1, 2, 2)), mx.ones(2), shapeless=True)
    lines = elsewhere(
        "x, w = mx.full((3, 1, 2, 4), 2.0), mx.arange(4).astype(mx.float32)\n"
        "print([one.shape for one in f(x, mx.ones(4))])\n"
        "print(mx.grad(lambda x: f(x, w)[0].sum())(x)[2, 0, 1].tolist())\n"
        "print(mx.grad(lambda w: f(x, w)[1].sum())(w).tolist())\n",
        file,
    )
    assert lines == [
        "[(3, 2, 1, 4), (3, 4)]", "[0.0, 1.0, 2.0, 3.0]",
        # each of the 3 y has the sum 2 * 2 * (0 + 1 + 2 + 3)
        "[72.0, 72.0, 72.0, 72.0]",
    ]  # fmt: skip


def test_calls_one_by_one_are_refused() -> None:
    op = ferrule.op("lone", "x[N]:T -> y[N]:T", metal=I + "y[i] = x[i] * x[0];", grid="N",
                    threadgroup=8)  # fmt: skip
    with pytest.raises(ValueError, match=r"'lone' would be called once per element .*def_vmap"):
        mx.compile(mx.vmap(op), shapeless=True)(mx.ones((2, 3)))
    with pytest.raises(ValueError, match=r"'lone' would be called once per element .*def_vmap"):
        again(mx.vmap(op), mx.ones((2, 3)), shapeless=True)
    with pytest.warns(ferrule.FerruleWarning, match="called 2 times"):
        assert mx.compile(mx.vmap(op))(mx.full((2, 3), 2)).tolist() == [[4] * 3] * 2


@pytest.mark.parametrize("name", ["repeated", "summed", "merged", "parted"])
def test_what_takes_sizes_from_arrays_has_all_derivatives(name: str) -> None:
    """Each is the transpose of another: forwards and backwards twice, and in batches."""
    ops = mlx_batches.ops()
    op = getattr(ops, name)
    like = mx.ones((2, 3, 5))
    x = values("abn", {"a": 2, "b": 3, "n": 4}, 0)
    plain: Any = {
        "repeated": lambda x: mx.broadcast_to(x, (2, *x.shape)),
        "summed": lambda x: x.sum(axis=0),
        "merged": lambda x: mx.flatten(x, 0, 1),
        "parted": lambda x: mx.unflatten(x, 0, (2, 3)),
    }[name]
    if name == "parted":
        x = x.reshape(6, 4)
    second = name in ("repeated", "parted")

    def f(x: mx.array) -> mx.array:
        return op(x, like) if second else op(x)  # type: ignore[no-any-return]

    def cubed(g: Any) -> Any:
        return lambda x: (g(x * x) * g(x)).sum()

    same(f(x), plain(x))
    same(mx.grad(cubed(f))(x), mx.grad(cubed(plain))(x))
    for change in (
        lambda g: mx.grad(lambda x: (mx.grad(cubed(g))(x) ** 2).sum()),
        lambda g: lambda x: mx.jvp(mx.grad(cubed(g)), [x], [x + 1])[1],
        lambda g: lambda x: mx.vmap(g, in_axes=1)(mx.stack([x, x + 1], axis=1)),
        lambda g: lambda x: mx.vmap(mx.grad(cubed(g)))(mx.stack([x, x + 1])),
    ):
        same(change(f)(x), change(plain)(x))
    with pytest.raises(KernelError):
        ops.merged(mx.ones(3))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.int8, mx.bool_, mx.complex64])
def test_of_every_dtype(dtype: Any) -> None:
    op = ferrule.op("pair", "x[*S]:T, w[*S]:T -> y[*S]:T", metal=I + "y[i] = w[i];",
                    grid="x.size", threadgroup=8)  # fmt: skip
    f = mx.compile(mx.vmap(op, in_axes=(0, None)), shapeless=True)
    for b in (2, 5):
        w = mx.arange(b + 1).astype(dtype)
        assert mx.array_equal(f(mx.zeros((b, b + 1), dtype), w), mx.broadcast_to(w, (b, b + 1)))


def test_empty_batches_and_arrays() -> None:
    f = mx.compile(mx.vmap(STAR, in_axes=(0, None)), shapeless=True)
    g = mx.compile(mx.vmap(FOLD, in_axes=(0, None)), shapeless=True)
    for b, n, d in ((2, 3, 4), (0, 3, 4), (2, 0, 4), (0, 0, 1)):
        y, z = f(mx.ones((b, n, d)), mx.ones(n))
        assert y.shape == (b, n, d) and z.shape == (b, n)
        assert g(mx.ones((b, 2, n, d)), mx.ones(d)).shape == (b, n, 2, d)


@pytest.mark.parametrize("dtype", ["bfloat16", "complex64"])
def test_on_cuda_too(dtype: str, library: nvrtc.Nvrtc) -> None:
    for op in mlx_batches.ops():
        described = {
            one.name: ((6,) * len(one.dims or ()), dtypes.BY_NAME[dtype]) for one in op.rule.inputs
        }
        made, call = op_text.described(op, op.implementations[0], described)  # type: ignore[arg-type]
        assert made.compile("sm_90", **call).mode
