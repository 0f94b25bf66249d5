"""Checks of a text before it is rewritten, which refuse what C++ or CUDA cannot express."""

from __future__ import annotations

import itertools
import re
from collections.abc import Set

from ..errors import DialectError
from .dialect import CUDA_WORDS
from .lexer import Token

DEFINE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+(?=\W|$))(?:\([^)]*\))?(.*)$", re.MULTILINE)
NO_TYPES = ("return", "else", "case", "const", "constexpr", "typename", "do")
_PARTNERS = {"(": ")", "[": "]", "{": "}", ")": "(", "]": "[", "}": "{"}


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
    solid = [t for t in code if not t.blank]
    names: set[str] = set()
    for i, (before, token) in enumerate(itertools.pairwise(solid)):
        if token.text not in CUDA_WORDS:
            continue
        after = solid[i + 2].text if i + 2 < len(solid) else ""
        if (
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
        self.solid = [t for t in code if not t.blank]

    def refuse(self, token: Token, construct: str, instead: str) -> DialectError:
        excerpt = token.text.strip()[:60]
        return self._error(token, f"{construct} is not supported (found {excerpt!r}); {instead}.")

    def _error(self, token: Token, message: str) -> DialectError:
        return DialectError(
            f"kernel {self.kernel!r}, {self.where} line {token.line}: {message}",
            kernel=self.kernel,
            where=self.where,
            line=token.line,
            construct=token.text,
        )

    def check_pairs(self) -> None:
        """Refuse a bracket without its partner: a compiler would speak of a much later line."""
        opened: list[Token] = []
        for token in self.solid:
            if token.kind != "op" or token.macro or token.text not in _PARTNERS:
                continue
            if token.text in "([{":
                opened.append(token)
                continue
            if not opened:
                raise self._unpaired(token, f"nothing opened this {token.text!r}")
            before = opened.pop()
            if before.text != _PARTNERS[token.text]:
                problem = (
                    f"this {token.text!r} does not close the {before.text!r} of line {before.line}"
                )
                raise self._unpaired(token, problem)
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
        return self.solid[i].text if 0 <= i < len(self.solid) else ""

    def _declares_storage(self, i: int) -> bool:
        """Whether the ``threadgroup`` at ``i`` declares memory, not a pointer to it."""
        start = i
        while start > 0 and self._text_at(start - 1) not in (";", "{", "}", ")", "(", ":", ","):
            start -= 1
        if self._text_at(start - 1) in ("(", ","):
            return False  # a parameter or a cast
        if self._text_at(start) in ("using", "typedef", "for"):
            return False
        j, angle, has_name = i + 1, 0, False
        while j < len(self.solid):
            text, kind = self._text_at(j), self.solid[j].kind
            if text == "<":
                angle += 1
            elif text == ">":
                angle -= 1
            elif text == ">>":
                angle -= 2
            elif angle == 0:
                if text in ("*", "&", "&&", "(", ")"):
                    return False
                if text in (";", "[", ",", "=", "{"):
                    return has_name
                has_name = kind == "word"
            j += 1
        return False
