"""Trained models applied at a hospital outside: from a folder of images to masks and an account."""

from __future__ import annotations

import csv
import io
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from collegium import __version__, outside
from collegium.adaptation.base import Adapted, Sources, Unlabelled
from collegium.application.cases import check_channels, draw_case, write_prediction
from collegium.application.models import Handed
from collegium.building import build_adapter
from collegium.cell import cache_folder
from collegium.config import AdapterConfig
from collegium.data.cache import prepare
from collegium.data.sampling import ImageDataset
from collegium.data.site import Case
from collegium.data.unlabelled import list_images
from collegium.errors import ConfigError, DataError
from collegium.models.files import export_model
from collegium.outcome import ACCOUNT_FILE, task_of
from collegium.report.account import Picture, write_account
from collegium.state import write_atomically

MOST_PICTURES = 24
"""How many cases the account shows."""


def adapt_folder(
    handed: Handed,
    images: Path,
    adapter: AdapterConfig,
    output: Path,
    *,
    labels: Path | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Path:
    """Adapt models to the images in a folder, and write the predictions and an account.

    Args:
        handed: the models.
        images: see `collegium.data.unlabelled.list_images`.
        adapter: the adapter.
        output: a folder that is made; it must not hold anything.
        labels: a folder of masks, which score the predictions and are not seen by the adapter.
        device: where to compute.
        seed: of everything random.

    Returns:
        The account's page.

    Raises:
        ConfigError: the adapter does not suit the models, or gives no prediction of its own.
        DataError: an image cannot be used, or the output folder is not empty.
    """
    if output.exists() and any(output.iterdir()):
        raise DataError(f"{output} holds something already; choose another output folder")
    cases, problems = list_images(images, labels)
    if problems:
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        raise DataError(f"{problems[0]}{more}")
    labelled = all(case.label is not None for case in cases)
    if adapter.name == "average" and not labelled:
        raise ConfigError(
            "average gives a prediction for every personal model, none of its own; choose ensemble"
        )
    config = handed.config
    if config.federation.task.name != "segmentation":
        raise ConfigError(
            "masks are written for segmentations; a classification is adapted in a run, with "
            "adapters in its experiment, and applied by: collegium predict"
        )
    federation = config.federation
    prepared = [prepare(c, federation.image, federation.task, cache_folder()) for c in cases]
    check_channels(prepared, config)
    data = ImageDataset(prepared, federation.sampling)
    sources = Sources(handed.models, handed.network, task_of(config), device, seed)
    whole, partial_output = output, output.with_name(f".{output.name}.unfinished")
    shutil.rmtree(partial_output, ignore_errors=True)
    (partial_output / "predictions").mkdir(parents=True)
    try:
        writer = _Writer(
            cases, data, sources, partial_output,
            labelled=labelled, classes=federation.task.classes,
        )  # fmt: skip
        start = time.perf_counter()
        adapted = build_adapter(adapter).adapt(sources, Unlabelled(data), writer)
        seconds = time.perf_counter() - start
        _write_rest(adapted, handed, adapter, writer, seconds, partial_output)
        whole.parent.mkdir(parents=True, exist_ok=True)
        if whole.exists():
            whole.rmdir()
        partial_output.rename(whole)
    finally:
        shutil.rmtree(partial_output, ignore_errors=True)
    return whole / "account.html"


class _Writer:
    """Writes every prediction as it is delivered, and scores it where there are labels."""

    def __init__(
        self,
        cases: Sequence[Case],
        data: ImageDataset,
        sources: Sources,
        folder: Path,
        *,
        labelled: bool,
        classes: tuple[str, ...],
    ) -> None:
        self.cases, self._data, self._task = cases, data, sources.task
        self._folder, self._labelled, self._classes = folder, labelled, classes
        self.scores: list[dict[str, Any]] = []
        self.pictures: list[Picture] = []

    def __call__(self, model: str, index: int, prediction: Tensor) -> None:
        """Write the mask of one case; of several models each has a folder of its own."""
        case, example = self.cases[index], self._data.example(index)
        folder = self._folder / "predictions" / model
        folder.mkdir(exist_ok=True)
        write_prediction(case, self._data.cases[index], prediction, folder, self._classes)
        scores = self._task.scores(prediction, example) if self._labelled else {}
        if self._labelled:
            which = {"model": model} if model else {}
            self.scores.append({"case": case.case, "patient": case.patient, **which, **scores})
        if len(self.pictures) < MOST_PICTURES:
            caption = f"{case.case}{f', {model}' if model else ''}"
            self.pictures.append(draw_case(caption, example, prediction, scores, self._task.metric))


def _write_rest(
    adapted: Adapted,
    handed: Handed,
    adapter: AdapterConfig,
    writer: _Writer,
    seconds: float,
    folder: Path,
) -> None:
    """Write the adapted model, the scores, and last the account."""
    if adapted.model is not None:
        export_model(adapted.model, folder / "adapted.safetensors")
    if writer.scores:
        write_atomically(folder / "scores.csv", _table(writer.scores).encode())
    account = {
        "adapter": {"name": adapter.name, "label": adapter.label, **adapter.params},
        "models": handed.origin,
        "handed_out": sorted(handed.models),
        "cases": len(writer.cases),
        "seconds": seconds,
        "collegium": __version__,
        **outside.describe(adapted.account),
    }
    write_account(folder / "account.html", account, writer.pictures, writer.scores)
    write_atomically(folder / ACCOUNT_FILE, json.dumps(account, indent=1).encode())


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()
