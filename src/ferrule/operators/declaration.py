"""`op`: an op as it is declared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import KernelError
from ..hosts import imported
from ..rules.rule import Rule
from .declared import checked_rule
from .implementations import (
    Cuda,
    Metal,
    Run,
    kernel_implementations,
    preferred,
    run_implementations,
)
from .op import Op, checked_op
from .optional import by_presence


def op(
    name: str,
    rule: str,
    *,
    metal: Metal | Sequence[Metal] | None = None,
    function: str | None = None,
    cuda: Cuda | Sequence[Cuda] | None = None,
    run: Run | Sequence[Run] | None = None,
    reference: Callable[..., Any] | None = None,
    prefer: str | Sequence[str] = (),
    grid: Any = None,
    threadgroup: Any = None,
    template: Mapping[str, Any] | Sequence[tuple[str, Any]] | None = None,
    init_value: float | str | None = None,
    shared_memory: int | str = 0,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: Mapping[str, str] | None = None,
    portable: bool = False,
    batch: str | Sequence[str] = (),
    partial_sums: str | Sequence[str] = (),
    autocast: str | None = None,
    tags: Any = (),
    version: str | int | None = None,
) -> Op:
    """An op: a kernel, or a function, and the rule of its arguments.

    Args:
        name: letters, digits and underscores.
        rule: the arguments, as `ferrule.rules.rule` says, such as
            ``"x[*S,D]:T, w[D]:T, eps:float32 -> y[*S,D]:T"``.
        metal: the body of a Metal function, which runs on every device, or a kernel made by
            `metal_kernel` with the rule's names. In the body, arrays and numbers have their names;
            dims that it names are ints; dtype variables are template parameters; where an input
            may be None, ``has_<input>`` says whether it is there. Or the ``Path`` of a
            Metal file, whose kernel function has buffers of the rule's names (docs/pytorch.md).
            Or a `metal_body` with a launch of its own, or a list of these, as of ``cuda``.
        function: which kernel function of that file; None for the only one.
        cuda: the same in CUDA, preferred on NVIDIA GPUs; there numbers and dims are values, too.
            Or a `cuda_body` with a launch of its own, a `cuda_unit`, or a list of these, of which
            the first is taken whose ``when`` holds.
        run: a function of the inputs, which gives the outputs. Parameters that are called like
            the outputs get arrays to write to; one called ``stream`` the current CUDA stream.
            Or a `run_function` with a condition, or a list of these, as of ``cuda``.
        reference: the same in ordinary array code; chosen where there is nothing else.
        prefer: the kinds that are tried first, such as ``("run", "metal")``; else, and after them,
            the order is ``"cuda", "metal", "run", "reference"``. Of a kind the first is taken that
            runs on the device and whose ``when`` holds.
        grid, threadgroup: threads along x, y and z: one to three ints or expressions such as
            ``"B*N"``, of dims, of ``x.size`` and ``x.ndim``, and of what dtype variables are:
            ``"N // 2 if T == float16 else N"``.
        template: more template parameters of a body: ints, expressions, bools, dtypes.
        init_value: what outputs are filled with before the launch: a number or expression.
        shared_memory: for a CUDA body, bytes of dynamic shared memory, or an expression.
        header, ensure_row_contiguous, atomic_outputs, compile_options, portable: as in
            `metal_kernel`; what is written in place is atomic, too.
        batch: the dims that are independent of each other: a call on one part of them is that part
            of the whole. Such dims can be batched and sharded, and so can every ``*S``.
        partial_sums: dims, or ``*S``, whose parts give partial sums: of a call on a part of them,
            outputs that have the dim are that part of the whole, and the other outputs add up to
            it. So a matrix product's ``"K"``, or the ``"*S"`` of a gradient of weights, can be
            sharded. It must hold whatever the inputs are: with a bias, each part would add it.
        autocast: what ``torch.autocast`` does with float inputs: None leaves them, ``"cast"``
            makes them its dtype, ``"float32"`` makes them float32.
        tags: what torch is to know of the op besides: torch's tags, or their names, one or several,
            such as ``"nondeterministic_seeded"`` for one that draws from torch's own generator.
        version: stands for the content of ``run`` and ``reference``, which otherwise is their
            code, closure and defaults.

    Raises:
        RuleError: the rule or an expression cannot be understood; points at the character.
        KernelError: an argument has a value that is not allowed.
        KernelTypeError: an argument has a type that is not allowed.

    Example:
        >>> import ferrule, numpy as np
        >>> scale = ferrule.op("scale", "x[*S,D]:T, w[D]:T -> y[*S,D]:T",
        ...     metal="uint i = thread_position_in_grid.x; y[i] = x[i] * w[i % D];",
        ...     grid="x.size", threadgroup=256)
        >>> scale(np.ones((2, 3), np.float32), np.arange(3, dtype=np.float32))
        array([[0., 1., 2.],
               [0., 1., 2.]], dtype=float32)
    """
    parsed = checked_rule(name, rule)
    launch = {
        "grid": grid,
        "threadgroup": threadgroup,
        "template": template,
        "init_value": init_value,
        "shared_memory": shared_memory,
        "when": None,
    }
    settings = {
        "ensure_row_contiguous": ensure_row_contiguous,
        "atomic_outputs": atomic_outputs,
        "compile_options": compile_options,
        "portable": portable,
    }
    imported.watch()

    def declared(rule: Rule) -> Op:
        implementations = [
            *kernel_implementations(name, rule, cuda, metal, header, function, launch, settings),
            *run_implementations(name, rule, run, reference, version),
        ]
        if not implementations:
            raise KernelError(
                f"[op] op {name!r} has nothing that carries it out; give `metal`, `cuda`, `run` or "
                "`reference`."
            )
        ordered = preferred(name, implementations, prefer)
        return checked_op(name, rule, ordered, batch, autocast, partial_sums, tags)

    return by_presence(name, parsed, declared)
