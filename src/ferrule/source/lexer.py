"""Tokens of a Metal text: just enough of C++ to rewrite words without touching anything else.

Comments become white space of the same number of lines, so that line numbers stay the author's.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import DialectError
from ..kernel import Kernel

_TOKEN = re.compile(
    r"""(?P<space>(?:[ \t\r\f\v]|\\\r?\n)+)
      | (?P<newline>\n)
      | (?P<line_comment>//(?:[^\n\\]|\\.|\\\n)*)
      | (?P<comment>/\*.*?\*/)
      | (?P<open_comment>/\*)
      | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<char>'(?:[^'\\\n]|\\.)+')
      | (?P<number>\.?[0-9](?:[eEpP][+-]|'[0-9a-zA-Z]|[0-9a-zA-Z_.])*)
      | (?P<word>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<op><<=|>>=|\.\.\.|->\*|::|->|\+\+|--|<<|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|\#\#|.)
    """,
    re.VERBOSE | re.DOTALL,
)

_PLAIN = ("word", "op", "number")  # kinds that have no newline

ANGLES = {"<": 1, ">": -1, ">>": -2}
OPEN, CLOSE = ("(", "[", "{"), (")", "]", "}")
# Of these the rest is code.
_MACRO_DIRECTIVE = re.compile(r"#[ \t]*(?:define|if|elif)(?![a-z])")
_WHOLE_DIRECTIVE = re.compile(r"#(?:[^\n\\]|\\.|\\\n)*?(?=//|/\*|\n|$)", re.DOTALL)


_ODD_DIRECTIVE = re.compile(r"%:|#[ \t]*(?:/\*|\\\r?\n|[a-z]+\\\r?\n[a-z])")


@dataclass(slots=True)
class Token:
    """One token.

    Attributes:
        kind: ``space``, ``newline``, ``string``, ``char``, ``number``, ``word``, ``op`` or
            ``directive`` (a whole ``#include``, ``#pragma`` … line).
        text: the characters, changed in place by the rewriter.
        line: 1-based line of the author's text.
        macro: True inside the replacement text of a ``#define`` or the condition of an ``#if``.
    """

    kind: str
    text: str
    line: int
    macro: bool = False

    @property
    def blank(self) -> bool:
        """Whether this is white space."""
        return self.kind in ("space", "newline")


def header_and_source(kernel: Kernel) -> tuple[list[Token], list[Token]]:
    """The tokens of a kernel's texts.

    Raises:
        DialectError: as `tokens` does.
    """
    return (
        tokens(kernel.header, kernel=kernel.name, where="header"),
        tokens(kernel.source, kernel=kernel.name, where="source"),
    )


def tokens(text: str, *, kernel: str, where: str) -> list[Token]:
    """The tokens of ``text``.

    Raises:
        DialectError: a comment is never closed, or a directive is written in an odd way.
    """
    text = text.replace("\r\n", "\n")
    code: list[Token] = []
    line = 1
    position = 0
    line_start = True  # only white space since the last newline
    macro = False
    owed_lines = 0  # lines of comments inside the current directive
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or match.lastgroup is None:  # the pattern's last alternative takes all
            raise ValueError(f"no token at {position} of {where}")
        kind, value = match.lastgroup, match.group()
        if kind in _PLAIN and not line_start:  # most tokens
            code.append(Token(kind, value, line, macro))
            position = match.end()
            continue
        if kind == "open_comment":
            problem = "this comment is never closed; add */."
            raise DialectError.at(kernel, where, line, "/*", problem)
        if line_start and _ODD_DIRECTIVE.match(text, position) is not None:
            problem = (
                "a directive begins with %: or has a comment or the end of a line inside its name, "
                "which is not supported; write #name on one line."
            )
            raise DialectError.at(kernel, where, line, "#", problem)
        if line_start and kind == "op" and value == "#":
            value = _directive(text, position)
            macro = _MACRO_DIRECTIVE.fullmatch(value) is not None
            kind = "op" if macro else "directive"
        position += len(value)
        lines = value.count("\n")
        if kind in ("comment", "line_comment"):
            # Inside a directive a comment is one space; its lines are made up for at the end.
            owed_lines += lines if macro else 0
            kind, value = "space", " " if macro else ("\n" * lines) or " "
        elif kind == "newline":
            value = "\n" * (1 + owed_lines)
            macro, owed_lines = False, 0
        if kind != "space":
            line_start = kind == "newline"
        code.append(Token(kind, value, line, macro))
        line += lines
    return code


def _directive(text: str, start: int) -> str:
    """The directive at ``start``; of a ``#define`` or ``#if`` the word alone."""
    word = _MACRO_DIRECTIVE.match(text, start)
    whole = word or _WHOLE_DIRECTIVE.match(text, start)
    return whole.group() if whole else "#"


def solid(code: Iterable[Token]) -> list[Token]:
    """The tokens that are no white space."""
    return [token for token in code if not token.blank]


def directive_at(code: list[Token], i: int) -> list[Token]:
    """The tokens of the directive that begins here, to its line's end; none where none begins."""
    if not (code[i].kind == "directive" or (code[i].kind == "op" and code[i].text[0] == "#")):
        return []
    end = i + 1
    while end < len(code) and code[end].kind != "newline" and code[end].macro:
        end += 1
    return code[i:end]


def text_at(code: Sequence[Token], i: int) -> str:
    """The text of a token; none outside of the code."""
    return code[i].text if 0 <= i < len(code) else ""


def partner(code: Sequence[Token], i: int) -> int:
    """The bracket that closes the one at i, of the same macro or of none; -1 where none does."""
    depth = 0
    for j in range(i, len(code)):
        if code[j].kind == "op" and code[j].macro == code[i].macro:
            depth += (code[j].text in OPEN) - (code[j].text in CLOSE)
            if depth == 0:
                return j
    return -1


def defined(code: Sequence[Token]) -> list[str]:
    """The names of the macros that a text defines, as often as it does."""
    pairs = itertools.pairwise(solid(code))
    return [b.text for a, b in pairs if a.macro and re.fullmatch(r"#[ \t]*define", a.text)]


def join(code: list[Token]) -> str:
    """The text of these tokens."""
    return "".join(t.text for t in code)
