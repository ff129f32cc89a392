"""The parts that all codecs share: the order of the numbers, and the frame around their bytes.

A frame is a byte for the kind of encoding, a CRC-32 over the content and over the names and shapes
of the tensors, and the content.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from collegium.core.lazy import torch
from collegium.core.tensors import Tensors
from collegium.errors import ProtocolError

if TYPE_CHECKING:
    from torch import Tensor

MAX_NUMBERS = (1 << 31) - 1
"""Numbers that one message may hold; positions are 32-bit integers."""

HEADER_BYTES = 5


class FrameKind(IntEnum):
    """The encoding of a frame's numbers."""

    IDENTITY = 1
    HALF = 2
    DADAQUANT = 3
    GOLOMB = 4
    ADAPTIVE = 5
    GROUPS = 6
    RUNS = 7
    STEPS = 8
    CODED_STEPS = 9


class FlatLayout:
    """The order of the numbers of some tensors: by name, row by row; tied tensors are counted once.

    Args:
        tensors: floating-point tensors.

    Attributes:
        names: the first name of every distinct tensor.
        shapes: their shapes.
        starts: the position at which each begins, followed by ``total``.
        total: the number of numbers.
        digest: CRC-32 of names and shapes.

    Raises:
        ProtocolError: a tensor is not of floating point, or there are too many numbers.
    """

    def __init__(self, tensors: Tensors) -> None:
        self._like = tensors
        ordered = Tensors((name, tensors[name]) for name in sorted(tensors))
        for name in ordered:
            if not tensors[name].is_floating_point():
                raise ProtocolError(
                    f"{name} holds {tensors[name].dtype}, and a codec takes floating-point tensors "
                    f"only; send counters and flags as they are"
                )
        self._first_names = ordered.first_names()
        self.names = list(ordered.distinct())
        self.shapes = [tuple(tensors[name].shape) for name in self.names]
        sizes = [tensors[name].numel() for name in self.names]
        self.starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self.total = int(self.starts[-1])
        if self.total > MAX_NUMBERS:
            raise ProtocolError(
                f"{self.total:,} numbers are too many for one codec; at most {MAX_NUMBERS:,}"
            )
        description = [self._first_names, self.shapes]
        self.digest = zlib.crc32(repr(description).encode())

    def vectors(self, tensors: Tensors) -> list[NDArray[np.float32]]:
        """Return the numbers of each distinct tensor, without a copy if possible."""
        return [
            tensors[name].detach().to("cpu", torch.float32).reshape(-1).numpy()
            for name in self.names
        ]

    def flatten(self, tensors: Tensors) -> NDArray[np.float32]:
        """Return all numbers in one new vector, (total,)."""
        flat = np.empty(self.total, np.float32)
        np.concatenate([flat[:0], *self.vectors(tensors)], out=flat)
        return flat

    def restore(self, flat: NDArray[np.float32]) -> Tensors:
        """Return tensors with the names, shapes, dtypes and ties of this layout over ``flat``."""
        pieces = torch.split(torch.from_numpy(flat), np.diff(self.starts).tolist())
        restored = {
            name: piece.view(shape).to(self._like[name].dtype)
            for name, shape, piece in zip(self.names, self.shapes, pieces, strict=True)
        }
        return self.tie(restored)

    def tie(self, distinct: Mapping[str, Tensor]) -> Tensors:
        """Return tensors that are known by their first names under all their names."""
        return Tensors((name, distinct[self._first_names[name]]) for name in self._like)

    def require_finite(self, vectors: list[NDArray[np.float32]]) -> None:
        """Check that no number is NaN or infinite.

        Raises:
            ProtocolError: one is; the sentence names the tensor.
        """
        for name, vector in zip(self.names, vectors, strict=True):
            if not np.isfinite(vector).all():
                raise ProtocolError(
                    f"{name} holds NaN or infinite values and cannot be sent; lower the learning "
                    f"rate or clip the gradient"
                )


def write_frame(kind: FrameKind, layout: FlatLayout, *pieces: bytes | memoryview[int]) -> bytes:
    """Return the frame around some content.

    Args:
        kind: the encoding of the content.
        layout: of the tensors.
        *pieces: the content, in pieces.
    """
    return b"".join([bytes([kind]), _checksum(kind, layout, *pieces), *pieces])


def read_frame(
    kinds: Collection[FrameKind], layout: FlatLayout, data: bytes
) -> tuple[FrameKind, FrameReader]:
    """Return the encoding of a frame, and a reader of its content.

    Args:
        kinds: the encodings that are expected.
        layout: of the tensors.
        data: the frame, not trusted.

    Raises:
        ProtocolError: the frame is damaged, of another codec or of other tensors.
    """
    if len(data) < HEADER_BYTES:
        raise ProtocolError(f"{len(data)} bytes are too few for encoded tensors")
    if data[0] not in kinds:
        expected = " or ".join(kind.name.lower() for kind in kinds)
        raise ProtocolError(
            f"the bytes are of kind {data[0]}, not {expected}; use the same codec on both sides"
        )
    kind, content = FrameKind(data[0]), memoryview(data)[HEADER_BYTES:]
    if data[1:HEADER_BYTES] != _checksum(kind, layout, content):
        raise ProtocolError("encoded tensors are damaged, or were made for another model")
    return kind, FrameReader(content)


def _checksum(kind: FrameKind, layout: FlatLayout, *pieces: bytes | memoryview[int]) -> bytes:
    value = zlib.crc32(bytes([kind]), layout.digest)
    for piece in pieces:
        value = zlib.crc32(piece, value)
    return value.to_bytes(4, "little")


class FrameReader:
    """The unread rest of a frame."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def take(self, size: int) -> memoryview:
        """Return the next ``size`` bytes."""
        if size > len(self._data):
            raise ProtocolError(
                f"encoded tensors end too soon: {size} bytes are expected, {len(self._data)} left"
            )
        taken, self._data = self._data[:size], self._data[size:]
        return taken

    def array(self, dtype: str, count: int) -> NDArray[Any]:
        """Return the next numbers.

        Args:
            dtype: their type, as numpy writes it.
            count: how many.
        """
        return np.frombuffer(self.take(count * np.dtype(dtype).itemsize), dtype)

    def varint(self) -> int:
        """Return the next whole number, as `varint` wrote it."""
        value = 0
        for shift in range(0, 35, 7):
            byte = self.take(1)[0]
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ProtocolError("encoded tensors are damaged: a length does not end")

    def words(self, size: int | None = None) -> NDArray[np.uint32]:
        """Return the next ``size`` bytes, or all that are left, as the 32-bit words they were."""
        data = bytes(self.take(len(self) if size is None else size))
        return np.frombuffer(data + bytes(-len(data) % 4), "<u4").astype(np.uint32)

    def require_end(self) -> None:
        """Check that everything has been read.

        Raises:
            ProtocolError: bytes are left over.
        """
        if len(self):
            raise ProtocolError(f"encoded tensors are damaged: {len(self)} bytes are left over")


def varint(value: int) -> bytes:
    """Return a whole number from 0 to 2^35 - 1 in as many bytes as it needs, seven bits in each."""
    digits = [value & 127]
    while value := value >> 7:
        digits.append(value & 127)
    return bytes([digit | 128 for digit in digits[:-1]] + digits[-1:])


def words_to_bytes(words: NDArray[np.uint32]) -> bytes:
    """Return 32-bit words as bytes, without the zero bytes at the end of the last."""
    data = words.astype("<u4").tobytes()
    return data[:-3] + data[-3:].rstrip(b"\0")
