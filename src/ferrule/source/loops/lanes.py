"""Loops over lanes: runs of statements, what they declare, and what a lane keeps between them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass

from tree_sitter import Node

from ..cpp import NotSplittable, attribute
from ..syntax import Tree, kinds, operands, part, unbracketed, walk
from .body import WORD, Variable, line_of
from .declarations import declared_within
from .nest import ANY, Nest
from .statements import jumps
from .uniform import LANE_ATTRIBUTES, POSITION_TEXTS, Uniformity

Replaced = dict[int, str]  # by the id of a node, the text that stands for it
AT = '#line 1 "ferrule"\n'
# What is prepared before a loop, by the letter in its name: a divisor, an array's element.
_CONSTANTS = {"d": "const auto", "p": "auto* const"}
_CHANGE = re.compile(r"(?<![\w.])(\w+)\s*(?:(?:[-+*/%&|^]|<<|>>)?=(?!=)|\+\+|--)")
_NOT_PREPARED = ("lambda_expression", "preproc_def", "preproc_function_def")


@dataclass(frozen=True)
class Piece:
    """A statement of a loop over lanes.

    Attributes:
        text: the statement.
        line: of the author's text.
        declared: the variables that it declares, each with the declaration of its type, in which
            ``@`` stands for that of its storage.
        kept: the statement where its variables outlive the loop, in an element for each lane.
        exits: a lane may leave in it.
    """

    text: str
    line: int
    declared: tuple[tuple[Variable, str], ...] = ()
    kept: str = ""
    exits: bool = False


class Lanes:
    """Writes statements as loops over the lanes of a unit of work.

    Statements wait until something stands outside the loops over lanes, and become one loop then.

    Args:
        uniformity: what is known at the place that is written.
        jump: the text of a lane's jump out of a loop over lanes, by its kind.
    """

    def __init__(self, uniformity: Uniformity, jump: Callable[[Nest, str], str]) -> None:
        self.uniformity, self.scopes = uniformity, uniformity.scopes
        self.body, self.tree = uniformity.body, uniformity.tree
        self._jump = jump
        self._out: list[str] = []
        self._count = 0
        self._pending: list[Piece] = []
        # Constants of the pending statements: the name of each, and the line that it is of.
        self._constants: dict[str, dict[str, tuple[str, Node]]] = {k: {} for k in _CONSTANTS}
        self._meant: dict[int | str, dict[str, Variable | None]] = {}  # by lambda: its words
        # How many lanes there are (fewer in some rounds of a loop that lanes go through) and
        # the last one's number; nothing where lanes are not counted.
        self.count, self.end = "fr_n", "fr_n - 1u"
        self.fetches = False  # memory for a later round is asked for
        self._counts: dict[
            int | str, str
        ] = {}  # by linear variable: where the last lane's is known
        self._of_lane: dict[int | str, str] = {}  # by linear variable: its value in a lane
        self._counters: dict[int | str, str] = {}  # by a loop's variable: the first lane's value

    # -- outside the loops -----------------------------------------------------------------------

    def number(self) -> int:
        """The next number of something that has none yet."""
        self._count += 1
        return self._count

    def write(self, text: str, at: Node | None = None) -> None:
        """Write a text; `at` is the node that it is of."""
        self._out.append(text if at is None else f"{self.body.directive(at)}{text}")

    def text(self) -> str:
        """All that is written."""
        return "".join(self._out)

    @contextmanager
    def in_step(self, counter: Variable, first: str, count: str) -> Iterator[None]:
        """Write a round of a loop that lanes go through in step.

        Args:
            counter: the loop's variable.
            first: the name of its value in the first lane.
            count: the name of the number of lanes that take part in the round.
        """
        before = self.count, self.end
        self.count, self.end = count, f"{count} - 1u"
        self._counters[counter.key] = first
        self.write_last(counter, f"{first} + ({count} - 1u)")
        yield
        self.count, self.end = before
        del self._counters[counter.key]

    def write_last(self, variable: Variable, value: str, at: Node | None = None) -> str:
        """Write a linear variable's value in the last lane; what it is in a lane."""
        kind, name = plain_type(variable.type), f"fr_z{variable.number}"
        self._counts[variable.key] = self.count
        self.write(f"const {kind} {name} = {kind}({value});\n", at)
        self._of_lane[variable.key] = f"(({kind})(unsigned({name}) - ({self.end}) + fr_i))"
        return self._of_lane[variable.key]

    def is_counted(self, variable: Variable) -> bool:
        """Whether a linear variable's value in the last lane is known."""
        return variable.key in self._counts

    # -- statements in a loop --------------------------------------------------------------------

    def add(self, text: str, node: Node, exits: bool = False) -> None:
        """A statement of the next loop, made of a node."""
        self._pending.append(Piece(text, line_of(node), exits=exits))

    def add_pieces(self, pieces: Iterable[Piece]) -> None:
        self._pending += pieces

    def add_statement(self, statement: Node, nest: Nest, replaced: Replaced | None = None) -> None:
        """The author's statement in the next loop, with jumps out of the loop as a lane's."""
        texts = self.prepared(statement, replaced, nest.inside)
        leaving = {jump.id: self._jump(nest, jump.type.split("_")[0]) for jump in jumps(statement)}
        end = ";" * statement.type.endswith("expression")
        self.add(render(self.tree, statement, texts | leaving) + end, statement, bool(leaving))

    def add_lambda(self, variable: Variable, nest: Nest) -> None:
        """A lambda, which is written anew in each loop that calls it."""
        words = [word for word in WORD.findall(variable.text) if word != variable.name]
        self._meant[variable.key] = {word: self.scopes.lookup(word) for word in words}
        captures = re.match(r"[^\[]*\[([^\]]*)\]", variable.text)
        inside = captures.group(1) if captures else ""
        if re.search(r"(?<![&\w])\w|=", inside.replace("&", " &")) and inside.strip() != "&":
            for name in self.scopes.words(variable.text):
                captured = self.scopes.lookup(name)
                if captured is not None and captured != variable and captured.written:
                    raise NotSplittable(
                        f"the lambda {variable.name} copies a variable that changes"
                    )
        self.flush(nest, variable.text)
        line = self.body.directive(variable.line)
        self.write(f"{line}{variable.text} (void){variable.name};\n")

    def take(self) -> list[Piece]:
        """The pending statements, which become no loop."""
        pieces, self._pending = self._pending, []
        return pieces

    @property
    def leaving(self) -> bool:
        """Whether a lane may leave in a pending statement."""
        return any(piece.exits for piece in self._pending)

    def flush(self, nest: Nest, also: str = "", types: Iterable[str] = (), head: str = "") -> None:
        """Write the pending statements as one loop over the lanes.

        Args:
            also: a text that comes after the loop, beside those of the nest.
            types: declarations that go before the loop but may speak of what the statements
                declare.
            head: stands for the loop over all lanes.
        """
        pieces = self.take()
        if not pieces:
            self._out += types
            return
        self._out.append(self.take_constants())
        later = self.scopes.words(" ".join([*nest.later, also]))
        lines, elsewhere = "", set[str]()  # names of which the loop needs no reference to a lane's
        for piece in pieces:
            keep = any(v.name in later or self.body.escapes(v) for v, _ in piece.declared)
            for variable, declaration in piece.declared:
                self._out.append(declaration.replace("@", self._storage(variable, keep)))
                # A reference is bound where it is declared, not at the start of the loop.
                if not keep or variable.kind == "reference":
                    elsewhere.add(variable.name)
            text = piece.kept if keep else piece.text
            lines += f"{self.body.directive(piece.line)}{text}\n"
        self._out += types
        loop = head or f"for (unsigned fr_i = 0; fr_i < {nest.end}; ++fr_i) "
        guard = f"if ({nest.mask}[fr_i]) " if nest.masks else ""
        names = self.scopes.words(lines) - elsewhere
        changed = self._changed(lines, names, {v.name for p in pieces for v, _ in p.declared})
        taken = "".join(
            f"::fr::split::taken_t<fr_t{v.number}> {v.name} = fr_v{v.number}[fr_i];\n"
            for v in changed
        )
        back = "".join(f"fr_v{v.number}[fr_i] = {v.name};\n" for v in changed)
        self._out.append(f"{AT}{loop}{{\n{taken}{guard}{{\n")
        self._out.append(self._references(names - {v.name for v in changed}))
        exits = any(piece.exits for piece in pieces)
        if exits:
            label = f"fr_next{self.number()}"
            lines = lines.replace("goto fr_next;", f"goto {label};")
            lines = f"{{\n{lines}}}\n{AT}{label}: ;\n"
        self._out.append(f"{lines}{AT}}}\n{back}}}\n")
        if exits:
            self.leave_together(nest)

    def _changed(self, lines: str, names: set[str], declared: set[str]) -> list[Variable]:
        """The numbers that a loop over lanes changes, but does not declare.

        Each lane takes its own out of the array, and puts it back at the end whatever conditions
        hold: compilers make a choice between vectors of that, where they would guard each store.
        """
        found = set(_CHANGE.findall(lines)) & names - declared
        return [
            v
            for v in self.scopes.visible()
            if v.name in found
            and v.kind == "value"
            and not (v.uniform or v.pointer or self.body.escapes(v) or v.key in self._counters)
        ]

    def leave_together(self, nest: Nest) -> None:
        """Return where no lane is left."""
        if any(frame.kind == "fn" for frame in nest.frames):
            self.write(f"if (!{ANY}(fr_m0, fr_n)) return;\n")

    def _references(self, names: set[str]) -> str:
        """References to this lane's variables and its attributes, for the names that are used."""
        out = [
            self._lane_attribute(name)
            for name in self.body.attributes
            if name in names and name in LANE_ATTRIBUTES
        ]
        variables = [v for v in self.scopes.visible() if v.name in names]
        for v in variables:
            if v.key in self._counters:
                first = self._counters[v.key]
                out.append(f"const fr_t{v.number} {v.name} = fr_t{v.number}({first} + fr_i);\n")
            elif v.linear and v.key in self._of_lane:
                out.append(f"const fr_t{v.number} {v.name} = {self._of_lane[v.key]};\n")
            elif v.kind == "reference":
                out.append(f"auto&& {v.name} = fr_v{v.number}[fr_i].get();\n")
            elif not v.uniform and v.kind not in ("shared", "lambda"):
                kind = f"fr_t{v.number}&"
                if self.is_tiled(v):
                    kind = f"const ::fr::split::lane_tiles<fr_t{v.number}>"
                out.append(f"{kind} {v.name} = fr_v{v.number}[fr_i];\n")
        lambdas = (v for v in variables if v.kind == "lambda")
        for v in sorted(lambdas, key=lambda v: v.number):
            # It is written anew in each loop, where its names must mean the same. One that is
            # constexpr was written as it stands: what it may name is constant.
            for name, meant in self._meant.get(v.key, {}).items():
                if self.scopes.lookup(name) != meant:
                    raise NotSplittable(f"{name} means another variable where {v.name} is called")
            out.append(f"{self.body.directive(v.line)}{v.text}\n")
        return "".join(out)

    def is_tiled(self, variable: Variable) -> bool:
        """Whether a variable is an array of matrices that lie in one piece each."""
        return (
            variable.kind == "array"
            and variable.name in self.body.matrix_arrays
            and not self.body.escapes(variable)
        )

    def tile(self, node: Node) -> str:
        """The matrix of the simdgroup of lane ``fr_i``, as a whole; nothing if it lies in lanes."""
        base, indices = unbracketed(node), list[str]()
        while base.type == "subscript_expression":
            index = part(base, "indices")
            if not self.uniformity.of(index):
                return ""
            indices.insert(0, self.outside(index))
            base = part(base, "argument")
        v = self.scopes.lookup(self.tree.text(base)) if base.type == "identifier" else None
        if v is None or v.uniform or v.kind != ("array" if indices else "value") or v.pointer:
            return ""
        if indices and not self.is_tiled(v):
            return ""
        return f"fr_v{v.number}.at[fr_i / 32u]{''.join(indices)}"

    def _storage(self, variable: Variable, keep: bool) -> str:
        """The declaration of a lane variable's array, or of a name for its type alone."""
        n, name = variable.number, variable.name
        kind, array, get = f"fr_t{n}", f"FR_LANES ::fr::lanes_t<fr_t{n}, FR_N> fr_v{n}; ", ""
        declared = f"fr_t{n}&"
        if variable.kind == "reference":
            kind = f"::fr::reference<fr_t{n}>"
            array, get, declared = f"FR_LANES {kind} fr_v{n}[FR_N]; ", ".get()", "auto&&"
        elif keep and self.is_tiled(variable):
            array = f"::fr::split::tile_arrays<fr_t{n}, FR_N> fr_v{n}; "
            declared = f"const ::fr::split::lane_tiles<fr_t{n}>"
        first = f"fr_v{n}[0]" if keep else f"::fr::named<{kind}>::get()"
        return f"{array if keep else ''}{declared} {name} = {first}{get}; (void){name};\n"

    def _lane_attribute(self, name: str) -> str:
        unit = self.body.unit
        text = attribute(name).replace("fr_i", "(fr_first + fr_i)")
        if name == "thread_index_in_simdgroup" and unit.simdgroup:
            text = "const uint thread_index_in_simdgroup = fr_i;"
        elif name == "simdgroup_index_in_threadgroup" and unit.simdgroup:
            text = "const uint simdgroup_index_in_threadgroup = fr_first / 32u;"
        position = "fr_px[fr_i], fr_py[fr_i], fr_pz[fr_i]"
        if unit.rows:
            position = "fr_p0.x + fr_i, fr_p0.y, fr_p0.z"
        return re.sub(r"\bfr_p\b", f"::fr::metal::uint3({position})", text) + "\n"

    # -- expressions -----------------------------------------------------------------------------

    def outside(self, node: Node | None, replaced: Replaced | None = None) -> str:
        """The text of what is uniform, as it stands outside the loop over lanes.

        A variable that holds a position is not uniform, but its quotient may be: the first lane's
        position stands for it.
        """
        names = dict(replaced or {})
        for name in kinds(node, "identifier") if node is not None else ():
            variable = self.scopes.lookup(self.tree.text(name))
            if variable is not None and not variable.uniform and variable.value in POSITION_TEXTS:
                kind = "uint" if "auto" in variable.type.split() else variable.type
                names[name.id] = f"(({kind})({variable.value}))"
        return render(self.tree, node, names)

    def last(self, node: Node) -> str:
        """The text of a linear expression for the last lane of the unit."""
        names: Replaced = {}
        for place in kinds(node, "field_expression", "identifier"):
            text = self.tree.text(place)
            variable = self.scopes.lookup(text) if place.type == "identifier" else None
            if variable is None and (text in POSITION_TEXTS or self.uniformity.counts(text)):
                names[place.id] = f"({text} + ({self.count} - 1u))"
            elif variable is not None and variable.linear:
                last, count = f"fr_z{variable.number}", self._counts[variable.key]
                kind = plain_type(variable.type)
                fewer = f"({kind})({last} - ({count} - {self.count}))"
                names[place.id] = last if count == self.count else f"({fewer})"
        return render(self.tree, node, names)

    def prepared(
        self, statement: Node, replaced: Replaced | None = None, inside: Set[str] = frozenset()
    ) -> Replaced:
        """What stands in a loop for quotients and elements that something is prepared for.

        Processors divide integers one at a time, and slowly; a prepared divisor multiplies, and
        lets the loop be vectorised.
        """
        texts = dict(replaced or {})
        inner = inside | declared_within(self.tree, statement)

        def visit(node: Node) -> None:
            if node.type in _NOT_PREPARED:
                return
            for child in node.children:
                visit(child)
            if node.type == "subscript_expression":
                element = self.element(node, inner)
                if element:
                    texts[node.id] = element
            elif node.type == "binary_expression" and node.children[1].type in ("/", "%"):
                left, operator, right = operands(node)
                if self._prepares(right, inner):
                    divisor = f"::fr::divisor_of({self.outside(right, texts)})"
                    name = "divided" if operator == "/" else "left_of"
                    number = self._constant("d", divisor, right)
                    # The space keeps `? a:b` from becoming `::`.
                    texts[node.id] = f" ::fr::{name}({render(self.tree, left, texts)}, {number})"

        visit(statement)
        return texts

    def _prepares(self, divisor: Node, inner: Set[str]) -> bool:
        """Whether a divisor is uniform, not a constant, and known before the loop."""
        if not self.uniformity.of(divisor) or self.body.calls(divisor):
            return False
        names = {self.tree.text(n) for n in kinds(divisor, "identifier")}
        variables = [v for v in map(self.scopes.lookup, names) if v is not None]
        return (
            not names & inner
            and not any(map(self._loads, walk(divisor)))
            and all(v.kind in ("value", "array") for v in variables)
            and any(not re.search(r"\bconstexpr\b", v.type) for v in variables)
        )

    def _loads(self, node: Node) -> bool:
        """Whether a node reads memory that only the conditions around it may say is there."""
        if node.type == "field_expression":
            return any(child.type == "->" for child in node.children)
        if node.type != "subscript_expression":
            return node.type == "pointer_expression"
        base, indices = self.tree.text(part(node, "argument")), part(node, "indices")
        variable = self.scopes.lookup(base)
        private = base in self.body.integers or (variable is not None and variable.kind == "array")
        return not private or indices.named_children[0].type != "number_literal"

    def element(self, node: Node, inner: Set[str]) -> str:
        """An element of an array that is the next one in each lane, from a prepared pointer.

        The compiler does not know that an index never wraps from one lane to the next, and would
        gather the elements one by one. The pointer is that of the last lane: where an unsigned
        index starts below zero, the lanes that are guarded off are the first ones.
        """
        base, indices = part(node, "argument"), part(node, "indices")
        if base.type != "identifier" or not self.count:
            return ""
        v = self.scopes.lookup(self.tree.text(base))
        if v is None or not (v.kind == "value" and v.pointer and v.uniform and not v.written):
            return ""
        if v.name in self.body.prepared.tallied:  # no pointer there
            return ""
        if indices.named_child_count != 1 or self.scopes.words(self.tree.text(node)) & inner:
            return ""
        index = indices.named_children[0]
        names = map(self.scopes.lookup, self.scopes.words(self.tree.text(index)))
        known = all(n is None or not n.linear or self.is_counted(n) for n in names)
        # What stands before a loop comes before conditions, which may guard what could fail.
        fails = any(
            n.type in ("subscript_expression", "pointer_expression")
            or self.tree.text(n.child_by_field_name("operator")) in ("/", "%", "->")
            for n in walk(index)
        )
        if fails or not known or not self.uniformity.value(index).linear:
            return ""
        last = self.last(index)
        moved = f"static_cast<int64_t>({last}) - static_cast<int64_t>({self.end})"
        return f"{self._constant('p', f'{v.name} + ({moved})', node, f'_{v.name}')}[fr_i]"

    def _constant(self, kind: str, value: str, node: Node, of: str = "") -> str:
        """The name of what stands before the loop of the pending statements; ``of`` ends it, for
        errors of the compiler."""
        constants = self._constants[kind]
        if value not in constants:
            constants[value] = f"fr_{kind}{self.number()}{of}", node
        return constants[value][0]

    def take_constants(self) -> str:
        """What stands before a loop, each under the line that it is of."""
        text = ""
        for kind, constants in self._constants.items():
            for value, (name, node) in constants.items():
                text += f"{self.body.directive(node)}{_CONSTANTS[kind]} {name} = {value};\n"
                if kind == "p" and self.fetches:
                    text += f"::fr::split::fetch_ahead({name}, {self.count});\n"
            self._constants[kind] = {}
        return text


def render(tree: Tree, node: Node | None, replaced: Replaced) -> str:
    """The text of a node with other texts in place of some nodes in it."""
    if node is None or not replaced or not node.children:
        return replaced.get(node.id, tree.text(node)) if node is not None else ""
    if node.id in replaced:
        return replaced[node.id]
    out: list[str] = []
    position = node.start_byte
    for child in node.children:
        out.append(tree.data[position : child.start_byte].decode())
        out.append(render(tree, child, replaced))
        position = child.end_byte
    out.append(tree.data[position : node.end_byte].decode())  # a directive's line ends in it
    return "".join(out)


def plain_type(spec: str) -> str:
    """The type of a variable that counts lanes."""
    words = " ".join(w for w in spec.split() if w not in ("const", "thread"))
    return words.replace("auto", "uint")
