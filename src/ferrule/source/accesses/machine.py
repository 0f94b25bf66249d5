"""The state of an analysis: what names mean, what variables hold, what is behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from tree_sitter import Node

from ..syntax import Tree, unbracketed
from . import terms
from .kinds import Kind, Type
from .model import Access, Array, Loop, Obligation, Times, Unsupported
from .terms import Term
from .values import Named, Pointer, Value, merged

MOST_ACCESSES = 4000
MOST_STEPS = 60_000  # nodes that are evaluated, those of loops and functions each time
PER_GROUP = frozenset({
    "threadgroup_position_in_grid", "threads_per_threadgroup", "simdgroups_per_threadgroup",
    "quadgroups_per_threadgroup",
})  # fmt: skip
PER_THREAD = frozenset({
    "thread_position_in_grid", "thread_position_in_threadgroup", "thread_index_in_threadgroup",
    "thread_index_in_simdgroup", "thread_index_in_quadgroup", "simdgroup_index_in_threadgroup",
    "quadgroup_index_in_threadgroup",
})  # fmt: skip


class TooLarge(Exception):
    """The analysis would take too long."""


class Jump(NamedTuple):
    """A way out of a statement.

    Attributes:
        kind: ``return``, ``break`` or ``continue``.
        path: what holds there.
        value: what is returned.
    """

    kind: str
    path: tuple[Term, ...]
    value: Value | None = None


class Snapshot(NamedTuple):
    """What branches must leave as they found it."""

    cells: dict[int, Value]
    path: tuple[Term, ...]
    branches: tuple[Term, ...]
    times: Times


class Machine:
    """The state of a run through a body.

    Attributes:
        tree, where: the text that is run, and which one it is.
        scopes: what names mean, the innermost last.
        cells: what variables hold.
        path: what holds here, all of which brought the thread here.
        branches: those of them that others of the threadgroup may wait behind.
        loops: around this place.
        written: the device arrays that the kernel may write.
        wraps: whether signed integers wrap, in place of obligations that they do not.
    """

    def __init__(self, tree: Tree, written: frozenset[str], wraps: bool = False) -> None:
        self.tree, self.where = tree, "source"
        self.written, self.wraps = written, wraps
        self.scopes: list[dict[str, Named]] = [{}]
        self.cells: dict[int, Value] = {}
        self.path: tuple[Term, ...] = ()
        self.branches: tuple[Term, ...] = ()
        self.loops: tuple[Loop, ...] = ()
        self.times = Times()
        self.accesses: dict[Access, None] = {}
        self.obligations: dict[Obligation, None] = {}
        self.unsupported: dict[Unsupported, None] = {}
        self.uniform: set[Term] = (
            set()
        )  # counters, and more, that are alike in all threads of a group
        self.ends = True  # of every loop it is known how many rounds it has at most
        self.depth = 0  # of calls
        self.steps = 0
        self._next_cell = 0

    # -- what is found -----------------------------------------------------------------------------

    def refuse(self, node: Node, why: str, *, hides: bool = True) -> None:
        """Say that something is not understood."""
        if terms.FALSE not in self.path:
            self.unsupported[Unsupported(node.start_point[0] + 1, why, self.where, hides)] = None

    def access(self, node: Node, pointer: Pointer, mode: str) -> None:
        """Record an access of what a pointer points to."""
        if terms.FALSE in self.path:
            return
        if not pointer.step:
            self.refuse(node, f"{pointer.array.name} is accessed as {pointer.type.name or 'a type'}"
                              " of unknown size", hides=False)  # fmt: skip
            return
        if mode != "read" and pointer.array.space == "device" and (
            pointer.array.name not in self.written
        ):  # fmt: skip
            self.refuse(node, f"{pointer.array.name} is an input, and written")
        index = self.index_of(pointer)
        line = node.start_point[0] + 1
        start = unbracketed(node).start_byte if self.wraps else 0
        self.accesses[
            Access(line, pointer.array, mode, index, pointer.step, self.path, self.loops,
                   self.times, self.where, start)
        ] = None  # fmt: skip
        if len(self.accesses) > MOST_ACCESSES:
            raise TooLarge(f"more than {MOST_ACCESSES} accesses")

    @staticmethod
    def index_of(pointer: Pointer) -> Term:
        """The first element that a pointer points to."""
        offset = pointer.offset
        if pointer.parts > 1:
            return terms.add(pointer.base, terms.fdiv(offset, terms.const(pointer.parts)))
        return terms.add(pointer.base, terms.mul(terms.const(pointer.step), offset))

    def oblige(self, node: Node, what: str, term: Term, kind: Kind) -> None:
        """Record what must hold for terms to mean what is computed."""
        if terms.FALSE in self.path:
            return
        line = node.start_point[0] + 1
        self.obligations[Obligation(line, what, term, kind, self.path, self.loops, self.where)] = (
            None
        )

    # -- variables ---------------------------------------------------------------------------------

    def look_up(self, name: str) -> Named | None:
        """What a name means."""
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), None)

    def new_cell(self, value: Value) -> int:
        """A variable."""
        self._next_cell += 1
        self.cells[self._next_cell] = value
        return self._next_cell

    @property
    def types(self) -> dict[str, Type]:
        """The names of types."""
        return {n: v for scope in self.scopes for n, v in scope.items() if isinstance(v, Type)}

    @contextmanager
    def scope(self) -> Iterator[None]:
        """A scope inside of the present one."""
        self.scopes.append({})
        yield
        self.scopes.pop()

    # -- branches ----------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        return Snapshot(dict(self.cells), self.path, self.branches, self.times)

    def restore(self, to: Snapshot) -> None:
        self.cells, self.path = dict(to.cells), to.path
        self.branches, self.times = to.branches, to.times

    def assume(self, condition: Term, *, branch: bool = True) -> None:
        """Go on where a condition holds."""
        if condition is terms.TRUE:
            return
        if terms.not_(condition) in self.path:
            condition = terms.FALSE
        if condition not in self.path:
            self.path = (*self.path, condition)
        if branch:
            self.branches = (*self.branches, condition)

    def merge(self, condition: Term, a: Snapshot, b: Snapshot) -> None:
        """Go on with what both branches have left: ``a`` where the condition held."""
        self.cells = {
            cell: merged(condition, a.cells[cell], value) if cell in a.cells else value
            for cell, value in b.cells.items()
        }
        pairs = zip(a.times, b.times, strict=True)
        self.times = Times(*(terms.ite(condition, x, y) for x, y in pairs))

    def is_uniform(self, term: Term) -> bool:
        """Whether a term is known to be the same in all threads of a threadgroup."""
        for leaf in term.leaves:
            if leaf.op in ("unknown", "counter") and leaf not in self.uniform:
                return False
            if leaf.op == "symbol" and str(leaf.value).split(".")[0] in PER_THREAD:
                return False
            if leaf.op == "data" and (
                leaf.value in self.written or not self.is_uniform(leaf.args[0])
            ):
                return False
        return True

    # -- what the other parts do -------------------------------------------------------------------

    def evaluate(self, node: Node) -> Value:
        """The value of an expression."""
        raise NotImplementedError

    def call(self, node: Node) -> Value:
        """The value of a call."""
        raise NotImplementedError

    def run(self, node: Node) -> list[Jump]:
        """Run a statement."""
        raise NotImplementedError

    def run_all(self, statements: Sequence[Node]) -> list[Jump]:
        """Run statements in a scope of their own."""
        raise NotImplementedError


def whole(array: Array, type_: Type, dims: tuple[Term, ...] = ()) -> Pointer:
    """The first element of an array."""
    return Pointer(array, terms.const(0), terms.const(0), type_, dims=dims)
