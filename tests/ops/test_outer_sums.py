"""The sums of outer products over results, of the kinds of products that gather."""

from __future__ import annotations

import numpy as np
import pytest

import ferrule
from ferrule import KernelError
from ferrule.ops.gathered import outer


def arrays(results: tuple[int, ...], experts: int) -> list[np.ndarray]:
    """Three tokens' rows, what was made of them, the matrices chosen, and their batch."""
    rows = np.random.default_rng(0).integers(-4, 5, (3, 1, 2, 3)).astype(np.float32)
    made = np.random.default_rng(1).integers(-4, 5, (*results, 2, 5)).astype(np.float32)
    chosen = np.arange(3 * experts, dtype=np.int32).reshape(3, experts) % 4
    return [rows, made, chosen, np.zeros((4, 1, 1), np.float32)]


@pytest.mark.parametrize("experts", [0, 1, 2])
def test_sums_of_tokens_and_their_experts(experts: int) -> None:
    rows, made, chosen, like = arrays((3, experts), experts)
    with ferrule.checking() as found:
        sums = outer("tr")(rows, made, chosen, like)
    assert not found
    expected = np.zeros((4, 3, 5))
    for token, expert in np.ndindex(3, experts):
        expected[chosen[token, expert]] += rows[token, 0].T @ made[token, expert]
    np.testing.assert_array_equal(sums, expected)


@pytest.mark.parametrize(("results", "experts"), [((3, 2), 0), ((6,), 0), ((3, 3), 2), ((4, 2), 2)])
def test_there_is_a_result_for_each_expert(results: tuple[int, ...], experts: int) -> None:
    with pytest.raises(KernelError, match="outer_sums"):
        outer("tr")(*arrays(results, experts))
