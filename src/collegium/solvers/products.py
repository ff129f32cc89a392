"""Inner products of a few long rows, tile by tile, in compiled loops.

Libraries multiply matrices of few rows at half of a processor's speed or less, and compute both
halves of a symmetric product. Here 4 x 4 products at a time stay in registers while eight rows are
read, piece by piece of what the nearest caches hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from collegium.core.kernels import compiled, compiled_sums, in_threads

if TYPE_CHECKING:
    from torch import Tensor

Array = NDArray[Any]

TILE = 4

PIECE = 2048
"""Columns whose products are added in the rows' own precision."""


def add_products(total: Array, block: Tensor) -> None:
    """Add the inner products of a block's rows to a matrix.

    They are computed in as many threads as torch may use: each in one of them, in an order that
    depends neither on their number nor on the place in memory. The sum is exactly symmetric.

    Args:
        total: (count, count), float64, changed in place.
        block: (count, any width), float32 or float64, on the CPU.
    """
    if block.stride(1) != 1:
        block = block.contiguous()
    count, width = block.shape
    stride = block.stride(0)
    rows = block.as_strided(((count - 1) * stride + width,), (1,)).numpy()
    starts = range(0, count, TILE)
    tiles = np.array([(i, j) for i in starts for j in starts if i <= j])
    in_threads([len(tiles)], lambda _, share: _add_tiles(total, rows, stride, width, tiles[share]))


@compiled
def _add_tiles(total: Array, rows: Array, stride: int, width: int, tiles: Array) -> None:
    """Add the products of some tiles, given by the indices of their first rows."""
    last = len(total) - 1
    for begin in range(0, width, PIECE):
        end = min(begin + PIECE, width)
        for tile in range(len(tiles)):
            i, j = tiles[tile, 0], tiles[tile, 1]
            products = _multiply(rows, stride, begin, end, i, j, last)
            for n in range(TILE * TILE):
                row, column = i + n // TILE, j + n % TILE
                if row <= last and column <= last:
                    total[row, column] += products[n]
                    if i != j:
                        total[column, row] += products[n]


@compiled_sums
def _multiply(
    rows: Array, stride: int, begin: int, end: int, i: int, j: int, last: int
) -> tuple[float, ...]:
    """Return the products of rows i to i + 3 with rows j to j + 3; none is behind the last one."""
    a0, b0 = _part(rows, stride, begin, end, i), _part(rows, stride, begin, end, j)
    a1 = _part(rows, stride, begin, end, min(i + 1, last))
    a2 = _part(rows, stride, begin, end, min(i + 2, last))
    a3 = _part(rows, stride, begin, end, min(i + 3, last))
    b1 = _part(rows, stride, begin, end, min(j + 1, last))
    b2 = _part(rows, stride, begin, end, min(j + 2, last))
    b3 = _part(rows, stride, begin, end, min(j + 3, last))
    s00 = s01 = s02 = s03 = s10 = s11 = s12 = s13 = rows.dtype.type(0)
    s20 = s21 = s22 = s23 = s30 = s31 = s32 = s33 = rows.dtype.type(0)
    for k in range(end - begin):
        x0, x1, x2, x3 = a0[k], a1[k], a2[k], a3[k]
        y0, y1, y2, y3 = b0[k], b1[k], b2[k], b3[k]
        s00, s01, s02, s03 = s00 + x0 * y0, s01 + x0 * y1, s02 + x0 * y2, s03 + x0 * y3
        s10, s11, s12, s13 = s10 + x1 * y0, s11 + x1 * y1, s12 + x1 * y2, s13 + x1 * y3
        s20, s21, s22, s23 = s20 + x2 * y0, s21 + x2 * y1, s22 + x2 * y2, s23 + x2 * y3
        s30, s31, s32, s33 = s30 + x3 * y0, s31 + x3 * y1, s32 + x3 * y2, s33 + x3 * y3
    return s00, s01, s02, s03, s10, s11, s12, s13, s20, s21, s22, s23, s30, s31, s32, s33


@compiled
def _part(rows: Array, stride: int, begin: int, end: int, row: int) -> Array:
    """Return some columns of a row."""
    return rows[row * stride + begin : row * stride + end]
