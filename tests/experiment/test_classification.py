"""A classification of images from the command line: run, report, tables, sites outside."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import roc_auc_score
from typer.testing import CliRunner

from collegium import cli
from collegium.evaluation.comparisons import adapting_table, joining_table
from collegium.evaluation.scores import rows_of
from collegium.experiment.runner import collect_rows, read_run_config

CONFIG = """
name: dots
seeds: [0, 1]
federation:
  name: dots
  root: {root}
  sites:
    north: {{manifest: north/m.csv, share: [personal]}}
    south: {{manifest: south/m.csv, share: [personal]}}
    east: {{manifest: east/m.csv}}
  outside: [east]
  task: {{name: classification, classes: [well, ill], metric: auc}}
  image: {{inputs: 1}}
model: {{name: densenet, growth: 2, blocks: [1], init_features: 4}}
training: {{batch_size: 4, local_epochs: 1, lr: 0.05}}
rounds: 2
algorithms: [local, fedavg, {{name: iopfl, adapters: [none, average]}}]
output: {output}
"""


def draw(folder: Path, seed: int) -> None:
    """Write pictures of 15 patients, two each, with bright spots where they are ill."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    lines = ["image;class;patient;split"]
    for number in range(30):
        patient, ill = number // 2, number // 2 % 3 == 0
        pixels = rng.normal(80, 25, (10, 10)) + (40 * ill)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{number}.png")
        split = ("train", "val", "test")[min(patient // 3 % 5, 2)]
        lines.append(f"{number}.png;{'ill' if ill else 'well'};p{patient};{split}")
    (folder / "m.csv").write_text("\n".join(lines) + "\n")


def call(*arguments: object) -> str:
    done = CliRunner().invoke(cli.app, [*map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("dots")
    for number, site in enumerate(("north", "south", "east")):
        draw(folder / site, number)
    text = CONFIG.format(root=json.dumps(str(folder)), output=json.dumps(str(folder / "run")))
    (folder / "dots.yaml").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLLEGIUM_CACHE", str(folder / "cache"))
        call("run", folder / "dots.yaml")
        yield folder / "run"


def test_every_case_has_every_score(output: Path) -> None:
    every = [row for row in rows_of(collect_rows(read_run_config(output))) if row.case]
    rows = [row for row in every if not row.metric.startswith("_")]
    metrics = {"accuracy", "balanced_accuracy", "auc", "log_loss", "brier"}
    cases = {(r.algorithm, r.seed, r.site, r.split, r.model, r.case) for r in rows}
    assert {row.metric for row in rows} == metrics
    assert len(rows) == len(cases) * len(metrics)
    assert {row.model for row in rows if row.split == "outside"} == {"none", "average"}
    assert not any(row.unit for row in rows)
    hidden = {(r.model, r.metric) for r in every if r.split == "outside"} - {
        (r.model, r.metric) for r in rows
    }
    # two personal models were averaged: their probabilities stand one by one
    assert hidden == {
        ("none", "_class"), ("none", "_p0"), ("none", "_p1"), ("average", "_class"),
        *(("average", f"_p{c}_{model}") for c in (0, 1) for model in (0, 1)),
    }  # fmt: skip


def test_few_patients_of_a_class_are_told_and_leave_no_interval(output: Path) -> None:
    results = collect_rows(read_run_config(output))
    joining = joining_table(results, "auc")
    assert {c.verdict.fewest for c in joining.by_site} == {3}
    assert {c.verdict.outcome for c in joining.by_site} == {"cannot tell"}
    (outside,) = adapting_table(results, "auc").by_site
    assert outside.verdict.sentence.startswith(
        "Cannot tell: 5 test patients with class 1; at least 6 are needed."
    )
    assert joining_table(results, "accuracy").by_site[0].verdict.low is not None


def test_models_are_selected_by_the_metric_that_is_asked_for(output: Path) -> None:
    results = collect_rows(read_run_config(output))
    assert set(results[results["split"] == "val"]["metric"]) == {"auc"}


def test_the_report_and_the_tables_show_the_same_means(output: Path) -> None:
    page = (output / "report.html").read_text()
    assert "<h1" in page
    assert "AUC" in page
    assert not re.search(r"\b(Dice|mask|segmentation)s?\b", re.sub(r"<style.*?</style>", "", page,
                                                                   flags=re.S))  # fmt: skip
    said = call("tables", output)
    files = {path.name for path in (output / "tables").iterdir()}
    assert {"auc.md", "accuracy.csv", "log_loss.tex", "balanced_accuracy.txt"} <= files
    assert "auc" in said.lower()


def test_outside_and_inside_predictions_give_the_area_by_scikit_learn(
    output: Path, tmp_path: Path
) -> None:
    call("predict", output, output.parent / "east/m.csv", "--algorithm", "iopfl", "--seed", 1,
         "--output", tmp_path / "out")  # fmt: skip
    lines = (tmp_path / "out/predictions.csv").read_text().splitlines()[1:]
    chance = {line.split(",")[0]: float(line.split(",")[3]) for line in lines}
    truth = [int(name) // 2 % 3 == 0 for name in chance]
    expected = roc_auc_score(truth, [*chance.values()])
    found = [
        row.value
        for row in rows_of(collect_rows(read_run_config(output)))
        if (row.algorithm, row.seed, row.split, row.model, row.metric)
        == ("iopfl", 1, "outside", "none", "auc")
    ]
    assert len(found) == 30
    assert np.mean([value for value in found if value is not None]) == pytest.approx(
        expected, abs=1e-3
    )
