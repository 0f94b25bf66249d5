"""What each kind of finding means, and what usually mends it: the help of reports."""

from __future__ import annotations

from typing import NamedTuple


class Rule(NamedTuple):
    """A kind of finding, for readers.

    Attributes:
        name: the kind, as a name in CamelCase.
        short: what it is, in a sentence.
        help: what it does and how it is usually mended.
    """

    name: str
    short: str
    help: str


RULES = {
    "bounds": Rule(
        "OutOfBounds",
        "An access outside of an array.",
        "A GPU returns garbage for such a read, and a write may change another array. Compare the "
        "index with the array's size before the access, and look for products of 32-bit integers "
        "that overflow.",
    ),
    "race": Rule(
        "DataRace",
        "Two threads touch one element, one of them writes, and nothing orders them.",
        "The result depends on which thread comes first. Put a threadgroup_barrier that fences the "
        "memory in question between the accesses, use an atomic, or let one thread alone write. "
        "Between threadgroups no barrier helps: use atomics or a second kernel.",
    ),
    "uninitialised": Rule(
        "UninitialisedRead",
        "A read of memory that nothing has written.",
        "Outputs without init_value, threadgroup memory and local variables hold anything at "
        "first. Write before the read, or give init_value.",
    ),
    "unwritten": Rule(
        "UnwrittenOutput",
        "Elements of an output that no thread writes.",
        "They hold anything. Compare the grid with the output's size, look for returns before the "
        "store, or give init_value.",
    ),
    "divergence": Rule(
        "BarrierDivergence",
        "A barrier that some threads of a group reach and others do not.",
        "On a GPU the group hangs, or goes on without having waited. Move the barrier out of the "
        "branch, and let threads without work skip the work and not the barrier.",
    ),
    "lanes": Rule(
        "LaneAssumption",
        "A body that relies on lanes that are not there, or on one size of groups.",
        "A shuffle from an inactive lane gives anything. Let all lanes take part, and read the "
        "width from threads_per_simdgroup.",
    ),
    "nan": Rule(
        "NotANumber",
        "An operation makes a NaN or an infinity from numbers that are none.",
        "Subtract the maximum before exp, add an epsilon before a division or a root, and sum "
        "halves in float.",
    ),
    "arithmetic": Rule(
        "Arithmetic",
        "Arithmetic whose result is not defined, or not what was meant.",
        "An integer overflows, is divided by zero or is shifted beyond its width, or a vector is "
        "read from a place that is not aligned. Use a wider type, or check the operand.",
    ),
    "alias": Rule(
        "Aliasing",
        "An output and an input share memory, or a constant buffer is written.",
        "A compiler may keep what it has read. Write into an array of its own.",
    ),
    "coverage": Rule(
        "GridCoverage",
        "A grid that covers too little or too much of the output that the rule declares.",
        "Elements stay unwritten, or threads have no work. Make the grid of the rule's sizes.",
    ),
}
