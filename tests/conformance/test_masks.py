"""No algorithm looks at labels outside the field of view, nor at those that nobody annotated."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from collegium.core.dataset import Batch
from collegium.experiment.config.registry import ALGORITHMS
from collegium.testing.kinds import KINDS, images_with_masks
from collegium.testing.statements import kinds_of
from collegium.testing.toy import ToyFederation

KIND = KINDS["images with masks"]
LOOK_AT_LABELS = {"condist", "fedas", "feddg", "fedevi", "fedrod"}
"""The algorithms that look at labels themselves, beside the task's loss."""


def other_labels_outside(name: str, count: int, seed: int) -> Batch:
    batch = images_with_masks(name, count, seed)
    return batch | {"label": torch.where(batch["mask"], batch["label"], 1 - batch["label"])}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in LOOK_AT_LABELS else pytest.mark.slow)
        for name in ALGORITHMS.names()
    ],
)
def test_labels_outside_the_mask_change_no_bit(name: str, tmp_path: Path) -> None:
    algorithm = ALGORITHMS.load(name)()
    if kinds_of(algorithm)[KIND.name]:
        pytest.skip(f"{name} refuses images with masks")
    runs = [
        ToyFederation(algorithm, tmp_path / str(number), kind=kind).run(2).states()
        for number, kind in enumerate((KIND, replace(KIND, samples=other_labels_outside)))
    ]
    assert runs[0] == runs[1]
