"""Sizes that a rule allows: drawn ones are mended until its conditions hold."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ...errors import FerruleError
from ...rules.argument import Star
from ...rules.binding import Binding
from ...rules.expression import Expression
from ...rules.rule import Rule

MOST_ELEMENTS = 1 << 15  # of an array: a checked launch takes some time for each
_MOST_PAIRS = 4000
_ROUNDS = 4
_AROUND = (8, 16, 32, 64, 128, 256, 1024)
# Of a dim, by how many dims the largest array has.
_LARGEST = {1: 5000, 2: 1100, 3: 130}
_LEAST = 20

Shape = tuple[int, ...]


def likely(most: int, threadgroups: Iterable[int]) -> list[int]:
    """Sizes at which kernels fail: small ones, and around powers of two and threadgroups.

    Args:
        most: none is larger.
        threadgroups: threads of each.
    """
    sizes = {0, 1, 2, 3, 4, 5, 7, 100, 1000, 3000}
    for power in (*_AROUND, *threadgroups):
        sizes |= {power - 1, power, power + 1, 2 * power + 1}
    return sorted(size for size in sizes if 0 <= size <= most)


def largest(rule: Rule) -> int:
    """The largest size that is drawn for a dim of a rule."""
    ranks = [
        sum(2 if isinstance(dim, Star) else 1 for dim in a.dims or ())
        for a in (*rule.inputs, *rule.declared)
    ]
    return _LARGEST.get(max(ranks, default=1), _LEAST)


class Sizes:
    """The sizes of one call, while they are made to fit a rule.

    Attributes:
        dims: of each dim.
        stars: of each ``*S``.
        numbers: the values of the rule's numbers.
    """

    def __init__(
        self,
        rule: Rule,
        present: Sequence[bool],
        dims: dict[str, int],
        stars: dict[str, Shape],
        kinds: Mapping[str, str],
        numbers: dict[str, int],
        fixed: Iterable[str] = (),
        most: int = MOST_ELEMENTS,
    ) -> None:
        """Take what was drawn.

        Args:
            rule: the rule.
            present: which inputs are there.
            dims, stars, numbers: as above.
            kinds: the dtype of each dtype variable.
            fixed: numbers that must not be changed.
            most: elements of an array.
        """
        self.dims, self.stars, self.numbers = dims, stars, numbers
        self._rule, self._present, self._kinds = rule, present, kinds
        self._fixed, self._most = frozenset(fixed), most
        bound = {name for a in self._there() for name in self._names(a.dims or ())}
        for name in set(dims) - bound:
            dims[name] = 0  # as a call has it whose arrays with this dim are not there

    def fit(self) -> list[Shape | None] | None:
        """The shapes of the inputs, None of those that are not there; None where nothing fits."""
        for _ in range(_ROUNDS):
            self._limit()
            broken = self._broken()
            if not broken:
                return self._shapes()
            for condition in broken:
                self._mend(condition)
        return None

    def _there(self) -> Iterator[Any]:
        return (a for a, there in zip(self._rule.inputs, self._present, strict=True) if there)

    @staticmethod
    def _names(dims: Iterable[Any]) -> Iterator[str]:
        for dim in dims:
            if isinstance(dim, Expression) and dim.node[0] == "name":
                yield dim.node[1]

    def _binding(self) -> Binding:
        binding = Binding({a.name: None for a in self._rule.inputs})
        binding.dims, binding.stars = self.dims, self.stars
        binding.numbers, binding.dtypes = self.numbers, dict(self._kinds)
        for argument in self._there():
            binding.shapes[argument.name] = self._shape(argument, binding)
        return binding

    def _shape(self, argument: Any, binding: Binding) -> Shape | None:
        shape: list[int] = []
        for dim in argument.dims or ():
            if isinstance(dim, Star):
                shape += self.stars[dim.name]
                continue
            size = self._evaluated(dim, binding)
            if size is None or size < 0:
                return None
            shape.append(size)
        return tuple(shape)

    @staticmethod
    def _evaluated(expression: Expression, binding: Binding) -> int | None:
        try:
            return int(expression.evaluate(binding.values(expression)))
        except (KeyError, ZeroDivisionError):
            return None

    def _shapes(self) -> list[Shape | None] | None:
        """The inputs' shapes, where the rule takes them and gives outputs of a fair size."""
        binding = self._binding()
        shapes = [binding.shapes[a.name] for a in self._rule.inputs]
        if any(shape is None for shape, there in zip(shapes, self._present, strict=True) if there):
            return None
        kinds = [
            self._kinds.get(a.dtype, a.dtype) if there and a.dims is not None else None
            for a, there in zip(self._rule.inputs, self._present, strict=True)
        ]
        try:
            bound = self._rule.bind("fuzz", shapes, kinds, numbers=self.numbers)
            outputs = self._rule.results("fuzz", bound)
        except FerruleError:
            return None
        large = any(math.prod(shape) > 4 * self._most for shape, _ in outputs)
        return None if large else shapes

    def _limit(self) -> None:
        """Halve sizes until the inputs are not too large."""
        while True:
            binding = self._binding()
            shapes = (binding.shapes[a.name] or () for a in self._there())
            if max(map(math.prod, shapes), default=0) <= self._most:
                return
            name = max(self.dims, key=lambda name: self.dims[name], default="")
            star = max(self.stars, key=lambda name: max(self.stars[name], default=0), default="")
            most = max(self.stars.get(star, ()), default=0)
            if self.dims.get(name, 0) >= most:
                self.dims[name] //= 2
            else:
                self.stars[star] = tuple(n // 2 if n == most else n for n in self.stars[star])

    def _broken(self) -> list[Expression]:
        binding = self._binding()
        return [c for c in self._rule.conditions if not self._evaluated(c, binding)]

    def _mend(self, condition: Expression) -> None:
        """Change the dims of a condition, as little as possible, so that it holds and no other
        condition is broken by that."""
        before = len(self._broken())
        tables = [
            (table, name)
            for name in sorted(condition.names)
            for table in (self.dims, self.numbers)
            if name in table and name not in self._fixed
        ]
        for count in (1, 2):
            for chosen in itertools.combinations(tables, count):
                start = [table[name] for table, name in chosen]
                each = [self._near(size) for size in start]
                for sizes in itertools.islice(itertools.product(*each), _MOST_PAIRS):
                    for (table, name), size in zip(chosen, sizes, strict=True):
                        table[name] = size
                    holds = self._evaluated(condition, self._binding())
                    if holds and len(self._broken()) < before:
                        return
                for (table, name), size in zip(chosen, start, strict=True):
                    table[name] = size

    def _near(self, size: int) -> list[int]:
        """Sizes to try, those close to what was drawn first."""
        most = largest(self._rule)
        multiples = (n * k for n in _literals(self._rule) for k in range(1, 9))
        tried = {*likely(most, ()), *(n for n in multiples if n <= self._most)}
        tried |= {n for n in range(size - 8, size + 9) if n >= 0}
        return sorted(tried, key=lambda n: (abs(n - size), n))


def _literals(rule: Rule) -> set[int]:
    """The integers that the conditions of a rule name."""
    found: set[int] = set()
    nodes = [condition.node for condition in rule.conditions]
    while nodes:
        node = nodes.pop()
        if node[0] == "int":
            found.add(node[1])
        nodes += [part for part in node[1:] if isinstance(part, tuple)]
    return {n for n in found if n > 0}
