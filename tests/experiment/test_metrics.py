"""Metrics that an experiment file asks for, from the command line to the tables."""

import json
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pandas as pd
import pytest
from scipy import ndimage
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


def run(folder: Path, text: str) -> Path:
    """Run an experiment whose data lie in a folder; return its output folder."""
    text = text.format(root=json.dumps(str(folder)), output=json.dumps(str(folder / "run")))
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
