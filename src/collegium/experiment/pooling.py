"""Scores of a set of cases under cross-validation, of the test cases of all folds together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from collegium.evaluation.scores import METHOD, SPLITS
from collegium.experiment.config.building import task_of
from collegium.experiment.grid import parts_of, variations_of
from collegium.tasks import ALL_CASES, SET_METRICS

if TYPE_CHECKING:
    import pandas as pd

    from collegium.experiment.config.experiment import ExperimentConfig
    from collegium.tasks import Task

POOLED = frozenset({*SET_METRICS, "ece"})
"""The metrics of a set of cases that are computed of all folds."""

_TRAININGS = [*METHOD, "seed", "fold", "site"]
"""The columns of a method's trainings at a site, of which every fold of the patients is a part."""


def pool_folds(results: pd.DataFrame, config: ExperimentConfig) -> pd.DataFrame:
    """Return results in which metrics of a set of cases are of all folds together.

    Each case is a test case of one fold. The area under the ROC curve and balanced accuracy of
    single folds would be of few cases, and undefined where a fold has one class only; their mean
    would be another number than that of the verdicts, which compare all cases. So the pseudo-values
    of the cases are computed again, of the predictions that every case got as a test case. Metrics
    of single cases and decisions by the thresholds of the folds stay, and so does what a site sent
    as means.

    Args:
        results: The table of results.
        config: The experiment.
    """
    pooled = results.copy()
    for name, settings in variations_of(config).items():
        own = (pooled["variation"] == name) & (pooled["split"] == SPLITS["inside"])
        own &= ~pooled["case"].isin(["", ALL_CASES])
        if parts_of(settings) == [0] or not own.any():
            continue
        task = task_of(settings)
        for _, rows in pooled[own].groupby(_TRAININGS, sort=False):
            pooled.loc[rows.index, "value"] = _pooled_values(rows, task)
    return pooled


def _pooled_values(rows: pd.DataFrame, task: Task) -> list[float]:
    """Return the values of the rows of one method, training and site, each of a case and metric."""
    cases: dict[str, dict[str, Any]] = {}
    for case, patient, metric, value in zip(
        rows["case"], rows["patient"], rows["metric"], rows["value"], strict=True
    ):
        cases.setdefault(case, {"case": case, "patient": patient})[metric] = value
    scored = {row["case"]: row for row in task.add_set_scores(list(cases.values()))}
    values = (
        (scored if metric in POOLED else cases)[case][metric]
        for case, metric in zip(rows["case"], rows["metric"], strict=True)
    )
    return [float("nan") if value is None else float(value) for value in values]
