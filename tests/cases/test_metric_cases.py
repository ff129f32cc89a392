from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from collegium.core.dataset import Example
from collegium.tasks import SegmentationTask


def read(path: Path) -> torch.Tensor:
    with Image.open(path) as image:
        return torch.from_numpy(np.asarray(image) > 0).long()[None]


def test_lab06_empty_structures_score_zero_or_undefined_and_never_nan(
    folder: Path, values: dict[str, Any]
) -> None:
    task, scores = SegmentationTask(), {}
    for name in values["dice"]:
        label = read(folder / "truth" / f"{name}.png")
        example = Example(name, name, {"image": label[None].float(), "label": label}, None)
        scores[name] = task.scores(read(folder / "pred" / f"{name}.png"), example)

    assert {name: found["dice"] for name, found in scores.items()} == pytest.approx(
        values["dice"], abs=1e-6
    )
    scored = [found["dice"] for found in scores.values() if found["dice"] is not None]
    assert len(scored) == 3
    assert sum(scored) / 3 == pytest.approx(values["mean_excluding_both_empty"], abs=1e-6)
    assert {name: found["iou"] for name, found in scores.items()} == pytest.approx(
        {"normal": 12 / 16, "false_alarm": 0.0, "missed": 0.0, "both_empty": None}
    )
    distances = {name: found["hd95_px"] for name, found in scores.items()}
    assert distances.pop("normal") == 1.0
    assert distances == {"false_alarm": None, "missed": None, "both_empty": None}
