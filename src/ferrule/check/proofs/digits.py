"""An index as digits: ``(i * L + j) * D + k`` lies in ``A * L * D`` elements where ``k < D``,
``j < L`` and ``i < A``; and two such are equal where all their digits are. Each digit is a question
with fewer products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from ...source.accesses import terms
from ...source.accesses.terms import Term


class Digit(NamedTuple):
    """An index as a quotient and a digit.

    Attributes:
        high, low: the index is ``high * by + low``.
        by: a size.
    """

    high: Term
    low: Term
    by: Term


def last_digits(index: Term, is_size: Callable[[Term], bool]) -> Iterator[Digit]:
    """The ways to part an index by a size that is a factor in it, those of most parts first.

    Args:
        is_size: whether a term is a size that is alike in all threads.
    """
    parts = index.args if index.op == "add" else (index,)
    many: dict[Term, int] = {}
    for part in parts:
        for factor in dict.fromkeys(_factors(part)):
            if is_size(factor):
                many[factor] = many.get(factor, 0) + 1
    for by in sorted(many, key=lambda f: -many[f]):
        yield parted(index, by)


def parted(index: Term, by: Term) -> Digit:
    """An index by a size: the multiples of that, and what is left."""
    high: list[Term] = []
    low: list[Term] = []
    for part in index.args if index.op == "add" else (index,):
        multiple = terms.without(part, by)
        (low if multiple is None else high).append(part if multiple is None else multiple)
    return Digit(terms.add(*high), terms.add(*low), by)


def outside(index: Term, width: int, length: Term) -> Term:
    """That an index and its neighbours are not all inside of so many elements."""
    end = terms.add(index, terms.const(width))
    return terms.or_(terms.lt(index, terms.const(0)), terms.lt(length, end))


def _factors(term: Term) -> Iterator[Term]:
    if term.op == "mul":
        for arg in term.args:
            yield from _factors(arg)
    elif term.op != "const":
        yield term
