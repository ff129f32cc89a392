"""Routing weights layer by layer (IOP-FL, Jiang et al., 2023, Eq. 5-6).

An adapted layer uses the sum of the same layer's weights in several models, its sources, each times
a coefficient that depends on the layer's own input.
"""

import math

from torch import Tensor, nn

from collegium.errors import ConfigError


class Router(nn.Module):
    """The coefficients of one layer, from the layer's input (Eq. 5).

    Mean over space, a linear layer to twice the channels, dropout, a linear layer to one number per
    source, sigmoid; nothing in between. The coefficients are per sample and need not sum to one.

    The last linear layer starts at weight 0 and bias -ln(sources - 1), so that every coefficient is
    exactly 1 / sources, as the paper's Algorithm 1 says; the released code starts it as torch does,
    near one half each, which makes the routed weights several times too large.

    Args:
        channels: of the layer's input.
        sources: how many models there are, the global one included.
        dropout: share of hidden units that are dropped during adaptation.

    Raises:
        ConfigError: there are fewer than two sources.
    """

    def __init__(self, channels: int, sources: int, dropout: float = 0.2) -> None:
        super().__init__()
        if sources < 2:
            raise ConfigError(f"routing needs two models or more, but there is {sources}")
        self.hidden = nn.Linear(channels, 2 * channels)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(2 * channels, sources)
        nn.init.zeros_(self.output.weight)
        nn.init.constant_(self.output.bias, -math.log(sources - 1))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the coefficients (B, sources) for inputs (B, channels, *spatial)."""
        if inputs.ndim > 2:  # not mean(), whose backward pass divides a whole map
            inputs = inputs.flatten(2).sum(dim=2) / inputs[0, 0].numel()
        coefficients: Tensor = self.output(self.dropout(self.hidden(inputs))).sigmoid()
        return coefficients


def route(weights: Tensor, coefficients: Tensor) -> Tensor:
    """Combine a layer's weights over the sources in one product (Eq. 6).

    Args:
        weights: (sources, *shape), the layer's weights or biases in every model.
        coefficients: (sources,), or (B, sources) for weights of its own for every sample.

    Returns:
        (*shape), or (B, *shape).
    """
    flat = coefficients @ weights.reshape(len(weights), -1)
    return flat.reshape(*coefficients.shape[:-1], *weights.shape[1:])
