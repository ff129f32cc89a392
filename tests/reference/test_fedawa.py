from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from collegium.algorithms.distance import on
from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.fedawa import FedAWA, gradient
from collegium.core.algorithm import Replies
from collegium.core.dataset import TensorDataset
from collegium.core.message import Message
from collegium.core.model_parts import find_parts
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError
from collegium.runtime.participation import SKIPPING
from collegium.solvers.gram import gram


def vector(numbers: Sequence[float]) -> Tensors:
    return Tensors({"weight": torch.tensor(np.array([numbers], dtype=np.float64))})


def softmax(logits: Any) -> Any:
    return np.exp(logits) / np.exp(logits).sum()


class Answered:
    """A server whose clients have already returned their models."""

    def __init__(self, start: Sequence[float], models: Any, shares: Sequence[float]) -> None:
        self.parts = find_parts(nn.Linear(len(start), 1, bias=False))
        self.state: dict[str, Any] = {"model": vector(start)}
        self.replies = [
            (f"c{index}", Message.of(model=vector(model), num_examples=share))
            for index, (model, share) in enumerate(zip(models, shares, strict=True))
        ]

    def ask(self, method: Any, **items: Any) -> Replies:
        return Replies(iter(self.replies))


def objective(logits: Any, start: Any, models: Any) -> Any:
    """F, with torch, whose gradient torch takes."""
    q = torch.softmax(logits, 0)
    updates = models - start
    merged = q @ updates
    far = torch.linalg.vector_norm(updates - merged, dim=1)
    return q @ far + q @ (1 - torch.cosine_similarity(models, start[None]))


def test_reference_values_of_three_clients(newer_golden: Any) -> None:
    case = newer_golden["fedawa_3clients"]
    models, start = [vector(row) for row in case["theta_i"]], vector(case["theta"])
    costs = [FedAWA().cost(model, start) for model in models]
    np.testing.assert_allclose(costs, case["cos_distance"], atol=1e-12)
    logits = np.array(case["T0_fractions"])
    found = gradient(logits, gram(models, start), np.array(costs))
    np.testing.assert_allclose(found, case["grad_T0"], rtol=1e-9)
    for steps in (1, 3):
        moves = FedAWA(inner_steps=steps).moves(logits, models, start)
        np.testing.assert_allclose(logits + moves, case[f"T_after_{steps}"], rtol=1e-9)


def test_reference_values_of_two_clients(newer_golden: Any) -> None:
    case = newer_golden["fedawa_2clients_closed_form"]
    models, start = [vector(row) for row in case["theta_i"]], vector(case["theta"])
    costs = np.array(case["c"])
    found = gradient(np.zeros(2), gram(models, start), costs)
    np.testing.assert_allclose(found, case["grad_T"], rtol=1e-9)
    moves = FedAWA(inner_steps=3000, lr=0.05).moves(np.zeros(2), models, start)
    found = softmax(np.array(moves))
    np.testing.assert_allclose(found, case["q_after_3000_adam_steps_lr_0p05"], rtol=1e-3)


@pytest.mark.parametrize("beta", [0.5, 0.9])
def test_rounds_follow_the_objective_by_another_library(beta: float) -> None:
    rng = np.random.default_rng(0)
    shares, learnt = np.array([5.0, 8.0, 11.0]), np.zeros(3)
    w = rng.normal(size=4)
    method = FedAWA(lr=0.05, inner_steps=4, betas=(beta, 0.99))
    server: Any = Answered(w.tolist(), np.zeros((3, 4)), shares.tolist())
    for _ in range(3):
        models = w + rng.normal(size=(3, 4))
        server.replies = Answered(w.tolist(), models, shares.tolist()).replies
        method.round(server)
        logits = torch.tensor(np.log(shares / 24) + learnt, requires_grad=True)
        adam = torch.optim.Adam([logits], lr=0.05, betas=(beta, 0.99))
        for _ in range(4):
            adam.zero_grad()
            objective(logits, torch.tensor(w), torch.tensor(models)).backward()
            adam.step()
        learnt = logits.detach().numpy() - np.log(shares / 24)
        q = softmax(logits.detach().numpy())
        w = q @ models
        np.testing.assert_allclose([*server.state["weights"].values()], q, rtol=1e-7)
        np.testing.assert_allclose(server.state["model"]["weight"][0], w, rtol=1e-7)


def test_the_euclidean_cost_is_the_mean_square_over_all_entries() -> None:
    found = FedAWA(regulariser="euclidean").cost(vector([1.0, 2.0, 5.0]), vector([1.0, 0.0, 4.0]))
    assert found == pytest.approx(5 / 3)


def test_weights_start_at_the_shares_of_the_examples(newer_golden: Any) -> None:
    case = newer_golden["fedawa_init"]
    server: Any = Answered([0.0, 0.0], [[1.0, 0.0], [0.0, 1.0]], [9, 1])
    FedAWA(inner_steps=0).round(server)
    weights = [*server.state["weights"].values()]
    np.testing.assert_allclose(weights, case["softmax_of_log_fractions"], rtol=1e-12)


def test_a_number_added_to_all_logits_changes_nothing(newer_golden: Any) -> None:
    case = newer_golden["fedawa_3clients"]
    models, start = [vector(row) for row in case["theta_i"]], vector(case["theta"])
    products, costs = gram(models, start), np.array(case["cos_distance"])
    logits = np.array(case["T0_log"])
    np.testing.assert_allclose(
        gradient(logits + 700, products, costs), gradient(logits, products, costs), rtol=1e-9
    )


def test_clients_with_one_upload_and_one_size_keep_equal_weights() -> None:
    server: Any = Answered([1.0, 1.0], [[2.0, 0.0], [2.0, 0.0], [0.0, 3.0]], [2, 2, 3])
    FedAWA(inner_steps=20, lr=0.1).round(server)
    weights = server.state["weights"]
    assert weights["c0"] == pytest.approx(weights["c1"], rel=1e-9)
    assert weights["c2"] != pytest.approx(3 / 7, rel=0.01)


def test_equal_uploads_leave_the_weights_alone_and_divide_by_nothing() -> None:
    server: Any = Answered([1.0, 1.0], [[2.0, 0.5]] * 3, [1, 2, 3])
    FedAWA(inner_steps=5).round(server)
    np.testing.assert_allclose([*server.state["weights"].values()], [1 / 6, 1 / 3, 1 / 2])
    np.testing.assert_allclose(server.state["model"]["weight"][0], [2.0, 0.5], rtol=1e-12)


def test_a_single_client_keeps_its_own_model(federation: Any) -> None:
    outcome = federation.run(FedAWA(), rounds=1, sites=federation.sites()[:1])
    sent = outcome.replies("train")[0]["model"]
    for name, tensor in outcome.server[1]["model"].items():
        np.testing.assert_allclose(tensor, sent[name], rtol=1e-12)
    assert outcome.server[1]["weights"] == {"A": 1.0}


def test_no_client_weighs_less_than_the_floor(newer_golden: Any) -> None:
    case = newer_golden["fedawa_2clients_closed_form"]
    server: Any = Answered(case["theta"], case["theta_i"], [1, 1])
    FedAWA(inner_steps=3000, lr=0.05, floor=0.4).round(server)
    large, small = server.state["weights"].values()
    assert small == pytest.approx(0.2, rel=1e-3)
    np.testing.assert_allclose(
        server.state["model"]["weight"][0], np.array([large, small]) @ case["theta_i"], rtol=1e-9
    )


def test_buffers_have_the_learnt_weights_and_counters_the_maximum(
    federation: Any, by_hand: Any
) -> None:
    outcome = federation.run(FedAWA(lr=0.5, inner_steps=3), rounds=1)
    weights = [*outcome.server[1]["weights"].values()]
    assert abs(weights[0] - 5 / 24) > 0.01
    sent = [
        {name: tensor.numpy() for name, tensor in reply["model"].items()}
        for reply in outcome.replies("train")
    ]
    by_hand.assert_same(outcome.server[1]["model"], by_hand.average(sent, weights))


def test_a_client_that_is_missing_keeps_what_was_learnt(federation: Any) -> None:
    outcome = federation.run(FedAWA(lr=0.5), rounds=2, lose={2: "B"}, participation=SKIPPING)
    first, second = (outcome.server[t]["learnt"] for t in (1, 2))
    assert first["B"] == second["B"] != 0
    assert first["A"] != second["A"]
    assert outcome.server[2]["weights"].keys() == {"A", "C"}


def test_a_site_without_examples_has_no_weight(federation: Any) -> None:
    sites = federation.sites()
    empty = TensorDataset({key: value[:0] for key, value in sites[1].train.inputs.items()})
    sites[1] = replace(sites[1], train=empty)
    outcome = federation.run(FedAWA(), rounds=1, sites=sites)
    assert outcome.server[1]["weights"].keys() == {"A", "C"}


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_without_steps_it_is_fedavg_bit_by_bit(federation: Any, weighting: Any) -> None:
    found = federation.run(FedAWA(inner_steps=0, weighting=weighting)).server[3]["model"]
    expected = federation.run(FedAvg(weighting=weighting)).server[3]["model"]
    assert all(found[name].equal(tensor) for name, tensor in expected.items())


def test_weights_by_distance_are_where_the_logits_start(federation: Any) -> None:
    made: Callable[..., Any] = on(FedAWA)
    outcome = federation.run(made(omega=0.5, inner_steps=0), rounds=1)
    n = {"A": 5.0, "B": 8.0, "C": 11.0}
    n[outcome.server[1]["distance"]["most_distant"]] *= 0.5
    expected = {name: share / sum(n.values()) for name, share in n.items()}
    assert outcome.server[1]["weights"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lr": 0.0}, r"FedAWA\.lr: should be above 0"),
        ({"inner_steps": -1}, r"FedAWA\.inner_steps: should be at least 0"),
        ({"floor": 1.5}, r"FedAWA\.floor: should be "),
        ({"betas": (0.5, 1.0)}, r"FedAWA\.betas.*should be at least 0 and below 1"),
        ({"regulariser": "none"}, r"FedAWA\.regulariser: should be 'cosine' or 'euclidean'"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(fields: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FedAWA(**fields)
