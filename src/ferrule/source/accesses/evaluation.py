"""The values of terms, where all leaves have one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .terms import Term, const, wrap


class NoValue(Exception):
    """A term has no value: it divides by zero, or names what has none."""


def evaluate(term: Term, values: Mapping[Any, int], made: dict[Term, int] | None = None) -> int:
    """A term's value.

    Args:
        values: by leaves, or by the names of symbols; of data by the array's name.
        made: values of terms that are known already, which is added to.

    Raises:
        NoValue: there is none.
    """
    made = {} if made is None else made
    if term.op == "const":
        return int(term.value)
    if (known := made.get(term)) is not None:
        return known
    made[term] = value = int(_value(term, values, made))
    return value


def _value(term: Term, values: Mapping[Any, int], made: dict[Term, int]) -> int:
    op, args = term.op, term.args
    if op in ("symbol", "unknown", "counter", "data"):
        if term in values:
            return values[term]
        if op == "data":
            evaluate(args[0], values, made)
        if term.value in values:
            return values[term.value]
        raise NoValue(str(term.value))
    if op == "ite":
        return evaluate(args[1 if evaluate(args[0], values, made) else 2], values, made)
    if op == "and":
        return all(evaluate(a, values, made) for a in args)
    if op == "or":
        return any(evaluate(a, values, made) for a in args)
    numbers = [evaluate(a, values, made) for a in args]
    if op == "add":
        return sum(numbers)
    if op == "not":
        return not numbers[0]
    if op == "wrap":
        return int(wrap(const(numbers[0]), term.value).value)
    a, b = numbers
    if op == "mul":
        return a * b
    if op == "lt":
        return a < b
    if op == "eq":
        return a == b
    if b == 0:
        raise NoValue("a division by zero")
    if op == "fdiv":
        return a // b
    if op == "fmod":
        return a % b
    quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    return quotient if op == "quot" else a - b * quotient
