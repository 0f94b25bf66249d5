"""Loops over lanes: runs of statements, what they declare, and what a lane keeps between them."""

from __future__ import annotations

import re

from tree_sitter import Node

from ..cpp import NotSplittable, Parameter, Prepared, attribute, body_line, shared_note
from ..syntax import declarators, declared_name, walk
from .analysis import WORD, AnalysedBody
from .pieces import Mask, Piece, plain_type, storage, without_storage
from .statements import LOOPS, NESTED_CODE, initial_value, inner_declarator, is_jump
from .uniform import LANE_ATTRIBUTES, POSITION_TEXTS, Unit, Variable

_CONSTANT = re.compile(r"\bconstexpr\b")


class Regions(AnalysedBody):
    """Emits statements as loops over the lanes of a unit of work."""

    def __init__(self, prepared: Prepared, text: str, unit: Unit) -> None:
        super().__init__(prepared, text, unit)
        self.out: list[str] = []
        self.pending: list[Piece] = []
        self.masks: list[Mask] = []
        self.count = 0
        # Of the pending statements: what is prepared before their loop, text to number.
        self.divisors: dict[str, tuple[int, int]] = {}  # text: number, line of the first quotient
        self.anchors: dict[tuple[str, str], tuple[int, int]] = {}  # base, index: the same

    def _at(self, node: Node, text: str) -> None:
        self.out.append(f"{body_line(self.p, self._line(node))}{text}")

    # -- emission: statements of a loop over lanes -------------------------------------------------

    def _piece(self, statement: Node, replaced: dict[int, str] | None = None) -> None:
        text, exits = self._with_exits(statement, self._divisions(statement, replaced))
        self.pending.append(Piece(text, self._line(statement), exits=exits))

    def _divisions(self, statement: Node, replaced: dict[int, str] | None = None) -> dict[int, str]:
        """Quotients by what is uniform, with the divisor prepared outside the loop.

        Processors divide integers one at a time, and slowly; a prepared divisor multiplies, and
        lets the loop be vectorised.
        """
        texts = dict(replaced or {})
        inner = {
            self.tree.text(n)
            for d in walk(statement)
            if d.type in ("init_declarator", "declaration", "parameter_declaration")
            for n in [declared_name(d)]
            if n is not None
        }

        def visit(node: Node) -> None:
            if node.type in ("lambda_expression", "preproc_def", "preproc_function_def"):
                return
            for child in node.children:
                visit(child)
            if node.type == "subscript_expression":
                anchored = self._anchored(node, inner)
                if anchored:
                    texts[node.id] = anchored
                return
            if node.type != "binary_expression" or node.children[1].type not in ("/", "%"):
                return
            left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
            if left is None or right is None or not self._prepares(right, inner):
                return
            text = self._outside_text(right, texts)
            if text not in self.divisors:
                self.count += 1
                self.divisors[text] = self.count, self._line(right)
            number, _ = self.divisors[text]
            name = "divided" if node.children[1].type == "/" else "left_of"
            texts[node.id] = f"::fr::{name}({self._render(left, texts)}, fr_d{number})"

        visit(statement)
        return texts

    def _prepared_divisors(self) -> str:
        """The divisors that stand before a loop, each under the line that it is of."""
        return "".join(
            f"{body_line(self.p, line)}const auto fr_d{n} = ::fr::divisor_of({text});\n"
            for text, (n, line) in self.divisors.items()
        )

    def _anchored(self, node: Node, inner: set[str]) -> str:
        """An element of an array that is the next one in each lane, from a prepared pointer.

        The compiler does not know that an index never wraps from one lane to the next, and would
        gather the elements one by one. The pointer is that of the last lane: where an unsigned
        index starts below zero, the lanes that are guarded off are the first ones.
        """
        base, index = node.child_by_field_name("argument"), node.child_by_field_name("indices")
        if self.unit.row is None or base is None or index is None or base.type != "identifier":
            return ""
        variable = self._lookup(self.tree.text(base))
        if (
            variable is None
            or not variable.pointer
            or not variable.uniform
            or variable.written
            or variable.kind != "value"
        ):
            return ""
        if index.named_child_count != 1 or self._names(self.tree.text(node)) & inner:
            return ""
        if not self.uniformity.linear(index.named_children[0]):
            return ""
        key = (variable.name, self._last_text(index.named_children[0]))
        if key not in self.anchors:
            self.count += 1
            self.anchors[key] = self.count, self._line(node)
        number, _ = self.anchors[key]
        return f"fr_p{number}[fr_i]"

    def _last_text(self, node: Node) -> str:
        """The text of a linear expression for the last lane of the unit."""
        names: dict[int, str] = {}

        def visit(part: Node) -> None:
            text = self.tree.text(part)
            if part.type == "field_expression" and text in POSITION_TEXTS:
                names[part.id] = f"({text} + (fr_n - 1u))"
                return
            if part.type == "identifier":
                variable = self._lookup(text)
                if variable is not None and variable.linear and self.unit.row is None:
                    # Its value is a position alone (`_is_position`).
                    kind = plain_type(variable.type)
                    names[part.id] = f"(({kind})({variable.value} + (fr_n - 1u)))"
                elif variable is not None and variable.linear:
                    names[part.id] = f"fr_z{variable.number}"
                elif variable is None and self.uniformity.counts(text):
                    names[part.id] = f"({text} + (fr_n - 1u))"
            for child in part.children:
                visit(child)

        visit(node)
        return self._render(node, names)

    def _prepares(self, divisor: Node, inner: set[str]) -> bool:
        """Whether a divisor is uniform, not a constant, and known before the loop."""
        if not self.uniformity.of(divisor) or self._calls(divisor):
            return False
        names = {self.tree.text(n) for n in walk(divisor) if n.type == "identifier"}
        if names & inner:
            return False
        variables = [self._lookup(n) for n in names]
        if any(v is not None and not self._outside(v) for v in variables):
            return False
        return any(v is not None and not _CONSTANT.search(v.type) for v in variables)

    def _outside(self, variable: Variable) -> bool:
        """Whether a uniform variable is declared outside the loop over lanes."""
        return variable.kind in ("value", "array")

    def _render(self, node: Node, replaced: dict[int, str]) -> str:
        """The text of a node with some calls replaced by what holds their results."""
        if node.id in replaced:
            return replaced[node.id]
        if not replaced or not node.children:
            return self.tree.text(node)
        out: list[str] = []
        position = node.start_byte
        for child in node.children:
            out.append(self.tree.data[position : child.start_byte].decode())
            out.append(self._render(child, replaced))
            position = child.end_byte
        return "".join(out)

    def _outside_text(self, node: Node, replaced: dict[int, str] | None = None) -> str:
        """The text of what is uniform, as it stands outside the loop over lanes.

        A variable that holds a position is not uniform, but its quotient may be: the first lane's
        position stands for it.
        """
        names = dict(replaced or {})
        for part in walk(node):
            variable = self._lookup(self.tree.text(part)) if part.type == "identifier" else None
            if variable is not None and not variable.uniform and variable.value in POSITION_TEXTS:
                kind = "uint" if "auto" in variable.type.split() else variable.type
                names[part.id] = f"(({kind})({variable.value}))"
        return self._render(node, names)

    def _with_exits(self, statement: Node, replaced: dict[int, str]) -> tuple[str, bool]:
        """A statement's text with its jumps out of the loop over lanes written as mask changes."""
        jumps: dict[int, str] = dict(replaced)
        exits = False

        def visit(node: Node, nested: bool, switched: bool) -> None:
            nonlocal exits
            kind = node.type
            if is_jump(node, nested, switched):
                jumps[node.id] = self._lane_jump(kind.split("_")[0])
                exits = True
                return
            if kind in NESTED_CODE:
                return
            for child in node.children:
                visit(child, nested or kind in LOOPS, switched or kind == "switch_statement")

        visit(statement, False, False)
        return self._render(statement, jumps), exits

    def _lane_jump(self, kind: str) -> str:
        """What a lane does that leaves by ``return``, ``break`` or ``continue``."""
        raise NotImplementedError(kind)

    def _loop_head(self) -> str:
        """The loop over the lanes of a unit."""
        return f"for (unsigned fr_i = 0; fr_i < {self._end()}; ++fr_i) "

    def _end(self) -> str:
        return self.masks[-1].end if self.masks else "fr_n"

    def _mask(self) -> str:
        return self.masks[-1].name if self.masks else ""

    def _flush(
        self, later: set[str], types: list[str] | None = None, head: str | None = None
    ) -> None:
        """Emit the pending statements as one loop over the lanes.

        `later` are the names used afterwards; `types` are declarations that go before the loop
        but may speak of what the statements declare; `head` stands for the loop over all lanes.
        """
        pieces, self.pending = self.pending, []
        if not pieces:
            self.out += types or []
            return
        self.out.append(self._prepared_divisors())
        self.divisors = {}
        for (base, index), (number, line) in self.anchors.items():
            self.out.append(
                f"{body_line(self.p, line)}auto* const fr_p{number} = {base} + "
                f"(static_cast<int64_t>({index}) - static_cast<int64_t>(fr_n - 1u));\n"
            )
        self.anchors = {}
        kept: list[Variable] = []
        own: list[Variable] = []
        lines: list[str] = []
        for piece in pieces:
            keep = any(v.name in later or self._escapes(v) for v in piece.declared)
            for variable, declaration in zip(piece.declared, piece.types, strict=True):
                self.out.append(declaration.replace("@", storage(variable, keep)))
                own.append(variable)
                if keep:
                    kept.append(variable)
            text = " ".join(piece.inits) if keep else piece.plain or piece.text
            lines.append(f"{body_line(self.p, piece.line)}{text}\n")
        self.out += types or []
        body = "".join(lines)
        local = {v.name for v in own if v not in kept}
        # A reference is bound where it is declared, not at the start of the loop.
        names = self._names(body) - local - {v.name for v in own if v.kind == "reference"}
        exits = any(p.exits for p in pieces)
        mask = self._mask()
        self.out.append(f'#line 1 "ferrule"\n{head or self._loop_head()}')
        self.out.append(f"if ({mask}[fr_i]) {{\n" if mask else "{\n")
        self.out.append(self._lane_names(names))
        self.out.append("{\n" + body + "}\n" if exits else body)
        if exits:
            self.count += 1
            self.out[-1] = self.out[-1].replace("goto fr_next;", f"goto fr_next{self.count};")
            self.out.append(f'#line 1 "ferrule"\nfr_next{self.count}: ;\n')
        self.out.append('#line 1 "ferrule"\n}\n')
        if exits and mask and any(m.kind == "fn" for m in self.masks):
            self.out.append("if (!::fr::split::any(fr_m0, fr_n)) return;\n")

    def _lane_names(self, names: set[str]) -> str:
        """References to this lane's variables and its attributes, for the names that are used."""
        out: list[str] = []
        for attribute_name in self.attributes:
            if attribute_name in names and attribute_name in LANE_ATTRIBUTES:
                out.append(self._lane_attribute(attribute_name))
        lambdas: list[Variable] = []
        seen: set[str] = set()
        for scope in reversed(self.scopes):
            for name, variable in scope.items():
                if name in seen or name not in names:
                    continue
                seen.add(name)
                if variable.kind == "lambda":
                    lambdas.append(variable)
                elif variable.kind == "reference":
                    out.append(f"auto&& {name} = fr_v{variable.number}[fr_i].get();\n")
                elif not variable.uniform and variable.kind != "shared":
                    out.append(f"fr_t{variable.number}& {name} = fr_v{variable.number}[fr_i];\n")
        for variable in sorted(lambdas, key=lambda v: v.number):
            self._refuse_hidden(variable)
            out.append(f"{body_line(self.p, variable.lambda_line)}{variable.lambda_text}\n")
        return "".join(out)

    def _lane_attribute(self, attribute_name: str) -> str:
        text = attribute(attribute_name)
        text = text.replace("fr_i", "(fr_first + fr_i)")
        if attribute_name == "thread_index_in_simdgroup" and self.unit.simdgroup:
            text = "const uint thread_index_in_simdgroup = fr_i;"
        elif attribute_name == "simdgroup_index_in_threadgroup" and self.unit.simdgroup:
            text = "const uint simdgroup_index_in_threadgroup = fr_first / 32u;"
        if self.unit.rows:
            position = "::fr::metal::uint3(fr_p0.x + fr_i, fr_p0.y, fr_p0.z)"
        else:
            position = "::fr::metal::uint3(fr_px[fr_i], fr_py[fr_i], fr_pz[fr_i])"
        return re.sub(r"\bfr_p\b", position, text) + "\n"

    # -- emission: declarations --------------------------------------------------------------------

    def _declare_parameters(self) -> None:
        """Parameters that the body moves are variables like any other."""
        for q in self.params:
            variable = self.by_param[q.name]
            variable.number = 0
            if q.scalar:
                self.out.append(f"const auto fr_s_{q.name} = fr_a_{q.name};\n")
                self.out.append(f"{q.type} {q.name} = fr_s_{q.name}; (void){q.name};\n")
            elif variable.uniform:
                self.out.append(f"{q.type} {q.name} = fr_a_{q.name}; (void){q.name};\n")
            else:
                variable.number = 10_000 + self.params.index(q)
                self._lane_parameter(q, variable)

    def _lane_parameter(self, parameter: Parameter, variable: Variable) -> None:
        name, n = parameter.name, variable.number
        self.out.append(
            f"typedef {parameter.type} fr_t{n}; fr_t{n} fr_v{n}[FR_N]; "
            f"fr_t{n}& {name} = fr_v{n}[0]; (void){name};\n"
            f"for (unsigned fr_i = 0; fr_i < fr_n; ++fr_i) fr_v{n}[fr_i] = fr_a_{name};\n"
        )

    def _extract(self, part: Node, statement: Node) -> dict[int, str]:
        """Emit the synchronising calls of a part of a statement.

        Returns what stands for each result, by the call's node.
        """
        return {}

    def _later_names(self) -> set[str]:
        """The names that come after the current statement."""
        return set()

    def _declaration(self, statement: Node) -> None:
        if not self._calls(statement):
            self._declare_all(statement, declarators(statement), {})
            return
        # A declarator may speak of the one before it: one after the other.
        for declarator in declarators(statement):
            self._declare_all(statement, [declarator], self._extract(declarator, statement))

    def _declare_all(self, statement: Node, group: list[Node], replaced: dict[int, str]) -> None:
        """Emit declarators of a statement: uniform ones outside the loop, others inside."""
        fast = dict(replaced)
        pieces: list[Piece] = []
        for declarator in group:
            variable = self._declared(statement, declarator, 0)
            spec, declarator_text, _ = self._parts(statement, declarator)
            if variable.kind != "shared":  # a pointer beside threadgroup memory is private
                spec = re.sub(r"\bthread_local\b", "", spec)
            value = initial_value(declarator)
            if variable.kind == "lambda":
                self._lambda(variable)
                continue
            if variable.kind == "shared":
                text = re.sub(r"\b(thread_local|static)\b", "", spec)
                note = shared_note(self._line(statement), variable.name)
                self._at(statement, f"alignas(16) {text} {declarator_text}; {note}\n")
                continue
            if variable.uniform and variable.kind in ("value", "array"):
                if any(piece.exits for piece in self.pending):
                    # A lane that leaves may guard what follows: a load, a division.
                    self._flush(self._later_names() | self._names(self.tree.text(statement)))
                self._at(statement, f"{spec} {self._outside_text(declarator, replaced)};\n")
                continue
            if variable.linear and self.unit.row is not None and value is not None:
                n = variable.number
                kind = plain_type(spec)
                self._at(statement, f"const {kind} fr_z{n} = {self._last_text(value)};\n")
                fast[value.id] = f"(({kind})(unsigned(fr_z{n}) - (fr_n - 1u) + fr_i))"
            else:
                fast |= self._divisions(declarator, replaced)
            pieces.append(self._lane_declaration(statement, declarator, variable, spec, fast))
        if len(pieces) == len(declarators(statement)):
            joined = Piece("", self._line(statement), plain=self._render(statement, fast))
            for piece in pieces:
                joined.declared += piece.declared
                joined.types += piece.types
                joined.inits += piece.inits
            self.pending.append(joined)
        else:
            self.pending += pieces

    def _lane_declaration(
        self,
        statement: Node,
        declarator: Node,
        variable: Variable,
        spec: str,
        replaced: dict[int, str],
    ) -> Piece:
        """One declarator as an array with an element for each lane."""
        _, declarator_text, name = self._parts(statement, declarator)
        value, n, line = initial_value(declarator), variable.number, self._line(statement)
        init = self._render(value, replaced) if value is not None else ""
        words = spec.split()
        plain = f"{spec} {self._render(declarator, replaced)};"
        if variable.kind == "reference":
            text = f"using fr_t{n} = decltype(({init}));\n@"
            bind = f"fr_v{n}[fr_i].set({init}); auto&& {variable.name} = fr_v{n}[fr_i].get();"
            return Piece("", line, [variable], [text], [bind], plain)
        if "auto" in words:
            const = "const " if "const" in words and "*" not in declarator_text else ""
            text = f"typedef {const}::fr::value_t<__typeof__(({init}))> fr_t{n};\n@"
        else:
            start = name.start_byte - (inner_declarator(declarator) or declarator).start_byte
            end = start + len(variable.name)
            renamed = f"{declarator_text[:start]}fr_t{n}{declarator_text[end:]}"
            text = f"{body_line(self.p, line)}typedef {without_storage(spec)} {renamed};\n@"
        init = self._initialise(variable, value, init)
        return Piece("", line, [variable], [text], [init], plain)

    def _initialise(self, variable: Variable, value: Node | None, init: str) -> str:
        target = f"fr_v{variable.number}[fr_i]"
        if value is None:
            return f"(void){target};"
        if variable.kind == "array":
            temporary = f"::fr::storage_t<fr_t{variable.number}> fr_w {init}"
            return f"{{ {temporary}; __builtin_memcpy(&{target}, &fr_w, sizeof fr_w); }}"
        if value.type == "argument_list":
            return f"{target} = fr_t{variable.number}{init};"
        if value.type == "initializer_list":
            return f"{target} = ::fr::storage_t<fr_t{variable.number}>{init};"
        return f"{target} = {init};"

    def _refuse_hidden(self, variable: Variable) -> None:
        """Refuse a lambda, written anew in each loop, whose names mean something else there."""
        for name, meant in variable.names.items():
            if self._lookup(name) is not meant:
                raise NotSplittable(
                    f"{name} means another variable where {variable.name} is called"
                )

    def _lambda(self, variable: Variable) -> None:
        words = WORD.findall(variable.lambda_text)
        variable.names = {name: self._lookup(name) for name in words if name != variable.name}
        captures = re.match(r"[^\[]*\[([^\]]*)\]", variable.lambda_text)
        inside = captures.group(1) if captures else ""
        if re.search(r"(?<![&\w])\w|=", inside.replace("&", " &")) and inside.strip() != "&":
            for name in self._names(variable.lambda_text):
                captured = self._lookup(name)
                if captured is not None and captured is not variable and captured.written:
                    raise NotSplittable(
                        f"the lambda {variable.name} copies a variable that changes"
                    )
        self._flush(self._later_names() | self._names(variable.lambda_text))
        line = body_line(self.p, variable.lambda_line)
        self.out.append(f"{line}{variable.lambda_text} (void){variable.name};\n")
