"""What a stream keeps for an implementation from call to call; of units, in `test_cuda_op`."""

from __future__ import annotations

import json
import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule import KernelError, KernelTypeError, Op, RuleError
from ferrule.hosts.torch import arrays as torch_host

RULE = "x[N]:T -> y[N]:T"


def count(x: Any, calls: Any) -> Any:
    """Adds to ``x`` how often it was called with so many elements before."""
    y = x + calls
    calls += 1
    return y


def counting(**more: Any) -> Op:
    return ferrule.adopt("counting", RULE, run=count, state={"calls": "T[N]"}, **more)


@given(sizes=st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["float32", "float64"]))))
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("library", [np, torch])
def test_it_is_as_the_last_call_left_it(library: Any, sizes: list[tuple[int, str]]) -> None:
    """Of several sizes all have the memory of the largest, which was zeros when it was made."""
    op = ferrule.adopt("fresh", RULE, run=lambda x, calls: count(x, calls), state={"calls": "T[N]"},
                       version=1)  # fmt: skip
    body: Any = op.implementations[0] if library is np else op
    if library is torch:
        _ = op.torch_op
        registered: Any = op._operator
        body = registered.op.implementations[0]
    body._kept.kept.clear()
    expected: dict[str, Any] = {}
    for n, dtype in sizes:
        memory = expected.get(dtype)
        if memory is None or len(memory) < n:
            memory = expected[dtype] = np.zeros(n)
        y = op(library.ones(n, dtype=getattr(library, dtype)))
        assert y.tolist() == (1 + memory[:n]).tolist()
        memory[:n] += 1


def test_each_thread_has_its_own() -> None:
    op = ferrule.adopt("threads", RULE, run=count, state={"calls": "T[N]"})
    seen: list[Any] = []
    op(torch.ones(1))
    for _ in range(2):
        thread = threading.Thread(target=lambda: seen.append([op(torch.ones(1)).item()] * 2))
        thread.start()
        thread.join()
    assert seen == [[1, 1], [1, 1]] and op(torch.ones(1)).item() == 2


def test_captured_graphs_have_zeros_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    op = ferrule.adopt("captured", RULE, run=count, state={"calls": "T[N]"})
    assert [op(torch.ones(1)).item() for _ in range(2)] == [1, 2]
    with monkeypatch.context() as patch:
        patch.setattr(torch_host, "capturing", lambda device: True)
        assert [op(torch.ones(1)).item() for _ in range(2)] == [1, 1]
    assert op(torch.ones(1)).item() == 3


def test_mlx_has_zeros_in_each_call() -> None:
    mx = pytest.importorskip("mlx.core")
    op = ferrule.adopt("of_mlx", RULE, run=count, state={"calls": "T[N]"})
    assert [op(mx.ones(2)).tolist() for _ in range(2)] == [[1, 1], [1, 1]]


def test_in_graphs_of_torch_and_modes() -> None:
    op = ferrule.adopt("in_graphs", RULE, run=count, state={"calls": "T[N]"})
    compiled = torch.compile(lambda *a: op(*a), fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        assert compiled(torch.ones(2)).tolist() == [1, 1]
    assert compiled(torch.ones(2)).tolist() == [2, 2]
    with torch.inference_mode():
        assert op(torch.ones(2)).tolist() == [3, 3]


def test_of_what_is_made_and_of_functions_with_conditions() -> None:
    made = ferrule.adopt(
        "made_state", RULE, make=lambda device, T: count, state={"calls": "T[N]"}, version=1
    )
    op = ferrule.op(
        "with_state", RULE, run=ferrule.run_function(count, when="N > 2", state={"calls": "T[N]"}),
        reference=lambda x: -x,
    )  # fmt: skip
    for i in range(2):
        assert made(np.ones(1)).tolist() == [1 + i]
        assert op(np.ones(3)).tolist() == [1 + i] * 3 and op(np.ones(1)).tolist() == [-1]


def test_it_is_part_of_the_identity_and_survives() -> None:
    ops = [counting(), ferrule.adopt("counting", RULE, run=count, state={"calls": "T[N+1]"}),
           ferrule.adopt("counting", RULE, run=lambda x, calls=0: x)]  # fmt: skip
    assert len({op.digest for op in ops}) == 3
    again = pickle.loads(pickle.dumps(ops[0]))  # noqa: S301
    assert again.digest == ops[0].digest and again(np.ones(2)).tolist() == [1, 1]
    assert Op.from_json(json.loads(json.dumps(ops[0].to_json()))).digest == ops[0].digest


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        (3, KernelTypeError, "`state` of op 'f': got 3, expected a dictionary"),
        ({"calls": "T"}, KernelError, 'expected "dtype.dims."'),
        ({"calls": "U[N]"}, KernelError, "has the dtype 'U'"),
        ({"calls": "T[M]"}, RuleError, "there is no dim 'M'"),
        ({"calls": "T[N > 2]"}, KernelError, "got the condition"),
        ({"x": "T[N]"}, KernelError, "`state` of op 'f': 'x' is taken"),
        ({"y": "T[N]"}, KernelError, "'y' is taken"),
        ({"stream": "T[N]"}, KernelError, "'stream' is taken"),
        ({"other": "T[N]"}, KernelError, r"\(x, other\), but .*'calls'"),
    ],
)
def test_wrong_declarations(state: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        ferrule.adopt("f", RULE, run=count, state=state)


def test_negative_sizes() -> None:
    op = ferrule.adopt("negative", RULE, run=count, state={"calls": "T[N - 2]"})
    with pytest.raises(KernelError, match="`state` of op 'negative': calls: N - 2 is -1 for x"):
        op(np.ones(1))


@pytest.mark.parametrize("library", [np, torch])
def test_more_than_there_is_memory(library: Any) -> None:
    op = ferrule.adopt("large", RULE, run=count, state={"calls": f"T[N, {10**17}]"})
    with pytest.raises(KernelError, match=r"`state` of op 'large': 'calls' is .* 80000000000000000"
                       "0 bytes of float64; .* cannot allocate them: "):  # fmt: skip
        op(library.ones(1, dtype=library.float64))
