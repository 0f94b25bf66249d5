"""The torch host: dense tensors on the CPU and on CUDA devices, called eagerly."""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from types import CodeType
from typing import Any, cast

import numpy as np
import torch
from torch.autograd import forward_ad

from ...dtypes import ALL, BY_NAME, Dtype
from ...errors import DeviceError, FerruleWarning, KernelError, KernelTypeError, warn
from ...spec import Facts, Shape
from ...tools import fastcall
from ..imported import eager_codes
from ..protocol import Identity, Maker, all_bits_zero, unknown_dtype

name = "torch"
allocation_errors: tuple[type[Exception], ...] = (RuntimeError, TypeError, OverflowError)
TORCH: dict[str, torch.dtype] = {
    d.name: getattr(torch, d.name)
    for d in ALL
    if hasattr(torch, d.name)  # float8_e8m0fnu came with torch 2.7
}
KNOWN: dict[torch.dtype, Dtype] = {kind: BY_NAME[name] for name, kind in TORCH.items()}
_PLAIN = torch.Tensor.__torch_dispatch__
_fast = fastcall.library()
# What inductor's programs ask; `torch.cuda.current_stream` takes several times as long. None where
# torch has no CUDA.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_names: dict[torch.device, str] = {}
_TRACERS = ("ProxyTorchDispatchMode", "FakeTensorMode", "FunctionalTensorMode")


def facts(tensor: torch.Tensor) -> Facts | None:
    """The facts of ``tensor``; None where it is the lazy conjugate or negative of its memory."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise KernelError(
            "requires grad, but a kernel call has no derivative. Declare the kernel with "
            "ferrule.op, which takes one by `def_vjp`, or wrap the call in a "
            "torch.autograd.Function; without a derivative, call it under torch.no_grad() or "
            "give x.detach()."
        )
    _refuse_tracing(tensor)
    dtype = KNOWN.get(tensor.dtype)
    if dtype is None:
        raise unknown_dtype(tensor.dtype)
    if tensor.is_conj() or tensor.is_neg():
        return None
    try:
        pointer = tensor.data_ptr()
    except RuntimeError as error:
        raise _no_data(tensor) from error
    if not pointer and tensor.numel():
        raise _no_data(tensor)
    return Facts(dtype, tuple(tensor.shape), tensor.stride(), pointer, device_name(tensor))


def device_name(tensor: torch.Tensor) -> str:
    """``"cpu"``, ``"cuda:0"`` …"""
    device = _names.get(tensor.device)
    if device is None:
        device = _names[tensor.device] = str(tensor.device)
    return device


def _refuse_tracing(tensor: torch.Tensor) -> None:
    """Refuse a tensor that is not dense, or has no values of its own."""
    cls = type(tensor)
    if cls is not torch.Tensor and cls.__torch_dispatch__ is not _PLAIN:
        raise KernelError(
            f"is a {cls.__module__}.{cls.__qualname__}, which holds no plain memory. A "
            "kernel call takes dense tensors with values, outside of export, fake-tensor "
            "and make_fx tracing."
        )
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        description = (
            f"quantised ({tensor.dtype})"
            if tensor.is_quantized
            else "nested"
            if tensor.is_nested
            else f"of layout {tensor.layout}"
        )
        raise KernelError(f"is {description}; expected a dense tensor, such as x.to_dense().")
    if tensor.is_meta:
        raise KernelError("is a meta tensor, which has no values; expected one on a real device.")
    if torch._C._get_tracing_state() is not None:
        raise KernelError(
            "is traced by torch.jit.trace, which would keep this call's result as a constant; "
            "call the kernel outside of the traced function."
        )
    if torch._C._len_torch_dispatch_stack():
        from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

        for mode in _get_current_dispatch_mode_stack():
            if type(mode).__name__ in _TRACERS:
                raise KernelError(
                    f"is traced ({type(mode).__name__}), which would keep this call's result as "
                    "a constant; call the kernel eagerly."
                )
    if forward_ad._current_level >= 0 and _tangent(tensor) is not None:
        raise KernelError(
            "has a forward-mode tangent, but a kernel call has no derivative; give "
            "torch.autograd.forward_ad.unpack_dual(x).primal."
        )


def _tangent(tensor: torch.Tensor) -> object:
    pair: Any = cast(Any, forward_ad).unpack_dual(tensor)
    return pair.tangent


def _no_data(tensor: torch.Tensor) -> KernelError:
    return KernelError(
        "has no memory that a kernel could read: it stands for a value inside torch.func.grad, "
        "vmap, jvp or functionalize, or its storage was freed. Call the kernel outside of them."
    )


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """A row-contiguous tensor with the values resolved."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def identity(tensor: torch.Tensor) -> Identity | None:
    """By what a tensor is known again; None of inference tensors, which have no version."""
    if tensor.is_inference():
        return None
    _watch_optimizers()
    storage = tensor.untyped_storage()  # the same object as long as there is the memory
    place = (
        tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(),
        tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip
    version = storage.data_ptr(), tensor._version, getattr(storage, _STEPS, 0)
    return Identity(id(storage), place, version, storage)


_STEPS = "_ferrule_steps"  # of a storage: how often an optimizer wrote to it without a word


@lru_cache(maxsize=1)
def _watch_optimizers() -> None:
    """Have fused optimizers, which leave the versions of what they write to, tell of each step."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"] if group.get("fused") else ():
                storage = parameter.untyped_storage()
                setattr(storage, _STEPS, getattr(storage, _STEPS, 0) + 1)

    skip_in_dynamo([note.__code__])
    register_optimizer_step_post_hook(note)


def wait(device: str) -> None:
    """Wait for what is on the current stream of a GPU."""
    if _on_cuda(device):
        torch.cuda.current_stream(device).synchronize()


def outside_pools(value: Any, device: str) -> Any:
    """What was made on a GPU, in memory that is no pool's of CUDA graphs.

    While graphs of compiled code warm up, which they do on a stream of their own, what their thread
    allocates is their pool's, of which nobody else may keep anything. So what was made on any
    stream but the default one is copied there, by another thread. Of pools that the user has chosen
    (`torch.cuda.use_mem_pool`) nothing is known.
    """
    if "torch._inductor.cudagraph_trees" not in sys.modules:
        return value
    stream, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    if stream == default:
        return value
    stream.synchronize()
    with ThreadPoolExecutor(1) as thread:
        copies = thread.submit(_copies, value).result()
    default.synchronize()
    return copies


def _copies(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_copies, value))
    return value.clone() if isinstance(value, torch.Tensor) else value


# Beyond this the C library gives freed memory back to the system. Then NumPy asks for huge pages,
# which torch does not: an output of 64 MiB costs 16,000 page faults less. It also knows that fresh
# pages are zero.
_LARGE = 32 << 20  # bytes


def _large(shape: Shape, dtype: Dtype, *, zero: bool) -> torch.Tensor | None:
    """A new tensor on the CPU, aligned like torch's own; None where it is small, or too large.

    It is no view, but its storage cannot be resized.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _LARGE:
        return None
    torch_dtype = TORCH[dtype.name]
    try:
        memory = (np.zeros if zero else np.empty)(size + 64, np.uint8)
    except (MemoryError, ValueError):
        return None  # torch says it in its own words
    start = -memory.ctypes.data % 64
    storage = torch.from_numpy(memory[start : start + size]).untyped_storage()
    return torch.empty(0, dtype=torch_dtype).set_(storage, 0, shape)


def empty(shape: Shape, dtype: Dtype, device: str) -> torch.Tensor:
    """A new tensor of ``shape`` on ``device``."""
    tensor = _large(shape, dtype, zero=False) if device == "cpu" else None
    if tensor is None:
        tensor = torch.empty(shape, dtype=TORCH[dtype.name], device=device)
        _guard(tensor, device)
    return tensor


def full(shape: Shape, value: float, dtype: Dtype, device: str) -> torch.Tensor:
    """A new tensor of ``shape`` on ``device`` filled with ``value``."""
    torch_dtype = TORCH[dtype.name]
    zero = all_bits_zero(value)
    tensor = _large(shape, dtype, zero=zero) if device == "cpu" else None
    if tensor is not None:
        return tensor if zero else tensor.fill_(value)
    if zero and (device == "cpu" or _on_cuda(device)):
        tensor = torch.empty(shape, dtype=torch_dtype, device=device)
        if _plain_memory(tensor):
            _zero(tensor, device)
            _guard(tensor, device)
            return tensor
    tensor = torch.full(shape, value, dtype=torch_dtype, device=device)
    _guard(tensor, device)
    return tensor


@lru_cache(maxsize=1)
def slack_is_known() -> bool:
    """Whether torch's memory on the CPU is of glibc's malloc, which tells by how much it rounded an
    allocation up: that much lies behind an output, and is looked at after a launch.

    torch can be built with another allocator, whose memory has other things there. So a number of
    allocations must all have behind them what malloc puts there, or there is no looking.
    """
    if _fast is None or "CS_GNU_LIBC_VERSION" not in os.confstr_names:
        return False
    if not (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc"):
        return False
    storages = [torch.UntypedStorage(1 + 16 * n * n) for n in range(1, 40)]
    for storage in storages:
        address = storage.data_ptr()
        if address % 4096 < 16:
            continue  # what lies before it may not be there
        header = ctypes.c_uint64.from_address(address - 8).value
        if not 7 <= (header & ~7) - 8 - storage.nbytes() <= 256:
            return False
    return True


def _guard(tensor: torch.Tensor, device: str) -> None:
    """Put a canary behind a new tensor on the CPU, in what its memory was rounded up by."""
    if device == "cpu" and slack_is_known() and _plain_memory(tensor):
        _fast.slack_put(tensor.data_ptr(), tensor.nbytes)  # type: ignore[union-attr]


def outside(tensor: torch.Tensor) -> int:
    """How many bytes behind a tensor, which was made here, were written to."""
    if tensor.device.type != "cpu" or not slack_is_known() or not _plain_memory(tensor):
        return 0
    count: int = _fast.slack_outside(tensor.data_ptr(), tensor.nbytes)  # type: ignore[union-attr]
    return count


def _on_cuda(device: str) -> bool:
    return device.startswith("cuda")


def _plain_memory(tensor: torch.Tensor) -> bool:
    """Whether a new tensor has memory that can be filled; some of torch's modes give it none."""
    if type(tensor) is not torch.Tensor:
        return False
    try:
        pointer: int = tensor.data_ptr()
    except RuntimeError:
        return False
    return pointer != 0 or tensor.numel() == 0


def _zero(tensor: torch.Tensor, device: str) -> None:
    """Fill a new tensor with zeros; on a GPU, on the current stream.

    Not by torch: where it fills on several threads, these go on waiting for work, on the CPUs that
    the kernel's threads need. On a GPU it loads a kernel for its first fill, which takes 6 to 9 ms.
    """
    if device == "cpu":
        ctypes.memset(tensor.data_ptr(), 0, tensor.nbytes)
        return
    from ...tools.driver import driver  # calls on the CPU do without

    try:
        driver().zero(_ordinal(device), tensor.data_ptr(), tensor.nbytes, stream(None, device))
    except DeviceError as error:
        raise DeviceError(f"cannot be filled: {error}") from error


def _ordinal(device: str) -> int:
    return int(device.partition(":")[2])


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The elements, in NumPy's memory; bfloat16 and 8-bit floats as float32."""
    on_cpu = tensor.detach().resolve_conj().resolve_neg().cpu()
    narrow = on_cpu.dtype == torch.bfloat16 or (on_cpu.is_floating_point() and on_cpu.itemsize == 1)
    array: np.ndarray[Any, Any] = (on_cpu.float() if narrow else on_cpu).numpy()
    return array


def from_numpy(values: np.ndarray[Any, Any], dtype: Dtype, device: str) -> torch.Tensor:
    """A new tensor of these elements on ``device``."""
    return torch.tensor(values).to(TORCH[dtype.name]).to(device)


def maker(number: float | None, dtype: Dtype, device: str) -> Maker:
    """How an output is made again."""
    on_cpu = device == "cpu"
    zeroed = number is not None and all_bits_zero(number) and (on_cpu or _on_cuda(device))
    guarded = on_cpu and slack_is_known()
    if number is not None and not zeroed:
        return Maker(full, (number, dtype, device), guarded=guarded)
    keywords: dict[str, Any] = {"dtype": TORCH[dtype.name]}
    if not on_cpu:
        keywords["device"] = torch.device(device)
        return Maker(torch.empty, (), keywords, zeroed)
    # Without a device, which takes torch longer: C sees to it that outputs are where inputs are.
    if number is None:
        return Maker(torch.empty, (dtype, device), keywords, zeroed, guarded, large=empty)
    return Maker(torch.empty, (number, dtype, device), keywords, zeroed, guarded, large=full)


def finish(what: str, inputs: Sequence[Any], outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """``outputs`` as they are."""
    return outputs


def device() -> str:
    """torch's default device."""
    return str(torch.empty(0).device)


def stream(requested: object, device: str) -> int:
    """The address of the current CUDA stream of ``device``; 0 on the CPU.

    ``requested`` is None or the current stream: memory of the outputs is tied to that.
    """
    if _on_cuda(device) and torch.cuda._is_in_bad_fork():
        from ...tools.driver import FORKED

        raise DeviceError(f"cannot be found: {FORKED}")
    if requested is None and _raw_stream is not None and _on_cuda(device):
        return int(_raw_stream(int(device.partition(":")[2] or 0)))
    current = torch.cuda.current_stream(device) if _on_cuda(device) else None
    if requested is not None and requested != current:
        if current is not None and isinstance(requested, torch.cuda.Stream):
            raise KernelError(
                f"is {requested!r}, which is not the current stream of {device}; call the kernel "
                "inside `with torch.cuda.stream(stream):`."
            )
        raise KernelTypeError(
            f"is {requested!r} of type {type(requested).__name__}, expected None for tensors on "
            f"{device}."
        )
    return 0 if current is None else int(current.cuda_stream)


def capturing(device: str) -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return _on_cuda(device) and torch.cuda.is_current_stream_capturing()


def alert_not_deterministic(tag: str, what: str, device: str) -> None:
    """Warn or raise, as torch's nondeterministic operators do, where torch was told to use none.

    Args:
        tag, what: what has atomics: ``"[op]"``, ``"op 'name'"``.
        device: what it runs on.

    Raises:
        KernelError: ``torch.use_deterministic_algorithms(True)`` holds, without ``warn_only``; on
            a CPU with one thread the order of atomics is always the same.
    """
    from ...tools.binding import get_threads

    cpu = device == "cpu"
    if not torch.are_deterministic_algorithms_enabled() or (cpu and get_threads() == 1):
        return
    words = (
        f"{what} does not have a deterministic implementation, for its kernel has atomics, but you "
        "set 'torch.use_deterministic_algorithms(True)'"
    )
    if torch.is_deterministic_algorithms_warn_only_enabled():
        warn(f"{words}, warn_only=True.", FerruleWarning)
        return
    raise KernelError(
        f"{tag} {words}. Turn it off around this {what.partition(' ')[0]}, or set warn_only=True"
        + ("; on the CPU ferrule.set_threads(1) is deterministic." if cpu else ".")
    )


def skip_in_dynamo(codes: Iterable[CodeType]) -> None:
    """Ask torch.compile not to trace into frames of these codes, and what they call.

    A private function of torch: without it, torch.compile also gives right results, but tries
    to compile ferrule's own Python first.
    """
    try:
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        for code in codes:
            eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))
    except (ImportError, AttributeError, TypeError):
        pass


skip_in_dynamo(eager_codes)


def _remember_calls() -> None:
    """Let calls with torch's own tensors be remembered, where this torch has what that takes."""
    api = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    parts = [
        getattr(torch._C, name, None)
        for name in (
            "_get_tracing_state",
            "_len_torch_dispatch_stack",
            "_len_torch_function_stack",
            "is_grad_enabled",
        )
    ]
    if _fast is not None and api is not None and None not in parts:
        tensor_types = (torch.Tensor, torch.nn.Parameter)
        _fast.register_torch(tensor_types, torch.Size, api, *parts, forward_ad.__dict__)


_remember_calls()
