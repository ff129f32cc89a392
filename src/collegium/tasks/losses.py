"""Segmentation losses that count only pixels inside the field of view, and the focal loss.

MONAI's `MaskedDiceLoss` is not used. Up to 1.5 it multiplies the *logits* by the mask, before the
softmax, so that a pixel outside still counts with equal probabilities (fixed in 1.6 by their pull
request 8704). In 1.6 as before, it multiplies the label map by the mask before the one-hot
encoding, so that with `to_onehot_y` every pixel outside becomes a true background pixel.

All segmentation losses take logits (B, C, *spatial), labels (B, *spatial) of int64 and, optionally,
a boolean mask (B, *spatial) that is True where the loss counts. A mask without a single True gives
0 and a gradient of zeros. Half-precision logits are computed in float32.

Labels may also be probabilities, (B, C, *spatial) or of regions (B, R, *spatial), of floats: the
one-hot label of a class gives the value that its number gives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

from collegium.core.lazy import functional, torch
from collegium.core.tensors import at_least_float32
from collegium.errors import ConfigError
from collegium.tasks.metrics.overlap import region_mask

Loss: TypeAlias = "Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]"

SMOOTH = 1e-5
"""Keeps the soft Dice of a class defined that is absent from both prediction and label."""

_IGNORED = -100


def soft_dice_loss(
    logits: torch.Tensor,
    label: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    smooth: float = SMOOTH,
) -> torch.Tensor:
    """Return one minus the soft Dice of IOP-FL, GRACE, HarmoFL and FedDG.

    With p the softmax and g the one-hot label, (2 sum pg + smooth) / (sum p + sum g + smooth) for
    each class, summed over batch *and* space; then the mean over classes, the background included.

    Args:
        logits: (B, C, *spatial).
        label: (B, *spatial), int64, or probabilities (B, C, *spatial).
        mask: (B, *spatial), bool; outside it neither p nor g counts. None: everything counts.
        smooth: Keeps a class that is absent from both p and g defined.

    Returns:
        A scalar.
    """
    p = functional.softmax(at_least_float32(logits), dim=1)
    if label.is_floating_point():
        return _one_minus_dice(p, label, mask, smooth)
    return _one_minus_dice(p, _one_hot(label, p.shape[1]), mask, smooth)


def cross_entropy_loss(
    logits: torch.Tensor, label: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the cross-entropy, averaged over all pixels of the batch inside the mask.

    Args:
        logits: (B, C, *spatial).
        label: (B, *spatial), int64, or probabilities (B, C, *spatial).
        mask: (B, *spatial), bool. None: everything counts.

    Returns:
        A scalar.
    """
    logits = at_least_float32(logits)
    if mask is None:
        return _cross_entropy(logits, label, "mean")
    soft = label.is_floating_point()
    left = (
        label.masked_fill(~mask.unsqueeze(1), 0.0) if soft else label.masked_fill(~mask, _IGNORED)
    )
    total = _cross_entropy(logits, left, "sum")
    return total / mask.sum().clamp(min=1)


def dice_ce_loss(
    logits: torch.Tensor, label: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sum of soft Dice loss and cross-entropy, from one softmax.

    Args:
        logits: (B, C, *spatial).
        label: (B, *spatial), int64, or probabilities (B, C, *spatial).
        mask: (B, *spatial), bool. None: everything counts.

    Returns:
        A scalar.
    """
    from collegium.core.quick_operators import planar

    log_p = functional.log_softmax(planar(at_least_float32(logits)), dim=1)
    g = label if label.is_floating_point() else _one_hot(label, log_p.shape[1])
    p, g = _inside(log_p.exp(), g, mask)
    g = g.to(log_p) if g.dtype == torch.bool else g
    pixels = log_p[:, 0].numel() if mask is None else mask.sum().clamp(min=1)
    return _one_minus_dice(p, g, None, SMOOTH) - (log_p * g).sum() / pixels


def region_dice_loss(
    logits: torch.Tensor,
    regions: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    smooth: float = SMOOTH,
) -> torch.Tensor:
    """Return one minus the soft Dice of regions that may overlap, averaged over the regions.

    With p the sigmoid, (2 sum pg + smooth) / (sum p + sum g + smooth) for each region, summed over
    batch and space.

    Args:
        logits: (B, R, *spatial).
        regions: (B, R, *spatial), bool or probabilities.
        mask: (B, *spatial), bool. None: everything counts.
        smooth: Keeps a region that is absent from both defined.

    Returns:
        A scalar.
    """
    return _one_minus_dice(torch.sigmoid(at_least_float32(logits)), regions, mask, smooth)


def region_cross_entropy_loss(
    logits: torch.Tensor, regions: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the binary cross-entropy, averaged over regions and over pixels inside the mask.

    Args:
        logits: (B, R, *spatial).
        regions: (B, R, *spatial), bool or probabilities.
        mask: (B, *spatial), bool. None: everything counts.

    Returns:
        A scalar.
    """
    logits = at_least_float32(logits)
    each = functional.binary_cross_entropy_with_logits(logits, regions.float(), reduction="none")
    if mask is None:
        return each.mean()
    inside = mask.unsqueeze(1).expand_as(each)
    return each.masked_fill(~inside, 0.0).sum() / inside.sum().clamp(min=1)


def region_dice_ce_loss(
    logits: torch.Tensor, regions: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sum of soft Dice loss and binary cross-entropy of regions.

    Args:
        logits: (B, R, *spatial).
        regions: (B, R, *spatial), bool or probabilities.
        mask: (B, *spatial), bool. None: everything counts.

    Returns:
        A scalar.
    """
    return region_dice_loss(logits, regions, mask) + region_cross_entropy_loss(
        logits, regions, mask
    )


def region_labels(label: torch.Tensor, regions: Iterable[Sequence[int]]) -> torch.Tensor:
    """Return which regions each pixel belongs to, (B, R, *spatial).

    Args:
        label: (B, *spatial), int64, or probabilities (B, C, *spatial), which give probabilities.
        regions: The classes of each region.
    """
    if label.is_floating_point():
        return torch.stack([label[:, [*region]].sum(dim=1) for region in regions], dim=1)
    return torch.stack([region_mask(label, region) for region in regions], dim=1)


def merge_unlabelled(
    logits: torch.Tensor, label: torch.Tensor, labelled: Collection[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and label in which the classes that masks do not annotate are background.

    Any of `LOSSES` between the two is the marginal loss of Shi et al. (2021,
    https://arxiv.org/abs/2007.03868): the probability of the merged background is the sum of those
    of the background and of all unlabelled classes, taken in log space, so that the softmax is
    computed once. Of the paper only the abstract could be read. With all classes labelled, the
    logits stay as they are.

    Args:
        logits: (B, C, *spatial).
        label: (B, *spatial), int64; a class that is not labelled counts as background.
        labelled: the classes that the masks annotate, without the background.

    Returns:
        Logits (B, 1 + labelled, *spatial), the merged background first and then the labelled
        classes in their order; and the label of the same shape with their numbers.

    Raises:
        ConfigError: the label is one of probabilities.
    """
    if label.is_floating_point():
        raise ConfigError(
            "masks here annotate some of the classes only, and a label of probabilities is of all: "
            "choose a site that annotates them all, or a known label."
        )
    channels, kept = at_least_float32(logits).unbind(dim=1), sorted(labelled)
    others = [channel for index, channel in enumerate(channels) if index not in kept]
    background = torch.logsumexp(torch.stack(others, dim=1), dim=1)
    merged = torch.stack([background, *(channels[index] for index in kept)], dim=1)
    number = [kept.index(index) + 1 if index in kept else 0 for index in range(len(channels))]
    return merged, torch.tensor(number, device=label.device)[label]


def exclusion_loss(
    logits: torch.Tensor,
    label: torch.Tensor,
    labelled: Collection[int],
    mask: torch.Tensor | None = None,
    *,
    form: Literal["dice", "ce"] = "dice",
) -> torch.Tensor:
    """Return how far the unlabelled classes overlap the labelled foreground, where they cannot be.

    With p_c the softmax of an unlabelled class and E the pixels of all labelled ones: "dice" is the
    mean over c of 2 sum p_c E / (sum p_c + sum E), "ce" the sum over c of E log(1 + p_c), averaged
    over all pixels. It goes with the marginal loss, see `merge_unlabelled`, and is 0 where all
    classes are labelled. The forms are as third parties describe them; the paper could not be read.

    Args:
        logits: (B, C, *spatial).
        label: (B, *spatial), int64.
        labelled: the classes that the masks annotate, without the background.
        mask: (B, *spatial), bool; None: everything counts.
        form: "dice" or "ce".

    Returns:
        A scalar.
    """
    channels = functional.softmax(at_least_float32(logits), dim=1).unbind(dim=1)
    outside = [p for index, p in enumerate(channels) if index and index not in labelled]
    if not outside:
        return 0.0 * logits.sum()
    p = torch.stack(outside, dim=1)
    foreground = torch.stack([label == index for index in labelled]).any(dim=0)
    if mask is not None:
        p, foreground = p.masked_fill(~mask.unsqueeze(1), 0.0), foreground & mask
    e = foreground.unsqueeze(1).to(p)
    if form == "ce":
        counted = label.numel() if mask is None else mask.sum().clamp(min=1)
        return (e * p.log1p()).sum() / counted
    space = [dim for dim in range(p.ndim) if dim != 1]
    either = p.sum(dim=space) + e.sum(dim=space)
    return (2 * (p * e).sum(dim=space) / either.clamp(min=1e-5)).mean()


def weighted_focal_loss(
    logits: torch.Tensor, label: torch.Tensor, alpha: torch.Tensor, *, gamma: float = 2.0
) -> torch.Tensor:
    """Return the class-weighted focal loss of FLamby's Fed-ISIC2019 and of GRACE.

    Easy cases count less. It is the mean over cases of -alpha_y (1 - p_y)^gamma log p_y, divided by
    the number of cases and not by the sum of their weights. MONAI's `FocalLoss` with softmax and
    `weight` divides by the number of cases times that of classes.

    Args:
        logits: (B, classes).
        label: (B,), int64.
        alpha: (classes,), the weight of every class.
        gamma: How much less easy cases count; 0 is weighted cross-entropy.

    Returns:
        A scalar.
    """
    log_p = functional.log_softmax(at_least_float32(logits), dim=1)
    log_p = log_p.gather(1, label.unsqueeze(1)).squeeze(1)
    return -(alpha[label] * (1 - log_p.exp()) ** gamma * log_p).mean()


LOSSES: Mapping[str, Loss] = {
    "dice": soft_dice_loss,
    "ce": cross_entropy_loss,
    "dice_ce": dice_ce_loss,
}
"""The losses of a segmentation into classes, by their names in a configuration."""

REGION_LOSSES: Mapping[str, Loss] = {
    "dice": region_dice_loss,
    "ce": region_cross_entropy_loss,
    "dice_ce": region_dice_ce_loss,
}
"""The losses of overlapping regions, by the same names."""


def _one_minus_dice(
    p: torch.Tensor, g: torch.Tensor, mask: torch.Tensor | None, smooth: float
) -> torch.Tensor:
    """Return 1 - the mean over channels of the soft Dice of p and g, both (B, C, *spatial)."""
    p, g = _inside(p, g, mask)
    space = [dim for dim in range(p.ndim) if dim != 1]
    both = (p * g).sum(dim=space)
    either = p.sum(dim=space) + g.sum(dim=space)
    return 1 - ((2 * both + smooth) / (either + smooth)).mean()


def _inside(
    p: torch.Tensor, g: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return p and g, both (B, C, *spatial), as zeros outside a mask.

    Products take a tenth of the time of `torch.masked_fill`, forward and backward; labels of floats
    may be undefined outside.
    """
    if mask is None:
        return p, g
    inside = mask.unsqueeze(1)
    left = g & inside if g.dtype == torch.bool else g.masked_fill(~inside, 0)
    return p * inside.to(p), left


def _one_hot(label: torch.Tensor, classes: int) -> torch.Tensor:
    """Return which class each pixel belongs to, (B, classes, *spatial), bool."""
    numbers = torch.arange(classes, device=label.device)
    return label.unsqueeze(1) == numbers.view(-1, *[1] * (label.ndim - 1))


def _cross_entropy(
    logits: torch.Tensor, label: torch.Tensor, reduction: Literal["mean", "sum"]
) -> torch.Tensor:
    """Return the cross-entropy of pixels that are not ignored.

    CUDA's kernel that adds them up adds in any order, and is refused by deterministic torch.
    """
    if logits.device.type == "cpu":
        return functional.cross_entropy(logits, label, ignore_index=_IGNORED, reduction=reduction)
    each = functional.cross_entropy(logits, label, ignore_index=_IGNORED, reduction="none")
    return each.mean() if reduction == "mean" else each.sum()
