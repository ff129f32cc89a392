from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from collegium.algorithms.distance import on
from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.feddf import FedDF
from collegium.core.dataset import TensorDataset
from collegium.core.tensors import Tensors
from collegium.data.site import Site
from collegium.errors import ConfigError
from collegium.runtime.federation import Federation
from collegium.tasks import ClassificationTask
from collegium.training.batches import plan_batches
from collegium.training.objectives import LiveNetwork

ROUNDS, STEPS, LR = 3, 5, 0.2
SIZES = np.array([5, 8, 11])


@pytest.fixture
def images() -> Any:
    return np.random.default_rng(8).normal(1.0, 1.0, (10, 3))


def public(images: Any) -> TensorDataset:
    """Public data without labels."""
    return TensorDataset({"image": torch.tensor(images)})


def output(w: Any, x: Any) -> Any:
    return x @ w["weight"].T + w["bias"]


def descended(w: Any, x: Any, target: Any, scale: float, lr: float) -> Any:
    """One step of gradient descent on scale times the mean squared error of a linear layer."""
    error = scale * 2 * (output(w, x) - target) / target.size
    return {"weight": w["weight"] - lr * error.T @ x, "bias": w["bias"] - lr * error.sum(0)}


def public_batches(federation: Any, number: int, steps: int, size: int = 4) -> list[list[int]]:
    path = ("public", number, "fit")
    plan = plan_batches(10, size, epochs=1, steps=steps, seed=federation.seed, path=path)
    return [[index for _, index in batch] for batch in plan]


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_the_mean_is_trained_to_predict_as_all_clients_do(
    federation: Any, by_hand: Any, images: Any, schedule: Any
) -> None:
    """For a linear layer the divergence is half the squared error from the mean output.

    The recipe's schedule is the clients' alone.
    """
    method = FedDF(steps=STEPS, lr=LR, optimizer="sgd", temperature=2.0)
    outcome = federation.run(
        method,
        replace(federation.recipe, schedule=schedule),
        rounds=ROUNDS,
        network=federation.linear,
        public=public(images),
    )
    model = federation.initial(network=federation.linear)
    for t in range(1, ROUNDS + 1):
        trained, passed = [], (t - 1) / ROUNDS if schedule == "cosine" else 0.0
        lr = 0.1 * 0.8 ** (t - 1) * (1 + np.cos(np.pi * passed)) / 2
        for name in federation.names:
            w = dict(model)
            for rows in federation.batches(name, t):
                data = federation.data[name]
                w = descended(w, data.x[rows], data.y[rows], 1.0, lr)
            trained.append(w)
        model = {
            n: np.tensordot(SIZES / SIZES.sum(), np.stack([w[n] for w in trained]), axes=1)
            for n in model
        }
        for rows in public_batches(federation, t, STEPS):
            x = images[rows]
            target = np.mean([output(w, x) for w in trained], axis=0)
            model = descended(model, x, target, 0.5 / 2.0**2, LR)
        by_hand.assert_same(outcome.server[t]["model"], model, f"round {t}")


@pytest.mark.parametrize("average", ["logits", "losses"])
def test_several_classes_are_distilled_by_their_probabilities(average: Any) -> None:
    """Against the definition of the divergence in numpy, and its gradient by differences."""
    torch.manual_seed(0)
    network, images = nn.Linear(3, 4).double(), torch.randn(6, 3).double()
    teachers = [nn.Linear(3, 4).double() for _ in range(3)]
    live = LiveNetwork(network, ClassificationTask(4), dict(network.named_parameters()), lr=0.1)
    objective = FedDF(average=average, temperature=3.0).objective(
        [Tensors(t.state_dict()) for t in teachers]
    )
    loss, added = objective(live, {"image": images})
    assert added is None

    def wanted(weight: Any) -> float:
        x = images.numpy()
        z = (x @ weight.T + network.bias.detach().numpy()) / 3.0
        known = [teacher(images).detach().numpy() / 3.0 for teacher in teachers]
        targets = [np.mean(known, axis=0)] if average == "logits" else known
        q = np.exp(z) / np.exp(z).sum(1, keepdims=True)
        values = []
        for target in targets:
            p = np.exp(target) / np.exp(target).sum(1, keepdims=True)
            values.append((p * np.log(p / q)).sum(1).mean())
        return float(np.mean(values))

    start = network.weight.detach().numpy().copy()
    np.testing.assert_allclose(float(loss.detach()), wanted(start), rtol=1e-10)
    loss.backward()
    assert network.weight.grad is not None
    for place in [(0, 0), (2, 1), (3, 2)]:
        up, down = start.copy(), start.copy()
        up[place] += 1e-6
        down[place] -= 1e-6
        slope = (wanted(up) - wanted(down)) / 2e-6
        assert float(network.weight.grad[place]) == pytest.approx(slope, rel=1e-5)


def test_without_steps_it_is_fedavg_and_sends_what_fedavg_sends(
    federation: Any, by_hand: Any, images: Any
) -> None:
    found = federation.run(FedDF(steps=0), public=public(images))
    plain = federation.run(FedAvg())
    for t in (1, 2, 3):
        for name, tensor in plain.server[t]["model"].items():
            assert torch.equal(found.server[t]["model"][name], tensor)
    assert {*found.replies("train")[0]} == {*plain.replies("train")[0]}


def test_a_client_without_examples_is_no_teacher(
    federation: Any, by_hand: Any, images: Any
) -> None:
    sites = federation.sites()
    empty = TensorDataset({key: value[:0] for key, value in sites[0].train.inputs.items()})
    idle = Site("A", empty, sites[0].val, sites[0].test)
    method = FedDF(steps=3, lr=LR, optimizer="sgd")
    options = {"rounds": 1, "network": federation.linear, "public": public(images)}
    with_it = federation.run(method, sites=[idle, *sites[1:]], **options)
    without = federation.run(method, sites=sites[1:], **options)
    wanted = {n: t.numpy() for n, t in without.server[1]["model"].items()}
    by_hand.assert_same(with_it.server[1]["model"], wanted, "round 1")


def test_public_data_are_needed(federation: Any) -> None:
    sites = {site.name: site for site in federation.sites()}
    runtime = Federation(sites, federation.linear, federation.task, federation.recipe)
    with pytest.raises(ConfigError, match=r"FedDF trains at the server on public data.*public"):
        runtime.check(FedDF())


def test_public_labels_are_needed_where_a_method_learns_from_them(
    federation: Any, images: Any
) -> None:
    class Learns(FedAvg):
        needs_public = "labels"

    sites = {site.name: site for site in federation.sites()}
    labels = TensorDataset({"image": torch.tensor(images), "label": torch.zeros(10, 1)})
    for data, refused in ((public(images), True), (labels, False)):
        runtime = Federation(
            sites, federation.linear, federation.task, federation.recipe, public=data
        )
        runtime.check(FedDF())
        with pytest.raises(ConfigError, match="name their labels") if refused else nullcontext():
            runtime.check(Learns())


def test_clusters_by_distance_have_one_server(federation: Any) -> None:
    clustered: Any = on(FedDF)
    method = clustered(mode="clusters")
    with pytest.raises(ConfigError, match="set mode to weights"):
        method.check_setup(["A", "B", "C"], None)
