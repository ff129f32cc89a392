"""The verdict on one method at one site: does joining help it?

A `Verdict` is one object of plain numbers and words: what shows it computes nothing, and a site
that keeps its patients' scores to itself can make its own and send that.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isnan
from typing import Any, ClassVar, Literal, TypeVar

import pydantic

from collegium.core.settings import CONFIG
from collegium.errors import DataError
from collegium.evaluation.estimates import Arm, Estimate
from collegium.evaluation.intervals import PATIENTS, TRAININGS, Bars, error_bars
from collegium.evaluation.quality import Arms, arms_of, is_unusable
from collegium.evaluation.sentences import sentence_of
from collegium.heterogeneity.evidence import holm

Outcome = Literal["better", "worse", "equivalent", "cannot tell", "identical"]
Reason = Literal[
    "", "no pair", "few patients", "few events", "same difference", "withheld", "no classes"
]
"""Why nobody can tell, beside an interval that holds gain and loss."""

Question = Literal["joining", "adapting"]
"""Compared with training alone, or with the model that was adapted."""

T = TypeVar("T")
_ROUNDING = 1e-12  # of the scores: less is the noise of floats


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The comparison that a verdict is about.

    Attributes:
        site: Name of the site; "average" over all.
        metric: Name of the metric.
        method: The method that joined, as a reader calls it.
        unit: Unit of the metric, empty for a pure number.
        higher_is_better: False for distances and losses.
        relevant: The smallest relevant difference; None if there is no setting for the metric.
        usable: The worst mean of a model of use; None if there is no setting.
        question: Whether the reference is training alone or the unadapted model.
    """

    __pydantic_config__: ClassVar = CONFIG

    site: str
    metric: str
    method: str
    unit: str = ""
    higher_is_better: bool = True
    relevant: float | None = None
    usable: float | None = None
    question: Question = "joining"


@dataclass(frozen=True, kw_only=True)
class Verdict(Subject):
    """The verdict on a method, with the numbers of its sentence; None is undefined.

    Differences are joined minus reference in the unit of the metric, whichever way is better.

    Attributes:
        outcome: What the interval says.
        reason: Why nobody can tell, if it is not that the interval holds gain and loss.
        difference: The difference seen (D).
        low: Lower end of the 95 % interval.
        high: Upper end of it.
        joined: Mean of the method.
        reference: Mean of the reference.
        patients: How many patients have a score with both.
        undefined: How many cases were left out because a score of theirs is undefined.
        fewest: The number of patients that an interval depends on, see `Estimate`.
        fewest_of: Who these are, such as "with class 1"; empty if they are all.
        trainings_joined: How many trainings of the method there are.
        trainings_reference: How many of the reference.
        candidates: Among how many distinct methods it was chosen (M).
        smallest_detectable: The smallest difference that would be found about 8 times in 10.
        patients_needed: How many patients would find the difference seen; None if no number does,
            or if there is no need.
        trainings_needed: How many trainings would, where no number of patients does.
        trainings_differ: Whether the interval has a bar for the trainings.
        tipping_sd: Of fewer than three trainings, the sd between trainings at which the difference
            could be their luck (u*).
        p: The level at which the interval would just reach zero.
        p_holm: The same corrected for the distinct methods of a table; None before.
        family: How many these are.
        same_as: The other names of the same model, equal bit by bit.
        same_model: Whether method and reference are the same model, equal bit by bit.
        few_decide: Whether mean and median of the patients' differences have opposite signs.
        alone_chosen: Whether the reference was better than every method on validation.
        rising: Which of the two still improved on validation when training ended, see
            `collegium.evaluation.quality.still_rising`.
        collapsed: Which of them predicts the same of all test cases, see
            `collegium.evaluation.quality.is_constant`.
    """

    __pydantic_config__: ClassVar = CONFIG

    outcome: Outcome
    reason: Reason = ""
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    joined: float | None = None
    reference: float | None = None
    patients: int = 0
    undefined: int = 0
    fewest: int = 0
    fewest_of: str = ""
    trainings_joined: int = 1
    trainings_reference: int = 1
    candidates: int = 1
    smallest_detectable: float | None = None
    patients_needed: int | None = None
    trainings_needed: int | None = None
    trainings_differ: bool = False
    tipping_sd: float | None = None
    p: float | None = None
    p_holm: float | None = None
    family: int = 0
    same_as: tuple[str, ...] = ()
    same_model: bool = False
    few_decide: bool = False
    alone_chosen: bool = False
    rising: Arms = ""
    collapsed: Arms = ""

    @property
    def unusable(self) -> Arms:
        """The arms that are of no use, by their means."""
        joined, reference = (
            is_unusable(mean, self.usable, higher_is_better=self.higher_is_better)
            for mean in (self.joined, self.reference)
        )
        return arms_of(joined=joined, reference=reference)

    @property
    def about_trainings(self) -> bool:
        """Whether it is about another training; if not, it is about these two models."""
        return min(self.trainings_joined, self.trainings_reference) >= TRAININGS

    @property
    def relevantly(self) -> bool:
        """Whether all of the interval lies at or beyond the smallest relevant difference."""
        if self.relevant is None or self.low is None or self.high is None:
            return False
        low, high = _gains(self.low, self.high, self.higher_is_better)
        nearest = {"better": low, "worse": -high}.get(self.outcome, 0.0)
        return nearest >= self.relevant

    @property
    def perhaps_little(self) -> bool:
        """Whether the gain or loss seen is below the smallest relevant difference."""
        if self.relevant is None or self.difference is None:
            return False
        return self.outcome in ("better", "worse") and abs(self.difference) < self.relevant

    @property
    def answer(self) -> str:
        """The answer for a column of a table, such as "yes" or "yes, this model, both unusable"."""
        words = {"better": "yes", "worse": "no", "equivalent": "no relevant difference"}
        words |= {"identical": "same model"}
        word = words.get(self.outcome, self.outcome)
        one = self.outcome in ("better", "worse") and not self.about_trainings
        both = self.unusable == "both"
        return word + ", this model" * one + ", both unusable" * both

    @property
    def sentence(self) -> str:
        """The verdict in plain sentences."""
        return sentence_of(self)


def outcome_of(
    low: float, high: float, *, higher_is_better: bool = True, relevant: float | None = None
) -> Outcome:
    """Return what an interval says.

    Args:
        low: Lower end of the interval of joined minus reference.
        high: Upper end of it.
        higher_is_better: False for distances and losses.
        relevant: The smallest relevant difference; an interval inside it is "equivalent", also
            where it leaves out zero.
    """
    least, most = _gains(low, high, higher_is_better)
    if relevant is not None and -relevant < least and most < relevant:
        return "equivalent"
    if least > 0:
        return "better"
    return "worse" if most < 0 else "cannot tell"


def _gains(low: float, high: float, higher_is_better: bool) -> tuple[float, float]:
    """Return the ends of an interval with gains above zero."""
    return (low, high) if higher_is_better else (-high, -low)


def judge(
    subject: Subject,
    estimate: Estimate,
    others: Sequence[Arm] = (),
    *,
    same_model: bool = False,
    same_as: Sequence[str] = (),
    alone_chosen: bool = False,
) -> Verdict:
    """Return the verdict on a method.

    Args:
        subject: What it is about.
        estimate: The method's difference from the reference.
        others: If the method was chosen among several, the arms of the other distinct ones, see
            `error_bars`.
        same_model: Whether all trainings of method and reference are equal bit by bit.
        same_as: The other names of the same model.
        alone_chosen: Whether the reference was better than every method on validation.
    """
    verdict = Verdict(
        **asdict(subject), outcome="cannot tell", difference=estimate.difference,
        joined=estimate.joined, reference=estimate.reference, patients=estimate.patients,
        undefined=estimate.undefined, fewest=estimate.fewest, fewest_of=estimate.fewest_of,
        trainings_joined=estimate.trainings[0], trainings_reference=estimate.trainings[1],
        candidates=1 + len(others), same_as=tuple(same_as), same_model=same_model,
        few_decide=estimate.few_decide, alone_chosen=alone_chosen,
    )  # fmt: skip
    if same_model:
        return replace(verdict, outcome="identical")
    if not estimate.patients:
        return replace(verdict, reason="no pair")
    if min(estimate.fewest, estimate.patients) < PATIENTS:
        events = bool(estimate.fewest_of) and estimate.fewest < PATIENTS
        return replace(verdict, reason="few events" if events else "few patients")
    bars = error_bars(estimate, others)
    noise = _ROUNDING * max(abs(estimate.joined or 0.0), abs(estimate.reference or 0.0))
    if bars.variance_patients + bars.variance_trainings <= noise**2:
        if abs(estimate.difference or 0.0) <= noise:
            return replace(verdict, outcome="identical")
        return replace(verdict, reason="same difference")
    return _with_interval(verdict, bars, estimate.centre or 0.0)


def verdict_of_means(
    subject: Subject, joined: float, reference: float, *, reason: Reason
) -> Verdict:
    """Return the verdict where only means are known: nobody can tell from these.

    Args:
        subject: What it is about.
        joined: Mean of the method, NaN if it is undefined.
        reference: Mean of the reference.
        reason: Why there is no more.
    """
    means = [None if isnan(value) else value for value in (joined, reference, joined - reference)]
    return Verdict(
        **asdict(subject), outcome="cannot tell", reason=reason, joined=means[0],
        reference=means[1], difference=means[2],
    )  # fmt: skip


def _with_interval(verdict: Verdict, bars: Bars, centre: float) -> Verdict:
    """Return a verdict with its interval, and all that follows from it."""
    difference = verdict.difference or 0.0
    low, high = centre - bars.half_width, centre + bars.half_width
    outcome = outcome_of(
        low, high, higher_is_better=verdict.higher_is_better, relevant=verdict.relevant
    )
    patients = trainings = None
    if outcome == "cannot tell":
        patients = bars.patients_needed(difference)
        trainings = bars.trainings_needed(difference) if patients is None else None
    return replace(
        verdict,
        outcome=outcome,
        low=low,
        high=high,
        smallest_detectable=bars.smallest_detectable,
        patients_needed=patients,
        trainings_needed=trainings,
        trainings_differ=bars.variance_trainings > 0,
        tipping_sd=None if verdict.about_trainings else bars.tipping_sd(centre),
        p=bars.p_value(centre),
    )


def corrected(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts of a table of methods with p-values corrected for their number.

    Args:
        verdicts: On all methods that are compared with one reference at one site. Names of one
            model, see `Verdict.same_as`, count as one method; those without a p-value do not count.

    Returns:
        The same verdicts, in the same order.
    """
    known = {verdict.method: verdict.p for verdict in verdicts if verdict.p is not None}
    by_method, family = holm_over_models(
        known, [(verdict.method, *verdict.same_as) for verdict in verdicts]
    )
    return [
        replace(verdict, p_holm=by_method.get(verdict.method), family=family)
        for verdict in verdicts
    ]


def holm_over_models(
    p_values: Mapping[str, float], same: Iterable[Sequence[str]]
) -> tuple[dict[str, float], int]:
    """Return p-values corrected for how many distinct models there are (Holm, 1979).

    Args:
        p_values: The p-value of each name.
        same: Names of one model each, equal bit by bit; a name in none is a model of its own.

    Returns:
        The corrected p-value of each name, and how many models they are.
    """
    first = {name: name for name in p_values}
    for names in same:
        known = [name for name in names if name in first]
        first.update(dict.fromkeys(known, min(known, default="")))
    models = sorted(set(first.values()))
    adjusted = dict(zip(models, holm([p_values[name] for name in models]), strict=True))
    return {name: adjusted[model] for name, model in first.items()}, len(models)


def as_record(value: Verdict | Estimate) -> dict[str, Any]:
    """Return a verdict or an estimate as plain values that JSON holds without loss."""
    record: dict[str, Any] = json.loads(json.dumps(asdict(value), allow_nan=False))
    return record


def from_record(kind: type[T], record: Mapping[str, Any]) -> T:
    """Return the verdict or the estimate that `as_record` made a record of.

    Args:
        kind: `Verdict` or `Estimate`.
        record: The record, as another site may have sent it.

    Raises:
        DataError: The record lacks a value, has one too many, or one of another type.
    """
    adapter = pydantic.TypeAdapter(kind)
    try:
        return adapter.validate_json(json.dumps(dict(record)))
    except pydantic.ValidationError as error:
        wrong = sorted({str(problem["loc"][0]) for problem in error.errors() if problem["loc"]})
        raise DataError(
            f"a record is no {kind.__name__.lower()} of this version: its values of "
            f"{', '.join(wrong)} are missing, unknown or of another type; ask its site for it again"
        ) from error
