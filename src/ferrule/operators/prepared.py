"""What a Python function is given beside its inputs: arrays made of weights, kept as long as the
weights stay as they are."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import KernelError, KernelTypeError
from ..hosts import protocol as hosts
from ..hosts.protocol import Identity
from ..rules.rule import Rule
from . import identity


def all_prepared(op: str, rule: Rule, declared: object, version: object) -> tuple[Prepared, ...]:
    """What `prepared` of a function declares, read.

    Raises:
        KernelError, KernelTypeError: it cannot be understood.
    """
    if declared is None:
        return ()
    if not isinstance(declared, Mapping):
        raise KernelTypeError(
            f"[op] `prepared` of op {op!r}: got {declared!r}, expected a dictionary such as "
            '{"packed": (pack, "w", "scale")}.'
        )
    return tuple([Prepared(op, rule, *item, version) for item in declared.items()])


class _Kept(NamedTuple):
    """What was prepared.

    Attributes:
        versions: those of the weights.
        value: what the function gave.
        owners: weak references to the weights' memory, whose end is the end of this.
    """

    versions: tuple[object, ...]
    value: Any
    owners: list[weakref.ref[Any]]


class _Entries(NamedTuple):
    """What one function made, by the weights it was made of. Ops that have the function share it:
    a product and its derivative, for one."""

    kept: dict[object, _Kept]
    lock: threading.RLock


_of_functions: weakref.WeakKeyDictionary[Any, _Entries] = weakref.WeakKeyDictionary()


def _entries_of(function: Any) -> _Entries:
    try:
        return _of_functions.setdefault(function, _Entries({}, threading.RLock()))
    except TypeError:  # it has no hash, or there are no weak references to it
        return _Entries({}, threading.RLock())


class Prepared:
    """One thing that is made of weights, once for each of their versions.

    Attributes:
        name: the keyword under which the runner gets it.
        function: makes it of the ``inputs``.
        inputs: the names of the inputs that it is made of.
        digest: of the function's content, or of the version that stands for that.
        content: of the function's content; None where that cannot be read.
    """

    def __init__(
        self, op: str, rule: Rule, name: object, declared: object, version: object
    ) -> None:
        where = f"`prepared` of op {op!r}"
        label = f"[op] {where}"
        parts: Sequence[Any] = declared if isinstance(declared, (tuple, list)) else ()
        if len(parts) < 2 or not callable(parts[0]) or not isinstance(name, str):
            raise KernelTypeError(
                f"{label}: got {name!r}: {declared!r}; expected a name, a function and the inputs "
                'that it takes, such as {"packed": (pack, "w", "scale")}.'
            )
        taken = {"stream", "device", *rule.numbers}
        taken |= {argument.name for argument in (*rule.inputs, *rule.outputs)}
        if not name.isidentifier() or name in taken:
            raise KernelError(f"{label}: {name!r} is taken, or no name; choose another.")
        arrays = {a.name: a for a in rule.inputs if a.dims is not None}
        for weight in parts[1:]:
            if weight not in arrays:
                raise KernelError(
                    f"{label}: {name!r} is made of {weight!r}, which is none of the arrays "
                    f"{', '.join(arrays)}."
                )
            if arrays[weight].mutable:
                raise KernelError(
                    f"{label}: {name!r} is made of {weight!r}, which each call writes in place."
                )
        self._op, self.name, self.function, self.inputs = op, name, parts[0], tuple(parts[1:])
        self._check_parameters(label)
        self.version = version
        self.digest = identity.of_callable(where, self.function, version)
        self.content = identity.content_of(where, self.function, version, self.digest)
        self._kept, self._lock = _entries_of(self.function)

    def _check_parameters(self, label: str) -> None:
        """Refuse a function that cannot be called with the inputs.

        Raises:
            KernelError: that is so.
        """
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):  # C functions, and some JITs' objects
            return
        try:
            signature.bind(*self.inputs)
        except TypeError as error:
            raise KernelError(
                f"{label}: {self.name!r} is made of ({', '.join(self.inputs)}), but "
                f"{identity.named(self.function)}{signature} does not take them: {error}."
            ) from None

    def to_json(self) -> Any:
        """Its digest; the function itself is no data."""
        return [self.name, self.digest, identity.named(self.function), *self.inputs]

    def forget(self) -> None:
        """Prepare anew at the next call."""
        for key, kept in list(self._kept.items()):
            self._kept[key] = kept._replace(versions=())

    def value(
        self,
        counts: Counter[str],
        device: str,
        weights: Mapping[str, Any],
        passed: Mapping[str, Any],
        host: Any,
        capturing: bool,
    ) -> Any:
        """What the function makes of a call's weights.

        Args:
            counts: the op's.
            device: the call's.
            weights: its inputs.
            passed: the same as functions get them: row-contiguous, for one.
            host: of the arrays.
            capturing: a CUDA graph is being captured.

        Raises:
            KernelError: it would have to be made while a graph is captured.
        """
        arrays = [weights[name] for name in self.inputs]
        known = [hosts.identity(host, array) for array in arrays if array is not None]
        identities = [each for each in known if each is not None]
        changing = {each.key for each in identities if each.version is hosts.UNKNOWN}
        if changing:  # what was kept before they could be written to may be of other values
            for entry, old in list(self._kept.items()):
                if any(id(owner()) in changing for owner in old.owners):
                    self._kept.pop(entry, None)
        if not known or None in known or changing:  # whether they change cannot be told
            return self._made(counts, passed)
        key = tuple([each[:2] for each in identities]), tuple([array is None for array in arrays])
        versions = tuple([each.version for each in identities])
        kept = self._kept.get(key)
        if kept is not None and kept.versions == versions:
            return kept.value
        if capturing:
            raise KernelError(
                f"[op] op {self._op!r} prepares {self.name!r} for these weights, which are new or "
                "have changed, while a CUDA graph is captured: the graph would do it again in each "
                "replay. Call the op once with them before the capture."
            )
        with self._lock:  # another thread may be preparing it
            kept = self._kept.get(key)
            if kept is None or kept.versions != versions:
                value = self._made(counts, passed)
                kept = self._keep(device, key, versions, identities, host, value)
        return kept.value

    def _made(self, counts: Counter[str], passed: Mapping[str, Any]) -> Any:
        counts["prepare"] += 1
        return self.function(*[passed[name] for name in self.inputs])

    def _keep(
        self,
        device: str,
        key: object,
        versions: tuple[object, ...],
        known: Sequence[Identity],
        host: Any,
        value: Any,
    ) -> _Kept:
        """Keep what was made until its weights go."""
        entries = self._kept
        value = _apart(host, value, {each.key for each in known})
        before = entries.get(key)
        on_gpu = device != "cpu"

        def lasting(new: Any) -> Any:
            return host.outside_pools(new, device) if on_gpu else new

        # Graphs that were captured go on reading where it was before.
        value = _renewed(None if before is None else before.value, value, lasting)
        if on_gpu:  # the next call may be on another stream
            host.wait(device)
        owners = [weakref.ref(each.owner, lambda _: entries.pop(key, None)) for each in known]
        entries[key] = kept = _Kept(versions, value, owners)
        return kept


def _apart(host: Any, value: Any, weights: set[int]) -> Any:
    """What was prepared, with copies of what lies in the weights' own memory, which it would keep
    alive."""
    if isinstance(value, (tuple, list)):
        return tuple([_apart(host, part, weights) for part in value])
    if hosts.find(type(value)) is host:
        of_value = hosts.identity(host, value)
        if of_value is not None and of_value.key in weights:
            return value.clone() if hasattr(value, "clone") else value.copy()
    return value


def _renewed(before: Any, value: Any, lasting: Callable[[Any], Any]) -> Any:
    """A new value in the memory of the one before, where it is a tensor of the same kind; else in
    memory that lasts."""
    if isinstance(value, tuple) and isinstance(before, tuple) and len(value) == len(before):
        return tuple([_renewed(*pair, lasting) for pair in zip(before, value, strict=True)])
    if not hasattr(before, "copy_") or type(before) is not type(value):
        return lasting(value)
    same = (before.shape, before.dtype, before.device) == (value.shape, value.dtype, value.device)
    return before.copy_(value) if same else lasting(value)
