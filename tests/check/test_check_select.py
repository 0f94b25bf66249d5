"""Findings are selected by kind, kernel and comments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ferrule
import stand_in
from ferrule.check.reports.findings import KINDS
from ferrule.check.reports.select import ALL, is_suppressed, selection, suppressed, unsuppressed
from ferrule.errors import DialectError, KernelError


def test_selection() -> None:
    found = [stand_in.finding(kind, name) for kind in ("race", "nan") for name in ("ab", "b")]
    assert selection().of(found) == found
    assert selection(kinds=["race"], kernels=["a*"]).of(found) == [found[0]]
    assert selection(ignore=["race"], kernels=["*b", "c"]).of(found) == found[2:]
    assert selection(kinds="race").kinds == {"race"}
    with pytest.raises(KernelError) as error:
        selection(kinds=["races"])
    assert str(error.value) == (
        "'races' is no kind of finding. Did you mean 'race'? The kinds are bounds, race, "
        "uninitialised, unwritten, divergence, lanes, nan, arithmetic, alias, coverage."
    )
    with pytest.raises(KernelError, match="every kind that is checked is ignored, too: race"):
        selection(kinds=["race"], ignore=["race"])


BODY = """\
uint i = 0; // ferrule: ignore
a[i] = 1;   // ferrule: ignore[race, bounds] one writer
// ferrule: ignore[nan] both inputs are finite

// by the caller's promise
b[i] = a[i] / c[i]; //ferrule:ignore[ arithmetic ]
string s = "// ferrule: ignore";
/* // ferrule: ignore
*/ c[i] = 2; // see ferrule: ignore
d[i] = '"'; // ferrule: ignore[lanes] "
"""


def test_comments() -> None:
    lines = suppressed(BODY, kernel="k")
    assert lines == {
        1: ALL, 2: {"race", "bounds"}, 6: {"nan", "arithmetic"}, 10: {"lanes"},
    }  # fmt: skip
    assert suppressed(BODY.replace("\n", "\r\n"), kernel="k") == lines
    assert is_suppressed(stand_in.finding("race", line=2), lines)
    assert is_suppressed(stand_in.finding("race", line=4, other_line=2), lines)
    assert not is_suppressed(stand_in.finding("nan", line=2), lines)
    assert not is_suppressed(stand_in.finding("bounds", line=4, other_line=2), lines)
    assert not is_suppressed(stand_in.finding("unwritten", line=None), lines)


def test_comments_of_a_kernel() -> None:
    kernel = ferrule.metal_kernel(
        "k", ["a"], ["b"], "b[0] = a[0];\nb[1] = a[1];  // ferrule: ignore[bounds]",
        header="// ferrule: ignore[race]\nint f() { return 1; }",
    ).kernel  # fmt: skip
    found = [
        stand_in.finding(kind, line=line, where=where)
        for kind in ("bounds", "race") for line in (1, 2) for where in ("source", "header")
    ]  # fmt: skip
    left = [(f.kind, f.line, f.where) for f in unsuppressed(kernel, found)]
    assert len(left) == 6
    assert ("bounds", 2, "source") not in left and ("race", 2, "header") not in left


@pytest.mark.parametrize(
    ("comment", "message"),
    [
        (
            "ignore[race, bound]",
            "kernel 'k', header line 2: ferrule: ignore[race, bound]: 'bound' is no kind of "
            "finding. Did you mean 'bounds'? The kinds are bounds, ",
        ),
        ("ignore[]", "kernel 'k', header line 2: ferrule: ignore[]: '' is no kind of finding. "),
        (
            "ignore(race)",
            "kernel 'k', header line 2: `ferrule: ignore(race)` is not understood; write // "
            "ferrule: ignore, or // ferrule: ignore[race, bounds], and then the reason.",
        ),
        ("ignore[race", "kernel 'k', header line 2: `ferrule: ignore[race` is not understood; "),
        ("ignored", "kernel 'k', header line 2: `ferrule: ignored` is not understood; "),
    ],
)
def test_wrong_comments(comment: str, message: str) -> None:
    with pytest.raises(DialectError) as error:
        suppressed(f"int a;\nint b; // ferrule: {comment}\n", kernel="k", where="header")
    assert str(error.value).startswith(message)
    assert (error.value.line, error.value.where) == (2, "header")


@given(st.lists(st.sampled_from(KINDS), min_size=1), st.text(), st.integers(0, 5))
def test_any_reason_is_fine(kinds: list[str], reason: str, before: int) -> None:
    reason = reason.replace("\n", " ").replace("\\", "")
    body = "int a;\n" * before + f"b; // ferrule: ignore[{','.join(kinds)}] {reason}\n"
    assert suppressed(body, kernel="k") == {before + 1: set(kinds)}
