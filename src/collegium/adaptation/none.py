"""No adaptation: what a hospital outside gets without any."""

from dataclasses import dataclass

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


@dataclass(frozen=True)
class NoAdaptation(Adapter):
    """The global model as it is: the yardstick of every adapter.

    Attributes:
        batch_size: cases in one forward pass.
    """

    batch_size: int = 4

    def adapt(self, sources: Sources, cases: Images, deliver: Deliver) -> Adapted:
        """Predict with the global model."""
        model = sources.require_global("none")
        module, task = sources.open(model), sources.task.batched(self.batch_size)
        for members, example in groups(cases, self.batch_size):
            for index, prediction in predict(task, module, members, example):
                deliver("", index, prediction)
        return Adapted(Account([GLOBAL]), model)
