"""Robust mode: on NVIDIA's GPUs, accesses outside of arrays do no harm (`source.cuda.bounds`)."""

from __future__ import annotations

from functools import cache

from ... import _env
from ...source.cuda.launch import ROBUST, UNGUARDED

_chosen: bool | None = None


def set_robust(on: bool | None) -> None:
    """Chooses whether kernels on NVIDIA's GPUs are guarded against accesses outside of arrays.

    They are where nothing is said, and with ``FERRULE_ROBUST=1``: a load outside gives zero, and a
    store or atomic does nothing there. That is so of subscripts in Metal bodies (docs/dialect.md
    says which, and what it costs). With ``FERRULE_ROBUST=0`` they are not: such an access may read
    and overwrite other arrays, or end the process's CUDA, as in CUDA.

    It holds for kernels that are first launched afterwards.

    Args:
        on: whether; None asks ``FERRULE_ROBUST`` again.
    """
    global _chosen
    _chosen = on
    _asked.cache_clear()


@cache
def _asked() -> bool:
    """What the environment says: launches ask each time."""
    return (_env.get(_env.ROBUST) or "1") != "0"


def guards() -> str:
    """What is done about accesses outside of arrays."""
    return ROBUST if (_asked() if _chosen is None else _chosen) else UNGUARDED
