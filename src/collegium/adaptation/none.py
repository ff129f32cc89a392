"""No adaptation: the baseline of a hospital outside."""

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
class NoAdaptation(Adapter):
    """The unchanged global model: the baseline of every adapter.

    Attributes:
        batch_size: cases, slices or windows in one forward pass.
    """

    batch_size: PositiveInt = 4

    def adapt(self, sources: Sources, cases: Cases, deliver: Deliver) -> AdaptationResult:
        """Predict with the global model. See `Adapter.adapt`."""
        model = sources.require_global("none")
        module = sources.load(model)
        for index, prediction in predict_cases(sources.task, module, cases, self.batch_size):
            deliver("", index, prediction)
        return AdaptationResult(AdaptationRecord([GLOBAL]), model)
