from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from collegium.solvers.products import PIECE, add_products


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def block(count: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count)).to(dtype)


def products(rows: Tensor) -> Any:
    total = np.zeros((len(rows), len(rows)))
    add_products(total, rows)
    return total


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 13, 21])
@pytest.mark.parametrize("width", [1, 7, 64, PIECE, PIECE + 1, 3 * PIECE + 77])
def test_products_are_those_of_numpy_for_any_shape(count: int, width: int) -> None:
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
        rows = block(count, width, dtype)
        exact = rows.double().numpy()
        found = products(rows)
        lengths = np.linalg.norm(exact, axis=1)
        apart = np.abs(found - exact @ exact.T) / np.outer(lengths, lengths)
        assert apart.max() < tolerance
        assert np.array_equal(found, found.T)


def test_products_are_added_to_what_is_there() -> None:
    rows = block(6, 50)
    total = np.full((6, 6), 100.0)
    add_products(total, rows)
    np.testing.assert_allclose(total - 100, products(rows), atol=1e-12)


@pytest.mark.parametrize("count", [1, 7, 20])
def test_bits_do_not_depend_on_threads_or_on_the_place_in_memory(count: int) -> None:
    rows, expected = block(count, 5001), set()
    for threads in (1, 2, 3, 40):
        torch.set_num_threads(threads)
        expected.add(products(rows).tobytes())
    spacious = torch.zeros(count + 1, 5100)
    for offset in (0, 1, 3, 16):
        view = spacious[1:, offset : offset + 5001]
        view.copy_(rows)
        expected.add(products(view).tobytes())
    expected.add(products(rows.T.contiguous().T).tobytes())
    assert len(expected) == 1


def test_numbers_that_are_not_finite_stay_so() -> None:
    rows = block(3, 40)
    rows[1, 7] = torch.inf
    rows[2, 8] = torch.nan
    found = products(rows)
    assert np.isfinite(found[0, 0])
    assert found[1, 1] == np.inf
    assert np.isnan(found[2]).all()
