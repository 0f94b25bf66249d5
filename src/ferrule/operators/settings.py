"""Checks of the settings of an op that are not its bodies: rule, autocast, tags."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import KernelError, KernelTypeError, RuleError
from ..hosts import imported
from ..rules.rule import Rule, parse_rule

AUTOCAST = ("cast", "float32")


def checked_rule(name: object, rule: object) -> Rule:
    """A rule, read; the name beside it checked."""
    if not isinstance(name, str) or not isinstance(rule, str):
        argument, value = ("name", name) if not isinstance(name, str) else ("rule", rule)
        raise KernelTypeError(f"[op] `{argument}`: got {value!r}, expected a str.")
    if not name.isidentifier() or not name.isascii():
        raise KernelError(
            f"[op] `name`: {name!r} cannot name an op; expected a letter or underscore, then "
            "letters, digits and underscores."
        )
    try:
        parsed = parse_rule(rule)
    except RuleError as error:
        message = f"[op] the rule of op {name!r}: {error}"
        raise RuleError(message, text=error.text, position=error.position) from None
    arrays = {argument.name for argument in (*parsed.inputs, *parsed.outputs)}
    for dim in parsed.dim_names:
        if dim in arrays:
            raise KernelError(
                f"[op] the rule of op {name!r}: {dim!r} is both an array and a dim; rename one."
            )
    return parsed


def checked_autocast(name: str, policy: object) -> str | None:
    """A policy, checked."""
    if policy is not None and policy not in AUTOCAST:
        raise KernelError(
            f"[op] `autocast` of op {name!r}: got {policy!r}, expected None, 'cast' or 'float32'."
        )
    return policy


def checked_tags(name: str, tags: Any) -> tuple[str, ...]:
    """The names of torch's tags, each once, in order.

    Raises:
        KernelError: torch has no such tag, as far as torch is imported.
        KernelTypeError: one is neither a str nor a tag.
    """
    each = [tags] if isinstance(tags, str) or not isinstance(tags, Iterable) else tags
    known = imported.tags()
    names = set()
    for tag in each:
        text = tag if isinstance(tag, str) else getattr(tag, "name", None)
        if not isinstance(text, str):
            raise KernelTypeError(
                f"[op] `tags` of op {name!r}: got {tag!r} of type {type(tag).__name__}, expected "
                'tags of torch, such as "nondeterministic_seeded".'
            )
        if known is not None and text not in known:
            raise KernelError(
                f"[op] `tags` of op {name!r}: torch has no tag {text!r}, but "
                f"{', '.join(sorted(known))}."
            )
        names.add(text)
    return tuple(sorted(names))
