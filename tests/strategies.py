"""Hypothesis strategies and small makers that several test files share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

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


# ---- rules ---------------------------------------------------------------------------------------

NAMES = ("B", "H", "W")
_LEAVES = [*(("name", name) for name in NAMES), ("size", "x"), ("ndim", "x")]
_OF_TWO = ["+", "-", "*", "//", "%", "min", "max", "ceildiv"]
_KINDS = ["leaf", "leaf", "two", "two", "neg", "if", "next_pow2", "bucket"]


@st.composite
def numbers(draw: Any, depth: int = 4) -> Any:
    """The node of an expression of `NAMES`, ``x.size`` and ``x.ndim``."""
    kind = draw(st.sampled_from(_KINDS if depth else ["leaf"]))
    if kind == "leaf":
        literals = st.integers(0, 300) | st.sampled_from([2**31, 2**62, 2**63 - 1])
        return draw(st.sampled_from(_LEAVES) | literals.map(lambda n: ("int", n)))
    inner = numbers(depth - 1)
    if kind in ("neg", "next_pow2"):
        return (kind, draw(inner))
    if kind == "bucket":
        sizes = draw(st.sets(st.integers(0, 300) | st.just(2**40), min_size=1, max_size=4))
        return ("bucket", draw(inner), *(("int", size) for size in sorted(sizes)))
    if kind == "if":
        return ("if", draw(conditions(depth - 1)), draw(inner), draw(inner))
    return (draw(st.sampled_from(_OF_TWO)), draw(inner), draw(inner))


@st.composite
def conditions(draw: Any, depth: int) -> Any:
    """The node of a condition."""
    kinds = ["compare", "compare", "is", "and", "or", "not"]
    kind = draw(st.sampled_from(kinds if depth else kinds[:3]))
    if kind == "is":
        return ("is", "T", draw(st.sampled_from(["float32", "float16", "bool"])))
    if kind == "compare":
        sign = draw(st.sampled_from(["==", "!=", "<", "<=", ">", ">="]))
        return (sign, draw(numbers(min(depth, 1))), draw(numbers(min(depth, 1))))
    if kind == "not":
        return ("not", draw(conditions(depth - 1)))
    return (kind, draw(conditions(depth - 1)), draw(conditions(depth - 1)))


DIMS = ["A", "B", "C", "D"]
LATE = "L"  # a dim that optional inputs alone have


@st.composite
def stars(draw: Any) -> dict[str, tuple[int, ...]]:
    """Sizes of ``*S`` and ``*R``, which broadcast."""
    sizes = draw(st.lists(st.integers(0, 4), max_size=3))
    found = {}
    for name in ("S", "R"):
        some = [draw(st.sampled_from([size, 1])) for size in sizes]
        found[name] = tuple(some[draw(st.integers(0, len(sizes))) :])
    return found


@st.composite
def rules(draw: Any, faults: bool = False) -> str:
    """The text of a rule with inputs that bind all dims, `LATE` among them, and outputs made of
    them.

    With ``faults`` there are numbers among the inputs, which sizes may name, and expressions that
    divide by zero, are negative or overflow for some sizes.
    """
    dtype = st.sampled_from(["T", "U", "float32", "uint8"])
    sides: list[str] = []
    inputs = []
    odd = ["A // B", "C - D", "all.size % A", "B * 2000000000 * C * D"] if faults else []
    number = draw(st.sampled_from(["", "float32", "uint8", "int64", "bool"])) if faults else ""
    counted = ["number", "A + number", "B // number"] if number not in ("", "float32") else []
    odd = [*counted[:2], *odd, *counted[2:]]
    for n in range(draw(st.integers(1, 4))):
        mark = draw(st.sampled_from(["", "", "?", "!"]))
        given = [*DIMS, "2", "7", "A * 2", "max(B, C)", "L + A", *odd[:2]]
        dims = draw(st.lists(st.sampled_from([*given, *[LATE] * 4 * (mark == "?")]), max_size=4))
        if draw(st.booleans()):
            dims.insert(draw(st.integers(0, len(dims))), draw(st.sampled_from(["*S", "*R"])))
        inputs.append(f"x{n}[{', '.join(dims)}]:{draw(dtype)}{mark}")
    if number:
        inputs.append(f"number:{number}")
    inputs += [f"all[{', '.join(DIMS)}, *S]:T", "kind[*R]:U", f"late[A, {LATE}]:U?"]
    draw(st.randoms()).shuffle(inputs)
    sides.append(", ".join(inputs))
    found = []
    for n in range(draw(st.integers(1, 3))):
        sizes = ["A + B * 2", "ceildiv(C, 4)", "all.size", "D if D < 5 else 5", "L", "L // 2 + 1"]
        size = st.sampled_from([*DIMS, *sizes, "2 if T == float16 else A", *odd])
        dims = draw(st.lists(size, max_size=3))
        star = draw(st.sampled_from(["*S", "*R", "*broadcast(S, R)", "*broadcast(R,S)"]))
        dims.insert(draw(st.integers(0, len(dims))), star)
        found.append(f"y{n}[{', '.join(dims)}]: {draw(dtype)}")
    sides.append(", ".join(found))
    wheres = ["", " where A >= 0", " where T in (float32, float16), B < 99"]
    wheres += [" where T == float16 or U not in (float32, bool)", " where L >= 0"]
    if faults:
        wheres += [" where A == 0 or B % A == 0", " where not C // D > 3, all.ndim != 5"]
        wheres += [" where number < 5 or A == number"] * bool(counted)
        wheres += [" where L % 2 == 0 or L > A"]
    return " -> ".join(sides) + draw(st.sampled_from(wheres))
