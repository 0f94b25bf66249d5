"""The gradients of norms: of the rows, and of weights and biases in two deterministic steps."""

from __future__ import annotations

from typing import Any

import ferrule

from .rows import FLOATS, along, rows
from .rows_cuda import HELD_OF_TWO, bodies

# What sums over a row are divided by: the mean of no elements is 0.
_COUNT = "(N > 0 ? N : 1)"


@ferrule.family
def rms_norm_x_grad(behind: int, weighted: bool, wide: bool) -> ferrule.Op:
    """``x, weight, eps, cotangent -> x_grad, scale``; ``scale`` is 1 / sqrt(mean(x * x) + eps)."""
    row = rows("x", behind, wide, "scale.size")
    weight = " * A(weight[k])" if weighted else ""
    w, by_w, all_w = _words(weighted)
    packed = bodies(
        f"""
        const auto values = row(x), by = row(cotangent);
        const float2 sums = two_sums_of([](float v, float c{w}) {{
            return float2{{v * v, v * (c{by_w})}};
        }}, values, by{all_w});
        const float r = rsqrt(sums.x / N + eps), drawn = sums.y / N * r * r;
        write(x_grad + begin, [=](float v, float c{w}) {{
            return (c{by_w} - v * drawn) * r;
        }}, values, by{all_w});
        if (threadIdx.x == 0) scale[blockIdx.x] = r;""",
        ["x", "cotangent", "x_grad", *["weight"] * weighted],
        HELD_OF_TWO,
        "scale.size",
        "if (threadIdx.x == 0) scale[blockIdx.x] = rsqrt(eps);",
    )
    op = ferrule.op(
        "rms_norm_x_grad",
        f"x[{row.dims}]:T,{' weight[N]:W,' * weighted} eps:{row.sum_dtype},"
        f" cotangent[{row.dims}]:T -> x_grad[{row.dims}]:T, scale[{row.others}]:{row.sum_dtype}~"
        f" where T in {FLOATS}",
        metal=f"""{row.begin}
    A squares = 0, along = 0;
    for (uint k = first; k < N; k += step) {{
        A v = A(x[AT(k)]);
        squares += v * v;
        along += v * (A(cotangent[AT(k)]){weight});
    }}
    const A r = metal::rsqrt(SUM(squares) / {_COUNT} + A(eps));
    const A drawn = SUM(along) / {_COUNT} * r * r;
    for (uint k = first; k < N; k += step)
        x_grad[AT(k)] = T((A(cotangent[AT(k)]){weight} - A(x[AT(k)]) * drawn) * r);
    if (first == 0) scale[ROW] = r;
""",
        cuda=None if behind or wide else packed,
        **row.launch,
    )

    alone = rms_norm_x_grad(behind, False, wide) if weighted else op
    define_derivatives(op, alone, behind, False)
    return op


@ferrule.family
def layer_norm_x_grad(behind: int, weighted: bool, wide: bool) -> ferrule.Op:
    """``x, weight, eps, cotangent -> x_grad, mean, scale``, the last two those of each row."""
    row = rows("x", behind, wide, "scale.size")
    weight = " * A(weight[k])" if weighted else ""
    w, by_w, all_w = _words(weighted)
    packed = bodies(
        f"""
        const auto values = row(x), by = row(cotangent);
        const float4 found = moments([](float c{w}) {{ return c{by_w}; }}, values, by{all_w});
        const float m = found.x, shift = found.y;
        const float r = rsqrt(found.z / N + eps), drawn = found.w / N * r * r;
        write(x_grad + begin, [=](float v, float c{w}) {{
            return (c{by_w} - shift - (v - m) * drawn) * r;
        }}, values, by{all_w});
        if (threadIdx.x == 0) {{
            mean[blockIdx.x] = m;
            scale[blockIdx.x] = r;
        }}""",
        ["x", "cotangent", "x_grad", *["weight"] * weighted],
        HELD_OF_TWO,
        "scale.size",
        "if (threadIdx.x == 0) mean[blockIdx.x] = 0, scale[blockIdx.x] = rsqrt(eps);",
    )
    op = ferrule.op(
        "layer_norm_x_grad",
        f"x[{row.dims}]:T,{' weight[N]:W,' * weighted} eps:{row.sum_dtype},"
        f" cotangent[{row.dims}]:T -> x_grad[{row.dims}]:T, mean[{row.others}]:{row.sum_dtype}~,"
        f" scale[{row.others}]:{row.sum_dtype}~ where T in {FLOATS}",
        metal=f"""{row.begin}
    A sum = 0, shift = 0;
    for (uint k = first; k < N; k += step) {{
        sum += A(x[AT(k)]);
        shift += A(cotangent[AT(k)]){weight};
    }}
    const A m = SUM(sum) / {_COUNT};
    shift = SUM(shift) / {_COUNT};
    A squares = 0, along = 0;
    for (uint k = first; k < N; k += step) {{
        A v = A(x[AT(k)]) - m;
        squares += v * v;
        along += v * (A(cotangent[AT(k)]){weight});
    }}
    const A r = metal::rsqrt(SUM(squares) / {_COUNT} + A(eps));
    const A drawn = SUM(along) / {_COUNT} * r * r;
    for (uint k = first; k < N; k += step)
        x_grad[AT(k)] = T((A(cotangent[AT(k)]){weight} - shift - (A(x[AT(k)]) - m) * drawn) * r);
    if (first == 0) {{
        mean[ROW] = m;
        scale[ROW] = r;
    }}
""",
        cuda=None if behind or wide else packed,
        **row.launch,
    )

    alone = layer_norm_x_grad(behind, False, wide) if weighted else op
    define_derivatives(op, alone, behind, True)
    return op


def _words(weighted: bool) -> tuple[str, str, str]:
    """What functions of elements take, multiply by, and are called with, for a weight."""
    return (", float w", " * w", ", every(weight)") if weighted else ("", "", "")


def define_derivatives(
    op: ferrule.Op, alone: ferrule.Op, behind: int, centered: bool, parts: bool = False
) -> None:
    """Give an op ``x, weight, eps, cotangent -> x_grad, …`` its derivatives, as array code.

    With n for the normed x, r for the scale, and means over a row, ``x_grad`` is B(c), where c is
    the weighted cotangent, and ``B(h) = r (h - mean(h) - n mean(n h))``, without ``mean(h)`` where
    x is not centered. It is the gradient of ``sum(c n)``, so its derivative by x is symmetric, as B
    is: ``-r (n mean(h B(c)) + mean(n c) B(h) + mean(n h) B(c))``, of a cotangent or tangent h.

    Args:
        op: it; weight may be missing.
        alone: the one of this kind without a weight, which gives ``scale`` last.
        behind, centered: how many axes are behind the rows'; whether the mean is taken away.
        parts: the other outputs are parts of sums over the rows, and not constants. They have no
            gradient: that is never asked for, since their sum has none.
    """

    def mean(values: Any) -> Any:
        return values.mean(axis=-1 - behind, keepdims=True)

    def over_rows(weight: Any) -> Any:
        index = (..., *[None] * behind)
        return weight[index]

    def at(primals: Any) -> Any:
        """The weight (1 where there is none), n, B, and the derivative by x."""
        x, *weight, eps, cotangent = primals
        *_, scale = alone(x, eps, cotangent)
        v = x + along(scale, behind) * 0  # of the dtype of sums
        v = v - mean(v) if centered else v
        r = (mean(v * v) + eps) ** -0.5
        w = over_rows(weight[0]) if weight else 1
        n, c = v * r, cotangent * w

        def b(h: Any) -> Any:
            return r * ((h - mean(h) if centered else h) - n * mean(n * h))

        def by_x(h: Any) -> Any:
            on_c = b(c)
            return -r * (n * mean(h * on_c) + mean(n * c) * b(h) + mean(n * h) * on_c)

        return w, n, b, by_x

    @op.def_vjp
    def _(primals: Any, cotangents: Any, outputs: Any) -> Any:
        (h, *_), (w, _, b, by_x) = cotangents, at(primals)
        on_h = b(h)
        grads = [by_x(h), None, on_h * w]
        if len(primals) == 4:
            rows_axes = (0, *range(-behind, 0))
            grads.insert(1, _rows_first(on_h * primals[-1], behind).sum(axis=rows_axes))
        return tuple(grads)

    @op.def_jvp
    def _(primals: Any, tangents: Any, outputs: Any) -> Any:
        (dx, *dw, _, dc), (w, n, b, by_x) = tangents, at(primals)
        terms = [] if dx is None else [by_x(dx)]
        terms += [] if dc is None else [b(dc * w)]
        terms += [b(primals[-1] * over_rows(d)) for d in dw if d is not None]
        others = [None] * (len(outputs) - 1)
        if parts:
            dn = None if dx is None else b(dx)
            others = tangents_of_parts(n, dn, primals[-1], dc, outputs[1:], (-2,))
        return sum(terms), *others


def tangents_of_parts(n: Any, dn: Any, c: Any, dc: Any, parts: Any, axes: Any) -> list[Any]:
    """The tangents of parts ``[*B, P, N]`` of the sums of ``c n``, and perhaps of ``c``.

    What counts is their sum, so each part has the same share.

    Args:
        n, c: what was normed, and the cotangent.
        dn, dc: their tangents, or None.
        parts: the op's outputs.
        axes: of the rows.
    """
    dn, dc = (0 if each is None else each for each in (dn, dc))
    return [
        part * 0 + whole.sum(axis=axes)[..., None, :] / max(part.shape[-2], 1)
        for part, whole in zip(parts, (dc * n + c * dn, n * 0 + dc), strict=False)
    ]


def _rows_first(x: Any, behind: int) -> Any:
    """All axes in front of the rows' as one."""
    return x[None].flatten(0, -2 - behind)


def column_sums(
    x: Any, mean: Any, scale: Any, cotangent: Any, weight: Any, bias: Any, behind: int, wide: bool
) -> list[Any]:
    """The gradients of a weight and of a bias, of those of them that are not None.

    Args:
        x, cotangent: what was normed, and the cotangent of the result.
        mean, scale: of each row of ``x``; None for a mean that is not taken away.
        behind: how many axes are behind the rows'.
        wide: sums are made in float64.
    """

    def columns(array: Any, last: int) -> Any:
        """As [rows in front, …, rows behind]."""
        front = array[None].flatten(0, -last - behind)
        return front.flatten(-behind, -1) if behind else front[..., None]

    parts = _column_parts(mean is not None, wide)(
        columns(x, 2),
        *[columns(each, 1) for each in (mean, scale) if each is not None],
        columns(cotangent, 2),
    )
    total = sum_parts(wide)
    pairs = zip(parts, (weight, bias), strict=True)
    return [total(part, like) for part, like in pairs if like is not None]


@ferrule.family
def _column_parts(centered: bool, wide: bool) -> ferrule.Op:
    """The first step: each part of the rows (256 at most) is added up, one thread for a column.

    Rows are numbered through ``R``, in front of the columns, and then ``I``, behind them.
    """
    sum_dtype = "float64" if wide else "float32"
    op = ferrule.op(
        "norm_column_parts",
        f"x[*B,R,N,I]:T,{f' mean[*B,R,I]:{sum_dtype},' * centered} scale[*B,R,I]:{sum_dtype},"
        " cotangent[*B,R,N,I]:T"
        f" -> weights[*B,min(R*I,256),N]:{sum_dtype}, biases[*B,min(R*I,256),N]:{sum_dtype}"
        f" where T in {FLOATS}",
        metal=f"""
    const uint k = thread_position_in_grid.x, part = thread_position_in_grid.y;
    const size_t batch = thread_position_in_grid.z, many = size_t(R) * I;
    const size_t each = (many + metal::min(many, size_t(256)) - 1) / metal::min(many, size_t(256));
    const size_t end = metal::min((part + 1) * each, many);
    A weight = 0, bias = 0;
    for (size_t row = part * each; row < end; row++) {{
        const size_t i = ((batch * R + row / I) * N + k) * I + row % I, of = batch * many + row;
        const A c = A(cotangent[i]);
        weight += c * ((A(x[i]){" - mean[of]" * centered}) * scale[of]);
        bias += c;
    }}
    const size_t to = (batch * metal::min(many, size_t(256)) + part) * N + k;
    weights[to] = weight;
    biases[to] = bias;
""",
        grid=("N", "min(R * I, 256)", "x.size // max(R * N * I, 1)"),
        threadgroup=(256, 1, 1),
        template={"A": getattr(ferrule, sum_dtype)},
    )

    # The mean and the scale are constants to derivatives: what they change is in the part of x.
    @op.def_jvp
    def _(primals: Any, tangents: Any, outputs: Any) -> Any:
        (x, *mean, scale, cotangent), (dx, *_, dc) = primals, tangents
        r = scale[..., None, :]
        n, dn = (x - mean[0][..., None, :] if centered else x) * r, None
        if dx is not None:
            dn = dx - dx.mean(axis=-2, keepdims=True) if centered else dx
            dn = r * (dn - n * (n * dn).mean(axis=-2, keepdims=True))
        return tuple(tangents_of_parts(n, dn, cotangent, dc, outputs, (-3, -1)))

    return op


# A thread for each column: on the CPU threads go down columns side by side.
_EACH_ITS_OWN = """
    const uint k = thread_position_in_grid.x;
    const size_t batch = thread_position_in_grid.y, begin = batch * P * N;
    A sum = 0;
    for (size_t part = 0; part < size_t(P); part++) sum += parts[begin + part * N + k];
    sums[batch * N + k] = W(sum);
"""
_TOGETHER = """
    threadgroup A shared[32][32];
    const uint k = thread_position_in_grid.x, lane = thread_position_in_threadgroup.x;
    const uint first = thread_position_in_threadgroup.y;
    const size_t batch = thread_position_in_grid.z;
    A sum = 0;
    for (uint part = first; part < P; part += 32) sum += parts[(batch * P + part) * N + k];
    shared[first][lane] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (first == 0) {
        for (uint i = 1; i < 32; i++) sum += shared[i][lane];
        sums[batch * N + k] = W(sum);
    }
"""


@ferrule.family
def sum_parts(wide: bool) -> ferrule.Op:
    """The second step: the parts are added up. The weight says of which dtype the gradient is."""
    sum_dtype = "float64" if wide else "float32"
    many, template = "sums.size // max(N, 1)", {"A": getattr(ferrule, sum_dtype)}
    op = ferrule.op(
        "norm_sum_parts",
        f"parts[*B,P,N]:{sum_dtype}, weight[N]:W -> sums[*B,N]:W",
        metal=[
            ferrule.metal_body(
                _EACH_ITS_OWN,
                when="device == cpu",
                grid=("N", many),
                threadgroup=(256, 1),
                template=template,
            ),
            ferrule.metal_body(
                _TOGETHER, grid=("N", 32, many), threadgroup=(32, 32, 1), template=template
            ),
        ],
    )

    @op.def_jvp
    def _(primals: Any, tangents: Any, outputs: Any) -> Any:
        return op(tangents[0], primals[1])

    return op
