import pytest
import torch
from torch import nn

from collegium.core.tensors import Tensors
from collegium.tasks import SupervisedTask
from collegium.training.meta import gradient_at, split_batch
from collegium.training.objectives import LiveNetwork


@pytest.mark.parametrize(
    ("total", "count", "sizes"),
    [(1, 2, [1, 1]), (3, 2, [3, 3]), (5, 2, [2, 3]), (5, 3, [5, 5, 5]), (8, 3, [2, 3, 3])],
)
def test_a_batch_is_divided_unless_a_part_would_have_one_example(
    total: int, count: int, sizes: list[int]
) -> None:
    parts = split_batch({"image": torch.arange(total), "label": torch.arange(total) + 10}, count)
    assert [len(part["image"]) for part in parts] == sizes
    assert all(part["label"].tolist() == (part["image"] + 10).tolist() for part in parts)
    if sum(sizes) == total:
        assert torch.cat([part["image"] for part in parts]).tolist() == list(range(total))


def test_the_gradient_elsewhere_leaves_network_and_graph_alone() -> None:
    """The mean of (2 w - 1)^2 and (4 w - 2)^2 has the slope (2 w - 1) 2 + (4 w - 2) 4."""
    layer = nn.Linear(1, 1, bias=False).double()
    layer.weight.data.fill_(9.0)
    network = LiveNetwork(
        layer, SupervisedTask(nn.functional.mse_loss), dict(layer.named_parameters()), lr=1
    )
    batch = {"image": torch.tensor([[2.0], [4.0]]).double(), "label": torch.tensor([[1.0], [2.0]])}
    theta = Tensors({"weight": torch.tensor([[1.5]]).double()})
    loss, gradient = gradient_at(network, batch, theta)
    assert (loss.item(), gradient["weight"].item()) == ((4.0 + 16.0) / 2, 4.0 + 16.0)
    assert not loss.requires_grad
    assert not theta["weight"].requires_grad
    assert layer.weight.item() == 9.0
    assert layer.weight.grad is None
