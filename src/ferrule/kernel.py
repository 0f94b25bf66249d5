"""What a person wrote: a kernel's text, names and flags, checked once.

A `Kernel` knows no device and no array type. `ferrule.kernels.call` turns one and some arrays into
a `ferrule.spec.Spec` and a launch.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import KernelError, KernelTypeError

MATH_MODES = ("safe", "relaxed", "fast")

# The 20 attributes of the Metal Shading Language's Table 5.8 that MLX passes, in MLX's order.
ATTRIBUTES: dict[str, str] = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}

# Words that C++ or Metal reserve: an argument cannot have one as its name.
_KEYWORDS = """
    alignas alignof and and_eq asm auto bitand bitor bool break case catch char class compl
    const const_cast constant constexpr continue decltype default delete device do double
    dynamic_cast else enum explicit export extern false float for friend goto half if inline int
    long mutable namespace new noexcept not not_eq nullptr operator or or_eq private protected
    public register reinterpret_cast return short signed sizeof static static_assert static_cast
    struct switch template this thread thread_local threadgroup throw true try typedef typeid
    typename uint union unsigned using virtual void volatile wchar_t while xor xor_eq
"""
KEYWORDS = frozenset(_KEYWORDS.split())
_METAL_KEYWORDS = frozenset({"constant", "device", "thread", "threadgroup"})  # not of C++

_KERNEL_NAME = re.compile(r"[A-Za-z0-9_]{1,256}")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
# Atomics in memory that threads of all threadgroups share, however it is cast to them.
_ATOMICS = re.compile(
    r"\bdevice\b[\w\s:]*\batomic|\batomic(_\w+|\s*<[^<>]*>)\s+((const|volatile)\s+)*device\b"
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_WAIT = r"griddepcontrol\s*\.\s*wait|GridDependencySynchronize|GRID_DEPENDENCY_SYNC"
_COMMENT_OR_WAIT = re.compile(rf"{_COMMENT.pattern}|({_WAIT})", re.DOTALL)
MAX_SOURCE = 4 << 20  # characters; larger text is a mistake, not a kernel


@dataclass(frozen=True)
class Kernel:
    """A kernel body with its names and flags: frozen, hashable, the same for every device.

    Attributes:
        name: the kernel's name, letters, digits and underscores.
        input_names, output_names: the arguments, in order.
        source: the body, without a signature.
        header: text placed before the kernel: helper functions, structs, constants, includes.
        ensure_row_contiguous: copy inputs that are not row-contiguous before the launch.
        atomic_outputs: every output is a ``device atomic<T>*``.
        math_mode: ``"safe"``, ``"relaxed"`` or ``"fast"``.
        portable: refuse what runs here but Apple's compiler or GPU would not take.
        language: what the text is written in: ``"metal"`` or ``"cuda"``.
        shared_memory: bytes of dynamic shared memory per block; for CUDA alone.
        values: the inputs that a CUDA body has as values, where they are numbers: ``eps`` instead
            of ``eps[0]``.
        pdl: it may begin before the kernel ahead of it has ended, for which it waits itself; for
            CUDA alone.
    """

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    source: str
    header: str = ""
    ensure_row_contiguous: bool = True
    atomic_outputs: bool = False
    math_mode: str = "safe"
    portable: bool = False
    language: str = "metal"
    shared_memory: int = 0
    values: tuple[str, ...] = ()
    pdl: bool = False

    def __hash__(self) -> int:
        # Strings remember their hash; the names and the body tell kernels apart well enough.
        return hash((self.name, self.source, self.input_names))

    @property
    def tag(self) -> str:
        """What messages about this kernel begin with: ``"[metal_kernel]"``."""
        return _tag(self.language)

    @property
    def atomic(self) -> bool:
        """Whether it adds up, or such, in an order that threads decide, as its text tells."""
        text = _COMMENT.sub(" ", f"{self.header}\n{self.source}")
        if self.language == "cuda":
            return self.atomic_outputs or "atomic" in text
        return self.atomic_outputs or _ATOMICS.search(text) is not None

    @property
    def attributes(self) -> tuple[str, ...]:
        """The thread attributes that the body names; MLX searches the text, comments included."""
        if self.language == "cuda":
            return ()
        return tuple(a for a in ATTRIBUTES if a in self.source)

    def wants(self, input_name: str) -> tuple[bool, bool, bool]:
        """Whether the body names the input's ``_shape``, ``_strides`` and ``_ndim``."""
        return (
            f"{input_name}_shape" in self.source,
            f"{input_name}_strides" in self.source,
            f"{input_name}_ndim" in self.source,
        )


def _tag(language: str) -> str:
    return f"[{language}_kernel]"


def _label(language: str, argument: str, kernel: str) -> str:
    """How messages call an argument of `make_kernel`."""
    return f"{_tag(language)} {argument} of kernel {kernel!r}"


def check_identifier(label: str, name: object, kernel: str, language: str = "metal") -> str:
    """``name`` if it can name an argument of a kernel, else a `KernelError`."""
    return check_name(_label(language, label, kernel), name, language)


def check_name(label: str, name: object, language: str) -> str:
    """``name`` if it is an identifier and no reserved word, else a `KernelError`."""
    if not isinstance(name, str):
        raise KernelTypeError(
            f"{label}: got {name!r} of type {type(name).__name__}, expected a str."
        )
    if not _IDENTIFIER.fullmatch(name):
        shown = name if len(name) <= 60 else name[:57] + "..."
        raise KernelError(
            f"{label}: {shown!r} is not an identifier; expected a letter or underscore, then "
            "letters, digits or underscores (256 at most)."
        )
    if name in KEYWORDS and not (language == "cuda" and name in _METAL_KEYWORDS):
        raise KernelError(
            f"{label}: {name!r} is a reserved word of C++ or "
            f"{'CUDA' if language == 'cuda' else 'Metal'}; choose another name."
        )
    return name


def _names(field: str, names: object, kernel: str, language: str) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise KernelTypeError(
            f"{_label(language, f'`{field}`', kernel)}: got {names!r}, expected a sequence of str, "
            'such as ["inp"].'
        )
    return tuple(check_identifier(f"`{field}`", n, kernel, language) for n in names)


def check_text(field: str, text: object, kernel: str, language: str) -> str:
    """``text`` if it can be compiled, else a `KernelError` or `KernelTypeError`."""
    label = _label(language, f"`{field}`", kernel)
    if not isinstance(text, str):
        raise KernelTypeError(f"{label}: got {type(text).__name__}, expected a str.")
    if len(text) > MAX_SOURCE:
        raise KernelError(f"{label} has {len(text)} characters; at most {MAX_SOURCE} are allowed.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        line = text.count("\n", 0, error.start) + 1
        raise KernelTypeError(
            f"{label} has half of a surrogate pair in line {line}, which is no character; read the "
            "text with the encoding that it has."
        ) from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise KernelError(f"{label} has a NUL character in line {line}.")
    return text


def check_pdl(label: str, pdl: object, *texts: str) -> bool:
    """``pdl`` if it is False, or these texts of a kernel wait for the one ahead.

    Raises:
        KernelError, KernelTypeError: it is no bool, or they never wait; says how to.
    """
    if not isinstance(pdl, bool):
        raise KernelTypeError(f"{label}: got {pdl!r}, expected a bool.")
    if pdl and not any(m[1] for text in texts for m in _COMMENT_OR_WAIT.finditer(text)):
        raise KernelError(
            f"{label}: with it a kernel begins while the one ahead still runs, and the text never "
            "waits for that; call cudaGridDependencySynchronize() (or asm griddepcontrol.wait) in "
            "all threads, before they read or write what another kernel does."
        )
    return pdl


def _math_mode(options: object) -> str:
    if options is None:
        return "safe"
    if not isinstance(options, Mapping):
        raise KernelError(
            f"[metal_kernel] `compile_options`: got {options!r}, expected a dict such as "
            '{"math_mode": "fast"}.'
        )
    for key in options:
        if key != "math_mode":
            raise KernelError(
                f"[metal_kernel] `compile_options` has the unknown key {key!r}; the only one is "
                '"math_mode".'
            )
    mode: Any = options.get("math_mode", "safe")
    if mode not in MATH_MODES:
        raise KernelError(
            f'[metal_kernel] `compile_options["math_mode"]`: got {mode!r}, expected one of '
            f"{', '.join(map(repr, MATH_MODES))}."
        )
    return str(mode)


def _shared_memory(size: object, kernel: str, language: str) -> int:
    label = _label(language, "`shared_memory`", kernel)
    expected = "a number of bytes, from 0 to 2147483647"
    try:
        count = None if isinstance(size, bool) else operator.index(size)  # type: ignore[arg-type]
    except TypeError:
        count = None
    if count is None:
        raise KernelTypeError(
            f"{label}: got {size!r} of type {type(size).__name__}, expected {expected}."
        )
    if not 0 <= count < 1 << 31:
        raise KernelError(f"{label}: got {count}, expected {expected}.")
    return count


def check_distinct(kernel: str, names: Sequence[str], language: str = "metal") -> None:
    """Refuse a name that two arguments share."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise KernelError(
                f"{_tag(language)} kernel {kernel!r} has two arguments called {name!r}; the names "
                "of inputs, outputs and template parameters must differ."
            )
        seen.add(name)


def check_not_given(kernel: Kernel, names: Sequence[str]) -> None:
    """Refuse names that the body already has from elsewhere, which no compiler would accept."""
    attributes = kernel.attributes
    described = {
        f"{input_name}_{part}": (input_name, part)
        for input_name in kernel.input_names
        for wanted, part in zip(kernel.wants(input_name), ("shape", "strides", "ndim"), strict=True)
        if wanted
    }
    for name in names:
        if name in attributes:
            raise KernelError(
                f"{kernel.tag} kernel {kernel.name!r} has an argument called {name!r}, and its "
                "body names the thread attribute of that name; rename the argument."
            )
        if name in described:
            input_name, part = described[name]
            raise KernelError(
                f"{kernel.tag} kernel {kernel.name!r} has an argument called {name!r}, which is "
                f"also the {part} of its input {input_name!r}; rename one of them."
            )


def make_kernel(
    name: object,
    input_names: object,
    output_names: object,
    source: object,
    header: object = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: object = None,
    portable: bool = False,
    language: str = "metal",
    shared_memory: object = 0,
) -> Kernel:
    """A checked `Kernel`.

    Raises:
        KernelError: a name is no identifier, is reserved, is used twice, or is what the body has
            from elsewhere (a thread attribute, an input's shape); no outputs; an unknown compile
            option; a text that is too long or has a NUL; a size of shared memory below zero.
        KernelTypeError: an argument of a wrong type, a text with what is no character.
    """
    tag = _tag(language)
    if not isinstance(name, str):
        raise KernelTypeError(f"{tag} `name`: got {name!r}, expected a str.")
    if not _KERNEL_NAME.fullmatch(name):
        shown = name if len(name) <= 60 else name[:57] + "..."
        raise KernelError(
            f"{tag} `name`: {shown!r} cannot name a kernel; expected letters, digits and "
            "underscores (256 at most)."
        )
    inputs = _names("input_names", input_names, name, language)
    outputs = _names("output_names", output_names, name, language)
    if not outputs:
        raise KernelError(f"{tag} Must specify at least one output.")
    check_distinct(name, inputs + outputs, language)
    for flag, value in (
        ("ensure_row_contiguous", ensure_row_contiguous),
        ("atomic_outputs", atomic_outputs),
        ("portable", portable),
    ):
        if not isinstance(value, bool):
            raise KernelTypeError(
                f"{_label(language, f'`{flag}`', name)}: got {value!r}, expected a bool."
            )
    kernel = Kernel(
        name=name,
        input_names=inputs,
        output_names=outputs,
        source=check_text("source", source, name, language),
        header=check_text("header", header, name, language),
        ensure_row_contiguous=ensure_row_contiguous,
        atomic_outputs=atomic_outputs,
        math_mode=_math_mode(compile_options),
        portable=portable,
        language=language,
        shared_memory=_shared_memory(shared_memory, name, language),
    )
    check_not_given(kernel, inputs + outputs)
    return kernel
