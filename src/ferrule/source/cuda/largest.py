"""The largest value of an index, for all threads of a launch, as a C++ expression.

Of what is the same for all: places in the grid, dims, sizes and numbers. Sums and products of
numbers that are not negative grow with each of these, as quotients by what is the same for all;
what else an index is made of is limited by conditions, or nothing is said of it.

An expression (of `fr_most`, in include/cuda_bounds.h) tells whether it is known, too: that no part
of it is negative, or 2^31 or more. So what is known has not wrapped on the way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from ..accesses import terms
from ..accesses.limits import Limits
from ..accesses.model import Access
from ..accesses.terms import Term

_COMPONENTS = "xyz"
_LONGEST = 4000  # characters of an expression
_MOST_STEPS = 4000  # terms of a body that are looked at
_MOST_WAYS = 8  # to reach an access
_DEEPEST = 4  # conditions whose ends other conditions limit
_FEW = 256  # what holds as many elements may be indexed by anything of 8 bits
_LIMIT = 1 << 31
# Along an axis: what of `fr::launch` it is, and whether it is less than that.
_VECTORS = {
    "thread_position_in_grid": ("grid", True),
    "thread_position_in_threadgroup": ("threadgroup", True),
    "threadgroup_position_in_grid": ("groups", True),
    "threads_per_grid": ("grid", False),
    "grid_size": ("grid", False),
    "threads_per_threadgroup": ("threadgroup", False),
    "dispatch_threads_per_threadgroup": ("threadgroup", False),
    "threadgroups_per_grid": ("groups", False),
}
_THREADS = "fr_l.threadgroup[0] * fr_l.threadgroup[1] * fr_l.threadgroup[2]"
_NUMBERS = {
    "thread_index_in_threadgroup": (_THREADS, True),
    "thread_index_in_simdgroup": ("32u", True),
    "thread_index_in_quadgroup": ("4u", True),
    "simdgroup_index_in_threadgroup": (f"({_THREADS} + 31u) / 32u", True),
    "simdgroups_per_threadgroup": (f"({_THREADS} + 31u) / 32u", False),
}


class Most(NamedTuple):
    """The largest that a term gets, as C++: of which leaves, and how it is made."""

    text: str
    leaves: frozenset[str] = frozenset()
    product: bool = False  # of two leaves
    scaled: bool = False  # a leaf times a number
    exact: bool = False  # the value itself, in all threads
    divided: bool = False  # by a leaf


class TooMuch(Exception):
    """There are more terms than is worth it."""


class Largest:
    """Largest values in one body.

    Args:
        given: what the numbers and sizes that a launch gives are called in C++, by symbol.
    """

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = given
        self._limits: dict[tuple[object, ...], Limits] = {}
        self._known: dict[tuple[Limits, Term, int], Most | None] = {}
        self._steps = 0

    def of(self, access: Access) -> Most | None:
        """The largest index of an access, which is never negative; None if it is not known.

        Raises:
            TooMuch: too much was looked at, in all.
        """
        where = access.path, access.loops
        if where not in self._limits:
            self._limits[where] = Limits(*where)
        last = terms.add(access.element, terms.const(access.width - 1))
        return self._most(last, self._limits[where])

    def _most(self, term: Term, at: Limits, depth: int = _DEEPEST) -> Most | None:
        """The largest value of a term that is not negative; None if that is not known."""
        key = at, term, depth
        if key not in self._known:
            self._steps += 1
            if self._steps > _MOST_STEPS:
                raise TooMuch
            self._known[key] = None  # while it is looked for
            found = self._by_parts(term, at, depth) or self._by_conditions(term, at, depth)
            short = found is not None and len(found.text) <= _LONGEST
            self._known[key] = found if short else None
        return self._known[key]

    def _by_parts(self, term: Term, at: Limits, depth: int) -> Most | None:
        """What a term is made of says it."""
        op = term.op
        if op == "const":
            return number(term.value) if 0 <= term.value < _LIMIT else None
        if op == "symbol" and (leaf := self._of_symbol(str(term.value))) is not None:
            return leaf
        if op == "add":
            return self._of_sum(term, at, depth)
        if op == "ite":
            return self._of_choice(term, at, depth)
        if op in ("mul", "fdiv", "quot", "fmod", "rem"):
            found = self._of_operation(term, at, depth)
        elif op == "wrap" and (term.value.bits >= 32 or not term.value.signed):
            found = self._most(term.args[0], at, depth)
            if found is not None and term.value.bits < 32:  # what does not fit becomes less
                found = found._replace(exact=False)
        else:
            found = None
        if found is None and term.high is not None and term.high < _FEW and at.is_natural(term):
            return number(term.high)._replace(exact=False)
        return found

    def _of_operation(self, term: Term, at: Limits, depth: int) -> Most | None:
        """Of products, quotients and remainders."""
        op, (x, y) = term.op, term.args
        if op == "fmod" and y.op == "const" and 1 <= y.value <= _LIMIT:
            return number(y.value - 1)._replace(exact=False)
        a, b = self._most(x, at, depth), self._most(y, at, depth)
        if a is None or b is None:
            return None
        if op == "mul":
            return _times(a, b)
        if op in ("fmod", "rem"):
            if not b.exact:
                return None
            rest = _joined("{}.fr_rest({})", a, b)
            return rest._replace(exact=False, divided=rest.divided or bool(b.leaves))
        if not b.exact:
            least = at.least(y)
            return a._replace(exact=False) if least is not None and least >= 1 else None
        quotient = _joined("{}.fr_over({})", a, b)
        return quotient._replace(divided=quotient.divided or bool(b.leaves))

    def _of_sum(self, term: Term, at: Limits, depth: int) -> Most | None:
        """Of a sum: that of what is added, less what is taken away."""
        more = self._added(term, 1, at, depth)
        if more is None:
            return None
        less = self._added(term, -1, at, depth)
        if less == number(0):
            return more
        if less is not None and less.exact and more.exact:
            return _joined("{}.fr_less({})", more, less)
        return self._less(more, term, at) if at.is_natural(term) else None

    def _added(self, term: Term, sign: int, at: Limits, depth: int) -> Most | None:
        """The sum of the parts of a sum that have a sign, without it."""
        total: Most | None = None
        for part in term.args if term.op == "add" else (term,):
            factor = part.args[0] if part.op == "mul" else part
            if (factor.op == "const" and factor.value < 0) != (sign < 0):
                continue
            found = self._most(part if sign > 0 else terms.neg(part), at, depth)
            if found is None:
                return None
            total = found if total is None else _joined("{} + {}", total, found)
        return total or number(0)

    @staticmethod
    def _less(more: Most, term: Term, at: Limits) -> Most | None:
        """What is left of the added parts of a sum without the least that is taken away; 0, where
        nothing is. None where what is taken away may be negative."""
        less = 0
        for part in term.args if term.op == "add" else (term,):
            factor = part.args[0] if part.op == "mul" else part
            if factor.op == "const" and factor.value < 0:
                least = at.least(terms.neg(part))
                if least is None or least < 0:
                    return None
                less += least
        if not 0 < less < _LIMIT:
            return more._replace(exact=False)
        return more._replace(text=f"{more.text}.fr_below({less}u)", exact=False)

    def _of_choice(self, term: Term, at: Limits, depth: int) -> Most | None:
        """Of ``c ? a : b``, and of the smaller and larger of two."""
        c, a, b = term.args
        inner = c.args[0] if c.op == "not" else c
        if inner.op == "lt" and {*inner.args} == {a, b}:
            smaller = (inner.args[0] is a) != (c.op == "not")
            x, y = self._most(a, at, depth), self._most(b, at, depth)
            if x is not None and y is not None:
                form = f"::fr::bounds::fr_{'smaller' if smaller else 'larger'}({{}}, {{}})"
                return _joined(form, x, y)
            known, other = (x, b) if x is not None else (y, a)
            if smaller and known is not None and at.is_natural(other):
                return known._replace(exact=False)
        x = self._most(a, at.where(c), depth)
        y = self._most(b, at.where(terms.not_(c)), depth)
        if x is None or y is None:
            return None
        return _joined("::fr::bounds::fr_larger({}, {})", x, y)._replace(exact=False)

    def _of_symbol(self, name: str) -> Most | None:
        if name in self._given:
            return _leaf(f"::fr::fr_most({self._given[name]})")
        vector, _, axis = name.partition(".")
        if axis and vector in _VECTORS:
            field, below = _VECTORS[vector]
            return _attribute(f"fr_l.{field}[{_COMPONENTS.index(axis)}]", below)
        return _attribute(*_NUMBERS[name]) if name in _NUMBERS else None

    def _by_conditions(self, term: Term, at: Limits, depth: int) -> Most | None:
        """Conditions around limit a term."""
        if not depth:
            return None
        if at.is_natural(term):
            for above in at.above(term):
                found = self._added(above, 1, at, depth - 1)
                # Where that is less than 0, nothing comes here.
                found = found and self._less(found, above, at)
                if found is not None:
                    return found
        for other in at.converted(term):
            found = self._most(other, at, depth - 1)
            if found is not None:
                return found._replace(exact=False)
        return self._of_counter(term, at, depth)

    def _of_counter(self, term: Term, at: Limits, depth: int) -> Most | None:
        """Of what a loop counts: from what is not negative, without wrapping."""
        for start, step, most, outside in at.counted(term):
            first, by = (self._most(t, outside, depth - 1) for t in (start, step))
            last = self._added(most, 1, outside, depth - 1)
            last = last and self._less(last, most, outside)
            if first is None or by is None or last is None:
                continue
            if not _steps_within(most, step):
                last = _joined("{}.fr_if({})", last, _joined("{} + {}", last, by))
            return _joined("{}.fr_if({})", last, first) if start.op != "const" else last
        return None


def _steps_within(most: Term, step: Term) -> bool:
    """Whether the next number is known to be less than 2^31, too, where the largest is known."""
    if step.op != "const":
        return False
    if most.op == "const":
        return bool(most.value + step.value < _LIMIT)
    less = most.args[-1].value if most.op == "add" and most.args[-1].op == "const" else 0
    return bool(less + step.value <= 0)


def largest_of(several: Collection[Most | None]) -> Most | None:
    """The largest of several; None where one of them is not known, or there are too many."""
    total: Most | None = None
    for each in several if len(several) <= _MOST_WAYS else ():
        if each is None:
            return None
        total = each if total is None else _joined("::fr::bounds::fr_larger({}, {})", total, each)
    return total


def number(value: int) -> Most:
    return Most(f"::fr::fr_most({value}u, true)", exact=True)


def _leaf(text: str) -> Most:
    return Most(text, frozenset({text}), exact=True)


def _attribute(text: str, below: bool) -> Most:
    leaf = _leaf(f"::fr::fr_most({text}){'.fr_last()' if below else ''}")
    # What a threadgroup has may be less at a ragged edge.
    return leaf._replace(exact=not below and "fr_l.threadgroup" not in text)


def _joined(form: str, a: Most, b: Most) -> Most:
    return Most(
        f"({form.format(a.text, b.text)})",
        a.leaves | b.leaves,
        a.product or b.product,
        a.scaled or b.scaled,
        a.exact and b.exact,
        a.divided or b.divided,
    )


def _times(a: Most, b: Most) -> Most:
    product = _joined("{} * {}", a, b)
    of_two = bool(a.leaves and b.leaves)
    scaled = not of_two and bool(product.leaves)
    return product._replace(product=product.product or of_two, scaled=scaled)
