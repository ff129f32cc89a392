from typing import Any

import pytest
import torch
from torch import nn

from collegium.algorithms.distance import on
from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.fedbn import FedBN
from collegium.algorithms.fedper import FedPer
from collegium.algorithms.fedprox import FedProx
from collegium.algorithms.fedrep import FedRep
from collegium.algorithms.ifca import IFCA
from collegium.algorithms.iopfl import IOPFL
from collegium.algorithms.silobn import SiloBN
from collegium.core.algorithm import Algorithm
from collegium.core.dataset import TensorDataset
from collegium.core.model_parts import find_parts
from collegium.data.site import Site
from collegium.errors import ConfigError
from collegium.models.population import PopulationNorm
from collegium.models.tables import Logistic
from collegium.runtime.simulation import simulate
from collegium.tasks import ClassificationTask


def test_a_network_that_is_all_head_is_refused_by_methods_that_keep_the_head() -> None:
    data = TensorDataset({"image": torch.randn(4, 3), "label": torch.tensor([0, 1, 0, 1])})
    sites = [Site(name, data, data, data) for name in ("a", "b")]
    with pytest.raises(ConfigError, match="FedPer shares nothing of a network whose tensors"):
        simulate(FedPer(), sites, lambda: Logistic(3, 2), ClassificationTask(2), rounds=1)


def by_distance(method: Any, omega: float) -> Algorithm:
    made: Any = on(method)
    found: Algorithm = made(omega=omega)
    return found


class NoHead(nn.Module):
    """Scales its input, by no layer that could be a head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(3), nn.Parameter(torch.ones(3))


def layers(norm: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), *([norm] if norm else []), nn.Linear(4, 1))


@pytest.mark.parametrize(
    ("algorithm", "network", "name"),
    [
        (FedBN(), layers(nn.BatchNorm1d(4)), None),
        (FedBN(), layers(nn.LayerNorm(4)), None),
        (FedBN(), layers(), "fedavg"),
        (SiloBN(), layers(nn.BatchNorm1d(4)), None),
        (SiloBN(), layers(nn.LayerNorm(4)), "fedavg"),  # it has no running statistics
        (FedBN(), layers(PopulationNorm(4)), None),  # it keeps mean and variance at home
        (SiloBN(), layers(PopulationNorm(4)), "fedavg"),
        (FedPer(), layers(), None),
        (FedPer(), NoHead(), "fedavg"),
        (by_distance(FedBN, 0.5), layers(), "fedavg+distance"),
        (by_distance(FedBN, 1.0), layers(), "fedavg"),
        (by_distance(FedAvg, 1.0), layers(), "fedavg"),
        (by_distance(FedAvg, 0.5), layers(), None),
        (FedProx(mu=0.0), layers(), "fedavg"),
        (FedProx(mu=0.1), layers(), None),
        (IFCA(num_clusters=1), layers(), "fedavg"),
        (IOPFL(), layers(), None),  # its global model is FedAvg's, its personal ones are not
        (FedAvg(), layers(), None),
    ],
)
def test_a_method_knows_whether_it_is_another_one_on_a_network(
    algorithm: Algorithm, network: nn.Module, name: str | None
) -> None:
    assert algorithm.same_as(find_parts(network)) == name


def test_a_network_without_a_head_is_refused_by_the_method_that_trains_it_apart() -> None:
    with pytest.raises(ConfigError, match="FedRep trains the head apart, and the network has none"):
        FedRep().check_setup(["a", "b"], find_parts(NoHead()))
