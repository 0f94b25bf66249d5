"""Read the body of an op from a kernel function in a Metal file.

The function's buffers are the op's arrays, numbers and dims, by name. What stands before it is the
header, without other kernels; its thread attributes become variables of the body. All lines keep
their numbers, so that errors speak of the file's.
"""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from .. import dtypes
from ..errors import KernelError, KernelTypeError
from ..kernel import ATTRIBUTES, check_text
from ..rules.argument import Argument
from ..rules.rule import Rule
from ..source import words
from ..source.lexer import CLOSE, OPEN, Token, join, partner, solid, text_at, tokens
from .expressions import dtype_variables

_QUALIFIERS = words(
    "device constant threadgroup thread const volatile restrict __restrict __restrict__ metal ::"
)
_SHORT = {"char": "int8_t", "short": "int16_t", "int": "int32_t", "long": "int64_t"}
_ALIASES = {
    "bfloat": "bfloat16_t",
    "float16_t": "half",
    **_SHORT,
    **{f"u{short}": f"u{kind}" for short, kind in _SHORT.items()},
}
_ATTRIBUTE = ["[", "[", "kernel"]
# After these a name is used; after any other word it is declared.
_USES = frozenset({"return", "else", "case", "do", "sizeof", "and", "or", "not", "xor", "in"})


class FileBody(NamedTuple):
    """The body of an op, read from a file.

    Attributes:
        source, header: the texts, under the file's own line numbers.
        atomic: the function writes ``device atomic<T>*``.
    """

    source: str
    header: str
    atomic: bool


class _Function(NamedTuple):
    """A kernel function, as positions in the tokens of its file."""

    name: str
    start: int  # of its first word, which a template's head may be
    opened: int  # the bracket of its parameters
    closed: int
    body: int  # the brace
    end: int
    line: int


class _Parameter(NamedTuple):
    """One parameter of a kernel function.

    Attributes:
        kind: its type without address space and const, such as ``float`` or ``uint2``.
        mark: ``"*"``, ``"&"`` or ``""``.
        constant: what it points to is not written.
        attribute: the word in its ``[[…]]``, or ``""``.
    """

    name: str
    kind: str
    mark: str
    constant: bool
    attribute: str
    line: int


def read(
    op: str,
    rule: Rule,
    path: os.PathLike[str],
    function: object,
    template: Any,
    header: str = "",
) -> FileBody:
    """The body of a file's kernel function.

    Args:
        op, rule: the op that it is to carry out.
        path: the file, in UTF-8.
        function: the function's name; None for the only one.
        template: the op's own template parameters.
        header: the op's own, which must be empty.

    Raises:
        KernelError: there is a header; the file cannot be read or has no such function; or the
            function's parameters are not the rule's: says which, and the line.
        KernelTypeError: ``function`` is no str.
        DialectError: a comment is never closed.
    """
    shown = os.fspath(path)
    if header:
        raise KernelError(
            f"[op] op {op!r}: its `metal` is a file, in which its `header` belongs, too."
        )
    try:
        with open(path, encoding="utf-8") as file:
            text = check_text("metal", file.read(), op, "metal")
    except (OSError, UnicodeDecodeError) as error:
        raise KernelError(f"[op] `metal` of op {op!r}: {shown} cannot be read: {error}") from None
    parts = [t for t in tokens(text, kernel=op, where="header") if t.text]
    functions = _functions(parts)
    chosen = _choose(op, shown, functions, function)
    where = f"[op] op {op!r}, function {chosen.name!r} of {shown}"
    if sum((t.text == "{") - (t.text == "}") for t in parts[chosen.body : chosen.end + 1]):
        raise KernelError(f"{where}, line {parts[chosen.body].line}: its brace is never closed.")
    names = [entry if isinstance(entry, str) else entry[0] for entry in template or ()]
    _check_template(where, rule, parts[chosen.start : chosen.opened], names)
    parameters = _parameters(where, parts[chosen.opened + 1 : chosen.closed])
    prelude, renamed, atomic = _bind(where, rule, parameters)
    for other in functions:
        if other is not chosen:
            _blank_out(parts[other.start : other.end + 1])
    _rename(where, parts[chosen.body + 1 : chosen.end], renamed)
    lines = "\n" * (parts[chosen.body].line - 1)
    source = f"{lines}{prelude}{join(parts[chosen.body + 1 : chosen.end])}"
    return FileBody(source, join(parts[: chosen.start]), atomic)


def _choose(op: str, shown: str, functions: list[_Function], wanted: object) -> _Function:
    if wanted is not None and not isinstance(wanted, str):
        raise KernelTypeError(f"[op] `function` of op {op!r}: got {wanted!r}, expected a str.")
    functions = [f for f in functions if f.name]
    matches = [f for f in functions if wanted in (None, f.name)]
    if len(matches) == 1:
        return matches[0]
    names = ", ".join(repr(f.name) for f in functions)
    if not functions:
        problem = "no kernel function outside of namespaces and macros, kernel void f(…) {…}"
    elif matches and len({f.name for f in matches}) == 1:
        problem = (
            f"the kernel function {matches[0].name!r} more than once, at the lines "
            f"{' and '.join(str(f.line) for f in matches)}; it is read before any #if is, so "
            "leave one of them"
        )
    else:
        advice = "say which with `function`" if wanted is None else f"there is no one {wanted!r}"
        problem = f"the kernel functions {names}; {advice}"
    raise KernelError(f"[op] `metal` of op {op!r}: {shown} has {problem}.")


def _functions(parts: list[Token]) -> list[_Function]:
    """The kernel functions of a file, outside of all brackets."""
    functions: list[_Function] = []
    start = 0  # of the statement
    i = 0
    while i < len(parts):
        token = parts[i]
        if token.kind == "directive" or token.macro or token.text == ";":
            start = i + 1
        elif token.text == "kernel" or [t.text for t in parts[i : i + 3]] == _ATTRIBUTE:
            functions.append(_function(parts, start, i))
            i, start = functions[-1].end, functions[-1].end + 1
        elif token.text in OPEN:
            i = _partner(parts, i)
            if parts[i].text == "}":
                start = i + 1
        i += 1
    return functions


def _function(parts: list[Token], start: int, i: int) -> _Function:
    """The kernel function whose word ``kernel`` is at i; without a name where it has no body."""
    name, opened, closed = "", i, i
    while i < len(parts) - 1 and parts[i].text not in (";", "{"):
        if parts[i].text == "(":
            name = next(t.text for t in reversed(parts[:i]) if not t.blank)
            opened, closed = i, _partner(parts, i)
        i = _partner(parts, i) + 1 if parts[i].text in OPEN else i + 1
    if text_at(parts, i) != "{":  # declared, or a template that is instantiated, or not closed
        return _Function("", start, opened, closed, i, i, parts[opened].line)
    return _Function(name, start, opened, closed, i, _partner(parts, i), parts[opened].line)


def _partner(parts: list[Token], i: int) -> int:
    """The bracket that closes the one at i; the last token where none does."""
    end = partner(parts, i)
    return len(parts) - 1 if end < 0 else end


def _blank_out(parts: list[Token]) -> None:
    """Erase tokens, but for their line breaks."""
    for token in parts:
        token.text = "\n" * token.text.count("\n")


def _check_template(where: str, rule: Rule, head: list[Token], template: Sequence[str]) -> None:
    """Refuse template parameters that nothing gives a value."""
    words = solid(head)
    if not words or words[0].text != "template":
        return
    variables = dtype_variables(rule)
    for before, token in itertools.pairwise(words):
        if token.text in ("kernel", "["):
            return
        typed = before.text in ("typename", "class")
        if token.kind != "word" or not (typed or before.text in ("int", "uint", "bool", "short")):
            continue
        if token.text not in (*variables, *template):
            raise KernelError(
                f"{where}, line {token.line}: nothing gives its template parameter {token.text!r} "
                f"a value; {'name a dtype so in the rule, or ' if typed else ''}give "
                f'`template={{"{token.text}": …}}`.'
            )


def _parameters(where: str, parts: list[Token]) -> list[_Parameter]:
    """The parameters between two brackets."""
    parameters: list[_Parameter] = []
    own: list[Token] = []
    depth = 0
    for token in [*solid(parts), Token("op", ",", 0)]:
        depth += (token.text in (*OPEN, "<")) - (token.text in (*CLOSE, ">"))
        if token.text != "," or depth:
            own.append(token)
        elif own:
            parameters.append(_parameter(where, own))
            own = []
    return parameters


def _parameter(where: str, parts: list[Token]) -> _Parameter:
    line, text = parts[0].line, " ".join(t.text for t in parts)
    attribute, parts = _without_attributes(parts)
    mark = "".join(t.text for t in parts if t.text in ("*", "&"))
    if not mark and parts and parts[-1].text == "]":  # an array, which is a pointer
        mark, parts = "*", parts[: next(i for i, t in enumerate(parts) if t.text == "[")]
    words = [t for t in parts if t.text not in _QUALIFIERS]
    if any(t.text == "threadgroup" for t in parts) or not words or words[-1].kind != "word":
        raise KernelError(
            f"{where}, line {line}: the parameter {text!r} is no buffer; declare "
            "threadgroup memory in the body, with a size that is a constant or of `template=`."
        )
    kind = "".join(t.text for t in words[:-1] if t.text not in ("*", "&"))
    if kind.startswith("unsigned"):
        signed = kind.removeprefix("unsigned") or "int"
        kind = f"u{signed}" if signed in _SHORT else kind
    pointed = list(itertools.takewhile(lambda t: t.text not in ("*", "&"), parts))
    constant = any(t.text in ("const", "constant") for t in pointed)
    return _Parameter(words[-1].text, kind, mark, constant, attribute, line)


def _without_attributes(parts: list[Token]) -> tuple[str, list[Token]]:
    """A parameter's first attribute, and its tokens without any attribute."""
    attribute, plain = "", []
    i = 0
    while i < len(parts):
        if text_at(parts, i) == "[" == text_at(parts, i + 1):
            attribute = attribute or text_at(parts, i + 2)
            i = _partner(parts, i)
        else:
            plain.append(parts[i])
        i += 1
    return attribute, plain


def _rename(where: str, parts: list[Token], renamed: dict[str, str]) -> None:
    """Replace the names of parameters in a body by what stands for them."""
    before = Token("op", "", 0)
    for token in solid(parts):
        name = token.text
        if token.kind == "word" and name in renamed and before.text not in (".", "->", "::"):
            if before.kind == "word" and before.text not in _USES:
                raise KernelError(
                    f"{where}, line {token.line}: {name!r} is a parameter, and declared once more "
                    "here; give one of them another name."
                )
            token.text = renamed[name]
        before = token


def _bind(where: str, rule: Rule, parameters: list[_Parameter]) -> tuple[str, dict[str, str], bool]:
    """Declarations of attributes, what to write for other names, whether outputs are atomic."""
    arguments = {a.name: a for a in (*rule.inputs, *rule.outputs)}
    written = {a.name for a in rule.outputs} | {a.name for a in rule.inputs if a.mutable}
    atomic: dict[str, bool] = {}
    prelude, renamed = "", {}
    names: set[str] = set()
    for p in parameters:
        place = f"{where}, line {p.line}: "
        if p.name in names:
            raise KernelError(f"{place}there is another parameter {p.name!r}.")
        names.add(p.name)
        if not p.mark:
            value = _attribute(place, p)
            if p.name == p.attribute and p.kind != ATTRIBUTES[p.attribute]:
                renamed[p.name] = value
            elif p.name != p.attribute:
                prelude += f"{p.kind} {p.name} = {value}; "
        elif p.name in arguments:
            kind = p.kind
            if p.name in written:
                atomic[p.name], kind = _written_type(place, p, arguments[p.name])
            _check_buffer(place, p, kind, arguments[p.name])
        elif p.name in rule.dim_names:
            _check_dim(place, p)
            if p.kind.startswith("u"):  # the op's dims are ints
                renamed[p.name] = f"uint({p.name})"
        else:
            raise _unknown(place, p.name, [*arguments, *rule.dim_names])
    missing = [name for name in arguments if name not in {p.name for p in parameters if p.mark}]
    if missing:
        declared = arguments[missing[0]]
        raise KernelError(f"{where} has no buffer {missing[0]!r}, which the rule has ({declared}).")
    if len(set(atomic.values())) > 1:
        plain = next(name for name, is_atomic in atomic.items() if not is_atomic)
        raise KernelError(
            f"{where}: some of its outputs are atomic and {plain!r} is not; make all of them so."
        )
    return prelude, renamed, any(atomic.values())


def _written_type(place: str, p: _Parameter, argument: Argument) -> tuple[bool, str]:
    """Whether a parameter that is written is atomic, and the type of its elements."""
    if p.constant:
        raise KernelError(
            f"{place}{p.name!r} is written, as the rule has it ({argument}); declare it without "
            "const."
        )
    plain = p.kind.removeprefix("atomic<").removesuffix(">").removeprefix("atomic_")
    return p.kind.startswith("atomic"), plain


def _check_buffer(place: str, p: _Parameter, kind: str, argument: Argument) -> None:
    """Refuse a parameter whose form or elements are not the rule's."""
    if (p.mark == "&") == bool(argument.dims):
        form = "an array" if argument.dims else "a value without dims"
        mark = "*" if argument.dims else "&"
        raise KernelError(
            f"{place}{p.name!r} is {form} in the rule ({argument}); declare it with {mark!r}."
        )
    dtype = dtypes.BY_NAME.get(argument.dtype)
    expected = argument.dtype if dtype is None else dtype.metal
    if _ALIASES.get(kind, kind) != _ALIASES.get(expected, expected):
        raise KernelError(
            f"{place}{p.name!r} has elements {kind!r}, but the rule says {argument} "
            f"({expected!r} in Metal); make them equal."
        )


def _check_dim(place: str, p: _Parameter) -> None:
    """Refuse a parameter for a dim that is no reference to an integer."""
    if p.mark != "&" or p.kind not in ("int", "uint", "int32_t", "uint32_t"):
        raise KernelError(
            f"{place}{p.name!r} is a dim in the rule; declare it as "
            f"'constant int& {p.name}' or 'constant uint& {p.name}'."
        )


def _unknown(place: str, name: str, names: list[str]) -> KernelError:
    """The error for a buffer that the rule has no argument or dim for."""
    close = difflib.get_close_matches(name, names, 1)
    return KernelError(
        f"{place}the rule has no {name!r}"
        + (f"; did you mean {close[0]!r}?" if close else f", but {', '.join(names)}.")
        + " A buffer has the name of an array or a number of the rule, or is an int or "
        "uint with the name of a dim."
    )


def _attribute(place: str, p: _Parameter) -> str:
    """The expression for a parameter that is a thread attribute."""
    if p.attribute not in ATTRIBUTES:
        close = difflib.get_close_matches(p.attribute, list(ATTRIBUTES), 1, 0.8)
        described = f"the attribute [[{p.attribute}]]" if p.attribute else "no attribute"
        raise KernelError(
            f"{place}the parameter {p.name!r} is no buffer and has {described}; "
            + (
                f"did you mean {close[0]!r}?"
                if close
                else f"expected one of {', '.join(ATTRIBUTES)}."
            )
        )
    wide = ATTRIBUTES[p.attribute] == "uint3"
    size = p.kind[-1:] if p.kind[-1:] in ("2", "3") else ""
    if p.kind.removesuffix(size) not in ("uint", "ushort", "uint32_t", "uint16_t") or (
        size and not wide
    ):
        raise KernelError(
            f"{place}{p.name!r} is a {p.kind}; [[{p.attribute}]] is a {ATTRIBUTES[p.attribute]}, "
            "or what has fewer or shorter components."
        )
    value = p.attribute + {"": ".x", "2": ".xy", "3": ""}[size] * wide
    return value if p.kind == ATTRIBUTES[p.attribute] else f"{p.kind}({value})"
