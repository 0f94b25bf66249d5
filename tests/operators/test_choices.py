"""Tables of choices: measured, written, read, and as conditions of an op, in C and in Python."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule import KernelError, KernelTypeError, Op, RuleError
from ferrule.operators.choices import Choices, choices, measure_choices

OF = ("first", "second", "third")
KEY = ("N", "bucket(M, 1, 8, 64)", "T")
CPU = ("cpu", 0, 0, 0)
H200, H100 = ("cuda", 132, 90, 6144), ("cuda", 132, 90, 5120)
NUMBERS = {"first": 10, "second": -20, "third": 30}

keys = st.tuples(
    st.integers(-2, 3), st.sampled_from([1, 8, 64]), st.sampled_from(["float32", "float16"])
)
tables = st.dictionaries(
    st.sampled_from([CPU, H200, H100]), st.dictionaries(keys, st.sampled_from(OF), min_size=1)
)


def of_rows(path: Path, rows: Any, default: str = "first") -> Choices:
    """A table that was written and read."""
    table = Choices(path, OF, KEY, default)
    table.rows, table.names = rows, dict.fromkeys(rows, "some")
    table.write()
    return choices(path, of=OF, key=KEY, default=default)


def ops(table: Choices) -> Op:
    """An op of kernels that says which one ran, and one that reads the table's number."""
    body = "y[i] = {} * 1000 + CHOICE;"
    return ferrule.op(
        "chosen",
        "x[N,M]:T -> y[2]:int32",
        metal=[
            ferrule.metal_body(
                "uint i = thread_position_in_grid.x; " + body.format(i), grid=2, threadgroup=2,
                when=table.when(name), template={"CHOICE": table.number(**NUMBERS)},
            )
            for i, name in enumerate(OF)
        ],
    )  # fmt: skip


# -- conditions ------------------------------------------------------------------------------------


@given(rows=tables, default=st.sampled_from(OF), n=st.integers(-3, 4), m=st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_one_is_the_choice(rows: Any, default: str, n: int, m: int) -> None:
    table = Choices(Path("unwritten"), OF, KEY, default)
    table.rows = rows
    conditions = {name: table.when(name) for name in OF}
    for kind in (CPU, H200, H100, ("metal", 0, 0, 0)):
        for dtype in ("float32", "float16", "bfloat16"):
            facts = dict(
                zip((":device", "sm_count", "capability", "memory_bus"), kind, strict=True)
            )
            values = {"N": n, "M": m, ":T": dtype, **facts}
            key = n, 1 if m <= 1 else 8 if m <= 8 else 64, dtype
            expected = rows.get(kind, {}).get(key, default)
            assert [name for name in OF if conditions[name].evaluate(values)] == [expected]
            assert table.number(**NUMBERS).evaluate(values) == NUMBERS[expected]


@given(rows=tables, default=st.sampled_from(OF))
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read(tmp_path_factory: Any, rows: Any, default: str) -> None:
    path = tmp_path_factory.getbasetemp() / "table.json"
    assert of_rows(path, rows, default).rows == rows
    text = path.read_text()
    assert of_rows(path, dict(reversed(list(rows.items()))), default).rows == rows
    assert path.read_text() == text  # the same rows give the same file


def test_ops_and_graphs_take_the_choice(tmp_path: Path) -> None:
    import mlx.core as mx

    rows = {(3, 8, "float32"): "second", (3, 64, "float32"): "third", (2, 8, "float16"): "third"}
    op = ops(of_rows(tmp_path / "t.json", {CPU: rows, H200: {(1, 1, "float32"): "third"}}))
    compiled = torch.compile(lambda *a: op(*a), fullgraph=True, dynamic=True, backend="aot_eager")
    shapeless = mx.compile(lambda x: op(x), shapeless=True)
    for shape, dtype in [((3, 5), "float32"), ((3, 70), "float32"), ((3, 5), "float16"),
                         ((1, 1), "float32"), ((2, 2), "float16")]:  # fmt: skip
        key = shape[0], 1 if shape[1] <= 1 else 8 if shape[1] <= 8 else 64, dtype
        name = rows.get(key, "first")
        expected = [OF.index(name) * 1000 + NUMBERS[name]] * 2
        x = np.ones(shape, dtype)
        for result in (op(x), op(torch.from_numpy(x)), compiled(torch.from_numpy(x)),
                       op(mx.array(x)), shapeless(mx.array(x))):  # fmt: skip
            assert result.tolist() == expected


def test_the_table_is_part_of_the_identity(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    plain = ops(choices(path, of=OF, key=KEY, default="first"))
    one = ops(of_rows(path, {CPU: {(1, 1, "float32"): "second"}}))
    other = ops(of_rows(path, {CPU: {(1, 1, "float32"): "third"}}))
    assert len({op.digest for op in (plain, one, other)}) == 3
    assert Op.from_json(json.loads(json.dumps(one.to_json()))).digest == one.digest


def test_many_rows(tmp_path: Path) -> None:
    """Deep trees are not read from files, and C has room for so many values."""
    rows = {(n, m, "float32"): OF[n % 3] for n in range(300) for m in (1, 8, 64)}
    op = ops(of_rows(tmp_path / "t.json", {CPU: rows, H200: rows}))
    again = Op.from_json(json.loads(json.dumps(op.to_json())))
    for n in (0, 100, 200, 299, 300):
        i = n % 3 if n < 300 else 0
        result = again(np.ones((n, 5), np.float32))
        assert result.tolist() == [i * 1000 + NUMBERS[OF[i]]] * 2


def test_constants_of_what_is_made(tmp_path: Path) -> None:
    made = []

    def make(*, device: str, T: str, choice: int) -> Any:
        made.append((T, choice))
        return lambda x: x.sum(0)

    table = of_rows(tmp_path / "t.json", {CPU: {(3, 8, "float32"): "second"}})
    op = ferrule.adopt(
        "made", "x[N,M]:T -> y[M]:T", make=make, constants={"choice": table.number(**NUMBERS)},
        version=1,
    )  # fmt: skip
    for shape in ((3, 5), (3, 8), (3, 9)):
        op(np.ones(shape, np.float32))
    assert made == [("float32", -20), ("float32", 10)]


# -- measuring -------------------------------------------------------------------------------------


def candidates(table: Choices) -> Op:
    """``second`` is slow for few rows, ``first`` for many; ``third`` never runs."""

    def first(x: Any) -> Any:
        time.sleep(0.004 * (x.shape[0] > 2))
        return x + 1

    def second(x: Any) -> Any:
        time.sleep(0.004 * (x.shape[0] <= 2))
        return x + 1

    def third(x: Any) -> Any:
        raise KernelError("not here")

    functions = [
        ferrule.run_function(f, when=table.when(f.__name__)) for f in (first, second, third)
    ]
    return ferrule.op("candidates", "x[N,M]:T -> y[N,M]:T", run=functions)


@pytest.mark.parametrize("library", ["numpy", "torch", "mlx"])
def test_measuring(tmp_path: Path, library: str) -> None:
    path = tmp_path / "t.json"
    table = of_rows(path, {H200: {(1, 1, "float32"): "third"}, CPU: {(9, 1, "float32"): "third"}})
    inputs: list[Any] = [(np.ones((2, 3), np.float32),), (np.ones((3, 3), np.float32),)]
    if library == "torch":
        inputs = [(torch.from_numpy(x),) for (x,) in inputs]
    if library == "mlx":
        mx = pytest.importorskip("mlx.core")
        inputs = [(mx.array(x),) for (x,) in inputs]
    measured = measure_choices(table, candidates, inputs)
    assert [(each.key, each.choice) for each in measured] == [
        ((2, 8, "float32"), "first"), ((3, 8, "float32"), "second")
    ]  # fmt: skip
    assert set(measured[0].seconds) == {"first", "second"}
    again = choices(path, of=OF, key=KEY, default="first")
    assert again.rows[H200] == {(1, 1, "float32"): "third"} and again.names[CPU] == "cpu"
    assert again.rows[CPU] == {
        (9, 1, "float32"): "third", (2, 8, "float32"): "first", (3, 8, "float32"): "second"
    }  # fmt: skip
    assert os.listdir(tmp_path) == ["t.json"]


def test_the_default_stays_unless_another_is_faster(tmp_path: Path) -> None:
    table = choices(tmp_path / "t.json", of=OF, key=KEY, default="second")
    taken = iter([1.0, 1.01, 1.0, 1.03])
    inputs = [(np.ones((n, 1)),) for n in (1, 2)]
    measured = measure_choices(table, candidates, inputs, timer=lambda run: next(taken))
    assert [each.choice for each in measured] == ["second", "first"]
    with pytest.raises(KernelError, match="none of third runs"):
        alone = choices(tmp_path / "u.json", of=("third",), key=KEY, default="third")
        measure_choices(alone, lambda table: candidates_of_third(table), inputs)
    assert os.listdir(tmp_path) == ["t.json"]


def test_negative_keys(tmp_path: Path) -> None:
    how: Any = {"of": OF, "key": ["N-5", "M-3"], "default": "third"}
    table = choices(tmp_path / "t.json", **how)
    taken = iter([1.0, 2.0])
    measured = measure_choices(table, candidates, [(np.ones((2, 3)),)], timer=lambda _: next(taken))
    assert [(each.key, each.choice) for each in measured] == [((-3, 0), "first")]
    op = candidates(choices(tmp_path / "t.json", **how))
    assert op(np.ones((2, 3))).tolist() == [[2] * 3] * 2
    with pytest.raises(KernelError, match="not here"):
        op(np.ones((3, 3)))


def candidates_of_third(table: Choices) -> Op:
    def third(x: Any) -> Any:
        raise KernelError("not here")

    return ferrule.op("third", "x[N,M]:T -> y[N,M]:T", run=third)


@pytest.mark.parametrize("name", ["missing/t.json", "folder", "n" * 250])
def test_a_file_that_cannot_be_written_is_told_before(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    table = Choices(tmp_path / name, OF, KEY, "first")
    with pytest.raises(KernelError, match=rf"{name} cannot be written"):
        measure_choices(table, lambda table: pytest.fail("measured"), [])
    assert os.listdir(tmp_path) == ["folder"] and not os.listdir(tmp_path / "folder")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"cases": [np.ones((1, 3))]}, "got a ndarray for a case of .* all its inputs \\(x\\)"),
        ({"cases": [()]}, "got 0 for a case of op 'candidates'"),
        ({"cases": [(np.ones((1, 3)), 3)]}, "got 2 for a case"),
        ({"make": lambda table: abs}, "`make` gave <built-in function abs>; expected an op"),
        *(
            ({"timer": lambda run, took=took: took}, f"`timer` gave {took} for 'first'; expected s")
            for took in (None, float("nan"), float("inf"), 0.0, -1.0)
        ),
    ],
)
def test_wrong_measurements(tmp_path: Path, more: Any, message: str) -> None:
    table = choices(tmp_path / "t.json", of=OF, key=KEY, default="first")
    how: Any = {"make": candidates, "cases": [(np.ones((1, 3)),)], "timer": lambda run: 1.0, **more}
    with pytest.raises(KernelTypeError, match=message):
        measure_choices(table, how["make"], how["cases"], timer=how["timer"])
    assert not os.listdir(tmp_path)


def test_a_key_that_the_op_has_not_is_told_before(tmp_path: Path) -> None:
    table = choices(tmp_path / "t.json", of=OF, key=["K"], default="first")
    with pytest.raises(RuleError, match="there is no dim 'K'"):
        measure_choices(table, candidates, [(np.ones((1, 3)),)], timer=lambda _: pytest.fail("ran"))


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"of": "first"}, KernelTypeError, "`of` is 'first'; expected several strs"),
        ({"of": []}, KernelError, "expected each once"),
        ({"of": ["a", "a"]}, KernelError, "expected each once"),
        ({"key": "N"}, KernelTypeError, "`key` is 'N'"),
        ({"key": [3]}, KernelTypeError, "`key` is"),
        ({"key": ["N +"]}, RuleError, "no expression"),
        ({"key": ["N < 3"]}, RuleError, "a condition stands where a number"),
        ({"default": "fourth"}, KernelError, "'fourth' is none of its candidates first, second"),
    ],
)
def test_wrong_tables(tmp_path: Path, more: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        choices(tmp_path / "t.json", **{"of": OF, "key": KEY, "default": "first", **more})


def test_wrong_questions(tmp_path: Path) -> None:
    table = choices(tmp_path / "t.json", of=OF, key=KEY, default="first")
    with pytest.raises(KernelError, match="'other' is none of its candidates"):
        table.when("other")
    with pytest.raises(KernelError, match="got numbers of first; expected them of first, second"):
        table.number(first=1)
    for wrong in ("x", 1.5, True, 2**63):
        with pytest.raises(KernelTypeError, match=f"number of 'second' is {wrong!r}; expected an"):
            table.number(first=1, second=wrong, third=3)  # type: ignore[arg-type]
    with pytest.raises(RuleError, match="there is no dim 'M'"):
        ferrule.adopt(
            "f", "x[N]:T -> y[N]:T", run=abs, version=1,
            when=of_rows(tmp_path / "t.json", {CPU: {(1, 1, "int8"): "second"}}).when("second"),
        )  # fmt: skip


GOOD = {
    "format": 1, "key": list(KEY), "of": list(OF), "devices": [
        {"name": "a", "device": "cpu", "sm_count": 0, "capability": 0, "memory_bus": 0,
         "rows": [[[1, 8, "float32"], "first"]]},
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["format"], 2, "its key is"),
        (["key"], ["N", "M", "T"], "its key is"),
        (["devices", 0, "rows", 0, 1], "fourth", "'fourth' is none of first"),
        (["devices", 0, "rows", 0, 0], [1, 8], "zip"),
        (["devices", 0, "rows", 0, 0], [1, 8, "float31"], "the key"),
        (["devices", 0, "rows", 0, 0], [1, "int8", "float32"], "the key"),
        (["devices", 0, "rows", 0, 0], [2**63, 8, "float32"], "the key"),
        (["devices", 0, "rows", 0, 0], [True, 8, "float32"], "the key"),
        (["of"], ["first", "second"], "are first, second, and those of the table first, s"),
        (["of"], 3, "not iterable"),
        ([], {"format": 1, "key": list(KEY), "devices": []}, "which candidates were measured"),
        (["of"], ["third", "second", "first"], None),
        (["devices", 0, "rows", 0, 0], [1.5, 8, "float32"], "the key"),
        (["devices", 0, "rows", 0, 0], [[], 8, "float32"], "unhashable"),
        (["devices", 0, "rows"], 3, "not iterable"),
        (["devices", 0, "device"], "tpu", "a device 'tpu'"),
        (["devices", 0, "sm_count"], "many", "invalid literal"),
        (["devices", 0, "name"], None, None),
        (["devices"], {}, None),
    ],
)
def test_damaged_files(tmp_path: Path, path: Any, value: Any, message: str | None) -> None:
    data: Any = json.loads(json.dumps(GOOD))
    at = data
    for part in path[:-1]:
        at = at[part]
    if path:
        at[path[-1]] = value
    else:
        data = value
    file = tmp_path / "t.json"
    file.write_text(json.dumps(data))
    if message is None:
        choices(file, of=OF, key=KEY, default="first")
        return
    with pytest.raises(KernelError, match=rf"t.json cannot be read: .*{message}.*measure it anew"):
        choices(file, of=OF, key=KEY, default="first")
    file.write_text(json.dumps(data)[:-9])
    with pytest.raises(KernelError, match="cannot be read"):
        choices(file, of=OF, key=KEY, default="first")
