"""softmax and log_softmax along an axis, and their derivatives."""

from __future__ import annotations

from typing import Any

import ferrule

from .arrays import cast, largest, library, widened
from .rows import FLOATS, axes_behind, is_wide, rows
from .rows_cuda import HELD_AS_FLOATS, HELD_OF_TWO, bodies


def softmax(x: Any, axis: int = -1) -> Any:
    """``exp(x) / sum(exp(x))`` along an axis, without overflow.

    Args:
        x: an array of any shape, of float32, float16, bfloat16, or (not on Apple's GPUs) float64.
        axis: along which values add up to 1.

    Returns:
        An array like ``x``. The maximum and the sum are taken in float32, of float64 in float64.
        A row that holds NaN or infinity, or -infinity alone, is NaN, as in torch.

    Raises:
        KernelError: ``x`` has no such axis, or another dtype.
        KernelTypeError: ``x`` is no array, or ``axis`` no int.
    """
    return _softmax(axes_behind("softmax", x, axis), is_wide(x))(x)


def log_softmax(x: Any, axis: int = -1) -> Any:
    """``x - log(sum(exp(x)))`` along an axis, without overflow.

    Args:
        x: an array of any shape, of float32, float16, bfloat16, or (not on Apple's GPUs) float64.
        axis: along which ``exp`` of the values adds up to 1.

    Returns:
        An array like ``x``. The maximum and the sum are taken in float32, of float64 in float64.

    Raises:
        KernelError: ``x`` has no such axis, or another dtype.
        KernelTypeError: ``x`` is no array, or ``axis`` no int.
    """
    return _log_softmax(axes_behind("log_softmax", x, axis), is_wide(x))(x)


_LARGEST = """
    A largest = -INFINITY;
    for (uint k = first; k < N; k += step) largest = metal::max(largest, A(x[AT(k)]));
    largest = MAX(largest);
    A sum = 0;
"""
_LARGEST_AND_SUM = f"""{_LARGEST}
    for (uint k = first; k < N; k += step) sum += metal::exp(A(x[AT(k)]) - largest);
"""


# Processors have the row in their caches, and exp takes longer than to write it twice.
_EXP_ONCE = f"""{_LARGEST}
    for (uint k = first; k < N; k += step) {{
        const A e = metal::exp(A(x[AT(k)]) - largest);
        y[AT(k)] = T(e);
        sum += e;
    }}
    const A share = 1 / SUM(sum);
    for (uint k = first; k < N; k += step) y[AT(k)] = T(A(y[AT(k)]) * share);
"""


def _reference(x: Any, axis: int, logarithm: bool) -> Any:
    """Both, in ordinary array code."""
    if 0 in x.shape:
        return x  # no row has a maximum
    of, values = library(x), widened(x)
    values = values - largest(values, axis)
    total = of.exp(values).sum(axis=axis, keepdims=True)
    return cast(values - of.log(total) if logarithm else of.exp(values) / total, x.dtype)


@ferrule.family
def _softmax(behind: int, wide: bool) -> ferrule.Op:
    row = rows("x", behind, wide)
    packed = bodies(
        """
        const Exps exps(row(x));
        const float share = exps.scale / exps.sum;
        write(y + begin, [=](float e) { return e * share; }, exps);""",
        ("x", "y"),
        HELD_AS_FLOATS,
    )
    op = ferrule.op(
        "softmax",
        f"x[{row.dims}]:T -> y[{row.dims}]:T where T in {FLOATS}",
        metal=[
            ferrule.metal_body(
                row.begin + _EXP_ONCE,
                when="device == cpu and (T == float32 or T == float64)",
                **row.launch,
            ),
            ferrule.metal_body(
                f"""{row.begin}{_LARGEST_AND_SUM}
    const A share = 1 / SUM(sum);
    for (uint k = first; k < N; k += step)
        y[AT(k)] = T(metal::exp(A(x[AT(k)]) - largest) * share);
""",
                **row.launch,
            ),
        ],
        cuda=None if behind or wide else packed,
        reference=lambda x: _reference(x, -1 - behind, False),
        version=1,
    )
    gradient = _softmax_vjp(behind, wide)
    op.def_vjp(gradient)

    # The matrix of derivatives is symmetric, so one op serves both directions.
    @op.def_jvp
    def _(primals: Any, tangents: Any, outputs: Any) -> Any:
        return gradient(outputs[0], tangents[0])

    return op


@ferrule.family
def _softmax_vjp(behind: int, wide: bool) -> ferrule.Op:
    row, axis = rows("y", behind, wide), -1 - behind
    packed = bodies(
        """
        const auto values = row(y), by = row(cotangent);
        const float sum = sum_of([](float v, float c) { return v * c; }, values, by);
        write(x_grad + begin, [=](float v, float c) { return v * (c - sum); }, values, by);""",
        ("y", "cotangent", "x_grad"),
        HELD_OF_TWO,
    )
    op = ferrule.op(
        "softmax_vjp",
        f"y[{row.dims}]:T, cotangent[{row.dims}]:T -> x_grad[{row.dims}]:T where T in {FLOATS}",
        metal=row.begin
        + """
    A sum = 0;
    for (uint k = first; k < N; k += step) sum += A(y[AT(k)]) * A(cotangent[AT(k)]);
    sum = SUM(sum);
    for (uint k = first; k < N; k += step)
        x_grad[AT(k)] = T(A(y[AT(k)]) * (A(cotangent[AT(k)]) - sum));
""",
        cuda=None if behind or wide else packed,
        **row.launch,
    )

    @op.def_vjp
    def _(primals: Any, cotangents: Any, outputs: Any) -> Any:
        (y, c), (h,) = primals, cotangents
        y_grad = h * (c - (y * c).sum(axis=axis, keepdims=True))
        return y_grad - c * (h * y).sum(axis=axis, keepdims=True), op(y, h)

    @op.def_jvp
    def _(primals: Any, tangents: Any, outputs: Any) -> Any:
        (y, c), (dy, dc) = primals, tangents
        parts = [] if dc is None else [op(y, dc)]
        if dy is not None:
            along_y = dy * (c - (y * c).sum(axis=axis, keepdims=True))
            parts += [along_y - y * (dy * c).sum(axis=axis, keepdims=True)]
        return sum(parts)

    return op


@ferrule.family
def _log_softmax(behind: int, wide: bool) -> ferrule.Op:
    row, axis = rows("x", behind, wide), -1 - behind
    packed = bodies(
        """
        const auto values = row(x);
        const Exps exps(values);
        const float largest = exps.largest, shift = log(exps.sum);
        write(y + begin, [=](float v) { return v - largest - shift; }, values);""",
        ("x", "y"),
        HELD_AS_FLOATS,
    )
    op = ferrule.op(
        "log_softmax",
        f"x[{row.dims}]:T -> y[{row.dims}]:T where T in {FLOATS}",
        metal=row.begin
        + _LARGEST_AND_SUM
        + """
    sum = metal::log(SUM(sum));  // not added to `largest`, beside which it may be nothing
    for (uint k = first; k < N; k += step) y[AT(k)] = T(A(x[AT(k)]) - largest - sum);
""",
        cuda=None if behind or wide else packed,
        reference=lambda x: _reference(x, axis, True),
        version=1,
        **row.launch,
    )
    op.def_vjp(_log_softmax_vjp(behind, wide))

    @op.def_jvp
    def _(primals: Any, tangents: Any, outputs: Any) -> Any:
        (dx,), (y,) = tangents, outputs
        return dx - (y.exp() * dx).sum(axis=axis, keepdims=True)

    return op


@ferrule.family
def _log_softmax_vjp(behind: int, wide: bool) -> ferrule.Op:
    row, axis = rows("y", behind, wide), -1 - behind
    packed = bodies(
        """
        const auto values = row(y), by = row(cotangent);
        const float sum = sum_of([](float c) { return c; }, by);
        write(x_grad + begin, [=](float v, float c) {
            return c - exp_for<T>(v) * sum;
        }, values, by);""",
        ("y", "cotangent", "x_grad"),
        HELD_OF_TWO,
    )
    op = ferrule.op(
        "log_softmax_vjp",
        f"y[{row.dims}]:T, cotangent[{row.dims}]:T -> x_grad[{row.dims}]:T where T in {FLOATS}",
        metal=row.begin
        + """
    A sum = 0;
    for (uint k = first; k < N; k += step) sum += A(cotangent[AT(k)]);
    sum = SUM(sum);
    for (uint k = first; k < N; k += step)
        x_grad[AT(k)] = T(A(cotangent[AT(k)]) - metal::exp(A(y[AT(k)])) * sum);
""",
        cuda=None if behind or wide else packed,
        **row.launch,
    )

    @op.def_vjp
    def _(primals: Any, cotangents: Any, outputs: Any) -> Any:
        (y, c), (h,) = primals, cotangents
        weighted = h * y.exp()
        y_grad = -weighted * c.sum(axis=axis, keepdims=True)
        return y_grad, h - weighted.sum(axis=axis, keepdims=True)

    @op.def_jvp
    def _(primals: Any, tangents: Any, outputs: Any) -> Any:
        (y, c), (dy, dc) = primals, tangents
        parts = [] if dc is None else [op(y, dc)]
        if dy is not None:
            parts += [-y.exp() * dy * c.sum(axis=axis, keepdims=True)]
        return sum(parts)

    return op
