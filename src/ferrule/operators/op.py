"""`Op`: a kernel with a declared rule: shapes, dtypes, launch, derivatives and batching as data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ..devices import protocol as devices
from ..errors import FerruleError, KernelError, KernelTypeError, RuleError
from ..hosts import imported
from ..rules.rule import Rule
from ..tools import fastcall
from . import call as op_call
from . import entries as op_entries
from .declared import (
    ITSELF,
    AbsentRule,
    Declared,
    Derived,
    checked_autocast,
    checked_tags,
    digesting,
)
from .derivatives import MATCHES
from .implementations import (
    KINDS,
    changed_function,
    implementation_from_json,
    implementation_from_pickle,
    implementation_to_pickle,
    of_kinds,
    saved_function,
)
from .sharding import checked_splits
from .unit_steps import Implementation


class Op(Declared):
    """A kernel as a function: of arrays of NumPy, torch or MLX, to arrays of the same.

    Attributes:
        name: the op's name.
        rule: what it declares.
        implementations: what carries it out, in the order in which they are tried.
        batch: the dims that are declared independent.
        partial_sums: the dims (``"K"``, ``"*S"``) of which parts give partial sums of outputs.
        autocast: what torch's autocast does with its inputs: None, ``"cast"`` or ``"float32"``.
        tags: the names of torch's tags that it has.
        rules: its derivative and batching rules, under ``"vjp"``, ``"jvp"`` and ``"vmap"``.
        counts: how often calls took a slower way than they might: ``"copy"`` of an input that is
            not contiguous, ``"output copy"`` of what a function gave and others hold, ``"vmap
            loop"`` of a batch, ``"Python path"`` of a kernel in torch that C could not launch,
            ``"prepare"`` of something that is made of weights.
        explain: what is called with the error of a call that torch refuses while it traces, and its
            inputs, of which sizes are numbers where they are known. It may raise another, in other
            words. None: nothing is.
    """

    explain: Callable[..., None] | None = None

    def __init__(
        self,
        name: str,
        rule: Rule,
        implementations: Sequence[Implementation],
        batch: tuple[str, ...] = (),
        autocast: str | None = None,
        partial_sums: tuple[str, ...] = (),
        tags: tuple[str, ...] = (),
    ) -> None:
        super().__init__(name, rule, implementations, batch, autocast, partial_sums, tags)
        self.__name__ = self.__qualname__ = name  # what takes functions asks for these
        self.__signature__ = rule.signature()
        self._count = len(rule.inputs)
        self._operator: Any = None  # what a library of graphs made of it: hosts.torch.op
        self.mlx: object = None  # what hosts.mlx.node made of it
        # By the type of the first array: what carries out calls that no graph or derivative
        # records, and else gives NotImplemented. Those of MLX and torch are set by their hosts.
        self.callers: dict[type, Callable[..., Any]] = {}
        self._first = next((i for i, p in enumerate(rule.inputs) if p.dims is not None), 0)
        self._register = _registration(self)

    def __repr__(self) -> str:
        return f"<ferrule.Op {self.name}: {self.rule.shown()}>"

    def __copy__(self) -> Op:
        return self

    def __deepcopy__(self, memo: object) -> Op:
        return self  # models that hold it are copied; it has no state that matters

    def __reduce__(self) -> Any:
        """What a pickle holds: texts as they are, functions by their names.

        Raises:
            KernelError: a function cannot be imported.
        """
        bodies = [implementation_to_pickle(self.name, body) for body in self.implementations]
        rules = {
            kind: (rule.op,)
            if rule.op is not None
            else saved_function(self.name, f"`def_{kind}`", rule)
            for kind, rule in self.rules.items()
        }
        arguments = self.name, self.rule.to_json(), bodies, *self._declared
        return _unpickled, arguments, rules  # the rules last, for they may hold this op again

    def __setstate__(self, rules: Any) -> None:
        for kind, (rule, *how) in rules.items():
            self._define(kind, rule, how[0] if how else None)
            if how and self.rules[kind].digest != how[1]:
                raise changed_function(self.name, f"`def_{kind}`", rule)

    # -- calls -----------------------------------------------------------------------------------

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Run the op.

        Args:
            args, named: its inputs, in the rule's order or by name: arrays of one library on one
                device, Python numbers, None for those that may be absent.

        Returns:
            The output; a tuple where there are several; None where all is written in place.

        Raises:
            KernelError: an input contradicts the rule; says which, its shape, and what says so.
            KernelTypeError: an input is of a wrong type.
            CompileError, DialectError, ToolchainError, DeviceError: as a kernel's call.
        """
        if named or len(args) != self._count:
            args = self.ordered(args, named)
        if (
            not imported.traced()
            and not fastcall.bypasses
            and (caller := self.callers.get(type(args[self._first])))
        ):
            try:
                result = caller(*args)
            except RuntimeError as error:
                if not isinstance(error, FerruleError):  # torch's own
                    self._operator.reraise(error, args)
                raise
            if result is not NotImplemented:
                return result
        self._register()  # before `_operator` is read, which Dynamo remembers
        if self._operator is not None and self._operator.takes(args):
            return self._operator(*args)
        if np.ndarray not in self.callers:
            self.callers[np.ndarray] = op_entries.numpy_caller(self)
        result = self.callers[np.ndarray](*args)
        return op_call.call(self, args) if result is NotImplemented else result

    def check(self, *args: Any, **named: Any) -> list[Any]:
        """What `ferrule.checking` finds in one call: a list of `ferrule.Finding`.

        Args:
            args, named: as `__call__` takes them.

        Raises:
            KernelError, KernelTypeError, CompileError, DeviceError: as a call does.
        """
        with devices.checking() as findings:
            self(*args, **named)
        return findings

    def ordered(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
        """A call's inputs, in the rule's order."""
        inputs = self.rule.inputs
        if len(args) > len(inputs):
            raise KernelTypeError(
                f"[op] op {self.name!r} takes {len(inputs)} inputs "
                f"({', '.join(map(str, inputs))}), but {len(args)} were given."
            )
        values = {parameter.name: value for parameter, value in zip(inputs, args, strict=False)}
        for name, value in named.items():
            if name not in [parameter.name for parameter in inputs]:
                names = ", ".join(parameter.name for parameter in inputs)
                raise KernelTypeError(f"[op] op {self.name!r} has no input {name!r}, but {names}.")
            if name in values:
                raise KernelTypeError(f"[op] op {self.name!r} got its input {name!r} twice.")
            values[name] = value
        for parameter in inputs:
            if parameter.name not in values:
                if not parameter.optional:
                    raise KernelTypeError(
                        f"[op] op {self.name!r} got no input {parameter.name!r} ({parameter})."
                    )
                values[parameter.name] = None
        return tuple([values[parameter.name] for parameter in inputs])

    def variant(self, *args: Any, **named: Any) -> Op:
        """The op that carries out a call with these inputs: one that has no outputs but those that
        the call has, where outputs have conditions; else this one."""
        return self

    @property
    def torch_op(self) -> Any:
        """The op in torch: an ``OpOverload`` called ``ferrule::<name>_<digest>``.

        Raises:
            KernelError: torch is not imported.
        """
        self._register()
        if self._operator is None:
            raise KernelError(f"[op] op {self.name!r}: import torch before its `torch_op`.")
        if self._operator.overload is self._operator.raw:  # torch cannot have it
            self._operator.overload()
        self._operator.look_for_dtensor()
        return self._operator.overload

    # -- rules -----------------------------------------------------------------------------------

    def def_vjp(self, rule: Op | Callable[..., Any], *, version: str | int | None = None) -> Any:
        """Declare the derivative of the outputs, transposed: gradients from cotangents.

        Args:
            rule: an op, whose arguments are known by name: this op's inputs and outputs, and
                ``cotangent`` (``<output>_cotangent`` where there are several, or where an input
                has that name) go in, ``<input>_grad`` come out; inputs without one have no
                gradient. Or a function of ``(primals, cotangents, outputs)``, tuples of arrays,
                that returns a gradient or None per input; torch and MLX call it with their arrays,
                while tracing, too. A function that has a parameter ``wanted`` gets a bool per
                input there: None may stand for gradients that nobody asks for. An op may have
                ``<input>_wanted:bool``.
            version: stands for a function's content: see `operators.identity.of_callable`.

        Returns:
            ``rule``, so that this decorates a function.

        Raises:
            KernelError: names do not match, or a function's content is not known.
        """
        return self._define("vjp", rule, version)

    def def_jvp(self, rule: Op | Callable[..., Any], *, version: str | int | None = None) -> Any:
        """Declare the derivative of the outputs: tangents from tangents.

        Args:
            rule: an op, whose arguments are known by name: this op's inputs and outputs and
                ``<input>_tangent`` go in, ``<output>_tangent`` come out; where an input has no
                tangent it gets zeros, and None where the input is absent. Or a function of
                ``(primals, tangents, outputs)`` that returns a tangent per output; where an input
                has no tangent it gets None.
            version: as in `def_vjp`.

        Returns:
            ``rule``.

        Raises:
            KernelError: as in `def_vjp`.
        """
        return self._define("jvp", rule, version)

    def derive_jvp(self, wrt: Collection[str] | None = None) -> Op:
        """Derive the derivative of the outputs, tangents from tangents, from the Metal body.

        Args:
            wrt: the inputs that have tangents; None: all that may have one. Others are constants.

        Returns:
            The op whose inputs are this op's and ``<input>_tangent``, and whose outputs are
            ``<output>_tangent``. Unless one was declared, it is this op's jvp from now on.

        Raises:
            DialectError: something in the body has no derivative; says the line, and what to write.
            KernelError: the op has no Metal body, or ``wrt`` names what has no derivative.
        """
        from .derive import jvp_of

        derived = Op(f"{self.name}_jvp", *jvp_of(self, wrt), self.batch)
        if "jvp" not in self.rules:
            self.def_jvp(derived)
        return derived

    def derive_vjp(
        self,
        wrt: Collection[str] | None = None,
        *,
        tape_limit: int | str = "1GB",
        trips: Mapping[str, str] | None = None,
    ) -> Op:
        """Derive the gradients of the inputs from the Metal body.

        Args:
            wrt: the inputs that have gradients; None: all that may have one. Others are constants.
            tape_limit: the most device memory that a call may keep for loops, in bytes, or as in
                ``"64MB"``: a call that would keep more is refused.
            trips: by variable that counts a loop, the most rounds that it makes, of the rule's
                sizes: ``{"t": "T"}``; for loops that keep something, and whose bound does not
                follow from the rule. It is checked: a loop that makes more gives NaN.

        Returns:
            The op whose inputs are this op's and the outputs' cotangents, as `def_vjp` names them,
            and whose outputs are ``<input>_grad``, of float32 whatever the input's dtype is. Unless
            one was declared, it is this op's vjp from now on.

        Raises:
            DialectError: something in the body has no derivative; says the line, and what to write.
            KernelError: the op has no Metal body, or ``wrt`` names what has no derivative.
        """
        from .derive import derived_vjp

        derived: Op
        derived, rule = derived_vjp(self, wrt, tape_limit, trips)
        if "vjp" not in self.rules:
            if isinstance(rule, Op):
                self.def_vjp(rule)
            else:
                self.def_vjp(rule[0], version=rule[1])
        return derived

    def def_vmap(self, rule: Op | Callable[..., Any], *, version: str | int | None = None) -> Any:
        """Declare how the op is carried out for a batch of calls.

        Without this, dims that are declared independent (``*S``, or ``batch="B"``) are batched, and
        else calls are made one after the other.

        Args:
            rule: an op with the same names, whose arrays have one dim more in front. Or a function
                of ``(size, axes, primals)``: the batch's size, the axis of each input that is
                batched (None for others), the inputs; it returns ``(outputs, axes)``. In MLX's
                shapeless functions sizes are those of the trace, and must not be kept.
            version: as in `def_vjp`.

        Returns:
            ``rule``.

        Raises:
            KernelError: as in `def_vjp`.
        """
        return self._define("vmap", rule, version)

    def _define(self, kind: str, rule: Any, version: object) -> Any:
        token = digesting.set((self,))  # what others are without this rule is not kept
        try:
            self.rules[kind] = Derived(self, kind, rule, version, MATCHES[kind])
        finally:
            digesting.reset(token)
        self._digest = self._operator = None  # another op from now on
        self.callers = {}
        return rule

    # -- others that are like it -----------------------------------------------------------------

    def using(self, *kinds: str) -> Op:
        """This op with some of its implementations alone, the one that comes first preferred.

        Args:
            kinds: of ``"metal"``, ``"cuda"``, ``"run"`` and ``"reference"``. With ``"run",
                "metal"``, eager and compiled calls run the function, and a package, which can hold
                none, has the kernel.

        Raises:
            KernelError: it has none of a kind, or no kind is given.
        """
        if not kinds:
            raise KernelError(
                f"[op] `using` of op {self.name!r}: expected kinds, such as {KINDS[1]!r}."
            )
        chosen = of_kinds(self.name, "", self.implementations, kinds)
        other = Op(self.name, self.rule, chosen, *self._declared)
        other.rules, other.explain = dict(self.rules), self.explain
        return other

    def as_is(self, digest: str | None = None) -> Op:
        """What it is now, which rules that are declared later do not change.

        Args:
            digest: what a saved graph calls it by.
        """
        other = Op(self.name, self.rule, self.implementations, *self._declared)
        other.rules, other.counts, other.explain = dict(self.rules), self.counts, self.explain
        other._digest = digest or self.digest
        return other

    @staticmethod
    def from_json(data: Any, rules: Mapping[str, Op] | None = None) -> Op:
        """The op of `to_json`, with the same digest.

        Python functions are not in the data: what calls one of them raises, and says so.

        Args:
            data: what `to_json` gave.
            rules: the ops that are derivative or batching rules, by their digests.

        Raises:
            RuleError: the data is damaged.
        """
        try:
            name = data["name"]
            rule = Rule.from_json(data["rule"])
            if not isinstance(name, str) or not (name.isidentifier() and name.isascii()):
                raise ValueError(f"{name!r} cannot name an op")
            implementations = [
                implementation_from_json(name, rule, record) for record in data["implementations"]
            ]
            if not implementations:
                raise ValueError("nothing carries it out")
            declared = data["batch"], data["autocast"], data["partial_sums"], data.get("tags", ())
            op = checked_op(name, rule, implementations, *declared)
            for kind, digest in data["rules"].items():
                if kind not in MATCHES or not isinstance(digest, str):
                    raise ValueError(f"a rule {kind!r}")
                rule_op = op if digest == ITSELF else (rules or {}).get(digest)
                op.rules[kind] = (
                    AbsentRule(op, kind, digest)
                    if rule_op is None
                    else Derived(op, kind, rule_op, None, MATCHES[kind])
                )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, RuleError):
                raise
            raise RuleError(f"a saved op is damaged: {error}") from None
        return op


def checked_op(
    name: str,
    rule: Rule,
    implementations: Sequence[Implementation],
    batch: object,
    autocast: object,
    partial_sums: object,
    tags: object,
) -> Op:
    """The op of these implementations, with all else checked that `op` and `adopt` take.

    Raises:
        KernelError, KernelTypeError: a value or type is not allowed.
    """
    independent, sums = checked_splits(name, rule, batch, partial_sums)
    policy = checked_autocast(name, autocast)
    return Op(name, rule, implementations, independent, policy, sums, checked_tags(name, tags))


def _unpickled(name: str, rule: Any, bodies: Sequence[Any], *declared: Any) -> Op:
    """The op of a pickle, as yet without its rules.

    Raises:
        KernelError: a function is not what it was.
    """
    parsed = Rule.from_json(rule)
    restored = [implementation_from_pickle(name, parsed, body) for body in bodies]
    return Op(name, parsed, restored, *declared)


def _registration(op: Op) -> Callable[[], None]:
    """A function that registers an op with the library of graphs, once that is imported."""

    def register() -> None:
        if op._operator is None:
            op._operator = imported.registered(op)

    # Dynamo calls this while it traces; the mark can be had from torch alone, which may be absent.
    register._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return register
