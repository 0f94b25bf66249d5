"""What a program means: an executor in NumPy that runs all threads of a grid at once.

It reads the syntax tree, never the text, and shares no code with ferrule. A statement is carried
out for the list of threads that are active; control flow splits that list and joins it again where
the sides of a branch end, where a loop ends, and (``continue``) where a round of a loop ends.

A program whose result is not defined raises `Invalid`: a race, an access out of bounds, a value
that was never written, an overflow, a barrier that some threads do not reach.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import program as p
from .machine import NOBODY, Array, Frame, Grid, Place, Pointer, Round, Store, join
from .operations import Invalid, arithmetic, convert, library, multiply_add, operate

MAX_ROUNDS = 5000


class Reference:
    """Runs one launch of a program; `run` returns the outputs."""

    def __init__(self, program: p.Program, launch: p.Launch) -> None:
        self.program = program
        self.exact = program.exact
        self.grid = Grid(launch)
        self.n = self.grid.threads
        self.lanes = np.arange(self.n)
        self.nothing = np.zeros(self.n, np.int64)
        self.live = np.ones(self.n, bool)
        self.env: dict[int, Store | Place | Pointer] = {}
        self.snapshots: dict[int, dict[int, Store]] = {}
        self.macros: list[tuple[p.MacroUse, ...]] = []
        self.frames: list[Frame] = []
        self.rounds: list[Round] = []
        self.shared: list[Store] = []
        self.constants: set[int] = set()
        self.data = program.arrays(launch.data)
        self._statements: dict[type, Callable[[Any, Array], Array]] = {
            p.Decl: self._decl, p.Decls: self._decls, p.TableDecl: self._table,
            p.LambdaDecl: self._lambda, p.Define: lambda s, act: act, p.Assign: self._assign,
            p.DefineAssign: lambda s, act: act, p.MacroAssign: self._assign,
            p.Step: self._step, p.Do: self._do, p.If: self._if, p.For: self._for,
            p.While: self._while, p.Switch: self._switch, p.Jump: self._jump,
            p.Return: self._return, p.Block: self._inner, p.Barrier: self._barrier,
            p.AtomicAdd: self._atomic_add, p.AtomicStore: self._atomic_store,
        }  # fmt: skip
        self._expressions: dict[type, Callable[[Any, Array], Array]] = {
            p.Lit: lambda e, act: np.full(len(act), e.value, e.type.dtype),
            p.Name: self._read, p.Attr: self._attribute, p.Un: self._unary, p.Bin: self._binary,
            p.Cond: self._cond, p.Cast: self._cast, p.Fn: self._function, p.Sync: self._sync,
            p.Index: self._read, p.Deref: self._read, p.Strided: self._strided,
            p.ShapeOf: self._shape, p.Swizzle: self._read, p.Component: self._read,
            p.PostStep: self._post_step, p.Call: self._call, p.Param: self._param,
            p.MacroUse: self._macro, p.AtomicLoad: self._read,
        }  # fmt: skip

    # -- the whole -------------------------------------------------------------------------------

    def run(self) -> list[Array]:
        """The outputs, flat.

        Raises:
            Invalid: the program has no defined result.
        """
        for (var, _, _), values in zip(self.program.inputs, self.data, strict=True):
            flat = np.ascontiguousarray(values).reshape(1, -1)
            store = Store(var.type, flat.shape[1], self.nothing, 1, data=flat)
            self.env[var.id] = store
            if var.kind != "scalar":
                self.env[var.id] = Pointer(store, np.zeros(self.n, np.int64))
        outputs = []
        for var, per_thread in self.program.outputs:
            size = per_thread * self.n or 16
            flat = np.full((1, size), self.program.init, var.type.dtype)
            outputs.append(flat)
            store = Store(var.type, size, self.nothing, 1, watched=True, data=flat)
            self.env[var.id] = Pointer(store, np.zeros(self.n, np.int64))
        for var, value in self.program.template:
            if var.kind == "type":
                continue
            self.env[var.id] = Store(
                var.type, 1, self.nothing, 1, data=np.array([[value]], var.type.dtype)
            )
        for node in self.program.header:
            if isinstance(node, p.Table):
                self._make_table(node)
        self.frames.append(Frame(None))
        with np.errstate(all="ignore"):
            self._block(self.program.body, self.lanes)
        return [o[0] for o in outputs]

    # -- statements --------------------------------------------------------------------------------

    def _block(self, body: list[p.Stmt], act: Array) -> Array:
        for s in body:
            if not len(act):
                break
            act = self._statements[type(s)](s, act)
        return act

    def _inner(self, s: p.Block, act: Array) -> Array:
        return self._block(s.body, act)

    def _decls(self, s: p.Decls, act: Array) -> Array:
        for d in s.parts:
            self._decl(d, act)
        return act

    def _decl(self, s: p.Decl, act: Array) -> Array:
        v = s.var
        if v.kind == "value":
            self._note_constant(s)
        if v.kind == "pointer":
            assert isinstance(s.value, p.Address)
            store, offsets = self._address(s.value, act)
            known = self.env.get(v.id)
            every = np.zeros(self.n, np.int64)
            if isinstance(known, Pointer) and known.store is store:
                every = known.offsets.copy()
            every[act] = offsets
            self.env[v.id] = Pointer(store, every)
        elif v.kind == "ref":
            assert s.value is not None
            place = self._place(s.value, act)
            columns = np.zeros(self.n, np.int64)
            columns[act] = place.columns
            self.env[v.id] = Place(place.store, columns)
        elif v.kind == "shared":
            if v.id not in self.env:
                rows = self.grid.of["group"]
                made = Store(v.type, v.size or 1, rows, self.grid.groups, watched=True)
                self.env[v.id] = made
                self.shared.append(made)
        else:
            self._declare(v, act)
            if s.values is not None:
                for i in range(v.size):
                    given = self.value(s.values[i], act) if i < len(s.values) else None
                    if given is None:
                        given = np.zeros((len(act), *_tail(v.type)), v.type.dtype)
                    else:
                        given = self._converted(given, s.values[i].type, v.type)
                    self._write(Place(self._store(v), np.full(len(act), i)), given, act)
            elif s.value is not None:
                given = self._converted(self.value(s.value, act), s.value.type, v.type)
                self._write(Place(self._store(v), np.zeros(len(act), np.int64)), given, act)
        return act

    def _note_constant(self, s: p.Decl) -> None:
        if "const" in s.spec and s.value is not None and self._constant(s.value):
            self.constants.add(s.var.id)

    def _declare(self, v: p.Var, act: Array) -> None:
        known = self.env.get(v.id)
        if isinstance(known, Store):
            known.defined[act] = False
        else:
            self.env[v.id] = Store(v.type, v.size or 1, self.lanes, self.n)

    def _store(self, v: p.Var) -> Store:
        found = self._lookup(v)
        assert isinstance(found, Store)
        return found

    def _lookup(self, v: p.Var) -> Store | Place | Pointer:
        found = self.env.get(v.id)
        if found is None:
            raise Invalid(f"{v.name} is not declared")
        return found

    def _table(self, s: p.TableDecl, act: Array) -> Array:
        self._make_table(s.table)
        return act

    def _make_table(self, table: p.Table) -> None:
        data = np.array([table.values], table.var.type.dtype)
        self.env[table.var.id] = Store(
            table.var.type, len(table.values), self.nothing, 1, data=data
        )

    def _lambda(self, s: p.LambdaDecl, act: Array) -> Array:
        if s.function.capture == "=":
            copies = self.snapshots.setdefault(id(s.function), {})
            for node in (n for b in s.function.body for n in p.walk(b)):
                if isinstance(node, p.Name) and node.var.kind == "value":
                    found = self.env.get(node.var.id)
                    if not isinstance(found, Store) or len(found.data) != self.n:
                        continue
                    copy = copies.setdefault(node.var.id, Store(found.kind, 1, found.rows, self.n))
                    copy.data[act] = found.data[act]
                    copy.defined[act] = found.defined[act]
        return act

    def _assign(self, s: p.Assign | p.MacroAssign, act: Array) -> Array:
        if isinstance(s.target, p.Name) and s.target.var.kind in ("pointer", "input", "output"):
            pointer = self._lookup(s.target.var)
            assert isinstance(pointer, Pointer)
            if isinstance(s.value, p.Address):
                store, offsets = self._address(s.value, act)
                if store is not pointer.store:
                    raise Invalid("a pointer changes its array")
            else:
                step = self.value(s.value, act).astype(np.int64)
                offsets = pointer.offsets[act] + (step if s.op == "+=" else -step)
            pointer.offsets[act] = offsets
            return act
        kind = s.target.type
        product = self._product(s.value, act, kind) if s.op in ("+=", "-=") else None
        if product is not None:
            place = self._place(s.target, act)
            wide = s.value.type
            a, b = product
            a = -a if s.op == "-=" else a
            old = self._converted(self._get(place, act), kind, wide)
            self._write(place, self._converted(self._fused(a, b, old), wide, kind), act)
            return act
        value = self.value(s.value, act)
        place = self._place(s.target, act)
        if s.op == "=":
            self._write(place, self._converted(value, s.value.type, kind), act)
            return act
        old = self._get(place, act)
        self._write(place, self._combined(s.op[:-1], old, kind, value, s.value.type), act)
        return act

    def _combined(
        self, op: str, old: Array, kind: p.AnyType, value: Array, given: p.AnyType
    ) -> Array:
        """``old op value``, converted back to `kind`."""
        if isinstance(kind, p.Vector) or isinstance(given, p.Vector):
            return self._vector(op, old, kind, value, given)
        wide = p.common(kind, given) if op not in ("<<", ">>") else p.common(kind, p.INT)
        right = value if op in ("<<", ">>") else self._converted(value, given, wide)
        result = arithmetic(op, self._converted(old, kind, wide), right, wide, self.exact)
        return self._converted(result, wide, kind)

    def _step(self, s: p.Step, act: Array) -> Array:
        if isinstance(s.target, p.Name) and s.target.var.kind in ("pointer", "input", "output"):
            pointer = self._lookup(s.target.var)
            assert isinstance(pointer, Pointer)
            pointer.offsets[act] += 1 if s.op == "++" else -1
            return act
        place = self._place(s.target, act)
        old = self._get(place, act)
        one = np.ones(len(act), np.int32)
        self._write(place, self._combined(s.op[0], old, s.target.type, one, p.INT), act)
        return act

    def _do(self, s: p.Do, act: Array) -> Array:
        self.value(s.value, act)
        return act

    def _if(self, s: p.If, act: Array) -> Array:
        test = self.value(s.test, act).astype(bool)
        return join([self._block(s.yes, act[test]), self._block(s.no, act[~test])])

    def _loop(
        self, test: p.Expr, step: p.Stmt | None, body: list[p.Stmt], act: Array, tested: bool
    ) -> Array:
        here = Round()
        self.rounds.append(here)
        for count in range(MAX_ROUNDS + 1):
            if count == MAX_ROUNDS:
                raise Invalid("a loop does not end")
            if tested or count:
                if not len(act):
                    break
                go_on = self.value(test, act).astype(bool)
                here.left.append(act[~go_on])
                act = act[go_on]
            if not len(act):
                break
            here.skipped = []
            act = self._block(body, act)
            act = join([act, *here.skipped])
            if step is not None and len(act):
                self._statements[type(step)](step, act)
        self.rounds.pop()
        return join(here.left)

    def _for(self, s: p.For, act: Array) -> Array:
        if s.start is not None:
            self._statements[type(s.start)](s.start, act)
        return self._loop(s.test, s.step, s.body, act, True)

    def _while(self, s: p.While, act: Array) -> Array:
        return self._loop(s.test, None, s.body, act, not s.do)

    def _switch(self, s: p.Switch, act: Array) -> Array:
        value = self.value(s.value, act)
        last = len(s.cases) - 1
        parts = []
        for i, body in enumerate(s.cases):
            chosen = (value < 0) | (value >= last) if i == last else value == i
            parts.append(self._block(body, act[chosen]))
        return join(parts)

    def _jump(self, s: p.Jump, act: Array) -> Array:
        if not self.rounds:
            raise Invalid("a jump outside a loop")
        here = self.rounds[-1]
        (here.left if s.kind == "break" else here.skipped).append(act)
        return NOBODY

    def _return(self, s: p.Return, act: Array) -> Array:
        frame = self.frames[-1]
        if s.value is not None:
            if frame.result is None:
                raise Invalid("the kernel returns a value")
            frame.result[act] = self._converted(
                self.value(s.value, act), s.value.type, self._returns[-1]
            )
        frame.returned.append(act)
        if len(self.frames) == 1:
            self.live[act] = False
        return NOBODY

    def _barrier(self, s: p.Barrier, act: Array) -> Array:
        unit = self.grid.of["group" if s.name == "threadgroup_barrier" else "simd"]
        if s.name == "quadgroup_barrier":
            return act
        here = np.zeros(self.n, bool)
        here[act] = True
        reached = np.unique(unit[act])
        if (self.live & ~here & np.isin(unit, reached)).any():
            raise Invalid("a barrier that some threads do not reach")
        groups = np.unique(self.grid.of["group"][act])
        if s.name == "threadgroup_barrier":
            for store in self.shared:
                store.reader[groups] = store.reader_simd[groups] = store.writer[groups] = -1
                store.added[groups] = False
            return act
        for store in self.shared:
            simd = np.append(self.grid.of["simd"], [-1, -1])
            mine = np.isin(simd[store.writer], reached) | (store.writer == -1)
            mine &= np.isin(store.reader_simd, reached) | (store.reader == -1)
            mine &= ~store.added
            store.reader[mine] = store.reader_simd[mine] = store.writer[mine] = -1
        return act

    def _atomic_add(self, s: p.AtomicAdd, act: Array) -> Array:
        place = self._place(p.Index(s.base, s.index), act)
        store = place.store
        kind = s.base.type
        assert isinstance(kind, p.Type)
        value = self._converted(self.value(s.value, act), s.value.type, kind)
        rows, columns = store.rows[act], self._checked(place, act)
        if not store.defined[rows, columns].all():
            raise Invalid("an atomic was never written")
        if (store.writer[rows, columns] != -1).any() or (store.reader[rows, columns] != -1).any():
            raise Invalid("a race with an atomic addition")
        store.added[rows, columns] = True
        sums = store.data.astype(np.int64)
        np.add.at(sums, (rows, columns), value.astype(np.int64))
        low, high = kind.limits
        if kind.kind == "int" and ((sums < low) | (sums > high)).any():
            raise Invalid("an atomic overflows")
        store.data[...] = sums.astype(kind.dtype)
        return act

    def _atomic_store(self, s: p.AtomicStore, act: Array) -> Array:
        value = self._converted(self.value(s.value, act), s.value.type, s.base.type)
        self._write(self._place(p.Index(s.base, s.index), act), value, act)
        return act

    # -- memory ------------------------------------------------------------------------------------

    def _address(self, e: p.Address, act: Array) -> tuple[Store, Array]:
        offset = self.value(e.index, act).astype(np.int64) if e.index is not None else 0
        found = self._lookup(e.base)
        if isinstance(found, Pointer):
            return found.store, found.offsets[act] + offset
        if isinstance(found, Place):
            return found.store, found.columns[act] + offset
        return found, np.zeros(len(act), np.int64) + offset

    def _place(self, e: p.Expr, act: Array) -> Place:
        if isinstance(e, p.Name):
            found = self._lookup(e.var)
            if isinstance(found, Place):
                return Place(found.store, found.columns[act])
            if isinstance(found, Pointer):
                raise Invalid("a pointer is read as a value")
            return Place(found, np.zeros(len(act), np.int64))
        if isinstance(e, (p.Index, p.Deref, p.AtomicLoad)):
            store, columns = self._address(
                p.Address(e.base, None if isinstance(e, p.Deref) else e.index, False), act
            )
            return Place(store, columns)
        if isinstance(e, p.Swizzle):
            inner = self._place(e.value, act)
            letters = ["xyzw".index(c) for c in e.letters]
            if inner.letters is not None:
                letters = [inner.letters[i] for i in letters]
            return Place(inner.store, inner.columns, letters)
        if isinstance(e, p.Component):
            inner = self._place(e.value, act)
            if inner.letters is not None:
                raise Invalid("an index into a swizzle")
            index = self.value(e.index, act).astype(np.int64)
            assert isinstance(e.value.type, p.Vector)
            if ((index < 0) | (index >= e.value.type.lanes)).any():
                raise Invalid("an index outside a vector")
            return Place(inner.store, inner.columns, None, index)
        if isinstance(e, p.MacroUse):
            self.macros.append((e,))
            place = self._place(e.macro.body, act)
            self.macros.pop()
            return place
        raise Invalid(f"{type(e).__name__} is no place")

    def _checked(self, place: Place, act: Array) -> Array:
        columns = place.columns
        if ((columns < 0) | (columns >= place.store.size)).any():
            raise Invalid("an access out of bounds")
        return columns

    def _get(self, place: Place, act: Array) -> Array:
        store = place.store
        rows, columns = store.rows[act], self._checked(place, act)
        if not store.defined[rows, columns].all():
            raise Invalid("a value that was never written is read")
        if store.watched:
            writer = store.writer[rows, columns]
            if ((writer != -1) & (writer != act)).any() or store.added[rows, columns].any():
                raise Invalid("a race: a read beside a write")
            self._note_readers(store, rows, columns, act)
        value = store.data[rows, columns]
        if place.letters is not None:
            value = value[:, place.letters]
            return value[:, 0] if len(place.letters) == 1 else value
        if place.component is not None:
            return np.asarray(value[np.arange(len(act)), place.component])
        return np.asarray(value)

    def _note_readers(self, store: Store, rows: Array, columns: Array, act: Array) -> None:
        for table, own in (
            (store.reader, act), (store.reader_simd, self.grid.of["simd"][act])
        ):  # fmt: skip
            # Several threads of this access may read one element: the first and last that NumPy
            # keeps tell whether they differ.
            before = table[rows, columns]
            table[rows, columns] = own
            last = table[rows, columns]
            table[rows[::-1], columns[::-1]] = own[::-1]
            first = table[rows, columns]
            several = (first != last) | ((before != -1) & (before != own))
            table[rows[several], columns[several]] = -2

    def _write(self, place: Place, value: Array, act: Array) -> None:
        store = place.store
        rows, columns = store.rows[act], self._checked(place, act)
        if store.watched:
            writer, reader = store.writer[rows, columns], store.reader[rows, columns]
            if (
                ((writer != -1) & (writer != act)).any()
                or ((reader != -1) & (reader != act)).any()
                or store.added[rows, columns].any()
                or len(np.unique(rows * store.size + columns)) != len(act)
            ):
                raise Invalid("a race: two threads write, or one beside a read")
            store.writer[rows, columns] = act
        if place.letters is not None:
            if len(place.letters) == 1:
                store.data[rows, columns, place.letters[0]] = value
            else:
                for i, letter in enumerate(place.letters):
                    store.data[rows, columns, letter] = value[:, i]
        elif place.component is not None:
            store.data[rows, columns, place.component] = value
        else:
            store.data[rows, columns] = value
            store.defined[rows, columns] = True
        if not store.defined[rows, columns].all():
            raise Invalid("a component of a vector that was never written is written")

    # -- expressions -------------------------------------------------------------------------------

    def value(self, e: p.Expr, act: Array) -> Array:
        """The expression's value for each active thread."""
        return self._expressions[type(e)](e, act)

    def _converted(self, value: Array, given: p.AnyType, wanted: p.AnyType) -> Array:
        if isinstance(wanted, p.Vector):
            if isinstance(given, p.Vector):
                if given.lanes != wanted.lanes:
                    raise Invalid("vectors of different lengths")
                return convert(value, given.base, wanted.base, self.exact)
            one = convert(value, given, wanted.base, self.exact)
            return np.repeat(one[:, None], wanted.lanes, axis=1)
        assert isinstance(given, p.Type)
        return convert(value, given, wanted, self.exact)

    def _read(self, e: p.Expr, act: Array) -> Array:
        if isinstance(e, (p.Swizzle, p.Component)) and not _is_place(e.value):
            value = self.value(e.value, act)
            if isinstance(e, p.Component):
                index = self.value(e.index, act).astype(np.int64)
                return np.asarray(value[np.arange(len(act)), index])
            letters = ["xyzw".index(c) for c in e.letters]
            return value[:, letters[0]] if len(letters) == 1 else value[:, letters]
        return self._get(self._place(e, act), act)

    def _attribute(self, e: p.Attr, act: Array) -> Array:
        key = f"{e.name}.{e.axis}" if e.axis else e.name
        return self.grid.of[key][act].astype(np.uint32)

    def _unary(self, e: p.Un, act: Array) -> Array:
        value = self.value(e.value, act)
        if e.op == "!":
            return ~value.astype(bool)
        if isinstance(e.type, p.Vector):
            return np.stack(
                [arithmetic("neg", value[:, i], value[:, i], e.type.base, self.exact)
                 for i in range(e.type.lanes)], axis=1,
            )  # fmt: skip
        value = self._converted(value, e.value.type, e.type)
        assert isinstance(e.type, p.Type)
        return arithmetic("neg" if e.op == "-" else "not", value, value, e.type, self.exact)

    def _binary(self, e: p.Bin, act: Array) -> Array:
        if e.op in ("&&", "||"):
            left = self.value(e.left, act).astype(bool)
            more = left if e.op == "&&" else ~left
            result = left.copy()
            result[more] = self.value(e.right, act[more]).astype(bool)
            return result
        if e.op in ("+", "-") and (fused := self._sum(e, act)) is not None:
            return fused
        a, b = self.value(e.left, act), self.value(e.right, act)
        left_type, right_type = e.left.type, e.right.type
        if isinstance(left_type, p.Vector) or isinstance(right_type, p.Vector):
            return self._vector(e.op, a, left_type, b, right_type)
        if e.op in ("<<", ">>"):
            wide = p.common(left_type, p.INT)
            return arithmetic(e.op, self._converted(a, left_type, wide), b, wide, self.exact)
        wide = p.common(left_type, right_type)
        return arithmetic(
            e.op, self._converted(a, left_type, wide), self._converted(b, right_type, wide), wide,
            self.exact,
        )  # fmt: skip

    # -- products that are summed ------------------------------------------------------------------

    def _sum(self, e: p.Bin, act: Array) -> Array | None:
        """A sum or difference with a product in it, the left one if there are two."""
        for mine, other in ((e.left, e.right), (e.right, e.left)):
            product = self._product(mine, act, other.type)
            if product is None:
                continue
            a, b = product
            c = self._converted(self.value(other, act), other.type, mine.type)
            if e.op == "-" and mine is e.left:
                c = -c
            elif e.op == "-":
                a = -a
            return self._fused(a, b, c)
        return None

    def _fused(self, a: Array, b: Array, c: Array) -> Array:
        return multiply_add(a, b, c, self.exact)

    def _product(self, e: p.Expr, act: Array, other: p.AnyType) -> tuple[Array, Array] | None:
        """The operands of a product of floats, or of vectors of them, that is fused with a sum.

        Args:
            other: the type of what it is added to; the sum must have that of the product.
        """
        if self.exact or not self.program.contract or not _is_float(e.type):
            return None
        if isinstance(e.type, p.Type) and isinstance(other, p.Vector):
            return None
        if isinstance(e.type, p.Vector) and isinstance(other, p.Vector) and e.type != other:
            return None
        return self._operands(e, act, e.type)

    def _operands(self, e: p.Expr, act: Array, kind: p.AnyType) -> tuple[Array, Array] | None:
        if e.type != kind:
            return None
        if isinstance(e, p.MacroUse):
            self.macros.append((e,))
            found = self._operands(e.macro.body, act, kind)
            self.macros.pop()
            return found
        if isinstance(e, p.Param):
            (use,) = self.macros.pop()
            found = self._operands(use.args[e.place], act, kind)
            self.macros.append((use,))
            return found
        if isinstance(e, p.Cast):
            return self._operands(e.value, act, kind)
        if isinstance(e, p.Un) and e.op == "-":
            found = self._operands(e.value, act, kind)
            return (-found[0], found[1]) if found is not None else None
        if not isinstance(e, p.Bin) or e.op != "*":
            return None
        if self._constant(e.left) and self._constant(e.right):
            return None
        sides = [self._converted(self.value(s, act), s.type, kind) for s in (e.left, e.right)]
        return sides[0], sides[1]

    def _constant(self, e: p.Expr) -> bool:
        """Whether a compiler works an operand out when it compiles."""
        if isinstance(e, p.Lit):
            return True
        if isinstance(e, p.Name):
            return e.var.kind == "template" or e.var.id in self.constants
        if isinstance(e, (p.Un, p.Cast)):
            return self._constant(e.value)
        if isinstance(e, p.Bin):
            return self._constant(e.left) and self._constant(e.right)
        if isinstance(e, p.Cond):
            return all(self._constant(part) for part in (e.test, e.yes, e.no))
        if isinstance(e, p.MacroUse):
            self.macros.append((e,))
            found = self._constant(e.macro.body)
            self.macros.pop()
            return found
        if isinstance(e, p.Param):
            (use,) = self.macros.pop()
            found = self._constant(use.args[e.place])
            self.macros.append((use,))
            return found
        return False

    def _vector(self, op: str, a: Array, left: p.AnyType, b: Array, right: p.AnyType) -> Array:
        kind = left if isinstance(left, p.Vector) else right
        a, b = self._converted(a, left, kind), self._converted(b, right, kind)
        parts = [arithmetic(op, a[:, i], b[:, i], kind.base, self.exact) for i in range(kind.lanes)]
        narrow = [convert(q, p.common(kind.base, kind.base), kind.base, self.exact) for q in parts]
        return np.stack(narrow, axis=1)

    def _cond(self, e: p.Cond, act: Array) -> Array:
        test = self.value(e.test, act).astype(bool)
        result = np.zeros((len(act), *_tail(e.type)), e.type.dtype)
        for side, chosen in ((e.yes, test), (e.no, ~test)):
            if chosen.any():
                result[chosen] = self._converted(self.value(side, act[chosen]), side.type, e.type)
        return result

    def _cast(self, e: p.Cast, act: Array) -> Array:
        return self._converted(self.value(e.value, act), e.value.type, e.type)

    def _function(self, e: p.Fn, act: Array) -> Array:
        return library(e, [self.value(a, act) for a in e.args], self.exact)

    def _sync(self, e: p.Sync, act: Array) -> Array:
        args = [self.value(a, act) for a in e.args]
        rows, lanes = self.grid.of["simd"][act], self.grid.of["thread_index_in_simdgroup"][act]
        return operate(e, args, rows, lanes, self.grid.simdgroups, self.exact)

    def _strided(self, e: p.Strided, act: Array) -> Array:
        return self._get(self._place(p.Index(e.base, e.index), act), act)

    def _shape(self, e: p.ShapeOf, act: Array) -> Array:
        for var, shape, _ in self.program.inputs:
            if var is e.base:
                return np.full(len(act), shape[e.axis], np.int32)
        raise Invalid("no such input")

    def _post_step(self, e: p.PostStep, act: Array) -> Array:
        place = self._place(p.Name(e.var), act)
        old = self._get(place, act).copy()
        one = np.ones(len(act), np.int32)
        self._write(place, self._combined(e.op[0], old, e.var.type, one, p.INT), act)
        return old

    def _param(self, e: p.Param, act: Array) -> Array:
        # An argument belongs to the text around the macro's use.
        (use,) = self.macros.pop()
        value = self.value(use.args[e.place], act)
        self.macros.append((use,))
        return value

    def _macro(self, e: p.MacroUse, act: Array) -> Array:
        self.macros.append((e,))
        value = self.value(e.macro.body, act)
        self.macros.pop()
        return value

    # -- calls -------------------------------------------------------------------------------------

    _returns: list[p.AnyType]

    def _call(self, e: p.Call, act: Array) -> Array:
        f = e.function
        if not hasattr(self, "_returns"):
            self._returns = []
        bound: list[tuple[p.Var, Store | Place | Pointer]] = []
        for var, mode, arg in zip(f.params, f.modes, e.args, strict=True):
            if mode == "ref":
                place = self._place(arg, act)
                columns = np.zeros(self.n, np.int64)
                columns[act] = place.columns
                bound.append((var, Place(place.store, columns)))
            elif mode == "pointer":
                assert isinstance(arg, p.Address)
                store, offsets = self._address(arg, act)
                every = np.zeros(self.n, np.int64)
                every[act] = offsets
                bound.append((var, Pointer(store, every)))
            else:
                given = self._converted(self.value(arg, act), arg.type, var.type)
                made = Store(var.type, 1, self.lanes, self.n)
                self._write(Place(made, np.zeros(len(act), np.int64)), given, act)
                bound.append((var, made))
        for var, number in f.template_vars:
            value = np.array([[number]], var.type.dtype)
            bound.append((var, Store(var.type, 1, self.nothing, 1, data=value)))
        copies = self.snapshots.get(id(f), {}) if f.capture == "=" else {}
        hidden = {key: self.env[key] for key in copies}
        self.env.update(copies)
        for var, what in bound:
            self.env[var.id] = what
        result = np.zeros((self.n, *_tail(f.type)), f.type.dtype)
        frame = Frame(result)
        self.frames.append(frame)
        self._returns.append(f.type)
        rounds, self.rounds = self.rounds, []
        macros, self.macros = self.macros, []
        end = self._block(f.body, act)
        self.macros, self.rounds = macros, rounds
        self._returns.pop()
        self.frames.pop()
        self.env.update(hidden)
        if f.type is not p.VOID and len(end):
            raise Invalid("a function ends without a value")
        return result[act]


def _is_place(e: p.Expr) -> bool:
    """Whether an expression names memory."""
    if isinstance(e, p.Swizzle):
        return _is_place(e.value)
    return isinstance(e, (p.Name, p.Index, p.Deref))


def _is_float(kind: p.AnyType) -> bool:
    return (kind.base if isinstance(kind, p.Vector) else kind) is p.FLOAT


def _tail(kind: p.AnyType) -> tuple[int, ...]:
    return (kind.lanes,) if isinstance(kind, p.Vector) else ()
