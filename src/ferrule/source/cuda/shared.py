"""Threadgroup memory of a CUDA text.

Up to 48 KB it is CUDA's own kind of variable. More is given only to launches that ask, as one array
without a length, so the text itself must know where in it each variable lies. How large a variable
is may depend on templates and constants of the author's: only the compiler knows. So a text is
compiled twice. In the first each declaration becomes a struct, and an assembler comment tells its
size; the second has the offsets::

    threadgroup float tile[N][N];
    struct fr_s0 { float tile[N][N]; }; auto& tile = reinterpret_cast<fr_s0*>(fr_shared + 0)->tile;

How much a GPU has, and the error where a kernel wants more: `devices.cuda.build`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from ...errors import DialectError
from ..cpp import Prepared

ALIGNMENT = 16  # of every variable, so that bytes may be read as vectors
_SHARED = f"__shared__ __align__({ALIGNMENT})"
_SIZE = re.compile(r"// fr_shared (\d+) (\d+) (\d+)")
_CAPTURES = re.compile(r"\[[^\[\]]*\w[^\[\]]*\]\s*\(")  # what may begin a lambda
_STATIC = re.compile(r"\.shared \.align (\d+) \.b\d+ \w+\[(\d+)\]")


class SharedVariable(NamedTuple):
    """One variable in threadgroup memory: its name, and the author's line."""

    name: str
    line: int


def declared(source: str) -> list[SharedVariable]:
    """The variables of a body in threadgroup memory, in the order of their numbers."""
    return _replace_declarations(source, {})[1]


def static(source: str) -> str:
    """A body whose threadgroup memory is CUDA's own."""
    if re.search(r"\bthread_local\b[^;]*[*&]", source):  # there may be a pointer beside some
        source = _replace_declarations(source, None)[0]
    if _CAPTURES.search(source):
        source = _uncaptured(source, {name for name, _ in declared(source)})
    return re.sub(r"\bthread_local\b", _SHARED, source)


def dynamic(p: Prepared, source: str, offsets: Mapping[int, int] | None) -> str:
    """A body whose threadgroup memory lies in ``fr_shared``.

    Args:
        source: the body, rewritten.
        offsets: where each variable starts; without them, the text tells sizes.

    Raises:
        DialectError: a lambda would copy a variable.
    """
    text, variables = _replace_declarations(source, offsets or {}, probe=offsets is None)
    _refuse_copies(p, source, {name for name, _ in variables})
    return text


def sizes(ptx: str) -> dict[int, tuple[int, int]]:
    """The size and alignment of each variable, from the first text's PTX."""
    return {int(n): (int(size), int(align)) for n, size, align in _SIZE.findall(ptx)}


def placed(extents: Mapping[int, tuple[int, int]]) -> tuple[dict[int, int], int]:
    """Where each variable starts, and the bytes of all."""
    offsets: dict[int, int] = {}
    end = 0
    for number, (size, align) in sorted(extents.items()):
        step = max(align, ALIGNMENT)
        offsets[number] = -(-end // step) * step
        end = offsets[number] + size
    return offsets, end


def static_bytes(ptx: str) -> int:
    """The bytes of the variables that a PTX text declares with their sizes."""
    variables = enumerate(_STATIC.findall(ptx))
    return placed({i: (int(size), int(align)) for i, (align, size) in variables})[1]


def _replace_declarations(
    source: str, offsets: Mapping[int, int] | None, *, probe: bool = False
) -> tuple[str, list[SharedVariable]]:
    """A body with other declarations of threadgroup memory, and what they declare.

    Args:
        offsets: where variables start; None where the memory stays CUDA's own.
        probe: whether the text tells their sizes.
    """
    from ..syntax import Tree, declarator_shape, declarators, declared_name, kinds, replaced

    tree = Tree(source, body=True)
    edits: list[tuple[int, int, str]] = []
    variables: list[SharedVariable] = []
    for node in kinds(tree.block, "declaration"):
        spec = tree.data[node.start_byte : declarators(node)[0].start_byte].decode()
        if "thread_local" not in re.findall(r"\w+", spec):
            continue
        in_cuda = re.sub(r"\bthread_local\b", _SHARED, spec).strip()
        spec = re.sub(r"\b(thread_local|static)\b", "", spec).strip()
        out: list[str] = []
        for d in declarators(node):
            name = declared_name(d)
            points = {"pointer_declarator", "reference_declarator"} & {*declarator_shape(d)}
            if name is None or points:
                out.append(f"{spec} {tree.text(d)};")  # a thread's own
                continue
            n = len(variables)
            variables.append(SharedVariable(tree.text(name), node.start_point[0] + 1))
            if offsets is None:
                out.append(f"{in_cuda} {tree.text(d)};")
                continue
            out.append(f"struct fr_s{n} {{ {spec} {tree.text(d)}; }};")
            if probe:
                values = f'"n"(sizeof(fr_s{n})), "n"(alignof(fr_s{n}))'
                out.append(f'asm volatile("// fr_shared {n} %0 %1" :: {values});')
            address = f"reinterpret_cast<fr_s{n}*>(fr_shared + {offsets.get(n, 0)})"
            out.append(f"auto& {variables[-1].name} = {address}->{variables[-1].name};")
        lines = "\n" * tree.text(node).count("\n")
        edits.append(replaced(node, " ".join(out).replace("\n", " ") + lines))
    return tree.edited(edits), variables


def _uncaptured(source: str, names: set[str]) -> str:
    """Static variables are seen by a lambda that does not capture them, and must not be named."""
    from ..syntax import Tree, kinds, replaced

    tree = Tree(source, body=True)
    edits: list[tuple[int, int, str]] = []
    for node in kinds(tree.block, "lambda_capture_specifier"):
        kept = []
        for item in tree.text(node)[1:-1].split(","):
            name = item.strip().removeprefix("&").strip()
            if name not in names:
                kept.append(item)
            elif "&" not in item:
                kept.append(f" {name} = {name}")
        edits.append(replaced(node, f"[{','.join(kept).strip()}]"))
    return tree.edited(edits)


def _refuse_copies(p: Prepared, source: str, names: set[str]) -> None:
    """A lambda that captures by value would copy a whole array: only references may be."""
    from ..syntax import Tree, kinds, part

    tree = Tree(source, body=True)
    for node in kinds(tree.block, "lambda_expression"):
        capture_list = tree.text(part(node, "captures")).strip("[] ")
        captured = names & set(map(tree.text, kinds(node, "identifier")))
        if captured and not capture_list.startswith("&"):
            problem = (
                f"beside more than 48 KB of threadgroup memory, a lambda that uses {min(captured)} "
                "must capture it by reference on CUDA; begin it with [&]."
            )
            line = node.start_point[0] + 1
            raise DialectError.at(p.kernel.name, "source", line, "threadgroup", problem)
