"""Vectors that are constant for long stretches: where they change, and to which value."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from collegium.compression._entropy import RangeDecoder, RangeEncoder
from collegium.compression._frame import FrameKind, FrameReader, varint
from collegium.compression._golomb import read_positions, write_positions
from collegium.errors import ProtocolError

Array = NDArray[Any]

SUBNORMAL = 256
"""Written instead of the exponent 0 for numbers that are not zero themselves."""

MANTISSA_BITS, DROPPED_BITS = 23, 16
"""Bits of the significand, and those of a float32 that bfloat16 does without."""


def write_steps(flat: NDArray[np.float32], kind: FrameKind, *, short: bool) -> bytes:
    """Return a vector as bytes.

    Args:
        flat: the vector, without negative zeros.
        kind: `FrameKind.STEPS` for Golomb-Rice codes of the positions and the values as they are;
            `FrameKind.CODED_STEPS` for both by the range coder.
        short: whether all values are bfloat16 numbers.
    """
    bits = flat.view(np.uint32)
    changes = np.flatnonzero(bits[1:] != bits[:-1]) + 1
    changes = np.concatenate([np.zeros(min(len(flat), 1), np.int64), changes])
    values = bits[changes]
    header = bytes([short]) + varint(len(changes))
    if kind == FrameKind.CODED_STEPS:
        encoder = RangeEncoder()
        encoder.classified(np.diff(changes, prepend=-1) - 1)
        exponents = ((values >> MANTISSA_BITS) & 255).astype(np.int32)
        exponents[(exponents == 0) & (values != 0)] = SUBNORMAL
        encoder.counted(exponents)
        coded = encoder.finish()
        rest = _write_significands(values[exponents != 0], short=short)
        return header + varint(len(coded)) + coded + rest
    positions = changes.astype(np.int32)
    signs = np.zeros(len(positions), np.bool_)
    code = write_positions(positions, signs, len(flat), adaptive=True, signed=False)
    raw = (values >> DROPPED_BITS).astype("<u2") if short else values.astype("<u4")
    return header + raw.tobytes() + code


def read_steps(reader: FrameReader, kind: FrameKind, total: int) -> NDArray[np.float32]:
    """Return the vector that `write_steps` wrote.

    Args:
        reader: of the frame's content.
        kind: as for `write_steps`.
        total: the length of the vector.

    Raises:
        ProtocolError: the bytes are damaged.
    """
    short, count = reader.take(1)[0] != 0, reader.varint()
    if count > total or (count == 0) != (total == 0):
        raise ProtocolError(f"encoded tensors are damaged: {count} steps in {total} numbers")
    if kind == FrameKind.CODED_STEPS:
        decoder = RangeDecoder(reader.words(reader.varint()))
        changes = np.cumsum(decoder.classified(count) + 1) - 1
        exponents = decoder.counted(count)
        if exponents.max(initial=0) > SUBNORMAL:
            raise ProtocolError("encoded tensors are damaged: there is no such exponent")
        bits = (exponents % SUBNORMAL).astype(np.uint32) << np.uint32(MANTISSA_BITS)
        nonzero = exponents != 0
        bits[nonzero] |= _read_significands(reader, int(np.count_nonzero(nonzero)), short=short)
    else:
        raw = reader.array("<u2" if short else "<u4", count).astype(np.uint32)
        bits = raw << np.uint32(DROPPED_BITS) if short else raw
        positions, _ = read_positions(reader, count, total, adaptive=True, signed=False)
        changes = positions.astype(np.int64)
    values = bits.view(np.float32)
    if count and (changes[0] != 0 or changes[-1] >= total or not np.isfinite(values).all()):
        raise ProtocolError("encoded tensors are damaged: a step is out of range")
    return np.repeat(values, np.diff(changes, append=total))


def _write_significands(bits: Array, *, short: bool) -> bytes:
    """Return sign and significand of float32 numbers as they are: no model would shorten them."""
    upper = ((bits >> 24) & 128) | ((bits >> DROPPED_BITS) & 127)
    lower = b"" if short else bits.astype("<u2").tobytes()
    return upper.astype(np.uint8).tobytes() + lower


def _read_significands(reader: FrameReader, count: int, *, short: bool) -> NDArray[np.uint32]:
    bits = reader.array("u1", count).astype(np.uint32)
    bits = ((bits & np.uint32(128)) << np.uint32(24)) | ((bits & np.uint32(127)) << np.uint32(16))
    if not short:
        bits |= reader.array("<u2", count)
    return bits
