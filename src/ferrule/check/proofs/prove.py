"""Proofs about ops: for all sizes that a rule allows, no access lies outside of its array, no two
threads meet at an element that one of them writes, every element of the outputs is written.

A body becomes terms (`source.accesses`), a call of any sizes too (`calls`). Small calls are
tried first (`search`); then Z3 is asked whether there can be a fault at all
(`solver`). What neither a call nor a proof shows is ``not supported``, and says why: never
that all is well.

Proofs are about the text that the CPU and NVIDIA's GPUs run, and about arrays with fewer elements
than ``most``. Sums of ints must not overflow, which is shown as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...dtypes import BY_NAME
from ...errors import KernelTypeError
from ...operators.bodies import KernelBody
from ...operators.declared import Declared
from ...operators.expressions import dtype_variables
from ...rules.rule import Rule
from .body import Prover
from .calls import NotSupported, symbolic_call
from .solver import solver_module
from .verdicts import COUNTEREXAMPLE, NOT_SUPPORTED, PROPERTIES, PROVED
from .verdicts import Proof as Proof
from .verdicts import Verdict as Verdict

_MOST_DTYPES = 4  # that are looked at one by one


def prove(op: Declared, *, timeout: float = 10.0, most: int = 2**31) -> Proof:
    """Prove what can be proved of an op's Metal bodies.

    Args:
        op: the op.
        timeout: seconds for each property of each body.
        most: arrays have fewer elements.

    Raises:
        NoSolver: z3-solver is not installed.
        KernelTypeError: this is no op.
    """
    if not isinstance(op, Declared):
        raise KernelTypeError(
            f"[prove] got {op!r} of type {type(op).__name__}, expected an op of ferrule.op."
        )
    solver_module()
    members: Sequence[Any] = getattr(op, "members", (op,))
    verdicts: dict[str, Verdict] = {}
    several = sum(len(_bodies(member)) for member in members) > 1
    for member in members:
        bodies = _bodies(member)
        if not bodies:
            nothing = Verdict(NOT_SUPPORTED, None, "it has no Metal body")
            return Proof(op.name, nothing, nothing, nothing, most)
        for i, body in enumerate(bodies):
            found = _of_body(member, body, bodies[:i], timeout, most)
            for name, verdict in found.items():
                if several and verdict.status != PROVED:
                    when = f" (the Metal body number {i + 1})" if len(bodies) > 1 else ""
                    text = f"{verdict.message}{when}"
                    verdict = Verdict(verdict.status, verdict.line, text, verdict.call,
                                      verdict.where)  # fmt: skip
                verdicts[name] = _worse(verdicts.get(name), verdict)
    bounds, races, coverage = (verdicts[name] for name in PROPERTIES)
    return Proof(op.name, bounds, races, coverage, most)


def _bodies(op: Any) -> list[KernelBody]:
    return [b for b in op.implementations if isinstance(b, KernelBody) and b.kind == "metal"]


def _worse(a: Verdict | None, b: Verdict) -> Verdict:
    order = (COUNTEREXAMPLE, NOT_SUPPORTED, PROVED)
    return b if a is None else min(a, b, key=lambda v: order.index(v.status))


def _of_body(
    op: Declared, body: KernelBody, earlier: Sequence[KernelBody], timeout: float, most: int
) -> dict[str, Verdict]:
    found = _of_dtypes(op, body, earlier, timeout, most, {})
    several = list(_integers(op.rule))
    is_open = any(verdict.status == NOT_SUPPORTED for verdict in found.values())
    if not several or not is_open or COUNTEREXAMPLE in (v.status for v in found.values()):
        return found
    # What an index does of one type of integers may say more than what one of any type does.
    worst: dict[str, Verdict] = {}
    open_ = [name for name, verdict in found.items() if verdict.status != PROVED]
    for kinds in several:
        for name, verdict in _of_dtypes(op, body, earlier, timeout, most, kinds).items():
            worst[name] = _worse(worst.get(name), verdict)
        if all(worst[name].status != PROVED for name in open_):
            break
    return {name: worst[name] if name in open_ else found[name] for name in found}


def _integers(rule: Rule) -> Iterator[dict[str, str]]:
    """What the dtype variables may be that are integers in any call; none where that is much."""
    choices = {
        name: rule.choices[name] for name in dtype_variables(rule)
        if name in rule.choices and all(BY_NAME[c].kind in "iub" for c in rule.choices[name])
    }  # fmt: skip
    if choices and math.prod(map(len, choices.values())) <= _MOST_DTYPES:
        for picked in itertools.product(*choices.values()):
            yield dict(zip(choices, picked, strict=True))


def _of_dtypes(
    op: Declared, body: KernelBody, earlier: Sequence[KernelBody], timeout: float, most: int,
    kinds: Mapping[str, str],
) -> dict[str, Verdict]:  # fmt: skip
    try:
        call = symbolic_call(op.rule, body, earlier, most, kinds)
    except NotSupported as why:
        return dict.fromkeys(PROPERTIES, Verdict(NOT_SUPPORTED, why.line, str(why)))
    if call.found.unsupported:
        first = call.found.unsupported[0]
        no = Verdict(NOT_SUPPORTED, first.line, first.why, None, first.where)
        return dict.fromkeys(PROPERTIES, no)
    return Prover(op.name, call, timeout).verdicts()
