"""The largest numbers of a vector by magnitude, exactly, in little more than one pass over memory.

A sample gives a magnitude that the k-th largest surely exceeds; one pass collects what reaches it;
the k-th largest of these is found by counting the upper and then the lower halves of their bits
(magnitudes of floats are ordered as their bits are). Where the sample misled, everything but zeros
is collected instead.
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
"""Numbers that are looked at together: most have none that is large."""

HALF = np.uint32(15)
LOW = np.uint32(0x7FFF)
SIGN = np.uint32(31)


class Kept(NamedTuple):
    """Some numbers of a vector, in their order.

    Attributes:
        positions: where they stand, int32.
        negative: whether they are negative.
        magnitude: the mean of their magnitudes, summed in float64: 0 where none is kept, infinite
            or NaN where a number of the vector is.
    """

    positions: Array
    negative: Array
    magnitude: float


def keep_largest(vectors: Sequence[NDArray[np.float32]], count: int, start: int = 0) -> Kept:
    """Return the ``count`` numbers of largest magnitude in some vectors laid end to end.

    Of equal magnitudes the first are kept. Zeros are never kept, so that there may be fewer.

    Args:
        vectors: float32, contiguous.
        count: at least 1.
        start: position of the first number.
    """
    bits = [vector.view(np.uint32) for vector in vectors]
    total = sum(map(len, bits))
    positions, found = np.empty(total + 1, np.int32), np.empty(total + 1, np.uint32)
    floor = _floor(bits, count, total)
    collected = _collect(bits, floor, start, positions, found)
    if collected < count and floor > 1:
        collected = _collect(bits, 1, start, positions, found)
    if collected > count:
        _trim(positions, found, collected, count)
    kept = min(count, collected)
    negative = np.empty(kept, np.bool_)
    total_magnitude = _sum(found[:kept], found[:kept].view(np.float32), negative)
    return Kept(positions[:kept], negative, total_magnitude / max(kept, 1))


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


def _collect(bits: Sequence[Array], floor: int, start: int, positions: Array, found: Array) -> int:
    """Note place and bits of all numbers that reach a magnitude; return how many there are."""
    count = 0
    for part in bits:
        count = _collect_part(part, np.uint32(floor), start, positions, found, count)
        start += len(part)
    return count


@compiled
def _collect_part(
    bits: Array, floor: np.uint32, start: int, positions: Array, found: Array, count: int
) -> int:
    first, here = np.int32(start), np.uint64(count)  # unsigned: no index from the end is looked for
    whole = len(bits) // BLOCK * BLOCK
    for block in range(0, whole, BLOCK):
        largest = np.uint32(0)
        for i in range(BLOCK):  # a constant, so that the loop is done in vectors
            largest = max(largest, bits[block + i] & MAGNITUDE)
        if largest >= floor:
            for i in range(BLOCK):
                number = bits[block + i]
                positions[here] = first + np.int32(block + i)  # overwritten if it is not counted
                found[here] = number
                here += np.uint64((number & MAGNITUDE) >= floor)
    for i in range(whole, len(bits)):
        positions[here], found[here] = first + np.int32(i), bits[i]
        here += np.uint64((bits[i] & MAGNITUDE) >= floor)
    return int(here)


@compiled
def _trim(positions: Array, found: Array, collected: int, count: int) -> None:
    """Move the ``count`` largest, and of equals the first, to the front, in their order."""
    tally = np.zeros(65536, np.int64)
    for i in range(collected):
        tally[(found[i] & MAGNITUDE) >> HALF] += 1
    upper, above = 65535, 0
    while above + tally[upper] < count:
        above += tally[upper]
        upper -= 1
    tally[:] = 0
    for i in range(collected):
        if (found[i] & MAGNITUDE) >> HALF == upper:
            tally[found[i] & LOW] += 1
    lower = 32767
    while above + tally[lower] < count:
        above += tally[lower]
        lower -= 1
    smallest = np.uint32((upper << 15) | lower)
    ties, kept = count - above, 0
    for i in range(collected):
        magnitude = found[i] & MAGNITUDE
        positions[kept] = positions[i]
        found[kept] = found[i]
        kept += magnitude > smallest or (magnitude == smallest and ties > 0)
        ties -= magnitude == smallest


@compiled
def _sum(bits: Array, values: Array, negative: Array) -> float:
    """Return the sum of magnitudes, and note the signs."""
    even = odd = 0.0
    for i in range(0, len(bits) - 1, 2):
        even += abs(values[i])
        odd += abs(values[i + 1])
    if len(bits) % 2:
        even += abs(values[-1])
    for i in range(len(bits)):
        negative[i] = bits[i] >> SIGN
    return even + odd
