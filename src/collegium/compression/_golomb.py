"""Golomb-Rice codes of increasing positions: the gaps between them, and a bit for each sign.

A gap g is written with a parameter b as floor(g / 2^b) ones, a zero, and the b low bits of g. The
parameter is one for all gaps (Golomb 1966; Sattler et al. 2019, Eq. 14 and 15), or follows the mean
of the latest gaps, so that regions that are dense and regions that are sparse both get their own.
A gap that needs `ESCAPE` ones or more is written as that many ones and its `RAW` bits, which bounds
the length of a code whatever the data.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collegium.compression._frame import Reader, words
from collegium.core.kernels import compiled
from collegium.errors import ProtocolError

Array = NDArray[Any]

ESCAPE, RAW = 32, 31
WINDOW = 32
"""Gaps after which sum and count of the followed mean are halved."""

LONGEST = ESCAPE + RAW + 1
"""Bits that the code of a position has at most, its sign included."""

_ONE = np.uint64(1)
_WORD = np.uint64(0xFFFFFFFF)
_BRUIJN = np.uint64(0x03F79D71B4CB0A89)
_LOG2 = np.zeros(64, np.int64)
for _exponent in range(64):
    _LOG2[((0x03F79D71B4CB0A89 << _exponent) & 0xFFFFFFFFFFFFFFFF) >> 58] = _exponent


def parameter(density: float) -> int:
    """Return the best parameter b* where each number is kept with probability ``density``.

    b* = 1 + floor(log2(log((sqrt 5 - 1) / 2) / log(1 - density))), Sattler et al. (2019), Eq. 15.
    """
    if density >= 1:
        return 0
    golden = (math.sqrt(5) - 1) / 2
    return max(0, 1 + math.floor(math.log2(math.log(golden) / math.log1p(-density))))


def expected_bits(density: float) -> float:
    """Return the expected bits of a position without its sign (Sattler et al. 2019, Eq. 14)."""
    b = parameter(density)
    return float(b + 1 / (1 - (1 - density) ** (2**b)))


def write_positions(
    positions: Array, negative: Array, total: int, *, adaptive: bool, signed: bool = True
) -> bytes:
    """Return the code of increasing positions below ``total``, and of their signs if ``signed``.

    The first byte is the parameter, so that no reader has to compute logarithms as the writer did.
    """
    room = np.empty(len(positions) * LONGEST // 32 + 2, np.uint32)
    start = parameter(len(positions) / total) if len(positions) else 0
    used = _write(positions, negative, start, adaptive, int(signed), room)
    return bytes([start]) + words(room[:used])


def read_positions(
    reader: Reader, count: int, total: int, *, adaptive: bool, signed: bool = True
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Return what `write_positions` wrote; where signs were not written, all are positive.

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
def _follow(b: int, gaps: int, seen: int) -> int:
    """Return the parameter for gaps of mean gaps / seen: 2^b is nearest below 0.97 (mean + 1)."""
    level = gaps + seen - ((gaps + seen) >> 5)
    while b > 0 and (seen << b) > level:
        b -= 1
    while (seen << (b + 1)) <= level:
        b += 1
    return b


@compiled
def _write(
    positions: Array, negative: Array, b: int, adaptive: bool, signed: int, words: Array
) -> int:
    """Write codes into words from their low bits up; return how many words are used."""
    pending, bits, used, last = np.uint64(0), 0, 0, -1
    gaps, seen = 4 << b, 4
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
            gaps, seen = gaps + gap, seen + 1
            if seen == WINDOW:
                gaps, seen = gaps >> 1, seen >> 1
            b = _follow(b, gaps, seen)
    while bits > 0:
        words[used] = pending & _WORD
        pending, bits, used = pending >> np.uint64(32), bits - 32, used + 1
    return used


@compiled
def _word(words: Array, index: int) -> np.uint64:
    """Return a word; there are zeros behind the last."""
    return np.uint64(words[index]) if index < len(words) else np.uint64(0)


@compiled
def _read(
    words: Array, total: int, b: int, adaptive: bool, signed: int, places: Array, negative: Array
) -> bool:
    """Read codes; say whether all lay within the words and the places below ``total``."""
    gap: Any
    last: Any
    pending, bits, used, last, gaps, seen = np.uint64(0), 0, 0, -1, 4 << b, 4
    for i in range(len(places)):
        if bits < 32:
            pending |= _word(words, used) << np.uint64(bits)
            bits, used = bits + 32, used + 1
        zeros = ~pending  # not zero, since at most 63 bits are pending
        ones = _LOG2[((zeros & (~zeros + _ONE)) * _BRUIJN) >> np.uint64(58)]
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
        places[i], negative[i] = last, (pending >> np.uint64(low)) & np.uint64(signed)
        pending, bits = pending >> np.uint64(low + signed), bits - low - signed
        if adaptive:
            gaps, seen = gaps + gap, seen + 1
            if seen == WINDOW:
                gaps, seen = gaps >> 1, seen >> 1
            b = _follow(b, gaps, seen)
    return used - bits // 32 <= len(words)
