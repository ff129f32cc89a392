"""Golomb-Rice codes of increasing positions: the gaps between them, and a bit for each sign.

A gap g is written with a parameter b as floor(g / 2^b) ones, a zero, and the b low bits of g. There
is one parameter for all gaps (Golomb 1966; Sattler et al. 2019, Eq. 14 and 15), or it follows the
mean of the latest gaps, so that it suits both dense and sparse regions. A gap that needs `ESCAPE`
ones or more is written as that many ones and its `RAW` bits, which bounds the length of a code for
any data.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collegium.compression._frame import FrameReader, words_to_bytes
from collegium.core.kernels import compiled
from collegium.errors import ProtocolError

Array = NDArray[Any]

ESCAPE, RAW = 32, 31
WINDOW = 32
"""Gaps after which sum and count of the running mean are halved."""

MAX_BITS = ESCAPE + RAW + 1
"""Bits that the code of a position has at most, its sign included."""

_ONE = np.uint64(1)
_WORD = np.uint64(0xFFFFFFFF)
_DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)
_LOG2 = np.zeros(64, np.int64)
for _exponent in range(64):
    _LOG2[((0x03F79D71B4CB0A89 << _exponent) & 0xFFFFFFFFFFFFFFFF) >> 58] = _exponent


def parameter(density: float) -> int:
    """Return the best parameter b* if each number is kept with probability ``density``.

    b* = 1 + floor(log2(log((sqrt 5 - 1) / 2) / log(1 - density))), Sattler et al. (2019), Eq. 15.
    """
    if density >= 1:
        return 0
    golden = (math.sqrt(5) - 1) / 2
    return max(0, 1 + math.floor(math.log2(math.log(golden) / math.log1p(-density))))


def write_positions(
    positions: Array, negative: Array, total: int, *, adaptive: bool, signed: bool = True
) -> bytes:
    """Return the code of kept positions, and of their signs.

    The first byte is the parameter, so that no reader has to compute the same logarithms.

    Args:
        positions: (n,), increasing.
        negative: (n,), whether each number is negative.
        total: what every position lies below.
        adaptive: whether the parameter follows the gaps.
        signed: whether signs are written.
    """
    room = np.empty(len(positions) * MAX_BITS // 32 + 2, np.uint32)
    start = parameter(len(positions) / total) if len(positions) else 0
    used = _write(positions, negative, start, adaptive, int(signed), room)
    return bytes([start]) + words_to_bytes(room[:used])


def read_positions(
    reader: FrameReader, count: int, total: int, *, adaptive: bool, signed: bool = True
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Return the positions and signs that `write_positions` wrote.

    Args:
        reader: of the frame's content.
        count: number of positions.
        total: what every position lies below.
        adaptive: whether the parameter follows the gaps.
        signed: whether signs were written; otherwise all are positive.

    Raises:
        ProtocolError: the code does not give ``count`` positions below ``total``.
    """
    start, code = reader.take(1)[0], reader.words()
    if start > RAW or count > min(total, 32 * len(code)):  # no code is shorter than a bit
        raise ProtocolError(f"encoded tensors are damaged: {count} of {total} numbers are kept")
    positions, negative = np.empty(count, np.int32), np.empty(count, np.bool_)
    if not _read(code, total, start, adaptive, int(signed), positions, negative):
        raise ProtocolError("encoded tensors are damaged: a position is out of range")
    return positions, negative


@compiled
def _adapt(b: int, total: int, count: int) -> int:
    """Return the parameter for gaps of mean total / count: 2^b is nearest below 0.97 (mean + 1)."""
    level = total + count - ((total + count) >> 5)
    while b > 0 and (count << b) > level:
        b -= 1
    while (count << (b + 1)) <= level:
        b += 1
    return b


@compiled
def _write(
    positions: Array, negative: Array, b: int, adaptive: bool, signed: int, words: Array
) -> int:
    """Write codes into words, low bits first; return the number of words used."""
    pending, bits, used, last = np.uint64(0), 0, 0, -1
    gaps, count = 4 << b, 4
    for i in range(len(positions)):
        gap = positions[i] - last - 1
        last = positions[i]
        ones = min(gap >> b, ESCAPE)
        pending |= ((_ONE << np.uint64(ones)) - _ONE) << np.uint64(bits)
        bits += ones + (ones < ESCAPE)
        if bits >= 32:
            words[used] = pending & _WORD
            pending, bits, used = pending >> np.uint64(32), bits - 32, used + 1
        low = b if ones < ESCAPE else RAW
        code = (gap & ((1 << low) - 1)) | ((signed & negative[i]) << low)
        pending |= np.uint64(code) << np.uint64(bits)
        bits += low + signed
        if bits >= 32:
            words[used] = pending & _WORD
            pending, bits, used = pending >> np.uint64(32), bits - 32, used + 1
        if adaptive:
            gaps, count = gaps + gap, count + 1
            if count == WINDOW:
                gaps, count = gaps >> 1, count >> 1
            b = _adapt(b, gaps, count)
    while bits > 0:
        words[used] = pending & _WORD
        pending, bits, used = pending >> np.uint64(32), bits - 32, used + 1
    return used


@compiled
def _word(words: Array, index: int) -> np.uint64:
    """Return a word, or zero behind the last."""
    return np.uint64(words[index]) if index < len(words) else np.uint64(0)


@compiled
def _read(
    words: Array, total: int, b: int, adaptive: bool, signed: int, positions: Array, negative: Array
) -> bool:
    """Read codes; return whether all lay within the words and the positions below ``total``."""
    gap: Any
    last: Any
    pending, bits, used, last, gaps, count = np.uint64(0), 0, 0, -1, 4 << b, 4
    for i in range(len(positions)):
        if bits < 32:
            pending |= _word(words, used) << np.uint64(bits)
            bits, used = bits + 32, used + 1
        zeros = ~pending  # not zero, since at most 63 bits are pending
        ones = _LOG2[((zeros & (~zeros + _ONE)) * _DE_BRUIJN) >> np.uint64(58)]
        low, gap = (b, ones << b) if ones < ESCAPE else (RAW, 0)
        taken = ones + 1 if ones < ESCAPE else ESCAPE
        pending, bits = pending >> np.uint64(taken), bits - taken
        if bits < low + signed:
            pending |= _word(words, used) << np.uint64(bits)
            bits, used = bits + 32, used + 1
        gap += np.int64(pending & ((_ONE << np.uint64(low)) - _ONE))
        last += gap + 1
        if last >= total:
            return False
        positions[i], negative[i] = last, (pending >> np.uint64(low)) & np.uint64(signed)
        pending, bits = pending >> np.uint64(low + signed), bits - low - signed
        if adaptive:
            gaps, count = gaps + gap, count + 1
            if count == WINDOW:
                gaps, count = gaps >> 1, count >> 1
            b = _adapt(b, gaps, count)
    return used - bits // 32 <= len(words)
