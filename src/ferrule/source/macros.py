"""The author's macros expanded in a body, so that its loops over lanes hide nothing.

Only what the author defines is expanded. Of conditional compilation, whether one of the author's
macros is defined, or is 0, is decided here; all else is left to the compiler, and a body that
depends on it is not split.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from . import NotSplittable
from .lexer import CLOSE, OPEN, Token, defined, directive_at, join, tokens

_OPERATORS = frozenset({"*", "+", "-", "<<", ">>"})
_CONDITIONALS = ("#if", "#ifdef", "#ifndef", "#elif", "#else", "#endif")
# What can be decided, and the macro's name: `#ifdef M`, `#if !defined(M)`, `#elif M`, `#if 0`.
ASKS = re.compile(r"#\s*(?:(ifn?def)\s+|(?:el)?if\b\s*(!?)\s*(defined\b)?\s*)\(?\s*(\w+)\s*\)?\s*")


@dataclass
class _Macro:
    """A macro.

    Attributes:
        parameters: None of one that is not function-like.
        conditional: it is defined inside an #if.
    """

    name: str
    parameters: list[str] | None
    body: list[Token]
    conditional: bool

    @property
    def words(self) -> set[str]:
        """What its text is made of."""
        return {t.text for t in self.body}

    @property
    def pastes(self) -> bool:
        """Whether it pastes tokens, or takes any number of arguments."""
        return bool({"#", "##"} & self.words) or "..." in (self.parameters or [])

    @property
    def plain(self) -> bool:
        """Whether it means one thing wherever it is used, and pastes nothing."""
        return not (self.pastes or self.conditional)


class _Conditions:
    """The #if around a place in a text, as far as macros decide them."""

    def __init__(self, macros: Mapping[str, _Macro]) -> None:
        self._macros = macros
        # Of each: whether this branch is compiled, None where that is not known, whether an earlier
        # one is, and whether this one is an #else.
        self._branches: list[tuple[bool | None, bool, bool]] = []

    @property
    def compiled(self) -> bool | None:
        """Whether the place is compiled; None where that is not known."""
        here = {branch for branch, *_ in self._branches}
        return False not in here and (None if None in here else True)

    def follow(self, line: str) -> None:
        """Go on behind a directive of conditional compilation.

        Raises:
            NotSplittable: there is no #if that it belongs to, or behind its #else.
        """
        word = line.replace(" ", "").replace("\t", "")
        is_first, is_end = word.startswith("#if"), word.startswith("#endif")
        here: bool | None = False
        earlier = False
        if not is_first:
            if not self._branches or (self._branches[-1][2] and not is_end):
                kind = next(k for k in ("#else", "#elif", "#endif") if word.startswith(k))
                raise NotSplittable(f"the body has {kind} without an #if")
            here, earlier, _ = self._branches.pop()
        if is_end:
            return
        if here is not None:
            earlier = earlier or here
            here = not earlier and (word.startswith("#else") or self._holds(line))
        self._branches.append((here, earlier, word.startswith("#else")))

    def end(self) -> None:
        """Raises:
        NotSplittable: an #if has no #endif.
        """
        if self._branches:
            raise NotSplittable("the body has an #if without an #endif")

    def _holds(self, line: str) -> bool | None:
        asks = ASKS.fullmatch(line)
        if asks is None:
            return None
        kind, negated, defined, name = asks.groups()
        macro = self._macros.get(name)
        value: bool | None = macro is not None
        if macro is None and not name.isdecimal():
            # Compilers define names that begin with an underscore, or of small letters.
            elsewhere = not name[0].isupper() or name.startswith("FR_") or name in _of_headers()
            value = None if elsewhere else False
        elif not (kind or defined):
            text = name if macro is None else "".join(t.text for t in macro.body).strip()
            plain = macro is None or macro.parameters is None
            value = text != "0" if plain and re.fullmatch("0|[1-9][0-9]*", text) else None
        if value is None or (macro is not None and macro.conditional):
            return None
        return value != (bool(negated) or kind == "ifndef")


@functools.lru_cache(maxsize=1)
def _of_headers() -> frozenset[str]:
    """The macros that the dialect's headers define."""
    headers = Path(__file__).parents[1].joinpath("include").glob("*.h")
    texts = (header.read_text("utf-8") for header in headers)
    return frozenset(n for text in texts for n in re.findall(r"#[ \t]*define[ \t]+(\w+)", text))


def expand(header: str, source: str, *, kernel: str) -> str:
    """The body with the macros of header and body expanded, line for line.

    Args:
        kernel: its name, for errors.

    Raises:
        NotSplittable: the body has conditional compilation that is not decided here, or uses a
            macro that depends on it, pastes tokens or takes any number of arguments.
    """
    expansion = _Expansion()
    expansion.of(tokens(header, kernel=kernel, where="header"), emit=False)
    return join(expansion.of(tokens(source, kernel=kernel, where="source")))


def expand_spaces(header: list[Token], source: list[Token]) -> tuple[list[Token], list[Token]]:
    """Both texts with the macros expanded that name threadgroup memory, before they are rewritten.

    What the word means, memory or a pointer to it, shows only where such a macro is used.
    """
    if not any(t.macro and t.text == "threadgroup" for t in (*header, *source)):
        return header, source
    times = Counter([*defined(header), *defined(source)])

    def names_space(macro: _Macro, others: Set[str]) -> bool:
        if times[macro.name] == 1:
            macro.conditional = False  # where it is used, there is no other
        return macro.plain and not macro.words.isdisjoint({"threadgroup"} | others)

    expansion = _Expansion(names_space)
    return expansion.of(header), expansion.of(source)


def expand_expressions(header: list[Token], source: list[Token]) -> tuple[list[Token], list[Token]]:
    """Both texts with the macros expanded that are parts of expressions, and still defined.

    What is an operand of what shows only where such a macro is used. One that is defined inside an
    #if stays: without it, its name may be a function's.
    """
    if not any(t.macro for t in (*header, *source)):
        return header, source

    def computes(macro: _Macro, others: Set[str]) -> bool:
        calls = macro.parameters is not None
        return macro.plain and (calls or not macro.words.isdisjoint(_OPERATORS | others))

    expansion = _Expansion(computes, keep=True)
    try:
        return expansion.of(header), expansion.of(source)
    except NotSplittable:  # a call with the wrong number of arguments, which the compiler tells
        return header, source


class _Expansion:
    """Expands the macros of some texts, one after the other.

    Args:
        only: tells the macros that are expanded, given the names of all, where the rest is to stay
            as it is.
        keep: whether the definitions of those stay, too.
    """

    def __init__(
        self, only: Callable[[_Macro, Set[str]], bool] | None = None, keep: bool = False
    ) -> None:
        self.only, self.keep = only, keep
        self.macros: dict[str, _Macro] = {}

    def of(self, code: list[Token], emit: bool = True) -> list[Token]:
        """A text with its macros expanded.

        Args:
            emit: whether it is; else its macros are learnt alone.
        """
        expanded: list[Token] = []
        depth = 0  # of #if
        conditions = _Conditions(self.macros)
        i = 0
        while i < len(code):
            token = code[i]
            if line := directive_at(code, i):
                i += len(line)
                word = token.text.replace(" ", "").replace("\t", "")
                if word.startswith(_CONDITIONALS):
                    depth += word.startswith("#if") - word.startswith("#endif")
                    if self.only is None:  # else the text stays for the compiler
                        conditions.follow("".join(t.text for t in line))
                        depth = int(conditions.compiled is None)
                    if emit and self.only is None and depth:
                        raise NotSplittable("the body has an #if that only the compiler decides")
                what = "" if conditions.compiled is False else word
                expanded += self._directive(line, what, depth > 0)
            elif conditions.compiled is False:
                expanded.append(Token("space", "\n" * token.text.count("\n"), token.line))
                i += 1
            elif emit and token.kind == "word" and token.text in self.macros:
                expansion, i = self._use(code, i, frozenset())
                expanded += expansion
            else:
                expanded.append(token)
                i += 1
        if emit and self.only is None:
            conditions.end()
        return expanded

    def _directive(self, line: list[Token], word: str, conditional: bool) -> list[Token]:
        """What stays of a directive."""
        lines = Token("space", "\n" * sum(t.text.count("\n") for t in line), line[0].line)
        macro = self._define(line[1:], conditional) if word == "#define" else None
        if word.startswith("#undef"):
            self.macros.pop(line[0].text.split()[-1], None)
        if self.only is None:
            if word == "#define":
                return [lines] if len(line) > 1 else line
            return line[:1] if word.startswith(("#pragma", "#error", "#warning")) else [lines]
        if macro is not None and not self.only(macro, self.macros.keys()):
            del self.macros[macro.name]
        elif macro is not None and not self.keep:
            return [lines]
        return line

    def _define(self, line: list[Token], conditional: bool) -> _Macro | None:
        i = next((i for i, token in enumerate(line) if not token.blank), None)
        if i is None:
            return None
        name, i = line[i].text, i + 1
        parameters: list[str] | None = None
        if i < len(line) and line[i].text == "(":  # no white space before it
            end = next((j for j in range(i, len(line)) if line[j].text == ")"), len(line) - 1)
            parameters = [t.text for t in line[i + 1 : end] if t.kind == "word" or t.text == "..."]
            i = end + 1
        while i < len(line) and line[i].blank:
            i += 1
        self.macros[name] = _Macro(name, parameters, line[i:], conditional)
        return self.macros[name]

    def _use(self, code: list[Token], i: int, inside: frozenset[str]) -> tuple[list[Token], int]:
        """The expansion of the macro at ``code[i]``, and the index of the token behind its use."""
        token = code[i]
        macro = self.macros[token.text]
        if macro.conditional:
            raise NotSplittable(f"the macro {macro.name} depends on an #if")
        if macro.parameters is None:
            return self._rescan(macro.body, token.line, inside | {macro.name}), i + 1
        j = i + 1
        while j < len(code) and code[j].blank:
            j += 1
        if j == len(code) or code[j].text != "(":
            return [token], i + 1  # a function-like macro's name alone means nothing
        if macro.pastes:
            raise NotSplittable(f"the macro {macro.name} pastes tokens")
        argument_tokens: list[list[Token]] = [[]]
        depth, lines = 0, 0
        while j < len(code):
            text = code[j].text
            lines += text.count("\n")
            depth += (text in OPEN) - (text in CLOSE)
            if text in CLOSE and depth == 0:
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
                body += self._rescan(arguments[t.text], token.line, inside)
            else:
                body.append(t)
        expansion = self._rescan(body, token.line, inside | {macro.name})
        expansion.append(Token("space", "\n" * lines or " ", token.line))
        return expansion, j + 1

    def _rescan(self, body: list[Token], line: int, inside: frozenset[str]) -> list[Token]:
        """Expand the macros in a macro's replacement, but not those being expanded."""
        expanded = [Token("space", " ", line)]
        i = 0
        while i < len(body):
            token = body[i]
            if token.kind == "word" and token.text in self.macros and token.text not in inside:
                expansion, i = self._use(body, i, inside)
                expanded += expansion
                continue
            # Lines inside an argument are made up for after the call.
            expanded.append(Token(token.kind, " " if token.blank else token.text, line))
            i += 1
        expanded.append(Token("space", " ", line))
        return expanded
