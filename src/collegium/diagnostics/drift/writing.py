"""Writes the drift of features as numbers and as a page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

import pandas as pd

from collegium import __version__
from collegium.core.files import write_atomically
from collegium.diagnostics.drift.measurement import Drift, RoundDrift, Split, measure_drift
from collegium.evaluation.report.drift import render
from collegium.evaluation.results import frame_to_csv
from collegium.experiment.config.experiment import ExperimentConfig
from collegium.experiment.jobs import Observer

FOLDER = "drift"
"""The folder in the output folder of an experiment."""

COLUMNS = [
    "experiment", "algorithm", "seed", "round", "what", "site", "other", "distance", "windows",
    "other_windows", "patients", "other_patients",
]  # fmt: skip
"""Of ``drift.csv``. ``what`` is "training", the drift at a site, or "sites", for two of them."""


def write_drift(
    config: ExperimentConfig,
    rounds: Sequence[int] | None = None,
    *,
    limit: int = 64,
    split: Split = "val",
    observe: Observer = lambda event: None,
) -> Path:
    """Measure the drift, and write ``drift.csv``, ``drift.json`` and ``drift.html``.

    They are written into the folder ``drift`` of the experiment's output folder.
    See `measure_drift` for the arguments.

    Returns:
        The path of the page.

    Raises:
        StorageError: a file cannot be written.
        CollegiumError: what `measure_drift` raises.
    """
    drift = measure_drift(config, rounds, limit=limit, split=split, observe=observe)
    folder = Path(config.output) / FOLDER
    data = {"collegium": __version__, **asdict(drift)}
    write_atomically(folder / "drift.csv", to_csv(drift).encode())
    write_atomically(folder / "drift.json", json.dumps(data, indent=1).encode())
    page = folder / "drift.html"
    write_atomically(page, render(data).encode())
    return page


def to_csv(drift: Drift) -> str:
    """Return a line per distance, with every digit."""
    lines = [
        [drift.experiment, moment.algorithm, drift.seed, moment.round, *line]
        for moment in drift.moments
        for line in _lines(moment)
    ]
    return frame_to_csv(pd.DataFrame(lines, columns=COLUMNS))


def _lines(moment: RoundDrift) -> Iterator[list[Any]]:
    windows, patients = moment.windows, moment.patients
    for site, distance in moment.drift.items():
        yield ["training", site, "", distance, windows[site], "", patients[site], ""]
    for (i, site), (j, other) in combinations(enumerate(windows), 2):
        counts = windows[site], windows[other], patients[site], patients[other]
        yield ["sites", site, other, moment.between[i][j], *counts]
