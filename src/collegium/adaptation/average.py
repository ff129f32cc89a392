"""The mean score of the personal models, a baseline of IOP-FL (Jiang et al., 2023, Table II)."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from collegium.adaptation.base import (
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
class Average(Adapter):
    """Every personal model predicts; scores are averaged, not weights or predictions.

    What a hospital gets on average that picks one of the personal models blindly. It gives as many
    predictions of a case as there are personal models, so it is for comparing methods, not for use.

    Attributes:
        batch_size: cases in one forward pass.
    """

    needs: ClassVar[Collection[str]] = ("personal",)

    batch_size: int = 4

    def adapt(self, sources: Sources, cases: Images, deliver: Deliver) -> Adapted:
        """Predict with every personal model."""
        names, task = sources.require_personal("average"), sources.task.batched(self.batch_size)
        for name in names:
            module = sources.open(sources.models[name])
            for members, example in groups(cases, self.batch_size):
                for index, prediction in predict(task, module, members, example):
                    deliver(name, index, prediction)
        return Adapted(Account(names))
