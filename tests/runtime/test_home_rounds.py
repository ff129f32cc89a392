"""The last rounds at home, whichever algorithm ran before them."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from collegium.algorithms.ditto import Ditto
from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.fedbn import FedBN
from collegium.algorithms.finetune import FineTune
from collegium.algorithms.local import Local
from collegium.algorithms.pooled import Pooled
from collegium.compression.half import Half
from collegium.compression.session.groups import Codecs
from collegium.core.algorithm import State
from collegium.core.message import Message
from collegium.core.randomness import ambient
from collegium.core.tensors import Tensors
from collegium.data.site import EgressPolicy
from collegium.errors import ConfigError
from collegium.runtime.engines.inprocess import InProcess
from collegium.runtime.participation import SKIPPING
from collegium.runtime.requests import Request
from collegium.runtime.run import Run
from collegium.testing.stops import after_writes
from collegium.testing.toy import (
    SEED,
    TRAINING,
    ShuffledTransport,
    ToyFederation,
    toy_federation,
    toy_site,
)
from collegium.training.loop import LocalTraining

ADAM = replace(TRAINING, optimizer="adam", lr=0.01)


def newest(federation: ToyFederation, site: str) -> State:
    """The client's newest committed state."""
    store = federation.clients()[site].store
    name = store.newest("~")
    assert name is not None
    found: State = store.load(name)
    return found


def log(federation: ToyFederation) -> list[tuple[Request, Message]]:
    """The requests and replies of all trainings."""
    wire = federation.server.transport
    assert isinstance(wire, ShuffledTransport)
    return [(request, reply) for request, reply in wire.log if request.stage == "train"]


def equal(a: Tensors, b: Tensors) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("state", ["reset", "keep"])
def test_home_model_is_the_global_model_trained_on_by_the_local_loop(tmp_path, state):
    """FedAvg for one round, then two rounds of the bare loop from its average."""
    recipe = replace(ADAM, optimizer_state=state)
    together = ToyFederation(FedAvg(), tmp_path / "1", training=recipe).run(1)
    apart = ToyFederation(FedAvg(), tmp_path / "3", training=recipe).run(3, home_rounds=2)
    with ambient(SEED, "model", 0):
        loop = LocalTraining(
            toy_federation().builder(FedAvg())(), toy_federation().task, recipe, "cpu"
        )
    model = together.server.state["model"]
    moments = dict(newest(together, "B")["optimizer/fit"]) if state == "keep" else None
    for number in (2, 3):
        path = ("client", "B", number, "train", 0, "fit")
        model, _ = loop.fit(
            model, toy_site("B").train, seed=SEED, path=path, lr=0.01, optimizer_state=moments
        )
    assert equal(newest(apart, "B")["home"], model)


def test_home_model_starts_from_the_personal_one_where_there_is_one(tmp_path):
    federation = ToyFederation(FedBN(), tmp_path).run(2, home_rounds=1)
    start = federation.server.state["model"]
    state = newest(federation, "A")
    assert {*state["private"]} < {*start}
    assert not equal(state["home"].select(state["private"]), state["private"])


@pytest.mark.parametrize("algorithm", [Local(), Pooled()])
def test_training_in_one_place_goes_on_as_if_no_round_were_at_home(tmp_path, algorithm):
    recipe = replace(ADAM, optimizer_state="keep", schedule="cosine")
    runs = [
        ToyFederation(algorithm, tmp_path / str(n), training=recipe).run(3, home_rounds=n)
        for n in (0, 2)
    ]
    scores = [(run.root / "server/test.json").read_bytes() for run in runs]
    assert scores[0] == scores[1]
    if isinstance(algorithm, Local):
        assert equal(newest(runs[0], "C")["model"], newest(runs[1], "C")["home"])
    else:
        assert equal(*(run.server.state["model"] for run in runs))


def test_model_goes_down_once_and_nothing_comes_up(tmp_path):
    federation = ToyFederation(FedAvg(), tmp_path, ShuffledTransport).run(4, home_rounds=3)
    sent = log(federation)
    sizes = {number: {len(r.payload) for r, _ in sent if r.round == number} for number in range(5)}
    assert min(sizes[2]) > 500
    assert max(sizes[3]) == max(sizes[4]) < 50
    assert {n for r, m in sent if r.round > 1 for n in m} == {"progress"}


def test_client_that_missed_the_first_round_at_home_gets_the_model_in_the_next(tmp_path):
    federation = ToyFederation(
        FedAvg(),
        tmp_path,
        partial(ShuffledTransport, lose={2: "B"}),
        participation=SKIPPING,
    ).run(3, home_rounds=2)
    assert federation.server.state["home"] == ["A", "B", "C"]
    third = {r.client: len(r.payload) for r, _ in log(federation) if r.round == 3}
    assert third["B"] > 500 > 50 > third["A"] == third["C"]


@pytest.mark.parametrize("algorithm", [FedAvg(), FedBN(), Ditto()])
def test_sites_predict_and_are_tested_with_the_home_model(tmp_path, algorithm):
    federation = ToyFederation(algorithm, tmp_path)
    run = Run(federation.server, 3, "negative_loss", home_rounds=1)
    scores = run.execute()
    client = federation.clients()["A"]
    home, kept = newest(federation, "A")["home"], client.kept()
    assert kept is not None
    assert set(run.records()[2].scores) >= {"personal"}
    assert ("global" in scores["A"]) == algorithm.has_global
    rows = client.score(home, "val", headline=True)
    mean = sum(row["negative_loss"] for row in rows) / len(rows)
    assert run.records()[2].scores["personal"]["A"] == pytest.approx(mean)
    if type(algorithm) is FedAvg:
        assert equal(kept, home)
        assert scores["A"]["personal"] == client.score(home, "test")


def test_global_model_has_the_same_scores_after_every_round_at_home(tmp_path):
    run = Run(ToyFederation(FedAvg(), tmp_path).server, 4, "negative_loss", home_rounds=2)
    run.execute()
    records = run.records()
    assert records[2].scores["global"] == records[1].scores["global"] != records[0].scores["global"]
    assert records[3].scores["global"] == records[1].scores["global"]


def test_home_models_are_deployed_where_the_policy_lets_them_out(tmp_path):
    federation = ToyFederation(FedAvg(), tmp_path).run(2, home_rounds=1)
    assert set(federation.server.deploy()) == {"global"}
    clients = federation.clients()
    shared = EgressPolicy(share=frozenset({"personal"}))
    clients["B"].site = replace(clients["B"].site, policy=shared)
    again = ToyFederation(FedAvg(), tmp_path, lambda _: InProcess(lambda: clients))
    again.server.begin()
    models = again.server.deploy()
    assert set(models) == {"global", "B"}
    assert equal(models["B"], newest(federation, "B")["home"])


def test_what_a_method_does_at_its_end_comes_before_the_rounds_at_home(tmp_path):
    federation = ToyFederation(FineTune(), tmp_path, ShuffledTransport).run(3, home_rounds=2)
    asked = sorted({(r.round, r.exchange, r.method) for r, _ in log(federation)})
    assert asked == [
        (1, 0, "train"),
        (2, 0, "fine_tune"),
        (2, 1, "train_at_home"),
        (3, 0, "train_at_home"),
    ]


@pytest.mark.parametrize(
    ("algorithm", "codecs"), [(FineTune(), Codecs()), (FedBN(), Codecs(up=Half(), down=Half()))]
)
def test_run_that_stops_at_any_write_goes_on_to_the_same_bits(tmp_path, algorithm, codecs):
    recipe = replace(ADAM, optimizer_state="keep")
    options = {"training": recipe, "codecs": codecs}
    whole = ToyFederation(algorithm, tmp_path / "whole", **options)
    writes: list[int] = []
    with after_writes(writes.append):
        whole.run(3, home_rounds=2)

    def stop(number: int, last: int) -> None:
        if number == last:
            raise KeyboardInterrupt

    for last in range(len(writes) // 2, len(writes) + 1):  # before, little is at home
        root = tmp_path / f"{last:03d}"
        with after_writes(partial(stop, last=last)), pytest.raises(KeyboardInterrupt):
            ToyFederation(algorithm, root, **options).run(3, home_rounds=2)
        again = ToyFederation(algorithm, root, **options).run(3, home_rounds=2)
        assert again.states() == whole.states()


@pytest.mark.parametrize("home_rounds", [-1, 3, 4])
def test_a_run_without_a_round_together_is_refused(tmp_path, home_rounds):
    federation = ToyFederation(FedAvg(), tmp_path)
    with pytest.raises(ConfigError, match=f"home_rounds is {home_rounds}, of 3 rounds in all; "):
        federation.run(3, home_rounds=home_rounds)


def test_cosine_falls_over_all_rounds_from_the_first_rate(tmp_path):
    recipe = replace(TRAINING, lr=0.8, schedule="cosine")
    clients = toy_federation(training=recipe).clients(FedAvg(), seed=0, root=tmp_path, rounds=4)
    found = []
    for number in (0, 1, 2, 3, 4, 5):
        clients["A"].round = number
        found.append(clients["A"].lr)
    quarter = math.sqrt(0.5)  # cos(pi / 4)
    expected = [0.8, 0.8, 0.4 * (1 + quarter), 0.4, 0.4 * (1 - quarter), 0.4 * (1 - quarter)]
    assert found == pytest.approx(expected)
