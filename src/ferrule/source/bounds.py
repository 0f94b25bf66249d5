"""Accesses to a kernel's arrays on CUDA that cannot leave them, whatever the index.

A GPU ends the whole process's CUDA for one access outside of memory. So a subscript of a buffer
becomes a checked one (`include/cuda_bounds.h`): loads give zero outside, stores and atomics do
nothing there. What a launch passes for that is each array's extent, from the facts of the call::

    float v = x[i + 1]; y[i] = v;
    float v = fr_b_x.fr_load(i + 1); fr_u_y.fr_put(i) = v;

Where the largest index is an expression of what is the same for all threads (places in the grid,
dims, sizes, the ends of loops), one comparison before the body stands for all of them: the body is
there twice, and with ``fr_inside`` the accesses by `fr_u_…` are plain ones.

Left as they are: what is reached by another pointer than the parameter (one that was computed or
cast, passed to a function, or the parameter itself where the body moves it), references, and bodies
that the parser does not understand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from tree_sitter import Node

from . import NotSplittable
from .cpp import Prepared
from .largest import Largest, Variable, number
from .macros import expand
from .syntax import Tree, call_arguments, callee, declared_name, function_definitions
from .uniform import WRITES_ARGUMENTS

_MOST_TWICE = 12_000  # characters of a body that may be there twice
_MOST_CONDITIONS = 12

_DEFAULT_CAPTURE = re.compile(r"\[\s*[&=]\s*[,\]]")
_LOOPS = frozenset({"for_statement", "while_statement", "do_statement", "for_range_loop"})
_SCOPES = _LOOPS | {
    "compound_statement", "if_statement", "switch_statement", "lambda_expression", "catch_clause",
}  # fmt: skip
_NOT_EVALUATED = frozenset({
    "sizeof_expression", "alignof_expression", "decltype", "template_argument_list", "noexcept",
})  # fmt: skip
_ELSEWHERE = frozenset({
    "function_definition", "struct_specifier", "class_specifier", "union_specifier",
})  # fmt: skip
_DECLARATIONS = frozenset({
    "declaration", "parameter_declaration", "optional_parameter_declaration", "for_range_loop",
    "condition_declaration",
})  # fmt: skip
_SHORT = frozenset({"&&", "||", "and", "or"})
# Of ``fr::``.
_OWN_BY_VALUE = frozenset({"pick", "fr_factor", "fr_as", "fr_bits", "fr_count"})


class Bounded(NamedTuple):
    """A body whose accesses are checked.

    Attributes:
        source: the body.
        views: declarations that stand before it.
        arrays: the arrays whose extents it asks for.
        fits: what tells for all threads whether accesses by ``fr_u_…`` are inside, an expression
            of `fr::launch`, the parameters and extents; ``""`` where there are none.
    """

    source: str
    views: str
    arrays: tuple[str, ...]
    fits: str


class _Around(NamedTuple):
    """What an access stands in: a loop, a branch, lambdas."""

    repeated: bool
    branch: bool
    lambdas: tuple[Node, ...]


class _Access(NamedTuple):
    """A subscript of a parameter: where it is, its index (None: 0), how it is used."""

    array: str
    node: Node
    at: Node | None
    use: str  # "fr_load", "fr_read", "fr_put", "fr_at" or "fr_cell"
    around: _Around


def bounded(p: Prepared, source: str) -> Bounded:
    """A body with its direct accesses checked.

    Args:
        source: the body of `p`, as other passes left it.
    """
    arrays = _arrays(p)
    if source == p.text.source and _in_macros(p, arrays):
        with suppress(NotSplittable):  # then what macros access stays as it is
            source = expand(p)
    tree = Tree(source, body=True)
    if tree.has_error or not arrays:
        return Bounded(source, "", (), "")
    try:
        return _Body(p, source, tree, arrays).bounded()
    except RecursionError:
        return Bounded(source, "", (), "")


def _arrays(p: Prepared) -> dict[str, tuple[int, str, bool]]:
    """The buffers: the number of each, its C++ type, and whether elements may lie before it."""
    kernel, spec = p.kernel, p.spec
    found = {}
    shifted = not kernel.ensure_row_contiguous
    for i, (name, one) in enumerate(zip(kernel.input_names, spec.inputs, strict=True)):
        if one.ndim and not one.value:
            found[name] = (i, f"const {one.dtype.metal}", shifted)
    for j, (name, dtype) in enumerate(zip(kernel.output_names, spec.outputs, strict=True)):
        ctype = f"atomic<{dtype.metal}>" if kernel.atomic_outputs else dtype.metal
        found[name] = (len(spec.inputs) + j, ctype, False)
    return found


def _in_macros(p: Prepared, arrays: Mapping[str, object]) -> bool:
    """Whether a macro that the body uses may access a buffer."""
    names = "|".join(map(re.escape, arrays))
    used = [text for name, text in p.text.macros.items() if name in p.text.source_words]
    return bool(names) and any(re.search(rf"\b({names})\b|\[|\*", text) for text in used)


class _Body(Largest):
    """The names and accesses of one body."""

    def __init__(
        self, p: Prepared, source: str, tree: Tree, arrays: Mapping[str, tuple[int, str, bool]]
    ) -> None:
        self.p, self.source, self.tree, self.arrays = p, source, tree, arrays
        self.parents: dict[int, Node] = {}
        self.uses: dict[int, Variable] = {}  # by where an identifier begins
        self.accesses: list[_Access] = []
        self.header = Tree(p.text.header, body=False)
        self.functions = dict(function_definitions(self.header))
        own = (*p.kernel.input_names, *p.kernel.output_names)
        self.parameters = {name: Variable(name) for name in own}
        self.template = dict(p.spec.template)
        # What a macro does to a variable, and which of two declarations holds, is not seen.
        self.opaque = bool(
            re.search(r"^[ \t]*#[ \t]*(?:if|el|define)", source, re.MULTILINE)
            or set(p.text.macros) & set(re.findall(r"\w+", source))
        )
        self.numbers = {
            name
            for name, one in zip(p.kernel.input_names, p.spec.inputs, strict=True)
            if one.value and one.dtype.kind in "iu"
        }

    # -- names -----------------------------------------------------------------------------------

    def _read(self) -> None:
        """Finds what each name means, which variables are written, and the accesses."""
        scopes: list[dict[str, Variable]] = [dict(self.parameters)]
        hidden, loops, branches = 0, 0, 0
        lambdas: list[Node] = []
        found: list[tuple[Node, _Around]] = []
        writes: list[Node] = []
        # Pairs of a node and whether it is left again. No recursion: sums may be as deep as long.
        waiting: list[tuple[Node, bool]] = [(self.tree.block, False)]
        while waiting:
            node, left = waiting.pop()
            kind = node.type
            if kind in _ELSEWHERE:
                continue
            step = -1 if left else 1
            hidden += step * (kind in _NOT_EVALUATED)
            loops += step * (kind in _LOOPS)
            branches += step * self._is_branch(node)
            if left:
                if kind in _SCOPES:
                    scopes.pop()
                if kind == "lambda_expression":
                    lambdas.pop()
                continue
            if kind in _SCOPES:
                scopes.append({})
            if kind == "lambda_expression":
                lambdas.append(node)
            if kind in _DECLARATIONS:
                self._declare(node, scopes[-1])
            elif kind == "lambda_capture_initializer" and node.named_child_count:
                name = self.tree.text(node.named_children[0])
                scopes[-1][name] = Variable(name, plain=False, written=True)
            elif kind in ("alias_declaration", "type_definition"):
                for one in node.named_children:
                    name = self.tree.text(one)
                    scopes[-1][name] = Variable(name, plain=False, written=True)
            elif kind == "identifier":
                name = self.tree.text(node)
                variable = next((s[name] for s in reversed(scopes) if name in s), None)
                if variable is not None:
                    self.uses[node.start_byte] = variable
            elif not hidden and kind in (
                "subscript_expression", "pointer_expression", "call_expression"
            ):  # fmt: skip
                found.append((node, _Around(loops > 0, branches > 0, tuple(lambdas))))
            if kind in (
                "assignment_expression",
                "update_expression",
                "pointer_expression",
            ) or kind in ("call_expression", "declaration"):
                writes.append(node)
            waiting.append((node, True))
            for child in reversed(node.children):
                self.parents[child.id] = node
                waiting.append((child, False))
        for node in writes:
            self._note_writes(node)
        taken: set[int] = set()
        for node, around in found:
            if node.type == "call_expression":
                self._atomic(node, around, taken)
        for node, around in found:
            if node.type != "call_expression" and node.id not in taken:
                self._access(node, around)

    def _is_branch(self, node: Node) -> bool:
        """Whether a node is carried out on a condition alone."""
        parent = self.parents.get(node.id)
        if parent is None:
            return False
        parts: tuple[str, ...]
        if parent.type in ("if_statement", "conditional_expression"):
            parts = ("consequence", "alternative")
        elif parent.type == "binary_expression" and parent.children[1].type in _SHORT:
            parts = ("right",)
        elif parent.type == "switch_statement":
            parts = ("body",)
        else:
            return False
        found = (parent.child_by_field_name(part) for part in parts)
        return any(one is not None and one.id == node.id for one in found)

    def _declare(self, node: Node, scope: dict[str, Variable]) -> None:
        parent = self.parents.get(node.id)
        loop = parent if parent is not None and parent.type == "for_statement" else None
        kind = node.child_by_field_name("type")
        written = node.type != "declaration"
        for d in node.children_by_field_name("declarator"):
            inner = d.child_by_field_name("declarator") if d.type == "init_declarator" else d
            value = d.child_by_field_name("value")
            if inner is not None and inner.type == "structured_binding_declarator":
                for one in inner.named_children:
                    scope[self.tree.text(one)] = Variable(self.tree.text(one), written=True)
                continue
            name = declared_name(d)
            if name is None:
                continue
            first = node.children_by_field_name("declarator")[0]
            specifiers = self.tree.data[node.start_byte : first.start_byte].decode()
            plain = inner is not None and inner.type == "identifier"
            scope[self.tree.text(name)] = Variable(
                self.tree.text(name), specifiers if kind is not None else "", value, plain,
                not plain, written, loop,
            )  # fmt: skip

    def _variable(self, node: Node | None) -> Variable | None:
        """The variable that an expression names, or is a part of."""
        while node is not None:
            if node.type == "parenthesized_expression" and node.named_child_count == 1:
                node = node.named_children[0]
            elif node.type in ("field_expression", "subscript_expression"):
                inner = node.child_by_field_name("argument")
                if inner is not None and node.type == "subscript_expression":
                    found = self._variable(inner)
                    # What a pointer points to is not the pointer.
                    if found is not None and (found.name in self.arrays or found.pointer):
                        return None
                node = inner
            elif node.type == "call_expression":  # of a vector's components: `p.swz(…)`
                function = node.child_by_field_name("function")
                if function is None or function.type != "field_expression":
                    break
                node = function
            else:
                break
        if node is None or node.type != "identifier":
            return None
        return self.uses.get(node.start_byte)

    def _note_writes(self, node: Node) -> None:
        targets: list[Node | None] = []
        if node.type == "assignment_expression":
            targets = [node.child_by_field_name("left")]
        elif node.type == "update_expression":
            targets = [node.child_by_field_name("argument")]
        elif node.type == "pointer_expression":
            if node.children[0].type == "&":
                targets = [node.child_by_field_name("argument")]
        elif node.type == "declaration":
            for d in node.children_by_field_name("declarator"):
                inner = d.child_by_field_name("declarator")
                if inner is not None and inner.type == "reference_declarator":
                    targets.append(d.child_by_field_name("value"))
        elif self._by_reference(node):
            targets = list(call_arguments(node))
        for target in targets:
            variable = self._variable(target)
            if variable is None:
                continue
            head = self._head_of(node)
            if variable.loop is not None and head is not None and head.id == variable.loop.id:
                variable.updates.append(node)
            else:
                variable.written = True

    def _head_of(self, node: Node) -> Node | None:
        """The loop whose head's last part an expression is."""
        parent = self.parents.get(node.id)
        while parent is not None and parent.type == "comma_expression":
            node, parent = parent, self.parents.get(parent.id)
        if parent is None or parent.type != "for_statement":
            return None
        update = parent.child_by_field_name("update")
        return parent if update is not None and update.id == node.id else None

    def _by_reference(self, call: Node) -> bool:
        """Whether a function may take arguments by reference: of the header, a lambda, a macro."""
        function = call.child_by_field_name("function")
        if function is None or function.type in ("primitive_type", "sized_type_specifier"):
            return False
        name = callee(self.tree, call)
        text = self.tree.text(function)
        if text.startswith("::fr::"):
            return name not in _OWN_BY_VALUE
        if name in WRITES_ARGUMENTS:
            return True
        own = self.functions.get(name)
        if own is not None:
            declarator = own.child_by_field_name("declarator")
            return declarator is None or "&" in self.header.text(declarator)
        variable = self.uses.get(function.start_byte) if function.type == "identifier" else None
        if variable is not None:  # a lambda
            head = variable.value.child_by_field_name("declarator") if variable.value else None
            return head is None or "&" in self.tree.text(head)
        return name in self.p.text.macros

    # -- accesses --------------------------------------------------------------------------------

    def _buffer(self, node: Node | None) -> str | None:
        """The parameter that an expression is the name of, if the body does not move it."""
        if node is None or node.type != "identifier":
            return None
        variable = self.uses.get(node.start_byte)
        if variable is None or variable.written or variable.name not in self.arrays:
            return None
        return variable.name if self.parameters.get(variable.name) is variable else None

    def _place(self, node: Node) -> tuple[str, Node | None] | None:
        """The buffer and index of ``x[i]``, ``*x`` and ``*(x + i)``."""
        inner = node.child_by_field_name("argument")
        if node.type == "subscript_expression":
            name, indices = self._buffer(inner), node.child_by_field_name("indices")
            given = [] if indices is None else indices.named_children
            given = [one for one in given if one.type != "comment"]
            if name is None or len(given) != 1 or given[0].type == "initializer_list":
                return None
            return name, given[0]
        if node.type != "pointer_expression" or node.children[0].type != "*":
            return None
        name = self._buffer(inner)
        if name is not None:
            return name, None
        if inner is not None and inner.type == "parenthesized_expression":
            return self._moved(inner.named_children[0]) if inner.named_child_count == 1 else None
        return None

    def _moved(self, node: Node) -> tuple[str, Node] | None:
        """The buffer and index of ``x + i``."""
        right = node.child_by_field_name("right")
        if node.type != "binary_expression" or node.children[1].type != "+" or right is None:
            return None
        name = self._buffer(node.child_by_field_name("left"))
        return None if name is None else (name, right)

    def _atomic(self, call: Node, around: _Around, taken: set[int]) -> None:
        """The access of an atomic function."""
        name, given = callee(self.tree, call), call_arguments(call)
        if not (name.startswith("atomic_") and name.endswith("_explicit") and given):
            return
        if not self.p.kernel.atomic_outputs or name in self.functions:
            return
        first, place = given[0], None
        if first.type == "pointer_expression" and first.children[0].type == "&":
            inner = first.child_by_field_name("argument")
            while inner is not None and inner.type == "parenthesized_expression":
                inner = inner.named_children[0]
            if inner is not None and inner.type == "subscript_expression":
                place = self._place(inner)
                taken.add(inner.id)
        elif first.type == "identifier":
            own = self._buffer(first)
            place = None if own is None else (own, None)
        else:
            place = self._moved(first)
        if place is not None and place[0] in self.p.kernel.output_names:
            self.accesses.append(_Access(place[0], first, place[1], "fr_cell", around))

    def _access(self, node: Node, around: _Around) -> None:
        place = self._place(node)
        if place is None:
            return
        name, index = place
        output = name in self.p.kernel.output_names
        if output and self.p.kernel.atomic_outputs:
            return
        use = self._use(node, output)
        if use == "fr_load" and around.branch:
            use = "fr_read"
        if use:
            self.accesses.append(_Access(name, node, index, use, around))

    def _use(self, node: Node, output: bool) -> str:
        """What becomes of an access; ``""`` where its address may be kept."""
        direct, member = True, False
        while True:
            parent = self.parents[node.id]
            kind = parent.type
            if kind == "parenthesized_expression":
                pass
            elif kind == "field_expression":
                direct, member = False, True
            elif kind == "conditional_expression":
                condition = parent.child_by_field_name("condition")
                if condition is not None and condition.id == node.id:
                    return "fr_load"
                direct = False
            elif kind == "comma_expression":
                right = parent.child_by_field_name("right")
                if right is None or right.id != node.id:
                    return "fr_load"
                direct = False
            else:
                break
            node = parent
        if kind in ("assignment_expression", "update_expression"):
            target = parent.child_by_field_name(
                "left" if kind == "assignment_expression" else "argument"
            )
            if target is not None and target.id == node.id:
                return "fr_put" if direct else "fr_at" if member and output else ""
            return "fr_load"
        if kind == "pointer_expression":
            return "fr_load" if parent.children[0].type != "&" else ""
        if kind in ("subscript_expression", "lambda_capture_initializer"):
            base = parent.child_by_field_name("argument")
            return "" if base is None or base.id == node.id else "fr_load"
        if kind == "init_declarator":
            declarator = parent.child_by_field_name("declarator")
            refers = declarator is not None and declarator.type == "reference_declarator"
            return "" if refers else "fr_load"
        if kind == "cast_expression":
            to = parent.child_by_field_name("type")
            return "" if to is not None and "&" in self.tree.text(to) else "fr_load"
        if kind == "argument_list":
            call = self.parents[parent.id]
            function = call.child_by_field_name("function")
            if function is not None and re.search(r"&\s*>", self.tree.text(function)):
                return ""
            if output and call.type == "call_expression" and self._by_reference(call):
                return "fr_at"
        if kind == "call_expression":  # a method of what is there
            return "fr_at" if output else "fr_load"
        return "fr_load"

    # -- the text --------------------------------------------------------------------------------

    def bounded(self) -> Bounded:
        """The body with its accesses checked."""
        self._read()
        chosen = self._chosen()
        edits: list[tuple[int, int, str]] = []
        views: dict[str, None] = {}
        captured: dict[int, tuple[Node, dict[str, None]]] = {}
        for one in self.accesses:
            view = f"fr_{'u' if one.node.id in chosen else 'b'}_{one.array}"
            views[view] = None
            begin = f"{view}.{one.use}("
            if one.at is None:
                edits.append(self._replaced(one.node.start_byte, one.node.end_byte, f"{begin}0)"))
            else:
                edits.append(self._replaced(one.node.start_byte, one.at.start_byte, begin))
                edits.append(self._replaced(one.at.end_byte, one.node.end_byte, ")"))
            for around in one.around.lambdas:
                captures = around.child_by_field_name("captures")
                if captures is not None and not _DEFAULT_CAPTURE.match(self.tree.text(captures)):
                    captured.setdefault(captures.id, (captures, {}))[1][view] = None
        for captures, names in captured.values():
            comma = ", " if captures.named_child_count else ""
            at = captures.end_byte - 1
            edits.append((at, at, comma + ", ".join(names)))
        declared = []
        for view in views:
            name = view[5:]
            _, ctype, shifted = self.arrays[name]
            known = "fr_inside" if view.startswith("fr_u_") else "false"
            kind = f"const ::fr::fr_view<{ctype}, {str(shifted).lower()}>"
            declared.append(f"{kind} {view}({name}, fr_e_{name}, {known});")
        conditions = dict.fromkeys(chosen.values())
        fits = " && ".join(f"({most}).fr_within(fr_e_{name})" for name, most in conditions)
        used = tuple(name for name in self.arrays if {f"fr_b_{name}", f"fr_u_{name}"} & set(views))
        return Bounded(self.tree.edited(edits), " ".join(declared), used, fits)

    def _replaced(self, start: int, end: int, text: str) -> tuple[int, int, str]:
        """An edit that leaves the lines where they are."""
        return start, end, text + "\n" * self.tree.data[start:end].count(b"\n")

    def _chosen(self) -> dict[int, tuple[str, str]]:
        """The accesses that one comparison stands for: their arrays, and the largest index.

        Worth it is that where accesses are repeated, where the compiler may join neighbours, and
        where there are no others.
        """
        if self.opaque or len(self.source) > _MOST_TWICE:
            return {}
        found: dict[int, tuple[str, str]] = {}
        worth, others = False, False
        for one in self.accesses:
            most = number(0) if one.at is None else self.most(one.at)
            absent = self.template.get(f"has_{one.array}", 1) in (0, False)
            # To find out about a product of sizes costs more than to check one access.
            dear = most is not None and (len(most.leaves) > 1 or most.product)
            if most is None or absent or self.arrays[one.array][2] or (
                dear and not one.around.repeated
            ):  # fmt: skip
                others = True
                continue
            found[one.node.id] = (one.array, most.text)
            worth = worth or one.around.repeated or most.scaled
        many = len(set(found.values())) > _MOST_CONDITIONS
        return {} if many or not (worth or not others) else found
