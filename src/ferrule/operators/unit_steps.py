"""A CUDA translation unit bound to an op's rule: its steps, arguments and scratch as expressions,
and their values for the sizes of one call.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..dtypes import Dtype
from ..errors import KernelError, KernelTypeError
from ..kernel import check_distinct, check_identifier, check_name, check_pdl, check_text
from ..rules.expression import Expression
from ..rules.rule import Binding, Rule
from ..spec import MAX_THREADS, MOST_BLOCKS, MOST_DEEP
from ..unit import POINTER, TENSOR_MAP, Call, Product, Run, Sizes, TensorMap, UnitSpec
from . import unit_maps, unit_matmul
from .bodies import KernelBody
from .expressions import (
    INT32,
    Scratch,
    SizedImplementation,
    TemplateValue,
    bound_dtype,
    dtype_variables,
    expression_from_json,
    memory_from_json,
    memory_to_json,
    to_json,
    value_from_json,
)
from .runners import Runner
from .state import StreamState
from .unit_parts import (
    CopyStep,
    FillStep,
    MatmulStep,
    RunStep,
    StepArgument,
    UnitStep,
    UnitText,
    step_from_json,
    step_to_json,
    touched,
)

if TYPE_CHECKING:
    from ..devices.protocol import UnitProgram

ALIGNMENT = 256  # bytes; where scratch arrays begin
PORTABLE_CLUSTER = 8  # blocks of a cluster that every GPU with clusters has room for
_FUNCTION = re.compile(r"[A-Za-z_:][^;{}#\"\\\n\r\0]*")
_TYPED = re.compile(r"\s*(u?int(?:32|64)|bool)\s+(\S.*)", re.DOTALL)
# NVRTC's options that say nothing of files, which no digest would cover, nor of the GPU.
_OPTIONS = (
    "-D", "--define-macro=", "-U", "--undefine-macro=", "--std=", "-std=", "--use_fast_math",
    "-use_fast_math", "--fmad=", "-fmad=", "--ftz=", "-ftz=", "--prec-div=", "-prec-div=",
    "--prec-sqrt=", "-prec-sqrt=", "--maxrregcount=", "-maxrregcount=", "--restrict", "-restrict",
    "--extra-device-vectorization", "-extra-device-vectorization",
)  # fmt: skip
_HEADER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+-]{0,200}")
_LABEL = re.compile(r"source|header|step\d+")  # how diagnostics call what is no header


class UnitLaunch(NamedTuple):
    """The steps and scratch of a unit for one call, before its arrays are made.

    Attributes:
        template: constants and types, in order.
        steps: what is done, in order, without those that are left out; for a `RunStep` beside it
            what is launched, with ``b""`` for each argument that is an array or a number; for a
            `MatmulStep` what is multiplied.
        scratch: where each scratch array begins in the memory for all, its dtype, its elements.
        memory: bytes of scratch in all.
        own: bytes of what is not kept.
    """

    template: tuple[tuple[str, TemplateValue], ...]
    steps: tuple[tuple[UnitStep, Run | Product | None], ...]
    scratch: dict[str, tuple[int, Dtype, int]]
    memory: int
    own: int


class CudaUnit(SizedImplementation):
    """A CUDA translation unit that runs an op in steps.

    Attributes:
        kind: ``"cuda"``.
        source, headers, options, specific, template, scratch, steps: what was declared; what is
            kept stands last in ``scratch``, and a fill of each first in ``steps``.
        state: the names of what is kept from call to call.
        kept: where it is.
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
        super().__init__(op, rule)
        self.source = check_text("source", text.source, op, "cuda")
        self.headers = self._headers(text.headers)
        self.options = self._options(text.options)
        if not isinstance(text.specific, bool):
            label = self._label("specific")
            raise KernelTypeError(f"{label}: got {text.specific!r}, expected a bool.")
        self.specific = text.specific
        self.template = self._template(text.template)
        self.when = self._condition(text.when)
        state, scratch = (self._memory(at, getattr(text, at)) for at in ("state", "scratch"))
        self.state = tuple([array.name for array in state])
        self.kept = StreamState(op)
        self.scratch = (*scratch, *state)
        names = [*dtype_variables(rule), *(name for name, _ in self.template)]
        names += [f"has_{parameter.name}" for parameter in rule.inputs if parameter.optional]
        for name in names:
            check_identifier("`template`", name, op, "cuda")
        check_distinct(op, names, "cuda")
        arrays = [a.name for a in (*rule.inputs, *rule.outputs) if a.dims is not None]
        scratch_names = [array.name for array in self.scratch]
        self._numbers = {p.name: p.dtype for p in rule.inputs if p.dims is None}
        taken = dict.fromkeys(rule.dim_names, "a dim")
        taken |= dict.fromkeys([*arrays, *self._numbers], "an argument of the rule")
        for kind, own in (("scratch", scratch), ("state", state)):
            at = self._label(kind)
            for array in own:
                name = check_name(at, array.name, "cuda")
                if name in taken:
                    raise KernelError(f"{at}: {name!r} is also {taken[name]}; rename one of them.")
            taken |= dict.fromkeys([array.name for array in own], f"in `{kind}`")
        self._optional = frozenset(p.name for p in rule.inputs if p.optional)
        there = [a for a in (*rule.inputs, *rule.outputs) if a.dims is not None]
        self._mapped = {
            name: (dtype, dims)
            for name, dtype, dims in (
                *((a.name, a.dtype, a.dims or ()) for a in there), *self.scratch
            )
            if name not in self._optional
        }  # fmt: skip
        self._arrays = frozenset([*arrays, *scratch_names])
        mutable = [parameter.name for parameter in rule.inputs if parameter.mutable]
        outputs = [output.name for output in rule.outputs]
        self._written = frozenset(outputs + mutable + scratch_names)
        steps = [*(FillStep(name, 0, None) for name in self.state), *text.steps]
        first = 1 - len(state)
        self.steps = tuple(self._step(i, step) for i, step in enumerate(steps, first))
        self.calls = tuple(
            Call(i, step.function, tuple((str(a.value), self._kind(a)) for a in step.arguments))
            for i, step in enumerate(self.steps, first)
            if isinstance(step, RunStep)
        )
        if (size := unit_matmul.workspace(self.steps)) is not None:
            # It has no name that a step could say.
            kept = len(self.scratch) - len(state)
            workspace = Scratch("", "uint8", (size,))
            self.scratch = (*self.scratch[:kept], workspace, *self.scratch[kept:])
        self._check_written(outputs)
        self.programs: dict[tuple[object, ...], UnitProgram] = {}

    def _check_written(self, outputs: Sequence[str]) -> None:
        written = {name for step in self.steps for name in touched(step)}
        for name in outputs:
            if name not in written:
                raise KernelError(
                    f"{self._label('steps')}: no step writes output {name!r}; give it to a "
                    "function, or fill it."
                )

    def spec(self, template: tuple[tuple[str, TemplateValue], ...]) -> UnitSpec:
        """The spec for these constants and types."""
        return UnitSpec(
            self._op, self.source, self.headers, self.options, self.calls, template, self.specific
        )

    def launch_for(self, binding: Binding) -> UnitLaunch:
        """Its steps and scratch for one call.

        Raises:
            KernelError: a size is out of range, or an output would not be written; says which, and
                the expression that gave it.
        """
        template = self.template_for(binding)
        shapes = {array.name: self._shape("scratch", array, binding) for array in self.scratch}
        kinds = {array.name: bound_dtype(array.dtype, binding) for array in self.scratch}
        scratch: dict[str, tuple[int, Dtype, int]] = {}
        end = own = 0
        for name, shape in shapes.items():
            start, size = -(-end // ALIGNMENT) * ALIGNMENT, math.prod(shape)
            scratch[name] = start, kinds[name], size
            end = start + size * kinds[name].itemsize
            if name not in self.state:
                own = end
        if end >= 2**63:
            raise self._bad("scratch", "its size", f"{end} bytes", binding, "fewer than 2**63")
        rule = self._rule
        arrays = [a for a in (*rule.inputs, *rule.outputs) if binding.shapes[a.name] is not None]
        shapes.update((array.name, binding.shapes[array.name] or ()) for array in arrays)
        kinds.update((a.name, bound_dtype(a.dtype, binding)) for a in arrays if a.dims is not None)
        steps: list[tuple[UnitStep, Run | Product | None]] = []
        for step in self.steps:
            if step.when is not None and not self._value(step.when, binding):
                continue
            if isinstance(step, MatmulStep):
                product = unit_matmul.product(self._op, step, shapes, kinds)
                steps += [(step, product)] * (product is not None)
                continue
            run = self._run(step, binding) if isinstance(step, RunStep) else None
            if run is None or 0 not in run.blocks:
                steps.append((step, run))
        self._check_outputs([step for step, _ in steps], binding)
        return UnitLaunch(template, tuple(steps), scratch, end, own)

    def _check_outputs(self, steps: Sequence[UnitStep], binding: Binding) -> None:
        """Refuse a call that would leave an output as it was allocated."""
        written = {name for step in steps for name in touched(step)}
        for output in self._rule.outputs:
            shape = binding.shapes[output.name] or ()
            if output.name not in written and 0 not in shape:
                raise KernelError(
                    f"[op] the steps of op {self._op!r} that have blocks and whose `when` holds "
                    f"write nothing to output {output.name!r} of shape {shape}; fill it, such as "
                    f"by ferrule.cuda_fill({output.name!r})."
                )

    def _run(self, step: RunStep, binding: Binding) -> Run:
        """A launch for one call, without addresses."""
        of_step = f" of step {step.function!r}"
        blocks = self._sizes(f"blocks{of_step}", step.blocks, binding)
        block = self._positive(f"block{of_step}", step.block, binding)
        if math.prod(block) > MAX_THREADS or block[2] > MOST_DEEP:
            most = f"{MAX_THREADS} threads at most, and {MOST_DEEP} along z"
            raise self._bad(f"block{of_step}", step.block, block, binding, most)
        for axis, size in zip(step.blocks[1:], blocks[1:], strict=True):
            if size > MOST_BLOCKS:
                limit = f"0 to {MOST_BLOCKS} blocks along this axis"
                raise self._bad(f"blocks{of_step}", axis, size, binding, limit)
        setting, limit = f"shared_memory{of_step}", "0 to 2147483647 bytes"
        shared = self._between(setting, step.shared_memory, binding, 0, INT32 - 1, limit)
        cluster = None if step.cluster is None else self._cluster(step, blocks, binding)
        arguments: tuple[bytes | TensorMap, ...] = ()
        if 0 not in blocks:
            arguments = tuple(self._packed(a, of_step, binding) for a in step.arguments)
        return Run(step.function, blocks, block, shared, cluster, arguments, step.pdl)

    def _cluster(self, step: RunStep, blocks: Sizes, binding: Binding) -> Sizes:
        setting = f"cluster of step {step.function!r}"
        cluster = self._positive(setting, step.cluster, binding)
        expected = ""
        if math.prod(cluster) > PORTABLE_CLUSTER:
            most = f"{PORTABLE_CLUSTER} blocks at most"
            expected = f"{most}, for which every GPU with clusters has room"
        elif any(map(operator.mod, blocks, cluster)):
            expected = f"sizes that divide the blocks, {blocks}"
        if expected:
            raise self._bad(setting, step.cluster, cluster, binding, expected)
        return cluster

    def _positive(self, setting: str, axes: Sequence[Expression], binding: Binding) -> Sizes:
        sizes = self._sizes(setting, axes, binding)
        if 0 in sizes:
            raise self._bad(setting, axes, sizes, binding, "positive sizes")
        return sizes

    def _packed(self, argument: StepArgument, of_step: str, binding: Binding) -> bytes | TensorMap:
        """An expression's value as a function takes it; nothing of an array or number."""
        kind, value = argument
        if isinstance(value, unit_maps.MapArgument):
            label, dtype = self._label(f"arguments{of_step}"), self._mapped[value.array][0]
            return unit_maps.for_call(
                label, value, bound_dtype(dtype, binding), lambda size: self._value(size, binding)
            )
        if isinstance(value, str):
            return b""
        if kind == "bool":
            return np.array(self._value(value, binding), kind).tobytes()
        low, high = int(np.iinfo(kind).min), int(np.iinfo(kind).max)
        hint = f'; write "int64 {value}", and take an int64_t' if "32" in kind else ""
        words = f"{kind}, from {low} to {high}{hint}"
        number = self._between(f"arguments{of_step}", value, binding, low, high, words)
        return np.array(number, kind).tobytes()

    # -- what was declared -------------------------------------------------------------------------

    def _headers(self, headers: object) -> tuple[tuple[str, str], ...]:
        """The texts that it can include, by name."""
        if headers is None:
            return ()
        label = self._label("headers")
        if not isinstance(headers, Mapping):
            expected = 'a dictionary such as {"tile.cuh": text}'
            raise KernelTypeError(f"{label}: got {headers!r}, expected {expected}.")
        for name in headers:
            if not isinstance(name, str) or not _HEADER.fullmatch(name) or _LABEL.fullmatch(name):
                raise KernelError(
                    f'{label}: got the name {name!r}, expected one such as "tile.cuh".'
                )
        pairs = headers.items()
        return tuple((name, check_text(name, text, self._op, "cuda")) for name, text in pairs)

    def _options(self, options: object) -> tuple[str, ...]:
        """NVRTC's options."""
        label = self._label("options")
        if isinstance(options, str) or not isinstance(options, Sequence):
            expected = 'a list such as ["--use_fast_math"]'
            raise KernelTypeError(f"{label}: got {options!r}, expected {expected}.")
        for option in options:
            known = isinstance(option, str) and option.startswith(_OPTIONS)
            if not known or option in ("-D", "-U"):
                listed = ", ".join(o for o in _OPTIONS if o.startswith("--") or o in ("-D", "-U"))
                raise KernelError(
                    f"{label}: got {option!r}, expected options of NVRTC that begin with one of "
                    f"{listed}, each one str. Texts to include go to `headers`."
                )
        return tuple(options)

    def _step(self, number: int, step: UnitStep) -> UnitStep:
        """A step, checked and bound to the rule."""
        when = self._condition(step.when)
        where = f"[op] step {number} of op {self._op!r}"
        if isinstance(step, FillStep):
            self._check_array(where, "fill", step.array, written=True)
            if isinstance(step.value, bool) or not isinstance(step.value, (int, float)):
                raise KernelTypeError(f"{where}: got the value {step.value!r}, expected a number.")
            return replace(step, when=when)
        if isinstance(step, CopyStep):
            self._check_array(where, "copy to", step.to, written=True)
            self._check_array(where, "copy", step.source, written=False)
            return replace(step, when=when)
        if isinstance(step, MatmulStep):
            self._check_array(where, "write a product to", step.out, written=True)
            for factor in (step.a, step.b, *[step.factors] * (step.factors is not None)):
                self._check_array(where, "multiply", factor, written=False)
            unit_matmul.check(where, step, self._numbers)
            unit_matmul.check_fits(self._op, step, self._mapped, self._rule.choices)
            return replace(step, when=when)
        if not isinstance(step.function, str) or not _FUNCTION.fullmatch(step.function.strip()):
            raise KernelError(
                f"{where}: got the function {step.function!r}, expected the name of a __global__ "
                'function, or an expression such as "gemm<BLOCK, T>".'
            )
        function = step.function.strip()
        of_step = f" of step {function!r}"
        arguments = tuple(self._argument(f"arguments{of_step}", a) for a in step.arguments)
        cluster = None
        if step.cluster is not None:
            cluster = self._axes(f"cluster{of_step}", step.cluster)
        return RunStep(
            function,
            arguments,
            self._axes(f"blocks{of_step}", step.blocks),
            self._axes(f"block{of_step}", step.block),
            self._size(f"shared_memory{of_step}", step.shared_memory),
            cluster,
            when,
            check_pdl(
                self._label(f"pdl{of_step}"), step.pdl, self.source, *dict(self.headers).values()
            ),
        )

    def _check_array(self, where: str, action: str, name: object, *, written: bool) -> None:
        allowed = self._written if written else self._arrays - self._optional
        if name in self._optional:
            raise KernelError(f"{where}: cannot {action} {name!r}, which may be None.")
        if name not in allowed:
            only = "what is written: outputs, scratch" if written else "the arrays"
            listed = ", ".join(sorted(allowed)) or "none"
            raise KernelError(
                f"{where}: cannot {action} {name!r}; expected one of {only} ({listed})."
            )

    def _argument(self, setting: str, value: object) -> StepArgument:
        label = self._label(setting)
        if isinstance(value, unit_maps.MapArgument):
            declared = {name: dims for name, (_, dims) in self._mapped.items()}
            return StepArgument(
                "tensor_map",
                unit_maps.bound(
                    label, value, declared, lambda size: self._expression(setting, size)
                ),
            )
        text, kind = str(value), ""
        if isinstance(value, str):
            typed = _TYPED.fullmatch(value)
            text, kind = (typed[2], typed[1]) if typed else (value.strip(), "")
            if not typed and text in {*self._arrays, *self._numbers}:
                return StepArgument("array" if text in self._arrays else "number", text)
        elif type(value) is not int:
            raise KernelTypeError(
                f"{label}: got {value!r} of type {type(value).__name__}, expected the name of an "
                'array or number, an int, or an expression such as "M" or "int64 M*N". Other '
                "constants stand in the text, or in `template`."
            )
        if text.isidentifier() and text not in self._rule.dim_names:
            names = [*sorted(self._arrays), *sorted(self._numbers), *self._rule.dim_names]
            raise KernelError(
                f"{label}: there is no array, number or dim {text!r}, but {', '.join(names)}."
            )
        expression = self._expression(setting, text)
        kind = kind or ("bool" if expression.condition else "int32")
        if (kind == "bool") != expression.condition:
            expected = "a condition" if kind == "bool" else "a number"
            raise KernelError(f"{label}: {expression} as {kind}, expected {expected}.")
        return StepArgument(kind, expression)

    def _kind(self, argument: StepArgument) -> str:
        """The type that a function gets for an argument, as `unit.Call` names it."""
        if argument.kind in ("array", "tensor_map"):
            return POINTER if argument.kind == "array" else TENSOR_MAP
        return self._numbers[str(argument.value)] if argument.kind == "number" else argument.kind

    # -- as data -----------------------------------------------------------------------------------

    def to_json(self) -> Any:
        """All that decides what it computes."""
        many = len(self.state)
        return {
            "kind": self.kind,
            "source": self.source,
            "headers": [[*pair] for pair in self.headers],
            "options": list(self.options),
            "specific": self.specific,
            "when": to_json(self.when),
            "template": [[name, to_json(value)] for name, value in self.template],
            "scratch": memory_to_json(
                [a for a in self.scratch[: len(self.scratch) - many] if a.name]
            ),
            "steps": [step_to_json(step) for step in self.steps[many:]],
            **({"state": memory_to_json(self.scratch[-many:])} if many else {}),
        }

    @staticmethod
    def from_json(op: str, rule: Rule, data: Any) -> CudaUnit:
        """The reverse of `to_json`.

        Raises:
            KernelError, RuleError, KeyError, TypeError, ValueError: this is none of `to_json`.
        """
        return CudaUnit(op, rule, UnitText(
            data["source"], tuple(step_from_json(step) for step in data["steps"]),
            memory_from_json(data["scratch"]),
            expression_from_json(data["when"]),
            [(str(name), value_from_json(value)) for name, value in data["template"]],
            {str(name): text for name, text in data["headers"]}, data["options"],
            data["specific"], memory_from_json(data.get("state", ())),
        ))  # fmt: skip


Implementation = KernelBody | CudaUnit | Runner
