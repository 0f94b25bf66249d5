"""MLX's own utilities, which every body sees, against models of what they are documented to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from metal_harness import KINDS, Array, Slots, bfloat16, run

f32 = np.float32


def strided(shape: tuple[int, ...], order: tuple[int, ...], step: int = 1) -> Array:
    """An array whose axes lie in memory in another order, every `step`-th element of it."""
    base = np.arange(int(np.prod(shape)) * step, dtype=f32)
    at = [shape[k] for k in order]
    return np.asarray(base[::step].reshape(at).transpose(np.argsort(order)))


LAYOUTS = [
    ((4, 3), (1, 0), 1),
    ((2, 3, 4), (2, 0, 1), 1),
    ((3, 1, 5, 2), (3, 1, 0, 2), 2),
    ((7,), (0,), 3),
    ((2, 2, 2, 2, 3), (4, 2, 0, 1, 3), 1),
]


@pytest.mark.parametrize("kind", ["auto", "64", "32"])
def test_elem_to_loc(kind: str) -> None:
    text = {"auto": "elem_to_loc(i, a_shape, a_strides, a_ndim)",
     "64": "elem_to_loc<int64_t>(i, a_shape, a_strides, a_ndim)",
            "32": "elem_to_loc<uint>(i, a_shape, a_strides, a_ndim)"}[kind]  # fmt: skip
    body = f"""
    uint i = thread_position_in_grid.x;
    auto loc = {text};
    y[i] = a[loc] * 2 + a_ndim;
    z[i] = sizeof(loc);
    """
    for shape, order, step in LAYOUTS:
        a = strided(shape, order, step)
        assert a.shape == shape
        outs: dict[str, Any] = {"y": ("float", shape), "z": ("uint", shape)}
        out = run(body, {"a": a}, outs, a.size, 32, ensure_row_contiguous=False)
        assert (out["y"] == a * 2 + len(shape)).all()
        assert (out["z"] == {"auto": 4, "64": 8, "32": 4}[kind]).all()


def test_elem_to_loc_of_positions_and_several_arrays() -> None:
    body = """
    uint3 p = thread_position_in_grid;
    uint i = p.x + threads_per_grid.x * (p.y + threads_per_grid.y * p.z);
    y[i] = a[elem_to_loc(p, a_shape, a_strides, a_ndim)];
    auto two = elem_to_loc_2_nd(p, a_shape, a_strides, b_strides, a_ndim);
    y[i + n] = a[two.x] * 1000 + b[two.y];
    vec<int64_t, 3> three = elem_to_loc_3_nd(p, a_shape, a_strides, b_strides, c_strides, a_ndim);
    y[i + 2 * n] = a[three.x] + b[three.y] * 1000 + c[three.z] * 7;
    auto small = elem_to_loc_3_nd<uint>(p, a_shape, a_strides, b_strides, c_strides, a_ndim);
    y[i + 3 * n] = float(small.z == uint(three.z)) + sizeof(small.x);
    """
    for shape, orders in [
        ((2, 3, 4), [(2, 0, 1), (0, 1, 2), (1, 2, 0)]),
        ((2, 3, 4, 5), [(3, 1, 0, 2), (0, 1, 2, 3), (2, 3, 0, 1)]),
    ]:
        a, b, c = (strided(shape, order) for order in orders)
        n = a.size
        grid = (shape[-1], shape[-2], int(np.prod(shape[:-2])))
        inputs = {"a": a, "b": b, "c": c, "n": np.array(n, np.uint32)}
        y = run(
            body,
            inputs,
            {"y": ("float", (4, *shape))},
            grid,
            (4, 2, 2),
            ensure_row_contiguous=False,
        )["y"]
        assert (y[0] == a).all()
        assert (y[1] == a * 1000 + b).all()
        assert (y[2] == a + b * 1000 + c * 7).all()
        assert (y[3] == 5).all()


def test_elem_to_loc_of_fixed_ranks() -> None:
    body = """
    uint3 p = thread_position_in_grid;
    uint i = p.x + 4 * (p.y + 3 * p.z);
    y[i] = a[elem_to_loc_3(p, a_strides)];
    y[i + 24] = m[elem_to_loc_2(p.xy, m_strides)];
    y[i + 48] = v[elem_to_loc_1(p.x, v_strides[0])];
    y[i + 72] = v[elem_to_loc_1<uint>(p.x, v_strides[0])] + a[elem_to_loc_3<int>(p, a_strides)];
    """
    a, m, v = strided((2, 3, 4), (1, 2, 0)), strided((3, 4), (1, 0)), strided((4,), (0,), 3)
    y = run(body, {"a": a, "m": m, "v": v}, {"y": ("float", (4, 2, 3, 4))}, (4, 3, 2), (4, 3, 2),
            ensure_row_contiguous=False)["y"]  # fmt: skip
    assert (y[0] == a).all()
    assert (y[1] == m).all()
    assert (y[2] == v).all()
    assert (y[3] == v + a).all()


@pytest.mark.parametrize("dim", [1, 2, 3, 4])
def test_looped_elem_to_loc(dim: int) -> None:
    body = """
    LoopedElemToLoc<D> loop(a_ndim);
    LoopedElemToLoc<D, uint> narrow(a_ndim);
    LoopedElemToLoc<D, int64_t, true> jump(a_ndim);
    int n = 1;
    for (int k = 0; k < a_ndim; ++k) n *= a_shape[k];
    for (int k = 0; k < n; ++k) {
        y[k] = a[loop.location()];
        y[k + n] = a[narrow.location()];
        loop.next(a_shape, a_strides);
        narrow.next(a_shape, a_strides);
    }
    int at = 0;
    for (int k = 1; at < n; k = k % 5 + 1) {
        y[at + 2 * n] = a[jump.location()];
        jump.next(k, a_shape, a_strides);
        at += k;
    }
    """
    for shape, order, step in LAYOUTS:
        if len(shape) < dim or (dim == 1 and len(shape) > 3):
            continue
        a = strided(shape, order, step)
        # DIM = 1 walks any number of axes with elem_to_loc; else it is the number of axes.
        if dim > 1 and len(shape) != dim:
            continue
        y = run(body, {"a": a}, {"y": ("float", (3, *shape))}, 1, 1, ensure_row_contiguous=False,
                template=[("D", dim)], init_value=-1)["y"]  # fmt: skip
        assert (y[0] == a).all()
        assert (y[1] == a).all()
        at, k = 0, 1
        while at < a.size:
            assert y[2].ravel()[at] == a.ravel()[at], (shape, at)
            at, k = at + k, k % 5 + 1


def test_looped_elem_to_loc_of_a_vector_that_is_not_general() -> None:
    body = """
    LoopedElemToLoc<1, size_t, false> loop(1);
    y[0] = a[loop.location()];
    loop.next(a_shape, a_strides); y[1] = a[loop.location()];
    loop.next(3, a_shape, a_strides); y[2] = a[loop.location()];
    """
    a = strided((9,), (0,), 2)
    y = run(body, {"a": a}, {"y": ("float", (3,))}, 1, 1, ensure_row_contiguous=False)["y"]
    assert (y == a[[0, 1, 4]]).all()


def test_limits_and_work_per_thread() -> None:
    s = Slots()
    for kind in ("char", "uchar", "short", "ushort", "int", "uint", "long", "ulong"):
        info = np.iinfo(KINDS[kind])
        for member, value in [
            ("max", info.max),
            ("min", info.min),
            ("finite_max", info.max),
            ("finite_min", info.min),
        ]:
            s.expr(kind, f"Limits<{kind}>::{member}", np.array(value, KINDS[kind]))
    s.expr("long", "Limits<int64_t>::min", np.iinfo(np.int64).min)
    s.expr("uchar", "Limits<uint8_t>::max", 255)
    largest = {"float": np.finfo(f32).max, "half": 65504.0, "bfloat": (2 - 2.0**-7) * 2.0**127}
    for kind, value in largest.items():
        name = {"bfloat": "bfloat16_t", "half": "float16_t"}.get(kind, kind)
        for member, want in [
            ("max", np.inf),
            ("min", -np.inf),
            ("finite_max", value),
            ("finite_min", -value),
        ]:
            s.expr(kind, f"Limits<{name}>::{member}", want)
    s.expr("bool", "Limits<bool>::max", True)
    s.expr("bool", "Limits<bool>::min", False)
    s.expr("float", "Limits<complex64_t>::max.real", np.inf)
    s.expr("float", "Limits<complex64_t>::min.imag", -np.inf)
    s.stmt("float", "constexpr float k = Limits<float>::finite_max; OUT = k;", np.finfo(f32).max)
    for kind, size in {
        "uchar": 1,
        "bool": 1,
        "half": 2,
        "bfloat16_t": 2,
        "float": 4,
        "int": 4,
        "long": 8,
        "complex64_t": 8,
    }.items():
        s.expr("int", f"WorkPerThread<{kind}>::n", 8 // size)
        s.stmt("int", f"{kind} t[WorkPerThread<{kind}>::n]; OUT = sizeof(t);", 8)
    for name in ("MAX_REDUCE_SPECIALIZED_DIMS", "REDUCE_N_READS", "REDUCE_N_WRITES"):
        s.expr("int", name, 4)
    for name, want in {"SOFTMAX_N_READS": 4, "RMS_N_READS": 4, "RMS_LOOPED_LIMIT": 4096}.items():
        s.expr("int", name, want)
    s.stmt("int", "OUT = 0; MLX_MTL_PRAGMA_UNROLL\nfor (int k = 0; k < 4; ++k) OUT += k;", 6)
    s.stmt(
        "int",
        "ConditionalType<(sizeof(float) > 2), float, half>::type v = 2.5f; OUT = int(v * 2);",
        5,
    )
    s.stmt("int", "ConditionalType<false, float, char>::type v = 3; OUT = sizeof(v);", 1)
    s.stmt("ushort", "OUT = bfloat16_to_uint16(bfloat16_t(1.0f));", 0x3F80)
    s.expr("bfloat", "uint16_to_bfloat16(0x4040)", 3)
    s.expr("bool", "is_complex_v<complex64_t> && !is_complex_v<float>", True)
    s.check()


def test_ceildiv_log1p_and_cast_to() -> None:
    x = np.concatenate(
        [np.exp2(np.random.default_rng(91).uniform(-30, 30, 300)), [0, -0.5, -0.999, 1e-10, 3e38]]
    ).astype(f32)
    wide = np.log1p(x.astype(np.float64))
    n = x.size
    s = Slots(n=n, inputs={"x": x})
    s.expr("float", "log1p(x[i])", wide, ulp=8)
    s.expr(
        "float",
        "float(log1p(bfloat16_t(x[i])))",
        np.log1p(x.astype(bfloat16).astype(np.float64)),
        atol=1e-30,
    )
    s.slots[-1].kind = "bfloat"
    s.slots[-1].text = "log1p(bfloat16_t(x[i]))"
    s.slots[-1].ulp = 0.6
    # MLX gives back the bfloat that is infinite where 1 + x is.
    s.slots[-1].want = np.where(np.isinf(x.astype(bfloat16).astype(f32)), np.inf, s.slots[-1].want)
    s.expr("float", "log1p(-1.0f)", -np.inf)
    s.expr("float", "log1p(INFINITY)", np.inf)
    s.expr("bool", "isnan(log1p(-2.0f))", True)
    k = np.arange(n)
    s.expr("uint", "ceildiv(i, 7u)", -(-k // 7))
    s.expr("int", "ceildiv(int(i), 32)", -(-k // 32))
    s.expr("ulong", "ceildiv(size_t(i) + (1ul << 40), 1000)", -(-(k + 2**40) // 1000))
    s.expr("int", "ceildiv(128, 64) * 10 + ceildiv(129, 64)", 23)
    s.stmt("int", "constexpr int tiles = (N_TILES + 7) / 8; OUT = tiles;", 3)
    s.header = "constant constexpr int N_TILES = 17;"
    s.expr("int", "cast_to<int>(x[i] > 100 ? 3.9f : -3.9f)", np.where(x > 100, 3, -3))
    s.expr("bool", "cast_to<bool>(x[i])", x != 0)
    s.expr("bool", "cast_to<bool>(-0.0f)", False)
    s.expr("bool", "cast_to<bool>(bfloat16_t(x[i]))", x.astype(bfloat16) != 0)
    s.expr("bool", "cast_to<bool>(complex64_t(0, x[i]))", x != 0)
    s.expr("half", "cast_to<half>(2.5f)", 2.5)
    s.expr("bool", "cast_to<bool>(uint(i))", k != 0)
    s.check()


def test_complex_numbers() -> None:
    rng = np.random.default_rng(92)
    n = 400
    a, b = ((rng.normal(size=n) + 1j * rng.normal(size=n)).astype(np.complex64) for _ in range(2))
    a[0], b[0], a[1] = 1 + 2j, 1 + 2j, b[1].real
    s = Slots(
        n=n, inputs={"va": a, "vb": b}, each="complex64_t a = va[i], b = vb[i]; float f = 2.5f;"
    )

    def add(text: str, want: Array, ulp: float = 0, atol: float = 0) -> None:
        s.stmt("float", f"complex64_t c = {text}; OUT = c.real;", want.real, ulp=ulp, atol=atol)
        s.stmt("float", f"complex64_t c = {text}; OUT = c.imag;", want.imag, ulp=ulp, atol=atol)

    wide_a, wide_b = a.astype(np.complex128), b.astype(np.complex128)
    add("a", a)
    add("-a", -a)
    add("a + b", a + b)
    add("a - b", a - b)
    add("a * b", wide_a * wide_b, ulp=4, atol=1e-6)
    add("a / b", wide_a / wide_b, ulp=16, atol=1e-5)
    add("a + f", np.stack([a.real + f32(2.5), a.imag], -1).view(np.complex64)[:, 0])
    add("f - a", np.stack([f32(2.5) - a.real, -a.imag], -1).view(np.complex64)[:, 0] if n else a)
    add("a - 1.0f", np.stack([a.real - f32(1), a.imag], -1).view(np.complex64)[:, 0])
    add("f / b", 2.5 / wide_b, ulp=16, atol=1e-5)
    add("complex64_t(1, 2)", np.full(n, 1 + 2j, np.complex64))
    add("complex64_t(f)", np.full(n, 2.5, np.complex64))
    add("f", np.full(n, 2.5, np.complex64))
    add("complex64_t()", np.zeros(n, np.complex64))
    add("{f, 3.0f}", np.full(n, 2.5 + 3j, np.complex64))
    add("i > 5 ? a : b", np.where(np.arange(n) > 5, a, b))
    add("complex64_t(float2(1, f))", np.full(n, 1 + 2.5j, np.complex64))
    s.stmt("float", "a += b; OUT = a.imag;", (a + b).imag)
    s.stmt("float", "OUT = float(a);", a.real)
    s.stmt("float", "float2 v = a; OUT = v.y;", a.imag)
    s.stmt("float", "a.real = 1; a.imag *= 2; OUT = a.real + a.imag;", 1 + a.imag * 2)
    s.stmt("float", "thread complex64_t& r = a; r = b; OUT = a.imag;", b.imag)
    s.stmt("float", "complex64_t t[3] = {a, b, 1.0f}; OUT = t[1].real + t[2].real;", b.real + 1)
    s.stmt("bool", "OUT = a == b;", a == b)
    s.stmt("bool", "OUT = a > b;", (a.real > b.real) | ((a.real == b.real) & (a.imag > b.imag)))
    s.stmt("bool", "OUT = a <= b;", (a.real < b.real) | ((a.real == b.real) & (a.imag <= b.imag)))
    s.stmt("float", "complex32_t h = complex32_t(1.5h, 2.5h); OUT = float(h.real + h.imag);", 4)
    one = np.log1p(wide_a)
    s.stmt("float", "OUT = log1p(a).real;", one.real, ulp=8, atol=2e-6)
    s.stmt("float", "OUT = log1p(a).imag;", one.imag, ulp=8, atol=2e-6)
    # A remainder has the sign of the divisor, each part on its own.
    rest = wide_a.real - wide_b.real * np.trunc((a.real / b.real).astype(np.float64))
    rest = np.where((rest != 0) & ((rest < 0) != (wide_b.real < 0)), rest + wide_b.real, rest)
    s.stmt("float", "OUT = (a % b).real;", rest, atol=1e-3)
    s.check()


def test_complex_outputs_and_memory(mode: str) -> None:
    n = 100
    rng = np.random.default_rng(93)
    a = (rng.integers(-9, 9, n) + 1j * rng.integers(-9, 9, n)).astype(np.complex64)
    body = """
    threadgroup complex64_t t[32];
    uint i = thread_position_in_grid.x, l = thread_position_in_threadgroup.x;
    t[l] = a[i];
    t[l] += complex64_t(1, 0);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    complex64_t v = t[threads_per_threadgroup.x - 1 - l];
    y[i] = v * complex64_t(0, 1);
    y[i].real += 100;
    z[i] = ((const device float2*)a)[i].y + (v == t[0]) * 0;
    """
    outs: dict[str, Any] = {"y": (np.complex64, (n,)), "z": ("float", (n,))}
    out = run(body, {"a": a}, outs, n, 32, mode=mode)
    turned = np.concatenate([a[k : k + 32][::-1] for k in range(0, n, 32)]) + 1
    assert (out["y"] == turned * 1j + 100).all()
    assert (out["z"] == a.imag).all()
    assert (run("y[thread_position_in_grid.x] = a;", {"a": np.array(2 + 3j, np.complex64)},
                {"y": (np.complex64, (4,))}, 4, 4)["y"] == 2 + 3j).all()  # fmt: skip


def test_logging_prints(capsys: pytest.CaptureFixture[str]) -> None:
    body = """
    constexpr mlx::os_log logger("mlx", "kernel");
    logger.log_debug("a message %d", 3);
    y[0] = 1;
    """
    assert run(body, {}, {"y": ("int", (1,))}, 1, 1)["y"][0] == 1
    assert capsys.readouterr().out == "a message 3\n"
