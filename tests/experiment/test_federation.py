"""One federation for every command: what `run` trains is what `assess` and `drift` look at."""

import csv
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from typer.testing import CliRunner

from collegium import cli
from collegium.diagnostics.drift.measurement import measure_drift
from collegium.experiment.config.experiment import parse_config
from collegium.experiment.config.registry import ALGORITHMS
from collegium.experiment.federation import OpenedExperiment
from collegium.experiment.runner import run_experiment

LOGGED = '''
"""FedAvg that logs the scaling of the model that it receives."""

from dataclasses import dataclass

from collegium.algorithms.fedavg import FedAvg
from collegium.core.algorithm import Client, handler
from collegium.core.message import Message

RECEIVED = []


@dataclass(frozen=True)
class Logged(FedAvg):
    """FedAvg (https://arxiv.org/abs/1602.05629)."""

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Log and train."""
        RECEIVED.append((client.id, client.round, request["model"]))
        return super().train(client, request)
'''


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An experiment over the tables of three sites, whose columns lie at different places."""
    monkeypatch.setenv("COLLEGIUM_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    for place, site in enumerate(("a", "b", "c")):
        with (tmp_path / f"{site}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["age", "dose", "ill"])
            for row in range(24):
                age = 40 + 10 * place + 5 * rng.normal()
                writer.writerow([f"{age:.2f}", f"{100 * rng.random():.2f}", row % 2])
    return {
        "name": "tables",
        "federation": {
            "name": "tables",
            "root": str(tmp_path),
            "task": {"name": "classification", "classes": ["0", "1"]},
            "table": {"label": "ill", "numeric": ["age", "dose"], "scale": "federation"},
            "sites": {site: {"table": f"{site}.csv"} for site in ("a", "b", "c")},
        },
        "model": {"name": "mlp", "hidden": [4]},
        "training": {"local_steps": 2, "batch_size": 4},
        "algorithms": ["fedavg"],
        "rounds": 2,
        "output": str(tmp_path / "run"),
    }


@pytest.mark.parametrize("own", [{}, {"optimizer": "sgd", "lr": 0.5}])
def test_drift_trains_the_scaled_network_that_run_trains(
    settings: dict[str, Any], tmp_path: Path, own: dict[str, Any]
) -> None:
    code = tmp_path / "logged.py"
    code.write_text(LOGGED)
    logged = {"name": f"{code}:Logged", "training": own}
    config = parse_config({**settings, "algorithms": [logged]})
    received = vars(sys.modules[ALGORITHMS.load(f"{code}:Logged").__module__])["RECEIVED"]
    measure_drift(config, [1, 2])
    of_drift = [*received]
    assert not (tmp_path / "run").exists()
    received.clear()
    run_experiment(config)
    assert [entry[:2] for entry in of_drift] == [(s, r) for r in (1, 2) for s in ("a", "b", "c")]
    assert len(of_drift) == len(received) == 6
    for (_, _, own), (_, _, theirs) in zip(of_drift, received, strict=True):
        assert own.keys() == theirs.keys()
        assert all(torch.equal(own[name], theirs[name]) for name in own)
    shift = received[0][2]["shift"][:2].numpy()
    ages = [float(a) for s in "abc" for a in pd.read_csv(tmp_path / f"{s}.csv")["age"]]
    assert shift[0] == pytest.approx(np.mean(ages), abs=2)  # of the training rows alone


def test_assess_takes_whatever_experiment_run_takes(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(settings))
    done = CliRunner().invoke(cli.app, ["assess", str(path)])
    assert done.exit_code == 0, done.output
    assert "could not answer" not in done.output
    ledgers = [*(tmp_path / "run/assessment").rglob("ledger.jsonl")]
    assert len(ledgers) == 3
    assert not any("feature_sums" in ledger.read_text() for ledger in ledgers)


def test_a_federation_is_opened_once(settings: dict[str, Any]) -> None:
    opened = OpenedExperiment(parse_config(settings))
    (job,) = opened.jobs
    assert opened.federation(job) is opened.federation(job)
    assert opened.federation(job).sites["a"] is opened.variation("").sites["a"]
    assert opened.clients(job)["b"].site is opened.variation("").sites["b"]


def test_a_fold_trains_on_the_sites_that_are_not_left_out(settings: dict[str, Any]) -> None:
    opened = OpenedExperiment(parse_config({**settings, "protocol": "leave-one-site-out"}))
    for job in opened.jobs:
        assert opened.federation(job).names == sorted({"a", "b", "c"} - {job.left_out})
        outside = opened.variation("").sites[job.left_out]
        cases = len(outside.train) + len(outside.val) + len(outside.test)
        assert len(opened.outside(job, job.left_out)) == cases == 24
