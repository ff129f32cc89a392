from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from collegium.algorithms.distance import on
from collegium.algorithms.fedas import FedAS
from collegium.algorithms.fedper import FedPer
from collegium.core.algorithm import Replies
from collegium.core.dataset import TensorDataset
from collegium.core.message import Message
from collegium.core.model_parts import ModelParts, find_parts
from collegium.core.tensors import Tensors
from collegium.data.site import Site
from collegium.errors import ConfigError
from collegium.tasks import ClassificationTask
from collegium.training.loop import TrainingConfig

ROUNDS = 3


def trace(by_hand: Any, model: Any, data: Any) -> float:
    """The sum over examples of the squared gradient, in evaluation mode."""
    total = 0.0
    for x, y in zip(data.x, data.y, strict=True):
        one = type(data)(x[None], y[None])
        _, gradients, _ = by_hand.gradient(model, one, batch_statistics=False)
        total += sum((g**2).sum() for g in gradients.values())
    return total


def align(by_hand: Any, model: Any, old: Any, data: Any, batches: Any, lr: float) -> Any:
    """One pass that draws features to those of the old body, example by example."""
    model = dict(model)
    for rows in batches:
        x = data.x[rows]
        target = by_hand.features(old, x, training=False)

        def gap(now: Any, x: Any = x, target: Any = target) -> Any:
            return ((by_hand.features(now, x, training=True) - target) ** 2).mean()

        slopes = by_hand.slopes(gap, model, by_hand.PARAMETERS - by_hand.HEAD)
        _, _, buffers = by_hand.gradient(model, type(data)(x, data.y[rows]))
        model |= buffers | {n: model[n] - lr * slope for n, slope in slopes.items()}
    return model


@pytest.mark.parametrize(("kind", "epochs"), [("sum", 1), ("mean", 2)])
def test_bodies_are_aligned_trained_and_weighted_by_their_information(
    federation: Any, by_hand: Any, kind: Any, epochs: int
) -> None:
    method = FedAS(fisher=kind, align_epochs=epochs)
    outcome = federation.run(method, rounds=ROUNDS)
    start = federation.initial()
    body = by_hand.select(start, by_hand.NAMES - by_hand.HEAD)
    local = dict.fromkeys(federation.names, start)
    for t in range(1, ROUNDS + 1):
        lr, traces = 0.1 * 0.8 ** (t - 1), []
        for name in federation.names:
            data, head = federation.data[name], by_hand.select(local[name], by_hand.HEAD)
            model = body | head
            if t > 1:
                batches = federation.batches(name, t, epochs=epochs, stream="align")
                model = align(by_hand, model, local[name], data, batches, lr)
            local[name], _ = by_hand.train(model, data, federation.batches(name, t), lr)
            found = trace(by_hand, local[name], data)
            traces.append(found if kind == "sum" else found / len(data.x))
        mean = by_hand.average([*local.values()], traces)
        body = by_hand.select(mean, by_hand.NAMES - by_hand.HEAD)
        found = outcome.server[t]["model"].without(by_hand.HEAD)
        by_hand.assert_same(found, body, f"round {t}")
        weights = dict(zip(federation.names, np.array(traces) / sum(traces), strict=True))
        sent = [reply["fisher"]["trace"] for reply in outcome.replies("train")[3 * t - 3 : 3 * t]]
        assert sent == pytest.approx(traces, rel=1e-6)
        assert outcome.server[t]["weights"] == pytest.approx(weights, rel=1e-6)
        for name in federation.names:
            head = by_hand.select(local[name], by_hand.HEAD)
            by_hand.assert_same(outcome.clients[t][name]["private"], head, f"round {t}, {name}")


class Answered:
    """A server whose clients have already returned bodies and traces."""

    parts: ModelParts

    def __init__(self, bodies: Any, traces: Any, shares: Any) -> None:
        self.state: dict[str, Any] = {"model": Tensors()}
        self._replies = [
            (f"c{index}", Message.of(model=Tensors({"w": torch.tensor([body])}),
                                     num_examples=share, fisher={"trace": trace}))
            for index, (body, trace, share) in enumerate(zip(bodies, traces, shares, strict=True))
        ]  # fmt: skip

    def ask(self, method: Any, **items: Any) -> Replies:
        return Replies(iter(self._replies))


def test_reference_values_of_the_weights(newer_golden: Any) -> None:
    case = newer_golden["fedas"]
    server: Any = Answered([4.0, 8.0], case["fisher"], (3, 1))
    FedAS().round(server)
    assert [*server.state["weights"].values()] == pytest.approx(case["weights"])
    assert server.state["model"]["w"].tolist() == [7.0]


def test_without_any_information_examples_count() -> None:
    server: Any = Answered([4.0, 8.0], [0.0, 0.0], (3, 1))
    FedAS().round(server)
    assert server.state["model"]["w"].tolist() == [5.0]


def classify(x: Any, weight: Any, bias: Any, y: Any) -> Any:
    """The mean gradient of the cross-entropy by the logits."""
    logits = x @ weight.T + bias
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return (p - np.eye(logits.shape[1])[y]) / len(y)


def test_features_are_drawn_to_the_mean_of_their_class(tmp_path: Any, federation: Any) -> None:
    """Two linear layers, one step on all examples for the alignment and one for the training."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(6, 3)), np.array([0, 1, 1, 2, 1, 0])
    data = TensorDataset({"image": torch.tensor(x), "label": torch.tensor(y)})
    other = TensorDataset({"image": -torch.tensor(x), "label": torch.tensor(y)})
    sites = [Site("A", data, data, data), Site("B", other, data, data)]
    federation.task = ClassificationTask(3)

    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3)).double()

    lr = 0.3
    recipe = TrainingConfig(optimizer="sgd", lr=lr, batch_size=100)
    outcome = federation.run(FedAS(), recipe, rounds=2, network=network, sites=sites)
    first = {n: t.numpy() for n, t in outcome.clients[1]["A"]["body"].items()}
    head = {n: t.numpy() for n, t in outcome.clients[1]["A"]["private"].items()}
    received = {n: t.numpy() for n, t in outcome.server[1]["model"].items()}
    old = x @ first["0.weight"].T + first["0.bias"]
    c = np.stack([old[y == k].mean(0) for k in range(3)])
    weight, bias = received["0.weight"], received["0.bias"]
    gap = x @ weight.T + bias - c[y]
    pull = 2 * gap / (2 * np.bincount(y)[y][:, None])  # each class counts as one
    weight, bias = weight - lr * pull.T @ x, bias - lr * pull.sum(0)  # aligned
    features = x @ weight.T + bias
    error = classify(features, head["1.weight"], head["1.bias"], y)
    back = error @ head["1.weight"]
    expected = {"0.weight": weight - lr * back.T @ x, "0.bias": bias - lr * back.sum(0)}
    for name, value in expected.items():
        found = outcome.clients[2]["A"]["body"][name]
        np.testing.assert_allclose(found, value, rtol=1e-6, atol=1e-9)


def test_the_first_round_and_no_alignment_are_fedpers_training(federation: Any) -> None:
    found = federation.run(FedAS(align_epochs=0), rounds=2)
    expected = federation.run(FedPer(), rounds=1)
    for name in federation.names:
        one, other = (o.clients[1][name]["private"] for o in (found, expected))
        assert all(one[n].equal(t) for n, t in other.items())
    assert all(steps["steps"] == 2 for steps in found.progress("A"))


def test_the_personal_model_is_the_aligned_body_with_the_own_head(
    federation: Any, by_hand: Any
) -> None:
    outcome = federation.run(FedAS(), rounds=1)
    for name in federation.names:
        best = outcome.best[name]
        head = outcome.clients[1][name]["private"]
        assert best is not None
        assert all(best[n].equal(t) for n, t in head.items())
        received = outcome.server[1]["model"]
        assert not best["bn_in.weight"].equal(received["bn_in.weight"])


def test_heads_and_old_bodies_stay_at_the_site(federation: Any, by_hand: Any) -> None:
    outcome = federation.run(FedAS(), rounds=2)
    for reply in outcome.replies("train"):
        assert reply.keys() == {"model", "num_examples", "fisher", "progress"}
        assert reply["model"].keys() == by_hand.NAMES - by_hand.HEAD
    assert outcome.deployed == {}


def test_a_site_without_examples_has_no_weight(federation: Any) -> None:
    sites = federation.sites()
    empty = TensorDataset({key: value[:0] for key, value in sites[1].train.inputs.items()})
    sites[1] = replace(sites[1], train=empty)
    outcome = federation.run(FedAS(), rounds=2, sites=sites)
    assert outcome.server[2]["weights"]["B"] == 0.0


def test_weights_by_distance_scale_the_information(federation: Any) -> None:
    made: Callable[..., Any] = on(FedAS)
    outcome = federation.run(made(omega=0.5), rounds=1)
    traces = {
        name: reply["fisher"]["trace"]
        for name, reply in zip(federation.names, outcome.replies("train"), strict=True)
    }
    traces[outcome.server[1]["distance"]["most_distant"]] *= 0.5
    expected = {name: found / sum(traces.values()) for name, found in traces.items()}
    assert outcome.server[1]["weights"] == pytest.approx(expected)


def test_a_network_without_a_head_is_refused() -> None:
    with pytest.raises(ConfigError, match="FedAS aligns the features that enter the head, and"):
        FedAS().check_setup(["a", "b"], find_parts(nn.BatchNorm1d(3)))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"align_epochs": -1}, r"FedAS\.align_epochs: should be at least 0"),
        ({"fisher": "trace"}, r"FedAS\.fisher: should be 'sum' or 'mean'"),
        ({"fisher_examples": 0}, r"FedAS\.fisher_examples: should be at least 1"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(fields: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FedAS(**fields)
