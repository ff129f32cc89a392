"""What training sends and receives, counted from the table of results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from collegium.evaluation.scores import method_name

if TYPE_CHECKING:
    import pandas as pd

COSTS = ["bytes_up", "bytes_down", "seconds"]
"""The columns of the table of results that count what was sent and how long sites worked."""


def rows_of_rounds(results: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that hold what each round cost each site: those of the training loss."""
    return results[(results["metric"] == "loss") & (results["split"] == "train")]


def count_traffic(
    results: pd.DataFrame, order: Sequence[str], by: Sequence[str] = ()
) -> pd.DataFrame:
    """Count what each algorithm sent: round by round, and in total if rows of cases say more.

    Args:
        results: The table of results.
        order: Labels of the algorithms.
        by: Columns by which it is counted apart, such as the site.

    Returns:
        A row for each algorithm that has trained, mean over seeds and folds: the columns ``by``,
        algorithm and name; up and down, bytes that left the sites and came to them; seconds that
        the sites worked; up_round and down_round, the bytes of a round, mean over rounds.
    """
    training = [*by, "algorithm", "seed", "fold", "part"]
    each = list(dict.fromkeys([*training, "site"]))
    losses = rows_of_rounds(results)
    tested = results[(results["case"] != "") & (results["split"] == "test")]
    sums = losses.groupby(each)[COSTS].sum()
    totals = tested.groupby(each)[COSTS].max()
    known = totals.reindex(sums.index, fill_value=0)
    whole = sums.where(sums > known, known).groupby(training).sum()
    rounds = losses.groupby(training)["round"].nunique()
    by_round = sums[COSTS[:2]].groupby(training).sum().div(rounds, axis=0)
    counted = whole.set_axis(["up", "down", "seconds"], axis=1).join(
        by_round.set_axis(["up_round", "down_round"], axis=1)
    )
    means = counted.groupby([*by, "algorithm"]).mean().reset_index()
    found = means[means["algorithm"].isin(list(order))]
    places = found["algorithm"].map({label: place for place, label in enumerate(order)})
    found = found.iloc[places.argsort(kind="stable")].reset_index(drop=True)
    return found.assign(name=found["algorithm"].map(method_name))
