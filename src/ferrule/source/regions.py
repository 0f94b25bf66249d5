"""Loops over lanes: runs of statements, what they declare, and what a lane keeps between them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tree_sitter import Node

from .analysis import LOOPS, WORD, Body
from .cpp import NotSplittable, Parameter, Prepared, attribute, body_line, shared_note
from .syntax import declarators, declared_name, walk
from .uniform import LANE_ATTRIBUTES, POSITION_TEXTS, Unit, Variable

_CONSTANT = re.compile(r"\bconstexpr\b")


class Again(Exception):
    """A mask is needed that was not planned: plan it, and emit anew."""


@dataclass
class Mask:
    """A mask of the current nest: its C++ name and what leaves it (``fn``, ``if``, ``loop``…)."""

    name: str
    kind: str
    loop: int = -1
    end: str = "fr_n"  # no lane from here on is in it


@dataclass
class Piece:
    """A statement of a loop over lanes: its text, its line and what it declares."""

    text: str
    line: int
    declared: list[Variable] = field(default_factory=list)
    # For each declared variable: (declaration of its type, initialisation, the plain declaration)
    types: list[str] = field(default_factory=list)
    inits: list[str] = field(default_factory=list)
    plain: str = ""
    exits: bool = False


class Regions(Body):
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

    def _piece(self, s: Node, replaced: dict[int, str] | None = None) -> None:
        text, exits = self._with_exits(s, self._divisions(s, replaced))
        self.pending.append(Piece(text, self._line(s), exits=exits))

    def _divisions(self, s: Node, replaced: dict[int, str] | None = None) -> dict[int, str]:
        """Quotients by what is uniform, with the divisor prepared outside the loop.

        Processors divide integers one at a time, and slowly; a prepared divisor multiplies, and
        lets the loop be vectorised.
        """
        found = dict(replaced or {})
        inner = {
            self.tree.text(n)
            for d in walk(s)
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
                    found[node.id] = anchored
                return
            if node.type != "binary_expression" or node.children[1].type not in ("/", "%"):
                return
            left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
            if left is None or right is None or not self._prepares(right, inner):
                return
            text = self._outside_text(right, found)
            if text not in self.divisors:
                self.count += 1
                self.divisors[text] = self.count, self._line(right)
            number, _ = self.divisors[text]
            name = "divided" if node.children[1].type == "/" else "left_of"
            found[node.id] = f"::fr::{name}({self._render(left, found)}, fr_d{number})"

        visit(s)
        return found

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
        v = self._lookup(self.tree.text(base))
        if v is None or not v.pointer or not v.uniform or v.written or v.kind != "value":
            return ""
        if index.named_child_count != 1 or self._names(self.tree.text(node)) & inner:
            return ""
        if not self.uniformity.linear(index.named_children[0]):
            return ""
        key = (v.name, self._last_text(index.named_children[0]))
        if key not in self.anchors:
            self.count += 1
            self.anchors[key] = self.count, self._line(node)
        number, _ = self.anchors[key]
        return f"fr_p{number}[fr_i]"

    def _last_text(self, node: Node) -> str:
        """The text of a linear expression for the last lane of the unit."""
        names: dict[int, str] = {}

        def visit(n: Node) -> None:
            text = self.tree.text(n)
            if n.type == "field_expression" and text in POSITION_TEXTS:
                names[n.id] = f"({text} + (fr_n - 1u))"
                return
            if n.type == "identifier":
                v = self._lookup(text)
                if v is not None and v.linear and self.unit.row is None:
                    kind = _plain_type(v.type)  # its value is a position alone (`_is_position`)
                    names[n.id] = f"(({kind})({v.value} + (fr_n - 1u)))"
                elif v is not None and v.linear:
                    names[n.id] = f"fr_z{v.number}"
                elif v is None and self.uniformity.counts(text):
                    names[n.id] = f"({text} + (fr_n - 1u))"
            for child in n.children:
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
        for n in walk(node):
            v = self._lookup(self.tree.text(n)) if n.type == "identifier" else None
            if v is not None and not v.uniform and v.value in POSITION_TEXTS:
                kind = "uint" if "auto" in v.type.split() else v.type
                names[n.id] = f"(({kind})({v.value}))"
        return self._render(node, names)

    def _with_exits(self, s: Node, replaced: dict[int, str]) -> tuple[str, bool]:
        """A statement's text with its jumps out of the loop over lanes written as mask changes."""
        jumps: dict[int, str] = dict(replaced)
        found = False

        def visit(node: Node, nested: bool, switched: bool) -> None:
            nonlocal found
            kind = node.type
            if (
                kind == "return_statement"
                or (kind == "break_statement" and not nested and not switched)
                or (kind == "continue_statement" and not nested)
            ):
                jumps[node.id] = self._lane_jump(kind.split("_")[0])
                found = True
                return
            if kind in ("lambda_expression", "function_definition", "struct_specifier"):
                return
            for child in node.children:
                visit(child, nested or kind in LOOPS, switched or kind == "switch_statement")

        visit(s, False, False)
        return self._render(s, jumps), found

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
            for v, declaration in zip(piece.declared, piece.types, strict=True):
                self.out.append(declaration.replace("@", _storage(v, keep)))
                own.append(v)
                if keep:
                    kept.append(v)
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
        for a in self.attributes:
            if a in names and a in LANE_ATTRIBUTES:
                out.append(self._lane_attribute(a))
        lambdas: list[Variable] = []
        seen: set[str] = set()
        for scope in reversed(self.scopes):
            for name, v in scope.items():
                if name in seen or name not in names:
                    continue
                seen.add(name)
                if v.kind == "lambda":
                    lambdas.append(v)
                elif v.kind == "reference":
                    out.append(f"auto&& {name} = fr_v{v.number}[fr_i].get();\n")
                elif not v.uniform and v.kind != "shared":
                    out.append(f"fr_t{v.number}& {name} = fr_v{v.number}[fr_i];\n")
        for v in sorted(lambdas, key=lambda v: v.number):
            self._refuse_hidden(v)
            out.append(f"{body_line(self.p, v.lambda_line)}{v.lambda_text}\n")
        return "".join(out)

    def _lane_attribute(self, name: str) -> str:
        text = attribute(name)
        text = text.replace("fr_i", "(fr_first + fr_i)")
        if name == "thread_index_in_simdgroup" and self.unit.simdgroup:
            text = "const uint thread_index_in_simdgroup = fr_i;"
        elif name == "simdgroup_index_in_threadgroup" and self.unit.simdgroup:
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
            v = self.by_param[q.name]
            v.number = 0
            if q.scalar:
                self.out.append(f"const auto fr_s_{q.name} = fr_a_{q.name};\n")
                self.out.append(f"{q.type} {q.name} = fr_s_{q.name}; (void){q.name};\n")
            elif v.uniform:
                self.out.append(f"{q.type} {q.name} = fr_a_{q.name}; (void){q.name};\n")
            else:
                v.number = 10_000 + self.params.index(q)
                self._lane_parameter(q, v)

    def _lane_parameter(self, q: Parameter, v: Variable) -> None:
        n = v.number
        self.out.append(
            f"typedef {q.type} fr_t{n}; fr_t{n} fr_v{n}[FR_N]; fr_t{n}& {q.name} = fr_v{n}[0]; "
            f"(void){q.name};\n"
            f"for (unsigned fr_i = 0; fr_i < fr_n; ++fr_i) fr_v{n}[fr_i] = fr_a_{q.name};\n"
        )

    def _extract(self, s: Node, statement: Node | None = None) -> dict[int, str]:
        """Carry out the synchronising calls of a statement, or of a part of it.

        Returns what stands for each result, by the call's node.
        """
        return {}

    def _later_names(self) -> set[str]:
        """The names that come after the current statement."""
        return set()

    def _declaration(self, s: Node) -> None:
        if not self._calls(s):
            self._declare_all(s, declarators(s), {})
            return
        # A declarator may speak of the one before it: one after the other.
        for d in declarators(s):
            self._declare_all(s, [d], self._extract(d, s))

    def _declare_all(self, s: Node, ds: list[Node], replaced: dict[int, str]) -> None:
        """Emit declarators of a statement: uniform ones outside the loop, others inside."""
        fast = dict(replaced)
        pieces: list[Piece] = []
        for d in ds:
            v = self._declared(s, d, 0)
            spec, declarator, name = self._parts(s, d)
            if v.kind != "shared":  # a pointer beside threadgroup memory is private
                spec = re.sub(r"\bthread_local\b", "", spec)
            value = d.child_by_field_name("value") if d.type == "init_declarator" else None
            if v.kind == "lambda":
                self._lambda(v)
                continue
            if v.kind == "shared":
                text = re.sub(r"\b(thread_local|static)\b", "", spec)
                note = shared_note(self._line(s), v.name)
                self._at(s, f"alignas(16) {text} {declarator}; {note}\n")
                continue
            if v.uniform and v.kind in ("value", "array"):
                if any(piece.exits for piece in self.pending):
                    # A lane that leaves may guard what follows: a load, a division.
                    self._flush(self._later_names() | self._names(self.tree.text(s)))
                self._at(s, f"{spec} {self._outside_text(d, replaced)};\n")
                continue
            if v.linear and self.unit.row is not None and value is not None:
                n = v.number
                kind = _plain_type(spec)
                self._at(s, f"const {kind} fr_z{n} = {self._last_text(value)};\n")
                fast[value.id] = f"(({kind})(unsigned(fr_z{n}) - (fr_n - 1u) + fr_i))"
            else:
                fast |= self._divisions(d, replaced)
            pieces.append(self._lane_declaration(s, d, v, spec, declarator, name, value, fast))
        if len(pieces) == len(declarators(s)):
            joined = Piece("", self._line(s), plain=self._render(s, fast))
            for piece in pieces:
                joined.declared += piece.declared
                joined.types += piece.types
                joined.inits += piece.inits
            self.pending.append(joined)
        else:
            self.pending += pieces

    def _lane_declaration(
        self, s: Node, d: Node, v: Variable, spec: str, declarator: str, name: Node,
        value: Node | None, replaced: dict[int, str],
    ) -> Piece:  # fmt: skip
        n = v.number
        init = self._render(value, replaced) if value is not None else ""
        words = spec.split()
        is_auto = "auto" in words
        plain = f"{spec} {self._render(d, replaced)};"
        if v.kind == "reference":
            text = f"using fr_t{n} = decltype(({init}));\n@"
            bind = f"fr_v{n}[fr_i].set({init}); auto&& {v.name} = fr_v{n}[fr_i].get();"
            return Piece("", self._line(s), [v], [text], [bind], plain)
        if is_auto:
            const = "const " if "const" in words and "*" not in declarator else ""
            text = f"typedef {const}::fr::value_t<__typeof__(({init}))> fr_t{n};\n@"
        else:
            start = (
                name.start_byte
                - (
                    d.child_by_field_name("declarator") or d if d.type == "init_declarator" else d
                ).start_byte
            )
            renamed = declarator[:start] + f"fr_t{n}" + declarator[start + len(v.name) :]
            text = (
                f"{body_line(self.p, self._line(s))}typedef {_without_storage(spec)} {renamed};\n@"
            )
        return Piece(
            "", self._line(s), [v], [text], [self._initialise(v, value, init, is_auto)], plain
        )

    def _initialise(self, v: Variable, value: Node | None, init: str, is_auto: bool) -> str:
        target = f"fr_v{v.number}[fr_i]"
        if value is None:
            return f"(void){target};"
        if v.kind == "array":
            made = f"::fr::storage_t<fr_t{v.number}> fr_w {init}"
            return f"{{ {made}; __builtin_memcpy(&{target}, &fr_w, sizeof fr_w); }}"
        if value.type == "argument_list":
            return f"{target} = fr_t{v.number}{init};"
        if value.type == "initializer_list":
            return f"{target} = ::fr::storage_t<fr_t{v.number}>{init};"
        return f"{target} = {init};"

    def _refuse_hidden(self, v: Variable) -> None:
        """A lambda is written anew in each loop: its names must still mean what they meant."""
        for name, meant in v.names.items():
            if self._lookup(name) is not meant:
                raise NotSplittable(f"{name} means another variable where {v.name} is called")

    def _lambda(self, v: Variable) -> None:
        words = WORD.findall(v.lambda_text)
        v.names = {name: self._lookup(name) for name in words if name != v.name}
        captures = re.match(r"[^\[]*\[([^\]]*)\]", v.lambda_text)
        inside = captures.group(1) if captures else ""
        if re.search(r"(?<![&\w])\w|=", inside.replace("&", " &")) and inside.strip() != "&":
            for name in self._names(v.lambda_text):
                known = self._lookup(name)
                if known is not None and known is not v and known.written:
                    raise NotSplittable(f"the lambda {v.name} copies a variable that changes")
        self._flush(self._later_names() | self._names(v.lambda_text))
        self.out.append(f"{body_line(self.p, v.lambda_line)}{v.lambda_text} (void){v.name};\n")


def _storage(v: Variable, keep: bool) -> str:
    """The declaration of a lane variable's array, or of a name for its type alone."""
    n = v.number
    if v.kind == "reference":
        kind = f"::fr::reference<fr_t{n}>"
        array = f"{kind} fr_v{n}[FR_N]; " if keep else ""
        first = f"fr_v{n}[0]" if keep else f"::fr::named<{kind}>::get()"
        return f"{array}auto&& {v.name} = {first}.get(); (void){v.name};\n"
    if keep:
        return (
            f"::fr::lanes_t<fr_t{n}, FR_N> fr_v{n}; fr_t{n}& {v.name} = fr_v{n}[0]; "
            f"(void){v.name};\n"
        )
    return f"fr_t{n}& {v.name} = ::fr::named<fr_t{n}>::get(); (void){v.name};\n"


def _plain_type(spec: str) -> str:
    """The type of a variable that counts lanes."""
    words = " ".join(w for w in spec.split() if w not in ("const", "thread"))
    return words.replace("auto", "uint")


def _without_storage(spec: str) -> str:
    return re.sub(r"\b(static|register|inline|thread_local)\b", "", spec)
