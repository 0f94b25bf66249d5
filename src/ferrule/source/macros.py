"""The author's macros expanded in a body, so that its loops over lanes hide nothing.

Only what the author defines is expanded; conditional compilation is left to the compiler, and a
body that depends on it is not split.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from . import NotSplittable
from .lexer import Token, join, tokens

_OPERATORS = frozenset({"*", "+", "-", "<<", ">>"})
_CONDITIONALS = ("#if", "#ifdef", "#ifndef", "#elif", "#else", "#endif")


@dataclass
class _Macro:
    name: str
    parameters: list[str] | None  # None: not a function-like macro
    body: list[Token]
    conditional: bool  # defined inside an #if


def expand(header: str, source: str, *, kernel: str) -> str:
    """The body with the macros of header and body expanded, line for line.

    Args:
        kernel: its name, for errors.

    Raises:
        NotSplittable: the body has conditional compilation, or uses a macro that depends on it,
            pastes tokens or takes any number of arguments.
    """
    macros: dict[str, _Macro] = {}
    _expand_tokens(tokens(header, kernel=kernel, where="header"), macros, emit=False)
    return join(_expand_tokens(tokens(source, kernel=kernel, where="source"), macros, emit=True))


def expand_spaces(header: list[Token], source: list[Token]) -> tuple[list[Token], list[Token]]:
    """Both texts with the macros expanded that name threadgroup memory, before they are rewritten.

    What the word means, memory or a pointer to it, shows only where such a macro is used.
    """
    if not any(t.macro and t.text == "threadgroup" for t in (*header, *source)):
        return header, source
    macros: dict[str, _Macro] = {}
    defined = Counter(
        b.text
        for code in (header, source)
        for a, b in itertools.pairwise([t for t in code if not t.blank])
        if re.fullmatch(r"#[ \t]*define", a.text)
    )

    def names_space(macro: _Macro) -> bool:
        if defined[macro.name] == 1:
            macro.conditional = False  # where it is used, there is no other
        words = {t.text for t in macro.body}
        return _plain(macro) and bool(words & ({"threadgroup"} | set(macros)))

    return (
        _expand_tokens(header, macros, emit=True, only=names_space),
        _expand_tokens(source, macros, emit=True, only=names_space),
    )


def expand_expressions(header: list[Token], source: list[Token]) -> tuple[list[Token], list[Token]]:
    """Both texts with the macros expanded that are parts of expressions, and still defined.

    What is an operand of what shows only where such a macro is used. One that is defined inside an
    #if stays: without it, its name may be a function's.
    """
    if not any(t.macro for t in (*header, *source)):
        return header, source
    macros: dict[str, _Macro] = {}

    def computes(macro: _Macro) -> bool:
        words = {t.text for t in macro.body}
        calls = macro.parameters is not None
        return _plain(macro) and (calls or bool(words & (_OPERATORS | set(macros))))

    try:
        return (
            _expand_tokens(header, macros, emit=True, only=computes, keep=True),
            _expand_tokens(source, macros, emit=True, only=computes, keep=True),
        )
    except NotSplittable:  # a call with the wrong number of arguments, which the compiler tells
        return header, source


def _plain(macro: _Macro) -> bool:
    """Whether a macro means one thing wherever it is used, and pastes nothing."""
    pastes = any(t.text in ("#", "##") for t in macro.body)
    return not (pastes or macro.conditional or "..." in (macro.parameters or []))


def _expand_tokens(
    code: list[Token],
    macros: dict[str, _Macro],
    *,
    emit: bool,
    only: Callable[[_Macro], bool] | None = None,
    keep: bool = False,
) -> list[Token]:
    """Expand macros; with `only`, those that it chooses, and the rest stays as it is.

    With `keep`, also the definitions of those stay.
    """
    expanded: list[Token] = []
    depth = 0  # of #if
    i = 0
    while i < len(code):
        token = code[i]
        word = token.text.replace(" ", "").replace("\t", "")
        if token.kind == "directive" or (token.kind == "op" and word.startswith("#")):
            line = [token]
            while i + 1 < len(code) and code[i + 1].kind != "newline" and code[i + 1].macro:
                i += 1
                line.append(code[i])
            i += 1
            if word.startswith(_CONDITIONALS):
                if emit and only is None:
                    raise NotSplittable("the body has an #if")
                depth += word.startswith("#if") - word.startswith("#endif")
            elif word == "#define":
                defined = _define(line[1:], macros, depth > 0)
                if defined is not None and only is not None:
                    if only(defined):
                        if not keep:
                            lines = sum(t.text.count("\n") for t in line)
                            line = [Token("space", "\n" * lines, token.line)]
                    else:
                        del macros[defined.name]
            elif word.startswith("#undef"):
                macros.pop(token.text.split()[-1], None)
            if only is not None or (emit and word == "#define" and len(line) == 1):
                expanded += line
            elif emit and word.startswith(("#pragma", "#error", "#warning")):
                expanded.append(token)
            elif emit:
                expanded.append(
                    Token("space", "\n" * sum(t.text.count("\n") for t in line), token.line)
                )
            continue
        if emit and token.kind == "word" and token.text in macros:
            expansion, i = _expand_use(code, i, macros, frozenset())
            expanded += expansion
            continue
        expanded.append(token)
        i += 1
    return expanded


def _define(line: list[Token], macros: dict[str, _Macro], conditional: bool) -> _Macro | None:
    i = 0
    while i < len(line) and line[i].blank:
        i += 1
    if i == len(line):
        return None
    name = line[i].text
    i += 1
    parameters: list[str] | None = None
    if i < len(line) and line[i].text == "(":  # no white space before it
        end = next((j for j in range(i, len(line)) if line[j].text == ")"), len(line) - 1)
        parameters = [t.text for t in line[i + 1 : end] if t.kind == "word" or t.text == "..."]
        i = end + 1
    body = [t for t in line[i:] if t.kind != "newline"]
    while body and body[0].blank:
        body.pop(0)
    macros[name] = _Macro(name, parameters, body, conditional)
    return macros[name]


def _expand_use(
    code: list[Token], i: int, macros: dict[str, _Macro], inside: frozenset[str]
) -> tuple[list[Token], int]:
    """The expansion of the macro at ``code[i]``, and the index of the token behind its use."""
    token = code[i]
    macro = macros[token.text]
    if macro.conditional:
        raise NotSplittable(f"the macro {macro.name} depends on an #if")
    if macro.parameters is None:
        return _rescan(macro.body, token.line, macros, inside | {macro.name}), i + 1
    j = i + 1
    while j < len(code) and code[j].blank:
        j += 1
    if j == len(code) or code[j].text != "(":
        return [token], i + 1  # a function-like macro's name alone means nothing
    if any(t.text in ("#", "##") for t in macro.body) or "..." in macro.parameters:
        raise NotSplittable(f"the macro {macro.name} pastes tokens")
    argument_tokens: list[list[Token]] = [[]]
    depth, lines = 0, 0
    while j < len(code):
        text = code[j].text
        lines += text.count("\n")
        if text in ("(", "[", "{"):
            depth += 1
        elif text in (")", "]", "}"):
            depth -= 1
            if depth == 0:
                break
        if text == "," and depth == 1:
            argument_tokens.append([])
        elif depth > 1 or text != "(" or argument_tokens[0]:
            argument_tokens[-1].append(code[j])
        j += 1
    if len(argument_tokens) != max(1, len(macro.parameters)):
        raise NotSplittable(f"the macro {macro.name} gets {len(argument_tokens)} arguments")
    arguments = dict(zip(macro.parameters, argument_tokens, strict=False))
    body: list[Token] = []
    for t in macro.body:
        if t.kind == "word" and t.text in arguments:
            body += _rescan(arguments[t.text], token.line, macros, inside)
        else:
            body.append(t)
    expansion = _rescan(body, token.line, macros, inside | {macro.name})
    expansion.append(Token("space", "\n" * lines or " ", token.line))
    return expansion, j + 1


def _rescan(
    body: list[Token], line: int, macros: dict[str, _Macro], inside: frozenset[str]
) -> list[Token]:
    """Expand the macros in a macro's replacement, but not those being expanded."""
    expanded = [Token("space", " ", line)]
    i = 0
    while i < len(body):
        token = body[i]
        if token.kind == "word" and token.text in macros and token.text not in inside:
            expansion, i = _expand_use(body, i, macros, inside)
            expanded += expansion
            continue
        # Lines inside an argument are made up for after the call.
        expanded.append(Token(token.kind, " " if token.blank else token.text, line))
        i += 1
    expanded.append(Token("space", " ", line))
    return expanded
