"""Expressions of a body that is split: operations of the simdgroup work on arrays of operands."""

from __future__ import annotations

from tree_sitter import Node

from .analysis import SPLIT_CALLS
from .cpp import ROW_ADDITION, NotSplittable, Prepared, body_line
from .dialect import MATRIX_OPS, SIMD_BARRIERS, THREADGROUP_BARRIERS, UNIFORM_RESULTS
from .regions import Piece, Regions
from .syntax import call_arguments, callee, walk
from .uniform import Unit

_VOTES = {"any": "bool", "all": "bool", "ballot": "simd_vote"}
_ASKS = {"active_threads_mask": "simd_vote", "is_first": "bool"}


class Operations(Regions):
    """Emits expressions whose parts all lanes carry out together."""

    def __init__(self, prepared: Prepared, text: str, unit: Unit) -> None:
        super().__init__(prepared, text, unit)
        self.later: list[str] = []  # texts that come after the current statement
        self._statement_names: set[str] = set()  # of the statement whose calls are carried out

    def _later_names(self) -> set[str]:
        return self._names(" ".join(self.later))

    def _expression(self, s: Node) -> None:
        e = s.named_children[0] if s.named_children else None
        if e is None:
            return
        if e.type == "call_expression":
            name = callee(self.tree, e)
            if name in THREADGROUP_BARRIERS | SIMD_BARRIERS:
                given = e.child_by_field_name("arguments")
                if given is None or not given.named_children:
                    raise NotSplittable(f"{name} is called without its flags")
                self._flush(self._later_names() | self._names(self.tree.text(given)))
                self._at(s, f"(void){self.tree.text(given)};\n")  # what they are is checked
                return
            if name in ("simdgroup_multiply", "simdgroup_multiply_accumulate"):
                self._matrix(e, name)
                return
            if name == "atomic_fetch_add_explicit" and self._row_addition(s, e):
                return
        if self._changes_uniform(e):
            replaced = self._extract(s)
            self._flush(self._later_names() | self._names(self.tree.text(s)))
            self._at(s, self._outside_text(s, replaced) + "\n")
        else:
            self._piece(s, self._extract(s))

    def _row_addition(self, s: Node, call: Node) -> bool:
        """Atomic additions to neighbouring elements, all lanes together; False if it is not one."""
        arguments = call_arguments(call)
        target = arguments[0].child_by_field_name("argument") if len(arguments) == 3 else None
        if target is None or arguments[0].children[0].type != "&" or self._calls(s):
            return False
        base = target.child_by_field_name("argument")
        anchored = self._anchored(target, set()) if target.type == "subscript_expression" else ""
        if base is None or not anchored or self.tree.text(base) not in self.p.kernel.output_names:
            return False
        self.count += 1
        n, line = self.count, self._line(s)
        value = self._render(arguments[1], self._divisions(arguments[1]))
        kind = (
            f"{body_line(self.p, line)}typedef ::fr::split::element_t<::fr::value_t<__typeof__(("
            f"{self.tree.text(base)}[0]))>> fr_q{n}; fr_q{n} fr_x{n}[FR_N];\n"
        )
        self.pending.append(Piece(f"fr_x{n}[fr_i] = static_cast<fr_q{n}>({value});", line))
        self._flush(self._later_names() | self._names(self.tree.text(s)), [kind])
        added = f"{ROW_ADDITION}/*{self.tree.text(base)}*/{anchored.removesuffix('[fr_i]')}"
        mask = self._mask() or "nullptr"
        self._at(s, f"{added}, fr_x{n}, {self._end()}, {mask});\n")
        return True

    def _changes_uniform(self, e: Node) -> bool:
        """Whether an expression assigns to a variable that all lanes share."""
        target: Node | None = None
        if e.type == "assignment_expression":
            target = e.child_by_field_name("left")
        elif e.type == "update_expression":
            target = e.child_by_field_name("argument")
        if target is None or target.type != "identifier":
            return False
        variable = self._lookup(self.tree.text(target))
        return variable is not None and variable.uniform and variable.kind == "value"

    def _extract(self, s: Node, statement: Node | None = None) -> dict[int, str]:
        """Carry out the synchronising calls of a statement; what stands for each result."""
        replaced: dict[int, str] = {}
        if not self._calls(s):
            return replaced
        self._refuse_order(s)
        whole = self.tree.text(statement or s)
        outer, self._statement_names = self._statement_names, self._names(whole)
        self._statement_names |= outer

        def visit(node: Node) -> None:
            if node.type == "conditional_expression":
                parts = [node.child_by_field_name(f) for f in ("consequence", "alternative")]
                if any(p is not None and self._calls(p) for p in parts):
                    raise NotSplittable("a branch of ?: holds a synchronising call")
            if node.type == "binary_expression" and node.children[1].type in ("&&", "||"):
                right = node.child_by_field_name("right")
                if right is not None and self._calls(right):
                    raise NotSplittable(
                        f"a synchronising call stands behind {node.children[1].type}"
                    )
            for child in node.children:
                visit(child)
            if node.type == "call_expression" and callee(self.tree, node) in SPLIT_CALLS:
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
        arguments = call_arguments(call)
        fast = self._divisions(call, replaced)
        texts = [self._render(a, fast) for a in arguments]
        self.count += 1
        n = self.count
        short = name.split("_", 1)[1]
        uniform = self.unit.simdgroup and name in UNIFORM_RESULTS
        mask = self._mask() or "nullptr"
        line = self._line(call)
        later = self._later_names()
        if short in _ASKS:
            self._flush(later | self._statement_names)
            result = _ASKS[short]
            if uniform:
                self.out.append(
                    f"const {result} fr_x{n} = ::fr::split::uniform_{name}(fr_n, {mask});\n"
                )
                return f"fr_x{n}"
            self.out.append(
                f"{result} fr_x{n}[FR_N]; ::fr::split::{name}(fr_x{n}, fr_n, {mask});\n"
            )
            return f"fr_x{n}[fr_i]"
        if not texts or ("shuffle" in short and len(texts) < 2):
            raise NotSplittable(f"{name} has no operand")
        types: list[str] = []
        if short in _VOTES:
            types.append(f"unsigned char fr_x{n}[FR_N];\n")
            self.pending.append(Piece(f"fr_x{n}[fr_i] = bool({texts[0]});", line))
        else:
            types.append(
                f"{body_line(self.p, line)}typedef ::fr::value_t<__typeof__(({texts[0]}))> "
                f"fr_q{n}; fr_q{n} fr_x{n}[FR_N];\n"
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
                operands.append(f"unsigned({self._outside_text(node, fast)})")
            else:
                types.append(f"unsigned fr_k{n}_{k}[FR_N];\n")
                self.pending.append(Piece(f"fr_k{n}_{k}[fr_i] = unsigned({text});", line))
                operands.append(f"static_cast<const unsigned*>(fr_k{n}_{k})")
        self._flush(later | self._statement_names | self._names(" ".join(texts)), types)
        listed = ", ".join(operands)
        self.out.append(body_line(self.p, line))
        if uniform:
            self.out.append(
                f"const auto fr_u{n} = ::fr::split::uniform_{name}({listed}, fr_n, {mask});\n"
            )
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
        arguments = call_arguments(call)
        self.count += 1
        n = self.count
        types: list[str] = []
        line = self._line(call)
        for k, a in enumerate(arguments):
            text = self.tree.text(a)
            const = "" if k == 0 else "const "
            types.append(f"{const}::fr::value_t<__typeof__(({text}))>* fr_p{n}_{k}[FR_N];\n")
            self.pending.append(Piece(f"fr_p{n}_{k}[fr_i] = &({text});", line))
        names = self._names(self.tree.text(call))
        self._flush(self._later_names() | names, types)
        listed = ", ".join(f"fr_p{n}_{k}" for k in range(len(arguments)))
        self.out.append(f"::fr::split::{name}({listed}, fr_n, {self._mask() or 'nullptr'});\n")
