"""Bodies in which no thread waits for another: one loop over lanes, uniform parts outside it."""

from __future__ import annotations

import re

from tree_sitter import Node

from .cpp import Prepared
from .regions import Piece, Regions
from .syntax import declarators
from .uniform import Variable

_POSITION = "thread_position_in_grid.x"
_MAY_FAIL = re.compile(r"[/%\[*]|->")  # a division or a load, which an early return may guard
_CONSTANTS = (
    "alias_declaration", "type_definition", "using_declaration", "static_assert_declaration",
    "struct_specifier", "class_specifier", "union_specifier", "enum_specifier",
)  # fmt: skip


class Flat(Regions):
    """Writes a body as the inside of one loop, preceded by what is the same in all its rounds."""

    def __init__(self, prepared: Prepared, *, rows: bool) -> None:
        super().__init__(prepared, prepared.text.source, simdgroup=False, rows=rows)
        self.inside: set[str] = set()  # uniform variables that stay inside the loop
        self.left = False  # a lane may have left already
        self._kept_divisors: dict[str, int] = {}

    def run(self) -> tuple[str, str, bool]:
        """What goes before the loop, what goes inside, and whether a lane leaves early."""
        self._analyse()
        for v in self.variables.values():
            v.uniform &= not v.written
        self._analyse_again()
        self.scopes = [dict(self.by_param), {}]
        for s in self.tree.block.named_children:
            self._statement(s)
        pieces, self.pending = self.pending, []
        divisors = "".join(
            f"const auto fr_d{n} = ::fr::divisor_of({text});\n" for text, n in self.divisors.items()
        )
        self._kept_divisors = dict(self.divisors)
        body = "".join(self._text_of(piece) for piece in pieces)
        return "".join(self.out) + divisors, body, any(piece.exits for piece in pieces)

    def row(self, inside: str) -> tuple[str, str] | None:
        """The length of a row that the body divides its x by, and the body inside such a row.

        ``x / C`` and ``x % C`` with a uniform C tell which row a thread works on and where in it.
        Within a row the quotient is uniform too: what depends on it alone leaves the loop, and
        neighbouring threads touch neighbouring memory.
        """
        xs = [
            v.name
            for v in self.variables.values()
            if not v.written and not v.uniform and v.value == _POSITION
        ]
        xs.append(_POSITION)
        for text, n in self._kept_divisors.items():
            for x in xs:
                quotient, rest = f"::fr::quotient({x}, fr_d{n})", f"::fr::remainder({x}, fr_d{n})"
                if quotient in inside or rest in inside:
                    of_row = inside.replace(quotient, f"decltype({x} / ({text}))(fr_q)")
                    of_row = of_row.replace(rest, f"decltype({x} % ({text}))(fr_i - fr_b)")
                    return f"fr_d{n}", of_row.replace("fr_next", "fr_next_in_row")
        return None

    def _analyse_again(self) -> None:
        """What depends on a variable that is written is not uniform either."""
        written = {id(v) for v in (*self.variables.values(), *self.by_param.values()) if v.written}
        while True:
            before = self._state()
            for v in self.variables.values():
                if id(v) in written:
                    v.uniform = False
            for v in self.by_param.values():
                if id(v) in written:
                    v.uniform = False
            self.scopes = [dict(self.by_param)]
            self._visit_block(self.tree.block.named_children, 0)
            if self._state() == before:
                return

    def _splits(self, s: Node) -> bool:
        return False

    def _lane_jump(self, kind: str) -> str:
        return "goto fr_next;"

    def _outside(self, variable: Variable) -> bool:
        return super()._outside(variable) and variable.name not in self.inside

    def _text_of(self, piece: Piece) -> str:
        return f"{self._line_of(piece)}{piece.plain or piece.text}\n"

    def _line_of(self, piece: Piece) -> str:
        return f'#line {piece.line} "{self.p.kernel.name}.source"\n'

    def _statement(self, s: Node) -> None:
        kind = s.type
        text = self.tree.text(s)
        if kind == "comment":
            return
        if kind.startswith("preproc"):
            self.pending.append(Piece("\n" + text + "\n", self._line(s)))
        elif kind in _CONSTANTS and not self._lane_names_in(text):
            self._at(s, text + (";\n" if kind.endswith("_specifier") else "\n"))
        elif kind == "declaration" and not self._leaves_loop(s):
            self._declare(s)
        elif kind == "declaration":
            for d in declarators(s):
                self.inside.add(self._declared(s, d, 0).name)
            self._piece(s)
        elif kind.endswith("_specifier"):
            self.pending.append(Piece(text + ";", self._line(s)))
        else:
            self._piece(s)
            self.left |= self.pending[-1].exits

    def _lane_names_in(self, text: str) -> bool:
        """Whether a text names what exists only inside the loop."""
        for name in self._names(text):
            v = self._lookup(name)
            if name in self.inside or (v is not None and not v.uniform):
                return True
        return False

    def _leaves_loop(self, s: Node) -> bool:
        """Whether a declaration must stay inside the loop."""
        found = [self._declared(s, d, 0) for d in declarators(s)]
        if not all(v.uniform and v.kind in ("value", "array") for v in found):
            return True
        text = self.tree.text(s)
        names = self._names(text)
        return bool(names & self.inside) or (self.left and bool(_MAY_FAIL.search(text)))

    def _declare(self, s: Node) -> None:
        for d in declarators(s):
            self._declared(s, d, 0)
        self._at(s, self.tree.text(s) + "\n")
