"""Finds, token by token, what runs here but is refused by Apple's compiler."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

from ..kernel import ATTRIBUTES, Kernel
from . import Note, words
from .branches import compiled
from .dialect import ADDRESS_SPACES
from .lexer import Token, solid, text_at

_TYPE = re.compile(
    r"(packed_)?(u?(char|short|int|long)|half|float|bfloat|bool)[234]?|size_t|u?int\d+_t|void"
    r"|(b?float16|complex64|simdgroup_matrix|simdgroup_\w+8x8|atomic_\w+)(_t)?"
)
_QUALIFIERS = words("const volatile unsigned signed static inline constexpr metal ::")
_BEFORE_TYPE = (";", "{", "}", "(", ",", "<", ":")  # after which a type may begin
_AFTER_POINTER = ("=", ";", ",", ")", "[", "(")  # after the name of a pointer
_AFTER_REFERENCE = ("=", ";", ",", ")", ":")  # after that of a reference

# What Metal's atomics hold, by MSL's "Atomic Functions"; of 64 bits, the least and greatest alone.
_ATOMIC = words("int uint float bool int32_t uint32_t ulong uint64_t")
_WIDE = frozenset({"ulong", "uint64_t"})
_WIDE_OPERATIONS = re.compile(r"atomic_(load|store|exchange|compare_\w+|fetch_\w+)_explicit")


def notes(kernel: Kernel, wide: Iterable[str] = (), types: Iterable[str] = ()) -> Iterator[Note]:
    """The notes on header and body, each once a line.

    Args:
        types: template parameters that are types.
        wide: the outputs that are 64-bit atomics. Metal's ``atomic_ulong`` has
            ``atomic_min_explicit`` and ``atomic_max_explicit`` alone, in device memory.
    """
    code_of = {
        where: [t for t in solid(code) if t.kind != "directive" and not t.macro]
        for where, code in zip(("header", "source"), compiled(kernel, ours=False), strict=True)
    }
    declared = _declared_types([*code_of["header"], *code_of["source"]], types)
    for where, code in code_of.items():
        body = where == "source"
        sizes = _variable_arrays(code, kernel, declared) if body else ()
        text_notes = {Note(where, line, problem): None for line, problem in sizes}
        # Atomics of 64 bits, by name.
        wide_names = {name: f"uint64 (output {name!r})" for name in wide if body}
        for i, token in enumerate(code):
            problem = (
                _pointer_note(code, i, declared)
                or ("" if body else _memory_note(code, i))
                or _atomic_note(code, i)
                or _own_note(code, i)
                or _wide_atomic_note(code, i, wide_names)
                or (_print_note(code, i) if kernel.portable else "")
            )
            if problem:
                text_notes[Note(where, token.line, problem)] = None
        yield from text_notes


def _declared_types(code: list[Token], types: Iterable[str]) -> set[str]:
    """These types and those that a text declares, but no alias that may have an address space."""
    pairs = list(itertools.pairwise(t.text for t in code))
    names = {*types, *(b for a, b in pairs if a in ("struct", "class", "typename"))}
    for i, (word, name) in enumerate(pairs):
        alias = word == "using" and text_at(code, i + 2) == "="
        if word != "typedef" and not alias:
            continue
        end = next((j for j in range(i, len(code)) if code[j].text == ";"), i)
        if alias:
            definition = code[i + 3 : end]
        else:
            name, definition = code[end - 1].text, code[i + 1 : end - 1]
        if definition and all(_is_type(t.text, names) or t.text in _QUALIFIERS for t in definition):
            names.add(name)
    return names


def _is_type(word: str, declared: set[str]) -> bool:
    return _TYPE.fullmatch(word) is not None or word in declared


def _pointer_note(code: list[Token], i: int, declared: set[str]) -> str:
    """The note on a pointer's ``*`` or a reference's ``&`` without an address space, or ``""``."""
    pointer = code[i].text == "*"
    if code[i].text not in ("*", "&") or text_at(code, i - 1) in ("*", "&"):
        return ""
    start = i
    spaced = has_type = False
    while start > 0 and code[start - 1].text not in _BEFORE_TYPE:
        word = code[start - 1]
        if word.kind != "word" and word.text != "::":
            return ""
        kind = _is_type(word.text, declared)
        has_type |= kind
        # What is no word of a type may be a macro with an address space.
        spaced |= not kind and word.text not in _QUALIFIERS
        if not has_type and spaced and word.text not in ADDRESS_SPACES:
            return ""
        start -= 1
    if not has_type or spaced:
        return ""
    after = i + 1
    while text_at(code, after) in ("const", "*", "volatile"):
        after += 1
    has_name = any(t.kind == "word" for t in code[after : after + 1])
    name, behind = text_at(code, after), text_at(code, after + 1)
    if pointer:
        cast = name in (")", ">") and text_at(code, start - 1) in ("(", "<")
        refused = cast or (has_name and behind in _AFTER_POINTER)
        return "a pointer without an address space" if refused else ""
    refused = has_name and name != "operator" and behind in _AFTER_REFERENCE
    refused = refused and not _is_lambda_parameter(code, start)
    return "a reference without an address space" if refused else ""


def _is_lambda_parameter(code: list[Token], i: int) -> bool:
    """Whether a token stands among the parameters of a lambda."""
    depth = 0
    for j in range(i - 1, -1, -1):
        text = code[j].text
        depth += (text == ")") - (text == "(")
        if depth < 0:
            return text_at(code, j - 1) == "]"
        if text in (";", "{", "}"):
            return False
    return False


def _variable_arrays(
    code: list[Token], kernel: Kernel, declared: set[str]
) -> Iterator[tuple[int, str]]:
    """The lines and notes of a body's arrays whose size depends on a variable."""
    described = [f"{x}_{part}" for x in kernel.input_names for part in ("shape", "strides", "ndim")]
    names = {*ATTRIBUTES, *kernel.input_names, *described}
    for i, token in enumerate(code):
        start = i
        while start > 0 and (code[start - 1].kind == "word" or code[start - 1].text == "::"):
            start -= 1
        before = {t.text for t in code[start:i]}
        if token.kind != "word" or not before:
            continue
        if text_at(code, i + 1) == "=":
            plain = all(_is_type(word, declared) or word in ("unsigned", "auto") for word in before)
            varies = plain or _varies(code, i + 2, ";", names)
            (names.add if varies else names.discard)(token.text)
        elif _is_type(code[i - 1].text, declared) and "threadgroup" not in before:
            bracket = i + 1
            while text_at(code, bracket) == "[":
                if _varies(code, bracket + 1, "]", names):
                    yield token.line, f"an array whose size is no constant ({token.text!r})"
                    break
                ends = (j + 1 for j in range(bracket, len(code)) if code[j].text == "]")
                bracket = next(ends, -1)


def _varies(code: list[Token], i: int, end: str, names: set[str]) -> bool:
    """Whether an expression that begins here uses the value of one of these names."""
    indices = itertools.takewhile(lambda j: code[j].text != end, range(i, len(code)))
    words = {code[j].text for j in indices if code[j - 1].text not in ("::", ".")}
    return not {"sizeof", "decltype"} & words and not names.isdisjoint(words)


def _memory_note(code: list[Token], i: int) -> str:
    """The note on threadgroup memory that a helper function declares, or ``""``."""
    if code[i].text != "threadgroup" or not _in_braces(code, i):
        return ""
    for j in range(i + 1, len(code)):
        text = code[j].text
        if text in ("*", "&", "(", ")", "{"):  # a pointer, a parameter, the qualifier of a method
            return ""
        if text in (";", "[", "="):
            return "threadgroup memory in a function that is no kernel"
    return ""


def _in_braces(code: list[Token], i: int) -> bool:
    """Whether a token stands in braces, and not in a list of parameters."""
    braces = brackets = 0
    for token in code[:i]:
        braces += (token.text == "{") - (token.text == "}")
        brackets += (token.text == "(") - (token.text == ")")
    return braces > 0 and brackets == 0


def _atomic_note(code: list[Token], i: int) -> str:
    """The note on an atomic type that Metal lacks, or ``""``."""
    word = code[i].text
    if word in ("atomic_long", "atomic_double"):
        return f"atomics on {word.removeprefix('atomic_')}"
    if word == "atomic" and text_at(code, i + 1) == "<":
        value_type = text_at(code, i + 2)
        if _TYPE.fullmatch(value_type) and value_type not in _ATOMIC:
            return f"atomics on {value_type}"
    return ""


def _own_note(code: list[Token], i: int) -> str:
    """The note on a function of the dialect that Metal lacks, or ``""``."""
    used = text_at(code, i + 1) == "::" and text_at(code, i + 2) == "prefetch"
    opened = text_at(code, i - 1) == "namespace" and text_at(code, i - 2) == "using"
    ours = code[i].text == "ferrule" and (used or opened)
    return "a function of `ferrule::` outside of an `#ifdef FERRULE`" if ours else ""


def _print_note(code: list[Token], i: int) -> str:
    """The note on printf; said only where it is an error, as printf is for finding one."""
    used = code[i].text == "printf" and text_at(code, i + 1) == "("
    return "printf (Metal has os_log_default.log)" if used else ""


def _wide_atomic_note(code: list[Token], i: int, wide_names: dict[str, str]) -> str:
    """The note on a 64-bit atomic in threadgroup memory, or an operation that Metal lacks.

    Args:
        wide_names: 64-bit atomics by name; what is declared here is added.
    """
    word = code[i].text
    of_ulong = word == "atomic" and text_at(code, i + 1) == "<" and text_at(code, i + 2) in _WIDE
    if word == "atomic_ulong" or of_ulong:
        after = i + (4 if of_ulong else 1)
        while text_at(code, after) in ("*", "&", "const", "volatile"):
            after += 1
        if 0 < after < len(code) and code[after].kind == "word":
            wide_names[code[after].text] = f"ulong ({code[after].text!r})"
            before = {t.text for t in code[max(0, i - 4) : i]}
            if "threadgroup" in before and text_at(code, after - 1) not in ("*", "&"):
                return "atomics on ulong in threadgroup memory"
    elif text_at(code, i + 1) == "=" and word not in wide_names:  # p = &y[0], p = y + 1
        sources = [t.text for t in code[i + 2 : i + 5] if t.text not in ("&", "(")][:1]
        if sources and sources[0] in wide_names and text_at(code, i - 1) in ("auto", "*", ">"):
            wide_names[word] = wide_names[sources[0]]
    elif _WIDE_OPERATIONS.fullmatch(word) and text_at(code, i + 1) == "(":
        depth = 0
        for j in range(i + 1, len(code)):
            text = code[j].text
            depth += (text in ("(", "[", "<")) - (text in (")", "]", ">"))
            if depth == 0 or (depth == 1 and text == ","):
                break
            if text in wide_names:
                return f"{word} of atomics on {wide_names[text]}"
            if text == "atomic_ulong" or (text == "atomic" and text_at(code, j + 2) in _WIDE):
                return f"{word} of atomics on ulong"
    return ""
