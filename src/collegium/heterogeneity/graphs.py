"""The similarity graph of pFedNet, whose incidence matrix is Q."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from collegium.errors import ConfigError
from collegium.heterogeneity.distances import checked

Edge = tuple[int, int]


def neighbours(distance: ArrayLike, k: int) -> list[list[int]]:
    """Return the k nearest other sites of every site, the nearest first.

    A site is never its own neighbour, and of equally near sites the lower index comes first. The
    authors' code fills the diagonal with a number, so that there a site can become its own.

    Args:
        distance: (N, N).
        k: number of neighbours, from 1 to N - 1.

    Raises:
        ConfigError: there is one site only, or k is out of range.
        DataError: the matrix is no distance matrix.
    """
    matrix = checked(distance)
    count = len(matrix)
    if count == 1:
        raise ConfigError("there is one site only, and nobody for it to be similar to; add sites")
    check_neighbours(k, count)
    orders = np.argsort(matrix, axis=1, kind="stable").tolist()
    return [[j for j in order if j != i][:k] for i, order in enumerate(orders)]


def check_neighbours(k: int, count: int) -> None:
    """Check that every site can have k neighbours.

    Args:
        k: number of neighbours.
        count: number of sites.

    Raises:
        ConfigError: k is not between 1 and count - 1.
    """
    if not 1 <= k <= count - 1:
        raise ConfigError(
            f"k is {k}, but with {count} sites a site has 1 to {count - 1} neighbours; choose k "
            f"in this range"
        )


def edges(neighbours: Sequence[Sequence[int]]) -> list[Edge]:
    """Return the undirected edges (i, j), i < j, sorted: one if either site names the other.

    Of the authors' scripts one loses edges that only the higher index names,
    another counts mutual ones twice.
    """
    pairs = {(min(i, j), max(i, j)) for i, near in enumerate(neighbours) for j in near if i != j}
    return sorted(pairs)


def incidence(count: int, edges: Sequence[Edge]) -> NDArray[np.float64]:
    """Return Q, (N, M): in the column of edge (i, j) +1 at i, -1 at j and 0 elsewhere.

    Every column sums to 0. Which end is positive does not matter to a norm of ZQ.

    Args:
        count: N, the number of sites.
        edges: M pairs of different indices below N.

    Raises:
        ConfigError: an edge joins a site to itself or to one that does not exist.
    """
    matrix = np.zeros((count, len(edges)))
    for column, (i, j) in enumerate(edges):
        if i == j or not (0 <= i < count and 0 <= j < count):
            raise ConfigError(f"edge {(i, j)} does not join two of {count} sites")
        matrix[i, column], matrix[j, column] = 1.0, -1.0
    return matrix


def incidence_of(sites: Sequence[str], edges: Sequence[Sequence[str]]) -> NDArray[np.float64]:
    """Return Q, (N, M), of the edges between some sites.

    Args:
        sites: N names, in the order of the rows.
        edges: pairs of names; an edge with another site is left out.
    """
    place = {site: index for index, site in enumerate(sites)}
    within = [(place[a], place[b]) for a, b in edges if a in place and b in place]
    return incidence(len(sites), within)
