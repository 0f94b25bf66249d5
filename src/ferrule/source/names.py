"""The names that a kernel's text has from elsewhere: words that it does not declare itself."""

from __future__ import annotations

from collections.abc import Sequence

from .lexer import Token, tokens

_OPEN, _CLOSE = ("(", "[", "{"), (")", "]", "}")
_NO_TYPES = frozenset({"return", "else", "goto", "case", "using", "delete", "new", "do"})


def taken(source: str, header: str, names: Sequence[str], *, kernel: str) -> tuple[str, ...]:
    """Those of ``names`` that a body reads from around it.

    A name is not among them where the header declares it outside of all functions, the body outside
    of all blocks, or a macro has it: those hide what lies around.

    Raises:
        DialectError: a comment is never closed.
    """
    body = [t for t in tokens(source, kernel=kernel, where="source") if not t.blank]
    head = [t for t in tokens(header, kernel=kernel, where="header") if not t.blank]
    own = _declared(body) | _declared(head)
    # A macro of the header is part of the body where it is used.
    words = {t.text for t in body if t.kind == "word"}
    words |= {t.text for t in head if t.kind == "word" and t.macro}
    return tuple(name for name in names if name in words and name not in own)


def _declared(parts: Sequence[Token]) -> set[str]:
    """What a text declares outside of all brackets."""
    found: set[str] = set()
    depth, statement = 0, []  # type: int, list[Token]
    for i, token in enumerate(parts):
        if token.macro:
            if token.text.endswith("define") and i + 1 < len(parts):
                found.add(parts[i + 1].text)
            continue
        if token.text in _CLOSE:
            depth -= 1
            if depth == 0 and token.text == "}":
                found |= _of_statement(statement)
                statement = []
            continue
        if depth == 0 and token.kind != "directive":
            if token.text == ";":
                found |= _of_statement(statement)
                statement = []
            else:
                statement.append(token)
        if token.text in _OPEN:
            depth += 1
    return found


def _of_statement(statement: Sequence[Token]) -> set[str]:
    """What one statement declares: ``const int a = 1, *b``, ``struct s``, ``float f(``."""
    parts = _without_angles(statement)
    if not parts or parts[0].kind != "word" or parts[0].text in _NO_TYPES:
        return set()
    names, declares = set(), False
    for declarator in _between_commas(parts):
        words = []
        for token in declarator:
            if token.kind == "word":
                words.append(token.text)
            elif token.text not in ("*", "&", "::"):
                break
        # A declaration begins with a type: two words, at least.
        declares = declares or len(words) > 1
        if declares and words:
            names.add(words[-1])
    return names


def _between_commas(parts: Sequence[Token]) -> list[list[Token]]:
    found: list[list[Token]] = [[]]
    for token in parts:
        if token.text == ",":
            found.append([])
        else:
            found[-1].append(token)
    return found


def _without_angles(statement: Sequence[Token]) -> list[Token]:
    """A statement without what stands in angle brackets after words."""
    found: list[Token] = []
    depth = 0
    for i, token in enumerate(statement):
        opens = token.text == "<" and i and statement[i - 1].kind == "word"
        # `a < b` opens nothing.
        if opens and (depth or any(t.text in (">", ">>") for t in statement[i:])):
            depth += 1
        elif depth:
            depth = max(depth - {">": 1, ">>": 2}.get(token.text, 0), 0)
        elif token.text != "template":
            found.append(token)
    return found
