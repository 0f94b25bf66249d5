"""The call: its arguments, its checks, what is asked of the device, what is remembered."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fake_device
import ferrule as fe
from fake_device import FakeDevice
from ferrule import dtypes
from ferrule.dtypes import Dtype
from ferrule.source.metal import text as metal
from ferrule.spec import Input, Spec
from strategies import LEVEL0, level0_dtypes, template_values

SHARED = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
ONES = np.ones(4, np.float32)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return fake_device.install(monkeypatch)


def make(inputs: int = 1, outputs: int = 1, source: str = "out0[0] = 1;", **flags: Any) -> Any:
    return fe.metal_kernel(
        "k", [f"a{i}" for i in range(inputs)], [f"out{i}" for i in range(outputs)], source, **flags
    )


def arguments(**changed: Any) -> dict[str, Any]:
    """The arguments of a good call of ``make()``, some of them changed."""
    call = {
        "inputs": [ONES],
        "output_shapes": [(4,)],
        "output_dtypes": [np.float32],
        "grid": (4, 1, 1),
        "threadgroup": (4, 1, 1),
    }
    return {**call, **changed}


# -- signatures --------------------------------------------------------------------------------


def mlx_parameters(documentation: str) -> list[tuple[str, str | None]]:
    """Names and defaults of the first signature in MLX's documentation."""
    signature = re.search(r"(?m)\((.*)\)(?: ->.*)?$", documentation.replace("false", "False"))
    assert signature is not None
    parts = re.split(r", (?=\w+: |\*)", signature[1])
    return [
        (part.split(":")[0], part.rpartition(" = ")[2] if " = " in part else None)
        for part in parts
        if part not in ("self", "*")
    ]


def our_parameters(function: Callable[..., Any]) -> list[tuple[str, str | None]]:
    return [
        (name, None if p.default is p.empty else repr(p.default))
        for name, p in inspect.signature(function).parameters.items()
        if name != "self"
    ]


def test_the_factory_has_the_parameters_of_mlx() -> None:
    theirs = mlx_parameters(mx.fast.metal_kernel.__doc__ or "")
    assert [name for name, _ in theirs][:4] == ["name", "input_names", "output_names", "source"]
    ours = our_parameters(fe.metal_kernel)
    assert [name for name, _ in ours] == [name for name, _ in theirs] + ["portable"]
    assert ours[4:-1] == theirs[4:]
    portable = inspect.signature(fe.metal_kernel).parameters["portable"]
    assert portable.kind is portable.KEYWORD_ONLY
    assert portable.default is False


def test_the_call_has_the_parameters_of_mlx() -> None:
    k: Any = mx.fast.metal_kernel("k", ["a"], ["out"], "")
    with pytest.raises(TypeError) as caught:
        k(1)
    theirs = mlx_parameters(str(caught.value))
    assert ("init_value", "None") in theirs
    assert our_parameters(type(make()).__call__) == theirs
    kinds = {p.kind for p in inspect.signature(make()).parameters.values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}


def test_public_names_are_there() -> None:
    for name in fe.__all__:
        assert getattr(fe, name) is not None
        assert name in dir(fe)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fe.nothing  # noqa: B018
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", fe.__version__)


# -- construction ------------------------------------------------------------------------------

CONSTRUCTION: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"name": 3}, fe.KernelTypeError, "`name`: got 3, expected a str"),
    ({"name": "a;b"}, fe.KernelError, "'a;b' cannot name a kernel"),
    ({"name": "../x"}, fe.KernelError, "cannot name a kernel"),
    ({"name": "x\n"}, fe.KernelError, "cannot name a kernel"),
    ({"name": "x" * 10_000}, fe.KernelError, "cannot name a kernel.*256 at most"),
    ({"input_names": "ab"}, fe.KernelTypeError, "`input_names` of kernel 'k'.*sequence"),
    ({"input_names": 3}, fe.KernelTypeError, "`input_names` of kernel 'k': got 3"),
    ({"input_names": [3]}, fe.KernelTypeError, "`input_names` of kernel 'k': got 3"),
    ({"input_names": ["a b"]}, fe.KernelError, "'a b' is not an identifier"),
    ({"input_names": ["a", "a"]}, fe.KernelError, "two arguments called 'a'"),
    ({"input_names": ["o"]}, fe.KernelError, "two arguments called 'o'"),
    ({"input_names": ["device"]}, fe.KernelError, "'device' is a reserved word"),
    ({"output_names": []}, fe.KernelError, "Must specify at least one output"),
    ({"source": 3}, fe.KernelTypeError, "`source` of kernel 'k': got int"),
    ({"source": None}, fe.KernelTypeError, "kernel 'k' has no `source`"),
    ({"source": "\n\ud800"}, fe.KernelTypeError, "surrogate pair in line 2"),
    (
        {"input_names": ["grid_size"], "source": "o[0] = grid_size[0];"},
        fe.KernelError,
        "'grid_size', and its body names the thread attribute",
    ),
    (
        {"input_names": ["a", "a_shape"], "source": "o[0] = a_shape[0];"},
        fe.KernelError,
        "'a_shape', which is also the shape of its input 'a'",
    ),
    ({"source": "\n\0"}, fe.KernelError, "`source` of kernel 'k' has a NUL.*line 2"),
    ({"source": " " * (10 << 20)}, fe.KernelError, "10485760 characters"),
    ({"header": None}, fe.KernelTypeError, "`header` of kernel 'k': got NoneType"),
    ({"ensure_row_contiguous": 1}, fe.KernelTypeError, "`ensure_row_contiguous`.*got 1"),
    ({"atomic_outputs": "yes"}, fe.KernelTypeError, "`atomic_outputs`.*got 'yes'"),
    ({"portable": None}, fe.KernelTypeError, "`portable`.*got None"),
    ({"compile_options": 3}, fe.KernelError, "`compile_options`: got 3"),
    ({"compile_options": {"x": 1}}, fe.KernelError, "unknown key 'x'"),
    ({"compile_options": {"math_mode": "x"}}, fe.KernelError, "got 'x', expected one of 'safe'"),
    ({"output_names": None}, fe.KernelTypeError, "kernel 'k' has no `output_names`; give both"),
    ({"input_names": None}, fe.KernelTypeError, "kernel 'k' has no `input_names`; give both"),
]


@pytest.mark.parametrize(("changed", "error", "message"), CONSTRUCTION)
def test_bad_construction(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    good = {"name": "k", "input_names": ["a"], "output_names": ["o"], "source": ""}
    with pytest.raises(error, match=message):
        fe.metal_kernel(**{**good, **changed})
    if "portable" in changed:
        return
    try:
        mx.fast.metal_kernel(**{**good, **changed})
    except (TypeError, ValueError) as theirs:
        assert issubclass(error, type(theirs))


# -- bad calls ---------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")
AXES = "expected three integers from"
TEMPLATE = re.escape(
    "[metal_kernel] Invalid template argument. Must be `mlx.core.Dtype`, `int` or `bool`."
)

# What is changed in a good call, the class of the error, and what its message says: the argument,
# the value, and what is allowed.
CALLS: list[tuple[dict[str, Any], type[Exception], str]] = [
    # counts, in MLX's words
    ({"inputs": []}, fe.KernelError, "Expected `inputs` to have size 1 but got size 0.*'k'.*: a0"),
    ({"inputs": [ONES] * 2}, fe.KernelError, "Expected `inputs` to have size 1 but got size 2"),
    (
        {"output_shapes": []},
        fe.KernelError,
        "Expected `output_shapes` to have size 1 but got size 0",
    ),
    (
        {"output_dtypes": [np.int8] * 3},
        fe.KernelError,
        "Expected `output_dtypes` to have size 1 but got size 3.*: out0",
    ),
    # inputs
    ({"inputs": None}, fe.KernelTypeError, "`inputs` of kernel 'k': got None.*a list of 1 entries"),
    ({"inputs": {"a0": ONES}}, fe.KernelTypeError, "`inputs` of kernel 'k': got a dictionary"),
    ({"inputs": ONES}, fe.KernelError, "`inputs` .*numpy.ndarray of shape .4,.*a list"),
    ({"inputs": iter([ONES])}, fe.KernelTypeError, "`inputs` of kernel 'k': got .*iterator"),
    ({"inputs": "a"}, fe.KernelTypeError, "`inputs` of kernel 'k': got 'a'"),
    ({"inputs": [None]}, fe.KernelTypeError, "input 'a0' of kernel 'k': got None.*a NumPy, torch"),
    ({"inputs": [[1, 2]]}, fe.KernelError, r"input 'a0' of kernel 'k': got \[1, 2\] of type list"),
    ({"inputs": ["x"]}, fe.KernelError, "input 'a0' of kernel 'k': got 'x' of type str"),
    ({"inputs": [np.zeros(2)]}, fe.KernelError, "input 'a0' of kernel 'k'.*float64.*float32"),
    # grid
    (
        {"grid": (4, 1)},
        fe.KernelTypeError,
        rf"`grid` of kernel 'k': got \(4, 1\).*{AXES} 0 to 2147",
    ),
    ({"grid": (4, 1, 1, 1)}, fe.KernelTypeError, f"`grid` of kernel 'k'.*{AXES}"),
    ({"grid": 4}, fe.KernelTypeError, f"`grid` of kernel 'k': got 4.*{AXES}"),
    ({"grid": itertools.count(1)}, fe.KernelTypeError, f"`grid` of kernel 'k': got count.*{AXES}"),
    ({"grid": None}, fe.KernelTypeError, f"`grid` of kernel 'k': got None.*{AXES}"),
    ({"grid": "abc"}, fe.KernelTypeError, f"`grid` of kernel 'k': got 'abc'.*{AXES}"),
    ({"grid": (4.0, 1, 1)}, fe.KernelTypeError, rf"`grid` of kernel 'k': got \(4.0, .*{AXES}"),
    ({"grid": (NAN, 1, 1)}, fe.KernelTypeError, rf"`grid` of kernel 'k': got \(nan, .*{AXES}"),
    ({"grid": (True, 1, 1)}, fe.KernelTypeError, rf"`grid` of kernel 'k': got \(True, .*{AXES}"),
    ({"grid": (2**31, 1, 1)}, fe.KernelTypeError, f"`grid` of kernel 'k'.*2147483648.*{AXES}"),
    ({"grid": (-(2**31) - 1, 1, 1)}, fe.KernelTypeError, f"`grid` of kernel 'k'.*{AXES}"),
    ({"grid": (-1, 1, 1)}, fe.KernelError, rf"`grid` of kernel 'k': got \(-1, 1, 1\), {AXES} 0"),
    ({"grid": [4, -2, 1]}, fe.KernelError, rf"`grid` of kernel 'k': got \(4, -2, 1\), {AXES} 0"),
    (
        {"grid": (4, 0, 1)},
        fe.KernelError,
        r"`grid` of kernel 'k': got \(4, 0, 1\).*'out0' of shape",
    ),
    # threadgroup
    ({"threadgroup": (4, 1)}, fe.KernelTypeError, f"`threadgroup` of kernel 'k'.*{AXES} 1 to 2147"),
    ({"threadgroup": (4.5, 1, 1)}, fe.KernelTypeError, f"`threadgroup` of kernel 'k'.*{AXES}"),
    ({"threadgroup": (False, 1, 1)}, fe.KernelTypeError, f"`threadgroup` of kernel 'k'.*{AXES}"),
    ({"threadgroup": (2**31, 1, 1)}, fe.KernelTypeError, f"`threadgroup` of kernel 'k'.*{AXES}"),
    ({"threadgroup": (0, 1, 1)}, fe.KernelError, rf"`threadgroup` .*got \(0, 1, 1\), {AXES} 1"),
    ({"threadgroup": (1, 1, -1)}, fe.KernelError, rf"`threadgroup` .*got \(1, 1, -1\), {AXES} 1"),
    (
        {"threadgroup": (1025, 1, 1)},
        fe.KernelError,
        r"`threadgroup` of kernel 'k': got \(1025, 1, 1\), which is 1025 threads; at most 1024",
    ),
    ({"threadgroup": (32, 32, 2)}, fe.KernelError, "2048 threads; at most 1024"),
    # output_shapes
    (
        {"output_shapes": (4,)},
        fe.KernelTypeError,
        "`output_shapes` of kernel 'k' for output 'out0'",
    ),
    (
        {"output_shapes": [4]},
        fe.KernelTypeError,
        "got 4 of type int, expected a sequence of non-neg",
    ),
    ({"output_shapes": ["4"]}, fe.KernelTypeError, "`output_shapes` .*'out0': got '4' of type str"),
    ({"output_shapes": [None]}, fe.KernelTypeError, "`output_shapes` .*'out0': got None"),
    ({"output_shapes": None}, fe.KernelTypeError, "`output_shapes` of kernel 'k': got None"),
    ({"output_shapes": [(4.0,)]}, fe.KernelTypeError, r"`output_shapes` .*'out0': got \(4.0,\)"),
    ({"output_shapes": [(True,)]}, fe.KernelTypeError, r"`output_shapes` .*'out0': got \(True,\)"),
    ({"output_shapes": {"out0": (4,)}}, fe.KernelTypeError, "`output_shapes` .*got a dictionary"),
    ({"output_shapes": [(2, -1)]}, fe.KernelError, r"'out0': got \(2, -1\), expected a sequence"),
    (
        {"output_shapes": [(2**31, 2**31)]},
        fe.KernelError,
        rf"'out0': got .*, which is {2**64} bytes of float32; at most {2**63 - 1}",
    ),
    # output_dtypes
    ({"output_dtypes": ["float33"]}, fe.KernelTypeError, "'out0': got 'float33' of type str.*bool"),
    ({"output_dtypes": [None]}, fe.KernelTypeError, "`output_dtypes` .*'out0': got None.*a dtype"),
    (
        {"output_dtypes": [float]},
        fe.KernelTypeError,
        "`output_dtypes` .*'out0': got <class 'float'>",
    ),
    ({"output_dtypes": [3]}, fe.KernelTypeError, "`output_dtypes` .*'out0': got 3"),
    (
        {"output_dtypes": np.float32},
        fe.KernelTypeError,
        "`output_dtypes` of kernel 'k': got <class",
    ),
    ({"output_dtypes": [np.dtype("V4")]}, fe.KernelTypeError, "`output_dtypes` .*'out0'"),
    ({"output_dtypes": [np.dtype(">f4")]}, fe.KernelTypeError, "`output_dtypes` .*'out0'"),
    (
        {"output_dtypes": [np.float64]},
        fe.KernelError,
        "'out0': float64 is not supported on the GPU",
    ),
    # template
    ({"template": {"T": 1}}, fe.KernelTypeError, "`template` of kernel 'k': got {'T': 1}.*a list"),
    ({"template": 3}, fe.KernelTypeError, "`template` of kernel 'k': got 3.*a list"),
    ({"template": "T"}, fe.KernelTypeError, "`template` of kernel 'k': got 'T'"),
    ({"template": [("T", 1, 2)]}, fe.KernelTypeError, r"`template` .*\('T', 1, 2\).*a pair"),
    ({"template": [3]}, fe.KernelTypeError, "`template` .*got 3 of type int.*a pair"),
    ({"template": [(1, 1)]}, fe.KernelTypeError, "`template` of kernel 'k': got 1 of type int"),
    ({"template": [([], 1)]}, fe.KernelTypeError, "`template` of kernel 'k': got"),
    ({"template": [("T", 1.5)]}, fe.KernelError, f"{TEMPLATE}.*T is 1.5 of type float"),
    ({"template": [("T", "x")]}, fe.KernelError, f"{TEMPLATE}.*T is 'x' of type str"),
    ({"template": [("T", None)]}, fe.KernelError, f"{TEMPLATE}.*T is None"),
    ({"template": [("T", np.int32(1))]}, fe.KernelError, f"{TEMPLATE}.*int32.*int\\(x\\)"),
    ({"template": [("T", np.bool_(1))]}, fe.KernelError, f"{TEMPLATE}.*T is np.True_"),
    ({"template": [("T", [])]}, fe.KernelError, TEMPLATE),
    ({"template": [("T", 2**31)]}, fe.KernelError, f"{TEMPLATE}.*T is 2147483648, expected an int"),
    ({"template": [("T", -(2**31) - 1)]}, fe.KernelError, TEMPLATE),
    ({"template": [("T", np.float64)]}, fe.KernelError, "`template` .*T is float64.*not supported"),
    ({"template": [("a b", 1)]}, fe.KernelError, "`template` of kernel 'k': 'a b' is not an ident"),
    ({"template": [("float", 1)]}, fe.KernelError, "'float' is a reserved word"),
    ({"template": [("T", 1), ("T", 2)]}, fe.KernelError, "two arguments called 'T'"),
    ({"template": [("a0", 1)]}, fe.KernelError, "two arguments called 'a0'"),
    ({"template": [("out0", 1)]}, fe.KernelError, "two arguments called 'out0'"),
    # init_value
    ({"init_value": "0"}, fe.KernelTypeError, "`init_value` of kernel 'k': got '0'.*a number"),
    ({"init_value": 1j}, fe.KernelTypeError, "`init_value` of kernel 'k': got 1j"),
    ({"init_value": [1]}, fe.KernelTypeError, "`init_value` of kernel 'k'"),
    ({"init_value": np.ones(1)}, fe.KernelTypeError, "`init_value` .*ndarray of shape .1,"),
    ({"init_value": 10**400}, fe.KernelTypeError, "`init_value` .*a number that a float can hold"),
    *(
        ({"init_value": v, "output_dtypes": [d]}, fe.KernelError, f"`init_value` .*'out0'.*{m}")
        for v, d, m in [
            (NAN, np.int32, "got nan, expected a number from -2147483648 to 2147483647"),
            (INF, np.uint8, "got inf, expected a number from 0 to 255"),
            (-INF, np.int64, "got -inf"),
            (256, np.uint8, "got 256"),
            (-1, np.uint32, "got -1, expected a number from 0"),
            (2**63, np.int64, "got 9223372036854775808"),
            (1e30, np.int64, r"got 1e\+30"),
            (np.float32(300), np.int8, "got 300.0"),
        ]
    ),
    # the rest
    (
        {"verbose": 1},
        fe.KernelTypeError,
        "`verbose` of kernel 'k': got 1 of type int, expected a b",
    ),
    ({"verbose": None}, fe.KernelTypeError, "`verbose` of kernel 'k': got None"),
    ({"stream": "cpu"}, fe.KernelTypeError, "`stream` of kernel 'k' is 'cpu'"),
]

E4M3 = ml_dtypes.float8_e4m3fn
F8 = "float8_e4m3fn is a type that neither Metal nor MLX has"

# MLX has no words for these.
FLOAT8_CALLS: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(
        ({"inputs": [value]}, fe.KernelError, rf"input 'a0' .*: {F8}, so no .*x.view\(np.uint8\)")
        for value in (E4M3(2.0), np.ones(2, E4M3), torch.ones(2, dtype=torch.float8_e4m3fn))
    ),
    *(
        ({"output_dtypes": [d]}, fe.KernelError, f"'out0': {F8}, so no metal.*such as uint8")
        for d in (E4M3, np.dtype(E4M3), torch.float8_e4m3fn, fe.float8_e4m3fn)
    ),
    (
        {"template": [("T", torch.float8_e5m2)]},
        fe.KernelError,
        "T is float8_e5m2, which is a type that neither Metal nor MLX has; .*such as uint8",
    ),
]


@pytest.mark.parametrize(("changed", "error", "message"), CALLS + FLOAT8_CALLS)
def test_bad_calls_are_refused_before_anything_is_launched(
    fake: FakeDevice, changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"(?s){message}"):
        make()(**arguments(**changed))
    assert not fake.launches
    assert not fake.specs


def to_mlx(value: Any) -> Any:
    """``value`` with MLX arrays and dtypes in place of NumPy's."""
    if isinstance(value, dict):
        return {k: to_mlx(v) for k, v in value.items()}
    if isinstance(value, list):
        return [to_mlx(v) for v in value]
    if isinstance(value, tuple):
        return tuple(to_mlx(v) for v in value)
    if isinstance(value, np.ndarray) and value.ndim:
        kind = mx.float64 if value.dtype == np.float64 else None
        return mx.array(value, kind)
    if isinstance(value, type) and issubclass(value, np.generic):
        return getattr(mx, value.__name__)
    return value


def mlx_fault(call: dict[str, Any]) -> Exception | None:
    """What MLX raises for a call. Without a GPU it only takes calls while it exports."""
    k: Any = mx.fast.metal_kernel("k", ["a0"], ["out0"], "")
    try:
        with mx.stream(mx.cpu):
            mx.export_function(lambda event: None, lambda: k(**call))
    except Exception as error:
        return error
    return None


# Left out: 2^31 or more along one axis of an output ends the process inside MLX; an iterator is
# used up after one call.
COMPARED = [c for c in CALLS if str(2**64) not in c[2] and "iterator" not in c[2]]


@pytest.mark.parametrize(("changed", "error", "message"), COMPARED)
def test_errors_are_of_the_types_that_mlx_raises(
    fake: FakeDevice, changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    call = to_mlx(arguments(**changed))
    theirs = mlx_fault(call)
    if theirs is not None and changed.keys() != {"stream"}:
        assert isinstance(theirs, (TypeError, ValueError)), theirs
        assert issubclass(error, TypeError) == isinstance(theirs, TypeError), theirs
    with pytest.raises(error):
        make()(**call)
    assert not fake.launches


def test_what_mlx_accepts_is_accepted(fake: FakeDevice) -> None:
    good: list[dict[str, Any]] = [
        {},
        {"inputs": (ONES,)},
        {"grid": [4, 1, 1]},
        {"grid": np.array([4, 1, 1])},
        {"grid": (np.int64(4), np.uint8(1), 1)},
        {"threadgroup": [1024, 1, 1]},
        {"threadgroup": (np.int32(4), 1, 1)},
        {"output_shapes": ([4],)},
        {"output_shapes": [np.array([2, 2])]},
        {"output_shapes": [(np.int64(4),)]},
        {"output_shapes": [()]},
        {"output_dtypes": (np.float32,)},
        {"template": []},
        {"template": (("T", np.float32), ["N", -(2**31)])},
        {"template": [("B", True)]},
        {"init_value": 3},
        {"init_value": True},
        {"init_value": 1e300},
        {"init_value": NAN},
        {"init_value": np.float64(1)},
        {"init_value": np.array(1.0)},
        {"init_value": mx.array(1.0)},
        {"init_value": 2.9, "output_dtypes": [np.int32]},
    ]
    for changed in good:
        assert mlx_fault(to_mlx(arguments(**changed))) is None, changed
        make()(**arguments(**changed))
    assert len(fake.launches) == len(good)
    make()(**arguments(output_shapes=[torch.ones(2, 3).shape], init_value=torch.tensor(1.0)))


def test_positional_calls_are_type_errors() -> None:
    with pytest.raises(TypeError, match="positional"):
        make()([ONES])
    with pytest.raises(TypeError, match="missing"):
        make()(inputs=[ONES])
    with pytest.raises(TypeError, match="ensure_row_contiguous"):
        make()(**arguments(ensure_row_contiguous=True))


def test_a_value_without_a_repr_is_still_refused_with_words(fake: FakeDevice) -> None:
    class Shy:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    for changed in ({"grid": Shy()}, {"inputs": [Shy()]}, {"init_value": Shy()}):
        with pytest.raises(fe.FerruleError, match="of type Shy"):
            make()(**arguments(**changed))


# -- what is launched --------------------------------------------------------------------------

AXIS = st.integers(1, 40)


@SHARED
@given(st.tuples(AXIS, AXIS, AXIS), st.tuples(AXIS, AXIS, AXIS))
def test_the_threadgroup_is_clamped_to_the_grid(
    fake: FakeDevice, grid: tuple[int, int, int], group: tuple[int, int, int]
) -> None:
    k = make()
    if group[0] * group[1] * group[2] > 1024:
        with pytest.raises(fe.KernelError, match="at most 1024"):
            k(**arguments(grid=grid, threadgroup=group))
        return
    k(**arguments(grid=grid, threadgroup=group))
    launch = fake.launches[-1][2]
    assert launch.grid == grid
    assert launch.threadgroup == tuple(min(g, t) for g, t in zip(grid, group, strict=True))


@pytest.mark.parametrize("host", [np, torch, mx])
def test_empty_outputs(fake: FakeDevice, host: Any) -> None:
    shapes = [(0,), (3, 0, 2)]
    call = arguments(
        inputs=[host.ones((0, 3))], output_shapes=shapes, output_dtypes=[np.float32, np.int8]
    )
    if host is np:
        call["inputs"] = [np.ones((0, 3), np.float32)]
    outs = make(outputs=2)(**{**call, "grid": (0, 1, 1)}, verbose=False)
    assert [tuple(o.shape) for o in outs] == shapes
    assert not fake.launches
    assert not fake.specs
    outs = make(outputs=2)(**call)  # a grid of threads with nothing to write is allowed
    assert [tuple(o.shape) for o in outs] == shapes
    assert len(fake.launches) == 1


def test_the_launch_says_what_the_call_said(fake: FakeDevice) -> None:
    k = make(inputs=2, outputs=2)
    flipped = np.ones((2, 3), np.float32).T
    k(
        **arguments(
            inputs=[ONES, flipped],
            output_shapes=[(2, 2), ()],
            output_dtypes=[np.int8, np.float16],
            init_value=1.5,
            template=[("T", torch.bfloat16), ("N", 3), ("B", True)],
        )
    )
    inputs, outputs, launch = fake.launches[0]
    assert [f.shape for f in inputs] == [(4,), (3, 2)]
    assert [(f.dtype, f.shape) for f in outputs] == [(fe.int8, (2, 2)), (fe.float16, ())]
    assert launch == ((4, 1, 1), (4, 1, 1), ((2, 2), ()), 1.5, (1,), True, 0, False)
    assert fake.specs == [
        Spec(
            k.kernel,
            (Input(fe.float32, 1), Input(fe.float32, 2)),
            (fe.int8, fe.float16),
            (("T", fe.bfloat16), ("N", 3), ("B", True)),
        )
    ]


# -- what is remembered ------------------------------------------------------------------------


def test_a_repeated_call_asks_for_no_program(fake: FakeDevice) -> None:
    k = make()
    for size in (4, 8, 100, 4):
        shape = (size,)
        k(
            **arguments(
                inputs=[np.ones(shape, np.float32)], output_shapes=[shape], grid=(size, 1, 1)
            )
        )
    assert len(fake.launches) == 4
    assert len(fake.specs) == 1


@SHARED
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            level0_dtypes(),
            level0_dtypes(),
            st.lists(
                st.tuples(
                    st.sampled_from(["N", "M"]),
                    template_values().filter(lambda v: v is not dtypes.float64),
                ),
                max_size=2,
                unique_by=lambda item: item[0],
            ),
        ),
        min_size=2,
        max_size=6,
    )
)
def test_each_spec_has_a_program_of_its_own(
    fake: FakeDevice, calls: list[tuple[int, Dtype, Dtype, list[tuple[str, Any]]]]
) -> None:
    """Also where values are equal but of other types: 1, True, 1 of another name."""
    k = make()
    fake.specs.clear()
    wanted: list[Spec] = []
    for ndim, given_, out, template in calls * 2:
        array = np.ones((1,) * ndim, given_.numpy)
        k(**arguments(inputs=[array], output_dtypes=[out], template=template))
        spec = Spec(k.kernel, (Input(given_, ndim),), (out,), tuple(template))
        if spec not in wanted:
            wanted.append(spec)
    assert fake.specs == wanted


def test_true_and_one_are_two_templates(fake: FakeDevice) -> None:
    k = make()
    for value in (1, True, 1, True, 0, False):
        k(**arguments(template=[("N", value)]))
    assert [s.template[0][1] for s in fake.specs] == [1, True, 0, False]
    assert [type(s.template[0][1]) for s in fake.specs] == [int, bool, int, bool]


def test_template_names_close_to_other_names_are_fine(fake: FakeDevice) -> None:
    k = fe.metal_kernel("k", ["T"], ["out"], "out[0] = T[0];")
    k(**arguments(template=[("InT", np.float32), ("T_", 3), ("t", False)]))
    with pytest.raises(fe.KernelError, match="two arguments called 'T'"):
        k(**arguments(template=[("T", np.float32)]))


# -- dictionaries ------------------------------------------------------------------------------


def test_the_dictionary_form(fake: FakeDevice) -> None:
    k = fe.metal_kernel(name="k", source="out[0] = T(inp[0]);", header="// header\n")
    call: dict[str, Any] = {
        "inputs": {"inp": ONES, "n": 3},
        "template": {"T": mx.float16, "N": 2},
        "grid": (4, 1, 1),
        "threadgroup": (4, 1, 1),
        "output_shapes": {"out": (4,), "more": (2, 2)},
        "output_dtypes": {"more": np.int8, "out": np.float16},
    }
    outs = k(**call)
    assert list(outs) == ["out", "more"]
    assert (outs["out"].shape, outs["out"].dtype) == ((4,), np.float16)
    assert (outs["more"].shape, outs["more"].dtype) == ((2, 2), np.int8)
    spec = fake.specs[0]
    assert spec.kernel.input_names == ("inp", "n")
    assert spec.kernel.output_names == ("out", "more")
    assert spec.kernel.header == "// header\n"
    assert spec.template == (("T", fe.float16), ("N", 2))
    assert spec.inputs == (Input(fe.float32, 1), Input(fe.int32, 0))
    k(**call)
    assert len(fake.specs) == 1
    named = fe.metal_kernel(
        "k", ["inp", "n"], ["out", "more"], "out[0] = T(inp[0]);", "// header\n"
    )
    lists: dict[str, Any] = {
        "inputs": [ONES, 3],
        "template": [("T", fe.float16), ("N", 2)],
        "output_dtypes": [np.float16, np.int8],
    }
    described = {k: call[k] for k in ("inputs", "template", "output_dtypes", "output_shapes")}
    assert k.text("metal", **described) == named.text("metal", **lists)
    assert k.compile("cpu", **described).payload == b"bytes"


def test_the_dictionary_form_takes_flags_at_construction_or_in_the_call(fake: FakeDevice) -> None:
    turned = np.ones((2, 3), np.float32).T
    for flag in (True, False):
        k = fe.metal_kernel(
            "k", source="", ensure_row_contiguous=flag, atomic_outputs=not flag, portable=True,
            compile_options={"math_mode": "fast"},
        )  # fmt: skip
        call: dict[str, Any] = {
            "inputs": {"a": turned}, "output_shapes": {"o": (6,)},
            "output_dtypes": {"o": np.float32}, "grid": (6, 1, 1), "threadgroup": (6, 1, 1),
        }  # fmt: skip
        k(**call)
        assert fake.launches[-1][2].copies == ((0,) if flag else ())
        kernel = fake.specs[-1].kernel
        assert (kernel.atomic_outputs, kernel.portable, kernel.math_mode) == (
            not flag,
            True,
            "fast",
        )
        k(**call, ensure_row_contiguous=not flag, atomic_outputs=flag)
        assert fake.launches[-1][2].copies == (() if flag else (0,))
        assert fake.specs[-1].kernel.atomic_outputs is flag


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"inputs": [ONES]}, fe.KernelTypeError, "`inputs` of kernel 'k': got a list.*dictionary"),
        ({"output_shapes": [(4,)]}, fe.KernelTypeError, "`output_shapes` .*dictionary.*Give both"),
        ({"output_dtypes": [np.int8]}, fe.KernelTypeError, "`output_dtypes` .*dictionary"),
        ({"template": [("T", 1)]}, fe.KernelTypeError, "`template` .*got a list.*dictionary"),
        ({"output_shapes": {}, "output_dtypes": {}}, fe.KernelError, "at least one output"),
        (
            {"output_shapes": {"p": (4,)}},
            fe.KernelError,
            r"keys \['p'\].*`output_dtypes` has \['o'\]",
        ),
        ({"inputs": {"a b": ONES}}, fe.KernelError, "'a b' is not an identifier"),
        ({"inputs": {3: ONES}}, fe.KernelTypeError, "`input_names` of kernel 'k': got 3"),
        ({"inputs": {"o": ONES}}, fe.KernelError, "two arguments called 'o'"),
        ({"template": {"a": 1}}, fe.KernelError, "two arguments called 'a'"),
        ({"atomic_outputs": 3}, fe.KernelTypeError, "`atomic_outputs`.*got 3"),
    ],
)
def test_bad_dictionary_calls(
    fake: FakeDevice, changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    call: dict[str, Any] = {
        "inputs": {"a": ONES},
        "output_shapes": {"o": (4,)},
        "output_dtypes": {"o": np.float32},
        "grid": (4, 1, 1),
        "threadgroup": (4, 1, 1),
    }
    k = fe.metal_kernel("k", source="")
    k(**call)
    fake.launches.clear()
    with pytest.raises(error, match=message):
        k(**{**call, **changed})
    assert not fake.launches


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": "a b"}, "cannot name a kernel"),
        ({"source": "\0"}, "NUL character"),
        ({"compile_options": {"x": 1}}, "unknown key 'x'"),
    ],
)
def test_the_dictionary_form_is_checked_at_construction(
    changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(fe.KernelError, match=message):
        fe.metal_kernel(**{"name": "k", "source": "", **changed})


# -- text and compile --------------------------------------------------------------------------


@SHARED
@given(level0_dtypes(), st.lists(st.integers(0, 9), max_size=3).map(tuple))
def test_inputs_can_be_described(fake: FakeDevice, dtype: Dtype, shape: tuple[int, ...]) -> None:
    k = make(source="out0[0] = a0_shape[0];")
    array = np.zeros(shape, dtype.numpy)
    small = array.size < 8
    expected = metal.text(Spec(k.kernel, (Input(dtype, len(shape), small),), (fe.int8,)))
    sizes = ",".join(map(str, shape))
    described = [array, (shape, dtype), (list(shape), dtype.numpy), f"{dtype.name}[{sizes}]"]
    described.append(torch.empty(shape, dtype=getattr(torch, dtype.name), requires_grad=False))
    described.append(torch.empty(shape, dtype=getattr(torch, dtype.name), device="meta"))
    if not shape:
        described.append(dtype.name)
    for value in described:
        assert k.text("metal", inputs=[value], output_dtypes=[np.int8]) == expected
    k.text("cpu", inputs=[array], output_dtypes=[np.int8])
    assert fake.specs[-1].inputs == (Input(dtype, len(shape)),), "sizes do not reach other devices"
    assert not fake.launches


def test_text_is_for_the_device_that_is_asked_for(fake: FakeDevice) -> None:
    k = make()
    call = arguments()
    assert k.text(**call) == "text of k for (4, 1, 1)"
    assert k.text("cuda", inputs=[3], output_dtypes=[np.int8]) == "text of k for None"
    assert k.compile(**call).payload == b"bytes"
    assert k.compile("cuda", **call).text == "text of k for (4, 1, 1)"
    assert "custom_kernel_k_floatc_float" in k.text("metal", **call)
    assert not fake.launches


def test_text_takes_what_cannot_be_launched(fake: FakeDevice) -> None:
    k = make()
    tensor = torch.ones(4, requires_grad=True)
    assert k.text(inputs=[tensor], output_dtypes=[tensor.dtype])
    outs: list[str] = []

    @mx.compile
    def traced(x: mx.array) -> mx.array:
        outs.append(k.text("metal", inputs=[x], output_dtypes=[x.dtype]))
        return x

    traced(mx.ones((4,)))
    assert outs == [k.text("metal", inputs=["float32[4]"], output_dtypes=[fe.float32])]


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"inputs": ["float17[3]"]}, fe.KernelError, r"'a0'.*got 'float17\[3\]'.*float16\[4,16\]"),
        ({"inputs": ["float32(3)"]}, fe.KernelError, "input 'a0' of kernel 'k': got 'float32"),
        ({"inputs": ["float32[-3]"]}, fe.KernelError, "input 'a0' of kernel 'k': got 'float32"),
        ({"inputs": ["float64[3]"]}, fe.KernelError, "'a0' of kernel 'k': float64 is not supp"),
        ({"inputs": ["float8_e4m3fn[3]"]}, fe.KernelError, f"input 'a0' of kernel 'k': {F8}"),
        ({"inputs": [((3,), E4M3)]}, fe.KernelError, f"input 'a0' of kernel 'k': {F8}"),
        *FLOAT8_CALLS,
        ({"inputs": [((-3,), fe.int8)]}, fe.KernelError, r"'a0' of .*got the shape \(-3,\)"),
        ({"inputs": [((3,), "int8")]}, fe.KernelTypeError, "'a0' of .*got 'int8'.*a dtype"),
        ({"inputs": [(3, fe.int8)]}, fe.KernelTypeError, "'a0' of .*got 3.*a pair such as"),
        ({"inputs": [(3,)]}, fe.KernelTypeError, "'a0' of kernel 'k'.*a pair such as"),
        ({"inputs": [None]}, fe.KernelTypeError, "'a0' of kernel 'k': got None"),
        ({"inputs": [np.zeros(2, "M8[s]")]}, fe.KernelTypeError, "'a0' of kernel 'k' has dtype"),
        ({"grid": (0, 1, 1)}, fe.KernelError, "`grid` of kernel 'k'.*not empty"),
        *(
            call
            for call in CALLS
            if not {"inputs", "verbose", "stream"} & call[0].keys()
            and None not in (call[0].get("grid", 0), call[0].get("output_shapes", 0))
        ),
    ],
)
def test_bad_descriptions(
    fake: FakeDevice, changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    for describe in (make().text, make().compile):
        with pytest.raises(error, match=f"(?s){message}"):
            describe("cpu", **arguments(**changed))
    assert not fake.specs


def test_verbose_prints_the_text_for_the_device(
    fake: FakeDevice, capsys: pytest.CaptureFixture[str]
) -> None:
    k = make()
    expected = "Generated source code for `k`:\n```\ntext of k for (4, 1, 1)\n```\n"
    for _ in range(2):
        k(**arguments(), verbose=True)
        assert capsys.readouterr().out == expected
    k(**arguments(), verbose=False)
    assert capsys.readouterr().out == ""
    assert len(fake.launches) == 3
    k(**arguments(grid=(0, 1, 1), output_shapes=[(0,)]), verbose=True)
    assert "Generated source code for `k`" in capsys.readouterr().out
    assert len(fake.launches) == 3


def test_errors_of_a_device_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(inputs: list[Any], outputs: list[Any]) -> None:
        raise fe.CompileError("no", kernel="k", log="log")

    fake = fake_device.install(monkeypatch, body)
    for _ in range(2):
        with pytest.raises(fe.CompileError, match="no"):
            make()(**arguments())
    assert len(fake.launches) == 2


def test_repr_names_the_arguments() -> None:
    assert repr(make(inputs=2)) == "<ferrule.MetalKernel k(a0, a1) -> out0>"
    assert repr(fe.metal_kernel("k", source="")) == "<ferrule.DictionaryKernel k>"


@pytest.mark.parametrize("dtype", LEVEL0, ids=repr)
def test_output_dtypes_of_every_library_mean_the_same(fake: FakeDevice, dtype: Dtype) -> None:
    k = make()
    theirs = getattr(mx, "bool_" if dtype.name == "bool" else dtype.name)
    named = [dtype, dtype.numpy, dtype.numpy.type, getattr(torch, dtype.name), theirs]
    for value in named:
        (out,) = k(**arguments(output_dtypes=[value], template=[("T", value)]))
        assert out.dtype == dtype.numpy
    assert len(fake.specs) == 1
    assert ml_dtypes.bfloat16 is dtypes.bfloat16.numpy.type


# -- on the CPU --------------------------------------------------------------------------------

STRIDED_EXP = """
    uint elem = thread_position_in_grid.x;
    uint loc = elem_to_loc(elem, inp_shape, inp_strides, inp_ndim);
    out[elem] = metal::exp(T(inp[loc]) * T(scale));
"""


@pytest.fixture(scope="module")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One folder for the whole file, so that each text is compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FERRULE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.usefixtures("_cache")
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("kind", ["numpy", "torch", "mlx"])
def test_the_cpu_runs_strided_arrays_of_every_host(kind: str, contiguous: bool) -> None:
    k = fe.metal_kernel(
        "strided_exp", ["inp", "scale"], ["out"], STRIDED_EXP, ensure_row_contiguous=contiguous
    )
    values = np.linspace(-2, 2, 30, dtype=np.float32).reshape(5, 6)
    makers: dict[str, Any] = {"numpy": np.array, "torch": torch.tensor, "mlx": mx.array}
    array = makers[kind](values)
    view = array[::2].T
    (out,) = k(
        inputs=[view, 2], template=[("T", view.dtype)], grid=(18, 1, 1), threadgroup=(8, 1, 1),
        output_shapes=[view.shape], output_dtypes=[view.dtype],
    )  # fmt: skip
    assert type(out) is type(view)
    np.testing.assert_allclose(out.tolist(), np.exp(2 * values[::2].T), rtol=1e-5)


@pytest.mark.usefixtures("_cache")
def test_the_cpu_compiles_without_launching_and_prints_its_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    k = fe.metal_kernel("one", [], ["out"], "out[thread_position_in_grid.x] = 1;")
    call: dict[str, Any] = {
        "inputs": [], "output_shapes": [(3,)], "output_dtypes": [np.int32], "grid": (3, 1, 1),
        "threadgroup": (3, 1, 1),
    }  # fmt: skip
    binary = k.compile("cpu", **call)
    assert binary.payload
    assert binary.text == k.text("cpu", **call)
    assert capsys.readouterr().out == ""
    (out,) = k(**call, verbose=True)
    assert out.tolist() == [1, 1, 1]
    assert binary.text in capsys.readouterr().out
    with pytest.raises(fe.DeviceError, match="'tpu'"):
        k.compile("tpu", **call)


@pytest.mark.usefixtures("_cache")
def test_the_dictionary_form_runs() -> None:
    k = fe.metal_kernel(
        name="old_form",
        source="uint i = thread_position_in_grid.x; out[i] = T(inp[i]); twice[i] = 2 * inp[i];",
    )
    x = np.arange(5, dtype=np.float32)
    outs = k(
        inputs={"inp": x}, template={"T": np.int32}, grid=(5, 1, 1), threadgroup=(256, 1, 1),
        output_shapes={"out": x.shape, "twice": x.shape},
        output_dtypes={"out": np.int32, "twice": np.float32},
    )  # fmt: skip
    assert outs["out"].tolist() == [0, 1, 2, 3, 4]
    assert outs["twice"].tolist() == [0, 2, 4, 6, 8]


def test_output_dtypes_by_name() -> None:
    """As ferrule's own tables name them; the arrays say whose they are, or else NumPy."""
    kernel = fe.metal_kernel("k", ["x"], ["y"], "y[0] = 3;")
    sizes: dict[str, Any] = {"output_shapes": [(1,)], "grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
    for name in ("float32", "int64", "bool", "complex64"):
        for x in (np.ones(1, np.float32), 3.0):
            for _ in range(3):  # calls that are like one before take other ways
                (y,) = kernel(inputs=[x], output_dtypes=[name], **sizes)
                assert (
                    type(y) is np.ndarray
                    and y.dtype == np.dtype(name)
                    and y[0] == (True if name == "bool" else 3)
                )
    torch = pytest.importorskip("torch")
    for _ in range(3):
        (y,) = kernel(inputs=[torch.ones(1)], output_dtypes=["bfloat16"], **sizes)
        assert y.dtype == torch.bfloat16 and y[0] == 3
    mx: Any = pytest.importorskip("mlx.core")
    for _ in range(3):
        (y,) = kernel(inputs=[mx.ones(1)], output_dtypes=["bfloat16"], **sizes)
        assert y.dtype == mx.bfloat16 and y[0].item() == 3
    sized = {**sizes, "output_shapes": ["x.shape"], "output_dtypes": ["float16"]}
    assert kernel(inputs=[mx.ones(1)], **sized)[0].dtype == mx.float16
