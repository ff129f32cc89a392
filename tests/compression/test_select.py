import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from collegium.compression._select import SAMPLE, select_largest

DRAWS = np.random.default_rng(0)
LONG = 5 * SAMPLE


def periodic() -> NDArray[np.float32]:
    """Numbers of which the regular sample holds only small ones."""
    found = DRAWS.standard_normal(LONG)
    found[::5] = 1e-3
    return found.astype(np.float32)


VECTORS = {
    "normal": DRAWS.standard_normal(LONG).astype(np.float32),
    "heavy tails": (DRAWS.standard_normal(LONG) ** 7).astype(np.float32),
    "rounded": (DRAWS.standard_normal(LONG) * 3).round().astype(np.float32),
    "equal": np.full(LONG, -2.5, np.float32),
    "rising": np.arange(LONG, dtype=np.float32),
    "falling": -np.arange(LONG, dtype=np.float32)[::-1].copy(),
    "mostly zero": np.where(np.arange(LONG) % 997 == 5, 3, 0).astype(np.float32),
    "hidden from the sample": periodic(),
    "tiny": (DRAWS.standard_normal(LONG) * 1e-41).astype(np.float32),
    "negative zeros": np.where(np.arange(LONG) % 3 == 0, -0.0, 1.0).astype(np.float32),
    "short": DRAWS.standard_normal(50).astype(np.float32),
    "one": np.ones(1, np.float32),
}


@pytest.fixture(autouse=True)
def whole_numbers() -> None:
    """A test before may have made this process take denormal numbers for 0."""
    torch.set_flush_denormal(False)


def by_sorting(vector: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Positions of the largest magnitudes, the first of equals; no zeros.

    Bits of magnitudes sort as the numbers do.
    """
    magnitudes = (vector.view(np.uint32) & 0x7FFFFFFF).astype(np.int64)
    order = np.argsort(-magnitudes, kind="stable")[:count]
    return np.sort(order[magnitudes[order] != 0])


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.2, 0.7, 1.0])
@pytest.mark.parametrize("vector", VECTORS.values(), ids=VECTORS)
def test_the_largest_are_those_that_sorting_gives(vector: NDArray[np.float32], share: float):
    count = max(1, round(share * len(vector)))
    kept = select_largest([vector], count)
    expected = by_sorting(vector, count)
    np.testing.assert_array_equal(kept.positions, expected)
    np.testing.assert_array_equal(kept.negative, vector[expected] < 0)
    mean = np.abs(vector[expected].astype(np.float64)).sum() / max(len(expected), 1)
    assert kept.magnitude == pytest.approx(mean, rel=1e-12)


def test_pieces_count_as_one_vector_that_begins_at_a_position():
    vector = VECTORS["rounded"]
    pieces = [vector[:3], vector[3:3], vector[3:4000], vector[4000:]]
    whole = select_largest([vector], 5000)
    parts = select_largest(pieces, 5000, start=70)
    np.testing.assert_array_equal(parts.positions, whole.positions + 70)
    np.testing.assert_array_equal(parts.negative, whole.negative)
