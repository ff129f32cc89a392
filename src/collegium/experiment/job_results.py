"""Writes the results of a finished job: its rows, its models, pictures of test cases."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from collegium.adaptation.outside import INDEX_FILE, SETTINGS_FILE
from collegium.core.dataset import Dataset, Example
from collegium.core.files import write_atomically
from collegium.core.payloads import GLOBAL, PERSONAL
from collegium.core.seals import read_sealed, seal_json
from collegium.core.tensors import Tensors
from collegium.evaluation.report.overlays import (
    INDEX,
    choose_cases,
    draw_layers,
    draw_overlay,
    encode_for_web,
    encode_png,
    prepare_case,
    write_index,
)
from collegium.evaluation.results import ROUNDS, SELECTION, ResultRow
from collegium.evaluation.scores import SPLITS
from collegium.experiment.config.building import task_of
from collegium.experiment.grid import Job
from collegium.experiment.model_settings import write_settings
from collegium.models.files import export_model
from collegium.runtime.client import ClientRuntime
from collegium.runtime.records import RoundRecord, choices_of, stopped_at
from collegium.runtime.run import Run
from collegium.runtime.selection import KEPT, KeptModels, choices_at
from collegium.tasks import ALL_CASES, CASES, EVENTS, NON_SCORE_KEYS, SegmentationTask

Array = NDArray[Any]

ACCOUNT_FILE = "account.json"
"""What an adaptation did, in the adaptation's folder."""

SCORES_FILE = "scores.json"
"""The scores of an adaptation by case, in the adaptation's folder."""

DEPLOYED = Path("server") / "deployed"
"""Where a job keeps the models for sites outside, a file each."""

_COSTS = ("bytes_up", "bytes_down", "seconds")
"""What a round costs a site, as results and the records of rounds call it."""


def _about(job: Job) -> dict[str, Any]:
    """Return the columns that all rows of a job share."""
    return {
        "experiment": job.config.name,
        "algorithm": job.algorithm.label,
        "seed": job.seed,
        "variation": job.variation,
        "fold": job.fold,
        "part": job.part,
    }


def job_rows(
    job: Job,
    records: Sequence[RoundRecord],
    scores: Mapping[str, Mapping[str, list[dict[str, Any]]]],
) -> Iterator[ResultRow]:
    """Yield a row per round, site and measurement, then one per test case, model and metric.

    The round of a test case's row is the one that was selected for the model; beside them is on how
    many patients of the validation cases the choice depends and, with early stopping, after how
    many rounds the training ended.

    Args:
        job: the job.
        records: the records of its rounds.
        scores: its test scores, by site and kind of model, a mapping for each case.
    """
    task, about = task_of(job.config), _about(job)
    for record in records:
        train = {**about, "round": record.round, "split": "train"}
        for site, loss in record.losses.items():
            costs = {name: getattr(record, name)[site] for name in _COSTS}
            yield {**train, "site": site, "metric": "loss", "value": loss, **costs}
        for site, numbers in record.numbers.items():
            for name, number in numbers.items():
                yield {**train, "site": site, "metric": name, "value": number}
        val = {**about, "round": record.round, "split": "val", "metric": task.metric}
        for model, by_site in record.scores.items():
            for site, value in by_site.items():
                yield {**val, "site": site, "model": model, "value": value}
    choices, stopped = choices_of(records), stopped_at(records)
    last = job.config.rounds if stopped is None else stopped + job.config.home_rounds
    for site, by_model in scores.items():
        chosen = choices_at(choices, site, job.config.selection)
        where = {**about, "site": site, "split": SELECTION}
        for name in _COSTS:
            where[name] = sum(getattr(record, name).get(site, 0) for record in records)
        if job.config.early_stopping is not None:
            yield {**where, "round": last, "metric": ROUNDS, "value": last}
        for model, cases in by_model.items():
            own = {**where, "round": chosen[model]["round"], "model": model}
            yield {**own, "metric": EVENTS, "value": chosen[model]["events"]}
            yield from _score_rows(cases, task.units, {**own, "split": "test"})


def outside_rows(job: Job, site: str, adapter: str, folder: Path) -> Iterator[ResultRow]:
    """Yield a row per case and metric of an adaptation.

    Args:
        job: the job.
        site: the site outside.
        adapter: the adapter's label.
        folder: where the scores of the adaptation are stored.
    """
    stored = read_sealed(folder / SCORES_FILE, "remove its folder and resume the run")
    units = task_of(job.config).units
    where = {"site": site, "split": "outside", "model": adapter, "seconds": stored["seconds"]}
    about = {**_about(job), "round": job.config.rounds, **where}
    yield from _score_rows(stored["cases"], units, about)


def cross_site_rows(
    job: Job, site: str, model: str, cases: Sequence[Mapping[str, Any]]
) -> Iterator[ResultRow]:
    """Yield a row per test case and metric of a model that another site may have trained.

    Args:
        job: the job.
        site: the site of the test cases.
        model: which model.
        cases: the scores, a mapping for each case.
    """
    about = {**_about(job), "round": job.config.rounds, "site": site, "model": model}
    yield from _score_rows(cases, task_of(job.config).units, {**about, "split": SPLITS["inside"]})


def _score_rows(
    cases: Sequence[Mapping[str, Any]], units: Mapping[str, str], about: Mapping[str, Any]
) -> Iterator[ResultRow]:
    """Yield a row per case and metric, hidden ones included; and how many cases a mean is of."""
    part = about["part"] if about["split"] == SPLITS["inside"] else 0
    for case in cases:
        named = {name: _named_in(part, case[name]) for name in ("case", "patient")}
        for metric in (key for key in case if key not in NON_SCORE_KEYS):
            unit = units.get(metric, "")
            yield dict(**about, **named, metric=metric, value=case[metric], unit=unit)
    if cases and CASES in cases[0]:
        yield dict(**about, metric=CASES, value=cases[0][CASES], unit="cases")


def _named_in(part: int, pseudonym: str) -> str:
    """Return the pseudonym of a test case or patient; every fold counts its own from 1."""
    return f"fold{part}-{pseudonym}" if part and pseudonym != ALL_CASES else pseudonym


def write_models(run: Run, job: Job, sites: Sequence[str]) -> None:
    """Write the server's models as plain safetensors.

    They are the global one and, under `DEPLOYED` with their settings, those for sites outside the
    federation.

    Args:
        run: the finished run.
        job: the job that trained.
        sites: the sites' names.
    """
    root, best = job.folder, run.best()
    if best is not None:
        export_model(best["model"], root / "server" / "global.safetensors")
    if not (root / DEPLOYED / INDEX_FILE).exists():
        write_settings(root / DEPLOYED / SETTINGS_FILE, job.config, job.algorithm, job.seed)
        write_model_files(root / DEPLOYED, run.deploy(), sites)


def write_model_files(folder: Path, models: Mapping[str, Tensors], sites: Collection[str]) -> None:
    """Write models for sites outside, a file each, and last the index of whose they are.

    Args:
        folder: where they go.
        models: the models by name.
        sites: the names of the sites, whose models are personal ones.
    """
    for name, model in models.items():
        export_model(model, folder / f"{name}.safetensors")
    roles: dict[str, list[str]] = {"server": [], "personal": []}
    for name in sorted(models):
        roles["personal" if name in sites else "server"].append(name)
    write_atomically(folder / INDEX_FILE, seal_json(json.dumps(roles)))


def write_site_models(root: Path, selected: Mapping[str, Tensors | None]) -> None:
    """Write the models that sites use as plain safetensors, each into its own folder.

    Args:
        root: the job's folder.
        selected: the global model that each site uses; None for a method without one.
    """
    for site, global_model in selected.items():
        folder = root / "clients" / site
        for kind, model in ((GLOBAL, global_model), (PERSONAL, KeptModels(folder / KEPT).load())):
            if model is not None:
                export_model(model, folder / f"{kind}.safetensors")


def write_overlays(
    clients: Mapping[str, ClientRuntime],
    selected: Mapping[str, Tensors | None],
    scores: Mapping[str, Any],
    metric: str,
    folder: Path,
) -> None:
    """Draw test cases of every site, with the model that it would use.

    They are its best, median and worst case, and a few that are the same for every method. Only
    segmentations are drawn, and once: the scores of a finished training do not change.

    Args:
        clients: the clients, by site.
        selected: the global model that each site uses; None for a method without one.
        scores: the test scores, by site and kind of model.
        metric: ranks the cases.
        folder: where the pictures go.
    """
    if (folder / INDEX).exists():
        return
    index: list[dict[str, Any]] = []
    drawable = any(isinstance(c.training.task, SegmentationTask) for c in clients.values())
    for site, by_model in sorted(scores.items()) if drawable else ():
        kind = PERSONAL if PERSONAL in by_model else GLOBAL
        model = clients[site].kept() if kind == PERSONAL else selected[site]
        chosen = choose_cases(by_model.get(kind, []), metric)
        if model is None or not chosen:
            continue
        data, about = clients[site].site.test, {"site": site, "model": kind, "metric": metric}
        drawn = clients[site].training.predictions(model, data, only=set(_numbers(chosen)))
        index += _draw_cases(drawn, chosen, about, folder, f"{site}-{kind}-")
    write_index(folder, index)


class PackedPredictions:
    """Predictions of a site's cases, packed, until their scores tell which of them to draw."""

    def __init__(self) -> None:
        self._packed: dict[str, dict[int, tuple[torch.Size, bytes]]] = {}

    def __call__(self, model: str, index: int, prediction: Tensor) -> None:
        """Keep the labels that a model predicts for a case; other predictions are passed over."""
        if not prediction.is_floating_point():
            labels = prediction.cpu().numpy().astype(np.uint16)
            packed = prediction.shape, zlib.compress(labels.tobytes(), level=1)
            self._packed.setdefault(model, {})[index] = packed

    def __getitem__(self, index: int) -> Tensor:
        """Return the labels of a case."""
        (of_model,) = self._packed.values()
        shape, packed = of_model[index]
        labels = np.frombuffer(zlib.decompress(packed), np.uint16).reshape(shape)
        return torch.from_numpy(labels.astype(np.int64))

    def __bool__(self) -> bool:
        """Whether there is one prediction of each case, and not one of each of several models."""
        return len(self._packed) == 1


def write_outside_overlays(
    kept: PackedPredictions,
    data: Dataset,
    scores: Sequence[Mapping[str, Any]],
    about: Mapping[str, str],
    metric: str,
    folder: Path,
) -> None:
    """Draw cases of a site outside, chosen as `write_overlays` chooses.

    Args:
        kept: the predictions; without any, or with those of several models, nothing is drawn.
        data: all cases of the site.
        scores: by case.
        about: the site and, as model, the adapter.
        metric: ranks the cases.
        folder: where to write; what an earlier adaptation left there goes.
    """
    shutil.rmtree(folder, ignore_errors=True)
    chosen = choose_cases(scores, metric) if kept else {}
    drawn = ((number, data.example(number), kept[number]) for number in _numbers(chosen))
    index = [*_draw_cases(drawn, chosen, {**about, "metric": metric}, folder)]
    write_index(folder, index)


def _numbers(cases: Iterable[str]) -> dict[int, str]:
    """Number in the data set, from 0 -> pseudonym, which counts from 1."""
    return {int(case.rpartition("c")[2]) - 1: case for case in cases}


def _draw_cases(
    cases: Iterable[tuple[int, Example, Tensor]],
    chosen: Mapping[str, tuple[str, float | None]],
    about: Mapping[str, str],
    folder: Path,
    prefix: str = "",
) -> Iterator[dict[str, Any]]:
    """Draw one plane of each case, and yield its entry in the index."""
    names = _numbers(chosen)
    folder.mkdir(parents=True, exist_ok=True)
    for number, example, prediction in cases:
        case, stem = names[number], f"{prefix}{names[number]}"
        planes = prepare_case(*plane_of(example, prediction))
        (folder / f"{stem}.png").write_bytes(encode_png(draw_overlay(planes)))
        files = {}
        for name, picture in draw_layers(planes).items():
            content, kind = encode_for_web(picture)
            files[name] = f"{stem}-{name}.{kind}"
            (folder / files[name]).write_bytes(content)
        rank, value = chosen[case]
        named = {"case": case, "rank": rank, "value": value}
        yield {**about, **named, "file": f"{stem}.png", "layers": files}


def plane_of(example: Example, prediction: Tensor) -> tuple[Array, Array, Array, Array | None]:
    """Return a plane of a case: image (C, H, W), label, prediction and field of view (H, W).

    Of a volume, or of a stack of slices, it is the slice with most foreground; if the axes are the
    patient's, the first runs to the right and the second up, as front or head do. The field of view
    is None if there is none.

    Args:
        example: the case.
        prediction: its labels, (B, *spatial).
    """
    tensors = {**example.batch, "image": example.image, "prediction": prediction}
    arrays: dict[str, Array] = {key: tensor.cpu().numpy() for key, tensor in tensors.items()}
    volume = arrays["image"].ndim == 5
    if volume:
        arrays = {key: np.moveaxis(values[0], -1, 0) for key, values in arrays.items()}
    if volume or len(example.spacing or ()) > arrays["image"].ndim - 2:
        arrays = {key: np.rot90(values, axes=(-2, -1)) for key, values in arrays.items()}
    shown = np.maximum(arrays["label"] > 0, arrays["prediction"] > 0)
    areas = shown.reshape(len(shown), -1).sum(1)
    place = int(areas.argmax()) if areas.any() else len(areas) // 2
    image, label, guess = (arrays[key][place] for key in ("image", "label", "prediction"))
    return image, label, guess, arrays["mask"][place] if "mask" in arrays else None
