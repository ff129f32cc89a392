"""Networks for tables: logistic regression and the multi-layer perceptron."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal

import torch
from annotated_types import MinLen
from torch import nn

from collegium.core.settings import Fraction, PositiveInt, validated
from collegium.models.ghost import GhostBatchNorm
from collegium.models.population import PopulationNorm


class TableNetwork(nn.Module):
    """The base class of networks for tables, from (B, in_features) float32 to (B, out_features).

    Code for images, such as the rotation task, refuses networks of this type.
    """


class Logistic(TableNetwork):
    """Logistic regression: one linear layer that gives logits. It has a head and no body.

    Args:
        in_features: Columns of the table.
        out_features: Classes; 1 for a single logit.
    """

    @validated
    def __init__(self, in_features: PositiveInt, out_features: PositiveInt) -> None:
        super().__init__()
        self.head = nn.Linear(in_features, out_features)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return logits (B, out_features) for (B, in_features)."""
        logits: torch.Tensor = self.head(features)
        return logits


NORMS: Mapping[str, Callable[[int], nn.Module]] = {
    "batch": GhostBatchNorm,
    "population": PopulationNorm,
    "none": nn.Identity,
}
"""The normalisations that `MLP` knows; by batch, with the whole batch as the virtual one."""


class MLP(TableNetwork):
    """A multi-layer perceptron: per hidden layer linear, normalisation, ReLU and dropout.

    A batch of a single row is normalised by the running statistics; see `GhostBatchNorm`.

    Args:
        in_features: Columns of the table.
        out_features: Classes; 1 for a single logit.
        hidden: Widths of the hidden layers, the first one first; at least one.
        norm: "batch", "population" (see `collegium.models.population.PopulationNorm`) or "none".
        dropout: Probability, in [0, 1).
    """

    @validated
    def __init__(
        self,
        in_features: PositiveInt,
        out_features: PositiveInt,
        *,
        hidden: Annotated[Sequence[PositiveInt], MinLen(1)] = (64, 32),
        norm: Literal["batch", "population", "none"] = "batch",
        dropout: Fraction = 0.0,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for source, width in zip([in_features, *hidden[:-1]], hidden, strict=True):
            layers += [
                nn.Linear(source, width, bias=norm == "none"),
                NORMS[norm](width),
                nn.ReLU(inplace=True),
                nn.Dropout(dropout),
            ]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(hidden[-1], out_features)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return logits (B, out_features) for (B, in_features)."""
        logits: torch.Tensor = self.head(self.body(features))
        return logits
