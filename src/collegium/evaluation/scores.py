"""Slices and means of the table of results, and the names and order of methods."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import isnan
from statistics import fmean
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from collegium.tasks import HIDDEN, family

if TYPE_CHECKING:
    import pandas as pd

Where = Literal["inside", "outside"]
"""Scores at the sites that trained, or at sites that took no part."""

SPLITS: dict[Where, str] = {"inside": "test", "outside": "outside"}
"""The split of the rows that hold the final scores."""

WHERES: tuple[Where, ...] = tuple(SPLITS)
"""Both places, inside first."""

METHOD = ["algorithm", "model"]
"""The columns that identify a method."""

MethodKey = tuple[str, str]
"""Label of the algorithm, and which of its models (outside: which adapter) was scored."""

ADAPTERS = {
    "none": "", "average": "Average", "ensemble": "Ensemble", "tent": "Tent", "ttt": "TTT",
    "dsbn": "DSBN", "routing": "routing",
}  # fmt: skip
"""The adapters of a model to a site outside as the field spells them, in the order of tables."""

NO_ADAPTER = "none"

RELEVANT: Mapping[str, float] = MappingProxyType({"dice": 0.01})
"""The smallest relevant difference of metrics, unless an experiment says otherwise."""

UNUSABLE: Mapping[str, float] = MappingProxyType(
    {"dice": 0.5, "iou": 1 / 3, "auc": 0.6, "balanced_accuracy": 0.6}
)
"""The mean below which a model is of no use, unless an experiment says otherwise.

Dice 0.5, which is IoU 1/3: of what mask and structure cover together a third is common to both, so
that drawing it again is quicker than correcting. AUC and balanced accuracy 0.6: a coin has 0.5.
Accuracy has none, since what a constant prediction reaches depends on the site.
"""

_LOWER_IS_BETTER = frozenset(
    {
        "loss", "log_loss", "brier", "hd", "hd95", "hausdorff", "assd", "asd", "msd",
        "lesion_false_positives", "ece",
    }
)  # fmt: skip

_UNRANKED = frozenset({"volume_difference", "relative_volume_difference", "threshold"})
_WITHOUT_ESTIMATE = frozenset({"ppv", "npv"})  # they follow from sensitivity and specificity

_SPELLED = {
    name.lower(): name
    for name in (
        "APFL", "CFL", "Ditto", "FedADAGrad", "FedAdam", "FedALA", "FedAMP", "FedAS", "FedAvg",
        "FedAvgM", "FedAWA", "FedBABU", "FedBN", "FedDG", "FedDyn", "FedEvi", "FedFomo", "FedLWS",
        "FedMTL", "FedNova", "FedPer", "FedProx", "FedRep", "FedRoD", "FedYogi", "FineTune", "FPFC",
        "GRACE", "HarmoFL", "IFCA", "LGFedAvg", "Local", "MOON", "PerFedAvg", "pFedLA", "pFedMe",
        "pFedNet", "Pooled", "ResFIM", "SCAFFOLD", "SiloBN", "SuperFed", "TTT",
    )
} | {
    "condist": "ConDistFL",
    "iopfl": "IOP-FL",
    "lcfed": "LC-Fed",
    "distance": "Distance-aware",
}  # fmt: skip
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)")


def method_name(algorithm: str, model: str = "", where: Where = "inside") -> str:
    """Return a method as a reader calls it: "Ditto personal", outside "FedAvg + Tent".

    Args:
        algorithm: Label of the algorithm; one that is no known name stays as it is.
        model: Which of its models was scored; outside, the label of the adapter, of which "none"
            adds nothing to the name.
        where: Whether the scores are of sites inside or outside.
    """
    name = _SPELLED.get(algorithm, algorithm)
    if where == "inside":
        return f"{name} {model}".strip()
    adapter = ADAPTERS.get(model, model)
    return f"{name} + {adapter}" if adapter else name


def position(key: MethodKey, order: Sequence[str]) -> tuple[int, str, int, str]:
    """Return the key to sort methods by: training alone, then the order given, then by name.

    Args:
        key: The method.
        order: Labels of the algorithms in the order wanted.
    """
    algorithm, model = key
    labels, adapters = ["local", *order], list(ADAPTERS)
    label = labels.index(algorithm) if algorithm in labels else len(labels)
    adapter = adapters.index(model) if model in adapters else len(adapters)
    return label, algorithm, adapter, model


def final_scores(
    results: pd.DataFrame,
    metric: str | None = None,
    *,
    where: Where = "inside",
    variation: str | None = None,
    hidden: bool = False,
) -> pd.DataFrame:
    """Return the scores of single test cases.

    Args:
        results: The table of results.
        metric: Of one metric; None of all.
        where: Of sites inside or outside.
        variation: Of one setting of a sweep, "" for those outside a sweep; None of all.
        hidden: Whether to return classes and probabilities of cases too, see `is_hidden`.
    """
    wanted = (results["split"] == SPLITS[where]) & (results["case"] != "")
    wanted &= results["model"] != ""
    if metric is not None:
        wanted &= results["metric"] == metric
    if variation is not None:
        wanted &= results["variation"] == variation
    if metric is None and not hidden:
        wanted &= ~results["metric"].str.startswith(HIDDEN)
    return results[wanted]


def rows_of(frame: pd.DataFrame) -> list[Any]:
    """Return the rows of a frame as named tuples."""
    return list(frame.itertuples(index=False))


def group_means(frame: pd.DataFrame, by: Sequence[str], column: str = "value") -> pd.DataFrame:
    """Return the mean of a column by group; undefined values are left out.

    Sums are exact (`math.fsum`), so that the means do not depend on the order of the rows.

    Args:
        frame: The rows.
        by: The columns that form the groups.
        column: The column to average.

    Returns:
        A row for each group, sorted: the columns of ``by``, and the mean in ``column``, NaN if no
        value of the group is defined.
    """
    groups = frame.groupby(list(by))
    codes = groups.ngroup().to_numpy()
    values = frame[column].to_numpy()[np.argsort(codes, kind="stable")].tolist()
    ends = [0, *np.cumsum(np.bincount(codes)).tolist()]
    means = groups.size().index.to_frame(index=False)
    average = mean if frame[column].isna().any() else fmean
    means[column] = [average(values[start:end]) for start, end in pairwise(ends)]
    return means


def mean(values: Sequence[float]) -> float:
    """Return the mean of the defined values, NaN if there are none."""
    defined = [value for value in values if not isnan(value)]
    return fmean(defined) if defined else float("nan")


def site_means(scores: pd.DataFrame) -> pd.DataFrame:
    """Return the means over patients of the mean over their cases, by method, seed and site.

    Args:
        scores: Scores of one metric; undefined ones are left out of the means.

    Returns:
        Columns algorithm, model, seed, site and value; NaN if a site has no defined score.
    """
    training = [*METHOD, "seed", "site"]
    return group_means(group_means(scores, [*training, "patient"]), training)


def unit_of(scores: pd.DataFrame) -> str:
    """Return the unit of the scores of one metric."""
    return min(scores["unit"].unique(), default="")


def higher_is_better(metric: str, unit: str = "") -> bool:
    """Return False for distances and losses, by unit or name (``hd95``, ``hd95_vessel``).

    Args:
        metric: Name of the metric.
        unit: Its unit.
    """
    name = metric.lower().replace("/", "_")
    return unit not in ("mm", "px") and not {name, family(name)} & _LOWER_IS_BETTER


def is_ranked(metric: str) -> bool:
    """Return False for what has no better and worse: thresholds, differences with their sign.

    Args:
        metric: Name of the metric.
    """
    return family(metric) not in _UNRANKED


def is_compared(metric: str) -> bool:
    """Return whether there are verdicts on a metric: it is ranked, and has an estimate.

    Args:
        metric: Name of the metric.
    """
    return is_ranked(metric) and family(metric) not in _WITHOUT_ESTIMATE


def of_metric(metric: str, settings: Mapping[str, float]) -> float | None:
    """Return the setting of a metric; None if there is none.

    Args:
        metric: Name of the metric; that of one structure, as ``dice_vessel``, has the setting of
            the metric if it has none of its own.
        settings: The settings, by metric, such as the smallest relevant differences.
    """
    return settings.get(metric, settings.get(family(metric)))


def headline_metric(results: pd.DataFrame) -> str:
    """Return the metric that selects models on validation, or else the first that was scored."""
    scored = results[(results["model"] != "") & (results["metric"] != "loss")]
    scored = scored[~scored["metric"].str.startswith(HIDDEN)]
    first = scored.drop_duplicates("split").set_index("split")["metric"]
    return next((str(first[s]) for s in ("val", "test", "outside") if s in first), "loss")


def variations(results: pd.DataFrame) -> tuple[str, ...]:
    """Return the settings of a sweep, numbers in their order: "clients-2", "clients-10".

    Args:
        results: The table of results.

    Returns:
        The names; "" stands for rows outside a sweep.
    """
    return tuple(sorted(results["variation"].unique(), key=_natural))


def _natural(name: str) -> tuple[list[str | float], str]:
    """Return the key to sort names by: the numbers are at the odd places of the split name."""
    parts = _NUMBER.split(name)
    return [float(part) if place % 2 else part for place, part in enumerate(parts)], name
