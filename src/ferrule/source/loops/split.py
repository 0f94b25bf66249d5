"""Texts of kernels that synchronise: loops over lanes, split by `splitter`."""

from __future__ import annotations

import re

from .. import cpp
from ..cpp import NotSplittable, Prepared
from ..syntax import Tree, callee, kinds
from .body import Body, Unit, Variables
from .rows import LAUNCH_ATTRIBUTES, Row, find
from .splitter import split
from .tallies import tallying
from .uniform import LANE_ATTRIBUTES

_FETCH_ADD = "atomic_fetch_add_explicit"


def in_row(p: Prepared, body: Body, variables: Variables) -> tuple[Row, str] | None:
    """The row that a body divides its x by, and the body for units that lie in one row.

    Args:
        variables: of the body, analysed.
    """
    row = find(body, variables) if body.unit.rows else None
    if row is None:
        return None
    try:
        return row, split(p, body.unit._replace(row=row.text))[0]
    except NotSplittable:
        return None


def _may_wait(p: Prepared, tree: Tree) -> bool:
    """Whether a thread may wait for what another one does with an atomic."""
    words = p.text.words | p.text.header_words
    used = {w for w in words if w.startswith("atomic_") and w.endswith("_explicit")}
    if "volatile" in words or used != {_FETCH_ADD} or _FETCH_ADD in p.text.header_words:
        return True
    return any(
        callee(tree, n) == _FETCH_ADD
        and (n.parent is None or n.parent.type != "expression_statement")
        for n in kinds(tree.block, "call_expression")
    )


def _locked(p: Prepared, functions: str, bodies: list[str]) -> str:
    """Additions under locks, for outputs that get row additions and nothing but additions.

    Args:
        functions: the text, in which they are replaced.
        bodies: the parts of it that run for one launch.
    """
    for name in p.kernel.output_names:
        row = f"{cpp.ROW_ADDITION}/*{name}*/"
        single = re.compile(rf"(?:\bmetal::)?\b{_FETCH_ADD}\s*\(\s*&\s*(?={name}\b)")

        declared = f" {name} = fr_a_{name}; (void){name};"
        # A row addition names the array in its mark, as a pointer, and for its type.
        named = [len(re.findall(rf"\b{name}\b", b)) for b in bodies]
        added = [3 * b.count(row) + len(single.findall(b)) + 2 * b.count(declared) for b in bodies]
        if row in functions and named == added:
            functions = functions.replace(row, "::fr::split::locked_add(fr_g.runs, ")
            functions = single.sub("::fr::split::locked_fetch_add(fr_g.runs, &", functions)
    return functions


def row_function(p: Prepared, row: Row) -> str:
    """A function that finds the length of the rows of a launch; 0 where rows would not pay."""
    params = p.parameters
    values = [f"{q.type} {q.name} = fr_a_{q.name}; (void){q.name};" for q in params]
    attributes = [a for a in cpp.used_attributes(p) if a in LAUNCH_ATTRIBUTES]
    values += [f"{cpp.attribute(a)} (void){a};" for a in attributes]
    lines = "".join(f"  {value}\n" for value in values)
    return (
        f"{cpp.template_head(p.spec)}static unsigned fr_row_length(\n"
        f"    const ::fr::group& fr_g{cpp.comma(params)}{cpp.function_parameters(params)}) {{\n"
        f"  (void)fr_g;\n{lines}  {' '.join(row.declarations)}\n"
        f"  return ::fr::row_length(::fr::divisor_of({row.text}));\n}}\n"
    )


def text(p: Prepared, *, simdgroup: bool, rows: bool, aligned: bool = False) -> str:
    """Loops over the lanes of a simdgroup, or of a whole threadgroup.

    Args:
        simdgroup: a unit of work is a simdgroup; the threadgroup must not be larger where the
            body has barriers or threadgroup memory.
        rows: the lanes of a unit differ in x alone.
        aligned: threadgroups are a multiple of 32 threads wide.

    Raises:
        NotSplittable: the control flow does not allow it (`ferrule.source.loops.split`).
    """
    return tallying(p, lambda p: _text(p, Unit(simdgroup, rows, aligned)))


def _text(p: Prepared, unit: Unit) -> str:
    simdgroup, rows = unit.simdgroup, unit.rows
    inside, body, variables = split(p, unit)
    row = in_row(p, body, variables)
    p = cpp.without_synchronising_functions(p)
    lanes, each = (32, "simdgroups") if simdgroup else (1024, "threadgroups")
    functions = function(p, "fr_kernel", inside, lanes, rows=rows)
    values = cpp.template_values(p.spec)[1:] or ">"

    def call(name: str, lanes: int) -> str:
        before = f"{lanes}, " if p.spec.template else lanes
        return f"{name}<{before}{values}(fr_g, fr_first, fr_n{{arguments}});\n"

    calls = [f"    if (fr_n == 32) {call('fr_kernel', 32)}"] if simdgroup else []
    calls.append(f"    {call('fr_kernel', 0)}")
    entry = ""
    if row is not None:
        functions += row_function(p, row[0]) + function(p, "fr_in_row", row[1], lanes, rows=rows)
        entry = (
            "  const ::fr::group fr_g(fr_l);\n"
            "  const unsigned fr_c = fr_row_length{values}(fr_g{arguments});\n"
        )
        full = "fr_n == 32 && " if simdgroup else ""
        condition = f"{full}::fr::split::in_row(fr_g, fr_first, fr_n, fr_c)"
        calls.insert(0, f"    if ({condition}) {call('fr_in_row', 32 if simdgroup else 0)}")
    entry += (
        f"  ::fr::split::{each}(fr_l, fr_begin, fr_end, fr_w, "
        "[&](const ::fr::group& fr_g, unsigned fr_first, unsigned fr_n) {\n"
        f"{'    else'.join(calls)}  }});\n"
    )
    if not _may_wait(p, body.tree):
        functions = _locked(p, functions, [inside] if row is None else [inside, row[1]])
    parameters = p.parameters
    return cpp.with_entry(p, "split", functions, entry, parameters, units="threadgroups")


def function(p: Prepared, name: str, inside: str, lanes: int, *, rows: bool) -> str:
    """A function that runs a body for the lanes of one unit.

    Its first template argument is the number of lanes where it is known, else 0.
    """
    params = p.parameters
    positions = (
        ""
        if rows
        else "  FR_LANES unsigned fr_px[FR_N], fr_py[FR_N], fr_pz[FR_N];\n"
        "  for (unsigned fr_i = 0; fr_i < fr_n; ++fr_i) {\n"
        "    const metal::uint3 fr_q = fr_g.position(fr_first + fr_i);\n"
        "    fr_px[fr_i] = fr_q.x, fr_py[fr_i] = fr_q.y, fr_pz[fr_i] = fr_q.z;\n  }\n"
    )
    values = ""
    for a in cpp.used_attributes(p):
        text = cpp.attribute(a)
        text = text.replace("fr_i", "fr_first") if a in LANE_ATTRIBUTES else text
        values += f"  {text} (void){a};\n"
    parameter_list = cpp.comma(params) + cpp.function_parameters(params)
    head = cpp.template_head(p.spec) or ""
    full = "template <unsigned FR_FULL" + (", " + head[len("template <") :] if head else ">\n")
    return f"""\
{full}static void {name}(
    const ::fr::group& fr_g, unsigned fr_first, unsigned fr_count{parameter_list}) {{
  constexpr unsigned FR_N = {lanes}, fr_i = 0;
  const unsigned fr_n = FR_FULL ? FR_FULL : fr_count;
  const metal::uint3 fr_p0 = fr_g.position(fr_first), fr_p = fr_p0;
  (void)fr_i, (void)fr_p;
{positions}{values}{inside}}}
"""
