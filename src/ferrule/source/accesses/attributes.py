"""The thread attributes, as terms."""

from __future__ import annotations

from . import terms
from .terms import Term

MOST = 2**31 - 1  # of a grid's axis, and of what `x_shape` holds
_LARGEST = {
    "thread_index_in_simdgroup": 31, "thread_index_in_quadgroup": 3,
    "simdgroup_index_in_threadgroup": 31, "quadgroup_index_in_threadgroup": 255,
    "thread_index_in_threadgroup": 1023, "thread_position_in_threadgroup": 1023,
    "threads_per_threadgroup": 1024, "dispatch_threads_per_threadgroup": 1024,
    "simdgroups_per_threadgroup": 32, "quadgroups_per_threadgroup": 256,
    "dispatch_simdgroups_per_threadgroup": 32, "dispatch_quadgroups_per_threadgroup": 256,
}  # fmt: skip
CONSTANT = {"threads_per_simdgroup": 32, "thread_execution_width": 32}


def attribute_range(name: str) -> tuple[int, int]:
    """The least and the largest that an attribute can be."""
    least = 1 if "_per_" in name or name == "grid_size" else 0
    return least, _LARGEST.get(name, MOST)


def attribute(name: str, axis: str = "") -> Term:
    """An attribute, or what it is along an axis, as a term."""
    return terms.symbol(f"{name}.{axis}" if axis else name, *attribute_range(name))
