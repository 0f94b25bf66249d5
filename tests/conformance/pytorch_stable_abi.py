"""test/cpp_extensions/test_libtorch_agnostic.py: extensions on torch's stable ABI, here ops.

The tests call functions of extensions that would be built from C++. ferrule's calls in C are such
an extension, too (``runtime/torch_calls.c``): ops take the place of those functions that have
tensors and numbers in, and tensors out. Where a function hands back what it was given, `put` does
that; an op that writes in place returns None.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import unittest
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ferrule

FILE = "test/cpp_extensions/test_libtorch_agnostic.py"
API = "calls a function of the stable API by itself, which is no op on tensors"
VIEW = "returns a view, or a shape that numbers of the call decide; shapes of ops come from shapes"
ARGUMENTS = "ops of ferrule take no lists of tensors, strings, devices or dtypes"
LEFT_OUT = {
    f"TestLibtorchAgnosticCPU.test_{pattern}": why for why, patterns in {
        API: (
            "default_constructor_*", "dynamic_version_call_error_message_*", "exp_neg_is_leaf_*",
            "get_any_data_ptr_*", "get_num_threads_*", "get_template_any_data_ptr_*",
            "is_contiguous_*", "my_element_size_*", "my_exception_what_*", "my_from_blob_*",
            "my_is_cpu_*", "my_layout_*", "my_optional_tensor_ref_*", "my_rand_with_generator_*",
            "my_set_requires_grad_*", "my_shape_*", "my_storage_offset_*", "parallel_for_*",
            "set_python_module_*", "tagged_op_*",
        ),
        VIEW: (
            "my_flatten_*", "my_narrow_*", "my_reshape_*", "my_select_*", "my_squeeze_*",
            "my_transpose_*", "my_unsqueeze_*", "my_view_*",
        ),
        "needs a GPU": (
            "device_*", "get_current_device_index_*", "identity_does_not_hog_memory_*",
            "kernel_launch_on_custom_stream_*", "my_cuda_*", "my_get_cu*", "my_set_current_*",
            "std_cuda_*", "stream_*", "tensor_device_*",
        ),
        ARGUMENTS: (
            "make_tensor_clones_and_call_foreach_*", "my__foreach_*",
            "my_contiguous_memory_format_*", "my_empty_*", "my_full_*", "my_new_*",
            "my_ones_like_*", "my_string_op_*", "my_sum_cpu", "my_sum_out_*", "my_to_*",
        ),
    }.items() for pattern in patterns
}  # fmt: skip
RUN = (
    "divide_neg_exp", "fill_infinity", "mv_tensor_accessor", "my_abs", "my_amax", "my_amax_vec",
    "my_clone", "my_contiguous", "my_copy_", "my_matmul", "my_pad", "my_subtract", "my_sum_all",
    "my_sum_dim1", "my_zero_", "neg_exp", "slow_sgd",
)  # fmt: skip
LEAST = 17

I = "const int i = thread_position_in_grid.x; "  # noqa: E741


def kernel(name: str, rule: str, body: str, size: str = "out.size") -> ferrule.Op:
    return ferrule.op(name, rule, metal=I + body, grid=size, threadgroup=64)


def put(op: ferrule.Op) -> Callable[..., Any]:
    """An op that writes to its first input, which is returned."""

    def call(to: Any, *others: Any) -> Any:
        assert op(to, *others) is None
        return to

    return call


absolute = kernel("my_abs", "x[*S]:T -> out[*S]:T", "out[i] = metal::abs(x[i]);")
neg_exp = kernel("neg_exp", "x[*S]:T -> out[*S]:T", "out[i] = -metal::precise::exp(x[i]);")
divide_neg_exp = kernel(
    "divide_neg_exp", "x[*S]:T -> out[*S]:T", "out[i] = -x[i] / metal::precise::exp(x[i]);"
)
clone = kernel("my_clone", "x[*S]:T -> out[*S]:T", "out[i] = x[i];")
zero = kernel("my_zero_", "x[*S]:T! ->", "x[i] = 0;", "x.size")
infinity = kernel("fill_infinity", "x[*S]:T! ->", "x[i] = INFINITY;", "x.size")
copy = kernel("my_copy_", "x[*S]:T!, y[*S]:T, wait:bool ->", "x[i] = y[i];", "x.size")
largest = kernel(
    "my_amax", "x[M,N]:T -> out[N]:T",
    "T top = x[i]; for (int m = 1; m < M; ++m) top = metal::max(top, x[m * N + i]); out[i] = top;",
)  # fmt: skip
pad = kernel(
    "my_pad", "x[M,N]:T -> out[M+3,N+3]:T",
    "const int row = i / (N + 3) - 2, column = i % (N + 3) - 1;"
    "const bool inside = row >= 0 && row < M && column >= 0 && column < N;"
    "out[i] = inside ? x[row * N + column] : T(0);",
)  # fmt: skip
matrix_vector = kernel(
    "mv_tensor_accessor", "m[M,N]:T, v[N]:T -> out[M]:T",
    "T sum = 0; for (int n = 0; n < N; ++n) sum += m[i * N + n] * v[n]; out[i] = sum;",
)  # fmt: skip
product = kernel(
    "my_matmul", "a[*S,M,K]:T, b[*S,K,N]:T -> out[*S,M,N]:T",
    "const int row = i / N, first = row / M * K; T sum = 0;"
    "for (int k = 0; k < K; ++k) sum += a[row * K + k] * b[(first + k) * N + i % N]; out[i] = sum;",
)  # fmt: skip
difference = kernel(
    "my_subtract", "a[*S]:T, b[*S]:T, alpha:float32 -> out[*S]:T", "out[i] = a[i] - alpha * b[i];"
)
total = kernel(
    "my_sum_all", "x[*S]:T -> out[]:T",
    "int size = 1; for (int d = 0; d < x_ndim; ++d) size *= x_shape[d];"
    "T sum = 0; for (int n = 0; n < size; ++n) sum += x[n]; out[i] = sum;",
)  # fmt: skip
sum_of_middle = kernel(
    "my_sum_dim1", "x[A,B,C]:T -> out[A,C]:T",
    "T sum = 0; for (int b = 0; b < B; ++b) sum += x[(i / C * B + b) * C + i % C]; out[i] = sum;",
)  # fmt: skip
descent = kernel(
    "sgd_out_of_place",
    "p[*S]:T, gradient[*S]:T, decay:float32, rate:float32, maximize:bool -> out[*S]:T",
    "const T g = maximize ? -gradient[i] : gradient[i]; out[i] = p[i] - rate * (g + decay * p[i]);",
)


def matmul(a: Any, b: Any) -> Any:
    """A vector is a matrix with one row, or one column."""
    if a.ndim == 1:
        return product(a[None], b)[0]
    return product(a, b[:, None])[:, 0] if b.ndim == 1 else product(a, b)


def subtract(a: Any, b: Any, alpha: float = 1.0) -> Any:
    return difference(a, b.expand_as(a), alpha)


OPS = {
    "divide_neg_exp": divide_neg_exp, "fill_infinity": put(infinity),
    "mv_tensor_accessor": matrix_vector, "my_abs": absolute, "my_amax": largest,
    "my_amax_vec": lambda x: largest(x.flatten(0, 1)), "my_clone": clone, "my_contiguous": clone,
    "my_copy_": put(copy), "my_matmul": matmul, "my_pad": pad, "my_subtract": subtract,
    "my_sum_all": total, "my_sum_dim1": sum_of_middle, "my_zero_": put(zero), "neg_exp": neg_exp,
    "sgd_out_of_place": descent,
}  # fmt: skip


def load(path: Path) -> tuple[dict[str, Any], list[str]]:
    for version in range(9, 14):
        extension: Any = ModuleType(f"libtorch_agn_2_{version}")
        extension.ops = SimpleNamespace(**OPS)
        sys.modules[extension.__name__] = extension
    cases = importlib.import_module(path.stem).TestLibtorchAgnosticCPU
    found = unittest.defaultTestLoader.getTestCaseNames(cases)
    names = [f"{cases.__name__}.{name}" for name in found]
    ours = {f"{cases.__name__}.test_{name}_cpu" for name in RUN}
    return {name: cases(name.split(".")[1]) for name in names if name in ours}, names


context = contextlib.nullcontext
