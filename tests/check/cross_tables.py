"""The tables of docs/check_cross.md, from what `cross_check.py` and `cross_times.py` wrote.

python cross_tables.py results.jsonl times.jsonl
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from catalogue import BUGS, Planted
from cross_case import IMPOSSIBLE
from cross_check import TOOLS, reported
from ferrule.check.reports.findings import KINDS

_OUTCOME = re.compile(r'"outcome": "([^"]*)"')
_RESULT = re.compile(r"^RESULT (.*)$", re.M)
_HOST = "========= Host API memory access error"
_PLACE = re.compile(r"\.(source|header):(\d+)")
_KERNEL = re.compile(r"^========= (?:Invalid|(?:Error|Warning): Race|Uninit|Barrier)", re.M)

Records = dict[tuple[str, str, str], dict[str, Any]]


class Told(NamedTuple):
    """What a tool said of a bug.

    Attributes:
        said: whether it said anything.
        copied: only of the copy to the host, in which there is no kernel.
        places: the author's lines that it names.
        right: one of them is the bug's, if any is to blame.
    """

    said: bool
    copied: bool
    places: tuple[tuple[str, int], ...]
    right: bool

    def __str__(self) -> str:
        if not self.said:
            return "·"
        if self.copied:
            return "copy"
        numbers = sorted({f"h{n}" if where == "header" else str(n) for where, n in self.places})
        lines = ",".join(numbers[:3]) or "yes"
        return lines if self.right else f"({lines})"


def read(file: Path) -> Records:
    """What stands in a file, by tool, name and way; of processes of many, by each name."""
    records: Records = {}
    for record in map(json.loads, file.read_text().splitlines()):
        if len(record["names"]) == 1 or record["tool"] != "ferrule":
            for name in record["names"]:
                records.setdefault((record["tool"], name, record["how"]), record)
        for result in map(json.loads, _RESULT.findall(record["text"])):
            if record["tool"] == "ferrule":
                records["ferrule", result["name"], "alone"] = result
    return records


def told(records: Records, tool: str, planted: Planted) -> Told:
    """What a tool said of a bug; lines are also those of its stack of functions."""
    if tool == "ferrule":
        result = records[tool, planted.name, "alone"]
        places = tuple(("source", line) for _, line, _ in result["found"] if line)
        return Told(bool(result["found"]), False, places, result["told"])
    alone = records.get((tool, planted.name, "alone"))
    if alone is None:
        return Told(False, False, (), False)
    text = alone["text"] + records.get((tool, planted.name, "frames"), {}).get("text", "")
    places = tuple((where, int(n)) for where, n in _PLACE.findall(text))
    said, blamed = reported(text), planted.lines | planted.other_lines
    right = said and (not blamed or bool(set(places) & blamed))
    return Told(said, said and not _KERNEL.search(text), places, right)


def ended(records: Records, planted: Planted) -> str:
    """How the bug's launch ended without any tool."""
    record = records.get(("plain", planted.name, "alone"))
    if record is None or planted.name in IMPOSSIBLE:
        return "not run"
    if record["status"] is None:
        return "hung"
    found = _OUTCOME.search(record["text"])
    return found[1] if found and found[1] in ("right", "wrong") else "died"


def table(rows: Sequence[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def by_kind(records: Records) -> str:
    """How many bugs of each kind each tool found, and at the right line."""
    heads = ["kind", "bugs", "died", "hung", "wrong", "right", *TOOLS, "any of the four"]
    rows: list[list[object]] = [[*heads, "`ferrule check`"]]
    for kind in (*KINDS, "all"):
        bugs = [p for p in BUGS if kind in (p.kind, "all") and ended(records, p) != "not run"]
        ends = [ended(records, p) for p in bugs]
        row: list[object] = [f"`{kind}`" if kind in KINDS else "all", len(bugs)]
        row += [ends.count(end) for end in heads[2:6]]
        found = {tool: [told(records, tool, p) for p in bugs] for tool in (*TOOLS, "ferrule")}
        row += [counted(found[tool]) for tool in TOOLS]
        either = [[found[tool][i] for tool in TOOLS] for i in range(len(bugs))]
        said = [any(t.said for t in told_) for told_ in either]
        right = [any(t.right for t in told_) for told_ in either]
        row.append(f"{sum(said)} ({sum(right)})" if any(said) else "·")
        rows.append([*row, counted(found["ferrule"])])
    return table(rows)


def counted(found: Sequence[Told]) -> str:
    said = sum(t.said for t in found)
    return f"{said} ({sum(t.right for t in found)})" if said else "·"


def by_case(records: Records) -> str:
    """Who said what of each bug of which a tool of compute-sanitizer said something."""
    rows: list[list[object]] = [["bug", "alone", *TOOLS, "`ferrule check`"]]
    for planted in BUGS:
        said = [told(records, tool, planted) for tool in (*TOOLS, "ferrule")]
        if any(t.said for t in said[:-1]):
            rows.append([planted.name, ended(records, planted), *said])
    return table(rows)


def by_ferrule_alone(records: Records) -> str:
    """The other bugs by kind, and how each ended; in brackets what ferrule does not find either."""
    rows: list[list[object]] = [["kind", *(ends := ("right", "wrong", "hung"))]]
    for kind in KINDS:
        names: dict[str, list[str]] = {end: [] for end in (*ends, "died", "not run")}
        for planted in BUGS:
            said = [told(records, tool, planted).said for tool in TOOLS]
            if planted.kind == kind and not any(said):
                name = planted.name.removeprefix(f"{kind}_")
                found = told(records, "ferrule", planted).right
                names[ended(records, planted)].append(name if found else f"({name})")
        if any(names[end] for end in ends):
            rows.append([f"`{kind}`", *(", ".join(names[end]) for end in ends)])
    return table(rows)


def second_chances(records: Records) -> str:
    """What tools found at last, and how."""
    words = {
        "debug": "without optimisation",
        "padding": "`--padding 1024`",
        "deadlock": "`--racecheck-deadlock-timeout 5000`",
    }
    rows: list[list[object]] = [["bug", "found by", "with"]]
    for planted in BUGS:
        for tool, how in itertools.product(TOOLS, words):
            record = records.get((tool, planted.name, how))
            if record is not None and reported(record["text"]):
                rows.append([planted.name, tool, words[how]])
    return table(rows)


def twins(records: Records) -> str:
    """How many twins each tool said something of."""
    lines = []
    for tool in ("plain", *TOOLS, "ferrule"):
        names = [p.clean.name for p in BUGS if (tool, p.clean.name, "alone") in records]
        said = [
            name
            for name in names
            if (r := records[tool, name, "alone"]).get("found") or reported(r.get("text", ""))
        ]
        lines.append(f"{tool}: {len(names)} twins, {len(said)} reported {said}")
    return "\n".join(lines)


def times(file: Path) -> str:
    """How long kernels took, and how many times as long by each tool."""
    records: dict[str, dict[str, dict[str, float]]] = {}
    for record in map(json.loads, file.read_text().splitlines()):
        result = _RESULT.search(record["text"])
        tools = records.setdefault(record["work"], {})
        tools[record["tool"]] = json.loads(result[1]) if result else {}
    rows: list[list[object]] = [["kernel", "GPU", *TOOLS, "CPU", "bounds", "everything"]]
    for work, tools in records.items():
        plain, cpu = tools["plain"]["wall"], tools["ferrule"]
        row: list[object] = [work, f"{plain * 1e6:.0f} µs"]
        row += [f"{tools[tool]['wall'] / plain:.1f}×" for tool in TOOLS]
        row += [f"{cpu['unchecked'] * 1e6:.0f} µs"]
        row += [f"{cpu[way] / cpu['unchecked']:.0f}×" for way in ("bounds", "everything")]
        rows.append(row)
    return table(rows)


@click.command()
@click.argument("results", type=click.Path(path_type=Path))
@click.argument("timings", type=click.Path(path_type=Path))
def main(results: Path, timings: Path) -> None:
    """Print all tables."""
    records = read(results)
    for part in (by_kind, second_chances, twins, by_case, by_ferrule_alone):
        print(f"{part(records)}\n")
    print(times(timings))


if __name__ == "__main__":
    main()
