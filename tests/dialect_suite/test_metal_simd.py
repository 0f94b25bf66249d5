"""Every simd_ and quad_ operation, on every type, with full, ragged and divergent groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from metal_harness import KINDS, Array, bfloat16, run, wrong
from simd_model import Model, butterfly, filled, first_active, moved, over, prefix, reduction

f32 = np.float32


def add(a: Any, b: Any) -> Any:
    return a + b


def multiply(a: Any, b: Any) -> Any:
    return a * b


@dataclass
class Operation:
    text: str  # with x (small numbers), p (for products), b (any bits), l (the lane)
    operand: str  # which of these the model takes; "bx" is pairs
    model: Model


def operations(prefix_name: str, width: int, whole: bool) -> list[Operation]:
    """The operations on numbers: of ``simd`` with 32 lanes or ``quad`` with 4."""
    s = prefix_name
    one, far = 1, width // 4 + 1 if width > 4 else 2
    few = [
        Operation(f"{s}_sum(x)", "x", reduction(add)),
        Operation(f"{s}_product(p)", "p", reduction(multiply)),
        Operation(f"{s}_min(b)", "b", reduction(np.minimum)),
        Operation(f"{s}_max(b)", "b", reduction(np.maximum)),
        Operation(f"{s}_prefix_inclusive_sum(x)", "x", prefix(add, None)),
        Operation(f"{s}_prefix_exclusive_sum(x)", "x", prefix(add, 0)),
        Operation(f"{s}_prefix_inclusive_product(p)", "p", prefix(multiply, None)),
        Operation(f"{s}_prefix_exclusive_product(p)", "p", prefix(multiply, 1)),
        Operation(f"{s}_broadcast(b, 3)", "b", moved(lambda lane: lane * 0 + 3)),
        Operation(f"{s}_broadcast_first(b)", "b", first_active),
        Operation(f"{s}_shuffle(b, {width - 1} - l)", "b", moved(lambda lane: width - 1 - lane)),
        Operation(
            f"{s}_shuffle(b, (l * 7 + 3) % {width})", "b", moved(lambda n: (n * 7 + 3) % width)
        ),
        Operation(f"{s}_shuffle(b, ushort(2))", "b", moved(lambda lane: lane * 0 + 2)),
        Operation(f"{s}_shuffle_xor(b, 1)", "b", moved(lambda lane: lane ^ 1)),
        Operation(f"{s}_shuffle_xor(b, {width - 2})", "b", moved(lambda lane: lane ^ (width - 2))),
    ]
    for delta in (one, far):
        few += [
            Operation(f"{s}_shuffle_down(b, {delta})", "b", moved(lambda n, d=delta: n + d)),
            Operation(f"{s}_shuffle_up(b, {delta})", "b", moved(lambda n, d=delta: n - d)),
            Operation(
                f"{s}_shuffle_rotate_down(b, {delta})",
                "b",
                moved(lambda n, d=delta: (n + d) % width),
            ),
            Operation(
                f"{s}_shuffle_rotate_up(b, {delta})", "b", moved(lambda n, d=delta: (n - d) % width)
            ),
            Operation(f"{s}_shuffle_and_fill_down(b, x, {delta})", "bx", filled(delta, width)),
            Operation(f"{s}_shuffle_and_fill_up(b, x, {delta})", "bx", filled(-delta, width)),
        ]
    for modulo in (2, 8) if width > 4 else (2,):
        few += [
            Operation(f"{s}_shuffle_and_fill_down(b, x, 1, {modulo})", "bx", filled(1, modulo)),
            Operation(f"{s}_shuffle_and_fill_up(b, x, 1, {modulo})", "bx", filled(-1, modulo)),
        ]
    if whole:
        few += [
            Operation(f"{s}_and(b)", "b", reduction(np.bitwise_and)),
            Operation(f"{s}_or(b)", "b", reduction(np.bitwise_or)),
            Operation(f"{s}_xor(b)", "b", reduction(np.bitwise_xor)),
        ]
    return few


def values(kind: str, n: int, tail: tuple[int, ...] = ()) -> dict[str, Array]:
    rng = np.random.default_rng(31)
    dtype = KINDS[kind]
    low = 0 if kind[0] == "u" else -2
    x = rng.integers(low, 4, (n, *tail)).astype(f32).astype(dtype)
    p = rng.choice([1, 1, 1, 1, 2, 1] if kind[0] == "u" else [1, 1, 1, -1, 2, 1, 1], (n, *tail))
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        b = rng.integers(info.min, info.max, (n, *tail), dtype, endpoint=True)
    else:
        b = (rng.normal(size=(n, *tail)) * 100).astype(f32).astype(dtype)
    return {"x": x, "p": p.astype(f32).astype(dtype), "b": b}


LAUNCHES = {"full": (128, 64), "ragged": (77, 40), "small": (23, 7)}


def body(kind: str, work: list[Operation], guard: str) -> str:
    lines = [f"y[{row} * N + i] = {operation.text};" for row, operation in enumerate(work)]
    inner = "\n".join(lines)
    start = f"""
    uint N = threads_per_grid.x;
    uint i = thread_position_in_grid.x, l = thread_index_in_simdgroup,
        q = thread_index_in_quadgroup;
    {kind} x = vx[i], p = vp[i], b = vb[i];
    """
    return (
        start
        + {
            "none": inner,
            "if": f"if (m[i]) {{\n{inner}\n}}",
            "return": f"if (!m[i]) return;\n{inner}",
            "else": f"if (m[i] == 0) {{ y[i] = simd_max(x); }} else {{\n{inner}\n}}",
        }[guard]
    )


def check(kind: str, work: list[Operation], width: int, launch: str, guard: str, mode: str) -> None:
    n, group = LAUNCHES[launch]
    v = values(kind, n)
    active = np.ones(n, bool)
    inputs: dict[str, Any] = {f"v{name}": array for name, array in v.items()}
    if guard != "none":
        # Lanes 2 and 3 are always there: a broadcast reads one, a shuffle the other.
        active = np.random.default_rng(32).integers(0, 3, n) > 0
        active[np.arange(n) % group % 4 >= 2] |= np.arange(n)[np.arange(n) % group % 4 >= 2] % 5 < 4
        active[[t for t in range(n) if t % group % width in (2, 3)]] = True
        inputs["m"] = active.astype(np.uint8)
    out = run(body(kind, work, guard), inputs, {"y": (kind, (len(work), n))}, n, group, mode=mode)[
        "y"
    ]
    failed = []
    for row, operation in enumerate(work):
        given = np.stack([v["b"], v["x"]], 1) if operation.operand == "bx" else v[operation.operand]
        want, defined = over(operation.model, given, active, group, width)
        bad = wrong(out[row], want, kind) & defined & active
        if bad.any():
            at = np.flatnonzero(bad)
            failed.append(f"{operation.text}: at {at[:6]} {out[row][at[:6]]} for {want[at[:6]]}")
    assert not failed, "\n".join(failed)


SIMD_KINDS = ["float", "half", "bfloat", "int", "uint", "short", "ushort", "char", "uchar"]


# Every type the fast way, and some with fibers: the operations there are the same text.
EVERY_KIND = [("auto", kind) for kind in SIMD_KINDS] + [
    ("fibers", k) for k in ("float", "bfloat", "uchar")
]
# Divergent code runs on fibers mostly, so half of the types say it.
SOME_LANES = [
    ("fibers" if k in ("float", "uint", "short", "uchar") else "auto", k) for k in SIMD_KINDS
]


@pytest.mark.parametrize(("mode", "kind"), EVERY_KIND)
def test_simd_operations(kind: str, mode: str) -> None:
    work = operations("simd", 32, KINDS[kind].kind in "iu")
    for launch in LAUNCHES:
        check(kind, work, 32, launch, "none", mode)


@pytest.mark.parametrize(("mode", "kind"), SOME_LANES)
def test_simd_operations_of_some_lanes(kind: str, mode: str) -> None:
    work = operations("simd", 32, KINDS[kind].kind in "iu")
    guard = {"float": "return", "int": "return", "half": "else", "uint": "else"}.get(kind, "if")
    for launch in ("full", "ragged"):
        check(kind, work, 32, launch, guard, mode)


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("auto", "float"), ("fibers", "half"), ("auto", "bfloat"), ("auto", "int"), ("auto", "uchar")],
)
def test_quad_operations(kind: str, mode: str) -> None:
    work = operations("quad", 4, KINDS[kind].kind in "iu")
    for operation in work:
        operation.text = operation.text.replace("l * 7", "q * 7").replace("- l", "- q")
    for launch in LAUNCHES:
        check(kind, work, 4, launch, "none", mode)


@pytest.mark.parametrize(("mode", "kind"), [("auto", "half"), ("fibers", "uint")])
def test_quad_operations_of_some_lanes(kind: str, mode: str) -> None:
    work = operations("quad", 4, KINDS[kind].kind in "iu")
    for operation in work:
        operation.text = operation.text.replace("l * 7", "q * 7").replace("- l", "- q")
    for launch in ("full", "ragged"):
        check(kind, work, 4, launch, "if", mode)


def lanes_of(n: int, group: int, width: int) -> Array:
    return np.arange(n) % group % width


VOTES = """
uint i = thread_position_in_grid.x;
uint N = threads_per_grid.x;
GUARD
bool p = v[i] != 0;
y[i] = simd_all(p);
y[N + i] = simd_any(p);
y[2 * N + i] = uint(simd_vote::vote_t(simd_ballot(p)));
y[3 * N + i] = uint(ulong(simd_vote::vote_t(simd_ballot(p))) >> 32);
y[4 * N + i] = uint(simd_vote::vote_t(simd_active_threads_mask()));
y[5 * N + i] = simd_is_first();
y[6 * N + i] = simd_ballot(p).any();
y[7 * N + i] = popcount(uint((simd_vote::vote_t)simd_ballot(p)));
y[8 * N + i] = quad_all(p);
y[9 * N + i] = quad_any(p);
y[10 * N + i] = uint(quad_vote::vote_t(quad_ballot(p)));
y[11 * N + i] = uint(quad_vote::vote_t(quad_active_threads_mask()));
y[12 * N + i] = quad_is_first();
y[13 * N + i] = metal::simd_all(v[i] > 0) ? 7 : 8;
simd_vote w = simd_ballot(!p);
y[14 * N + i] = uint(static_cast<simd_vote::vote_t>(w));
y[15 * N + i] = simd_all(true) && !simd_any(false);
"""


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("guard", ["", "if (m[i] == 0) return;"])
def test_votes(launch: str, guard: str, mode: str) -> None:
    n, group = LAUNCHES[launch]
    rng = np.random.default_rng(33)
    v = (rng.integers(0, 8, n) > 0).astype(np.int32)
    v[: n // 2] = 1
    v[-group // 2 :] = 0
    m = rng.integers(0, 4, n).astype(np.uint8) if guard else np.ones(n, np.uint8)
    inputs = {"v": v, "m": m} if guard else {"v": v}
    y = run(VOTES.replace("GUARD", guard), inputs, {"y": ("uint", (16, n))}, n, group, mode=mode)[
        "y"
    ]
    active, p = m != 0, v != 0

    def every(model: Model, width: int) -> Array:
        return over(model, p, active, group, width)[0]

    def bits(of: Array) -> Model:
        return lambda v, on: (np.full(len(v), int(sum(1 << k for k in np.flatnonzero(v & on)))), on)

    def all_bits(v: Array, on: Array) -> Any:
        return np.full(len(v), int(sum(1 << k for k in np.flatnonzero(on)))), on

    def first(v: Array, on: Array) -> Any:
        return np.arange(len(v)) == np.argmax(on), on

    yes, some = reduction(np.logical_and), reduction(np.logical_or)
    ballot = every(bits(p), 32)
    want = [
        every(yes, 32), every(some, 32), ballot, np.zeros(n), every(all_bits, 32), every(first, 32),
        every(some, 32), [int(k).bit_count() for k in ballot], every(yes, 4), every(some, 4),
        every(bits(p), 4), every(all_bits, 4), every(first, 4), np.where(every(yes, 32), 7, 8),
        every(all_bits, 32) & ~ballot, np.ones(n),
    ]  # fmt: skip
    for row, expected in enumerate(want):
        bad = active & (y[row] != np.asarray(expected).astype(np.uint32))
        assert not bad.any(), (
            row,
            np.flatnonzero(bad)[:5],
            y[row][bad][:5],
            np.asarray(expected)[bad][:5],
        )


@pytest.mark.parametrize(
    ("kind", "count"),
    [("float", 4), ("half", 2), ("uint", 3), ("bfloat", 4), ("uchar", 4), ("int", 2)],
)
def test_operations_of_vectors(kind: str, count: int) -> None:
    n, group = 77, 40
    v = values(kind, n, (count,))
    vector = f"{kind}{count}"
    work = [
        Operation("simd_sum(x)", "x", reduction(add)),
        Operation("simd_max(b)", "b", reduction(np.maximum)),
        Operation("simd_min(b)", "b", reduction(np.minimum)),
        Operation("simd_product(p)", "p", reduction(multiply)),
        Operation("simd_prefix_inclusive_sum(x)", "x", prefix(add, None)),
        Operation("simd_prefix_exclusive_sum(x)", "x", prefix(add, 0)),
        Operation("simd_broadcast(b, 4)", "b", moved(lambda lane: lane * 0 + 4)),
        Operation("simd_broadcast_first(b)", "b", first_active),
        Operation("simd_shuffle(b, l ^ 3)", "b", moved(lambda lane: lane ^ 3)),
        Operation("simd_shuffle_xor(b, 8)", "b", moved(lambda lane: lane ^ 8)),
        Operation("simd_shuffle_down(b, 4)", "b", moved(lambda lane: lane + 4)),
        Operation("simd_shuffle_up(b, 1)", "b", moved(lambda lane: lane - 1)),
        Operation("simd_shuffle_rotate_down(b, 2)", "b", moved(lambda lane: (lane + 2) % 32)),
        Operation("simd_shuffle_and_fill_up(b, x, 3)", "bx", filled(-3, 32)),
        Operation("quad_sum(x)", "x", reduction(add)),
        Operation("quad_shuffle_xor(b, 1)", "b", moved(lambda lane: lane ^ 1)),
        Operation("quad_broadcast(b, 0)", "b", moved(lambda lane: lane * 0)),
    ]
    if kind in ("uint", "uchar", "int"):
        work += [
            Operation("simd_and(b)", "b", reduction(np.bitwise_and)),
            Operation("simd_or(b)", "b", reduction(np.bitwise_or)),
            Operation("simd_xor(b)", "b", reduction(np.bitwise_xor)),
        ]
    lines = [
        "uint i = thread_position_in_grid.x, l = thread_index_in_simdgroup, N = threads_per_grid.x;"
    ]
    for name in "xpb":
        items = ", ".join(f"v{name}[i * {count} + {k}]" for k in range(count))
        lines.append(f"{vector} {name} = {vector}({items});")
    for row, operation in enumerate(work):
        lines.append(f"{{ {vector} t = {operation.text}; for (int k = 0; k < {count}; ++k)"
                     f" y[({row} * N + i) * {count} + k] = t[k]; }}")  # fmt: skip
    inputs = {f"v{name}": array for name, array in v.items()}
    out = run("\n".join(lines), inputs, {"y": (kind, (len(work), n, count))}, n, group)["y"]
    for row, operation in enumerate(work):
        given = np.stack([v["b"], v["x"]], 1) if operation.operand == "bx" else v[operation.operand]
        width = 4 if operation.text.startswith("quad") else 32
        want, defined = over(operation.model, given, np.ones(n, bool), group, width)
        bad = wrong(out[row], want, kind) & defined[:, None]
        assert not bad.any(), (
            operation.text,
            np.argwhere(bad)[:4],
            out[row][bad][:4],
            want[bad][:4],
        )


def test_64_bit_bool_and_complex_shuffles_of_mlx(mode: str) -> None:
    n, group = 77, 40
    rng = np.random.default_rng(34)
    arrays: dict[str, Array] = {
        "long": rng.integers(-(2**63), 2**63 - 1, n),
        "ulong": rng.integers(0, 2**64 - 1, n, dtype=np.uint64),
        "bool": rng.integers(0, 2, n).astype(bool),
        "complex64_t": (rng.normal(size=n) + 1j * rng.normal(size=n)).astype(np.complex64),
    }
    lines = [
        "uint i = thread_position_in_grid.x, l = thread_index_in_simdgroup, N = threads_per_grid.x;"
    ]
    models: list[tuple[str, Model]] = [
        ("simd_shuffle_down(v, 1)", moved(lambda lane: lane + 1)),
        ("simd_shuffle_up(v, 2)", moved(lambda lane: lane - 2)),
        ("simd_shuffle(v, 31 - l)", moved(lambda lane: 31 - lane)),
        ("simd_shuffle_and_fill_up(v, f, 1)", filled(-1, 32)),
    ]
    for kind in arrays:
        lines.append(f"{{ {kind} v = v_{kind}[i], f = v_{kind}[N - 1 - i];")
        for row, (text, _) in enumerate(models):
            lines.append(f"y_{kind}[{row} * N + i] = {text};")
        lines.append("}")
    inputs = {f"v_{kind}": array for kind, array in arrays.items()}
    outputs: dict[str, Any] = {f"y_{kind}": (array.dtype, (4, n)) for kind, array in arrays.items()}
    out = run("\n".join(lines), inputs, outputs, n, group, mode=mode)
    for kind, array in arrays.items():
        for row, (text, model) in enumerate(models):
            pair = np.stack([array, array[::-1]], 1)
            want, defined = over(
                model, pair if "fill" in text else array, np.ones(n, bool), group, 32
            )
            assert (out[f"y_{kind}"][row] == want)[defined].all(), (kind, text)


@pytest.mark.parametrize("guard", ["", "if (m[i] == 0) return;"])
def test_a_float_sum_adds_in_the_order_of_a_butterfly(guard: str, mode: str) -> None:
    rng = np.random.default_rng(35)
    for n, group in LAUNCHES.values():
        x = (rng.normal(size=n) * 10.0 ** rng.integers(-3, 5, n)).astype(f32)
        x[:64] = x[:64][::-1]
        m = rng.integers(0, 3, n).astype(np.uint8) if guard else np.ones(n, np.uint8)
        body = f"""
        uint i = thread_position_in_grid.x; {guard}
        y[i] = simd_sum(x[i]);
        y[i + threads_per_grid.x] = simd_sum(float2(1.0f, x[i])).y;
        z[i] = simd_sum(bfloat16_t(x[i]));
        """
        inputs = {"x": x, "m": m} if guard else {"x": x}
        outs: dict[str, Any] = {"y": ("float", (2, n)), "z": ("bfloat", (n,))}
        out = run(body, inputs, outs, n, group, mode=mode)
        want, _ = over(butterfly, x, m != 0, group, 32)
        on = m != 0
        assert not wrong(out["y"][0], want, "float")[on].any()
        assert not wrong(out["y"][1], want, "float")[on].any()
        # MLX's bfloat sum is the float sum, rounded once.
        narrow, _ = over(butterfly, x.astype(bfloat16).astype(f32), on, group, 32)
        assert not wrong(out["z"], narrow.astype(bfloat16), "bfloat")[on].any()


def _lesser(a: Array, b: Array) -> Array:
    return np.where((a < b) | (b != b), a, b)


def _greater(a: Array, b: Array) -> Array:
    return np.where((a > b) | (b != b), a, b)


def _tree(function: Any, v: Array) -> Array:
    """Neighbours first, for rows of 32."""
    while v.shape[1] > 1:
        v = function(v[:, ::2], v[:, 1::2])
    return np.broadcast_to(v, (len(v), 32))


def _log_steps(function: Any, v: Array) -> Array:
    for d in (1, 2, 4, 8, 16):
        v = np.concatenate([v[:, :d], function(v[:, :-d], v[:, d:])], 1)
    return v


_NUMBERS = st.floats(width=32) | st.sampled_from([0.0, -0.0, float("nan"), float("inf")])


@settings(deadline=None, max_examples=30)
@given(numbers=st.lists(_NUMBERS, min_size=64, max_size=64))
@example(numbers=[*[0.0] * 63, -0.0])
@example(numbers=[*[-0.0] * 33, *[0.0] * 31])
def test_full_simdgroups_give_the_bits_of_their_order(
    everywhere: str, numbers: list[float]
) -> None:
    """Signs of zeros, NaNs that lose, and roundings are those of the order, in each way.

    NVIDIA's instructions for extremes take 0 for more than -0.
    """
    x = np.array(numbers, f32).reshape(2, 32)
    body = """
    uint i = thread_position_in_grid.x, n = threads_per_grid.x;
    y[i] = simd_sum(x[i]); y[n + i] = simd_product(x[i]);
    y[2 * n + i] = simd_max(x[i]); y[3 * n + i] = simd_min(x[i]);
    y[4 * n + i] = simd_prefix_inclusive_sum(x[i]);
    y[5 * n + i] = simd_prefix_exclusive_sum(x[i]);
    y[6 * n + i] = simd_prefix_inclusive_product(x[i]);
    """
    with np.errstate(all="ignore"):
        sums, zero = _log_steps(add, x), np.zeros((2, 1), f32)
        want = [
            *(_tree(function, x) for function in (add, multiply, _greater, _lesser)),
            sums,
            np.concatenate([zero, sums[:, :-1]], 1),
            _log_steps(multiply, x),
        ]
    for mode in ("auto", "fibers"):
        y = run(body, {"x": x}, {"y": ("float", (7, 2, 32))}, 64, 64, mode=mode)["y"]
        for row, (got, expected) in enumerate(zip(y, want, strict=True)):
            number = ~np.isnan(expected)
            assert (np.isnan(got) == ~number).all(), (mode, row)
            if everywhere != "cpu" and row in (2, 3):
                got, expected = got + 0.0, expected + 0.0
            bits = got.view(np.uint32) == np.ascontiguousarray(expected).view(np.uint32)
            assert bits[number].all(), (mode, row)


def test_infinities_and_nans_reach_every_lane(mode: str) -> None:
    x = np.zeros((4, 32), f32)
    x[0, 5], x[1, 7], x[1, 9], x[2, 31], x[3] = np.inf, np.inf, -np.inf, np.nan, -np.inf
    body = """
    uint i = thread_position_in_grid.x;
    y[i * 3] = simd_sum(x[i]); y[i * 3 + 1] = simd_max(x[i]);
    y[i * 3 + 2] = simd_prefix_inclusive_sum(x[i]);
    """
    y = run(body, {"x": x}, {"y": ("float", (4, 32, 3))}, 128, 64, mode=mode)["y"]
    assert (
        (y[0, :, 0] == np.inf).all()
        and np.isnan(y[1:3, :, 0]).all()
        and (y[3, :, 0] == -np.inf).all()
    )
    assert (y[:2, :, 1] == np.inf).all() and (y[3, :, 1] == -np.inf).all()
    assert not wrong(y[:2, :, 2], np.cumsum(x[:2], 1, dtype=f32), "float").any()


def test_the_types_of_results() -> None:
    header = "template <typename T, typename U> int is(U) { return metal::is_same_v<T, U>; }"
    lines = ["uint i = thread_position_in_grid.x; int good = 1; bfloat16_t b = bfloat16_t(1.0f);"]
    for text, kind in [
        ("simd_sum(half(1))", "half"), ("simd_sum(1.0f)", "float"), ("simd_sum(b)", "bfloat"),
        ("simd_sum(short(1))", "short"),
        ("simd_sum(uchar(1))", "uchar"), ("simd_max(1u)", "uint"),
        ("simd_shuffle_xor(half(1), 1)", "half"),
        ("simd_shuffle(b, 0)", "bfloat"), ("simd_any(true)", "bool"),
        ("simd_sum(float4(1))", "float4"),
        ("simd_shuffle_down(half4(1), 1)", "half4"), ("simd_prefix_exclusive_sum(1)", "int"),
        ("simd_broadcast(char(1), 0)", "char"),
        ("simd_shuffle(1L, 0)", "long"), ("simd_shuffle(true, 0)", "bool"),
        ("simd_sum(true ? 1 : 0)", "int"),
        ("simd_max(b)", "bfloat"), ("simd_ballot(true)", "simd_vote"), ("simd_sum(1.0)", "float"),
    ]:  # fmt: skip
        lines.append(f"good &= is<{kind}>({text});")
    lines.append("y[i] = good;")
    assert (run("\n".join(lines), {}, {"y": ("int", (32,))}, 32, 32, header=header)["y"] == 1).all()
