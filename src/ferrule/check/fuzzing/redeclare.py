"""Ops with another threadgroup than their authors declared."""

from __future__ import annotations

import re
from typing import Any

from ...errors import KernelError
from ...operators.bodies import KernelBody
from ...operators.op import Op

_SIZES = re.compile(
    r"\b(threads_per_threadgroup|threadgroups_per_grid|simdgroups_per_threadgroup)\b"
)
_SMALLEST = 32


def with_threadgroup(op: Op, threads: int) -> Op:
    """The Metal bodies of an op, with another number of threads per threadgroup along x.

    Where the grid is declared with the number that the threadgroup has, as in ``"rows * 256"``,
    it has the other number, too.

    Args:
        op: an op with a Metal body.
        threads: along x.

    Raises:
        KernelError: a threadgroup is declared as an expression, or has threads along y or z.
    """
    data: dict[str, Any] = op.using("metal").to_json()
    for body in data["implementations"]:
        declared = _along_x(body["threadgroup"])
        if declared is None:
            raise KernelError(
                f"[op] op {op.name!r} is launched with another threadgroup where all bodies "
                f"declare one as a number of threads along x; one has {body['threadgroup']}."
            )
        body["threadgroup"] = [["int", threads], ["int", 1], ["int", 1]]
        body["grid"] = _replaced(body["grid"], declared, threads)
    return Op.from_json({**data, "rules": {}})


def other_threadgroups(op: Op) -> tuple[int, ...]:
    """The threadgroups with which an op must give the same.

    That is so where all of its Metal bodies ask how large their threadgroup is, and none names the
    number that is declared: they are halves of that, quarters and so on, and no less than a
    simdgroup.
    """
    smallest: list[int] = []
    for body in op.implementations:
        if not isinstance(body, KernelBody) or body.kind != "metal":
            continue
        declared = _along_x(body.to_json()["threadgroup"])
        text = f"{body.kernel.header}\n{body.kernel.source}"
        if declared is None or not _SIZES.search(body.kernel.source):
            return ()
        if re.search(rf"\b{declared}[uUlL]*\b", text) or body.template:
            return ()
        smallest.append(declared)
    if not smallest or min(smallest) & (min(smallest) - 1):
        return ()
    sizes, threads = [], min(smallest) // 2
    while threads >= _SMALLEST:
        sizes.append(threads)
        threads //= 2
    return tuple(sizes)


def _along_x(axes: Any) -> int | None:
    """The threads of a declared threadgroup, where they are a number along x."""
    (kind, threads, *_), *others = axes
    plain = kind == "int" and all(axis == ["int", 1] for axis in others)
    return int(threads) if plain else None


def _replaced(node: Any, number: int, other: int) -> Any:
    """An expression with another number."""
    if isinstance(node, list):
        if node == ["int", number]:
            return ["int", other]
        return [_replaced(part, number, other) for part in node]
    return node
