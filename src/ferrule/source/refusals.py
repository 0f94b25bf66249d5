"""Checks of a text before it is rewritten, which refuse what C++ or CUDA cannot express."""

from __future__ import annotations

import itertools
import re
from collections.abc import Set

from ..errors import DialectError
from .dialect import CUDA_WORDS
from .lexer import ANGLES, CLOSE, OPEN, Token, partner, solid, text_at

DEFINE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+(?=\W|$))(?:\([^)]*\))?(.*)$", re.MULTILINE)
_WITH_BRACKETS = ("alignas", "__attribute__", "decltype")
NO_TYPES = ("return", "else", "case", "const", "constexpr", "typename", "do")


def hidden_memory(code: list[Token]) -> set[str]:
    """The macros that name threadgroup memory, but no pointer to it, and were not expanded."""
    macros: set[str] = set()
    for match in DEFINE.finditer("".join(t.text for t in code).replace("\\\n", " ")):
        declared = re.search(r"\bthreadgroup\b([^\[;=]*)", match[2])
        if declared is not None and not set(declared[1]) & set("*&"):
            macros.add(match[1])
    return macros


def redefined_cuda_words(code: list[Token]) -> set[str]:
    """CUDA's words that a text declares itself, or defines as macros."""
    parts = solid(code)
    names: set[str] = set()
    for i, (before, token) in enumerate(itertools.pairwise(parts)):
        after = text_at(parts, i + 2)
        if token.text in CUDA_WORDS and (
            before.text.endswith("define")
            or (before.kind == "word" and before.text not in NO_TYPES)
            or (before.text in (">", "&", "*", ",") and after != ".")
        ):
            names.add(token.text)
    return names


class Checked:
    """One text and its checks; a subclass rewrites it.

    Attributes:
        code: its tokens.
        solid: those that are no white space.
    """

    def __init__(self, kernel: str, where: str, code: list[Token]) -> None:
        self.kernel = kernel
        self.where = where
        self.code = code
        self.solid = solid(code)

    def refuse(self, token: Token, construct: str, instead: str) -> DialectError:
        excerpt = token.text.strip()[:60]
        return self._error(token, f"{construct} is not supported (found {excerpt!r}); {instead}.")

    def _error(self, token: Token, message: str) -> DialectError:
        return DialectError.at(self.kernel, self.where, token.line, token.text, message)

    def check_pairs(self) -> None:
        """Refuse a bracket without its partner: a compiler would speak of a much later line."""
        opened: list[Token] = []
        for token in self.solid:
            if token.kind != "op" or token.macro or token.text not in OPEN + CLOSE:
                continue
            if token.text in OPEN:
                opened.append(token)
            elif not opened:
                raise self._unpaired(token, f"nothing opened this {token.text!r}")
            elif (before := opened.pop()).text != OPEN[CLOSE.index(token.text)]:
                closed = f"{before.text!r} of line {before.line}"
                raise self._unpaired(token, f"this {token.text!r} does not close the {closed}")
        if opened:
            raise self._unpaired(opened[-1], f"this {opened[-1].text!r} is never closed")

    def _unpaired(self, token: Token, problem: str) -> DialectError:
        return self._error(token, f"{problem}; check the brackets.")

    def refuse_other_texts(self, cuda: Set[str]) -> None:
        """Refuse a whole Metal function, where its body is expected, and CUDA's words.

        Raises:
            DialectError: there is one.
        """
        for i, token in enumerate(self.solid):
            is_member = self._text_at(i - 1) in (".", "->")
            if token.text in cuda and token.kind == "word" and not is_member:
                raise self.refuse(
                    token,
                    "CUDA in a Metal body",
                    f"write {CUDA_WORDS[token.text]}, or give a body in CUDA as `cuda=` of "
                    "ferrule.op, or to ferrule.cuda_kernel",
                )
            after = [t for t in (self._text_at(j) for j in range(i + 1, i + 4)) if t != "]"][:1]
            if token.text == "kernel" and after == ["void"] and self.where == "source":
                raise self.refuse(
                    token,
                    "a whole Metal function",
                    "give what is between its braces alone, whose arguments have the names that "
                    'you declare, or the file that it is in: ferrule.op(…, metal=Path("k.metal"))',
                )

    def refuse_hidden_memory(self, macros: set[str]) -> None:
        """Refuse threadgroup memory that a macro declares which was not expanded.

        Raises:
            DialectError: there is some.
        """
        for i, token in enumerate(self.solid):
            if token.text not in macros or token.macro or token.kind != "word":
                continue
            if self._text_at(i + 1) == "(" or self._declares_storage(i):
                raise self.refuse(
                    token,
                    "threadgroup memory by a macro that is defined in several ways or pastes words",
                    "write `threadgroup` where the memory is declared",
                )

    def _text_at(self, i: int) -> str:
        return text_at(self.solid, i)

    def _declares_storage(self, i: int) -> bool:
        """Whether the ``threadgroup`` at ``i`` declares memory, not a pointer to it."""
        start = i
        while start > 0 and self._text_at(start - 1) not in (";", "{", "}", ")", "(", ":", ","):
            start -= 1
        cast = self._text_at(start - 1) in ("(", ",")  # or a parameter
        if cast or self._text_at(start) in ("using", "typedef", "for"):
            return False
        angle, has_name, j = 0, False, i
        while (j := j + 1) < len(self.solid):
            token = self.solid[j]
            if token.text in _WITH_BRACKETS and self._text_at(j + 1) == "(":
                j = partner(self.solid, j + 1)
                if j < 0:
                    return False
                has_name = True
            elif token.text in ANGLES:
                angle += ANGLES[token.text]
            elif angle == 0:
                if token.text in ("*", "&", "&&", "(", ")"):
                    return False
                if token.text in (";", "[", ",", "=", "{"):
                    return has_name
                has_name = token.kind == "word"
        return False
