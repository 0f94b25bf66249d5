"""Sizes of a kernel's call that are texts: expressions of its inputs' shapes.

::

    kernel(inputs=[x], grid=("inp.size", 1, 1), threadgroup=("min(inp.size, 256)", 1, 1),
           template=[("D", "inp.shape[-1]")], output_shapes=["inp.shape"], …)

They are what rules have (`expression`), with ``x.size``, ``x.ndim`` and ``x.shape[i]`` in place of
dims; a whole output shape may be ``"x.shape"``. The launch may name the outputs, too. In a graph
whose sizes change they are evaluated anew each time, where numbers would be stale.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from typing import Any

from ..dtypes import Dtype
from ..errors import KernelError, RuleError
from ..kernel import Kernel
from ..rules.argument import Argument
from ..rules.expression import Expression
from ..rules.grammar import parse
from ..rules.rule import Rule
from ..spec import Shape, with_threads
from . import arguments

_DIM = re.compile(r"(\w+)\.shape\[(-?\d+)\]", re.ASCII)
_SHAPE = re.compile(r"\s*(\w+)\.shape\s*", re.ASCII)
_parse = functools.lru_cache(maxsize=1024)(parse)


def texts(grid: object, threadgroup: object, shapes: object, template: object) -> bool:
    """Whether a size is given as a text."""
    if _has_text(grid) or _has_text(threadgroup):
        return True
    for shape in shapes if type(shapes) in (tuple, list) else ():  # type: ignore[attr-defined]
        if type(shape) is str or _has_text(shape):
            return True
    for pair in template if type(template) in (tuple, list) else ():  # type: ignore[attr-defined]
        if type(pair) in (tuple, list) and len(pair) == 2 and _is_text(pair[1]):
            return True
    return False


def _has_text(value: object) -> bool:
    return type(value) in (tuple, list) and str in map(type, value)  # type: ignore[call-overload]


def _is_text(value: object) -> bool:
    """Whether a template's value names an input's size: other texts are refused as ever."""
    return type(value) is str and "." in value


class Sizes:
    """The sizes of a call as expressions, for inputs of these ranks.

    Attributes:
        rule: the inputs, and the outputs' shapes.
        launch: grid and threadgroup, then the template values that are texts.
        template: names and values; None where the value is the next of ``launch``.
    """

    def __init__(
        self,
        kernel: Kernel,
        ranks: Sequence[int],
        grid: object,
        threadgroup: object,
        shapes: Sequence[object],
        outs: Sequence[Dtype],
        template: object,
    ) -> None:
        self.kernel = kernel
        inputs = [
            Argument(name, tuple(_dim(name, i) for i in range(rank)), f"{name}.dtype")
            for name, rank in zip(kernel.input_names, ranks, strict=True)
        ]
        self._dims: dict[str, Any] = {argument.name: argument.dims for argument in inputs}
        outputs = [
            Argument(name, self._shape(i, shapes[i]), outs[i].name)
            for i, name in enumerate(kernel.output_names)
        ]
        self._dims.update({argument.name: argument.dims for argument in outputs})
        self.rule = Rule(tuple(inputs), tuple(outputs), {}, ())
        self.launch = [*self._axes("grid", grid), *self._axes("threadgroup", threadgroup)]
        self.template: list[tuple[str, Any]] = []
        for pair in template if isinstance(template, (tuple, list)) else ():
            name, value = pair if isinstance(pair, (tuple, list)) and len(pair) == 2 else (pair, 0)
            if _is_text(value):
                label = f"{arguments.label_of(kernel, 'template')}: {name}"
                self.launch.append(self._expression(label, str(value)))
                value = None
            self.template.append((name, value))

    def numbers(
        self, shapes: Sequence[Shape]
    ) -> tuple[tuple[int, int, int], tuple[int, int, int], list[Shape], list[tuple[str, Any]]]:
        """Grid, threadgroup, output shapes and template for inputs of these shapes.

        Raises:
            KernelError: a size divides by zero.
        """
        symbols: dict[str, int] = {}

        def learn(name: str, shape: Shape) -> None:
            symbols[f"{name}.size"], symbols[f"{name}.ndim"] = math.prod(shape), len(shape)
            symbols.update({f"{name}.shape[{i}]": size for i, size in enumerate(shape)})

        for argument, shape in zip(self.rule.inputs, shapes, strict=True):
            learn(argument.name, shape)

        def evaluate(expression: Any) -> int:
            try:
                size: int = expression.evaluate(symbols)
            except ZeroDivisionError:
                raise KernelError(
                    f"{self.kernel.tag} kernel {self.kernel.name!r}: {expression} divides by zero "
                    f"for inputs of the shapes {', '.join(map(str, shapes))}."
                ) from None
            return size

        results = [tuple(map(evaluate, argument.dims or ())) for argument in self.rule.outputs]
        for argument, shape in zip(self.rule.outputs, results, strict=True):
            learn(argument.name, shape)
        sizes = list(map(evaluate, self.launch))
        of_template = iter(sizes[6:])
        template = [(n, next(of_template) if v is None else v) for n, v in self.template]
        grid, group = (sizes[0], sizes[1], sizes[2]), (sizes[3], sizes[4], sizes[5])
        return grid, with_threads(group, grid), results, template

    def texts(self) -> dict[str, Any]:
        """The sizes as text: `grid`, `threadgroup` and `output_shapes` as a call takes them, of
        ``template`` the values that are expressions, by their names."""
        expressions = [str(expression) for expression in self.launch]
        names = [name for name, value in self.template if value is None]
        return {
            "grid": expressions[:3],
            "threadgroup": expressions[3:6],
            "output_shapes": [
                [str(dim) for dim in output.dims or ()] for output in self.rule.outputs
            ],
            "template": dict(zip(names, expressions[6:], strict=True)),
        }

    def _shape(self, index: int, shape: object) -> tuple[Expression, ...]:
        label = arguments.output_label(self.kernel, "output_shapes", index)
        if isinstance(shape, str):
            match = _SHAPE.fullmatch(shape)
            if match is None or match[1] not in self._dims:
                choices = ", ".join(f'"{name}.shape"' for name in self.kernel.input_names)
                expected = f"a sequence of sizes{choices and f', or {choices}'}"
                raise arguments.wrong_type(label, shape, expected)
            dims: tuple[Expression, ...] = self._dims[match[1]]
            return dims
        sizes: Any = shape
        if not isinstance(shape, (tuple, list)):
            sizes = arguments.integers(label, shape, "a sequence of integers and expressions")
        return tuple(self._size(label, size) for size in sizes)

    def _axes(self, name: str, axes: object) -> list[Expression]:
        label = arguments.label_of(self.kernel, name)
        expected = "three sizes, each an integer or an expression"
        sizes: Any = axes
        if not isinstance(axes, (tuple, list)):
            sizes = arguments.integers(label, axes, expected)
        if len(sizes) != 3:
            raise arguments.wrong_type(label, axes, expected)
        return [self._size(label, size) for size in sizes]

    def _size(self, label: str, size: object) -> Expression:
        if isinstance(size, str):
            return self._expression(label, size)
        (number,) = arguments.integers(label, (size,), "integers and expressions of the inputs")
        return Expression(("int", number) if number >= 0 else ("neg", ("int", -number)))

    def _expression(self, label: str, text: str) -> Expression:
        try:
            expression = _parse(text)
        except RuleError as error:
            raise RuleError(f"{label}: {error}") from None
        if expression.condition:
            raise KernelError(f"{label}: got the condition {text!r}, expected a size.")
        return Expression(self._resolved(label, text, expression.node))

    def _resolved(self, label: str, text: str, node: tuple[Any, ...]) -> tuple[Any, ...]:
        """A tree in which all names are dims that a call's inputs bind."""
        if node[0] == "int":
            return node
        if node[0] == "is":
            raise KernelError(
                f"{label}: {text!r} compares {node[1]!r} with a dtype, which the sizes of an op's "
                "rule can; expected .size, .ndim and .shape[i] of inputs."
            )
        if node[0] not in ("name", "size", "ndim"):
            parts = (
                self._resolved(label, text, part) if isinstance(part, tuple) else part
                for part in node[1:]
            )
            return (node[0], *parts)
        match = _DIM.fullmatch(node[1]) if node[0] == "name" else None
        name = match[1] if match else node[1]
        dims = self._dims.get(name)
        if dims is None or (node[0] == "name" and match is None):
            expected = ", ".join(self._dims)
            raise KernelError(
                f"{label}: {text!r} names {node[1]!r}; expected .size, .ndim or .shape[i] of one "
                f"of {expected}."
            )
        if match is None:
            return node
        at = int(match[2])
        if not -len(dims) <= at < len(dims):
            raise KernelError(
                f"{label}: {text!r} names dim {at} of {name!r}, which has {len(dims)} dims."
            )
        known_dim: tuple[Any, ...] = dims[at].node
        return known_dim


def _dim(name: str, index: int) -> Expression:
    return Expression(("name", f"{name}.shape[{index}]"))


def shapes_of(values: Sequence[Any]) -> list[Shape]:
    """The shapes of inputs; numbers have none."""
    return [tuple(map(int, getattr(value, "shape", ()))) for value in values]
