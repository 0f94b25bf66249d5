"""The lanes that each operation of a simdgroup names on a GPU, written into a body.

CUDA's operations are handed the set of lanes that take part, and wait for them: a lane that is
named and never comes hangs the kernel. Which lanes are active cannot be asked for (lanes that go
the same way need not be together), so the body keeps count of them itself, in masks:

==============================  ================================================================
the body                        ``fr_m0``: the lanes that there are, less those that returned
an ``if`` where lanes differ    a vote on its condition gives the lanes of either side
``&&``, ``||``, ``?:``          likewise, where an operand operates
a loop where lanes differ       a mask of its own: lanes vote on the condition before each round
a ``continue`` of some lanes    a mask of the round
==============================  ================================================================

Where all lanes of a mask go one way (`source.uniform`) nothing is written at all: such an ``if`` or
loop costs what it costs in CUDA written by hand. Lanes that leave by ``return``, ``break`` or
``continue`` are taken out of the masks that they leave. To leave several at once, a lane says so
in ``fr_leave`` and goes to the end of each in turn, where the lanes of the mask around it vote who
stays.

Each vote is one of all lanes of a mask, at one place, which all of them come to. What cannot be
written so asks the hardware which lanes are with it: operations in lambdas, in a ``switch``, in
header functions that cannot be put in place of their calls (before all of these, the lanes of the
mask are brought together), and in bodies that are not understood at all (`NotSplittable`).
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field

from tree_sitter import Node

from .analysis import LOOPS, Body, branch_statements, loop_parts
from .cpp import NotSplittable, Prepared, synchronising_functions
from .dialect import SIMD_BARRIERS, SIMD_OPS
from .inline import inline
from .macros import expand
from .regions import Again
from .syntax import (
    OTHER_CODE,
    callee,
    declarators,
    declared_name,
    enclosing_struct,
    function_definitions,
    walk,
    walk_code,
)
from .uniform import Unit, Variable

MASKED = SIMD_OPS | SIMD_BARRIERS  # what is handed a mask
_CODES = {"return": 1, "break": 2, "continue": 3}
_JUMPS = {f"{kind}_statement": kind for kind in _CODES}
_SHORT = {"&&": "yes", "and": "yes", "||": "no", "or": "no"}  # who evaluates the right side


@dataclass
class _Region:
    """What the lanes of one mask carry out.

    Attributes:
        mask: the C++ variable.
        owner: the `if` or loop that it is a part of; None for the whole body.
        end: the label that lanes go to that leave more than this region.
        through: it ends with a jump of all its lanes, which the region around already misses.
        leaving: the jumps that go to the label.
    """

    mask: str
    owner: Node | None = None
    end: str = ""
    through: bool = False
    leaving: set[str] = field(default_factory=set)


@dataclass
class _Loop:
    """A loop around the current place: how many regions there were inside it at its start."""

    start: int
    depth: int
    rounds: bool


def masked(p: Prepared, unit: Unit) -> tuple[str, str] | None:
    """Declarations of masks, and the body in which each operation names its lanes.

    None where there is nothing to name, or the body's control flow does not allow it.
    """
    if not p.text.words & MASKED:
        return None
    try:
        text = expand(p)
        with suppress(NotSplittable):  # else the functions ask the hardware
            text = inline(p, text)
        masks = Masks(p, text, unit)
        for _ in range(200):
            try:
                return masks.run()
            except Again:
                continue
    except (NotSplittable, RecursionError):
        pass
    return None


class Masks(Body):
    """Writes masks into one body."""

    def run(self) -> tuple[str, str] | None:
        """Declarations, and the body.

        Raises:
            NotSplittable: the control flow does not allow it.
            Again: a loop turned out to be left by some lanes before others.
        """
        self.callers = self._callers()
        calls = [n for n in walk_code(self.tree.block) if self._is_operation(n) or self._asks(n)]
        self.operations = [n.start_byte for n in calls]
        if not calls:
            return None
        self._refuse()
        self._analyse()
        self.edits: list[tuple[int, int, str]] = []
        self.regions = [_Region("fr_m0")]
        self.loops: list[_Loop] = []
        self.count = self.choices = 0
        self.leaves = False
        self.scopes = [dict(self.by_param)]
        self._block(self.tree.block.named_children)
        declared = "::fr::warp::mask fr_m0 = ::fr::warp::all(fr_g, fr_i);"
        if self.choices:
            names = ", ".join(f"fr_b{n + 1}" for n in range(self.choices))
            declared += f" ::fr::warp::branch {names};"
        if self.leaves:
            declared += " int fr_leave = 0;"
        return declared, self.tree.edited(self.edits)

    def _refuse(self) -> None:
        own = {*self.functions, *(name for name, _ in function_definitions(self.tree))}
        if own & MASKED:
            raise NotSplittable("the header has operations of its own")
        for node in walk(self.tree.block):
            if node.type in ("goto_statement", "labeled_statement", "co_return_statement"):
                raise NotSplittable("the body jumps with goto")

    def _variable(self, key: int, made: Variable) -> Variable:
        """A variable; of one in a statement that the analysis took as a whole nothing is known."""
        if self.analysed and key not in self.variables:
            made.uniform = made.readonly = made.pointer = False
            made.written = True
            self.scopes[-1][made.name] = made
            return made
        return super()._variable(key, made)

    # -- what there is to do ---------------------------------------------------------------------

    def _is_operation(self, node: Node) -> bool:
        return node.type == "call_expression" and callee(self.tree, node) in MASKED

    def _asks(self, node: Node) -> bool:
        """Whether a call leads to operations that name no lanes."""
        if node.type != "call_expression":
            return False
        return re.split(r"\.|->", callee(self.tree, node))[-1] in self.callers

    def _callers(self) -> set[str]:
        """Functions and lambdas that operate: what is left of the header's, and local ones."""
        found = {re.sub(r"<.*", "", name) for name in synchronising_functions(self.p)}
        own: list[tuple[str, Node]] = []
        for name, node in function_definitions(self.tree):
            own += [(name, node), (enclosing_struct(self.tree, node), node)]
        for node in walk(self.tree.block):
            if node.type == "init_declarator":
                name_node, value = declared_name(node), node.child_by_field_name("value")
                if name_node is not None and value is not None:
                    own += [
                        (self.tree.text(name_node), n) for n in walk(value) if "lambda" in n.type
                    ]
        for _ in range(len(own) + 1):
            known = len(found)
            for name, node in own:
                words = {callee(self.tree, n) for n in walk(node) if n.type == "call_expression"}
                if node.start_byte > self.tree.block.start_byte and words & (found | MASKED):
                    found.add(name)
            if len(found) == known:
                break
        return found - {""}

    def _operates(self, node: Node) -> bool:
        return any(node.start_byte <= at < node.end_byte for at in self.operations)

    def _matters_after(self, node: Node) -> bool:
        """Whether an operation may be carried out after a statement."""
        if self.operations[-1] >= node.end_byte:
            return True
        around = node.parent
        while around is not None:
            if around.type in (*LOOPS, "for_range_loop") and self._operates(around):
                return True
            around = around.parent
        return False

    def _outgoing(self, s: Node) -> list[Node]:
        """The jumps by which lanes leave a statement while it matters who is left."""
        found: list[Node] = []

        def visit(node: Node, nested: bool, switched: bool) -> None:
            kind = _JUMPS.get(node.type)
            if (
                (kind == "return" and self._matters_after(s))
                or (kind == "break" and not nested and not switched)
                or (kind == "continue" and not nested)
            ):
                found.append(node)
            if node.type in ("lambda_expression", "function_definition", "struct_specifier"):
                return
            loop = node.type in LOOPS or node.type == "for_range_loop"
            for child in node.children:
                visit(child, nested or loop, switched or node.type == "switch_statement")

        visit(s, False, False)
        return found

    def _insert(self, at: int, text: str) -> None:
        self.edits.append((at, at, text))

    def _number(self) -> int:
        self.count += 1
        return self.count

    # -- statements ------------------------------------------------------------------------------

    def _block(self, statements: list[Node]) -> None:
        self.scopes.append({})
        for s in statements:
            self._statement(s)
        self.scopes.pop()

    def _nested(self, branch: Node, region: _Region | None = None) -> None:
        """A branch or a loop's body, for the lanes of a region of its own."""
        if region is not None:
            self.regions.append(region)
        self._block(branch_statements(branch))
        if region is not None:
            self.regions.pop()

    def _statement(self, s: Node) -> None:
        kind = s.type
        if kind == "declaration":
            self._declaration(s)
        elif kind in _JUMPS:
            way = self._leave(_JUMPS[kind])
            if way != f"{_JUMPS[kind]};":
                self.edits.append((s.start_byte, s.end_byte, way))
        elif not self._operates(s) and not self._outgoing(s):
            return
        elif kind == "expression_statement":
            self._name_lanes(s)
        elif kind == "compound_statement":
            self._block(s.named_children)
        elif kind == "attributed_statement":
            self._statement(s.named_children[-1])
        elif kind == "if_statement":
            self._if(s)
        elif kind == "switch_statement" or not self._operates(s):
            self._unseen(s)
        elif kind in LOOPS:
            self._loop(s)
        else:
            raise NotSplittable(f"a {kind.replace('_', ' ')} holds an operation of a simdgroup")

    def _declaration(self, s: Node) -> None:
        self._name_lanes(s)
        for d in declarators(s):
            variable = self._declared(s, d, 0)
            if "constexpr" in variable.type.split():
                variable.uniform = True

    def _name_lanes(self, node: Node | None, mask: str = "") -> None:
        """Hand a mask, that of the current region, to the operations in an expression."""
        mask = mask or self.regions[-1].mask
        if node is None or node.type in OTHER_CODE or not self._operates(node):
            return
        decides, sides = self._choice(node)
        if decides is not None and not self.uniformity.of(decides):
            self.choices += 1
            vote = f"fr_b{self.choices}"
            self._insert(decides.start_byte, f"({vote} = ::fr::warp::branch({mask}, (")
            self._name_lanes(decides, mask)
            self._insert(decides.end_byte, ") ? true : false)).taken")
            for side, which in sides:
                self._name_lanes(side, f"{vote}.{which}")
            return
        asks = self._asks(node)
        if asks:
            self._insert(node.start_byte, f"(::fr::warp::meet({mask}), ")
        elif self._is_operation(node):
            arguments = node.child_by_field_name("arguments")
            if arguments is not None:
                comma = ", " if arguments.named_child_count else ""
                self._insert(arguments.start_byte + 1, mask + comma)
        for child in node.children:
            self._name_lanes(child, mask)
        if asks:
            self._insert(node.end_byte, ")")

    def _choice(self, node: Node) -> tuple[Node | None, list[tuple[Node, str]]]:
        """What decides who evaluates which operands, where some of these operate."""
        sides: list[tuple[Node | None, str]] = []
        decides: Node | None = None
        if node.type == "binary_expression" and node.children[1].type in _SHORT:
            decides = node.child_by_field_name("left")
            sides = [(node.child_by_field_name("right"), _SHORT[node.children[1].type])]
        elif node.type == "conditional_expression":
            decides = node.child_by_field_name("condition")
            sides = [(node.child_by_field_name("consequence"), "yes")]
            sides.append((node.child_by_field_name("alternative"), "no"))
        found = [(side, which) for side, which in sides if side is not None]
        return (decides, found) if any(self._operates(side) for side, _ in found) else (None, [])

    # -- leaving ---------------------------------------------------------------------------------

    def _mark(self, kind: str) -> None:
        """Remember that some lanes leave a loop, or one of its rounds, before others."""
        if kind == "return":
            return
        loop = self.loops[-1]
        # Those that go on to the next round do not see who leaves the loop in this one.
        if len(self.regions) == loop.depth and not (kind == "break" and loop.rounds):
            return
        known = self.masked_loops if kind == "break" else self.continued_loops
        if loop.start not in known:
            known.add(loop.start)
            raise Again

    def _leave(self, kind: str) -> str:
        """How all lanes of the current region leave it."""
        self._mark(kind)
        depth = len(self.regions)
        while self.regions[depth - 1].through:
            depth -= 1
        return self._leave_from(depth, kind, "")

    def _leave_from(self, depth: int, kind: str, said: str) -> str:
        """How lanes leave the innermost of `depth` regions, all of them at once.

        Args:
            said: what takes back that ``fr_leave`` is set.
        """
        region = self.regions[depth - 1]
        if kind == "return":
            if region.owner is None or not self._matters_after(region.owner):
                return "return;"
        elif depth == self.loops[-1].depth:
            loop = self.loops[-1]
            if not loop.rounds:
                return f"{{ {said}{kind}; }}" if said else f"{kind};"
            if kind == "continue":
                region.leaving.add("")
                return f"{{ {said}goto {region.end}; }}"
        region.leaving.add(kind)
        self.leaves = True
        return f"{{ fr_leave = {_CODES[kind]}; goto {region.end}; }}"

    def _stay(self, leaving: set[str]) -> str:
        """Behind a label: those that leave go on, the others are the current region's lanes."""
        kinds = sorted(leaving - {""}, key=lambda kind: _CODES[kind])
        if not kinds:
            return ""
        mask, vote = self.regions[-1].mask, f"fr_s{self._number()}"
        depth = len(self.regions)
        while self.regions[depth - 1].through:
            depth -= 1
        ways: list[str] = []
        for kind in kinds:
            self._mark(kind)
            ways.append(self._leave_from(depth, kind, "fr_leave = 0; "))
        go = ways.pop()
        for kind, way in zip(reversed(kinds[:-1]), reversed(ways), strict=True):
            go = f"if (fr_leave == {_CODES[kind]}) {way} else {go}"
        return (
            f" if (::fr::warp::branch {vote}({mask}, fr_leave != 0); {vote}.taken) {{ {go} }} "
            f"else {mask} = {vote}.no;"
        )

    def _unseen(self, s: Node) -> None:
        """A statement without operations, or a switch, which lanes may leave anywhere: they say so
        and vote."""
        mask = self.regions[-1].mask
        region = _Region(mask, s, f"fr_e{self._number()}")
        self._insert(self._start(s), " { ")
        if self._operates(s):
            self._insert(self._start(s), f"::fr::warp::meet({mask}); ")
        self._name_lanes(
            s.child_by_field_name("condition") if s.type == "switch_statement" else None
        )
        for jump in self._outgoing(s):
            kind = _JUMPS[jump.type]
            self.regions.append(region)
            try:
                self._mark(kind)
            finally:
                self.regions.pop()
            region.leaving.add(kind)
            self.leaves = True
            there = f"{{ fr_leave = {_CODES[kind]}; goto {region.end}; }}"
            self.edits.append((jump.start_byte, jump.end_byte, there))
        label = f" {region.end}: ;" if region.leaving else ""
        self._insert(s.end_byte, f"{label}{self._stay(region.leaving)} }}")

    # -- control flow ----------------------------------------------------------------------------

    def _if(self, s: Node) -> None:
        condition, yes = s.child_by_field_name("condition"), s.child_by_field_name("consequence")
        no = s.child_by_field_name("alternative")
        if condition is None or yes is None:
            raise NotSplittable("an if is not understood")
        inner = condition.child_by_field_name("value")
        if inner is None or inner.type == "declaration":
            raise NotSplittable("an if declares a variable in its condition")
        if condition.child_by_field_name("initializer") is not None:
            raise NotSplittable("an if declares a variable in its condition")
        otherwise = no.named_children[-1] if no is not None else None
        same = any(c.type == "constexpr" for c in s.children) or self.uniformity.of(condition)
        if same:
            self._name_lanes(condition)
            self._nested(yes)
            if otherwise is not None:
                self._nested(otherwise)
            return
        mask, vote = self.regions[-1].mask, f"fr_s{self._number()}"
        going = self._outgoing(yes) if self._outgoing(s) else []
        staying = self._outgoing(otherwise) if otherwise is not None and self._outgoing(s) else []
        last = branch_statements(yes)[-1] if branch_statements(yes) else None
        all_go = len(going) == 1 and going[0] == last and not staying
        label = f"fr_e{self._number()}" if (going or staying) and not all_go else ""
        if label:
            self._insert(s.start_byte, "{ ")
        self._insert(condition.start_byte + 1, f"::fr::warp::branch {vote}({mask}, (")
        self._name_lanes(condition)
        self._insert(condition.end_byte - 1, f") ? true : false); {vote}.taken")
        one = _Region(f"{vote}.yes", s, label, through=all_go)
        self._nested(yes, one)
        if all_go:
            if otherwise is None:
                self._insert(s.end_byte, f" else {mask} = {vote}.no;")
            else:
                self._insert(otherwise.start_byte, f"{{ {mask} = {vote}.no; ")
                self._nested(otherwise)
                self._insert(otherwise.end_byte, " }")
            return
        other = _Region(f"{vote}.no", s, label)
        if otherwise is not None:
            self._nested(otherwise, other)
        if label:
            stay = self._stay(one.leaving | other.leaving)
            self._insert(s.end_byte, f" {label}: ;{stay} }}")

    def _loop(self, s: Node) -> None:
        body, condition, start, update = loop_parts(s)
        self.scopes.append({})
        key = s.start_byte
        # The analysis must have seen the loop's variables before its condition is judged.
        where = len(self.edits)
        if start is not None and start.type == "declaration":
            self._declaration(start)
        elif start is not None:
            self._name_lanes(start)
        begun, self.edits[where:] = self.edits[where:], []
        same = self.uniformity.of(condition)
        own, rounds = not same or key in self.masked_loops, key in self.continued_loops
        n = self._number()
        region = _Region(f"fr_l{n}", s, f"fr_e{n}")
        if own:
            self._insert(
                self._start(s), f" {{ ::fr::warp::mask fr_l{n} = {self.regions[-1].mask}; "
            )
            self.regions.append(region)
        self.edits += begun
        bracket = s.type == "do_statement"  # which is a part of the condition there
        if not same and condition is not None:
            self._insert(condition.start_byte + bracket, f"::fr::warp::stays(fr_l{n}, (")
        self._name_lanes(condition)
        if not same and condition is not None:
            self._insert(condition.end_byte - bracket, ") ? true : false)")
        self._name_lanes(update)
        self.loops.append(_Loop(key, len(self.regions) + rounds, rounds))
        if rounds:
            r = self._number()
            part = _Region(f"fr_r{r}", body, f"fr_e{r}")
            self._insert(
                body.start_byte, f"{{ ::fr::warp::mask fr_r{r} = {self.regions[-1].mask}; "
            )
            self._nested(body, part)
            self.loops[-1] = _Loop(key, len(self.regions), False)
            label = f" {part.end}: ;" if part.leaving else ""
            self._insert(body.end_byte, f"{label}{self._stay(part.leaving)} }}")
        else:
            self._nested(body)
        self.loops.pop()
        if own:
            self.regions.pop()
            label = f" {region.end}: ;" if region.leaving else ""
            self._insert(s.end_byte, f"{label}{self._stay(region.leaving)} }}")
        self.scopes.pop()

    def _start(self, s: Node) -> int:
        """Where something may stand before a statement: before the pragmas that belong to it."""
        at, before = s.start_byte, s.prev_sibling
        while before is not None and before.type in ("preproc_call", "comment"):
            before = before.prev_sibling
            at = before.end_byte if before is not None else at
        return at
