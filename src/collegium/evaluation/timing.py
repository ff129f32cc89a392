"""What adapting to a site outside costs in time, and what it brings: time against quality."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import fsum
from pathlib import Path
from typing import Any

import pandas as pd

from collegium.core.seals import read_json
from collegium.errors import DataError
from collegium.evaluation.results import job_folders
from collegium.evaluation.scores import METHOD, NO_ADAPTER, MethodKey, final_scores, rows_of
from collegium.evaluation.tables import (
    UNDEFINED,
    MethodTable,
    make_cells,
    mean_and_sd,
    method_table,
)

SECONDS, UNADAPTED = "seconds per image", "seconds without adapting"
"""The first columns of a table of time against quality; the last is the metric."""

TIMED = [
    *METHOD, "method", "seconds", "seconds_sd", "unadapted", "unadapted_sd", "quality",
    "quality_sd", "quality_rank",
]  # fmt: skip
"""The columns of the methods of a `TimeTable`."""


@dataclass(frozen=True, eq=False)
class TimeTable:
    """Seconds per image against the headline metric, at the sites outside.

    Attributes:
        metric: What was measured.
        unit: Its unit.
        higher_is_better: False for distances and losses.
        methods: A row for each method, the quickest first: algorithm, model (the label of the
            adapter) and method; seconds and seconds_sd, what adapting and predicting takes per
            image; unadapted and unadapted_sd, the same of the algorithm's model without adapting;
            quality, quality_sd and quality_rank, the average of the metric over the sites outside
            and its rank among all methods, timed or not.
        missing: Why there are none, or of which methods no time is known.
        variation: The setting of the sweep; empty outside a sweep.
    """

    metric: str
    unit: str
    higher_is_better: bool
    methods: pd.DataFrame
    missing: str = ""
    variation: str = ""


def time_table(
    results: pd.DataFrame,
    accounts: Iterable[Mapping[str, Any]],
    metric: str,
    order: Sequence[str] = (),
    *,
    variation: str = "",
) -> TimeTable:
    """Build the table from the scores at sites outside and the accounts of the adaptations.

    The seconds of a seed are those of all its adaptations, in all folds, over the images that they
    were made for; a cell is mean and sample sd over seeds. A seed with a scored site that has no
    account does not count, for the images of sites differ.

    Args:
        results: The table of results; rows other than scores of test cases are ignored.
        accounts: The accounts of the setting, see `read_accounts`.
        metric: The headline metric.
        order: Labels of the algorithms, in the order wanted if times are equal.
        variation: The setting of a sweep.

    Returns:
        The table, without rows if nothing was scored or timed.
    """
    quality = method_table(results, metric, order, where="outside", variation=variation)
    scores = final_scores(results, metric, where="outside", variation=variation)
    times = _seconds_per_image(scores, accounts)
    unknown = UNDEFINED, UNDEFINED
    rows, lacking = [], []
    for key, cell in quality.averages.items():
        unadapted = times.get((cell.algorithm, NO_ADAPTER))
        if key in times:
            seconds = *times[key], *(unadapted or unknown)
            rows.append((*key, cell.method, *seconds, cell.mean, cell.sd, cell.rank))
        else:
            lacking.append(cell.method)
    methods = pd.DataFrame(rows, columns=TIMED).sort_values("seconds", kind="stable")
    missing = _missing_times(lacking, any_scores=not scores.empty, any_times=bool(rows))
    about = metric, quality.unit, quality.higher_is_better
    return TimeTable(*about, methods, missing, variation)


def _seconds_per_image(
    scores: pd.DataFrame, accounts: Iterable[Mapping[str, Any]]
) -> dict[MethodKey, tuple[float, float]]:
    """Return mean and sd of every method with a seed that is timed at all its sites."""
    timed: dict[Any, dict[str, list[tuple[float, int]]]] = {}
    for account in accounts:
        adapter = account["adapter"]
        label = str(adapter.get("label") or adapter["name"])
        seconds, images = account.get("seconds"), account.get("cases")
        if seconds is not None and images:
            sites = timed.setdefault((str(account["algorithm"]), label, account["seed"]), {})
            sites.setdefault(account["site"], []).append((seconds, images))
    found: dict[MethodKey, list[float]] = {}
    for training, rows in scores.groupby([*METHOD, "seed"]):
        algorithm, model, _ = map(str, training)
        known, scored = timed.get(training, {}), set(rows["site"])
        if scored <= known.keys():
            pairs = [pair for site in scored for pair in known[site]]
            seconds, images = (fsum(numbers) for numbers in zip(*pairs, strict=True))
            found.setdefault((algorithm, model), []).append(seconds / images)
    return {method: mean_and_sd(seeds) for method, seeds in found.items()}


def _missing_times(lacking: Sequence[str], *, any_scores: bool, any_times: bool) -> str:
    if not any_scores:
        return "This run holds no scores of a site outside, so what adapting takes is not known."
    if not any_times:
        return (
            "This run holds no accounts of the time that adapting took, so time cannot be held "
            "against quality. Run the adapters again with this version."
        )
    if not lacking:
        return ""
    return f"There are no whole accounts of the time of {', '.join(lacking)}, so they are left out."


def time_against_quality(table: TimeTable) -> MethodTable:
    """Return a table of times with a column for each number, ranked; the best time is the shortest.

    Args:
        table: The times.
    """
    metric = f"{table.metric} ({table.unit})" if table.unit else table.metric
    columns = {SECONDS: "seconds", UNADAPTED: "unadapted", metric: "quality"}
    cells = [
        (row.algorithm, row.model, column, getattr(row, name), getattr(row, f"{name}_sd"), "")
        for row in rows_of(table.methods)
        for column, name in columns.items()
    ]
    higher = {SECONDS: False, UNADAPTED: False, metric: table.higher_is_better}
    frame = make_cells(cells, "", "outside", higher=higher)
    about = "time against quality", "", table.higher_is_better
    return MethodTable(*about, (), tuple(columns), frame, "outside", table.variation)


def read_accounts(output: Path, setting: str = "") -> list[dict[str, Any]]:
    """Read what adapters did at sites outside.

    Args:
        output: The output folder of an experiment.
        setting: The variation that is wanted; empty outside a sweep.

    Returns:
        The accounts, by path.

    Raises:
        DataError: One cannot be read.
    """
    jobs = job_folders(output, setting)
    found = []
    for path in chain(*(sorted(job.glob("outside/*/*/account.json")) for job in jobs)):
        try:
            content = read_json(path)
        except (OSError, ValueError, TypeError) as error:
            raise DataError(
                f"{path}: the account of an adaptation cannot be read ({error}); "
                "remove its folder and resume the run, which adapts again."
            ) from error
        found.append({"sources": [], "losses": [], "notes": [], **content})
    return found
