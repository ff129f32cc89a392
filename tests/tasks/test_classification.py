"""Loss, prediction and scores of classification, against plain torch and scikit-learn."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from monai.losses.focal_loss import FocalLoss
from sklearn.metrics import balanced_accuracy_score, brier_score_loss, roc_auc_score
from torch import nn
from torch.nn import functional

from collegium.core.dataset import Example
from collegium.data.settings import TaskConfig
from collegium.errors import ConfigError, DataError
from collegium.experiment.config.building import task_of
from collegium.experiment.config.experiment import parse_config
from collegium.tasks import ClassificationTask
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
    ],
)
def test_what_cannot_work_is_refused_with_what_can(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ClassificationTask(2, **settings)
