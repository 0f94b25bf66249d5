"""Hypothesis strategies and small makers that several test files share."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import strategies as st

from ferrule import dtypes
from ferrule.dtypes import Dtype
from ferrule.kernel import ATTRIBUTES, KEYWORDS, Kernel
from ferrule.spec import SMALL, Input, Shape, Spec, TemplateValue

LEVEL0: tuple[Dtype, ...] = tuple(d for d in dtypes.ALL if d.level0)
IN_MLX: tuple[Dtype, ...] = tuple(d for d in dtypes.ALL if d not in dtypes.FLOAT8)

# What a body may put after the name of an input.
_SUFFIXES = ("_shape", "_strides", "_ndim", "")


def make_spec(
    kernel: Kernel,
    inputs: Sequence[tuple[Dtype, Shape]] = (),
    outputs: Sequence[Dtype] = (dtypes.float32,),
    template: Sequence[tuple[str, TemplateValue]] = (),
) -> Spec:
    """The `Spec` of a call with inputs of these dtypes and shapes."""
    return Spec(
        kernel=kernel,
        inputs=tuple(Input(d, len(s), math.prod(s) < SMALL) for d, s in inputs),
        outputs=tuple(outputs),
        template=tuple(template),
    )


def level0_dtypes() -> st.SearchStrategy[Dtype]:
    """The dtypes that arrays of a `metal_kernel` call may have."""
    return st.sampled_from(LEVEL0)


def shapes(max_ndim: int = 5) -> st.SearchStrategy[Shape]:
    """Shapes of rank 0 to ``max_ndim``: empty, about `SMALL` elements, and some more."""

    def around_small(size: int, at: int, ndim: int) -> Shape:
        return tuple(size if axis == at % ndim else 1 for axis in range(ndim))

    free = st.lists(st.integers(0, 4), max_size=max_ndim).map(tuple)
    small = st.builds(
        around_small,
        st.integers(SMALL - 1, SMALL + 1),
        st.integers(0, max_ndim),
        st.integers(1, max_ndim),
    )
    cubes = st.sampled_from([(2, 4), (4, 2), (2, 2, 2), (7, 1), (0, 9), (3, 3)])
    return free | small | cubes


# Names that contain one another, or look like what the signature adds for another name.
_CLOSE_NAMES = [
    "a", "b", "ab", "a_", "my_a", "a_shape", "a_ndim", "b_strides", "inp", "inp1", "inp_a", "_a",
    "grid", "grid_size", "x", "xx", "x_x",
]  # fmt: skip


def identifiers() -> st.SearchStrategy[str]:
    """Names of arguments, often close to one another."""
    free = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
    return st.sampled_from(_CLOSE_NAMES) | free.filter(lambda n: n not in KEYWORDS)


def template_values() -> st.SearchStrategy[TemplateValue]:
    """Integers of 32 bits, bools and dtypes of MLX."""
    edges = st.sampled_from([-(2**31), 2**31 - 1, -1, 0, 1])
    return edges | st.integers(-(2**31), 2**31 - 1) | st.booleans() | st.sampled_from(IN_MLX)


def texts(names: Sequence[str]) -> st.SearchStrategy[str]:
    """Text that may mention thread attributes and what a body may ask of ``names``."""
    attribute = st.sampled_from(sorted(ATTRIBUTES))
    mention = st.sampled_from([f"{n}{s}" for n in names for s in _SUFFIXES] or ["nothing"])
    word = attribute | mention
    free = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
    line = st.one_of(
        word,
        word.map("int i = {}.x;".format),
        word.map("// {}".format),
        word.map("other_{}_1".format),
        word.map(lambda w: w[:-1]),
        free,
    )
    return st.lists(line, max_size=6).flatmap(
        lambda lines: st.sampled_from(["\n", "\r\n", " ", ""]).map(lambda sep: sep.join(lines))
    )
