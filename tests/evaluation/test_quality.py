import math

import numpy as np
import pytest
from scipy import stats

from collegium.evaluation.comparisons import RunComparisons, joining_table
from collegium.evaluation.quality import (
    LEAST_RISE,
    arms_of,
    is_constant,
    is_unusable,
    qualities,
    still_rising,
)
from collegium.evaluation.results import VerdictSettings, labels_of, results_frame
from collegium.evaluation.scores import UNUSABLE, final_scores

ROUNDS = range(1, 31)


@pytest.mark.parametrize(
    ("mean", "limit", "higher", "found"),
    [(0.49, 0.5, True, True), (0.5, 0.5, True, False), (None, 0.5, True, False),
     (0.1, None, True, False), (60.0, 50.0, False, True), (40.0, 50.0, False, False)],
)  # fmt: skip
def test_a_mean_on_the_wrong_side_of_the_limit_is_unusable(mean, limit, higher, found):
    assert is_unusable(mean, limit, higher_is_better=higher) == found


def test_the_limit_of_iou_is_that_of_dice():
    """IoU = Dice / (2 - Dice)."""
    assert UNUSABLE["iou"] == pytest.approx(UNUSABLE["dice"] / (2 - UNUSABLE["dice"]))


def test_a_straight_rise_counts_if_as_many_rounds_more_would_gain_enough():
    """Ten rounds more at 0.001 a round gain 0.01."""
    for step, found in ((0.00101, True), (0.00099, False), (-0.01, False)):
        assert still_rising(ROUNDS, [0.5 + step * n for n in ROUNDS], 0.01) == found


def test_only_the_last_third_counts():
    saturated = [min(n, 20) / 30 for n in ROUNDS]
    late = [0.5 + 0.01 * max(n - 20, 0) for n in ROUNDS]
    assert not still_rising(ROUNDS, saturated)
    assert still_rising(ROUNDS, late)


def test_few_evaluated_rounds_say_nothing():
    assert not still_rising(range(1, 12), [0.1 * n for n in range(1, 12)])
    assert still_rising(range(1, 13), [0.1 * n for n in range(1, 13)])


def test_the_slope_must_exceed_two_standard_errors_as_scipy_has_them():
    rng, differing = np.random.default_rng(5), 0
    for _ in range(200):
        y = 0.5 + 0.002 * np.arange(30) + rng.normal(0, 0.02, 30)
        fit = stats.linregress(np.arange(21, 31), y[20:])
        expected = fit.slope * 10 >= LEAST_RISE and fit.slope > 2 * fit.stderr
        assert still_rising(ROUNDS, y.tolist()) == expected
        differing += expected
    assert 10 < differing < 190


def test_flat_noise_is_seldom_called_rising():
    """One-sided, t above 2 with 8 degrees of freedom: 4 %, at any size of the noise."""
    rng = np.random.default_rng(1)
    found = [still_rising(ROUNDS, rng.normal(0.8, 0.05, 30).tolist()) for _ in range(1000)]
    assert 0.02 < np.mean(found) < 0.06


def test_predictions_of_one_class_are_constant():
    assert is_constant({"_p0": [0.6, 0.9, 0.7], "_p1": [0.4, 0.1, 0.3], "auc": [1.0, 1.0, 1.0]})
    assert not is_constant({"_p0": [0.6, 0.4], "_p1": [0.4, 0.6]})
    assert not is_constant({"_p0": [0.6], "_p1": [0.4]})  # of one case nothing can be said
    assert not is_constant({"_p0_0": [0.6, 0.6], "_p0_1": [0.6, 0.6]})  # of several models


def test_empty_masks_are_constant_and_misplaced_ones_are_not():
    nan = math.nan
    assert is_constant({"dice": [0.0, 0.0, nan], "hd95": [nan, nan, nan]})
    assert is_constant({"dice": [0.0, 0.0]})
    assert not is_constant({"dice": [0.0, 0.0], "hd95_px": [12.0, nan]})
    assert not is_constant({"dice": [0.0, 0.1], "hd95": [nan, nan]})
    assert not is_constant({"accuracy": [1.0, 1.0]})


def test_either_arm_or_both_are_named():
    found = [arms_of(joined=j, reference=r) for j in (False, True) for r in (False, True)]
    assert found == ["", "reference", "joined", "both"]


def rows_of(scores):
    """FedAvg rises to the end, and both methods have a Dice around 0.2."""
    rows = []
    for algorithm, model, base in (("local", "personal", 0.17), ("fedavg", "global", 0.21)):
        own = 0.001 if algorithm == "fedavg" else 0.0
        values = [base + 0.002 * (k % 3) + own * (k % 2) for k in range(12)]
        rows += scores(algorithm, model, "A", values)
        about = {**rows[-1], "case": "", "patient": "", "split": "val"}
        step = 0.02 if algorithm == "fedavg" else 0.0
        rows += [{**about, "round": n, "value": 0.1 + step * n} for n in ROUNDS]
    return rows


def test_a_gain_among_unusable_models_is_never_said_without_it(scores):
    (found,) = joining_table(results_frame(rows_of(scores)), "dice").by_site
    verdict = found.verdict
    assert verdict.outcome == "better"
    assert verdict.answer == "yes, this model, both unusable"
    assert verdict.sentence.endswith(
        "Both are unusable: their means are below 0.5. FedAvg global was still rising on "
        "validation when training ended."
    )
    settings = VerdictSettings(unusable={"dice": 0.2})
    (found,) = joining_table(results_frame(rows_of(scores)), "dice", settings=settings).by_site
    assert found.verdict.answer == "yes, this model"
    assert "Training alone is unusable: its mean is below 0.2." in found.verdict.sentence


def test_what_holds_of_all_metrics_is_found_once(scores, monkeypatch):
    rows = rows_of(scores)
    rows += [{**row, "metric": "iou", "value": row["value"] / 2} for row in rows]
    results, calls = results_frame(rows), []
    alone = {m: [c.verdict for c in joining_table(results, m).comparisons] for m in ("dice", "iou")}

    def counted(*arguments):
        calls.append(arguments)
        return qualities(*arguments)

    monkeypatch.setattr("collegium.evaluation.comparisons.qualities", counted)
    run = RunComparisons(results, labels_of({}, results))
    assert alone == {m: [c.verdict for c in run.joining(m, "").comparisons] for m in alone}
    assert alone["dice"] != alone["iou"]
    assert len(calls) == 1


def test_a_training_without_any_mask_is_said_to_have_collapsed(scores):
    rows = scores("local", "personal", "A", [0.8 + 0.01 * (k % 3) for k in range(8)])
    rows += scores("fedavg", "global", "A", [0.0] * 8)
    results = results_frame(rows)
    assert [*qualities(results, final_scores(results, hidden=True), {})] == [
        (("fedavg", "global"), "A")
    ]
    (found,) = joining_table(results, "dice").by_site
    assert found.verdict.collapsed == "joined"
    assert (
        "FedAvg global has collapsed: a training of it predicts the same of all test cases."
        in found.verdict.sentence
    )
