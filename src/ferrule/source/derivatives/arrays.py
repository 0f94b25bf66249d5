"""Arrays of several dims as rows of elements."""

from __future__ import annotations

from .nodes import Array, Binary, Element, Expression
from .partials import mul


def size_of(array: Array) -> Expression:
    """How many elements an array has."""
    size: Expression = array.dims[0]
    for dim in array.dims[1:]:
        size = mul(size, dim)
    return size


def numbered(array: Array, number: Expression) -> Element:
    """An element by its number."""
    indices: list[Expression] = []
    rest = number
    for dim in reversed(array.dims[1:]):
        indices.insert(0, Binary("%", rest, dim, number.type))
        rest = Binary("/", rest, dim, number.type)
    return Element(array, (rest, *indices), array.element)
