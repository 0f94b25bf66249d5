"""A compiler's complaints in the author's terms: the kernel, the line, the line's text."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..errors import CompileError
from ..kernel import ATTRIBUTES, Kernel

_LINE = re.compile(
    r"^(?P<file>[^\s:]+)[:(](?P<line>\d+)(?:[:,](?P<column>\d+))?\)?:?\s*"
    r"(?P<kind>fatal error|error|catastrophic error)\b[^:]*:\s*(?P<message>.*)$"
)

# Sizes are known in a call alone: what gcc, clang and NVRTC say of an array of such a size.
_NOT_CONSTANT = re.compile(
    r"\bconstant (expression|value)\b|\bisn't constant|variably modified|variable[- ]length array"
)

# Of names that nothing declares, by gcc, clang and NVRTC.
_UNDECLARED = re.compile(
    r"'(\w+)' was not declared|undeclared identifier '(\w+)'|\"(\w+)\" is undef"
)

# Of C's and CUDA's functions of floats that Metal has without the f.
_MATH = re.compile(
    r"(?:__)?(a?(?:cos|sin|tan)h?|atan2|ceil|copysign|exp(?:2|10)?|fabs|fdim|floor|fma|fmax|fmin|fmod"
    r"|log(?:2|10)?|nextafter|pow|rint|round|r?sqrt|trunc)f"
)

# Of CUDA's atomics.
_ATOMIC = re.compile(r"atomic(Add|Sub|Min|Max|And|Or|Xor|Exch|CAS)")
_ATOMICS = {"Exch": "exchange", "CAS": "compare_exchange_weak"}

# Of what many call a thread's number.
_NUMBER = re.compile(r"[gtl]?idx?|index|(global|thread|local)_?(id|idx|index)|[gt]_?index", re.I)

# Of a vector where a number is expected.
_VECTOR = re.compile(r"\buint3\b|\bvec<|'operator|no operator")

# Of what is starred and is none, by gcc, clang and NVRTC.
_NO_POINTER = re.compile(r"unary '\*'|indirection|operand of (['\"])\*\1")

# Of a name that a template calls, gcc speaks once more where the template is made.
_UNKNOWN = re.compile(
    r"there are no arguments to ('\w+') that depend on a template parameter, so a declaration of "
    r"'\w+' must be available"
)
_SUGGESTION = re.compile(r"; did you mean .*")

# Names of the header and of the rewriter, and what the author wrote.
_TERMS: tuple[tuple[str, str], ...] = (
    (r"‘|’|“|”", "'"),
    (r"(?:::)?\bmlx::core::cu::", ""),
    (r"\bfr::user::", ""),
    (r"\(anonymous namespace\)::", ""),
    (r"(?:::)?\bfr::metal::packed<(\w+), (\d)>", r"packed_\1\2"),
    (r"(?:::)?\bfr::metal::", "metal::"),
    (r"\bmetal::vec<(\w+), (\d)>", r"\1\2"),
    (r"(?:::)?\bfr::metal\b", "metal"),
    (r"(?:::)?\bfr::(half|bfloat)_lit\(([^()]*)\)", r"\2"),
    (r"(?:::)?\b(?:fr::)?(?:core::)?(half|bfloat)\b", r"\1"),
    (r"(?:::)?\b(?:fr::)?core::(u?int\d+_t|size_t|ptrdiff_t|uchar|ushort|uint|ulong)\b", r"\1"),
    (r"(?:::)?\b(?:fr::)?core::", "metal::"),
    (r"(?:::)?\bfr::pick<.*?>", ""),
    (r"(?:::)?\bfr::", ""),
    (r"\b_Float16\b", "half"),
    (r"\bfr_(?:a|m|h\d+|p\d+)_(\w+)", r"\1"),
    (r"\bthread_local\b", "threadgroup"),
    (r"\bfr_kernel(?:<[^<>]*>)?\([^()]*\)::", ""),
    (r"\bfr_kernel\b", "the kernel"),
    (
        r"assignment of read-only location '\W*(?:const [\w:<>, ]+\*\)+)?\W*(\w+).*",
        r"assignment to '\1', which is an input",
    ),
    (r"is not a member of 'user'", "is not declared"),
    (r"\bfr_[a-z]\d+\b(?: ?\[\d+\])?", "value"),
    (r"\bconst group&, (?:unsigned int, )*", ""),
    (r", std::nullptr_t", ""),
    (r" \{aka '[^']*'\}", ""),
    (r" __restrict__\b", ""),
    (r" \[-[fW][\w=+-]*\]$", ""),  # the compiler's option that would allow it
    (_UNKNOWN.pattern, r"\1 was not declared in this scope"),
)


class Complaint(NamedTuple):
    """One error of a compiler: where (``"source"``, ``"header"`` or ``""``), line, message.

    Attributes:
        behind: it is of ferrule's text, to which the author's line led.
    """

    where: str
    line: int
    column: int
    message: str
    behind: bool = False


def in_authors_terms(message: str) -> str:
    """A compiler's message without the names that only ferrule's headers use."""
    for pattern, replacement in _TERMS:
        message = re.sub(pattern, replacement, message)
    return message


def complaints(kernel: Kernel, log: str) -> list[Complaint]:
    """The errors in a compiler's output."""
    return _complaints(kernel.name, ("source", "header"), log)


def _complaints(name: str, labels: Iterable[str], log: str) -> list[Complaint]:
    complaints: list[Complaint] = []
    files = rf"(?:.*/)?{re.escape(name)}\.({'|'.join(map(re.escape, labels))})"
    own = re.compile(rf"{files}[:(](\d+)")
    origin = re.compile(rf" at line (\d+) of {files}(?!\w)")
    mentioned: tuple[str, int] | None = None  # the author's line that an error elsewhere is about
    for text in log.splitlines():
        here = own.match(text)
        match = _LINE.match(text)
        if match is None:
            after = origin.search(text)  # NVRTC's way
            if after is not None:
                _adopt(complaints, (after[2], int(after[1])))
            if here is not None and (mentioned is None or "required from" in text):
                mentioned = here[1], int(here[2])
                if "note:" in text:
                    _adopt(complaints, mentioned)  # clang's way
            continue
        message = in_authors_terms(match["message"].strip())
        if here is not None:
            complaints.append(Complaint(here[1], int(here[2]), int(match["column"] or 0), message))
        else:
            where, line = mentioned or ("", int(match["line"]))
            complaints.append(Complaint(where, line, 0, message, behind=True))
        mentioned = None
    return _each_once(complaints)


def _each_once(complaints: list[Complaint]) -> list[Complaint]:
    """Complaints without repetitions, and without what follows from an error of the same line."""
    first: dict[tuple[str, int, str], Complaint] = {}
    direct = {(c.where, c.line) for c in complaints if c.where and not c.behind}
    for c in complaints:
        if c.behind and (c.where, c.line) in direct:
            continue
        key = c.where, c.line, _SUGGESTION.sub("", c.message)
        if key not in first or len(c.message) > len(first[key].message):
            first[key] = c
    return list(first.values())


def _at_the_end(complaints: list[Complaint], texts: Mapping[str, str]) -> list[Complaint]:
    """Complaints about the text behind the source, which left something open, at its last line."""
    lines = texts.get("source", "").rstrip().splitlines()
    if not lines or texts.get("header", "").strip():  # which may be what leaves something open
        return []
    opened = [c for c in complaints if c.message.startswith("expected")]
    return [c._replace(where="source", line=len(lines)) for c in opened[:1]]


def _adopt(complaints: list[Complaint], place: tuple[str, int]) -> None:
    """Give the last complaint the place in the author's text that the compiler names after it."""
    if complaints and not complaints[-1].where:
        complaints[-1] = complaints[-1]._replace(where=place[0], line=place[1])


def compile_error(
    kernel: Kernel, log: str, compiler: str, scalars: Sequence[str] = ()
) -> CompileError:
    """A `CompileError` that quotes the author's lines.

    Args:
        kernel: what does not compile.
        log: the compiler's output.
        compiler: its name and version.
        scalars: the inputs that have no dims, which Metal bodies have as values.
    """
    texts = {"source": kernel.source, "header": kernel.header}
    hints = list(_hints(kernel, log, scalars)) if kernel.language == "metal" else []
    return refused("kernel", kernel.name, texts, log, compiler, hints=hints)


def _hints(kernel: Kernel, log: str, scalars: Sequence[str]) -> Iterator[str]:
    """Hints for the author of a Metal body, one line each."""
    lines = kernel.source.splitlines()
    errors = [
        (lines[c.line - 1], c.message)
        for c in complaints(kernel, log)
        if c.where == "source" and 0 < c.line <= len(lines)
    ]
    for name in scalars:
        if any(_as_pointer(name, *error) for error in errors):
            yield (
                f"  Input {name!r} has no dims, and so is a value in Metal, not a pointer: write "
                f"{name} for its element, or give it a dim of size 1."
            )
        own = re.compile(rf"\[[^\]]*\b{re.escape(name)}\b")
        if any(
            _NOT_CONSTANT.search(message) and own.search(text + message) for text, message in errors
        ):
            yield (
                f"  {name!r} is known only in a call, and the compiler must know the size of an "
                f'array: make it a template parameter, `template={{"{name}": "{name}"}}` of an op '
                f'or `template=[("{name}", …)]` in a call of a metal_kernel.'
            )
    for name in kernel.output_names if not kernel.atomic_outputs else ():
        used = re.compile(rf"\batomic_\w+\s*\([^;]*\b{re.escape(name)}\b")
        if any(used.search(text) for text, _ in errors):
            yield (
                f"  Output {name!r} is no atomic: `atomic_outputs=True` makes every output a "
                "`device atomic<T>*`."
            )
    for name in (name for name, kind in ATTRIBUTES.items() if kind == "uint3"):
        bare = re.compile(rf"(?<![\w.]){name}\b(?!\s*[.\[])")
        if any(bare.search(text) and _VECTOR.search(message) for text, message in errors):
            yield f"  {name!r} is a uint3: write {name}.x for a number, {name}.xy for two."
    described = [f"{n}_{part}" for n in kernel.input_names for part in ("shape", "strides", "ndim")]
    everywhere = [c.message for c in complaints(kernel, log) if c.where]
    for name in dict.fromkeys(_undeclared(everywhere)):
        math = _MATH.fullmatch(name)
        if math:
            yield f"  {name!r} is a name of C and CUDA: write metal::{math[1]}, of any float type."
        atomic = _ATOMIC.fullmatch(name)
        if atomic:
            metal = _ATOMICS.get(atomic[1], f"fetch_{atomic[1].lower()}")
            yield (
                f"  {name!r} is CUDA's: write atomic_{metal}_explicit, with `atomic_outputs=True` "
                "where it is on an output, or give a body in CUDA by `cuda=`."
            )
    messages = " ".join(message for _, message in errors)
    for name in dict.fromkeys(_undeclared(message for _, message in errors)):
        for close in difflib.get_close_matches(name, [*ATTRIBUTES, *described], 1, 0.8):
            if f"did you mean '{close}'" not in messages:  # the compiler's own words
                yield f"  Nothing is called {name!r} here; did you mean {close!r}?"
        if _NUMBER.fullmatch(name):
            yield (
                f"  Nothing is called {name!r} here: a thread's place in the grid is "
                "thread_position_in_grid.x, in its threadgroup thread_position_in_threadgroup.x."
            )


def _undeclared(messages: Iterable[str]) -> Iterator[str]:
    """The names that nothing declares, by what a compiler says."""
    for match in map(_UNDECLARED.search, messages):
        if match is not None:
            yield match[match.lastindex or 0]


def _as_pointer(name: str, text: str, message: str) -> bool:
    """Whether a line about which a compiler complains takes a name for a pointer."""
    if re.search(rf"(?<![\w.]){re.escape(name)}\s*\[", text):
        return True
    starred = re.search(rf"\*\s*{re.escape(name)}\b", text) is not None
    return starred and _NO_POINTER.search(message) is not None


def refused(
    kind: str,
    name: str,
    texts: Mapping[str, str],
    output: str,
    compiler: str,
    log: str | None = None,
    hints: Sequence[str] = (),
) -> CompileError:
    """A `CompileError` that quotes the author's lines.

    Args:
        kind: ``"kernel"`` or ``"unit"``.
        name: its name.
        texts: what the author wrote, by what diagnostics call it after the name and a dot; those
            called ``step1``, ``step2`` … have one line.
        output: the compiler's output.
        compiler: its name and version.
        log: what the exception keeps; ``output`` where None.
        hints: lines that follow the author's.
    """
    log = output if log is None else log
    complaints = _complaints(name, texts, output)
    own = [c for c in complaints if c.where] or _at_the_end(complaints, texts)
    parts = [f"{kind} {name!r} does not compile ({compiler}):"]
    for c in own[:5]:
        lines = texts[c.where].splitlines()
        quoted = lines[c.line - 1].strip() if 0 < c.line <= len(lines) else ""
        step = c.where.startswith("step")
        parts.append(f"  {c.where}{'' if step else f' line {c.line}'}: {c.message}")
        parts.append(f"    | {quoted}")
    if len(own) > 5:
        parts.append(f"  … and {len(own) - 5} more; all of it is in the exception's `log`.")
    parts += hints
    constant = any(_NOT_CONSTANT.search(c.message) for c in own)
    if constant and not any("`template=" in hint for hint in hints):
        parts.append("  What the compiler is to know as a constant is given by `template`.")
    if not own:
        # The fault shows only inside the generated text: say so, with what the compiler said.
        parts.append(f"  no error lies in the {kind}'s own lines; the compiler said:")
        parts += [f"    {c.message}" for c in complaints[:5]] or [f"    {log.strip()[:2000]}"]
    return CompileError("\n".join(parts), kernel=name, log=log)
