"""Numbers to bytes and back by the range coder of the library constriction.

The counts from which the reader builds the distribution of some numbers are written in front of
them. Models are built from whole numbers by operations that every processor rounds alike, so that
bytes written on one machine can be read on any other. Bytes that no encoder can have written raise
a `ProtocolError`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from collegium.compression._frame import words_to_bytes
from collegium.errors import ProtocolError

Array = NDArray[Any]
Numbers = NDArray[np.int64]

EXACT_BELOW = 8
"""Numbers below this are a class each; above, every octave is four classes."""

CLASSES = EXACT_BELOW + 4 * 28
"""Classes of the numbers below 2^31."""

CHUNK_BITS = 16
"""Bits that are written at once if all values are equally likely."""

MAX_TABLE = 1 << 17
"""Counts that a table may hold."""


class Classified(NamedTuple):
    """Whole numbers below 2^31 by class.

    Attributes:
        classes: the class of each.
        large: the indices of those whose class holds more than one number.
        widths: the bits that the class of each large number leaves open.
    """

    classes: NDArray[np.int32]
    large: Numbers
    widths: NDArray[np.int32]


def classify(values: Array) -> Classified:
    """Return the classes of whole numbers below 2^31."""
    classes = values.astype(np.int32)
    large = np.flatnonzero(classes >= EXACT_BELOW)
    widths = np.frexp(classes[large].astype(np.float64))[1] - 3
    classes[large] = EXACT_BELOW + 4 * widths + (classes[large] >> widths) - 8
    return Classified(classes, large, widths)


PRIOR = np.array(
    [16384, 3072, 2560, 2048, 1536, 1536, 1024, 1024]
    + [768 * 4**octave // 5**octave + 1 for octave in range(28) for _ in range(4)],
    np.float64,
)
"""Weights of the classes of numbers of which is known only that most are small."""


def prior_bits(values: Array) -> float:
    """Return the bits that whole numbers take by the weights `PRIOR`."""
    classes, _, widths = classify(values)
    return float(np.log2(PRIOR.sum() / PRIOR[classes]).sum() + widths.sum())


class RangeEncoder:
    """Writes arrays of numbers one after the other."""

    def __init__(self) -> None:
        from constriction import stream  # type: ignore[import-untyped]

        self._models, self._coder = stream.model, stream.queue.RangeEncoder()

    def symbols(self, values: Array, weights: Array) -> None:
        """Write numbers of which the reader knows the weights.

        Args:
            values: (n,), below ``len(weights)``.
            weights: the weight of each number, not negative.
        """
        if len(values) and np.count_nonzero(weights) > 1:
            symbols = np.ascontiguousarray(values, np.int32)
            self._coder.encode(symbols, _categorical(self._models, weights))

    def uniform(self, values: Array, size: int) -> None:
        """Write numbers that are equally likely.

        Args:
            values: (n,), below ``size``.
            size: at most 2^16.
        """
        if len(values) and size > 1:
            self._coder.encode(np.ascontiguousarray(values, np.int32), self._models.Uniform(size))

    def bits(self, values: Array) -> None:
        """Write booleans that are equally likely to be true or false."""
        self.uniform(np.packbits(values), 256)

    def numbers(self, values: Array, weights: Array = PRIOR) -> None:
        """Write whole numbers of whose classes the reader knows the weights.

        Args:
            values: (n,), below 2^31.
            weights: the weight of each class, (CLASSES,) or fewer.
        """
        self._write_classified(values, classify(values), weights)

    def _write_classified(self, values: Array, classified: Classified, weights: Array) -> None:
        self.symbols(classified.classes, weights)
        large = values[classified.large]
        for width in _present(classified.widths):
            open_bits = large[classified.widths == width] & ((1 << width) - 1)
            self.uniform(open_bits >> CHUNK_BITS, 1 << max(width - CHUNK_BITS, 0))
            self.uniform(open_bits & ((1 << CHUNK_BITS) - 1), 1 << min(width, CHUNK_BITS))

    def counted(self, values: Array, counts: Array | None = None) -> None:
        """Write numbers and, in front of them, how often each occurs.

        Args:
            values: (n,), below `MAX_TABLE`.
            counts: how often each occurs, if known.
        """
        if counts is None:
            counts = np.bincount(values)
        self.table(counts)
        self.symbols(values, counts)

    def classified(self, values: Array) -> None:
        """Write whole numbers below 2^31 and, in front of them, how often each class occurs."""
        classified = classify(values)
        counts = np.bincount(classified.classes)
        self.table(counts)
        self._write_classified(values, classified, counts)

    def table(self, counts: Array) -> None:
        """Write the length of a table, and its counts."""
        self.numbers(np.array([len(counts)]))
        self.numbers(counts)

    def finish(self) -> bytes:
        """Return all that was written."""
        return words_to_bytes(self._coder.get_compressed())


class RangeDecoder:
    """Reads what a `RangeEncoder` wrote, by the same calls in the same order.

    Args:
        data: 32-bit words, not trusted.
    """

    def __init__(self, data: NDArray[np.uint32]) -> None:
        from constriction import stream

        self._models, self._coder = stream.model, stream.queue.RangeDecoder(data)

    def symbols(self, count: int, weights: Array) -> NDArray[np.int32]:
        """Return the next ``count`` numbers. See `RangeEncoder.symbols`."""
        likely = np.flatnonzero(weights)
        if count and not len(likely):
            raise ProtocolError("encoded tensors are damaged: a table of counts is empty")
        if not count or len(likely) == 1:
            return np.full(count, likely[0] if count else 0, np.int32)
        return self._decode(lambda: _categorical(self._models, weights), count)

    def uniform(self, count: int, size: int) -> NDArray[np.int32]:
        """Return the next ``count`` numbers. See `RangeEncoder.uniform`."""
        if not count or size < 2:
            return np.zeros(count, np.int32)
        return self._decode(lambda: self._models.Uniform(size), count)

    def bits(self, count: int) -> NDArray[np.bool_]:
        """Return the next ``count`` booleans."""
        packed = self.uniform((count + 7) // 8, 256).astype(np.uint8)
        return np.unpackbits(packed, count=count).view(np.bool_)

    def numbers(self, count: int, weights: Array = PRIOR) -> Numbers:
        """Return the next ``count`` numbers. See `RangeEncoder.numbers`."""
        values = self.symbols(count, weights).astype(np.int64)
        large = np.flatnonzero(values >= EXACT_BELOW)
        widths = 1 + (values[large] - EXACT_BELOW) // 4
        numbers = (4 + (values[large] - EXACT_BELOW) % 4) << widths
        for width in _present(widths):
            chosen = widths == width
            size = int(np.count_nonzero(chosen))
            high = self.uniform(size, 1 << max(width - CHUNK_BITS, 0)).astype(np.int64)
            low = self.uniform(size, 1 << min(width, CHUNK_BITS))
            numbers[chosen] |= (high << CHUNK_BITS) | low
        values[large] = numbers
        return values

    def counted(self, count: int) -> NDArray[np.int32]:
        """Return the next ``count`` numbers, in front of which their table is."""
        return self.symbols(count, self._table_of(count, MAX_TABLE))

    def classified(self, count: int) -> Numbers:
        """Return the next ``count`` numbers, in front of which the table of their classes is."""
        return self.numbers(count, self._table_of(count, CLASSES))

    def _table_of(self, count: int, longest: int) -> Numbers:
        """Return the next table, of ``count`` numbers and of at most ``longest`` counts."""
        size = int(self.numbers(1)[0])
        if size > longest:
            raise ProtocolError(f"encoded tensors are damaged: a table has {size} counts")
        counts = self.numbers(size)
        if counts.sum() != count:
            raise ProtocolError(
                f"encoded tensors are damaged: a table counts {counts.sum()} numbers, not {count}"
            )
        return counts

    def _decode(self, model: Callable[[], Any], count: int) -> NDArray[np.int32]:
        try:
            return cast(NDArray[np.int32], self._coder.decode(model(), count))
        except (AssertionError, ValueError) as error:  # what constriction raises for invalid bytes
            raise ProtocolError(
                "encoded tensors are damaged: no numbers give these bytes"
            ) from error


def _categorical(models: Any, weights: Array) -> Any:
    return models.Categorical(weights.astype(np.float64), perfect=False)


def _present(widths: Array) -> list[int]:
    """Return the numbers above 0 that occur, in order."""
    counts = np.bincount(widths, minlength=1)
    return [width for width, count in enumerate(counts.tolist()) if width and count]
