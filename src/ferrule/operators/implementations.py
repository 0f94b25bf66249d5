"""The implementations of an op: made from what `op` is given, and read from files and pickles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import KernelError, KernelTypeError
from ..kernel import Kernel
from ..kernels.call import CallableKernel
from ..rules.rule import Rule
from . import identity
from .bodies import KernelBody, check_names, kernel_of
from .declared import Derived
from .runners import AbsentRunner, Runner
from .unit_parts import CudaBody, UnitText
from .unit_steps import CudaUnit, Implementation

Cuda = str | CallableKernel | CudaBody | UnitText


def check_no_file(name: str, metal: object, function: str | None) -> None:
    """Refuse a file's name in place of its path, and a function of no file.

    Raises:
        KernelError: that is so.
    """
    if isinstance(metal, str) and metal.endswith(".metal") and "\n" not in metal:
        raise KernelError(
            f"[op] `metal` of op {name!r}: got {metal!r}, which is taken for a body; for that file "
            f"give pathlib.Path({metal!r})."
        )
    if function is not None:
        problem = f"got {function!r}, but `metal` is no path of a file"
        raise KernelError(f"[op] `function` of op {name!r}: {problem}.")


def kernel_implementations(
    name: str,
    rule: Rule,
    cuda: object,
    metal: object,
    headers: Mapping[str, str],
    launch: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> list[Implementation]:
    """An op's CUDA bodies and units, then its Metal body, as the arguments of `op` give them.

    Args:
        name, rule: the op's.
        cuda, metal: texts, kernels, and what `cuda_body` and `cuda_unit` return.
        headers: of texts, by language.
        launch: `KernelBody`'s arguments for texts and kernels.
        settings: `kernel_of`'s arguments for texts, with ``compile_options``.
    """
    implementations: list[Implementation] = []
    for kind, body in (*(("cuda", text) for text in _cuda_bodies(name, cuda)), ("metal", metal)):
        if body is None:
            continue
        if isinstance(body, UnitText):
            implementations.append(CudaUnit(name, rule, body))
            continue
        body_launch = {**launch} if kind == "cuda" else {**launch, "shared_memory": 0}
        if isinstance(body, CudaBody):
            body_launch = {setting: getattr(body, setting) for setting in launch}
            contiguous = body.ensure_row_contiguous
            kernel = kernel_of(name, rule, kind, body.source, body.header, contiguous)
        else:
            kernel = _kernel(name, rule, kind, body, headers[kind], **settings)
            for setting, example in (("grid", 'as "x.size"'), ("threadgroup", "as 256")):
                if launch[setting] is None:
                    raise KernelError(
                        f"[op] op {name!r} has a {kind} body and no `{setting}`; expected sizes "
                        f"such {example}."
                    )
        implementations.append(KernelBody(name, rule, kernel, kind, **body_launch))
    return implementations


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
            f"the text of a body, or a {kind}_kernel"
            + (", a cuda_body, a cuda_unit, or a list of these." if kind == "cuda" else ".")
        )
    mode = None
    if compile_options is not None:
        if not isinstance(compile_options, Mapping) or set(compile_options) - {"math_mode"}:
            raise KernelError(
                f"[op] `compile_options` of op {name!r}: got {compile_options!r}, expected a dict "
                'such as {"math_mode": "fast"}.'
            )
        mode = compile_options.get("math_mode")
    return kernel_of(name, rule, kind, body, header, math_mode=mode, **settings)


def _cuda_bodies(name: str, bodies: Any) -> list[Any]:
    """An op's CUDA implementations, of which none stands behind one that is always taken."""
    if not isinstance(bodies, (list, tuple)):
        return [bodies]
    for i, body in enumerate(bodies):
        if not isinstance(body, (str, CallableKernel, CudaBody, UnitText)):
            raise KernelTypeError(
                f"[op] `cuda` of op {name!r}: got {body!r} of type {type(body).__name__}, expected "
                "the text of a body, a cuda_kernel, a cuda_body or a cuda_unit."
            )
        if i + 1 < len(bodies) and getattr(body, "when", None) is None:
            raise KernelError(
                f"[op] `cuda` of op {name!r}: number {i + 1} of {len(bodies)} has no `when`, so "
                "that those after it would never be chosen; give it a condition, or put it last."
            )
    return list(bodies)


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
    return (*function, body.kind, body.makes, body.constants, body.contiguous)


def implementation_from_pickle(name: str, rule: Rule, data: Any) -> Implementation:
    """The reverse of `implementation_to_pickle`.

    Raises:
        KernelError: a function is not what it was.
    """
    if isinstance(data, dict):
        return (CudaUnit if "steps" in data else KernelBody).from_json(name, rule, data)
    function, version, digest, kind, makes, constants, contiguous = data
    runner = Runner(name, rule, function, kind, version, makes, constants, contiguous)
    if runner.digest != digest:
        raise changed_function(name, f"`{kind}`", function)
    return runner


def saved_function(op: str, label: str, holder: Runner | Derived) -> tuple[Any, ...]:
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
