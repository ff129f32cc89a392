"""The rounds that were selected, and what has to be said of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from collegium.core.payloads import OTHER_GLOBAL
from collegium.evaluation.results import ROUNDS, SELECTION
from collegium.evaluation.scores import (
    METHOD,
    MethodKey,
    final_scores,
    headline_metric,
    method_name,
    position,
    rows_of,
)
from collegium.evaluation.wording import DASH
from collegium.tasks import EVENTS

if TYPE_CHECKING:
    import pandas as pd

TRAINING = [*METHOD, "seed", "fold", "part", "site"]
"""The columns that identify a model at a site."""

_BY = {
    "site": "its site's own validation cases",
    "federation": "the validation cases of all sites",
}
_ROUND = {
    "best": "the one that was best on {cases}",
    "smoothed": "the one whose mean with the two evaluated rounds before it was best on {cases}",
    "last": "the last one",
}


def used_models(scores: pd.DataFrame) -> pd.DataFrame:
    """Return the scores without those of global models of the round that was chosen otherwise.

    See `collegium.core.payloads.OTHER_GLOBAL`.
    """
    return scores[~scores["model"].isin([*OTHER_GLOBAL.values()])]


def selected_rounds(results: pd.DataFrame) -> pd.DataFrame:
    """Return the round of every tested model: the columns `TRAINING`, and round.

    Args:
        results: The table of results, of one setting of a sweep.
    """
    return final_scores(results)[[*TRAINING, "round"]].drop_duplicates()


def selected_scores(results: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the validation scores of the models that were tested.

    Args:
        results: The table of results, of one setting of a sweep.
    """
    scores = results[(results["split"] == "val") & (results["metric"] == headline_metric(results))]
    return scores.merge(selected_rounds(results), on=[*TRAINING, "round"])


def selection_notes(results: pd.DataFrame, rule: Mapping[str, Any]) -> tuple[str, ...]:
    """Return in sentences how the rounds were selected, and where events were too few for it.

    With early stopping, also after how many rounds the methods ended.

    Args:
        results: The table of results, of one setting of a sweep.
        rule: The rule, as configured; empty if unknown.

    Returns:
        The sentences; none without a rule or scores.
    """
    if not rule or final_scores(results).empty:
        return ()
    by, kind = str(rule["by"]), str(rule["round"])
    notes = [f"The round of each model is {_ROUND[kind].format(cases=_BY[by])}."]
    if kind != "last":
        notes += _few_events(results, rule)
    notes += _ends(results)
    other = OTHER_GLOBAL[by]
    if other in set(results["model"]):
        who = "the federation's" if by == "site" else "each site's own"
        notes.append(
            f'"{other}" is the global model of {who} choice, and takes no part in answers.'
        )
    return tuple(notes)


@dataclass(frozen=True)
class RoundsTable:
    """The rounds that were selected.

    Attributes:
        sites: The sites.
        rows: The name of each method, and for each site its rounds, such as "12, 7", by training.
        ends: With early stopping, after how many rounds each method ended, by training.
    """

    sites: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]
    ends: Sequence[str] = ()


def rounds_table(results: pd.DataFrame, order: Sequence[str]) -> RoundsTable:
    """Return the rounds that were selected, by method and site.

    Args:
        results: The table of results, of one setting of a sweep.
        order: Labels of the algorithms in the order wanted; the others follow by name.
    """
    found = selected_rounds(results).sort_values(["seed", "fold", "part"])
    by_method: dict[MethodKey, dict[str, list[str]]] = {}
    for row in rows_of(found):
        by_site = by_method.setdefault((row.algorithm, row.model), {})
        by_site.setdefault(row.site, []).append(str(row.round))
    sites = sorted(found["site"].unique())
    keys = sorted(by_method, key=lambda key: position(key, order))
    rows = [[", ".join(by_method[key].get(site, [DASH])) for site in sites] for key in keys]
    ended = {
        label: ", ".join(map(str, counts)) for label, counts in rounds_trained(results).items()
    }
    ends = [ended.get(label, DASH) for label, _ in keys] if ended else []
    named = [(method_name(*key), row) for key, row in zip(keys, rows, strict=True)]
    return RoundsTable(sites, named, ends)


def rounds_trained(results: pd.DataFrame) -> dict[str, list[int]]:
    """Return after how many rounds the trainings of each algorithm ended, by its label.

    Args:
        results: The table of results, of one setting of a sweep.

    Returns:
        A number for each training, in the order of seeds and folds; nothing without early stopping.
    """
    counts = results[(results["split"] == SELECTION) & (results["metric"] == ROUNDS)]
    each = counts.groupby(["algorithm", "seed", "fold", "part"], sort=True)["value"].max()
    return {
        str(label): [int(count) for count in found]
        for label, found in each.groupby(level="algorithm", sort=False)
    }


def _ends(results: pd.DataFrame) -> list[str]:
    """Return a sentence on after how many rounds trainings ended; none without early stopping."""
    trained = rounds_trained(results)
    counts = {count for found in trained.values() for count in found}
    if len(counts) < 2:
        return [f"Early stopping: every training ended after round {count}." for count in counts]
    spans = {label: dict.fromkeys((min(found), max(found))) for label, found in trained.items()}
    each = [f"{label} {' to '.join(map(str, span))}" for label, span in spans.items()]
    return [
        f"Early stopping: trainings ended after different numbers of rounds, so that budgets are "
        f"not equal: {', '.join(each)}."
    ]


def _few_events(results: pd.DataFrame, rule: Mapping[str, Any]) -> list[str]:
    """Return a sentence for everybody whose events were too few, with the smallest number."""
    least = int(rule["min_events"])
    counts = used_models(results[results["split"] == SELECTION])
    counts = counts[(counts["metric"] == EVENTS) & (counts["value"] < least)]
    if rule["by"] == "federation":
        counts = counts.assign(site="all sites together")
    smallest = counts.groupby("site")["value"].min()
    return [_few(str(who), int(count), least) for who, count in smallest.items()]


def _few(who: str, count: int, least: int) -> str:
    patients = "patient" if count == 1 else "patients"
    return (
        f"At {who} it is the last round instead, since the choice would depend on {count} "
        f"{patients} of the validation cases (of the rarer class, if there are classes); at least "
        f"{least} are needed."
    )
