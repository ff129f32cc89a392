"""The mean output of the personal models, a baseline of IOP-FL (Jiang et al., 2023, Table II)."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from collegium.adaptation.base import (
    GLOBAL,
    Account,
    Adapted,
    Adapter,
    Deliver,
    Images,
    Sources,
    groups,
    predict,
)


class MeanOutput(nn.Module):
    """Networks of one kind that answer together, by the mean of their outputs (logits)."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        if hasattr(members[0], "strides"):  # by which a task knows what sizes the network takes
            self.strides = members[0].strides

    def forward(self, images: Tensor) -> Tensor:
        """Give the mean output for (B, C, *spatial)."""
        return torch.stack([member(images) for member in self.members]).mean(dim=0)


@dataclass(frozen=True)
class Ensemble(Adapter):
    """Predicts from the mean of the personal models' logits.

    Attributes:
        with_global: whether the global model takes part too.
        batch_size: cases in one forward pass.
    """

    needs: ClassVar[Collection[str]] = ("personal",)

    with_global: bool = False
    batch_size: int = 4

    def adapt(self, sources: Sources, cases: Images, deliver: Deliver) -> Adapted:
        """Predict with all models together."""
        names = sources.require_personal("ensemble")
        if self.with_global:
            sources.require_global("ensemble")
            names = [GLOBAL, *names]
        module = MeanOutput([sources.open(sources.models[name]) for name in names])
        task = sources.task.batched(self.batch_size)
        for members, example in groups(cases, self.batch_size):
            for index, prediction in predict(task, module, members, example):
                deliver("", index, prediction)
        return Adapted(Account(names))
