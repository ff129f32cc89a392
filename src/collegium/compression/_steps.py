"""Vectors that are constant for long stretches: where they change, and to what."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from collegium.compression._entropy import Decoder, Encoder
from collegium.compression._frame import Kind, Reader, varint
from collegium.compression._golomb import read_positions, write_positions
from collegium.errors import ProtocolError

Array = NDArray[Any]

SUBNORMAL = 256
"""Written in place of the exponent 0 for numbers that are not zero themselves."""

MANTISSA, LOWER = 23, 16
"""Bits of the significand, and those that bfloat16 does without."""


def write_steps(flat: NDArray[np.float32], kind: Kind, *, short: bool) -> bytes:
    """Return a vector as bytes.

    Args:
        flat: the vector, without negative zeros.
        kind: `Kind.STEPS` for Golomb-Rice codes of the places and the values as they are;
            `Kind.CODED_STEPS` for both by the range coder.
        short: whether all values are bfloat16 numbers.
    """
    bits = flat.view(np.uint32)
    changes = np.flatnonzero(bits[1:] != bits[:-1]) + 1
    changes = np.concatenate([np.zeros(min(len(flat), 1), np.int64), changes])
    values = bits[changes]
    head = bytes([short]) + varint(len(changes))
    if kind == Kind.CODED_STEPS:
        encoder = Encoder()
        encoder.classed(np.diff(changes, prepend=-1) - 1)
        exponents = ((values >> MANTISSA) & 255).astype(np.int32)
        exponents[(exponents == 0) & (values != 0)] = SUBNORMAL
        encoder.counted(exponents)
        coded = encoder.finish()
        return head + varint(len(coded)) + coded + _write_rest(values[exponents != 0], short=short)
    places = changes.astype(np.int32)
    nothing = np.zeros(len(places), np.bool_)
    code = write_positions(places, nothing, len(flat), adaptive=True, signed=False)
    raw = (values >> LOWER).astype("<u2") if short else values.astype("<u4")
    return head + raw.tobytes() + code


def read_steps(reader: Reader, kind: Kind, total: int) -> NDArray[np.float32]:
    """Return the vector of ``total`` numbers that `write_steps` wrote.

    Raises:
        ProtocolError: the bytes are damaged.
    """
    short, count = reader.take(1)[0] != 0, reader.varint()
    if count > total or (count == 0) != (total == 0):
        raise ProtocolError(f"encoded tensors are damaged: {count} steps in {total} numbers")
    if kind == Kind.CODED_STEPS:
        decoder = Decoder(reader.words(reader.varint()))
        changes = np.cumsum(decoder.classed(count) + 1) - 1
        exponents = decoder.counted(count)
        if exponents.max(initial=0) > SUBNORMAL:
            raise ProtocolError("encoded tensors are damaged: there is no such exponent")
        bits = (exponents % SUBNORMAL).astype(np.uint32) << np.uint32(MANTISSA)
        present = exponents != 0
        bits[present] |= _read_rest(reader, int(np.count_nonzero(present)), short=short)
    else:
        raw = reader.array("<u2" if short else "<u4", count).astype(np.uint32)
        bits = raw << np.uint32(LOWER) if short else raw
        places, _ = read_positions(reader, count, total, adaptive=True, signed=False)
        changes = places.astype(np.int64)
    values = bits.view(np.float32)
    if count and (changes[0] != 0 or changes[-1] >= total or not np.isfinite(values).all()):
        raise ProtocolError("encoded tensors are damaged: a step is out of range")
    return np.repeat(values, np.diff(changes, append=total))


def _write_rest(bits: Array, *, short: bool) -> bytes:
    """Return sign and significand of float32 numbers, which hardly follow any law, as they are."""
    upper = ((bits >> 24) & 128) | ((bits >> LOWER) & 127)
    lower = b"" if short else bits.astype("<u2").tobytes()
    return upper.astype(np.uint8).tobytes() + lower


def _read_rest(reader: Reader, count: int, *, short: bool) -> NDArray[np.uint32]:
    """Return what `_write_rest` wrote."""
    bits = reader.array("u1", count).astype(np.uint32)
    bits = ((bits & np.uint32(128)) << np.uint32(24)) | ((bits & np.uint32(127)) << np.uint32(16))
    if not short:
        bits |= reader.array("<u2", count)
    return bits
