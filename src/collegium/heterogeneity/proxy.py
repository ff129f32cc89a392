"""The proxy A-distance: how well a linear classifier tells two sites apart.

After Ben-David et al. (2007); GRACE and IOP-FL use it to show how far features of sites lie apart.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from collegium.core.randomness import seed_of
from collegium.errors import ConfigError, DataError
from collegium.heterogeneity.distances import pair_matrix

Array = NDArray[np.float64]


def proxy_a_distance(a: ArrayLike, b: ArrayLike, *, folds: int = 5, seed: int = 0) -> float:
    """Return 2 (1 - 2 error), from 0 (the sites cannot be told apart) to 2 (always).

    The error is that of a logistic regression (features standardised, penalty 1) on cases it was
    not trained on, by stratified cross-validation; both sites weigh alike in training and in the
    error, whatever their numbers of cases. An error above one half counts as one half. The order of
    the cases does not matter. With a handful of cases the error is coarse, and a permutation of the
    sites is the way to know what it is by chance.

    Args:
        a: (n, D) features, a row per case.
        b: (m, D) features.
        folds: parts of the cross-validation; as many as the smaller site has cases where that is
            less.
        seed: names the generator that divides the cases.

    Raises:
        ConfigError: there are fewer than two folds.
        DataError: a site has fewer than two cases, or NaN or infinite features, or the sites have
            different features.
    """
    return _distance(_table(a, "the first site"), _table(b, "the second site"), folds, seed)


def proxy_a_matrix(embeddings: Mapping[str, ArrayLike], *, folds: int = 5, seed: int = 0) -> Array:
    """Proxy A-distances between all pairs of sites (N, N), in sorted order of the sites.

    Args:
        embeddings: by site (n_i, D), a row per case.
        folds: as in `proxy_a_distance`.
        seed: as in `proxy_a_distance`.

    Raises:
        ConfigError: there are fewer than two folds.
        DataError: a site has fewer than two cases, or NaN or infinite features, or the sites have
            different features.
    """
    tables = {site: _table(rows, f"site {site!r}") for site, rows in embeddings.items()}
    return pair_matrix(tables, lambda a, b: _distance(a, b, folds, seed))


def _distance(a: Array, b: Array, folds: int, seed: int) -> float:
    if folds < 2:
        raise ConfigError(f"cross-validation with {folds} folds tests nothing; choose at least 2")
    if a.shape[1] != b.shape[1]:
        raise DataError(
            f"one site has {a.shape[1]} features and another {b.shape[1]}; use one encoder for both"
        )
    rows, site = np.concatenate([a, b]), np.repeat([0, 1], [len(a), len(b)])
    wrong = _predictions(rows, site, min(folds, len(a), len(b)), seed) != site
    error = (wrong[site == 0].mean() + wrong[site == 1].mean()) / 2
    return float(2 * (1 - 2 * min(error, 0.5)))


def _predictions(rows: Array, site: NDArray[np.int64], folds: int, seed: int) -> NDArray[np.int64]:
    """Return the site that each case is taken for by a classifier that has not seen it."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    divide = StratifiedKFold(folds, shuffle=True, random_state=seed_of(seed, "proxy") % 2**32)
    found = np.empty_like(site)
    for train, test in divide.split(rows, site):
        linear = LogisticRegression(class_weight="balanced", max_iter=10_000)
        classifier = make_pipeline(StandardScaler(), linear)
        found[test] = classifier.fit(rows[train], site[train]).predict(rows[test])
    return found


def _table(features: ArrayLike, whose: str) -> Array:
    """Return the features in an order that is that of the values."""
    rows = np.asarray(features, np.float64)
    if rows.ndim != 2 or len(rows) < 2 or not rows.shape[1]:
        raise DataError(
            f"{whose} has features of shape {rows.shape}; telling sites apart takes at least two "
            f"cases of each, a row for a case"
        )
    if not np.isfinite(rows).all():
        raise DataError(f"{whose} has NaN or infinite features; look at its images")
    ordered: Array = rows[np.lexsort(rows.T[::-1])]
    return ordered
