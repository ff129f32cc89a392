import json
import shutil
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.finetune import FineTune
from collegium.algorithms.local import Local
from collegium.core.algorithm import handler
from collegium.core.files import write_atomically
from collegium.core.message import Message
from collegium.runtime import run as module
from collegium.runtime.engines.inprocess import InProcess
from collegium.runtime.records import RoundRecord, choices_of
from collegium.runtime.run import Run
from collegium.runtime.selection import Selection
from collegium.testing.stops import after_writes
from collegium.testing.toy import ToyFederation


@dataclass(frozen=True)
class Scripted(FedAvg):
    """Nothing is trained; the scores of each round are what the class says."""

    script: ClassVar[
        tuple[dict[str, list], ...]
    ] = (  # round by round: the scores of the validation cases of A, B and C
        {"A": [0.5, 0.5], "B": [1.0], "C": []},
        {"A": [0.7, None], "B": [0.9], "C": [None]},
        {"A": [0.9, 0.9], "B": [0.0], "C": []},
        {"A": [None, None], "B": [None], "C": []},
    )

    def round(self, server):
        server.state["model"] = server.state["model"].map(
            lambda t: t + 1 if t.is_floating_point() else t
        )

    @handler
    def evaluate(self, client, request):
        rows = [
            {"case": f"val-c{k:03d}", "patient": f"val-p{k:03d}", "negative_loss": value}
            for k, value in enumerate(self.script[client.round - 1][client.id])
        ]
        return Message.of(scores={"global": rows})


BEST = Selection(min_events=0)


def run_of(federation: ToyFederation, rounds: int = 2, every: int = 1) -> Run:
    return Run(federation.server, rounds, "negative_loss", every, BEST)


def test_global_model_is_selected_by_the_mean_over_all_validation_cases(tmp_path):
    """(0.7 + 0.9) / 2 = 0.8 beats (0.5 + 0.5 + 1) / 3 and (0.9 + 0.9 + 0) / 3."""
    federation = ToyFederation(Scripted(), tmp_path)
    run = run_of(federation, rounds=3)
    run.execute()
    best = run.best()
    assert best is not None
    assert best["round"] == 2
    assert best["score"] == pytest.approx(0.8)
    shift = best["model"]["0.bias"] - federation.server.initial_model["0.bias"]
    assert torch.allclose(shift, torch.full((4,), 2.0))


def test_records_hold_the_mean_of_each_site_and_undefined_ones(tmp_path):
    run = run_of(ToyFederation(Scripted(), tmp_path), rounds=4)
    run.execute()
    found = [record.scores["global"] for record in run.records()]
    assert found[0] == {"A": 0.5, "B": 1.0, "C": None}
    assert found[1] == {"A": 0.7, "B": 0.9, "C": None}
    assert found[3] == {"A": None, "B": None, "C": None}


def test_test_scores_are_those_of_the_selected_model(tmp_path):
    federation = ToyFederation(Scripted(), tmp_path)
    run = run_of(federation, rounds=3)
    scores = run.execute()
    client = federation.clients()["B"]
    best = run.best()
    assert best is not None
    assert scores["B"]["global by federation"] == client.score(best["model"], "test")
    assert [row["case"] for row in scores["B"]["global"]] == [f"test-c00{i}" for i in (1, 2, 3, 4)]


def test_rounds_are_evaluated_every_so_often_and_at_the_end(tmp_path):
    seen: list[RoundRecord] = []
    run_of(ToyFederation(FedAvg(), tmp_path), rounds=5, every=2).execute(seen.append)
    assert [record.round for record in seen] == [1, 2, 3, 4, 5]
    assert [record.round for record in seen if record.scores] == [2, 4, 5]


def test_an_end_that_asks_somebody_is_evaluated_too(tmp_path):
    seen: list[RoundRecord] = []
    run_of(ToyFederation(FineTune(), tmp_path), rounds=2).execute(seen.append)
    assert [record.round for record in seen if record.scores] == [1, 2, 3]


def test_record_of_a_round_counts_what_every_client_did(tmp_path):
    run = run_of(ToyFederation(FedAvg(), tmp_path), rounds=1)
    run.execute()
    (first,) = run.records()
    assert set(first.losses) == set(first.bytes_up) == {"A", "B", "C"}
    assert all(loss is not None and loss > 0 for loss in first.losses.values())
    lines = (tmp_path / "clients/A/ledger.jsonl").read_text().splitlines()
    sent = [json.loads(line) for line in lines]
    assert first.bytes_up["A"] == sum(line["bytes"] for line in sent if line["stage"] == "train")


def test_global_model_is_kept_by_none_without_one(tmp_path):
    run = run_of(ToyFederation(Local(), tmp_path))
    scores = run.execute()
    assert run.best() is None
    assert set(scores["A"]) == {"personal"}


def test_fine_tuned_model_competes_after_the_last_round(tmp_path):
    federation = ToyFederation(FineTune(), tmp_path)
    run = run_of(federation)
    scores = run.execute()
    assert federation.server.round == 3
    assert set(run.records()[0].scores) == {"global"}
    assert set(run.records()[2].scores) == {"global", "personal"}
    assert set(scores["A"]) == {"global", "global by federation", "personal"}


def test_finished_run_is_not_run_again(tmp_path):
    federation = ToyFederation(FedAvg(), tmp_path)
    scores = run_of(federation).execute()

    def nobody():
        raise AssertionError

    again = ToyFederation(FedAvg(), tmp_path, lambda _: InProcess(nobody))
    assert run_of(again).execute() == scores


def test_every_write_may_be_the_last_and_no_record_is_lost(tmp_path):
    """Stopped anywhere and resumed, all records are there, seconds and times of lines aside."""

    def records(run: Run) -> list[dict]:
        return [{**vars(record), "seconds": set(record.seconds)} for record in run.records()]

    whole, stops = tmp_path / "whole", tmp_path / "stops"
    reference = run_of(ToyFederation(FineTune(), whole))
    with after_writes(lambda number: shutil.copytree(whole, stops / str(number))):
        scores = reference.execute()
    assert len(records(reference)) == 3
    for root in stops.iterdir():
        resumed = run_of(ToyFederation(FineTune(), root))
        assert resumed.execute() == scores
        assert records(resumed) == records(reference)


def test_run_file_written_last_says_that_the_run_is_done(tmp_path, monkeypatch):
    written: list[tuple[str, ...]] = []
    original = write_atomically

    def write(path, data):
        records = tmp_path / "server/records.jsonl"
        lines = records.read_text().splitlines() if records.exists() else []
        written.append((path.name, *(sorted(json.loads(line))[0] for line in lines)))
        original(path, data)

    monkeypatch.setattr(module, "write_atomically", write)
    run_of(ToyFederation(FedAvg(), tmp_path), rounds=1).execute()
    assert written == [("ledgers.json",), ("test.json", "bytes_down", "choices", "ended")]


@dataclass(frozen=True)
class Tuned(Scripted):
    """Beside the global model each client has a personal one, with scores of its own."""

    own: ClassVar[dict[str, tuple[float, ...]]] = {
        "A": (0.1, 0.3, 0.2), "B": (0.9, 0.5, 0.7), "C": (0.5, 0.5, 0.2),
    }  # fmt: skip

    def personal_model(self, client, request):
        return request["model"].map(lambda t: t + 100 if t.is_floating_point() else t)

    @handler
    def evaluate(self, client, request):
        reply = super().evaluate(client, request)
        client.keep(self.personal_model(client, request), request["chosen"])
        score = self.own[client.id][client.round - 1]
        row = {"case": "val-c001", "patient": "val-p001", "negative_loss": score}
        return Message.of(scores={**reply["scores"], "personal": [row]})


def chosen(root, rule: Selection) -> tuple[Run, dict[str, dict[str, int]]]:
    """The rounds whose models the sites test, by site and kind, as their weights show."""
    federation = ToyFederation(Tuned(), root)
    run = Run(federation.server, 3, "negative_loss", selection=rule)
    scores = run.execute()
    start = federation.server.initial_model["0.bias"]
    rounds = {}
    for site, client in federation.clients().items():
        personal, common = client.kept(), run.global_model(site)
        assert personal is not None
        assert common is not None
        assert scores[site]["personal"] == client.score(personal, "test")
        assert scores[site]["global"] == client.score(common, "test")
        rounds[site] = {
            "global": round(float((common["0.bias"] - start)[0])),
            "personal": round(float((personal["0.bias"] - start)[0])) - 100,
        }
    return run, rounds


def test_each_site_takes_the_round_of_its_own_cases(tmp_path):
    """Of C, which has no scores of the global model, it is the newest."""
    run, rounds = chosen(tmp_path, BEST)
    assert {site: own["global"] for site, own in rounds.items()} == {"A": 3, "B": 1, "C": 3}
    assert {site: own["personal"] for site, own in rounds.items()} == {"A": 2, "B": 1, "C": 1}
    best = run.best()
    assert best is not None
    assert best["round"] == 2


def test_all_sites_take_the_round_of_the_federation(tmp_path):
    """The means of the personal models are 0.5, 0.433 and 0.367."""
    _, rounds = chosen(tmp_path, Selection(by="federation", min_events=0))
    assert {(own["global"], own["personal"]) for own in rounds.values()} == {(2, 1)}


@pytest.mark.parametrize("rule", [Selection(round="last", min_events=0), Selection(min_events=6)])
def test_the_last_round_is_taken_if_asked_for_or_if_events_are_few(tmp_path, rule):
    _, rounds = chosen(tmp_path, rule)
    assert {(own["global"], own["personal"]) for own in rounds.values()} == {(3, 3)}


@pytest.mark.parametrize("by", ["site", "federation"])
def test_a_run_that_is_stopped_anywhere_chooses_the_same(tmp_path, by):
    whole, stops, rule = tmp_path / "whole", tmp_path / "stops", Selection(by=by, min_events=0)
    with after_writes(lambda number: shutil.copytree(whole, stops / str(number))):
        run, rounds = chosen(whole, rule)
    for root in stops.iterdir():
        resumed, again = chosen(root, rule)
        assert again == rounds
        assert choices_of(resumed.records()) == choices_of(run.records())


def test_records_hold_the_rounds_chosen_so_far(tmp_path):
    run, _ = chosen(tmp_path, BEST)
    found = [
        {site: own["round"] for site, own in record.choices["personal"].items()}
        for record in run.records()
    ]
    assert found == [
        {"A": 1, "B": 1, "C": 1, "": 1}, {"A": 2, "B": 1, "C": 1, "": 1},
        {"A": 2, "B": 1, "C": 1, "": 1},
    ]  # fmt: skip
