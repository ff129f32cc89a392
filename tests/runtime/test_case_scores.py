"""Where scores of single cases stay at a site, the same models are selected, by means."""

import json
from dataclasses import replace
from typing import Any

import pytest

from collegium.algorithms.iopfl import IOPFL
from collegium.core.message import unpack
from collegium.data.site import EgressPolicy
from collegium.runtime.engines.inprocess import InProcess
from collegium.runtime.requests import Request, Response, respond
from collegium.runtime.run import Run
from collegium.runtime.selection import Selection, mean_row, scores_of
from collegium.testing.toy import toy_federation

SEED = 7


class Listening(InProcess):
    """An engine that keeps what the sites send."""

    def __init__(self, build) -> None:
        super().__init__(build)
        self.sent: list[tuple[Request, Response]] = []
        self._made = build()

    def exchange(self, requests):
        for request in requests:
            response = respond(self._made[request.client], request)
            self.sent.append((request, response))
            yield response


def run(tmp_path, *, case_scores: bool):
    federation, algorithm = toy_federation(("A", "B", "C")), IOPFL()
    policy = EgressPolicy(case_scores=case_scores)
    sites = {name: replace(site, policy=policy) for name, site in federation.sites.items()}
    federation = replace(federation, sites=sites)
    engine = Listening(lambda: federation.clients(algorithm, seed=SEED, root=tmp_path))
    server = federation.server(algorithm, engine, seed=SEED, root=tmp_path)
    made = Run(server, 3, "negative_loss", selection=Selection(min_events=0))
    return made, made.execute(), engine


def test_what_is_selected_and_its_means_are_the_same(tmp_path):
    open_run, open_scores, _ = run(tmp_path / "open", case_scores=True)
    closed_run, closed_scores, _ = run(tmp_path / "closed", case_scores=False)
    best = open_run.best(), closed_run.best()
    assert best[0]
    assert best[1]
    assert best[0]["round"] == best[1]["round"]
    assert best[0]["score"] == pytest.approx(best[1]["score"], rel=1e-12)
    for site, kinds in open_scores.items():
        for kind, rows in kinds.items():
            (mean,) = closed_scores[site][kind]
            values = [row["negative_loss"] for row in rows]
            assert mean["negative_loss"] == pytest.approx(sum(values) / len(values), rel=1e-12)
            assert mean["cases"] == len(values)


def test_no_single_case_leaves_and_the_site_keeps_them(tmp_path):
    _, _, engine = run(tmp_path, case_scores=False)
    rows = [
        row
        for request, response in engine.sent
        if request.stage == "evaluate" and request.method in ("evaluate", "test")
        for rows in unpack(response.data)["reply"]["scores"].values()
        for row in rows
    ]
    assert rows
    assert {(row["case"], row["patient"]) for row in rows} == {("mean", "mean")}
    kept = json.loads((tmp_path / "clients" / "B" / "scores-test.json").read_text())
    assert {row["case"] for row in kept["personal"]} != {"mean"}
    assert len(kept["personal"]) == rows[-1]["cases"] or len(kept["personal"]) > 1


def test_undefined_scores_count_for_nothing():
    rows: list[dict[str, Any]] = [
        {"case": "a", "patient": "p", "dice": 0.5},
        {"case": "b", "patient": "q", "dice": None},
    ]
    (mean,) = mean_row(rows, "dice")
    assert mean == {"case": "mean", "patient": "mean", "cases": 1, "events": 1, "dice": 0.5}
    assert scores_of([mean, *rows], "dice") == [0.5, 0.5, None]
    assert mean_row([], "dice") == []
    assert mean_row(rows[1:], "dice") == [
        {"case": "mean", "patient": "mean", "cases": 0, "events": 0, "dice": None}
    ]
    assert scores_of(mean_row(rows[1:], "dice"), "dice") == []
