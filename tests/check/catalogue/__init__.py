"""Small kernels with one bug each, their mended twins, and kernels that are right and look wrong.

They are the measure of `ferrule check`: every bug is found at its line, nothing elsewhere.
"""

from .arrays import ALIAS, COVERAGE, OPS
from .bounds import BOUNDS
from .bounds_through import BOUNDS_THROUGH
from .clean import CLEAN_MEMORY
from .clean_launches import CLEAN_LAUNCHES
from .clean_values import CLEAN_VALUES
from .declared import DECLARED
from .divergence import DIVERGENCE
from .elements import CLEAN_ELEMENTS, UNSET_ELEMENTS
from .lanes import LANES
from .memory import MEMORY
from .numbers import NUMBERS
from .planted import Case, Planted
from .race import RACES
from .rows import BOUNDS_OF_ROWS, CLEAN_ROWS

BUGS: list[Planted] = [
    *BOUNDS,
    *BOUNDS_THROUGH,
    *BOUNDS_OF_ROWS,
    *RACES,
    *DECLARED,
    *MEMORY,
    *UNSET_ELEMENTS,
    *DIVERGENCE,
    *LANES,
    *NUMBERS,
    *ALIAS,
    *COVERAGE,
    *OPS,
]
CLEAN: list[Case] = [*CLEAN_MEMORY, *CLEAN_ROWS, *CLEAN_ELEMENTS, *CLEAN_VALUES, *CLEAN_LAUNCHES]

__all__ = ["BUGS", "CLEAN", "Case", "Planted"]
