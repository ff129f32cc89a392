"""FedAvgM, FedAdam and FedYogi against torch's SGD and against their equations in numpy."""

from typing import Any

import numpy as np
import pytest
import torch

from collegium.algorithms.fedadam import FedAdam
from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.fedavgm import FedAvgM
from collegium.algorithms.fedprox import FedProx
from collegium.algorithms.fedyogi import FedYogi
from collegium.errors import ConfigError
from collegium.experiment.config.registry import ALGORITHMS
from collegium.testing.toy import ToyFederation

ROUNDS = 3
SIZES = [5, 8, 11]


def mean_of_round(federation: Any, by_hand: Any, model: Any, t: int) -> Any:
    """The mean of the clients' models after a round from a model."""
    trained = [
        by_hand.train(
            model, federation.data[name], federation.batches(name, t), 0.1 * 0.8 ** (t - 1)
        )[0]
        for name in federation.names
    ]
    return by_hand.average(trained, SIZES)


def test_momentum_is_torch_s_sgd_on_the_mean_update(federation: Any, by_hand: Any) -> None:
    outcome = federation.run(FedAvgM(server_lr=0.5, momentum=0.7), rounds=ROUNDS)
    model = federation.initial()
    parameters = {n: torch.tensor(np.array(model[n])) for n in by_hand.PARAMETERS}
    sgd = torch.optim.SGD(parameters.values(), lr=0.5, momentum=0.7)
    for t in range(1, ROUNDS + 1):
        mean = mean_of_round(federation, by_hand, model, t)
        for name, parameter in parameters.items():
            parameter.grad = torch.tensor(model[name] - mean[name])
        sgd.step()
        model = mean | {name: p.numpy().copy() for name, p in parameters.items()}
        by_hand.assert_same(outcome.server[t]["model"], model, f"round {t}")
    by_hand.assert_same(outcome.deployed["global"], model)


@pytest.mark.parametrize("kind", [FedAdam, FedYogi])
def test_adaptive_steps_follow_algorithm_2(federation: Any, by_hand: Any, kind: Any) -> None:
    options = {"server_lr": 0.05, "beta1": 0.6, "beta2": 0.8, "tau": 0.01}
    outcome = federation.run(kind(**options), rounds=ROUNDS)
    model = federation.initial()
    m = {n: np.zeros_like(model[n]) for n in by_hand.PARAMETERS}
    v = {n: np.full_like(model[n], 0.01**2) for n in by_hand.PARAMETERS}
    for t in range(1, ROUNDS + 1):
        new = mean_of_round(federation, by_hand, model, t)
        for n in by_hand.PARAMETERS:
            delta = new[n] - model[n]
            m[n] = 0.6 * m[n] + 0.4 * delta
            if kind is FedAdam:
                v[n] = 0.8 * v[n] + 0.2 * delta**2
            else:
                v[n] = v[n] - 0.2 * delta**2 * np.sign(v[n] - delta**2)
            new[n] = model[n] + 0.05 * m[n] / (np.sqrt(v[n]) + 0.01)
        model = new
        by_hand.assert_same(outcome.server[t]["model"], model, f"round {t}")


def test_without_momentum_at_rate_1_it_is_fedavg_bit_by_bit(federation: Any) -> None:
    plain = FedAvgM(momentum=0.0, server_lr=1.0)
    found = federation.run(plain, rounds=ROUNDS).server[ROUNDS]["model"]
    wanted = federation.run(FedAvg(), rounds=ROUNDS).server[ROUNDS]["model"]
    assert all(found[name].equal(tensor) for name, tensor in wanted.items())


def test_another_method_takes_the_step_on_its_own_mean(federation: Any) -> None:
    kind: Any = ALGORITHMS.load("fedprox+fedavgm")
    assert kind.neutral == {"mu": 0.0, "momentum": 0.0, "server_lr": 1.0}
    moved = kind(mu=0.5, momentum=0.9, server_lr=0.25)
    assert ALGORITHMS.describe(moved)[0] == "fedprox+fedavgm"
    found = federation.run(moved, rounds=1).server[1]["model"]
    mean = federation.run(FedProx(mu=0.5), rounds=1).server[1]["model"]
    start = federation.initial()
    for name in ("bn_in.weight", "norm.bias"):
        wanted = start[name] + 0.25 * (mean[name].numpy() - start[name])
        np.testing.assert_allclose(found[name].numpy(), wanted, rtol=1e-12)


@pytest.mark.parametrize("name", ["ifca+fedadam", "local+fedavgm"])
def test_a_method_without_a_global_model_is_refused(name: str, tmp_path: Any) -> None:
    algorithm: Any = ALGORITHMS.load(name)()
    with pytest.raises(ConfigError, match="no global model that a server could optimise"):
        ToyFederation(algorithm, tmp_path).run()


def test_an_optimiser_is_given_once() -> None:
    with pytest.raises(ConfigError, match="be given Adam at the server, which it has; write"):
        ALGORITHMS.load("fedadam+fedadam")


def test_two_wrappers_follow_each_other() -> None:
    kind: Any = ALGORITHMS.load("fedprox+fedyogi+distance")
    assert {*kind().hyperparameters()} >= {"mu", "omega", "tau"}
