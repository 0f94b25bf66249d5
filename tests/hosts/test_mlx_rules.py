"""What an op's derivative and batching rules give and raise, where MLX asks for them: what is wrong
is an error that names the op and the rule, and nothing else comes of it."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import pytest

import ferrule as fe
from ferrule.devices.cpu.program import CpuDevice
from ferrule.devices.cuda.device import CudaDevice

mx = pytest.importorskip("mlx.core")

X = mx.array([0.5, 1.0, 2.0])
RULES = ("vjp", "jvp", "vmap")
_versions = count()


def copied(kind: str, rule: Any, signature: str = "x[*S]:T -> y[*S]:T") -> Any:
    """An op with a rule of a kind."""
    op = fe.op(
        "copied", signature, metal="uint i = thread_position_in_grid.x; y[i] = x[i];",
        grid="x.size", threadgroup=64,
    )  # fmt: skip
    getattr(op, f"def_{kind}")(rule, version=next(_versions))
    return op


def asked(kind: str, op: Any, x: Any = X) -> Any:
    """What MLX makes of the rule, evaluated."""
    if kind == "vjp":
        found = mx.vjp(op, [x], [mx.ones_like(x)])[1][0]
    elif kind == "jvp":
        found = mx.jvp(op, [x], [mx.ones_like(x)])[1][0]
    else:
        found = mx.vmap(op)(mx.stack([x, x]))
    mx.eval(found)
    return found


def still_works() -> None:
    op = copied("vjp", lambda primals, cotangents, outputs: cotangents)
    np.testing.assert_array_equal(np.array(op(X)), np.array(X))


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TypeError("boom"), "TypeError .*test_mlx_rules.py, line [0-9]+.: boom"),
        (KeyError("k"), "KeyError .*line [0-9]+.: 'k'"),
        (SystemExit(3), "SystemExit .*line [0-9]+.: 3"),
        (fe.KernelError("in words"), "^in words$"),
    ],
    ids=["TypeError", "KeyError", "SystemExit", "ferrule"],
)
def test_what_a_rule_raises(kind: str, error: BaseException, said: str) -> None:
    def rule(*given: Any) -> Any:
        raise error

    with pytest.raises(ValueError, match=said) as raised:
        asked(kind, copied(kind, rule))
    if not isinstance(error, fe.KernelError):
        assert f"the {kind} of op 'copied' raised" in str(raised.value)
    still_works()


@pytest.mark.parametrize("kind", RULES)
def test_ctrl_c_in_a_rule(kind: str) -> None:
    def rule(*given: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        try:
            asked(kind, copied(kind, rule))
        except ValueError:
            for _ in range(100):  # it may come a little later than MLX's own error
                pass
    still_works()


@pytest.mark.parametrize(
    "value", [5, None, "text", np.ones(3, np.float32), [1.0, 2.0, 3.0]], ids=repr
)
@pytest.mark.parametrize("kind", ["vjp", "jvp"])
def test_a_derivative_that_is_no_array(kind: str, value: Any) -> None:
    op = copied(kind, lambda *given: (value,))
    if kind == "vjp" and value is None:
        np.testing.assert_array_equal(np.array(asked(kind, op)), np.zeros(3))
        return
    what = "gradient of input 'x'" if kind == "vjp" else "tangent of output 'y'"
    with pytest.raises(ValueError, match=f"the {kind} of op 'copied' gave .* as the {what}"):
        asked(kind, op)
    still_works()


@pytest.mark.parametrize("kind", ["vjp", "jvp"])
def test_a_derivative_of_another_shape_or_dtype(kind: str) -> None:
    with pytest.raises(
        ValueError, match=rf"{kind} of op 'copied' gave .*\(2,\).*expected the shape \(3,\)"
    ):
        asked(kind, copied(kind, lambda *given: (mx.ones((2,)),)))
    with pytest.raises(ValueError, match=rf"{kind} of op 'copied' gave .*complex64.*float32"):
        asked(kind, copied(kind, lambda *given: (mx.ones((3,), mx.complex64),)))
    found = asked(
        kind, copied(kind, lambda *given: (mx.ones((3,), mx.float32),)), X.astype(mx.float16)
    )
    assert found.dtype == mx.float16  # as torch has it
    for function in (mx.compile, lambda f: mx.compile(f, shapeless=True)):
        with pytest.raises(ValueError, match=r"expected the shape \(3,\)"):
            function(lambda x: asked(kind, copied(kind, lambda *given: (mx.ones((2,)),)), x))(X)


def test_outputs_without_a_tangent() -> None:
    op = fe.op(
        "split", "x[N]:T -> y[N]:T, n[N]:int32", grid="N", threadgroup=64,
        metal="uint i = thread_position_in_grid.x; y[i] = x[i]; n[i] = int(i);",
    )  # fmt: skip
    op.def_jvp(lambda primals, tangents, outputs: (tangents[0], None))
    _, (y, n) = mx.jvp(op, [X], [X])
    np.testing.assert_array_equal(np.array(y), np.array(X))
    assert n.dtype == mx.int32
    assert not n.any()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda size, axes, primals: (5, 0), "gave 5 of type int as output 'y'"),
        (lambda size, axes, primals: ((primals[0], primals[0]), 0), "gave 2 for its outputs"),
        (lambda size, axes, primals: (primals[0], (0, 0)), r"gave the axis \(0, 0\)"),
        (lambda size, axes, primals: (primals[0], 7), r"the axis 7 .* the shape \(2, 3\)"),
        (lambda size, axes, primals: (primals[0], "0"), "the axis '0' .*; expected an axis"),
        (lambda size, axes, primals: (primals[0], 1), "axis 1 .* expected an axis of size 2"),
    ],
)  # fmt: skip
def test_a_batch_that_is_none(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"the vmap (rule )?of op 'copied' .*{said}"):
        asked("vmap", copied("vmap", given))
    still_works()


def test_what_is_wrong_is_said() -> None:
    for kind, make, words in (
        ("vjp", lambda: (mx.ones(4),),
         r"the vjp of op 'copied' gave an array of shape \(4,\) as the gradient of input 'x'; "
         r"expected the shape \(3,\)"),
        ("vjp", lambda: (object(),),
         "gave .* of type object as the gradient of input 'x'; expected"),
        ("jvp", lambda: (None,), "gave None of type NoneType as the tangent of output 'y'"),
        ("vmap", lambda: ((X,), (1,)), "gave the axis 1 for output 'y', which has the shape"),
        ("vmap", lambda: ((X, X), (0, 0)), "gave 2 for its outputs; expected a tuple of 1"),
        ("vmap", lambda: ((X,), 0), "gave int for its axes; expected a tuple of 1"),
        ("vmap", lambda: ((1,), (0,)), "gave 1 of type int as output 'y'; expected an array"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            asked(kind, copied(kind, lambda *given, make=make: make()))


def test_axes_of_a_vmap_rule_are_counted_from_the_end_too() -> None:
    f = copied("vmap", lambda size, axes, values: (mx.moveaxis(values[0], axes[0], -1), -1))
    x = mx.arange(6).reshape(2, 3)
    assert mx.array_equal(mx.vmap(f)(x), x)
    assert mx.array_equal(mx.vmap(f, in_axes=1, out_axes=1)(x), x)
    same_for_all = copied("vmap", lambda size, axes, values: (values[0][0], None))
    assert mx.array_equal(mx.vmap(same_for_all)(x), mx.broadcast_to(x[0], (2, 3)))


def test_what_a_function_in_python_raises() -> None:
    def run(x: Any) -> Any:
        raise LookupError("nothing there")

    op = fe.adopt("failing", "x[*S]:T -> y[*S]:T", run=run, version=1)
    with pytest.raises(ValueError, match=r"the `run` of op 'failing' raised LookupError .*line"):
        mx.eval(op(X))
    still_works()


def test_ctrl_c_while_a_kernel_is_compiled_in_an_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = fe.metal_kernel(
        name="of_size", input_names=["x"], output_names=["y"],
        source="uint i = thread_position_in_grid.x; y[i] = x[i] + N;",
    )  # fmt: skip

    @lambda f: mx.compile(f, shapeless=True)
    def f(x: Any) -> Any:
        return kernel(
            inputs=[x], template=[("N", "x.size")], grid=("x.size", 1, 1), threadgroup=(8, 1, 1),
            output_shapes=["x.shape"], output_dtypes=[mx.float32],
        )[0]  # fmt: skip

    mx.eval(f(X))
    y = f(mx.ones((5,)))

    def interrupted(*given: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        for device in (CpuDevice, CudaDevice):
            patch.setattr(device, "program", interrupted)
        with pytest.raises(KeyboardInterrupt):
            try:
                mx.eval(y)
            except ValueError:
                for _ in range(100):
                    pass
    np.testing.assert_array_equal(np.array(y), np.full(5, 6.0))
