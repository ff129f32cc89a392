import numpy as np
import pytest
import torch
from torch import nn

from collegium.models.ghost import GhostBatchNorm


def rows(count: int, columns: int = 3) -> torch.Tensor:
    return 2 + 3 * torch.randn(count, columns, generator=torch.Generator().manual_seed(count))


def by_hand(norm: nn.BatchNorm1d, parts: list[np.ndarray]) -> np.ndarray:
    """Each part by its own mean and variance."""
    return np.concatenate(
        [(part - part.mean(0)) / np.sqrt(part.var(0) + norm.eps) for part in parts]
    )


@pytest.mark.parametrize("virtual", [None, 12, 100])
def test_it_is_plain_batch_normalisation_where_the_virtual_batch_is_the_batch(
    virtual: int | None,
) -> None:
    ghost, plain = GhostBatchNorm(3, virtual, momentum=0.3), nn.BatchNorm1d(3, momentum=0.3)
    x = rows(12)
    assert torch.equal(ghost(x), plain(x))
    for name, tensor in plain.state_dict().items():
        assert torch.equal(ghost.state_dict()[name], tensor)


@pytest.mark.parametrize(
    ("count", "cuts"),
    [(8, [4]), (10, [4, 8]), (9, [4]), (33, [4, 8, 12, 16, 20, 24, 28]), (5, []), (3, []), (4, [])],
)
def test_every_part_is_normalised_by_itself_and_a_last_row_joins_the_part_before(
    count: int, cuts: list[int]
) -> None:
    norm, x = GhostBatchNorm(3, 4), rows(count)
    expected = by_hand(norm, np.split(x.double().numpy(), cuts))
    np.testing.assert_allclose(norm(x).detach().numpy(), expected, atol=1e-5)
    assert int(norm.state_dict()["num_batches_tracked"]) == len(cuts) + 1


def test_running_statistics_move_once_for_each_part() -> None:
    norm, x = GhostBatchNorm(3, 4, momentum=0.25), rows(9)
    mean, variance = np.zeros(3), np.ones(3)
    for part in np.split(x.double().numpy(), [4]):
        mean = 0.75 * mean + 0.25 * part.mean(0)
        variance = 0.75 * variance + 0.25 * part.var(0, ddof=1)
    norm(x)
    np.testing.assert_allclose(norm.state_dict()["running_mean"], mean, rtol=1e-5)
    np.testing.assert_allclose(norm.state_dict()["running_var"], variance, rtol=1e-5)


def test_a_batch_of_one_row_uses_the_running_statistics_and_leaves_them() -> None:
    norm = GhostBatchNorm(3, 4)
    norm(rows(8))
    before = {name: tensor.clone() for name, tensor in norm.state_dict().items()}
    x = rows(1)
    centred = x.numpy() - before["running_mean"].numpy()
    expected = centred / np.sqrt(before["running_var"].numpy() + norm.eps)
    np.testing.assert_allclose(norm(x).detach().numpy(), expected, rtol=1e-5)
    assert all(torch.equal(norm.state_dict()[name], tensor) for name, tensor in before.items())


def test_in_evaluation_mode_parts_do_not_matter() -> None:
    norm = GhostBatchNorm(3, 2)
    norm(rows(8))
    norm.eval()
    x = rows(5)
    torch.testing.assert_close(norm(x), torch.cat([norm(row[None]) for row in x]))
