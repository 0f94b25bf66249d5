"""Sizes that torch does not know while it traces: how rules compare them; what must be known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from ...errors import KernelError
from ...operators.bodies import KernelBody
from ...operators.op import Op
from ...operators.unit_steps import CudaUnit
from ...rules.expression import Expression, Ints
from ...rules.rule import Binding


def hint(size: Any) -> Any:
    """The number that a symbolic size or number has for now, where it has one."""
    known = size.node.hint if isinstance(size, torch.SymInt) else size
    return size if known is None else known


def in_numbers(value: Any) -> Any:
    """A tensor like another, of sizes that `hint` knows; what is no tensor as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.new_empty(tuple(map(hint, value.shape)))


class SymInts(Ints):
    """Arithmetic on symbolic sizes that adds no guard."""

    minimum = staticmethod(torch.sym_min)
    maximum = staticmethod(torch.sym_max)

    @staticmethod
    def holds(condition: Any) -> bool:
        """Whether a rule's condition holds; one that is not known becomes an assertion."""
        if isinstance(condition, torch.SymBool):
            from torch.fx.experimental.symbolic_shapes import expect_true

            return bool(expect_true(condition))
        return bool(condition)

    @staticmethod
    def broadcast(a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """The shape that two broadcast to. Sizes that are the same, 1, or alone in their place add
        no guard; others are broadcast as by torch's own operators: what may be 1 is guarded, and of
        sizes that only running tells it is asserted that they are the same."""
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        if all(type(size) is int for size in (*a, *b)):
            return Ints.broadcast(a, b)
        short, long = sorted((a, b), key=len)
        alone = len(long) - len(short)
        sizes = list(long[:alone])
        for m, n in zip(short, long[alone:], strict=True):
            if (type(m) is int and m == 1) or statically_known_true(m == n):
                sizes.append(n)
            elif type(n) is int and n == 1:
                sizes.append(m)
            else:
                sizes += torch.broadcast_shapes((m,), (n,))
        return tuple(sizes)

    @staticmethod
    def choose(condition: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """``then()`` where the condition holds, else ``otherwise()``."""
        if not isinstance(condition, torch.SymBool):
            return then() if condition else otherwise()
        first, second = then(), otherwise()
        # The bounds say again what torch cannot see of the sum, as that it is no less than 0.
        holds = _one_if(condition)
        chosen = torch.sym_min(second + holds * (first - second), torch.sym_max(first, second))
        return torch.sym_max(chosen, torch.sym_min(first, second))

    @staticmethod
    def bucket(n: Any, sizes: Sequence[int]) -> Any:
        """The first of ascending sizes that is no less than n, the last where there is none."""
        if not isinstance(n, torch.SymInt):
            return Ints.bucket(n, sizes)
        return sizes[0] + sum((more - size) * _one_if(n > size) for size, more in pairwise(sizes))

    @staticmethod
    def next_pow2(n: Any) -> Any:
        """The least power of 2 that is no less than n, which is an int64."""
        if not isinstance(n, torch.SymInt):
            return Ints.next_pow2(n)
        return SymInts.bucket(n, [2**k for k in range(64)])

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


def _one_if(condition: Any) -> Any:
    """1 or 0. Of two numbers alone: torch writes a number that it knows as an int, and sym_ite
    wants two of one type."""
    if not isinstance(condition, torch.SymBool):
        return int(condition)
    wrap = condition.node.wrap_int
    return torch.sym_ite(condition, torch.SymInt(wrap(1)), torch.SymInt(wrap(0)))


def refuse_dynamic_templates(op: Op, binding: Binding) -> None:
    """Refuse a graph for many sizes that would need a kernel for each of them.

    Raises:
        KernelError: that is so; names the template parameter and the dynamic sizes.
    """
    for body in op.implementations:
        if not isinstance(body, (KernelBody, CudaUnit)):
            continue
        for name, expression in body.template:
            if isinstance(expression, Expression):
                value = op.rule.value(op.name, expression, binding, SymInts)
                if fixed(value) is None:
                    raise KernelError(dynamic_template(op, body, name, expression, binding))


def dynamic_template(
    op: Op, body: KernelBody | CudaUnit, name: str, expression: Expression, binding: Binding
) -> str:
    """The error for a template parameter that depends on a dynamic size."""
    sizes = expression.names | expression.attributes
    values = binding.values(expression).items()
    dynamic = ", ".join(n for n, value in values if n in sizes and fixed(value) is None)
    return (
        f"[op] op {op.name!r}: the template parameter {name!r} of its {body.kind} body is "
        f"{expression}, and {dynamic} is dynamic in this export, so that each size would need a "
        f"kernel of its own. Export with a fixed {dynamic}; or leave {name!r} out of `template`, "
        "and read the dim in the body, where it costs no compilation."
    )


def fixed(value: Any) -> int | None:
    """The value of a size that is the same in every call of a graph; None where it may change."""
    if isinstance(value, torch.SymBool):
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        is_true = statically_known_true(value)
        return int(is_true) if is_true or statically_known_true(torch.sym_not(value)) else None
    if isinstance(value, torch.SymInt):
        number = value.node.maybe_as_int()
        if number is not None:
            return int(number)
        bounds = value.node.shape_env.bound_sympy(value.node.expr)
        return int(bounds.lower) if bounds.lower == bounds.upper else None
    return int(value)
