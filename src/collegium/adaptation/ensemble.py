"""The mean output of the personal models, a baseline of IOP-FL (Jiang et al., 2023, Table II)."""

from collections.abc import Collection, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from collegium.adaptation.base import (
    GLOBAL,
    AdaptationRecord,
    AdaptationResult,
    Adapter,
    Cases,
    Deliver,
    Sources,
    predict_cases,
)
from collegium.core.settings import PositiveInt, settings


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


@settings
class Ensemble(Adapter):
    """The ensemble of the personal models: predictions from the mean of their logits.

    Attributes:
        with_global: whether the global model takes part too.
        batch_size: cases, slices or windows in one forward pass.
    """

    needs: ClassVar[Collection[str]] = ("personal",)

    with_global: bool = False
    batch_size: PositiveInt = 4

    def adapt(self, sources: Sources, cases: Cases, deliver: Deliver) -> AdaptationResult:
        """Predict with all models together. See `Adapter.adapt`."""
        names = sources.require_personal("ensemble")
        if self.with_global:
            sources.require_global("ensemble")
            names = [GLOBAL, *names]
        module = MeanOutput([sources.load(sources.models[name]) for name in names])
        for index, prediction in predict_cases(sources.task, module, cases, self.batch_size):
            deliver("", index, prediction)
        return AdaptationResult(AdaptationRecord(names))
