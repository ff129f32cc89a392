"""Loss, prediction and scores of classification, against plain torch and scikit-learn."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from monai.losses.focal_loss import FocalLoss
from sklearn.metrics import (
    balanced_accuracy_score,
    brier_score_loss,
    recall_score,
    roc_auc_score,
    roc_curve,
)
from torch import nn
from torch.nn import functional

from collegium.core.dataset import Example
from collegium.data.settings import TaskConfig
from collegium.errors import ConfigError, DataError
from collegium.experiment.config.building import task_of
from collegium.experiment.config.experiment import parse_config
from collegium.tasks import ClassificationTask, metrics_of
from collegium.tasks.losses import weighted_focal_loss

LOGITS = torch.tensor([[2.0, -1.0, 0.5], [0.0, 0.3, 0.1], [-1.0, 0.0, 4.0], [1.0, 1.0, 1.0]])
LABELS = torch.tensor([0, 2, 2, 1])


def example(label: int | None, patient: str = "p") -> Example:
    batch = {"image": torch.zeros(1, 2)}
    if label is not None:
        batch["label"] = torch.tensor([label])
    return Example("case7", patient, batch, None)


def rows_of(task: ClassificationTask, chances: Any, labels: Any, *names: str) -> list[Any]:
    """The scores of some cases by the metrics that are named, before they are completed."""
    return [
        task.scores(torch.tensor([chance]), example(int(label)), names or None)
        for chance, label in zip(np.asarray(chances).tolist(), labels, strict=True)
    ]


def test_cross_entropy_is_the_mean_over_cases() -> None:
    expected = np.mean([
        -np.log(np.exp(row[y]) / np.exp(row).sum())
        for row, y in zip(LOGITS.double().numpy(), LABELS.tolist(), strict=True)
    ])  # fmt: skip
    loss = ClassificationTask(3).loss(LOGITS, {"label": LABELS})
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)


def test_weights_count_by_class_and_the_mean_is_over_cases() -> None:
    task = ClassificationTask(3, weights=[1.0, 2.0, 5.0])
    each = functional.cross_entropy(LOGITS, LABELS, reduction="none")
    expected = (each * torch.tensor([1.0, 5.0, 5.0, 2.0])).sum() / 4
    assert float(task.loss(LOGITS, {"label": LABELS})) == pytest.approx(float(expected), rel=1e-6)


def test_the_focal_loss_is_that_of_fed_isic() -> None:
    task = ClassificationTask(3, "focal", weights=[0.5, 2.0, 1.0])
    expected = weighted_focal_loss(LOGITS, LABELS, torch.tensor([0.5, 2.0, 1.0]))
    assert float(task.loss(LOGITS, {"label": LABELS})) == pytest.approx(float(expected))
    p = LOGITS.softmax(1)[torch.arange(4), LABELS].double()
    by_hand = (-torch.tensor([0.5, 1.0, 1.0, 2.0]) * (1 - p) ** 2 * p.log()).mean()
    assert float(expected) == pytest.approx(float(by_hand), rel=1e-6)


def test_weighted_cross_entropy_is_torch_s_sum_over_the_number_of_cases() -> None:
    weights = [1.0, 2.0, 5.0]
    found = ClassificationTask(3, weights=weights).loss(LOGITS, {"label": LABELS})
    summed = functional.cross_entropy(LOGITS, LABELS, weight=torch.tensor(weights), reduction="sum")
    assert float(found) == pytest.approx(float(summed) / 4, rel=1e-6)


def test_the_weighted_focal_loss_is_monai_s_sum_over_the_number_of_cases() -> None:
    weights = [0.5, 2.0, 101.0]
    found = ClassificationTask(3, "focal", weights=weights).loss(LOGITS, {"label": LABELS})
    each = FocalLoss(
        to_onehot_y=True, use_softmax=True, gamma=2.0, weight=weights, reduction="none"
    )(LOGITS, LABELS[:, None])
    assert float(found) == pytest.approx(float(each.sum()) / 4, rel=1e-5)


@pytest.mark.parametrize("loss", ["ce", "focal"])
def test_the_weights_of_a_configuration_reach_the_loss(loss: str) -> None:
    logits, labels = np.array([[2.0, -1.0, 0.5], [0.0, 0.3, 0.1]]), [0, 2]
    task = {"name": "classification", "classes": ["a", "b", "c"], "weights": [3.0, 1.0, 0.25]}
    config = parse_config({
        "name": "x", "federation": {"name": "f", "sites": {"A": {"folder": "A"}}, "task": task},
        "model": "densenet", "algorithms": ["fedavg"], "rounds": 1, "loss": loss,
    })  # fmt: skip
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    p = p[[0, 1], labels]
    expected = (-np.array([3.0, 0.25]) * (1 - p) ** (2 * (loss == "focal")) * np.log(p)).sum() / 2
    batch = {"label": torch.tensor(labels)}
    found = task_of(config).loss(torch.tensor(logits, dtype=torch.float32), batch)
    assert float(found) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ((1.0,), r"task\.weights is \[1\.0\]: give 2 numbers above 0"),
        ((1.0, 2.0, 3.0), r"task\.weights is \[1\.0, 2\.0, 3\.0\]: give 2 numbers above 0"),
        ((1.0, 0.0), r"TaskConfig\.weights: each should be above 0, not \(1\.0, 0\.0\)"),
        ((1.0, -1.0), r"TaskConfig\.weights: each should be above 0, not \(1\.0, -1\.0\)"),
        (
            (1.0, math.inf),
            r"TaskConfig\.weights: each should be finite and above 0, not \(1\.0, inf",
        ),
        (
            (math.nan, 1.0),
            r"TaskConfig\.weights: each should be finite and above 0, not \(nan, 1\.0",
        ),
    ],
)
def test_a_configuration_with_wrong_weights_is_refused(
    weights: tuple[float, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        TaskConfig("classification", ("well", "ill"), weights=weights)


def test_weights_of_a_segmentation_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"task.weights is for classifications: leave it out"):
        TaskConfig(weights=(1.0, 2.0))


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("segmentation", {"prevalence": 0.1}, "task.prevalence are for classifications: leave bo"),
        ("segmentation", {"least_sensitivity": 0.9}, "task.least_sensitivity and task.prevalence"),
        ("classification", {"surface_tolerance": 2.0}, "are for segmentations: leave both"),
        ("classification", {"lesion_overlap": 0.1}, "task.surface_tolerance and task.lesion_over"),
        ("classification", {"prevalence": 0.0}, r"TaskConfig\.prevalence: should be above 0"),
        ("classification", {"prevalence": {"a": 1.0}}, r"TaskConfig\.prevalence: .*below 1"),
    ],
)
def test_settings_of_the_other_kind_of_task_are_refused(
    kind: Any, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        TaskConfig(kind, **settings)


def test_a_prediction_is_the_softmax_in_float32() -> None:
    linear = nn.Linear(2, 3)
    image = torch.tensor([[1.0, -2.0]])
    found = ClassificationTask(3).predict(linear, Example("c", "p", {"image": image}, None))
    logits = (image @ linear.weight.T + linear.bias).detach().numpy()
    torch.testing.assert_close(
        found.detach(), torch.from_numpy(np.exp(logits) / np.exp(logits).sum())
    )


def test_accuracy_and_log_loss_are_of_the_case() -> None:
    row = ClassificationTask(3).scores(torch.tensor([[0.2, 0.7, 0.1]]), example(0))
    assert row["accuracy"] == 0.0
    assert row["log_loss"] == pytest.approx(-math.log(0.2), rel=1e-6)
    assert (
        ClassificationTask(3).scores(torch.tensor([[0.2, 0.7, 0.1]]), example(1))["accuracy"] == 1
    )


def test_a_volume_in_slices_is_scored_by_the_mean_over_them() -> None:
    slices = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.1, 0.9]])
    row = ClassificationTask(2).scores(slices, example(1))
    assert row["log_loss"] == pytest.approx(-math.log(0.6), rel=1e-6)
    assert row["accuracy"] == 1.0


def test_a_chance_of_zero_gives_a_finite_log_loss() -> None:
    row = ClassificationTask(2).scores(torch.tensor([[1.0, 0.0]]), example(1))
    assert row["log_loss"] == pytest.approx(15 * math.log(10))


def test_add_set_scores_adds_auc_and_balanced_accuracy_beside_what_they_are_made_of() -> None:
    rng = np.random.default_rng(0)
    labels, chance = rng.integers(0, 2, 30), rng.random(30)
    task = ClassificationTask(["no", "yes"], metric="auc")
    rows = task.add_set_scores(rows_of(task, np.stack([1 - chance, chance], 1), labels))
    metrics = {"accuracy", "balanced_accuracy", "auc", "log_loss", "brier"}
    assert {*rows[0]} == metrics | {"_class", "_p0", "_p1"}
    assert [row["_class"] for row in rows] == labels.tolist()
    assert [row["_p1"] for row in rows] == pytest.approx(chance, abs=1e-6)
    brier = np.mean([row["brier"] for row in rows])
    assert brier == pytest.approx(brier_score_loss(labels, chance), abs=1e-6)
    auc, balanced = (np.mean([row[name] for row in rows]) for name in ("auc", "balanced_accuracy"))
    assert auc == pytest.approx(roc_auc_score(labels, chance), abs=1e-6)
    assert balanced == pytest.approx(balanced_accuracy_score(labels, chance > 0.5), abs=1e-6)


def test_only_the_metric_asked_for_is_given() -> None:
    task = ClassificationTask(2, metric="auc")
    rows = task.add_set_scores(rows_of(task, [[0.4, 0.6], [0.7, 0.3]], [1, 0], "auc"))
    assert [{name for name in row if name[0] != "_"} for row in rows] == [{"auc"}] * 2
    assert [row["auc"] for row in rows] == [1.0, 1.0]
    assert task.add_set_scores(rows_of(task, [[0.4, 0.6]], [1], "accuracy")) == [
        {"accuracy": 1.0, "_class": 1.0}
    ]


def test_cases_of_one_patient_weigh_as_one() -> None:
    task = ClassificationTask(2)
    rows = rows_of(task, [[0.4, 0.6], [0.7, 0.3], [0.5, 0.5]], [1, 1, 0])
    named = [{"patient": name, **row} for name, row in zip(("a", "a", "b"), rows, strict=True)]
    values = [row["auc"] for row in task.add_set_scores(named)]
    assert (np.mean(values[:2]) + values[2]) / 2 == pytest.approx(0.5)
    assert [row["patient"] for row in task.add_set_scores(named)] == ["a", "a", "b"]


def test_the_brier_score_of_several_classes_is_the_sum_over_them() -> None:
    row = ClassificationTask(3).scores(torch.tensor([[0.2, 0.7, 0.1]]), example(0))
    assert row["brier"] == pytest.approx(0.8**2 + 0.7**2 + 0.1**2, rel=1e-6)


def test_an_area_of_one_class_is_undefined() -> None:
    task = ClassificationTask(2)
    rows = task.add_set_scores(rows_of(task, [[0.4, 0.6], [0.7, 0.3]], [1, 1]))
    assert [row["auc"] for row in rows] == [None, None]
    assert np.mean([row["balanced_accuracy"] for row in rows]) == 0.5


def test_no_case_has_no_scores() -> None:
    assert ClassificationTask(2).add_set_scores([]) == []


DECISIONS = ("sensitivity", "specificity", "ppv", "npv")


def decided(
    task: ClassificationTask, test: Any, labels: Any, validation: Any, true: Any
) -> list[Any]:
    """The scores of test cases, with thresholds from validation cases."""
    return task.add_set_scores(
        rows_of(task, test, labels), rows_of(task, validation, true, "accuracy")
    )


def two(chances: Any) -> Any:
    return np.stack([1 - np.asarray(chances), chances], 1)


def test_decisions_are_made_at_the_threshold_of_the_validation_cases() -> None:
    task = ClassificationTask(["no", "yes"], metrics=DECISIONS, prevalence=0.1)
    validation, true = [0.9, 0.7, 0.6, 0.3], [1, 1, 0, 0]  # 0.7 tells them apart
    test, labels = [0.95, 0.71, 0.69, 0.2, 0.8, 0.1, 0.2, 0.3], [1, 1, 1, 1, 0, 0, 0, 0]
    rows = decided(task, two(test), labels, two(validation), true)
    assert [row["threshold"] for row in rows] == pytest.approx([0.7] * 8, abs=1e-6)
    assert [row.get("sensitivity") for row in rows] == [1, 1, 0, 0, None, None, None, None]
    assert [row.get("specificity") for row in rows] == [None, None, None, None, 0, 1, 1, 1]
    assert not any({"sensitivity", "specificity"} <= row.keys() for row in rows)
    # sensitivity 1/2 and specificity 3/4 at a prevalence of 1/10
    assert [row["ppv"] for row in rows] == pytest.approx([0.05 / (0.05 + 0.225)] * 8)
    assert [row["npv"] for row in rows] == pytest.approx([0.675 / (0.675 + 0.05)] * 8)
    assert {name for row in rows for name in row if name[0] != "_"} == task.units.keys()
    declared = metrics_of(task)
    assert all(declared[n].holds(v, 8) for row in rows for n, v in row.items() if v is not None)


def test_a_threshold_reaches_the_sensitivity_that_is_asked_for() -> None:
    validation, true = [0.9, 0.7, 0.6, 0.3, 0.2], [1, 0, 0, 1, 0]
    for least, expected in ((None, 0.9), (0.5, 0.9), (0.6, 0.3)):
        task = ClassificationTask(2, metrics=["sensitivity"], least_sensitivity=least)
        (row,) = decided(task, two([0.5]), [1], two(validation), true)
        assert row["threshold"] == pytest.approx(expected, abs=1e-6)
        assert row["sensitivity"] == (expected < 0.5)


@pytest.mark.parametrize(("validation", "true"), [([], []), ([0.4, 0.6], [1, 1])])
def test_without_a_threshold_decisions_are_undefined(validation: Any, true: Any) -> None:
    task = ClassificationTask(2, metrics=DECISIONS, prevalence=0.5)
    rows = decided(task, two([0.4, 0.6]), [0, 1], np.reshape(two(validation), (-1, 2)), true)
    assert [[row[name] for name in (*DECISIONS, "threshold")] for row in rows] == [[None] * 5] * 2
    assert task.add_set_scores(rows_of(task, two([0.4]), [0]))[0]["threshold"] is None


def test_where_no_case_is_of_a_class_what_is_about_it_is_undefined_of_all() -> None:
    task = ClassificationTask(2, metrics=DECISIONS, prevalence=0.5)
    rows = decided(task, two([0.4, 0.8]), [0, 0], two([0.2, 0.6]), [0, 1])
    assert [(row["sensitivity"], row["specificity"]) for row in rows] == [(None, 1), (None, 0)]
    assert [(row["ppv"], row["npv"]) for row in rows] == [(None, None)] * 2


def test_predictive_values_weigh_patients_alike() -> None:
    task = ClassificationTask(2, metrics=["ppv"], prevalence=0.5)
    rows = rows_of(task, two([0.9, 0.9, 0.1, 0.7, 0.1]), [1, 1, 1, 0, 0])
    named = [{"patient": n, **row} for n, row in zip("aabcd", rows, strict=True)]
    found = task.add_set_scores(named, rows_of(task, two([0.2, 0.6]), [0, 1]))
    # patient a is found and b is not; c is not cleared and d is
    assert found[0]["ppv"] == pytest.approx(0.5)
    assert "sensitivity" not in found[0]


def test_each_of_several_classes_is_looked_for_against_the_rest() -> None:
    rng = np.random.default_rng(1)
    labels, true = rng.integers(0, 3, 40), rng.integers(0, 3, 30)
    chances, validation = (
        rng.dirichlet(np.ones(3), len(some)) * 0.6 + 0.4 * np.eye(3)[some]
        for some in (labels, true)
    )
    task = ClassificationTask(["a", "b", "c"], metrics=(*DECISIONS, "ece"), prevalence={"b": 0.2})
    rows = decided(task, chances, labels, validation, true)
    for c, name in enumerate("abc"):
        false, right, thresholds = roc_curve(true == c, validation[:, c], drop_intermediate=False)
        cut = thresholds[1:][(right - false)[1:].argmax()]
        above = chances[:, c] >= cut - 1e-6
        found = [np.mean([r[f"{m}_{name}"] for r in rows if f"{m}_{name}" in r]) for m in
                 ("sensitivity", "specificity", "threshold")]  # fmt: skip
        expected = (recall_score(labels == c, above), recall_score(labels != c, ~above), cut)
        assert found == pytest.approx(expected, abs=1e-6)
    assert {n for n in task.units if "pv" in n} == {"ppv_b", "npv_b"}
    assert np.mean([row["ece"] for row in rows]) > 0


def test_the_calibration_error_has_the_bins_of_the_task() -> None:
    chances, labels = [0.1, 0.3, 0.6, 0.8], [0, 1, 0, 1]
    for bins, expected in ((1, abs(0.45 - 0.5)), (2, (abs(0.2 - 0.5) + abs(0.7 - 0.5)) / 2)):
        task = ClassificationTask(2, metrics=["ece"], calibration_bins=bins)
        rows = task.add_set_scores(rows_of(task, two(chances), labels))
        assert np.mean([row["ece"] for row in rows]) == pytest.approx(expected, abs=1e-6)


def test_only_the_headline_is_computed_on_validation_cases() -> None:
    task = ClassificationTask(2, metrics=(*DECISIONS, "ece"), prevalence=0.5)
    rows = task.add_set_scores(rows_of(task, two([0.4, 0.7]), [1, 0], "accuracy"))
    assert [row.keys() for row in rows] == [{"accuracy", "_class"}] * 2


@pytest.mark.parametrize("shape", [(4, 2), (4, 3, 8, 8), (4,)])
def test_a_network_with_other_outputs_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"let it return \(cases, 3\)"):
        ClassificationTask(3).loss(torch.zeros(shape), {"label": LABELS})


def test_a_network_that_gives_no_tensor_is_refused() -> None:
    with pytest.raises(ConfigError, match="the model returns list"):
        ClassificationTask(3).loss([LOGITS], {"label": LABELS})  # type: ignore[arg-type]


def test_a_case_without_class_cannot_be_scored() -> None:
    with pytest.raises(DataError, match="'case7' has no class"):
        ClassificationTask(2).scores(torch.tensor([[0.5, 0.5]]), example(None))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"loss": "dice"}, "one of ce, focal"),
        ({"metric": "log_loss"}, "accuracy, balanced_accuracy or auc"),
        ({"weights": [1.0]}, "give 2 numbers above 0"),
        ({"weights": [1.0, 0.0]}, "give 2 numbers above 0"),
        ({"weights": [1.0, math.nan]}, "give 2 numbers above 0"),
        ({"metrics": ["dice"]}, "no metric 'dice' to add: choose task.metrics from sensiti"),
        ({"metrics": ["ppv"]}, "ppv and npv need a prevalence: set task.prevalence, such as"),
        ({"prevalence": 0.1}, "prevalence is of ppv and npv: list them in task.metrics"),
        ({"metrics": ["npv"], "prevalence": 1.0}, "prevalence is 1.0: give numbers between 0 and"),
        ({"metrics": ["npv"], "prevalence": {"1": 0.1}}, "give the number of the second class"),
        (
            {"classes": 3, "metrics": ["npv"], "prevalence": 0.1},
            "prevalence is 0.1: give one for each class by name",
        ),
        (
            {"classes": 3, "metrics": ["npv"], "prevalence": {"x": 0.1}},
            "prevalence names 'x': choose from 0, 1, 2",
        ),
        ({"least_sensitivity": 0.9}, "no metric needs one: list sensitivity and specificity"),
        (
            {"metrics": ["sensitivity"], "least_sensitivity": 0.0},
            "least_sensitivity is 0.0: give a number above 0, up to 1",
        ),
        ({"calibration_bins": 0}, "calibration_bins is 0: give 1 or more"),
    ],
)
def test_what_cannot_work_is_refused_with_what_can(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ClassificationTask(**{"classes": 2, **settings})
