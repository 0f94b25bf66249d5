"""From a kernel to a library whose every access is watched."""

from __future__ import annotations

import re
from collections.abc import Sequence
from ctypes import CDLL
from functools import cached_property, lru_cache
from pathlib import Path

from ... import cache
from ...devices import portability
from ...devices.cpu.program import device
from ...devices.diagnostics import compile_error, refused
from ...devices.digests import INCLUDE, header_digest
from ...errors import CompilerFailed
from ...source import ENTRY, cpp, fibers
from ...source.cuda import on_cpu, unit
from ...source.private_memory import is_pointed_to
from ...spec import Spec
from ...tools import loader, toolchain
from ...unit import UnitSpec
from .lines import Lines, Place, place_of

SCHEMA = "1"  # raised when the same text, flags and compiler would be watched differently

# Accesses stay where the author wrote them: neither moved into a branch nor left out, and floats
# are computed when the text says so, since an instruction that makes a NaN is looked at.
_FLAGS = (
    "-O1", "-g1", "-fno-math-errno", "-ftrapping-math", "-fno-strict-aliasing", "-fsigned-char",
    "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden", "-fno-stack-protector",
    "-fno-omit-frame-pointer", "-DFR_CHECKED=1", "-Wuninitialized",
    "-fsanitize=thread", "-fsanitize-recover=all",
)  # fmt: skip
# Of a variable that it looks at, the compiler takes the address: then each access of it is told.
_BEHIND_POINTERS = "-fsanitize=object-size"
_ARITHMETIC = "-fsanitize=bounds,signed-integer-overflow,shift,integer-divide-by-zero"
# A vector can be misaligned where a pointer is cast; to look at each pointer takes g++ much longer.
_POINTER_CAST = re.compile(r"\*\s*(?:const\s*)?(?:__restrict__\s*)?[>)]")
# Where they look at its arithmetic, g++ 12 and 13 evaluate the index of `(c ? a : b)[i]` in one of
# the two branches alone, and take anything for it in the other.
_CHOSEN_ARRAY = re.compile(r"\?[^;{}]*:[^;{}]*\)\s*\[")
_STRICT = "-fsanitize=bounds-strict"  # g++ alone: of arrays at the end of structs, too
# The last: arrays larger than a stack must not reach what lies below its guard page.
_GCC = ("-fno-tree-sink", "-fno-tree-dse", "-fno-if-conversion", "-fno-ssa-phiopt",
        "-fstack-clash-protection")  # fmt: skip
# Quoted includes alone: <math.h> is the C library's.
_FOR_CUDA = ("-iquote", str(INCLUDE), "-ffp-contract=off")
_RUNTIME_FLAGS = (
    "-O2",
    "-fno-omit-frame-pointer",
    "-fno-exceptions",
    "-fno-rtti",
    "-fvisibility=hidden",
    "-w",
)
_FOLDER = Path(__file__).resolve().parent / "watch"
_UNSET = re.compile(r"^(\S+):(\d+):(\d+): warning: (.*) \[-Wuninitialized\]$", re.MULTILINE)


class Instrumented:
    """A kernel that is loaded for checking.

    Attributes:
        library: exports the entry, and what watch/watch.cpp does.
        entry: the name of what runs threadgroups.
        notes: what is not watched, as remarks.
        texts: body and header as they were compiled, whose columns the compiler names.
        unset: where a local variable is read that was never set, and the compiler's words.
    """

    def __init__(self, name: str, payload: bytes, log: str, text: str, entry: str = ENTRY) -> None:
        self.library, self.entry = loader.load_library(payload, f"{name}.checked"), entry
        self._payload, self._copies = payload, [self.library]
        self.notes = [
            f"kernel {name!r}: threadgroup memory is not watched; its declarations are not "
            "understood."
        ] * (fibers.UNWATCHED in text)
        self.texts = tuple(_part(text, f"{name}.{part}").encode() for part in ("source", "header"))
        self.unset: list[tuple[Place, str]] = []
        for file, line, column, words in _UNSET.findall(log):
            if (place := place_of(file, int(line), int(column))) is not None:
                self.unset.append((place, words))

    def copies(self, count: int) -> list[CDLL]:
        """The library and others of its bytes, each with memory of its own."""
        while len(self._copies) < count:
            self._copies.append(loader.load_library(self._payload, "checked"))
        return self._copies[:count]

    @cached_property
    def lines(self) -> Lines:
        """Its lines."""
        return Lines(self._payload)


def _part(text: str, name: str) -> str:
    """The lines of a text that are called so."""
    _, _, rest = text.partition(f'#line 1 "{name}"\n')
    return rest.partition('\n#line 1 "ferrule"\n')[0]


@lru_cache(maxsize=256)
def instrumented(spec: Spec, *, stops: bool = False) -> Instrumented:
    """A kernel, loaded for checking; from the disk cache where it is there.

    Args:
        spec: the kernel and what it is compiled for.
        stops: its text asks where to stop (`source.stops`).

    Raises:
        CompileError: the compiler refused the text; quotes the author's lines.
        DialectError: the text uses something that ferrule refuses.
        ToolchainError: there is no compiler, or it crashed or hung.
    """
    compiler = toolchain.find_compiler()
    scalars: Sequence[str] = ()
    pointed_to = True
    if spec.kernel.language == "cuda":
        on_cpu.refuse(spec)
        text, flags = on_cpu.text(spec, checked=True), [*_FOR_CUDA]
    else:
        prepared = cpp.prepare(spec)
        if not stops:  # of which the author's text has been told already
            device().warn(spec.kernel, portability.notes(prepared))
        text, scalars = fibers.text(prepared, checked=True), prepared.scalars
        all_flags = device().flags(spec.kernel, compiler, "fibers", prepared.fuses_freely)
        own = [f for f in all_flags if f.startswith(("-ffp-contract", "-D__FAST_MATH__"))]
        flags = [f"-I{INCLUDE}", *own]
        pointed_to = is_pointed_to(prepared)
    flags += _looking_at(f"{spec.kernel.header}\n{spec.kernel.source}")
    flags += [_BEHIND_POINTERS] if pointed_to else []
    flags += ["-DFR_STOPS=1"] if stops and spec.kernel.language == "metal" else []
    try:
        payload, log = _built(compiler, text, flags)
    except CompilerFailed as failed:
        name = f"{compiler.kind} {compiler.version}"
        raise compile_error(spec.kernel, failed.log, name, scalars) from None
    return Instrumented(spec.kernel.name, payload, log, text)


@lru_cache(maxsize=256)
def instrumented_unit(spec: UnitSpec, function: str) -> Instrumented:
    """A function of a CUDA unit, loaded for checking; as `instrumented`."""
    on_cpu.refuse(spec)
    compiler = toolchain.find_compiler()
    text = on_cpu.unit_text(spec, checked=True)
    words = "\n".join([spec.source, *dict(spec.headers).values()])
    try:
        payload, log = _built(compiler, text, [*_FOR_CUDA, *_looking_at(words), _BEHIND_POINTERS])
    except CompilerFailed as failed:
        name = f"{compiler.kind} {compiler.version}"
        raise refused("unit", spec.name, unit.texts(spec), failed.log, name) from None
    return Instrumented(spec.name, payload, log, text, on_cpu.entry_of(spec, function))


def _looking_at(text: str) -> list[str]:
    """The flags for what is looked at in an author's text."""
    flags = ["-fsanitize=alignment"] if _POINTER_CAST.search(text) else []
    return flags + ([] if _CHOSEN_ARRAY.search(text) else [_ARITHMETIC])


def _built(compiler: toolchain.Compiler, text: str, own: Sequence[str]) -> tuple[bytes, str]:
    """The library of a text, and what the compiler said; from the cache if it is there.

    Raises:
        CompilerFailed: the compiler refused the text.
    """
    flags = [*_FLAGS, *toolchain.native_flags(compiler), *own]
    flags += _GCC if compiler.kind == "gcc" else ("-fwrapv",)
    flags += [_STRICT] if compiler.kind == "gcc" and _ARITHMETIC in flags else []
    base = (SCHEMA, header_digest(), compiler.identity, toolchain.isa_identity())
    key = cache.digest("checked", *base, *flags, _runtime_digest(), text)

    def make() -> bytes:
        kernel, log = compiler.object(text, flags=flags)
        library = compiler.link([kernel, _runtime(compiler)])
        words = log.encode()
        return b"%d\n%b%b" % (len(words), words, library)

    length, _, rest = cache.default().get_or_make(key, make).partition(b"\n")
    return rest[int(length) :], rest[: int(length)].decode(errors="replace")


@lru_cache(maxsize=1)
def _runtime_digest() -> str:
    """Changes with every file of `watch/`."""
    files = sorted(_FOLDER.iterdir())
    return cache.digest(*(file.read_bytes() for file in files if file.suffix in (".h", ".cpp")))


def _runtime(compiler: toolchain.Compiler) -> bytes:
    """The object file of `watch/`."""
    identity = compiler.identity, toolchain.isa_identity()
    key = cache.digest("checked runtime", SCHEMA, *identity, *_RUNTIME_FLAGS, _runtime_digest())
    flags = [*_RUNTIME_FLAGS, f"-I{_FOLDER}"]
    text = '#include "watch.cpp"\n'
    return cache.default().get_or_make(key, lambda: compiler.object(text, flags=flags)[0])
