"""Sums of products of names: indices, as far as multiplication and addition make them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Atom = object  # what is not taken apart: hashable, and shown by its text
Monomial = tuple[Atom, ...]


class Polynomial:
    """Integer factors of products of atoms. Equal ones are equal values.

    Attributes:
        factors: by product, in one order, its factor; none is 0.
    """

    __slots__ = ("_key", "factors")

    def __init__(self, factors: Mapping[Monomial, int]) -> None:
        self.factors = {m: n for m, n in factors.items() if n}
        self._key = frozenset(self.factors.items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Polynomial) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return " + ".join(
            "*".join(map(str, (n, *m))) for m, n in self.factors.items()
        ) or "0"  # fmt: skip

    def __add__(self, other: Polynomial) -> Polynomial:
        out = dict(self.factors)
        for m, n in other.factors.items():
            out[m] = out.get(m, 0) + n
        return Polynomial(out)

    def __mul__(self, other: Polynomial) -> Polynomial:
        out: dict[Monomial, int] = {}
        for a, n in self.factors.items():
            for b, k in other.factors.items():
                m = tuple(sorted((*a, *b), key=str))
                out[m] = out.get(m, 0) + n * k
        return Polynomial(out)

    def __sub__(self, other: Polynomial) -> Polynomial:
        return self + other * number(-1)

    @property
    def constant(self) -> int | None:
        """Its value, where it has no atoms."""
        if not self.factors:
            return 0
        return self.factors.get(()) if len(self.factors) == 1 else None

    @property
    def atoms(self) -> set[Atom]:
        """What it is made of."""
        return {a for m in self.factors for a in m}

    @property
    def atom(self) -> Atom | None:
        """The one atom that it is."""
        if len(self.factors) != 1:
            return None
        ((m, n),) = self.factors.items()
        return m[0] if n == 1 and len(m) == 1 else None

    def by(self, atoms: Iterable[Atom]) -> tuple[dict[Atom, Polynomial], Polynomial] | None:
        """Its factor of each of some atoms, and the rest; None where two of them are multiplied."""
        some = set(atoms)
        strides: dict[Atom, dict[Monomial, int]] = {}
        rest: dict[Monomial, int] = {}
        for m, n in self.factors.items():
            mine = [a for a in m if a in some]
            if not mine:
                rest[m] = n
            elif len(mine) > 1:
                return None
            else:
                others = list(m)
                others.remove(mine[0])
                strides.setdefault(mine[0], {})[tuple(others)] = n
        return {a: Polynomial(f) for a, f in strides.items()}, Polynomial(rest)

    def replaced(self, values: Mapping[Atom, Polynomial]) -> Polynomial:
        """It with others in place of some atoms."""
        total = number(0)
        for m, n in self.factors.items():
            product = number(n)
            for a in m:
                product *= values.get(a, atom(a))
            total += product
        return total

    def divided(self, other: Polynomial) -> Polynomial | None:
        """What it is a multiple of another of; None of none."""
        if len(other.factors) != 1:
            return None
        ((divisor, k),) = other.factors.items()
        out: dict[Monomial, int] = {}
        for m, n in self.factors.items():
            left = list(m)
            for a in divisor:
                if a not in left:
                    return None
                left.remove(a)
            if n % k:
                return None
            out[tuple(left)] = n // k
        return Polynomial(out)

    def is_natural(self, positive: Iterable[Atom], natural: Iterable[Atom] = ()) -> bool:
        """Whether it is 0 or more, whatever some atoms are that are 1 or more, or 0 or more."""
        more = set(positive)
        if not self.atoms <= more.union(natural):
            return False
        moved = self.replaced({a: atom(a) + number(1) for a in self.atoms & more})
        return all(n >= 0 for n in moved.factors.values())


def number(value: int) -> Polynomial:
    """A number."""
    return Polynomial({(): value})


def atom(a: Atom) -> Polynomial:
    """One atom."""
    return Polynomial({(a,): 1})
