"""Expressions of a body that is split: operations of the simdgroup work on arrays of operands."""

from __future__ import annotations

from tree_sitter import Node

from ..cpp import ROW_ADDITION, NotSplittable
from ..dialect import MATRIX_OPS, SIMD_BARRIERS, THREADGROUP_BARRIERS, UNIFORM_RESULTS
from ..syntax import call_arguments, callee, field, kinds, operands, part
from .body import LANE_CALLS
from .lanes import Lanes, Replaced, render
from .nest import Nest
from .statements import branches, changed, expression

_BARRIERS = THREADGROUP_BARRIERS | SIMD_BARRIERS
_VOTES = {"any": "bool", "all": "bool", "ballot": "simd_vote"}
_ASKS = {"active_threads_mask": "simd_vote", "is_first": "bool"}


class Operations:
    """Writes expressions whose parts all lanes evaluate together."""

    def __init__(self, lanes: Lanes) -> None:
        self.lanes, self.uniformity = lanes, lanes.uniformity
        self.body, self.tree = lanes.body, lanes.tree

    def statement(self, statement: Node, nest: Nest) -> None:
        """Write an expression statement, or an expression in a loop's head."""
        node = expression(statement)
        if node is None:
            return
        lanes, text = self.lanes, self.tree.text
        if node.type == "call_expression":
            name = callee(self.tree, node)
            if name in _BARRIERS:
                flags = part(node, "arguments")
                if not flags.named_children:
                    raise NotSplittable(f"{name} is called without its flags")
                lanes.flush(nest, text(flags))
                lanes.write(f"(void){text(flags)};\n", statement)  # what they are is checked
                return
            if name in MATRIX_OPS and name in self.body.split_calls:
                self._matrix(statement, node, name, nest)
                return
            if name == "atomic_fetch_add_explicit" and self._row_addition(statement, node, nest):
                return
        replaced = self.extract(statement, statement, nest)
        if self.changes_uniform(node):
            lanes.flush(nest, text(statement))
            end = ";\n" if statement == node else "\n"
            lanes.write(lanes.outside(statement, replaced) + end, statement)
        else:
            lanes.add_statement(statement, nest, replaced)

    def changes_uniform(self, node: Node) -> bool:
        """Whether an expression assigns to a variable that all lanes share."""
        target = changed(node)
        if target is None or target.type != "identifier":
            return False
        variable = self.lanes.scopes.lookup(self.tree.text(target))
        return variable is not None and variable.uniform and variable.kind == "value"

    def _row_addition(self, statement: Node, call: Node, nest: Nest) -> bool:
        """Atomic additions to neighbouring elements, all lanes together; False if it is not one."""
        lanes, arguments = self.lanes, call_arguments(call)
        target = field(arguments[0], "argument") if len(arguments) == 3 else None
        if target is None or arguments[0].children[0].type != "&" or self.body.calls(statement):
            return False
        if target.type != "subscript_expression":
            return False
        element, base = lanes.element(target, set()), self.tree.text(part(target, "argument"))
        if not element or base not in self.body.prepared.kernel.output_names:
            return False
        n = lanes.number()
        value = render(self.tree, arguments[1], lanes.prepared(arguments[1]))
        kind = (
            f"{self.body.directive(statement)}typedef ::fr::split::element_t<::fr::value_t<"
            f"__typeof__(({base}[0]))>> fr_q{n}; FR_LANES fr_q{n} fr_x{n}[FR_N];\n"
        )
        lanes.add(f"fr_x{n}[fr_i] = static_cast<fr_q{n}>({value});", statement)
        lanes.flush(nest, self.tree.text(statement), [kind])
        added = f"{ROW_ADDITION}/*{base}*/{element.removesuffix('[fr_i]')}"
        lanes.write(f"{added}, fr_x{n}, {nest.end}, {nest.mask});\n", statement)
        return True

    def extract(self, node: Node, statement: Node, nest: Nest) -> Replaced:
        """Write the synchronising calls of a part of a statement; what stands for each result."""
        replaced: Replaced = {}
        if not self.body.calls(node):
            return replaced
        # The order of side effects beside a synchronising call would change.
        whole = expression(node)
        for change in kinds(node, "update_expression", "assignment_expression"):
            if change != whole:
                raise NotSplittable("an expression changes a variable beside a synchronising call")

        def visit(node: Node) -> None:
            if node.type == "conditional_expression" and any(
                b is not None and self.body.calls(b) for b in branches(node)
            ):
                raise NotSplittable("a branch of ?: holds a synchronising call")
            if node.type == "binary_expression" and node.children[1].type in ("&&", "||"):
                _, operator, right = operands(node)
                if self.body.calls(right):
                    raise NotSplittable(f"a synchronising call stands behind {operator}")
            for child in node.children:
                visit(child)
            if node.type == "call_expression" and callee(self.tree, node) in self.body.split_calls:
                replaced[node.id] = self._operation(node, replaced, statement, nest)

        visit(node)
        return replaced

    def _operation(self, call: Node, replaced: Replaced, statement: Node, nest: Nest) -> str:
        """Write one operation of the simdgroup on arrays of its operands.

        Args:
            replaced: what stands for the results of calls in it.
            statement: that the operation is a part of.

        Returns:
            What stands for its result.
        """
        lanes, name = self.lanes, callee(self.tree, call)
        if name in _BARRIERS or name in MATRIX_OPS:
            raise NotSplittable(f"{name} stands inside an expression")
        fast = lanes.prepared(call, replaced)
        arguments = [(a, render(self.tree, a, fast)) for a in call_arguments(call)]
        n, short = lanes.number(), name.split("_", 1)[1]
        uniform = self.body.unit.simdgroup and name in UNIFORM_RESULTS
        if short in _ASKS:
            lanes.flush(nest, self.tree.text(statement))
            listed, kind, letter, at = [f"fr_n, {nest.mask}"], _ASKS[short], "x", None
        else:
            if not arguments or ("shuffle" in short and len(arguments) < 2):
                raise NotSplittable(f"{name} has no operand")
            types, listed = self._fill_operands(n, short, arguments, fast, call)
            texts = [self.tree.text(statement), *(text for _, text in arguments)]
            lanes.flush(nest, " ".join(texts), types)
            listed.append(f"fr_n, {nest.mask}")
            kind, at = "auto" if uniform else _VOTES.get(short, ""), call
            letter = "u" if uniform else "r" if kind else "x"
        result = f"fr_{letter}{n}"
        if uniform:
            text = f"const {kind} {result} = ::fr::split::uniform_{name}({', '.join(listed)});\n"
            lanes.write(text, at)
            return result
        declared = f"FR_LANES {kind} {result}[FR_N]; " if kind else ""
        listed = [result, *listed] if kind else listed
        lanes.write(f"{declared}::fr::split::{name}({', '.join(listed)});\n", at)
        return f"{result}[fr_i]"

    def _fill_operands(
        self, n: int, short: str, arguments: list[tuple[Node, str]], replaced: Replaced, call: Node
    ) -> tuple[list[str], list[str]]:
        """Fill arrays with an operation's operands; their declarations, and the operands.

        Args:
            n: the operation's number.
            short: the operation, without ``simd_``.
            arguments: of its call, each with its text.
        """
        lanes, value, others = self.lanes, arguments[0][1], arguments[1:]
        if short in _VOTES:
            types = [f"FR_LANES int fr_x{n}[FR_N];\n"]
            lanes.add(f"fr_x{n}[fr_i] = -int(bool({value}));", call)
        else:
            types = [
                f"{self.body.directive(call)}typedef ::fr::value_t<__typeof__(({value}))> "
                f"fr_q{n}; FR_LANES fr_q{n} fr_x{n}[FR_N];\n"
            ]
            lanes.add(f"fr_x{n}[fr_i] = {value};", call)
        listed = [f"fr_x{n}"]
        if "_and_fill_" in short and others:
            types.append(f"FR_LANES fr_q{n} fr_f{n}[FR_N];\n")
            lanes.add(f"fr_f{n}[fr_i] = fr_q{n}({others[0][1]});", call)
            listed.append(f"fr_f{n}")
            others = others[1:]
        for k, (node, text) in enumerate(others):
            if self.uniformity.of(node):
                listed.append(f"unsigned({lanes.outside(node, replaced)})")
            else:
                types.append(f"FR_LANES unsigned fr_k{n}_{k}[FR_N];\n")
                lanes.add(f"fr_k{n}_{k}[fr_i] = unsigned({text});", call)
                listed.append(f"static_cast<const unsigned*>(fr_k{n}_{k})")
        return types, listed

    def _matrix(self, statement: Node, call: Node, name: str, nest: Nest) -> None:
        """Write an operation on matrices: on those of whole simdgroups, where they lie so."""
        lanes, arguments = self.lanes, call_arguments(call)
        moves = name in LANE_CALLS  # their first argument is the lane
        if any(map(self.body.calls, arguments)):
            raise NotSplittable(f"an argument of {name} synchronises")
        matrices = list(map(lanes.tile, arguments[1:2] if moves else arguments))
        if not all(matrices):
            if moves:
                lanes.add_statement(statement, nest)
            else:
                self._matrix_by_lanes(call, name, nest)
            return
        lanes.flush(nest, self.tree.text(call))
        fast = lanes.prepared(call) if moves else {}
        listed = matrices
        if moves:
            listed = [*matrices, "fr_n - fr_i"]
            listed += [render(self.tree, a, fast) for a in arguments[2:]]
        step = name.removeprefix("simdgroup_")
        lanes.add(f"::fr::split::tile_{step}({', '.join(listed)});", call)
        end = "fr_i < fr_n" if moves else "fr_i + 32 <= fr_n"
        lanes.flush(nest, head=f"for (unsigned fr_i = 0; {end}; fr_i += 32) ")

    def _matrix_by_lanes(self, call: Node, name: str, nest: Nest) -> None:
        lanes, n, types = self.lanes, self.lanes.number(), []
        arguments = list(map(self.tree.text, call_arguments(call)))
        for k, text in enumerate(arguments):
            const = "const " if k else ""
            types.append(f"{const}::fr::value_t<__typeof__(({text}))>* fr_p{n}_{k}[FR_N];\n")
            lanes.add(f"fr_p{n}_{k}[fr_i] = &({text});", call)
        lanes.flush(nest, self.tree.text(call), types)
        listed = ", ".join(f"fr_p{n}_{k}" for k in range(len(arguments)))
        lanes.write(f"::fr::split::{name}({listed}, fr_n, {nest.mask});\n")
