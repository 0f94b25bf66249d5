"""From Metal's dialect to C++ that g++, clang and NVRTC read with `include/ferrule.h`.

A header gives most of the dialect its meaning. What a header cannot express is rewritten here,
token by token, line by line:

==============================================  ==============================================
``device``, ``thread``, ``threadgroup``         removed from pointers, parameters and casts
``constant``                                    ``const``, or removed beside const/constexpr
``threadgroup float t[8];``                     ``thread_local float t[8];`` (a mark: the texts
                                                for fibers, split loops and CUDA each replace it)
``1.5``, ``1.5h``, ``1.5bf``                    ``1.5f``, ``::fr::half_lit(1.5)`` …
``v.xyz``, ``v.xy = w``                         ``v.swz(::fr::ix<0,1,2>{})``, ``v.swr(…) = w``
``[[attributes]]``, ``#include <metal_…>``      removed
``coherent(device)``                            removed
``c ? a : b``                                   both operands converted, where a class type
                                                (bfloat) may be one of them
==============================================  ==============================================
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ..kernel import Kernel
from . import Note
from .branches import compiled, lines_for_apple
from .dialect import (
    ADDRESS_SPACES,
    CUDA_WORDS,
    GENERATED,
    METAL_HEADERS,
    REFUSED,
    REFUSED_PREFIXES,
    SPECIFIERS,
)
from .lexer import Token, defined, join, partner, solid, text_at
from .macros import expand_expressions, expand_spaces
from .refusals import DEFINE, NO_TYPES, Checked, hidden_memory, redefined_cuda_words

_SWIZZLE = re.compile(r"[xyzw]{2,4}|[rgba]{1,4}|lo|hi|even|odd")
_LANES = {letter: i for letters in ("xyzw", "rgba") for i, letter in enumerate(letters)}
_ASSIGN = frozenset({"=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="})
_FLOAT = re.compile(r"(?:[0-9']+\.[0-9']*|\.[0-9']+|[0-9']+(?=[eE]))(?:[eE][+-]?[0-9]+)?")
WORD = re.compile(r"[A-Za-z_]\w*")
_CONTRACT = re.compile(r"\bfp\s+contract\s*\(\s*(off|on|fast)\s*\)|FP_CONTRACT\s+(OFF|ON|DEFAULT)")


class Mark(NamedTuple):
    """A pragma about products that are summed.

    Attributes:
        line: the author's line that it stands on.
        on: whether they are rounded once from there on, to the end of the block.
    """

    line: int
    on: bool


@dataclass
class Rewritten:
    """A kernel's texts as C++.

    Attributes:
        header, source: the texts, line for line the author's.
        header_words, source_words: every identifier of each text.
        sizes: how long header and source were, their comments apart.
        marks: the pragmas of header and source about products that are summed.
        notes: what Apple refuses.
    """

    header: str
    source: str
    header_words: frozenset[str]
    source_words: frozenset[str]
    sizes: tuple[int, int]
    marks: tuple[list[Mark], list[Mark]]
    notes: list[Note] = field(default_factory=list)

    @property
    def words(self) -> frozenset[str]:
        """Every identifier of both texts."""
        return self.header_words | self.source_words

    @property
    def contract_off(self) -> bool:
        """Whether a pragma forbids somewhere that products and sums are fused."""
        return not all(mark.on for marks in self.marks for mark in marks)

    @cached_property
    def macros(self) -> dict[str, str]:
        """The macros of both texts: names and what they stand for."""
        definitions: dict[str, str] = {}
        for text in (self.header, self.source):
            for match in DEFINE.finditer(text.replace("\\\n", " ")):
                definitions[match.group(1)] = match.group(2)
        return definitions


def with_callers(names: set[str], calls: Mapping[str, set[str]]) -> set[str]:
    """These names, and those that call one of them, directly or through others."""
    while callers := {name for name, called in calls.items() if called & names} - names:
        names = names | callers
    return names


def rewrite(kernel: Kernel) -> Rewritten:
    """The kernel's header and source as C++.

    Raises:
        DialectError: the text uses something that ferrule refuses; names it and its line.
    """
    header, source = compiled(kernel, ours=True)
    for_apple = lines_for_apple(kernel)
    sizes = len(join(header)), len(join(source))
    header, source = expand_expressions(*expand_spaces(header, source))
    _rename_macros(header + source)
    members = _members(header) | _members(source)
    header_words, source_words = (
        frozenset(t.text for t in code if t.kind == "word") for code in (header, source)
    )
    marks: list[list[Mark]] = []
    notes: list[Note] = []
    hidden = hidden_memory(header) | hidden_memory(source)
    cuda = CUDA_WORDS.keys() - redefined_cuda_words(header) - redefined_cuda_words(source)
    for where, code in (("header", header), ("source", source)):
        rewriter = _Rewriter(kernel.name, where, code, members)
        rewriter.refuse_other_texts(cuda)
        if not _MACRO.search(kernel.header + kernel.source):  # whose text may open or close some
            rewriter.check_pairs()
        rewriter.refuse_hidden_memory(hidden)
        rewriter.run(body=where == "source")
        marks.append(sorted(rewriter.marks))
        notes += [n for n in rewriter.notes if not for_apple or (where, n.line) in for_apple]
    return Rewritten(
        join(header), join(source), header_words, source_words, sizes, (marks[0], marks[1]), notes
    )


def _rename_macros(code: list[Token]) -> None:
    """Macros with names that the generated text uses get others."""
    clashing = GENERATED.intersection(defined(code))
    for token in code if clashing else []:
        if token.kind == "word" and token.text in clashing:
            token.text = f"fr_m_{token.text}"


def _members(code: list[Token]) -> set[str]:
    """Names like swizzles that structs of this text declare as their own members."""
    members: set[str] = set()
    parts = solid(code)
    structs: list[bool] = []  # of each brace around, whether it is a struct's
    pending = False
    for i, token in enumerate(parts):
        if token.text in ("struct", "class", "union"):
            pending = True
        elif token.text == "{":
            structs.append(pending)
            pending = False
        elif token.text == "}":
            del structs[-1:]
        elif token.text in (";", "(", ")", ">"):
            pending = False
        elif (
            any(structs[-1:])
            and token.kind == "word"
            and _SWIZZLE.fullmatch(token.text)
            and text_at(parts, i + 1) in (";", ",", "=", "[", "{", ":")
            and parts[i - 1].text not in (".", "->")
        ):
            members.add(token.text)
    return members


_SCOPES = ("device", "threadgroup", "simdgroup", "thread")
_MACRO = re.compile(r"#[ \t]*(?:define|if)")
_INCLUDE = re.compile(r"#[ \t]*(?:include_next|include|import|embed)\b[ \t]*")


class _Rewriter(Checked):
    """Rewrites one text."""

    def __init__(self, kernel: str, where: str, code: list[Token], members: set[str]) -> None:
        super().__init__(kernel, where, code)
        self.members = members
        self.marks: list[Mark] = []
        self.notes: list[Note] = []

    def run(self, *, body: bool) -> None:
        for token in self.code:
            if token.kind == "directive":
                self._rewrite_directive(token)
        self._remove_attributes()
        depth = 0
        for i, token in enumerate(self.solid):
            if token.kind == "word":
                self._rewrite_word(i, token, body or depth > 0)
            elif token.kind == "number":
                self._rewrite_number(i, token)
            elif token.text == "::" and self._is_global(i):
                # What is global for the author is in a namespace here.
                token.text = "::fr::" if self._text_at(i + 1) == "metal" else "::fr::user::"
            elif token.text == "{":
                depth += 1
            elif token.text == "}":
                depth -= 1

    def _is_global(self, i: int) -> bool:
        """Whether the `::` at i begins a name."""
        if i and self.solid[i - 1].kind == "word":
            return self.solid[i - 1].text in NO_TYPES
        return self._text_at(i - 1) not in (">", "]")

    # -- directives, attributes ------------------------------------------------------------------

    def _rewrite_directive(self, token: Token) -> None:
        text = token.text
        lines = "\n" * text.count("\n")
        if _INCLUDE.match(text):
            name = _INCLUDE.sub("", text).strip()
            bare = name.strip('<>"')
            if "tensor" in bare or bare.startswith("MetalPerformancePrimitives"):
                raise self.refuse(token, *REFUSED["mpp"])
            if name.startswith("<") and bare.startswith(METAL_HEADERS):
                token.text = lines
                return
            if bare.startswith("mlx/"):
                raise self.refuse(
                    token,
                    "an include of MLX's own kernel headers",
                    "MLX's utilities (elem_to_loc, Limits, ceildiv …) are there without an "
                    "include; paste what else is needed into `header`",
                )
            raise self.refuse(
                token,
                "this include",
                "only Metal's own headers (<metal_stdlib> …) can be included; paste the text "
                "into `header`",
            )
        if re.match(r"#[ \t]*pragma", text):
            self._note_contraction(token, text)
            token.text = ("#pragma unroll" if "unroll" in text else "") + lines

    def _note_contraction(self, token: Token, pragma: str) -> None:
        """Note what a pragma says of products that are summed, from its line on."""
        match = _CONTRACT.search(pragma)
        if match is not None:
            setting = (match[1] or match[2]).lower()
            self.marks.append(Mark(token.line, setting != "off"))

    def _remove_attributes(self) -> None:
        """Remove ``[[…]]``."""
        kept: list[Token] = []
        i = 0
        while i < len(self.solid):
            begins = self._text_at(i) == "[" == self._text_at(i + 1)
            end = partner(self.solid, i) if begins else -1
            if not (self._text_at(end - 1) == "]" == self._text_at(end)):
                width = 2 if begins else 1  # a[[…]…] is no attribute
                kept += self.solid[i : i + width]
                i += width
                continue
            for token in self.solid[i : end + 1]:
                if token.text in REFUSED:
                    raise self.refuse(token, *REFUSED[token.text])
                token.text = ""
            i = end + 1
        self.solid = kept

    # -- words -----------------------------------------------------------------------------------

    def _rewrite_word(self, i: int, token: Token, inside: bool) -> None:
        word = token.text
        if word in ADDRESS_SPACES:
            self._rewrite_address_space(i, token, inside)
        elif word in REFUSED and self._is_refused_use(i, word):
            raise self.refuse(token, *REFUSED[word])
        elif word == "double":
            self.notes.append(Note(self.where, token.line, "the type double"))
        elif word in ("_Pragma", "MLX_MTL_PRAGMA_UNROLL"):
            self._drop_pragma(i, token)
        elif word == "kernel" and self._text_at(i + 1) == "void":
            token.text = ""
        elif word == "coherent" and self._text_at(i + 1) == "(":
            self._drop_coherent(i)
        elif self._text_at(i - 1) in (".", "->"):
            self._rewrite_member(i, token)
        else:
            for prefix, (construct, instead) in REFUSED_PREFIXES.items():
                if word.startswith(prefix):
                    raise self.refuse(token, construct, instead)

    def _is_refused_use(self, i: int, word: str) -> bool:
        """Whether a refused word is used as what it is refused for, not as a local name."""
        after = self._text_at(i + 1)
        if word in ("mpp", "raytracing"):
            return after == "::" or self._text_at(i - 1) == "namespace"
        if word in ("asm", "__asm", "__asm__"):
            return True
        if word == "sampler":
            return any(t.kind == "word" for t in self.solid[i + 1 : i + 2])
        return after in ("<", "(") or self.solid[min(i + 1, len(self.solid) - 1)].kind == "word"

    def _rewrite_address_space(self, i: int, token: Token, inside: bool) -> None:
        if token.text == "constant":
            token.text = "" if self._near_const(i) else "const"
            return
        if token.text == "threadgroup" and inside and self._declares_storage(i):
            token.text = "thread_local"
            self._align_first(i, token)
            return
        token.text = ""

    def _align_first(self, i: int, token: Token) -> None:
        """Put ``alignas(…)`` before a declaration's specifiers: C++ has it nowhere else."""
        if self._text_at(i + 1) != "alignas" or self._text_at(i + 2) != "(":
            return
        aligned = self.solid[i + 1 : partner(self.solid, i + 2) + 1]
        token.text = f"{join(aligned)} thread_local"
        for moved in aligned:
            moved.text = ""

    def _drop_coherent(self, i: int) -> None:
        """Remove ``coherent(device)``: fences and atomics order what threads see."""
        if self._text_at(i + 2) in _SCOPES and self._text_at(i + 3) == ")":
            for token in self.solid[i : i + 4]:
                token.text = ""

    def _near_const(self, i: int) -> bool:
        for step in (-1, 1):
            j = i + step
            # A word that was rewritten to nothing keeps its place among the specifiers.
            while 0 <= j < len(self.solid) and self._text_at(j) in (*SPECIFIERS, ""):
                if self._text_at(j) in ("const", "constexpr"):
                    return True
                j += step
        return False

    def _drop_pragma(self, i: int, token: Token) -> None:
        if token.text != "_Pragma":
            token.text = ""
            return
        self._note_contraction(token, self._text_at(i + 2))
        for dropped in self.solid[i : i + 4]:
            dropped.text, dropped.kind = "", "space"

    def _rewrite_member(self, i: int, token: Token) -> None:
        name, after = token.text, self._text_at(i + 1)
        if not _SWIZZLE.fullmatch(name) or name in self.members or after in ("(", "<"):
            return
        if name in ("lo", "hi", "even", "odd"):
            index = f"::fr::{name}_ix{{}}"
        elif len(name) == 1:
            token.text = "xyzw"["rgba".index(name)]
            return
        else:
            index = f"::fr::ix<{','.join(str(_LANES[c]) for c in name)}>{{}}"
        token.text = f"{'swr' if after in _ASSIGN else 'swz'}({index})"

    # -- numbers ---------------------------------------------------------------------------------

    def _rewrite_number(self, i: int, token: Token) -> None:
        text = token.text
        fr = " ::fr" if self._text_at(i - 1) == ":" else "::fr"  # and not `:::`
        lower = text.lower()
        if lower.startswith("0x"):
            if "p" in lower and not lower.endswith("f"):
                token.text = text + "f"
            return
        if lower.endswith("bf") and _is_number(text[:-2]):
            token.text = f"{fr}::bfloat_lit({_with_point(text[:-2])})"
        elif lower.endswith("h") and _is_number(text[:-1]):
            token.text = f"{fr}::half_lit({_with_point(text[:-1])})"
        elif _FLOAT.fullmatch(text):
            token.text = text + "f"  # Metal has no double: an unmarked literal is a float


def _is_number(text: str) -> bool:
    return bool(_FLOAT.fullmatch(text)) or text.isdigit()


def _with_point(text: str) -> str:
    return text if _FLOAT.fullmatch(text) else text + ".0"
