"""What is asked of torch if the program has imported it, and what its graphs must find: all that
calls of kernels and ops need to know of it before, and without, importing it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from types import CodeType
from typing import Any, TypeVar

from ..errors import KernelError
from . import protocol

OLDEST_TORCH = (2, 10)  # an older one may do, without calls in C

_Function = TypeVar("_Function", bound=Callable[..., Any])
eager_codes: list[CodeType] = []


def eager_only(function: _Function) -> _Function:
    """Mark a function that graph tracers call as it is, without looking inside.

    ``torch.compile`` reads the two attributes: it breaks the graph around the call, or says so
    under ``fullgraph=True``. The torch host tells it about the code that runs inside.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        "a ferrule kernel call has no shape rule, so it runs eagerly and breaks the graph; "
        "declared with ferrule.op, the same body stays in the graph"
    )
    eager_codes.append(function.__code__)
    return function


def prepare_tracers() -> None:
    """Let the torch host tell torch.compile about `eager_only` code, where torch is imported."""
    if _is_there():
        protocol.load("torch")


def traced() -> bool:
    """Whether torch.compile traces the caller: torch's own function, once torch is there.

    A global that is replaced before anything is traced, for Dynamo remembers what it was.
    """
    return False


def watch() -> None:
    """Take torch's own `traced`, if torch is imported."""
    global traced
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    traced = getattr(compiler, "is_dynamo_compiling", traced)


_never = traced


def watch_once() -> None:
    """`watch`, where that has found no torch yet; Dynamo runs it while it traces."""
    if traced is _never:
        watch()


watch_once._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as of Op._register


def tags() -> Collection[str] | None:
    """The names of torch's tags; None where torch is not imported."""
    return getattr(getattr(sys.modules.get("torch"), "Tag", None), "__members__", None)


def wants_determinism() -> bool:
    """Whether torch was told to use deterministic algorithms alone."""
    # Another thread may be importing torch: what it has is not there yet.
    asked = getattr(sys.modules.get("torch"), "are_deterministic_algorithms_enabled", None)
    return asked is not None and asked()


def registered(op: Any) -> Any:
    """What torch's registrar makes of an op; None where torch is not imported.

    Called by a function with the mark of torch.compiler.assume_constant_result, so that an op may
    be called first inside a compiled function.
    """
    if not _is_there():
        return None
    return untraced(_registered)(op)


def untraced(function: _Function) -> _Function:
    """A function that Dynamo leaves alone: called from a frame that it gave up on, all that the
    function does would be traced."""
    off = getattr(sys.modules.get("torch._dynamo"), "disable", None)
    return function if off is None else off(function)


def _is_there() -> bool:
    return hasattr(sys.modules.get("torch"), "compile")


def _registered(op: Any) -> Any:
    try:
        return protocol.registrars["torch"](op)
    except (AttributeError, ImportError, TypeError) as error:
        torch: Any = sys.modules["torch"]
        if torch.__version__ >= OLDEST_TORCH:
            raise
        return _TooOld(torch, error)


class _TooOld:
    """Stands for an op in a torch that lacks what ops need; arrays of others can be given."""

    def __init__(self, torch: Any, error: Exception) -> None:
        self._tensor, self.overload, self.raw = torch.Tensor, self, self
        self._words = (
            f"[op] ops of torch's tensors need torch {'.'.join(map(str, OLDEST_TORCH))} or later; "
            f"this is {torch.__version__} ({error}). `metal_kernel` takes its tensors, too."
        )

    def takes(self, values: Sequence[Any]) -> bool:
        return any(isinstance(value, self._tensor) for value in values)

    def __call__(self, *values: Any) -> Any:
        raise KernelError(self._words)
