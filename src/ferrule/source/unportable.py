"""What a text has that runs here, but that Apple's compiler refuses: found token by token."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

from ..kernel import Kernel
from . import Note
from .dialect import ADDRESS_SPACES
from .lexer import Token, tokens

_TYPE = re.compile(
    r"(packed_)?(u?(char|short|int|long)|half|float|bfloat|bool)[234]?|size_t|u?int\d+_t|void"
    r"|(b?float16|complex64|simdgroup_\w+|atomic_\w+)(_t)?"
)
_AROUND = (
    "const",
    "volatile",
    "unsigned",
    "signed",
    "static",
    "inline",
    "constexpr",
    "metal",
    "::",
)
_DECLARES = (";", "{", "}", "(", ",", "<", ":")  # after which a type may begin
_NAMED = ("=", ";", ",", ")", "[", "(")  # after the name of a pointer

# What Metal's atomics hold, by MSL's "Atomic Functions"; of 64 bits, the least and greatest alone.
_ATOMIC = frozenset({"int", "uint", "float", "bool", "int32_t", "uint32_t", "ulong", "uint64_t"})
_WIDE = frozenset({"ulong", "uint64_t"})
_WIDE_OPERATIONS = re.compile(r"atomic_(load|store|exchange|compare_\w+|fetch_\w+)_explicit")


def notes(kernel: Kernel, wide: Iterable[str] = ()) -> Iterator[Note]:
    """What the header and the body have of it, each once a line.

    Args:
        wide: the outputs that are 64-bit atomics. Metal's ``atomic_ulong`` has
            ``atomic_min_explicit`` and ``atomic_max_explicit`` alone, in device memory.
    """
    texts = {"header": kernel.header, "source": kernel.source}
    every: dict[str, list[Token]] = {}
    for where, text in texts.items():
        parts = [t for t in tokens(text, kernel=kernel.name, where=where) if not t.blank]
        every[where] = [t for t in parts if t.kind != "directive" and not t.macro]
    pairs = itertools.pairwise([*every["header"], *every["source"]])
    declared = {b.text for a, b in pairs if a.text in ("struct", "typename")}
    held = {name: f"uint64 (output {name!r})" for name in wide}
    for where, parts in every.items():
        found: dict[Note, None] = {}
        known = dict(held) if where == "source" else {}  # of 64 bits, by name
        for i, token in enumerate(parts):
            what = _pointer(parts, i, declared) or _memory(parts, i, where) or _atomic(parts, i)
            what = what or _wide(parts, i, known)
            if what:
                found[Note(where, token.line, what)] = None
        yield from found


def _text(parts: list[Token], i: int) -> str:
    return parts[i].text if 0 <= i < len(parts) else ""


def _pointer(parts: list[Token], i: int, declared: set[str]) -> str:
    """Of the star of a pointer whose type has no address space."""
    if _text(parts, i) != "*" or _text(parts, i - 1) in ("*", "&"):
        return ""
    start = i
    spaced = known = False
    while start > 0 and parts[start - 1].text not in _DECLARES and parts[start - 1].text != "(":
        word = parts[start - 1]
        if word.kind != "word" and word.text != "::":
            return ""
        kind = _TYPE.fullmatch(word.text) is not None or word.text in declared
        known |= kind
        # What is no word of a type may be a macro with an address space.
        spaced |= not kind and word.text not in _AROUND
        if not known and spaced and word.text not in ADDRESS_SPACES:
            return ""
        start -= 1
    after = i + 1
    while _text(parts, after) in ("const", "*", "volatile"):
        after += 1
    cast = _text(parts, after) in (")", ">") and _text(parts, start - 1) in ("(", "<")
    named = re.fullmatch(r"[A-Za-z_]\w*", _text(parts, after)) and _text(parts, after + 1) in _NAMED
    bare = known and not spaced and (cast or named)
    return "a pointer without an address space" if bare else ""


def _memory(parts: list[Token], i: int, where: str) -> str:
    """Of an array or variable in threadgroup memory that a helper function declares."""
    if where != "header" or _text(parts, i) != "threadgroup" or not _inside(parts, i):
        return ""
    for j in range(i + 1, len(parts)):
        text = parts[j].text
        if text in ("*", "&", "(", ")", "{"):  # a pointer, a parameter, the qualifier of a method
            return ""
        if text in (";", "[", "="):
            return "threadgroup memory in a function that is no kernel"
    return ""


def _inside(parts: list[Token], i: int) -> bool:
    """Whether a token stands in braces, and not in a list of parameters."""
    braces = brackets = 0
    for token in parts[:i]:
        braces += (token.text == "{") - (token.text == "}")
        brackets += (token.text == "(") - (token.text == ")")
    return braces > 0 and brackets == 0


def _atomic(parts: list[Token], i: int) -> str:
    """Of an atomic type that Metal lacks."""
    word = _text(parts, i)
    if word in ("atomic_long", "atomic_double"):
        return f"atomics on {word.removeprefix('atomic_')}"
    if word == "atomic" and _text(parts, i + 1) == "<":
        held = _text(parts, i + 2)
        if _TYPE.fullmatch(held) and held not in _ATOMIC:
            return f"atomics on {held}"
    return ""


def _wide(parts: list[Token], i: int, known: dict[str, str]) -> str:
    """Of a 64-bit atomic that is declared in threadgroup memory, or asked for what Metal lacks.

    Args:
        known: what is known to be one, by name; what is declared here is added.
    """
    word = _text(parts, i)
    of_ulong = word == "atomic" and _text(parts, i + 1) == "<" and _text(parts, i + 2) in _WIDE
    if word == "atomic_ulong" or of_ulong:
        after = i + (4 if of_ulong else 1)
        while _text(parts, after) in ("*", "&", "const", "volatile"):
            after += 1
        if 0 < after < len(parts) and parts[after].kind == "word":
            known[parts[after].text] = f"ulong ({parts[after].text!r})"
            before = {t.text for t in parts[max(0, i - 4) : i]}
            if "threadgroup" in before and _text(parts, after - 1) not in ("*", "&"):
                return "atomics on ulong in threadgroup memory"
    elif _text(parts, i + 1) == "=" and word not in known:  # p = &y[0], p = y + 1
        named = [t.text for t in parts[i + 2 : i + 5] if t.text not in ("&", "(")][:1]
        if named and named[0] in known and _text(parts, i - 1) in ("auto", "*", ">"):
            known[word] = known[named[0]]
    elif _WIDE_OPERATIONS.fullmatch(word) and _text(parts, i + 1) == "(":
        depth = 0
        for j in range(i + 1, len(parts)):
            text = parts[j].text
            depth += (text in ("(", "[", "<")) - (text in (")", "]", ">"))
            if depth == 0 or (depth == 1 and text == ","):
                break
            if text in known:
                return f"{word} of atomics on {known[text]}"
            if text == "atomic_ulong" or (text == "atomic" and _text(parts, j + 2) in _WIDE):
                return f"{word} of atomics on ulong"
    return ""
