"""The mean output of the personal models, a baseline of IOP-FL (Jiang et al., 2023, Table II)."""

from collections.abc import Collection
from typing import ClassVar

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
        from collegium.adaptation._mean_output import MeanOutput

        names = sources.require_personal("ensemble")
        if self.with_global:
            sources.require_global("ensemble")
            names = [GLOBAL, *names]
        module = MeanOutput([sources.load(sources.models[name]) for name in names])
        for index, prediction in predict_cases(sources.task, module, cases, self.batch_size):
            deliver("", index, prediction)
        return AdaptationResult(AdaptationRecord(names))
