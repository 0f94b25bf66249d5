"""Ops in torch: registration, shapes while tracing, derivatives, vmap, autocast.

An op becomes ``ferrule::<name>_<digest>``: tensors in, tensors out. A twin without an Autograd
kernel, ``…_raw``, serves eager calls that record nothing, for a Python kernel on the Autograd key
costs more than the launch. Whatever traces or transforms a call of the twin finds the first in its
place, so graphs hold that alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.autograd import forward_ad

from .. import batching, dtypes, fastcall, op_call, op_declaration
from ..arguments import fill_value
from ..cuda_steps import CudaUnit
from ..dtypes import Dtype
from ..errors import KernelError, KernelTypeError
from ..expression import Expression, Ints
from ..implementation import KernelBody, Runner
from ..op_declaration import Op
from ..op_launch import launch, number
from ..op_unit import carry_out
from ..rule import Argument, Binding
from ..spec import Facts, Shape, is_row_contiguous
from . import torch as host
from . import torch_calls
from .torch_autograd import register_autograd

NAMESPACE = "ferrule"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_registered: dict[str, TorchOp] = {}
_TORCH = host.TORCH
_KNOWN = host.KNOWN
_tracing = torch.compiler.is_compiling
_recording = torch.is_grad_enabled
_any_requires_grad = torch._C._any_requires_grad
# Keys that calls have where something traces or transforms them: modes and subclasses with
# __torch_dispatch__, torch.func, torch.jit.trace.
_WATCHERS = ("Python", "PythonTLSSnapshot", "FuncTorchDynamicLayerFrontMode", "Tracer")


class SymInts(Ints):
    """How symbolic sizes are compared and chosen from, without a guard."""

    minimum = staticmethod(torch.sym_min)
    maximum = staticmethod(torch.sym_max)

    @staticmethod
    def holds(condition: Any) -> bool:
        """Whether what a rule states is so; what is not known becomes an assertion."""
        if isinstance(condition, torch.SymBool):
            from torch.fx.experimental.symbolic_shapes import expect_true

            return bool(expect_true(condition))
        return bool(condition)

    @staticmethod
    def choose(condition: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """``then()`` where the condition holds, else ``otherwise()``."""
        if not isinstance(condition, torch.SymBool):
            return then() if condition else otherwise()
        values = [
            torch.SymInt(condition.node.wrap_int(one)) if type(one) is int else one
            for one in (then(), otherwise())
        ]  # sym_ite wants two of one type
        return torch.sym_ite(condition, *values)

    @staticmethod
    def both(a: Any, b: Callable[[], Any]) -> Any:
        """``a and b()``."""
        if not isinstance(a, torch.SymBool):
            return b() if a else False
        return a & b()

    @staticmethod
    def either(a: Any, b: Callable[[], Any]) -> Any:
        """``a or b()``."""
        if not isinstance(a, torch.SymBool):
            return True if a else b()
        return a | b()

    @staticmethod
    def negated(a: Any) -> Any:
        """``not a``."""
        return torch.sym_not(a)


class TorchOp:
    """An op, registered with torch.

    Attributes:
        op: the op.
        caller: the op whose calls these are; it may be given other rules later.
        overload: what graphs hold.
        raw: its twin for eager calls that record nothing.
    """

    def __init__(self, op: Op) -> None:
        self.op = self.caller = op
        self.overload: Any
        self.raw: Any
        name = f"{op.name}_{op.digest}"
        known = _registered.get(name)
        if known is None:
            self.op = op.as_is()  # what has this name stays what it is
            try:
                self._register(name)
            except KernelError as error:  # arrays of other libraries can be given all the same
                self.overload = self.raw = _refusal(str(error))
            _registered[name] = self
        else:
            known.op.complete(op)
            self.op, self.overload, self.raw = known.op, known.overload, known.raw

    def takes(self, values: Sequence[Any]) -> bool:
        """Whether a call with these inputs is torch's."""
        return any(isinstance(value, torch.Tensor) for value in values)

    def __call__(self, *values: Any) -> Any:
        """A call; the overload's where a derivative may be wanted."""
        if _tracing():  # first, for Dynamo cannot trace what follows
            return self.overload(*values)
        if self.caller._plain is op_declaration.unknown:
            op_declaration.watch_torch()
            self.caller._plain = (
                fastcall.operator(getattr(self.raw, "_op", self.raw)) or op_declaration.unknown
            )
        forward = forward_ad._current_level >= 0
        recorded = forward or (_recording() and _any_requires_grad(*values))
        call = self.overload if recorded else self.raw
        try:
            return call(*values)
        except RuntimeError as by_torch:
            self.reraise(by_torch)
            raise

    def reraise(self, by_torch: RuntimeError) -> None:
        """Raise what torch made a RuntimeError of, if it did."""
        error = torch_calls.raised(by_torch)
        if error is not None:
            raise error from None

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
        for each in (name, f"{name}_raw"):
            qualified = f"{NAMESPACE}::{each}"
            # Kernels read memory row by row; told so, inductor hands it over that way.
            tags = (torch.Tag.pt2_compliant_tag,)
            _library.define(f"{each}{signature}", tags=tags)
            torch.library.register_fake(qualified, self.fake, lib=_library)
            overload = getattr(getattr(torch.ops, NAMESPACE), each).default
            if mutated:
                _library.impl(
                    each, _versioned(overload, mutated), "ADInplaceOrView", with_keyset=True
                )
            if op.autocast is not None:
                for device in ("CPU", "CUDA"):
                    kernel = _autocast(overload, device, op.autocast)
                    _library.impl(each, kernel, f"Autocast{device}", with_keyset=True)
            if each is name:
                self.overload = overload
            else:
                self.raw = overload
        names = [name, f"{name}_raw"]
        done = torch_calls.implement(op, names)
        for key in {"CPU", "CUDA"} - set(done):
            for each in names:
                _library.impl(each, self.run, key)
        for key in _WATCHERS:
            _library.impl(f"{name}_raw", lambda *values: self.overload(*values), key)
        register_autograd(_library, op, self.overload)
        torch.library.register_vmap(f"{NAMESPACE}::{name}", self.vmap, lib=_library)

    # -- what it does ----------------------------------------------------------------------------

    def fake(self, *values: Any) -> Any:
        """Outputs without values, for tensors without values."""
        op = self.op
        shapes: list[Shape | None] = []
        kinds: list[str | None] = []
        like: torch.Tensor | None = None
        for one, value in zip(op.rule.inputs, values, strict=True):
            if one.dims is None:
                shapes.append(())
                kinds.append(None)
            elif value is None:
                shapes.append(None)
                kinds.append(None)
            else:
                shapes.append(tuple(value.shape))
                kinds.append(_dtype(op, one, value).name)
                like = value if like is None else like
                self._same_device(one, value, like)
        said = op.rule.bind(op.name, shapes, kinds, SymInts)
        results = op.rule.results(op.name, said, SymInts)
        if torch.compiler.is_exporting():
            _refuse_dynamic_templates(op, said)
        device = cast(torch.Tensor, like).device
        return op_call.packed(
            [torch.empty(shape, dtype=_TORCH[kind], device=device) for shape, kind in results]
        )

    def run(self, *values: Any) -> Any:
        """The outputs for tensors in memory."""
        op = self.op
        given, tensors, copies = self._gathered(values)
        like = next(iter(tensors.values()))
        device = host.device_name(like)
        said, results = op_call.bound(op, given)
        chosen = op_call.choose(op, device, said)
        queue = host.stream(None, device)
        outputs: list[torch.Tensor]
        if isinstance(chosen, Runner):
            outputs = self._run_function(chosen, values, said, results, device, queue)
        elif isinstance(chosen, CudaUnit):
            outputs = carry_out(
                op.name, op.rule, chosen, host,
                lambda one: _facts(one, _KNOWN[one.dtype], device), device, queue, said, given,
                results,
            )  # fmt: skip
            self._write_back(tensors, copies)
        else:
            sent = chosen.sent(said)
            outputs = []
            for i, (shape, kind) in enumerate(results):
                if sent.fill is None:
                    outputs.append(host.empty(shape, kind, device))
                else:
                    value = fill_value(chosen.kernel, i, sent.fill, kind)
                    outputs.append(host.full(shape, value, kind, device))
            facts = [_facts(one, _KNOWN[one.dtype], device) for one in outputs]
            launch(op.name, op.rule, chosen, sent, said, device, queue, given, facts)
            self._write_back(tensors, copies)
        return op_call.packed(outputs)

    def _write_back(self, tensors: dict[str, Any], copies: dict[str, Any]) -> None:
        """Bring what was written to copies back to where it belongs."""
        for one in self.op.rule.inputs:
            if one.mutable and one.name in copies:
                tensors[one.name].copy_(copies[one.name])

    def _run_function(
        self, chosen: Runner, values: Sequence[Any], said: Binding,
        results: list[tuple[Shape, Dtype]], device: str, queue: int,
    ) -> list[torch.Tensor]:  # fmt: skip
        op = self.op
        made = [host.empty(shape, kind, device) for shape, kind in results]
        found = op_call.run(op, chosen, device, queue, said, values, made)
        owned = {_storage(value) for value in values if isinstance(value, torch.Tensor)}
        outputs = []
        for one, value, expected in zip(op.rule.outputs, found, results, strict=True):
            shape, kind = expected
            if not isinstance(value, torch.Tensor):
                raise op_call.wrong_output(op, one, f"a {type(value).__name__}", expected, device)
            if (tuple(value.shape), _KNOWN.get(value.dtype), host.device_name(value)) != (
                shape, kind, device,
            ):  # fmt: skip
                what = f"{value.dtype} of shape {tuple(value.shape)} on {value.device}"
                raise op_call.wrong_output(op, one, what.removeprefix("torch."), expected, device)
            if not value.is_contiguous() or _storage(value) in owned:
                # Graphs count on outputs that are new, and lie as the declaration says.
                op.counts["output copy"] += 1
                value = value.clone(memory_format=torch.contiguous_format)
            owned.add(_storage(value))
            outputs.append(value.detach())
        return outputs

    def _gathered(
        self, values: Sequence[Any]
    ) -> tuple[dict[str, Facts | float | None], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The facts of a call's inputs, the tensors that were given, and copies of those of them
        that are not contiguous."""
        op = self.op
        kernels = [one for one in op.implementations if not isinstance(one, Runner)]
        contiguous = any(one.contiguous for one in kernels)
        given: dict[str, Facts | float | None] = {}
        tensors: dict[str, torch.Tensor] = {}
        copies: dict[str, torch.Tensor] = {}
        like: torch.Tensor | None = None
        for one, value in zip(op.rule.inputs, values, strict=True):
            if one.dims is None:
                given[one.name] = number(op.name, one, value)
                continue
            if value is None:
                given[one.name] = None
                continue
            kind = _dtype(op, one, value)
            like = value if like is None else like
            self._same_device(one, value, like)
            tensors[one.name] = value
            wanted = kernels and (contiguous or one.mutable)
            if wanted and not is_row_contiguous(tuple(value.shape), value.stride()):
                op.counts["copy"] += 1
                value = copies[one.name] = value.contiguous()
            given[one.name] = _facts(value, kind, host.device_name(value))
        return given, tensors, copies

    def _same_device(self, one: Argument, value: torch.Tensor, like: torch.Tensor) -> None:
        if value.device != like.device:
            raise KernelError(
                f"[op] input {one.name!r} of op {self.op.name!r} is on {value.device}, but another "
                f"is on {like.device}; expected one device."
            )

    def vmap(self, info: Any, axes: Sequence[int | None], *values: Any) -> tuple[Any, Any]:
        """The op for a batch of calls, as torch.vmap wants it."""
        return batching.batched(self.op, info.batch_size, axes, values, self.overload, _Arrays)


def _refuse_dynamic_templates(op: Op, said: Binding) -> None:
    """Refuse a graph for many sizes that would need a kernel for each of them.

    Raises:
        KernelError: that is so; names the template parameter and the dynamic sizes.
    """
    for body in op.implementations:
        if not isinstance(body, (KernelBody, CudaUnit)):
            continue
        for name, one in body.template:
            if isinstance(one, Expression):
                value = op.rule.value(op.name, one, said, SymInts)
                if fixed(value) is None:
                    raise KernelError(dynamic_template(op, body, name, one, said))


def dynamic_template(
    op: Op, body: KernelBody | CudaUnit, name: str, one: Expression, said: Binding
) -> str:
    """The error for a template parameter that depends on a dynamic size."""
    sizes = {size: value for size, value in said.values(one).items() if fixed(value) is None}
    read = ", ".join(size for size in sizes if size in one.names | one.attributes)
    return (
        f"[op] op {op.name!r}: the template parameter {name!r} of its {body.kind} body is {one}, "
        f"and {read} is dynamic in this export, so that each size would need a kernel of its own. "
        f"Export with a fixed {read}; or leave {name!r} out of `template`, and read the dim in the "
        "body, where it costs no compilation."
    )


def fixed(value: Any) -> int | None:
    """The value of a size that is the same in every call of a graph; None where it may change."""
    if isinstance(value, torch.SymBool):
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        known = statically_known_true(value)
        return int(known) if known or statically_known_true(torch.sym_not(value)) else None
    if isinstance(value, torch.SymInt):
        known = value.node.maybe_as_int()
        if known is not None:
            return int(known)
        bounds = value.node.shape_env.bound_sympy(value.node.expr)
        return int(bounds.lower) if bounds.lower == bounds.upper else None
    return int(value)


class _Arrays:
    """What batching asks of an array library."""

    move = staticmethod(torch.movedim)
    stack = staticmethod(torch.stack)
    select = staticmethod(torch.select)

    @staticmethod
    def is_array(value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    @staticmethod
    def repeat(array: torch.Tensor, axis: int, size: int) -> torch.Tensor:
        """With a new axis, along which all is the same."""
        shape = list(array.shape)
        shape.insert(axis, size)
        return array.unsqueeze(axis).expand(shape)

    @staticmethod
    def merge(array: torch.Tensor, axis: int) -> torch.Tensor:
        """With an axis and the next made one."""
        return array.flatten(axis, axis + 1)

    @staticmethod
    def part(array: torch.Tensor, axis: int, size: int) -> torch.Tensor:
        """With an axis made two, the first of a size."""
        return array.unflatten(axis, (size, array.shape[axis] // size))


def _refusal(words: str) -> Callable[..., Any]:
    """What stands in for an op that torch cannot have."""

    def refuse(*_: Any) -> Any:
        raise KernelError(words)

    return refuse


def schema(op: Op) -> str:
    """``(Tensor x, Tensor? bias, float eps) -> Tensor``: what torch knows of an op."""
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    parts = []
    for one in op.rule.inputs:
        if one.dims is None:
            kind = dtypes.BY_NAME[one.dtype].kind
            if kind == "c":
                raise KernelError(
                    f"[op] input {one.name!r} of op {op.name!r}: torch's ops take no complex "
                    f"numbers; declare an array, {one.name}[]:{one.dtype}."
                )
            words = {"b": "bool", "f": "float"}.get(kind, "SymInt")
        else:
            words = f"Tensor({next(letters)}!)" if one.mutable else "Tensor"
            words += "?" * one.optional
        parts.append(f"{words} {one.name}")
    outputs = ["Tensor"] * len(op.rule.outputs)
    result = outputs[0] if len(outputs) == 1 else f"({', '.join(outputs)})"
    return f"({', '.join(parts)}) -> {result}"


def _dtype(op: Op, one: Argument, value: torch.Tensor) -> Dtype:
    if not isinstance(value, torch.Tensor):
        raise KernelTypeError(
            f"[op] input {one.name!r} of op {op.name!r}: got a {type(value).__name__}, expected a "
            f"tensor: {one}."
        )
    found = _KNOWN.get(value.dtype)
    if found is None:
        known = ", ".join(d.name for d in dtypes.ALL)
        raise KernelTypeError(
            f"[op] input {one.name!r} of op {op.name!r} has dtype {value.dtype}, expected one of "
            f"{known}."
        )
    return found


def _facts(tensor: torch.Tensor, kind: Dtype, device: str) -> Facts:
    return Facts(kind, tuple(tensor.shape), tensor.stride(), tensor.data_ptr(), device)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _versioned(overload: Any, mutated: Sequence[int]) -> Callable[..., Any]:
    """A kernel that tells autograd what was written in place."""

    def kernel(keyset: Any, *values: Any) -> Any:
        with torch._C._AutoDispatchBelowADInplaceOrView():
            result = overload.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *values)
        for i in mutated:
            if values[i] is not None:
                torch.autograd.graph.increment_version(values[i])
        return result

    return kernel


def _autocast(overload: Any, device: str, policy: str) -> Callable[..., Any]:
    """A kernel that casts float inputs as the op's policy says."""
    key = getattr(torch._C.DispatchKey, f"Autocast{device}")
    excluded = torch._C.DispatchKeySet(key)

    def kernel(keyset: Any, *values: Any) -> Any:
        name = device.lower()
        to = torch.float32 if policy == "float32" else torch.get_autocast_dtype(name)
        cast_values = [
            value.to(to)
            if isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and value.dtype in (torch.float32, torch.float16, torch.bfloat16)
            and value.device.type == name
            else value
            for value in values
        ]
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return overload(*cast_values)

    return kernel


def registered(name: str) -> TorchOp | None:
    """The op that torch has under ``ferrule::<name>``."""
    return _registered.get(name)
