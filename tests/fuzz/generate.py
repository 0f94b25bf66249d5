"""Whole programs: inputs, outputs, helpers, the body's frame and the launches."""

from __future__ import annotations

from collections.abc import Callable

from . import program as p
from .choices import HELD, Context, Scope, p_kind, spanned
from .memory import BINS
from .program import (
    BOOL,
    CHAR,
    FLOAT,
    HALF,
    INT,
    LONG,
    SHORT,
    UCHAR,
    UINT,
    ULONG,
    USHORT,
    Expr,
    Stmt,
    Type,
    Var,
    Vector,
)  # fmt: skip
from .statements import FLOATS, SLOTS, Statements

MAX_THREADS = 1500


class Generator(Statements):
    """Makes one program: ``Generator(seed).program()``.

    Args:
        seed: equal seeds give equal programs.
        avoid: features (`choices.FEATURES`) that the program must not have.
    """

    def program(self) -> p.Program:
        """A program whose result is, as far as the generator knows, defined."""
        rng = self.rng
        self.kind = rng.choice(("flat", "simd", "simd", "group", "group"))
        self.exact = self.odds(0.7)
        contract = self.exact or self.odds(0.8)
        self.contiguous = not self.has("strided")
        self._choose_types()
        self.header: list[p.Node] = []
        template = self._template()
        launches = self._launches()
        inputs = self._inputs()
        self._outputs()
        kernel_scope = self.scopes
        self._header()
        self.scopes = [*kernel_scope, Scope()]
        body = self._frame()
        plain = Context(sync=self.kind != "flat", barrier=self.kind == "group")
        for _ in range(rng.randint(4, 10)):
            body += self.statements(plain, 1)
            if self.odds(0.06):
                body += self._move_input(plain)
        body += self._results()
        return p.Program(
            self.seed, self.header, body, inputs,
            list(zip(self.outputs, (SLOTS, FLOATS, 0), strict=True)), template, launches,
            self.contiguous, self.exact, rng.choice((0, -3)), self.kind, contract,
        )  # fmt: skip

    def _choose_types(self) -> None:
        rng = self.rng
        self.types = [INT, INT, UINT, FLOAT, BOOL]
        if self.has("narrow"):
            self.types += rng.sample((UCHAR, SHORT, USHORT, CHAR), 2)
        if self.has("half"):
            self.types.append(HALF)
        if self.has("long"):
            self.types.append(rng.choice((LONG, ULONG)))
        if self.has("vectors"):
            bases = [INT, UINT, FLOAT] + [HALF] * self.has("half")
            self.vector_types = [
                Vector(b, n) for b in rng.sample(bases, 2) for n in rng.sample((2, 3, 4), 2)
            ]

    def _template(self) -> list[tuple[Var, object]]:
        found: list[tuple[Var, object]] = []
        if self.has("dtype"):
            kind = self.rng.choice([t for t in self.types if t in (INT, FLOAT, HALF)])
            self.spelled[kind] = "T"
            found.append((Var("T", kind, "type"), kind))
        if self.has("templates"):
            n = self.rng.randint(-3, 20)
            var = Var("N", INT, "template", span=(n, n), uniform=True, const=True)
            flag = Var("FLAG", BOOL, "template", span=(0, 1), uniform=True, const=True)
            found += [(var, n), (flag, self.odds(0.5))]
            for v in (var, flag):
                self.declare(v)
                self.template_ints.append(v)
        return found

    # -- launches ----------------------------------------------------------------------------------

    def _launches(self) -> list[p.Launch]:
        rng = self.rng
        self.dims = rng.choice((1, 1, 1, 2, 3))
        found = []
        groups = [self._threadgroup()] * 2
        if self.odds(0.4):  # often another form of launch, so compiled anew
            groups[1] = self._threadgroup()
        for data in range(3):
            group = groups[min(data, 1)]
            while True:
                grid = [1, 1, 1]
                for a in range(self.dims):
                    grid[a] = max(
                        1, rng.choice((group[a], 2 * group[a], rng.randint(1, 3 * group[a] + 1)))
                    )
                if grid[0] * grid[1] * grid[2] <= MAX_THREADS:
                    break
            found.append(p.Launch((grid[0], grid[1], grid[2]), group, data))
        sizes = []
        for launch in found:
            least = most = 1
            for g, t in zip(launch.grid, launch.threadgroup, strict=True):
                t = min(g, t)
                least, most = least * (g % t or t), most * t
            sizes.append((least, most))
        self.smallest_group = min(least for least, _ in sizes)
        self.group_threads = max(most for _, most in sizes)
        self.threads = max(x.grid[0] * x.grid[1] * x.grid[2] for x in found)
        return found

    def _threadgroup(self) -> tuple[int, int, int]:
        rng = self.rng
        if self.dims == 1:
            common = (32, 64, 128, 96, 33, 48, 256, 1024, rng.randint(1, 128), rng.randint(1, 40))
            return rng.choice(common), 1, 1
        while True:
            x = rng.choice((1, 2, 4, 5, 8, 16, 32, 64, rng.randint(1, 40)))
            y = rng.choice((1, 2, 3, 4, 8, rng.randint(1, 9)))
            z = rng.choice((1, 2, 3)) if self.dims == 3 else 1
            if x * y * z <= 256:
                return x, y, z

    # -- arguments ---------------------------------------------------------------------------------

    def _inputs(self) -> list[tuple[Var, tuple[int, ...], str]]:
        rng = self.rng
        found: list[tuple[Var, tuple[int, ...], str]] = []
        kinds = [INT, FLOAT]
        others = [t for t in self.types if t not in (INT, FLOAT)]
        if self.odds(0.6):
            kinds.append(rng.choice(others))
        for name, kind in zip("xwu", kinds, strict=False):
            shape: tuple[int, ...] = (rng.choice((5, 16, 37, 64, 97)),)
            if self.odds(0.3) or not self.contiguous:
                shape = (rng.randint(2, 6), rng.randint(2, 9))
            span = {INT: (-50, 50), FLOAT: (-30, 30), HALF: (-20, 20)}.get(kind, (0, 60))
            if kind is BOOL:
                span = (0, 1)
            size = 1
            for n in shape:
                size *= n
            var = self.declare(Var(name, kind, "input", size, span=span, const=True))
            strided = not self.contiguous or self.odds(0.15)
            found.append((var, shape, "strided" if strided else "plain"))
        if self.odds(0.5):
            kind = rng.choice((INT, FLOAT, UINT))
            low = 0 if kind is UINT else -20
            var = self.declare(Var("s", kind, "scalar", span=(low, 20), uniform=True, const=True))
            found.append((var, (), "0d"))
        return found

    def _outputs(self) -> None:
        self.outputs = [
            Var("y", INT, "output"), Var("z", FLOAT, "output"), Var("hits", INT, "output"),
        ]  # fmt: skip
        self.taken = {"x", "w", "u", "s", "y", "z", "hits"}

    # -- the header --------------------------------------------------------------------------------

    def _header(self) -> None:
        self.scopes = [Scope()]
        spelled, self.spelled = self.spelled, {}
        numbers, self.template_ints = self.template_ints, []
        if self.has("macros"):
            for i in range(self.rng.randint(0, 2)):
                self.header.append(self.make_macro(f"H_{i}", named=False))
        if self.has("tables") and self.odds(0.6):
            kind = self.rng.choice((INT, FLOAT))
            values = [self.rng.randint(-40, 40) for _ in range(self.rng.randint(2, 8))]
            var = Var("TABLE", kind, "table", len(values), span=(-40, 40), const=True)
            self.declare(var)
            self.header.append(p.Table(var, list(values)))
        if self.has("helpers"):
            for i in range(self.rng.randint(1, 3)):
                self._helper(f"h{i}")
        if self.has("sync_helpers") and self.kind == "group":
            self._meeting("gather")
        self.spelled, self.template_ints = spelled, numbers
        tables = self.scopes[0].names
        self.taken |= set(tables)
        for var in tables.values():
            self.late_tables.append(var)

    def __init__(self, seed: int, avoid: frozenset[str] = frozenset()) -> None:
        super().__init__(seed, avoid)
        self.late_tables: list[Var] = []

    def _helper(self, name: str) -> None:
        """A function of the header, by value, reference or pointer, perhaps a template."""
        rng = self.rng
        kind: p.AnyType = rng.choice([*self.types, p.VOID])
        f = p.Function(name, kind, [], [])
        f.synchronises = self.has("sync_helpers") and self.kind != "flat" and self.odds(0.7)
        self.scopes.append(Scope())
        shape = rng.random()
        if shape < 0.25 or kind is p.VOID:
            t = self.any_type()
            mode = rng.choice(("ref", "pointer"))
            size = rng.choice((1, 2, 3)) if mode == "pointer" else 0
            var = Var("r", t, mode, size, "thread", HELD[t])
            if mode == "pointer" and self.odds(0.3):
                var.const = True
            f.params.append(self.declare(var))
            f.modes.append(mode)
        elif shape < 0.45:
            t, space = rng.choice(((INT, "device"), (FLOAT, "device"), (INT, "constant")))
            span = (-50, 50)
            var = Var("g", t, "pointer", 4, space, span, const=True)
            f.params.append(self.declare(var))
            f.modes.append("pointer")
        self._parameters(f, refs=False)
        if self.has("templates") and self.odds(0.4):
            q = Var("Q", INT, "template", span=(0, 9), uniform=True, const=True)
            number = rng.randint(0, 9)
            q.span = (number, number)
            self.declare(q)
            f.template, f.explicit, f.template_vars = (
                "template <int Q>",
                f"<{number}>",
                [(q, number)],
            )
        elif self.odds(0.2) and f.modes and f.modes[-1] == "value":
            f.template = "template <typename Q>"
            f.params[-1].spelling = "Q"
            if f.type is f.params[-1].type:
                f.spelling = "Q"
        ctx = Context(uniform=False, sync=f.synchronises, function=f, depth=2, loops=1, post=False)
        early: list[Stmt] = []
        if kind is p.VOID and self.odds(0.3):
            early.append(p.If(self.boolean(1, ctx), [p.Return()], [], braces=False))
        body = early + self.statements(ctx, rng.randint(0, 3))
        if isinstance(kind, Type) and kind is not p.VOID:
            if self.odds(0.4):
                soon = self.held(self.expr(kind, 1, ctx), kind)
                body.append(p.If(self.boolean(2, ctx), [p.Return(soon)], [], braces=self.odds(0.5)))
            body.append(p.Return(self.held(self.expr(kind, 2, ctx), kind)))
        f.body = body
        self.scopes.pop()
        self.functions.append(f)
        self.header.append(f)

    def _meeting(self, name: str) -> None:
        """A helper with a barrier: each thread hands its value to a neighbour."""
        kind = self.rng.choice((INT, FLOAT))
        t = Var("t", kind, "pointer", 1, "threadgroup", HELD[kind])
        here, n = Var("l", UINT), Var("n", UINT)
        value = Var("value", kind, span=HELD[kind])
        f = p.Function(name, kind, [t, here, n, value], ["pointer", "value", "value", "value"])
        f.synchronises = f.barriers = True
        one = p.Lit(self.rng.randint(1, 5), UINT)
        other = p.Bin("%", p.Bin("+", p.Name(here), one, UINT), p.Name(n), UINT)
        f.body = [
            p.Assign(p.Index(t, p.Name(here)), "=", p.Name(value)), p.Barrier(),
            p.Return(p.Index(t, other)),
        ]  # fmt: skip
        self.functions.append(f)
        self.header.append(f)

    # -- the body's frame --------------------------------------------------------------------------

    def _frame(self) -> list[Stmt]:
        """Positions, threadgroup memory and pointers, before anything else."""
        rng = self.rng
        for var in self.late_tables:
            self.scopes[0].names.setdefault(var.name, var)
        body: list[Stmt] = []

        def constant(name: str, value: Expr, high: int) -> Var:
            var = Var(name, UINT, span=(0, high), locked=True, const=True)
            self.declare(var)
            self.taken.add(name)
            spec = rng.choice(("", "const "))
            if self.odds(0.2):
                var.spelling = "auto"
            body.append(p.Decl(var, value, spec=spec))
            return var

        def axis(name: str, letter: str) -> Expr:
            return p.Attr(name, letter)

        at, size = "thread_position_in_grid", "threads_per_grid"
        index: Expr = axis(at, "x")
        if self.dims == 2:
            row = p.Bin("*", axis(at, "y"), axis(size, "x"), UINT)
            index = p.Bin("+", row, index, UINT)
        elif self.dims == 3:
            plane = p.Bin("*", axis(at, "z"), axis(size, "y"), UINT)
            row = p.Bin("*", p.Bin("+", plane, axis(at, "y"), UINT), axis(size, "x"), UINT)
            index = p.Bin("+", row, index, UINT)
        self.gid = constant("i", index, self.threads - 1)
        self.lid = constant("l", p.Attr("thread_index_in_threadgroup"), self.group_threads - 1)
        if self.kind == "group":
            n: Expr = p.Attr("threads_per_threadgroup", "x")
            for letter in "yz"[: self.dims - 1]:
                n = p.Bin("*", n, axis("threads_per_threadgroup", letter), UINT)
            self.group_size = constant("n", n, self.group_threads)
            self.group_size.uniform = True
        if self.has("rows"):
            body += self._rows(constant)
        if self.odds(0.5):
            constant("lane", p.Attr("thread_index_in_simdgroup"), 31)
        if self.has("post"):
            for i in range(2):
                spare = Var(f"k{i}", rng.choice((INT, UINT)), locked=True)
                body.append(p.Decl(spare, p.Lit(rng.randint(10, 30), p_kind(spare))))
                self.spare.append(spare)
        self.moved = self.has("moved")
        if self.moved:
            for out, per in zip(self.outputs[:2], (SLOTS, FLOATS), strict=True):
                step = p.Bin("*", p.Name(self.gid), p.Lit(per, INT), UINT)
                body.append(p.Assign(p.Name(out), "+=", step))
        if self.kind == "group":
            body += self._memory()
        return body

    def _rows(self, constant: Callable[[str, Expr, int], Var]) -> list[Stmt]:
        """x divided by the length of a row: which row it is, the place in it, and loads there."""
        rng = self.rng
        length = rng.choice((2, 3, 4, 7, 16, 20, 32, 33, 64, rng.randint(1, 40)))
        position: Expr = p.Attr("thread_position_in_grid", "x")
        most = self.threads - 1
        if self.odds(0.7):
            position = (
                p.Name(self.gid) if self.dims == 1 else p.Name(constant("px", position, most))
            )
        by: Expr = p.Lit(length, rng.choice((INT, UINT)))
        if self.odds(0.7):
            part = rng.randint(0, length)
            if self.odds(0.5):
                by = p.Bin("+", p.Lit(part, UINT), p.Lit(length - part, UINT), UINT)
            by = p.Name(constant("rl", by, length))
        row = constant("q0", p.Bin("/", position, by, UINT), most // length)
        place = constant("r0", p.Bin("%", position, by, UINT), length - 1)
        self.row_tests = [
            p.Bin(rng.choice(("<", "==", ">", "!=")), p.Name(row), p.Lit(n, UINT), BOOL)
            for n in (0, 1, 2)
        ]
        out: list[Stmt] = []
        for v in [v for v in self.visible() if v.kind == "input" and v.size > 1]:
            index: Expr = p.Name(place)
            if self.odds(0.5):
                index = p.Bin("+", index, p.Lit(rng.randint(0, 3), INT), UINT)
            if self.contiguous and length + 3 <= v.size and isinstance(v.type, Type):
                read = Var(self.fresh(), v.type, span=v.span, const=True)
                self.declare(read)
                out.append(p.Decl(read, p.Index(v, index), spec="const "))
        return out

    def _memory(self) -> list[Stmt]:
        rng = self.rng
        body: list[Stmt] = []
        kinds = [t for t in self.types if t is not BOOL]
        for i in range(rng.randint(1, 2 + self.has("several"))):
            kind = rng.choice(kinds)
            span = (0, 200) if kind.kind == "uint" else (-100, 100)
            var = Var(f"t{i}", kind, "shared", self.group_threads, "threadgroup", span)
            self.declare(var)
            body.append(p.Decl(var))
            self.shared.append(var)
            self.state[var.id] = "own"
            value = self.fit(self.expr(kind, 1, Context(sync=False)), kind, *span)
            body.append(p.Assign(p.Index(var, p.Name(self.lid)), "=", value))
        if self.odds(0.3):
            var = Var("one", rng.choice(kinds), "shared", 0, "threadgroup", (0, 100))
            self.declare(var)
            body.append(p.Decl(var))
            self.single.append(var)
            self.state[var.id] = "none"
        if self.has("atomics") and self.odds(0.7):
            var = Var(
                "bins", UINT, "shared", BINS, "threadgroup", UINT.limits, spelling="atomic_uint"
            )
            body.append(p.Decl(var))
            self.bins.append(var)
            self.state[var.id] = "none"
        return body

    def _move_input(self, ctx: Context) -> list[Stmt]:
        """``x += e``: the body moves an input's pointer."""
        found = [v for v in self.visible() if v.kind == "input" and v.size > 4]
        if not self.contiguous or not found:
            return []
        v = self.rng.choice(found)
        step = self.rng.randint(1, 3)
        uniform = self.odds(0.5)
        kind = UINT
        e = self.uniform(kind, 1, ctx) if uniform else self.expr(kind, 1, ctx)
        if not uniform:
            v.locked = True  # from now on it differs from thread to thread
        v.size -= step
        return [p.Assign(p.Name(v), "+=", self.fit(e, kind, 0, step))]

    def _results(self) -> list[Stmt]:
        """What the variables hold at the end."""
        body: list[Stmt] = []
        values: list[Expr] = []
        floats: list[Expr] = []
        for v in self.scopes[-1].names.values():
            if v.kind == "array":
                values += [self.held(spanned(p.Index(v, p.Lit(i, INT)), v.span), INT)
                           for i in range(min(v.size, 3))]  # fmt: skip
            elif v.kind in ("value", "ref") and isinstance(v.type, Vector):
                letter = self.rng.choice("xyzw"[: v.type.lanes])
                part = spanned(p.Swizzle(p.Name(v), letter), v.span)
                values.append(self.held(part, INT))
            elif v.kind == "value" and not v.locked:
                name = spanned(p.Name(v), v.span)
                (floats if v.type is FLOAT else values).append(
                    name if v.type is FLOAT else self.held(name, INT)
                )
        self.rng.shuffle(values)
        for c in range(SLOTS):
            mine = values[c::SLOTS]
            if mine:
                total = mine[0]
                for e in mine[1:]:
                    total = p.Bin("^", total, e, INT)
                body.append(p.Assign(self.slot(False, c), "=", total))
        for c, e in enumerate(floats[:FLOATS]):
            body.append(p.Assign(self.slot(True, c), "=", e))
        return body
