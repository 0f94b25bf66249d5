"""Cases of sizes that together are all: questions are easier where a dim is 0, or is not, or is a
multiple of what it is divided by."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ...source.accesses import terms
from ...source.accesses.terms import Term
from .calls import Call

_MOST_DIVISOR = 4096


class Case(NamedTuple):
    """Some of the sizes that calls may have.

    Attributes:
        by: what dims are in it.
        free: dims that may be 0 or not, which narrower cases settle.
        parted: dims that narrower cases write as a multiple and what is left, and of what.
        divisors: of each dim, what always divides it.
        facts: those that may say that dims are equal.
    """

    by: Mapping[Term, Term]
    free: tuple[Term, ...]
    parted: Mapping[Term, int]
    divisors: Mapping[Term, int]
    facts: tuple[Term, ...] = ()

    @property
    def is_wide(self) -> bool:
        """Whether there are narrower ones."""
        return bool(self.free or self._new_parts())

    def narrower(self) -> list[Case]:
        """Cases that together are this one; none where there is nothing to settle."""
        if self.free:
            return list(self._settled())
        parts = self._new_parts()
        return [self._replace(by={**self.by, **parts}, parted={})] if parts else []

    def _new_parts(self) -> dict[Term, Term]:
        """Dims as a multiple, and what is left."""
        found: dict[Term, Term] = {}
        for dim, by in self.parted.items():
            if self.by.get(dim) is not terms.const(0):
                high = None if dim.high is None else dim.high // by
                whole = terms.symbol(f"{dim.value}/{by}", 0, high)
                rest = terms.symbol(f"{dim.value}%{by}", 0, by - 1)
                found[dim] = terms.add(terms.mul(terms.const(by), whole), rest)
        return found

    def _settled(self) -> Iterator[Case]:
        """None of the dims is 0; or one is the first that is."""
        above: dict[Term, Term] = {}
        later: list[Case] = []
        for i, dim in enumerate(self.free):
            zero = {**self.by, **above, dim: terms.const(0)}
            later.append(self._replace(by=zero, free=self.free[i + 1 :]))
            above[dim] = self._above_zero(dim)
        yield self._replace(by=self._equal({**self.by, **above}), free=())
        yield from later

    def _equal(self, by: dict[Term, Term]) -> dict[Term, Term]:
        """The same dims, where those are one of which a fact says that they are equal."""
        for fact in self.facts:
            known = terms.replaced(fact, by)
            if known.op == "eq" and all(side.op == "symbol" for side in known.args):
                one, other = known.args
                lows = [side.low for side in known.args if side.low is not None]
                highs = [side.high for side in known.args if side.high is not None]
                ends = (max(lows, default=None), min(highs, default=None))
                both = terms.symbol(str(one.value), *ends)
                by = {dim: terms.replaced(term, {one: both, other: both})
                      for dim, term in by.items()}  # fmt: skip
        return by

    def _above_zero(self, dim: Term) -> Term:
        by = self.divisors[dim]
        high = None if dim.high is None else dim.high // by
        name = str(dim.value) if by == 1 else f"{dim.value}/{by}"
        return terms.mul(terms.const(by), terms.symbol(name, 1, high))


def cases_of(call: Call) -> list[Case]:
    """All sizes of a call: none is 0, or one of them is."""
    dims = tuple(d.term for d in call.domains if d.kind == "dim")
    divisors = {dim: _divisor(dim, call.facts) for dim in dims}
    equal = tuple(f for f in call.facts if f.leaves <= {*dims} and _may_be_equal(f))
    whole = Case({}, dims, _parted(call, divisors), divisors, equal)
    return whole.narrower() or [whole]


def _may_be_equal(fact: Term) -> bool:
    """Whether a fact has an equation of two dims."""
    return any(t.op == "eq" and all(a.op == "symbol" for a in t.args)
               for t in terms.subterms(fact))  # fmt: skip


def _divisor(dim: Term, facts: Sequence[Term]) -> int:
    """The largest number of which a fact says that it divides a dim."""
    found = 1
    for fact in facts:
        if fact.op == "eq" and terms.const(0) in fact.args:
            for side in fact.args:
                if side.op == "fmod" and (by := _divides(dim, side)):
                    found = max(found, by)
    return found


def _divides(dim: Term, quotient: Term) -> int:
    """What a dim is a multiple of where this division leaves nothing; 0 where it is of more."""
    whole, by = quotient.args
    factor, rest = 1, whole
    if whole.op == "mul" and whole.args[0].op == "const":
        factor, rest = whole.args[0].value, whole.args[1]
    if rest is not dim or by.op != "const" or not by.value or not factor:
        return 0
    return abs(int(by.value)) // math.gcd(int(factor), int(by.value))


def _parted(call: Call, divisors: Mapping[Term, int]) -> dict[Term, int]:
    """The dims that are divided by numbers, and a number that all of these divide."""
    found: dict[Term, int] = {}
    parts = [*call.facts, *call.grid, *call.lengths.values(), *call.thread_facts]
    parts += [t for a in call.found.accesses for t in (a.element, *a.path)]
    for term in terms.subterms(*parts):
        if term.op not in ("fdiv", "fmod", "quot", "rem"):
            continue
        for dim, known in divisors.items():
            by = _divides(dim, term)
            if by and known % by:
                found[dim] = math.lcm(found.get(dim, 1), by)
    return {dim: by for dim, by in found.items() if by <= _MOST_DIVISOR}
