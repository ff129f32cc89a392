from dataclasses import replace
from typing import Any

import pytest

from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.fedprox import FedProx

ROUNDS = 3
MU = 0.7


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_gradient_gains_mu_times_the_distance_from_the_received_model(
    federation: Any, by_hand: Any, optimizer: Any
) -> None:
    recipe = replace(federation.recipe, optimizer=optimizer)
    outcome = federation.run(FedProx(mu=MU), recipe, rounds=ROUNDS)
    received = federation.initial()
    for t in range(1, ROUNDS + 1):

        def proximal(gradient: Any, now: Any, start: Any = received) -> Any:
            return {name: g + MU * (now[name] - start[name]) for name, g in gradient.items()}

        trained = [
            by_hand.train(
                received, federation.data[name], federation.batches(name, t), 0.1 * 0.8 ** (t - 1),
                change=proximal, adam=optimizer == "adam",
            )[0]
            for name in federation.names
        ]  # fmt: skip
        received = by_hand.average(trained, [5, 8, 11])
        by_hand.assert_same(outcome.server[t]["model"], received, f"round {t}")
        assert all(state == {} for state in outcome.clients[t].values())
    by_hand.assert_same(outcome.deployed["global"], received)


def test_buffers_are_not_held_back(federation: Any, by_hand: Any) -> None:
    """Where steps round to nothing, parameters stay and statistics move, however large mu is."""
    recipe = replace(federation.full_batch, lr=1e-30)
    outcome = federation.run(FedProx(mu=1e6), recipe, rounds=2)
    model = federation.initial()
    for _ in range(2):
        trained = [
            by_hand.train(model, federation.data[name], [range(size)], 0.0)[0]
            for name, size in federation.sizes.items()
        ]
        model = by_hand.average(trained, [5, 8, 11])
    by_hand.assert_same(outcome.server[2]["model"], model)
    assert float(abs(outcome.server[2]["model"]["conv.running_mean"]).min()) > 0.01


def test_the_reported_loss_leaves_the_proximal_term_out(federation: Any, by_hand: Any) -> None:
    outcome = federation.run(FedProx(mu=MU), rounds=1)
    start = federation.initial()
    for name in federation.names:
        _, losses = by_hand.train(
            start, federation.data[name], federation.batches(name, 1), 0.1,
            change=lambda g, now: {n: g[n] + MU * (now[n] - start[n]) for n in g},
        )  # fmt: skip
        loss = outcome.progress(name)[0]["loss"]
        assert loss == pytest.approx(sum(losses) / len(losses), rel=1e-9)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_with_mu_0_it_is_fedavg_bit_by_bit(federation: Any, optimizer: Any) -> None:
    recipe = replace(federation.recipe, optimizer=optimizer)
    found = federation.run(FedProx(mu=0.0), recipe, rounds=ROUNDS).server[ROUNDS]["model"]
    expected = federation.run(FedAvg(), recipe, rounds=ROUNDS).server[ROUNDS]["model"]
    assert all(found[name].equal(tensor) for name, tensor in expected.items())


def test_weighting_is_that_of_fedavg(federation: Any) -> None:
    found = federation.run(FedProx(mu=0.0, weighting="uniform"), rounds=1).server[1]["model"]
    expected = federation.run(FedAvg(weighting="uniform"), rounds=1).server[1]["model"]
    assert all(found[name].equal(tensor) for name, tensor in expected.items())
