"""The proxy A-distance: how well a linear classifier separates the cases of two sites.

After Ben-David et al. (2007); GRACE and IOP-FL use it to show how far features of sites lie apart.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from collegium.core.randomness import seed_of
from collegium.errors import ConfigError, DataError
from collegium.heterogeneity.distances import pair_matrix

Array = NDArray[np.float64]


def proxy_a_distance(a: ArrayLike, b: ArrayLike, *, folds: int = 5, seed: int = 0) -> float:
    """Return the proxy A-distance of two sites, every case being held out once.

    The folds are stratified, and the order of the cases does not matter. With a handful of cases
    the error is coarse; permutations of the sites show what it is by chance.

    Args:
        a: (n, D) features, a row per case.
        b: (m, D) features.
        folds: parts of the cross-validation; as many as the smaller site has cases if that is less.
        seed: names the generator that divides the cases.

    Returns:
        From 0 to 2, see `held_out_distance`.

    Raises:
        ConfigError: there are fewer than two folds.
        DataError: a site has fewer than two cases, or NaN or infinite features, or the sites have
            different features.
    """
    from sklearn.model_selection import StratifiedKFold

    first, second = _in_order(a, "the first site"), _in_order(b, "the second site")
    if folds < 2:
        raise ConfigError(f"cross-validation with {folds} folds tests nothing; choose at least 2")
    if first.shape[1] != second.shape[1]:
        raise DataError(
            f"one site has {first.shape[1]} features and another {second.shape[1]}; use one "
            f"encoder for both"
        )
    rows, side = np.concatenate([first, second]), np.repeat([0, 1], [len(first), len(second)])
    divide = StratifiedKFold(
        min(folds, len(first), len(second)),
        shuffle=True,
        random_state=seed_of(seed, "proxy") % 2**32,
    )
    return held_out_distance(rows, side, divide.split(rows, side))


def proxy_a_matrix(embeddings: Mapping[str, ArrayLike], *, folds: int = 5, seed: int = 0) -> Array:
    """Return the proxy A-distances between all pairs of sites (N, N), in sorted order of the sites.

    Args:
        embeddings: by site (n_i, D), a row per case.
        folds: as in `proxy_a_distance`.
        seed: as in `proxy_a_distance`.

    Raises:
        ConfigError: there are fewer than two folds.
        DataError: a site has fewer than two cases, or NaN or infinite features, or the sites have
            different features.
    """
    tables = {site: _in_order(rows, f"site {site!r}") for site, rows in embeddings.items()}
    return pair_matrix(tables, lambda a, b: proxy_a_distance(a, b, folds=folds, seed=seed))


def held_out_distance(
    rows: Array, side: NDArray[np.int64], splits: Iterable[tuple[NDArray[Any], NDArray[Any]]]
) -> float:
    """Return 2 (1 - 2 error), from 0 (the two sides cannot be separated) to 2 (always).

    The error is that of a logistic regression (features standardised, penalty 1) on rows that it
    was not trained on; both sides have the same weight in training and in the error, whatever their
    numbers of rows. An error above one half counts as one half.

    Args:
        rows: (n, D) features.
        side: (n,), 0 or 1.
        splits: pairs of training and test rows, as indices or masks; every row is tested once.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    predicted = np.empty_like(side)
    for train, test in splits:
        linear = LogisticRegression(class_weight="balanced", max_iter=10_000)
        classifier = make_pipeline(StandardScaler(), linear)
        predicted[test] = classifier.fit(rows[train], side[train]).predict(rows[test])
    wrong = predicted != side
    error = (wrong[side == 0].mean() + wrong[side == 1].mean()) / 2
    return float(2 * (1 - 2 * min(error, 0.5)))


def _in_order(features: ArrayLike, whose: str) -> Array:
    """Return the features, checked, in an order that only their values determine."""
    rows = np.asarray(features, np.float64)
    if rows.ndim != 2 or len(rows) < 2 or not rows.shape[1]:
        raise DataError(
            f"{whose} has features of shape {rows.shape}; a proxy A-distance takes at least two "
            f"cases of each site, a row for a case"
        )
    if not np.isfinite(rows).all():
        raise DataError(f"{whose} has NaN or infinite features; look at its images")
    ordered: Array = rows[np.lexsort(rows.T[::-1])]
    return ordered
