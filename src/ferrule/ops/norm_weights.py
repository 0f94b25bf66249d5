"""The gradients of norms of rows along the last axis, with a weight: read once, for all of them.

Each threadgroup takes some of the rows, and adds up what they give to the gradients of weight and
bias as it goes: its part of the sums. A second op adds the parts.
"""

from __future__ import annotations

from typing import Any

import ferrule

from .norm_grads import (
    column_sums,
    define_derivatives,
    layer_norm_x_grad,
    rms_norm_x_grad,
    sum_parts,
)
from .norm_weights_cuda import LAYER_NORM, RMS_NORM, bodies
from .rows import FLOATS, SIDE_BY_SIDE, on_cpu, side_by_side

# How many parts there are, for rules and for bodies: enough to keep a GPU reading, few enough to
# add them up in no time, and no more than an H100 has at work at once. Processors need few.
_PARTS = (
    "min(R, max(min((524288 if T == float32 else 1048576) // max(N, 1), 2048), 128))",
    """
    const int some = (sizeof(T) == 4 ? 524288 : 1048576) / max(int(N), 1);
    const int most = some < 128 ? 128 : some < 2048 ? some : 2048, parts = R < most ? R : most;
""",
)
_FEW_PARTS = (
    "min(R, max(min(R * N // 32768, 64), 1))",
    """
    const long some = long(R) * N / 32768, most = some < 1 ? 1 : some < 64 ? some : 64;
    const int parts = R < most ? R : int(most);
""",
)


def norm_gradients(
    centered: bool,
    x: Any,
    weight: Any,
    bias: Any,
    eps: Any,
    cotangent: Any,
    summed: bool,
    behind: int,
    wide: bool,
) -> list[Any]:
    """The gradients by ``x``, and by those of ``weight`` and ``bias`` that are not None.

    Args:
        centered: of layer_norm; else of rms_norm.
        x, weight, bias, eps: what was normed, and the norm's inputs.
        cotangent: of the result.
        summed: whether more than the gradient by ``x`` is wanted; else the others are None.
        behind: how many axes are behind the rows'.
        wide: sums are made in float64.
    """
    likes = [like for like in (weight, bias) if like is not None]
    if weight is None or behind or not summed:
        gradient = (layer_norm_x_grad if centered else rms_norm_x_grad)(
            behind, weight is not None, wide
        )
        x_grad, *of_rows = gradient(x, *[weight] * (weight is not None), eps, cotangent)
        if not summed:
            return [x_grad, *[None] * len(likes)]
        mean = of_rows[0] if centered else None
        return [x_grad, *column_sums(x, mean, of_rows[-1], cotangent, weight, bias, behind, wide)]
    flat = x.ndim == 2  # views take longer than a small kernel
    of_x, of_y = (array if flat else array[None].flatten(0, -2) for array in (x, cotangent))
    x_grad, *parts = _gradients(centered, wide, on_cpu(x))(of_x, weight, eps, of_y)
    total = sum_parts(wide)
    sums = [total(part, like) for part, like in zip(parts, likes, strict=False)]
    return [x_grad if flat else x_grad.reshape(x.shape), *sums]


_RMS_NORM = """
        A squares = 0, along = 0;
        for (uint k = first; k < N; k += step) {
            A v = A(x[begin + k]);
            squares += v * v;
            along += v * (A(cotangent[begin + k]) * A(weight[k]));
        }
        const A r = metal::rsqrt(SUM(squares) / N + A(eps));
        const A drawn = SUM(along) / N * r * r;
        for (uint k = first; k < N; k += step) {
            const A c = A(cotangent[begin + k]), v = A(x[begin + k]);
            x_grad[begin + k] = T((c * A(weight[k]) - v * drawn) * r);
            of_weight[k] += c * (v * r);
        }
"""
_LAYER_NORM = """
        A sum = 0, shift = 0;
        for (uint k = first; k < N; k += step) {
            sum += A(x[begin + k]);
            shift += A(cotangent[begin + k]) * A(weight[k]);
            of_bias[k] += A(cotangent[begin + k]);
        }
        const A m = SUM(sum) / N;
        shift = SUM(shift) / N;
        A squares = 0, along = 0;
        for (uint k = first; k < N; k += step) {
            A v = A(x[begin + k]) - m;
            squares += v * v;
            along += v * (A(cotangent[begin + k]) * A(weight[k]));
        }
        const A r = metal::rsqrt(SUM(squares) / N + A(eps));
        const A drawn = SUM(along) / N * r * r;
        for (uint k = first; k < N; k += step) {
            const A c = A(cotangent[begin + k]), v = A(x[begin + k]) - m;
            x_grad[begin + k] = T((c * A(weight[k]) - shift - v * drawn) * r);
            of_weight[k] += c * (v * r);
        }
"""


@ferrule.family
def _gradients(centered: bool, wide: bool, few: bool) -> ferrule.Op:
    """``x, weight, eps, cotangent -> x_grad``, and parts of the gradients of weight and bias."""
    many, count_parts = _FEW_PARTS if few else _PARTS
    groups = f"{many} * (x.size // max(R * N, 1))"
    sums = ["weight", "bias"][: 1 + centered]
    sum_dtype = "float64" if wide else "float32"
    where = "size_t(threadgroup_position_in_grid.y)"
    starts = "".join(f"    device A* of_{name} = {name}_parts + {where} * N;\n" for name in sums)
    zeros = " ".join(f"of_{name}[k] = 0;" for name in sums)
    op = ferrule.op(
        "layer_norm_gradients" if centered else "rms_norm_gradients",
        f"x[*B,R,N]:T, weight[N]:W, eps:{sum_dtype}, cotangent[*B,R,N]:T -> x_grad[*B,R,N]:T"
        + "".join(f", {name}_parts[*B,{many},N]:{sum_dtype}" for name in sums)
        + f" where T in {FLOATS}",
        metal=f"""{SIDE_BY_SIDE}{count_parts}
    const uint part = threadgroup_position_in_grid.y % parts, each = (uint(R) + parts - 1) / parts;
    const uint end = metal::min((part + 1) * each, uint(R));
    const size_t batch = threadgroup_position_in_grid.y / parts;
{starts}
    for (uint k = first; k < N; k += step) {{ {zeros} }}
    for (uint row = part * each; row < end; ++row) {{
        const size_t begin = (batch * R + row) * N;
{_LAYER_NORM if centered else _RMS_NORM}
    }}
""",
        cuda=None
        if wide
        else bodies(count_parts, LAYER_NORM if centered else RMS_NORM, sums, groups),
        template={"A": getattr(ferrule, sum_dtype)},
        **side_by_side(groups),
    )

    alone = (layer_norm_x_grad if centered else rms_norm_x_grad)(0, False, wide)
    define_derivatives(op, alone, 0, centered, parts=True)
    return op
