"""The method that each site would choose, by the scores on its own validation cases."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from collegium.evaluation.scores import METHOD, MethodKey, headline_metric, higher_is_better
from collegium.evaluation.selection import selected_scores, used_models

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Choice:
    """The method that a site would choose on validation.

    Attributes:
        method: The best of the methods that can be joined.
        alone_better: Whether training alone was better than that.
    """

    method: MethodKey
    alone_better: bool


def choose_on_validation(
    results: pd.DataFrame, local: str = "local", pooled: Collection[str] = ()
) -> dict[str, Choice]:
    """Choose for each site the method that did best on the site's own validation cases.

    A method has the validation score of the round that was selected for it. The test scores have no
    part in the choice, so that they are fair to the chosen method.

    Args:
        results: The table of results, of one setting of a sweep.
        local: Label of the algorithm that trains each site alone.
        pooled: Labels of those that pool the data, which nobody can join.

    Returns:
        The choice of each site with validation scores. Of equals it is the first in the table.
    """
    metric = headline_metric(results)
    scores = used_models(selected_scores(results)).dropna(subset="value")
    scores = scores[~scores["algorithm"].isin(list(pooled))]
    sign = 1 if all(higher_is_better(metric, unit) for unit in scores["unit"].unique()) else -1
    found: dict[str, Choice] = {}
    for site, own in scores.groupby("site", sort=False):
        means = {
            (str(algorithm), str(model)): sign * fmean(values)
            for (algorithm, model), values in own.groupby(METHOD, sort=False)["value"]
        }
        joined = {key: mean for key, mean in means.items() if key[0] != local}
        alone = [mean for key, mean in means.items() if key[0] == local]
        if joined:
            chosen = max(joined, key=joined.__getitem__)
            found[str(site)] = Choice(chosen, bool(alone) and max(alone) > joined[chosen])
    return found
