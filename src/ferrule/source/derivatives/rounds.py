"""Loops in reverse: each round runs again with names for its values, and is reversed; the last one
first, unless the order does not matter.

A round begins with what the forward loop had there: variables that grow by a constant are computed,
others kept on a tape. What a round needs is what its statements read from before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .activity import base, name_of, statements
from .counting import Counting
from .frames import Frame, Holder, Statements, Undo, flattened, undone
from .jumps import ENDS, RETURNS, leaves, straightened
from .liveness import assigned_in, expressions_of, pruned
from .nodes import (
    Assign,
    AtomicAdd,
    Block,
    Call,
    Declare,
    Element,
    Expression,
    Loop,
    Name,
    Statement,
    names_in,
)
from .restoring import Pass, Restoring, Reversing, name_of_declared, plain
from .uniform import rounds_agree


class Rounds(Reversing):
    """Reverses loops."""

    def run(self, body: Block) -> None:
        """Statements of the present frame."""
        raise NotImplementedError

    def undone_by(self, undo: Undo) -> None:
        """Say what reverses the present statement."""
        raise NotImplementedError

    def loop(self, s: Loop) -> None:
        """A loop."""
        if leaves(s.body, RETURNS):
            raise self.refused("a loop that returns", "break, and return behind it.")
        frame = self.frame
        if s.start and isinstance(s.start[0], Assign):
            start = s.start[0]
            frame.forward.append(start)
            self.now.pop(name_of(start.place), None)
            if start.operator == "=" and isinstance(start.place, Name) and self.stays(start.value):
                self.now[start.place.name] = start.value
            s = replace(s, start=())
        counting = Counting(self, self.tape, s)
        for name in assigned_in((s,)):  # in other rounds it holds other values
            self.now.pop(name, None)
        holder = Holder()
        frame.forward.append(holder)
        inner = Frame()
        fixed = self.fixed
        self.fixed = fixed | counting.fixed
        self.frames.append(inner)
        inner.own |= {d.variable.name for d in s.start if isinstance(d, Declare)}
        extremes = self._extremes_of(s)
        before, self.extremes = self.extremes, {**self.extremes, **extremes}
        alike, self.alike = self.alike, self.alike and rounds_agree(self.uniform, s)
        self.run(straightened(s.body, ENDS, self.refuse_at))
        self.alike = alike
        self.frames.pop()
        self.fixed, self.extremes = fixed, before
        for name, final in extremes.items():
            self.declare(Declare(s.line, final, Name(name, final.type), constant=True))
        changed = assigned_in((*s.update, *s.body))
        later = set().union(*frame.later)
        made = Pass(s, inner, holder, counting, frame.depth, later, changed, extremes)
        self.undone_by(lambda: self._reversed(made))

    def _extremes_of(self, s: Loop) -> dict[str, Name]:
        """By variable that a loop only lets be the largest, or least, of what arrays hold: a name
        for what it is behind the loop, which says in each round whether it was that one."""
        found: dict[str, Name] = {}
        for a in s.body:
            if not isinstance(a, Assign) or not isinstance(a.place, Name) or a.operator != "=":
                continue
            v = a.place
            if extreme_of(a) is None or v.type.lanes > 1:
                continue
            named = [n for x in statements(s.body) for e in expressions_of(x) for n in names_in(e)]
            if named.count(v.name) == 2 and v.name not in self.extremes:
                found[v.name] = Name(self.fresh(f"{v.name}_found"), v.type)
        return found

    # -- in reverse --------------------------------------------------------------------------------

    def _reversed(self, p: Pass) -> Statements:
        """Fill in the forward loop, and give what reverses it."""
        self.line = p.loop.line
        self.frames.append(p.inner)
        for name in sorted(p.changed & self.activity.names & self.variables.keys() - p.inner.own):
            variable = self.variables[name]
            if isinstance(variable, Name):
                self.adjoint(variable)
            else:
                self.adjoint_array(variable)
        back = undone(p.inner.undos)
        self.frames.pop()
        if not _acts(back):
            p.holder.inside.append(plain(p.loop))
            return []
        own = {name_of_declared(d) for d in p.inner.adjoints.values()}
        whole = (*p.inner.hoisted, *flattened(p.inner.forward), *p.inner.adjoints.values(), *back)
        made, live = pruned(whole, self.adjoint_names - own)
        self.line = p.loop.line
        return Restoring(self, p, made, live).made()


def extreme_of(s: Assign) -> Expression | None:
    """What a statement lets a variable be no less, or no more, than: ``m = max(m, x[i])``; None of
    others, and of what is computed, which need not have the same bits when it is computed again."""
    value = s.value
    if not isinstance(value, Call) or base(value.name) not in ("max", "min", "fmax", "fmin"):
        return None
    others = [a for a in value.arguments if a != s.place]
    if len(value.arguments) != 2 or len(others) != 1 or value.type != s.place.type:
        return None
    plain = others[0]
    while isinstance(plain, Call) and plain.cast:
        plain = plain.arguments[0]
    return others[0] if isinstance(plain, Element) and plain.array.space == "device" else None


def _acts(back: Iterable[Statement]) -> bool:
    """Whether reversed statements add to anything."""
    return any(isinstance(s, (Assign, AtomicAdd)) for s in statements(tuple(back)))
