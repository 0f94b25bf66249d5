"""Inline PTX as calls of include/cuda_cpu_ptx.h: the instructions that kernels are written with.

An ``asm`` statement becomes a block: its operands get names, and each instruction is a call. What
is not in the table is not known on the CPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..lexer import Token, partner, text_at

ASM = frozenset({"asm", "__asm__", "__asm"})
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_SPACES = re.compile(r"\.(shared|global)(?:::cta)?(?![\w:])")

_INT = r"[busf](?:8|16|32|64)"
_CACHE = (
    r"(?:\.(?:nc|ca|cg|cs|lu|cv|wb|wt|volatile|weak|relaxed|acquire|release|cta|gpu|sys|unified)"
)
_CACHE += r"|\.L[12]::[\w:]+|\.(?:shared|global|local|const)(?:::cta)?)*"
_ALL_FLOATS = r"\.(f32|f64|f16|bf16|f16x2|bf16x2)"
_FLOATS = r"(?:\.(?:rn|rz|ftz|approx|sat|full))*"
# An instruction's name, and the function that does it; groups are its template arguments.
_KNOWN: tuple[tuple[str, str], ...] = (
    (rf"ld{_CACHE}(?:\.v[248])?\.({_INT})", "load<{0}>"),
    (rf"st{_CACHE}(?:\.v[248])?\.({_INT})", "store<{0}>"),
    (r"cp\.async\.c[ag]\.shared(?:::cta)?\.global(?:\.L2::\w+)?", "copy"),
    (r"cp\.async\.(?:commit_group|wait_group|wait_all)", "nothing"),
    (r"(?:prefetchu?|griddepcontrol|fence|discard|applypriority)(?:\.[\w:]+)*", "nothing"),
    (r"membar\.\w+", "fence"),
    (r"bar(?:rier)?(?:\.cta)?\.sync(?:\.aligned)?", "barrier"),
    (r"bar(?:rier)?(?:\.cta)?\.arrive(?:\.aligned)?", "arrive"),
    (r"bar\.warp\.sync", "warp_barrier"),
    (r"nanosleep\.u32", "sleep"),
    (rf"mov\.({_INT}|pred)", "move"),
    (r"cvta(?:\.to)?\.(?:shared|global)\.u64", "move"),
    (rf"(add|sub|mul\.lo|and|or|xor|shl|shr|min|max|div|rem)\.({_INT})", "binary<{1}, op_{0}>"),
    (rf"(mul\.hi)\.({_INT})", "binary<{1}, op_{0}>"),
    (r"(mul\.wide)\.([su](?:16|32))", "wide<{1}>"),
    (rf"mad\.lo\.({_INT})", "mad<{0}>"),
    (r"(and|or|xor)\.pred", "binary<pred, op_{0}>"),
    (rf"not\.({_INT}|pred)", "invert<{0}>"),
    (rf"neg\.({_INT})", "negate<{0}>"),
    (rf"abs\.({_INT})", "absolute<{0}>"),
    (rf"(add|sub|mul|div|min|max){_FLOATS}{_ALL_FLOATS}", "binary<{1}, op_{0}>"),
    (rf"fma{_FLOATS}{_ALL_FLOATS}", "fused<{0}>"),
    (rf"(ex2|lg2|rcp|sqrt|rsqrt|tanh|sin|cos){_FLOATS}\.f32", "function<op_{0}>"),
    (rf"setp\.(eq|ne|lt|le|gt|ge)\.({_INT})", "compare<{1}, op_{0}>"),
    (rf"selp\.({_INT})", "select"),
    (r"lop3\.b32", "lookup"), (r"prmt\.b32", "permute"),
    (r"shf\.([lr])\.(wrap|clamp)\.b32", "funnel_{0}_{1}"),
    (r"(popc|clz|brev)\.b32", "{0}"), (r"bfe\.u32", "field"),
    (r"cvt\.rn(?:\.satfinite)?\.(f16x2|bf16x2)\.f32", "pack<{0}>"),
    (rf"cvt{_FLOATS}(?:\.rni|\.rzi)?\.(f16|bf16|f32)\.(f16|bf16|f32)", "convert<{0}, {1}>"),
    (r"shfl\.sync\.(idx|up|down|bfly)\.b32", "shuffle_{0}"),
    (r"vote\.sync\.(ballot\.b32|any\.pred|all\.pred)", "vote_{0}"),
    (r"activemask\.b32", "activemask"),
    (r"redux\.sync\.(add|min|max|and|or|xor)\.([busf]32)", "redux<{1}, op_{0}>"),
    (r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(?:::cta)?\.b16", "matrices{1}"),
    (r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16", "transpose"),
    (r"mma\.sync\.aligned\.m16n8k(8|16)\.row\.col\.f32\.(f16|bf16)\.\2\.f32", "mma_{1}_{0}"),
    (r"mma\.sync\.aligned\.m16n8k(4|8)\.row\.col\.f32\.tf32\.tf32\.f32", "mma_tf32_{0}"),
    (r"(?:red|atom)(?:\.(?:relaxed|gpu|cta|sys|global|shared(?:::cta)?|noftz))*"
     r"\.add(?:\.noftz)?(?:\.v[24])?\.([usf](?:32|64)|f16x2|bf16x2|f16|bf16)", "add_to<{0}>"),
)  # fmt: skip
_PATTERNS = tuple((re.compile(pattern), function) for pattern, function in _KNOWN)
_SPECIAL = {
    "laneid": "unsigned(::fr::on_cpu::lane_index())", "warpid": "(::fr::self().index / 32u)",
    "smid": "0u", "nsmid": "1u", "clock": "unsigned(::clock64())",
    "clock64": "(unsigned long long)(::clock64())",
    "globaltimer": "(unsigned long long)(::clock64())",
    "lanemask_eq": "(1u << ::fr::on_cpu::lane_index())",
    "lanemask_lt": "((1u << ::fr::on_cpu::lane_index()) - 1u)",
    "lanemask_le": "(((2u << ::fr::on_cpu::lane_index()) - 1u))",
    "lanemask_gt": "(~((2u << ::fr::on_cpu::lane_index()) - 1u))",
    "lanemask_ge": "(~((1u << ::fr::on_cpu::lane_index()) - 1u))",
}  # fmt: skip
_SPECIAL |= {f"{a}.{c}": f"{b}.{c}" for c in "xyz" for a, b in (
    ("tid", "::fr::on_cpu::thread_index()"), ("ctaid", "::fr::on_cpu::block_index()"),
    ("ntid", "::fr::on_cpu::block_size()"), ("nctaid", "::fr::on_cpu::grid_size()"))}  # fmt: skip
_REGISTERS = {"pred": "bool", "f32": "float", "f64": "double"}


class Assembly(NamedTuple):
    """An ``asm`` statement.

    Attributes:
        text: its instructions.
        operands: of each the constraint and the expression, outputs first.
        names: those of operands that have one, in brackets.
        end: the token of its closing bracket.
    """

    text: str
    operands: list[tuple[str, str]]
    names: dict[str, int]
    end: int


class Unknown(Exception):
    """An instruction that is not known; says which."""


def read(parts: Sequence[Token], i: int) -> Assembly | None:
    """The ``asm`` statement that begins at a token; None where it is something else."""
    start = i + 1
    while text_at(parts, start) in ("volatile", "__volatile__", "inline"):
        start += 1
    end = partner(parts, start) if text_at(parts, start) == "(" else -1
    if end < 0:
        return None
    sections: list[list[Token]] = [[]]
    depth = 0
    for token in parts[start + 1 : end]:
        depth += (token.text in "([{") - (token.text in ")]}") if token.kind == "op" else 0
        if not depth and token.text in (":", "::"):
            sections += [[] for _ in token.text]
            continue
        sections[-1].append(token)
    text = "".join(s for token in sections[0] for s in _STRING.findall(token.text))
    for escape, character in ((r"\n", "\n"), (r"\t", " "), (r"\"", '"'), ("\\\\", "\\")):
        text = text.replace(escape, character)
    operands: list[tuple[str, str]] = []
    names: dict[str, int] = {}
    for section in sections[1:3]:
        for name, constraint, expression in _operands(section):
            if name:
                names[name] = len(operands)
            operands.append((constraint, expression))
    return Assembly(text.strip(), operands, names, end)


def _operands(section: list[Token]) -> Iterator[tuple[str, str, str]]:
    """Name, constraint and expression of the operands of a section."""
    i = 0
    while i < len(section):
        name = ""
        if section[i].text == "[":
            name, i = text_at(section, i + 1), i + 3
        constraint = text_at(section, i).strip('"')
        close = partner(section, i + 1)
        yield name, constraint, " ".join(t.text for t in section[i + 2 : close])
        i = close + 2


def unknown(assembly: Assembly) -> str:
    """The first instruction that is not known, or ``""``."""
    try:
        translated(assembly)
    except Unknown as instruction:
        return str(instruction)
    return ""


def translated(assembly: Assembly) -> str:
    """The statement in C++.

    Raises:
        Unknown: an instruction is not known.
    """
    body = [_instruction(assembly, words) for words in _statements(assembly.text)]
    if not body:
        return "((void)0)"
    bound = []
    for i, (constraint, expression) in enumerate(assembly.operands):
        if constraint[:1].isdigit():
            bound.append(f"fr_p{constraint} = {expression};")
            bound.append(f"auto& fr_p{i} = fr_p{constraint};")
        else:
            kind = "auto&&" if constraint[:1] in "=+" else "const auto"
            bound.append(f"{kind} fr_p{i} = ({expression});")
    return f"do {{ {' '.join([*bound, *body])} }} while (0)"


def _statements(text: str) -> Iterator[str]:
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)
    # Braces around all of it are a scope, others hold vectors.
    text = re.sub(r"(^|;)\s*[{}]+", r"\1 ", text.strip())
    text = re.sub(r"[{}]+\s*$", "", text) if text.rstrip().endswith(("}}", "; }", ";}")) else text
    for statement in text.split(";"):
        if statement.strip():
            yield " ".join(statement.split())


def _instruction(assembly: Assembly, text: str) -> str:
    """One instruction as a statement of C++."""
    if text.startswith(".reg"):
        _, kind, names = text.split(" ", 2)
        ctype = _REGISTERS.get(kind[1:], f"::fr::ptx::{'u' + kind[2:]}")
        return f"{ctype} {names};"
    guard = re.match(r"@(!?)\s*(\S+)\s+", text)
    condition = f"if ({guard[1]}{_value(assembly, guard[2])}) " if guard else ""
    text = text[guard.end() :] if guard else text
    name, _, rest = text.partition(" ")
    for pattern, function in _PATTERNS:
        found = pattern.fullmatch(name)
        if found is None:
            continue
        groups = [(g or "").replace(".", "_") for g in found.groups()]
        spaces = _SPACES.findall(name)
        arguments = ", ".join(_arguments(assembly, rest, spaces))
        if function == "nothing":
            return ";"
        callee = re.sub(r"\b(?=\w)(?<!_)", "::fr::ptx::", function.format(*groups))
        return f"{condition}{callee}({arguments});"
    raise Unknown(name)


def _arguments(assembly: Assembly, text: str, spaces: list[str]) -> Iterator[str]:
    """The operands of an instruction; of a vector each element."""
    brackets = 0
    for operand in re.findall(r"\[[^\]]*\]|\{[^}]*\}|[^,\s|]+(?:\s*\|\s*[^,\s]+)?", text):
        if operand.startswith("["):
            space = spaces[brackets] if brackets < len(spaces) else "global"
            brackets += 1
            base, _, offset = operand[1:-1].partition("+")
            place = f"::fr::ptx::{space}_at({_value(assembly, base.strip())}"
            yield f"{place}, {offset.strip() or 0})"
        elif operand.startswith("{"):
            yield from (_value(assembly, one.strip()) for one in operand[1:-1].split(","))
        else:
            yield from (_value(assembly, one.strip()) for one in operand.split("|"))


def _value(assembly: Assembly, text: str) -> str:
    """An operand as an expression of C++."""
    if text.startswith("%%") or (text.startswith("%") and not re.match(r"%\d|%\[", text)):
        special = _SPECIAL.get(text.strip("%"))
        if special is None:
            raise Unknown(text.replace("%%", "%"))
        return special
    if text.startswith("%["):
        return f"fr_p{assembly.names.get(text[2:-1], 0)}"
    if text.startswith("%"):
        return f"fr_p{text[1:]}"
    if text == "_":
        return "::fr::ptx::ignored()"
    if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", text):
        return f"__builtin_bit_cast(float, 0x{match[1]}u)"
    return text.removesuffix("U") if re.fullmatch(r"\d+U", text) else text
