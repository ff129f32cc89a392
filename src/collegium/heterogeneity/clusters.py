"""What distance-aware averaging does with a distance matrix: outlier, clusters, weights.

Indices are those of the matrix, from 0; clusters are sorted, the one with the lowest index first.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from collegium.errors import ConfigError, DataError
from collegium.heterogeneity.distances import checked

SMALLEST = 4
"""With fewer sites there are no two clusters of at least two."""


def most_distant(distance: ArrayLike) -> int:
    """The site whose distances to the others sum to the most (i_max); of equals the lowest index.

    Of two sites neither is more distant than the other, and the first is returned; a lone site is
    returned itself. Ask for three sites where the answer matters.

    Raises:
        DataError: it is no distance matrix.
    """
    return int(checked(distance).sum(axis=1).argmax())


def printed_clusters(distance: ArrayLike) -> list[list[int]]:
    """Two clusters by Algorithm 1 exactly as it is printed.

    The most distant site takes the nearest of the others, one by one, until two are left. On the
    paper's own EMD matrix of KiTS this is not what the paper reports; see `clusters`.

    Raises:
        ConfigError: there are fewer than four sites.
        DataError: it is no distance matrix.
    """
    matrix, order = _from_the_most_distant(distance)
    return _pair(order, len(matrix) - 2)


def clusters(distance: ArrayLike) -> list[list[int]]:
    """Two clusters by the rule that gives all clusters that the paper reports.

    One cluster is the most distant site with its m nearest, the other the rest, each at least two
    sites. Of all m from 1 to N - 3 the one with the least total distance within the clusters is
    taken; of equals the smallest. With the paper's four and five sites this is its "one or two
    closest". It is not the best of all partitions, which differs from the paper's on KiTS.

    Raises:
        ConfigError: there are fewer than four sites.
        DataError: it is no distance matrix.
    """
    matrix, order = _from_the_most_distant(distance)
    pairs = [_pair(order, size) for size in range(2, len(matrix) - 1)]
    return min(pairs, key=lambda pair: sum(_within(matrix, members) for members in pair))


def omega_weights(counts: Sequence[float], omega: Sequence[float]) -> NDArray[np.float64]:
    """The weights of FedAvg_w: omega_i n_i / sum_j omega_j n_j (N,), which sum to 1.

    Eq. 2 of the paper lacks the division, without which a step grows with the number of sites.

    Args:
        counts: n_i, examples of each site; all 1 to weigh by omega alone.
        omega: omega_i, 1 except for the most distant site.

    Raises:
        ConfigError: an omega is not above 0 and at most 1.
        DataError: the lengths differ, or counts are negative, not finite or all zero.
    """
    n, factor = np.asarray(counts, np.float64), np.asarray(omega, np.float64)
    if n.ndim != 1 or n.shape != factor.shape:
        raise DataError(f"{n.size} counts do not go with {factor.size} values of omega")
    if not ((factor > 0) & (factor <= 1)).all():
        raise ConfigError(f"omega is {factor.tolist()}; choose numbers above 0 and at most 1")
    if not np.isfinite(n).all() or (n < 0).any() or not n.sum() > 0:
        raise DataError("the sites' numbers of examples are negative, not finite or all zero")
    weights: NDArray[np.float64] = factor * n / (factor * n).sum()
    return weights


def _from_the_most_distant(distance: ArrayLike) -> tuple[NDArray[np.float64], list[int]]:
    """Return the matrix, and all sites by their distance from the most distant one."""
    matrix = checked(distance)
    if len(matrix) < SMALLEST:
        raise ConfigError(
            f"two clusters of at least two sites need {SMALLEST} sites, but there are "
            f"{len(matrix)}; add sites, or weigh them by omega instead"
        )
    start = most_distant(matrix)
    nearest = np.argsort(matrix[start], kind="stable").tolist()
    return matrix, [start] + [site for site in nearest if site != start]


def _pair(order: list[int], size: int) -> list[list[int]]:
    return sorted([sorted(order[:size]), sorted(order[size:])])


def _within(matrix: NDArray[np.float64], members: list[int]) -> float:
    """The sum over all pairs of a cluster; of the two directions of a pair the mean."""
    return float(matrix[np.ix_(members, members)].sum()) / 2
