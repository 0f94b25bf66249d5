"""The text of a kernel whose threads are fibers: right for any control flow."""

from __future__ import annotations

from dataclasses import replace

from tree_sitter import Node

from .cpp import (
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
from .lexer import join, tokens
from .syntax import Tree, callee, declarators, declared_name, function_definitions, walk

_STORAGE = "static thread_local __attribute__((aligned(16)))"


def text(p: Prepared) -> str:
    """The whole text."""
    params = parameters(p.spec)
    values = "".join(f"  {attribute(a)}\n" for a in used_attributes(p))
    source = mark_places(p.text.source, p, body=True)
    header = mark_places(p.text.header, p, body=False)
    marked = replace(p, text=replace(p.text, header=header, source=source))
    names = ", ".join(f"{q.type} {q.name}" for q in params)
    return with_entry(
        marked,
        "fibers",
        f"""\
{template_head(p.spec)}static void fr_kernel(
    const ::fr::group& fr_g, unsigned fr_i{comma(params)}{names}) {{
  const metal::uint3 fr_p = fr_g.position(fr_i);
  (void)fr_p;
{values}{body(p, source)}}}
""",
        "  ::fr::fiber_groups(fr_l, fr_begin, fr_end, fr_w, [&](const ::fr::group& fr_g, unsigned "
        "fr_i) {\n    fr_kernel{values}(fr_g, fr_i{arguments});\n  });\n",
        params,
        units="threadgroups",
    )


def mark_places(text: str, p: Prepared, *, body: bool) -> str:
    """Tell each synchronising call and loop its place in the text (see ``include/fiber.h``)."""
    defined_here = {name for name, _ in function_definitions(p.header)}
    helpers = synchronising_functions(p)
    tree = Tree(text, body=body)
    edits: list[tuple[int, int, str]] = []
    if not tree.has_error:
        for node in walk(tree.block):
            if node.type in ("for_statement", "while_statement", "do_statement"):
                calls = {callee(tree, n) for n in walk(node) if n.type == "call_expression"}
                inner = node.child_by_field_name("body")
                if calls & (SYNC | helpers) and inner is not None:
                    edits += _loop_marks(node, inner)
            elif node.type == "declaration" and tree.text(node).startswith("thread_local"):
                names = [declared_name(d) for d in declarators(node)]
                line = node.start_point[0] + 1
                notes = " ".join(shared_note(line, tree.text(n)) for n in names if n is not None)
                edits.append((node.end_byte, node.end_byte, f" {notes}"))
            elif node.type == "call_expression":
                edits += _call_marks(tree, node, helpers, set(SYNC) - defined_here)
    marked = tree.edited(edits) if edits else text
    redefined = {name for name in defined_here if name in SYNC}
    return _mark_calls(marked, p.kernel.name, redefined)


def _call_marks(
    tree: Tree, node: Node, helpers: set[str], sync: set[str]
) -> list[tuple[int, int, str]]:
    """Mark a call's place, behind those of its arguments.

    Lanes may leave the arguments at different times: those that are ahead wait at the call, whose
    place must then be later in the text than the arguments' own. A lambda stands in parentheses:
    ``[[`` would begin an attribute.
    """
    name = callee(tree, node)
    function, arguments = (node.child_by_field_name(f) for f in ("function", "arguments"))
    if name not in helpers | sync or not _is_evaluated(node):
        return []
    if function is None or arguments is None:
        return []
    start, end, forward = node.start_byte, node.end_byte, "static_cast<decltype(fr_a)&&>(fr_a)..."
    calls = {callee(tree, n) for n in walk(arguments) if n.type == "call_expression"}
    nested = bool(calls & (helpers | sync))
    if not nested or any(a.type == "initializer_list" for a in arguments.named_children):
        if name not in helpers:
            return []
        before = "([&]() -> decltype(auto) { ::fr::place_mark fr_c(__COUNTER__); return "
        return [(start, start, before), (end, end, "; }())")]
    outer = "([&](auto&&... fr_a) { return [&](auto fr_n) -> decltype(auto) { "
    if name in helpers:
        before, inside = f"{outer}::fr::place_mark fr_c(fr_n); return ", f"({forward}); }}; }}"
        place = "(__COUNTER__))"
    else:  # in parentheses: it has its place already
        before, inside = f"{outer}return (", f")(fr_n, {forward}); }}; }}"
        place = "(::fr::at<__COUNTER__>()))"
    return [(start, start, before), (function.end_byte,) * 2 + (inside,), (end, end, place)]


def _is_evaluated(node: Node) -> bool:
    """Whether a call is evaluated, not only asked for its type."""
    around = node.parent
    while around is not None and not around.type.endswith("_statement"):
        if around.type in ("decltype", "sizeof_expression", "template_argument_list"):
            return False
        around = around.parent
    return True


def _loop_marks(node: Node, inner: Node) -> list[tuple[int, int, str]]:
    """Count a loop's rounds. A condition or step belongs to the round that follows it."""
    mark = "if (::fr::place_mark fr_m(__COUNTER__); true) "
    edits = [(node.start_byte, node.start_byte, mark)]
    condition, step = (node.child_by_field_name(f) for f in ("condition", "update"))
    if condition is not None and condition.type == "condition_clause":
        condition = condition.child_by_field_name("value")
    heads = [step] if step is not None else []
    plain = condition is not None and not condition.type.endswith("declaration")
    if node.type != "do_statement" and condition is not None and plain:
        heads.append(condition)
    for head in heads:
        edits.append((head.start_byte, head.start_byte, "(fr_m.tick(), ("))
        edits.append((head.end_byte, head.end_byte, "))"))
    if node.type == "do_statement" or not plain:
        edits.append((inner.start_byte, inner.start_byte, "{ fr_m.tick(); "))
        edits.append((inner.end_byte, inner.end_byte, " }"))
    return edits


def _mark_calls(text: str, kernel: str, redefined: set[str]) -> str:
    code = tokens(text, kernel=kernel, where="source")
    solid = [t for t in code if not t.blank]
    for i, token in enumerate(solid):
        if token.text == "thread_local":
            token.text = _STORAGE
        if token.kind != "word" or token.text not in (SYNC | MATRIX_OPS) or token.text in redefined:
            continue
        if i + 1 < len(solid) and solid[i + 1].text == "(":
            empty = i + 2 < len(solid) and solid[i + 2].text == ")"
            solid[i + 1].text = "(FR_AT_ONLY" if empty else "(FR_AT "
    return join(code)
