from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from collegium.algorithms.l2gd import L2GD
from collegium.errors import ClientError, ConfigError
from collegium.testing.toy import ToyFederation

ROUNDS = 4
P, LAM = 0.3, 1.7


def test_models_are_those_of_algorithm_1_iteration_by_iteration(
    federation: Any, by_hand: Any
) -> None:
    """Coins are taken from the messages; the mean is computed again in every iteration."""
    recipe = replace(federation.recipe, lr_decay=1.0)
    outcome = federation.run(L2GD(p=P, lam=LAM), recipe, rounds=ROUNDS)
    asked = {
        request.round: message
        for request, message, _ in outcome.log
        if request.method == "train" and request.client == "A"
    }
    assert asked[1]["pulls"] == 0
    own = {name: federation.initial() for name in federation.names}
    s = 0.1 * LAM * (1 - P) / P
    assert 0 < s < 1
    for t in range(1, ROUNDS + 1):
        for _ in range(asked[t]["pulls"]):
            mean = by_hand.average([*own.values()], [1, 1, 1])
            for name, w in own.items():
                counters = {n: v for n, v in w.items() if v.dtype.kind != "f"}
                own[name] = by_hand.combine([w, mean], [1 - s, s]) | counters
        for name, w in own.items():
            batches = federation.batches(name, t, epochs=None, steps=asked[t]["steps"])
            own[name] = by_hand.train(w, federation.data[name], batches, 0.1)[0]
            by_hand.assert_same(outcome.clients[t][name]["model"], own[name], f"round {t}, {name}")
        mean = by_hand.average([*own.values()], [1, 1, 1])
        by_hand.assert_same(outcome.server[t]["model"], mean, f"round {t}, mean")
    assert sum(message["pulls"] for message in asked.values()) > 0


@pytest.mark.parametrize("end", [0.1, 0.5, 0.8])
def test_runs_are_geometric(end: float) -> None:
    coins = torch.Generator().manual_seed(3)
    lengths = np.array([L2GD.run_length(end, coins) for _ in range(20_000)])
    for length in (1, 2, 3):
        wanted = (1 - end) ** (length - 1) * end
        spread = np.sqrt(wanted * (1 - wanted) / lengths.size)
        assert abs((lengths == length).mean() - wanted) < 4 * spread
    assert lengths.mean() == pytest.approx(1 / end, rel=0.03)


def test_coins_differ_by_seed_and_are_the_same_for_all_clients(federation: Any) -> None:
    def coins(seed: int) -> list[tuple[int, int]]:
        federation.seed = seed
        outcome = federation.run(L2GD(), rounds=3)
        found: dict[int, set[tuple[int, int]]] = {}
        for request, message, _ in outcome.log:
            if request.method == "train":
                found.setdefault(request.round, set()).add((message["pulls"], message["steps"]))
        assert all(len(one) == 1 for one in found.values())
        return [next(iter(found[t])) for t in sorted(found)]

    assert coins(4) == coins(4)
    assert coins(4) != coins(5)


def test_a_step_beyond_the_mean_is_refused(federation: Any) -> None:
    with pytest.raises(ClientError, match=r"step to the mean, .*, is 1\.8, above 1; lower"):
        federation.run(L2GD(p=0.1, lam=2.0), rounds=1)


def test_a_coin_that_never_shows_the_mean_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="at which no site ever trains with others"):
        ToyFederation(L2GD(p=0.0), tmp_path).run()


class Coins:
    """A server of which only the coins are looked at."""

    def __init__(self) -> None:
        self.round, self.state = 0, {"model": None}
        self.drawn: list[tuple[int, int]] = []

    def rng(self, purpose: str) -> torch.Generator:
        return torch.Generator().manual_seed(self.round)

    def ask(self, method: Any, *, model: Any, pulls: int, steps: int) -> Any:
        self.drawn.append((pulls, steps))
        return self

    def mean(self, key: str, weight: Any) -> None:
        return None


def test_a_round_pulls_and_trains_as_often_as_the_coin_says_in_the_mean() -> None:
    server: Any = Coins()
    for number in range(1, 4001):
        server.round = number
        L2GD(p=0.2).round(server)
    pulls, steps = np.array(server.drawn[1:]).T
    assert pulls.mean() == pytest.approx(1 / 0.8, rel=0.03)
    assert steps.mean() == pytest.approx(1 / 0.2, rel=0.05)
