"""CUDA units on NVIDIA GPUs: found in the cache or compiled, loaded, launched step by step."""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Sequence

from ... import cache
from ...errors import DeviceError, ToolchainError
from ...source.cuda import unit as cuda_unit
from ...tools import cublas, nvrtc
from ...tools.binding import runtime
from ...tools.driver import Driver, LoadedFunction, driver
from ...unit import Fill, Product, Run, Step, TensorMap, UnitSpec
from .. import protocol
from ..digests import generator_digest, header_digest, packed, unpacked
from ..protocol import UnitBinary
from .program import packed_arguments

SCHEMA = "1"  # raised when the same text, options and compiler would run differently
_FIRST_SPECIFIC = 90  # the first sm_ that has one with an "a"
_CLUSTERS = (9, 0)  # the first compute capability that has them
_MOST_ARGUMENTS = 64  # FR_MOST_STEP_ARGUMENTS of runtime/cuda_units.h


def built(spec: UnitSpec, architecture: str) -> UnitBinary:
    """The machine code of a unit, from the disk cache where it is there.

    Raises:
        CompileError: NVRTC refused the text, or a step does not fit its function.
        ToolchainError: there is no NVRTC, or CUDA's headers are missing.
        DeviceError: NVRTC does not know the architecture.
    """
    text, disk = cuda_unit.text(spec), cache.default()
    number = architecture.removeprefix("sm_")
    if spec.specific and number.isdecimal() and int(number) >= _FIRST_SPECIFIC:
        architecture += "a"
    likely = nvrtc.likely()  # to load NVRTC takes 10 ms, which what is in the cache need not
    if likely is not None:
        cached = disk.get(_key(spec, text, architecture, *likely))
        if cached is not None:
            return _binary(cached, architecture, text)
    compiler = nvrtc.find_nvrtc()
    if compiler is None:
        raise ToolchainError(
            f"unit {spec.name!r}: NVRTC, the compiler for CUDA, was not found; "
            "`pip install nvidia-cuda-nvrtc` installs it."
        )
    compiler.check_architecture(f"unit {spec.name!r}", architecture)
    headers = nvrtc.find_headers(compiler)

    def make() -> bytes:
        from .unit_build import build  # what is in the cache needs none of it

        binary = build(spec, text, compiler, headers, architecture)
        return packed([binary.log, binary.names], binary.payload)

    key = _key(spec, text, architecture, compiler.path, compiler.identity)
    return _binary(disk.get_or_make(key, make), architecture, text)


def _key(spec: UnitSpec, text: str, architecture: str, path: str, identity: str) -> str:
    """The key of a unit's machine code."""
    described = json.dumps([text, spec.headers, spec.options, spec.functions])
    libraries = nvrtc.headers_identity(path)
    digests = header_digest(), generator_digest(), identity, libraries
    return cache.digest("cuda unit binary", SCHEMA, *digests, architecture, described)


def _binary(data: bytes, architecture: str, text: str) -> UnitBinary:
    known, payload = unpacked(data)
    return UnitBinary(payload, architecture, text, *known)


class _Step(ctypes.Structure):
    """`cuda_unit_step` of runtime/cuda_units.h."""

    _fields_ = (
        ("function", ctypes.c_void_p), ("blocks", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32 * 3), ("cluster", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32), ("number", ctypes.c_uint32), ("pdl", ctypes.c_uint32),
        ("arguments", ctypes.c_uint32), ("word", ctypes.POINTER(ctypes.c_int32)),
        ("given", ctypes.POINTER(ctypes.c_uint64)),
        ("product", ctypes.POINTER(cublas.KnownProduct)),
    )  # fmt: skip


class CudaUnitKernels:
    """Steps of a unit's calls that differ in words alone: addresses, and numbers.

    Attributes:
        state, context, steps, count, begin: what `begin` of runtime/cuda_units.h takes, as
            addresses, and its own.
    """

    def __init__(
        self, of: Driver, ordinal: int, context: int, labels: list[str], steps: list[_Step]
    ) -> None:
        self._driver, self._ordinal, self._labels = of, ordinal, labels
        self._steps, self._kept = (_Step * len(steps))(*steps), steps  # to which these point
        self._begin = runtime().fr_start_unit
        self.state, self.context = ctypes.addressof(of.state), context
        self.steps, self.count = ctypes.addressof(self._steps), len(steps)
        self.begin = ctypes.cast(self._begin, ctypes.c_void_p).value or 0

    def start(self, words: Sequence[int], stream: int) -> None:
        """Start them on a stream, one after the other; waits for nothing.

        Args:
            words: the bits of each address and number.
            stream: a CUstream as an integer; 0 is the GPU's default stream.

        Raises:
            DeviceError: the GPU refused one, or an earlier kernel broke the process's CUDA.
        """
        self._driver.check_ordinal(self._ordinal)
        given, tried = (ctypes.c_uint64 * len(words))(*words), ctypes.c_int()
        status = self._begin(
            self.state, self.context, self.steps, self.count, given, stream, ctypes.byref(tried)
        )
        if status:
            raise self.failure(status, tried.value)

    def failure(self, status: int, tried: int) -> DeviceError:
        """The error for a status, after so many steps had been tried; raises where the process was
        forked."""
        self._driver.check_ordinal(self._ordinal)
        at = max(tried - 1, 0)
        if tried and not self._steps[at].function:
            return cublas.cublas().refused(status, self._labels[at])
        return self._driver.failure(status, self._labels[at])


class CudaUnitProgram:
    """A unit on one GPU; compiled and loaded when it is first launched."""

    def __init__(self, spec: UnitSpec, architecture: str, ordinal: int) -> None:
        self._spec, self._architecture, self._ordinal = spec, architecture, ordinal
        self._driver = driver()
        self._numbers = {f: self._driver.number(f"{spec.name}: {f}") for f in spec.functions}
        self._functions: dict[str, LoadedFunction] | None = None
        self._printing: list[LoadedFunction] = []  # one, whose buffer is that of all, or none
        self._lock = threading.Lock()

    def launch(self, steps: Sequence[Step], stream: int) -> None:
        """Start the steps on a stream, one after the other; waits for nothing.

        Nothing is started unless all steps can be.

        Args:
            steps: what is done, with the addresses of this call's arrays.
            stream: a CUstream as an integer; 0 is the GPU's default stream.

        Raises:
            CompileError, ToolchainError: as `built` does.
            DeviceError: the GPU cannot run a step, or an earlier kernel broke the process's CUDA.
            ToolchainError: a step is a matrix product, and there is no cuBLAS.
        """
        self._driver.check_ordinal(self._ordinal)
        if protocol.watcher is not None:
            protocol.watcher.note(f"not checked: unit {self._spec.name!r} on cuda:{self._ordinal}.")
        functions = self._loaded()
        for step in steps:
            if isinstance(step, Run):
                self._check(step, functions[step.function])
            elif isinstance(step, Product):
                cublas.cublas()
        for step in [self._encoded(step) for step in steps]:
            if isinstance(step, Run):
                self._run(step, functions[step.function], stream)
            elif isinstance(step, Fill):
                self._driver.fill(self._ordinal, step.address, step.times, step.pattern, stream)
            elif isinstance(step, Product):
                self._multiply(step, stream)
            else:
                self._driver.copy(self._ordinal, step.to, step.source, step.size, stream)
        for function in self._printing:
            from ...tools import gpu_printing

            gpu_printing.show(self._driver, function, self._spec.name, stream)

    def kernels(
        self, steps: Sequence[Run | Product], words: Sequence[Sequence[int]]
    ) -> CudaUnitKernels | None:
        """What starts these steps again and again; raises as `launch` does.

        Args:
            steps: kernels' launches, and products with their `factors`.
            words: for each argument of each kernel the number of the word that it is, or -1 where
                it is the same in all calls; of each product those of a, b, the product, the
                workspace, and the factors, or -1.

        Returns:
            None where a kernel has more arguments than that takes or prints, or cuBLAS refuses a
            product.
        """
        self._driver.check_ordinal(self._ordinal)
        if max(map(len, words)) > _MOST_ARGUMENTS:
            return None
        functions = self._loaded()
        if self._printing:
            return None
        for step in steps:
            if isinstance(step, Run):
                self._check(step, functions[step.function])
        known = [self._known(step, of) for step, of in zip(steps, words, strict=True)]
        if None in known:
            return None
        labels = [
            self._label(step) if isinstance(step, Run) else self._name_of(step) for step in steps
        ]
        context = self._driver.context(self._ordinal)
        of_all = [step for step in known if step is not None]
        return CudaUnitKernels(self._driver, self._ordinal, context, labels, of_all)

    def _known(self, step: Run | Product, words: Sequence[int]) -> _Step | None:
        """A step, but for its words."""
        if isinstance(step, Product):
            library = cublas.cublas()
            product = library.known(self._driver, self._ordinal, _product(step), words)
            return None if product is None else _Step(product=ctypes.pointer(product))
        function = self._loaded()[step.function]
        given = [a if isinstance(a, bytes) else b"" for a in step.arguments]
        return _Step(
            function.handle, step.blocks, step.block, step.cluster or (0, 0, 0), step.shared,
            self._numbers[step.function],
            step.pdl and self._driver.programmatic(self._ordinal), len(words),
            (ctypes.c_int32 * len(words))(*words),
            (ctypes.c_uint64 * len(words))(*[int.from_bytes(a, "little") for a in given]),
        )  # fmt: skip

    def _encoded(self, step: Step) -> Step:
        """A step whose arguments are bytes all."""
        if not isinstance(step, Run) or not any(isinstance(a, TensorMap) for a in step.arguments):
            return step
        if not self._driver.programmatic(self._ordinal):
            gpu = self._driver.name(self._ordinal)
            raise DeviceError(
                f"{self._label(step)}: {gpu} has no tensor maps, which came with compute "
                "capability 9.0. Give the op an implementation without them."
            )
        encode = self._driver.tensor_map
        arguments = [encode(a) if isinstance(a, TensorMap) else a for a in step.arguments]
        return step._replace(arguments=tuple(arguments))

    def _multiply(self, step: Product, stream: int) -> None:
        library = cublas.cublas()
        status = library.start(self._driver, self._ordinal, _product(step), stream)
        if status:
            raise library.refused(status, self._name_of(step))

    def _name_of(self, step: Product) -> str:
        sizes = f"{step.m}x{step.k} @ {step.k}x{step.n}, {step.batch} of them"
        return f"the product {step.label} of unit {self._spec.name!r} ({sizes}, {step.dtype})"

    def _loaded(self) -> dict[str, LoadedFunction]:
        with self._lock:
            if self._functions is None:
                binary = built(self._spec, self._architecture)
                image = binary.payload
                self._functions = self._driver.load_all(self._ordinal, image, binary.names)
                self._printing = [f for f in self._functions.values() if f.printed][:1]
                for function in self._printing:
                    from ...tools import gpu_printing

                    gpu_printing.know(self._driver, function, self._spec.name)
            return self._functions

    def _label(self, step: Run) -> str:
        cluster = f", cluster {step.cluster}" if step.cluster else ""
        return (
            f"step {step.function!r} of unit {self._spec.name!r} (blocks {step.blocks}, block "
            f"{step.block}{cluster}, cuda:{self._ordinal})"
        )

    def _check(self, step: Run, function: LoadedFunction) -> None:
        """Refuse what this GPU cannot launch, and let it launch what needs its leave."""
        threads = step.block[0] * step.block[1] * step.block[2]
        if threads > function.most_threads:
            raise DeviceError(
                f"{self._label(step)}: a block of {threads} threads needs more registers than the "
                f"GPU has, or than __launch_bounds__ says; {function.most_threads} threads fit."
            )
        if step.cluster is not None and self._driver.capability(self._ordinal) < _CLUSTERS:
            raise DeviceError(
                f"{self._label(step)}: {self._driver.name(self._ordinal)} has no clusters, which "
                "came with compute capability 9.0. Give the op an implementation without them."
            )
        if step.shared > function.allowed:
            most = self._driver.shared_memory(self._ordinal)
            if step.shared + function.static > most:
                own = f" and {function.static} of the function's own" if function.static else ""
                raise DeviceError(
                    f"{self._label(step)}: shared_memory={step.shared} bytes{own}, but a block of "
                    f"cuda:{self._ordinal} ({self._driver.name(self._ordinal)}) has {most} at most."
                )
            self._driver.allow_shared(function, step.shared)

    def _run(self, step: Run, function: LoadedFunction, stream: int) -> None:
        block = packed_arguments([a for a in step.arguments if isinstance(a, bytes)])
        status = self._driver.launch(
            function,
            self._numbers[step.function],
            step.blocks,
            step.block,
            ctypes.addressof(block),
            stream,
            step.shared,
            step.cluster,
            step.pdl,
        )
        if status:
            raise self._driver.failure(status, self._label(step))


def _product(step: Product) -> cublas.Product:
    """A product as cuBLAS takes it."""
    return cublas.Product(
        *(step.addresses or (0,) * 5), step.m, step.n, step.k, step.batch, step.step_a, step.step_b,
        step.transpose_a, step.transpose_b, cublas.TYPES[step.dtype],
        cublas.TYPES[step.out_dtype], cublas.TF32 if step.tf32 else cublas.FLOAT32,
        *step.factors,
    )  # fmt: skip
