"""Bodies in which no thread waits for another: one loop over lanes, uniform parts outside it."""

from __future__ import annotations

import re

from tree_sitter import Node

from .. import cpp
from ..cpp import NotSplittable, Parameter, Prepared
from ..syntax import declarators
from . import split
from .analysis import analyse
from .body import DEFINITIONS, Body, Scopes, Unit, Variable, Variables, read
from .declarations import declared_names
from .lanes import AT, Lanes
from .nest import Nest
from .plan import Plan
from .rows import Row
from .statements import initial_value
from .tallies import tallying
from .uniform import Uniformity

_GRID = "thread_position_in_grid"
ROW_LANES = 64  # threads of a row that run together
_MAY_FAIL = re.compile(r"[/%\[*]|->")  # a division or a load, which an early return may guard


def _written(body: Body, variables: Variables, along_x: bool) -> tuple[str, str]:
    """A body as the inside of one loop, after what is the same in all its rounds.

    Args:
        along_x: the loop counts the threads of a row of the grid, from `fr_first` to `fr_last`.
    """
    scopes = Scopes(body, variables)
    lanes = Lanes(Uniformity(scopes), lambda nest, kind: "goto fr_next;")
    lanes.count, lanes.end = ("(fr_last - fr_first)", "fr_last - 1u") if along_x else ("", "")
    tree, nest = body.tree, Nest()

    def is_inside(name: str) -> bool:
        variable = scopes.lookup(name)
        return name in nest.inside or (variable is not None and not variable.uniform)

    with scopes.inner():
        for statement in tree.block.named_children:
            kind, text = statement.type, tree.text(statement)
            if kind == "comment":
                continue
            if kind.startswith("preproc"):
                lanes.add("\n" + text + "\n", statement)
            elif kind in DEFINITIONS and not any(map(is_inside, scopes.words(text))):
                end = ";\n" if kind.endswith("_specifier") else "\n"
                lanes.write(text + end, statement)
            elif kind == "declaration":
                declared = scopes.declare(statement)
                if (
                    all(v.uniform and v.kind in ("value", "array") for v in declared)
                    and not scopes.words(text) & nest.inside
                    and not (lanes.leaving and _MAY_FAIL.search(text))
                ):
                    lanes.write(text + "\n", statement)
                else:
                    if lanes.count:
                        _count(lanes, statement, declared, nest)
                    inside = {v.name for v in declared if not lanes.is_counted(v)}
                    nest = nest._replace(inside=nest.inside | inside)
                    lanes.add_statement(statement, nest)
            elif kind in DEFINITIONS:
                nest = nest._replace(inside=nest.inside | declared_names(tree, statement))
                lanes.add(text + (";" if kind.endswith("_specifier") else ""), statement)
            elif kind.endswith("_specifier"):
                lanes.add(text + ";", statement)
            else:
                lanes.add_statement(statement, nest)
    leaving, pieces = lanes.leaving, lanes.take()
    loop = "".join(f"{body.directive(piece.line)}{piece.text}\n" for piece in pieces)
    loop = f"{{\n{loop}}}\n{AT}  fr_next: ;\n" if leaving else loop + AT
    return lanes.text() + lanes.take_constants(), loop


def _count(lanes: Lanes, statement: Node, declared: list[Variable], nest: Nest) -> None:
    """Write what linear variables are in the loop's last round."""
    for variable, declarator in zip(declared, declarators(statement), strict=True):
        value = initial_value(declarator)
        text = lanes.tree.text(value)
        known = not _MAY_FAIL.search(text) and not lanes.scopes.words(text) & nest.inside
        if variable.linear and value is not None and known:
            lanes.write_last(variable, lanes.last(value), statement)


def text(p: Prepared) -> str:
    """The whole text: loops over the grid, what is the same in all threads of a row outside."""
    return tallying(p, _text)


def _text(p: Prepared) -> str:
    p = cpp.without_synchronising_functions(p)
    attributes, params = cpp.used_attributes(p), p.parameters
    in_group = any(a in cpp.PER_GROUP or (a in cpp.PER_THREAD and a != _GRID) for a in attributes)
    before, inside, row, moved = _parts(p, params, along_x=not in_group)
    row_values, thread_values = _values(params, moved, attributes, in_group)
    outside = row_values + before + AT
    inside = thread_values + inside
    scalars = "".join(f"  const auto fr_s_{q.name} = fr_a_{q.name};\n" for q in params if q.scalar)
    functions = ""
    if in_group:
        loops = _group_loops(outside, inside)
    else:
        loop = f"""\
  for (unsigned fr_i = fr_first; fr_i < fr_last; ++fr_i) {{
{inside}  }}
"""
        if row is not None:
            functions = split.row_function(p, row[0])
            functions += split.function(p, "fr_in_row", row[1], ROW_LANES, rows=True)
            length, loop = _by_rows(p, params, loop)
            scalars += length
        loops = _grid_loops(outside, loop)
    arguments = cpp.comma(params) + cpp.function_parameters(params)
    return cpp.with_entry(
        p,
        "rows" if functions else "flat",
        f"""\
{functions}{cpp.template_head(p.spec)}static void fr_kernel(
    const ::fr::launch* fr_l, uint64_t fr_begin, uint64_t fr_end{arguments}) {{
  ::fr::group fr_g(fr_l);
  (void)fr_g;
{scalars}{loops}}}
""",
        "  fr_kernel{values}(fr_l, fr_begin, fr_end{arguments});\n",
        params,
        units="grid" if not in_group else "threadgroups",
    )


def _values(
    params: list[Parameter], moved: set[str], attributes: list[str], in_group: bool
) -> tuple[str, str]:
    """Parameters and attributes: those of all threads of a row, and those of each thread."""
    row = [
        f"{q.type} {q.name} = {'fr_s_' if q.scalar else 'fr_a_'}{q.name}; (void){q.name};"
        for q in params
        if q.name not in moved
    ]
    thread = [f"{q.type} {q.name} = fr_a_{q.name};" for q in params if q.name in moved]
    uniform = [a for a in attributes if a not in cpp.PER_THREAD]
    # A row's y and z are the same for all its threads.
    uniform += [a for a in attributes if a == "thread_position_in_threadgroup"]
    row += [f"{cpp.attribute(a)} (void){a};" for a in uniform]
    thread += [cpp.attribute(a) for a in attributes if a in cpp.PER_THREAD and a != _GRID]
    if _GRID in attributes:
        # The row's first thread stands for all where only y and z are asked for.
        for values, x in ((row, "fr_first"), (thread, "fr_i")):
            position = "fr_g.origin + fr_p" if in_group else f"metal::uint3({x}, fr_y, fr_z)"
            values.append(f"const uint3 {_GRID} = {position};")
        row.append(f"(void){_GRID};")
    return "".join(f"  {v}\n" for v in row), "".join(f"  {v}\n" for v in thread)


def _by_rows(p: Prepared, params: list[Parameter], loop: str) -> tuple[str, str]:
    """The length of the rows of the launch, before the loops; and a loop over x.

    It is in pieces that lie in one row each where the rows are long enough.
    """
    passed = cpp.comma(params) + ", ".join(f"fr_a_{q.name}" for q in params)
    types = "".join(f", {n}" for n, _ in p.spec.template)
    values = f"<{types[2:]}>" if types else ""
    length = f"""\
  fr_g.threads_per_threadgroup = metal::uint3(1, 1, 1);
  const unsigned fr_c = fr_row_length{values}(fr_g{passed});
"""
    return (
        length,
        f"""\
  if (fr_c && fr_last <= 0x7fffffffu) {{
  for (unsigned fr_s = fr_first; fr_s < fr_last;) {{
  const unsigned fr_b = fr_s - fr_s % fr_c;
  const unsigned fr_e = fr_last - fr_b < fr_c ? fr_last : fr_b + fr_c;
  for (unsigned fr_k; fr_s < fr_e; fr_s += fr_k) {{
  fr_k = fr_e - fr_s < {ROW_LANES} ? fr_e - fr_s : {ROW_LANES}u;
  fr_g.origin = metal::uint3(fr_s, fr_y, fr_z);
  if (fr_k == {ROW_LANES}) fr_in_row<{ROW_LANES}{types}>(fr_g, 0, fr_k{passed});
  else fr_in_row<0{types}>(fr_g, 0, fr_k{passed});
  }}
  }}
  }} else {{
{loop}  }}
""",
    )


def _group_loops(outside: str, inside: str) -> str:
    """Loops over threadgroups, over the rows of each and over the threads of a row."""
    return f"""\
  for (uint64_t fr_u = fr_begin; fr_u < fr_end; ++fr_u) {{
  fr_g.move_to(fr_u);
  const metal::uint3 fr_t = fr_g.threads_per_threadgroup;
  for (unsigned fr_z = 0, fr_row = 0; fr_z < fr_t.z; ++fr_z)
  for (unsigned fr_y = 0; fr_y < fr_t.y; ++fr_y, fr_row += fr_t.x) {{
  const metal::uint3 fr_p(0, fr_y, fr_z);
  (void)fr_p;
{outside}  for (unsigned fr_x = 0; fr_x < fr_t.x; ++fr_x) {{
  const unsigned fr_i = fr_row + fr_x;
  const metal::uint3 fr_p(fr_x, fr_y, fr_z);
  (void)fr_i, (void)fr_p;
{inside}  }}
  }}
  }}
"""


def _grid_loops(outside: str, loop: str) -> str:
    """A loop over blocks of the grid's rows, each a part of one row."""
    return f"""\
  const unsigned fr_blocks = (fr_l->grid[0] + fr_l->block - 1) / fr_l->block;
  for (uint64_t fr_u = fr_begin; fr_u < fr_end; ++fr_u) {{
  const uint64_t fr_row = fr_u / fr_blocks;
  const unsigned fr_first = unsigned(fr_u % fr_blocks) * fr_l->block;
  const unsigned fr_left = fr_l->grid[0] - fr_first;
  const unsigned fr_last = fr_first + (fr_left < fr_l->block ? fr_left : fr_l->block);
  const unsigned fr_y = unsigned(fr_row % fr_l->grid[1]), fr_z = unsigned(fr_row / fr_l->grid[1]);
  (void)fr_y, (void)fr_z;
{outside}{loop}  }}
"""


def _parts(
    p: Prepared, params: list[Parameter], *, along_x: bool
) -> tuple[str, str, tuple[Row, str] | None, set[str]]:
    """Before the loop, inside it, inside a row of it, and the parameters that a thread moves."""
    moved = {q.name for q in params if not q.scalar}
    try:
        code = read(p, p.expanded(), Unit(simdgroup=False, rows=True), whole=True)
        variables = analyse(code, Plan())
        before, inside = _written(code, variables, along_x)
    except (NotSplittable, RecursionError):
        # Syntax that is not understood, or too deep: a lambda takes the body as it is.
        return "", f"  [&]() {{\n{cpp.body(p, p.text.source)}  }}();\n", None, moved
    moved = {q.name for q in params if variables[q.name].written}
    return before, inside, split.in_row(p, code, variables), moved
