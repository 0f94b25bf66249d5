"""A kernel's body, from its text to its accesses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tree_sitter import Node

from ...dtypes import Dtype
from ...kernel import ATTRIBUTES
from .. import NotSplittable, described
from ..cpp import Prepared
from ..macros import expand
from ..syntax import Tree, called, plain_subscripts, struct_names, walk
from . import terms
from .attributes import CONSTANT, attribute
from .functions import functions_of
from .hidden import hidden
from .kinds import BOOL, INT, LONG, UINT, Type, of_dtype, of_kind
from .loops import Loops
from .machine import TooLarge, whole
from .model import Accesses, Array, Unsupported
from .terms import Term
from .values import Named, Opaque, Place, Scalar, Value, Vector, condition, number


def accesses(
    p: Prepared,
    *,
    symbolic: Mapping[str, Term | None] | None = None,
    elements: Mapping[str, str] | None = None,
    wraps: bool = False,
) -> Accesses:
    """What the body of a kernel does to memory.

    Symbols are called as the author does: ``thread_position_in_grid.x``, ``x_shape[0]``, ``N``.

    Args:
        p: the kernel, for one `Spec`.
        symbolic: the template parameters that may differ from the spec's: what they are, None of
            types; of inputs that are numbers what they are; and ``x_ndim`` of inputs that may have
            any number of dims.
        elements: the arrays whose elements are of such a type, and its name.
        wraps: whether signed integers wrap, in place of obligations that they do not; then each
            access tells where it starts, too.
    """
    free = dict(symbolic or {})
    try:
        body = Tree(p.expanded(), body=True)
        header = Tree(expand("", p.text.header, kernel=p.kernel.name) + "\n", body=False)
    except NotSplittable as why:
        return Accesses((), (), (Unsupported(1, str(why)),))
    names = [*p.kernel.input_names, *p.kernel.output_names]
    body = plain_subscripts(body, names)
    machine = Loops(body, frozenset(p.kernel.output_names), wraps)
    machine.functions = functions_of(header, "header")
    machine.structs = frozenset([*struct_names(header), *struct_names(body)])
    machine.waiting = _waiting(machine)
    for tree, where in ((header, "header"), (body, "source")):
        if tree.has_error:
            line = next((n.start_point[0] + 1 for n in _errors(tree)), 1)
            unread = Unsupported(line, "syntax that is not read", where)
            return Accesses((), (), (unread,))
        machine.unsupported.update(dict.fromkeys(hidden(tree, where)))
    if wraps and machine.unsupported:  # then nothing is asked of the accesses
        return Accesses((), (), tuple(machine.unsupported), text=body.data)
    given = _given(p, machine, free, elements or {})
    machine.scopes[0].update(given)
    try:
        machine.tree, machine.where = header, "header"
        for node in header.root.named_children:
            if node.type in ("declaration", "alias_declaration", "type_definition"):
                machine.run(node)
        for name in given:
            if machine.scopes[0][name] is not given[name]:
                machine.unsupported[Unsupported(1, f"{name} is declared again", "header")] = None
        machine.tree, machine.where = body, "source"
        machine.run_all(body.block.named_children)
    except TooLarge as why:
        machine.unsupported[Unsupported(1, str(why))] = None
    except RecursionError:
        machine.unsupported[Unsupported(1, "expressions that are too deep")] = None
    unsupported = tuple(machine.unsupported)
    return Accesses(
        tuple(machine.accesses),
        tuple(machine.obligations),
        unsupported,
        machine.ends,
        body.data,
    )


def _argument(name: str, type_: Type) -> Value:
    """An input that is a number."""
    if type_.kind is None:
        return Opaque(type_)
    if type_.kind is BOOL:
        return condition(terms.flag(name))
    return Scalar(terms.symbol(name, type_.kind.least, type_.kind.most), type_.kind)


def _errors(tree: Tree) -> Iterator[Node]:
    return (n for n in walk(tree.root) if n.type == "ERROR" or n.is_missing)


def _waiting(machine: Loops) -> frozenset[str]:
    """The header's functions that wait at barriers, directly or through others."""
    waiting: set[str] = set()
    while True:
        more = {
            name
            for name, functions in machine.functions.items()
            for f in functions
            if name not in waiting
            and ("barrier" in f.tree.text(f.node) or called(f.tree, f.node) & waiting)
        }
        if not more:
            return frozenset(waiting)
        waiting |= more


def _given(
    p: Prepared, machine: Loops, free: Mapping[str, Term | None], elements: Mapping[str, str]
) -> dict[str, Named]:
    """What the names of arguments, template parameters and attributes mean."""
    given: dict[str, Named] = {}

    def variable(name: str, value: Value) -> None:
        given[name] = Place(machine.new_cell(value))

    for name, value in p.spec.template:
        if name in free:
            term = free[name]
            if term is None:
                given[name] = Type(name)
            else:
                variable(name, condition(term) if term.condition else Scalar(term, INT))
        elif isinstance(value, Dtype):
            given[name] = of_dtype(value)
        elif isinstance(value, bool):
            variable(name, condition(terms.truth(value)))
        else:
            variable(name, number(value))
    for name, input_, parts in described(p.spec):
        type_ = Type(elements[name]) if name in elements else of_dtype(input_.dtype)
        if input_.ndim == 0:
            held = free.get(name)
            if held is not None and type_.kind is not None:
                variable(name, Scalar(held, type_.kind))
            else:
                variable(name, _argument(name, type_))
        else:
            variable(name, whole(Array(name, "device", type_.size), type_))
        for part in parts:
            rank = free.get(f"{name}_ndim") or terms.const(input_.ndim)
            if part == "ndim":
                variable(f"{name}_ndim", Scalar(rank, INT))
            else:
                kind = INT if part == "shape" else LONG
                sizes = Array(f"{name}_{part}", "sizes", None, rank)
                given[sizes.name] = whole(sizes, of_kind(kind))
    for name, dtype in zip(p.kernel.output_names, p.spec.outputs, strict=True):
        type_ = Type(elements[name]) if name in elements else of_dtype(dtype)
        variable(name, whole(Array(name, "device", type_.size), type_))
    for name in ATTRIBUTES:
        if name in CONSTANT:
            variable(name, number(CONSTANT[name], UINT))
        elif name == "grid_origin":
            variable(name, Vector((terms.const(0),) * 3, UINT))
        elif ATTRIBUTES[name] == "uint3":
            variable(name, Vector(tuple(attribute(name, axis) for axis in "xyz"), UINT))
        else:
            variable(name, Scalar(attribute(name), UINT))
    return given
