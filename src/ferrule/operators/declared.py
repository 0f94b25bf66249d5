"""What an op declares, as data: its rule, implementations, derivative and batching rules; and
their digest. Checks of what is declared beside implementations."""

from __future__ import annotations

import contextlib
import inspect
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any

from ..errors import KernelError, KernelTypeError, RuleError
from ..hosts import imported
from ..rules.rule import Rule, parse_rule
from . import identity
from .runners import AbsentRunner
from .unit_steps import Implementation

digesting: ContextVar[tuple[Declared, ...]] = ContextVar("digesting", default=())
PARAMETERS = {
    "vjp": ("primals", "cotangents", "outputs"),
    "jvp": ("primals", "tangents", "outputs"),
    "vmap": ("size", "axes", "primals"),
}  # of a rule's function; that of a vjp may have `wanted`
ITSELF = "op 0"  # the digest of an op that is a rule of its own

_defined: weakref.WeakSet[Declared] = weakref.WeakSet()


class Declared:
    """What an op declares; `Op` has the attributes in words.

    Attributes:
        in_place: the inputs that are written.
    """

    def __init__(
        self,
        name: str,
        rule: Rule,
        implementations: Sequence[Implementation],
        batch: tuple[str, ...],
        autocast: str | None,
        partial_sums: tuple[str, ...],
        tags: tuple[str, ...],
    ) -> None:
        self.name, self.rule, self.tags = name, rule, tags
        self.in_place = tuple(argument for argument in rule.inputs if argument.mutable)
        self.implementations = tuple(implementations)
        self.bound: dict[object, Any] = {}  # what calls of a device and sizes share: see launch.py
        self.batch, self.autocast, self.partial_sums = batch, autocast, partial_sums
        self.rules: dict[str, Derived] = {}
        self.counts: Counter[str] = Counter()
        self._digest: str | None = None
        _defined.add(self)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Run it: `Op` does."""
        raise NotImplementedError

    def to_json(self) -> Any:
        """All that decides what it computes; Python functions by their digests."""
        around = digesting.get()
        token = digesting.set(around if self in around else (*around, self))
        try:
            rules = {kind: rule.digest for kind, rule in sorted(self.rules.items())}
        finally:
            digesting.reset(token)
        return {
            "name": self.name,
            "rule": self.rule.to_json(),
            "batch": list(self.batch),
            "partial_sums": list(self.partial_sums),
            "autocast": self.autocast,
            "implementations": [body.to_json() for body in self.implementations],
            "rules": rules,
            **({"tags": list(self.tags)} if self.tags else {}),
        }

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that tell it from every op that computes something else."""
        around = digesting.get()
        if self in around:  # a rule of it calls it again
            return f"op {around.index(self)}"
        if self._digest is not None and not around:
            return self._digest
        token = digesting.set((*around, self))
        try:
            digest = identity.of_op(self.to_json())
        finally:
            digesting.reset(token)
        if not around:  # what is found inside of another depends on that
            self._digest = digest
        return digest

    ferrule_digest = digest

    def refresh(self) -> None:
        """Have the next call prepare anew what is ``prepared`` of weights.

        Needed after writes that an array does not tell of: through ``tensor.data``, by NumPy into a
        tensor's memory, by the replay of a CUDA graph.
        """
        for op in list(_defined):  # torch may run another that is the same
            if op is self or (op.name == self.name and op.digest == self.digest):
                for body in op.implementations:
                    for each in getattr(body, "prepared", ()):
                        each.forget()

    def traces_python(self) -> bool:
        """Whether tracing it may read what its digest does not cover: a rule of it, or of ops in
        its rules, is a Python function for which no `version` stands."""
        seen: set[Declared] = set()
        pending: list[Declared] = [self]
        while pending:
            op = pending.pop()
            if op in seen:
                continue
            seen.add(op)
            for rule in op.rules.values():
                if rule.op is None and rule.version is None:
                    return True
                pending += rule.ops()
        return False

    @property
    def _declared(self) -> tuple[Any, ...]:
        return self.batch, self.autocast, self.partial_sums, self.tags

    @property
    def partial(self) -> bool:
        """Whether it was read from a file, without Python functions that belong to it."""
        return any(isinstance(body, AbsentRunner) for body in self.implementations) or any(
            isinstance(rule, AbsentRule) for rule in self.rules.values()
        )

    def complete(self, other: Declared) -> None:
        """Take over what this op was read without from another of the same digest."""
        if not other.partial:
            if self.partial:
                self.implementations = other.implementations
                self.bound = {}
            # Their ops may be complete, too. Of functions of one version the first stays.
            kept = {kind: rule for kind, rule in self.rules.items() if rule.version is not None}
            self.rules = {**other.rules, **kept}


def defined(name: str, digest: str) -> Any:
    """The op of this name and digest in this process, if there is one; one that is not partial, if
    there are several."""
    same = [op for op in list(_defined) if op.name == name and op.digest == digest]
    return min(same, key=lambda op: op.partial, default=None)


class Derived:
    """One rule of an op.

    Attributes:
        kind: ``"vjp"``, ``"jvp"`` or ``"vmap"``.
        op: the op that it is, or None.
        function: the Python function that it is, or None.
        version: what stands for the function's content, or None.
        takes_wanted: of a vjp, whether the function has a parameter ``wanted``.
        gives_wanted: whether it must not give None for what is wanted: one that has
            it, and of an absent rule what the last call found.
        digest: of its content.
    """

    takes_wanted = gives_wanted = False

    def __init__(
        self,
        of: Declared,
        kind: str,
        rule: object,
        version: object,
        matched: Callable[[Any, Any], None],
    ) -> None:
        self.kind, self.version = kind, version
        self._by_version: str | None = None
        self.op: Declared | None = None
        self.function: Callable[..., Any] | None = None
        if isinstance(rule, Declared):
            matched(of, rule)
            self.op = rule
        elif callable(rule):
            self.function = rule
            self._what = f"`def_{kind}` of op {of.name!r}"
            digest = self.digest  # refuses what has none, now
            self._by_version = None if version is None else digest
            self._check_parameters(rule)
        else:
            raise KernelTypeError(
                f"[op] `def_{kind}` of op {of.name!r}: got {rule!r} of type {type(rule).__name__}, "
                "expected an op or a function."
            )

    def _check_parameters(self, function: Callable[..., Any]) -> None:
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # of C functions
            return
        self.takes_wanted = self.kind == "vjp" and "wanted" in signature.parameters
        self.gives_wanted = self.takes_wanted
        more = {"wanted": ()} if self.takes_wanted else {}
        try:
            signature.bind(*PARAMETERS[self.kind], **more)
        except TypeError:
            expected = ", ".join(PARAMETERS[self.kind])
            raise KernelError(
                f"[op] {self._what}: the function has the parameters {signature}; expected "
                f"({expected})" + (", and perhaps `wanted`." if self.kind == "vjp" else ".")
            ) from None

    @property
    def digest(self) -> str:
        """The digest of its content, which is read each time: ops in it may get rules later."""
        if self.op is not None:
            return self.op.digest
        if self._by_version is not None:
            return self._by_version
        return identity.of_callable(self._what, self.function, self.version)

    @property
    def content(self) -> object:
        """What tells a function's content, whatever its version, in this process: its digest; where
        it holds what has none, which objects these are."""
        with contextlib.suppress(KernelError):
            return identity.of_callable(self._what, self.function)
        cells = getattr(self.function, "__closure__", None) or ()
        return [id(c.cell_contents) for c in cells if c != types.CellType()]

    def ops(self) -> list[Any]:
        """The ops that it calls, as far as can be told from its code."""
        return identity.ops_in(self.function) if self.op is None else [self.op]


class AbsentRule(Derived):
    """A rule that is a Python function, of which a file has the digest alone. A call of it calls
    the same op's rule, if that was defined in the meantime, and raises else."""

    takes_wanted = True

    def __init__(self, of: Declared, kind: str, digest: str) -> None:
        self.kind, self.op, self.version, self._saved = kind, None, None, digest

        def absent(*arguments: Any, **wanted: Any) -> Any:
            op = defined(of.name, of.digest)
            if op is not None and not op.partial:
                of.complete(op)
                rule = op.rules[kind]
                self.gives_wanted = rule.takes_wanted
                return rule.function(*arguments, **wanted if rule.takes_wanted else {})
            raise KernelError(
                f"[op] op {of.name!r} was read from a file, without its {kind} rule, which is a "
                "Python function; define the op in this process, with the same rules"
                + ("." if kind == "vmap" else ", to take derivatives of it.")
            )

        self.function = absent

    @property
    def digest(self) -> str:
        """The digest in the file."""
        return self._saved


def checked_rule(name: object, rule: object) -> Rule:
    """A rule, read; the name beside it checked."""
    if not isinstance(name, str) or not isinstance(rule, str):
        argument, value = ("name", name) if not isinstance(name, str) else ("rule", rule)
        raise KernelTypeError(f"[op] `{argument}`: got {value!r}, expected a str.")
    if not name.isidentifier() or not name.isascii():
        raise KernelError(
            f"[op] `name`: {name!r} cannot name an op; expected a letter or underscore, then "
            "letters, digits and underscores."
        )
    try:
        parsed = parse_rule(rule)
    except RuleError as error:
        message = f"[op] the rule of op {name!r}: {error}"
        raise RuleError(message, text=error.text, position=error.position) from None
    arrays = {argument.name for argument in (*parsed.inputs, *parsed.declared)}
    for dim in parsed.dim_names:
        if dim in arrays:
            raise KernelError(
                f"[op] the rule of op {name!r}: {dim!r} is both an array and a dim; rename one."
            )
    return parsed


def checked_autocast(name: str, policy: object) -> str | None:
    """A policy, checked."""
    if policy not in (None, "cast", "float32"):
        raise KernelError(
            f"[op] `autocast` of op {name!r}: got {policy!r}, expected None, 'cast' or 'float32'."
        )
    return policy


def checked_tags(name: str, tags: Any) -> tuple[str, ...]:
    """The names of torch's tags, each once, in order.

    Raises:
        KernelError: torch has no such tag, as far as torch is imported.
        KernelTypeError: one is neither a str nor a tag.
    """
    each = [tags] if isinstance(tags, str) or not isinstance(tags, Iterable) else tags
    known = imported.tags()
    names = set()
    for tag in each:
        text = tag if isinstance(tag, str) else getattr(tag, "name", None)
        if not isinstance(text, str):
            raise KernelTypeError(
                f"[op] `tags` of op {name!r}: got {tag!r} of type {type(tag).__name__}, expected "
                'tags of torch, such as "nondeterministic_seeded".'
            )
        if known is not None and text not in known:
            raise KernelError(
                f"[op] `tags` of op {name!r}: torch has no tag {text!r}, but "
                f"{', '.join(sorted(known))}."
            )
        names.add(text)
    return tuple(sorted(names))
