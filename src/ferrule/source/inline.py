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

from ..kernel import ATTRIBUTES
from .analysis import LOOPS, WORD
from .cpp import NotSplittable, Prepared, parameters, synchronising_functions
from .dialect import SYNC
from .functions import Function, Functions, Name, Parameter, declared_names, one_line, shapes
from .returns import Returns
from .syntax import Tree, call_arguments, callee, declarators, walk
from .uniform import WRITES_ARGUMENTS, names_in

_MOST_CALLS = 256
_MOST_TEXT = 1 << 19  # characters
_STEPS = ("subscript_expression", "field_expression", "pointer_expression")
_ACTS = ("call_expression", "update_expression", "assignment_expression", "lambda_expression")

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
        text = _Call(functions, tree, call, number).edited()
        if len(text) > _MOST_TEXT:
            break
    raise NotSplittable("functions of the header that synchronise are called too often")


def _refuse_mentions(tree: Tree, functions: Functions) -> None:
    """The splitter's texts lack the functions: nothing may name them any more."""
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


class _Call:
    """One call of a function, and the body that it stands in."""

    def __init__(self, functions: Functions, tree: Tree, call: Node, number: int) -> None:
        self.functions = functions
        self.p = functions.p
        self.tree = tree
        self.call = call
        self.name = callee(tree, call)
        self.declared = _declarations(tree)
        if self.name in self.declared:
            raise NotSplittable(f"{self.name} is a function and a variable")
        self.lambdas = {
            tree.text(name): node
            for node in walk(tree.block)
            if node.type == "lambda_expression" and node.parent is not None
            if node.parent.type == "init_declarator"
            for name in node.parent.children_by_field_name("declarator")
        }
        self.arguments = call_arguments(call)
        self.function: Function = functions.find(self.name, len(self.arguments))
        self.result = f"fr_h{number}"
        self.before: list[str] = []
        # What is around the call, from itself to the statement that it is moved before.
        self.path = list(self._path())
        self.statement = self.path[-1]
        # Whether the function writes to memory or waits for others, and the variables it changes.
        self.effects = functions.effects(self.function)
        self.changes: set[str] = set()

    def edited(self) -> str:
        """The body without this call."""
        self._refuse_hidden()
        self.function.rename(f"{self.result}_")
        self._templates()
        self._bind()
        self._refuse_order()
        self.before.append(Returns(self.function, self.result).text())
        return self.tree.edited(self._edits("".join(self.before)))

    # -- where the call stands -------------------------------------------------------------------

    def _path(self) -> Iterator[Node]:
        node = self.call
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
        s, inner = self.statement, self.path[-2]
        whole = s.type == "expression_statement" and inner == self.call
        if self.function.returns is None and not whole:
            raise NotSplittable(f"{self.name} returns nothing")
        around = s.parent
        if s.type == "declaration" and around is not None and around.type == "for_statement":
            if inner != declarators(s)[0]:
                raise NotSplittable(f"a loop's second variable calls {self.name}")
            s, around = around, around.parent
        elif s.type in LOOPS:
            if s.child_by_field_name("condition") == inner:
                return self._loop(s, inner, before)
            if s.child_by_field_name("initializer") != inner:
                raise NotSplittable(f"a loop's step calls {self.name}")
        elif s.type not in ("declaration", "expression_statement", "if_statement"):
            raise NotSplittable(f"a {s.type.split('_')[0]} calls {self.name}")
        kind = around.type if around is not None else ""
        if kind not in ("compound_statement", "else_clause", "if_statement", *LOOPS):
            what = "condition" if kind == "condition_clause" else kind.split("_")[0]
            raise NotSplittable(f"a {what} calls {self.name}")
        start, end = self.call.start_byte, self.call.end_byte
        if whole:
            edits = [(s.start_byte, s.end_byte, before + self._lines(s.start_byte, s.end_byte))]
        else:
            edits = [
                (s.start_byte, start, self._moved(s.start_byte, before)),
                (start, end, self.result + self._lines(start, end)),
            ]
        if kind != "compound_statement":
            edits[0] = (*edits[0][:2], "{ " + edits[0][2])
            edits.append((s.end_byte, s.end_byte, " }"))
        return edits

    def _moved(self, start: int, before: str) -> str:
        """What stands before the call in its statement, and what is moved before that.

        It moves onto the line of the call, where errors are to be said.
        """
        s, d, end = self.statement, self.path[-2], self.call.start_byte
        lines, text = self._lines(start, end), self._text(start, end)
        if s.type != "declaration" or d == declarators(s)[0]:
            return lines + before + text
        # The declarators before it must stay before it.
        comma = next(
            c for c in reversed(s.children) if c.type == "," and c.end_byte <= d.start_byte
        )
        spec = self._text(s.start_byte, declarators(s)[0].start_byte)
        done = self._text(start, comma.start_byte)
        return f"{lines}{done}; {before}{spec}{self._text(d.start_byte, end)}"

    def _loop(self, s: Node, condition: Node, before: str) -> list[tuple[int, int, str]]:
        """A loop's condition, worked out at the start of its body instead."""
        body = s.child_by_field_name("body")
        if body is None:
            raise NotSplittable(f"the loop that calls {self.name} is not understood")
        start, end, call = condition.start_byte, condition.end_byte, self.call
        first, last = self._text(start, call.start_byte), self._text(call.end_byte, end)
        instead = "" if s.type == "for_statement" else "(true)"
        leave = f"if (!({first}{self.result}{last})) break; "
        return [
            (start, end, instead + self._lines(start, end)),
            (body.start_byte, body.start_byte, f"{{ {before}{leave}"),
            (body.end_byte, body.end_byte, " }"),
        ]

    def _text(self, start: int, end: int) -> str:
        return one_line(self.tree.data[start:end].decode())

    def _lines(self, start: int, end: int) -> str:
        return "\n" * self.tree.data[start:end].count(b"\n")

    # -- what a name, or the order of evaluation, would change -------------------------------------

    def _refuse_hidden(self) -> None:
        """What the function means by a name must be what the body means by it at the call."""
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
                before = sibling.start_byte < node.start_byte
                if before or node.parent.type != "compound_statement":
                    hidden |= declared_names(self.tree, sibling)
            node = node.parent
        clash = self.function.free & hidden
        if clash:
            raise NotSplittable(f"the body hides {min(clash)}, which {self.name} uses")

    def _refuse_order(self) -> None:
        """The call is moved before what its statement evaluates beside it: from left to right."""
        call, around = self.call, {node.id for node in self.path}
        s = self.statement
        beside = f"beside the call of {self.name}"

        def visit(node: Node, target: bool) -> None:
            if node == call:
                return
            kind, inside = node.type, node.id in around
            if kind == "update_expression" or (kind == "assignment_expression" and not inside):
                raise NotSplittable(f"an expression changes a variable {beside}")
            before = node.start_byte < call.start_byte and not inside
            if kind == "call_expression" and before and self._may_act(node):
                raise NotSplittable(f"{callee(self.tree, node)} is called {beside}")
            if before and not target:
                if kind == "identifier" and self.tree.text(node) in self.changes:
                    raise NotSplittable(f"{self.tree.text(node)} is read {beside}")
                if kind in _STEPS and self.effects and self._is_memory(node):
                    raise NotSplittable(f"memory is read {beside}")
            first = node.child_by_field_name("argument" if kind in _STEPS else "function")
            if kind == "parenthesized_expression":
                first = node.named_children[0]
            for child in node.children:
                # Where an assignment writes to is worked out after its value.
                written = inside and kind == "assignment_expression" and child == node.children[0]
                visit(child, written or (target and child == first))

        part = s if s.type == "expression_statement" else self.path[-2]
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

    def _is_memory(self, node: Node) -> bool:
        """Whether an expression reads what other threads, or writes through pointers, change."""
        root = _root(node)
        if root is None:
            return True
        name = self.tree.text(root)
        for spec, shape in self.declared.get(name, []):
            shared = {"thread_local", "auto"} & set(spec.split())
            if shared or {"*", "*const", "&"} & set(shape):
                return True
        return name not in self.declared and name in self.p.kernel.output_names

    # -- arguments -------------------------------------------------------------------------------

    def _templates(self) -> None:
        """Template arguments that are written, or have a default and cannot be told."""
        function = self.call.child_by_field_name("function")
        while function is not None and function.type == "qualified_identifier":
            function = function.child_by_field_name("name")
        listed = function.child_by_field_name("arguments") if function is not None else None
        written = (
            [self._text(n.start_byte, n.end_byte) for n in listed.named_children] if listed else []
        )
        if len(written) > len(self.function.templates):
            raise NotSplittable(f"{self.name} is given too many template arguments")
        for name, text in zip(self.function.templates, written, strict=False):
            self._template(name, text)
        for name in self.function.templates[len(written) :]:
            told = any(q.of is name for q in self.function.parameters)
            if name.default is not None and name.used and not told:
                self._template(name, self.function.render(name.default))

    def _template(self, name: Name, text: str) -> None:
        kind = self.function.between(*name.type) if name.type is not None else None
        values = dict(self.p.spec.template)
        if kind is None and text.isidentifier():
            name.text = text
            return
        # A kernel's template values are of type int or bool.
        if kind is not None and (
            (kind == "int" and (text.isdecimal() or type(values.get(text)) is int))
            or (kind == "bool" and (text in ("true", "false") or type(values.get(text)) is bool))
        ):
            name.text = text
            return
        name.text = f"{self.result}_{name.name}"
        if kind is None:
            self.before.append(f"using {name.text} = {text}; ")
        else:
            self.before.append(f"constexpr {kind} {name.text} = ({text}); ")

    def _bind(self) -> None:
        """Give every parameter of the function its meaning for this call."""
        given: list[Node | None] = [*self.arguments]
        given += [None] * (len(self.function.parameters) - len(given))
        pairs = list(zip(self.function.parameters, given, strict=True))
        self._note_changes([(q, a) for q, a in pairs if a is not None])
        for q, argument in pairs:
            if q.kind == "reference":
                self._refer(q, argument)
            elif not self._stands_for_itself(q, argument):
                if q.kind == "constant":
                    self._refuse_changes(q, argument)
                self._declare(q, argument)

    def _note_changes(self, pairs: list[tuple[Parameter, Node]]) -> None:
        """Which variables of the body the function may change."""
        for argument in (a for q, a in pairs if q.kind == "reference"):
            root = _root(argument)
            self.changes |= (
                {self.tree.text(root)} if root is not None else names_in(self.tree, argument)
            )
            self.effects |= argument.type in _STEPS and self._is_memory(argument)
        for argument in (a for q, a in pairs if q.kind in ("value", "constant")):
            made = self.lambdas.get(self.tree.text(argument), argument)
            if made.type == "lambda_expression":
                self.changes |= names_in(self.tree, made)
        if not self.effects:
            return
        self.changes |= _addressed(self.tree, self.tree.block)
        for argument in (a for q, a in pairs if q.kind == "pointer"):
            for name in names_in(self.tree, argument):
                if any("[]" in shape for _, shape in self.declared.get(name, [])):
                    self.changes.add(name)

    def _argument(self, q: Parameter, argument: Node | None) -> str:
        if argument is not None:
            return self._text(argument.start_byte, argument.end_byte)
        if q.default is None:
            raise NotSplittable(f"{self.name} is called with too few arguments")
        return self.function.render(q.default)

    def _unknown(self, name: Name) -> NotSplittable:
        return NotSplittable(f"{self.name} is called without its {name.name}")

    def _deduce(self, q: Parameter, operand: str, argument: Node) -> None:
        """Tell a type parameter from what an argument refers or points to."""
        if q.of is None or q.of.text:
            return
        if q.of.used < 2:
            q.of.text = "auto"
            return
        synchronising = SYNC | self.functions.names
        calls = [n for n in walk(argument) if n.type == "call_expression"]
        if any(callee(self.tree, n) in synchronising for n in calls):
            raise self._unknown(q.of)
        q.of.text = f"{self.result}_{q.of.name}"
        without = "remove_cvref_t" if q.is_const else "remove_reference_t"
        self.before.append(f"using {q.of.text} = ::fr::metal::{without}<decltype({operand})>; ")

    def _declare(self, q: Parameter, argument: Node | None) -> None:
        """A parameter as a variable of its own."""
        text = self._argument(q, argument)
        name = q.name.text if q.name is not None else f"{self.result}_{q.number}"
        if q.kind == "pointer" and argument is not None:
            self._deduce(q, f"*({text})", argument)
        if q.of is None or q.of.text:
            self.before.append(f"{self.function.declaration(q, name)} = {text}; ")
            return
        if argument is None or argument.type == "initializer_list":
            raise self._unknown(q.of)
        self.before.append(f"{'const ' if q.is_const else ''}auto {name} = {text}; ")
        q.of.text = "auto"
        if q.of.used > 1:
            q.of.text = f"{self.result}_{q.of.name}"
            kind = f"::fr::metal::remove_cvref_t<decltype({name})>"
            self.before.append(f"using {q.of.text} = {kind}; ")

    def _stands_for_itself(self, q: Parameter, argument: Node | None) -> bool:
        """Put an argument that does not change meanwhile in place of a parameter."""
        root = _root(argument) if argument is not None else None
        if q.name is None or argument is None or root is None or q.name.captured:
            return False
        name, text = self.tree.text(root), self._argument(q, argument)
        declared = self.declared.get(name, [])
        if q.kind == "value" and name in self.lambdas and argument.type == "identifier":
            self._deduce(q, name, argument)
            q.name.text = name
            return True
        if q.kind == "value":
            kind = self.function.value_type(q)
            own = declared[0][0] if len(declared) == 1 and not declared[0][1] else ""
            own = own if declared else ATTRIBUTES.get(name, "")
            same = kind == re.sub(r"\bconst\b", "", own).strip() and argument.type == "identifier"
            passed = {p.name for p in parameters(self.p.spec)}  # of types that are not seen here
            if not same or name in self.changes | passed or q.name.name in self.function.altered:
                return False
            q.name.text = text
            return True
        if q.kind != "pointer" or not q.name.only_indexed or q.name.name in self.function.moved:
            return False
        arrays = bool(declared) and all(set(shape) == {"[]"} for _, shape in declared)
        constants = {name} | {n for n, _ in self.p.spec.template}
        if argument.type == "identifier":
            if not arrays and name in self.changes:
                return False
        elif not arrays or names_in(self.tree, argument) - constants:
            return False
        self._deduce(q, f"*({text})", argument)
        q.name.text = text if argument.type == "identifier" else f"({text})"
        return True

    def _refer(self, q: Parameter, argument: Node | None) -> None:
        """What a reference refers to stands in its place."""
        if argument is None or _root(argument) is None:
            raise NotSplittable(f"{self.name} is given a reference to what is no plain variable")
        text = self._argument(q, argument)
        if argument.type != "identifier":
            root = _root(argument)
            indices = [n for n in walk(argument) if n.type == "identifier" and n != root]
            others = set[str]()
            for other, a in zip(self.function.parameters, self.arguments, strict=False):
                if other.kind == "reference" and a != argument:
                    others |= names_in(self.tree, a) if a.type == "identifier" else set()
            moving = {self.tree.text(n) for n in indices} & self.changes
            if moving or names_in(self.tree, argument) & others:
                raise NotSplittable(f"{self.name} may change which variable it is given")
            if q.name is not None and q.name.captured:
                raise NotSplittable(f"a lambda of {self.name} captures a reference")
            text = f"({text})"
        self._deduce(q, f"({text})", argument)
        if q.name is not None:
            q.name.text = text

    def _refuse_changes(self, q: Parameter, argument: Node | None) -> None:
        """A reference to a constant may be a copy where the original stays as it is."""
        root = _root(argument) if argument is not None else None
        if q.name is not None and q.name.name in self.function.moved:
            raise NotSplittable(f"{self.name} asks for the address of what it is given")
        if root is None or argument is None:
            return
        name = self.tree.text(root)
        in_memory = self.effects and argument.type in _STEPS and self._is_memory(argument)
        if in_memory or name in self.changes:
            raise NotSplittable(f"{name} may change while {self.name} refers to it")


def _first(s: Node) -> Node | None:
    """The part of a statement that is evaluated first."""
    if s.type == "declaration":
        return declarators(s)[0]
    return s.child_by_field_name("initializer") if s.type == "for_statement" else None


def _root(node: Node) -> Node | None:
    """The variable of a path like ``a[i].x``, ``*p`` or ``(v)``; None where it is no such path.

    The indices of a path call nothing and read no memory, so that it always means one place.
    """
    while node.type != "identifier":
        if node.type == "parenthesized_expression" and len(node.named_children) == 1:
            node = node.named_children[0]
            continue
        inner = node.child_by_field_name("argument") if node.type in _STEPS else None
        if inner is None or node.children[0].type == "&":
            return None
        for child in node.named_children:
            if child != inner and any(_unsteady(n) for n in walk(child)):
                return None
        node = inner
    return node


def _unsteady(node: Node) -> bool:
    reads = node.type in _STEPS and not any(c.type == "." for c in node.children)
    return reads or node.type in _ACTS


def _addressed(tree: Tree, block: Node) -> set[str]:
    """The variables of a body that something may point or refer to."""
    found: set[str] = set()
    for node in walk(block):
        place: Node | None = None
        if node.type == "pointer_expression" and node.children[0].type == "&":
            place = node.child_by_field_name("argument")
        elif node.type == "reference_declarator" and node.parent is not None:
            place = node.parent.child_by_field_name("value")
        if place is not None:
            root = _root(place)
            named = [root] if root is not None else walk(place)
            found |= {tree.text(n) for n in named if n.type == "identifier"}
    return found


def _declarations(tree: Tree) -> dict[str, list[tuple[str, list[str]]]]:
    """How a body declares each of its names: the specifiers and the shape of the declarator."""
    found: dict[str, list[tuple[str, list[str]]]] = {}
    for node in walk(tree.block):
        for name, spec, shape in shapes(tree, node):
            found.setdefault(name, []).append((spec, shape))
    return found
