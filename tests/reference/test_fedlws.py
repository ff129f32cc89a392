from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from collegium.algorithms.distance import on
from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.fedlws import FedLWS
from collegium.core.algorithm import Replies
from collegium.core.dataset import TensorDataset
from collegium.core.message import Message
from collegium.core.model_parts import find_parts
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError

ROUNDS = 3
LAYERS = {"bn_in": ["bn_in.weight"], "norm": ["norm.weight", "norm.bias"]}
"""The layers of `numpy_rounds`, whose names mislead on purpose; ``conv`` is the normalisation."""


class Answered:
    """A server whose clients have already returned their models."""

    def __init__(self, network: nn.Module, w: Any, models: Any, shares: Any) -> None:
        self.parts = find_parts(network)
        self.state: dict[str, Any] = {"model": self.tensors(w)}
        self._replies = [
            (f"c{index}", Message.of(model=self.tensors(model), num_examples=share))
            for index, (model, share) in enumerate(zip(models, shares, strict=True))
        ]

    @staticmethod
    def tensors(model: Any) -> Tensors:
        return Tensors({n: torch.tensor([v], dtype=torch.float64) for n, v in model.items()})

    def ask(self, method: Any, **items: Any) -> Replies:
        return Replies(iter(self._replies))


def test_reference_values_of_a_layer_and_of_both_ends_of_the_clip(newer_golden: Any) -> None:
    case = newer_golden["fedlws"]
    layers = ["layer1", "layer2", "layer3_upper_clamp"]
    network = nn.ModuleDict({name: nn.Linear(2, 1, bias=False) for name in layers})
    w, *models = (
        {f"{name}.weight": pick(case[name]) for name in layers}
        for pick in (lambda c: c["w"], lambda c: c["w_i"][0], lambda c: c["w_i"][1])
    )
    server: Any = Answered(network, w, models, (1, 3))
    FedLWS().round(server)
    for name in layers:
        assert server.state["gamma"][name] == pytest.approx(case[name]["gamma"], rel=1e-9)
        found = server.state["model"][f"{name}.weight"][0]
        np.testing.assert_allclose(found, case[name]["w_new"], rtol=1e-9)


def expected(by_hand: Any, w: Any, models: Any, sizes: Any, layers: Any, beta: float) -> Any:
    """The new model and gamma by layer."""
    new, gammas = by_hand.average(models, sizes), {}
    for layer, names in layers.items():
        rows = np.stack([np.concatenate([m[n].ravel() for n in names]) for m in (w, new, *models)])
        old, average, own = rows[0], rows[1], rows[2:]
        spread = np.sqrt(((own - own.mean(0)) ** 2).sum(1)).mean()
        tau = np.clip(beta * spread, 0.01, 0.2)
        length = np.sqrt((old**2).sum())
        gammas[layer] = length / (length + tau * np.sqrt(((average - old) ** 2).sum()))
        new |= {n: gammas[layer] * new[n] for n in names}
    return new, gammas


@pytest.mark.parametrize("shrink_norm", [False, True])
def test_rounds_follow_the_equations(federation: Any, by_hand: Any, shrink_norm: bool) -> None:
    beta = 0.1
    outcome = federation.run(FedLWS(beta=beta, shrink_norm=shrink_norm), rounds=ROUNDS)
    layers = LAYERS | ({"conv": ["conv.weight", "conv.bias"]} if shrink_norm else {})
    w = federation.initial()
    for t in range(1, ROUNDS + 1):
        models = [
            by_hand.train(
                w, federation.data[name], federation.batches(name, t), 0.1 * 0.8 ** (t - 1)
            )[0]
            for name in federation.names
        ]
        w, gammas = expected(by_hand, w, models, [5, 8, 11], layers, beta)
        by_hand.assert_same(outcome.server[t]["model"], w, f"round {t}")
        assert outcome.server[t]["gamma"] == pytest.approx(gammas, rel=1e-9)
        assert all(0 < gamma < 1 for gamma in gammas.values())


def test_a_layer_that_is_zero_is_not_shrunk() -> None:
    """By the equation gamma would be 0, and the layer 0 for ever."""
    network = nn.Linear(2, 1, bias=False)
    server: Any = Answered(
        network, {"weight": [0.0, 0.0]}, [{"weight": [1.0, 2.0]}, {"weight": [3.0, 0.0]}], (1, 1)
    )
    FedLWS().round(server)
    assert server.state["gamma"] == {"": 1.0}
    assert server.state["model"]["weight"].tolist() == [[2.0, 1.0]]


def test_clients_that_agree_shrink_by_the_least_tau() -> None:
    network = nn.Linear(2, 1, bias=False)
    server: Any = Answered(network, {"weight": [3.0, 4.0]}, [{"weight": [3.0, 6.0]}] * 3, (1, 5, 2))
    FedLWS(beta=100.0, tau_min=0.05).round(server)
    assert server.state["gamma"][""] == pytest.approx(5 / (5 + 0.05 * 2), rel=1e-12)


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_with_beta_and_tau_min_0_it_is_fedavg_bit_by_bit(federation: Any, weighting: Any) -> None:
    method = FedLWS(beta=0.0, tau_min=0.0, weighting=weighting)
    found = federation.run(method).server[3]["model"]
    expected = federation.run(FedAvg(weighting=weighting)).server[3]["model"]
    assert all(found[name].equal(tensor) for name, tensor in expected.items())


def test_tied_weights_are_shrunk_once_and_stay_tied() -> None:
    network = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    network["b"].weight = network["a"].weight

    def model(value: float) -> Tensors:
        shared = torch.full((2, 2), value, dtype=torch.float64)
        return Tensors({"a.weight": shared, "b.weight": shared})

    server: Any = Answered(network, {"a.weight": 0.0, "b.weight": 0.0}, [], ())
    server.state["model"] = model(1.0)
    server._replies = [("c0", Message.of(model=model(3.0), num_examples=1))]
    FedLWS().round(server)
    gamma = 2 / (2 + 0.01 * 4)
    assert server.state["gamma"] == pytest.approx({"a": gamma})
    new = server.state["model"]
    assert new["a.weight"] is new["b.weight"]
    np.testing.assert_allclose(new["a.weight"], 3 * gamma)


def test_a_site_without_examples_counts_in_no_mean(federation: Any, by_hand: Any) -> None:
    sites = federation.sites()
    empty = TensorDataset({key: value[:0] for key, value in sites[1].train.inputs.items()})
    sites[1] = replace(sites[1], train=empty)
    outcome = federation.run(FedLWS(beta=0.1), rounds=1, sites=sites)
    w = federation.initial()
    models = [
        by_hand.train(w, federation.data[name], federation.batches(name, 1), 0.1)[0]
        for name in "AC"
    ]
    _, gammas = expected(by_hand, w, models, [5, 11], LAYERS, 0.1)
    assert outcome.server[1]["gamma"] == pytest.approx(gammas, rel=1e-9)


def test_weights_by_distance_are_those_of_the_average(federation: Any) -> None:
    made: Callable[..., Any] = on(FedLWS)
    found = federation.run(made(omega=0.5, beta=0.0, tau_min=0.0), rounds=1).server[1]["model"]
    other: Callable[..., Any] = on(FedAvg)
    expected = federation.run(other(omega=0.5), rounds=1).server[1]["model"]
    assert all(found[name].equal(tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"beta": -0.1}, r"FedLWS\.beta: should be at least 0"),
        ({"tau_min": -0.1}, r"FedLWS\.tau_min: should be at least 0"),
        ({"tau_min": 0.5}, r"tau_min is 0\.5, above tau_max, which is 0\.2"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(fields: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FedLWS(**fields)
