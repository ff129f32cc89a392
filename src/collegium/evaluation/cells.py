"""The cells of a table: mean and spread over seeds, the summaries over sites, and the ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from collegium.evaluation.scores import SiteMeans, seed_values
from collegium.evaluation.significance import disparity, worst_site

AVERAGE, WORST, RANGE, SPREAD = "average", "worst site", "disparity", "site sd"
SUMMARIES = (AVERAGE, WORST, RANGE, SPREAD)
"""The columns after the sites. Disparity is the largest minus the smallest of the site means."""


@dataclass(frozen=True)
class Cell:
    """A number of a table.

    Attributes:
        mean: Mean over seeds; None where undefined.
        sd: Sample standard deviation over seeds; None with fewer than two.
        rank: 1 for the best of the column, 2 for the second, 0 for the others.
        note: What else belongs in the cell, e.g. which site is the worst.
    """

    mean: float | None
    sd: float | None = None
    rank: int = 0
    note: str = ""


def cell_of(values: Sequence[float]) -> Cell:
    """Return the cell of the values of the seeds."""
    if not values:
        return Cell(None)
    return Cell(fmean(values), stdev(values) if len(values) > 1 else None)


def method_cells(
    means: SiteMeans, sites: Sequence[str], scored: Sequence[str], *, higher: bool
) -> dict[str, Cell]:
    """Return the cells of one method: its sites, then the summaries.

    Args:
        means: The method's means by seed and site.
        sites: The sites of the table.
        scored: Those of them where any method has a score. A method that lacks one of these has no
            summaries, for they would leave out its hardest site.
        higher: Whether a larger score is better.
    """
    cells = {site: cell_of(seed_values(means, site)) for site in sites}
    overall = {site: cells[site].mean for site in scored}
    complete = bool(scored) and all(mean is not None for mean in overall.values())
    worst = worst_site(overall, higher_is_better=higher) if complete else None
    spread = disparity(overall) if complete else None
    averages = []
    for by_site in means.values():
        values = [value for site in scored if (value := by_site.get(site)) is not None]
        if len(values) == len(scored):
            averages.append(fmean(values))
    cells[AVERAGE] = cell_of(averages if complete else [])
    cells[WORST] = replace(cells[worst[0]], note=worst[0]) if worst else Cell(None)
    cells[RANGE] = Cell(spread.range if spread else None)
    cells[SPREAD] = Cell(spread.sd if spread else None)
    return cells


def ranked(rows: Sequence[Mapping[str, Cell]], unit: str, *, higher: bool) -> list[dict[str, Cell]]:
    """Mark best and second of each column; what prints alike ranks alike.

    Args:
        rows: The cells of each method, by column.
        unit: Unit of the numbers, which says how many digits are printed.
        higher: Whether a larger score is better. Of disparities the smaller always is.

    Returns:
        The same cells with their ranks, all 0 in a column of fewer than two numbers.
    """
    ranks: dict[str, dict[float, int]] = {}
    for column in rows[0] if rows else ():
        ascending = column in (RANGE, SPREAD) or not higher
        values = [_rounded(cells[column], unit) for cells in rows]
        defined = [value for value in values if value is not None]
        distinct = sorted(set(defined), reverse=not ascending)
        ranks[column] = dict(zip(distinct[:2], (1, 2), strict=False)) if len(defined) > 1 else {}
    return [
        {
            column: replace(cell, rank=ranks[column].get(value, 0))
            if (value := _rounded(cell, unit)) is not None
            else cell
            for column, cell in cells.items()
        }
        for cells in rows
    ]


def _rounded(cell: Cell, unit: str) -> float | None:
    return None if cell.mean is None else round(cell.mean, 2 if unit else 3)
