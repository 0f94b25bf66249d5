"""What the names of a text mean while it is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from tree_sitter import Node

from ...errors import DialectError
from ..accesses.values import Function
from .nodes import INT, Array, Expression, Literal, Name, Statement, Type


class Pointer(NamedTuple):
    """A place in an array.

    Attributes:
        array: which one.
        offset: its element, from the array's first one; None for that one.
    """

    array: Array
    offset: Expression | None = None

    @property
    def position(self) -> Expression:
        """The offset as a number, also of the first element."""
        return self.offset or Literal("0", INT)


@dataclass
class PointerVariable:
    """A variable that is a pointer: its array never changes, where it points may.

    Attributes:
        array: which one.
        offset: the variable that holds its element; None of one that stays at the first.
    """

    array: Array
    offset: Name | None


Meaning = Name | Array | PointerVariable | Function | Type


def refusal(kernel: str, where: str, line: int, construct: str, instead: str) -> DialectError:
    """The error for something that has no derivative."""
    problem = f"{construct} has no derivative that ferrule can derive; {instead}"
    return DialectError.at(kernel, where, line, construct, problem)


class Names:
    """Scopes of names, and the statements that are being made.

    Attributes:
        kernel: the kernel's name, for errors.
        where: the text that is read: ``"source"`` or ``"header"``.
        scopes: what names mean, the innermost last.
        made: the statements of the block that is being read.
        line_of_call: the body's line of the call whose function is read, else 0.
    """

    def __init__(self, kernel: str, given: Mapping[str, Meaning]) -> None:
        self.kernel, self.where = kernel, "source"
        self.scopes: list[dict[str, Meaning]] = [dict(given)]
        self.made: list[Statement] = []
        self._used = set(given)
        self.line_of_call = 0

    def refuse(self, node: Node, construct: str, instead: str) -> DialectError:
        """The error for something that has no derivative."""
        return refusal(self.kernel, self.where, node.start_point[0] + 1, construct, instead)

    def line(self, node: Node) -> int:
        """The line of the body that a node stands on, or is called from."""
        return self.line_of_call or node.start_point[0] + 1

    def look_up(self, name: str) -> Meaning | None:
        """What a name means."""
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), None)

    def fresh(self, name: str) -> str:
        """A name that nothing else has."""
        found, count = name, 0
        while found in self._used:
            count += 1
            found = f"{name}_{count}"
        self._used.add(found)
        return found

    def declare(self, name: str, type_: Type) -> Name:
        """A variable of the innermost scope."""
        variable = Name(self.fresh(name), type_)
        self.scopes[-1][name] = variable
        return variable

    @contextmanager
    def scope(self) -> Iterator[None]:
        """A scope inside of the present one."""
        self.scopes.append({})
        yield
        self.scopes.pop()

    @contextmanager
    def collected(self) -> Iterator[list[Statement]]:
        """What is made inside is not a part of what is made around."""
        outer, self.made = self.made, []
        try:
            yield self.made
        finally:
            self.made = outer
