"""Kernels that synchronise, as loops over lanes split at each barrier and simd operation.

The body's statements between two such points become one loop over the lanes of a unit (a simdgroup,
or a whole threadgroup). What a lane keeps from one loop to a later one lies in an array with one
element per lane; what is the same in all lanes (`uniform`) is one variable outside them.

Control flow that holds a synchronising call moves outside the loops. Where its condition is uniform
it stays as it is; where lanes differ, it works with masks: an ``if`` runs both sides, each for its
own lanes; a loop goes on while a lane is left in it; ``return``, ``break`` and ``continue`` take
lanes out of the masks around them. Operations of a simdgroup see the lanes of the current mask, so
lanes that go different ways are told apart, and meet again, exactly as Metal says.

What cannot be split (`NotSplittable`) runs on fibers instead.
"""

from __future__ import annotations

import re

from tree_sitter import Node

from ..cpp import NotSplittable, Prepared
from ..lexer import join, tokens
from ..syntax import declarators, declared_name, walk
from .analysis import SPLIT_CALLS
from .assignments import assigned
from .inline import inline
from .matrices import makes_diagonal
from .operations import Operations
from .pieces import Again, Mask, Piece
from .statements import LOOPS, Loop, branch_statements, branches, expression, jumps_out, loop_parts
from .uniform import POSITION_TEXTS, Unit

_GROUP_LEVEL = (
    "alias_declaration", "type_definition", "using_declaration", "static_assert_declaration",
    "struct_specifier", "class_specifier", "union_specifier", "enum_specifier",
    "preproc_def", "preproc_function_def", "preproc_undef", "empty_statement",
)  # fmt: skip
_LEFT = re.compile(r"(?<!split::)(?<!\w)(\w+)\s*\(")
_TO_POINTER = re.compile(r"\w+\s*\(\s*[*&]\s*\w+\s*\)\s*[\[(]")


class Splitter(Operations):
    """Splits one body for one kind of unit.

    Args:
        prepared: the kernel.
        unit: the threads that run together.
    """

    def __init__(self, prepared: Prepared, unit: Unit) -> None:
        text = _with_lanes(inline(prepared, prepared.expanded()), prepared.kernel.name)
        super().__init__(prepared, text, unit)
        self.need_function_mask = False
        # The loops around, innermost last: where each starts, whether its head is plain C++, and
        # how many masks there were at its start.
        self.loops: list[tuple[int, bool, int]] = []

    # -- the whole -------------------------------------------------------------------------------

    def run(self) -> str:
        """The function's body, after its parameters.

        Raises:
            NotSplittable: the control flow does not allow it.
            Again: a mask is needed that was not planned.
        """
        self._check()
        self._analyse()
        self.out, self.pending, self.masks, self.loops = [], [], [], []
        self.count = 0
        self.divisors, self.anchors = {}, {}
        if self.need_function_mask:
            self.out.append("int fr_m0[FR_N]; ::fr::split::all(fr_m0, fr_n);\n")
            self.masks.append(Mask("fr_m0", "fn"))
        self._declare_parameters()
        self._block(self.tree.block.named_children, [])
        return self._checked("".join(self.out))

    def _checked(self, text: str) -> str:
        """The text, if no synchronising call is left in a loop over lanes."""
        for m in _LEFT.finditer(text):
            if m.group(1) in SPLIT_CALLS:
                # The grammar takes `(f(x) && (a)) && (b)` for a conversion.
                raise NotSplittable(f"a call of {m.group(1)} is not understood")
        return text

    def _check(self) -> None:
        if makes_diagonal(self.p.header, self.tree):
            raise NotSplittable("a simdgroup_matrix is made from a value on its diagonal")
        for node in walk(self.tree.block):
            if node.type == "expression_statement" and _TO_POINTER.match(self.tree.text(node)):
                # The grammar takes `int (*p)[2] = a;` for an assignment.
                raise NotSplittable(f"the statement {self.tree.text(node)!r} is not understood")
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

    # -- emission: blocks ------------------------------------------------------------------------

    def _block(self, statements: list[Node], after: list[str]) -> None:
        """Emit statements; `after` are texts that may use this block's variables later."""
        texts = [self.tree.text(s) for s in statements]
        self._refuse_shadows(statements, texts)
        self.scopes.append({})
        for index, statement in enumerate(statements):
            self.later = texts[index + 1 :] + after
            self._statement(statement)
        self.later = after
        self._flush(set())
        self.scopes.pop()

    def _refuse_shadows(self, statements: list[Node], texts: list[str]) -> None:
        """Refuse a block that uses a name before it declares it: that means two variables."""
        for i, statement in enumerate(statements):
            before = texts[:i]
            for declarator in declarators(statement) if statement.type == "declaration" else []:
                name = declared_name(declarator)
                used = self._names(" ".join(before))
                before.append(self.tree.text(declarator))  # `int a = best[1], best = 2;`
                if name is None or self._lookup(self.tree.text(name)) is None:
                    continue
                if self.tree.text(name) in used:
                    raise NotSplittable(f"a block uses {self.tree.text(name)} before it hides it")

    def _nested(self, statement: Node) -> None:
        """Emit a branch or a loop's body in braces of its own."""
        self._flush(self._later_names())
        self.out.append("{\n")
        kept = self.later
        self._block(branch_statements(statement), [])
        self.later = kept
        self.out.append("}\n")

    def _statement(self, statement: Node) -> None:
        kind = statement.type
        if kind == "comment" or (kind == "preproc_call" and "#pragma" in self.tree.text(statement)):
            return
        if kind == "preproc_call":
            self._flush(self._later_names())
            self._at(statement, self.tree.text(statement).rstrip() + "\n")
            return
        if kind == "attributed_statement":
            self._statement(statement.named_children[-1])
        elif kind in _GROUP_LEVEL or (kind == "declaration" and self._is_constant(statement)):
            self._flush(self._later_names() | self._names(self.tree.text(statement)))
            self._verbatim(statement)
        elif kind == "declaration":
            self._declaration(statement)
        elif kind == "expression_statement":
            self._expression(statement)
        elif not self._splits(statement):
            if not self._one_lane(statement):
                self._piece(statement)
        elif kind == "compound_statement":
            self._flush(self._later_names() | self._names(self.tree.text(statement)))
            self._nested(statement)
        elif kind == "if_statement":
            self._if(statement)
        elif kind in LOOPS:
            self._loop(statement)
        elif kind in ("return_statement", "break_statement", "continue_statement"):
            self._jump(statement)
        else:
            raise NotSplittable(f"a {kind.replace('_', ' ')} holds a synchronising call")

    def _one_lane(self, statement: Node) -> bool:
        """`if (lane == 0) …`, for that lane alone, without a loop; False if it is not that."""
        condition = statement.child_by_field_name("condition")
        yes, no = branches(statement)
        if statement.type != "if_statement" or yes is None or no is not None:
            return False
        test = condition.child_by_field_name("value") if condition is not None else None
        if test is None or test.type != "binary_expression" or test.children[1].type != "==":
            return False
        lane, number = test.child_by_field_name("left"), test.child_by_field_name("right")
        if lane is None or number is None or jumps_out(statement) or not self._is_position(lane):
            return False
        if number.type != "number_literal" or not self.tree.text(number).rstrip("uU").isdecimal():
            return False
        self._flush(self._later_names() | self._names(self.tree.text(statement)))
        self.count += 1
        at = f"fr_o{self.count}"
        last = self._last_text(lane)
        self.out.append(
            f"const unsigned {at} = {self.tree.text(number)} - unsigned({last}) + (fr_n - 1u);\n"
        )
        self._piece(yes)
        head = f"if ({at} < {self._end()}) for (unsigned fr_i = {at}, {at}o = 1; {at}o; {at}o = 0) "
        self._flush(self._later_names(), head=head)
        return True

    def _is_position(self, node: Node) -> bool:
        """Whether an expression is a lane's number, or a variable that holds it."""
        variable = self._lookup(self.tree.text(node)) if node.type == "identifier" else None
        if variable is not None and self.unit.row is None:
            return variable.linear and (
                variable.value in POSITION_TEXTS or self.uniformity.counts(variable.value)
            )
        return node.type in ("identifier", "field_expression") and self.uniformity.linear(node)

    def _is_constant(self, statement: Node) -> bool:
        return "constexpr" in self.tree.text(statement).split("=")[0].split() or not declarators(
            statement
        )

    def _verbatim(self, statement: Node) -> None:
        if statement.type == "declaration":
            for declarator in declarators(statement):
                variable = self._declared(statement, declarator, 0)
                variable.uniform = True
        text = self.tree.text(statement) + (";" if statement.type.endswith("_specifier") else "")
        self._at(statement, text if text.endswith("\n") else text + "\n")

    def _lane_jump(self, kind: str) -> str:
        """One lane leaves: cleared in the masks around it, then on to the next lane."""
        cleared: list[str] = []
        if kind == "return":
            if not self.need_function_mask:
                self.need_function_mask = True
                raise Again
            # A lane that returned is in no mask of a loop around it either.
            cleared = [m.name for m in self.masks]
            for loop, _, _ in self.loops:
                if loop not in self.masked_loops:
                    self.masked_loops.add(loop)
                    raise Again
        else:
            loop = self.loops[-1][0]
            wanted = self.masked_loops if kind == "break" else self.continued_loops
            if loop not in wanted:
                wanted.add(loop)
                raise Again
            for m in reversed(self.masks):
                if kind == "continue" and m.kind == "loop":
                    break
                cleared.append(m.name)
                if m.loop == loop and m.kind == ("loop" if kind == "break" else "round"):
                    break
        clear = " ".join(f"{name}[fr_i] = 0;" for name in cleared)
        return f"{{ {clear} goto fr_next; }}"

    # -- emission: control flow --------------------------------------------------------------------

    def _if(self, statement: Node) -> None:
        condition = statement.child_by_field_name("condition")
        yes, no = branches(statement)
        if condition is None or yes is None:
            raise NotSplittable("an if is not understood")
        otherwise = no.named_children[-1] if no is not None and no.named_children else None
        inner = condition.child_by_field_name("value") or condition
        if condition.child_by_field_name("initializer") is not None or inner.type == "declaration":
            raise NotSplittable("an if declares a variable in its condition")
        uniform = self.uniformity.of(condition)
        constexpr = any(c.type == "constexpr" for c in statement.children)
        replaced = self._extract(condition, statement)
        text = self._render(condition, replaced)
        later = self._later_names() | self._names(self.tree.text(statement))
        if uniform:
            text = self._outside_text(condition, replaced)
            self._flush(later)
            self._at(statement, f"if {'constexpr ' if constexpr else ''}{text} ")
            self._nested(yes)
            if otherwise is not None:
                self.out.append("else ")
                self._nested(otherwise)
            return
        self.count += 1
        n = self.count
        mask = self._mask() or "nullptr"
        self.pending.append(Piece(f"fr_c{n}[fr_i] = {text} ? 1 : 0;", self._line(statement)))
        self._flush(later, [f"int fr_c{n}[FR_N], fr_y{n}[FR_N], fr_n{n}[FR_N];\n"])
        self.out.append(f"::fr::split::both(fr_y{n}, fr_n{n}, {mask}, fr_c{n}, fr_n);\n")
        if self.unit.row is not None and not self.masks and not jumps_out(statement):
            # Mostly all lanes go the same way, and then need no mask.
            self.out.append(f"if (::fr::split::each(fr_y{n}, fr_n)) ")
            self._nested(yes)
            self.out.append("else {\n")
            self._sides(n, yes, otherwise)
            self.out.append("}\n")
        else:
            self._sides(n, yes, otherwise)

    def _sides(self, n: int, yes: Node, otherwise: Node | None) -> None:
        """The two branches of an `if`, each for the lanes that take it."""
        for name, branch in ((f"fr_y{n}", yes), (f"fr_n{n}", otherwise)):
            if branch is None:
                continue
            if self.unit.row is None:
                self.out.append(f"if (::fr::split::any({name}, fr_n)) ")
                self.masks.append(Mask(name, "if"))
            else:
                end = f"fr_e{name.removeprefix('fr_')}"
                self.out.append(f"if (const unsigned {end} = ::fr::split::end({name}, fr_n)) ")
                self.masks.append(Mask(name, "if", end=end))
            self._nested(branch)
            self.masks.pop()

    def _loop(self, statement: Node) -> None:
        self._flush(self._later_names() | self._names(self.tree.text(statement)))
        parts = loop_parts(statement)
        _, condition, start, update = parts
        loop = statement.start_byte
        self.scopes.append({})
        if start is not None and start.type == "declaration":
            for declarator in declarators(start):
                self._declared(start, declarator, 0)
        self.out.append("{\n")
        kept = self.later
        self.later = [self.tree.text(statement), *kept]
        calls = any(c is not None and self._calls(c) for c in (condition, update, start))
        uniform = self.uniformity.of(condition) and not calls
        heads_plain = uniform and self._plain_head(start, update)
        masked = not heads_plain or loop in self.masked_loops | self.continued_loops
        if masked:
            self.count += 1
            mask, n = self._mask() or "nullptr", self.count
            self.out.append(f"int fr_l{n}[FR_N]; ::fr::split::copy(fr_l{n}, {mask}, fr_n);\n")
            self.masks.append(Mask(f"fr_l{n}", "loop", loop, self._end()))
        self.loops.append((loop, heads_plain, len(self.masks)))
        if heads_plain:
            self._plain_loop(statement, parts, masked)
        else:
            self._lane_loop(statement, parts)
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
        declared = declarators(start) if start is not None and start.type == "declaration" else []
        if start is not None and not all(self._declared(start, d, 0).uniform for d in declared):
            return False
        for part in (expression(start) if start is not None else None, update):
            if part is None or part.type == "declaration":
                continue
            for name, _ in assigned(self.tree, part):
                variable = self._lookup(name)
                if variable is None or not variable.uniform:
                    return False
            if not any(True for _ in assigned(self.tree, part)):
                return False
        return True

    def _plain_loop(self, statement: Node, parts: Loop, masked: bool) -> None:
        """A loop whose head is the same for all lanes."""
        body, condition, start, update = parts
        if start is not None and start.type == "declaration":
            for declarator in declarators(start):
                self._declared(start, declarator, 0)
        test = self._outside_text(condition) if condition is not None else ""
        if statement.type == "for_statement":
            first = self._outside_text(start).rstrip(";") if start is not None else ""
            step = self._outside_text(update) if update is not None else ""
            self._at(statement, f"for ({first}; {test}; {step}) {{\n")
        elif statement.type == "while_statement":
            self._at(statement, f"while ({test}) {{\n")
        else:
            self._at(statement, "do {\n")
        self._round(statement, body)
        if masked:
            self.out.append(f"if (!::fr::split::any({self._loop_mask(statement)}, fr_n)) break;\n")
        self.out.append("}\n" if statement.type != "do_statement" else f"}} while ({test});\n")

    def _loop_mask(self, statement: Node) -> str:
        return next(
            m.name
            for m in reversed(self.masks)
            if m.kind == "loop" and m.loop == statement.start_byte
        )

    def _round(self, statement: Node, body: Node) -> None:
        """One round of a loop: with a mask of its own where lanes may skip the rest of it."""
        if statement.start_byte not in self.continued_loops:
            self._nested(body)
            return
        self.count += 1
        name = f"fr_o{self.count}"
        self.out.append(
            f"int {name}[FR_N]; ::fr::split::copy({name}, {self._loop_mask(statement)}, fr_n);\n"
        )
        self.masks.append(Mask(name, "round", statement.start_byte, self._end()))
        self._nested(body)
        self.masks.pop()

    def _lane_loop(self, statement: Node, parts: Loop) -> None:
        """A loop that lanes leave at different times."""
        body, condition, start, update = parts
        if start is not None:
            self._statement(start)
            self._flush(self._later_names())
        mask = self._loop_mask(statement)
        self.out.append("for (;;) {\n")
        if statement.type == "do_statement":
            self._round(statement, body)
            self._leave(statement, condition, mask)
        else:
            self._leave(statement, condition, mask)
            self._round(statement, body)
            if update is not None:
                if self._calls(update):
                    raise NotSplittable("a loop's step holds a synchronising call")
                if self._changes_uniform(update):
                    self._at(update, self._outside_text(update) + ";\n")
                else:
                    self.pending.append(Piece(self.tree.text(update) + ";", self._line(update)))
                    self._flush(self._later_names())
        self.out.append("}\n")

    def _leave(self, statement: Node, condition: Node | None, mask: str) -> None:
        """Take the lanes out of the loop whose condition has become false."""
        if condition is not None:
            replaced = self._extract(condition, statement)
            text = self._render(condition, replaced)
            self.pending.append(Piece(f"if (!({text})) {mask}[fr_i] = 0;", self._line(condition)))
            self._flush(self._later_names())
        self.out.append(f"if (!::fr::split::any({mask}, fr_n)) break;\n")

    def _jump(self, statement: Node) -> None:
        """A jump that all active lanes make."""
        kind = statement.type.split("_")[0]
        if kind == "return":
            together = not self.masks
        else:
            loop, plain, depth = self.loops[-1]
            together = plain and len(self.masks) == depth and loop not in self.masked_loops
        if together:
            self._flush(self._later_names())
            self._at(statement, f"{kind};\n")
            return
        self.pending.append(Piece(self._lane_jump(kind), self._line(statement), exits=True))
        self._flush(self._later_names())


def _with_lanes(text: str, kernel: str) -> str:
    """Loads and stores of matrices ask for their lane."""
    part = tokens(text, kernel=kernel, where="source")
    solid = [t for t in part if not t.blank]
    for i, token in enumerate(solid[:-1]):
        if token.text in ("simdgroup_load", "simdgroup_store") and solid[i + 1].text == "(":
            solid[i + 1].text = "(::fr::at_lane{fr_i % 32u}, "
    return join(part)


def split_body(splitter: Splitter) -> str:
    """The split body of a kernel.

    Raises:
        NotSplittable: the control flow does not allow it.
    """
    for _ in range(200):
        try:
            return splitter.run()
        except Again:
            continue
    raise NotSplittable("the control flow is too deep")
