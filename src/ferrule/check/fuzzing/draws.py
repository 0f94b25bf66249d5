"""Calls that a rule allows, drawn by hypothesis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from ... import dtypes
from ...dtypes import Dtype
from ...errors import KernelError
from ...operators.bodies import KernelBody
from ...operators.op import Op
from ...rules.argument import Argument, Broadcast, Star, is_countable
from ...rules.expression import Expression
from ...rules.grammar import parse
from .recipes import LAYOUTS, Call, Fill, Number, Recipe
from .sizes import MOST_ELEMENTS, Shape, Sizes, largest, likely

# Of a dtype variable that the rule does not limit.
USUAL = ("float32", "float16", "bfloat16")
_MOST_STARS = 3
_MOST_COUNT = 100_000  # integers of a range that are counted through
_LIKELY = 8  # of so many sizes, one is not likely
_DRAWN = 8  # numbers that a strategy is asked for
# Large and small numbers that can be squared.
# Of a call with one of these dtypes, which they must not leave; narrower ones are looked for first.
_EDGES = {"float8_e4m3fn": (16.0, 0.125), "float8_e5m2": (16.0, 0.125), "float16": (100.0, 0.01)}
_USUAL_EDGES = (1e4, 1e-6)
_FLOAT_NUMBERS = (1.0, 0.5, 2.0, 1e-5, 0.0, -1.5)
_POWERS = (1.0, 0.25, 0.5, 2.0, 4.0)  # of float8_e8m0fnu, which has nothing else

Draw = Callable[[Any], Any]


class Draws:
    """What calls of an op are drawn from.

    Attributes:
        kinds: for each dtype variable the dtypes that are drawn.
    """

    def __init__(
        self,
        op: Op,
        inputs: Mapping[str, Any],
        kinds: Mapping[str, Sequence[str]],
        nonfinite: bool,
        threadgroups: Sequence[int],
        most: int = MOST_ELEMENTS,
    ) -> None:
        """Check what the user says of the inputs.

        Args:
            op: the op.
            inputs: for inputs by name, a strategy of elements, a range such as ``"0..V-1"``, or a
                function of the call's sizes that gives one of these.
            kinds: for dtype variables by name, the dtypes that are drawn.
            nonfinite: also draw infinities and NaN.
            threadgroups: also launch with these.
            most: elements of an array.

        Raises:
            KernelError: there is no such input or dtype.
        """
        rule = op.rule
        self._rule, self._nonfinite, self._threadgroups = rule, nonfinite, tuple(threadgroups)
        names = [argument.name for argument in rule.inputs]
        for name in inputs:
            if name not in names:
                raise KernelError(
                    f"[fuzz] `inputs`: op {op.name!r} has no input {name!r}, but "
                    f"{', '.join(names)}."
                )
        self._inputs = dict(inputs)
        variables = dict.fromkeys(
            a.dtype for a in rule.inputs if a.dims is not None and a.dtype not in dtypes.BY_NAME
        )
        for name, given in kinds.items():
            unknown = [kind for kind in given if kind not in dtypes.BY_NAME]
            if name not in variables or unknown or not given:
                raise KernelError(
                    f"[fuzz] `dtypes`: got {name!r}: {list(given)}; expected some of "
                    f"{', '.join(dtypes.BY_NAME)} for one of the op's dtype variables "
                    f"({', '.join(variables) or 'it has none'})."
                )
        self.kinds = {v: tuple(kinds.get(v) or rule.choices.get(v, USUAL)) for v in variables}
        self._most = largest(rule)
        self._elements = most
        self._narrow: list[str] = []  # the dtypes of the call that is drawn
        self._likely = likely(self._most, declared_threads(op))

    def strategy(self) -> Any:
        """A strategy of `Call`."""

        @st.composite
        def calls(draw: Draw) -> Call:
            return self._call(draw)

        return calls()

    def _call(self, draw: Draw) -> Call:
        rule = self._rule
        kinds = {name: draw(st.sampled_from(chosen)) for name, chosen in self.kinds.items()}
        present = [draw(st.booleans()) if a.optional else True for a in rule.inputs]
        for variable, default in rule.defaults.items():
            pairs = zip(rule.inputs, present, strict=True)
            if not any(a.dtype == variable and there for a, there in pairs):
                kinds[variable] = kinds.get(default, default)
        dims = {name: self._size(draw) for name in rule.dim_names}
        stars = self._stars(draw)
        numbers = {a.name: self._number(draw, a) for a in rule.inputs if is_countable(a)}
        fixed = [name for name in numbers if name in self._inputs]
        sizes = Sizes(rule, present, dims, stars, kinds, numbers, fixed, self._elements)
        shapes = sizes.fit()
        assume(shapes is not None)
        self._narrow = [kinds.get(a.dtype, a.dtype) for a in (*rule.inputs, *rule.declared)]
        drawn: list[Recipe | Number | None] = []
        for argument, there, shape in zip(rule.inputs, present, shapes or (), strict=True):
            if not there:
                drawn.append(None)
            elif argument.dims is None:
                number = numbers.get(argument.name)
                if argument.dtype == "bool":
                    number = None if number is None else bool(number)
                drawn.append(self._float(draw, argument, sizes) if number is None else number)
            else:
                dtype = dtypes.BY_NAME[kinds.get(argument.dtype, argument.dtype)]
                drawn.append(self._array(draw, argument, shape or (), dtype, sizes))
        threadgroup = draw(st.sampled_from((None, *self._threadgroups)))
        return Call(tuple(a.name for a in rule.inputs), tuple(drawn), threadgroup)

    # -- sizes and numbers -----------------------------------------------------------------------

    def _size(self, draw: Draw, most: int | None = None) -> int:
        """A size: most often one of `likely`, else any; hypothesis makes it smaller one by one."""
        limit = self._most if most is None else most
        chosen = [size for size in self._likely if size <= limit]
        drawn: int = draw(st.integers(0, _LIKELY * limit))
        return drawn if drawn <= limit else chosen[drawn % len(chosen)]

    def _stars(self, draw: Draw) -> dict[str, Shape]:
        arguments = (*self._rule.inputs, *self._rule.declared)
        dims = [dim for argument in arguments for dim in argument.dims or ()]
        together = {name for dim in dims if isinstance(dim, Broadcast) for name in dim.names}
        whole: Shape | None = None
        stars: dict[str, Shape] = {}
        for name in dict.fromkeys(dim.name for dim in dims if isinstance(dim, Star)):
            if name in together and whole is not None:
                least = draw(st.integers(0, len(whole)))
                shape = tuple(1 if draw(st.booleans()) else n for n in whole[least:])
            else:
                count = draw(st.integers(0, _MOST_STARS))
                most = self._most if count < 2 else 70 if count == 2 else 12
                shape = tuple(self._size(draw, most) for _ in range(count))
            whole = shape if name in together and whole is None else whole
            stars[name] = shape
        return stars

    def _number(self, draw: Draw, argument: Argument) -> int:
        """A number on which sizes may depend, drawn before them."""
        if argument.name in self._inputs:
            source = self._inputs[argument.name]
            if isinstance(source, str):
                low, high = _ends(argument, source, {})
                return int(draw(st.integers(int(low), int(high))))
            return int(draw(source))
        if argument.dtype == "bool":
            return int(draw(st.booleans()))
        return int(draw(st.sampled_from((1, 0, 2, 3, 4, 5, 8, 16, 31, 32, 33, 64))))

    def _float(self, draw: Draw, argument: Argument, sizes: Sizes) -> Number:
        source = self._source(argument, sizes)
        if isinstance(source, str):
            low, high = _ends(argument, source, _known(sizes))
            return float(draw(st.floats(float(low), float(high))))
        if source is not None:
            return float(draw(source))
        more = (float("inf"), float("nan")) if self._nonfinite else ()
        return float(draw(st.sampled_from((*_FLOAT_NUMBERS, *more))))

    # -- arrays ----------------------------------------------------------------------------------

    def _array(
        self, draw: Draw, argument: Argument, shape: Shape, dtype: Dtype, sizes: Sizes
    ) -> Recipe:
        fill = self._fill(draw, argument, shape, dtype, sizes)
        layout = draw(st.sampled_from(LAYOUTS[:2] if argument.mutable else LAYOUTS))
        axis = draw(st.integers(0, max(len(shape) - 1, 0)))
        if not shape or (layout == "transposed" and len(shape) < 2):
            layout = "contiguous"
        return Recipe(shape, dtype, fill, layout, axis)

    def _fill(
        self, draw: Draw, argument: Argument, shape: Shape, dtype: Dtype, sizes: Sizes
    ) -> Fill:
        source = self._source(argument, sizes)
        if isinstance(source, str):
            return self._ranged(draw, argument, source, shape, dtype, sizes)
        seed = draw(st.integers(0, 999))
        if source is not None:
            drawn = draw(st.lists(source, min_size=1, max_size=_DRAWN))
            return Fill("choice", seed, choices=tuple(drawn))
        if dtype.name == "float8_e8m0fnu":
            return Fill("choice", seed, choices=_POWERS)
        if dtype.kind == "b":
            return _one_of(draw, Fill("counting", 0, 0, 1), Fill("integers", seed, 0, 1))
        if dtype.kind in "iu":
            low = 0 if dtype.kind == "u" else -1
            wide = Fill("integers", seed, low * 128, 127 if low else 255)
            few = Fill("integers", seed, low * 9, 9)
            return _one_of(draw, Fill("counting"), few, wide)
        big, tiny = next((_EDGES[kind] for kind in _EDGES if kind in self._narrow), _USUAL_EDGES)
        edges: tuple[float, ...] = (0.0, -0.0, 1.0, -1.0, big, -big, tiny, -tiny)
        fills = [Fill("counting"), Fill("normal", seed), Fill("choice", seed, choices=edges)]
        if self._nonfinite:
            more = (float("inf"), float("-inf"), float("nan"))
            fills.append(Fill("choice", seed, choices=(*edges, *more)))
        return _one_of(draw, *fills)

    def _ranged(
        self, draw: Draw, argument: Argument, text: str, shape: Shape, dtype: Dtype, sizes: Sizes
    ) -> Fill:
        low, high = _ends(argument, text, _known(sizes))
        assume(high >= low or 0 in shape)
        seed = draw(st.integers(0, 999))
        if dtype.kind not in "iu":
            return Fill("uniform", seed, low, high)
        high = max(high, low)
        drawn = Fill("integers", seed, low, high)
        if high - low > _MOST_COUNT:
            return drawn
        return _one_of(draw, Fill("counting", 0, low, high), drawn)

    def _source(self, argument: Argument, sizes: Sizes) -> Any:
        """What the user says of an input, for the sizes of a call."""
        source = self._inputs.get(argument.name)
        if callable(source) and not isinstance(source, st.SearchStrategy):
            source = source(_known(sizes))
        return source


def _one_of(draw: Draw, *fills: Fill) -> Fill:
    chosen: Fill = draw(st.sampled_from(fills))
    return chosen


def declared_threads(op: Op) -> list[int]:
    """The threads of the threadgroups that the bodies of an op declare as numbers."""
    bodies = [body for body in op.implementations if isinstance(body, KernelBody)]
    axes = [axis.node for body in bodies for axis in body.threadgroup]
    return sorted({node[1] for node in axes if node[0] == "int" and node[1] > 1})


def _known(sizes: Sizes) -> dict[str, int]:
    return {**sizes.dims, **sizes.numbers}


def _ends(argument: Argument, text: str, known: Mapping[str, int]) -> tuple[Any, Any]:
    """The ends of a range such as ``"0..V-1"``.

    Raises:
        KernelError: it is none.
    """
    low, dots, high = text.partition("..")
    try:
        if not dots:
            raise ValueError("there is no '..'")
        return _end(low, known), _end(high, known)
    except (KeyError, ValueError) as error:
        raise KernelError(
            f"[fuzz] the range {text!r} of input {argument.name!r}: {error}; expected two "
            "numbers or expressions of the op's dims, such as 0..V-1."
        ) from None


def _end(text: str, known: Mapping[str, int]) -> int | float:
    try:
        return float(text) if any(c in text for c in ".e") else int(text)
    except ValueError:
        pass
    expression: Expression = parse(text)
    unknown = expression.names - set(known)
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))} is no dim of the op")
    return int(expression.evaluate(known))
