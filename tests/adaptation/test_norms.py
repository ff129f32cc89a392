"""Batch normalisation by the statistics of the images at hand."""

import numpy as np
import pytest
import torch
from torch import nn

from collegium.adaptation._norms import use_batch_statistics
from collegium.errors import DataError


def test_a_batch_is_normalised_by_its_own_mean_and_variance() -> None:
    network = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5)).double()
    network(torch.full((4, 3), 9.0).double())  # running statistics that must not matter
    use_batch_statistics(network)
    rows = np.random.default_rng(0).normal(2.0, 3.0, (6, 3))
    expected = (rows - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-5)
    for _ in range(2):
        np.testing.assert_allclose(network(torch.from_numpy(rows)).detach(), expected, atol=1e-12)


@pytest.mark.parametrize(
    ("network", "shape"),
    [
        (nn.BatchNorm1d(3), (1, 3)),
        (nn.BatchNorm2d(3), (1, 3, 1, 1)),
        (nn.BatchNorm1d(3), (1, 3, 1)),
    ],
    ids=["vector", "pixel", "token"],
)
def test_one_value_per_channel_has_no_statistics(
    network: nn.Module, shape: tuple[int, ...]
) -> None:
    use_batch_statistics(network)
    with pytest.raises(
        DataError, match=r"a batch held one value per channel .* choose the adapter"
    ):
        network(torch.ones(shape))
    twice = torch.ones(2, *shape[1:])
    assert torch.equal(network(twice), torch.zeros_like(twice))
