"""What a tracking store is told of an experiment: settings, numbers and files.

Nothing of it says where files lie on this machine, or names a user.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from collegium.core.payloads import GLOBAL, OTHER_GLOBAL, PERSONAL
from collegium.evaluation.results import SELECTION
from collegium.evaluation.scores import SPLITS, rows_of
from collegium.experiment.config.building import adapters_of
from collegium.experiment.config.experiment import ExperimentConfig, to_dict
from collegium.experiment.config.schema import flat
from collegium.experiment.grid import Job
from collegium.experiment.job_results import DEPLOYED
from collegium.experiment.jobs import Event
from collegium.tasks import is_hidden

if TYPE_CHECKING:
    import pandas as pd

TOTAL = "total"
"""Begins the metrics that are sums over all sites."""

OUTSIDE = ("outside/", "mean/outside/")
"""Begin the metrics of sites outside; they change where an adapter is given other settings."""

EXTENDED = frozenset({"algorithms", "seeds", "variations", "adapters"})
"""The settings by which a run may be extended."""

LONGEST_NAME, LONGEST_VALUE = 250, 6000
"""How many characters MLflow keeps of a name, and of a parameter's value."""


class Point(NamedTuple):
    """One number of a metric.

    Attributes:
        name: The metric without its site, such as ``val/dice``.
        site: The site; empty for a number of all sites together.
        step: The round.
        value: The number.
    """

    name: str
    site: str
    step: int
    value: float


def points_of_event(event: Event) -> list[Point]:
    """Return the numbers of a round that has just ended."""
    step = event.round
    totals = {"bytes_up": event.bytes_up, "bytes_down": event.bytes_down, "seconds": event.seconds}
    return [
        *(Point("train/loss", site, step, loss) for site, loss in event.losses.items()),
        *(Point(f"val/{event.metric}", site, step, v) for site, v in event.scores.items()),
        *(Point(f"{TOTAL}/{name}", "", step, float(value)) for name, value in totals.items()),
    ]


def points_of_rows(results: pd.DataFrame) -> list[Point]:
    """Return the numbers of a finished job: those of all rounds, and each site's mean test scores.

    Scores of the model that a site uses, its personal one where there is one, stand under
    ``val/<metric>`` and ``test/<metric>``, and on how many patients the choice of its round depends
    under ``selection/events``; those of the global model beside it under ``val/global/<metric>``,
    and of the global model of the round that was chosen otherwise under
    ``test/global by federation/<metric>``; those of an adapter at a site outside under
    ``outside/<adapter>/<metric>``. The step of a test score is the last round.
    """
    values: dict[tuple[str, str, int], list[float]] = {}
    totals: dict[tuple[str, int], float] = {}
    rows = rows_of(results)
    last, test = max((row.round for row in rows), default=0), SPLITS["inside"]
    steps = [last if row.split == test else row.round for row in rows]
    scored = [(r.split, r.split not in (test, SELECTION) and r.round) for r in rows]
    personal = {place for row, place in zip(rows, scored, strict=True) if row.model == PERSONAL}
    for row, step, place in zip(rows, steps, scored, strict=True):
        beside = row.model == GLOBAL and place in personal
        beside |= row.model in OTHER_GLOBAL.values() or row.split == "outside"
        kind = f"{row.model}/" if beside else ""
        if not math.isnan(row.value) and not is_hidden(row.metric):
            name = f"{row.split}/{kind}{row.metric}"
            values.setdefault((name, row.site, step), []).append(row.value)
        if row.split == "train" and row.metric == "loss":
            for name in ("bytes_up", "bytes_down", "seconds"):
                number = float(getattr(row, name))
                values[name, row.site, row.round] = [number]
                totals[name, row.round] = totals.get((name, row.round), 0.0) + number
    return [
        *(Point(*about, fmean(found)) for about, found in values.items()),
        *(Point(f"{TOTAL}/{name}", "", step, value) for (name, step), value in totals.items()),
    ]


def metrics_of(points: Iterable[Point]) -> dict[tuple[str, int], float]:
    """Return the numbers by MLflow's name and step, and the means of losses and scores over sites.

    A number that is not finite is left out.
    """
    metrics: dict[tuple[str, int], float] = {}
    by_name: dict[tuple[str, int], list[float]] = {}
    for point in points:
        if not math.isfinite(point.value):
            continue
        metrics[mlflow_name(point.name, point.site), point.step] = point.value
        if point.site and "/" in point.name:
            by_name.setdefault((point.name, point.step), []).append(point.value)
    means = {(mlflow_name("mean", n), step): fmean(v) for (n, step), v in by_name.items()}
    return metrics | means


def mlflow_name(*parts: str) -> str:
    """Join the parts of a name by slashes, with characters that MLflow allows in it only.

    Others become colons, which no name of a site or label holds.
    """
    words = [word for part in parts for word in part.split("/") if word.strip(".")]
    return re.sub(r"[^/\w.\- ]", ":", "/".join(words))[:LONGEST_NAME]


def settings_of(config: ExperimentConfig) -> dict[str, Any]:
    """Return the configuration without the places of data and code on this machine."""
    data = to_dict(config)
    data.pop("output")
    data.pop("tracking", None)
    data["federation"].pop("root")
    return dict(_without_places(data))


def fixed_settings(config: ExperimentConfig) -> dict[str, Any]:
    """Return the settings that stay as they are when a run is extended or resumed."""
    data = {key: value for key, value in settings_of(config).items() if key not in EXTENDED}
    data["engine"] = {k: v for k, v in data["engine"].items() if k not in ("workers", "jobs")}
    return data


def fixed_settings_of_job(job: Job) -> dict[str, Any]:
    """Return the same of a job, with its one algorithm and seed."""
    data = fixed_settings(job.config)
    del data["name"]
    algorithm = _without_places(job.algorithm.to_dict())
    for key in ("adapters", "training"):  # the job's training is the algorithm's
        algorithm.pop(key, None)
    about = {"seed": job.seed, "variation": job.variation, "left_out": job.left_out}
    if job.part:
        about["fold"] = job.part
    return {**data, "algorithm": algorithm, **about}


def tags_of(config: ExperimentConfig) -> dict[str, str]:
    """Return what an experiment is extended by, as tags, which unlike parameters may change."""
    names: dict[str, Iterable[object]] = {
        "algorithms": (algorithm.label for algorithm in config.algorithms),
        "seeds": config.seeds,
        "variations": config.variations,
        "adapters": (adapter.label for adapter in config.adapters),
    }
    return {f"collegium.{key}": ", ".join(map(str, found)) for key, found in names.items()}


def tags_of_job(job: Job, holder: Job) -> dict[str, str]:
    """Return a job's adapters with their settings, and the job that holds its models, as tags.

    Args:
        job: The job.
        holder: The job that holds its training.
    """
    tags = {"collegium.trained_by": holder.name} if holder is not job else {}
    for adapter in adapters_of(job.config, job.algorithm):
        about = _without_places({"name": adapter.name, **adapter.params})
        tags[mlflow_name(f"adapter.{adapter.label}")] = json.dumps(about)
    return tags


def parameters_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return every leaf of the settings as text, under its dotted key."""
    leaves = {mlflow_name(key): json.loads(text) for key, text in flat(dict(settings)).items()}
    texts = {key: v if isinstance(v, str) else json.dumps(v) for key, v in leaves.items()}
    return {key: text[:LONGEST_VALUE] for key, text in texts.items()}


def _without_places(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_places(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_places(inner) for inner in value]
    return without_place(value) if isinstance(value, str) else value


def without_place(text: str) -> str:
    """Return the last part of a text that is the path to something; another text as it is."""
    for kind in (PurePosixPath, PureWindowsPath):
        if kind(text).is_absolute() or text.startswith(("~", "$", "..")):
            return kind(text).name
    return text


def page_for_a_server(output: Path, config: ExperimentConfig) -> str:
    """Return the report without patients' images and without any path on this machine.

    Args:
        output: The run's folder.
        config: The experiment.
    """
    from collegium.evaluation.report.html import render
    from collegium.evaluation.report.ledgers import ledger_summaries
    from collegium.evaluation.report.reading import read_run_output

    run = read_run_output(output)
    shown = replace(
        run,
        info={**run.info, "config": settings_of(config)},
        accounts=_without_places(run.accounts),
        assessment=_without_places(run.assessment),
    )
    return render(shown, [], ledger_summaries(output))


def models_of(folder: Path) -> Sequence[Path]:
    """Return the models of a job that may leave: what its sites share, and the global one.

    With them go the files that say how they are used. A site's personal model that the site's
    policy keeps lies elsewhere, and stays there.
    """
    deployed = sorted((folder / DEPLOYED).iterdir()) if (folder / DEPLOYED).is_dir() else []
    selected = folder / "server" / "global.safetensors"
    if selected.exists() and selected.name not in {file.name for file in deployed}:
        return [selected, *deployed]
    return deployed
