"""Population normalisation, our own reading of Wang et al. (CVPR 2025)."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn


class PopulationNorm(nn.Module):
    """Normalisation by a mean and a variance that are trained, and so the same at every site.

    y = weight (x - mean) / sqrt(exp(log_variance) + eps) + bias for each channel, in training and
    in evaluation alike. The layer has no running statistics: all four are parameters, which clients
    train and the server averages, and a batch may hold one example.

    This is our own reading of "Population Normalization for Federated Learning" (Wang et al.,
    CVPR 2025), of which the abstract could be read, and a layer in a benchmark of others, but
    neither the paper nor code of its authors. Unknown is how the paper trains mean and variance,
    and the noise that it adds for larger batches: here the loss of the task trains them, and there
    is no noise.

    Deviations from the benchmark's layer: it holds the variance itself, which training can make
    negative and weight decay pulls to 0. Here its logarithm is held, so that it stays positive, a
    step changes it by a factor whatever its size, and the average over sites is their geometric
    mean; weight decay leaves mean and logarithm alone. The benchmark also gathers running
    statistics, which it never uses.

    Trained by the task alone the layer is a map of each channel with a scale and a shift: nothing
    draws the mean towards that of its inputs. A start from statistics of the first batches at the
    sites could help and is left out, since a network has no exchange of its own before the first
    round.

    The layer has the role ``norm`` (`collegium.core.model_parts`) and no ``norm_statistics``: FedBN
    keeps all four parameters at home, so that the layer is no longer the same at every site; SiloBN
    is FedAvg; the adapters Tent and DSBN need batch normalisation and refuse the network.

    Args:
        num_features: Channels.
        eps: Added to the variance.
    """

    normalises: ClassVar[bool] = True
    undecayed: ClassVar[Sequence[str]] = ("mean", "log_variance")

    def __init__(self, num_features: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(num_features))
        self.log_variance = nn.Parameter(torch.zeros(num_features))
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.eps = eps

    def forward(self, features: Tensor) -> Tensor:
        """Return normalised features (B, num_features, *spatial)."""
        scale = self.weight * torch.rsqrt(self.log_variance.exp() + self.eps)
        shift = self.bias - self.mean * scale
        shape = (-1, *[1] * (features.ndim - 2))
        return features * scale.view(shape) + shift.view(shape)

    def extra_repr(self) -> str:
        """Return what distinguishes the layer from others, for its representation."""
        return f"{len(self.weight)}, eps={self.eps}"
