import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from collegium.algorithms.resfim import ResFIM
from collegium.core.dataset import Batch, Example
from collegium.evaluation.report.overlays import read_index
from collegium.experiment.config.experiment import parse_config
from collegium.experiment.grid import jobs_of
from collegium.experiment.job_results import (
    PackedPredictions,
    job_rows,
    plane_of,
    write_outside_overlays,
)
from collegium.runtime.run import Run
from collegium.testing.toy import ToyFederation

CONFIG = {
    "name": "toy",
    "federation": {"name": "toy", "root": ".", "sites": {name: {"folder": name} for name in "ABC"}},
    "model": {"name": "unet"},
    "algorithms": ["resfim"],
    "rounds": 2,
}


def test_numbers_that_clients_tell_of_a_round_become_rows(tmp_path: Path) -> None:
    federation = ToyFederation(ResFIM(delta=50), tmp_path).run(2)
    records = Run(federation.server, 2, "negative_loss").records()
    rows = [
        row
        for row in job_rows(jobs_of(parse_config(CONFIG))[0], records, {})
        if row["metric"].startswith("masking_rates/")
    ]
    tensors = ("0.weight", "0.bias", "1.weight", "1.bias", "4.weight", "4.bias")
    assert {row["metric"] for row in rows} == {f"masking_rates/{name}" for name in tensors}
    assert {(row["site"], row["round"]) for row in rows} == {(s, t) for s in "ABC" for t in (1, 2)}
    assert {row["split"] for row in rows} == {"train"}
    assert not any(row.get("model") or row.get("case") for row in rows)
    sizes = dict(zip(tensors, (12, 4, 4, 4, 4, 1), strict=True))
    for site in "ABC":
        told = {
            row["metric"].partition("/")[2]: row["value"]
            for row in rows
            if row["site"] == site and row["round"] == 2
        }
        kept = sum((told[name] or 0.0) * size for name, size in sizes.items())
        assert kept == pytest.approx(round(0.5 * 29))


def case(image: torch.Tensor, label: torch.Tensor, **more: torch.Tensor) -> Example:
    return Example("a", "a", {"image": image, "label": label, **more}, None)


def test_the_plane_of_a_picture_is_the_picture_as_it_is() -> None:
    image, label = torch.arange(24.0).reshape(1, 2, 3, 4), torch.arange(12).reshape(1, 3, 4) % 2
    shown = plane_of(case(image, label, mask=label == 1), 1 - label)
    for found, expected in zip(shown, (image, label, 1 - label, label == 1), strict=True):
        np.testing.assert_array_equal(found, expected[0])
    assert plane_of(case(image, label), label)[3] is None


def test_of_slices_the_one_with_most_foreground_of_truth_or_prediction_is_shown() -> None:
    image = torch.arange(60.0).reshape(5, 1, 3, 4)
    label, found = torch.zeros(2, 5, 3, 4, dtype=torch.int64)
    label[1, 0, :3] = 1  # three pixels, and two that lie elsewhere in slice 3
    label[3, 0, :2] = 2
    found[3, 1, :2] = 1
    shown = plane_of(case(image, label), found)
    np.testing.assert_array_equal(shown[0], image[3])
    np.testing.assert_array_equal(shown[1], label[3])
    np.testing.assert_array_equal(shown[2], found[3])
    empty = torch.zeros_like(label)
    np.testing.assert_array_equal(plane_of(case(image, empty), empty)[0], image[2])  # the middle


def test_a_volume_is_shown_with_the_front_up_and_the_right_on_the_right() -> None:
    x, y, z = torch.meshgrid(*(torch.arange(n) for n in (4, 3, 5)), indexing="ij")
    image = torch.stack([x, y, z])[None].float()  # each voxel holds its place in RAS+
    label = torch.zeros(1, 4, 3, 5, dtype=torch.int64)
    label[0, 3, 2, 1] = 1  # the right, the front
    label[0, 0, 2, 1] = 2  # the left, the front
    right, front, up = (shown := plane_of(case(image, label, mask=label > 0), label))[0]
    assert right.shape == (3, 4)
    np.testing.assert_array_equal(right, [[0, 1, 2, 3]] * 3)
    np.testing.assert_array_equal(front, [[2] * 4, [1] * 4, [0] * 4])
    assert (up == 1).all()
    for found in shown[1:3]:
        np.testing.assert_array_equal(found, [[2, 0, 0, 1], [0] * 4, [0] * 4])
    assert shown[3] is not None
    np.testing.assert_array_equal(shown[3], shown[1] > 0)
    slices, labels = image[0].permute(3, 0, 1, 2), label[0].permute(2, 0, 1)
    sliced = Example("a", "a", {"image": slices, "label": labels}, (1.0, 1.0, 1.0))
    for found, same in zip(plane_of(sliced, labels)[:3], shown[:3], strict=True):
        np.testing.assert_array_equal(found, same)


class Cases:
    """Eight images of 128 pixels, each with a disc of its own."""

    def __len__(self) -> int:
        return 8

    def example(self, index: int) -> Example:
        label = disc(20 + index)
        return case(label[None].float(), label)

    def batch(self, indices: Sequence[int], rngs: Sequence[torch.Generator]) -> Batch:
        raise NotImplementedError


def disc(radius: int) -> torch.Tensor:
    down, right = torch.meshgrid(torch.arange(128), torch.arange(128), indexing="ij")
    return ((down - 64) ** 2 + (right - 64) ** 2 < radius**2).long()[None]


def scores_of(values: list[float | None]) -> list[dict[str, Any]]:
    return [{"case": f"outside-c{k:03}", "dice": value} for k, value in enumerate(values, 1)]


def test_outside_the_best_median_and_worst_case_are_drawn_as_they_were_predicted(
    tmp_path: Path,
) -> None:
    kept = PackedPredictions()
    for number in (5, 0, 1, 2, 3, 4, 6, 7):  # in whatever order they come
        kept("", number, disc(10 + number))
    values = [0.5, 0.9, None, 0.1, 0.3, 0.4, 0.6, 0.7]
    (tmp_path / "old.png").write_bytes(b"of other settings")
    about = {"site": "A", "model": "tent"}
    write_outside_overlays(kept, Cases(), scores_of(values), about, "dice", tmp_path)
    index, digests = read_index(tmp_path)
    assert {(entry["rank"], entry["case"], entry["value"]) for entry in index} == {
        ("worst", "outside-c004", 0.1), ("median", "outside-c001", 0.5),
        ("best", "outside-c002", 0.9), ("common", "outside-c005", 0.3),
        ("common", "outside-c008", 0.7),
    }  # fmt: skip
    assert {(entry["site"], entry["model"]) for entry in index} == {("A", "tent")}
    for entry in index:
        number = int(entry["case"][-3:]) - 1
        for layer, radius in (("truth", 20 + number), ("prediction", 10 + number)):
            lines = np.asarray(Image.open(tmp_path / entry["layers"][layer]).convert("RGBA"))
            _, right = np.nonzero(lines[..., 3])
            # the picture is twice as large, and the disc ends within the pixel of its radius
            assert 2 * (2 * radius - 1) == right.max() - right.min() + 1
    files = [name for e in index for name in (e["file"], *e["layers"].values())]
    assert {path.name for path in tmp_path.iterdir()} == {"index.json", *files}
    assert digests == {
        name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in files
    }


@pytest.mark.parametrize("several", [True, False])
def test_what_is_not_one_prediction_of_labels_is_not_drawn(tmp_path: Path, several: bool) -> None:
    kept = PackedPredictions()
    for model in ("A", "B") if several else ("",):
        for index in range(8):
            kept(model, index, disc(9) if several else torch.full((1, 2), 0.5))
    write_outside_overlays(kept, Cases(), scores_of([0.5] * 8), {}, "dice", tmp_path / "new")
    assert read_index(tmp_path / "new") == ([], {})
    assert len(list((tmp_path / "new").iterdir())) == 1
