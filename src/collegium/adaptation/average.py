"""The mean score of the personal models, a baseline of IOP-FL (Jiang et al., 2023, Table II)."""

from collections.abc import Collection
from typing import ClassVar

from collegium.adaptation.base import (
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
class Average(Adapter):
    """Separate predictions of all personal models, whose scores are averaged.

    It is the average result of a hospital that picks one of the personal models at random. It
    delivers a prediction of each case for every personal model, so it is for comparing methods, not
    for practical use.

    Attributes:
        batch_size: cases, slices or windows in one forward pass.
    """

    needs: ClassVar[Collection[str]] = ("personal",)

    batch_size: PositiveInt = 4

    def adapt(self, sources: Sources, cases: Cases, deliver: Deliver) -> AdaptationResult:
        """Predict with every personal model. See `Adapter.adapt`."""
        names = sources.require_personal("average")
        for name in names:
            module = sources.load(sources.models[name])
            for index, prediction in predict_cases(sources.task, module, cases, self.batch_size):
                deliver(name, index, prediction)
        return AdaptationResult(AdaptationRecord(names))
