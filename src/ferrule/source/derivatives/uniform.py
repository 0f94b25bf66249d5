"""What is the same for all lanes of a simdgroup."""

from __future__ import annotations

from collections.abc import Sequence

from .activity import base, name_of
from .jumps import ENDS, leaves
from .nodes import (
    Assign,
    Binary,
    Block,
    Call,
    Declare,
    Element,
    Expression,
    If,
    Lanes,
    Loop,
    Name,
    Statement,
    constant,
    operands,
    root,
)

_VARIES = frozenset({
    "thread_position_in_grid", "thread_position_in_threadgroup", "thread_index_in_threadgroup",
    "thread_index_in_simdgroup", "thread_index_in_quadgroup", "quadgroup_index_in_threadgroup",
})  # fmt: skip
_AGREES = frozenset({
    "simd_sum", "simd_product", "simd_max", "simd_min", "simd_broadcast", "simd_broadcast_first",
    "simd_all", "simd_any", "simd_ballot",
})  # fmt: skip


class Uniform:
    """Looks at a body once.

    Args:
        body: as it was read.
        threadgroup: the sizes of threadgroups, as far as they are known.
    """

    def __init__(self, body: Block, threadgroup: Sequence[Expression | None]) -> None:
        width = threadgroup[0]
        size = None if width is None else constant(width)
        self._rows = size is not None and size % 32 == 0
        self._varying: set[str] = set()
        self._first: dict[str, Expression] = {}
        before = -1
        while before != len(self._varying):
            before = len(self._varying)
            self._block(body, False)

    def of(self, e: Expression) -> bool:
        """Whether an expression is."""
        if isinstance(e, Name):
            return e.name not in _VARIES and e.name not in self._varying
        if isinstance(e, Lanes) and isinstance(e.of, Name) and e.of.name in _VARIES:
            return self._rows and e.letters in ("y", "z", "yz")
        if isinstance(e, Binary) and e.operator in ("/", ">>") and self._rows:
            least = 32 if e.operator == "/" else 5
            number = constant(e.right)
            if number is not None and self._counts(e.left):
                return number >= least and (e.operator == ">>" or number % 32 == 0)
        if isinstance(e, Call) and base(e.name).startswith(("simd_", "quad_")):
            return base(e.name) in _AGREES
        if isinstance(e, Element) and e.array.name in self._varying:
            return False
        return all(map(self.of, operands(e)))

    def _counts(self, e: Expression) -> bool:
        """Whether an expression counts threads along x."""
        while isinstance(e, Name) and e.name in self._first:
            e = self._first[e.name]
        return isinstance(e, Lanes) and isinstance(e.of, Name) and e.letters == "x" and (
            e.of.name in ("thread_position_in_grid", "thread_position_in_threadgroup")
        )  # fmt: skip

    def _block(self, body: Block, varies: bool) -> None:
        for s in body:
            self._statement(s, varies)

    def _statement(self, s: Statement, varies: bool) -> None:
        if isinstance(s, Declare):
            if s.value is not None:
                self._first.setdefault(s.variable.name, s.value)
                if varies or not self.of(s.value):
                    self._varying.add(s.variable.name)
        elif isinstance(s, Assign):
            self._first.pop(name_of(s.place), None)
            inner = root(s.place)
            indices: tuple[Expression, ...] = ()
            if isinstance(inner, Element):
                indices = inner.indices
                if inner.array.space != "thread":
                    return
            if varies or not all(map(self.of, (s.value, *indices))):
                self._varying.add(name_of(s.place))
        elif isinstance(s, If):
            varies |= not self.of(s.condition)
            self._block(s.yes, varies)
            self._block(s.no, varies)
        elif isinstance(s, Loop):
            self._block(s.start, varies)
            varies |= s.condition is not None and not self.of(s.condition)
            varies |= _leaves_where(s.body, self)
            self._block((*s.body, *s.update), varies)


def _leaves_where(body: Block, uniform: Uniform) -> bool:
    """Whether some lanes may leave a round, and others not."""
    return any(
        isinstance(s, If) and leaves((s,), ENDS)
        and (not uniform.of(s.condition) or _leaves_where((*s.yes, *s.no), uniform))
        for s in body
    )  # fmt: skip


def rounds_agree(uniform: Uniform, loop: Loop) -> bool:
    """Whether all lanes of a simdgroup make the same rounds of a loop."""
    holds = loop.condition is None or uniform.of(loop.condition)
    return holds and not _leaves_where(loop.body, uniform)
