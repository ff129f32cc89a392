"""The first questions of the report: does joining help this hospital, and does adapting?

The answers are the verdicts of `collegium.evaluation.comparisons`, which are made there and nowhere
else; here they are gathered by site and counted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import get_args

from collegium.evaluation.comparisons import Comparison, ComparisonTable
from collegium.evaluation.entries import distinct
from collegium.evaluation.verdicts import Outcome

MOST_ANSWERS = 6
"""Adapted methods of a site that the overview shows one by one; if there are more it counts."""

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

_COUNTED = {"equivalent": "without a relevant difference", "identical": "the same model"}


@dataclass(frozen=True)
class JoiningAnswer:
    """The answer to one site: does joining help?

    Attributes:
        site: Name of the site.
        chosen: The comparison of the method that the site chose; None without validation scores.
        methods: The comparisons of all methods.
        counts: How many models of those that can be joined have which outcome, in words.
        models: How many models these are.
    """

    site: str
    chosen: Comparison | None
    methods: Sequence[Comparison]
    counts: str
    models: int

    @property
    def outcome(self) -> str:
        """The outcome for the chosen method; empty if none was chosen."""
        return self.chosen.verdict.outcome if self.chosen else ""


@dataclass(frozen=True)
class AdaptingAnswer:
    """The answers to one site outside, one for each adapted method: does adapting help?

    Nothing but test scores could choose one method for such a site, so each has its own answer.

    Attributes:
        site: Name of the site.
        methods: The comparisons of all adapted methods.
        counts: How many of them have which outcome, in words.
    """

    site: str
    methods: Sequence[Comparison]
    counts: str

    @property
    def outcome(self) -> str:
        """The outcome that all methods have; empty if they differ."""
        words = {found.verdict.outcome for found in self.methods}
        return words.pop() if len(words) == 1 else ""

    def with_outcome(self, outcome: Outcome) -> list[Comparison]:
        """Return the comparisons of one outcome."""
        return [found for found in self.methods if found.verdict.outcome == outcome]


def answer_sites(
    joining: ComparisonTable, pooled: Collection[str] = ()
) -> dict[str, JoiningAnswer]:
    """Answer each site: does joining help?

    Args:
        joining: The comparisons with training alone.
        pooled: Labels of the algorithms that nobody can join.

    Returns:
        Site -> answer, by name.
    """
    return {
        site: JoiningAnswer(
            site,
            next((found for found in methods if found.chosen), None),
            methods,
            count_outcomes(found for found in methods if found.algorithm not in pooled),
            len(distinct(found for found in methods if found.algorithm not in pooled)),
        )
        for site, methods in _by_site(joining)
    }


def answer_outside(adapting: ComparisonTable) -> list[AdaptingAnswer]:
    """Answer each site outside: does adapting help?

    Args:
        adapting: The comparisons with the unadapted models.

    Returns:
        The answers by site.
    """
    return [
        AdaptingAnswer(site, found, count_outcomes(found)) for site, found in _by_site(adapting)
    ]


def _by_site(table: ComparisonTable) -> list[tuple[str, list[Comparison]]]:
    """Return the comparisons of each site, by site."""
    return [(site, list(rows)) for site, rows in groupby(table.by_site, lambda c: c.verdict.site)]


def count_outcomes(comparisons: Iterable[Comparison]) -> str:
    """Return e.g. "1 better, 0 worse, 2 cannot tell"; better, worse and cannot tell always.

    A model with several names, equal bit by bit, counts once.

    Args:
        comparisons: Those that are counted.
    """
    words = [found.verdict.outcome for found in distinct(comparisons)]
    counts = [
        f"{words.count(word)} {_COUNTED.get(word, word)}"
        for word in OUTCOMES
        if word in words or word not in _COUNTED
    ]
    return ", ".join(counts)
