"""The module that holds a second network, in a file of its own so that torch is loaded late."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SecondNetwork(nn.Module):
    """A network and its weight in a mixture; called as a layer, it passes on what it is given.

    Args:
        network: the second network.
    """

    weight: Tensor

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        like = next(network.parameters())
        self.register_buffer("weight", torch.zeros((), dtype=like.dtype, device=like.device))

    def forward(self, passed: Tensor) -> Tensor:
        """Return what it is given, as the last layer of an `nn.Sequential` has to.

        Args:
            passed: of any shape.
        """
        return passed

    def mix(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        """Return the mixture, in evaluation mode and where this network has a weight.

        Args:
            module: the first network.
            inputs: what it was given.
            output: what it returned.
        """
        if module.training or not self.weight:
            return None
        other: Tensor = self.network(*inputs)
        if self.weight == 1:
            return other
        return self.weight * other + (1 - self.weight) * output
