"""Ops that are ready to use, each written as any user of ferrule would write it.

Nothing here is special: the modules import nothing of ferrule but its public names, and each is a
model to copy: a rule, bodies, derivatives, a reference.
"""

from __future__ import annotations

from .counting import histogram
from .segments import segment_sum
from .selection import topk

__all__ = ["histogram", "segment_sum", "topk"]
