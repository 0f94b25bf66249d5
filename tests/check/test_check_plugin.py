"""The pytest plugin."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import stand_in
from ferrule.check import pytest_plugin
from ferrule.check.reports import baseline

pytest_plugins = ["pytester"]
PLUGIN = ("-p", "_ferrule_pytest", "-p", "no:cacheprovider", "-p", "no:xdist")
TESTS = """
    import pytest, stand_in

    def test_plain(): stand_in.found()

    @pytest.mark.ferrule_check
    def test_marked(): stand_in.found()

    @pytest.mark.ferrule_check(kinds=["nan"])
    def test_kinds(): stand_in.found()

    @pytest.mark.ferrule_check(ignore="race", kernels="soft*")
    def test_ignored(): stand_in.found(); stand_in.found("nan", "gather")
"""


@pytest.fixture(autouse=True)
def stood_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pytest_plugin, "checking", stand_in.checking)
    yield


def test_marker(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_inprocess(*PLUGIN, "--strict-markers")
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["*_ test_marked _*", "error[[]race]: kernel 'softmax', line 7"])
    result.stdout.no_fnmatch_line("*makereport*")


def test_options(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_inprocess(*PLUGIN, "--ferrule-check")
    result.assert_outcomes(passed=2, failed=2)
    for options in ("ignore=race", "kind=bounds", "kernel=other*"):
        result = pytester.runpytest_inprocess(
            *PLUGIN, "--ferrule-check", f"--ferrule-check-{options}", "-k", "plain"
        )
        result.assert_outcomes(passed=1, deselected=3)
    stand_in.asked.clear()
    pytester.runpytest_inprocess(*PLUGIN, "--ferrule-check", "--ferrule-check-sample=9")
    assert {asked["sample"] for asked in stand_in.asked} == {9}


def test_baseline(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TESTS)
    baseline.write(pytester.path / "known.json", [stand_in.finding()])
    options = ("--ferrule-check", "--ferrule-check-baseline=known.json")
    pytester.runpytest_inprocess(*PLUGIN, *options).assert_outcomes(passed=4)


def test_tests_that_fail_by_themselves(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest, stand_in, unittest

        def test_wrong():
            stand_in.found()
            assert 1 == 2

        @pytest.mark.xfail
        def test_expected(): stand_in.found()

        @pytest.mark.xfail(strict=True)
        def test_passes_unexpectedly(): stand_in.launch()

        def test_skipped():
            stand_in.found()
            pytest.skip("why")

        class Case(unittest.TestCase):
            def test_case(self): stand_in.found()
        """
    )
    result = pytester.runpytest_inprocess(*PLUGIN, "--ferrule-check")
    result.assert_outcomes(failed=3, xfailed=1, skipped=1)
    result.stdout.fnmatch_lines(["E *assert 1 == 2", "*ferrule check*", "error[[]race]*"])


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("kind=['race']", "*the marker ferrule_check was given kind; it takes kinds=, ignore=, *"),
        ("'race'", "*the marker ferrule_check was given 'race'; it takes kinds=, *"),
        ("kinds=['rave']", "*'rave' is no kind of finding. Did you mean 'race'?*"),
    ],
)
def test_wrong_markers(pytester: pytest.Pytester, marker: str, message: str) -> None:
    pytester.makepyfile(
        f"import pytest\n@pytest.mark.ferrule_check({marker})\ndef test_it(): pass\n"
    )
    result = pytester.runpytest_inprocess(*PLUGIN)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([message])


@pytest.mark.parametrize("options", [(), ("--ferrule-check-kind=race",)])
def test_it_is_cheap_where_it_is_not_used(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "test_it.py").write_text(
        "import sys\ndef test_it(): assert not {'ferrule', 'numpy', 'click'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *PLUGIN, "-c", "/dev/null", "-p", "no:hypothesispytest",
         *options, str(tmp_path)],
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
