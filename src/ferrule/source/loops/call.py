"""A call of a function of the header, and where it stands in a body."""

from __future__ import annotations

from collections.abc import Iterator

from tree_sitter import Node

from ..cpp import NotSplittable
from ..syntax import Tree, call_arguments, callee, field, kinds, part, unbracketed, walk
from .assignments import takes_address
from .declarations import declarations
from .functions import HeaderFunction, one_line
from .header import Functions
from .statements import ancestors

STEPS = ("subscript_expression", "field_expression", "pointer_expression")
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


class HeaderCall:
    """A call of a function of the header, and the body that it stands in.

    Attributes:
        node: the call.
        declared: how the body declares each of its names.
        lambdas: the body's lambdas, by their names.
        result: the variable that holds what the function returns.
        path: what is around the call, from itself to the statement that it is moved before.
        effects: the function writes to memory, or waits for others.
    """

    def __init__(self, functions: Functions, tree: Tree, call: Node, number: int) -> None:
        self.functions = functions
        self.p = functions.p
        self.tree = tree
        self.node = call
        self.name = callee(tree, call)
        self.declared = declarations(tree)
        if self.name in self.declared:
            raise NotSplittable(f"{self.name} is a function and a variable")
        self.lambdas = {
            tree.text(name): node
            for node in kinds(tree.block, "lambda_expression")
            if node.parent is not None and node.parent.type == "init_declarator"
            for name in node.parent.children_by_field_name("declarator")
        }
        self.arguments = call_arguments(call)
        self.function: HeaderFunction = functions.find(self.name, len(self.arguments))
        self.result = f"fr_h{number}"
        self.path = list(self._path())
        self.statement = self.path[-1]
        self.effects = functions.effects(self.function)

    def text(self, start: int, end: int) -> str:
        """The body's text between two bytes, on one line."""
        return one_line(self.tree.data[start:end].decode())

    def is_memory(self, node: Node) -> bool:
        """Whether an expression reads what other threads, or writes through pointers, change."""
        root = root_of(node)
        if root is None:
            return True
        name = self.tree.text(root)
        for spec, shape in self.declared.get(name, []):
            if {"thread_local", "auto"} & set(spec.split()) or {"*", "*const", "&"} & set(shape):
                return True
        return name not in self.declared and name in self.p.kernel.output_names

    def _path(self) -> Iterator[Node]:
        node = self.node
        yield node
        for parent in ancestors(self.node):
            kind, first = parent.type, field(parent, "left") == node
            if kind in _STUCK:
                raise NotSplittable(_STUCK[kind].format(self.name))
            if kind == "conditional_expression" and field(parent, "condition") != node:
                raise NotSplittable(f"a branch of ?: calls {self.name}")
            if kind == "binary_expression" and not first:
                operator = parent.children[1].type
                if operator in ("&&", "||"):
                    raise NotSplittable(f"{self.name} is called behind {operator}")
            if kind == "assignment_expression" and first:
                raise NotSplittable(f"the target of an assignment calls {self.name}")
            if kind == "condition_clause" and field(parent, "initializer") is not None:
                raise NotSplittable("a condition declares a variable")
            node = parent
            yield node
            if kind.endswith("_statement") or kind == "declaration":
                break
        if any(around.type == "lambda_expression" for around in ancestors(node)):
            raise NotSplittable(f"a lambda calls {self.name}")

    def lines(self, start: int, end: int) -> str:
        """The line breaks of the body between two bytes."""
        return "\n" * self.tree.data[start:end].count(b"\n")


def root_of(node: Node | None) -> Node | None:
    """The variable of a path like ``a[i].x``, ``*p`` or ``(v)``; None where it is no such path.

    The indices of a path call nothing and read no memory, so that it always means one place.
    """
    while node is not None and node.type != "identifier":
        node = unbracketed(node)
        if node.type in STEPS and not takes_address(node):
            inner = part(node, "argument")
            indices = (child for child in node.named_children if child != inner)
            steady = not any(_unsteady(n) for child in indices for n in walk(child))
            node = inner if steady else None
        elif node.type != "identifier":
            return None
    return node


def _unsteady(node: Node) -> bool:
    reads = node.type in STEPS and not any(c.type == "." for c in node.children)
    return reads or node.type in _ACTS
