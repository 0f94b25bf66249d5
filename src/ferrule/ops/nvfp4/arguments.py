"""What the functions of NVFP4 take, in their users' words: the messages of calls that do not fit.

Ops check each call by their rules, whose names and shapes are those of kernels. Only where a call
was refused are its arguments looked at here, so that others cost nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import ferrule

from ..arrays import FLOATS, dtype_name, library

IDS = ("int32", "int64")
COUNTS = (*IDS, "int8", "int16", "uint8", "uint16", "uint32", "uint64")
_FACTOR = "w_scale_2"  # of one matrix, which may be a number
_DIM = re.compile(r"(?:(\d+) \* )?([A-Za-z]+)(?: / (\d+))?")
_BYTES = ("uint8", "float4_e2m1fn_x2")
_SCALES = {16: ("float8_e4m3fn", "uint8"), 32: ("float8_e8m0fnu", "uint8")}


class Wanted(NamedTuple):
    """An argument as the docstring of its function has it.

    Attributes:
        name: the argument's.
        forms: the shapes that it may have: ``"E, 2 * I, H / 2"``.
        dtypes: those that it may have.
        hint: what to do where it does not fit.
        alike: a letter, which all arguments have that are of one dtype; empty: none.
        optional: whether it may be None.
    """

    name: str
    forms: tuple[str, ...]
    dtypes: tuple[str, ...]
    hint: str
    alike: str = ""
    optional: bool = False

    @property
    def expected(self) -> str:
        shapes = " or ".join(f"[{form}]" for form in self.forms)
        return f"{_either(self.dtypes)} of shape {shapes}"


class Signature(NamedTuple):
    """The arguments of a function.

    Attributes:
        group: how many elements share a scale.
        arguments: those first that say what sizes are.
        multiples: the sizes that are multiples of a group.
        swaps: pairs of names, or of how names begin, that are given in the place of each other.
    """

    group: int
    arguments: tuple[Wanted, ...]
    multiples: tuple[str, ...]
    swaps: tuple[tuple[str, str], ...] = ()


def linear(group: int) -> Signature:
    """What `nvfp4_linear` takes, or `mxfp4_linear`."""
    packed = "Give the packed matrix, two codes a byte, with a row for each output."
    x = "Give rows of K elements, in one of these dtypes: x.to(torch.bfloat16)."
    arguments = [
        Wanted("w_packed", ("N, K / 2",), _BYTES, packed),
        Wanted("w_scale", (f"N, K / {group}",), _SCALES[group], _scale_hint(group)),
        Wanted("x", ("*S, K",), FLOATS, x, "x"),
        Wanted(
            "bias", ("N",), FLOATS, "Give a vector of x's dtype, or None.", "x", True
        ),
    ]  # fmt: skip
    if group == 16:
        hint = "Give one scale, a number or a float32 array, or one for each row."
        arguments.insert(2, Wanted(_FACTOR, ("", "1", "N"), ("float32",), hint))
    return Signature(group, tuple(arguments), ("K",))


def moe(group: int) -> Signature:
    """What `nvfp4_moe` takes, or `mxfp4_moe`."""
    tokens = "Give a row for each token, in one of these dtypes: x.reshape(-1, H)."
    router = "Give what the router's topk returns: weights are its values, ids its indices."
    arguments = (
        *_matrices(group),
        Wanted("hidden_states", ("M, H",), FLOATS, tokens),
        Wanted("topk_ids", ("M, k",), IDS, router),
        Wanted("topk_weights", ("M, k",), (*FLOATS, "float64"), router),
        Wanted(
            "expert_map", ("G",), IDS, "Give the place of each of G experts, -1 of none, or None.",
            optional=True,
        ),
    )  # fmt: skip
    swaps = ("w13_", "w2_"), ("topk_ids", "topk_weights")
    return Signature(group, arguments, ("H", "I"), swaps)


def batched() -> Signature:
    """What `nvfp4_moe_batched` takes."""
    rows = "Give each expert that is here C rows, of which those behind its count may be anything."
    counts = "Give each expert that is here its count, which may be 0."
    arguments = (
        *_matrices(16),
        Wanted("hidden_states", ("E, C, H",), FLOATS, rows),
        Wanted("counts", ("E",), COUNTS, counts),
    )
    return Signature(16, arguments, ("H", "I"), (("w13_", "w2_"),))


def _scale_hint(group: int) -> str:
    return (
        f"Give the scales of {group} elements each, as the checkpoint has them, or their bytes: "
        "scale.view(torch.uint8)."
    )


def _matrices(group: int) -> list[Wanted]:
    """The arguments that are experts' matrices."""
    both = "Give rows of the gate first, then as many for up."
    w2, scale = "Give w2, packed, with a row for each element of a token.", _scale_hint(group)
    found = [
        Wanted("w13_packed", ("E, 2 * I, H / 2", "E, 2, I, H / 2"), _BYTES, both),
        Wanted(
            "w13_scale", (f"E, 2 * I, H / {group}", f"E, 2, I, H / {group}"), _SCALES[group], scale,
            "scale",
        ),
        Wanted("w2_packed", ("E, H, I / 2",), _BYTES, w2),
        Wanted("w2_scale", (f"E, H, I / {group}",), _SCALES[group], scale, "scale"),
    ]  # fmt: skip
    if group == 16:
        each = "Give one for each expert, or one of its gate and one for up."
        found.insert(2, Wanted("w13_scale_2", ("E", "E, 2", "E, 1"), ("float32",), each))
        found.append(Wanted("w2_scale_2", ("E",), ("float32",), "Give one for each expert."))
    return found


SIGNATURES = {
    "nvfp4_linear": linear(16),
    "mxfp4_linear": linear(32),
    "nvfp4_moe": moe(16),
    "mxfp4_moe": moe(32),
    "nvfp4_moe_batched": batched(),
}


def explain(error: Exception, function: str, given: Mapping[str, Any]) -> None:
    """Say why a call failed in the words of its function, if that is for its arguments.

    Raises:
        KernelError, KernelTypeError: an argument does not fit, as `check` says. What the function
            said itself, of a backend or an activation, stays; what `nvfp4_moe` said which does the
            work of ``function`` is raised with this one's name.
    """
    said = str(error)
    if said.startswith(f"[{function}]"):
        return
    if said.startswith("[nvfp4_moe]") and isinstance(error, ferrule.FerruleError):
        raise type(error)(said.replace("[nvfp4_moe]", f"[{function}]", 1)) from None
    if (fault := _fault(function, given)) is not None:
        raise fault from None


def explained(function: str, names: Sequence[str]) -> Callable[..., None]:
    """What `Op.explain` is of a function's op: it says in its words why a call cannot be traced.

    Args:
        function: the function's name.
        names: of the op's inputs, as the function has them.
    """

    def explain_inputs(error: Exception, *inputs: Any) -> None:
        given: dict[str, Any] = dict.fromkeys(w.name for w in SIGNATURES[function].arguments)
        for name, value in zip(names, inputs, strict=True):
            given[name] = value
            # The op has a dim of gate and up, which most give in one with rows.
            if name in ("w13_packed", "w13_scale") and value.ndim == 4 and value.shape[1] == 2:
                given[name] = value.flatten(1, 2)
            elif name == "w13_scale_2" and value.shape[1:] == (1,):
                given[name] = value[:, 0]
        explain(error, function, given)

    return explain_inputs


def check(function: str, given: Mapping[str, Any]) -> None:
    """That the arguments of a call fit.

    Raises:
        KernelError: a shape, dtype, library or device does not: says which.
        KernelTypeError: an argument is no array.
    """
    if (fault := _fault(function, given)) is not None:
        raise fault


def _fault(
    function: str, given: Mapping[str, Any]
) -> ferrule.KernelError | ferrule.KernelTypeError | None:
    signature = SIGNATURES[function]
    there = [
        (wanted, given[wanted.name])
        for wanted in signature.arguments
        if not (wanted.optional and given[wanted.name] is None)
    ]
    for wanted, value in there:
        if not _is_array(value) and not _is_number(wanted, value):
            return ferrule.KernelTypeError(
                f"[{function}] {wanted.name} is a {type(value).__name__}; expected an array of "
                f"NumPy, torch or MLX, {wanted.expected}. {wanted.hint}"
            )
    there = [(wanted, value) for wanted, value in there if hasattr(value, "shape")]
    problem = _place_fault(there) or _dtype_fault(there)
    problem = problem or _shape_fault(signature, there)
    if problem is None:
        return None
    for pair in signature.swaps:
        other = _swapped(there, *pair)
        if _dtype_fault(other) is None and _shape_fault(signature, other) is None:
            first, second = (f"{name}*" if name.endswith("_") else name for name in pair)
            problem = f"{problem.partition('. ')[0]}. {first} and {second} look swapped."
    return ferrule.KernelError(f"[{function}] {problem}")


def _either(words: Sequence[str]) -> str:
    """``"a, b or c"``."""
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape")


def is_number(value: Any) -> bool:
    """Whether a second scale is given as a number, of Python or NumPy."""
    of_numpy = type(value).__module__ == "numpy" and value.ndim == 0
    return type(value) in (int, float) or of_numpy


def _is_number(wanted: Wanted, value: Any) -> bool:
    return wanted.name == _FACTOR and is_number(value)


def _given(wanted: Wanted, value: Any) -> str:
    return f"{wanted.name} is {dtype_name(value)} of shape {tuple(value.shape)}"


def _place_fault(there: Sequence[tuple[Wanted, Any]]) -> str | None:
    """Of an array of another library, or on another device, than most."""
    arrays = [(wanted.name, value) for wanted, value in there if not _is_number(wanted, value)]
    libraries = [library(value).__name__ for _, value in arrays]
    devices = [str(getattr(value, "device", "")) for _, value in arrays]
    for places, of, to in (
        (libraries, "an array of", "arrays of one library. Convert it."),
        (devices, "on", "one device. Move it: .to(device)."),
    ):
        most = max(places, key=places.count)  # Dynamo has no Counter
        for (name, _), place in zip(arrays, places, strict=True):
            if place != most:
                other = arrays[places.index(most)][0]
                return f"{name} is {of} {place}, and {other} {of} {most}; expected {to}"
    return None


def _dtype_fault(there: Iterable[tuple[Wanted, Any]]) -> str | None:
    """Of a dtype that an argument cannot have, or not with another's."""
    same: dict[str, tuple[Wanted, Any]] = {}
    for wanted, value in there:
        if dtype_name(value) not in wanted.dtypes:
            return f"{_given(wanted, value)}; expected {wanted.expected}. {wanted.hint}"
        first, other = same.setdefault(wanted.alike or wanted.name, (wanted, value))
        if dtype_name(other) != dtype_name(value):
            return (
                f"{_given(wanted, value)}, and {first.name} {dtype_name(other)}; expected one "
                f"dtype of both. {wanted.hint}"
            )
    return None


def _shape_fault(signature: Signature, there: Iterable[tuple[Wanted, Any]]) -> str | None:
    """Of a shape that an argument cannot have by those before it."""
    sizes: dict[str, _Size] = {}
    for wanted, value in there:
        shape, by = tuple(value.shape), f"{wanted.name} {tuple(value.shape)}"
        if not any(_fits(form, shape, sizes, by) for form in wanted.forms):
            why = _why(sizes, wanted.forms)
            return f"{_given(wanted, value)}; expected {wanted.expected}{why}. {wanted.hint}"
        for name in signature.multiples:
            if name in sizes and sizes[name].extent % signature.group:
                return (
                    f"{_given(wanted, value)}, so that {name} = {sizes[name].extent}; expected a "
                    f"multiple of {signature.group}, which share a scale. Pad with zeros before "
                    "quantizing."
                )
    return None


class _Size(NamedTuple):
    """What a letter stands for, and the argument that says so, with its shape."""

    extent: int
    by: str


def _why(sizes: Mapping[str, _Size], forms: Iterable[str]) -> str:
    """What is known of the letters in shapes."""
    letters = dict.fromkeys(name for form in forms for _, name, _ in _DIM.findall(form))
    known: dict[str, list[str]] = {}
    for letter in letters:
        if letter in sizes:
            known.setdefault(sizes[letter].by, []).append(f"{letter} = {sizes[letter].extent}")
    words = [f"{', '.join(equations)} by {by}" for by, equations in known.items()]
    return f", where {' and '.join(words)}" if words else ""


def _fits(form: str, shape: tuple[int, ...], sizes: dict[str, _Size], by: str) -> bool:
    """Whether a shape is of this form by the sizes that are known, to which it adds its own."""
    dims = [dim for dim in form.split(", ") if dim]
    if dims[:1] == ["*S"] and len(shape) >= len(dims) - 1:
        dims, shape = dims[1:], shape[len(shape) - len(dims) + 1 :]
    if len(dims) != len(shape):
        return False
    found: dict[str, _Size] = {}
    for dim, extent in zip(dims, shape, strict=True):
        if dim.isdigit():
            if extent != int(dim):
                return False
            continue
        ((times, name, parts),) = _DIM.findall(dim)
        times, parts = int(times or 1), int(parts or 1)
        new = _Size(extent * parts // times, by)
        size = (sizes.get(name) or found.setdefault(name, new)).extent
        if size * times // parts != extent or size * times % parts:
            return False
    sizes.update(found)
    return True


def _swapped(there: Sequence[tuple[Wanted, Any]], first: str, second: str) -> list[Any]:
    """The arguments with those whose names begin so in the place of each other."""
    values = {wanted.name: value for wanted, value in there}

    def other(name: str) -> str:
        for one, two in ((first, second), (second, first)):
            if name.startswith(one):
                return two + name.removeprefix(one)
        return name

    return [(wanted, values.get(other(wanted.name))) for wanted, _ in there]
