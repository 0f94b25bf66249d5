"""How the inputs of a call are made: as arrays, and as the Python text that makes the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...dtypes import Dtype

Values = np.ndarray[Any, Any]
Number = int | float | bool
Shape = tuple[int, ...]

LAYOUTS = ("contiguous", "offset", "step", "reversed", "transposed", "broadcast")
_LONGEST_LITERAL = 64  # elements that are written out


@dataclass(frozen=True)
class Fill:
    """What the elements of an array are.

    Attributes:
        kind: ``"counting"`` goes through the integers from ``low`` to ``high`` again and again,
            ``"integers"`` and ``"uniform"`` draw from them, ``"choice"`` from ``choices``;
            ``"normal"`` is the standard normal distribution.
        seed: of what is drawn.
        low, high: both included.
        choices: numbers.
    """

    kind: str
    seed: int = 0
    low: float = 1
    high: float = 7
    choices: tuple[Number, ...] = ()

    def values(self, shape: Shape) -> Values:
        """The elements of an array of a shape."""
        rng = np.random.default_rng(self.seed)
        if self.kind == "counting":
            return np.resize(np.arange(self.low, self.high + 1), shape)
        if self.kind == "integers":
            return np.asarray(rng.integers(int(self.low), int(self.high), shape, endpoint=True))
        if self.kind == "uniform":
            return np.asarray(rng.uniform(self.low, self.high, shape))
        if self.kind == "choice":
            return np.asarray(rng.choice(self.choices, shape))
        return np.asarray(rng.standard_normal(shape))

    def text(self, shape: Shape) -> str:
        """The same as Python text."""
        if self.kind == "counting":
            return f"np.resize(np.arange({self.low}, {self.high + 1}), {shape})"
        rng = f"np.random.default_rng({self.seed})"
        if self.kind == "integers":
            return f"{rng}.integers({int(self.low)}, {int(self.high)}, {shape}, endpoint=True)"
        if self.kind == "uniform":
            return f"{rng}.uniform({self.low}, {self.high}, {shape})"
        if self.kind == "choice":
            return f"{rng}.choice({literal(self.choices)}, {shape})"
        return f"{rng}.standard_normal({shape})"


@dataclass(frozen=True)
class Recipe:
    """An array that can be made again and again.

    Attributes:
        shape, dtype: its own.
        fill: its elements.
        layout: one of `LAYOUTS`: how it lies in a larger or smaller one.
        axis: along which, for a step, a reversal or a broadcast.
    """

    shape: Shape
    dtype: Dtype
    fill: Fill
    layout: str = "contiguous"
    axis: int = 0

    def array(self) -> Values:
        """A new array."""
        base: Values = self._base()
        if self.layout == "offset":
            return np.asarray(base[1:])
        if self.layout == "transposed":
            return np.asarray(base.T)
        if self.layout == "broadcast":
            return np.broadcast_to(base, self.shape)
        if self.layout in ("step", "reversed"):
            step = slice(None, None, 2 if self.layout == "step" else -1)
            return np.asarray(base[(slice(None),) * self.axis + (step,)])
        return base

    def text(self) -> str:
        """Python text that makes the same array; needs ``np``, and ``ml_dtypes`` for bfloat16 and
        8-bit floats."""
        texts = [self._constructed()]
        if math.prod(self._base_shape()) <= _LONGEST_LITERAL:
            texts += self._written()
        base = min(texts, key=len)
        colons = ":, " * self.axis
        return {
            "contiguous": base,
            "offset": f"{base}[1:]",
            "step": f"{base}[{colons}::2]",
            "reversed": f"{base}[{colons}::-1]",
            "transposed": f"{base}.T",
            "broadcast": f"np.broadcast_to({base}, {self.shape})",
        }[self.layout]

    def _base_shape(self) -> Shape:
        """The shape of the array of which this is a view."""
        if self.layout == "transposed":
            return self.shape[::-1]
        axis = 0 if self.layout == "offset" else self.axis
        sizes = list(self.shape)
        if axis < len(sizes):
            size = sizes[axis]
            sizes[axis] = {"offset": size + 1, "step": 2 * size, "broadcast": 1}.get(
                self.layout, size
            )
        return tuple(sizes)

    def _base(self) -> Values:
        values = self.fill.values(self._base_shape())
        with np.errstate(all="ignore"):
            if self.dtype.kind == "c":
                values = values * (1 - 2j)
            if self._rounded:
                values = values.astype(np.int64)
            return values.astype(self.dtype.numpy)

    @property
    def _rounded(self) -> bool:
        """Whether floats are made integers first: what becomes of others differs."""
        return self.dtype.kind in "bui" and self.fill.kind in ("uniform", "normal", "choice")

    def _constructed(self) -> str:
        text = self.fill.text(self._base_shape())
        if self.dtype.kind == "c":
            text = f"({text} * (1 - 2j))"
        if self._rounded:
            text = f"{text}.astype(np.int64)"
        elif not self._base_shape():
            text = f"np.asarray({text})"
        return f"{text}.astype({dtype_text(self.dtype)})"

    def _written(self) -> list[str]:
        """Texts that have the elements themselves."""
        values, dtype = self._base(), dtype_text(self.dtype)
        plain = values
        if self.dtype.kind == "f":  # with no more digits than the dtype has
            plain = np.array([float(str(v)) for v in values.flat]).reshape(values.shape)
        if not values.size:
            return [f"np.zeros({values.shape}, {dtype})"]
        first = plain.flat[0].item()
        texts = [f"np.array({literal(plain.tolist())}, {dtype})"]
        if values.size > 1 and (plain == first).all() and not _is_negative_zero(plain):
            texts.append(f"np.full({values.shape}, {literal(first)}, {dtype})")
            if first in (0, 1):
                name = "ones" if first else "zeros"
                texts.append(f"np.{name}({values.shape}, {dtype})")
        return texts


def _is_negative_zero(values: Values) -> bool:
    return bool(np.signbit(values.real).any()) and not values.any()


def dtype_text(dtype: Dtype) -> str:
    """A dtype as Python text: ``np.float32``, ``ml_dtypes.bfloat16``."""
    if dtype.numpy.type.__module__ == "numpy":
        return "np.bool_" if dtype.kind == "b" else f"np.{dtype.name}"
    return f"ml_dtypes.{dtype.name}"


def literal(value: Any) -> str:
    """A number, or a nested list of them, as Python text that knows ``np``."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return "np.nan" if math.isnan(value) else "np.inf" if value > 0 else "-np.inf"
    if isinstance(value, complex) and not (math.isfinite(value.real) and math.isfinite(value.imag)):
        return f"complex({literal(value.real)}, {literal(value.imag)})"
    return repr(value)


@dataclass(frozen=True)
class Call:
    """A call of an op.

    Attributes:
        names: of its inputs.
        inputs: a recipe of an array, a number, or None.
        threadgroup: in place of the one that the op declares; None: the declared one.
    """

    names: tuple[str, ...]
    inputs: tuple[Recipe | Number | None, ...]
    threadgroup: int | None = None

    def values(self) -> list[Any]:
        """New inputs."""
        return [value.array() if isinstance(value, Recipe) else value for value in self.inputs]

    def lines(self) -> list[str]:
        """Python text that makes the inputs, a line for each."""
        return [
            f"{name} = {value.text() if isinstance(value, Recipe) else literal(value)}"
            for name, value in zip(self.names, self.inputs, strict=True)
        ]

    def perturbed(self, relative: Sequence[float], seed: int) -> list[Any]:
        """The inputs, each float of an array changed a little.

        Args:
            relative: by how much, for each input.
            seed: of the signs.
        """
        rng, changed = np.random.default_rng(seed), []
        for value, by in zip(self.values(), relative, strict=True):
            if by and isinstance(value, np.ndarray):
                with np.errstate(all="ignore"):
                    wide = np.complex128 if value.dtype.kind == "c" else np.float64
                    factors = 1 + by * rng.choice([-1.0, 1.0], value.shape)
                    value = np.asarray(value.astype(wide) * factors).astype(value.dtype)
            changed.append(value)
        return changed
