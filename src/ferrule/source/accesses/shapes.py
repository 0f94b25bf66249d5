"""Sizes that loops go through: ``x_shape[d]``, and what their products are behind a loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from . import terms
from .kinds import Kind
from .terms import Term
from .values import Pointer, Scalar, Value, as_number

SHAPE, STRIDES, PRODUCT = "_shape", "_strides", ".product"
_SIZE = Kind("int", 31, False)  # which is never negative


class Factor(NamedTuple):
    """That each round of a loop multiplies a variable by a size.

    Attributes:
        shape: the array of sizes.
        place: which one, in a round.
        step: how that changes with each round: 1 or -1.
        kind: of a product that wraps; None of one that must fit.
    """

    shape: str
    place: Term
    step: int
    kind: Kind | None


class Multiplied:
    """The variables that a loop multiplies by sizes, and those that are places among these.

    Args:
        carried: by variable: what it holds in a round, and behind that.
        first: what variables hold in front of the loop.
    """

    def __init__(
        self, carried: Mapping[int, tuple[Value, Value]], first: Mapping[int, Value], counter: Term
    ) -> None:
        self.factors: dict[int, Factor] = {}
        self.places: dict[int, Factor] = {}
        steps: dict[Term, Factor] = {}
        for cell, (held, behind) in carried.items():
            factor = factor_of(held, behind, counter)
            if factor is None:
                continue
            self.factors[cell] = factor
            start = first[cell]
            begins = isinstance(start, Scalar) and start.term is terms.const(1)
            if begins and isinstance(held, Scalar):
                steps[held.term] = factor
        for cell, (held, behind) in carried.items():
            place = place_of(held, behind, steps)
            if place is not None:
                self.places[cell] = place

    def behind(self, cell: int, held: Value, counter: Term, rounds: Term) -> Value | None:
        """What a variable holds behind the loop; None where that is not known.

        Args:
            held: what it holds in front of it.
        """
        if cell in self.factors:
            return product_of(held, self.factors[cell], counter, rounds)
        if cell in self.places:
            return any_place(held, self.places[cell], counter, rounds)
        return None


def size_at(name: str, index: Term, kind: Kind) -> Term:
    """``x_shape[d]`` or ``x_strides[d]``, where no number says which one."""
    return terms.data(name, index, _SIZE if name.endswith(SHAPE) else kind)


def factor_of(held: Value, behind: Value, counter: Term) -> Factor | None:
    """What a round multiplies a variable by; None where it does something else.

    Args:
        held: what the variable holds in a round: anything.
        behind: what it holds behind that.
    """
    if not (isinstance(held, Scalar) and isinstance(behind, Scalar)):
        return None
    unknown, result, kind = held.term, behind.term, None
    if result.op == "wrap":
        result, kind = result.args[0], result.value
    if unknown.op != "unknown" or result.op != "mul" or held.kind != behind.kind:
        return None
    if kind not in (None, held.kind) or unknown not in result.args:
        return None
    size = next((a for a in result.args if a is not unknown), None)
    if size is None or size.op != "data" or not str(size.value).endswith(SHAPE):
        return None
    index = size.args[0]
    first = terms.replaced(index, {counter: terms.const(0)})
    step = terms.sub(terms.replaced(index, {counter: terms.const(1)}), first)
    if step.op != "const" or step.value not in (1, -1):
        return None
    straight = terms.add(first, terms.mul(step, counter))
    if index is not straight or any(leaf.op == "unknown" for leaf in index.leaves):
        return None
    return Factor(str(size.value), index, int(step.value), kind)


def product_of(held: Value, factor: Factor, counter: Term, rounds: Term) -> Value:
    """What a variable holds behind a loop that multiplies it by sizes."""
    if not isinstance(held, Scalar):
        return held
    result = terms.mul(as_number(held), _product(factor, counter, rounds))
    return Scalar(terms.wrap(result, factor.kind) if factor.kind else result, held.kind)


def _product(factor: Factor, counter: Term, rounds: Term) -> Term:
    first = terms.replaced(factor.place, {counter: terms.const(0)})
    if factor.step < 0:
        first = terms.add(terms.sub(first, rounds), terms.const(1))
    return terms.data(factor.shape + PRODUCT, first, None, rounds)


def place_of(held: Value, behind: Value, factors: Mapping[Term, Factor]) -> Factor | None:
    """The sizes that a variable is a place among: a round adds a digit, which is less than a size,
    times what the sizes before have as their product. None where it does something else.

    Args:
        held, behind: what the variable holds in a round, and behind that.
        factors: what rounds multiply variables by, by what these hold in a round.
    """
    if not (isinstance(held, Scalar) and isinstance(behind, Scalar)) or held.kind.signed:
        return None
    total = _unwrapped(behind.term, held.kind)
    if total.op != "add" or len(total.args) != 2 or held.term not in total.args:
        return None
    added = next(a for a in total.args if a is not held.term)
    added = _unwrapped(added, held.kind)
    if added.op != "mul" or held.term in added.leaves:
        return None
    for step, digit in (added.args, added.args[::-1]):
        factor = factors.get(step)
        if factor is None or factor.kind != held.kind or digit.op not in ("fmod", "rem"):
            continue
        number, size = digit.args
        is_size = size.op == "data" and size.value == factor.shape and size.args == (factor.place,)
        if is_size and number.low is not None and number.low >= 0:
            return factor
    return None


def any_place(held: Value, factor: Factor, counter: Term, rounds: Term) -> Value | None:
    """What a place among sizes may be behind the loop; None where it did not begin at 0."""
    if not isinstance(held, Scalar) or held.term is not terms.const(0):
        return None
    product = _product(factor, counter, rounds)
    # Where no size is 0, no product before is larger than that of all; and where that is too large
    # for the type, anything may be.
    fits = terms.le(product, terms.const(held.kind.most))
    place = terms.fmod(terms.anything("a place among sizes", 0, None), product)
    other = terms.anything("a place among too many", 0, held.kind.most)
    return Scalar(terms.wrap(terms.ite(fits, place, other), held.kind), held.kind)


def whole_product(shape: Value, strides: Value, rank: Value) -> Term | None:
    """The product of all sizes of an array, where these are its shape, strides and rank."""
    if not (isinstance(shape, Pointer) and isinstance(strides, Pointer)):
        return None
    name = shape.array.name
    both = name.endswith(SHAPE) and strides.array.name == name.removesuffix(SHAPE) + STRIDES
    starts = all(terms.add(p.base, p.offset) is terms.const(0) for p in (shape, strides))
    many = shape.array.length
    if not (both and starts and isinstance(rank, Scalar) and rank.term is many):
        return None
    if shape.array.space != "sizes" or strides.array.space != "sizes":
        return None
    return terms.data(name + PRODUCT, terms.const(0), None, rank.term)


def _unwrapped(term: Term, kind: Kind) -> Term:
    return term.args[0] if term.op == "wrap" and term.value == kind else term
