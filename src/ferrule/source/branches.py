"""What of a text is compiled here, and what by Apple's compiler: FERRULE is defined here alone."""

from __future__ import annotations

import re

from ..kernel import Kernel
from .lexer import Token, directive_at, header_and_source
from .macros import ASKS

_DEFINED = re.compile(r"#\s*(?:define|undef)\s+FERRULE\b")


def compiled(kernel: Kernel, *, ours: bool) -> tuple[list[Token], list[Token]]:
    """The tokens of header and source that are compiled here, or (where not ``ours``) by Apple.

    What is not compiled leaves its lines. An ``#if`` that asks for more than FERRULE stays, as one
    with an ``#elif`` does, and all of them in texts that define FERRULE themselves.

    Raises:
        DialectError: as `lexer.tokens` does.
    """
    header, source = header_and_source(kernel)
    if not _asks(kernel):
        return header, source
    return _compiled(header, ours), _compiled(source, ours)


def lines_for_apple(kernel: Kernel) -> set[tuple[str, int]]:
    """The lines that Apple reads, each with ``"header"`` or ``"source"``; none if it is all."""
    if not _asks(kernel):
        return set()
    parts = zip(("header", "source"), compiled(kernel, ours=False), strict=True)
    return {(where, token.line) for where, code in parts for token in code if not token.blank}


def _asks(kernel: Kernel) -> bool:
    text = f"{kernel.header}\n{kernel.source}"
    return "FERRULE" in text and _DEFINED.search(text) is None


def _compiled(code: list[Token], ours: bool) -> list[Token]:
    kept: list[Token] = []
    branches: list[bool | None] = []  # of each #if around: whether this one is compiled, if known
    i = 0
    while i < len(code):
        line = directive_at(code, i)
        part = line or code[i : i + 1]
        i += len(part)
        word = _name(line)
        decided = False
        if word.startswith("if"):
            asks = ASKS.fullmatch("".join(t.text for t in line))
            decided = asks is not None and asks[4] == "FERRULE" and not _has_elif(code, i)
            negated = asks is not None and (asks[1] == "ifndef" or asks[2] == "!")
            branches.append(ours != negated if decided else None)
        elif word in ("else", "endif") and branches:
            branch = branches.pop()
            decided = branch is not None
            if word == "else":
                branches.append(None if branch is None else not branch)
        dead = decided or False in branches
        for token in part:
            lines = token.text.count("\n")
            if not dead or token.kind == "newline":
                kept.append(token)
            elif lines:
                kept.append(Token("space", "\n" * lines, token.line))
    return kept


def _name(line: list[Token]) -> str:
    """The name of a directive, or ``""``."""
    found = re.match(r"#\s*(\w+)", line[0].text) if line else None
    return found[1] if found else ""


def _has_elif(code: list[Token], i: int) -> bool:
    """Whether the #if whose line ends before i has an #elif."""
    depth = 0
    for j in range(i, len(code)):
        word = _name(directive_at(code, j))
        if depth == 0 and word in ("elif", "endif"):
            return word == "elif"
        depth += word.startswith("if") - (word == "endif")
    return False
