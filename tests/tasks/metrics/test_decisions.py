"""Thresholds and predictive values, against scikit-learn."""

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.metrics import precision_score, recall_score, roc_curve

from collegium.tasks.metrics.decisions import choose_threshold, predictive_values

Array = NDArray[np.float64]


def drawn(seed: int, count: int = 40) -> tuple[Array, NDArray[np.bool_], list[str]]:
    """Scores that know a little of the class, some of them equal, of patients with 1 to 4 cases."""
    rng = np.random.default_rng(seed)
    positive = rng.random(count) < 0.35
    positive[:2] = True, False
    scores = np.round(1 / (1 + np.exp(-rng.normal(positive, 1.2))), 1 + seed % 3)
    return scores, positive, [f"p{number}" for number in rng.integers(0, count // 2, count)]


def weights_of(patients: list[str]) -> Array:
    return np.array([1 / patients.count(patient) for patient in patients])


@pytest.mark.parametrize("seed", range(12))
def test_the_youden_threshold_is_that_of_scikit_learn_s_curve(seed: int) -> None:
    scores, positive, patients = drawn(seed)
    for own, weights in ((None, None), (patients, weights_of(patients))):
        false, true, thresholds = roc_curve(
            positive, scores, sample_weight=weights, drop_intermediate=False
        )
        best = np.round(true - false, 10)[1:].argmax()  # the first threshold is infinite
        assert choose_threshold(scores, positive, own) == thresholds[1:][best]


@pytest.mark.parametrize("least", [0.05, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("seed", range(12))
def test_the_highest_threshold_with_a_sensitivity_is_chosen(seed: int, least: float) -> None:
    scores, positive, patients = drawn(seed)
    weights = weights_of(patients)
    reaching = [
        t
        for t in np.unique(scores)
        if recall_score(positive, scores >= t, sample_weight=weights) >= least - 1e-12
    ]
    found = choose_threshold(scores, positive, patients, least_sensitivity=least)
    assert found == max(reaching)


def test_of_equally_good_thresholds_the_highest_is_chosen() -> None:
    scores = np.array([0.9, 0.8, 0.6, 0.4, 0.2])
    positive = np.array([True, False, True, False, False])
    # 1/2 - 0 at 0.9 and 1 - 1/3 at 0.6: the lower one is better
    assert choose_threshold(scores, positive) == 0.6
    even = np.array([True, False, True, False])
    # 1/2 - 0 at 0.9 and 1 - 1/2 at 0.6 are equal
    assert choose_threshold(scores[:4], even) == 0.9


def test_one_class_has_no_youden_threshold_and_no_positive_case_has_none() -> None:
    scores = np.array([0.2, 0.6, 0.4])
    every, none = np.ones(3, bool), np.zeros(3, bool)
    assert choose_threshold(scores, every) is None
    assert choose_threshold(scores, none) is None
    assert choose_threshold(np.zeros(0), np.zeros(0, bool)) is None
    assert choose_threshold(scores, none, least_sensitivity=0.9) is None
    assert choose_threshold(np.zeros(0), np.zeros(0, bool), least_sensitivity=0.9) is None
    # without negative cases a sensitivity can be reached all the same
    assert choose_threshold(scores, every, least_sensitivity=0.6) == 0.4


@pytest.mark.parametrize("prevalence", [0.01, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("seed", range(10))
def test_predictive_values_are_precisions_of_cases_reweighted_to_the_prevalence(
    seed: int, prevalence: float
) -> None:
    scores, positive, _ = drawn(seed)
    decided = scores >= 0.6
    sensitivity = recall_score(positive, decided)
    specificity = recall_score(~positive, ~decided)
    weights = np.where(positive, prevalence / positive.sum(), (1 - prevalence) / (~positive).sum())
    expected = (
        precision_score(positive, decided, sample_weight=weights),
        precision_score(~positive, ~decided, sample_weight=weights),
    )
    assert predictive_values(sensitivity, specificity, prevalence) == pytest.approx(expected)


def test_predictive_values_of_what_is_never_decided_are_undefined() -> None:
    never, always = predictive_values(0.0, 1.0, 0.1), predictive_values(1.0, 0.0, 0.1)
    assert never[0] is always[1] is None
    assert (never[1], always[0]) == pytest.approx((0.9, 0.1))
    assert predictive_values(None, 0.8, 0.1) == predictive_values(0.8, None, 0.1) == (None, None)
