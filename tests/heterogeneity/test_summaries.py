import json

import numpy as np
import pytest
from scipy import stats

from collegium.errors import ConfigError, DataError, ProtocolError
from collegium.heterogeneity.summaries import emd_matrix, histogram, quantiles

KINDS = [histogram, quantiles]


def emd(a, b):
    """The earth mover's distance of two sites' summaries."""
    return emd_matrix({"a": a, "b": b})[0, 1]


def half_width(summary):
    """Half the mean width of the bins, each as often as it counts: the most that a summary errs."""
    return np.average(np.diff(summary["edges"]), weights=summary["counts"]) / 2


def pooled_std(summaries):
    """What distances are divided by."""
    scaled = emd_matrix(summaries, normalise="pooled_std")
    return emd_matrix(summaries)[0, 1] / scaled[0, 1]


def sample(rng):
    """Values of one of several shapes, with ties, outliers or none, from 1 to 60 of them."""
    count = int(rng.integers(1, 60))
    shapes = (
        rng.normal(rng.normal(), 2, count),
        rng.integers(0, 4, count).astype(float),
        rng.pareto(1.2, count),
        np.where(rng.random(count) < 0.5, 0.0, rng.gamma(2, 5, count)),
    )
    return shapes[int(rng.integers(len(shapes)))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bins", [1, 3, 16])
def test_the_error_is_within_the_bound(kind, bins):
    rng = np.random.default_rng(bins)
    for _ in range(100):
        a, b = sample(rng), sample(rng)
        exact = stats.wasserstein_distance(a, b)
        left, right = kind(a, bins), kind(b, bins)
        bound = half_width(left) + half_width(right)
        assert abs(emd(left, right) - exact) <= bound + 1e-12
        assert bound <= (np.ptp(a) + np.ptp(b)) / (2 * bins) + 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_is_reached(kind):
    # all values at the ends of their bins, against a site of one point far away on one side
    values, bins = [0.0, 0.0, 2.0, 2.0], 1
    left, right = kind(values, bins), kind([1.0], bins)
    assert emd(left, right) == pytest.approx(0.5)  # spread over [0, 2]: mean of |x - 1|
    assert stats.wasserstein_distance(values, [1.0]) == 1.0
    assert half_width(left) + half_width(right) == pytest.approx(1.0)
    skew = kind([0.0] * 999 + [1.0], 1), kind([0.0], 1)
    assert emd(*skew) == pytest.approx(0.5)  # exact: 0.001


def test_a_histogram_counts_as_numpy_does():
    values = np.random.default_rng(0).normal(size=200)
    counts, edges = np.histogram(values, 10)
    found = histogram(values, 10)
    assert found["counts"] == counts.tolist()
    np.testing.assert_allclose(found["edges"], edges, rtol=1e-14)


def test_quantiles_are_observed_values_each_as_far_up_as_its_level():
    values = np.random.default_rng(1).normal(size=37)
    found = quantiles(values, 8)
    expected = [np.quantile(values, k / 8, method="inverted_cdf") for k in range(9)]
    assert found["edges"] == expected
    assert found["counts"] == [37 / 8] * 8


@pytest.mark.parametrize("kind", KINDS)
def test_equal_values_are_kept_exactly(kind):
    found = kind([2.5] * 7, 4)
    assert set(found["edges"]) == {2.5}
    assert sum(found["counts"]) == 7
    assert half_width(found) == 0.0
    assert emd(found, kind([1.0], 4)) == pytest.approx(1.5)


def test_nearly_equal_large_values_are_summarised_too():
    values = [1e16, 1e16 + 2, 1e16 + 4]
    for kind in KINDS:
        found = kind(values, 32)
        assert sum(found["counts"]) == pytest.approx(3)
        assert (np.diff(found["edges"]) >= 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_summaries_are_plain_and_survive_a_journey(kind):
    found = kind(np.arange(10), 4)
    assert json.loads(json.dumps(found)) == found
    assert {type(number) for numbers in found.values() for number in numbers} == {float}


@pytest.mark.parametrize("kind", KINDS)
def test_many_bins_approach_the_matrix_of_the_values(kind):
    rng = np.random.default_rng(3)
    values = {name: rng.normal(shift, 1, 150) for name, shift in (("b", 0), ("a", 1), ("c", 3))}
    exact = [[stats.wasserstein_distance(values[i], values[j]) for j in "abc"] for i in "abc"]
    found = emd_matrix({name: kind(column, 400) for name, column in values.items()})
    np.testing.assert_allclose(found, exact, atol=0.02)
    every = np.concatenate([*values.values()]).std()
    summaries = {name: kind(column, 400) for name, column in values.items()}
    assert pooled_std(summaries) == pytest.approx(every, rel=1e-3)
    np.testing.assert_allclose(
        emd_matrix(summaries, normalise="pooled_std"), found / pooled_std(summaries)
    )


def test_the_spread_inside_bins_counts():
    uniform = {"edges": [0.0, 1.0], "counts": [5.0]}
    shifted = {"edges": [1.0, 2.0], "counts": [5.0]}
    assert pooled_std({"a": uniform, "b": shifted}) == pytest.approx(np.sqrt(2**2 / 12))
    point = {"edges": [2.0, 2.0], "counts": [5.0]}
    # half of the mass uniform on [0, 1], half at 2: variance 1/24 + (3/4)^2
    assert pooled_std({"a": uniform, "b": point}) == pytest.approx(np.sqrt(1 / 24 + 9 / 16))


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_summarised_is_refused(kind):
    with pytest.raises(DataError, match="no values to summarise"):
        kind([], 4)
    with pytest.raises(DataError, match="NaN or infinite"):
        kind([1.0, float("nan")], 4)
    with pytest.raises(ConfigError, match="0 bins says nothing"):
        kind([1.0], 0)


@pytest.mark.parametrize(
    "sent",
    [
        {"edges": [0.0, 1.0]},
        {"edges": [0.0, 1.0], "counts": [1.0], "name": [1.0]},
        {"edges": [0.0, 1.0], "counts": [1.0, 1.0]},
        {"edges": [0.0, float("nan")], "counts": [1.0]},
        {"edges": [1.0, 0.0], "counts": [1.0]},
        {"edges": [0.0, 1.0], "counts": [-1.0]},
        {"edges": [0.0, 1.0], "counts": [0.0]},
        {"edges": ["a", "b"], "counts": [1.0]},
        [0.0, 1.0],
    ],
)
def test_what_is_no_summary_is_an_error_that_names_the_site(sent):
    with pytest.raises(ProtocolError, match="site 'north' sent is no summary"):
        emd_matrix({"north": sent, "south": histogram([1.0])})
