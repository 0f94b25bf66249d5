"""Serialise ops as JSON, for a file beside a saved graph.

The text holds all that is data: rules, kernels, launches, and the ops that are derivative or
batching rules. Of Python functions it has the digest and the name. An op stands under the name that
graphs know it by, ``<name>_<digest>``, so that whatever was altered is found out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, cast

from ..errors import KernelError, RuleError
from . import identity
from .declared import ITSELF, defined
from .op import Op

FORMAT = 1


def full_name(op: Op) -> str:
    """The name of an op in graphs."""
    return f"{op.name}_{op.digest}"


def write(ops: Iterable[Op]) -> str:
    """Serialise ops, and the ops that are their rules."""
    by_name: dict[str, Op] = {}
    pending = list(ops)
    while pending:
        op = pending.pop()
        if full_name(op) not in by_name:
            by_name[full_name(op)] = op
            rule_ops = [rule.op for rule in op.rules.values()]
            # Of rules with optional outputs there is the digest alone, as of functions.
            pending += [cast(Op, each) for each in rule_ops if each and not each.rule.presences]
    content = {name: op.to_json() for name, op in by_name.items()}
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
        _check_unaltered(name, data)
    ops_read: dict[str, Op] = {}
    for name in ops:
        _resolve(name, ops, ops_read)
    return ops_read


def _check_unaltered(name: str, data: Any) -> None:
    """Refuse content whose digest is not the one in its name."""
    own, _, expected = name.rpartition("_")
    named = data.get("name") if isinstance(data, dict) else None
    if named != own:
        raise KernelError(
            f"[op] the saved op {name!r} was altered: its content is that of {named!r}."
        )
    try:
        digest, earlier = identity.of_op(data), identity.earlier(data)
    except (KeyError, TypeError, AttributeError) as error:
        raise RuleError(f"the saved op {name!r} is damaged: {error}") from None
    if expected not in (digest, *earlier):
        raise KernelError(
            f"[op] the saved op {name!r} was altered: its content has the digest {digest}, and its "
            f"name says {expected}. Save it again."
        )


def _resolve(name: str, ops: Mapping[str, Any], ops_read: dict[str, Op]) -> Op:
    """Build an op of a file, and first the ops that are its rules."""
    if name in ops_read:
        return ops_read[name]
    data = ops[name]
    try:
        own, digest = str(data["name"]), name.rpartition("_")[2]
        named = {full.rpartition("_")[2]: full for full in ops}
        wanted = [rule for rule in data["rules"].values() if rule in named and rule != ITSELF]
        runners = [body["function"] for body in data["implementations"] if "function" in body]
        only = len(runners) == len(data["implementations"])
    except (KeyError, TypeError, AttributeError) as error:
        raise RuleError(f"the saved op {name!r} is damaged: {error}") from None
    # No cycle: an op's digest depends on those of its rules.
    rules = {rule: _resolve(named[rule], ops, ops_read) for rule in wanted}
    op: Op | None = defined(own, digest)
    renamed = digest in identity.earlier(data)  # graphs call it by what an earlier ferrule said
    if op is None and renamed and (same := defined(own, identity.of_op(data))) is not None:
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
        if renamed:
            op = op.as_is(digest)
        if full_name(op) != name:
            raise RuleError(
                f"the saved op {name!r} reads as {full_name(op)!r}: another ferrule wrote it; "
                "save it again."
            )
    ops_read[name] = op
    return op
