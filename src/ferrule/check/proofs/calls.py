"""A call of an op for any sizes: its dims, arrays, grid and threads as terms, and what ferrule has
checked before it launches."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ... import dtypes
from ...errors import DialectError
from ...operators.bodies import KernelBody
from ...operators.expressions import dtype_variables
from ...rules.argument import Argument, Broadcast, Star
from ...rules.expression import DEVICES, Expression
from ...rules.rule import Rule
from ...source.accesses import terms
from ...source.accesses.model import Access, Accesses, Loop, Obligation, Times
from ...source.accesses.read import accesses
from ...source.accesses.terms import Term
from ...source.cpp import prepare
from ...spec import MAX_THREADS, Input, Spec
from .ranks import Ranks, broadcast_facts
from .sizes import Divisors, OneOf, Size, as_term, on_terms

MOST = 2**31 - 1
AXES = "xyz"


class NotSupported(Exception):
    """Something about an op is not understood.

    Attributes:
        line: of its body; None where no line is to blame.
    """

    def __init__(self, why: str, line: int | None = None) -> None:
        super().__init__(why)
        self.line = line


class Domain(NamedTuple):
    """What a call may give for a name.

    Attributes:
        name: of the symbol.
        kind: ``dim``, ``number``, ``flag`` or ``device``.
        term: the symbol.
    """

    name: str
    kind: str
    term: Term


@dataclass
class Call:
    """Any call of an op that one of its bodies carries out.

    Attributes:
        rule, body: the op's.
        domains: what calls differ in, in the order of the rule.
        facts: what holds of every call that is launched.
        grid, group: threads along each axis; the threadgroup is clamped to the grid.
        lengths: the elements of each array.
        shapes: the sizes of each array's dims; ``*S`` is one of them.
        choices: by dtype variable, and ``device``: the names that it may have, none for any.
        found: the body's accesses, over these symbols and a thread's.
        threads: the symbols that tell threads apart, per axis: its position in the grid, or
            threadgroup and position there.
        thread_facts: what holds of every thread.
        where, simdgroup: the thread's threadgroup along each axis, and its simdgroup in that.
        ranks: how many dims there are where each ``*S`` is one, by the symbols' names.
    """

    rule: Rule
    body: KernelBody
    most: int
    domains: list[Domain] = field(default_factory=list)
    facts: list[Term] = field(default_factory=list)
    grid: tuple[Term, ...] = ()
    group: tuple[Term, ...] = ()
    lengths: dict[str, Term] = field(default_factory=dict)
    shapes: dict[str, tuple[Term, ...]] = field(default_factory=dict)
    choices: dict[str, tuple[str, ...]] = field(default_factory=dict)
    found: Accesses = field(default_factory=lambda: Accesses((), (), ()))
    threads: list[tuple[Term, ...]] = field(default_factory=list)
    thread_facts: list[Term] = field(default_factory=list)
    where: list[Term] = field(default_factory=list)
    ranks: dict[str, int] = field(default_factory=dict)
    simdgroup: Term = field(default_factory=lambda: terms.const(0))

    @property
    def grouped(self) -> bool:
        """Whether threads are told apart by threadgroup and position in it."""
        return any(len(axis) == 2 for axis in self.threads)


def symbolic_call(
    rule: Rule, body: KernelBody, earlier: Sequence[Any], most: int,
    kinds: Mapping[str, str] | None = None,
) -> Call:  # fmt: skip
    """Any call of an op that a body carries out.

    Args:
        earlier: the implementations that are asked before, of the same kind.
        most: the elements that arrays have fewer of.
        kinds: the dtypes that some of the dtype variables are; the others are any.

    Raises:
        NotSupported: the rule or body has what is not understood.
    """
    return _Reader(rule, body, most, kinds or {}).read(earlier)


class _Reader:
    def __init__(
        self, rule: Rule, body: KernelBody, most: int, kinds: Mapping[str, str]
    ) -> None:  # fmt: skip
        self.call = Call(rule, body, most)
        self.rule, self.body, self.kinds = rule, body, kinds
        self.divisors, self.ranks = Divisors(), Ranks()
        self.on = on_terms(self.divisors)
        self.values: dict[str, Any] = {}

    def read(self, earlier: Sequence[Any]) -> Call:
        call = self.call
        self._declare()
        self._shapes()
        for condition in self.rule.conditions:
            call.facts.append(self.term(condition))
        template = self._template()
        call.grid = tuple(map(self.term, self.body.grid))
        group = tuple(map(self.term, self.body.threadgroup))
        call.facts += [terms.le(g, terms.const(MOST)) for g in call.grid]
        call.facts += [terms.le(terms.const(0), g) for g in call.grid]
        threads = terms.mul(terms.mul(group[0], group[1]), group[2])
        call.facts += [terms.le(terms.const(1), t) for t in group]
        call.facts.append(terms.le(threads, terms.const(MAX_THREADS)))
        call.facts += [terms.le(t, terms.const(MOST)) for t in group]
        if self.body.when is not None:
            call.facts.append(self.term(self.body.when))
        for other in earlier:
            call.facts.append(terms.not_(self.term(other.when)))
        call.facts += self.divisors.found
        call.group = tuple(self._clamped(t, g) for t, g in zip(group, call.grid, strict=True))
        raw = self._accesses(template)
        self._threads(raw)
        call.facts = [fact for fact in dict.fromkeys(call.facts) if fact is not terms.TRUE]
        return call

    @staticmethod
    def _clamped(threads: Term, grid: Term) -> Term:
        """A threadgroup that is no longer than the grid, in which there is a thread."""
        if threads is terms.const(1):
            return threads
        return terms.least(threads, grid)

    def term(self, expression: Expression) -> Term:
        """The value of an expression."""
        values = dict(self.values)
        for name in expression.names:
            if name not in values:  # of the device
                low = 0 if name == "memory_bus" else 1 if name == "sm_count" else 0
                symbol = terms.symbol(name, low, MOST)
                self._domain(name, "device", symbol)
                values[name] = self.values[name] = Size(symbol, self.divisors)
        try:
            return as_term(expression.evaluate(values, self.on))
        except KeyError as error:
            raise NotSupported(f"{expression} names {error.args[0]}, which is not known") from None
        except ZeroDivisionError:
            raise NotSupported(f"{expression} divides by zero") from None

    def _domain(self, name: str, kind: str, term: Term) -> None:
        self.call.domains.append(Domain(name, kind, term))

    # -- what the rule declares --------------------------------------------------------------------

    def _declare(self) -> None:
        call, rule = self.call, self.rule
        for parameter in rule.inputs:
            if parameter.optional:
                self._domain(f"has_{parameter.name}", "flag", terms.flag(f"has_{parameter.name}"))
        for name in rule.dim_names:
            self._size(name, name in self.body.dims)
        for argument in rule.inputs:
            for dim in argument.dims or ():
                if isinstance(dim, Star) and f"{dim.name}_size" not in self.values:
                    self._size(f"{dim.name}_size", f"{dim.name}_size" in self.body.dims)
        for argument in rule.inputs:
            if argument.dims is None:
                self._number(argument)
        for name in dtype_variables(rule):
            known = (self.kinds[name],) if name in self.kinds else rule.choices.get(name, ())
            call.choices[name] = tuple(known)
            self.values[f":{name}"] = OneOf(name, call.choices[name], self.divisors)
        call.choices["device"] = DEVICES
        self.values[":device"] = OneOf("device", DEVICES, self.divisors)
        self._only_optional()

    def _size(self, name: str, is_read: bool) -> None:
        if name in self.values:
            return
        symbol = terms.symbol(name, 0, MOST if is_read else 2**63 - 1)
        self._domain(name, "dim", symbol)
        self.values[name] = Size(symbol, self.divisors)

    def _number(self, argument: Argument) -> None:
        kind = dtypes.BY_NAME[argument.dtype]
        if kind.kind == "b":
            flag = terms.flag(argument.name)
            self._domain(argument.name, "flag", flag)
            one, zero = terms.const(1), terms.const(0)
            self.values[argument.name] = Size(terms.ite(flag, one, zero), self.divisors)
        elif kind.kind in "iu":
            signed = kind.kind == "i"
            bits = 8 * kind.itemsize - signed
            number = terms.symbol(argument.name, -(1 << bits) if signed else 0, (1 << bits) - 1)
            self._domain(argument.name, "number", number)
            self.values[argument.name] = Size(number, self.divisors)

    def _only_optional(self) -> None:
        """Dims that only inputs bind that may be absent are 0 without them."""
        for name in self.rule.dim_names:
            binders = [
                a for a in self.rule.inputs
                if any(isinstance(d, Expression) and d.node == ("name", name) for d in a.dims or ())
            ]  # fmt: skip
            if binders and all(a.optional for a in binders):
                there = [terms.flag(f"has_{a.name}") for a in binders]
                zero = terms.eq(self.values[name].term, terms.const(0))
                self.call.facts.append(terms.or_(zero, *there))

    def _shapes(self) -> None:
        call = self.call
        for argument in (*self.rule.inputs, *self.rule.outputs):
            if argument.dims is None:
                continue
            sizes: list[Term] = []
            for dim in argument.dims:
                if isinstance(dim, Broadcast):
                    sizes.append(self._broadcast(dim))
                elif isinstance(dim, Star):
                    sizes.append(self.values[f"{dim.name}_size"].term)
                else:
                    sizes.append(self.term(dim))
            length = terms.const(1)
            for size in sizes:
                length = terms.mul(length, size)
            there = terms.TRUE
            if argument.optional:
                there = terms.flag(f"has_{argument.name}")
            for size in sizes:
                fact = terms.le(terms.const(0), size)
                call.facts.append(terms.or_(terms.not_(there), fact))
            fewer = terms.lt(length, terms.const(call.most))
            call.facts.append(terms.or_(terms.not_(there), fewer))
            call.shapes[argument.name] = tuple(sizes)
            call.lengths[argument.name] = terms.ite(there, length, terms.const(0))
            self.values[f"{argument.name}.size"] = Size(length, self.divisors)
            rank = self.ranks.declare(argument, tuple(sizes))
            self.values[f"{argument.name}.ndim"] = Size(rank, self.divisors)

    def _broadcast(self, dim: Broadcast) -> Term:
        """The product of the dims that several broadcast to."""
        name = str(dim).removeprefix("*")
        if name not in self.values:
            self._size(name, False)
            of = {f"{n}.ndim": self.values[f"{n}_size"].term for n in dim.names}
            self.call.facts += broadcast_facts(self.values[name].term, of)
        size: Term = self.values[name].term
        return size

    def _free_dtypes(self) -> list[str]:
        """The dtype variables that may be any of several."""
        return [name for name in dtype_variables(self.rule) if name not in self.kinds]

    def _template(self) -> dict[str, Term | None]:
        """What the template's parameters are; None of dtypes."""
        template: dict[str, Term | None] = dict.fromkeys(self._free_dtypes())
        for parameter in self.rule.inputs:
            if parameter.optional:
                template[f"has_{parameter.name}"] = terms.flag(f"has_{parameter.name}")
        for name, value in self.body.template:
            if isinstance(value, Expression):
                if value.of_dtype:
                    template[name] = None
                    continue
                term = template[name] = self.term(value)
                if not term.condition:
                    self.call.facts += [
                        terms.le(terms.const(-(2**31)), term), terms.le(term, terms.const(MOST)),
                    ]  # fmt: skip
        for name in (*self.rule.numbers, *self.body.dims):
            if name in self.values:
                template[name] = self.values[name].term
        return template

    # -- the body ----------------------------------------------------------------------------------

    def _accesses(self, template: Mapping[str, Term | None]) -> Accesses:
        kernel, rule = self.body.kernel, self.rule
        arguments = {a.name: a for a in (*rule.inputs, *rule.outputs)}
        elements = {
            name: a.dtype for name, a in arguments.items()
            if a.dtype in self._free_dtypes() and a.dims is not None
        }  # fmt: skip

        def dtype(name: str) -> dtypes.Dtype:
            declared = self.kinds.get(arguments[name].dtype, arguments[name].dtype)
            if declared in dtypes.BY_NAME:
                return dtypes.BY_NAME[declared]
            allowed = rule.choices.get(declared, ("float32",))
            return dtypes.BY_NAME["float32" if "float32" in allowed else allowed[0]]

        inputs = []
        for name in kernel.input_names:
            if name in self.body.dims:
                inputs.append(Input(dtypes.int32, 0))
                continue
            dims = arguments[name].dims
            inputs.append(Input(dtype(name), 0 if dims is None else len(dims)))
            self._check_described(arguments[name])
        variables = dtype_variables(rule)
        values: list[tuple[str, Any]] = [
            (n, dtype(next(a.name for a in rule.inputs if a.dtype == n))) for n in variables
        ]
        values += [(f"has_{a.name}", True) for a in rule.inputs if a.optional]
        values += [
            (n, v if not isinstance(v, Expression) else dtypes.float32 if v.of_dtype else 1)
            for n, v in self.body.template
        ]
        spec = Spec(kernel, tuple(inputs), tuple(map(dtype, kernel.output_names)), tuple(values))
        try:
            prepared = prepare(spec)
        except DialectError as error:
            raise NotSupported(str(error)) from None
        symbolic = {**template, **self.ranks.told}
        return accesses(prepared, symbolic=symbolic, elements=elements)

    def _check_described(self, argument: Argument) -> None:
        kernel = self.body.kernel
        if argument.dims and not kernel.ensure_row_contiguous:
            raise NotSupported(f"{argument.name} may have any strides: ensure_row_contiguous=False")

    # -- threads -----------------------------------------------------------------------------------

    def _threads(self, raw: Accesses) -> None:
        """Give the attributes their meaning, by what tells threads apart."""
        call = self.call
        leaves = frozenset[Term]().union(*(t.leaves for t in _terms_of(raw)))
        names = {str(leaf.value) for leaf in leaves if leaf.op == "symbol"}
        shared = any(a.array.space == "threadgroup" for a in raw.accesses)
        timed = any(t.times != Times() for t in raw.accesses)
        whole = shared or timed or any("_index_in_" in n or "simdgroups_per" in n for n in names)
        meaning: dict[str, Term] = {}
        actual, local = [], []
        for i, axis in enumerate(AXES):
            by_group = {f"threadgroup_position_in_grid.{axis}", f"threads_per_threadgroup.{axis}",
                        f"thread_position_in_threadgroup.{axis}"}  # fmt: skip
            t, p = self._axis(i, whole or bool(by_group & names), meaning)
            actual.append(t)
            local.append(p)
        index = terms.add(
            local[0],
            terms.mul(actual[0], terms.add(local[1], terms.mul(actual[1], local[2]))),
        )
        many = terms.mul(terms.mul(actual[0], actual[1]), actual[2])
        for word, threads in (("simd", 32), ("quad", 4)):
            width = terms.const(threads)
            meaning[f"thread_index_in_{word}group"] = terms.fmod(index, width)
            meaning[f"{word}group_index_in_threadgroup"] = terms.fdiv(index, width)
            up = terms.add(many, terms.const(threads - 1))
            meaning[f"{word}groups_per_threadgroup"] = terms.fdiv(up, width)
        meaning["thread_index_in_threadgroup"] = index
        call.simdgroup = terms.fdiv(index, terms.const(32))
        arguments = {a.name: a for a in (*self.rule.inputs, *self.rule.outputs)}
        for name, shape in call.shapes.items():
            for i, size in enumerate(shape):
                meaning[f"{name}_shape[{i}]"] = size
                stride = terms.const(1)
                for behind in shape[i + 1 :]:
                    stride = terms.mul(stride, behind)
                meaning[f"{name}_strides[{i}]"] = stride
            if name in self.body.described:
                dims = zip(shape, arguments[name].dims or (), strict=True)
                plain = (size for size, dim in dims if not isinstance(dim, Star))
                call.facts += [terms.le(size, terms.const(MOST)) for size in plain]
        call.facts += self.ranks.facts
        call.ranks = self.ranks.known
        by = {leaf: meaning[str(leaf.value)] for leaf in leaves
              if leaf.op == "symbol" and leaf.value in meaning}  # fmt: skip
        self._replace(raw, by | self.ranks.meanings(leaves))

    def _axis(self, i: int, grouped: bool, meaning: dict[str, Term]) -> tuple[Term, Term]:
        """One axis: the size of the thread's threadgroup, and the thread's position in it."""
        call, axis = self.call, AXES[i]
        grid, group = call.grid[i], call.group[i]
        zero, one = terms.const(0), terms.const(1)
        facts = call.thread_facts
        if grid is one:
            position, where, local, actual = zero, zero, zero, one
            call.threads.append(())
        elif group is grid or not grouped or group is one:
            position = terms.symbol(f"thread.{axis}", 0, MOST)
            facts.append(terms.lt(position, grid))
            call.threads.append((position,))
            where, local, actual = zero, position, grid
            if group is not grid:
                where, local, actual = position, zero, one
        else:
            where = terms.symbol(f"group.{axis}", 0, MOST)
            local = terms.symbol(f"local.{axis}", 0, MAX_THREADS - 1)
            position = terms.add(terms.mul(group, where), local)
            facts += [terms.lt(local, group), terms.lt(position, grid)]
            call.threads.append((where, local))
            actual = terms.least(group, terms.sub(grid, terms.mul(group, where)))
        count = grid if group is one else terms.fdiv(
            terms.sub(terms.add(grid, group), one), group
        )  # fmt: skip
        call.where.append(where)
        meaning |= {
            f"thread_position_in_grid.{axis}": position,
            f"threadgroup_position_in_grid.{axis}": where,
            f"thread_position_in_threadgroup.{axis}": local,
            f"threads_per_threadgroup.{axis}": actual,
            f"dispatch_threads_per_threadgroup.{axis}": group,
            f"threadgroups_per_grid.{axis}": one if group is grid else count,
            f"threads_per_grid.{axis}": grid,
            f"grid_size.{axis}": grid,
        }
        return actual, local

    def _replace(self, raw: Accesses, by: Mapping[Term, Term]) -> None:
        made: dict[Term, Term] = {}

        def new(term: Term) -> Term:
            return terms.replaced(term, by, made)

        self.call.found = changed(raw, new, self.rule.numbers)


def changed(raw: Accesses, new: Any, numbers: Collection[str]) -> Accesses:
    """Accesses with other terms in place of theirs; ``numbers`` are those of the call."""

    def loops(of: tuple[Loop, ...]) -> tuple[Loop, ...]:
        return tuple(Loop(loop.counter, new(loop.holds)) for loop in of)

    def array(a: Any) -> Any:
        if a.length is None:
            return a
        return type(a)(a.name, a.space, a.size, new(a.length), a.key)

    return Accesses(
        tuple(
            Access(a.line, array(a.array), a.mode, new(a.element), a.width,
                   tuple(map(new, a.path)), loops(a.loops), Times(*map(new, a.times)), a.where)
            for a in raw.accesses
        ),
        tuple(
            Obligation(o.line, o.what, new(o.term), o.kind, tuple(map(new, o.path)),
                       loops(o.loops), o.where)
            for o in _needed(raw, numbers)
        ),
        raw.unsupported,
    )  # fmt: skip


def _terms_of(raw: Accesses) -> list[Term]:
    found: list[Term] = []
    for a in raw.accesses:
        found += [a.element, *a.path, *a.times, *(loop.holds for loop in a.loops)]
        found += [a.array.length] if a.array.length is not None else []
    return found + [t for o in raw.obligations for t in (o.term, *o.path)]


def _needed(raw: Accesses, numbers: Collection[str]) -> list[Obligation]:
    """The obligations of sizes and positions, and of all on which an index or a condition rests:
    those of sums of data are none, nor of the call's numbers."""
    used: list[Term] = []
    for a in raw.accesses:
        used += [a.element, *a.path, *a.times, *(loop.holds for loop in a.loops)]
    parts = set(terms.subterms(*used))

    def known(leaf: Term) -> bool:
        plain = leaf.op in ("symbol", "counter") and leaf.value not in numbers
        return plain or leaf in parts

    return [o for o in raw.obligations if o.term in parts or all(map(known, o.term.leaves))]
