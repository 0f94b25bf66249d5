"""The reference's arithmetic: rounded as the types say, undefined cases refused."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import program as p

Array = np.ndarray[Any, Any]


class Invalid(Exception):
    """The program has no defined result, so there is nothing to compare."""


def _within(value: Array, low: int, high: int, what: str) -> None:
    if len(value) and (value.min() < low or value.max() > high):
        raise Invalid(what)


def _rounded(value: Array, kind: p.Type, exact: bool) -> Array:
    """Float64 results as `kind`; in exact programs nothing may be lost."""
    with np.errstate(all="ignore"):
        result = value.astype(kind.dtype)
    if not np.isfinite(result).all():
        raise Invalid("a float overflows")
    if exact and ((result != value).any() or (np.abs(value) > kind.limits[1]).any()):
        raise Invalid("a float is not exact")
    return result


def convert(value: Array, given: p.Type, wanted: p.Type, exact: bool) -> Array:
    """A conversion between scalar types."""
    if given is wanted:
        return value
    if wanted.kind == "bool":
        return value != 0
    if wanted.kind == "float":
        if given.integer and given.bits == 64:
            _within(value, -(1 << 53), 1 << 53, "a long is too large for the check")
        return _rounded(value.astype(np.float64), wanted, exact)
    low, high = wanted.limits
    if given.kind == "float":
        whole = np.trunc(value.astype(np.float64))
        if len(whole) and (whole.min() < max(low, -(2**53)) or whole.max() > min(high, 2**53)):
            raise Invalid("a float does not fit into the integer")
        return whole.astype(wanted.dtype)
    if wanted.kind == "int" and len(value) and not low <= value.min() <= value.max() <= high:
        raise Invalid("a signed integer is narrowed beyond its range")
    return value.astype(wanted.dtype)  # unsigned: modulo


def arithmetic(op: str, a: Array, b: Array, kind: p.Type, exact: bool) -> Array:
    """``a op b`` where both have the promoted type `kind` (the count of a shift apart)."""
    if op in ("<", "<=", ">", ">=", "==", "!="):
        compare = {
            "<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal,
            "==": np.equal, "!=": np.not_equal,
        }[op]  # fmt: skip
        return np.asarray(compare(a, b))
    if kind.kind == "float":
        return _float(op, a, b, kind, exact)
    if op in ("<<", ">>"):
        count = (b.astype(np.uint64) & np.uint64(kind.bits - 1)).astype(a.dtype)
        return np.asarray((np.right_shift if op == ">>" else np.left_shift)(a, count))
    if op in ("&", "|", "^", "not"):
        bitwise = {"&": np.bitwise_and, "|": np.bitwise_or, "^": np.bitwise_xor}
        return np.asarray(np.invert(a) if op == "not" else bitwise[op](a, b))
    if op in ("/", "%"):
        return _divided(op, a, b, kind)
    with np.errstate(all="ignore"):
        if op == "neg":
            result = np.zeros_like(a) - a
        else:
            result = {"+": np.add, "-": np.subtract, "*": np.multiply}[op](a, b)
    if kind.kind == "int":  # signed overflow is undefined: check in wider numbers
        x, y = a.astype(np.longdouble), b.astype(np.longdouble)
        wide = -x if op == "neg" else {"+": x + y, "-": x - y, "*": x * y}[op]
        low, high = kind.limits
        if len(wide) and (wide.min() < low or wide.max() > high):
            raise Invalid("a signed integer overflows")
    return np.asarray(result)


def _divided(op: str, a: Array, b: Array, kind: p.Type) -> Array:
    if (b == 0).any():
        raise Invalid("a division by zero")
    if kind.kind == "uint":
        return np.asarray(a // b if op == "/" else a % b)
    if ((a == kind.limits[0]) & (b == -1)).any():
        raise Invalid("a division overflows")
    quotient = a // b
    quotient += (quotient * b != a) & ((a < 0) != (b < 0))  # C++ rounds to zero
    return np.asarray(quotient if op == "/" else a - quotient * b).astype(kind.dtype)


def _float(op: str, a: Array, b: Array, kind: p.Type, exact: bool) -> Array:
    # A float64 holds the sum and product of two halves or floats well enough that rounding it
    # once more gives what the narrower operation gives.
    x, y = a.astype(np.float64), b.astype(np.float64)
    if op == "neg":
        return -a
    if op == "/":
        if (y == 0).any() or exact:
            raise Invalid("a division of floats")
        return _rounded(x / y, kind, exact)
    if op not in ("+", "-", "*"):
        raise Invalid(f"{op} of floats")
    return _rounded({"+": x + y, "-": x - y, "*": x * y}[op], kind, exact)


def multiply_add(a: Array, b: Array, c: Array, exact: bool) -> Array:
    """``a * b + c`` of floats, rounded once.

    The product is exact in float64; the sum is rounded to odd there, so that rounding it again
    gives what rounding it once does.
    """
    if exact:
        raise Invalid("products are exact: nothing is to be fused")
    x, z = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    with np.errstate(all="ignore"):
        total = x + z
        part = total - x
        lost = (x - (total - part)) + (z - part)
        bits = total.view(np.int64)
        up = np.where((lost > 0) == (total > 0), 1, -1)
        odd = np.where((lost != 0) & (bits & 1 == 0), np.where(up > 0, bits + 1, bits - 1), bits)
        # Where rounding went up, the neighbour towards zero is the odd one.
    return _rounded(odd.view(np.float64), p.FLOAT, exact)


# -- the library -----------------------------------------------------------------------------------


def library(e: p.Fn, args: list[Array], exact: bool) -> Array:
    """A function of Metal's library, on scalars or vectors."""
    kind = e.type
    if isinstance(kind, p.Vector):
        if e.name == kind.name:
            parts = []
            for arg, value in zip(e.args, args, strict=True):
                columns = value if isinstance(arg.type, p.Vector) else value[:, None]
                parts += [
                    convert(columns[:, i], arg.type.base, kind.base, exact)
                    for i in range(columns.shape[1])
                ]
            if len(parts) == 1:
                parts *= kind.lanes
            return np.stack(parts, axis=1)
        columns = [a if a.ndim == 2 else np.repeat(a[:, None], kind.lanes, 1) for a in args]
        return np.stack(
            [_scalar(e.name, [c[:, i] for c in columns], kind.base, exact)
             for i in range(kind.lanes)], axis=1,
        )  # fmt: skip
    if e.name == "dot":
        (a, b), base = args, e.args[0].type.base
        total = arithmetic("*", a[:, 0], b[:, 0], base, exact)
        for i in range(1, a.shape[1]):
            total = arithmetic(
                "+", total, arithmetic("*", a[:, i], b[:, i], base, exact), base, exact
            )
        return total
    return _scalar(e.name, args, kind, exact)


def _scalar(name: str, args: list[Array], kind: p.Type, exact: bool) -> Array:
    if name in ("min", "max"):
        return np.asarray((np.minimum if name == "min" else np.maximum)(args[0], args[1]))
    if name == "clamp":
        if (args[1] > args[2]).any():
            raise Invalid("clamp with its bounds exchanged")
        return np.asarray(np.minimum(np.maximum(args[0], args[1]), args[2]))
    if name == "abs":
        if kind.kind == "int" and (args[0] == kind.limits[0]).any():
            raise Invalid("abs overflows")
        return np.asarray(np.abs(args[0]))
    if name == "select":
        return np.where(args[2].astype(bool), args[1], args[0])
    if name == "fma":
        product = args[0].astype(np.float64) * args[1].astype(np.float64)
        if not exact:
            raise Invalid("fma of inexact floats")
        return _rounded(product + args[2].astype(np.float64), kind, exact)
    if name == "popcount":
        bits = (args[0].astype(np.uint32)[:, None] >> np.arange(32, dtype=np.uint32)) & 1
        return bits.sum(axis=1).astype(kind.dtype)
    if name == "as_type<uint>":
        return np.ascontiguousarray(args[0]).view(np.uint32)
    if name == "as_type<int>":
        return np.ascontiguousarray(args[0]).view(np.int32)
    raise Invalid(f"unknown function {name}")


# -- operations of a simdgroup ---------------------------------------------------------------------


def operate(
    e: p.Sync, args: list[Array], rows: Array, lanes: Array, count: int, exact: bool
) -> Array:
    """An operation of each simdgroup (or quadgroup) on the lanes that are active."""
    prefix, op = e.name.split("_", 1)
    width = 32 if prefix == "simd" else 4
    units = count * 32 // width
    unit, lane = (rows * 32 + lanes) // width, lanes % width
    there = np.zeros((units, width), bool)
    there[unit, lane] = True

    def spread(value: Array) -> Array:
        table = np.zeros((units, width, *value.shape[1:]), value.dtype)
        table[unit, lane] = value
        return table

    if op in ("any", "all", "ballot", "active_threads_mask", "is_first"):
        value = args[0].astype(bool) if args else np.ones(len(unit), bool)
        yes = spread(value) & there
        if op == "any":
            return np.asarray(yes.any(axis=1)[unit])
        if op == "all":
            return np.asarray((yes == there).all(axis=1)[unit])
        if op == "is_first":
            return np.asarray(there.argmax(axis=1)[unit] == lane)
        bits = (yes.astype(np.uint64) << np.arange(width, dtype=np.uint64)).sum(axis=1)
        return bits[unit].astype(np.uint32)

    value, kind = args[0], e.args[0].type
    if isinstance(kind, p.Vector):
        parts = [
            _moved_or_reduced(op, value[:, i], args, kind.base, unit, lane, there, spread, exact)
            for i in range(kind.lanes)
        ]
        return np.stack(parts, axis=1)
    return _moved_or_reduced(op, value, args, kind, unit, lane, there, spread, exact)


def _moved_or_reduced(
    op: str, value: Array, args: list[Array], kind: p.Type, unit: Array, lane: Array,
    there: Array, spread: Any, exact: bool,
) -> Array:  # fmt: skip
    width = there.shape[1]
    table = spread(value)
    if op in ("sum", "product", "max", "min", "and", "or", "xor"):
        return np.asarray(_tree(op, table, there, kind, exact)[unit])
    if op.startswith("prefix_"):
        return np.asarray(_prefix(op, table, there, kind, exact)[unit, lane])
    if op == "broadcast_first":
        return np.asarray(table[unit, there.argmax(axis=1)[unit]])
    fills = "_and_fill_" in op
    step = args[2 if fills else 1].astype(np.int64)
    filling = None
    if fills:
        modulo = args[3].astype(np.int64) if len(args) == 4 else step * 0 + width
        start, at = lane // modulo * modulo, lane % modulo
        if ((step >= modulo) | (step < 0)).any():
            raise Invalid("a shift by more than the modulo")
        filling = spread(args[1])
        ahead = at + (step if op.endswith("down") else -step)
        outside = (ahead < 0) | (ahead >= modulo)
        source = start + ahead % modulo
    else:
        outside = np.zeros(len(lane), bool)
        source = {
            "broadcast": step, "shuffle": step, "shuffle_up": lane - step,
            "shuffle_down": lane + step, "shuffle_xor": lane ^ step,
            "shuffle_rotate_up": (lane - step) % width,
            "shuffle_rotate_down": (lane + step) % width,
        }[op]  # fmt: skip
    # A source that is out of range or takes no part: the lane keeps its own value.
    reachable = (source >= 0) & (source < width)
    source = np.where(reachable, source, 0)
    reachable &= there[unit, source]
    moved = table[unit, source]
    if filling is not None:
        moved = np.where(outside, filling[unit, source], moved)
    return np.where(reachable, moved, value)


def _combine(op: str, a: Array, b: Array, kind: p.Type, exact: bool) -> Array:
    if op in ("max", "min"):
        return np.asarray((np.maximum if op == "max" else np.minimum)(a, b))
    sign = {"sum": "+", "product": "*", "and": "&", "or": "|", "xor": "^"}[op]
    shape = a.shape
    wide = p.common(kind, kind)
    x, y = (convert(v.reshape(-1), kind, wide, exact) for v in (a, b))
    result = arithmetic(sign, x, y, wide, exact)
    return convert(result, wide, kind, exact).reshape(shape)


def _tree(op: str, table: Array, there: Array, kind: p.Type, exact: bool) -> Array:
    """The ascending butterfly: partners at distance 1, 2, 4 …; a missing lane adds nothing."""
    value, present = table.copy(), there.copy()
    neutral = np.where(present, value, np.zeros_like(value))
    value = neutral
    while value.shape[1] > 1:
        a, b, pa, pb = value[:, ::2], value[:, 1::2], present[:, ::2], present[:, 1::2]
        both = pa & pb
        zero = np.zeros_like(a)
        summed = _combine(op, np.where(both, a, zero), np.where(both, b, zero), kind, exact)
        value = np.where(both, summed, np.where(pa, a, b))
        present = pa | pb
    return value[:, 0]


def _prefix(op: str, table: Array, there: Array, kind: p.Type, exact: bool) -> Array:
    if kind.kind == "float" and not exact:
        raise Invalid("the order of a prefix sum shows in inexact floats")
    name = "product" if op.endswith("product") else "sum"
    running = np.full(len(table), 1 if name == "product" else 0, table.dtype)
    result = np.zeros_like(table)
    for lane in range(table.shape[1]):
        here = there[:, lane]
        after = running.copy()
        after[here] = _combine(name, running[here], table[here, lane], kind, exact)
        result[:, lane] = running if "exclusive" in op else after
        running = after
    return result
