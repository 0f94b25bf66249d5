"""A launch on CUDA, apart from its text: its form, its blocks, and its arguments.

A kernel that is in the cache is launched with this alone, so it must be quick to import; to make a
NamedTuple takes 0.3 ms.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from ...spec import Launch, Spec
from .. import described

# CUDA's limits (CUDA C++ Programming Guide, technical specifications per compute capability).
_MOST_ALONG_X = 2**31 - 1  # blocks along x
_MOST_ALONG_YZ = 65535  # and along y and z
_MOST_DEEP = 64  # threads of a block along z

ALIGNMENT = 16  # bytes; what a thread can read or write at once
# What is done about accesses outside of arrays (`bounds`): nothing; they do no harm; they are
# counted as well.
UNGUARDED, ROBUST, COUNTED = "unguarded", "robust", "counted"
_BLOCK = 256  # threads of a block where that is free
# Threadgroups that a block may run: for elements of 32 bits or more, and for narrower ones.
EACH = (4, 8)
# What keeps a large GPU busy: two blocks on each multiprocessor.
_BUSY = 2 * 132 * _BLOCK


class Form(NamedTuple):
    """What of a launch's sizes decides its text, and its blocks; see include/cuda_grid.h.

    Attributes:
        threads: how blocks hold threads: ``"row"``, ``"box"`` or ``"line"``; ``"any"`` is a row
            whose length is free, because the body cannot tell.
        far: there are more threadgroups along y or z than a CUDA grid may have.
        full: every simdgroup has 32 threads (said only where the body has its operations).
        aligned: threadgroups are a multiple of 32 threads wide, so that the lanes of a simdgroup
            differ in x alone (likewise).
        whole: the grid is full of whole threadgroups, so that no thread of a block is outside it
            (said only of full ones).
        each: threadgroups that a block runs, neighbours along x.
        aligned_arrays: arrays begin at a multiple of `ALIGNMENT`, so that neighbouring elements can
            be read and written together.
    """

    threads: str = "row"
    far: bool = False
    full: bool = False
    aligned: bool = False
    whole: bool = False
    each: int = 1
    aligned_arrays: bool = True


class Needs:
    """What of a text decides its forms.

    Attributes:
        lanes: it has operations of a simdgroup.
        blind: its threads do not meet, and know of their place in the grid alone.
        each: threadgroups that a block had best run if there are many.
    """

    def __init__(self, lanes: bool = False, blind: bool = False, each: int = 1) -> None:
        self.lanes, self.blind, self.each = lanes, blind, each


# What a text may need; one threadgroup a block, always, comes first.
_SINGLE = (Needs(lanes=True), Needs(), Needs(blind=True))
_POSSIBLE = (*_SINGLE, *(Needs(False, blind, each) for blind in (False, True) for each in EACH))


def form_for(needs: Needs, launch: Launch | None) -> Form:
    """The form of a launch; without one, that of a row of threadgroups."""
    if launch is None:
        return Form()
    lanes = needs.lanes
    far = max(groups_of(launch)[1:]) > _MOST_ALONG_YZ
    grid, threadgroup = launch.grid, launch.threadgroup
    sizes = [{t, g % t or t} if t else {0} for g, t in zip(grid, threadgroup, strict=True)]
    full = lanes and all(x * y * z % 32 == 0 for x, y, z in itertools.product(*sizes))
    aligned = lanes and all(x % 32 == 0 for x in sizes[0]) and grid[0] < 2**31
    even = all(len(along) == 1 for along in sizes)
    if threadgroup[1:] == (1, 1):
        threads = "any" if needs.blind and grid[0] < 2**31 else "row"
    else:
        # In a whole block the hardware numbers threads as Metal does; so it does not where an edge
        # is ragged, but then only operations of a simdgroup can tell.
        threads = "box" if (even or not lanes) and threadgroup[2] <= _MOST_DEEP else "line"
    form = Form(threads, far, full, aligned, full and even, 1, launch.aligned)
    if far or threads == "line" or not many(dealt(form, launch), needs.each):
        return form
    return form._replace(each=needs.each)


def many(launch: Launch, each: int) -> bool:
    """Whether a launch keeps a GPU busy with so many threadgroups in each block."""
    x, y, z = launch.grid
    groups = groups_of(launch)[0]
    return (
        x * y * z >= each * _BUSY
        and (groups % each == 0 or groups >= 8 * each)  # else blocks at the edge have little to do
        and x < 2**31  # no position overflows
    )


def dealt(form: Form, launch: Launch) -> Launch:
    """The launch as CUDA runs it: in threadgroups of our choice where the body is blind."""
    if form.threads != "any":
        return launch
    return launch._replace(threadgroup=(min(_BLOCK, -(-launch.grid[0] // 32) * 32), 1, 1))


def possible_forms(launch: Launch | None, *, plain: bool = False) -> tuple[Form, ...]:
    """The forms of a launch while its text is not known.

    Args:
        plain: those that serve launches of any size and arrays of any alignment (`plain_form`).
    """
    forms = tuple(form_for(needs, launch) for needs in (_SINGLE if plain else _POSSIBLE))
    return tuple(map(plain_form, forms)) if plain else forms


def plain_form(form: Form) -> Form:
    """A form with one threadgroup a block and arrays that may begin anywhere."""
    return form._replace(each=1, aligned_arrays=False)


def most_registers(launch: Launch | None) -> int:
    """How many registers a thread may have, so that a threadgroup fits; 0 leaves it open.

    A multiprocessor has 65,536, and a thread at most 255.
    """
    x, y, z = launch.threadgroup if launch is not None else (1, 1, 1)
    threads = x * y * z
    return 0 if threads <= 256 else 128 if threads <= 512 else 64


def blocks_of(form: Form, launch: Launch) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Blocks of the CUDA grid and threads of a block, along x, y and z.

    Raises:
        OverflowError: more threadgroups than CUDA can count.
    """
    launch = dealt(form, launch)
    x, y, z = launch.threadgroup
    block = (x, y, z) if form.threads == "box" else (x * y * z, 1, 1)
    groups = groups_of(launch)
    if not form.far:
        return (-(-groups[0] // form.each), *groups[1:]), block
    count = groups[0] * groups[1] * groups[2]
    rows = -(-count // _MOST_ALONG_X)
    if rows > _MOST_ALONG_YZ:
        raise OverflowError(f"{count} threadgroups")
    return (-(-count // rows), rows, 1), block


def groups_of(launch: Launch) -> tuple[int, int, int]:
    """Threadgroups along x, y and z."""
    x, y, z = [-(-g // t) if t else 0 for g, t in zip(launch.grid, launch.threadgroup, strict=True)]
    return x, y, z


def kernel_symbol(spec: Spec) -> str:
    """The name of the CUDA function."""
    return f"ferrule_{spec.kernel.name}"


def kernel_parameters(spec: Spec) -> list[tuple[str, int]]:
    """What a launch passes, in order: pairs of a kind and the index of an input or output.

    ``"input"`` is a pointer; ``"value"`` the element of a Python scalar; ``"shape"`` int32 and
    ``"strides"`` int64, in elements, both by value; ``"output"`` a pointer. Shapes and strides are
    as long as the input's rank; for a body that is CUDA they are 10 long, with zeros beyond it.

    A Metal body gets, at last, an ``"extent"`` for each array with dims and each output (which
    elements there are, `fr::extent` of include/cuda_bounds.h; outputs are counted on behind the
    inputs), and ``"launch"``, the grid and threadgroup.
    """
    parameters: list[tuple[str, int]] = []
    for i, (_, input_, parts) in enumerate(described(spec)):
        parameters.append(("value" if input_.value else "input", i))
        parameters += [(part, i) for part in parts if part != "ndim"]
    parameters += [("output", i) for i in range(len(spec.outputs))]
    if spec.kernel.language == "cuda":
        return parameters
    count = len(spec.inputs)
    arrays = [i for i, input_ in enumerate(spec.inputs) if input_.ndim and not input_.value]
    arrays += range(count, count + len(spec.outputs))
    return [*parameters, *(("extent", i) for i in arrays), ("launch", 0)]
