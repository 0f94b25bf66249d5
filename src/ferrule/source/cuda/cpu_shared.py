"""Shared memory of a CUDA text on the CPU: what declares it, in C++.

What `__shared__` declares is a static variable of the CPU's thread, by a macro of
include/cuda_on_cpu.h, and stays as it is. Rewritten are arrays that the launch sizes (`extern
__shared__`), and all of them in a text that is checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..lexer import ANGLES, Token, defined, partner, solid, text_at

_ALIGN = frozenset({"alignas", "__align__", "__attribute__", "__builtin_align__"})
_DROPPED = frozenset({"__shared__", "static", "extern", "inline", "__device__"})


@dataclass
class SharedMemory:
    """The shared memory of a kernel's texts.

    Attributes:
        checked: variables are registered with what watches the launch.
        outside: names of arrays that are declared outside of functions, each with the declaration
            that a function needs.
    """

    checked: bool
    outside: dict[str, str] = field(default_factory=dict)

    def rewrite(self, code: list[Token], *, body: bool) -> None:
        """Rewrite a text's declarations, token by token.

        Args:
            code: its tokens, which are changed.
            body: it is the body of a function.
        """
        parts = solid(code)
        places = {id(token): i for i, token in enumerate(code)}
        bodies, outside = _function_bodies(parts, body)
        for i, token in enumerate(parts):
            if token.text == "__shared__" and token.kind == "word" and not token.macro:
                self._declaration(code, places, parts, i, in_function=i not in outside)
        macros = {token.text for token in parts if token.macro and token.kind == "word"}
        for name, declaration in self.outside.items():
            everywhere = name in macros and bool(defined(code))
            for start, end in bodies:
                words = (token.text for token in parts[start:end])
                if everywhere or name in words:
                    parts[start].text += f" {declaration}"

    def at_start(self, code: list[Token]) -> str:
        """The declarations that a body needs of what stands outside of it."""
        words = {token.text for token in code}
        return " ".join(text for name, text in self.outside.items() if name in words)

    def _declaration(
        self,
        code: list[Token],
        places: dict[int, int],
        parts: list[Token],
        i: int,
        *,
        in_function: bool,
    ) -> None:
        """Rewrite the declaration around ``__shared__``, the token i of those that are solid."""
        start, end = _statement(parts, i)
        words = {token.text for token in parts[start:i]}
        dynamic = "extern" in words
        if not (dynamic or (self.checked and in_function)):
            for j in range(start, end):
                if parts[j].text == "static":
                    parts[j].text = ""
                elif parts[j].text == "alignas":  # C++ has it before all else
                    parts[partner(parts, j + 1)].text = ")))"
                    parts[j].text = "__attribute__((aligned"
            return
        declared = list(_declarators([t.text for t in _plain(parts[start:end])]))
        if not declared:
            return
        texts = [
            self._text(kind, name, suffix, parts[i].line, dynamic)
            for kind, name, suffix in declared
        ]
        first = places[id(parts[start])]
        last = places[id(parts[end])] if end < len(parts) else len(code)
        for token in code[first:last]:  # the semicolon stays, where the next one begins
            if token.kind != "newline":
                token.text = ""
        if in_function:
            code[first].text = " ".join(texts)
        else:
            self.outside.update({d[1]: text for d, text in zip(declared, texts, strict=True)})

    def _text(self, kind: str, name: str, suffix: str, line: int, dynamic: bool) -> str:
        alias, key = f"fr_t_{name}", ""
        if dynamic:
            item = f"sizeof((*static_cast<{alias}*>(nullptr))[0])"
            place = f'::fr::on_cpu::dynamic_shared({line}, "{name}", {item})'
            value = f"*reinterpret_cast<{alias}*>({place})"
        else:
            key = f"static char fr_k_{name}; "
            value = f'::fr::checked_shared<{alias}>(&fr_k_{name}, {line}, "{name}")'
        return f"typedef {kind} {alias}{suffix}; {key}{alias}& {name} = {value};"


def _statement(parts: list[Token], i: int) -> tuple[int, int]:
    """Where the declaration around a token begins, and where its semicolon is."""
    start = i
    while start and text_at(parts, start - 1) not in (";", "{", "}", ":"):
        if parts[start - 1].kind == "directive" or parts[start - 1].macro:
            break
        start -= 1
    end = i
    while end < len(parts) and parts[end].text != ";":
        closing = partner(parts, end) if parts[end].text in ("(", "[", "{") else end
        end = max(closing, end) + 1
    return start, end


def _plain(parts: list[Token]) -> Iterator[Token]:
    """The tokens of a declaration without its storage and alignment."""
    i = 0
    while i < len(parts):
        if parts[i].text in _ALIGN and text_at(parts, i + 1) == "(":
            i = partner(parts, i + 1)
        elif parts[i].text not in _DROPPED:
            yield parts[i]
        i += 1


def _declarators(words: list[str]) -> Iterator[tuple[str, str, str]]:
    """Type, name and dims of each variable of a declaration; none where it is something else."""
    depth = angles = start = 0
    base, kind, name = "", "", -1
    for i, word in enumerate([*words, ","]):
        depth += (word in "([{") - (word in ")]}") if len(word) == 1 else 0
        if name < 0 and not depth:
            angles += ANGLES.get(word, 0)
        ends = word in (",", "=", "[") and i > start
        if name < 0 and ends and not angles and depth == (word == "["):
            name = i - 1
            kind = " ".join([base, *words[start:name]]).strip()
            base = base or kind.rstrip("* ")
        if word == "=" and not depth:
            return
        if word == "," and not depth and not angles and name >= 0:
            yield kind, words[name], "".join(f"{w} " for w in words[name + 1 : i]).strip()
            start, name = i + 1, -1


def _function_bodies(parts: list[Token], body: bool) -> tuple[list[tuple[int, int]], set[int]]:
    """The braces of functions, and the tokens that are in none."""
    bodies: list[tuple[int, int]] = []
    outside: set[int] = set()
    stack: list[tuple[str, int]] = [("function" if body else "space", -1)]
    for i, token in enumerate(parts):
        inside = any(kind == "function" for kind, _ in stack)
        if not inside:
            outside.add(i)
        if token.macro or token.kind != "op":
            continue
        if token.text == "{":
            stack.append(("block" if inside else _brace(parts, i), i))
        elif token.text == "}" and len(stack) > 1:
            kind, start = stack.pop()
            if kind == "function":
                bodies.append((start, i))
    return bodies, outside


def _brace(parts: list[Token], i: int) -> str:
    """What a brace outside of functions opens: ``"space"``, ``"function"`` or a ``"class"``."""
    start, depth = i, 0
    while start:
        before = parts[start - 1]
        depth += (before.text in ")]") - (before.text in "([")
        if before.kind == "directive" or before.macro:
            break
        if not depth and before.text in (";", "{", "}"):
            break
        start -= 1
    words = [token.text for token in parts[start:i]]
    if "namespace" in words or (words[:1] == ["extern"] and len(words) == 2):
        return "space"
    return "function" if "(" in words and "=" not in words[-1:] else "class"
