"""Launches, templates and choices that depend on the device of a call."""

from __future__ import annotations

import json
import pickle
from functools import partial
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ferrule
from ferrule import KernelError, Op, RuleError
from ferrule.devices import protocol as devices
from ferrule.dtypes import BY_NAME
from ferrule.operators import call as op_call
from ferrule.operators.launch import bound
from ferrule.operators.text import described
from ferrule.spec import Facts

# Torch's own: its compiler uses what it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

SAY = "if (thread_position_in_grid.x == 0) {{ y[0] = {}; y[1] = threads_per_grid.x; y[2] = KIND; }}"
where = ferrule.op(
    "where", "x[N]:T -> y[3]:int32",
    metal=[
        ferrule.metal_body(
            SAY.format(1), when="device in (cuda, metal)", grid=1, threadgroup=1,
            template={"KIND": 7},
        ),
        ferrule.metal_body(
            SAY.format(2), when="capability >= 90 or sm_count > 64", grid=1, threadgroup=1,
            template={"KIND": 8},
        ),
        ferrule.metal_body(
            SAY.format(3), grid="sm_count * N if device == cpu else 1", threadgroup=64,
            template={"KIND": "capability + 5 if device != cuda else 6"},
        ),
    ],
)  # fmt: skip
HOSTS = [np.asarray, torch.asarray, mx.array]


@pytest.fixture
def threads() -> Any:
    before = ferrule.get_threads()
    yield ferrule.set_threads
    ferrule.set_threads(before)


@pytest.mark.parametrize("make", HOSTS)
def test_each_host_on_the_cpu(make: Any, threads: Any) -> None:
    for count in (1, 2, 3, 1):
        threads(count)
        for size in (4, 9):
            y = where(make(np.ones(size, np.float32)))
            assert np.asarray(y).tolist() == [3, count * size, 5]


def test_in_graphs(threads: Any) -> None:
    compiled = torch.compile(
        lambda *a: where(*a), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    shapeless = mx.compile(lambda x: where(x), shapeless=True)
    for size, count in ((4, 1), (7, 2)):
        threads(count)
        assert compiled(torch.ones(size)).tolist() == [3, count * size, 5]
        assert shapeless(mx.ones(size)).tolist() == [3, count * size, 5]
    torch.library.opcheck(where.torch_op, (torch.ones(3),))

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return where(x)

    program = torch.export.export(
        Module(), (torch.ones(5),), dynamic_shapes=({0: torch.export.Dim("n")},)
    )
    assert program.module()(torch.ones(8)).tolist() == [3, 16, 5]


def test_other_devices() -> None:
    (of_gpu, by_size, other) = where.implementations
    said = where.rule.bind("where", [(4,)], ["float32"])

    def chosen(**facts: Any) -> list[bool]:
        said.device = partial(dict, {f":{k}" if k == "device" else k: v for k, v in facts.items()})
        return [body.holds(said) for body in (of_gpu, by_size, other)]

    assert chosen(device="cuda", sm_count=132, capability=90) == [True, True, True]
    assert chosen(device="cpu", sm_count=65, capability=0) == [False, True, True]
    assert chosen(device="cpu", sm_count=64, capability=0) == [False, False, True]
    said.device = dict
    with pytest.raises(KernelError, match=r"of op 'where': device is not known here, where no"):
        other.launch_for(said)
    assert devices.described("mps") == {":device": "metal", "capability": 0, "memory_bus": 0}


def test_files_for_apple_hold_what_runs_there(tmp_path: Any) -> None:
    path = str(tmp_path / "where.mlxfn")
    mx.export_function(path, lambda x: where(x), mx.ones(4))
    assert b"y[0] = 1;" in (tmp_path / "where.mlxfn").read_bytes()


def test_it_survives() -> None:
    texts = [str(body.when) for body in where.implementations]
    assert texts[0] == "device == cuda or device == metal"
    for again in (
        pickle.loads(pickle.dumps(where)),  # noqa: S301
        Op.from_json(json.loads(json.dumps(where.to_json()))),
    ):
        assert again.digest == where.digest
        assert [str(body.when) for body in again.implementations] == texts


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("T == cpu", "what is one of cpu, cuda, metal is called `device`"),
        ("device == gpu", "`device` is one of cpu, cuda, metal, as in device == cuda"),
        ("device == CPU", "`device` is one of cpu, cuda, metal"),
        ("device == float16", "`device` is one of cpu, cuda, metal, as in device == cuda"),
        ("device in (cpu, float16)", "'float16' is no device: cpu, cuda, metal"),
        ("device == cpu == 1", "compared as in"),
        ("device > 1", "`device` is one of cpu, cuda, metal"),
        ("cpu == device", "the variable stands first"),
    ],
)
def test_what_cannot_be_said(setting: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        ferrule.op(
            "bad", "x[N]:T -> y[N]:T",
            metal=ferrule.metal_body("y[0] = x[0];", grid=1, threadgroup=1, when=setting),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("x[N]:T -> y[N]:T where device == cpu", "are the same on every device"),
        ("x[N]:T -> y[sm_count]:T", "has the dim 'sm_count' by itself"),
    ],
)
def test_rules_know_no_device(rule: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        ferrule.op("bad", rule, metal="y[0] = x[0];", grid=1, threadgroup=1)


def test_a_dim_of_that_name_is_a_dim() -> None:
    op = ferrule.op(
        "own", "x[sm_count]:float32 -> y[1]:int32", metal="y[0] = threads_per_grid.x;",
        grid="sm_count", threadgroup=1,
    )  # fmt: skip
    for make in HOSTS:
        assert np.asarray(op(make(np.ones(7, np.float32)))).tolist() == [7]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["cpu", "cuda:0", "cuda:1"]), st.integers(0, 3),
            st.sampled_from([np.float32, np.float16]), st.integers(0, 2),
        ),
        min_size=1, max_size=20,
    )
)  # fmt: skip
def test_what_is_chosen_is_kept_for_a_device_and_sizes(calls: Any) -> None:
    conditions = ["device == cuda and sm_count > 100", "N > k", "T == float16", None]
    op = ferrule.op(
        "kept_choice",
        "x[N]:T, k:int32 -> y[N]:T",
        metal=[ferrule.metal_body("", grid=1, threadgroup=1, when=when) for when in conditions],
    )
    for device, n, dtype, k in calls:
        fact = Facts(BY_NAME[np.dtype(dtype).name], (n,), (1,), 0, device)
        call = bound(op, device, {"x": fact, "k": k})
        kind = device.partition(":")[0]
        known = {":device": kind, "sm_count": 132 if device == "cuda:0" else 10}
        call = call._replace(binding=call.binding.on(partial(dict, known)))
        holds = [device == "cuda:0", n > k, dtype == np.float16, True]
        for _ in range(2):
            assert op_call.choose(call) is op.implementations[holds.index(True)]
    assert len(op.bound) == len(set(calls))


def test_what_is_asked_of_other_devices_leaves_calls_as_they_are(tmp_path: Any) -> None:
    """Texts for a GPU, and files of MLX, are of the same sizes as calls on the CPU."""
    bodies = [
        ferrule.metal_body(f"y[thread_position_in_grid.x] = {n};", grid="N", threadgroup=1, when=w)
        for n, w in ((1, "device == cuda"), (2, "device == metal"), (3, None))
    ]
    op = ferrule.op("of_devices", "x[N]:float32 -> y[N]:float32", metal=bodies)
    x = np.ones(5, np.float32)
    given = {"x": ((5,), ferrule.float32)}
    declared = cast(Any, op.implementations)
    for device, number in (("cpu", 2), ("cuda", 0), ("metal", 1)):
        fitting = [described(op, body, given, device) is not None for body in declared]
        assert fitting.index(True) == number
    mx.export_function(str(tmp_path / "of.mlxfn"), op, mx.array(x))
    for make in HOSTS:
        assert np.asarray(op(make(x))).tolist() == [3] * 5
