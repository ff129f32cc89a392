"""TabNet (Arik and Pfister, AAAI 2021, https://arxiv.org/abs/1908.07442)."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor, nn
from torch.nn import functional

from collegium.core.settings import NonNegativeInt, PositiveInt, Share, validated
from collegium.errors import ConfigError
from collegium.models._settings import require
from collegium.models.ghost import GhostBatchNorm
from collegium.models.tables import TableNetwork


def sparsemax(scores: Tensor) -> Tensor:
    """Return the Euclidean projection of each row onto the probability simplex.

    The closed form of Martins and Astudillo (2016, https://arxiv.org/abs/1602.02068), Algorithm 1:
    max(z - tau, 0), with tau such that the entries sum to 1.

    Args:
        scores: (B, entries).

    Returns:
        (B, entries), at least 0; every row sums to 1.
    """
    scores = scores - scores.amax(dim=1, keepdim=True)  # changes nothing but the rounding
    ordered = scores.sort(dim=1, descending=True).values
    sums = ordered.cumsum(dim=1)
    ranks = torch.arange(1, scores.shape[1] + 1, device=scores.device, dtype=scores.dtype)
    supported = (1 + ranks * ordered > sums).sum(dim=1, keepdim=True)  # k(z)
    supported = supported.clamp(min=1)  # a row of NaN supports nothing, and stays NaN
    tau = (sums.gather(1, supported - 1) - 1) / supported
    return functional.relu(scores - tau)


class TabNet(TableNetwork):
    """TabNet for tables of numbers: steps that each use a few columns, selected row by row.

    With f the columns, normalised over the batch, step i selects by sparsemax and transforms:

        M[i] = sparsemax(P[i-1] h_i(a[i-1])),   P[i] = prod_{j <= i} (gamma - M[j])
        d[i], a[i] = f_i(M[i] f),   logits = W sum_i ReLU(d[i])

    h_i is a linear layer and ghost batch normalisation. f_i is a feature transformer: layers
    (linear, ghost batch normalisation, gated linear unit), the first ones shared by all steps, each
    but the first added to its input and scaled by sqrt(0.5). a[0] comes from a separate
    transformer.

    As in the authors' code, steps share linear layers but not the normalisation after them, no
    linear layer has a bias, and weights start from Glorot's uniform distribution. There are
    `n_steps` masks, whereas the authors' code counts the transformer of a[0] as a step too. Left
    out: the sparsity loss, which would have to be a part of the task's loss (it is computed from
    `masks`), and the decoder for self-supervised learning.

    Args:
        in_features: Columns of the table.
        out_features: Classes; 1 for a single logit.
        groups: Lists of columns (counted from 0) that share one entry of the mask, such as the
            one-hot columns of one category. A column in no list has a separate entry.
        n_d: Width of the decision d.
        n_a: Width of the attention a.
        n_steps: Decision steps.
        gamma: How freely a column may be used again; at 1 it is used in one step only.
        n_independent: Layers of a feature transformer that belong to one step.
        n_shared: Layers that all steps share.
        virtual_batch_size: Rows of a virtual batch, at least 2; see `GhostBatchNorm`.
        momentum: Weight of the new statistics in the running ones, as in torch. (In the paper it is
            the weight of the old ones, 0.6 to 0.98; at 0.98, here 0.02, they still lag far behind
            after the few steps of a first round.)
    """

    _entry: Tensor

    @validated
    def __init__(
        self,
        in_features: PositiveInt,
        out_features: PositiveInt,
        *,
        groups: Sequence[Sequence[int]] | None = None,
        n_d: PositiveInt = 8,
        n_a: PositiveInt = 8,
        n_steps: PositiveInt = 3,
        gamma: Annotated[float, Ge(1)] = 1.3,
        n_independent: NonNegativeInt = 2,
        n_shared: NonNegativeInt = 2,
        virtual_batch_size: Annotated[int, Ge(2)] = 128,
        momentum: Share = 0.1,
    ) -> None:
        super().__init__()
        layers = n_independent + n_shared
        require("tabnet", ("n_shared", n_shared, "1 or more, or n_independent", layers >= 1))
        entries = _entries(groups or (), in_features)
        self.n_d, self.gamma, self.entries = n_d, gamma, max(entries) + 1
        self.register_buffer("_entry", torch.tensor(entries), persistent=False)
        norm = partial(GhostBatchNorm, virtual_batch_size=virtual_batch_size, momentum=momentum)
        widths = [in_features, *[n_d + n_a] * layers]
        self.norm = GhostBatchNorm(in_features, momentum=momentum)
        self.shared = _gated_layers(widths[: n_shared + 1])
        transformer = partial(_FeatureTransformer, n_shared, widths, norm)
        self.start = transformer()
        self.attentions = nn.ModuleList(
            nn.Sequential(_linear(n_a, self.entries), norm(self.entries)) for _ in range(n_steps)
        )
        self.transformers = nn.ModuleList(transformer() for _ in range(n_steps))
        self.head = _linear(n_d, out_features)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits (B, out_features) for (B, in_features)."""
        decisions = [decision for _, decision in self._steps(features)]
        logits: Tensor = self.head(torch.stack(decisions).sum(dim=0))
        return logits

    def masks(self, features: Tensor) -> Tensor:
        """Return the masks of all steps, (n_steps, B, entries), for (B, in_features).

        An entry is a column or a group, numbered by its first column. In training mode running
        statistics are updated.
        """
        return torch.stack([mask for mask, _ in self._steps(features)])

    def _steps(self, features: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield mask and decision of every step."""
        features = self.norm(features)
        attended = self.start(features, self.shared)[:, self.n_d :]  # a[0]
        prior = features.new_ones(len(features), self.entries)  # P[0]
        for attention, transformer in zip(self.attentions, self.transformers, strict=True):
            mask = sparsemax(prior * attention(attended))  # M[i]
            prior = prior * (self.gamma - mask)  # P[i]
            split = transformer(mask[:, self._entry] * features, self.shared)
            attended = split[:, self.n_d :]  # a[i]
            yield mask, functional.relu(split[:, : self.n_d])  # d[i]


class _FeatureTransformer(nn.Module):
    """The layers of one step, after the shared ones, and the normalisation after each layer."""

    def __init__(
        self, n_shared: int, widths: Sequence[int], norm: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.own = _gated_layers(widths[n_shared:])
        self.norms = nn.ModuleList(norm(2 * width) for width in widths[1:])

    def forward(self, features: Tensor, shared: nn.ModuleList) -> Tensor:
        layers = zip((*shared, *self.own), self.norms, strict=True)
        for number, (layer, norm) in enumerate(layers):
            gated = functional.glu(norm(layer(features)), dim=1)
            features = (features + gated) * math.sqrt(0.5) if number else gated
        return features


def _linear(in_features: int, out_features: int) -> nn.Linear:
    """Return a linear layer without bias, from Glorot's uniform distribution."""
    layer = nn.Linear(in_features, out_features, bias=False)
    nn.init.xavier_uniform_(layer.weight)
    return layer


def _gated_layers(widths: Sequence[int]) -> nn.ModuleList:
    """Return linear layers from width to width, each twice as wide for the gate."""
    return nn.ModuleList(_linear(source, 2 * width) for source, width in pairwise(widths))


def _entries(groups: Sequence[Sequence[int]], columns: int) -> list[int]:
    """Return the entry of the mask that belongs to each column."""
    owners = [("column", column) for column in range(columns)]
    for number, group in enumerate(groups):
        for column in group:
            if not 0 <= column < columns or owners[column][0] == "group":
                raise ConfigError(
                    f"model.groups names column {column!r} of {columns} for the model 'tabnet': "
                    f"name each column once at most, counted from 0."
                )
            owners[column] = "group", number
    entries = {owner: entry for entry, owner in enumerate(dict.fromkeys(owners))}
    return [entries[owner] for owner in owners]
