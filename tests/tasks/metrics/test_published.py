"""The scores of papers' tables, against numbers computed independently."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sklearn.metrics import jaccard_score

from collegium.tasks.metrics.overlap import dice, iou, structures_of
from collegium.tasks.metrics.published import label_iou, micro_iou, slice_dice_legacy


def test_dice_and_the_legacy_metric_are_those_of_iop_fl(golden) -> None:
    case = golden("dice_conventions")
    pred, true = (torch.tensor(case["inputs"][key]) for key in ("pred", "gt"))
    expected, atol = case["expected"], case["atol"]
    assert slice_dice_legacy(pred, true) == pytest.approx(expected["repo_metric"], abs=atol)
    assert dice(structures_of(pred, true)) == pytest.approx(expected["volume_fg"], abs=1e-9)
    per_slice = [dice(structures_of(p, t)) for p, t in zip(pred, true, strict=True)]
    assert per_slice == pytest.approx(expected["per_slice_fg"], abs=1e-9)


def test_the_legacy_metric_scores_an_absent_class_zero() -> None:
    empty = torch.zeros(3, 4, 4, dtype=torch.int64)
    assert slice_dice_legacy(empty, empty) == pytest.approx(0.5, abs=1e-5)


def test_the_ious_of_pfednet(golden: Callable[[str], dict[str, Any]]) -> None:
    case = golden("iou_metrics")
    pred, label = (torch.tensor(case["inputs"][key]) for key in ("pred", "label"))
    expected, atol = case["expected"], case["atol"]
    assert micro_iou(pred, label) == pytest.approx(expected["iou"], abs=atol)
    assert label_iou(pred, label) == pytest.approx(expected["label_iou"], abs=atol)
    assert label_iou(pred, label) == iou(structures_of(pred, label))


def test_the_ious_of_pfednet_count_a_confusion_of_two_classes_twice() -> None:
    found, true = torch.tensor([0, 0, 0, 1, 2, 2]), torch.tensor([0, 0, 0, 1, 1, 2])
    # micro: 5 of 6 are right; without class 0: 2 right, 3 found and 3 true
    assert micro_iou(found, true) == pytest.approx(5 / (12 - 5))
    assert label_iou(found, true) == pytest.approx(2 / (3 + 3 - 2))
    nothing = torch.zeros(3, dtype=torch.int64)
    assert micro_iou(nothing, nothing) == 1.0
    assert label_iou(nothing, nothing) is None


def test_the_most_frequent_class_is_left_out_whichever_it_is() -> None:
    found, true = torch.tensor([1, 1, 1, 0]), torch.tensor([1, 1, 0, 0])
    assert label_iou(found, torch.tensor([1, 1, 1, 0])) == 1.0
    assert label_iou(found, true) == pytest.approx(2 / 3)  # a tie leaves out class 0


@pytest.mark.parametrize("seed", range(10))
def test_the_ious_are_those_of_scikit_learn(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    true = torch.multinomial(torch.tensor([0.2, 0.5, 0.2, 0.1]), 300, True, generator=rng)
    found = torch.where(torch.rand(300, generator=rng) < 0.7, true, true.roll(1))
    assert micro_iou(found, true) == pytest.approx(jaccard_score(true, found, average="micro"))
    rarer = [c for c in range(4) if c != int(true.bincount().argmax())]
    expected = jaccard_score(true, found, labels=rarer, average="micro")
    assert label_iou(found, true) == pytest.approx(expected)


def test_nothing_to_score_has_no_iou() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    assert micro_iou(nothing, nothing) is None
    assert label_iou(nothing, nothing) is None
