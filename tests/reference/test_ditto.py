from dataclasses import replace
from typing import Any

import pytest

from collegium.algorithms.ditto import Ditto
from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.local import Local

ROUNDS = 3
LAM = 0.6


def test_personal_models_are_pulled_towards_the_received_model(
    federation: Any, by_hand: Any
) -> None:
    outcome = federation.run(Ditto(lam=LAM), rounds=ROUNDS)
    received = federation.initial()
    own = dict.fromkeys(federation.names, received)
    personal: dict[str, list[Any]] = {name: [] for name in federation.names}
    for t in range(1, ROUNDS + 1):
        lr = 0.1 * 0.8 ** (t - 1)

        def pulled(gradient: Any, now: Any, w: Any = received) -> Any:
            return {name: g + LAM * (now[name] - w[name]) for name, g in gradient.items()}

        trained = []
        for name, data in federation.data.items():
            batches = federation.batches(name, t, stream="personal")
            own[name] = by_hand.train(own[name], data, batches, lr, change=pulled)[0]
            trained.append(by_hand.train(received, data, federation.batches(name, t), lr)[0])
            personal[name].append(own[name])
        received = by_hand.average(trained, [5, 8, 11])
        by_hand.assert_same(outcome.server[t]["model"], received, f"round {t}")
        for name in federation.names:
            by_hand.assert_same(
                outcome.clients[t][name]["personal"], own[name], f"round {t}, {name}"
            )
    by_hand.assert_same(outcome.deployed["global"], received)
    for name in federation.names:
        best = by_hand.best(personal[name], federation.validation[name])
        by_hand.assert_same(outcome.best[name], best, name)


@pytest.mark.parametrize("lam", [0.0, 0.1, 2.0])
def test_the_global_model_is_that_of_fedavg_bit_by_bit_for_any_lam(
    federation: Any, lam: float
) -> None:
    ditto, plain = federation.run(Ditto(lam=lam)), federation.run(FedAvg())
    for t in range(1, ROUNDS + 1):
        for name, tensor in plain.server[t]["model"].items():
            assert ditto.server[t]["model"][name].equal(tensor), f"round {t}, {name}"


def test_without_a_pull_the_personal_model_is_that_of_single_site_training(
    federation: Any, by_hand: Any
) -> None:
    """With whole batches, since the personal pass draws an order of its own."""
    recipe = replace(federation.full_batch, local_epochs=4)
    ditto = federation.run(Ditto(lam=0.0), recipe, rounds=ROUNDS)
    alone = federation.run(Local(), recipe, rounds=ROUNDS)
    for name in federation.names:
        expected = {n: t.numpy() for n, t in alone.clients[ROUNDS][name]["model"].items()}
        by_hand.assert_same(ditto.clients[ROUNDS][name]["personal"], expected, name)


def test_the_personal_model_never_leaves_the_client(federation: Any, by_hand: Any) -> None:
    outcome = federation.run(Ditto(lam=LAM), rounds=2)
    for reply in outcome.replies("train"):
        assert reply.keys() == {"model", "num_examples", "progress"}
    sent = [reply["model"]["norm.weight"] for reply in outcome.replies("train")[-3:]]
    kept = [state["personal"]["norm.weight"] for state in outcome.clients[2].values()]
    assert not any(a.equal(b) for a, b in zip(sent, kept, strict=True))


def test_it_takes_twice_the_steps_and_reports_the_loss_of_the_global_pass(
    federation: Any, by_hand: Any
) -> None:
    outcome = federation.run(Ditto(lam=LAM), rounds=1)
    for name, steps in {"A": 2, "B": 4, "C": 6}.items():
        _, losses = by_hand.train(
            federation.initial(), federation.data[name], federation.batches(name, 1), 0.1
        )
        assert outcome.progress(name)[0]["steps"] == 2 * steps
        loss = outcome.progress(name)[0]["loss"]
        assert loss == pytest.approx(sum(losses) / len(losses), rel=1e-9)
