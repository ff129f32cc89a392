from typing import Any

import pytest

from collegium.algorithms.local import Local

ROUNDS = 3


def test_every_client_goes_on_from_its_own_model(federation: Any, by_hand: Any) -> None:
    outcome = federation.run(Local(), rounds=ROUNDS)
    for name in federation.names:
        model, history = federation.initial(), []
        for t in range(1, ROUNDS + 1):
            batches = federation.batches(name, t)
            model, losses = by_hand.train(
                model, federation.data[name], batches, 0.1 * 0.8 ** (t - 1)
            )
            history.append(model)
            by_hand.assert_same(outcome.clients[t][name]["model"], model, f"round {t}, {name}")
            progress = outcome.progress(name)[t - 1]
            assert progress["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-9)
            assert progress["steps"] == len(batches)
        by_hand.assert_same(outcome.best[name], by_hand.best(history, federation.validation[name]))


def test_sites_part_from_each_other(federation: Any) -> None:
    clients = federation.run(Local(), rounds=1).clients[1]
    heads = {float(clients[name]["model"]["norm.bias"]) for name in federation.names}
    assert len(heads) == 3


def test_nothing_but_progress_and_scores_leaves_a_site(federation: Any) -> None:
    outcome = federation.run(Local(), rounds=ROUNDS)
    sent = {(request.method, *reply) for request, _, reply in outcome.log}
    assert sent == {
        ("start",), ("train", "progress"), ("evaluate", "scores"), ("test", "scores"),
        ("share_personal",),
    }  # fmt: skip
    assert all(reply["progress"].keys() == {"loss", "steps"} for reply in outcome.replies("train"))
    assert all(reply["scores"].keys() == {"personal"} for reply in outcome.replies("evaluate"))


def test_no_model_goes_out_after_the_initial_one(federation: Any) -> None:
    outcome = federation.run(Local(), rounds=ROUNDS)
    assert {request.method for request, parts, _ in outcome.log if parts.get("model")} == {"start"}
    assert all(state == {} for state in outcome.server.values())
    assert outcome.deployed == {}
    assert outcome.best_global is None
