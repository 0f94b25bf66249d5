"""Random declarations: variables, arrays, pointers, references, tables, lambdas, macros."""

from __future__ import annotations

from . import program as p
from .choices import HELD, Context, Scope, p_kind, spanned
from .expressions import Expressions
from .program import BOOL, CHAR, FLOAT, INT, UCHAR, UINT, Expr, Stmt, Type, Var


class Declarations(Expressions):
    """Each method gives the statements that one kind of declaration takes."""

    # -- declarations ------------------------------------------------------------------------------

    def any_type(self) -> Type:
        return self.rng.choice(self.types)

    def decl(self, ctx: Context) -> list[Stmt]:
        """A variable, of a scalar or vector type, with or without an initial value."""
        rng = self.rng
        if self.vector_types and self.odds(0.2):
            kind = rng.choice(self.vector_types)
            value = self.vector(kind, 2, ctx)
            var = self.declare(Var(self.fresh(value), kind, span=value.span))
            return [p.Decl(var, value, style=rng.choice("==("))]
        kind1 = self.any_type()
        if self.odds(0.1):
            return self.decl_later(kind1, ctx)
        if self.odds(0.15):
            return self.decl_several(kind1, ctx)
        uniform = ctx.uniform and self.odds(0.25)
        value = (self.uniform if uniform else self.expr)(kind1, 2 + self.odds(0.3), ctx)
        var = Var(self.fresh(value), kind1, span=HELD[kind1], uniform=uniform)
        var.spelling = self.spelled.get(kind1, "") if self.odds(0.6) else ""
        spec = ""
        if self.odds(0.2):
            spec, var.const = "const ", True
            var.span = value.span
        style = rng.choice("====({")
        # `int a(b);` and `T(a)` parse as declarations of functions where b is a type's name.
        if style == "(" and not isinstance(value, p.Lit):
            style = "="
        if self.has("auto") and self.odds(0.2) and style == "=":
            var.spelling = "auto"
        self.declare(var)
        return [p.Decl(var, value, style=style, spec=spec)]

    def decl_later(self, kind: Type, ctx: Context) -> list[Stmt]:
        """Declared without a value, assigned on both sides of a branch."""
        test = self.expr(BOOL, 2, ctx)
        a, b = self.expr(kind, 2, ctx), self.expr(kind, 1, ctx)
        var = Var(self.fresh(p.Cond(test, a, b)), kind, span=HELD[kind])
        self.declare(var)
        name = p.Name(var)
        return [p.Decl(var), p.If(test, [p.Assign(name, "=", a)], [p.Assign(name, "=", b)],
                                  braces=False)]  # fmt: skip

    def decl_several(self, kind: Type, ctx: Context) -> list[Stmt]:
        parts = []
        for _ in range(self.rng.randint(2, 3)):
            value = self.expr(kind, 1 + self.odds(0.3), ctx)
            var = self.declare(Var(self.fresh(value), kind, span=HELD[kind]))
            parts.append(p.Decl(var, value))
        return [p.Decls(parts)]

    def decl_array(self, ctx: Context) -> list[Stmt]:
        rng = self.rng
        kind = self.any_type()
        size = rng.choice((2, 3, 4, 5, 8))
        if self.odds(0.5):
            count = size if self.odds(0.7) else rng.randint(1, size)
            values = [self.expr(kind, 1, ctx) for _ in range(count)]
            probe = p.Fn("", values, kind)
            var = self.declare(Var(self.fresh(probe), kind, "array", size, span=HELD[kind]))
            return [p.Decl(var, values=values)]
        k = Var(f"k_{self.count}", rng.choice((INT, UINT)), span=(0, size - 1), locked=True)
        self.count += 1
        self.scopes.append(Scope({k.name: k}))
        value = self.expr(kind, 1, ctx.deeper(sync=False))
        self.scopes.pop()
        var = Var(self.fresh(value), kind, "array", size, span=HELD[kind])
        self.declare(var)
        return [p.Decl(var), self.counted(k, size, [p.Assign(p.Index(var, p.Name(k)), "=", value)])]

    def counted(self, k: Var, size: int, body: list[Stmt]) -> p.For:
        """``for (k = 0; k < size; ++k)``."""
        zero, bound = p.Lit(0, p_kind(k)), p.Lit(size, p_kind(k))
        return p.For(p.Decl(k, zero), p.Bin("<", p.Name(k), bound, BOOL),
                     p.Step(p.Name(k), "++", self.odds(0.5)), body)  # fmt: skip

    def decl_pointer(self, ctx: Context) -> list[Stmt]:
        rng = self.rng
        choices = [v for v in self.visible()
                   if (v.kind == "array" or (v.kind == "input" and self.contiguous)
                       or v.kind == "table") and v.size > 1]  # fmt: skip
        shared = [v for v in self.visible() if v.kind == "shared" and v.size
                  and v.spelling[:6] != "atomic"]  # fmt: skip
        if shared and self.odds(0.4):
            base = rng.choice(shared)
            own = self.odds(0.6)
            index = spanned(p.Name(self.lid), self.lid.span) if own else None
            value = p.Address(base, index, own and self.odds(0.5))
            var = Var(self.fresh(value), base.type, "pointer", base.size if not own else 1,
                      "threadgroup", base.span, target=base, own=own, const=not own)  # fmt: skip
            if not own:
                var.size = self.smallest_group
        elif choices:
            base = rng.choice(choices)
            offset = rng.randint(0, base.size - 1)
            index = self.fit(self.expr(UINT, 1, ctx), UINT, 0, offset) if offset else None
            value = p.Address(base, index, index is not None and self.odds(0.4))
            space = {"array": "thread", "input": "device", "table": "constant"}[base.kind]
            const = base.kind != "array"
            var = Var(self.fresh(value), base.type, "pointer", base.size - offset, space, base.span,
                      target=base, const=const)  # fmt: skip
            if base.kind == "input" and base.type is CHAR:
                var.spelling = "int8_t"  # as the argument is declared
        else:
            return self.decl_array(ctx)
        self.declare(var)
        spec = "const " if var.const and var.space != "constant" else ""
        return [p.Decl(var, value, spec=spec)]

    def decl_ref(self, ctx: Context) -> list[Stmt]:
        rng = self.rng
        choices: list[Expr] = []
        target: Var | None = None
        own = False
        space = "thread"
        for v in self.visible():
            if v.const or v.locked or v.uniform or not isinstance(v.type, Type):
                continue
            if v.kind == "value":
                choices.append(p.Name(v))
            elif v.kind == "array":
                choices.append(p.Index(v, self.index(v.size, ctx)))
        place: Expr
        shared = [v for v in self.visible() if v.kind == "shared" and v.size
                  and v.spelling[:6] != "atomic"]  # fmt: skip
        if shared and self.odds(0.3) and ctx.function is None:
            base = rng.choice(shared)
            place, target, own, space = p.Index(base, p.Name(self.lid)), base, True, "threadgroup"
        elif choices:
            place = rng.choice(choices)
        else:
            return self.decl(ctx)
        kind = place.type
        assert isinstance(kind, Type)
        span = target.span if target else HELD[kind]
        var = Var(self.fresh(place), kind, "ref", 0, space, span, target=target, own=own)
        self.declare(var)
        return [p.Decl(var, place)]

    def decl_table(self, ctx: Context) -> list[Stmt]:
        kind = self.rng.choice([t for t in (INT, FLOAT, UCHAR, UINT) if t in self.types] or [INT])
        low, high = (0, 50) if kind.kind == "uint" else (-50, 50)
        values = [self.rng.randint(low, high) for _ in range(self.rng.randint(2, 8))]
        var = Var(self.fresh(), kind, "table", len(values), span=(low, high), const=True)
        self.declare(var)
        head = self.rng.choice(("const", "constexpr"))
        return [p.TableDecl(p.Table(var, list(values), head))]

    def decl_lambda(self, ctx: Context) -> list[Stmt]:
        rng = self.rng
        self.count += 1
        name = f"f_{self.count}"
        kind = rng.choice([*self.types, p.VOID])
        copies = self.has("copies")
        f = p.Function(name, kind, [], [], capture="=" if copies else "&")
        f.synchronises = self.has("sync_lambdas") and ctx.sync
        self.scopes.append(Scope())
        self._parameters(f, refs=self.odds(0.3))
        inner = ctx.deeper(
            function=f, sync=f.synchronises, barrier=False, uniform=False, loop="", post=False
        )
        body: list[Stmt] = []
        if not copies and (kind is p.VOID or self.odds(0.4)):
            for _ in range(rng.randint(1, 2)):
                body += self.assign(inner)
            f.pure = False
        if kind is not p.VOID:
            if self.odds(0.2):
                test = self.expr(BOOL, 1, inner)
                body.append(
                    p.If(test, [p.Return(self.exactly(self.expr(kind, 1, inner), kind))], [])
                )
            body.append(p.Return(self.exactly(self.expr(kind, 2, inner), kind)))
        f.body = body
        self.scopes.pop()
        if copies and not all(_copied(n) for b in body for n in p.walk(b)):
            return self.assign(ctx)
        self.scopes[-1].lambdas.append(f)
        return [p.LambdaDecl(f)]

    def exactly(self, e: Expr, kind: Type) -> Expr:
        """`e` with its value where a lambda's type is deduced."""
        held = self.held(e, kind)
        if kind is not CHAR:
            return held
        # An int8 array's elements are int8_t, which is signed char: another type than char.
        return spanned(p.Cast(held, kind), held.span)

    def _parameters(self, f: p.Function, refs: bool) -> None:
        for i in range(self.rng.randint(0, 3)):
            kind = self.any_type()
            mode = "ref" if refs and i == 0 else "value"
            var = Var(f"p{i}", kind, "ref" if mode == "ref" else "value", span=HELD[kind])
            if mode == "ref":
                var.space = "thread"
            self.declare(var)
            f.params.append(var)
            f.modes.append(mode)

    def define(self, ctx: Context) -> list[Stmt]:
        self.count += 1
        if self.has("macro_effects"):
            found = [
                v for v in self.writable(ctx) if v.kind == "value" and isinstance(v.type, Type)
            ]
            if found and self.odds(0.5):
                v = self.rng.choice(found)
                body = spanned(p.Name(v), v.span)
                m = p.Macro(f"V_{self.count}", [], body, bare=True)
                self.macros.append(m)
                return [p.Define(m), *self.assign_by_macro(ctx)]
            op = self.rng.choice(("+=", "-=", "=", "^="))
            self.assigning.append((f"A_{self.count}", op))
            return [p.DefineAssign(f"A_{self.count}", op)]
        return [p.Define(self.make_macro(f"M_{self.count}", named=True))]

    def make_macro(self, name: str, named: bool) -> p.Macro:
        """A macro; in the body its text may name variables."""
        kind = self.rng.choice([t for t in self.types if t is not BOOL])
        params = [f"P{i}" for i in range(self.rng.randint(0 if named else 1, 2))]
        parts: list[Expr] = []
        for i, q in enumerate(params):
            parts.append(spanned(p.Param(q, i, kind), HELD[kind]))
        if named and self.has("macro_names"):
            own = [v for v in self.visible() if v.type is kind and v.kind == "value"]
            if own:
                v = self.rng.choice(own)
                parts.append(spanned(p.Name(v), v.span))
        parts.append(self.lit(kind))
        body = parts[0]
        for q2 in parts[1:]:
            body = self.arithmetic(self.rng.choice("+-*"), body, q2)
        if params and self.odds(0.2):
            test = self.compare(
                "<", spanned(p.Param(params[0], 0, kind), HELD[kind]), self.lit(kind)
            )
            other = self.held(body, kind)
            body = spanned(p.Cond(test, other, self.lit(kind)), HELD[kind])
        m = p.Macro(name, params, self.held(body, kind))
        kept = {n.name for n in p.walk(m.body) if isinstance(n, p.Param)}
        if kept != set(params):
            m = p.Macro(name, [], self.lit(kind))
        self.macros.append(m)
        return m

    def assign_by_macro(self, ctx: Context) -> list[Stmt]:
        """An assignment that only a macro's text shows."""
        if ctx.function is not None:
            return self.assign(ctx)
        known = self.writable(ctx)
        bare = [
            m for m in self.macros
            if m.bare and isinstance(m.body, p.Name) and m.body.var in known
        ]  # fmt: skip
        if bare and self.odds(0.6):
            m = self.rng.choice(bare)
            v = m.body.var
            target: Expr = spanned(p.MacroUse(m, []), v.span)
            return [self.assign_to(target, v, ctx)]
        found = [v for v in known if v.kind == "value" and v.type in (INT, UINT) and not v.uniform]
        if not found or not self.assigning:
            return self.assign(ctx)
        v = self.rng.choice(found)
        name, op = self.rng.choice(self.assigning)
        kind = p_kind(v)
        plain = ctx.deeper(sync=ctx.sync and self.odds(0.2))
        low = 0 if kind is UINT else -9
        value = self.fit(self.expr(kind, 2, plain), kind, low, 9)
        return [p.MacroAssign(name, p.Name(v), op, value)]


def _copied(n: p.Node) -> bool:
    """Whether a lambda that copies what it names may hold this."""
    if isinstance(n, (p.Index, p.Deref, p.Strided)):
        return n.base.kind in ("input", "table")
    return not isinstance(n, p.Name) or n.var.kind in ("value", "template", "scalar")
