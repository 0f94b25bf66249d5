"""NVIDIA GPUs: kernels as CUDA C++, compiled by NVRTC to a cubin. Compiling needs no GPU."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING

from ... import cache
from ...errors import DeviceError, ToolchainError
from ...source import Note
from ...source.cuda.launch import (
    Form,
    form_for,
    kernel_symbol,
    most_registers,
    plain_form,
    possible_forms,
)
from ...spec import Launch, Spec
from ...tools import nvrtc
from ...tools.driver import driver
from ...unit import UnitSpec
from ..digests import (
    answer,
    answered,
    generator_digest,
    header_digest,
    packed,
    request_text,
    unpacked,
)
from ..portability import Portability
from ..protocol import Binary, Code, UnitBinary
from . import robust

if TYPE_CHECKING:
    from .build import Task
    from .program import CudaProgram
    from .unit import CudaUnitProgram

SCHEMA = "5"  # raised when the same text, flags and compiler would run differently
ARCHITECTURE = "sm_90"


class CudaDevice:
    """CUDA C++ and cubins for one architecture, such as ``"sm_90"``, and the GPU that runs them."""

    name = "cuda"

    def __init__(self, architecture: str = ARCHITECTURE, ordinal: int | None = None) -> None:
        self.architecture = architecture
        self.ordinal = ordinal  # of the GPU; None where there is none to run kernels on
        self._portability = Portability()

    def text(self, spec: Spec, launch: Launch | None = None) -> str:
        """The CUDA C++ text.

        Raises:
            DialectError: the text uses something that ferrule refuses.
        """
        from .build import CudaBuild

        return CudaBuild(spec, launch, guards=robust.guards()).text()

    def compile(self, spec: Spec, launch: Launch | None = None) -> Binary:
        """The cubin (PTX for ``compute_…``), from the disk cache where it is there.

        Raises:
            CompileError: NVRTC refused the text; quotes the author's lines.
            DialectError: the text uses something that ferrule refuses.
            ToolchainError: there is no NVRTC.
            DeviceError: NVRTC does not know the architecture, or the kernel has more threadgroup
                memory than it.
        """
        return self.built(spec, launch)[1]

    def built(
        self, spec: Spec, launch: Launch | None, guards: str | None = None
    ) -> tuple[Form, Binary]:
        """`compile`, with the form of the launch, and with what is done about accesses outside of
        arrays, where that is not what `robust.guards` says."""
        guards = guards or robust.guards()
        likely = nvrtc.likely()
        first = [] if likely is None else [_decisive(spec, *likely)]
        for decisive in (*first, ""):  # without a compiler is what `carry` left
            cached = self._cached(spec, self._request(spec, launch, decisive, guards))
            if cached is not None:
                return cached
        compiler = nvrtc.find_nvrtc()
        decisive = "" if compiler is None else _decisive(spec, compiler.path, compiler.identity)
        request = self._request(spec, launch, decisive, guards, plain=compiler is None)
        cached = None if decisive in first else self._cached(spec, request)
        if cached is not None:
            return cached
        made = self._build(_found(compiler, spec), spec, launch, guards=guards)
        form, key, built, notes = made
        cache.default().put(request, answer(form, key, notes))
        return form, built

    def by_pointer(self, spec: Spec, launch: Launch) -> tuple[Form, Binary]:
        """The form of a launch, and a cubin (or PTX) with the signature that
        `source.cuda.by_pointer` has.

        Raises:
            CompileError, DialectError, ToolchainError, DeviceError: as `compile` does.
        """
        from .build import CudaBuild

        form, built = self.built(spec, launch)
        compiler = _found(nvrtc.find_nvrtc(), spec)
        task = CudaBuild(spec, launch, form=form, guards=robust.guards()).by_pointer(
            compiler, self.architecture, built.text
        )
        binary = self._run("cuda by pointer", task)[1]
        return form, binary._replace(shared=built.shared)

    def carry(self, spec: Spec, launch: Launch | None, to: cache.Cache) -> Binary:
        """Compile a kernel, and put it where another machine's cache can be filled from.

        Raises:
            CompileError, DialectError, ToolchainError, DeviceError: as `compile` does.
        """
        compiler = _found(nvrtc.find_nvrtc(), spec)

        def put(plain: bool) -> Binary:
            form, key, built, notes = self._build(compiler, spec, launch, plain=plain)
            request = self._request(spec, launch, "", robust.guards(), plain=plain)
            if not (to.put(key, _packed(built)) and to.put(request, answer(form, key, notes))):
                why = to.reason_disabled or "the entry is too large"
                raise DeviceError(f"carry_to: {to.path} cannot be written: {why}.")
            return built

        built = put(plain=False)
        if possible_forms(launch) != possible_forms(launch, plain=True):
            put(plain=True)  # which serves all sizes and alignments
        return built

    def _request(
        self, spec: Spec, launch: Launch | None, compiler: str, guards: str, *, plain: bool = False
    ) -> str:
        """The key in the cache of the request for a binary."""
        in_cuda = spec.kernel.language == "cuda"  # its text is the same for every launch
        forms = [spec.kernel.values] if in_cuda else possible_forms(launch, plain=plain)
        inputs = [[i.dtype.name, i.ndim, i.value] for i in spec.inputs]
        request = request_text(spec, inputs, forms, most_registers(launch))
        digests = (header_digest(), generator_digest(), compiler, self.architecture, guards)
        return cache.digest("cuda request", SCHEMA, *digests, request)

    def _cached(self, spec: Spec, request: str) -> tuple[Form, Binary] | None:
        cached = answered(request)
        if cached is None:
            return None
        form, notes, packed_ = cached
        self._portability.say(spec.kernel, notes)
        return Form(*form), self._unpacked(packed_)

    def _run(self, kind: str, task: Task) -> tuple[str, Binary]:
        """What a compilation gives, from the disk cache where it is there, and its key there."""
        key = cache.digest(kind, SCHEMA, header_digest(), *task.made_of)
        return key, self._unpacked(cache.default().get_or_make(key, lambda: _packed(task.run())))

    def _unpacked(self, data: bytes) -> Binary:
        """The reverse of `_packed`."""
        known, payload = unpacked(data)
        return Binary(payload, self.architecture, *known)

    def _build(
        self,
        compiler: nvrtc.Nvrtc,
        spec: Spec,
        launch: Launch | None,
        *,
        plain: bool = False,
        form: Form | None = None,
        guards: str | None = None,
    ) -> tuple[Form, str, Binary, list[Note]]:
        """The form, the key in the cache, what was built, and what Apple refuses of it."""
        from .build import CudaBuild  # a kernel from the cache needs no text and no parser

        guards = guards or robust.guards()
        build = CudaBuild(spec, launch, plain=plain, form=form, guards=guards)
        notes = build.notes()
        self._portability.say(spec.kernel, notes)
        key, built = self._run("cuda binary", build.task(compiler, self.architecture))
        more = build.notes_of_memory(built.memory)
        self._portability.say(spec.kernel, more)
        return build.form, key, built, [*notes, *more]

    def packaged(self, spec: Spec, example: Launch | None, threads: int) -> tuple[Code, ...]:
        """The cubins for launches of every size, that for the example's sizes first.

        Args:
            threads: how many a threadgroup may have.

        Raises:
            CompileError, DialectError, ToolchainError, DeviceError: as `compile` does.
        """
        from ...source import cpp
        from ...source.cuda.text import needs_of

        forms, lanes = [_ANY], False
        if spec.kernel.language == "cuda":
            forms = [Form("box", aligned_arrays=False)]
        elif example is not None:
            needs = needs_of(cpp.prepare(spec))
            lanes, form = needs.lanes, form_for(needs, example)
            # What the example's arrays and size allow, what its grid allows, what is always right.
            forms = list(dict.fromkeys((form, plain_form(form), _ANY)))
        # Registers are for the largest threadgroup, whatever the example's has.
        largest = Launch((threads, 1, 1), (threads, 1, 1), (), None, ())
        compiler = _found(nvrtc.find_nvrtc(), spec)
        codes: list[Code] = []
        for form in forms:
            built = self._build(compiler, spec, largest, form=form)[2]
            codes.append(
                Code(
                    built.payload,
                    () if form is forms[-1] else _needs(form, lanes),
                    _BLOCKS[form.threads],
                    form.far,
                    self.architecture,
                    built.shared,
                    (kernel_symbol(spec),),
                    form.each,
                    form.aligned_arrays,
                )
            )
        return tuple(codes)

    def unit_binary(self, spec: UnitSpec) -> UnitBinary:
        """The machine code of a unit.

        Raises:
            CompileError, ToolchainError, DeviceError: as `unit.built` does.
        """
        from .unit import built

        return built(spec, self.architecture)

    def unit_program(self, spec: UnitSpec) -> CudaUnitProgram:
        """A unit on this GPU.

        Raises:
            DeviceError: there is no such GPU.
        """
        from .unit import CudaUnitProgram

        return CudaUnitProgram(spec, self.architecture, self._gpu("unit", spec.name))

    def program(self, spec: Spec) -> CudaProgram:
        """The kernel on this GPU.

        Raises:
            DeviceError: there is no driver or no such GPU.
        """
        from .program import CudaProgram

        return CudaProgram(self, spec, self._gpu("kernel", spec.kernel.name))

    def _gpu(self, kind: str, name: str) -> int:
        """The GPU's ordinal."""
        if self.ordinal is None:
            raise DeviceError(
                f"{kind} {name!r}: {self.architecture!r} is an architecture, which {kind}s are "
                "compiled for; a GPU to run them is called 'cuda:0'."
            )
        return self.ordinal


# Threads in one row, threadgroups counted through, and nothing known of either.
_ANY = Form("line", far=True, aligned_arrays=False)
_BLOCKS = {"row": "lines", "line": "lines", "box": "boxes", "any": "any"}


def _needs(form: Form, lanes: bool) -> tuple[str, ...]:
    """The conditions under which `form_for` gives this form: names of packaged/ops.h."""
    needs = {
        "FR_ONE_ROW": form.threads in ("row", "any"),
        "FR_SHALLOW": form.threads == "box",
        "FR_EVEN": form.whole or (form.threads == "box" and lanes),
        "FR_NEAR": not form.far,
        "FR_FULL": form.full,
        "FR_LANES_IN_X": form.aligned,
    }
    return tuple(name for name, needed in needs.items() if needed)


def _found(compiler: nvrtc.Nvrtc | None, spec: Spec) -> nvrtc.Nvrtc:
    if compiler is None:
        raise ToolchainError(
            f"kernel {spec.kernel.name!r}: NVRTC, the compiler for CUDA, was not found; "
            "`pip install nvidia-cuda-nvrtc` installs it. (`ferrule build`, on a machine that has "
            "it, makes machine code that can be carried here.)"
        )
    return compiler


def _decisive(spec: Spec, path: str, identity: str) -> str:
    """A compiler's part of the key: its identity, and for bodies in CUDA that of the headers."""
    if spec.kernel.language != "cuda":
        return identity
    return cache.digest(identity, nvrtc.headers_identity(path))


def _packed(built: Binary) -> bytes:
    """A binary as bytes, for the cache."""
    return packed([built.text, built.log, built.shared, built.memory], built.payload)


@lru_cache(maxsize=8)
def device(architecture: str = ARCHITECTURE) -> CudaDevice:
    """The CUDA device for an architecture."""
    return CudaDevice(architecture)


@lru_cache(maxsize=64)
def gpu(name: str) -> CudaDevice:
    """A GPU, ``"cuda:0"`` …; for ``"cuda"`` the first, or where there is none one that compiles
    for `ARCHITECTURE`.

    Raises:
        DeviceError: there is no driver, or no such GPU.
    """
    try:
        ordinal = int(name.partition(":")[2] or "0")
    except ValueError:
        raise DeviceError(f"there is no device {name!r}; expected 'cuda:0', 'cuda:1' …") from None
    try:
        major, minor = driver().capability(ordinal)
    except DeviceError:
        if name == "cuda":
            return device()
        raise
    return CudaDevice(_nearest(10 * major + minor), ordinal)


def _nearest(capability: int) -> str:
    """The architecture to compile for: the GPU's own, or PTX if NVRTC does not know it."""
    capabilities = _architectures()
    if not capabilities or capability in capabilities or capability < min(capabilities):
        return f"sm_{capability}"
    return f"compute_{max(n for n in capabilities if n < capability)}"


def _architectures() -> list[int]:
    """The capabilities that NVRTC compiles for, from the disk cache where they are there: to load
    NVRTC takes 10 ms."""
    disk, likely = cache.default(), nvrtc.likely()
    key = cache.digest("nvrtc architectures", "" if likely is None else likely[1])
    cached = None if likely is None else disk.get(key)
    if cached is not None:
        return [int(n) for n in json.loads(cached)]
    compiler = nvrtc.find_nvrtc()
    if compiler is None:
        return []
    capabilities = compiler.architectures()
    if likely is not None and compiler.identity == likely[1]:
        disk.put(key, json.dumps(capabilities).encode())
    return capabilities
