"""Names that a kernel's text uses and does not declare itself."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence

from .lexer import ANGLES, CLOSE, OPEN, Token, defined, solid, text_at, tokens

_NamesOf = Callable[[Sequence[Token]], set[str]]
_NO_TYPES = frozenset({"return", "else", "goto", "case", "delete", "new", "do"})
_TYPES = ("struct", "class", "union", "enum")
_BUILT_IN = re.compile(
    r"(u?(int|char|short|long)|float|half|bfloat|double|bool)[234]?|unsigned|signed|auto|\w+_t"
)


def taken(source: str, header: str, names: Sequence[str], *, kernel: str) -> tuple[str, ...]:
    """Those of ``names`` that a body reads from around it.

    A name is not among them where the header declares it outside of all functions, the body outside
    of all blocks, or a macro has it: those hide what lies around. What is not sure counts as
    declared in a header, and as not declared in a body: then the text does not compile, where it
    would read something else than its author meant.

    Raises:
        DialectError: a comment is never closed.
    """
    body = solid(tokens(source, kernel=kernel, where="source"))
    head = solid(tokens(header, kernel=kernel, where="header"))
    bare = _without_brackets(body, _is_declarator)
    declared = _declared_names(bare, _declared_by)
    declared |= _declared_names(_without_brackets(head), _mentioned_in)
    # A macro of the header is part of the body where it is used.
    words = {t.text for t in body if t.kind == "word"}
    words |= {t.text for t in head if t.kind == "word" and t.macro}
    return tuple(name for name in names if name in words and name not in declared)


def _declared_names(code: Sequence[Token], names_of: _NamesOf) -> set[str]:
    """The names of a text's macros, and what ``names_of`` finds in the statements outside of all
    brackets, but for those of namespaces that can be seen into, and of enums."""
    names = set(defined(code))
    open_: list[bool] = []  # of each bracket around, whether it can be seen into
    statement: list[Token] = []
    using = any(token.text == "using" for token in code)
    for token in code:
        if token.macro or token.kind == "directive":
            continue
        words: list[str] = []
        if token.text in OPEN + CLOSE:
            words = [t.text for t in statement if t.kind in ("word", "string")]
        if token.text in CLOSE:
            inside = open_.pop() if open_ else True
            if all(open_) and token.text == "}":
                names |= names_of(statement)
                # ``struct s {…} a;`` goes on.
                kept = not inside and words and words[0] in _TYPES
                statement = statement[:1] if kept else []
            continue
        if all(open_):
            if token.text == ";":
                names |= names_of(statement)
                statement = []
                continue
            statement.append(token)
        if token.text in OPEN:
            visible = token.text == "{" and all(open_) and _seen_into(words, using)
            open_.append(visible)
            if visible:
                statement = statement[:1] if words[0] == "enum" else []
    return names | names_of(statement)  # the use of a macro may end without a semicolon


def _seen_into(words: Sequence[str], using: bool) -> bool:
    """Whether names in braces behind these words are visible outside of them."""
    if words[:1] == ["enum"]:
        return not {"class", "struct"} & set(words)
    if "namespace" in words:
        return using or words[0] == "inline" or words[-1] == "namespace"
    return words[:1] == ["extern"] and len(words) == 2


def _mentioned_in(statement: Sequence[Token]) -> set[str]:
    """The words of a statement but for members of others and its template's parameters."""
    names: set[str] = set()
    parameters: set[str] = set()
    depth = 0
    for i, token in enumerate(statement):
        before = statement[i - 1].text if i else ""
        if token.text == "<" and (depth or before == "template"):
            depth += 1
        elif depth:
            depth += ANGLES.get(token.text, 0)
            parameters.add(token.text)
        elif token.kind == "word" and (before != "::" or statement[0].text == "using"):
            names.add(token.text)
    return names - parameters


def _declared_by(statement: Sequence[Token]) -> set[str]:
    """The names that a statement declares: ``const int a = 1, *b``, ``struct s``, ``float f(``."""
    code = _without_angles(_without_attributes(statement))
    if not code or code[0].kind != "word" or code[0].text in _NO_TYPES:
        return set()
    if code[0].text == "using":  # ``using s = int``, ``using a::b``
        head = [t for t in code if t.kind == "word"]
        return {head[1 if any(t.text == "=" for t in code) else -1].text}
    names, declares = set(), False
    for comma, declarator in itertools.groupby(code, key=lambda token: token.text == ","):
        words: list[str] = []
        for token in () if comma else declarator:
            if token.kind == "word":
                words.append(token.text)
            elif token.text not in ("*", "&", "::"):
                break
        # A declaration begins with a type: two words, at least.
        declares = declares or len(words) > 1
        if declares and words:
            names.add(words[-1])
    return names


def _without_brackets(
    code: Sequence[Token],
    where: Callable[[Sequence[Token], str], bool] = lambda before, after: True,
) -> list[Token]:
    """A text without the brackets around single words that may be declarators: ``int (N) = 4``.

    Args:
        code: the text.
        where: says of what stands before such brackets in their statement, and after them, whether
            to take them away.
    """
    kept: list[Token] = []
    begin = i = 0  # of the statement in `kept`; in `code`
    while i < len(code):
        end = 0 if code[i].macro else _end_of_brackets(code, i)
        after = code[end + 1].text if end + 1 < len(code) else ""
        if end and where(kept[begin:], after):
            kept += [t for t in code[i:end] if t.text not in ("(", ")")]
            i = end + 1
            continue
        kept.append(code[i])
        if code[i].text in (";", "{", "}"):
            begin = len(kept)
        i += 1
    return kept


def _end_of_brackets(code: Sequence[Token], i: int) -> int:
    """Where the brackets end that open at ``i`` and hold a word alone, or behind ``*`` and ``&``; 0
    where they do not."""
    if code[i].text != "(":
        return 0
    inner = i + 1
    while text_at(code, inner) in ("*", "&"):
        inner += 1
    if inner == len(code):
        return 0
    end = inner if code[inner].kind == "word" else _end_of_brackets(code, inner)
    return end + 1 if end and text_at(code, end + 1) == ")" else 0


def _is_declarator(before: Sequence[Token], after: str) -> bool:
    """Whether brackets in a body are those of a declarator and not of a call: ``at(N) = 4``."""
    if before and before[-1].text == ",":
        first = before[:2]
        return all(t.kind == "word" for t in first) and any(
            _BUILT_IN.fullmatch(t.text) for t in first
        )
    words = [t.text for t in before]
    if not all(t.kind == "word" or t.text == "::" for t in before) or not words:
        return False
    return bool(_BUILT_IN.fullmatch(words[-1])) or (len(words) > 1 and after == "=")


def _without_attributes(statement: Sequence[Token]) -> list[Token]:
    """A statement without ``[[…]]`` in front, ``alignas(…)`` and the brackets of ``decltype(…)``,
    of which those that open are left."""
    kept: list[Token] = []
    for token in statement:
        if token.text == "[" and not kept:
            continue
        if token.text == "(" and kept and kept[-1].text in ("alignas", "__attribute__"):
            kept.pop()
        elif token.text != "(" or not kept or kept[-1].text != "decltype":
            kept.append(token)
    return kept


def _without_angles(statement: Sequence[Token]) -> list[Token]:
    """A statement without what stands in angle brackets after words."""
    kept: list[Token] = []
    depth = 0
    for i, token in enumerate(statement):
        opens = token.text == "<" and i and statement[i - 1].kind == "word"
        # `a < b` opens nothing.
        if opens and (depth or any(t.text in (">", ">>") for t in statement[i:])):
            depth += 1
        elif depth:
            closed = {">": 1, ">>": 2}.get(token.text, 0)
            depth = max(depth - closed, 0)
        elif token.text != "template":
            kept.append(token)
    return kept
