"""What carries out an op: a kernel whose launch is declared, or a Python function.

A kernel's launch is worked out from a call's sizes each time, by the expressions that were declared
with it; nothing of an earlier call is kept.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from . import dtypes, identity
from .dtypes import Dtype
from .errors import KernelError, KernelTypeError, RuleError
from .expression import Expression, parse
from .kernel import Kernel, check_distinct, check_identifier, check_not_given, make_kernel
from .rule import Binding, Rule
from .source.names import taken
from .spec import CUDA_RANK, MAX_THREADS, MOST_BLOCKS, MOST_DEEP, with_threads

if TYPE_CHECKING:
    from .devices import Program

INT32 = 2**31

Sizes = tuple[int, int, int]
TemplateValue = int | bool | Dtype
Declared = tuple[tuple[str, Expression | bool | Dtype], ...]  # a template before its call


class Sent(NamedTuple):
    """What a kernel is launched with, for one call.

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


class KernelBody:
    """A kernel in Metal or CUDA, and how it is launched.

    Attributes:
        kind: ``"metal"`` or ``"cuda"``.
        contiguous: inputs that are not row-contiguous are copied first.
        kernel: the text, with the op's arrays, numbers and the dims that it names as inputs; what
            is written in place is an output, after the op's own.
        dims: the dims among the inputs, last of them.
        described: the inputs whose shape or strides the body reads.
        programs: what it became for the dtypes, ranks and template values of earlier calls.
        when: the condition under which it is chosen, or None.
    """

    def __init__(
        self, op: str, rule: Rule, kernel: Kernel, kind: str, *, grid: object, threadgroup: object,
        template: object, init_value: object, shared_memory: object, when: object,
    ) -> None:  # fmt: skip
        self.kind = kind
        self.contiguous = kernel.ensure_row_contiguous
        self._op, self._rule = op, rule
        self.grid = axes_of(op, rule, "grid", grid)
        self.threadgroup = axes_of(op, rule, "threadgroup", threadgroup)
        self.template = template_of(op, rule, template)
        self.fill = _fill(op, rule, init_value)
        self.shared = expression_of(op, rule, "shared_memory", shared_memory)
        self.when = None if when is None else condition_of(op, rule, when)
        variables = dtype_variables(rule)
        names = (*variables, *(name for name, _ in self.template))
        free = [name for name in rule.dim_names if name not in names]
        self.dims = taken(kernel.source, kernel.header, free, kernel=kernel.name)
        for one in rule.inputs:
            if one.optional and f"has_{one.name}" not in kernel.source + kernel.header:
                raise KernelError(
                    f"[op] op {op!r}: input {one.name!r} may be None, but the {kind} body never "
                    f"asks `has_{one.name}`, a bool that says whether it is there."
                )
        values = (*kernel.values, *self.dims) if kind == "cuda" else ()
        self.kernel = replace(kernel, input_names=(*kernel.input_names, *self.dims), values=values)
        asked = [f"has_{one.name}" for one in rule.inputs if one.optional]
        for name in names:
            check_identifier("`template`", name, op, kind)
        every = (*self.kernel.input_names, *kernel.output_names, *names, *asked)
        check_distinct(op, every, kind)
        check_not_given(self.kernel, every)
        self.described = [n for n in self.kernel.input_names if any(self.kernel.wants(n)[:2])]
        self.programs: dict[tuple[object, ...], Program] = {}

    def holds(self, said: Binding) -> bool:
        """Whether it is for a call with these sizes."""
        return self.when is None or bool(self._value(self.when, said))

    def sent(self, said: Binding) -> Sent:
        """What it is launched with.

        Raises:
            KernelError: a size is out of range; says which, and what it was worked out from.
        """
        template = template_values(self._op, self._rule, self.template, said)
        grid = self._sizes("grid", self.grid, said)
        group = with_threads(self._sizes("threadgroup", self.threadgroup, said), grid)
        if 0 in group:
            raise self._bad("threadgroup", self.threadgroup, group, said, "positive sizes")
        if group[0] * group[1] * group[2] > MAX_THREADS:
            most = f"{MAX_THREADS} threads at most"
            raise self._bad("threadgroup", self.threadgroup, group, said, most)
        if self.kind == "cuda":
            self._check_cuda(grid, group, said)
        self._check_described(said)
        fill = self._value(self.fill, said) if isinstance(self.fill, Expression) else self.fill
        shared = self._value(self.shared, said)
        if not 0 <= shared < INT32:
            raise self._bad("shared_memory", self.shared, shared, said, "0 to 2147483647 bytes")
        return Sent(grid, group, template, fill, shared)

    def _check_cuda(self, grid: Sizes, group: Sizes, said: Binding) -> None:
        """Refuse what CUDA cannot launch."""
        if min(group[2], grid[2]) > MOST_DEEP:
            most = f"{MOST_DEEP} threads along z at most"
            raise self._bad("threadgroup", self.threadgroup, group, said, most)
        for axis, size, threads in zip("yz", grid[1:], group[1:], strict=True):
            if -(-size // threads) > MOST_BLOCKS:
                most = f"{MOST_BLOCKS} blocks along {axis} at most, of {threads} threads each"
                raise self._bad("grid", self.grid, grid, said, most)

    def _check_described(self, said: Binding) -> None:
        """Refuse shapes that are more than a body can read: ``x_shape`` holds int32."""
        for name in self.described:
            shape = said.shapes.get(name) or ()
            many = f"{CUDA_RANK} dims" if self.kind == "cuda" else "sizes"
            deep = self.kind == "cuda" and len(shape) > CUDA_RANK
            if deep or max(shape, default=0) >= INT32:
                raise KernelError(
                    f"[op] input {name!r} of op {self._op!r}: got the shape {shape}, but the "
                    f"{self.kind} body reads its shape or strides, which hold {many} of at most "
                    f"{INT32 - 1}; reshape it."
                )

    def _sizes(self, what: str, axes: Sequence[Expression], said: Binding) -> Sizes:
        found = [self._value(axis, said) for axis in axes]
        for axis, size in zip(axes, found, strict=True):
            if not 0 <= size < INT32:
                raise self._bad(what, axis, size, said, f"0 to {INT32 - 1}")
        return found[0], found[1], found[2]

    def _value(self, what: Expression, said: Binding) -> Any:
        return self._rule.value(self._op, what, said)

    def _bad(
        self, what: str, text: object, value: object, said: Binding, expected: str
    ) -> KernelError:
        return wrong_size(self._op, what, text, value, said, expected)

    def to_json(self) -> Any:
        """All that decides what it computes."""
        k = self.kernel
        return {
            "kind": self.kind, "name": k.name, "source": k.source, "header": k.header,
            "ensure_row_contiguous": k.ensure_row_contiguous, "atomic_outputs": k.atomic_outputs,
            "math_mode": k.math_mode, "portable": k.portable,
            "grid": [e.to_json() for e in self.grid],
            "threadgroup": [e.to_json() for e in self.threadgroup],
            "template": [[name, value_to_json(one)] for name, one in self.template],
            "init_value": value_to_json(self.fill), "shared_memory": self.shared.to_json(),
            "when": None if self.when is None else self.when.to_json(),
            "values": [name for name in k.values if name not in self.dims],
        }  # fmt: skip

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
            op, rule, kernel, data["kind"],
            grid=tuple(Expression.from_json(e) for e in data["grid"]),
            threadgroup=tuple(Expression.from_json(e) for e in data["threadgroup"]),
            template=[(str(name), value_from_json(one)) for name, one in data["template"]],
            init_value=value_from_json(data["init_value"]),
            shared_memory=Expression.from_json(data["shared_memory"]),
            when=None if data["when"] is None else Expression.from_json(data["when"]),
        )  # fmt: skip


class Made(NamedTuple):
    """A function that carries out an op, for one device and dtypes.

    Attributes:
        function: what is called with the inputs.
        given: it has parameters called like the outputs, and gets arrays to write to.
        stream: it has a parameter ``stream``, and gets the current CUDA stream's address.
    """

    function: Callable[..., Any]
    given: bool
    stream: bool


class Runner:
    """A Python function that carries out an op.

    Attributes:
        kind: ``"run"`` or ``"reference"``.
        function: what is called with the inputs; or, where it ``makes``, with the keywords
            ``device``, the dtype variables and the constants, to give such a function.
        version: what stands for the function's content, or None.
        makes: it is no runner itself, but makes one for a device and dtypes.
        constants: what else it is made for.
        contiguous: inputs that are not row-contiguous are copied for it.
        digest: of its content, or of the version that stands for that.
        content: of its content; None where that cannot be read.
    """

    when = None
    contiguous = False

    def __init__(
        self, op: str, rule: Rule, function: Callable[..., Any], kind: str, *,
        version: object = None, makes: bool = False, constants: object = None,
        contiguous: bool = False,
    ) -> None:  # fmt: skip
        self.kind, self.function, self.makes, self.contiguous = kind, function, makes, contiguous
        self.version = version
        self._op, self._rule = op, rule
        what = f"`{'make' if makes else kind}` of op {op!r}"
        self.digest = identity.of_callable(what, function, version)
        self.content: str | None = None
        with contextlib.suppress(KernelError):
            self.content = self.digest if version is None else identity.of_callable(what, function)
        self.constants = template_of(op, rule, constants, "constants")
        self._variables = dtype_variables(rule)
        self._made: dict[tuple[Any, ...], Made] = {}
        self._lock = threading.RLock()
        self._plain: Made | None = None
        if not makes:
            self._plain = self._read(function)
        else:
            self._check_make()

    def holds(self, said: Binding) -> bool:
        """Whether it is for a call with these sizes: always."""
        return True

    @property
    def name(self) -> str:
        """How messages call the function."""
        return f"`{'make' if self.makes else self.kind}` ({identity.named(self.function)})"

    def made(
        self, device: str, said: Binding, capturing: Callable[[str], bool] | None = None
    ) -> Made:
        """The function for a device, dtypes and constants; made where it was not before.

        Args:
            device: ``"cpu"``, ``"cuda:0"`` …
            said: a call's dtypes and sizes.
            capturing: whether a CUDA graph is being captured on a device; None where there are
                no such graphs.

        Raises:
            KernelError: it would have to be made while a graph is captured.
            KernelTypeError: ``make`` gives no function.
        """
        if self._plain is not None:
            return self._plain
        values: dict[str, Any] = {name: said.dtypes[name] for name in self._variables}
        for name, one in self.constants:
            if isinstance(one, Expression):
                number = self._rule.value(self._op, one, said)
                values[name] = bool(number) if one.condition else number
            else:
                values[name] = one.name if isinstance(one, Dtype) else one
        key = (device, *values.items())
        found = self._made.get(key)
        if found is not None:
            return found
        shown = ", ".join([device, *(f"{name} = {value}" for name, value in values.items())])
        if capturing is not None and capturing(device):
            raise KernelError(
                f"[op] op {self._op!r} is called for {shown} for the first time, while a CUDA "
                "graph is captured: its `make` may compile, allocate and wait, which a capture "
                "does not allow. Call the op once with such inputs before the capture."
            )
        with self._lock:  # another thread may be making it
            found = self._made.get(key)
            if found is None:
                function = self.function(device=device, **values)
                if not callable(function):
                    raise KernelTypeError(
                        f"[op] `make` of op {self._op!r} gave {function!r} for {shown}; expected a "
                        "function."
                    )
                found = self._made[key] = self._read(function)
        return found

    def _check_make(self) -> None:
        """Refuse a ``make`` that cannot be called.

        Raises:
            KernelError: it does not take the keywords that it will get, or two are the same.
        """
        names = ["device", *self._variables, *(name for name, _ in self.constants)]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise KernelError(
                    f"[op] `constants` of op {self._op!r}: {name!r} is the device, a dtype or "
                    "another constant already; expected a name of its own."
                )
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):
            return
        try:
            signature.bind(**dict.fromkeys(names))
        except TypeError as error:
            raise KernelError(
                f"[op] `make` of op {self._op!r} is called with the keywords {', '.join(names)}, "
                f"but {identity.named(self.function)}{signature} does not take them: {error}."
            ) from None

    def _read(self, function: Callable[..., Any]) -> Made:
        """What a function has parameters for.

        Raises:
            KernelError: some outputs, and not others; or it cannot be called with the inputs.
        """
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # C functions, and some JITs' objects
            return Made(function, False, False)
        names = set(signature.parameters)
        outputs = [one.name for one in self._rule.outputs]
        found = [name for name in outputs if name in names]
        if found and len(found) < len(outputs):
            raise KernelError(
                f"[op] {identity.named(function)} has a parameter for output {found[0]!r}, but "
                f"none for {next(n for n in outputs if n not in names)!r}; expected all of them, "
                "or none."
            )
        inputs = [one.name for one in self._rule.inputs]
        stream = "stream" in names and "stream" not in inputs
        try:
            signature.bind(*inputs, **dict.fromkeys([*found, *["stream"] * stream]))
        except TypeError as error:
            raise KernelError(
                f"[op] {self.name} of op {self._op!r} is called with the inputs, "
                f"({', '.join(inputs)}), but {identity.named(function)}{signature} does not take "
                f"them: {error}. Besides, it may have parameters called like the outputs, "
                f"{', '.join(outputs)}, and `stream`."
            ) from None
        return Made(function, bool(found), stream)

    def to_json(self) -> Any:
        """Its digest; the function itself is no data."""
        return {
            "kind": self.kind, "digest": self.digest, "function": identity.named(self.function),
            "makes": self.makes, "contiguous": self.contiguous,
            "constants": [
                [name, one.name if isinstance(one, Dtype) else str(one)]
                for name, one in self.constants
            ],
        }  # fmt: skip


class AbsentRunner(Runner):
    """What a file knows of a Python function: its digest and name. A call of it raises."""

    def __init__(self, op: str, rule: Rule, data: Any) -> None:
        """From what `Runner.to_json` gave.

        Raises:
            KeyError, TypeError, ValueError: this is none of it.
        """
        if data["kind"] not in ("run", "reference"):
            raise ValueError(f"an implementation of kind {data['kind']!r}")
        if not isinstance(data["digest"], str) or not isinstance(data["function"], str):
            raise TypeError("a function without digest or name")
        self.kind, self.digest, self._saved = data["kind"], data["digest"], data
        self.contiguous = bool(data["contiguous"])

        def absent(*_: Any, **__: Any) -> Any:
            raise KernelError(
                f"[op] op {op!r} was read from a file, without its Python function "
                f"{data['function']}, which carries it out here; define the op in this process."
            )

        self.function, self.version, self.content = absent, None, None
        self.makes, self.constants = False, ()
        self._op, self._rule = op, rule
        self._plain = Made(absent, False, False)

    @property
    def name(self) -> str:
        """How messages call the function."""
        return f"`{self.kind}` ({self._saved['function']})"

    def to_json(self) -> Any:
        """What it was read from."""
        return self._saved


def kernel_of(
    op: str, rule: Rule, kind: str, source: object, header: object = "",
    ensure_row_contiguous: bool = True, atomic_outputs: bool = False, math_mode: object = None,
    portable: bool = False, name: str | None = None,
) -> Kernel:  # fmt: skip
    """The kernel of a body, with the op's arrays and numbers as arguments."""
    kernel = make_kernel(
        op if name is None else name, *argument_names(rule), source, header, ensure_row_contiguous,
        atomic_outputs, None if math_mode is None else {"math_mode": math_mode}, portable, kind,
    )  # fmt: skip
    numbers = tuple(one.name for one in rule.inputs if one.dims is None)
    return replace(kernel, values=numbers) if kind == "cuda" else kernel


def argument_names(rule: Rule) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The inputs and outputs of a kernel for a rule; what is written in place is an output."""
    inputs = tuple(one.name for one in rule.inputs if not one.mutable)
    written = tuple(one.name for one in rule.inputs if one.mutable)
    return inputs, (*(one.name for one in rule.outputs), *written)


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


def value_to_json(one: object) -> Any:
    """A template's or initial value: an expression, a dtype, a number or None."""
    if isinstance(one, Expression):
        return one.to_json()
    return ["dtype", one.name] if isinstance(one, Dtype) else one


def value_from_json(one: Any) -> Any:
    """The reverse of `value_to_json`."""
    if isinstance(one, list) and one[0] == "dtype":
        return dtypes.BY_NAME[one[1]]
    return Expression.from_json(one) if isinstance(one, list) else one


def wrong_size(
    op: str, what: str, text: object, value: object, said: Binding, expected: str
) -> KernelError:
    """The error for what an expression is for one call's sizes."""
    if isinstance(text, tuple):
        text = f"({', '.join(map(str, text))})"
    sizes = ", ".join(f"{n} {s}" for n, s in said.shapes.items() if s)
    got = f"got {value}" if str(text) == str(value) else f"{text} is {value} for {sizes}"
    return KernelError(f"[op] `{what}` of op {op!r}: {got}; expected {expected}.")


def template_values(
    op: str, rule: Rule, template: Declared, said: Binding,
    number: Callable[[Expression], int] | None = None,
) -> tuple[tuple[str, TemplateValue], ...]:  # fmt: skip
    """The template parameters of one call: dtypes, ``has_<input>``, and what was declared.

    Args:
        number: what an expression is; by default it is worked out from ``said``.

    Raises:
        KernelError: one is no int32.
    """
    found: list[tuple[str, TemplateValue]] = [
        (name, dtypes.BY_NAME[said.dtypes[name]]) for name in dtype_variables(rule)
    ]
    for one in rule.inputs:
        if one.optional:
            found.append((f"has_{one.name}", said.shapes[one.name] is not None))
    for name, value in template:
        if not isinstance(value, Expression):
            found.append((name, value))
            continue
        size = rule.value(op, value, said) if number is None else number(value)
        if not -INT32 <= size < INT32:
            raise wrong_size(op, "template", f"{name} = {value}", size, said, "an int32")
        found.append((name, bool(size) if value.condition else size))
    return tuple(found)


def dtype_variables(rule: Rule) -> tuple[str, ...]:
    """The dtype variables of arrays, in the order in which they appear."""
    found = dict.fromkeys(
        one.dtype for one in rule.inputs if one.dtype not in dtypes.BY_NAME and one.dims is not None
    )
    return tuple(found)


def expression_of(op: str, rule: Rule, what: str, given: object) -> Expression:
    """An int, text or `Expression` over what a launch may depend on."""
    if isinstance(given, Expression):
        found = given
    elif type(given) is int:
        found = Expression(("neg", ("int", -given)) if given < 0 else ("int", given))
    elif isinstance(given, str):
        try:
            found = parse(given)
        except RuleError as error:
            raise RuleError(
                f"[op] `{what}` of op {op!r}: {error}", text=error.text, position=error.position
            ) from None
    else:
        raise KernelTypeError(
            f"[op] `{what}` of op {op!r}: got {given!r} of type {type(given).__name__}, expected "
            'an int or an expression such as "B*N".'
        )
    known = set(rule.dim_names)
    for name in sorted(found.names - known):
        raise RuleError.at(
            f"[op] `{what}` of op {op!r}: there is no dim {name!r}; the rule binds "
            f"{', '.join(sorted(known)) or 'none'}",
            str(found), _find(str(found), name),
        )  # fmt: skip
    arrays = {
        a.name for a in (*rule.inputs, *rule.outputs) if a.dims is not None and not a.optional
    }
    for name in sorted(found.arrays - arrays):
        raise RuleError.at(
            f"[op] `{what}` of op {op!r}: there is no array {name!r} that is always there",
            str(found), _find(str(found), name),
        )  # fmt: skip
    return found


def _find(text: str, name: str) -> int:
    found = re.search(rf"\b{name}\b", text)
    return found.start() if found else 0


def condition_of(op: str, rule: Rule, given: object) -> Expression:
    found = expression_of(op, rule, "when", given)
    if not found.condition:
        raise KernelError(
            f'[op] `when` of op {op!r}: got {given!r}, expected a condition, such as "M <= 16".'
        )
    return found


def axes_of(op: str, rule: Rule, what: str, given: object) -> tuple[Expression, ...]:
    """One to three sizes; those left out are 1."""
    parts: Sequence[object] = given if isinstance(given, (list, tuple)) else [given]
    if not 1 <= len(parts) <= 3:
        raise KernelError(
            f"[op] `{what}` of op {op!r}: got {len(parts)} sizes, expected one to three."
        )
    found = [expression_of(op, rule, what, one) for one in parts]
    for one in found:
        if one.condition:
            raise KernelError(
                f"[op] `{what}` of op {op!r}: got the condition {one}, expected a size."
            )
    return (*found, *[Expression(("int", 1))] * (3 - len(found)))


def template_of(op: str, rule: Rule, given: object, what: str = "template") -> Declared:
    """Template parameters, or constants: ints and texts become expressions."""
    if given is None:
        return ()
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    if isinstance(pairs, (str, bytes)) or not isinstance(pairs, Sequence):
        raise KernelTypeError(
            f"[op] `{what}` of op {op!r}: got {given!r}, expected a dictionary such as "
            '{"D": "D"}.'
        )
    found: list[tuple[str, Expression | bool | Dtype]] = []
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
            raise KernelTypeError(
                f"[op] `{what}` of op {op!r}: got {pair!r}, expected a name and a value."
            )
        name, value = pair
        dtype = None if isinstance(value, (str, int)) else dtypes.find(value)
        if isinstance(value, bool):
            found.append((name, value))
        elif dtype is not None:
            found.append((name, dtype))
        else:
            found.append((name, expression_of(op, rule, f"{what}[{name!r}]", value)))
    return tuple(found)


def _fill(op: str, rule: Rule, given: object) -> Expression | float | None:
    if given is None or isinstance(given, (bool, float)):
        return given
    if isinstance(given, int):
        return given
    return expression_of(op, rule, "init_value", given)
