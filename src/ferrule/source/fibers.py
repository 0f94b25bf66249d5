"""The text of a kernel whose threads are fibers: right for any control flow."""

from __future__ import annotations

from dataclasses import replace

from tree_sitter import Node

from .cpp import (
    NotSplittable,
    Prepared,
    attribute,
    body,
    comma,
    parameters,
    shared_note,
    synchronising_functions,
    template_head,
    used_attributes,
    with_entry,
)
from .dialect import MATRIX_OPS, SYNC
from .lexer import join, solid, text_at, tokens
from .rows import watch_rows
from .syntax import (
    Edit,
    Tree,
    called,
    callee,
    declarators,
    declared_name,
    enclosed,
    field,
    function_definitions,
    part,
    replaced,
    walk,
)
from .unset import watch_locals

_STORAGE = "static thread_local __attribute__((aligned(16)))"
# In a checked text, which runs on one thread: of declarations that `_memory` leaves as they are.
UNWATCHED = _STORAGE.replace("thread_local ", "")


def text(p: Prepared, *, checked: bool = False) -> str:
    """The whole text.

    Args:
        checked: for `ferrule.check`: threadgroup memory lies where each access of it is seen.
    """
    params = parameters(p.spec)
    values = "".join(f"  {attribute(a)}\n" for a in used_attributes(p))
    source, header = p.text.source, p.text.header
    if checked:
        source = watch_rows(watch_locals(_understood(p), p.header), body=True)
        header = watch_rows(header, body=False)
    source = mark_places(source, p, body=True, checked=checked)
    header = mark_places(header, p, body=False, checked=checked)
    marked = replace(p, text=replace(p.text, header=header, source=source))
    names = ", ".join(f"{q.type} {q.name}" for q in params)
    alone = checked and not p.text.words & (SYNC | MATRIX_OPS) and "##" not in header + source
    groups = "thread_groups" if alone else "fiber_groups"
    # Of a function that is inlined, the compiler knows what its pointers point to.
    apart = "__attribute__((noinline, flatten)) " if checked else ""
    return with_entry(
        marked,
        "fibers",
        f"""\
{template_head(p.spec)}static {apart}void fr_kernel(
    const ::fr::group& fr_g, unsigned fr_i{comma(params)}{names}) {{
  const metal::uint3 fr_p = fr_g.position(fr_i);
  (void)fr_p;
{values}{body(p, source)}}}
""",
        f"  ::fr::{groups}(fr_l, fr_begin, fr_end, fr_w, [&](const ::fr::group& fr_g, unsigned "
        "fr_i) FR_QUIET {\n    fr_kernel{values}(fr_g, fr_i{arguments});\n  });\n",
        params,
        units="threadgroups",
    )


def _understood(p: Prepared) -> str:
    """The body, with its macros expanded where the parser understands it so alone."""
    if not Tree(p.text.source, body=True).has_error:
        return p.text.source
    try:
        expanded = p.expanded()
    except NotSplittable:
        return p.text.source
    return p.text.source if Tree(expanded, body=True).has_error else expanded


def mark_places(text: str, p: Prepared, *, body: bool, checked: bool = False) -> str:
    """Tell each synchronising call and loop its place in the text (see ``include/fiber.h``)."""
    defined_here = {name for name, _ in function_definitions(p.header)}
    helpers = synchronising_functions(p)
    tree = Tree(text, body=body)
    edits: list[Edit] = []
    for node in walk(tree.block) if not tree.has_error else ():
        if node.type in ("for_statement", "while_statement", "do_statement"):
            if called(tree, node) & (SYNC | helpers):
                edits += _loop_marks(node)
        elif node.type == "declaration" and (word := _storage(tree, node)) is not None:
            edits += _memory(tree, node, word, checked)
        elif node.type == "call_expression":
            edits += _call_marks(tree, node, helpers, set(SYNC) - defined_here)
    storage = UNWATCHED if checked else _STORAGE
    return _mark_calls(tree.edited(edits), p.kernel.name, defined_here & SYNC, storage)


def _storage(tree: Tree, node: Node) -> Node | None:
    """The word of a declaration that says that it is of threadgroup memory."""
    specifiers = (c for c in node.children if c.type == "storage_class_specifier")
    return next((c for c in specifiers if tree.text(c) == "thread_local"), None)


def _memory(tree: Tree, node: Node, storage: Node, checked: bool) -> list[Edit]:
    """Note how large the threadgroup memory of a declaration is, or have it elsewhere.

    Of ``thread_local float a[8];`` a checked text makes a type, and a reference to memory of it,
    which lies at the begin of a page: what ``alignas`` asks for goes.
    """
    names = [n for n in map(declared_name, declarators(node)) if n is not None]
    line, end = node.start_point[0] + 1, node.end_byte
    shapes = ("identifier", "array_declarator")
    if not checked or any(d.type not in shapes for d in declarators(node)):
        notes = " ".join(shared_note(line, tree.text(n)) for n in names)
        return [(end, end, f" {notes}")]
    aligned = [c for c in node.children if any(q.type == "alignas_qualifier" for q in c.children)]
    specifiers = [replaced(storage, "typedef"), *(replaced(c, "") for c in aligned)]
    memory = " ".join(f"FR_MEMORY({line}, {tree.text(n)});" for n in names)
    types = [(n.start_byte, n.start_byte, "fr_t_") for n in names]
    return [*specifiers, *types, (end, end, f" {memory}")]


def _call_marks(tree: Tree, node: Node, helpers: set[str], sync: set[str]) -> list[Edit]:
    """Mark a call's place, behind those of its arguments.

    Lanes may leave the arguments at different times: those that are ahead wait at the call, whose
    place must then be later in the text than the arguments' own. A lambda stands in parentheses:
    ``[[`` would begin an attribute.
    """
    name, arguments = callee(tree, node), part(node, "arguments")
    if name not in helpers | sync or not _is_evaluated(node):
        return []
    nested = called(tree, arguments) & (helpers | sync)
    if not nested or any(a.type == "initializer_list" for a in arguments.named_children):
        if name not in helpers:
            return []
        before = "([&]() -> decltype(auto) { ::fr::place_mark fr_c(__COUNTER__); return "
        return enclosed(node, before, "; }())")
    forward = "static_cast<decltype(fr_a)&&>(fr_a)..."
    outer = "([&](auto&&... fr_a) { return [&](auto fr_n) -> decltype(auto) { "
    if name in helpers:
        before, inside = f"{outer}::fr::place_mark fr_c(fr_n); return ", f"({forward}); }}; }}"
        place = "(__COUNTER__))"
    else:  # in parentheses: it has its place already
        before, inside = f"{outer}return (", f")(fr_n, {forward}); }}; }}"
        place = "(::fr::at<__COUNTER__>()))"
    behind = part(node, "function").end_byte
    return [(behind, behind, inside), *enclosed(node, before, place)]


def _is_evaluated(node: Node) -> bool:
    """Whether a call is evaluated, not only asked for its type."""
    ends = ("_statement", "decltype", "sizeof_expression", "template_argument_list")
    around = node.parent
    while around is not None and not around.type.endswith(ends):
        around = around.parent
    return around is None or around.type.endswith("_statement")


def _loop_marks(node: Node) -> list[Edit]:
    """Count a loop's rounds. A condition or step belongs to the round that follows it."""
    mark = "if (::fr::place_mark fr_m(__COUNTER__); true) "
    edits = [(node.start_byte, node.start_byte, mark)]
    condition, step = field(node, "condition"), field(node, "update")
    if condition is not None and condition.type == "condition_clause":
        condition = field(condition, "value")
    if node.type == "do_statement" or (
        condition is not None and condition.type.endswith("declaration")
    ):
        condition = None
    for head in (step, condition):
        edits += enclosed(head, "(fr_m.tick(), (", "))") if head is not None else []
    if condition is None:
        edits += enclosed(part(node, "body"), "{ fr_m.tick(); ", " }")
    return edits


def _mark_calls(text: str, kernel: str, redefined: set[str], storage: str) -> str:
    code = tokens(text, kernel=kernel, where="source")
    parts = solid(code)
    for i, token in enumerate(parts):
        if token.text == "thread_local":
            token.text = storage
        synchronises = token.kind == "word" and token.text in (SYNC | MATRIX_OPS) - redefined
        if synchronises and text_at(parts, i + 1) == "(":
            empty = text_at(parts, i + 2) == ")"
            parts[i + 1].text = "(FR_AT_ONLY" if empty else "(FR_AT "
    return join(code)
