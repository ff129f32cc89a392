"""Methods against a reference, paired by patient: does joining help, and does adapting?

Every verdict of a run is made here, by `_verdicts`, from the whole table of results. The tables,
the text on a terminal and the report all show the frames of `joining_table` and `adapting_table`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import pandas as pd

from collegium.evaluation.scores import (
    METHOD,
    NO_ADAPTER,
    MethodKey,
    Where,
    final_scores,
    group_means,
    method_name,
    position,
    rarest_class,
    rows_of,
    site_means,
    unit_of,
)
from collegium.evaluation.significance import (
    Outcome,
    corrected,
    higher_is_better,
    interval_over_sites,
    signed_rank,
    verdict,
)
from collegium.evaluation.tables import AVERAGE
from collegium.tasks import ALL_CASES

ANSWERS: dict[Outcome, str] = {"helps": "yes", "hurts": "no", "cannot tell": "cannot tell"}
"""The outcome as the answer to "does it help?"."""

WITHHELD = (
    "Cannot tell here: the scores of single patients stay at the site, whose own report says how "
    "sure the difference is."
)
"""The verdict where a site sends counts and means only."""

COMPARISON = {
    "site": "str", "method": "str", "algorithm": "str", "model": "str",
    "reference_mean": "float64", "method_mean": "float64", "difference": "float64",
    "low": "float64", "high": "float64", "patients": "int64", "undefined": "int64",
    "rarest": "float64", "p": "float64", "p_holm": "float64", "family": "int64", "outcome": "str",
    "answer": "str", "verdict": "str", "pooled": "bool",
}  # fmt: skip
"""The columns of a comparison, with their pandas types.

site: name of the site; "average" over all.
method, algorithm, model: the method as a reader calls it, the label of the algorithm, and which of
    its models was scored (outside, the label of the adapter).
reference_mean, method_mean: mean of the reference and of the method.
difference, low, high: method minus reference, with the bootstrap interval over patients; see
    `collegium.evaluation.significance.Interval`, as for patients, undefined and rarest.
p, p_holm: p-value of the signed-rank test, and the same corrected for all methods compared with the
    reference at the site; NaN if undefined.
family: how many methods that are.
outcome: what interval and test say together; answer: the same as the answer to "does it help?".
verdict: the same in plain sentences.
pooled: whether the comparison is over all sites.
"""


@dataclass(frozen=True, eq=False)
class ComparisonTable:
    """Methods against a reference, for one metric.

    Attributes:
        metric: What was measured.
        unit: Its unit.
        higher_is_better: False for distances and losses.
        comparisons: A row for each comparison, with the columns of `COMPARISON`: by site, then
            method; then those over all sites, the mean of the site means. There the signed-rank
            test ranks all patients together, so a site with many patients weighs more, and a method
            that lacks a score at a site where others have one is left out, as in the average of a
            table.
        question: What the table answers.
        sides: What the reference and the method are called in the head of the table.
        missing: What could not be compared, and why; empty if all could.
        variation: The setting of a sweep that the scores are of; empty outside a sweep.
    """

    metric: str
    unit: str
    higher_is_better: bool
    comparisons: pd.DataFrame
    question: str
    sides: tuple[str, str]
    missing: str = ""
    variation: str = ""

    @property
    def by_site(self) -> list[Any]:
        """The comparisons at single sites, as rows."""
        return rows_of(self.comparisons[~self.comparisons["pooled"]])

    @property
    def over_sites(self) -> list[Any]:
        """The comparisons over all sites, as rows."""
        return rows_of(self.comparisons[self.comparisons["pooled"]])


@dataclass(frozen=True)
class _PairedScores:
    """A method and the reference at one site: their means, and the differences by patient."""

    reference_mean: float
    method_mean: float
    differences: Mapping[str, float]
    undefined: int
    rarest: int | None

    @property
    def withheld(self) -> bool:
        """Whether the scores of single patients stay at the site, so that only means are here."""
        return ALL_CASES in self.differences


def joining_table(
    results: pd.DataFrame,
    metric: str,
    order: Sequence[str] = (),
    *,
    local: str = "local",
    variation: str = "",
) -> ComparisonTable:
    """Compare every method with training alone, at every site: does joining help it?

    Scores are paired by case, seed and fold, and averaged by patient. All methods compared at a
    site are one family of the correction, see `corrected`; so are those compared over all sites.

    Args:
        results: The whole table of results of a run; which classes are rare is part of it.
        metric: Which metric.
        order: Labels of the algorithms in the order wanted; the others follow by name.
        local: Label of the algorithm that trains each site alone.
        variation: The setting of a sweep.

    Returns:
        The comparisons; none, with the reason, if nobody trained alone.
    """
    scores = final_scores(results, metric, variation=variation)
    unit = unit_of(scores)
    higher = higher_is_better(metric, unit)
    trained_alone = scores["algorithm"] == local
    alone = scores[trained_alone]
    alone = alone[alone["model"].isin(("global", "personal"))]
    personal = alone["model"] == "personal"
    alone = alone[personal | ~alone["site"].isin(alone.loc[personal, "site"].unique())]
    missing = (
        f"Nobody trained alone in this run: it holds no scores of an algorithm labelled "
        f"{local!r}, so whether joining helps cannot be said. Add it to the algorithms."
    )
    rarest = rarest_class(results, metric, variation=variation)
    found = _compare(scores[~trained_alone], alone, order, rarest, higher=higher)
    return ComparisonTable(
        metric,
        unit,
        higher,
        _comparison_frame(found),
        "Does joining help this site?",
        ("alone", "joined"),
        missing if alone.empty else "",
        variation,
    )


def adapting_table(
    results: pd.DataFrame, metric: str, order: Sequence[str] = (), *, variation: str = ""
) -> ComparisonTable:
    """Compare every adapter with the same algorithm's unadapted model, at every site outside.

    Scores are paired as in `joining_table`. The adapters of one algorithm at one site are one
    family of the correction.

    Args:
        results: The whole table of results of a run. The scores of sites inside say which
            algorithms have a global model, the one that is scored unadapted.
        metric: Which metric.
        order: Labels of the algorithms in the order wanted; the others follow by name.
        variation: The setting of a sweep.

    Returns:
        The comparisons by site, algorithm and adapter. `missing` names the algorithms whose models
        were adapted but never scored without an adapter, and says which of them never can be.
    """
    scores = final_scores(results, metric, where="outside", variation=variation)
    unit = unit_of(scores)
    higher = higher_is_better(metric, unit)
    rarest = rarest_class(results, metric, "outside", variation)
    found: list[dict[str, Any]] = []
    lacking = []
    labels = scores["algorithm"].unique()
    for algorithm in sorted(labels, key=lambda label: position((label, ""), order)):
        own = scores[scores["algorithm"] == algorithm]
        unadapted = own["model"] == NO_ADAPTER
        if unadapted.any():
            adapted = own[~unadapted]
            found += _compare(
                adapted, own[unadapted], order, rarest, higher=higher, where="outside"
            )
        else:
            lacking.append(algorithm)
    inside = final_scores(results, metric, variation=variation)
    return ComparisonTable(
        metric,
        unit,
        higher,
        _comparison_frame(found),
        "Does adapting help this hospital?",
        ("unadapted", "adapted"),
        _missing_unadapted(lacking, inside, any_scores=not scores.empty),
        variation,
    )


def _missing_unadapted(lacking: Iterable[str], inside: pd.DataFrame, *, any_scores: bool) -> str:
    """Return of which algorithms there is nothing unadapted, by whether there could be."""
    if not any_scores:
        return "This run holds no scores of a site outside, so whether adapting helps is not known."
    names: dict[bool, list[str]] = {True: [], False: []}
    for algorithm in lacking:
        models = set(inside.loc[inside["algorithm"] == algorithm, "model"])
        names[not models or "global" in models].append(method_name(algorithm))
    sentences = []
    if names[True]:
        sentences.append(
            f"There are no scores without an adapter of {', '.join(names[True])}, so whether "
            f"adapting helps cannot be said there. Add the adapter {NO_ADAPTER!r}."
        )
    if names[False]:
        sentences.append(
            f"No global model comes from {', '.join(names[False])}, so there is nothing unadapted "
            "to compare with."
        )
    return " ".join(sentences)


def _comparison_frame(found: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return comparisons as a table: those at single sites by site, then those over all sites."""
    rows = sorted(found, key=lambda row: (row["pooled"], row["site"]))
    return pd.DataFrame(rows, columns=list(COMPARISON)).astype(COMPARISON)


def _compare(
    methods: pd.DataFrame,
    reference: pd.DataFrame,
    order: Sequence[str],
    rarest: Mapping[str, int],
    *,
    higher: bool,
    where: Where = "inside",
) -> list[dict[str, Any]]:
    """Compare methods with one reference, at every site that it has, and over all sites.

    Returns the columns of `COMPARISON` for each comparison; ``rarest`` counts by site the patients
    of the rarest class, if the scores depend on it.
    """
    found = []
    pairs = _pair_scores(methods, reference, rarest)
    keys = sorted({key for key, _ in pairs}, key=lambda key: position(key, order))
    sites = sorted({site for _, site in pairs})
    for site in sites:
        own = {key: [pairs[key, site]] for key in keys if (key, site) in pairs}
        found += _verdicts(site, own, higher=higher, where=where)
    defined = {place: pair for place, pair in pairs.items() if pair.differences}
    scored = [site for site in sites if any((key, site) in defined for key in keys)]
    everywhere = {
        key: [pairs[key, site] for site in scored]
        for key in keys
        if len(scored) > 1 and all((key, site) in defined for site in scored)
    }
    return found + _verdicts(AVERAGE, everywhere, higher=higher, where=where, pooled=True)


def _pair_scores(
    methods: pd.DataFrame, reference: pd.DataFrame, rarest: Mapping[str, int]
) -> dict[tuple[MethodKey, str], _PairedScores]:
    """Pair the scores that a method and the reference both have of a case, seed and fold."""
    same, by_site = ["site", "case", "seed", "fold"], [*METHOD, "site"]
    both = methods.merge(reference[[*same, "value"]], on=same, suffixes=("", "_reference"))
    both["difference"] = both["value"] - both["value_reference"]
    undefined = both[both["difference"].isna()].groupby(by_site).size().to_dict()
    patients = group_means(both, [*by_site, "patient"], "difference").dropna()
    differences: dict[Any, dict[str, float]] = defaultdict(dict)
    for *place, patient, difference in rows_of(patients):
        differences[tuple(place)][patient] = difference
    alone = group_means(site_means(reference), ["site"]).set_index("site")["value"].to_dict()
    means = group_means(site_means(methods), by_site)
    return {
        ((algorithm, model), site): _PairedScores(
            alone[site],
            value,
            differences[algorithm, model, site],
            undefined.get((algorithm, model, site), 0),
            rarest.get(site),
        )
        for algorithm, model, site, value in rows_of(means)
        if site in alone
    }


def _verdicts(
    site: str,
    family: Mapping[MethodKey, Sequence[_PairedScores]],
    *,
    higher: bool,
    where: Where,
    pooled: bool = False,
) -> list[dict[str, Any]]:
    """Return the verdict on each method of a family, at one site or over the sites of its pairs.

    This is the only place where verdicts are made. Returns the columns of `COMPARISON` for each.
    """
    intervals = [
        interval_over_sites(
            [pair.differences for pair in pairs],
            undefined=sum(pair.undefined for pair in pairs),
            rarest=min((pair.rarest for pair in pairs if pair.rarest is not None), default=None),
        )
        for pairs in family.values()
    ]
    ranked = [
        () if interval.few else [d for pair in pairs for d in pair.differences.values()]
        for pairs, interval in zip(family.values(), intervals, strict=True)
    ]
    tests = corrected([signed_rank(differences) for differences in ranked])
    found = []
    for (key, pairs), interval, test in zip(family.items(), intervals, tests, strict=True):
        word, sentences = verdict(interval, test, higher_is_better=higher)
        if any(pair.withheld for pair in pairs):
            word, sentences = "cannot tell", WITHHELD
        found.append({
            "site": site, "method": method_name(*key, where), "algorithm": key[0], "model": key[1],
            "reference_mean": fmean(pair.reference_mean for pair in pairs),
            "method_mean": fmean(pair.method_mean for pair in pairs),
            "difference": interval.mean, "low": interval.low, "high": interval.high,
            "patients": interval.patients, "undefined": interval.undefined,
            "rarest": interval.rarest, "p": test.p, "p_holm": test.p_holm, "family": test.family,
            "outcome": word, "answer": ANSWERS[word],
            "verdict": sentences, "pooled": pooled,
        })  # fmt: skip
    return found
