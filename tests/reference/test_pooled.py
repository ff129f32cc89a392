from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collegium.algorithms.pooled import Pooled
from collegium.errors import ClientError
from collegium.runtime.client import ClientRuntime
from collegium.runtime.engines.inprocess import InProcess
from collegium.runtime.federation import Federation
from collegium.training.loop import LocalTraining

ROUNDS = 2


def pool(federation: Any, by_hand: Any) -> Any:
    """All sites' data, in the order of their names."""
    parts = [federation.data[name] for name in sorted(federation.names)]
    return by_hand.Data(np.concatenate([d.x for d in parts]), np.concatenate([d.y for d in parts]))


def expected(federation: Any, by_hand: Any, **budget: Any) -> list[Any]:
    """The model after every round, first the initial one."""
    data, models = pool(federation, by_hand), [federation.initial()]
    for t in range(1, ROUNDS + 1):
        batches = federation.batches("A", t, count=len(data.x), **budget)
        models.append(by_hand.train(models[-1], data, batches, 0.1 * 0.8 ** (t - 1))[0])
    return models


def test_one_model_learns_from_the_data_of_all_sites(federation: Any, by_hand: Any) -> None:
    outcome = federation.run(Pooled(), rounds=ROUNDS)
    models = expected(federation, by_hand)
    for t in range(1, ROUNDS + 1):
        by_hand.assert_same(outcome.server[t]["model"], models[t], f"round {t}")
    assert set(outcome.deployed) == {"global"}
    by_hand.assert_same(outcome.deployed["global"], models[-1])
    assert int(outcome.deployed["global"]["conv.num_batches_tracked"]) == ROUNDS * 2 * 24 / 4
    assert {r.client for r, _, _ in outcome.log if r.method == "train"} == {"A"}


def test_local_steps_are_multiplied_by_the_number_of_clients(federation: Any, by_hand: Any) -> None:
    recipe = replace(federation.recipe, local_steps=2)
    outcome = federation.run(Pooled(), recipe, rounds=ROUNDS)
    models = expected(federation, by_hand, steps=3 * 2)
    by_hand.assert_same(outcome.server[ROUNDS]["model"], models[-1])
    assert [p["steps"] for p in outcome.progress("A")] == [6, 6]


def test_a_full_batch_step_is_a_step_along_the_gradient_of_the_pooled_data(
    federation: Any, by_hand: Any
) -> None:
    outcome = federation.run(
        Pooled(), federation.full_batch, rounds=ROUNDS, network=federation.linear
    )
    x, y = pool(federation, by_hand)
    model = federation.initial(network=federation.linear)
    weight, bias = model["weight"], model["bias"]
    for _ in range(ROUNDS):
        error = x @ weight.T + bias - y
        weight, bias = weight - 0.1 * 2 / 24 * error.T @ x, bias - 0.1 * 2 * error.mean(0)
    by_hand.assert_same(outcome.server[ROUNDS]["model"], {"weight": weight, "bias": bias})


def test_it_is_refused_where_no_simulator_holds_the_data_of_all_sites(
    federation: Any, tmp_path: Path
) -> None:
    local = LocalTraining(federation.normed(), federation.task, federation.recipe)
    clients = {
        site.name: ClientRuntime(
            site, Pooled(), local, make_model=local.current, seed=0, root=tmp_path / site.name
        )
        for site in federation.sites()
    }
    sites = {site.name: site for site in federation.sites()}
    run = Federation(sites, federation.normed, federation.task, federation.recipe).run(
        Pooled(), InProcess(lambda: clients), rounds=1, seed=0, root=tmp_path
    )
    with pytest.raises(ClientError, match=r"client 'A', round 1.*which only a simulation has"):
        run.execute()
