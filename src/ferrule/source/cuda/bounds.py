"""Accesses to a kernel's arrays on CUDA that cannot leave them, whatever the index.

A GPU ends the whole process's CUDA for one access outside of memory. So a subscript of a buffer
becomes a checked one (`include/cuda_bounds.h`): loads give zero outside, stores and atomics do
nothing there. What a launch passes for that is each array's extent, from the facts of the call::

    float v = x[i + 1]; y[i] = v;
    float v = fr_b_x.fr_load(i + 1); fr_u_y.fr_put(i) = v;

Where the largest index is an expression of what is the same for all threads (places in the grid,
dims, sizes, the ends of loops), one comparison before the body stands for all of them: the body is
there twice, and with ``fr_inside`` the accesses by `fr_u_…` are plain ones.

Where launches are checked on the GPU itself, accesses outside are counted by line, too
(`include/cuda_counted.h`), and so are NaN and infinities that are stored.

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

from ...spec import Spec
from .. import NotSplittable, described
from ..accesses.model import Accesses
from ..accesses.read import accesses
from ..cpp import Prepared
from ..syntax import (
    Edit,
    Tree,
    call_arguments,
    callee,
    field,
    part,
    plain_subscripts,
    unbracketed,
)
from .largest import Largest, Most, TooMuch, largest_of
from .reads import refers
from .variables import Around, Variables

_MOST_TWICE = 12_000  # characters of a body that may be there twice
_MOST_CONDITIONS = 12
_MOST_KNOWN = 64
_known: dict[Spec, Accesses] = {}

_PLACE = "&fr_g.threadgroup_position_in_grid, &fr_p"
_DEFAULT_CAPTURE = re.compile(r"\[\s*[&=]\s*[,\]]")


class Bounded(NamedTuple):
    """A body whose accesses are checked.

    Attributes:
        source: the body.
        views: declarations that stand before it.
        arrays: the arrays whose extents it asks for.
        fits: what tells for all threads whether accesses by ``fr_u_…`` are inside, an expression
            of `fr::launch`, the parameters and extents; ``""`` where there are none.
        once: it has divisions, so that one thread should find it out for all of its block.
        whole: nothing but these accesses touches an array.
    """

    source: str
    views: str = ""
    arrays: tuple[str, ...] = ()
    fits: str = ""
    once: bool = False
    whole: bool = False


class _Access(NamedTuple):
    """A subscript of a parameter: where it is, its index (None: 0), how it is used."""

    array: str
    node: Node
    subscript: Node | None
    use: str  # "fr_load", "fr_read", "fr_put", "fr_at" or "fr_cell"
    around: Around


def bounded(p: Prepared, source: str, *, counted: bool = False) -> Bounded:
    """A body with its direct accesses checked.

    Args:
        source: the body of `p`, as other passes left it.
        counted: whether what is outside is counted by line.
    """
    arrays = _arrays(p)
    if source == p.text.source and _in_macros(p, arrays):
        with suppress(NotSplittable):  # then what macros access stays as it is
            source = p.expanded()
    tree = Tree(source, body=True)
    if tree.has_error or not arrays:
        return Bounded(source)
    tree = plain_subscripts(tree, arrays)
    source = tree.edited(())
    try:
        return _Accesses(p, source, tree, arrays).bounded(counted)
    except RecursionError:
        return Bounded(source)


def _arrays(p: Prepared) -> dict[str, tuple[int, str, bool]]:
    """The buffers: the number of each, its C++ type, and whether elements may lie before it."""
    kernel, spec = p.kernel, p.spec
    shifted = not kernel.ensure_row_contiguous
    arrays = {
        name: (i, f"const {input_.dtype.metal}", shifted)
        for i, (name, input_, _) in enumerate(described(spec))
        if input_.ndim and not input_.value
    }
    outputs = zip(kernel.output_names, spec.outputs, strict=True)
    for i, (name, dtype) in enumerate(outputs, len(spec.inputs)):
        ctype = f"atomic<{dtype.metal}>" if kernel.atomic_outputs else dtype.metal
        arrays[name] = (i, ctype, False)
    return arrays


def _in_macros(p: Prepared, arrays: Mapping[str, object]) -> bool:
    """Whether a macro that the body uses may access a buffer."""
    names = "|".join(map(re.escape, arrays))
    macro_texts = [text for name, text in p.text.macros.items() if name in p.text.source_words]
    return bool(names) and any(re.search(rf"\b({names})\b|\[|\*", text) for text in macro_texts)


class _Accesses(Variables):
    """The accesses of one body."""

    def find_accesses(self) -> None:
        """Find the accesses that can be checked: atomics first, the others in the text's order."""
        self.read()
        self.accesses: list[_Access] = []
        atomic_nodes: set[int] = set()
        for node, around in self.candidates:
            if node.type == "call_expression":
                self._find_atomic(node, around, atomic_nodes)
        for node, around in self.candidates:
            if node.type != "call_expression" and node.id not in atomic_nodes:
                self._find_access(node, around)

    def _buffer(self, node: Node) -> str | None:
        """The parameter that an expression is the name of, if the body does not move it."""
        variable = self.uses.get(node.start_byte) if node.type == "identifier" else None
        if variable is None or variable.written or variable.name not in self.arrays:
            return None
        return variable.name if self.parameters.get(variable.name) is variable else None

    def _element(self, node: Node) -> tuple[str, Node | None] | None:
        """The buffer and index of ``x[i]``, ``*x`` and ``*(x + i)``."""
        inner = part(node, "argument")
        name = self._buffer(inner)
        if node.type == "subscript_expression":
            indices = part(node, "indices").named_children
            if name is None or len(indices) != 1 or indices[0].type == "initializer_list":
                return None
            return name, indices[0]
        if node.children[0].type != "*":
            return None
        if name is not None:
            return name, None
        bracketed = inner.type == "parenthesized_expression" and inner.named_child_count == 1
        return self._offset_element(inner.named_children[0]) if bracketed else None

    def _offset_element(self, node: Node) -> tuple[str, Node] | None:
        """The buffer and index of ``x + i``."""
        if node.type != "binary_expression" or node.children[1].type != "+":
            return None
        name = self._buffer(part(node, "left"))
        return None if name is None else (name, part(node, "right"))

    def _find_atomic(self, call: Node, around: Around, atomic_nodes: set[int]) -> None:
        """The access of an atomic function."""
        name, arguments = callee(self.tree, call), call_arguments(call)
        if not (name.startswith("atomic_") and name.endswith("_explicit") and arguments):
            return
        if not self.p.kernel.atomic_outputs or name in self.reads.header.functions:
            return
        first, element = arguments[0], None
        if first.type == "pointer_expression" and first.children[0].type == "&":
            inner = unbracketed(part(first, "argument"))
            if inner.type == "subscript_expression":
                element = self._element(inner)
                atomic_nodes.add(inner.id)
        elif first.type == "identifier":
            buffer = self._buffer(first)
            element = None if buffer is None else (buffer, None)
        else:
            element = self._offset_element(first)
        if element is not None and element[0] in self.p.kernel.output_names:
            self.accesses.append(_Access(element[0], first, element[1], "fr_cell", around))

    def _find_access(self, node: Node, around: Around) -> None:
        element = self._element(node)
        output = element is not None and element[0] in self.p.kernel.output_names
        if element is None or (output and self.p.kernel.atomic_outputs):
            return
        use = self._use(node, output)
        if use == "fr_load" and around.branch:
            use = "fr_read"
        if use:
            self.accesses.append(_Access(element[0], node, element[1], use, around))

    def _use(self, node: Node, output: bool) -> str:
        """The method that replaces an access; ``""`` where its address may be kept."""
        direct, member = True, False
        while True:
            parent = self.parents[node.id]
            kind = parent.type
            if kind == "field_expression":
                direct, member = False, True
            elif kind in ("conditional_expression", "comma_expression"):
                # What is not the value of the whole is read.
                read = field(parent, "condition") or part(parent, "left")
                if read.id == node.id:
                    return "fr_load"
                direct = False
            elif kind != "parenthesized_expression":
                break
            node = parent
        if kind not in ("assignment_expression", "update_expression"):
            return self._passed(node, parent, output)
        if (field(parent, "left") or part(parent, "argument")).id != node.id:
            return "fr_load"
        if not direct:
            return "fr_at" if member and output else ""
        use = self._use(parent, output)  # of what it gives: `(y[i] = 3) += v`
        return {"fr_load": "fr_put", "fr_put": "fr_at"}.get(use, use)

    def _passed(self, node: Node, parent: Node, output: bool) -> str:
        """Like `_use`, of what is not written where it stands."""
        kind = parent.type
        if kind == "call_expression":  # a method of what is there
            return "fr_at" if output else "fr_load"
        keeps = False
        if kind == "pointer_expression":
            keeps = parent.children[0].type == "&"
        elif kind == "subscript_expression":
            keeps = part(parent, "argument").id == node.id
        elif kind == "lambda_capture_initializer":
            keeps = refers(parent)
        elif kind == "cast_expression":
            keeps = "&" in self.tree.text(field(parent, "type"))
        elif kind == "return_statement":
            result = self.reads.result_type(parent)
            keeps = "&" in result or "decltype" in result
        elif kind == "argument_list" and self.parents[parent.id].type == "call_expression":
            return self._argument(self.parents[parent.id], output)
        elif kind in ("init_declarator", "initializer_list", "argument_list"):
            return self._initialises(parent, output)
        return "" if keeps else "fr_load"

    def _argument(self, call: Node, output: bool) -> str:
        """The method for an argument of a function, which may give back where it found it."""
        if re.search(r"&\s*>", self.tree.text(part(call, "function"))):
            return ""
        if self.reads.takes_values(call) is not False:
            return "fr_load"
        head = field(self.reads.header.functions.get(callee(self.tree, call)), "declarator")
        address = head is not None and (
            head.type in ("pointer_declarator", "reference_declarator")
            or "->" in self.p.header.text(head)
        )
        return "fr_at" if output or address else "fr_load"

    def _initialises(self, node: Node, output: bool) -> str:
        """The method for what a variable or a temporary object is made of."""
        listed = node.type != "init_declarator"
        while node.type in ("initializer_list", "argument_list"):
            node = self.parents[node.id]
        declarator = field(node, "declarator")
        if declarator is not None and declarator.type == "reference_declarator":
            return ""
        owner = self.parents[node.id] if node.type == "init_declarator" else node
        type_name = self.tree.text(field(owner, "type"))
        if output and "decltype" in type_name:
            return ""
        if not listed or self.reads.is_builtin(type_name):
            return "fr_load"
        if self.reads.keep_references or "&" in type_name:
            return ""
        return "fr_at" if output else "fr_load"  # its constructor may write to it

    # -- the text --------------------------------------------------------------------------------

    def bounded(self, counted: bool) -> Bounded:
        """The body with its accesses checked."""
        self.find_accesses()
        chosen = {} if counted else self._compared_once()
        edits: list[Edit] = []
        views: dict[str, None] = {}
        captured: dict[int, tuple[Node, dict[str, None]]] = {}
        for access in self.accesses:
            view = f"fr_{'u' if access.node.id in chosen else 'b'}_{access.array}"
            views[view] = None
            begin = f"{view}.{'fr_on(__LINE__).' if counted else ''}{access.use}("
            start, end = access.node.start_byte, access.node.end_byte
            if access.subscript is None:
                edits.append(self._on_its_lines(start, end, f"{begin}0)"))
            else:
                edits.append(self._on_its_lines(start, access.subscript.start_byte, begin))
                edits.append(self._on_its_lines(access.subscript.end_byte, end, ")"))
            for around in access.around.lambdas:
                captures = part(around, "captures")
                if not _DEFAULT_CAPTURE.match(self.tree.text(captures)):
                    captured.setdefault(captures.id, (captures, {}))[1][view] = None
        for captures, names in captured.values():
            comma = ", " if captures.named_child_count else ""
            position = captures.end_byte - 1
            edits.append((position, position, comma + ", ".join(names)))
        declared = []
        for view in views:
            name = view[5:]
            _, ctype, shifted = self.arrays[name]
            inside = "fr_inside" if view.startswith("fr_u_") else "false"
            kind = f"const ::fr::fr_view<{ctype}, {str(shifted).lower()}>"
            spot = f", {{{self.arrays[name][0]}, 0, {_PLACE}}}" if counted else ""
            declared.append(f"{kind} {view}({name}, fr_e_{name}, {inside}{spot});")
        conditions = dict.fromkeys((name, most.text) for name, most in chosen.values())
        fits = " && ".join(f"({text}).fr_within(fr_e_{name})" for name, text in conditions)
        viewed = {view[5:] for view in views}
        arrays = tuple(name for name in self.arrays if name in viewed)
        once = any(most.divided for _, most in chosen.values())
        uses = [v for v in self.uses.values() if self.parameters.get(v.name) is v]
        whole = sum(v.name in self.arrays for v in uses) == len(self.accesses)
        source = self.tree.edited(edits)
        return Bounded(source, " ".join(declared), arrays, fits, once, whole)

    def _on_its_lines(self, start: int, end: int, text: str) -> Edit:
        """An edit that leaves the lines where they are."""
        return start, end, text + "\n" * self.tree.data[start:end].count(b"\n")

    def _compared_once(self) -> dict[int, tuple[str, Most]]:
        """The accesses that one comparison covers: their arrays, and the largest index.

        Worth it is that where accesses are repeated, where the compiler may join neighbours, and
        where there are no others.
        """
        if not self.accesses or len(self.source) > _MOST_TWICE:
            return {}
        chosen: dict[int, tuple[str, Most]] = {}
        known: list[tuple[_Access, Most]] = []
        largest = self._largest()
        template = dict(self.p.spec.template)
        for access in self.accesses:
            most = largest.get(access.node.id)
            absent = template.get(f"has_{access.array}", 1) in (0, False)
            if most is not None and not absent and not self.arrays[access.array][2]:
                known.append((access, most))
        repeated = [most.leaves for access, most in known if access.around.repeated]
        worth = bool(repeated)
        for access, most in known:
            # To find out about a product of sizes costs more than to check one access, unless that
            # is found out anyway.
            dear = len(most.leaves) > 1 or most.product
            if dear and not access.around.repeated and not any(map(most.leaves.issubset, repeated)):
                continue
            chosen[access.node.id] = (access.array, most)
            worth = worth or most.scaled
        if len(set(chosen.values())) > _MOST_CONDITIONS:  # then those that are repeated alone
            again = {access.node.id for access, _ in known if access.around.repeated}
            chosen = {node: each for node, each in chosen.items() if node in again}
        many = len(set(chosen.values())) > _MOST_CONDITIONS
        return {} if many or not (worth or len(chosen) == len(self.accesses)) else chosen

    def _largest(self) -> dict[int, Most]:
        """The largest indices that are known, of all ways to reach an access, by its node's id.

        The body that was analysed is the author's. Where other passes have changed the text since,
        a line is all that tells where an access is: then all of the line must be known.
        """
        found = _found(self.p)
        if any(each.hides for each in found.unsupported):
            return {}
        same = found.text == self.tree.data
        starts: dict[tuple[int, str], set[int]] = {}
        known: dict[tuple[int, str], dict[Most | None, None]] = {}
        largest = Largest(self._given())
        try:
            for each in found.accesses:
                if each.array.space == "device" and each.where == "source":
                    place = each.start if same else each.line, each.array.name
                    starts.setdefault(place, set()).add(each.start)
                    known.setdefault(place, {})[largest.of(each)] = None
        except (TooMuch, RecursionError):
            return {}
        here: dict[tuple[int, str], list[int]] = {}
        for access in self.accesses:
            node = access.node
            place = node.start_byte if same else node.start_point[0] + 1, access.array
            here.setdefault(place, []).append(node.id)
        return {
            node_id: most
            for place, ids in here.items()
            if len(ids) <= len(starts.get(place, ()))
            and (most := largest_of(known[place])) is not None
            for node_id in ids
        }

    def _given(self) -> dict[str, str]:
        """The numbers and sizes that a launch gives, as terms and as C++ name them."""
        names = [n for n, i, _ in described(self.p.spec) if i.value and i.dtype.kind in "iu"]
        for name, input_, parts in described(self.p.spec):
            if "shape" in parts:
                names += [f"{name}_shape[{d}]" for d in range(input_.ndim)]
        return {name: name for name in names}


def _found(p: Prepared) -> Accesses:
    """What the body of a kernel accesses, found once for all forms of its launches."""
    found = _known.get(p.spec)
    if found is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        found = _known[p.spec] = accesses(p, wraps=True)
    return found
