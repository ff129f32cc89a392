"""Intervals against the reference cases, scipy's tests, closed forms and simulated truth."""

import subprocess
import sys
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from collegium.evaluation import estimates, intervals
from collegium.evaluation.intervals import Bars, student

# their numbers are None where undefined, which these tests know better than their types
estimate_auc: Any = estimates.estimate_auc
estimate_balanced_accuracy: Any = estimates.estimate_balanced_accuracy
estimate_mean: Any = estimates.estimate_mean
estimate_over_strata: Any = estimates.estimate_over_strata
estimate_share: Any = estimates.estimate_share
error_bars: Any = intervals.error_bars

TOLERANCE = 1e-8


def check(found, expected, others=()):
    """Hold the interval of an estimate against the expected values of a reference case."""
    bars = error_bars(found, others)
    values = {
        "variance_trainings": bars.variance_trainings, "df_trainings": bars.df_trainings,
        "half_width": bars.half_width, "low": found.centre - bars.half_width,
        "high": found.centre + bars.half_width, "p": bars.p_value(found.centre),
        "tipping_sd": bars.tipping_sd(found.centre),
    }  # fmt: skip
    compared = values.keys() & expected.keys()
    assert {"half_width", "low", "high"} <= compared
    for name in compared:
        if expected[name] is None:
            assert values[name] is None
        else:
            assert values[name] == pytest.approx(expected[name], rel=TOLERANCE, abs=1e-15), name


@pytest.mark.parametrize(
    "name",
    ["one_training", "three_trainings", "trainings_bar_zero", "trainings_decide", "worse",
     "six_all_gain", "equivalent", "lower_is_better"],
)  # fmt: skip
def test_intervals_of_means_agree_with_reference_values(statistics, name):
    given, expected = statistics(name)
    check(estimate_mean(given["joined"], given["alone"]), expected)


def test_intervals_of_several_cases_a_patient_agree_with_reference_values(statistics):
    given, expected = statistics("clusters")
    joined, alone = (np.array(given[arm], dtype=float) for arm in ("joined", "alone"))
    check(estimate_mean(joined, alone, given["patient"]), expected)
    given, expected = statistics("auc_clusters")
    found = estimate_auc(given["joined"], given["alone"], given["positive"], given["patient"])
    check(found, expected)


def test_intervals_of_areas_agree_with_reference_values(statistics):
    for name, sizes in (("auc_one_training", [6, 8]), ("auc_three_trainings", [7, 9])):
        given, expected = statistics(name)
        arms = [np.atleast_1d(given[arm]) for arm in ("joined", "alone")]
        scores = [np.transpose([[*s["positive"], *s["negative"]] for s in arm]) for arm in arms]
        check(estimate_auc(*scores, np.repeat([1, 0], sizes)), expected)


def test_intervals_of_shares_agree_with_reference_values(statistics):
    given, expected = statistics("sensitivity")
    check(estimate_share(given["joined"], given["alone"]), expected)
    for name in ("balanced_accuracy", "balanced_accuracy_three_trainings"):
        given, expected = statistics(name)
        classes = given["positive"], given["negative"]
        arms = [[score for c in classes for score in c[arm]] for arm in ("joined", "alone")]
        labels = np.repeat([1, 0], [len(c["alone"]) for c in classes])
        check(estimate_balanced_accuracy(*arms, labels), expected)


def test_the_interval_over_sites_agrees_with_reference_values(statistics):
    given, expected = statistics("mean_over_sites")
    sites = {str(n): estimate_mean(s["joined"], s["alone"]) for n, s in enumerate(given["sites"])}
    check(estimate_over_strata(sites), expected)


def test_a_chosen_methods_interval_agrees_with_reference_values(statistics):
    given, expected = statistics("chosen_among_three")
    found = estimate_mean(given["joined"], given["alone"])
    others = [estimate_mean(scores, given["alone"]).arms[0] for scores in given["others"]]
    check(found, expected, others)
    bars = error_bars(found, others)
    assert bars.variance_trainings == pytest.approx(expected["variance_trainings_all"])
    assert bars.df_trainings == pytest.approx(expected["df_trainings_all"])
    squared = student(bars.tail, bars.df_trainings) ** 2 * bars.variance_trainings
    assert squared == pytest.approx(expected["bar_all_squared"])
    alone = error_bars(found)
    own = student(0.025, alone.df_trainings) ** 2 * alone.variance_trainings
    assert own == pytest.approx(expected["bar_own_squared"])


def test_a_chosen_method_keeps_its_own_bar_where_it_is_the_larger():
    rng = np.random.default_rng(1)
    alone = np.full((9, 3), 0.5)
    wild = alone + np.array([[-0.3, 0.0, 0.4]]) + rng.normal(0, 0.01, (9, 3))
    calm = estimate_mean(alone + rng.normal(0, 0.01, (9, 3)), alone).arms[0]
    bars = error_bars(estimate_mean(wild, alone), [calm])
    assert bars.tail == 0.025
    assert bars.variance_trainings == error_bars(estimate_mean(wild, alone)).variance_trainings


def test_what_is_planned_agrees_with_reference_values(statistics):
    given, expected = statistics("planning")
    bars = Bars(
        given["patients"], given["sd_patients"] ** 2 / given["patients"], given["patients"] - 1,
        3, given["variance_trainings"], given["df_trainings"],
    )  # fmt: skip
    one = Bars(bars.patients, bars.variance_patients, bars.df_patients)
    assert bars.half_width == pytest.approx(expected["half_width"], rel=TOLERANCE)
    assert bars.smallest_detectable == pytest.approx(expected["smallest_detectable"], rel=TOLERANCE)
    assert bars.patients_needed(0.03) == expected["patients_for_0_03"]
    assert bars.patients_needed(-0.02) == expected["patients_for_0_02"]
    assert one.patients_needed(0.03) == expected["patients_for_0_03_one_training"]
    assert one.patients_needed(0.01) == expected["patients_for_0_01_one_training"]


def test_more_trainings_find_what_no_number_of_patients_does():
    bars = Bars(12, 1e-6, 11, 3, 1e-4, 4.0)
    assert bars.patients_needed(0.02) is None
    needed: Any = bars.trainings_needed(0.02)

    def found(trainings):
        t = lambda q: stats.t.ppf(q, 4 * (trainings - 1) / 2)  # noqa: E731
        spread = 1e-4 * 3 / trainings
        half = sqrt(stats.t.ppf(0.975, 11) ** 2 * 1e-6 + t(0.985) ** 2 * spread)
        return half + sqrt(stats.t.ppf(0.9, 11) ** 2 * 1e-6 + t(0.9) ** 2 * spread) <= 0.02

    assert found(needed)
    assert not found(needed - 1)
    assert bars.trainings_needed(0.0005) is None


def test_of_one_training_others_find_nothing():
    bars = Bars(8, 1e-4, 7)
    assert bars.trainings_needed(0.001) is None
    assert bars.with_trainings(9) == bars


def test_one_training_has_the_interval_and_p_value_of_the_paired_t_test():
    joined, alone = np.random.default_rng(3).normal(0.2, 1, (2, 17))
    found = estimate_mean(joined, alone)
    bars, reference = error_bars(found), stats.ttest_rel(joined, alone)
    low, high = reference.confidence_interval(0.95)
    assert found.centre - bars.half_width == pytest.approx(low, rel=1e-10)
    assert found.centre + bars.half_width == pytest.approx(high, rel=1e-10)
    assert bars.p_value(found.centre) == pytest.approx(reference.pvalue, rel=1e-10)


def test_without_patients_to_differ_the_bar_is_welchs_interval_of_the_trainings():
    rng = np.random.default_rng(4)
    joined, alone = rng.normal(0.2, 1, 5), rng.normal(0, 3, 4)
    bars = error_bars(estimate_mean(np.tile(joined, (9, 1)), np.tile(alone, (9, 1))))
    low, high = stats.ttest_ind(joined, alone, equal_var=False).confidence_interval(0.97)
    assert bars.half_width == pytest.approx((high - low) / 2, rel=1e-10)


def test_of_the_same_trainings_the_bar_is_students_interval_of_the_differences():
    rng = np.random.default_rng(5)
    plain, gains = rng.normal(0, 9, (7, 4)), rng.normal(0.2, 1, 4)
    bars = error_bars(estimate_mean(plain + gains, plain, same_trainings=True))
    low, high = stats.ttest_1samp(gains, 0).confidence_interval(0.97)
    assert bars.half_width == pytest.approx((high - low) / 2, rel=1e-10)
    assert (bars.df_trainings, bars.trainings) == (pytest.approx(3), 4)


@pytest.mark.parametrize(("joined", "alone"), [(1, 1), (2, 2), (5, 2), (1, 9)])
def test_fewer_than_three_trainings_of_an_arm_have_no_bar(joined, alone):
    rng = np.random.default_rng(6)
    scores = rng.normal(size=(8, joined)), rng.normal(size=(8, alone))
    found = estimate_mean(*scores)
    bars = error_bars(found, [found.arms[0]])
    reference = stats.ttest_rel(*(arm.mean(axis=1) for arm in scores))
    assert bars.df_trainings is None
    assert bars.half_width == pytest.approx(
        (reference.confidence_interval().high - reference.confidence_interval().low) / 2
    )


def test_p_is_the_level_whose_interval_reaches_zero(statistics):
    given, _ = statistics("trainings_decide")
    bars = error_bars(estimate_mean(given["joined"], given["alone"]))
    assert bars.p_value(bars.half_width) == pytest.approx(0.05, rel=1e-9)
    assert bars.p_value(0.0) == 1.0
    assert 0 < bars.p_value(1e6) < 1e-12
    assert Bars(9, 0.0, 8, 3, 1e-4, 2.0).p_value(-1e3) < 1e-5


def test_the_tipping_sd_is_where_the_trainings_would_reach_zero(statistics):
    given, _ = statistics("one_training")
    bars = error_bars(estimate_mean(given["joined"], given["alone"]))
    sd = bars.tipping_sd(0.03375)
    both = sqrt(bars.variance_patients + 2 * sd**2)
    assert student(0.025, 7) * both == pytest.approx(0.03375, rel=1e-12)
    assert bars.tipping_sd(0.001) == 0.0
    one_arm = Bars(8, bars.variance_patients, 7, arms=1)
    assert one_arm.tipping_sd(0.03375) == pytest.approx(sd * sqrt(2))


def test_quantiles_are_scipys():
    for tail, df in ((0.025, 7), (0.015, 2.6), (0.1, 1e3), (0.005, 11.876)):
        assert student(tail, df) == pytest.approx(stats.t.isf(tail, df), rel=1e-9)


def test_too_few_patients_have_no_bars():
    with pytest.raises(ValueError, match="1 patients have no variance"):
        error_bars(estimate_mean([0.5], [0.4]))


def wrong(draws, *, shift=0.0):
    """The share of draws whose interval leaves out the truth."""
    bars = [(abs(draw.centre - shift), error_bars(draw).half_width) for draw in draws]
    return np.mean([away > half for away, half in bars])


def simulated(rng, patients, trainings, *, sd=0.012, residual=0.010, shift=0.0):
    """Two arms of equal methods: (patients, trainings) scores of each."""
    effects = rng.normal(0, sd, (patients, 1)), np.zeros((patients, 1))
    return [
        effect
        + rng.normal(0, shift, (1, trainings))
        + rng.normal(0, residual, (patients, trainings))
        for effect in effects
    ]


@pytest.mark.parametrize(
    ("trainings", "shift", "sd"),
    [(1, 0.0, 0.012), (3, 0.0, 0.012), (3, 0.008, 0.012), (3, 0.008, 0.0), (5, 0.004, 0.0)],
)
def test_equal_methods_differ_no_more_often_than_the_level(trainings, shift, sd):
    rng = np.random.default_rng(7)
    draws = [estimate_mean(*simulated(rng, 12, trainings, sd=sd, shift=shift)) for _ in range(1200)]
    assert 0.005 < wrong(draws) < 0.075  # 0.05 and four Monte-Carlo errors


def test_patients_alone_would_take_one_method_for_two():
    rng = np.random.default_rng(8)
    draws = [estimate_mean(*simulated(rng, 20, 3, sd=0.0, shift=0.008)) for _ in range(400)]
    ignoring = [abs(d.centre) > student(0.025, d.df) * sqrt(d.variance) for d in draws]
    assert np.mean(ignoring) > 0.3
    assert wrong(draws) < 0.09


def test_areas_of_equal_models_differ_no_more_often_than_the_level():
    rng, labels = np.random.default_rng(9), np.repeat([1, 0], [8, 24])
    draws = [estimate_auc(*rng.normal(labels, 1, (2, 32)), labels) for _ in range(1000)]
    assert wrong(draws) < 0.078


def test_three_trainings_find_most_of_what_a_paired_t_test_finds():
    rng = np.random.default_rng(10)
    found = reference = 0
    for _ in range(800):
        joined, alone = simulated(rng, 12, 3)
        draw = estimate_mean(joined + 0.014, alone)
        found += draw.centre > error_bars(draw).half_width
        reference += draw.centre > student(0.025, 11) * sqrt(draw.variance)
    assert found / reference > 0.8


def test_the_smallest_detectable_difference_is_found_about_eight_times_in_ten():
    rng = np.random.default_rng(11)
    sizes = []
    for _ in range(600):
        joined, alone = simulated(rng, 20, 5, shift=0.004)
        sizes.append(error_bars(estimate_mean(joined, alone)).smallest_detectable)
    truth = float(np.mean(sizes))
    draws = (simulated(rng, 20, 5, shift=0.004) for _ in range(600))
    estimates = [estimate_mean(joined + truth, alone) for joined, alone in draws]
    found = np.mean([e.centre > error_bars(e).half_width for e in estimates])
    assert 0.75 < found < 0.97


@pytest.mark.slow
def test_the_simulated_errors_and_the_power_are_as_accepted():
    done = subprocess.run(
        [sys.executable, Path(__file__).parents[2] / "benchmarks" / "verdict.py", "--quick"],
        capture_output=True, text=True, check=False, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": ok\n") == 10
