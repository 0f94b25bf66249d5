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

from tree_sitter import Node

from ..cpp import NotSplittable, Prepared, parameters, synchronising_functions
from ..syntax import Edit, Tree, callee, declarators, enclosed, field, kinds, part, replaced, walk
from .arguments import Passed, passed
from .assignments import WRITES_ARGUMENTS
from .body import WORD
from .call import STEPS, HeaderCall
from .declarations import declared_names
from .header import Functions
from .returns import Returns
from .statements import LOOPS, ancestors

_MOST_CALLS = 256
_MOST_TEXT = 1 << 19  # characters


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
        calls = kinds(tree.block, "call_expression")
        call = next((n for n in calls if functions.is_call(tree, n)), None)
        if call is None:
            _refuse_mentions(tree, functions)
            return text
        text = _with_statements(HeaderCall(functions, tree, call, number))
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
            if around is not None and field(around, "function") == parent:
                raise NotSplittable(f"a method {name} of the header synchronises")
        elif parent.type != "qualified_identifier" or functions.is_named(tree.text(parent)):
            raise NotSplittable(f"{name} of the header synchronises and is not just called")


def _with_statements(call: HeaderCall) -> str:
    """The body with a function's statements in place of its call."""
    _refuse_hidden(call)
    values = passed(call)
    _refuse_order(call, values)
    statements = Returns(values.bound, call.result).text()
    return call.tree.edited(_edits(call, values.before + statements))


def _edits(call: HeaderCall, before: str) -> list[Edit]:
    statement, inner = call.statement, call.path[-2]
    whole = statement.type == "expression_statement" and inner == call.node
    if call.function.returns is None and not whole:
        raise NotSplittable(f"{call.name} returns nothing")
    around = statement.parent
    if statement.type == "declaration" and around and around.type == "for_statement":
        if inner != declarators(statement)[0]:
            raise NotSplittable(f"a loop's second variable calls {call.name}")
        statement, around = around, around.parent
    elif statement.type in LOOPS:
        if field(statement, "condition") == inner:
            return _in_loop(call, inner, before)
        if field(statement, "initializer") != inner:
            raise NotSplittable(f"a loop's step calls {call.name}")
    elif statement.type not in ("declaration", "expression_statement", "if_statement"):
        raise NotSplittable(f"a {statement.type.split('_')[0]} calls {call.name}")
    kind = around.type if around is not None else ""
    if kind not in ("compound_statement", "else_clause", "if_statement", *LOOPS):
        construct = "condition" if kind == "condition_clause" else kind.split("_")[0]
        raise NotSplittable(f"a {construct} calls {call.name}")
    first, start = statement.start_byte, call.node.start_byte
    if whole:
        edits = [replaced(statement, before + call.lines(first, statement.end_byte))]
    else:
        result = call.result + call.lines(start, call.node.end_byte)
        edits = [(first, start, _moved(call, first, before)), replaced(call.node, result)]
    return edits if kind == "compound_statement" else [*edits, *enclosed(statement, "{ ", " }")]


def _moved(call: HeaderCall, start: int, before: str) -> str:
    """What stands before the call in its statement, and what is moved before that.

    It moves onto the line of the call, where errors are reported.
    """
    statement, declarator, end = call.statement, call.path[-2], call.node.start_byte
    lines, text = call.lines(start, end), call.text(start, end)
    if statement.type != "declaration" or declarator == declarators(statement)[0]:
        return lines + before + text
    # The declarators before it must stay before it.
    comma = declarator.prev_sibling or declarator
    spec = call.text(statement.start_byte, declarators(statement)[0].start_byte)
    done = call.text(start, comma.start_byte)
    return f"{lines}{done}; {before}{spec}{call.text(declarator.start_byte, end)}"


def _in_loop(call: HeaderCall, condition: Node, before: str) -> list[Edit]:
    """A loop's condition, evaluated at the start of its body instead."""
    start, end = condition.start_byte, condition.end_byte
    first, last = call.text(start, call.node.start_byte), call.text(call.node.end_byte, end)
    instead = "" if call.statement.type == "for_statement" else "(true)"
    leave = f"if (!({first}{call.result}{last})) break; "
    return [
        replaced(condition, instead + call.lines(start, end)),
        *enclosed(part(call.statement, "body"), f"{{ {before}{leave}", " }"),
    ]


def _refuse_hidden(call: HeaderCall) -> None:
    """Refuse a body that hides a name which the function uses from outside."""
    hidden = {q.name for q in parameters(call.p.spec)} | {n for n, _ in call.p.spec.template}
    node = call.statement
    # What it declares before the call; and all of it, which is simpler.
    for declared in (node, *node.children) if call.path[-2] != _first(node) else ():
        hidden |= declared_names(call.tree, declared)
    for around in ancestors(node):
        hidden |= declared_names(call.tree, around)
        for sibling in around.children:
            if sibling.type == "condition_clause":
                sibling = sibling.named_children[0]
            if sibling.start_byte < node.start_byte or around.type != "compound_statement":
                hidden |= declared_names(call.tree, sibling)
        node = around
    clash = call.function.free & hidden
    if clash:
        raise NotSplittable(f"the body hides {min(clash)}, which {call.name} uses")


def _refuse_order(call: HeaderCall, values: Passed) -> None:
    """Refuse a statement in which the call would move before what is evaluated first."""
    statement, around = call.statement, {node.id for node in call.path}
    beside = f"beside the call of {call.name}"

    def visit(node: Node, target: bool) -> None:
        if node == call.node:
            return
        kind, inside = node.type, node.id in around
        if kind == "update_expression" or (kind == "assignment_expression" and not inside):
            raise NotSplittable(f"an expression changes a variable {beside}")
        precedes = node.start_byte < call.node.start_byte and not inside
        if kind == "call_expression" and precedes and _may_act(call, node):
            raise NotSplittable(f"{callee(call.tree, node)} is called {beside}")
        if precedes and not target:
            if kind == "identifier" and call.tree.text(node) in values.changes:
                raise NotSplittable(f"{call.tree.text(node)} is read {beside}")
            if kind in STEPS and values.effects and call.is_memory(node):
                raise NotSplittable(f"memory is read {beside}")
        first = field(node, "argument" if kind in STEPS else "function")
        if kind == "parenthesized_expression":
            first = node.named_children[0]
        for child in node.children:
            # Where an assignment writes to is evaluated after its value.
            written = inside and kind == "assignment_expression" and child == node.children[0]
            visit(child, written or (target and child == first))

    whole = statement if statement.type == "expression_statement" else call.path[-2]
    visit(field(whole, "value") or whole, False)


def _may_act(call: HeaderCall, beside: Node) -> bool:
    """Whether a call beside the other may do more than make a value of its operands."""
    function, name = part(beside, "function"), callee(call.tree, beside)
    if name.startswith("atomic_") or name in WRITES_ARGUMENTS:
        return True
    if function.type == "field_expression":
        return not name.endswith((".swz", ".swr"))
    if name in call.functions.names:
        return False  # replaced in its turn, from left to right
    return call.functions.takes_memory(name) or name in call.declared


def _first(statement: Node) -> Node | None:
    """The part of a statement that is evaluated first."""
    if statement.type == "declaration":
        return declarators(statement)[0]
    return field(statement, "initializer") if statement.type == "for_statement" else None
