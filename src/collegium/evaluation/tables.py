"""Tables as papers print them: methods by sites, or by the settings of a sweep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import isnan
from statistics import stdev
from typing import Any

import numpy as np
import pandas as pd

from collegium.evaluation.scores import (
    METHOD,
    MethodKey,
    Where,
    final_scores,
    higher_is_better,
    is_ranked,
    mean,
    method_name,
    position,
    rows_of,
    site_means,
    unit_of,
    variations,
)

AVERAGE, WORST, RANGE, SPREAD = "average", "worst site", "disparity", "site sd"
SUMMARIES = (AVERAGE, WORST, RANGE, SPREAD)
"""The columns after the sites. Disparity is the largest minus the smallest of the site means."""

CELL = [*METHOD, "column", "mean", "sd", "note"]
"""The columns that define a cell, before it has a rank and its method a name."""

UNDEFINED = float("nan")


@dataclass(frozen=True, eq=False)
class MethodTable:
    """Methods by sites, or by the settings of a sweep, for one metric.

    Attributes:
        metric: What was measured.
        unit: Its unit.
        higher_is_better: False for distances and losses.
        sites: The sites with scores; none in a table of other columns.
        columns: The sites, then the summaries; of a sweep the settings.
        cells: A row for each cell, by method in the order of the table, then by column. algorithm,
            model and method: the label of the algorithm, which of its models was scored (outside,
            the label of the adapter), and the name of both together. column: one of ``columns``.
            mean: mean over seeds, NaN if undefined. sd: sample standard deviation over seeds, NaN
            with fewer than two. rank: 1 for the best of the column, 2 for the second, 0 for the
            others. note: what else belongs in the cell, such as which site is the worst.
        where: Whether the sites are inside or outside.
        variation: The setting of the sweep that the scores are of; empty outside a sweep.
        notes: Sentences on how rounds were selected.
        cases: What the scores are of, if not of test cases, such as "validation cases".
        ranked: False for metrics without better and worse, see `is_ranked`: no cell has a rank, and
            there is no worst site.
    """

    metric: str
    unit: str
    higher_is_better: bool
    sites: tuple[str, ...]
    columns: tuple[str, ...]
    cells: pd.DataFrame
    where: Where = "inside"
    variation: str = ""
    notes: tuple[str, ...] = ()
    cases: str = ""
    ranked: bool = True

    @property
    def over_sites(self) -> bool:
        """Whether the columns are averages over sites, as of a sweep, and not the sites."""
        return self.columns != self.sites + SUMMARIES

    @property
    def averages(self) -> dict[MethodKey, Any]:
        """The cell (a row of ``cells``) of each method's average over the sites."""
        found = rows_of(self.cells[self.cells["column"] == AVERAGE])
        return {(cell.algorithm, cell.model): cell for cell in found}

    @property
    def methods(self) -> list[tuple[str, list[Any]]]:
        """Name and cells (rows of ``cells``) of each method."""
        by_method = groupby(rows_of(self.cells), key=lambda cell: (cell.algorithm, cell.model))
        rows = [list(cells) for _, cells in by_method]
        return [(row[0].method, row) for row in rows]


def mean_and_sd(values: Iterable[float]) -> tuple[float, float]:
    """Return mean and sample standard deviation of the defined values, one per seed."""
    defined = [float(value) for value in values if not isnan(value)]
    return mean(defined), stdev(defined) if len(defined) > 1 else UNDEFINED


def undefined_notes(
    results: pd.DataFrame, metric: str, *, where: Where = "inside", variation: str = ""
) -> tuple[str, ...]:
    """Return in sentences at which sites a metric is undefined, of all methods or of some.

    Args:
        results: The table of results.
        metric: Which metric.
        where: Scores of the sites inside, or of those outside.
        variation: The setting of a sweep.

    Returns:
        The sentences; none if every method that was scored at a site has a defined score there.
    """
    scores = final_scores(results, metric, where=where, variation=variation)
    defined = scores.groupby([*METHOD, "site"])["value"].count().groupby(level="site")
    least, most = defined.min(), defined.max()
    sites = {"all": least.index[most == 0], "some": least.index[(least == 0) & (most > 0)]}
    sentences = {
        "all": f"{metric} is undefined in every test case at {{}}.",
        "some": f"{metric} is undefined in every test case of some methods at {{}}; they have no "
        "average.",
    }
    return tuple(
        sentences[who].format(", ".join(found)) for who, found in sites.items() if len(found)
    )


def make_cells(
    cells: Sequence[Sequence[Any]], unit: str, where: Where, *, higher: bool | Mapping[str, bool]
) -> pd.DataFrame:
    """Return the frame of the cells of a `MethodTable`, with best and second of each column marked.

    What prints alike ranks alike, and a column of fewer than two numbers has no ranks.

    Args:
        cells: The columns of `CELL`, cell by cell.
        unit: Unit of the numbers, which determines how many digits are printed.
        where: Whether the scores are of sites inside or outside.
        higher: Whether a larger number is better, in all columns or by column. Of disparities the
            smaller always is.
    """
    frame = pd.DataFrame(cells, columns=CELL).astype({"mean": "float64", "sd": "float64"})
    rounded = frame["mean"].map(lambda value: round(value, 2 if unit else 3))
    by_name = dict.fromkeys(frame["column"], higher) if isinstance(higher, bool) else higher
    larger_wins = frame["column"].map({**by_name, RANGE: False, SPREAD: False}).astype(bool)
    by_column = rounded.where(~larger_wins, -rounded).groupby(frame["column"])
    rank = by_column.rank(method="dense")
    ranked = (rank <= 2) & (by_column.transform("count") > 1)
    names = [method_name(a, m, where) for a, m in zip(frame.algorithm, frame.model, strict=True)]
    return frame.assign(rank=rank.where(ranked, 0).astype("int64"), method=names)


def method_table(
    results: pd.DataFrame,
    metric: str,
    order: Sequence[str] = (),
    *,
    where: Where = "inside",
    variation: str = "",
) -> MethodTable:
    """Build the table of one metric from the final scores.

    A site's mean of a seed is the mean over patients of the mean over a patient's cases; a cell is
    mean and sample sd over seeds. A method without a score at a site where others have one has no
    average, worst site or disparity, for they would leave out its hardest site. Outside, a method
    is an algorithm with an adapter, and each site is scored by the models of the folds that it took
    no part in; of several folds the scores of a case are averaged, as they are inside.

    Args:
        results: The table of results; rows other than scores of test cases are ignored.
        metric: Which metric.
        order: Labels of the algorithms in the order wanted; the others follow by name.
        where: Scores of the sites inside, or of those outside.
        variation: The setting of a sweep; scores of different settings never share a table.

    Returns:
        The table, empty if no such score exists.
    """
    scores = final_scores(results, metric, where=where, variation=variation)
    table = table_of_means(site_means(scores), metric, unit_of(scores), order, where)
    return replace(table, variation=variation)


def table_of_means(
    site_means: pd.DataFrame,
    metric: str,
    unit: str,
    order: Sequence[str] = (),
    where: Where = "inside",
) -> MethodTable:
    """Build the table of the sites' means.

    Args:
        site_means: Columns algorithm, model, seed, site and value.
        metric: Which metric.
        unit: Its unit.
        order: Labels of the algorithms in the order wanted; the others follow by name.
        where: Whether the sites are inside or outside.
    """
    higher, ranked = higher_is_better(metric, unit), is_ranked(metric)
    means = site_means.pivot(index=[*METHOD, "seed"], columns="site", values="value")
    sites = tuple(map(str, means.columns))
    scored = [site for site in sites if means[site].notna().any()]
    methods = {(str(key[0]), str(key[1])): seeds for key, seeds in means.groupby(level=METHOD)}
    cells = [
        (*key, *cell)
        for key in sorted(methods, key=lambda key: position(key, order))
        for cell in _method_cells(methods[key], scored, higher=higher if ranked else None)
    ]
    frame = make_cells(cells, unit, where, higher=higher)
    frame = frame if ranked else frame.assign(rank=0)
    return MethodTable(metric, unit, higher, sites, sites + SUMMARIES, frame, where, ranked=ranked)


def _method_cells(
    seeds: pd.DataFrame, scored: Sequence[str], *, higher: bool | None
) -> list[tuple[str, float, float, str]]:
    """Return column, mean, sd and note of the cells of one method.

    ``seeds`` holds its means, a row per seed and a column per site. If it lacks one of the sites
    where any method has a score, it has no summaries. ``higher`` is None where no site is worst.
    """
    cells = {str(site): mean_and_sd(seeds[site]) for site in seeds}
    overall = {site: cells[site][0] for site in scored}
    found = [(site, *cell, "") for site, cell in cells.items()]
    if not overall or any(map(isnan, overall.values())):
        return found + [(column, UNDEFINED, UNDEFINED, "") for column in SUMMARIES]
    averages = [mean(values) for values in seeds[scored].dropna().to_numpy().tolist()]
    worst = (WORST, UNDEFINED, UNDEFINED, "")
    if higher is not None:
        name = (min if higher else max)(sorted(overall), key=overall.__getitem__)
        worst = (WORST, *cells[name], name)
    values = np.array(list(overall.values()))
    several = len(values) > 1
    return [
        *found,
        (AVERAGE, *mean_and_sd(averages), ""),
        worst,
        (RANGE, float(np.ptp(values)) if several else UNDEFINED, UNDEFINED, ""),
        (SPREAD, float(values.std()) if several else UNDEFINED, UNDEFINED, ""),
    ]


def sweep_table(
    results: pd.DataFrame,
    metric: str,
    order: Sequence[str] = (),
    *,
    where: Where = "inside",
    settings: Sequence[str] = (),
) -> MethodTable:
    """Build the table of a sweep: rows methods, columns settings, cells the average over sites.

    The average is over the sites of the setting, of which a sweep over the number of clients has
    different ones, and mean and sd are over seeds as in `method_table`. So the columns of such a
    sweep are not averages over the same patients.

    Args:
        results: The table of results.
        metric: Which metric.
        order: Labels of the algorithms in the order wanted; the others follow by name.
        where: Scores of the sites inside, or of those outside.
        settings: The settings in the order wanted; by default all named ones, see `variations`.

    Returns:
        The table, without rows if no such score exists.
    """
    names = tuple(settings) or tuple(name for name in variations(results) if name)
    tables = [method_table(results, metric, order, where=where, variation=name) for name in names]
    return side_by_side(tables, metric, order, where)


def side_by_side(
    tables: Sequence[MethodTable], metric: str, order: Sequence[str], where: Where = "inside"
) -> MethodTable:
    """Build the table of the averages over sites in the tables of several settings.

    Args:
        tables: Those of the settings, in the order wanted.
        metric: Which metric.
        order: Labels of the algorithms in the order wanted; the others follow by name.
        where: Whether the sites are inside or outside.
    """
    columns = tuple(table.variation for table in tables)
    averages = {
        (key, table.variation): (cell.mean, cell.sd, "")
        for table in tables
        for key, cell in table.averages.items()
    }
    keys = sorted({key for key, _ in averages}, key=lambda key: position(key, order))
    cells = [
        (*key, name, *averages.get((key, name), (UNDEFINED, UNDEFINED, "")))
        for key in keys
        for name in columns
    ]
    unit = max((table.unit for table in tables), default="")
    higher, ranked = all(table.higher_is_better for table in tables), is_ranked(metric)
    frame = make_cells(cells, unit, where, higher=higher)
    frame = frame if ranked else frame.assign(rank=0)
    return MethodTable(metric, unit, higher, (), columns, frame, where, ranked=ranked)
