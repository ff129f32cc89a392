"""Ghost batch normalisation (Hoffer et al., 2017, https://arxiv.org/abs/1705.08741)."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class GhostBatchNorm(nn.BatchNorm1d):
    """Batch normalisation with the statistics of virtual batches, parts of the batch.

    Each part updates the running statistics once. A last part of a single row, which has no
    variance, joins the part before it; a batch of a single row is normalised by the running
    statistics and does not update them. In evaluation mode this is plain batch normalisation.

    Args:
        num_features: Columns.
        virtual_batch_size: Rows of a part, at least 2; None: the whole batch.
        momentum: Weight of a part's statistics in the running ones, as in torch.
    """

    def __init__(
        self, num_features: int, virtual_batch_size: int | None = None, *, momentum: float = 0.1
    ) -> None:
        super().__init__(num_features, momentum=momentum)
        self.virtual_batch_size = virtual_batch_size

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name for it)
        """Normalise (B, num_features)."""
        if not self.training:
            return super().forward(input)
        if len(input) < 2:
            return functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        parts = torch.split(input, self._sizes(len(input)))
        return torch.cat([*map(super().forward, parts)])

    def _sizes(self, rows: int) -> list[int]:
        """Return the number of rows of every part."""
        size = self.virtual_batch_size or rows
        sizes = [size] * (rows // size)
        remainder = rows % size
        if remainder == 1 and sizes:
            sizes[-1] += 1
        elif remainder:
            sizes.append(remainder)
        return sizes
