import numpy as np
import pytest
from scipy import stats
from scipy.spatial.distance import cdist

from collegium.errors import ConfigError, DataError
from collegium.heterogeneity.distances import (
    centroid_distances,
    checked,
    combine,
    emd_matrix,
    emd_of_histograms,
    euclidean_distances,
    federation_value,
    l1_distances,
)


def emd(a, b):
    """The earth mover's distance of two sites."""
    return emd_matrix({"a": a, "b": b})[0, 1]


def samples(seed, sizes=(7, 12, 5), digits=1):
    """Values of a few sites; rounding makes ties within and between them."""
    rng = np.random.default_rng(seed)
    pairs = zip(("b", "a", "c"), sizes, strict=True)
    return {name: rng.normal(rng.normal(), 1, n).round(digits) for name, n in pairs}


@pytest.mark.parametrize("seed", range(30))
def test_emd_of_unequal_counts_equals_scipy(seed):
    rng = np.random.default_rng(seed)
    a = rng.gamma(2, size=rng.integers(1, 40)).round(rng.integers(0, 4))
    b = rng.normal(3, 2, size=rng.integers(1, 40)).round(rng.integers(0, 4))
    assert emd(a, b) == pytest.approx(stats.wasserstein_distance(a, b), rel=1e-12, abs=1e-14)
    assert emd(a, b) == emd(b, a)


def test_emd_by_hand():
    # a third of the mass goes 1 -> 0, the middle sixth of each end 0 -> 0 and 3 -> 3: by quantiles
    # [0, 1/3] 0-0, [1/3, 1/2] 1-0, [1/2, 2/3] 1-3, [2/3, 1] 5-3
    assert emd([5, 0, 1], [3, 0]) == pytest.approx(1 / 6 + 2 / 6 + 2 / 3)
    assert emd([2.0], [2.0, 2.0]) == 0.0
    assert emd([1.0], [-3.5]) == 4.5


def test_the_matrix_follows_the_sorted_sites_whatever_their_order():
    values = samples(0)
    matrix = emd_matrix(values)
    turned = emd_matrix(dict(reversed(values.items())))
    by_hand = [
        [stats.wasserstein_distance(values[a], values[b]) for b in ("a", "b", "c")]
        for a in ("a", "b", "c")
    ]
    np.testing.assert_allclose(matrix, by_hand, rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(matrix, turned)


def test_normalised_distances_do_not_depend_on_the_unit():
    values = samples(1)
    litres = {site: column * 1000 for site, column in values.items()}
    expected = emd_matrix(values) / np.concatenate([*values.values()]).std()
    np.testing.assert_allclose(emd_matrix(litres, normalise="pooled_std"), expected, rtol=1e-12)
    np.testing.assert_allclose(emd_matrix(values, normalise="pooled_std"), expected, rtol=1e-12)
    with pytest.raises(ConfigError, match="choose none or pooled_std"):
        emd_matrix(values, normalise="zscore")  # type: ignore[arg-type]


def test_equal_values_at_all_sites_are_no_distance_in_any_unit():
    equal = {"a": [2.0, 2.0], "b": [2.0]}
    np.testing.assert_array_equal(emd_matrix(equal, normalise="pooled_std"), np.zeros((2, 2)))


@pytest.mark.parametrize("seed", range(10))
def test_histograms_agree_with_many_values_spread_evenly_over_the_bins(seed):
    rng = np.random.default_rng(seed)

    def histogram():
        edges = np.sort(rng.normal(rng.normal(), 2, 6))
        edges[3] = edges[2]  # a bin without width: all its values at one point
        return rng.integers(0, 4, 5) + np.array([1, 0, 0, 0, 0]), edges

    def values(counts, edges):
        spread = (np.arange(4000) + 0.5) / 4000
        return np.concatenate(
            [np.repeat(low + (high - low) * spread, count) for count, low, high in
             zip(counts, edges[:-1], edges[1:], strict=True)]
        )  # fmt: skip

    a, b = histogram(), histogram()
    expected = stats.wasserstein_distance(values(*a), values(*b))
    assert emd_of_histograms(a, b) == pytest.approx(expected, abs=2e-3)
    assert emd_of_histograms(a, a) == 0.0


def test_histograms_by_hand():
    unit = ([3], [0.0, 1.0])
    assert emd_of_histograms(unit, ([1], [2.0, 3.0])) == pytest.approx(2.0)
    assert emd_of_histograms(unit, ([1], [0.5, 0.5])) == pytest.approx(0.25)  # mean of |t - 1/2|
    assert emd_of_histograms(unit, ([1, 0, 1], [0, 0.5, 7, 7.5])) == pytest.approx(3.25)
    # bins without width are samples: the exact distance of [0, 1, 1] and [2, 5]
    points = ([1, 0, 2], [0, 0, 1, 1]), ([1, 0, 1], [2, 2, 5, 5])
    assert emd_of_histograms(*points) == pytest.approx(emd([0, 1, 1], [2, 5]))


@pytest.mark.parametrize(
    ("counts", "edges", "says"),
    [
        ([1, 1], [0, 1], "one more edge than counts"),
        ([0, 0], [0, 1, 2], "all zero"),
        ([1, -1], [0, 1, 2], "negative"),
        ([1, float("nan")], [0, 1, 2], "not finite"),
        ([1, 1], [0, 2, 1], "decrease"),
        ([1, 1], [0, 1, float("inf")], "not finite"),
    ],
)
def test_what_is_no_histogram_is_refused(counts, edges, says):
    with pytest.raises(DataError, match=says):
        emd_of_histograms((counts, edges), ([1], [0, 1]))


def test_appendix_c_keeps_the_most_telling_modality_and_label(golden):
    case = golden("appendix_C")
    inputs, expected = case["inputs"], case["expected"]
    intensity, label = np.array(inputs["D_intensity"]), np.array(inputs["D_label"])
    found = combine({"t1": intensity / 2, "flair": intensity}, {"et": label, "core": label * 0.9})
    np.testing.assert_allclose(found.matrix, expected["D"], atol=case["atol"])
    assert found.names == ("flair", "et")
    assert federation_value(intensity) == pytest.approx(expected["mean_intensity"], abs=1e-9)
    assert federation_value(intensity / 2) == pytest.approx(expected["mean_intensity"] / 2)
    assert federation_value(label) == pytest.approx(expected["mean_label"], abs=1e-9)
    assert federation_value(label) != pytest.approx(expected["paper_mean_label"], abs=1e-2)


def test_of_equal_modalities_the_first_by_name_is_kept():
    matrix = [[0.0, 2.0], [2.0, 0.0]]
    assert combine({"b": matrix, "a": matrix}, {"1": matrix}).names == ("a", "1")


def test_a_kind_without_matrices_is_left_out_when_distances_are_combined():
    matrix = np.array([[0.0, 3.0], [3.0, 0.0]])
    found = combine({"1": matrix}, {})
    assert found.names == ("1",)
    np.testing.assert_array_equal(found.matrix, matrix)


def test_combining_needs_distances_of_the_same_sites():
    two, three = np.ones((2, 2)), np.ones((3, 3))
    with pytest.raises(DataError, match="no distances to combine"):
        combine({}, {})
    with pytest.raises(DataError, match="of 2 sites, another of 3"):
        combine({"1": two}, {"1": three})


def test_one_site_has_no_distance():
    assert federation_value([[0.0]]) == 0.0
    np.testing.assert_array_equal(emd_matrix({"a": [1.0, 2.0]}), [[0.0]])


def test_embeddings_of_unequal_counts(golden):
    case = golden("embedding_distance_unequal_counts")
    tables = {"1": case["inputs"]["E1"], "2": case["inputs"]["E2"]}
    centroid = centroid_distances(tables)
    pairwise = centroid_distances(tables, between="pairwise")
    assert centroid[0, 1] == pytest.approx(case["expected"]["centroid"], abs=case["atol"])
    assert pairwise[0, 1] == pytest.approx(case["expected"]["mean_pairwise"], abs=case["atol"])
    np.testing.assert_array_equal(np.diag(pairwise), [0, 0])


def test_the_energy_distance_equals_scipy_on_one_dimension():
    tables = {site: column[:, None] for site, column in samples(4).items()}
    found = centroid_distances(tables, between="energy")
    for i, a in enumerate("abc"):
        for j, b in enumerate("abc"):
            expected = stats.energy_distance(tables[a][:, 0], tables[b][:, 0])
            assert found[i, j] == pytest.approx(expected, rel=1e-9, abs=1e-7)
    with pytest.raises(ConfigError, match="choose centroid, pairwise or energy"):
        centroid_distances(tables, between="median")  # type: ignore[arg-type]


def test_sketches_by_their_absolute_and_squared_differences():
    rng = np.random.default_rng(2)
    sketches = {site: rng.normal(size=(3, 4, 4)) for site in ("c", "a", "b")}
    flat = np.stack([sketches[site].ravel() for site in ("a", "b", "c")])
    np.testing.assert_allclose(l1_distances(sketches), cdist(flat, flat, "cityblock"), rtol=1e-12)
    np.testing.assert_allclose(euclidean_distances(sketches), cdist(flat, flat), rtol=1e-12)


@pytest.mark.parametrize("bad", [[], [1.0, float("nan")], [float("inf")]])
def test_a_site_without_usable_statistics_is_named(bad):
    with pytest.raises(DataError, match=r"site 'north' has (no|NaN or infinite) statistics"):
        emd_matrix({"south": [1.0], "north": bad})
    with pytest.raises(DataError, match="site 'north' has"):
        centroid_distances({"south": [[1.0, 1.0]], "north": np.array(bad).reshape(-1, 1)})
    with pytest.raises(DataError, match="site 'north' has"):
        l1_distances({"south": np.ones(len(bad)), "north": bad})


def test_sites_described_in_different_ways_are_named():
    with pytest.raises(DataError, match=r"site 'b' has statistics of shape \(3,\) and site 'a'"):
        euclidean_distances({"a": [1.0, 2.0], "b": [1.0, 2.0, 3.0]})
    with pytest.raises(DataError, match="describe all sites in the same way"):
        centroid_distances({"a": np.ones((4, 2)), "b": np.ones((4, 3))})
    with pytest.raises(DataError, match="give 1 axes"):
        emd_matrix({"a": [[1.0], [2.0]]})


@pytest.mark.parametrize(
    ("matrix", "says"),
    [
        ([[0.0, float("nan")], [1.0, 0.0]], "sites 1 and 2, in sorted order, is nan"),
        ([[0.0, 1.0], [-1.0, 0.0]], "sites 2 and 1, in sorted order, is -1.0"),
        ([[0.0, 1.0]], "a row and a column per site"),
        (np.zeros((0, 0)), "a row and a column per site"),
    ],
)
def test_what_is_no_distance_matrix_is_refused(matrix, says):
    with pytest.raises(DataError, match=says):
        checked(matrix)


def test_the_diagonal_is_never_a_distance():
    given = np.array([[float("nan"), 1.0], [2.0, 9.0]])
    np.testing.assert_array_equal(checked(given), [[0, 1], [2, 0]])
    assert np.isnan(given[0, 0])
