"""What threads printed becomes lines: formats are C's, and lines go where they are wanted."""

from __future__ import annotations

import ctypes
import io
import logging
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ferrule
from ferrule.tools import printing
from ferrule.tools.binding import runtime
from ferrule.tools.printing import Printed

SIGNED, UNSIGNED, FLOAT, TEXT, POINTER = range(5)
Value = tuple[int, int, Any]  # kind, bytes, and the value as Python has it

_LIBC = ctypes.CDLL(None)
_KEPT: list[object] = []


def ours(message: bytes, values: list[Value]) -> bytes:
    """What the runtime makes of a format and values."""
    packed = b"".join(struct.pack("<ii8s", kind, size, bits(kind, v)) for kind, size, v in values)
    room = ctypes.create_string_buffer(20000)
    size = runtime().fr_format(message, packed, len(values), room, len(room))
    assert size <= len(room)
    return room.raw[:size]


def bits(kind: int, value: Any) -> bytes:
    if kind == TEXT:
        _KEPT.append(ctypes.create_string_buffer(value))
        return struct.pack("<Q", ctypes.addressof(_KEPT[-1]))
    return struct.pack("<d" if kind == FLOAT else "<q" if kind == SIGNED else "<Q", value)


def theirs(message: bytes, *arguments: object) -> bytes:
    """What C's snprintf makes of them."""
    room = ctypes.create_string_buffer(20000)
    size = _LIBC.snprintf(room, ctypes.c_size_t(len(room)), message, *arguments)
    return room.raw[:size]


flags = st.text("-+ #0", max_size=4)
widths = st.none() | st.integers(0, 300)
precisions = st.none() | st.integers(0, 300)


def spec(flags: str, width: int | None, precision: int | None, letters: str) -> bytes:
    shown = "" if not width else str(width)
    return f"<%{flags}{shown}{'' if precision is None else f'.{precision}'}{letters}>".encode()


INTEGERS: dict[str, type[Any]] = {
    "": ctypes.c_int, "l": ctypes.c_long, "ll": ctypes.c_longlong, "h": ctypes.c_int,
    "hh": ctypes.c_int, "z": ctypes.c_ssize_t, "j": ctypes.c_int64, "t": ctypes.c_ssize_t,
}  # fmt: skip


@given(flags, widths, precisions, st.sampled_from(sorted(INTEGERS)), st.sampled_from("diuxXo"),
       st.integers(-(1 << 63), (1 << 63) - 1))  # fmt: skip
def test_integers_are_cs(
    flags: str, width: int | None, precision: int | None, length: str, letter: str, number: int
) -> None:
    kind = INTEGERS[length]
    value = kind(number).value
    message = spec(flags, width, precision, length + letter)
    given_ = (SIGNED, ctypes.sizeof(kind), value)
    assert ours(message, [given_]) == theirs(message, kind(value))


@given(flags, widths, precisions, st.sampled_from("fFeEgGaA"), st.floats())
def test_floats_are_cs(
    flags: str, width: int | None, precision: int | None, letter: str, number: float
) -> None:
    message = spec(flags, width, precision, letter)
    assert ours(message, [(FLOAT, 8, number)]) == theirs(message, ctypes.c_double(number))


@given(flags, widths, precisions, st.binary(max_size=40).filter(lambda text: 0 not in text))
def test_texts_are_cs(flags: str, width: int | None, precision: int | None, text: bytes) -> None:
    message = spec(flags, width, precision, "s")
    assert ours(message, [(TEXT, 8, text)]) == theirs(message, text)


@given(flags, widths, st.integers(1, 255))
def test_characters_are_cs(flags: str, width: int | None, letter: int) -> None:
    message = spec(flags, width, None, "c")
    assert ours(message, [(SIGNED, 4, letter)]) == theirs(message, letter)


@given(widths, st.integers(0, (1 << 47) - 1))
def test_addresses_are_cs(width: int | None, address: int) -> None:
    message = spec("", width, None, "p")
    assert ours(message, [(POINTER, 8, address)]) == theirs(message, ctypes.c_void_p(address))


@given(st.integers(-300, 300), st.integers(-300, 300), st.floats(), st.integers(-9, 9))
def test_stars_take_values(width: int, precision: int, number: float, last: int) -> None:
    values = [(SIGNED, 4, width), (SIGNED, 4, precision), (FLOAT, 8, number), (SIGNED, 4, last)]
    message = b"100%% of %*.*f, %d"
    wanted = theirs(message, width, precision, ctypes.c_double(number), last)
    assert ours(message, values) == wanted


@pytest.mark.parametrize(
    ("message", "values", "text"),
    [
        (b"%d", [(FLOAT, 8, 1.5)], b"%!d(1.5)"),
        (b"%f", [(SIGNED, 4, 3)], b"3.000000"),
        (b"%d", [(SIGNED, 8, 1 << 40)], b"1099511627776"),  # not C's low 32 bits
        (b"%s", [(SIGNED, 4, 3)], b"%!s(3)"),
        (b"%f", [(TEXT, 8, b"text")], b"%!f(text)"),
        (b"%d and %g", [(SIGNED, 4, 3)], b"3 and %!g(no value)"),
        (b"%n%d", [(POINTER, 8, 8), (SIGNED, 4, 3)], b"3"),
        (b"%y %", [], b"%y %"),
        (b"more", [(SIGNED, 4, 3)], b"more"),
    ],
)
def test_what_does_not_fit_is_shown(message: bytes, values: list[Value], text: bytes) -> None:
    assert ours(message, values) == text


def records(*texts: str, threads: int = 1, level: int = -1) -> list[Printed]:
    """Records of one text each, by threads in turn."""
    return [Printed((0, 0, 0), (i % threads, 0, 0), text, level) for i, text in enumerate(texts)]


def shown(given_: list[Printed], dropped: int = 0, **options: Any) -> str:
    out = io.StringIO()
    with ferrule.printing(to=out, **options):
        printing.show("k", given_, dropped)
    return out.getvalue()


def test_a_stream_gets_what_c_would_print() -> None:
    assert shown(records("a", "b\n", "c", threads=3)) == "ab\nc"
    assert shown(records("two\nlines\n\n")) == "two\nlines\n\n"
    assert shown(records("log", "line\n", level=2)) == "log\nline\n"


def test_prefixes_begin_lines_of_one_thread_each() -> None:
    text = shown(records("a", "b\n", "c\nd", threads=2), prefix=True)
    assert text == (
        "k: thread (0, 0, 0) of threadgroup (0, 0, 0): a\n"
        "k: thread (1, 0, 0) of threadgroup (0, 0, 0): b\n"
        "k: thread (0, 0, 0) of threadgroup (0, 0, 0): c\n"
        "k: thread (0, 0, 0) of threadgroup (0, 0, 0): d\n"
    )
    assert "of threadgroup (0, 0, 0): [net:conv] m\n" in shown(
        [Printed((0, 0, 0), (0, 0, 0), "m", 1, "net:conv")], prefix=True
    )


@given(st.lists(st.sampled_from(["a", "b\n", "c\nd\n", "\n"]), max_size=20), st.integers(0, 30))
def test_the_limit_counts_lines(texts: list[str], limit: int) -> None:
    whole = "".join(texts)
    lines = whole.splitlines(keepends=True)
    text = shown(records(*texts), dropped=2, limit=limit)
    left = max(0, len(lines) - limit) + 2
    kept = "".join(lines[:limit])
    gap = "\n" if kept and not kept.endswith("\n") else ""
    assert text == f"{kept}{gap}… {left} more lines of kernel 'k' not shown\n"
    assert shown(records(*texts), limit=None) == whole


def test_a_logger_gets_levels(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("kernels")
    texts = [record for level in range(-1, 5) for record in records(f"{level}\n", level=level)]
    with caplog.at_level(logging.DEBUG, "kernels"), ferrule.printing(to=logger, limit=6):
        printing.show("k", texts, 3)
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("INFO", "-1"),
        ("DEBUG", "0"),
        ("INFO", "1"),
        ("INFO", "2"),
        ("ERROR", "3"),
        ("CRITICAL", "4"),
        ("INFO", "… 3 more lines of kernel 'k' not shown"),
    ]


def test_blocks_nest(capsys: pytest.CaptureFixture[str]) -> None:
    outer, inner = io.StringIO(), io.StringIO()
    with ferrule.printing(to=outer):
        with ferrule.printing(to=inner):
            printing.show("k", records("in\n"))
        printing.show("k", records("out\n"))
    printing.show("k", records("none\n"))
    assert (outer.getvalue(), inner.getvalue()) == ("out\n", "in\n")
    assert capsys.readouterr().out == "none\n"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"to": 3}, ferrule.KernelTypeError, "to=3; expected a logging.Logger, a stream"),
        ({"limit": 1.5}, ferrule.KernelTypeError, "limit=1.5; expected a number of lines"),
        ({"limit": True}, ferrule.KernelTypeError, "limit=True"),
        ({"limit": -1}, ferrule.KernelError, "limit=-1; expected 0 or more"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message), ferrule.printing(**options):
        pass
