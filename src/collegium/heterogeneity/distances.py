"""Distances between sites, from numbers about their cases.

Distance-aware averaging (Eq. 1 and Appendix C) and pFedNet's similarity graph are built on them.
Every function that takes sites by name returns a matrix (N, N) of float64 whose rows and columns
follow the sorted names.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from collegium.errors import ConfigError, DataError

Array = NDArray[np.float64]
Normalise = Literal["none", "pooled_std"]
Between = Literal["centroid", "pairwise", "energy"]


def emd_matrix(samples: Mapping[str, ArrayLike], *, normalise: Normalise = "none") -> Array:
    """Return the earth mover's distances of one quantity between all pairs of sites.

    These are Wasserstein-1 distances of empirical distributions, the areas between two distribution
    functions: exact, without bins, and for any numbers of cases.

    Args:
        samples: by site one value per case, (n,).
        normalise: "none" keeps the unit, as the paper does; "pooled_std" divides by the standard
            deviation over the cases of all sites together (divisor n), so that quantities of
            different units can be averaged.

    Returns:
        (N, N).

    Raises:
        ConfigError: ``normalise`` is neither of the two.
        DataError: a site has no values, or NaN or infinite ones.
    """
    columns = {site: np.sort(_finite(samples[site], site, axes=1)) for site in sorted(samples)}
    matrix = pair_matrix(columns, _emd)
    return matrix / scale(normalise, lambda: float(np.concatenate([*columns.values()]).std()))


def emd_of_histograms(a: tuple[ArrayLike, ArrayLike], b: tuple[ArrayLike, ArrayLike]) -> float:
    """Return the earth mover's distance of two histograms, each with bins of its own.

    The values of a bin are taken as spread evenly over it; those of a bin without width all lie at
    its edge. For these distributions the distance is exact: the area between the two quantile
    functions, which are straight lines between the levels at which a bin begins or ends.

    Args:
        a: counts (k,) and edges (k + 1,), as of `numpy.histogram`; counts need not be whole.
        b: the same, possibly of other bins.

    Raises:
        DataError: counts are negative, all zero or not finite, edges decrease or are not finite, or
            there is not one more edge than counts.
    """
    first, second = _QuantileFunction.of(*a), _QuantileFunction.of(*b)
    levels = np.union1d(first.levels, second.levels)
    low, high = levels[:-1], levels[1:]
    middle = (low + high) / 2
    at_low = first(low, middle) - second(low, middle)
    at_high = first(high, middle) - second(high, middle)
    size = np.abs(at_low) + np.abs(at_high)
    crossing = np.sign(at_low) * np.sign(at_high) < 0
    squares = at_low**2 + at_high**2
    mean = np.divide(squares, size, out=size.copy(), where=crossing) / 2
    return float(((high - low) * mean).sum())


@dataclass(frozen=True)
class _QuantileFunction:
    """A histogram's quantile function: on each stretch between two levels a straight line."""

    levels: Array
    starts: Array
    ends: Array

    @classmethod
    def of(cls, counts: ArrayLike, edges: ArrayLike) -> "_QuantileFunction":
        mass, borders = np.asarray(counts, np.float64), np.asarray(edges, np.float64)
        if mass.ndim != 1 or borders.shape != (mass.size + 1,):
            raise DataError(
                f"a histogram has counts of shape {mass.shape} and edges of shape {borders.shape}; "
                f"give one more edge than counts"
            )
        if not np.isfinite(mass).all() or (mass < 0).any() or not mass.sum() > 0:
            raise DataError("a histogram's counts are negative, not finite or all zero")
        if not np.isfinite(borders).all() or (np.diff(borders) < 0).any():
            raise DataError("a histogram's edges decrease or are not finite; sort them")
        used = mass > 0
        levels = np.concatenate([[0.0], np.cumsum(mass[used])]) / mass[used].sum()
        levels[-1] = 1.0
        return cls(levels, borders[:-1][used], borders[1:][used])

    def __call__(self, at: Array, inside: Array) -> Array:
        """Return the values at some levels, each on the stretch that holds the level ``inside``."""
        stretch = np.searchsorted(self.levels, inside, side="right") - 1
        low, high = self.levels[stretch], self.levels[stretch + 1]
        part = (at - low) / (high - low)
        return self.starts[stretch] * (1 - part) + self.ends[stretch] * part


def federation_value(matrix: ArrayLike) -> float:
    """Return the mean distance over all pairs of sites; 0 for one site.

    Raises:
        DataError: it is no distance matrix (see `checked`).
    """
    distance = checked(matrix)
    count = len(distance)
    return float(distance.sum() / (count * (count - 1))) if count > 1 else 0.0


@dataclass(frozen=True)
class CombinedDistances:
    """The distances of the sites by several kinds of metadata.

    Attributes:
        matrix: (N, N), the mean of the matrices chosen, one of each kind.
        names: of each kind, the name of the matrix chosen.
    """

    matrix: Array
    names: tuple[str, ...]


def combine(*kinds: Mapping[str, ArrayLike]) -> CombinedDistances:
    """Average, over kinds of metadata, the matrix in which the sites differ most (Appendix C).

    Of each kind the matrix with the largest `federation_value` is kept; of equal ones the first by
    name. In the paper's units labels (mL) dominate intensities (z-scores); `emd_matrix` can
    normalise both.

    Args:
        *kinds: by channel, the distances of the cases' largest intensities; by label, the
            distances of their volumes. A kind without matrices is left out.

    Raises:
        DataError: no kind has a matrix, a matrix is no distance matrix, or sizes differ.
    """
    names, chosen = [], []
    for matrices in filter(None, kinds):
        values = {name: federation_value(matrix) for name, matrix in sorted(matrices.items())}
        names.append(max(values, key=values.__getitem__))
        chosen.append(checked(matrices[names[-1]]))
    if not chosen:
        raise DataError("there are no distances to combine; ask the sites for their statistics")
    for other in chosen[1:]:
        if other.shape != chosen[0].shape:
            raise DataError(
                f"one kind of metadata is known of {len(chosen[0])} sites, another of "
                f"{len(other)}; ask the same sites for both"
            )
    return CombinedDistances(np.mean(chosen, axis=0), tuple(names))


def centroid_distances(
    embeddings: Mapping[str, ArrayLike], *, between: Between = "centroid"
) -> Array:
    """Return the Euclidean distances between the embeddings of all pairs of sites.

    Eq. 1 of the paper is undefined for unequal numbers of cases; the distance of the means is what
    its figures suggest.

    Args:
        embeddings: by site (n_i, D), a row per case.
        between: "centroid": between the means. "pairwise": the mean over all pairs of a case here
            and a case there, which grows with the spread inside the sites. "energy": the energy
            distance, the root of twice that mean less the two means over pairs inside a site; 0
            only for equal distributions.

    Raises:
        ConfigError: ``between`` is none of the three.
        DataError: a site has no embeddings, NaN or infinite ones, or another number of columns.
    """
    rows = {site: _finite(embeddings[site], site, axes=2) for site in sorted(embeddings)}
    _same_shape({site: table.shape[1:] for site, table in rows.items()})
    if between == "centroid":
        return euclidean_distances({site: table.mean(0) for site, table in rows.items()})
    if between == "pairwise":
        return pair_matrix(rows, _mean_pair)
    if between != "energy":
        raise ConfigError(f"between is {between!r}; choose centroid, pairwise or energy")
    within = np.array([_mean_pair(table, table) for table in rows.values()])
    across = pair_matrix(rows, _mean_pair)
    squared = 2 * across - within[:, None] - within[None, :]
    np.fill_diagonal(squared, 0.0)
    energy: Array = np.sqrt(np.maximum(squared, 0.0))
    return energy


def l1_distances(sketches: Mapping[str, ArrayLike]) -> Array:
    """Return the sums of absolute differences between all pairs of sketches, as in pFedNet's code.

    Args:
        sketches: by site an array of any shape, the same for all.

    Raises:
        DataError: a sketch is empty, holds NaN or infinite values, or has another shape.
    """
    return pair_matrix(_vectors(sketches), lambda a, b: float(np.abs(a - b).sum()))


def euclidean_distances(vectors: Mapping[str, ArrayLike]) -> Array:
    """Return the Euclidean distances between all pairs of vectors, such as shares of labels.

    Args:
        vectors: by site an array of any shape, the same for all.

    Raises:
        DataError: a vector is empty, holds NaN or infinite values, or has another shape.
    """
    return pair_matrix(_vectors(vectors), lambda a, b: float(np.linalg.norm(a - b)))


def checked(matrix: ArrayLike) -> Array:
    """Return a distance matrix as float64, its diagonal 0.

    It need not be symmetric: some that are printed in papers are not.

    Raises:
        DataError: it is not square, or a distance is negative, NaN or infinite.
    """
    distance = np.array(matrix, np.float64)
    if distance.ndim != 2 or distance.shape[0] != distance.shape[1] or not distance.size:
        raise DataError(
            f"a distance matrix has the shape {distance.shape}; give a row and a column per site"
        )
    np.fill_diagonal(distance, 0.0)
    wrong = np.argwhere(~np.isfinite(distance) | (distance < 0))
    if len(wrong):
        i, j = (int(index) for index in wrong[0])
        raise DataError(
            f"the distance of sites {i + 1} and {j + 1}, in sorted order, is {distance[i, j]}; "
            f"look at what these two sent"
        )
    return distance


def pair_matrix(of_sites: Mapping[str, Any], distance: Callable[[Any, Any], float]) -> Array:
    """Return the symmetric matrix of a distance between all pairs of sites.

    Args:
        of_sites: by site what is compared.
        distance: takes those of two sites.

    Returns:
        (N, N), sites in sorted order.
    """
    items = [of_sites[site] for site in sorted(of_sites)]
    matrix = np.zeros((len(items), len(items)))
    for i, j in itertools.combinations(range(len(items)), 2):
        matrix[i, j] = matrix[j, i] = distance(items[i], items[j])
    return matrix


def scale(normalise: Normalise, spread: Callable[[], float]) -> float:
    """Return the divisor of a matrix of distances.

    Args:
        normalise: "none": 1; "pooled_std": the spread, or 1 if nothing varies.
        spread: returns the standard deviation over all cases.

    Raises:
        ConfigError: ``normalise`` is none of the words.
    """
    if normalise not in ("none", "pooled_std"):
        raise ConfigError(f"normalise is {normalise!r}; choose none or pooled_std")
    return (spread() or 1.0) if normalise == "pooled_std" else 1.0


def _emd(a: Array, b: Array) -> float:
    every = np.sort(np.concatenate([a, b]))
    share_a = np.searchsorted(a, every[:-1], side="right") / len(a)
    share_b = np.searchsorted(b, every[:-1], side="right") / len(b)
    return float((np.abs(share_a - share_b) * np.diff(every)).sum())


def _mean_pair(a: Array, b: Array) -> float:
    from scipy.spatial.distance import cdist

    return float(cdist(a, b).mean())


def _vectors(of_sites: Mapping[str, ArrayLike]) -> dict[str, Array]:
    arrays = {site: np.asarray(value, np.float64) for site, value in sorted(of_sites.items())}
    _same_shape({site: array.shape for site, array in arrays.items()})
    return {site: _finite(array, site).reshape(-1) for site, array in arrays.items()}


def _finite(values: ArrayLike, site: str, *, axes: int | None = None) -> Array:
    """Return what a site sent as float64, checked."""
    array = np.asarray(values, np.float64)
    whose = f"site {site!r}"
    if not array.size:
        raise DataError(
            f"{whose} has no statistics, so that its distance is unknown; add cases or leave it out"
        )
    if axes is not None and array.ndim != axes:
        raise DataError(f"{whose} has statistics of shape {array.shape}; give {axes} axes")
    if not np.isfinite(array).all():
        raise DataError(
            f"{whose} has NaN or infinite statistics; look at its images and labels, or leave it "
            f"out"
        )
    return array


def _same_shape(shapes: Mapping[str, tuple[int, ...]]) -> None:
    first = next(iter(shapes), "")
    for site, shape in shapes.items():
        if shape != shapes[first]:
            raise DataError(
                f"site {site!r} has statistics of shape {shape} and site {first!r} of shape "
                f"{shapes[first]}; describe all sites in the same way"
            )
