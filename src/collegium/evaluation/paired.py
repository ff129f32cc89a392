"""A method against a reference, patient by patient: at each site, and over all sites."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from collegium.evaluation.cells import AVERAGE
from collegium.evaluation.results import Row
from collegium.evaluation.scores import MethodKey, mean_over_seeds, position
from collegium.evaluation.significance import (
    Interval,
    Outcome,
    corrected,
    interval_over_sites,
    outcome,
    patient_differences,
    signed_rank,
    verdict,
)

ANSWERS: dict[Outcome, str] = {"helps": "yes", "hurts": "no", "cannot tell": "cannot tell"}
"""The verdict as the answer to "does it help?"."""


@dataclass(frozen=True)
class Comparison:
    """A method minus a reference, by patient, at one site or over all.

    Attributes:
        site: Name of the site; "average" over all.
        algorithm: Label of the algorithm.
        model: Which of its models was scored; outside, the label of the adapter.
        local: Mean of the reference: in a `JoiningTable`, of training alone.
        joined: Mean of the method.
        difference: Method minus reference, with the bootstrap interval over patients.
        outcome: What interval and signed-rank test say together.
        verdict: The same in plain sentences, which say what does not agree where it cannot tell.
        p: The signed-rank test's p-value; None where it is undefined.
        p_holm: The same, corrected for all methods compared with the reference at the site.
        family: How many methods that are.
        name: The method as a reader calls it.
    """

    site: str
    algorithm: str
    model: str
    local: float | None
    joined: float | None
    difference: Interval
    outcome: Outcome
    verdict: str
    p: float | None = None
    p_holm: float | None = None
    family: int = 0
    name: str = ""

    @property
    def answer(self) -> str:
        """Whether it helps: "yes", "no" or "cannot tell"."""
        return ANSWERS[self.outcome]


@dataclass(frozen=True)
class ComparisonTable:
    """Methods against a reference, for one metric.

    Attributes:
        metric: What was measured.
        unit: Its unit.
        higher_is_better: False for distances and losses.
        comparisons: By site, then method.
        missing: What could not be compared, and why; empty where all could.
        pooled: Over all sites: the mean of the site means. The signed-rank test ranks all patients
            together, so there a site with many patients weighs more. A method that lacks a score at
            a site where others have one is left out, as in the average of a table.
        question: What the table answers.
        sides: What the reference and the method are called in the head of the table.
        variation: The setting of a sweep that the scores are of; empty outside a sweep.
    """

    metric: str
    unit: str
    higher_is_better: bool
    comparisons: tuple[Comparison, ...]
    missing: str = ""
    pooled: tuple[Comparison, ...] = ()
    question: str = "Is it better than the reference?"
    sides: tuple[str, str] = ("reference", "method")
    variation: str = ""


@dataclass(frozen=True)
class JoiningTable(ComparisonTable):
    """Does joining help each site? Empty, with `missing` saying why, where nobody trained alone."""

    question: str = "Does joining help this site?"
    sides: tuple[str, str] = ("alone", "joined")


@dataclass(frozen=True)
class Comparing:
    """The settings of comparisons.

    Attributes:
        higher_is_better: False for distances and losses.
        name: Gives the name of a method by algorithm and model.
        resamples: Resamples of the bootstrap.
        seed: Names the generator of the bootstrap.
        rarest: By site, how many patients the rarest class has, where the scores depend on it.
    """

    higher_is_better: bool
    name: Callable[[str, str], str]
    resamples: int = 2000
    seed: int = 0
    rarest: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Pair:
    """A method and the reference at one site: their means, and the differences by patient."""

    local: float | None
    joined: float | None
    differences: Mapping[str, float]
    undefined: int
    rarest: int | None


Groups = Mapping[MethodKey, Mapping[str, Sequence[Row]]]
"""Method -> site -> scores."""


def group_scores(scores: Iterable[Row]) -> dict[MethodKey, dict[str, list[Row]]]:
    """Return the scores of one metric by method and site, sorted by site."""
    groups: dict[MethodKey, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in scores:
        groups[row.algorithm, row.model][row.site].append(row)
    return {method: dict(sorted(by_site.items())) for method, by_site in groups.items()}


def compare(
    groups: Groups, reference: Mapping[str, Sequence[Row]], order: Sequence[str], how: Comparing
) -> tuple[list[Comparison], list[Comparison]]:
    """Compare methods with one reference, paired by case, seed and fold.

    All methods compared with the reference at a site are one family of the correction.

    Args:
        groups: The scores of the methods to compare; the reference is none of them.
        reference: The scores of the reference by site.
        order: Labels of the algorithms in the order wanted.
        how: How to compare.

    Returns:
        The comparisons by site, then method; and those over all sites, where there are several.
    """
    pairs: dict[str, dict[MethodKey, _Pair]] = defaultdict(dict)
    for site, alone in sorted(reference.items()):
        known = {(row.case, row.seed, row.fold): row.value for row in alone}
        local = mean_over_seeds(alone)
        for method in sorted(groups, key=lambda key: position(key, order)):
            if site in groups[method]:
                rows = groups[method][site]
                pairs[site][method] = _pair(rows, known, local, how.rarest.get(site))
    comparisons = [
        comparison
        for site, methods in pairs.items()
        for comparison in _family(site, {key: [pair] for key, pair in methods.items()}, how)
    ]
    return comparisons, _family(AVERAGE, _over_sites(pairs), how)


def _pair(
    rows: Sequence[Row],
    known: Mapping[tuple[str, int, int], float | None],
    local: float | None,
    rarest: int | None,
) -> _Pair:
    """Pair the scores that both have of a case, seed and fold."""
    paired = [(row, known[key]) for row in rows if (key := (row.case, row.seed, row.fold)) in known]
    differences, undefined = patient_differences(
        (row.value for row, _ in paired),
        (value for _, value in paired),
        (row.patient for row, _ in paired),
    )
    return _Pair(local, mean_over_seeds(rows), differences, undefined, rarest)


def _over_sites(pairs: Mapping[str, Mapping[MethodKey, _Pair]]) -> dict[MethodKey, list[_Pair]]:
    """The pairs of the methods that have some at every site where any method has."""
    found: dict[MethodKey, list[_Pair]] = defaultdict(list)
    sites = [
        defined
        for methods in pairs.values()
        if (defined := {key: pair for key, pair in methods.items() if pair.differences})
    ]
    for defined in sites:
        for key, pair in defined.items():
            found[key].append(pair)
    return {key: found[key] for key in found if 1 < len(found[key]) == len(sites)}


def _family(
    site: str, family: Mapping[MethodKey, Sequence[_Pair]], how: Comparing
) -> list[Comparison]:
    """The comparisons of one family, each over one pair or over the pairs of all sites."""
    intervals = [
        interval_over_sites(
            [pair.differences for pair in pairs],
            undefined=sum(pair.undefined for pair in pairs),
            rarest=min((pair.rarest for pair in pairs if pair.rarest is not None), default=None),
            resamples=how.resamples,
            seed=how.seed,
        )
        for pairs in family.values()
    ]
    ranked = [
        () if interval.few else [d for pair in pairs for d in pair.differences.values()]
        for pairs, interval in zip(family.values(), intervals, strict=True)
    ]
    tests = corrected([signed_rank(differences) for differences in ranked])
    return [
        Comparison(
            site,
            *key,
            _mean([pair.local for pair in pairs]),
            _mean([pair.joined for pair in pairs]),
            difference,
            outcome(difference, test, higher_is_better=how.higher_is_better),
            verdict(difference, test, higher_is_better=how.higher_is_better),
            test.p,
            test.p_holm,
            test.family,
            how.name(*key),
        )
        for (key, pairs), difference, test in zip(family.items(), intervals, tests, strict=True)
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return fmean(defined) if defined and len(defined) == len(values) else None
