"""Every simd_ and quad_ operation, on every type, with full, ragged and divergent groups."""

from __future__ import annotations

from collections.abc import Callable
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
    operand: str  # which of these the model takes
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
            Operation(f"{s}_shuffle_and_fill_down(b, x, {delta})", "bx", filled(delta, width, np.copy)),
            Operation(f"{s}_shuffle_and_fill_up(b, x, {delta})", "bx", filled(-delta, width, np.copy)),
        ]
    for modulo in (2, 8) if width > 4 else (2,):
        few += [
            Operation(f"{s}_shuffle_and_fill_down(b, x, 1, {modulo})", "bx", filled(1, modulo, np.copy)),
            Operation(f"{s}_shuffle_and_fill_up(b, x, 1, {modulo})", "bx", filled(-1, modulo, np.copy)),
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


def expected(operation: Operation, v: dict[str, Array], active: Array, group: int, width: int) -> Any:
    model = operation.model
    if operation.operand == "bx":
        # The model sees both arrays as one: value and filling in two columns.
        both = np.stack([v["b"], v["x"]], 1)
        swap: Callable[[Array], Array] = lambda m: m[:, ::-1]  # noqa: E731
        delta, modulo = FILL_ARGUMENTS[operation.text] if operation.text in FILL_ARGUMENTS else (0, 0)
        del delta, modulo, swap
        want, defined = over(model, both, active, group, width)
        return want[:, 0], defined
    return over(model, v[operation.operand], active, group, width)
