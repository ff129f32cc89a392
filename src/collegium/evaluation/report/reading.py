"""Read the output folder of a run for its report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collegium.errors import DataError
from collegium.evaluation.comparisons import RunComparisons
from collegium.evaluation.cross_site import read_cross_site
from collegium.evaluation.report.distances import MethodDistances, read_method_distances
from collegium.evaluation.results import (
    AlgorithmLabels,
    labels_of,
    list_settings,
    read_description,
    read_results,
    results_frame,
    verdict_settings,
)
from collegium.evaluation.scores import headline_metric
from collegium.evaluation.sent_estimates import NOTHING_SENT, SentEstimates, read_estimates
from collegium.evaluation.timing import read_accounts

if TYPE_CHECKING:
    import pandas as pd

ASSESSMENTS = (Path("assessment") / "assessment.json", Path("assessment.json"))
"""The places of an assessment of the federation, relative to the output folder."""


@dataclass(frozen=True, eq=False)
class RunOutput:
    """The content of the output folder of a run, without pictures and ledgers.

    Attributes:
        info: The content of ``run.json``.
        results: The table of results; of a sweep, the rows of the setting that the report is about.
        labels: The labels of the algorithms.
        metric: The headline metric, the one that selects models on validation.
        setting: The setting of the sweep that the report is about; empty outside a sweep.
        settings: All settings of the sweep.
        sweep: The rows of all settings; None outside a sweep.
        accounts: The content of every ``account.json`` of the setting.
        assessment: The content of ``assessment.json``, or None.
        distances: Name of a method -> the distances between sites that it used.
        cross_site: The scores of personal models at every site.
        sent: The estimates of sites that keep the scores of their patients.
    """

    info: Mapping[str, Any]
    results: pd.DataFrame
    labels: AlgorithmLabels
    metric: str
    setting: str = ""
    settings: tuple[str, ...] = ()
    sweep: pd.DataFrame | None = None
    accounts: Sequence[Mapping[str, Any]] = ()
    assessment: Mapping[str, Any] | None = None
    distances: Mapping[str, Sequence[MethodDistances]] = field(default_factory=dict)
    cross_site: pd.DataFrame = field(default_factory=lambda: results_frame([]))
    sent: SentEstimates = NOTHING_SENT

    @property
    def compared(self) -> RunComparisons:
        """The results with all that their comparisons are made of."""
        return RunComparisons(self.results, self.labels, verdict_settings(self.info), self.sent)

    @property
    def all_results(self) -> pd.DataFrame:
        """The rows of all settings."""
        return self.results if self.sweep is None else self.sweep

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration of the experiment, empty if unknown."""
        return dict(self.info.get("config", {}))

    @property
    def name(self) -> str:
        """The name of the experiment."""
        return str(self.config.get("name") or self.results["experiment"].iloc[0])

    @property
    def rounds(self) -> int:
        """The number of rounds, as configured or of the last round with results."""
        return int(self.config.get("rounds") or self.results["round"].max())

    @property
    def order(self) -> tuple[str, ...]:
        """Labels of the algorithms: the one that trains alone first, then as configured."""
        return self.labels.order

    @property
    def sites(self) -> list[str]:
        """The sites with results, inside or outside, by name."""
        return sorted(set(self.results["site"]) - {""})

    @property
    def seeds(self) -> list[int]:
        """The seeds with results."""
        return sorted(self.results["seed"].unique().tolist())

    @property
    def folds(self) -> int:
        """The number of folds with results."""
        return len(self.results[["fold", "part"]].drop_duplicates())


def read_run_output(output: Path) -> RunOutput:
    """Read the output folder of a run.

    Args:
        output: The folder.

    Returns:
        Its content.

    Raises:
        DataError: There are no results, or a file cannot be read.
        CheckpointError: The state of a server is damaged.
    """
    info, sweep = read_description(output), read_results(output)
    if sweep.empty:
        raise DataError(f"{output}: no results to report yet; run the experiment first.")
    settings = list_settings(info, sweep)
    setting = settings[0] if settings else ""
    results = sweep[sweep["variation"] == setting]
    labels = labels_of(info, results)
    return RunOutput(
        info,
        results,
        labels,
        headline_metric(results),
        setting,
        settings,
        sweep if settings else None,
        read_accounts(output, setting),
        read_assessment(output),
        read_method_distances(output, setting, labels.order),
        read_cross_site(output),
        read_estimates(output),
    )


def read_assessment(output: Path) -> dict[str, Any] | None:
    """Read the assessment of the federation, if one lies in the output folder.

    Raises:
        DataError: It cannot be read.
    """
    remedy = "assess again, or remove the file to make a report without it"
    for path in (output / place for place in ASSESSMENTS):
        if not path.is_file():
            continue
        try:
            content = {**json.loads(path.read_text(encoding="utf-8"))}
        except (OSError, ValueError, TypeError) as error:
            raise DataError(
                f"{path}: the assessment of the federation cannot be read ({error}); {remedy}."
            ) from error
        if not {"findings", "verdict", "sites"} <= content.keys():
            raise DataError(f"{path}: this is no assessment; {remedy}.")
        return content
    return None
