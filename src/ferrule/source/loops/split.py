"""Texts of kernels that synchronise: loops over lanes, split by `splitter`."""

from __future__ import annotations

import re
from typing import Any

from ..cpp import (
    ROW_ADDITION,
    NotSplittable,
    Prepared,
    attribute,
    comma,
    function_parameters,
    parameters,
    template_head,
    template_values,
    used_attributes,
    with_entry,
    without_synchronising_functions,
)
from ..syntax import Tree, callee, walk
from .analysis import AnalysedBody
from .rows import LAUNCH_ATTRIBUTES, Row, find
from .splitter import Splitter, split_body
from .uniform import LANE_ATTRIBUTES, Unit

_FETCH_ADD = "atomic_fetch_add_explicit"


def in_row(p: Prepared, body: AnalysedBody) -> tuple[Row, str] | None:
    """The row that a body divides its x by, and the body for units that lie in one row.

    Args:
        body: the analysed body.
    """
    row = find(body) if body.unit.rows else None
    if row is None:
        return None
    try:
        return row, split_body(Splitter(p, body.unit._replace(row=row.text)))
    except NotSplittable:
        return None


def _may_wait(p: Prepared, tree: Tree) -> bool:
    """Whether a thread may wait for what another one does with an atomic."""
    words = p.text.words | p.text.header_words
    used = {w for w in words if w.startswith("atomic_") and w.endswith("_explicit")}
    if "volatile" in words or used != {_FETCH_ADD} or _FETCH_ADD in p.text.header_words:
        return True
    calls = (n for n in walk(tree.block) if n.type == "call_expression")
    return any(
        callee(tree, n).rpartition("::")[2] == _FETCH_ADD
        and (n.parent is None or n.parent.type != "expression_statement")
        for n in calls
    )


def _locked(p: Prepared, functions: str, bodies: list[str]) -> str:
    """Additions under locks, for outputs that get row additions and nothing but additions.

    Args:
        functions: the text, in which they are replaced.
        bodies: the parts of it that run for one launch.
    """
    for name in p.kernel.output_names:
        row = f"{ROW_ADDITION}/*{name}*/"
        single = re.compile(rf"(?:\bmetal::)?\b{_FETCH_ADD}\s*\(\s*&\s*(?={name}\b)")

        def only_added_to(
            body: str, name: str = name, row: str = row, single: Any = single
        ) -> bool:
            # A row addition names the array in its mark, as a pointer, and for its type.
            additions = 3 * body.count(row) + len(single.findall(body))
            declared = 2 * body.count(f" {name} = fr_a_{name}; (void){name};")
            return len(re.findall(rf"\b{name}\b", body)) == additions + declared

        if row in functions and all(map(only_added_to, bodies)):
            functions = functions.replace(row, "::fr::split::locked_add(fr_g.runs, ")
            functions = single.sub("::fr::split::locked_fetch_add(fr_g.runs, &", functions)
    return functions


def row_function(p: Prepared, row: Row) -> str:
    """A function that finds the length of the rows of a launch; 0 where rows would not pay."""
    params = parameters(p.spec)
    values = "".join(
        f"  {q.type} {q.name} = fr_a_{q.name}; (void){q.name};\n" for q in params
    ) + "".join(
        f"  {attribute(a)} (void){a};\n" for a in used_attributes(p) if a in LAUNCH_ATTRIBUTES
    )
    return (
        f"{template_head(p.spec)}static unsigned fr_row_length(\n"
        f"    const ::fr::group& fr_g{comma(params)}{function_parameters(params)}) {{\n"
        f"  (void)fr_g;\n{values}  {' '.join(row.declarations)}\n"
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
    splitter = Splitter(p, Unit(simdgroup, rows, aligned))
    own = inside = split_body(splitter)
    whole_row = in_row(p, splitter)
    p = without_synchronising_functions(p)
    params = parameters(p.spec)
    functions = function(p, "fr_kernel", inside, 32 if simdgroup else 1024, rows=rows)
    sep = ", " if p.spec.template else ""
    each = "simdgroups" if simdgroup else "threadgroups"
    arguments = template_values(p.spec)[1:] if p.spec.template else ">"
    passed = "(fr_g, fr_first, fr_n{arguments});\n"
    call = ""
    if whole_row is not None:
        row, inside = whole_row
        functions += row_function(p, row)
        functions += function(p, "fr_in_row", inside, 32 if simdgroup else 1024, rows=rows)
        call = (
            "  const ::fr::group fr_g(fr_l);\n"
            "  const unsigned fr_c = fr_row_length{values}(fr_g{arguments});\n"
        )
    call += (
        f"  ::fr::split::{each}(fr_l, fr_begin, fr_end, fr_w, "
        "[&](const ::fr::group& fr_g, unsigned fr_first, unsigned fr_n) {\n"
    )
    full = "fr_n == 32" if simdgroup else "false"
    if whole_row is not None:
        full_row = f"{full} && " if simdgroup else ""
        call += (
            f"    if ({full_row}::fr::split::in_row(fr_g, fr_first, fr_n, fr_c)) "
            f"fr_in_row<{32 if simdgroup else 0}{sep}{arguments}{passed}    else"
        )
    if simdgroup:
        call += f"    if ({full}) fr_kernel<32{sep}{arguments}{passed}    else"
    call += f"    fr_kernel<0{sep}{arguments}{passed}  }});\n"
    if not _may_wait(p, splitter.tree):
        functions = _locked(p, functions, [inside] if whole_row is None else [own, inside])
    return with_entry(p, "split", functions, call, params, units="threadgroups")


def function(p: Prepared, name: str, inside: str, lanes: int, *, rows: bool) -> str:
    """A function that runs a body for the lanes of one unit.

    Its first template argument is the number of lanes where it is known, else 0.
    """
    params = parameters(p.spec)
    positions = (
        ""
        if rows
        else "  unsigned fr_px[FR_N], fr_py[FR_N], fr_pz[FR_N];\n"
        "  for (unsigned fr_i = 0; fr_i < fr_n; ++fr_i) {\n"
        "    const metal::uint3 fr_q = fr_g.position(fr_first + fr_i);\n"
        "    fr_px[fr_i] = fr_q.x, fr_py[fr_i] = fr_q.y, fr_pz[fr_i] = fr_q.z;\n  }\n"
    )
    values = "".join(
        f"  {attribute(a).replace('fr_i', 'fr_first') if a in LANE_ATTRIBUTES else attribute(a)} "
        f"(void){a};\n"
        for a in used_attributes(p)
    )
    parameter_list = comma(params) + function_parameters(params)
    head = template_head(p.spec) or ""
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
