"""What somebody at a terminal may ask while a thread waits at a line."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .shown import Array, Shown, lanes, told, words

_NAME = re.compile(r"\s*([A-Za-z_]\w*)\s*((?:\[[^\[\]]+\]\s*)*)")
_HELP = """\
  c            go on, to the next stop
  n            go on to the next line of this thread
  p NAME       print a variable or an array
  p NAME[I]    print an element; I is a number or a variable
  q            end the program
"""
GO_ON, STEP, END = range(3)  # of stops.h


class Prompt:
    """Asks what to do next."""

    def __init__(self) -> None:
        self._last = "c"
        self._ends = False  # nobody is there any more

    def ask(self, shown: Sequence[Shown], arrays: Sequence[Array]) -> int:
        """What the thread does next: `GO_ON`, `STEP` or `END`."""
        while not self._ends:
            print("(ferrule) ", end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
            if not line:
                self._ends = True
                break
            line = line.strip() or self._last
            self._last = line
            if line in ("c", "n", "q"):
                return (GO_ON, STEP, END)["cnq".index(line)]
            if line.startswith("p "):
                print(f"  {printed(line[2:], shown, arrays)}", file=sys.stderr, flush=True)
            else:
                print(_HELP, end="", file=sys.stderr, flush=True)
        return GO_ON


def printed(text: str, shown: Sequence[Shown], arrays: Sequence[Array]) -> str:
    """The value of a name, or of a name with indices."""
    found = _NAME.fullmatch(text)
    if found is None:
        return f"{text.strip()!r} is neither a name nor NAME[INDEX]"
    name, rest = found.groups()
    variables = {one.name: one for one in shown if one.kind in "vp"}
    indices: list[int] = []
    for index in re.findall(r"\[([^\[\]]+)\]", rest):
        known = variables.get(index.strip())
        value = known.value if known is not None else index.strip()
        try:
            indices.append(int(value))
        except (TypeError, ValueError):
            return f"{index.strip()!r} is no number and no variable that is one"
    if name in variables:
        return _of_variable(variables[name], indices, variables)
    for array in arrays:
        if array.what.name == name:
            return _of_array(array, indices)
    return f"there is no variable {name!r} here, nor an array of this name"


def _of_variable(one: Shown, indices: Sequence[int], others: Mapping[str, Shown]) -> str:
    if one.kind == "p" and indices and one.array is not None:
        first = one.array.number(one.address, one.size)
        return _of_array(one.array, [first + indices[0], *indices[1:]])
    if one.kind == "p" and indices and (into := others.get(one.place.partition(" + ")[0])):
        row = (into.lanes,) if into.lanes > 1 else ()
        flat = into._replace(value=into.value.reshape((-1, *row)))
        return _of_variable(flat, [(one.address - into.address) // one.size + indices[0]], {})
    if one.value is None:
        return one.place or one.problem
    value: Any = one.value
    for index in indices:
        if not np.ndim(value) or not 0 <= index < len(value):
            return f"outside of {one.name}, {one.type}"
        value = value[index]
    if not indices:
        return told(one)
    return lanes(value) if one.lanes > 1 and np.ndim(value) else words(value)


def _of_array(array: Array, indices: Sequence[int]) -> str:
    what = array.what
    if what.dtype is not None:
        dtype = what.dtype.numpy
    elif what.shape is not None:  # the shape or the strides of an input
        dtype = np.dtype(f"i{what.item}")
    else:
        return "of threadgroup memory, elements that the line uses can be seen above"
    if len(indices) > 1:
        return f"{what.name} has one index here, the element's place in memory"
    if not indices:
        memory = (ctypes.c_char * (array.end - array.begin)).from_address(array.begin)
        values = np.frombuffer(memoryview(memory), dtype)
        return words(values if what.shape else values[0])
    at = array.zero + indices[0] * dtype.itemsize
    if not array.begin <= at < array.end:
        return f"outside of {what.name}, {what.bytes // dtype.itemsize:,} elements"
    if array.unwritten(at, dtype.itemsize):
        return "not written yet"
    return words(np.frombuffer(ctypes.string_at(at, dtype.itemsize), dtype)[0])
