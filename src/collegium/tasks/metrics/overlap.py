"""Metrics of one segmented case: hard overlap and surface distance, inside the field of view.

A structure is a class, or a region of several classes. The rules for empty structures of a case:

* absent from truth and prediction: undefined, and left out of the mean over structures;
* absent from one of the two only (missed, or a false alarm): Dice and IoU are 0, and HD95 is
  undefined *for the whole case*, since a mean over the other structures would hide the failure.

An undefined score is `None`. It is never averaged and never taken as 0 or 1; code that averages
counts the undefined cases and reports them.

Truth and prediction are integer tensors of one shape, the shape of the case; class 0 is the
background. Both are cleared outside the mask before anything is measured.

pFedNet's paper reports `micro_iou`, `label_iou` and `sdwd`; no run selects models by them.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

Regions = Sequence[Sequence[int]]
"""The classes of each region."""


def dice(
    prediction: torch.Tensor,
    label: torch.Tensor,
    *,
    classes: int = 2,
    mask: torch.Tensor | None = None,
    regions: Regions | None = None,
) -> float | None:
    """Hard Dice, the mean over the structures that are defined.

    Args:
        prediction: Predicted classes, of any shape.
        label: True classes, of the same shape.
        classes: Number of classes, the background included.
        mask: Where the score counts, a boolean tensor of the same shape; None: everywhere.
        regions: The classes of each structure; None: every foreground class is a structure.

    Returns:
        A score in [0, 1], or None if no structure is present.
    """
    return _mean(_overlaps(prediction, label, classes, mask, regions, jaccard=False))


def iou(
    prediction: torch.Tensor,
    label: torch.Tensor,
    *,
    classes: int = 2,
    mask: torch.Tensor | None = None,
    regions: Regions | None = None,
) -> float | None:
    """Hard intersection over union, the mean over the structures that are defined.

    Args:
        prediction: Predicted classes, of any shape.
        label: True classes, of the same shape.
        classes: Number of classes, the background included.
        mask: Where the score counts, a boolean tensor of the same shape; None: everywhere.
        regions: As in `dice`.

    Returns:
        A score in [0, 1], or None if no structure is present.
    """
    return _mean(_overlaps(prediction, label, classes, mask, regions, jaccard=True))


def hd95(
    prediction: torch.Tensor,
    label: torch.Tensor,
    *,
    classes: int = 2,
    mask: torch.Tensor | None = None,
    spacing: Sequence[float] | None = None,
    regions: Regions | None = None,
) -> float | None:
    """The 95th percentile of the Hausdorff distance, the mean over the structures present.

    The larger of the two directed 95th percentiles of the distances from one surface to the other.
    A structure that the mask cuts has a surface along the cut.

    Args:
        prediction: Predicted classes, with two or three axes.
        label: True classes, of the same shape.
        classes: Number of classes, the background included.
        mask: Where the score counts, a boolean tensor of the same shape; None: everywhere.
        spacing: Millimetres per axis; None: 1, so that the distance is in pixels.
        regions: As in `dice`.

    Returns:
        A distance, or None if no structure is present or one is on one side only.
    """
    distances: list[float] = []
    for found, true in _structures(prediction, label, classes, mask, regions):
        if found.any() != true.any():
            return None
        if true.any():
            distances.append(_surface_distance(found, true, spacing))
    return _mean(distances)


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


def micro_iou(prediction: torch.Tensor, label: torch.Tensor) -> float:
    """Return the "IoU" of pFedNet's tables: accuracy / (2 - accuracy), the background included.

    It is the intersection over the union of all classes taken together, where a wrong voxel counts
    in the union twice.

    Args:
        prediction: Predicted classes, of any shape.
        label: True classes, of the same shape.

    Returns:
        A score in [0, 1].
    """
    correct = int((prediction == label).sum())
    return correct / (2 * label.numel() - correct)


def label_iou(prediction: torch.Tensor, label: torch.Tensor) -> float | None:
    """Return the "label IoU" of pFedNet's tables: `micro_iou` without the most frequent true class.

    With two classes it is the ordinary IoU of the rarer one.

    Args:
        prediction: Predicted classes, of any shape.
        label: True classes, of the same shape; of two equally frequent ones the lower is left out.

    Returns:
        A score in [0, 1], or None if no other class is present.
    """
    values, counts = torch.unique(label, return_counts=True)
    frequent = values[counts.argmax()]
    found, true = prediction != frequent, label != frequent
    both = int((found & true & (prediction == label)).sum())
    either = int(found.sum()) + int(true.sum()) - both
    return both / either if either else None


def sdwd(sites: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
    """Return the standard deviation over the sites of each parameter of their models.

    pFedNet's paper shows it as box plots and does not define it; this is the population's.

    Args:
        sites: The personal parameters of each site, of equal names and shapes.

    Returns:
        One number per parameter, in the order of the names, in the parameters' precision.
    """
    deviations = [torch.zeros(0)]
    for name in sites[0]:
        values = torch.stack([site[name].flatten() for site in sites])
        deviations.append(values.std(0, correction=0))
    return torch.cat(deviations)


def box_plot_summary(values: torch.Tensor) -> dict[str, float]:
    """Return minimum, quartiles, maximum and mean, as a box plot shows; empty without values."""
    if not len(values):
        return {}
    names = ("min", "q1", "median", "q3", "max")
    quantiles = np.quantile(values.numpy(), (0.0, 0.25, 0.5, 0.75, 1.0))
    return {**dict(zip(names, quantiles.tolist(), strict=True)), "mean": float(values.mean())}


def _structures(
    prediction: torch.Tensor,
    label: torch.Tensor,
    classes: int,
    mask: torch.Tensor | None,
    regions: Regions | None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (found, true) as boolean tensors for each structure."""
    for region in [(index,) for index in range(1, classes)] if regions is None else regions:
        found, true = region_mask(prediction, region), region_mask(label, region)
        yield (found, true) if mask is None else (found & mask, true & mask)


def region_mask(label: torch.Tensor, region: Sequence[int]) -> torch.Tensor:
    """Return a boolean mask of the pixels whose class belongs to a region.

    Args:
        label: Classes, of any shape.
        region: The classes of the region.
    """
    first, *others = region
    mask = label == first
    for other in others:
        mask = mask | (label == other)
    return mask


def _surface_distance(
    found: torch.Tensor, true: torch.Tensor, spacing: Sequence[float] | None
) -> float:
    """Return the HD95 of two structures, neither of them empty."""
    from monai.metrics.hausdorff_distance import compute_hausdorff_distance

    with warnings.catch_warnings():  # MONAI 1.5 and 1.6 warn about a call of their own
        warnings.filterwarnings("ignore", ".*always_return_as_numpy", FutureWarning)
        distance = compute_hausdorff_distance(
            y_pred=found[None, None],
            y=true[None, None],
            include_background=True,  # the one channel is the structure itself
            percentile=95,
            spacing=None if spacing is None else list(spacing),
        )
    return float(distance)


def _overlaps(
    prediction: torch.Tensor,
    label: torch.Tensor,
    classes: int,
    mask: torch.Tensor | None,
    regions: Regions | None,
    *,
    jaccard: bool,
) -> list[float]:
    scores: list[float] = []
    for found, true in _structures(prediction, label, classes, mask, regions):
        both, either = int((found & true).sum()), int((found | true).sum())
        if either:
            scores.append(both / either if jaccard else 2 * both / (either + both))
    return scores


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
