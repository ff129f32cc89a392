"""The scores of methods at sites as arrays, and the estimate of how far two of them differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from collegium.evaluation.estimates import (
    Estimate,
    estimate_mean,
    estimate_over_strata,
    estimate_share,
)
from collegium.evaluation.pairs import Array, Numbers
from collegium.evaluation.scores import METHOD, MethodKey
from collegium.tasks import ALL_CASES

if TYPE_CHECKING:
    import pandas as pd

SHARES = frozenset({"accuracy"})
"""Metrics of a case that are 0 or 1."""

Seeds = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class SiteScores:
    """The scores of one method at one site.

    Attributes:
        cases: (cases,) numbers of the cases, ascending.
        patients: (cases,) the number of each case's patient.
        trainings: Seed and fold of each training.
        values: (cases, trainings); NaN if undefined, or if the case was not scored.
        withheld: Whether the scores of single cases stay at the site, so that only means are here.
    """

    cases: Numbers
    patients: Numbers
    trainings: tuple[tuple[int, int], ...]
    values: Array
    withheld: bool

    @property
    def folds(self) -> set[int]:
        """The folds with scores."""
        return {fold for _, fold in self.trainings}

    def seeds(self, folds: Sequence[int]) -> Seeds:
        """Return the seeds with scores of all of some folds."""
        seeds = sorted({seed for seed, _ in self.trainings})
        return tuple(s for s in seeds if all((s, fold) in self.trainings for fold in folds))

    def mean(self) -> float:
        """Return the mean of all values; NaN if none is defined."""
        defined = self.values[~np.isnan(self.values)]
        return float(defined.mean()) if defined.size else float("nan")

    def of(self, rows: Numbers, seeds: Seeds, folds: Sequence[int]) -> Array:
        """Return the values of some cases by seed, each the mean over folds.

        Args:
            rows: (n,) the places of the cases among all.
            seeds: The seeds wanted.
            folds: The folds wanted.

        Returns:
            (n, seeds).
        """
        columns = [[self.trainings.index((s, fold)) for fold in folds] for s in seeds]
        return np.asarray(self.values[rows][:, np.array(columns, np.intp)].mean(axis=2))


def scores_by_site(scores: pd.DataFrame) -> dict[tuple[MethodKey, str], SiteScores]:
    """Return the scores of one metric as arrays, by method and site.

    Cases and patients have the same numbers in all of them.
    """
    case, patient = (
        np.unique(scores[name].to_numpy(str), return_inverse=True)[1].reshape(-1)
        for name in ("case", "patient")
    )
    training = scores[["seed", "fold"]].to_numpy(np.int64)
    values, withheld = (
        scores["value"].to_numpy(np.float64),
        (scores["case"] == ALL_CASES).to_numpy(),
    )
    found = {}
    groups: Any = scores.groupby([*METHOD, "site"]).indices
    for (algorithm, model, site), rows in groups.items():
        cases, row = np.unique(case[rows], return_inverse=True)
        trainings, column = np.unique(training[rows], axis=0, return_inverse=True)
        table = np.full((cases.size, len(trainings)), np.nan)
        table[row.reshape(-1), column.reshape(-1)] = values[rows]
        patients = np.zeros(cases.size, np.intp)
        patients[row.reshape(-1)] = patient[rows]
        named = tuple((int(seed), int(fold)) for seed, fold in trainings)
        place = (str(algorithm), str(model)), str(site)
        found[place] = SiteScores(cases, patients, named, table, bool(withheld[rows].any()))
    return found


@dataclass(frozen=True, eq=False)
class PairedSite:
    """A method and the reference at one site.

    A training is a seed with all folds that both arms have. The folds of a site test the same
    patients, so they are averaged; as strata their patients would count as different ones.

    Attributes:
        joined: The scores of the method.
        reference: The scores of the reference.
        shared: Whether a seed is one training of both, as of a model that is adapted.
    """

    joined: SiteScores
    reference: SiteScores
    shared: bool

    @property
    def withheld(self) -> bool:
        """Whether one of the arms has means only."""
        return self.joined.withheld or self.reference.withheld

    @property
    def folds(self) -> list[int]:
        """The folds that both have."""
        return sorted(self.joined.folds & self.reference.folds)

    @property
    def seeds(self) -> tuple[Seeds, Seeds]:
        """The seeds of the method and of the reference."""
        own = self.joined.seeds(self.folds), self.reference.seeds(self.folds)
        if not self.shared:
            return own
        both = tuple(seed for seed in own[0] if seed in own[1])
        return both, both

    def estimate(self, metric: str, seeds: tuple[Seeds, Seeds] | None = None) -> Estimate:
        """Estimate the difference.

        Args:
            metric: What was measured.
            seeds: Some of `seeds`; None: all.
        """
        _, *rows = np.intersect1d(
            self.joined.cases, self.reference.cases, assume_unique=True, return_indices=True
        )
        chosen, folds = seeds or self.seeds, self.folds
        if not folds or not all(chosen):
            nobody = np.zeros((0, 1))
            return estimate_mean(nobody, nobody)
        arms = [
            arm.of(own, some, folds)
            for arm, own, some in zip((self.joined, self.reference), rows, chosen, strict=True)
        ]
        estimator = estimate_share if metric in SHARES else estimate_mean
        patients = self.joined.patients[rows[0]]
        return estimator(arms[0], arms[1], patients, same_trainings=self.shared)


def estimate_over_sites(pairs: Mapping[str, PairedSite], metric: str) -> Estimate:
    """Estimate the mean difference over sites, of the trainings that all of them have.

    Args:
        pairs: The method and the reference at each site, by its name.
        metric: What was measured.
    """
    joined, reference = (
        tuple(sorted(set.intersection(*(set(pair.seeds[arm]) for pair in pairs.values()))))
        for arm in (0, 1)
    )
    return estimate_over_strata(
        {f"at {site}": pair.estimate(metric, (joined, reference)) for site, pair in pairs.items()}
    )


def same_models(scores: pd.DataFrame, metric: str) -> dict[MethodKey, tuple[MethodKey, ...]]:
    """Return of each method the others that are the same model, as far as test scores tell.

    Two methods are taken for one model with two names if their scores of all metrics, cases, sites,
    seeds and folds are equal to the last bit. Results hold no models; two that differ and yet score
    every case alike, such as two that predict nothing anywhere, are taken for one too.

    Args:
        scores: The scores of single test cases, of all metrics.
        metric: The metric that is looked at first, so that few methods need all.
    """
    alike = _alike(scores[scores["metric"] == metric])
    doubtful = {key for keys in alike for key in keys if len(keys) > 1}
    if doubtful:
        named = scores.set_index(METHOD).index
        alike = [*_alike(scores[named.isin(list(doubtful))]), *(k for k in alike if len(k) == 1)]
    return {key: tuple(k for k in keys if k != key) for keys in alike for key in keys}


def _alike(scores: pd.DataFrame) -> list[list[MethodKey]]:
    """Return the methods in groups of equal scores."""
    if scores.empty:
        return []
    measured = scores.groupby(["metric", "seed", "fold", "site", "case"]).ngroup().to_numpy()
    values = scores["value"].to_numpy(np.float64, copy=True)
    values[np.isnan(values)] = np.nan  # one bit pattern
    groups: dict[tuple[bytes, bytes], list[MethodKey]] = {}
    methods: Any = scores.groupby(METHOD).indices
    for (algorithm, model), rows in methods.items():
        own = rows[np.argsort(measured[rows], kind="stable")]
        bits = measured[own].tobytes(), values[own].tobytes()
        groups.setdefault(bits, []).append((str(algorithm), str(model)))
    return list(groups.values())
