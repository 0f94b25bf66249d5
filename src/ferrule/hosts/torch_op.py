"""Ops in torch: registration, shapes while tracing, derivatives, vmap, autocast.

An op becomes ``ferrule::<name>_<digest>``: tensors in, tensors out. A twin without an Autograd
kernel, ``…_raw``, serves eager calls that record nothing, for a Python kernel on the Autograd key
costs more than the launch. Whatever traces or transforms a call of the twin finds the first in its
place, so graphs hold that alone.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Sequence
from operator import gt
from typing import Any, cast

import torch
from torch.autograd import forward_ad

from .. import batching, dtypes, fastcall, op_call, op_declaration, op_entries
from ..cuda_steps import CudaUnit
from ..dtypes import Dtype
from ..errors import FerruleError, FerruleWarning, KernelError, KernelTypeError, warn
from ..implementation import KernelBody, Runner
from ..op_declaration import Op
from ..op_launch import check_empty, launch, number
from ..op_settings import checked_tags
from ..op_unit import carry_out
from ..rule import Argument, Binding
from ..spec import Facts, Shape
from . import find, torch_calls
from . import torch as host
from .torch_autograd import alert_not_deterministic, autograd_kernel, is_atomic
from .torch_kernels import Arrays, autocast_kernel, random_kernel, traced_call, version_kernel
from .torch_sizes import SymInts, refuse_dynamic_templates

NAMESPACE = "ferrule"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_registered: dict[str, TorchOp] = {}
_registering = threading.RLock()  # registering an op may register those that its rules call
_sharded: set[Any] = set()  # the overloads that DTensor knows
_TORCH = host.TORCH
_KNOWN = host.KNOWN
_AUTOCAST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | (
    torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
)
_tracing = torch.compiler.is_compiling
_recording = torch.is_grad_enabled
_any_requires_grad = torch._C._any_requires_grad
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_function_modes = torch._C._len_torch_function_stack
_MOST_ARGUMENTS = 64  # of a schema in torch
# Keys that calls have where something traces or transforms them: modes and subclasses with
# __torch_dispatch__, torch.func, torch.jit.trace.
_WATCHERS = ("Python", "PythonTLSSnapshot", "FuncTorchDynamicLayerFrontMode", "Tracer")


class TorchOp:
    """An op, registered with torch.

    Attributes:
        op: the op.
        caller: the op whose calls these are; it may be given other rules later.
        overload: what graphs hold.
        raw: its twin for eager calls that record nothing.
        arguments: the inputs, their places, and of those that are numbers the Python type.
        traced, reads_when_traced: see `torch_kernels.traced_call`.
        atomic: its results may depend on the order of threads.
    """

    def __init__(self, op: Op) -> None:
        self.op = self.caller = op
        self.overload: Any
        self.raw: Any
        kinds = {"b": bool, "f": float, "i": int, "u": int}
        self.arguments = [
            (i, one, None if one.dims is not None else kinds.get(dtypes.BY_NAME[one.dtype].kind))
            for i, one in enumerate(op.rule.inputs)
        ]
        name = f"{op.name}_{op.digest}"
        with _registering:
            known = _registered.get(name)
            if known is None:
                self.op = op.as_is()  # what has this name stays what it is
                try:
                    self._register(name)
                except KernelError as error:  # arrays of other libraries can be given all the same
                    self.overload = self.raw = _refusal(str(error))
                _registered[name] = known = self
            else:
                known.op.complete(op)
        if known is not self:
            _warn_of_stale(known.op, op)
            self.op, self.overload, self.raw = known.op, known.overload, known.raw
            if op.counts is not known.op.counts:
                known.op.counts.update(op.counts)
            op.counts = known.op.counts  # it is the other that carries out calls
        else:  # a compiled graph that another process left behind may name ops of the rules alone
            for other in [one for rule in op.rules.values() for one in rule.ops()]:
                with contextlib.suppress(KernelError):
                    _ = other.torch_op
        self.atomic = is_atomic(self.op)
        self.look_for_dtensor = _dtensor_finder(self.op, self.overload)
        self.traced, self.reads_when_traced = traced_call(self.op, self.overload)
        if self.raw is not self.overload:
            self.look_for_dtensor()

    def _refuse_mixed(self, one: Argument, value: Any, values: Sequence[Any]) -> None:
        """Refuse an array of another library.

        Raises:
            KernelError: the value is one.
        """
        its = find(type(value))
        if its is not None:
            first = next(self.arguments[i][1] for i, v in enumerate(values) if _is_torchs(v))
            label = f"[op] input {one.name!r} of op {self.op.name!r}"
            raise op_call.mixed(label, its, first.name, host)

    def takes(self, values: Sequence[Any]) -> bool:
        """Whether a call with these inputs is torch's."""
        return any(map(_is_torchs, values))

    def __call__(self, *values: Any) -> Any:
        """A call; the overload's where a derivative may be wanted."""
        if self.raw is self.overload:  # torch cannot have it
            return self.overload()
        for i, one, kind in self.arguments:
            value = values[i]
            if kind is None:
                if (value is not None or not one.optional) and not _is_torchs(value):
                    if not _tracing():  # Dynamo cannot look at other libraries' types
                        self._refuse_mixed(one, value, values)
                    _dtype(self.op, one, value)  # says that it is none
            elif type(value) is not kind:
                values = (*values[:i], self._number(one, value), *values[i + 1 :])
        if _tracing():  # Dynamo cannot trace what follows
            self.look_for_dtensor()
            return (self.traced if self.reads_when_traced() else self.overload)(*values)
        if self.caller._plain is op_declaration.unknown:
            op_declaration.watch_torch()
            kinds = "".join(
                o.dtype[0] if o.dims is None else "o" if o.optional else "a"
                for _, o, _ in self.arguments
            )
            if not self.atomic:  # which asks what torch was told
                plain = fastcall.operator(self.raw._op, kinds)
                self.caller._plain = plain or op_declaration.unknown
        call = self.raw
        if (
            forward_ad._current_level >= 0
            or (_recording() and _any_requires_grad(*values))
            or _function_modes()
            or any(type(v) not in _PLAIN and _is_torchs(v) for v in values)
        ):
            call = self.overload
            self.look_for_dtensor()
        elif self.atomic and torch.are_deterministic_algorithms_enabled():
            alert_not_deterministic(self.op, self._device(values))
        try:
            return call(*values)
        except RuntimeError as by_torch:
            self.reraise(by_torch, values)
            raise

    def reraise(self, by_torch: RuntimeError, values: Sequence[Any]) -> None:
        """Raise what torch made a RuntimeError of, if it did, or what it says in fewer words."""
        if isinstance(by_torch, NotImplementedError):  # torch lists the backends that it has
            torch_calls.check_dense(self.op, values)
        error = op_entries.raised(by_torch)
        if error is None and isinstance(by_torch.__cause__, FerruleError):
            error = by_torch.__cause__  # DTensor's words around it
        if error is not None:
            raise error from None
        for one, value in zip(self.op.rule.inputs, values, strict=True):
            if type(value) in (int, float):
                number(self.op.name, one, value)
            if type(value) is int and value >= 2**63:
                raise KernelError(
                    f"[op] input {one.name!r} of op {self.op.name!r}: got {value}, but torch's ops "
                    f"take integers of at most {2**63 - 1}."
                ) from None

    def _number(self, one: Argument, value: Any) -> Any:
        """A number of another type than declared, where that is one all the same: torch itself
        takes a tensor for a number, whose derivative would be lost."""
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value
        if isinstance(value, torch.Tensor):
            raise KernelTypeError(
                f"[op] input {one.name!r} of op {self.op.name!r}: got a tensor, expected a Python "
                f"number: {one}; give x.item(), or declare an array: {one.name}[]:{one.dtype}."
            )
        return number(self.op.name, one, value)

    # -- registration ----------------------------------------------------------------------------

    def _register(self, name: str) -> None:
        op = self.op
        if all(one.dims is None or one.optional for one in op.rule.inputs):
            raise KernelError(
                f"[op] op {op.name!r} has no array among its inputs that is always there, so torch "
                "cannot tell on which device it runs."
            )
        signature = schema(op)
        mutated = [i for i, one in enumerate(op.rule.inputs) if one.mutable]
        known = checked_tags(op.name, op.tags)
        for each in (name, f"{name}_raw"):
            qualified = f"{NAMESPACE}::{each}"
            # Kernels read memory row by row; told so, inductor hands it over that way.
            tags = (torch.Tag.pt2_compliant_tag, *(getattr(torch.Tag, one) for one in known))
            _library.define(f"{each}{signature}", tags=tags)
            torch.library.register_fake(qualified, self.fake, lib=_library)
            overload = getattr(getattr(torch.ops, NAMESPACE), each).default
            if mutated:
                _library.impl(
                    each, version_kernel(op, overload, mutated), "ADInplaceOrView", with_keyset=True
                )
                for key in ("Conjugate", "Negative"):
                    _library.impl(each, self._lazy, key)
            if op.autocast is not None:
                for device in ("CPU", "CUDA", "MPS"):
                    kernel = autocast_kernel(overload, device, op.autocast, mutated)
                    _library.impl(each, kernel, f"Autocast{device}", with_keyset=True)
            if each is name:
                self.overload = overload
            else:
                self.raw = overload
        names = [name, f"{name}_raw"]
        done = torch_calls.implement(op, names)
        for key in {"CPU", "CUDA", "MPS"} - set(done):
            for each in names:
                _library.impl(each, self.run, key)
        for key in _WATCHERS:
            _library.impl(f"{name}_raw", lambda *values: self.overload(*values), key)
        kernel = autograd_kernel(op, self.overload)
        host.skip_in_dynamo([kernel.__code__])
        _library.impl(name, kernel, "Autograd", with_keyset=True)
        torch.library.register_vmap(f"{NAMESPACE}::{name}", self.vmap, lib=_library)
        if "nondeterministic_seeded" in known:
            _library.impl(name, random_kernel(op, self.overload), "FuncTorchVmapMode")

    # -- what it does ----------------------------------------------------------------------------

    def fake(self, *values: Any) -> Any:
        """Outputs without values, for tensors without values."""
        op = self.op
        shapes: list[Shape | None] = []
        kinds: list[str | None] = []
        for one, value in zip(op.rule.inputs, values, strict=True):
            if one.dims is None:
                if type(value) is int:  # its range; a symbol has none yet
                    number(op.name, one, value)
                shapes.append(())
                kinds.append(None)
            elif value is None:
                shapes.append(None)
                kinds.append(None)
            else:
                shapes.append(tuple(value.shape))
                kinds.append(_dtype(op, one, value).name)
        device = self._device(values)
        alert_not_deterministic(op, device)
        try:
            said = op.rule.bind(op.name, shapes, kinds, SymInts)
            outputs = [
                torch.empty(shape, dtype=_TORCH[kind], device=device)
                for shape, kind in op.rule.results(op.name, said, SymInts)
            ]
        except (KernelError, RuntimeError):  # torch's own of sizes below 0
            # The same again in numbers, where they are known: s33 says nothing to anyone.
            numbers = [None if shape is None else tuple(map(_hint, shape)) for shape in shapes]
            op.rule.results(op.name, op.rule.bind(op.name, numbers, kinds, SymInts), SymInts)
            raise
        if torch.compiler.is_exporting():
            refuse_dynamic_templates(op, said)
        if _packaging() and all(isinstance(one, Runner) for one in op.implementations):
            raise KernelError(
                f"[op] op {op.name!r} has nothing but Python functions, which a package of "
                "AOTInductor cannot hold; give the op a `metal` or `cuda` body, or save the "
                "program with ferrule.save, and load it where Python is."
            )
        return op_call.packed(outputs)

    def run(self, *values: Any) -> Any:
        """The outputs for tensors in memory."""
        op = self.op
        given, tensors = self._gathered(values)
        device = host.device_name(next(iter(tensors.values())))
        said, results = op_call.bound(op, given)
        if any(one.mutable for one in op.rule.inputs):
            values = self._apart(values, given, tensors)
        chosen = op_call.choose(op, device, said)
        queue = host.stream(None, device)
        if isinstance(chosen, Runner):
            return op_call.packed(self._run_function(chosen, values, said, results, device, queue))
        op.counts["Python path"] += 1  # kernels are launched in C, where it can
        copies = self._contiguous(chosen, given, tensors, device)
        outputs: list[torch.Tensor]
        if isinstance(chosen, CudaUnit):
            outputs = carry_out(
                op.name, op.rule, chosen, host,
                lambda one: _facts(one, _KNOWN[one.dtype], device), device, queue, said, given,
                results,
            )  # fmt: skip
        else:
            sent = chosen.sent(said)
            outputs = op_call.made_outputs(chosen, sent, results, host, device)
            facts = [_facts(one, _KNOWN[one.dtype], device) for one in outputs]
            if not device.startswith("mps"):
                look = op_call.written_by(op, host, outputs)
                launch(op.name, op.rule, chosen, sent, said, device, queue, given, facts, look)
            elif 0 in sent.grid:
                check_empty(op.name, op.rule, sent, facts)
            else:
                from . import torch_mps

                everything = {**given, **tensors, **copies}
                torch_mps.launch(op.name, op.rule, chosen, sent, said, everything, outputs)
        for one in op.rule.inputs:
            if one.mutable and one.name in copies:
                tensors[one.name].copy_(copies[one.name])
        return op_call.packed(outputs)

    def _lazy(self, *values: Any) -> Any:
        """What an op that writes in place does with lazy conjugates: torch would lose the write."""
        raise KernelError(
            f"[op] op {self.op.name!r} writes in place, and an input is the lazy conjugate or "
            "negative of its memory; give x.resolve_conj().resolve_neg()."
        )

    def _apart(
        self, values: Sequence[Any], given: dict[str, Facts | float | None],
        tensors: dict[str, torch.Tensor],
    ) -> tuple[Any, ...]:  # fmt: skip
        """The inputs, with copies of those that share memory with one that is written in place:
        what is read is what was there before. The facts and tensors become those of the copies."""
        op = self.op
        for name in op_call.check_apart(op, given):
            op.counts["copy"] += 1
            copy = tensors[name] = tensors[name].clone()
            given[name] = _facts(copy, _KNOWN[copy.dtype], host.device_name(copy))
        return tuple(
            tensors.get(one.name, value) for one, value in zip(op.rule.inputs, values, strict=True)
        )

    def _run_function(
        self, chosen: Runner, values: Sequence[Any], said: Binding,
        results: list[tuple[Shape, Dtype]], device: str, queue: int,
    ) -> list[torch.Tensor]:  # fmt: skip
        op = self.op
        inputs = [self._plain(chosen, value) for value in values]
        copies = [
            (value, given)
            for one, value, given in zip(op.rule.inputs, values, inputs, strict=True)
            if one.mutable and value is not None and value.data_ptr() != given.data_ptr()
        ]
        with on_device(device):
            found, own = as_kernel(
                op_call.run, op, chosen, device, queue, said, inputs, results, host, host.capturing
            )
        del inputs  # what still holds an output's memory now is someone else
        outputs = []
        for i, (one, expected) in enumerate(zip(op.rule.outputs, results, strict=True)):
            outputs.append(checked_output(op, chosen, one, found, i, expected, device, own))
        for value, given in copies:
            value.copy_(given)
        return outputs

    def _plain(self, chosen: Runner, value: Any) -> Any:
        """An input as a function gets it: no Parameter or other subclass, and, where it wants that,
        row-contiguous."""
        if not isinstance(value, torch.Tensor):
            return value
        if type(value) is not torch.Tensor or value.requires_grad:
            with torch._C.DisableTorchFunction():
                value = value.detach()  # NumPy reads no tensor that requires grad
        if chosen.contiguous and not _readable(value):
            self.op.counts["copy"] += 1
            value = host.contiguous(value)
        return value

    def _gathered(
        self, values: Sequence[Any]
    ) -> tuple[dict[str, Facts | float | None], dict[str, torch.Tensor]]:
        """The facts of a call's inputs, and its tensors."""
        op = self.op
        given: dict[str, Facts | float | None] = {}
        tensors: dict[str, torch.Tensor] = {}
        self._device(values)
        for one, value in zip(op.rule.inputs, values, strict=True):
            if one.dims is None:
                given[one.name] = number(op.name, one, value)
                continue
            if value is None:
                given[one.name] = None
                continue
            kind = _dtype(op, one, value)
            tensors[one.name] = value
            given[one.name] = _facts(value, kind, host.device_name(value))
        return given, tensors

    def _contiguous(
        self, chosen: KernelBody | CudaUnit, given: dict[str, Facts | float | None],
        tensors: dict[str, torch.Tensor], device: str,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Copies of the tensors that a kernel must have row by row; their facts become these's."""
        copies: dict[str, torch.Tensor] = {}
        for one in self.op.rule.inputs:
            fact = given[one.name]
            if one.dims is None or not isinstance(fact, Facts) or fact.row_contiguous:
                continue
            if chosen.contiguous or one.mutable:
                self.op.counts["copy"] += 1
                copy = copies[one.name] = host.contiguous(tensors[one.name])
                given[one.name] = _facts(copy, fact.dtype, device)
        return copies

    def _device(self, values: Sequence[Any]) -> torch.device:
        """Where all inputs are."""
        first: tuple[Argument, torch.Tensor] | None = None
        for one, value in zip(self.op.rule.inputs, values, strict=True):
            if not isinstance(value, torch.Tensor):
                continue
            if first is None:
                first = one, value
            elif value.device != first[1].device:
                raise KernelError(
                    f"[op] input {one.name!r} of op {self.op.name!r} is on {value.device}, but "
                    f"input {first[0].name!r} is on {first[1].device}; expected one device."
                )
        return cast(tuple[Argument, torch.Tensor], first)[1].device

    def vmap(self, info: Any, axes: Sequence[int | None], *values: Any) -> tuple[Any, Any]:
        """The op for a batch of calls, as torch.vmap wants it."""
        return batching.batched(self.op, info.batch_size, axes, values, self.overload, Arrays)


def _dtensor_finder(op: Op, overload: Any) -> Callable[[], None]:
    """What tells DTensor of an op, once that is imported."""

    def look() -> None:
        if overload not in _sharded and "torch.distributed.tensor" in sys.modules:
            from .torch_sharding import register

            _sharded.add(overload)
            register(op, overload)

    look._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as of Op._look_for_torch
    return look


def _is_torchs(value: object) -> bool:
    """Whether it is a tensor, or stands for one, as the proxies of torch.fx do."""
    return isinstance(value, torch.Tensor) or hasattr(type(value), "__torch_function__")


def _refusal(words: str) -> Callable[..., Any]:
    """What stands in for an op that torch cannot have."""

    def refuse(*_: Any) -> Any:
        raise KernelError(words)

    return refuse


def schema(op: Op) -> str:
    """``(Tensor x, Tensor? bias, float eps) -> Tensor``: what torch knows of an op."""
    for what, many in (("inputs", op.rule.inputs), ("outputs", op.rule.outputs)):
        if len(many) > _MOST_ARGUMENTS:
            raise KernelError(
                f"[op] op {op.name!r} has {len(many)} {what}; torch's ops have {_MOST_ARGUMENTS} "
                "at most."
            )
    parts = []
    for i, one in enumerate(op.rule.inputs):
        if one.dims is None:
            kind = dtypes.BY_NAME[one.dtype].kind
            if kind == "c":
                raise KernelError(
                    f"[op] input {one.name!r} of op {op.name!r}: torch's ops take no complex "
                    f"numbers; declare an array, {one.name}[]:{one.dtype}."
                )
            words = {"b": "bool", "f": "float"}.get(kind, "SymInt")
        else:
            words = f"Tensor(a{i}!)" if one.mutable else "Tensor"
            words += "?" * one.optional
        parts.append(f"{words} {one.name}")
    outputs = ["Tensor"] * len(op.rule.outputs)
    result = outputs[0] if len(outputs) == 1 else f"({', '.join(outputs)})"
    return f"({', '.join(parts)}) -> {result}"


def _dtype(op: Op, one: Argument, value: torch.Tensor) -> Dtype:
    if not isinstance(value, torch.Tensor):
        raise KernelTypeError(
            f"[op] input {one.name!r} of op {op.name!r}: got "
            f"{'None' if value is None else f'a {type(value).__name__}'}, expected a tensor: {one}."
        )
    found = _KNOWN.get(value.dtype)
    if found is None:
        known = ", ".join(d.name for d in dtypes.ALL)
        raise KernelTypeError(
            f"[op] input {one.name!r} of op {op.name!r} has dtype {value.dtype}, expected one of "
            f"{known}."
        )
    return found


# Called by torch, where Dynamo may be looking: from a frame that it gave up on, for one.
host.skip_in_dynamo([f.__code__ for f in (TorchOp.run, TorchOp.fake, TorchOp.vmap)])


def _warn_of_stale(first: Op, second: Op) -> None:
    """Warn where two ops of one digest differ: a `version` that was not changed with the code."""
    for one, other in zip(first.implementations, second.implementations, strict=True):
        if not isinstance(one, Runner) or not isinstance(other, Runner):
            continue
        if None not in (one.content, other.content) and one.content != other.content:
            warn(
                f"op {first.name!r} has been declared before with the same `version`, but other "
                f"code in {other.name}; torch goes on running the first one. Change the version.",
                FerruleWarning,
            )


def as_kernel(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function whose insides torch must not see, as it sees nothing of a kernel in C++:
    below autograd, views included, autocast, and all that takes the place of torch's functions."""
    with (
        torch._C.DisableTorchFunction(),
        torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS),
        torch._C._AutoDispatchBelowADInplaceOrView(),
    ):
        return function(*args)


def on_device(device: str) -> Any:
    """Make the GPU current on which an op runs: a function launches on the current one."""
    if device.startswith("cuda") and torch.cuda.current_device() != torch.device(device).index:
        return torch.cuda.device(device)
    return contextlib.nullcontext()


def checked_output(
    op: Op, runner: Runner, one: Argument, found: list[Any], i: int,
    expected: tuple[Shape, Dtype], device: str, own: bool,
) -> torch.Tensor:  # fmt: skip
    """What a function gave for an output, in memory that nobody else has, as graphs count on.

    Args:
        op, runner, one: which output of which op, and who gave it.
        found, i: all that it gave, and which of these. Nothing else may hold it.
        expected: the shape and dtype that were declared.
        device: where it has to be.
        own: it is what was made for the function to write to.

    Raises:
        KernelError: it is something else than was declared; says what.
    """
    if not isinstance(found[i], torch.Tensor):
        what = f"a {type(found[i]).__name__}"
        raise op_call.wrong_output(op, runner, one, what, expected, device)
    at = host.device_name(found[i])
    got = found[i].layout, tuple(found[i].shape), _KNOWN.get(found[i].dtype), at
    if got != (torch.strided, *expected, device):
        layout = "" if got[0] is torch.strided else f" and layout {got[0]}"
        what = f"{found[i].dtype} of shape {got[1]} on {got[3]}{layout}"
        what = what.removeprefix("torch.")
        raise op_call.wrong_output(op, runner, one, what, expected, device)
    if own:
        return cast(torch.Tensor, found[i])
    value, copied = new_output(found, i)
    if copied:
        op.counts["output copy"] += 1
    return value


def new_output(found: list[Any], i: int) -> tuple[torch.Tensor, bool]:
    """A tensor that a function gave, row-contiguous and in memory that nobody else has.

    Returns:
        It, and whether it had to be copied for that.
    """
    shared = any(map(gt, _holders(found, i), _alone()))
    # Memory that is not torch's may be anyone's: NumPy's, another framework's.
    shared = shared or not found[i].untyped_storage().resizable()
    with torch._C.DisableTorchFunction():
        value: torch.Tensor = found[i].detach()
    if shared or not _readable(value):
        value = value.resolve_conj().resolve_neg()
        return value.clone(memory_format=torch.contiguous_format), True
    return value, False


def _holders(found: list[Any], i: int) -> tuple[int, int]:
    """How many have a tensor, and how many its memory."""
    memory = found[i].untyped_storage()._cdata
    return sys.getrefcount(found[i]), 0 if _use_count is None else int(_use_count(memory))


_use_count = getattr(torch._C, "_storage_Use_Count", None)


@functools.cache
def _alone() -> tuple[int, int]:
    """`_holders` of what only a list has. Asked inside a kernel, where a new tensor is a plain one,
    whatever transforms the call is in."""
    return _holders([torch.empty(1, device="cpu")], 0)


def _readable(value: torch.Tensor) -> bool:
    """Whether its memory holds its elements, row by row."""
    return value.is_contiguous() and not value.is_conj() and not value.is_neg()


def _packaging() -> bool:
    """Whether AOTInductor is making a package."""
    inductor = sys.modules.get("torch._inductor.virtualized")
    return inductor is not None and bool(inductor.V.aot_compilation)


def _hint(size: Any) -> Any:
    """The number that a symbolic size has for now, where it has one."""
    hint = size.node.hint if isinstance(size, torch.SymInt) else size
    return size if hint is None else hint


def _facts(tensor: torch.Tensor, kind: Dtype, device: str) -> Facts:
    return Facts(kind, tuple(tensor.shape), tensor.stride(), tensor.data_ptr(), device)


def registered(name: str) -> TorchOp | None:
    """The op that torch has under ``ferrule::<name>``."""
    return _registered.get(name)
