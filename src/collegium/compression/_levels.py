"""Vectors rounded at random to a few equally spaced levels, without bias."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from collegium.core.kernels import compiled

Array = NDArray[Any]

SPLITMIX = (
    np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB),
)  # fmt: skip
"""The increment and the two multipliers of SplitMix64."""

UNIT = 2.0**-53


@compiled
def quantise(
    vector: Array, scale: float, levels: int, seed: int, start: int, symbols: Array
) -> None:
    """Round |x| / scale * levels up or down at random, so that the expected value is right.

    Args:
        vector: (n,), float32, the numbers x; no magnitude exceeds ``scale``, except by rounding.
        scale: the value of the highest level, above 0.
        levels: number of levels on either side of zero.
        seed: of the random numbers, 63 bits.
        start: position of the first number; each position has a random number of its own.
        symbols: (n,), int32, receives the signed level plus ``levels``, from 0 to twice ``levels``.
    """
    factor = levels / np.float64(scale)
    first = np.uint64(start) + np.uint64(1)
    for i in range(len(vector)):
        z = np.uint64(seed) + (first + np.uint64(i)) * SPLITMIX[0]
        z = (z ^ (z >> np.uint64(30))) * SPLITMIX[1]
        z = (z ^ (z >> np.uint64(27))) * SPLITMIX[2]
        z ^= z >> np.uint64(31)
        level = np.int32(abs(vector[i]) * factor + (z >> np.uint64(11)) * UNIT)
        level = min(level, np.int32(levels))
        symbols[i] = levels + (level if vector[i] > 0 else -level)


@compiled
def tally(symbols: Array, size: int) -> Array:
    """Return how often each number occurs, (size,), int64.

    Args:
        symbols: (n,), int32, from 0 to ``size - 1``.
        size: number of different symbols.
    """
    counts = np.zeros(size, np.int64)
    for i in range(len(symbols)):
        counts[symbols[i]] += 1
    return counts
