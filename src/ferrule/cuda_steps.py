"""A CUDA translation unit bound to an op's rule: its steps, arguments and scratch as expressions,
and what they come to for the sizes of one call.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import dtypes
from .cuda_parts import CopyStep, FillStep, RunStep, UnitText
from .dtypes import Dtype
from .errors import KernelError, KernelTypeError
from .expression import Expression
from .implementation import (
    KernelBody,
    Runner,
    TemplateValue,
    axes_of,
    condition_of,
    dtype_variables,
    expression_of,
    template_of,
    template_values,
    value_from_json,
    value_to_json,
    wrong_size,
)
from .kernel import check_distinct, check_identifier, check_text
from .rule import Binding, Rule
from .spec import MAX_THREADS, MOST_BLOCKS, MOST_DEEP
from .unit import POINTER, Call, Sizes, UnitSpec

if TYPE_CHECKING:
    from .devices.cuda_unit import UnitProgram

ALIGNMENT = 256  # bytes; where scratch arrays begin
PORTABLE_CLUSTER = 8  # blocks of a cluster that every GPU with clusters has room for
_BLOCKS_X = 2**31 - 1
# NVRTC's options that say nothing of files, which no digest would cover, nor of the GPU.
_OPTIONS = (
    "-D", "--define-macro=", "-U", "--undefine-macro=", "--std=", "-std=", "--use_fast_math",
    "-use_fast_math", "--fmad=", "-fmad=", "--ftz=", "-ftz=", "--prec-div=", "-prec-div=",
    "--prec-sqrt=", "-prec-sqrt=", "--maxrregcount=", "-maxrregcount=", "--restrict", "-restrict",
    "--extra-device-vectorization", "-extra-device-vectorization",
)  # fmt: skip
_FUNCTION = re.compile(r"[A-Za-z_:][^;{}#\"\\\n\r\0]*")
_TYPED = re.compile(r"\s*(u?int(?:32|64)|bool)\s+(\S.*)", re.DOTALL)
_HEADER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+-]{0,200}")
_LABEL = re.compile(r"source|header|step\d+")  # how diagnostics call what is no header
_SCRATCH = re.compile(r"\s*([A-Za-z_]\w*)\s*\[(.*)\]\s*", re.DOTALL)


class Argument(NamedTuple):
    """An argument of a function.

    Attributes:
        label: what the author calls it.
        kind: ``"array"``, ``"number"``, or the full name of an expression's dtype.
        value: the name, or the expression.
    """

    label: str
    kind: str
    value: str | Expression


class Launched(NamedTuple):
    """A step that launches a function, with expressions; see `cuda_step`."""

    function: str
    arguments: tuple[Argument, ...]
    blocks: tuple[Expression, ...]
    block: tuple[Expression, ...]
    shared: Expression
    cluster: tuple[Expression, ...] | None
    when: Expression | None


class Filled(NamedTuple):
    """A step that fills an array; see `cuda_fill`."""

    array: str
    value: float
    when: Expression | None


class Copied(NamedTuple):
    """A step that copies an array; see `cuda_copy`."""

    to: str
    source: str
    when: Expression | None


class Scratch(NamedTuple):
    """An array that the steps share.

    Attributes:
        name: its name.
        dtype: a dtype's full name, or a variable of the rule.
        dims: its dims.
    """

    name: str
    dtype: str
    dims: tuple[Expression, ...]


class SentRun(NamedTuple):
    """A launch of one call, without addresses.

    Attributes:
        step: what was declared.
        blocks, block, shared, cluster: as in `ferrule.unit.Run`.
        arguments: ``("array", name)``, ``("number", name)``, or the bytes of an expression.
    """

    step: Launched
    blocks: Sizes
    block: Sizes
    shared: int
    cluster: Sizes | None
    arguments: tuple[tuple[str, str] | bytes, ...]


class SentUnit(NamedTuple):
    """What a unit does for one call, before its arrays are made.

    Attributes:
        template: constants and types, in order.
        steps: what is done, in order; those that are left out are not among them.
        scratch: where each scratch array begins in the memory for all, its dtype, its elements.
        memory: bytes of scratch in all.
    """

    template: tuple[tuple[str, TemplateValue], ...]
    steps: tuple[SentRun | Filled | Copied, ...]
    scratch: dict[str, tuple[int, Dtype, int]]
    memory: int


class CudaUnit:
    """A CUDA translation unit that carries out an op in steps.

    Attributes:
        kind: ``"cuda"``.
        source, headers, options, specific, template, scratch, steps: what was declared.
        when: the condition under which it is chosen, or None.
        programs: what it became for the devices, dtypes and template values of earlier calls.
    """

    kind = "cuda"
    contiguous = True  # inputs that are not are copied first

    def __init__(self, op: str, rule: Rule, text: UnitText) -> None:
        """Checks all that was declared.

        Raises:
            KernelError, KernelTypeError, RuleError: what cannot be understood, and where.
        """
        self._op, self._rule = op, rule
        self.source = check_text("source", text.source, op, "cuda")
        self.headers = _headers(op, text.headers)
        self.options = _options(op, text.options)
        if not isinstance(text.specific, bool):
            raise KernelTypeError(
                f"[op] `specific` of op {op!r}: got {text.specific!r}, expected a bool."
            )
        self.specific = text.specific
        self.template = template_of(op, rule, text.template)
        self.when = None if text.when is None else condition_of(op, rule, text.when)
        self.scratch = _scratch(op, rule, text.scratch)
        names = [*dtype_variables(rule), *(name for name, _ in self.template)]
        names += [f"has_{one.name}" for one in rule.inputs if one.optional]
        for name in names:
            check_identifier("`template`", name, op, "cuda")
        check_distinct(op, names, "cuda")
        arrays = [one.name for one in (*rule.inputs, *rule.outputs) if one.dims is not None]
        own = [one.name for one in self.scratch]
        for name in own:
            check_identifier("`scratch`", name, op, "cuda")
            if name in rule.dim_names:
                raise KernelError(
                    f"[op] `scratch` of op {op!r}: {name!r} is also a dim; rename one of them."
                )
        numbers = [one.name for one in rule.inputs if one.dims is None]
        check_distinct(op, [*arrays, *numbers, *own], "cuda")
        self._arrays = frozenset([*arrays, *own])
        self._numbers = {one.name: one.dtype for one in rule.inputs if one.dims is None}
        mutable = [one.name for one in rule.inputs if one.mutable]
        outputs = [one.name for one in rule.outputs]
        self._written = frozenset([*outputs, *mutable, *own])
        self._optional = frozenset(one.name for one in rule.inputs if one.optional)
        self.steps = tuple(self._step(i, one) for i, one in enumerate(text.steps, 1))
        self.calls = tuple(
            Call(i, one.function, tuple((a.label, self._kind(a)) for a in one.arguments))
            for i, one in enumerate(self.steps, 1)
            if isinstance(one, Launched)
        )
        touched = {name for one in self.steps for name in _touched(one)}
        for name in outputs:
            if name not in touched:
                raise KernelError(
                    f"[op] `steps` of op {op!r}: no step writes output {name!r}; give it to a "
                    "function, or fill it."
                )
        self.programs: dict[tuple[object, ...], UnitProgram] = {}

    def holds(self, said: Binding) -> bool:
        """Whether it is for a call with these sizes."""
        return self.when is None or bool(self._value(self.when, said))

    def spec(self, template: tuple[tuple[str, TemplateValue], ...]) -> UnitSpec:
        """What is compiled for these constants and types."""
        return UnitSpec(
            self._op, self.source, self.headers, self.options, self.calls, template,
            self.specific,
        )  # fmt: skip

    def sent(self, said: Binding) -> SentUnit:
        """What it does for one call.

        Raises:
            KernelError: a size is out of range, or an output would not be written; says which, and
                what it was worked out from.
        """
        template = template_values(self._op, self._rule, self.template, said)
        scratch: dict[str, tuple[int, Dtype, int]] = {}
        end = 0
        for one in self.scratch:
            dtype = dtypes.BY_NAME[said.dtypes.get(one.dtype, one.dtype)]
            size = 1
            for dim in one.dims:
                along = self._value(dim, said)
                if along < 0:
                    raise self._bad("scratch", f"{one.name}: {dim}", along, said, "0 or more")
                size *= along
            start = -(-end // ALIGNMENT) * ALIGNMENT
            scratch[one.name] = start, dtype, size
            end = start + size * dtype.itemsize
        if end >= 2**63:
            raise self._bad("scratch", "its size", f"{end} bytes", said, "fewer than 2**63")
        steps: list[SentRun | Filled | Copied] = []
        for step in self.steps:
            if step.when is not None and not self._value(step.when, said):
                continue
            if not isinstance(step, Launched):
                steps.append(step)
                continue
            run = self._run(step, said)
            if 0 not in run.blocks:
                steps.append(run)
        self._check_outputs(steps, said)
        return SentUnit(template, tuple(steps), scratch, end)

    def _check_outputs(self, steps: Sequence[SentRun | Filled | Copied], said: Binding) -> None:
        """Refuse a call that would leave an output as it was allocated."""
        touched = {
            name
            for one in steps
            for name in _touched(one.step if isinstance(one, SentRun) else one)
        }
        for one in self._rule.outputs:
            shape = said.shapes[one.name] or ()
            if one.name not in touched and 0 not in shape:
                raise KernelError(
                    f"[op] the steps of op {self._op!r} that have blocks and whose `when` holds "
                    f"write nothing to output {one.name!r} of shape {shape}; fill it, such as by "
                    f"ferrule.cuda_fill({one.name!r})."
                )

    def _run(self, step: Launched, said: Binding) -> SentRun:
        where = f" of step {step.function!r}"
        blocks = self._sizes(f"blocks{where}", step.blocks, said)
        block = self._sizes(f"block{where}", step.block, said)
        text = f"({', '.join(map(str, step.block))})"
        if 0 in block:
            raise self._bad(f"block{where}", text, block, said, "positive sizes")
        if math.prod(block) > MAX_THREADS or block[2] > MOST_DEEP:
            most = f"{MAX_THREADS} threads at most, and {MOST_DEEP} along z"
            raise self._bad(f"block{where}", text, block, said, most)
        for axis, size, most_blocks in zip(
            step.blocks, blocks, (_BLOCKS_X, MOST_BLOCKS, MOST_BLOCKS), strict=True
        ):
            if size > most_blocks:
                limit = f"0 to {most_blocks} blocks along this axis"
                raise self._bad(f"blocks{where}", axis, size, said, limit)
        shared = self._value(step.shared, said)
        if not 0 <= shared < 2**31:
            limit = "0 to 2147483647 bytes"
            raise self._bad(f"shared_memory{where}", step.shared, shared, said, limit)
        cluster = None if step.cluster is None else self._cluster(step, blocks, said)
        arguments: list[tuple[str, str] | bytes] = []
        for one in step.arguments:
            if isinstance(one.value, Expression):
                arguments.append(self._packed(one, where, said))
            else:
                arguments.append((one.kind, one.value))
        return SentRun(step, blocks, block, shared, cluster, tuple(arguments))

    def _cluster(self, step: Launched, blocks: Sizes, said: Binding) -> Sizes | None:
        what = f"cluster of step {step.function!r}"
        cluster = self._sizes(what, step.cluster or (), said)
        text = f"({', '.join(map(str, step.cluster or ()))})"
        if 0 in cluster:
            raise self._bad(what, text, cluster, said, "positive sizes")
        if math.prod(cluster) > PORTABLE_CLUSTER:
            most = f"{PORTABLE_CLUSTER} blocks at most, for which every GPU with clusters has room"
            raise self._bad(what, text, cluster, said, most)
        for size, along in zip(blocks, cluster, strict=True):
            if size % along:
                whole = f"sizes that divide the blocks, {blocks}"
                raise self._bad(what, text, cluster, said, whole)
        return cluster

    def _packed(self, one: Argument, where: str, said: Binding) -> bytes:
        """An expression's value as a function takes it."""
        value = self._value(one.value, said)  # type: ignore[arg-type]
        if one.kind == "bool":
            return struct.pack("=?", value)
        limits = np.iinfo(one.kind)
        if not limits.min <= value <= limits.max:
            hint = f'; write "int64 {one.value}", and take an int64_t' if "32" in one.kind else ""
            limit = f"{one.kind}, from {limits.min} to {limits.max}{hint}"
            raise self._bad(f"arguments{where}", one.value, value, said, limit)
        codes = {"int32": "i", "uint32": "I", "int64": "q", "uint64": "Q"}
        return struct.pack(f"={codes[one.kind]}", value)

    def _sizes(self, what: str, axes: Sequence[Expression], said: Binding) -> Sizes:
        found = [self._value(axis, said) for axis in axes]
        for axis, size in zip(axes, found, strict=True):
            if not 0 <= size < 2**31:
                raise self._bad(what, axis, size, said, f"0 to {2**31 - 1}")
        return found[0], found[1], found[2]

    def _value(self, what: Expression, said: Binding) -> Any:
        return self._rule.value(self._op, what, said)

    def _bad(
        self, what: str, text: object, value: object, said: Binding, expected: str
    ) -> KernelError:
        return wrong_size(self._op, what, text, value, said, expected)

    # -- what was declared -------------------------------------------------------------------------

    def _step(self, number: int, one: RunStep | FillStep | CopyStep) -> Launched | Filled | Copied:
        op, rule = self._op, self._rule
        when = None if one.when is None else condition_of(op, rule, one.when)
        where = f"[op] step {number} of op {op!r}"
        if isinstance(one, FillStep):
            self._check_array(where, "fill", one.array, written=True)
            if isinstance(one.value, bool) or not isinstance(one.value, (int, float)):
                raise KernelTypeError(f"{where}: got the value {one.value!r}, expected a number.")
            return Filled(one.array, one.value, when)
        if isinstance(one, CopyStep):
            self._check_array(where, "copy to", one.to, written=True)
            self._check_array(where, "copy", one.source, written=False)
            return Copied(one.to, one.source, when)
        if not isinstance(one.function, str) or not _FUNCTION.fullmatch(one.function.strip()):
            raise KernelError(
                f"{where}: got the function {one.function!r}, expected the name of a __global__ "
                'function, or an expression such as "gemm<BLOCK, T>".'
            )
        function = one.function.strip()
        what = f" of step {function!r}"
        arguments = tuple(self._argument(f"arguments{what}", a) for a in one.arguments)
        cluster = None
        if one.cluster is not None:
            cluster = axes_of(op, rule, f"cluster{what}", one.cluster)
        return Launched(
            function, arguments, axes_of(op, rule, f"blocks{what}", one.blocks),
            axes_of(op, rule, f"block{what}", one.block),
            self._number(f"shared_memory{what}", one.shared_memory), cluster, when,
        )  # fmt: skip

    def _check_array(self, where: str, what: str, name: object, *, written: bool) -> None:
        allowed = self._written if written else self._arrays - self._optional
        if name in self._optional:
            raise KernelError(f"{where}: cannot {what} {name!r}, which may be None.")
        if name not in allowed:
            only = "what is written: outputs, scratch" if written else "the arrays"
            listed = ", ".join(sorted(allowed)) or "none"
            raise KernelError(
                f"{where}: cannot {what} {name!r}; expected one of {only} ({listed})."
            )

    def _number(self, what: str, given: object) -> Expression:
        found = expression_of(self._op, self._rule, what, given)
        if found.condition:
            raise KernelError(
                f"[op] `{what}` of op {self._op!r}: got the condition {found}, expected a size."
            )
        return found

    def _argument(self, what: str, given: object) -> Argument:
        label = f"[op] `{what}` of op {self._op!r}"
        if isinstance(given, Argument):  # of `from_json`
            text, kind = given.value, given.kind
            if isinstance(text, str):
                return self._named(label, text, kind)
        elif isinstance(given, str):
            typed = _TYPED.fullmatch(given)
            text, kind = (typed[2], typed[1]) if typed else (given.strip(), "")
            if not typed and isinstance(text, str) and text in {*self._arrays, *self._numbers}:
                return self._named(label, text, "array" if text in self._arrays else "number")
        elif type(given) is int:
            text, kind = str(given), ""
        else:
            raise KernelTypeError(
                f"{label}: got {given!r} of type {type(given).__name__}, expected the name of an "
                'array or number, an int, or an expression such as "M" or "int64 M*N". Other '
                "constants stand in the text, or in `template`."
            )
        if isinstance(text, str) and text.isidentifier() and text not in self._rule.dim_names:
            known = [*sorted(self._arrays), *sorted(self._numbers), *self._rule.dim_names]
            raise KernelError(
                f"{label}: there is no array, number or dim {text!r}, but {', '.join(known)}."
            )
        found = expression_of(self._op, self._rule, what, text)
        kind = kind or ("bool" if found.condition else "int32")
        if (kind == "bool") != found.condition:
            expected = "a condition" if kind == "bool" else "a number"
            raise KernelError(f"{label}: {found} as {kind}, expected {expected}.")
        return Argument(str(found), kind, found)

    def _named(self, label: str, name: str, kind: str) -> Argument:
        known = {"array": self._arrays, "number": self._numbers}.get(kind, ())
        if name not in known:
            raise KernelError(f"{label}: there is no {kind} {name!r}.")
        return Argument(name, kind, name)

    def _kind(self, one: Argument) -> str:
        """What a function gets for an argument, as `unit.Call` says it."""
        if one.kind == "array":
            return POINTER
        return self._numbers[str(one.value)] if one.kind == "number" else one.kind

    # -- as data -----------------------------------------------------------------------------------

    def to_json(self) -> Any:
        """All that decides what it computes."""

        def optional(one: Expression | None) -> Any:
            return None if one is None else one.to_json()

        def axes(given: tuple[Expression, ...] | None) -> Any:
            return None if given is None else [one.to_json() for one in given]

        def step(one: Launched | Filled | Copied) -> Any:
            when = optional(one.when)
            if isinstance(one, Filled):
                # By its text, for JSON has no infinities.
                return {"fill": one.array, "value": repr(one.value), "when": when}
            if isinstance(one, Copied):
                return {"copy": one.source, "to": one.to, "when": when}
            arguments = [
                [a.kind, a.value.to_json() if isinstance(a.value, Expression) else a.value]
                for a in one.arguments
            ]
            return {
                "run": one.function, "arguments": arguments, "blocks": axes(one.blocks),
                "block": axes(one.block), "shared_memory": one.shared.to_json(),
                "cluster": axes(one.cluster), "when": when,
            }  # fmt: skip

        return {
            "kind": self.kind, "source": self.source, "headers": [[*one] for one in self.headers],
            "options": list(self.options), "specific": self.specific, "when": optional(self.when),
            "template": [[name, value_to_json(one)] for name, one in self.template],
            "scratch": [[one.name, one.dtype, axes(one.dims)] for one in self.scratch],
            "steps": [step(one) for one in self.steps],
        }  # fmt: skip

    @staticmethod
    def from_json(op: str, rule: Rule, data: Any) -> CudaUnit:
        """The reverse of `to_json`.

        Raises:
            KernelError, RuleError, KeyError, TypeError, ValueError: this is none of `to_json`.
        """

        def optional(one: Any) -> Any:
            return None if one is None else Expression.from_json(one)

        def axes(given: Any) -> Any:
            return None if given is None else tuple(Expression.from_json(one) for one in given)

        def argument(one: Any) -> Argument:
            kind, value = one
            return Argument("", kind, value if isinstance(value, str) else optional(value))

        def step(one: Any) -> RunStep | FillStep | CopyStep:
            when = optional(one["when"])
            if "fill" in one:
                text = one["value"]
                value = int(text) if re.fullmatch(r"-?\d+", text) else float(text)
                return FillStep(one["fill"], value, when)
            if "copy" in one:
                return CopyStep(one["to"], one["copy"], when)
            return RunStep(
                one["run"], tuple(argument(a) for a in one["arguments"]), axes(one["blocks"]),
                axes(one["block"]), optional(one["shared_memory"]), axes(one["cluster"]), when,
            )  # fmt: skip

        return CudaUnit(op, rule, UnitText(
            data["source"], tuple(step(one) for one in data["steps"]),
            [Scratch(name, dtype, axes(dims)) for name, dtype, dims in data["scratch"]],
            optional(data["when"]),
            [(str(name), value_from_json(one)) for name, one in data["template"]],
            {str(name): text for name, text in data["headers"]}, data["options"],
            data["specific"],
        ))  # fmt: skip


Implementation = KernelBody | CudaUnit | Runner


def _touched(one: Launched | Filled | Copied) -> set[str]:
    """The arrays that a step may write."""
    if isinstance(one, Filled):
        return {one.array}
    if isinstance(one, Copied):
        return {one.to}
    return {str(a.value) for a in one.arguments if a.kind == "array"}


def _headers(op: str, given: object) -> tuple[tuple[str, str], ...]:
    if given is None:
        return ()
    if not isinstance(given, Mapping):
        raise KernelTypeError(
            f"[op] `headers` of op {op!r}: got {given!r}, expected a dictionary such as "
            '{"tile.cuh": text}.'
        )
    for name in given:
        if not isinstance(name, str) or not _HEADER.fullmatch(name) or _LABEL.fullmatch(name):
            raise KernelError(
                f"[op] `headers` of op {op!r}: got the name {name!r}, expected one such as "
                '"tile.cuh".'
            )
    return tuple((name, check_text(name, text, op, "cuda")) for name, text in given.items())


def _options(op: str, given: object) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise KernelTypeError(
            f"[op] `options` of op {op!r}: got {given!r}, expected a list such as "
            '["--use_fast_math"].'
        )
    for one in given:
        if not isinstance(one, str) or not one.startswith(_OPTIONS) or one in ("-D", "-U"):
            listed = ", ".join(o for o in _OPTIONS if o.startswith("--") or o in ("-D", "-U"))
            raise KernelError(
                f"[op] `options` of op {op!r}: got {one!r}, expected options of NVRTC that begin "
                f"with one of {listed}, each one str. Texts to include go to `headers`."
            )
    return tuple(given)


def _scratch(op: str, rule: Rule, given: object) -> tuple[Scratch, ...]:
    label = f"[op] `scratch` of op {op!r}"
    if given is None:
        return ()
    if isinstance(given, list) and all(isinstance(one, Scratch) for one in given):  # `from_json`
        pairs: list[tuple[object, object]] = [(one.name, one) for one in given]
    elif isinstance(given, Mapping):
        pairs = list(given.items())
    else:
        raise KernelTypeError(
            f'{label}: got {given!r}, expected a dictionary such as {{"partial": "float32[N]"}}.'
        )
    found = []
    for name, text in pairs:
        if isinstance(text, Scratch):
            dtype, parts = text.dtype, list[object](text.dims)
        else:
            match = _SCRATCH.fullmatch(text) if isinstance(text, str) else None
            if match is None:
                raise KernelError(
                    f'{label}: got {text!r} for {name!r}, expected "dtype[dims]", such as '
                    '"float32[M,N]".'
                )
            dtype, parts = match[1], list[object](_between_commas(match[2]))
        if dtype not in dtypes.BY_NAME and dtype not in dtype_variables(rule):
            raise KernelError(
                f"{label}: {name!r} has the dtype {dtype!r}, which is neither a dtype's full name "
                "nor a variable of the rule."
            )
        what = f"scratch[{name!r}]"
        dims = tuple(expression_of(op, rule, what, part) for part in parts)
        for dim in dims:
            if dim.condition:
                raise KernelError(f"{label}: {name!r}: got the condition {dim}, expected a size.")
        found.append(Scratch(str(name), dtype, dims))
    return tuple(found)


def _between_commas(text: str) -> list[str]:
    """The parts of a text between commas that stand outside of parentheses."""
    parts, depth = [""], 0
    for c in text:
        depth += (c == "(") - (c == ")")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return parts if len(parts) > 1 or parts[0].strip() else []
