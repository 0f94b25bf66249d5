"""Python functions as implementations of an op: `run`, `reference`, and those that `make` gives."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .. import dtypes
from ..dtypes import Dtype
from ..errors import KernelError, KernelTypeError
from ..rules.expression import Expression
from ..rules.rule import Binding, Rule
from . import identity
from .expressions import (
    Scratch,
    SizedImplementation,
    bound_dtype,
    dtype_variables,
    expression_from_json,
    memory_to_json,
    to_json,
)
from .prepared import Prepared, all_prepared
from .state import StreamState


class RunnerFunction(NamedTuple):
    """A function that runs an op, for one device and dtypes.

    Attributes:
        function: what is called with the inputs.
        takes_outputs: it has parameters called like the outputs, and gets arrays to write to.
        takes_stream: it has a parameter ``stream``, and gets the current CUDA stream's address.
    """

    function: Callable[..., Any]
    takes_outputs: bool
    takes_stream: bool


class Runner(SizedImplementation):
    """A Python function that runs an op.

    Attributes:
        kind: ``"run"`` or ``"reference"``.
        function: what is called with the inputs; or, where it ``makes``, with the keywords
            ``device``, the dtype variables and the constants, to give such a function.
        version: what stands for the function's content, or None.
        makes: it is no runner itself, but makes one for a device and dtypes.
        constants: what else it is made for.
        contiguous: inputs that are not row-contiguous are copied for it.
        when: the condition under which it is chosen, or None.
        prepared: what it is given beside the inputs, and
        state: what else, which is kept as it leaves it.
        digest: of its content, or of the version that stands for that.
        content: of its content; None where that cannot be read.
    """

    contiguous = False
    prepared: tuple[Prepared, ...] = ()
    state: tuple[Scratch, ...] = ()

    def __init__(
        self,
        op: str,
        rule: Rule,
        function: Callable[..., Any],
        kind: str,
        version: object = None,
        makes: bool = False,
        constants: object = None,
        contiguous: bool = False,
        when: object = None,
        prepared: object = None,
        state: object = None,
    ) -> None:
        super().__init__(op, rule)
        self.when = self._condition(when)
        self.kind, self.function, self.makes, self.contiguous = kind, function, makes, contiguous
        self.version = version
        label = f"`{'make' if makes else kind}` of op {op!r}"
        self.digest = identity.of_callable(label, function, version)
        self.content = identity.content_of(label, function, version, self.digest)
        self.constants = self._template(constants, "constants")
        self.prepared = all_prepared(op, rule, prepared, version)
        self.state = self._memory("state", state)
        self._check_state()
        self._kept = StreamState(op)
        self._variables = dtype_variables(rule)
        self._functions: dict[tuple[Any, ...], RunnerFunction] = {}
        self._lock = threading.RLock()
        self._plain: RunnerFunction | None = None
        if not makes:
            self._plain = self._read(function)
        else:
            self._check_make()

    @property
    def name(self) -> str:
        """The name of the function in messages."""
        return f"`{'make' if self.makes else self.kind}` ({identity.named(self.function)})"

    def function_for(
        self, device: str, binding: Binding, capturing: Callable[[str], bool] | None = None
    ) -> RunnerFunction:
        """The function for a device, dtypes and constants; made at the first such call.

        Args:
            device: ``"cpu"``, ``"cuda:0"`` …
            binding: a call's dtypes and sizes.
            capturing: whether a CUDA graph is being captured on a device; None where there are
                no such graphs.

        Raises:
            KernelError: it would have to be made while a graph is captured.
            KernelTypeError: ``make`` gives no function.
        """
        if self._plain is not None:
            return self._plain
        values: dict[str, Any] = {name: binding.dtypes[name] for name in self._variables}
        for name, constant in self.constants:
            if isinstance(constant, Expression):
                number = self._value(constant, binding)
                values[name] = bool(number) if constant.condition else number
                if constant.of_dtype:
                    values[name] = dtypes.ALL[number].name
            else:
                values[name] = constant.name if isinstance(constant, Dtype) else constant
        key = (device, *values.items())
        cached = self._functions.get(key)
        if cached is not None:
            return cached
        shown = ", ".join([device, *(f"{name} = {value}" for name, value in values.items())])
        if capturing is not None and capturing(device):
            raise KernelError(
                f"[op] op {self._op!r} is called for {shown} for the first time, while a CUDA "
                "graph is captured: its `make` may compile, allocate and wait, which a capture "
                "does not allow. Call the op once with such inputs before the capture."
            )
        with self._lock:  # another thread may be making it
            cached = self._functions.get(key)
            if cached is None:
                function = self.function(device=device, **values)
                if not callable(function):
                    raise KernelTypeError(
                        f"[op] `make` of op {self._op!r} gave {function!r} for {shown}; expected a "
                        "function."
                    )
                cached = self._functions[key] = self._read(function)
        return cached

    def state_for(
        self, binding: Binding, host: Any, device: str, queue: int
    ) -> Iterator[tuple[str, Any]]:
        """What is kept for calls on this stream, by name."""
        for each in self.state:
            shape, dtype = self._shape("state", each, binding), bound_dtype(each.dtype, binding)
            yield each.name, self._kept.array(each.name, shape, dtype, host, device, queue)

    def _check_state(self) -> None:
        """Refuse names that others have.

        Raises:
            KernelError: that is so.
        """
        arguments = [argument.name for argument in (*self._rule.inputs, *self._rule.outputs)]
        taken = {"stream", *arguments, *(each.name for each in self.prepared)}
        for each in self.state:
            if each.name in taken or not each.name.isidentifier():
                raise KernelError(
                    f"{self._label('state')}: {each.name!r} is taken, or no name; choose another."
                )

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

    def _read(self, function: Callable[..., Any]) -> RunnerFunction:
        """Read from a function's signature whether it takes outputs and a stream.

        Raises:
            KernelError: some outputs, and not others; or it cannot be called with the inputs.
        """
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # C functions, and some JITs' objects
            return RunnerFunction(function, False, False)
        names = set(signature.parameters)
        outputs = [output.name for output in self._rule.declared]
        accepted = [name for name in outputs if name in names]
        if accepted and len(accepted) < len(outputs):
            raise KernelError(
                f"[op] {identity.named(function)} has a parameter for output {accepted[0]!r}, but "
                f"none for {next(n for n in outputs if n not in names)!r}; expected all of them, "
                "or none."
            )
        inputs = [parameter.name for parameter in self._rule.inputs]
        prepared = [*(each.name for each in self.prepared), *(each.name for each in self.state)]
        stream = "stream" in names and "stream" not in inputs
        try:
            signature.bind(*inputs, **dict.fromkeys([*accepted, *["stream"] * stream, *prepared]))
        except TypeError as error:
            raise KernelError(
                f"[op] {self.name} of op {self._op!r} is called with the inputs, "
                f"({', '.join([*inputs, *prepared])}), but {identity.named(function)}{signature} "
                f"does not take them: {error}. Besides, it may have parameters called like the "
                f"outputs, {', '.join(outputs)}, and `stream`."
            ) from None
        return RunnerFunction(function, bool(accepted), stream)

    def to_json(self) -> Any:
        """Its digest; the function itself is no data."""
        return {
            "kind": self.kind,
            "digest": self.digest,
            "function": identity.named(self.function),
            "makes": self.makes,
            "contiguous": self.contiguous,
            "constants": [
                [name, value.name if isinstance(value, Dtype) else str(value)]
                for name, value in self.constants
            ],
            # Digests are older than conditions.
            **({} if self.when is None else {"when": to_json(self.when)}),
            **({"state": memory_to_json(self.state)} if self.state else {}),
            **({"prepared": [p.to_json() for p in self.prepared]} if self.prepared else {}),
        }


class AbsentRunner(Runner):
    """A Python function of which a file has the digest and name alone. A call of it raises."""

    def __init__(self, op: str, rule: Rule, data: Any) -> None:
        """From what `Runner.to_json` gave.

        Raises:
            KeyError, TypeError, ValueError: this is none of it.
        """
        if data["kind"] not in ("run", "reference"):
            raise ValueError(f"an implementation of kind {data['kind']!r}")
        if not isinstance(data["digest"], str) or not isinstance(data["function"], str):
            raise TypeError("a function without digest or name")
        SizedImplementation.__init__(self, op, rule)
        self.kind, self.digest, self._saved = data["kind"], data["digest"], data
        self.contiguous = bool(data["contiguous"])
        self.when = self._condition(expression_from_json(data.get("when")))

        def absent(*_: Any, **__: Any) -> Any:
            raise KernelError(
                f"[op] op {op!r} was read from a file, without its Python function "
                f"{data['function']}, which carries it out here; define the op in this process."
            )

        self.function, self.version, self.content = absent, None, None
        self.makes, self.constants = False, ()
        self._plain = RunnerFunction(absent, False, False)

    @property
    def name(self) -> str:
        """The name of the function in messages."""
        return f"`{self.kind}` ({self._saved['function']})"

    def to_json(self) -> Any:
        """The data that it was read from."""
        return self._saved
