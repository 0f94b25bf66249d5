"""What a CUDA text asks for that threads on the CPU do not have: found before it is compiled."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .. import words
from ..lexer import Token, defined, directive_at, solid, text_at
from . import cpu_ptx

ARCH = 800  # `__CUDA_ARCH__` of such texts, as include/cuda_on_cpu.h has it


class Unsupported(NamedTuple):
    """Something that is not known on the CPU.

    Attributes:
        line: 1-based line in the author's text.
        what: it, in a few words.
        where: ``"source"``, ``"header"``, or the name of a unit's header.
    """

    line: int
    what: str
    where: str = "source"


# Headers whose names include/cuda_on_cpu.h has; all of cuda/std beside them.
KNOWN_HEADERS = words(
    "assert.h float.h limits.h math.h stddef.h stdint.h stdio.h stdlib.h string.h "
    "cassert cfloat climits cmath cstddef cstdint cstdio cstdlib cstring cuda.h "
    "cuda_bf16.h cuda_fp16.h cuda_fp8.h cuda_runtime.h cuda_runtime_api.h cooperative_groups.h "
    "cooperative_groups/reduce.h cooperative_groups/scan.h device_launch_parameters.h "
    "math_constants.h vector_types.h vector_functions.h device_functions.h "
    "device_atomic_functions.h ferrule_unit.h"
)
_INCLUDE = re.compile(r"#\s*include\s*[<\"]([^>\"]+)[>\"]")

_WORDS: tuple[tuple[str, str], ...] = (
    (r"CUtensorMap\w*", "tensor maps"),
    (r"(cudaTextureObject_t|tex[123]D\w*|texCubemap\w*)", "textures"),
    (r"(cudaSurfaceObject_t|surf[123]D\w*)", "surfaces"),
    (r"(cluster_group|this_cluster|__cluster_dims__)", "clusters"),
    (r"(multi_grid_group|this_multi_grid)", "groups of several GPUs"),
    (r"(labeled_partition|memcpy_async)", "this of cooperative groups"),
    (
        r"(?!__nv_fp8(x[24])?_e[45]m[23]$|__nv_fp8_(storage|interpretation)_t$|__nv_cvt_float_to_fp8$)"
        r"__nv_(fp[468]\w*|cvt_\w*fp[468]\w*)",
        "floats of 8 bits and less",
    ),
    (r"curand\w*", "cuRAND"),
    (r"__pipeline_\w+", "copies in the background"),
    (r"__is(Shared|Global|Constant|Local)", "address spaces"),
    (r"(__managed__|cudaMalloc\w*|cudaMemcpy\w*|cudaLaunch\w+)", "functions of the host"),
    (r"cudaDeviceSynchronize", "launches by a kernel"),
)
_WORD = re.compile("|".join(f"(?P<w{i}>{names})" for i, (names, _) in enumerate(_WORDS)))
_SPACES = {
    "nvcuda": "tensor cores (nvcuda)", "wmma": "tensor cores (wmma)", "cub": "the library cub",
    "thrust": "the library thrust", "cutlass": "the library cutlass", "cute": "the library cute",
}  # fmt: skip
_WAITING = re.compile(r"atomic\w*|barrier|latch|\w*semaphore|thread_scope\w*")  # of cuda::std


def unsupported(code: list[Token], where: str, own: Sequence[str] = ()) -> list[Unsupported]:
    """What of a text is not known on the CPU, in the order of lines.

    Args:
        code: its tokens.
        where: what the text is called.
        own: the names of the unit's headers.
    """
    alive = live(code)
    parts = solid(alive)
    findings = {*_includes(alive, where, own), *_grid_barriers(parts, where)}
    for i, token in enumerate(parts):
        if what := _what(parts, i):
            findings.add(Unsupported(token.line, what, where))
    return sorted(findings)


def _what(parts: list[Token], i: int) -> str:
    """What begins at a token and is not known; ``""`` where all is well."""
    token, behind = parts[i], text_at(parts, i + 1)
    if token.kind == "op" and token.text == "<<" and behind == "<":
        return "launches by a kernel (<<<…>>>)"
    if token.kind != "word" or text_at(parts, i - 1) in (".", "->"):
        return ""
    if token.text in cpu_ptx.ASM:
        assembly = cpu_ptx.read(parts, i)
        instruction = cpu_ptx.unknown(assembly) if assembly else ""
        return f"inline PTX ({instruction})" if instruction else ""
    if behind == "::":
        if token.text in _SPACES and text_at(parts, i - 1) != "namespace":
            return _SPACES[token.text]
        if token.text == "cuda":
            return _of_library(parts, i)
    found = _WORD.fullmatch(token.text)
    if found is None or (text_at(parts, i - 1) == "::" and text_at(parts, i - 2) == "std"):
        return ""
    return f"{_WORDS[int((found.lastgroup or 'w0')[1:])][1]} ({token.text})"


def _of_library(parts: list[Token], i: int) -> str:
    """What `cuda::` names beyond the parts of cuda::std that are known."""
    first, second = text_at(parts, i + 2), text_at(parts, i + 4)
    if first == "std":
        known = text_at(parts, i + 3) != "::" or not _WAITING.fullmatch(second)
        return "" if known else f"cuda::std::{second}"
    return f"CUDA's C++ library (cuda::{first})"


def _includes(code: list[Token], where: str, own: Sequence[str]) -> Iterator[Unsupported]:
    for token in code:
        found = _INCLUDE.match(token.text) if token.kind == "directive" else None
        if found is None or found[1] in KNOWN_HEADERS or found[1] in own:
            continue
        if not found[1].startswith("cuda/std/"):
            yield Unsupported(token.line, f"#include <{found[1]}>", where)


def _grid_barriers(parts: list[Token], where: str) -> Iterator[Unsupported]:
    """Barriers of all threads of a grid: blocks run one after the other."""
    texts = [token.text for token in parts]
    names = {"this_grid"}
    for i, text in enumerate(texts):
        if text == "this_grid" and "=" in texts[max(i - 4, 0) : i]:
            names.add(texts[i - texts[i::-1].index("=") - 1])
        elif text == "grid_group":
            names.add(text_at(parts, i + 1))
    for i, text in enumerate(texts):
        before = [t for t in texts[max(i - 4, 0) : i] if t not in "()."]
        method = text == "sync" and text_at(parts, i - 1) == "." and before[-1:]
        function = text == "sync" and text_at(parts, i + 1) == "(" and [text_at(parts, i + 2)]
        if {*(method or ()), *(function or ())} & names:
            yield Unsupported(parts[i].line, "barriers of the whole grid", where)


def include_name(directive: Token) -> str | None:
    """The name of the header that a directive includes; None where it is another."""
    found = _INCLUDE.match(directive.text) if directive.kind == "directive" else None
    return found[1] if found else None


# -- branches that are not compiled ----------------------------------------------------------------

_GIVEN = {"__CUDA_ARCH__": ARCH, "__CUDACC__": 1, "__CUDACC_RTC__": 1}
_OTHERS = re.compile(r"__(GNUC|clang|cplusplus|CUDACC_VER|x86_64|aarch64|SIZEOF|INT)\w*|FR_\w*")


def live(code: list[Token]) -> list[Token]:
    """The tokens without those of branches that ``#if`` certainly leaves out."""
    own = set(defined(code))
    kept: list[Token] = []
    around: list[tuple[bool, bool | None]] = []  # whether a branch may be there; what was before
    i = 0
    while i < len(code):
        line = directive_at(code, i)
        part = line or code[i : i + 1]
        i += len(part)
        word, condition = _directive(line)
        if word.startswith("if"):
            holds = _Condition(condition, own).value if word == "if" else None
            if word != "if":
                holds = _known(condition[0] if condition else "", own)
                holds = holds if word == "ifdef" or holds is None else not holds
            around.append((holds is not False, holds))
        elif word in ("elif", "else") and around:
            _, before = around.pop()
            holds = True if word == "else" else _Condition(condition, own).value
            there = before is not True and holds is not False
            around.append((there, True if before is True or holds is True else None))
        elif word == "endif" and around:
            around.pop()
        elif all(there for there, _ in around):
            kept += part
    return kept


def _directive(line: list[Token]) -> tuple[str, list[str]]:
    """The name of a directive, and the words behind it; ``""`` for other tokens."""
    text = "".join(token.text for token in line)
    found = re.match(r"#\s*(\w+)", text)
    if found is None:
        return "", []
    return found[1], re.findall(r"\w+|&&|\|\||[<>=!]=|<<|>>|\S", text[found.end() :])


def _known(name: str, own: set[str]) -> bool | None:
    """Whether a macro is defined; None where that is not known."""
    if name in _GIVEN:
        return True
    return None if name in own or _OTHERS.fullmatch(name) else False


class _Condition:
    """A condition of ``#if``.

    Attributes:
        value: whether it holds; None where that is not known.
    """

    def __init__(self, words: list[str], own: set[str]) -> None:
        self._words, self._own, self._i = words, own, 0
        value = self._either()
        self.value = None if value is None or self._i < len(words) else bool(value)

    def _next(self, *words: str) -> str:
        """The next word if it is one of these."""
        if self._i < len(self._words) and self._words[self._i] in words:
            self._i += 1
            return self._words[self._i - 1]
        return ""

    def _either(self) -> int | None:
        values = [self._both()]
        while self._next("||"):
            values.append(self._both())
        if len(values) == 1:
            return values[0]
        return 1 if any(values) else None if None in values else 0

    def _both(self) -> int | None:
        values = [self._compared()]
        while self._next("&&"):
            values.append(self._compared())
        if len(values) == 1:
            return values[0]
        return 0 if 0 in values else None if None in values else 1

    def _compared(self) -> int | None:
        left = self._one()
        sign = self._next("<", ">", "<=", ">=", "==", "!=")
        if not sign:
            return left
        right = self._one()
        if left is None or right is None:
            return None
        order = (left > right) - (left < right)
        return int(order in {"<": (-1,), ">": (1,), "==": (0,), "<=": (-1, 0), ">=": (0, 1)}.get(
            sign, (-1, 1)))  # fmt: skip

    def _one(self) -> int | None:
        if self._next("!"):
            value = self._one()
            return None if value is None else int(not value)
        if self._next("("):
            value = self._either()
            return value if self._next(")") else None
        word = self._words[self._i] if self._i < len(self._words) else ""
        self._i += 1
        if word == "defined":
            self._next("(")
            name = self._words[self._i] if self._i < len(self._words) else ""
            self._i += 1
            self._next(")")
            known = _known(name, self._own)
            return None if known is None else int(known)
        if re.fullmatch(r"\d+[uUlL]*", word):
            return int(word.rstrip("uUlL"))
        if word in _GIVEN:
            return _GIVEN[word]
        known = _known(word, self._own) if re.fullmatch(r"[A-Za-z_]\w*", word) else None
        return None if known is None else 0
