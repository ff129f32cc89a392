"""Vectors of zeros and of one magnitude with either sign: how they are made, written and read."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collegium.compression._frame import Kind, Layout, Reader, varint
from collegium.compression._golomb import read_positions, write_positions
from collegium.compression._groups import read_groups, write_groups
from collegium.compression._runs import read_runs, write_runs
from collegium.compression._select import keep_largest
from collegium.core.kernels import compiled
from collegium.errors import ProtocolError

Array = NDArray[Any]

BLOCK = 4096
"""Numbers that are written at a time."""


class Ternary(NamedTuple):
    """A vector of which some numbers are kept.

    Attributes:
        positions: where these are, increasing, int32.
        negative: whether they are negative.
        magnitudes: what they are but for their sign: one number, or one for each tensor, float32.
    """

    positions: Array
    negative: Array
    magnitudes: Array


def ternarise(
    vectors: list[NDArray[np.float32]], layout: Layout, fraction: float, *, by_tensor: bool
) -> Ternary:
    """Return the largest numbers of some vectors, each replaced by their mean magnitude.

    Args:
        vectors: one for each tensor of the layout.
        layout: where they stand.
        fraction: of all numbers, which share is kept; one at least. Zeros are never kept.
        by_tensor: whether the share is taken of every tensor instead, each with a mean of its own.
    """
    if not layout.total:
        return Ternary(np.zeros(0, np.int32), np.zeros(0, np.bool_), np.zeros(1, np.float32))
    if by_tensor:
        parts = [
            keep_largest([vector], max(1, round(fraction * len(vector))), int(start))
            for vector, start in zip(vectors, layout.starts[:-1], strict=True)
        ]
    else:
        parts = [keep_largest(vectors, max(1, round(fraction * layout.total)))]
    magnitudes = np.array([part.magnitude for part in parts])
    if not np.isfinite(magnitudes).all():
        layout.refuse_infinite(vectors)
    whole = parts[0] if len(parts) == 1 else None
    positions = whole.positions if whole else np.concatenate([part.positions for part in parts])
    negative = whole.negative if whole else np.concatenate([part.negative for part in parts])
    return Ternary(positions, negative, magnitudes.astype(np.float32))


def write_ternary(ternary: Ternary, layout: Layout, kind: Kind) -> bytes:
    """Return a vector as bytes, written as ``kind`` says; none where nothing is kept."""
    positions, negative, magnitudes = ternary
    if not len(positions):
        return b""
    head = varint(len(magnitudes)) + magnitudes.astype("<f4").tobytes()
    if kind == Kind.GROUPS:
        return head + write_groups(positions, negative, layout)
    if kind == Kind.RUNS:
        return head + write_runs(positions, negative)
    code = write_positions(positions, negative, layout.total, adaptive=kind == Kind.ADAPTIVE)
    return head + varint(len(positions)) + code


def read_ternary(kind: Kind, reader: Reader, layout: Layout) -> Ternary:
    """Return the vector that `write_ternary` wrote.

    Raises:
        ProtocolError: the bytes are damaged.
    """
    if not len(reader):
        return Ternary(np.zeros(0, np.int32), np.zeros(0, np.bool_), np.zeros(1, np.float32))
    count = reader.varint()
    if count not in (1, len(layout.names)):
        raise ProtocolError(
            f"encoded tensors are damaged: {count} magnitudes for {len(layout.names)} tensors"
        )
    magnitudes = reader.array("<f4", count).astype(np.float32)
    if not np.isfinite(magnitudes).all():
        raise ProtocolError("encoded tensors are damaged: a magnitude is not a finite number")
    if kind == Kind.GROUPS:
        return Ternary(*read_groups(reader.words(), layout), magnitudes)
    if kind == Kind.RUNS:
        return Ternary(*read_runs(reader.words(), layout.total), magnitudes)
    kept, adaptive = reader.varint(), kind == Kind.ADAPTIVE
    positions, negative = read_positions(reader, kept, layout.total, adaptive=adaptive)
    return Ternary(positions, negative, magnitudes)


def fill(ternary: Ternary, layout: Layout) -> NDArray[np.float32]:
    """Return the vector written out."""
    flat = np.empty(layout.total, np.float32)
    many = len(ternary.magnitudes) == len(layout.names)
    starts = layout.starts if many else layout.starts[[0, -1]]
    bounds = np.searchsorted(ternary.positions, starts)
    for i, magnitude in enumerate(ternary.magnitudes):
        kept = slice(bounds[i], bounds[i + 1])
        positions, negative = ternary.positions[kept], ternary.negative[kept]
        _put(flat[starts[i] : starts[i + 1]], starts[i], positions, negative, magnitude)
    return flat


@compiled
def _put(flat: Array, start: int, positions: Array, negative: Array, magnitude: float) -> None:
    """Write zeros and kept numbers, block by block, so that every block is still at hand."""
    kept = 0
    for block in range(0, len(flat), BLOCK):
        stop = min(block + BLOCK, len(flat))
        flat[block:stop] = 0
        while kept < len(positions) and positions[kept] - start < stop:
            flat[positions[kept] - start] = -magnitude if negative[kept] else magnitude
            kept += 1
