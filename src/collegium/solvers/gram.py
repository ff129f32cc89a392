"""Gram matrices and cosines of whole models, block by block.

The inner products of M models of d numbers are sums over coordinates, so they are computed from one
block of columns at a time: beside the models, memory holds one block of `WIDTH` columns and a
matrix of M x M, never one of M x d. A block is multiplied in the precision of its numbers, mostly
float32, and the products of the blocks are added in float64. Large models are multiplied by loops
of our own (`collegium.solvers.products`): torch takes as long again as reading the models does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from collegium.core.lazy import torch
from collegium.core.tensors import Tensors, require_same_names
from collegium.errors import ProtocolError

if TYPE_CHECKING:
    from torch import Tensor

Array = NDArray[Any]

WIDTH = 1 << 16
"""Columns of a block; those of 20 models in float32 are 5 MB."""

LARGE = 1 << 24
"""Least numbers of all models for which loading the compiled loops pays off."""

APART = 16
"""Unused columns between rows.

Rows a power of two apart would share lines of the cache, at two thirds of the speed.
"""


def gram(vectors: Sequence[Tensors], start: Tensors | None = None) -> Array:
    """Return the inner products of some models, or of their differences from a common one.

    Args:
        vectors: M mappings with the same names and shapes. Names that share memory in the first of
            them (tied weights) count once; integer tensors do not count.
        start: subtracted from each of them, block by block; None: nothing is subtracted.

    Returns:
        (M, M), float64, symmetric.

    Raises:
        ProtocolError: names differ, or an inner product is not finite.
    """
    columns = sum(vectors[0][name].numel() for name in _compared_names(vectors))
    return gram_of_blocks(column_blocks(vectors, start), len(vectors), columns)


def gram_of_blocks(parts: Iterable[Tensor], count: int, columns: int) -> Array:
    """Return the inner products of rows that arrive as blocks of columns.

    Args:
        parts: tensors (count, any width), float32 or float64, which may share one buffer.
        count: number of rows.
        columns: number of columns of all blocks together.

    Returns:
        (count, count), float64, symmetric.

    Raises:
        ProtocolError: an inner product is not finite.
    """
    total = np.zeros((count, count))
    for part in parts:
        if part.device.type == "cpu" and count * columns >= LARGE:
            from collegium.solvers.products import add_products

            add_products(total, part)
        else:
            total += (part @ part.T).double().cpu().numpy()
    if not np.isfinite(total).all():
        raise ProtocolError(
            "the models are too large to compare (an inner product is not finite): training has "
            "diverged; lower training.lr or set clip_norm"
        )
    return (total + total.T) / 2


def gram_by_name(vectors: Sequence[Tensors], start: Tensors | None = None) -> dict[str, Array]:
    """Return the result of `gram` for every tensor separately, in the models' order.

    The sum over the names is `gram` up to rounding.

    Args:
        vectors: see `gram`.
        start: see `gram`.
    """
    return {
        name: gram(
            [vector.select([name]) for vector in vectors],
            None if start is None else start.select([name]),
        )
        for name in _compared_names(vectors)
    }


def cosines(products: Array) -> Array:
    """Return the cosines of the vectors of a Gram matrix.

    A zero vector has no direction: its cosine with every vector, itself included, is 0.

    Args:
        products: (M, M) inner products.

    Returns:
        (M, M), float64, between -1 and 1; exactly 1 on the diagonal except for zero vectors.
    """
    lengths = np.sqrt(np.diagonal(products))
    nonzero = lengths > 0
    safe = np.where(nonzero, lengths, 1.0)
    result = np.clip(products / safe[:, None] / safe[None], -1.0, 1.0)
    result[~nonzero], result[:, ~nonzero] = 0.0, 0.0
    result[np.diag_indices_from(result)] = nonzero
    return result


def column_blocks(vectors: Sequence[Tensors], start: Tensors | None = None) -> Iterator[Tensor]:
    """Yield some models laid out as rows, a block of columns at a time, in one buffer.

    A block is overwritten when the next one is asked for. Small tensors share a block.

    Args:
        vectors: M mappings with the same names and shapes.
        start: subtracted from each of them; None: nothing is subtracted.

    Yields:
        (M, `WIDTH`), fewer columns in the last block: float64 if the models have float64 tensors,
        otherwise float32.

    Raises:
        ProtocolError: names differ.
    """
    names = _compared_names(vectors)
    if not names:
        return
    for other in (*vectors, *([] if start is None else [start])):
        require_same_names(vectors[0], other)
    buffer = _empty_block([vectors[0][name] for name in names], len(vectors))
    view = _numpy_if_alike([*vectors, *([] if start is None else [start])], names, buffer)
    target, filled = view(buffer), 0
    for name in names:
        rows = [view(vector[name].detach().reshape(-1)) for vector in vectors]
        origin = None if start is None else view(start[name].detach().reshape(-1))
        done = 0
        while done < len(rows[0]):
            end = min(len(rows[0]), done + buffer.shape[1] - filled)
            _fill(target[:, filled : filled + end - done], rows, origin, slice(done, end))
            filled, done = filled + end - done, end
            if filled == buffer.shape[1]:
                yield buffer
                filled = 0
    if filled:
        yield buffer[:, :filled]


def _empty_block(tensors: Sequence[Tensor], count: int) -> Tensor:
    """Return a buffer of ``count`` rows for the tensors of one model."""
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    columns = min(WIDTH, sum(tensor.numel() for tensor in tensors))
    dtype, device = torch.float64 if wide else torch.float32, tensors[0].device
    return torch.empty(count, columns + APART, dtype=dtype, device=device)[:, :columns]


def _numpy_if_alike(
    models: Sequence[Tensors], names: Sequence[str], buffer: Tensor
) -> Callable[[Tensor], Any]:
    """Return how to see tensors: by numpy, which needs less time for a call, if it computes alike.

    It does on the CPU, in the buffer's own precision.
    """
    alike = all(model[name].dtype == buffer.dtype for model in models for name in names)
    return torch.Tensor.numpy if alike and buffer.device.type == "cpu" else lambda tensor: tensor


def _fill(target: Any, rows: Sequence[Any], origin: Any, part: slice) -> None:
    """Write a part of each row, less that of the origin if there is one, in target's precision."""
    if origin is None:
        for line, row in zip(target, rows, strict=True):
            line[:] = row[part]
    elif isinstance(target, np.ndarray):
        with np.errstate(over="ignore", invalid="ignore"):  # as torch does
            for line, row in zip(target, rows, strict=True):
                np.subtract(row[part], origin[part], out=line)
    else:
        for line, row in zip(target, rows, strict=True):
            line.copy_(row[part]).sub_(origin[part])


def _compared_names(vectors: Sequence[Tensors]) -> list[str]:
    """Return the names of the floating-point tensors; those that share memory count once."""
    if not vectors:
        return []
    return [name for name, t in vectors[0].distinct().items() if t.is_floating_point()]
