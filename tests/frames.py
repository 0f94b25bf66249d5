"""Which Python functions of ferrule a call runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def frames(call: Callable[[], object]) -> list[str]:
    """The Python functions of ferrule that a call runs."""
    seen: list[str] = []

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_globals["__name__"].startswith("ferrule"):
            seen.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen
