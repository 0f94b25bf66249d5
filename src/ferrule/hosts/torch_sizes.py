"""Sizes that torch does not know while it traces: how rules compare them; what must be known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..cuda_steps import CudaUnit
from ..errors import KernelError
from ..expression import Expression, Ints
from ..implementation import KernelBody
from ..op_declaration import Op
from ..rule import Binding


class SymInts(Ints):
    """How symbolic sizes are compared and chosen from, without a guard."""

    minimum = staticmethod(torch.sym_min)
    maximum = staticmethod(torch.sym_max)

    @staticmethod
    def holds(condition: Any) -> bool:
        """Whether what a rule states is so; what is not known becomes an assertion."""
        if isinstance(condition, torch.SymBool):
            from torch.fx.experimental.symbolic_shapes import expect_true

            return bool(expect_true(condition))
        return bool(condition)

    @staticmethod
    def choose(condition: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """``then()`` where the condition holds, else ``otherwise()``."""
        if not isinstance(condition, torch.SymBool):
            return then() if condition else otherwise()
        one, other = then(), otherwise()
        # Of two numbers alone: torch writes a number that it knows as an int, and sym_ite wants two
        # of one type. The bounds say again what torch cannot see of the sum, as that it is no less
        # than 0.
        wrap = condition.node.wrap_int
        holds = torch.sym_ite(condition, torch.SymInt(wrap(1)), torch.SymInt(wrap(0)))
        found = torch.sym_min(other + holds * (one - other), torch.sym_max(one, other))
        return torch.sym_max(found, torch.sym_min(one, other))

    @staticmethod
    def both(a: Any, b: Callable[[], Any]) -> Any:
        """``a and b()``."""
        if not isinstance(a, torch.SymBool):
            return b() if a else False
        return a & b()

    @staticmethod
    def either(a: Any, b: Callable[[], Any]) -> Any:
        """``a or b()``."""
        if not isinstance(a, torch.SymBool):
            return True if a else b()
        return a | b()

    @staticmethod
    def negated(a: Any) -> Any:
        """``not a``."""
        return torch.sym_not(a)


def refuse_dynamic_templates(op: Op, said: Binding) -> None:
    """Refuse a graph for many sizes that would need a kernel for each of them.

    Raises:
        KernelError: that is so; names the template parameter and the dynamic sizes.
    """
    for body in op.implementations:
        if not isinstance(body, (KernelBody, CudaUnit)):
            continue
        for name, one in body.template:
            if isinstance(one, Expression):
                value = op.rule.value(op.name, one, said, SymInts)
                if fixed(value) is None:
                    raise KernelError(dynamic_template(op, body, name, one, said))


def dynamic_template(
    op: Op, body: KernelBody | CudaUnit, name: str, one: Expression, said: Binding
) -> str:
    """The error for a template parameter that depends on a dynamic size."""
    sizes = {size: value for size, value in said.values(one).items() if fixed(value) is None}
    read = ", ".join(size for size in sizes if size in one.names | one.attributes)
    return (
        f"[op] op {op.name!r}: the template parameter {name!r} of its {body.kind} body is {one}, "
        f"and {read} is dynamic in this export, so that each size would need a kernel of its own. "
        f"Export with a fixed {read}; or leave {name!r} out of `template`, and read the dim in the "
        "body, where it costs no compilation."
    )


def fixed(value: Any) -> int | None:
    """The value of a size that is the same in every call of a graph; None where it may change."""
    if isinstance(value, torch.SymBool):
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        known = statically_known_true(value)
        return int(known) if known or statically_known_true(torch.sym_not(value)) else None
    if isinstance(value, torch.SymInt):
        known = value.node.maybe_as_int()
        if known is not None:
            return int(known)
        bounds = value.node.shape_env.bound_sympy(value.node.expr)
        return int(bounds.lower) if bounds.lower == bounds.upper else None
    return int(value)
