"""Kept positions written kernel by kernel, with models that each tensor chooses for itself.

The numbers of a tensor are taken in groups: the kernels of a convolution, else eight at a time.
Updates of networks are not spread evenly: a kernel of which one number is large has more of them,
and of one sign. So a group is one symbol, the pattern of its kept places, and of its signs only the
first is written as it is, the others as equal or not to the one before. A tensor states how many of
its groups hold anything, and which of three models gives the patterns of those: how many places are
kept, counted over the whole message; the same, counted over the tensor; or the tensor's own counts
of patterns. Where numbers are kept at random this costs what the entropy of each tensor is; else
less.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from collegium.compression._entropy import Decoder, Encoder, bits_of
from collegium.compression._frame import Layout
from collegium.core.kernels import compiled
from collegium.errors import ProtocolError

Array = NDArray[Any]

WIDEST = 9
COMMON, OWN, PATTERNS = range(3)
"""Which model a tensor's patterns follow."""

FEW = 32
FEW_HELD = np.array([32, 4, 3, 2, 2, 2, 1, 1, *[0.5] * 8])
"""Weights of how many groups hold anything, by class, in tensors of fewer than `FEW`."""

CHOICES = np.array([6.0, 1.0, 1.0])
"""How often each of them is chosen, about."""

SWITCH = 2.6
"""Bits that it takes to say that a model is not the common one: log2(6)."""

WORTH_PATTERNS = 64
"""Groups that hold anything from which on a table of patterns is tried."""

KEPT = np.array([bin(pattern).count("1") for pattern in range(1 << WIDEST)])
"""How many places of a pattern are kept."""


class Groups(NamedTuple):
    """How a layout falls into groups.

    Attributes:
        starts: where each tensor begins, and the end.
        widths: numbers in a group, by tensor.
        first: number of each tensor's first group, and how many groups there are.
    """

    starts: Array
    widths: Array
    first: Array


def groups_of(layout: Layout) -> Groups:
    """Return the groups of a layout."""
    widths = np.array([_width(shape) for shape in layout.shapes], np.int64)
    counts = -(-np.diff(layout.starts) // widths) if len(widths) else widths
    return Groups(layout.starts, widths, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))


def _width(shape: tuple[int, ...]) -> int:
    """Return the largest whole part of a kernel that is no wider than `WIDEST`; else 8."""
    kernel = math.prod(shape[2:])
    return max((w for w in range(4, WIDEST + 1) if kernel > 1 and kernel % w == 0), default=8)


def write_groups(positions: Array, negative: Array, layout: Layout) -> bytes:
    """Return increasing positions and their signs as bytes."""
    groups = groups_of(layout)
    patterns = np.zeros(groups.first[-1], np.int32)
    firsts, changes = np.empty(len(positions), np.bool_), np.empty(len(positions), np.bool_)
    held = _gather(positions, negative, *groups, patterns, firsts, changes)
    parts = [patterns[a:b] for a, b in zip(groups.first[:-1], groups.first[1:], strict=True)]
    counts = [np.bincount(p, minlength=1 << w) for p, w in zip(parts, groups.widths, strict=True)]
    encoder = Encoder()
    weights = _write_models(encoder, counts, groups.widths)
    for part, model in zip(parts, weights, strict=True):
        encoder.symbols(part, model)
    encoder.bits(firsts[:held])
    encoder.counted(changes[: len(positions) - held].astype(np.int32))
    return encoder.finish()


def read_groups(words: NDArray[np.uint32], layout: Layout) -> tuple[Array, Array]:
    """Return the positions and signs that `write_groups` wrote.

    Raises:
        ProtocolError: the bytes are damaged.
    """
    groups = groups_of(layout)
    decoder = Decoder(words)
    sizes = np.diff(groups.first)
    weights = _read_models(decoder, sizes, groups.widths)
    parts = [decoder.symbols(int(n), w) for n, w in zip(sizes, weights, strict=True)]
    patterns = np.concatenate([np.zeros(0, np.int32), *parts])
    held, kept = int(np.count_nonzero(patterns)), int(KEPT[patterns].sum())
    firsts, changes = decoder.bits(held), decoder.counted(kept - held).astype(np.bool_)
    positions, negative = np.empty(kept, np.int32), np.empty(kept, np.bool_)
    if not _scatter(patterns, firsts, changes, *groups, positions, negative):
        raise ProtocolError("encoded tensors are damaged: a place is kept beyond a tensor's end")
    return positions, negative


def _write_models(encoder: Encoder, counts: list[Array], widths: Array) -> list[Array]:
    """Write what the weights of the patterns follow from, and return the weights."""
    tallies = [
        np.bincount(KEPT[: len(count)], count, width + 1)[1:].astype(np.int64)
        for count, width in zip(counts, widths, strict=True)
    ]
    sizes = np.array([int(count.sum()) for count in counts], np.int64)
    held = sizes - np.array([int(count[0]) for count in counts], np.int64)
    few = sizes < FEW
    common = {w: _sum_of(tallies, widths == w) for w in sorted(set(widths.tolist()))}
    choices = np.zeros(len(counts), np.int32)
    for i in np.flatnonzero(held):
        choices[i] = _choose(counts[i][1:], tallies[i], common[int(widths[i])])
    encoder.numbers(held[few], FEW_HELD)
    encoder.numbers(held[~few])
    for tally in common.values():
        encoder.numbers(tally)
    encoder.symbols(choices[held > 0], CHOICES)
    tables = [common[w] for w in widths.tolist()]
    for i in np.flatnonzero(choices == OWN):
        tables[i] = tallies[i]
        encoder.numbers(tables[i])
    for i in np.flatnonzero(choices == PATTERNS):
        tables[i] = counts[i][1:]
        encoder.classed(tables[i])
    return [_weights(*entry) for entry in zip(sizes.tolist(), held.tolist(), tables, strict=True)]


def _read_models(decoder: Decoder, sizes: Array, widths: Array) -> list[Array]:
    """Read what `_write_models` wrote, and return the weights."""
    held, few = np.zeros(len(sizes), np.int64), sizes < FEW
    held[few] = decoder.numbers(int(np.count_nonzero(few)), FEW_HELD)
    held[~few] = decoder.numbers(int(np.count_nonzero(~few)))
    common = {w: decoder.numbers(w) for w in sorted(set(widths.tolist()))}
    choices = np.zeros(len(sizes), np.int32)
    choices[held > 0] = decoder.symbols(int(np.count_nonzero(held)), CHOICES)
    tables: list[Array] = [common[w] for w in widths.tolist()]
    for i in np.flatnonzero(choices == OWN):
        tables[i] = decoder.numbers(int(widths[i]))
    for i in np.flatnonzero(choices == PATTERNS):
        tables[i] = decoder.classed((1 << int(widths[i])) - 1)
    if (held > sizes).any() or any(h and not t.any() for h, t in zip(held, tables, strict=True)):
        raise ProtocolError("encoded tensors are damaged: their models contradict themselves")
    return [_weights(*entry) for entry in zip(sizes.tolist(), held.tolist(), tables, strict=True)]


def _sum_of(tallies: list[Array], which: Array) -> Array:
    chosen = np.array([tally for tally, here in zip(tallies, which, strict=True) if here])
    return cast(Array, chosen.sum(axis=0))


def _ways(width: int) -> Array:
    """Return how many patterns of a group keep 1, 2, ..., ``width`` places."""
    return np.array([math.comb(width, kept) for kept in range(1, width + 1)], np.float64)


def _weights(size: int, held: int, table: Array, /) -> Array:
    """Return the weights of all patterns of a tensor.

    Args:
        size: how many groups it has.
        held: how many of them hold anything.
        table: counts of the patterns that hold anything, or of how many places are kept.
    """
    share = held / max(int(table.sum()), 1)  # of whole numbers: rounded alike everywhere
    if len(table) <= WIDEST:
        width = len(table)
        table = (table / _ways(width))[KEPT[1 : 1 << width] - 1]
    return np.concatenate([[float(size - held)], table * share])


def _choose(patterns: Array, tally: Array, common: Array) -> int:
    """Return the model that makes a tensor's patterns and its own table shortest."""
    held, ways = tally.sum(), np.log2(_ways(len(tally)))
    own = _bits(tally, tally) + tally @ ways + bits_of(tally) + SWITCH
    bits = {COMMON: float(_bits(tally, common) + tally @ ways), OWN: float(own)}
    if held >= WORTH_PATTERNS:
        bits[PATTERNS] = _bits(patterns, patterns) + bits_of(patterns) + SWITCH
    return min(bits, key=lambda choice: bits[choice])


def _bits(counts: Array, model: Array) -> float:
    """Return the bits of symbols that occur so often, coded by the counts of a model."""
    there = counts > 0
    return float(counts[there] @ np.log2(model.sum() / model[there]))


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
    """Set the pattern of every group; note first signs and changes; return how many are first."""
    tensor, last, held = 0, -1, 0
    for i in range(len(positions)):
        while positions[i] >= starts[tensor + 1]:
            tensor += 1
        place = positions[i] - starts[tensor]
        group = first[tensor] + place // widths[tensor]
        patterns[group] |= 1 << (place % widths[tensor])
        if group == last:
            changes[i - held] = negative[i] != negative[i - 1]
        else:
            firsts[held] = negative[i]
            held, last = held + 1, group
    return held


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
    """Undo `_gather`; say whether every place lies within its tensor."""
    kept, held = 0, 0
    for tensor in range(len(widths)):
        base, width = starts[tensor], widths[tensor]
        for group in range(first[tensor], first[tensor + 1]):
            pattern = patterns[group]
            if pattern == 0:
                base += width
                continue
            sign, fresh = firsts[held], True
            held += 1
            for place in range(width):
                if (pattern >> place) & 1:
                    if not fresh:
                        sign ^= changes[kept - held]
                    fresh = False
                    positions[kept], negative[kept] = base + place, sign
                    kept += 1
            base += width
        if kept and positions[kept - 1] >= starts[tensor + 1]:
            return False
    return True
