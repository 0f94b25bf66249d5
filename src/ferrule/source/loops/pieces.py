"""What a loop over lanes is made of: statements, masks, and arrays for what a lane keeps."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .uniform import Variable


class Again(Exception):
    """A mask is needed that was not planned: plan it, and emit anew."""


@dataclass
class Mask:
    """A mask of the current nest: its C++ name and what leaves it (``fn``, ``if``, ``loop``…)."""

    name: str
    kind: str
    loop: int = -1
    end: str = "fr_n"  # no lane from here on is in it


@dataclass
class Piece:
    """A statement of a loop over lanes: its text, its line and what it declares."""

    text: str
    line: int
    declared: list[Variable] = field(default_factory=list)
    # For each declared variable: (declaration of its type, initialisation, the plain declaration)
    types: list[str] = field(default_factory=list)
    inits: list[str] = field(default_factory=list)
    plain: str = ""
    exits: bool = False


def storage(variable: Variable, keep: bool) -> str:
    """The declaration of a lane variable's array, or of a name for its type alone."""
    n = variable.number
    if variable.kind == "reference":
        kind = f"::fr::reference<fr_t{n}>"
        array = f"{kind} fr_v{n}[FR_N]; " if keep else ""
        first = f"fr_v{n}[0]" if keep else f"::fr::named<{kind}>::get()"
        return f"{array}auto&& {variable.name} = {first}.get(); (void){variable.name};\n"
    if keep:
        return (
            f"::fr::lanes_t<fr_t{n}, FR_N> fr_v{n}; fr_t{n}& {variable.name} = fr_v{n}[0]; "
            f"(void){variable.name};\n"
        )
    return f"fr_t{n}& {variable.name} = ::fr::named<fr_t{n}>::get(); (void){variable.name};\n"


def plain_type(spec: str) -> str:
    """The type of a variable that counts lanes."""
    words = " ".join(w for w in spec.split() if w not in ("const", "thread"))
    return words.replace("auto", "uint")


def without_storage(spec: str) -> str:
    """Specifiers without the words that say where a variable lies."""
    return re.sub(r"\b(static|register|inline|thread_local)\b", "", spec)
