"""Every simd_ and quad_ operation, on every type, with full, ragged and divergent groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
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
        Operation(f"{s}_shuffle(b, (l * 7 + 3) % {width})", "b", moved(lambda n: (n * 7 + 3) % width)),
        Operation(f"{s}_shuffle(b, ushort(2))", "b", moved(lambda lane: lane * 0 + 2)),
        Operation(f"{s}_shuffle_xor(b, 1)", "b", moved(lambda lane: lane ^ 1)),
        Operation(f"{s}_shuffle_xor(b, {width - 2})", "b", moved(lambda lane: lane ^ (width - 2))),
    ]
    for delta in (one, far):
        few += [
            Operation(f"{s}_shuffle_down(b, {delta})", "b", moved(lambda n, d=delta: n + d)),
            Operation(f"{s}_shuffle_up(b, {delta})", "b", moved(lambda n, d=delta: n - d)),
            Operation(f"{s}_shuffle_rotate_down(b, {delta})", "b", moved(lambda n, d=delta: (n + d) % width)),
            Operation(f"{s}_shuffle_rotate_up(b, {delta})", "b", moved(lambda n, d=delta: (n - d) % width)),
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



def body(kind: str, work: list[Operation], guard: str, n: int) -> str:
    lines = [f"y[{row} * N + i] = {operation.text};" for row, operation in enumerate(work)]
    inner = "\n".join(lines)
    start = f"""
    constexpr uint N = {n};
    uint i = thread_position_in_grid.x, l = thread_index_in_simdgroup, q = thread_index_in_quadgroup;
    {kind} x = vx[i], p = vp[i], b = vb[i];
    """
    return start + {
        "none": inner,
        "if": f"if (m[i]) {{\n{inner}\n}}",
        "return": f"if (!m[i]) return;\n{inner}",
        "else": f"if (m[i] == 0) {{ y[i] = simd_max(x); }} else {{\n{inner}\n}}",
    }[guard]


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
    out = run(
        body(kind, work, guard, n), inputs, {"y": (kind, (len(work), n))}, n, group, mode=mode
    )["y"]
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


@pytest.mark.parametrize("kind", SIMD_KINDS)
def test_simd_operations(kind: str, mode: str) -> None:
    work = operations("simd", 32, KINDS[kind].kind in "iu")
    for launch in LAUNCHES:
        check(kind, work, 32, launch, "none", mode)


@pytest.mark.parametrize("kind", SIMD_KINDS)
def test_simd_operations_of_some_lanes(kind: str, mode: str) -> None:
    work = operations("simd", 32, KINDS[kind].kind in "iu")
    guard = {"float": "return", "int": "return", "half": "else", "uint": "else"}.get(kind, "if")
    for launch in ("full", "ragged"):
        check(kind, work, 32, launch, guard, mode)
