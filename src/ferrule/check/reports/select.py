"""Which findings are wanted: by kind, by kernel, and by comments in the author's text."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

from ...errors import DialectError, KernelError
from ...kernel import Kernel
from .findings import KINDS, Finding

ALL = frozenset(KINDS)


@dataclass(frozen=True)
class Selection:
    """The kinds and kernels whose findings are wanted.

    Attributes:
        kinds: the kinds.
        kernels: patterns as a shell's, of which a kernel's name must match one; none: all kernels.
    """

    kinds: frozenset[str] = ALL
    kernels: tuple[str, ...] = ()

    def names(self, kernel: str) -> bool:
        """Whether findings in this kernel are wanted, of whatever kind."""
        return not self.kernels or any(fnmatchcase(kernel, glob) for glob in self.kernels)

    def takes(self, kernel: str, kind: str) -> bool:
        """Whether findings of this kind in this kernel are wanted."""
        return kind in self.kinds and self.names(kernel)

    def of(self, findings: Iterable[Finding]) -> list[Finding]:
        """Those findings that are wanted."""
        return [finding for finding in findings if self.takes(finding.kernel, finding.kind)]


def selection(
    kinds: Iterable[str] | None = None,
    ignore: Iterable[str] | None = None,
    kernels: Iterable[str] | None = None,
) -> Selection:
    """Select findings.

    Args:
        kinds: the kinds that are wanted; None or none: all.
        ignore: kinds that are not.
        kernels: patterns of kernels' names; None or none: all.

    Raises:
        KernelError: there is no such kind, or no kind is left.
    """
    wanted = frozenset(_known(kind) for kind in _listed(kinds)) or ALL
    left = wanted - {_known(kind) for kind in _listed(ignore)}
    if not left:
        raise KernelError(
            f"every kind that is checked is ignored, too: {', '.join(sorted(wanted))}; "
            "leave one of them."
        )
    return Selection(left, tuple(_listed(kernels)))


def _listed(names: Iterable[str] | None) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())


def _known(kind: str) -> str:
    if kind not in ALL:
        raise KernelError(_unknown(kind))
    return kind


def _unknown(kind: str) -> str:
    near = difflib.get_close_matches(kind, KINDS, 1)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    return f"{kind!r} is no kind of finding.{meant} The kinds are {', '.join(KINDS)}."


# -- comments ------------------------------------------------------------------------------------

# Comments, and what only looks like one.
_PARTS = re.compile(
    r"""(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)+')
      | (?P<block>/\*.*?(?:\*/|\Z))
      | (?P<comment>//(?:[^\n\\]|\\.|\\\n)*)""",
    re.VERBOSE | re.DOTALL,
)
_IGNORE = re.compile(r"//+\s*ferrule:\s*ignore(?P<rest>.*)", re.DOTALL)
_KINDS = re.compile(r"(?:\[(?P<kinds>[^\[\]]*)\])?(?:\s.*)?", re.DOTALL)
_FORMS = "write // ferrule: ignore, or // ferrule: ignore[race, bounds], and then the reason"

Suppressed = Mapping[int, frozenset[str]]


def suppressed(text: str, *, kernel: str, where: str = "source") -> dict[int, frozenset[str]]:
    """What comments of a text suppress: for each line that has one, the kinds.

    A comment ``// ferrule: ignore`` or ``// ferrule: ignore[race, bounds] reason`` counts for its
    line; one that stands alone, for the next line with code.

    Args:
        text: the author's body or header.
        kernel, where: its kernel, and which of its texts it is; for errors.

    Raises:
        DialectError: a comment is not written so, or names an unknown kind.
    """
    if "ferrule:" not in text:
        return {}
    text = text.replace("\r\n", "\n")
    found: dict[int, frozenset[str]] = {}
    for match in _PARTS.finditer(text):
        ignored = _IGNORE.fullmatch(match["comment"] or "")
        if ignored is not None:
            line = text.count("\n", 0, match.start()) + 1
            kinds = _ignored(ignored["rest"], kernel, where, line)
            found[line] = found.get(line, frozenset()) | kinds
    return _moved(found, _code(text)) if found else {}


def _ignored(rest: str, kernel: str, where: str, line: int) -> frozenset[str]:
    """The kinds that a comment names after its word ``ignore``: all, if it names none."""
    form = _KINDS.fullmatch(rest)
    if form is None:
        problem = f"`ferrule: ignore{rest.rstrip()}` is not understood; {_FORMS}."
        raise DialectError.at(kernel, where, line, "ferrule: ignore", problem)
    if form["kinds"] is None:
        return ALL
    kinds = frozenset(name.strip() for name in form["kinds"].split(","))
    for kind in sorted(kinds - ALL):
        problem = f"ferrule: ignore[{form['kinds']}]: {_unknown(kind)}"
        raise DialectError.at(kernel, where, line, "ferrule: ignore", problem)
    return kinds


def _code(text: str) -> list[str]:
    """The lines without comments."""

    def blank(match: re.Match[str]) -> str:
        return match[0] if match["string"] is not None else "\n" * match[0].count("\n")

    return _PARTS.sub(blank, text).split("\n")


def _moved(found: dict[int, frozenset[str]], code: list[str]) -> dict[int, frozenset[str]]:
    """The same for lines of code: of comments that stand alone, for the next that there is."""
    moved: dict[int, frozenset[str]] = {}
    for line, kinds in found.items():
        at = line
        while at < len(code) and not code[at - 1].strip():
            at += 1
        moved[at] = moved.get(at, frozenset()) | kinds
    return moved


def is_suppressed(finding: Finding, lines: Suppressed) -> bool:
    """Whether a comment suppresses a finding: on its line or, of a race, on the other one.

    Args:
        finding: the finding.
        lines: what `suppressed` gives for the text that the finding is in.
    """
    places = [finding.line, finding.other_line if finding.kind == "race" else None]
    return any(finding.kind in lines.get(place, ()) for place in places if place is not None)


def unsuppressed(kernel: Kernel, findings: Iterable[Finding]) -> list[Finding]:
    """Those findings in a kernel that its comments do not suppress.

    Raises:
        DialectError: as `suppressed` does.
    """
    lines = _of_kernel(kernel)
    return [finding for finding in findings if not is_suppressed(finding, lines[finding.where])]


@lru_cache(256)
def _of_kernel(kernel: Kernel) -> dict[str, dict[int, frozenset[str]]]:
    texts = {"source": kernel.source, "header": kernel.header}
    return {
        where: suppressed(text, kernel=kernel.name, where=where) for where, text in texts.items()
    }
