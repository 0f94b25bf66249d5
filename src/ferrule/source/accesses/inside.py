"""Whether all that a body accesses lies inside of its arrays, for sizes that are known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from . import terms
from .limits import naturals
from .model import Access, Accesses, Array, Loop, Obligation
from .terms import Term

_ROUNDS = 4  # how often what holds is gone through for what it says of leaves
_MOST_PRIVATE = 8192  # bytes of an array of a thread's own
_DEPTH = 2  # conditions that are used together

Ends = tuple[int, int]  # the least and the largest


def all_inside(found: Accesses, given: Mapping[str, Ends], lengths: Mapping[str, int]) -> bool:
    """Whether a launch accesses nothing outside of arrays, and ends.

    False where that is not shown.

    Args:
        found: what the body accesses.
        given: between what each symbol is in the launch.
        lengths: the elements of each array of the launch.
    """
    if found.unsupported or not found.ends:
        return False
    shown = _Shown(given, lengths)
    return all(map(shown.is_inside, found.accesses)) and all(map(shown.holds, found.obligations))


class _Shown:
    """What can be shown of one launch."""

    def __init__(self, given: Mapping[str, Ends], lengths: Mapping[str, int]) -> None:
        self._given, self._lengths = given, lengths
        self._known: dict[tuple[Term, ...], _Known] = {}

    def is_inside(self, access: Access) -> bool:
        """Whether an access is inside, or does not happen."""
        array, known = access.array, self._where(access)
        if known.never:
            return True
        length = array.length
        if length is None:
            count = self._lengths.get(array.name)
            length = None if count is None else terms.const(count)
        if length is None or array.rows or not _has_room(array):
            return False
        first = known.of(access.element)
        behind = terms.add(first, terms.const(access.width))
        return known.is_natural(first) and known.is_natural(terms.sub(known.of(length), behind))

    def holds(self, obligation: Obligation) -> bool:
        """Whether terms mean what the body computes."""
        known = self._where(obligation)
        if known.never:
            return True
        term, kind = known.of(obligation.term), obligation.kind
        if obligation.what == "division":
            return bool((term.low or 0) > 0 or (term.high or 0) < 0)
        below, above = terms.const(kind.least), terms.const(kind.most)
        return known.is_natural(terms.sub(term, below)) and known.is_natural(terms.sub(above, term))

    def _where(self, at: Access | Obligation) -> _Known:
        conditions = (*at.path, *(loop.holds for loop in _behind_conditions(at.loops)))
        known = self._known.get(conditions)
        if known is None:
            known = self._known[conditions] = _Known(conditions, self._given)
        return known


def _has_room(array: Array) -> bool:
    """Whether an array, if it is a thread's own, leaves room on the thread's stack."""
    size, many = array.size, array.length
    if array.space != "private" or many is None:
        return True
    return size is not None and many.high is not None and size * many.high <= _MOST_PRIVATE


def _behind_conditions(loops: Sequence[Loop]) -> Iterator[Loop]:
    """Loops whose condition holds: one that is just evaluated has none."""
    return (loop for loop in loops if loop.holds is not terms.TRUE)


class _Known:
    """What holds at a place, and what follows for the leaves of terms.

    Attributes:
        never: it is never reached.
    """

    def __init__(self, conditions: Sequence[Term], given: Mapping[str, Ends]) -> None:
        self._by: dict[Term, Term] = {}
        self._made: dict[Term, Term] = {}
        self._natural: list[Term] = []  # what is not negative, of these leaves
        self.never = False
        leaves = {leaf for term in conditions for leaf in term.leaves}
        self._given = given
        for leaf in leaves:
            self._give(leaf)
        for _ in range(_ROUNDS):
            held = list(map(self.of, conditions))
            self.never = terms.FALSE in held
            self._natural = [sum_ for c in held for sum_ in naturals(c)]
            narrowed = list(map(self._narrow, self._natural))
            if self.never or not any(narrowed):
                break
            self._made.clear()

    def of(self, term: Term) -> Term:
        """A term with what is known of its leaves."""
        for leaf in term.leaves:
            if leaf not in self._by:
                self._give(leaf)
        return terms.replaced(term, self._by, self._made)

    def _give(self, leaf: Term) -> None:
        ends = self._given.get(leaf.value) if leaf.op == "symbol" else None
        if ends is not None and not leaf.condition:
            self._by[leaf] = terms.narrowed(leaf, *ends)

    def _narrow(self, natural: Term) -> bool:
        """Draw from a sum that is not negative what it says of each leaf; whether that is new."""
        new = False
        for part in terms.parts_of(natural):
            factor, leaf = terms.split(part)
            if leaf is None or leaf.op not in ("symbol", "unknown", "counter", "data"):
                continue
            most = terms.sub(natural, part).high
            if most is None:
                continue
            original = next((old for old, now in self._by.items() if now is leaf), leaf)
            low, high = leaf.low, leaf.high
            if factor > 0:  # leaf >= -most / factor
                least = -(most // factor)
                low = least if low is None else max(low, least)
            else:
                high = min(most // -factor, most // -factor if high is None else high)
            if (low, high) != (leaf.low, leaf.high):
                if low is not None and high is not None and low > high:
                    self.never = True
                    return False
                self._by[original] = terms.narrowed(leaf, low, high)
                new = True
        return new

    def is_natural(self, term: Term, depth: int = _DEPTH) -> bool:
        """Whether a term is shown not to be negative: itself, or less a multiple of what is not."""
        if term.low is not None and term.low >= 0:
            return True
        if not depth:
            return False
        factors = {leaf: factor for factor, leaf in terms.factors_of(term)}
        for natural in self._natural:
            times = {
                factors[leaf] // factor
                for factor, leaf in terms.factors_of(natural)
                if leaf is not None and factor * factors.get(leaf, 0) > 0
                and factors[leaf] % factor == 0
            }  # fmt: skip
            for n in times:
                rest = terms.sub(term, terms.mul(terms.const(n), natural))
                if self.is_natural(rest, depth - 1):
                    return True
        return False
