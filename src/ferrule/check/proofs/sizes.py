"""A rule's expressions over terms: sizes for which no call is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...rules.expression import Ints
from ...source.accesses import terms
from ...source.accesses.terms import Term


class Size:
    """A term with Python's operators, as a rule's expressions use them."""

    __slots__ = ("divisors", "term")

    def __init__(self, term: Term, divisors: Divisors) -> None:
        self.term, self.divisors = term, divisors

    def _with(self, other: object, make: Callable[[Term, Term], Term]) -> Size:
        return Size(make(self.term, as_term(other)), self.divisors)

    def _of(self, other: object, make: Callable[[Term, Term], Term]) -> Size:
        return Size(make(as_term(other), self.term), self.divisors)

    def __add__(self, other: object) -> Size:
        return self._with(other, terms.add)

    __radd__ = __add__

    def __mul__(self, other: object) -> Size:
        return self._with(other, terms.mul)

    __rmul__ = __mul__

    def __sub__(self, other: object) -> Size:
        return self._with(other, terms.sub)

    def __rsub__(self, other: object) -> Size:
        return self._of(other, terms.sub)

    def __neg__(self) -> Size:
        return Size(terms.neg(self.term), self.divisors)

    def __floordiv__(self, other: object) -> Size:
        self.divisors.add(as_term(other))
        return self._with(other, _floor)

    def __rfloordiv__(self, other: object) -> Size:
        self.divisors.add(self.term)
        return self._of(other, _floor)

    def __mod__(self, other: object) -> Size:
        self.divisors.add(as_term(other))
        return self._with(other, terms.fmod)

    def __rmod__(self, other: object) -> Size:
        self.divisors.add(self.term)
        return self._of(other, terms.fmod)

    def __lt__(self, other: object) -> Size:
        return self._with(other, terms.lt)

    def __le__(self, other: object) -> Size:
        return self._with(other, terms.le)

    def __gt__(self, other: object) -> Size:
        return self._of(other, terms.lt)

    def __ge__(self, other: object) -> Size:
        return self._of(other, terms.le)

    def __eq__(self, other: object) -> Size:  # type: ignore[override]
        return self._with(other, terms.eq)

    def __ne__(self, other: object) -> Size:  # type: ignore[override]
        return Size(terms.not_(terms.eq(self.term, as_term(other))), self.divisors)

    __hash__ = None  # type: ignore[assignment]


def _floor(a: Term, b: Term) -> Term:
    """``a // b``; of ``-a // b``, as `ceildiv` writes it, what rounds up."""
    if a.op == "mul" and a.args[0].op == "const" and a.args[0].value < 0 and a.high is not None:
        whole = terms.fdiv(terms.sub(terms.add(terms.neg(a), b), terms.const(1)), b)
        return terms.neg(whole)
    return terms.fdiv(a, b)


class Divisors:
    """What expressions divide by, each under the conditions on which it is evaluated."""

    def __init__(self) -> None:
        self.conditions: list[Term] = []
        self.found: list[Term] = []

    def add(self, divisor: Term) -> None:
        """Record that a call divides by this, so that it is not zero."""
        nonzero = terms.not_(terms.eq(divisor, terms.const(0)))
        self.found.append(terms.or_(terms.not_(terms.and_(*self.conditions)), nonzero))

    def under(self, condition: Term, evaluate: Callable[[], Any]) -> Term:
        """The value of an expression that is evaluated where a condition holds."""
        self.conditions.append(condition)
        value = as_term(evaluate())
        self.conditions.pop()
        return value


class OneOf:
    """What a dtype variable, or the device, is: compared with names alone."""

    def __init__(self, name: str, choices: Sequence[str], divisors: Divisors) -> None:
        self.name, self.choices, self.divisors = name, choices, divisors

    def __eq__(self, other: object) -> Any:
        if self.choices and other not in self.choices:
            return Size(terms.FALSE, self.divisors)
        if len(self.choices) == 1:
            return Size(terms.TRUE, self.divisors)
        return Size(terms.flag(f"{self.name} is {other}"), self.divisors)

    __hash__ = None  # type: ignore[assignment]


def as_term(value: object) -> Term:
    """An int, a bool or a `Size` as a term."""
    if isinstance(value, Size):
        return value.term
    if isinstance(value, bool):
        return terms.truth(value)
    return terms.const(int(value))  # type: ignore[call-overload]


def on_terms(divisors: Divisors) -> type[Ints]:
    """How terms are compared and chosen from."""

    def size(term: Term) -> Size:
        return Size(term, divisors)

    class OnTerms(Ints):
        """Terms."""

        minimum = staticmethod(lambda a, b: size(terms.least(as_term(a), as_term(b))))
        maximum = staticmethod(lambda a, b: size(terms.largest(as_term(a), as_term(b))))

        @staticmethod
        def choose(condition: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
            c = as_term(condition)
            if c.op == "const":
                return then() if c.value else otherwise()
            a, b = divisors.under(c, then), divisors.under(terms.not_(c), otherwise)
            return size(terms.ite(c, a, b))

        @staticmethod
        def bucket(n: Any, sizes: Sequence[int]) -> Any:
            value = terms.const(sizes[-1])
            for each in reversed(sizes[:-1]):
                fits = terms.le(as_term(n), terms.const(each))
                value = terms.ite(fits, terms.const(each), value)
            return size(value)

        @staticmethod
        def next_pow2(n: Any) -> Any:
            return OnTerms.bucket(n, [1 << i for i in range(32)])

        @staticmethod
        def both(a: Any, b: Callable[[], Any]) -> Any:
            c = as_term(a)
            return size(terms.and_(c, divisors.under(c, b)))

        @staticmethod
        def either(a: Any, b: Callable[[], Any]) -> Any:
            c = as_term(a)
            return size(terms.or_(c, divisors.under(terms.not_(c), b)))

        @staticmethod
        def negated(a: Any) -> Any:
            return size(terms.not_(as_term(a)))

    return OnTerms
