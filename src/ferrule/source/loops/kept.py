"""Declarations in a body that is split: of one variable for all lanes, or of one for each."""

from __future__ import annotations

import re

from tree_sitter import Node

from ..cpp import shared_note
from ..syntax import declarators, declared_name
from .body import WORD, Variable, line_of
from .lanes import Piece, Replaced, render
from .nest import Nest
from .operations import Operations
from .statements import initial_value, inner_declarator


class Declarations:
    """Writes declarations: uniform ones outside the loops over lanes, others inside."""

    def __init__(self, operations: Operations) -> None:
        self.operations, self.lanes = operations, operations.lanes
        self.body, self.tree = operations.body, operations.tree

    def parameters(self) -> None:
        """Parameters that the body moves are variables like any other."""
        write = self.lanes.write
        for q in self.body.parameters:
            variable = self.lanes.scopes.variables[q.name]
            n, name = variable.number, q.name
            if q.scalar:
                write(f"const auto fr_s_{name} = fr_a_{name};\n")
                write(f"{q.type} {name} = fr_s_{name}; (void){name};\n")
            elif variable.uniform:
                write(f"{q.type} {name} = fr_a_{name}; (void){name};\n")
            else:
                write(
                    f"typedef {q.type} fr_t{n}; FR_LANES fr_t{n} fr_v{n}[FR_N]; "
                    f"fr_t{n}& {name} = fr_v{n}[0]; (void){name};\n"
                    f"for (unsigned fr_i = 0; fr_i < fr_n; ++fr_i) fr_v{n}[fr_i] = fr_a_{name};\n"
                )

    def statement(self, statement: Node, nest: Nest) -> None:
        """Write a declaration."""
        if not self.body.calls(statement):
            self._group(statement, declarators(statement), {}, nest)
            return
        # A declarator may speak of the one before it: one after the other.
        for declarator in declarators(statement):
            replaced = self.operations.extract(declarator, statement, nest)
            self._group(statement, [declarator], replaced, nest)

    def _group(self, statement: Node, group: list[Node], replaced: Replaced, nest: Nest) -> None:
        """Write declarators of a statement."""
        lanes, fast, pieces = self.lanes, dict(replaced), list[Piece]()
        for declarator in group:
            variable = lanes.scopes.enter(statement, declarator)
            spec, value = variable.type, initial_value(declarator)
            if variable.kind == "lambda":
                lanes.add_lambda(variable, nest)
                continue
            if variable.kind == "shared":
                spec = re.sub(r"\b(thread_local|static)\b", "", spec)
                text = self.tree.text(inner_declarator(declarator))
                note = shared_note(line_of(statement), variable.name)
                if "atomic" in spec:  # one thread runs the whole threadgroup
                    spec = f"::fr::owned_t<{spec.strip()}>"
                lanes.write(f"alignas(16) {spec} {text}; {note}\n", statement)
                continue
            spec = re.sub(r"\bthread_local\b", "", spec)  # a pointer beside such memory is private
            if variable.uniform and variable.kind in ("value", "array"):
                if lanes.leaving or lanes.uniformity.reads_shared(declarator):
                    # A lane that leaves may guard what follows: a load, a division. And what lanes
                    # wrote to threadgroup memory is read.
                    lanes.flush(nest, self.tree.text(statement))
                lanes.write(f"{spec} {lanes.outside(declarator, replaced)};\n", statement)
                continue
            if variable.linear and value is not None:
                if lanes.leaving:
                    lanes.flush(nest, self.tree.text(statement))
                fast[value.id] = lanes.write_last(variable, lanes.last(value), statement)
            else:
                fast |= lanes.prepared(declarator, replaced)
            pieces.append(self._piece(statement, declarator, variable, spec, fast))
        if len(pieces) == len(declarators(statement)):
            text = render(self.tree, statement, fast)
            declared = tuple(d for piece in pieces for d in piece.declared)
            kept = " ".join(piece.kept for piece in pieces)
            pieces = [Piece(text, line_of(statement), declared, kept)]
        lanes.add_pieces(pieces)

    def _piece(
        self, statement: Node, declarator: Node, variable: Variable, spec: str, replaced: Replaced
    ) -> Piece:
        """One declarator as an array with an element for each lane."""
        inner, name, n = inner_declarator(declarator), declared_name(declarator), variable.number
        value, words = initial_value(declarator), spec.split()
        init = render(self.tree, value, replaced)
        own = not self.body.structs.isdisjoint(WORD.findall(f"{spec} {init}"))
        kept = _initialised(variable, value, init, own)
        if variable.kind == "reference":
            kind = f"using fr_t{n} = decltype(({init}));\n@"
            kept = f"fr_v{n}[fr_i].set({init}); auto&& {variable.name} = fr_v{n}[fr_i].get();"
        elif "auto" in words:
            const = "const " if "const" in words and "*" not in self.tree.text(inner) else ""
            kind = f"typedef {const}::fr::value_t<__typeof__(({init}))> fr_t{n};\n@"
        else:
            plain = re.sub(r"\b(static|register|inline|thread_local)\b", "", spec)
            renamed = render(self.tree, inner, {name.id: f"fr_t{n}"} if name else {})
            kind = f"{self.body.directive(statement)}typedef {plain} {renamed};\n@"
        whole = f"{spec} {render(self.tree, declarator, replaced)};"
        return Piece(whole, line_of(statement), ((variable, kind),), kept)


def _initialised(variable: Variable, value: Node | None, init: str, own: bool) -> str:
    """The element of a lane, initialised; ``own`` where the author's structs are involved."""
    target, kind = f"fr_v{variable.number}[fr_i]", f"fr_t{variable.number}"
    if value is None:
        return f"(void){target};"
    if variable.kind == "array":
        temporary = f"::fr::storage_t<{kind}> fr_w {init}"
        return f"{{ {temporary}; __builtin_memcpy(&{target}, &fr_w, sizeof fr_w); }}"
    if value.type == "argument_list":
        init = f"{kind}{init}"
    elif value.type == "initializer_list":
        init = f"::fr::storage_t<{kind}>{init}"
    if own:  # constructed, as there, and not assigned: the author says what either does
        made = f"::fr::made<::fr::storage_t<{kind}>>{{::fr::storage_t<{kind}>({init})}}"
        return f"new (static_cast<void*>(&{target})) {made};"
    return f"{target} = {init};"
