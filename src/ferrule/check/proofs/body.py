"""Proofs about one body of an op, in any call that it carries out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...source.accesses import terms
from ...source.accesses.evaluation import NoValue, evaluate
from ...source.accesses.model import Access, Obligation
from ...source.accesses.terms import Term
from .calls import Call
from .inverse import thread_of
from .search import (
    Fault,
    Search,
    broken,
    call_text,
    confirmed,
    out_of_bounds,
    thread_words,
)
from .solver import Clock, Question, TooHard
from .verdicts import COUNTEREXAMPLE, NOT_SUPPORTED, PROVED, Verdict

_LARGE = (1, 2, 3, 32, 1024, 32768, 46341, 65536, 65537, 2**20, 2**24, 2**30, 2**31 - 2, 2**31 - 1)


class Prover:
    """Proves, or refutes, what one body does in any call.

    Args:
        op: the op's name.
        call: any call that the body carries out.
        timeout: seconds for each property.
    """

    def __init__(self, op: str, call: Call, timeout: float) -> None:
        self.op, self.call, self.timeout = op, call, timeout
        self.search = Search(call)
        self.cases = list(_cases(call))
        self.accesses: list[Access] = list(call.found.accesses)
        self._plain: dict[Access, Access] = {}
        self._known: dict[tuple[Term, tuple[Term, ...]], bool] = {}

    def verdicts(self) -> dict[str, Verdict]:
        """What is known of each property."""
        faults = {
            name: fault for name, fault in self.search.run().items()
            if confirmed(self.call, self.op, fault.values)
        }  # fmt: skip
        clock = Clock(self.timeout)
        obliged = self._asked(self._obligations, clock)
        verdicts: dict[str, Verdict] = {}
        for name, ask in (
            ("bounds", self._bounds), ("races", self._races), ("coverage", self._coverage),
        ):  # fmt: skip
            if name in faults:
                verdicts[name] = self._refuted(faults[name])
                continue
            if name == "bounds":
                sound = obliged.status == PROVED
                verdicts[name] = self._asked(ask, clock) if sound else obliged
                continue
            verdict = self._asked(ask, Clock(self.timeout))
            if verdict.status == PROVED and obliged.status != PROVED:
                # What an overflow makes of an index is not known.
                text = f"it rests on what is not proved: {obliged.message}"
                verdict = Verdict(NOT_SUPPORTED, obliged.line, text, None, obliged.where)
            verdicts[name] = verdict
        return verdicts

    @staticmethod
    def _asked(ask: Callable[[Clock], Verdict], clock: Clock) -> Verdict:
        try:
            return ask(clock)
        except TooHard as why:
            return Verdict(NOT_SUPPORTED, None, str(why))
        except RecursionError:
            return Verdict(NOT_SUPPORTED, None, "terms that are too deep")
        except NoValue as why:
            return Verdict(NOT_SUPPORTED, None, f"an index has no value: {why}")

    def _refuted(self, fault: Fault) -> Verdict:
        text = call_text(self.call, self.op, fault.values)
        return Verdict(COUNTEREXAMPLE, fault.line, fault.message, text, fault.where)

    # -- questions ---------------------------------------------------------------------------------

    def _cannot(self, wrong: Sequence[Term], clock: Clock, *, quick: bool = False) -> Any:
        """Whether conditions cannot all hold in a call: False if they cannot, else where Z3 says
        they might: a case, the question, and a model or None."""
        for case in self.cases:
            made: dict[Term, Term] = {}
            stated = [
                terms.replaced(t, case, made)
                for t in (*self.call.facts, *wrong)
            ]  # fmt: skip
            if terms.FALSE in stated:
                continue
            question = Question()
            model = question.answer(stated, min(clock.left, 1.0) if quick else clock.left)
            if (
                model is not False and clock.left and not quick
            ):  # products may contradict each other there
                real = question.answer(stated, min(clock.left, self.timeout / 4), exact=True)
                model = model if real is None else real
            if model is not False:
                return case, question, model
        return False

    def _open(self, line: int | None, where: str, what: str, clock: Clock) -> Verdict:
        """That something is not decided; if time is up, that this is why."""
        text = what if clock.left else f"no answer in {self.timeout:g} s: {what}"
        return Verdict(NOT_SUPPORTED, line, text, None, where)

    # -- bounds ------------------------------------------------------------------------------------

    def _obligations(self, clock: Clock) -> Verdict:
        for o in self.call.found.obligations:
            verdict = self._obligation(o, clock)
            if verdict is not None:
                return verdict
        return Verdict(PROVED)

    def _unwrapped(self, access: Access, clock: Clock) -> Access:
        """An access without what wraps of indices and conditions, where nothing is proved to."""
        if access in self._plain:
            return self._plain[access]

        def plain(term: Term, path: tuple[Term, ...]) -> Term:
            made: dict[Term, Term] = {}
            wraps = [t for t in terms.subterms(term) if t.op == "wrap"]
            for each in reversed(wraps):  # what is inside comes first
                wrap = terms.replaced(each, made)
                if wrap.op != "wrap" or not clock.left:
                    continue
                if (wrap, path) not in self._known:
                    self._known[wrap, path] = self._fits(wrap, path, clock)
                if self._known[wrap, path]:
                    made[each] = wrap.args[0]
            return terms.replaced(term, made)

        path: tuple[Term, ...] = ()
        for condition in access.path:
            path = (*path, plain(condition, path))
        found = access._replace(element=plain(access.element, path), path=path)
        if clock.left:
            self._plain[access] = found
        return found

    def _fits(self, wrap: Term, path: tuple[Term, ...], clock: Clock) -> bool:
        """Whether nothing wraps where these conditions hold."""
        inner, kind = wrap.args[0], wrap.value
        wrong = terms.or_(
            terms.lt(inner, terms.const(kind.least)), terms.lt(terms.const(kind.most), inner)
        )
        try:
            return self._cannot([*self.call.thread_facts, *path, wrong], clock, quick=True) is False
        except TooHard:
            return False

    def _bounds(self, clock: Clock) -> Verdict:
        seen: set[Any] = set()
        for access in self.accesses:
            key = (access.array, access.element, access.width, frozenset(access.path))
            if key in seen:
                continue
            seen.add(key)
            verdict = self._inside(access, clock)
            if verdict is not None:
                return verdict
        return Verdict(PROVED)

    def _obligation(self, o: Obligation, clock: Clock) -> Verdict | None:
        if o.what == "division":
            wrong = terms.eq(o.term, terms.const(0))
        else:
            least, most = terms.const(o.kind.least), terms.const(o.kind.most)
            wrong = terms.or_(terms.lt(o.term, least), terms.lt(most, o.term))
        conditions = [*self.call.thread_facts, *o.path, wrong]
        answer = self._cannot(conditions, clock)
        if answer is False:
            return None
        exact = all(c.is_exact for c in (o.term, *o.path))
        values = self._real(conditions, answer, clock) if exact and o.what != "wrap" else None
        if values is not None:
            value = evaluate(o.term, values)
            text = f"{broken(o, value)}, in {thread_words(self.call, values)}"
            call = call_text(self.call, self.op, values)
            return Verdict(COUNTEREXAMPLE, o.line, text, call, o.where)
        words = {"division": "a division by zero", "overflow": f"overflow of {o.kind.name}",
                 "wrap": f"a loop's {o.kind.name}, which may wrap,"}  # fmt: skip
        return self._open(o.line, o.where, f"{words[o.what]} is not ruled out", clock)

    def _inside(self, access: Access, clock: Clock) -> Verdict | None:
        length = access.array.length
        if length is None:
            length = self.call.lengths[access.array.name]
        answer: Any = False
        conditions: list[Term] = []
        # As it is written, sums times sizes are of one piece, which is often easier.
        for quick in (True, False):
            version = access if quick else self._unwrapped(access, clock)
            end = terms.add(version.element, terms.const(version.width))
            wrong = terms.or_(terms.lt(version.element, terms.const(0)), terms.lt(length, end))
            conditions = [*self.call.thread_facts, *version.path, wrong]
            answer = self._cannot(conditions, clock, quick=quick)
            if answer is False:
                return None
        name = access.array.name
        if access.exact:
            values = self._real(conditions, answer, clock)
            if values is not None:
                what = out_of_bounds(access, evaluate(access.element, values),
                                     evaluate(length, values))  # fmt: skip
                text = f"{what}, in {thread_words(self.call, values)}"
                call = call_text(self.call, self.op, values)
                return Verdict(COUNTEREXAMPLE, access.line, text, call, access.where)
            return self._open(
                access.line, access.where, f"whether an index leaves {name} is not decided", clock
            )
        return Verdict(NOT_SUPPORTED, access.line, f"the index of {name} depends on "
                       f"{_unknown(access)}", None, access.where)  # fmt: skip

    def _real(self, conditions: Sequence[Term], answer: Any, clock: Clock) -> Any:
        """The values of a call and thread that do what may not be, found by sizes that are fixed:
        those of a model, then large ones."""
        case, question, model = answer
        dims = {d.name: case.get(d.term, d.term) for d in self.call.domains if d.kind == "dim"}
        tries: list[dict[str, int]] = []
        if model is not None:
            sizes = {leaf.value: leaf.low or 0 for t in dims.values() for leaf in t.leaves}
            sizes |= _by_name(question.values(model))
            tries.append({name: evaluate(term, sizes) for name, term in dims.items()})
        tries += self._large(list(dims))
        for fixed in tries[:60]:
            if not clock.left:
                return None
            again = Question(fixed)
            try:
                model = again.answer([*self.call.facts, *conditions], min(clock.left, 2.0))
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

    # -- races -------------------------------------------------------------------------------------

    def _races(self, clock: Clock) -> Verdict:
        outputs = set(self.call.body.kernel.output_names)
        accesses = [
            a for a in _distinct(self.accesses)
            if a.array.space == "threadgroup"
            or (a.array.space == "device" and a.array.name in outputs)
        ]  # fmt: skip
        other = _Other(self.call)
        for i, a in enumerate(accesses):
            for b in accesses[i:]:
                if a.array != b.array or (a.mode == b.mode != "write"):
                    continue
                conditions = other.meeting(a, b)
                answer = self._cannot(conditions, clock, quick=True)
                if answer is False:
                    continue
                c, d = self._unwrapped(a, clock), self._unwrapped(b, clock)
                conditions = other.meeting(c, d)
                answer = self._cannot(conditions, clock)
                if answer is not False:
                    return self._race(a, b, answer, conditions, clock)
        return Verdict(PROVED)

    def _race(
        self, a: Access, b: Access, answer: Any, conditions: list[Term], clock: Clock
    ) -> Verdict:
        later = max(a, b, key=lambda access: access.line)
        exact = all(c.is_exact for c in (*a.path, *b.path, a.element, b.element))
        if not exact:
            which = a if not a.exact else b
            text = f"where {a.array.name} is accessed depends on {_unknown(which)}"
            return Verdict(NOT_SUPPORTED, later.line, text, None, later.where)
        values = self._real(conditions, answer, clock)
        if values is None:
            text = f"whether two threads meet in {a.array.name} is not decided"
            return self._open(later.line, later.where, text, clock)
        text = (
            f"two threads meet at element {evaluate(a.element, values)} of {a.array.name}, "
            f"in lines {a.line} and {b.line}"
        )
        return Verdict(COUNTEREXAMPLE, later.line, text, call_text(self.call, self.op, values),
                       later.where)  # fmt: skip

    # -- coverage ----------------------------------------------------------------------------------

    def _coverage(self, clock: Clock) -> Verdict:
        if self.call.body.fill is not None:
            return Verdict(PROVED, None, "outputs are filled before the launch")
        for output in self.call.rule.outputs:
            writes = [
                a for a in _distinct(self.accesses)
                if a.array.name == output.name and a.array.space == "device" and a.mode == "write"
            ]  # fmt: skip
            sure = [a for a in writes if a.exact]
            if not sure:
                text = f"no write of {output.name} is sure to happen"
                line = writes[0].line if writes else None
                return Verdict(NOT_SUPPORTED, line, text)
            if not self._covered(output.name, sure, clock) and not self._covered(
                output.name, [self._unwrapped(a, clock) for a in sure], clock
            ):
                text = f"which thread writes an element of {output.name} is not found"
                return self._open(sure[0].line, sure[0].where, text, clock)
        return Verdict(PROVED)

    def _covered(self, name: str, writes: list[Access], clock: Clock) -> bool:
        """Whether every element is written: by a thread that is found from the element."""
        element = terms.symbol("element", 0, 2**63 - 1)
        inside = terms.lt(element, self.call.lengths[name])
        for case in self.cases:
            missed = [inside]
            for write in writes[:12]:
                for found in self._writers(write, element, case):
                    missed.append(terms.not_(self._written(write, element, found, case)))
            made: dict[Term, Term] = {}
            stated = [terms.replaced(t, case, made) for t in (*self.call.facts, *missed)]
            if terms.FALSE in stated:
                continue
            if not clock.left or Question().answer(stated, clock.left) is not False:
                return False
        return True

    def _writers(
        self, write: Access, element: Term, case: dict[Term, Term]
    ) -> Iterator[dict[Term, Term]]:
        """Guesses of the thread that writes an element, a few."""
        made: dict[Term, Term] = {}
        simple = write._replace(
            element=terms.replaced(write.element, case, made),
            path=tuple(terms.replaced(c, case, made) for c in write.path),
        )
        for i, found in enumerate(thread_of(simple, element, {})):
            if i >= 3:
                return
            yield found

    def _written(
        self, write: Access, element: Term, found: dict[Term, Term], case: dict[Term, Term]
    ) -> Term:
        """That a thread exists and writes an element."""
        made: dict[Term, Term] = {}
        made_case: dict[Term, Term] = {}

        def at(term: Term) -> Term:
            return terms.replaced(terms.replaced(term, case, made_case), found, made)

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

    def meeting(self, a: Access, b: Access) -> list[Term]:
        """What holds where a thread's access and another's are of one element, unordered."""
        call, at = self.call, self.primed
        differ = [terms.not_(terms.eq(s, self.own[s])) for axis in call.threads for s in axis]
        conditions = [terms.or_(*differ)]
        here, there = a.element, at(b.element)
        if a.width == b.width == 1:
            conditions.append(terms.eq(here, there))
        else:
            conditions += [
                terms.lt(here, terms.add(there, terms.const(b.width))),
                terms.lt(there, terms.add(here, terms.const(a.width))),
            ]
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


def _cases(call: Call) -> Iterator[dict[Term, Term]]:
    """Cases of sizes that together are all: none is 0, or one of them is.

    A dim of which the rule says that a number divides it is that times another.
    """
    dims = [d.term for d in call.domains if d.kind == "dim"]
    first: dict[Term, Term] = {}
    for dim in dims:
        by = _divisor(dim, call.facts)
        high = None if dim.high is None else dim.high // by
        name = str(dim.value) if by == 1 else f"{dim.value}/{by}"
        first[dim] = terms.mul(terms.const(by), terms.symbol(name, 1, high))
    yield first
    for dim in dims:
        yield {dim: terms.const(0)}


def _divisor(dim: Term, facts: Sequence[Term]) -> int:
    """The largest number of which a fact says that it divides a dim."""
    found = 1
    for fact in facts:
        if fact.op == "eq" and terms.const(0) in fact.args:
            for side in fact.args:
                if side.op == "fmod" and side.args[0] is dim and side.args[1].op == "const":
                    found = max(found, abs(side.args[1].value))
    return found


def _distinct(accesses: Sequence[Access]) -> list[Access]:
    """Accesses that differ in more than their lines."""
    seen: dict[Any, Access] = {}
    for a in accesses:
        key = (a.array, a.mode, a.element, a.width, a.path, a.times)
        seen.setdefault(key, a)
    return list(seen.values())


def _unknown(access: Access) -> str:
    """What an access depends on that has no exact value."""
    for term in (access.element, *access.path):
        for leaf in sorted(term.leaves, key=str):
            if leaf.op == "unknown":
                return str(leaf.value[1])
    return "what is not known"


def _by_name(values: dict[Term, int]) -> dict[Any, int]:
    """Values under the names that terms are evaluated by."""
    named: dict[Any, int] = {}
    for leaf, value in values.items():
        named[leaf.value if leaf.op == "symbol" else leaf] = value
    return named
