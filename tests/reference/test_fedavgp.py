from typing import Any

from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.fedavgp import FedAvgP


def test_a_client_predicts_with_what_it_sent_and_the_global_model_is_fedavg_s(
    federation: Any, by_hand: Any
) -> None:
    outcome = federation.run(FedAvgP(), rounds=2)
    plain = federation.run(FedAvg(), rounds=2)
    model = federation.initial()
    for t in (1, 2):
        trained = [
            by_hand.train(
                model, federation.data[name], federation.batches(name, t), 0.1 * 0.8 ** (t - 1)
            )[0]
            for name in federation.names
        ]
        for name, own in zip(federation.names, trained, strict=True):
            by_hand.assert_same(outcome.clients[t][name]["personal"], own, f"round {t}, {name}")
        model = by_hand.average(trained, [5, 8, 11])
        for key, tensor in plain.server[t]["model"].items():
            assert outcome.server[t]["model"][key].equal(tensor)


def test_a_client_that_is_missing_keeps_its_last_model(federation: Any) -> None:
    from collegium.runtime.participation import SKIPPING

    outcome = federation.run(FedAvgP(), rounds=2, lose={2: "B"}, participation=SKIPPING)
    first, second = (outcome.clients[t]["B"]["personal"] for t in (1, 2))
    assert all(second[name].equal(tensor) for name, tensor in first.items())
