"""Races: two threads at one element that one of them writes, and nothing that orders them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...source.accesses import terms
from ...source.accesses.evaluation import evaluate
from ...source.accesses.model import Access
from ...source.accesses.terms import Term
from .calls import Call
from .digits import last_digits, outside, parted
from .effort import Effort
from .neighbours import distinct, joined
from .questions import Questions
from .search import call_text
from .verdicts import COUNTEREXAMPLE, NOT_SUPPORTED, PROVED, Verdict, unknown_of


class Races:
    """Whether threads meet.

    Args:
        questions: about the call.
    """

    def __init__(self, questions: Questions) -> None:
        self.questions, self.call = questions, questions.call
        self.other = _Other(self.call)
        self._digits: dict[tuple[Any, ...], bool] = {}

    def verdict(self, effort: Effort) -> Verdict:
        """Whether no two threads meet."""
        outputs = set(self.call.body.kernel.output_names)
        accesses = [
            a for a in self.call.found.accesses
            if a.array.space == "threadgroup"
            or (a.array.space == "device" and a.array.name in outputs)
        ]  # fmt: skip
        whole = [a for a, _ in joined(accesses)]
        if self._meet(whole, effort) is None:
            return Verdict(PROVED)
        return self._meet(distinct(accesses), effort) or Verdict(PROVED)

    def _meet(self, accesses: list[Access], effort: Effort) -> Verdict | None:
        """What is known of two threads that meet; None where none do."""
        for i, a in enumerate(accesses):
            for b in accesses[i:]:
                if a.array != b.array or (a.mode == b.mode != "write"):
                    continue
                conditions = self._meeting(a, b, effort)
                answer = self.questions.cannot(conditions, effort, quick=True)
                if answer is False:
                    continue
                c, d = self.questions.unwrapped(a, effort), self.questions.unwrapped(b, effort)
                conditions = self._meeting(c, d, effort)
                answer = self.questions.cannot(conditions, effort)
                if answer is not False:
                    return self._race(a, b, answer, conditions, effort)
        return None

    def _meeting(self, a: Access, b: Access, effort: Effort) -> list[Term]:
        return self.other.meeting(a, b, self._same(a, b, effort))

    def _same(self, a: Access, b: Access, effort: Effort) -> list[Term]:
        """That a thread's access and another's are of one element: in all of their digits."""
        here, there, widths, found = a.element, b.element, (a.width, b.width), []
        done = False
        while not done:
            done = True
            for high, low, by in last_digits(here, self.questions.is_size):
                other = parted(there, by)
                if self._is_digit(low, widths[0], by, a, effort) and self._is_digit(
                    other.low, widths[1], by, b, effort
                ):
                    found += _meeting(low, self.other.primed(other.low), *widths)
                    here, there, widths, done = high, other.high, (1, 1), False
                    break
        return [*found, *_meeting(here, self.other.primed(there), *widths)]

    def _is_digit(self, low: Term, width: int, by: Term, of: Access, effort: Effort) -> bool:
        key = (low, width, by, of.path)
        if key not in self._digits:
            wrong = [*self.call.thread_facts, *of.path, outside(low, width, by)]
            self._digits[key] = self.questions.cannot(wrong, effort, quick=True) is False
        return self._digits[key]

    def _race(
        self, a: Access, b: Access, answer: Any, conditions: list[Term], effort: Effort
    ) -> Verdict:
        later = max(a, b, key=lambda access: access.line)
        exact = all(c.is_exact for c in (*a.path, *b.path, a.element, b.element))
        if not exact:
            which = a if not a.exact else b
            text = f"where {a.array.name} is accessed depends on {unknown_of(which)}"
            return Verdict(NOT_SUPPORTED, later.line, text, None, later.where)
        values = self.questions.real(conditions, answer, effort)
        if values is None:
            text = f"whether two threads meet in {a.array.name} is not decided"
            return self.questions.open(later.line, later.where, text, effort)
        text = (
            f"two threads meet at element {evaluate(a.element, values)} of {a.array.name}, "
            f"in lines {a.line} and {b.line}"
        )
        call = call_text(self.call, self.questions.op, values)
        return Verdict(COUNTEREXAMPLE, later.line, text, call, later.where)


def _meeting(here: Term, there: Term, width: int, its_width: int) -> list[Term]:
    """That two have an element in common."""
    if width == its_width == 1:
        return [terms.eq(here, there)]
    return [
        terms.lt(here, terms.add(there, terms.const(its_width))),
        terms.lt(there, terms.add(here, terms.const(width))),
    ]


class _Other:
    """Another thread of the same launch: the same terms, over symbols of its own."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.own: dict[Term, Term] = {
            s: terms.symbol(f"{s.value}'", s.low, s.high) for axis in call.threads for s in axis
        }
        self.made: dict[Term, Term] = {}

    def primed(self, term: Term) -> Term:
        """A term, of the other thread."""
        for leaf in term.leaves:
            if leaf not in self.own and leaf.op in ("counter", "unknown"):
                if leaf.op == "counter":
                    self.own[leaf] = terms.counter(leaf.high)
                elif leaf.condition:
                    self.own[leaf] = terms.unknown(leaf.value[1], None)
                else:
                    bounds = (leaf.low, leaf.high)
                    self.own[leaf] = terms.anything(leaf.value[1], *bounds)
        return terms.replaced(term, self.own, self.made)

    def meeting(self, a: Access, b: Access, same: Sequence[Term]) -> list[Term]:
        """What holds where a thread's access and another's are unordered, and of one element.

        Args:
            same: that they are of one element.
        """
        call, at = self.call, self.primed
        differ = [terms.not_(terms.eq(s, self.own[s])) for axis in call.threads for s in axis]
        conditions = [terms.or_(*differ), *same]
        conditions += [*a.path, *map(at, b.path)]
        conditions += [*call.thread_facts, *map(at, call.thread_facts)]
        shared = a.array.space == "threadgroup"
        one = a.times[::2] if shared else a.times[1::2]
        other = b.times[::2] if shared else b.times[1::2]
        group = terms.and_(*(terms.eq(w, at(w)) for w in call.where))
        simd = terms.eq(call.simdgroup, at(call.simdgroup))
        together = terms.eq(one[0], at(other[0]))
        in_simd = terms.or_(terms.not_(simd), terms.eq(one[1], at(other[1])))
        unordered = terms.and_(together, in_simd)
        if shared:
            return [*conditions, group, unordered]
        return [*conditions, terms.or_(terms.not_(group), unordered)]
