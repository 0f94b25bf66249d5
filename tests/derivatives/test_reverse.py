"""Reverse mode, derived from bodies: gradients are those of torch for a twin in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import ferrule
from derived_bodies import BODIES, NUMBERS, SIMD, Body, I, assert_close
from ferrule.errors import DialectError, KernelError
from test_forward import FUNCTIONS

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore:.*Apple's compiler")
TRIPS = {"returns and breaks": {"k": "3"}}


def gradients(twin: Callable[..., Any], primals: Any, cotangents: Any) -> Any:
    """torch's, in float64."""
    wide = [x.double().requires_grad_() for x in primals]
    outputs = twin(*wide)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    given = torch.autograd.grad(
        outputs, wide, [c.double() for c in cotangents], allow_unused=True
    )  # fmt: skip
    return [torch.zeros_like(x) if g is None else g for g, x in zip(given, wide, strict=True)]


def drawn(body: Body, *numbers: Any, seed: int = 1) -> tuple[Any, Any]:
    """Inputs and a cotangent."""
    generator = torch.Generator().manual_seed(seed)
    primals = tuple(torch.randn(*shape, generator=generator) for shape in body.shapes)
    return primals, torch.randn(*body.twin(*primals).shape, generator=generator)


def declared(name: str, body: Body) -> ferrule.Op:
    return ferrule.op(name.replace(" ", "_"), body.rule, metal=body.source, **body.more)


@pytest.mark.parametrize("name", BODIES)
def test_bodies(name: str) -> None:
    body = BODIES[name]
    op = declared(name, body)
    derived = op.derive_vjp(trips=TRIPS.get(name))
    primals, cotangent = drawn(body)
    numbers = NUMBERS.get(name, ())
    wanted = gradients(body.twin, primals, [cotangent])
    given = derived(*primals, *numbers, cotangent)
    for one, other in zip(given if isinstance(given, tuple) else (given,), wanted, strict=False):
        assert_close(one, other)
    # As the op's own rule, in float64 where the op takes that.
    for kind in (torch.float32, torch.float64) if ":T" in body.rule else (torch.float32,):
        own = [x.to(kind).requires_grad_() for x in primals]
        found = torch.autograd.grad(op(*own, *numbers), own, cotangent.to(kind))
        for one, other in zip(found, wanted, strict=True):
            assert one.dtype == kind
            assert_close(one, other)
    # Watched: no thread meets another at an element, and nothing is outside or not written.
    assert derived.check(*primals, *numbers, cotangent) == []


def test_functions() -> None:
    count, n = len(FUNCTIONS), 64
    body = I + "float a, b;\n" + "".join(
        f"a = x[{k} * N + i]; b = z[{k} * N + i];\ny[{k} * N + i] = {text};\n"
        for k, text in enumerate(FUNCTIONS)
    )  # fmt: skip
    op = ferrule.op(
        "functions",
        "x[F,N]:float32, z[F,N]:float32 -> y[F,N]:float32",
        metal=body,
        grid="N",
        threadgroup=64,
    )
    derived = op.derive_vjp()
    generator = torch.Generator().manual_seed(0)
    x, z, c = (torch.rand(count, n, generator=generator) for _ in range(3))
    for k, (_, ranges) in enumerate(FUNCTIONS.values()):
        for values, (low, high) in zip((x, z), ranges, strict=False):
            values[k] = low + values[k] * (high - low)
    given = derived(x, z, c)
    for k, (text, (function, ranges)) in enumerate(FUNCTIONS.items()):
        wanted = gradients(function, [x[k], z[k]][: len(ranges)], [c[k]])
        for one, other in zip((given[0][k], given[1][k]), wanted, strict=False):
            error = (one.double() - other).abs().max() / other.abs().max().clamp(min=1)
            assert error <= 5e-6, (text, float(error))


# Each lane's value is that of one lane of x * x, or several: as a matrix of which lane reads which.
LANES = {
    "simd_sum(v)": lambda i, j: 1.0,
    "simd_prefix_inclusive_sum(v)": lambda i, j: float(j <= i),
    "simd_prefix_exclusive_sum(v)": lambda i, j: float(j < i),
    "simd_broadcast(v, 3)": lambda i, j: float(j == 3),
    "simd_broadcast_first(v)": lambda i, j: float(j == 0),
    "simd_shuffle(v, (lane * 7 + 3) % 16)": lambda i, j: float(j == (i * 7 + 3) % 16),
    "simd_shuffle_xor(v, 5)": lambda i, j: float(j == i ^ 5),
    "simd_shuffle_down(v, 3)": lambda i, j: float(j == (i + 3 if i + 3 < 32 else i)),
    "simd_shuffle_up(v, 3)": lambda i, j: float(j == (i - 3 if i >= 3 else i)),
    "simd_shuffle_rotate_down(v, 3)": lambda i, j: float(j == (i + 3) % 32),
    "simd_shuffle_rotate_up(v, 3)": lambda i, j: float(j == (i - 3) % 32),
    "simd_shuffle_and_fill_up(v, 2 * v, 3)": lambda i, j: (
        1.0 * (j == i - 3) if i >= 3 else 2.0 * (j == i + 29)
    ),
    "simd_shuffle_and_fill_down(v, 2 * v, 3)": lambda i, j: (
        1.0 * (j == i + 3) if i + 3 < 32 else 2.0 * (j == i - 29)
    ),
}


def lanes_op(call: str) -> ferrule.Op:
    return ferrule.op(
        "lanes", "x[N]:float32 -> y[N]:float32", grid="N", threadgroup=32,
        metal=SIMD + f"float v = x[i] * x[i];\ny[i] = {call};",
    )  # fmt: skip


@pytest.mark.parametrize("call", LANES)
def test_lanes(call: str) -> None:
    op = lanes_op(call)
    op.derive_vjp()
    matrix = torch.tensor(
        [[LANES[call](i, j) for j in range(32)] for i in range(32)], dtype=torch.float64
    )
    x = torch.randn(32, generator=torch.Generator().manual_seed(3), requires_grad=True)
    c = torch.randn(32, generator=torch.Generator().manual_seed(4))
    assert_close(op(x.detach()), matrix @ (x * x).double())
    (given,) = torch.autograd.grad(op(x), x, c)
    assert_close(given, 2 * x.double() * (matrix.T @ c.double()))


MORE = {
    "tree of shuffles": Body(
        "x[N]:float32 -> y[N]:float32",
        SIMD + "float v = x[i] * x[i];\nfor (uint s = 16; s > 0; s >>= 1) "
        "v = v * 0.9f + simd_shuffle_down(v, s);\ny[i] = v * v;",
        lambda x: _tree(x),
        ((64,),),
        {"grid": "N", "threadgroup": 32},
    ),
    "a part of a simdgroup": Body(
        "x[N]:float32 -> y[N]:float32",
        I + "uint lane = thread_index_in_simdgroup;\nfloat v = x[i] * x[i];\n"
        "float w = simd_shuffle_xor(v, 1), u = simd_shuffle_up(v, 2);\n"
        "y[i] = simd_sum(v) * v + (lane % 2 == 0 && i + 1 < N || lane % 2 == 1 ? w : 0.0f) + u;",
        lambda x: _partly(x),
        ((41,),),
        {"grid": "N", "threadgroup": 41},
    ),
    "a maximum on the way": Body(
        "x[R,N]:float32 -> y[R]:float32",
        I + "float m = -1e30f, s = 0;\nfor (int k = 0; k < N; ++k) { float v = x[i * N + k]; "
        "float before = m; if (v > m) m = v; s = s * exp(before - m) + exp(v - m); }\n"
        "y[i] = m + log(s);",
        lambda x: torch.logsumexp(x, 1),
        ((5, 9),),
        {"grid": "R", "threadgroup": 4},
    ),
    "a tile in threadgroup memory": Body(
        "a[M,K]:float32, b[K,N]:float32 -> c[M,N]:float32",
        """
        threadgroup float left[8][8];
        threadgroup float right[8][8];
        uint col = thread_position_in_grid.x, row = thread_position_in_grid.y;
        uint tx = thread_position_in_threadgroup.x, ty = thread_position_in_threadgroup.y;
        float sum = 0;
        for (int k0 = 0; k0 < K; k0 += 8) {
          left[ty][tx] = a[row * K + k0 + tx];
          right[ty][tx] = b[(k0 + ty) * N + col];
          threadgroup_barrier(mem_flags::mem_threadgroup);
          for (int k = 0; k < 8; ++k) sum += left[ty][k] * right[k][tx];
          threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        c[row * N + col] = sum;
        """,
        lambda a, b: a @ b,
        ((16, 24), (24, 8)),
        {"grid": ("N", "M", "1"), "threadgroup": ("8", "8", "1")},
    ),
    "vectors in threadgroup memory": Body(
        "x[N,4]:float32 -> y[N,4]:float32",
        """
        threadgroup float4 t[32];
        uint i = thread_position_in_grid.x, lane = thread_position_in_threadgroup.x;
        t[lane] = float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float4 v = t[31 - lane] * t[lane];
        y[4 * i] = v.x; y[4 * i + 1] = v.y; y[4 * i + 2] = v.z; y[4 * i + 3] = v.w;
        """,
        lambda x: x * x.flip(0),
        ((32, 4),),
        {"grid": "N", "threadgroup": 32},
    ),
    "stores in rounds": Body(
        "x[R,D]:float32 -> y[R,D]:float32",
        """
        uint row = thread_position_in_grid.x / 32, lane = thread_index_in_simdgroup;
        float m = -INFINITY, s = 0;
        for (uint k = lane; k < D; k += 32) m = max(m, x[row * D + k]);
        m = simd_max(m);
        for (uint k = lane; k < D; k += 32) s += exp(x[row * D + k] - m);
        s = simd_sum(s);
        for (uint k = lane; k < D; k += 32) y[row * D + k] = exp(x[row * D + k] - m) / s;
        """,
        lambda x: torch.softmax(x, 1),
        ((6, 70),),
        {"grid": "R*32", "threadgroup": 64},
    ),
    "a guarded sum": Body(
        "x[R,D]:float32 -> y[R,D]:float32, n[R]:int32",
        """
        constexpr int SIZE = 4;
        threadgroup float part[SIZE / 2];
        uint row = threadgroup_position_in_grid.x, t = thread_position_in_threadgroup.x;
        float sum = 0;
        for (int i = 0; i < (D + 63) / 64; ++i) {
          int d = t + i * 64;
          if (d < D) sum = sum * 0.5f + x[row * D + d];
        }
        sum = simd_sum(sum);
        if (thread_index_in_simdgroup == 0) part[simdgroup_index_in_threadgroup] = sum;
        if (t == 0) n[row] = 3;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int i = 0; i < (D + 63) / 64; ++i) {
          int d = t + i * 64;
          if (d < D) y[row * D + d] = x[row * D + d] * (part[0] + part[1]);
        }
        """,
        lambda x: _guarded(x),
        ((3, 150),),
        {"grid": "R*64", "threadgroup": 64},
    ),
    "a counter that goes on": Body(
        "x[N]:float32 -> y[N]:float32",
        I + "float h = x[i];\nint k = 0;\nfor (int t = 0; t < 2; ++t) {\n  int first = k;\n"
        "  for (k = first; k < 2 * t + 2; ++k) h += x[i] * x[i] * (k + 1);\n}\n"
        "int j = 0;\nfor (j = 3; j < 5; ++j) h = h * h * 0.1f + j;\ny[i] = h * j;",
        lambda x: _going_on(x),
        ((9,),),
        {"grid": "N", "threadgroup": 4},
    ),
    "counting down": Body(
        "x[L,N]:float32 -> y[N]:float32",
        I + "float h = 0;\nfor (int t = L - 1; t >= 0; --t) h = tanh(h + x[t * N + i]);\ny[i] = h;",
        lambda x: _down(x),
        ((6, 9),),
        {"grid": "N", "threadgroup": 4},
    ),
    "copies that are changed": Body(
        "x[N,3]:float32 -> y[N]:float32",
        I + "float a[3], s = 1;\nfor (int k = 0; k < 3; ++k) a[k] = x[3 * i + k];\n"
        "for (int k = 0; k < 3; ++k) s *= a[k] + s;\n"
        "for (int k = 0; k < 3; ++k) a[k] = s * a[k];\ny[i] = a[0] * a[1] + a[2];",
        lambda x: _changed(x),
        ((7, 3),),
        {"grid": "N", "threadgroup": 4},
    ),
}


def _tree(x: Any) -> Any:
    v = (x * x).reshape(-1, 32)
    for s in (16, 8, 4, 2, 1):
        at = [i + s if i + s < 32 else i for i in range(32)]
        v = v * 0.9 + v[:, at]
    return (v * v).reshape(-1)


def _partly(x: Any) -> Any:
    v, out = x * x, []
    for i in range(len(x)):
        first = i // 32 * 32
        group = v[first : first + 32]
        lane = i - first
        there = i ^ 1
        w = v[there] if there < len(x) else 0
        u = v[i - 2] if lane >= 2 else v[i]
        out.append(group.sum() * v[i] + w + u)
    return torch.stack(out)


def _guarded(x: Any) -> Any:
    rows = torch.cat([x, torch.zeros_like(x[:, :42])], 1).reshape(3, 3, 64)
    sums = rows[:, 0] * 0.25 + rows[:, 1] * 0.5 + rows[:, 2]
    sums = torch.cat([sums[:, :22], rows[:, 0, 22:] * 0.5 + rows[:, 1, 22:]], 1)
    return x * sums.sum(1, keepdim=True)


def _going_on(x: Any) -> Any:
    h = x
    for k in range(4):
        h = h + x * x * (k + 1)
    for j in (3, 4):
        h = h * h * 0.1 + j
    return h * 5


def _down(x: Any) -> Any:
    h = torch.zeros_like(x[0])
    for row in x.flip(0):
        h = torch.tanh(h + row)
    return h


def _changed(x: Any) -> Any:
    s = torch.ones_like(x[:, 0])
    for k in range(3):
        s = s * (x[:, k] + s)
    a = s[:, None] * x
    return a[:, 0] * a[:, 1] + a[:, 2]


@pytest.mark.parametrize("name", MORE)
def test_more_bodies(name: str) -> None:
    body = MORE[name]
    op = declared(name, body)
    derived = op.derive_vjp()
    primals, cotangent = drawn(body)
    values = op(*primals)
    values = values[0] if isinstance(values, tuple) else values
    assert_close(values, body.twin(*(x.double() for x in primals)), 1e-5)
    given = derived(*primals, cotangent)
    wanted = gradients(body.twin, primals, [cotangent])
    for one, other in zip(given if isinstance(given, tuple) else (given,), wanted, strict=False):
        assert_close(one, other, 1e-5)
    assert derived.check(*primals, cotangent) == []


def test_half_is_as_exact_as_its_values() -> None:
    body = BODIES["rows"]
    source = body.source.replace("T(x[row * D + i] * inv) * w[i]", "T(x[row * D + i] * inv * w[i])")
    op = declared("rows_half", body._replace(source=source))
    op.derive_vjp()
    (x, w), c = drawn(body)
    for kind in (torch.float16, torch.bfloat16):
        values = [v.to(kind) for v in (x, w, c)]
        own = [v.clone().requires_grad_() for v in values[:2]]
        given = torch.autograd.grad(op(*own, 1e-5), own, values[2])
        twins = [v.clone().requires_grad_() for v in values[:2]]
        theirs = torch.autograd.grad(
            torch.nn.functional.rms_norm(twins[0], (100,), twins[1], 1e-5), twins, values[2]
        )
        wanted = gradients(body.twin, values[:2], values[2:])
        for one, other, exact in zip(given, theirs, wanted, strict=True):
            errors = [float((e.double() - exact).abs().max()) for e in (one, other)]
            assert one.dtype == kind
            assert errors[0] <= 2 * errors[1] + 1e-7, errors


def test_a_subset_of_inputs() -> None:
    body = BODIES["rows"]
    op = declared("rows_some", body)
    derived = op.derive_vjp(wrt=["w"])
    (x, w), c = drawn(body)
    wanted = gradients(body.twin, (x, w), [c])
    assert [a.name for a in derived.rule.declared] == ["w_grad"]
    assert_close(derived(x, w, 1e-5, c), wanted[1])


def test_a_rule_by_hand_wins() -> None:
    op = ferrule.op("twice", "x[N]:float32 -> y[N]:float32", metal=I + "y[i] = 2 * x[i];", grid="N",
                     threadgroup=64)  # fmt: skip
    op.def_vjp(lambda primals, cotangents, outputs: (5 * cotangents[0],), version=1)
    derived = op.derive_vjp()
    x = torch.ones(3, requires_grad=True)
    assert torch.autograd.grad(op(x).sum(), x)[0].tolist() == [5, 5, 5]
    assert derived(x.detach(), torch.ones(3)).tolist() == [2, 2, 2]


SCAN = I + "float h = 0;\nfor (int t = 0; t < L; ++t) { h = tanh(h + x[t * N + i]); }\ny[i] = h;"


def test_a_tape_larger_than_its_limit_is_refused() -> None:
    op = ferrule.op("scan", "x[L,N]:float32 -> y[N]:float32", metal=SCAN, grid="N", threadgroup=64)
    derived = op.derive_vjp(tape_limit="4KB")
    x, c = torch.randn(16, 64), torch.randn(64)
    derived(x, c)
    with pytest.raises(KernelError, match=r"L \* N <= 1024"):
        derived(torch.randn(17, 64), c)
    with pytest.raises(KernelError, match=r"tape_limit.*got 'much'"):
        op.derive_vjp(tape_limit="much")


COUNTED = I + (
    "float h = x[i];\nint t = 0;\nwhile (h < 3.0f) { h = h * h + 0.5f; ++t; }\ny[i] = h;"
)


def test_rounds_that_data_decide() -> None:
    op = ferrule.op("counted", "x[N]:float32 -> y[N]:float32", metal=COUNTED, grid="N",
                     threadgroup=64)  # fmt: skip
    with pytest.raises(DialectError, match=r'(?s)source line 4: a loop whose number.*trips=\{"t"'):
        op.derive_vjp()
    x, c = torch.tensor([0.1, 0.9, 1.5, 4.0]), torch.ones(4)

    def twin(x: Any) -> Any:
        out = []
        for h in x:
            while h < 3:
                h = h * h + 0.5
            out.append(h)
        return torch.stack(out)

    (wanted,) = gradients(twin, [x], [c])
    assert_close(op.derive_vjp(trips={"t": "9"})(x, c), wanted)
    # A bound that is too small is not believed: what would be lost is NaN.
    few = op.derive_vjp(trips={"t": "2"})(x, c)
    assert few.isnan().tolist() == [True, True, False, False]
    assert_close(few[2:], wanted[2:])


REFUSED = {
    "all lanes store": (
        "y[0] = x[i];", r"line 2: output y, which several threads .*thread_position_in_grid.x",
    ),
    "two stores": ("y[i] = x[i];\ny[i] = 2 * x[i];", r"line 3: output y.*lines 2 and 3"),
    "rounds store": (
        "for (int k = 0; k < 2; ++k) y[i] = k * x[i];", r"line 2: output y.*rounds of a loop",
    ),
    "an index of data": ("y[int(x[i])] = x[i];", r"line 2: output y.*not a sum of strides"),
    "a product of lanes": ("y[i] = simd_product(x[i]);", r"line 2: simd_product"),
    "an exchange": (
        "threadgroup float t[32];\nfloat h = 0;\nfor (int k = 0; k < 3; ++k) "
        "{ h += t[(i + k) % 32] * x[i]; t[i] = h; }\ny[i] = h;",
        r"line 4: a loop that needs what the threadgroup array t held",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refusals(what: str) -> None:
    source, message = REFUSED[what]
    op = ferrule.op(
        "refused", "x[N]:float32 -> y[N]:float32", metal=I + source, grid="N", threadgroup=32
    )
    with pytest.raises(DialectError, match=message):
        op.derive_vjp()


@pytest.mark.parametrize("name", ["rows", "vectors", "lanes", "added atomically"])
def test_second_derivatives(name: str) -> None:
    body = BODIES[name]
    op = declared(f"{name} twice", body)
    op.derive_vjp().derive_vjp()
    numbers = NUMBERS.get(name, ())
    primals, _ = drawn(body)

    def second(function: Callable[..., Any], xs: Any) -> Any:
        first = torch.autograd.grad((function(*xs) ** 2).sum(), xs, create_graph=True)
        return torch.autograd.grad(sum((g * g).sum() for g in first), xs)

    given = second(lambda *xs: op(*xs, *numbers), [x.clone().requires_grad_() for x in primals])
    wanted = second(body.twin, [x.double().requires_grad_() for x in primals])
    for one, other in zip(given, wanted, strict=True):
        assert_close(one, other)


def test_a_launch_of_an_output_s_size() -> None:
    op = ferrule.op(
        "squares", "x[N,M]:float32 -> y[N,M]:float32", metal=I + "y[i] = x[i] * x[i];",
        grid="y.size", threadgroup="min(64, y.size)",
    )  # fmt: skip
    op.derive_vjp()
    op.derive_jvp()
    x = torch.randn(3, 5, requires_grad=True)
    assert_close(torch.autograd.grad(op(x).sum(), x)[0], 2 * x.double())
    assert_close(torch.func.jvp(op, (x,), (torch.ones_like(x),))[1], 2 * x.double())
