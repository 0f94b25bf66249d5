"""Many checks in one kernel, and the comparisons that say what went wrong.

What costs is compiling, so a `Slots` puts any number of expressions into one body, an output row
each, and reports every row that is wrong. The references are written from what the Metal Shading
Language says, with NumPy, and never from the library under test.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

import ferrule
from ferrule.devices.cpu import program as cpu

bfloat16 = np.dtype(ml_dtypes.bfloat16)

# Metal's names of the types that an array may have.
KINDS: dict[str, np.dtype[Any]] = {
    "bool": np.dtype(np.bool_),
    "char": np.dtype(np.int8),
    "uchar": np.dtype(np.uint8),
    "short": np.dtype(np.int16),
    "ushort": np.dtype(np.uint16),
    "int": np.dtype(np.int32),
    "uint": np.dtype(np.uint32),
    "long": np.dtype(np.int64),
    "ulong": np.dtype(np.uint64),
    "half": np.dtype(np.float16),
    "bfloat": bfloat16,
    "float": np.dtype(np.float32),
}
FLOATS = ("half", "bfloat", "float")
INTS = ("char", "uchar", "short", "ushort", "int", "uint", "long", "ulong")

# Digits after the leading one, and the smallest exponent of a normal number.
_FORMAT = {"half": (10, -14), "bfloat": (7, -126), "float": (23, -126)}

Array = np.ndarray[Any, Any]


def run(
    source: str,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, tuple[Any, Sequence[int]]],
    grid: int | Sequence[int],
    threadgroup: int | Sequence[int],
    *,
    header: str = "",
    template: Sequence[tuple[str, Any]] | None = None,
    mode: str = "auto",
    name: str = "k",
    init_value: float | None = None,
    **flags: Any,
) -> dict[str, Array]:
    """One call of a kernel: `outputs` gives the Metal type or dtype, and the shape, of each."""

    def three(size: int | Sequence[int]) -> tuple[int, ...]:
        return (size, 1, 1) if isinstance(size, int) else tuple(size)

    kernel = ferrule.metal_kernel(
        name=name,
        input_names=list(inputs),
        output_names=list(outputs),
        source=source,
        header=header,
        **flags,
    )
    call: dict[str, Any] = {
        "inputs": list(inputs.values()),
        "grid": three(grid),
        "threadgroup": three(threadgroup),
        "output_shapes": [tuple(shape) for _, shape in outputs.values()],
        "output_dtypes": [KINDS[d] if isinstance(d, str) else d for d, _ in outputs.values()],
    }
    if template is not None:
        call["template"] = list(template)
    if init_value is not None:
        call["init_value"] = init_value
    with cpu.running(mode):
        return dict(zip(outputs, kernel(**call), strict=True))


def ulp_size(value: Array, kind: str) -> Array:
    """The distance of neighbouring numbers of a type at these (float64) values."""
    digits, least = _FORMAT[kind]
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = np.floor(np.log2(np.abs(value)))
    exponent = np.where(np.isfinite(exponent), exponent, least)
    return np.asarray(np.exp2(np.maximum(exponent, least) - digits))


def wrong(got: Array, want: Any, kind: str, ulp: float = 0, atol: float = 0) -> Array:
    """Where `got` is not `want`: bit for bit (any NaN is a NaN), or within a bound.

    Args:
        want: of the same dtype where `ulp` and `atol` are 0, else float64.
        ulp: how many distances of neighbouring numbers of type `kind` a value may be off.
        atol: what it may be off besides.
    """
    if kind not in FLOATS:
        return np.asarray(got != np.broadcast_to(np.asarray(want), got.shape))
    wide = got.astype(np.float64)
    if ulp == 0 and atol == 0:
        exact = np.broadcast_to(np.asarray(want).astype(got.dtype), got.shape)
        bits = f"u{got.dtype.itemsize}"
        differ = np.ascontiguousarray(got).view(bits) != np.ascontiguousarray(exact).view(bits)
        return np.asarray(differ & ~(np.isnan(wide) & np.isnan(exact.astype(np.float64))))
    target = np.broadcast_to(np.asarray(want, np.float64), got.shape)
    same = (wide == target) | (np.isnan(wide) & np.isnan(target))
    with np.errstate(invalid="ignore"):
        near = np.abs(wide - target) <= ulp * ulp_size(target, kind) + atol
    return np.asarray(~(same | near))


@dataclass
class Slot:
    kind: str
    text: str
    want: Any
    ulp: float
    atol: float
    statement: bool


@dataclass
class Slots:
    """A kernel of `n` threads in which every slot is one expression and what it must give.

    Attributes:
        inputs: arrays; a body reads element ``i`` of those of `n` elements by itself.
        prologue: statements at the start of the body, after ``uint i``.
        each: statements at the start of every slot, which may so change what they declare.
    """

    n: int = 1
    inputs: Mapping[str, Any] = field(default_factory=dict)
    header: str = ""
    prologue: str = ""
    each: str = ""
    threadgroup: int = 0
    flags: Mapping[str, Any] = field(default_factory=dict)
    slots: list[Slot] = field(default_factory=list)

    def expr(self, kind: str, text: str, want: Any, *, ulp: float = 0, atol: float = 0) -> None:
        """An expression of type `kind`, per thread; `want` broadcasts to `n` values."""
        self.slots.append(Slot(kind, text, want, ulp, atol, statement=False))

    def stmt(self, kind: str, text: str, want: Any, *, ulp: float = 0, atol: float = 0) -> None:
        """Statements in which ``OUT`` is the slot, as in ``float4 v = 1; OUT = v.x;``."""
        self.slots.append(Slot(kind, text, want, ulp, atol, statement=True))

    def _body(self, slots: Sequence[Slot]) -> tuple[str, dict[str, tuple[str, tuple[int, int]]]]:
        rows: dict[str, int] = {}
        lines = ["uint i = thread_position_in_grid.x;", self.prologue]
        for slot in slots:
            row = rows.setdefault(slot.kind, 0)
            rows[slot.kind] += 1
            place = f"o_{slot.kind}[{row * self.n} + i]"
            text = slot.text.replace("OUT", place) if slot.statement else f"{place} = {slot.text};"
            lines.append(f"{{ {self.each} {text} }}" if slot.statement or self.each else text)
        return "\n".join(lines), {f"o_{k}": (k, (rows[k], self.n)) for k in rows}

    def _run(self, slots: Sequence[Slot], mode: str) -> list[tuple[Slot, Array]]:
        body, outputs = self._body(slots)
        out = run(
            body,
            self.inputs,
            outputs,
            self.n,
            self.threadgroup or min(self.n, 64),
            header=self.header,
            mode=mode,
            **self.flags,
        )
        rows = {kind: iter(array) for kind, array in out.items()}
        return [(slot, next(rows[f"o_{slot.kind}"])) for slot in slots]

    def _results(self, slots: Sequence[Slot], mode: str) -> Iterable[tuple[Slot, Any]]:
        """Every slot's row, or the error of a slot that does not compile: that one alone."""
        try:
            return self._run(slots, mode)
        except ferrule.FerruleError as error:
            if len(slots) == 1:
                return [(slots[0], error)]
            half = len(slots) // 2
            return [*self._results(slots[:half], mode), *self._results(slots[half:], mode)]

    def check(self, mode: str = "auto") -> None:
        """Run it, and assert every slot."""
        assert self.slots, "nothing to check"
        complaints = []
        for slot, got in self._results(self.slots, mode):
            if isinstance(got, Exception):
                complaints.append(f"{slot.text}\n    does not run: {str(got)[:600]}")
                continue
            bad = np.flatnonzero(wrong(got, slot.want, slot.kind, slot.ulp, slot.atol))
            if bad.size:
                want = np.broadcast_to(np.asarray(slot.want), got.shape)
                shown = ", ".join(f"[{j}] {got[j]!r} for {want[j]!r}" for j in bad[:4])
                complaints.append(f"{slot.text}\n    {bad.size} of {self.n} wrong: {shown}")
        assert not complaints, f"{len(complaints)} wrong:\n" + "\n".join(complaints)
