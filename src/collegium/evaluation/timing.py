"""What adapting to a site outside costs in time, and what it brings: time against quality."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collegium.errors import DataError
from collegium.evaluation.cells import AVERAGE, Cell, cell_of, ranked
from collegium.evaluation.results import Row
from collegium.evaluation.scores import NO_ADAPTER, MethodKey
from collegium.evaluation.tables import (
    Method,
    MethodTable,
    final_scores,
    method_table,
    scored_name,
)

Account = Mapping[str, Any]
"""The content of an ``account.json``."""

SECONDS, UNADAPTED = "seconds per image", "seconds without adapting"
"""The first columns of the table; the last is the metric."""

_Sums = dict[str, list[float]]
"""Site -> seconds, and images."""


@dataclass(frozen=True)
class Timed:
    """A row of the table.

    Attributes:
        algorithm: Label of the algorithm.
        adapter: Label of the adapter.
        seconds: That adapting and predicting takes per image.
        unadapted: The same of the algorithm's model without adapting.
        quality: The average of the metric over the sites outside.
    """

    algorithm: str
    adapter: str
    seconds: Cell
    unadapted: Cell
    quality: Cell

    @property
    def name(self) -> str:
        """The method as a reader calls it."""
        return scored_name(self.algorithm, self.adapter, "outside")


@dataclass(frozen=True)
class TimeTable:
    """Seconds per image against the headline metric, at the sites outside.

    Attributes:
        metric: What was measured.
        unit: Its unit.
        higher_is_better: False for distances and losses.
        methods: The rows, the quickest first.
        missing: Why there are none, or of which methods no time is known.
        variation: The setting of the sweep; empty outside a sweep.
    """

    metric: str
    unit: str
    higher_is_better: bool
    methods: tuple[Timed, ...]
    missing: str = ""
    variation: str = ""


def time_table(
    rows: Iterable[Row],
    accounts: Iterable[Account],
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
        rows: Rows of results; others than scores of test cases are passed over.
        accounts: The accounts of the setting.
        metric: The headline metric.
        order: Labels of the algorithms, in the order wanted where times are equal.
        variation: The setting of a sweep.

    Returns:
        The table, without rows where nothing was scored or timed.
    """
    scores = final_scores(rows, metric, where="outside", variation=variation)
    quality = method_table(scores, metric, order, where="outside", variation=variation)
    seconds = _seconds(scores, accounts)
    cells = {(method.algorithm, method.model): method.cells for method in quality.methods}
    timed = [
        Timed(*key, seconds[key], seconds.get((key[0], NO_ADAPTER), Cell(None)), found[AVERAGE])
        for key, found in cells.items()
        if key in seconds
    ]
    lacking = [scored_name(*key, "outside") for key in cells if key not in seconds]
    return TimeTable(
        metric,
        quality.unit,
        quality.higher_is_better,
        tuple(sorted(timed, key=lambda one: one.seconds.mean or 0.0)),
        _missing(lacking, any_scores=bool(scores), any_times=bool(timed)),
        variation,
    )


def _seconds(scores: Iterable[Row], accounts: Iterable[Account]) -> dict[MethodKey, Cell]:
    """Return the seconds per image of every method with a seed that is timed at all its sites."""
    sites: dict[tuple[MethodKey, int], set[str]] = defaultdict(set)
    for row in scores:
        sites[(row.algorithm, row.model), row.seed].add(row.site)
    sums: dict[tuple[MethodKey, int], _Sums] = defaultdict(dict)
    for account in accounts:
        adapter = account["adapter"]
        method = str(account["algorithm"]), str(adapter.get("label") or adapter["name"])
        seconds, images = account.get("seconds"), account.get("cases")
        if seconds is not None and images:
            here = sums[method, account["seed"]].setdefault(account["site"], [0.0, 0.0])
            here[0] += seconds
            here[1] += images
    values: dict[MethodKey, list[float]] = defaultdict(list)
    for (method, seed), scored in sorted(sites.items()):
        found = sums.get((method, seed), {})
        if scored <= found.keys():
            totals = [sum(found[site][part] for site in scored) for part in (0, 1)]
            values[method].append(totals[0] / totals[1])
    return {method: cell_of(seeds) for method, seeds in values.items()}


def _missing(lacking: Sequence[str], *, any_scores: bool, any_times: bool) -> str:
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


def as_methods(table: TimeTable) -> MethodTable:
    """Return the table for the writers of `collegium.evaluation.formats`, each column ranked.

    Its columns stand where those of a sweep do; the best time is the shortest.
    """
    metric = f"{table.metric} ({table.unit})" if table.unit else table.metric
    times = [{SECONDS: one.seconds, UNADAPTED: one.unadapted} for one in table.methods]
    quality = [{metric: one.quality} for one in table.methods]
    cells = zip(
        ranked(times, "", higher=False),
        ranked(quality, "", higher=table.higher_is_better),
        strict=True,
    )
    methods = tuple(
        Method(one.algorithm, one.adapter, {**took, **brought}, "outside")
        for one, (took, brought) in zip(table.methods, cells, strict=True)
    )
    return MethodTable(
        "time against quality",
        "",
        table.higher_is_better,
        (),
        methods,
        "outside",
        table.variation,
        (SECONDS, UNADAPTED, metric),
    )


def headline_metric(rows: Iterable[Row]) -> str:
    """Return the metric that selects models on validation, or else the first that was scored."""
    found: dict[str, str] = {}
    for row in rows:
        if row.model and row.metric != "loss":
            found.setdefault(row.split, row.metric)
    return next((found[split] for split in ("val", "test", "outside") if split in found), "loss")


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
    found = []
    for path in sorted(output.rglob("seed-*/outside/*/*/account.json")):
        place = path.relative_to(output).parts[:-6]
        if place[:1] == (setting,) if setting else len(place) < 2:
            try:
                content = {**json.loads(path.read_text(encoding="utf-8"))}
            except (OSError, ValueError, TypeError) as error:
                raise DataError(
                    f"{path}: the account of an adaptation cannot be read ({error}); "
                    "remove its folder and resume the run, which adapts anew."
                ) from error
            found.append({"sources": [], "losses": [], "notes": [], **content})
    return found
