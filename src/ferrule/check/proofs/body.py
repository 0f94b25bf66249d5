"""Proofs about one body of an op, in any call that it carries out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...source.accesses import terms
from ...source.accesses.evaluation import NoValue, evaluate
from ...source.accesses.model import Access, Obligation, Times
from ...source.accesses.terms import Term
from .calls import Call
from .coverage import Coverage
from .digits import outside
from .effort import Effort
from .neighbours import joined
from .questions import Questions
from .races import Races
from .search import (
    Fault,
    Search,
    broken,
    call_text,
    confirmed,
    out_of_bounds,
    thread_words,
)
from .solver import TooHard
from .verdicts import COUNTEREXAMPLE, NOT_SUPPORTED, PROVED, Verdict, unknown_of


class Prover:
    """Proves, or refutes, what one body does in any call.

    Args:
        op: the op's name.
        call: any call that the body carries out.
        timeout: seconds for each property, on a machine that is idle.
    """

    def __init__(self, op: str, call: Call, timeout: float) -> None:
        self.op, self.call, self.timeout = op, call, timeout
        self.search = Search(call)
        self.questions = Questions(op, call, timeout)

    def verdicts(self) -> dict[str, Verdict]:
        """What is known of each property."""
        faults = {
            name: fault for name, fault in self.search.run().items()
            if confirmed(self.call, self.op, fault.values)
        }  # fmt: skip
        effort = Effort(self.timeout)
        obliged = self._asked(self._obligations, effort)
        verdicts: dict[str, Verdict] = {}
        for name, ask in (
            ("bounds", self._bounds),
            ("races", Races(self.questions).verdict),
            ("coverage", Coverage(self.questions).verdict),
        ):  # fmt: skip
            if name in faults:
                verdicts[name] = self._refuted(faults[name])
                continue
            if name == "bounds":
                sound = obliged.status == PROVED
                verdicts[name] = self._asked(ask, effort) if sound else obliged
                continue
            verdict = self._asked(ask, Effort(self.timeout))
            if verdict.status == PROVED and obliged.status != PROVED:
                # What an overflow makes of an index is not known.
                text = f"it rests on what is not proved: {obliged.message}"
                verdict = Verdict(NOT_SUPPORTED, obliged.line, text, None, obliged.where)
            verdicts[name] = verdict
        return verdicts

    @staticmethod
    def _asked(ask: Callable[[Effort], Verdict], effort: Effort) -> Verdict:
        try:
            return ask(effort)
        except TooHard as why:
            return Verdict(NOT_SUPPORTED, None, str(why))
        except RecursionError:
            return Verdict(NOT_SUPPORTED, None, "terms that are too deep")
        except NoValue as why:
            return Verdict(NOT_SUPPORTED, None, f"an index has no value: {why}")

    def _refuted(self, fault: Fault) -> Verdict:
        text = call_text(self.call, self.op, fault.values)
        return Verdict(COUNTEREXAMPLE, fault.line, fault.message, text, fault.where)

    # -- bounds ------------------------------------------------------------------------------------

    def _obligations(self, effort: Effort) -> Verdict:
        for o in self.call.found.obligations:
            verdict = self._obligation(o, effort)
            if verdict is not None:
                return verdict
        return Verdict(PROVED)

    def _bounds(self, effort: Effort) -> Verdict:
        anywhere = [a._replace(times=Times()) for a in self.call.found.accesses]
        for whole, parts in joined(anywhere, modes=False):
            verdict = self._inside(whole, effort)
            if verdict is None:
                continue
            if len(parts) > 1 and verdict.status != COUNTEREXAMPLE:  # which of them is to blame
                found = (self._inside(part, effort) for part in parts)
                verdict = next(filter(None, found), None)
            if verdict is not None:
                return verdict
        return Verdict(PROVED)

    def _obligation(self, o: Obligation, effort: Effort) -> Verdict | None:
        if o.what == "division":
            wrong = terms.eq(o.term, terms.const(0))
        else:
            least, most = terms.const(o.kind.least), terms.const(o.kind.most)
            wrong = terms.or_(terms.lt(o.term, least), terms.lt(most, o.term))
        conditions = [*self.call.thread_facts, *o.path, wrong]
        answer = self.questions.cannot(conditions, effort)
        if answer is False:
            return None
        values = None
        if o.what != "wrap" and all(c.is_exact for c in (o.term, *o.path)):
            values = self.questions.real(conditions, answer, effort)
        if values is not None:
            value = evaluate(o.term, values)
            text = f"{broken(o, value)}, in {thread_words(self.call, values)}"
            call = call_text(self.call, self.op, values)
            return Verdict(COUNTEREXAMPLE, o.line, text, call, o.where)
        words = {"division": "a division by zero", "overflow": f"overflow of {o.kind.name}",
                 "wrap": f"a loop's {o.kind.name}, which may wrap,"}  # fmt: skip
        return self.questions.open(o.line, o.where, f"{words[o.what]} is not ruled out", effort)

    def _inside(self, access: Access, effort: Effort) -> Verdict | None:
        length = access.array.length
        if length is None:
            length = self.call.lengths[access.array.name]
        answer: Any = False
        conditions: list[Term] = []
        # As it is written, sums times sizes are of one piece, which is often easier.
        for quick in (True, False):
            version = access if quick else self.questions.unwrapped(access, effort)
            holds = [*self.call.thread_facts, *version.path]
            if self.questions.inside(version.element, version.width, length, holds, effort):
                return None
            conditions = [*holds, outside(version.element, version.width, length)]
            answer = self.questions.cannot(conditions, effort, quick=quick)
            if answer is False:
                return None
        name = access.array.name
        if access.exact:
            values = self.questions.real(conditions, answer, effort)
            if values is not None:
                what = out_of_bounds(access, evaluate(access.element, values),
                                     evaluate(length, values))  # fmt: skip
                text = f"{what}, in {thread_words(self.call, values)}"
                call = call_text(self.call, self.op, values)
                return Verdict(COUNTEREXAMPLE, access.line, text, call, access.where)
            return self.questions.open(
                access.line, access.where, f"whether an index leaves {name} is not decided", effort
            )
        return Verdict(NOT_SUPPORTED, access.line, f"the index of {name} depends on "
                       f"{unknown_of(access)}", None, access.where)  # fmt: skip
