"""Devices compile and launch, and never see an array. `protocol` says what one offers."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name in ("Binary", "UnitBinary"):  # pickles have them under this name
        from . import protocol

        return getattr(protocol, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
