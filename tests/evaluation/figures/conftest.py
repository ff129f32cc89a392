"""Results of runs to make figures of."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collegium.evaluation.figures.data import Figure
from collegium.evaluation.figures.source import FigureSource
from collegium.evaluation.results import results_frame, write_results

SITES = ("north", "south")
MODELS = {"local": "personal", "fedavg": "global", "ditto": "personal"}
CASES = 8


def sweep_rows(seeds: int = 3, settings: tuple[str, ...] = ("lam 0.1", "lam 1")) -> list[Any]:
    """Random scores and losses; the settings differ in Ditto alone."""
    rows = []
    for place, setting in enumerate(settings):
        for algorithm, model in MODELS.items():
            for seed in range(seeds):
                shift = place if algorithm == "ditto" else 0
                rng = np.random.default_rng([len(algorithm), seed, shift])
                for site in SITES:
                    about = {"experiment": "e", "algorithm": algorithm, "seed": seed,
                             "site": site, "variation": setting}  # fmt: skip
                    rows += rounds(about, model, rng)
                    rows += [
                        {**about, "case": f"c{k}", "patient": f"p{k}", "round": 4, "split": "test",
                         "model": model, "metric": "dice", "value": rng.uniform(0.4, 0.9)}
                        for k in range(CASES)
                    ]  # fmt: skip
    return rows


def rounds(about: dict[str, Any], model: str, rng: np.random.Generator) -> list[Any]:
    size = {"local": 10, "fedavg": 2000, "ditto": 2000}[about["algorithm"]]
    rows = []
    for number in range(1, 5):
        row = {**about, "round": number}
        rows.append({**row, "split": "train", "metric": "loss", "value": rng.uniform(0.2, 0.8),
                     "bytes_up": size, "bytes_down": 2 * size})  # fmt: skip
        rows.append({**row, "split": "val", "model": model, "metric": "dice",
                     "value": rng.uniform(0.4, 0.9)})  # fmt: skip
    return rows


CONFIG = {
    "name": "e",
    "algorithms": [{"name": "local"}, {"name": "fedavg"}, {"name": "ditto", "lam": 0.5}],
    "federation": {"sites": {"north": {}, "south": {}}},
    "variations": {"lam 0.1": {"algorithms.2.lam": 0.1}, "lam 1": {"algorithms.2.lam": 1.0}},
}


def write_run(folder: Path, rows: list[Any], config: dict[str, Any] | None = None) -> Path:
    """Write a run's output folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_results(results_frame(rows), folder)
    (folder / "run.json").write_text(json.dumps({"config": config or CONFIG}))
    return folder


@pytest.fixture
def source_of(tmp_path: Path) -> Callable[..., FigureSource]:
    """A function from rows, and perhaps a configuration, to what figures are made of."""

    def make(rows: list[Any], config: dict[str, Any] | None = None) -> FigureSource:
        return FigureSource.read(write_run(tmp_path / "run", rows, config))

    return make


@pytest.fixture
def swept(source_of: Callable[..., FigureSource]) -> tuple[list[Any], FigureSource]:
    """The rows of a sweep of three seeds, and what figures are made of."""
    rows = sweep_rows()
    return rows, source_of(rows)


@pytest.fixture
def values() -> Callable[..., list[float]]:
    """A function that picks the values of rows by their columns."""

    def pick(rows: list[Any], **wanted: Any) -> list[float]:
        whole = [{"variation": "", "model": "", "case": "", **row} for row in rows]
        return [r["value"] for r in whole if all(r[key] == v for key, v in wanted.items())]

    return pick


@pytest.fixture
def by_name() -> Callable[..., dict[str, Figure]]:
    """A function from a family and its source to the figures by name."""
    return lambda family, source: {figure.name: figure for figure in family(source)}
