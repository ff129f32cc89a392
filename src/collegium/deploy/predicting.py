"""One model applied to new cases: masks on the grid of their images, or probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from collegium.core.dataset import Example
from collegium.core.files import new_folder, write_atomically
from collegium.core.randomness import ambient
from collegium.data.sampling import ImageDataset
from collegium.deploy.cases import Cases, open_cases, write_prediction
from collegium.deploy.models import OpenedModels
from collegium.evaluation.report.account import CasePicture
from collegium.evaluation.report.overlays import draw_overlay, prepare_case
from collegium.evaluation.results import frame_to_csv
from collegium.experiment.config.building import task_of
from collegium.experiment.job_results import plane_of
from collegium.experiment.preflight import check_device
from collegium.tasks import is_hidden
from collegium.training.loop import LocalTraining, TrainingConfig

PROBABILITIES = "predictions.csv"
"""Of a classification, a row for each case."""

SCORES = "scores.csv"
"""Where there are labels or classes, a row for each case."""


def predict_folder(
    opened: OpenedModels,
    place: Path,
    output: Path,
    *,
    labels: Path | None = None,
    device: str = "cpu",
) -> Path:
    """Apply a model to new cases, and write what it says of them.

    Of a segmentation every case gets a mask with the geometry of its image: a NIfTI for a NIfTI, a
    DICOM segmentation for a DICOM series, a PNG for a picture. Of a classification there is one
    table with a row for each case: its class and the probability of every class. Where a manifest
    names the label of every case, or a manifest or table its class, they are scored in
    ``scores.csv``.

    Args:
        opened: The model; the first of several.
        place: Images as `collegium.data.unlabelled.list_images` finds them, or a table.
        output: A folder that is made; it must not hold anything.
        labels: A folder of masks, to score by.
        device: Where to compute.

    Returns:
        The folder.

    Raises:
        ConfigError: Tables and images are mixed up, labels are given where none can be, or there is
            no such device.
        DataError: A case cannot be used, or the output folder is not empty.
        StorageError: Something cannot be written.
    """
    check_device(device)
    name = next(iter(opened.models))
    with new_folder(output) as folder:
        cases = open_cases(opened, place, labels, site=name)
        with ambient(0, "predict"):
            network = opened.network()
        writer = PredictionWriter(opened, cases, folder)
        training = LocalTraining(network, writer.task, TrainingConfig(), device)
        for index, example, prediction in training.predictions(opened.models[name], cases.data):
            writer.write("", index, example, prediction)
        writer.write_tables(folder)
    return output


class PredictionWriter:
    """Writes predictions as masks or as a table of probabilities, and scores them by labels.

    Args:
        opened: The models.
        cases: The cases.
        folder: Where masks go; those of one of several models into a folder in it.
        most_pictures: How many predicted masks are drawn.
    """

    def __init__(
        self, opened: OpenedModels, cases: Cases, folder: Path, *, most_pictures: int = 0
    ) -> None:
        self.cases, self.task, self._folder = cases, task_of(opened.config), folder
        self._classes = opened.config.federation.task.classes
        self._labelled, self._most_pictures = cases.labelled, most_pictures
        self._rows: dict[tuple[str, int], dict[str, str]] = {}
        self._scores: dict[str, list[dict[str, Any]]] = {}
        self.pictures: list[CasePicture] = []

    def write(self, model: str, index: int, example: Example, prediction: Tensor) -> None:
        """Take the prediction of one case.

        Args:
            model: Name of the model; empty if there is only one.
            index: The case's place among the cases.
            example: The case, with its label if it has one.
            prediction: As `Task.predict` returns it.
        """
        scores: dict[str, Any] = {}
        if self._labelled:
            about = {"case": example.case, "patient": example.patient}
            scores = {**about, **self.task.scores(prediction, example)}
            self._scores.setdefault(model, []).append(scores)
        if self.cases.files is None:
            row = _probabilities(self.cases.names[index], prediction, self._classes)
            self._rows[model, index] = _of_model(model) | row
            return
        folder, data = self._folder / model, self.cases.data
        folder.mkdir(parents=True, exist_ok=True)
        assert isinstance(data, ImageDataset)
        case, prepared = self.cases.files[index], data.cases[index]
        write_prediction(case, prepared, prediction, folder, self._classes)
        if len(self.pictures) < self._most_pictures:
            caption = f"{example.case}{f', {model}' if model else ''}"
            if self._labelled:
                value = scores.get(self.task.metric)
                score = "undefined" if value is None else f"{value:.3f}"
                caption += f": {self.task.metric} {score}"
            drawn = draw_overlay(prepare_case(*plane_of(example, prediction)))
            self.pictures.append(CasePicture(caption, drawn))

    @property
    def scores(self) -> list[dict[str, Any]]:
        """The scores of all cases, if they have labels."""
        return [
            _of_model(model) | {key: value for key, value in row.items() if not is_hidden(key)}
            for model in self._scores
            for row in self.scores_of(model)
        ]

    def scores_of(self, model: str) -> list[dict[str, Any]]:
        """Return the scores of a model by case, hidden ones included; none without labels."""
        return self.task.add_set_scores(self._scores.get(model, []))

    def write_tables(self, folder: Path) -> dict[str, int] | None:
        """Write the tables; of a classification return how many predictions each class got."""
        if self._scores:
            _write_table(self.scores, folder / SCORES)
        if not self._rows:
            return None
        rows = [row for _, row in sorted(self._rows.items())]
        _write_table(rows, folder / PROBABILITIES)
        found = [row["class"] for row in rows]
        return {name: found.count(name) for name in self._classes}


def _of_model(model: str) -> dict[str, str]:
    return {"model": model} if model else {}


def _probabilities(case: str, prediction: Tensor, classes: Sequence[str]) -> dict[str, str]:
    """Return the row of a case from (B, classes); of several slices their mean counts."""
    chances = [float(chance) for chance in prediction.double().mean(dim=0)]
    row = {"case": case, "class": classes[chances.index(max(chances))]}
    for name, chance in zip(classes, chances, strict=True):
        row[f"probability of {name}" if name in ("case", "class") else name] = f"{chance:.6f}"
    return row


def _write_table(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write rows with the same keys as CSV, the keys first."""
    write_atomically(path, frame_to_csv(pd.DataFrame(rows, dtype=object)).encode())
