"""Ops in torch: registration, shapes while tracing, derivatives, vmap, autocast.

An op becomes ``ferrule::<name>_<digest>``: tensors in, tensors out. A twin without an Autograd
kernel, ``…_raw``, serves eager calls that record nothing, for a Python kernel on the Autograd key
costs more than the launch. Whatever traces or transforms a call of the twin finds the first in its
place, so graphs hold that alone.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.autograd import forward_ad

from ... import dtypes
from ...dtypes import Dtype
from ...errors import FerruleError, FerruleWarning, KernelError, KernelTypeError, warn
from ...kernels import entries
from ...operators import batching
from ...operators import call as op_call
from ...operators import entries as op_entries
from ...operators.bodies import KernelBody
from ...operators.declared import checked_tags
from ...operators.launch import Arguments, bound, check_empty, number
from ...operators.op import Op
from ...operators.runners import Runner
from ...operators.unit_steps import CudaUnit
from ...rules.argument import Argument
from ...rules.expression import DEVICE_NUMBERS
from ...spec import Facts
from ...tools import fastcall
from .. import imported
from ..protocol import find
from . import arrays as host
from . import calls as torch_calls
from . import unit_calls
from .autograd import (
    alert_not_deterministic,
    autograd_function,
    autograd_kernel,
    is_atomic,
    recorder,
)
from .functions import run_function
from .kernels import TorchArrays, autocast_kernel, random_kernel, traced_call, version_kernel
from .known_calls import KnownCalls, known_calls, letters
from .schema import schema
from .sizes import SymInts, hint, in_numbers, refuse_dynamic_templates

NAMESPACE = "ferrule"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_registered: dict[str, TorchOp] = {}
_registering = threading.RLock()  # registering an op may register those that its rules call
_sharded: set[Any] = set()  # the overloads that DTensor knows
_TORCH = host.TORCH
_KNOWN = host.KNOWN
_tracing = torch.compiler.is_compiling
_recording = torch.is_grad_enabled
_any_requires_grad = torch._C._any_requires_grad
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_function_modes = torch._C._len_torch_function_stack
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
        traced, reads_when_traced: see `kernels.traced_call`.
        atomic: its results may depend on the order of threads.
        known: what is known of calls that C can make.
        function: the autograd.Function that records calls.
    """

    def __init__(self, op: Op) -> None:
        self.op = self.caller = op
        self.overload: Any
        self.raw: Any
        self.known: KnownCalls | None = None
        self.function: Any = None
        python_types = {"b": bool, "f": float, "i": int, "u": int}
        self.arguments = [
            (i, p, None if p.dims is not None else python_types.get(dtypes.BY_NAME[p.dtype].kind))
            for i, p in enumerate(op.rule.inputs)
        ]
        name = f"{op.name}_{op.digest}"
        with _registering:
            existing = _registered.get(name)
            if existing is None:
                self.op = op.as_is()  # what has this name stays what it is
                try:
                    self._register(name)
                except KernelError as error:  # arrays of other libraries can be given all the same
                    self.overload = self.raw = _refusal(str(error))
                _registered[name] = existing = self
            else:
                existing.op.complete(op)
        if existing is not self:
            _warn_of_stale(existing.op, op)
            self.op, self.overload, self.raw = existing.op, existing.overload, existing.raw
            self.known, self.function = existing.known, existing.function
            if op.counts is not existing.op.counts:
                existing.op.counts.update(op.counts)
            op.counts = existing.op.counts  # it is the other that runs calls
        else:  # a compiled graph that another process left behind may name ops of the rules alone
            for other in [rule_op for rule in op.rules.values() for rule_op in rule.ops()]:
                with contextlib.suppress(KernelError):
                    _ = other.torch_op
        self.atomic = is_atomic(self.op)
        self.look_for_dtensor = _dtensor_finder(self.op, self.overload)
        self.traced, self.reads_when_traced = traced_call(self.op, self.overload)
        if self.raw is not self.overload:
            self.look_for_dtensor()

    def _refuse_mixed(self, parameter: Argument, value: Any, values: Sequence[Any]) -> None:
        """Refuse an array of another library.

        Raises:
            KernelError: the value is such an array.
        """
        other_host = find(type(value))
        if other_host is not None:
            first = next(self.arguments[i][1] for i, v in enumerate(values) if _is_tensor_like(v))
            label = f"[op] input {parameter.name!r} of op {self.op.name!r}"
            raise op_call.mixed(label, other_host, first.name, host)

    def takes(self, values: Sequence[Any]) -> bool:
        """Whether a call with these inputs is torch's."""
        return any(map(_is_tensor_like, values))

    def __call__(self, *values: Any) -> Any:
        """Call the op; the overload where a derivative may be wanted."""
        if self.raw is self.overload:  # torch cannot have it
            return self.overload()
        for i, parameter, number_type in self.arguments:
            value = values[i]
            if number_type is None:
                if isinstance(value, torch.Tensor) or (value is None and parameter.optional):
                    continue
                if not _is_tensor_like(value):
                    if not _tracing():  # Dynamo cannot look at other libraries' types
                        self._refuse_mixed(parameter, value, values)
                    _input_dtype(self.op, parameter, value)  # says that it is none
            elif type(value) is not number_type:
                values = (*values[:i], self._number(parameter, value), *values[i + 1 :])
        if _tracing():  # Dynamo cannot trace what follows
            self.look_for_dtensor()
            return (self.traced if self.reads_when_traced() else self.overload)(*values)
        if torch.Tensor not in self.caller.callers:
            imported.watch()
            self.caller.callers |= dict.fromkeys(_PLAIN, self._plain_caller())
        call = self.raw
        if (
            forward_ad._current_level >= 0
            or (_recording() and _any_requires_grad(*values))
            or _function_modes()
            or any(type(v) not in _PLAIN and _is_tensor_like(v) for v in values)
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

    def _plain_caller(self) -> Callable[..., Any]:
        """What makes calls in C that nothing watches or transforms."""
        refused = torch.are_deterministic_algorithms_enabled if self.atomic else None
        kinds, raw = letters(self.op), self.raw._op
        if self.op.autocast is not None:  # the dispatcher sees to that
            return fastcall.operator(raw, kinds, refused) or op_entries.not_in_c
        known = None if self.known is None else self.known.entries
        apply = recorder(self.function, raw, kinds, known)
        return fastcall.operator(raw, kinds, refused, known, apply) or op_entries.not_in_c

    def reraise(self, by_torch: RuntimeError, values: Sequence[Any]) -> None:
        """Raise the error that torch wrapped in a RuntimeError, or say torch's own more plainly."""
        if isinstance(by_torch, NotImplementedError):  # torch lists the backends that it has
            torch_calls.check_dense(self.op, values)
        error = entries.raised(by_torch)
        if error is None and isinstance(by_torch.__cause__, FerruleError):
            error = by_torch.__cause__  # DTensor's words around it
        if error is not None:
            raise error from None
        for parameter, value in zip(self.op.rule.inputs, values, strict=True):
            if type(value) in (int, float):
                number(self.op.name, parameter, value)
            if type(value) is int and value >= 2**63:
                raise KernelError(
                    f"[op] input {parameter.name!r} of op {self.op.name!r}: got {value}, but "
                    f"torch's ops take integers of at most {2**63 - 1}."
                ) from None

    def _number(self, parameter: Argument, value: Any) -> Any:
        """Convert a number of another type than declared. A tensor is refused: torch itself takes
        one for a number, and its derivative would be lost."""
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value
        traced_int = torch.compiler.is_compiling() and type(value) is int
        if traced_int and dtypes.BY_NAME[parameter.dtype].kind == "f":
            return float(value)  # it may stand for a dynamic size
        if isinstance(value, torch.Tensor):
            raise KernelTypeError(
                f"[op] input {parameter.name!r} of op {self.op.name!r}: got a tensor, expected a "
                f"Python number: {parameter}; give x.item(), or declare an array: "
                f"{parameter.name}[]:{parameter.dtype}."
            )
        return number(self.op.name, parameter, value)

    # -- registration ----------------------------------------------------------------------------

    def _register(self, name: str) -> None:
        op = self.op
        if all(parameter.dims is None or parameter.optional for parameter in op.rule.inputs):
            raise KernelError(
                f"[op] op {op.name!r} has no array among its inputs that is always there, so torch "
                "cannot tell on which device it runs."
            )
        signature = schema(op)
        mutated = [i for i, parameter in enumerate(op.rule.inputs) if parameter.mutable]
        tag_names = checked_tags(op.name, op.tags)
        for operator_name in (name, f"{name}_raw"):
            qualified = f"{NAMESPACE}::{operator_name}"
            # Kernels read memory row by row; told so, inductor hands it over that way.
            tags = (torch.Tag.pt2_compliant_tag, *(getattr(torch.Tag, tag) for tag in tag_names))
            _library.define(f"{operator_name}{signature}", tags=tags)
            torch.library.register_fake(qualified, self.fake, lib=_library)
            overload = getattr(getattr(torch.ops, NAMESPACE), operator_name).default
            if mutated:
                kernel = version_kernel(op, overload, mutated)
                _library.impl(operator_name, kernel, "ADInplaceOrView", with_keyset=True)
                for key in ("Conjugate", "Negative"):
                    _library.impl(operator_name, self._refuse_lazy, key)
            if op.autocast is not None:
                for device in ("CPU", "CUDA", "MPS"):
                    kernel = autocast_kernel(overload, device, op.autocast, mutated)
                    _library.impl(operator_name, kernel, f"Autocast{device}", with_keyset=True)
            if operator_name is name:
                self.overload = overload
            else:
                self.raw = overload
        names = [name, f"{name}_raw"]
        native_keys = torch_calls.implement(op, names)
        for key in {"CPU", "CUDA", "MPS"} - set(native_keys):
            for operator_name in names:
                _library.impl(operator_name, self.run, key)
        for key in _WATCHERS:
            _library.impl(f"{name}_raw", lambda *values: self.overload(*values), key)
        self.known = known_calls(op)
        self.function = autograd_function(op, self.overload)
        kernel = autograd_kernel(op, self.overload, self.function)
        host.skip_in_dynamo([kernel.__code__])
        _library.impl(name, kernel, "Autograd", with_keyset=True)
        torch.library.register_vmap(f"{NAMESPACE}::{name}", self.vmap, lib=_library)
        if "nondeterministic_seeded" in tag_names:
            _library.impl(name, random_kernel(op, self.overload), "FuncTorchVmapMode")

    # -- kernels that torch calls ----------------------------------------------------------------

    def fake(self, *values: Any) -> Any:
        """Make fake outputs for fake inputs: shapes and dtypes without values."""
        try:
            return self._fake(*values)
        except FerruleError as error:
            if self.op.explain is not None:
                self.op.explain(error, *map(in_numbers, values))
            raise

    def _fake(self, *values: Any) -> Any:
        op = self.op
        arguments: Arguments = {}
        for parameter, value in zip(op.rule.inputs, values, strict=True):
            if parameter.dims is None:
                if type(value) is int:  # its range; a symbol has none yet
                    number(op.name, parameter, value)
            elif value is not None:
                dtype = _input_dtype(op, parameter, value)
                value = Facts(dtype, tuple(value.shape), (), 0, "")
            arguments[parameter.name] = value
        device = self._device(values)
        alert_not_deterministic(op, device)
        try:
            call = bound(op, "", arguments, SymInts)
            outputs = [
                torch.empty(shape, dtype=_TORCH[dtype.name], device=device)
                for shape, dtype in call.results
            ]
        except (KernelError, RuntimeError):  # torch's own of sizes below 0
            # The same again in numbers, where they are known: s33 says nothing to anyone.
            for name, fact in arguments.items():
                arguments[name] = (
                    fact._replace(shape=tuple(map(hint, fact.shape)))
                    if isinstance(fact, Facts)
                    else hint(fact)
                )
            bound(op, "", arguments, SymInts)
            raise
        if torch.compiler.is_exporting():
            kind = "metal" if device.type == "mps" else device.type
            known = {":device": kind, **dict.fromkeys(DEVICE_NUMBERS, 1)}  # which do not matter
            refuse_dynamic_templates(op, call.binding.on(lambda: known))
        if _packaging() and all(isinstance(body, Runner) for body in op.implementations):
            raise KernelError(
                f"[op] op {op.name!r} has nothing but Python functions, which a package of "
                "AOTInductor cannot hold; give the op a `metal` or `cuda` body, or save the "
                "program with ferrule.save, and load it where Python is."
            )
        return op_call.packed(outputs)

    def run(self, *values: Any) -> Any:
        """Run the op on tensors in memory, and return its outputs."""
        op = self.op
        if self.known is not None:
            outputs = self.known.again(*values)
            if outputs is not NotImplemented:
                return outputs
        key = unit_calls.key(values)
        if (call_before := op.bound.get(key)) is not None:
            return call_before.run(op, values)
        tensors: dict[str, torch.Tensor] = {}

        def facts_of(parameter: Argument, value: torch.Tensor) -> Facts:
            tensors[parameter.name] = value
            return _facts(value, _KNOWN.get(value.dtype) or _input_dtype(op, parameter, value))

        self._device(values)
        arguments = op_call.gathered(op, values, facts_of)
        device = host.device_name(next(iter(tensors.values())))
        call = bound(op, device, arguments)
        if op.in_place:
            shared = op_call.check_apart(op, call.arguments)
            op_call.replace_by_copies(call, shared, tensors, torch.clone, _facts)
        body = op_call.choose(call)
        queue = host.stream(None, device)
        if isinstance(body, Runner):
            inputs = [tensors.get(name, value) for name, value in call.arguments.items()]
            outputs = run_function(call, body, inputs, queue)
            if self.known is not None:
                self.known.remember(call, body, values, outputs)
            return op_call.packed(outputs)
        op.counts["Python path"] += 1  # kernels are launched in C, where it can
        strided = op_call.strided(call, body.contiguous)
        op_call.replace_by_copies(call, strided, tensors, host.contiguous, _facts)
        if device.startswith("mps") and isinstance(body, KernelBody):
            from . import mps as torch_mps

            config = body.launch_for(call.binding)
            outputs = op_call.made_outputs(call, body, config, host)
            if 0 in config.grid:
                check_empty(op.name, op.rule, config, list(map(_facts, outputs)))
            else:
                by_name = {**call.arguments, **tensors}
                torch_mps.launch(op.name, op.rule, body, config, call.binding, by_name, outputs)
        else:
            outputs = op_call.run_body(call, body, host, _facts, queue, host)
            if isinstance(body, CudaUnit) and not strided and not op.in_place:
                unit_calls.remember(key, call, body, values, outputs, self.known)
        for value, copy in op_call.copies_of_written(op, values, tensors):
            value.copy_(copy)
        return op_call.packed(outputs)

    def _refuse_lazy(self, *values: Any) -> Any:
        """Refuse lazy conjugates where an op writes in place: torch would lose the write."""
        raise KernelError(
            f"[op] op {self.op.name!r} writes in place, and an input is the lazy conjugate or "
            "negative of its memory; give x.resolve_conj().resolve_neg()."
        )

    def _device(self, values: Sequence[Any]) -> torch.device:
        """The one device that all inputs are on."""
        first: tuple[Argument, torch.Tensor] | None = None
        for parameter, value in zip(self.op.rule.inputs, values, strict=True):
            if not isinstance(value, torch.Tensor):
                continue
            if first is None:
                first = parameter, value
            elif value.device != first[1].device:
                raise KernelError(
                    f"[op] input {parameter.name!r} of op {self.op.name!r} is on {value.device}, "
                    f"but input {first[0].name!r} is on {first[1].device}; expected one device."
                )
        return cast(tuple[Argument, torch.Tensor], first)[1].device

    def vmap(self, info: Any, axes: Sequence[int | None], *values: Any) -> tuple[Any, Any]:
        """The op for a batch of calls, as torch.vmap wants it."""
        return batching.batched(self.op, info.batch_size, axes, values, self.overload, TorchArrays)


def _dtensor_finder(op: Op, overload: Any) -> Callable[[], None]:
    """A function that registers an op with DTensor, once DTensor is imported."""

    def look() -> None:
        if overload not in _sharded and "torch.distributed.tensor" in sys.modules:
            from .sharding import register

            _sharded.add(overload)
            register(op, overload)

    look._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as of Op._register
    return look


def _is_tensor_like(value: object) -> bool:
    """Whether it is a tensor, or stands for one, as the proxies of torch.fx do."""
    return isinstance(value, torch.Tensor) or hasattr(type(value), "__torch_function__")


def _refusal(words: str) -> Callable[..., Any]:
    """A stand-in for an op that torch cannot have: it raises the reason."""

    def refuse(*_: Any) -> Any:
        raise KernelError(words)

    return refuse


def _input_dtype(op: Op, parameter: Argument, value: torch.Tensor) -> Dtype:
    if not isinstance(value, torch.Tensor):
        raise KernelTypeError(
            f"[op] input {parameter.name!r} of op {op.name!r}: got "
            f"{'None' if value is None else f'a {type(value).__name__}'}, expected a tensor: "
            f"{parameter}."
        )
    dtype = _KNOWN.get(value.dtype)
    if dtype is None:
        names = ", ".join(d.name for d in dtypes.ALL)
        raise KernelTypeError(
            f"[op] input {parameter.name!r} of op {op.name!r} has dtype {value.dtype}, expected "
            f"one of {names}."
        )
    return dtype


# Called by torch, where Dynamo may be looking: from a frame that it gave up on, for one.
host.skip_in_dynamo([f.__code__ for f in (TorchOp.run, TorchOp.fake, TorchOp._fake, TorchOp.vmap)])


def _warn_of_stale(first: Op, second: Op) -> None:
    """Warn where two ops of one digest differ: a `version` that was not changed with the code."""
    pairs: list[tuple[Any, Any, str]] = []
    for body, other in zip(first.implementations, second.implementations, strict=True):
        if isinstance(body, Runner) and isinstance(other, Runner):
            pairs.append((body, other, other.name))
            for old, new in zip(body.prepared, other.prepared, strict=False):
                pairs.append((old, new, f"`prepared` {new.name!r}"))
    for kind, rule in second.rules.items():
        if rule.version is not None and kind in first.rules:
            pairs.append((first.rules[kind], rule, f"`def_{kind}`"))
    for earlier, later, where in pairs:
        if None not in (earlier.content, later.content) and earlier.content != later.content:
            warn(
                f"op {first.name!r} has been declared before with the same `version`, but other "
                f"code in {where}; torch goes on running the first one. Change the version.",
                FerruleWarning,
            )


def _packaging() -> bool:
    """Whether AOTInductor is making a package."""
    inductor = sys.modules.get("torch._inductor.virtualized")
    return inductor is not None and bool(inductor.V.aot_compilation)


def _facts(tensor: torch.Tensor, dtype: Dtype | None = None) -> Facts:
    """The facts of a tensor whose dtype is known, whatever traces or records it."""
    return Facts(
        dtype or _KNOWN[tensor.dtype],
        tuple(tensor.shape),
        tensor.stride(),
        tensor.data_ptr(),
        host.device_name(tensor),
    )


def registered(name: str) -> TorchOp | None:
    """The op that torch has under ``ferrule::<name>``."""
    return _registered.get(name)
