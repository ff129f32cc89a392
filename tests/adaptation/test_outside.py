from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from collegium.adaptation.base import (
    AdaptationRecord,
    AdaptationResult,
    Adapter,
    Cases,
    Deliver,
    Sources,
)
from collegium.adaptation.outside import ModelFiles, adapt_and_score
from collegium.core.dataset import TensorDataset
from collegium.core.tensors import Tensors
from collegium.errors import DataError
from collegium.models.files import export_model
from collegium.tasks import SegmentationTask

TASK = SegmentationTask(2, metrics=("dice",))
LABELS = torch.tensor([[[1, 1], [0, 0]], [[0, 0], [0, 0]], [[1, 0], [0, 0]]])
DATA = TensorDataset(
    {"image": torch.zeros(3, 1, 2, 2), "label": LABELS}, patients=["ann", "bob", "ann"]
)


class Fixed(Adapter):
    """Delivers what it was given, last case first."""

    def __init__(self, predictions: dict[str, list[Any]]) -> None:
        self.predictions = predictions

    def adapt(self, sources: Sources, cases: Cases, deliver: Deliver) -> AdaptationResult:
        for index in reversed(range(len(cases))):
            assert "label" not in cases.example(index).batch
            for name, by_case in self.predictions.items():
                deliver(name, index, torch.tensor([by_case[index]]))
        return AdaptationResult(AdaptationRecord(["global"]))


def score(**predictions: list[Any]) -> list[dict[str, Any]]:
    sources = Sources({}, lambda: nn.Identity(), TASK)
    return list(adapt_and_score(Fixed(predictions), sources, DATA).scores)


def test_cases_are_scored_in_order_under_pseudonyms() -> None:
    half, nothing = [[1, 0], [0, 0]], [[0, 0], [0, 0]]
    rows = score(one=[half, nothing, half])
    assert [row["case"] for row in rows] == ["outside-c001", "outside-c002", "outside-c003"]
    assert [row["patient"] for row in rows] == ["outside-p001", "outside-p002", "outside-p001"]
    assert rows[0]["dice"] == pytest.approx(2 * 1 / (1 + 2))
    assert rows[1]["dice"] is None  # nothing there and nothing found
    assert rows[2]["dice"] == pytest.approx(1.0)


def test_where_several_models_predict_their_scores_are_averaged() -> None:
    whole, half, none = [[1, 1], [0, 0]], [[1, 0], [0, 0]], [[0, 0], [0, 0]]
    rows = score(a=[whole, none, half], b=[half, half, none])
    assert rows[0]["dice"] == pytest.approx((1.0 + 2 / 3) / 2)
    assert rows[1]["dice"] is None  # one of them is undefined
    assert rows[2]["dice"] == pytest.approx((1.0 + 0.0) / 2)


def test_a_site_without_cases_is_refused() -> None:
    empty = TensorDataset({"image": torch.zeros(0, 1, 2, 2), "label": LABELS[:0]})
    with pytest.raises(DataError, match="the site outside has no cases"):
        adapt_and_score(Fixed({}), Sources({}, lambda: nn.Identity(), TASK), empty)


def test_models_in_a_folder_are_read_when_they_are_looked_at(tmp_path: Path) -> None:
    for name, value in {"global": 1.0, "north": 2.0}.items():
        export_model(Tensors({"w": torch.tensor([value])}), tmp_path / f"{name}.safetensors")
    models = ModelFiles(tmp_path)
    assert list(models) == ["global", "north"]
    assert models["north"]["w"].item() == 2.0
    export_model(Tensors({"w": torch.tensor([3.0])}), tmp_path / "north.safetensors")
    assert models["north"]["w"].item() == 3.0
    with pytest.raises(DataError, match="holds no models"):
        ModelFiles(tmp_path / "nothing")
