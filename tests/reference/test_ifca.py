from dataclasses import replace
from typing import Any

import pytest

from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.ifca import IFCA
from collegium.core.dataset import TensorDataset

ROUNDS = 3
CLUSTERS = 3


def choose(by_hand: Any, models: list[Any], data: Any, *, batch_statistics: bool = False) -> int:
    losses = [by_hand.loss(model, data, batch_statistics=batch_statistics) for model in models]
    return losses.index(min(losses))


def expected(federation: Any, by_hand: Any) -> list[tuple[list[Any], dict[str, int]]]:
    """The models after every round and the choices of that round; first the initial models."""
    models = [federation.initial(k) for k in range(CLUSTERS)]
    history: list[tuple[list[Any], dict[str, int]]] = [(models, {})]
    for t in range(1, ROUNDS + 1):
        choices = {name: choose(by_hand, models, data) for name, data in federation.data.items()}
        trained = {
            name: by_hand.train(
                models[k], federation.data[name], federation.batches(name, t),
                0.1 * 0.8 ** (t - 1),
            )[0]
            for name, k in choices.items()
        }  # fmt: skip
        renewed = []
        for k, model in enumerate(models):
            members = [name for name in federation.names if choices[name] == k]
            sizes = [federation.sizes[name] for name in members]
            renewed.append(
                by_hand.average([trained[name] for name in members], sizes) if members else model
            )
        models = renewed
        history.append((models, choices))
    return history


def test_every_cluster_is_the_average_of_those_that_chose_it(federation: Any, by_hand: Any) -> None:
    outcome = federation.run(IFCA(num_clusters=CLUSTERS), rounds=ROUNDS)
    history = expected(federation, by_hand)
    personal: dict[str, list[Any]] = {name: [] for name in federation.names}
    for t, (models, choices) in enumerate(history[1:], start=1):
        for k, model in enumerate(models):
            by_hand.assert_same(outcome.server[t]["models"][k], model, f"round {t}, cluster {k}")
        for name, choice in choices.items():
            assert outcome.clients[t][name] == {"cluster": choice}
            personal[name].append(models[choice])
    for name in federation.names:
        best = by_hand.best(personal[name], federation.validation[name])
        by_hand.assert_same(outcome.best[name], best, name)
    assert outcome.deployed.keys() == {"cluster-0", "cluster-1", "cluster-2"}
    for k, model in enumerate(history[-1][0]):
        by_hand.assert_same(outcome.deployed[f"cluster-{k}"], model)


def test_a_cluster_that_nobody_chose_keeps_its_model(federation: Any, by_hand: Any) -> None:
    outcome = federation.run(IFCA(num_clusters=CLUSTERS), rounds=1)
    chosen = {state["cluster"] for state in outcome.clients[1].values()}
    empty = set(range(CLUSTERS)) - chosen
    assert len(empty) == 1
    for k in empty:
        by_hand.assert_same(outcome.server[1]["models"][k], federation.initial(k))


def test_the_choice_is_made_with_each_models_own_running_statistics(
    federation: Any, by_hand: Any
) -> None:
    """Batch statistics would choose otherwise here."""
    outcome = federation.run(IFCA(num_clusters=CLUSTERS), rounds=ROUNDS)
    differs = False
    for t, (models, _) in enumerate(expected(federation, by_hand)[:-1], start=1):
        for name, data in federation.data.items():
            choice = choose(by_hand, models, data)
            assert outcome.clients[t][name]["cluster"] == choice
            differs |= choice != choose(by_hand, models, data, batch_statistics=True)
    assert differs


def test_all_models_are_sent_to_every_client_and_one_comes_back(
    federation: Any, by_hand: Any
) -> None:
    outcome = federation.run(IFCA(num_clusters=CLUSTERS), rounds=1)
    for request, parts, reply in outcome.log:
        if request.method == "train":
            assert parts.keys() == {"models"}
            for k, model in enumerate(parts["models"]):
                by_hand.assert_same(model, federation.initial(k))
            assert reply.keys() == {"model", "cluster", "num_examples", "progress"}
            assert reply["num_examples"] == federation.sizes[request.client]


def test_the_initial_models_differ(federation: Any) -> None:
    outcome = federation.run(IFCA(num_clusters=CLUSTERS), rounds=1)
    models = outcome.log[0][1]["models"]
    weights = [model["bn_in.weight"] for model in models]
    assert not any(weights[i].equal(weights[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


def test_with_one_cluster_it_is_fedavg_bit_by_bit(federation: Any) -> None:
    found = federation.run(IFCA(num_clusters=1), rounds=ROUNDS)
    plain = federation.run(FedAvg(), rounds=ROUNDS)
    for t in range(1, ROUNDS + 1):
        [model] = found.server[t]["models"]
        for name, tensor in plain.server[t]["model"].items():
            assert model[name].equal(tensor), f"round {t}, {name}"


def test_a_site_without_examples_has_no_say(federation: Any, by_hand: Any) -> None:
    sites = federation.sites()
    empty = TensorDataset({key: value[:0] for key, value in sites[1].train.inputs.items()})
    sites[1] = replace(sites[1], train=empty)
    outcome = federation.run(IFCA(num_clusters=CLUSTERS), rounds=1, sites=sites)
    models = [federation.initial(k) for k in range(CLUSTERS)]
    assert outcome.clients[1]["B"]["cluster"] == 0
    for name in ("A", "C"):
        choice = choose(by_hand, models, federation.data[name])
        assert outcome.clients[1][name]["cluster"] == choice
    chosen = {outcome.clients[1][name]["cluster"] for name in ("A", "C")}
    for k in set(range(CLUSTERS)) - chosen:
        by_hand.assert_same(outcome.server[1]["models"][k], models[k])


@pytest.mark.parametrize("num_clusters", [2, 3])
def test_there_is_no_global_model(federation: Any, num_clusters: int) -> None:
    outcome = federation.run(IFCA(num_clusters=num_clusters), rounds=1)
    assert outcome.best_global is None
    assert all(reply["scores"].keys() == {"personal"} for reply in outcome.replies("evaluate"))
