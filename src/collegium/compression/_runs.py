"""Kept positions written run by run, for vectors that change seldom, as after `cer`.

A run is a stretch of neighbours that are all kept and of one sign. The gaps in front of the runs,
their lengths and their signs are written; a run that follows another without a gap has the other
sign.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from collegium.compression._entropy import RangeDecoder, RangeEncoder
from collegium.errors import ProtocolError

Array = NDArray[Any]


def write_runs(positions: Array, negative: Array) -> bytes:
    """Return kept positions and their signs as bytes.

    Args:
        positions: (n,), increasing.
        negative: (n,), whether each number is negative.
    """
    begins = np.ones(len(positions), np.bool_)
    begins[1:] = (np.diff(positions) != 1) | (negative[1:] != negative[:-1])
    first = np.flatnonzero(begins)
    lengths = np.diff(first, append=len(positions))
    starts = positions[first].astype(np.int64)
    gaps = starts - np.concatenate([[0], (starts + lengths)[:-1]])
    encoder = RangeEncoder()
    encoder.numbers(np.array([len(first)]))
    encoder.classified(gaps)
    encoder.classified(lengths)
    encoder.bits(negative[first][_has_free_sign(gaps)])
    return encoder.finish()


def read_runs(words: NDArray[np.uint32], total: int) -> tuple[Array, Array]:
    """Return the positions and signs that `write_runs` wrote.

    Args:
        words: the bytes, as 32-bit words.
        total: what every position lies below.

    Raises:
        ProtocolError: the bytes are damaged.
    """
    decoder = RangeDecoder(words)
    count = int(decoder.numbers(1)[0])
    if count > total:
        raise ProtocolError(f"encoded tensors are damaged: {count} runs in {total} numbers")
    gaps, lengths = decoder.classified(count), decoder.classified(count)
    starts = np.cumsum(gaps + lengths) - lengths
    if count and ((lengths < 1).any() or starts[-1] + lengths[-1] > total):
        raise ProtocolError("encoded tensors are damaged: a run is out of range")
    free = _has_free_sign(gaps)
    signs = np.zeros(count, np.bool_)
    signs[free] = decoder.bits(int(np.count_nonzero(free)))
    since = np.arange(count) - np.maximum.accumulate(np.where(free, np.arange(count), 0))
    signs = signs[np.arange(count) - since] ^ (since % 2 == 1)
    offsets = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    positions = (np.repeat(starts, lengths) + offsets).astype(np.int32)
    return positions, np.repeat(signs, lengths)


def _has_free_sign(gaps: Array) -> NDArray[np.bool_]:
    """Return for each run whether its sign does not follow from the run before."""
    free = gaps > 0
    free[:1] = True
    return free
