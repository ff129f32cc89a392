"""Distances between sites against scores, over several federations (distance-aware averaging).

Alekseenko et al., MIDL 2024, Table 1: federations in which sites lie farther apart have lower Dice.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd

from collegium.errors import ConfigError, DataError
from collegium.evaluation.results import labels_of, read_description, read_results
from collegium.evaluation.scores import headline_metric
from collegium.evaluation.tables import method_table
from collegium.heterogeneity.distances import federation_value

Distance = Literal["metadata", "normalised", "embeddings"]

DISTANCES: Mapping[Distance, str] = {
    "metadata": "EMD_max",
    "normalised": "EMD_max over spread",
    "embeddings": "EUC",
}
"""The columns of the distances of `collegium assess`."""

FEWEST = 3
"""With fewer federations there is no correlation: that of two is always 1 or -1."""

ASSESSMENT = Path("assessment") / "assessment.json"
"""The file of an assessment in the folder of a run."""


@dataclass(frozen=True)
class Correlation:
    """The correlation of a method's score with the distance of the sites, over federations.

    Attributes:
        method: The method.
        federations: How many federations have both numbers.
        pearson: Pearson's coefficient; None if it is undefined.
        spearman: Spearman's coefficient; None if it is undefined.
        why: Why they are undefined; empty if they are not.
    """

    method: str
    federations: int
    pearson: float | None
    spearman: float | None
    why: str = ""

    def __str__(self) -> str:
        if self.why:
            return f"{self.method}: no correlation, {self.why}."
        return (
            f"{self.method}: Pearson {self.pearson:.3f}, Spearman {self.spearman:.3f}, over "
            f"{self.federations} federations."
        )


@dataclass(frozen=True, eq=False)
class FederationsTable:
    """Federations by the distance of their sites and the scores of methods.

    Attributes:
        metric: What was scored.
        distance: The name of the column of distances.
        methods: The methods, as named in the columns.
        rows: A row for each federation: federation, sites (how many), the distance, and for each
            method the mean over sites and seeds, NaN if a site has no score.
        correlations: One for each method.
        notes: Sentences on what limits a comparison.
    """

    metric: str
    distance: str
    methods: tuple[str, ...]
    rows: pd.DataFrame
    correlations: tuple[Correlation, ...]
    notes: tuple[str, ...]


def correlate_runs(
    runs: Sequence[Path], metric: str = "", by: Distance = "metadata"
) -> FederationsTable:
    """Return the distances and scores of the federations of several runs, and their correlation.

    The distance of a federation is the mean over all pairs of its sites (`federation_value`) of the
    matrix that its assessment holds. A score is the mean over sites and seeds, as in the tables of
    a run.

    Args:
        runs: The folders of finished runs, each with the assessment of its sites.
        metric: Which metric; by default that of the first run's tables.
        by: The distances.

    Raises:
        ConfigError: A run is given twice, or there are no such distances.
        DataError: A run has no assessment, no such distances in it, or no such score.
    """
    if by not in get_args(Distance):
        raise ConfigError(f"by is {by!r}; choose one of {', '.join(get_args(Distance))}")
    if len({run.resolve() for run in runs}) < len(runs):
        raise ConfigError("a run is given twice; give the run of each federation once")
    found, notes, units = [], [], set()
    for run in runs:
        assessment, results = _read_assessment(run), read_results(run)
        metric = metric or headline_metric(results)
        geometry = _geometry(run, assessment, by)
        scores = _averages(run, results, metric)
        units.add(tuple(sorted({c["unit"] for c in assessment["findings"]["labels"]})))
        absent = sorted(set(assessment["sites"]) - set(geometry["sites"]))
        name = str(assessment["federation"])
        if absent:
            notes.append(f"The distance of {name} is without {', '.join(absent)}.")
        value = federation_value(geometry["matrix"])
        found.append((run, name, len(geometry["sites"]), value, scores))
    if by == "metadata" and len(units) > 1:
        notes.append(
            "The federations measure labels in different units, so that their distances do not "
            "compare; --by normalised does."
        )
    methods = tuple(dict.fromkeys(name for *_, scores in found for name in scores))
    names, column = Counter(name for _, name, *_ in found), DISTANCES[by]
    rows = pd.DataFrame([
        {
            "federation": name if names[name] == 1 else f"{name} ({run})",
            "sites": count,
            column: value,
            **{method: scores.get(method, float("nan")) for method in methods},
        }
        for run, name, count, value, scores in found
    ])  # fmt: skip
    correlations = tuple(_correlation(rows, column, method) for method in methods)
    return FederationsTable(metric, column, methods, rows, correlations, tuple(notes))


def _read_assessment(run: Path) -> Any:
    """Return the assessment of a run's sites."""
    path = run / ASSESSMENT
    if not path.is_file():
        source = f"output={run}" if read_description(run) else "its output folder"
        raise DataError(
            f"{run} has no {ASSESSMENT}; assess its sites first: collegium assess CONFIG {source}"
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return {key: data[key] for key in ("federation", "sites", "findings")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}: the assessment cannot be read ({error}); make it again"
        ) from error


def _geometry(run: Path, assessment: Mapping[str, Any], by: Distance) -> Mapping[str, Any]:
    """Return the distances of one kind between a run's sites."""
    geometries = assessment["findings"]["geometries"]
    found: Mapping[str, Any] | None = next((g for g in geometries if g["key"] == by), None)
    if found is None:
        raise DataError(
            f"{run / ASSESSMENT} holds no distances by {by}, which two sites have to tell; choose "
            f"other distances, or leave the run out"
        )
    return found


def _averages(run: Path, results: pd.DataFrame, metric: str) -> dict[str, float]:
    """Return the mean of a metric over sites and seeds, by method."""
    order = labels_of(read_description(run), results).order
    averages = method_table(results, metric, order).averages
    if not averages:
        raise DataError(
            f"{run} holds no {metric} of test cases inside; finish the run, or choose --metric"
        )
    return {cell.method: float(cell.mean) for cell in averages.values()}


def _correlation(rows: pd.DataFrame, distance: str, method: str) -> Correlation:
    """Correlate one method's scores with the distances, over the federations that have both."""
    from scipy import stats

    both = rows[[distance, method]].dropna()
    count = len(both)
    if count < FEWEST:
        why = f"which takes {FEWEST} federations or more with a score, and there are {count}"
        return Correlation(method, count, None, None, why)
    x, y = (both[name].to_numpy().round(12) for name in (distance, method))  # equal ones tie
    if any(np.ptp(values) == 0 for values in (x, y)):
        return Correlation(method, count, None, None, "as all distances or all scores are equal")
    pearson, spearman = stats.pearsonr(x, y), stats.spearmanr(x, y)
    return Correlation(method, count, float(pearson.statistic), float(spearman.statistic))
