"""The module that holds a second head, in a file of its own so that torch is loaded late."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SecondHead(nn.Module):
    """A head whose output, times a gate, is added to that of the network's own head.

    Called as a layer, it passes on what it is given.

    Args:
        layer: the head.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        like = next(layer.parameters())
        self.gate = nn.Parameter(torch.zeros((), dtype=like.dtype, device=like.device))
        self._features: Tensor | None = None

    def forward(self, passed: Tensor) -> Tensor:
        """Return what it is given, as the last layer of an `nn.Sequential` has to.

        Args:
            passed: of any shape.
        """
        return passed

    def see(self, head: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Keep the features that enter the network's own head, in evaluation mode.

        Args:
            head: the network's own.
            inputs: what it is given.
        """
        self._features = None if head.training else inputs[0]

    def add(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        """Return the sum of both heads' outputs, in evaluation mode.

        Args:
            module: the network.
            inputs: what it was given.
            output: what its own head returned.
        """
        features, self._features = self._features, None
        if features is None or not self.gate:
            return None
        more: Tensor = self.gate * self.layer(features)
        return output + more
