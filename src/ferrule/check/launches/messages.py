"""Events of a watched launch in an author's words."""

from __future__ import annotations

import math
import re
import struct
from typing import NamedTuple

from ...spec import Launch
from ..reports.findings import Position
from .shared import KINDS, Event
from .watched import Result, Watched

# What a finding's kind is, by an event's.
KIND_OF = {
    "BOUNDS_READ": "bounds",
    "BOUNDS_WRITE": "bounds",
    "WILD": "bounds",
    "BOUNDS_PRIVATE": "bounds",
    "BOUNDS_ROW": "bounds",
    "RACE": "race",
    "UNINITIALISED": "uninitialised",
    "DIVERGENCE": "divergence",
    "LANE": "lanes",
    "NAN_STORED": "nan",
    "INFINITY_STORED": "nan",
    "OVERFLOW_INT": "arithmetic",
    "DIVISION": "arithmetic",
    "SHIFT": "arithmetic",
    "HALF_OVERFLOW": "arithmetic",
    "NOT_NAMED": "lanes",
    "ABSENT": "lanes",
    "TRAP": "arithmetic",
    "MISALIGNED": "arithmetic",
    "WRITE_TO_INPUT": "alias",
    "GAVE_UP": "divergence",
    "ASSERTION": "arithmetic",
    "CRASH": "bounds",
    "UNSET": "uninitialised",
}


_NONE = Watched("", None, None, 1, 0)


class Words(NamedTuple):
    """What is said of an event."""

    kind: str
    message: str
    hint: str


# What CUDA calls things, in the order in which they are looked for.
_IN_CUDA = (
    ("threadgroup_barrier(mem_flags::mem_threadgroup)", "__syncthreads()"),
    ("threadgroup_barrier(mem_flags::mem_device)", "__syncthreads()"),
    ("; that of mem_threadgroup orders threadgroup memory alone", ""),
    ("simdgroup_barrier", "__syncwarp()"),
    (", or use a packed_ type", ""),
    ("Metal takes the count modulo the number of bits; other languages leave it open.",
     "C++ leaves the result open."),
    (" (atomic_outputs=True)", ""),
    ("threadgroup memory", "shared memory"),
    ("Threadgroup memory", "Shared memory"),
    ("threadgroup", "block"),
    ("simdgroup", "warp"),
)  # fmt: skip


def words(event: Event, result: Result, launch: Launch, language: str = "metal") -> Words:
    """The words for an event, in the terms of a kernel's language."""
    kind = KINDS[event.kind]
    array = result.arrays[event.array] if event.array >= 0 else _NONE
    message, hint = _WORDS[kind](event, array, launch)
    if language == "cuda":
        message, hint = in_cuda(message), in_cuda(hint)
    return Words(KIND_OF[kind], message, hint)


def in_cuda(text: str) -> str:
    """A text with CUDA's words for Metal's."""
    for word, instead in _IN_CUDA:
        text = text.replace(word, instead)
    return text


def position(index: int, group: int, launch: Launch) -> tuple[Position, Position]:
    """The positions of a thread in its threadgroup, and of that in the grid.

    Args:
        index: of the thread in its threadgroup.
        group: which threadgroup, along x first.
        launch: the sizes.
    """
    counts = [max(-(-g // t), 1) for g, t in zip(launch.grid, launch.threadgroup, strict=True)]
    x, rest = group % counts[0], group // counts[0]
    place = (x, rest % counts[1], rest // counts[1])
    size = [
        min(t, g - p * t) for g, t, p in zip(launch.grid, launch.threadgroup, place, strict=True)
    ]
    row = index // size[0]
    return (index % size[0], row % size[1], row // size[1]), place


def shown(array: Watched) -> str:
    """An array, such as ``x (float32[4,16])``."""
    if array.shape is not None and array.dtype is not None:
        return f"{array.name!r} ({array.dtype.name}[{','.join(map(str, array.shape))}])"
    if array.shape is not None:
        return f"{array.name!r} (of {array.shape[0]} dims)"
    return f"threadgroup memory {array.name!r} ({array.bytes // array.item} elements)"


def element(array: Watched, offset: int) -> str:
    """An element, as it is written: ``x[12]``, and its subscripts where it has several."""
    number = (offset + array.shift) // array.item
    if array.shape is None or len(array.shape) < 2 or array.dtype is None or array.shift:
        return f"{array.name}[{number}]"
    subscripts: list[int] = []
    for dim in reversed(array.shape):
        subscripts.append(number % dim if dim else 0)
        number //= max(dim, 1)
    return f"{array.name}[{(offset + array.shift) // array.item}] (at {tuple(subscripts[::-1])})"


def _bounds(event: Event, array: Watched, launch: Launch) -> tuple[str, str]:
    does = "reads" if KINDS[event.kind] == "BOUNDS_READ" else "writes"
    count, number = array.bytes // array.item, event.index // array.item
    if event.index < 0:
        before = -number
        miss = f"{_elements(before)} before its start"
        hint = (
            "An index below zero: guard it, or compare before subtracting; an unsigned index that "
            "would be negative is a huge one."
        )
    else:
        last = (event.index + event.size - 1) // array.item
        miss = f"{_elements(last - count + 1)} past its end"
        hint = "Guard the access with the array's size, or launch fewer threads."
        if event.size > array.item and number < count:
            hint = "A vector's last elements lie outside: handle the rest one by one."
        elif last >= 1 << 31:
            hint = "The index wrapped around: compute it as int or long, and guard it."
    index = number + array.shift // array.item
    return f"{does} {array.name}[{index}], {miss}: {shown(array)} has {_elements(count)}.", hint


def _elements(count: int) -> str:
    return "1 element" if count == 1 else f"{count:,} elements"


def _wild(event: Event, array: Watched, launch: Launch) -> tuple[str, str]:
    address = event.value[0]
    what = "a null pointer" if address < 1 << 16 else f"address {address:#x}, far from every array"
    return (
        f"follows {what}; the thread was ended there.",
        "A 64-bit index is wrong by billions of elements, or a pointer was never set.",
    )


def _private(event: Event, array: Watched, launch: Launch) -> tuple[str, str]:
    kind = event.text.decode().strip("'")
    index = _signed(event.value[0])
    what = f"index {index} of an array of type {kind}"
    if index == (1 << 63) - 1:
        what = f"an access of type {kind} outside of a private array"
    return (
        f"{what}; the thread was ended there.",
        "Make the array larger, or stop the loop at its size.",
    )


def _row(event: Event, array: Watched, launch: Launch) -> tuple[str, str]:
    index, length = _signed(event.value[0]), event.value[1]
    hint = "Guard the index with the row's length, or make the rows longer."
    if event.array < 0:
        name = event.text.decode()
        what = f"index {index} of {name!r}, whose rows have {length}"
        return f"{what}; the thread was ended there.", hint
    what = f"index {index} of {shown(array)}, whose rows have {length}"
    return f"{what}: the element is another row's, or outside.", hint


def _race(event: Event, array: Watched, launch: Launch) -> tuple[str, str]:
    later = "writes" if event.value[0] & 1 else "reads"
    earlier = "wrote" if event.value[0] & 2 else "read"
    other, other_group = position(event.other_thread, event.other_group, launch)
    name = element(array, event.index)
    if event.value[1]:
        message = (
            f"{later} {name}, which thread {other} of threadgroup {other_group} {earlier}; nothing "
            "orders threadgroups."
        )
        return message, (
            "Let one thread own each element, add with an atomic (atomic_outputs=True), or use "
            "two launches."
        )
    flag = "mem_threadgroup" if array.shape is None else "mem_device"
    between = "no barrier is between"
    if event.value[0] & 4:
        between = f"the barrier between them is without mem_flags::{flag}, which orders that"
    message = f"{later} {name}, which thread {other} {earlier}, and {between}."
    if array.shape is None:
        hint = "Put threadgroup_barrier(mem_flags::mem_threadgroup) between the two accesses."
        if event.thread // 32 == event.other_thread // 32:
            hint += " Lanes of a simdgroup are not in step: simdgroup_barrier orders them."
    else:
        hint = (
            "Put threadgroup_barrier(mem_flags::mem_device) between the two accesses; that of "
            "mem_threadgroup orders threadgroup memory alone."
        )
    return message, hint


def _uninitialised(event: Event, array: Watched, launch: Launch) -> tuple[str, str]:
    message = f"reads {element(array, event.index)}, which nothing has written."
    if array.shape is None:
        return message, "Threadgroup memory begins with any values: write all of it first."
    return message, "Outputs begin with any values: pass init_value, or write before reading."


def _divergence(event: Event, array: Watched, launch: Launch) -> tuple[str, str]:
    other, _ = position(event.other_thread, event.other_group, launch)
    if event.value[0] == 1:
        message = f"threads wait at this barrier, which thread {other} does not reach: it returned."
    elif event.value[0] == 3:
        message = "threads wait at this barrier, to which fewer come than it is for."
    elif event.value[0] == 2:
        message = (
            f"lanes wait at this barrier, to which thread {other} of their simdgroup does not come."
        )
    else:
        message = f"threads wait at this barrier while thread {other} waits at another one."
    return message, (
        "All threads of a threadgroup must come to the same barrier: move it out of the branch, "
        "or let a guard skip the work and not the barrier."
    )


def _gave_up(event: Event, array: Watched, launch: Launch) -> tuple[str, str]:
    return (
        "does not end: it was stopped after a while in which no thread came to its end.",
        "A loop waits for what another thread or threadgroup would write, or has no end.",
    )


def _crash(event: Event, array: Watched, launch: Launch) -> tuple[str, str]:
    return (
        "the launch ended with a fault after this line: a thread's stack of 128 KiB overflowed, or "
        "was overwritten.",
        "Look for recursion, for large private arrays, and for writes outside of them.",
    )


def _unset(event: Event, array: Watched, launch: Launch) -> tuple[str, str]:
    return (
        f"reads local variable {event.text.decode()!r}, which nothing has set on the way here.",
        "Initialise it where it is declared.",
    )


def _lane(event: Event, array: Watched, launch: Launch) -> tuple[str, str]:
    lane, lanes = event.value[0], event.value[1]
    there = f"lane {lane}" if lane < lanes else f"lane {lane}, and there are {lanes} lanes"
    why = ", which takes no part" if lane < lanes else ""
    return (
        f"{event.text.decode() or 'a shuffle'} reads from {there}{why}: its value is anything.",
        "Let all lanes come to the call, and read only from lanes that are there (the last "
        "simdgroup may have fewer than 32).",
    )


def _not_named(event: Event, array: Watched, launch: Launch) -> tuple[str, str]:
    return (
        f"lane {event.thread % 32} calls this with a mask that does not name it.",
        "Each lane that comes must be in the mask: take it from __ballot_sync before the branch.",
    )


def _absent(event: Event, array: Watched, launch: Launch) -> tuple[str, str]:
    lane = event.other_thread % 32
    return (
        f"lanes wait here for lane {lane}, which the mask names and which is elsewhere.",
        "Name the lanes that come, as __ballot_sync gives them before the branch, or move the call "
        "out of it.",
    )


def _trap(event: Event, array: Watched, launch: Launch) -> tuple[str, str]:
    return "reaches __trap(), which ends the launch.", "The author's own stop."


def _not_finite(event: Event, array: Watched, launch: Launch) -> tuple[str, str]:
    bits, size = event.value[0], event.size
    if size == 8:
        (value,) = struct.unpack("=d", struct.pack("=Q", bits))
    elif size == 4:
        (value,) = struct.unpack("=f", struct.pack("=I", bits))
    elif array.dtype is not None and array.dtype.name == "bfloat16":
        (value,) = struct.unpack("=f", struct.pack("=I", bits << 16))
    else:
        (value,) = struct.unpack("=e", struct.pack("=H", bits))
    name = "NaN" if math.isnan(value) else "an infinity"
    return (
        f"makes {name}, and no input has one; it is stored to {element(array, event.index)}.",
        "Look at 0/0, inf - inf, log and sqrt of negative numbers."
        if math.isnan(value)
        else "Look at divisions by zero, and at exp, sums and products that overflow.",
    )


# By x86-64's codes.
_OPERATORS = {0x58: "+", 0x59: "*", 0x5C: "-", 0x5E: "/"}


def computed(event: Event, origin: int) -> str:
    """Of what an operation made a NaN or an infinity, as a sentence; nothing where nobody knows."""
    code, (first, second) = event.operation[origin], event.operand[origin]
    if code in _OPERATORS:
        right = f"({second:g})" if math.copysign(1, second) < 0 else f"{second:g}"
        return f" It computes {first:g} {_OPERATORS[code]} {right}."
    told = {
        0x51: f" It computes the square root of {first:g}.",
        1: f" Its argument is {first:g}.",
        2: f" Its arguments are {first:g} and {second:g}.",
    }
    return told.get(code, "")


def _overflow(event: Event, array: Watched, launch: Launch) -> tuple[str, str]:
    a, b, operator = _signed(event.value[0]), _signed(event.value[1]), event.text.decode()
    what = f"-({a})" if operator == "negative" else f"{a} {operator} {b}"
    return (
        f"{what} does not fit into its signed type.",
        "Compute it as long, or as uint where it may wrap around.",
    )


def _division(event: Event, array: Watched, launch: Launch) -> tuple[str, str]:
    a, b = _signed(event.value[0]), _signed(event.value[1])
    why = "divides by zero" if b == 0 else "does not fit into its type"
    return f"{a} / {b} {why}.", "Guard the division."


def _shift(event: Event, array: Watched, launch: Launch) -> tuple[str, str]:
    return (
        f"shifts a value of {event.value[0]} bits by {_signed(event.value[1])}.",
        "Metal takes the count modulo the number of bits; other languages leave it open.",
    )


def _half(event: Event, array: Watched, launch: Launch) -> tuple[str, str]:
    (value,) = struct.unpack("=f", struct.pack("=I", event.value[0] & 0xFFFFFFFF))
    return (
        f"{value:g} becomes infinite as half, whose largest number is 65504.",
        "Scale it, clamp it, or compute in float or bfloat.",
    )


def _misaligned(event: Event, array: Watched, launch: Launch) -> tuple[str, str]:
    kind, alignment = event.text.decode().strip("'"), event.value[1]
    where = f"address {event.value[0]:#x}"
    if array.name:
        where = f"byte {event.index} of {shown(array)}"
    return (
        f"accesses a {kind} at {where}, which is no multiple of {alignment}; the thread was ended "
        "there.",
        "Start vectors at multiples of their size, or use a packed_ type.",
    )


def _write_to_input(event: Event, array: Watched, launch: Launch) -> tuple[str, str]:
    return (
        f"writes {element(array, event.index)}, which is an input.",
        "Inputs are const: others may share their memory. Write to an output.",
    )


def _assertion(event: Event, array: Watched, launch: Launch) -> tuple[str, str]:
    operands = [
        f"{struct.unpack('=d', struct.pack('=Q', bits))[0]:g}"
        if kind == 2
        else str(bits if kind else _signed(bits))
        for bits, kind in zip(event.value, event.operand_kind, strict=True)
    ][: event.size]
    values = f" ({' and '.join(operands)})" if operands else ""
    condition = re.sub(r"FR_AT(_ONLY)? ?", "", event.text.decode())  # what the rewriter put there
    return f"assert({condition}) fails{values}.", "The author's own condition."


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_WORDS = {
    "BOUNDS_READ": _bounds,
    "BOUNDS_WRITE": _bounds,
    "WILD": _wild,
    "BOUNDS_PRIVATE": _private,
    "BOUNDS_ROW": _row,
    "RACE": _race,
    "UNINITIALISED": _uninitialised,
    "DIVERGENCE": _divergence,
    "LANE": _lane,
    "NOT_NAMED": _not_named,
    "ABSENT": _absent,
    "TRAP": _trap,
    "NAN_STORED": _not_finite,
    "INFINITY_STORED": _not_finite,
    "OVERFLOW_INT": _overflow,
    "DIVISION": _division,
    "SHIFT": _shift,
    "HALF_OVERFLOW": _half,
    "MISALIGNED": _misaligned,
    "WRITE_TO_INPUT": _write_to_input,
    "GAVE_UP": _gave_up,
    "ASSERTION": _assertion,
    "CRASH": _crash,
    "UNSET": _unset,
}
