"""Decisions by a threshold on the probability of a class: which one, and what they are worth."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from collegium.tasks.metrics.classification import Array, patient_weights

_DIGITS = 12  # sums of weights that differ in later digits only are equal


def choose_threshold(
    scores: Array,
    positive: NDArray[np.bool_],
    patients: Sequence[str] | None = None,
    *,
    least_sensitivity: float | None = None,
) -> float | None:
    """Return the threshold from which on a case is decided to be positive.

    One of the scores: that with the largest Youden index, sensitivity + specificity - 1 (Youden,
    1950), or the highest with at least a given sensitivity; the highest of equals. Patients weigh
    the same.

    Args:
        scores: (cases,) the probability of the class.
        positive: (cases,) whether a case is of the class.
        patients: The patient of each case; None: each case is a patient of its own.
        least_sensitivity: The sensitivity to reach, in (0, 1]; None: the Youden index decides.

    Returns:
        The threshold; None if no case is positive or, for the Youden index, none is negative.
    """
    if not positive.any() or (least_sensitivity is None and positive.all()):
        return None
    order = np.argsort(-scores, kind="stable")
    falling, hits = scores[order], positive[order]
    last = np.flatnonzero(np.diff(falling, append=-np.inf))  # of the cases of each score
    weights = patient_weights(patients, len(scores))[order]
    sensitivity, false_alarms = (
        np.cumsum(weights * side)[last] / max((weights * side).sum(), np.finfo(float).tiny)
        for side in (hits, ~hits)
    )
    if least_sensitivity is not None:
        reached = np.round(sensitivity, _DIGITS) >= round(least_sensitivity, _DIGITS)
        return float(falling[last][reached.argmax()])
    return float(falling[last][np.round(sensitivity - false_alarms, _DIGITS).argmax()])


def predictive_values(
    sensitivity: float | None, specificity: float | None, prevalence: float
) -> tuple[float | None, float | None]:
    """Return positive and negative predictive value at a prevalence, by Bayes' rule.

    Args:
        sensitivity: The sensitivity; None is undefined.
        specificity: The specificity; None is undefined.
        prevalence: The share of positive cases where decisions are made, in (0, 1).

    Returns:
        Both are None if sensitivity or specificity is; one is None if nothing is ever decided so.
    """
    if sensitivity is None or specificity is None:
        return None, None
    hit, missed = sensitivity * prevalence, (1 - sensitivity) * prevalence
    alarm, cleared = (1 - specificity) * (1 - prevalence), specificity * (1 - prevalence)
    return _share(hit, alarm), _share(cleared, missed)


def _share(right: float, wrong: float) -> float | None:
    return right / (right + wrong) if right + wrong > 0 else None
