"""Coverage: every element of every output is written, by a thread that is found from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...source.accesses import terms
from ...source.accesses.model import Access
from ...source.accesses.terms import Term
from .cases import Case
from .effort import Effort
from .inverse import thread_of
from .neighbours import joined
from .questions import Questions
from .solver import Question, TooHard
from .verdicts import NOT_SUPPORTED, PROVED, Verdict


class Coverage:
    """Whether all is written.

    Args:
        questions: about the call.
    """

    def __init__(self, questions: Questions) -> None:
        self.questions, self.call = questions, questions.call

    def verdict(self, effort: Effort) -> Verdict:
        """Whether every element of every output is written."""
        if self.call.body.fill is not None:
            return Verdict(PROVED, None, "outputs are filled before the launch")
        for output in self.call.rule.outputs:
            writes = [
                a for a in self.call.found.accesses
                if a.array.name == output.name and a.array.space == "device" and a.mode == "write"
            ]  # fmt: skip
            sure = [a for a, _ in joined([a for a in writes if a.exact])]
            if not sure:
                text = f"no write of {output.name} is sure to happen"
                line = writes[0].line if writes else None
                return Verdict(NOT_SUPPORTED, line, text)
            if not self._covered(output.name, sure, effort) and not self._covered(
                output.name, self._unwrapped(sure, effort), effort
            ):
                text = f"which thread writes an element of {output.name} is not found"
                return self.questions.open(sure[0].line, sure[0].where, text, effort)
        return Verdict(PROVED)

    def _unwrapped(self, writes: list[Access], effort: Effort) -> list[Access]:
        plain = [self.questions.unwrapped(a, effort) for a in writes]
        return [a for a, _ in joined(plain)]

    def _covered(self, name: str, writes: list[Access], effort: Effort) -> bool:
        """Whether every element is written: by a thread that is found from the element."""
        plain = terms.symbol("element", 0, 2**63 - 1)
        by_digits = _in_digits(self.call.shapes[name])

        def ask(case: Case) -> Any:
            """By digits first, of which quotients are known."""
            if by_digits is not None and not miss(case, by_digits, 1.0):
                return False
            return miss(case, plain, self.questions.timeout / (4 if case.is_wide else 1))

        def miss(case: Case, element: Term, most: float) -> bool:
            element = terms.replaced(element, case.by)
            missed = [terms.lt(element, self.call.lengths[name])]
            for write in writes[:12]:
                for found in self._writers(write, element, case):
                    missed.append(terms.not_(self._written(write, element, found, case)))
            made: dict[Term, Term] = {}
            facts = self.questions.related(missed) if most <= 1 else self.call.facts
            stated = [terms.replaced(t, case.by, made) for t in (*facts, *missed)]
            if terms.FALSE in stated:
                return False
            try:
                return Question().answer(stated, effort, most) is not False
            except TooHard:
                return True

        return self.questions.everywhere(ask, effort) is False

    def _writers(self, write: Access, element: Term, case: Case) -> Iterator[dict[Term, Term]]:
        """Guesses of the thread that writes an element, a few."""
        made: dict[Term, Term] = {}
        simple = write._replace(
            element=terms.replaced(write.element, case.by, made),
            path=tuple(terms.replaced(c, case.by, made) for c in write.path),
        )
        for i, found in enumerate(thread_of(simple, element, {})):
            if i >= 3:
                return
            yield found

    def _written(self, write: Access, element: Term, found: dict[Term, Term], case: Case) -> Term:
        """That a thread exists and writes an element."""
        made: dict[Term, Term] = {}
        made_case: dict[Term, Term] = {}

        def at(term: Term) -> Term:
            return terms.replaced(terms.replaced(term, case.by, made_case), found, made)

        first = at(write.element)
        hits = terms.and_(
            terms.le(first, element),
            terms.lt(element, terms.add(first, terms.const(write.width))),
        )
        leaves = [s for axis in self.call.threads for s in axis]
        exists = [at(fact) for fact in self.call.thread_facts]
        natural = [
            terms.le(terms.const(0), found[leaf])
            for leaf in (*leaves, *(loop.counter for loop in write.loops)) if leaf in found
        ]  # fmt: skip
        return terms.and_(hits, *exists, *natural, *map(at, write.path))


def _in_digits(shape: tuple[Term, ...]) -> Term | None:
    """Any element of an array without dims that are 0, by its place along each dim; None of arrays
    that have no two dims."""
    if len(shape) < 2:
        return None
    element = terms.const(0)
    for i, size in enumerate(shape):
        place = terms.fmod(terms.symbol(f"element.{i}", 0, 2**63 - 1), size)
        element = terms.add(terms.mul(element, size), place)
    return element
