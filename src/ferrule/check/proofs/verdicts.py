"""What is known of an op: proved, refuted by a call, or not supported."""

from __future__ import annotations

from dataclasses import dataclass

from ...source.accesses.model import Access

PROVED, COUNTEREXAMPLE, NOT_SUPPORTED = "proved", "counterexample", "not supported"
PROPERTIES = ("bounds", "races", "coverage")


@dataclass(frozen=True)
class Verdict:
    """What is known of one property.

    Attributes:
        status: ``"proved"``, ``"counterexample"`` or ``"not supported"``.
        line: of the author's body (see ``where``); None where no line is to blame.
        message: what goes wrong, or what is not understood.
        call: a call that goes wrong, as Python; None without one.
        where: ``"source"`` for the body, ``"header"``.
    """

    status: str
    line: int | None = None
    message: str = ""
    call: str | None = None
    where: str = "source"

    def __str__(self) -> str:
        place = "" if self.line is None else f"line {self.line}"
        if place and self.where == "header":
            place += " of the header"
        text = ", ".join(filter(None, (place, self.message)))
        shown = self.status + (f": {text}" if text else "")
        return shown + (f"\n    {self.call}" if self.call else "")


@dataclass(frozen=True)
class Proof:
    """What is known of an op.

    Attributes:
        op: its name.
        bounds: no access lies outside of its array, no int overflows, nothing is divided by zero.
        races: no two threads meet at an element that one of them writes.
        coverage: every element of every output is written.
        most: it is about arrays of fewer elements.
    """

    op: str
    bounds: Verdict
    races: Verdict
    coverage: Verdict
    most: int

    @property
    def proved(self) -> bool:
        """Whether all is."""
        return all(getattr(self, name).status == PROVED for name in PROPERTIES)

    def __str__(self) -> str:
        size = f"2**{self.most.bit_length() - 1}" if not self.most & self.most - 1 else self.most
        lines = [f"{self.op}: for all arrays of fewer than {size} elements"]
        lines += [f"  {name:8}  {getattr(self, name)}" for name in PROPERTIES]
        return "\n".join(lines)


def unknown_of(access: Access) -> str:
    """What an access depends on that has no exact value."""
    for term in (access.element, *access.path):
        for leaf in sorted(term.leaves, key=str):
            if leaf.op == "unknown":
                return str(leaf.value[1])
    return "what is not known"
