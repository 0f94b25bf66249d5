"""Ops as text, for a file beside a saved graph.

The text holds all that is data: rules, kernels, launches, and the ops that are derivative or
batching rules. Of Python functions it has the digest and the name. An op stands under the name that
graphs know it by, ``<name>_<digest>``, so that whatever was altered is found out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from . import identity
from .errors import KernelError, RuleError
from .op_declaration import ITSELF, Op, defined

FORMAT = 1


def full_name(op: Op) -> str:
    """What graphs call an op."""
    return f"{op.name}_{op.digest}"


def write(ops: Iterable[Op]) -> str:
    """Ops, and those that are rules of them, as text."""
    found: dict[str, Op] = {}
    pending = list(ops)
    while pending:
        op = pending.pop()
        if full_name(op) not in found:
            found[full_name(op)] = op
            pending += [rule.op for rule in op.rules.values() if rule.op is not None]
    content = {name: op.to_json() for name, op in found.items()}
    return json.dumps({"format": FORMAT, "ops": content}, sort_keys=True)


def read(text: str) -> dict[str, Op]:
    """The reverse of `write`.

    An op that is defined in this process is that op, with its Python functions.

    Raises:
        KernelError: an op's content is not what its name says; or nothing but a Python function
            carries it out, and it is not defined in this process.
        RuleError: the text is damaged.
    """
    try:
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise RuleError(
                f"saved ops have format {content['format']!r}, and this ferrule reads {FORMAT}; "
                "read them with a newer one."
            )
        ops = dict(content["ops"])
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, RuleError):
            raise
        raise RuleError(f"saved ops are damaged: {error}") from None
    for name, data in ops.items():
        _check(name, data)
    found: dict[str, Op] = {}
    for name in ops:
        _make(name, ops, found)
    return found


def _check(name: str, data: Any) -> None:
    """Refuse what was altered."""
    own, _, expected = name.rpartition("_")
    named = data.get("name") if isinstance(data, dict) else None
    if named != own:
        raise KernelError(
            f"[op] the saved op {name!r} was altered: its content is that of {named!r}."
        )
    try:
        found, before = identity.of_op(data), identity.earlier(data)
    except (KeyError, TypeError, AttributeError) as error:
        raise RuleError(f"the saved op {name!r} is damaged: {error}") from None
    if expected not in (found, *before):
        raise KernelError(
            f"[op] the saved op {name!r} was altered: its content has the digest {found}, and its "
            f"name says {expected}. Save it again."
        )


def _make(name: str, ops: Mapping[str, Any], found: dict[str, Op]) -> Op:
    """An op of a file, after the ops that are its rules."""
    if name in found:
        return found[name]
    data = ops[name]
    try:
        own, digest = str(data["name"]), name.rpartition("_")[2]
        named = {one.rpartition("_")[2]: one for one in ops}
        wanted = [one for one in data["rules"].values() if one in named and one != ITSELF]
        runners = [one["function"] for one in data["implementations"] if "function" in one]
        only = len(runners) == len(data["implementations"])
    except (KeyError, TypeError, AttributeError) as error:
        raise RuleError(f"the saved op {name!r} is damaged: {error}") from None
    # No cycle: an op's digest depends on those of its rules.
    rules = {one: _make(named[one], ops, found) for one in wanted}
    op = defined(own, digest)
    before = digest in identity.earlier(data)  # graphs call it by what an earlier ferrule said
    if op is None and before and (same := defined(own, identity.of_op(data))) is not None:
        op = same.as_is(digest)
    if op is None and only:
        module = runners[0].partition(":")[0]
        raise KernelError(
            f"[op] the saved op {own!r} is carried out by the Python function {runners[0]!r} "
            f"alone, which no file can hold, and no op {name!r} is defined in this process; "
            f"import {module} first, or whatever defines it. Its digest says that it must be the "
            "same function."
        )
    if op is None:
        op = Op.from_json(data, rules)
        if before:
            op = op.as_is(digest)
        if full_name(op) != name:
            raise RuleError(
                f"the saved op {name!r} reads as {full_name(op)!r}: another ferrule wrote it; "
                "save it again."
            )
    found[name] = op
    return op
