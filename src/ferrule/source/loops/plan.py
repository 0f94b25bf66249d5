"""Which jumps some lanes make before others: planned, and learnt from what is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..cpp import NotSplittable

# The jumps that some lanes make before others: each kind, with where the loop starts that it is of.
Plan = frozenset[tuple[str, int]]

Text = TypeVar("Text")


class NotPlanned(Exception):
    """A mask is needed that was not planned; the plan that has it."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.plan = plan


def require(plan: Plan, kind: str, loop: int = 0) -> None:
    """Stop writing where no mask is planned for a jump.

    Raises:
        NotPlanned: with the plan that has one.
    """
    if (kind, loop) not in plan:
        raise NotPlanned(plan | {(kind, loop)})


def planned(write: Callable[[Plan], Text]) -> Text:
    """What is written by a plan that has all masks which turn out to be needed.

    Raises:
        NotSplittable: the control flow does not allow it.
    """
    plan = Plan()
    for _ in range(200):
        try:
            return write(plan)
        except NotPlanned as more:
            plan = more.plan
    raise NotSplittable("the control flow is too deep")
