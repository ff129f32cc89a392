"""How far two arms differ at a site, and how sure that is: one estimate for every metric.

An arm is a method, trained once or several times; the question is whether the method that was
joined differs from the reference on patients like those tested. Every metric comes down to the
same numbers: the difference, the variance that the choice of patients gives it, and for each arm
the scores of its trainings with the part of their variance that patients explain already.
`collegium.evaluation.intervals` makes two error bars of them.

Scores have a row for each case and a column for each training; a vector is one training. Both arms
have the same cases in the same order, but need not have as many trainings. What is not finite is
undefined: a case that is undefined in any training of either arm is left out and counted. The
patient is the unit: cases of one patient are averaged first or, for the area under the ROC curve,
summed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum
from statistics import fmean
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from collegium.core.settings import CONFIG
from collegium.evaluation.pairs import Array, Numbers, PairedScores, pair_scores
from collegium.tasks.metrics.classification import weight_below


@dataclass(frozen=True)
class Arm:
    """The trainings of one arm at one site.

    Attributes:
        scores: What each training scored over all patients.
        residual: The variance among ``scores`` that the patients' bar holds already (r2): in the
            layout of patients by trainings, the residual mean square by the number of patients.
    """

    __pydantic_config__: ClassVar = CONFIG

    scores: tuple[float, ...]
    residual: float = 0.0

    @property
    def trainings(self) -> int:
        """The number of trainings (R)."""
        return len(self.scores)

    @property
    def variance(self) -> float:
        """The sample variance of the trainings' scores (s2); 0 for a single one."""
        if self.trainings < 2:
            return 0.0
        mean = fmean(self.scores)
        return fsum((score - mean) ** 2 for score in self.scores) / (self.trainings - 1)


@dataclass(frozen=True)
class Estimate:
    """A difference, joined minus reference, with what its error bars are made of.

    It holds nothing of single patients, so that a site can send it instead of their scores.

    Attributes:
        difference: D; None if it is undefined.
        centre: The middle of the interval: the difference, or for metrics of 0 and 1 near it.
        variance: V_P, the patients' variance; None with too few patients for one.
        df: Its degrees of freedom; None if there is no variance.
        joined: The mean of the arm that joined; None if it is undefined.
        reference: The mean of the reference.
        arms: The arms whose trainings vary independently, the one that joined first; if training s
            of both is one training, the differences as a single arm.
        trainings: How many trainings the arm that joined and the reference have.
        patients: How many patients have a score with both.
        undefined: How many cases were left out because a score of theirs is undefined.
        fewest: The number of patients that an interval depends on: all or, where classes or sites
            are weighed equally, those of the smallest.
        fewest_of: Who these are, such as "with class 1"; empty if they are all.
        few_decide: Whether mean and median of the patients' differences have opposite signs.
    """

    __pydantic_config__: ClassVar = CONFIG

    difference: float | None
    centre: float | None
    variance: float | None
    df: float | None
    joined: float | None
    reference: float | None
    arms: tuple[Arm, ...]
    trainings: tuple[int, int]
    patients: int
    undefined: int
    fewest: int
    fewest_of: str = ""
    few_decide: bool = False


def estimate_mean(
    joined: ArrayLike,
    reference: ArrayLike,
    patients: ArrayLike | None = None,
    *,
    same_trainings: bool = False,
) -> Estimate:
    """Estimate the difference of a mean over patients: of Dice, HD95, log loss or Brier score.

    Args:
        joined: (cases, trainings) scores of the arm that joined.
        reference: (cases, trainings) scores of the reference, of the same cases.
        patients: The patient of each case; None: each case is a patient of its own.
        same_trainings: Whether training s of both arms is one training, as of a model before and
            after it is adapted; what both have in common cancels then.

    Returns:
        V_P is var(d) / n with n - 1 degrees of freedom, d the differences by patient.

    Raises:
        ValueError: See `pair_scores`.
    """
    pair = pair_scores(joined, reference, patients, same_trainings=same_trainings)
    found = _mean(pair)
    if found.difference is None:
        return found
    median = float(np.median(pair.by_patient().differences))
    return replace(found, few_decide=found.difference * median < 0)


def estimate_share(
    joined: ArrayLike,
    reference: ArrayLike,
    patients: ArrayLike | None = None,
    *,
    fewest_of: str = "",
    same_trainings: bool = False,
) -> Estimate:
    """Estimate the difference of a share: of accuracy, sensitivity or specificity.

    Half an imaginary patient is added, a quarter who gains and a quarter who loses, so that a few
    changes or none do not look certain (after Agresti and Min, 2005).

    Args:
        joined: (cases, trainings), 1 where the arm that joined is right, otherwise 0; of
            sensitivity and specificity, the cases of their class.
        reference: (cases, trainings) of the reference, of the same cases.
        patients: See `estimate_mean`.
        fewest_of: Of whom there may be too few, such as "with class 1"; empty: of all.
        same_trainings: See `estimate_mean`.

    Returns:
        The centre is a little nearer to zero than the difference.

    Raises:
        ValueError: See `pair_scores`.
    """
    pair = pair_scores(joined, reference, patients, same_trainings=same_trainings)
    return replace(_share(pair), fewest_of=fewest_of)


def estimate_balanced_accuracy(
    joined: ArrayLike,
    reference: ArrayLike,
    labels: ArrayLike,
    patients: ArrayLike | None = None,
    *,
    classes: Sequence[str] | int = 2,
    same_trainings: bool = False,
) -> Estimate:
    """Estimate the difference of balanced accuracy: the classes are strata of equal weight.

    Of patients with cases of several classes the covariance of these is added, as for the area
    under the ROC curve; without it 8 to 10 % of equal models differ where all patients are such.

    Args:
        joined: (cases, trainings), 1 where the arm that joined is right, otherwise 0.
        reference: (cases, trainings) of the reference, of the same cases.
        labels: (cases,) the true class of each case, from 0.
        patients: See `estimate_mean`.
        classes: Names of the classes, or their number. Of two both count, of more those present.
        same_trainings: See `estimate_mean`.

    Returns:
        The mean over the classes of what `estimate_share` returns for each, and that covariance.

    Raises:
        ValueError: See `pair_scores`.
    """
    pair = pair_scores(joined, reference, patients, labels=labels, same_trainings=same_trainings)
    counted, rows = _counted(pair.labels, classes), pair.by_patient()
    strata = {name: _share(rows.where(rows.labels == c)) for c, name in counted.items()}
    sizes = {name: stratum.patients for name, stratum in strata.items()}
    weight = 1 / (np.bincount(rows.labels) * len(strata))[rows.labels, None]
    parts = replace(rows, joined=rows.joined * weight, reference=rows.reference * weight)
    found = _over_classes(parts, 1.0, sizes)
    if found.variance is None:
        return found
    variances = [(stratum.variance or 0.0) / len(strata) ** 2 for stratum in strata.values()]
    _, covariance, _ = _variances(parts.differences[:, None], parts)
    return replace(
        found,
        centre=_mean_of([stratum.centre for stratum in strata.values()]),
        variance=max(0.0, sum(variances) + float(covariance[0])),
        df=satterthwaite(variances, [stratum.df or 0.0 for stratum in strata.values()]),
    )


def estimate_auc(
    joined: ArrayLike,
    reference: ArrayLike,
    labels: ArrayLike,
    patients: ArrayLike | None = None,
    *,
    classes: Sequence[str] | int = 2,
    same_trainings: bool = False,
) -> Estimate:
    """Estimate the difference of the area under the ROC curve, by DeLong's placements (1988).

    Ties count one half. With several cases of a patient the variance is that of sums by patient
    (Obuchowski, 1997), which with one case each is DeLong's; its degrees of freedom are
    Satterthwaite's over the classes. With more than two classes the area is the mean of one against
    the rest over the classes present, and a case counts with its placements in all of them.

    Args:
        joined: (cases, trainings) of the arm that joined, the higher the more likely is class 1;
            with more than two classes (cases, trainings, classes), the probability of each. Or
            (cases, trainings, models, classes), where a training gave several models, such as those
            of its folds: its area is the mean of theirs.
        reference: The same of the reference, of the same cases.
        labels: (cases,) the true class of each case, from 0.
        patients: See `estimate_mean`.
        classes: Names of the classes, or their number. Of two both count, of more those present.
        same_trainings: See `estimate_mean`.

    Returns:
        The estimate; without a difference if only one class is present.

    Raises:
        ValueError: See `pair_scores`; or scores of more than two classes have another shape.
    """
    pair = pair_scores(joined, reference, patients, labels=labels, same_trainings=same_trainings)
    names, counted = _names(classes), _counted(pair.labels, classes)
    if len(names) > 2 and any(s.shape[-1] != len(names) for s in (pair.joined, pair.reference)):
        raise ValueError(f"scores of {len(names)} classes are (cases, trainings, {len(names)})")
    sizes = {name: pair.where(pair.labels == c).count for c, name in counted.items()}
    if all(sizes.values()):
        joined, reference = (
            _placements(scores, pair.labels, [*counted]) for scores in (pair.joined, pair.reference)
        )
        pair = replace(pair, joined=joined, reference=reference)
    return _over_classes(pair, 0.5, sizes)


def estimate_over_strata(strata: Mapping[str, Estimate]) -> Estimate:
    """Return the mean of the estimates of strata, such as sites, each with the same weight.

    A training is one training in all strata: what varies is its mean over them. The patients of
    different strata are different, and their degrees of freedom are Satterthwaite's.

    Args:
        strata: The estimates, by what to say of too few patients there, such as "at north". Each
            has the same trainings in the same order.

    Returns:
        The estimate; without a difference if a stratum has none.

    Raises:
        ValueError: The strata have different numbers of trainings.
    """
    parts = list(strata.values())
    if len({(part.trainings, len(part.arms)) for part in parts}) > 1:
        raise ValueError("strata need the same trainings: take those that all of them have")
    named, smallest = min(strata.items(), key=lambda item: item[1].fewest)
    variances = [part.variance / len(parts) ** 2 for part in parts if part.variance is not None]
    known = len(variances) == len(parts)
    return Estimate(
        difference=_mean_of([part.difference for part in parts]),
        centre=_mean_of([part.centre for part in parts]),
        variance=sum(variances) if known else None,
        df=satterthwaite(variances, [part.df or 0.0 for part in parts]) if known else None,
        joined=_mean_of([part.joined for part in parts]),
        reference=_mean_of([part.reference for part in parts]),
        arms=tuple(_mean_arm(arms) for arms in zip(*(part.arms for part in parts), strict=True)),
        trainings=parts[0].trainings,
        patients=sum(part.patients for part in parts),
        undefined=sum(part.undefined for part in parts),
        fewest=smallest.fewest,
        fewest_of=" ".join(filter(None, (smallest.fewest_of, named))),
    )


def satterthwaite(variances: Sequence[float], df: Sequence[float]) -> float:
    """Return the degrees of freedom of a sum of variances (Satterthwaite, 1946).

    Args:
        variances: The variances that are added.
        df: The degrees of freedom of each.

    Returns:
        The sum of ``df`` if all variances are zero.
    """
    total = sum(variances)
    if not total > 0:
        return sum(df)
    return 1 / sum((v / total) ** 2 / d for v, d in zip(variances, df, strict=True))


def _mean(pair: PairedScores) -> Estimate:
    """Return the estimate of the mean over patients of the mean over their cases."""
    patients = pair.by_patient()

    def variance(values: Array) -> tuple[Array, float]:
        return values.var(axis=0, ddof=1) / pair.count, float(pair.count - 1)

    return _estimate(patients, lambda values: values.mean(axis=0), variance, fewest=pair.count)


def _share(pair: PairedScores) -> Estimate:
    """Return the estimate of a mean of zeros and ones, with half an imaginary patient.

    The trainings share that patient; if the arms have different numbers of them, the smaller
    counts, which moves the centre more.
    """
    found = _mean(pair)
    if found.variance is None:
        return found
    weight = 1 / (2 * min(pair.trainings))
    size = pair.count + weight
    difference = pair.by_patient().differences
    centre = float(difference.sum()) / size
    squares = float((difference**2).sum()) + weight - size * centre**2
    variance = squares / ((size - 1) * size)
    return replace(found, centre=centre, variance=variance, df=size - 1)


def _estimate(
    pair: PairedScores,
    score: Callable[[Array], Array],
    variance: Callable[[Array], tuple[Array, float]],
    *,
    fewest: int,
    fewest_of: str = "",
) -> Estimate:
    """Return the estimate of a metric.

    Args:
        pair: The arms, as values that ``score`` and ``variance`` take.
        score: Returns the metric of each column of (rows, trainings).
        variance: Returns the patients' variance of each column's score, and the degrees of freedom
            of the first.
        fewest: See `Estimate`; below 2 there is no variance.
        fewest_of: See `Estimate`.
    """
    joined = reference = difference = spread = df = None
    arms = tuple(Arm((0.0,) * values.shape[1]) for values in pair.independent)
    if fewest > 0:
        joined, reference = (float(score(s).mean()) for s in (pair.joined, pair.reference))
        difference = joined - reference
        arms = tuple(Arm(tuple(score(values).tolist())) for values in pair.independent)
    if fewest > 1:
        variances, df = variance(pair.differences[:, None])
        spread = float(variances[0])
        residuals = (_residual(values, variance) for values in pair.independent)
        arms = tuple(replace(arm, residual=r) for arm, r in zip(arms, residuals, strict=True))
    return Estimate(
        difference, difference, spread, df, joined, reference, arms, pair.trainings, pair.count,
        pair.undefined, fewest, fewest_of,
    )  # fmt: skip


def _residual(values: Array, variance: Callable[[Array], tuple[Array, float]]) -> float:
    """Return r2: the patients' variance of how trainings deviate from their mean."""
    if values.shape[1] < 2:
        return 0.0
    deviations = values - values.mean(axis=1, keepdims=True)
    variances: list[float] = variance(deviations)[0].tolist()
    return sum(variances) / (len(variances) - 1)


def _mean_arm(arms: Sequence[Arm]) -> Arm:
    """Return the mean over strata of an arm, whose residuals in them are independent."""
    scores = np.mean([arm.scores for arm in arms], axis=0)
    return Arm(tuple(scores.tolist()), sum(arm.residual for arm in arms) / len(arms) ** 2)


def _mean_of(values: Sequence[float | None]) -> float | None:
    """Return the mean, None if one of the values is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def _names(classes: Sequence[str] | int) -> list[str]:
    return [f"class {c}" for c in range(classes)] if isinstance(classes, int) else [*classes]


def _counted(labels: Numbers, classes: Sequence[str] | int) -> dict[int, str]:
    """Return the classes that count, and what to say of too few patients with one.

    Of two classes both count. Of more those present do, but all if that is a single one.
    """
    names, present = _names(classes), set(labels.tolist())
    every = len(names) == 2 or len(present) < 2
    return {c: f"with {name}" for c, name in enumerate(names) if every or c in present}


def _placements(scores: Array, labels: Numbers, classes: Sequence[int]) -> Array:
    """Return each case's part in the area, (cases, trainings); the area is half their sum.

    Of two classes, that of a case is its placement among the cases of the other class by the number
    of cases of its own; of more, the mean of this over one class against the rest.
    """
    by_class = scores[..., None] if scores.ndim == 2 else scores
    if by_class.ndim == 3:
        by_class = by_class[:, :, None]
    last = by_class.shape[-1]
    # of two classes the second is ranked, which is the last column, or the only one
    columns = {c: c for c in classes} if last > 2 else {1: last - 1}
    parts = np.zeros(by_class.shape[:3])
    for c, column in columns.items():
        own = labels == c
        for place in np.ndindex(by_class.shape[1:3]):
            values = by_class[:, *place, column]
            for rows, sign in ((own, 1), (~own, -1)):
                mine, others = sign * values[rows], sign * values[~rows]
                below = weight_below(mine, others, np.ones(others.size))
                parts[rows, *place] += below / (mine.size * len(columns))
    return np.asarray(parts.mean(axis=2))


def _over_classes(parts: PairedScores, scale: float, sizes: Mapping[str, int]) -> Estimate:
    """Return the estimate of a metric that is a sum over cases drawn within their class.

    Args:
        parts: What each case adds.
        scale: What the sum is multiplied by; what the cases add varies with a scale of 1.
        sizes: The number of patients of each class that counts, by what to say of too few.
    """

    def variance(values: Array) -> tuple[Array, float]:
        by_class, covariance, drawn = _variances(values, parts)
        df = satterthwaite(by_class[:, 0].tolist(), [count - 1 for count in drawn])
        return np.maximum(by_class.sum(axis=0) + covariance, 0.0), df

    rarest = min(sizes, key=sizes.__getitem__)
    return _estimate(
        parts,
        lambda values: scale * values.sum(axis=0),
        variance,
        fewest=sizes[rarest],
        fewest_of=rarest,
    )


def _variances(values: Array, rows: PairedScores) -> tuple[Array, Array, list[int]]:
    """Return what classes and patients with several of them add to the variance of a sum.

    Args:
        values: (rows, trainings) the terms.
        rows: Whose they are, and of which class.

    Returns:
        The variance of each class, (classes, trainings); twice the covariance of the classes,
        (trainings,); and the number of patients of each class.
    """
    present, place = np.unique(rows.labels, return_inverse=True)
    own = place == np.arange(present.size)[:, None]  # (classes, rows)
    means = own @ values / own.sum(axis=1, keepdims=True)
    sums = np.zeros((present.size, rows.count, values.shape[1]))
    np.add.at(sums, (place, rows.patients), values - means[place])
    drawn = np.array([np.unique(rows.patients[some]).size for some in own])
    squares = (sums**2).sum(axis=1)
    shared = (sums.sum(axis=0) ** 2).sum(axis=0) - squares.sum(axis=0)
    covariance = shared * rows.count / (rows.count - 1)
    return (drawn / (drawn - 1))[:, None] * squares, covariance, drawn.tolist()
