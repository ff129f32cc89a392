from typing import Any

from collegium.algorithms.fedbn import FedBN

ROUNDS = 3


def test_normalisation_stays_at_the_client_and_the_rest_is_averaged(
    federation: Any, by_hand: Any
) -> None:
    outcome = federation.run(FedBN(), rounds=ROUNDS)
    start = federation.initial()
    shared = by_hand.select(start, by_hand.NAMES - by_hand.NORM)
    own = {name: by_hand.select(start, by_hand.NORM) for name in federation.names}
    personal: dict[str, list[Any]] = {name: [] for name in federation.names}
    for t in range(1, ROUNDS + 1):
        trained = {
            name: by_hand.train(
                shared | own[name], federation.data[name], federation.batches(name, t),
                0.1 * 0.8 ** (t - 1),
            )[0]
            for name in federation.names
        }  # fmt: skip
        own = {name: by_hand.select(model, by_hand.NORM) for name, model in trained.items()}
        mean = by_hand.average([*trained.values()], [5, 8, 11])
        shared = by_hand.select(mean, by_hand.NAMES - by_hand.NORM)
        server = outcome.server[t]["model"]
        by_hand.assert_same(server.without(by_hand.NORM), shared, f"round {t}")
        for name in federation.names:
            private = outcome.clients[t][name]["private"]
            by_hand.assert_same(private, own[name], f"round {t}, {name}")
            personal[name].append(shared | own[name])
    for name in federation.names:
        best = by_hand.best(personal[name], federation.validation[name])
        by_hand.assert_same(outcome.best[name], best, name)


def test_no_tensor_of_a_normalisation_layer_is_sent_whatever_its_name(federation: Any) -> None:
    """The layer's name is `conv`; `bn_in` and `norm` are linear layers."""
    replies = federation.run(FedBN(), rounds=2).replies("train")
    assert len(replies) == 6
    for reply in replies:
        assert reply.keys() == {"model", "num_examples", "progress"}
        assert reply["model"].keys() == {"bn_in.weight", "norm.weight", "norm.bias"}


def test_the_servers_normalisation_stays_as_initialised_and_is_never_used(
    federation: Any, by_hand: Any
) -> None:
    outcome = federation.run(FedBN(), rounds=2)
    start = by_hand.select(federation.initial(), by_hand.NORM)
    by_hand.assert_same(outcome.server[2]["model"].select(by_hand.NORM), start)
    assert outcome.deployed == {}
    assert outcome.best_global is None
    assert all(reply["scores"].keys() == {"personal"} for reply in outcome.replies("evaluate"))
