"""Questions about any call of an op: whether conditions can hold in one, and in which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...source.accesses import terms
from ...source.accesses.evaluation import NoValue, evaluate
from ...source.accesses.model import Access
from ...source.accesses.terms import Term
from .calls import Call
from .cases import Case, cases_of
from .digits import last_digits, outside
from .effort import Effort
from .search import confirmed
from .solver import Question, TooHard
from .verdicts import NOT_SUPPORTED, Verdict

_LARGE = (1, 2, 3, 32, 1024, 32768, 46341, 65536, 65537, 2**20, 2**24, 2**30, 2**31 - 2, 2**31 - 1)
_HARD = frozenset({"fdiv", "fmod", "quot", "rem", "ite", "wrap"})


class Questions:
    """What can hold in a call.

    Args:
        op: the op's name.
        call: any call that a body carries out.
        timeout: seconds for each property, on a machine that is idle.
    """

    def __init__(self, op: str, call: Call, timeout: float) -> None:
        self.op, self.call, self.timeout = op, call, timeout
        self.cases = cases_of(call)
        self._sizes = {d.term for d in call.domains if d.kind == "dim"}
        self._plain: dict[Access, Access] = {}
        self._known: dict[tuple[Term, tuple[Term, ...]], bool] = {}

    def everywhere(self, ask: Callable[[Case], Any], effort: Effort, *, quick: bool = False) -> Any:
        """False where that is the answer in all cases, else the first other one: of a case that
        has no narrower ones, or none that are found quickly."""
        waiting = list(self.cases)
        while waiting:
            case = waiting.pop(0)
            answer = ask(case)
            if answer is False:
                continue
            narrower = case.narrower() if effort.left and not (quick and not case.free) else []
            if not narrower:
                return answer
            waiting = [*narrower, *waiting]
        return False

    def cannot(self, wrong: Sequence[Term], effort: Effort, *, quick: bool = False) -> Any:
        """Whether conditions cannot all hold in a call: False if they cannot, else where Z3 says
        they might: a case, the question, and a model or None."""

        few = self.related(wrong)

        def ask(case: Case) -> Any:
            made: dict[Term, Term] = {}
            facts, conditions = (
                [terms.replaced(t, case.by, made) for t in of]
                for of in (few if quick else self.call.facts, wrong)
            )
            stated = [*facts, *conditions]
            if terms.FALSE in stated:
                return False
            question = Question()
            most = self.timeout / 4 if case.is_wide else self.timeout
            try:
                model = question.answer(stated, effort, min(most, 1.0) if quick else most)
            except TooHard:
                if not quick:
                    raise
                return case.by, question, None
            # Products may contradict each other in a model.
            if model is not False and effort.left and not quick and not case.is_wide:
                real = question.answer(stated, effort, self.timeout / 4, exact=True)
                model = model if real is None else real
            return model is not False and (case.by, question, model)

        return self.everywhere(ask, effort, quick=quick)

    def is_size(self, term: Term) -> bool:
        """Whether a term is a size, alike in all threads, and not negative."""
        natural = term.low is not None and term.low >= 0
        return natural and all(leaf.op == "symbol" and leaf in self._sizes for leaf in term.leaves)

    def related(self, conditions: Sequence[Term]) -> list[Term]:
        """The facts that are of use beside conditions: those of sums and products, and those of
        quotients and choices that are in the conditions, too."""
        there = {t for t in terms.subterms(*conditions) if t.op in _HARD}
        return [
            fact for fact in self.call.facts
            if all(t in there for t in terms.subterms(fact) if t.op in _HARD)
        ]  # fmt: skip

    def inside(
        self, index: Term, width: int, length: Term, holds: Sequence[Term], effort: Effort
    ) -> bool:
        """Whether an index is shown to lie in so many elements, digit by digit; quickly."""
        for high, low, by in last_digits(index, self.is_size):
            above = terms.without(length, by)
            if above is None:
                continue
            if self.cannot([*holds, outside(low, width, by)], effort, quick=True) is False:
                if self.inside(high, 1, above, holds, effort):
                    return True
                wrong = outside(high, 1, above)
                return self.cannot([*holds, wrong], effort, quick=True) is False
        return False

    def open(self, line: int | None, where: str, what: str, effort: Effort) -> Verdict:
        """That something is not decided; if time is up, that this is why."""
        text = what if effort.left else f"no answer in {self.timeout:g} s: {what}"
        return Verdict(NOT_SUPPORTED, line, text, None, where)

    # -- what wraps --------------------------------------------------------------------------------

    def unwrapped(self, access: Access, effort: Effort) -> Access:
        """An access without what wraps of indices and conditions, where nothing is proved to."""
        if access in self._plain:
            return self._plain[access]

        def plain(term: Term, path: tuple[Term, ...]) -> Term:
            made: dict[Term, Term] = {}
            wraps = [t for t in terms.subterms(term) if t.op == "wrap"]
            for each in reversed(wraps):  # what is inside comes first
                wrap = terms.replaced(each, made)
                if wrap.op != "wrap" or not effort.left:
                    continue
                if (wrap, path) not in self._known:
                    self._known[wrap, path] = self._fits(wrap, path, effort)
                if self._known[wrap, path]:
                    made[each] = wrap.args[0]
            return terms.replaced(term, made)

        path: tuple[Term, ...] = ()
        for condition in access.path:
            path = (*path, plain(condition, path))
        found = access._replace(element=plain(access.element, path), path=path)
        if effort.left:
            self._plain[access] = found
        return found

    def _fits(self, wrap: Term, path: tuple[Term, ...], effort: Effort) -> bool:
        """Whether nothing wraps where these conditions hold."""
        inner, kind = wrap.args[0], wrap.value
        wrong = terms.or_(
            terms.lt(inner, terms.const(kind.least)), terms.lt(terms.const(kind.most), inner)
        )
        try:
            return self.cannot([*self.call.thread_facts, *path, wrong], effort, quick=True) is False
        except TooHard:
            return False

    # -- calls that do it --------------------------------------------------------------------------

    def real(self, conditions: Sequence[Term], answer: Any, effort: Effort) -> Any:
        """The values of a call and thread that do what may not be, found by sizes that are fixed:
        those of a model, then large ones."""
        by, question, model = answer
        dims = {d.name: by.get(d.term, d.term) for d in self.call.domains if d.kind == "dim"}
        tries: list[dict[str, int]] = []
        if model is not None:
            sizes = {leaf.value: leaf.low or 0 for t in dims.values() for leaf in t.leaves}
            sizes |= _by_name(question.values(model))
            tries.append({name: evaluate(term, sizes) for name, term in dims.items()})
        tries += self._large(list(dims))
        for sizes in tries[:60]:
            fixed = {**sizes, **self.call.ranks}
            if not effort.left:
                return None
            again = Question(fixed)
            try:
                model = again.answer([*self.call.facts, *conditions], effort, 2.0)
            except TooHard:
                continue
            if not model:
                continue
            values = {**fixed, **_by_name(again.values(model))}
            for domain in self.call.domains:
                values.setdefault(domain.name, domain.term.low or 0)
            try:
                holds = all(evaluate(c, values) for c in (*self.call.facts, *conditions))
            except NoValue:
                continue
            if holds and confirmed(self.call, self.op, values):
                return values
        return None

    def _large(self, names: list[str]) -> list[dict[str, int]]:
        """Large sizes: each dim large alone, then two of them."""
        tries: list[dict[str, int]] = []
        for n in _LARGE[4:]:
            for name in names:
                for m in (1, 2, 3):
                    tries.append({**dict.fromkeys(names, m), name: n})
            if len(names) > 1 and n < 2**17:
                for i, a in enumerate(names):
                    for b in names[i + 1 :]:
                        tries.append({**dict.fromkeys(names, 1), a: n, b: n - 1})
        return tries


def _by_name(values: dict[Term, int]) -> dict[Any, int]:
    """Values under the names that terms are evaluated by."""
    named: dict[Any, int] = {}
    for leaf, value in values.items():
        named[leaf.value if leaf.op == "symbol" else leaf] = value
    return named
