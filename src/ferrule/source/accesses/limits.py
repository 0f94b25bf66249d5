"""What the conditions at a place say of terms: how large they are, and that they are not negative.

A condition that compares is a sum that is not negative where it holds: ``i < n`` is ``n - 1 - i``.
So a term that such a sum subtracts is no larger than both together, which names the term no more::

    i <= i + (n - 1 - i) = n - 1;    i + j <= i + j + (n - 1 - i) = n - 1 + j
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from . import terms
from .model import Loop
from .terms import Term
from .values import is_unset

_DEEPEST = 3  # sums that follow from sums


class Counted(NamedTuple):
    """A variable that a loop steps up while it is below an end.

    Attributes:
        start: its value in front of the loop, to be shown not to be negative.
        step: what each round adds, to be shown not to be negative.
        most: the largest that it is where the loop's condition holds.
        outside: what holds in front of each round: `start`, `step` and `most` are of that place.
    """

    start: Term
    step: Term
    most: Term
    outside: Limits


class Limits:
    """What holds at one place.

    Args:
        path: conditions that hold.
        loops: those around it, the outermost first.
    """

    def __init__(self, path: Sequence[Term], loops: Sequence[Loop] = ()) -> None:
        self._path, self._loops = tuple(path), tuple(loops)
        conditions = dict.fromkeys([*self._path, *(loop.holds for loop in loops)])
        self._natural = dict.fromkeys(d for c in conditions for d in naturals(c))
        self._less: dict[Term, list[tuple[int, Term]]] = {}  # sums by what they subtract
        self._more: dict[Term, list[tuple[int, Term]]] = {}  # sums by what they add
        self._wraps: dict[Term, None] = {}
        for sum_ in self._natural:
            if is_unset(sum_):
                continue
            for part in terms.parts_of(sum_):
                factor, rest = terms.split(part)
                if rest is not None:
                    of = self._less if factor < 0 else self._more
                    of.setdefault(rest, []).append((abs(factor), sum_))
                    if rest.op == "wrap":
                        self._wraps[rest] = None
        self._least: dict[tuple[Term, int], int | None] = {}
        self._with: dict[Term, Limits] = {}

    def where(self, condition: Term) -> Limits:
        """What holds where a condition does, too."""
        if condition in self._path:
            return self
        if condition not in self._with:
            self._with[condition] = Limits((*self._path, condition), self._loops)
        return self._with[condition]

    def least(self, term: Term, depth: int = _DEEPEST) -> int | None:
        """A number that a term is no less than."""
        key = term, depth
        if key not in self._least:
            self._least[key] = None  # while it is looked for
            found = [n for n in (self._least_of(term, depth), self._least_by_sums(term, depth))
                     if n is not None]  # fmt: skip
            self._least[key] = max(found, default=None)
        return self._least[key]

    def is_natural(self, term: Term) -> bool:
        """Whether a term is known not to be negative."""
        least = self.least(term)
        return least is not None and least >= 0

    def above(self, term: Term) -> Iterator[Term]:
        """Terms that a term is no larger than, by one condition each, without what that is of."""
        mine = {
            rest: factor
            for factor, rest in map(terms.split, terms.parts_of(term))
            if rest is not None
        }
        for rest, factor in mine.items():
            if factor < 1:
                continue
            for times, sum_ in self._less.get(rest, ()):
                if factor % times == 0:
                    yield terms.add(term, terms.mul(terms.const(factor // times), sum_))
                elif len(mine) == 1 and term is rest:
                    whole = terms.add(terms.mul(terms.const(times), rest), sum_)
                    yield terms.fdiv(whole, terms.const(times))

    def converted(self, term: Term) -> Iterator[Term]:
        """A term as another type of 32 bits or more holds it, where conditions are of that: both
        are the same where that is not negative, and less than half of what is held unsigned."""
        for other in self._wraps:
            bits = other.value.bits
            if bits < 32 or other is term:
                continue
            same = term.op == "wrap" and term.value.bits == bits
            if (same or _fits(term, 1 << (bits - 1))) and terms.wrap(term, other.value) is other:
                yield other

    def counted(self, term: Term) -> Iterator[Counted]:
        """How a loop counts, where a term is a variable that one does."""
        if term.op != "wrap" or term.value.bits < 32:
            return
        zero, one = terms.const(0), terms.const(1)
        for i, loop in enumerate(self._loops):
            counter, total = loop.counter, term.args[0]
            if counter not in total.leaves:
                continue
            start = terms.replaced(total, {counter: zero})
            step = terms.sub(terms.replaced(total, {counter: one}), start)
            straight = terms.add(start, terms.mul(step, counter))
            if total is not straight or counter in step.leaves:
                continue
            outside = Limits((), self._loops[:i])
            for sum_ in naturals(loop.holds):
                most = terms.add(term, sum_)
                if term not in terms.subterms(most) and counter not in most.leaves:
                    yield Counted(start, step, most, outside)

    def _least_of(self, term: Term, depth: int) -> int | None:
        """What the parts of a term say."""
        args = term.args
        if term.op == "add":
            total = 0
            for factor, rest in map(terms.split, args):
                least = 1 if rest is None else self.least(rest, depth) if factor > 0 else rest.high
                if least is None:
                    return term.low
                total += factor * least
            return total if term.low is None else max(total, term.low)
        if term.op == "ite":
            both = (self.where(args[0]).least(args[1], depth),
                    self.where(terms.not_(args[0])).least(args[2], depth))  # fmt: skip
            lows = [n for n in both if n is not None]
            return min(lows) if len(lows) == 2 else term.low
        if term.op in ("mul", "fdiv", "quot", "rem") and (term.low is None or term.low < 0):
            a, b = (self.least(arg, depth) for arg in args)
            divisor = 0 if term.op == "mul" else 1
            if a is not None and a >= 0 and b is not None and b >= divisor:
                return a * b if term.op == "mul" else 0
        return term.low

    def _least_by_sums(self, term: Term, depth: int) -> int | None:
        """What conditions say: a term is a sum that is not negative, and what is left."""
        found: list[int] = []
        first = next(
            (rest for _, rest in map(terms.split, terms.parts_of(term)) if rest is not None), None
        )
        factor = next((f for f, rest in map(terms.split, terms.parts_of(term)) if rest is first), 1)
        sums = (self._more if factor > 0 else self._less).get(first, ()) if first and depth else ()
        for times, sum_ in sums:
            if abs(factor) % times == 0:
                rest = terms.sub(term, terms.mul(terms.const(abs(factor) // times), sum_))
                least = self.least(rest, depth - 1)
                found += [] if least is None else [least]
        return max(found, default=None)


def _fits(term: Term, most: int) -> bool:
    """Whether a term is from ``-most`` to ``most - 1``."""
    return term.low is not None and term.high is not None and -most <= term.low <= term.high < most


def naturals(condition: Term) -> Iterator[Term]:
    """Sums that are not negative where a condition holds."""
    negated = condition.op == "not"
    inner = condition.args[0] if negated else condition
    if inner.op == ("or" if negated else "and"):
        for part in inner.args:
            yield from naturals(terms.not_(part) if negated else part)
    elif inner.op == "lt":
        less = terms.sub(inner.args[1], inner.args[0])
        yield terms.neg(less) if negated else terms.sub(less, terms.const(1))
    elif inner.op == "eq" and not negated and not inner.args[0].condition:
        yield terms.sub(*inner.args)
        yield terms.sub(*inner.args[::-1])
