"""The CUDA C++ text of a kernel: one GPU thread per thread; a threadgroup is a block."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from ...dtypes import Dtype
from ...spec import Launch, Spec
from .. import described, template_value, words
from ..cpp import (
    TAIL,
    Prepared,
    attribute,
    body,
    comma,
    head,
    parameters,
    template_head,
    used_attributes,
)
from ..dialect import COLLECTIVES, MATRIX_OPS, SYNC
from . import shared as memory
from .launch import (
    ALIGNMENT,
    COUNTED,
    EACH,
    ROBUST,
    UNGUARDED,
    Form,
    Needs,
    form_for,
    kernel_parameters,
    kernel_symbol,
)

# The attributes that say nothing of threadgroups.
_GRIDS = words("thread_position_in_grid threads_per_grid")
# Words of bodies that may wait for other threads, and of functions with much to do, in branches.
_UNSUITED = words(
    "while do goto volatile atomic_thread_fence atomic_load_explicit atomic_exchange_explicit "
    "atomic_compare_exchange_weak_explicit acosh asinh atan2 atanh cos cosh cospi erf erfc pow "
    "powr sin sincos sinh sinpi tan tanpi"
)
_LOOP = re.compile(r"\bfor\b")
_COUNTED = re.compile(
    r"\bfor\s*\(\s*\w+\s+(\w+)\s*=\s*0\s*;\s*\1\s*<\s*(\w+)\s*;"
    r"\s*(?:\+\+\s*\1|\1\s*\+\+)\s*\)"
)
_CHANGED = r"(?:\+\+|--|(?<!&)&)\s*{0}\b|\b{0}\s*(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))"
_MOST_WORK, _LITTLE_WORK = 6000, 400  # in characters, each as often as it is repeated

_BUILTIN = words("bool float double")
_ELEMENTS = {"shape": "int", "strides": "fr::int64_t"}


def form_of(p: Prepared, launch: Launch | None, *, asked: bool = False) -> Form:
    """The form of a launch; without one, that of a row of threadgroups.

    Args:
        asked: in threadgroups as they are asked for, whatever the body knows of them.
    """
    needs = needs_of(p)
    return form_for(Needs(needs.lanes) if asked else needs, launch)


def needs_of(p: Prepared) -> Needs:
    """What of the text decides its forms.

    A thread that loads one element waits for memory most of its life. Where a block runs
    several threadgroups, their loads are under way together. That is for short bodies: a longer
    one has enough to do, and one that repeats itself as often as its arguments say may wait for
    another thread.
    """
    words = p.text.words
    if p.prints:  # threads must know who they are
        return Needs(lanes=bool(words & COLLECTIVES))
    if words & COLLECTIVES or "##" in p.text.header + p.text.source:
        return Needs(lanes=True)  # words that macros paste together may be anything
    if words & SYNC or p.shared:
        return Needs()
    blind = set(used_attributes(p)) <= _GRIDS
    header, source = p.text.sizes
    work = source * _repetitions(p)
    if words & _UNSUITED or not work or work + header > _MOST_WORK:
        return Needs(blind=blind)
    sizes = [i.dtype.itemsize for i in p.spec.inputs if i.ndim]
    narrow = max([*sizes, *(d.itemsize for d in p.spec.outputs)], default=4) < 4
    return Needs(blind=blind, each=EACH[1] if narrow and work <= _LITTLE_WORK else EACH[0])


def _repetitions(p: Prepared) -> int:
    """How often loops may repeat a part of the body; 0 where that is not written in numbers."""
    numbers = {name: value for name, value in p.spec.template if type(value) is int}
    loops = _COUNTED.findall(p.text.source)
    if len(loops) != len(_LOOP.findall(p.text.source)) or p.text.header_words & {"for"}:
        return 0
    for name, _ in loops:  # a loop that sets its counter back may wait for another thread
        changes = re.findall(_CHANGED.format(name), p.text.source)
        if len(changes) != 2 * sum(name == other for other, _ in loops):
            return 0
    return math.prod(int(n) if n.isdigit() else numbers.get(n, 0) for _, n in loops)


class Dynamic(NamedTuple):
    """Threadgroup memory in the launch's own shared memory (`source.cuda.shared`).

    Attributes:
        offsets: where each variable starts; None for a text that tells their sizes.
    """

    offsets: Mapping[int, int] | None


def text(
    p: Prepared,
    form: Form,
    *,
    masks: bool = True,
    guards: str = ROBUST,
    shared: Dynamic | None = None,
) -> str:
    """The whole text.

    Args:
        masks: whether operations of a simdgroup are told which lanes come to them.
        guards: what is done about accesses outside of arrays (`source.cuda.bounds`).
        shared: where threadgroup memory is not CUDA's own, as it is up to 48 KB.

    The kernel takes the buffers (Python scalars by value), each input's shape and strides where the
    body names them, by value, and at last the extents of arrays (`fr::extent` of
    include/cuda_bounds.h) and the grid and threadgroup (`fr::launch` of include/cuda_grid.h).
    """
    spec = p.spec
    declared, source = _with_masks(p, form) if masks else ("", p.text.source)
    views, fits, once, guarded, whole = "", "", False, tuple[str, ...](), False
    if guards != UNGUARDED:
        from .bounds import bounded

        checked = bounded(p, source, counted=guards == COUNTED)
        source, views, guarded, fits, once, whole = checked
        declared += f"  {views}\n" if views else ""
    if shared is None:
        source = memory.static(source)
    else:
        source = memory.dynamic(p, source, shared.offsets)
        declared += "  extern __shared__ __align__(16) unsigned char fr_shared[];\n"
    signature = _signature(spec, form)
    passed = [*signature.passed, *(f"fr_e_{name}" for name in guarded)]
    params = parameters(spec)
    names = ", ".join(
        [f"{q.type} {q.name}" for q in params]
        + [f"const ::fr::fr_extent& fr_e_{name}" for name in guarded]
    )
    takes = names + ", const bool fr_inside" if fits else names
    values = "".join(f"  {_declared(a, form)}\n" for a in used_attributes(p))
    first = "  fr::printing_launch() = fr_l;\n" if p.prints else ""
    layout = _layout(p, form)
    if guards == COUNTED:
        first += "  fr::counted::begin();\n"
        layout += f"#define FR_COUNTED 1\n{'#define FR_COUNTED_VALUES 1' if whole else ''}\n"
    return f"""\
{layout.rstrip()}
{head(p, "cuda_kernel")}{template_head(spec)}FR_FN void fr_kernel(
    const ::fr::group& fr_g, unsigned fr_i, const ::fr::metal::uint3& fr_p{comma(params)}{takes}) {{
  (void)fr_i, (void)fr_p;
{values}{declared}{body(p, source)}}}
{_fits_function(spec, fits, names)}{TAIL}
extern "C" __global__ void {kernel_symbol(spec)}({", ".join(signature.parameters)}) {{
{first}{_thread_code(form, _qualified_values(spec), passed, bool(fits), once)}}}
"""


def _layout(p: Prepared, form: Form) -> str:
    """The definitions that tell include/cuda.h the form of the launch."""
    words = ["row" if form.threads == "any" else form.threads]
    words += (word for word in ("far", "full", "whole") if getattr(form, word))
    if p.text.words & MATRIX_OPS and "thread_elements" not in p.text.words:
        words.append("tiles")  # nobody sees which lane holds which element
    return "".join(f"#define FR_{word.upper()} 1\n" for word in words)


class _Signature(NamedTuple):
    """What the ``__global__`` function takes, and what it passes on to the body's function."""

    parameters: list[str]
    passed: list[str]


def _signature(spec: Spec, form: Form) -> _Signature:
    # NVRTC forgets of a pointer with an alignment that nothing else writes there: of inputs, that
    # loads can be moved before stores, which is what several threadgroups in a block are for.
    aligned = form.aligned_arrays and form.each == 1
    declarations: list[str] = []
    passed = ["fr_g", "fr_g.index(fr_p)", "fr_p"]
    for name, input_, parts in described(spec):
        ctype = f"const {_qualified_type(input_.dtype)}"
        if input_.value:
            declarations.append(f"{ctype} fr_a_{name}")
            passed.append(f"fr_a_{name}")
            continue
        declarations.append(f"{ctype}* __restrict__ fr_a_{name}")
        passed.append(_array_address(name, ctype, aligned) if input_.ndim else f"*fr_a_{name}")
        for part in parts:
            if part == "ndim":
                passed.append(str(input_.ndim))
                continue
            values = f"fr::list<{_ELEMENTS[part]}, {input_.ndim}>"
            declarations.append(f"const __grid_constant__ {values} fr_a_{name}_{part}")
            passed.append(f"fr_a_{name}_{part}.values")
    for name, dtype in zip(spec.kernel.output_names, spec.outputs, strict=True):
        ctype = _qualified_type(dtype)
        ctype = f"fr::metal::atomic<{ctype}>" if spec.kernel.atomic_outputs else ctype
        declarations.append(f"{ctype}* __restrict__ fr_a_{name}")
        passed.append(_array_address(name, ctype, form.aligned_arrays))
    arrays = [*spec.kernel.input_names, *spec.kernel.output_names]
    extents = [arrays[i] for kind, i in kernel_parameters(spec) if kind == "extent"]
    declarations += [f"const __grid_constant__ fr::extent fr_e_{name}" for name in extents]
    declarations.append("const __grid_constant__ fr::launch fr_l")
    return _Signature(declarations, passed)


def _with_masks(p: Prepared, form: Form) -> tuple[str, str]:
    """Declarations of masks, and the body in which simd operations are told which lanes come."""
    if p.text.words & COLLECTIVES:
        from ..loops.body import Unit
        from .masks import masked

        result = masked(p, Unit(True, form.threads in ("row", "any") or form.aligned, form.aligned))
        if result is not None:
            return f"  {result[0]}\n", result[1]
    return "", p.text.source


def _fits_function(spec: Spec, condition: str, names: str) -> str:
    """The function that tells for all threads whether some accesses are inside."""
    if not condition:
        return ""
    return (
        f"{template_head(spec)}FR_FN bool fr_fits(const ::fr::launch& fr_l, {names}) {{\n"
        f"  return {condition};\n}}\n"
    )


def _thread_code(form: Form, values: str, passed: list[str], twice: bool, once: bool) -> str:
    """The code of a CUDA thread: of one thread of the grid, or one of each of several threadgroups.

    Args:
        values: the template's, in brackets.
        passed: what the body's function is given.
        twice: the body is told at last whether all accesses are inside that `fr_fits` speaks of.
        once: one thread of a block finds that out for all.
    """
    position = "const fr::metal::uint3 fr_p = fr_g.position();"

    def call(inside: str) -> str:
        arguments = ", ".join([*passed, inside] if twice else passed)
        return f"fr::user::fr_kernel{values}({arguments});"

    condition = f"fr::user::fr_fits{values}({', '.join(['fr_l', *passed[3:]])})"
    evaluated = ""
    if once:
        first = "!(threadIdx.x | threadIdx.y | threadIdx.z)"
        evaluated = f"  const bool fr_all = __syncthreads_or({first} && {condition});\n"
        condition = "fr_all"
    if form.each == 1:
        either = f"if ({condition}) {call('true')}\n  else {call('false')}" if twice else call("")
        return f"""\
{evaluated}  const fr::group fr_g(fr_l);
  {position}
  if (!fr_g.holds(fr_p)) return;
  {either}
"""

    def all_groups(statements: str) -> str:
        return f"""\
    for (unsigned fr_n = 0; fr_n < {form.each}u; ++fr_n) {{
      const fr::group fr_g(fr_l, fr_first + fr_n);
      {position}
      {statements}
    }}
"""

    checked = "if (!fr_g.holds(fr_p)) return;\n      "
    # Without a condition in between, the compiler moves the loads of all to the front.
    return f"""\
{evaluated}  const unsigned fr_first = blockIdx.x * {form.each}u;
  const fr::group fr_last(fr_l, fr_first + {form.each - 1}u);
  if (fr_last.holds(fr_last.position()){f" && {condition}" if twice else ""}) {{
#pragma unroll
{all_groups(call("true"))}  }} else {{
#pragma unroll 1
{all_groups(checked + call("false"))}  }}
"""


def _array_address(name: str, ctype: str, aligned: bool) -> str:
    """The address of an array's elements, and whether the compiler may count on its alignment."""
    if not aligned:
        return f"fr_a_{name}"
    return f"({ctype}*)__builtin_assume_aligned(fr_a_{name}, {ALIGNMENT})"


def _declared(name: str, form: Form) -> str:
    """The declaration of an attribute's variable."""
    if name == "thread_index_in_simdgroup" and form.aligned:
        # Without the threadgroup's number of threads along x and y, which a thread need not know.
        return f"const uint {name} = fr_p.x % 32u;"
    return attribute(name)


def _qualified_type(dtype: Dtype) -> str:
    """A type's name as it reads outside ``namespace fr``."""
    return dtype.metal if dtype.metal in _BUILTIN else f"fr::metal::{dtype.metal}"


def _qualified_values(spec: Spec) -> str:
    """Template arguments as they read outside ``namespace fr``."""
    values = (
        _qualified_type(v) if isinstance(v, Dtype) else template_value(v) for _, v in spec.template
    )
    return f"<{', '.join(values)}>" if spec.template else ""
