"""The parts that every C++ text of a kernel has: header, parameters, attributes, entry.

There is one text for each way of running a kernel, each in a module of its own:

==========  ===================================================================================
``flat``    no thread waits for another: plain loops over the grid, which the compiler
            vectorises
``split``   loops over the threads of a threadgroup, split at the barriers
``fibers``  each thread is a fiber: any control flow
``cuda``    one GPU thread per thread
==========  ===================================================================================

The text includes ``ferrule.h`` and nothing else. User text lives in ``namespace fr::user``, so no C
library name can clash with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

from ..dtypes import Dtype
from ..errors import DialectError
from ..kernel import ATTRIBUTES, Kernel
from ..spec import Spec
from . import ENTRY, PARTS, described, printing, template_value
from . import NotSplittable as NotSplittable
from .dialect import SYNC, THREADGROUP_BARRIERS
from .macros import expand
from .rewrite import WORD, Rewritten, rewrite, with_callers

if TYPE_CHECKING:
    from .syntax import Tree


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
    tallied: frozenset[str] = frozenset()  # outputs that each CPU thread adds up for itself
    folder: str = ""  # where debuggers find the author's texts; ends with a slash
    debug: bool = False  # positions are variables, whether the body names them or not

    @cached_property
    def parameters(self) -> list[Parameter]:
        """The parameters of the kernel function where it is made of loops."""
        return [
            q._replace(type=f"const ::fr::tallied<{_element(q)}>&", argument=f"fr_tally_{q.name}")
            if q.name in self.tallied
            else q
            for q in parameters(self.spec)
        ]

    @property
    def kernel(self) -> Kernel:
        return self.spec.kernel

    @cached_property
    def header(self) -> Tree:
        """The header, parsed once for all who read it."""
        from .syntax import Tree

        return Tree(self.text.header + "\n", body=False)  # a directive ends with its line

    @property
    def scalars(self) -> tuple[str, ...]:
        """The inputs that have no dims."""
        return tuple(name for name, input_, _ in described(self.spec) if input_.ndim == 0)

    @property
    def synchronises(self) -> bool:
        """Whether some thread may wait for another, or is asked which lane it is."""
        words = self.text.source_words
        if words & SYNC or self.shared or "thread_elements" in self.text.words:
            return True
        # Macros and functions of the header may bring a synchronising call along.
        return bool(self.text.header_words & SYNC) and any(
            words & names for names in _synchronising(self)
        )

    @cached_property
    def prints(self) -> bool:
        """Whether something is printed: then threads run as fibers, which know who they are."""
        return printing.prints(f"{self.text.header}\n{self.text.source}", printing.METAL)

    @property
    def shared(self) -> bool:
        """Whether the body declares threadgroup memory."""
        return re.search(r"\bthread_local\b", self.text.source) is not None

    @property
    def fuses_freely(self) -> bool:
        """Whether compilers may fuse products and sums beyond what the text says."""
        return self.kernel.math_mode != "safe" and not self.text.contract_off

    @property
    def barriers(self) -> bool:
        """Whether threads of different simdgroups may meet."""
        return self.shared or bool(self.text.words & THREADGROUP_BARRIERS)

    def expanded(self) -> str:
        """The body with the author's macros expanded.

        Raises:
            NotSplittable: as `macros.expand`.
        """
        return expand(self.text.header, self.text.source, kernel=self.kernel.name)


_OPERATORS = re.compile(r"\*|<<|>>")


def prepare(spec: Spec) -> Prepared:
    """Rewrite a spec's text.

    Raises:
        DialectError: the text uses something that ferrule refuses.
    """
    text = rewrite(spec.kernel)
    _refuse_initialisers(spec, text)
    if text.words & {"struct", "class", "union"} and _VECTOR.search(" ".join(text.words)):
        from .syntax import align_members

        text = _changed(text, align_members)
    if any("?" in code and "<" in code for code in (text.header, text.source)):
        from .syntax import plain_comparisons

        names = {*ATTRIBUTES, *spec.kernel.input_names, *spec.kernel.output_names}
        text = _changed(text, partial(plain_comparisons, variables=names))
    if _class_types(spec, text):
        from .syntax import convert_conditionals

        text = _changed(text, convert_conditionals)
    if _OPERATORS.search(text.header) or _OPERATORS.search(text.source):
        from .arithmetic import write_operators

        text = write_operators(spec, text)
    return Prepared(spec, text)


def _changed(text: Rewritten, change: Callable[..., str]) -> Rewritten:
    """The texts with a change that is made of header and body."""
    header, source = change(text.header, body=False), change(text.source, body=True)
    return replace(text, header=header, source=source)


def _refuse_initialisers(spec: Spec, text: Rewritten) -> None:
    """Threadgroup memory is not initialised: Metal refuses what looks like it."""
    if "thread_local" not in text.source:
        return
    from .syntax import Tree, declarator_shape, declarators, kinds

    tree = Tree(text.source, body=True)
    for node in kinds(tree.block, "declaration"):
        shared = "thread_local" in tree.text(node).split("=")[0]
        for d in declarators(node) if shared else ():
            points = {"pointer_declarator", "reference_declarator"} & {*declarator_shape(d)}
            if d.type == "init_declarator" and not points:
                line = node.start_point[0] + 1
                problem = (
                    "threadgroup memory cannot be initialised where it is declared; let its "
                    "threads write it, then call threadgroup_barrier(mem_flags::mem_threadgroup)."
                )
                raise DialectError.at(spec.kernel.name, "source", line, "threadgroup", problem)


_VECTOR = re.compile(r"\b(?:vec|[a-z]+[234])\b")

# Types that are classes on some compiler, and so convert both ways in a `?:`.
_CLASSES = frozenset({"bfloat16_t", "bfloat", "half", "float16_t"})
_CLASS_WORDS = _CLASSES | {f"{n}{k}" for n in ("bfloat", "half") for k in (2, 3, 4)}


def _class_types(spec: Spec, text: Rewritten) -> bool:
    """Whether a class that converts both ways may stand in a ``?:``."""
    type_names = {i.dtype.metal for i in spec.inputs} | {d.metal for d in spec.outputs}
    type_names |= {v.metal for _, v in spec.template if isinstance(v, Dtype)}
    return bool(_CLASSES & type_names) or bool(_CLASS_WORDS & text.words)


def _element(q: Parameter) -> str:
    """What an atomic output is made of."""
    return q.type.removeprefix("atomic<").removesuffix(">*")


def parameters(spec: Spec) -> list[Parameter]:
    """The kernel function's parameters, inputs with their shape arguments first, then outputs."""
    declared: list[Parameter] = []
    for i, (name, input_, parts) in enumerate(described(spec)):
        ctype = input_.dtype.metal
        pointer = f"static_cast<const {ctype}*>(fr_l->buffers[{i}])"
        if input_.ndim == 0:
            declared.append(Parameter(f"const {ctype}&", name, f"*{pointer}", scalar=True))
        else:
            declared.append(Parameter(f"const {ctype}*", name, pointer))
        for part in parts:
            kind, argument = f"const {PARTS[part]}", f"fr_l->{_TABLES[part]}[{i}]"
            declared.append(Parameter(kind, f"{name}_{part}", argument, scalar=part == "ndim"))
    outputs = zip(spec.kernel.output_names, spec.outputs, strict=True)
    for i, (name, dtype) in enumerate(outputs, len(spec.inputs)):
        ctype = f"atomic<{dtype.metal}>" if spec.kernel.atomic_outputs else dtype.metal
        declared.append(Parameter(f"{ctype}*", name, f"static_cast<{ctype}*>(fr_l->buffers[{i}])"))
    return declared


_TABLES = {"shape": "shapes", "strides": "strides", "ndim": "ndims"}  # of `fr::launch`


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


# What each attribute is, for a thread with index `fr_i` and position `fr_p` in the group `fr_g`.
PER_THREAD: dict[str, str] = {
    "thread_index_in_threadgroup": "fr_i",
    "thread_index_in_simdgroup": "fr_i % 32u",
    "thread_index_in_quadgroup": "fr_i % 4u",
    "simdgroup_index_in_threadgroup": "fr_i / 32u",
    "quadgroup_index_in_threadgroup": "fr_i / 4u",
    "thread_position_in_threadgroup": "fr_p",
    "thread_position_in_grid": "fr_g.origin + fr_p",
}
PER_GROUP: dict[str, str] = {
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
    """The attributes that the body's code names (comments apart), or for a debugger all."""
    return [a for a in ATTRIBUTES if p.debug or a in p.text.words]


def attribute(name: str) -> str:
    """The declaration of an attribute's variable."""
    value = PER_THREAD.get(name) or PER_GROUP.get(name) or _PER_LAUNCH[name]
    return f"const {ATTRIBUTES[name]} {name} = {value};"


def head(p: Prepared, mode: str) -> str:
    """The start of a text: the include, then the user's header in its namespace."""
    prints = f'#define FR_PRINTS "{p.kernel.name}"\n' if p.prints else ""
    return (
        f"// {p.kernel.name}\n"
        f"#define FR_{mode.upper()} 1\n"
        f"{prints}"
        '#include "ferrule.h"\n'
        "namespace fr { namespace user {\n"
        "using namespace metal;\n"
        f'#line 1 "{p.folder}{p.kernel.name}.header"\n'
        f"{p.text.header}\n"
        '#line 1 "ferrule"\n'
    )


TAIL = "} }  // namespace fr::user\n"


def body_line(p: Prepared, line: int) -> str:
    """The directive that says where in the author's source what follows stands."""
    return f'#line {line} "{p.folder}{p.kernel.name}.source"\n'


def body(p: Prepared, text: str) -> str:
    """The author's lines, under their own line numbers."""
    return f'{body_line(p, 1)}{text}\n#line 1 "ferrule"\n'


def function_parameters(parameters_: list[Parameter]) -> str:
    """The parameter list of a kernel function, each name marked as the argument."""

    declarations = (
        f"{q.type}{'' if q.scalar else ' __restrict__'} fr_a_{q.name}" for q in parameters_
    )
    return ", ".join(declarations)


def comma(params: list[Parameter]) -> str:
    """The comma before more parameters, if there are any."""
    return ", " if params else ""


ROW_ADDITION = "::fr::split::atomic_add("  # atomic additions to neighbouring elements


_SHARED_TABLE = """\
FR_EXPORT unsigned fr_shared(unsigned* fr_at, unsigned fr_room) {
  return ::fr::shared_memory(fr_at, fr_room);
}
"""


def with_entry(
    p: Prepared, mode: str, function: str, call: str, params: list[Parameter], units: str
) -> str:
    """A whole text for the CPU: head, function, and the entry that the runtime calls."""
    arguments = "".join(f", {parameter.argument}" for parameter in params)
    call = call.replace("{values}", template_values(p.spec)).replace("{arguments}", arguments)
    tallies = ""
    if any(q.argument.startswith("fr_tally_") for q in params):
        for i, name in enumerate(p.kernel.output_names, len(p.spec.inputs)):
            if name in p.tallied:
                kind = next(_element(q) for q in parameters(p.spec) if q.name == name)
                tallies += f"  ::fr::tally<{kind}> fr_tally_{name}(fr_l->buffers[{i}]);\n"
    return (
        f"{head(p, mode)}{function}"
        f"FR_EXPORT void {ENTRY}(const ::fr::launch* fr_l, uint64_t fr_begin, uint64_t fr_end, "
        f"::fr::worker* fr_w) {{\n  (void)fr_w;\n{tallies}{call}}}\n"
        f'FR_EXPORT const char fr_units[] = "{units}";\n'
        "FR_EXPORT const char fr_alone = ::fr::detail::alone ? '1' : '0';\n"
        f"{_SHARED_TABLE if mode in ('split', 'fibers') else ''}"
        f"{TAIL}"
    )


def shared_note(line: int, name: str) -> str:
    """Records how large a threadgroup variable is, in a section that the device reads."""
    return f"FR_SHARED({line}, {name});"


def synchronising_functions(p: Prepared) -> set[str]:
    """The header's functions that synchronise, directly or through others."""
    return _synchronising(p)[0]


def _synchronising(p: Prepared) -> tuple[set[str], set[str]]:
    """The header's functions (and structs with operators) and macros that synchronise."""
    from .syntax import called, enclosing_struct, function_definitions

    calls = {name: set(WORD.findall(text)) for name, text in p.text.macros.items()}
    macros, functions = set(calls), set[str]()
    if p.text.header_words & SYNC:
        tree, definitions = p.header, function_definitions(p.header)
        operators = {enclosing_struct(tree, n) for name, n in definitions if "operator" in name}
        functions = {name for name, _ in definitions} | operators
        visible = SYNC | macros | operators  # their names say it, whatever stands around
        for name, node in definitions:
            words = {re.split(r"\.|->", c)[-1] for c in called(tree, node)}
            words |= visible & set(WORD.findall(tree.text(node)))
            for user in {name, enclosing_struct(tree, node)} if "operator" in name else {name}:
                calls[user] = calls.get(user, set()) | words
    synchronising = with_callers({name for name, words in calls.items() if words & SYNC}, calls)
    return synchronising & functions, synchronising & macros


def without_synchronising_functions(p: Prepared) -> Prepared:
    """The kernel without the header's functions that only fibers can run; nobody calls them."""
    from .syntax import without_functions

    names = synchronising_functions(p)
    if not names:
        return p
    return replace(p, text=replace(p.text, header=without_functions(p.text.header, names)))
