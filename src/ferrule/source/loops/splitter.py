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
from functools import partial

from tree_sitter import Node

from .. import words
from ..cpp import NotSplittable, Prepared
from ..lexer import join, tokens
from ..syntax import declarators, declared_name, field, kinds, operands, part, walk
from .analysis import analyse
from .assignments import assigned
from .body import DEFINITIONS, LANE_CALLS, SPLIT_CALLS, Body, Scopes, Unit, Variables, read
from .inline import inline
from .kept import Declarations
from .lanes import Lanes, render
from .matrices import makes_diagonal
from .nest import ANY, Frame, Nest
from .operations import Operations
from .plan import Plan, planned, require
from .statements import LOOPS, Loop, branch_statements, branches, expression, jumps_out, loop_parts
from .strides import Stride
from .uniform import POSITION_TEXTS, Uniformity

_LANE_CALL = re.compile(rf"\b({'|'.join(sorted(LANE_CALLS))})\b")
_VERBATIM = words("preproc_def preproc_function_def preproc_undef empty_statement")
_LEFT = re.compile(r"(?<!split::)(?<!\w)(\w+)\s*\(")
_TO_POINTER = re.compile(r"\w+\s*\(\s*[*&]\s*\w+\s*\)\s*[\[(]")
# What may hold no synchronising call.
_UNSPLIT = {
    "lambda_expression": "a lambda synchronises",
    "struct_specifier": "a local struct synchronises",
    "class_specifier": "a local struct synchronises",
    "switch_statement": "a switch holds a synchronising call",
}


def split(p: Prepared, unit: Unit) -> tuple[str, Body, Variables]:
    """The split body of a kernel, after its function's parameters; the body, and its variables.

    Raises:
        NotSplittable: the control flow does not allow it.
    """
    text = _with_lanes(inline(p, p.expanded()), p.kernel.name)
    if _LANE_CALL.search(text):
        try:
            return _split(read(p, text, unit, tiled=True))
        except NotSplittable:  # but each lane may load and store its own elements
            pass
    return _split(read(p, text, unit))


def _split(body: Body) -> tuple[str, Body, Variables]:
    _refuse(body)

    def write(plan: Plan) -> tuple[str, Variables]:
        variables = analyse(body, plan)
        return _Splitter(body, variables, plan).text(), variables

    text, variables = planned(write)
    for m in _LEFT.finditer(text):
        if m.group(1) in SPLIT_CALLS:
            # The grammar takes `(f(x) && (a)) && (b)` for a conversion.
            raise NotSplittable(f"a call of {m.group(1)} is not understood")
    return text, body, variables


def _with_lanes(text: str, kernel: str) -> str:
    """Loads and stores of matrices ask for their lane."""
    code = tokens(text, kernel=kernel, where="source")
    solid = [t for t in code if not t.blank]
    for i, token in enumerate(solid[:-1]):
        if token.text in LANE_CALLS and solid[i + 1].text == "(":
            solid[i + 1].text = "(::fr::at_lane{fr_i % 32u}, "
    return join(code)


def _refuse(body: Body) -> None:
    """Refuse what is never split."""
    if makes_diagonal(body.prepared.header, body.tree):
        raise NotSplittable("a simdgroup_matrix is made from a value on its diagonal")
    for node in walk(body.tree.block):
        kind = node.type
        if kind == "expression_statement" and _TO_POINTER.match(body.tree.text(node)):
            # The grammar takes `int (*p)[2] = a;` for an assignment.
            raise NotSplittable(f"the statement {body.tree.text(node)!r} is not understood")
        if kind in ("goto_statement", "labeled_statement", "co_return_statement"):
            raise NotSplittable("the body jumps with goto")
        if kind in _UNSPLIT and body.calls(node):
            raise NotSplittable(_UNSPLIT[kind])
        if kind.startswith("preproc_if") and node.parent is not None and body.calls(node.parent):
            raise NotSplittable("an #if stands beside a synchronising call")


def _lane_jump(plan: Plan, nest: Nest, kind: str) -> str:
    """One lane leaves: cleared in the masks around it, then on to the next lane.

    Raises:
        NotPlanned: there is no mask to leave.
    """
    cleared = nest.masks
    if kind == "return":
        require(plan, kind)
        # A lane that returned is in no mask of a loop around it either.
        for frame in nest.frames:
            if frame.kind == "loop":
                require(plan, "break", frame.loop)
    else:
        require(plan, kind, nest.loop.loop)
        cleared = []
        for frame in reversed(nest.frames):
            if frame.kind == "loop" and kind == "continue":
                break
            cleared.append(frame.mask)
            if frame.kind == ("loop" if kind == "break" else "round"):
                break
    return f"{{ {' '.join(f'{mask}[fr_i] = 0;' for mask in cleared)} goto fr_next; }}"


class _Splitter:
    """Writes one body, by what is known of its variables and by a plan of masks."""

    def __init__(self, body: Body, variables: Variables, plan: Plan) -> None:
        self.body, self.tree, self.plan = body, body.tree, plan
        self.scopes = Scopes(body, variables)
        self.uniformity = Uniformity(self.scopes)
        self.lanes = Lanes(self.uniformity, partial(_lane_jump, plan))
        self.operations = Operations(self.lanes)
        self.declarations = Declarations(self.operations)

    def text(self) -> str:
        """The body.

        Raises:
            NotSplittable: the control flow does not allow it.
            NotPlanned: a mask is needed that was not planned.
        """
        nest = Nest()
        if ("return", 0) in self.plan:
            self.lanes.write("FR_LANES int fr_m0[FR_N]; ::fr::split::all(fr_m0, fr_n);\n")
            nest = nest.within(Frame("fn", "fr_m0"))
        self.declarations.parameters()
        self._block(self.tree.block.named_children, nest)
        return self.lanes.text()

    # -- blocks ----------------------------------------------------------------------------------

    def _block(self, statements: list[Node], nest: Nest) -> None:
        texts = tuple(map(self.tree.text, statements))
        self._refuse_shadows(statements, texts)
        with self.scopes.inner():
            for index, statement in enumerate(statements):
                self._statement(statement, nest._replace(later=texts[index + 1 :]))
            self.lanes.flush(nest._replace(later=()))

    def _refuse_shadows(self, statements: list[Node], texts: tuple[str, ...]) -> None:
        """Refuse a block that uses a name before it declares it: that means two variables."""
        for i, statement in enumerate(statements):
            before = " ".join(texts[:i])
            for declarator in declarators(statement) if statement.type == "declaration" else []:
                name = self.tree.text(declared_name(declarator))
                if self.scopes.lookup(name) is not None and name in self.scopes.words(before):
                    raise NotSplittable(f"a block uses {name} before it hides it")
                before += " " + self.tree.text(declarator)  # `int a = best[1], best = 2;`

    def _nested(self, statement: Node, nest: Nest) -> None:
        """A branch or a loop's body, in braces of its own."""
        self.lanes.flush(nest)
        self.lanes.write("{\n")
        self._block(branch_statements(statement), nest)
        self.lanes.write("}\n")

    def _statement(self, statement: Node, nest: Nest) -> None:
        kind, text = statement.type, self.tree.text(statement)
        if kind == "comment" or (kind == "preproc_call" and "#pragma" in text):
            return
        if kind == "preproc_call":
            self.lanes.flush(nest)
            self.lanes.write(text.rstrip() + "\n", statement)
        elif kind == "attributed_statement":
            self._statement(statement.named_children[-1], nest)
        elif self._is_definition(statement):
            self.lanes.flush(nest, text)
            self._verbatim(statement)
        elif kind == "declaration":
            self.declarations.statement(statement, nest)
        elif kind.endswith(("expression", "expression_statement")):  # without `;` in a loop's head
            self.operations.statement(statement, nest)
        elif not self.uniformity.splits(statement):
            if not self._one_lane(statement, nest):
                self.lanes.add_statement(statement, nest)
        elif kind == "compound_statement":
            self.lanes.flush(nest, text)
            self._nested(statement, nest)
        elif kind == "if_statement":
            self._if(statement, nest)
        elif kind in LOOPS:
            self._loop(statement, nest)
        elif kind in ("return_statement", "break_statement", "continue_statement"):
            self._jump(statement, nest)
        else:
            raise NotSplittable(f"a {kind.replace('_', ' ')} holds a synchronising call")

    def _one_lane(self, statement: Node, nest: Nest) -> bool:
        """`if (lane == 0) …`, for that lane alone, without a loop; False if it is not that."""
        yes, no = branches(statement)
        if statement.type != "if_statement" or yes is None or no is not None:
            return False
        test = part(statement, "condition").child_by_field_name("value")
        if test is None or test.type != "binary_expression":
            return False
        lane, operator, number_node = operands(test)
        number = self.tree.text(number_node)
        if number_node.type != "number_literal" or not number.rstrip("uU").isdecimal():
            return False
        if operator != "==" or jumps_out(statement) or int(number.rstrip("uU")) >= 2**31:
            return False
        at = f"fr_o{self.lanes.number()}"
        each = f"for (unsigned fr_i = {at}, {at}o = 1; {at}o; {at}o = 0) "
        if self._is_position(lane):
            last = self.lanes.last(lane)
            place = f"{number} - unsigned({last}) + ({self.lanes.count} - 1u)"
        elif (
            self.uniformity.held(lane) == "thread_index_in_simdgroup"
            and int(number.rstrip("uU")) < 32
        ):
            # One lane of each simdgroup of a threadgroup.
            place, each = number, f"for (unsigned fr_i = {at}; fr_i < {nest.end}; fr_i += 32) "
        else:
            return False
        self.lanes.flush(nest, self.tree.text(statement))
        self.lanes.write(f"const unsigned {at} = {place};\n")
        self.lanes.add_statement(yes, nest)
        self.lanes.flush(nest, head=f"if ({at} < {nest.end}) {each}")
        return True

    def _is_position(self, node: Node) -> bool:
        """Whether an expression is a lane's number, or a variable that holds it."""
        if node.type not in ("identifier", "field_expression"):
            return False
        variable = self.scopes.lookup(self.tree.text(node))
        linear = self.uniformity.value(node).linear
        if variable is None or self.body.unit.row is not None:
            return linear
        held = variable.value
        return linear and (held in POSITION_TEXTS or self.uniformity.counts(held))

    def _is_definition(self, statement: Node) -> bool:
        """Whether a statement stands as it is: it says what names mean, for all lanes."""
        if statement.type != "declaration":
            return statement.type in DEFINITIONS | _VERBATIM
        specifiers = self.tree.text(statement).split("=")[0].split()
        return "constexpr" in specifiers or not declarators(statement)

    def _verbatim(self, statement: Node) -> None:
        self.scopes.declare(statement)
        text = self.tree.text(statement) + (";" if statement.type.endswith("_specifier") else "")
        self.lanes.write(text if text.endswith("\n") else text + "\n", statement)

    # -- control flow ----------------------------------------------------------------------------

    def _if(self, statement: Node, nest: Nest) -> None:
        condition = part(statement, "condition")
        yes, no = branches(statement)
        if yes is None:
            raise NotSplittable("an if is not understood")
        otherwise = no.named_children[-1] if no is not None and no.named_children else None
        inner = field(condition, "value") or condition
        if field(condition, "initializer") is not None or inner.type == "declaration":
            raise NotSplittable("an if declares a variable in its condition")
        lanes, also = self.lanes, self.tree.text(statement)
        uniform = self.uniformity.of(condition)
        constexpr = any(c.type == "constexpr" for c in statement.children)
        replaced = self.operations.extract(condition, statement, nest)
        if uniform:
            lanes.flush(nest, also)
            head = f"if {'constexpr ' if constexpr else ''}{lanes.outside(condition, replaced)} "
            lanes.write(head, statement)
            self._nested(yes, nest)
            if otherwise is not None:
                lanes.write("else ")
                self._nested(otherwise, nest)
            return
        n = lanes.number()
        lanes.add(f"fr_c{n}[fr_i] = {render(self.tree, condition, replaced)} ? 1 : 0;", statement)
        lanes.flush(nest, also, [f"FR_LANES int fr_c{n}[FR_N], fr_y{n}[FR_N], fr_n{n}[FR_N];\n"])
        lanes.write(f"::fr::split::both(fr_y{n}, fr_n{n}, {nest.mask}, fr_c{n}, fr_n);\n")
        if self.body.unit.row is not None and not nest.masks and not jumps_out(statement):
            # Mostly all lanes go the same way, and then need no mask.
            lanes.write(f"if (::fr::split::each(fr_y{n}, fr_n)) ")
            self._nested(yes, nest)
            lanes.write("else {\n")
            self._sides(n, yes, otherwise, nest)
            lanes.write("}\n")
        else:
            self._sides(n, yes, otherwise, nest)

    def _sides(self, n: int, yes: Node, otherwise: Node | None, nest: Nest) -> None:
        """The two branches of an `if`, each for the lanes that take it."""
        for side, branch in ((f"y{n}", yes), (f"n{n}", otherwise)):
            if branch is None:
                continue
            end, test = nest.end, f"::fr::split::any(fr_{side}, {nest.end})"
            if self.body.unit.row is not None:
                end = f"fr_e{side}"
                test = f"const unsigned {end} = ::fr::split::end(fr_{side}, fr_n)"
            self.lanes.write(f"if ({test}) ")
            self._nested(branch, nest.within(Frame("if", f"fr_{side}", end=end)))

    def _stride_loop(self, statement: Node, stride: Stride, nest: Nest) -> None:
        """A loop that lanes go through in step: its rounds stand outside the loops over lanes."""
        lanes, text = self.lanes, self.tree.text(statement)
        lanes.flush(nest, text)
        n, end = lanes.number(), nest.end
        with self.scopes.inner():
            (variable,) = self.scopes.declare(stride.start)
        kind = f"fr_t{variable.number}"
        lanes.write(
            f"{{\ntypedef {variable.type} {kind}; ::fr::storage_t<{kind}> fr_f{n} = 0;\n"
            f"const unsigned fr_o{n} = ::fr::split::first({nest.mask}, {end});\n"
        )
        # What the first active lane starts with tells what all of them do. It has no counter yet.
        lanes.add(f"fr_f{n} = {self.tree.text(stride.first)};", statement)
        one = f"for (unsigned fr_i = fr_o{n}; fr_i < {end}; fr_i = {end}) "
        lanes.flush(nest._replace(later=(text, *nest.later)), head=one)
        head = ", ".join(map(lanes.outside, (stride.bound, stride.step)))
        lanes.write(
            f"const auto fr_k{n} = ::fr::split::rounds_of(fr_f{n}, fr_o{n}, {end}, {head});\n",
            statement,
        )
        lanes.write(f"if (fr_k{n}.together) {{\nint64_t fr_a{n} = fr_k{n}.first;\n")
        body, inside = part(statement, "body"), nest._replace(later=(text, *nest.later))
        simple = not nest.masks and not any(True for _ in kinds(body, *LOOPS))
        if self.body.unit.simdgroup and simple:
            # Of a number of lanes that it knows, a compiler makes vectors, kept in registers.
            lanes.fetches = True
            self._rounds(stride.start, body, inside, n, (f"fr_a{n} <= fr_k{n}.end - {end}", end))
            lanes.fetches = False
        rest = f"fr_a{n} < fr_k{n}.end", f"fr_k{n}.lanes(fr_a{n}, {end})"
        self._rounds(stride.start, body, inside, n, rest)
        lanes.write("} else {\n")
        lanes.add_statement(statement, nest)
        lanes.flush(nest)
        lanes.write("}\n}\n")

    def _rounds(
        self, start: Node, body: Node, nest: Nest, n: int, while_and_count: tuple[str, str]
    ) -> None:
        """Rounds of a loop that lanes go through in step.

        Args:
            start: the declaration of its variable.
            n: the loop's number.
            while_and_count: what holds before each round, and how many lanes take part in it.
        """
        lanes, (test, lanes_of_round), count = self.lanes, while_and_count, f"fr_e{n}"
        with self.scopes.inner():
            (variable,) = self.scopes.declare(start)
            kind = f"fr_t{variable.number}"
            lanes.write(
                f"for (; {test}; fr_a{n} += fr_k{n}.step) {{\n"
                f"const unsigned {count} = {lanes_of_round};\n"
                f"const {kind} fr_u{n} = {kind}(fr_a{n});\n"
            )
            with lanes.in_step(variable, f"fr_u{n}", count):
                self._nested(body, nest.within(Frame("stride", end=count)))
        lanes.write("}\n")

    def _loop(self, statement: Node, nest: Nest) -> None:
        stride = self.uniformity.stride(statement)
        if stride is not None:
            self._stride_loop(statement, stride, nest)
            return
        lanes, text, key = self.lanes, self.tree.text(statement), statement.start_byte
        lanes.flush(nest, text)
        _, condition, start, update = parts = loop_parts(statement)
        with self.scopes.inner():
            uniform = all(v.uniform for v in self.scopes.declare(start))
            # Not for nobody: what ends the loop may be what made the lanes leave.
            lanes.write(f"if ({ANY}({nest.mask}, {nest.end})) " * bool(nest.masks) + "{\n")
            calls = any(c is not None and self.body.calls(c) for c in (condition, update, start))
            together = self.uniformity.of(condition)  # lanes leave at the same time
            plain = uniform and together and not calls and self._plain_head(start, update)
            frame = Frame("loop", "", key, nest.end, plain)
            masked = not together or bool({("break", key), ("continue", key)} & self.plan)
            if masked:
                frame = frame._replace(mask=self._copied("fr_l", nest))
            inside = nest.within(frame)._replace(later=(text, *nest.later))
            write = self._plain_loop if frame.plain else self._lane_loop
            write(statement, parts, inside)
            lanes.write("}\n")
        if masked:
            lanes.leave_together(nest)

    def _copied(self, name: str, nest: Nest) -> str:
        """A mask that begins as the present one."""
        name = f"{name}{self.lanes.number()}"
        self.lanes.write(
            f"FR_LANES int {name}[FR_N]; ::fr::split::copy({name}, {nest.mask}, fr_n);\n"
        )
        return name

    def _plain_head(self, start: Node | None, update: Node | None) -> bool:
        """Whether what a loop's head assigns to are uniform variables."""
        for node in (expression(start), update):
            if node is None or node.type == "declaration":
                continue
            variables = [self.scopes.lookup(name) for name, _ in assigned(self.tree, node)]
            if not variables or any(v is None or not v.uniform for v in variables):
                return False
        return True

    def _plain_loop(self, statement: Node, parts: Loop, nest: Nest) -> None:
        """A loop whose head is the same for all lanes."""
        first, test, step = map(self.lanes.outside, (parts.start, parts.condition, parts.update))
        heads = {
            "for_statement": f"for ({first.rstrip(';')}; {test}; {step})",
            "while_statement": f"while ({test})",
            "do_statement": "do",
        }
        self.lanes.write(f"{heads[statement.type]} {{\n", statement)
        self._round(parts.body, nest)
        if nest.loop.mask:
            self.lanes.write(f"if (!{ANY}({nest.mask}, {nest.end})) break;\n")
        self.lanes.write(f"}} while ({test});\n" if statement.type == "do_statement" else "}\n")

    def _round(self, body: Node, nest: Nest) -> None:
        """One round of a loop: with a mask of its own where lanes may skip the rest of it."""
        if ("continue", nest.loop.loop) in self.plan:
            nest = nest.within(Frame("round", self._copied("fr_o", nest), end=nest.end))
        self._nested(body, nest)

    def _lane_loop(self, statement: Node, parts: Loop, nest: Nest) -> None:
        """A loop that lanes leave at different times, or whose head synchronises."""
        lanes = self.lanes
        body, condition, start, update = parts
        if start is not None:
            self._statement(start, nest)
            lanes.flush(nest)
        lanes.write("for (;;) {\n")
        if statement.type == "do_statement":
            self._round(body, nest)
            self._leave(statement, condition, nest)
        else:
            self._leave(statement, condition, nest)
            self._round(body, nest)
            if update is not None:
                self._statement(update, nest)
                lanes.flush(nest)
        lanes.write("}\n")

    def _leave(self, statement: Node, condition: Node | None, nest: Nest) -> None:
        """Take the lanes out of the loop whose condition has become false."""
        if condition is not None:
            replaced = self.operations.extract(condition, statement, nest)
            if not nest.loop.mask:
                self.lanes.flush(nest)
                test = self.lanes.outside(condition, replaced)
                self.lanes.write(f"if (!({test})) break;\n", condition)
                return
            text = render(self.tree, condition, replaced)
            self.lanes.add(f"if (!({text})) {nest.mask}[fr_i] = 0;", condition)
            self.lanes.flush(nest)
        if nest.loop.mask:
            self.lanes.write(f"if (!{ANY}({nest.mask}, {nest.end})) break;\n")

    def _jump(self, statement: Node, nest: Nest) -> None:
        """A jump that all active lanes make."""
        kind, together = statement.type.split("_")[0], not nest.masks
        if kind != "return":
            loop = nest.loop.loop
            # The last frame is that of the loop itself, where nothing is between.
            together = ("break", loop) not in self.plan and nest.frames[-1].plain
        if together:
            self.lanes.flush(nest)
            self.lanes.write(f"{kind};\n", statement)
            return
        self.lanes.add(_lane_jump(self.plan, nest, kind), statement, exits=True)
        self.lanes.flush(nest)
