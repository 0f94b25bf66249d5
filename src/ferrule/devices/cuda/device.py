"""NVIDIA GPUs: kernels as CUDA C++, compiled by NVRTC to a cubin. Compiling needs no GPU."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING

from ... import cache
from ...errors import DeviceError, ToolchainError
from ...source import Note
from ...source.cuda.launch import Form, most_registers, possible_forms
from ...spec import Launch, Spec
from ...tools import nvrtc
from ...tools.driver import driver
from ...unit import UnitSpec
from ..digests import generator_digest, header_digest
from ..portability import Portability
from ..protocol import Binary, Code, UnitBinary

if TYPE_CHECKING:
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

        return CudaBuild(spec, launch).text()

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

    def built(self, spec: Spec, launch: Launch | None) -> tuple[Form, Binary]:
        """`compile`, with the form of the launch.

        The disk cache knows it twice, as on the CPU: a request leads to the form and the digest of
        a text without that text being written. A request without a compiler is what `carry` left.
        """
        disk = cache.default()
        likely = nvrtc.likely()
        first = None if likely is None else _decisive(spec, *likely)
        cached = self._cached(disk, spec, launch, first) or self._cached(disk, spec, launch, "")
        if cached is not None:
            return cached
        compiler = nvrtc.find_nvrtc()
        if compiler is None:
            cached = self._cached(disk, spec, launch, "", plain=True)
            if cached is not None:
                return cached
        decisive = "" if compiler is None else _decisive(spec, compiler.path, compiler.identity)
        if decisive not in ("", first):
            cached = self._cached(disk, spec, launch, decisive)
            if cached is not None:
                return cached
        form, key, built, notes = self._build(_found(compiler, spec), spec, launch)
        disk.put(self._request(spec, launch, decisive), _record(form, key, notes))
        return form, built

    def shaped(self, spec: Spec, launch: Launch, form: Form) -> Binary:
        """The cubin of a form that is chosen.

        Args:
            launch: says how many threads a threadgroup may have.

        Raises:
            CompileError, DialectError, ToolchainError, DeviceError: as `compile` does.
        """
        compiler = _found(nvrtc.find_nvrtc(), spec)
        return self._build(compiler, spec, launch, form=form)[2]

    def by_pointer(self, spec: Spec, launch: Launch) -> tuple[Form, Binary]:
        """The form of a launch, and a cubin (or PTX) with the signature that
        `source.cuda.by_pointer` has.

        Raises:
            CompileError, DialectError, ToolchainError, DeviceError: as `compile` does.
        """
        from .build import CudaBuild

        form, built = self.built(spec, launch)
        compiler = _found(nvrtc.find_nvrtc(), spec)
        task = CudaBuild(spec, launch, form=form).by_pointer(
            compiler, self.architecture, built.text
        )
        key = cache.digest("cuda by pointer", SCHEMA, header_digest(), *task.made_of)
        packed = cache.default().get_or_make(key, lambda: _packed(task.run()))
        binary = _unpacked(packed, self.architecture)
        return form, binary._replace(shared=built.shared)

    def carry(self, spec: Spec, launch: Launch | None, to: cache.Cache) -> Binary:
        """Compile a kernel, and put it where another machine's cache can be filled from.

        Raises:
            CompileError, DialectError, ToolchainError, DeviceError: as `compile` does.
        """
        compiler = _found(nvrtc.find_nvrtc(), spec)

        def put(plain: bool) -> Binary:
            form, key, built, notes = self._build(compiler, spec, launch, plain=plain)
            request = self._request(spec, launch, "", plain=plain)
            if not (to.put(key, _packed(built)) and to.put(request, _record(form, key, notes))):
                why = to.reason_disabled or "the entry is too large"
                raise DeviceError(f"carry_to: {to.path} cannot be written: {why}.")
            return built

        built = put(plain=False)
        if possible_forms(launch) != possible_forms(launch, plain=True):
            put(plain=True)  # which serves all sizes and alignments
        return built

    def _request(
        self, spec: Spec, launch: Launch | None, compiler: str, *, plain: bool = False
    ) -> str:
        """The key in the cache of the request for a binary."""
        k = spec.kernel
        described = [
            [k.language, k.name, k.input_names, k.output_names, k.source, k.header],
            [k.atomic_outputs, k.math_mode, k.portable],
            [[i.dtype.name, i.ndim, i.value] for i in spec.inputs],
            [d.name for d in spec.outputs],
            [[n, type(v).__name__, str(v)] for n, v in spec.template],
            possible_forms(launch, plain=plain),
            most_registers(launch),
        ]
        if k.language == "cuda":
            described[-2] = [k.values]  # its text is the same for every launch
        digests = (header_digest(), generator_digest(), compiler, self.architecture)
        return cache.digest("cuda request", SCHEMA, *digests, json.dumps(described))

    def _cached(
        self,
        disk: cache.Cache,
        spec: Spec,
        launch: Launch | None,
        compiler: str | None,
        *,
        plain: bool = False,
    ) -> tuple[Form, Binary] | None:
        """The cached binary of a compiler, given what `_decisive` says of it."""
        if compiler is None:
            return None
        record = disk.get(self._request(spec, launch, compiler, plain=plain))
        if record is None:
            return None
        form, key, notes = json.loads(record)
        packed = disk.get(key)
        if packed is None:
            return None
        self._portability.say(spec.kernel, [Note(*note) for note in notes])
        return Form(*form), _unpacked(packed, self.architecture)

    def _build(
        self,
        compiler: nvrtc.Nvrtc,
        spec: Spec,
        launch: Launch | None,
        *,
        plain: bool = False,
        form: Form | None = None,
    ) -> tuple[Form, str, Binary, list[Note]]:
        """The form, the key in the cache, what was built, and what Apple refuses of it."""
        from .build import CudaBuild  # a kernel from the cache needs no text and no parser

        build = CudaBuild(spec, launch, plain=plain, form=form)
        notes = build.notes()
        self._portability.say(spec.kernel, notes)
        task = build.task(compiler, self.architecture)
        key = cache.digest("cuda", SCHEMA, header_digest(), *task.made_of)
        packed = cache.default().get_or_make(key, lambda: _packed(task.run()))
        built = _unpacked(packed, self.architecture)
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
        from .packaged import codes

        return codes(spec, example, self.architecture, threads, self.shaped)

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

        if self.ordinal is None:
            raise DeviceError(
                f"unit {spec.name!r}: {self.architecture!r} is an architecture, which units are "
                "compiled for; a GPU to run them is called 'cuda:0'."
            )
        return CudaUnitProgram(spec, self.architecture, self.ordinal)

    def program(self, spec: Spec) -> CudaProgram:
        """The kernel on this GPU.

        Raises:
            DeviceError: there is no driver or no such GPU.
        """
        from .program import CudaProgram

        if self.ordinal is None:
            raise DeviceError(
                f"kernel {spec.kernel.name!r}: {self.architecture!r} is an architecture, which "
                "kernels are compiled for; a GPU to run them is called 'cuda:0'."
            )
        return CudaProgram(self, spec, self.ordinal)


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


def _record(form: Form, key: str, notes: list[Note]) -> bytes:
    return json.dumps([form, key, notes]).encode()


def _packed(built: Binary) -> bytes:
    """A binary as bytes, for the cache."""
    sizes = b"%d %d" % (built.shared, built.memory)
    return b"\0".join((sizes, built.text.encode(), built.log.encode(), built.payload))


def _unpacked(data: bytes, architecture: str) -> Binary:
    """The reverse of `_packed`."""
    sizes, text, log, payload = data.split(b"\0", 3)
    shared, memory = map(int, sizes.split())
    return Binary(payload, architecture, text.decode(), log.decode(), shared, memory)


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
