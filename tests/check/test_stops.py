"""Threads stop at lines of a body, and show what they have; nothing else changes."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ferrule
from ferrule.check.launches.messages import position
from ferrule.check.stops import breaks
from ferrule.errors import KernelError
from ferrule.kernel import make_kernel
from ferrule.source.stops import with_stops
from ferrule.spec import Launch


def run(
    source: str, *stop_at: str, header: str = "", grid: Any = (8, 1, 1), group: Any = (8, 1, 1),
    inputs: Sequence[Any] = (np.arange(16, dtype=np.float32),), template: Any = (), **more: Any,
) -> tuple[np.ndarray, Any]:  # fmt: skip
    """Run a kernel of x, y, … and out that stops; its output, and what was found."""
    names = list("xyz"[: len(inputs)])
    kernel = ferrule.metal_kernel(
        name="stops", input_names=names, output_names=["out"], source=source, header=header
    )
    with ferrule.checking(stop_at=stop_at) as found:
        (out,) = kernel(
            inputs=list(inputs), template=list(template), grid=grid, threadgroup=group,
            output_shapes=[(8,)], output_dtypes=[np.float32], **more,
        )  # fmt: skip
    return out, found


LOOP = """\
uint i = thread_position_in_grid.x;
float sum = 0;
for (uint k = 0; k < 3; ++k) {
  float square = x[i + k] * x[i + k];
  sum += square;
}
out[i] = sum;"""


# -- what is shown ---------------------------------------------------------------------------------

SCALARS = {
    "bool": (np.bool_, "true", True), "char": (np.int8, "-5", -5), "uchar": (np.uint8, "250", 250),
    "short": (np.int16, "-300", -300), "ushort": (np.uint16, "65000", 65000),
    "int": (np.int32, "-70000", -70000), "uint": (np.uint32, "4000000000u", 4000000000),
    "long": (np.int64, "-5000000000l", -5000000000),
    "ulong": (np.uint64, "9000000000ul", 9 * 10**9),
    "half": (np.float16, "0.1h", 0.1), "bfloat": (ml_dtypes.bfloat16, "3.140625bf", 3.140625),
    "float": (np.float32, "0.1", 0.1),
}  # fmt: skip


def test_values_of_every_type() -> None:
    declared, kinds = [], [k for k in SCALARS if k != "bool"]
    for kind, (_, text, _) in SCALARS.items():
        declared.append(f"{kind} a_{kind} = {text};")
        declared.append(f"{kind} r_{kind}[3] = {{{kind}({text}), {kind}(1), {kind}(0)}};")
    for kind in kinds:
        for lanes in (2, 3, 4):
            parts = ", ".join(f"{kind}({n})" for n in range(1, lanes + 1))
            declared.append(f"{kind}{lanes} v_{kind}{lanes} = {kind}{lanes}({parts});")
            declared.append(
                f"{kind}{lanes} w_{kind}{lanes}[2] = {{v_{kind}{lanes}, {kind}{lanes}(7)}};"
            )
    body = "\n".join(declared) + "\nout[thread_position_in_grid.x] = 1;"
    _, found = run(body, str(len(declared) + 1))
    seen = found.stops[0].variables
    for kind, (dtype, _, value) in SCALARS.items():
        assert seen[f"a_{kind}"] == dtype(value)
        assert seen[f"a_{kind}"].dtype == dtype
        np.testing.assert_array_equal(seen[f"r_{kind}"], np.array([value, 1, 0], dtype))
    for kind in kinds:
        for lanes in (2, 3, 4):
            vector = np.arange(1, lanes + 1).astype(SCALARS[kind][0])
            np.testing.assert_array_equal(seen[f"v_{kind}{lanes}"], vector)
            both = np.stack([vector, np.full(lanes, 7, vector.dtype)])
            np.testing.assert_array_equal(seen[f"w_{kind}{lanes}"], both)


@pytest.mark.parametrize(
    "dtype",
    ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16",
     "bfloat16", "float32", "complex64"],
)  # fmt: skip
def test_elements_of_every_dtype(dtype: str) -> None:
    x = np.arange(16).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    _, found = run(
        "uint i = thread_position_in_grid.x;\nT y = x[i + 3];\nout[i] = 1;", "2:5",
        inputs=[x], template=[("T", ferrule.bfloat16 if dtype == "bfloat16" else x.dtype.type)],
    )  # fmt: skip
    value = found.stops[0].elements["x[i + 3]"]
    assert (value, value.dtype) == (x[8], x.dtype)


def test_pointers_arrays_and_threadgroup_memory() -> None:
    body = """\
uint i = thread_position_in_grid.x;
threadgroup float tile[2][4];
float mine[3] = {1, 2, 3};
const device float* p = x + 2 * i;
thread float* q = mine + 1;
tile[i / 4][i % 4] = *p;
threadgroup_barrier(mem_flags::mem_threadgroup);
out[i] = tile[i / 4][i % 4] + *q + p[1] + ((const device float4*)x)[i % 2].y;"""
    _, found = run(body, "8:5")
    (stop,) = found.stops
    assert (stop.variables["p"], stop.variables["q"]) == ("x + 10", "mine + 1")
    np.testing.assert_array_equal(stop.variables["mine"], np.float32([1, 2, 3]))
    np.testing.assert_array_equal(stop.variables["tile"], np.arange(0, 16, 2).reshape(2, 4))
    elements = stop.elements
    assert elements["tile[i / 4][i % 4]"] == 10
    assert elements["*q"] == 2
    assert elements["p[1]"] == 11
    np.testing.assert_array_equal(elements["((const device float4*)x)[i % 2]"], [4, 5, 6, 7])
    assert elements["out[i]"] is None
    assert "writes  out[5], not written yet" in stop.text
    assert "tile[1 … 7]  {2, 4, 6, 8, 10, 12, 14}" in stop.text


def test_the_text() -> None:
    _, found = run(LOOP, "4:3@2")
    text = found.stops[0].text
    place = next(line for line in text.splitlines(keepends=True) if "-->" in line)
    assert "test_stops.py:" in place
    assert (
        text.replace(place, "")
        == """\
stop: kernel 'stops', line 4, thread (3, 0, 0)
    2 | float sum = 0;
    3 | for (uint k = 0; k < 3; ++k) {
    4 >   float square = x[i + k] * x[i + k];
    5 |   sum += square;
    6 | }
  thread_position_in_grid (3, 0, 0)
  thread_position_in_threadgroup (3, 0, 0), threadgroup_position_in_grid (0, 0, 0), \
thread_index_in_simdgroup 3
  variables:
    i    uint   3
    sum  float  9
    k    uint   1
  this line:
    x[i + k]  reads  x[4] = 4
  around:
    x[0 … 8]  {0, 1, 2, 3, 4, 5, 6, 7, 8}
  arrays:
    x    float32[16]
    out  float32[8]
"""
    )


def test_what_is_outside_is_said() -> None:
    out, found = run("uint i = thread_position_in_grid.x;\nout[i] = x[i + 12];", "2:6")
    assert found.stops[0].elements["x[i + 12]"] is None
    assert "x[18], outside of x, which has 16 elements" in found.stops[0].text
    assert [f.kind for f in found] == ["bounds"]
    np.testing.assert_array_equal(out, [12, 13, 14, 15, 0, 0, 0, 0])


def test_elements_that_are_not_reached_are_not_shown() -> None:
    body = """\
uint i = thread_position_in_grid.x;
if (i < 4 && x[i] > 1) out[i] = x[i + 4]; else out[i] = x[7 - i] > 2 ? x[8] : x[9];"""
    _, found = run(body, "2:1", "2:3", "2:6")
    shown = [set(stop.elements) for stop in found.stops]
    assert shown == [
        {"x[i]", "out[i]", "x[7 - i]", "x[8]"},
        {"x[i]", "out[i]", "x[i + 4]"},
        {"out[i]", "x[7 - i]", "x[9]"},
    ]


def test_what_cannot_be_shown_is_said() -> None:
    header = "struct pair { float a, b; };\ninline uint next(uint i) { return i + 1; }"
    body = """\
uint i = thread_position_in_grid.x;
pair both = {1, 2};
uint j = 0;
out[i] = x[next(i)] + x[j++] + both.a;"""
    _, found = run(body, "4", header=header)
    (stop,) = found.stops
    assert stop.variables["both"] is None
    assert "both  struct  a type of 8 bytes that is not shown" in stop.text
    assert "not shown: x[next(i)]: its index calls next" in stop.text
    assert "not shown: x[j++]: its index changes a variable" in stop.text
    assert list(stop.elements) == ["out[i]"]


def test_scopes() -> None:
    body = """\
uint i = thread_position_in_grid.x;
int n = 1;
{ int gone = 5; n += gone; }
for (int k = 0, m = 4; k < 1; ++k) {
  float n = 2.5;
  auto f = [&](int a) {
    return a + m;
  };
  if (int q = f(1); q > 0)
    out[i] = n + q;
  int later = 3;
  n += later;
}"""
    _, found = run(body, "7", "10")
    inside, after = (stop.variables for stop in found.stops)
    assert (inside["a"], inside["m"], inside["n"], "f" in inside) == (1, 4, 2.5, False)
    assert (after["n"], after["k"], after["m"], after["q"]) == (2.5, 0, 4, 5)
    assert not {"gone", "later"} & after.keys()


# -- where and who ---------------------------------------------------------------------------------


def test_the_first_thread_that_comes() -> None:
    body = (
        "uint i = thread_position_in_grid.x;\nif (i % 4 == 3)\n  out[i] = 1;\nelse\n  out[i] = 2;"
    )
    _, found = run(body, "3", "5@4")
    assert [(stop.line, stop.thread[0]) for stop in found.stops] == [(3, 3), (5, 4)]


def test_rounds_of_a_loop() -> None:
    _, found = run(LOOP, "5:2@3", "7:2")
    first, last = found.stops
    assert (first.variables["k"], first.variables["square"], first.variables["sum"]) == (2, 16, 13)
    assert last.variables["sum"] == 29


def test_each_stop_is_shown_once_in_each_kernel() -> None:
    kernels = [
        ferrule.metal_kernel(
            name=name, input_names=["x"], output_names=["out"],
            source="uint i = thread_position_in_grid.x;\nout[i] = x[i];",
        )
        for name in ("first", "second", "other")
    ]  # fmt: skip
    with ferrule.checking(stop_at=["2", "sec*:2:4@3", "third:2"]) as found:
        for kernel in (*kernels, *kernels, *kernels):
            kernel(
                inputs=[np.arange(8, dtype=np.float32)], grid=(8, 1, 1), threadgroup=(8, 1, 1),
                output_shapes=[(8,)], output_dtypes=[np.float32],
            )  # fmt: skip
    assert [(stop.kernel, stop.thread[0]) for stop in found.stops] == [
        ("first", 0), ("second", 0), ("other", 0), ("second", 4),
    ]  # fmt: skip
    assert found.notes == ["stop at 'third:2': no thread came there."]
    assert found.launches == 9


def test_helpers_templates_and_macros() -> None:
    header = """\
#define SQUARE(v) ((v) * (v))
template <typename U>
U helped(const device U* p, U scale) {
  U sum = 0;
  for (int j = 0; j < N_ROUNDS; ++j)
    sum += p[j] * scale;
  return sum;
}
template <int K> constexpr int more() {
  return K + 1;
}""".replace("N_ROUNDS", "2")
    body = """\
uint i = thread_position_in_grid.x;
#pragma unroll
for (int j = 0; j < N; ++j)
  out[i] = SQUARE(helped<T>(x + i, T(2))) + more<N>();
"""
    more: Any = {"header": header, "template": [("T", np.float32), ("N", 2)]}
    out, found = run(body, "header:6:3@2", "2:1", "header:10", **more)
    helped = next(stop for stop in found.stops if stop.where == "header")
    assert helped.variables == {"j": 1, "sum": 6, "scale": 2, "p": "x + 3"}
    assert helped.elements == {"p[j]": 4}
    at = next(stop for stop in found.stops if stop.where == "source")
    assert (at.line, at.variables) == (3, {"i": 1})
    assert "asked for line 2, which has no statement of its own" in at.text
    assert out[3] == (2 * 3 + 2 * 4) ** 2 + 3


def test_lines_without_a_statement() -> None:
    kernel = make_kernel(
        "lines", ["x"], ["out"],
        "uint i =\n  thread_position_in_grid.x;\n\n// nothing\nif (i <\n    5) {\n  out[i] = 1;\n} "
        "else\n{\n  out[i] = 2; }\n",
    )  # fmt: skip
    made = with_stops(kernel, {("source", line) for line in range(1, 12)}, every=False)
    meant = {line: at for (_, line), at in made.lines.items()}
    assert meant == {1: 1, 2: 1, 3: 5, 4: 5, 5: 5, 6: 7, 7: 7, 8: 10, 9: 10, 10: 10, 11: None}
    assert made.kernel.source.count("\n") == kernel.source.count("\n")


def test_no_such_line_and_no_such_thread() -> None:
    _, found = run(LOOP, "70", "2:8", "2:0,1,0")
    assert not found.stops
    assert found.notes == [
        "kernel 'stops': the body has no statement at line 70 or after it.",
        "stop at '70': no thread came there.",
        "stop at '2:8': no thread came there. The grid (8, 1, 1) does not have that thread.",
        "stop at '2:0,1,0': no thread came there. The grid (8, 1, 1) does not have that thread.",
    ]


def test_a_text_that_cannot_stop_runs_as_ever() -> None:
    body = """\
uint i = thread_position_in_grid.x;
constexpr auto more = [](int a) {
  return a + 1;
};
static_assert(more(2) == 3, "at compile time");
out[i] = more(2);"""
    out, found = run(body, "3")
    assert not found.stops and not found
    assert found.notes == [
        "kernel 'stops' does not compile with stops in its text, so nothing stops.",
        "stop at '3': no thread came there.",
    ]
    np.testing.assert_array_equal(out, [3] * 8)


sizes = st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 4))


@given(sizes, sizes, st.data())
def test_threads_are_found_by_position_and_by_number(grid: Any, group: Any, data: Any) -> None:
    group = tuple(min(pair) for pair in zip(grid, group, strict=True))
    launch = Launch(grid, group, (), None, ())
    x, y, z = (data.draw(st.integers(0, size - 1)) for size in grid)
    number = x + grid[0] * (y + grid[1] * z)
    places = [breaks.parse(f"7:{who}").place(launch) for who in (f"{x},{y},{z}", number)]
    assert places[0] is not None and places[0] == places[1]
    local, where = position(*places[0], launch)
    at = tuple(w * size + i for w, size, i in zip(where, group, local, strict=True))
    assert at == (x, y, z)


def test_a_thread_of_a_grid_with_three_axes() -> None:
    body = "uint3 p = thread_position_in_grid;\nif (p.z == 1)\n  out[p.x] = x[p.x + p.y];"
    _, found = run(body, "2:3,2,1", "2:38", grid=(5, 4, 2), group=(2, 3, 2))
    for stop in found.stops:
        np.testing.assert_array_equal(stop.variables["p"], stop.thread)
    assert {stop.thread for stop in found.stops} == {(3, 2, 1), (3, 3, 1)}


@pytest.mark.parametrize("text", ["", "x", "0", "7:", "7:a", "7:1,2", "7@0", "k:x:7", "-1", "7:1@"])
def test_what_is_no_line(text: str) -> None:
    with (
        pytest.raises(KernelError, match=r"expected \[KERNEL:\]\[header:\]LINE\[:THREAD\]\[@N\]"),
        ferrule.checking(stop_at=[text]),
    ):
        pass


def test_forms() -> None:
    parsed = breaks.parse("soft*:header:12:5,0,1@3")
    assert parsed[1:] == ("soft*", "header", 12, (5, 0, 1), 3)
    assert breaks.parse("header:4")[1:] == ("*", "header", 4, None, 1)
    assert breaks.parse("7:40")[1:] == ("*", "source", 7, (40,), 1)


# -- nothing else changes --------------------------------------------------------------------------


@pytest.mark.parametrize("math_mode", ["safe", "fast"])
def test_outputs_and_findings_stay(math_mode: str) -> None:
    kernel = ferrule.metal_kernel(
        name="sums", input_names=["x"], output_names=["out"], header="",
        source="""\
uint i = thread_position_in_grid.x;
threadgroup float t[32];
float unset;
t[i % 32] = x[i] * 1.1f + x[i + 1];
out[i] = t[(i + 1) % 32] * x[i] + 0.3f;
if (i == 70) out[i] += unset;""",
        compile_options={"math_mode": math_mode},
    )  # fmt: skip
    x = np.random.default_rng(0).normal(size=64).astype(np.float32)

    def launched(*stop_at: str) -> tuple[bytes, list[tuple[Any, ...]]]:
        with ferrule.checking(stop_at=stop_at) as found:
            (out,) = kernel(
                inputs=[x], grid=(64, 1, 1), threadgroup=(32, 1, 1), init_value=0,
                output_shapes=[(64,)], output_dtypes=[np.float32],
            )  # fmt: skip
        assert len(found.stops) == len(stop_at)
        return out.tobytes(), [(f.kind, f.line, f.column, f.count, f.message) for f in found]

    assert launched("4", "5:40", "6@9") == launched()


def test_atomic_outputs_are_added_to_once() -> None:
    kernel = ferrule.metal_kernel(
        name="adds", input_names=["x"], output_names=["out"], atomic_outputs=True,
        source="uint i = thread_position_in_grid.x;\n"
        "atomic_fetch_add_explicit(&out[i % 2], x[i], memory_order_relaxed);",
    )  # fmt: skip
    with ferrule.checking(stop_at=["2:5"]) as found:
        (out,) = kernel(
            inputs=[np.ones(8, np.float32)], grid=(8, 1, 1), threadgroup=(8, 1, 1), init_value=0,
            output_shapes=[(2,)], output_dtypes=[np.float32],
        )  # fmt: skip
    np.testing.assert_array_equal(out, [4, 4])
    assert found.stops[0].elements == {"out[i % 2]": 2, "x[i]": 1}


# -- at a terminal ---------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """Somebody who types these lines."""

    def isatty(self) -> bool:
        return True


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("".join(f"{line}\n" for line in lines)))


def test_next_line(monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, *["n"] * 5, "c", "c")
    out, found = run(LOOP, "2:5", "7:6")
    assert [(stop.line, stop.thread[0]) for stop in found.stops] == [
        (2, 5), (3, 5), (4, 5), (5, 5), (4, 5), (5, 5), (7, 6),
    ]  # fmt: skip
    np.testing.assert_array_equal(out, [i * i + (i + 1) ** 2 + (i + 2) ** 2 for i in range(8)])


def test_print(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    body = """\
uint i = thread_position_in_grid.x;
float a[2][2] = {{1, 2}, {3, 4}};
float2 v[2] = {float2(1, 2), float2(3, 4)};
const device float* p = x + 4;
thread float* q = &a[1][0];
out[i] = a[i % 2][0] + p[x_shape[0] - 16] + q[0] + v[1].x;"""
    outside = "outside of a, float[2][2]"
    asked = {
        "i": "2", "a": "{{1, 2}, {3, 4}}", "a[1]": "{3, 4}", "a[1][0]": "3", "a[i]": outside,
        "v[1]": "(3, 4)", "p": "x + 4", "p[i]": "6", "p[20]": "outside of x, 16 elements",
        "q": "a + 2", "q[1]": "4", "q[2]": outside, "x[i]": "2", "x_shape[0]": "16",
        "x": "{0, 1, 2, 3, 4, 5, 6, 7, … 8 more}", "out[2]": "not written yet",
        "nobody": "there is no variable 'nobody' here, nor an array of this name",
        "i + 1": "'i + 1' is neither a name nor NAME[INDEX]",
        "a[j]": "'j' is no number and no variable that is one",
    }  # fmt: skip
    typed(monkeypatch, *(f"p {text}" for text in asked), "what", "")
    run(body, "6:2")
    said = capsys.readouterr().err.partition("(ferrule) ")[2].split("(ferrule) ")
    assert [text.strip() for text in said[: len(asked)]] == list(asked.values())
    assert said[len(asked)].startswith("  c  ")


def test_quit(monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, "q")
    with pytest.raises(SystemExit):
        run(LOOP, "2", "3")


def test_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> str:
        raise KeyboardInterrupt

    typed(monkeypatch)
    monkeypatch.setattr(sys.stdin, "readline", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(LOOP, "2", "3")
