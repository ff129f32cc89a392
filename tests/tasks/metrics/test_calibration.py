"""Calibration, against scikit-learn's calibration curve."""

import itertools
from collections import defaultdict

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.calibration import calibration_curve

from collegium.tasks.metrics.calibration import calibration_error_pseudovalues, reliability

Array = NDArray[np.float64]


def drawn(seed: int, count: int = 60, classes: int = 2) -> tuple[Array, list[int]]:
    """Probabilities that are too sure, and true classes."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, count)
    logits = 3 * (rng.normal(size=(count, classes)) + 0.6 * np.eye(classes)[labels])
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return np.round(chances, 2), labels.tolist()  # some stand at the ends of bins


def by_curve(scores: Array, positive: NDArray[np.bool_], bins: int) -> float:
    """The calibration error of one class by scikit-learn's curve and numpy's histogram."""
    observed, confidence = calibration_curve(positive, scores, n_bins=bins)
    ends = np.linspace(0, 1, bins + 1)
    counts = np.array([((scores > a) & (scores <= b)).sum() for a, b in itertools.pairwise(ends)])
    counts[0] += (scores == 0).sum()
    return float((counts[counts > 0] * abs(observed - confidence)).sum() / len(scores))


@pytest.mark.parametrize("bins", [1, 5, 10, 15])
@pytest.mark.parametrize("seed", range(10))
def test_the_error_of_two_classes_is_that_of_scikit_learn_s_curve(seed: int, bins: int) -> None:
    chances, labels = drawn(seed)
    values = calibration_error_pseudovalues(chances, labels, bins=bins)
    assert values is not None
    expected = by_curve(chances[:, 1], np.array(labels) == 1, bins)
    assert np.mean(values) == pytest.approx(expected, abs=1e-12)
    assert max(map(abs, values)) <= 1


@pytest.mark.parametrize("seed", range(10))
def test_the_error_of_several_classes_is_the_mean_of_each_against_the_rest(seed: int) -> None:
    chances, labels = drawn(seed, classes=4)
    values = calibration_error_pseudovalues(chances, labels)
    assert values is not None
    each = [by_curve(chances[:, c], np.array(labels) == c, 10) for c in range(4)]
    assert np.mean(values) == pytest.approx(np.mean(each), abs=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_the_bins_of_a_diagram_are_those_of_scikit_learn_s_curve(seed: int) -> None:
    chances, labels = drawn(seed)
    positive = np.array(labels) == 1
    bins = reliability(chances[:, 1], positive, bins=8)
    observed, confidence = calibration_curve(positive, chances[:, 1], n_bins=8)
    assert [b.observed for b in bins] == pytest.approx(observed.tolist())
    assert [b.confidence for b in bins] == pytest.approx(confidence.tolist())
    assert sum(b.cases for b in bins) == 60
    assert [b.share for b in bins] == pytest.approx([b.cases / 60 for b in bins])
    assert all(b.low <= b.confidence <= b.high for b in bins)
    error = sum(b.share * abs(b.confidence - b.observed) for b in bins)
    values = calibration_error_pseudovalues(chances, labels, bins=8)
    assert values is not None
    assert error == pytest.approx(np.mean(values))


def test_an_end_belongs_to_the_bin_below_and_zero_to_the_first() -> None:
    scores = np.array([0.0, 0.25, 0.2500001, 0.5, 1.0])
    bins = reliability(scores, np.array([False, False, True, True, True]), bins=4)
    assert [(b.low, b.high, b.cases) for b in bins] == [(0, 0.25, 2), (0.25, 0.5, 2), (0.75, 1, 1)]
    assert [b.observed for b in bins] == [0.0, 1.0, 1.0]


def test_patients_weigh_as_one_however_many_cases_they_have() -> None:
    chances, labels = drawn(3)
    patients = [f"p{number}" for number in np.random.default_rng(4).integers(0, 20, 60)]
    values = calibration_error_pseudovalues(chances, labels, patients)
    assert values is not None
    of_patient = defaultdict(list)
    for patient, value in zip(patients, values, strict=True):
        of_patient[patient].append(value)
    bins = reliability(chances[:, 1], np.array(labels) == 1, patients)
    error = sum(b.share * abs(b.confidence - b.observed) for b in bins)
    assert np.mean([np.mean(v) for v in of_patient.values()]) == pytest.approx(error)
    twice = calibration_error_pseudovalues(
        np.r_[chances[:9], chances[:1]], [*labels[:9], labels[0]], [*"abcdefghi", "a"]
    )
    once = calibration_error_pseudovalues(chances[:9], labels[:9])
    assert twice is not None
    assert twice[:9] == pytest.approx(once)


def test_without_cases_there_is_no_error_and_no_bin() -> None:
    assert calibration_error_pseudovalues(np.zeros((0, 2)), []) is None
    assert reliability(np.zeros(0), np.zeros(0, bool)) == []


def test_one_class_alone_has_an_error() -> None:
    values = calibration_error_pseudovalues(np.array([[0.3, 0.7], [0.1, 0.9]]), [1, 1])
    assert values == pytest.approx([0.3, 0.1])
