"""Accesses to neighbours, as one: what a loop that is unrolled reads or writes step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...source.accesses import terms
from ...source.accesses.model import Access
from ...source.accesses.terms import Term


def distinct(accesses: Sequence[Access]) -> list[Access]:
    """Accesses that differ in more than their lines."""
    seen: dict[Any, Access] = {}
    for a in accesses:
        key = (a.array, a.mode, a.element, a.width, a.path, a.times)
        seen.setdefault(key, a)
    return list(seen.values())


def joined(accesses: Sequence[Access], *, modes: bool = True) -> list[tuple[Access, list[Access]]]:
    """The same elements in fewer accesses, each with what it is made of: those that the same
    threads access in the same round, without a barrier between them, are one where no element
    lies between them.

    Args:
        modes: reads and writes stay apart.
    """
    groups: dict[Any, list[tuple[int, Access]]] = {}
    for a in distinct(accesses):
        base, offset = _parts(a.element)
        key = (a.array, modes and a.mode, base, frozenset(a.path), a.times)
        groups.setdefault(key, []).append((offset, a))
    found: list[tuple[Access, list[Access]]] = []
    for group in groups.values():
        group.sort(key=lambda each: each[0])
        start = end = group[0][0]
        parts: list[Access] = []
        for offset, a in group:
            if offset > end:
                found.append((parts[0]._replace(width=end - start), parts))
                start, end, parts = offset, offset, []
            end = max(end, offset + a.width)
            parts.append(a)
        found.append((parts[0]._replace(width=end - start), parts))
    return found


def _parts(element: Term) -> tuple[Term, int]:
    """An index without its number, and that."""
    if element.op == "const":
        return terms.const(0), int(element.value)
    numbers = [a.value for a in element.args if a.op == "const"] if element.op == "add" else []
    number = int(numbers[0]) if numbers else 0
    return terms.sub(element, terms.const(number)), number
