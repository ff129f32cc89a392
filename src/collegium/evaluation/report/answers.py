"""The first questions of the report: does joining help this hospital, and does adapting?

The answers are sentences about the verdicts of `collegium.evaluation.comparisons`, which are made
there and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isnan
from operator import attrgetter
from statistics import fmean
from typing import Any

from collegium.evaluation.comparisons import ComparisonTable
from collegium.evaluation.report.reading import RunOutput
from collegium.evaluation.scores import METHOD, MethodKey
from collegium.evaluation.significance import Outcome, higher_is_better
from collegium.evaluation.wording import interval_text, number, title

MOST_ANSWERS = 6
"""Adapted methods of a site that the overview shows one by one; if there are more it counts."""

OUTCOMES: tuple[Outcome, ...] = ("helps", "hurts", "cannot tell")


@dataclass(frozen=True)
class JoiningAnswer:
    """The answer to one site: does joining help?

    Attributes:
        chosen: The comparison of the method that the site chose; None without validation scores.
        sentence: The answer in one sentence.
        counts: How many of the methods that can be joined help, hurt, or neither.
        methods: The comparisons of all methods.
    """

    chosen: Any
    sentence: str
    counts: dict[Outcome, int]
    methods: Sequence[Any]

    @property
    def outcome(self) -> str:
        """The answer in a word; empty if no method was chosen."""
        return self.chosen.outcome if self.chosen else ""


@dataclass(frozen=True)
class AdaptingAnswer:
    """The answers to one site outside, one for each adapted method: does adapting help?

    Nothing but test scores could choose one method for such a site, so each has its own answer.

    Attributes:
        site: Name of the site.
        methods: The comparisons of all adapted methods, each with a sentence.
        counts: How many of them help, hurt, or neither.
    """

    site: str
    methods: Sequence[tuple[Any, str]]
    counts: dict[Outcome, int]

    @property
    def outcome(self) -> str:
        """The answer that all methods agree on; empty if they do not."""
        return next((word for word in OUTCOMES if self.counts[word] == len(self.methods)), "")


def answer_sites(run: RunOutput, joining: ComparisonTable) -> dict[str, JoiningAnswer]:
    """Answer each site: does joining help?

    Args:
        run: The content of the run's output folder.
        joining: The comparisons with training alone.

    Returns:
        Site -> answer, by name.
    """
    chosen = select_on_validation(run)
    answers = {}
    for site, methods in _by_site(joining):
        own = next((c for c in methods if (c.algorithm, c.model) == chosen.get(site)), None)
        counts = _count(c for c in methods if c.algorithm not in run.labels.pooled)
        answers[site] = JoiningAnswer(own, _sentence(site, own, joining), counts, methods)
    return answers


def answer_outside(adapting: ComparisonTable) -> list[AdaptingAnswer]:
    """Answer each site outside: does adapting help?

    Args:
        adapting: The comparisons with the unadapted models.

    Returns:
        The answers by site.
    """
    return [
        AdaptingAnswer(site, [(c, f"With {_numbers(c, adapting)}.") for c in found], _count(found))
        for site, found in _by_site(adapting)
    ]


def _by_site(table: ComparisonTable) -> list[tuple[str, list[Any]]]:
    """Return the comparisons of each site, by site."""
    return [(site, list(rows)) for site, rows in groupby(table.by_site, attrgetter("site"))]


def _count(comparisons: Iterable[Any]) -> dict[Outcome, int]:
    words = [comparison.outcome for comparison in comparisons]
    return {word: words.count(word) for word in OUTCOMES}


def _numbers(comparison: Any, table: ComparisonTable) -> str:
    """Return e.g. "FedBN personal, Dice 0.812 alone, 0.851 joined, difference +0.039 [...]"."""
    unit, (without, with_) = table.unit, table.sides
    metric = title(table.metric) + (f" in {unit}" if unit else "")
    means = number(comparison.reference_mean, unit), number(comparison.method_mean, unit)
    difference = number(comparison.difference, unit, signed=True)
    if not isnan(comparison.low):
        difference += f" {interval_text(comparison.low, comparison.high, unit)}"
    return (
        f"{comparison.method}, {metric} {means[0]} {without}, {means[1]} {with_}, "
        f"difference {difference}"
    )


def _sentence(site: str, chosen: Any, joining: ComparisonTable) -> str:
    if chosen is None:
        return f"No method was chosen for {site}, for it has no scores on validation."
    start = {
        "helps": f"Joining helps {site}",
        "hurts": f"Joining hurts {site}",
        "cannot tell": f"Nobody can tell from this run whether joining helps {site}",
    }[chosen.outcome]
    return f"{start}: with {_numbers(chosen, joining)}."


def select_on_validation(run: RunOutput) -> dict[str, MethodKey]:
    """Choose for each site the method that did best on the site's own validation cases.

    The test scores have no part in the choice, so that they are fair to the chosen method.

    Args:
        run: The content of the run's output folder.

    Returns:
        Site -> (algorithm, model), without training alone and without pooling the data, which
        nobody can join. Of equals it is the first in the table of results.
    """
    results = run.results
    wanted = (results["split"] == "val") & (results["metric"] == run.metric)
    joined = ~results["algorithm"].isin([run.labels.local, *run.labels.pooled])
    scores = results[wanted & joined].dropna(subset="value")
    higher = all(higher_is_better(run.metric, unit) for unit in scores["unit"].unique())
    trainings = scores.groupby(["site", *METHOD, "seed", "fold"], sort=False)["value"]
    best = trainings.max() if higher else -trainings.min()
    means = best.groupby(["site", *METHOD], sort=False).agg(fmean)
    chosen = means.groupby("site", sort=False).idxmax()
    return {site: (algorithm, model) for site, algorithm, model in chosen}
