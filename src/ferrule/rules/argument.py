"""What a rule is made of: its inputs and outputs, and their dims."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from .. import dtypes
from .expression import Expression


class Star(NamedTuple):
    """``*name``: any number of dims.

    Attributes:
        name: what they are called together.
    """

    name: str

    def __str__(self) -> str:
        return f"*{self.name}"


class Broadcast(NamedTuple):
    """``*broadcast(S,R)`` of an output: the dims of several ``*S``, broadcast by NumPy's rules.

    Attributes:
        names: what the starred dims are called, two at least.
    """

    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"*broadcast({','.join(self.names)})"


Dim = Expression | Star | Broadcast


class Argument(NamedTuple):
    """An input or output.

    Attributes:
        name: its name.
        dims: its dims; None of an input that is a Python number.
        dtype: a dtype's full name, or a variable.
        optional: it may be None.
        mutable: the kernel writes it in place.
        constant: of an output: derivatives take it for a constant.
        present: of an output: the condition under which calls have it; True or False where that
            is settled, None of one that has no condition.
        default: of an optional input, what its dtype variable is where no input says it: a dtype's
            full name, or another variable.
    """

    name: str
    dims: tuple[Dim, ...] | None
    dtype: str
    optional: bool = False
    mutable: bool = False
    constant: bool = False
    present: Expression | bool | None = None
    default: str | None = None

    def __str__(self) -> str:
        dims = "" if self.dims is None else f"[{','.join(map(_tight, self.dims))}]"
        marks = f"{'?' * self.optional}{'!' * self.mutable}{'~' * self.constant}"
        condition = "" if self.present is None else f" if {shown_truths(self.present)}"
        default = "" if self.default is None else f"={self.default}"
        return f"{self.name}{dims}:{self.dtype}{default}{marks}{condition}"


def as_declared(argument: Argument) -> str:
    """An output as it is declared, without a condition that is settled."""
    settled = isinstance(argument.present, bool)
    return str(argument._replace(present=None) if settled else argument)


def listed(outputs: Sequence[Argument]) -> str:
    """Outputs as they are declared, and which of them a call gives None for."""
    absent = ", ".join(repr(output.name) for output in outputs if output.present is False)
    advice = f"; give None for {absent}, which this call does not have" if absent else ""
    return f"({', '.join(map(as_declared, outputs))}){advice}"


def shown_truths(condition: Expression | bool) -> str:
    """A condition of an output as it is written: ``w`` for ``w != 0``."""
    return re.sub(r"\b(\w+) != 0\b", r"\1", str(condition))


def is_countable(argument: Argument) -> bool:
    """Whether an input is a number that sizes may depend on: an integer or a bool."""
    return argument.dims is None and getattr(dtypes.BY_NAME.get(argument.dtype), "kind", "") in (
        "b",
        "i",
        "u",
    )


def name_of(dim: Dim) -> str | None:
    """The name of a dim that is one."""
    return dim.node[1] if isinstance(dim, Expression) and dim.node[0] == "name" else None


def _tight(dim: Dim) -> str:
    """A dim without spaces, but for those around words."""
    return re.sub(r"(?<!\w) | (?!\w)", "", str(dim))
