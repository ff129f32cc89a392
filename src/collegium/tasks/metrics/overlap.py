"""Metrics of one segmented case: hard overlap and surface distance, inside the field of view.

A structure is a class, or a region of several classes. The rules for empty structures of a case:

* absent from truth and prediction: undefined, and left out of the mean over structures;
* absent from one of the two only (missed, or a false alarm): Dice and IoU are 0, and HD95 is
  undefined *for the whole case*, since a mean over the other structures would hide the failure.

An undefined score is `None`. It is never averaged and never taken as 0 or 1; code that averages
counts the undefined cases and reports them.

Truth and prediction are integer tensors of one shape, the shape of the case; class 0 is the
background. Both are cleared outside the mask before anything is measured.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

Regions = Sequence[Sequence[int]]
"""The classes of each region."""

FOREGROUND: Regions = ((1,),)
"""The one structure of a case with two classes."""


def dice(
    prediction: torch.Tensor,
    label: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    regions: Regions = FOREGROUND,
) -> float | None:
    """Return the hard Dice, the mean over the structures that are defined.

    Args:
        prediction: Predicted classes, of any shape.
        label: True classes, of the same shape.
        mask: Where the score counts, a boolean tensor of the same shape; None: everywhere.
        regions: The classes of each structure.

    Returns:
        A score in [0, 1], or None if no structure is present.
    """
    overlaps = _overlaps(prediction, label, mask, regions)
    return _mean([2 * both / (either + both) for both, either in overlaps])


def iou(
    prediction: torch.Tensor,
    label: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    regions: Regions = FOREGROUND,
) -> float | None:
    """Return the hard intersection over union, the mean over the structures that are defined.

    Args:
        prediction: Predicted classes, of any shape.
        label: True classes, of the same shape.
        mask: As in `dice`.
        regions: As in `dice`.

    Returns:
        A score in [0, 1], or None if no structure is present.
    """
    return _mean([both / either for both, either in _overlaps(prediction, label, mask, regions)])


def hd95(
    prediction: torch.Tensor,
    label: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    spacing: Sequence[float] | None = None,
    regions: Regions = FOREGROUND,
) -> float | None:
    """Return the 95th percentile of the Hausdorff distance, the mean over the structures present.

    The larger of the two directed 95th percentiles of the distances from one surface to the other.
    A structure that the mask cuts has a surface along the cut.

    Args:
        prediction: Predicted classes, with two or three axes.
        label: True classes, of the same shape.
        mask: As in `dice`.
        spacing: Millimetres per axis; None: 1, so that the distance is in pixels.
        regions: As in `dice`.

    Returns:
        A distance, or None if no structure is present or one is on one side only.
    """
    distances: list[float] = []
    for found, true in _structures(prediction, label, mask, regions):
        if found.any() != true.any():
            return None
        if true.any():
            distances.append(_surface_distance(found, true, spacing))
    return _mean(distances)


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


def _structures(
    prediction: torch.Tensor, label: torch.Tensor, mask: torch.Tensor | None, regions: Regions
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (found, true) as boolean tensors for each structure."""
    for region in regions:
        found, true = region_mask(prediction, region), region_mask(label, region)
        yield (found, true) if mask is None else (found & mask, true & mask)


def _overlaps(
    prediction: torch.Tensor, label: torch.Tensor, mask: torch.Tensor | None, regions: Regions
) -> Iterator[tuple[int, int]]:
    """Yield the pixels in the intersection and in the union of each structure that is present."""
    for found, true in _structures(prediction, label, mask, regions):
        either = int((found | true).sum())
        if either:
            yield int((found & true).sum()), either


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


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
