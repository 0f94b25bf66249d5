"""The implementations of an op: made from what `op` is given, and read from files and pickles."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import dtypes
from ..errors import KernelError, KernelTypeError
from ..kernel import Kernel
from ..kernels.call import CallableKernel
from ..rules.rule import Rule
from . import identity, metal_file
from .bodies import KernelBody, check_names, kernel_of
from .conditional import MetalBody, RunFunction
from .declared import Derived
from .expressions import memory_from_json, memory_to_json
from .prepared import Prepared
from .runners import AbsentRunner, Runner
from .unit_parts import CudaBody, UnitText
from .unit_steps import CudaUnit, Implementation

Metal = str | os.PathLike[str] | CallableKernel | MetalBody
Cuda = str | CallableKernel | CudaBody | UnitText
Run = Callable[..., Any] | RunFunction


KINDS = ("cuda", "metal", "run", "reference")  # the best one first, on an NVIDIA GPU


def kernel_implementations(
    name: str,
    rule: Rule,
    cuda: object,
    metal: object,
    header: str,
    function: str | None,
    launch: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> list[Implementation]:
    """An op's CUDA bodies and units, then its Metal bodies, as the arguments of `op` give them.

    Args:
        name, rule: the op's.
        cuda, metal: texts, files, kernels, and what `cuda_body`, `cuda_unit` and `metal_body`
            return.
        header, function: of texts; of a file.
        launch: `KernelBody`'s arguments for texts and kernels.
        settings: `kernel_of`'s arguments for texts, with ``compile_options``.
    """
    implementations: list[Implementation] = []
    expected = "the text of a body, a cuda_kernel, a cuda_body or a cuda_unit"
    kinds: tuple[Any, ...] = (str, CallableKernel, CudaBody, UnitText)
    for body in _several(name, "cuda", cuda, kinds, expected):
        if isinstance(body, UnitText):
            _check_always(name, rule, "a cuda_unit")
            implementations.append(CudaUnit(name, rule, body))
            continue
        body_launch = launch
        if isinstance(body, CudaBody):
            body_launch = {setting: getattr(body, setting) for setting in launch}
            body_launch["pdl"] = body.pdl
            contiguous = body.ensure_row_contiguous
            source = _with_absent(name, rule, "cuda", body.source)
            kernel = kernel_of(name, rule, "cuda", source, body.header, contiguous)
        else:
            kernel = _kernel(name, rule, "cuda", body, header, **settings)
            _check_launched(name, "cuda", launch)
        body_launch = {**body_launch, "template": _with_presence(rule, body_launch["template"])}
        implementations.append(KernelBody(name, rule, kernel, "cuda", **body_launch))
    expected = "the text of a body, the Path of a file, a metal_kernel or a metal_body"
    kinds = (str, os.PathLike, CallableKernel, MetalBody)
    bodies = _several(name, "metal", metal, kinds, expected)
    if function is not None and not any(isinstance(body, os.PathLike) for body in bodies):
        problem = f"got {function!r}, but `metal` is no path of a file"
        raise KernelError(f"[op] `function` of op {name!r}: {problem}.")
    own = {setting: value for setting, value in launch.items() if setting != "shared_memory"}
    for body in bodies:
        if not isinstance(body, MetalBody):
            of_file = function if isinstance(body, os.PathLike) else None
            body = MetalBody(body, header=header, function=of_file, **own, **settings)
        implementations.append(_metal_body(name, rule, body))
    return implementations


def run_implementations(
    name: str, rule: Rule, run: object, reference: Any, version: object
) -> list[Implementation]:
    """An op's Python functions, as the arguments of `op` give them."""
    implementations: list[Implementation] = []
    for each in _several(name, "run", run, (RunFunction, Callable), "a function or a run_function"):
        one = each if isinstance(each, RunFunction) else RunFunction(each, None)
        more = {"when": one.when, "prepared": one.prepared, "state": one.state}
        implementations.append(Runner(name, rule, one.function, "run", version, **more))
    if reference is not None:
        implementations.append(Runner(name, rule, reference, "reference", version))
    return implementations


def of_kinds(
    name: str, argument: str, implementations: Sequence[Implementation], kinds: Sequence[str]
) -> list[Implementation]:
    """The implementations of these kinds, in the order of the kinds.

    Args:
        name: the op's.
        argument: how messages call what gave the kinds.
        implementations, kinds: they.

    Raises:
        KernelError: there is none of a kind.
    """
    chosen: list[Implementation] = []
    for kind in kinds:
        of_kind = [body for body in implementations if body.kind == kind]
        if not of_kind:
            has = ", ".join(dict.fromkeys(repr(body.kind) for body in implementations))
            raise KernelError(
                f"[op] {argument}op {name!r} has no implementation {kind!r}; it has {has}."
            )
        chosen += of_kind
    return chosen


def preferred(
    name: str, implementations: list[Implementation], prefer: Any
) -> list[Implementation]:
    """The implementations, those of the kinds that the author prefers before the others.

    Raises:
        KernelError: there is none of a kind, or a kind is given twice.
        KernelTypeError: these are no kinds.
    """
    kinds = (prefer,) if isinstance(prefer, str) else prefer
    if not isinstance(kinds, (tuple, list)) or not all(isinstance(kind, str) for kind in kinds):
        raise KernelTypeError(
            f"[op] `prefer` of op {name!r}: got {prefer!r}, expected kinds, such as "
            '("run", "metal").'
        )
    if len(set(kinds)) < len(kinds):
        raise KernelError(f"[op] `prefer` of op {name!r}: got {prefer!r}; expected each kind once.")
    first = of_kinds(name, "`prefer`: ", implementations, kinds)
    return [*first, *(body for body in implementations if body.kind not in kinds)]


def _metal_body(name: str, rule: Rule, body: MetalBody) -> KernelBody:
    """A Metal body of an op; its text may be a kernel, or in a file."""
    source, header, atomic = body.source, body.header, body.atomic_outputs
    if isinstance(source, os.PathLike):
        _check_always(name, rule, "a Metal file")
        file = metal_file.read(name, rule, source, body.function, body.template, header)
        source, header, atomic = file.source, file.header, atomic or file.atomic
    elif isinstance(source, str) and source.endswith(".metal") and "\n" not in source:
        raise KernelError(
            f"[op] `metal` of op {name!r}: got {source!r}, which is taken for a body; for that "
            f"file give pathlib.Path({source!r})."
        )
    elif body.function is not None:
        problem = f"got {body.function!r}, but the metal_body is of no path of a file"
        raise KernelError(f"[op] `function` of op {name!r}: {problem}.")
    kernel = _kernel(
        name, rule, "metal", source, header, body.compile_options,
        ensure_row_contiguous=body.ensure_row_contiguous, atomic_outputs=atomic,
        portable=body.portable,
    )  # fmt: skip
    _check_launched(name, "metal", {"grid": body.grid, "threadgroup": body.threadgroup})
    return KernelBody(
        name, rule, kernel, "metal", grid=body.grid, threadgroup=body.threadgroup,
        template=_with_presence(rule, body.template), init_value=body.init_value,
        shared_memory=0, when=body.when,
    )  # fmt: skip


def _check_always(name: str, rule: Rule, what: str) -> None:
    """Refuse what wants all outputs in each call."""
    for output in rule.declared:
        if output.present is not None:
            raise KernelError(
                f"[op] op {name!r}: output {output.name!r} is only there in some calls, and {what} "
                "has all outputs; give the text of a body, which asks "
                f"has_{output.name}, or an op for each set of outputs."
            )


def _with_presence(rule: Rule, template: Any) -> Any:
    """A body's template, with what says whether each output with a condition is there."""
    flags = [(f"has_{a.name}", a.present) for a in rule.declared if a.present is not None]
    if not flags or not isinstance(template, (Mapping, Sequence, type(None))):
        return template
    given = list(template.items()) if isinstance(template, Mapping) else list(template or ())
    return [*flags, *given]


def _with_absent(name: str, rule: Rule, kind: str, source: Any) -> Any:
    """A body's text, in which outputs that a call does not have are null pointers: it must ask
    before it writes them.

    Raises:
        KernelError: it never asks.
    """
    if not isinstance(source, str):
        return source
    declared = ""
    for output in rule.declared:
        if output.present is not None and f"has_{output.name}" not in source:
            raise KernelError(
                f"[op] op {name!r}: output {output.name!r} is only there in some calls, but the "
                f"{kind} body never asks `has_{output.name}`, a bool that says whether it is there."
            )
        if output.present is False:
            dtype = dtypes.BY_NAME.get(output.dtype)
            type_name = output.dtype if dtype is None else getattr(dtype, kind)
            space = "device " if kind == "metal" else ""
            declared += f"{space}{type_name}* {output.name} = nullptr; "
    return declared + source


def _check_launched(name: str, kind: str, launch: Mapping[str, Any]) -> None:
    for setting, example in (("grid", 'as "x.size"'), ("threadgroup", "as 256")):
        if launch[setting] is None:
            raise KernelError(
                f"[op] op {name!r} has a {kind} body and no `{setting}`; expected sizes such "
                f"{example}."
            )


def _kernel(
    name: str,
    rule: Rule,
    kind: str,
    body: object,
    header: str,
    compile_options: Mapping[str, str] | None,
    **settings: Any,
) -> Kernel:
    """The kernel of a body, which may be one already."""
    if isinstance(body, CallableKernel):
        _check_always(name, rule, f"a {kind}_kernel")
        kernel = body.kernel
        if kernel.language != kind:
            raise KernelError(
                f"[op] `{kind}` of op {name!r}: got a kernel in {kernel.language}; give it as "
                f"`{kernel.language}`."
            )
        check_names(name, rule, kernel)
        return kernel
    if not isinstance(body, str):
        raise KernelTypeError(
            f"[op] `{kind}` of op {name!r}: got {body!r} of type {type(body).__name__}, expected "
            f"the text of a body, or a {kind}_kernel."
        )
    mode = None
    if compile_options is not None:
        if not isinstance(compile_options, Mapping) or set(compile_options) - {"math_mode"}:
            raise KernelError(
                f"[op] `compile_options` of op {name!r}: got {compile_options!r}, expected a dict "
                'such as {"math_mode": "fast"}.'
            )
        mode = compile_options.get("math_mode")
    text = _with_absent(name, rule, kind, body)
    return kernel_of(name, rule, kind, text, header, math_mode=mode, **settings)


def _several(name: str, kind: str, bodies: Any, types: tuple[Any, ...], expected: str) -> list[Any]:
    """An op's implementations of a kind, of which none stands behind one that is always taken."""
    if bodies is None:
        return []
    several = isinstance(bodies, (list, tuple))
    for i, body in enumerate(bodies if several else [bodies]):
        if not isinstance(body, types):
            raise KernelTypeError(
                f"[op] `{kind}` of op {name!r}: got {body!r} of type {type(body).__name__}, "
                f"expected {expected}{'' if several else ', or a list of these'}."
            )
        if several and i + 1 < len(bodies) and getattr(body, "when", None) is None:
            raise KernelError(
                f"[op] `{kind}` of op {name!r}: number {i + 1} of {len(bodies)} has no `when`, so "
                "that those after it would never be chosen; give it a condition, or put it last."
            )
    return list(bodies) if several else [bodies]


def implementation_from_json(name: str, rule: Rule, data: Any) -> Implementation:
    """An implementation from what its `to_json` gave; a Python function stays absent."""
    if data["kind"] in ("metal", "cuda"):
        return (CudaUnit if "steps" in data else KernelBody).from_json(name, rule, data)
    return AbsentRunner(name, rule, data)


def implementation_to_pickle(name: str, body: Implementation) -> Any:
    """An implementation for a pickle: its text, or a Python function by name."""
    if not isinstance(body, Runner):
        return body.to_json()
    function = saved_function(name, f"`{body.kind}`", body)
    prepared = {
        each.name: (saved_function(name, f"`prepared` {each.name!r}", each)[0], *each.inputs)
        for each in body.prepared
    }
    own = prepared or None, memory_from_json(memory_to_json(body.state))
    return (*function, body.kind, body.makes, body.constants, body.contiguous, body.when, *own)


def implementation_from_pickle(name: str, rule: Rule, data: Any) -> Implementation:
    """The reverse of `implementation_to_pickle`.

    Raises:
        KernelError: a function is not what it was.
    """
    if isinstance(data, dict):
        return (CudaUnit if "steps" in data else KernelBody).from_json(name, rule, data)
    function, version, digest, *declared = data
    kind, makes, *more = declared  # of older pickles all but what is prepared
    runner = Runner(name, rule, function, kind, version, makes, *more)
    if runner.digest != digest:
        raise changed_function(name, f"`{kind}`", function)
    return runner


def saved_function(op: str, label: str, holder: Runner | Derived | Prepared) -> tuple[Any, ...]:
    """A Python function for a pickle, with its version and digest."""
    function: Any = holder.function
    if identity.by_name(function) is None:
        raise KernelError(
            f"[op] op {op!r} cannot be pickled: {label} ({identity.named(function)}) cannot be "
            "imported by its name; define it at the top level of a module."
        )
    return function, holder.version, holder.digest


def changed_function(op: str, label: str, function: Any) -> KernelError:
    """The error for a function that is not what it was."""
    return KernelError(
        f"[op] {label} ({identity.named(function)}) of op {op!r} is another function than when the "
        "op was pickled."
    )
