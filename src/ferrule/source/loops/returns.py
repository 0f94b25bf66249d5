"""A function's statements without its returns, so that they can stand in another function."""

from __future__ import annotations

from typing import NamedTuple

from tree_sitter import Node

from ..cpp import NotSplittable
from ..syntax import Edit, enclosed, field, part, replaced, walk_code
from .functions import Bound
from .statements import LOOPS, branch_statements, branches


class Returns(NamedTuple):
    """The statements of a function in a call, with what it returns in a variable.

    A return at the end of a path through the statements needs no jump: what follows an ``if`` that
    returns belongs to the branch that goes on. Where both may go on, and out of loops, a second
    variable says that the function has returned.

    Attributes:
        bound: the function in its call.
        result: the variable, whose declaration is a part of the text.
    """

    bound: Bound
    result: str

    def text(self) -> str:
        """The statements.

        Raises:
            NotSplittable: the function returns from where it cannot be done without a jump.
        """
        function, render = self.bound.function, self.bound.render
        statements, returns = function.statements, _returns(function.body)
        kind = self.bound.returned_type()
        if not returns or returns == [statements[-1]]:
            text = "".join(f"{render(s)} " for s in statements if s not in returns)
            if not returns or not returns[0].named_children:
                return text
            declared = f"{kind} {self.result} = " if kind else ""
            return f"{text}{declared}{render(returns[0].named_children[0])}; "
        if kind.startswith("auto"):
            raise NotSplittable(f"{function.name} returns auto from several places")
        text, _ = self._paths(statements, "")
        declared = f"{kind} {self.result}; " if kind else ""
        return declared + (f"bool {self.result}d = false; " if self._done in text else "") + text

    @property
    def _done(self) -> str:
        return f"{self.result}d = true; "

    def _assignment(self, statement: Node, then: str) -> str:
        """A return statement as an assignment to the variable, with `then` after it."""
        values = [self.bound.render(value) for value in statement.named_children[:1]]
        target = f"{self.result} = " if self.bound.function.returns is not None else ""
        return "".join(f"{target}{value}; " for value in values) + then

    def _paths(self, statements: list[Node], then: str) -> tuple[str, bool]:
        """Statements, with `then` after each return, and whether what follows them is run."""
        out = ""
        for index, statement in enumerate(statements):
            following = statements[index + 1 :]
            if not _returns(statement):
                out += f"{self.bound.render(statement)} "
                continue
            if statement.type == "return_statement":
                return out + self._assignment(statement, then), False
            if statement.type == "compound_statement":
                # Names are unique, so a block's own may stand beside what follows it.
                text, goes_on = self._paths([*statement.named_children, *following], then)
            elif statement.type == "if_statement":
                text, goes_on = self._branches(statement, following, then)
            elif statement.type in LOOPS:
                text, goes_on = self._unless_done(self._loop(statement), following, then)
            else:
                raise self._refusal(statement)
            return out + text, goes_on
        return out, True

    def _branches(self, statement: Node, following: list[Node], then: str) -> tuple[str, bool]:
        """An ``if`` that returns, and what follows it."""
        parts = [branch_statements(branch) for branch in branches(statement)]
        going = [_goes_on(statements) for statements in parts]
        both_go_on = all(going) and bool(following)
        if both_go_on:
            then = self._done
        else:
            parts = [p + following if goes else p for p, goes in zip(parts, going, strict=True)]
        yes, no = (self._paths(p, then) for p in parts)
        start = part(statement, "consequence").start_byte
        head = self.bound.between(statement.start_byte, start)
        text = f"{head}{{ {yes[0]}}} else {{ {no[0]}}} "
        if both_go_on:
            return self._unless_done(text, following, then)
        return text, yes[1] or no[1]

    def _unless_done(self, text: str, following: list[Node], then: str) -> tuple[str, bool]:
        if not following:
            return text, True
        after, goes_on = self._paths(following, then)
        return f"{text}if (!{self.result}d) {{ {after}}} ", goes_on

    def _loop(self, statement: Node) -> str:
        """A loop that is left where it returned."""
        edits: list[Edit] = []

        def visit(node: Node) -> None:
            if node.type == "return_statement":
                leave = self._assignment(node, f"{self._done}break; ")
                edits.append(replaced(node, f"{{ {leave}}}"))
                return
            if node.type == "switch_statement" and _returns(node):
                raise self._refusal(node)
            for child in node.children:
                if child.type != "lambda_expression":
                    visit(child)
            if node != statement and node.type in LOOPS and _returns(node):
                edits.extend(enclosed(node, "{ ", f" if ({self.result}d) break; }}"))

        visit(statement)
        return self.bound.between(statement.start_byte, statement.end_byte, edits) + " "

    def _refusal(self, statement: Node) -> NotSplittable:
        construct = statement.type.split("_")[0]
        return NotSplittable(f"{self.bound.function.name} returns out of a {construct}")


def _returns(node: Node) -> list[Node]:
    return [n for n in walk_code(node) if n.type == "return_statement"]


def _goes_on(statements: list[Node]) -> bool:
    """Whether what follows these statements may be run."""
    return all(map(_passes, statements))


def _passes(statement: Node) -> bool:
    if statement.type == "compound_statement":
        return _goes_on(statement.named_children)
    if statement.type == "if_statement" and field(statement, "alternative") is not None:
        return any(_goes_on(branch_statements(branch)) for branch in branches(statement))
    return statement.type != "return_statement"
