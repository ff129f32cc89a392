from math import erf, sqrt
from typing import Any

import numpy as np
import pytest

from collegium.diagnostics.drift.distances import SiteFeatures, apart, apart_matrix
from collegium.errors import DataError
from collegium.heterogeneity.proxy import proxy_a_distance


def windows(seed: int, patients: int, per: int, *, shift: float = 0.0) -> SiteFeatures:
    """Windows of patients who differ by 1, and whose windows differ by 0.3."""
    rng = np.random.default_rng(seed)
    own = rng.normal(size=(patients, 1, 8)) + rng.normal(0.0, 0.3, (patients, per, 8))
    rows = own.reshape(-1, 8)
    rows[:, 0] += shift
    return SiteFeatures(rows, np.repeat(np.arange(patients), per))


def moved(seen: SiteFeatures, by: float, seed: int = 0) -> SiteFeatures:
    """The same windows under a model that moves the first feature, and all a little."""
    rows = seen.rows + np.random.default_rng(seed).normal(0.0, 0.05, seen.rows.shape)
    rows[:, 0] += by
    return SiteFeatures(rows, seen.patients)


def best_line(shift: float, spread: float) -> float:
    """The distance of two normal clouds: the best line errs at Phi(-shift / 2 spread)."""
    error = (1 + erf(-shift / (2 * spread * sqrt(2)))) / 2
    return 2 * (1 - 2 * error)


def test_planted_sites_are_at_zero_and_at_two_as_by_the_proxy_of_heterogeneity() -> None:
    first, far = windows(0, 20, 1), windows(1, 30, 1, shift=40.0)
    assert apart(first, far) == proxy_a_distance(first.rows, far.rows) == 2.0
    assert apart(first, first) == proxy_a_distance(first.rows, first.rows) == 0.0
    near, other = windows(2, 400, 1), windows(3, 400, 1)
    assert apart(near, other) < 0.2
    assert proxy_a_distance(near.rows, other.rows) < 0.2


@pytest.mark.parametrize("shift", [0.4, 1.0, 2.0])
def test_a_drift_between_the_two_is_that_of_the_best_line(shift: float) -> None:
    seen = windows(4, 600, 1)
    expected = best_line(shift, sqrt(1 + 0.3**2 + 0.05**2 / 2))
    assert apart(seen, moved(seen, shift)) == pytest.approx(expected, abs=0.1)


def test_a_small_drift_is_found_that_twins_in_other_folds_would_hide() -> None:
    found, by_rows = [], []
    for seed in range(6):
        seen = windows(seed, 64, 1)
        after = moved(seen, 0.2, seed)
        found.append(apart(seen, after, seed=seed))
        by_rows.append(proxy_a_distance(seen.rows, after.rows, seed=seed))
    assert max(by_rows) < 0.02
    assert np.mean(found) == pytest.approx(best_line(0.2, sqrt(1 + 0.3**2)), abs=0.06)


def test_many_windows_of_a_patient_do_not_make_alike_sites_differ() -> None:
    pairs = [(windows(seed, 8, 8), windows(seed + 100, 8, 8)) for seed in range(8)]
    by_rows = [proxy_a_distance(first.rows, other.rows) for first, other in pairs]
    assert np.mean(by_rows) > 1.0
    assert np.mean([apart(first, other) for first, other in pairs]) < 0.5


def test_only_the_grouping_of_the_numbers_of_patients_matters() -> None:
    first, other = windows(5, 9, 3, shift=1.0), windows(6, 7, 3)
    value = apart(first, other)
    assert 0 < value < 2
    assert apart(SiteFeatures(first.rows, 10 + 5 * first.patients), other) == value


def test_the_matrix_follows_the_sorted_sites() -> None:
    sites = {"c": windows(7, 9, 2, shift=3.0), "a": windows(8, 8, 2), "b": windows(9, 7, 2)}
    matrix = apart_matrix(sites, seed=3)
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_array_equal(np.diag(matrix), np.zeros(3))
    assert matrix[0, 2] == apart(sites["a"], sites["c"], seed=3)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_cannot_be_told_apart_is_refused(value: Any) -> None:
    one, two = windows(0, 1, 9), windows(1, 2, 9)
    with pytest.raises(DataError, match="windows of 1 patients cannot be told apart"):
        apart(one, two)
    with pytest.raises(DataError, match="a model sees NaN or infinite features"):
        apart(two, SiteFeatures(np.full_like(two.rows, value), two.patients))
