"""Shares of balanced accuracy and of the area under the curve, against scikit-learn and DeLong."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from collegium.tasks.metrics.classification import (
    auc_pseudovalues,
    balanced_accuracy_pseudovalues,
)

Array = NDArray[np.float64]


def binary(
    rng: np.random.Generator, count: int, *, digits: int = 8
) -> tuple[Array, NDArray[np.int64]]:
    """Probabilities that know a little of random labels; few digits make ties."""
    labels = rng.integers(0, 2, count)
    labels[:2] = 0, 1
    chance = np.round(1 / (1 + np.exp(-rng.normal(labels, 1.5))), digits)
    return np.stack([1 - chance, chance], 1), labels


def pseudovalues_of(probabilities: Array, labels: Sequence[int], *patients: Sequence[str]) -> Array:
    values = auc_pseudovalues(probabilities, labels, *patients)
    assert values is not None
    return np.array(values)


def placements(scores: Array, labels: NDArray[np.int64]) -> tuple[Array, Array]:
    """DeLong's V10 of the positive and V01 of the negative cases, pair by pair."""
    first, second = scores[labels == 1][:, None], scores[labels == 0][None, :]
    wins = (first > second) + 0.5 * (first == second)
    return wins.mean(1), wins.mean(0)


@pytest.mark.parametrize("digits", [1, 8])
@pytest.mark.parametrize("seed", range(3))
def test_the_mean_of_binary_pseudovalues_is_the_area(seed: int, digits: int) -> None:
    probabilities, labels = binary(np.random.default_rng(seed), 40, digits=digits)
    values = pseudovalues_of(probabilities, labels.tolist())
    assert values.mean() == pytest.approx(roc_auc_score(labels, probabilities[:, 1]), abs=1e-12)


def test_ties_count_one_half() -> None:
    half = np.full((4, 2), 0.5)
    assert pseudovalues_of(half, [0, 1, 1, 0]) == pytest.approx([0.5] * 4)
    # of the two pairs (0.6, 0.6) and (0.6, 0.2) one is a tie and one is won
    chance = np.array([0.6, 0.2, 0.6])
    assert pseudovalues_of(np.stack([1 - chance, chance], 1), [0, 0, 1]).mean() == pytest.approx(
        0.75
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_mean_over_several_classes_is_one_against_the_rest(seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 4, 50)
    labels[:4] = range(4)
    logits = rng.normal(size=(50, 4)) + 1.2 * np.eye(4)[labels]
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    expected = roc_auc_score(labels, probabilities, multi_class="ovr", average="macro")
    assert pseudovalues_of(probabilities, labels.tolist()).mean() == pytest.approx(
        expected, abs=1e-12
    )


def test_a_class_that_no_case_has_is_left_out_of_the_mean() -> None:
    rng = np.random.default_rng(5)
    labels = rng.choice([0, 2, 3], 30)
    probabilities = rng.dirichlet(np.ones(5), 30)
    expected = np.mean([roc_auc_score(labels == c, probabilities[:, c]) for c in (0, 2, 3)])
    assert pseudovalues_of(probabilities, labels.tolist()).mean() == pytest.approx(
        expected, abs=1e-12
    )


@pytest.mark.parametrize("digits", [1, 8])
def test_the_variance_of_the_mean_is_delongs(digits: int) -> None:
    """With sums of squares over the number of cases, as DeLong's go with that number minus 1."""
    probabilities, labels = binary(np.random.default_rng(1), 60, digits=digits)
    values = pseudovalues_of(probabilities, labels.tolist())
    above, below = placements(probabilities[:, 1], labels)
    expected = above.var() / len(above) + below.var() / len(below)
    assert values.var() / len(values) == pytest.approx(expected, rel=1e-10)
    delong = above.var(ddof=1) / len(above) + below.var(ddof=1) / len(below)
    assert values.var(ddof=1) / len(values) == pytest.approx(delong, rel=0.03)


def test_the_covariance_of_two_models_is_delongs() -> None:
    first, labels = binary(np.random.default_rng(2), 50)
    noise = np.random.default_rng(3).normal(0, 0.1, 50)
    chance = np.clip(first[:, 1] + noise, 0, 1)
    second = np.stack([1 - chance, chance], 1)
    one, two = pseudovalues_of(first, labels.tolist()), pseudovalues_of(second, labels.tolist())
    pairs = zip(placements(first[:, 1], labels), placements(chance, labels), strict=True)
    expected = sum(np.cov(*pair, ddof=0)[0, 1] / len(pair[0]) for pair in pairs)
    assert np.cov(one, two, ddof=0)[0, 1] / len(one) == pytest.approx(expected, rel=1e-10)


def by_patient(values: Sequence[float], patients: Sequence[str]) -> float:
    """The mean over patients of the mean over their cases, as reports take it."""
    groups = defaultdict(list)
    for value, patient in zip(values, patients, strict=True):
        groups[patient].append(value)
    return float(np.mean([np.mean(group) for group in groups.values()]))


def test_patients_weigh_as_one_however_many_cases_they_have() -> None:
    probabilities, labels = binary(np.random.default_rng(7), 30, digits=1)
    patients = [f"p{number}" for number in np.random.default_rng(8).integers(0, 9, 30)]
    weights = [1 / patients.count(patient) for patient in patients]
    won = total = 0.0
    for i in range(30):
        for j in range(30):
            if labels[i] == 1 and labels[j] == 0:
                a, b = probabilities[i, 1], probabilities[j, 1]
                total += weights[i] * weights[j]
                won += weights[i] * weights[j] * (1.0 if a > b else 0.5 if a == b else 0.0)
    values = pseudovalues_of(probabilities, labels.tolist(), patients)
    assert by_patient(values.tolist(), patients) == pytest.approx(won / total, rel=1e-10)
    assert won / total != pytest.approx(roc_auc_score(labels, probabilities[:, 1]), abs=1e-3)


def test_a_case_that_is_there_twice_under_one_patient_changes_nothing() -> None:
    probabilities, labels = binary(np.random.default_rng(9), 12)
    names = [f"p{number}" for number in range(12)]
    twice = np.r_[probabilities, probabilities[:1]]
    values = pseudovalues_of(twice, [*labels.tolist(), int(labels[0])], [*names, "p0"])
    expected = pseudovalues_of(probabilities, labels.tolist())
    assert values[:12] == pytest.approx(expected)
    assert values[12] == pytest.approx(expected[0])


@pytest.mark.parametrize("labels", [[0, 0, 0], [1], [2, 2], []])
def test_cases_of_one_class_have_no_area(labels: list[int]) -> None:
    assert auc_pseudovalues(np.full((len(labels), 3), 1 / 3), labels) is None


@pytest.mark.parametrize("seed", range(3))
def test_the_mean_of_balanced_pseudovalues_is_the_balanced_accuracy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels, guesses = rng.choice(4, 40, p=[0.6, 0.3, 0.1, 0]), rng.integers(0, 3, 40)
    values = balanced_accuracy_pseudovalues(
        (labels == guesses).astype(float).tolist(), labels.tolist()
    )
    assert values is not None
    assert np.mean(values) == pytest.approx(balanced_accuracy_score(labels, guesses), abs=1e-12)


def test_the_variance_of_balanced_pseudovalues_is_that_of_a_mean_of_proportions() -> None:
    labels = np.repeat([0, 1, 2], [10, 20, 5])
    correct = np.random.default_rng(0).integers(0, 2, 35).astype(float)
    values = balanced_accuracy_pseudovalues(correct.tolist(), labels.tolist())
    assert values is not None
    proportions = [correct[labels == c] for c in range(3)]
    expected = sum(p.mean() * (1 - p.mean()) / len(p) for p in proportions) / 9
    assert np.var(values) / 35 == pytest.approx(expected, rel=1e-10)


def test_balanced_accuracy_weighs_patients_as_one() -> None:
    # class 0: patient a is right in 1 of 2, b is wrong, so 1/4; class 1: c is right
    values = balanced_accuracy_pseudovalues([1, 0, 0, 1], [0, 0, 0, 1], ["a", "a", "b", "c"])
    assert values is not None
    assert by_patient(values, ["a", "a", "b", "c"]) == pytest.approx((0.25 + 1) / 2)


def test_balanced_accuracy_of_one_class_is_its_accuracy_and_of_none_is_undefined() -> None:
    assert balanced_accuracy_pseudovalues([1, 0, 1, 1], [2, 2, 2, 2]) == pytest.approx(
        [1.0, 0.0, 1.0, 1.0]
    )
    assert balanced_accuracy_pseudovalues([], []) is None
