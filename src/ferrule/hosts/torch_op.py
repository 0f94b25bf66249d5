"""Ops in torch: registration, shapes while tracing, derivatives, vmap, autocast.

An op becomes ``ferrule::<name>_<digest>``: tensors in, tensors out. A twin without an Autograd
kernel, ``…_raw``, serves eager calls that record nothing, for a Python kernel on the Autograd key
costs more than the launch; graphs only ever hold the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.autograd import forward_ad

from .. import batching, dtypes, op_call
from ..arguments import fill_value
from ..dtypes import Dtype
from ..errors import KernelError, KernelTypeError
from ..expression import Ints
from ..implementation import Runner
from ..op_declaration import Op
from ..op_launch import launch, number
from ..rule import Argument, Binding
from ..spec import Facts, Shape, is_row_contiguous
from . import torch as host
from .torch_autograd import autograd_kernel

NAMESPACE = "ferrule"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_registered: dict[str, TorchOp] = {}
_TORCH = host.TORCH
_KNOWN = host.KNOWN
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_tracing = torch.compiler.is_compiling
_recording = torch.is_grad_enabled
_any_requires_grad = torch._C._any_requires_grad
_transformed = torch._C._are_functorch_transforms_active
_modes = torch._C._len_torch_dispatch_stack
_jit_tracing = torch._C._get_tracing_state
_function_modes = torch._C._len_torch_function_stack


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
        return torch.sym_ite(condition, then(), otherwise())

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
        overload: what graphs hold.
        raw: its twin for eager calls that record nothing.
        arguments: the inputs, their places, and of those that are numbers the Python type.
    """

    def __init__(self, op: Op) -> None:
        self.op = op
        self.overload: Any
        self.raw: Any
        kinds = {"b": bool, "f": float, "i": int, "u": int}
        self.arguments = [
            (i, one, None if one.dims is not None else kinds.get(dtypes.BY_NAME[one.dtype].kind))
            for i, one in enumerate(op.rule.inputs)
        ]
        name = f"{op.name}_{op.digest}"
        known = _registered.get(name)
        if known is None:
            self._register(name)
            _registered[name] = self
        else:
            self.op, self.overload, self.raw = known.op, known.overload, known.raw
            known.op.counts.update(op.counts)
            op.counts = known.op.counts  # it is the other that carries out calls

    def takes(self, values: Sequence[Any]) -> bool:
        """Whether a call with these inputs is torch's."""
        return any(isinstance(value, torch.Tensor) for value in values)

    def __call__(self, *values: Any) -> Any:
        """A call; the overload's, but for plain eager tensors of which nothing is recorded."""
        for i, one, kind in self.arguments:
            value = values[i]
            if kind is None:
                if value is not None and not isinstance(value, torch.Tensor):
                    _dtype(self.op, one, value)  # says that it is none
            elif type(value) is not kind:
                values = (*values[:i], self._number(one, value), *values[i + 1 :])
        if (
            _tracing()  # first, for Dynamo cannot trace what follows
            or _transformed()
            or forward_ad._current_level >= 0
            or _modes()
            or _function_modes()
            or _jit_tracing() is not None
            or (_recording() and _any_requires_grad(*values))
        ):
            return self.overload(*values)
        for value in values:
            if isinstance(value, torch.Tensor) and type(value) not in _PLAIN:
                return self.overload(*values)
        return self.raw(*values)

    def _number(self, one: Argument, value: Any) -> Any:
        """A number of another type than declared, where that is one all the same: torch itself
        takes a tensor for a number, whose derivative would be lost."""
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value
        if isinstance(value, torch.Tensor):
            raise KernelTypeError(
                f"[op] input {one.name!r} of op {self.op.name!r}: got a tensor, but {one}, which "
                f"is a Python number; give x.item(), or declare an array: {one.name}[]:{one.dtype}."
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
        for each in (name, f"{name}_raw"):
            qualified = f"{NAMESPACE}::{each}"
            # Kernels read memory row by row; told so, inductor hands it over that way.
            tags = (torch.Tag.pt2_compliant_tag,)
            _library.define(f"{each}{signature}", tags=tags)
            _library.impl(each, self.run, "CPU")
            _library.impl(each, self.run, "CUDA")
            torch.library.register_fake(qualified, self.fake, lib=_library)
            overload = getattr(getattr(torch.ops, NAMESPACE), each).default
            if mutated:
                _library.impl(
                    each, _versioned(overload, mutated), "ADInplaceOrView", with_keyset=True
                )
                for key in ("Conjugate", "Negative"):
                    _library.impl(each, self._lazy, key)
            if op.autocast is not None:
                for device in ("CPU", "CUDA"):
                    kernel = _autocast(overload, device, op.autocast, mutated)
                    _library.impl(each, kernel, f"Autocast{device}", with_keyset=True)
            if each is name:
                self.overload = overload
            else:
                self.raw = overload
        kernel = autograd_kernel(op, self.overload)
        host.skip_in_dynamo([kernel.__code__])
        _library.impl(name, kernel, "Autograd", with_keyset=True)
        torch.library.register_vmap(f"{NAMESPACE}::{name}", self.vmap, lib=_library)

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
        try:
            said = op.rule.bind(op.name, shapes, kinds, SymInts)
            results = op.rule.results(op.name, said, SymInts)
        except KernelError:
            # The same again in numbers, where they are known: s33 says nothing to anyone.
            numbers = [None if shape is None else tuple(map(_hint, shape)) for shape in shapes]
            op.rule.results(op.name, op.rule.bind(op.name, numbers, kinds, SymInts), SymInts)
            raise
        return op_call.packed(
            [torch.empty(shape, dtype=_TORCH[kind], device=device) for shape, kind in results]
        )

    def run(self, *values: Any) -> Any:
        """The outputs for tensors in memory."""
        op = self.op
        if any(one.mutable for one in op.rule.inputs):
            values = tuple(self._apart(values))
        given, tensors, copies = self._gathered(values)
        device = host.device_name(next(iter(tensors.values())))
        said, results = op_call.bound(op, given)
        chosen = op_call.choose(op, device, said)
        queue = host.stream(None, device)
        outputs: list[torch.Tensor]
        if isinstance(chosen, Runner):
            outputs = self._run_function(chosen, values, said, results, device, queue)
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

    def _apart(self, values: Sequence[Any]) -> list[Any]:
        """The inputs, with copies of those that share memory with one that is written in place:
        what is read is what was there before."""
        op = self.op
        found = list(values)
        arrays = [
            (i, one, value)
            for i, (one, value) in enumerate(zip(op.rule.inputs, values, strict=True))
            if isinstance(value, torch.Tensor)
        ]
        for i, one, value in arrays:
            if one.mutable and any(
                size > 1 and step == 0
                for size, step in zip(value.shape, value.stride(), strict=True)
            ):
                raise KernelError(
                    f"[op] input {one.name!r} of op {op.name!r} is written in place, but has many "
                    "elements in one place, as an expanded tensor has; give a clone."
                )
            for j, other, written in arrays:
                if i == j or not other.mutable or not _share_memory(value, written):
                    continue
                if one.mutable:
                    raise KernelError(
                        f"[op] input {one.name!r} of op {op.name!r} shares memory with input "
                        f"{other.name!r}, and both are written in place; give a clone."
                    )
                op.counts["copy"] += 1
                found[i] = value.clone()
                break
        return found

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
        contiguous = any(one.kernel.ensure_row_contiguous for one in kernels)
        given: dict[str, Facts | float | None] = {}
        tensors: dict[str, torch.Tensor] = {}
        copies: dict[str, torch.Tensor] = {}
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
            wanted = kernels and (contiguous or one.mutable)
            if wanted and not is_row_contiguous(tuple(value.shape), value.stride()):
                op.counts["copy"] += 1
                value = copies[one.name] = value.contiguous()
            given[one.name] = _facts(value, kind, host.device_name(value))
        return given, tensors, copies

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
        return batching.batched(self.op, info.batch_size, axes, values, self.overload, _Arrays)


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


# The dispatcher calls these, from graphs, too, or where Dynamo has given up on a frame above them.
host.skip_in_dynamo([f.__code__ for f in (TorchOp.run, TorchOp.fake, TorchOp.vmap)])


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


def _hint(size: Any) -> Any:
    """The number that a symbolic size has for now, where it has one."""
    hint = size.node.hint if isinstance(size, torch.SymInt) else size
    return size if hint is None else hint


def _facts(tensor: torch.Tensor, kind: Dtype, device: str) -> Facts:
    return Facts(kind, tuple(tensor.shape), tensor.stride(), tensor.data_ptr(), device)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the memory from one tensor's first to last element is, in part, the other's."""
    (start, end), (other, stop) = (_range(one) for one in (a, b))
    return a.numel() > 0 and b.numel() > 0 and start < stop and other < end


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _versioned(overload: Any, mutated: Sequence[int]) -> Callable[..., Any]:
    """A kernel that tells autograd what was written in place."""

    def kernel(keyset: Any, *values: Any) -> Any:
        with torch._C._AutoDispatchBelowADInplaceOrView():
            result = overload.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *values)
        for i in mutated:
            if values[i] is not None:
                torch.autograd.graph.increment_version(values[i])
        return result

    host.skip_in_dynamo([kernel.__code__])
    return kernel


def _autocast(
    overload: Any, device: str, policy: str, mutated: Sequence[int]
) -> Callable[..., Any]:
    """A kernel that casts float inputs as the op's policy says, but for what is written in place:
    that would be lost in a copy."""
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
            and i not in mutated
            else value
            for i, value in enumerate(values)
        ]
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return overload(*cast_values)

    host.skip_in_dynamo([kernel.__code__])
    return kernel
