"""Kept positions written kernel by kernel, with a model chosen for each tensor.

The numbers of a tensor are taken in groups: the kernels of a convolution, otherwise eight at a
time. Updates of networks are not spread evenly: a kernel with one large number has more of them,
and of the same sign. So a group is one symbol, the pattern of its kept places; of its signs only
the first is written as it is, the others as equal or not to the one before. For each tensor is
written how many of its groups are not empty, and which of three models gives the patterns of those:
the number of kept places, counted over the whole message; the same, counted over the tensor; or the
tensor's own counts of patterns. If numbers are kept at random this costs the entropy of each
tensor, otherwise less.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collegium.compression._entropy import RangeDecoder, RangeEncoder, prior_bits
from collegium.compression._frame import FlatLayout
from collegium.core.kernels import compiled
from collegium.errors import ProtocolError

Array = NDArray[Any]

MAX_WIDTH = 9
"""Numbers that a group may hold."""

COMMON, OWN, PATTERNS = range(3)
"""The models that a tensor's patterns may follow."""

FEW = 32
FEW_FILLED = np.array([32, 4, 3, 2, 2, 2, 1, 1, *[0.5] * 8])
"""Weights of the number of groups that are not empty, by class, in tensors of fewer than `FEW`."""

CHOICES = np.array([6.0, 1.0, 1.0])
"""How often each model is chosen, approximately."""

SWITCH_BITS = 2.6
"""Bits that it takes to choose another model than the common one: log2(6)."""

WORTH_PATTERNS = 64
"""Groups that are not empty from which on a table of patterns is tried."""

KEPT = np.array([bin(pattern).count("1") for pattern in range(1 << MAX_WIDTH)])
"""The number of kept places of each pattern."""


class KernelGroups(NamedTuple):
    """The groups of the numbers of a layout.

    Attributes:
        starts: the position at which each tensor begins, and the end.
        widths: numbers in a group, by tensor.
        first: index of each tensor's first group, and the number of groups.
    """

    starts: Array
    widths: Array
    first: Array


def kernel_groups(layout: FlatLayout) -> KernelGroups:
    """Return the groups of a layout."""
    widths = np.array([_width(shape) for shape in layout.shapes], np.int64)
    counts = -(-np.diff(layout.starts) // widths) if len(widths) else widths
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return KernelGroups(layout.starts, widths, first)


def _width(shape: tuple[int, ...]) -> int:
    """Return the largest whole part of a kernel of at most `MAX_WIDTH` numbers, otherwise 8."""
    kernel = math.prod(shape[2:])
    return max((w for w in range(4, MAX_WIDTH + 1) if kernel > 1 and kernel % w == 0), default=8)


def write_groups(positions: Array, negative: Array, layout: FlatLayout) -> bytes:
    """Return kept positions and their signs as bytes.

    Args:
        positions: (n,), increasing.
        negative: (n,), whether each number is negative.
        layout: of the tensors.
    """
    groups = kernel_groups(layout)
    patterns = np.zeros(groups.first[-1], np.int32)
    firsts, changes = np.empty(len(positions), np.bool_), np.empty(len(positions), np.bool_)
    filled = _gather(positions, negative, *groups, patterns, firsts, changes)
    parts = [patterns[a:b] for a, b in zip(groups.first[:-1], groups.first[1:], strict=True)]
    counts = [np.bincount(p, minlength=1 << w) for p, w in zip(parts, groups.widths, strict=True)]
    encoder = RangeEncoder()
    weights = _write_models(encoder, counts, groups.widths)
    for part, model in zip(parts, weights, strict=True):
        encoder.symbols(part, model)
    encoder.bits(firsts[:filled])
    encoder.counted(changes[: len(positions) - filled].astype(np.int32))
    return encoder.finish()


def read_groups(words: NDArray[np.uint32], layout: FlatLayout) -> tuple[Array, Array]:
    """Return the positions and signs that `write_groups` wrote.

    Args:
        words: the bytes, as 32-bit words.
        layout: of the tensors.

    Raises:
        ProtocolError: the bytes are damaged.
    """
    groups = kernel_groups(layout)
    decoder = RangeDecoder(words)
    sizes = np.diff(groups.first)
    weights = _read_models(decoder, sizes, groups.widths)
    parts = [decoder.symbols(int(n), w) for n, w in zip(sizes, weights, strict=True)]
    patterns = np.concatenate([np.zeros(0, np.int32), *parts])
    filled, kept = int(np.count_nonzero(patterns)), int(KEPT[patterns].sum())
    firsts, changes = decoder.bits(filled), decoder.counted(kept - filled).astype(np.bool_)
    positions, negative = np.empty(kept, np.int32), np.empty(kept, np.bool_)
    if not _scatter(patterns, firsts, changes, *groups, positions, negative):
        raise ProtocolError("encoded tensors are damaged: a place is kept beyond a tensor's end")
    return positions, negative


def _write_models(encoder: RangeEncoder, counts: list[Array], widths: Array) -> list[Array]:
    """Write the tables from which the weights of the patterns follow, and return the weights."""
    tallies = [
        np.bincount(KEPT[: len(count)], count, width + 1)[1:].astype(np.int64)
        for count, width in zip(counts, widths, strict=True)
    ]
    sizes = np.array([int(count.sum()) for count in counts], np.int64)
    filled = sizes - np.array([int(count[0]) for count in counts], np.int64)
    few = sizes < FEW
    common = {
        int(w): np.sum([tallies[i] for i in np.flatnonzero(widths == w)], axis=0)
        for w in np.unique(widths)
    }
    choices = np.zeros(len(counts), np.int32)
    for i in np.flatnonzero(filled):
        choices[i] = _choose(counts[i][1:], tallies[i], common[int(widths[i])])
    encoder.numbers(filled[few], FEW_FILLED)
    encoder.numbers(filled[~few])
    for tally in common.values():
        encoder.numbers(tally)
    encoder.symbols(choices[filled > 0], CHOICES)
    tables = [common[w] for w in widths.tolist()]
    for i in np.flatnonzero(choices == OWN):
        tables[i] = tallies[i]
        encoder.numbers(tables[i])
    for i in np.flatnonzero(choices == PATTERNS):
        tables[i] = counts[i][1:]
        encoder.classified(tables[i])
    return [_weights(*entry) for entry in zip(sizes.tolist(), filled.tolist(), tables, strict=True)]


def _read_models(decoder: RangeDecoder, sizes: Array, widths: Array) -> list[Array]:
    """Return the weights of the patterns, by what `_write_models` wrote."""
    filled, few = np.zeros(len(sizes), np.int64), sizes < FEW
    filled[few] = decoder.numbers(int(np.count_nonzero(few)), FEW_FILLED)
    filled[~few] = decoder.numbers(int(np.count_nonzero(~few)))
    common = {w: decoder.numbers(w) for w in sorted(set(widths.tolist()))}
    choices = np.zeros(len(sizes), np.int32)
    choices[filled > 0] = decoder.symbols(int(np.count_nonzero(filled)), CHOICES)
    tables: list[Array] = [common[w] for w in widths.tolist()]
    for i in np.flatnonzero(choices == OWN):
        tables[i] = decoder.numbers(int(widths[i]))
    for i in np.flatnonzero(choices == PATTERNS):
        tables[i] = decoder.classified((1 << int(widths[i])) - 1)
    empty = np.array([not table.any() for table in tables], np.bool_)
    if (filled > sizes).any() or (empty & (filled > 0)).any():
        raise ProtocolError("encoded tensors are damaged: their models contradict themselves")
    return [_weights(*entry) for entry in zip(sizes.tolist(), filled.tolist(), tables, strict=True)]


def _ways(width: int) -> Array:
    """Return the number of patterns of a group that keep 1, 2, ..., ``width`` places."""
    return np.array([math.comb(width, kept) for kept in range(1, width + 1)], np.float64)


def _weights(size: int, filled: int, table: Array, /) -> Array:
    """Return the weights of all patterns of a tensor.

    Args:
        size: number of its groups.
        filled: number of its groups that are not empty.
        table: counts of the patterns that are not empty, or of the numbers of kept places.
    """
    share = filled / max(int(table.sum()), 1)  # a ratio of whole numbers, rounded alike everywhere
    if len(table) <= MAX_WIDTH:
        width = len(table)
        table = (table / _ways(width))[KEPT[1 : 1 << width] - 1]
    return np.concatenate([[float(size - filled)], table * share])


def _choose(patterns: Array, tally: Array, common: Array) -> int:
    """Return the model that makes a tensor's patterns and its own table shortest."""
    filled, ways = tally.sum(), np.log2(_ways(len(tally)))
    own = _bits(tally, tally) + tally @ ways + prior_bits(tally) + SWITCH_BITS
    bits = {COMMON: float(_bits(tally, common) + tally @ ways), OWN: float(own)}
    if filled >= WORTH_PATTERNS:
        bits[PATTERNS] = _bits(patterns, patterns) + prior_bits(patterns) + SWITCH_BITS
    return min(bits, key=bits.__getitem__)


def _bits(counts: Array, model: Array) -> float:
    """Return the bits of symbols with these counts, coded by the counts of a model."""
    present = counts > 0
    return float(counts[present] @ np.log2(model.sum() / model[present]))


@compiled
def _gather(
    positions: Array,
    negative: Array,
    starts: Array,
    widths: Array,
    first: Array,
    patterns: Array,
    firsts: Array,
    changes: Array,
) -> int:
    """Set the pattern of every group, first signs and changes; return the number of first signs."""
    tensor, last, filled = 0, -1, 0
    for i in range(len(positions)):
        while positions[i] >= starts[tensor + 1]:
            tensor += 1
        place = positions[i] - starts[tensor]
        group = first[tensor] + place // widths[tensor]
        patterns[group] |= 1 << (place % widths[tensor])
        if group == last:
            changes[i - filled] = negative[i] != negative[i - 1]
        else:
            firsts[filled] = negative[i]
            filled, last = filled + 1, group
    return filled


@compiled
def _scatter(
    patterns: Array,
    firsts: Array,
    changes: Array,
    starts: Array,
    widths: Array,
    first: Array,
    positions: Array,
    negative: Array,
) -> bool:
    """Invert `_gather`; return whether every place lies within its tensor."""
    kept, filled = 0, 0
    for tensor in range(len(widths)):
        base, width = starts[tensor], widths[tensor]
        for group in range(first[tensor], first[tensor + 1]):
            pattern = patterns[group]
            if pattern == 0:
                base += width
                continue
            sign, is_first = firsts[filled], True
            filled += 1
            for place in range(width):
                if (pattern >> place) & 1:
                    if not is_first:
                        sign ^= changes[kept - filled]
                    is_first = False
                    positions[kept], negative[kept] = base + place, sign
                    kept += 1
            base += width
        if kept and positions[kept - 1] >= starts[tensor + 1]:
            return False
    return True
