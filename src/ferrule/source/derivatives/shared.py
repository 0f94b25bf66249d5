"""Adjoints in threadgroup memory: zeros to begin with, additions, and the barriers between."""

from __future__ import annotations

from functools import partial

from .activity import statements
from .arrays import numbered, size_of
from .frames import Frames, Statements, Undo
from .liveness import elements_in, expressions_of
from .nodes import (
    ADD,
    UINT,
    Array,
    Assign,
    AtomicAdd,
    Block,
    Call,
    Declare,
    Effect,
    Lanes,
    Loop,
    Name,
    Statement,
    Type,
    of,
)
from .partials import less, mul, zero_of


def barrier(line: int) -> Effect:
    """A barrier that orders threadgroup memory."""
    return Effect(
        line, Call("threadgroup_barrier", (Name("mem_flags::mem_threadgroup", UINT),), UINT)
    )


def cleared(frames: Frames, array: Array) -> Statements:
    """All threads write zeros to an array."""
    line, k = frames.line, Name(frames.fresh("fr_k"), UINT)
    size = Call("uint", (size_of(array),), UINT, cast=True)
    place = numbered(array, k)
    group = Name("threads_per_threadgroup", UINT._replace(lanes=3))
    threads = mul(mul(Lanes(group, "x", UINT), Lanes(group, "y", UINT)), Lanes(group, "z", UINT))
    start = (Declare(line, k, Name("thread_index_in_threadgroup", UINT)),)
    update = (Assign(line, k, "+=", threads),)
    body = (Assign(line, place, "=", zero_of(array.element)),)
    return [Loop(line, "for", start, less(k, size), update, body)]


def adding(real: Type, widths: set[int]) -> str:
    """The functions that add to threadgroup memory: no GPU of Apple does that to floats.

    Args:
        widths: the numbers of lanes of what is added to.
    """
    name = real.name
    if name == "double":
        text = (
            f"inline void {ADD}(threadgroup double* place, double value) {{\n"
            "  atomic_fetch_add_explicit((threadgroup atomic<double>*)place, value, "
            "memory_order_relaxed);\n}\n"
        )
    else:
        text = (
            f"inline void {ADD}(threadgroup float* place, float value) {{\n"
            "  threadgroup atomic_uint* bits = (threadgroup atomic_uint*)place;\n"
            "  uint was = atomic_load_explicit(bits, memory_order_relaxed);\n"
            "  while (!atomic_compare_exchange_weak_explicit(bits, &was, "
            "as_type<uint>(as_type<float>(was) + value),\n"
            "                                                memory_order_relaxed, "
            "memory_order_relaxed)) {\n  }\n}\n"
        )
    for lanes in sorted(widths - {1}):
        text += (
            f"inline void {ADD}(threadgroup {of(name, lanes)}* place, {of(name, lanes)} value) {{\n"
            + "".join(
                f"  {ADD}((threadgroup {name}*)place + {i}, value.{letter});\n"
                for i, letter in enumerate("xyzw"[:lanes])
            )
            + "}\n"
        )
    return text


# -- barriers that only the reverse needs ----------------------------------------------------------


def with_barriers(body: Block, undos: list[Undo]) -> list[Undo]:
    """What reverses a block, with a barrier wherever elements are added to behind their reset.

    Where the body writes an element behind its read with no barrier between, every thread takes its
    adjoint, and sets it to zero, before others have added to it.
    """
    taken: set[str] = set()
    out: list[Undo] = []
    for s, undo in zip(reversed(body), reversed(undos), strict=True):
        reads, writes, waits = _touched(s)
        if waits:
            taken = set()
        if reads & taken:
            out.append(partial(_only, barrier(s.line)))
            taken = set()
        taken |= writes
        out.append(undo)
    return out[::-1]


def _only(s: Statement) -> Statements:
    return [s]


def _touched(whole: Statement) -> tuple[set[str], set[str], bool]:
    """The threadgroup arrays that a statement reads and writes; whether it waits."""
    reads: set[str] = set()
    writes: set[str] = set()
    waits = False
    for s in statements((whole,)):
        waits |= isinstance(s, Effect) and s.call.name.endswith("threadgroup_barrier")
        for e in expressions_of(s):
            for element in elements_in(e):
                if element.array.space != "threadgroup":
                    continue
                stored = isinstance(s, Assign) and e is s.place and element is s.place
                (writes if stored else reads).add(element.array.name)
                if stored and isinstance(s, Assign) and s.operator != "=":
                    reads.add(element.array.name)
        if isinstance(s, AtomicAdd) and s.place.array.space == "threadgroup":
            reads.add(s.place.array.name)
    return reads, writes, waits
