"""The prelude of a kernel's Metal text where MLX does not put its own headers in front.

The words of the dialect that are MLX's, in Metal (``include/mlx.metal``). Only the parts that a
kernel names are switched on.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

_FILE = Path(__file__).resolve().parents[2] / "include" / "mlx.metal"
_PARTS = {
    "FR_BFLOAT": r"bfloat",
    "FR_COMPLEX": r"complex",
    "FR_LIMITS": r"\bLimits\b",
    "FR_LOCATIONS": r"elem_to_loc|LoopedElemToLoc",
    "FR_LOG1P": r"\blog1p\b",
    "FR_CAST": r"\bcast_to\b",
    "FR_SIMD": r"\bsimd_",
    "FR_LOG": r"\bos_log\b",
}


def stand_alone(text: str) -> str:
    """A kernel's Metal text with all that it needs to be compiled; line numbers are those of
    ``text``."""
    switches = "".join(
        f"#define {name} {int(bool(re.search(words, text)))}\n" for name, words in _PARTS.items()
    )
    return f'{switches}{_prelude()}#line 1 "kernel"\n{text}'


@lru_cache(maxsize=1)
def _prelude() -> str:
    return _FILE.read_text(encoding="ascii")
