from collections.abc import Callable
from typing import Any

DIGEST: str

class Table:
    def __init__(self, inputs: int, outputs: int, contiguous: bool, /) -> None: ...
    def call(
        self,
        inputs: object,
        output_shapes: object,
        output_dtypes: object,
        grid: object,
        threadgroup: object,
        template: object,
        init_value: object,
        /,
    ) -> list[Any] | None: ...
    def remember(
        self,
        inputs: object,
        output_shapes: object,
        output_dtypes: object,
        grid: object,
        threadgroup: object,
        template: object,
        init_value: object,
        plan: tuple[object, ...],
        /,
    ) -> bool: ...

class Operator:
    def __init__(self, function: object, kinds: str, /) -> None: ...
    def __call__(self, *args: object) -> Any: ...

def register_numpy(kind: type, array_api: object, empty: object, /) -> bool: ...
def numpy_guarded() -> bool: ...
def numpy_new(shape: tuple[int, ...], dtype: object, nbytes: int, zero: bool, /) -> Any: ...
def numpy_outside(array: object, nbytes: int, /) -> int: ...
def register_ops(
    dtypes: tuple[tuple[object, int], ...], threads_now: int | None, few: int, /
) -> bool: ...
def numpy_op(table: int, resolve: Callable[[int], int], /) -> Callable[..., Any]: ...
def slack_put(address: int, nbytes: int, /) -> int: ...
def slack_outside(address: int, nbytes: int, /) -> int: ...
def register_torch(
    kinds: tuple[type, ...],
    size: type,
    exchange_api: object,
    tracing_state: object,
    dispatch_modes: object,
    function_modes: object,
    grad_enabled: object,
    forward_ad: dict[str, Any],
    /,
) -> bool: ...
def register_cuda(state: int, /) -> bool: ...
def bypass(by: int, /) -> None: ...
