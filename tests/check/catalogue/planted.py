"""What a planted bug is, with its mended twin; what is right and looks wrong; and how they run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

import ferrule

Inputs = Callable[[], dict[str, Any]]

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
RELAXED = "memory_order_relaxed"

_OUTPUT = re.compile(r"(\w+):(\w+)\[([\d,]*)\]")
_MARK = re.compile(r" *// (?:BUG|OTHER)$", re.MULTILINE)


def ramp(*shape: int, dtype: str = "float32", start: int = 0) -> np.ndarray:
    """Whole numbers from ``start`` on: all different, and sums of them are exact."""
    size = int(np.prod(shape))
    return np.arange(start, start + size).astype(numpy_dtype(dtype)).reshape(shape)


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal float32 numbers, the same each time."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def before(x: np.ndarray, first: float = 0) -> np.ndarray:
    """The element before each, and ``first`` before the first."""
    return np.concatenate([[first], x[:-1]]).astype(x.dtype)


def after(x: np.ndarray, last: float = 0) -> np.ndarray:
    """The element after each, and ``last`` after the last."""
    return np.concatenate([x[1:], [last]]).astype(x.dtype)


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


@dataclass(frozen=True)
class Case:
    """A kernel, or an op, and one launch of it.

    Attributes:
        inputs: gives NumPy arrays by name, new ones with each call.
        outputs: as ``"y:float32[8,8]; n:uint32[1]"``; of an op the rule says it.
        want: the outputs as NumPy has them, of the inputs by name; None where nobody knows.
        rule: makes it an op; then ``grid`` and ``threadgroup`` may be expressions.
    """

    name: str
    source: str
    inputs: Inputs = field(default=dict)
    outputs: str = "y:float32[64]"
    want: Callable[..., Any] | None = None
    grid: Any = 64
    threadgroup: Any = 64
    header: str = ""
    template: tuple[tuple[str, Any], ...] = ()
    init_value: float | None = None
    atomic_outputs: bool = False
    ensure_row_contiguous: bool = True
    rule: str = ""

    @property
    def output_names(self) -> list[str]:
        return [name for name, _, _ in _OUTPUT.findall(self.outputs)]

    @property
    def output_dtypes(self) -> list[np.dtype[Any]]:
        return [numpy_dtype(dtype) for _, dtype, _ in _OUTPUT.findall(self.outputs)]

    @property
    def output_shapes(self) -> list[tuple[int, ...]]:
        shapes = [shape for _, _, shape in _OUTPUT.findall(self.outputs)]
        return [tuple(int(dim) for dim in shape.split(",") if dim) for shape in shapes]

    def kernel(self) -> Any:
        """The kernel, or the op."""
        shared: dict[str, Any] = {
            "header": self.header,
            "ensure_row_contiguous": self.ensure_row_contiguous,
            "atomic_outputs": self.atomic_outputs,
        }
        if self.rule:
            return ferrule.op(
                self.name,
                self.rule,
                metal=self.source,
                grid=self.grid,
                threadgroup=self.threadgroup,
                template=self.template or None,
                init_value=self.init_value,
                **shared,
            )
        return ferrule.metal_kernel(
            self.name, list(self.inputs()), self.output_names, self.source, **shared
        )

    def launch(self) -> dict[str, Any]:
        """What a call of the kernel takes besides its inputs."""
        return {
            "grid": _three(self.grid),
            "threadgroup": _three(self.threadgroup),
            "template": list(self.template) or None,
            "output_shapes": self.output_shapes,
            "output_dtypes": self.output_dtypes,
            "init_value": self.init_value,
        }

    def run(self, arrays: Mapping[str, Any] | None = None, **other: Any) -> list[Any]:
        """Run it on new inputs, or on ``arrays``; ``other`` replaces what `launch` gives."""
        values = list((self.inputs() if arrays is None else arrays).values())
        if self.rule:
            results = self.kernel()(*values)
            return list(results) if isinstance(results, (tuple, list)) else [results]
        return list(self.kernel()(inputs=values, **{**self.launch(), **other}))

    def wanted(self) -> list[np.ndarray]:
        """The outputs as NumPy has them."""
        assert self.want is not None
        results = self.want(**self.inputs())
        return list(results) if isinstance(results, tuple) else [results]


@dataclass(frozen=True)
class Planted:
    """A bug, and its twin without it.

    Attributes:
        kind: that of the finding.
        also: kinds of findings that the bug may bring with it.
        either: a race between rounds of a loop: which access came later is a matter of taste.
    """

    kind: str
    bug: Case
    clean: Case
    also: frozenset[str] = frozenset()
    either: bool = False

    @property
    def name(self) -> str:
        return self.bug.name

    @property
    def lines(self) -> set[tuple[str, int]]:
        """Where the bug is: each line marked ``// BUG``, any of which may be blamed."""
        return self._marked("// BUG")

    @property
    def other_lines(self) -> set[tuple[str, int]]:
        """Each line marked ``// OTHER``: a race's earlier access."""
        return self._marked("// OTHER")

    def _marked(self, mark: str) -> set[tuple[str, int]]:
        texts = {"source": self.bug.source, "header": self.bug.header}
        return {
            (where, number)
            for where, text in texts.items()
            for number, line in enumerate(text.splitlines(), 1)
            if line.endswith(mark)
        }


def planted(
    kind: str,
    name: str,
    source: str,
    *mends: tuple[str, str],
    also: Iterable[str] = (),
    either: bool = False,
    twin: Mapping[str, Any] | None = None,
    **launch: Any,
) -> Planted:
    """A bug; its twin has the second text of each of ``mends`` in place of the first one, and what
    ``twin`` says of the launch."""
    bug = Case(f"{kind}_{name}", source, **launch)
    texts = {"source": source, "header": bug.header}
    for old, new in mends:
        found = [where for where, text in texts.items() if old in text]
        if len(found) != 1 or texts[found[0]].count(old) != 1:
            raise ValueError(f"{bug.name}: expected {old!r} once; it stands in {found}")
        texts[found[0]] = texts[found[0]].replace(old, new)
    texts = {where: _MARK.sub("", text) for where, text in texts.items()}
    clean = replace(bug, name=f"{bug.name}_mended", **{**texts, **(twin or {})})
    return Planted(kind, bug, clean, frozenset(also), either)


def _three(size: Any) -> tuple[int, int, int]:
    return (size, 1, 1) if isinstance(size, int) else size
