"""Numbers to bytes and back by the range coder of the library constriction.

What the reader must know of the distribution of some numbers is written in front of them as counts;
models are built from whole numbers by operations that every processor rounds alike, so that bytes
written on one machine can be read on any other. Bytes that cannot have been written give a
`ProtocolError`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from collegium.compression._frame import words
from collegium.errors import ProtocolError

Array = NDArray[Any]
Numbers = NDArray[np.int64]

EXACT = 8
"""Numbers below this are a class each; above, every octave is four classes."""

CLASSES = EXACT + 4 * 28
"""Classes of the numbers below 2^31."""

CHUNK = 16
"""Bits that are written at once where all values are alike."""

LONGEST_TABLE = 1 << 17


class Classed(NamedTuple):
    """Whole numbers below 2^31 as classes and what these leave open.

    Attributes:
        classes: the class of each.
        large: which of them have a class of more than one number.
        widths: the bits that the class of each large one leaves open.
    """

    classes: NDArray[np.int32]
    large: Numbers
    widths: NDArray[np.int32]


def classes_of(values: Array) -> Classed:
    """Return the classes of whole numbers."""
    classes = values.astype(np.int32)
    large = np.flatnonzero(classes >= EXACT)
    widths = np.frexp(classes[large].astype(np.float64))[1] - 3
    classes[large] = EXACT + 4 * widths + (classes[large] >> widths) - 8
    return Classed(classes, large, widths)


PRIOR = np.array(
    [16384, 3072, 2560, 2048, 1536, 1536, 1024, 1024]
    + [768 * 4**octave // 5**octave + 1 for octave in range(28) for _ in range(4)],
    np.float64,
)
"""Weights of the classes of numbers of which only is known that most are small."""


def bits_of(values: Array) -> float:
    """Return the bits that whole numbers take by the weights `PRIOR`."""
    classes, _, widths = classes_of(values)
    return float(np.log2(PRIOR.sum() / PRIOR[classes]).sum() + widths.sum())


class Encoder:
    """Writes numbers one array after the other."""

    def __init__(self) -> None:
        from constriction import stream  # type: ignore[import-untyped]

        self._models, self._coder = stream.model, stream.queue.RangeEncoder()

    def symbols(self, values: Array, weights: Array) -> None:
        """Write numbers below ``len(weights)``, given weights that the reader knows."""
        if len(values) and np.count_nonzero(weights) > 1:
            symbols = np.ascontiguousarray(values, np.int32)
            self._coder.encode(symbols, _categorical(self._models, weights))

    def uniform(self, values: Array, size: int) -> None:
        """Write numbers below ``size`` (at most 2^16) of which all are equally likely."""
        if len(values) and size > 1:
            self._coder.encode(np.ascontiguousarray(values, np.int32), self._models.Uniform(size))

    def bits(self, values: Array) -> None:
        """Write truth values of which both are equally likely."""
        self.uniform(np.packbits(values), 256)

    def numbers(self, values: Array, weights: Array = PRIOR) -> None:
        """Write whole numbers below 2^31, given the weights of their classes."""
        self._classed(values, classes_of(values), weights)

    def _classed(self, values: Array, classed: Classed, weights: Array) -> None:
        self.symbols(classed.classes, weights)
        large = values[classed.large]
        for width in _present(classed.widths):
            open_bits = large[classed.widths == width] & ((1 << width) - 1)
            self.uniform(open_bits >> CHUNK, 1 << max(width - CHUNK, 0))
            self.uniform(open_bits & ((1 << CHUNK) - 1), 1 << min(width, CHUNK))

    def counted(self, values: Array, counts: Array | None = None) -> None:
        """Write numbers below 2^17 and, in front, how often each occurs (``counts`` if known)."""
        if counts is None:
            counts = np.bincount(values) if len(values) else np.zeros(0, np.int64)
        self.table(counts)
        self.symbols(values, counts)

    def classed(self, values: Array) -> None:
        """Write whole numbers below 2^31 and, in front, how often each of their classes occurs."""
        classed = classes_of(values)
        counts = np.bincount(classed.classes) if len(values) else np.zeros(0, np.int64)
        self.table(counts)
        self._classed(values, classed, counts)

    def table(self, counts: Array) -> None:
        """Write how long a table is, and its counts."""
        self.numbers(np.array([len(counts)]))
        self.numbers(counts)

    def finish(self) -> bytes:
        """Return what was written."""
        return words(self._coder.get_compressed())


class Decoder:
    """Reads what an `Encoder` wrote, by the same calls in the same order."""

    def __init__(self, data: NDArray[np.uint32]) -> None:
        from constriction import stream

        self._models, self._coder = stream.model, stream.queue.RangeDecoder(data)

    def symbols(self, count: int, weights: Array) -> NDArray[np.int32]:
        """Read ``count`` numbers below ``len(weights)``."""
        likely = np.flatnonzero(weights)
        if count and not len(likely):
            raise ProtocolError("encoded tensors are damaged: a table of counts is empty")
        if not count or len(likely) == 1:
            return np.full(count, likely[0] if count else 0, np.int32)
        return self._decode(lambda: _categorical(self._models, weights), count)

    def uniform(self, count: int, size: int) -> NDArray[np.int32]:
        """Read ``count`` numbers below ``size``."""
        if not count or size < 2:
            return np.zeros(count, np.int32)
        return self._decode(lambda: self._models.Uniform(size), count)

    def bits(self, count: int) -> NDArray[np.bool_]:
        """Read ``count`` truth values."""
        packed = self.uniform((count + 7) // 8, 256).astype(np.uint8)
        return np.unpackbits(packed, count=count).view(np.bool_)

    def numbers(self, count: int, weights: Array = PRIOR) -> Numbers:
        """Read ``count`` whole numbers below 2^31."""
        values = self.symbols(count, weights).astype(np.int64)
        large = np.flatnonzero(values >= EXACT)
        widths = 1 + (values[large] - EXACT) // 4
        found = (4 + (values[large] - EXACT) % 4) << widths
        for width in _present(widths):
            here = widths == width
            size = int(np.count_nonzero(here))
            high = self.uniform(size, 1 << max(width - CHUNK, 0)).astype(np.int64)
            found[here] |= (high << CHUNK) | self.uniform(size, 1 << min(width, CHUNK))
        values[large] = found
        return values

    def counted(self, count: int) -> NDArray[np.int32]:
        """Read ``count`` numbers that stand behind their table."""
        return self.symbols(count, self._table_of(count, LONGEST_TABLE))

    def classed(self, count: int) -> Numbers:
        """Read ``count`` whole numbers below 2^31 that stand behind the table of their classes."""
        return self.numbers(count, self._table_of(count, CLASSES))

    def table(self, longest: int) -> Numbers:
        """Read a table of at most ``longest`` counts."""
        size = int(self.numbers(1)[0])
        if size > longest:
            raise ProtocolError(f"encoded tensors are damaged: a table has {size} counts")
        return self.numbers(size)

    def _table_of(self, count: int, longest: int) -> Numbers:
        """Read a table of ``count`` symbols."""
        counts = self.table(longest)
        if counts.sum() != count:
            raise ProtocolError(
                f"encoded tensors are damaged: {count} numbers are wanted, {counts.sum()} announced"
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
