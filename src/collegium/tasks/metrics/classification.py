"""Metrics of a set of classified cases, as one pseudo-value for each case.

The area under the ROC curve is a property of all cases of a site together. So that it can be
averaged over patients, compared patient by patient and resampled like any other score, each case
gets a pseudo-value: the metric of the set plus the case's influence on it (the infinitesimal
jackknife). The mean of the pseudo-values is the area itself, and their variance over the number of
cases is DeLong's (Biometrics 1988, https://doi.org/10.2307/2531595). Balanced accuracy is treated
in the same way. A single pseudo-value can lie outside [0, 1]; only their means are meaningful.

Cases of one patient share the weight of one patient.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def auc_pseudovalues(
    probabilities: Array, labels: Sequence[int], patients: Sequence[str] | None = None
) -> list[float] | None:
    """Return the pseudo-values of the area under the ROC curve.

    Ties count one half. With more than two classes it is the mean of one class against the rest,
    over the classes that some cases have and others do not.

    Args:
        probabilities: (cases, classes).
        labels: The true class of each case.
        patients: The patient of each case; None: each case is a patient of its own.

    Returns:
        A value for each case; None if all cases are of one class, for which there is no area.
    """
    truth, weights = np.asarray(labels), patient_weights(patients, len(labels))
    present = [int(c) for c in np.unique(truth)] if len(truth) else []
    if len(present) < 2:
        return None
    ranked = present if probabilities.shape[1] > 2 else [1]
    by_class = [_binary_auc(probabilities[:, c], truth == c, weights) for c in ranked]
    return [float(value) for value in np.mean(by_class, axis=0)]


def balanced_accuracy_pseudovalues(
    correct: Sequence[float] | Array, labels: Sequence[int], patients: Sequence[str] | None = None
) -> list[float] | None:
    """Return the pseudo-values of balanced accuracy, the mean accuracy of the classes present.

    Args:
        correct: 1 for a case that was classified correctly, otherwise 0.
        labels: The true class of each case.
        patients: The patient of each case; None: each case is a patient of its own.

    Returns:
        A value for each case; None if there is no case.
    """
    truth, weights, right = (
        np.asarray(labels),
        patient_weights(patients, len(labels)),
        np.asarray(correct),
    )
    present = np.unique(truth)
    if not len(present):
        return None
    accuracies, influence = [], np.zeros(len(truth))
    for label in present:
        own = truth == label
        total = weights[own].sum()
        accuracy = (weights[own] * right[own]).sum() / total
        influence[own] = (right[own] - accuracy) / (total * len(present))
        accuracies.append(accuracy)
    return [float(value) for value in np.mean(accuracies) + influence]


def weight_below(scores: Array, others: Array, weights: Array) -> Array:
    """Return the fraction of the others' weight below each score; ties count one half.

    Args:
        scores: (n,).
        others: (k,) scores to compare with.
        weights: (k,) what each of the others weighs.
    """
    order = np.argsort(others, kind="stable")
    sums = np.concatenate([[0.0], np.cumsum(weights[order])])
    low = np.searchsorted(others[order], scores, side="left")
    high = np.searchsorted(others[order], scores, side="right")
    return np.asarray((sums[low] + sums[high]) / (2 * sums[-1]))


def patient_weights(patients: Sequence[str] | None, cases: int) -> Array:
    """Return a weight for each case; they add up to 1, and every patient weighs the same.

    Args:
        patients: The patient of each case; None: each case is a patient of its own.
        cases: How many cases there are.
    """
    if patients is None:
        return np.full(cases, 1 / max(cases, 1))
    counts = Counter(patients)
    return np.array([1 / (len(counts) * counts[patient]) for patient in patients])


def _binary_auc(scores: Array, positive: NDArray[np.bool_], weights: Array) -> Array:
    """Return the pseudo-values of the area of one class against the rest."""
    higher = weight_below(scores, scores[~positive], weights[~positive])
    lower = 1 - weight_below(scores, scores[positive], weights[positive])
    own = np.where(positive, higher, lower)
    total = np.where(positive, weights[positive].sum(), weights[~positive].sum())
    area = (weights * own)[positive].sum() / weights[positive].sum()
    return np.asarray(area + (own - area) / total)
