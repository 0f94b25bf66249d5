"""What an eager call costs of an op that a Python function carries out, and of one whose inputs
record a gradient: against operators that torch's users define in Python and in C++."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import ferrule

from .ops import exp
from .timing import Bench, Peer, said

# What the project wants: half of torch.library.custom_op until torch 2.13, and from 2.14 on, where
# that is quicker, no more; of an operator in C++ 1.35 times as much where a gradient is recorded.
HALF, NO_MORE, AS_CPP = 2.0, 1.0, 1 / 1.35

CPP = """
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>
using at::Tensor;
static Tensor computed(const Tensor& x) { return at::exp(x); }
struct Exp : torch::autograd::Function<Exp> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x) {
    static auto op = c10::Dispatcher::singleton()
        .findSchemaOrThrow("ferrule_bench_cpp::exp", "").typed<Tensor(const Tensor&)>();
    at::AutoDispatchBelowADInplaceOrView below;
    Tensor y = op.call(x);
    ctx->save_for_backward({y});
    return y;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list cotangents) {
    return {cotangents[0] * ctx->get_saved_variables()[0]};
  }
};
static Tensor recorded(const Tensor& x) { return Exp::apply(x); }
TORCH_LIBRARY(ferrule_bench_cpp, m) { m.def("exp(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(ferrule_bench_cpp, CPU, m) { m.impl("exp", computed); }
TORCH_LIBRARY_IMPL(ferrule_bench_cpp, Autograd, m) { m.impl("exp", recorded); }
"""


def calls(bench: Bench) -> None:
    """One call with 16 elements: what is not the function's work."""
    if not bench.installed("torch"):
        return
    _of_functions(bench)
    _with_gradients(bench)


def _of_functions(bench: Bench) -> None:
    import torch

    x, w = torch.randn(4, 4), torch.randn(4)
    target = HALF if torch.__version__ < (2, 14) else NO_MORE

    def gives(x: Any) -> Any:
        return torch.exp(x)

    def gives_of_two(x: Any, w: Any) -> Any:
        return torch.mul(x, w)

    def writes(x: Any, y: Any) -> None:
        torch.exp(x, out=y)

    def writes_of_two(x: Any, w: Any, y: Any) -> None:
        torch.mul(x, w, out=y)

    one, two = "x[*S]:T -> y[*S]:T", "x[*S,D]:T, w[D]:T -> y[*S,D]:T"
    for work, function, rule, inputs in (
        ("exp, returned", gives, one, (x,)),
        ("product of two, returned", gives_of_two, two, (x, w)),
        ("exp, written", writes, one, (x,)),
        ("product of two, written", writes_of_two, two, (x, w)),
    ):
        op = ferrule.adopt(f"bench_{function.__name__}", rule, run=function)
        custom = _custom(function, len(inputs))
        work = f"one call of an adopted op, {work}"
        bench.compare(work, _call(op, inputs), [Peer("custom_op", _call(custom, inputs), target)])
    op, operator = ferrule.adopt("bench_gives", one, run=gives), _custom(gives, 1)._opoverload
    bench.compare(
        "one call of an adopted op by its torch_op, exp, returned",
        _call(op.torch_op, (x,)),
        [Peer("custom_op's operator", _call(operator, (x,)))],
    )


def _with_gradients(bench: Bench) -> None:
    import torch

    made: Callable[[Any], Callable[[], object]]
    x, cotangent = torch.randn(4, 4).requires_grad_(), torch.ones(4, 4)
    cpp, kernel = _cpp(bench), _differentiable()
    adopted = ferrule.adopt("bench_adopted_exp", "x[*S]:T -> y[*S]:T", run=lambda x: torch.exp(x))
    adopted.def_vjp(lambda primals, cotangents, outputs: (cotangents[0] * outputs[0],))

    def forward(op: Any) -> Callable[[], object]:
        return lambda: op(x)

    def with_backward(op: Any) -> Callable[[], object]:
        return lambda: torch.autograd.grad(op(x), x, cotangent)

    for name, op in (("an op", kernel), ("an adopted op", adopted)):
        for work, made, target in (
            ("recorded", forward, AS_CPP if op is kernel else None),
            ("recorded, and its backward", with_backward, None),
        ):
            peers = [Peer("custom_op with register_autograd", made(_custom_with_gradient()))]
            if cpp is not None:
                peers.insert(0, Peer("C++, autograd::Function", made(cpp), target))
            bench.compare(f"one call of {name}, exp of 16 float32, {work}", made(op), peers)


def _call(function: Any, inputs: tuple[Any, ...]) -> Callable[[], object]:
    return lambda: function(*inputs)


def _differentiable() -> ferrule.Op:
    op = exp().using("metal")
    op.def_vjp(
        ferrule.op(
            "bench_exp_vjp", "y[*S]:T, cotangent[*S]:T -> x_grad[*S]:T",
            metal="uint i = thread_position_in_grid.x; x_grad[i] = y[i] * cotangent[i];",
            grid="y.size", threadgroup=256,
        )
    )  # fmt: skip
    return op


@cache
def _custom(function: Callable[..., Any], inputs: int) -> Any:
    """A custom_op of a function; where that writes, a function that makes what it writes to."""
    import torch

    tensors = ", ".join(f"Tensor {name}" for name in "xw"[:inputs])
    name, writes = f"ferrule_bench::{function.__name__}", function.__name__.startswith("writes")
    custom = torch.library.custom_op(
        name,
        function,
        mutates_args=("y",) if writes else (),
        schema=f"({tensors}, Tensor(a!) y) -> ()" if writes else f"({tensors}) -> Tensor",
    )
    if not writes:
        return custom

    def written(x: Any, *more: Any) -> Any:
        y = torch.empty_like(x)
        custom(x, *more, y)
        return y

    return written


@lru_cache(maxsize=1)
def _custom_with_gradient() -> Any:
    import torch

    custom = torch.library.custom_op(
        "ferrule_bench::recorded_exp", lambda x: torch.exp(x), mutates_args=(),
        schema="(Tensor x) -> Tensor",
    )  # fmt: skip
    custom.register_autograd(
        lambda ctx, cotangent: cotangent * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
    )
    return custom


@lru_cache(maxsize=1)
def _cpp(bench: Bench) -> Any:
    """The operator in C++, which takes half a minute to build; None where it cannot be built."""
    if bench.quick:
        bench.leave_out("C++ with torch's headers is not built in a quick run")
        return None
    import torch
    from torch.utils import cpp_extension

    with tempfile.TemporaryDirectory() as folder:
        try:
            cpp_extension.load_inline(
                "ferrule_bench_cpp", CPP, build_directory=folder, is_python_module=False,
                with_cuda=False, extra_cflags=["-O2"],
            )  # fmt: skip
        except Exception as fault:  # no compiler, no ninja, other headers
            bench.leave_out(f"C++ with torch's headers was not built: {said(fault)}")
            return None
    return torch.ops.ferrule_bench_cpp.exp
