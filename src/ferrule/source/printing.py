"""Whether a text prints, where it does so in what is compiled.

``#ifdef DEBUG`` around a printf must cost nothing while nobody defines DEBUG.
"""

from __future__ import annotations

import re

METAL = re.compile(r"\b(?:printf|os_log|os_log_default)\b")
CUDA = re.compile(r"\bprintf\b")

_COMMENT = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_DIRECTIVE = re.compile(r"\s*#\s*(ifdef|ifndef|if|elif|else|endif)\b(.*)")
_DEFINE = re.compile(r"^\s*#\s*define\s+(\w+)", re.MULTILINE)
_ASKS = re.compile(r"\s*(!?)\s*(?:(defined)\b)?\s*\(?\s*(\w+)\s*\)?\s*")
_COMPILERS = re.compile(r"_|FERRULE$|FR_|CUDART|NDEBUG$")  # names that somebody else may define


def prints(text: str, words: re.Pattern[str]) -> bool:
    """Whether a text names one of these words outside of comments and dead branches.

    Args:
        text: header and source.
        words: `METAL` or `CUDA`.
    """
    if words.search(text) is None:
        return False
    code = _COMMENT.sub(lambda m: m[0] if m[0][0] == '"' else " ", text).replace("\\\n", " ")
    return any(words.search(line) for line in _live(code))


def _live(code: str) -> list[str]:
    """The lines that may be compiled."""
    defined = set(_DEFINE.findall(code))
    lines: list[str] = []
    branches: list[bool | None] = []  # of each #if around: whether it is compiled, None if unknown
    for line in code.splitlines():
        match = _DIRECTIVE.match(line)
        if match is None:
            if False not in branches:
                lines.append(line)
            continue
        word, condition = match.groups()
        if word.startswith("if"):
            branches.append(_value(word, condition, defined))
        elif branches:
            before = branches.pop()
            if word == "else":
                branches.append(None if before is None else not before)
            elif word == "elif":
                branches.append(False if before else None)
    return lines


def _value(word: str, condition: str, defined: set[str]) -> bool | None:
    """Whether an #if is true; None where that is not known here."""
    asks = _ASKS.fullmatch(condition)
    if asks is None:
        return None
    negated, of_name, name = bool(asks[1]) != (word == "ifndef"), asks[2], asks[3]
    if name.isdecimal():
        return None if of_name else (int(name) != 0) != negated
    if name in defined or _COMPILERS.match(name):
        return None
    return negated  # a name that nobody defines
