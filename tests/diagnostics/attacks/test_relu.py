"""A ReLU whose slope has a derivative, held against torch's."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from collegium.diagnostics.attacks.relu import WIDTH, TwiceDifferentiableReLU


def value_and_slope(network: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    value = network(x).square().sum()
    return value.detach(), torch.autograd.grad(value, x)[0]


@pytest.mark.parametrize("inplace", [False, True])
def test_outputs_and_first_derivatives_are_those_of_torch(inplace: bool) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 7), nn.ReLU(inplace=inplace), nn.Linear(7, 3))
    x = torch.randn(4, 5)
    plain = value_and_slope(network, x)
    with TwiceDifferentiableReLU():
        mine = value_and_slope(network, x)
    assert all(torch.equal(a, b) for a, b in zip(plain, mine, strict=True))


def test_the_slope_has_the_derivative_of_a_sigmoid() -> None:
    x = torch.tensor([-1.0, -0.1, 0.2, 1.5], dtype=torch.float64, requires_grad=True)
    for relu in (functional.relu, torch.relu, nn.ReLU(), lambda y: y.relu()):
        with TwiceDifferentiableReLU():
            (first,) = torch.autograd.grad(relu(x).sum(), x, create_graph=True)
        assert first.tolist() == [0, 0, 1, 1]
        (second,) = torch.autograd.grad(first.sum(), x)
        width = WIDTH * x.detach().numpy().std()
        scaled = torch.tensor(x.detach().numpy() / width)
        expected = 1 / (4 * width * torch.cosh(scaled / 2) ** 2)
        torch.testing.assert_close(second, expected)


def test_in_place_relu_changes_its_argument() -> None:
    x = torch.tensor([-1.0, 2.0])
    with TwiceDifferentiableReLU():
        functional.relu_(x)
        y = torch.tensor([-3.0, 4.0])
        functional.relu(y, inplace=True)
    assert x.tolist() == [0, 2]
    assert y.tolist() == [0, 4]
    assert x.relu_().tolist() == [0, 2]
