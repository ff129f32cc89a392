from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from collegium.algorithms.distance import on
from collegium.algorithms.fednova import FedNova
from collegium.core.algorithm import Replies
from collegium.core.dataset import TensorDataset
from collegium.core.message import Message
from collegium.core.model_parts import find_parts
from collegium.core.tensors import Tensors
from collegium.errors import ClientError, ConfigError
from collegium.runtime.simulation import simulate

ROUNDS = 3


def vector(numbers: Sequence[float]) -> Tensors:
    return Tensors({"weight": torch.tensor([numbers], dtype=torch.float64)})


class Answered:
    """A server whose clients have already returned their models, with steps and coefficients."""

    def __init__(self, case: dict[str, Any], shares: Sequence[float], work: Sequence[Any]) -> None:
        self.parts = find_parts(nn.Linear(len(case["w"]), 1, bias=False))
        self.state: dict[str, Any] = {"model": vector(case["w"])}
        self._replies = [
            (f"c{index}", Message.of(model=vector(model), num_examples=share, local_work=done))
            for index, (model, share, done) in enumerate(
                zip(case["w_i"], shares, work, strict=True)
            )
        ]

    def ask(self, method: Any, **items: Any) -> Replies:
        return Replies(iter(self._replies))


def after_a_round(
    method: FedNova, case: dict[str, Any], shares: Sequence[float] = (1, 3)
) -> list[float]:
    coefficients = [method.coefficients(round(tau), 0.1) for tau in case["tau"]]
    np.testing.assert_allclose(coefficients, case["a_norm"], rtol=1e-12)
    work = [
        {"steps": tau, "coefficients": a}
        for tau, a in zip(case["tau"], coefficients, strict=True)
    ]  # fmt: skip
    server: Any = Answered({"w": [1.0, 2.0]} | case, shares, work)
    method.round(server)
    found: list[float] = server.state["model"]["weight"][0].tolist()
    return found


@pytest.mark.parametrize(
    ("name", "method", "key"),
    [
        ("fednova_sgd", FedNova(), "w_new"),
        ("fednova_momentum", FedNova(momentum=0.9), "w_new"),
        ("fednova_prox", FedNova(mu=0.5), "w_new"),
        ("fednova_prox", FedNova(mu=0.5, effective="coefficients"), "w_new_with_that"),
    ],
)
def test_reference_values(newer_golden: Any, name: str, method: FedNova, key: str) -> None:
    case = newer_golden[name]
    np.testing.assert_allclose(after_a_round(method, case), case[key], rtol=1e-9)


def test_one_step_with_momentum_and_proximal_term_counts_once() -> None:
    """The released code counts 1.95."""
    assert FedNova(momentum=0.9, mu=0.5).coefficients(1, 0.1) == 1.0


def test_with_steps_in_proportion_to_examples_it_is_uniform_averaging_with_a_larger_step(
    newer_golden: Any,
) -> None:
    case = newer_golden["fednova_p_prop_tau"]
    moved = {"w_i": [[2.0, 2.0], [1.0, 3.0]], "tau": case["tau"], "a_norm": case["tau"]}
    found = after_a_round(FedNova(), moved, shares=(1, 4))
    np.testing.assert_allclose(found, np.add([1.0, 2.0], case["coef_each"]), rtol=1e-12)


def test_twice_the_steps_behind_the_same_updates_double_the_effective_steps_alone() -> None:
    case: dict[str, Any] = {"w_i": [[1.5, 1.0], [0.0, 4.0]]}
    single = after_a_round(FedNova(), case | {"tau": [1, 5], "a_norm": [1, 5]})
    double = after_a_round(FedNova(), case | {"tau": [2, 10], "a_norm": [2, 10]})
    np.testing.assert_allclose(double, single, rtol=1e-12)  # (2 tau_eff) (p D / (2 a))


def coefficients(steps: int, rho: float, pull: float) -> float:
    """The response of w_i - w to a gradient of 1 in every step."""
    moved, velocity = 0.0, 0.0
    for _ in range(steps):
        velocity = rho * velocity + 1
        moved -= velocity + pull * moved
    return -moved


@pytest.mark.parametrize(
    ("rho", "mu", "effective"), [(0.0, 0.0, "auto"), (0.6, 0.7, "auto"), (0.6, 0.0, "steps")]
)
def test_rounds_follow_the_equation(
    federation: Any, by_hand: Any, rho: float, mu: float, effective: Any
) -> None:
    method = FedNova(momentum=rho, mu=mu, effective=effective)
    outcome = federation.run(method, rounds=ROUNDS)
    w = federation.initial()
    for t in range(1, ROUNDS + 1):
        lr, models, tau = 0.1 * 0.8 ** (t - 1), [], []
        for name in federation.names:
            v: dict[str, Any] = {}

            def heavy_ball(g: Any, now: Any, v: Any = v, start: Any = w) -> Any:
                v |= {n: rho * v.get(n, 0.0) + g[n] for n in g}
                return {n: v[n] + mu * (now[n] - start[n]) for n in g}

            batches = federation.batches(name, t)
            data = federation.data[name]
            models.append(by_hand.train(w, data, batches, lr, change=heavy_ball)[0])
            tau.append(len(batches))
        assert tau == [2, 4, 6]
        p = np.array([5, 8, 11]) / 24
        a = [coefficients(steps, rho, lr * mu) for steps in tau]
        tau_eff = p @ tau if mu or effective == "steps" else p @ a
        moved = {
            n: tau_eff
            * sum(
                share * (model[n] - w[n]) / norm
                for share, model, norm in zip(p, models, a, strict=True)
            )
            for n in by_hand.PARAMETERS
        }
        w = by_hand.average(models, [5, 8, 11]) | {n: w[n] + moved[n] for n in moved}
        by_hand.assert_same(outcome.server[t]["model"], w, f"round {t}")


def test_equal_steps_give_fedavg(federation: Any, by_hand: Any) -> None:
    recipe = replace(federation.recipe, local_steps=3)
    found = federation.run(FedNova(), recipe, rounds=1).server[1]["model"]
    trained = [
        by_hand.train(
            federation.initial(), federation.data[name], federation.batches(name, 1, steps=3), 0.1
        )[0]
        for name in federation.names
    ]
    by_hand.assert_same(found, by_hand.average(trained, [5, 8, 11]))


def test_a_single_client_keeps_its_own_model(federation: Any) -> None:
    outcome = federation.run(FedNova(), rounds=1, sites=federation.sites()[:1])
    sent = outcome.replies("train")[0]["model"]
    for name, tensor in outcome.server[1]["model"].items():
        np.testing.assert_allclose(tensor, sent[name], rtol=1e-12)


def test_running_statistics_stay_between_those_of_the_clients(federation: Any) -> None:
    outcome = federation.run(FedNova(), rounds=1)
    for name in ("conv.running_mean", "conv.running_var"):
        sent = torch.stack([reply["model"][name] for reply in outcome.replies("train")])
        mean = outcome.server[1]["model"][name]
        assert bool(((sent.amin(0) <= mean) & (mean <= sent.amax(0))).all())


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_a_site_without_examples_adds_no_step(
    federation: Any, by_hand: Any, weighting: Any
) -> None:
    sites = federation.sites()
    empty = TensorDataset({key: value[:0] for key, value in sites[1].train.inputs.items()})
    sites[1] = replace(sites[1], train=empty)
    outcome = federation.run(FedNova(weighting=weighting), rounds=1, sites=sites)
    assert outcome.replies("train")[1]["local_work"] == {}
    w = federation.initial()
    a, c = (
        by_hand.train(w, federation.data[name], federation.batches(name, 1), 0.1)[0]
        for name in "AC"
    )
    p = np.array([5, 11]) / 16 if weighting == "examples" else np.ones(2) / 3
    for n in by_hand.PARAMETERS:
        step = (2 * p[0] + 6 * p[1]) * (p[0] * (a[n] - w[n]) / 2 + p[1] * (c[n] - w[n]) / 6)
        np.testing.assert_allclose(outcome.server[1]["model"][n], w[n] + step, rtol=1e-9)


def test_weights_by_distance_scale_the_shares(federation: Any, by_hand: Any) -> None:
    made: Callable[..., Any] = on(FedNova)
    outcome = federation.run(made(omega=0.5), rounds=1)
    far = outcome.server[1]["distance"]["most_distant"]
    n = {"A": 5.0, "B": 8.0, "C": 11.0}
    n[far] *= 0.5
    p = {name: share / sum(n.values()) for name, share in n.items()}
    w, tau = federation.initial(), {"A": 2, "B": 4, "C": 6}
    tau_eff = sum(p[name] * tau[name] for name in p)
    for key in by_hand.PARAMETERS:
        step = tau_eff * sum(
            p[name] * (reply["model"][key].numpy() - w[key]) / tau[name]
            for name, reply in zip(federation.names, outcome.replies("train"), strict=True)
        )
        np.testing.assert_allclose(outcome.server[1]["model"][key], w[key] + step, rtol=1e-9)


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_optimisers_without_such_coefficients_are_refused(
    federation: Any, tmp_path: Path, optimizer: Any
) -> None:
    recipe = replace(federation.recipe, optimizer=optimizer)
    words = f"^FedNova is right with plain sgd only, not with {optimizer};"
    with pytest.raises(ConfigError, match=words):
        simulate(
            FedNova(), federation.sites(), federation.normed, federation.task,
            rounds=1, training=recipe, output=tmp_path / "run",
        )  # fmt: skip


def test_a_proximal_step_that_overshoots_is_refused(federation: Any) -> None:
    with pytest.raises(ClientError, match=r"mu of 10 times the learning rate"):
        federation.run(FedNova(mu=10.0), rounds=1)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"momentum": 1.0}, r"FedNova\.momentum: should be at least 0 and below 1, not 1\.0"),
        ({"mu": -0.1}, r"FedNova\.mu: should be at least 0, not -0\.1"),
        ({"effective": "tau"}, r"FedNova\.effective: should be "),
    ],
)
def test_values_that_cannot_be_meant_are_refused(fields: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FedNova(**fields)
