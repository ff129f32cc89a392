"""Scores as papers and their released code compute them, to compare with their tables.

They count the background, or leave out a class that the data decide. A run has `micro_iou` and
`label_iou`, of a case, where `task.metrics` or `task.metric` names them.
"""

from __future__ import annotations

from collegium.core.lazy import torch


def slice_dice_legacy(
    prediction: torch.Tensor, label: torch.Tensor, *, classes: int = 2, eps: float = 1e-5
) -> float:
    """Return the "Dice" of the released code of IOP-FL and GRACE, to compare with their tables.

    Hard Dice of every slice and every class, *the background included*, averaged over all. With
    `eps` in the denominator only, a class absent from both counts as 0. As the background scores
    about 0.99, a foreground Dice of 0.85 reads 0.92 here. The authors average over batches of
    slices; here every slice weighs the same.

    Args:
        prediction: Predicted classes, (slices, *spatial).
        label: True classes, of the same shape.
        classes: Number of classes, the background included.
        eps: Added to the denominator, in pixels.

    Returns:
        The mean over slices and classes.
    """
    space = list(range(1, label.ndim))
    per_class: list[torch.Tensor] = []
    for index in range(classes):
        found, true = prediction == index, label == index
        both = (found & true).sum(dim=space, dtype=torch.float64)
        either = found.sum(dim=space) + true.sum(dim=space)
        per_class.append(2 * both / (either + eps))
    return float(torch.stack(per_class).mean())


def micro_iou(prediction: torch.Tensor, label: torch.Tensor) -> float | None:
    """Return the "IoU" of pFedNet's tables: accuracy / (2 - accuracy), the background included.

    It is the intersection over the union of all classes taken together, where a wrong voxel counts
    in the union twice.

    Args:
        prediction: Predicted classes, of any shape.
        label: True classes, of the same shape.

    Returns:
        A score in [0, 1], or None if there is no voxel.
    """
    correct = int((prediction == label).sum())
    return correct / (2 * label.numel() - correct) if label.numel() else None


def label_iou(prediction: torch.Tensor, label: torch.Tensor) -> float | None:
    """Return the "label IoU" of pFedNet's tables: `micro_iou` without the most frequent true class.

    With two classes it is the ordinary IoU of the rarer one.

    Args:
        prediction: Predicted classes, of any shape.
        label: True classes, of the same shape; of two equally frequent ones the lower is left out.

    Returns:
        A score in [0, 1], or None if no other class is present on either side.
    """
    if not label.numel():
        return None
    values, counts = torch.unique(label, return_counts=True)
    frequent = values[counts.argmax()]
    found, true = prediction != frequent, label != frequent
    both = int((found & true & (prediction == label)).sum())
    either = int(found.sum()) + int(true.sum()) - both
    return both / either if either else None
