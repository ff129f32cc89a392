"""Calibration of probabilities: how often what was said to be likely is so.

Bins have equal widths: (0, 0.1], (0.1, 0.2] and so on, the first with 0. With two classes the
probability is that of the second; with more, each class is looked at against the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collegium.tasks.metrics.classification import Array, patient_weights

BINS = 10
"""The number of bins, unless an experiment says otherwise."""


@dataclass(frozen=True)
class ReliabilityBin:
    """One bin of a reliability diagram.

    Attributes:
        low: Its lower end, which does not belong to it but for 0.
        high: Its upper end.
        cases: How many cases have such a probability.
        share: Their share of all, where patients weigh the same.
        confidence: Their mean probability.
        observed: The share of them that is of the class.
    """

    low: float
    high: float
    cases: int
    share: float
    confidence: float
    observed: float


def reliability(
    scores: Array,
    positive: NDArray[np.bool_],
    patients: Sequence[str] | None = None,
    *,
    bins: int = BINS,
) -> list[ReliabilityBin]:
    """Return the bins of a reliability diagram, of probabilities of one class.

    Patients weigh the same, in shares and means. The sum over the bins of share times the distance
    of confidence and observed is the class's part of the expected calibration error.

    Args:
        scores: (cases,) the probability of the class.
        positive: (cases,) whether a case is of the class.
        patients: The patient of each case; None: each case is a patient of its own.
        bins: How many bins divide 0 to 1.

    Returns:
        The bins that hold a case, from low to high.
    """
    weights, place = patient_weights(patients, len(scores)), _bin_of(scores, bins)
    found = []
    for number in np.unique(place).tolist():
        own = place == number
        share = weights[own].sum()
        confidence, observed = (weights[own] @ v[own] / share for v in (scores, positive))
        found.append(
            ReliabilityBin(
                number / bins,
                (number + 1) / bins,
                int(own.sum()),
                float(share),
                float(confidence),
                float(observed),
            )
        )
    return found


def calibration_error_pseudovalues(
    probabilities: Array,
    labels: Sequence[int],
    patients: Sequence[str] | None = None,
    *,
    bins: int = BINS,
) -> list[float] | None:
    """Return the pseudo-values of the expected calibration error (ECE).

    The mean distance of a bin's mean probability from its observed frequency, weighted by the
    bin's share (Naeini et al., 2015, https://doi.org/10.1609/aaai.v29i1.9602). With more than two
    classes it is the mean of each class against the rest (Nixon et al., 2019,
    https://arxiv.org/abs/1904.01685), not the error of the most probable class alone. A case's
    value is the distance of its class and its probability with the sign that its bin has, so that
    the mean of the values is the error itself.

    Args:
        probabilities: (cases, classes).
        labels: The true class of each case.
        patients: The patient of each case; None: each case is a patient of its own.
        bins: How many bins divide 0 to 1.

    Returns:
        A value for each case, in [-1, 1]; None if there is no case.
    """
    if not len(labels):
        return None
    weights, truth = patient_weights(patients, len(labels)), np.asarray(labels)
    looked_at = range(probabilities.shape[1]) if probabilities.shape[1] > 2 else [1]
    by_class = []
    for c in looked_at:
        apart, place = (truth == c) - probabilities[:, c], _bin_of(probabilities[:, c], bins)
        by_class.append(np.sign(np.bincount(place, weights * apart))[place] * apart)
    return [float(value) for value in np.mean(by_class, axis=0)]


def _bin_of(scores: Array, bins: int) -> NDArray[np.intp]:
    """Return the number of the bin of each score, from 0."""
    return np.searchsorted(np.linspace(0, 1, bins + 1)[1:-1], scores, side="left")
