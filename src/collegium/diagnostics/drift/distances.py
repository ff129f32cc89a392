"""Proxy A-distances between windows, of which a patient has several, each under two models.

`collegium.heterogeneity.proxy` holds out single rows, which is right where a row is a patient. Here
it would mislead both ways. A window is there twice: a classifier that has learnt from one copy
takes the other for it, so that small drifts give 0. And windows of one patient resemble each other:
a classifier that has learnt whose they are tells apart even sites that do not differ. So patients
are held out here, with all their windows under both models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collegium.core.randomness import seed_of
from collegium.errors import DataError
from collegium.heterogeneity.distances import pair_matrix
from collegium.heterogeneity.proxy import held_out_distance

FOLDS = 5
"""Parts of the cross-validation, or as many as the smaller side has patients where that is less."""

Array = NDArray[Any]


@dataclass(frozen=True)
class SiteFeatures:
    """The features that a model extracts from the windows of some patients.

    Attributes:
        rows: (windows, features).
        patients: (windows,) whose each window is, as any numbers.
    """

    rows: Array
    patients: NDArray[np.int64]

    @property
    def count(self) -> int:
        """Number of patients."""
        return len(np.unique(self.patients))


def apart(first: SiteFeatures, second: SiteFeatures, *, seed: int = 0) -> float:
    """Return 2 (1 - 2 error), from 0 (nobody can tell the two apart) to 2 (always).

    The error is that of a logistic regression (features standardised, penalty 1) on patients it
    was not trained on; both sides weigh alike in training and in the error. Where both have the
    same patients, these are held out on both sides at once. An error above one half counts as one
    half.

    Args:
        first: what one model sees, or the windows of one site.
        second: what the other model sees in the same windows, or the windows of another site.
        seed: names the generator that divides the patients.

    Raises:
        DataError: there are fewer than two patients on a side, or NaN or infinite features.
    """
    folds = min(FOLDS, first.count, second.count)
    if folds < 2:
        raise DataError(
            f"windows of {min(first.count, second.count)} patients cannot be told apart, since one "
            f"patient has to be held out; look at images of two at least"
        )
    rows = np.concatenate([first.rows, second.rows]).astype(np.float64)
    if not np.isfinite(rows).all():
        raise DataError("a model sees NaN or infinite features; lower training.lr")
    side = np.repeat([0, 1], [len(first.rows), len(second.rows)])
    part = np.concatenate([_parts(seen.patients, folds, seed) for seen in (first, second)])
    splits = ((part != number, part == number) for number in np.unique(part))
    return held_out_distance(rows, side, splits)


def apart_matrix(sites: Mapping[str, SiteFeatures], *, seed: int = 0) -> Array:
    """Return `apart` for all pairs of sites (N, N), in sorted order of the sites.

    Args:
        sites: the features, by site.
        seed: see `apart`.

    Raises:
        DataError: a site has fewer than two patients, or NaN or infinite features.
    """
    return pair_matrix(sites, lambda first, second: apart(first, second, seed=seed))


def _parts(patients: Array, folds: int, seed: int) -> Array:
    """Return the part in which each window is held out: that of its patient."""
    names, places = np.unique(patients, return_inverse=True)
    order = np.random.default_rng(seed_of(seed, "drift", "folds")).permutation(len(names))
    found: Array = (order % folds)[places]
    return found
