"""Tokens of a Metal text: just enough of C++ to rewrite words without touching anything else.

Comments become white space of the same number of lines, so that line numbers stay the author's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import DialectError

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

_DIRECTIVE = re.compile(r"#[ \t]*([a-z]*)")
_WHOLE_DIRECTIVE = re.compile(r"#(?:[^\n\\]|\\.|\\\n)*?(?=//|/\*|\n|$)", re.DOTALL)


_ODD_DIRECTIVE = re.compile(r"%:|#[ \t]*(?:/\*|\\\r?\n|[a-z]+\\\r?\n[a-z])")


@dataclass
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
        if kind == "open_comment":
            raise DialectError(
                f"kernel {kernel!r}, {where} line {line}: this comment is never closed; add */.",
                kernel=kernel,
                where=where,
                line=line,
                construct="/*",
            )
        if line_start and (_ODD_DIRECTIVE.match(text, position) is not None):
            raise DialectError(
                f"kernel {kernel!r}, {where} line {line}: a directive begins with %: or has a "
                "comment or the end of a line inside its name, which is not supported; write "
                "#name on one line.",
                kernel=kernel,
                where=where,
                line=line,
                construct="#",
            )
        if kind == "op" and value == "#" and line_start:
            value, kind = _directive(text, position)
            position += len(value)
            if kind == "define":
                code.append(Token("op", value, line, True))
                macro = True
            else:
                code.append(Token("directive", value, line))
            line += value.count("\n")
            line_start = False
            continue
        position = match.end()
        lines = value.count("\n")
        if kind in ("comment", "line_comment"):
            # Inside a directive a comment is one space; its lines are made up for at the end.
            owed_lines += lines if macro else 0
            code.append(Token("space", " " if macro else ("\n" * lines) or " ", line, macro))
        elif kind == "newline":
            code.append(Token("newline", "\n" * (1 + owed_lines), line))
            line_start, macro, owed_lines = True, False, 0
        elif kind == "space":
            code.append(Token("space", value, line, macro))
        else:
            code.append(Token(kind, value, line, macro))
            line_start = False
        line += lines
    return code


def _directive(text: str, start: int) -> tuple[str, str]:
    """The directive at ``start``, and ``"define"`` where its rest is to be read as tokens.

    Of a ``#define`` or ``#if`` only the word itself is returned: what follows is code.
    """
    word = _DIRECTIVE.match(text, start)
    if word is not None and word.group(1) in ("define", "if", "elif"):
        return word.group(), "define"
    whole = _WHOLE_DIRECTIVE.match(text, start)
    return whole.group() if whole else "#", "directive"


def join(code: list[Token]) -> str:
    """The text of these tokens."""
    return "".join(t.text for t in code)
