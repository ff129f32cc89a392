"""The unsupervised losses of IOP-FL's test-time routing (Jiang et al., 2023, Eq. 7-10).

All take softmax maps (B, classes, *spatial), class 0 being the background, and return a scalar.
With `inside`, bool (B, *spatial), other pixels do not count; a mask without any gives 0.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from collegium.core.lazy import functional, torch
from collegium.errors import ConfigError
from collegium.tasks import Task

if TYPE_CHECKING:
    from torch import Tensor


def class_logits(logits: Tensor, task: Task, adapter: str) -> Tensor:
    """Return logits of mutually exclusive classes.

    Regions may overlap: each counts as an image of its own with two classes, outside (with logit 0)
    and inside, whose softmax is the region's sigmoid. Losses are then means over the regions.

    Args:
        logits: the network's output, (B, channels, *spatial).
        task: has an attribute ``regions`` if the channels are regions.
        adapter: the adapter's name, for messages.

    Returns:
        (B, classes, *spatial); for regions (B * regions, 2, *spatial).

    Raises:
        ConfigError: the output has fewer than two classes.
    """
    if getattr(task, "regions", None):
        inside = logits.flatten(0, 1)
        return torch.stack([torch.zeros_like(inside), inside], dim=1)
    if logits.ndim < 2 or logits.shape[1] < 2:
        raise ConfigError(
            f"{adapter} learns from class probabilities, but the network's output has the shape "
            f"{tuple(logits.shape)}; choose the adapter none, or dsbn without pseudo_labels"
        )
    return logits


def counted_pixels(inside: Tensor | None, logits: Tensor, adapter: str) -> Tensor | None:
    """Return the pixels that count for logits of `class_logits`, once for each region.

    Args:
        inside: the pixels of the images that count, (B, *spatial); None: all.
        logits: (B, classes, *spatial); for regions (B * regions, 2, *spatial).
        adapter: the adapter's name, for messages.

    Returns:
        As many masks as there are logits, (B, *spatial) or (B * regions, *spatial); None: all.

    Raises:
        ConfigError: the network predicts something other than the pixels of its images.
    """
    if inside is None:
        return None
    size = tuple(inside.shape[1:])
    if not size or tuple(logits.shape[2:]) != size:
        raise ConfigError(
            f"{adapter}.field_of_view selects pixels, but for an input with the axes {size} the "
            f"network's output has the shape {tuple(logits.shape)}; set it to false"
        )
    return inside.repeat_interleave(len(logits) // len(inside), dim=0)


def masked_mean(values: Tensor, inside: Tensor | None = None) -> Tensor:
    """Return the mean of the values inside a mask, 0 if there are none.

    Args:
        values: of any shape.
        inside: bool, of the same shape; None: all.
    """
    if inside is None:
        return values.mean()
    return torch.where(inside, values, 0).sum() / inside.sum().clamp(min=1)


def consistency_loss(
    probabilities: Tensor, perturbed: Tensor, inside: Tensor | None = None
) -> Tensor:
    """Return the distance between two predictions of the same images (Eq. 7).

    The squared Euclidean distance of a pixel's two class vectors, as a mean over batch and pixels.
    The released code also averages over the classes, which divides it by their number.

    Args:
        probabilities: (B, classes, *spatial).
        perturbed: the prediction of the perturbed images, (B, classes, *spatial).
        inside: the pixels that count, (B, *spatial); None: all.

    Returns:
        A scalar.
    """
    distance: Tensor = (probabilities - perturbed).square().sum(dim=1)
    return masked_mean(distance, inside)


def shape_map(probabilities: Tensor, radius: int = 10, inside: Tensor | None = None) -> Tensor:
    """Return how much the foreground classes vary around each pixel (Eq. 8).

    The largest minus the smallest probability in the window of 2 radius + 1 pixels a side, clipped
    at the border, summed over the foreground classes. The paper gives no radius; 10 is the code's.
    The edge of a field of view is a border too.

    Args:
        probabilities: (B, classes, *spatial), with two or three spatial axes.
        radius: of the window, in pixels.
        inside: the pixels that count, (B, *spatial); None: all.

    Returns:
        (B, *spatial); without a meaning outside.

    Raises:
        ConfigError: ``radius`` is negative, or there are not two or three spatial axes.
    """
    if radius < 0:
        raise ConfigError(f"the radius of the shape loss is {radius}; give a whole number from 0")
    if probabilities.ndim not in (4, 5):
        raise ConfigError(
            f"the shape loss needs images or volumes, but the prediction has the shape "
            f"{tuple(probabilities.shape)}; leave it out, e.g. with terms=[consistency,entropy]"
        )
    pool = functional.max_pool2d if probabilities.ndim == 4 else functional.max_pool3d
    window = partial(pool, kernel_size=2 * radius + 1, stride=1, padding=radius)
    foreground = probabilities[:, 1:]
    highest, lowest = foreground, -foreground
    if inside is not None:
        outside = ~inside.unsqueeze(1)
        highest, lowest = (side.masked_fill(outside, -math.inf) for side in (highest, lowest))
    variation: Tensor = window(highest) + window(lowest)
    return variation.sum(dim=1)


def shape_loss(probabilities: Tensor, radius: int = 10, inside: Tensor | None = None) -> Tensor:
    """Return the mean of `shape_map` over batch and pixels (Eq. 8-9).

    Eq. 9 as printed sums over all pixels, which would dominate the other terms; the released code
    takes 1e-6 times the Euclidean norm of the map, which is negligible.

    Args:
        probabilities: (B, classes, *spatial), with two or three spatial axes.
        radius: of the window of `shape_map`, in pixels.
        inside: the pixels that count, (B, *spatial); None: all.

    Returns:
        A scalar.
    """
    return masked_mean(shape_map(probabilities, radius, inside), inside)


def entropy_loss(probabilities: Tensor, inside: Tensor | None = None) -> Tensor:
    """Return the mean entropy of a pixel's class vector in nats (Eq. 9).

    The released code sums over the batch before it averages and divides by ln 2, so that its weight
    grows with the batch.

    Args:
        probabilities: (B, classes, *spatial).
        inside: the pixels that count, (B, *spatial); None: all.

    Returns:
        A scalar, with a finite gradient at 0.
    """
    log = probabilities.clamp(min=torch.finfo(probabilities.dtype).tiny).log()
    return -masked_mean((probabilities * log).sum(dim=1), inside)
