"""Loops: unrolled where all is known and little, else one round stands for all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from tree_sitter import Node

from ..cpp import NotSplittable
from ..loops.statements import Loop as Parts
from ..loops.statements import branch_statements, expression, loop_parts
from ..loops.statements import jumps as jumps_of
from ..syntax import (
    call_arguments,
    called,
    callee,
    declarators,
    declared_name,
    field,
    part,
    unbracketed,
    walk,
)
from . import terms
from .arithmetic import moved
from .functions import parameters_of
from .kinds import LONG
from .machine import Jump
from .model import Loop, Times
from .shapes import Multiplied
from .statements import Statements
from .terms import Term
from .values import (
    Address,
    Function,
    Opaque,
    Place,
    Pointer,
    Scalar,
    Value,
    as_condition,
    as_number,
    fresh_like,
    number,
)

_MOST_UNROLLED = 64


class Loops(Statements):
    """A machine that runs loops.

    Attributes:
        waiting: the header's functions that wait at barriers.
    """

    waiting: frozenset[str]

    def _run_for_statement(self, node: Node) -> list[Jump]:
        return self._run_loop(node)

    def _run_while_statement(self, node: Node) -> list[Jump]:
        return self._run_loop(node)

    def _run_do_statement(self, node: Node) -> list[Jump]:
        return self._run_loop(node)

    def _run_loop(self, node: Node) -> list[Jump]:
        try:
            parts = loop_parts(node)
        except NotSplittable as why:
            self.refuse(node, str(why))
            return []
        before = self.path, self.branches
        with self.scope():
            if parts.start is not None:
                if parts.start.type == "declaration":
                    self.run(parts.start)
                else:
                    self.evaluate(parts.start)
            stays = not any(True for _ in jumps_of(parts.body))
            if node.type == "do_statement" and parts.condition is not None and stays:
                c = self.tree.text(unbracketed(parts.condition))
                if c in ("0", "false"):
                    return self.run_all(branch_statements(parts.body))
            jumps = self._rounds(node, parts)
        self.path, self.branches = before
        return jumps

    def _rounds(self, node: Node, parts: Parts) -> list[Jump]:
        changes = self._changes(parts)
        steps = self._steps(node, parts, changes)
        carried = any(
            isinstance(self.cells.get(cell), (Scalar, Pointer))
            for cell in changes
            if cell not in steps
        )
        leaves = any(jump.type != "continue_statement" for jump in jumps_of(parts.body))
        plain = node.type != "do_statement" and not leaves
        if plain and (carried or not steps) and self._unrolled(parts):
            return []
        if "barrier" in self.tree.text(node) or called(self.tree, node) & self.waiting or any(
            isinstance(self.look_up(name), Function) for name in called(self.tree, node)
        ):  # fmt: skip
            return self._with_barriers(node, parts, changes, steps)
        return self._one_round(node, parts, changes, steps, None)[0]

    # -- what a loop changes -----------------------------------------------------------------------

    def _changes(self, parts: Parts) -> Counter[int]:
        """The variables that a loop may change, and at how many places."""
        changes: Counter[int] = Counter()
        nodes = [n for n in (parts.condition, parts.update, parts.body) if n is not None]
        seen: set[str] = set()
        while nodes:
            for node in walk(nodes.pop()):
                if node.type == "identifier" and self.tree.text(node) not in seen:
                    named = self.look_up(self.tree.text(node))
                    if isinstance(named, Function) and named.tree is self.tree:
                        seen.add(self.tree.text(node))
                        nodes.append(named.node)
                for name in self._changed_names(node):
                    named = self.look_up(name)
                    if isinstance(named, Place):
                        changes[named.cell] += 1
                        held = self.cells.get(named.cell)
                        if isinstance(held, Address):
                            changes[held.place.cell] += 2
                    for scope in self.scopes if seen else ():  # a lambda's names are of its place
                        other = scope.get(name)
                        if isinstance(other, Place) and other is not named:
                            changes[other.cell] += 2
        return changes

    def _changed_names(self, node: Node) -> Iterator[str]:
        if node.type == "assignment_expression":
            yield from self._base_name(part(node, "left"))
        elif node.type == "init_declarator" and (
            part(node, "declarator").type == "reference_declarator"
        ):
            yield from self._base_name(part(node, "value"))
        elif node.type == "update_expression" or (
            node.type == "pointer_expression" and node.children[0].type == "&"
        ):
            yield from self._base_name(part(node, "argument"))
        elif node.type == "call_expression":
            function = part(node, "function")
            name = callee(self.tree, node)
            if function.type == "field_expression":
                yield from self._base_name(part(function, "argument"))
            named = self.look_up(name)
            candidates = [named] if isinstance(named, Function) else self.functions.get(name, [])
            for function_ in candidates:
                yield from self._passed_names(function_, node)

    def _passed_names(self, function: Function, call: Node) -> Iterator[str]:
        """The variables that a call may change: what references and addresses lead to."""
        parameters = parameters_of(function)
        for i, argument in enumerate(call_arguments(call)):
            written = i >= len(parameters) or (
                parameters[i].reference and not parameters[i].is_const
            )  # fmt: skip
            for name in self._base_name(argument):
                named = self.look_up(name)
                held = self.cells.get(named.cell) if isinstance(named, Place) else None
                if written or isinstance(held, Address):
                    yield name

    def _base_name(self, node: Node) -> Iterator[str]:
        """The variable of a place that is written; none where a pointer leads to memory."""
        at: Node | None = node
        led = False
        while at is not None and at.type != "identifier":
            led = led or at.type == "subscript_expression" or (
                at.type == "pointer_expression" and at.children[0].type == "*"
            )  # fmt: skip
            if at.type == "parenthesized_expression":
                at = at.named_children[0] if at.named_children else None
            elif at.type == "call_expression":
                at = part(at, "function")
            else:
                at = field(at, "argument") or field(at, "left")
        if at is not None:
            named = self.look_up(self.tree.text(at))
            held = self.cells.get(named.cell) if isinstance(named, Place) else None
            if not (led and isinstance(held, Pointer)):
                yield self.tree.text(at)

    def _steps(self, node: Node, parts: Parts, changes: Counter[int]) -> dict[int, Term]:
        """The variables that each round changes by as much, and by how much."""
        updates: list[Node] = []
        if node.type == "for_statement" and parts.update is not None:
            updates += _between_commas(parts.update)
        if all(jump.type != "continue_statement" for jump in jumps_of(parts.body)):
            updates += filter(None, map(expression, branch_statements(parts.body)))
        own = {
            self.tree.text(declared_name(d))
            for node in walk(parts.body) if node.type == "declaration"
            for d in declarators(node)
        }  # fmt: skip
        steps: dict[int, Term] = {}
        for update in updates:
            found = self._step(update, changes)
            if found is not None and own.isdisjoint(self._changed_names(update)):
                steps[found[0]] = found[1]
        return steps

    def _step(self, update: Node, changes: Counter[int]) -> tuple[int, Term] | None:
        if update.type == "update_expression":
            target, sign, by = part(update, "argument"), 1, None
            sign = -1 if any(c.type == "--" for c in update.children) else 1
        elif update.type == "assignment_expression":
            target, by = part(update, "left"), part(update, "right")
            op = update.children[1].type
            if op == "=":  # k = k + s
                inner = unbracketed(by)
                if inner.type != "binary_expression" or inner.children[1].type not in ("+", "-"):
                    return None
                left = part(inner, "left")
                if self.tree.text(left) != self.tree.text(target):
                    return None
                op, by = inner.children[1].type + "=", part(inner, "right")
            if op not in ("+=", "-="):
                return None
            sign = -1 if op == "-=" else 1
        else:
            return None
        named = self.look_up(self.tree.text(target)) if target.type == "identifier" else None
        if not isinstance(named, Place) or changes[named.cell] != 1:
            return None
        held = self.cells[named.cell]
        if not isinstance(held, (Scalar, Pointer)) or (
            isinstance(held, Scalar) and held.term.condition
        ):
            return None
        step = number(1).term if by is None else self._invariant(by, changes)
        return None if step is None else (named.cell, terms.mul(terms.const(sign), step))

    def _invariant(self, node: Node, changes: Counter[int]) -> Term | None:
        """The value of an expression that no round changes."""
        for inner in walk(node):
            if inner.type in ("subscript_expression", "assignment_expression",
                              "update_expression", "pointer_expression"):  # fmt: skip
                return None
            if inner.type == "identifier":
                named = self.look_up(self.tree.text(inner))
                if isinstance(named, Place) and named.cell in changes:
                    return None
        value = self.evaluate(node)
        return as_number(value) if isinstance(value, Scalar) else None

    # -- rounds ------------------------------------------------------------------------------------

    def _unrolled(self, parts: Parts) -> bool:
        """Run a loop round by round, if its rounds are known; whether they are."""
        before = self.snapshot()
        found = dict(self.accesses), dict(self.obligations), dict(self.unsupported)
        jumps_before = self.depth
        for _ in range(_MOST_UNROLLED + 1):
            c = terms.TRUE
            if parts.condition is not None:
                c = as_condition(self.evaluate(parts.condition))
            if c is terms.FALSE:
                return True
            if c is not terms.TRUE:
                break
            self.run_all(branch_statements(parts.body))
            if parts.update is not None:
                self.evaluate(parts.update)
        self.restore(before)
        self.accesses, self.obligations, self.unsupported = found
        self.depth = jumps_before
        return False

    def _with_barriers(
        self, node: Node, parts: Parts, changes: Counter[int], steps: dict[int, Term]
    ) -> list[Jump]:
        """Run a loop whose rounds pass barriers: first to count those of one round."""
        before = self.snapshot()
        found = dict(self.accesses), dict(self.obligations), dict(self.unsupported)
        self._one_round(node, parts, changes, steps, None)
        passed = [terms.sub(b, a) for a, b in zip(before.times, self._end, strict=True)]
        self.restore(before)
        self.accesses, self.obligations, self.unsupported = found
        jumps, rounds = self._one_round(node, parts, changes, steps, passed)
        if any(p is not terms.const(0) for p in passed):
            if rounds is None or not all(map(self.is_same_each_round, passed)):
                why = "barriers in a loop whose rounds cannot be counted"
                self.refuse(node, why, hides=False)
                rounds = terms.const(0)
            self.times = Times(
                *(terms.add(t, terms.mul(rounds, p))
                  for t, p in zip(before.times, passed, strict=True))
            )  # fmt: skip
        return jumps

    def is_same_each_round(self, passed: Term) -> bool:
        """Whether as many barriers are passed in each round, by all threads of the group."""
        return self.is_uniform(passed) and all(leaf.op == "symbol" for leaf in passed.leaves)

    def _one_round(
        self, node: Node, parts: Parts, changes: Counter[int], steps: dict[int, Term],
        passed: list[Term] | None,
    ) -> tuple[list[Jump], Term | None]:  # fmt: skip
        """Run any one round of a loop; what it may leave to, and how many rounds there are."""
        counter = terms.counter()
        before = self.snapshot()
        loops = self.loops
        for cell in changes:
            if cell in self.cells:
                self.cells[cell] = self._in_round(before.cells[cell], steps.get(cell), counter)
        in_round = {cell: self.cells[cell] for cell in changes if cell in self.cells}
        # The condition is evaluated before it is known to hold, once more than there are rounds.
        holds = terms.TRUE
        is_do = node.type == "do_statement"
        self.loops = (*loops, Loop(counter, terms.TRUE))
        if parts.condition is not None and not is_do:
            holds = as_condition(self.evaluate(parts.condition))
        rounds = None if is_do else _rounds_of(holds, counter)
        self.ends = self.ends and rounds is not None
        if self.is_uniform(terms.replaced(holds, {counter: terms.const(0)})) and all(
            self.is_uniform(term) for term in steps.values()
        ):
            self.uniform.add(counter)
        leaves = any(jump.type != "continue_statement" for jump in jumps_of(parts.body))
        self.loops = (*loops, Loop(counter, holds))
        self.assume(holds)
        if rounds is None or leaves:
            self.assume(terms.unknown("whether the loop still runs", None))
        if passed is not None:
            self.times = Times(
                *(terms.add(t, terms.mul(counter, p))
                  for t, p in zip(before.times, passed, strict=True))
            )  # fmt: skip
        start = self.times
        jumps = self.run_all(branch_statements(parts.body))
        for cell, step in steps.items():
            self._oblige_step(node, before.cells[cell], step, counter)
        self._run_updates(parts, changes, before.cells, counter)
        self._end = Times(*(terms.add(b, terms.sub(e, s)) for b, s, e in
                            zip(before.times, start, self.times, strict=True)))  # fmt: skip
        carried = {c: (v, self.cells[c]) for c, v in in_round.items() if c not in steps}
        multiplied = Multiplied(carried, before.cells, counter)
        self.loops = loops
        self.restore(before)
        whole = None if leaves else rounds
        for cell in changes:
            if cell in self.cells:
                held = before.cells[cell]
                known = None
                if whole is not None:
                    known = multiplied.behind(cell, held, counter, whole)
                self.cells[cell] = known or self._behind(held, steps.get(cell), whole)
        returned = [jump for jump in jumps if jump.kind == "return"]
        if not returned:
            return [], whole
        gone = terms.unknown("whether a loop returns", None)
        values = {jump.value for jump in returned}
        value = values.pop() if len(values) == 1 else Opaque()
        if value is not None and value != Opaque():
            value = fresh_like(value, "what a loop returns")
        return [Jump("return", (*before.path, gone), value)], whole

    def _run_updates(
        self, parts: Parts, changes: Counter[int], first: Mapping[int, Value], counter: Term
    ) -> None:
        """Run what a loop's head does behind a round: of steps, those behind find the result.

        Args:
            first: what variables hold in front of the loop.
        """
        for update in _between_commas(parts.update) if parts.update is not None else ():
            stepped = self._step(update, changes)
            if stepped is None:
                self.evaluate(update)
                continue
            cell, step = stepped
            behind = terms.add(counter, terms.const(1))
            self.cells[cell] = self._in_round(first[cell], step, behind)

    def _in_round(self, held: Value, step: Term | None, counter: Term) -> Value:
        """What a variable holds in a round."""
        if step is None:
            return fresh_like(held, "what a loop carries along")
        by = terms.mul(step, counter)
        if isinstance(held, Pointer):
            return moved(self, held, Scalar(by, LONG))
        if isinstance(held, Scalar):
            total = terms.add(as_number(held), by)
            return Scalar(terms.wrap(total, held.kind) if self.wraps else total, held.kind)
        return held

    def _behind(self, held: Value, step: Term | None, rounds: Term | None) -> Value:
        """What a variable holds behind the loop."""
        if step is None or rounds is None:
            return fresh_like(held, "what a loop has carried along")
        return self._in_round(held, step, rounds)

    def _oblige_step(self, node: Node, held: Value, step: Term, counter: Term) -> None:
        """A counter must not wrap: it would begin anew."""
        if isinstance(held, Scalar) and not self.wraps:
            behind = terms.add(counter, terms.const(1))
            next_ = terms.add(as_number(held), terms.mul(step, behind))
            self.oblige(node, "overflow" if held.kind.signed else "wrap", next_, held.kind)


def _between_commas(node: Node) -> Iterator[Node]:
    if node.type == "comma_expression":
        yield from _between_commas(part(node, "left"))
        yield from _between_commas(part(node, "right"))
    else:
        yield node


def _rounds_of(holds: Term, counter: Term) -> Term | None:
    """How many rounds a condition allows, from how it falls with each round; None where it may
    also rise."""
    if holds.op == "not" and holds.args[0].op == "lt":  # a <= b, as !(b < a)
        b, a = holds.args[0].args
        left = terms.add(terms.sub(b, a), terms.const(1))
    elif holds.op == "lt":
        left = terms.sub(holds.args[1], holds.args[0])
    else:
        return None
    first = terms.replaced(left, {counter: terms.const(0)})
    step = terms.sub(first, terms.replaced(left, {counter: terms.const(1)}))
    if counter in step.leaves or step.low is None or step.low < 1:
        return None
    if terms.sub(left, terms.sub(first, terms.mul(step, counter))) is not terms.const(0):
        return None
    if step is terms.const(1) and first.low is not None and first.low >= 0:
        return first
    up = terms.sub(terms.add(first, step), terms.const(1))
    return terms.ite(terms.lt(terms.const(0), first), terms.fdiv(up, step), terms.const(0))
