"""Forward mode, derived from bodies: tangents are those of torch for a twin in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ferrule
from derived_bodies import BODIES, NUMBERS, I, assert_close, tangents
from ferrule.errors import DialectError, KernelError

torch = pytest.importorskip("torch")

# Functions of the dialect, the same of torch, and where their arguments lie.
FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[tuple[float, float], ...]]] = {
    "exp(a)": (torch.exp, ((-2, 2),)),
    "exp2(a)": (torch.exp2, ((-2, 2),)),
    "exp10(a)": (lambda a: 10**a, ((-1, 1),)),
    "log(a)": (torch.log, ((0.2, 3),)),
    "log2(a)": (torch.log2, ((0.2, 3),)),
    "log10(a)": (torch.log10, ((0.2, 3),)),
    "sqrt(a)": (torch.sqrt, ((0.2, 3),)),
    "rsqrt(a)": (torch.rsqrt, ((0.2, 3),)),
    "metal::precise::sin(a)": (torch.sin, ((-3, 3),)),
    "cos(a)": (torch.cos, ((-3, 3),)),
    "tan(a)": (torch.tan, ((-1, 1),)),
    "sinpi(a)": (lambda a: torch.sin(np.pi * a), ((-1, 1),)),
    "cospi(a)": (lambda a: torch.cos(np.pi * a), ((-1, 1),)),
    "asin(a)": (torch.asin, ((-0.9, 0.9),)),
    "acos(a)": (torch.acos, ((-0.9, 0.9),)),
    "atan(a)": (torch.atan, ((-3, 3),)),
    "atan2(a, b)": (torch.atan2, ((-3, 3), (0.5, 2))),
    "sinh(a)": (torch.sinh, ((-2, 2),)),
    "cosh(a)": (torch.cosh, ((-2, 2),)),
    "metal::tanh(a)": (torch.tanh, ((-2, 2),)),
    "asinh(a)": (torch.asinh, ((-2, 2),)),
    "acosh(a)": (torch.acosh, ((1.5, 3),)),
    "atanh(a)": (torch.atanh, ((-0.8, 0.8),)),
    "erf(a)": (torch.erf, ((-2, 2),)),
    "pow(a, b)": (torch.pow, ((0.3, 2), (-2, 3))),
    "powr(a, b)": (torch.pow, ((0.3, 2), (-2, 3))),
    "pow(a, 2.0f)": (lambda a: a**2, ((-2, 2),)),
    "abs(a)": (torch.abs, ((-2, 2),)),
    "fabs(a)": (torch.abs, ((-2, 2),)),
    "max(a, b)": (torch.maximum, ((-1, 1), (-1, 1))),
    "fmin(a, b)": (torch.minimum, ((-1, 1), (-1, 1))),
    "max(a, a)": (lambda a: a, ((-1, 1),)),
    "clamp(a, -1.0f, b)": (lambda a, b: torch.minimum(a.clamp(min=-1), b), ((-2, 2), (0, 1))),
    "saturate(a)": (lambda a: a.clamp(0, 1), ((-2, 2),)),
    "mix(a, b, 0.25f)": (lambda a, b: torch.lerp(a, b, 0.25), ((-1, 1), (-1, 1))),
    "fma(a, b, a)": (lambda a, b: a * b + a, ((-1, 1), (-1, 1))),
    "fract(a)": (torch.frac, ((0.1, 0.9),)),
    "fmod(a, b)": (torch.fmod, ((3, 5), (0.6, 0.9))),
    "copysign(a, b)": (torch.copysign, ((0.5, 1), (-1, 1))),
    "floor(a) * b + rint(a)": (lambda a, b: a.floor() * b, ((-3, 3), (-1, 1))),
    "sign(a) * b": (lambda a, b: torch.sign(a) * b, ((-3, 3), (-1, 1))),
    "a * b - a / b": (lambda a, b: a * b - a / b, ((-1, 1), (0.5, 2))),
    "-a + 3 - (b - 1)": (lambda a, b: -a - b, ((-1, 1), (0.5, 2))),
    "select(a, b, a < b)": (torch.maximum, ((-1, 1), (-1, 1))),
    "a < b ? exp(b) : a * a": (
        lambda a, b: torch.where(a < b, torch.exp(b), a * a), ((-1, 1), (-1, 1))),
    "isnan(a) ? 0.0f : a": (lambda a: a, ((-1, 1),)),
    "float(int(a)) + a": (lambda a: a, ((-3, 3),)),
}  # fmt: skip


def test_functions() -> None:
    count, n = len(FUNCTIONS), 64
    lines = "".join(f"y[{k} * N + i] = {text};\n" for k, text in enumerate(FUNCTIONS))
    loads = "float a, b;\n"
    body = I + loads + "".join(
        f"a = x[{k} * N + i]; b = z[{k} * N + i];\n{line}\n"
        for k, line in enumerate(lines.splitlines())
    )  # fmt: skip
    op = ferrule.op(
        "functions",
        "x[F,N]:float32, z[F,N]:float32 -> y[F,N]:float32",
        metal=body,
        grid="N",
        threadgroup=64,
    )
    derived = op.derive_jvp()
    generator = torch.Generator().manual_seed(0)
    x, z, tx, tz = (torch.rand(count, n, generator=generator) for _ in range(4))
    for k, (_, ranges) in enumerate(FUNCTIONS.values()):
        for values, (low, high) in zip((x, z), ranges, strict=False):
            values[k] = low + values[k] * (high - low)
    given = derived(x, z, tx, tz)
    for k, (text, (function, ranges)) in enumerate(FUNCTIONS.items()):
        at = [x[k], z[k]][: len(ranges)], [tx[k], tz[k]][: len(ranges)]
        wanted = tangents(function, *at)
        error = (given[k].double() - wanted).abs().max() / wanted.abs().max().clamp(min=1)
        assert error <= 5e-6, (text, float(error))


@pytest.mark.parametrize("name", BODIES)
def test_bodies(name: str) -> None:
    body = BODIES[name]
    op = ferrule.op(name.replace(" ", "_"), body.rule, metal=body.source, **body.more)
    derived = op.derive_jvp()
    generator = torch.Generator().manual_seed(1)
    primals, given = (
        tuple(torch.randn(*shape, generator=generator) for shape in body.shapes) for _ in range(2)
    )
    wanted = tangents(body.twin, primals, given)
    numbers = NUMBERS.get(name, ())
    assert_close(derived(*primals, *numbers, *given), wanted)
    # As the op's own rule.
    _, registered = torch.func.jvp(lambda *xs: op(*xs, *numbers), primals, given)
    assert_close(registered, wanted)


def test_half_is_as_exact_as_its_values() -> None:
    body = BODIES["rows"]
    op = ferrule.op("rows_half", body.rule, metal=body.source, **body.more)
    derived = op.derive_jvp()
    generator = torch.Generator().manual_seed(2)
    values = [torch.randn(*s, generator=generator).half() for s in (*body.shapes, *body.shapes)]
    given = derived(*values[:2], 1e-5, *values[2:])
    assert given.dtype == torch.float16
    wanted = tangents(body.twin, values[:2], values[2:])
    assert_close(given, wanted, 3e-3)


def test_some_inputs_alone() -> None:
    op = ferrule.op(
        "product", "x[N]:float32, w[N]:float32 -> y[N]:float32, z[N]:float32",
        metal=I + "y[i] = x[i] * w[i]; z[i] = w[i];", grid="N", threadgroup=64,
    )  # fmt: skip
    derived = op.derive_jvp(wrt="x")
    assert [a.name for a in derived.rule.inputs] == ["x", "w", "x_tangent"]
    x, w, t = (torch.randn(8) for _ in range(3))
    y, z = derived(x, w, t)
    torch.testing.assert_close(y, t * w)
    assert not z.any()
    with pytest.raises(KernelError, match=r"wrt names 'y'; expected some of .* x, w"):
        op.derive_jvp(wrt=["y"])


def test_a_rule_of_ones_own_stays() -> None:
    op = ferrule.op(
        "twice",
        "x[N]:float32 -> y[N]:float32",
        metal=I + "y[i] = 2 * x[i];",
        grid="N",
        threadgroup=64,
    )
    own = ferrule.op(
        "twice_own", "x[N]:float32, x_tangent[N]:float32 -> y_tangent[N]:float32",
        metal=I + "y_tangent[i] = 2 * x_tangent[i];", grid="N", threadgroup=64,
    )  # fmt: skip
    op.def_jvp(own)
    assert op.derive_jvp() is not own
    assert op.rules["jvp"].op is own


def test_text_can_be_read() -> None:
    op = ferrule.op(
        "cubed", "x[N]:float32 -> y[N]:float32",
        metal=I + "float v = x[i];\ny[i] = v * v * v;", grid="N", threadgroup=64,
    )  # fmt: skip
    (body,) = op.derive_jvp().implementations
    assert body.kernel.source == (  # type: ignore[union-attr]
        "uint i = thread_position_in_grid.x;\n"
        "float v_tangent = x_tangent[i];\n"
        "float v = x[i];\n"
        "const auto fr_value_1 = v * v;\n"
        "y_tangent[i] = v * (v * v_tangent + v * v_tangent) + fr_value_1 * v_tangent;\n"
    )


@pytest.mark.parametrize(
    ("body", "line", "words"),
    [
        (I + "y[i] = lgamma(x[i]);", 2, "lgamma"),
        (I + "float a;\ny[i] = (a = x[i]);", 3, "assignment"),
        (I + "auto p = (const device int*)x;\ny[i] = x[i];", 2, "pointer"),
        (I + "simdgroup_matrix<float, 8, 8> m;\ny[i] = x[i];", 2, "simdgroup_matrix"),
        (I + "struct P { float a; };\nP p;\ny[i] = x[i];", 2, "struct"),
        (I + "\ny[i] = unheard_of(x[i]);", 3, "unheard_of"),
        (I + "switch (i) { case 0: break; }\ny[i] = x[i];", 2, "switch"),
        (I + "y[i] = x[i];\ny[i] = y[i] * x[i];", 3, "reading the output y"),
        (I + "y[i] = x[i];\ny[i] *= x[i];", 3, "reading the output y"),
    ],
)
def test_what_is_refused(body: str, line: int, words: str) -> None:
    op = ferrule.op("refused", "x[N]:float32 -> y[N]:float32", metal=body, grid="N", threadgroup=64)
    with pytest.raises(DialectError, match=words) as error:
        op.derive_jvp()
    assert (error.value.line, error.value.where) == (line, "source")
    assert "jvp" not in op.rules


@pytest.mark.parametrize(
    ("rule", "more", "words"),
    [
        ("x[N]:complex64 -> y[N]:complex64", {}, "has complex numbers"),
        ("x[N]:T -> y[N]:T where T in (float32, complex64)", {}, "has complex numbers"),
        ("x[N]:float32 -> y[N]:float32", {"ensure_row_contiguous": False}, "by their strides"),
    ],
)
def test_what_a_text_does_not_say(rule: str, more: dict[str, Any], words: str) -> None:
    op = ferrule.op("hidden", rule, metal=I + "y[i] = x[i];", grid="N", threadgroup=64, **more)
    with pytest.raises(KernelError, match=words):
        op.derive_jvp()


def test_dtypes_some_of_which_are_floats() -> None:
    rule = "x[N]:T -> y[N]:T where T in (float32, int32)"
    op = ferrule.op("mixed", rule, metal=I + "y[i] = x[i] * x[i];", grid="N", threadgroup=64)
    x, t = torch.randn(8), torch.randn(8)
    torch.testing.assert_close(op.derive_jvp()(x, t), 2 * x * t)


def test_calls_that_change_variables() -> None:
    op = ferrule.op(
        "counted", "x[N]:float32 -> y[N]:float32",
        metal=I + "float v = x[i];\ny[i] = next(v) + next(v);\n"
        'printf("%f", v);\nauto g = [&]() { v *= 3; return v; };\ny[i] += g() * g();',
        header="float next(thread float& v) { v = v * v; return v; }",
        grid="N", threadgroup=64,
    )  # fmt: skip
    x, t = torch.rand(8) + 0.5, torch.randn(8)

    def twin(x: Any) -> Any:
        return x**2 + x**4 + 27 * x**8

    assert_close(op.derive_jvp()(x, t), tangents(twin, (x,), (t,)))


def test_names_of_second_tangents() -> None:
    body = I + "y[i] = x[i] * x[i];"
    op = ferrule.op("again", "x[N]:float32 -> y[N]:float32", metal=body, grid="N", threadgroup=64)
    with pytest.raises(KernelError, match=r"'x_tangent' would be an argument of the op, and a tan"):
        op.derive_jvp().derive_jvp()


def test_what_has_no_metal_body() -> None:
    op = ferrule.op("plain", "x[N]:float32 -> y[N]:float32", reference=lambda x: x)
    with pytest.raises(KernelError, match="has no Metal body"):
        op.derive_jvp()
