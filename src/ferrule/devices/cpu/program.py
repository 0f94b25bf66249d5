"""The CPU: kernels compiled by the host's C++ compiler, run over threadgroups by a thread pool."""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import NamedTuple

from ... import cache
from ...errors import ABANDONED, CompileError, DeviceError, DialectError, abandoned
from ...kernel import Kernel
from ...source import ENTRY, Note
from ...spec import Facts, Launch, Spec
from ...tools import fastcall, loader, toolchain
from ...tools.binding import FEW, MORE, Progress, runtime
from .. import portability, protocol
from ..digests import answer, answered, generator_digest, header_digest, request_text
from ..portability import Portability
from ..protocol import Binary, Code, Native
from . import debug
from .form import ANY, NEEDS, Form, form_of

SCHEMA = "1"  # raised when the same text, flags and compiler would run differently
SLICE = 200_000_000  # nanoseconds after which a launch looks for signals
BLOCK = 8192  # threads along x of one unit of work of a flat kernel
MODES = ("auto", "flat", "split", "fibers")

# Codes of runtime/runtime.h.
_MEMORY, _FAULT, _DIVISION = 1, 4, 5
_NO_ADDRESS = ctypes.c_void_p(-1).value  # what `fr_fault_address` says of what is no address

_FLAGS = (
    "-O3", "-w", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing", "-fsigned-char",
    "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden", "-fno-stack-protector",
    "-fno-asynchronous-unwind-tables", "-fno-plt", "-funroll-loops",
)  # fmt: skip

_mode: ContextVar[str] = ContextVar("ferrule.devices.cpu.mode", default="auto")


@contextmanager
def running(mode: str) -> Iterator[None]:
    """Choose how kernels run on the CPU inside a ``with`` block, for tests and comparisons.

    Args:
        mode: ``"auto"``, ``"flat"``, ``"split"`` or ``"fibers"`` (see `ferrule.source.cpp`).
    """
    if mode not in MODES:
        raise ValueError(f"mode: got {mode!r}, expected one of {', '.join(map(repr, MODES))}.")
    token = _mode.set(mode)
    try:
        with fastcall.bypassed():
            yield
    finally:
        _mode.reset(token)


class _Loaded:
    """A binary that is loaded."""

    def __init__(self, payload: bytes, kernel: Kernel, debugging: bool) -> None:
        load = loader.load_for_debugger if debugging else loader.load_library
        self.library = load(payload, kernel.name)
        self.entry = ctypes.cast(getattr(self.library, ENTRY), ctypes.c_void_p)
        units = ctypes.c_char.in_dll(self.library, "fr_units")
        self.alone = ctypes.c_char.in_dll(self.library, "fr_alone").value == b"1"
        self.over_grid = ctypes.string_at(ctypes.addressof(units)) == b"grid"
        self.shared = _shared_memory(self.library)


def _shared_memory(library: ctypes.CDLL) -> dict[int, int]:
    """Bytes of threadgroup memory that a kernel declares, by line."""
    if not hasattr(library, "fr_shared"):
        return {}
    words = (ctypes.c_uint32 * 512)()
    n = min(library.fr_shared(words, len(words)), len(words))
    # A compiler may emit a declaration more than once.
    pairs = {(words[i], words[i + 1]) for i in range(0, n - 1, 2)}
    sizes: dict[int, int] = {}
    for line, size in pairs:
        sizes[line] = sizes.get(line, 0) + size
    return sizes


class _CpuPlan(NamedTuple):
    """The part of a launch that depends on its grid and threadgroup alone.

    Attributes:
        loaded: what is launched.
        sizes: grid, threadgroup, threadgroups and block, as `fr::launch` has them.
        units: how many pieces of work there are.
    """

    loaded: _Loaded
    sizes: tuple[int, ...]
    units: int


class CpuProgram:
    """A kernel that is loaded; how it runs is chosen per launch, and compiled when first needed."""

    def __init__(self, device: CpuDevice, spec: Spec) -> None:
        self._device = device
        self._spec = spec
        self._debugging = debug.debugging()
        self._forms: dict[tuple[str, Form], _Loaded] = {}
        self._plans: dict[tuple[object, ...], _CpuPlan] = {}
        self._lock = threading.Lock()
        kernel = spec.kernel
        self._atomics = "atomic" in kernel.source or "atomic" in kernel.header
        self._described = described(kernel)

    def _plan(self, launch: Launch) -> _CpuPlan:
        """The plan of a launch, with threads as they are set now."""
        grid, threadgroup, threads = launch.grid, launch.threadgroup, 0
        if self._atomics:
            threads = int(runtime().fr_threads())
            threads = threads if threads == 1 else FEW if threads <= FEW else 0
        key = (grid, threadgroup, _mode.get(), threads)
        plan = self._plans.get(key)
        if plan is None:
            form = form_of(launch, threads)._replace(debugging=self._debugging)
            loaded = self._loaded(form)
            groups = tuple(-(-g // t) for g, t in zip(grid, threadgroup, strict=True))
            x, y, z = (-(-grid[0] // BLOCK), *grid[1:]) if loaded.over_grid else groups
            if len(self._plans) > 256:
                self._plans.clear()
            plan = _CpuPlan(loaded, (*grid, *threadgroup, *groups, BLOCK), x * y * z)
            self._plans[key] = plan
        return plan

    def _loaded(self, form: Form) -> _Loaded:
        key = (_mode.get(), form)
        with self._lock:
            loaded = self._forms.get(key)
            if loaded is None:
                payload = self._device.binary(self._spec, form)[0]
                loaded = _Loaded(payload, self._spec.kernel, self._debugging)
                self._device.check_shared(self._spec.kernel, loaded.shared)
                self._forms[key] = loaded
        return loaded

    def launch(
        self, inputs: Sequence[Facts], outputs: Sequence[Facts], launch: Launch, stream: int = 0
    ) -> None:
        """Run the kernel and wait for it; watched, where somebody checks it.

        Raises:
            CompileError: the compiler refused the kernel's text.
            DialectError: the text uses something that ferrule refuses.
            DeviceError: the kernel accessed memory outside its arrays, divided an integer by
                zero, or the runtime ran out of memory; or units that did not end were abandoned
                at the second Ctrl-C, on a thread that Python does not interrupt.
        """
        watcher = protocol.watcher
        if watcher is None or not watcher.launch(self._spec, inputs, outputs, launch):
            self.run(inputs, outputs, launch)

    def run(self, inputs: Sequence[Facts], outputs: Sequence[Facts], launch: Launch) -> None:
        """Run the kernel and wait for it, watched by nobody.

        Raises:
            CompileError, DialectError, DeviceError: as `launch` does.
        """
        loaded, sizes, units = self._plan(launch)
        if 0 in launch.grid:
            return
        block, _kept = packed(inputs, outputs, sizes, self._described)
        # One thread where the kernel counts on it; else as many as are set.
        limit = 1 if loaded.alone else 0
        call = loaded.entry, ctypes.addressof(block), units, limit
        status = run_units(*call, launch.of(self._spec.kernel))
        if status:
            raise self.failure(status, launch, [*inputs, *outputs])

    def native(self, inputs: Sequence[Facts], outputs: Sequence[Facts], launch: Launch) -> Native:
        """What runtime/op_calls.h needs to launch this over grids of the same form."""
        watcher = protocol.watcher
        watched = None if watcher is None else watcher.native(self._spec, inputs, outputs, launch)
        if watched is not None:
            return watched
        loaded = self._plan(launch).loaded
        library = runtime()
        return Native(
            run=ctypes.cast(library.fr_run_some, ctypes.c_void_p).value or 0,
            entry=loaded.entry.value or 0,
            limit=1 if loaded.alone else 0,
            over_grid=loaded.over_grid,
            block=BLOCK,
            described=sum(1 << i for i in self._described),
            keep=(loaded, library),
        )

    def failure(self, status: int, launch: Launch, arrays: list[Facts]) -> DeviceError:
        """The error for a launch that ended with ``status``, a code of runtime/runtime.h."""
        return _failure(status, self._spec.kernel, launch, arrays)


def run_units(entry: object, launch: int, units: int, limit: int, where: str) -> int:
    """Run a kernel's units of work, wait for them, and return how that ended.

    Args:
        entry, launch: the addresses of the kernel and of its `fr::launch`.
        units, limit: how many there are, and on how many threads at most (0: all).
        where: the kernel's launch, for the words of an error.

    Returns:
        0, or a code of runtime/runtime.h.

    Raises:
        KeyboardInterrupt: on Ctrl-C; after the second one units that do not end were abandoned.
    """
    call = entry, launch, units, limit, SLICE, Progress()
    run = runtime().fr_run_some
    try:
        status = int(run(*call))
        while status == MORE:  # here Python raises KeyboardInterrupt
            status = int(run(*call))
    except KeyboardInterrupt:
        run(None, None, 0, 0, 0, call[-1])  # shows what it printed
        if not runtime().fr_abandoned():
            raise
        raise KeyboardInterrupt(abandoned(where)) from None
    return status


def _failure(status: int, kernel: Kernel, launch: Launch, arrays: list[Facts]) -> DeviceError:
    """The error for a code of the runtime, in the author's terms."""
    where = launch.of(kernel)
    if status == _FAULT:
        address = int(runtime().fr_fault_address() or 0)
        names = kernel.input_names + kernel.output_names
        nearest, distance = "", 1 << 64
        for name, fact in zip(names, arrays, strict=True):
            end = fact.pointer + fact.size * fact.dtype.itemsize
            apart = max(fact.pointer - address, address - end + 1)
            if apart < distance:
                side = "before the start" if address < fact.pointer else "past the end"
                nearest, distance = f"{apart} bytes {side} of {name!r}", apart
        if address < 1 << 16:
            return DeviceError(f"{where} followed a null pointer (address {address:#x}).")
        if address == _NO_ADDRESS:
            nearest = "at an address that the processor does not have, beyond 2^47"
        far = (
            " So far away, the stack may be at fault: recursion, or private arrays of megabytes."
            if distance > 1 << 32 and address != _NO_ADDRESS
            else ""
        )
        return DeviceError(
            f"{where} accessed memory outside its arrays, {nearest}. Check the indices against the "
            "shapes; the outputs are lost, the inputs are as they were unless the kernel wrote to "
            f"other memory first.{far}"
        )
    if status == _DIVISION:
        return DeviceError(
            f"{where} divided an integer by zero, which Metal leaves undefined. Guard the division."
        )
    if status == ABANDONED:
        return DeviceError(f"{abandoned(where)}.")
    if status == _MEMORY:
        return DeviceError(f"{where} could not get memory for its threads' stacks.")
    return DeviceError(f"{where}: the CPU runtime failed with code {status}.")


def described(kernel: Kernel) -> list[int]:
    """The inputs whose shape, strides or rank a body asks for."""
    return [i for i, name in enumerate(kernel.input_names) if any(kernel.wants(name))]


def packed(
    inputs: Sequence[Facts],
    outputs: Sequence[Facts],
    sizes: tuple[int, ...],
    described: Sequence[int],
) -> tuple[ctypes.Array[ctypes.c_char], object]:
    """`fr::launch` of include/cpu.h, whose last fields are ``sizes``; and what it points to."""
    kept: list[array[int]] = []

    def address(code: str, values: Sequence[int]) -> int:
        kept.append(array(code, values))
        return kept[-1].buffer_info()[0]

    tables = [address("Q", [fact.pointer for fact in (*inputs, *outputs)]), 0, 0, 0]
    if described:
        shapes, strides = [0] * len(inputs), [0] * len(inputs)
        for i in described:
            shapes[i] = address("i", inputs[i].shape)
            strides[i] = address("q", inputs[i].strides)
        ranks = [len(fact.shape) for fact in inputs]
        tables[1:] = address("Q", shapes), address("Q", strides), address("i", ranks)
    return ctypes.create_string_buffer(struct.pack("=4Q10I", *tables, *sizes)), kept


class CpuDevice:
    """The host's processor."""

    name = "cpu"

    def __init__(self) -> None:
        self._programs: dict[Spec, CpuProgram] = {}
        self._portability = Portability()

    # -- text ------------------------------------------------------------------------------------

    def text(self, spec: Spec, launch: Launch | None = None) -> str:
        """The C++ text.

        Raises:
            DialectError: the text uses something that ferrule refuses.
        """
        from .build import Build

        folder = debug.source_folder(spec.kernel) if debug.debugging() else None
        return Build(spec, form_of(launch), _mode.get(), folder).text()[1]

    def check_shared(self, kernel: Kernel, shared: dict[int, int]) -> None:
        """Warn where threadgroup memory becomes more than Apple's GPUs have.

        Args:
            kernel: whose memory it is.
            shared: bytes, by the line that declares them.
        """
        size, total = sum(shared.values()), 0
        for line in sorted(shared):
            total += shared[line]
            if portability.of_shared_memory(total, line):
                self._portability.say(kernel, portability.of_shared_memory(size, line))
                return

    def warn(self, kernel: Kernel, notes: Sequence[Note]) -> None:
        """Warn, once, of what Apple refuses of a kernel."""
        self._portability.say(kernel, notes)

    # -- binaries --------------------------------------------------------------------------------

    def flags(
        self,
        kernel: Kernel,
        compiler: toolchain.Compiler,
        mode: str,
        fuses_freely: bool,
        in_debugger: bool = False,
    ) -> list[str]:
        """The compiler's flags for a kernel, by how it runs."""
        own = debug.flags(_FLAGS, compiler.kind) if in_debugger else _FLAGS
        flags = [*own, *toolchain.native_flags(compiler)]
        if compiler.kind == "gcc":
            # g++ would trap, with an invalid instruction, at a division by a zero that it sees.
            flags.append("-fno-isolate-erroneous-paths-dereference")
            if mode.startswith("split"):
                # g++ would copy arrays of lanes in pieces smaller than vectors; a load of a vector
                # then waits for the stores of its pieces.
                flags.append("-fno-tree-loop-distribute-patterns")
            if mode.startswith("fibers"):
                # Arrays larger than a fiber's stack must not reach what lies below its guard page.
                flags.append("-fstack-clash-protection")
        else:
            # clang would take a sum of ints that is converted to a long in 64 bits.
            flags.append("-fwrapv")
        # The text says what is fused (`source.arithmetic`). Beyond that, clang would also fuse the
        # products and sums of half, whose rounding in between must stay.
        free = fuses_freely and compiler.kind == "gcc"
        flags.append(f"-ffp-contract={'fast' if free else 'off'}")
        if kernel.math_mode == "fast":
            flags.append("-D__FAST_MATH__=1")
        return flags

    def packaged(self, spec: Spec, example: Launch | None, threads: int) -> tuple[Code, ...]:
        """The shared libraries for launches of every size, that for the example's sizes first.

        Raises:
            CompileError, DialectError, ToolchainError: as `compile` does.
        """
        codes = [Code(self.binary(spec, ANY)[0])]
        if example is not None:
            form = form_of(example)
            special = self.binary(spec, form)[0]
            if special != codes[0].payload:
                needs = tuple(need for name, need in NEEDS.items() if getattr(form, name))
                codes.insert(0, Code(special, needs))
        return tuple(codes)

    def binary(self, spec: Spec, form: Form) -> tuple[bytes, str]:
        """The shared library for a spec and a form of launch, and how it runs.

        The disk cache knows it twice: a request (kernel, spec, form) leads to the digest of a text
        without that text being written; the text's digest leads to the library.
        """
        try:
            payload, mode = self._binary(spec, form)
            if logging := sys.modules.get("logging"):  # else nobody has asked for a log
                text = "kernel %r runs on the CPU as: %s"
                logging.getLogger("ferrule").debug(text, spec.kernel.name, mode)
            return payload, mode
        except RecursionError:
            raise DialectError(
                f"kernel {spec.kernel.name!r} is nested too deeply: Python's recursion limit is "
                f"{sys.getrecursionlimit()} (sys.setrecursionlimit raises it). Split the body's "
                "deepest statement or expression.",
                kernel=spec.kernel.name,
                where="source",
                line=1,
                construct="nesting",
            ) from None

    def _binary(self, spec: Spec, form: Form) -> tuple[bytes, str]:
        disk, forced = cache.default(), _mode.get()
        folder = debug.source_folder(spec.kernel) if form.debugging else None
        compiler = toolchain.find_compiler()
        base = (header_digest(), compiler.identity, toolchain.isa_identity(), *_FLAGS)
        if folder is not None:
            forced = f"debug {folder}"
        inputs = [[i.dtype.name, i.ndim == 0] for i in spec.inputs]
        request = cache.digest(
            "request", SCHEMA, generator_digest(), *base, forced, request_text(spec, inputs, form)
        )
        if (cached := answered(request)) is not None:
            mode, notes, payload = cached
            self.warn(spec.kernel, notes)
            return payload, mode
        from .build import Build  # a kernel from the cache needs no text and no parser

        build = Build(spec, form, _mode.get(), folder)
        notes = build.notes()
        self.warn(spec.kernel, notes)
        mode, text = build.text()
        plain = self.flags(spec.kernel, compiler, mode, build.fuses_freely, folder is not None)

        def made(text: str) -> tuple[str, bytes]:
            flags = [*plain, "-DFR_ALONE=1"] if build.alone(text) else plain
            key = cache.digest("cpu", SCHEMA, *base, *flags, text)
            return key, disk.get_or_make(key, lambda: build.compile(compiler, text, flags))

        try:
            key, payload = made(text)
        except CompileError as error:
            if forced != "auto" or not mode.startswith("split"):
                raise
            # A text that stays nearer to the author's says more about an error in it; if it has
            # none, the kernel runs.
            key, payload = made(build.fibers())
            why = next(iter(str(error).splitlines()[1:2]), "").strip()
            mode = f"fibers (the split text does not compile: {why})"
        disk.put(request, answer(mode, key, notes))
        return payload, mode

    def compile(self, spec: Spec, launch: Launch | None = None) -> Binary:
        """The compiled kernel, from the disk cache where it is there; launches nothing.

        Raises:
            CompileError: the compiler refused the text; quotes the author's lines.
            DialectError: the text uses something that ferrule refuses.
            ToolchainError: there is no compiler, or it crashed or hung.
        """
        form = form_of(launch)._replace(debugging=debug.debugging())
        payload, mode = self.binary(spec, form)
        return Binary(payload, mode, self.text(spec, launch))

    def program(self, spec: Spec) -> CpuProgram:
        """The kernel, ready to be launched; compiled when first launched."""
        program = self._programs.get(spec)
        if program is None:
            program = self._programs.setdefault(spec, CpuProgram(self, spec))
        return program


@lru_cache(maxsize=1)
def device() -> CpuDevice:
    """The one CPU device of this process."""
    return CpuDevice()
