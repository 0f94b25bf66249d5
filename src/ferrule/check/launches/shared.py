"""What watch/shared.h has: plain structures, laid out alike by both."""

from __future__ import annotations

import ctypes

MOST_COPIES, MOST_ARRAYS, MOST_ORIGINS, MOST_CALLERS, TEXT = 8, 256, 4, 6, 48
KINDS = (
    "BOUNDS_READ", "BOUNDS_WRITE", "WILD", "BOUNDS_PRIVATE", "RACE", "UNINITIALISED", "DIVERGENCE",
    "LANE", "NAN_STORED", "INFINITY_STORED", "OVERFLOW_INT", "DIVISION", "SHIFT", "HALF_OVERFLOW",
    "MISALIGNED", "WRITE_TO_INPUT", "GAVE_UP", "ASSERTION", "CRASH", "UNSET", "NO_ROOM",
    "NOT_NAMED", "ABSENT", "TRAP", "BOUNDS_ROW",
)  # fmt: skip


class Array(ctypes.Structure):
    _fields_ = (
        ("bytes", ctypes.c_uint64),
        ("item", ctypes.c_uint64),
        ("output", ctypes.c_uint32),
        ("written", ctypes.c_uint32),
        ("floats", ctypes.c_uint32),
        ("shared", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("unwritten", ctypes.c_uint64),
        ("first_unwritten", ctypes.c_uint64),
        ("name", ctypes.c_char * TEXT),
    )


class Event(ctypes.Structure):
    """An event, as watch/shared.h has it."""

    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("array", ctypes.c_int32),
        ("count", ctypes.c_uint64),
        ("pc", ctypes.c_uint64),
        ("other_pc", ctypes.c_uint64),
        ("thread", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("other_thread", ctypes.c_uint32),
        ("other_threads", ctypes.c_uint32),
        ("group", ctypes.c_uint64),
        ("other_group", ctypes.c_uint64),
        ("index", ctypes.c_int64),
        ("size", ctypes.c_uint64),
        ("value", ctypes.c_uint64 * 2),
        ("operand_kind", ctypes.c_uint32 * 2),
        ("caller", ctypes.c_uint64 * MOST_CALLERS),
        ("later", ctypes.c_int32),
        ("origin", ctypes.c_uint64 * MOST_ORIGINS),
        ("operation", ctypes.c_uint32 * MOST_ORIGINS),
        ("operand", ctypes.c_double * 2 * MOST_ORIGINS),
        ("file", ctypes.c_char_p),
        ("line", ctypes.c_uint32),
        ("column", ctypes.c_uint32),
        ("text", ctypes.c_char * TEXT),
    )


class WatchOptions(ctypes.Structure):
    _fields_ = (
        ("cells", ctypes.c_uint32),
        ("races", ctypes.c_uint32),
        ("uninitialised", ctypes.c_uint32),
        ("floats", ctypes.c_uint32),
        ("same_values", ctypes.c_uint32),
        ("reversed", ctypes.c_uint32),
        ("may_be_infinite", ctypes.c_uint32),
        ("may_be_nan", ctypes.c_uint32),
        ("stray_bytes", ctypes.c_uint32),
        ("copy", ctypes.c_uint32),
        ("copies", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("base", ctypes.c_uint64),
        ("strays_of", ctypes.c_uint64),
        ("launch_begin", ctypes.c_uint64),
        ("launch_end", ctypes.c_uint64),
        ("source", ctypes.c_char_p),
        ("header", ctypes.c_char_p),
    )


class WatchLaunch(ctypes.Structure):
    _fields_ = (
        ("run", ctypes.c_void_p),
        ("trap", ctypes.c_void_p),
        ("entry", ctypes.c_void_p),
        ("launch", ctypes.c_void_p),
        ("units", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
    )
