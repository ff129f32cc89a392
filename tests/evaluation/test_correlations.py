"""Distances of sites against scores, over the runs of several federations."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from collegium import cli
from collegium.data.phantoms import make_federation
from collegium.errors import ConfigError, DataError
from collegium.evaluation.correlations import correlate_runs
from collegium.evaluation.results import results_frame, write_results

Make = Callable[..., Path]


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


@pytest.fixture
def run(tmp_path: Path, scores: Any) -> Make:
    """Writes a run of sites A, B and C with one distance each, and scores of two methods."""

    def make(name: str, distances: tuple[float, float, float], dice: Any, **changes: Any) -> Path:
        folder = tmp_path / name
        ab, ac, bc = distances
        geometry = {
            "key": "metadata",
            "sites": ["A", "B", "C"],
            "matrix": [[0, ab, ac], [ab, 0, bc], [ac, bc, 0]],
        }
        findings = {"labels": [{"unit": "mL"}], "geometries": [geometry]}
        content = {"federation": name, "sites": ["A", "B", "C"], "findings": findings, **changes}
        (folder / "assessment").mkdir(parents=True)
        (folder / "assessment" / "assessment.json").write_text(json.dumps(content))
        rows: list[Any] = []
        for algorithm, values in dice.items():
            for site, value in zip("ABC", values, strict=True):
                rows += scores(algorithm, "global", site, [value - 0.05, value + 0.05])
        write_results(results_frame(rows), folder)
        return folder

    return make


def four(run: Make) -> list[Path]:
    return [
        run("one", (1, 2, 3), {"fedavg": (0.9, 0.8, 0.7), "ditto": (0.80, 0.80, 0.80)}),
        run("two", (3, 3, 6), {"fedavg": (0.7, 0.7, 0.7), "ditto": (0.80, 0.80, 0.80)}),
        run("three", (9, 9, 9), {"fedavg": (0.6, 0.6, 0.6), "ditto": (0.80, 0.80, 0.80)}),
        run("four", (0, 0, 3), {"fedavg": (0.75, 0.75, 0.6)}),
    ]


def test_the_table_and_its_correlations_are_those_by_hand(run: Make) -> None:
    """Mean distances 2, 4, 9, 1 and scores .8, .7, .6, .7; ranks 2 3 4 1 against 4 2.5 1 2.5."""
    found = correlate_runs(four(run))
    assert found.rows["federation"].tolist() == ["one", "two", "three", "four"]
    assert found.rows["EMD_max"].tolist() == [2, 4, 9, 1]
    assert found.rows["FedAvg global"].tolist() == pytest.approx([0.8, 0.7, 0.6, 0.7])
    ditto, fedavg = found.correlations
    assert fedavg.federations == 4
    expected = np.corrcoef([2, 4, 9, 1], [0.8, 0.7, 0.6, 0.7])[0, 1]
    assert fedavg.pearson == pytest.approx(expected)
    ranks = np.corrcoef([2, 3, 4, 1], [4, 2.5, 1, 2.5])[0, 1]
    assert fedavg.spearman == pytest.approx(ranks)
    assert (ditto.pearson, ditto.federations) == (None, 3)
    assert str(ditto) == ("Ditto global: no correlation, as all distances or all scores are equal.")


def test_two_federations_have_no_correlation_and_it_is_said(run: Make) -> None:
    made = call("correlate", *four(run)[:2])
    assert made.exit_code == 0, made.output
    said = (
        "FedAvg global: no correlation, which takes 3 federations or more with a score, and there "
        "are 2."
    )
    assert said in made.stdout
    assert "Pearson" not in made.stdout


def test_the_command_prints_and_writes_the_table(run: Make, tmp_path: Path) -> None:
    runs = four(run)
    made = call("correlate", *runs, "--output", tmp_path / "table.csv")
    assert made.exit_code == 0, made.output
    lines = made.stdout.splitlines()
    assert lines[0].split() == [
        "federation", "sites", "EMD_max", "Ditto", "global", "dice", "FedAvg", "global", "dice",
    ]  # fmt: skip
    assert lines[1].split() == ["one", "3", "2", "0.8", "0.8"]
    assert lines[4].split() == ["four", "3", "1", "0.7"]
    assert lines[6].startswith("FedAvg global: Pearson -0.8")
    assert lines[6].endswith("over 4 federations.")
    with (tmp_path / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["federation"] for row in rows] == ["one", "two", "three", "four"]
    assert rows[3]["Ditto global"] == ""
    data = json.loads(call("correlate", *runs, "--json").stdout)
    assert data["federations"][3]["Ditto global"] is None
    assert data["correlations"][1]["federations"] == 4


def test_what_cannot_be_compared_is_said(run: Make, tmp_path: Path) -> None:
    one, two, *_ = four(run)
    short = {"key": "metadata", "sites": ["A", "B"], "matrix": [[0, 5], [5, 0]]}
    findings = {"labels": [{"unit": "voxels"}], "geometries": [short]}
    other = run("other", (1, 1, 1), {"fedavg": (0.5, 0.5, 0.5)}, findings=findings)
    found = correlate_runs([one, two, other])
    assert found.rows["EMD_max"].tolist() == [2, 4, 5]
    assert found.notes[0] == "The distance of other is without C."
    assert "measure labels in different units" in found.notes[1]
    with pytest.raises(ConfigError, match="a run is given twice"):
        correlate_runs([one, one])
    with pytest.raises(DataError, match="holds no distances by embeddings"):
        correlate_runs([one], by="embeddings")
    with pytest.raises(DataError, match="holds no accuracy of test cases inside"):
        correlate_runs([one], "accuracy")
    (two / "assessment" / "assessment.json").unlink()
    with pytest.raises(DataError, match=r"two has no assessment.assessment\.json; assess its"):
        correlate_runs([one, two])


@pytest.mark.slow
def test_three_federations_are_assessed_run_and_correlated(tmp_path: Path) -> None:
    runs = []
    for sites in (2, 3, 4):
        federation = make_federation(tmp_path / str(sites), sites, cases=8, size=32)
        output, file = tmp_path / f"run-{sites}", tmp_path / f"{sites}.yaml"
        file.write_text(
            f"name: e{sites}\nfederation: {federation}\n"
            "model: {name: unet, in_channels: 1, channels: [4, 8], num_res_units: 0}\n"
            f"algorithm: fedavg\nrounds: 1\noutput: {output}\n"
        )
        for command in ("assess", "run"):
            made = call(command, file)
            assert made.exit_code == 0, made.output
        runs.append(output)
    made = call("correlate", *runs)
    assert made.exit_code == 0, made.output
    assert "over 3 federations." in made.stdout
