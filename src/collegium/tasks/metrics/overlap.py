"""Metrics of one segmented case: overlap, surfaces, volumes, lesions, inside the field of view.

A structure is a class, or a region of several classes. The rules for empty structures of a case:

* absent from truth and prediction: undefined, and left out of the mean over structures (but no
  false-positive lesion is a count of 0);
* absent from one of the two only (missed, or a false alarm): Dice, IoU and surface Dice are 0;
  HD95 and ASSD are undefined *for the whole case*, since a mean over the other structures would
  hide the failure, and so is the relative volume difference after a false alarm.

An undefined score is `None`. It is never averaged and never taken as 0 or 1; code that averages
counts the undefined cases and reports them.

Truth and prediction are integer tensors of one shape, the shape of the case; class 0 is the
background. Both are cleared outside the mask before anything is measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from collegium.core.lazy import torch
from collegium.tasks.metrics.lesions import LesionCounts, count_lesions
from collegium.tasks.metrics.surface import (
    Distances,
    Mask,
    bounding_box,
    surface_distances,
    surface_overlap,
)

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
        tolerance: The tolerance of surface Dice, in mm; None: surface Dice is undefined.
        lesion_overlap: The least IoU of a lesion and a component that finds it, see
            `collegium.tasks.metrics.lesions.count_lesions`.
    """

    def __init__(
        self,
        found: Mask,
        true: Mask,
        spacing: Sequence[float] | None = None,
        *,
        tolerance: float | None = None,
        lesion_overlap: float = 0.0,
    ) -> None:
        box = bounding_box(found | true)
        self._found, self._true, self._spacing = found[box].copy(), true[box].copy(), spacing
        self._tolerance, self._lesion_overlap = tolerance, lesion_overlap
        self.sizes = int(np.count_nonzero(self._found)), int(np.count_nonzero(self._true))
        """The pixels of prediction and truth."""
        self.both = int(np.count_nonzero(self._found & self._true))
        self.either = sum(self.sizes) - self.both
        self.one_sided = self.either > 0 and 0 in self.sizes

    @cached_property
    def _distances(self) -> tuple[Distances, Distances]:
        return surface_distances(self._found, self._true, self._spacing)

    @cached_property
    def hd95(self) -> float:
        """The larger of the two directed 95th percentiles, of a structure that is on both sides."""
        # in float32, as MONAI takes the percentile
        directed = [torch.quantile(torch.from_numpy(d).float(), 0.95) for d in self._distances]
        return float(max(directed))

    @cached_property
    def assd(self) -> float:
        """The mean distance of all voxels of both surfaces, of a structure on both sides."""
        return float(np.concatenate(self._distances).mean())

    @cached_property
    def surface_dice(self) -> float | None:
        """Surface Dice, of a structure that is present; None without a tolerance or spacing."""
        if self._tolerance is None or self._spacing is None:
            return None
        if self.one_sided:
            return 0.0
        return surface_overlap(self._found, self._true, self._spacing, self._tolerance)

    @property
    def volume_difference(self) -> float | None:
        """Predicted minus true volume in ml; None unless three axes have a spacing."""
        if self._spacing is None or len(self._spacing) != 3:
            return None
        return (self.sizes[0] - self.sizes[1]) * math.prod(self._spacing) / 1000

    @cached_property
    def lesions(self) -> LesionCounts:
        """The lesions of both sides."""
        return count_lesions(self._found, self._true, self._lesion_overlap)


def structures_of(
    prediction: torch.Tensor,
    label: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    spacing: Sequence[float] | None = None,
    regions: Regions = FOREGROUND,
    tolerances: Sequence[float] | None = None,
    lesion_overlap: float = 0.0,
) -> list[Structure]:
    """Return the structures of a case.

    Args:
        prediction: Predicted classes, of any shape; for distances with two or three axes.
        label: True classes, of the same shape.
        mask: Where the scores count, a boolean tensor of the same shape; None: everywhere. A
            structure that the mask cuts has a surface along the cut.
        spacing: Millimetres per axis; None: 1, so that distances are in pixels.
        regions: The classes of each structure.
        tolerances: The tolerance of surface Dice for each structure, in mm; None: it is undefined.
        lesion_overlap: See `Structure`.
    """

    def where(classes: torch.Tensor, region: Sequence[int]) -> Mask:
        found = region_mask(classes, region)
        inside: Mask = (found if mask is None else found & mask).cpu().numpy()
        return inside

    of_each: Sequence[float | None] = tolerances or [None] * len(regions)
    return [
        Structure(
            where(prediction, region),
            where(label, region),
            spacing,
            tolerance=tolerance,
            lesion_overlap=lesion_overlap,
        )
        for region, tolerance in zip(regions, of_each, strict=True)
    ]


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


def assd(structures: Sequence[Structure]) -> float | None:
    """Return the average symmetric surface distance, the mean over the structures present.

    That of a structure is the mean over the voxels of both surfaces together of their distances to
    the other surface (Heimann et al., 2009, https://doi.org/10.1109/TMI.2009.2013851). None if no
    structure is present or one is on one side only.
    """
    if any(s.one_sided for s in structures):
        return None
    return _mean([s.assd for s in structures if s.either])


def surface_dice(structures: Sequence[Structure]) -> float | None:
    """Return surface Dice at a tolerance, the mean over the structures that are present.

    See `collegium.tasks.metrics.surface.surface_overlap`; 0 of a structure on one side only. None
    if no structure is present, or the case has no spacing, as the tolerance is in millimetres.
    """
    return _mean_of_defined([s.surface_dice for s in structures if s.either])


def volume_difference(structures: Sequence[Structure]) -> float | None:
    """Return predicted minus true volume in ml, the mean over the structures that are present.

    None if no structure is present, or the case has no spacing of three axes.
    """
    return _mean_of_defined([s.volume_difference for s in structures if s.either])


def relative_volume_difference(structures: Sequence[Structure]) -> float | None:
    """Return predicted minus true volume by the true one, the mean over the structures present.

    -1 of a structure that was missed. None if no structure is present, or one is predicted that is
    not there: no number stands for that.
    """
    sizes = [s.sizes for s in structures if s.either]
    if any(not true for _, true in sizes):
        return None
    return _mean([(found - true) / true for found, true in sizes])


def lesion_sensitivity(structures: Sequence[Structure]) -> float | None:
    """Return the fraction of lesions that were found, the mean over the structures with some.

    None if there is no lesion. See `collegium.tasks.metrics.lesions.count_lesions`.
    """
    counts = [s.lesions for s in structures]
    return _mean([c.found / c.lesions for c in counts if c.lesions])


def lesion_false_positives(structures: Sequence[Structure]) -> float | None:
    """Return how many predicted components find no lesion, the mean over all structures.

    0 where nothing was predicted, rightly or not. None if no structure is scored at all.
    """
    return _mean([float(s.lesions.false_positives) for s in structures])


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


def _mean_of_defined(values: Sequence[float | None]) -> float | None:
    """Return the mean; None if a value is, which then holds of all structures."""
    defined = [value for value in values if value is not None]
    return _mean(defined) if len(defined) == len(values) else None
