"""From rows to numbers: a site's mean of a seed, and the order in which methods stand."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Literal

from collegium.evaluation.results import Row
from collegium.tasks import RAREST_CLASS, SET_METRICS

Where = Literal["inside", "outside"]
"""Scores at the sites that trained, or at sites that took no part."""

SPLITS: dict[Where, str] = {"inside": "test", "outside": "outside"}
"""The split of the rows that hold the final scores."""

ADAPTERS = {
    "none": "", "average": "Average", "ensemble": "Ensemble", "tent": "Tent", "ttt": "TTT",
    "dsbn": "DSBN", "routing": "routing",
}  # fmt: skip
"""The adapters of a model to a site outside as the field spells them, in the order of tables."""

NO_ADAPTER = "none"

SiteMeans = dict[int, dict[str, float | None]]
"""Seed -> site -> mean."""

MethodKey = tuple[str, str]
"""Label of the algorithm, and which of its models (outside: which adapter) was scored."""


def position(key: MethodKey, order: Sequence[str]) -> tuple[int, str, int, str]:
    """Return what to sort methods by: training alone first, then the order given, then by name.

    Args:
        key: The method.
        order: Labels of the algorithms in the order wanted.
    """
    algorithm, model = key
    known = -1 if algorithm == "local" else len(order)
    if algorithm in order and known >= 0:
        known = list(order).index(algorithm)
    adapters = list(ADAPTERS)
    return (
        known,
        algorithm,
        adapters.index(model) if model in adapters else len(adapters),
        model,
    )


def site_means(rows: Iterable[Row]) -> SiteMeans:
    """Return the means over patients of the mean over their cases, by seed and site.

    Args:
        rows: The scores of one method; undefined ones are left out of the means.

    Returns:
        The means, whatever the order of the rows; None where a site has no defined score.
    """
    groups: dict[tuple[int, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        patients = groups[row.seed, row.site]
        if row.value is not None:
            patients[row.patient].append(row.value)
    means: SiteMeans = defaultdict(dict)
    for (seed, site), patients in sorted(groups.items()):
        means[seed][site] = fmean(map(fmean, patients.values())) if patients else None
    return dict(means)


def seed_values(means: SiteMeans, site: str) -> list[float]:
    """Return the defined means of a site, one per seed.

    Args:
        means: the means, by seed and site.
        site: the site.
    """
    values = (by_site.get(site) for by_site in means.values())
    return [value for value in values if value is not None]


def mean_over_seeds(rows: Iterable[Row]) -> float | None:
    """Return the mean over seeds of the mean over patients, for the scores of one site."""
    values = [mean for by_site in site_means(rows).values() for mean in by_site.values()]
    defined = [value for value in values if value is not None]
    return fmean(defined) if defined else None


def rarest_class(
    rows: Iterable[Row], metric: str, where: Where = "inside", variation: str = ""
) -> dict[str, int]:
    """Return by site how many patients the rarest class has, of a metric that depends on it.

    Args:
        rows: the rows of results.
        metric: the metric; of others nothing is returned.
        where: which cases.
        variation: the variation.
    """
    found: dict[str, int] = {}
    for row in rows if metric in SET_METRICS else ():
        if row.metric == RAREST_CLASS and row.split == SPLITS[where] and row.variation == variation:
            found[row.site] = min(int(row.value or 0), found.get(row.site, int(row.value or 0)))
    return found


def unit_of(rows: Iterable[Row]) -> str:
    """Return the unit of the scores of one metric."""
    return min({row.unit for row in rows}, default="")
