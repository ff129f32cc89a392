"""The divergence between predictions, against its definition in numpy."""

from typing import Any

import numpy as np
import pytest
import torch

from collegium.tasks import ClassificationTask, SegmentationTask
from collegium.training.distillation import divergence


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


@pytest.fixture
def logits() -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(3)
    student, teacher = (torch.tensor(rng.normal(0, 2, (2, 3, 4, 5))) for _ in range(2))
    return student, teacher


def by_pixel(student: Any, teacher: Any) -> Any:
    """KL(teacher || student) of exclusive classes, which are axis 1."""
    q, p = (np.exp(z) / np.exp(z).sum(1, keepdims=True) for z in (student, teacher))
    return (p * np.log(p / q)).sum(1)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_of_classes_it_is_the_mean_over_pixels(logits: Any, temperature: float) -> None:
    student, teacher = logits
    found = divergence(student, teacher, SegmentationTask(3), temperature=temperature)
    wanted = by_pixel(student.numpy() / temperature, teacher.numpy() / temperature).mean()
    assert float(found) == pytest.approx(wanted, rel=1e-10)


def test_pixels_outside_the_mask_do_not_count(logits: Any) -> None:
    student, teacher = logits
    mask = torch.zeros(2, 4, 5, dtype=torch.bool)
    mask[0, :2] = mask[1, 3, 1:] = True
    found = divergence(student, teacher, SegmentationTask(3), mask=mask)
    wanted = by_pixel(student.numpy(), teacher.numpy())[mask.numpy()].mean()
    assert float(found) == pytest.approx(wanted, rel=1e-10)
    nothing = divergence(student, teacher, SegmentationTask(3), mask=torch.zeros_like(mask))
    assert float(nothing) == 0


def test_regions_are_two_classes_each(logits: Any) -> None:
    student, teacher = logits
    task = SegmentationTask(4, regions={"a": (1, 2, 3), "b": (2, 3), "c": (3,)})
    q, p = sigmoid(student.numpy()), sigmoid(teacher.numpy())
    apart = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
    assert float(divergence(student, teacher, task)) == pytest.approx(apart.mean(), rel=1e-9)
    mask = torch.zeros(2, 4, 5, dtype=torch.bool)
    mask[1, 2, :3] = True
    found = float(divergence(student, teacher, task, mask=mask))
    assert found == pytest.approx(apart[1, :, 2, :3].mean(), rel=1e-9)


def test_a_single_output_is_the_mean_of_a_normal_distribution() -> None:
    student, teacher = torch.tensor([[1.0], [4.0]]), torch.tensor([[3.0], [4.5]])
    found = divergence(student, teacher, ClassificationTask(2), temperature=0.5)
    assert float(found) == pytest.approx(((2.0 / 0.5) ** 2 / 2 + (0.5 / 0.5) ** 2 / 2) / 2)


def test_no_gradient_flows_to_the_teacher(logits: Any) -> None:
    student, teacher = (tensor.requires_grad_() for tensor in logits)
    divergence(student, teacher, SegmentationTask(3)).backward()
    assert student.grad is not None
    assert teacher.grad is None
