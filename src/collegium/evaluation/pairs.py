"""The scores of two arms, side by side: the same cases of the same patients in both."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Numbers = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class PairedScores:
    """The scores of two arms of the same cases, all defined.

    Attributes:
        joined: (cases, trainings, ...) of the arm that joined.
        reference: (cases, trainings, ...) of the arm it is compared with.
        patients: (cases,) the number of each case's patient, from 0.
        labels: (cases,) the true class of each case, from 0.
        undefined: How many cases were left out because a score of theirs is undefined.
        same_trainings: Whether training s of both arms is one training.
    """

    joined: Array
    reference: Array
    patients: Numbers
    labels: Numbers
    undefined: int
    same_trainings: bool

    @property
    def count(self) -> int:
        """The number of patients."""
        return int(self.patients.max()) + 1 if self.patients.size else 0

    @property
    def differences(self) -> Array:
        """Joined minus reference, each averaged over its trainings."""
        return np.asarray(self.joined.mean(axis=1) - self.reference.mean(axis=1))

    @property
    def independent(self) -> tuple[Array, ...]:
        """The scores whose trainings vary independently: of both arms, or their differences."""
        if self.same_trainings:
            return (self.joined - self.reference,)
        return self.joined, self.reference

    @property
    def trainings(self) -> tuple[int, int]:
        """The numbers of trainings of both arms."""
        return self.joined.shape[1], self.reference.shape[1]

    def where(self, kept: NDArray[np.bool_]) -> PairedScores:
        """Return some of the cases, (cases,) true where one is kept."""
        if kept.all():
            return self
        return replace(
            self,
            joined=self.joined[kept],
            reference=self.reference[kept],
            patients=np.unique(self.patients[kept], return_inverse=True)[1],
            labels=self.labels[kept],
        )

    def by_patient(self) -> PairedScores:
        """Return the means over the cases of each patient, of each class that they are of."""
        if self.count == len(self.patients):
            return self
        keys, row = np.unique(np.stack([self.patients, self.labels]), axis=1, return_inverse=True)
        row = row.reshape(-1)
        cases = np.bincount(row)[:, None]
        means = []
        for scores in (self.joined, self.reference):
            sums = np.zeros((keys.shape[1], scores.shape[1]))
            np.add.at(sums, row, scores)
            means.append(sums / cases)
        return replace(self, joined=means[0], reference=means[1], patients=keys[0], labels=keys[1])


def pair_scores(
    joined: ArrayLike,
    reference: ArrayLike,
    patients: ArrayLike | None = None,
    *,
    labels: ArrayLike | None = None,
    same_trainings: bool = False,
) -> PairedScores:
    """Pair the scores of two arms; cases that are undefined in any training are left out.

    Args:
        joined: (cases, trainings, ...) scores of the arm that joined; (cases,) of one training.
        reference: The same of the arm it is compared with.
        patients: The patient of each case; None: each case is a patient of its own.
        labels: The true class of each case, from 0, if it matters.
        same_trainings: Whether training s of both arms is one training.

    Raises:
        ValueError: The arms differ in their cases, one has no training, or they cannot share their
            trainings because one has more.
    """
    arms = []
    for scores in (joined, reference):
        values = np.asarray(scores, dtype=np.float64)
        arms.append(values[:, None] if values.ndim == 1 else values)
    cases = len(arms[0])
    named = np.arange(cases) if patients is None else np.asarray(patients)
    classes = np.zeros(cases, np.intp) if labels is None else np.asarray(labels, dtype=np.intp)
    if not cases == len(arms[1]) == len(named) == len(classes):
        raise ValueError("both arms need the same cases, each with its patient and its class")
    if any(values.ndim < 2 or not values.shape[1] for values in arms):
        raise ValueError("both arms need scores of at least one training, (cases, trainings)")
    if same_trainings and arms[0].shape[1] != arms[1].shape[1]:
        raise ValueError("arms of the same trainings need equally many of them")
    defined = np.ones(cases, bool)
    for values in arms:
        defined &= np.isfinite(values).all(axis=tuple(range(1, values.ndim)))
    numbers = np.unique(named, return_inverse=True)[1]
    pair = PairedScores(arms[0], arms[1], numbers, classes, 0, same_trainings)
    return replace(pair.where(defined), undefined=int(cases - defined.sum()))
