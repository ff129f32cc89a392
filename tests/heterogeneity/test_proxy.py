import numpy as np
import pytest

from collegium.errors import ConfigError, DataError
from collegium.heterogeneity.proxy import proxy_a_distance, proxy_a_matrix


def cloud(seed, count, shift=0.0):
    rows = np.random.default_rng(seed).normal(size=(count, 4))
    rows[:, 0] += shift
    return rows


def test_sites_far_apart_are_at_two_and_equal_ones_near_zero():
    assert proxy_a_distance(cloud(0, 20, 40), cloud(1, 30)) == 2.0
    assert proxy_a_distance(cloud(2, 300), cloud(3, 300)) < 0.25


def test_between_the_two_it_is_the_error_of_the_best_line():
    # two normal clouds 2 apart: the best line errs at Phi(-1) = 0.1587
    found = proxy_a_distance(cloud(4, 800, 2.0), cloud(5, 800))
    assert found == pytest.approx(2 * (1 - 2 * 0.158655), abs=0.12)


def test_both_sites_weigh_alike_whatever_their_numbers():
    # a classifier that always says the larger site would err in 1 of 20 cases only
    assert proxy_a_distance(cloud(6, 20), cloud(7, 380)) < 0.6
    found = proxy_a_distance(cloud(8, 60, 2.0), cloud(9, 1200))
    assert found == pytest.approx(2 * (1 - 2 * 0.158655), abs=0.25)


def test_it_is_never_negative():
    # each case of one site has a twin at the other: held out, it is taken for its twin's
    rows = cloud(10, 12)
    assert proxy_a_distance(rows, rows) == 0.0


def test_neither_the_order_of_the_cases_nor_the_moment_matters():
    a, b = cloud(11, 15, 1.0), cloud(12, 21)
    first = proxy_a_distance(a, b)
    assert proxy_a_distance(a[::-1], np.roll(b, 4, axis=0)) == first
    assert 0 < first < 2


def test_the_matrix_follows_the_sorted_sites():
    tables = {"c": cloud(13, 12, 3.0), "a": cloud(14, 10), "b": cloud(15, 14, 1.0)}
    matrix = proxy_a_matrix(tables, folds=4)
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_array_equal(np.diag(matrix), np.zeros(3))
    assert matrix[0, 2] == proxy_a_distance(tables["a"], tables["c"], folds=4)
    assert matrix[1, 2] == proxy_a_distance(tables["b"], tables["c"], folds=4)


def test_a_feature_that_never_varies_does_no_harm():
    a, b = cloud(16, 10, 9.0), cloud(17, 10)
    a[:, 3] = b[:, 3] = 7.0
    assert proxy_a_distance(a, b) == 2.0


def test_two_cases_of_a_site_are_the_least():
    assert proxy_a_distance(cloud(18, 2, 50)[:, :1], cloud(19, 9)[:, :1]) == 2.0
    with pytest.raises(DataError, match="site 'b' has features of shape"):
        proxy_a_matrix({"a": cloud(20, 9), "b": cloud(21, 1)})


def test_what_cannot_be_told_apart_is_refused():
    with pytest.raises(ConfigError, match="1 folds tests nothing"):
        proxy_a_distance(cloud(0, 4), cloud(1, 4), folds=1)
    with pytest.raises(DataError, match="use one encoder for both"):
        proxy_a_distance(cloud(0, 4), cloud(1, 4)[:, :3])
    with pytest.raises(DataError, match="the second site has NaN"):
        proxy_a_distance(cloud(0, 4), np.full((4, 4), np.nan))
