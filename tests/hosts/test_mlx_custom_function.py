"""Kernels inside `mx.custom_function`, as MLX documents it, and what MLX refuses there."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import ferrule
from ferrule.hosts.mlx import build as mlx_build

I = "uint i = thread_position_in_grid.x; "  # noqa: E741
exp = ferrule.metal_kernel("exp", ["x"], ["y"], I + "y[i] = metal::precise::exp(x[i]);")
times = ferrule.metal_kernel("times", ["a", "b"], ["y"], I + "y[i] = a[i] * b[i];")


def run(kernel: Any, *inputs: mx.array) -> mx.array:
    x = inputs[0]
    (y,) = kernel(
        inputs=list(inputs), grid=(x.size, 1, 1), threadgroup=(32, 1, 1),
        output_shapes=[x.shape], output_dtypes=[x.dtype],
    )  # fmt: skip
    return y


def made() -> Any:
    @mx.custom_function
    def f(x: mx.array) -> mx.array:
        return run(exp, x)

    @f.vjp
    def vjp(primals: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
        return run(times, output, cotangent)

    @f.jvp
    def jvp(primals: mx.array, tangents: mx.array) -> mx.array:
        return f(primals) * tangents

    @f.vmap
    def vmap(x: mx.array, axis: int) -> tuple[mx.array, int]:
        return run(exp, x), axis

    return f


@pytest.fixture(params=["mlx", "installed"])
def f(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The function, as MLX has it, and with ferrule in MLX."""
    if request.param == "mlx":
        yield made()
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ferrule.FerruleWarning)
        ferrule.install_mlx()
    try:
        yield made()
    finally:
        ferrule.uninstall_mlx()


X = mx.array([[0.0, 0.5, -1.0], [2.0, 1.5, -3.0]])


def same(a: mx.array, b: mx.array) -> None:
    assert a.shape == b.shape
    assert mx.allclose(a, b, rtol=1e-5)


def test_derivatives(f: Any) -> None:
    def total(x: mx.array) -> mx.array:
        return (f(x) * f(2 * x)).sum()

    def expected(x: mx.array) -> mx.array:
        return mx.exp(3 * x).sum()

    gradient = mx.grad(expected)(X)
    same(mx.grad(total)(X), gradient)
    same(mx.compile(mx.grad(total))(X), gradient)
    same(mx.grad(mx.compile(total))(X), gradient)
    same(mx.grad(mx.checkpoint(total))(X), gradient)
    same(mx.compile(mx.grad(mx.checkpoint(total)))(X), gradient)
    _, (forward,) = mx.jvp(total, [X], [mx.ones_like(X)])
    same(forward, gradient.sum())
    value, back = mx.value_and_grad(total)(X)
    same(value, expected(X))
    same(back, gradient)


def test_batches(f: Any) -> None:
    """MLX asks the kernel inside for its batching rule, too; the function has one."""
    same(mx.vmap(f)(X), mx.exp(X))
    same(mx.vmap(f, in_axes=1, out_axes=1)(X), mx.exp(X))
    same(mx.compile(mx.vmap(f))(X), mx.exp(X))
    same(mx.compile(mx.vmap(f), shapeless=True)(X), mx.exp(X))


def test_where_only_the_rules_are_in_the_graph_mlx_refuses_nothing(f: Any, tmp_path: Path) -> None:
    @mx.custom_function
    def g(x: mx.array) -> mx.array:
        return run(exp, x)

    g.vjp(lambda x, cotangent, y: 2 * cotangent)

    def gradient(x: mx.array) -> mx.array:
        return mx.vjp(g, [x], [x])[1][0]

    same(mx.compile(gradient, shapeless=True)(X), 2 * X)
    mx.export_function(str(tmp_path / "f.mlxfn"), gradient, X)
    with pytest.raises(ValueError, match=r"def_vjp|CustomTransforms"):
        mx.compile(lambda x: mx.jvp(f, [x], [x])[1][0], shapeless=True)(X)
    _, (forward,) = mx.jvp(f, [X], [X])
    same(forward, mx.exp(X) * X)


def test_compiled(f: Any) -> None:
    compiled = mx.compile(lambda x: f(x + 1) - 1)
    for x in (X, X[:, :2], X):
        same(compiled(x), mx.exp(x + 1) - 1)


@pytest.mark.parametrize("what", ["vmap", "jvp"])
def test_without_a_rule_shapeless_functions_say_so(what: str) -> None:
    def f(x: mx.array) -> mx.array:
        if what == "vmap":
            return mx.vmap(lambda x: run(exp, x))(x)
        return mx.jvp(lambda x: run(exp, x), [x], [x])[1][0]

    with pytest.raises(ValueError, match=f"kernel 'exp' has no .*ferrule.op and def_{what}"):
        mx.eval(mx.compile(f, shapeless=True)(X))


def test_without_a_rule_the_error_comes_when_it_is_evaluated() -> None:
    with pytest.raises(ValueError, match=r"kernel 'exp' has no batching rule.*def_vmap"):
        mx.eval(mx.vmap(lambda x: run(exp, x))(X))
    with pytest.raises(ValueError, match=r"kernel 'exp' has no forward-mode.*def_jvp"):
        mx.eval(mx.jvp(lambda x: run(exp, x), [X], [X]))
    with pytest.raises(ValueError, match=r"kernel 'exp' has no derivative.*def_vjp"):
        mx.grad(lambda x: run(exp, x).sum())(X)
    batched = mx.vmap(lambda x: run(exp, x), in_axes=1)(X)
    assert batched.shape == (3, 2)
    values, _ = mx.jvp(lambda x: run(exp, x), [X], [X])
    same(values[0], mx.exp(X))  # they are there


def test_errors_in_an_evaluation_leave_memory_alone() -> None:
    """MLX's threads may still write to arrays that the evaluation began, and then lets go."""
    for _ in range(300):
        x = mx.arange(1, 13).reshape(4, 3).astype(mx.float32)
        found = mx.vmap(lambda x: run(exp, x))(x)
        with pytest.raises(ValueError, match="no batching rule"):
            mx.array_equal(found, x * x).item()


def refused(function: Any, folder: Path) -> list[str]:
    """What MLX, or ferrule, says where a function is compiled shapeless and exported."""
    said = []
    with pytest.raises(ValueError) as error:
        mx.compile(function, shapeless=True)(X)
    said.append(str(error.value))
    with pytest.raises(ValueError) as error:
        mx.export_function(str(folder / "f.mlxfn"), function, X)
    said.append(str(error.value))
    return said


def test_what_mlx_refuses_is_said_with_what_to_write(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ferrule.FerruleWarning)
        ferrule.install_mlx()
    try:
        f = made()
        for function in (f, mx.grad(lambda x: f(x).sum())):
            said = refused(function, tmp_path)
            if not mlx_build.at_least(0, 32):
                assert "(MLX 0.32.0 and newer export it)" in said.pop().replace("\xa0", " ")
            for text in said:
                assert "exp = ferrule.op('exp', ..., metal=...)\n" in text
                assert "exp.def_vjp(ferrule.op('exp_vjp', ..., metal=...))" in text
        same(f(X), mx.exp(X))
        without = mx.custom_function(lambda x: run(exp, x))  # which MLX calls as it is
        same(mx.compile(without, shapeless=True)(X), mx.exp(X))
        if mlx_build.at_least(0, 32):
            mx.export_function(str(tmp_path / "f.mlxfn"), without, X)
        plain = mx.custom_function(lambda x: 2 * x)  # nothing of ferrule: MLX's own words
        plain.vjp(lambda x, cotangent, y: 2 * cotangent)
        for text in refused(plain, tmp_path):
            assert "CustomTransforms" in text
    finally:
        ferrule.uninstall_mlx()


def test_mlx_has_words_of_its_own_where_ferrule_is_not_installed(tmp_path: Path) -> None:
    """docs/mlx.md says these, and why they do not name `def_vjp`."""
    shapeless, file = refused(made(), tmp_path)
    assert shapeless == "[Primitive::output_shapes] CustomTransforms cannot infer output shapes."
    words = "[export_function] Unable to serialize primitive CustomTransforms"
    if mlx_build.at_least(0, 32):  # else it meets the kernel first
        assert file == words
    page = Path(__file__).parents[2].joinpath("docs", "mlx.md").read_text(encoding="utf-8")
    assert shapeless in page and words in page
    with pytest.raises(ValueError, match=r"def_vjp.* or .*mx.custom_function, which MLX neither"):
        mx.grad(lambda x: run(exp, x).sum())(X)


def test_what_it_says_to_write_works(tmp_path: Path) -> None:
    exp = ferrule.op(
        "exp", "x[*S]:float32 -> y[*S]:float32", metal=I + "y[i] = metal::precise::exp(x[i]);",
        grid="x.size", threadgroup=32,
    )  # fmt: skip
    exp.def_vjp(
        ferrule.op(
            "exp_vjp", "x[*S]:float32, cotangent[*S]:float32 -> x_grad[*S]:float32",
            metal=I + "x_grad[i] = metal::precise::exp(x[i]) * cotangent[i];", grid="x.size",
            threadgroup=32,
        )
    )  # fmt: skip
    gradient = mx.compile(mx.grad(lambda x: exp(x).sum()), shapeless=True)
    for x in (X, X[:1], X[:, :2]):
        same(gradient(x), mx.exp(x))
