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

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from collegium.core.lazy import torch
from collegium.tasks.metrics.surface import Mask, bounding_box, surface_distances

Regions = Sequence[Sequence[int]]
"""The classes of each region."""

FOREGROUND: Regions = ((1,),)
"""The one structure of a case with two classes."""


class Structure:
    """One structure of a case in prediction and truth, from which each measure is taken once.

    Only the box that holds both is kept.

    Args:
        found: Where it was predicted.
        true: Where it is, of the same shape.
        spacing: Millimetres per axis; None: 1, so that distances are in pixels.
    """

    def __init__(self, found: Mask, true: Mask, spacing: Sequence[float] | None = None) -> None:
        box = bounding_box(found | true)
        self._found, self._true, self._spacing = found[box].copy(), true[box].copy(), spacing
        sizes = [int(np.count_nonzero(mask)) for mask in (self._found, self._true)]
        self.both = int(np.count_nonzero(self._found & self._true))
        self.either = sum(sizes) - self.both
        self.one_sided = self.either > 0 and 0 in sizes

    @cached_property
    def hd95(self) -> float:
        """The larger of the two directed 95th percentiles, of a structure that is on both sides."""
        distances = surface_distances(self._found, self._true, self._spacing)
        # in float32, as MONAI takes the percentile
        directed = [torch.quantile(torch.from_numpy(d).float(), 0.95) for d in distances]
        return float(max(directed))


def structures_of(
    prediction: torch.Tensor,
    label: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    spacing: Sequence[float] | None = None,
    regions: Regions = FOREGROUND,
) -> list[Structure]:
    """Return the structures of a case.

    Args:
        prediction: Predicted classes, of any shape; for distances with two or three axes.
        label: True classes, of the same shape.
        mask: Where the scores count, a boolean tensor of the same shape; None: everywhere. A
            structure that the mask cuts has a surface along the cut.
        spacing: Millimetres per axis; None: 1, so that distances are in pixels.
        regions: The classes of each structure.
    """

    def where(classes: torch.Tensor, region: Sequence[int]) -> Mask:
        found = region_mask(classes, region)
        inside: Mask = (found if mask is None else found & mask).cpu().numpy()
        return inside

    return [Structure(where(prediction, r), where(label, r), spacing) for r in regions]


def dice(structures: Sequence[Structure]) -> float | None:
    """Return the hard Dice, the mean over the structures that are present; None if none is."""
    return _mean([2 * s.both / (s.either + s.both) for s in structures if s.either])


def iou(structures: Sequence[Structure]) -> float | None:
    """Return the hard intersection over union, the mean over the structures that are present."""
    return _mean([s.both / s.either for s in structures if s.either])


def hd95(structures: Sequence[Structure]) -> float | None:
    """Return the 95th percentile of the Hausdorff distance, the mean over the structures present.

    The larger of the two directed 95th percentiles of the distances from one surface to the other.
    None if no structure is present or one is on one side only.
    """
    if any(s.one_sided for s in structures):
        return None
    return _mean([s.hd95 for s in structures if s.either])


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


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
