"""Bodies of which a gradient would be wrong if one thing were overlooked: it is right, or refused.

Gradients are those of central differences of the op itself, in float64; additions are watched.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

import ferrule
from derived_bodies import SIMD, I
from ferrule.errors import DialectError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore:.*Apple's compiler")
ONE, TWO = "x[N]:T -> y[N]:T", "x[N]:T, w[N]:T -> y[N]:T"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"


class Case(NamedTuple):
    """A body; refused where it says with which words."""

    rule: str
    source: str
    shapes: tuple[tuple[int, ...], ...]
    refused: str = ""
    trips: dict[str, str] | None = None
    more: dict[str, Any] = {}  # noqa: RUF012


CASES = {
    "a counter that begins anew": Case(
        ONE, I + "int k = 9; T h = x[i];\nfor (k = 1; k <= 3; k += 2) h = sin(h * x[k]) + k;\n"
        "y[i] = h * k;", ((4,),),
    ),
    "a counter that an outer loop changes": Case(
        ONE, I + "int j = 0; T h = x[i];\nfor (int k = 0; k < 3; ++k) { while (j < 4) "
        "{ h = h * (x[i] + T(0.1) * j); ++j; } j = 1; }\ny[i] = h;", ((4,),), trips={"j": "4"},
    ),
    "halving that does not end": Case(
        ONE, I + "int k = 0; T h = x[i];\nfor (uint s = 8; s > 0 || k < 60; s >>= 1) "
        "{ h = tanh(h + x[i]); ++k; }\ny[i] = h;", ((4,),), "whose number of rounds",
    ),
    "fewer rounds than none": Case(
        "x[N]:T, w[M]:T -> y[N]:T", I + "T h = x[i];\nfor (int k = 7; k < N; ++k) "
        "h = sin(h * x[k]);\nfor (int k = 0; k < M; ++k) h = sin(h + w[k]) * h;\ny[i] = h;",
        ((4,), (20,)),
    ),
    "a maximum of lanes, and of two": Case(
        TWO, I + "y[i] = max(simd_max(x[i]) - 1.5f, w[i]);", ((32,), (32,)),
    ),
    "a function of a sum of lanes": Case(
        TWO, I + "y[i] = fmax(exp(simd_sum(x[i]) * 0.1f) * 2.0f, 3 * w[i]);", ((32,), (32,)),
    ),
    "a clamp whose ends are crossed": Case(
        TWO, I + "y[i] = clamp(simd_sum(x[i]) * 0.1f, w[i], 0.5f);", ((32,), (32,)),
    ),
    "all lanes store a sum": Case(
        ONE, SIMD + "threadgroup T t[1];\nt[0] = simd_sum(x[i] * x[i]);\n" + BARRIER
        + "y[i] = t[0] * x[i];", ((32,),), "the threadgroup array t",
    ),
    "some lanes store a sum": Case(
        ONE, SIMD + "threadgroup T t[8];\nt[lane / 4] = quad_sum(x[i] * x[i]);\n" + BARRIER
        + "y[i] = t[lane % 8] * x[i];", ((32,),), "the threadgroup array t",
    ),
    "a narrow index": Case(ONE, I + "uchar k = i;\ny[i] = x[k] * 2.0f;", ((512,),)),
    "a narrow condition": Case(
        "x[N]:T, s[M]:T -> y[N]:T",
        I + "T v = x[i];\nif (uchar(i) == 0) v = v * s[0];\ny[i] = v;", ((512,), (3,)),
    ),
    "an index that wraps": Case(
        ONE, I + "uint k = (i * 67108864u) >> 26;\ny[i] = x[k] * 2.0f;", ((128,),),
    ),
    "an index that lanes count": Case(
        ONE, I + "uint k = simd_prefix_exclusive_sum(1u);\ny[i] = x[k] * x[i] * x[N - 1];",
        ((32,),),
    ),
    "lanes of odd threadgroups": Case(
        ONE, SIMD + "uint k = i / 32 * 32 + lane;\nif (k < N) y[i] = x[k] * 2.0f;", ((96,),),
        more={"threadgroup": 48, "init_value": 0},
    ),
    "a number over a sum": Case(
        ONE, I + "y[i] += x[i];\ny[i] = 1.0f;", ((4,),), "may store to one element",
        more={"init_value": 0},
    ),
    "a number over some sums": Case(
        ONE, I + "y[i] += x[i];\nif (i < 4) y[i] = 0;", ((8,),), "may store to one element",
        more={"init_value": 0},
    ),
    "what is no number": Case(TWO, I + "y[i] = fmax(log(x[i]), w[i]);", ((8,), (8,))),
    "no number where it is not taken": Case(
        ONE, I + "y[i] = (x[i] > 0 ? log(x[i]) : T(0)) + select(sqrt(x[i]), T(0), x[i] <= 0);",
        ((40,),),
    ),
    "shuffles that lanes choose": Case(
        ONE, SIMD + "T v = x[i] * x[i];\ny[i] = simd_shuffle_xor(v, lane) * v + "
        "simd_shuffle_down(v, lane % 3) + 2 * simd_shuffle_rotate_up(v, lane % 5) - "
        "simd_shuffle_up(v, lane % 2) * v;", ((32,),),
    ),
    "vectors, lane by lane": Case(
        "x[N,4]:T -> y[N]:T",
        I + "vec<T, 4> v = vec<T, 4>(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);\n"
        "vec<T, 4> a = clamp(v, T(-0.5), T(0.5)), b = saturate(v);\n"
        "vec<T, 4> c = pow(abs(v) + T(0.1), v.yxwz);\n"
        "y[i] = a.x + b.y * c.z + a.w * c.x + max(v, v.wzyx).y;",
        ((6, 4),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_is_right_or_refused(name: str) -> None:
    case = CASES[name]
    more = {"grid": "N", "threadgroup": 32, **case.more}
    op = ferrule.op("hostile", case.rule, metal=case.source, **more)
    if case.refused:
        with pytest.raises(DialectError, match=case.refused):
            op.derive_vjp(trips=case.trips)
        return
    derived = op.derive_vjp(trips=case.trips)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    primals = [draw(*shape).requires_grad_() for shape in case.shapes]
    values = op(*primals)
    cotangent = draw(*values.shape)
    given = torch.autograd.grad(values, primals, cotangent)
    for _ in range(3):
        along = [draw(*shape) for shape in case.shapes]
        ends = [
            op(*(x.detach() + step * v for x, v in zip(primals, along, strict=True)))
            for step in (1e-6, -1e-6)
        ]
        difference = (cotangent * (ends[0] - ends[1])).nan_to_num().sum() / 2e-6
        terms = torch.cat([(g * v).flatten() for g, v in zip(given, along, strict=True)])
        scale = terms.abs().sum() + abs(difference) + 1e-3
        assert abs(terms.sum() - difference) < 1e-5 * scale, case.source
    small = [x.detach().float() for x in (*primals, cotangent)]
    assert [f for f in derived.check(*small) if f.kind != "nan"] == []
