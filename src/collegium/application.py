"""Trained models applied at a hospital outside: from a folder of images to masks and an account."""

from __future__ import annotations

import csv
import io
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from collegium import __version__, outside
from collegium.adaptation.base import Adapted, Sources, Unlabelled
from collegium.algorithm import Extended
from collegium.building import build_adapter, build_algorithm
from collegium.cell import cache_folder, network_of
from collegium.config import AdapterConfig, ExperimentConfig
from collegium.data.cache import PreparedCase, prepare
from collegium.data.sampling import ImageDataset
from collegium.data.site import Case
from collegium.data.unlabelled import list_images
from collegium.data.writing import write_mask
from collegium.errors import CheckpointError, ConfigError, DataError
from collegium.experiment import RUN_FILE, read_run_config
from collegium.grid import Cell, cells_of, holders
from collegium.models.files import export_model
from collegium.models.rotation import ROTATION, attach_rotation_head
from collegium.outcome import ACCOUNT_FILE, DEPLOYED, task_of
from collegium.report.account import Picture, write_account
from collegium.report.overlays import draw_overlay
from collegium.state import write_atomically
from collegium.tensors import Tensors

MOST_PICTURES = 24
"""How many cases the account shows."""


@dataclass(frozen=True)
class Choice:
    """Which models of a finished run to take; None: whichever there is.

    Attributes:
        algorithm: label of the algorithm.
        seed: the seed.
        left_out: the site that was outside in the fold.
        variation: name of the variation.
    """

    algorithm: str | None = None
    seed: int | None = None
    left_out: str | None = None
    variation: str | None = None


@dataclass(frozen=True)
class Handed:
    """Models that were handed out, and the settings that they were trained with.

    Attributes:
        models: the models by name.
        network: makes their network.
        config: the settings.
        origin: where they are from, in words.
    """

    models: Mapping[str, Tensors]
    network: Callable[[], nn.Module]
    config: ExperimentConfig
    origin: str


def open_models(
    place: Path, choice: Choice = Choice(), config: ExperimentConfig | None = None
) -> Handed:
    """Open the models of a finished run, or those in a folder.

    Args:
        place: the output folder of a run, or a folder of ``<name>.safetensors``, where "global"
            names the global model and any other name a site's.
        choice: which cell of the run.
        config: the experiment that a folder's models were trained with.

    Raises:
        ConfigError: there are several cells to choose from, or none; or the settings are missing.
        CheckpointError: the run holds no models for sites outside.
        DataError: the folder holds no models.
    """
    if not (place / RUN_FILE).exists():
        if config is None:
            raise ConfigError(
                f"{place} is no run, and a folder of models needs the experiment they were trained "
                f"with; name its file with --config"
            )
        models = outside.ModelFiles(place)
        network = partial(_network, config, next(iter(models.values())))
        return Handed(models, network, config, f"models in {place.name}")
    stored = read_run_config(place)
    cells = cells_of(stored)
    cell = _choose(cells, choice, place)
    folder = holders(cells)[cell.key].folder / DEPLOYED
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder.parent} holds no models for hospitals outside; go on with: "
            f"collegium resume {place}"
        )
    extended = Extended(network_of(cell.config), build_algorithm(cell.algorithm))
    return Handed(outside.ModelFiles(folder), extended, cell.config, f"{stored.name}: {cell.name}")


def _network(config: ExperimentConfig, model: Tensors) -> nn.Module:
    """Make the network of a model in a folder, with a rotation head where the model has one."""
    module = network_of(config)()
    if any(name.startswith(f"{ROTATION}.") for name in model):
        attach_rotation_head(module)
    return module


def _choose(cells: Sequence[Cell], choice: Choice, place: Path) -> Cell:
    wanted = {
        "algorithm": choice.algorithm,
        "seed": choice.seed,
        "fold": choice.left_out,
        "variation": choice.variation,
    }

    def about(cell: Cell) -> dict[str, Any]:
        values = (cell.algorithm.label, cell.seed, cell.left_out, cell.variation)
        return dict(zip(wanted, values, strict=True))

    found = [
        cell
        for cell in cells
        if all(value is None or about(cell)[key] == value for key, value in wanted.items())
    ]
    if len(found) == 1:
        return found[0]
    names = [cell.name for cell in found or cells]
    there = "; ".join(names[:4] + [f"{len(names) - 4} more"] * (len(names) > 4))
    if not found:
        raise ConfigError(f"{place} has no such cell; there is {there}")
    differing = [key for key in wanted if len({about(cell)[key] for cell in found}) > 1]
    options = ", ".join(f"--{key}" for key in differing)
    raise ConfigError(f"{place} has {len(found)} cells; choose one by {options} ({there})")


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
    federation = config.federation
    prepared = [prepare(c, federation.image, federation.task, cache_folder()) for c in cases]
    _check_channels(prepared, config)
    data = ImageDataset(prepared, federation.sampling)
    sources = Sources(handed.models, handed.network, task_of(config), device, seed)
    whole, partial_output = output, output.with_name(f".{output.name}.unfinished")
    shutil.rmtree(partial_output, ignore_errors=True)
    (partial_output / "predictions").mkdir(parents=True)
    try:
        writer = _Writer(cases, data, sources, partial_output, labelled=labelled)
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


def _check_channels(prepared: Sequence[PreparedCase], config: ExperimentConfig) -> None:
    """Refuse images that the network cannot take, before it meets them."""
    wanted = config.model.params.get("in_channels")
    for case in prepared:
        if wanted is not None and case.shape[0] != wanted:
            raise DataError(
                f"case {case.case}: its image has {case.shape[0]} channels, and the models were "
                f"trained on {wanted}; export it as the others were, or leave it out"
            )


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
    ) -> None:
        self.cases, self._data, self._task = cases, data, sources.task
        self._folder, self._labelled = folder, labelled
        self.scores: list[dict[str, Any]] = []
        self.pictures: list[Picture] = []

    def __call__(self, model: str, index: int, prediction: Tensor) -> None:
        """Write the mask of one case; of several models each has a folder of its own."""
        case, example = self.cases[index], self._data.example(index)
        folder = self._folder / "predictions" / model
        folder.mkdir(exist_ok=True)
        labels = prediction.cpu().numpy()
        sliced = len(self._data.cases[index].shape) == 4 and labels.ndim == 3
        whole = np.moveaxis(labels, 0, -1) if sliced else labels[0]
        write_mask(whole, case.images[0], folder, case.case)
        scores = self._task.scores(prediction, example) if self._labelled else {}
        if self._labelled:
            which = {"model": model} if model else {}
            self.scores.append({"case": case.case, "patient": case.patient, **which, **scores})
        if len(self.pictures) < MOST_PICTURES:
            self.pictures.append(self._draw(case.case, model, example.batch, labels, scores))

    def _draw(
        self,
        case: str,
        model: str,
        batch: Mapping[str, Tensor],
        labels: NDArray[Any],
        scores: Mapping[str, float | None],
    ) -> Picture:
        """Draw the middle slice."""
        image, truth = batch["image"].numpy(), batch["label"].numpy()
        if image.ndim == 5:
            image, truth, labels = (np.moveaxis(a, -1, 0)[:, 0] for a in (image, truth, labels))
        middle = len(labels) // 2
        mask = batch["mask"][middle].numpy() if "mask" in batch and image.ndim == 4 else None
        drawn = draw_overlay(image[middle], truth[middle], labels[middle], mask)
        metric = self._task.metric
        value = scores.get(metric)
        caption = f"{case}{f', {model}' if model else ''}"
        if scores:
            caption += f": {metric} {'undefined' if value is None else f'{value:.3f}'}"
        return Picture(caption, drawn)


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
