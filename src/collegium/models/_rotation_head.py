"""The head that learns the rotation task."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from collegium.errors import ConfigError
from collegium.models.rotation import TURNS


class RotationHead(nn.Module):
    """Global average pooling and a linear layer to four numbers.

    As a submodule it returns its input, so that networks that run their submodules one after the
    other, such as `nn.Sequential`, have the same output as before. Its weights are no `nn.Linear`,
    so that it is not taken for the head of the network.

    Args:
        channels: channels of the encoder's output.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(channels)  # as torch initialises a linear layer
        self.weight = nn.Parameter(torch.empty(TURNS, channels).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(TURNS).uniform_(-bound, bound))

    def forward(self, features: Tensor) -> Tensor:
        """Return the input."""
        return features

    def logits(self, features: Tensor) -> Tensor:
        """Return (B, 4) for features (B, channels, *spatial) or (B, channels).

        Raises:
            ConfigError: the features have another number of channels.
        """
        channels = self.weight.shape[1]
        if features.ndim < 2 or features.shape[1] != channels:
            raise ConfigError(
                f"the rotation head was made for {channels} channels, but the encoder returns "
                f"{tuple(features.shape)}; let the last submodule of roles['encoder'] end with the "
                f"layer that returns the encoder's output"
            )
        pooled = features.flatten(2).mean(dim=2) if features.ndim > 2 else features
        return functional.linear(pooled, self.weight, self.bias)
