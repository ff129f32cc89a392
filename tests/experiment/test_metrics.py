"""Metrics that an experiment file asks for, from the command line to the tables."""

import json
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pandas as pd
import pytest
from PIL import Image
from scipy import ndimage
from sklearn.calibration import calibration_curve
from typer.testing import CliRunner

from collegium import cli
from collegium.evaluation.results import read_results
from collegium.evaluation.scores import final_scores

nib: Any = nibabel

SEGMENTATION = """
name: blobs
seeds: [0]
federation:
  name: blobs
  root: {root}
  sites:
    north: {{manifest: north/m.csv}}
    south: {{manifest: south/m.csv}}
  task:
    name: segmentation
    classes: [background, organ, lesion]
    metric: label_iou
    metrics: [micro_iou, surface_dice, assd, volume_difference, relative_volume_difference,
              lesion_sensitivity, lesion_false_positives]
    surface_tolerance: {{organ: 3.0, lesion: 1.0}}
    lesion_overlap: 0.1
model: {{name: unet, spatial_dims: 3, in_channels: 1, out_channels: 3, channels: [4, 8]}}
training: {{batch_size: 2, local_steps: 5, lr: 0.01}}
rounds: 2
algorithms: [local, fedavg]
output: {output}
"""


CLASSIFICATION = """
name: dots
seeds: [0]
federation:
  name: dots
  root: {root}
  sites:
    north: {{manifest: north/m.csv}}
    south: {{manifest: south/m.csv{policy}}}
    east: {{manifest: east/m.csv}}
  outside: [east]
  task:
    name: classification
    classes: [well, ill]
    metric: auc
    metrics: [sensitivity, specificity, ppv, npv, ece]
    prevalence: 0.05
    calibration_bins: 5
  image: {{inputs: 1}}
model: {{name: densenet, growth: 2, blocks: [1], init_features: 4}}
training: {{batch_size: 4, local_epochs: 1, lr: 0.05}}
rounds: 2
algorithms: [local, {{name: fedavg, adapters: [none]}}]
output: {output}
"""


def call(*arguments: object) -> str:
    done = CliRunner().invoke(cli.app, [*map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.output


def draw_volumes(folder: Path, seed: int) -> None:
    """Write volumes of 8 patients with a bright organ and, in some, brighter lesions."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    lines = ["image;label;patient;split"]
    for number in range(8):
        smooth = ndimage.gaussian_filter(rng.random((16, 12, 8)), 3)
        label = (smooth > np.median(smooth)).astype(np.uint8)
        if number % 2:
            label[ndimage.gaussian_filter(rng.random(label.shape), 1) > 0.62] = 2
        pixels = (60 * label + rng.normal(0, 10, label.shape)).astype(np.float32)
        for name, array in (("i", pixels), ("l", label)):
            nib.save(
                nib.Nifti1Image(array, np.diag([0.8, 1.2, 3.0, 1])), folder / f"{name}{number}.nii"
            )
        split = ("train", "train", "train", "train", "val", "val", "test", "test")[number]
        lines.append(f"i{number}.nii;l{number}.nii;p{number};{split}")
    (folder / "m.csv").write_text("\n".join(lines) + "\n")


def draw_pictures(folder: Path, seed: int) -> None:
    """Write pictures of 24 patients, brighter where they are ill."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    lines = ["image;class;patient;split"]
    for number in range(24):
        ill = bool(rng.random() < 0.5) if number > 5 else number % 2 == 0
        pixels = rng.normal(80, 25, (10, 10)) + rng.normal(25, 15) * ill
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{number}.png")
        split = ("train", "val", "test")[number // 2 % 3]
        lines.append(f"{number}.png;{'ill' if ill else 'well'};p{number};{split}")
    (folder / "m.csv").write_text("\n".join(lines) + "\n")


def run(folder: Path, text: str, **more: str) -> Path:
    """Run an experiment whose data lie in a folder; return its output folder."""
    places = {"root": json.dumps(str(folder)), "output": json.dumps(str(folder / "run"))}
    text = text.format(**places, **more)
    (folder / "x.yaml").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLLEGIUM_CACHE", str(folder / "cache"))
        call("run", folder / "x.yaml")
    return folder / "run"


def test_further_metrics_of_a_segmentation_have_tables_and_the_headline_selects(
    tmp_path: Path,
) -> None:
    for number, site in enumerate(("north", "south")):
        draw_volumes(tmp_path / site, number)
    output = run(tmp_path, SEGMENTATION)
    results = read_results(output)
    assert set(results[results["split"] == "val"]["metric"]) == {"label_iou"}
    scores = final_scores(results)
    values = scores.groupby("metric")["value"]
    of_structures = ["surface_dice", "assd", "volume_difference", "relative_volume_difference",
                     "lesion_sensitivity", "lesion_false_positives"]  # fmt: skip
    apart = [f"{m}_{s}" for m in of_structures for s in ("organ", "lesion")]
    assert {"label_iou", "micro_iou", "dice", *of_structures, *apart} <= set(values.groups)
    assert values.max()["volume_difference_organ"] != 0
    # lesions are drawn in patients with odd numbers: one of the two tested at each site
    assert values.count()["lesion_sensitivity_lesion"] == len(values.get_group("dice")) / 2
    assert values.count()["lesion_false_positives"] == len(values.get_group("dice"))
    assert set(scores[scores["metric"] == "volume_difference"]["unit"]) == {"ml"}
    tables = {path.stem for path in (output / "tables").iterdir()}
    assert {"surface_dice", "surface_dice-joining", "assd_lesion-joining", "label_iou"} <= tables
    assert "volume_difference" in tables
    assert "volume_difference-joining" not in tables
    page = (output / "report.html").read_text()
    assert "Label IoU, higher is better" in page
    assert "Volume difference (ml).</caption>" in page
    said = call("tables", output)
    assert "surface_dice" in said
    frame = pd.read_csv(output / "tables" / "relative_volume_difference.csv")
    assert set(frame["rank"]) == {0}


def of_one(results: pd.DataFrame, metric: str, **where: str) -> pd.Series:
    """The values of a metric by case, of one model."""
    rows = results[results["metric"] == metric]
    for column, value in where.items():
        rows = rows[rows[column] == value]
    return rows.set_index("case")["value"]


def test_decisions_and_calibration_of_a_classification_have_tables(tmp_path: Path) -> None:
    for number, site in enumerate(("north", "south", "east")):
        draw_pictures(tmp_path / site, number)
    output = run(tmp_path, CLASSIFICATION, policy="")
    results = read_results(output)
    about = {"site": "north", "algorithm": "fedavg", "model": "global", "split": "test"}
    chance, ill = of_one(results, "_p1", **about), of_one(results, "_class", **about) == 1
    (threshold,) = of_one(results, "threshold", **about).unique()
    sensitivity = of_one(results, "sensitivity", **about)
    specificity = of_one(results, "specificity", **about)
    assert sensitivity.to_dict() == (chance[ill] >= threshold).astype(float).to_dict()
    assert specificity.to_dict() == (chance[~ill] < threshold).astype(float).to_dict()
    assert 0 < len(sensitivity) < len(chance)
    assert threshold not in chance.tolist()  # it is a validation case's
    hit, alarm = 0.05 * sensitivity.mean(), 0.95 * (1 - specificity.mean())
    ppv = of_one(results, "ppv", **about).unique()
    assert ppv == pytest.approx([hit / (hit + alarm)] if hit + alarm else [np.nan], nan_ok=True)

    bins = pd.read_csv(output / "tables" / "reliability.csv")
    north = bins[(bins["site"] == "north") & (bins["algorithm"] == "fedavg")]
    north = north[north["model"] == "global"]
    observed, confidence = calibration_curve(ill, chance, n_bins=5)
    assert north["observed"].tolist() == pytest.approx(observed.tolist())
    assert north["confidence"].tolist() == pytest.approx(confidence.tolist())
    assert set(bins["class"]) == {"ill"}
    assert set(bins["where"]) == {"inside", "outside"}
    error = (north["share"] * abs(north["confidence"] - north["observed"])).sum()
    assert of_one(results, "ece", **about).mean() == pytest.approx(error)

    # a site outside has no validation cases, hence no threshold; its calibration is known
    east = {"site": "east", "split": "outside", "model": "none"}
    assert of_one(results, "sensitivity", **east).isna().all()
    assert of_one(results, "threshold", **east).isna().all()
    assert of_one(results, "ece", **east).notna().all()
    tables = {path.stem for path in (output / "tables").iterdir()}
    assert {
        "sensitivity-joining",
        "specificity-joining",
        "ece-joining",
        "threshold",
        "ppv",
    } <= tables
    assert tables.isdisjoint({"threshold-joining", "ppv-joining", "npv-joining"})
    verdicts = json.loads((output / "tables" / "verdicts.json").read_text())
    said = [
        entry["sentence"] for entry in verdicts if "sensitivity" in json.dumps(entry["verdict"])
    ]
    assert any("with class ill" in sentence for sentence in said)


def test_a_site_that_keeps_its_cases_sends_means_and_no_bins(tmp_path: Path) -> None:
    for number, site in enumerate(("north", "south", "east")):
        draw_pictures(tmp_path / site, number)
    output = run(tmp_path, CLASSIFICATION, policy=", case_scores: false")
    results = read_results(output)
    about = {"site": "south", "algorithm": "fedavg", "model": "global", "split": "test"}
    kept = json.loads(
        next((output).rglob("clients/south/scores-test.json")).read_text()
    )["global"]  # fmt: skip
    for metric in ("sensitivity", "specificity", "threshold", "ece"):
        (value,) = of_one(results, metric, **about)
        assert value == pytest.approx(np.mean([row[metric] for row in kept if metric in row]))
    assert "south" not in set(pd.read_csv(output / "tables" / "reliability.csv")["site"])
