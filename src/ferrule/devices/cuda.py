"""NVIDIA GPUs: kernels as CUDA C++, compiled by NVRTC to a cubin. Compiling needs no GPU."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING

from .. import cache, nvrtc
from ..driver import driver
from ..errors import DeviceError, ToolchainError
from ..source import Note
from ..source.cuda_launch import Form, most_registers, possible_forms
from ..spec import Launch, Spec
from . import Binary
from .digests import generator_digest, header_digest
from .portability import Portability

if TYPE_CHECKING:
    from .cuda_program import CudaProgram

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
        from .cuda_build import Build

        return Build(spec, launch).text()

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
        found = self._cached(disk, spec, launch, first) or self._cached(disk, spec, launch, "")
        if found is not None:
            return found
        compiler = nvrtc.find_nvrtc()
        if compiler is None:
            found = self._cached(disk, spec, launch, "", plain=True)
            if found is not None:
                return found
        asked = "" if compiler is None else _decisive(spec, compiler.path, compiler.identity)
        if asked not in ("", first):
            found = self._cached(disk, spec, launch, asked)
            if found is not None:
                return found
        form, key, built, notes = self._build(_found(compiler, spec), spec, launch)
        disk.put(self._request(spec, launch, asked), _record(form, key, notes))
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
        `source.cuda_by_pointer` has.

        Raises:
            CompileError, DialectError, ToolchainError, DeviceError: as `compile` does.
        """
        from .cuda_build import Build

        form, built = self.built(spec, launch)
        compiler = _found(nvrtc.find_nvrtc(), spec)
        task = Build(spec, launch, form=form).by_pointer(compiler, self.architecture, built.text)
        key = cache.digest("cuda by pointer", SCHEMA, header_digest(), *task.made_of)
        packed = cache.default().get_or_make(key, lambda: _packed(task.run()))
        made = _unpacked(packed, self.architecture)
        return form, made._replace(shared=built.shared)

    def carry(self, spec: Spec, launch: Launch | None, to: cache.Cache) -> Binary:
        """Compile a kernel, and put it where another machine's cache can be filled from.

        Raises:
            CompileError, DialectError, ToolchainError, DeviceError: as `compile` does.
        """
        compiler = _found(nvrtc.find_nvrtc(), spec)

        def put(plain: bool) -> Binary:
            form, key, built, found = self._build(compiler, spec, launch, plain=plain)
            request = self._request(spec, launch, "", plain=plain)
            if not (to.put(key, _packed(built)) and to.put(request, _record(form, key, found))):
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
        """The key of all that decides what is built."""
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
        self, disk: cache.Cache, spec: Spec, launch: Launch | None, compiler: str | None,
        *, plain: bool = False,
    ) -> tuple[Form, Binary] | None:  # fmt: skip
        """What the cache has of a compiler, given what `_decisive` says of it."""
        if compiler is None:
            return None
        record = disk.get(self._request(spec, launch, compiler, plain=plain))
        if record is None:
            return None
        form, key, found = json.loads(record)
        packed = disk.get(key)
        if packed is None:
            return None
        self._portability.say(spec.kernel, [Note(*note) for note in found])
        return Form(*form), _unpacked(packed, self.architecture)

    def _build(
        self, compiler: nvrtc.Nvrtc, spec: Spec, launch: Launch | None, *, plain: bool = False,
        form: Form | None = None,
    ) -> tuple[Form, str, Binary, list[Note]]:  # fmt: skip
        """The form, the key in the cache, what was built, and what Apple refuses of it."""
        from .cuda_build import Build  # a kernel from the cache needs no text and no parser

        build = Build(spec, launch, plain=plain, form=form)
        found = build.notes()
        self._portability.say(spec.kernel, found)
        task = build.task(compiler, self.architecture)
        key = cache.digest("cuda", SCHEMA, header_digest(), *task.made_of)
        packed = cache.default().get_or_make(key, lambda: _packed(task.run()))
        built = _unpacked(packed, self.architecture)
        more = build.notes_of_memory(built.memory)
        self._portability.say(spec.kernel, more)
        return build.form, key, built, [*found, *more]

    def program(self, spec: Spec) -> CudaProgram:
        """The kernel on this GPU.

        Raises:
            DeviceError: there is no driver or no such GPU.
        """
        from .cuda_program import CudaProgram

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
    """What of a compiler decides what is built: for bodies in CUDA the headers, too."""
    if spec.kernel.language != "cuda":
        return identity
    return cache.digest(identity, nvrtc.headers_identity(path))


def _record(form: Form, key: str, found: list[Note]) -> bytes:
    return json.dumps([form, key, found]).encode()


def _packed(built: Binary) -> bytes:
    """What was built as bytes, for the cache."""
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
    """What NVRTC compiles for a GPU: its own machine code, or PTX if the GPU is newer."""
    known = _architectures()
    if not known or capability in known or capability < min(known):
        return f"sm_{capability}"
    return f"compute_{max(n for n in known if n < capability)}"


def _architectures() -> list[int]:
    """What NVRTC compiles for, from the disk cache where it is there: to load NVRTC takes 10 ms."""
    disk, likely = cache.default(), nvrtc.likely()
    key = cache.digest("nvrtc architectures", "" if likely is None else likely[1])
    found = None if likely is None else disk.get(key)
    if found is not None:
        return [int(n) for n in json.loads(found)]
    compiler = nvrtc.find_nvrtc()
    if compiler is None:
        return []
    known = compiler.architectures()
    if likely is not None and compiler.identity == likely[1]:
        disk.put(key, json.dumps(known).encode())
    return known
