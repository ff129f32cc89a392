"""The network of an ensemble."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class MeanOutput(nn.Module):
    """A network whose output is the mean of the outputs (logits) of several networks.

    Args:
        members: networks of one architecture.
    """

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        if hasattr(members[0], "strides"):  # the task pads images by them
            self.strides = members[0].strides

    def forward(self, images: Tensor) -> Tensor:
        """Return the mean output for (B, C, *spatial)."""
        return torch.stack([member(images) for member in self.members]).mean(dim=0)
