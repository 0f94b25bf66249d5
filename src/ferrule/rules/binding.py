"""What the inputs of one call bind of a rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from math import prod
from typing import Any

from .expression import DEVICE_NUMBERS, Expression

Shape = tuple[Any, ...]


class Binding:
    """The sizes and dtypes that the inputs of one call bind.

    Attributes:
        dims: the size of each dim.
        numbers: the value of each number that is no float.
        stars: the sizes that each ``*S`` stands for.
        dtypes: the full name of each dtype variable.
        shapes: the shape of each input, None of those that are absent; of outputs, too, once they
            are known.
        device: gives what launches may depend on of the device that the call runs on:
            ``":device"`` and the numbers of `expression.DEVICE_NUMBERS`, as far as that is known.
    """

    def __init__(self, shapes: dict[str, Shape | None]) -> None:
        self.dims: dict[str, Any] = {}
        self.numbers: dict[str, Any] = {}
        self.stars: dict[str, Shape] = {}
        self.dtypes: dict[str, str] = {}
        self.shapes = shapes
        self.device: Callable[[], Mapping[str, Any]] = dict

    def on(self, device: Callable[[], Mapping[str, Any]]) -> Binding:
        """The same for another device; calls share theirs."""
        other = copy(self)
        other.device = device
        return other

    def values(self, on: Expression) -> dict[str, Any]:
        """The values of all that an expression may name: dims and numbers, ``"S_size"`` of ``*S``,
        ``"x.size"``, ``"x.ndim"`` and, of dtype variables, ``":T"``; and those of the device."""
        values = {**self.dims, **self.numbers}
        for name in on.names.difference(values, DEVICE_NUMBERS):
            values[name] = self.size(name)
        for name in on.variables:
            values[f":{name}"] = self.dtypes[name]
        if on.of_device:
            values = {**self.device(), **values}
        for name in on.arrays:
            shape = self.shapes[name] or ()
            values[f"{name}.size"], values[f"{name}.ndim"] = prod(shape), len(shape)
        return values

    def size(self, name: str) -> Any:
        """The size of a dim, or of ``S_size`` that of ``*S``."""
        return self.dims[name] if name in self.dims else prod(self.stars[name[: -len("_size")]])

    def words(self, *on: Expression) -> str:
        """The shapes, for an error message, and the numbers, dtypes and facts of the device that
        these expressions ask for."""
        shapes = [f"{name} {shape}" for name, shape in self.shapes.items() if shape]
        names = frozenset[str]().union(*(expression.names for expression in on))
        numbers = [f"{name} = {value}" for name, value in self.numbers.items() if name in names]
        device = self.device() if any(expression.of_device for expression in on) else {}
        numbers += [f"{n} = {value}" for n, value in device.items() if n in names]
        if ":device" in device:
            numbers.append(f"device is {device[':device']}")
        return ", ".join([*shapes, *numbers, *self.dtypes_of(*on)])

    def dtypes_of(self, *on: Expression) -> list[str]:
        """What the dtype variables are that these expressions name, for an error message."""
        variables = frozenset[str]().union(*(expression.variables for expression in on))
        return [f"{name} is {self.dtypes[name]}" for name in sorted(variables)]
