"""A smaller program that still fails: fewer statements, simpler expressions."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from . import program as p

Edit = Callable[[], Callable[[], None]]  # makes a change; what it returns undoes it
_KEPT = (p.Lit, p.Name, p.Attr, p.Param)


def shrink(program: p.Program, fails: Callable[[p.Program], bool], most: int = 250) -> p.Program:
    """Make the program smaller, in place, while `fails` says that it still fails.

    Args:
        most: how many smaller programs are tried.
    """
    left = most
    changed = True
    while changed and left > 0:
        changed = False
        for edits in (_launches, _statements, _expressions):
            position = 0
            while left > 0:
                found = list(edits(program))
                if position >= len(found):
                    break
                undo = found[position]()
                left -= 1
                kept = False
                with contextlib.suppress(Exception):  # a change may make no sense at all
                    kept = sound(program) and fails(program)
                if kept:
                    changed = True
                else:
                    undo()
                    position += 1
    return program


def sound(program: p.Program) -> bool:
    """Whether every name is declared before its use, and what is written to is a place."""
    known = {v.id for v, *_ in (*program.inputs, *program.outputs, *program.template)}
    for node in program.header:
        if isinstance(node, p.Table):
            known.add(node.var.id)
        elif isinstance(node, p.Function):
            names = {v.id for v in (*node.params, *(v for v, _ in node.template_vars))}
            if not _sound_block(node.body, known | names):
                return False
        elif isinstance(node, p.Macro) and not _named(node.body, known):
            return False
    return _sound_block(program.body, known)


def _sound_block(body: list[p.Stmt], known: set[int]) -> bool:
    known = set(known)
    for s in body:
        if isinstance(s, p.TableDecl):
            known.add(s.table.var.id)
        elif isinstance(s, (p.Decl, p.Decls)):
            for d in [s] if isinstance(s, p.Decl) else s.parts:
                values = [*([d.value] if d.value else []), *(d.values or [])]
                if not all(_named(e, known) for e in values):
                    return False
                if d.var.kind == "ref" and (d.value is None or not _is_place(d.value)):
                    return False
                if d.var.kind == "pointer" and not isinstance(d.value, p.Address):
                    return False
                known.add(d.var.id)
        elif isinstance(s, p.LambdaDecl):
            if not _sound_block(s.function.body, known | {v.id for v in s.function.params}):
                return False
        elif isinstance(s, p.Define):
            if not _named(s.macro.body, known):
                return False
        elif not _sound_statement(s, known):
            return False
    return True


def _sound_statement(s: p.Stmt, known: set[int]) -> bool:
    target = getattr(s, "target", None)
    if target is not None and not _is_place(target):
        return False
    inner = set(known)
    if isinstance(s, p.For) and s.start is not None:
        if not _sound_block([s.start], known):
            return False
        inner |= {d.var.id for d in [s.start] if isinstance(d, p.Decl)}
    for f in dataclasses.fields(s):
        value = getattr(s, f.name)
        if isinstance(value, p.Expr) and not _named(value, inner):
            return False
        if f.name == "step" and value is not None and not _sound_statement(value, inner):
            return False
        if isinstance(value, p.Var) and value.id not in inner:
            return False
        if f.name in ("yes", "no", "body") and not _sound_block(value, inner):
            return False
        if f.name == "cases" and not all(_sound_block(case, inner) for case in value):
            return False
    return True


def _named(e: p.Expr, known: set[int]) -> bool:
    for node in p.walk(e):
        for name in ("var", "base"):
            var = getattr(node, name, None)
            if isinstance(var, p.Var) and var.id not in known:
                return False
    return True


def _is_place(e: p.Expr) -> bool:
    if isinstance(e, (p.Swizzle, p.Component)):
        return _is_place(e.value)
    if isinstance(e, p.MacroUse):
        return _is_place(e.macro.body)
    return isinstance(e, (p.Name, p.Index, p.Deref))


def _set(owner: Any, name: str, value: Any) -> Edit:
    def change() -> Callable[[], None]:
        before = getattr(owner, name)
        setattr(owner, name, value)
        return lambda: setattr(owner, name, before)

    return change


def _splice(items: list[Any], at: int, new: list[Any]) -> Edit:
    def change() -> Callable[[], None]:
        before = list(items)
        items[at : at + 1] = new

        def undo() -> None:
            items[:] = before

        return undo

    return change


def _launches(program: p.Program) -> Iterator[Edit]:
    if len(program.launches) > 1:
        for how in program.launches:
            yield _set(program, "launches", [how])
        return
    (how,) = program.launches
    for group in ((4, 1, 1), (8, 1, 1), (32, 1, 1), how.threadgroup):
        for grid in (group, how.grid):
            new = p.Launch(grid, group, how.data)
            if _size(new) < _size(how):
                yield _set(program, "launches", [new])


def _size(how: p.Launch) -> tuple[int, int]:
    (x, y, z), (tx, ty, tz) = how.grid, how.threadgroup
    return x * y * z, tx * ty * tz


def _lists(program: p.Program) -> Iterator[list[Any]]:
    """The lists of statements and of the header, outermost first."""
    yield program.header
    stack: list[list[Any]] = [program.body]
    functions = [n for n in program.header if isinstance(n, p.Function)]
    stack += [f.body for f in functions]
    while stack:
        items = stack.pop(0)
        yield items
        for s in items:
            if isinstance(s, p.LambdaDecl):
                stack.append(s.function.body)
            for f in dataclasses.fields(s):
                value = getattr(s, f.name)
                if f.name in ("yes", "no", "body") and isinstance(value, list):
                    stack.append(value)
            if isinstance(s, p.Switch):
                stack += s.cases


def _statements(program: p.Program) -> Iterator[Edit]:
    for items in list(_lists(program)):
        size = len(items)
        for chunk in (size, size // 2, size // 4):
            if chunk > 2:
                for at in range(0, size, chunk):
                    yield _drop(items, at, chunk)
        for at in range(size - 1, -1, -1):
            yield _splice(items, at, [])
    for items in list(_lists(program)):
        for at, s in enumerate(items):
            if isinstance(s, p.If):
                yield _splice(items, at, s.yes)
                if s.no:
                    yield _splice(items, at, s.no)
                    yield _set(s, "no", [])
            elif isinstance(s, (p.For, p.While, p.Block)):
                yield _splice(items, at, s.body)
            elif isinstance(s, p.Decls):
                for i in range(len(s.parts)):
                    yield _splice(s.parts, i, [])
                yield _splice(items, at, list(s.parts))
            elif isinstance(s, p.Decl):
                if s.style != "=":
                    yield _set(s, "style", "=")
                if s.spec:
                    yield _set(s, "spec", "")
    for i in range(len(program.inputs) - 1, -1, -1):
        yield _splice(program.inputs, i, [])
    for i in range(len(program.template) - 1, -1, -1):
        yield _splice(program.template, i, [])


def _drop(items: list[Any], at: int, count: int) -> Edit:
    def change() -> Callable[[], None]:
        before = list(items)
        del items[at : at + count]

        def undo() -> None:
            items[:] = before

        return undo

    return change


def _roots(program: p.Program) -> Iterator[p.Node]:
    for items in _lists(program):
        yield from items


def _expressions(program: p.Program) -> Iterator[Edit]:
    seen: set[int] = set()
    for root in list(_roots(program)):
        for node in p.walk(root):
            if id(node) in seen:
                continue
            seen.add(id(node))
            for f in dataclasses.fields(node):  # type: ignore[arg-type]
                value = getattr(node, f.name)
                if isinstance(value, p.Expr) and not (
                    isinstance(node, p.Assign) and f.name == "target"
                ):
                    for new in _simpler(value):
                        yield _set(node, f.name, new)
                elif isinstance(value, list):
                    for i, item in enumerate(value):
                        if isinstance(item, p.Expr):
                            for new in _simpler(item):
                                yield _splice(value, i, [new])


def _simpler(e: p.Expr) -> Iterator[p.Expr]:
    if isinstance(e, (p.Lit, p.Address)):
        return
    if isinstance(e.type, p.Type) and e.type is not p.VOID:
        yield p.Lit(1, e.type)
        if isinstance(e, _KEPT):
            return
        yield p.Lit(0, e.type)
    for part in p.walk(e):
        if part is e or not isinstance(part, p.Expr):
            continue
        if part.type == e.type:
            yield part
        elif isinstance(part, _KEPT) and isinstance(e.type, p.Type) and part.type in p.SCALARS:
            yield p.Cast(part, e.type)
