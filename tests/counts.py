"""How large the library is, and what of it is too large: ``python tests/counts.py``."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from test_layers import MAY_IMPORT, PACKAGE, SOURCES, circle, graph_of

LINES, STATEMENTS = 500, 60  # of a file, of a function
SAY_NOTHING = frozenset({"one", "said", "given", "found", "made", "sent", "asked"})


def functions(text: str) -> dict[str, int]:
    """The lines of each function's body, its docstring left out."""
    found = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            if body:
                found[f"{node.lineno} {node.name}"] = (
                    (body[-1].end_lineno or 0) - body[0].lineno + 1
                )
    return found


def names(text: str) -> int:
    """How often a name is bound that says nothing."""
    count = 0
    for node in ast.walk(ast.parse(text)):
        bound = node.arg if isinstance(node, ast.arg) else ""
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound = node.id
        count += bound in SAY_NOTHING
    return count


def main() -> None:
    kinds = {".py", ".pyi", ".c", ".cpp", ".h", ".metal"}
    every = [p for p in PACKAGE.parent.rglob("*") if p.suffix in kinds]
    print("lines in src:", sum(len(p.read_text("utf-8").splitlines()) for p in every))
    print("files in src:", len(every))
    print("files at the root:", len(list(PACKAGE.glob("*.py"))))
    print("rooms:", len(MAY_IMPORT))
    print("circle of modules:", " → ".join(circle(graph_of(SOURCES))) or "none")
    texts = {Path(p).relative_to(PACKAGE): p.read_text("utf-8") for p in PACKAGE.rglob("*.py")}
    long = {str(p): len(t.splitlines()) for p, t in texts.items() if len(t.splitlines()) > LINES}
    print(f"Python files over {LINES} lines:", len(long))
    for path, count in sorted(long.items(), key=lambda one: -one[1]):
        print(f"  {count} {path}")
    large = {
        f"{path}:{name}": count
        for path, text in texts.items()
        for name, count in functions(text).items()
        if count > STATEMENTS
    }
    print(f"functions over {STATEMENTS} lines:", len(large))
    for name, count in sorted(large.items(), key=lambda one: -one[1]):
        print(f"  {count} {name}")
    print("fmt: skip:", sum(len(re.findall(r"fmt: ?skip", text)) for text in texts.values()))
    print("names that say nothing, bound:", sum(map(names, texts.values())))


if __name__ == "__main__":
    main()
