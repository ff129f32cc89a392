"""HarmoFL's layer before a network: low-frequency amplitudes of all images become the same."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from collegium.algorithms._input_layers import first_layer
from collegium.heterogeneity.spectra import amplitude_window, as_images, transfer

NORM = "amplitude_norm"
"""The name of the layer among a network's submodules."""


class AmplitudeNorm(nn.Module):
    """The amplitudes that images are given; by number of pixels, so that image sizes may differ.

    As a submodule it returns its input, so that networks that run their submodules one after the
    other, such as `nn.Sequential`, do not run it at its place among them.

    Args:
        channels: channels of the images; 1 for rows of a table.
        axes: spatial axes, 2 or 3.
        radius: half-width of the window of frequencies.
    """

    amplitude: Tensor

    def __init__(self, channels: int, axes: int, radius: int) -> None:
        super().__init__()
        self.register_buffer("amplitude", torch.zeros(channels, *[2 * radius + 1] * axes))

    def forward(self, images: Tensor) -> Tensor:
        """Return the input."""
        return images

    def normalise(self, images: Tensor) -> Tensor:
        """Return (B, C, *spatial) or (B, features) with these amplitudes and the images' phases."""
        with torch.autocast(images.device.type, enabled=False):
            shaped = as_images(images)
            windows = self.amplitude[None] * math.prod(shaped.shape[2:])
            return transfer(shaped, windows).reshape(images.shape)


def amplitudes_of(image: Tensor, radius: int) -> Tensor:
    """Return the amplitudes of one image by its number of pixels, (C, 2 radius + 1, ...), float64.

    Args:
        image: (1, C, *spatial) or (1, features).
        radius: half-width of the window of frequencies.
    """
    shaped = as_images(image)
    windows = amplitude_window(shaped, radius / min(shaped.shape[2:]))
    return windows[0].double() / math.prod(shaped.shape[2:])


def attach_amplitude_norm(module: nn.Module, radius: int) -> None:
    """Add an `AmplitudeNorm` to a network, in place, through which all its inputs pass.

    Args:
        module: the network; its first convolution or linear layer says what images it takes.
        radius: half-width of the window of frequencies.

    Raises:
        ConfigError: there is no such layer, or something has the layer's name already.
    """
    first = first_layer(
        module,
        (nn.Linear, nn.modules.conv._ConvNd),
        name=NORM,
        called="convolution or linear layer",
        instead="set amplitudes to none",
    )
    assert isinstance(first, nn.Linear | nn.modules.conv._ConvNd)
    channels = 1 if isinstance(first, nn.Linear) else first.in_channels
    axes = 3 if isinstance(first, nn.Conv3d) else 2
    module.add_module(NORM, AmplitudeNorm(channels, axes, radius).to(first.weight))
    module.register_forward_pre_hook(_normalise)


def _normalise(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a network's inputs with the first normalised by the network's own layer."""
    norm = module.get_submodule(NORM)
    assert isinstance(norm, AmplitudeNorm)
    return (norm.normalise(inputs[0]), *inputs[1:])
