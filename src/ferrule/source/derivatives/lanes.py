"""Operations among the lanes of a simdgroup, transposed: where cotangents go.

Lanes that are not there count as zero: what crosses lanes goes through sums, or is asked for of
lanes that the operation itself has read.
"""

from __future__ import annotations

from collections.abc import Sequence

from .frames import Frames, Statements
from .nodes import (
    BOOL,
    INT,
    UINT,
    Assign,
    Binary,
    Call,
    Choice,
    Declare,
    Expression,
    Literal,
    Loop,
    Name,
    Unary,
    of,
)
from .partials import add, equal, less, sub, zero_of

WIDTHS = {"simd": 32, "quad": 4}


class Transposed:
    """Transposes operations of one width.

    Args:
        frames: makes names.
        width: ``"simd"`` or ``"quad"``.
        out: the statements that are being made.
    """

    def __init__(self, frames: Frames, width: str, out: Statements) -> None:
        self._frames, self._width, self._out = frames, width, out
        self._lane = Name(f"thread_index_in_{width}group", UINT)
        self._lanes = Literal(f"{WIDTHS[width]}u", UINT)

    def of(self, name: str, rest: Sequence[Expression], c: Expression, alike: bool) -> Expression:
        """The cotangent of the first argument.

        Args:
            name: without its width; one of those that `knows`.
            rest: the other arguments.
            c: the cotangent of the result.
            alike: the other arguments are the same for all lanes.
        """
        c = self._frames.shared(c, self._out)
        if not alike:
            return self._of_shuffle(c, self._source(name, rest[0]))
        made: Expression = getattr(self, f"_of_{name}")(c, *rest)
        return made

    def _source(self, name: str, by: Expression) -> Expression:
        """The lane that a lane reads."""
        lane = self._lane
        ahead, behind = add(lane, by), sub(lane, by)
        if name == "shuffle_xor":
            return Binary("^", lane, by, UINT)
        if name == "shuffle_down":
            return Choice(less(ahead, self._lanes), ahead, lane, UINT)
        if name == "shuffle_up":
            return Choice(less(lane, by), lane, behind, UINT)
        if name == "shuffle_rotate_down":
            return self._around(ahead)
        if name == "shuffle_rotate_up":
            return self._around(sub(add(lane, self._lanes), by))
        return by

    @classmethod
    def knows(cls, name: str) -> bool:
        """Whether an operation has a transpose here."""
        return hasattr(cls, f"_of_{name}")

    def sum(self, e: Expression) -> Expression:
        """The sum of a value over all lanes, as a variable."""
        return self._call("sum", e)

    def _call(self, name: str, e: Expression, *rest: Expression) -> Expression:
        call = Call(f"{self._width}_{name}", (e, *rest), e.type)
        return self._named(call)

    def _named(self, e: Expression) -> Expression:
        variable = Name(self._frames.fresh("fr_cotangent"), e.type)
        self._out.append(Declare(self._frames.line, variable, e, constant=True))
        return variable

    def _where(self, condition: Expression, yes: Expression) -> Expression:
        zero = zero_of(yes.type)
        return Choice(condition, yes, zero, yes.type)

    # -- each operation ----------------------------------------------------------------------------

    def _of_sum(self, c: Expression) -> Expression:
        return self.sum(c)

    def _of_prefix_inclusive_sum(self, c: Expression) -> Expression:
        return sub(self.sum(c), self._call("prefix_exclusive_sum", c))

    def _of_prefix_exclusive_sum(self, c: Expression) -> Expression:
        return sub(self.sum(c), self._call("prefix_inclusive_sum", c))

    def _of_broadcast(self, c: Expression, lane: Expression) -> Expression:
        return self._where(equal(self._lane, Call("uint", (lane,), UINT)), self.sum(c))

    def _of_broadcast_first(self, c: Expression) -> Expression:
        first = Call(f"{self._width}_is_first", (), BOOL)
        return self._where(first, self.sum(c))

    def _of_shuffle(self, c: Expression, lane: Expression) -> Expression:
        """Each lane looks through what all have read."""
        f, out = self._frames, self._out
        total = Name(f.fresh("fr_cotangent"), c.type)
        zero = zero_of(c.type)
        out.append(Declare(f.line, total, zero))
        k = Name(f.fresh("fr_lane"), UINT)
        mine = equal(self._lane, k)
        one = Binary("+", Call("int", (lane,), INT), Literal("1", INT), INT)
        read = Call(f"{self._width}_sum", (Choice(mine, one, Literal("0", INT), INT),), INT)
        given = Call(f"{self._width}_sum", (Choice(mine, c, zero, c.type),), c.type)
        names = [Name(f.fresh("fr_read"), INT), Name(f.fresh("fr_cotangent"), c.type)]
        here = equal(names[0], Binary("+", Call("int", (self._lane,), INT), Literal("1", INT), INT))
        body = (
            Declare(f.line, names[0], read, constant=True),
            Declare(f.line, names[1], given, constant=True),
            Assign(f.line, total, "+=", self._where(here, names[1])),
        )
        start = (Declare(f.line, k, Literal("0", INT)),)
        update = (Assign(f.line, k, "+=", Literal("1", INT)),)
        out.append(Loop(f.line, "for", start, less(k, self._lanes), update, body))
        return total

    def _of_shuffle_xor(self, c: Expression, mask: Expression) -> Expression:
        return self._got(c, "shuffle_xor", mask, Binary("^", self._lane, mask, UINT))

    def _of_shuffle_down(self, c: Expression, by: Expression) -> Expression:
        """A lane has read the one ``by`` behind it, or itself where there is none."""
        got = self._got(c, "shuffle_up", by, sub(self._lane, by))
        itself = Binary(">=", add(self._lane, by), self._lanes, BOOL)
        return add(got, self._where(itself, c))

    def _of_shuffle_up(self, c: Expression, by: Expression) -> Expression:
        """A lane has read the one ``by`` in front of it, or itself where there is none."""
        got = self._got(c, "shuffle_down", by, add(self._lane, by))
        return add(got, self._where(less(self._lane, by), c))

    def _of_shuffle_rotate_up(self, c: Expression, by: Expression) -> Expression:
        return self._got(c, "shuffle_rotate_down", by, self._around(add(self._lane, by)))

    def _of_shuffle_rotate_down(self, c: Expression, by: Expression) -> Expression:
        back = sub(add(self._lane, self._lanes), by)
        return self._got(c, "shuffle_rotate_up", by, self._around(back))

    def of_filling(self, up: bool, by: Expression, c: Expression) -> tuple[Expression, Expression]:
        """The cotangents of both values of a shuffle that fills: 32 lanes of each, side by side."""
        c = self._frames.shared(c, self._out)
        if up:
            turned = self._of_shuffle_rotate_up(c, by)
            own: Expression = less(add(self._lane, by), self._lanes)
        else:
            turned = self._of_shuffle_rotate_down(c, by)
            own = Binary("<=", by, self._lane, BOOL)
        turned = self._named(turned)
        return self._where(own, turned), self._where(Unary("!", own, BOOL), turned)

    def _around(self, lane: Expression) -> Expression:
        return Binary("%", lane, self._lanes, UINT)

    def _got(self, c: Expression, name: str, by: Expression, lane: Expression) -> Expression:
        """What a lane has, where there is one of this number that takes part."""
        other = self._call(name, c, by)
        kind = of("ulong")
        mask = Call(
            "ulong", (Call(f"{self._width}_active_threads_mask", (), kind),), kind, cast=True
        )
        within = Binary("&", lane, Literal("31", INT), UINT)
        bit = Binary("&", Binary(">>", mask, within, kind), Literal("1", INT), kind)
        there = self._named(equal(bit, Literal("1", INT)))
        return self._where(Binary("&&", less(lane, self._lanes), there, BOOL), other)
