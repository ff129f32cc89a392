"""What to try, and how sure that is: rules over the findings, each stated where it is applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from statistics import fmean
from typing import Literal, get_args

from collegium.diagnostics.assessment.findings import Comparison, Findings, Geometry, Kind

CLEAR, HINT = 0.01, 0.05
"""Adjusted p-values below which sites differ clearly, and below which there is a hint."""

ENOUGH = 10
"""Cases of the smallest site from which on finding no difference says something."""

STABLE, LIKELY = 0.9, 0.7
"""Shares of resampled federations above which a most distant site is sure, and likely."""

APART = 2.0
"""How many times farther apart than its own sites two clusters have to be to stand out."""

Level = Literal["differ", "perhaps", "alike", "cannot tell"]
Sure = Literal["sure", "likely", "a guess"]


@dataclass(frozen=True)
class Advice:
    """One thing to try.

    Attributes:
        text: a sentence or two.
        sure: how well the data support it.
        why: the numbers behind it.
    """

    text: str
    sure: Sure
    why: str


@dataclass(frozen=True)
class Verdict:
    """Whether the sites differ, and what to do about it.

    Attributes:
        level: "differ", "perhaps", "alike" (no evidence that they differ) or "cannot tell".
        headline: the same as a sentence.
        why: the numbers behind it.
        advice: what to try, the surest first.
    """

    level: Level
    headline: str
    why: str
    advice: list[Advice]


def judge(findings: Findings, sites: Sequence[str]) -> Verdict:
    """Return the verdict.

    Args:
        findings: what was found.
        sites: all sites that were asked.
    """
    if len(sites) == 1:
        return _unknown(f"{sites[0]} is the only site: there is no other to compare it with.", "")
    if not findings.geometries:
        return _unknown(
            "Fewer than two sites told enough to be compared.",
            "Allow the parts below in the sites' policies, or mend what failed.",
        )
    if not findings.tests:
        return _unknown(
            "Distances are known, but not whether chance alone explains them.",
            "That takes one number per case; only summaries left the sites.",
        )
    surest = min(findings.tests, key=lambda test: test.p_adjusted)
    numbers = f"Smallest adjusted p-value {p_text(surest.p_adjusted)} ({surest.what})"
    if surest.p_adjusted < CLEAR:
        which = _listed([test.what for test in findings.tests if test.p_adjusted < CLEAR])
        return Verdict(
            "differ",
            f"The sites differ clearly: in {which}.",
            f"{numbers}, largest effect {max(t.evidence.effect for t in findings.tests):.2f}.",
            _advice_if_different(findings, CLEAR, "likely"),
        )
    if surest.p_adjusted < HINT:
        return Verdict(
            "perhaps",
            f"There is a hint that the sites differ, in {surest.what}.",
            f"{numbers}: below {HINT}, not below {CLEAR}.",
            _advice_if_different(findings, HINT, "a guess"),
        )
    return _no_difference(findings.tests, numbers)


def _no_difference(tests: Sequence[Comparison], numbers: str) -> Verdict:
    fewest = min(test.fewest for test in tests)
    lowest = min(test.evidence.smallest_p for test in tests) * len(tests)
    if fewest < ENOUGH or lowest > HINT:
        return _unknown(
            "With so few cases nobody can tell whether the sites differ.",
            f"{numbers}, but the smallest site has {fewest} training "
            f"{'case' if fewest == 1 else 'cases'}; a real difference can hide in fewer than "
            f"{ENOUGH}.",
        )
    advice = Advice(
        "FedAvg: nothing here speaks against one model for all. Keep single-site training beside "
        "it as the line to beat.",
        "likely",
        "No test found a difference. That is no proof that there is none: embeddings and metadata "
        "do not see everything.",
    )
    return Verdict("alike", "No evidence that the sites differ.", f"{numbers}.", [advice])


def _unknown(headline: str, why: str) -> Verdict:
    advice = Advice(
        "Run FedAvg, a personal method such as Ditto, and single-site training side by side, and "
        "let validation cases decide.",
        "a guess",
        "Without a finding there is no reason to prefer one.",
    )
    return Verdict("cannot tell", headline, why, [advice])


def _advice_if_different(findings: Findings, level: float, sure: Sure) -> list[Advice]:
    kinds = {test.kind for test in findings.tests if test.p_adjusted < level}
    advice = (
        Advice(
            "Compare personal methods (Ditto, IOP-FL, GRACE, pFedNet) with FedAvg and with "
            "single-site training: one model for all may fit none of the sites well.",
            sure,
            "The sites' data differ; by how much a model suffers from it, only a run can show.",
        ),
        _by_kind(kinds),
        _most_distant(findings.geometries),
        _clusters(findings.geometries),
    )
    order = get_args(Sure)
    return sorted(filter(None, advice), key=lambda entry: order.index(entry.sure))


def _by_kind(kinds: set[Kind]) -> Advice:
    """Return what the kind of the difference suggests."""
    if "label" not in kinds:
        text = (
            "It is how images look that differs, not how much is outlined: try normalisation that "
            "stays at the sites (FedBN, SiloBN), or spectra exchanged between them (ResFIM)."
        )
    elif kinds == {"label"}:
        text = (
            "It is how much is outlined that differs, not how images look: try methods whose last "
            "layers stay at the sites (FedPer, FedRep, pFedNet)."
        )
    else:
        text = (
            "Both the images and how much is outlined differ: try methods that keep a whole model "
            "of their own at each site (Ditto, IOP-FL)."
        )
    return Advice(text, "a guess", "A rule of thumb, from what these methods keep at the sites.")


def _most_distant(geometries: Sequence[Geometry]) -> Advice | None:
    """Return what to do about the most distant site, where all ways of looking agree on it."""
    told = [geometry for geometry in geometries if geometry.stability]
    if not told:
        return None
    shares = "; ".join(
        f"by {GEOMETRIES[g.key]} {g.most_distant} in {g.stability[g.most_distant]:.0%}"
        for g in told
    )
    why = f"Most distant in resampled federations: {shares}."
    named = {geometry.most_distant for geometry in told}
    weakest = min(geometry.stability[geometry.most_distant] for geometry in told)
    if len(named) > 1 or weakest < LIKELY:
        text = (
            "Which site is the most distant one depends on how one looks, so that giving it less "
            "weight is no safe choice; if you try the method distance, choose its kind and omega "
            "on validation cases."
        )
        return Advice(text, "a guess", why)
    text = (
        f"The most distant site is {named.pop()}: try the method distance with omega 0.5, and 0.3 "
        f"and 0.1 by validation score."
    )
    return Advice(text, "sure" if weakest >= STABLE else "likely", why)


def _clusters(geometries: Sequence[Geometry]) -> Advice | None:
    """Return advice where the same two clusters stand out however one looks."""
    told = [geometry for geometry in geometries if geometry.clusters]
    groups = [sorted(map(tuple, geometry.clusters["recommended"])) for geometry in told]
    if not told or any(group != groups[0] for group in groups):
        return None
    ratios = [separation(geometry) for geometry in told]
    if min(ratios) < APART:
        return None
    first, second = (_listed(list(members)) for members in groups[0])
    return Advice(
        f"Two groups stand out, {first} against {second}: try distance with mode clusters.",
        "likely",
        f"Between the groups distances are {min(ratios):.1f} or more times those within.",
    )


def separation(geometry: Geometry) -> float:
    """Return the mean distance between the two clusters over the mean distance within them."""
    place = {site: index for index, site in enumerate(geometry.sites)}
    first, second = geometry.clusters["recommended"]
    between = [geometry.matrix[place[a]][place[b]] for a, b in product(first, second)]
    within = [
        geometry.matrix[place[a]][place[b]]
        for members in (first, second)
        for a, b in combinations(members, 2)
    ]
    return fmean(between) / fmean(within) if fmean(within) > 0 else float("inf")


GEOMETRIES: Mapping[str, str] = {
    "metadata": "metadata in their units",
    "normalised": "metadata over their spread",
    "embeddings": "embeddings",
}
"""The ways of looking, for a reader."""


def p_text(p: float) -> str:
    """Return a p-value as a reader takes it in."""
    return "below 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def _listed(words: Sequence[str]) -> str:
    """Return "a, b and c"."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last
