from typing import Any

from collegium.algorithms.silobn import SiloBN

ROUNDS = 3


def test_running_statistics_stay_at_the_client_and_the_rest_is_averaged(
    federation: Any, by_hand: Any
) -> None:
    outcome = federation.run(SiloBN(), rounds=ROUNDS)
    start = federation.initial()
    shared = by_hand.select(start, by_hand.PARAMETERS)
    own = {name: by_hand.select(start, by_hand.STATISTICS) for name in federation.names}
    personal: dict[str, list[Any]] = {name: [] for name in federation.names}
    for t in range(1, ROUNDS + 1):
        trained = {
            name: by_hand.train(
                shared | own[name], federation.data[name], federation.batches(name, t),
                0.1 * 0.8 ** (t - 1),
            )[0]
            for name in federation.names
        }  # fmt: skip
        own = {name: by_hand.select(model, by_hand.STATISTICS) for name, model in trained.items()}
        mean = by_hand.average([*trained.values()], [5, 8, 11])
        shared = by_hand.select(mean, by_hand.PARAMETERS)
        server = outcome.server[t]["model"]
        by_hand.assert_same(server.without(by_hand.STATISTICS), shared, f"round {t}")
        for name in federation.names:
            private = outcome.clients[t][name]["private"]
            by_hand.assert_same(private, own[name], f"round {t}, {name}")
            personal[name].append(shared | own[name])
    for name in federation.names:
        best = by_hand.best(personal[name], federation.validation[name])
        by_hand.assert_same(outcome.best[name], best, name)


def test_affine_parameters_are_sent_and_statistics_are_not(federation: Any) -> None:
    replies = federation.run(SiloBN(), rounds=2).replies("train")
    assert len(replies) == 6
    for reply in replies:
        assert reply.keys() == {"model", "num_examples", "progress"}
        assert reply["model"].keys() == {
            "bn_in.weight", "conv.weight", "conv.bias", "norm.weight", "norm.bias",
        }  # fmt: skip


def test_every_client_counts_its_own_batches(federation: Any) -> None:
    outcome = federation.run(SiloBN(), rounds=2)
    counts = {
        name: int(state["private"]["conv.num_batches_tracked"])
        for name, state in outcome.clients[2].items()
    }
    assert counts == {"A": 2 * 2, "B": 2 * 4, "C": 2 * 6}


def test_there_is_no_global_model(federation: Any, by_hand: Any) -> None:
    outcome = federation.run(SiloBN(), rounds=2)
    start = by_hand.select(federation.initial(), by_hand.STATISTICS)
    by_hand.assert_same(outcome.server[2]["model"].select(by_hand.STATISTICS), start)
    assert outcome.deployed == {}
    assert all(reply["scores"].keys() == {"personal"} for reply in outcome.replies("evaluate"))
