"""Verdicts: what an interval says, what it must have to be one, and how it travels."""

import json
from typing import Any

import numpy as np
import pytest

from collegium.errors import DataError
from collegium.evaluation import estimates
from collegium.evaluation.estimates import Estimate
from collegium.evaluation.intervals import error_bars
from collegium.evaluation.verdicts import (
    Subject,
    Verdict,
    as_record,
    corrected,
    from_record,
    holm_over_models,
    judge,
    outcome_of,
)

# their numbers are None where undefined, which these tests know better than their types
estimate_auc: Any = estimates.estimate_auc
estimate_balanced_accuracy: Any = estimates.estimate_balanced_accuracy
estimate_mean: Any = estimates.estimate_mean
estimate_over_strata: Any = estimates.estimate_over_strata
estimate_share: Any = estimates.estimate_share

DICE = Subject(site="north", metric="dice", method="Ditto personal", relevant=0.01)
HD95 = Subject(site="north", metric="hd95", method="Ditto", unit="mm", higher_is_better=False)
AUC = Subject(site="north", metric="auc", method="Ditto")


def of_means(statistics, name, subject=DICE):
    """The verdict on a reference case of a mean over patients, and what is expected of it."""
    given, expected = statistics(name)
    relevant = {**vars(subject), "relevant": given["relevant"]}
    joined, alone = (np.array(given[arm], dtype=float) for arm in ("joined", "alone"))
    found = estimate_mean(joined, alone, given.get("patient"))
    others = [estimate_mean(other, alone).arms[0] for other in given.get("others", [])]
    return judge(Subject(**relevant), found, others), expected


@pytest.mark.parametrize(
    "name",
    ["one_training", "three_trainings", "trainings_bar_zero", "chosen_among_three",
     "trainings_decide", "worse", "six_all_gain", "equivalent", "clusters"],
)  # fmt: skip
def test_outcomes_of_means_are_those_of_the_reference(statistics, name):
    verdict, expected = of_means(statistics, name)
    assert verdict.outcome == expected["outcome"]
    for value in ("difference", "low", "high", "p", "patients", "undefined"):
        if value in expected:
            assert getattr(verdict, value) == pytest.approx(expected[value], rel=1e-8)
    claims = {True: "a training like these", False: "these two models"}
    assert claims[verdict.about_trainings] == expected.get("claim", claims[verdict.about_trainings])
    assert verdict.candidates == expected.get("M", 1)
    assert (verdict.tipping_sd is None) == verdict.about_trainings


def test_a_distance_that_falls_is_better(statistics):
    verdict, expected = of_means(statistics, "lower_is_better", HD95)
    assert verdict.outcome == expected["outcome"] == "better"
    assert (verdict.low, verdict.high) == pytest.approx((expected["low"], expected["high"]))
    higher, _ = of_means(statistics, "lower_is_better", Subject(site="n", metric="m", method="x"))
    assert higher.outcome == "worse"


def test_outcomes_of_areas_and_shares_are_those_of_the_reference(statistics):
    given, expected = statistics("auc_clusters")
    area = estimate_auc(given["joined"], given["alone"], given["positive"], given["patient"])
    assert judge(AUC, area).outcome == expected["outcome"] == "cannot tell"
    given, expected = statistics("sensitivity")
    verdict = judge(AUC, estimate_share(given["joined"], given["alone"]))
    assert verdict.outcome == expected["outcome"] == "better"
    assert verdict.difference == pytest.approx(expected["difference"])
    assert verdict.low == pytest.approx(expected["low"], rel=1e-8)


def test_too_few_events_have_no_interval(statistics):
    given, expected = statistics("too_few_events")
    labels = np.repeat([1, 0], [given["positive"], given["negative"]])
    joined, alone = np.random.default_rng(1).uniform(size=(2, 40))
    right = (joined > 0.5).astype(float), (alone > 0.5).astype(float)
    for found in (
        estimate_auc(joined, alone, labels),
        estimate_balanced_accuracy(*right, labels),
        estimate_share(right[0][:5], right[1][:5], fewest_of="with class 1"),
    ):
        verdict = judge(AUC, found)
        assert (verdict.outcome, verdict.reason) == (expected["outcome"], expected["reason"])
        assert (verdict.low, verdict.high, verdict.p) == (None, None, None)
        assert (verdict.fewest, verdict.fewest_of) == (5, "with class 1")


def test_too_few_patients_have_no_interval(statistics):
    given, expected = statistics("too_few_patients")
    verdict = judge(DICE, estimate_mean(np.arange(given["patients"]), np.zeros(5)))
    assert (verdict.outcome, verdict.reason) == (expected["outcome"], expected["reason"])
    assert (verdict.low, verdict.high) == (expected["low"], expected["high"])
    assert verdict.difference == 2.0
    accuracy = judge(AUC, estimate_share([1, 1, 1, 0, 0], [0] * 5))
    assert accuracy.reason == "few patients"


def test_a_site_with_too_few_patients_leaves_no_interval_over_sites():
    many, few = estimate_mean(np.arange(9), np.zeros(9)), estimate_mean(np.arange(3), np.zeros(3))
    verdict = judge(DICE, estimate_over_strata({"at a": many, "at b": few}))
    assert (verdict.outcome, verdict.reason) == ("cannot tell", "few events")
    assert (verdict.patients, verdict.fewest, verdict.fewest_of) == (12, 3, "at b")


def test_without_a_pair_nothing_is_known():
    verdict = judge(DICE, estimate_mean([np.nan] * 9, [0.5] * 9))
    assert (verdict.outcome, verdict.reason, verdict.undefined) == ("cannot tell", "no pair", 9)
    assert (verdict.difference, verdict.joined) == (None, None)


def test_equal_scores_of_all_patients_are_identical(statistics):
    verdict, expected = of_means(statistics, "identical")
    assert verdict.outcome == expected["outcome"]
    assert (verdict.difference, verdict.same_model, verdict.p) == (0.0, False, None)


def test_equal_bits_are_identical_without_a_test_however_few_patients():
    few = estimate_mean([0.5, 0.6], [0.5, 0.6])
    verdict = judge(DICE, few, same_model=True)
    assert (verdict.outcome, verdict.same_model, verdict.reason) == ("identical", True, "")


def test_the_same_difference_of_all_patients_is_no_evidence():
    alone = np.random.default_rng(2).uniform(0.1, 0.9, (9, 1))
    verdict = judge(DICE, estimate_mean(alone + 0.1, alone))
    assert (verdict.outcome, verdict.reason) == ("cannot tell", "same difference")
    three = judge(DICE, estimate_mean(np.tile(alone + 0.1, 3), np.tile(alone, 3)))
    assert three.reason == "same difference"


def test_the_noise_of_floats_is_no_difference():
    alone = np.random.default_rng(3).uniform(0.1, 0.9, 9)
    joined = alone * (1 + 1e-15 * np.random.default_rng(4).normal(size=9))
    assert judge(DICE, estimate_mean(joined, alone)).outcome == "identical"


@pytest.mark.parametrize(
    ("low", "high", "relevant", "expected"),
    [
        (0.001, 0.03, None, "better"),
        (-0.03, -0.001, None, "worse"),
        (-0.001, 0.03, None, "cannot tell"),
        (0.0, 0.03, None, "cannot tell"),
        (-0.03, 0.0, None, "cannot tell"),
        (-0.009, 0.009, 0.01, "equivalent"),
        (0.001, 0.009, 0.01, "equivalent"),  # a difference, but no relevant one
        (-0.009, -0.001, 0.01, "equivalent"),
        (-0.009, 0.010, 0.01, "cannot tell"),
        (-0.010, 0.009, 0.01, "cannot tell"),
        (0.001, 0.010, 0.01, "better"),
    ],
)
def test_outcome_by_the_place_of_zero_and_of_the_relevant_difference(low, high, relevant, expected):
    assert outcome_of(low, high, relevant=relevant) == expected
    mirrored = outcome_of(-high, -low, higher_is_better=False, relevant=relevant)
    assert mirrored == expected


def made(outcome, difference, low, high, **options):
    """A verdict with these numbers."""
    about = {"site": "north", "metric": "dice", "method": "Ditto", "relevant": 0.01}
    return Verdict(
        **{**about, **options}, outcome=outcome, difference=difference, low=low, high=high
    )


@pytest.mark.parametrize(
    ("verdict", "relevantly", "little"),
    [
        (made("better", 0.03, 0.01, 0.05), True, False),
        (made("better", 0.03, 0.009, 0.05), False, False),
        (made("better", 0.008, 0.001, 0.015), False, True),
        (made("worse", -0.03, -0.05, -0.01), True, False),
        (made("worse", -0.008, -0.015, -0.001), False, True),
        (made("better", -0.03, -0.05, -0.01, higher_is_better=False), True, False),
        (made("worse", 0.03, 0.01, 0.05, higher_is_better=False), True, False),
        (made("better", 0.03, 0.01, 0.05, relevant=None), False, False),
        (made("equivalent", 0.0, -0.001, 0.001), False, False),
        (made("cannot tell", 0.005, -0.02, 0.03), False, False),
    ],
)
def test_a_gain_or_loss_is_relevant_by_its_nearest_end_and_little_by_its_middle(
    verdict, relevantly, little
):
    assert (verdict.relevantly, verdict.perhaps_little) == (relevantly, little)


@pytest.mark.parametrize(
    ("outcome", "three", "one"),
    [
        ("better", "yes", "yes, this model"),
        ("worse", "no", "no, this model"),
        ("equivalent", "no relevant difference", "no relevant difference"),
        ("cannot tell", "cannot tell", "cannot tell"),
        ("identical", "same model", "same model"),
    ],
)
def test_an_answer_says_whether_it_is_about_this_model(outcome, three, one):
    many = made(outcome, 0.0, 0.0, 0.0, trainings_joined=3, trainings_reference=5)
    few = made(outcome, 0.0, 0.0, 0.0, trainings_joined=9, trainings_reference=2)
    assert (many.answer, few.answer) == (three, one)


def test_what_would_find_the_difference_stands_where_nobody_can_tell(statistics):
    verdict, _ = of_means(statistics, "trainings_decide")
    assert (verdict.patients_needed, verdict.trainings_needed) == (None, 10)
    assert verdict.trainings_differ
    settled, _ = of_means(statistics, "three_trainings")
    assert (settled.patients_needed, settled.trainings_needed) == (None, None)
    given, _ = statistics("one_training")
    unsure = judge(DICE, estimate_mean(np.array(given["joined"]) - 0.02, given["alone"]))
    assert unsure.outcome == "cannot tell"
    bars = error_bars(estimate_mean(given["joined"], given["alone"]))
    assert unsure.patients_needed == bars.patients_needed(0.01375)
    assert unsure.trainings_needed is None


def test_six_patients_that_all_gain_are_better_beside_any_number_of_methods(statistics):
    verdict, _ = of_means(statistics, "six_all_gain")
    table = [verdict] + [
        made("cannot tell", 0.0, -0.1, 0.1, method=f"method {n}", p=0.5) for n in range(9)
    ]
    first: Any = corrected(table)[0]
    assert verdict.p < 0.001
    assert (first.p_holm, first.family) == (pytest.approx(10 * verdict.p), 10)
    assert first.p_holm < 0.05
    assert first.outcome == "better"


def test_names_of_one_model_are_one_test(statistics):
    given, expected = statistics("holm_distinct")
    found, family = holm_over_models(given["p"], given["same_bits"])
    assert family == expected["family"]
    for name, value in expected["p_holm"].items():
        assert found[name] == pytest.approx(value, rel=1e-8)
    assert found["ditto_global"] == found["iopfl_global"] == found["fedavg"]
    (same,) = given["same_bits"]
    table = [
        made(
            "cannot tell", 0.0, -1.0, 1.0, method=name, p=p,
            same_as=tuple(other for other in same if name in same and other != name),
        )
        for name, p in given["p"].items()
    ]  # fmt: skip
    assert {v.method: v.p_holm for v in corrected(table)} == found
    assert {v.family for v in corrected(table)} == {4}


def test_methods_without_a_test_are_not_counted():
    table = [made("identical", 0.0, None, None), made("better", 1.0, 0.5, 1.5, method="x", p=0.01)]
    none, one = corrected(table)
    assert (none.p_holm, none.family) == (None, 1)
    assert one.p_holm == pytest.approx(0.01)
    assert corrected([]) == []


def some_verdicts():
    """A verdict of every kind."""
    rng = np.random.default_rng(5)
    one, three = rng.normal(0.7, 0.1, (2, 9, 1)), rng.normal(0.7, 0.1, (2, 9, 3))
    yield judge(DICE, estimate_mean(*one))
    yield judge(DICE, estimate_mean(*three), same_as=["FedAvg", "IOP-FL global"])
    yield judge(HD95, estimate_mean(three[0] + 1, three[1]), alone_chosen=True)
    yield judge(DICE, estimate_mean([np.nan], [1.0]))
    yield judge(AUC, estimate_auc(one[0], one[1], [1, 0, 0] * 3))


def test_verdicts_travel_as_json_without_loss():
    for verdict in some_verdicts():
        text = json.dumps(as_record(verdict), allow_nan=False)
        arrived = from_record(Verdict, json.loads(text))
        assert arrived == verdict
        assert arrived.sentence == verdict.sentence


def test_estimates_travel_as_json_and_hold_nothing_of_single_patients():
    scores = np.random.default_rng(6).normal(size=(2, 40, 3))
    estimate = estimate_mean(*scores)
    record = as_record(estimate)
    assert from_record(Estimate, json.loads(json.dumps(record))) == estimate
    assert len(json.dumps(record)) < 800
    longer = as_record(estimate_mean(*np.random.default_rng(6).normal(size=(2, 400, 3))))
    assert record.keys() == longer.keys()


def test_numbers_of_verdicts_are_plain():
    for verdict in some_verdicts():
        for value in vars(verdict).values():
            assert type(value) in (str, bool, int, float, tuple, type(None))


@pytest.mark.parametrize(
    "change",
    [{"outcome": "helps"}, {"patients": "8"}, {"low": True}, {"low": float("nan")}, {"extra": 1}],
)
def test_a_record_that_is_no_verdict_is_refused(change):
    (verdict, *_) = some_verdicts()
    with pytest.raises(DataError, match=f"its values of {next(iter(change))} are missing"):
        from_record(Verdict, {**as_record(verdict), **change})
    with pytest.raises(DataError, match="outcome"):
        from_record(Verdict, {k: v for k, v in as_record(verdict).items() if k != "outcome"})
