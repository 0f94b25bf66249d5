"""Bodies in which no thread waits for another: one loop over lanes, uniform parts outside it."""

from __future__ import annotations

import re

from tree_sitter import Node

from ..cpp import (
    PER_GROUP,
    PER_THREAD,
    NotSplittable,
    Parameter,
    Prepared,
    attribute,
    body,
    comma,
    function_parameters,
    parameters,
    template_head,
    used_attributes,
    with_entry,
    without_synchronising_functions,
)
from ..syntax import declarators
from . import split
from .pieces import Piece
from .regions import Regions
from .rows import Row
from .uniform import Unit, Variable

_GRID = "thread_position_in_grid"
ROW_LANES = 64  # threads of a row that run together
_MAY_FAIL = re.compile(r"[/%\[*]|->")  # a division or a load, which an early return may guard
_CONSTANTS = (
    "alias_declaration",
    "type_definition",
    "using_declaration",
    "static_assert_declaration",
    "struct_specifier",
    "class_specifier",
    "union_specifier",
    "enum_specifier",
)


class Flat(Regions):
    """Writes a body as the inside of one loop, preceded by what is the same in all its rounds."""

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared, prepared.expanded(), Unit(simdgroup=False, rows=True))
        self.inside: set[str] = set()  # uniform variables that stay inside the loop
        self.left = False  # a lane may have left already

    def run(self) -> tuple[str, str, bool]:
        """What goes before the loop, what goes inside, and whether a lane leaves early."""
        self._analyse()
        # What depends on a variable that is written is not uniform either.
        variables = (*self.variables.values(), *self.by_param.values())
        self._visit_until_settled([v for v in variables if v.written])
        self.scopes = [dict(self.by_param), {}]
        for statement in self.tree.block.named_children:
            self._statement(statement)
        pieces, self.pending = self.pending, []
        body = "".join(self._text_of(piece) for piece in pieces)
        return (
            "".join(self.out) + self._prepared_divisors(),
            body,
            any(piece.exits for piece in pieces),
        )

    def _splits(self, statement: Node) -> bool:
        return False

    def _lane_jump(self, kind: str) -> str:
        return "goto fr_next;"

    def _outside(self, variable: Variable) -> bool:
        return super()._outside(variable) and variable.name not in self.inside

    def _text_of(self, piece: Piece) -> str:
        return f"{self._line_of(piece)}{piece.plain or piece.text}\n"

    def _line_of(self, piece: Piece) -> str:
        return f'#line {piece.line} "{self.p.kernel.name}.source"\n'

    def _statement(self, statement: Node) -> None:
        kind = statement.type
        text = self.tree.text(statement)
        if kind == "comment":
            return
        if kind.startswith("preproc"):
            self.pending.append(Piece("\n" + text + "\n", self._line(statement)))
        elif kind in _CONSTANTS and not self._lane_names_in(text):
            self._at(statement, text + (";\n" if kind.endswith("_specifier") else "\n"))
        elif kind == "declaration" and not self._leaves_loop(statement):
            self._declare(statement)
        elif kind == "declaration":
            for declarator in declarators(statement):
                self.inside.add(self._declared(statement, declarator, 0).name)
            self._piece(statement)
        elif kind.endswith("_specifier"):
            self.pending.append(Piece(text + ";", self._line(statement)))
        else:
            self._piece(statement)
            self.left |= self.pending[-1].exits

    def _lane_names_in(self, text: str) -> bool:
        """Whether a text names what exists only inside the loop."""
        for name in self._names(text):
            variable = self._lookup(name)
            if name in self.inside or (variable is not None and not variable.uniform):
                return True
        return False

    def _leaves_loop(self, statement: Node) -> bool:
        """Whether a declaration must stay inside the loop."""
        variables = [self._declared(statement, d, 0) for d in declarators(statement)]
        if not all(v.uniform and v.kind in ("value", "array") for v in variables):
            return True
        text = self.tree.text(statement)
        names = self._names(text)
        return bool(names & self.inside) or (self.left and bool(_MAY_FAIL.search(text)))

    def _declare(self, statement: Node) -> None:
        for declarator in declarators(statement):
            self._declared(statement, declarator, 0)
        self._at(statement, self.tree.text(statement) + "\n")


def text(p: Prepared) -> str:
    """The whole text: loops over the grid, what is the same in all threads of a row outside."""
    p = without_synchronising_functions(p)
    attributes = used_attributes(p)
    in_group = any(a in PER_THREAD and a != _GRID for a in attributes) or any(
        a in PER_GROUP for a in attributes
    )
    params = parameters(p.spec)
    before, inside, row, moved = _parts(p, params)
    scalars = "".join(f"  const auto fr_s_{q.name} = fr_a_{q.name};\n" for q in params if q.scalar)
    outside = _row_values(params, moved, attributes, in_group) + before + '#line 1 "ferrule"\n'
    inside = _thread_values(params, moved, attributes, in_group) + inside
    functions = ""
    if in_group:
        loops = _group_loops(outside, inside)
    else:
        loop = f"""\
  for (unsigned fr_i = fr_first; fr_i < fr_last; ++fr_i) {{
{inside}  }}
"""
        if row is not None:
            of_row, in_row = row
            functions = split.row_function(p, of_row)
            functions += split.function(p, "fr_in_row", in_row, ROW_LANES, rows=True)
            loop = _loop_by_rows(p, params, loop)
            scalars += _row_length(p, params)
        loops = _grid_loops(outside, loop)
    arguments = comma(params) + function_parameters(params)
    return with_entry(
        p,
        "rows" if functions else "flat",
        f"""\
{functions}{template_head(p.spec)}static void fr_kernel(
    const ::fr::launch* fr_l, uint64_t fr_begin, uint64_t fr_end{arguments}) {{
  ::fr::group fr_g(fr_l);
  (void)fr_g;
{scalars}{loops}}}
""",
        "  fr_kernel{values}(fr_l, fr_begin, fr_end{arguments});\n",
        params,
        units="grid" if not in_group else "threadgroups",
    )


def _row_values(
    params: list[Parameter], moved: set[str], attributes: list[str], in_group: bool
) -> str:
    """Parameters and attributes that are the same for all threads of a row."""
    values = "".join(
        f"  {q.type} {q.name} = {'fr_s_' if q.scalar else 'fr_a_'}{q.name}; (void){q.name};\n"
        for q in params
        if q.name not in moved
    )
    uniform = [a for a in attributes if a not in PER_THREAD]
    # A row's y and z are the same for all its threads.
    uniform += [a for a in attributes if a == "thread_position_in_threadgroup"]
    values += "".join(f"  {attribute(a)} (void){a};\n" for a in uniform)
    if _GRID in attributes:
        # The row's first thread stands for all where only y and z are asked for.
        position = "fr_g.origin + fr_p" if in_group else "metal::uint3(fr_first, fr_y, fr_z)"
        values += f"  const uint3 {_GRID} = {position};\n  (void){_GRID};\n"
    return values


def _thread_values(
    params: list[Parameter], moved: set[str], attributes: list[str], in_group: bool
) -> str:
    """Parameters and attributes that each thread has for itself."""
    values = "".join(f"  {q.type} {q.name} = fr_a_{q.name};\n" for q in params if q.name in moved)
    values += "".join(f"  {attribute(a)}\n" for a in attributes if a in PER_THREAD and a != _GRID)
    if _GRID in attributes:
        position = "fr_g.origin + fr_p" if in_group else "metal::uint3(fr_i, fr_y, fr_z)"
        values += f"  const uint3 {_GRID} = {position};\n"
    return values


def _row_length(p: Prepared, params: list[Parameter]) -> str:
    """The length of the rows of the launch, before the loops."""
    types = ", ".join(n for n, _ in p.spec.template)
    passed = comma(params) + ", ".join(f"fr_a_{q.name}" for q in params)
    call = f"fr_row_length{'<' + types + '>' if types else ''}(fr_g{passed})"
    return (
        "  fr_g.threads_per_threadgroup = metal::uint3(1, 1, 1);\n"
        f"  const unsigned fr_c = {call};\n"
    )


def _loop_by_rows(p: Prepared, params: list[Parameter], loop: str) -> str:
    """A loop over x, in pieces that lie in one row each where the rows are long enough."""
    passed = comma(params) + ", ".join(f"fr_a_{q.name}" for q in params)
    types = "".join(f", {n}" for n, _ in p.spec.template)
    return f"""\
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
"""


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
    p: Prepared, params: list[Parameter]
) -> tuple[str, str, tuple[Row, str] | None, set[str]]:
    """Before the loop, inside it, inside a row of it, and the parameters that a thread moves."""
    moved = {q.name for q in params if not q.scalar}
    try:
        writer = Flat(p)
        before, inside, exits = writer.run()
    except (NotSplittable, RecursionError):
        # Syntax that is not understood, or too deep: a lambda takes the body as it is.
        return "", f"  [&]() {{\n{body(p, p.text.source)}  }}();\n", None, moved
    if exits:
        inside = f'{{\n{inside}}}\n#line 1 "ferrule"\n  fr_next: ;\n'
    else:
        inside += '#line 1 "ferrule"\n'
    moved = {q.name for q in params if writer.by_param[q.name].written}
    return before, inside, split.in_row(p, writer), moved
