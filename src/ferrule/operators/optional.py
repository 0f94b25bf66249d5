"""Ops some of whose outputs are only there in some calls.

Such an op is one op for each set of outputs that calls may have. Each of these is an ordinary op,
with an operator of its own in torch, and nodes of its own in MLX: their number of outputs is fixed.
Which one carries out a call is known before any size is, and is a constant of a graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import KernelError
from ..hosts import imported
from ..rules.argument import shown_truths
from ..rules.rule import Rule
from .family import settled
from .launch import number
from .op import Op

MOST_CONDITIONS = 4  # each doubles the ops that there are
MOST_KNOWN = 64  # calls that an op remembers the outputs of
_PLAIN = frozenset((bool, int))


def by_presence(name: str, rule: Rule, declared: Callable[[Rule], Op]) -> Op:
    """An op of a rule, whose outputs may have conditions.

    Args:
        name: the op's.
        rule: its rule.
        declared: the op of a rule without conditions.

    Raises:
        KernelError: there are more than `MOST_CONDITIONS` of them.
    """
    conditions = rule.presences
    if not conditions:
        return declared(rule)
    if len(conditions) > MOST_CONDITIONS:
        shown = ", ".join(map(shown_truths, conditions))
        raise KernelError(
            f"[op] the outputs of op {name!r} have {len(conditions)} conditions ({shown}); at most "
            f"{MOST_CONDITIONS} are possible."
        )
    members = {
        holding: declared(rule.settled(dict(zip(conditions, holding, strict=True))))
        for holding in itertools.product((True, False), repeat=len(conditions))
    }
    return OptionalOp(name, rule, members)


class OptionalOp(Op):
    """An op whose outputs have conditions: a call is one of the member that has its outputs.

    Its implementations and rules are those of the member with all outputs.
    """

    def __init__(self, name: str, rule: Rule, members: Mapping[tuple[bool, ...], Op]) -> None:
        full = next(iter(members.values()))
        super().__init__(name, rule, full.implementations, *full._declared)
        self._members = _Members(rule, members)
        self._member_of = self._members.name
        self._asked = self._members.asked
        self.rules = full.rules
        for member in self.members:
            member.counts = self.counts

    @property
    def members(self) -> tuple[Op, ...]:
        """The ops that carry out calls, the one with all outputs first."""
        return tuple(self._members.by_conditions.values())

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Run the op; an output that the call does not have is None. As `Op.__call__` else."""
        values = args if not named and len(args) == self._count else self.ordered(args, named)
        member: Op = self._member(values)
        result = member(*values)
        outputs = member.rule.declared
        if len(member.rule.outputs) == len(outputs):
            return result
        results = iter(result if isinstance(result, tuple) else (result,))
        placed = tuple([None if a.present is False else next(results) for a in outputs])
        return placed if len(placed) > 1 else placed[0]

    def _member(self, values: Sequence[Any]) -> Op:
        atoms = [values[i] if number else values[i] is not None for i, number in self._asked]
        if imported.traced():
            atoms = [settled(atom) for atom in atoms]
        # Dynamo guards an attribute, and takes the name that a constant function gives.
        member: Op = getattr(self._members, self._member_of(*atoms))
        return member

    def variant(self, *args: Any, **named: Any) -> Op:
        """As `Op.variant`."""
        values = self.ordered(args, named)
        for i, is_number in self._asked:
            if is_number:
                number(self.name, self.rule.inputs[i], values[i])  # which refuses it, as calls do
        return self._member(values)

    @property
    def torch_op(self) -> Any:
        """Raises: it is several operators."""
        raise KernelError(
            f"[op] op {self.name!r} has outputs that are only there in some calls, so that it is "
            "several operators of torch; op.variant(...).torch_op is the one of a call with these "
            "inputs."
        )

    def _define(self, kind: str, rule: Any, version: object) -> Any:
        for holding, member in self._members.by_conditions.items():
            own = rule
            if kind == "vmap" and isinstance(rule, OptionalOp):
                own = rule._members.by_conditions.get(holding, rule)
            member._define(kind, own, version)
        self._digest = None
        return rule

    def using(self, *kinds: str) -> Op:
        """As `Op.using`."""
        pairs = self._members.by_conditions.items()
        return OptionalOp(self.name, self.rule, {h: op.using(*kinds) for h, op in pairs})

    def to_json(self) -> Any:
        """What its digest is of; what is kept in files is its members."""
        return {
            "name": self.name,
            "rule": self.rule.to_json(),
            "implementations": [],
            "members": [member.digest for member in self.members],
        }

    def __reduce__(self) -> Any:
        return _unpickled, (
            self.name,
            self.rule.to_json(),
            list(self._members.by_conditions.items()),
        )


def _unpickled(name: str, rule: Any, members: Any) -> OptionalOp:
    return OptionalOp(name, Rule.from_json(rule), dict(members))


class _Members:
    """The ops of an `OptionalOp`, each an attribute, too.

    Attributes:
        by_conditions: by whether each condition holds.
        asked: the inputs that the conditions name: where they stand, and whether they are numbers.
        name: the attribute for what was asked: numbers, and of arrays whether they are there.
    """

    def __init__(self, rule: Rule, members: Mapping[tuple[bool, ...], Op]) -> None:
        self.by_conditions = dict(members)
        conditions = rule.presences
        named = frozenset[str]().union(*(condition.names for condition in conditions))
        places = [i for i, a in enumerate(rule.inputs) if a.name in named]
        self.asked = tuple((i, rule.inputs[i].dims is None) for i in places)
        names = [rule.inputs[i].name for i in places]
        attributes = {}
        for i, (holding, op) in enumerate(members.items()):
            attributes[holding] = f"member_{i}"
            setattr(self, attributes[holding], op)
        known: dict[tuple[Any, ...], str] = {}

        def chosen(atoms: tuple[Any, ...]) -> str:
            values = dict(zip(names, atoms, strict=True))
            try:
                return attributes[tuple(bool(each.evaluate(values)) for each in conditions)]
            except (TypeError, ValueError):  # of what is no number: any member says so
                return "member_0"

        def name(*atoms: Any) -> str:
            if not _PLAIN.issuperset(map(type, atoms)):  # such as a symbolic size
                return chosen(atoms)
            if atoms not in known:
                if len(known) >= MOST_KNOWN:
                    known.clear()
                known[atoms] = chosen(atoms)
            return known[atoms]

        name._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as of Op._register
        self.name = name
