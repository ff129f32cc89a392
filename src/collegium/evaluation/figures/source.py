"""What figures are made of: the results of a run, its settings, and the looks of its methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from collegium.errors import DataError
from collegium.evaluation.arms import SOURCES
from collegium.evaluation.comparisons import RunComparisons
from collegium.evaluation.figures.data import Look
from collegium.evaluation.results import (
    labels_of,
    list_settings,
    read_description,
    read_results,
    verdict_settings,
)
from collegium.evaluation.scores import METHOD, MethodKey, Where, group_means, headline_metric
from collegium.evaluation.selection import used_models
from collegium.evaluation.sent_estimates import read_estimates
from collegium.evaluation.timing import read_accounts

if TYPE_CHECKING:
    import pandas as pd

_OF_SETS = ("ece",)  # and those of `SOURCES`, whose values at a case are parts of that of the set

LEAST_DISTINCT = 3
"""Scores of single cases take at least as many values; those of sets of cases or of hits do not."""


@dataclass(frozen=True, eq=False)
class FigureSource:
    """The content of a run's output folder that figures are made of.

    Attributes:
        output: The folder.
        info: The content of ``run.json``.
        compared: The results of all settings, with all that comparisons are made of.
        settings: The settings of a sweep as configured; ``("",)`` outside a sweep.
        metric: The headline metric.
    """

    output: Path
    info: Mapping[str, Any]
    compared: RunComparisons
    settings: tuple[str, ...]
    metric: str

    @classmethod
    def read(cls, output: Path) -> Self:
        """Read it from the output folder of an experiment, finished or not.

        Args:
            output: The folder.

        Raises:
            DataError: There is no run, there are no results, or a file cannot be read.
        """
        info, results = read_description(output), read_results(output)
        if results.empty:
            raise DataError(
                f"{output}: no results to draw yet; give the output folder of a run, or run the "
                "experiment first."
            )
        compared = RunComparisons(
            results, labels_of(info, results), verdict_settings(info), read_estimates(output)
        )
        settings = list_settings(info, results) or ("",)
        return cls(output, info, compared, settings, headline_metric(results))

    @property
    def results(self) -> pd.DataFrame:
        """The table of results, of all settings."""
        return self.compared.results

    @property
    def order(self) -> tuple[str, ...]:
        """Labels of the algorithms, in the order that gives colours."""
        return self.compared.labels.order

    @property
    def swept(self) -> bool:
        """Whether the run has several settings."""
        return self.settings != ("",)

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration of the experiment, empty if unknown."""
        return dict(self.info.get("config", {}))

    @cached_property
    def used(self) -> pd.DataFrame:
        """The results without models that take no part in answers, see `used_models`."""
        return used_models(self.results)

    @cached_property
    def accounts(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """Setting -> what adapters did at sites outside."""
        return {name: read_accounts(self.output, name) for name in self.settings}

    def look(self, key: MethodKey, where: Where = "inside") -> Look:
        """Return the look of a method, whose colour and marker are those of the report.

        Args:
            key: The method.
            where: Whether it was scored inside; outside the adapters of one algorithm differ in
                their markers.
        """
        algorithm, model = key
        place = self.order.index(algorithm) if algorithm in self.order else len(self.order)
        if where == "inside":
            return Look(place, place, model == "personal")
        adapters = self.results.loc[self.results["split"] == "outside", "model"].unique().tolist()
        return Look(place, adapters.index(model) if model in adapters else place)


def suffix(*parts: str) -> str:
    """Return what tells a figure's name from others: the parts that are there, with hyphens."""
    return "".join(f"-{part}" for part in parts if part)


def of_single_cases(scores: pd.DataFrame) -> list[str]:
    """Return the metrics that vary from case to case, in the order of the table.

    Metrics of a set of cases, as the area under the ROC curve, stand at every case alike, and hits
    are 0 or 1: their distributions say nothing.

    Args:
        scores: Scores of single test cases.
    """
    trained = ["metric", *METHOD, "variation", "seed", "fold", "part", "site"]
    own = scores[~scores["metric"].isin([*SOURCES, *_OF_SETS])]
    distinct = own.groupby(trained, sort=False)["value"].nunique()
    most = distinct.groupby(level="metric", sort=False).max()
    return [str(name) for name, count in most.items() if count >= LEAST_DISTINCT]


def mean_of_trainings(scores: pd.DataFrame) -> pd.DataFrame:
    """Return the score of every case, mean over seeds and folds.

    A case without a defined score in one of its trainings is left out, as in comparisons.

    Args:
        scores: Scores of single test cases, of one metric.

    Returns:
        Columns variation, site, algorithm, model, case and value.
    """
    by = ["variation", "site", *METHOD, "case"]
    undefined = scores["value"].isna().groupby([scores[name] for name in by]).transform("any")
    return group_means(scores[~undefined], by)
