"""The scores of methods at sites as arrays, and the estimate of how far two of them differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from collegium.evaluation.estimates import (
    Estimate,
    estimate_auc,
    estimate_balanced_accuracy,
    estimate_mean,
    estimate_over_strata,
    estimate_share,
)
from collegium.evaluation.pairs import Array, Numbers
from collegium.evaluation.scores import METHOD, SPLITS, MethodKey
from collegium.tasks import ALL_CASES, PROBABILITY, TRUE_CLASS, family

SHARES = frozenset({"accuracy", "sensitivity", "specificity"})
"""Metrics of a case that are 0 or 1; the last two are of cases of one class, or of all others."""

SOURCES = {"balanced_accuracy": "accuracy", "auc": PROBABILITY}
"""The scores of cases that metrics of a set of cases are made of, beside the true classes."""

Seeds = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class SiteScores:
    """The scores of one method at one site.

    Attributes:
        cases: (cases,) numbers of the cases, ascending.
        patients: (cases,) the number of each case's patient.
        labels: (cases,) the true class of each case; 0 if the metric does not need it.
        trainings: Seed and fold of each training.
        values: (cases, trainings, models, classes); NaN if undefined, or if the case was not
            scored. There are several models only where an adapter averages the scores of several,
            and several classes only of probabilities.
        mean: The mean of the metric over cases and trainings; NaN if none is defined.
        withheld: Whether the scores of single cases stay at the site, so that only means are here.
        known: Whether all is there that the metric's statistics need.
    """

    cases: Numbers
    patients: Numbers
    labels: Numbers
    trainings: tuple[tuple[int, int], ...]
    values: Array
    mean: float
    withheld: bool
    known: bool

    @property
    def folds(self) -> set[int]:
        """The folds with scores."""
        return {fold for _, fold in self.trainings}

    def seeds(self, folds: Sequence[int]) -> Seeds:
        """Return the seeds with scores of all of some folds."""
        seeds = sorted({seed for seed, _ in self.trainings})
        return tuple(s for s in seeds if all((s, fold) in self.trainings for fold in folds))

    def of(self, rows: Numbers, seeds: Seeds, folds: Sequence[int]) -> Array:
        """Return the values of some cases by seed.

        Args:
            rows: (n,) the places of the cases among all.
            seeds: The seeds wanted.
            folds: The folds wanted.

        Returns:
            (n, seeds, models of all folds, classes).
        """
        columns = [[self.trainings.index((s, fold)) for fold in folds] for s in seeds]
        values = self.values[rows][:, np.array(columns, np.intp)]
        models, classes = values.shape[3:]
        return values.reshape(len(rows), len(seeds), len(folds) * models, classes)


def scores_by_site(scores: pd.DataFrame, metric: str) -> dict[tuple[MethodKey, str], SiteScores]:
    """Return the scores of one metric as arrays, by method and site.

    Cases and patients have the same numbers in all of them.

    Args:
        scores: The scores of single test cases, hidden ones included.
        metric: What was measured.
    """
    source = SOURCES.get(metric, metric)
    names: list[str] = scores["metric"].unique().tolist()
    places = {name: (0, 0) for name in names if name == source}
    if source == PROBABILITY:
        places = {name: found for name in names if (found := _class_and_model(name))}
    needed = [*places, metric, *([TRUE_CLASS] if metric in SOURCES else [])]
    frame = scores[scores["metric"].isin(needed)]
    columns = _Columns(
        pd.factorize(frame["case"], sort=True)[0],
        pd.factorize(frame["patient"], sort=True)[0],
        np.column_stack([frame["seed"], _folds(frame)]).astype(np.int64),
        frame["metric"].to_numpy(object),
        frame["value"].to_numpy(np.float64),
        (frame["case"] == ALL_CASES).to_numpy(),
    )
    groups: Any = frame.groupby([*METHOD, "site"]).indices
    return {
        ((str(algorithm), str(model)), str(site)): _site_scores(columns, rows, metric, places)
        for (algorithm, model, site), rows in groups.items()
        if (columns.metric[rows] == metric).any()
    }


def _folds(frame: pd.DataFrame) -> Numbers:
    """Return a number for each fold that tests the same cases as others do.

    The folds of a cross-validation test different cases at a site that trains, and are one training
    together; at a site outside all of them test all cases.
    """
    outside = (frame["split"] == SPLITS["outside"]).to_numpy()
    own = frame["fold"].to_numpy(np.intp)
    parts = frame["part"].to_numpy(np.intp)
    folds: Numbers = own * (1 + parts.max(initial=0)) + np.where(outside, parts, 0)
    return folds


def _class_and_model(name: str) -> tuple[int, int] | None:
    """Return class and model of a probability, ``_p<class>`` or ``_p<class>_<model>``."""
    numbers = name.removeprefix(PROBABILITY).split("_")
    if not name.startswith(PROBABILITY) or not all(number.isdigit() for number in numbers):
        return None
    return int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 0


@dataclass(frozen=True, eq=False)
class _Columns:
    """The columns of a table of scores, with cases and patients as numbers."""

    case: Numbers
    patient: Numbers
    training: Numbers
    metric: Any
    value: Array
    withheld: Any


def _site_scores(
    columns: _Columns, rows: Numbers, metric: str, places: Mapping[str, tuple[int, int]]
) -> SiteScores:
    """Return the scores of a method at a site.

    Args:
        columns: The scores of all.
        rows: Those of the method at the site.
        metric: What was measured.
        places: Class and model of each score that is part of the values, by its name.
    """
    names = columns.metric[rows]
    cases, case = np.unique(columns.case[rows], return_inverse=True)
    named, training = np.unique(columns.training[rows], axis=0, return_inverse=True)
    case, training = case.reshape(-1), training.reshape(-1)
    patients, labels = np.zeros(cases.size, np.intp), np.full(cases.size, -1, np.intp)
    patients[case] = columns.patient[rows]
    present = {name: places[name] for name in dict.fromkeys(names.tolist()) if name in places}
    models = 1 + max((model for _, model in present.values()), default=0)
    classes = 1 + max((number for number, _ in present.values()), default=0)
    values = np.full((cases.size, len(named), models, classes), np.nan)
    for name, (number, model) in present.items():
        own = names == name
        values[case[own], training[own], model, number] = columns.value[rows][own]
    true = names == TRUE_CLASS
    labels[case[true]] = columns.value[rows][true].astype(np.intp)
    if metric in SOURCES:
        values[labels < 0] = np.nan
    scored = columns.value[rows][names == metric]
    defined = scored[~np.isnan(scored)]
    return SiteScores(
        cases,
        patients,
        np.maximum(labels, 0),
        tuple((int(seed), int(fold)) for seed, fold in named),
        values,
        float(defined.mean()) if defined.size else float("nan"),
        bool(columns.withheld[rows].any()),
        bool(present) and (metric not in SOURCES or bool(true.any())),
    )


@dataclass(frozen=True, eq=False)
class PairedSite:
    """A method and the reference at one site.

    A training is a seed with all folds that both arms have. The folds of a site test the same
    patients, so they are averaged; as strata their patients would count as different ones. Of
    a cross-validation, whose folds test different patients, all are one training.

    Attributes:
        joined: The scores of the method.
        reference: The scores of the reference.
        shared: Whether a seed is one training of both, as of a model that is adapted.
        classes: The names of the classes; empty if unknown.
    """

    joined: SiteScores
    reference: SiteScores
    shared: bool
    classes: Sequence[str] = ()

    @property
    def withheld(self) -> bool:
        """Whether one of the arms has means only."""
        return self.joined.withheld or self.reference.withheld

    @property
    def known(self) -> bool:
        """Whether both have all that an estimate needs."""
        return not self.withheld and self.joined.known and self.reference.known

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
        joined, reference = (
            arm.of(own, some, folds)
            for arm, own, some in zip((self.joined, self.reference), rows, chosen, strict=True)
        )
        patients, labels = self.joined.patients[rows[0]], self.joined.labels[rows[0]]
        if metric == "auc":
            return estimate_auc(
                joined, reference, labels, patients, classes=self._named(joined.shape[-1]),
                same_trainings=self.shared,
            )  # fmt: skip
        joined, reference = joined.mean(axis=(2, 3)), reference.mean(axis=(2, 3))
        if metric == "balanced_accuracy":
            return estimate_balanced_accuracy(
                joined, reference, labels, patients,
                classes=self._named(max(2, 1 + int(labels.max(initial=0)))),
                same_trainings=self.shared,
            )  # fmt: skip
        if family(metric) not in SHARES:
            return estimate_mean(joined, reference, patients, same_trainings=self.shared)
        return estimate_share(
            joined, reference, patients, fewest_of=self._members(metric),
            same_trainings=self.shared,
        )  # fmt: skip

    def _members(self, metric: str) -> str:
        """Return whose cases a share is of, such as "with class ill"; empty if it is of all."""
        kind, _, name = metric.partition("_")
        if kind == "accuracy":
            return ""
        if name:
            return f"{'with' if kind == 'sensitivity' else 'without'} class {name}"
        number = 1 if kind == "sensitivity" else 0
        return f"with class {self.classes[number] if len(self.classes) > number else number}"

    def _named(self, count: int) -> Sequence[str] | int:
        """Return the names of the classes if they are known, else their number."""
        known = len(self.classes) >= count
        return [f"class {name}" for name in self.classes] if known else count


def estimate_over_sites(
    pairs: Mapping[str, PairedSite], estimates: Mapping[str, Estimate], metric: str
) -> Estimate | None:
    """Estimate the mean difference over sites, of the trainings that all of them have.

    None if a site that keeps the scores of its patients has trainings that others lack: what it
    sent is about all of its own.

    Args:
        pairs: The method and the reference at each site, by its name.
        estimates: The estimates of the sites.
        metric: What was measured.
    """
    own = {site: pair.seeds for site, pair in pairs.items()}
    joined, reference = (
        tuple(sorted(set.intersection(*(set(seeds[arm]) for seeds in own.values()))))
        for arm in (0, 1)
    )
    common = joined, reference
    if any(not pair.known and own[site] != common for site, pair in pairs.items()):
        return None
    return estimate_over_strata(
        {
            f"at {site}": estimates[site] if own[site] == common else pair.estimate(metric, common)
            for site, pair in pairs.items()
        }
    )


def alone_at(arms: Iterable[tuple[MethodKey, str]], local: str) -> dict[str, MethodKey]:
    """Return the model of each site that trained alone: its personal one if there is one.

    Args:
        arms: Methods and the sites where they were scored.
        local: Label of the algorithm that trains each site alone.
    """
    alone: dict[str, MethodKey] = {}
    known = list(arms)
    for model in ("global", "personal"):
        alone |= {site: key for key, site in known if key == (local, model)}
    return alone


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
