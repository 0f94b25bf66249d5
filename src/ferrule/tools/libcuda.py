"""libcuda: loaded and called through ctypes, with its failures in words."""

from __future__ import annotations

import ctypes

from ..errors import DeviceError

_NAMES = ("libcuda.so.1", "libcuda.so")
REMEDY = (
    "Kernels for NVIDIA GPUs need NVIDIA's driver of CUDA 12.0 or newer; "
    "`nvidia-smi` shows what there is"
)

# CUresult of cuda.h: what the error says of a launch.
_OUT_OF_MEMORY, _NO_IMAGE, _OUT_OF_RESOURCES = 2, 209, 701
EARLIER = {
    700: "accessed memory outside its arrays",
    702: "ran longer than the system lets kernels run",
    710: "failed an assertion",
    714: "damaged its stack",
    715: "ran an instruction that the GPU does not have",
    716: "accessed memory at an address that is no multiple of the element's size",
    717: "accessed the wrong kind of memory",
    718: "jumped out of its code",
    719: "failed",
}
PRINTED = b"fr_printed"  # of include/cuda_print.h
COUNTED = b"fr_counted"  # of include/cuda_counted.h
KEPT = 8  # names of kernels that an error tells


class Attribute(ctypes.Structure):
    """CUlaunchAttribute, whose value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("sizes", ctypes.c_uint * 7),  # blocks, threads, dynamic shared memory
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    )


class State(ctypes.Structure):
    """What runtime/fastcall.c needs to launch by itself; `cuda_state` there."""

    _fields_ = (
        ("launch", ctypes.c_uint64),  # cuLaunchKernel, cuLaunchKernelEx, cuMemsetD8Async,
        ("launch_config", ctypes.c_uint64),  # three functions of contexts, one of recorded streams
        ("set_bytes", ctypes.c_uint64),
        ("get_current", ctypes.c_uint64),
        ("push", ctypes.c_uint64),
        ("pop", ctypes.c_uint64),
        ("exchange_mode", ctypes.c_uint64),
        ("forked", ctypes.c_int32),
        ("count", ctypes.c_uint32),  # launches so far
        ("last", ctypes.c_uint32 * KEPT),  # the kernels that were launched last, by number
        ("add_pending", ctypes.c_uint64),  # Py_AddPendingCall, and
        ("show_printed", ctypes.c_uint64),  # what shows what was printed (`tools.gpu_printing`)
    )


class Libcuda:
    """The library, and which kernels were launched last.

    Attributes:
        state: what launches need and leave behind.
    """

    def __init__(self) -> None:
        """Loads libcuda.

        Raises:
            DeviceError: there is no driver.
        """
        self._library = _load()
        self._names: list[str] = []  # of kernels, by their numbers
        self.state = State()

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, function)(*arguments)
        if status in EARLIER:
            raise self.broken(status, f"{function} of NVIDIA's driver failed")
        if status:
            name, message = self.explain(status)
            hint = (
                f" Another program may have filled the GPU. {REMEDY}."
                if status == _OUT_OF_MEMORY
                else " It was made for another GPU."
                if status == _NO_IMAGE
                else ""
            )
            raise DeviceError(f"{function} of NVIDIA's driver failed: {name}: {message}.{hint}")

    def variable(self, library: ctypes.c_void_p, image: bytes, name: bytes) -> int:
        """The address of a variable of a library, or 0 where its image has none."""
        if name not in image:
            return 0
        at, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuLibraryGetGlobal", ctypes.byref(at), ctypes.byref(size), library, name)
        return at.value

    def records(self, stream: int) -> bool:
        """Whether a stream's launches become part of a CUDA graph and do not run yet."""
        status = ctypes.c_int()
        ask = self._library.cuStreamIsCapturing
        refused = ask(ctypes.c_void_p(stream), ctypes.byref(status))  # while another is recorded
        return bool(refused or status.value)

    def wait(self, stream: int | None) -> None:
        """Waits for a stream of the current context, or for all of them."""
        if stream is None:
            self._call("cuCtxSynchronize")
        else:
            self._call("cuStreamSynchronize", ctypes.c_void_p(stream))

    def take(self, address: int, size: int, stream: int) -> bytes:
        """A copy of memory of the current context's GPU, when a stream has come so far."""
        data = ctypes.create_string_buffer(size)
        self._call(
            "cuMemcpyDtoHAsync_v2",
            data,
            ctypes.c_uint64(address),
            ctypes.c_size_t(size),
            ctypes.c_void_p(stream),
        )
        self.wait(stream)
        return data.raw

    def give(self, address: int, data: ctypes.Array[ctypes.c_char]) -> None:
        """Copies memory of the host to the current context's GPU, and waits for that."""
        if data:
            self._call(
                "cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data))
            )

    def clear(self, address: int, size: int, stream: int) -> None:
        """Fills memory of the current context's GPU with zeros, and waits for that."""
        self._call(
            "cuMemsetD8Async",
            ctypes.c_uint64(address),
            ctypes.c_ubyte(0),
            ctypes.c_size_t(size),
            ctypes.c_void_p(stream),
        )
        self.wait(stream)

    def failure(self, status: int, launch: str) -> DeviceError:
        """The error for a launch that ended with ``status``.

        Args:
            status: what `launch` returned.
            launch: the kernel and its launch, in words.
        """
        if status in EARLIER:  # the last kernel noted is the one that was refused
            return self.broken(status, f"{launch} was not launched", self.last()[:-1])
        name, message = self.explain(status)
        if status == _OUT_OF_RESOURCES:
            return DeviceError(
                f"{launch} was not launched: its threadgroup needs more registers or threadgroup "
                f"memory than the GPU has ({name}). Use a smaller threadgroup."
            )
        if status == _OUT_OF_MEMORY:
            return DeviceError(f"{launch} was not launched: the GPU has no memory left ({name}).")
        return DeviceError(f"{launch} was not launched: {name}: {message}.")

    def broken(self, status: int, refused: str, before: list[str] | None = None) -> DeviceError:
        """The error for what CUDA refused because of a kernel that was launched before.

        Args:
            status: a CUresult, or torch's code for the same, which has the same number.
            refused: what was refused, in words.
            before: the kernels that were launched last; `last`'s where None.
        """
        name, message = self.explain(status)
        shown = ", ".join(map(repr, self.last() if before is None else before))
        return DeviceError(
            f"{refused}: a kernel before it {EARLIER.get(status, message)} ({name}), after which "
            "CUDA refuses everything in this process. The last kernels launched, the newest last: "
            f"{shown or 'none by ferrule'}. To see which it was, run again with the environment "
            "variable CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer."
        )

    def last(self) -> list[str]:
        """The kernels that were launched last, the newest last."""
        count = self.state.count
        return [self._names[self.state.last[i % KEPT]] for i in range(max(0, count - KEPT), count)]

    def explain(self, status: int) -> tuple[str, str]:
        """The name of a CUresult, and what it says."""
        words = []
        for function in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            getattr(self._library, function)(status, ctypes.byref(text))
            words.append((text.value or b"an unknown error").decode("utf-8", "replace"))
        return words[0], words[1]


def _load() -> ctypes.CDLL:
    faults = []
    for name in _NAMES:
        try:
            return ctypes.CDLL(name)
        except OSError as fault:
            faults.append(str(fault))
    raise DeviceError(f"NVIDIA's driver was not found ({faults[0]}). {REMEDY}.")
