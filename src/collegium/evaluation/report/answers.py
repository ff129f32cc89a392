"""The first questions of the report: does joining help this hospital, and does adapting?"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from collegium.evaluation.paired import Comparison, ComparisonTable, JoiningTable
from collegium.evaluation.report.plots import title
from collegium.evaluation.report.reading import Run
from collegium.evaluation.significance import Outcome, higher_is_better
from collegium.evaluation.tables import interval_text, number

MOST_ANSWERS = 6
"""Adapted methods of a site that the overview shows one by one; where there are more it counts."""

OUTCOMES: tuple[Outcome, ...] = ("helps", "hurts", "cannot tell")


@dataclass(frozen=True)
class Answer:
    """The answer to one site.

    Attributes:
        site: Name of the site.
        chosen: The comparison of the method that the site chose; None without validation scores.
        sentence: The answer in one sentence.
        counts: How many of the methods that can be joined help, hurt, or neither.
        methods: The comparisons of all methods.
    """

    site: str
    chosen: Comparison | None
    sentence: str
    counts: dict[Outcome, int]
    methods: Sequence[Comparison]

    @property
    def outcome(self) -> str:
        """The answer in a word; empty where none was chosen."""
        return self.chosen.outcome if self.chosen else ""


def answer_sites(run: Run, joining: JoiningTable) -> dict[str, Answer]:
    """Answer each site: does joining help?

    Args:
        run: What was run.
        joining: The comparisons with training alone.

    Returns:
        Site -> answer, by name.
    """
    chosen = select_on_validation(run)
    by_site: dict[str, list[Comparison]] = defaultdict(list)
    for comparison in joining.comparisons:
        by_site[comparison.site].append(comparison)
    answers = {}
    for site, methods in sorted(by_site.items()):
        own = next((c for c in methods if (c.algorithm, c.model) == chosen.get(site)), None)
        counts = _count(c for c in methods if c.algorithm not in run.pooled)
        answers[site] = Answer(site, own, _sentence(site, own, joining), counts, methods)
    return answers


@dataclass(frozen=True)
class AdaptingAnswer:
    """The effect of adapting for one site outside.

    Nothing but test scores could choose one method for such a site, so each has its own answer.

    Attributes:
        site: Name of the site.
        methods: The comparisons of all adapted methods, each with a sentence.
        counts: How many of them help, hurt, or neither.
    """

    site: str
    methods: Sequence[tuple[Comparison, str]]
    counts: dict[Outcome, int]

    @property
    def outcome(self) -> str:
        """The answer that all methods agree on; empty where they do not."""
        return next((word for word in OUTCOMES if self.counts[word] == len(self.methods)), "")


def answer_outside(adapting: ComparisonTable) -> list[AdaptingAnswer]:
    """Answer each site outside: does adapting help?

    Args:
        adapting: The comparisons with the unadapted models.

    Returns:
        The answers by site.
    """
    by_site: dict[str, list[Comparison]] = defaultdict(list)
    for comparison in adapting.comparisons:
        by_site[comparison.site].append(comparison)
    return [
        AdaptingAnswer(site, [(c, f"With {_numbers(c, adapting)}.") for c in found], _count(found))
        for site, found in sorted(by_site.items())
    ]


def _count(comparisons: Iterable[Comparison]) -> dict[Outcome, int]:
    words = [comparison.outcome for comparison in comparisons]
    return {word: words.count(word) for word in OUTCOMES}


def _numbers(comparison: Comparison, table: ComparisonTable) -> str:
    """E.g. "FedBN personal, Dice 0.812 alone, 0.851 joined, difference +0.039 [...]"."""
    unit, (without, with_) = table.unit, table.sides
    metric = title(table.metric) + (f" in {unit}" if unit else "")
    numbers = (
        f"{number(comparison.local, unit)} {without}, {number(comparison.joined, unit)} {with_}"
    )
    mean = number(comparison.difference.mean, unit, signed=True)
    known = comparison.difference.low is not None
    between = f" {interval_text(comparison.difference, unit)}" if known else ""
    return f"{comparison.name}, {metric} {numbers}, difference {mean}{between}"


def _sentence(site: str, chosen: Comparison | None, joining: JoiningTable) -> str:
    if chosen is None:
        return f"No method was chosen for {site}, for it has no scores on validation."
    start = {
        "helps": f"Joining helps {site}",
        "hurts": f"Joining hurts {site}",
        "cannot tell": f"Nobody can tell from this run whether joining helps {site}",
    }[chosen.outcome]
    return f"{start}: with {_numbers(chosen, joining)}."


def select_on_validation(run: Run) -> dict[str, tuple[str, str]]:
    """Choose for each site the method that did best on the site's own validation cases.

    The test scores have no say, so that what they then tell of the chosen method is fair.

    Args:
        run: What was run.

    Returns:
        Site -> (algorithm, model), without training alone and without pooling the data, which
        nobody can join.
    """
    curves: dict[tuple[str, str, str], dict[tuple[int, int], list[float]]]
    curves = defaultdict(lambda: defaultdict(list))
    units = set()
    for row in run.rows:
        wanted = row.split == "val" and row.metric == run.metric
        joined = row.algorithm not in (run.local, *run.pooled)
        if wanted and joined and row.value is not None:
            curves[row.site, row.algorithm, row.model][row.seed, row.fold].append(row.value)
            units.add(row.unit)
    higher = all(higher_is_better(run.metric, unit) for unit in units)
    best: dict[str, tuple[float, tuple[str, str]]] = {}
    for (site, *method), trainings in curves.items():
        value = fmean((max if higher else min)(values) for values in trainings.values())
        value = value if higher else -value
        if site not in best or value > best[site][0]:
            best[site] = value, (method[0], method[1])
    return {site: method for site, (_, method) in best.items()}
