"""What the declaration of an op is given beside its bodies, checked."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from .errors import KernelError, KernelTypeError, RuleError
from .rule import Rule, parse_rule

AUTOCAST = ("cast", "float32")


def checked_rule(name: object, rule: object) -> Rule:
    """A rule, read; the name beside it checked."""
    if not isinstance(name, str) or not isinstance(rule, str):
        what, wrong = ("name", name) if not isinstance(name, str) else ("rule", rule)
        raise KernelTypeError(f"[op] `{what}`: got {wrong!r}, expected a str.")
    if not name.isidentifier() or not name.isascii():
        raise KernelError(
            f"[op] `name`: {name!r} cannot name an op; expected a letter or underscore, then "
            "letters, digits and underscores."
        )
    try:
        parsed = parse_rule(rule)
    except RuleError as error:
        what = f"[op] the rule of op {name!r}: {error}"
        raise RuleError(what, text=error.text, position=error.position) from None
    arrays = {one.name for one in (*parsed.inputs, *parsed.outputs)}
    for dim in parsed.dim_names:
        if dim in arrays:
            raise KernelError(
                f"[op] the rule of op {name!r}: {dim!r} is both an array and a dim; rename one."
            )
    return parsed


def checked_autocast(name: str, given: object) -> str | None:
    """A policy, checked."""
    if given is not None and given not in AUTOCAST:
        raise KernelError(
            f"[op] `autocast` of op {name!r}: got {given!r}, expected None, 'cast' or 'float32'."
        )
    return given


def checked_tags(name: str, given: Any) -> tuple[str, ...]:
    """The names of torch's tags, each once, in order.

    Raises:
        KernelError: torch has no such tag, as far as torch is imported.
        KernelTypeError: one is neither a str nor a tag.
    """
    each = [given] if isinstance(given, str) or not isinstance(given, Iterable) else given
    known = getattr(sys.modules.get("torch"), "Tag", None)
    names = set()
    for one in each:
        text = one if isinstance(one, str) else getattr(one, "name", None)
        if not isinstance(text, str):
            raise KernelTypeError(
                f"[op] `tags` of op {name!r}: got {one!r} of type {type(one).__name__}, expected "
                'tags of torch, such as "nondeterministic_seeded".'
            )
        if known is not None and text not in known.__members__:
            raise KernelError(
                f"[op] `tags` of op {name!r}: torch has no tag {text!r}, but "
                f"{', '.join(sorted(known.__members__))}."
            )
        names.add(text)
    return tuple(sorted(names))
