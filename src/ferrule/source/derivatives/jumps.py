"""Statements without jumps: what follows one that may leave is in the branch that does not."""

from __future__ import annotations

from collections.abc import Callable, Collection

from ...errors import DialectError
from .nodes import Assign, Block, If, Jump, Loop, Name, Statement, branch

RETURNS = frozenset({"return"})
ENDS = frozenset({"break", "continue"})  # of a round
Refuse = Callable[[int, str, str], DialectError]


def straightened(
    body: Block, kinds: Collection[str], refuse: Refuse, result: Name | None = None
) -> Block:
    """Statements without jumps of some kinds.

    Args:
        body: what may leave.
        kinds: `RETURNS` or `ENDS`.
        refuse: makes the error for a line, what it has, and what to write instead.
        result: the variable for what is returned.

    Raises:
        DialectError: a loop in it returns, or branches leave that do not do so at their end.
    """
    out: list[Statement] = []
    for i, s in enumerate(body):
        if isinstance(s, Jump) and s.kind in kinds:
            if result is not None and s.value is not None:
                out.append(Assign(s.line, result, "=", s.value))
            return tuple(out)
        if isinstance(s, Loop) and "return" in kinds and leaves(s.body, kinds):
            raise refuse(s.line, "a loop that returns", "break, and return behind it.")
        if isinstance(s, If) and leaves((s,), kinds):
            rest = body[i + 1 :]
            if rest and not always_leaves(s.yes, kinds) and not always_leaves(s.no, kinds):
                raise refuse(s.line, "a branch that may leave", "leave at its end.")
            yes = straightened((*s.yes, *rest), kinds, refuse, result)
            no = straightened((*s.no, *rest), kinds, refuse, result)
            out.append(branch(s.line, s.condition, yes, no))
            return tuple(out)
        out.append(s)
    return tuple(out)


def leaves(body: Block, kinds: Collection[str] = RETURNS) -> bool:
    """Whether statements may leave what they are in."""
    for s in body:
        if isinstance(s, Jump) and s.kind in kinds:
            return True
        if isinstance(s, If) and (leaves(s.yes, kinds) or leaves(s.no, kinds)):
            return True
        if isinstance(s, Loop) and "return" in kinds and leaves(s.body, kinds):
            return True
    return False


def always_leaves(body: Block, kinds: Collection[str] = RETURNS) -> bool:
    """Whether statements leave at their end, whatever branches they take."""
    last = body[-1] if body else None
    if isinstance(last, If):
        return always_leaves(last.yes, kinds) and always_leaves(last.no, kinds)
    return isinstance(last, Jump) and last.kind in kinds
