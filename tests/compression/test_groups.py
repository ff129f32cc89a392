import math
from typing import Any

import numpy as np
import pytest
import torch

from collegium.compression._frame import FlatLayout
from collegium.compression._groups import kernel_groups, read_groups, write_groups
from collegium.core.tensors import Tensors


def words_of(data: bytes) -> Any:
    return np.frombuffer(data + bytes(-len(data) % 4), "<u4").astype(np.uint32)


def layout_of(**shapes: tuple[int, ...]) -> FlatLayout:
    return FlatLayout(Tensors({name: torch.zeros(shape) for name, shape in shapes.items()}))


def bound(positions: Any, layout: FlatLayout) -> float:
    """Bits of kept positions by the density of each tensor, and of their signs."""
    kept = np.diff(np.searchsorted(positions, layout.starts))
    bits = float(len(positions))
    for size, count in zip(np.diff(layout.starts), kept, strict=True):
        for part in (count, size - count):
            bits -= part * math.log2(part / size) if part else 0
    return bits


def drawn(layout: FlatLayout, densities: list[float], *, kernels: int = 1) -> tuple[Any, Any]:
    """Kept positions, in stretches of ``kernels`` numbers of one sign; densities by tensor."""
    draws = np.random.default_rng(5)
    mask, sign = np.zeros(layout.total, np.bool_), np.zeros(layout.total, np.bool_)
    for start, stop, density in zip(layout.starts[:-1], layout.starts[1:], densities, strict=True):
        pieces = -(-(stop - start) // kernels)
        mask[start:stop] = np.repeat(draws.random(pieces) < density, kernels)[: stop - start]
        sign[start:stop] = np.repeat(draws.random(pieces) < 0.5, kernels)[: stop - start]
    positions = np.flatnonzero(mask).astype(np.int32)
    return positions, sign[positions]


@pytest.mark.parametrize(
    ("shape", "width"),
    [
        ((6, 5, 3, 3), 9), ((6, 5, 2, 2), 4), ((6, 5, 3, 3, 3), 9), ((6, 5, 5, 5), 5),
        ((6, 5, 7, 7), 7), ((6, 5, 4, 4), 8), ((6, 5, 1, 1), 8), ((6, 5), 8), ((30,), 8), ((), 8),
        ((6, 5, 11, 11), 8), ((6, 5, 2, 1), 8), ((6, 5, 2, 2, 2), 8),
    ],
)  # fmt: skip
def test_a_group_is_a_kernel_or_an_equal_part_of_one(shape: tuple[int, ...], width: int):
    assert kernel_groups(layout_of(a=shape)).widths.tolist() == [width]


@pytest.mark.parametrize("density", [0.0025, 0.0265, 0.16, 0.6, 1.0])
def test_numbers_kept_at_random_take_the_entropy_of_each_tensor(density: float):
    layout = layout_of(a=(64, 300, 3, 3), b=(100, 1000), c=(37, 11), d=(64,))
    positions, negative = drawn(layout, [density, density / 5, density, density / 2])
    data = write_groups(positions, negative, layout)
    assert len(data) * 8 < 1.03 * bound(positions, layout) + 200
    found, signs = read_groups(words_of(data), layout)
    np.testing.assert_array_equal(found, positions)
    np.testing.assert_array_equal(signs, negative)


def test_kernels_kept_as_a_whole_take_far_less_than_that():
    layout = layout_of(a=(64, 300, 3, 3))
    positions, negative = drawn(layout, [0.03], kernels=9)
    data = write_groups(positions, negative, layout)
    assert len(data) * 8 < 0.25 * bound(positions, layout)
    found, signs = read_groups(words_of(data), layout)
    np.testing.assert_array_equal(found, positions)
    np.testing.assert_array_equal(signs, negative)


def test_each_tensor_may_have_patterns_of_its_own():
    layout = layout_of(a=(50, 40, 3, 3), b=(50, 40, 3, 3))
    rows, columns = np.arange(0, 18_000, 9) + 3, np.arange(18_000, 36_000, 9) + 7
    positions = np.sort(np.concatenate([rows, rows + 1, rows + 2, columns])).astype(np.int32)
    negative = np.zeros(len(positions), np.bool_)
    data = write_groups(positions, negative, layout)
    assert len(data) < 4000 / 8 + 60  # a bit for the first sign of every group, and tables
    np.testing.assert_array_equal(read_groups(words_of(data), layout)[0], positions)


def test_a_last_group_that_is_not_full_is_no_trouble():
    layout = layout_of(a=(13,), b=(3,), c=(1,))
    positions = np.array([0, 7, 8, 12, 13, 15, 16], np.int32)
    negative = positions % 2 == 0
    found, signs = read_groups(words_of(write_groups(positions, negative, layout)), layout)
    np.testing.assert_array_equal(found, positions)
    np.testing.assert_array_equal(signs, negative)
