from dataclasses import replace
from typing import Any

import pytest
import torch

from collegium.algorithms.fedrep import FedRep

ROUNDS = 3


def fit_head(federation: Any, by_hand: Any, model: Any, name: str, t: int, **budget: Any) -> Any:
    batches = federation.batches(name, t, stream="head", **budget)
    lr = 0.1 * 0.8 ** (t - 1)
    return by_hand.train(model, federation.data[name], batches, lr, moving=by_hand.HEAD)[0]


def fit_body(federation: Any, by_hand: Any, model: Any, name: str, t: int, **budget: Any) -> Any:
    batches = federation.batches(name, t, **budget)
    return by_hand.train(
        model, federation.data[name], batches, 0.1 * 0.8 ** (t - 1),
        moving=by_hand.PARAMETERS - by_hand.HEAD,
    )[0]  # fmt: skip


def test_the_head_is_trained_first_and_then_the_body_under_it(
    federation: Any, by_hand: Any
) -> None:
    outcome = federation.run(FedRep(head_epochs=3, body_epochs=2), rounds=ROUNDS)
    start = federation.initial()
    body = by_hand.select(start, by_hand.NAMES - by_hand.HEAD)
    head = {name: by_hand.select(start, by_hand.HEAD) for name in federation.names}
    personal: dict[str, list[Any]] = {name: [] for name in federation.names}
    for t in range(1, ROUNDS + 1):
        trained = []
        for name in federation.names:
            model = fit_head(federation, by_hand, body | head[name], name, t, epochs=3)
            head[name] = by_hand.select(model, by_hand.HEAD)
            trained.append(fit_body(federation, by_hand, model, name, t, epochs=2))
        mean = by_hand.average(trained, [5, 8, 11])
        body = by_hand.select(mean, by_hand.NAMES - by_hand.HEAD)
        by_hand.assert_same(outcome.server[t]["model"].without(by_hand.HEAD), body, f"round {t}")
        for name in federation.names:
            by_hand.assert_same(
                outcome.clients[t][name]["private"], head[name], f"round {t}, {name}"
            )
            personal[name].append(body | head[name])
    for name in federation.names:
        last = fit_head(federation, by_hand, body | head[name], name, ROUNDS + 1, epochs=3)
        private = outcome.clients[ROUNDS + 1][name]["private"]
        by_hand.assert_same(private, by_hand.select(last, by_hand.HEAD), f"last head of {name}")
        personal[name].append(last)
        best = by_hand.best(personal[name], federation.validation[name])
        by_hand.assert_same(outcome.best[name], best, name)
    by_hand.assert_same(outcome.server[ROUNDS + 1]["model"].without(by_hand.HEAD), body)


def test_running_statistics_stand_still_while_the_head_is_trained(federation: Any) -> None:
    """An epoch is 1, 2 and 3 steps; 5 epochs of the head would count 5, 10 and 15 more."""
    replies = federation.run(FedRep(head_epochs=5, body_epochs=1), rounds=1).replies("train")
    counts = [int(reply["model"]["conv.num_batches_tracked"]) for reply in replies]
    assert counts == [1, 2, 3]


def test_the_head_stands_still_while_the_body_is_trained(federation: Any, by_hand: Any) -> None:
    outcome = federation.run(FedRep(head_epochs=0, body_epochs=2), rounds=1)
    head = by_hand.select(federation.initial(), by_hand.HEAD)
    for name in federation.names:
        by_hand.assert_same(outcome.clients[1][name]["private"], head, name)


def test_the_defaults_are_four_epochs_for_the_head_and_one_for_the_body(federation: Any) -> None:
    outcome = federation.run(FedRep(), rounds=1)
    for name, epoch in {"A": 1, "B": 2, "C": 3}.items():
        assert [p["steps"] for p in outcome.progress(name)] == [4 * epoch + epoch]
        assert [p["steps"] for p in outcome.progress(name, "refit_head")] == [4 * epoch]


@pytest.mark.parametrize(
    ("local_steps", "head_epochs", "head", "body"), [(5, 4, 4, 1), (10, 4, 8, 2), (7, 2, 5, 2)]
)
def test_local_steps_are_divided_between_head_and_body(
    federation: Any, by_hand: Any, local_steps: int, head_epochs: int, head: int, body: int
) -> None:
    recipe = replace(federation.recipe, local_steps=local_steps)
    outcome = federation.run(FedRep(head_epochs=head_epochs), recipe, rounds=1)
    models = {}
    for name in federation.names:
        model = fit_head(federation, by_hand, federation.initial(), name, 1, steps=head)
        models[name] = fit_body(federation, by_hand, model, name, 1, steps=body)
        by_hand.assert_same(
            outcome.clients[1][name]["private"], by_hand.select(model, by_hand.HEAD), name
        )
        assert [p["steps"] for p in outcome.progress(name)] == [local_steps]
        assert [p["steps"] for p in outcome.progress(name, "refit_head")] == [head]
    mean = by_hand.average([*models.values()], [5, 8, 11])
    by_hand.assert_same(
        outcome.server[1]["model"].without(by_hand.HEAD),
        by_hand.select(mean, by_hand.NAMES - by_hand.HEAD),
    )


@pytest.mark.parametrize("local_steps", [1, 2])
def test_few_local_steps_leave_at_least_one_to_the_body(federation: Any, local_steps: int) -> None:
    recipe = replace(federation.recipe, local_steps=local_steps)
    outcome = federation.run(FedRep(), recipe, rounds=1)
    start = torch.tensor(federation.initial()["bn_in.weight"])
    assert not outcome.server[1]["model"]["bn_in.weight"].equal(start)
    for name in federation.names:
        assert [p["steps"] for p in outcome.progress(name)] == [local_steps]


def test_the_head_is_not_sent_not_even_after_the_last_round(federation: Any) -> None:
    outcome = federation.run(FedRep(), rounds=2)
    for reply in outcome.replies("train"):
        assert reply["model"].keys() == {
            "bn_in.weight", "conv.weight", "conv.bias",
            "conv.running_mean", "conv.running_var", "conv.num_batches_tracked",
        }  # fmt: skip
    calls = [(r.round, r.client) for r, _, _ in outcome.log if r.method == "refit_head"]
    assert calls == [(3, "A"), (3, "B"), (3, "C")]
    assert all(reply.keys() == {"progress"} for reply in outcome.replies("refit_head"))
    assert outcome.deployed == {}
