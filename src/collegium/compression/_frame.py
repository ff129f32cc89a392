"""What all codecs share: the order of the numbers, and the frame around the bytes for them.

A frame is a byte that says how the numbers are written, a CRC-32 over the writing and over the
names and shapes of the tensors, and the writing itself.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Hashable, Mapping
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from collegium.core.tensors import Tensors, identity
from collegium.errors import ProtocolError

LARGEST = (1 << 31) - 1
"""Numbers that one message may hold; positions are 32-bit integers."""

HEAD = 5


class Kind(IntEnum):
    """How a frame's numbers are written."""

    IDENTITY = 1
    HALF = 2
    DADAQUANT = 3
    GOLOMB = 4
    ADAPTIVE = 5
    GROUPS = 6
    RUNS = 7
    STEPS = 8
    CODED_STEPS = 9


class Layout:
    """The order of the numbers of some tensors: by name, row by row; tied tensors stand once.

    Attributes:
        names: for every distinct tensor, the first of its names.
        shapes: their shapes.
        starts: where each begins, and in the end how many numbers there are.
        total: how many numbers there are.
        digest: CRC-32 of names and shapes.
    """

    def __init__(self, tensors: Tensors) -> None:
        self._like = tensors
        self._holders: dict[str, str] = {}
        seen: dict[Hashable, str] = {}
        for name in sorted(tensors):
            if not tensors[name].is_floating_point():
                raise ProtocolError(
                    f"{name} holds {tensors[name].dtype}, and a codec takes floating-point tensors "
                    f"only; send counters and flags as they are"
                )
            self._holders[name] = seen.setdefault(identity(tensors[name]), name)
        self.names = list(seen.values())
        self.shapes = [tuple(tensors[name].shape) for name in self.names]
        sizes = [tensors[name].numel() for name in self.names]
        self.starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self.total = int(self.starts[-1])
        if self.total > LARGEST:
            raise ProtocolError(
                f"{self.total:,} numbers are too many for one codec; at most {LARGEST:,}"
            )
        description = [self._holders, self.shapes]
        self.digest = zlib.crc32(repr(description).encode())

    def vectors(self, tensors: Tensors) -> list[NDArray[np.float32]]:
        """Return the numbers of each distinct tensor, without a copy where it can be."""
        return [
            tensors[name].detach().to("cpu", torch.float32).reshape(-1).numpy()
            for name in self.names
        ]

    def flatten(self, tensors: Tensors) -> NDArray[np.float32]:
        """Return all numbers in one new vector."""
        flat = np.empty(self.total, np.float32)
        np.concatenate([flat[:0], *self.vectors(tensors)], out=flat)
        return flat

    def restore(self, flat: NDArray[np.float32]) -> Tensors:
        """Return tensors with the names, shapes, dtypes and ties of ``like``, over ``flat``."""
        pieces = torch.split(torch.from_numpy(flat), np.diff(self.starts).tolist())
        found = {
            name: piece.view(shape).to(self._like[name].dtype)
            for name, shape, piece in zip(self.names, self.shapes, pieces, strict=True)
        }
        return self.tie(found)

    def tie(self, found: Mapping[str, Tensor]) -> Tensors:
        """Return tensors that are known under their first names under all their names."""
        return Tensors((name, found[self._holders[name]]) for name in self._like)

    def refuse_infinite(self, vectors: list[NDArray[np.float32]]) -> None:
        """Raise a `ProtocolError` if a number is NaN or infinite."""
        for name, vector in zip(self.names, vectors, strict=True):
            if not np.isfinite(vector).all():
                raise ProtocolError(
                    f"{name} holds NaN or infinite values and cannot be sent; lower the learning "
                    f"rate or clip the gradient"
                )


def seal(kind: Kind, layout: Layout, *pieces: bytes | memoryview[int]) -> bytes:
    """Return the frame around ``pieces``."""
    return b"".join([bytes([kind]), _checksum(kind, layout, *pieces), *pieces])


def unseal(kinds: Collection[Kind], layout: Layout, data: bytes) -> tuple[Kind, Reader]:
    """Return how a frame is written, and its writing.

    Raises:
        ProtocolError: the frame is damaged, of another codec or of other tensors.
    """
    if len(data) < HEAD:
        raise ProtocolError(f"{len(data)} bytes are too few for encoded tensors")
    if data[0] not in kinds:
        wanted = " or ".join(kind.name.lower() for kind in kinds)
        raise ProtocolError(
            f"the bytes are of kind {data[0]}, not {wanted}; use the same codec on both sides"
        )
    kind, rest = Kind(data[0]), memoryview(data)[HEAD:]
    if data[1:HEAD] != _checksum(kind, layout, rest):
        raise ProtocolError("encoded tensors are damaged, or were made for another model")
    return kind, Reader(rest)


def _checksum(kind: Kind, layout: Layout, *pieces: bytes | memoryview[int]) -> bytes:
    value = zlib.crc32(bytes([kind]), layout.digest)
    for piece in pieces:
        value = zlib.crc32(piece, value)
    return value.to_bytes(4, "little")


class Reader:
    """What is left to read of a frame."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def take(self, size: int) -> memoryview:
        """Return the next ``size`` bytes."""
        if size > len(self._data):
            raise ProtocolError(
                f"encoded tensors end too soon: {size} bytes are wanted, {len(self._data)} left"
            )
        taken, self._data = self._data[:size], self._data[size:]
        return taken

    def array(self, dtype: str, count: int) -> NDArray[Any]:
        """Return the next ``count`` numbers of a dtype."""
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


def varint(value: int) -> bytes:
    """Return a whole number from 0 to 2^35 - 1 in as many bytes as it needs, seven bits in each."""
    groups = [value & 127]
    while value := value >> 7:
        groups.append(value & 127)
    return bytes([group | 128 for group in groups[:-1]] + groups[-1:])


def words(values: NDArray[np.uint32]) -> bytes:
    """Return 32-bit words as bytes, without the zero bytes at the end of the last."""
    data = values.astype("<u4").tobytes()
    return data[:-3] + data[-3:].rstrip(b"\0")
