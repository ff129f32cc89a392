import numpy as np
import pytest
from scipy import stats

from collegium.benchmark.significance import (
    Interval,
    disparity,
    higher_is_better,
    outcome,
    paired_difference,
    verdict,
    worst_site,
)


def names(count):
    return [f"p{number:03}" for number in range(count)]


def test_seeds_and_cases_are_averaged_within_a_patient_first():
    a = [0.9, 0.7, 0.8, 0.5]
    b = [0.5, 0.5, 0.5, 0.6]
    found = paired_difference(a, b, ["p1", "p1", "p1", "p2"])
    # p1: mean of 0.4, 0.2, 0.3 is 0.3; p2: -0.1; by hand (0.3 - 0.1) / 2
    assert found.mean == pytest.approx(0.1)
    assert found.patients == 2


def test_interval_agrees_with_scipy_bootstrap():
    rng = np.random.default_rng(3)
    a, b = rng.normal(0.8, 0.05, 40), rng.normal(0.77, 0.05, 40)
    found = paired_difference(a, b, names(40), resamples=20_000)
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
    found = paired_difference(values, np.zeros(1500), names(1500), resamples=4000)
    half = 1.959964 * values.std() / np.sqrt(1500)  # central limit theorem
    assert found.low == pytest.approx(values.mean() - half, rel=0.1)
    assert found.high == pytest.approx(values.mean() + half, rel=0.1)


def test_interval_of_two_patients_is_exactly_its_extremes():
    # Resampled means are 0 (1/4), 1/2 (1/2), 1 (1/4): the outer 2.5 % lie at 0 and 1.
    found = paired_difference([0.0, 1.0], [0.0, 0.0], ["p1", "p2"])
    assert (found.low, found.high) == (0.0, 1.0)


def test_equal_differences_have_an_interval_of_no_width():
    found = paired_difference([0.75] * 8, [0.5] * 8, names(8))
    assert (found.mean, found.low, found.high) == (0.25, 0.25, 0.25)


def test_the_interval_is_the_same_for_a_seed_whatever_the_order_of_pairs():
    rng = np.random.default_rng(1)
    a, patients = rng.normal(size=30), names(30)
    first = paired_difference(a, np.zeros(30), patients, seed=4)
    turned = paired_difference(a[::-1], np.zeros(30), patients[::-1], seed=4)
    other = paired_difference(a, np.zeros(30), patients, seed=5)
    assert first == turned
    assert (first.low, first.high) != (other.low, other.high)


def test_undefined_pairs_are_counted_and_enter_no_mean():
    a = [0.9, None, 0.8, 0.4, float("nan")]
    b = [0.7, 0.5, None, 0.5, 0.1]
    found = paired_difference(a, b, ["p1", "p1", "p2", "p3", "p4"])
    assert found.undefined == 3
    assert found.patients == 2
    assert found.mean == pytest.approx((0.2 - 0.1) / 2)


def test_one_patient_has_no_interval():
    found = paired_difference([0.9, 0.8], [0.5, 0.5], ["p1", "p1"])
    assert found.mean == pytest.approx(0.35)
    assert (found.low, found.high, found.patients) == (None, None, 1)
    assert outcome(found) == "cannot tell"
    assert verdict(found).startswith("Cannot tell: 1 patient,")


def test_no_defined_pair_has_no_mean():
    found = paired_difference([None], [0.5], ["p1"])
    assert found == Interval(None, None, None, 0, 1)
    assert verdict(found) == "Cannot tell: no patient has a score with both."


def test_sequences_of_unequal_length_and_no_resamples_are_refused():
    with pytest.raises(ValueError, match="shorter"):
        paired_difference([0.1, 0.2], [0.1], ["p1", "p2"])
    with pytest.raises(ValueError, match="at least 1, not 0"):
        paired_difference([0.1], [0.1], ["p1"], resamples=0)


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
    found = Interval(0.02, low, high, patients, 0)
    assert outcome(found, higher_is_better=higher) == expected
    assert verdict(found, higher_is_better=higher).lower().startswith(expected)


def test_verdict_names_the_patients():
    assert "12 patients" in verdict(Interval(0.02, 0.01, 0.03, 12, 0))
    assert "worse on average" in verdict(Interval(-0.02, -0.03, -0.01, 12, 0))
    assert "holds zero" in verdict(Interval(0.02, -0.01, 0.03, 12, 0))


def test_worst_site_follows_the_direction_of_the_metric():
    means = {"B": 0.7, "A": 0.9, "C": None}
    assert worst_site(means) == ("B", 0.7)
    assert worst_site(means, higher_is_better=False) == ("A", 0.9)
    assert worst_site({"B": 0.7, "A": 0.7}) == ("A", 0.7)
    assert worst_site({"A": None}) is None


def test_disparity_is_range_and_population_sd():
    found = disparity({"A": 0.6, "B": 0.8, "C": 1.0, "D": None})
    assert found is not None
    assert found.range == pytest.approx(0.4)
    assert found.sd == pytest.approx(np.sqrt(0.08 / 3))
    assert disparity({"A": 0.6, "B": None}) is None


def test_direction_of_a_metric_by_unit_or_name():
    assert higher_is_better("dice")
    assert higher_is_better("negative_loss")
    assert not higher_is_better("loss")
    assert not higher_is_better("hd95_vessel")
    assert not higher_is_better("anything", "mm")
