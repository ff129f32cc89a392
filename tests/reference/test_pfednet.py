from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from collegium.algorithms._pfednet_sites import Component
from collegium.algorithms.fedper import FedPer
from collegium.algorithms.pfednet import PFedNet
from collegium.core.algorithm import Replies
from collegium.core.dataset import TensorDataset
from collegium.core.message import Message
from collegium.core.model_parts import find_parts
from collegium.core.payloads import Expected
from collegium.core.tensors import Tensors
from collegium.data.site import EgressPolicy, Site
from collegium.errors import CollegiumError, ConfigError, DataError, ProtocolError
from collegium.runtime.participation import SKIPPING
from collegium.training.batches import plan_batches

ROUNDS = 3
STEPS = {"A": 2, "B": 4, "C": 6}
"""Optimiser steps of two epochs in batches of four."""


def batches(federation: Any, name: str, number: int, exchange: int, steps: int) -> Any:
    plan = plan_batches(
        federation.sizes[name], 4, epochs=2, steps=steps, seed=federation.seed,
        path=("client", name, number, "train", exchange, "fit"),
    )  # fmt: skip
    return [[index for _, index in batch] for batch in plan]


def graph(federation: Any, k: int) -> set[tuple[str, str]]:
    """Joins each site to the k with the nearest mean of all its (few) training images."""
    means = {name: data.x.mean(0) for name, data in federation.data.items()}
    pairs = set()
    for name in means:
        others = sorted(
            (np.abs(means[name] - means[other]).sum(), other) for other in means if other != name
        )
        pairs |= {(min(name, other), max(name, other)) for _, other in others[:k]}
    return pairs


def flat(model: Mapping[str, Any], names: Sequence[str]) -> Any:
    return np.concatenate([model[name].ravel() for name in names])


def tie(
    points: Mapping[str, Any], pairs: set[tuple[str, str]], eta: Mapping[str, float], lam: float
) -> dict[str, Any]:
    """Minimises sum |z_n - b_n|^2 / (2 eta_n) + lam sum |z_i - z_j|_2 by gradients of its dual."""
    flows = dict.fromkeys(pairs, 0 * points["A"])

    def primal() -> dict[str, Any]:
        return {
            name: point
            - eta[name] * sum(f * ((name == i) - (name == j)) for (i, j), f in flows.items())
            for name, point in points.items()
        }

    for _ in range(800 if lam else 0):
        z = primal()
        for (i, j), flow in flows.items():
            flow = flow + (z[i] - z[j]) / (4 * max(eta.values()))
            flows[i, j] = flow * min(1, lam / max(float(np.linalg.norm(flow)), 1e-300))
    return primal()


def by_hand_rounds(
    federation: Any,
    by_hand: Any,
    *,
    lam: float,
    k: int,
    weights: Mapping[str, float] = {"A": 1, "B": 1, "C": 1},
    names: Sequence[str] = ("norm.weight", "norm.bias"),
) -> Any:
    """The models after each round, and the personal parts: two trainings that share the steps."""
    start = federation.initial()
    shared = by_hand.select(start, by_hand.NAMES - set(names))
    own = {name: by_hand.select(start, names) for name in federation.names}
    pairs = graph(federation, k)
    for t in range(1, ROUNDS + 1):
        lr = 0.1 * 0.8 ** (t - 1)
        trained = [
            by_hand.train(
                shared | own[name], federation.data[name],
                batches(federation, name, t, 0, STEPS[name] // 2), lr,
            )[0]
            for name in federation.names
        ]  # fmt: skip
        mean = by_hand.average(trained, [*weights.values()])
        shared = by_hand.select(mean, shared)
        points = {
            name: by_hand.train(
                shared | own[name], federation.data[name],
                batches(federation, name, t, 1, STEPS[name] // 2), lr,
            )[0]
            for name in federation.names
        }  # fmt: skip
        eta = {
            name: lr * (STEPS[name] // 2) * sum(weights.values()) / weights[name]
            for name in federation.names
        }
        tied = tie({name: flat(m, names) for name, m in points.items()}, pairs, eta, lam)
        for name in federation.names:
            weight, bias = tied[name][:-1].reshape(1, -1), tied[name][-1:]
            own[name] = {"norm.weight": weight, "norm.bias": bias}
        yield t, shared, own


def same(found: Mapping[str, Any], expected: Mapping[str, Any], what: str) -> None:
    assert found.keys() == expected.keys(), what
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=1e-7, err_msg=f"{what} {name}")


@pytest.mark.parametrize(("lam", "k"), [(0.0, 1), (0.2, 2), (0.2, 1), (1e3, 2)])
def test_rounds_are_those_by_hand(federation: Any, by_hand: Any, lam: float, k: int) -> None:
    outcome = federation.run(PFedNet(lam=lam, k=k, sketch_items=99), rounds=ROUNDS)
    for t, shared, own in by_hand_rounds(federation, by_hand, lam=lam, k=k):
        same(outcome.server[t]["shared"], shared, f"round {t}")
        for name in federation.names:
            same(outcome.server[t]["personal"][name], own[name], f"round {t}, {name}")
            same(outcome.clients[t][name]["personal"], own[name], f"round {t}, {name}")
    assert (k == 1) == (len(outcome.server[1]["graph"]["edges"]) == 2)
    heads = [flat(own[name], ["norm.weight", "norm.bias"]) for name in "ABC"]
    assert np.allclose(heads[0], heads[1], atol=1e-7) == (lam == 1e3)


def test_weights_by_examples_enter_both_phases(federation: Any, by_hand: Any) -> None:
    algorithm = PFedNet(lam=0.2, k=2, weighting="examples")
    outcome = federation.run(algorithm, rounds=ROUNDS)
    hand = by_hand_rounds(federation, by_hand, lam=0.2, k=2, weights=federation.sizes)
    for t, shared, own in hand:
        same(outcome.server[t]["shared"], shared, f"round {t}")
        for name in federation.names:
            same(outcome.server[t]["personal"][name], own[name], f"round {t}, {name}")


def test_without_penalty_and_with_one_training_it_is_fedper(federation: Any, by_hand: Any) -> None:
    algorithm = PFedNet(lam=0.0, personal="head", weighting="examples", combined=True)
    found = federation.run(algorithm, rounds=ROUNDS)
    expected = federation.run(FedPer(), rounds=ROUNDS)
    for t in range(1, ROUNDS + 1):
        model = {n: v.numpy() for n, v in expected.server[t]["model"].items()}
        by_hand.assert_same(
            found.server[t]["shared"], by_hand.select(model, by_hand.NAMES - by_hand.HEAD)
        )
        for name in federation.names:
            head = {n: v.numpy() for n, v in expected.clients[t][name]["private"].items()}
            by_hand.assert_same(found.clients[t][name]["personal"], head)
    for name in federation.names:
        best = {n: v.numpy() for n, v in expected.best[name].items()}
        by_hand.assert_same(found.best[name], best)


@pytest.mark.parametrize("lr", [0.75, 1.0])
def test_it_comes_to_rest_at_the_minimum_of_the_objective(federation: Any, lr: float) -> None:
    """One full step per round makes it a proximal gradient method, whatever the learning rate.

    f_n(z) = |z - t_n|^2 / 3, whose gradient is 2/3 (z - t_n).
    """
    targets = {"A": [1.0, 0.0, -1.0], "B": [0.0, 2.0, 0.0], "C": [-1.0, 0.0, 3.0]}
    lam, eye = 0.15, torch.eye(3).double()
    sites = []
    for name, target in targets.items():
        data = TensorDataset({"image": eye, "label": torch.tensor(target).double()[:, None]})
        sites.append(Site(name, data, data, data))
    outcome = federation.run(
        PFedNet(lam=lam, k=1, personal="all"), replace(federation.full_batch, lr=lr), rounds=25,
        network=lambda: nn.Linear(3, 1, bias=False).double(), sites=sites, deploy=False,
    )  # fmt: skip
    state = outcome.server[25]
    z = {name: part["weight"].numpy()[0] for name, part in state["personal"].items()}
    pull = {name: np.zeros(3) for name in z}
    assert len(state["graph"]["edges"]) == 2
    for i, j in state["graph"]["edges"]:
        unit = (z[i] - z[j]) / np.linalg.norm(z[i] - z[j])
        pull[i], pull[j] = pull[i] + lam * unit, pull[j] - lam * unit
    for name, target in targets.items():
        assert np.abs(z[name] - target).max() > 0.1
        np.testing.assert_allclose(2 / 9 * (z[name] - target) + pull[name], 0, atol=1e-6)


def test_everything_may_be_personal_and_then_statistics_are_the_sites_own(
    federation: Any, by_hand: Any
) -> None:
    outcome = federation.run(PFedNet(lam=0.0, k=2, personal="all"), rounds=2)
    assert not outcome.replies("train_shared")
    for name in federation.names:
        model, best = federation.initial(), []
        for t in (1, 2):
            model = by_hand.train(
                model, federation.data[name], federation.batches(name, t), 0.1 * 0.8 ** (t - 1)
            )[0]
            best.append(model)
        by_hand.assert_same(outcome.clients[2][name]["personal"], model)
        by_hand.assert_same(outcome.best[name], by_hand.best(best, federation.validation[name]))
    tied = federation.run(PFedNet(lam=1e3, k=2, personal="all"), rounds=1).server[1]["personal"]
    assert torch.allclose(tied["A"]["bn_in.weight"], tied["B"]["bn_in.weight"])
    assert not torch.allclose(tied["A"]["conv.running_mean"], tied["B"]["conv.running_mean"])


def test_a_site_never_sees_the_personal_part_of_another(federation: Any) -> None:
    outcome = federation.run(PFedNet(lam=0.1), rounds=ROUNDS)
    seen = 0
    for request, items, reply in outcome.log:
        assert items.keys() <= {"shared", "personal", "model", "models", "kinds", "chosen"}
        if request.method in {"train_shared", "train_personal", "evaluate"}:
            assert "norm.weight" not in items["shared"]
        if request.method == "receive":
            personal = outcome.server[request.round]["personal"]
            assert torch.equal(
                items["personal"]["norm.bias"], personal[request.client]["norm.bias"]
            )
            others = [p["norm.bias"] for site, p in personal.items() if site != request.client]
            assert not any(torch.equal(items["personal"]["norm.bias"], o) for o in others)
            assert reply == {}
            seen += 1
    assert seen == 3 * ROUNDS


def test_only_the_first_round_sends_the_personal_part_with_the_request(federation: Any) -> None:
    outcome = federation.run(PFedNet(), rounds=2)
    with_it = [
        (request.round, request.method)
        for request, items, _ in outcome.log
        if "personal" in items and request.method != "receive"
    ]
    assert with_it == [(1, "train_shared")] * 3


def test_a_site_that_was_left_out_keeps_its_part_and_gets_it_with_the_next_request(
    federation: Any,
) -> None:
    outcome = federation.run(PFedNet(lam=0.5), rounds=3, lose={2: "B"}, participation=SKIPPING)
    first, second = (outcome.server[t]["personal"] for t in (1, 2))
    assert torch.equal(first["B"]["norm.weight"], second["B"]["norm.weight"])
    assert not torch.equal(first["A"]["norm.weight"], second["A"]["norm.weight"])
    late = [r for r, items, _ in outcome.log if r.round == 3 and "personal" in items]
    assert [r.client for r in late if r.method == "train_shared"] == []
    assert outcome.server[3]["behind"] == []


def test_a_site_that_missed_its_newest_part_gets_it_with_the_next_request(federation: Any) -> None:
    """In round 1 B answers nothing, so that it holds no personal part at all."""
    outcome = federation.run(PFedNet(lam=0.5), rounds=2, lose={1: "B"}, participation=SKIPPING)
    assert outcome.server[1]["behind"] == ["B"]
    late = [r.client for r, items, _ in outcome.log if r.round == 2 and "personal" in items]
    assert late.count("B") == 2
    evaluated = {r.client: x["scores"] for r, _, x in outcome.log if r.method == "evaluate"}
    assert evaluated["B"].keys() == {"personal"}


def test_rounds_with_several_trainings(federation: Any) -> None:
    algorithm = PFedNet(inner_shared=2, inner_personal=3, split_steps=False)
    outcome = federation.run(algorithm, rounds=1)
    assert len(outcome.replies("train_shared")) == 2 * 3
    assert len(outcome.replies("train_personal")) == 3 * 3


@pytest.mark.parametrize(
    ("options", "shared", "personal"),
    [
        ({}, {"A": 1, "B": 2, "C": 3}, {"A": 1, "B": 2, "C": 3}),
        ({"split_steps": False}, STEPS, STEPS),
        ({"inner_personal": 2}, {"A": 1, "B": 1, "C": 2}, {"A": 1, "B": 1, "C": 2}),
        ({"personal": "all"}, {}, STEPS),
    ],
)
def test_the_trainings_of_a_round_share_the_steps(
    federation: Any, options: dict[str, Any], shared: Any, personal: Any
) -> None:
    outcome = federation.run(PFedNet(k=2, **options), rounds=1)
    for method, expected in (("train_shared", shared), ("train_personal", personal)):
        found = {r.client: x["progress"]["steps"] for r, _, x in outcome.log if r.method == method}
        assert found == expected
    paces = {r.client: x["pace"]["eta"] for r, _, x in outcome.log if "pace" in x}
    assert paces == pytest.approx({site: 0.1 * steps for site, steps in personal.items()})


def test_steps_that_cannot_be_halved_go_to_the_personal_part(federation: Any) -> None:
    recipe = replace(federation.recipe, local_steps=5)
    outcome = federation.run(PFedNet(), recipe, rounds=1)
    counts = [outcome.progress("A", m)[0]["steps"] for m in ("train_shared", "train_personal")]
    assert counts == [2, 3]


def test_the_graph_and_the_spread_of_the_personal_parts_are_kept(federation: Any) -> None:
    outcome = federation.run(PFedNet(k=1, sketch_items=99), rounds=2)
    state = outcome.server[2]
    assert {tuple(pair) for pair in state["graph"]["edges"]} == graph(federation, 1)
    means = [data.x.mean(0) for data in federation.data.values()]
    distances = [[np.abs(a - b).sum() for b in means] for a in means]
    np.testing.assert_allclose(state["graph"]["distances"], distances, rtol=1e-6)
    heads = np.stack([flat(p, ["norm.weight", "norm.bias"]) for p in (
        {n: t.numpy() for n, t in state["personal"][site].items()} for site in "ABC")])  # fmt: skip
    spread = heads.std(0)
    expected = {
        "min": spread.min(), "q1": np.quantile(spread, 0.25), "median": np.median(spread),
        "q3": np.quantile(spread, 0.75), "max": spread.max(), "mean": spread.mean(),
    }  # fmt: skip
    assert [record.round for record in outcome.records if "" in record.numbers] == [1, 2]
    [last] = [record.numbers[""] for record in outcome.records if record.round == 2]
    assert last == pytest.approx({f"sdwd/{name}": value for name, value in expected.items()})


def test_an_outsider_gets_the_shared_part_with_the_mean_personal_part(federation: Any) -> None:
    outcome = federation.run(PFedNet(lam=0.1), rounds=2)
    state = outcome.server[2]
    assert outcome.deployed.keys() == {"mean"}
    heads = np.stack([state["personal"][site]["norm.weight"].numpy() for site in "ABC"])
    np.testing.assert_allclose(outcome.deployed["mean"]["norm.weight"], heads.mean(0))
    shared = state["shared"]["bn_in.weight"]
    assert torch.equal(outcome.deployed["mean"]["bn_in.weight"], shared)


def test_eta_and_iterations_replace_what_is_chosen(federation: Any) -> None:
    default = federation.run(PFedNet(lam=0.2, k=2), rounds=1).server[1]["personal"]
    given = federation.run(PFedNet(lam=0.2, k=2, eta=1e-9), rounds=1).server[1]["personal"]
    alone = federation.run(PFedNet(lam=0.0, k=2), rounds=1).server[1]["personal"]
    assert torch.allclose(given["A"]["norm.weight"], alone["A"]["norm.weight"], atol=1e-8)
    assert not torch.allclose(default["A"]["norm.weight"], alone["A"]["norm.weight"], atol=1e-3)
    many = PFedNet(lam=0.2, k=2, iterations=2000, rho=1.0)
    once = PFedNet(lam=0.2, k=2, iterations=1, rho=1.0)
    found = federation.run(many, rounds=1).server[1]["personal"]
    assert torch.allclose(found["A"]["norm.weight"], default["A"]["norm.weight"], atol=1e-7)
    found = federation.run(once, rounds=1).server[1]["personal"]
    assert not torch.allclose(found["A"]["norm.weight"], default["A"]["norm.weight"], atol=1e-4)


def test_selectors_and_the_step_of_x_are_those_of_the_paper(
    golden: Callable[[str], dict[str, Any]],
) -> None:
    case = golden("selectors_and_x_update")
    inputs, eta = case["inputs"], case["params"]["eta"]
    shared_ids, personal_ids = inputs["shared_ids"], inputs["personal_ids"]
    x = Tensors({str(i): torch.tensor(inputs["x"][p]).double() for p, i in enumerate(shared_ids)})
    replies = []
    for n in range(2):
        z = {str(i): torch.tensor(inputs["Z"][p][n]) for p, i in enumerate(personal_ids)}
        y = x | Tensors(z)
        values = [float(y[str(i)]) for i in range(5)]
        np.testing.assert_allclose(values, np.array(case["expected"]["Y"])[:, n])
        local = {i: y[i] - eta * inputs["Nabla"][int(i)][n] for i in x}
        replies.append((str(n), Message.of(shared=Tensors(local), num_examples=n + 1)))
    server: Any = SimpleNamespace(state={"shared": x})
    PFedNet().update_shared(server, Replies(iter(replies)).collect())
    found = [float(server.state["shared"][str(i)]) for i in shared_ids]
    np.testing.assert_allclose(found, case["expected"]["x_next"], atol=case["atol"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lam": -0.1}, "PFedNet.lam: should be at least 0, not -0.1"),
        ({"lam": float("nan")}, "PFedNet.lam: should be finite and at least 0, not nan"),
        ({"k": 0}, "PFedNet.k: should be at least 1, not 0"),
        ({"inner_shared": 0}, "PFedNet.inner_shared: should be at least 1, not 0"),
        ({"inner_personal": 0}, "PFedNet.inner_personal: should be at least 1, not 0"),
        ({"iterations": 0}, "PFedNet.iterations: should be at least 1, not 0"),
        ({"eta": 0.0}, "PFedNet.eta: should be above 0, not 0.0"),
        ({"rho": -1.0}, "PFedNet.rho: should be above 0, not -1.0"),
        ({"combined": True, "inner_shared": 2}, "combined makes one training of the two"),
        ({"sketch_items": 0}, "PFedNet.sketch_items: should be at least 1, not 0"),
        ({"sketch_size": 0}, "PFedNet.sketch_size: should be at least 1, not 0"),
    ],
)
def test_values_that_cannot_work_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PFedNet(**options)


def test_too_many_neighbours_and_a_single_site_are_named(federation: Any) -> None:
    with pytest.raises(ConfigError, match="k is 3, but with 3 sites a site has 1 to 2 neighbours"):
        federation.run(PFedNet(k=3), rounds=1)
    with pytest.raises(ConfigError, match="there is one site only"):
        federation.run(PFedNet(), rounds=1, sites=federation.sites()[:1])


def test_a_site_without_a_sketch_is_named(federation: Any) -> None:
    sites = federation.sites()
    empty = TensorDataset({"image": torch.zeros(0, 3).double(), "label": torch.zeros(0, 1)})
    bare = Site("B", empty, sites[1].val, sites[1].test)
    with pytest.raises(CollegiumError, match="site 'B' has no training cases"):
        federation.run(PFedNet(), rounds=1, sites=[sites[0], bare, sites[2]])
    with pytest.raises(ProtocolError, match="site 'C' sent no mean_image"):
        federation.run(PFedNet(), rounds=1, lose={0: "C"}, participation=SKIPPING)


def test_labels_that_are_no_classes_make_no_histogram(federation: Any) -> None:
    with pytest.raises(DataError, match="has no statistics"):
        federation.run(PFedNet(sketch="label_histogram"), rounds=1)


def test_a_policy_that_forbids_the_sketch_is_respected(federation: Any) -> None:
    sites = federation.sites({"A": EgressPolicy(forbid=frozenset({"mean_image"}))})
    with pytest.raises(CollegiumError, match="site 'A' does not let 'mean_image' out"):
        federation.run(PFedNet(), rounds=1, sites=sites)


def test_a_network_without_a_personal_part_is_named(federation: Any) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(1).double())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.factor * x.sum(1, keepdim=True)

    with pytest.raises(ConfigError, match="the network's decoder has nothing to train"):
        federation.run(PFedNet(), rounds=1, network=Scale)
    outcome = federation.run(PFedNet(personal="all", lam=1e3), rounds=1, network=Scale)
    parts = outcome.server[1]["personal"]
    assert torch.allclose(parts["A"]["factor"], parts["C"]["factor"])


def test_a_lost_client_state_is_named(federation: Any) -> None:
    client: Any = SimpleNamespace(id="A", state={})
    with pytest.raises(ProtocolError, match="site 'A' has lost its personal part"):
        PFedNet()._model(client, Message.of(shared=Tensors()))


def test_parts_are_checked_by_what_is_personal(federation: Any) -> None:
    network = federation.normed()
    model = Tensors(network.state_dict())
    parts = find_parts(network)
    for personal, names in (("head", parts.head), ("all", parts.names)):
        expected = Expected(model, parts, {"personal": personal})
        Component(shared=False).check(model.select(names), expected)
        Component(shared=True).check(model.without(names), expected)
        with pytest.raises(ProtocolError, match="tensor names differ"):
            Component(shared=True).check(model.select(parts.norm), expected)
