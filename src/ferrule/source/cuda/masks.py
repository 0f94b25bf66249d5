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

Where all lanes of a mask go one way (`source.loops.uniform`) nothing is written at all: such an
``if`` or loop costs what it costs in CUDA written by hand. Lanes that leave by ``return``,
``break`` or ``continue`` are taken out of the masks that they leave. To leave several at once, a
lane says so in ``fr_leave`` and goes to the end of each in turn, where the lanes of the mask around
it vote who stays.

Each vote is one of all lanes of a mask, at one place, which all of them come to. What cannot be
written so asks the hardware which lanes are with it: operations in lambdas, in a ``switch``, in
header functions that cannot be put in place of their calls (before all of these, the lanes of the
mask are brought together), and in bodies that are not understood at all (`NotSplittable`).
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress

from tree_sitter import Node

from ..cpp import NotSplittable, Prepared
from ..loops.analysis import analyse
from ..loops.body import Body, Scopes, Unit, read
from ..loops.inline import inline
from ..loops.plan import Plan, planned, require
from ..loops.statements import LOOPS, branch_statements, loop_parts
from ..loops.uniform import Uniformity
from ..syntax import (
    OTHER_CODE,
    Edit,
    declarators,
    field,
    function_definitions,
    kinds,
    part,
    replaced,
)
from .simd_operations import JUMPS, MASKED, SimdOperations

_CODES = {"return": 1, "break": 2, "continue": 3}
_JUMPING = ("goto_statement", "labeled_statement", "co_return_statement")
_SHORT = {"&&": "yes", "and": "yes", "||": "no", "or": "no"}  # who evaluates the right side


@dataclasses.dataclass
class _Region:
    """The code that the lanes of one mask run.

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
    leaving: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass
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
        text = p.expanded()
        with suppress(NotSplittable):  # else the functions ask the hardware
            text = inline(p, text)
        body = read(p, text, unit)
        return planned(lambda plan: Masks(body, plan).run())
    except (NotSplittable, RecursionError):
        return None


class Masks(SimdOperations):
    """Writes masks into one body."""

    def __init__(self, body: Body, plan: Plan) -> None:
        super().__init__(body)
        self.plan = plan

    def run(self) -> tuple[str, str] | None:
        """Declarations, and the body.

        Raises:
            NotSplittable: the control flow does not allow it.
            NotPlanned: a loop turned out to be left by some lanes before others.
        """
        if not self.operations:
            return None
        self._refuse()
        self.scopes = Scopes(self.body, analyse(self.body, self.plan))
        self.uniformity = Uniformity(self.scopes)
        self.edits: list[Edit] = []
        self.regions = [_Region("fr_m0")]
        self.loops: list[_Loop] = []
        self.count = self.choices = 0
        self.leaves = False
        self._block(self.tree.block.named_children)
        declared = "::fr::warp::mask fr_m0 = ::fr::warp::all(fr_g, fr_i);"
        if self.choices:
            names = ", ".join(f"fr_b{n + 1}" for n in range(self.choices))
            declared += f" ::fr::warp::branch {names};"
        if self.leaves:
            declared += " int fr_leave = 0;"
        return declared, self.tree.edited(self.edits)

    def _refuse(self) -> None:
        names = {*self.body.functions, *(name for name, _ in function_definitions(self.tree))}
        if names & MASKED:
            raise NotSplittable("the header has operations of its own")
        if any(kinds(self.tree.block, *_JUMPING)):
            raise NotSplittable("the body jumps with goto")

    def _insert(self, position: int, text: str) -> None:
        self.edits.append((position, position, text))

    def _number(self) -> int:
        self.count += 1
        return self.count

    # -- statements ------------------------------------------------------------------------------

    def _block(self, statements: list[Node]) -> None:
        with self.scopes.inner():
            for s in statements:
                self._statement(s)

    def _nested(self, branch: Node | None, region: _Region | None = None) -> None:
        """A branch or a loop's body, for the lanes of a region of its own."""
        around = self.regions
        self.regions = around if region is None else [*around, region]
        self._block(branch_statements(branch) if branch is not None else [])
        self.regions = around

    def _statement(self, s: Node) -> None:
        kind = s.type
        if kind == "declaration":
            self._declaration(s)
        elif kind in JUMPS:
            jump = self._leave(JUMPS[kind])
            if jump != f"{JUMPS[kind]};":
                self.edits.append(replaced(s, jump))
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
            self._opaque_statement(s)
        elif kind in LOOPS:
            with self.scopes.inner():
                self._loop(s)
        else:
            raise NotSplittable(f"a {kind.replace('_', ' ')} holds an operation of a simdgroup")

    def _declaration(self, s: Node) -> None:
        self._name_lanes(s)
        for d in declarators(s):
            if d.start_byte not in self.scopes.variables:
                # Of one in a statement that the analysis took as a whole nothing is known.
                variable = self.body.variable(s, d)
                self.scopes.variables[variable.key] = dataclasses.replace(
                    variable,
                    uniform="constexpr" in variable.type.split(),
                    readonly=False,
                    pointer=False,
                    written=True,
                )
            self.scopes.enter(s, d)

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
            for side, lanes in sides:
                self._name_lanes(side, f"{vote}.{lanes}")
            return
        meets = self._leads_to_operation(node)
        if meets:
            self._insert(node.start_byte, f"(::fr::warp::meet({mask}), ")
        elif self._is_operation(node):
            arguments = part(node, "arguments")
            comma = ", " if arguments.named_child_count else ""
            self._insert(arguments.start_byte + 1, mask + comma)
        for child in node.children:
            self._name_lanes(child, mask)
        if meets:
            self._insert(node.end_byte, ")")

    def _choice(self, node: Node) -> tuple[Node | None, list[tuple[Node, str]]]:
        """The operand that decides which lanes evaluate the others, where some of these operate."""
        fields: list[tuple[str, str]] = []
        if node.type == "binary_expression" and node.children[1].type in _SHORT:
            fields = [("right", _SHORT[node.children[1].type])]
        elif node.type == "conditional_expression":
            fields = [("consequence", "yes"), ("alternative", "no")]
        sides = [(side, lanes) for name, lanes in fields if (side := field(node, name)) is not None]
        if not any(self._operates(side) for side, _ in sides):
            return None, []
        return field(node, "condition") or part(node, "left"), sides

    # -- leaving ---------------------------------------------------------------------------------

    def _mark(self, kind: str, depth: int) -> None:
        """Remember that some lanes leave a loop, or one of its rounds, before others.

        Args:
            depth: of how many regions they leave the innermost.
        """
        if kind == "return":
            return
        loop = self.loops[-1]
        # Those that go on to the next round do not see who leaves the loop in this one.
        if depth == loop.depth and not (kind == "break" and loop.rounds):
            return
        require(self.plan, kind, loop.start)

    def _leave(self, kind: str, reset: str = "") -> str:
        """The jump by which all lanes of the current region leave it.

        Args:
            reset: what takes back that ``fr_leave`` is set.
        """
        depth = len(self.regions)
        self._mark(kind, depth)
        while self.regions[depth - 1].through:  # all lanes leave it in any case
            depth -= 1
        region = self.regions[depth - 1]
        if kind == "return":
            if region.owner is None or not self._matters_after(region.owner):
                return "return;"
        elif depth == self.loops[-1].depth:
            loop = self.loops[-1]
            if not loop.rounds:
                return f"{{ {reset}{kind}; }}" if reset else f"{kind};"
            if kind == "continue":
                region.leaving.add("")
                return f"{{ {reset}goto {region.end}; }}"
        return self._leave_through(region, kind)

    def _stay(self, leaving: set[str]) -> str:
        """Behind a label: those that leave go on, the others are the current region's lanes."""
        kinds = sorted(leaving - {""}, key=lambda kind: _CODES[kind])
        if not kinds:
            return ""
        mask, vote = self.regions[-1].mask, f"fr_s{self._number()}"
        *jumps, go = [self._leave(kind, "fr_leave = 0; ") for kind in kinds]
        for kind, jump in zip(reversed(kinds[:-1]), reversed(jumps), strict=True):
            go = f"if (fr_leave == {_CODES[kind]}) {jump} else {go}"
        return (
            f" if (::fr::warp::branch {vote}({mask}, fr_leave != 0); {vote}.taken) {{ {go} }} "
            f"else {mask} = {vote}.no;"
        )

    def _close(self, region: _Region, position: int) -> None:
        """Write the end of the block of a region that is done with."""
        label = f" {region.end}: ;" if region.leaving else ""
        self._insert(position, f"{label}{self._stay(region.leaving)} }}")

    def _leave_through(self, region: _Region, kind: str) -> str:
        """The jump to a region's end of lanes that leave more than it."""
        region.leaving.add(kind)
        self.leaves = True
        return f"{{ fr_leave = {_CODES[kind]}; goto {region.end}; }}"

    def _opaque_statement(self, s: Node) -> None:
        """A statement without operations, or a switch, which lanes may leave anywhere: they say so
        and vote."""
        mask = self.regions[-1].mask
        region = _Region(mask, s, f"fr_e{self._number()}")
        self._insert(self._start(s), " { ")
        if self._operates(s):
            self._insert(self._start(s), f"::fr::warp::meet({mask}); ")
        if s.type == "switch_statement":
            self._name_lanes(field(s, "condition"))
        for jump in self._outgoing(s):
            kind = JUMPS[jump.type]
            self._mark(kind, len(self.regions) + 1)
            self.edits.append(replaced(jump, self._leave_through(region, kind)))
        self._close(region, s.end_byte)

    # -- control flow ----------------------------------------------------------------------------

    def _if(self, s: Node) -> None:
        condition, yes, no = part(s, "condition"), part(s, "consequence"), field(s, "alternative")
        value = field(condition, "value")
        if value is None or value.type == "declaration" or field(condition, "initializer"):
            raise NotSplittable("an if declares a variable in its condition")
        otherwise = no.named_children[-1] if no is not None else None
        uniform = any(c.type == "constexpr" for c in s.children) or self.uniformity.of(condition)
        if uniform:
            self._name_lanes(condition)
            self._nested(yes)
            self._nested(otherwise)
            return
        mask, vote = self.regions[-1].mask, f"fr_s{self._number()}"
        leave = self._outgoing(s)
        yes_jumps = self._outgoing(yes) if leave else []
        no_jumps = self._outgoing(otherwise) if leave and otherwise is not None else []
        last = branch_statements(yes)[-1:]
        all_leave = bool(last) and yes_jumps == last and not no_jumps
        label = f"fr_e{self._number()}" if (yes_jumps or no_jumps) and not all_leave else ""
        if label:
            self._insert(s.start_byte, "{ ")
        self._insert(condition.start_byte + 1, f"::fr::warp::branch {vote}({mask}, (")
        self._name_lanes(condition)
        self._insert(condition.end_byte - 1, f") ? true : false); {vote}.taken")
        yes_region = _Region(f"{vote}.yes", s, label, through=all_leave)
        self._nested(yes, yes_region)
        if all_leave:
            if otherwise is None:
                self._insert(s.end_byte, f" else {mask} = {vote}.no;")
            else:
                self._insert(otherwise.start_byte, f"{{ {mask} = {vote}.no; ")
                self._nested(otherwise)
                self._insert(otherwise.end_byte, " }")
            return
        no_region = _Region(f"{vote}.no", s, label)
        self._nested(otherwise, no_region)
        if label:
            stay = self._stay(yes_region.leaving | no_region.leaving)
            self._insert(s.end_byte, f" {label}: ;{stay} }}")

    def _loop(self, s: Node) -> None:
        body, condition, start, update = loop_parts(s)
        key = s.start_byte
        # The analysis must have seen the loop's variables before its condition is judged.
        first_edit = len(self.edits)
        if start is not None and start.type == "declaration":
            self._declaration(start)
        elif start is not None:
            self._name_lanes(start)
        start_edits, self.edits[first_edit:] = self.edits[first_edit:], []
        uniform = self.uniformity.of(condition)
        masked_loop = not uniform or ("break", key) in self.plan
        rounds = ("continue", key) in self.plan
        n = self._number()
        region = _Region(f"fr_l{n}", s, f"fr_e{n}")
        if masked_loop:
            begin = f" {{ ::fr::warp::mask fr_l{n} = {self.regions[-1].mask}; "
            self._insert(self._start(s), begin)
            self.regions.append(region)
        self.edits += start_edits
        bracket = s.type == "do_statement"  # which is a part of the condition there
        if not uniform and condition is not None:
            self._insert(condition.start_byte + bracket, f"::fr::warp::stays(fr_l{n}, (")
        self._name_lanes(condition)
        if not uniform and condition is not None:
            self._insert(condition.end_byte - bracket, ") ? true : false)")
        self._name_lanes(update)
        self.loops.append(_Loop(key, len(self.regions) + rounds, rounds))
        if rounds:
            r = self._number()
            round_region = _Region(f"fr_r{r}", body, f"fr_e{r}")
            begin = f"{{ ::fr::warp::mask fr_r{r} = {self.regions[-1].mask}; "
            self._insert(body.start_byte, begin)
            self._nested(body, round_region)
            self.loops[-1] = _Loop(key, len(self.regions), False)
            self._close(round_region, body.end_byte)
        else:
            self._nested(body)
        self.loops.pop()
        if masked_loop:
            self.regions.pop()
            self._close(region, s.end_byte)

    def _start(self, s: Node) -> int:
        """Where something may stand before a statement: before the pragmas that belong to it."""
        position, before = s.start_byte, s.prev_sibling
        while before is not None and before.type in ("preproc_call", "comment"):
            before = before.prev_sibling
            position = before.end_byte if before is not None else position
        return position
