import pytest
import torch

from collegium.algorithms.fedper import FedPer
from collegium.core.dataset import TensorDataset
from collegium.data.site import Site
from collegium.errors import ConfigError
from collegium.models.tables import Logistic
from collegium.runtime.simulation import simulate
from collegium.tasks import ClassificationTask


def test_a_network_that_is_all_head_is_refused_by_methods_that_keep_the_head() -> None:
    data = TensorDataset({"image": torch.randn(4, 3), "label": torch.tensor([0, 1, 0, 1])})
    sites = [Site(name, data, data, data) for name in ("a", "b")]
    with pytest.raises(ConfigError, match="FedPer shares nothing of a network whose tensors"):
        simulate(FedPer(), sites, lambda: Logistic(3, 2), ClassificationTask(2), rounds=1)
