"""A function's statements without its returns, so that they can stand in another function."""

from __future__ import annotations

from tree_sitter import Node

from ..cpp import NotSplittable
from ..syntax import walk_code
from .functions import Bound
from .statements import LOOPS, branch_statements, branches


class Returns:
    """The statements of a function in a call, with what it returns in a variable.

    A return at the end of a path through the statements needs no jump: what follows an ``if`` that
    returns belongs to the branch that goes on. Where both may go on, and out of loops, a second
    variable says that the function has returned.

    Args:
        bound: the function in its call.
        result: the variable, whose declaration is a part of the text.
    """

    def __init__(self, bound: Bound, result: str) -> None:
        self._bound, self._function = bound, bound.function
        self._result = result
        self._done = f"{result}d"
        self._needs_done = False  # whether the second variable is needed

    def text(self) -> str:
        """The statements.

        Raises:
            NotSplittable: the function returns from where it cannot be done without a jump.
        """
        function, statements = self._function, self._function.statements
        returns = _returns(function.body)
        kind = self._bound.returned_type()
        if not returns or returns == [statements[-1]]:
            text = "".join(f"{self._bound.render(s)} " for s in statements if s not in returns)
            value = _value(returns[0]) if returns else None
            if value is None:
                return text
            declared = f"{kind} {self._result} = " if kind else ""
            return f"{text}{declared}{self._bound.render(value)}; "
        if kind.startswith("auto"):
            raise NotSplittable(f"{function.name} returns auto from several places")
        text, _ = self._paths(statements, "")
        declared = f"{kind} {self._result}; " if kind else ""
        return declared + (f"bool {self._done} = false; " if self._needs_done else "") + text

    def _assignment(self, statement: Node, then: str) -> str:
        """A return statement as an assignment to the variable, with `then` after it."""
        value = _value(statement)
        target = f"{self._result} = " if self._function.returns is not None else ""
        return (f"{target}{self._bound.render(value)}; " if value is not None else "") + then

    def _set_done(self) -> str:
        self._needs_done = True
        return f"{self._done} = true; "

    def _paths(self, statements: list[Node], then: str) -> tuple[str, bool]:
        """Statements, with `then` after each return, and whether what follows them is run."""
        out = ""
        for index, statement in enumerate(statements):
            following = statements[index + 1 :]
            if not _returns(statement):
                out += f"{self._bound.render(statement)} "
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
        yes, no = branches(statement)
        if yes is None:
            raise self._refusal(statement)
        parts = [branch_statements(yes), branch_statements(no) if no is not None else []]
        going = [_goes_on(part) for part in parts]
        both_go_on = all(going) and bool(following)
        if both_go_on:
            then = self._set_done()
        else:
            parts = [
                [*part, *following] if goes else part
                for part, goes in zip(parts, going, strict=True)
            ]
        texts = [self._paths(part, then) for part in parts]
        head = self._bound.between(statement.start_byte, yes.start_byte)
        text = f"{head}{{ {texts[0][0]}}} else {{ {texts[1][0]}}} "
        if both_go_on:
            return self._unless_done(text, following, then)
        return text, any(goes_on for _, goes_on in texts)

    def _unless_done(self, text: str, following: list[Node], then: str) -> tuple[str, bool]:
        if not following:
            return text, True
        after, goes_on = self._paths(following, then)
        return f"{text}if (!{self._done}) {{ {after}}} ", goes_on

    def _loop(self, statement: Node) -> str:
        """A loop that is left where it returned."""
        edits: list[tuple[int, int, str]] = []
        leave = f"{self._set_done()}break; "

        def visit(node: Node) -> None:
            if node.type == "return_statement":
                edits.append(
                    (node.start_byte, node.end_byte, f"{{ {self._assignment(node, leave)}}}")
                )
                return
            if node.type == "switch_statement" and _returns(node):
                raise self._refusal(node)
            inner = node != statement and node.type in LOOPS and bool(_returns(node))
            if inner:
                edits.append((node.start_byte, node.start_byte, "{ "))
            for child in node.children:
                if child.type != "lambda_expression":
                    visit(child)
            if inner:
                edits.append((node.end_byte, node.end_byte, f" if ({self._done}) break; }}"))

        visit(statement)
        return self._bound.between(statement.start_byte, statement.end_byte, edits) + " "

    def _refusal(self, statement: Node) -> NotSplittable:
        return NotSplittable(
            f"{self._function.name} returns out of a {statement.type.split('_')[0]}"
        )


def _returns(node: Node) -> list[Node]:
    return [n for n in walk_code(node) if n.type == "return_statement"]


def _value(statement: Node) -> Node | None:
    return next(iter(statement.named_children), None)


def _goes_on(statements: list[Node]) -> bool:
    """Whether what follows these statements may be run."""
    for statement in statements:
        if statement.type == "return_statement":
            return False
        if statement.type == "compound_statement" and not _goes_on(statement.named_children):
            return False
        if statement.type == "if_statement":
            yes, no = branches(statement)
            if no is None or yes is None:
                continue
            if not _goes_on(branch_statements(yes)) and not _goes_on(branch_statements(no)):
                return False
    return True
