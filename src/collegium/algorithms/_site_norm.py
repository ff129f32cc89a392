"""FedRDN's layer before a network: images less a site's mean, by its standard deviation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from collegium.algorithms._input_layers import first_layer

NORM = "site_norm"
"""The name of the layer among a network's submodules."""

EPS = 1e-8
"""The least standard deviation, so that a constant channel is not divided by 0."""


class SiteNorm(nn.Module):
    """The mean and the standard deviation of each channel, (2, C).

    As a submodule it returns its input; it normalises in evaluation mode alone.

    Args:
        channels: channels of the images.
    """

    statistics: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        neutral = torch.stack([torch.zeros(channels), torch.ones(channels)])
        self.register_buffer("statistics", neutral)

    def forward(self, images: Tensor) -> Tensor:
        """Return the input."""
        return images


def normalised(images: Tensor, means: Tensor, deviations: Tensor) -> Tensor:
    """Return (images - mean) / deviation for each channel.

    Args:
        images: (B, C, *spatial).
        means: (1 or B, C).
        deviations: (1 or B, C).
    """
    shape = (-1, images.shape[1], *[1] * (images.ndim - 2))
    moved = images - means.to(images).reshape(shape)
    return moved / deviations.clamp_min(EPS).to(images).reshape(shape)


def statistics_of(images: list[Tensor], *, pooled: bool) -> Tensor:
    """Return mean and standard deviation of each channel over images, (2, C) in float64.

    Args:
        images: of shape (1, C, *spatial) each, or (slices, C, *spatial) of a volume that is
            processed slice by slice; of any size.
        pooled: whether the deviation is that of all pixels of all images (biased), or the mean over
            images of each one's own (unbiased).
    """
    rows = [image.transpose(0, 1).flatten(1).double() for image in images]  # (C, pixels)
    if pooled:
        count = sum(row.shape[1] for row in rows)
        mean = torch.stack([row.sum(1) for row in rows]).sum(0) / count
        squares = torch.stack([((row - mean[:, None]) ** 2).sum(1) for row in rows]).sum(0)
        return torch.stack([mean, (squares / count).sqrt()])
    means = torch.stack([row.mean(1) for row in rows]).mean(0)
    return torch.stack([means, torch.stack([row.std(1) for row in rows]).mean(0)])


def attach_site_norm(module: nn.Module) -> None:
    """Add a `SiteNorm` to a network, in place, through which its inputs pass in evaluation mode.

    Args:
        module: the network; its first convolution says how many channels images have.

    Raises:
        ConfigError: there is no convolution, or something has the layer's name already.
    """
    first = first_layer(
        module,
        (nn.modules.conv._ConvNd,),
        name=NORM,
        called="convolution",
        instead="choose a network for images, or another algorithm",
    )
    assert isinstance(first, nn.modules.conv._ConvNd)
    module.add_module(NORM, SiteNorm(first.in_channels).to(first.weight))
    module.register_forward_pre_hook(_normalise)


def _normalise(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return a network's inputs with the first normalised by its own layer, in evaluation mode."""
    norm = module.get_submodule(NORM)
    assert isinstance(norm, SiteNorm)
    if module.training:
        return None
    means, deviations = norm.statistics
    return (normalised(inputs[0], means[None], deviations[None]), *inputs[1:])
