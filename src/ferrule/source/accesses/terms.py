"""Integers and conditions as terms: exact, with the least and the largest that each can be.

Terms mean integers without bounds. That an unsigned type wraps is a part of a term (``wrap``); that
a signed one does not overflow is for `model.Obligation` to say. Equal terms are one object.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakValueDictionary

from .kinds import Kind

_COUNT = itertools.count()
_CONDITIONS = frozenset({"lt", "le", "eq", "not", "and", "or"})


class Term:
    """One term. Made by the functions of this module alone.

    Attributes:
        op: ``const``; the leaves ``symbol`` (what a launch gives: a name), ``unknown`` (anything,
            one thing per thread and round), ``counter`` (a loop's round, from 0); ``data`` (an
            element of an input, whose ``args`` are its index); ``add``, ``mul``; ``quot`` and
            ``rem``, as C++ divides; ``fdiv`` and ``fmod``, which round down; ``wrap``; ``ite``;
            ``lt``, ``le``, ``eq``, ``not``, ``and``, ``or``.
        args: the operands.
        value: of a constant its value, of a leaf its name, of ``wrap`` its `Kind`.
        low, high: the least and the largest that it can be; None where there is no bound.
        condition: whether it is true or false.
    """

    __slots__ = ("__weakref__", "_leaves", "args", "condition", "high", "low", "op", "value")

    def __init__(
        self, op: str, args: tuple[Term, ...], value: Any, low: int | None, high: int | None
    ) -> None:
        self.op, self.args, self.value, self.low, self.high = op, args, value, low, high
        is_truth = (op == "const" and type(value) is bool) or (
            op in ("symbol", "unknown", "data") and (low, high) == (None, False)
        )
        self.condition: bool = op in _CONDITIONS or is_truth
        self._leaves: frozenset[Term] | None = None

    def __repr__(self) -> str:
        return shown(self)

    @property
    def leaves(self) -> frozenset[Term]:
        """The symbols, unknowns, counters and data in it."""
        if self._leaves is None:
            own = {self} if self.op in ("symbol", "unknown", "counter", "data") else set()
            self._leaves = frozenset(own).union(*(a.leaves for a in self.args))
        return self._leaves

    @property
    def is_exact(self) -> bool:
        """Whether sizes, the thread and what inputs hold decide it."""
        return all(leaf.op != "unknown" for leaf in self.leaves)


_known: WeakValueDictionary[tuple[Any, ...], Term] = WeakValueDictionary()


def _term(
    op: str, *args: Term, value: Any = None, low: int | None = None, high: int | None = None
) -> Term:
    key = (op, args, value, type(value), low, high)
    term = _known.get(key)
    if term is None:
        term = _known[key] = Term(op, args, value, low, high)
    return term


# -- leaves ----------------------------------------------------------------------------------------


def const(value: int) -> Term:
    """A number."""
    return _term("const", value=int(value), low=int(value), high=int(value))


TRUE, FALSE = _term("const", value=True), _term("const", value=False)


def truth(value: bool) -> Term:
    """True or false."""
    return TRUE if value else FALSE


def symbol(name: str, low: int | None = None, high: int | None = None) -> Term:
    """What a launch gives: a size, a position."""
    return _term("symbol", value=name, low=low, high=high)


def flag(name: str) -> Term:
    """A condition that a launch gives."""
    return _term("symbol", value=name, high=False)


def unknown(why: str, kind: Kind | None) -> Term:
    """Anything that a type holds, or a condition that may hold or not; ``why`` nothing is known."""
    value = (next(_COUNT), why)
    if kind is None or kind.bits == 1:
        return _term("unknown", value=value, high=False)
    return _term("unknown", value=value, low=kind.least, high=kind.most)


def anything(why: str, low: int | None, high: int | None) -> Term:
    """Any number from ``low`` to ``high``."""
    return _term("unknown", value=(next(_COUNT), why), low=low, high=high)


def counter(high: int | None = None) -> Term:
    """How many rounds of a loop are behind."""
    return _term("counter", value=next(_COUNT), low=0, high=high)


def narrowed(leaf: Term, low: int | None, high: int | None) -> Term:
    """A leaf of which more is known: a constant, where it can be but one number."""
    if low is not None and low == high:
        return const(low)
    return _term(leaf.op, *leaf.args, value=leaf.value, low=low, high=high)


def data(array: str, index: Term, kind: Kind | None, *more: Term) -> Term:
    """An element of an input of integers; of no kind, a number that is not negative."""
    if kind is None:
        return _term("data", index, *more, value=array, low=0)
    if kind.bits == 1:
        return _term("data", index, value=array, high=False)
    return _term("data", index, value=array, low=kind.least, high=kind.most)


# -- integers --------------------------------------------------------------------------------------


def _less(a: int | None, b: int | None, more: int = 0) -> bool:
    """Whether ``a < b + more`` is known."""
    return a is not None and b is not None and a < b + more


def _sum(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b


def parts_of(a: Term) -> tuple[Term, ...]:
    """What a sum consists of."""
    return a.args if a.op == "add" else (a,)


def split(a: Term) -> tuple[int, Term | None]:
    """A term as a number times another."""
    if a.op == "const":
        return a.value, None
    if a.op == "mul" and a.args[0].op == "const":
        return a.args[0].value, a.args[1]
    return 1, a


def factors_of(a: Term) -> Iterator[tuple[int, Term | None]]:
    """What a sum consists of, each as a number times a term."""
    return map(split, parts_of(a))


def add(*terms: Term) -> Term:
    """A sum: equal parts are collected, and numbers last."""
    parts: dict[Term | None, int] = {}
    for term in terms:
        for factor, rest in factors_of(term):
            parts[rest] = parts.get(rest, 0) + factor
    for rest, factor in list(parts.items()):
        if rest is not None and rest.op == "fmod" and factor and (rest.args[1].low or 0) >= 1:
            _rejoin(parts, rest, factor)
    number = parts.pop(None, 0)
    rests = [mul(const(n), rest) for rest, n in parts.items() if n and rest is not None]
    if number or not rests:
        rests.append(const(number))
    if len(rests) == 1:
        return rests[0]
    low: int | None = 0
    high: int | None = 0
    for part in rests:
        low, high = _sum(low, part.low), _sum(high, part.high)
    return _term("add", *rests, low=low, high=high)


def _rejoin(parts: dict[Term | None, int], rest: Term, factor: int) -> None:
    """``x / b * b + x % b`` is x."""
    x, b = rest.args
    times, product = split(mul(fdiv(x, b), b))
    if product is not None and parts.get(product) == factor * times and product is not x:
        del parts[product], parts[rest]
        again, whole = split(x)
        parts[whole] = parts.get(whole, 0) + factor * again


def mul(a: Term, b: Term) -> Term:
    """A product; a number stands first."""
    if b.op == "const":
        a, b = b, a
    if a.op == "const":
        if b.op == "const":
            return const(a.value * b.value)
        if a.value in (0, 1):
            return b if a.value else a
        if b.op == "mul" and b.args[0].op == "const":
            return mul(const(a.value * b.args[0].value), b.args[1])
        if b.op == "add":
            return add(*(mul(a, part) for part in b.args))
    elif b.op == "mul" and b.args[0].op == "const":
        return mul(b.args[0], mul(a, b.args[1]))
    elif a.op == "mul" and a.args[0].op == "const":
        return mul(a.args[0], mul(a.args[1], b))
    ends = (a.low, a.high, b.low, b.high)
    low = high = None
    if None not in ends:
        products = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]  # type: ignore[operator]
        low, high = min(products), max(products)
    elif a.low is not None and b.low is not None and a.low >= 0 and b.low >= 0:
        low = a.low * b.low
    elif a.op == "const" and a.value < 0:
        high = None if b.low is None else a.value * b.low
        low = None if b.high is None else a.value * b.high
    return _term("mul", a, b, low=low, high=high)


def power_of(a: Term) -> int:
    """The largest power of 2 that divides a term, as its numbers show."""
    return min((n & -n for n, _ in factors_of(a) if n), default=1)


def neg(a: Term) -> Term:
    return mul(const(-1), a)


def sub(a: Term, b: Term) -> Term:
    return add(a, neg(b))


def _by(a: Term, b: Term, up: bool) -> tuple[Term, Term] | None:
    """Quotient and remainder, where they are known."""
    if b.op != "const" or b.value == 0:
        return None
    if b.value == 1:
        return a, const(0)
    if a.op == "const":
        q, r = divmod(a.value, b.value)
        if up and r and (a.value < 0) != (b.value < 0):
            q, r = q + 1, r - b.value
        return const(q), const(r)
    if _less(-1, a.low) and _less(a.high, b.value):
        return const(0), a
    if up and (a.low is None or a.low < 0):
        return None
    multiples: list[Term] = []
    rest: list[Term] = []
    for factor, other in factors_of(a):
        times = abs(factor) // abs(b.value) * (1 if (factor < 0) == (b.value < 0) else -1)
        if times:
            multiples.append(mul(const(times), other or const(1)))
        if factor - times * b.value:
            rest.append(mul(const(factor - times * b.value), other or const(1)))
    if not multiples:
        return None
    left = add(*rest)
    return add(*multiples, fdiv(left, b)), fmod(left, b)


def without(a: Term, b: Term) -> Term | None:
    """``a / b`` of a product that has ``b`` as a factor."""
    if a is b:
        return const(1)
    if a.op == "mul":
        for x, y in (a.args, a.args[::-1]):
            if (rest := without(x, b)) is not None:
                return mul(rest, y)
    return None


def _parts(a: Term, b: Term) -> tuple[Term, Term] | None:
    """Quotient and remainder of a sum of multiples of ``b`` and a remainder by it."""
    if b.low is None or b.low < 1:
        return None
    multiples: list[Term] = []
    rest: list[Term] = []
    for part in parts_of(a):
        multiple = without(part, b)
        (rest if multiple is None else multiples).append(part if multiple is None else multiple)
    if (
        not multiples
        or len(rest) > 1
        or (rest and (rest[0].op, rest[0].args[1:]) != ("fmod", (b,)))
    ):
        return None
    return add(*multiples), add(*rest)


def fdiv(a: Term, b: Term) -> Term:
    """A quotient, rounded down."""
    if known := _by(a, b, False) or _parts(a, b):
        return known[0]
    low, high = None, None
    if _less(0, b.low) and b.low is not None:
        least = b.low
        low = None if a.low is None else (a.low // least if a.low < 0 else 0)
        high = None if a.high is None else (a.high // least if a.high >= 0 else -1)
        if b.op == "const" and a.low is not None:
            low = a.low // b.value
    return _term("fdiv", a, b, low=low, high=high)


def fmod(a: Term, b: Term) -> Term:
    """A remainder of what is rounded down: never negative, for a divisor that is positive."""
    if known := _by(a, b, False) or _parts(a, b):
        return known[1]
    positive = _less(0, b.low)
    high = b.high - 1 if positive and b.high is not None else None
    if positive and a.low is not None and a.low >= 0 and a.high is not None:
        high = a.high if high is None else min(high, a.high)
    return _term("fmod", a, b, low=0 if positive else None, high=high)


def quot(a: Term, b: Term) -> Term:
    """A quotient, rounded to zero, as in C++."""
    return _to_zero("quot", a, b)


def rem(a: Term, b: Term) -> Term:
    """A remainder with the sign of what is divided, as in C++."""
    return _to_zero("rem", a, b)


def _to_zero(op: str, a: Term, b: Term) -> Term:
    is_rem, natural = op == "rem", _less(-1, a.low)
    if known := _by(a, b, True):
        return known[is_rem]
    if natural and _less(0, b.low):
        return fmod(a, b) if is_rem else fdiv(a, b)
    low = 0 if natural and (is_rem or _less(-1, b.low)) else None
    return _term(op, a, b, low=low, high=a.high if natural else None)


def within(a: Term, kind: Kind) -> bool:
    """Whether a term is known to fit into a type."""
    return a.low is not None and a.high is not None and kind.least <= a.low and a.high <= kind.most


def wrap(a: Term, kind: Kind) -> Term:
    """A term as a type holds it, which leaves out what does not fit."""
    if a.op == "const":
        value = a.value & ((1 << kind.bits) - 1)
        return const(value - (1 << kind.bits) if kind.signed and value > kind.most else value)
    if within(a, kind):
        return a
    # What wraps within what wraps to no fewer bits wraps once, also below sums.
    if a.op == "wrap" and a.value.bits >= kind.bits:
        return wrap(a.args[0], kind)
    return _term("wrap", a, value=kind, low=kind.least, high=kind.most)


def ite(c: Term, a: Term, b: Term) -> Term:
    """``c ? a : b``, of numbers or of conditions."""
    if c is TRUE or a is b:
        return a
    if c is FALSE:
        return b
    if a.condition:
        return or_(and_(c, a), and_(not_(c), b))
    low = None if a.low is None or b.low is None else min(a.low, b.low)
    high = None if a.high is None or b.high is None else max(a.high, b.high)
    below = c.args[0] if c.op == "not" else c
    if below.op == "lt" and {*below.args} == {a, b}:  # the smaller or the larger of two
        x, y = below.args[::-1] if c.op == "not" else below.args  # x < y, or x <= y
        if _less(x.high, y.low, 1):
            return x if a is x else y
        if _less(y.high, x.low, 1):
            return y if a is x else x
        if a is x:
            high = min((t.high for t in (a, b) if t.high is not None), default=None)
        else:
            low = max((t.low for t in (a, b) if t.low is not None), default=None)
    return _term("ite", c, a, b, low=low, high=high)


def least(a: Term, b: Term) -> Term:
    """The smaller one."""
    return ite(le(a, b), a, b)


def largest(a: Term, b: Term) -> Term:
    """The larger one."""
    return ite(le(a, b), b, a)


# -- conditions ------------------------------------------------------------------------------------


def lt(a: Term, b: Term) -> Term:
    d = sub(a, b)
    if _less(d.high, 0) or _less(a.high, b.low):
        return TRUE
    if _less(-1, d.low) or _less(b.high, a.low, 1):
        return FALSE
    return _term("lt", a, b)


def le(a: Term, b: Term) -> Term:
    return not_(lt(b, a))


def eq(a: Term, b: Term) -> Term:
    if a.condition:
        return or_(and_(a, b), and_(not_(a), not_(b)))
    d = sub(a, b)
    if d.op == "const":
        return truth(d.value == 0)
    if _less(0, d.low) or _less(d.high, 0):
        return FALSE
    return _term("eq", a, b)


def not_(a: Term) -> Term:
    if a.op == "const":
        return truth(not a.value)
    if a.op == "not":
        return a.args[0]
    return _term("not", a)


def and_(*terms: Term) -> Term:
    return _joined("and", TRUE, FALSE, terms)


def or_(*terms: Term) -> Term:
    return _joined("or", FALSE, TRUE, terms)


def _joined(op: str, nothing: Term, all_: Term, terms: tuple[Term, ...]) -> Term:
    """Conditions joined: ``nothing`` says nothing, and ``all_`` all."""
    parts: dict[Term, None] = {}
    for term in terms:
        parts.update(dict.fromkeys(term.args if term.op == op else (term,)))
    parts.pop(nothing, None)
    if all_ in parts or any(not_(part) in parts for part in parts):
        return all_
    return _term(op, *parts) if len(parts) > 1 else next(iter(parts), nothing)


# -- all of them -----------------------------------------------------------------------------------


def subterms(*terms: Term) -> Iterator[Term]:
    """These terms and all in them, each once."""
    seen: set[Term] = set()
    waiting = list(terms)
    while waiting:
        term = waiting.pop()
        if term not in seen:
            seen.add(term)
            yield term
            waiting += term.args


_MAKE: dict[str, Any] = {
    "add": add, "mul": mul, "quot": quot, "rem": rem, "fdiv": fdiv, "fmod": fmod, "ite": ite,
    "lt": lt, "eq": eq, "not": not_, "and": and_, "or": or_,
}  # fmt: skip


def replaced(term: Term, by: Mapping[Term, Term], made: dict[Term, Term] | None = None) -> Term:
    """A term with others in place of some of its parts."""
    made = {} if made is None else made
    if (new := by.get(term)) is not None:
        return new
    if not term.args:
        return term
    if (new := made.get(term)) is None:
        args = tuple(replaced(a, by, made) for a in term.args)
        if all(a is b for a, b in zip(args, term.args, strict=True)):
            new = term
        elif term.op == "wrap":
            new = wrap(args[0], term.value)
        elif term.op == "data":
            new = _term("data", *args, value=term.value, low=term.low, high=term.high)
        else:
            new = _MAKE[term.op](*args)
        made[term] = new
    return new


def shown(term: Term) -> str:
    """A term as text."""
    if not term.args or term.op == "data":
        inner = f"[{shown(term.args[0])}]" if term.args else ""
        return f"{term.op}:" * (term.op in ("unknown", "counter")) + f"{term.value}{inner}"
    kind = f"<{term.value.name}>" if term.op == "wrap" else ""
    return f"{term.op}{kind}({', '.join(map(shown, term.args))})"
