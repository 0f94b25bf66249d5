"""Small calls, tried one by one: what their threads access, without a solver."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ... import dtypes
from ...errors import FerruleError
from ...source.accesses import terms
from ...source.accesses.evaluation import NoValue, evaluate
from ...source.accesses.model import Access, Loop
from ...source.accesses.terms import Term
from .calls import Call

Values = dict[Any, int]
_MOST_THREADS = 1100
_MOST_CALLS = 300
_SMALL = (0, 1, 2, 3, 4, 5)
_NUMBERS = (0, 1, 2, 3, -1)


class Fault(NamedTuple):
    """A call that goes wrong.

    Attributes:
        line: of the body; None where no line is to blame.
        where: ``"source"`` or ``"header"``.
        message: what goes wrong.
        values: what the call gives, by the names of symbols.
    """

    line: int | None
    where: str
    message: str
    values: Values


class Search:
    """Tries small calls.

    Args:
        call: any call.
        effort: how many accesses are looked at.

    Attributes:
        faults: by property: the first that was found, in the smallest call.
        tried: how many calls the rule allows of those that were tried.
    """

    def __init__(self, call: Call, effort: int = 60_000) -> None:
        self.call, self.effort = call, effort
        self.faults: dict[str, Fault] = {}
        self.tried = 0
        found = call.found
        self.arrays = sorted({
            (leaf.value, leaf.low, leaf.high)
            for a in found.accesses
            for t in (a.element, *a.path)
            for leaf in t.leaves
            if leaf.op == "data"
        }, key=str)  # fmt: skip

    def run(self) -> dict[str, Fault]:
        """Try calls, the smallest first."""
        if self.call.found.unsupported:
            return {}
        for values in itertools.islice(self.calls(), _MOST_CALLS):
            if self.effort <= 0 or len(self.faults) == 3:
                break
            self.tried += 1
            try:
                self._try(values)
            except NoValue:
                continue
        return self.faults

    # -- which calls -------------------------------------------------------------------------------

    def calls(self) -> Iterator[Values]:
        """The calls that the rule allows, the smallest first."""
        names = [d for d in self.call.domains if d.kind in ("dim", "number", "device")]
        flags = [d for d in self.call.domains if d.kind == "flag"]
        special = self._special()
        choices = []
        for domain in names:
            few: tuple[int, ...] = _NUMBERS if domain.kind == "number" else _SMALL
            if domain.kind == "device":
                few = (1, 8, 132)
            extra = special if len(names) <= 3 else special[:6]
            low = -(1 << 63) if domain.term.low is None else domain.term.low
            choices.append(sorted({v for v in (*few, *extra) if v >= low}, key=abs))
        ranges = [range(len(c)) for c in choices]
        picks = _by_sum(ranges, 30_000)
        sizes = sorted(
            ([c[i] for c, i in zip(choices, pick, strict=True)] for pick in picks),
            key=lambda s: sum(map(abs, s)),
        )
        kinds = list(self._kinds())
        switches = list(itertools.product((1, 0), repeat=len(flags)))
        for size in sizes:
            for switch in switches:
                values: Values = {d.name: v for d, v in zip(names, size, strict=True)}
                values |= {d.name: v for d, v in zip(flags, switch, strict=True)}
                for kind in kinds:
                    whole = {**values, **kind, **self.call.ranks}
                    if self.allowed(whole):
                        yield whole
                        break

    def _special(self) -> list[int]:
        """Sizes near the numbers that the op names."""
        call = self.call
        numbers: set[int] = set()
        for term in terms.subterms(*call.facts, *call.grid, *call.group, *call.lengths.values(),
                                   *(a.element for a in call.found.accesses),
                                   *(c for a in call.found.accesses for c in a.path)):  # fmt: skip
            if term.op == "const" and type(term.value) is int and 1 < abs(term.value) <= 4096:
                n = abs(term.value)
                numbers |= {n - 1, n, n + 1, 2 * n}
        return sorted(numbers)

    def _kinds(self) -> Iterator[Values]:
        """What dtypes and devices may be."""
        names = {
            str(leaf.value)
            for t in (*self.call.facts, *self.call.grid, *self.call.group,
                      *self.call.lengths.values(),
                      *(x for a in self.call.found.accesses for x in (a.element, *a.path)))
            for leaf in t.leaves
            if leaf.op == "symbol"
        }  # fmt: skip
        asked: dict[str, list[str]] = {}
        for name in sorted(names):
            if match := re.fullmatch(r"(\w+) is (\w+)", name):
                asked.setdefault(match[1], []).append(match[2])
        options = []
        for variable, values in asked.items():
            allowed = list(self.call.choices.get(variable, ())) or [*values, "another"]
            options.append([(variable, a, values) for a in allowed])
        for chosen in itertools.product(*options):
            yield {f"{v} is {n}": int(n == a) for v, a, values in chosen for n in values}

    def allowed(self, values: Values) -> bool:
        """Whether a call with these values is launched."""
        try:
            return all(evaluate(fact, values) for fact in self.call.facts)
        except NoValue:
            return False

    # -- one call ----------------------------------------------------------------------------------

    def _try(self, values: Values) -> None:
        threads = list(itertools.islice(self.threads(values), _MOST_THREADS + 1))
        if len(threads) > _MOST_THREADS:
            return
        fills: list[Values] = [{}]
        if self.arrays:
            fills = [self._fill(n) for n in range(4)]
        for fill in fills:
            self._launch({**values, **fill}, threads)

    def _fill(self, n: int) -> Values:
        """What arrays of integers hold."""
        filled: Values = {}
        for name, low, high in self.arrays:
            ends = (0, 1, low if low is not None else 0, high if high is not None else 1)
            filled[name] = int(ends[n])
        return filled

    def threads(self, values: Values) -> Iterator[Values]:
        """The threads of a launch: the values of what tells them apart."""
        call = self.call
        axes: list[list[Values]] = []
        for i, symbols in enumerate(call.threads):
            grid = evaluate(call.grid[i], values)
            if not symbols:
                axes.append([{}] * grid)
            elif len(symbols) == 1:
                axes.append([{symbols[0].value: p} for p in range(min(grid, _MOST_THREADS + 1))])
            else:
                group = max(evaluate(call.group[i], values), 1)
                axes.append([
                    {symbols[0].value: p // group, symbols[1].value: p % group}
                    for p in range(min(grid, _MOST_THREADS + 1))
                ])  # fmt: skip
        for z, y, x in itertools.product(*axes[::-1]):
            yield {**x, **y, **z}

    def _launch(self, values: Values, threads: list[Values]) -> None:
        call = self.call
        lengths = {name: evaluate(n, values) for name, n in call.lengths.items()}
        written: dict[str, set[int]] = {o.name: set() for o in call.rule.outputs}
        met: dict[Any, list[tuple[Any, ...]]] = {}
        for t, thread in enumerate(threads):
            own = {**values, **thread}
            made: dict[Term, int] = {}
            if self._broken(own, values, made):
                return  # what it does then is not defined
            for access in call.found.accesses:
                if not access.exact:
                    continue
                for inner in rounds(access.loops, own):
                    self.effort -= 1
                    if self.effort <= 0:
                        return
                    known = made if inner is own else {}
                    try:
                        if not all(evaluate(c, inner, known) for c in access.path):
                            continue
                        element = evaluate(access.element, inner, known)
                    except NoValue:
                        return
                    self._bounds(access, element, inner, values, lengths, known)
                    self._races(access, element, t, inner, values, met, known)
                    if access.mode == "write" and access.array.name in written:
                        written[access.array.name].update(range(element, element + access.width))
        self._coverage(values, lengths, written)

    def _broken(self, own: Values, values: Values, made: dict[Term, int]) -> bool:
        """Whether a thread computes what is not defined."""
        for o in self.call.found.obligations:
            if not all(c.is_exact for c in (o.term, *o.path)):
                continue
            for inner in rounds(o.loops, own):
                self.effort -= 1
                known = made if inner is own else {}
                try:
                    if not all(evaluate(c, inner, known) for c in o.path):
                        continue
                    value = evaluate(o.term, inner, known)
                except NoValue:
                    return True
                fault = broken(o, value)
                if fault is not None:
                    words = f"{fault}, in {self._thread(own)}"
                    if o.what != "wrap":
                        self._found("bounds", o.line, o.where, words, values)
                    return True
        return False

    def _bounds(
        self, access: Access, element: int, inner: Values, values: Values,
        lengths: Mapping[str, int], known: dict[Term, int],
    ) -> None:  # fmt: skip
        if "bounds" in self.faults:
            return
        length = access.array.length
        size = lengths[access.array.name] if length is None else evaluate(length, inner, known)
        if element < 0 or element + access.width > size:
            what = out_of_bounds(access, element, size)
            self._found("bounds", access.line, access.where, f"{what}, in {self._thread(inner)}",
                        values)  # fmt: skip

    def _races(
        self, access: Access, element: int, thread: int, inner: Values, values: Values,
        met: dict[Any, list[tuple[Any, ...]]], known: dict[Term, int],
    ) -> None:  # fmt: skip
        space = access.array.space
        if "races" in self.faults or space not in ("device", "threadgroup"):
            return
        if space == "device" and access.array.name not in self.call.body.kernel.output_names:
            return
        group = tuple(evaluate(w, inner, known) for w in self.call.where)
        times = tuple(evaluate(t, inner, known) for t in access.times)
        order, simd_order = times[::2] if space == "threadgroup" else times[1::2]
        simd = evaluate(self.call.simdgroup, inner, known)
        mine = (thread, access, group, order, simd, simd_order)
        key = (access.array, group) if space == "threadgroup" else access.array
        for at in range(element, element + access.width):
            others = met.setdefault((key, at), [])
            for other, earlier, its_group, its_order, its_simd, its_simd_order in others:
                if other == thread or (access.mode == earlier.mode != "write"):
                    continue
                if its_group == group and (
                    its_order != order or (its_simd == simd and its_simd_order != simd_order)
                ):
                    continue
                first, second = sorted((earlier, access), key=lambda a: a.line)
                self._found("races", second.line, second.where, (
                    f"two threads meet at element {at} of {access.array.name}: one "
                    f"{_does(first)} in line {first.line}, one {_does(second)} in line "
                    f"{second.line}"
                ), values)  # fmt: skip
                return
            if len(others) < 8 or access.mode == "write":
                others.append(mine)

    def _coverage(
        self, values: Values, lengths: Mapping[str, int], written: Mapping[str, set[int]]
    ) -> None:
        if "coverage" in self.faults or self.call.body.fill is not None:
            return
        for name, elements in written.items():
            writes = [a for a in self.call.found.accesses
                      if a.array.name == name and a.array.space == "device"
                      and a.mode != "read"]  # fmt: skip
            if any(not a.exact for a in writes):
                continue
            missing = [i for i in range(min(lengths[name], 100_000)) if i not in elements]
            if missing:
                line = writes[0].line if writes else None
                what = f"{len(missing)} of the {lengths[name]} elements of {name} are never written"
                self._found("coverage", line, writes[0].where if writes else "source",
                            f"{what}, first {missing[0]}", values)  # fmt: skip
                return

    def _found(self, what: str, line: int | None, where: str, message: str, values: Values) -> None:
        self.faults.setdefault(what, Fault(line, where, message, dict(values)))

    def _thread(self, inner: Values) -> str:
        return thread_words(self.call, inner)


def thread_words(call: Call, values: Mapping[Any, int]) -> str:
    """How messages call a thread."""
    position = [0, 0, 0]
    for i, symbols in enumerate(call.threads):
        if len(symbols) == 1:
            position[i] = values[symbols[0].value]
        elif symbols:
            group = evaluate(call.group[i], values)
            position[i] = group * values[symbols[0].value] + values[symbols[1].value]
    return f"thread {tuple(position)}"


def rounds(loops: tuple[Loop, ...], values: Values) -> Iterator[Values]:
    """The values in each round of loops."""
    if not loops:
        yield values
        return
    first, rest = loops[0], loops[1:]
    for n in range(5000):
        inner = {**values, first.counter: n}
        try:
            if not evaluate(first.holds, inner):
                return
        except NoValue:
            return
        yield from rounds(rest, inner)
        if first.holds is terms.TRUE:
            return


def broken(o: Any, value: int) -> str | None:
    """What is wrong where an obligation is not kept."""
    if o.what == "division":
        return "a division by zero" if value == 0 else None
    if o.kind.least <= value <= o.kind.most:
        return None
    return f"overflow of {o.kind.name}, which would be {value}"


def out_of_bounds(access: Access, element: int, size: int) -> str:
    """What is wrong with an access outside of its array."""
    last = element + access.width - 1
    shown = str(element) if access.width == 1 else f"{element} to {last}"
    plural = "element" if access.width == 1 else "elements"
    return f"a {access.mode} of {plural} {shown} of {access.array.name}, which has {size}"


def _does(access: Access) -> str:
    return {"read": "reads", "write": "writes", "atomic": "updates it"}[access.mode]


def _by_sum(ranges: list[range], most: int) -> list[tuple[int, ...]]:
    """Picks of one of each, those that are small together first, and no more than so many."""
    picks: list[tuple[int, ...]] = []
    top = sum(r.stop - 1 for r in ranges)
    for total in range(top + 1):
        picks += _with_sum(ranges, total)
        if len(picks) > most:
            break
    return picks[:most]


def _with_sum(ranges: list[range], total: int) -> list[tuple[int, ...]]:
    if not ranges:
        return [()] if total == 0 else []
    first, rest = ranges[0], ranges[1:]
    return [
        (i, *others)
        for i in range(min(first.stop - 1, total) + 1)
        for others in _with_sum(rest, total - i)
    ]


# -- as a call of Python ---------------------------------------------------------------------------


def call_text(call: Call, op: str, values: Mapping[Any, int]) -> str:
    """A call with these values, as Python."""
    parts = []
    for argument in call.rule.inputs:
        if argument.optional and not values.get(f"has_{argument.name}", 1):
            parts.append("None")
        elif argument.dims is None:
            value = values.get(argument.name, 1)
            parts.append(str(bool(value)) if argument.dtype == "bool" else str(value))
        else:
            shape = shape_of(call, argument.name, values)
            dtype = dtype_of(call, argument.dtype, values)
            module = "ml_dtypes" if dtype in ("bfloat16", *map(str, _FLOAT8)) else "np"
            kind = f"{module}.{dtype}" if dtype != "bool" else "bool"
            shown = f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"
            fill = values.get(argument.name)
            made = f"np.zeros({shown}, {kind})"
            parts.append(made if not fill else f"np.full({shown}, {fill}, {kind})")
    return f"{op}({', '.join(parts)})"


_FLOAT8 = tuple(d.name for d in dtypes.FLOAT8)


def shape_of(call: Call, name: str, values: Mapping[Any, int]) -> tuple[int, ...]:
    """An array's shape in a call; ``*S`` is one dim."""
    return tuple(evaluate(size, values) for size in call.shapes[name])


def dtype_of(call: Call, declared: str, values: Mapping[Any, int]) -> str:
    """The name of an array's dtype in a call."""
    if declared in dtypes.BY_NAME:
        return declared
    for name in call.choices.get(declared, ()):
        if values.get(f"{declared} is {name}"):
            return name
    named = [n for n in dtypes.BY_NAME if values.get(f"{declared} is {n}")]
    if named:
        return named[0]
    allowed = call.choices.get(declared) or ("float32",)
    free = [n for n in allowed if f"{declared} is {n}" not in values]
    return "float32" if "float32" in free else (free or list(allowed))[0]


def confirmed(call: Call, op: str, values: Mapping[Any, int]) -> bool:
    """Whether ferrule itself launches a call with these values, over the grid that is expected."""
    rule = call.rule
    shapes: list[Any] = []
    kinds: list[str | None] = []
    for argument in rule.inputs:
        absent = argument.optional and not values.get(f"has_{argument.name}", 1)
        if argument.dims is None or absent:
            shapes.append(() if argument.dims is None else None)
            kinds.append(None)
        else:
            shapes.append(shape_of(call, argument.name, values))
            kinds.append(dtype_of(call, argument.dtype, values))
    numbers = {name: values.get(name, 1) for name in rule.numbers}
    device: dict[str, Any] = {n: values[n] for n in ("sm_count", "capability", "memory_bus")
                              if n in values}  # fmt: skip
    for name in ("cpu", "cuda", "metal"):
        if values.get(f"device is {name}", 0):
            device[":device"] = name
    device.setdefault(":device", next(
        (n for n in ("cpu", "cuda", "metal") if values.get(f"device is {n}", 1)), "cpu"
    ))  # fmt: skip
    try:
        binding = rule.bind(op, shapes, kinds, numbers=numbers).on(lambda: device)
        rule.results(op, binding)
        launch = call.body.launch_for(binding)
    except FerruleError:
        return False
    return list(launch.grid) == [evaluate(g, values) for g in call.grid]
