from itertools import product

import numpy as np
import pytest
from scipy import stats

from collegium.evaluation.significance import (
    Interval,
    RankTest,
    corrected,
    higher_is_better,
    interval_over_sites,
    p_text,
    signed_rank,
    verdict,
)


def by_patient(differences):
    """Differences of patients with names in the order of their places."""
    return {f"p{number:03}": float(value) for number, value in enumerate(differences)}


def outcome(interval, test, **options):
    return verdict(interval, test, **options)[0]


def sentences(interval, test, **options):
    return verdict(interval, test, **options)[1]


def test_interval_agrees_with_scipy_bootstrap():
    rng = np.random.default_rng(3)
    a, b = rng.normal(0.8, 0.05, 40), rng.normal(0.77, 0.05, 40)
    found = interval_over_sites([by_patient(a - b)], resamples=20_000)
    reference = stats.bootstrap(
        (a - b,), np.mean, n_resamples=20_000, method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval  # fmt: skip
    assert found.low == pytest.approx(reference.low, abs=5e-4)
    assert found.high == pytest.approx(reference.high, abs=5e-4)
    assert found.mean == pytest.approx(np.mean(a - b))


def test_interval_agrees_with_the_normal_limit():
    rng = np.random.default_rng(5)
    values = rng.normal(0.02, 0.1, 1500)
    found = interval_over_sites([by_patient(values)], resamples=4000)
    half = 1.959964 * values.std() / np.sqrt(1500)  # central limit theorem
    assert found.low == pytest.approx(values.mean() - half, rel=0.1)
    assert found.high == pytest.approx(values.mean() + half, rel=0.1)


def test_interval_of_two_patients_is_exactly_its_extremes():
    # Resampled means are 0 (1/4), 1/2 (1/2), 1 (1/4): the outer 2.5 % lie at 0 and 1.
    found = interval_over_sites([{"p1": 0.0, "p2": 1.0}])
    assert (found.low, found.high) == (0.0, 1.0)


def test_equal_differences_have_an_interval_of_no_width():
    found = interval_over_sites([by_patient([0.25] * 8)])
    assert (found.mean, found.low, found.high) == (0.25, 0.25, 0.25)


def test_the_interval_is_the_same_for_a_seed_whatever_the_order_of_pairs():
    rng = np.random.default_rng(1)
    differences = by_patient(rng.normal(size=30))
    first = interval_over_sites([differences], seed=4)
    turned = interval_over_sites([dict(reversed(differences.items()))], seed=4)
    other = interval_over_sites([differences], seed=5)
    assert first == turned
    assert (first.low, first.high) != (other.low, other.high)


def test_one_patient_has_no_interval():
    found = interval_over_sites([{"p1": 0.35}])
    assert found.mean == pytest.approx(0.35)
    assert (found.low, found.high, found.patients) == (None, None, 1)
    test = signed_rank([0.35])
    assert outcome(found, test) == "cannot tell"
    assert sentences(found, test).startswith("Cannot tell: 1 patient,")


def test_no_defined_pair_has_no_mean():
    found = interval_over_sites([{}], undefined=1)
    assert found == Interval(None, None, None, 0, 1)
    assert sentences(found, signed_rank([])) == "Cannot tell: no patient has a score with both."


def test_no_resamples_are_refused():
    with pytest.raises(ValueError, match="at least 1, not 0"):
        interval_over_sites([{"p1": 0.0}], resamples=0)


@pytest.mark.parametrize(
    ("low", "high", "patients", "higher", "expected"),
    [
        (0.01, 0.03, 6, True, "helps"),
        (0.01, 0.03, 6, False, "hurts"),
        (-0.03, -0.01, 6, True, "hurts"),
        (-0.03, -0.01, 6, False, "helps"),
        (-0.01, 0.03, 6, True, "cannot tell"),
        (0.0, 0.03, 6, True, "cannot tell"),
        (0.01, 0.03, 5, True, "cannot tell"),  # 2 / 2**5 is above 5 %
    ],
)
def test_outcome_by_the_place_of_zero(low, high, patients, higher, expected):
    found = Interval((low + high) / 2, low, high, patients, 0)
    test = RankTest(0.01, 1 if high > 0 else -1, 0.03, 3)
    assert outcome(found, test, higher_is_better=higher) == expected
    assert sentences(found, test, higher_is_better=higher).lower().startswith(expected)


def test_verdict_names_the_patients():
    up, down = RankTest(0.01, 1, 0.03, 3), RankTest(0.01, -1, 0.03, 3)
    assert "12 patients" in sentences(Interval(0.02, 0.01, 0.03, 12, 0), up)
    assert "worse on average" in sentences(Interval(-0.02, -0.03, -0.01, 12, 0), down)
    assert "holds zero" in sentences(Interval(0.02, -0.01, 0.03, 12, 0), up)


def test_direction_of_a_metric_by_unit_or_name():
    assert higher_is_better("dice")
    assert higher_is_better("negative_loss")
    assert not higher_is_better("loss")
    assert not higher_is_better("hd95_vessel")
    assert not higher_is_better("anything", "mm")


def share_of_sign_patterns(differences):
    """Two-sided p-value by trying every pattern of signs, with Pratt's ranks of scipy."""
    ranks = stats.rankdata(np.abs(differences))[differences != 0]
    found = ranks[differences[differences != 0] > 0].sum()
    sums = [ranks @ signs for signs in product((0, 1), repeat=ranks.size)]
    middle = ranks.sum() / 2
    return np.mean(np.abs(np.array(sums) - middle) >= abs(found - middle) - 1e-9)


def test_signed_rank_of_darwins_plants_as_published():
    # Heights of cross- minus self-fertilised plants, the example of Wilcoxon's paper of 1945.
    plants = [6, 8, 14, 16, 23, 24, 28, 29, 41, -48, 49, 56, 60, -67, 75]
    found = signed_rank(plants)
    assert found.p == pytest.approx(0.041259765625, abs=1e-12)
    assert found.direction == 1
    assert signed_rank([-value for value in plants]) == RankTest(found.p, -1)


@pytest.mark.parametrize("count", [6, 7, 20, 50])
def test_signed_rank_without_ties_agrees_with_scipy(count):
    differences = np.random.default_rng(count).normal(0.3, 1.0, count)
    reference = stats.wilcoxon(differences, method="exact")
    assert signed_rank(differences).p == pytest.approx(reference.pvalue, rel=1e-9)


@pytest.mark.parametrize(
    "differences",
    [
        [0.0, 0.1, -0.1, 0.2, 0.3, 0.3, 0.4],
        [0.0, 0.0, 0.0, 0.2, 0.2, -0.2, 0.2, 0.2, 0.5],
        [0.1, 0.1, 0.1, -0.1, 0.1, 0.1],
        [0.3, -0.1, -0.1, 0.0, 0.2, 0.2, 0.4, 0.4, -0.3, 0.1, 0.0],
    ],
)
def test_signed_rank_is_exact_with_ties_and_zeros(differences):
    expected = share_of_sign_patterns(np.array(differences))
    assert signed_rank(differences).p == pytest.approx(expected, rel=1e-12)


def test_signed_rank_of_many_patients_agrees_with_scipys_normal_limit():
    differences = np.random.default_rng(7).integers(-9, 12, 300) / 100  # ties and zeros
    reference = stats.wilcoxon(differences, zero_method="pratt")
    assert signed_rank(differences).p == pytest.approx(reference.pvalue, rel=1e-9)


def test_the_normal_limit_takes_over_where_it_is_close_to_the_exact_value():
    differences = np.random.default_rng(2).normal(0.15, 1.0, 201)
    exact = stats.wilcoxon(differences, method="exact").pvalue
    assert signed_rank(differences).p == pytest.approx(exact, rel=0.02)
    assert signed_rank(differences[:200]).p == pytest.approx(
        stats.wilcoxon(differences[:200], method="exact").pvalue, rel=1e-9
    )


def test_patients_for_whom_nothing_changes_make_a_difference_less_significant():
    # Ranks 1 to 7, minus at 1 and 2: a sum of 3 or less is {}, 1, 2, 3 and 1 + 2, in both tails.
    assert signed_rank([-1, -2, 3, 4, 5, 6, 7]).p == pytest.approx(2 * 5 / 2**7)
    # Five zeros before them make it ranks 6 to 12: 13 or less is {}, one of seven, and 6 + 7.
    assert signed_rank([-1, -2, 3, 4, 5, 6, 7, *[0] * 5]).p == pytest.approx(2 * 9 / 2**7)


def test_noise_of_floats_breaks_no_tie():
    # 0.3 - 0.2 and 0.1 differ by 3e-17; as ties each has rank 1.5, so p is that of equal sizes
    differences = np.array([0.3 - 0.2, -0.1, 0.4, 0.5, 0.6, 0.7])
    tied = np.array([1.0, -1.0, 4.0, 5.0, 6.0, 7.0])
    assert signed_rank(differences).p == pytest.approx(share_of_sign_patterns(tied))
    assert signed_rank([1e-17] * 8).p is None


def test_signed_rank_is_undefined_for_few_patients_and_where_nothing_changes():
    assert signed_rank([0.1] * 5) == RankTest(None, 1)
    assert signed_rank([0.1] * 6).p == pytest.approx(2 / 2**6)
    assert signed_rank([0.0] * 12) == RankTest(None, 0)
    assert signed_rank([]) == RankTest(None, 0)


def test_correction_rejects_what_holms_published_example_rejects():
    # Wikipedia, Holm-Bonferroni method: of 0.01, 0.04, 0.03, 0.005 the first and last are rejected
    tests = corrected([RankTest(p, 1) for p in (0.01, 0.04, 0.03, 0.005)])
    assert [test.p_holm for test in tests] == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert {test.family for test in tests} == {4}
    assert [test.p for test in tests] == [0.01, 0.04, 0.03, 0.005]


def test_undefined_tests_are_not_counted_in_the_family():
    tests = corrected([RankTest(None, 0), RankTest(0.02, 1), RankTest(None, 0), RankTest(0.5, 1)])
    assert [test.p_holm for test in tests] == [None, pytest.approx(0.04), None, pytest.approx(0.5)]
    assert {test.family for test in tests} == {2}


def test_over_sites_the_mean_is_that_of_site_means_whatever_their_sizes():
    found = interval_over_sites([{"p": 0.1, "q": 0.3}, {"p": 0.5, "q": 0.6, "r": 0.7}], undefined=4)
    assert found.mean == pytest.approx((0.2 + 0.6) / 2)
    assert (found.patients, found.undefined) == (5, 4)


def test_over_sites_patients_are_drawn_within_their_site():
    # Each site alone is 0, 1/2 or 1 by chance 1/4, 1/2, 1/4; the mean of both is 0 by 1/16.
    found = interval_over_sites([{"p": 0.0, "q": 1.0}] * 2)
    assert (found.low, found.high) == (0.0, 1.0)
    # Drawn across sites the spread between sites would widen the interval; within it is zero.
    found = interval_over_sites([{"p": 0.0, "q": 0.0}, {"p": 1.0, "q": 1.0}])
    assert (found.mean, found.low, found.high) == (0.5, 0.5, 0.5)


def test_interval_over_sites_agrees_with_the_normal_limit():
    rng = np.random.default_rng(11)
    sites = [rng.normal(0.1, 1.0, 400), rng.normal(-0.2, 3.0, 900)]
    found = interval_over_sites(
        [{f"p{place:04}": value for place, value in enumerate(site)} for site in sites],
        resamples=4000,
    )
    sd = np.sqrt(sum(site.var() / site.size for site in sites)) / 2
    mean = (sites[0].mean() + sites[1].mean()) / 2
    assert found.mean == pytest.approx(mean)
    assert found.low == pytest.approx(mean - 1.959964 * sd, abs=0.1 * sd)
    assert found.high == pytest.approx(mean + 1.959964 * sd, abs=0.1 * sd)


def test_a_site_with_one_patient_leaves_no_interval_and_one_with_none_no_mean():
    many = {f"p{place}": 0.1 for place in range(9)}
    found = interval_over_sites([many, {"p": 0.3}])
    assert found.mean == pytest.approx(0.2)
    assert (found.low, found.high) == (None, None)
    test = RankTest(0.01, 1, 0.01, 1)
    assert outcome(found, test) == "cannot tell"
    assert "single patient" in sentences(found, test)
    assert interval_over_sites([many, {}]) == Interval(None, None, None, 9, 0)


HELPS, HURTS = Interval(0.02, 0.01, 0.03, 12, 0), Interval(-0.02, -0.03, -0.01, 12, 0)
UNSURE = Interval(0.02, -0.01, 0.03, 12, 0)
BETTER = "better on average over 12 patients, and the interval does not hold zero"
ZERO = "Cannot tell: over 12 patients the interval holds zero."


@pytest.mark.parametrize(
    ("interval", "test", "expected"),
    [
        (HELPS, RankTest(0.01, 1, 0.03, 5),
         f"Helps: {BETTER}. It survives the correction for 5 methods "
         "(p = 0.010, corrected p = 0.030)."),
        (HELPS, RankTest(0.01, 1, 0.01, 1),
         f"Helps: {BETTER}. The signed-rank test confirms it (p = 0.010)."),
        (HELPS, RankTest(0.02, 1, 0.06, 5),
         f"Cannot tell: {BETTER}, but the signed-rank test does not survive the correction for 5 "
         "methods (p = 0.020, corrected p = 0.060)."),
        (HELPS, RankTest(0.2, 1, 0.6, 5),
         f"Cannot tell: {BETTER}, but the signed-rank test does not confirm it "
         "(p = 0.200, corrected p = 0.600)."),
        (HELPS, RankTest(0.05, 1, 0.05, 1),
         f"Cannot tell: {BETTER}, but the signed-rank test does not confirm it (p = 0.050)."),
        (HELPS, RankTest(0.01, -1, 0.03, 5),
         f"Cannot tell: {BETTER}, but the signed-rank test points the other way "
         "(p = 0.010, corrected p = 0.030): a few patients make the mean."),
        (HELPS, RankTest(None, 0, None, 0),
         f"Cannot tell: {BETTER}, but the differences are too small to be ranked."),
        (HURTS, RankTest(0.01, -1, 0.03, 5),
         f"Hurts: {BETTER}. It survives the correction for 5 methods "
         "(p = 0.010, corrected p = 0.030).".replace("better", "worse")),
        (HURTS, RankTest(0.25, -1, 0.5, 2),
         f"Cannot tell: {BETTER}, but the signed-rank test does not confirm it "
         "(p = 0.250, corrected p = 0.500).".replace("better", "worse")),
        (UNSURE, RankTest(0.2, 1, 0.6, 5),
         f"{ZERO} The signed-rank test sees no difference either "
         "(p = 0.200, corrected p = 0.600)."),
        (UNSURE, RankTest(0.0001, 1, 0.0005, 5),
         f"{ZERO} By ranks there is a difference (p < 0.001, corrected p < 0.001), but the mean "
         "does not show it."),
        (UNSURE, RankTest(None, 0, None, 0), ZERO),
    ],
)  # fmt: skip
def test_interval_and_test_must_agree_and_the_verdict_says_which_does_not(interval, test, expected):
    assert sentences(interval, test) == expected
    assert outcome(interval, test) == expected.partition(":")[0].lower()
    few = Interval(0.02, 0.01, 0.03, 5, 0)
    assert outcome(few, test) == "cannot tell"
    assert sentences(few, test).endswith("by chance.")


def test_a_few_patients_with_large_gains_do_not_hide_many_with_small_losses():
    # 36 lose a little and 4 gain much: the mean rises, the ranks fall; both are said.
    differences = [-0.001 * (place + 1) for place in range(36)] + [0.9, 0.91, 0.92, 0.93]
    interval = interval_over_sites([by_patient(differences)])
    (test,) = corrected([signed_rank(differences)])
    assert interval.low is not None
    assert interval.low > 0
    assert outcome(interval, test) == "cannot tell"
    assert "points the other way" in sentences(interval, test)


def test_p_values_are_written_with_three_decimals_or_a_bound():
    assert p_text(0.0414) == "p = 0.041"
    assert p_text(0.00099) == "p < 0.001"
