"""Trained models applied at a hospital outside: from a folder of images to predictions."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from collegium import __version__
from collegium.adaptation import outside
from collegium.adaptation.base import AdaptationResult, Sources, UnlabelledCases
from collegium.core.dataset import Dataset
from collegium.core.files import write_atomically
from collegium.data.cache import prepare
from collegium.data.sampling import ImageDataset
from collegium.data.site import Case
from collegium.data.unlabelled import list_images
from collegium.deploy.cases import check_images, draw_case, write_prediction
from collegium.deploy.models import OpenedModels
from collegium.deploy.predicting import (
    PROBABILITIES,
    SCORES,
    open_rows,
    probabilities,
    scored,
    write_table,
)
from collegium.errors import ConfigError, DataError
from collegium.evaluation.report.account import CasePicture, write_account
from collegium.experiment.config.building import build_adapter, task_of
from collegium.experiment.config.experiment import AdapterConfig
from collegium.experiment.federation import cache_folder
from collegium.experiment.job_results import ACCOUNT_FILE
from collegium.experiment.model_settings import settings_of
from collegium.experiment.preflight import check_device
from collegium.models.files import export_model

MOST_PICTURES = 24
"""How many cases the account shows."""


def adapt_folder(
    opened: OpenedModels,
    images: Path,
    adapter: AdapterConfig,
    output: Path,
    *,
    labels: Path | None = None,
    device: str = "cpu",
) -> Path:
    """Adapt models to new cases, and write the predictions and an account.

    Of a segmentation every case gets a mask, as by `collegium.deploy.predict_folder`; of a
    classification there is the same table of probabilities, scored where the class of every case is
    named.

    Args:
        opened: the models; whatever is random follows from their seed.
        images: see `collegium.data.unlabelled.list_images`; or a table, where the models learnt
            from tables.
        adapter: the adapter.
        output: a folder that is made; it must not hold anything.
        labels: a folder of masks, which score the predictions and are not seen by the adapter.
        device: where to compute.

    Returns:
        The account's page.

    Raises:
        ConfigError: the adapter does not suit the models or the task, or gives no prediction of its
            own; there is no such device; or labels are given where none can be.
        DataError: a case cannot be used, or the output folder is not empty.
    """
    if output.exists() and any(output.iterdir()):
        raise DataError(f"{output} holds something already; choose another output folder")
    check_device(device)
    cases = _open(opened, images, labels)
    if adapter.name == "average" and not cases.labelled:
        raise ConfigError(
            "average gives a prediction for every personal model, none of its own; choose ensemble"
        )
    sources = Sources(
        opened.models, opened.network, task_of(opened.config), device, opened.seed, opened.server
    )
    unfinished = output.with_name(f".{output.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        writer = _Writer(cases, sources, opened.config.federation.task.classes, unfinished)
        start = time.perf_counter()
        adapted = build_adapter(adapter).adapt(sources, UnlabelledCases(cases.data), writer)
        seconds = time.perf_counter() - start
        _write_rest(adapted, opened, adapter, writer, seconds, unfinished)
        if output.exists():
            output.rmdir()
        unfinished.rename(output)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return output / "account.html"


@dataclass(frozen=True)
class _Cases:
    """The cases to predict.

    Attributes:
        names: of the cases.
        data: the cases as the network gets them.
        files: the same as found; None where they get no masks.
        labelled: whether there are labels, to score by.
    """

    names: Sequence[str]
    data: Dataset
    files: Sequence[Case] | None = None
    labelled: bool = False


def _open(opened: OpenedModels, place: Path, labels: Path | None) -> _Cases:
    """Find and prepare the cases."""
    federation = opened.config.federation
    masks = federation.task.name == "segmentation"
    if labels is not None and not masks:
        raise ConfigError("a folder of labels scores segmentations only; leave it out")
    if federation.table is not None:
        names, rows = open_rows(place, federation)
        return _Cases(names, rows, labelled="label" in rows.example(0).batch)
    cases, problems = list_images(place, labels, masks=masks)
    if problems:
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        raise DataError(f"{problems[0]}{more}")
    prepared = [prepare(c, federation.image, federation.task, cache_folder()) for c in cases]
    check_images(prepared, opened)
    data, names = ImageDataset(prepared, federation.sampling), [case.case for case in cases]
    if not masks:
        return _Cases(names, data, labelled=all(case.target is not None for case in cases))
    return _Cases(names, data, cases, all(case.label is not None for case in cases))


class _Writer:
    """Writes every prediction as it is delivered, and scores it where there are labels."""

    def __init__(
        self, cases: _Cases, sources: Sources, classes: tuple[str, ...], folder: Path
    ) -> None:
        self.cases, self._task = cases, sources.task
        self._classes, self._folder = classes, folder
        self._rows: dict[tuple[str, int], dict[str, str]] = {}
        self._scores: dict[str, list[dict[str, Any]]] = {}
        self.pictures: list[CasePicture] = []

    def __call__(self, model: str, index: int, prediction: Tensor) -> None:
        """Take the prediction of one case."""
        example = self.cases.data.example(index)
        scores = {}
        if self.cases.labelled:
            scores = scored(self._task, example, prediction)
            self._scores.setdefault(model, []).append(scores)
        if self.cases.files is None:
            row = probabilities(self.cases.names[index], prediction, self._classes)
            self._rows[model, index] = _of_model(model) | row
        else:
            self._write_mask(model, self.cases.files[index], index, prediction)
            if len(self.pictures) < MOST_PICTURES:
                caption = f"{example.case}{f', {model}' if model else ''}"
                picture = draw_case(caption, example, prediction, scores, self._task.metric)
                self.pictures.append(picture)

    def _write_mask(self, model: str, case: Case, index: int, prediction: Tensor) -> None:
        """Write the mask of one case; of several models each has a folder of its own."""
        data = self.cases.data
        assert isinstance(data, ImageDataset)
        folder = self._folder / "predictions" / model
        folder.mkdir(parents=True, exist_ok=True)
        write_prediction(case, data.cases[index], prediction, folder, self._classes)

    @property
    def scores(self) -> list[dict[str, Any]]:
        """The scores of all cases, where there are labels."""
        found = []
        for model, rows in self._scores.items():
            found += [_of_model(model) | row for row in self._task.add_set_scores(rows)]
        return found

    def finish(self) -> dict[str, int] | None:
        """Write the tables; of a classification return how many predictions each class got."""
        if self._scores:
            write_table(self.scores, self._folder / SCORES)
        if not self._rows:
            return None
        rows = [row for _, row in sorted(self._rows.items())]
        write_table(rows, self._folder / PROBABILITIES)
        found = Counter(row["class"] for row in rows)
        return {name: found[name] for name in self._classes}


def _of_model(model: str) -> dict[str, str]:
    return {"model": model} if model else {}


def _write_rest(
    adapted: AdaptationResult,
    opened: OpenedModels,
    adapter: AdapterConfig,
    writer: _Writer,
    seconds: float,
    folder: Path,
) -> None:
    """Write the adapted model with its settings, the tables, and last the account."""
    if adapted.model is not None:
        export_model(adapted.model, folder / "adapted.safetensors")
        settings = settings_of(opened.config, opened.algorithm, opened.seed)
        if settings is not None:
            text = json.dumps(settings, indent=1)
            write_atomically(folder / outside.SETTINGS_FILE, text.encode())
    account = {
        "adapter": {"name": adapter.name, "label": adapter.label, **adapter.params},
        "models": opened.origin,
        "seed": opened.seed,
        "handed_out": sorted(opened.models),
        "cases": len(writer.cases.names),
        "classes": writer.finish(),
        "seconds": seconds,
        "collegium": __version__,
        **adapted.record.to_dict(),
    }
    write_account(folder / "account.html", account, writer.pictures, writer.scores)
    write_atomically(folder / ACCOUNT_FILE, json.dumps(account, indent=1).encode())
