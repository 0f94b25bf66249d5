"""Every planted bug is found at its line, and nothing is found where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ferrule
from catalogue import BUGS, CLEAN, Case, Planted
from ferrule.check.launches import watched
from ferrule.check.reports.findings import KINDS, Finding

# Of each kind that a host has a say in: its arrays, its outputs, its graph.
ELSEWHERE = {
    "bounds_write_past_end",
    "bounds_strides_mixed_up",
    "race_missing_barrier",
    "uninitialised_output_added_to",
    "unwritten_second_output",
    "divergence_early_return",
    "lanes_thread_for_lane",
    "nan_log_of_zero",
    "arithmetic_divided_by_zero",
    "alias_const_cast",
}
CLEAN_ELSEWHERE = {
    "bins_of_threadgroups",
    "last_threadgroup_adds_up",
    "strided_view",
    "some_outputs_filled_before",
    "scalars_by_reference",
    "empty_grid",
}


def named(cases: Sequence[Any]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


def equal(given: Sequence[Any], expected: Sequence[Any]) -> None:
    """Compare arrays bit by bit."""
    assert [np.asarray(a).tobytes() for a in given] == [np.asarray(b).tobytes() for b in expected]


def told(finding: Finding, planted: Planted) -> bool:
    """Whether it blames a line of the bug; of a race, with the other one."""
    places, other = {(finding.where, finding.line)}, finding.other_line
    if finding.header_line is not None:
        places.add(("header", finding.header_line))
    if not planted.lines:
        return True
    if not planted.other_lines:
        return bool(places & planted.lines)
    pairs = [(planted.lines, planted.other_lines)]
    if planted.either:
        pairs.append((planted.other_lines, planted.lines))
    return any(places & one and other in {n for _, n in two} for one, two in pairs)


def shown(findings: Sequence[Finding]) -> str:
    return "\n".join(
        f"{f.kind} {f.where}:{f.line} (other {f.other_line}) x{f.count}: {f.message}"
        for f in findings
    )


def assert_found(planted: Planted, findings: Sequence[Finding]) -> None:
    """The bug is among the findings, as the author's text has it, and nothing foreign is."""
    bug = planted.bug
    found = [f for f in findings if f.kind == planted.kind and told(f, planted)]
    assert found, f"expected {planted.kind} at {planted.lines or 'any line'}:\n{shown(findings)}"
    foreign = [f for f in findings if f.kind not in {planted.kind, *planted.also}]
    assert not foreign, shown(foreign)
    texts = {"source": bug.source.splitlines(), "header": bug.header.splitlines()}
    for finding in findings:
        assert finding.kernel == bug.name
        assert finding.count >= 1 and finding.message and finding.hint
        if finding.line is not None:
            assert finding.text.strip() == texts[finding.where][finding.line - 1].strip()
    once = [(f.kind, f.where, f.line, f.other_line) for f in findings if f.line is not None]
    assert len(once) == len(set(once)), f"a line is told more than once:\n{shown(findings)}"


def checked(case: Case, kinds: Sequence[str] | None = None) -> tuple[Sequence[Finding], Any]:
    with ferrule.checking(kinds=kinds) as findings:
        given = case.run()
    return findings, given


@named(BUGS)
def test_bug_is_found_at_its_line(case: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    findings, _ = checked(case.bug)
    assert_found(case, findings)
    # Alone: a launch whose text shows that it stays inside is not watched.
    wanted = [f for f in findings if f.kind == "bounds"]
    assert shown(checked(case.bug, ["bounds"])[0]) == shown(wanted)
    # On several threads, as larger launches are.
    monkeypatch.setattr(watched, "_MANY_THREADS", 0)
    assert shown(checked(case.bug)[0]) == shown(findings)


@named([*(planted.clean for planted in BUGS), *CLEAN])
def test_nothing_is_found_in_what_is_right(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = case.run()
    for kinds, threads in ((None, 1 << 30), (None, 0), (["bounds"], 0)):
        monkeypatch.setattr(watched, "_MANY_THREADS", threads)
        findings, given = checked(case, kinds)
        assert not findings, shown(findings)
        equal(given, expected)


@named([*(planted.clean for planted in BUGS), *CLEAN])
def test_numpy_gives_the_same(case: Case) -> None:
    for given, wanted in zip(case.run(), case.wanted(), strict=True):
        expected = np.asarray(wanted, np.float64).reshape(given.shape)
        np.testing.assert_allclose(given.astype(np.float64), expected, rtol=1e-5, atol=1e-30)


def run_on(host: str, case: Case) -> list[np.ndarray]:
    """Run a kernel on arrays of another library; its outputs as NumPy's."""
    if host == "torch":
        library = pytest.importorskip("torch")
        arrays: dict[str, Any] = {n: moved(library, a) for n, a in case.inputs().items()}
        dtypes = [getattr(library, dtype.name) for dtype in case.output_dtypes]
        return [y.numpy() for y in case.run(arrays, output_dtypes=dtypes)]
    library = pytest.importorskip("mlx.core")
    arrays = {n: library.array(a) for n, a in case.inputs().items()}
    dtypes = [getattr(library, dtype.name) for dtype in case.output_dtypes]
    outputs = case.run(arrays, output_dtypes=dtypes)
    library.eval(outputs)
    return [np.array(y) for y in outputs]


def moved(torch: Any, array: np.ndarray) -> Any:
    """A tensor with the strides of a NumPy array."""
    root = array if array.base is None else array.base
    if isinstance(root, np.ndarray) and root.ndim and array.ndim and root.size:
        strides = [step // array.itemsize for step in array.strides]
        offset = array.__array_interface__["data"][0] - root.__array_interface__["data"][0]
        flat = torch.from_numpy(np.ascontiguousarray(root).ravel())
        return flat.as_strided(array.shape, strides, offset // array.itemsize)
    return torch.tensor(array)


@pytest.mark.parametrize("host", ["torch", "mlx"])
@named([planted for planted in BUGS if planted.name in ELSEWHERE])
def test_bug_is_found_in_arrays_of_others(case: Planted, host: str) -> None:
    with ferrule.checking() as findings:
        run_on(host, case.bug)
    assert_found(case, findings)


@pytest.mark.parametrize("host", ["torch", "mlx"])
@named([case for case in CLEAN if case.name in CLEAN_ELSEWHERE])
def test_nothing_is_found_in_arrays_of_others(case: Case, host: str) -> None:
    expected = run_on(host, case)
    with ferrule.checking() as findings:
        given = run_on(host, case)
    assert not findings, shown(findings)
    equal(given, expected)


@pytest.mark.parametrize("host", ["torch", "mlx"])
@named([case for case in CLEAN if case.name in CLEAN_ELSEWHERE])
def test_others_give_the_same(case: Case, host: str) -> None:
    equal(run_on(host, case), case.run())


def test_every_kind_is_there_and_every_bug_has_a_line() -> None:
    names = [planted.name for planted in BUGS] + [case.name for case in CLEAN]
    assert len(names) == len(set(names))
    assert set(names) >= ELSEWHERE | CLEAN_ELSEWHERE
    for kind in KINDS:
        assert sum(planted.kind == kind for planted in BUGS) >= 5, kind
    for planted in BUGS:
        assert planted.also < set(KINDS) - {planted.kind}
        assert bool(planted.lines) == (planted.kind not in {"unwritten", "coverage"}), planted.name
        assert planted.clean != planted.bug
        assert "// BUG" not in planted.clean.source + planted.clean.header


def test_the_judge_can_say_no() -> None:
    race = next(planted for planted in BUGS if planted.name == "race_missing_barrier")
    lines = race.bug.source.splitlines()
    good = Finding("race", race.name, 5, lines[4], None, None, "two", "a barrier", other_line=4)
    stray = Finding("lanes", race.name, 5, lines[4], None, None, "no lane", "a guard")
    assert_found(race, [good])
    for findings in (
        [],
        [stray],
        [good, stray],
        [good, good],
        [replace(good, line=4, text=lines[3])],
        [replace(good, other_line=3)],
        [replace(good, where="header")],
        [replace(good, text=lines[3])],
        [replace(good, kernel="another")],
    ):
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            assert_found(race, findings)
    loop = next(p for p in BUGS if p.name == "race_loop_without_barrier_at_its_end")
    assert loop.either
    assert told(replace(good, line=5, other_line=7), loop)
    assert told(replace(good, line=7, other_line=5), loop)
