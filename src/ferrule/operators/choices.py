"""Tables of what is best for which sizes, measured once per type of GPU; read as expressions."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any, NamedTuple

from .. import dtypes
from ..errors import FerruleError, KernelError, KernelTypeError, RuleError
from ..hosts import protocol as hosts
from ..rules.expression import DEVICE_NUMBERS, DEVICES, MOST, Expression, Node
from ..rules.grammar import parse
from . import call as op_call
from .expressions import SizedImplementation
from .op import Op

FORMAT = 1
_ALWAYS: Node = ("==", ("int", 1), ("int", 1))
_NEVER: Node = ("==", ("int", 0), ("int", 1))
_ROUNDS, _SHORTEST = 7, 1e-3  # of a measurement: how often, and how many seconds at least

Key = tuple[int | str, ...]
Rows = dict[Key, str]
Kind = tuple[str, int, int, int]  # of a device: what it is, and DEVICE_NUMBERS; zeros of the CPU


class Measured(NamedTuple):
    """What was measured for one case.

    Attributes:
        key: the values of the table's key.
        seconds: of each candidate that ran; one that raised an error is missing.
        choice: which is in the table now.
    """

    key: Key
    seconds: dict[str, float]
    choice: str


class Choices:
    """Which of some candidates an op takes, by the device and by sizes: what `choices` returns.

    Attributes:
        path: the file.
        of: the names of the candidates.
        key: what rows are found by: expressions, and dtype variables.
        default: the candidate where the table has no row.
        expressions: the key, read.
        rows: by kind of device and by the key's values.
        names: what the kinds of devices are called.
    """

    def __init__(self, path: Path, of: Sequence[str], key: Sequence[str], default: str) -> None:
        self.path, self.of, self.key, self.default = path, tuple(of), tuple(key), default
        self.rows: dict[Kind, Rows] = {}
        self.names: dict[Kind, str] = {}
        self.expressions = [_read_key(text) for text in key]

    def __repr__(self) -> str:
        return f"<ferrule.Choices {self.path.name}: {', '.join(self.of)}>"

    def when(self, candidate: str) -> Any:
        """The condition under which a candidate is the choice, for ``when=``."""
        self._check(candidate)
        if candidate == self.default:
            others = [self.when(other).node for other in self.of if other != candidate]
            return Expression(("not", _folded("or", others)) if others else _ALWAYS)
        devices_where = [
            ("and", _is_kind(kind), self._covered(sorted(keys, key=_order)))
            for kind, rows in sorted(self.rows.items())
            if (keys := [key for key, name in rows.items() if name == candidate])
        ]
        return Expression(_folded("or", devices_where) if devices_where else _NEVER)

    def number(self, **values: int) -> Any:
        """The number of the candidate that is the choice, for ``template=``, ``constants=`` and all
        else that takes expressions.

        Args:
            values: by the names of all candidates.
        """
        if set(values) != set(self.of):
            raise KernelError(
                f"{self._label()}: got numbers of {', '.join(values)}; expected them of "
                f"{', '.join(self.of)}."
            )
        for name, value in values.items():
            if not _is_int64(value):
                raise KernelTypeError(
                    f"{self._label()}: the number of {name!r} is {value!r}; expected an int of "
                    "64 bits."
                )
        nodes = {name: _literal(value) for name, value in values.items()}
        others = [name for name in self.of if name != self.default]
        return Expression(
            reduce(
                lambda node, name: ("if", self.when(name).node, nodes[name], node),
                others,
                nodes[self.default],
            )
        )

    def fixed(self, candidate: str) -> Choices:
        """A table of which this candidate is always the choice."""
        self._check(candidate)
        return Choices(self.path, self.of, self.key, candidate)

    def _covered(self, keys: Sequence[Key], at: int = 0) -> Node:
        """Whether a call's key is among these, which are in order, from a place on."""
        first = list(dict.fromkeys(key[at] for key in keys))
        parts: list[Node] = []
        for value in first:
            node = self._equal(at, value)
            rest = [key for key in keys if key[at] == value]
            last = at + 1 == len(self.key)
            parts.append(node if last else ("and", node, self._covered(rest, at + 1)))
        return _folded("or", parts)

    def _equal(self, at: int, value: int | str) -> Node:
        if isinstance(value, str):
            return ("is", self.key[at], value)
        return ("==", self.expressions[at].node, _literal(value))

    def _check(self, candidate: str) -> None:
        if candidate not in self.of:
            raise KernelError(
                f"{self._label()}: {candidate!r} is none of its candidates {', '.join(self.of)}."
            )

    def _label(self) -> str:
        return f"[choices] {self.path}"

    # -- the file --------------------------------------------------------------------------------

    def read(self) -> None:
        """Take the rows of the file, if there is one.

        Raises:
            KernelError: it is damaged, or was measured for another key or other candidates.
        """
        if not self.path.exists():
            return
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            if (data["format"], data["key"]) != (FORMAT, list(self.key)):
                raise ValueError(f"its key is {data['key']}, and that of the table {[*self.key]}")
            if "of" not in data:
                raise ValueError("it does not say which candidates were measured")
            if sorted(data["of"]) != sorted(self.of):
                raise ValueError(
                    f"its candidates are {', '.join(data['of'])}, and those of the table "
                    f"{', '.join(self.of)}"
                )
            for device in data["devices"]:
                kind: Any = (device["device"], *(int(device[name]) for name in DEVICE_NUMBERS))
                if kind[0] not in DEVICES:
                    raise ValueError(f"a device {kind[0]!r}")
                rows = {tuple(key): str(name) for key, name in device["rows"]}
                for key, name in rows.items():
                    self._check_row(key, name)
                self.rows[kind], self.names[kind] = rows, str(device["name"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise KernelError(
                f"{self._label()} cannot be read: {error!r}. Delete it, and measure it anew "
                "(ferrule.measure_choices)."
            ) from error

    def _check_row(self, key: Key, name: str) -> None:
        right = [
            value in dtypes.BY_NAME and text.isidentifier()
            if isinstance(value, str)
            else _is_int64(value)
            for text, value in zip(self.key, key, strict=True)
        ]
        if not all(right):
            raise ValueError(f"the key {key}")
        if name not in self.of:
            raise ValueError(f"{name!r} is none of {', '.join(self.of)}")

    def check_writable(self) -> None:
        """Try to make a file where it will be.

        Raises:
            KernelError: that is not possible.
        """
        temporary = self._temporary()
        try:
            temporary.touch()
            temporary.unlink()
            if self.path.is_dir():
                raise IsADirectoryError(f"{self.path} is a directory")
        except OSError as error:
            raise KernelError(f"{self._label()} cannot be written: {error}.") from error

    def _temporary(self) -> Path:
        return self.path.with_name(f".{self.path.name}.{os.getpid()}")

    def write(self) -> None:
        """Write the file, at once or not at all."""
        parts = []
        for kind, rows in sorted(self.rows.items()):
            facts = dict(zip(("device", *DEVICE_NUMBERS), kind, strict=True))
            head = json.dumps({"name": self.names[kind], **facts})[:-1]
            lines = [json.dumps([list(key), rows[key]]) for key in sorted(rows, key=_order)]
            parts.append(head + ', "rows": [\n  ' + ",\n  ".join(lines) + "\n ]}")
        head = json.dumps({"format": FORMAT, "key": self.key, "of": self.of})[:-1]
        text = head + ', "devices": [\n ' + ",\n ".join(parts) + "\n]}\n"
        temporary = self._temporary()
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)


def choices(
    path: str | os.PathLike[str], *, of: Sequence[str], key: Sequence[str], default: str
) -> Choices:
    """A table of which of some candidates is best, by the device and by sizes.

    The file is read now, once, and becomes conditions and numbers, which are part of the op's
    digest. Where there is no file, no such device in it or no row, the default is the choice.

    Args:
        path: a JSON file, as `measure_choices` writes it; beside a module it is
            ``Path(__file__).with_name("linear.json")``.
        of: the names of the candidates.
        key: by what rows are found: expressions of the rule, such as ``"N"`` and ``"bucket(M, 1, 8,
            64)"``, and dtype variables; what tells most rows apart first.
        default: the candidate where nothing was measured.

    Returns:
        The table: ``table.when("split")`` is the condition under which a candidate is the choice,
        for ``when=``; ``table.number(split=4, whole=1)`` the number of the choice, for
        ``template=``, ``constants=``, launches and sizes.

    Raises:
        KernelError: the file is damaged, or was measured for another key or other candidates.
        RuleError: a part of the key is no expression.

    Example:
        >>> import ferrule as fe, numpy as np
        >>> table = fe.choices("sums.json", of=("whole", "rows"), key=["D"], default="rows")
        >>> sums = fe.op("sums", "x[N,D]:float32 -> y[N]:float32", prefer="run",
        ...     run=fe.run_function(lambda x: x.sum(1), when=table.when("whole")),
        ...     metal="uint i = thread_position_in_grid.x; float sum = 0;"
        ...           "for (int k = 0; k < D; k++) sum += x[i * D + k]; y[i] = sum;",
        ...     grid="N", threadgroup=32)
    """
    label = f"[choices] {path}"
    for argument, texts in (("of", of), ("key", key)):
        if not isinstance(texts, (tuple, list)) or not all(isinstance(t, str) for t in texts):
            raise KernelTypeError(f"{label}: `{argument}` is {texts!r}; expected several strs.")
        if not texts or len(set(texts)) < len(texts):
            raise KernelError(f"{label}: `{argument}` is {texts!r}; expected each once.")
    table = Choices(Path(path), of, key, default)
    table.fixed(default)  # which refuses one that is no candidate
    table.read()
    return table


def measure_choices(
    table: Choices,
    make: Callable[[Choices], Op],
    cases: Iterable[Sequence[Any]],
    *,
    timer: Callable[[Callable[[], Any]], float] | None = None,
    margin: float = 0.02,
) -> list[Measured]:
    """Measure all candidates on the device of some inputs, and write what is best to the table's
    file, beside what it has of other devices and sizes.

    Ops that have the table already keep what they have: make them anew, or start a new process.

    Args:
        table: the table.
        make: makes the op of a table, here of those with one candidate each.
        cases: the inputs of a call each. Of several cases of one key the last counts.
        timer: the seconds that a call takes; by default the least of several measurements, taken
            in turn, of as many calls in a row as take a millisecond. Give your own to measure with
            a cold cache, or from a CUDA graph.
        margin: by how much another must be faster than the default to be the choice.

    Raises:
        KernelError: the file cannot be written, which is seen before anything is measured; nothing
            runs one of the cases, or nothing waits for their GPU; what was measured before it is
            not written.
        KernelTypeError: ``make`` gives no op, a case is no sequence of its inputs, or ``timer``
            gives no seconds.
    """
    table.check_writable()
    ops = {name: _checked_op(table, make(table.fixed(name))) for name in table.of}
    measured = []
    for inputs in cases:
        _check_case(table, ops[table.default], inputs)
        call, host, _ = op_call.bound_arrays(ops[table.default], inputs)
        key = tuple([_value(call, table, i) for i in range(len(table.key))])
        facts = call.binding.device()
        on_cpu = facts[":device"] == "cpu"
        numbers = [0 if on_cpu else int(facts.get(name, 0)) for name in DEVICE_NUMBERS]
        kind: Any = (facts[":device"], *numbers)
        calls = {name: partial(_run, op, inputs, host) for name, op in ops.items()}
        wait = getattr(host, "wait", None)
        if wait is None and not on_cpu and timer is None:
            raise KernelError(
                f"[choices] {table.path}: ferrule cannot wait for a GPU through {host.name}; give "
                "torch's tensors, or a `timer`."
            )
        finish = None if on_cpu or wait is None else partial(wait, call.device)
        seconds = _times(calls, timer, finish)
        for name, took in seconds.items():
            if not isinstance(took, (int, float)) or not 0 < took < float("inf"):
                raise KernelTypeError(
                    f"[choices] {table.path}: `timer` gave {took!r} for {name!r}; expected seconds."
                )
        if not seconds:
            raise KernelError(f"[choices] {table.path}: none of {', '.join(table.of)} runs.")
        best = min(seconds, key=seconds.__getitem__)
        if seconds.get(table.default, float("inf")) <= seconds[best] * (1 + margin):
            best = table.default
        table.rows.setdefault(kind, {})[key] = best
        table.names[kind] = _name(call.device)
        measured.append(Measured(key, seconds, best))
    table.write()
    return measured


def _checked_op(table: Choices, op: object) -> Op:
    if not isinstance(op, Op):
        raise KernelTypeError(f"[choices] {table.path}: `make` gave {op!r}; expected an op.")
    return op


def _check_case(table: Choices, op: Op, inputs: object) -> None:
    names = [parameter.name for parameter in op.rule.inputs]
    if not isinstance(inputs, (tuple, list)) or len(inputs) != len(names):
        got = len(inputs) if isinstance(inputs, (tuple, list)) else f"a {type(inputs).__name__}"
        raise KernelTypeError(
            f"[choices] {table.path}: got {got} for a case of op {op.name!r}; expected a tuple of "
            f"all its inputs ({', '.join(names)})."
        )


def _value(call: Any, table: Choices, i: int) -> int | str:
    """What a part of the key is in a call."""
    text = table.key[i]
    if text in call.binding.dtypes:
        return str(call.binding.dtypes[text])
    op = call.op
    SizedImplementation(op.name, op.rule)._expression("key", text)  # which refuses other names
    return int(op.rule.value(op.name, table.expressions[i], call.binding))


def _name(device: str) -> str:
    if not device.startswith("cuda"):
        return device
    from ..tools.driver import driver

    return driver().name(int(device.partition(":")[2] or 0))


def _run(op: Any, inputs: Sequence[Any], host: Any) -> None:
    """A call; on the CPU until it is done."""
    result = op(*inputs)
    if host.name in hosts.graphs:
        for output in result if isinstance(result, tuple) else (result,):
            host.facts(output)  # which evaluates it


def _times(
    calls: Mapping[str, Callable[[], Any]],
    timer: Callable[[Callable[[], Any]], float] | None,
    finish: Callable[[], Any] | None,
) -> dict[str, float]:
    """The seconds of each call that runs; ``finish`` waits for a GPU."""
    seconds: dict[str, float] = {}
    counts: dict[str, int] = {}
    for name, run in calls.items():
        try:
            run()  # which compiles
        except (FerruleError, RuntimeError, ValueError):  # of MLX's nodes, and of memory
            continue
        if timer is not None:
            seconds[name] = timer(run)
            continue
        counts[name] = 1
        while (took := _in_a_row(run, counts[name], finish)) < _SHORTEST:
            counts[name] *= 2
        seconds[name] = took / counts[name]
    for _ in range(_ROUNDS):
        for name, count in counts.items():
            seconds[name] = min(seconds[name], _in_a_row(calls[name], count, finish) / count)
    return seconds


def _in_a_row(run: Callable[[], Any], count: int, finish: Callable[[], Any] | None) -> float:
    start = time.perf_counter()
    for _ in range(count):
        run()
    if finish is not None:
        finish()
    return time.perf_counter() - start


def _read_key(text: str) -> Expression:
    expression = parse(text)
    if expression.condition:
        raise RuleError.at("a condition stands where a number is expected", text, 0)
    return expression


def _is_int64(value: object) -> bool:
    return type(value) is int and abs(value) <= MOST


def _literal(value: int) -> Node:
    return ("int", value) if value >= 0 else ("neg", ("int", -value))


def _is_kind(kind: Kind) -> Node:
    """Whether a call runs on such a device."""
    device: Node = ("is", "device", kind[0])
    if kind[0] == "cpu":
        return device
    numbers = [
        ("==", ("name", name), ("int", number))
        for name, number in zip(DEVICE_NUMBERS, kind[1:], strict=True)
    ]
    return ("and", device, _folded("and", numbers))


def _folded(kind: str, nodes: Sequence[Node]) -> Node:
    """Several operands as nodes of two, in few levels."""
    if len(nodes) == 1:
        return nodes[0]
    middle = len(nodes) // 2
    return (kind, _folded(kind, nodes[:middle]), _folded(kind, nodes[middle:]))


def _order(key: Key) -> list[tuple[bool, int | str]]:
    return [(isinstance(value, str), value) for value in key]
