"""The CUDA C++ text of a kernel: one GPU thread per thread; a threadgroup is a block."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

from ..dtypes import Dtype
from ..spec import Launch, Spec
from . import cuda_body
from . import shared as memory
from .cpp import (
    TAIL,
    Prepared,
    attribute,
    body,
    comma,
    head,
    parameters,
    template_head,
    template_value,
    used_attributes,
)
from .dialect import COLLECTIVES, MATRIX_OPS

# CUDA's limits (CUDA C++ Programming Guide, technical specifications per compute capability).
_MOST_ALONG_X = 2**31 - 1  # blocks along x
_MOST_ALONG_YZ = 65535  # and along y and z
_MOST_DEEP = 64  # threads of a block along z

_BUILTIN = frozenset({"bool", "float", "double"})


class Form(NamedTuple):
    """What of a launch's sizes decides its text; see include/cuda_grid.h.

    Attributes:
        threads: ``"row"``, ``"box"`` or ``"line"``: how blocks hold their threads.
        far: there are more threadgroups along y or z than a CUDA grid may have.
        full: every simdgroup has 32 threads (said only where the body has its operations).
        aligned: threadgroups are a multiple of 32 threads wide, so that the lanes of a simdgroup
            differ in x alone (likewise).
    """

    threads: str = "row"
    far: bool = False
    full: bool = False
    aligned: bool = False


def form_of(p: Prepared, launch: Launch | None) -> Form:
    """The form of a launch; without one, that of a row of threadgroups."""
    return form_for(bool((p.text.source_words | p.text.header_words) & COLLECTIVES), launch)


def form_for(lanes: bool, launch: Launch | None) -> Form:
    """`form_of` for a text of which it is known whether it has operations of a simdgroup."""
    if launch is None:
        return Form()
    grid, threadgroup = launch.grid, launch.threadgroup
    far = max(groups_of(launch)[1:]) > _MOST_ALONG_YZ
    sizes = [{t, g % t or t} if t else {0} for g, t in zip(grid, threadgroup, strict=True)]
    full = lanes and all(x * y * z % 32 == 0 for x, y, z in itertools.product(*sizes))
    aligned = lanes and all(x % 32 == 0 for x in sizes[0]) and grid[0] < 2**31
    if threadgroup[1:] == (1, 1):
        return Form("row", far, full, aligned)
    # In a whole block the hardware numbers threads as Metal does; so it does not where an edge is
    # ragged, but then only operations of a simdgroup can tell.
    whole = all(g % t == 0 for g, t in zip(grid, threadgroup, strict=True))
    box = (whole or not lanes) and threadgroup[2] <= _MOST_DEEP
    return Form("box" if box else "line", far, full, aligned)


def possible_forms(launch: Launch | None) -> tuple[Form, ...]:
    """The forms of a launch while its text is not known."""
    return tuple(form_for(lanes, launch) for lanes in (False, True))


class Dynamic(NamedTuple):
    """Threadgroup memory in the launch's own shared memory (`source.shared`).

    Attributes:
        offsets: where each variable starts; None for a text that tells their sizes.
    """

    offsets: Mapping[int, int] | None


def text(p: Prepared, form: Form, *, masks: bool = True, shared: Dynamic | None = None) -> str:
    """The whole text.

    Args:
        masks: whether operations of a simdgroup are told which lanes come to them.
        shared: where threadgroup memory is not CUDA's own, as it is up to 48 KB.

    The kernel takes the buffers (Python scalars by value), each input's shape and strides where the
    body names them, by value, and at last the grid and threadgroup (`fr::launch` of
    include/cuda_grid.h).
    """
    kernel, spec = p.kernel, p.spec
    source, declared = p.text.source, ""
    if masks and p.text.words & COLLECTIVES:
        from .masks import masked
        from .uniform import Unit

        found = masked(p, Unit(True, form.threads == "row" or form.aligned, form.aligned))
        if found is not None:
            declared, source = f"  {found[0]}\n", found[1]
    if shared is None:
        source = memory.static(source)
    else:
        source = memory.dynamic(p, source, shared.offsets)
        declared += "  extern __shared__ __align__(16) unsigned char fr_shared[];\n"
    params = parameters(spec)
    given: list[str] = []
    passed = ["fr_g", "fr_g.index(fr_p)", "fr_p"]
    for name, one in zip(kernel.input_names, spec.inputs, strict=True):
        ctype = _outside(one.dtype)
        if one.value:
            given.append(f"const {ctype} fr_a_{name}")
            passed.append(f"fr_a_{name}")
            continue
        given.append(f"const {ctype}* __restrict__ fr_a_{name}")
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
        ctype = _outside(dtype)
        ctype = f"fr::metal::atomic<{ctype}>" if kernel.atomic_outputs else ctype
        given.append(f"{ctype}* __restrict__ fr_a_{name}")
        passed.append(f"fr_a_{name}")
    given.append("const __grid_constant__ fr::launch fr_l")
    names = ", ".join(f"{q.type} {q.name}" for q in params)
    values = "".join(f"  {attribute(a)}\n" for a in used_attributes(p))
    said = [form.threads, *(["far"] if form.far else []), *(["full"] if form.full else [])]
    if p.text.words & MATRIX_OPS and "thread_elements" not in p.text.words:
        said.append("tiles")  # nobody sees which lane holds which element
    layout = "".join(f"#define FR_{word.upper()} 1\n" for word in said)
    return f"""\
{layout.rstrip()}
{head(p, "cuda_kernel")}{template_head(spec)}FR_FN void fr_kernel(
    const ::fr::group& fr_g, unsigned fr_i, const ::fr::metal::uint3& fr_p{comma(params)}{names}) {{
  (void)fr_i, (void)fr_p;
{values}{declared}{body(p, source)}}}
{TAIL}
extern "C" __global__ void {cuda_body.kernel_symbol(spec)}({", ".join(given)}) {{
  const fr::group fr_g(fr_l);
  const fr::metal::uint3 fr_p = fr_g.position();
  if (!fr_g.holds(fr_p)) return;
  fr::user::fr_kernel{_qualified_values(spec)}({", ".join(passed)});
}}
"""


def kernel_parameters(spec: Spec) -> list[tuple[str, int]]:
    """The parameters of the CUDA function, in order: what each is, and of which argument.

    Those of `cuda_body.kernel_parameters`, but for shapes and strides, which are as long as the
    input's rank, and at last ``"launch"``, the grid and threadgroup.
    """
    return [*cuda_body.kernel_parameters(spec), ("launch", 0)]


def blocks_of(form: Form, launch: Launch) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Blocks of the CUDA grid and threads of a block, along x, y and z.

    Raises:
        OverflowError: more threadgroups than CUDA can count.
    """
    x, y, z = launch.threadgroup
    block = (x, y, z) if form.threads == "box" else (x * y * z, 1, 1)
    groups = groups_of(launch)
    if not form.far:
        return groups, block
    count = groups[0] * groups[1] * groups[2]
    rows = -(-count // _MOST_ALONG_X)
    if rows > _MOST_ALONG_YZ:
        raise OverflowError(f"{count} threadgroups")
    return (-(-count // rows), rows, 1), block


def groups_of(launch: Launch) -> tuple[int, int, int]:
    """Threadgroups along x, y and z."""
    x, y, z = [-(-g // t) if t else 0 for g, t in zip(launch.grid, launch.threadgroup, strict=True)]
    return x, y, z


def _outside(dtype: Dtype) -> str:
    """A type's name as it reads outside ``namespace fr``."""
    return dtype.metal if dtype.metal in _BUILTIN else f"fr::metal::{dtype.metal}"


def _qualified_values(spec: Spec) -> str:
    """Template arguments as they read outside ``namespace fr``."""
    values = [_outside(v) if isinstance(v, Dtype) else template_value(v) for _, v in spec.template]
    return f"<{', '.join(values)}>" if values else ""
