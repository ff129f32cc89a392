"""The divergence by which one model learns from the predictions of others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from collegium.core.lazy import functional, torch
from collegium.tasks import Task

if TYPE_CHECKING:
    from torch import Tensor


def divergence(
    student: Tensor,
    teacher: Tensor,
    task: Task,
    *,
    temperature: float = 1.0,
    mask: Tensor | None = None,
) -> Tensor:
    """Return KL(teacher || student) of the classes' probabilities, the mean over all pixels.

    No gradient flows to the teacher. Regions, which may overlap, are two classes each, inside and
    outside, and count as pixels of their own. A single output that is no region is the mean of a
    normal distribution of variance 1, for which the divergence is half the squared difference.

    Args:
        student: logits, (B, channels, *spatial).
        teacher: logits of the same shape.
        task: has an attribute ``regions`` if the channels are regions.
        temperature: divides both logits.
        mask: the pixels that count, bool (B, *spatial); None: all.
    """
    student, teacher = student / temperature, teacher.detach() / temperature
    regions = bool(getattr(task, "regions", None))
    if student.shape[1] == 1 and not regions:
        apart = (student - teacher).square().squeeze(1) / 2
    else:
        q, p = (_log_probabilities(logits, regions=regions) for logits in (student, teacher))
        apart = functional.kl_div(q, p, reduction="none", log_target=True).sum(1)
    if mask is None:
        return apart.mean()
    inside = mask.unsqueeze(1).expand_as(apart) if apart.ndim > mask.ndim else mask
    return (apart * inside).sum() / inside.sum().clamp(min=1)


def _log_probabilities(logits: Tensor, *, regions: bool) -> Tensor:
    """Return log-probabilities of exclusive classes, or of outside and inside of each region.

    Args:
        logits: (B, channels, *spatial).
        regions: whether the channels are regions.

    Returns:
        (B, classes, *spatial), or (B, 2, regions, *spatial).
    """
    if not regions:
        return logits.log_softmax(1)
    return torch.stack([functional.logsigmoid(-logits), functional.logsigmoid(logits)], dim=1)
