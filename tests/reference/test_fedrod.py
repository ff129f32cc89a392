from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from collegium.algorithms.fedrod import FedRoD
from collegium.core.dataset import TensorDataset
from collegium.core.model_parts import find_parts, fix_roles
from collegium.core.tensors import Tensors
from collegium.data.site import Site
from collegium.models.factory import build_model
from collegium.models.heads import attach_second_head, second_head_of
from collegium.runtime.simulation import simulate
from collegium.tasks import SupervisedTask
from collegium.training.loop import TrainingConfig

RNG = np.random.default_rng(5)
SITES = {"A": (6, 1), "B": (2, 8)}
"""By site how many cases there are of class 0 and 1; class 2 is absent everywhere."""

LR, GAMMA = 0.3, 0.7


def classifier() -> nn.Module:
    """A body, which is linear, and a head with three classes."""
    layers = {"body": nn.Linear(4, 2, bias=False), "out": nn.Linear(2, 3)}
    network = nn.Sequential()
    for name, layer in layers.items():
        network.add_module(name, layer)
    return network.double()


def data() -> dict[str, tuple[Any, Any]]:
    rng = np.random.default_rng(5)
    return {
        name: (rng.normal(size=(sum(counts), 4)), np.repeat([0, 1], counts))
        for name, counts in SITES.items()
    }


def entropy_slope(logits: Any, label: Any) -> Any:
    """The gradient of the mean cross-entropy by the logits."""
    exp = np.exp(logits - logits.max(1, keepdims=True))
    chance = exp / exp.sum(1, keepdims=True)
    return (chance - np.eye(3)[label]) / len(label)


def expected(model: Any, gamma: float, rounds: int) -> tuple[Any, dict[str, Any]]:
    """Full-batch steps of both heads by hand, and averages by the number of cases."""
    own = {
        name: {"weight": model["out.weight"], "bias": model["out.bias"], "gate": 0.0}
        for name in SITES
    }
    for _ in range(rounds):
        trained = []
        for name, (x, y) in data().items():
            shift = gamma * np.log(np.bincount(y, minlength=3) + 1.0)
            w, p = dict(model), own[name]
            features = x @ w["body.weight"].T
            generic = features @ w["out.weight"].T + w["out.bias"]
            second = features @ p["weight"].T + p["bias"]
            slope = entropy_slope(generic + shift, y)
            by_own = entropy_slope(generic + p["gate"] * second, y)
            w |= {
                "body.weight": w["body.weight"] - LR * (slope @ w["out.weight"]).T @ x,
                "out.weight": w["out.weight"] - LR * slope.T @ features,
                "out.bias": w["out.bias"] - LR * slope.sum(0),
            }
            own[name] = {
                "weight": p["weight"] - LR * p["gate"] * by_own.T @ features,
                "bias": p["bias"] - LR * p["gate"] * by_own.sum(0),
                "gate": p["gate"] - LR * (by_own * second).sum(),
            }
            trained.append(w)
        share = np.array([7, 10]) / 17
        model = {n: share[0] * trained[0][n] + share[1] * trained[1][n] for n in model}
    return model, own


@pytest.mark.parametrize("gamma", [0.0, GAMMA])
def test_both_heads_follow_their_own_loss(gamma: float, tmp_path: Any) -> None:
    sites = []
    for name, (x, y) in data().items():
        cases = TensorDataset({"image": torch.tensor(x), "label": torch.tensor(y)})
        sites.append(Site(name, cases, cases, cases))
    network = classifier()
    outcome = simulate(
        FedRoD(gamma=gamma), sites, network, SupervisedTask(nn.functional.cross_entropy),
        rounds=3, output=tmp_path / "run",
        training=TrainingConfig(optimizer="sgd", lr=LR, batch_size=100),
    )  # fmt: skip
    start = {name: tensor.numpy().copy() for name, tensor in network.state_dict().items()}
    model, own = expected(start, gamma, rounds=3)
    assert outcome.model is not None
    for name, value in model.items():
        np.testing.assert_allclose(outcome.model[name], value, rtol=1e-9, atol=1e-12)
    for site, head in own.items():
        personal = outcome.personal[site]
        assert head["gate"] != 0
        np.testing.assert_allclose(personal["second_head.gate"], head["gate"], rtol=1e-9)
        np.testing.assert_allclose(personal["second_head.layer.weight"], head["weight"], rtol=1e-9)


@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_in_evaluation_the_outputs_of_a_u_net_s_two_heads_are_added(norm: str) -> None:
    torch.manual_seed(0)
    network = build_model("unet", in_channels=1, out_channels=3, channels=(4, 8), norm=norm)
    as_built = Tensors(network.state_dict()).clone()
    images = torch.randn(2, 1, 16, 16)
    network.eval()
    plain = network(images)
    fix_roles(network)
    attach_second_head(network)
    assert torch.equal(network(images), plain)  # the gate is closed
    second: Any = network.get_submodule("second_head")
    copied = second_head_of(as_built, find_parts(network))
    assert copied.keys() == {name for name in network.state_dict() if "second_head" in name}
    network.load_state_dict(
        {**network.state_dict(), **copied, "second_head.gate": torch.tensor(0.5)}
    )
    torch.testing.assert_close(network(images), 1.5 * plain)  # of two equal heads
    network.train()
    trained = network(images)
    second.gate.data.fill_(2.0)
    torch.testing.assert_close(network(images), trained)  # the network as it was built
