"""Expressions of a body that is split: operations of the simdgroup work on arrays of operands."""

from __future__ import annotations

from tree_sitter import Node

from ..cpp import ROW_ADDITION, NotSplittable, Prepared, body_line
from ..dialect import MATRIX_OPS, SIMD_BARRIERS, THREADGROUP_BARRIERS, UNIFORM_RESULTS
from ..syntax import call_arguments, callee, walk
from .analysis import SPLIT_CALLS
from .pieces import Piece
from .regions import Regions
from .statements import branches, expression
from .uniform import Unit

_VOTES = {"any": "bool", "all": "bool", "ballot": "simd_vote"}
_ASKS = {"active_threads_mask": "simd_vote", "is_first": "bool"}


class Operations(Regions):
    """Emits expressions whose parts all lanes evaluate together."""

    def __init__(self, prepared: Prepared, text: str, unit: Unit) -> None:
        super().__init__(prepared, text, unit)
        self.later: list[str] = []  # texts that come after the current statement

    def _later_names(self) -> set[str]:
        return self._names(" ".join(self.later))

    def _expression(self, statement: Node) -> None:
        node = expression(statement)
        if node is None:
            return
        if node.type == "call_expression":
            name = callee(self.tree, node)
            if name in THREADGROUP_BARRIERS | SIMD_BARRIERS:
                flags = node.child_by_field_name("arguments")
                if flags is None or not flags.named_children:
                    raise NotSplittable(f"{name} is called without its flags")
                self._flush(self._later_names() | self._names(self.tree.text(flags)))
                self._at(statement, f"(void){self.tree.text(flags)};\n")  # what they are is checked
                return
            if name in ("simdgroup_multiply", "simdgroup_multiply_accumulate"):
                self._matrix(node, name)
                return
            if name == "atomic_fetch_add_explicit" and self._row_addition(statement, node):
                return
        if self._changes_uniform(node):
            replaced = self._extract(statement, statement)
            self._flush(self._later_names() | self._names(self.tree.text(statement)))
            self._at(statement, self._outside_text(statement, replaced) + "\n")
        else:
            self._piece(statement, self._extract(statement, statement))

    def _row_addition(self, statement: Node, call: Node) -> bool:
        """Atomic additions to neighbouring elements, all lanes together; False if it is not one."""
        arguments = call_arguments(call)
        target = arguments[0].child_by_field_name("argument") if len(arguments) == 3 else None
        if target is None or arguments[0].children[0].type != "&" or self._calls(statement):
            return False
        base = target.child_by_field_name("argument")
        anchored = self._anchored(target, set()) if target.type == "subscript_expression" else ""
        if base is None or not anchored or self.tree.text(base) not in self.p.kernel.output_names:
            return False
        self.count += 1
        n, line = self.count, self._line(statement)
        value = self._render(arguments[1], self._divisions(arguments[1]))
        kind = (
            f"{body_line(self.p, line)}typedef ::fr::split::element_t<::fr::value_t<__typeof__(("
            f"{self.tree.text(base)}[0]))>> fr_q{n}; fr_q{n} fr_x{n}[FR_N];\n"
        )
        self.pending.append(Piece(f"fr_x{n}[fr_i] = static_cast<fr_q{n}>({value});", line))
        self._flush(self._later_names() | self._names(self.tree.text(statement)), [kind])
        added = f"{ROW_ADDITION}/*{self.tree.text(base)}*/{anchored.removesuffix('[fr_i]')}"
        mask = self._mask() or "nullptr"
        self._at(statement, f"{added}, fr_x{n}, {self._end()}, {mask});\n")
        return True

    def _changes_uniform(self, node: Node) -> bool:
        """Whether an expression assigns to a variable that all lanes share."""
        target: Node | None = None
        if node.type == "assignment_expression":
            target = node.child_by_field_name("left")
        elif node.type == "update_expression":
            target = node.child_by_field_name("argument")
        if target is None or target.type != "identifier":
            return False
        variable = self._lookup(self.tree.text(target))
        return variable is not None and variable.uniform and variable.kind == "value"

    def _extract(self, part: Node, statement: Node) -> dict[int, str]:
        """Emit the synchronising calls of a part of a statement; what stands for each result."""
        replaced: dict[int, str] = {}
        if not self._calls(part):
            return replaced
        self._refuse_order(part)
        names = self._names(self.tree.text(statement))

        def visit(node: Node) -> None:
            if node.type == "conditional_expression" and any(
                b is not None and self._calls(b) for b in branches(node)
            ):
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
                replaced[node.id] = self._operation(node, replaced, names)

        visit(part)
        return replaced

    def _refuse_order(self, statement: Node) -> None:
        """Refuse side effects beside a synchronising call: their order would change."""
        whole = expression(statement) if statement.type == "expression_statement" else None
        for node in walk(statement):
            if node.type in ("update_expression", "assignment_expression") and node != whole:
                raise NotSplittable("an expression changes a variable beside a synchronising call")

    def _operation(self, call: Node, replaced: dict[int, str], names: set[str]) -> str:
        """Emit one operation of the simdgroup on arrays of its operands.

        Args:
            replaced: what stands for the results of calls, by the call's node.
            names: of the statement that the operation is a part of.

        Returns:
            What stands for its result.
        """
        name = callee(self.tree, call)
        if name in THREADGROUP_BARRIERS | SIMD_BARRIERS or name in MATRIX_OPS:
            raise NotSplittable(f"{name} stands inside an expression")
        fast = self._divisions(call, replaced)
        arguments = [(a, self._render(a, fast)) for a in call_arguments(call)]
        self.count += 1
        n, line = self.count, self._line(call)
        short = name.split("_", 1)[1]
        uniform = self.unit.simdgroup and name in UNIFORM_RESULTS
        lanes = f"fr_n, {self._mask() or 'nullptr'}"
        later = self._later_names() | names
        if short in _ASKS:
            self._flush(later)
            result = _ASKS[short]
            if uniform:
                self.out.append(f"const {result} fr_x{n} = ::fr::split::uniform_{name}({lanes});\n")
                return f"fr_x{n}"
            self.out.append(f"{result} fr_x{n}[FR_N]; ::fr::split::{name}(fr_x{n}, {lanes});\n")
            return f"fr_x{n}[fr_i]"
        if not arguments or ("shuffle" in short and len(arguments) < 2):
            raise NotSplittable(f"{name} has no operand")
        types, operands = self._fill_operands(short, arguments, fast, line)
        self._flush(later | self._names(" ".join(text for _, text in arguments)), types)
        self.out.append(body_line(self.p, line))
        if uniform:
            self.out.append(
                f"const auto fr_u{n} = ::fr::split::uniform_{name}({operands}, {lanes});\n"
            )
            return f"fr_u{n}"
        if short in _VOTES:
            self.out.append(
                f"{_VOTES[short]} fr_r{n}[FR_N]; "
                f"::fr::split::{name}(fr_r{n}, {operands}, {lanes});\n"
            )
            return f"fr_r{n}[fr_i]"
        self.out.append(f"::fr::split::{name}({operands}, {lanes});\n")
        return f"fr_x{n}[fr_i]"

    def _fill_operands(
        self, short: str, arguments: list[tuple[Node, str]], replaced: dict[int, str], line: int
    ) -> tuple[list[str], str]:
        """Fill arrays with an operation's operands; their declarations, and the list of operands.

        Args:
            short: the operation, without ``simd_``.
            arguments: of its call, each with its text.
        """
        n, value = self.count, arguments[0][1]
        if short in _VOTES:
            types = [f"unsigned char fr_x{n}[FR_N];\n"]
            self.pending.append(Piece(f"fr_x{n}[fr_i] = bool({value});", line))
        else:
            types = [
                f"{body_line(self.p, line)}typedef ::fr::value_t<__typeof__(({value}))> "
                f"fr_q{n}; fr_q{n} fr_x{n}[FR_N];\n"
            ]
            self.pending.append(Piece(f"fr_x{n}[fr_i] = {value};", line))
        operands = [f"fr_x{n}"]
        others = arguments[1:]
        if "_and_fill_" in short and others:
            types.append(f"fr_q{n} fr_f{n}[FR_N];\n")
            self.pending.append(Piece(f"fr_f{n}[fr_i] = fr_q{n}({others[0][1]});", line))
            operands.append(f"fr_f{n}")
            others = others[1:]
        for k, (node, text) in enumerate(others):
            if self.uniformity.of(node):
                operands.append(f"unsigned({self._outside_text(node, replaced)})")
            else:
                types.append(f"unsigned fr_k{n}_{k}[FR_N];\n")
                self.pending.append(Piece(f"fr_k{n}_{k}[fr_i] = unsigned({text});", line))
                operands.append(f"static_cast<const unsigned*>(fr_k{n}_{k})")
        return types, ", ".join(operands)

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
