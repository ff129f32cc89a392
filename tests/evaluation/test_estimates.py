"""Estimates against the reference cases, other libraries, closed forms and simulated truth."""

from typing import Any

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from collegium.evaluation import estimates
from collegium.evaluation.estimates import Arm, satterthwaite
from collegium.evaluation.intervals import error_bars

# their numbers are None where undefined, which these tests know better than their types
estimate_auc: Any = estimates.estimate_auc
estimate_balanced_accuracy: Any = estimates.estimate_balanced_accuracy
estimate_mean: Any = estimates.estimate_mean
estimate_over_strata: Any = estimates.estimate_over_strata
estimate_share: Any = estimates.estimate_share

TOLERANCE = 1e-8


def check(found, expected):
    """Hold an estimate against the expected values of a reference case that are about one."""
    values = {
        "difference": found.difference, "centre": found.centre, "df_patients": found.df,
        "variance_patients": found.variance, "auc_joined": found.joined,
        "auc_alone": found.reference, "patients": found.patients, "undefined": found.undefined,
        "s2": [arm.variance for arm in found.arms], "r2": [arm.residual for arm in found.arms],
    }  # fmt: skip
    compared = values.keys() & expected.keys()
    assert {"difference", "variance_patients", "df_patients"} <= compared
    for name in compared:
        assert values[name] == pytest.approx(expected[name], rel=TOLERANCE, abs=1e-15), name


@pytest.mark.parametrize(
    "name",
    ["one_training", "three_trainings", "trainings_bar_zero", "trainings_decide", "worse",
     "six_all_gain", "equivalent", "lower_is_better"],
)  # fmt: skip
def test_means_agree_with_reference_values(statistics, name):
    given, expected = statistics(name)
    check(estimate_mean(given["joined"], given["alone"]), expected)


def test_cases_of_a_patient_count_once_and_undefined_ones_not_at_all(statistics):
    given, expected = statistics("clusters")
    joined, alone = (np.array(given[arm], dtype=float) for arm in ("joined", "alone"))
    check(estimate_mean(joined, alone, given["patient"]), expected)


def cases_of(arm):
    """The scores of positive cases, then of negative ones, (cases,)."""
    return [*arm["positive"], *arm["negative"]]


def test_the_area_agrees_with_reference_values(statistics):
    given, expected = statistics("auc_one_training")
    labels = [1] * 6 + [0] * 8
    check(estimate_auc(cases_of(given["joined"]), cases_of(given["alone"]), labels), expected)
    given, expected = statistics("auc_three_trainings")
    joined, alone = (np.transpose([cases_of(s) for s in given[arm]]) for arm in ("joined", "alone"))
    check(estimate_auc(joined, alone, [1] * 7 + [0] * 9), expected)


def test_the_area_of_several_cases_a_patient_agrees_with_reference_values(statistics):
    given, expected = statistics("auc_clusters")
    found = estimate_auc(given["joined"], given["alone"], given["positive"], given["patient"])
    check(found, expected)
    assert (found.patients, found.fewest, found.fewest_of) == (12, 6, "with class 1")


def test_shares_agree_with_reference_values(statistics):
    given, expected = statistics("sensitivity")
    check(estimate_share(given["joined"], given["alone"]), expected)


@pytest.mark.parametrize("name", ["balanced_accuracy", "balanced_accuracy_three_trainings"])
def test_balanced_accuracy_agrees_with_reference_values(statistics, name):
    given, expected = statistics(name)
    joined, alone = (cases_of({c: given[c][arm] for c in given}) for arm in ("joined", "alone"))
    sizes = [len(given[c]["alone"]) for c in ("positive", "negative")]
    check(estimate_balanced_accuracy(joined, alone, np.repeat([1, 0], sizes)), expected)


def test_the_mean_over_sites_agrees_with_reference_values(statistics):
    given, expected = statistics("mean_over_sites")
    sites = [estimate_mean(site["joined"], site["alone"]) for site in given["sites"]]
    found = estimate_over_strata({"at a": sites[0], "at b": sites[1]})
    check(found, expected)
    assert (found.patients, found.fewest, found.fewest_of) == (15, 6, "at a")


def test_one_training_is_the_paired_t_test():
    rng = np.random.default_rng(3)
    joined, alone = rng.normal(size=(2, 17))
    found = estimate_mean(joined, alone)
    reference = stats.ttest_rel(joined, alone)
    assert found.difference / found.variance**0.5 == pytest.approx(reference.statistic, rel=1e-12)
    assert found.df == reference.df


def test_the_residual_is_the_mean_square_of_the_two_way_layout():
    scores = np.random.default_rng(4).normal(size=(9, 4))
    rows, columns = scores.mean(axis=1, keepdims=True), scores.mean(axis=0)
    residuals = scores - rows - columns + scores.mean()
    (joined, _) = estimate_mean(scores, np.zeros(9)).arms
    assert joined.residual == pytest.approx((residuals**2).sum() / (8 * 3) / 9, rel=1e-12)
    assert joined.variance == pytest.approx(columns.var(ddof=1), rel=1e-12)


def test_arms_may_have_different_numbers_of_trainings():
    rng = np.random.default_rng(5)
    joined, alone = rng.normal(size=(10, 5)), rng.normal(size=(10, 3))
    found = estimate_mean(joined, alone)
    reference = stats.ttest_rel(joined.mean(axis=1), alone.mean(axis=1))
    assert found.variance == pytest.approx((found.difference / reference.statistic) ** 2)
    assert found.trainings == (5, 3)
    assert [arm.trainings for arm in found.arms] == [5, 3]


def test_of_the_same_trainings_what_both_have_in_common_cancels():
    rng = np.random.default_rng(6)
    plain = rng.normal(size=(8, 1)) + 100 * rng.normal(size=(1, 3))
    (arm,) = estimate_mean(plain + 0.5, plain, same_trainings=True).arms
    assert arm.scores == pytest.approx([0.5] * 3)
    assert arm.variance == pytest.approx(0.0, abs=1e-20)


def test_mean_and_median_of_opposite_sign_are_noticed():
    alone = np.zeros(9)
    assert estimate_mean([-0.1] * 8 + [3.0], alone).few_decide
    assert not estimate_mean([0.1] * 8 + [3.0], alone).few_decide
    assert not estimate_mean([0.0] * 8 + [3.0], alone).few_decide


def jackknife(metric, groups):
    """The variance of a metric by leaving out one member of one group at a time."""
    total = 0.0
    for group in groups:
        left = np.array([metric(member) for member in group])
        total += (len(group) - 1) / len(group) * ((left - left.mean()) ** 2).sum()
    return total


def test_delongs_variance_is_the_jackknife_of_scikit_learns_area():
    rng = np.random.default_rng(7)
    labels = np.repeat([1, 0], [9, 14])
    joined, alone = np.round(rng.normal(labels, 1, (2, 23)), 1)  # with ties
    found = estimate_auc(joined, alone, labels)
    every = np.arange(23)

    def difference(left_out):
        kept = every != left_out
        areas = [roc_auc_score(labels[kept], scores[kept]) for scores in (joined, alone)]
        return areas[0] - areas[1]

    assert found.difference == pytest.approx(difference(-1), abs=1e-12)
    expected = jackknife(difference, [every[labels == 1], every[labels == 0]])
    assert found.variance == pytest.approx(expected, rel=1e-10)


def test_a_case_that_comes_twice_tells_nothing_new():
    rng = np.random.default_rng(8)
    labels = np.repeat([1, 0], [8, 12])
    joined, alone = rng.normal(labels, 1, (2, 20))
    once = estimate_auc(joined, alone, labels)
    twice = estimate_auc(
        np.repeat(joined, 2), np.repeat(alone, 2), np.repeat(labels, 2), np.repeat(range(20), 2)
    )
    assert twice.variance == pytest.approx(once.variance, rel=1e-12)
    assert twice.df == pytest.approx(once.df, rel=1e-12)
    assert (twice.patients, twice.fewest) == (20, 8)


def probabilities(rng, labels, trainings):
    """Softmax outputs of three classes, (cases, trainings, 3)."""
    logits = rng.normal(size=(len(labels), trainings, 3))
    logits[np.arange(len(labels)), :, labels] += 1
    return np.exp(logits) / np.exp(logits).sum(axis=2, keepdims=True)


def test_the_area_of_three_classes_is_scikit_learns_one_against_the_rest():
    rng = np.random.default_rng(9)
    labels = np.repeat([0, 1, 2], [7, 8, 10])
    joined, alone = probabilities(rng, labels, 2), probabilities(rng, labels, 1)
    found = estimate_auc(joined, alone, labels, classes=["x", "y", "z"])
    areas = [
        np.mean([roc_auc_score(labels, p[:, s], multi_class="ovr") for s in range(p.shape[1])])
        for p in (joined, alone)
    ]
    assert (found.joined, found.reference) == pytest.approx(areas, abs=1e-12)
    assert (found.fewest, found.fewest_of) == (7, "with x")


def test_of_two_classes_given_as_three_the_area_and_its_variance_are_the_same():
    rng = np.random.default_rng(10)
    labels = np.repeat([0, 1], [9, 11])
    both = rng.uniform(size=(2, 20, 1))
    binary = estimate_auc(both[0], both[1], labels)
    stacked = [np.stack([1 - scores, scores, 0 * scores], axis=2) for scores in both]
    found = estimate_auc(*stacked, labels, classes=3)
    assert found.difference == pytest.approx(binary.difference, abs=1e-12)
    assert found.variance == pytest.approx(binary.variance, rel=1e-12)
    assert found.df == pytest.approx(binary.df, rel=1e-12)


def test_the_variance_of_three_classes_is_that_of_repeated_draws():
    labels = np.repeat([0, 1, 2], [12, 15, 30])
    rng = np.random.default_rng(11)
    draws = [
        estimate_auc(
            probabilities(rng, labels, 1), probabilities(rng, labels, 1), labels, classes=3
        )
        for _ in range(600)
    ]
    seen = np.var([draw.difference for draw in draws], ddof=1)
    assert np.mean([draw.variance for draw in draws]) == pytest.approx(seen, rel=0.15)


def test_scores_of_three_classes_need_a_number_for_each():
    with pytest.raises(ValueError, match=r"scores of 3 classes are \(cases, trainings, 3\)"):
        estimate_auc([0.1, 0.2], [0.1, 0.2], [0, 1], classes=3)


def test_one_class_alone_has_no_area():
    found = estimate_auc([0.1] * 9, [0.2] * 9, [0] * 9, classes=["healthy", "ill"])
    assert (found.difference, found.variance) == (None, None)
    assert (found.fewest, found.fewest_of, found.patients) == (0, "with ill", 9)
    found = estimate_auc(np.full((9, 1, 3), 0.1), np.full((9, 1, 3), 0.2), [2] * 9, classes=3)
    assert (found.difference, found.fewest) == (None, 0)


def test_where_nobody_changes_an_imaginary_patient_leaves_doubt():
    found = estimate_share([1] * 8, [1] * 8)
    assert (found.difference, found.centre) == (0.0, 0.0)
    # a quarter of a patient gains one, a quarter loses one, of 8.5: 0.5 / (7.5 * 8.5)
    assert found.variance == pytest.approx(0.5 / (7.5 * 8.5), rel=1e-12)
    assert found.df == 7.5


def test_balanced_accuracy_is_scikit_learns():
    rng = np.random.default_rng(12)
    labels = rng.integers(0, 3, 40)
    predicted = rng.integers(0, 3, (2, 40))
    found = estimate_balanced_accuracy(*(predicted == labels).astype(float), labels, classes=3)
    expected = [balanced_accuracy_score(labels, p) for p in predicted]
    assert (found.joined, found.reference) == pytest.approx(expected, abs=1e-12)
    smallest = np.bincount(labels).argmin()
    assert found.fewest_of == f"with class {smallest}"


def right_by_chance(rng, patients):
    """Whether two equally good models are right; their luck is shared by both eyes of a patient."""
    luck = np.repeat(rng.normal(0, 2, (2, patients)), 2, axis=1)
    return (rng.normal(size=(2, 2 * patients)) < 1.8 + luck).astype(float)


def test_balanced_accuracy_knows_that_eyes_of_both_classes_are_of_one_patient():
    rng, labels, eyes = np.random.default_rng(13), [0, 1] * 20, np.repeat(range(20), 2)
    draws = [
        estimate_balanced_accuracy(*right_by_chance(rng, 20), labels, eyes) for _ in range(800)
    ]
    said = np.mean([abs(draw.centre) > error_bars(draw).half_width for draw in draws])
    assert said < 0.075  # 0.10 if the classes are taken for different patients
    seen = np.var([draw.centre for draw in draws], ddof=1)
    assert np.mean([draw.variance for draw in draws]) == pytest.approx(seen, rel=0.15)


def test_strata_need_the_same_trainings():
    one, two = estimate_mean([1.0] * 7, [0.0] * 7), estimate_mean(np.ones((7, 2)), np.ones((7, 2)))
    with pytest.raises(ValueError, match="the same trainings"):
        estimate_over_strata({"at a": one, "at b": two})


def test_a_stratum_without_scores_leaves_no_mean_over_them():
    some = estimate_mean([1.0, 2.0], [0.0, 0.5])
    found = estimate_over_strata({"at a": some, "at b": estimate_mean([np.nan], [0.5])})
    assert (found.difference, found.variance, found.joined) == (None, None, None)
    assert (found.patients, found.undefined, found.fewest, found.fewest_of) == (2, 1, 0, "at b")


def test_strata_name_class_and_site_of_the_fewest():
    site = estimate_auc([0.1, 0.6, 0.3], [0.1, 0.2, 0.3], [0, 1, 0])
    assert estimate_over_strata({"at a": site}).fewest_of == "with class 1 at a"


def test_one_patient_has_a_difference_without_a_variance():
    found = estimate_mean([[0.5, 0.7]], [[0.4, 0.4]])
    assert (found.difference, found.variance, found.df) == (pytest.approx(0.2), None, None)
    assert estimate_share([1.0], [0.0]).variance is None


def test_degrees_of_freedom_of_a_sum_are_welchs():
    first, second = np.random.default_rng(14).normal(size=(2, 6)) * [[1], [4]]
    reference = stats.ttest_ind(first, second[:4], equal_var=False).df
    variances = [first.var(ddof=1) / 6, second[:4].var(ddof=1) / 4]
    assert satterthwaite(variances, [5, 3]) == pytest.approx(reference, rel=1e-12)
    assert satterthwaite([0.0, 0.0], [5, 3]) == 8


def test_a_single_training_has_no_variance():
    assert Arm((0.5,)).variance == 0.0
    assert Arm((0.5, 0.7)).variance == pytest.approx(0.02)
