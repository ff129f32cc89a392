"""Networks for tables: logistic regression and the multi-layer perceptron."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from collegium.models._settings import at_least, require
from collegium.models.ghost import GhostBatchNorm


class TableNetwork(nn.Module):
    """A network that takes rows of a table, (B, in_features) float32, and gives (B, out_features).

    It says so by its type: what is made for images, such as the rotation task, refuses it.
    """


class Logistic(TableNetwork):
    """Logistic regression: one linear layer that gives logits. It has a head and no body.

    Args:
        in_features: Columns of the table.
        out_features: Classes; 1 for a single logit.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        sizes = {"in_features": in_features, "out_features": out_features}
        require("logistic", *at_least(1, sizes))
        self.head = nn.Linear(in_features, out_features)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Give logits (B, out_features)."""
        logits: torch.Tensor = self.head(features)
        return logits


NORMS: Mapping[str, Callable[[int], nn.Module]] = {"batch": GhostBatchNorm, "none": nn.Identity}
"""The normalisations that `MLP` knows; by batch, with the whole batch as the virtual one."""


class MLP(TableNetwork):
    """A multi-layer perceptron: per hidden layer linear, normalisation, ReLU and dropout.

    A batch of a single row is normalised by the running statistics; see `GhostBatchNorm`.

    Args:
        in_features: Columns of the table.
        out_features: Classes; 1 for a single logit.
        hidden: Widths of the hidden layers, the first one first; at least one.
        norm: "batch" or "none".
        dropout: Probability, in [0, 1).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        hidden: Sequence[int] = (64, 32),
        norm: str = "batch",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        require(
            "mlp",
            *at_least(1, {"in_features": in_features, "out_features": out_features}),
            ("hidden", hidden, "at least one width", bool(hidden) and min(hidden) >= 1),
            ("norm", norm, " or ".join(NORMS), norm in NORMS),
            ("dropout", dropout, "at least 0 and below 1", 0 <= dropout < 1),
        )
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
        """Give logits (B, out_features)."""
        logits: torch.Tensor = self.head(self.body(features))
        return logits
