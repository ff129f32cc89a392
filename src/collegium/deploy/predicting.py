"""One model applied to new cases: masks on the grid of their images, or probabilities."""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from collegium.core.dataset import Dataset, Example
from collegium.core.files import write_atomically
from collegium.core.randomness import ambient
from collegium.data.cache import prepare
from collegium.data.columns import SUFFIXES
from collegium.data.federation import FederationConfig, task_of_site
from collegium.data.sampling import ImageDataset
from collegium.data.table_site import rows_to_predict
from collegium.data.tables import Scaling, read_table
from collegium.data.unlabelled import list_images
from collegium.deploy.cases import check_images, write_prediction
from collegium.deploy.models import OpenedModels
from collegium.errors import ConfigError, DataError
from collegium.experiment.config.building import task_of
from collegium.experiment.federation import cache_folder
from collegium.experiment.preflight import check_device
from collegium.tasks import Task
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
    if output.exists() and any(output.iterdir()):
        raise DataError(f"{output} holds something already; choose another output folder")
    check_device(device)
    config = opened.config
    if labels is not None and config.federation.task.name != "segmentation":
        raise ConfigError("a folder of labels scores segmentations only; leave it out")
    unfinished = output.with_name(f".{output.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        if config.federation.table is not None:
            _predict_table(opened, place, unfinished, device)
        else:
            _predict_images(opened, place, unfinished, (labels, device))
        if output.exists():
            output.rmdir()
        unfinished.rename(output)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return output


def _predict_images(
    opened: OpenedModels, place: Path, folder: Path, how: tuple[Path | None, str]
) -> None:
    labels, device = how
    config, federation = opened.config, opened.config.federation
    masks = federation.task.name == "segmentation"
    cases, problems = list_images(place, labels, masks=masks)
    if problems:
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        raise DataError(f"{problems[0]}{more}")
    name, says = next(iter(opened.models)), federation.task
    site = federation.sites.get(name)
    if site is not None:  # its own model expects what it has
        says = task_of_site(federation, name)
        cases = [replace(case, channels=case.channels or site.channels) for case in cases]
    prepared = [prepare(case, federation.image, says, cache_folder()) for case in cases]
    check_images(prepared, opened)
    data = ImageDataset(prepared, federation.sampling)
    if not masks:
        _write_probabilities(opened, data, [case.case for case in cases], folder, device)
        return
    task, rows = task_of(config), []
    labelled = all(case.label is not None for case in cases)
    for index, example, prediction in _training(opened, device).predictions(_model(opened), data):
        write_prediction(cases[index], prepared[index], prediction, folder, says.classes)
        if labelled:
            rows.append(scored(task, example, prediction))
    if rows:
        write_table(rows, folder / SCORES)


def _predict_table(opened: OpenedModels, place: Path, folder: Path, device: str) -> None:
    names, data = open_rows(place, opened.config.federation, opened.scaling)
    _write_probabilities(opened, data, names, folder, device)


def open_rows(
    place: Path, federation: FederationConfig, scaling: Scaling | None = None
) -> tuple[Sequence[str], Dataset]:
    """Return the cases' names and the rows of a table that is only predicted.

    Args:
        place: The table.
        federation: What its columns and classes are.
        scaling: How the site scales its numbers; None: by those of the table.

    Raises:
        ConfigError: It is no table.
        DataError: It cannot be read or understood.
    """
    assert federation.table is not None
    if place.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"{place}: the model learnt from tables; name a table ({', '.join(SUFFIXES)})"
        )
    table = read_table(place, federation.table, labelled=False)
    return table.cases, rows_to_predict(table, federation.table, federation.task, scaling)


def _write_probabilities(
    opened: OpenedModels, data: Dataset, names: Sequence[str], folder: Path, device: str
) -> None:
    task, classes = task_of(opened.config), opened.config.federation.task.classes
    rows, scores = [], []
    for index, example, found in _training(opened, device).predictions(_model(opened), data):
        rows.append(probabilities(names[index], found, classes))
        if "label" in example.batch:
            scores.append(scored(task, example, found))
    write_table(rows, folder / PROBABILITIES)
    if scores:
        write_table(task.add_set_scores(scores), folder / SCORES)


def scored(task: Task, example: Example, prediction: Tensor) -> dict[str, Any]:
    """Return the scores of a case, with its names.

    Args:
        task: The task.
        example: The case, with its label.
        prediction: As `Task.predict` returns it.
    """
    about = {"case": example.case, "patient": example.patient}
    return {**about, **task.scores(prediction, example)}


def probabilities(case: str, prediction: Tensor, classes: Sequence[str]) -> dict[str, str]:
    """Return the row of a case: its class, and the probability of every class.

    Args:
        case: The case.
        prediction: Probabilities (B, classes); of several slices their mean counts.
        classes: Names of the classes.
    """
    chances = [float(chance) for chance in prediction.double().mean(dim=0)]
    row = {"case": case, "class": classes[chances.index(max(chances))]}
    for name, chance in zip(classes, chances, strict=True):
        row[f"probability of {name}" if name in ("case", "class") else name] = f"{chance:.6f}"
    return row


def _training(opened: OpenedModels, device: str) -> LocalTraining:
    with ambient(0, "predict"):
        module = opened.network()
    return LocalTraining(module, task_of(opened.config), TrainingConfig(), device)


def _model(opened: OpenedModels) -> Any:
    return next(iter(opened.models.values()))


def write_table(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write rows with the same keys as CSV, the keys first.

    Args:
        rows: The rows; at least one.
        path: The file.
    """
    text = io.StringIO()
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    write_atomically(path, text.getvalue().encode())
