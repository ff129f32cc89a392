"""The largest numbers of a vector by magnitude, exactly, in little more than one pass over memory.

A sample gives a magnitude that the k-th largest almost surely exceeds; one pass collects all that
reach it; the k-th largest of these is found by counting the upper and then the lower halves of
their bits (magnitudes of floats are ordered as their bits are). If the sample was misleading,
everything except zeros is collected instead.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collegium.core.kernels import compiled

Array = NDArray[Any]

MAGNITUDE = np.uint32(0x7FFFFFFF)
SAMPLE = 1 << 14
BLOCK = 64
"""Numbers that are compared together: most blocks have none that is large."""

HALF = np.uint32(15)
LOW = np.uint32(0x7FFF)
SIGN = np.uint32(31)


class Selection(NamedTuple):
    """Some numbers of a vector, in their order.

    Attributes:
        positions: their positions, int32.
        negative: whether they are negative.
        magnitude: the mean of their magnitudes, summed in float64: 0 if none is selected, infinite
            or NaN if a number of the vector is.
    """

    positions: Array
    negative: Array
    magnitude: float


def select_largest(vectors: Sequence[NDArray[np.float32]], count: int, start: int = 0) -> Selection:
    """Return the numbers of largest magnitude in some vectors laid end to end.

    Of equal magnitudes the first are selected. Zeros never are, so that there may be fewer.

    Args:
        vectors: float32, contiguous.
        count: how many, at least 1.
        start: position of the first number.
    """
    bits = [vector.view(np.uint32) for vector in vectors]
    total = sum(map(len, bits))
    positions, values = np.empty(total + 1, np.int32), np.empty(total + 1, np.uint32)
    floor = _floor(bits, count, total)
    collected = _collect(bits, floor, start, positions, values)
    if collected < count and floor > 1:
        collected = _collect(bits, 1, start, positions, values)
    if collected > count:
        _trim(positions, values, collected, count)
    kept = min(count, collected)
    negative = np.empty(kept, np.bool_)
    total_magnitude = _sum(values[:kept], values[:kept].view(np.float32), negative)
    return Selection(positions[:kept], negative, total_magnitude / max(kept, 1))


def _floor(bits: Sequence[Array], count: int, total: int) -> int:
    """Return bits of a magnitude, not zero, that more than ``count`` numbers probably reach."""
    step = total // SAMPLE
    if step < 2 or count >= total:
        return 1
    sample = np.concatenate([part[::step] for part in bits]) & MAGNITUDE
    expected = count * len(sample) / total
    rank = int(expected + 4 * expected**0.5) + 4
    if rank >= len(sample):
        return 1
    return max(1, int(np.partition(sample, len(sample) - rank)[len(sample) - rank]))


def _collect(bits: Sequence[Array], floor: int, start: int, positions: Array, values: Array) -> int:
    """Write position and bits of all numbers that reach a magnitude; return their number."""
    count = 0
    for part in bits:
        count = _collect_part(part, np.uint32(floor), start, positions, values, count)
        start += len(part)
    return count


@compiled
def _collect_part(
    bits: Array, floor: np.uint32, start: int, positions: Array, values: Array, count: int
) -> int:
    first, end = np.int32(start), np.uint64(count)  # unsigned: no check for a negative index
    whole = len(bits) // BLOCK * BLOCK
    for block in range(0, whole, BLOCK):
        largest = np.uint32(0)
        for i in range(BLOCK):  # a constant, so that the loop is vectorised
            largest = max(largest, bits[block + i] & MAGNITUDE)
        if largest >= floor:
            for i in range(BLOCK):
                number = bits[block + i]
                positions[end] = first + np.int32(block + i)  # overwritten if it is not counted
                values[end] = number
                end += np.uint64((number & MAGNITUDE) >= floor)
    for i in range(whole, len(bits)):
        positions[end], values[end] = first + np.int32(i), bits[i]
        end += np.uint64((bits[i] & MAGNITUDE) >= floor)
    return int(end)


@compiled
def _trim(positions: Array, values: Array, collected: int, count: int) -> None:
    """Move the ``count`` largest, and of equals the first, to the front, in their order."""
    tally = np.zeros(65536, np.int64)
    for i in range(collected):
        tally[(values[i] & MAGNITUDE) >> HALF] += 1
    upper, above = 65535, 0
    while above + tally[upper] < count:
        above += tally[upper]
        upper -= 1
    tally[:] = 0
    for i in range(collected):
        if (values[i] & MAGNITUDE) >> HALF == upper:
            tally[values[i] & LOW] += 1
    lower = 32767
    while above + tally[lower] < count:
        above += tally[lower]
        lower -= 1
    smallest = np.uint32((upper << 15) | lower)
    ties, kept = count - above, 0
    for i in range(collected):
        magnitude = values[i] & MAGNITUDE
        positions[kept] = positions[i]
        values[kept] = values[i]
        kept += magnitude > smallest or (magnitude == smallest and ties > 0)
        ties -= magnitude == smallest


@compiled
def _sum(bits: Array, values: Array, negative: Array) -> float:
    """Return the sum of magnitudes, and write the signs."""
    even = odd = 0.0
    for i in range(0, len(bits) - 1, 2):
        even += abs(values[i])
        odd += abs(values[i + 1])
    if len(bits) % 2:
        even += abs(values[-1])
    for i in range(len(bits)):
        negative[i] = bits[i] >> SIGN
    return even + odd
