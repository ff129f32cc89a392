from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from collegium.algorithms.fedbabu import FedBABU
from collegium.core.model_parts import find_parts
from collegium.errors import ConfigError

ROUNDS = 2


@pytest.mark.parametrize("part", ["all", "head", "body"])
def test_bodies_are_averaged_under_the_initial_head_and_then_a_part_is_fine_tuned(
    federation: Any, by_hand: Any, part: Any
) -> None:
    """Weight decay and momentum would move a head that the optimiser holds."""
    recipe = replace(federation.recipe, weight_decay=0.1)
    outcome = federation.run(FedBABU(epochs=2, part=part), recipe, rounds=ROUNDS)
    body = by_hand.PARAMETERS - by_hand.HEAD
    model = federation.initial()

    def decay(gradient: Any, now: Any) -> Any:
        return {name: g + 0.1 * now[name] for name, g in gradient.items()}

    for t in range(1, ROUNDS + 1):
        trained = [
            by_hand.train(
                model, data, federation.batches(name, t), 0.1 * 0.8 ** (t - 1),
                moving=body, change=decay,
            )[0]
            for name, data in federation.data.items()
        ]  # fmt: skip
        mean = by_hand.average(trained, [5, 8, 11])
        model = mean | by_hand.select(federation.initial(), by_hand.HEAD)
        by_hand.assert_same(outcome.server[t]["model"], model, f"round {t}")
    by_hand.assert_same(outcome.deployed["global"], model)
    moving = {"all": by_hand.PARAMETERS, "head": by_hand.HEAD, "body": body}[part]
    for name, data in federation.data.items():
        tuned, _ = by_hand.train(
            model, data, federation.batches(name, ROUNDS + 1, epochs=2), 0.1 * 0.8**ROUNDS,
            moving=moving, change=decay,
        )  # fmt: skip
        by_hand.assert_same(outcome.best[name], tuned, name)
        by_hand.assert_same(outcome.clients[ROUNDS + 1][name]["personal"], tuned, name)


def test_the_head_never_leaves_a_client(federation: Any, by_hand: Any) -> None:
    outcome = federation.run(FedBABU(), rounds=1)
    assert all(
        reply["model"].keys() == by_hand.NAMES - by_hand.HEAD for reply in outcome.replies("train")
    )
    assert all(reply.keys() == {"progress"} for reply in outcome.replies("fine_tune"))


@pytest.mark.parametrize(
    ("network", "words"),
    [(nn.Linear(3, 1), "nothing to train but its head"), (nn.PReLU(), "no head")],
)
def test_a_network_needs_a_head_and_a_body(network: nn.Module, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FedBABU().check_setup(["A", "B"], find_parts(network))
