"""One C++ text of a kernel for each way of running it.

==========  ===================================================================================
``flat``    no thread waits for another: plain loops over the grid, which the compiler
            vectorises
``split``   loops over the threads of a threadgroup, split at the barriers (`source.split`)
``fibers``  each thread is a fiber: any control flow
``cuda``    one GPU thread per thread
==========  ===================================================================================

The text includes ``ferrule.h`` and nothing else. User text lives in ``namespace fr::user``, so no C
library name can clash with it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..dtypes import Dtype
from ..kernel import Kernel
from ..spec import Spec
from .dialect import MATRIX_OPS, SYNC, THREADGROUP_BARRIERS
from .lexer import join, tokens
from .rewrite import Rewritten, rewrite

ENTRY = "fr_entry"  # the exported function of a CPU kernel


class NotSplittable(Exception):
    """The control flow does not allow the split; says why."""


class Parameter(NamedTuple):
    """One parameter of the kernel function: its C++ type, name, and what to pass on the CPU."""

    type: str
    name: str
    argument: str
    scalar: bool = False  # a reference to one value


@dataclass
class Prepared:
    """A spec with its rewritten text, from which every form is made."""

    spec: Spec
    text: Rewritten

    @property
    def kernel(self) -> Kernel:
        return self.spec.kernel

    @property
    def synchronises(self) -> bool:
        """Whether some thread may wait for another."""
        words = self.text.source_words
        if words & SYNC or self.shared:
            return True
        # Macros and functions of the header may bring a synchronising call along.
        return bool(self.text.header_words & SYNC) and bool(
            words & (synchronising_functions(self) | self.text.synchronising_macros)
        )

    @property
    def shared(self) -> bool:
        """Whether the body declares threadgroup memory."""
        return re.search(r"\bthread_local\b", self.text.source) is not None

    @property
    def barriers(self) -> bool:
        """Whether threads of different simdgroups may meet."""
        return self.shared or bool(self.text.words & THREADGROUP_BARRIERS)


def prepare(spec: Spec) -> Prepared:
    """Rewrite a spec's text.

    Raises:
        DialectError: the text uses something that ferrule refuses.
    """
    text = rewrite(spec.kernel)
    if text.words & {"struct", "class", "union"} and _VECTOR.search(" ".join(text.words)):
        from .syntax import align_members

        text = replace(
            text,
            header=align_members(text.header, body=False),
            source=align_members(text.source, body=True),
        )
    if _class_types(spec, text):
        from .syntax import convert_conditionals

        text = replace(
            text,
            header=convert_conditionals(text.header, body=False),
            source=convert_conditionals(text.source, body=True),
        )
    return Prepared(spec, text)


_VECTOR = re.compile(r"\b(?:vec|[a-z]+[234])\b")

# Types that are classes on some compiler, and so convert both ways in a `?:`.
_CLASSES = frozenset({"bfloat16_t", "bfloat", "half", "float16_t"})
_CLASS_WORDS = _CLASSES | {f"{n}{k}" for n in ("bfloat", "half") for k in (2, 3, 4)}


def _class_types(spec: Spec, text: Rewritten) -> bool:
    """Whether a class that converts both ways may stand in a ``?:``."""
    used = {i.dtype.metal for i in spec.inputs} | {d.metal for d in spec.outputs}
    used |= {v.metal for _, v in spec.template if isinstance(v, Dtype)}
    return bool(_CLASSES & used) or bool(_CLASS_WORDS & text.words)


def parameters(spec: Spec) -> list[Parameter]:
    """The kernel function's parameters, inputs with their shape arguments first, then outputs."""
    kernel = spec.kernel
    out: list[Parameter] = []
    for i, (name, given) in enumerate(zip(kernel.input_names, spec.inputs, strict=True)):
        ctype = given.dtype.metal
        pointer = f"static_cast<const {ctype}*>(fr_l->buffers[{i}])"
        if given.ndim == 0:
            out.append(Parameter(f"const {ctype}&", name, f"*{pointer}", scalar=True))
            continue
        out.append(Parameter(f"const {ctype}*", name, pointer))
        shape, strides, ndim = kernel.wants(name)
        if shape:
            out.append(Parameter("const int*", f"{name}_shape", f"fr_l->shapes[{i}]"))
        if strides:
            out.append(Parameter("const int64_t*", f"{name}_strides", f"fr_l->strides[{i}]"))
        if ndim:
            out.append(Parameter("const int&", f"{name}_ndim", f"fr_l->ndims[{i}]", scalar=True))
    for j, (name, dtype) in enumerate(zip(kernel.output_names, spec.outputs, strict=True)):
        ctype = f"atomic<{dtype.metal}>" if kernel.atomic_outputs else dtype.metal
        i = len(spec.inputs) + j
        out.append(Parameter(f"{ctype}*", name, f"static_cast<{ctype}*>(fr_l->buffers[{i}])"))
    return out


def template_head(spec: Spec) -> str:
    """``template <int N, typename T>``, or nothing."""
    if not spec.template:
        return ""
    kinds = [
        "typename" if isinstance(v, Dtype) else "bool" if isinstance(v, bool) else "int"
        for _, v in spec.template
    ]
    names = (f"{k} {n}" for k, (n, _) in zip(kinds, spec.template, strict=True))
    return f"template <{', '.join(names)}>\n"


def template_values(spec: Spec) -> str:
    """``<3, float>``, or nothing."""
    if not spec.template:
        return ""
    return f"<{', '.join(template_value(v) for _, v in spec.template)}>"


def template_value(value: object) -> str:
    """A template argument as C++."""
    if isinstance(value, Dtype):
        return value.metal
    if isinstance(value, bool):
        return "true" if value else "false"
    return "(-2147483647 - 1)" if value == -(1 << 31) else str(value)


# What each attribute is, for a thread with index `fr_i` and position `fr_p` in the group `fr_g`.
_PER_THREAD: dict[str, str] = {
    "thread_index_in_threadgroup": "fr_i",
    "thread_index_in_simdgroup": "fr_i % 32u",
    "thread_index_in_quadgroup": "fr_i % 4u",
    "simdgroup_index_in_threadgroup": "fr_i / 32u",
    "quadgroup_index_in_threadgroup": "fr_i / 4u",
    "thread_position_in_threadgroup": "fr_p",
    "thread_position_in_grid": "fr_g.origin + fr_p",
}
_PER_GROUP: dict[str, str] = {
    "threadgroup_position_in_grid": "fr_g.threadgroup_position_in_grid",
    "threads_per_threadgroup": "fr_g.threads_per_threadgroup",
    "simdgroups_per_threadgroup": "fr_g.simdgroups()",
    "quadgroups_per_threadgroup": "fr_g.quadgroups()",
}
_PER_LAUNCH: dict[str, str] = {
    "dispatch_threads_per_threadgroup": "fr_g.dispatch_threads_per_threadgroup",
    "dispatch_simdgroups_per_threadgroup": "fr_g.dispatch_simdgroups()",
    "dispatch_quadgroups_per_threadgroup": "fr_g.dispatch_quadgroups()",
    "threadgroups_per_grid": "fr_g.threadgroups_per_grid",
    "threads_per_grid": "fr_g.threads_per_grid",
    "grid_size": "fr_g.threads_per_grid",
    "grid_origin": "::fr::metal::uint3(0u, 0u, 0u)",
    "threads_per_simdgroup": "32u",
    "thread_execution_width": "32u",
}


def used_attributes(p: Prepared) -> list[str]:
    """The attributes that the body's code names (comments apart)."""
    from ..kernel import ATTRIBUTES

    return [a for a in ATTRIBUTES if a in p.text.words]


def attribute(name: str) -> str:
    """The declaration of an attribute's variable."""
    from ..kernel import ATTRIBUTES

    value = _PER_THREAD.get(name) or _PER_GROUP.get(name) or _PER_LAUNCH[name]
    return f"const {ATTRIBUTES[name]} {name} = {value};"


def head(p: Prepared, mode: str) -> str:
    """The start of a text: the include, then the user's header in its namespace."""
    return (
        f"// {p.kernel.name}\n"
        f"#define FR_{mode.upper()} 1\n"
        '#include "ferrule.h"\n'
        "namespace fr { namespace user {\n"
        "using namespace metal;\n"
        f'#line 1 "{p.kernel.name}.header"\n'
        f"{p.text.header}\n"
        '#line 1 "ferrule"\n'
    )


TAIL = "} }  // namespace fr::user\n"


def body_line(p: Prepared, line: int) -> str:
    """The directive that says where in the author's source what follows stands."""
    return f'#line {line} "{p.kernel.name}.source"\n'


def body(p: Prepared, text: str) -> str:
    """The author's lines, under their own line numbers."""
    return f'{body_line(p, 1)}{text}\n#line 1 "ferrule"\n'


def _function_parameters(parameters_: list[Parameter]) -> str:
    def one(q: Parameter) -> str:
        if q.scalar:
            return f"{q.type} fr_a_{q.name}"
        return f"{q.type} __restrict__ fr_a_{q.name}"

    return ", ".join(one(q) for q in parameters_)


# -- flat ----------------------------------------------------------------------------------------


def flat(p: Prepared) -> str:
    """Plain loops over the grid; what is the same in all threads of a row stands outside."""
    p = without_synchronising_functions(p)
    attributes = used_attributes(p)
    in_group = any(a in _PER_THREAD and a != "thread_position_in_grid" for a in attributes) or any(
        a in _PER_GROUP for a in attributes
    )
    params = parameters(p.spec)
    before, inside, row, moved = _flat_parts(p, params)
    uniform = [a for a in attributes if a not in _PER_THREAD]
    lane = [a for a in attributes if a in _PER_THREAD and a != "thread_position_in_grid"]
    grid = "thread_position_in_grid" in attributes
    # The row's first thread stands for all where only y and z are asked for.
    group_position = "fr_g.origin + fr_p" if in_group else "metal::uint3(fr_first, fr_y, fr_z)"
    position = "fr_g.origin + fr_p" if in_group else "metal::uint3(fr_i, fr_y, fr_z)"
    scalars = "".join(f"  const auto fr_s_{q.name} = fr_a_{q.name};\n" for q in params if q.scalar)
    values = "".join(
        f"  {q.type} {q.name} = {'fr_s_' if q.scalar else 'fr_a_'}{q.name}; (void){q.name};\n"
        for q in params
        if q.name not in moved
    )
    values += "".join(f"  {attribute(a)} (void){a};\n" for a in uniform)
    if grid:
        values += f"  const uint3 thread_position_in_grid = {group_position};\n"
        values += "  (void)thread_position_in_grid;\n"
    thread = "".join(f"  {q.type} {q.name} = fr_a_{q.name};\n" for q in params if q.name in moved)
    thread += "".join(f"  {attribute(a)}\n" for a in lane)
    if grid:
        thread += f"  const uint3 thread_position_in_grid = {position};\n"
    loop = f"""\
  for (unsigned fr_i = fr_first; fr_i < fr_last; ++fr_i) {{
{thread}{inside}  }}
"""
    if row is not None and not in_group:
        divisor, of_row = row
        loop = f"""\
  if (const unsigned fr_c = ::fr::row_length({divisor})) {{
  for (unsigned fr_s = fr_first; fr_s < fr_last;) {{
  const unsigned fr_q = {divisor}.plain.divide(fr_s), fr_b = fr_q * fr_c;
  const unsigned fr_e = fr_last - fr_b < fr_c ? fr_last : fr_b + fr_c;
  for (unsigned fr_i = fr_s; fr_i < fr_e; ++fr_i) {{
{thread}{of_row}  }}
  fr_s = fr_e;
  }}
  }} else {{
{loop}  }}
"""
    if in_group:
        loops = f"""\
  for (uint64_t fr_u = fr_begin; fr_u < fr_end; ++fr_u) {{
  fr_g.move_to(fr_u);
  const metal::uint3 fr_t = fr_g.threads_per_threadgroup;
  for (unsigned fr_z = 0, fr_row = 0; fr_z < fr_t.z; ++fr_z)
  for (unsigned fr_y = 0; fr_y < fr_t.y; ++fr_y, fr_row += fr_t.x) {{
  const metal::uint3 fr_p(0, fr_y, fr_z);
  (void)fr_p;
{values}{before}#line 1 "ferrule"
  for (unsigned fr_x = 0; fr_x < fr_t.x; ++fr_x) {{
  const unsigned fr_i = fr_row + fr_x;
  const metal::uint3 fr_p(fr_x, fr_y, fr_z);
  (void)fr_i, (void)fr_p;
{thread}{inside}  }}
  }}
  }}
"""
    else:
        loops = f"""\
  const unsigned fr_blocks = (fr_l->grid[0] + fr_l->block - 1) / fr_l->block;
  for (uint64_t fr_u = fr_begin; fr_u < fr_end; ++fr_u) {{
  const uint64_t fr_row = fr_u / fr_blocks;
  const unsigned fr_first = unsigned(fr_u % fr_blocks) * fr_l->block;
  const unsigned fr_left = fr_l->grid[0] - fr_first;
  const unsigned fr_last = fr_first + (fr_left < fr_l->block ? fr_left : fr_l->block);
  const unsigned fr_y = unsigned(fr_row % fr_l->grid[1]), fr_z = unsigned(fr_row / fr_l->grid[1]);
  (void)fr_y, (void)fr_z;
{values}{before}#line 1 "ferrule"
{loop}  }}
"""
    return _with_entry(
        p,
        "flat",
        f"""\
{template_head(p.spec)}static void fr_kernel(const ::fr::launch* fr_l, uint64_t fr_begin, uint64_t fr_end{_comma(params)}{_function_parameters(params)}) {{
  ::fr::group fr_g(fr_l);
  (void)fr_g;
{scalars}{loops}}}
""",
        "  fr_kernel{values}(fr_l, fr_begin, fr_end{arguments});\n",
        params,
        units="grid" if not in_group else "threadgroups",
    )


def _flat_parts(
    p: Prepared, params: list[Parameter]
) -> tuple[str, str, tuple[str, str] | None, set[str]]:
    """Before the loop, inside it, inside a row of it, and the parameters that a thread moves."""
    from .flat import Flat

    moved = {q.name for q in params if not q.scalar}
    try:
        writer = Flat(p, rows=True)
    except NotSplittable:
        # Syntax that is not understood: a lambda takes the body as it is.
        return "", f"  [&]() {{\n{body(p, p.text.source)}  }}();\n", None, moved
    before, inside, exits = writer.run()
    if exits:
        inside = f'{{\n{inside}}}\n#line 1 "ferrule"\n  fr_next: ;\n'
    else:
        inside += '#line 1 "ferrule"\n'
    moved = {q.name for q in params if writer.by_param[q.name].written}
    return before, inside, writer.row(inside), moved


def _comma(params: list[Parameter]) -> str:
    return ", " if params else ""


_SHARED_TABLE = """\
FR_EXPORT unsigned fr_shared(unsigned* fr_at, unsigned fr_room) {
  return ::fr::shared_memory(fr_at, fr_room);
}
"""


def _with_entry(
    p: Prepared, mode: str, function: str, call: str, params: list[Parameter], units: str
) -> str:
    arguments = "".join(f", {q.argument}" for q in params)
    call = call.replace("{values}", template_values(p.spec)).replace("{arguments}", arguments)
    return (
        f"{head(p, mode)}{function}"
        f"FR_EXPORT void {ENTRY}(const ::fr::launch* fr_l, uint64_t fr_begin, uint64_t fr_end, "
        f"::fr::worker* fr_w) {{\n  (void)fr_w;\n{call}}}\n"
        f'FR_EXPORT const char fr_units[] = "{units}";\n'
        f"{_SHARED_TABLE if mode != 'flat' else ''}"
        f"{TAIL}"
    )


# -- CUDA ----------------------------------------------------------------------------------------


def cuda(p: Prepared) -> str:
    """One GPU thread per thread; a threadgroup is a block.

    The kernel takes the buffers, each input's shape and strides where the body names them, by
    value, and at last the grid and threadgroup (`fr::launch` of include/cuda.h).
    """
    kernel, spec = p.kernel, p.spec
    source = re.sub(r"\bthread_local\b", "__shared__", p.text.source)
    params = parameters(spec)
    given: list[str] = []
    passed: list[str] = []
    for name, one in zip(kernel.input_names, spec.inputs, strict=True):
        ctype = one.dtype.metal
        given.append(
            f"const fr::{ctype}* __restrict__ fr_a_{name}"
            if ctype not in _BUILTIN
            else f"const {ctype}* __restrict__ fr_a_{name}"
        )
        passed.append(f"*fr_a_{name}" if one.ndim == 0 else f"fr_a_{name}")
        if one.ndim == 0:
            continue
        shape, strides, ndim = kernel.wants(name)
        if shape:
            given.append(f"const __grid_constant__ fr::list<int, {one.ndim}> fr_a_{name}_shape")
            passed.append(f"fr_a_{name}_shape.values")
        if strides:
            given.append(
                f"const __grid_constant__ fr::list<fr::int64_t, {one.ndim}> fr_a_{name}_strides"
            )
            passed.append(f"fr_a_{name}_strides.values")
        if ndim:
            passed.append(str(one.ndim))
    for name, dtype in zip(kernel.output_names, spec.outputs, strict=True):
        ctype = dtype.metal if dtype.metal in _BUILTIN else f"fr::{dtype.metal}"
        ctype = f"fr::metal::atomic<{ctype}>" if kernel.atomic_outputs else ctype
        given.append(f"{ctype}* __restrict__ fr_a_{name}")
        passed.append(f"fr_a_{name}")
    names = ", ".join(f"{q.type} {q.name}" for q in params)
    values = "".join(f"  {attribute(a)}\n" for a in used_attributes(p))
    return f"""\
{head(p, "cuda_kernel")}{template_head(spec)}FR_FN void fr_kernel(const ::fr::group& fr_g, unsigned fr_i, const ::fr::metal::uint3& fr_p{_comma(params)}{names}) {{
  (void)fr_i, (void)fr_p;
{values}{body(p, source)}}}
{TAIL}
extern "C" __global__ void {kernel_symbol(p)}({", ".join([*given, "const __grid_constant__ fr::launch fr_l"])}) {{
  const fr::group fr_g(fr_l);
  const fr::metal::uint3 fr_p(threadIdx.x, threadIdx.y, threadIdx.z);
  if (!fr_g.holds(fr_p)) return;
  fr::user::fr_kernel{_qualified_values(spec)}({", ".join(["fr_g, fr_g.index(fr_p), fr_p", *passed])});
}}
"""


_BUILTIN = frozenset({"bool", "float", "double"})


def kernel_symbol(p: Prepared) -> str:
    """The name of the CUDA function."""
    return f"ferrule_{p.kernel.name}"


def _qualified_values(spec: Spec) -> str:
    """Template arguments as they read outside ``namespace fr``."""
    values = [
        f"fr::{v.metal}" if isinstance(v, Dtype) and v.metal not in _BUILTIN else template_value(v)
        for _, v in spec.template
    ]
    return f"<{', '.join(values)}>" if values else ""


# -- fibers --------------------------------------------------------------------------------------


def fibers(p: Prepared) -> str:
    """Each thread of a threadgroup is a fiber."""
    params = parameters(p.spec)
    values = "".join(f"  {attribute(a)}\n" for a in used_attributes(p))
    source = mark_places(p.text.source, p, body=True)
    header = mark_places(p.text.header, p, body=False)
    marked = replace(p, text=replace(p.text, header=header, source=source))
    names = ", ".join(f"{q.type} {q.name}" for q in params)
    return _with_entry(
        marked,
        "fibers",
        f"""\
{template_head(p.spec)}static void fr_kernel(const ::fr::group& fr_g, unsigned fr_i{_comma(params)}{names}) {{
  const metal::uint3 fr_p = fr_g.position(fr_i);
  (void)fr_p;
{values}{body(p, source)}}}
""",
        "  ::fr::fiber_groups(fr_l, fr_begin, fr_end, fr_w, [&](const ::fr::group& fr_g, unsigned "
        "fr_i) {\n    fr_kernel{values}(fr_g, fr_i{arguments});\n  });\n",
        params,
        units="threadgroups",
    )


_STORAGE = "static thread_local __attribute__((aligned(16)))"


def shared_note(line: int, name: str) -> str:
    """Records how large a threadgroup variable is, in a section that the device reads."""
    return f"FR_SHARED({line}, {name});"


def mark_places(text: str, p: Prepared, *, body: bool) -> str:
    """Tell each synchronising call and loop its place in the text (see ``include/fiber.h``)."""
    from .syntax import (
        Tree,
        callee,
        declarators,
        declared_name,
        function_definitions,
        walk,
    )

    defined_here = {name for name, _ in function_definitions(Tree(p.text.header, body=False))}
    helpers = synchronising_functions(p)
    tree = Tree(text, body=body)
    edits: list[tuple[int, int, str]] = []
    if not tree.has_error:
        for node in walk(tree.block):
            if node.type in ("for_statement", "while_statement", "do_statement"):
                calls = {callee(tree, n) for n in walk(node) if n.type == "call_expression"}
                inner = node.child_by_field_name("body")
                if calls & (SYNC | helpers) and inner is not None:
                    edits.append(
                        (node.start_byte, node.start_byte,
                         "if (::fr::place_mark fr_m(__COUNTER__); true) ")
                    )  # fmt: skip
                    edits.append((inner.start_byte, inner.start_byte, "{ fr_m.tick(); "))
                    edits.append((inner.end_byte, inner.end_byte, " }"))
            elif node.type == "declaration" and tree.text(node).startswith("thread_local"):
                names = [declared_name(d) for d in declarators(node)]
                line = node.start_point[0] + 1
                notes = " ".join(shared_note(line, tree.text(n)) for n in names if n is not None)
                edits.append((node.end_byte, node.end_byte, f" {notes}"))
            elif node.type == "call_expression" and callee(tree, node) in helpers:
                edits.append((node.start_byte, node.start_byte, "(::fr::place_mark(__COUNTER__), "))
                edits.append((node.end_byte, node.end_byte, ")"))
    marked = tree.edited(edits) if edits else text
    own = {name for name in defined_here if name in SYNC}
    return _mark_calls(marked, p.kernel.name, own)


def _mark_calls(text: str, kernel: str, own: set[str]) -> str:
    part = tokens(text, kernel=kernel, where="source")
    solid = [t for t in part if not t.blank]
    for i, token in enumerate(solid):
        if token.text == "thread_local":
            token.text = _STORAGE
        if token.kind != "word" or token.text not in (SYNC | MATRIX_OPS) or token.text in own:
            continue
        if i + 1 < len(solid) and solid[i + 1].text == "(":
            empty = i + 2 < len(solid) and solid[i + 2].text == ")"
            solid[i + 1].text = "(FR_AT_ONLY" if empty else "(FR_AT "
    return join(part)


def synchronising_functions(p: Prepared) -> set[str]:
    """The header's functions that synchronise, directly or through others."""
    from .syntax import Tree, callee, function_definitions, walk

    if not p.text.header_words & SYNC:
        return set()
    tree = Tree(p.text.header, body=False)
    calls: dict[str, set[str]] = {}
    for name, node in function_definitions(tree):
        called = {callee(tree, n) for n in walk(node) if n.type == "call_expression"}
        calls[name] = calls.get(name, set()) | called
    found = {name for name, called in calls.items() if called & SYNC}
    while True:
        more = {name for name, called in calls.items() if called & found} - found
        if not more:
            return found
        found |= more


def without_synchronising_functions(p: Prepared) -> Prepared:
    """The kernel without the header's functions that only fibers can run; nobody calls them."""
    from .syntax import without_functions

    names = synchronising_functions(p)
    if not names:
        return p
    return replace(p, text=replace(p.text, header=without_functions(p.text.header, names)))


# -- split ---------------------------------------------------------------------------------------


def split(p: Prepared, *, simdgroup: bool, rows: bool) -> str:
    """Loops over the lanes of a simdgroup, or of a whole threadgroup.

    Args:
        simdgroup: a unit of work is a simdgroup; the threadgroup must not be larger where the
            body has barriers or threadgroup memory.
        rows: the lanes of a unit differ in x alone.

    Raises:
        NotSplittable: the control flow does not allow it (`ferrule.source.split`).
    """
    from .split import split_body
    from .uniform import LANE_ATTRIBUTES

    text = split_body(p, simdgroup=simdgroup, rows=rows)
    p = without_synchronising_functions(p)
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
    lanes = "32" if simdgroup else "1024"
    head_ = template_head(p.spec) or ""
    full = "template <unsigned FR_FULL" + (", " + head_[len("template <") :] if head_ else ">\n")
    each = "simdgroups" if simdgroup else "threadgroups"
    arguments = template_values(p.spec)[1:] if p.spec.template else ">"
    sep = ", " if p.spec.template else ""
    call = (
        f"  ::fr::split::{each}(fr_l, fr_begin, fr_end, [&](const ::fr::group& fr_g, unsigned "
        "fr_first, unsigned fr_n) {\n"
    )
    if simdgroup:
        call += (
            f"    if (fr_n == 32) fr_kernel<32{sep}{arguments}(fr_g, fr_first, fr_n{{arguments}});\n"
            f"    else fr_kernel<0{sep}{arguments}(fr_g, fr_first, fr_n{{arguments}});\n"
        )
    else:
        call += f"    fr_kernel<0{sep}{arguments}(fr_g, fr_first, fr_n{{arguments}});\n"
    call += "  });\n"
    return _with_entry(
        p,
        "split",
        f"""\
{full}static void fr_kernel(const ::fr::group& fr_g, unsigned fr_first, unsigned fr_count{_comma(params)}{_function_parameters(params)}) {{
  constexpr unsigned FR_N = {lanes}, fr_i = 0;
  const unsigned fr_n = FR_FULL ? FR_FULL : fr_count;
  const metal::uint3 fr_p0 = fr_g.position(fr_first), fr_p = fr_p0;
  (void)fr_i, (void)fr_p;
{positions}{values}{text}}}
""",
        call,
        params,
        units="threadgroups",
    )
