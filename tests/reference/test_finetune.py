from dataclasses import replace
from typing import Any

from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.finetune import FineTune

ROUNDS = 2


def test_clients_train_the_final_global_model_further(federation: Any, by_hand: Any) -> None:
    outcome = federation.run(FineTune(epochs=3), rounds=ROUNDS)
    model = federation.initial()
    for t in range(1, ROUNDS + 1):
        trained = [
            by_hand.train(
                model, federation.data[name], federation.batches(name, t), 0.1 * 0.8 ** (t - 1)
            )[0]
            for name in federation.names
        ]
        model = by_hand.average(trained, [5, 8, 11])
    for name in federation.names:
        batches = federation.batches(name, ROUNDS + 1, epochs=3)
        tuned, _ = by_hand.train(model, federation.data[name], batches, 0.1 * 0.8**ROUNDS)
        by_hand.assert_same(outcome.clients[ROUNDS + 1][name]["personal"], tuned, name)
        by_hand.assert_same(outcome.best[name], tuned, name)
    by_hand.assert_same(outcome.server[ROUNDS + 1]["model"], model)
    by_hand.assert_same(outcome.deployed["global"], model)


def test_there_is_no_personal_model_before_the_last_round_is_over(federation: Any) -> None:
    outcome = federation.run(FineTune(), rounds=ROUNDS)
    for t in range(1, ROUNDS + 1):
        assert all(state == {} for state in outcome.clients[t].values())
    kinds = [set(reply["scores"]) for reply in outcome.replies("evaluate")]
    assert kinds == ROUNDS * 3 * [{"global"}] + 3 * [{"global", "personal"}]
    calls = [(r.round, r.client) for r, _, _ in outcome.log if r.method == "fine_tune"]
    assert calls == [(ROUNDS + 1, "A"), (ROUNDS + 1, "B"), (ROUNDS + 1, "C")]
    assert all(reply.keys() == {"progress"} for reply in outcome.replies("fine_tune"))


def test_the_global_model_is_that_of_fedavg_bit_by_bit(federation: Any) -> None:
    tuned, plain = (
        federation.run(FineTune(), rounds=ROUNDS),
        federation.run(FedAvg(), rounds=ROUNDS),
    )
    for t in range(1, ROUNDS + 2):  # the fine-tuning at the end leaves it as it is
        for name, tensor in plain.server[min(t, ROUNDS)]["model"].items():
            assert tuned.server[t]["model"][name].equal(tensor), f"round {t}, {name}"


def test_with_local_steps_every_epoch_of_fine_tuning_is_as_many_steps_again(
    federation: Any, by_hand: Any
) -> None:
    recipe = replace(federation.recipe, local_steps=3)
    outcome = federation.run(FineTune(epochs=2), recipe, rounds=1)
    model = {name: tensor.numpy() for name, tensor in outcome.server[1]["model"].items()}
    for name in federation.names:
        batches = federation.batches(name, 2, steps=6)
        tuned, _ = by_hand.train(model, federation.data[name], batches, 0.1 * 0.8)
        by_hand.assert_same(outcome.clients[2][name]["personal"], tuned, name)
        assert outcome.progress(name, "fine_tune")[0]["steps"] == 6
