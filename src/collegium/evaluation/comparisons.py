"""Methods against a reference, paired by patient: does joining help, and does adapting?

Every verdict of a run is made here, by `_judged`, from the whole table of results. The tables, the
text on a terminal, ``verdicts.json`` and the report all show those of `joining_table` and
`adapting_table`. How a verdict is made stands in docs/statistics.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Self

import pandas as pd

from collegium.evaluation.arms import (
    PairedSite,
    SiteScores,
    alone_at,
    estimate_over_sites,
    same_models,
    scores_by_site,
)
from collegium.evaluation.choice import Choice, choose_on_validation
from collegium.evaluation.estimates import Estimate
from collegium.evaluation.quality import ModelQuality, arms_of, qualities
from collegium.evaluation.results import (
    DEFAULT_SETTINGS,
    AlgorithmLabels,
    VerdictSettings,
    labels_of,
    read_description,
    read_results,
    verdict_settings,
)
from collegium.evaluation.scores import (
    NO_ADAPTER,
    MethodKey,
    Where,
    final_scores,
    higher_is_better,
    method_name,
    of_metric,
    position,
    unit_of,
)
from collegium.evaluation.selection import selection_notes, used_models
from collegium.evaluation.sent_estimates import (
    NOTHING_SENT,
    MethodAtSite,
    Sent,
    SentEstimates,
    read_estimates,
)
from collegium.evaluation.tables import AVERAGE
from collegium.evaluation.verdicts import (
    Question,
    Subject,
    Verdict,
    corrected,
    judge,
    verdict_of_means,
)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A method against the reference, at one site or over all.

    Attributes:
        algorithm: Label of the algorithm.
        model: Which of its models was scored; outside, the label of the adapter.
        verdict: The verdict; its site is "average" over all.
        estimate: What the verdict is made of; None where only means are known.
        over_sites: Whether it is over all sites.
        chosen: Whether the site would choose the method by its validation cases. Then its interval
            is that of the best of several methods; all other methods have one of their own.
    """

    algorithm: str
    model: str
    verdict: Verdict
    estimate: Estimate | None = None
    over_sites: bool = False
    chosen: bool = False

    @property
    def key(self) -> MethodKey:
        """The algorithm and its model."""
        return self.algorithm, self.model


@dataclass(frozen=True, eq=False)
class ComparisonTable:
    """Methods against a reference, for one metric.

    Attributes:
        metric: What was measured.
        unit: Its unit.
        higher_is_better: False for distances and losses.
        comparisons: Those at single sites by site, then method; then those over all sites, the mean
            of the site means. A method that lacks a score at a site where others have one is left
            out there, as in the average of a table.
        question: What the table answers.
        sides: What the reference and the method are called in the head of the table.
        missing: What could not be compared, and why; empty if all could.
        variation: The setting of a sweep that the scores are of; empty outside a sweep.
        notes: Sentences on how rounds were selected, see `selection_notes`.
    """

    metric: str
    unit: str
    higher_is_better: bool
    comparisons: tuple[Comparison, ...]
    question: str
    sides: tuple[str, str]
    missing: str = ""
    variation: str = ""
    notes: tuple[str, ...] = ()

    @property
    def by_site(self) -> list[Comparison]:
        """The comparisons at single sites."""
        return [found for found in self.comparisons if not found.over_sites]

    @property
    def over_sites(self) -> list[Comparison]:
        """The comparisons over all sites."""
        return [found for found in self.comparisons if found.over_sites]

    @property
    def answers(self) -> list[Comparison]:
        """The answers to single sites: of joining by the method of their choice, of adapting all.

        No case of a site outside can choose among the adapted methods, so each is an answer.
        """
        return [c for c in self.by_site if c.chosen or c.verdict.question == "adapting"]

    @property
    def frame(self) -> pd.DataFrame:
        """The comparisons as a frame: a column for each number and word of a `Verdict`."""
        rows = [
            {
                "algorithm": found.algorithm, "model": found.model, "chosen": found.chosen,
                "over_sites": found.over_sites, **asdict(found.verdict),
                "same_as": ", ".join(found.verdict.same_as), "answer": found.verdict.answer,
                "sentence": found.verdict.sentence, "unusable": found.verdict.unusable,
            }
            for found in self.comparisons
        ]  # fmt: skip
        return pd.DataFrame(rows, columns=None if rows else ["site", "method"])


@dataclass(frozen=True)
class _Question:
    """The question that is asked of all methods of a table.

    Attributes:
        metric: What was measured.
        unit: Its unit.
        settings: What verdicts are made with.
        about: Whether it is about joining or adapting.
        same: The other names of the model of a method.
        choices: What each site would choose.
        pooled: Labels of the algorithms that nobody can join.
        sent: What sites sent which keep the scores of their patients.
        quality: The quality of a method at a site; absent if there is nothing to say.
    """

    metric: str
    unit: str
    settings: VerdictSettings
    about: Question
    same: Mapping[MethodKey, Sequence[MethodKey]]
    choices: Mapping[str, Choice] = field(default_factory=dict)
    pooled: Collection[str] = ()
    sent: Mapping[MethodAtSite, Sent] = field(default_factory=dict)
    quality: Mapping[tuple[MethodKey, str], ModelQuality] = field(default_factory=dict)

    @property
    def where(self) -> Where:
        """Whether the sites are inside or outside."""
        return "inside" if self.about == "joining" else "outside"

    def subject(self, site: str, key: MethodKey) -> Subject:
        """Return what a verdict is about."""
        return Subject(
            site=site,
            metric=self.metric,
            method=method_name(*key, self.where),
            unit=self.unit,
            higher_is_better=higher_is_better(self.metric, self.unit),
            relevant=of_metric(self.metric, self.settings.relevant),
            usable=of_metric(self.metric, self.settings.unusable),
            question=self.about,
        )

    def estimate(self, site: str, key: MethodKey, pair: PairedSite) -> Estimate | None:
        """Return the estimate of a method at a site, its own or the one it sent; None if neither.

        Args:
            site: The site.
            key: The method.
            pair: The scores of method and reference.
        """
        if pair.known:
            return pair.estimate(self.metric)
        sent = self.sent.get((key, site))
        return sent.estimate if sent else None

    def with_quality(
        self, verdict: Verdict, key: MethodKey, reference: MethodKey, sites: Collection[str]
    ) -> Verdict:
        """Return a verdict with what is to be said of the two models at all of some sites.

        Args:
            verdict: The verdict.
            key: The method.
            reference: The reference.
            sites: The sites.
        """
        joined, alone = (
            [self.quality.get((arm, site), ModelQuality()) for site in sites]
            for arm in (key, reference)
        )
        rising = arms_of(
            joined=all(q.rising for q in joined), reference=all(q.rising for q in alone)
        )
        told = [found.collapsed if (found := self.sent.get((key, s))) else "" for s in sites]
        collapsed = arms_of(
            joined=all(
                q.collapsed or word in ("joined", "both")
                for q, word in zip(joined, told, strict=True)
            ),
            reference=all(
                q.collapsed or word in ("reference", "both")
                for q, word in zip(alone, told, strict=True)
            ),
        )
        return replace(verdict, rising=rising, collapsed=collapsed)

    def rivals(
        self, chosen: MethodKey, reference: MethodKey, keys: Iterable[MethodKey]
    ) -> list[MethodKey]:
        """Return one name of each other distinct model that a method was chosen among."""
        known = {chosen, *self.same.get(chosen, ()), reference, *self.same.get(reference, ())}
        found = []
        for key in keys:
            if key not in known and key[0] not in self.pooled:
                found.append(key)
                known |= {key, *self.same.get(key, ())}
        return found


@dataclass(frozen=True, eq=False)
class _OfAllMetrics:
    """The parts of comparisons with training alone that do not depend on the metric.

    Attributes:
        notes: How the rounds were selected.
        scores: The scores of single test cases, hidden ones included.
        choices: What each site would choose on validation.
        quality: The quality of every method at every site.
    """

    notes: tuple[str, ...]
    scores: pd.DataFrame
    choices: Mapping[str, Choice]
    quality: Mapping[tuple[MethodKey, str], ModelQuality]

    @classmethod
    def find(
        cls, results: pd.DataFrame, local: str, pooled: Collection[str], settings: VerdictSettings
    ) -> Self:
        """Find it in the table of results of one setting of a sweep."""
        own = used_models(results)
        every = final_scores(own, hidden=True)
        return cls(
            selection_notes(results, settings.selection),
            every,
            choose_on_validation(own, local, pooled),
            qualities(own, every, settings.relevant),
        )


@dataclass(frozen=True, eq=False)
class RunComparisons:
    """The results of a run with all that its comparisons are made of.

    Attributes:
        results: The whole table of results.
        labels: The labels of the algorithms.
        settings: What verdicts are made with.
        sent: The estimates of sites that keep the scores of their patients.
    """

    results: pd.DataFrame
    labels: AlgorithmLabels
    settings: VerdictSettings = DEFAULT_SETTINGS
    sent: SentEstimates = NOTHING_SENT
    _of_all: dict[str, _OfAllMetrics] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def read(cls, output: Path) -> Self:
        """Read them from the output folder of an experiment, finished or not.

        Raises:
            DataError: A file cannot be read.
        """
        info, results = read_description(output), read_results(output)
        return cls(
            results, labels_of(info, results), verdict_settings(info), read_estimates(output)
        )

    def joining(self, metric: str, variation: str) -> ComparisonTable:
        """Compare every method with training alone, see `joining_table`.

        Args:
            metric: Which metric.
            variation: The setting of a sweep.
        """
        return joining_table(
            self.results, metric, self.labels.order, local=self.labels.local,
            pooled=self.labels.pooled, settings=self.settings, variation=variation, sent=self.sent,
            of_all=self._of_all,
        )  # fmt: skip

    def adapting(self, metric: str, variation: str) -> ComparisonTable:
        """Compare every adapter with the unadapted model, see `adapting_table`.

        Args:
            metric: Which metric.
            variation: The setting of a sweep.
        """
        return adapting_table(
            self.results, metric, self.labels.order, settings=self.settings, variation=variation,
            sent=self.sent,
        )  # fmt: skip


def joining_table(
    results: pd.DataFrame,
    metric: str,
    order: Sequence[str] = (),
    *,
    local: str = "local",
    pooled: Collection[str] = (),
    settings: VerdictSettings = DEFAULT_SETTINGS,
    variation: str = "",
    sent: SentEstimates = NOTHING_SENT,
    of_all: MutableMapping[str, _OfAllMetrics] | None = None,
) -> ComparisonTable:
    """Compare every method with training alone, at every site: does joining help it?

    All methods compared at a site are one family of the correction of p-values, see `corrected`; so
    are those compared over all sites. The method that a site would choose on validation is marked,
    and its interval is that of the best of several.

    Args:
        results: The whole table of results of a run.
        metric: Which metric.
        order: Labels of the algorithms in the order wanted; the others follow by name.
        local: Label of the algorithm that trains each site alone.
        pooled: Labels of those that pool the data, which nobody can join.
        settings: What verdicts are made with.
        variation: The setting of a sweep.
        sent: The estimates of sites that keep the scores of their patients.
        of_all: What earlier calls about the same results found that holds of all metrics, by
            setting; this one adds to it.

    Returns:
        The comparisons; none, with the reason, if nobody trained alone.
    """
    of_all = {} if of_all is None else of_all
    if variation not in of_all:
        own = results[results["variation"] == variation]
        of_all[variation] = _OfAllMetrics.find(own, local, pooled, settings)
    shared = of_all[variation]
    every = shared.scores
    scores = every[every["metric"] == metric]
    question = _Question(
        metric,
        unit_of(scores),
        settings,
        "joining",
        same_models(every, metric),
        shared.choices,
        pooled,
        sent.of(variation, "joining", metric),
        shared.quality,
    )
    arms = scores_by_site(every, metric)
    alone = alone_at(arms, local)
    missing = (
        f"Nobody trained alone in this run: it holds no scores of an algorithm labelled "
        f"{local!r}, so whether joining helps cannot be said. Add it to the algorithms."
    )
    keys = {key for key, _ in arms if key[0] != local}
    found = _compare(question, arms, sorted(keys, key=lambda key: position(key, order)), alone)
    return replace(_table(question, found, "" if alone else missing, variation), notes=shared.notes)


def adapting_table(
    results: pd.DataFrame,
    metric: str,
    order: Sequence[str] = (),
    *,
    settings: VerdictSettings = DEFAULT_SETTINGS,
    variation: str = "",
    sent: SentEstimates = NOTHING_SENT,
) -> ComparisonTable:
    """Compare every adapter with the same algorithm's unadapted model, at every site outside.

    A seed is one training of both. The adapters of one algorithm at one site are one family of the
    correction.

    Args:
        results: The whole table of results of a run. The scores of sites inside say which
            algorithms have a global model, the one that is scored unadapted.
        metric: Which metric.
        order: Labels of the algorithms in the order wanted; the others follow by name.
        settings: What verdicts are made with.
        variation: The setting of a sweep.
        sent: The estimates of sites that keep the scores of their patients.

    Returns:
        The comparisons by site, algorithm and adapter. `missing` names the algorithms whose models
        were adapted but never scored without an adapter, and says which of them never can be.
    """
    every = final_scores(results, where="outside", variation=variation, hidden=True)
    scores = every[every["metric"] == metric]
    question = _Question(
        metric,
        unit_of(scores),
        settings,
        "adapting",
        same_models(every, metric),
        sent=sent.of(variation, "adapting", metric),
        quality=qualities(results.iloc[:0], every, settings.relevant),
    )
    arms = scores_by_site(every, metric)
    found: list[Comparison] = []
    lacking = []
    labels = scores["algorithm"].unique()
    for algorithm in sorted(labels, key=lambda label: position((label, ""), order)):
        plain = algorithm, NO_ADAPTER
        keys = {key for key, _ in arms if key[0] == algorithm and key != plain}
        unadapted = {site: plain for key, site in arms if key == plain}
        if unadapted:
            ordered = sorted(keys, key=lambda key: position(key, order))
            found += _compare(question, arms, ordered, unadapted)
        else:
            lacking.append(algorithm)
    inside = final_scores(results, metric, variation=variation)
    missing = _missing_unadapted(lacking, inside, any_scores=not scores.empty)
    if arms and all(name == NO_ADAPTER for (_, name), _ in arms):
        missing = (
            f"Outside nothing was run but the adapter {NO_ADAPTER!r}, so there is nothing adapted "
            "to compare."
        )
    return _table(question, found, missing, variation)


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


def _table(
    question: _Question, found: Iterable[Comparison], missing: str, variation: str
) -> ComparisonTable:
    """Return a table of comparisons: those at single sites by site, then those over all sites."""
    joining = question.about == "joining"
    return ComparisonTable(
        question.metric,
        question.unit,
        higher_is_better(question.metric, question.unit),
        tuple(sorted(found, key=lambda c: (c.over_sites, c.verdict.site))),
        "Does joining help this site?" if joining else "Does adapting help this hospital?",
        ("alone", "joined") if joining else ("unadapted", "adapted"),
        missing,
        variation,
    )


def _compare(
    question: _Question,
    arms: Mapping[tuple[MethodKey, str], SiteScores],
    keys: Sequence[MethodKey],
    references: Mapping[str, MethodKey],
) -> list[Comparison]:
    """Compare methods with one reference, at every site that it has, and over all sites.

    Args:
        question: What is asked.
        arms: The scores of the methods and of the reference.
        keys: The methods, in the order wanted.
        references: The reference of each site.
    """
    shared, metric = question.about == "adapting", question.metric
    found: list[Comparison] = []
    usable: dict[MethodKey, dict[str, PairedSite]] = {key: {} for key in keys}
    known: dict[MethodKey, dict[str, Estimate]] = {key: {} for key in keys}
    for site in sorted(references):
        pairs = {
            key: PairedSite(
                arms[key, site], arms[references[site], site], shared, question.settings.classes
            )
            for key in keys
            if (key, site) in arms
        }
        estimates = {key: question.estimate(site, key, pair) for key, pair in pairs.items()}
        for key, estimate in estimates.items():
            if estimate is None or estimate.patients:
                usable[key][site] = pairs[key]
            if estimate is not None:
                known[key][site] = estimate
        alone = {key: {site: pair} for key, pair in pairs.items()}
        found += _judged(question, site, estimates, alone, references[site])
    scored = {site for pairs in usable.values() for site in pairs}
    everywhere = {key: pairs for key, pairs in usable.items() if pairs.keys() == scored}
    if len(scored) < 2 or not everywhere:
        return found
    pooled = {
        key: estimate_over_sites(pairs, known[key], metric) if scored <= known[key].keys() else None
        for key, pairs in everywhere.items()
    }
    reference = next(iter(references.values()))
    return [*found, *_judged(question, AVERAGE, pooled, everywhere, reference, over_sites=True)]


def _judged(
    question: _Question,
    site: str,
    estimates: Mapping[MethodKey, Estimate | None],
    pairs: Mapping[MethodKey, Mapping[str, PairedSite]],
    reference: MethodKey,
    *,
    over_sites: bool = False,
) -> Iterator[Comparison]:
    """Yield the comparison of each method of a family with its verdict.

    This is the only place where verdicts are made.

    Args:
        question: What is asked.
        site: The site, or "average".
        estimates: The difference of each method; None where only means are known.
        pairs: What they were made of, by site.
        reference: The reference.
        over_sites: Whether they are over all sites.
    """
    choice = None if over_sites else question.choices.get(site)
    verdicts = []
    for key, estimate in estimates.items():
        subject = question.subject(site, key)
        if estimate is None:
            verdicts.append(_of_means(subject, [*pairs[key].values()]))
            continue
        chosen, others = choice is not None and choice.method == key, []
        if chosen:
            rivals = question.rivals(key, reference, estimates)
            others = [found.arms[0] for rival in rivals if (found := estimates[rival]) is not None]
        same = question.same.get(key, ())
        verdicts.append(
            judge(
                subject,
                estimate,
                others,
                same_model=reference in same,
                same_as=[method_name(*name, question.where) for name in same if name != reference],
                alone_chosen=choice is not None and chosen and choice.alone_better,
            )
        )
    for key, verdict in zip(estimates, corrected(verdicts), strict=True):
        chosen = choice is not None and choice.method == key
        complete = question.with_quality(verdict, key, reference, pairs[key])
        yield Comparison(
            algorithm=key[0],
            model=key[1],
            verdict=complete,
            estimate=estimates[key],
            over_sites=over_sites,
            chosen=chosen,
        )


def _of_means(subject: Subject, pairs: Sequence[PairedSite]) -> Verdict:
    """Return the verdict where there is no estimate."""
    withheld = any(pair.withheld for pair in pairs)
    means = (fmean(getattr(pair, arm).mean for pair in pairs) for arm in ("joined", "reference"))
    return verdict_of_means(subject, *means, reason="withheld" if withheld else "no classes")
