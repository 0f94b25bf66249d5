"""`adopt`: any callable as an op: a JIT compiler's function, a library's, one of C."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import KernelError
from ..rules.rule import Rule
from .declared import checked_rule
from .op import Op, checked_op
from .optional import by_presence
from .runners import Runner


def adopt(
    name: str,
    rule: str,
    *,
    run: Callable[..., Any] | None = None,
    make: Callable[..., Callable[..., Any]] | None = None,
    constants: Mapping[str, Any] | None = None,
    prepared: Mapping[str, tuple[Any, ...]] | None = None,
    state: Mapping[str, str] | None = None,
    contiguous: bool = False,
    reference: Callable[..., Any] | None = None,
    when: str | None = None,
    batch: str | Sequence[str] = (),
    partial_sums: str | Sequence[str] = (),
    autocast: str | None = None,
    tags: Any = (),
    version: str | int | None = None,
) -> Op:
    """An op that a Python callable carries out: Triton, CuTeDSL, CuPy, Numba, Warp, ctypes …

    The callable gets eager arrays of the library that the op was called with, never traced ones, in
    the rule's order: tensors of torch are plain (no Parameter, below autograd and autocast), None
    stands for an input that is absent. It returns the outputs, an array or a tuple of them, or has
    parameters called like the outputs, which get new arrays to write to, row-contiguous and not
    filled. A parameter called ``stream`` gets the address of the current CUDA stream, 0 on the CPU:
    what launches on another stream is not in a CUDA graph that is captured.

    Outputs whose memory an input, or the callable, still holds, and those that are not
    row-contiguous, are copied, for graphs count on outputs that are new; ``op.counts`` tells.

    Args:
        name: letters, digits and underscores.
        rule: the arguments, as in `ferrule.op`, such as
            ``"x[*S,K]:bfloat16, w[N,K//2]:uint8, scale[N,K//16]:float8_e4m3fn
            -> y[*S,N]:bfloat16"``. Weights are arguments.
        run: the callable.
        make: in its place, what makes the callable where that has state which is no tensor: a
            compiled function, a plan, a tuning table. It is called with keywords: ``device`` (a
            str: ``"cpu"``, ``"cuda:0"``), the name of each dtype variable (a str, such as
            ``T="bfloat16"``), and the constants. What it returns is kept for these values, in this
            process; it is made once, also where several threads call, at the first such call,
            never while a graph is traced, and in no capture of a CUDA graph.
        constants: further keywords of ``make``, by name: bools, dtypes (which it gets by their
            names), ints, or expressions of the rule's dims such as ``"K"`` or ``"M <= 16"``.
            Each new value makes another callable.
        prepared: what is made of weights, once, and kept while they stay as they are: by the name
            under which the callable gets it a function and the inputs that it takes, such as
            ``{"packed": (pack, "w", "scale")}``. It gives new arrays, one or a tuple of them, of
            any shapes and dtypes. It is called at the first call with these weights, and again
            after they were written to, never while a graph is traced or captured. Kept is what
            torch's tensors, and NumPy's read-only arrays, give; else it is called each time.
            ``op.counts["prepare"]`` tells how often, `Op.refresh` forgets it.
        state: memory that is kept from call to call, such as locks, counters and workspaces: by the
            name under which the callable gets it ``"dtype[dims]"``, such as ``"int32[1024]"`` or
            ``"T[N,K]"``. It is zeros at first, and then as the last call on the same stream, from
            the same thread, left it; calls of other sizes have the memory of the largest. It is
            zeros in each call of MLX's and CuPy's arrays and in CUDA graphs.
        contiguous: inputs that are not row-contiguous are copied first.
        reference: the same in ordinary array code, for comparisons, and for calls for which
            ``when`` does not hold.
        when: the condition under which the callable is chosen, such as ``"K % 16 == 0"``, as of a
            `cuda_body`; None is always.
        batch, partial_sums: dims that are independent of each other, and dims whose parts give
            partial sums, as in `ferrule.op`.
        autocast: what ``torch.autocast`` does with the inputs: None, ``"cast"`` or ``"float32"``.
        tags: torch's tags, as in `ferrule.op`: ``"nondeterministic_seeded"`` for a callable that
            draws from torch's own generator.
        version: stands for the content of the callables, which otherwise is their code, closure and
            defaults, and the constants, ops and functions of its module that it names. It is
            needed where these cannot be read, as of most JITs' objects; where functions of other
            modules are called, whose content is not looked at; and where a saved export is to be
            loaded by another version of Python.

    Raises:
        RuleError: the rule or a constant cannot be understood; points at the character.
        KernelError: an argument has a value that is not allowed, or a callable's content is not
            known.
        KernelTypeError: an argument has a type that is not allowed.

    Example:
        >>> import ferrule, numpy as np
        >>> def make(*, device, T, K):
        ...     table = [i * i for i in range(K)]
        ...     def run(x, y):
        ...         np.multiply(x, table, out=y, casting="unsafe")
        ...     return run
        >>> op = ferrule.adopt("squares", "x[*S,K]:T -> y[*S,K]:T", make=make,
        ...     constants={"K": "K"})
        >>> op(np.ones((1, 4), np.float32))
        array([[0., 1., 4., 9.]], dtype=float32)
    """
    parsed = checked_rule(name, rule)
    if (run is None) == (make is None):
        what = "neither" if run is None else "both"
        raise KernelError(
            f"[op] op {name!r} was given {what} of `run` and `make`; expected one: a callable, or "
            "what makes it."
        )
    if constants is not None and make is None:
        raise KernelError(
            f"[op] `constants` of op {name!r} are keywords of `make`, which was not given; a `run` "
            "has its constants in its code, closure or defaults."
        )
    function: Any = run if make is None else make
    makes = make is not None

    def declared(rule: Rule) -> Op:
        runners = [
            Runner(
                name,
                rule,
                function,
                "run",
                version,
                makes,
                constants,
                contiguous,
                when,
                prepared,
                state,
            )
        ]
        if reference is not None:
            runners.append(Runner(name, rule, reference, "reference", version))
        return checked_op(name, rule, runners, batch, autocast, partial_sums, tags)

    return by_presence(name, parsed, declared)
