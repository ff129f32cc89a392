"""Networks that scale what they get."""

import pytest
import torch
from torch import nn

from collegium.core.model_parts import find_parts
from collegium.models.factory import build_model
from collegium.models.standardised import Standardised


def test_shift_then_factor_and_a_missing_number_is_the_mean() -> None:
    network = Standardised(nn.Identity(), 3)
    network.shift.copy_(torch.tensor([1.0, 2.0, 0.0]))
    network.factor.copy_(torch.tensor([10.0, 0.5, 1.0]))
    rows = network(torch.tensor([[1.5, 4.0, 7.0], [float("nan"), 0.0, float("nan")]]))
    assert rows.tolist() == [[5, 1, 7], [0, -1, 0]]


def test_the_scaling_is_stored_and_not_trained() -> None:
    network = Standardised(build_model("logistic", in_features=2, out_features=2), 2)
    assert {"shift", "factor"} <= network.state_dict().keys()
    assert {name for name, _ in network.named_parameters()} == {
        "network.head.weight", "network.head.bias",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["mlp", "tabnet"])
def test_head_and_norms_are_those_of_the_network_inside(name: str) -> None:
    inner = build_model(name, in_features=3, out_features=2)
    own, parts = find_parts(inner), find_parts(Standardised(inner, 3))
    for role in ("head", "norm", "norm_statistics", "trainable"):
        assert getattr(parts, role) == {f"network.{tensor}" for tensor in getattr(own, role)}
    assert {"shift", "factor"} <= parts.body
