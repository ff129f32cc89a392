"""A federation whose sites annotate different structures, from the drawing to the tables."""

import csv
import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from collegium import cli

KNOWN = {"alder": "gland", "birch": "liver", "cedar": "spleen", "elm": "kidneys", "hazel": "gland"}
OUTSIDE = "hazel"


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


def labelled() -> dict[str, list[str]]:
    return {site: [organ] for site, organ in KNOWN.items()}


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    options = ("--organs", "--sites", "5", "--cases", "8", "--size", "32")
    result = call("phantoms", "data", *options)
    assert result.exit_code == 0, result.output
    return tmp_path / "data"


def test_organs_come_with_an_experiment_for_sites_that_annotate_different_ones(drawn: Path) -> None:
    shown = call("config", "show", "data/experiment.yaml")
    assert shown.exit_code == 0, shown.output
    config = yaml.safe_load(shown.stdout)
    assert [each["name"] for each in config["algorithms"]] == ["local", "fedavg", "condist"]
    sites = config["federation"]["sites"]
    assert {name: site["labelled"] for name, site in sites.items()} == labelled()


@pytest.mark.slow
def test_sites_that_annotate_different_organs_train_and_have_gaps_in_the_tables(
    drawn: Path,
) -> None:
    inspected = call("inspect", "data/federation.yaml", "--json")
    assert inspected.exit_code == 0, inspected.output
    found = json.loads(inspected.stdout)["sites"]
    assert {site["name"]: site["labelled"] for site in found} == labelled()
    without = f'federation.outside=["birch","{OUTSIDE}"]'
    refused = call("run", "data/experiment.yaml", without, "output=refused")
    assert refused.exit_code == 2
    assert "no site that trains has labelled liver" in refused.output
    settings = (
        f'federation.outside=["{OUTSIDE}"]', "algorithms=[fedavg,condist]", "adapters=[none]",
        "rounds=2", "training.local_steps=2", "evaluation.every=1", "engine.jobs=1", "output=run",
    )  # fmt: skip
    trained = call("run", "data/experiment.yaml", *settings)
    assert trained.exit_code == 0, trained.output
    assert call("tables", "run").exit_code == 0
    methods, inside = ("FedAvg global", "ConDistFL global"), KNOWN.keys() - {OUTSIDE}
    for organ in ("gland", "liver", "spleen", "kidneys"):
        with (drawn.parent / "run" / "tables" / f"dice_{organ}.csv").open(newline="") as file:
            rows = {(row["method"], row["column"]): row["mean"] for row in csv.DictReader(file)}
        for method in methods:
            (only,) = {site for site in inside if rows[method, site]}
            assert KNOWN[only] == organ
            assert rows[method, "average"] == rows[method, only]
    with (drawn.parent / "run" / "tables" / "dice.csv").open(newline="") as file:
        rows = {(row["method"], row["column"]): row["mean"] for row in csv.DictReader(file)}
    assert all(0 <= float(rows[method, site]) <= 1 for method in methods for site in inside)
    with (drawn.parent / "run" / "results.csv").open(newline="") as file:
        scored = [row for row in csv.DictReader(file) if row["split"] == "outside" and row["case"]]
    assert {row["site"] for row in scored} == {OUTSIDE}
    given = {row["metric"] for row in scored if row["value"]}
    assert "dice_gland" in given
    assert {row["metric"] for row in scored if not row["value"]} >= {"dice_liver", "dice_spleen"}
    assert not {"dice_liver", "dice_spleen", "dice_kidneys"} & given
