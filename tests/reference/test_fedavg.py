from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collegium.algorithms.fedavg import FedAvg
from collegium.runtime.selection import Selection
from collegium.runtime.simulation import simulate

ROUNDS = 3
STEPS = {"A": 2, "B": 4, "C": 6}
"""Optimiser steps per round: two epochs of 1, 2 and 3 batches."""


def expected(federation: Any, by_hand: Any, weights: dict[str, int]) -> tuple[list[Any], list[Any]]:
    """The global model after every round, first the initial one; the local models of each round."""
    models, trained = [federation.initial()], []
    for t in range(1, ROUNDS + 1):
        trained.append(
            {
                name: by_hand.train(
                    models[-1],
                    federation.data[name],
                    federation.batches(name, t),
                    0.1 * 0.8 ** (t - 1),
                )[0]
                for name in federation.names
            }
        )
        models.append(by_hand.average([*trained[-1].values()], [weights[n] for n in trained[-1]]))
    return models, trained


@pytest.mark.parametrize(
    ("weighting", "weights"),
    [("examples", {"A": 5, "B": 8, "C": 11}), ("uniform", {"A": 1, "B": 1, "C": 1})],
)
def test_the_global_model_is_the_weighted_mean_of_the_local_ones(
    federation: Any, by_hand: Any, weighting: Any, weights: dict[str, int]
) -> None:
    outcome = federation.run(FedAvg(weighting=weighting), rounds=ROUNDS)
    models, trained = expected(federation, by_hand, weights)
    replies = iter(outcome.replies("train"))
    for t in range(1, ROUNDS + 1):
        for name in federation.names:
            reply = next(replies)
            by_hand.assert_same(reply["model"], trained[t - 1][name], f"round {t}, {name}")
            assert reply["num_examples"] == federation.sizes[name]
        by_hand.assert_same(outcome.server[t]["model"], models[t], f"round {t}")
        assert all(state == {} for state in outcome.clients[t].values())
    by_hand.assert_same(outcome.deployed["global"], models[-1])
    assert outcome.best == {"A": None, "B": None, "C": None}


def test_running_statistics_are_averaged_and_counters_keep_the_maximum(
    federation: Any, by_hand: Any
) -> None:
    model = federation.run(FedAvg(), rounds=1).server[1]["model"]
    _, trained = expected(federation, by_hand, federation.sizes)
    means = {name: local["conv.running_mean"] for name, local in trained[0].items()}
    mean = (5 * means["A"] + 8 * means["B"] + 11 * means["C"]) / 24
    np.testing.assert_allclose(model["conv.running_mean"], mean, rtol=1e-9)
    for alone in (*means.values(), np.zeros(2)):
        assert not np.allclose(mean, alone, rtol=1e-3)
    assert {n: int(m["conv.num_batches_tracked"]) for n, m in trained[0].items()} == STEPS
    assert int(model["conv.num_batches_tracked"]) == max(STEPS.values())


def test_one_full_batch_step_everywhere_is_a_step_along_the_gradient_of_all_data(
    federation: Any, by_hand: Any
) -> None:
    outcome = federation.run(
        FedAvg(), federation.full_batch, rounds=ROUNDS, network=federation.linear
    )
    x = np.concatenate([federation.data[name].x for name in federation.names])
    y = np.concatenate([federation.data[name].y for name in federation.names])
    model = federation.initial(network=federation.linear)
    weight, bias = model["weight"], model["bias"]
    for _ in range(ROUNDS):
        error = x @ weight.T + bias - y
        weight, bias = weight - 0.1 * 2 / 24 * error.T @ x, bias - 0.1 * 2 * error.mean(0)
    by_hand.assert_same(outcome.server[ROUNDS]["model"], {"weight": weight, "bias": bias})


def test_the_model_with_the_least_loss_over_all_validation_cases_is_handed_out(
    federation: Any, by_hand: Any, tmp_path: Path
) -> None:
    result = simulate(
        FedAvg(), federation.sites(), federation.normed, federation.task,
        rounds=ROUNDS, training=federation.recipe, seed=federation.seed, output=tmp_path / "run",
        selection=Selection(by="federation", min_events=0),
    )  # fmt: skip
    models, _ = expected(federation, by_hand, federation.sizes)
    cases = by_hand.Data(
        np.concatenate([federation.validation[name].x for name in federation.names]),
        np.concatenate([federation.validation[name].y for name in federation.names]),
    )
    best = by_hand.best(models[1:], cases)
    assert result.model is not None
    by_hand.assert_same(result.model, best)
    for name in federation.names:
        scores = [row["negative_loss"] for row in result.scores[name]["global"]]
        assert np.mean(scores) == pytest.approx(-by_hand.loss(best, federation.validation[name]))
