"""A federation whose sites annotate different structures, from the drawing to the tables."""

import csv
import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from collegium import cli

KNOWN = {"alder": ["gland", "kidneys"], "birch": ["liver"], "cedar": ["spleen"]}


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    options = ("--organs", "--sites", "3", "--cases", "8", "--size", "32")
    result = call("phantoms", "data", *options)
    assert result.exit_code == 0, result.output
    return tmp_path / "data"


def test_organs_come_with_an_experiment_for_sites_that_annotate_different_ones(drawn: Path) -> None:
    shown = call("config", "show", "data/experiment.yaml")
    assert shown.exit_code == 0, shown.output
    config = yaml.safe_load(shown.stdout)
    assert [each["name"] for each in config["algorithms"]] == ["local", "fedavg", "condist"]
    sites = config["federation"]["sites"]
    assert {name: site["labelled"] for name, site in sites.items()} == KNOWN


@pytest.mark.slow
def test_sites_that_annotate_different_organs_train_and_have_gaps_in_the_tables(
    drawn: Path,
) -> None:
    inspected = call("inspect", "data/federation.yaml", "--json")
    assert inspected.exit_code == 0, inspected.output
    found = json.loads(inspected.stdout)["sites"]
    assert {site["name"]: site["labelled"] for site in found} == KNOWN
    without = 'federation.outside=["birch"]'
    refused = call("run", "data/experiment.yaml", without, "output=refused")
    assert refused.exit_code == 2
    assert "no site that trains has labelled liver" in refused.output
    settings = ("rounds=2", "algorithms=[fedavg,condist]", "engine.jobs=1", "output=run")
    trained = call(
        "run", "data/experiment.yaml", *settings, "training.local_steps=2", "evaluation.every=1"
    )
    assert trained.exit_code == 0, trained.output
    assert call("tables", "run").exit_code == 0
    for organ in ("gland", "liver", "spleen", "kidneys"):
        with (drawn.parent / "run" / "tables" / f"dice_{organ}.csv").open(newline="") as file:
            rows = {(row["method"], row["column"]): row["mean"] for row in csv.DictReader(file)}
        for method in ("FedAvg global", "ConDistFL global"):
            gaps = {site for site in KNOWN if not rows[method, site]}
            assert gaps == {site for site, names in KNOWN.items() if organ not in names}
            (only,) = KNOWN.keys() - gaps
            assert rows[method, "average"] == rows[method, only]
    with (drawn.parent / "run" / "tables" / "dice.csv").open(newline="") as file:
        rows = {(row["method"], row["column"]): row["mean"] for row in csv.DictReader(file)}
    assert all(0 <= float(rows["ConDistFL global", site]) <= 1 for site in KNOWN)
    text = (drawn.parent / "run" / "tables" / "dice_liver.txt").read_text("utf-8")
    line = next(line for line in text.splitlines() if line.startswith("FedAvg global "))
    assert (line.split()[2], line.split()[4]) == ("\N{EN DASH}",) * 2
