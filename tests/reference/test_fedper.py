from typing import Any

from collegium.algorithms.fedper import FedPer

ROUNDS = 3


def test_heads_stay_at_the_client_and_bodies_are_averaged_with_their_statistics(
    federation: Any, by_hand: Any
) -> None:
    outcome = federation.run(FedPer(), rounds=ROUNDS)
    start = federation.initial()
    body = by_hand.select(start, by_hand.NAMES - by_hand.HEAD)
    head = {name: by_hand.select(start, by_hand.HEAD) for name in federation.names}
    personal: dict[str, list[Any]] = {name: [] for name in federation.names}
    for t in range(1, ROUNDS + 1):
        trained = {
            name: by_hand.train(
                body | head[name], federation.data[name], federation.batches(name, t),
                0.1 * 0.8 ** (t - 1),
            )[0]
            for name in federation.names
        }  # fmt: skip
        head = {name: by_hand.select(model, by_hand.HEAD) for name, model in trained.items()}
        mean = by_hand.average([*trained.values()], [5, 8, 11])
        body = by_hand.select(mean, by_hand.NAMES - by_hand.HEAD)
        server = outcome.server[t]["model"]
        by_hand.assert_same(server.without(by_hand.HEAD), body, f"round {t}")
        for name in federation.names:
            private = outcome.clients[t][name]["private"]
            by_hand.assert_same(private, head[name], f"round {t}, {name}")
            personal[name].append(body | head[name])
    for name in federation.names:
        best = by_hand.best(personal[name], federation.validation[name])
        by_hand.assert_same(outcome.best[name], best, name)


def test_the_head_is_not_sent_and_the_whole_body_is(federation: Any) -> None:
    """The head is the layer called `norm`."""
    replies = federation.run(FedPer(), rounds=2).replies("train")
    assert len(replies) == 6
    for reply in replies:
        assert reply.keys() == {"model", "num_examples", "progress"}
        assert reply["model"].keys() == {
            "bn_in.weight", "conv.weight", "conv.bias",
            "conv.running_mean", "conv.running_var", "conv.num_batches_tracked",
        }  # fmt: skip


def test_there_is_no_global_model(federation: Any, by_hand: Any) -> None:
    outcome = federation.run(FedPer(), rounds=2)
    start = by_hand.select(federation.initial(), by_hand.HEAD)
    by_hand.assert_same(outcome.server[2]["model"].select(by_hand.HEAD), start)
    assert outcome.deployed == {}
    assert all(reply["scores"].keys() == {"personal"} for reply in outcome.replies("evaluate"))
