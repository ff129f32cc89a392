import math

import numpy as np
import pytest

from collegium.evaluation.results import results_frame
from collegium.evaluation.scores import (
    final_scores,
    group_means,
    headline_metric,
    higher_is_better,
    is_compared,
    is_ranked,
    method_name,
    of_metric,
    position,
    rows_of,
    site_means,
    unit_of,
    variations,
)


def test_means_are_over_cases_then_patients_by_seed_and_site(scores):
    rows = scores("a", "global", "A", [0.2, 0.4, 0.9, None], patients=["p", "p", "q", "r"])
    rows += scores("a", "global", "B", [None]) + scores("a", "global", "A", [0.8], seed=1)
    means = site_means(results_frame(rows))
    found = {(row.seed, row.site): row.value for row in rows_of(means)}
    assert list(found) == [(0, "A"), (0, "B"), (1, "A")]
    assert found[0, "A"] == pytest.approx((0.3 + 0.9) / 2)
    assert math.isnan(found[0, "B"])
    overall = group_means(means, ["site"])
    assert overall["value"].tolist() == pytest.approx([0.7, math.nan], nan_ok=True)


def test_means_are_the_same_to_the_last_bit_in_any_order_of_rows(scores):
    rng = np.random.default_rng(0)
    rows = scores("a", "global", "A", rng.normal(0, 1e3, 200) ** 3, patients=["p"] * 200)
    expected = site_means(results_frame(rows))["value"].tolist()
    for _ in range(5):
        mixed = [rows[place] for place in rng.permutation(len(rows))]
        assert site_means(results_frame(mixed))["value"].tolist() == expected
    assert expected == [math.fsum(row["value"] for row in rows) / 200]


def test_training_alone_stands_first_then_the_order_given_then_names():
    keys = [("x", "global"), ("ditto", "personal"), ("ditto", "global"), ("local", "personal"),
            ("fedavg", "tent"), ("fedavg", "none")]  # fmt: skip
    assert sorted(keys, key=lambda key: position(key, ["fedavg", "ditto"])) == [
        ("local", "personal"), ("fedavg", "none"), ("fedavg", "tent"), ("ditto", "global"),
        ("ditto", "personal"), ("x", "global"),
    ]  # fmt: skip


def test_the_unit_is_that_of_the_scores(scores):
    assert unit_of(results_frame(scores("a", "global", "A", [3.0], metric="hd95", unit="mm"))) == (
        "mm"
    )
    assert unit_of(results_frame([])) == ""


def test_final_scores_are_those_of_single_cases_of_one_setting_or_all(scores):
    rows = scores("fedavg", "global", "A", [0.5])
    rows += scores("fedavg", "global", "A", [0.9], variation="clients-2")
    rows += scores("fedavg", "global", "A", [0.9], split="val")
    rows += [{**rows[0], "case": ""}, {**rows[0], "model": ""}]
    results = results_frame(rows)
    assert len(final_scores(results)) == 2
    assert final_scores(results, variation="clients-2")["value"].tolist() == [0.9]
    assert final_scores(results, "iou").empty
    assert final_scores(results, where="outside").empty


def test_names_are_spelled_as_in_the_field_and_own_labels_kept():
    assert method_name("fedavg", "global") == "FedAvg global"
    assert method_name("lcfed", "personal") == "LC-Fed personal"
    assert method_name("fedlws", "global") == "FedLWS global"
    assert method_name("condist", "global") == "ConDistFL global"
    assert method_name("ditto lam=1", "personal") == "ditto lam=1 personal"


def test_names_outside_leave_no_adapter_out():
    assert method_name("scaffold", "none", "outside") == "SCAFFOLD"
    assert method_name("my run", "tent lr=0.1", "outside") == "my run + tent lr=0.1"
    assert method_name("ditto", "personal", "inside") == "Ditto personal"


def test_the_headline_is_what_selects_models_or_else_what_was_scored(outside):
    scored = outside("fedavg", "none", "A", [9.0], metric="hd95")
    about = {"experiment": "e", "algorithm": "fedavg", "seed": 0, "round": 1, "site": "A",
             "value": 1.0}  # fmt: skip
    loss = {**about, "split": "train", "metric": "loss"}
    valid = {**about, "split": "val", "model": "global", "metric": "dice"}
    assert headline_metric(results_frame([loss])) == "loss"
    assert headline_metric(results_frame([loss, *scored])) == "hd95"
    assert headline_metric(results_frame([*scored, loss, valid])) == "dice"


def test_settings_stand_in_the_order_of_their_numbers(scores):
    names = ["tau=0.25", "tau=0.5", "tau=0.05", "tau=1", "no loss", "clients-10", "clients-2", ""]
    rows = [row for name in names for row in scores("a", "global", "A", [0.1], variation=name)]
    assert variations(results_frame(rows)) == (
        "", "clients-2", "clients-10", "no loss", "tau=0.05", "tau=0.25", "tau=0.5", "tau=1",
    )  # fmt: skip
    assert variations(results_frame([])) == ()


def test_direction_of_a_metric_by_unit_or_name():
    assert higher_is_better("dice")
    assert higher_is_better("negative_loss")
    assert not higher_is_better("loss")
    assert not higher_is_better("log_loss")
    assert not higher_is_better("brier")
    assert not higher_is_better("hd95_vessel")
    assert not higher_is_better("anything", "mm")
    assert not higher_is_better("lesion_false_positives_liver")
    assert higher_is_better("lesion_sensitivity")
    assert not higher_is_better("assd_px_liver")


def test_a_volume_difference_with_its_sign_has_no_better_and_worse():
    unranked = ("volume_difference", "volume_difference_liver", "relative_volume_difference")
    assert not any(is_ranked(metric) or is_compared(metric) for metric in unranked)
    assert is_ranked("lesion_false_positives")
    assert is_compared("dice")


def test_a_structure_has_the_of_metric_of_its_metric_or_its_own():
    relevant = {"dice": 0.01, "dice_vein": 0.02, "log_loss": 0.1}
    found = [of_metric(m, relevant) for m in ("dice", "dice_artery", "dice_vein", "log_loss")]
    assert found == [0.01, 0.01, 0.02, 0.1]
    assert of_metric("hd95", relevant) is None
    two = {"dice": 0.01, "surface_dice": 0.03}
    assert of_metric("surface_dice_vein", two) == 0.03
    assert of_metric("surface_dice", {"dice": 0.01}) is None
