"""A network that standardises its inputs, so that the scaling is part of its model."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn


class Standardised(nn.Module):
    """A network on standardised features: each minus a shift, times a factor.

    Shift and factor are buffers: they are part of the model and are not trained. A missing feature,
    NaN, becomes 0 after scaling.

    Args:
        network: Takes (B, features).
        features: The number of features.
    """

    shift: torch.Tensor
    factor: torch.Tensor

    def __init__(self, network: nn.Module, features: int) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("shift", torch.zeros(features))
        self.register_buffer("factor", torch.ones(features))

    @property
    def roles(self) -> Mapping[str, Sequence[str]]:
        """The roles that the network declares, under its name here."""
        own: Mapping[str, Sequence[str]] = getattr(self.network, "roles", {})
        return {role: [f"network.{name}" for name in names] for role, names in own.items()}

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return the network's output for (B, features), which are standardised first."""
        scaled = torch.nan_to_num((features - self.shift) * self.factor, nan=0.0)
        output: torch.Tensor = self.network(scaled)
        return output
