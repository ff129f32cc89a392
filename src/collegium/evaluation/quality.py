"""Whether a model is of use at all, still improved when training ended, or predicts one thing only.

Each is one function of the table of results; verdicts hold what they find.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from collegium.evaluation.scores import (
    METHOD,
    MethodKey,
    headline_metric,
    higher_is_better,
    of_metric,
)
from collegium.tasks import PROBABILITY

if TYPE_CHECKING:
    import pandas as pd

LEAST_RISE = 0.01
"""The rise that counts, of metrics without a smallest relevant difference."""

FEWEST_POINTS = 4
"""The evaluated rounds in the last third, below which nothing is said of its slope."""

Arms = Literal["", "joined", "reference", "both"]
"""Of which of the two compared models something holds."""


@dataclass(frozen=True)
class ModelQuality:
    """The quality of a method at a site, beside its scores.

    Attributes:
        rising: See `still_rising`; of the mean over trainings.
        collapsed: See `is_constant`; whether it holds for a training.
    """

    rising: bool = False
    collapsed: bool = False


def arms_of(*, joined: bool, reference: bool) -> Arms:
    """Return of which models something holds.

    Args:
        joined: Whether it holds for the method.
        reference: Whether it holds for the reference.
    """
    if joined and reference:
        return "both"
    return "joined" if joined else "reference" if reference else ""


def is_unusable(mean: float | None, limit: float | None, *, higher_is_better: bool = True) -> bool:
    """Return whether a mean score is on the wrong side of the limit of use.

    Args:
        mean: The mean; None is undefined.
        limit: The limit; None if the metric has none.
        higher_is_better: False for distances and losses, whose limit is the highest of use.
    """
    if mean is None or limit is None:
        return False
    return mean < limit if higher_is_better else mean > limit


def still_rising(rounds: Sequence[int], scores: Sequence[float], least: float = LEAST_RISE) -> bool:
    """Return whether a validation curve still rose in its last third.

    A line is fitted to the last third of the evaluated rounds by least squares. The curve rises if
    as many rounds more, at this slope, would gain at least the smallest relevant difference, and if
    the slope is more than two standard errors: less would not matter, or is noise. Rounds follow
    each other, so that the standard error is too small if anything; the first condition keeps flat
    curves from being called rising all the same.

    Args:
        rounds: The evaluated rounds, ascending.
        scores: The scores, the higher the better.
        least: The smallest gain that counts.
    """
    count = len(rounds) // 3
    if count < FEWEST_POINTS:
        return False
    x, y = np.asarray(rounds[-count:], float), np.asarray(scores[-count:], float)
    x -= x.mean()
    squares = float(x @ x)
    slope = float(x @ y) / squares
    residual = y - y.mean() - slope * x
    error = sqrt(float(residual @ residual) / (count - 2) / squares)
    gain = slope * float(x[-1] - x[0]) * count / (count - 1)
    return gain >= least and slope > 2 * error


def is_constant(scores: Mapping[str, Sequence[float]]) -> bool:
    """Return whether a training predicts the same of every test case.

    Of a classification: all cases have the same most probable class. Of a segmentation: no case's
    mask meets its structure, and no distance between the two is defined, as of empty masks.

    Args:
        scores: The scores of the cases by metric, hidden ones included; NaN is undefined.
    """
    numbers = [name.removeprefix(PROBABILITY) for name in scores if name.startswith(PROBABILITY)]
    classes = [f"{PROBABILITY}{c}" for c in sorted(int(n) for n in numbers if n.isdigit())]
    if classes:
        chances = np.array([scores[name] for name in classes])
        return chances.shape[1] > 1 and len(set(chances.argmax(axis=0).tolist())) == 1
    dice = np.array(scores.get("dice", ()), float)
    dice = dice[~np.isnan(dice)]
    distances = np.concatenate([[np.nan], *(scores[n] for n in ("hd95", "hd95_px") if n in scores)])
    return bool(dice.size > 1 and (dice == 0).all() and np.isnan(distances).all())


def qualities(
    results: pd.DataFrame, scores: pd.DataFrame, relevant: Mapping[str, float]
) -> dict[tuple[MethodKey, str], ModelQuality]:
    """Return the quality of every method at every site.

    Args:
        results: The table of results, of one setting of a sweep.
        scores: The scores of single test cases, hidden ones included.
        relevant: The smallest relevant differences, by metric.
    """
    metric = headline_metric(results)
    rising = _rising(results, metric, of_metric(metric, relevant) or LEAST_RISE)
    collapsed = _collapsed(scores)
    return {key: ModelQuality(key in rising, key in collapsed) for key in {*rising, *collapsed}}


def _rising(results: pd.DataFrame, metric: str, least: float) -> set[tuple[MethodKey, str]]:
    """Return the methods whose curve rose to the end, with the site."""
    rows = results[(results["split"] == "val") & (results["metric"] == metric)]
    rows = rows.dropna(subset="value")
    sign = 1 if all(higher_is_better(metric, unit) for unit in rows["unit"].unique()) else -1
    found = set()
    means = rows.groupby([*METHOD, "site", "round"])["value"].mean()
    curves: Any = means.groupby(level=[*METHOD, "site"])
    for (algorithm, model, site), curve in curves:
        rounds = curve.index.get_level_values("round").tolist()
        if still_rising(rounds, (sign * curve).tolist(), least):
            found.add(((str(algorithm), str(model)), str(site)))
    return found


def _collapsed(scores: pd.DataFrame) -> set[tuple[MethodKey, str]]:
    """Return the methods one of whose trainings predicts one thing only, with the site."""
    names = scores["metric"]
    wanted = scores[names.isin(["dice", "hd95", "hd95_px"]) | names.str.startswith(PROBABILITY)]
    metric, value = wanted["metric"].to_numpy(object), wanted["value"].to_numpy(np.float64)
    case = wanted["case"].to_numpy(object)
    found = set()
    trainings: Any = wanted.groupby([*METHOD, "site", "seed", "fold", "part"]).indices
    for (algorithm, model, site, *_), rows in trainings.items():
        if (value[rows][metric[rows] == "dice"] > 0).any():
            continue  # a segmentation that meets a structure, as almost all do, needs no table
        if is_constant(_by_metric(metric[rows], case[rows], value[rows])):
            found.add(((str(algorithm), str(model)), str(site)))
    return found


def _by_metric(metric: Any, case: Any, value: Any) -> dict[str, list[float]]:
    """Return the values of the cases by metric, of all in the same order; NaN where one lacks."""
    place = {name: number for number, name in enumerate(dict.fromkeys(case.tolist()))}
    table = {str(name): [float("nan")] * len(place) for name in sorted(set(metric.tolist()))}
    for name, one, number in zip(metric.tolist(), case.tolist(), value.tolist(), strict=True):
        table[name][place[one]] = number
    return table
