from collections.abc import Callable
from typing import Any

import pytest

from collegium.diagnostics.assessment.findings import Findings, Geometry, find
from collegium.diagnostics.assessment.verdict import judge, p_text, separation
from collegium.heterogeneity.survey import SurveyQuestions

PARTS = ("intensity_maxima", "label_volumes", "label_histogram", "embeddings")
SITES = list("ABCD")


def found(told: Any) -> Findings:
    return find(told, SurveyQuestions(PARTS), ("background", "gland"), seed=0)


def texts(verdict: Any) -> str:
    return " | ".join(f"{advice.sure}: {advice.text}" for advice in verdict.advice)


def test_sites_drawn_alike_give_no_reason_to_personalise(replies: Callable[..., Any]) -> None:
    verdict = judge(found(replies()), SITES)
    assert verdict.level == "alike"
    assert verdict.headline == "No evidence that the sites differ."
    assert texts(verdict).startswith("likely: FedAvg: nothing here speaks against")


def test_a_site_far_from_the_others_is_named(replies: Callable[..., Any]) -> None:
    told = replies(intensity={"D": 5.0}, label={"D": 500.0}, seen={"D": 4.0})
    verdict = judge(found(told), SITES)
    assert verdict.level == "differ"
    assert "the intensity of channel 1, the amount of gland and what a network sees" in (
        verdict.headline
    )
    assert "sure: The most distant site is D: try the method distance" in texts(verdict)
    assert "keep a whole model of their own" in texts(verdict)
    assert "likely: Compare personal methods" in texts(verdict)
    assert verdict.advice[0].sure == "sure"


def test_what_differs_decides_what_to_try(replies: Callable[..., Any]) -> None:
    looks = judge(found(replies(intensity={"A": 4.0}, seen={"A": 4.0})), SITES)
    assert "try normalisation that stays at the sites (FedBN, SiloBN)" in texts(looks)
    amounts = judge(found(replies(label={"A": 300.0})), SITES)
    assert amounts.headline == "The sites differ clearly: in the amount of gland."
    assert "last layers stay at the sites (FedPer, FedRep, pFedNet)" in texts(amounts)


def test_two_groups_are_named_where_they_stand_out(replies: Callable[..., Any]) -> None:
    shift = {"C": 6.0, "D": 6.0}
    told = replies(intensity=shift, label={"C": 600.0, "D": 600.0}, seen=shift)
    verdict = judge(found(told), SITES)
    assert "Two groups stand out, A and B against C and D" in texts(verdict)
    assert "Which site is the most distant one depends on how one looks" in texts(verdict)


def test_few_cases_cannot_tell(replies: Callable[..., Any]) -> None:
    verdict = judge(found(replies(cases=4, seed=1)), SITES)
    assert verdict.level == "cannot tell"
    assert verdict.headline.startswith("With so few cases nobody can tell")
    assert "the smallest site has 4 training cases" in verdict.why
    assert "side by side" in texts(verdict)
    clear = judge(found(replies(cases=4, intensity={"A": 30.0, "B": 60.0, "C": 90.0})), SITES)
    assert clear.level == "differ"


def test_a_hint_is_called_a_hint(replies: Callable[..., Any]) -> None:
    verdict = judge(found(replies(intensity={"D": 1.1})), SITES)
    assert verdict.level == "perhaps"
    assert (
        verdict.headline == "There is a hint that the sites differ, in the intensity of channel 1."
    )
    assert all(advice.sure == "a guess" for advice in verdict.advice if "Compare" in advice.text)


def test_what_cannot_be_compared_is_told(replies: Callable[..., Any]) -> None:
    told = replies()
    alone = judge(found({"A": told["A"]}), ["A"])
    assert alone.headline == "A is the only site: there is no other to compare it with."
    nobody = judge(found({}), SITES)
    assert nobody.headline == "Fewer than two sites told enough to be compared."
    assert {alone.level, nobody.level} == {"cannot tell"}


def test_separation_is_the_distance_between_clusters_over_that_within() -> None:
    matrix = [[0, 1, 6, 8], [1, 0, 7, 9], [6, 7, 0, 2], [8, 9, 2, 0]]
    rows = [[float(value) for value in row] for row in matrix]
    clusters = {"recommended": [["A", "B"], ["C", "D"]]}
    geometry = Geometry("metadata", "", SITES, rows, "D", {}, [], 2, clusters)
    assert separation(geometry) == pytest.approx(7.5 / 1.5)


def test_p_values_are_written_for_a_reader() -> None:
    assert [p_text(p) for p in (0.0002, 0.004, 0.0472, 0.331)] == [
        "below 0.001",
        "0.004",
        "0.047",
        "0.33",
    ]
