from pathlib import Path

import numpy as np
import pytest
import torch

from collegium.algorithms.resfim import ResFIM
from collegium.config import parse_config
from collegium.data.dataset import Example
from collegium.grid import cells_of
from collegium.outcome import cell_rows, plane_of
from collegium.run import Run
from collegium.toy import ToyFederation

CONFIG = {
    "name": "toy",
    "federation": {"name": "toy", "root": ".", "sites": {name: {"folder": name} for name in "ABC"}},
    "model": {"name": "unet"},
    "algorithms": ["resfim"],
    "rounds": 2,
}


def test_numbers_that_clients_tell_of_a_round_become_rows(tmp_path: Path) -> None:
    federation = ToyFederation(ResFIM(delta=50), tmp_path).run(2)
    run = Run(federation.server, 2, "negative_loss")
    rows = [
        row
        for row in cell_rows(cells_of(parse_config(CONFIG))[0], run, {})
        if row.metric.startswith("masking_rates/")
    ]
    tensors = ("0.weight", "0.bias", "1.weight", "1.bias", "4.weight", "4.bias")
    assert {row.metric for row in rows} == {f"masking_rates/{name}" for name in tensors}
    assert {(row.site, row.round) for row in rows} == {(s, t) for s in "ABC" for t in (1, 2)}
    assert {(row.split, row.model, row.case) for row in rows} == {("train", "", "")}
    sizes = dict(zip(tensors, (12, 4, 4, 4, 4, 1), strict=True))
    for site in "ABC":
        told = {
            row.metric.partition("/")[2]: row.value
            for row in rows
            if row.site == site and row.round == 2
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
