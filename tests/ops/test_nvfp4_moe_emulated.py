"""The CUDA text of a mixture of experts in NVFP4 and MXFP4, run on the CPU as its units declare it
(tests/emulated_units.py): how slots are sorted, and what of few, many and very many comes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import emulated_units
from emulated_units import Array
from ferrule.ops.formats import Format
from ferrule.ops.nvfp4 import experts_cuda
from ferrule.ops.quantized_machine_cuda import MACHINE
from ferrule.ops.quantized_persistent_cuda import machine
from ferrule.ops.quantized_tiles import MANY_OF_EXPERTS, TILES_OF_EXPERTS, Persistent, Tile

torch = pytest.importorskip("torch")
pytest.importorskip("ml_dtypes")

from nvfp4_arrays import GROUPS, Experts, exact, experts_of, layer_of, normal  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="fibers are those of Linux")

T = {True: torch.bfloat16, False: torch.float16}
TYPES = {torch.int32: "int", torch.int64: "int64_t", torch.float32: "float"}
SMALL = Persistent((8, 16), each=2, x_stages=4, near=2)
LOW = SMALL._replace(each=1, stages=2)
FEW = experts_cuda._OF_FEW


class Case(NamedTuple):
    """A layer, its dtypes, and the tiles that it is divided by.

    Attributes:
        ids: the dtype of ids and of the map.
        weights: the dtype of weights; None is T.
        scales: second scales of an expert's first matrix.
    """

    mode: str
    bf16: bool
    activation: str
    on_input: bool
    mapped: bool
    tile: Persistent | tuple[Tile, Tile]
    ids: Any = torch.int64
    weights: Any = torch.float32
    scales: int = 2

    @property
    def name(self) -> str:
        dtype = "bfloat16" if self.bf16 else "float16"
        more = "-on_input" * self.on_input + "-mapped" * self.mapped
        return f"{self.mode}-{dtype}-{self.activation}{more}"

    @property
    def unit(self) -> Any:
        scaled = self.mode == "nvfp4"
        layer = experts_cuda.Layer(
            Format(self.mode, GROUPS[self.mode], 4),
            self.activation, self.on_input, scaled, self.mapped,
        )  # fmt: skip
        if isinstance(self.tile, Persistent):
            return layer.of_most(self.tile)
        return (layer.of_few if self.tile == FEW else layer.of_many)(*self.tile)

    def library(self, headers: Path) -> Any:
        weights = "T" if self.weights is None else TYPES[self.weights]
        types = {"J": TYPES[self.ids], "G": TYPES[self.ids], "V": weights}
        on_machine = [MACHINE]
        if isinstance(self.tile, Persistent):
            on_machine.append(machine(self.tile.widths))
        constants = {"A": self.scales}
        return emulated_units.compiled(self.unit, on_machine, types, constants, self.bf16, headers)


class Slots(NamedTuple):
    """Sizes, in groups of the format but for tokens, slots of a token and experts; and how ids are
    chosen: any, of one expert, or of none."""

    m: int
    q: int
    h: int
    i: int
    e: int
    ids: str = "any"


MOST = [
    Case("nvfp4", True, "silu", False, False, SMALL),
    Case("nvfp4", False, "gelu_tanh", True, True, LOW, torch.int32, None, scales=1),
    Case("mxfp4", True, "gelu_tanh", False, True, LOW._replace(widths=(16,), stages=3)),
    Case("mxfp4", False, "silu", True, False, SMALL._replace(stages=4), torch.int32),
]
SLOTS = {
    "any": Slots(13, 3, 9, 5, 5),
    "hot": Slots(29, 2, 2, 11, 3, "hot"),
    "deep": Slots(5, 2, 37, 19, 2),
    "high": Slots(9, 2, 35, 3, 3),
    "none": Slots(3, 2, 3, 2, 4, "none"),
    "one": Slots(1, 1, 1, 1, 1),
}


def with_second(of: Experts, scales: int) -> Experts:
    """The same with one second scale for both halves, if there are to be so many."""
    if of.second13 is None or scales == 2:
        return of
    return of._replace(second13=of.second13[:, :1].repeat(1, 2))


def chosen(random: np.random.Generator, slots: Slots, mapped: bool) -> tuple[Any, Any]:
    """Ids, of which some are outside, and a map, which has experts elsewhere."""
    m, q, e = slots.m, slots.q, slots.e
    size = e + 3
    ids = random.integers(-1, (size if mapped else e) + 2, (m, q))
    ids[ids == 2] = 1  # nothing for one of them
    ids[: m // 3] = 1  # one that is busy, and twice for a token
    if slots.ids == "hot":
        ids[...] = 1
    if slots.ids == "none":
        ids[...] = random.choice([-1, 2 * size, 1000], (m, q))
    if m * q == 1:
        ids[...] = 0
    places = random.permutation(np.concatenate([np.arange(e), [-1, e, -5]]))
    if slots.ids == "hot":
        places[1] = e - 1
    if m * q == 1:
        places[0] = 0
    return torch.tensor(ids), torch.tensor(places) if mapped else None


def bytes_of(array: Any) -> np.ndarray:
    row = torch.empty(array.numel(), dtype=array.dtype).copy_(array.flatten())  # of stride 1
    return row.view(torch.uint8).numpy()


def check(case: Case, slots: Slots, headers: Path, by: int = 0, **how: Any) -> None:
    """A layer, with matrices that begin so many bytes behind a multiple of 256. One token is NaN,
    and so is a row of one expert's second matrix."""
    group, dtype = GROUPS[case.mode], T[case.bf16]
    m, q, h, i, e, _ = slots
    h, i = h * group, i * group
    random = np.random.default_rng(m + h)
    of = with_second(experts_of(random, case.mode, e, h, i), case.scales)
    ids, places = chosen(random, slots, case.mapped)
    of.w2.scale.view(torch.uint8)[0, 1, -1] = 0x7F if case.mode == "nvfp4" else 0xFF  # NaN
    of.w2.values[0, 1, -group:] = np.nan
    x = normal(random, dtype, m, h)
    x[m // 2, h // 2] = np.nan if m > 2 else 0
    weights = torch.tensor(random.random((m, q))).to(case.weights or dtype)
    second13 = None if of.second13 is None else of.second13[:, : case.scales].contiguous()
    arrays = {
        "x": (x, by * 2), "weights": (weights, 0), "ids": (ids.to(case.ids), 0),
        "w13_packed": (of.w13.packed, by), "w13_scale": (of.w13.scale, by),
        "w13_scale_2": (second13, 4), "w2_packed": (of.w2.packed, 3 * by),
        "w2_scale": (of.w2.scale, 5 * by), "w2_scale_2": (of.second2, 4),
        "expert_map": (None if places is None else places.to(case.ids), 8),
    }  # fmt: skip
    given = {
        name: Array(bytes_of(array), at)
        for name, (array, at) in arrays.items()
        if array is not None
    }
    given["y"] = Array(m * h * 2, 2 * by)
    sizes = {"M": m, "H": h, "I": i, "E": e, "Q": q, "A": case.scales}
    sizes["N"] = 0 if places is None else len(places)
    found = emulated_units.run(case.unit, case.library(headers), given, sizes, **how)
    y = torch.tensor(found["y"].bytes).view(dtype).reshape(m, h)
    expected, bound = layer_of(of, x, weights, ids, places, case.activation, case.on_input)
    error, nan = np.abs(exact(y) - expected), np.isnan(expected)
    assert (np.isnan(exact(y)) == nan).all()
    assert (error <= bound)[~nan].all(), np.nanmax(error - bound)
    assert slots.ids != "none" or not exact(y).any()


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("case", MOST, ids=lambda case: case.name)
def test_very_many(case: Case, slots: str, precompiled_headers: Path) -> None:
    """Blocks make several tiles each, of which the last have few slots, columns and rows."""
    turn = list(SLOTS).index(slots) + MOST.index(case)
    how = {"multiprocessors": 2 + turn // 2 % 2, "backwards": turn % 3 == 1}
    check(case, SLOTS[slots], precompiled_headers, by=turn % 2, **how)


@pytest.mark.slow
@pytest.mark.parametrize("tile", MANY_OF_EXPERTS, ids=lambda tile: str(tile.tokens))
def test_very_many_of_tiles_as_they_are(tile: Persistent, precompiled_headers: Path) -> None:
    case = MOST[tile.tokens < 128]._replace(tile=tile)
    for slots in ("any", "hot"):
        check(case, SLOTS[slots], precompiled_headers, by=1, multiprocessors=3)
    check(case, Slots(140, 2, 9, 5, 2), precompiled_headers, backwards=True)


def check_few(case: Case, headers: Path) -> None:
    """Slots of a token are as many as groups of warps divide, fewer and more; one has none."""
    for by, slots in enumerate(
        [Slots(2, 3, 9, 5, 5), Slots(1, 8, 2, 37, 3), Slots(4, 11, 5, 3, 4)]
    ):
        check(case, slots, headers, by=by)
    check(case, SLOTS["none"], headers, backwards=True)


def check_many(case: Case, headers: Path) -> None:
    """Up to 64 slots find those of their expert, more are sorted by one block."""
    check(case, SLOTS["any"], headers, by=1)
    check(case, Slots(32, 2, 5, 9, 2, "hot"), headers)
    check(case, Slots(24, 3, 9, 5, 5), headers, by=1, backwards=True)
    check(case, SLOTS["none"], headers, backwards=True)


def test_few(precompiled_headers: Path) -> None:
    check_few(MOST[0]._replace(tile=FEW), precompiled_headers)


def test_many(precompiled_headers: Path) -> None:
    check_many(MOST[3]._replace(tile=TILES_OF_EXPERTS[1:3]), precompiled_headers)


@pytest.mark.slow
def test_few_of_mxfp4(precompiled_headers: Path) -> None:
    check_few(MOST[3]._replace(tile=FEW), precompiled_headers)


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(2))
def test_many_of_other_tiles(turn: int, precompiled_headers: Path) -> None:
    tiles = TILES_OF_EXPERTS[4:6] if turn else TILES_OF_EXPERTS[6:7] * 2
    check_many(MOST[turn]._replace(tile=tiles), precompiled_headers)


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    experts=st.sampled_from([1, 3, 1500]), rows=st.integers(1, 5000), backwards=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_a_cluster_sorts(
    precompiled_headers: Path, experts: int, rows: int, backwards: bool, seed: int
) -> None:
    """All slots once, by expert; tiles of each expert in turn, of all but those without one."""
    case, random = MOST[0], np.random.default_rng(seed)
    ids = random.integers(-1, random.integers(1, experts + 2), rows)
    arrays = {"ids": Array(ids)}
    sizes = {"M": rows, "H": 16, "I": 16, "E": experts, "Q": 1}
    library = case.library(precompiled_headers)
    found = emulated_units.run(
        case.unit, library, arrays, sizes, backwards=backwards, steps=slice(1)
    )
    order, tiles = (found[name].bytes.view(np.int32) for name in ("order", "tiles"))
    assert (np.sort(order) == np.arange(rows)).all()
    by_expert = np.where((ids >= 0) & (ids < experts), ids, experts)
    assert (by_expert[order] == np.sort(by_expert)).all()
    counts, expected, at = np.bincount(by_expert, minlength=experts + 1), [], 0
    for expert, count in enumerate(counts[:experts]):
        for first in range(0, count, SMALL.tokens):
            expected.append((expert, at + first, min(count - first, SMALL.tokens)))
        at += count
    assert tiles[0] == len(expected)
    assert (tiles[1 : 1 + 3 * len(expected)] == np.array(expected, np.int32).reshape(-1)).all()
    assert (tiles[1 + 3 * len(expected) :] == -1).all()
