"""Functions of the header that synchronise, in place of their calls.

The splitter splits a body at the synchronising calls that it sees. So a call of a function that
synchronises is replaced by the function's own statements, as the author could have written them:
parameters become variables, or what they refer to; template parameters become types and constants;
the value that is returned becomes a variable, set before the statement of the call. Every name that
the function declares gets a new one, such as ``fr_h3_v``, so that nothing is captured.

All of it stands on the line of the call, so that lines stay the author's. What cannot be written so
without a change of meaning is `NotSplittable`, and the kernel runs on fibers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tree_sitter import Node

from ..cpp import NotSplittable, Prepared, parameters, synchronising_functions
from ..syntax import Tree, callee, declarators, walk
from .arguments import STEPS, Arguments, HeaderCall
from .assignments import WRITES_ARGUMENTS
from .body import WORD
from .declarations import declared_names
from .header import Functions
from .returns import Returns
from .statements import LOOPS

_MOST_CALLS = 256
_MOST_TEXT = 1 << 19  # characters

# Where a call cannot be taken out of what is around it.
_STUCK = {
    "lambda_expression": "a lambda calls {}",
    "struct_specifier": "a local struct calls {}",
    "class_specifier": "a local struct calls {}",
    "comma_expression": "{} is called beside a comma",
    "decltype": "decltype names {}",
    "sizeof_expression": "sizeof names {}",
    "alignof_expression": "alignof names {}",
    "template_argument_list": "a template argument names {}",
    "for_range_loop": "a range-based for calls {}",
    "do_statement": "the condition of a do-while loop calls {}",
    "array_declarator": "the length of an array names {}",
    "case_statement": "a switch calls {}",
}


def inline(p: Prepared, text: str) -> str:
    """The body with the header's functions that synchronise in place of their calls.

    Args:
        p: the kernel.
        text: its body, rewritten and with its macros expanded.

    Raises:
        NotSplittable: a call cannot be replaced without a change of meaning.
    """
    names = {re.sub(r"<.*", "", name) for name in synchronising_functions(p)}
    if any(re.match(r"operator\W", name) for name in names):
        raise NotSplittable("an operator of the header synchronises")
    if not names & set(WORD.findall(text)):
        return text
    functions = Functions(p, names)
    for number in range(1, _MOST_CALLS + 1):
        tree = Tree(text, body=True)
        if tree.has_error:
            raise NotSplittable("the body has syntax that the splitter does not read")
        call = next((n for n in walk(tree.block) if functions.is_call(tree, n)), None)
        if call is None:
            _refuse_mentions(tree, functions)
            return text
        text = _InlinedCall(functions, tree, call, number).edited()
        if len(text) > _MOST_TEXT:
            break
    raise NotSplittable("functions of the header that synchronise are called too often")


def _refuse_mentions(tree: Tree, functions: Functions) -> None:
    """Refuse a body that names the functions other than in calls: the split text lacks them."""
    for node in walk(tree.block):
        parent, name = node.parent, tree.text(node) if "identifier" in node.type else ""
        if parent is None or name not in functions.names:
            continue
        if node.type == "field_identifier":
            around = parent.parent
            if around is not None and around.child_by_field_name("function") == parent:
                raise NotSplittable(f"a method {name} of the header synchronises")
        elif parent.type != "qualified_identifier" or functions.is_named(tree.text(parent)):
            raise NotSplittable(f"{name} of the header synchronises and is not just called")


class _InlinedCall(HeaderCall):
    """A call that the function's statements are put in place of.

    Attributes:
        path: what is around the call, from itself to the statement that it is moved before.
    """

    def __init__(self, functions: Functions, tree: Tree, call: Node, number: int) -> None:
        super().__init__(functions, tree, call, number)
        self.path = list(self._path())
        self.statement = self.path[-1]
        self.passed = Arguments(self)

    def edited(self) -> str:
        """The body without this call."""
        self._refuse_hidden()
        self.function.rename(f"{self.result}_")
        declared = self.passed.bind()
        self._refuse_order()
        statements = Returns(self.function, self.result).text()
        return self.tree.edited(self._edits(declared + statements))

    # -- where the call stands -------------------------------------------------------------------

    def _path(self) -> Iterator[Node]:
        node = self.node
        while True:
            yield node
            if node.type.endswith("_statement") or node.type == "declaration":
                break
            parent = node.parent
            if parent is None:
                raise NotSplittable(f"the call of {self.name} is not understood")
            kind, left = parent.type, parent.child_by_field_name("left")
            if kind in _STUCK:
                raise NotSplittable(_STUCK[kind].format(self.name))
            if kind == "conditional_expression" and (
                parent.child_by_field_name("condition") != node
            ):
                raise NotSplittable(f"a branch of ?: calls {self.name}")
            if kind == "binary_expression" and left != node:
                operator = parent.children[1].type
                if operator in ("&&", "||"):
                    raise NotSplittable(f"{self.name} is called behind {operator}")
            if kind == "assignment_expression" and left == node:
                raise NotSplittable(f"the target of an assignment calls {self.name}")
            if kind == "condition_clause" and parent.child_by_field_name("initializer") is not None:
                raise NotSplittable("a condition declares a variable")
            node = parent
        while node.parent is not None:
            node = node.parent
            if node.type == "lambda_expression":
                raise NotSplittable(f"a lambda calls {self.name}")

    def _edits(self, before: str) -> list[tuple[int, int, str]]:
        statement, inner = self.statement, self.path[-2]
        whole = statement.type == "expression_statement" and inner == self.node
        if self.function.returns is None and not whole:
            raise NotSplittable(f"{self.name} returns nothing")
        around = statement.parent
        kind = around.type if around is not None else ""
        if statement.type == "declaration" and around is not None and kind == "for_statement":
            if inner != declarators(statement)[0]:
                raise NotSplittable(f"a loop's second variable calls {self.name}")
            statement, around = around, around.parent
        elif statement.type in LOOPS:
            if statement.child_by_field_name("condition") == inner:
                return self._loop(statement, inner, before)
            if statement.child_by_field_name("initializer") != inner:
                raise NotSplittable(f"a loop's step calls {self.name}")
        elif statement.type not in ("declaration", "expression_statement", "if_statement"):
            raise NotSplittable(f"a {statement.type.split('_')[0]} calls {self.name}")
        kind = around.type if around is not None else ""
        if kind not in ("compound_statement", "else_clause", "if_statement", *LOOPS):
            construct = "condition" if kind == "condition_clause" else kind.split("_")[0]
            raise NotSplittable(f"a {construct} calls {self.name}")
        start, end = self.node.start_byte, self.node.end_byte
        first, last = statement.start_byte, statement.end_byte
        if whole:
            edits = [(first, last, before + self._lines(first, last))]
        else:
            edits = [
                (first, start, self._moved(first, before)),
                (start, end, self.result + self._lines(start, end)),
            ]
        if kind != "compound_statement":
            edits[0] = (*edits[0][:2], "{ " + edits[0][2])
            edits.append((last, last, " }"))
        return edits

    def _moved(self, start: int, before: str) -> str:
        """What stands before the call in its statement, and what is moved before that.

        It moves onto the line of the call, where errors are reported.
        """
        statement, declarator, end = self.statement, self.path[-2], self.node.start_byte
        lines, text = self._lines(start, end), self.text(start, end)
        if statement.type != "declaration" or declarator == declarators(statement)[0]:
            return lines + before + text
        # The declarators before it must stay before it.
        comma = next(
            c
            for c in reversed(statement.children)
            if c.type == "," and c.end_byte <= declarator.start_byte
        )
        spec = self.text(statement.start_byte, declarators(statement)[0].start_byte)
        done = self.text(start, comma.start_byte)
        return f"{lines}{done}; {before}{spec}{self.text(declarator.start_byte, end)}"

    def _loop(self, statement: Node, condition: Node, before: str) -> list[tuple[int, int, str]]:
        """A loop's condition, evaluated at the start of its body instead."""
        body = statement.child_by_field_name("body")
        if body is None:
            raise NotSplittable(f"the loop that calls {self.name} is not understood")
        start, end, call = condition.start_byte, condition.end_byte, self.node
        first, last = self.text(start, call.start_byte), self.text(call.end_byte, end)
        instead = "" if statement.type == "for_statement" else "(true)"
        leave = f"if (!({first}{self.result}{last})) break; "
        return [
            (start, end, instead + self._lines(start, end)),
            (body.start_byte, body.start_byte, f"{{ {before}{leave}"),
            (body.end_byte, body.end_byte, " }"),
        ]

    def _lines(self, start: int, end: int) -> str:
        return "\n" * self.tree.data[start:end].count(b"\n")

    # -- what a name, or the order of evaluation, would change -------------------------------------

    def _refuse_hidden(self) -> None:
        """Refuse a body that hides a name which the function uses from outside."""
        hidden = {q.name for q in parameters(self.p.spec)} | {n for n, _ in self.p.spec.template}
        node = self.statement
        # What it declares before the call; and all of it, which is simpler.
        for part in (node, *node.children) if self.path[-2] != _first(node) else ():
            hidden |= declared_names(self.tree, part)
        while node.parent is not None:
            hidden |= declared_names(self.tree, node.parent)
            for sibling in node.parent.children:
                if sibling.type == "condition_clause":
                    sibling = sibling.named_children[0]
                precedes = sibling.start_byte < node.start_byte
                if precedes or node.parent.type != "compound_statement":
                    hidden |= declared_names(self.tree, sibling)
            node = node.parent
        clash = self.function.free & hidden
        if clash:
            raise NotSplittable(f"the body hides {min(clash)}, which {self.name} uses")

    def _refuse_order(self) -> None:
        """Refuse a statement in which the call would move before what is evaluated first."""
        call, statement, around = self.node, self.statement, {node.id for node in self.path}
        beside = f"beside the call of {self.name}"

        def visit(node: Node, target: bool) -> None:
            if node == call:
                return
            kind, inside = node.type, node.id in around
            if kind == "update_expression" or (kind == "assignment_expression" and not inside):
                raise NotSplittable(f"an expression changes a variable {beside}")
            precedes = node.start_byte < call.start_byte and not inside
            if kind == "call_expression" and precedes and self._may_act(node):
                raise NotSplittable(f"{callee(self.tree, node)} is called {beside}")
            if precedes and not target:
                if kind == "identifier" and self.tree.text(node) in self.passed.changes:
                    raise NotSplittable(f"{self.tree.text(node)} is read {beside}")
                if kind in STEPS and self.passed.effects and self.is_memory(node):
                    raise NotSplittable(f"memory is read {beside}")
            first = node.child_by_field_name("argument" if kind in STEPS else "function")
            if kind == "parenthesized_expression":
                first = node.named_children[0]
            for child in node.children:
                # Where an assignment writes to is evaluated after its value.
                written = inside and kind == "assignment_expression" and child == node.children[0]
                visit(child, written or (target and child == first))

        part = statement if statement.type == "expression_statement" else self.path[-2]
        visit(part.child_by_field_name("value") or part, False)

    def _may_act(self, call: Node) -> bool:
        """Whether a call may do more than make a value of its operands."""
        function, name = call.child_by_field_name("function"), callee(self.tree, call)
        if function is None or name.startswith("atomic_") or name in WRITES_ARGUMENTS:
            return True
        if function.type == "field_expression":
            return not name.endswith((".swz", ".swr"))
        if name in self.functions.names:
            return False  # replaced in its turn, from left to right
        return self.functions.takes_memory(name) or name in self.declared


def _first(statement: Node) -> Node | None:
    """The part of a statement that is evaluated first."""
    if statement.type == "declaration":
        return declarators(statement)[0]
    if statement.type != "for_statement":
        return None
    return statement.child_by_field_name("initializer")
