"""Kernels that synchronise, as loops over lanes split at each barrier and simd operation.

The body's statements between two such points become one loop over the lanes of a unit (a simdgroup,
or a whole threadgroup). What a lane keeps from one loop to a later one lies in an array with one
element per lane; what is the same in all lanes (`source.uniform`) is one variable outside them.

Control flow that holds a synchronising call moves outside the loops. Where its condition is uniform
it stays as it is; where lanes differ, it works with masks: an ``if`` runs both sides, each for its
own lanes; a loop goes on while a lane is left in it; ``return``, ``break`` and ``continue`` take
lanes out of the masks around them. Operations of a simdgroup see the lanes of the current mask, so
lanes that go different ways are told apart, and meet again, exactly as Metal says.

What cannot be split (`NotSplittable`) runs on fibers instead.
"""

from __future__ import annotations

import re
from typing import Any

from tree_sitter import Node

from .analysis import LOOPS, SPLIT_CALLS, Body, branch_statements, expression, loop_parts
from .cpp import (
    ROW_ADDITION,
    NotSplittable,
    Prepared,
    attribute,
    comma,
    function_parameters,
    parameters,
    template_head,
    template_values,
    used_attributes,
    with_entry,
    without_synchronising_functions,
)
from .inline import inline
from .lexer import join, tokens
from .macros import expand
from .matrices import makes_diagonal
from .operations import Operations
from .regions import Again, Mask, Piece
from .rows import LAUNCH_ATTRIBUTES, Row, find
from .syntax import Tree, callee, declarators, declared_name, walk
from .uniform import LANE_ATTRIBUTES, POSITION_TEXTS, Unit, assigned

_GROUP_LEVEL = (
    "alias_declaration", "type_definition", "using_declaration", "static_assert_declaration",
    "struct_specifier", "class_specifier", "union_specifier", "enum_specifier",
    "preproc_def", "preproc_function_def", "preproc_undef", "empty_statement",
)  # fmt: skip
_FETCH_ADD = "atomic_fetch_add_explicit"
_LEFT = re.compile(r"(?<!split::)(?<!\w)(\w+)\s*\(")
_TO_POINTER = re.compile(r"\w+\s*\(\s*[*&]\s*\w+\s*\)\s*[\[(]")


class Splitter(Operations):
    """Splits one body for one kind of unit.

    Args:
        prepared: the kernel.
        unit: the threads that are carried out together.
    """

    def __init__(self, prepared: Prepared, unit: Unit) -> None:
        text = _with_lanes(inline(prepared, expand(prepared)), prepared.kernel.name)
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
        """
        self._check()
        for _ in range(50):
            self._analyse()
            before = (self.need_function_mask, set(self.masked_loops), set(self.continued_loops))
            self.out, self.pending, self.masks, self.loops = [], [], [], []
            self.divergent = self.count = 0
            self.divisors, self.anchors = {}, {}
            self.scopes = [dict(self.by_param)]
            if self.need_function_mask:
                self.out.append("int fr_m0[FR_N]; ::fr::split::all(fr_m0, fr_n);\n")
                self.masks.append(Mask("fr_m0", "fn"))
            self._declare_parameters()
            self._block(self.tree.block.named_children, [])
            if before == (self.need_function_mask, self.masked_loops, self.continued_loops):
                return self._checked("".join(self.out))
        raise NotSplittable("the control flow is too deep")

    def _checked(self, text: str) -> str:
        """The text, if no synchronising call is left in a loop over lanes."""
        for m in _LEFT.finditer(text):
            if m.group(1) in SPLIT_CALLS:
                # The grammar takes `(f(x) && (a)) && (b)` for a conversion.
                raise NotSplittable(f"a call of {m.group(1)} is not understood")
        return text

    def _check(self) -> None:
        if makes_diagonal(self.p.text.header, self.tree):
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
        for i, s in enumerate(statements):
            self.later = texts[i + 1 :] + after
            self._statement(s)
        self.later = after
        self._flush(set())
        self.scopes.pop()

    def _refuse_shadows(self, statements: list[Node], texts: list[str]) -> None:
        """A name that a block first uses and then declares itself means two variables."""
        for i, s in enumerate(statements):
            before = texts[:i]
            for d in declarators(s) if s.type == "declaration" else []:
                name = declared_name(d)
                used = self._names(" ".join(before))
                before.append(self.tree.text(d))  # `int a = best[1], best = 2;`
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

    def _statement(self, s: Node) -> None:
        kind = s.type
        if kind == "comment" or (kind == "preproc_call" and "#pragma" in self.tree.text(s)):
            return
        if kind == "preproc_call":
            self._flush(self._later_names())
            self._at(s, self.tree.text(s).rstrip() + "\n")
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
            if not self._one_lane(s):
                self._piece(s)
        elif kind == "compound_statement":
            self._flush(self._later_names() | self._names(self.tree.text(s)))
            self._nested(s)
        elif kind == "if_statement":
            self._if(s)
        elif kind in LOOPS:
            self._loop(s)
        elif kind in ("return_statement", "break_statement", "continue_statement"):
            self._jump(s)
        else:
            raise NotSplittable(f"a {kind.replace('_', ' ')} holds a synchronising call")

    def _one_lane(self, s: Node) -> bool:
        """`if (lane == 0) …`, for that lane alone, without a loop; False if it is not that."""
        condition, yes = s.child_by_field_name("condition"), s.child_by_field_name("consequence")
        if s.type != "if_statement" or yes is None or s.child_by_field_name("alternative"):
            return False
        test = condition.child_by_field_name("value") if condition is not None else None
        if test is None or test.type != "binary_expression" or test.children[1].type != "==":
            return False
        lane, number = test.child_by_field_name("left"), test.child_by_field_name("right")
        if lane is None or number is None or self._exits(s) or not self._is_position(lane):
            return False
        if number.type != "number_literal" or not self.tree.text(number).rstrip("uU").isdecimal():
            return False
        self._flush(self._later_names() | self._names(self.tree.text(s)))
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
        v = self._lookup(self.tree.text(node)) if node.type == "identifier" else None
        if v is not None and self.unit.row is None:
            return v.linear and (v.value in POSITION_TEXTS or self.uniformity.counts(v.value))
        return node.type in ("identifier", "field_expression") and self.uniformity.linear(node)

    def _is_constant(self, s: Node) -> bool:
        return "constexpr" in self.tree.text(s).split("=")[0].split() or not declarators(s)

    def _verbatim(self, s: Node) -> None:
        if s.type == "declaration":
            for d in declarators(s):
                variable = self._declared(s, d, 0)
                variable.uniform = True
        text = self.tree.text(s) + (";" if s.type.endswith("_specifier") else "")
        self._at(s, text if text.endswith("\n") else text + "\n")

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

    def _if(self, s: Node) -> None:
        condition = s.child_by_field_name("condition")
        yes, no = s.child_by_field_name("consequence"), s.child_by_field_name("alternative")
        if condition is None or yes is None:
            raise NotSplittable("an if is not understood")
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
            text = self._outside_text(condition, replaced)
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
        if self.unit.row is not None and not self.masks and not self._exits(s):
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

    def _loop(self, s: Node) -> None:
        self._flush(self._later_names() | self._names(self.tree.text(s)))
        body, condition, start, update = loop_parts(s)
        loop = s.start_byte
        self.scopes.append({})
        if start is not None and start.type == "declaration":
            for d in declarators(start):
                self._declared(start, d, 0)
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
            self.masks.append(Mask(f"fr_l{n}", "loop", loop, self._end()))
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
        declared = declarators(start) if start is not None and start.type == "declaration" else []
        if start is not None and not all(self._declared(start, d, 0).uniform for d in declared):
            return False
        for part in (expression(start) if start is not None else None, update):
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
            for d in declarators(start):
                self._declared(start, d, 0)
        test = self._outside_text(condition) if condition is not None else ""
        if s.type == "for_statement":
            first = self._outside_text(start).rstrip(";") if start is not None else ""
            step = self._outside_text(update) if update is not None else ""
            self._at(s, f"for ({first}; {test}; {step}) {{\n")
        elif s.type == "while_statement":
            self._at(s, f"while ({test}) {{\n")
        else:
            self._at(s, "do {\n")
        self._round(s, body)
        if masked:
            self.out.append(f"if (!::fr::split::any({self._loop_mask(s)}, fr_n)) break;\n")
        self.out.append("}\n" if s.type != "do_statement" else f"}} while ({test});\n")

    def _loop_mask(self, s: Node) -> str:
        return next(
            m.name for m in reversed(self.masks) if m.kind == "loop" and m.loop == s.start_byte
        )

    def _round(self, s: Node, body: Node) -> None:
        """One round of a loop: with a mask of its own where lanes may skip the rest of it."""
        if s.start_byte not in self.continued_loops:
            self._nested(body)
            return
        self.count += 1
        name = f"fr_o{self.count}"
        self.out.append(
            f"int {name}[FR_N]; ::fr::split::copy({name}, {self._loop_mask(s)}, fr_n);\n"
        )
        self.masks.append(Mask(name, "round", s.start_byte, self._end()))
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
                if self._changes_uniform(update):
                    self._at(update, self._outside_text(update) + ";\n")
                else:
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


def _with_lanes(text: str, kernel: str) -> str:
    """Loads and stores of matrices ask for their lane."""
    part = tokens(text, kernel=kernel, where="source")
    solid = [t for t in part if not t.blank]
    for i, token in enumerate(solid[:-1]):
        if token.text in ("simdgroup_load", "simdgroup_store") and solid[i + 1].text == "(":
            solid[i + 1].text = "(::fr::at_lane{fr_i % 32u}, "
    return join(part)


def _carried_out(splitter: Splitter) -> str:
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


def in_row(p: Prepared, body: Body) -> tuple[Row, str] | None:
    """The row that a body divides its x by, and the body for units that lie in one row.

    Args:
        body: the analysed body.
    """
    row = find(body) if body.unit.rows else None
    if row is None:
        return None
    try:
        return row, _carried_out(Splitter(p, body.unit._replace(row=row.text)))
    except NotSplittable:
        return None


def _may_wait(p: Prepared, tree: Tree) -> bool:
    """Whether a thread may wait for what another one does with an atomic."""
    words = p.text.words | p.text.header_words
    used = {w for w in words if w.startswith("atomic_") and w.endswith("_explicit")}
    if "volatile" in words or used != {_FETCH_ADD} or _FETCH_ADD in p.text.header_words:
        return True
    calls = (n for n in walk(tree.block) if n.type == "call_expression")
    return any(
        callee(tree, n).rpartition("::")[2] == _FETCH_ADD
        and (n.parent is None or n.parent.type != "expression_statement")
        for n in calls
    )


def _locked(p: Prepared, functions: str, bodies: list[str]) -> str:
    """Additions under locks, for outputs that get row additions and nothing but additions.

    Args:
        functions: the text, in which they are replaced.
        bodies: the parts of it that run for one launch.
    """
    for name in p.kernel.output_names:
        row = f"{ROW_ADDITION}/*{name}*/"
        single = re.compile(rf"(?:\bmetal::)?\b{_FETCH_ADD}\s*\(\s*&\s*(?={name}\b)")

        def only_added_to(
            body: str, name: str = name, row: str = row, single: Any = single
        ) -> bool:
            # A row addition names the array in its mark, as a pointer, and for its type.
            additions = 3 * body.count(row) + len(single.findall(body))
            declared = 2 * body.count(f" {name} = fr_a_{name}; (void){name};")
            return len(re.findall(rf"\b{name}\b", body)) == additions + declared

        if row in functions and all(map(only_added_to, bodies)):
            functions = functions.replace(row, "::fr::split::locked_add(fr_g.runs, ")
            functions = single.sub("::fr::split::locked_fetch_add(fr_g.runs, &", functions)
    return functions


def row_function(p: Prepared, row: Row) -> str:
    """A function that finds the length of the rows of a launch; 0 where rows would not pay."""
    params = parameters(p.spec)
    values = "".join(
        f"  {q.type} {q.name} = fr_a_{q.name}; (void){q.name};\n" for q in params
    ) + "".join(
        f"  {attribute(a)} (void){a};\n" for a in used_attributes(p) if a in LAUNCH_ATTRIBUTES
    )
    return (
        f"{template_head(p.spec)}static unsigned fr_row_length(\n"
        f"    const ::fr::group& fr_g{comma(params)}{function_parameters(params)}) {{\n"
        f"  (void)fr_g;\n{values}  {' '.join(row.declarations)}\n"
        f"  return ::fr::row_length(::fr::divisor_of({row.text}));\n}}\n"
    )


def text(p: Prepared, *, simdgroup: bool, rows: bool, aligned: bool = False) -> str:
    """Loops over the lanes of a simdgroup, or of a whole threadgroup.

    Args:
        simdgroup: a unit of work is a simdgroup; the threadgroup must not be larger where the
            body has barriers or threadgroup memory.
        rows: the lanes of a unit differ in x alone.
        aligned: threadgroups are a multiple of 32 threads wide.

    Raises:
        NotSplittable: the control flow does not allow it (`ferrule.source.split`).
    """
    splitter = Splitter(p, Unit(simdgroup, rows, aligned))
    own = inside = _carried_out(splitter)
    whole_row = in_row(p, splitter)
    p = without_synchronising_functions(p)
    params = parameters(p.spec)
    functions = function(p, "fr_kernel", inside, 32 if simdgroup else 1024, rows=rows)
    sep = ", " if p.spec.template else ""
    each = "simdgroups" if simdgroup else "threadgroups"
    arguments = template_values(p.spec)[1:] if p.spec.template else ">"
    passed = "(fr_g, fr_first, fr_n{arguments});\n"
    call = ""
    if whole_row is not None:
        row, inside = whole_row
        functions += row_function(p, row)
        functions += function(p, "fr_in_row", inside, 32 if simdgroup else 1024, rows=rows)
        call = (
            "  const ::fr::group fr_g(fr_l);\n"
            "  const unsigned fr_c = fr_row_length{values}(fr_g{arguments});\n"
        )
    call += (
        f"  ::fr::split::{each}(fr_l, fr_begin, fr_end, fr_w, "
        "[&](const ::fr::group& fr_g, unsigned fr_first, unsigned fr_n) {\n"
    )
    full = "fr_n == 32" if simdgroup else "false"
    if whole_row is not None:
        full_row = f"{full} && " if simdgroup else ""
        call += (
            f"    if ({full_row}::fr::split::in_row(fr_g, fr_first, fr_n, fr_c)) "
            f"fr_in_row<{32 if simdgroup else 0}{sep}{arguments}{passed}    else"
        )
    if simdgroup:
        call += f"    if ({full}) fr_kernel<32{sep}{arguments}{passed}    else"
    call += f"    fr_kernel<0{sep}{arguments}{passed}  }});\n"
    if not _may_wait(p, splitter.tree):
        functions = _locked(p, functions, [inside] if whole_row is None else [own, inside])
    return with_entry(p, "split", functions, call, params, units="threadgroups")


def function(p: Prepared, name: str, inside: str, lanes: int, *, rows: bool) -> str:
    """A function that carries out a body for the lanes of one unit.

    Its first template argument is the number of lanes where it is known, else 0.
    """
    params = parameters(p.spec)
    positions = (
        ""
        if rows
        else "  unsigned fr_px[FR_N], fr_py[FR_N], fr_pz[FR_N];\n"
        "  for (unsigned fr_i = 0; fr_i < fr_n; ++fr_i) {\n"
        "    const metal::uint3 fr_q = fr_g.position(fr_first + fr_i);\n"
        "    fr_px[fr_i] = fr_q.x, fr_py[fr_i] = fr_q.y, fr_pz[fr_i] = fr_q.z;\n  }\n"
    )
    values = "".join(
        f"  {attribute(a).replace('fr_i', 'fr_first') if a in LANE_ATTRIBUTES else attribute(a)} "
        f"(void){a};\n"
        for a in used_attributes(p)
    )
    given = comma(params) + function_parameters(params)
    head_ = template_head(p.spec) or ""
    full = "template <unsigned FR_FULL" + (", " + head_[len("template <") :] if head_ else ">\n")
    return f"""\
{full}static void {name}(
    const ::fr::group& fr_g, unsigned fr_first, unsigned fr_count{given}) {{
  constexpr unsigned FR_N = {lanes}, fr_i = 0;
  const unsigned fr_n = FR_FULL ? FR_FULL : fr_count;
  const metal::uint3 fr_p0 = fr_g.position(fr_first), fr_p = fr_p0;
  (void)fr_i, (void)fr_p;
{positions}{values}{inside}}}
"""
