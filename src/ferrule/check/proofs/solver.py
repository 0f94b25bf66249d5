"""Terms for Z3: products as numbers of their own, with what is known of products in general.

Z3 decides sums of integers; of products of two that vary it need not find an end. So each product
is a number of its own here, and of every two products that share a factor Z3 is told what orders
them: of ``a f`` and ``c f`` that ``a <= c`` makes ``a f <= c f``, and ``a < c`` even
``a f + f <= c f``. These hold always, so what Z3 refutes cannot be; where it finds numbers, they
may contradict the products, and prove nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import FerruleError
from ...source.accesses.terms import Term
from .effort import Effort

Monomial = tuple[str, ...]
Polynomial = dict[Monomial, int]
_MOST_PARTS = 200  # of a sum
_MOST_LEMMAS = 6000
_FEW = 2**16  # what is less is a factor that says something


class NoSolver(FerruleError):
    """Z3 is not installed."""


class TooHard(Exception):
    """A question is too large to be put."""


def solver_module() -> Any:
    """Z3's module.

    Raises:
        NoSolver: it is not installed; says how it is.
    """
    try:
        import z3
    except ImportError:
        raise NoSolver(
            "[prove] proofs need Z3, which is not installed: pip install 'ferrule[prove]'."
        ) from None
    return z3


class Question:
    """Terms of one question, as Z3's.

    Args:
        fixed: values of leaves, by the names of symbols.
    """

    def __init__(self, fixed: Mapping[str, int] | None = None) -> None:
        self.z3 = solver_module()
        self.fixed = dict(fixed or {})
        self.side: list[Any] = []  # what holds of the numbers that stand for terms
        self.leaves: dict[Term, Any] = {}
        self._places: dict[Term, int] = {}  # of data, in the order in which they come
        self._numbers: dict[str, Any] = {}
        self._natural: set[str] = set()
        self._ends: dict[str, tuple[int | None, int | None]] = {}
        self._polynomials: dict[Term, Polynomial] = {}
        self._conditions: dict[Term, Any] = {}
        self._products: dict[Monomial, Any] = {}
        self._quotients: dict[tuple[Any, ...], tuple[Polynomial, Polynomial]] = {}

    # -- terms -------------------------------------------------------------------------------------

    def condition(self, term: Term) -> Any:
        """A condition."""
        known = self._conditions.get(term)
        if known is None:
            known = self._conditions[term] = self._condition(term)
        return known

    def _condition(self, term: Term) -> Any:
        z3, op = self.z3, term.op
        if op == "const":
            return z3.BoolVal(term.value)
        if op in ("symbol", "unknown", "data"):
            if term.value in self.fixed:
                return z3.BoolVal(bool(self.fixed[term.value]))
            leaf = self.leaves[term] = z3.Bool(self._name(term))
            return leaf
        if op == "not":
            return z3.Not(self.condition(term.args[0]))
        if op in ("and", "or"):
            parts = [self.condition(a) for a in term.args]
            return z3.And(*parts) if op == "and" else z3.Or(*parts)
        if op == "ite":
            c, a, b = map(self.condition, term.args)
            return z3.If(c, a, b)
        a, b = (self.polynomial(x) for x in term.args)
        d = self.linear(_sum(a, b, -1))
        return d < 0 if op == "lt" else d == 0

    def polynomial(self, term: Term) -> Polynomial:
        """An integer, as a sum of products of numbers."""
        known = self._polynomials.get(term)
        if known is None:
            known = self._polynomials[term] = self._polynomial(term)
            if len(known) > _MOST_PARTS:
                raise TooHard("a sum of too many products")
        return known

    def _polynomial(self, term: Term) -> Polynomial:
        op, args = term.op, term.args
        if op == "const":
            return {(): int(term.value)} if term.value else {}
        if op in ("symbol", "unknown", "counter", "data"):
            if op == "symbol" and term.value in self.fixed:
                return _number(int(self.fixed[term.value]))
            return self._leaf(term)
        if op == "add":
            total: Polynomial = {}
            for a in args:
                total = _sum(total, self.polynomial(a), 1)
            return total
        if op == "mul":
            return _product(self.polynomial(args[0]), self.polynomial(args[1]))
        if op == "ite":
            return self._ite(term)
        if op == "wrap":
            return self._wrapped(term)
        quotient, rest = self._divided(op, args)
        return quotient if op in ("quot", "fdiv") else rest

    def _leaf(self, term: Term) -> Polynomial:
        name = self._name(term)
        if term not in self.leaves:
            self.leaves[term] = self._new(name, term.low, term.high)
        return {(name,): 1}

    def _name(self, term: Term) -> str:
        if term.op == "symbol":
            return str(term.value)
        if term.op == "data":
            return f"{term.value}[{self._places.setdefault(term, len(self._places))}]"
        return f"{term.op}{term.value if term.op == 'counter' else term.value[0]}"

    def _new(self, name: str, low: int | None, high: int | None) -> Any:
        number = self._numbers[name] = self.z3.Int(name)
        self._ends[name] = low, high
        if low is not None:
            self.side.append(number >= low)
            if low >= 0:
                self._natural.add(name)
        if high is not None:
            self.side.append(number <= high)
        return number

    def _fresh(self, low: int | None, high: int | None) -> tuple[Polynomial, Any]:
        name = f"n{len(self._numbers)}"
        return {(name,): 1}, self._new(name, low, high)

    def _ite(self, term: Term) -> Polynomial:
        c, a, b = term.args
        condition = self.z3.simplify(self.condition(c))
        if self.z3.is_true(condition):
            return self.polynomial(a)
        if self.z3.is_false(condition):
            return self.polynomial(b)
        one, other = self.polynomial(a), self.polynomial(b)
        whole, number = self._fresh(term.low, term.high)
        self.side.append(self.z3.If(condition, number == self.linear(one),
                                    number == self.linear(other)))  # fmt: skip
        return whole

    def _wrapped(self, term: Term) -> Polynomial:
        kind = term.value
        inner = self.polynomial(term.args[0])
        if set(inner) <= {()}:
            value = inner.get((), 0) & ((1 << kind.bits) - 1)
            return _number(value - (1 << kind.bits) if value > kind.most else value)
        whole, number = self._fresh(kind.least, kind.most)
        _, rounds = self._fresh(None, None)
        self.side.append(number == self.linear(inner) - (1 << kind.bits) * rounds)
        return whole

    def _divided(self, op: str, args: tuple[Term, ...]) -> tuple[Polynomial, Polynomial]:
        a, b = map(self.polynomial, args)
        floors = op in ("fdiv", "fmod")
        if set(b) == {()} and set(a) <= {()}:
            x, y = a.get((), 0), b[()]
            q = x // y
            if not floors and q < 0 and q * y != x:
                q += 1
            return _number(q), _number(x - q * y)
        key = (floors, tuple(sorted(a.items())), tuple(sorted(b.items())))
        if key in self._quotients:
            return self._quotients[key]
        natural = all(x.low is not None and x.low >= 0 for x in args)
        quotient, q = self._fresh(0 if natural else None, None)
        rest, r = self._fresh(None, None)
        z3, x, y = self.z3, self.linear(a), self.linear(b)
        if natural:
            self._natural |= {name for part in (quotient, rest) for m in part for name in m}
        self.side.append(z3.Implies(y > 0, x == self.linear(_product(quotient, b)) + r))
        if floors or natural:
            self.side.append(z3.Implies(y > 0, z3.And(r >= 0, r < y)))
            if natural:
                self.side.append(z3.And(q >= 0, r >= 0))
        else:
            self.side += [
                z3.Implies(z3.And(y > 0, x >= 0), z3.And(r >= 0, r < y)),
                z3.Implies(z3.And(y > 0, x < 0), z3.And(r <= 0, r > -y)),
                z3.Implies(z3.And(y > 0, x >= 0), q >= 0),
                z3.Implies(z3.And(y > 0, x <= 0), q <= 0),
            ]
        self._quotients[key] = quotient, rest
        return quotient, rest

    # -- products ----------------------------------------------------------------------------------

    def linear(self, polynomial: Polynomial) -> Any:
        """A sum of products as a sum of Z3's numbers."""
        parts = [n * self._monomial(m) if m else self.z3.IntVal(n) for m, n in polynomial.items()]
        return self.z3.Sum(*parts) if len(parts) > 1 else parts[0] if parts else self.z3.IntVal(0)

    def _monomial(self, monomial: Monomial) -> Any:
        if len(monomial) == 1:
            return self._numbers[monomial[0]]
        number = self._products.get(monomial)
        if number is None:
            number = self._products[monomial] = self.z3.Int("*".join(monomial))
        return number

    def _is_natural(self, monomial: Monomial) -> bool:
        return all(name in self._natural for name in monomial)

    def lemmas(self) -> list[Any]:
        """What orders the products."""
        for monomial in list(self._products):
            if len(monomial) > 4:
                raise TooHard("a product of too many factors")
            for size in range(2, len(monomial)):
                for part in dict.fromkeys(itertools.combinations(monomial, size)):
                    self._monomial(part)
        found: list[Any] = []
        products = sorted(self._products)
        singles = [(name,) for name in sorted({n for m in products for n in m})]
        for monomial in products:
            found += self._signs(monomial)
        for one, other in itertools.combinations([*products, *singles], 2):
            if len(one) == len(other) == 1:
                continue
            found += self._ordered(one, other)
            if len(found) > _MOST_LEMMAS:
                raise TooHard("too many products")
        return found

    def _signs(self, monomial: Monomial) -> list[Any]:
        z3 = self.z3
        product = self._monomial(monomial)
        found = []
        if self._is_natural(monomial):
            found.append(product >= 0)
        for name in dict.fromkeys(monomial):
            factor = self._numbers[name]
            rest = self._monomial(_without(monomial, (name,)) or ())
            found.append(z3.Implies(factor == 0, product == 0))
            low, high = self._ends[name]
            if _without(monomial, (name,)) and self._is_natural(_without(monomial, (name,)) or ()):
                found += [product <= high * rest] if high is not None and high < _FEW else []
                found += [product >= low * rest] if low is not None and abs(low) < _FEW else []
            if not self._is_natural(monomial):
                found += [
                    z3.Implies(z3.And(factor >= 0, rest >= 0), product >= 0),
                    z3.Implies(z3.And(factor >= 0, rest <= 0), product <= 0),
                    z3.Implies(z3.And(factor <= 0, rest >= 0), product <= 0),
                    z3.Implies(factor == 1, product == rest),
                ]
        return found

    def _ordered(self, one: Monomial, other: Monomial) -> list[Any]:
        z3 = self.z3
        found: list[Any] = []
        shared = _shared(one, other)
        if not shared:
            return found
        for size in range(1, len(shared) + 1):
            for factor in sorted(set(itertools.combinations(shared, size))):
                a, c = _without(one, factor), _without(other, factor)
                if a is None or c is None or (not a and not c):
                    continue
                x = self._monomial(a) if a else z3.IntVal(1)
                y = self._monomial(c) if c else z3.IntVal(1)
                f, ax, cy = (self._monomial(m) for m in (factor, one, other))
                rules = [
                    self._implied(x, y, ax, cy), self._implied(y, x, cy, ax),
                    self._implied(x, y, ax + f, cy, less=True),
                    self._implied(y, x, cy + f, ax, less=True),
                ]  # fmt: skip
                if self._is_natural(factor):
                    found += rules
                else:
                    found.append(z3.Implies(f >= 0, z3.And(*rules)))
        return found

    def _implied(self, x: Any, y: Any, a: Any, b: Any, *, less: bool = False) -> Any:
        """That ``x <= y``, or ``x < y``, makes ``a <= b``: thousands of these are made, and Z3's
        operators of Python look at their operands for long."""
        z3, context = self.z3, x.ctx
        at, where = (each.as_ast() for each in (x, y)), context.ref()
        first = z3.BoolRef((z3.Z3_mk_lt if less else z3.Z3_mk_le)(where, *at), context)
        then = z3.BoolRef(z3.Z3_mk_le(where, a.as_ast(), b.as_ast()), context)
        return z3.BoolRef(z3.Z3_mk_implies(where, first.as_ast(), then.as_ast()), context)

    # -- answers -----------------------------------------------------------------------------------

    def answer(
        self, conditions: Iterable[Term], effort: Effort, most: float, *, exact: bool = False
    ) -> Any:
        """Whether the conditions can all hold: False, a model of them, or None where Z3 has found
        no answer in time.

        Args:
            effort: what may be spent.
            most: no more of it than so many seconds.
            exact: products are what they are, which may take long; else a model may be none.

        Raises:
            TooHard: the question is too large.
        """
        z3 = self.z3
        parts = [self.condition(c) for c in conditions]
        solver = z3.SolverFor("QF_LIA") if not exact else z3.Solver()
        lemmas = self.lemmas()
        solver.add(*parts, *self.side, *lemmas)
        if exact:
            for monomial, number in self._products.items():
                product = self._numbers[monomial[0]]
                for name in monomial[1:]:
                    product = product * self._numbers[name]
                solver.add(number == product)
        result = effort.check(solver, len(parts) + len(self.side) + len(lemmas), most)
        if result == z3.unsat:
            return False
        return solver.model() if result == z3.sat else None

    def values(self, model: Any) -> dict[Term, int]:
        """What the leaves are in a model."""
        found: dict[Term, int] = {}
        for leaf, number in self.leaves.items():
            value = model.eval(number, model_completion=True)
            found[leaf] = bool(value) if leaf.condition else int(value.as_long())
        return found


def _number(value: int) -> Polynomial:
    return {(): value} if value else {}


def _sum(a: Polynomial, b: Polynomial, sign: int) -> Polynomial:
    total = dict(a)
    for monomial, n in b.items():
        total[monomial] = total.get(monomial, 0) + sign * n
        if not total[monomial]:
            del total[monomial]
    return total


def _product(a: Polynomial, b: Polynomial) -> Polynomial:
    if len(a) * len(b) > _MOST_PARTS * 2:
        raise TooHard("a product of too many sums")
    total: Polynomial = {}
    for (m, x), (n, y) in itertools.product(a.items(), b.items()):
        monomial = tuple(sorted(m + n))
        total[monomial] = total.get(monomial, 0) + x * y
        if not total[monomial]:
            del total[monomial]
    return total


def _shared(a: Monomial, b: Monomial) -> Monomial:
    rest, shared = list(b), []
    for name in a:
        if name in rest:
            rest.remove(name)
            shared.append(name)
    return tuple(shared)


def _without(a: Monomial, factor: Monomial) -> Monomial | None:
    rest = list(a)
    for name in factor:
        if name not in rest:
            return None
        rest.remove(name)
    return tuple(rest)
