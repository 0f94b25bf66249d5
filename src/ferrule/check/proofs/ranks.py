"""Arrays of any number of dims: what the body is told of their shapes.

``*S`` stands for as many dims as a call gives, whose product is ``S_size``. What a body reads of
them one by one may be any size; of the dims before and behind, and of products over all of ``*S``,
it is known which.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...rules.argument import Argument, Broadcast, Star
from ...source.accesses import terms
from ...source.accesses.shapes import PRODUCT, SHAPE, STRIDES
from ...source.accesses.terms import Term

_MOST = 64  # dims


class Ranks:
    """The numbers of dims of a call's arrays.

    Attributes:
        known: of a call in which each ``*S`` is one dim, by the symbols' names.
        facts: what holds of them.
    """

    def __init__(self) -> None:
        self.known: dict[str, int] = {}
        self.facts: list[Term] = []
        self._arrays: dict[str, _Array] = {}

    def declare(self, argument: Argument, sizes: tuple[Term, ...]) -> Term:
        """How many dims an array has, as its rule counts them.

        Args:
            sizes: of its dims; ``*S`` is one of them.
        """
        dims = argument.dims or ()
        many = (i for i, dim in enumerate(dims) if isinstance(dim, (Star, Broadcast)))
        at = next(many, None)
        if at is None:
            rank = terms.const(len(dims))
            self._arrays[argument.name] = _Array(sizes, terms.const(1), (), rank)
            return rank
        star = str(dims[at]).removeprefix("*")
        inner = self._symbol(f"{star}.ndim", 0)
        none = terms.eq(inner, terms.const(0))
        self.facts.append(terms.or_(terms.not_(none), terms.eq(sizes[at], terms.const(1))))
        rank = terms.add(inner, terms.const(len(dims) - 1))
        told = rank
        if len(dims) == 1:  # the body is told of one dim where there are none
            told = self._symbol(f"{argument.name}.ndim", 1)
            one = terms.eq(told, terms.const(1))
            self.facts.append(terms.or_(terms.and_(none, one), terms.eq(told, inner)))
        self._arrays[argument.name] = _Array(sizes[:at], sizes[at], sizes[at + 1 :], told)
        return rank

    def _symbol(self, name: str, low: int) -> Term:
        self.known[name] = 1
        return terms.symbol(name, low, _MOST)

    @property
    def told(self) -> dict[str, Term]:
        """``x_ndim`` of the arrays of any number of dims."""
        return {
            f"{name}_ndim": array.rank for name, array in self._arrays.items()
            if array.rank.op != "const"
        }  # fmt: skip

    def meanings(self, leaves: Iterable[Term]) -> dict[Term, Term]:
        """What sizes and strides are, and products of them."""
        found: dict[Term, Term] = {}
        for leaf in leaves:
            if leaf.op != "data":
                continue
            name = str(leaf.value)
            of = name.removesuffix(PRODUCT)
            array = self._arrays.get(of.removesuffix(SHAPE).removesuffix(STRIDES))
            if array is None or array is self._arrays.get(of):
                continue
            if name.endswith(PRODUCT):
                value = array.product(leaf.args[0], leaf.args[1])
            else:
                size, stride = array.at(leaf.args[0])
                value = size if of.endswith(SHAPE) else stride
            if value is None:
                value = terms.anything(f"a size of {name}", leaf.low, leaf.high)
                if name.endswith(SHAPE):
                    value = array.no_zero(value)
            found[leaf] = value
        return found


def broadcast_facts(size: Term, of: Mapping[str, Term]) -> list[Term]:
    """What is known of the product of the dims that several broadcast to.

    Args:
        of: the products of the dims of each, by the symbols of how many they are.
    """
    zero, one = terms.const(0), terms.const(1)
    none = terms.or_(*(terms.eq(each, zero) for each in of.values()))
    larger = [terms.le(each, size) for each in of.values()]
    some = terms.and_(terms.not_(none), terms.lt(zero, size), *larger)
    facts = [
        terms.or_(terms.and_(none, terms.eq(size, zero)), some),
        terms.le(size, _product(tuple(of.values()))),
    ]
    # Of one dim, they are that size, or 1.
    flat = (terms.le(terms.symbol(name, 0, _MOST), one) for name in of)
    alike = (terms.or_(terms.eq(each, size), terms.eq(each, one)) for each in of.values())
    among = terms.or_(terms.eq(size, one), *(terms.eq(each, size) for each in of.values()))
    return [*facts, terms.or_(terms.not_(terms.and_(*flat)), terms.and_(*alike, among))]


class _Array:
    """An array of any number of dims.

    Attributes:
        front, star, back: the sizes of its dims, and the product of those that are ``*S``.
        rank: how many dims the body is told of.
    """

    def __init__(
        self, front: tuple[Term, ...], star: Term, back: tuple[Term, ...], rank: Term
    ) -> None:
        self.front, self.star, self.back, self.rank = front, star, back, rank

    def at(self, index: Term) -> tuple[Term | None, Term | None]:
        """The size and the stride of a dim; None of one of ``*S``."""
        sizes = (*self.front, self.star, *self.back)
        behind = terms.sub(index, self.rank)
        if index.op == "const" and 0 <= index.value < len(self.front):
            place = int(index.value)
        elif behind.op == "const" and -len(self.back) <= behind.value < 0:
            place = len(sizes) + int(behind.value)
        else:
            return None, None
        return sizes[place], _product(sizes[place + 1 :])

    def no_zero(self, size: Term) -> Term:
        """A size that is not 0 where no size of the array is."""
        whole = _product((*self.front, self.star, *self.back))
        none = terms.or_(terms.eq(whole, terms.const(0)), terms.lt(terms.const(0), size))
        return terms.ite(none, size, terms.const(1))

    def product(self, first: Term, count: Term) -> Term | None:
        """The product of so many sizes; None where they may be a part of ``*S``."""
        end = terms.sub(terms.add(first, count), self.rank)
        if first.op != "const" or end.op != "const":
            return None
        if not (0 <= first.value <= len(self.front) and -len(self.back) <= end.value <= 0):
            return None
        back = self.back[: len(self.back) + int(end.value)]
        return _product((*self.front[int(first.value) :], self.star, *back))


def _product(sizes: tuple[Term, ...]) -> Term:
    product = terms.const(1)
    for size in sizes:
        product = terms.mul(product, size)
    return product
