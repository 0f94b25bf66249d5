"""Kernels that synchronise, as loops over lanes split at each barrier and simd operation.

The body's statements between two such points become one loop over the lanes of a unit (a simdgroup,
or a whole threadgroup). What a lane keeps from one loop to a later one lies in an array with one
element per lane; what is the same in all lanes (`source.uniform`) is one variable outside the loops.

Control flow that holds a synchronising call moves outside the loops. Where its condition is uniform
it stays as it is; where lanes differ, it works with masks: an ``if`` runs both sides, each for its
own lanes; a loop goes on while a lane is left in it; ``return``, ``break`` and ``continue`` take
lanes out of the masks around them. Operations of a simdgroup see the lanes of the current mask, so
lanes that go different ways are told apart, and meet again, exactly as Metal says.

What cannot be split (`NotSplittable`) runs on fibers instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from tree_sitter import Node

from .cpp import (
    NotSplittable,
    Parameter,
    Prepared,
    attribute,
    body_line,
    parameters,
    synchronising_functions,
    used_attributes,
)
from .dialect import MATRIX_OPS, SIMD_BARRIERS, SYNC, THREADGROUP_BARRIERS, UNIFORM_RESULTS
from .lexer import tokens
from .syntax import Tree, callee, function_names, walk
from .uniform import (
    LANE_ATTRIBUTES,
    Facts,
    Uniformity,
    Variable,
    assigned,
    passed_by_name,
)

_WORD = re.compile(r"[A-Za-z_]\w*")
_LOOPS = ("for_statement", "while_statement", "do_statement")
_SPLIT_CALLS = (SYNC - MATRIX_OPS) | {"simdgroup_multiply", "simdgroup_multiply_accumulate"}
_GROUP_LEVEL = (
    "alias_declaration", "type_definition", "using_declaration", "static_assert_declaration",
    "struct_specifier", "preproc_def", "preproc_function_def", "preproc_undef", "empty_statement",
)  # fmt: skip
_VOTES = {"any": "bool", "all": "bool", "ballot": "simd_vote"}
_ASKS = {"active_threads_mask": "simd_vote", "is_first": "bool"}
_EFFECTS = re.compile(r"(?<![=!<>])=(?!=)|\+\+|--|\b(?:return|break|continue|goto|if|for|while)\b|[{};]")


@dataclass
class Mask:
    """A mask of the current nest: its C++ name and what leaves it (``fn``, ``if``, ``loop``…)."""

    name: str
    kind: str
    loop: int = -1


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


class Splitter:
    """Splits one body for one kind of unit.

    Args:
        prepared: the kernel.
        simdgroup: units are simdgroups; else whole threadgroups.
        rows: the lanes of a unit differ in x alone, so y and z are uniform.
    """

    def __init__(self, prepared: Prepared, *, simdgroup: bool, rows: bool) -> None:
        self.p = prepared
        self.simdgroup = simdgroup
        self.rows = rows
        text = _with_lanes(prepared.text.source, prepared.kernel.name)
        self.tree = Tree(text, body=True)
        if self.tree.has_error:
            raise NotSplittable("the body has syntax that the splitter does not read")
        self.macros = _macros(prepared)
        header = Tree(prepared.text.header, body=False)
        self.functions = frozenset(function_names(header))
        helpers = synchronising_functions(prepared)
        if helpers & prepared.text.words and any(
            callee(self.tree, n) in helpers
            for n in walk(self.tree.block)
            if n.type == "call_expression"
        ):
            raise NotSplittable("a function of the header synchronises")
        self.params = parameters(prepared.spec)
        self.attributes = used_attributes(prepared)
        self.need_function_mask = False
        self.masked_loops: set[int] = set()  # loops that some lanes leave before others
        self.continued_loops: set[int] = set()  # loops of which some lanes skip a rest
        self.variables: dict[int, Variable] = {}  # by the start of their declarator
        self.by_param: dict[str, Variable] = {}
        self.out: list[str] = []
        self.pending: list[Piece] = []
        self.scopes: list[dict[str, Variable]] = []
        self.masks: list[Mask] = []
        # The loops around, innermost last: where each starts, whether its head is plain C++, and
        # how many masks there were at its start.
        self.loops: list[tuple[int, bool, int]] = []
        self.divergent = 0
        self.count = 0
        self.later: list[str] = []
        self._statement_names: set[str] = set()  # of the statement whose calls are carried out

    # -- the whole -------------------------------------------------------------------------------

    def run(self) -> str:
        """The function's body, after its parameters.

        Raises:
            NotSplittable: the control flow does not allow it.
        """
        self._check()
        for _ in range(50):
            self._analyse()
            before = (self.need_function_mask, set(self.masked_loops), set(self.continued_loops))
            self.out, self.pending, self.masks, self.loops = [], [], [], []
            self.divergent = self.count = 0
            self.scopes = [dict(self.by_param)]
            if self.need_function_mask:
                self.out.append("int fr_m0[FR_N]; ::fr::split::all(fr_m0, fr_n);\n")
                self.masks.append(Mask("fr_m0", "fn"))
            self._declare_parameters()
            self._block(self.tree.block.named_children, [])
            if before == (self.need_function_mask, self.masked_loops, self.continued_loops):
                return "".join(self.out)
        raise NotSplittable("the control flow is too deep")

    def _check(self) -> None:
        for node in walk(self.tree.block):
            if node.type in ("goto_statement", "labeled_statement", "co_return_statement"):
                raise NotSplittable("the body jumps with goto")
            if node.type == "lambda_expression" and self._calls(node):
                raise NotSplittable("a lambda synchronises")
            if node.type in ("struct_specifier", "class_specifier") and self._calls(node):
                raise NotSplittable("a local struct synchronises")
            if node.type == "switch_statement" and self._calls(node):
                raise NotSplittable("a switch holds a synchronising call")
            if node.type.startswith("preproc_if") and (
                node.parent is not None and self._calls(node.parent)
            ):
                raise NotSplittable("an #if stands beside a synchronising call")
        used = set(_WORD.findall(self.p.text.source))
        for name, text in self.macros.items():
            if name in used and (set(_WORD.findall(text)) & SYNC or _EFFECTS.search(text)):
                raise NotSplittable(f"the macro {name} synchronises or holds statements")

    def _calls(self, node: Node) -> bool:
        """Whether a synchronising call stands in the node."""
        return any(
            n.type == "call_expression" and callee(self.tree, n) in _SPLIT_CALLS for n in walk(node)
        )

    def _names(self, text: str) -> set[str]:
        """The words of a text, with those that its macros and lambdas bring along."""
        found = set(_WORD.findall(text))
        todo = list(found)
        while todo:
            name = todo.pop()
            more = self.macros.get(name, "")
            variable = self._lookup(name)
            if variable is not None and variable.kind == "lambda":
                more += " " + variable.lambda_text
            new = set(_WORD.findall(more)) - found
            found |= new
            todo += new
        return found

    def _lookup(self, name: str) -> Variable | None:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return None

    # -- analysis: what is uniform ---------------------------------------------------------------

    def _facts(self) -> Facts:
        spec = self.p.spec
        names = self.p.kernel.input_names
        return Facts(
            simdgroup=self.simdgroup,
            rows=self.rows,
            inputs=frozenset(names),
            outputs=frozenset(self.p.kernel.output_names),
            scalars=frozenset(n for n, i in zip(names, spec.inputs, strict=True) if i.ndim == 0),
            functions=self.functions,
            opaque=frozenset(
                n for n, t in self.macros.items() if not re.fullmatch(r"[\s\w.:()+-]*", t)
                or set(_WORD.findall(t)) & set(_WORD.findall(self.p.text.source))
            ),
        )  # fmt: skip

    def _analyse(self) -> None:
        self.facts = self._facts()
        self.by_param = {}
        outputs = set(self.p.kernel.output_names)
        for q in self.params:
            self.by_param[q.name] = Variable(
                q.name, 0, readonly=q.name not in outputs, pointer=not q.scalar
            )
        self.variables = {}
        self.scopes = [dict(self.by_param)]
        self.uniformity = Uniformity(self.tree, self.facts, self._lookup)
        while True:
            before = self._state()
            self.scopes = [dict(self.by_param)]
            self.divergent = 0
            self.loops = []
            self._visit_block(self.tree.block.named_children, 0)
            if self._state() == before:
                break
        self.scopes = [dict(self.by_param)]

    def _state(self) -> list[tuple[bool, bool, bool, bool]]:
        return [
            (v.uniform, v.readonly, v.written, v.pointer)
            for v in (*self.by_param.values(), *self.variables.values())
        ]

    def _visit_block(self, statements: Iterable[Node], context: int) -> None:
        self.scopes.append({})
        for s in statements:
            self._visit(s, context)
        self.scopes.pop()

    def _visit(self, s: Node, context: int) -> None:
        kind = s.type
        if kind == "declaration":
            self._visit_declaration(s, context)
        elif kind == "expression_statement":
            self._visit_expression(s.named_children[0] if s.named_children else None, context)
        elif self._splits(s) and kind == "compound_statement":
            self._visit_block(s.named_children, context)
        elif self._splits(s) and kind == "if_statement":
            self._visit_if(s, context)
        elif self._splits(s) and kind in _LOOPS:
            self._visit_loop(s, context)
        elif kind == "else_clause":
            for c in s.named_children:
                self._visit(c, context)
        else:
            self._opaque_writes(s)

    def _opaque_writes(self, node: Node) -> None:
        """Whatever a statement inside a loop over lanes may write is not uniform."""
        inner = {
            self.tree.text(n)
            for d in walk(node)
            if d.type in ("init_declarator", "array_declarator", "declaration")
            for n in [_declared_name(d)]
            if n is not None
        }
        for name, through in assigned(self.tree, node):
            self._written(name, inner, through)
        for name, through in passed_by_name(self.tree, node, self._callables()):
            self._written(name, inner, through)

    def _callables(self) -> frozenset[str]:
        lambdas = {n for scope in self.scopes for n, v in scope.items() if v.kind == "lambda"}
        return self.functions | lambdas

    def _written(self, name: str, inner: set[str], through: bool) -> None:
        variable = self._lookup(name)
        if variable is not None and not (through and variable.pointer):
            variable.written = True
            if name not in inner or variable.kind == "value":
                variable.uniform = False

    def _variable(self, key: int, made: Variable) -> Variable:
        known = self.variables.get(key)
        if known is None:
            known = self.variables[key] = made
            made.number = len(self.variables)
        known.context = made.context
        self.scopes[-1][known.name] = known
        return known

    def _visit_declaration(self, s: Node, context: int) -> None:
        for d in _declarators(s):
            variable = self._declared(s, d, context)
            value = d.child_by_field_name("value") if d.type == "init_declarator" else None
            if variable.kind == "lambda":
                variable.uniform = False
                if value is not None:
                    self._opaque_writes(value)
                continue
            if value is not None and value.type != "lambda_expression":
                self._side_effects(value)
            if variable.kind in ("reference", "shared"):
                variable.uniform = variable.kind == "shared"
                variable.readonly = False
            elif variable.kind == "array" and (value is None or not variable.is_const):
                variable.uniform = False
            elif not self.uniformity.of(value):
                variable.uniform = False
            if not self.uniformity.readonly(value):
                variable.readonly = False
            if variable.kind == "value" and "auto" in variable.type.split():
                variable.pointer |= self.uniformity.pointer(value)

    def _side_effects(self, value: Node) -> None:
        for name, through in assigned(self.tree, value):
            self._written(name, set(), through)
        for name, through in passed_by_name(self.tree, value, self._callables()):
            self._written(name, set(), through)

    def _declared(self, s: Node, d: Node, context: int) -> Variable:
        """The variable of a declarator, known from an earlier pass or new."""
        spec, declarator, _ = self._parts(s, d)
        name_node = _declared_name(d)
        if name_node is None:
            raise NotSplittable(f"the declaration {self.tree.text(s)!r} is not understood")
        value = d.child_by_field_name("value") if d.type == "init_declarator" else None
        if value is not None and value.type == "lambda_expression":
            kind = "lambda"
        elif "thread_local" in spec.split():
            kind = "shared"
        elif "&" in declarator:
            kind = "reference"
        elif "[" in declarator:
            kind = "array"
        else:
            kind = "value"
        if "(" in declarator or "[]" in declarator.replace(" ", ""):
            raise NotSplittable(f"the declarator {declarator!r} is not understood")
        words = spec.split()
        variable = self._variable(
            d.start_byte,
            Variable(
                self.tree.text(name_node), context, kind=kind, type=spec,
                pointer=kind == "value" and "*" in declarator,
                is_const="constexpr" in words or ("const" in words and "*" not in declarator),
            ),
        )  # fmt: skip
        if kind == "lambda":
            variable.lambda_text = self.tree.text(s)
            variable.lambda_line = self._line(s)
        return variable

    def _visit_expression(self, e: Node | None, context: int) -> None:
        if e is None:
            return
        target: Node | None = None
        value: Node | None = None
        if e.type == "assignment_expression":
            target, value = e.child_by_field_name("left"), e.child_by_field_name("right")
        elif e.type == "update_expression":
            target = e.child_by_field_name("argument")
        if target is None or target.type != "identifier":
            self._opaque_writes(e)
            return
        if value is not None:
            self._side_effects(value)
        variable = self._lookup(self.tree.text(target))
        if variable is None:
            return
        variable.written = True
        if variable.context != context or not self.uniformity.of(value):
            variable.uniform = False
        if not self.uniformity.readonly(value):
            variable.readonly = False

    def _visit_if(self, s: Node, context: int) -> None:
        condition = s.child_by_field_name("condition")
        if condition is not None:
            self._side_effects(condition)
        inner = context if self._uniform_if(s) else self._deeper()
        for part in ("consequence", "alternative"):
            branch = s.child_by_field_name(part)
            if branch is not None:
                self._visit_block([branch], inner)

    def _deeper(self) -> int:
        self.divergent += 1
        return self.divergent

    def _uniform_if(self, s: Node) -> bool:
        return self.uniformity.of(s.child_by_field_name("condition"))

    def _visit_loop(self, s: Node, context: int) -> None:
        self.scopes.append({})
        start = s.child_by_field_name("initializer")
        condition = s.child_by_field_name("condition")
        update = s.child_by_field_name("update")
        outer = context
        if start is not None and start.type == "declaration":
            # Declared here: changes in the head keep it uniform while the loop itself is.
            self._visit_declaration(start, context)
        elif start is not None:
            self._visit_expression(_expression(start), context)
        for part in (condition,):
            if part is not None:
                self._side_effects(part)
        uniform = self.uniformity.of(condition)
        inner = context if uniform else self._deeper()
        if s.start_byte in self.masked_loops | self.continued_loops and uniform:
            # Lanes leave at different times: what was declared outside may differ afterwards.
            inner = self._deeper()
            for variable in self.scopes[-1].values():
                variable.context = inner if variable.context == outer else variable.context
        if update is not None:
            self._visit_expression(update, inner)
        body = s.child_by_field_name("body")
        if body is not None:
            self._visit_block([body], inner)
        self.scopes.pop()

    # -- what stands where -----------------------------------------------------------------------

    def _splits(self, s: Node) -> bool:
        """Whether a statement cannot be part of one loop over lanes."""
        if self._calls(s):
            return True
        # A uniform jump is better made once for all lanes than once for each.
        if s.type == "compound_statement":
            return any(self._splits(c) for c in s.named_children)
        if s.type == "if_statement" and self._exits(s):
            return self._uniform_if(s)
        return s.type in ("return_statement", "break_statement", "continue_statement")

    def _exits(self, node: Node, nested: bool = False, switched: bool = False) -> bool:
        """Whether control may leave the node by return, break or continue."""
        for child in node.children:
            kind = child.type
            if kind == "return_statement":
                return True
            if kind == "break_statement" and not nested and not switched:
                return True
            if kind == "continue_statement" and not nested:
                return True
            if kind in ("lambda_expression", "function_definition", "struct_specifier"):
                continue
            if self._exits(child, nested or kind in _LOOPS, switched or kind == "switch_statement"):
                return True
        return False

    def _parts(self, s: Node, d: Node) -> tuple[str, str, Node]:
        """A declaration's specifiers, one declarator without its initialiser, and its name."""
        first = _declarators(s)[0]
        spec = self.tree.data[s.start_byte : first.start_byte].decode().strip()
        inner = d.child_by_field_name("declarator") if d.type == "init_declarator" else d
        name = _declared_name(d)
        if inner is None or name is None:
            raise NotSplittable(f"the declaration {self.tree.text(s)!r} is not understood")
        return spec, self.tree.text(inner), name

    def _line(self, node: Node) -> int:
        return node.start_point[0] + 1

    # -- emission: blocks ------------------------------------------------------------------------

    def _block(self, statements: list[Node], after: list[str]) -> None:
        """Emit statements; `after` are texts that may use this block's variables later."""
        self.scopes.append({})
        texts = [self.tree.text(s) for s in statements]
        for i, s in enumerate(statements):
            self.later = texts[i + 1 :] + after
            self._statement(s)
        self.later = after
        self._flush(set())
        self.scopes.pop()

    def _nested(self, statement: Node) -> None:
        """Emit a branch or a loop's body in braces of its own."""
        self._flush(self._later_names())
        self.out.append("{\n")
        statements = (
            statement.named_children if statement.type == "compound_statement" else [statement]
        )
        kept = self.later
        self._block([s for s in statements if s.type != "comment"], [])
        self.later = kept
        self.out.append("}\n")

    def _later_names(self) -> set[str]:
        return self._names(" ".join(self.later))

    def _statement(self, s: Node) -> None:
        kind = s.type
        if kind in ("comment", "preproc_call"):
            return
        if kind == "attributed_statement":
            self._statement(s.named_children[-1])
        elif kind in _GROUP_LEVEL or (kind == "declaration" and self._is_constant(s)):
            self._flush(self._later_names() | self._names(self.tree.text(s)))
            self._verbatim(s)
        elif kind == "declaration":
            self._declaration(s)
        elif kind == "expression_statement":
            self._expression(s)
        elif not self._splits(s):
            self._piece(s)
        elif kind == "compound_statement":
            self._flush(self._later_names() | self._names(self.tree.text(s)))
            self._nested(s)
        elif kind == "if_statement":
            self._if(s)
        elif kind in _LOOPS:
            self._loop(s)
        elif kind in ("return_statement", "break_statement", "continue_statement"):
            self._jump(s)
        else:
            raise NotSplittable(f"a {kind.replace('_', ' ')} holds a synchronising call")

    def _is_constant(self, s: Node) -> bool:
        return "constexpr" in self.tree.text(s).split("=")[0].split() or not _declarators(s)

    def _verbatim(self, s: Node) -> None:
        if s.type == "declaration":
            for d in _declarators(s):
                variable = self._declared(s, d, 0)
                variable.uniform = True
        self._at(s, self.tree.text(s) + ("" if self.tree.text(s).endswith("\n") else "\n"))

    def _at(self, node: Node, text: str) -> None:
        self.out.append(f"{body_line(self.p, self._line(node))}{text}")

    # -- emission: statements of a loop over lanes -------------------------------------------------

    def _piece(self, s: Node, replaced: dict[int, str] | None = None) -> None:
        text, exits = self._with_exits(s, replaced or {})
        self.pending.append(Piece(text, self._line(s), exits=exits))

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
                visit(child, nested or kind in _LOOPS, switched or kind == "switch_statement")

        visit(s, False, False)
        return self._render(s, jumps), found

    def _lane_jump(self, kind: str) -> str:
        """One lane leaves: cleared in the masks around it, then on to the next lane."""
        cleared: list[str] = []
        if kind == "return":
            if not self.need_function_mask:
                self.need_function_mask = True
                raise _Again
            # A lane that returned is in no mask of a loop around it either.
            cleared = [m.name for m in self.masks]
            for loop, _, _ in self.loops:
                if loop not in self.masked_loops:
                    self.masked_loops.add(loop)
                    raise _Again
        else:
            loop = self.loops[-1][0]
            wanted = self.masked_loops if kind == "break" else self.continued_loops
            if loop not in wanted:
                wanted.add(loop)
                raise _Again
            for m in reversed(self.masks):
                if kind == "continue" and m.kind == "loop":
                    break
                cleared.append(m.name)
                if m.loop == loop and m.kind == ("loop" if kind == "break" else "round"):
                    break
        clear = " ".join(f"{name}[fr_i] = 0;" for name in cleared)
        return f"{{ {clear} goto fr_next; }}"

    def _mask(self) -> str:
        return self.masks[-1].name if self.masks else ""

    def _flush(self, later: set[str], types: list[str] | None = None) -> None:
        """Emit the pending statements as one loop over the lanes.

        `later` are the names used afterwards; `types` are declarations that go before the loop
        but may speak of what the statements declare.
        """
        pieces, self.pending = self.pending, []
        if not pieces:
            self.out += types or []
            return
        kept: list[Variable] = []
        own: list[Variable] = []
        lines: list[str] = []
        for piece in pieces:
            keep = any(v.name in later for v in piece.declared)
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
        names = self._names(body) - local
        exits = any(p.exits for p in pieces)
        mask = self._mask()
        self.out.append(f'#line 1 "ferrule"\nfor (unsigned fr_i = 0; fr_i < fr_n; ++fr_i) ')
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
            out.append(f"{body_line(self.p, v.lambda_line)}{v.lambda_text}\n")
        return "".join(out)

    def _lane_attribute(self, name: str) -> str:
        text = attribute(name)
        text = text.replace("fr_i", "(fr_first + fr_i)")
        if name == "thread_index_in_simdgroup" and self.simdgroup:
            text = "const uint thread_index_in_simdgroup = fr_i;"
        elif name == "simdgroup_index_in_threadgroup" and self.simdgroup:
            text = "const uint simdgroup_index_in_threadgroup = fr_first / 32u;"
        if self.rows:
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

    def _declaration(self, s: Node) -> None:
        replaced = self._extract(s)
        pieces: list[Piece] = []
        plain = True
        for d in _declarators(s):
            v = self._declared(s, d, 0)
            spec, declarator, name = self._parts(s, d)
            value = d.child_by_field_name("value") if d.type == "init_declarator" else None
            if v.kind == "lambda":
                self._lambda(v)
                continue
            if v.kind == "shared":
                text = re.sub(r"\b(thread_local|static)\b", "", spec)
                self._at(s, f"alignas(16) {text} {declarator};\n")
                continue
            if v.uniform and v.kind in ("value", "array"):
                init = self._render(d, replaced)
                self._at(s, f"{spec} {init};\n")
                plain = False
                continue
            pieces.append(self._lane_declaration(s, d, v, spec, declarator, name, value, replaced))
        if not pieces:
            return
        whole = len(pieces) == len(_declarators(s)) and plain
        if whole:
            joined = Piece("", self._line(s), plain=self._render(s, replaced))
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
            return Piece("", self._line(s), [v], [text], [f"fr_v{n}[fr_i].set({init});"], plain)
        if is_auto:
            const = "const " if "const" in words and "*" not in declarator else ""
            text = f"typedef {const}::fr::value_t<decltype({init})> fr_t{n};\n@"
        else:
            start = name.start_byte - (
                d.child_by_field_name("declarator") or d if d.type == "init_declarator" else d
            ).start_byte
            renamed = declarator[:start] + f"fr_t{n}" + declarator[start + len(v.name) :]
            text = f"{body_line(self.p, self._line(s))}typedef {_without_storage(spec)} {renamed};\n@"
        return Piece("", self._line(s), [v], [text], [self._initialise(v, value, init, is_auto)], plain)

    def _initialise(self, v: Variable, value: Node | None, init: str, is_auto: bool) -> str:
        target = f"fr_v{v.number}[fr_i]"
        if value is None:
            return f"(void){target};"
        if v.kind == "array":
            return f"new (::fr::here(), &{target}) ::fr::storage_t<fr_t{v.number}> {init};"
        if value.type == "argument_list":
            return f"{target} = fr_t{v.number}{init};"
        if value.type == "initializer_list":
            return f"{target} = ::fr::storage_t<fr_t{v.number}>{init};"
        return f"{target} = {init};"

    def _lambda(self, v: Variable) -> None:
        captures = re.match(r"[^\[]*\[([^\]]*)\]", v.lambda_text)
        inside = captures.group(1) if captures else ""
        if re.search(r"(?<![&\w])\w|=", inside.replace("&", " &")) and inside.strip() != "&":
            for name in self._names(v.lambda_text):
                known = self._lookup(name)
                if known is not None and known is not v and known.written:
                    raise NotSplittable(f"the lambda {v.name} copies a variable that changes")
        self._flush(self._later_names() | self._names(v.lambda_text))
        self.out.append(f"{body_line(self.p, v.lambda_line)}{v.lambda_text} (void){v.name};\n")

    # -- emission: expressions ---------------------------------------------------------------------

    def _expression(self, s: Node) -> None:
        e = s.named_children[0] if s.named_children else None
        if e is None:
            return
        if e.type == "call_expression":
            name = callee(self.tree, e)
            if name in THREADGROUP_BARRIERS | SIMD_BARRIERS:
                self._flush(self._later_names())
                return
            if name in ("simdgroup_multiply", "simdgroup_multiply_accumulate"):
                self._matrix(e, name)
                return
        target: Node | None = None
        if e.type == "assignment_expression":
            target = e.child_by_field_name("left")
        elif e.type == "update_expression":
            target = e.child_by_field_name("argument")
        if target is not None and target.type == "identifier":
            variable = self._lookup(self.tree.text(target))
            if variable is not None and variable.uniform and variable.kind == "value":
                replaced = self._extract(s)
                self._flush(self._later_names() | self._names(self.tree.text(s)))
                self._at(s, self._render(s, replaced) + "\n")
                return
        self._piece(s, self._extract(s))

    def _extract(self, s: Node) -> dict[int, str]:
        """Carry out the synchronising calls of a statement; what stands for each result."""
        replaced: dict[int, str] = {}
        if not self._calls(s):
            return replaced
        self._refuse_order(s)
        outer, self._statement_names = self._statement_names, self._names(self.tree.text(s))
        self._statement_names |= outer

        def visit(node: Node) -> None:
            if node.type == "conditional_expression":
                parts = [node.child_by_field_name(f) for f in ("consequence", "alternative")]
                if any(p is not None and self._calls(p) for p in parts):
                    raise NotSplittable("a branch of ?: holds a synchronising call")
            if node.type == "binary_expression" and node.children[1].type in ("&&", "||"):
                right = node.child_by_field_name("right")
                if right is not None and self._calls(right):
                    raise NotSplittable(f"a synchronising call stands behind {node.children[1].type}")
            for child in node.children:
                visit(child)
            if node.type == "call_expression" and callee(self.tree, node) in _SPLIT_CALLS:
                replaced[node.id] = self._operation(node, replaced)

        visit(s)
        self._statement_names = outer
        return replaced

    def _refuse_order(self, s: Node) -> None:
        """Side effects beside a synchronising call would happen in another order."""
        top = s.named_children[0] if s.type == "expression_statement" and s.named_children else None
        for node in walk(s):
            if node.type in ("update_expression", "assignment_expression") and node != top:
                raise NotSplittable("an expression changes a variable beside a synchronising call")

    def _operation(self, call: Node, replaced: dict[int, str]) -> str:
        """Carry out one operation of the simdgroup on arrays of its operands."""
        name = callee(self.tree, call)
        if name in THREADGROUP_BARRIERS | SIMD_BARRIERS or name in MATRIX_OPS:
            raise NotSplittable(f"{name} stands inside an expression")
        given = call.child_by_field_name("arguments")
        arguments = [c for c in given.named_children if c.type != "comment"] if given else []
        texts = [self._render(a, replaced) for a in arguments]
        self.count += 1
        n = self.count
        short = name.split("_", 1)[1]
        uniform = self.simdgroup and name in UNIFORM_RESULTS
        mask = self._mask() or "nullptr"
        line = self._line(call)
        later = self._later_names()
        if short in _ASKS:
            self._flush(later | self._statement_names)
            result = _ASKS[short]
            if uniform:
                self.out.append(f"const {result} fr_x{n} = ::fr::split::uniform_{name}(fr_n, {mask});\n")
                return f"fr_x{n}"
            self.out.append(
                f"{result} fr_x{n}[FR_N]; ::fr::split::{name}(fr_x{n}, fr_n, {mask});\n"
            )
            return f"fr_x{n}[fr_i]"
        if not texts:
            raise NotSplittable(f"{name} has no operand")
        types: list[str] = []
        if short in _VOTES:
            types.append(f"bool fr_x{n}[FR_N];\n")
            self.pending.append(Piece(f"fr_x{n}[fr_i] = bool({texts[0]});", line))
        else:
            types.append(
                f"{body_line(self.p, line)}typedef ::fr::value_t<decltype({texts[0]})> fr_q{n}; "
                f"fr_q{n} fr_x{n}[FR_N];\n"
            )
            self.pending.append(Piece(f"fr_x{n}[fr_i] = {texts[0]};", line))
        operands = [f"fr_x{n}"]
        rest = list(zip(arguments[1:], texts[1:], strict=True))
        if "_and_fill_" in short and rest:
            types.append(f"fr_q{n} fr_f{n}[FR_N];\n")
            self.pending.append(Piece(f"fr_f{n}[fr_i] = fr_q{n}({rest[0][1]});", line))
            operands.append(f"fr_f{n}")
            rest = rest[1:]
        for k, (node, text) in enumerate(rest):
            if self.uniformity.of(node):
                operands.append(f"unsigned({text})")
            else:
                types.append(f"unsigned fr_k{n}_{k}[FR_N];\n")
                self.pending.append(Piece(f"fr_k{n}_{k}[fr_i] = unsigned({text});", line))
                operands.append(f"static_cast<const unsigned*>(fr_k{n}_{k})")
        self._flush(later | self._statement_names | self._names(" ".join(texts)), types)
        listed = ", ".join(operands)
        if uniform:
            self.out.append(f"const auto fr_u{n} = ::fr::split::uniform_{name}({listed}, fr_n, {mask});\n")
            return f"fr_u{n}"
        if short in _VOTES:
            self.out.append(
                f"{_VOTES[short]} fr_r{n}[FR_N]; "
                f"::fr::split::{name}(fr_r{n}, {listed}, fr_n, {mask});\n"
            )
            return f"fr_r{n}[fr_i]"
        self.out.append(f"::fr::split::{name}({listed}, fr_n, {mask});\n")
        return f"fr_x{n}[fr_i]"

    def _matrix(self, call: Node, name: str) -> None:
        given = call.child_by_field_name("arguments")
        arguments = [c for c in given.named_children if c.type != "comment"] if given else []
        self.count += 1
        n = self.count
        types: list[str] = []
        line = self._line(call)
        for k, a in enumerate(arguments):
            text = self.tree.text(a)
            const = "" if k == 0 else "const "
            types.append(f"{const}::fr::value_t<decltype({text})>* fr_p{n}_{k}[FR_N];\n")
            self.pending.append(Piece(f"fr_p{n}_{k}[fr_i] = &({text});", line))
        names = self._names(self.tree.text(call))
        self._flush(self._later_names() | names, types)
        listed = ", ".join(f"fr_p{n}_{k}" for k in range(len(arguments)))
        self.out.append(f"::fr::split::{name}({listed}, fr_n, {self._mask() or 'nullptr'});\n")

    # -- emission: control flow --------------------------------------------------------------------

    def _if(self, s: Node) -> None:
        condition = s.child_by_field_name("condition")
        yes, no = s.child_by_field_name("consequence"), s.child_by_field_name("alternative")
        assert condition is not None and yes is not None
        otherwise = no.named_children[-1] if no is not None and no.named_children else None
        inner = condition.child_by_field_name("value") or condition
        if condition.child_by_field_name("initializer") is not None or inner.type == "declaration":
            raise NotSplittable("an if declares a variable in its condition")
        uniform = self.uniformity.of(condition)
        constexpr = any(c.type == "constexpr" for c in s.children)
        self._statement_names = self._names(self.tree.text(s))
        replaced = self._extract(condition)
        self._statement_names = set()
        text = self._render(condition, replaced)
        later = self._later_names() | self._names(self.tree.text(s))
        if uniform:
            self._flush(later)
            self._at(s, f"if {'constexpr ' if constexpr else ''}{text} ")
            self._nested(yes)
            if otherwise is not None:
                self.out.append("else ")
                self._nested(otherwise)
            return
        self.count += 1
        n = self.count
        mask = self._mask() or "nullptr"
        self.pending.append(Piece(f"fr_c{n}[fr_i] = {text} ? 1 : 0;", self._line(s)))
        self._flush(later, [f"int fr_c{n}[FR_N], fr_y{n}[FR_N], fr_n{n}[FR_N];\n"])
        self.out.append(f"::fr::split::both(fr_y{n}, fr_n{n}, {mask}, fr_c{n}, fr_n);\n")
        for name, branch in ((f"fr_y{n}", yes), (f"fr_n{n}", otherwise)):
            if branch is None:
                continue
            self.out.append(f"if (::fr::split::any({name}, fr_n)) ")
            self.masks.append(Mask(name, "if"))
            self._nested(branch)
            self.masks.pop()

    def _loop(self, s: Node) -> None:
        self._flush(self._later_names() | self._names(self.tree.text(s)))
        body = s.child_by_field_name("body")
        condition = s.child_by_field_name("condition")
        start, update = s.child_by_field_name("initializer"), s.child_by_field_name("update")
        assert body is not None
        if condition is not None and condition.type == "condition_clause":
            condition = condition.child_by_field_name("value")
        if any(c is not None and c.type == "declaration" and c is not start for c in (condition,)):
            raise NotSplittable("a loop declares a variable in its condition")
        loop = s.start_byte
        self.scopes.append({})
        self.out.append("{\n")
        kept = self.later
        self.later = [self.tree.text(s), *kept]
        calls = any(c is not None and self._calls(c) for c in (condition, update, start))
        uniform = self.uniformity.of(condition) and not calls
        heads_plain = uniform and self._plain_head(start, update)
        if loop in self.masked_loops or not heads_plain or not uniform:
            masked = True
        else:
            masked = loop in self.continued_loops
        if masked:
            self.count += 1
            mask, n = self._mask() or "nullptr", self.count
            self.out.append(f"int fr_l{n}[FR_N]; ::fr::split::copy(fr_l{n}, {mask}, fr_n);\n")
            self.masks.append(Mask(f"fr_l{n}", "loop", loop))
        self.loops.append((loop, heads_plain, len(self.masks)))
        if heads_plain:
            self._plain_loop(s, start, condition, update, body, masked)
        else:
            self._lane_loop(s, start, condition, update, body)
        self.loops.pop()
        if masked:
            self.masks.pop()
        self.later = kept
        self.out.append("}\n")
        self.scopes.pop()
        if masked and self.need_function_mask and any(m.kind == "fn" for m in self.masks):
            self.out.append("if (!::fr::split::any(fr_m0, fr_n)) return;\n")

    def _plain_head(self, start: Node | None, update: Node | None) -> bool:
        """Whether a loop's head only speaks of uniform variables."""
        if start is not None and start.type == "declaration":
            if not all(self._declared(start, d, 0).uniform for d in _declarators(start)):
                return False
        for part in (_expression(start) if start is not None else None, update):
            if part is None or part.type == "declaration":
                continue
            for name, _ in assigned(self.tree, part):
                v = self._lookup(name)
                if v is None or not v.uniform:
                    return False
            if not any(True for _ in assigned(self.tree, part)):
                return False
        return True

    def _plain_loop(
        self, s: Node, start: Node | None, condition: Node | None, update: Node | None, body: Node,
        masked: bool,
    ) -> None:  # fmt: skip
        if start is not None and start.type == "declaration":
            for d in _declarators(start):
                self._declared(start, d, 0)
        test = self.tree.text(condition) if condition is not None else ""
        if s.type == "for_statement":
            first = self.tree.text(start).rstrip(";") if start is not None else ""
            step = self.tree.text(update) if update is not None else ""
            self._at(s, f"for ({first}; {test}; {step}) {{\n")
        elif s.type == "while_statement":
            self._at(s, f"while ({test}) {{\n")
        else:
            self._at(s, "do {\n")
        self._round(s, body)
        if masked:
            self.out.append(f"if (!::fr::split::any({self._loop_mask(s)}, fr_n)) break;\n")
        self.out.append("}\n" if s.type != "do_statement" else f"}} while {_parenthesised(test)};\n")

    def _loop_mask(self, s: Node) -> str:
        return next(m.name for m in reversed(self.masks) if m.kind == "loop" and m.loop == s.start_byte)

    def _round(self, s: Node, body: Node) -> None:
        """One round of a loop: with a mask of its own where lanes may skip the rest of it."""
        if s.start_byte not in self.continued_loops:
            self._nested(body)
            return
        self.count += 1
        name = f"fr_o{self.count}"
        self.out.append(f"int {name}[FR_N]; ::fr::split::copy({name}, {self._loop_mask(s)}, fr_n);\n")
        self.masks.append(Mask(name, "round", s.start_byte))
        self._nested(body)
        self.masks.pop()

    def _lane_loop(
        self, s: Node, start: Node | None, condition: Node | None, update: Node | None, body: Node
    ) -> None:
        """A loop that lanes leave at different times."""
        if start is not None:
            self._statement(start)
            self._flush(self._later_names())
        mask = self._loop_mask(s)
        self.out.append("for (;;) {\n")
        if s.type == "do_statement":
            self._round(s, body)
            self._leave(s, condition, mask)
        else:
            self._leave(s, condition, mask)
            self._round(s, body)
            if update is not None:
                if self._calls(update):
                    raise NotSplittable("a loop's step holds a synchronising call")
                self.pending.append(Piece(self.tree.text(update) + ";", self._line(update)))
                self._flush(self._later_names())
        self.out.append("}\n")

    def _leave(self, s: Node, condition: Node | None, mask: str) -> None:
        """Take the lanes out of the loop whose condition has become false."""
        if condition is not None:
            self._statement_names = self._names(self.tree.text(s))
            replaced = self._extract(condition)
            self._statement_names = set()
            text = self._render(condition, replaced)
            self.pending.append(Piece(f"if (!({text})) {mask}[fr_i] = 0;", self._line(condition)))
            self._flush(self._later_names())
        self.out.append(f"if (!::fr::split::any({mask}, fr_n)) break;\n")

    def _jump(self, s: Node) -> None:
        """A jump that all active lanes make."""
        kind = s.type.split("_")[0]
        if kind == "return":
            together = not self.masks
        else:
            loop, plain, depth = self.loops[-1]
            together = plain and len(self.masks) == depth and loop not in self.masked_loops
        if together:
            self._flush(self._later_names())
            self._at(s, f"{kind};\n")
            return
        self.pending.append(Piece(self._lane_jump(kind), self._line(s), exits=True))
        self._flush(self._later_names())


class _AgainType(Exception):
    """A mask is needed that was not planned: plan it and emit anew."""


_Again = _AgainType()


def _storage(v: Variable, keep: bool) -> str:
    """The declaration of a lane variable's array, or of a name for its type alone."""
    n = v.number
    if v.kind == "reference":
        return (
            f"::fr::reference<fr_t{n}> fr_v{n}[FR_N]; auto&& {v.name} = fr_v{n}[0].get(); (void){v.name};\n"
            if keep
            else f"auto&& {v.name} = ::fr::named<::fr::reference<fr_t{n}>>::get().get(); (void){v.name};\n"
        )
    if keep:
        return (
            f"::fr::storage_t<fr_t{n}> fr_v{n}[FR_N]; fr_t{n}& {v.name} = fr_v{n}[0]; "
            f"(void){v.name};\n"
        )
    return f"fr_t{n}& {v.name} = ::fr::named<fr_t{n}>::get(); (void){v.name};\n"


def _without_storage(spec: str) -> str:
    return re.sub(r"\b(static|register|inline)\b", "", spec)


def _parenthesised(test: str) -> str:
    return test if test.startswith("(") and test.endswith(")") else f"({test})"


def _expression(node: Node | None) -> Node | None:
    if node is not None and node.type == "expression_statement":
        return node.named_children[0] if node.named_children else None
    return node


def _declarators(s: Node) -> list[Node]:
    return list(s.children_by_field_name("declarator"))


def _declared_name(d: Node) -> Node | None:
    """The identifier that a declarator declares."""
    node: Node | None = d
    while node is not None and node.type != "identifier":
        following = node.child_by_field_name("declarator")
        if following is None and node.type in ("reference_declarator", "pointer_declarator"):
            following = next((c for c in node.named_children if "identifier" in c.type or "declarator" in c.type), None)
        node = following
    return node


def _with_lanes(text: str, kernel: str) -> str:
    """Loads and stores of matrices ask for their lane."""
    part = tokens(text, kernel=kernel, where="source")
    solid = [t for t in part if not t.blank]
    for i, token in enumerate(solid[:-1]):
        if token.text in ("simdgroup_load", "simdgroup_store") and solid[i + 1].text == "(":
            solid[i + 1].text = "(::fr::at_lane{fr_i % 32u}, "
    return "".join(t.text for t in part)


def _macros(p: Prepared) -> dict[str, str]:
    """The macros of both texts: names and what they stand for."""
    found: dict[str, str] = {}
    for text in (p.text.header, p.text.source):
        joined = text.replace("\\\n", " ")
        for match in re.finditer(r"^[ \t]*#[ \t]*define[ \t]+(\w+)(\([^)]*\))?(.*)$", joined, re.M):
            found[match.group(1)] = match.group(3)
    return found


def split_body(p: Prepared, *, simdgroup: bool, rows: bool) -> str:
    """The split body of a kernel.

    Raises:
        NotSplittable: the control flow does not allow it.
    """
    splitter = Splitter(p, simdgroup=simdgroup, rows=rows)
    for _ in range(200):
        try:
            return splitter.run()
        except _AgainType:
            continue
    raise NotSplittable("the control flow is too deep")

