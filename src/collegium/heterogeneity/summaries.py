"""Summaries of one value per case, for sites that do not let these values leave.

A summary is a histogram: ``{"edges": [k + 1 numbers], "counts": [k numbers]}``, plain lists that
any message can hold. The two kinds differ in their edges: evenly between the smallest and the
largest value (`histogram`), or such that all bins hold equally many values (`quantiles`).

Error: a distance takes the values of a bin as spread evenly over it. Wherever in the bin they truly
are, moving them there costs at most half its width each, so the earth mover's distance of two
summaries differs from that of the values by at most half the mean width of the bins, each as often
as it counts, of both summaries together. With k bins this is half of 1/k of the first site's range
plus half of 1/k of the second's, one bin's width if both are alike, for either kind.

Privacy: the values inside a bin are hidden, but not the smallest and the largest, which are the
outermost edges; with about as many quantiles as cases, next to nothing is hidden.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from collegium.errors import ConfigError, DataError, ProtocolError
from collegium.heterogeneity import distances

Array = NDArray[np.float64]
Summary = dict[str, list[float]]


def histogram(values: ArrayLike, bins: int = 32) -> Summary:
    """Summarise values by how many lie in each of ``bins`` bins of equal width.

    Args:
        values: (n,).
        bins: number of bins from the smallest to the largest value. Equal values are one bin
            without width.

    Raises:
        ConfigError: there are no bins.
        DataError: there are no values, or NaN or infinite ones.
    """
    ordered = _ordered(values, bins)
    if ordered[0] == ordered[-1]:
        return _summary(ordered[[0, 0]], [float(len(ordered))])
    edges = np.linspace(ordered[0], ordered[-1], bins + 1)
    inside = np.searchsorted(edges, ordered, side="right") - 1
    return _summary(edges, np.bincount(np.minimum(inside, bins - 1), minlength=bins))


def quantiles(values: ArrayLike, steps: int = 32) -> Summary:
    """Summarise values by their quantiles at 0, 1/steps, ..., 1, each an observed value.

    Finer than a histogram where values are dense. Equal quantiles are bins without width.

    Args:
        values: (n,).
        steps: number of bins between quantiles; each counts n / steps.

    Raises:
        ConfigError: there are no steps.
        DataError: there are no values, or NaN or infinite ones.
    """
    ordered = _ordered(values, steps)
    count = len(ordered)
    ranks = [max(-(-step * count // steps) - 1, 0) for step in range(steps + 1)]
    return _summary(ordered[ranks], [count / steps] * steps)


def emd_matrix(
    summaries: Mapping[str, Mapping[str, Sequence[float]]],
    *,
    normalise: distances.Normalise = "none",
) -> Array:
    """Return the earth mover's distances between all pairs of sites, from their summaries.

    Args:
        summaries: by site the summary of one quantity.
        normalise: as in `distances.emd_matrix`, values being spread evenly in their bins.

    Returns:
        (N, N), sites in sorted order.

    Raises:
        ConfigError: ``normalise`` is none of the words.
        ProtocolError: what a site sent is no summary.
    """
    read = {site: _read(summaries[site], site) for site in sorted(summaries)}
    matrix = distances.pair_matrix(read, distances.emd_of_histograms)
    return matrix / distances.scale(normalise, lambda: _pooled_std(list(read.values())))


def _ordered(values: ArrayLike, bins: int) -> Array:
    if bins < 1:
        raise ConfigError(f"a summary of {bins} bins says nothing; choose at least 1")
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or not array.size:
        raise DataError("there are no values to summarise; add cases, or leave the site out")
    if not np.isfinite(array).all():
        raise DataError("values to summarise are NaN or infinite; look at the site's images")
    return np.sort(array)


def _summary(edges: ArrayLike, counts: ArrayLike) -> Summary:
    plain = {"edges": edges, "counts": counts}
    return {name: np.asarray(value, np.float64).tolist() for name, value in plain.items()}


def _read(summary: Mapping[str, Sequence[float]], site: str) -> tuple[Array, Array]:
    """Return counts and edges of a summary that a site sent.

    Raises:
        ProtocolError: it is no summary.
    """
    if not isinstance(summary, Mapping) or summary.keys() != {"edges", "counts"}:
        raise ProtocolError(f"what site {site!r} sent is no summary; it needs edges and counts")
    try:
        counts, edges = np.asarray(summary["counts"], float), np.asarray(summary["edges"], float)
        distances.emd_of_histograms((counts, edges), (counts, edges))
    except (DataError, TypeError, ValueError) as error:
        raise ProtocolError(f"what site {site!r} sent is no summary: {error}") from error
    return counts, edges


def _pooled_std(read: list[tuple[Array, Array]]) -> float:
    """Return the standard deviation over all sites' values, spread evenly in their bins."""
    counts = np.concatenate([mass for mass, _ in read])
    middles = np.concatenate([(edges[:-1] + edges[1:]) / 2 for _, edges in read])
    widths = np.concatenate([np.diff(edges) for _, edges in read])
    share = counts / counts.sum()
    away = middles - (share * middles).sum()
    return float(np.sqrt((share * (away**2 + widths**2 / 12)).sum()))
