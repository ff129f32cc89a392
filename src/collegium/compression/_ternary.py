"""Vectors of zeros and of one magnitude with either sign: made, written and read."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collegium.compression._frame import FlatLayout, FrameKind, FrameReader, varint
from collegium.compression._golomb import read_positions, write_positions
from collegium.compression._groups import read_groups, write_groups
from collegium.compression._runs import read_runs, write_runs
from collegium.compression._select import select_largest
from collegium.core.kernels import compiled
from collegium.errors import ProtocolError

Array = NDArray[Any]

BLOCK = 4096
"""Numbers that are written at a time."""


class TernaryVector(NamedTuple):
    """A vector of which some numbers are kept.

    Attributes:
        positions: their positions, increasing, int32.
        negative: whether they are negative.
        magnitudes: their magnitude: one for all, or one for each tensor, float32.
    """

    positions: Array
    negative: Array
    magnitudes: Array


EMPTY = TernaryVector(np.zeros(0, np.int32), np.zeros(0, np.bool_), np.zeros(1, np.float32))


def ternarise(
    vectors: list[NDArray[np.float32]], layout: FlatLayout, fraction: float, *, by_tensor: bool
) -> TernaryVector:
    """Return the largest numbers of some vectors, each replaced by their mean magnitude.

    Args:
        vectors: one for each tensor of the layout.
        layout: of the tensors.
        fraction: share of all numbers that is kept; one at least. Zeros are never kept.
        by_tensor: whether the share is taken of every tensor instead, each with its own mean.
    """
    if not layout.total:
        return EMPTY
    if by_tensor:
        parts = [
            select_largest([vector], max(1, round(fraction * len(vector))), int(start))
            for vector, start in zip(vectors, layout.starts[:-1], strict=True)
        ]
    else:
        parts = [select_largest(vectors, max(1, round(fraction * layout.total)))]
    magnitudes = np.array([part.magnitude for part in parts])
    if not np.isfinite(magnitudes).all():
        layout.require_finite(vectors)
    positions = np.concatenate([part.positions for part in parts])
    negative = np.concatenate([part.negative for part in parts])
    return TernaryVector(positions, negative, magnitudes.astype(np.float32))


def write_ternary(ternary: TernaryVector, layout: FlatLayout, kind: FrameKind) -> bytes:
    """Return a vector as bytes; none if nothing is kept.

    Args:
        ternary: the vector.
        layout: of the tensors.
        kind: the encoding of the positions: `FrameKind.GROUPS`, RUNS, ADAPTIVE or GOLOMB.
    """
    positions, negative, magnitudes = ternary
    if not len(positions):
        return b""
    header = varint(len(magnitudes)) + magnitudes.astype("<f4").tobytes()
    if kind == FrameKind.GROUPS:
        return header + write_groups(positions, negative, layout)
    if kind == FrameKind.RUNS:
        return header + write_runs(positions, negative)
    adaptive = kind == FrameKind.ADAPTIVE
    code = write_positions(positions, negative, layout.total, adaptive=adaptive)
    return header + varint(len(positions)) + code


def read_ternary(kind: FrameKind, reader: FrameReader, layout: FlatLayout) -> TernaryVector:
    """Return the vector that `write_ternary` wrote.

    Args:
        kind: as for `write_ternary`.
        reader: of the frame's content.
        layout: of the tensors.

    Raises:
        ProtocolError: the bytes are damaged.
    """
    if not len(reader):
        return EMPTY
    count = reader.varint()
    if count not in (1, len(layout.names)):
        raise ProtocolError(
            f"encoded tensors are damaged: {count} magnitudes for {len(layout.names)} tensors"
        )
    magnitudes = reader.array("<f4", count).astype(np.float32)
    if not np.isfinite(magnitudes).all():
        raise ProtocolError("encoded tensors are damaged: a magnitude is not a finite number")
    if kind == FrameKind.GROUPS:
        return TernaryVector(*read_groups(reader.words(), layout), magnitudes)
    if kind == FrameKind.RUNS:
        return TernaryVector(*read_runs(reader.words(), layout.total), magnitudes)
    kept, adaptive = reader.varint(), kind == FrameKind.ADAPTIVE
    return TernaryVector(*read_positions(reader, kept, layout.total, adaptive=adaptive), magnitudes)


def to_dense(ternary: TernaryVector, layout: FlatLayout) -> NDArray[np.float32]:
    """Return all numbers of a vector, (layout.total,).

    Args:
        ternary: the vector.
        layout: of the tensors.
    """
    flat = np.empty(layout.total, np.float32)
    by_tensor = len(ternary.magnitudes) == len(layout.names)
    starts = layout.starts if by_tensor else layout.starts[[0, -1]]
    bounds = np.searchsorted(ternary.positions, starts)
    for i, magnitude in enumerate(ternary.magnitudes):
        kept = slice(bounds[i], bounds[i + 1])
        positions, negative = ternary.positions[kept], ternary.negative[kept]
        _fill(flat[starts[i] : starts[i + 1]], starts[i], positions, negative, magnitude)
    return flat


@compiled
def _fill(flat: Array, start: int, positions: Array, negative: Array, magnitude: float) -> None:
    """Write zeros and kept numbers block by block, while the block is still in the cache."""
    kept = 0
    for block in range(0, len(flat), BLOCK):
        stop = min(block + BLOCK, len(flat))
        flat[block:stop] = 0
        while kept < len(positions) and positions[kept] - start < stop:
            flat[positions[kept] - start] = -magnitude if negative[kept] else magnitude
            kept += 1
