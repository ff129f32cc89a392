"""What a finished cell leaves behind: rows of the tidy table, models, pictures of test cases."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from collegium.client import BEST, ClientRuntime
from collegium.config import ExperimentConfig
from collegium.data.dataset import Example
from collegium.errors import ConfigError
from collegium.grid import Cell
from collegium.models.files import export_model
from collegium.report.overlays import choose_cases, draw_layers, draw_overlay
from collegium.results import Row
from collegium.run import Run
from collegium.state import Store, write_atomically
from collegium.tasks import SegmentationTask, Task

ACCOUNT_FILE = "account.json"
"""What an adaptation did, in the adaptation's folder."""

SCORES_FILE = "scores.json"
"""The scores of an adaptation by case, in the adaptation's folder."""

DEPLOYED = Path("server") / "deployed"
"""Where a cell keeps the models for sites outside, a file each."""

INDEX = "index.json"
"""The file beside them that names them all; written last."""


def task_of(config: ExperimentConfig) -> Task:
    """Return the task that the configuration describes."""
    kind = config.federation.task
    if kind.name != "segmentation":
        raise ConfigError(f"federation.task.name is {kind.name!r}; this version knows segmentation")
    return SegmentationTask(
        kind.classes, config.loss, window=config.inference.window, overlap=config.inference.overlap
    )


def _about(cell: Cell) -> dict[str, Any]:
    """What all rows of a cell say."""
    return {
        "experiment": cell.config.name,
        "algorithm": cell.algorithm.label,
        "seed": cell.seed,
        "variation": cell.variation,
        "fold": cell.fold,
    }


def cell_rows(
    cell: Cell, run: Run, scores: Mapping[str, Mapping[str, list[dict[str, Any]]]]
) -> Iterator[Row]:
    """Yield a row per round, site and measurement, then one per test case, model and metric."""
    task, about = task_of(cell.config), _about(cell)
    records = run.records()
    for record in records:
        for site, loss in record.losses.items():
            yield Row(
                **about,
                round=record.round,
                site=site,
                split="train",
                metric="loss",
                value=loss,
                bytes_up=record.bytes_up[site],
                bytes_down=record.bytes_down[site],
                seconds=record.seconds[site],
            )
        for site, numbers in record.numbers.items():
            for name, number in numbers.items():
                yield Row(
                    **about,
                    round=record.round,
                    site=site,
                    split="train",
                    metric=name,
                    value=number,
                )
        for model, by_site in record.scores.items():
            for site, value in by_site.items():
                yield Row(
                    **about,
                    round=record.round,
                    site=site,
                    split="val",
                    model=model,
                    metric=task.metric,
                    value=value,
                )
    totals: dict[str, Any] = {
        site: {
            "bytes_up": sum(record.bytes_up.get(site, 0) for record in records),
            "bytes_down": sum(record.bytes_down.get(site, 0) for record in records),
            "seconds": sum(record.seconds.get(site, 0.0) for record in records),
        }
        for site in scores
    }
    last = max(record.round for record in records)
    for site, by_model in scores.items():
        for model, cases in by_model.items():
            for case in cases:
                for metric in (key for key in case if key not in ("case", "patient")):
                    yield Row(
                        **about,
                        **totals[site],
                        round=last,
                        site=site,
                        case=case["case"],
                        patient=case["patient"],
                        split="test",
                        model=model,
                        metric=metric,
                        value=case[metric],
                        unit=task.units[metric],
                    )


def outside_rows(cell: Cell, site: str, adapter: str, folder: Path) -> Iterator[Row]:
    """Yield a row per case and metric of an adaptation whose scores are stored in a folder."""
    stored = json.loads((folder / SCORES_FILE).read_text(encoding="utf-8"))
    units = task_of(cell.config).units
    for case in stored["cases"]:
        for metric in (key for key in case if key not in ("case", "patient")):
            yield Row(
                **_about(cell),
                round=cell.config.rounds,
                site=site,
                case=case["case"],
                patient=case["patient"],
                split="outside",
                model=adapter,
                metric=metric,
                value=case[metric],
                unit=units[metric],
                seconds=stored["seconds"],
            )


def write_models(run: Run, root: Path, sites: Sequence[str]) -> None:
    """Write the selected models as plain safetensors.

    The server's are the global one and, under `DEPLOYED`, those for sites outside the federation;
    each site's personal one stays at the site.

    Args:
        run: the finished run.
        root: the cell's folder.
        sites: the sites' names.
    """
    selected = run.best()
    if selected:
        export_model(selected["model"], root / "server" / "global.safetensors")
    if not (root / DEPLOYED / INDEX).exists():
        models = run.deploy()
        for name, model in models.items():
            export_model(model, root / DEPLOYED / f"{name}.safetensors")
        write_atomically(root / DEPLOYED / INDEX, json.dumps(sorted(models)).encode())
    for site in sites:
        kept = Store(root / "clients" / site)
        if kept.path(BEST).exists():
            export_model(kept.load(BEST)["model"], kept.root / "personal.safetensors")


def write_overlays(
    clients: Mapping[str, ClientRuntime],
    run: Run,
    scores: Mapping[str, Any],
    metric: str,
    folder: Path,
) -> None:
    """Draw test cases of every site, with the model that it would use.

    They are its best, median and worst case, and a few that are the same for every method.
    """
    index = []
    selected = run.best()
    for site, by_model in sorted(scores.items()):
        kind = "personal" if "personal" in by_model else "global"
        model = clients[site].best() if kind == "personal" else (selected or {}).get("model")
        chosen = choose_cases(by_model.get(kind, []), metric)
        if model is None or not chosen:
            continue
        numbers = {int(case.rpartition("c")[2]) - 1: case for case in chosen}
        for number, example, prediction in clients[site].training.predictions(
            model, clients[site].site.test, only=set(numbers)
        ):
            case = numbers[number]
            rank, value = chosen[case]
            files = _draw(example, prediction, folder, f"{site}-{kind}-{case}")
            index.append({
                "site": site, "model": kind, "rank": rank, "case": case, "metric": metric,
                "value": value, **files,
            })  # fmt: skip
    write_atomically(folder / "index.json", json.dumps(index).encode())


def _draw(example: Example, prediction: Tensor, folder: Path, stem: str) -> dict[str, Any]:
    """Draw the middle slice of a case, and return the names of the files."""
    slice_ = len(prediction) // 2
    keys = [key for key in ("image", "label", "mask") if key in example.batch]
    planes = {key: example.batch[key][slice_].cpu().numpy() for key in keys}
    guess = prediction[slice_].cpu().numpy()
    case = planes["image"], planes["label"], guess, planes.get("mask")
    layers = draw_layers(*case)
    pictures = {f"{stem}.png": draw_overlay(*case)}
    pictures |= {f"{stem}-{name}.png": picture for name, picture in layers.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        picture.save(folder / name)
    return {"file": f"{stem}.png", "layers": {name: f"{stem}-{name}.png" for name in layers}}
