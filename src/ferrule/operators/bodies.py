"""Kernels as implementations of an op, with a declared launch.

A kernel's launch is evaluated for a call's sizes each time, from the expressions that were declared
with it; nothing of an earlier call is kept.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import KernelError
from ..kernel import (
    Kernel,
    check_distinct,
    check_identifier,
    check_not_given,
    check_pdl,
    make_kernel,
)
from ..rules.expression import Expression
from ..rules.rule import Binding, Rule
from ..source.names import taken
from ..spec import CUDA_RANK, MAX_THREADS, MOST_BLOCKS, MOST_DEEP, with_threads
from .expressions import (
    INT32,
    SizedImplementation,
    Sizes,
    TemplateValue,
    dtype_variables,
    expression_from_json,
    to_json,
    value_from_json,
)

if TYPE_CHECKING:
    from ..devices.protocol import Program


class BodyLaunch(NamedTuple):
    """Grid, threadgroup, template and fill of a kernel, for one call.

    Attributes:
        grid, threadgroup: threads along x, y and z.
        template: names and values, in order.
        fill: what outputs are filled with first, or None.
        shared: for a CUDA body, bytes of dynamic shared memory.
    """

    grid: Sizes
    threadgroup: Sizes
    template: tuple[tuple[str, TemplateValue], ...]
    fill: float | None
    shared: int = 0


class KernelBody(SizedImplementation):
    """A kernel in Metal or CUDA, and how it is launched.

    Attributes:
        kind: ``"metal"`` or ``"cuda"``.
        contiguous: inputs that are not row-contiguous are copied first.
        kernel: the text, with the op's arrays, numbers and the dims that it names as inputs; what
            is written in place is an output, after the op's own.
        dims: the dims, and sizes of ``*S``, among the inputs, last of them.
        described: the inputs whose shape or strides the body reads.
        programs: what it became for the dtypes, ranks and template values of earlier calls.
        when: the condition under which it is chosen, or None.
    """

    def __init__(
        self, op: str, rule: Rule, kernel: Kernel, kind: str, *, grid: object, threadgroup: object,
        template: object, init_value: Any, shared_memory: object, when: object, pdl: object = False,
    ) -> None:  # fmt: skip
        super().__init__(op, rule)
        self.kind = kind
        self.contiguous = kernel.ensure_row_contiguous
        self.grid = self._axes("grid", grid)
        self.threadgroup = self._axes("threadgroup", threadgroup)
        self.template = self._template(template)
        self.fill: Expression | float | None = init_value
        if init_value is not None and not isinstance(init_value, (bool, int, float)):
            self.fill = self._expression("init_value", init_value)
        self.shared = self._expression("shared_memory", shared_memory)
        self.when = self._condition(when)
        names = (*dtype_variables(rule), *(name for name, _ in self.template))
        free = [name for name in (*rule.dim_names, *rule.star_sizes) if name not in names]
        self.dims = taken(kernel.source, kernel.header, free, kernel=kernel.name)
        for parameter in rule.inputs:
            if parameter.optional and f"has_{parameter.name}" not in kernel.source + kernel.header:
                raise KernelError(
                    f"[op] op {op!r}: input {parameter.name!r} may be None, but the {kind} body "
                    f"never asks `has_{parameter.name}`, a bool that says whether it is there."
                )
        values = (*kernel.values, *self.dims) if kind == "cuda" else ()
        names_of = (*kernel.input_names, *self.dims)
        pdl = check_pdl(self._label("pdl"), pdl, kernel.source, kernel.header)
        self.kernel = replace(kernel, input_names=names_of, values=values, pdl=pdl)
        presence = [f"has_{parameter.name}" for parameter in rule.inputs if parameter.optional]
        for name in names:
            check_identifier("`template`", name, op, kind)
        all_names = (*self.kernel.input_names, *kernel.output_names, *names, *presence)
        check_distinct(op, all_names, kind)
        check_not_given(self.kernel, all_names)
        self.described = [n for n in self.kernel.input_names if any(self.kernel.wants(n)[:2])]
        self.programs: dict[tuple[object, ...], Program] = {}

    def launch_for(self, binding: Binding) -> BodyLaunch:
        """Its launch for one call.

        Raises:
            KernelError: a size is out of range; says which, and the expression that gave it.
        """
        template = self.template_for(binding)
        grid = self._sizes("grid", self.grid, binding)
        group = with_threads(self._sizes("threadgroup", self.threadgroup, binding), grid)
        if 0 in group:
            raise self._bad("threadgroup", self.threadgroup, group, binding, "positive sizes")
        if group[0] * group[1] * group[2] > MAX_THREADS:
            most = f"{MAX_THREADS} threads at most"
            raise self._bad("threadgroup", self.threadgroup, group, binding, most)
        if self.kind == "cuda":
            self._check_cuda(grid, group, binding)
        self._check_described(binding)
        fill = self._value(self.fill, binding) if isinstance(self.fill, Expression) else self.fill
        limit = "0 to 2147483647 bytes"
        shared = self._between("shared_memory", self.shared, binding, 0, INT32 - 1, limit)
        return BodyLaunch(grid, group, template, fill, shared)

    def _check_cuda(self, grid: Sizes, group: Sizes, binding: Binding) -> None:
        """Refuse what CUDA cannot launch."""
        if min(group[2], grid[2]) > MOST_DEEP:
            most = f"{MOST_DEEP} threads along z at most"
            raise self._bad("threadgroup", self.threadgroup, group, binding, most)
        for axis, size, threads in zip("yz", grid[1:], group[1:], strict=True):
            if -(-size // threads) > MOST_BLOCKS:
                most = f"{MOST_BLOCKS} blocks along {axis} at most, of {threads} threads each"
                raise self._bad("grid", self.grid, grid, binding, most)

    def _check_described(self, binding: Binding) -> None:
        """Refuse shapes that are more than a body can read: ``x_shape`` holds int32."""
        for name in self.described:
            shape = binding.shapes.get(name) or ()
            many = f"{CUDA_RANK} dims" if self.kind == "cuda" else "sizes"
            deep = self.kind == "cuda" and len(shape) > CUDA_RANK
            if deep or max(shape, default=0) >= INT32:
                raise KernelError(
                    f"[op] input {name!r} of op {self._op!r}: got the shape {shape}, but the "
                    f"{self.kind} body reads its shape or strides, which hold {many} of at most "
                    f"{INT32 - 1}; reshape it."
                )

    def to_json(self) -> Any:
        """All that decides what it computes."""
        k = self.kernel
        return {
            "kind": self.kind,
            "name": k.name,
            "source": k.source,
            "header": k.header,
            "ensure_row_contiguous": k.ensure_row_contiguous,
            "atomic_outputs": k.atomic_outputs,
            "math_mode": k.math_mode,
            "portable": k.portable,
            "grid": to_json(self.grid),
            "threadgroup": to_json(self.threadgroup),
            "template": [[name, to_json(value)] for name, value in self.template],
            "init_value": to_json(self.fill),
            "shared_memory": to_json(self.shared),
            "when": to_json(self.when),
            "values": [name for name in k.values if name not in self.dims],
            **({"pdl": True} if k.pdl else {}),
        }

    @staticmethod
    def from_json(op: str, rule: Rule, data: Any) -> KernelBody:
        """The reverse of `to_json`.

        Raises:
            KernelError, RuleError, KeyError, TypeError, ValueError: this is none of `to_json`.
        """

        kernel = kernel_of(
            op, rule, data["kind"], data["source"], data["header"], data["ensure_row_contiguous"],
            data["atomic_outputs"], data["math_mode"], data["portable"], data["name"],
        )  # fmt: skip
        kernel = replace(kernel, values=tuple(map(str, data["values"])))
        return KernelBody(
            op,
            rule,
            kernel,
            data["kind"],
            grid=expression_from_json(data["grid"]),
            threadgroup=expression_from_json(data["threadgroup"]),
            template=[(str(n), value_from_json(v)) for n, v in data["template"]],
            init_value=value_from_json(data["init_value"]),
            shared_memory=Expression.from_json(data["shared_memory"]),
            when=expression_from_json(data["when"]),
            pdl=data.get("pdl", False),
        )


def kernel_of(
    op: str,
    rule: Rule,
    kind: str,
    source: object,
    header: object = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    math_mode: object = None,
    portable: bool = False,
    name: str | None = None,
) -> Kernel:
    """The kernel of a body, with the op's arrays and numbers as arguments."""
    kernel = make_kernel(
        op if name is None else name,
        *argument_names(rule),
        source,
        header,
        ensure_row_contiguous,
        atomic_outputs,
        None if math_mode is None else {"math_mode": math_mode},
        portable,
        kind,
    )
    numbers = tuple(parameter.name for parameter in rule.inputs if parameter.dims is None)
    return replace(kernel, values=numbers) if kind == "cuda" else kernel


def argument_names(rule: Rule) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The inputs and outputs of a kernel for a rule; what is written in place is an output."""
    inputs = tuple(parameter.name for parameter in rule.inputs if not parameter.mutable)
    written = tuple(parameter.name for parameter in rule.inputs if parameter.mutable)
    return inputs, (*(output.name for output in rule.outputs), *written)


def check_names(op: str, rule: Rule, kernel: Kernel) -> None:
    """Refuse a kernel that was made for other arguments than the rule's.

    Raises:
        KernelError: that is so.
    """
    inputs, outputs = argument_names(rule)
    if (kernel.input_names, kernel.output_names) != (inputs, outputs):
        raise KernelError(
            f"[op] op {op!r}: the kernel {kernel.name!r} has the inputs "
            f"{list(kernel.input_names)} and outputs {list(kernel.output_names)}, but the rule has "
            f"{list(inputs)} and {list(outputs)}, what is written in place among the outputs; "
            "expected the same names in the same order."
        )
