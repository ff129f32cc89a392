"""Verdicts in plain sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from collegium.evaluation.intervals import MOST_PATIENTS, MOST_TRAININGS, PATIENTS
from collegium.evaluation.wording import name_in_sentence, number

if TYPE_CHECKING:
    from collegium.evaluation.verdicts import Verdict

_WORDS = {
    "joining": ("Joining", "training alone", "the one trained alone"),
    "adapting": ("Adapting", "the unadapted model", "the unadapted one"),
}
"""By question: the subject of its sentences, the reference, and the model of that."""


_WITHHELD = (
    "Cannot tell here: the scores of single patients stay at the site, whose own report says how "
    "sure the difference is."
)


def sentence_of(verdict: Verdict) -> str:
    """Return a verdict in plain sentences, which begin with the answer."""
    texts = {
        "better": _difference, "worse": _difference, "equivalent": _equivalent,
        "identical": _identical, "cannot tell": _cannot_tell,
    }  # fmt: skip
    parts = [texts[verdict.outcome](verdict)]
    if verdict.few_decide and verdict.outcome in ("better", "worse", "cannot tell"):
        parts.append("A few patients make the mean: for most the difference has the other sign.")
    if verdict.alone_chosen:
        reference = _WORDS[verdict.question][1]
        parts.append(f"On validation {reference} was better than any method.")
    return " ".join([*parts, *_quality(verdict)])


def _quality(verdict: Verdict) -> list[str]:
    """Return what is to be said of the two models beside their difference."""
    reference = _WORDS[verdict.question][1]
    names = {"joined": verdict.method, "reference": reference.capitalize(), "both": "Both"}
    side = "below" if verdict.higher_is_better else "above"
    limit = " ".join(filter(None, (f"{verdict.usable or 0:.3g}", verdict.unit)))
    said = []
    for arms, one, several in (
        (verdict.unusable, f"is unusable: its mean is {side} {limit}",
         f"are unusable: their means are {side} {limit}"),
        (verdict.collapsed, "has collapsed: a training of it predicts the same of all test cases",
         "have collapsed: a training of each predicts the same of all test cases"),
        (verdict.rising, "was still rising on validation when training ended",
         "were still rising on validation when training ended"),
    ):  # fmt: skip
        if arms:
            said.append(f"{names[arms]} {several if arms == 'both' else one}.")
    return said


def _difference(verdict: Verdict) -> str:
    subject, reference, alone = _WORDS[verdict.question]
    better, relevantly = verdict.outcome == "better", verdict.relevantly
    little = ", perhaps too little to matter" * verdict.perhaps_little
    low, high = _ends(verdict)
    if not verdict.about_trainings:
        other = (
            "two trainings of one method differ"
            if verdict.question == "joining"
            else "the differences of two trainings vary"
        )
        return (
            f"This model is {'relevantly ' * relevantly}{verdict.outcome} than {alone}, on "
            f"patients like these ({_signed(verdict, verdict.difference)}, {low} to {high}, "
            f"{verdict.patients} patients){little}. Trained again it may come out otherwise: the "
            f"statement stands while {other} here by an sd below "
            f"{_amount(verdict, verdict.tipping_sd)}. Three trainings answer whether "
            f"{subject.lower()} helps."
        )
    seen = verdict.difference or 0.0
    named = [_amount(verdict, seen), verdict.unit, name_in_sentence(verdict.metric)]
    return (
        f"{subject} {'helps' if better else 'hurts'} here{' relevantly' * relevantly}{little}: "
        f"{verdict.method} scores {' '.join(filter(None, named))} {'more' if seen > 0 else 'less'} "
        f"than {reference} (95 % interval {low} to {high}, {verdict.patients} patients, "
        f"{_trainings(verdict)}). Expect it of another training and another patient like these."
    )


def _equivalent(verdict: Verdict) -> str:
    subject, (low, high) = _WORDS[verdict.question][0], _ends(verdict)
    limit = " ".join(filter(None, (f"{verdict.relevant:g}", verdict.unit)))
    if verdict.about_trainings:
        return (
            f"No relevant difference: whatever {subject.lower()} changes here is smaller than "
            f"{limit} ({low} to {high})."
        )
    return f"These two models differ by less than {limit} ({low} to {high})."


def _identical(verdict: Verdict) -> str:
    reference = _WORDS[verdict.question][1]
    if verdict.same_model:
        return f"{verdict.method} and {reference} are the same model."
    return f"{verdict.method} and {reference} score the same for every patient."


def _cannot_tell(verdict: Verdict) -> str:
    if verdict.reason == "withheld":
        return _WITHHELD
    if verdict.reason == "no classes":
        return (
            f"Cannot tell: this run holds no classes and probabilities of its cases, of which "
            f"{name_in_sentence(verdict.metric)} is made; run it again to have them."
        )
    if verdict.reason == "no pair":
        return f"Cannot tell: no patient has a score with both{_undefined(verdict)}."
    if verdict.reason in ("few patients", "few events"):
        events = verdict.reason == "few events"
        count = verdict.fewest if events else verdict.patients
        who = f"test patient{'s' * (count != 1)}" + f" {verdict.fewest_of}" * events
        return f"Cannot tell: {count} {who}; at least {PATIENTS} are needed."
    if verdict.reason == "same difference":
        seen = _signed(verdict, verdict.difference)
        return f"Cannot tell: every patient shows the same difference ({seen})."
    low, high = _ends(verdict)
    found, about = f"{verdict.patients} patients", " about these two models"
    if verdict.about_trainings:
        found, about = f"{found} and {_trainings(verdict)}", ""
    return (
        f"Cannot tell{about}: the interval ({low} to {high}) holds gain and loss. {found} find "
        f"differences from about {_amount(verdict, verdict.smallest_detectable)}. "
        f"{_needed(verdict)}"
    )


def _undefined(verdict: Verdict) -> str:
    """Return why no pair has scores, where there are pairs."""
    if not verdict.undefined:
        return ""
    cases = "the one test case" if verdict.undefined == 1 else f"all {verdict.undefined} test cases"
    return f": {name_in_sentence(verdict.metric)} is undefined for one of them or both in {cases}"


def _needed(verdict: Verdict) -> str:
    """Return what would find the difference seen."""
    if verdict.patients_needed is not None:
        return f"The difference seen would need about {verdict.patients_needed} patients."
    if verdict.trainings_needed is not None:
        return (
            "No number of patients settles it: the trainings differ. About "
            f"{verdict.trainings_needed} trainings would."
        )
    most = f"{MOST_PATIENTS} patients"
    if verdict.trainings_differ:
        return f"Neither {most} nor {MOST_TRAININGS} trainings would find the difference seen."
    return f"The difference seen would need more than {most}."


def _trainings(verdict: Verdict) -> str:
    joined, reference = verdict.trainings_joined, verdict.trainings_reference
    if joined == reference:
        return f"{joined} trainings" + " of each" * (verdict.outcome in ("better", "worse"))
    return f"{joined} trainings against {reference}"


def _ends(verdict: Verdict) -> tuple[str, str]:
    return _signed(verdict, verdict.low), _signed(verdict, verdict.high)


def _signed(verdict: Verdict, value: float | None) -> str:
    return number(value, verdict.unit, signed=True)


def _amount(verdict: Verdict, value: float | None) -> str:
    """Return a size without its sign, one digit of it where the usual ones are all zero."""
    if value and not number(abs(value), verdict.unit).strip("0."):
        return f"{abs(value):.1g}"
    return number(value if value is None else abs(value), verdict.unit)
