"""rms_norm and layer_norm along an axis, and their derivatives."""

from __future__ import annotations

from typing import Any

import ferrule

from .arrays import cast, widened
from .norm_weights import norm_gradients
from .rows import FLOATS, axes_behind, is_wide, rows
from .rows_cuda import HELD, HELD_OF_TWO, bodies


def rms_norm(
    x: Any, weight: Any = None, eps: float = 1e-5, axis: int = -1, residual: Any = None
) -> Any:
    """``x / sqrt(mean(x * x) + eps) * weight`` along an axis.

    Args:
        x: an array of any shape, of float32, float16, bfloat16, or (not on Apple's GPUs) float64.
        weight: of one dim, as long as the axis, of any of these dtypes (of float64 where ``x`` is);
            None for ones.
        eps: a number.
        axis: what is normed.
        residual: like ``x``, added to it before; None for nothing.

    Returns:
        An array like ``x``. With a residual two: that, and ``x + residual``, which is what was
        normed, and the next layer's residual. Sums are taken in float32, of float64 in float64.

    Raises:
        KernelError: ``x`` has no such axis, or shapes or dtypes do not fit.
        KernelTypeError: ``x`` is no array, or ``axis`` no int.
    """
    behind = axes_behind("rms_norm", x, axis)
    op = _rms_norm(behind, weight is not None, residual is not None, is_wide(x))
    return op(x, *[array for array in (residual, weight) if array is not None], eps)


def layer_norm(
    x: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, axis: int = -1
) -> Any:
    """``(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias`` along an axis.

    Args:
        x: an array of any shape, of float32, float16, bfloat16, or (not on Apple's GPUs) float64.
        weight: of one dim, as long as the axis, of any of these dtypes (of float64 where ``x`` is);
            None for ones.
        bias: likewise, of the dtype of ``weight``; None for zeros.
        eps: a number.
        axis: what is normed.

    Returns:
        An array like ``x``. The variance is the mean of squared differences from the mean, not a
        difference of means; both are taken in float32, of float64 in float64.

    Raises:
        KernelError: ``x`` has no such axis, or shapes or dtypes do not fit.
        KernelTypeError: ``x`` is no array, or ``axis`` no int.
    """
    behind = axes_behind("layer_norm", x, axis)
    op = _layer_norm(behind, weight is not None, bias is not None, is_wide(x))
    return op(x, *[array for array in (weight, bias) if array is not None], eps)


def weight_floats(wide: bool) -> str:
    """What weights may be: sums in float32 take no float64."""
    return f", W in {FLOATS if wide else '(float32, float16, bfloat16)'}"


def _normed(x: Any, weight: Any, bias: Any, eps: float, behind: int) -> Any:
    """``x / sqrt(mean(x * x) + eps) * weight + bias``, in ordinary array code."""
    y = x * (_mean(x * x, behind) + eps) ** -0.5
    along = (..., *[None] * behind)
    y = y if weight is None else y * widened(weight)[along]
    return y if bias is None else y + widened(bias)[along]


def _mean(x: Any, behind: int) -> Any:
    axis = -1 - behind
    return x.sum(axis=axis, keepdims=True) / x.shape[axis] if 0 not in x.shape else 0


@ferrule.family
def _rms_norm(behind: int, weighted: bool, added: bool, wide: bool) -> ferrule.Op:
    """``x, residual, weight, eps -> y, total``, without what is not there."""
    row = rows("x", behind, wide)
    normed, weight = ("total" if added else "x"), (" * A(weight[k])" if weighted else "")
    add = "total[AT(k)] = x[AT(k)] + residual[AT(k)];" if added else ""
    values = "sum_of_rows(total + begin, row(x), row(residual))" if added else "row(x)"
    packed = bodies(
        f"""
        const auto values = {values};
        const float squares = sum_of([](float v) {{ return v * v; }}, values);
        const float scale = rsqrt(squares / N + eps);
        write(y + begin, [=](float v{", float w" * weighted}) {{
            return v * scale{" * w" * weighted};
        }}, values{", every(weight)" * weighted});""",
        ["x", "y", *["residual", "total"] * added, *["weight"] * weighted],
        HELD_OF_TWO if added else HELD,
    )

    def reference(x: Any, *others: Any) -> Any:
        *arrays, eps = others
        total = x + arrays[0] if added else x
        weight = arrays[-1] if weighted else None
        normed = cast(_normed(widened(total), weight, None, eps, behind), x.dtype)
        return (normed, total) if added else normed

    op = ferrule.op(
        "add_rms_norm" if added else "rms_norm",
        f"x[{row.dims}]:T,{f' residual[{row.dims}]:T,' * added}{' weight[N]:W,' * weighted}"
        f" eps:{row.sum_dtype} -> y[{row.dims}]:T{f', total[{row.dims}]:T' * added}"
        f" where T in {FLOATS}" + weight_floats(wide) * weighted,
        metal=f"""{row.begin}
    A squares = 0;
    for (uint k = first; k < N; k += step) {{
        {add}
        A v = A({normed}[AT(k)]);
        squares += v * v;
    }}
    const A scale = metal::rsqrt(SUM(squares) / N + A(eps));
    for (uint k = first; k < N; k += step)
        y[AT(k)] = T(A({normed}[AT(k)]) * scale{weight});
""",
        cuda=None if behind or wide else packed,
        reference=reference,
        version=1,
        **row.launch,
    )

    @op.def_vjp
    def _(primals: Any, cotangents: Any, outputs: Any, wanted: Any) -> Any:
        x, *others, eps = primals
        normed, weight = (outputs[1] if added else x), others[-1] if weighted else None
        x_grad, *sums = norm_gradients(
            False, normed, weight, None, eps, cotangents[0], any(wanted[1 + added :]), behind, wide
        )
        if added:
            x_grad = x_grad + cotangents[1]
        return (*[x_grad] * (1 + added), *sums, None)

    op.def_jvp(_rms_norm_jvp(behind, weighted, added, wide))
    return op


@ferrule.family
def _rms_norm_jvp(behind: int, weighted: bool, added: bool, wide: bool) -> ferrule.Op:
    row = rows("x_tangent", behind, wide)
    normed = "total" if added else "x"
    arrays = [normed, "x_tangent", *["residual_tangent"] * added]
    inputs = ", ".join(f"{name}[{row.dims}]:T" for name in arrays)
    add = " + A(residual_tangent[AT(k)])" if added else ""
    keep = "total_tangent[AT(k)] = T(d);" if added else ""
    by_weight = "d * A(weight[k]) + v * scale * A(weight_tangent[k])" if weighted else "d"
    return ferrule.op(
        "rms_norm_jvp",
        f"{inputs}, {'weight[N]:W, weight_tangent[N]:W, ' * weighted}eps:{row.sum_dtype}"
        f" -> y_tangent[{row.dims}]:T{f', total_tangent[{row.dims}]:T' * added}"
        f" where T in {FLOATS}",
        metal=f"""{row.begin}
    A squares = 0, along = 0;
    for (uint k = first; k < N; k += step) {{
        A v = A({normed}[AT(k)]), d = A(x_tangent[AT(k)]){add};
        {keep}
        squares += v * v;
        along += v * d;
    }}
    const A scale = metal::rsqrt(SUM(squares) / N + A(eps));
    const A drawn = SUM(along) / N * scale * scale;
    for (uint k = first; k < N; k += step) {{
        A v = A({normed}[AT(k)]), d = A(x_tangent[AT(k)]){add};
        d = (d - v * drawn) * scale;
        y_tangent[AT(k)] = T({by_weight});
    }}
""",
        **row.launch,
    )


@ferrule.family
def _layer_norm(behind: int, weighted: bool, biased: bool, wide: bool) -> ferrule.Op:
    """``x, weight, bias, eps -> y``, without what is not there."""
    row = rows("x", behind, wide)
    weight, bias = " * A(weight[k])" * weighted, " + A(bias[k])" * biased
    shared = ["weight"] * weighted + ["bias"] * biased
    packed = bodies(
        f"""
        const auto values = row(x);
        const float2 found = mean_and_squares(values);
        const float mean = found.x, scale = rsqrt(found.y / N + eps);
        write(y + begin, [=](float v{", float w" * weighted}{", float b" * biased}) {{
            return (v - mean) * scale{" * w" * weighted}{" + b" * biased};
        }}, values{"".join(f", every({name})" for name in shared)});""",
        ["x", "y", *shared],
    )

    def reference(x: Any, *others: Any) -> Any:
        *arrays, eps = others
        weight, bias = arrays[0] if weighted else None, arrays[-1] if biased else None
        values = widened(x)
        values = values - _mean(values, behind)
        return cast(_normed(values, weight, bias, eps, behind), x.dtype)

    op = ferrule.op(
        "layer_norm",
        f"x[{row.dims}]:T,{' weight[N]:W,' * weighted}{' bias[N]:W,' * biased}"
        f" eps:{row.sum_dtype} -> y[{row.dims}]:T where T in {FLOATS}"
        + weight_floats(wide)
        * (weighted or biased),
        metal=f"""{row.begin}
    A sum = 0;
    for (uint k = first; k < N; k += step) sum += A(x[AT(k)]);
    const A mean = SUM(sum) / N;
    A squares = 0;
    for (uint k = first; k < N; k += step) {{
        A v = A(x[AT(k)]) - mean;
        squares += v * v;
    }}
    const A scale = metal::rsqrt(SUM(squares) / N + A(eps));
    for (uint k = first; k < N; k += step)
        y[AT(k)] = T((A(x[AT(k)]) - mean) * scale{weight}{bias});
""",
        cuda=None if behind or wide else packed,
        reference=reference,
        version=1,
        **row.launch,
    )

    @op.def_vjp
    def _(primals: Any, cotangents: Any, outputs: Any, wanted: Any) -> Any:
        (x, *others, eps), (cotangent,) = primals, cotangents
        weight, bias = others[0] if weighted else None, others[-1] if biased else None
        grads = norm_gradients(True, x, weight, bias, eps, cotangent, any(wanted[1:]), behind, wide)
        return (*grads, None)

    op.def_jvp(_layer_norm_jvp(behind, weighted, biased, wide))
    return op


@ferrule.family
def _layer_norm_jvp(behind: int, weighted: bool, biased: bool, wide: bool) -> ferrule.Op:
    row = rows("x", behind, wide)
    by_weight = "d * A(weight[k]) + v * scale * A(weight_tangent[k])" if weighted else "d"
    return ferrule.op(
        "layer_norm_jvp",
        f"x[{row.dims}]:T, x_tangent[{row.dims}]:T, "
        f"{'weight[N]:W, weight_tangent[N]:W, ' * weighted}{'bias_tangent[N]:W, ' * biased}"
        f"eps:{row.sum_dtype} -> y_tangent[{row.dims}]:T where T in {FLOATS}",
        metal=f"""{row.begin}
    A sum = 0, moved = 0;
    for (uint k = first; k < N; k += step) {{
        sum += A(x[AT(k)]);
        moved += A(x_tangent[AT(k)]);
    }}
    const A mean = SUM(sum) / N;
    moved = SUM(moved) / N;
    A squares = 0, along = 0;
    for (uint k = first; k < N; k += step) {{
        A v = A(x[AT(k)]) - mean;
        squares += v * v;
        along += v * A(x_tangent[AT(k)]);
    }}
    const A scale = metal::rsqrt(SUM(squares) / N + A(eps));
    const A drawn = SUM(along) / N * scale * scale;
    for (uint k = first; k < N; k += step) {{
        A v = A(x[AT(k)]) - mean;
        A d = (A(x_tangent[AT(k)]) - moved - v * drawn) * scale;
        y_tangent[AT(k)] = T({by_weight}{" + A(bias_tangent[k])" * biased});
    }}
""",
        **row.launch,
    )
