"""Which thread accesses an element: shown of indices as digits.

An index such as ``row * D + i`` with ``i < D`` tells ``row`` and ``i`` apart: each part is less
than the stride of the next. Where all accesses of an array tell the same threads in the same way,
no two threads meet at an element.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import NamedTuple

from .places import AXES, Anything, Counter, Launch, Left, Part, Round, Site, Thread, is_size
from .polynomials import Atom, Polynomial, atom, number


class Group(NamedTuple):
    """A sum that a condition says the end of, as one digit."""

    value: Polynomial


_Reading = tuple[tuple[object, Polynomial], ...]  # digits and strides, the largest first


class Digits(NamedTuple):
    """What an index tells.

    Attributes:
        reading: what its digits are, and their strides: equal ones are read alike.
        told: the atoms that it tells.
        shift: what of sizes is added to them.
        low: what number below the least stride is.
        wholes: what all digits together are known to be less than, with that number.
    """

    reading: _Reading
    told: frozenset[Atom]
    shift: Polynomial
    low: int
    wholes: frozenset[Polynomial]

    def agrees(self, other: Digits) -> bool:
        """Whether an element tells the same, whichever of both indices it has."""
        if self.reading != other.reading:
            return False
        return self.shift == other.shift or self._apart(other) is not None

    def _apart(self, other: Digits) -> tuple[int, int] | None:
        """How many sizes of all digits both are shifted by."""
        for whole in self.wholes & other.wholes:
            a, b = (shift.divided(whole) for shift in (self.shift, other.shift))
            if a is not None and b is not None and None not in (a.constant, b.constant):
                return a.constant, b.constant  # type: ignore[return-value]
        return None

    def misses(self, other: Digits) -> bool:
        """Whether both are never the same element."""
        if self.reading != other.reading:
            return False
        if self.shift == other.shift:
            return self.low != other.low
        times = self._apart(other)
        return times is not None and times[0] != times[1]


class Doubt(NamedTuple):
    """Why something is not shown.

    Attributes:
        why: in words.
        line: of the body, that of the later access; 1 of none in particular.
    """

    why: str
    line: int = 1

    def __str__(self) -> str:
        return self.why


class Owners:
    """The threads that access the elements of one array.

    Args:
        sites: all accesses of it.
        launch: the sizes of the launch.
    """

    def __init__(self, sites: Sequence[Site], launch: Launch) -> None:
        self._sites, self._launch = sites, launch
        self._taken_of: dict[int, Digits | None] = {}  # by where the access stands

    def shared(self, mode: str = "read") -> Doubt | None:
        """Why two threads may access one element; None where it is shown that none do."""
        sites = self._of(mode)
        for site in sites:
            doubt = self._doubt(site)
            if doubt is not None:
                return doubt
        found = [digits for digits in map(self._digits, sites) if digits is not None]
        if not all(a.agrees(b) for a, b in combinations(found, 2)):
            return Doubt("its indices are computed in several ways")
        if any(a != b for a, b in combinations(map(_equals, sites), 2)):
            return Doubt("conditions let several threads access it")
        return None

    def stored_once(self) -> Doubt | None:
        """Why an element may be stored several times; None where it is shown that none is."""
        why = self.shared("write")
        if why is not None:
            return why
        known: list[tuple[Site, Digits]] = []
        for site in self._of("write"):
            digits = self._digits(site)
            if digits is None or not self._tells_rounds(digits, site):
                what = f"line {site.line}: rounds of a loop may store to one element"
                return Doubt(what, site.line)
            for other, others in known:
                if not digits.misses(others) and not _exclusive(site, other):
                    return _both(other, site)
            known.append((site, digits))
        for fill in self._of("fill"):
            for store, digits in known:
                if not self._gives_way(fill, store, digits):
                    return _both(fill, store)
        for add in self._of("add"):
            for store in self._of("write", "fill"):
                if not _exclusive(add, store) and self._replaces(store, add):
                    return _both(add, store)
        return None

    def _of(self, *modes: str) -> list[Site]:
        return [site for site in self._sites if site.mode in modes]

    def _doubt(self, site: Site, what: str = "grid") -> Doubt | None:
        """Why the thread of an access, in the grid or its threadgroup, is not told."""
        digits = self._digits(site)
        if digits is None:
            known = "its index is not a sum of strides that are known"
            return Doubt(f"line {site.line}: {known}", site.line)
        missing = self._untold(digits.told, site, what)
        if missing is None:
            return None
        return Doubt(f"line {site.line}: its index does not tell {missing}", site.line)

    def _replaces(self, store: Site, add: Site) -> bool:
        """Whether a store may replace what has been added."""
        if add.at < store.at:
            return True
        digits = self._digits(store)
        common = set(store.loops) & set(add.loops)
        return bool(common) and (digits is None or not self._tells_rounds(digits, store))

    def several(self) -> Doubt | None:
        """Why several threads of a threadgroup may store to one element at once; None where none
        do."""
        doubts = (self._doubt(site, "thread") for site in self._of("write", "fill"))
        return next((doubt for doubt in doubts if doubt is not None), None)

    def _gives_way(self, fill: Site, store: Site, digits: Digits) -> bool:
        """Whether a number that is stored does not replace what another store has written."""
        mine = self._digits(fill)
        if mine is None:
            return False
        if mine.misses(digits):
            return True
        if not mine.agrees(digits) or not self._tells_rounds(mine, fill):
            return False
        if _exclusive(fill, store):
            return True
        return fill.at < store.at and self._untold(mine.told, fill) is None

    def single(self) -> bool:
        """Whether each element is read at most once."""
        reads = self._of("read")
        if len(reads) != 1 or self.shared() is not None:
            return False
        digits = self._digits(reads[0])
        return digits is not None and self._tells_rounds(digits, reads[0])

    # -- digits ------------------------------------------------------------------------------------

    def _digits(self, site: Site) -> Digits | None:
        """The digits of an index."""
        if site.at not in self._taken_of:
            self._taken_of[site.at] = self._taken(site.index, site)
        return self._taken_of[site.at]

    def _grouped(self, index: Polynomial, site: Site) -> Polynomial:
        """An index in which sums that conditions say the ends of are digits: of ``row * D + d``
        with ``d = t + 64 * i`` and ``d < D``."""
        for fact in site.facts:
            whole = [a for a in fact.left.atoms if not is_size(atom(a))]
            if fact.operator != "<" or len(whole) < 2 or not is_size(fact.right):
                continue
            inner, outer = fact.left.by(whole), index.by(whole)
            if inner is None or outer is None or outer[0].keys() != inner[0].keys():
                continue
            stride = outer[0][whole[0]].divided(inner[0][whole[0]])
            if stride is None or any(outer[0][a] != stride * inner[0][a] for a in whole):
                continue
            index = index - stride * fact.left + stride * atom(Group(fact.left))
        return index

    def _taken(self, index: Polynomial, site: Site, group: bool = True) -> Digits | None:
        if group:
            index = self._grouped(index, site)
        varying = [a for a in index.atoms if not is_size(atom(a))]
        if any(isinstance(a, Anything) for a in varying):
            return None
        parts = index.by(varying)
        if parts is None:
            return None
        strides, rest = parts
        low = rest.factors.get((), 0)
        shift = rest - number(low)  # of sizes alone: the same for all threads
        if low < 0:
            return None
        ordered = sorted(strides.items(), key=lambda pair: _magnitude(pair[1]))
        tops = [number(low + 1)]  # what all digits so far are less than
        for digit, stride in ordered:
            if not any(self._is_natural(stride - top, site) for top in tops):
                return None
            tops = [stride * end for end in self._ends(digit, site)]
        told: set[Atom] = set()
        reading: list[tuple[object, Polynomial]] = []
        for digit, stride in reversed(ordered):
            shown, inner = self._inside(digit, site)
            told |= inner
            reading.append((shown, stride))
        return Digits(tuple(reading), frozenset(told), shift, low, frozenset(tops))

    def _is_natural(self, value: Polynomial, site: Site) -> bool:
        """Whether a number is 0 or more, where an access is made."""
        positive, natural = set(self._launch.sizes), set()
        for fact in site.facts:  # what is more than something that is not negative
            if fact.operator == "<" and isinstance(fact.left.atom, (Counter, Round, Thread)):
                positive |= {fact.right.atom} - {None}
        values: dict[Atom, Polynomial] = {}
        for a in value.atoms:
            if isinstance(a, Part) and a.what == "/" and a.of.atom is not None:
                whole, rest = a.of.atom, Left(a.of.atom)
                values.setdefault(whole, atom(a) * a.by + atom(rest))
                natural |= {a, rest}
        return value.replaced(values).is_natural(positive, natural)

    def _inside(self, digit: Atom, site: Site) -> tuple[object, set[Atom]]:
        """A digit as it is read, and what it tells."""
        told: set[Atom] = {digit}
        if isinstance(digit, Counter):
            told.add(Round(digit.loop))
            inner = self._taken(digit.start + digit.step * atom(Round(digit.loop)), site)
            if inner is not None:
                told |= inner.told
            return ("counter", digit.start, digit.step), told
        if isinstance(digit, Group):
            inner = self._taken(digit.value, site, group=False)
            return digit, told if inner is None else told | inner.told
        return "round" if isinstance(digit, Round) else digit, told

    def _ends(self, digit: Atom, site: Site) -> list[Polynomial]:
        """What a digit is less than."""
        value = digit.value if isinstance(digit, Group) else atom(digit)
        found = [
            fact.right
            for fact in site.facts
            if fact.operator == "<" and fact.left == value and is_size(fact.right)
        ]
        launch = self._launch
        end: Polynomial | None = None
        if isinstance(digit, Part) and digit.what == "%":
            end = digit.by
        elif isinstance(digit, Part) and digit.of.atom is not None:
            inner = (top.divided(digit.by) for top in self._ends(digit.of.atom, site))
            found += [top for top in inner if top is not None]
        elif isinstance(digit, Thread):
            group, grid = launch.threadgroup.get(digit.axis), launch.grid.get(digit.axis)
            if digit.what == "group":
                end = grid and group and grid.divided(group)
            else:
                end = grid if digit.what == "grid" else group
        elif isinstance(digit, Round):
            end = self._rounds(digit, site)
        return found if end is None else [*found, end]

    def _rounds(self, digit: Round, site: Site) -> Polynomial | None:
        """How many rounds a loop has, that counts from 0 by ones."""
        for fact in site.facts:
            counter = fact.left.atom
            if (
                fact.operator == "<"
                and isinstance(counter, Counter)
                and counter.loop == digit.loop
                and (counter.start, counter.step) == (number(0), number(1))
                and is_size(fact.right)
            ):
                return fact.right
        return None

    # -- what is told ------------------------------------------------------------------------------

    def _untold(self, told: Iterable[Atom], site: Site, what: str = "grid") -> str | None:
        """Which position of the thread, in the grid or its threadgroup, an index does not tell."""
        known = self._closed(set(told) | {a for a, _ in _equals(site)})
        for axis in AXES:
            if Thread(what, axis) not in known:
                return f"thread_position_in_{'grid' if what == 'grid' else 'threadgroup'}.{axis}"
        return None

    def _closed(self, known: set[Atom]) -> set[Atom]:
        """What follows from what is told."""
        launch = self._launch
        for axis in AXES:
            grid, group = launch.grid.get(axis), launch.threadgroup.get(axis)
            if grid == number(1):
                known.add(Thread("grid", axis))
            if group == number(1):
                known.add(Thread("thread", axis))
            if grid is not None and grid == group:
                known.add(Thread("group", axis))
        while True:
            more: set[Atom] = set()
            for a in known:
                if isinstance(a, Part):
                    more |= self._from_part(a, known)
                elif isinstance(a, Thread) and a.what == "grid":
                    more |= {Thread("group", a.axis), Thread("thread", a.axis)}
            for axis in AXES:
                if {Thread("group", axis), Thread("thread", axis)} <= known:
                    more.add(Thread("grid", axis))
            if more <= known:
                return known
            known |= more

    def _from_part(self, part: Part, known: set[Atom]) -> set[Atom]:
        """A value of which the quotient and the remainder are told, or whose remainder is all."""
        inner = part.of.atom
        found: set[Atom] = set()
        if part.what == "%" and isinstance(inner, Thread) and inner.what != "group":
            group = self._launch.threadgroup.get(inner.axis)
            if group is not None and group.divided(part.by) is not None:  # whole groups of these
                found = {part._replace(of=atom(inner._replace(what=w))) for w in ("grid", "thread")}
        if part._replace(what="%" if part.what == "/" else "/") in known:
            return found | ({inner} if inner is not None else set())
        if part.what == "%" and isinstance(inner, Thread):
            end = {"grid": self._launch.grid, "thread": self._launch.threadgroup}.get(
                inner.what, {}
            )
            most = end.get(inner.axis)
            if most is not None and (part.by - most).is_natural(self._launch.sizes):
                found.add(inner)
        return found

    def _tells_rounds(self, digits: Digits, site: Site) -> bool:
        """Whether an index differs in all rounds of the loops around it."""
        return all(Round(loop) in digits.told for loop in site.loops)


def _magnitude(stride: Polynomial) -> tuple[float, int, str]:
    """For an order that puts larger strides last, if any does: a quotient is less than its size."""
    by = {m: sum(0.9 if isinstance(a, Part) else 1.0 for a in m) for m in stride.factors}
    degree = max(by.values(), default=0.0)
    most = max((n for m, n in stride.factors.items() if by[m] == degree), default=0)
    return degree, most, str(stride)


def _both(a: Site, b: Site) -> Doubt:
    return Doubt(f"lines {a.line} and {b.line} may store to one element", b.line)


def _exclusive(a: Site, b: Site) -> bool:
    """Whether two accesses are in two arms of one branch."""
    return any((which, not yes) in b.arms for which, yes in a.arms)


def _equals(site: Site) -> set[tuple[Atom, Polynomial]]:
    """What conditions say that something is, the same for all threads."""
    sides = [
        pair
        for fact in site.facts
        if fact.operator == "=="
        for pair in ((fact.left, fact.right), (fact.right, fact.left))
    ]
    return {(a.atom, b) for a, b in sides if a.atom is not None and is_size(b)}
