"""The most distant site and the clusters that distance-aware averaging finds in a matrix.

Indices are those of the matrix, from 0; clusters are sorted, the one with the lowest index first.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from collegium.errors import ConfigError
from collegium.heterogeneity.distances import checked

SMALLEST = 4
"""With fewer sites there are no two clusters of at least two."""


def most_distant(distance: ArrayLike) -> int:
    """Return the site with the largest sum of distances (i_max); of equal ones the lowest index.

    Of two sites neither is more distant than the other, and the first is returned; so is a site
    that is alone. The result has a meaning from three sites on.

    Raises:
        DataError: it is no distance matrix.
    """
    return int(checked(distance).sum(axis=1).argmax())


def printed_clusters(distance: ArrayLike) -> list[list[int]]:
    """Return two clusters by Algorithm 1 exactly as it is printed.

    The most distant site takes the nearest of the others, one by one, until two are left. On the
    paper's own EMD matrix of KiTS this is not what the paper reports; see `clusters`.

    Raises:
        ConfigError: there are fewer than four sites.
        DataError: it is no distance matrix.
    """
    matrix, order = _from_the_most_distant(distance)
    return _pair(order, len(matrix) - 2)


def clusters(distance: ArrayLike) -> list[list[int]]:
    """Return two clusters by the rule that gives all clusters that the paper reports.

    One cluster is the most distant site with its m nearest, the other the rest, each at least two
    sites. Of all m from 1 to N - 3 the one with the least total distance within the clusters is
    taken; of equal ones the smallest. With the paper's four and five sites this is its "one or two
    closest". It is not the best of all partitions, which differs from the paper's on KiTS.

    Raises:
        ConfigError: there are fewer than four sites.
        DataError: it is no distance matrix.
    """
    matrix, order = _from_the_most_distant(distance)
    pairs = [_pair(order, size) for size in range(2, len(matrix) - 1)]
    return min(pairs, key=lambda pair: sum(_within(matrix, members) for members in pair))


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
    """Return the sum over all pairs of a cluster; of the two directions of a pair the mean."""
    return float(matrix[np.ix_(members, members)].sum()) / 2
