"""Runs that end since validation scores no longer improve."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import nn

from collegium.algorithms.ditto import Ditto
from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.finetune import FineTune
from collegium.core.algorithm import Algorithm
from collegium.core.dataset import ConcatDataset
from collegium.errors import CheckpointError, ConfigError
from collegium.runtime.early_stopping import EarlyStopping
from collegium.runtime.engines.inprocess import InProcess
from collegium.runtime.participation import Participation
from collegium.runtime.records import stopped_at
from collegium.runtime.run import Run
from collegium.runtime.selection import Selection
from collegium.runtime.simulation import simulate
from collegium.tasks import SupervisedTask
from collegium.testing.stops import after_writes
from collegium.testing.toy import TRAINING, ToyFederation, toy_federation, toy_network, toy_site

ALWAYS = EarlyStopping(patience=2, min_delta=1e9)
"""No score improves by so much: the third evaluation ends every run."""

FEDAVG = FedAvg()


def run(
    root: Path,
    rounds: int,
    algorithm: Algorithm = FEDAVG,
    rule: EarlyStopping | None = None,
    *,
    every: int = 1,
    **settings: Any,
) -> tuple[ToyFederation, Run]:
    """Run toy sites from wherever the folder stands; the selection is the best round."""
    federation = ToyFederation(algorithm, root, training=TRAINING)
    settings = {"selection": Selection(min_events=1), **settings}
    made = Run(
        federation.server, rounds, "negative_loss", every, early_stopping=rule, **settings
    )  # fmt: skip
    made.execute()
    return federation, made


@pytest.mark.parametrize(
    ("patience", "min_delta", "scores", "ends_at"),
    [
        (1, 0.0, [0.5, 0.6, 0.6], 3),
        (1, 0.0, [0.5, 0.4], 2),
        (2, 0.0, [0.5, 0.4, 0.6, 0.6, 0.5], 5),
        (2, 0.0, [0.5, 0.6, 0.7, 0.8], None),
        (2, 0.25, [0.5, 0.625, 0.75], 3),  # 0.75 is higher by 0.25 and no more
        (2, 0.25, [0.5, 0.625, 0.875, 1.0, 1.125], 5),  # 0.875 improves on 0.5, the last one
        (2, 0.0, [None, None, None, 0.5, None, 0.4, None, 0.3], 8),
        (3, 0.0, [-3.0, -2.0, -4.0, -5.0, -6.0], 5),
    ],
)
def test_a_run_ends_after_evaluations_in_a_row_without_an_improvement(
    patience, min_delta, scores, ends_at
):
    rule = EarlyStopping(patience, min_delta)
    ends = [rule.ends(scores[:count]) for count in range(1, len(scores) + 1)]
    assert next((n for n, end in enumerate(ends, start=1) if end), None) == ends_at


@pytest.mark.parametrize("algorithm", [FedAvg(), Ditto(), FineTune()])
def test_a_stopped_run_has_the_bits_of_one_with_so_many_rounds(tmp_path, algorithm):
    federation, stopped = run(tmp_path / "stopped", 9, algorithm, ALWAYS)
    planned, whole = run(tmp_path / "planned", 3, algorithm)
    assert federation.states() == planned.states()
    assert stopped.last == 3
    records = stopped.records()
    assert stopped_at(records) == 3
    assert [record.round for record in records if record.stopped] == [3]
    assert stopped_at(whole.records()) is None
    assert records[-1].round == (4 if isinstance(algorithm, FineTune) else 3)


@pytest.mark.parametrize("algorithm", [FedAvg(), Ditto(), FineTune()])
def test_rounds_at_home_follow_where_a_run_is_stopped(tmp_path, algorithm):
    federation, stopped = run(tmp_path / "stopped", 12, algorithm, ALWAYS, home_rounds=2)
    planned, _ = run(tmp_path / "planned", 5, algorithm, home_rounds=2)
    assert federation.states() == planned.states()
    assert (stopped.last, stopped_at(stopped.records())) == (5, 3)
    assert stopped.records()[-1].round == 5
    assert "personal" in stopped.records()[-1].scores


def test_patience_counts_evaluations(tmp_path):
    _, stopped = run(tmp_path, 11, rule=ALWAYS, every=3)
    assert stopped_at(stopped.records()) == stopped.last == 9


def test_the_last_round_together_ends_no_run_early(tmp_path):
    _, stopped = run(tmp_path, 5, rule=ALWAYS, home_rounds=2)
    assert (stopped.last, stopped_at(stopped.records())) == (5, None)


@pytest.mark.parametrize(
    ("algorithm", "kind", "delta"), [(FedAvg(), "global", 0.05), (Ditto(), "personal", 0.5)]
)
def test_the_score_is_the_one_by_which_the_federation_selects(tmp_path, algorithm, kind, delta):
    """The mean over all validation cases, of which every toy site has four."""
    selection = Selection(by="federation", min_events=1)
    _, whole = run(tmp_path / "whole", 12, algorithm, selection=selection)
    means = [fmean(map(float, r.scores[kind].values())) for r in whole.records() if r.scores]  # type: ignore[arg-type]
    best, waited, expected = means[0], 0, 0
    for number, mean in enumerate(means[1:], start=2):
        if mean - best > delta:
            best, waited = mean, 0
        else:
            waited += 1
        if waited == 2:
            expected = number
            break
    assert 3 < expected < 12
    _, stopped = run(tmp_path / "stopped", 12, algorithm, EarlyStopping(2, delta))
    assert stopped.last == expected


def test_smoothed_scores_count_from_the_third_evaluation_on(tmp_path):
    selection = Selection(round="smoothed", min_events=1)
    _, stopped = run(tmp_path, 12, rule=ALWAYS, selection=selection)
    assert stopped.last == 5  # the means of rounds 1-3, 2-4 and 3-5


@pytest.mark.parametrize("home_rounds", [0, 1])
def test_run_that_stops_at_any_write_continues_to_the_same_bits(tmp_path, home_rounds):
    rule = replace(ALWAYS, patience=1)
    go = partial(run, rounds=7, algorithm=FineTune(), rule=rule, home_rounds=home_rounds)
    writes: list[int] = []
    with after_writes(writes.append):
        whole, made = go(tmp_path / "whole")
    assert made.last == 2 + home_rounds

    def stop(number: int, last: int) -> None:
        if number == last:
            raise KeyboardInterrupt

    for last in range(len(writes) // 2, len(writes) + 1, 2):  # before, nothing is decided
        root = tmp_path / f"{last:03d}"
        with after_writes(partial(stop, last=last)), pytest.raises(KeyboardInterrupt):
            go(root)
        again, resumed = go(root)
        assert again.states() == whole.states()
        assert stopped_at(resumed.records()) == 2


def without_validation() -> dict[str, Any]:
    nothing: ConcatDataset = ConcatDataset([])
    return {name: replace(toy_site(name), val=nothing) for name in "ABC"}


def test_a_federation_without_validation_cases_is_refused(tmp_path):
    says = r"early_stopping needs validation cases, and no site that trains has any; give them some"
    federation = replace(toy_federation(), sites=without_validation())
    clients = federation.clients(FedAvg(), seed=0, root=tmp_path, rounds=3)
    made = federation.run(
        FedAvg(),
        InProcess(lambda: clients),
        rounds=3,
        seed=0,
        root=tmp_path,
        early_stopping=ALWAYS,
    )
    with pytest.raises(ConfigError, match=says):
        made.execute()
    with pytest.raises(ConfigError, match=says):
        simulated(sites=list(without_validation().values()))


def test_an_evaluation_without_the_sites_that_have_validation_cases_is_passed_over(tmp_path):
    sites = without_validation() | {"A": toy_site("A")}
    federation = replace(toy_federation(), sites=sites)
    clients = federation.clients(FedAvg(), seed=0, root=tmp_path, rounds=9)
    made = federation.run(
        FedAvg(),
        InProcess(lambda: clients),
        rounds=9,
        seed=0,
        root=tmp_path,
        participation=Participation(absent={"A": (2,)}),
        early_stopping=ALWAYS,
    )
    made.execute()
    assert made.last == 4


def simulated(**options: Any) -> Any:
    sites = options.pop("sites", [toy_site(name) for name in "ABC"])
    options = {"rounds": 8, "training": TRAINING, "early_stopping": ALWAYS, **options}
    return simulate(FedAvg(), sites, toy_network, SupervisedTask(nn.functional.mse_loss), **options)


def test_a_simulation_is_stopped_and_its_folder_belongs_to_its_rule(tmp_path):
    found = simulated(output=tmp_path)
    assert stopped_at(found.records) == 3
    planned = simulated(rounds=3, early_stopping=None)
    assert found.scores == planned.scores
    assert all(torch.equal(found.model[name], planned.model[name]) for name in planned.model)
    with pytest.raises(CheckpointError, match=r"other settings \(early_stopping\)"):
        simulated(output=tmp_path, early_stopping=EarlyStopping(1))
